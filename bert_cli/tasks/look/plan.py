"""`bert plan`: what a layout costs, whether it fits, and which one to take.

Nothing is built and TensorFlow is not loaded: it is arithmetic on the settings, so the layouts of a
cluster are compared on a laptop in a second. The estimates are those that `bert pretrain` prints and
that `parallel.layout auto` decides by.
"""

import json
import re
from contextlib import suppress
from dataclasses import asdict

from bert_cli.config.layout import (
    USABLE,
    blocks_on,
    count,
    fits,
    fullest,
    idle,
    parameters,
    propose,
    reduced_bytes,
    short,
    size,
)
from bert_cli.config.memory import Estimate, estimate, stages_of
from bert_cli.config.plan import describe, make_plan
from bert_cli.config.settings import parse_bytes
from bert_cli.config.tools import PlanSettings
from bert_cli.config.training import PretrainSettings
from bert_cli.errors import ConfigError
from bert_cli.tasks.run.corpora import with_sizes_of_records

KINDS = ("weights", "accumulators", "moments", "stashes", "working", "logits", "update", "total")


def run(settings: PlanSettings) -> None:
    """Print what the layout costs, the chosen one where the settings ask to choose.

    Raises ConfigError when it does not fit, or when one is to be chosen and not said for what.
    """
    devices = settings.devices
    memory = None if settings.memory is None else parse_bytes(settings.memory)
    settings = with_sizes_of_records(settings)
    chosen: PretrainSettings = settings
    if settings.parallel.layout == "auto":
        if devices is None or memory is None:
            missing = " and ".join(
                flag
                for flag, value in {"--devices": devices, "--memory": memory}.items()
                if value is None
            )
            raise ConfigError(
                "parallel.layout (auto): is chosen for a number of devices and the memory of each; "
                f"give {missing}"
            )
        chosen = propose(settings, devices, memory, settings.processes)
    tell(chosen)
    _refuse_other_processes(chosen, settings.processes)
    if devices is not None:
        _refuse_too_few(chosen, devices)
    if memory is not None:
        _judge(chosen, memory)
    if chosen is not settings:
        print(f"as flags:\n  {as_flags(chosen)}")
    if devices is not None and memory is not None:
        _compare(settings, chosen, devices, memory)


def tell(settings: PretrainSettings) -> None:
    """Print the plan, the table of memory by device, and the layout's other costs."""
    batch, parallel = settings.global_batch, settings.parallel
    stages, mapping = stages_of(settings)
    pipeline = f"{count(len(stages), 'stage')} on {count(max(mapping) + 1, 'device')}"
    again = (
        f"recomputing each {parallel.recompute_by}" if parallel.recompute else "no recomputation"
    )
    print(
        f"{parameters(settings) / 1e6:.1f} M parameters, precision {settings.precision}\n"
        f"{describe(make_plan(settings, None))}\n"
        f"  {count(batch.replicas, 'replica')} of {pipeline}, each "
        f"{count(batch.grad_acc_steps_per_replica, 'micro-batch')} of {batch.micro_batch_size} a step, {again}\n\n"
        f"{table(settings)}"
    )
    if len(stages) > 1:
        print(
            f"schedule {parallel.schedule}: devices stand idle for {idle(settings):.1%} of a step"
        )
    if batch.replicas > 1:
        whole = reduced_bytes(settings)
        sent = 2 * (batch.replicas - 1) / batch.replicas * whole
        print(
            f"replicas add up {size(whole)} of gradients each once a step, in {parallel.reduce_precision}; in a "
            f"ring each sends {size(sent)}"
        )


