"""Count the floating-point operations of a step from the shape of its model and of its batch.

After Chowdhery et al. 2022 (PaLM), appendix B: 6 N operations for each position and matrix of N parameters
(2 N forward, 2 N for each of the two gradients), and 12 L D S for each position in the attention of L layers of
width D over S positions. The word embeddings are multiplied only in the masked-LM head, at the P masked positions.
Recomputation is not counted, so that it does not look like speed; padding is.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from bert_cli.facts.architectures import ARCHITECTURES
from bert_cli.facts.bert import BertConfig
from bert_cli.facts.products import BatchShape, Product


def shape_of(batch: Mapping[str, Any]) -> BatchShape:
    """Return the shape of a batch with columns [..., B, S]."""
    *leading, positions = map(int, batch["input_ids"].shape)
    masked = 0
    if "masked_lm_positions" in batch:
        masked = batch["masked_lm_positions"].shape[-1]
    packs = batch.get("next_sentence_positions")
    sequences = 1
    if packs is not None:
        sequences = packs.shape[-1]
    return BatchShape(math.prod(leading), positions, masked, sequences)


def products(config: BertConfig, last_blocks: Sequence[str], shape: BatchShape) -> list[Product]:
    """Return all forward products with a weight, repeated ones too; `last_blocks` follow the layers."""
    layer = config.products(shape.examples * shape.positions)
    blocks = ARCHITECTURES[config.architecture].last_blocks
    last = [blocks[name].products(config, shape) for name in last_blocks]
    return layer * config.num_hidden_layers + list(itertools.chain.from_iterable(last))


def attention(config: BertConfig, shape: BatchShape) -> int:
    """Return the operations of the forward products of queries with keys and of probabilities with values."""
    pairs = shape.examples * shape.positions * config.keys_read(shape.positions)
    # A multiplication and an addition, for two products.
    return 2 * 2 * pairs * config.hidden_size


def forward_flops(config: BertConfig, last_blocks: Sequence[str], shape: BatchShape) -> int:
    """Return the operations of the products of a forward pass through the layers and the last blocks."""
    with_weights = sum(product.flops for product in products(config, last_blocks, shape))
    return with_weights + attention(config, shape)


def model_flops(config: BertConfig, last_blocks: Sequence[str], shape: BatchShape) -> int:
    """Return the operations of the forward and the backward pass, which has two products for each forward product."""
    return 3 * forward_flops(config, last_blocks, shape)
