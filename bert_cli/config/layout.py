"""What a layout costs, and which one to take: memory by device, idle time, bytes that replicas send.

Pure arithmetic on the settings, so it is answered before anything is built. Memory is counted by kind
from the shapes in `model/` and what the engine keeps; what a layer's backward pass needs is a table
below, one line a tensor. A layout is proposed by trying the fewest devices a replica first: replicas
share no work but the sum of gradients, stages wait for one another.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

from bert_cli.config.parallel import Parallel
from bert_cli.config.schema import BertConfig, PretrainSettings
from bert_cli.errors import ConfigError

# A device's memory that is not the run's to fill: the runtime, its kernels, gaps of the allocator.
USABLE = 0.9
WEIGHT_BYTES = {"float32": 4, "mixed_float16": 4, "mixed_bfloat16": 4, "float16": 2}
COMPUTE_BYTES = {"float32": 4, "mixed_float16": 2, "mixed_bfloat16": 2, "float16": 2}
REDUCE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes on one device of a replica, by kind."""

    weights: int
    accumulators: int
    """Sums of gradients, float32."""
    moments: int
    stashes: int
    """What micro-batches that went forward keep for their way back."""
    activations: int
    """What the micro-batch at work needs beyond that."""
    logits: int
    """Scores of every word for every masked place, and their gradients."""
    transients: int
    """Gradients of single weights, and buckets on their way."""

    @property
    def total(self) -> int:
        """All of them."""
        return sum(vars(self).values())


def weights_of(config: BertConfig) -> dict[str, int]:
    """Elements of the weights of each kind of block; `heads` without the word table it shares."""
    D, F, V = config.hidden_size, config.intermediate_size, config.vocab_size
    rows = V + config.max_position_embeddings + config.type_vocab_size
    return {
        "emb": rows * D + 2 * D,
        "hid": 4 * (D * D + D) + (D * F + F) + (F * D + D) + 4 * D,
        "enc_out": 0,
        "pool": D * D + D,
        "heads": (D * D + D) + 2 * D + V + (2 * D + 2),
    }


def stages_of(settings: PretrainSettings) -> list[tuple[list[str], int]]:
    """The blocks and the device of each stage; one stage when none are given."""
    parallel = settings.parallel
    whole = ["emb", *["hid"] * settings.bert_config.num_hidden_layers, "enc_out", "pool", "heads"]
    stages = parallel.pipeline_stages or [whole]
    return list(zip(stages, parallel.pipeline_device_mapping or [0], strict=True))


def kept_by_backward(settings: PretrainSettings) -> dict[str, int]:
    """Bytes that the backward pass of each block needs of its forward pass, for one micro-batch."""
    config, c = settings.bert_config, COMPUTE_BYTES[settings.precision]
    T = settings.global_batch.micro_batch_size * settings.max_seq_length
    D, F, N = config.hidden_size, config.intermediate_size, config.num_attention_heads
    masked = settings.global_batch.micro_batch_size * (1 + settings.max_predictions_per_seq)
    drops = 4 if config.hidden_dropout_prob > 0 else 0
    drops_attention = 4 if config.attention_probs_dropout_prob > 0 else 0
    norm = 4 + 4  # the centred values, and gamma over the deviation; both float32
    scores = T * N * settings.max_seq_length * (
        4  # softmax
        + drops_attention  # the mask of its dropout
        + c  # the shares in the format of the product
    )  # fmt: skip
    width = T * D * (
        c  # what comes in
        + 3 * c  # query, key, value
        + c  # what was read
        + drops + norm  # end of the attention
        + c  # what the feed-forward reads
        + drops + norm  # its end
    )  # fmt: skip
    inner = T * F * (
        4 + 4 + 4  # GELU: its input, and two steps on its way
        + c  # its result
    )  # fmt: skip
    return {
        "emb": T * D * (drops + norm),
        "hid": width + inner + scores,
        "enc_out": masked * 8,
        "pool": settings.global_batch.micro_batch_size * D * 12 + masked * D * c,
        "heads": masked * D * (c + 4 * 4 + norm),
    }


