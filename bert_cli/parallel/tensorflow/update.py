"""The end of a step on one device of one replica: add up over replicas, measure, move.

A device holds the weights of its stages. Their accumulated gradients are added up over the replicas
in buckets, once a step; from then on every replica has the same ones, so what is asked of the whole
gradient (its norm, whether it is finite) needs no second exchange. The moments lie beside the
weights, or in host memory, where the move is then computed (offloaded), or cut into one share a
replica (ZeRO stage 1: Rajbhandari et al. 2020, section 5.1): each moves its share of every weight,
and the moved shares are gathered.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from bert_cli.optim.adam import Optimizer
from bert_cli.parallel.tensorflow.alike import traced
from bert_cli.parallel.tensorflow.collectives import Group
from bert_cli.parallel.tensorflow.moves import Held, Moves, size_of, squared_norm
from bert_cli.parallel.tensorflow.stage import Stage

MOVES_WORTH_COMPILING = 2**23
"""Weights of a device above which a compiled update saves the seconds of its compilation within a few
hundred steps."""


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """Where the optimizer's moments are, how gradients travel, and whether XLA compiles the moves."""

    sharded: bool = False
    offloaded: bool = False
    host: str = "CPU:0"
    reduce_precision: str = "float32"
    bucket_bytes: int = 64_000_000
    compiled: bool = True


@dataclass(frozen=True)
class Bucket:
    """Weights whose gradients, or moved shares, travel together."""

    names: tuple[str, ...]
    sum: Any
    gather: Any
    pack: Any
    unpack: Any
    move: Any
    take: Any


