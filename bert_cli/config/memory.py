"""Estimate the memory of each pipeline device during a step, in bytes, from the settings.

Weights, gradient accumulators and moments are in memory all the time. Added to them are the activations:
those saved between the forward and backward pass of micro-batches, those of the current micro-batch, and
its logits; or, at the end of a step, the temporaries of the update. `SAVED` lists the tensors that the
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


class Saved(NamedTuple):
    """Tensors of one shape that a block saves for its gradient."""

    what: str
    shape: str
    """In the shape letters of the model; P includes the position of [CLS]."""
    one_function: int
    """Their number if forward and backward are one function, which drops unused tensors."""
    two_functions: int
    """Their number if they are two functions, which also save the inputs of constants' gradients."""
    form: Literal["float32", "compute"] = "float32"
    """Format: between two products everything is float32 in every precision."""
    only: str = ""
    """Only with dropout of the "hidden" values or of the attention "probabilities", or when the product with
    the values reads another tensor than the softmax ("changed probabilities")."""


SAVED: dict[str, tuple[Saved, ...]] = {
    "emb": (
        Saved("LayerNorm: centred values, their scale", "BSD", 2, 2),
        Saved("dropout: mask", "BSD", 1, 1, only="hidden"),
        Saved("dropout: input", "BSD", 0, 1, only="hidden"),
    ),
    "hid": (
        Saved("inputs of both halves; query, key, value, attention output", "BSD", 6, 6, "compute"),
        Saved("query before it is scaled", "BSD", 0, 1),
        Saved("softmax", "BNSS", 1, 1),
        Saved("dropout of the probabilities: mask", "BNSS", 1, 1, only="probabilities"),
        Saved(
            "probabilities that multiply the values",
            "BNSS",
            1,
            1,
            "compute",
            only="changed probabilities",
        ),
        Saved("both LayerNorms: centred values, their scale", "BSD", 4, 4),
        Saved("both dropouts: masks", "BSD", 2, 2, only="hidden"),
        Saved("both dropouts: input", "BSD", 0, 2, only="hidden"),
        Saved("GELU: x / 2, -x / sqrt(2), erfc of it; x and -x", "BSF", 3, 5),
        Saved("GELU: result", "BSF", 1, 1, "compute"),
    ),
    "enc_out": (),
    "pool": (Saved("input, output", "BPD", 1, 2, "compute"),),
    "heads": (
        Saved("transform: input, output", "BPD", 2, 2, "compute"),
        Saved("GELU", "BPD", 3, 3),
        Saved("LayerNorm", "BPD", 2, 2),
    ),
    "qa_head": (Saved("input", "BPD", 1, 1, "compute"),),
    "glue_head": (Saved("dropout: mask, output", "BD", 2, 2),),
    "token_head": (Saved("dropout: mask, output", "BPD", 2, 2),),
}
# The same for a layer with chains that XLA compiled: they save their inputs, and recompute dropout.
SAVED_COMPILED = (
    Saved("inputs of both halves; query, key, value, attention output", "BSD", 6, 6, "compute"),
    Saved("query before it is scaled", "BSD", 0, 1),
    Saved("both LayerNorms: input products", "BSD", 2, 2, "compute"),
    Saved("probabilities with dropout and without; the scores", "BNSS", 2, 3, "compute"),
    Saved("GELU: input, output", "BSF", 2, 2, "compute"),
)
# The thresholds of the engine, which a test compares with it.
COMPILED_CHAIN_ELEMENTS, COMPILED_UPDATE_WEIGHTS = 2**19, 2**23
# The last blocks of the tasks, and the outputs of each per position. The real number of labels is known only
# with the data; it is negligible compared with the width of the model.
TASK_HEADS, LABELS = ("qa_head", "glue_head", "token_head"), 2
# The input of a block, in the compute dtype: all that recomputation saves of it.
INPUT = {"emb": "", "hid": "BSD", "enc_out": "BSD", **dict.fromkeys(("pool", "heads"), "BPD")}
INPUT |= dict.fromkeys(TASK_HEADS, "BPD")
# Temporaries of the backward pass of a layer at its peak, around GELU; float32, measured.
BACKWARD_TEMPORARIES = (("BSF", 3), ("BSD", 2))
# Copies of the logits in float32, measured: the scores, log-softmax, and their gradients. Deterministic
# operations make more.
LOGITS = {True: 5, False: 4}
# Float32 temporaries of the update at its peak, of the largest weight and of all others: for compiled updates
# in place, and for plain or sharded updates, which allocate their results. Measured as growth of the process
# during the first update, with compilation, of 39 and of 110 million weights.
UPDATE_IN_PLACE, UPDATE_ALLOCATED = (1, 0.4), (8, 0.3)
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
    """Return the blocks of each stage, and its device; one stage without stages or with layout `auto`."""
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
    shards = replicas if parallel.replicated_tensor_sharding else 1
    updated = math.ceil(count / shards), math.ceil(min(largest, count) / shards)
    bucket = max(10**6 * parallel.reduce_bucket_megabytes, FLOAT32 * updated[1])
    reduced = BUCKETS * min(bucket, FLOAT32 * count) if replicas > 1 else 0
    in_place = settings.compile != "nothing" and count >= COMPILED_UPDATE_WEIGHTS and shards == 1
    of_largest, of_others = UPDATE_IN_PLACE if in_place else UPDATE_ALLOCATED
    update = FLOAT32 * (of_largest * updated[1] + of_others * (updated[0] - updated[1]))
    if parallel.optimizer_state_offload:
        # Only the gradients are on the device; the update runs on the host.
        update = FLOAT32 * updated[0]
    return Estimate(
        weights=WEIGHT_BYTES[settings.precision] * count,
        accumulators=FLOAT32 * (count + table * max(0, tables - 1)),
        moments=0 if parallel.optimizer_state_offload else 2 * FLOAT32 * updated[0],
        stashes=int(GAPS * sum(_stashes(settings, stages, number) for number in here)),
        # Stages that share a device may run at once.
        working=int(GAPS * sum(_working(settings, stages, number) for number in here)),
        logits=int(GAPS * _logits(settings)) if "heads" in blocks else 0,
        update=int(GAPS * max(reduced, update)),
    )


