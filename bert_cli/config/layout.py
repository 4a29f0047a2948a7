"""The memory, idle time and traffic of a layout, and the choice of one: replicas first, then stages.

Replicas communicate only in the all-reduce, while stages wait for one another, so the search tries one device
for each replica, then two, and so on. Weights, accumulators and moments are in memory all the time; added to
them are the activations of micro-batches or, at the end of a step, the temporaries of the update.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from bert_cli.config.settings import BertConfig
from bert_cli.config.training import TrainSettings, count, short
from bert_cli.errors import ConfigError

Settings = TypeVar("Settings", bound=TrainSettings)
Stages = Sequence[Sequence[str]]

# Fraction of a device's memory that a run may fill, besides the runtime and the error of the estimate.
USABLE = 0.9
# Bytes of an element of a weight, and of an operand of a matrix product.
WEIGHT_BYTES = {"float32": 4, "mixed_float16": 4, "mixed_bfloat16": 4, "float16": 2}
COMPUTE_BYTES = {"float32": 4, "mixed_float16": 2, "mixed_bfloat16": 2, "float16": 2}
FLOAT32 = 4
# The last blocks of the tasks, and a number of labels: the real one is negligible beside the model's width.
TASK_HEADS, LABELS = ("qa_head", "glue_head", "token_head"), 2
# The thresholds of the engine, which a test compares with it.
COMPILED_CHAIN_ELEMENTS, COMPILED_UPDATE_WEIGHTS = 2**19, 2**23
# Measured, in float32: temporaries of the backward pass of a layer at its peak, around GELU; copies of the
# logits, with deterministic operations and without; temporaries of the update for each element of the
# largest weight and of all others, in place or allocated; copies of an all-reduce bucket.
BACKWARD_TEMPORARIES = {"BSF": 3, "BSD": 2}
LOGITS = {True: 5, False: 4}
UPDATE_IN_PLACE, UPDATE_ALLOCATED = (1, 0.4), (8, 0.3)
BUCKETS = 3
# Memory that the allocator takes for temporaries, relative to the live ones: measured 1.05 to 1.46 on CPUs.
GAPS = 1.15


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes on one device of a replica, by kind."""

    weights: int
    """The word embeddings, which emb and heads share, count once."""
    accumulators: int
    """Float32 sums of gradients; a stage with heads and without emb has its own for the word embeddings."""
    moments: int
    """Two in float32 for each weight; none if offloaded, a part if sharded."""
    stashes: int
    """Activations saved between forward and backward, at the maximum of the schedule."""
    working: int
    """Activations and gradients of the current micro-batch, without its logits."""
    logits: int
    """Logits of the vocabulary for every masked position, and their temporaries."""
    update: int
    """Temporaries at the end of a step, when stashes, working and logits are freed."""

    @property
    def total(self) -> int:
        """Return the peak memory."""
        most = max(self.stashes + self.working + self.logits, self.update)
        return self.weights + self.accumulators + self.moments + most


def weights_of(config: BertConfig) -> dict[str, int]:
    """Return the number of weights of each block; `heads` without the shared word embeddings."""
    width, inner = config.hidden_size, config.intermediate_size
    dense, norm = width * width + width, 2 * width
    vectors, is_group = 4 * width + norm + inner + width + norm, config.architecture == "groupbert"
    if is_group:
        vectors = 8 * width + 5 * norm + 2 * (inner + width + width * (config.ffn_groups > 1))
    rows = config.vocab_size + config.max_position_embeddings + config.type_vocab_size
    return {
        "emb": rows * width + norm,
        "hid": config.layer_matrices + vectors,
        "final_norm": norm * is_group,  # a part of the last layer
        "enc_out": 0,
        "pool": dense,
        "heads": dense + norm + config.vocab_size + 2 * width + 2,
        **dict.fromkeys(TASK_HEADS, LABELS * (width + 1)),
    }


def stages_of(settings: TrainSettings) -> tuple[list[list[str]], list[int]]:
    """Return the blocks of each stage, and its device; one stage without stages or with layout `auto`."""
    parallel = settings.parallel
    stages, mapping = parallel.pipeline_stages, parallel.pipeline_device_mapping
    if parallel.layout == "auto" or stages is None or mapping is None:
        return _stages([settings.bert_config.num_hidden_layers], settings.LAST_BLOCKS), [0]
    return stages, mapping


