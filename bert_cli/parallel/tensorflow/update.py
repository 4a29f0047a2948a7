"""The end of a step on one device of one replica: all-reduce the gradients, and update the weights.

The accumulated gradients are all-reduced over the replicas in buckets, once a step, so their norm needs no further
exchange. The optimizer's slots are next to the weights, or in host memory, where the update is then computed. They
can be sharded over the replicas (ZeRO stage 1: Rajbhandari et al. 2020, section 5.1): each replica then owns some of
the weights, updates these as without sharding, and sends them to the others.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from bert_cli.facts.optimizers import MOMENTS
from bert_cli.optim.optimizer import Optimizer, Rule
from bert_cli.parallel.engine import Tensor
from bert_cli.parallel.runtime import Layout
from bert_cli.parallel.tensorflow.mesh import DeviceGroup, Function, are_results_fused, traced
from bert_cli.parallel.tensorflow.stage import Stage

# Bytes of a bucket of the all-reduce, in float32.
REDUCE_BUCKET = 64 * 10**6
# Elements of a device's weights, and of a weight, above which compiling saves more time than it takes.
UPDATES_WORTH_COMPILING = 2**23
# Smaller weights are biases and norms, whose functions cost more to compile than all their updates save.
LARGE = 2**18


# Several variables for each weight, by its name.
Variables = dict[str, list[tf.Variable]]


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
        self.accumulators: Variables = {}
        for stage in stages:
            self.weights |= stage.weights
            for name, accumulator in stage.accumulators.items():
                self.accumulators.setdefault(name, []).append(accumulator)
        sizes = {name: weight.shape.num_elements() for name, weight in self.weights.items()}
        is_large = sum(sizes.values()) >= UPDATES_WORTH_COMPILING
        self.compiled = is_large and layout.compile != "nothing"
        if layout.shard_moments:
            owned = shares(sizes, group.size)
        else:
            owned = [list(sizes)] * group.size
        self.slots: Variables = {}
        """The moments of the weights that this replica updates."""
        with tf.device(self.slot_device):
            for name in owned[group.rank]:
                zeros = tf.zeros(self.weights[name].shape)
                self.slots[name] = [tf.Variable(zeros, trainable=False) for _ in MOMENTS]
        # On GPUs XLA makes one loop of an update anyway.
        self.fuses_results = "CPU" in self.slot_device.upper() and are_results_fused()
        self.functions: dict[Hashable, Callable[..., Tensor]] = {}
        self.block_functions: dict[Hashable, Function] = {}
        self.blocks: dict[str, list[str]] = {}
        for name in self.weights:
            self.blocks.setdefault(name.partition("/")[0], []).append(name)
        gradients = {name: first for name, (first, *_) in self.accumulators.items()}
        self.reductions: list[Function] = []
        self.broadcasts: list[Function] = []
        if group.size > 1:
            for bucket in buckets(sizes):
                self._add_exchange(self.reductions, bucket, gradients, group.all_reduce)
        if group.size > 1 and layout.shard_moments:
            for rank, share in enumerate(owned):
                for bucket in buckets({name: sizes[name] for name in share}):
                    send = partial(group.broadcast, root=rank)
                    self._add_exchange(self.broadcasts, bucket, self.weights, send)
        self._add_duplicates = traced(self._add_duplicate_gradients)
        self._gradient_squared = traced(lambda: self._squared_norm_of(gradients))
        self._weight_squared = traced(lambda: self._squared_norm_of(self.weights))
        self._block_squared = traced(lambda block: squared_norm([v.read_value() for v in block]))

    def _add_exchange(
        self,
        exchanges: list[Function],
        names: Sequence[str],
        variables: Mapping[str, tf.Variable],
        collective: Callable[[Tensor, int], Tensor],
    ) -> None:
        """Add a function that sends some variables as one vector, with a collective of a unique number."""
        bucket = [variables[name] for name in names]
        number = len(self.reductions) + len(self.broadcasts)

        def exchange() -> None:
            flat = tf.concat([tf.reshape(variable, [-1]) for variable in bucket], axis=0)
            lengths = [variable.shape.num_elements() for variable in bucket]
            for variable, part in zip(
                bucket, tf.split(collective(flat, number), lengths), strict=True
            ):
                variable.assign(tf.reshape(part, variable.shape))

        exchanges.append(traced(exchange))

    def compile(self) -> None:
        """Trace all functions, without computation or communication."""
        number = tf.TensorSpec([], tf.float32)
        integer = tf.TensorSpec([], tf.int32)
        with tf.device(self.device):
            squares = self._gradient_squared, self._weight_squared
            for function in (self._add_duplicates, *self.reductions, *self.broadcasts, *squares):
                function.get_concrete_function()
            for function, states, weight_ids in self._block_updates():
                numbers = number, number, integer, integer
                function.get_concrete_function(states, weight_ids, *numbers)

    def all_reduce_gradients(self) -> Tensor:
        """Sum the gradients over stages and replicas; return their squared norm."""
        with tf.device(self.device):
            for function in (self._add_duplicates, *self.reductions):
                function()
            return self._gradient_squared()

    def update(self, factor: float, learning_rate: float, updates: int, step: int) -> Tensor:
        """Update the weights with `factor` times their gradients; return the new weights' squared norm."""
        with tf.device(self.device):
            floats = [tf.constant(number, tf.float32) for number in (factor, learning_rate)]
            integers = [tf.constant(number, tf.int32) for number in (updates, step)]
            for update, *block in self._block_updates():
                update(*block, *floats, *integers)
            for broadcast in self.broadcasts:
                broadcast()
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

    def _squared_norm_of(self, variables: Mapping[str, tf.Variable]) -> Tensor:
        blocks = [[variables[name] for name in names] for names in self.blocks.values()]
        return tf.add_n([self._block_squared(block) for block in blocks])

    def _block_updates(self) -> Iterator[tuple[Function, list[list[Tensor]], Tensor]]:
        """Yield the function, states and weight ids of the update of each block that has own weights."""
        # Not one graph: TensorFlow would optimize each block in it anew, 3 of the 5 s of BERT-base's first update.
        for block in self.blocks.values():
            names = [name for name in block if name in self.slots]
            if not names:
                continue
            states = [
                [self.weights[name], self.accumulators[name][0], *self.slots[name]]
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
    ) -> None:
        updated: list[Tensor] = []
        for index, (rule, state) in enumerate(zip(rules, states, strict=True)):
            # One weight after another: all at once would need several copies of the model.
            with tf.control_dependencies(updated[-1:]):
                updated.append(self._update_weight(rule, state, weight_ids[index], numbers))

    def _update_weight(
        self, rule: Rule, state: Sequence[Tensor], weight_id: Tensor, numbers: Sequence[Tensor]
    ) -> Tensor:
        """Update a weight and its slots; return the new weight."""
        weight, gradient, *slots = state
        factor, rate, updates, step = numbers
        with tf.device(self.slot_device):
            key = self.optimizer.key(weight_id, step)
            inputs = [weight, gradient]
            if self.layout.offload_moments:  # copied to the device that computes
                inputs = list(map(tf.identity, inputs))
            function = self.function(self.update_slots, rule, weight)
            new = function(*inputs, slots, factor, updates, rate, key)
            if rule.adapts:
                direction = new
                if new is None:  # the gradient's variable has it
                    direction = gradient.read_value()
                squared = squared_norm([inputs[0]]), squared_norm([direction])
                function = self.function(self.apply_direction, rule, weight)
                new = function(inputs[0], direction, squared, rate, key)
        if new is not None:
            weight.assign(new)
        return weight.read_value()

    def function(
        self, method: Callable[..., Tensor], rule: Rule, weight: tf.Variable
    ) -> Callable[..., Tensor]:
        """Return the tf.function of one of the two methods below for weights of this size."""
        compiled = self.compiled and weight.shape.num_elements() >= LARGE
        key = method, rule, compiled
        if key not in self.functions:
            self.functions[key] = traced(partial(method, compiled, rule), compiled)
        return self.functions[key]

    def update_slots(
        self,
        compiled: bool,
        rule: Rule,
        weight: Tensor,
        gradient: Tensor,
        slots: Sequence[tf.Variable],
        *numbers: Tensor,
    ) -> Tensor:
        """Update the slots and, in the same pass over memory, the weight.

        With a trust ratio the gradient becomes the update direction instead. What would be assigned to a tensor is
        returned.
        """
        factor, updates, rate, key = numbers

        def update(weight: Tensor, gradient: Tensor, *slots: Tensor) -> list[Tensor]:
            direction, *new_slots = self.optimizer.update_direction(
                rule, weight, gradient, slots, factor, updates
            )
            if not rule.adapts:
                direction = self.optimizer.apply_update(rule, weight, direction, None, rate, key)
            return [direction, *new_slots]

        values = [tf.convert_to_tensor(value) for value in (weight, gradient, *slots)]
        results = update(*values)
        if compiled and self.fuses_results:
            # On a CPU XLA fuses results of one shape only if none is an input of another, so the slots, which the
            # first result needs, are computed once more for it, behind a barrier.
            results[0] = update(*xla.optimization_barrier(*values))[0]
        target = gradient if rule.adapts else weight
        return _assign((target, *slots), results)

    def apply_direction(
        self, compiled: bool, rule: Rule, weight: Tensor, direction: Tensor, *inputs: Tensor
    ) -> Tensor:
        """Update a weight by its direction; return the new weight if it would be assigned to a tensor."""
        value = tf.convert_to_tensor(weight)
        new = self.optimizer.apply_update(rule, value, direction, *inputs)
        return _assign((weight,), (new,))


