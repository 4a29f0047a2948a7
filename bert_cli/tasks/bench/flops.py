"""The floating-point operations that a step's model asks for, from its shape alone.

After Chowdhery et al. 2022 (PaLM), appendix B: 6 a parameter and place (a product with a matrix of N
parameters is 2 N forward; the gradients of its input and of its matrix are as many each), and 12 L D S
a place for attention's two products over S places in L layers of width D. Counted are the parameters
that a place is multiplied with: a look-up in a table is no product, and the word table is one at the
masked places only. Nothing is counted for recomputation, so doing work twice does not look like speed;
padding is counted, since it is multiplied like anything else.

Shapes: S places, P masked places, C sequences of a pack, D model width, F inner width, V words.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bert_cli.config.model import BertConfig

FORWARD_AND_BACKWARD = 3
"""A product forward and the two of its gradients."""
OPERATIONS = 2
"""A multiplication and an addition."""


class Shape(NamedTuple):
    """What a batch has of everything that is multiplied."""

    examples: int
    places: int
    """Of an example, S."""
    masked: int = 0
    """Masked places of an example, P."""
    sequences: int = 1
    """Sequences of an example, C."""


class Product(NamedTuple):
    """Rows of a width, times a matrix of this width and another."""

    rows: int
    width: int
    outputs: int

    @property
    def flops(self) -> int:
        """Operations of the product, forward."""
        return OPERATIONS * self.rows * self.width * self.outputs


def shape_of(batch: Mapping[str, Any]) -> Shape:
    """The shape of a batch, columns [..., B, S]."""
    *before, places = batch["input_ids"].shape
    examples = 1
    for size in before:
        examples *= int(size)
    masked = batch["masked_lm_positions"].shape[-1] if "masked_lm_positions" in batch else 0
    packs = batch.get("next_sentence_positions")
    return Shape(examples, places, masked, 1 if packs is None else packs.shape[-1])


def products(config: BertConfig, last_blocks: Sequence[str], shape: Shape) -> list[Product]:
    """Every product with a weight, forward, as often as it is done.

    `last_blocks` are those after the encoder's layers; raises KeyError for one that is not known.
    """
    width, inner = config.hidden_size, config.intermediate_size
    every = shape.examples * shape.places
    firsts, masked = shape.examples * shape.sequences, shape.examples * shape.masked
    layer = [Product(every, width, width)] * 4
    layer += [Product(every, width, inner), Product(every, inner, width)]
    after = {
        "enc_out": [],
        "pool": [Product(firsts, width, width)],
        "heads": [
            Product(firsts, width, 2),
            Product(masked, width, width),
            Product(masked, width, config.vocab_size),
        ],
        "qa_head": [Product(every, width, 2)],
    }
    return layer * config.num_hidden_layers + [one for name in last_blocks for one in after[name]]


def attention(config: BertConfig, shape: Shape) -> int:
    """Operations of attention's own two products, forward: queries with keys, shares with values."""
    pairs = shape.examples * shape.places**2
    return config.num_hidden_layers * 2 * OPERATIONS * pairs * config.hidden_size


def model_flops(config: BertConfig, last_blocks: Sequence[str], shape: Shape) -> int:
    """Operations of a batch's forward and backward pass."""
    forward = sum(one.flops for one in products(config, last_blocks, shape))
    return FORWARD_AND_BACKWARD * (forward + attention(config, shape))
