"""`bert plan`: what a layout costs, whether it fits, and which one to take instead.

Nothing is built and TensorFlow is not loaded: it is arithmetic on the settings, so a cluster's worth
of layouts can be compared on a laptop in a second. The estimates are those that `bert pretrain`
prints and that `parallel.layout auto` decides by.
"""

from bert_cli.config.layout import (
    USABLE,
    Estimate,
    bubble,
    describe_layout,
    estimate,
    propose,
    reduced_bytes,
    short,
    size,
    stages_of,
    weights_of,
)
from bert_cli.config.plan import describe, make_plan
from bert_cli.config.schema import PlanSettings, PretrainSettings, bytes_of
from bert_cli.errors import ConfigError

COLUMNS = (
    "weights",
    "accumulators",
    "moments",
    "stashes",
    "activations",
    "logits",
    "transients",
    "total",
)


def run(settings: PlanSettings) -> None:
    """Print the costs of the layout.

    Raises ConfigError when it does not fit, or when one should be chosen and it is not said for what.
    """
    memory = bytes_of(settings.memory) if settings.memory is not None else None
    if settings.parallel.layout == "auto":
        if settings.devices is None or memory is None:
            raise ConfigError(
                "parallel.layout (auto): is chosen for devices and their memory; give --devices and --memory"
            )
        chosen: PretrainSettings = propose(settings, settings.devices, memory, settings.processes)
        print(_as_flags(chosen))
    else:
        chosen = settings
    tell(chosen)
    _refuse_what_does_not_fit(chosen, settings.devices, memory)
    if settings.parallel.layout == "given" and settings.devices is not None and memory is not None:
        _compare(chosen, propose(settings, settings.devices, memory, settings.processes))


def tell(settings: PretrainSettings) -> None:
    """Print the plan, the table of memory by device, and the other costs."""
    elements = weights_of(settings.bert_config)
    whole = sum(elements[name] for blocks, _ in stages_of(settings) for name in blocks)
    print(f"{whole / 1e6:.1f} M parameters\n{describe(make_plan(settings, None))}")
    for line in describe_layout(settings):
        print(f"  {line}")
    print(f"\n{table(settings)}\n")
    replicas = settings.global_batch.replicas
    print(f"idle time of the pipeline: {bubble(settings):.1%} of a step")
    if replicas > 1:
        sent = 2 * (replicas - 1) / replicas * reduced_bytes(settings)
        print(
            f"gradients: {size(reduced_bytes(settings))} a replica and step; a ring sends {size(sent)} from each"
        )


def table(settings: PretrainSettings) -> str:
    """The estimate, a device a row."""
    rows: list[tuple[str, ...]] = [("device", *COLUMNS, "stages")]
    for number, one in enumerate(estimate(settings)):
        stages = " | ".join(short(blocks) for blocks, on in stages_of(settings) if on == number)
        rows.append((str(number), *(size(_value(one, name)) for name in COLUMNS), stages))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in (0, len(row) - 1) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _value(one: Estimate, name: str) -> int:
    return int(getattr(one, name))


def _refuse_what_does_not_fit(
    settings: PretrainSettings, devices: int | None, memory: int | None
) -> None:
    found = estimate(settings)
    needed = len(found) * settings.global_batch.replicas
    if devices is not None and needed > devices:
        raise ConfigError(
            f"layout ({settings.global_batch.replicas} replicas x {len(found)} devices): needs {needed} devices, "
            f"there are {devices}; give --parallel.layout auto to choose one that fits"
        )
    if memory is None:
        return
    fullest = max(range(len(found)), key=lambda number: found[number].total)
    most = found[fullest].total
    if most > USABLE * memory:
        raise ConfigError(
            f"layout (device {fullest}): needs about {size(most)}, and {USABLE:.0%} of {size(memory)} can be "
            "filled; give --parallel.layout auto, --parallel.recompute, or a smaller micro-batch"
        )
    print(f"fits: at most {size(most)} of {size(memory)} on a device")


def _compare(given: PretrainSettings, other: PretrainSettings) -> None:
    here = given.global_batch.replicas, len(estimate(given))
    there = other.global_batch.replicas, len(estimate(other))
    if there != here:
        print(
            f"{there[0]} x {there[1]} devices (replicas x pipeline) would fit too, with more replicas and fewer "
            f"stages: {_as_flags(other)}"
        )


def _as_flags(settings: PretrainSettings) -> str:
    batch, parallel = settings.global_batch, settings.parallel
    flags = [
        f"--global-batch.replicas {batch.replicas}",
        f"--global-batch.grad-acc-steps-per-replica {batch.grad_acc_steps_per_replica}",
    ]
    if parallel.pipeline_stages is not None:
        stages = [short(blocks).split() for blocks in parallel.pipeline_stages]
        quoted = str(stages).replace("'", '"')
        flags.append(f"--parallel.pipeline-stages '{quoted}'")
        flags.append(f"--parallel.pipeline-device-mapping '{parallel.pipeline_device_mapping}'")
    return "layout: " + " ".join(flags)
