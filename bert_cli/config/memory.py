"""Estimate the memory of each pipeline device during a step, in bytes, from the settings.

Weights, gradient accumulators and moments are in memory all the time. Added to them are the activations:
those saved between the forward and backward pass of micro-batches, those of the current micro-batch, and
its logits; or, at the end of a step, the temporaries of the update. `KEPT` lists the tensors that the
gradient of a block reads, taken from the traced functions of the blocks. Temporaries were measured, and a
test of `bert plan` measures them again.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from bert_cli.config.model import BertConfig
from bert_cli.config.training import TrainSettings

# Bytes of an element of a weight, and of an operand of a matrix product.
WEIGHT_BYTES = {"float32": 4, "mixed_float16": 4, "mixed_bfloat16": 4, "float16": 2}
COMPUTE_BYTES = {"float32": 4, "mixed_float16": 2, "mixed_bfloat16": 2, "float16": 2}
FLOAT32 = 4

Stages = Sequence[Sequence[str]]


class Kept(NamedTuple):
    """Tensors of one shape that a block saves for its gradient."""

    what: str
    shape: str
    """In the shape letters of the model; P includes the position of [CLS]."""
    in_turn: int
    """Their number if forward and backward are one function, which drops unused tensors."""
    stashed: int
    """Their number if they are two functions, which also save the inputs of constants' gradients."""
    form: Literal["float32", "compute"] = "float32"
    """Format: between two products everything is float32 in every precision."""
    only: str = ""
    """Only with dropout of the "hidden" values or of attention's "shares", or when what is multiplied
    with the values is not the softmax itself ("new shares")."""