def _stages(layers: Sequence[int], last_blocks: Sequence[str]) -> list[list[str]]:
    stages = [["hid"] * number for number in layers]
    stages[0].insert(0, "emb")
    stages[-1] += last_blocks
    return stages


# --- memory


def estimate(settings: TrainSettings) -> list[Estimate]:
    """Return the estimate of each pipeline device of a replica."""
    stages, mapping = stages_of(settings)
    return [on_device(settings, stages, mapping, device) for device in range(max(mapping) + 1)]


def on_device(
    settings: TrainSettings, stages: Stages, mapping: Sequence[int], device: int
) -> Estimate:
    """Return the estimate of one device for these stages, instead of those of the settings."""
    config, parallel = settings.bert_config, settings.parallel
    here = [number for number, on in enumerate(mapping) if on == device]
    blocks = [block for number in here for block in stages[number]]
    table = config.vocab_size * config.hidden_size
    weights = sum(weights_of(config)[block] for block in blocks)
    largest = table if "emb" in blocks else config.hidden_size * config.intermediate_size
    tables = sum("emb" in stages[number] or "heads" in stages[number] for number in here)
    replicas = settings.global_batch.replicas
    shards = replicas if parallel.replicated_tensor_sharding else 1
    updated, most = math.ceil(weights / shards), math.ceil(min(largest, weights) / shards)
    bucket = max(10**6 * parallel.reduce_bucket_megabytes, FLOAT32 * most)
    reduced = BUCKETS * min(bucket, FLOAT32 * weights) if replicas > 1 else 0
    in_place = settings.compile != "nothing" and weights >= COMPILED_UPDATE_WEIGHTS and shards == 1
    of_largest, of_others = UPDATE_IN_PLACE if in_place else UPDATE_ALLOCATED
    update = FLOAT32 * (of_largest * most + of_others * (updated - most))
    if parallel.optimizer_state_offload:  # only the gradients are on the device
        update = FLOAT32 * updated
    return Estimate(
        weights=WEIGHT_BYTES[settings.precision] * weights,
        accumulators=FLOAT32 * (weights + table * max(0, tables - 1)),
        moments=0 if parallel.optimizer_state_offload else 2 * FLOAT32 * updated,
        stashes=int(GAPS * sum(_stashes(settings, stages, number) for number in here)),
        # Stages that share a device may run at once.
        working=int(GAPS * sum(_working(settings, stages, number) for number in here)),
        logits=int(GAPS * _logits(settings)) if "heads" in blocks else 0,
        update=int(GAPS * max(reduced, update)),
    )


def _stashes(settings: TrainSettings, stages: Stages, number: int) -> int:
    """Return the saved bytes of a stage for all micro-batches between forward and backward."""
    parallel, blocks = settings.parallel, stages[number]
    if number == len(stages) - 1:  # forward and backward are one function
        return 0
    micro_batches = settings.global_batch.grad_acc_steps_per_replica
    most = micro_batches if parallel.schedule == "GPipe" else len(stages) - number
    if not parallel.recompute:
        each = sum(saved_bytes(settings, block, stashed=True) for block in blocks)
        each += _input(settings, stages[number + 1][0]) + _kernel_copies(settings, blocks)
    else:
        inputs = blocks if parallel.recompute_by == "layer" else blocks[:1]
        each = sum(_input(settings, block) for block in inputs)
    return min(micro_batches, most) * each


def _working(settings: TrainSettings, stages: Stages, number: int) -> int:
    """Return the peak bytes of a stage for one micro-batch, without its stash and the logits."""
    parallel, blocks, config = settings.parallel, stages[number], settings.bert_config
    saved = [saved_bytes(settings, block, stashed=False) for block in blocks]
    shapes = BACKWARD_TEMPORARIES if "hid" in blocks else {}
    temporaries = sum(FLOAT32 * n * _elements(settings, shape) for shape, n in shapes.items())
    elements = weights_of(config)
    elements["heads"] += config.vocab_size * config.hidden_size  # the shared word embeddings
    gradients = [WEIGHT_BYTES[settings.precision] * elements[name] for name in blocks]
    kernels = _kernel_copies(settings, blocks)
    by_layer = parallel.recompute and parallel.recompute_by == "layer"
    if number == len(stages) - 1:
        # Either the heads run or, later, a layer; without recomputation all layers are saved below it.
        *body, heads = saved
        below = sum(_input(settings, name) for name in blocks[:-1]) if by_layer else sum(body)
        layer = max(body, default=0) if by_layer else 0
        logits = _logits(settings) if "heads" in blocks else 0
        return below + kernels + gradients[-1] + max(heads, layer + temporaries - logits)
    if not parallel.recompute:
        # The backward function returns the gradients of all weights at once.
        return temporaries + sum(gradients)
    return (max(saved) if by_layer else sum(saved)) + temporaries + max(gradients) + kernels


