"""Compiles the step of the JAX engine for devices that this machine does not have.

XLA needs only a description of the devices. The engine's state and batches are shapes without values, so weights take
no memory; everything else is the engine of a training run.
"""

import math
import os
from collections.abc import Sequence
from typing import Any, cast

# Before JAX starts: it computes on the CPU, and looks for no TPU. libtpu allows one process at a time, by a file in
# /tmp that a killed process leaves behind; compiling takes no device, so other processes do not matter.
os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh as Grid
from jax.sharding import NamedSharding

from bert_cli.model.parts import Block
from bert_cli.parallel.cluster import Processes
from bert_cli.parallel.engine import Array, Batch, UpdateRequest
from bert_cli.parallel.jax.engine import JaxEngine
from bert_cli.parallel.jax.mesh import AXES
from bert_cli.parallel.runtime import Layout, Mesh, Model

CompilerError = jax.errors.JaxRuntimeError


class AheadOfTimeEngine(JaxEngine):
    """An engine whose state and batches are shapes."""

    def _place(
        self, rows: Sequence[Array], sharding: NamedSharding, *, is_stacked: bool
    ) -> jax.Array:
        shape = (len(rows), *rows[0].shape) if is_stacked else rows[0].shape
        return cast(jax.Array, jax.ShapeDtypeStruct(shape, rows[0].dtype, sharding=sharding))

    def _place_part(self, rows: Array, sharding: NamedSharding) -> jax.Array:
        return self._place([rows], sharding, is_stacked=False)

    def lowered(self, micro_batch: Batch) -> jax.stages.Lowered:
        """Return the step, to be compiled, for micro-batches of the shape of this one, [1, B, ...]."""
        number = self.layout.replicas * self.layout.accumulation
        batch = {
            name: np.broadcast_to(column, (number, *column.shape[1:]))
            for name, column in micro_batch.items()
        }
        counts = dict.fromkeys(("examples", "tokens", *self.head.COUNTS), 1.0)
        return self._lowered(self._arguments(batch, UpdateRequest(), counts))


def describe_devices(platform: str, topology: str, description: str) -> list[jax.Device]:
    """Return the devices of a topology; a GPU needs a description, the text of a GpuTargetConfigProto.

    Raises ModuleNotFoundError without the compiler of the platform, CompilerError for a shape that it does not know.
    """
    options: dict[str, Any] = {}
    if platform == "tpu":
        import libtpu  # noqa: F401

        sizes = [int(size) for size in topology.partition(":")[2].split("x")]
        options["topology_name"] = topology
        # A host has 2 x 2 chips, unless the slice has fewer.
        options["chips_per_host_bounds"] = [min(2, size) for size in sizes[:2]] + [1]
    else:
        import jax_plugins.xla_cuda12  # noqa: F401  registers the platform

        options |= {"topology_name": "", "target_config": description, "topology": topology}
    return list(topologies.get_topology_desc(platform=platform, **options).devices)


def build_engine(
    model: Model, layout: Layout, kind: str, devices: list[jax.Device]
) -> AheadOfTimeEngine:
    """Return the engine of a model on described devices of a kind, GPU or TPU."""
    names = tuple((f"jax:{kind}:{replica}",) for replica in range(layout.replicas))
    mesh = Mesh(layout, names, "", Processes(()))
    shape = layout.replicas, *layout.tensor_shape
    grid = Grid(np.array(devices[: math.prod(shape)]).reshape(shape), AXES)
    blocks: dict[str, Block] = {}
    jax.eval_shape(lambda: blocks.update(model.blocks()))  # Keras' variables become shapes
    return AheadOfTimeEngine(blocks, mesh, grid, model)
