"""Runs steps on a mesh: every micro-batch through the stages of each replica, then the update.

The stages of a pipeline work at the same time, each in a host thread; a single stage is a plain loop over the same
functions. Dropout depends on the sample index of the micro-batch, and gradients are sums, so the numbers do not depend
on the layout.
"""

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from typing import Any, cast

import numpy as np
import tensorflow as tf

from bert_cli.arrays import Array, Floats32, Shape
from bert_cli.facts.optimizers import MOMENTS
from bert_cli.model.bert.heads import Head
from bert_cli.model.build import named_weights
from bert_cli.optim.optimizer import Optimizer, clip_factor
from bert_cli.parallel.engine import (
    Batch,
    Divisors,
    Engine,
    StepResult,
    StoppedBetweenMicroBatchesError,
    StopRequested,
    Sums,
    Tensor,
    UpdateRequest,
    Value,
    count,
    scaled_for_accumulation,
)
from bert_cli.parallel.group import ProcessGroup
from bert_cli.parallel.runtime import Layout, Mesh, Model
from bert_cli.parallel.tensorflow.mesh import (
    TensorFlowProcessGroup,
    abort_collectives,
    device_group,
)
from bert_cli.parallel.tensorflow.pipeline import Channel, MicroBatches, StageWorker, Work, work_of
from bert_cli.parallel.tensorflow.stage import Stage
from bert_cli.parallel.tensorflow.update import DeviceUpdate, Variables, random_bits

# An all-reduce of two numbers over all processes: once a second it is negligible.
AGREE_SECONDS = 1.0  # between checks, during a step, whether a process was asked to stop


@dataclass(frozen=True)
class ReplicatedVariable:
    """Equal variables, a copy on each replica of this process, or on the one replica of the run that owns it."""

    variables: Sequence[tf.Variable]
    """May be empty if the value is sharded."""
    shape: Shape
    group: ProcessGroup
    is_sharded: bool = False

    def numpy(self) -> Array:
        """Return the value; all processes must call this method if `is_sharded`."""
        value: Array = np.zeros(self.shape)
        if self.variables:
            value = np.asarray(self.variables[0])
        if self.is_sharded:
            # Of one process alone, so the sum is exact.
            value = self.group.all_reduce(value).astype(np.float32)
        return value

    def assign(self, value: Array) -> None:
        """Set the value on every replica that has it."""
        for variable in self.variables:
            variable.assign(value)