def logits_of(settings: PretrainSettings) -> int:
    """Bytes of the scores of every word: as computed, in float32, and their gradients."""
    places = settings.global_batch.micro_batch_size * settings.max_predictions_per_seq
    c = COMPUTE_BYTES[settings.precision]
    return places * settings.bert_config.vocab_size * (c + 3 * 4)


def estimate(settings: PretrainSettings) -> list[Estimate]:
    """The memory of each pipeline device of a replica."""
    stages = stages_of(settings)
    devices = max(device for _, device in stages) + 1
    return [_on_device(settings, stages, device) for device in range(devices)]


def _on_device(
    settings: PretrainSettings, stages: list[tuple[list[str], int]], device: int
) -> Estimate:
    config, parallel, batch = settings.bert_config, settings.parallel, settings.global_batch
    elements, kept = weights_of(config), kept_by_backward(settings)
    word_table = config.vocab_size * config.hidden_size
    here = [(number, blocks) for number, (blocks, on) in enumerate(stages) if on == device]
    owned = sum(elements[name] for _, blocks in here for name in blocks)
    # The word table is added up once a stage that uses it.
    users = sum("emb" in blocks or "heads" in blocks for _, blocks in here)
    summed = owned + word_table * max(0, users - 1)
    share = batch.replicas if parallel.replicated_tensor_sharding else 1
    moments = 0 if parallel.optimizer_state_offload else 8 * math.ceil(owned / share)
    stashes, activations, logits, transients = 0, [0], 0, [0]
    for number, blocks in here:
        in_flight = _in_flight(parallel, number, len(stages), batch.grad_acc_steps_per_replica)
        is_last = number == len(stages) - 1
        stash, work = _of_stage(settings, blocks, kept, is_last)
        stashes += stash * in_flight
        activations.append(work)
        logits += logits_of(settings) if "heads" in blocks else 0
        tables = ("emb" in blocks) + ("heads" in blocks)
        largest = max(config.hidden_size * config.intermediate_size, word_table * bool(tables))
        # A gradient as found and in float32; that of a table from both its uses.
        transients.append(4 * largest * max(1, tables) * 2)
    if batch.replicas > 1:
        bucket = max(10**6 * parallel.reduce_bucket_megabytes, 4 * word_table)
        transients.append(2 * min(bucket, 4 * summed))
    return Estimate(
        weights=WEIGHT_BYTES[settings.precision] * owned,
        accumulators=4 * summed,
        moments=moments,
        stashes=stashes,
        activations=max(activations),
        logits=logits,
        transients=max(transients),
    )


def _in_flight(parallel: Parallel, stage: int, stages: int, micro_batches: int) -> int:
    """Micro-batches that a stage keeps at once; the last stage finishes each before the next."""
    if stage == stages - 1:
        return 0
    return micro_batches if parallel.schedule == "GPipe" else min(stages - stage, micro_batches)


def _of_stage(
    settings: PretrainSettings, blocks: list[str], kept: dict[str, int], is_last: bool
) -> tuple[int, int]:
    """Bytes that a stage keeps for a micro-batch in flight, and that the one at work takes."""
    parallel = settings.parallel
    T = settings.global_batch.micro_batch_size * settings.max_seq_length
    hidden = T * settings.bert_config.hidden_size * COMPUTE_BYTES[settings.precision]
    everything = sum(kept[name] for name in blocks)
    if not parallel.recompute:
        return (0, everything) if is_last else (everything, hidden)
    if parallel.recompute_by == "stage":
        return (0 if is_last else hidden), everything
    inputs = hidden * sum(name in ("hid", "enc_out") for name in blocks)
    largest = max(kept[name] for name in blocks)
    return (0, inputs + largest) if is_last else (inputs, largest)


