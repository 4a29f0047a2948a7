"""Plays a step on the mesh: every micro-batch through the stages of every replica, then the update.

Stages run at the same time, a thread each, and nothing on the host asks for a number before the end
of the step; one stage alone is a plain loop over the same functions. Meanwhile the processes ask one
another, once a second, whether all are done or one was asked to stop. Whatever the layout, the
dropout of a micro-batch follows from its position in the stream and gradients are sums, so the
numbers are those of one device.
"""

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import tensorflow as tf

from bert_cli.errors import DeviceError
from bert_cli.parallel.tensorflow.collectives import Peers, end_collectives
from bert_cli.parallel.tensorflow.play import AbandonedError, Feed, Hop, Player
from bert_cli.parallel.tensorflow.schedule import SCHEDULES
from bert_cli.parallel.tensorflow.stage import Columns, Stage
from bert_cli.parallel.tensorflow.trace import Trace
from bert_cli.parallel.tensorflow.update import DeviceUpdate

# How often the processes ask one another while they work.
ASK_SECONDS = 1.0


class StoppedBetweenMicroBatchesError(Exception):
    """Someone asked to stop; the step was given up and the state is that of the step before."""


class Engine:
    """The stages of this process' replicas, [replica][stage], and the updates, [replica][device]."""

    def __init__(
        self,
        replicas: Sequence[Sequence[Stage]],
        updates: Sequence[Sequence[DeviceUpdate]],
        peers: Peers,
        *,
        seed: int,
        schedule: str = "1F1B",
        trace: Trace | None = None,
    ) -> None:
        self.replicas, self.updates, self.peers = replicas, updates, peers
        self.seed, self.schedule, self.trace = seed, SCHEDULES[schedule], trace
        threads = max(sum(map(len, replicas)), sum(map(len, updates)))
        self._pool = ThreadPoolExecutor(threads, "stage")
        self._traced: set[tuple[int, ...]] = set()
        self.most_kept: list[int] = []
        """By stage, the most micro-batches of the last step kept for their backward pass at once."""

    def play(
        self,
        batch: Columns,
        position: int,
        counts: Mapping[str, float],
        loss_scale: float,
        asked_to_stop: Callable[[], bool] = lambda: False,
    ) -> dict[str, float]:
        """Add the gradients of this process' micro-batches [M, B, ...]; the head's sums over them.

        `position` is the place of the first one in the stream, which decides its dropout; `counts`
        are those of the whole step. Raises StoppedBetweenMicroBatchesError when any process was
        asked to stop, DeviceError when a micro-batch does not fit the memory or a process is lost.
        """
        alone = len(self.replicas) == len(self.replicas[0]) == self.peers.count == 1
        if not alone and batch["input_ids"].shape[1:] not in self._traced:
            # Examples of another length than before: what is new is traced before threads need it.
            each = len(batch["input_ids"]) // len(self.replicas)
            self.compile_stages({name: column[::each] for name, column in batch.items()}, counts)
        abandoned = threading.Event()
        players = self._players(batch, position, counts, loss_scale, abandoned)
        flat = [player for row in players for player in row]
        try:
            with telling_what_does_not_fit():
                if alone:
                    self._play_alone(flat[0], asked_to_stop)
                else:
                    self._play_together(players, abandoned, asked_to_stop)
        except (AbandonedError, StoppedBetweenMicroBatchesError):
            self.clear()
            raise StoppedBetweenMicroBatchesError from None
        self.most_kept = [max(row[s].most_kept for row in players) for s in range(len(players[0]))]
        if self.trace is not None:
            self.trace.steps -= 1
        return _summed(players, self.sum_names)

    def reduce(self, shrink: float) -> float:
        """Add up the gradients over stages and replicas; the squared norm of the whole gradient.

        Every process gets the same bits, so all take the same decision. See DeviceUpdate.reduce.
        """
        squared = self._on_every_device(lambda update: update.reduce(shrink))
        return self.peers.of_rank_0([math.fsum(map(float, squared[: len(self.updates[0])]))])[0]

    def move(self, factor: float, learning_rate: float, before: int, step: int) -> float:
        """Move all weights by gradient x factor, and forget the gradient; the weights' squared norm."""
        squared = self._on_every_device(
            lambda update: update.move(factor, learning_rate, before, step)
        )
        self.clear()
        return math.fsum(map(float, squared[: len(self.updates[0])]))

    @property
    def head(self) -> Any:
        """The last block of the first replica, which says what it counts."""
        return self.replicas[0][-1].head

    @property
    def sum_names(self) -> list[str]:
        """Names of the sums that the head gives; known once it was traced."""
        return self.replicas[0][-1].sum_names

    def weigh(self) -> float:
        """The squared norm of all weights."""
        return math.fsum(float(update.measure()) for update in self.updates[0])

    def clear(self) -> None:
        """Forget the gradients of a step that is done, was given up or cannot be used."""
        for row in self.replicas:
            for stage in row:
                stage.clear()

    def evaluate(self, micro_batch: Columns) -> dict[str, float]:
        """The head's sums on this process' first replica, without dropout and without gradients."""
        hidden: Any = None
        for stage in self.replicas[0]:
            hidden = stage.look(hidden, stage.columns(micro_batch))
        return dict(zip(self.sum_names, map(float, hidden.numpy()), strict=True))

    def predict(self, examples: Columns) -> Any:
        """The head's logits for examples [B, ...], by this process' first replica, as NumPy arrays."""
        *stages, last = self.replicas[0]
        hidden: Any = None
        with telling_what_does_not_fit():
            for stage in stages:
                hidden = stage.look(hidden, stage.columns(examples))
            scores = last.scores(hidden, last.columns(examples))
            return tf.nest.map_structure(lambda tensor: tensor.numpy(), scores)

    def compile(self, batch: Columns, counts: Mapping[str, float]) -> None:
        """Trace all that a step runs, here in the main thread: Keras is not made for several.

        `batch` has a micro-batch for each replica of this process. Nothing moves.
        """
        self.compile_stages(batch, counts)
        for row in self.updates:
            for update in row:
                update.compile()

    def compile_stages(self, batch: Columns, counts: Mapping[str, float]) -> None:
        """Trace the stages by taking a micro-batch of each replica forward and backward."""
        self._traced.add(batch["input_ids"].shape[1:])
        for players in self._players(batch, 0, counts, 1.0, threading.Event()):
            work = [
                (player, piece)
                for number, player in enumerate(players)
                for piece in self.schedule(number, len(players), 1)
            ]
            way_up = [pair for pair in work if pair[1].kind != "backward"]
            way_down = [pair for pair in reversed(work) if pair[1].kind == "backward"]
            with telling_what_does_not_fit():
                for player, piece in way_up + way_down:
                    player.play([piece], lambda: False)
        self.clear()

    def _players(
        self,
        batch: Columns,
        position: int,
        counts: Mapping[str, float],
        loss_scale: float,
        abandoned: threading.Event,
    ) -> list[list[Player]]:
        each = len(batch["input_ids"]) // len(self.replicas)
        players = []
        for replica, row in enumerate(self.replicas):
            first = replica * each
            feed = Feed(batch, first, each, position + first, self.seed, counts, loss_scale)
            hops = [Hop(abandoned) for _ in row[1:]]
            ends = zip(row, [None, *hops], [*hops, None], strict=True)
            players.append(
                [
                    Player(stage, feed, below, above, partial(self._span, replica, number))
                    for number, (stage, below, above) in enumerate(ends)
                ]
            )
        return players

    def _play_alone(self, player: Player, asked_to_stop: Callable[[], bool]) -> None:
        player.play(self.schedule(0, 1, player.feed.micro_batches), asked_to_stop)

    def _play_together(
        self,
        players: Sequence[Sequence[Player]],
        abandoned: threading.Event,
        asked_to_stop: Callable[[], bool],
    ) -> None:
        futures: list[Future[None]] = []
        for row in players:
            for number, player in enumerate(row):
                work = self.schedule(number, len(row), player.feed.micro_batches)
                futures.append(self._pool.submit(_play, player, work, abandoned))
        try:
            while True:
                done, waiting = wait(futures, ASK_SECONDS, FIRST_EXCEPTION)
                if any(future.exception() is not None for future in done):
                    wait(futures)
                    raise _cause(futures)
                wishes, ready = self.peers.total([asked_to_stop(), not waiting])
                if wishes:
                    raise StoppedBetweenMicroBatchesError
                if ready == self.peers.count:
                    return
        except BaseException:
            # Also a second Ctrl-C: players that go on would keep the process alive.
            abandoned.set()
            wait(futures)
            raise

    def _span(
        self, replica: int, stage: int, kind: str, micro_batch: int
    ) -> AbstractContextManager[None]:
        if self.trace is None or self.trace.steps <= 0:
            return nullcontext()
        return self.trace.span(replica, stage, kind, micro_batch)

    def _on_every_device(self, act: Callable[[DeviceUpdate], tf.Tensor]) -> list[tf.Tensor]:
        """Act on all devices at once: what one adds up with the others waits for them."""
        flat = [update for row in self.updates for update in row]
        with self.peers.meeting(), telling_what_does_not_fit():
            if len(flat) == 1:
                return [act(flat[0])]
            futures = [self._pool.submit(act, update) for update in flat]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
            except BaseException:
                # The others stand in a sum to which this one will not come.
                end_collectives()
                wait(futures)
                raise
            return [future.result() for future in futures]


@contextmanager
def telling_what_does_not_fit() -> Iterator[None]:
    """Turn the runtime's error about memory into ours."""
    try:
        yield
    except tf.errors.ResourceExhaustedError as error:
        raise DeviceError(
            "global_batch.micro_batch_size: the run does not fit the device's memory; lower it and raise "
            "grad_acc_steps_per_replica, set --parallel.recompute, or ask `bert plan` for a layout"
        ) from error


def _play(player: Player, work: Sequence[Any], abandoned: threading.Event) -> None:
    try:
        player.play(work, abandoned.is_set)
    except BaseException:
        # The neighbours wait for what will not come.
        abandoned.set()
        raise


def _cause(futures: Sequence[Future[None]]) -> BaseException:
    """The first error that is not a player leaving because of another's."""
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    causes = [error for error in errors if not isinstance(error, AbandonedError)]
    return (causes or errors)[0]


def _summed(players: Sequence[Sequence[Player]], names: Sequence[str]) -> dict[str, float]:
    """The head's sums over all micro-batches, rounded once: the same in every layout."""
    rows = [tf.stack(row[-1].sums).numpy() for row in players]
    return {
        name: math.fsum(float(value) for row in rows for value in row[:, place])
        for place, name in enumerate(names)
    }