KEPT: dict[str, tuple[Kept, ...]] = {
    "emb": (
        Kept("LayerNorm: centred values, their scale", "BSD", 2, 2),
        Kept("dropout: mask", "BSD", 1, 1, only="hidden"),
        Kept("dropout: what goes in", "BSD", 0, 1, only="hidden"),
    ),
    "hid": (
        Kept(
            "what goes into both halves; query, key, value, what was read", "BSD", 6, 6, "compute"
        ),
        Kept("query before it is scaled", "BSD", 0, 1),
        Kept("softmax", "BNSS", 1, 1),
        Kept("dropout of the shares: mask", "BNSS", 1, 1, only="shares"),
        Kept("shares as multiplied with the values", "BNSS", 1, 1, "compute", only="new shares"),
        Kept("both LayerNorms: centred values, their scale", "BSD", 4, 4),
        Kept("both dropouts: masks", "BSD", 2, 2, only="hidden"),
        Kept("both dropouts: what goes in", "BSD", 0, 2, only="hidden"),
        Kept("GELU: x / 2, -x / sqrt(2), erfc of it; x and -x", "BSF", 3, 5),
        Kept("GELU: result", "BSF", 1, 1, "compute"),
    ),
    "enc_out": (),
    "pool": (Kept("what goes in, what comes out", "BPD", 1, 2, "compute"),),
    "heads": (
        Kept("transform: what goes in, what comes out", "BPD", 2, 2, "compute"),
        Kept("GELU", "BPD", 3, 3),
        Kept("LayerNorm", "BPD", 2, 2),
    ),
    "qa_head": (Kept("what goes in", "BPD", 1, 1, "compute"),),
    "glue_head": (Kept("dropout: mask, what comes out", "BD", 2, 2),),
    "token_head": (Kept("dropout: mask, what comes out", "BPD", 2, 2),),
}
# The same for a layer with chains that XLA compiled: they save their inputs, and recompute dropout.
KEPT_COMPILED = (
    Kept("what goes into both halves; query, key, value, what was read", "BSD", 6, 6, "compute"),
    Kept("query before it is scaled", "BSD", 0, 1),
    Kept("both LayerNorms: the products that go in", "BSD", 2, 2, "compute"),
    Kept("shares with dropout and without; the scores", "BNSS", 2, 3, "compute"),
    Kept("GELU: what goes in, what comes out", "BSF", 2, 2, "compute"),
)
# The thresholds of the engine, which a test compares with it.
COMPILED_CHAIN_ELEMENTS, COMPILED_UPDATE_WEIGHTS = 2**19, 2**23
# The last blocks of the tasks, and outputs of each for a place as far as memory and work go: the
# number of labels is known with the data, and nothing beside the width of the model.
TASK_HEADS, LABELS = ("qa_head", "glue_head", "token_head"), 2
# What comes into a block, in the compute dtype: all that recomputation keeps of it.
INPUT = {"emb": "", "hid": "BSD", "enc_out": "BSD", **dict.fromkeys(("pool", "heads"), "BPD")}
INPUT |= dict.fromkeys(TASK_HEADS, "BPD")
# What the backward pass of a layer makes and drops, at its most, around GELU; float32, measured.
PASSING = (("BSF", 3), ("BSD", 2))
# Copies of the logits in float32, measured: the scores, log-softmax, and the gradient's way through
# it. Deterministic operations make more.
LOGITS = {True: 5, False: 4}
# Float32 temporaries of the update at its most, of the largest weight and of all others, where compiled
# moves replace what lies there, and where plain ones or those of shares make new memory. Measured as
# growth of the process over the first update, compiling included, of 39 and of 110 million weights.
UPDATE_IN_PLACE, UPDATE_ANEW = (1, 0.4), (8, 0.3)
# Copies of a bucket of the all-reduce: packed, reduced, split into weights.
BUCKETS = 3
# Memory that the allocator takes for temporaries, relative to the live ones: measured 1.05 to 1.46 on CPUs.
GAPS = 1.15


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes on one device of a replica, by kind."""

    weights: int
    """In the format of the precision; the word embeddings, which emb and heads share, once."""
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
    rows = config.vocab_size + config.max_position_embeddings + config.type_vocab_size
    return {
        "emb": rows * width + norm,
        "hid": 4 * dense + norm + (2 * width * inner + inner + width) + norm,
        "enc_out": 0,
        "pool": dense,
        "heads": dense + norm + config.vocab_size + 2 * width + 2,
        **dict.fromkeys(TASK_HEADS, LABELS * (width + 1)),
    }


def stages_of(settings: TrainSettings) -> tuple[list[list[str]], list[int]]:
    """Return the blocks of each stage, and its device; one stage where none are given or `auto` is to choose."""
    parallel = settings.parallel
    stages, mapping = parallel.pipeline_stages, parallel.pipeline_device_mapping
    if parallel.layout == "auto" or stages is None or mapping is None:
        layers = ["hid"] * settings.bert_config.num_hidden_layers
        return [["emb", *layers, *settings.LAST_BLOCKS]], [0]
    return stages, mapping


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
    elements = weights_of(config)
    table = config.vocab_size * config.hidden_size
    count = sum(elements[block] for block in blocks)
    largest = table if "emb" in blocks else config.hidden_size * config.intermediate_size
    tables = sum("emb" in stages[number] or "heads" in stages[number] for number in here)
    replicas = settings.global_batch.replicas
    shares = replicas if parallel.replicated_tensor_sharding else 1
    moved = math.ceil(count / shares), math.ceil(min(largest, count) / shares)
    bucket = max(10**6 * parallel.reduce_bucket_megabytes, FLOAT32 * moved[1])
    reduced = BUCKETS * min(bucket, FLOAT32 * count) if replicas > 1 else 0
    in_place = settings.compile != "nothing" and count >= COMPILED_UPDATE_WEIGHTS and shares == 1
    of_largest, of_others = UPDATE_IN_PLACE if in_place else UPDATE_ANEW
    moving = FLOAT32 * (of_largest * moved[1] + of_others * (moved[0] - moved[1]))
    if parallel.optimizer_state_offload:
        # Only the gradients are on the device; the update runs on the host.
        moving = FLOAT32 * moved[0]
    return Estimate(
        weights=WEIGHT_BYTES[settings.precision] * count,
        accumulators=FLOAT32 * (count + table * max(0, tables - 1)),
        moments=0 if parallel.optimizer_state_offload else 2 * FLOAT32 * moved[0],
        stashes=int(GAPS * sum(_stashes(settings, stages, number) for number in here)),
        # Stages that share a device may run at once.
        working=int(GAPS * sum(_working(settings, stages, number) for number in here)),
        logits=int(GAPS * _logits(settings)) if "heads" in blocks else 0,
        update=int(GAPS * max(reduced, moving)),
    )


def _stashes(settings: TrainSettings, stages: Stages, number: int) -> int:
    """Return the saved bytes of a stage for all micro-batches between forward and backward."""
    parallel, blocks = settings.parallel, stages[number]
    if number == len(stages) - 1:
        # It takes each micro-batch forward and at once backward.
        return 0
    micro_batches = settings.global_batch.grad_acc_steps_per_replica
    most = micro_batches if parallel.schedule == "GPipe" else len(stages) - number
    if not parallel.recompute:
        onward = _input(settings, stages[number + 1][0])
        each = sum(_kept(settings, block, stashed=True) for block in blocks) + onward
        each += _sixteen_bit_kernels(settings, blocks)
    elif parallel.recompute_by == "layer":
        each = sum(_input(settings, block) for block in blocks)
    else:
        each = _input(settings, blocks[0])
    return min(micro_batches, most) * each


def _working(settings: TrainSettings, stages: Stages, number: int) -> int:
    """Return the peak bytes of a stage for one micro-batch, without its stash and the logits."""
    parallel, blocks = settings.parallel, stages[number]
    kept = [_kept(settings, block, stashed=False) for block in blocks]
    passing = _bytes(settings, PASSING) if "hid" in blocks else 0
    gradients = [WEIGHT_BYTES[settings.precision] * _gradient(settings, name) for name in blocks]
    kernels = _sixteen_bit_kernels(settings, blocks)
    if number == len(stages) - 1:
        # Either the heads run or, later, a layer; without recomputation all layers are saved below it.
        *body, heads = kept
        below, layer = sum(body), 0
        if parallel.recompute and parallel.recompute_by == "layer":
            below = sum(_input(settings, name) for name in blocks[:-1])
            layer = max(body, default=0)
        logits = _logits(settings) if "heads" in blocks else 0
        return below + kernels + gradients[-1] + max(heads, layer + passing - logits)
    if not parallel.recompute:
        # The backward function returns the gradients of all weights at once.
        return passing + sum(gradients)
    again = sum(kept)
    if parallel.recompute_by == "layer":
        again = max(kept)
    return again + passing + max(gradients) + kernels


def _gradient(settings: TrainSettings, block: str) -> int:
    """Return the elements of a block's gradients; those of the word embeddings count for both blocks."""
    config = settings.bert_config
    table = config.vocab_size * config.hidden_size if block == "heads" else 0
    return weights_of(config)[block] + table