def work_of(settings: PretrainSettings) -> dict[str, float]:
    """Multiplications and additions of each kind of block, one micro-batch forward."""
    config = settings.bert_config
    D, F, V = config.hidden_size, config.intermediate_size, config.vocab_size
    B, S, P = (
        settings.global_batch.micro_batch_size,
        settings.max_seq_length,
        settings.max_predictions_per_seq,
    )
    return {
        "emb": 10.0 * B * S * D,
        "hid": 2.0 * B * S * (4 * D * D + 2 * D * F) + 4.0 * B * S * S * D,
        "enc_out": 1.0 * B * P * D,
        "pool": 2.0 * B * D * D,
        "heads": 2.0 * B * P * D * (D + V),
    }


def bubble(settings: PretrainSettings) -> float:
    """Share of a step in which the devices of a pipeline stand idle.

    A step takes one micro-batch through all stages, and the others behind it at the pace of the
    busiest device: (p - 1) / (m + p - 1) for p equal stages on as many devices and m micro-batches
    (Narayanan et al. 2021, section 2.2.1).
    """
    work = work_of(settings)
    stages = stages_of(settings)
    times = [(sum(work[name] for name in blocks), device) for blocks, device in stages]
    devices = max(device for _, device in stages) + 1
    busy = [sum(time for time, on in times if on == device) for device in range(devices)]
    micro_batches = settings.global_batch.grad_acc_steps_per_replica
    whole = sum(time for time, _ in times)
    return 1.0 - micro_batches * whole / devices / (whole + (micro_batches - 1) * max(busy))


def reduced_bytes(settings: PretrainSettings) -> int:
    """Bytes of gradients that a replica adds up with the others, once a step."""
    if settings.global_batch.replicas == 1:
        return 0
    elements = weights_of(settings.bert_config)
    whole = sum(elements[name] for blocks, _ in stages_of(settings) for name in blocks)
    return whole * REDUCE_BYTES[settings.parallel.reduce_precision]


