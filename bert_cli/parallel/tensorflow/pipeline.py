"""Pipelines: the order of work in each stage, and the workers that run it.

A stage goes through its list of forward and backward passes in order. A forward pass waits for the hidden values of the
previous stage, a backward pass for the gradient of the next stage. The last stage runs forward and backward pass of a
micro-batch together. No worker reads a value on the host: on a GPU a tensor may be sent before it is computed.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Literal, NamedTuple

import numpy as np
import tensorflow as tf

from bert_cli.parallel.engine import Batch, StoppedBetweenMicroBatchesError, StopRequested, Tensor
from bert_cli.parallel.tensorflow.stage import Saved, Stage, Tensors

# The numbers of micro-batches, and a tensor of each.
Queue = SimpleQueue[tuple[int, Tensor]]
# A thread that waits in a queue without a limit could not be interrupted.
POLL_SECONDS = 0.2  # between checks of a waiting stage worker whether the step was abandoned


class Work(NamedTuple):
    """One pass of a micro-batch through a stage."""

    kind: Literal["forward", "backward", "forward_backward"]  # a method of StageWorker
    micro_batch: int  # its number in the replica's step


def work_of(stage: int, stages: int, micro_batches: int) -> list[Work]:
    """Return the work of a stage in its order, by the schedule 1F1B."""
    if stage == stages - 1:
        return [Work("forward_backward", number) for number in range(micro_batches)]
    # A filled pipeline alternates (Narayanan et al. 2019, PipeDream, section 3.2; with a flush): stage k of p saves the
    # activations of at most p - k micro-batches, however many the step has.
    ahead = min(stages - stage - 1, micro_batches)
    work = [Work("forward", number) for number in range(ahead)]
    for number in range(micro_batches - ahead):
        work += [Work("forward", ahead + number), Work("backward", number)]
    return work + [Work("backward", n) for n in range(micro_batches - ahead, micro_batches)]


class MicroBatches(NamedTuple):
    """A replica's micro-batches of one step, and the divisors and the factor of their losses."""

    batch: Batch
    rows: range  # of the batch [M, B, ...]
    first_index: int  # index of its row 0 in the stream
    seed: int
    counts: Tensors
    loss_scale: Tensor

    def columns(self, number: int) -> Batch:
        """Return the columns of a micro-batch [B, ...]."""
        return {name: column[self.rows[number]] for name, column in self.batch.items()}

    def key(self, number: int) -> Tensor:
        """Return the dropout key of a micro-batch: the seed and its sample index."""
        # Keys are int32. After two thousand million micro-batches masks repeat.
        index = (self.first_index + self.rows[number]) % 2**31
        return tf.constant(np.array([self.seed, index], np.int32))


@dataclass
class Channel:
    """Queues between two neighbouring stages: hidden values forward, gradients backward."""

    abandoned: threading.Event
    forward: Queue = field(default_factory=SimpleQueue)
    backward: Queue = field(default_factory=SimpleQueue)

    def receive(self, queue: Queue, number: int) -> Tensor:
        """Wait for the tensor of a micro-batch; raise StoppedBetweenMicroBatchesError when the step is abandoned."""
        while not self.abandoned.is_set():
            try:
                received, tensor = queue.get(timeout=POLL_SECONDS)
            except Empty:
                continue
            assert received == number, f"received micro-batch {received}, expected {number}"
            return tensor
        raise StoppedBetweenMicroBatchesError


@dataclass
class StageWorker:
    """Runs the work of one stage of one replica in one step; `before` and `after` lead to the neighbouring stages."""

    stage: Stage
    micro_batches: MicroBatches
    before: Channel | None
    after: Channel | None
    saved: dict[int, tuple[Tensors, Saved]] = field(default_factory=dict)
    sums: list[Tensors] = field(default_factory=list)
    """The head's sums of each micro-batch, in the last stage."""

    def run(self, work: Iterable[Work], stop_requested: StopRequested = lambda: False) -> None:
        """Do the work; raise StoppedBetweenMicroBatchesError when a stop is requested."""
        for kind, number in work:
            if stop_requested():
                raise StoppedBetweenMicroBatchesError
            getattr(self, kind)(number)

    def forward(self, number: int) -> None:
        """Run a micro-batch forward; not in the last stage."""
        assert self.after is not None
        hidden = self._receive_hidden(number)
        columns = self.stage.columns(self.micro_batches.columns(number))
        output, saved = self.stage.forward(hidden, columns, self.micro_batches.key(number))
        # Held until its backward pass: in stage k of p, 1F1B holds at most p - k micro-batches.
        self.saved[number] = columns, saved
        self.after.forward.put((number, output))

    def backward(self, number: int) -> None:
        """Run a micro-batch backward; not in the last stage."""
        assert self.after is not None
        gradient = self.after.receive(self.after.backward, number)
        columns, saved = self.saved.pop(number)
        gradient = self.stage.backward(saved, columns, self.micro_batches.key(number), gradient)
        self._send_gradient(number, gradient)

    def forward_backward(self, number: int) -> None:
        """Run a micro-batch forward and backward, in the last stage."""
        hidden = self._receive_hidden(number)
        batches = self.micro_batches
        columns = self.stage.columns(batches.columns(number))
        gradient, sums = self.stage.forward_backward(
            hidden, columns, batches.key(number), batches.counts, batches.loss_scale
        )
        self.sums.append(sums)
        self._send_gradient(number, gradient)

    def _receive_hidden(self, number: int) -> Tensor:
        return self.before and self.before.receive(self.before.forward, number)

    def _send_gradient(self, number: int, gradient: Tensor) -> None:
        if self.before is not None:
            self.before.backward.put((number, gradient))
