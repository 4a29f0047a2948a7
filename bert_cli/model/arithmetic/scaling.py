"""Unit Scaling (Blake et al. 2023): the table of factors for BERT.

Weights, activations and gradients have a variance of about 1, so float16 needs no loss scale. A scaled model computes
the function of a plain BERT whose weights are the scaled weights times powers of two: folding the factors in and out is
exact. The quotient of a factor and its power of two (0.71 to 1.41) is in the deviation of an initial value and AdamW's
rate. The gradient of each weight is the gradient of the plain BERT times a constant.

Sources: 2303.11257, for the residual branches 2407.17465, and the rules of the library `unit_scaling` for the same
operations.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from bert_cli.errors import ConfigError
from bert_cli.facts.bert import BertConfig
from bert_cli.facts.products import BatchShape

# Factors for unit variance after a standard normal input. GELU's is the library's: by integration 1.70 gives its output
# a standard deviation of 1, and 1.48 the gradient. The factor of tanh is by integration.
GELU = 1.767
TANH = 1.593
# Factor of attention's output. The library's sqrt(S) assumes independent values. BERT's positions share a segment,
# and with sqrt(S) all become nearly equal: in layer 12 the gradient of the scores was 1e-6 of layer 1's.
MEAN = 2.0


class Factor(NamedTuple):
    """The factors of a weight or an activation."""

    forward: float = 1.0
    """Multiplies the value when it is read; a power of two or, in LayerNorm's input, any number."""
    backward: float = 1.0
    """Multiplies the gradient instead of `forward`."""
    fold: float = 1.0
    """Of a weight: plain BERT's weight divided by this weight, a power of two."""
    deviation: float = 1.0
    """Of a weight: standard deviation of the initial value, of a gamma the initial value; and AdamW's rate."""


Table = dict[str, Factor]


def factors(config: BertConfig, batch: BatchShape) -> Table:
    """Return the factors of all weights and scaled activations by their paths, for pre-training in micro-batches."""
    width = config.hidden_size
    examples = batch.examples
    # A sum of `width` products of unit values has the variance `width`.
    readout = width**-0.5
    rows, masked, pairs = (examples * n for n in (batch.positions, batch.masked, batch.sequences))
    # The gradient of a weight is a sum over all positions of a micro-batch.
    sums = rows**-0.5
    masked_sums = masked**-0.5
    pair_sums = pairs**-0.5
    # Both losses have the weights of plain BERT: the gradient of a next-sentence label is as large as the gradients of
    # all masked tokens of its sequence.
    encoder = masked / readout  # its gradients relative to plain BERT's gradients
    # The gradient of a cross entropy over V words has the standard deviation sqrt(V - 1) / V at the start.
    mlm = masked * config.vocab_size / math.sqrt(config.vocab_size - 1.0)
    # The same for two classes: sqrt(2 - 1) / 2.
    nsp = 2.0 * pairs
    pooler = 2**-0.5 / readout
    table = _weight(readout, masked_sums)
    # The word embeddings are read twice; both gradients have the same factor.
    word = mlm * table.backward / (encoder * table.forward)
    keep = math.sqrt(1.0 - config.hidden_dropout_prob)
    of_masked = Factor(backward=masked_sums)
    of_pairs = Factor(backward=pair_sums)
    row = table._replace(forward=1.0)
    position = config.max_position_embeddings**0.5
    segment = config.type_vocab_size**0.5
    result = {
        "emb/word/embeddings": row._replace(backward=word),
        "emb/position/embeddings": row._replace(backward=sums * position),
        "emb/segment/embeddings": row._replace(backward=sums * segment),
        "emb/sum": Factor(3**-0.5, 3**-0.5),
        # LayerNorm's epsilon is relative to its input, which has another scale than in plain BERT.
        "emb/layer_norm/epsilon": Factor(*[1.0 / (3.0 * table.forward**2)] * 2),
        "emb/layer_norm/gamma": _weight(keep, sums),
        "emb/layer_norm/beta": _weight(keep, sums),
        "pool/dense/input": Factor(1.0, encoder / nsp / pooler),
        "pool/dense/kernel": _weight(width**-0.5, pair_sums),
        "pool/dense/bias": of_pairs,
        "heads/masked_lm/transform/kernel": _weight(width**-0.5, masked_sums),
        "heads/masked_lm/transform/bias": of_masked,
        "heads/masked_lm/layer_norm/gamma": of_masked,
        "heads/masked_lm/layer_norm/beta": of_masked,
        "heads/masked_lm/readout": Factor(1.0, encoder / mlm),
        "heads/masked_lm/table": table,
        "heads/masked_lm/bias": of_masked,
        "heads/mlm_loss": Factor(1.0, mlm),
        "heads/next_sentence/input": Factor(1.0, pooler),
        "heads/next_sentence/kernel": _weight(readout * TANH, pair_sums),
        "heads/next_sentence/bias": of_pairs,
        "heads/nsp_loss": Factor(1.0, nsp),
    }
    for layer in range(config.num_hidden_layers):
        rules = _layer(config, batch.positions, sums, layer)
        result |= {f"hid_{layer}/{name}": factor for name, factor in rules.items()}
    return result


