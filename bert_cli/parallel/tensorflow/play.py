"""One replica's micro-batches through its stages: a player a stage, each in a thread of its own.

A player goes through the list of work that the schedule gives its stage and hands tensors on through
the queues between neighbours. Nobody asks a tensor for its numbers: on a GPU it may still be in the
making when it is handed on, and only the player that takes it over waits, where TensorFlow's copy
does. When a step is given up every player leaves at its next piece of work.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import tensorflow as tf

from bert_cli.parallel.tensorflow.schedule import Work
from bert_cli.parallel.tensorflow.stage import Columns, Stage, Tensors

# How often a player that waits looks whether the step was given up.
LOOK_UP_SECONDS = 0.2

Span = Callable[[str, int], AbstractContextManager[None]]
"""Around a piece of work (kind, micro-batch), to note how long it took."""


class AbandonedError(Exception):
    """The step was given up while a player waited."""


class Feed:
    """A replica's micro-batches of a step, and what the loss of each is divided and multiplied by."""

    def __init__(
        self,
        batch: Columns,
        first: int,
        micro_batches: int,
        position: int,
        seed: int,
        counts: Mapping[str, float],
        loss_scale: float,
    ) -> None:
        """Take `micro_batches` rows of `batch` [M, B, ...] from row `first` on.

        `position` is the place of the first one in the stream.
        """
        self.batch, self.first, self.micro_batches = batch, first, micro_batches
        self.position, self.seed = position, seed
        self.counts = {name: tf.constant(count, tf.float32) for name, count in counts.items()}
        self.loss_scale = tf.constant(loss_scale, tf.float32)

    def columns(self, number: int) -> Columns:
        """The columns of a micro-batch."""
        return {name: column[self.first + number] for name, column in self.batch.items()}

    def key(self, number: int) -> tf.Tensor:
        """What the dropout of a micro-batch is drawn from: (seed, position)."""
        return tf.constant(np.array([self.seed, (self.position + number) % 2**31], np.int32))


class Hop:
    """The queues between two neighbouring stages: hidden values up, gradients down."""

    def __init__(self, abandoned: threading.Event) -> None:
        self.abandoned = abandoned
        self._up: SimpleQueue[Any] = SimpleQueue()
        self._down: SimpleQueue[Any] = SimpleQueue()

    def send_up(self, number: int, hidden: Any) -> None:
        """Hand hidden values to the stage above."""
        self._up.put((number, hidden))

    def send_down(self, number: int, gradient: Any) -> None:
        """Hand a gradient to the stage below."""
        self._down.put((number, gradient))

    def from_below(self, number: int) -> Any:
        """Hidden values of a micro-batch, when they come."""
        return self._wait(self._up, number)

    def from_above(self, number: int) -> Any:
        """The gradient of a micro-batch, when it comes."""
        return self._wait(self._down, number)

    def _wait(self, queue: "SimpleQueue[Any]", number: int) -> Any:
        while not self.abandoned.is_set():
            try:
                found, tensor = queue.get(timeout=LOOK_UP_SECONDS)
            except Empty:
                continue
            assert found == number, f"micro-batch {found} came where {number} was due"
            return tensor
        raise AbandonedError


class Player:
    """Plays the work of one stage of one replica in one step."""

    def __init__(
        self, stage: Stage, feed: Feed, below: Hop | None, above: Hop | None, span: Span
    ) -> None:
        self.stage, self.feed, self.span = stage, feed, span
        self.below, self.above = below, above
        self.kept: dict[int, tuple[Tensors, Any]] = {}
        self.most_kept = 0
        """The most micro-batches kept for their backward pass at once."""
        self.sums: list[tf.Tensor] = []
        """The head's sums of each micro-batch, in the last stage."""

    def play(self, work: Iterable[Work], abandoned: Callable[[], bool]) -> None:
        """Go through the work; leave when the step is given up."""
        kinds = {"forward": self._forward, "backward": self._backward, "turn": self._turn}
        for kind, number in work:
            if abandoned():
                raise AbandonedError
            kinds[kind](number)

    def _forward(self, number: int) -> None:
        hidden = self.below.from_below(number) if self.below is not None else None
        with self.span("forward", number):
            columns = self.stage.columns(self.feed.columns(number))
            onward, keeps = self.stage.forward(hidden, columns, self.feed.key(number))
        self.kept[number] = columns, keeps
        self.most_kept = max(self.most_kept, len(self.kept))
        assert self.above is not None
        self.above.send_up(number, onward)

    def _backward(self, number: int) -> None:
        assert self.above is not None
        gradient = self.above.from_above(number)
        columns, keeps = self.kept.pop(number)
        with self.span("backward", number):
            gradient = self.stage.backward(keeps, columns, self.feed.key(number), gradient)
        if self.below is not None:
            self.below.send_down(number, gradient)

    def _turn(self, number: int) -> None:
        hidden = self.below.from_below(number) if self.below is not None else None
        self.most_kept = 1
        with self.span("turn", number):
            columns = self.stage.columns(self.feed.columns(number))
            gradient, sums = self.stage.turn(
                hidden, columns, self.feed.key(number), self.feed.counts, self.feed.loss_scale
            )
        self.sums.append(sums)
        if self.below is not None:
            self.below.send_down(number, gradient)
