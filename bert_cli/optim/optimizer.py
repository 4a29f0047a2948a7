"""The part of an update that all optimizers share: rules for each weight, the trust ratio, clipping and rounding.

An update has two halves, its direction, which each optimizer computes in a file of its own, and its application, for
which LAMB needs the norms of the weight and of the direction: the engine computes squared norms in between. Weights,
gradients and slots come in as arrays and new ones go out; the caller stores them. All arithmetic is float32, in plain
`keras.ops` for XLA.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from keras import ops

from bert_cli.arrays import Shape
from bert_cli.facts.optimizers import OptimizerKind

# Weights without LAMB's trust ratio, by the last part of their names.
NOT_ADAPTED = ("bias", "beta", "gamma")
Tensor = Any  # a tensor of the Keras backend or anything that it converts
# (key, shape) -> uniform uint32 of the shape.
RandomBits = Callable[[Tensor, Shape], Tensor]


@dataclass(frozen=True)
class Rule:
    """The options of the optimizer that differ from weight to weight."""

    decays: bool  # whether weight decay applies
    adapts: bool  # whether the update is scaled by LAMB's trust ratio
    rate: float = 1.0  # factor of the learning rate


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """The numbers of an optimizer that are the same for all weights and steps."""

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-6
    weight_decay_rate: float = 0.01


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An optimizer with its hyperparameters and the rule of every weight."""

    kind: OptimizerKind
    hyperparameters: Hyperparameters
    rules: Mapping[str, Rule]
    seed: int
    random_bits: RandomBits | None = None
    """With it, new weights are rounded to float16 at random; without, to the nearest."""

    @property
    def update_direction(self) -> Callable[..., tuple[Tensor, ...]]:
        """The function of the optimizer's file, of (rule, weight, gradient, slots, factor, updates).

        It returns the update direction and the new slots of a weight, in float32. The gradient is multiplied by
        `factor`; `updates` counts the earlier updates.
        """
        update = import_module(self.kind.module).update_direction
        return partial(update, self.hyperparameters)

    def apply_update(
        self,
        rule: Rule,
        weight: Tensor,
        direction: Tensor,
        squared_norms: tuple[Tensor, Tensor] | None,
        learning_rate: Tensor,
        key: Tensor,
    ) -> Tensor:
        """Return the new weight, in its format.

        `squared_norms` are those of weight and direction, None without a trust ratio; `key` depends on weight and step.
        """
        scale = ops.cast(learning_rate, "float32")
        if rule.rate != 1.0:
            scale = scale * rule.rate
        if rule.adapts and squared_norms is not None:
            scale = scale * trust_ratio(*squared_norms)
        value = ops.cast(weight, "float32") - scale * direction
        if self.random_bits is None:
            return ops.cast(value, weight.dtype)
        return round_stochastically(value, self.random_bits(key, value.shape))

    def weight_id(self, name: str) -> int:
        """Return a hash of the run's seed and a weight's name: the first half of `key`."""
        digest = hashlib.blake2b(f"{self.seed} {name}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "little") % 2**31

    @staticmethod
    def key(weight_id: Tensor, step: Tensor) -> Tensor:
        """Return the key of the random bits of a weight in a step, int32 [2]."""
        return ops.stack([weight_id, step])


def weight_rules(
    names: Iterable[str],
    kind: OptimizerKind,
    *,
    no_weight_decay: Sequence[str],
    layer_decay: float = 1.0,
) -> dict[str, Rule]:
    """Return the rule of every weight, which follows from the last part of its name and its layer.

    Layer k of L has `layer_decay` ** (L - k) of the learning rate, the embeddings `layer_decay` ** (L + 1),
    blocks above the encoder all of it (Howard & Ruder 2018, section 3.2, exponents of Clark et al. 2020).
    """
    names = list(names)
    layers = {}
    for name in names:
        match = re.match(r"hid_(\d+)/", name)
        if match:
            layers[name] = int(match[1])
    count = 1 + max(layers.values(), default=-1)
    # Embeddings are the lowest layer, so they learn the slowest.
    below_top = {name: count + 1 for name in names if name.startswith("emb/")}
    below_top |= {name: count - layer for name, layer in layers.items()}
    return {
        name: Rule(
            decays=name.rpartition("/")[2] not in no_weight_decay,
            adapts=kind.has_trust_ratio and name.rpartition("/")[2] not in NOT_ADAPTED,
            rate=layer_decay ** below_top.get(name, 0),
        )
        for name in names
    }


def trust_ratio(weight_squared: Tensor, direction_squared: Tensor) -> Tensor:
    """Return |weight| / |direction| from the squared norms of both; 1 when either is 0 (You et al. 2020, alg. 2)."""
    weight_norm = ops.sqrt(weight_squared)
    direction_norm = ops.sqrt(direction_squared)
    both = ops.logical_and(weight_norm > 0.0, direction_norm > 0.0)
    unit = ops.ones_like(weight_norm)
    return ops.where(both, weight_norm / ops.where(both, direction_norm, unit), unit)


def clip_factor(squared: float, max_norm: float) -> float:
    """Return the factor of every gradient that limits the norm of the complete step (Pascanu et al. 2013, Algorithm 1).

    `squared` is the finite squared norm of all gradients, with the loss scale divided out.
    """
    norm = math.sqrt(squared)
    if norm <= max_norm:
        return 1.0
    return max_norm / norm


def round_stochastically(value: Tensor, bits: Tensor) -> Tensor:
    """Return float32 values as float16, rounded up or down at random by uniform uint32 bits, exact on average.

    Float16 numbers stay, as do NaN and infinities; finite values past the largest become the largest. Rounded to the
    nearest, updates of 2**-12 would never change a float16 weight of 1.
    """
    # Float16 numbers are 2**(exponent - 10) apart, 2**-24 below 2**-14. All divisions and products are by
    # powers of two and the remainder has fewer bits than the value, so nothing else rounds.
    size = ops.minimum(ops.absolute(value), 65504.0)
    exponent_bits = ops.convert_to_tensor(0x7F800000, "uint32")
    exponent = ops.view(ops.bitwise_and(ops.view(size, "uint32"), exponent_bits), "float32")
    # Ten bits of mantissa; below the smallest normal number, 2^-14, the distance no longer shrinks.
    spacing = ops.maximum(exponent, 2.0**-14) * 2.0**-10
    lower = ops.floor(size / spacing)
    chance = size / spacing - lower
    # 24 bits, all that float32 holds exactly: a uniform number in [0, 1).
    draw = ops.cast(ops.right_shift(bits, ops.convert_to_tensor(8, "uint32")), "float32") * 2.0**-24
    rounded = ops.sign(value) * ((lower + ops.cast(draw < chance, "float32")) * spacing)
    return ops.cast(ops.where(ops.isfinite(value), rounded, value), "float16")