class DeviceUpdate:
    """The weights of one device, their gradients, their moments, and how they move."""

    def __init__(
        self, stages: Sequence[Stage], group: Group, optimizer: Optimizer, keeping: Keeping
    ) -> None:
        self.group, self.optimizer, self.keeping = group, optimizer, keeping
        self.device = group.device
        self.weights: dict[str, tf.Variable] = {}
        self.accumulators: dict[str, list[tf.Variable]] = {}
        for stage in stages:
            self.weights |= stage.weights
            for name, accumulator in stage.accumulators.items():
                self.accumulators.setdefault(name, []).append(accumulator)
        self.sharded = keeping.sharded and group.size > 1
        with tf.device(keeping.host if keeping.offloaded else self.device):
            self.moments = {
                name: (_zeros(self._kept_shape(name)), _zeros(self._kept_shape(name)))
                for name in self.weights
            }
        sizes = {name: 4 * size_of(weight) for name, weight in self.weights.items()}
        self.buckets = [
            self._bucket(number, names)
            for number, names in enumerate(buckets(sizes, keeping.bucket_bytes))
        ]
        # The buckets have taken the first numbers, two each.
        self._sum_squares = group.summing(2 * len(self.buckets))
        elements = sum(map(size_of, self.weights.values()))
        self.moves = Moves(
            optimizer,
            device=keeping.host if keeping.offloaded else self.device,
            beside=not keeping.offloaded,
            compiled=keeping.compiled and elements >= MOVES_WORTH_COMPILING,
        )
        self._share = traced(self._cut)
        self._join = traced(self._join_stages)
        self._squared = traced(self._squared_gradient)
        self._move_all = traced(self._move_whole)
        self._directions = traced(self._directions_of_shares)
        self._measure = traced(lambda: self._squares_of(self.weights))
        self._squares = traced(_squares_of_variables)

    def compile(self) -> None:
        """Trace all functions; nothing is computed and nothing is exchanged."""
        number, whole = tf.TensorSpec([], tf.float32), tf.TensorSpec([], tf.int32)
        with tf.device(self.device):
            for function in (self._join, self._squared, self._measure):
                function.get_concrete_function()
            if self.group.size > 1:
                for bucket in self.buckets:
                    self._compile_bucket(bucket, number, whole)
            if self.sharded:
                self._directions.get_concrete_function(number, whole)
                self._sum_squares.get_concrete_function(_vector(len(self.weights), tf.float32))
            else:
                self._move_all.get_concrete_function(number, number, whole, whole)

    def _compile_bucket(self, bucket: Bucket, number: Any, whole: Any) -> None:
        travels = tf.as_dtype(self.keeping.reduce_precision)
        packed = _vector(sum(size_of(self.weights[name]) for name in bucket.names), travels)
        bucket.pack.get_concrete_function(number)
        bucket.sum.get_concrete_function(packed)
        bucket.unpack.get_concrete_function(packed, number)
        if self.sharded:
            lengths = {name: self._share_length(name) for name in bucket.names}
            parts = {name: _vector(length, tf.float32) for name, length in lengths.items()}
            dtype = self.weights[bucket.names[0]].dtype
            squares = _vector(len(self.weights), tf.float32)
            bucket.move.get_concrete_function(parts, squares, number, whole)
            bucket.gather.get_concrete_function(_vector(sum(lengths.values()), dtype))
            everyone = sum(lengths.values()) * self.group.size
            bucket.take.get_concrete_function(_vector(everyone, dtype))

    def reduce(self, shrink: float) -> tf.Tensor:
        """Add up the gradients over the stages of the device and over the replicas; their squared norm.

        In 16 bits they travel multiplied by `shrink`, a power of two.
        """
        with tf.device(self.device):
            factor = tf.constant(shrink, tf.float32)
            if any(len(held) > 1 for held in self.accumulators.values()):
                self._join()
            if self.group.size > 1:
                for bucket in self.buckets:
                    bucket.unpack(bucket.sum(bucket.pack(factor)), factor)
            return self._squared()

    def move(self, factor: float, learning_rate: float, before: int, step: int) -> tf.Tensor:
        """Move the weights by their gradients times `factor`; the new weights' squared norm."""
        with tf.device(self.device):
            gradient_factor = tf.constant(factor, tf.float32)
            rate = tf.constant(learning_rate, tf.float32)
            updates, now = tf.constant(before, tf.int32), tf.constant(step, tf.int32)
            if not self.sharded:
                return self._move_all(gradient_factor, rate, updates, now)
            directions, squares = self._directions(gradient_factor, updates)
            squares = self._sum_squares(squares)
            for bucket in self.buckets:
                parts = {name: directions[name] for name in bucket.names}
                bucket.take(bucket.gather(bucket.move(parts, squares, rate, now)))
            return self._measure()

    def measure(self) -> tf.Tensor:
        """The squared norm of the weights."""
        with tf.device(self.device):
            return self._measure()

    def _bucket(self, number: int, names: Sequence[str]) -> Bucket:
        def pack(shrink: tf.Tensor) -> tf.Tensor:
            flat = [tf.reshape(self.accumulators[name][0], [-1]) for name in names]
            return self._to_travel(tf.concat(flat, axis=0), shrink)

        def unpack(packed: tf.Tensor, shrink: tf.Tensor) -> None:
            flat = self._from_travel(packed, shrink)
            parts = tf.split(flat, [size_of(self.weights[name]) for name in names])
            for name, part in zip(names, parts, strict=True):
                accumulator = self.accumulators[name][0]
                accumulator.assign(tf.reshape(part, accumulator.shape))

        def move(parts: Mapping[str, Any], squares: Any, rate: Any, step: Any) -> tf.Tensor:
            return self._move_shares(names, parts, squares, rate, step)

        def take(gathered: tf.Tensor) -> None:
            self._take_shares(names, gathered)

        return Bucket(
            tuple(names),
            self.group.summing(2 * number),
            self.group.gathering(2 * number + 1),
            *(traced(function) for function in (pack, unpack, move, take)),
        )

    def _to_travel(self, flat: tf.Tensor, shrink: tf.Tensor) -> tf.Tensor:
        if self.keeping.reduce_precision == "float32":
            return flat
        return tf.cast(flat * shrink, self.keeping.reduce_precision)

    def _from_travel(self, flat: tf.Tensor, shrink: tf.Tensor) -> tf.Tensor:
        if self.keeping.reduce_precision == "float32":
            return flat
        return tf.cast(flat, tf.float32) / shrink

    def _join_stages(self) -> None:
        """Add up what stages on this device found for a weight that they share."""
        for first, *others in self.accumulators.values():
            for other in others:
                first.assign_add(other.read_value())

    def _squared_gradient(self) -> tf.Tensor:
        return self._squares_of({name: held[0] for name, held in self.accumulators.items()})

    def _squares_of(self, variables: Mapping[str, tf.Variable]) -> tf.Tensor:
        """The squared norm of variables named as the weights; blocks alike are traced once."""
        blocks = [[variables[name] for name in names] for names in self._blocks()]
        return tf.add_n([self._squares(block) for block in blocks])

    def _move_whole(
        self, factor: tf.Tensor, rate: tf.Tensor, before: tf.Tensor, step: tf.Tensor
    ) -> tf.Tensor:
        squares: list[tf.Tensor] = []
        for names in self._blocks():
            held = [
                Held(self.weights[name], self.accumulators[name][0], *self.moments[name])
                for name in names
            ]
            with tf.control_dependencies(squares[-1:]):
                squares.append(self.moves.move_block(names, held, factor, rate, before, step))
        return tf.add_n(squares)

    def _blocks(self) -> list[list[str]]:
        """The weights' names, block by block."""
        found: dict[str, list[str]] = {}
        for name in self.weights:
            found.setdefault(name.partition("/")[0], []).append(name)
        return list(found.values())

    def _directions_of_shares(
        self, factor: tf.Tensor, before: tf.Tensor
    ) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        """Move the moments; this replica's share of every direction, and their squared norms [weights]."""
        directions, squares = {}, []
        done: list[Any] = []
        for name, weight in self.weights.items():
            with tf.control_dependencies(done):
                gradient = self._share(self.accumulators[name][0].read_value())
            first, second = self.moments[name]
            with tf.device(first.device), tf.control_dependencies([gradient]):
                along = self.moves.of_rule(
                    self.optimizer.update_direction, self.optimizer.rules[name], weight
                )(self._share(weight.read_value()), gradient, first, second, factor, before)
                squares.append(squared_norm([along]))
            done = [along]
            directions[name] = along
        return directions, tf.stack(squares)

    def _move_shares(
        self,
        names: Sequence[str],
        directions: Mapping[str, tf.Tensor],
        squares: tf.Tensor,
        rate: tf.Tensor,
        step: tf.Tensor,
    ) -> tf.Tensor:
        """Return this replica's share of the new weights, one behind the other."""
        order = list(self.weights)
        shares = []
        for name in names:
            weight = self.weights[name]
            with tf.device(self.moments[name][0].device):
                value = self._share(weight.read_value())
                squared = squared_norm([weight]), squares[order.index(name)]
                key = self.optimizer.key(self.optimizer.weight_id(name), step)
                start = self.group.place * self._share_length(name)
                rule = self.optimizer.rules[name]
                moved = self.moves.of_rule(self.optimizer.apply_update, rule, weight, start)
                shares.append(moved(value, directions[name], squared, rate, key))
        return tf.concat(shares, axis=0)

    def _take_shares(self, names: Sequence[str], gathered: tf.Tensor) -> None:
        lengths = [self._share_length(name) for name in names]
        parts = tf.split(tf.reshape(gathered, [self.group.size, sum(lengths)]), lengths, axis=1)
        for name, part in zip(names, parts, strict=True):
            weight = self.weights[name]
            weight.assign(tf.reshape(tf.reshape(part, [-1])[: size_of(weight)], weight.shape))

    def _cut(self, whole: tf.Tensor) -> tf.Tensor:
        """Return this replica's part of a weight or gradient, flat, with zeros behind the last element."""
        size = size_of(whole)
        length = math.ceil(size / self.group.size)
        start, end = (
            min(place * length, size) for place in (self.group.place, self.group.place + 1)
        )
        part = tf.reshape(whole, [-1])[start:end]
        return tf.reshape(tf.pad(part, [[0, length - (end - start)]]), [length])

    def _share_length(self, name: str) -> int:
        return math.ceil(size_of(self.weights[name]) / self.group.size)

    def _kept_shape(self, name: str) -> list[int]:
        return [self._share_length(name)] if self.sharded else list(self.weights[name].shape)


def _squares_of_variables(variables: Sequence[tf.Variable]) -> tf.Tensor:
    return squared_norm([variable.read_value() for variable in variables])


def buckets(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Names cut into runs of at most so many bytes; a weight that is larger travels alone."""
    found: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not found or size > room:
            found.append([])
            room = most
        found[-1].append(name)
        room -= size
    return found


def _vector(length: int, dtype: Any) -> tf.TensorSpec:
    return tf.TensorSpec([length], dtype)


def _zeros(shape: Sequence[int]) -> tf.Variable:
    return tf.Variable(tf.zeros(shape, tf.float32), trainable=False)