def table(settings: PretrainSettings) -> str:
    """Return the estimate of a replica, a device a row, in units of 0.1 MB that add up to the total.

    Below stands the sum of the fullest device, term by term.
    """
    stages, mapping = stages_of(settings)
    devices = [
        Estimate(**{name: round(n, -5) for name, n in asdict(one).items()})
        for one in estimate(settings)
    ]
    rows: list[tuple[str, ...]] = [("device", *KINDS, "stages")]
    for device, one in enumerate(devices):
        sizes = (megabytes(getattr(one, kind)) for kind in KINDS)
        rows.append((str(device), *sizes, blocks_on(stages, mapping, device)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *cells, last in rows:
        right = map(str.rjust, cells, widths[1:-1])
        lines.append("  ".join([first.ljust(widths[0]), *right, last]))
    number, one = max(enumerate(devices), key=lambda pair: pair[1].total)
    terms = {name: megabytes(getattr(one, name)) for name in KINDS}
    formula = "weights + accumulators + moments + max(stashes + working + logits, update)"
    numbers = re.sub(r"\w+", lambda word: terms.get(word[0], word[0]), formula)
    lines += ["", f"in MB (10^6 bytes): total = {formula}"]
    return "\n".join([*lines, f"device {number}: {terms['total']} = {numbers}"])


def megabytes(number: int) -> str:
    """Return bytes in MB with one decimal."""
    return f"{number / 1e6:,.1f}"


def _refuse_other_processes(settings: PretrainSettings, processes: int) -> None:
    replicas, _ = _shape(settings)
    if replicas % processes:
        raise ConfigError(
            f"--processes ({processes}): {count(replicas, 'replica')} cannot be divided among them; give another "
            "number, or --parallel.layout auto to choose a layout with the same numbers"
        )


def _refuse_too_few(settings: PretrainSettings, devices: int) -> None:
    replicas, each = _shape(settings)
    if replicas * each > devices:
        raise ConfigError(
            f"--devices ({devices}): the layout needs {replicas * each}, {count(replicas, 'replica')} of {each}; "
            "give --parallel.layout auto to choose one with the same numbers"
        )
    if replicas * each < devices:
        print(f"{count(devices - replicas * each, 'device')} of {devices} left over")


def _judge(settings: PretrainSettings, memory: int) -> None:
    device, one = fullest(settings)
    if not fits(settings, memory):
        raise ConfigError(
            f"--memory ({size(memory)}): device {device} needs {size(one.total)}, and {size(USABLE * memory)} of it "
            "can be filled; give --parallel.layout auto with --devices, --parallel.recompute, or a smaller "
            "micro-batch"
        )
    print(
        f"fits: device {device} needs {size(one.total)} of the {size(USABLE * memory)} that can be filled of "
        f"{size(memory)}"
    )


def _compare(settings: PlanSettings, chosen: PretrainSettings, devices: int, memory: int) -> None:
    """Say what `auto` would take where that is another layout, and what with recomputation."""
    parallel = settings.parallel
    ways = {"--parallel.layout auto": settings}
    if not parallel.recompute:
        again = settings.model_copy(
            update={"parallel": parallel.model_copy(update={"recompute": True})}
        )
        ways["--parallel.layout auto --parallel.recompute"] = again
    told = {_shape(chosen)}
    for flags, one in ways.items():
        with suppress(ConfigError):
            replicas, each = shape = _shape(propose(one, devices, memory, settings.processes))
            if shape not in told:
                print(f"{flags} takes {count(replicas, 'replica')} of {count(each, 'device')}")
            told.add(shape)


def _shape(settings: PretrainSettings) -> tuple[int, int]:
    return settings.global_batch.replicas, len(estimate(settings))


def as_flags(settings: PretrainSettings) -> str:
    """The layout as flags of `bert pretrain`, to be pasted into a shell."""
    batch, (stages, mapping) = settings.global_batch, stages_of(settings)
    flags = [
        "--parallel.layout given",
        f"--global-batch.replicas {batch.replicas}",
        f"--global-batch.grad-acc-steps-per-replica {batch.grad_acc_steps_per_replica}",
        f"--parallel.pipeline-stages '{json.dumps([short(stage) for stage in stages])}'",
        f"--parallel.pipeline-device-mapping '{json.dumps(mapping)}'",
    ]
    return " ".join(flags)
