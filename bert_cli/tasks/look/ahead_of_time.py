"""`bert plan --compile-for`: whether the step of training compiles and fits on devices that are not here."""

import re
import time
from typing import Any

from bert_cli.config.pretrain import PretrainSettings
from bert_cli.config.training import TrainSettings
from bert_cli.data.examples.reader import Batching
from bert_cli.errors import ConfigError, DeviceError, needs_extra
from bert_cli.parallel.engine import Batch
from bert_cli.planning import layout
from bert_cli.planning.targets import Target
from bert_cli.planning.workload import Workload
from bert_cli.processes import print_line, print_table, quiet_imports
from bert_cli.text import format_bytes, format_duration

EXTRAS = {"TPU": "compile-tpu", "GPU": "compile-cuda"}
PLATFORMS = {"TPU": "tpu", "GPU": "cuda"}
REMEDY = (
    "use --parallel.recompute, --parallel.shard-weights, a smaller micro-batch, a larger slice by --parallel.tensor, "
    "or a device with more memory"
)


def describe_target(settings: TrainSettings, target: Target) -> list[object]:
    """Return the devices, as JAX describes them. Raises ConfigError if no compiler is installed or knows them."""
    accelerator = target.accelerator
    where = f"--compile-for ({target.name})"
    with quiet_imports():
        from bert_cli.parallel.jax import ahead_of_time
        from bert_cli.tasks.run.resolve import runtime

        runtime(settings.engine).configure_runtime(settings.precision, settings.deterministic)
        try:
            return ahead_of_time.describe_devices(
                PLATFORMS[accelerator.kind], target.topology, accelerator.description
            )
        except ModuleNotFoundError:
            raise ConfigError(where, needs_extra(EXTRAS[accelerator.kind])) from None
        except ahead_of_time.CompilerError as error:
            problem = f"the compiler does not know this shape ({error})"
            raise ConfigError(where, problem, "use a published slice, such as v5e:2x4") from None


def report(order: TrainSettings, work: Workload, target: Target, devices: list[object]) -> None:
    """Compile the step, and print its memory.

    Raises DeviceError if the step does not fit the memory of a device.
    """
    accelerator = target.accelerator
    kind = accelerator.kind
    where = f"--compile-for ({target.name})"
    number = work.batch.replicas * len(layout.estimate(work))
    print_line(f"\ncompiling for {number} x {accelerator.title}, which may take minutes")
    began = time.monotonic()
    with quiet_imports():
        memory, needed = _memory(order, work, kind, devices)
    seconds = time.monotonic() - began
    estimated = layout.fullest(work, kind)[1].total
    limit = accelerator.memory
    least = "at least " if memory is None else ""
    size = f"{format_bytes(needed)} by the compiler"
    problem = f"a device needs {least}{size}, and has {format_bytes(limit)}"
    if memory is None:
        raise DeviceError(where, problem, REMEDY)
    print_line(f"compiled in {format_duration(seconds)}\n")
    difference = f"{estimated / needed - 1:+.0%}"
    rows = [
        ("needed by the compiler", format_bytes(needed)),
        ("  weights, moments and batch", format_bytes(memory.argument_size_in_bytes)),
        ("  temporaries", format_bytes(memory.temp_size_in_bytes)),
        ("the device has", format_bytes(limit)),
        ("estimated by bert plan", f"{format_bytes(estimated)} ({difference})"),
    ]
    print_table(("memory of each device", ""), rows, right=(1,))
    if needed > limit:
        raise DeviceError(where, problem, REMEDY)


def micro_batch(order: TrainSettings, work: Workload) -> Batch:
    """Return synthetic examples [1, B, ...] in the shape of a run's."""
    from bert_cli.data.finetune.features import FeatureReader
    from bert_cli.tasks.run import corpora
    from bert_cli.tasks.run.finetune import synthetic_examples

    size = work.batch.micro_batch_size
    batching = Batching(size, size)
    if isinstance(order, PretrainSettings):
        return corpora.synthetic(order, batching).first_micro_batches(1)
    features = synthetic_examples(work, size, work.head.outputs)
    return FeatureReader(features, batching, work.seed, work.max_seq_length)[0]


def _memory(
    order: TrainSettings, work: Workload, kind: str, devices: list[object]
) -> tuple[Any, int]:
    """Return the memory of the compiled step, None if it needs more than a device has, and the bytes that it needs."""
    from bert_cli.parallel.jax import ahead_of_time
    from bert_cli.tasks.run.build import model_of
    from bert_cli.tasks.run.resolve import layout_of

    model = model_of(work, work.head.outputs, has_values=False)
    engine = ahead_of_time.build_engine(model, layout_of(work), kind, devices)
    try:
        memory: Any = engine.lowered(micro_batch(order, work)).compile().memory_analysis()
    except ahead_of_time.CompilerError as error:
        if (size := refused_bytes(str(error))) is None:
            raise
        return None, size
    names = ("argument", "output", "temp", "generated_code")
    needed = sum(getattr(memory, f"{name}_size_in_bytes") for name in names)
    return memory, needed - memory.alias_size_in_bytes


def refused_bytes(message: str) -> int | None:
    """Return the bytes that a program needs at least, from the error of a compiler that refuses it for its memory.

    It says `Used 20.3G of 15.75G hbm` or `temporaries (82.4G) exceeds available HBM (15.75G)`.
    """
    size = re.search(r"([\d.]+)([KMGT])\b", message)
    if "RESOURCE_EXHAUSTED" not in message or size is None:
        return None
    return int(float(size[1]) * 2 ** (10 * (1 + "KMGT".index(size[2]))))
