"""AdamW and LAMB: one update as a function of arrays, LAMB being AdamW times a trust ratio.

Nothing is remembered here: weight, gradient, moments, step and learning rate come in, the new
weight and moments go out, in float32 whatever the weight's own format, and the caller stores them.
The functions are plain `keras.ops`, fit for a `tf.function` with XLA. What a weight is subject to
(decay, layer adaptation) follows from the last part of its name by a table that must cover every
weight exactly once. Rounding to a 16-bit format is a separate last act, to the nearest by a cast
or up and down at random by `round_stochastically`.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from keras import ops

from bert_cli.errors import ConfigError, nearest

Array = Any
"""A tensor of the Keras backend or anything that it converts."""

KINDS = ("kernel", "embeddings", "bias", "gamma", "beta")
"""Last parts of the names of weights; gamma and beta are LayerNorm's scale and shift."""

NO_WEIGHT_DECAY = ("bias", "beta")
"""Kinds that do not decay. Google's BERT also exempts gamma: pass ("bias", "beta", "gamma")."""

NO_LAYER_ADAPTATION = ("bias", "beta", "gamma")
"""Kinds whose trust ratio is 1 under LAMB."""


@dataclass(frozen=True)
class Rule:
    """What the optimizer does to one weight beyond Adam."""

    decays: bool
    """The weight is drawn towards zero by weight_decay_rate."""
    adapts: bool
    """The move is scaled by LAMB's trust ratio."""
    rate: float = 1.0
    """Share of the learning rate that the weight moves by."""


@dataclass(frozen=True, kw_only=True)
class Adam:
    """The numbers of AdamW and LAMB that are the same for all weights and steps."""

    beta_1: float = 0.9
    """Decay of the first moment."""
    beta_2: float = 0.999
    """Decay of the second moment."""
    epsilon: float = 1e-6
    """Added to the root of the second moment."""
    weight_decay_rate: float = 0.01
    """Decoupled decay, a share of the weight per unit of learning rate."""


def patterns(
    optimizer: str,
    no_weight_decay: Iterable[str] = NO_WEIGHT_DECAY,
    no_layer_adaptation: Iterable[str] = NO_LAYER_ADAPTATION,
) -> dict[str, Rule]:
    """Return the table of name patterns (regular expressions on whole names) to rules.

    `optimizer` is "LAMB" or "AdamW"; under AdamW no weight adapts. The two lists hold last parts of
    names. Raises ConfigError for an optimizer or a kind that does not exist.
    """
    if optimizer not in ("LAMB", "AdamW"):
        raise ConfigError(
            f"optimizer_opts.name ({optimizer}): no such optimizer; choose LAMB or AdamW"
        )
    exempt = {
        "no_weight_decay": tuple(no_weight_decay),
        "no_layer_adaptation": tuple(no_layer_adaptation),
    }
    for setting, kinds in exempt.items():
        for kind in kinds:
            if kind not in KINDS:
                near = nearest(kind, KINDS)
                hint = f"did you mean '{near}'?" if near else f"choose from {', '.join(KINDS)}"
                raise ConfigError(
                    f"optimizer_opts.{setting} ({kind}): no weight's name ends so; {hint}"
                )
    return {
        rf"(.*/)?{kind}": Rule(
            decays=kind not in exempt["no_weight_decay"],
            adapts=optimizer == "LAMB" and kind not in exempt["no_layer_adaptation"],
        )
        for kind in KINDS
    }


def assign(names: Iterable[str], table: Mapping[str, Rule]) -> dict[str, Rule]:
    """Return the rule of every weight; each name must match exactly one pattern of the table.

    Raises ConfigError naming all weights that match none or several.
    """
    rules: dict[str, Rule] = {}
    wrong: list[str] = []
    for name in names:
        matching = [pattern for pattern in table if re.fullmatch(pattern, name)]
        if len(matching) == 1:
            rules[name] = table[matching[0]]
        elif matching:
            wrong.append(f"{name} (matches {' and '.join(matching)})")
        else:
            wrong.append(f"{name} (matches nothing)")
    if wrong:
        raise ConfigError(
            f"optimizer patterns ({len(wrong)} weights): every weight needs exactly one pattern "
            f"for decay and layer adaptation; mend the table or the names of {'; '.join(wrong)}"
        )
    return rules


