"""How the weights of a block move, in functions that TensorFlow traces once for all blocks alike.

BERT-base has 206 weights in fifteen blocks, twelve of which differ by nothing but their values. A
function of a block's variables is traced once for all blocks with the same rules and shapes, and in it
one of a weight's once for all with its rule and shape, which XLA compiles where that is worth it.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from bert_cli.optim.adam import Optimizer, Rule
from bert_cli.parallel.tensorflow.alike import traced
from bert_cli.parallel.tensorflow.mesh import are_results_fused

LARGE = 2**18
"""Elements of a weight whose move is compiled then."""
REPLACES = {"update": (0, 2, 3), "update_direction": (1, 2, 3), "apply_update": (0,)}
"""By the optimizer's function: which arguments (weight, gradient, first and second moment) its results
replace, in their order, where these are variables."""


class Held(NamedTuple):
    """What there is of a weight: variables of one shape."""

    weight: Any
    gradient: Any
    first: Any
    second: Any


class Moves:
    """The moves of one device's weights; moments lie beside them or in host memory."""

    def __init__(self, optimizer: Optimizer, *, device: str, beside: bool, compiled: bool) -> None:
        """`device` is where moments lie and moves are computed, `beside` whether the weights do too."""
        self.optimizer, self.device = optimizer, device
        self.beside, self.compiled = beside, compiled
        self.one_pass = "CPU" in device.upper() and are_results_fused()
        """Whether a compiled move is to be one loop; on GPUs XLA makes one of itself."""
        self._of_blocks: dict[Any, Any] = {}
        self.functions: dict[Any, Any] = {}
        """Those of the optimizer that are traced, by their name, rule and whether XLA compiles them."""

    def move_block(
        self,
        names: Sequence[str],
        held: Sequence[Held],
        factor: tf.Tensor,
        rate: tf.Tensor,
        before: tf.Tensor,
        step: tf.Tensor,
    ) -> tf.Tensor:
        """Move weights by `factor` times their gradients; the new weights' squared norm.

        LAMB leaves its directions where the gradients were.
        """
        rules = tuple(self.optimizer.rules[name] for name in names)
        shapes = (tuple(one.weight.shape) for one in held)
        alike = rules, *shapes
        if alike not in self._of_blocks:
            self._of_blocks[alike] = traced(partial(self._move_all, rules))
        numbers = tf.constant([self.optimizer.weight_id(name) for name in names])
        moved: tf.Tensor = self._of_blocks[alike](list(held), numbers, factor, rate, before, step)
        return moved

    def of_rule(self, move: Callable[..., Any], rule: Rule, weight: Any, *more: Any) -> Any:
        """A function of the optimizer, which then replaces what REPLACES says."""
        compiled = self.compiled and size_of(weight) >= LARGE
        function = move.__name__, rule, compiled, *more
        if function not in self.functions:
            find = partial(move, rule, *more)
            if compiled and self.one_pass:
                find = partial(_apart, find)
            act = partial(_in_place, find, REPLACES[move.__name__])
            self.functions[function] = traced(act, compiled)
        return self.functions[function]

    def _move_all(
        self, rules: Sequence[Rule], held: Sequence[Held], numbers: tf.Tensor, *told: tf.Tensor
    ) -> tf.Tensor:
        squares: list[tf.Tensor] = []
        for place, (rule, one) in enumerate(zip(rules, held, strict=True)):
            # One weight after the other: all at once would hold several copies of the model.
            with tf.control_dependencies(squares[-1:]):
                squares.append(self._move(rule, one, numbers[place], *told))
        return tf.add_n(squares)

    def _move(
        self,
        rule: Rule,
        held: Held,
        number: tf.Tensor,
        factor: tf.Tensor,
        rate: tf.Tensor,
        before: tf.Tensor,
        step: tf.Tensor,
    ) -> tf.Tensor:
        """Move a weight; the new one's squared norm.

        With its moments beside it a compiled move replaces everything where it lies, LAMB's also the
        gradient by the direction. As results they would be new memory, for which a processor reads what
        it will overwrite: the update of 110 million weights took half as long again, LAMB's a third.
        """
        weight, gradient, *moments = held
        with tf.device(self.device):
            key = self.optimizer.key(number, step)
            given = held[:2] if self.beside else (tf.identity(weight), tf.identity(gradient))
            if rule.adapts:
                found = self.of_rule(self.optimizer.update_direction, rule, weight)(
                    *given, *moments, factor, before
                )
                along = gradient.read_value() if found is None else found
                squared = squared_norm([given[0]]), squared_norm([along])
                move = self.of_rule(self.optimizer.apply_update, rule, weight, 0)
                new = move(given[0], along, squared, rate, key)
            else:
                move = self.of_rule(self.optimizer.update, rule, weight)
                new = move(*given, *moments, factor, rate, before, key)
        if new is not None:
            weight.assign(new)
        return squared_norm([weight.read_value()])


def _in_place(act: Callable[..., Any], replaced: Sequence[int], *given: Any) -> Any:
    """Put what `act` finds into those of its arguments; the first, where its own is a tensor, is returned.

    Else nothing is: a result is new memory, whatever else becomes of it.
    """
    found = tf.nest.flatten(act(*tf.nest.map_structure(tf.convert_to_tensor, given)))
    for result, place in zip(found, replaced, strict=True):
        if isinstance(given[place], tf.Variable):
            given[place].assign(result)
    return None if isinstance(given[replaced[0]], tf.Variable) else found[0]


def _apart(act: Callable[..., Any], *given: Any) -> Any:
    """What `act` finds, its first result without the others that it would be made of.

    On a processor XLA makes one loop of results of one shape only where none needs another. A weight
    from moments that it has just put down is a loop of its own, and the whole 36 bytes a weight instead
    of 28. Computing the moments again costs nothing where memory is waited for. A barrier, because XLA
    would see that they are the same.
    """
    found = tf.nest.flatten(act(*given))
    if len(found) > 1:
        found[0] = tf.nest.flatten(act(*xla.optimization_barrier(*given)))[0]
    return found


def squared_norm(tensors: Iterable[Any]) -> tf.Tensor:
    """Return the float32 sum of squares of all elements.

    TensorFlow's kernel passes over memory once, where a sum of products does so three times and XLA's
    sums of rows are six times slower on a CPU. Its partial sums keep the result exact to a few float32
    roundings: 3e-8 for 23 million elements, where a dot product is off by 2e-3.
    """
    halves = [tf.nn.l2_loss(tf.cast(tensor, tf.float32)) for tensor in tensors]
    return 2.0 * tf.add_n([tf.zeros([]), *halves])


def random_bits(key: tf.Tensor, shape: Sequence[int], start: int) -> tf.Tensor:
    """Return uniform uint32 of a shape: those that a complete weight has from element `start` on.

    They are a function of the key (weight, step), so a part of a weight is rounded as it is in the
    complete weight, and no generator has a state that a checkpoint would lack.
    """
    count = tf.TensorShape(shape).num_elements()
    bits = tf.random.stateless_uniform(
        [start + count], key, minval=None, maxval=None, dtype=tf.uint32, alg="philox"
    )
    return tf.reshape(bits[start:], shape)


def size_of(variable: Any) -> int:
    """Elements of a variable or tensor."""
    return int(math.prod(variable.shape))
