"""The memory of a layout, by the published count of what a layer saves for its backward pass.

Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large Transformer Models", section 4.1) count the inputs
of products, GELU and LayerNorms, and the attention probabilities. Compilers and allocators differ: for 27 compiled
steps of JAX the estimate is off by 9 % on average, and at most by 23 %. So `layout.USABLE` leaves a fifth free.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from bert_cli.config.training import TrainSettings
from bert_cli.facts.architectures import ARCHITECTURES
from bert_cli.facts.bert import BertConfig
from bert_cli.facts.optimizers import MOMENT_BYTES

Stages = Sequence[Sequence[str]]

# Bytes of an element of a weight, and of an operand of a matrix product.
WEIGHT_BYTES = {"float32": 4, "mixed_float16": 4, "mixed_bfloat16": 4, "float16": 2}
COMPUTE_BYTES = {"float32": 4, "mixed_float16": 2, "mixed_bfloat16": 2, "float16": 2}
FLOAT32 = 4
# Threshold of the engine; a test compares it with the engine's.
COMPILED_CHAIN_ELEMENTS = 2**19
# Factor of TensorFlow's layers that XLA does not compile: a forward function saves both sides of each operation.
UNCOMPILED = 2


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The memory of one device in bytes: the terms of `total`."""

    weights: int
    """In the dtype of the weights; a part if sharded."""
    accumulators: int
    """Float32 sums of gradients; emb and heads in two stages each have sums for the word embeddings."""
    moments: int
    """The slots of the optimizer; none if offloaded, a part if sharded."""
    activations: int
    """Saved between forward and backward, of all micro-batches in flight; and copies of weights in 16 bits."""
    logits: int
    """Scores of the vocabulary for every masked position, in float32."""

    @property
    def total(self) -> int:
        """Return the peak memory."""
        return sum(vars(self).values())


def weights_of(config: BertConfig) -> dict[str, int]:
    """Return the number of weights of each block; `heads` without the shared token embeddings."""
    last_blocks = ARCHITECTURES[config.architecture].last_blocks
    return {
        "emb": config.embedding_weights,
        "hid": config.layer_weights,
        "final_norm": config.final_norm_weights,
        **{name: block.weights(config) for name, block in last_blocks.items()},
    }


def stages_of(order: TrainSettings) -> tuple[list[list[str]], list[int]]:
    """Return the blocks of each stage, and its device; one stage without stages or with layout `auto`."""
    parallel = order.parallel
    if parallel.pipeline_stages is None or parallel.layout == "auto":
        return laid_stages([order.bert_config.num_hidden_layers], order.head.last_blocks), [0]
    return parallel.pipeline_stages, parallel.pipeline_device_mapping or [0]


def laid_stages(layers: Sequence[int], last_blocks: Sequence[str]) -> list[list[str]]:
    """Return the blocks of stages with these numbers of layers."""
    stages = [["hid"] * number for number in layers]
    stages[0].insert(0, "emb")
    stages[-1] += last_blocks
    return stages


# --- estimate


def estimate(order: TrainSettings) -> list[Estimate]:
    """Return the estimate of each device of a replica."""
    stages, mapping = stages_of(order)
    devices = [on_device(order, stages, mapping, device) for device in range(max(mapping) + 1)]
    # Devices of `tensor` are equal.
    return devices * math.prod(order.parallel.tensor_shape)


