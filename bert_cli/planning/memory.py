"""The memory of a layout: permanent values, and activations or the temporaries of the update."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bert_cli.facts.architectures import ARCHITECTURES
from bert_cli.facts.bert import BertConfig
from bert_cli.facts.heads import GATHER, LAST_BLOCKS, Saved
from bert_cli.planning.workload import Workload

Stages = Sequence[Sequence[str]]

# Bytes of an element of a weight, and of an operand of a matrix product.
WEIGHT_BYTES = {"float32": 4, "mixed_float16": 4, "mixed_bfloat16": 4, "float16": 2}
COMPUTE_BYTES = {"float32": 4, "mixed_float16": 2, "mixed_bfloat16": 2, "float16": 2}
FLOAT32 = 4
# Thresholds of the engine; a test compares them with the engine's.
COMPILED_CHAIN_ELEMENTS = 2**19
COMPILED_UPDATE_WEIGHTS = 2**23
# Measured, in float32: temporaries of the backward pass of a layer at its peak, around GELU; copies of the
# logits, with and without deterministic operations; temporaries of the update for each element of the
# largest weight and of all other weights, in place or allocated; copies of an all-reduce bucket.
BACKWARD_TEMPORARIES = {"BSF": 3, "BSD": 2}
LOGITS = {True: 5, False: 4}
UPDATE_IN_PLACE = (1, 0.4)
UPDATE_ALLOCATED = (8, 0.3)
REDUCE_BUCKET = 64 * 10**6
"""Bytes of a bucket of the gradient all-reduce, in float32."""
BUCKETS = 3
# Memory that the allocator takes for temporaries, relative to the live temporaries: measured 1.05 to 1.46 on CPUs.
GAPS = 1.15
# For JAX by the kind of device, as XLA saves (docs/lab/measured.md#compiled-for-accelerators): tensors that a
# GELU saves, float32 tensors that a LayerNorm saves, and float32 copies of the weights of layers that run in a loop.
JAX_GELU = {"CPU": 3, "GPU": 2, "TPU": 2}
JAX_NORM = {"CPU": 2, "GPU": 1, "TPU": 2}
JAX_LOOP_COPIES = {"CPU": 0, "GPU": 0, "TPU": 1}
# For JAX, copies in float32 of the logits, and of the word embeddings and their gradient (twice as many with chunks).
JAX_COPIES = 2
# For JAX, copies of the weights that are gathered at once.
JAX_GATHERED = 4


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes on one device of a replica, by kind."""

    weights: int
    """The word embeddings, which emb and heads share, count once."""
    accumulators: int
    """Float32 sums of gradients; a stage with heads and without emb also has sums for the word embeddings."""
    moments: int
    """The slots of the optimizer; none if offloaded, a part if sharded."""
    stashes: int
    """Activations saved between forward and backward, of all micro-batches in flight."""
    working: int
    """Activations and gradients of the current micro-batch, without its logits."""
    logits: int
    """Logits of the vocabulary for every masked position, and their temporaries."""
    update: int
    """Temporaries at the end of a step, when stashes, working and logits are freed."""

    @property
    def total(self) -> int:
        """Return the peak memory."""
        peak = max(self.stashes + self.working + self.logits, self.update)
        return self.weights + self.accumulators + self.moments + peak


def weights_of(config: BertConfig) -> dict[str, int]:
    """Return the number of weights of each block; shared weights count in the first block."""
    last_blocks = ARCHITECTURES[config.architecture].last_blocks.items()
    return {
        "emb": config.embedding_weights,
        "hid": config.layer_weights,
        "final_norm": config.final_norm_weights,
        **{name: block.weights(config) for name, block in last_blocks},
    }


def _reads_word_table(config: BertConfig, blocks: Sequence[str]) -> bool:
    """Return whether one of the blocks scores the vocabulary with the word embeddings."""
    last_blocks = ARCHITECTURES[config.architecture].last_blocks.items()
    return any(block.reads_word_table for name, block in last_blocks if name in blocks)


def stages_of(work: Workload) -> tuple[list[list[str]], list[int]]:
    """Return the blocks of each stage, and its device; one stage without stages or with layout `auto`."""
    parallel = work.parallel
    stages = parallel.pipeline_stages
    mapping = parallel.pipeline_device_mapping
    if parallel.layout == "auto" or stages is None or mapping is None:
        return laid_stages([work.model.num_hidden_layers], work.last_blocks), [0]
    return stages, mapping