class TensorFlowEngine(Engine):
    """The stages of this process' replicas, [replica][stage], and their updates, [replica][device]."""

    def __init__(
        self,
        replicas: Sequence[Sequence[Stage]],
        mesh: Mesh,
        *,
        seed: int,
        optimizer: Optimizer | None = None,
    ) -> None:
        """Without an optimizer weights are not updated."""
        self.replicas = replicas
        self.mesh = mesh
        self.group = TensorFlowProcessGroup(mesh)
        layout = mesh.layout
        self.seed = seed
        head = replicas[0][-1].head
        assert head is not None
        self.head = head
        self.weights = {
            name: ReplicatedVariable(variables, tuple(variables[0].shape), self.group)
            for name, variables in weights_of(replicas).items()
        }
        self.updates: list[list[DeviceUpdate]] = [[] for _ in replicas]
        # One update for each device, although a device may have two stages: the ends of the model share the word
        # embeddings.
        for replica, row in enumerate(self.updates):
            for device in range(len(mesh.devices[replica])):
                pairs = zip(replicas[replica], layout.stage_devices, strict=True)
                # The map repeats for each replica, whose devices are numbered from 0.
                stages = [stage for stage, its_device in pairs if its_device == device]
                # A device may have only the gather of the masked positions, which has no weights.
                if optimizer is not None and any(stage.weights for stage in stages):
                    group = device_group(mesh, replica, device)
                    row.append(DeviceUpdate(stages, group, optimizer, layout, mesh.host))
        self._is_one_stage = len(replicas) == len(replicas[0]) == self.group.world_size == 1
        # The threads of several stages need all functions traced before.
        self.compiles_in_first_step = self._is_one_stage
        # A GPU computes asynchronously.
        self.asks_before_each_micro_batch = self._is_one_stage and "CPU" in mesh.devices[0][0]
        threads = max(sum(map(len, replicas)), sum(map(len, self.updates)))
        # All stages at once, or all updates at once, whose collectives wait for one another: with fewer threads they
        # would hang.
        self._pool = ThreadPoolExecutor(threads, "stage")
        self._traced_shapes: set[tuple[Shape, ...]] = set()

    @property
    def slots(self) -> dict[str, Value]:
        """The slots of the optimizer for each weight, by their names in a checkpoint."""
        is_sharded = self.mesh.layout.shard_moments and self.mesh.replicas > 1
        slots: dict[str, Value] = {}
        for name, weight in self.weights.items():
            updates = chain.from_iterable(self.updates)
            owners = [update.slots[name] for update in updates if name in update.slots]
            for number, moment in enumerate(MOMENTS):
                variables = [owner[number] for owner in owners]
                slots[f"{name}/{moment}"] = ReplicatedVariable(
                    variables, weight.shape, self.group, is_sharded
                )
        return slots

    def compile(self, batch: Batch) -> None:
        """Trace everything in the main thread, because Keras is not thread-safe."""
        self.compile_stages(batch, count(batch, self.head.COUNTS))
        for row in self.updates:
            for update in row:
                update.compile()

    def compile_stages(self, batch: Batch, counts: Divisors) -> None:
        """Trace the stages by running a micro-batch of each replica forward and backward."""
        self._traced_shapes.add(_shapes(batch))
        for workers in self._workers(batch, 0, counts, 1.0, threading.Event()):
            *earlier, last = workers
            with self.reporting_out_of_memory():
                for worker in earlier:
                    worker.forward(0)
                last.forward_backward(0)
                for worker in reversed(earlier):
                    worker.backward(0)
        self.clear_gradients()

    def _run_step(self, batch: Batch, request: UpdateRequest, divisors: Divisors) -> StepResult:
        """Accumulate the gradients of the step, all-reduce them, and update the weights if they are finite."""
        scale = scaled_for_accumulation(request.loss_scale, request.micro_batches)
        with self.record("forward_backward"):
            first_index = self.first_index(batch, request)
            sums = self.accumulate(batch, first_index, divisors, scale, request.stop_requested)
        with self.record("reduction"):
            # The gradients still have the scale of the loss; their norm is of the plain ones.
            squared = self.all_reduce_gradients() / scale**2
        with self.record("optimizer"):
            if math.isfinite(squared):
                factor = clip_factor(squared, request.max_gradient_norm or math.inf) / scale
                weight_squared = self.apply_update(factor, request)
            else:
                self.clear_gradients()
                # The first replica stands for all: their weights are equal.
                weight_squared = math.fsum(float(on.weight_squared()) for on in self.updates[0])
        return StepResult(sums, squared, weight_squared)

    def accumulate(
        self,
        batch: Batch,
        first_index: int,
        counts: Divisors,
        loss_scale: float,
        stop_requested: StopRequested = lambda: False,
    ) -> Sums:
        """Accumulate the gradients of this process' micro-batches [M, B, ...]; return the head's sums over them.

        `first_index` is the sample index of the first micro-batch, for its dropout; `counts` are the complete step's.
        """
        if not self._is_one_stage and _shapes(batch) not in self._traced_shapes:
            # Examples of a new length: traced before threads need it.
            size = len(batch["input_ids"]) // len(self.replicas)
            self.compile_stages({name: column[::size] for name, column in batch.items()}, counts)
        abandoned = threading.Event()
        workers = self._workers(batch, first_index, counts, loss_scale, abandoned)
        try:
            with self.reporting_out_of_memory():
                if self._is_one_stage:
                    work = work_of(0, 1, len(batch["input_ids"]))
                    workers[0][0].run(work, stop_requested)
                else:
                    self._run_pipelines(workers, abandoned, stop_requested)
        except StoppedBetweenMicroBatchesError:
            self.clear_gradients()
            raise
        rows = list(chain.from_iterable(replica[-1].sums for replica in workers))
        # Rounded once: the same sums in every layout.
        return {name: math.fsum(float(sums[name]) for sums in rows) for name in sorted(rows[0])}

    def all_reduce_gradients(self) -> float:
        """Sum the gradients over stages and replicas; return the squared norm of the sum, the same in every process."""
        squared = self._on_every_device(lambda update: update.all_reduce_gradients())
        return self.group.broadcast([squared])[0]

    def apply_update(self, factor: float, request: UpdateRequest) -> float:
        """Update all weights with `factor` times the gradient, clear it, and return the weights' squared norm."""
        numbers = request.learning_rate, request.updates, request.step
        squared = self._on_every_device(lambda update: update.update(factor, *numbers))
        self.clear_gradients()
        return squared

    def forward(self, batch: Batch, request: UpdateRequest) -> Floats32:
        """Return the logits of the micro-batches [M, ...]; devices work while the host starts the next."""
        rows = range(len(batch["input_ids"]))
        size = len(rows) // len(self.replicas)
        first = self.first_index(batch, request)
        micro_batches = MicroBatches(batch, rows, first, self.seed, {}, tf.constant(1.0))
        with self.reporting_out_of_memory():
            logits = [
                _logits(self.replicas[n // size], micro_batches.columns(n), micro_batches.key(n))
                for n in rows
            ]
            return np.stack([array.numpy() for array in logits])

    def clear_gradients(self) -> None:
        """Make the next gradients overwrite the accumulated gradients."""
        for row in self.replicas:
            for stage in row:
                stage.has_gradients = False

    def gather_weights(self) -> None:
        """Do nothing: each replica has all weights."""

    def evaluate(self, micro_batch: Batch) -> Sums:
        """Return the head's sums for examples [B, ...] by this process' first replica."""
        hidden: Tensor = None
        for stage in self.replicas[0]:
            hidden = stage.infer(hidden, stage.columns(micro_batch))
        return {name: float(number) for name, number in hidden.items()}

    def predict(self, examples: Batch) -> Any:
        """Return the head's logits for examples [B, ...] by this process' first replica."""
        with self.reporting_out_of_memory():
            logits = _logits(self.replicas[0], examples, None)
            return tf.nest.map_structure(lambda tensor: tensor.numpy(), logits)

    def _is_out_of_memory(self, error: Exception) -> bool:
        return isinstance(error, tf.errors.ResourceExhaustedError)

    def _workers(
        self,
        batch: Batch,
        first_index: int,
        counts: Divisors,
        loss_scale: float,
        abandoned: threading.Event,
    ) -> list[list[StageWorker]]:
        size = len(batch["input_ids"]) // len(self.replicas)
        divisors = {name: tf.constant(number, tf.float32) for name, number in counts.items()}
        scale = tf.constant(loss_scale, tf.float32)
        workers: list[list[StageWorker]] = []
        for replica, stages in enumerate(self.replicas):
            rows = range(replica * size, (replica + 1) * size)
            micro_batches = MicroBatches(batch, rows, first_index, self.seed, divisors, scale)
            channels = pairwise([None, *(Channel(abandoned) for _ in stages[1:]), None])
            ends = zip(stages, channels, strict=True)
            workers.append([StageWorker(stage, micro_batches, *around) for stage, around in ends])
        return workers

    def _run_pipelines(
        self,
        workers: Sequence[Sequence[StageWorker]],
        abandoned: threading.Event,
        stop_requested: StopRequested,
    ) -> None:
        """Run all stages, each in a thread, while the processes agree on requests to stop."""
        futures: list[Future[None]] = []
        for row in workers:
            for number, worker in enumerate(row):
                work = work_of(number, len(row), len(worker.micro_batches.rows))
                futures.append(self._pool.submit(_run, worker, work, abandoned))
        try:
            while True:
                done, running = wait(futures, AGREE_SECONDS, FIRST_EXCEPTION)
                if any(future.exception() is not None for future in done):
                    # The error that came first abandons the step, so the other workers end soon.
                    wait(futures)
                    errors = list(filter(None, (future.exception() for future in futures)))
                    # The other errors follow from the first error.
                    raise min(errors, key=lambda e: isinstance(e, StoppedBetweenMicroBatchesError))
                stops, ready = self.group.all_reduce([stop_requested(), not running])
                if stops:
                    raise StoppedBetweenMicroBatchesError
                if ready == self.group.world_size:
                    return
        except BaseException:
            # Also on a second Ctrl-C: running workers would keep the process alive.
            abandoned.set()
            wait(futures)
            raise

    def _on_every_device(self, function: Callable[[DeviceUpdate], Tensor]) -> float:
        """Call a function for all devices at once, whose collectives wait for each other; return a replica's sum."""
        flat = list(chain.from_iterable(self.updates))
        with self.group.collective(), self.reporting_out_of_memory():
            if len(flat) == 1:
                return float(function(flat[0]))
            futures = [self._pool.submit(function, update) for update in flat]
            try:
                for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                    future.result()
            except BaseException:
                # The other devices are blocked in the all-reduce; abort it.
                abort_collectives()
                wait(futures)
                raise
            return math.fsum(float(future.result()) for future in futures[: len(self.updates[0])])


def build_engine(model: Model, mesh: Mesh) -> TensorFlowEngine:
    """Return an engine with new weights."""
    layout = mesh.layout
    replicas = [_build_replica(model, row, layout) for row in mesh.devices]
    make = model.make_optimizer
    optimizer = make and make(list(weights_of(replicas)), random_bits)
    return TensorFlowEngine(replicas, mesh, seed=model.seed, optimizer=optimizer)


def _build_replica(model: Model, devices: Sequence[str], layout: Layout) -> list[Stage]:
    """Return the stages of a replica on its devices."""
    stages: list[Stage] = []
    blocks = model.blocks()
    lengths: Sequence[int | None] = layout.stage_lengths or [None]
    for length, number in zip(lengths, layout.stage_devices, strict=True):
        device = devices[number]
        with tf.device(device):
            of_stage = dict(islice(blocks, length))
        weights = named_weights(of_stage.items())
        body = list(of_stage.values())
        is_last = len(stages) + 1 == len(layout.stage_devices)
        head = cast(Head, body.pop()) if is_last else None
        compiled = layout.compile == "stages" or (layout.compile == "auto" and "GPU" in device)
        stage = Stage(
            body, head, weights, device=device, recomputes=layout.recomputes, compiled=compiled
        )
        stages.append(stage)
    return stages


def weights_of(replicas: Sequence[Sequence[Stage]]) -> Variables:
    """Return the variables of each weight of a model on all replicas, by name."""
    weights: Variables = {}
    for stages in replicas:
        of_replica: dict[str, tf.Variable] = {}
        for stage in stages:
            of_replica |= stage.weights
        for name, variable in of_replica.items():
            weights.setdefault(name, []).append(variable)
    return weights


def _logits(stages: Sequence[Stage], examples: Batch, key: Tensor) -> Tensor:
    """Return the head's logits of examples [B, ...], with a key also dropout."""
    *earlier, last = stages
    hidden: Tensor = None
    for stage in earlier:
        hidden = stage.infer(hidden, stage.columns(examples), key)
    return last.logits(hidden, last.columns(examples), key)


def _run(worker: StageWorker, work: Sequence[Work], abandoned: threading.Event) -> None:
    try:
        worker.run(work, abandoned.is_set)
    except BaseException:
        # The neighbouring stages wait for tensors that will not come.
        abandoned.set()
        raise


def _shapes(batch: Batch) -> tuple[Shape, ...]:
    """Return the shape of each column of a micro-batch."""
    return tuple(column.shape[1:] for _, column in sorted(batch.items()))