def _stashes(settings: TrainSettings, stages: Stages, number: int) -> int:
    """Return the saved bytes of a stage for all micro-batches between forward and backward."""
    parallel, blocks = settings.parallel, stages[number]
    if number == len(stages) - 1:
        # It runs forward and backward of a micro-batch as one function.
        return 0
    micro_batches = settings.global_batch.grad_acc_steps_per_replica
    most = micro_batches if parallel.schedule == "GPipe" else len(stages) - number
    if not parallel.recompute:
        output = _input(settings, stages[number + 1][0])
        each = sum(_saved(settings, block, stashed=True) for block in blocks) + output
        each += _sixteen_bit_kernels(settings, blocks)
    elif parallel.recompute_by == "layer":
        each = sum(_input(settings, block) for block in blocks)
    else:
        each = _input(settings, blocks[0])
    return min(micro_batches, most) * each


def _working(settings: TrainSettings, stages: Stages, number: int) -> int:
    """Return the peak bytes of a stage for one micro-batch, without its stash and the logits."""
    parallel, blocks = settings.parallel, stages[number]
    saved = [_saved(settings, block, stashed=False) for block in blocks]
    temporaries = _bytes(settings, BACKWARD_TEMPORARIES) if "hid" in blocks else 0
    gradients = [WEIGHT_BYTES[settings.precision] * _gradient(settings, name) for name in blocks]
    kernels = _sixteen_bit_kernels(settings, blocks)
    if number == len(stages) - 1:
        # Either the heads run or, later, a layer; without recomputation all layers are saved below it.
        *body, heads = saved
        below, layer = sum(body), 0
        if parallel.recompute and parallel.recompute_by == "layer":
            below = sum(_input(settings, name) for name in blocks[:-1])
            layer = max(body, default=0)
        logits = _logits(settings) if "heads" in blocks else 0
        return below + kernels + gradients[-1] + max(heads, layer + temporaries - logits)
    if not parallel.recompute:
        # The backward function returns the gradients of all weights at once.
        return temporaries + sum(gradients)
    again = sum(saved)
    if parallel.recompute_by == "layer":
        again = max(saved)
    return again + temporaries + max(gradients) + kernels


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
    complete = LOGITS[settings.deterministic] * _bytes(settings, (("BPV", 1),))
    return complete // settings.parallel.embedding_serialization_factor


def _saved(settings: TrainSettings, block: str, *, stashed: bool) -> int:
    """Return the bytes that the gradient of a block reads for one micro-batch."""
    config = settings.bert_config
    has_dropout = config.attention_probs_dropout_prob > 0.0
    large = _bytes(settings, (("BSD", 1),)) > FLOAT32 * COMPILED_CHAIN_ELEMENTS
    compiled = block == "hid" and large and settings.compile != "nothing"
    applies = {
        "": True,
        "hidden": config.hidden_dropout_prob > 0.0,
        "probabilities": has_dropout,
        "changed probabilities": has_dropout or settings.precision != "float32",
    }
    return sum(
        _bytes(
            settings, ((one.shape, one.two_functions if stashed else one.one_function),), one.form
        )
        for one in (SAVED_COMPILED if compiled else SAVED[block])
        if applies[one.only]
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
        "P": settings.positions_read,
        "N": config.num_attention_heads,
        "D": config.hidden_size,
        "F": config.intermediate_size,
        "V": config.vocab_size,
    }
    each = FLOAT32 if form == "float32" else COMPUTE_BYTES[settings.precision]
    return each * sum(
        number * math.prod(sizes[letter] for letter in shape) for shape, number in tensors
    )