def on_device(
    order: TrainSettings, stages: Stages, mapping: Sequence[int], device: int
) -> Estimate:
    """Return the estimate of one device for these stages instead of the settings' stages."""
    config = order.bert_config
    parallel = order.parallel
    numbers = [number for number, on in enumerate(mapping) if on == device]
    blocks = list(chain.from_iterable(stages[number] for number in numbers))
    first, second = parallel.tensor_shape
    elements = weights_of(config)
    weights = sum(elements[name] for name in blocks) // (first * second)
    # JAX divides a weight only along an axis whose size the replicas divide; the width stands for all axes.
    is_divisible = config.hidden_size % order.global_batch.replicas == 0 and second == 1
    shards = 1
    if order.engine == "tensorflow" or is_divisible:
        shards = order.global_batch.replicas
    shard = math.ceil(weights / shards)
    stored = shard if parallel.shard_weights else weights
    updated = shard if parallel.replicated_tensor_sharding else stored
    if parallel.replicated_tensor_sharding and order.engine == "tensorflow":
        # A replica has the moments of complete weights, so at least those of the largest.
        largest = config.intermediate_size
        if "emb" in blocks:
            largest = max(largest, config.vocab_size)
        updated = max(shard, config.hidden_size * largest)
    tables = sum("emb" in stages[n] or _reads_word_table(config, stages[n]) for n in numbers)
    # Each stage with the word embeddings has its own sums of their gradients.
    accumulated = stored + max(0, tables - 1) * config.vocab_size * config.hidden_size
    masked = order.global_batch.micro_batch_size * order.masked * _reads_word_table(config, blocks)
    logits = FLOAT32 * masked * config.vocab_size // first
    size = COMPUTE_BYTES[order.precision]
    micro_batches = order.global_batch.grad_acc_steps_per_replica
    # 1F1B: stage n of p holds the activations of at most p - n micro-batches.
    layers = sum(min(micro_batches, len(stages) - n) * stages[n].count("hid") for n in numbers)
    layer = saved_by_layer(order) // (first * second)
    if parallel.recompute:
        # The layer in its backward pass also has its gradients.
        inputs = layers * size * _positions(order) * config.hidden_size // second
        activations = inputs + 2 * layer
    else:
        activations = layers * layer
        if order.precision.startswith("mixed"):
            activations += size * weights  # copies in the lower precision
    moments = MOMENT_BYTES * updated
    if parallel.optimizer_state_offload:
        moments = 0
    return Estimate(
        weights=WEIGHT_BYTES[order.precision] * stored,
        accumulators=FLOAT32 * accumulated,
        moments=moments,
        activations=activations,
        logits=logits // parallel.embedding_serialization_factor,
    )


def _reads_word_table(config: BertConfig, blocks: Sequence[str]) -> bool:
    """Return whether one of the blocks scores the vocabulary with the word embeddings."""
    last_blocks = ARCHITECTURES[config.architecture].last_blocks.items()
    return any(block.reads_word_table for name, block in last_blocks if name in blocks)


def _positions(order: TrainSettings) -> int:
    """Return the positions of a micro-batch."""
    return order.global_batch.micro_batch_size * order.texts_per_example * order.max_seq_length


def saved_by_layer(order: TrainSettings) -> int:
    """Return the bytes that the backward pass of a layer reads, for one micro-batch."""
    config = order.bert_config
    rows = _positions(order)
    size = COMPUTE_BYTES[order.precision]
    operands = 3 * rows * config.hidden_size  # queries, keys and values
    for product in config.products(rows):
        operands += rows * product.inputs * product.has_own_input
        operands += rows * product.outputs * (product.is_activated + product.is_gate)
    # LayerNorms and residuals are float32, and a LayerNorm saves its input and the result.
    norms = 2 * FLOAT32 * config.LAYER_NORMS * rows * config.hidden_size
    keys = config.keys_saved(order.max_seq_length, order.engine)
    scores = rows * config.num_attention_heads * keys // config.num_hidden_layers
    # With dropout the probabilities are saved before and after it, and a mask of bytes.
    score_bytes = size
    if config.attention_probs_dropout_prob:
        score_bytes = 2 * size + 1
    saved = size * operands + norms + score_bytes * scores
    is_small = rows * config.hidden_size <= COMPILED_CHAIN_ELEMENTS
    if order.engine == "tensorflow" and (is_small or order.compile == "nothing"):
        return UNCOMPILED * saved
    return saved
