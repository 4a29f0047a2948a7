"""Runs steps on JAX: a step is one compiled function, a scan over micro-batches and the update of all weights.

The blocks are Keras layers whose weights are arguments. Replicas are an axis of the batch. XLA divides the batch over
the grid of devices, and weights, moments and products by their annotations; the numbers do not depend on the layout.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh as Grid
from jax.sharding import NamedSharding, PartitionSpec

from bert_cli.arrays import Array, Floats32, Shape
from bert_cli.facts.optimizers import MOMENTS
from bert_cli.model.arithmetic.parts import Block
from bert_cli.model.bert.heads import Head
from bert_cli.model.build import named_weights
from bert_cli.parallel.engine import (
    Batch,
    Divisors,
    Engine,
    StepResult,
    Sums,
    Tensor,
    UpdateRequest,
    count,
    scaled_for_accumulation,
)
from bert_cli.parallel.jax.forward import LOOPS, Arrays, ForwardPass
from bert_cli.parallel.jax.mesh import JaxProcessGroup, device_grid
from bert_cli.parallel.jax.state import (
    DividedArray,
    Row,
    State,
    distinct_shards,
    over_replicas,
    place,
    spec_of,
)
from bert_cli.parallel.runtime import Mesh, Model

Numbers = Mapping[str, np.float32 | np.int32]
# State, columns, divisors of the loss, and the numbers of a request.
Arguments = tuple[State, Arrays, Numbers, Numbers]
# A loss, and the totals of `ForwardPass.with_totals`.
LossAndTotals = tuple[jax.Array, Arrays]
COMPLETE = PartitionSpec()


class JaxEngine(Engine):
    """A model on a grid of devices, and its optimizer."""

    def __init__(self, blocks: Mapping[str, Block], mesh: Mesh, grid: Grid, model: Model) -> None:
        """The last of the blocks, which `model` has built, is the head; `grid` has the devices of the mesh."""
        *body, head = blocks.values()
        self.head = cast(Head, head)
        self.reads = set(chain.from_iterable(block.READS for block in blocks.values()))
        self.seed = model.seed
        variables = named_weights(blocks.items())
        make = model.make_optimizer
        self.optimizer = make and make(list(variables), random_bits)
        layout = mesh.layout
        self.layout = layout
        self.group = JaxProcessGroup(mesh)
        self.grid = grid
        rows = slice(mesh.first_replica, mesh.first_replica + len(mesh.devices))
        self.local_grid = Grid(self.grid.devices[rows], self.grid.axis_names)
        recomputes = layout.recomputes
        loops = recomputes or LOOPS[mesh.kind]
        self.specs = {n: spec_of(n, weight.shape, self.grid) for n, weight in variables.items()}
        """The division of a weight where it is read."""
        self.forward_pass = ForwardPass(body, self.head, self.grid, self.specs, recomputes, loops)
        stacks = self.forward_pass.stacks
        self.rows = {name: Row(name) for name in variables}
        """Where the state has each weight."""
        for first, names in stacks.items():
            self.rows |= {name: Row(first, number) for number, name in enumerate(names)}
        self.names = {row.key: stacks.get(row.key, [row.key]) for row in self.rows.values()}
        """The weights of each entry of the state."""
        self.shardings: dict[str, list[NamedSharding]] = {}
        """How an entry and its slots are stored."""
        self.update_shardings: dict[str, NamedSharding] = {}
        """How its update is computed."""
        self.state: State = {}
        shards_moments = layout.shard_weights or layout.shard_moments
        moments = len(MOMENTS) if self.optimizer is not None else 0
        for key, names in self.names.items():
            values = [variables[name].value for name in names]
            shape = tuple(values[0].shape)
            spec = self.specs[key]
            divided = self._sharding(key, over_replicas(spec, shape, self.grid))
            # Three ways to divide an entry: complete, the slots over the replicas, or the weight too (ZeRO 1 and 3).
            complete = self._sharding(key, spec)
            stored = divided if layout.shard_weights else complete
            updated = self.update_shardings[key] = divided if shards_moments else complete
            self.shardings[key] = [stored] + [updated] * moments
            zeros = [np.zeros(shape, np.float32)] * len(names)
            self.state[key] = [
                self._place(rows, sharding, is_stacked=key in stacks)
                for rows, sharding in zip(
                    [values] + [zeros] * moments, self.shardings[key], strict=True
                )
            ]
        self.programs: dict[tuple[Shape, ...], jax.stages.Compiled] = {}
        """The compiled step for the shapes of each batch."""
        self._local: Arrays | None = None
        self._run = jax.jit(self._run_once)
        self.by_replicas = NamedSharding(self.grid, PartitionSpec(None, "replica"))
        """The division of columns and sums, [accumulation, replicas, ...]."""
        self._forward = jax.jit(self._run_forward, out_shardings=self.by_replicas)
        self._array = partial(DividedArray, self.state, self._gathered)
        self.weights = {name: self._array(row, 0) for name, row in self.rows.items()}

    # --- values, which the engine of scripts/compile_for.py for absent devices replaces

    def _place(
        self, rows: Sequence[Array], sharding: NamedSharding, *, is_stacked: bool
    ) -> jax.Array:
        """Return an entry of the state: its only value, or all values as rows."""
        if is_stacked:
            return place(np.stack(rows), sharding)
        return place(np.asarray(rows[0]), sharding)

    def _place_part(self, rows: Array, sharding: NamedSharding) -> jax.Array:
        return jax.make_array_from_process_local_data(sharding, rows)

    @property
    def slots(self) -> dict[str, DividedArray]:
        """The slots of the optimizer for each weight, by their names in a checkpoint."""
        slots = {}
        for name, row in self.rows.items():
            for part, slot in enumerate(MOMENTS, 1):
                slots[f"{name}/{slot}"] = self._array(row, part)
        return slots

    def _sharding(self, key: str, spec: PartitionSpec) -> NamedSharding:
        """Return the sharding of an entry of the state from the division of each weight."""
        return NamedSharding(self.grid, self.forward_pass.stacked_spec(key, spec))

    def _gathered(self, arrays: Tensor, specs: Tensor = COMPLETE) -> Tensor:
        """Return arrays with another division, or complete; all processes must call this method."""
        to = jax.tree.map(partial(NamedSharding, self.grid), specs)
        with self.group.collective():
            return jax.block_until_ready(jax.jit(_identity, out_shardings=to)(arrays))

    # --- one step

    def compile(self, batch: Batch) -> None:
        """Compile the step for the shape of a batch of one micro-batch for each local replica."""
        counts = count(batch, self.head.COUNTS)
        batch = {
            name: np.repeat(column, self.layout.accumulation, 0) for name, column in batch.items()
        }
        self._program(self._arguments(batch, UpdateRequest(), counts))

    def _run_step(self, batch: Batch, request: UpdateRequest, divisors: Divisors) -> StepResult:
        """Run the compiled step; a request to stop takes effect after its end."""
        arguments = self._arguments(batch, request, divisors)
        program = self._program(arguments)
        self._local = None
        # Not `collective()`: the step is computing, and does not wait for another rank.
        naming = self.group.naming_lost_process()
        with self.record("forward_backward"), naming, self.reporting_out_of_memory():
            state, sums, squared, weight_squared = program(*arguments)
            norms = float(squared), float(weight_squared)
        self.state.update(state)
        # Added exactly and rounded once, so that the order of the micro-batches does not matter.
        local = {}
        for name, rows in sums.items():
            numbers = [np.asarray(shard.data).ravel() for shard in distinct_shards(rows)]
            local[name] = math.fsum(map(float, chain.from_iterable(numbers)))
        return StepResult(local, *norms)

    def _arguments(self, batch: Batch, request: UpdateRequest, divisors: Divisors) -> Arguments:
        """Return the arguments of the compiled step."""
        replicas = len(self.local_grid.devices)
        first = self.first_index(batch, request)
        local = {name: column for name, column in batch.items() if name in self.reads}
        # The sample index of each micro-batch, from which its dropout follows.
        local["index"] = (first + np.arange(len(batch["input_ids"]))) % 2**31
        columns: Arrays = {}
        for name, column in local.items():
            # A replica has consecutive micro-batches: [M, B, ...] -> [accumulation, replicas, B, ...].
            rows = column.reshape(replicas, -1, *column.shape[1:]).swapaxes(0, 1)
            rows = rows.astype(jax.dtypes.canonicalize_dtype(rows.dtype))
            columns[name] = self._place_part(rows, self.by_replicas)
        numbers: Numbers = {
            "scale": np.float32(scaled_for_accumulation(request.loss_scale, request.micro_batches)),
            "max_norm": np.float32(request.max_gradient_norm or math.inf),
            "rate": np.float32(request.learning_rate),
            "updates": np.int32(request.updates),
            "step": np.int32(request.step),
        }
        counts: Numbers = {name: np.float32(number) for name, number in divisors.items()}
        return self.state, columns, counts, numbers

    def _program(self, arguments: Arguments) -> jax.stages.Compiled:
        """Return the compiled step for arguments of these shapes."""
        shapes = tuple(column.shape for column in arguments[1].values())
        if shapes not in self.programs:
            with self.reporting_out_of_memory():
                self.programs[shapes] = self.lowered_step(arguments).compile()
        return self.programs[shapes]

    def lowered_step(self, arguments: Arguments) -> jax.stages.Lowered:
        """Return the step for arguments of these shapes, traced and not compiled."""
        complete = NamedSharding(self.grid, COMPLETE)
        # The state is donated: its memory is used for the new state, or a step would need both.
        results = self.shardings, self.by_replicas, complete, complete
        step = jax.jit(self._compute, donate_argnums=0, out_shardings=results)
        with jax.set_mesh(self.grid):
            return step.lower(*arguments)

    def _compute(
        self, state: State, columns: Arrays, counts: Arrays, numbers: Arrays
    ) -> tuple[State, Arrays, jax.Array, jax.Array]:
        """Return the new state, sums [accumulation, replicas], and the squared norms of gradient and weights."""
        weights = {name: parts[0] for name, parts in state.items()}
        gradients, sums = self._accumulate(weights, columns, counts, numbers["scale"])
        squared = _squared_norm(gradients.values()) / numbers["scale"] ** 2
        # The same arithmetic as `clip_factor`, but on the device: the host would have to wait for the norm.
        norm = jnp.sqrt(squared)
        max_norm = numbers["max_norm"]
        factor = jnp.where(norm <= max_norm, 1.0, max_norm / norm) / numbers["scale"]
        new = {}
        for name, parts in state.items():
            updated = self._updated(name, parts, gradients[name], factor, numbers)
            # A step with a gradient that is not finite keeps all values, also the moments.
            pairs = zip(updated, parts, strict=True)
            new[name] = [jnp.where(jnp.isfinite(squared), *pair) for pair in pairs]
        return new, sums, squared, _squared_norm(parts[0] for parts in new.values())

    def _updated(
        self,
        key: str,
        parts: list[jax.Array],
        gradient: jax.Array,
        factor: jax.Array,
        numbers: Arrays,
    ) -> list[jax.Array]:
        """Return the new weight and slots of an entry, [...] or [rounds, ...] with each row updated separately."""
        assert self.optimizer is not None
        optimizer = self.optimizer
        names = self.names[key]
        rules = [optimizer.rules[name] for name in names]
        # The rows of an entry differ only in their rates.
        (rule,) = {replace(rule, rate=1.0) for rule in rules}

        def update(
            parts: list[jax.Array], gradient: jax.Array, weight_id: jax.Array, rate: jax.Array
        ) -> list[jax.Array]:
            weight, *slots = parts
            direction, *new_slots = optimizer.update_direction(
                rule, weight, gradient, slots, factor, numbers["updates"]
            )
            squares = _squared_norm([weight]), _squared_norm([direction])
            random_key = optimizer.key(weight_id, numbers["step"])
            new = optimizer.apply_update(rule, weight, direction, squares, rate, random_key)
            return [new, *new_slots]

        # Stacked rows keep the ids of their own weights, so stochastic rounding does not depend on the layout.
        ids = jnp.array([optimizer.weight_id(name) for name in names], jnp.int32)
        rates = np.array([rule.rate for rule in rules], np.float32)
        if key in self.forward_pass.stacks:
            return jax.vmap(update)(parts, gradient, ids, numbers["rate"] * rates)
        return update(parts, gradient, ids[0], numbers["rate"] * rates[0])

    def _accumulate(
        self, weights: Arrays, columns: Arrays, counts: Arrays, scale: jax.Array
    ) -> tuple[Arrays, Arrays]:
        """Return the gradients of the loss times `scale` over all micro-batches, and the head's sums of each."""
        in_replicas = partial(jax.vmap, spmd_axis_name="replica")
        is_sharded = self.layout.shard_weights
        replicas = self.grid.shape["replica"]

        def loss_of(totals: Arrays, columns: Arrays) -> tuple[LossAndTotals, Arrays]:
            key = jnp.stack([jnp.int32(self.seed), columns["index"]])
            (loss, sums), totals = self.forward_pass.with_totals(
                weights, totals, columns, key, counts
            )
            return (loss * scale, totals), sums

        def loss_of_all(totals: Arrays, columns: Arrays) -> tuple[LossAndTotals, Arrays]:
            axes = ((0, None), 0)
            (losses, totals), sums = in_replicas(partial(loss_of, totals), out_axes=axes)(columns)
            return (losses.sum(), totals), sums

        loss = loss_of_all if is_sharded else loss_of
        add = partial(_add_gradients, loss)
        if not is_sharded:
            add = in_replicas(add)
        # Where weights are complete, each replica adds up its own gradients: one all-reduce a step.
        totals = {}
        weights = self.forward_pass.prepare(weights)
        for name, weight in weights.items():
            spec = self.shardings[name][0].spec
            shape = weight.shape
            if is_sharded:
                weights[name] = lax.with_sharding_constraint(weight, spec)
            else:
                spec = PartitionSpec("replica", *spec)
                shape = (replicas, *shape)
            totals[name] = lax.with_sharding_constraint(jnp.zeros(shape, jnp.float32), spec)
        totals, sums = lax.scan(add, totals, columns)
        # From here on divided like the update.
        for name, total in totals.items():
            if not is_sharded:
                total = total.sum(0)
            totals[name] = lax.with_sharding_constraint(total, self.update_shardings[name])
        return totals, sums

    def forward(self, batch: Batch, request: UpdateRequest) -> Floats32:
        """Return the logits of the micro-batches [M, ...], of all replicas at once."""
        state, columns, _, _ = self._arguments(batch, request, {})
        weights = {name: parts[0] for name, parts in state.items()}
        naming = self.group.naming_lost_process()
        with jax.set_mesh(self.grid), naming, self.reporting_out_of_memory():
            logits = jax.block_until_ready(self._forward(weights, columns))
        # [accumulation, replicas, ...]; this process has some of the replicas.
        shards = sorted(distinct_shards(logits), key=lambda shard: shard.index[1].start or 0)
        local = np.concatenate([shard.data for shard in shards], axis=1).swapaxes(0, 1)
        return local.reshape(-1, *local.shape[2:])

    def _run_once(
        self, weights: Arrays, columns: Arrays, key: Tensor, counts: Arrays | None
    ) -> Tensor:
        return self.forward_pass(self.forward_pass.prepare(weights), columns, key, counts)

    def _run_forward(self, weights: Arrays, columns: Arrays) -> jax.Array:
        def logits_of(columns: Arrays) -> jax.Array:
            key = jnp.stack([jnp.int32(self.seed), columns["index"]])
            return self.forward_pass(weights, columns, key)

        weights = self.forward_pass.prepare(weights)
        return lax.map(jax.vmap(logits_of, spmd_axis_name="replica"), columns)

    # --- evaluation and prediction

    def gather_weights(self) -> None:
        """Make the weights complete on this process' devices."""
        if self.group.world_size == 1:
            return
        weights = {name: parts[0] for name, parts in self.state.items()}
        specs = {name: self.forward_pass.stacked_spec(name, self.specs[name]) for name in weights}
        self._local = {
            name: jax.make_array_from_single_device_arrays(
                array.shape,
                NamedSharding(self.local_grid, specs[name]),
                [shard.data for shard in array.addressable_shards],
            )
            for name, array in self._gathered(weights, specs).items()
        }

    def evaluate(self, micro_batch: Batch) -> Sums:
        """Return the head's sums for examples [B, ...]."""
        ones = {name: np.float32(1.0) for name in ("examples", *self.head.COUNTS)}
        _, sums = self._infer(micro_batch, ones)
        return {name: float(number) for name, number in sums.items()}

    def predict(self, examples: Batch) -> Any:
        """Return the head's logits for examples [B, ...]."""
        return jax.tree.map(np.asarray, self._infer(examples, None))

    def _is_out_of_memory(self, error: Exception) -> bool:
        return "RESOURCE_EXHAUSTED" in str(error) and isinstance(error, jax.errors.JaxRuntimeError)

    def _infer(self, batch: Batch, counts: Numbers | None) -> Tensor:
        weights = self._local or {name: parts[0] for name, parts in self.state.items()}
        grid = self.local_grid
        # A last batch that the replicas do not divide runs complete on each of them.
        axis = None
        if len(batch["input_ids"]) % grid.shape["replica"] == 0:
            axis = "replica"
        columns = {n: np.asarray(column) for n, column in batch.items() if n in self.reads}
        placed = jax.device_put(columns, NamedSharding(grid, PartitionSpec(axis)))
        with jax.set_mesh(grid), self.reporting_out_of_memory():
            return jax.block_until_ready(self._run(weights, placed, None, counts))


