#!/usr/bin/env python3
"""Compile the step of a run for TPUs or GPUs that this machine does not have, and print its memory by the compiler.

    scripts/compile_for.py v5e:4x4 --config pretrain_base_128_phase1 --global-batch.replicas 16
    scripts/compile_for.py h100:8 squad --config squad_base --global-batch.replicas 8
    scripts/compile_for.py cpu --config pretrain_tiny_128_phase1 --global-batch.replicas 1

It takes the flags of `bert plan`, for the engine jax and a given layout of one stage. Compiling takes seconds to
minutes, no data and no device. It needs the compilers that jax 0.10.2 takes, in an environment of their own:

    pip install jax==0.10.2 libtpu==0.0.42.1           # 0.7 GB, XLA for TPUs: v5e:4x4, v5p:2x2x2, v6e:16x16
    pip install jax==0.10.2 jax-cuda12-plugin==0.10.2  # 0.5 GB, XLA for GPUs and no CUDA: h100:8

`cpu` compiles for the processors of this machine, and needs neither.
"""

import math
import os
import sys
import time
from functools import partial
from typing import Any, cast

# Before JAX starts: it computes on the CPU, and looks for no TPU. libtpu allows one process at a time, by a file in
# /tmp that a killed process leaves behind; compiling takes no device, so other processes do not matter.
os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
os.environ["KERAS_BACKEND"] = "jax"

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh as Grid

from bert_cli.commands import COMMANDS
from bert_cli.config.pretrain import PretrainSettings
from bert_cli.config.training import TrainSettings
from bert_cli.data.examples.reader import Batching
from bert_cli.data.finetune.readers import FeatureReader
from bert_cli.parallel.cluster import Processes
from bert_cli.parallel.engine import UpdateRequest
from bert_cli.parallel.jax.engine import JaxEngine
from bert_cli.parallel.jax.mesh import AXES
from bert_cli.parallel.runtime import Mesh
from bert_cli.parse.load import load
from bert_cli.planning.layout import fullest
from bert_cli.tasks.run import corpora
from bert_cli.tasks.run.build import model_of
from bert_cli.tasks.run.finetune_steps import synthetic_examples
from bert_cli.tasks.run.resolve import layout_of, runtime

# XLA's GpuTargetConfigProto of a GPU; openxla/xla has more of them in xla/backends/gpu/target_config/specs.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352000000000 l2_cache_size: 52428800
  device_memory_size: 84942979072 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 10 } runtime_version { major: 12 minor: 8 }
"""


class AheadOfTimeEngine(JaxEngine):
    """The engine of a run, with shapes instead of its state and its batches."""

    def _place(self, rows: Any, sharding: Any, *, is_stacked: bool) -> Any:
        shape = (len(rows), *rows[0].shape) if is_stacked else rows[0].shape
        return jax.ShapeDtypeStruct(shape, rows[0].dtype, sharding=sharding)

    def _place_part(self, rows: Any, sharding: Any) -> Any:
        return self._place([rows], sharding, is_stacked=False)

    def lowered(self, micro_batch: Any) -> Any:
        """Return the step for micro-batches of the shape of this one, [1, B, ...]."""
        number = self.layout.replicas * self.layout.accumulation
        batch = {
            name: np.broadcast_to(column, (number, *column.shape[1:]))
            for name, column in micro_batch.items()
        }
        counts = dict.fromkeys(("examples", "tokens", *self.head.COUNTS), 1.0)
        return self.lowered_step(self._arguments(batch, UpdateRequest(), counts))


def described_devices(target: str) -> tuple[str, list[Any]]:
    """Return the kind of the devices of a target, and the devices."""
    name, _, shape = target.partition(":")
    if name == "cpu":
        return "CPU", jax.devices()
    if name == "h100":
        import jax_plugins.xla_cuda12  # noqa: F401  registers the platform

        options: dict[str, Any] = {"target_config": H100, "topology": f"1x1x{shape}"}
        return "GPU", topologies.get_topology_desc("", "cuda", **options).devices
    # A host has 2 x 2 chips, unless the slice has fewer.
    bounds = [min(2, int(size)) for size in shape.split("x")[:2]] + [1]
    return "TPU", topologies.get_topology_desc(target, "tpu", chips_per_host_bounds=bounds).devices


def engine_of(order: TrainSettings, kind: str, devices: list[Any]) -> AheadOfTimeEngine:
    """Return the engine of the work on described devices; its weights take no memory."""
    layout = layout_of(order)
    names = tuple((f"jax:{kind}:{replica}",) for replica in range(layout.replicas))
    shape = layout.replicas, *layout.tensor_shape
    grid = Grid(np.array(devices[: math.prod(shape)]).reshape(shape), AXES)
    model = model_of(order, 2)
    blocks: dict[str, Any] = {}
    build: Any = partial(cast(Any, model.blocks), seed=None)  # without initial values
    jax.eval_shape(lambda: blocks.update(build()))  # Keras' variables become shapes
    return AheadOfTimeEngine(blocks, Mesh(layout, names, "", Processes(())), grid, model)


def micro_batch_of(order: Any) -> Any:
    """Return synthetic examples [1, B, ...] in the shape of a run's."""
    size = order.global_batch.micro_batch_size
    batching = Batching(size, size)
    if isinstance(order, PretrainSettings):
        return corpora.synthetic(order, batching).first_micro_batches(1)
    features = synthetic_examples(order, size)
    return FeatureReader(features, batching, order.seed, order.max_seq_length)[0]


def main(target: str, *words: str) -> None:
    """Compile the step, and print the bytes of the program and the bytes that it moves."""
    is_named = bool(words) and not words[0].startswith("-")
    command = f"plan {words[0] if is_named else 'pretrain'}"
    flags = [*words[is_named:], "--engine", "jax", "--parallel.layout", "given"]
    flags += ["--parallel.pipeline-stages", "null", "--parallel.pipeline-device-mapping", "null"]
    order, _ = load(COMMANDS[command].settings_class(), flags, command)
    assert isinstance(order, TrainSettings)
    runtime("jax").configure_runtime(order.precision, order.deterministic)
    began = time.monotonic()
    engine = engine_of(order, *described_devices(target))
    compiled = engine.lowered(micro_batch_of(order)).compile()
    memory = compiled.memory_analysis()
    names = ("argument", "output", "temp", "generated_code")
    sizes = {name: getattr(memory, f"{name}_size_in_bytes") for name in names}
    needed = sum(sizes.values()) - memory.alias_size_in_bytes
    print(f"compiled in {time.monotonic() - began:.0f} s")
    print(f"a device needs {needed / 1e9:.3f} GB: {sizes}, aliases {memory.alias_size_in_bytes}")
    print(f"bert plan says {fullest(order)[1].total / 1e9:.3f} GB")
    if (moved := (compiled.cost_analysis() or {}).get("bytes accessed")) is not None:
        print(f"a device moves {moved / 1e9:.3f} GB in a step")


if __name__ == "__main__":
    main(*sys.argv[1:])
