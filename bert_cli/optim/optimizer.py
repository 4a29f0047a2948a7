"""The optimizer of a run: what happens to each weight, by its name, in two halves.

First a direction from gradient and moments, element by element; then the move along it, for which
LAMB needs the norms of whole weights. Between the halves those who hold only a part of a weight can
add up what they have. Random rounding takes its bits from (seed, name, step, place), so a part is
rounded as it would be in the whole, and no generator has a state that a checkpoint would lack.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf
from keras import ops

from bert_cli.optim.adam import (
    Adam,
    Array,
    Rule,
    direction,
    round_stochastically,
    trust_ratio,
)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW or LAMB with the rule of every weight."""

    numbers: Adam
    rules: Mapping[str, Rule]
    seed: int
    stochastic_rounding: bool = False

    def straight(
        self,
        rule: Rule,
        weight: Array,
        gradient: Array,
        first: Array,
        second: Array,
        factor: Array,
        learning_rate: Array,
        before: Array,
        key: Array,
    ) -> tuple[Array, Array, Array]:
        """Return a weight that needs no norms moved by its gradient times `factor`, and its moments.

        Element by element, so that it can be one pass over memory, 28 bytes a weight.
        """
        along, first, second = self.along(rule, weight, gradient, first, second, factor, before)
        return self.moved(rule, 0, weight, along, None, learning_rate, key), first, second

    def along(
        self,
        rule: Rule,
        weight: Array,
        gradient: Array,
        first: Array,
        second: Array,
        factor: Array,
        before: Array,
    ) -> tuple[Array, Array, Array]:
        """Return the direction of a weight or a part of it, and its new moments.

        `before` counts the updates that were made before this one.
        """
        return direction(
            weight, gradient, first, second, before, adam=self.numbers, rule=rule, factor=factor
        )

    def moved(
        self,
        rule: Rule,
        start: int,
        weight: Array,
        along: Array,
        squared: tuple[Array, Array] | None,
        learning_rate: Array,
        key: Array,
    ) -> Array:
        """Return the new weight, or the new part of it that starts at place `start`, in its format.

        `squared` are the squared norms of the whole weight and of its whole direction, None for a rule
        that does not adapt; `key` is that of the weight and step.
        """
        scale = ops.cast(learning_rate, "float32")
        if rule.rate != 1.0:
            scale = scale * rule.rate
        if rule.adapts and squared is not None:
            scale = scale * trust_ratio(*squared)
        value = ops.cast(weight, "float32") - scale * along
        if not self.stochastic_rounding:
            return ops.cast(value, weight.dtype)
        return round_stochastically(value, _bits(key, value.shape, start), "float16")

    def number(self, name: str) -> int:
        """A number of the weight's own, for `key`: a hash of the run's seed and its name."""
        digest = hashlib.blake2b(f"{self.seed} {name}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "little") % 2**31

    @staticmethod
    def key(number: Array, step: Array) -> Array:
        """int32 [2], from which the random rounding of the weight with this number is drawn in a step."""
        return tf.stack([number, step])


def squared_norm(tensors: Iterable[Array]) -> Array:
    """Return the float32 sum of squares of all elements; the stages of a step add theirs up.

    One pass over memory by TensorFlow's own kernel, where a sum of products takes three and XLA's sums
    of rows are six times slower on a CPU; its partial sums keep it right to a few float32 roundings
    (of 23 million elements 3e-8, a dot product of theirs 2e-3).
    """
    halves = [tf.nn.l2_loss(tf.cast(tensor, tf.float32)) for tensor in tensors]
    return 2.0 * tf.add_n([tf.zeros([]), *halves])


def _bits(key: Array, shape: tuple[int, ...], start: int) -> Any:
    """Uniform uint32 of a shape: those that the whole weight has from place `start` on."""
    count = tf.TensorShape(shape).num_elements()
    bits = tf.random.stateless_uniform(
        [start + count], key, minval=None, maxval=None, dtype=tf.uint32, alg="philox"
    )
    return tf.reshape(bits[start:], shape)


def decayed_by_layer(rules: Mapping[str, Rule], decay: float) -> dict[str, Rule]:
    """The rules with a learning rate that falls by `decay` a layer from the top to the embeddings.

    Layer k of L, counted from 0 at the bottom, has decay ** (L - k) of the rate, embeddings
    decay ** (L + 1), everything above the encoder all of it (Howard & Ruder 2018, section 3.2; the rates
    of Clark et al. 2020, ELECTRA, appendix B, are chosen for this kind of decay).
    """
    numbers = {name: re.match(r"hid_(\d+)/", name) for name in rules}
    layers = 1 + max((int(found[1]) for found in numbers.values() if found), default=-1)
    found: dict[str, Rule] = {}
    for name, rule in rules.items():
        layer = numbers[name]
        below_top = (
            layers - int(layer[1]) if layer else layers + 1 if name.startswith("emb/") else 0
        )
        found[name] = replace(rule, rate=decay**below_top)
    return found