def direction(
    weight: Array,
    gradient: Array,
    moment_1: Array,
    moment_2: Array,
    step: Array,
    *,
    adam: Adam,
    rule: Rule,
    factor: Array = 1.0,
) -> tuple[Array, Array, Array]:
    """Return (where the weight moves, new first moment, new second moment), all float32.

    Of the gradient times `factor`, which goes into the moments' own factors: a product by itself would
    be one more array for XLA. Element by element, so a part of a weight gives that part of the result.
    `step` counts the updates before this one: the first sees 0, and the papers' t is step + 1; it may be
    a number or a scalar tensor. With m and v corrected for their start at zero, the direction is
    r = m / (sqrt(v) + epsilon) + weight_decay_rate * weight (Loshchilov & Hutter 2019, "Decoupled
    Weight Decay Regularization", Algorithm 2, with the learning rate also multiplying the decay, as
    PyTorch and Google's BERT have it).
    """
    w = ops.cast(weight, "float32")
    g = ops.cast(gradient, "float32")
    t = ops.cast(step, "float32") + 1.0
    m = adam.beta_1 * moment_1 + (1.0 - adam.beta_1) * factor * g
    v = adam.beta_2 * moment_2 + ops.square(math.sqrt(1.0 - adam.beta_2) * factor * g)
    r = (m / _one_minus_power(adam.beta_1, t)) / (
        ops.sqrt(v / _one_minus_power(adam.beta_2, t)) + adam.epsilon
    )
    if rule.decays:
        r = r + adam.weight_decay_rate * w
    return r, m, v


def _one_minus_power(beta: float, t: Array) -> Array:
    # In float32, 1 - 0.999 ** 1 is off by 1.3e-5 of its value; by way of the exact logarithm the
    # error is that of one rounding.
    return -ops.expm1(t * math.log(beta)) if beta > 0.0 else 1.0


def trust_ratio(weight_squared: Array, direction_squared: Array) -> Array:
    """Return |weight| / |direction| from the squared norms of a whole weight and of its direction.

    You et al. 2020, "Large Batch Optimization for Deep Learning", Algorithm 2, with phi the
    identity. It is 1 when either norm is 0.
    """
    weight_norm, direction_norm = ops.sqrt(weight_squared), ops.sqrt(direction_squared)
    both = ops.logical_and(weight_norm > 0.0, direction_norm > 0.0)
    one = ops.ones_like(weight_norm)
    return ops.where(both, weight_norm / ops.where(both, direction_norm, one), one)


def clip_factor(squared: float, max_norm: float) -> float:
    """Return what to multiply every gradient with, so that the whole step's norm is <= max_norm.

    `squared` is the squared norm of all gradients of the step, in the units of the loss (divide the
    loss scale out first). It is 1 below max_norm (Pascanu et al. 2013, "On the difficulty of
    training recurrent neural networks", Algorithm 1). When a gradient is not finite it is of no use:
    skip such a step.
    """
    norm = math.sqrt(squared)
    return 1.0 if norm <= max_norm else max_norm / norm


def round_stochastically(value: Array, bits: Array, dtype: str) -> Array:
    """Round float32 values to "float16" or "bfloat16", up or down at random, right on average.

    `bits` holds uniform uint32 of the value's shape, which decide: the same bits, the same result.
    Values the format has are kept; finite ones past its largest number become that number; NaN and
    infinities stay. The chance of the upper neighbour is the share of the gap that lies below the
    value, in steps of 2**-16 (bfloat16, exact) or 2**-24 (float16). What breaks otherwise: updates
    of 2**-12 never move a float16 weight of 1 when each is rounded to the nearest.
    """
    if dtype not in ROUNDINGS:
        raise ConfigError(
            f"stochastic rounding ({dtype}): there is none to this format; "
            f"choose {' or '.join(ROUNDINGS)}"
        )
    rounded = ROUNDINGS[dtype](value, bits)
    return ops.cast(ops.where(ops.isfinite(value), rounded, value), dtype)


def _round_to_bfloat16(value: Array, bits: Array) -> Array:
    # bfloat16 is the upper half of a float32. Adding 16 random bits carries into that half with a
    # chance of lower half / 2**16, also from one exponent to the next; then the lower half goes.
    carried = ops.view(value, "uint32") + ops.bitwise_and(bits, _uint32(0xFFFF))
    upper = ops.view(ops.bitwise_and(carried, _uint32(0xFFFF0000)), "float32")
    largest = (2.0 - 2.0**-7) * 2.0**127
    return ops.clip(upper, -largest, largest)


def _round_to_float16(value: Array, bits: Array) -> Array:
    # Neighbours in float16 stand 2**(exponent - 10) apart, 2**-24 below 2**-14. All divisions and
    # products are by powers of two and the remainder has fewer bits than the value: nothing rounds.
    size = ops.minimum(ops.absolute(value), 65504.0)
    exponent = ops.view(ops.bitwise_and(ops.view(size, "uint32"), _uint32(0x7F800000)), "float32")
    spacing = ops.maximum(exponent, 2.0**-14) * 2.0**-10
    whole = ops.floor(size / spacing)
    chance = size / spacing - whole
    draw = ops.cast(ops.right_shift(bits, _uint32(8)), "float32") * 2.0**-24
    rounded = (whole + ops.cast(draw < chance, "float32")) * spacing
    return ops.sign(value) * rounded


def _uint32(number: int) -> Array:
    return ops.convert_to_tensor(number, "uint32")


ROUNDINGS: dict[str, Callable[[Array, Array], Array]] = {
    "float16": _round_to_float16,
    "bfloat16": _round_to_bfloat16,
}
"""Format to the function that rounds finite float32 values to numbers of that format."""