def _layer(config: BertConfig, positions: int, sums: float, layer: int) -> Table:
    width = config.hidden_size
    inner = config.intermediate_size
    depth = config.num_hidden_layers
    # Branch k of the stack has the weight 1 / sqrt(L + k) relative to the residual (2407.17465, appendix G).
    keep = math.sqrt(1.0 - config.hidden_dropout_prob)
    # Dropout divides what it keeps by 1 - p, so the variance of a branch grows by 1 / (1 - p).
    first, second = (keep * (depth + 2 * layer + k) ** -0.5 for k in (0, 1))
    mean = MEAN * math.sqrt(1.0 - config.attention_probs_dropout_prob)
    # A score is one of S, so gradients of queries and keys are this small; 2.5 puts both sides of a factor in range.
    small = 2.5 * mean / math.sqrt(positions)
    kernel = _weight(width**-0.5, sums)
    bias = Factor(1.0, sums)
    out = _weight(first * width**-0.5 * mean, sums, _power(mean))
    down = _weight(second * inner**-0.5 * GELU, sums)
    products = ("attention/query", "attention/key", "attention/value", "feed_forward/inner")
    norms = ("attention/output/layer_norm", "feed_forward/output/layer_norm")
    return {
        **{f"{name}/kernel": kernel for name in products},
        **{f"{name}/bias": bias for name in products},
        **{f"{name}/{part}": bias for name in norms for part in ("gamma", "beta")},
        "attention/query/input": Factor(1.0, first * small),
        "attention/query/output": Factor(1.0, 1.0 / small),
        "attention/key/input": Factor(1.0, first * small),
        "attention/key/output": Factor(1.0, 1.0 / small),
        "attention/value/input": Factor(1.0, first),
        "attention/value/output": Factor(_power(mean), _power(mean)),
        "attention/output/dense/input": Factor(1.0, 1.0 / first),
        "attention/output/dense/kernel": out,
        "attention/output/dense/bias": _weight(first, sums),
        "feed_forward/inner/input": Factor(1.0, second),
        "feed_forward/output/dense/input": Factor(1.0, 1.0 / second),
        "feed_forward/output/dense/kernel": down,
        "feed_forward/output/dense/bias": _weight(second, sums),
    }


def _power(factor: float) -> float:
    """Return the nearest power of two."""
    return 2.0 ** round(math.log2(factor))


def _weight(ideal: float, backward: float, correction: float = 1.0) -> Factor:
    """Return the factor of a weight that is `ideal` times a unit weight in plain BERT.

    `correction` is a power of two by which the model multiplies the input or the output of the weight.
    """
    forward = _power(ideal / correction)
    quotient = ideal / correction / forward
    return Factor(forward, backward, forward * correction, quotient)


def check_trained_with(described: Mapping[str, object], scaling: str | None, where: str) -> None:
    """Raise ConfigError for weights, described by the config.json `where`, that were trained with another scaling."""
    # Without scaling any checkpoint can be used: it has the weights of a plain BERT.
    trained = described.get("scaling")
    if scaling not in (None, trained):
        raise ConfigError(
            f"scaling ({scaling})",
            f"the weights of {where} were trained with {trained or 'no scaling'}",
            "leave out --scaling, or start from weights that were trained with it",
        )


def folded(weights: Mapping[str, Any], table: Table, power: int = 1) -> dict[str, Any]:
    """Return the weights of the plain BERT with the same function, float32 so that nothing rounds.

    With power -1, return the scaled weights for the weights of a plain BERT; without a table both are the same.
    """
    if not table:
        return dict(weights)
    return {n: value.astype("float32") * table[n].fold ** power for n, value in weights.items()}