def laid_stages(layers: Sequence[int], last_blocks: Sequence[str]) -> list[list[str]]:
    """Return the blocks of stages with these numbers of layers."""
    stages = [["hid"] * number for number in layers]
    stages[0].insert(0, "emb")
    stages[-1] += last_blocks
    return stages


def estimate(work: Workload, kind: str = "CPU") -> list[Estimate]:
    """Return the estimate of each device (CPU, GPU or TPU) of a replica."""
    if work.engine == "jax":
        return [_with_jax(work, kind)] * math.prod(work.parallel.tensor_shape)
    stages, mapping = stages_of(work)
    return [on_device(work, stages, mapping, device) for device in range(max(mapping) + 1)]


def _with_jax(work: Workload, kind: str) -> Estimate:
    """Return the estimate with JAX: `tensor` divides matrices and their products."""
    config = work.model
    parallel = work.parallel
    ((blocks,), _) = stages_of(work)
    (first, second) = parallel.tensor_shape
    replicas = work.batch.replicas
    elements = weights_of(config)
    layers = config.num_hidden_layers
    by_rows = first if config.vocab_size % first == 0 else 1
    inner = layers * config.layer_matrices
    table = config.vocab_size * config.hidden_size
    weights = sum(elements[block] for block in (*blocks, "final_norm")) - inner - table
    inner = inner // (first * second)
    table = table // (by_rows * second)
    weights += inner + table
    shards = replicas if config.hidden_size % replicas == 0 and second == 1 else 1
    stored = weights // (shards if parallel.shard_weights else 1)
    updated = weights // shards if parallel.replicated_tensor_sharding else stored
    # Operands and results of products are in the dtype of the products, and on CPUs in float32.
    compute = FLOAT32 if kind == "CPU" else COMPUTE_BYTES[work.precision]
    bsd = count_elements(work, "BSD")
    bsf = count_elements(work, "BSF")
    scores = _scores(work)
    divided = compute * (4 * bsd + scores + JAX_GELU[kind] * bsf)
    saved = (_saved_by_xla(work, kind, compute) - divided) // second + divided // first
    working = layers * saved
    layer = 2 * compute * (scores - bsf) // first
    copies = work.precision.startswith("mixed") * compute * inner
    update = JAX_GATHERED * weights if stored < weights else updated
    # A loop over layers, each weight of which is one array; the factors of Unit Scaling differ from layer to layer.
    if not work.scaling and (parallel.recompute or kind == "TPU"):
        copies = JAX_LOOP_COPIES[kind] * FLOAT32 * inner * stored // weights
        # The update has temporaries for one array at a time: the word table, or a kernel of all layers.
        kernels = layers * config.hidden_size * config.intermediate_size // (first * second)
        update = max(kernels, table) * updated // weights
        if parallel.recompute:
            working = layers * compute * bsd // second
            layer += saved
    chunks = parallel.embedding_serialization_factor
    reads = _reads_word_table(config, blocks)
    tables = JAX_COPIES * FLOAT32 * (2 if chunks > 1 else 1)
    logits = (JAX_COPIES + (stored < weights)) * FLOAT32
    if kind == "GPU":
        # In 16 bits a copy is padded to a multiple of 8 words.
        logits = compute * (2 if compute == 2 and config.vocab_size % 8 else 1)
        tables = reads * logits
    logits *= reads * count_elements(work, "BPV")
    logits //= chunks if by_rows == 1 else by_rows
    # Either the head runs or, later, a layer, whose attention begins its backward pass after its feed-forward.
    working += tables * table + max(0, layer - logits)
    return Estimate(
        weights=WEIGHT_BYTES[work.precision] * stored,
        accumulators=FLOAT32 * stored,
        moments=work.optimizer_kind.slot_bytes(updated),
        stashes=0,
        working=working + saved_bytes(work, "emb", stashed=False) + copies,
        logits=logits,
        update=FLOAT32 * update,
    )