def _kernel_copies(settings: TrainSettings, blocks: Sequence[str]) -> int:
    """Return the bytes of kernels in 16 bits, or times the factors of Unit Scaling."""
    if not settings.precision.startswith("mixed") and getattr(settings, "scaling", None) is None:
        return 0
    config = settings.bert_config
    table = config.vocab_size * config.hidden_size if "heads" in blocks else 0
    cast = sum(weights_of(config)[block] for block in blocks if block != "emb")
    return COMPUTE_BYTES[settings.precision] * (cast + table)


def _logits(settings: TrainSettings) -> int:
    complete = LOGITS[settings.deterministic] * FLOAT32 * _elements(settings, "BPV")
    return complete // settings.parallel.embedding_serialization_factor


def saved_bytes(settings: TrainSettings, block: str, *, stashed: bool) -> int:
    """Return the bytes that the gradient of a block reads for one micro-batch.

    `stashed`: forward and backward are two functions, which save more tensors than one. Between two products
    everything is float32 in every precision. XLA-compiled layers save inputs, and recompute dropout.
    """
    config, more = settings.bert_config, int(stashed)
    scaled = more * int(getattr(settings, "scaling", None) is not None)  # values before a factor
    hidden = int(config.hidden_dropout_prob > 0.0)
    dropout = int(config.attention_probs_dropout_prob > 0.0)
    wide, compute = FLOAT32, COMPUTE_BYTES[settings.precision]
    bsd, bnss, bsf, bpd = (_elements(settings, shape) for shape in ("BSD", "BNSS", "BSF", "BPD"))
    is_compiled = settings.compile != "nothing" and bsd > COMPILED_CHAIN_ELEMENTS
    feed_forwards, of_bsd = 1, 6 * compute + (4 + more + hidden * (2 + 2 * more)) * wide
    if config.architecture == "groupbert":
        feed_forwards, of_bsd = 2, 12 * compute + (14 + 2 * more + hidden * 4 * (1 + more)) * wide
    elif is_compiled:
        of_bsd = 8 * compute + more * wide
    of_bsd += scaled * 3 * wide
    if block == "hid" and is_compiled:
        scores = (2 + more) * compute * bnss
        return of_bsd * bsd + scores + feed_forwards * 2 * compute * bsf
    changed = int(bool(dropout) or settings.precision != "float32")
    return {
        "emb": (2 + hidden * (1 + more) + 3 * scaled) * wide * bsd,
        "hid": of_bsd * bsd
        + ((1 + dropout) * wide + changed * compute) * bnss
        + feed_forwards * ((3 + 2 * more) * wide + compute) * bsf,
        "enc_out": 0,
        "pool": (1 + more) * compute * bpd,
        "heads": (2 * compute + 5 * wide) * bpd,
        "qa_head": compute * bpd,
        "glue_head": 2 * wide * _elements(settings, "BD"),
        "token_head": 2 * wide * bpd,
    }[block]


def _input(settings: TrainSettings, block: str) -> int:
    """Return the bytes of a block's input: all that recomputation saves of it."""
    shape = "BSD" if block in ("hid", "enc_out") else "BPD"
    return 0 if block == "emb" else COMPUTE_BYTES[settings.precision] * _elements(settings, shape)


def _elements(settings: TrainSettings, shape: str) -> int:
    """Return the elements of a tensor of one micro-batch; P includes the position of [CLS]."""
    config = settings.bert_config
    sizes = {
        "B": settings.global_batch.micro_batch_size,
        "S": settings.max_seq_length,
        "P": settings.positions_read,
        "N": config.num_attention_heads,
        "D": config.hidden_size,
        "F": config.intermediate_size,
        "V": config.vocab_size,
    }
    return math.prod(sizes[letter] for letter in shape)