def _sixteen_bit_kernels(settings: TrainSettings, blocks: Sequence[str]) -> int:
    """Return the bytes of 16-bit copies of the kernels, if the precision needs them."""
    if not settings.precision.startswith("mixed"):
        return 0
    config = settings.bert_config
    table = config.vocab_size * config.hidden_size if "heads" in blocks else 0
    cast = sum(weights_of(config)[block] for block in blocks if block != "emb")
    return COMPUTE_BYTES[settings.precision] * (cast + table)


def _logits(settings: TrainSettings) -> int:
    whole = LOGITS[settings.deterministic] * _bytes(settings, (("BPV", 1),))
    return whole // settings.parallel.embedding_serialization_factor


def _kept(settings: TrainSettings, block: str, *, stashed: bool) -> int:
    """Return the bytes that the gradient of a block reads for one micro-batch."""
    config = settings.bert_config
    shares = config.attention_probs_dropout_prob > 0.0
    large = _bytes(settings, (("BSD", 1),)) > FLOAT32 * COMPILED_CHAIN_ELEMENTS
    compiled = block == "hid" and large and settings.compile != "nothing"
    there = {
        "": True,
        "hidden": config.hidden_dropout_prob > 0.0,
        "shares": shares,
        "new shares": shares or settings.precision != "float32",
    }
    return sum(
        _bytes(settings, ((one.shape, one.stashed if stashed else one.in_turn),), one.form)
        for one in (KEPT_COMPILED if compiled else KEPT[block])
        if there[one.only]
    )


def _input(settings: TrainSettings, block: str) -> int:
    return _bytes(settings, ((INPUT[block], 1),), "compute") if INPUT[block] else 0


def _bytes(
    settings: TrainSettings, tensors: Sequence[tuple[str, int]], form: str = "float32"
) -> int:
    config = settings.bert_config
    sizes = {
        "B": settings.global_batch.micro_batch_size,
        "S": settings.max_seq_length,
        "P": settings.places_read,
        "N": config.num_attention_heads,
        "D": config.hidden_size,
        "F": config.intermediate_size,
        "V": config.vocab_size,
    }
    each = FLOAT32 if form == "float32" else COMPUTE_BYTES[settings.precision]
    return each * sum(
        number * math.prod(sizes[letter] for letter in shape) for shape, number in tensors
    )