def on_device(work: Workload, stages: Stages, mapping: Sequence[int], device: int) -> Estimate:
    """Return the estimate of one device for these stages instead of the settings' stages."""
    config = work.model
    parallel = work.parallel
    numbers = [number for number, on in enumerate(mapping) if on == device]
    blocks = [block for number in numbers for block in stages[number]]
    table = config.vocab_size * config.hidden_size
    weights = sum(weights_of(config)[block] for block in blocks)
    largest = table if "emb" in blocks else config.hidden_size * config.intermediate_size
    tables = sum("emb" in stages[n] or _reads_word_table(config, stages[n]) for n in numbers)
    replicas = work.batch.replicas
    shards = replicas if parallel.replicated_tensor_sharding else 1
    updated = math.ceil(weights / shards)
    largest_part = math.ceil(min(largest, weights) / shards)
    bucket = max(REDUCE_BUCKET, FLOAT32 * largest_part)
    reduced = BUCKETS * min(bucket, FLOAT32 * weights) if replicas > 1 else 0
    in_place = work.compile != "nothing" and weights >= COMPILED_UPDATE_WEIGHTS and shards == 1
    of_largest, of_others = UPDATE_IN_PLACE if in_place else UPDATE_ALLOCATED
    update = FLOAT32 * (of_largest * largest_part + of_others * (updated - largest_part))
    if parallel.optimizer_state_offload:  # only the gradients are on the device
        update = FLOAT32 * updated
    return Estimate(
        weights=WEIGHT_BYTES[work.precision] * weights,
        accumulators=FLOAT32 * (weights + table * max(0, tables - 1)),
        moments=0 if parallel.optimizer_state_offload else work.optimizer_kind.slot_bytes(updated),
        stashes=int(GAPS * sum(_stashes(work, stages, number) for number in numbers)),
        # Stages that share a device may run at once.
        working=int(GAPS * sum(_working(work, stages, number) for number in numbers)),
        logits=int(GAPS * _logits(work)) if _reads_word_table(config, blocks) else 0,
        update=int(GAPS * max(reduced, update)),
    )


def _stashes(work: Workload, stages: Stages, number: int) -> int:
    """Return the saved bytes of a stage for all micro-batches between forward and backward."""
    parallel = work.parallel
    blocks = stages[number]
    if number == len(stages) - 1:  # forward and backward are one function
        return 0
    micro_batches = work.batch.grad_acc_steps_per_replica
    in_flight = len(stages) - number
    if not parallel.recompute:
        each = sum(saved_bytes(work, block, stashed=True) for block in blocks)
        each += _input(work, stages[number + 1][0]) + _kernel_copies(work, blocks)
    else:
        each = sum(_input(work, block) for block in blocks)
    return min(micro_batches, in_flight) * each


def _working(work: Workload, stages: Stages, number: int) -> int:
    """Return the peak bytes of a stage for one micro-batch, without its stash and the logits."""
    parallel = work.parallel
    blocks = stages[number]
    config = work.model
    saved = [saved_bytes(work, block, stashed=False) for block in blocks]
    shapes = BACKWARD_TEMPORARIES if "hid" in blocks else {}
    temporaries = sum(FLOAT32 * n * count_elements(work, shape) for shape, n in shapes.items())
    elements = weights_of(config)
    if _reads_word_table(config, blocks):
        elements[blocks[-1]] += config.vocab_size * config.hidden_size  # the shared word embeddings
    gradients = [WEIGHT_BYTES[work.precision] * elements[name] for name in blocks]
    kernels = _kernel_copies(work, blocks)
    if number == len(stages) - 1:
        # Either the heads run or, later, a layer; without recomputation all layers are saved below it.
        *body, heads = saved
        below = sum(_input(work, name) for name in blocks[:-1]) if parallel.recompute else sum(body)
        layer = max(body, default=0) if parallel.recompute else 0
        logits = _logits(work) if _reads_word_table(config, blocks) else 0
        return below + kernels + gradients[-1] + max(heads, layer + temporaries - logits)
    if not parallel.recompute:
        # The backward function returns the gradients of all weights at once.
        return temporaries + sum(gradients)
    return max(saved) + temporaries + max(gradients) + kernels


def _kernel_copies(work: Workload, blocks: Sequence[str]) -> int:
    """Return the bytes of kernels in 16 bits, or times the factors of Unit Scaling."""
    if not work.precision.startswith("mixed") and not work.scaling:
        return 0
    config = work.model
    table = config.vocab_size * config.hidden_size if _reads_word_table(config, blocks) else 0
    cast = sum(weights_of(config)[block] for block in blocks if block != "emb")
    return COMPUTE_BYTES[work.precision] * (cast + table)


def _logits(work: Workload) -> int:
    complete = LOGITS[work.deterministic] * FLOAT32 * count_elements(work, "BPV")
    return complete // work.parallel.embedding_serialization_factor