def _assign(targets: Sequence[Tensor], results: Sequence[Tensor]) -> Tensor:
    """Assign results to the targets that are variables; return the first result if its target is a tensor."""
    for target, result in zip(targets, results, strict=True):
        if isinstance(target, tf.Variable):
            target.assign(result)
    if isinstance(targets[0], tf.Variable):
        return None
    return results[0]


def shares(sizes: Mapping[str, int], replicas: int) -> list[list[str]]:
    """Return the names of each replica's weights: of the largest that is left, the replica with least takes it."""
    owned: list[list[str]] = [[] for _ in range(replicas)]
    totals = [0] * replicas
    # The largest first, so that small weights fill the differences; the word table alone is a fifth of BERT-base.
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        rank = totals.index(min(totals))
        owned[rank].append(name)
        totals[rank] += sizes[name]
    return owned


def buckets(sizes: Mapping[str, int]) -> list[list[str]]:
    """Return names in buckets of at most REDUCE_BUCKET; a larger weight has its own bucket."""
    filled: list[list[str]] = []
    free = 0
    for name, size in sizes.items():
        # Gradients are float32, whatever the dtype of the weights.
        if 4 * size > free:
            filled.append([])
            free = REDUCE_BUCKET
        filled[-1].append(name)
        free -= 4 * size
    return filled


def squared_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the float32 sum of squares of all elements."""
    # TensorFlow's kernel sums parts: for 23 million elements its error is 3e-8, and 2e-3 for a dot product.
    halves = [tf.nn.l2_loss(tf.cast(tensor, tf.float32)) for tensor in tensors]
    return 2.0 * tf.add_n([tf.zeros([]), *halves])


def random_bits(key: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the uniform uint32 of a key, in a shape."""
    return tf.random.stateless_uniform(
        shape, key, minval=None, maxval=None, dtype=tf.uint32, alg="philox"
    )
