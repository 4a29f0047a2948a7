"""The stage workers of a pipeline: each runs its schedule and sends tensors to its neighbours through channels.

No worker reads a value on the host: on a GPU a tensor may be sent before it is computed.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import tensorflow as tf

from bert_cli.parallel.engine import Batch, StoppedBetweenMicroBatchesError
from bert_cli.parallel.tensorflow.schedule import Work
from bert_cli.parallel.tensorflow.stage import Stage, Tensors

POLL_SECONDS = 0.2
"""How often a waiting stage worker checks whether the step was abandoned."""


class MicroBatches:
    """A replica's micro-batches of one step, and what the loss of each is divided and multiplied by."""

    def __init__(
        self,
        batch: Batch,
        rows: range,
        first_index: int,
        seed: int,
        counts: Mapping[str, float],
        loss_scale: float,
    ) -> None:
        """Take `rows` of a batch [M, B, ...]; `first_index` is the index of its row 0 in the stream."""
        self.batch, self.rows, self.first_index, self.seed = batch, rows, first_index, seed
        self.counts = {name: tf.constant(number, tf.float32) for name, number in counts.items()}
        self.loss_scale = tf.constant(loss_scale, tf.float32)

    def columns(self, number: int) -> Batch:
        """Return the columns of a micro-batch [B, ...]."""
        return {name: column[self.rows[number]] for name, column in self.batch.items()}

    def key(self, number: int) -> tf.Tensor:
        """Return the dropout key of a micro-batch: the seed and its index in the stream."""
        index = (self.first_index + self.rows[number]) % 2**31
        return tf.constant(np.array([self.seed, index], np.int32))


class Channel:
    """Queues between two neighbouring stages: hidden values forward, gradients backward."""

    def __init__(self, abandoned: threading.Event) -> None:
        self.abandoned = abandoned
        self.forward: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self.backward: SimpleQueue[tuple[int, Any]] = SimpleQueue()

    def receive(self, queue: "SimpleQueue[tuple[int, Any]]", number: int) -> Any:
        """Wait for the tensor of a micro-batch; raise StoppedBetweenMicroBatchesError when the step is abandoned."""
        while not self.abandoned.is_set():
            try:
                received, tensor = queue.get(timeout=POLL_SECONDS)
            except Empty:
                continue
            assert received == number, f"received micro-batch {received}, expected {number}"
            return tensor
        raise StoppedBetweenMicroBatchesError


class StageWorker:
    """Runs the work of one stage of one replica in one step."""

    def __init__(
        self,
        stage: Stage,
        micro_batches: MicroBatches,
        before: Channel | None,
        after: Channel | None,
        span: Callable[[str, int], AbstractContextManager[None]],
    ) -> None:
        """`before` and `after` lead to the neighbouring stages; `span` is entered around each pass."""
        self.stage, self.micro_batches, self.span = stage, micro_batches, span
        self.before, self.after = before, after
        self.saved: dict[int, tuple[Tensors, Any]] = {}
        self.max_in_flight = 0
        """The most micro-batches whose activations were saved at once."""
        self.sums: list[tf.Tensor] = []
        """The head's sums of each micro-batch, in the last stage."""

    def run(self, work: Iterable[Work], stop_requested: Callable[[], bool] = lambda: False) -> None:
        """Do the work; raise StoppedBetweenMicroBatchesError when a stop is requested."""
        passes = {
            "forward": self._forward,
            "backward": self._backward,
            "forward-backward": self._forward_backward,
        }
        for kind, number in work:
            if stop_requested():
                raise StoppedBetweenMicroBatchesError
            passes[kind](number)

    def _forward(self, number: int) -> None:
        assert self.after is not None
        hidden = self._receive_hidden(number)
        with self.span("forward", number):
            columns = self.stage.columns(self.micro_batches.columns(number))
            output, saved = self.stage.forward(hidden, columns, self.micro_batches.key(number))
        self.saved[number] = columns, saved
        self.max_in_flight = max(self.max_in_flight, len(self.saved))
        self.after.forward.put((number, output))

    def _backward(self, number: int) -> None:
        assert self.after is not None
        gradient = self.after.receive(self.after.backward, number)
        columns, saved = self.saved.pop(number)
        with self.span("backward", number):
            key = self.micro_batches.key(number)
            gradient = self.stage.backward(saved, columns, key, gradient)
        self._send_gradient(number, gradient)

    def _forward_backward(self, number: int) -> None:
        hidden = self._receive_hidden(number)
        self.max_in_flight = 1
        batches = self.micro_batches
        with self.span("forward-backward", number):
            columns = self.stage.columns(batches.columns(number))
            gradient, sums = self.stage.forward_backward(
                hidden, columns, batches.key(number), batches.counts, batches.loss_scale
            )
        self.sums.append(sums)
        self._send_gradient(number, gradient)

    def _receive_hidden(self, number: int) -> Any:
        return self.before.receive(self.before.forward, number) if self.before is not None else None

    def _send_gradient(self, number: int, gradient: Any) -> None:
        if self.before is not None:
            self.before.backward.put((number, gradient))