def saved_bytes(work: Workload, block: str, *, stashed: bool) -> int:
    """Return the bytes that the gradient of a block reads for one micro-batch.

    `stashed`: forward and backward are two functions, which save more tensors than a single function. Between two
    products everything is float32 in every precision. TensorFlow's layers that XLA compiles save inputs, and recompute
    dropout.
    """
    config = work.model
    more = int(stashed)
    scaled = more * int(work.scaling is not None)  # values before a factor
    hidden = int(config.hidden_dropout_prob > 0.0)
    dropout = int(config.attention_probs_dropout_prob > 0.0)
    wide = FLOAT32
    compute = COMPUTE_BYTES[work.precision]
    bsd = count_elements(work, "BSD")
    bnss = _scores(work)
    is_large = bsd > COMPILED_CHAIN_ELEMENTS
    is_compiled = is_large and work.compile != "nothing"
    products = config.products(count_elements(work, "BS"))
    activated = [product.rows * product.outputs for product in products if product.is_activated]
    bsf = sum(activated)
    gates = sum(product.rows * product.outputs for product in products if product.is_gate)
    # Of products, except products after GELU; and queries, keys and values.
    inputs = sum(product.rows * product.inputs for product in products if product.has_own_input)
    inputs += 3 * bsd - bsf
    tensors = 2 * config.LAYER_NORMS + config.GATE_TENSORS + hidden * config.RESIDUALS * (1 + more)
    if is_compiled and not config.IS_PRE_NORM:
        # Dropout, residual and LayerNorm are a chain, which saves its second input.
        inputs += config.RESIDUALS * bsd
        tensors = 0
    layer = compute * inputs + (tensors + len(activated) * more + 3 * scaled) * wide * bsd
    # Fused, GELU saves a product and its gate; otherwise also the result of GELU, both in float32.
    layer += gates * (compute if is_compiled else 2 * wide)
    if block == "hid" and is_compiled:
        return layer + (2 + more) * compute * bnss + 2 * compute * bsf
    changed = int(bool(dropout) or work.precision != "float32")
    if block in LAST_BLOCKS:
        pooled, masked = (count_elements(work, shape) for shape in ("BD", "BPD"))
        saved = Saved(compute, more, pooled, masked, bsd)
        return ARCHITECTURES[config.architecture].last_blocks[block].saved(saved)
    if block == "emb":
        return (2 + hidden * (1 + more) + 3 * scaled) * wide * bsd
    layer += ((1 + dropout) * wide + changed * compute) * bnss
    return layer + ((3 + 2 * more) * wide + compute) * bsf


def _saved_by_xla(work: Workload, kind: str, compute: int) -> int:
    """Return the bytes that the gradient of a layer reads for one micro-batch; masks of dropout are bytes."""
    config = work.model
    bsd = count_elements(work, "BSD")
    scores = _scores(work)
    masks = bsd * config.RESIDUALS * (config.hidden_dropout_prob > 0.0)
    masks += scores * (1 + compute) * (config.attention_probs_dropout_prob > 0.0)
    operands = (3 + config.GATE_TENSORS) * bsd + scores
    for product in config.products(count_elements(work, "BS")):
        operands += product.rows * product.inputs * product.has_own_input
        results = (JAX_GELU[kind] - 1) * product.is_activated + product.is_gate
        operands += product.rows * product.outputs * results
    return compute * operands + FLOAT32 * JAX_NORM[kind] * config.LAYER_NORMS * bsd + masks


def _scores(work: Workload) -> int:
    """Return the elements of the attention probabilities that a layer saves, on average."""
    keys = work.model.keys_saved(work.max_seq_length, work.engine)
    return count_elements(work, "BNS") * keys // work.model.num_hidden_layers


def _input(work: Workload, block: str) -> int:
    """Return the bytes of a block's input, the only tensor that recomputation saves."""
    shape = "BSD" if block in ("hid", GATHER.name) else "BPD"
    return 0 if block == "emb" else COMPUTE_BYTES[work.precision] * count_elements(work, shape)


def count_elements(work: Workload, shape: str) -> int:
    """Return the elements of a tensor of one micro-batch; P are the positions that the last blocks read, with [CLS]."""
    config = work.model
    sizes = {
        "B": work.batch.micro_batch_size * work.texts_per_example,
        "S": work.max_seq_length,
        "P": work.sequences + work.masked if work.masked else work.max_seq_length,
        "N": config.num_attention_heads,
        "D": config.hidden_size,
        "F": config.intermediate_size,
        "V": config.vocab_size,
    }
    return math.prod(sizes[letter] for letter in shape)
