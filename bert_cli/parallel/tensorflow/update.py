"""The end of a step on one device of one replica: all-reduce the gradients, and update the weights.

The accumulated gradients are all-reduced over the replicas in buckets, once a step, so their norm needs no further
exchange. The optimizer's slots are next to the weights, or in host memory, where the update is then computed, or
sharded over the replicas (ZeRO stage 1: Rajbhandari et al. 2020, section 5.1): each updates its shard of every weight.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from bert_cli.optim.optimizer import Optimizer, Rule
from bert_cli.parallel.engine import Tensor
from bert_cli.parallel.runtime import Layout
from bert_cli.parallel.tensorflow.mesh import DeviceGroup, Function, are_results_fused, traced
from bert_cli.parallel.tensorflow.stage import Stage

REDUCE_BUCKET = 64 * 10**6
"""Bytes of a bucket of the all-reduce, in float32."""
# Elements of a device's weights, and of a weight, above which compiling saves more time than it takes.
UPDATES_WORTH_COMPILING = 2**23
LARGE = 2**18


class DeviceUpdate:
    """The weights of one device, their gradients and slots, and the functions that update them."""

    # Compiled functions assign to the variables that they are passed: returning a result allocates it, and in-place
    # assignment avoids the extra write traffic (1.5 times faster for 110 million weights).

    def __init__(
        self,
        stages: Sequence[Stage],
        group: DeviceGroup,
        optimizer: Optimizer,
        layout: Layout,
        host: str = "CPU:0",
    ) -> None:
        self.group = group
        self.optimizer = optimizer
        self.layout = layout
        self.device = group.device
        # The device that has the slots and computes the update.
        self.slot_device = host if layout.offload_moments else self.device
        self.weights: dict[str, tf.Variable] = {}
        self.accumulators: dict[str, list[tf.Variable]] = {}
        for stage in stages:
            self.weights |= stage.weights
            for name, accumulator in stage.accumulators.items():
                self.accumulators.setdefault(name, []).append(accumulator)
        self.sharded = layout.shard_moments and group.size > 1
        self.sizes = {name: weight.shape.num_elements() for name, weight in self.weights.items()}
        is_large = sum(self.sizes.values()) >= UPDATES_WORTH_COMPILING
        self.compiled = is_large and layout.compile != "nothing"
        self.slots: dict[str, dict[str, tf.Variable]] = {}
        with tf.device(self.slot_device):
            for name, weight in self.weights.items():
                shape = (self._shard_length(name),) if self.sharded else tuple(weight.shape)
                self.slots[name] = {
                    slot: tf.Variable(tf.zeros(spec.shape), trainable=False)
                    for slot, spec in optimizer.kind.slots(shape).items()
                }
        # On GPUs XLA makes one loop of an update anyway.
        self.fuses_results = "CPU" in self.slot_device.upper() and are_results_fused()
        self.functions: dict[Hashable, Callable[..., Tensor]] = {}
        self.block_functions: dict[Hashable, Function] = {}
        self.blocks: dict[str, list[str]] = {}
        for name in self.weights:
            self.blocks.setdefault(name.partition("/")[0], []).append(name)
        self.buckets = buckets({name: 4 * size for name, size in self.sizes.items()}, REDUCE_BUCKET)
        # Each function has one collective with a unique number.
        self._reduce_buckets = [
            traced(partial(self._all_reduce_bucket, names, number))
            for number, names in enumerate(self.buckets)
        ]
        self._update_buckets = [
            traced(partial(self._update_bucket, names, number))
            for number, names in enumerate(self.buckets, len(self.buckets))
        ]
        self._directions = traced(partial(self._shard_directions, 2 * len(self.buckets)))
        self._add_duplicates = traced(self._add_duplicate_gradients)
        gradients = {name: first for name, (first, *_) in self.accumulators.items()}
        self._gradient_squared = traced(lambda: self._squared_norm_of(gradients))
        self._weight_squared = traced(lambda: self._squared_norm_of(self.weights))
        self._block_shard = traced(self._shard)
        self._block_squared = traced(lambda block: squared_norm([v.read_value() for v in block]))

    def compile(self) -> None:
        """Trace all functions, without computation or communication."""
        number = tf.TensorSpec([], tf.float32)
        integer = tf.TensorSpec([], tf.int32)
        with tf.device(self.device):
            for function in (self._add_duplicates, self._gradient_squared, self._weight_squared):
                function.get_concrete_function()
            if self.group.size > 1:
                for function in self._reduce_buckets:
                    function.get_concrete_function()
            if not self.sharded:
                for function, states, weight_ids in self._block_updates():
                    numbers = number, number, integer, integer
                    function.get_concrete_function(states, weight_ids, *numbers)
                return
            self._directions.get_concrete_function(number, integer)
            squares = tf.TensorSpec([len(self.weights)], tf.float32)
            for names, function in zip(self.buckets, self._update_buckets, strict=True):
                directions = {
                    name: tf.TensorSpec([self._shard_length(name)], tf.float32) for name in names
                }
                function.get_concrete_function(directions, squares, number, integer)

    def all_reduce_gradients(self) -> Tensor:
        """Sum the gradients over stages and replicas; return their squared norm."""
        with tf.device(self.device):
            if any(len(accumulators) > 1 for accumulators in self.accumulators.values()):
                self._add_duplicates()
            if self.group.size > 1:
                for all_reduce in self._reduce_buckets:
                    all_reduce()
            return self._gradient_squared()

    def update(self, factor: float, learning_rate: float, updates: int, step: int) -> Tensor:
        """Update the weights with `factor` times their gradients; return the new weights' squared norm."""
        with tf.device(self.device):
            floats = [tf.constant(number, tf.float32) for number in (factor, learning_rate)]
            integers = [tf.constant(number, tf.int32) for number in (updates, step)]
            if not self.sharded:
                blocks = self._block_updates()
                return tf.add_n([run(*block, *floats, *integers) for run, *block in blocks])
            directions, squares = self._directions(floats[0], integers[0])
            for names, update in zip(self.buckets, self._update_buckets, strict=True):
                shards = {name: directions[name] for name in names}
                update(shards, squares, floats[1], integers[1])
            return self._weight_squared()

    def weight_squared(self) -> Tensor:
        """Return the squared norm of the weights."""
        with tf.device(self.device):
            return self._weight_squared()

    def _add_duplicate_gradients(self) -> None:
        """Sum the gradients of a weight that several stages of this device use."""
        for first, *duplicates in self.accumulators.values():
            for duplicate in duplicates:
                first.assign_add(duplicate.read_value())

    def _all_reduce_bucket(self, names: Sequence[str], number: int) -> None:
        accumulators = [self.accumulators[name][0] for name in names]
        flat = tf.concat([tf.reshape(gradient, [-1]) for gradient in accumulators], axis=0)
        parts = tf.split(self.group.all_reduce(flat, number), [self.sizes[name] for name in names])
        for accumulator, part in zip(accumulators, parts, strict=True):
            accumulator.assign(tf.reshape(part, accumulator.shape))

    def _squared_norm_of(self, variables: Mapping[str, tf.Variable]) -> Tensor:
        blocks = [[variables[name] for name in names] for names in self.blocks.values()]
        return tf.add_n([self._block_squared(block) for block in blocks])

    def _block_updates(self) -> Iterator[tuple[Function, list[list[Tensor]], Tensor]]:
        """Yield the function, states and weight ids of the update of each block."""
        # Not one graph: TensorFlow would optimize each block in it anew, 3 of the 5 s of BERT-base's first update.
        for names in self.blocks.values():
            states = [
                [self.weights[name], self.accumulators[name][0], *self.slots[name].values()]
                for name in names
            ]
            rules = tuple(self.optimizer.rules[name] for name in names)
            # The encoder layers of BERT-base, twelve of its fifteen blocks, share one trace.
            key = rules, *(tuple(weight.shape) for weight, *_ in states)
            if key not in self.block_functions:
                self.block_functions[key] = traced(partial(self._update_block, rules))
            weight_ids = tf.constant([self.optimizer.weight_id(name) for name in names])
            yield self.block_functions[key], states, weight_ids

    def _update_block(
        self,
        rules: Sequence[Rule],
        states: Sequence[Sequence[Tensor]],
        weight_ids: Tensor,
        *numbers: Tensor,
    ) -> Tensor:
        squares: list[Tensor] = []
        for index, (rule, state) in enumerate(zip(rules, states, strict=True)):
            # One weight after another: all at once would need several copies of the model.
            with tf.control_dependencies(squares[-1:]):
                squares.append(self._update_weight(rule, state, weight_ids[index], numbers))
        return tf.add_n(squares)

    def _update_weight(
        self, rule: Rule, state: Sequence[Tensor], weight_id: Tensor, numbers: Sequence[Tensor]
    ) -> Tensor:
        """Update a weight and its slots; return the new weight's squared norm."""
        weight, gradient, *slots = state
        factor, rate, updates, step = numbers
        with tf.device(self.slot_device):
            key = self.optimizer.key(weight_id, step)
            inputs = [weight, gradient]
            if self.layout.offload_moments:  # copied to the device that computes
                inputs = list(map(tf.identity, inputs))
            if rule.adapts:
                function = self.function(self.update_slots, rule, weight)
                result = function(*inputs, *slots, factor, updates)
                direction = gradient.read_value() if result is None else result
                squared = squared_norm([inputs[0]]), squared_norm([direction])
                function = self.function(self.apply_direction, rule, weight, 0)
                new = function(inputs[0], direction, squared, rate, key)
            else:
                function = self.function(self.update_element_wise, rule, weight)
                new = function(*inputs, *slots, factor, updates, rate, key)
        if new is not None:
            weight.assign(new)
        return squared_norm([weight.read_value()])

    def function(
        self, method: Callable[..., Tensor], rule: Rule, weight: tf.Variable, *constants: int
    ) -> Callable[..., Tensor]:
        """Return the tf.function of one of the three methods below for weights of this size."""
        compiled = self.compiled and weight.shape.num_elements() >= LARGE
        key = method, rule, compiled, *constants
        if key not in self.functions:
            self.functions[key] = traced(partial(method, compiled, rule, *constants), compiled)
        return self.functions[key]

    def update_element_wise(self, compiled: bool, rule: Rule, *inputs: Tensor) -> Tensor:
        """Update a weight whose rule needs no norms, and its slots, in one pass over memory."""

        def update(weight: Tensor, *inputs: Tensor) -> list[Tensor]:
            *inputs_of_direction, rate, key = inputs
            direction, *slots = self._direction(rule, weight, *inputs_of_direction)
            new = self.optimizer.apply_update(rule, 0, weight, direction, None, rate, key)
            return [new, *slots]

        weight, _gradient, *slots, _factor, _updates, _rate, _key = inputs
        return _assign((weight, *slots), self._compute(compiled, update, *inputs))

    def update_slots(self, compiled: bool, rule: Rule, *inputs: Tensor) -> Tensor:
        """Update the slots; assign the update direction to the gradient, or return it if that is a tensor."""
        results = self._compute(compiled, partial(self._direction, rule), *inputs)
        _weight, gradient, *slots, _factor, _updates = inputs
        return _assign((gradient, *slots), results)

    def _direction(
        self, rule: Rule, weight: Tensor, gradient: Tensor, *more: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the update direction and the new slots; `more` are the slots, the factor and the updates."""
        *slots, factor, updates = more
        return self.optimizer.update_direction(rule, weight, gradient, slots, factor, updates)

    def apply_direction(
        self,
        compiled: bool,
        rule: Rule,
        start: int,
        weight: Tensor,
        direction: Tensor,
        *more: Tensor,
    ) -> Tensor:
        """Update a weight, or its shard from element `start` on; return the result if that is a tensor."""
        value = tf.convert_to_tensor(weight)
        direction = tf.convert_to_tensor(direction)
        new = self.optimizer.apply_update(rule, start, value, direction, *more)
        return _assign((weight,), (new,))

    def _compute(
        self, compiled: bool, function: Callable[..., Tensor], *inputs: Tensor
    ) -> list[Tensor]:
        """Return the results of a function of the inputs' values, so that XLA fuses them into one loop."""
        # On a CPU XLA fuses results of one shape only if none is an input of another, so the slots, which the first
        # result needs, are computed once more for it, behind a barrier.
        values = [tf.convert_to_tensor(value) for value in inputs]
        results = list(function(*values))
        if compiled and self.fuses_results:
            results[0] = function(*xla.optimization_barrier(*values))[0]
        return results

    def _shard_directions(
        self, number: int, factor: Tensor, updates: Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Update the shards of the slots; return the shards of the directions and their squared norms."""
        directions: dict[str, Tensor] = {}
        squares: list[Tensor] = []
        for name, weight in self.weights.items():
            # One weight after another: all at once would need several copies of the model.
            with tf.control_dependencies(list(directions.values())[-1:]):
                gradient = self._block_shard(self.accumulators[name][0].read_value())
            rule = self.optimizer.rules[name]
            with tf.device(self.slot_device), tf.control_dependencies([gradient]):
                value = self._block_shard(weight.read_value())
                function = self.function(self.update_slots, rule, weight)
                slots = self.slots[name].values()
                directions[name] = function(value, gradient, *slots, factor, updates)
                squares.append(squared_norm([directions[name]]))
        return directions, self.group.all_reduce(tf.stack(squares), number)

    def _update_bucket(
        self,
        names: Sequence[str],
        number: int,
        directions: Mapping[str, Tensor],
        squares: Tensor,
        rate: Tensor,
        step: Tensor,
    ) -> None:
        """Update this replica's shards of some weights, and gather the shards of all replicas."""
        order = list(self.weights)
        shards = []
        for name in names:
            weight = self.weights[name]
            rule = self.optimizer.rules[name]
            with tf.device(self.slot_device):
                value = self._block_shard(weight.read_value())
                squared = squared_norm([weight]), squares[order.index(name)]
                key = self.optimizer.key(self.optimizer.weight_id(name), step)
                start = self.group.rank * self._shard_length(name)
                function = self.function(self.apply_direction, rule, weight, start)
                shards.append(function(value, directions[name], squared, rate, key))
        gathered = self.group.all_gather(tf.concat(shards, axis=0), number)
        lengths = [self._shard_length(name) for name in names]
        parts = tf.split(tf.reshape(gathered, [self.group.size, sum(lengths)]), lengths, axis=1)
        for name, part in zip(names, parts, strict=True):
            weight = self.weights[name]
            weight.assign(tf.reshape(tf.reshape(part, [-1])[: self.sizes[name]], weight.shape))

    def _shard(self, value: Tensor) -> Tensor:
        """Return this replica's shard of a weight or gradient, flat, with zeros beyond the last element."""
        size = value.shape.num_elements()
        length = math.ceil(size / self.group.size)
        start, end = (min(rank * length, size) for rank in (self.group.rank, self.group.rank + 1))
        part = tf.reshape(value, [-1])[start:end]
        return tf.reshape(tf.pad(part, [[0, length - (end - start)]]), [length])

    def _shard_length(self, name: str) -> int:
        return math.ceil(self.sizes[name] / self.group.size)


def _assign(targets: Sequence[Tensor], results: Sequence[Tensor]) -> Tensor:
    """Assign results to the targets that are variables; return the first result if its target is a tensor."""
    for target, result in zip(targets, results, strict=True):
        if isinstance(target, tf.Variable):
            target.assign(result)
    return None if isinstance(targets[0], tf.Variable) else results[0]


def buckets(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Return names in buckets of at most `max_bytes` bytes; a larger weight has its own bucket."""
    filled: list[list[str]] = []
    free = 0
    for name, size in sizes.items():
        if not filled or size > free:
            filled.append([])
            free = max_bytes
        filled[-1].append(name)
        free -= size
    return filled


def squared_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the float32 sum of squares of all elements."""
    # TensorFlow's kernel sums parts: for 23 million elements its error is 3e-8, and 2e-3 for a dot product.
    halves = [tf.nn.l2_loss(tf.cast(tensor, tf.float32)) for tensor in tensors]
    return 2.0 * tf.add_n([tf.zeros([]), *halves])


def random_bits(key: Tensor, shape: Sequence[int], start: int) -> Tensor:
    """Return uniform uint32 of a shape: the bits of the key for a complete weight from element `start` on."""
    count = tf.TensorShape(shape).num_elements()
    bits = tf.random.stateless_uniform(
        [start + count], key, minval=None, maxval=None, dtype=tf.uint32, alg="philox"
    )
    return tf.reshape(bits[start:], shape)