def build_engine(model: Model, mesh: Mesh) -> JaxEngine:
    """Return an engine with new weights."""
    # Initial weights are made in host memory: an accelerator may have room for its part alone.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return JaxEngine(dict(model.blocks()), mesh, device_grid(mesh), model)


def _add_gradients(
    loss_of: Callable[[Arrays, Arrays], tuple[LossAndTotals, Arrays]],
    totals: Arrays,
    columns: Arrays,
) -> tuple[Arrays, Arrays]:
    """Return totals plus the gradients of the loss, and the head's sums."""
    (loss, totals), backward, sums = jax.vjp(lambda t: loss_of(t, columns), totals, has_aux=True)
    # The totals pass through the forward pass unchanged. As cotangents they enter the backward pass, which adds to
    # them in place, and never makes an array of the gradients of all layers.
    (totals,) = backward((jnp.ones_like(loss), totals))
    return totals, sums


def _identity(arrays: Tensor) -> Tensor:
    """Return the argument. A single function for all arrays, so that it is compiled once for each shape."""
    return arrays


def _squared_norm(arrays: Iterable[jax.Array]) -> jax.Array:
    return sum((jnp.sum(jnp.square(array.astype(jnp.float32))) for array in arrays), jnp.float32(0))


def random_bits(key: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Return the uniform uint32 of a key, in a shape."""
    return jax.random.bits(jax.random.fold_in(jax.random.key(key[0]), key[1]), shape, jnp.uint32)
