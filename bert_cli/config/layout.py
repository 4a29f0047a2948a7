"""The idle time and traffic of a layout, and the choice of one: replicas first, then stages.

Pure arithmetic on the settings. Replicas communicate only in the all-reduce of the gradients, while stages
wait for one another: a layout is found by trying one device for each replica, then two, and so on, until the
model fits. The first and the last stage are on device 0, because they share the token embedding; each layer
is assigned to the least busy device with enough memory.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TypeVar

from bert_cli.config.memory import (
    LABELS,
    TASK_HEADS,
    Estimate,
    estimate,
    on_device,
    stages_of,
    weights_of,
)
from bert_cli.config.training import TrainSettings
from bert_cli.errors import ConfigError

Settings = TypeVar("Settings", bound=TrainSettings)

# Fraction of a device's memory that a run may fill. The rest is for the runtime, its kernels, and the error
# of the estimate.
USABLE = 0.9
REDUCE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# Settings of `parallel` that save memory, in the order in which to try them.
REMEDIES = ("recompute", "replicated_tensor_sharding", "optimizer_state_offload")


def work_of(settings: TrainSettings) -> dict[str, float]:
    """Return the floating-point operations of each block for one forward of a micro-batch."""
    config, batch = settings.bert_config, settings.global_batch
    width, inner, vocabulary = config.hidden_size, config.intermediate_size, config.vocab_size
    positions = batch.micro_batch_size * settings.max_seq_length
    read = batch.micro_batch_size * settings.positions_read
    return {
        # Lookup, sum, LayerNorm and dropout: element by element.
        "emb": 10.0 * positions * width,
        "hid": 2.0 * positions * (4 * width + 2 * inner + 2 * settings.max_seq_length) * width,
        "enc_out": 1.0 * read * width,
        "pool": 2.0 * batch.micro_batch_size * width * width,
        "heads": 2.0 * read * width * (width + vocabulary),
        **dict.fromkeys(TASK_HEADS, 2.0 * read * width * LABELS),
    }


def bubble(times: Sequence[float], mapping: Sequence[int], micro_batches: int) -> float:
    """Return the fraction of a step in which the devices of a pipeline are idle, on average.

    `times` are those of each stage for a micro-batch, `mapping` their devices. A step lasts one micro-batch
    through all stages, and one interval of the busiest device for each further micro-batch: for p
    equal stages on p devices and m micro-batches the result is (p - 1) / (m + p - 1) (Narayanan et al. 2021,
    section 2.2.1).
    """
    devices = max(mapping) + 1
    pairs = list(zip(times, mapping, strict=True))
    busiest = max(sum(time for time, on in pairs if on == device) for device in range(devices))
    step = sum(times) + (micro_batches - 1) * busiest
    return max(0.0, 1.0 - micro_batches * sum(times) / (devices * step))


def idle(settings: TrainSettings) -> float:
    """Return the bubble of a layout."""
    work, (stages, mapping) = work_of(settings), stages_of(settings)
    times = [sum(work[block] for block in stage) for stage in stages]
    return bubble(times, mapping, settings.global_batch.grad_acc_steps_per_replica)


def parameters(settings: TrainSettings) -> int:
    """Return the number of weights of the model."""
    elements, (stages, _) = weights_of(settings.bert_config), stages_of(settings)
    return sum(elements[block] for stage in stages for block in stage)


def reduced_bytes(settings: TrainSettings) -> int:
    """Return the bytes of the gradient all-reduce of a step."""
    if settings.global_batch.replicas == 1:
        return 0
    return parameters(settings) * REDUCE_BYTES[settings.parallel.reduce_precision]


def fullest(settings: TrainSettings) -> tuple[int, Estimate]:
    """Return the device with the highest estimate, and the estimate."""
    return max(enumerate(estimate(settings)), key=lambda pair: pair[1].total)


def fits(settings: TrainSettings, memory: int) -> bool:
    """Return whether the layout fits on devices with this memory."""
    return fullest(settings)[1].total <= USABLE * memory


def propose(settings: Settings, devices: int, memory: int, processes: int = 1) -> Settings:
    """Return the settings with the layout that fits with the fewest stages, then the most replicas.

    `memory` is that of one device in bytes. The micro-batch and the number of micro-batches in a step
    stay, so the examples and the numbers do; all devices of a replica are in one process. Some devices may be
    unused. Raises ConfigError, with the least memory that is enough, when nothing fits.
    """
    shapes = _shapes(settings, devices, processes)
    for replicas, pipeline in shapes:
        laid = _laid_out(settings, replicas, pipeline, USABLE * memory)
        if fits(laid, memory):
            return laid
    raise _nothing_fits(settings, shapes, devices, memory)


def _shapes(settings: TrainSettings, devices: int, processes: int) -> list[tuple[int, int]]:
    """Return the (replicas, pipeline devices) to try: each number of devices with the most replicas."""
    batch = settings.global_batch
    micro_batches = batch.replicas * batch.grad_acc_steps_per_replica
    here = devices // processes
    if not here:
        problem = f"are fewer than the {processes} processes"
        raise ConfigError(f"devices ({devices})", problem, f"start at most {devices}")
    if micro_batches % processes:
        raise ConfigError(
            f"global_batch ({micro_batches} micro-batches a step)",
            f"cannot be divided among {processes} processes",
            "change the number of processes, or replicas x grad_acc_steps_per_replica",
        )
    shapes = []
    for pipeline in range(1, min(here, settings.bert_config.num_hidden_layers + 1) + 1):
        of_each = (processes * n for n in range(1, here // pipeline + 1))
        shapes.append((max(n for n in of_each if micro_batches % n == 0), pipeline))
    return shapes


def _laid_out(settings: Settings, replicas: int, devices: int, memory: float) -> Settings:
    """Return the settings with this number of replicas and of devices per replica."""
    batch = settings.global_batch
    micro_batches = batch.replicas * batch.grad_acc_steps_per_replica
    counts = {"replicas": replicas, "grad_acc_steps_per_replica": micro_batches // replicas}
    laid = _changed(settings, global_batch=counts)
    mapping = [0] if devices == 1 else [*range(devices), 0]
    stages = {"pipeline_stages": _divide(laid, mapping, memory), "pipeline_device_mapping": mapping}
    return _changed(laid, parallel={"layout": "given", **stages})


def _divide(settings: TrainSettings, mapping: Sequence[int], memory: float) -> list[list[str]]:
    """Return the blocks of each stage: each layer goes to the least busy device with enough memory.

    If no device has enough, the layer goes to the one that is then the least full. This minimizes the memory
    of the fullest device, because the memory of a device depends only on its own layers.
    """
    work = work_of(settings)
    # Device 0 needs no layer besides the ends of the model; the stages between have at least one.
    layers = [0, *[1] * (len(mapping) - 2), 0][: len(mapping)]
    for _ in range(settings.bert_config.num_hidden_layers - sum(layers)):
        choices = []
        for number, device in enumerate(mapping):
            more = [n + (stage == number) for stage, n in enumerate(layers)]
            stages = _stages(more, settings.LAST_BLOCKS)
            full = on_device(settings, stages, mapping, device).total
            here = [stages[stage] for stage, on in enumerate(mapping) if on == device]
            busy = sum(work[block] for stage in here for block in stage)
            # Of equal devices the later one, which has fewer micro-batches in flight.
            key = (0, busy, full) if full <= memory else (1, full, busy)
            choices.append((*key, -number))
        layers[-min(choices)[-1]] += 1
    return _stages(layers, settings.LAST_BLOCKS)


def _stages(layers: Sequence[int], last_blocks: Sequence[str]) -> list[list[str]]:
    stages = [["hid"] * number for number in layers]
    stages[0].insert(0, "emb")
    stages[-1] += last_blocks
    return stages


def _changed(settings: Settings, **groups: Mapping[str, object]) -> Settings:
    """Return the settings with other values in some groups, after validation."""
    values = settings.model_dump(exclude_unset=True, by_alias=True)
    for name, changes in groups.items():
        values[name] = {**values.get(name, {}), **changes}
    return type(settings).model_validate(values)


def _nothing_fits(
    settings: TrainSettings, shapes: Sequence[tuple[int, int]], devices: int, memory: int
) -> ConfigError:
    """Return the error with the least memory that is enough, and the settings that save memory."""

    def least(tried: TrainSettings) -> int:
        return min(fullest(_laid_out(tried, *shape, 0.0))[1].total for shape in shapes)

    at_best = least(settings)
    problem = (
        f"nothing fits, at best the fullest device needs "
        f"{size(at_best)}, and {USABLE:.0%} of its memory can be filled, so it takes devices of "
        f"{size(at_best / USABLE)}"
    )
    remedies = []
    for name in REMEDIES:
        if getattr(settings.parallel, name):
            continue
        needed = least(_changed(settings, parallel={name: True}))
        if needed < at_best:
            word = "fits" if needed <= USABLE * memory else "does not fit either"
            flag = f"--parallel.{name.replace('_', '-')}"
            remedies.append(f"{flag} ({size(needed)}, which {word})")
    remedies.append(
        "a smaller global_batch.micro_batch_size with more accumulation, which draws other dropout masks"
    )
    where = f"parallel.layout ({devices} devices of {size(memory)})"
    return ConfigError(where, problem, f"give {', or '.join(remedies)}")


def describe_layout(settings: TrainSettings) -> list[str]:
    """Return the layout as text, two to four lines."""
    batch, parallel = settings.global_batch, settings.parallel
    stages, mapping = stages_of(settings)
    found = estimate(settings)
    again = f"recomputes each {parallel.recompute_by}" if parallel.recompute else "no recomputation"
    lines = [
        f"layout: {count(batch.replicas, 'replica')} x {count(len(found), 'device')}, {again}, about "
        f"{size(max(one.total for one in found))} on the fullest device"
    ]
    if len(stages) > 1:
        lines.append("; ".join(blocks_by_device(stages, mapping)))
        lines.append(
            f"schedule {parallel.schedule}, devices are idle for {idle(settings):.1%} of a step"
        )
    if batch.replicas > 1:
        lines.append(
            f"each replica adds up {size(reduced_bytes(settings))} of gradients with the others once a step, "
            f"in {parallel.reduce_precision}"
        )
    return lines


def blocks_by_device(stages: Sequence[Sequence[str]], mapping: Sequence[int]) -> list[str]:
    """Return the blocks of each device, as `device 0: emb | heads`; equal devices are grouped."""
    rows = [(blocks_on(stages, mapping, device), device) for device in range(max(mapping) + 1)]
    words = []
    for blocks, group in groupby(rows, key=lambda row: row[0]):
        first, *others = [device for _, device in group]
        words.append(
            f"devices {first} to {others[-1]}: {blocks}" if others else f"device {first}: {blocks}"
        )
    return words


def blocks_on(stages: Sequence[Sequence[str]], mapping: Sequence[int], device: int) -> str:
    """Return the blocks on one device, its stages separated by a bar."""
    return " | ".join(
        " ".join(short(stage)) for stage, on in zip(stages, mapping, strict=True) if on == device
    )


def short(stage: Sequence[str]) -> list[str]:
    """Return the blocks of a stage as in a config: emb, hid*4."""
    runs = [(name, len(list(run))) for name, run in groupby(stage)]
    return [name if times == 1 else f"{name}*{times}" for name, times in runs]


def count(number: int, what: str) -> str:
    """1 device, 2 devices, 1,000 micro-batches."""
    if number == 1:
        return f"1 {what}"
    return f"{number:,} {what}{'es' if what.endswith('ch') else 's'}"


def size(number: float) -> str:
    """Return a number of bytes in GB or MB, powers of ten."""
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"


def without_effect(settings: TrainSettings) -> list[str]:
    """Return a line for each setting that has no effect in this layout."""
    parallel = settings.parallel
    found = []
    if settings.global_batch.replicas == 1:
        if parallel.replicated_tensor_sharding:
            found.append("replicated_tensor_sharding has no effect here: there is one replica")
        if parallel.reduce_precision != "float32":
            found.append("reduce_precision has no effect here: there is one replica")
    if len(stages_of(settings)[0]) == 1:
        if parallel.schedule != "1F1B":
            found.append("schedule has no effect here: there is one stage")
        if parallel.recompute and parallel.recompute_by == "stage":
            found.append(
                "recompute_by stage has no effect here: one stage needs all that it would save"
            )
    return [f"parallel.{line}" for line in found]