# --- idle time, traffic and the choice of a layout


def work_of(settings: TrainSettings) -> dict[str, float]:
    """Return the floating-point operations of each block for one forward of a micro-batch."""
    config, batch = settings.bert_config, settings.global_batch
    width, vocabulary = config.hidden_size, config.vocab_size
    positions = batch.micro_batch_size * settings.max_seq_length
    read = batch.micro_batch_size * settings.positions_read
    return {
        "emb": 10.0 * positions * width,  # element by element
        "hid": 2.0 * positions * (config.layer_matrices + 2 * settings.max_seq_length * width),
        "enc_out": 1.0 * read * width,
        "pool": 2.0 * batch.micro_batch_size * width * width,
        "heads": 2.0 * read * width * (width + vocabulary),
        **dict.fromkeys(TASK_HEADS, 2.0 * read * width * LABELS),
    }


def bubble(times: Sequence[float], mapping: Sequence[int], micro_batches: int) -> float:
    """Return the fraction of a step in which the devices of a pipeline are idle, on average.

    `times` are those of each stage for a micro-batch, `mapping` their devices. For p equal stages on p devices
    and m micro-batches the result is (p - 1) / (m + p - 1) (Narayanan et al. 2021, section 2.2.1).
    """
    busy = [0.0] * (max(mapping) + 1)
    for time, device in zip(times, mapping, strict=True):
        busy[device] += time
    step = sum(times) + (micro_batches - 1) * max(busy)
    return max(0.0, 1.0 - micro_batches * sum(times) / (len(busy) * step))


def idle(settings: TrainSettings) -> float:
    """Return the bubble of a layout."""
    work, (stages, mapping) = work_of(settings), stages_of(settings)
    times = [sum(work[block] for block in stage) for stage in stages]
    return bubble(times, mapping, settings.global_batch.grad_acc_steps_per_replica)


def parameters(settings: TrainSettings) -> int:
    """Return the number of weights of the model."""
    elements, (stages, _) = weights_of(settings.bert_config), stages_of(settings)
    return elements["final_norm"] + sum(elements[block] for stage in stages for block in stage)


def reduced_bytes(settings: TrainSettings) -> int:
    """Return the bytes of the gradient all-reduce of a step."""
    each = 4 if settings.parallel.reduce_precision == "float32" else 2
    return 0 if settings.global_batch.replicas == 1 else parameters(settings) * each


def fullest(settings: TrainSettings) -> tuple[int, Estimate]:
    """Return the device with the highest estimate, and the estimate."""
    return max(enumerate(estimate(settings)), key=lambda pair: pair[1].total)


def fits(settings: TrainSettings, memory: int) -> bool:
    """Return whether the layout fits on devices with this memory."""
    return fullest(settings)[1].total <= USABLE * memory


def propose(settings: Settings, devices: int, memory: int, processes: int = 1) -> Settings:
    """Return the settings with the layout that fits with the fewest stages, then the most replicas.

    `memory` is that of one device in bytes. The micro-batches of a step stay the same; all devices of a
    replica are in one process. Raises ConfigError, with the least memory that is enough, when nothing fits.
    """
    shapes = _shapes(settings, devices, processes)
    for replicas, pipeline in shapes:
        laid = _laid_out(settings, replicas, pipeline, USABLE * memory)
        if fits(laid, memory):
            return laid
    least = min(fullest(_laid_out(settings, *shape, 0.0))[1].total for shape in shapes)
    raise ConfigError(
        f"parallel.layout ({devices} devices of {size(memory)})",
        f"nothing fits, at best the fullest device needs {size(least)}, and {USABLE:.0%} of its memory "
        f"can be filled, so it takes devices of {size(least / USABLE)}",
        "give --parallel.recompute, --parallel.optimizer-state-offload, or a smaller "
        "global_batch.micro_batch_size with more accumulation",
    )