def propose(
    settings: PretrainSettings, devices: int, memory: int, processes: int = 1
) -> PretrainSettings:
    """The settings with the layout that has the most replicas, then the fewest stages, that fits.

    `memory` is that of a device in bytes. The micro-batch and the micro-batches of a step stay, so
    examples and numbers do. A replica lives in one process. Raises ConfigError when nothing fits.
    """
    batch = settings.global_batch
    micro_batches = batch.replicas * batch.grad_acc_steps_per_replica
    here = devices // processes
    tried: list[PretrainSettings] = []
    for each in range(1, min(here, settings.bert_config.num_hidden_layers + 1) + 1):
        replicas = _most_replicas(micro_batches, processes, here // each)
        if replicas is None:
            continue
        laid = _best_cut(settings, replicas, micro_batches // replicas, each, memory)
        tried.append(laid)
        if _needs(laid) <= USABLE * memory:
            return laid
    if not tried:
        raise ConfigError(
            f"global_batch ({micro_batches} micro-batches a step): cannot be divided among {processes} "
            "processes; change replicas, grad_acc_steps_per_replica or the number of processes"
        )
    least = min(tried, key=_needs)
    raise ConfigError(_nothing_fits(least, devices, memory))


def _most_replicas(micro_batches: int, processes: int, each: int) -> int | None:
    """The most replicas, so many a process, that divide a step's micro-batches."""
    fitting = [processes * n for n in range(1, each + 1) if micro_batches % (processes * n) == 0]
    return max(fitting, default=None)


def _best_cut(
    settings: PretrainSettings, replicas: int, accumulation: int, devices: int, memory: int
) -> PretrainSettings:
    """The cut into so many devices whose fullest one has room, and among those the fastest."""
    layers = settings.bert_config.num_hidden_layers
    laid = [
        _laid_out(settings, replicas, accumulation, _cut(layers, first, devices))
        for first in (range(layers - devices + 2) if devices > 1 else [layers])
    ]
    return min(laid, key=lambda one: (max(0, _needs(one) - USABLE * memory), bubble(one)))


def _cut(layers: int, first: int, devices: int) -> list[tuple[list[str], int]]:
    """Device 0 has emb, the first layers and the heads, the others share the rest evenly."""
    ends = ["enc_out", "pool", "heads"]
    if devices == 1:
        return [(["emb", *["hid"] * layers, *ends], 0)]
    rest = layers - first
    marks = [rest * number // (devices - 1) for number in range(devices)]
    middle = [["hid"] * (end - start) for start, end in pairwise(marks)]
    return [
        (["emb", *["hid"] * first], 0),
        *((blocks, number) for number, blocks in enumerate(middle, 1)),
        (ends, 0),
    ]


def _laid_out(
    settings: PretrainSettings,
    replicas: int,
    accumulation: int,
    stages: list[tuple[list[str], int]],
) -> PretrainSettings:
    batch = settings.global_batch.model_copy(
        update={"replicas": replicas, "grad_acc_steps_per_replica": accumulation}
    )
    one = len(stages) == 1
    parallel = settings.parallel.model_copy(
        update={
            "layout": "given",
            "pipeline_stages": None if one else [blocks for blocks, _ in stages],
            "pipeline_device_mapping": None if one else [device for _, device in stages],
        }
    )
    return settings.model_copy(update={"global_batch": batch, "parallel": parallel})


def _needs(settings: PretrainSettings) -> int:
    return max(one.total for one in estimate(settings))


def _nothing_fits(least: PretrainSettings, devices: int, memory: int) -> str:
    text = (
        f"layout ({devices} devices of {size(memory)}): nothing fits; the least is {size(_needs(least))} a device, "
        f"of which {USABLE:.0%} can be filled"
    )
    remedies = ["a smaller global_batch.micro_batch_size (with more accumulation)"]
    parallel = least.parallel
    if not parallel.recompute:
        other = least.model_copy(
            update={"parallel": parallel.model_copy(update={"recompute": True})}
        )
        remedies.insert(0, f"--parallel.recompute ({size(_needs(other))})")
    if not parallel.optimizer_state_offload:
        remedies.append("--parallel.optimizer-state-offload")
    return f"{text}; give {', '.join(remedies)}, or more devices"


def describe_layout(settings: PretrainSettings) -> list[str]:
    """The layout in the words of a person, a fact a line."""
    batch, parallel = settings.global_batch, settings.parallel
    stages, found = stages_of(settings), estimate(settings)
    recompute = (
        f"recomputation by {parallel.recompute_by}" if parallel.recompute else "no recomputation"
    )
    lines = [
        f"layout: {batch.replicas} x {len(found)} devices (replicas x pipeline), about "
        f"{size(max(one.total for one in found))} a device; {recompute}"
    ]
    if len(stages) > 1:
        lines.append(
            f"{len(stages)} stages, {parallel.schedule}, idle {bubble(settings):.1%} of a step: "
            + "; ".join(
                f"device {number}: {_blocks_on(stages, number)}" for number in range(len(found))
            )
        )
    if batch.replicas > 1:
        lines.append(
            f"each replica adds up {size(reduced_bytes(settings))} of gradients a step, in {parallel.reduce_precision}"
        )
    elif parallel.replicated_tensor_sharding:
        lines.append("parallel.replicated_tensor_sharding has no effect with one replica")
    return lines


def _blocks_on(stages: list[tuple[list[str], int]], device: int) -> str:
    return " | ".join(short(blocks) for blocks, on in stages if on == device)


def short(blocks: list[str]) -> str:
    """A stage's blocks as a config writes them: emb hid*4."""
    layers = blocks.count("hid")
    words = dict.fromkeys(blocks)
    return " ".join(f"hid*{layers}" if name == "hid" and layers > 1 else name for name in words)


def size(number: float) -> str:
    """Bytes as a person says them."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= factor:
            return f"{number / factor:.1f} {unit}"
    return f"{number:.0f} B"