def _shapes(settings: TrainSettings, devices: int, processes: int) -> list[tuple[int, int]]:
    batch, here = settings.global_batch, devices // processes
    micro_batches = batch.replicas * batch.grad_acc_steps_per_replica
    if not here:
        problem = f"are fewer than the {processes} processes"
        raise ConfigError(f"devices ({devices})", problem, f"start at most {devices}")
    if micro_batches % processes:
        where = f"global_batch ({micro_batches} micro-batches a step)"
        problem = f"cannot be divided among {processes} processes"
        raise ConfigError(where, problem, "change the processes, the replicas or the accumulation")
    shapes = []
    for pipeline in range(1, min(here, settings.bert_config.num_hidden_layers + 1) + 1):
        of_each = (processes * n for n in range(1, here // pipeline + 1))
        shapes.append((max(n for n in of_each if micro_batches % n == 0), pipeline))
    return shapes


def _laid_out(settings: Settings, replicas: int, devices: int, memory: float) -> Settings:
    batch = settings.global_batch
    accumulation = batch.replicas * batch.grad_acc_steps_per_replica // replicas
    counts = {"replicas": replicas, "grad_acc_steps_per_replica": accumulation}
    laid = _changed(settings, "global_batch", counts)
    mapping = [0] if devices == 1 else [*range(devices), 0]
    stages = {"pipeline_stages": _divide(laid, mapping, memory), "pipeline_device_mapping": mapping}
    return _changed(laid, "parallel", {"layout": "given", **stages})


def _divide(settings: TrainSettings, mapping: Sequence[int], memory: float) -> list[list[str]]:
    """Return the blocks of each stage: each layer goes to the least busy device with enough memory.

    The first and the last stage are on device 0, because they share the token embedding. If no device has
    enough, the layer goes to the one that is then the least full.
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
            here = [n for n, on in enumerate(mapping) if on == device]
            busy = sum(work[block] for n in here for block in stages[n])
            # Of equal devices the later one, which has fewer micro-batches in flight.
            key = (0, busy, full) if full <= memory else (1, full, busy)
            choices.append((*key, -number))
        *_, later = min(choices)
        layers[-later] += 1
    return _stages(layers, settings.LAST_BLOCKS)


def _changed(settings: Settings, group: str, changes: Mapping[str, object]) -> Settings:
    values = settings.model_dump(exclude_unset=True, by_alias=True)
    values[group] = {**values.get(group, {}), **changes}
    return type(settings).model_validate(values)


# --- text


def describe_layout(settings: TrainSettings) -> list[str]:
    """Return the layout as text, two to four lines."""
    batch, parallel = settings.global_batch, settings.parallel
    stages, mapping = stages_of(settings)
    again = f"recomputes each {parallel.recompute_by}" if parallel.recompute else "no recomputation"
    lines = [
        f"layout: {count(batch.replicas, 'replica')} x {count(max(mapping) + 1, 'device')}, {again}, about "
        f"{size(fullest(settings)[1].total)} on the fullest device"
    ]
    if len(stages) > 1:
        devices = range(max(mapping) + 1)
        words = []
        for blocks, group in groupby(devices, lambda device: blocks_on(stages, mapping, device)):
            first, *others = group
            name = f"devices {first} to {others[-1]}" if others else f"device {first}"
            words.append(f"{name}: {blocks}")
        percent = f"{idle(settings):.1%}"
        lines.append("; ".join(words))
        lines.append(f"schedule {parallel.schedule}, devices are idle for {percent} of a step")
    if batch.replicas > 1:
        sums = f"{size(reduced_bytes(settings))} of gradients with the others once a step"
        lines.append(f"each replica adds up {sums}, in {parallel.reduce_precision}")
    return lines


def blocks_on(stages: Stages, mapping: Sequence[int], device: int) -> str:
    """Return the blocks on one device, its stages separated by a bar."""
    here = [stage for stage, on in zip(stages, mapping, strict=True) if on == device]
    return " | ".join(" ".join(short(stage)) for stage in here)


def size(number: float) -> str:
    """Return a number of bytes in GB or MB, powers of ten."""
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"


def without_effect(settings: TrainSettings) -> list[str]:
    """Return a line for each setting that has no effect in this layout."""
    parallel, one_stage = settings.parallel, len(stages_of(settings)[0]) == 1
    one_replica = settings.global_batch.replicas == 1
    unused = {
        "replicated_tensor_sharding": one_replica and parallel.replicated_tensor_sharding,
        "reduce_precision": one_replica and parallel.reduce_precision != "float32",
        "schedule": one_stage and parallel.schedule != "1F1B",
        "recompute_by": one_stage and parallel.recompute and parallel.recompute_by == "stage",
    }
    return [f"parallel.{name} has no effect in this layout" for name, yes in unused.items() if yes]
