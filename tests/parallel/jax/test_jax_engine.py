"""What a step on JAX is given, and the keys of its random bits: functions of the run's seed, step and rank."""

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh as Grid
from jax.sharding import NamedSharding, PartitionSpec

from bert_cli.optim.optimizer import Rule
from bert_cli.parallel.jax.engine import JaxEngine, random_bits
from bert_cli.parallel.jax.forward import ForwardPass
from bert_cli.parallel.jax.mesh import AXES
from bert_cli.parallel.jax.state import over_replicas
from bert_cli.parallel.runtime import Layout


@pytest.fixture
def grid():
    return Grid(np.array(jax.devices()[:1]).reshape(1, 1, 1), AXES)


def test_random_bits_differ_between_weights_and_between_steps():
    keys = ([5, 1], [5, 2], [6, 1], [1, 5], [5, 1])
    *others, again = (tuple(random_bits(jnp.array(key), (64,), 0).tolist()) for key in keys)
    assert len({*others}) == 4 and again == others[0]


def test_the_key_of_an_update_is_the_weight_and_the_step_of_the_run():
    """Not the number of updates, which stands still while steps are skipped."""
    keys = []
    weight = jnp.ones(3)

    def apply_update(rule, start, weight, direction, squares, rate, key):
        keys.append(key)
        return weight

    optimizer = SimpleNamespace(
        rules={"a": Rule(False, False)},
        update_direction=lambda rule, w, g, slots, factor, updates: (g, *slots),
        apply_update=apply_update,
        weight_id={"a": 41}.get,
        key=lambda weight_id, step: (int(weight_id), int(step)),
    )
    engine = SimpleNamespace(optimizer=optimizer, names={"a": ["a"]})
    engine.forward_pass = SimpleNamespace(stacks={})
    for step in (7, 8):
        numbers = {"rate": 0.1, "updates": 3, "step": step}
        JaxEngine._updated(engine, "a", [weight] * 3, jnp.ones(3), jnp.ones(()), numbers)
    assert keys == [(41, 7), (41, 8)]


def test_gradients_of_float16_are_added_in_float32(grid):
    """4,096 + 1 is 4,096 in float16."""
    complete = NamedSharding(grid, PartitionSpec())

    class OfOneWeight(ForwardPass):
        @contextmanager
        def _reading(self, block, part):
            (block.weight,) = part
            yield

    class Sum:
        weights = (SimpleNamespace(path="a"),)

        def __call__(self, hidden, columns, counts, key):
            return (self.weight.astype(jnp.float32) * columns["sizes"]).sum(), {}

    engine = SimpleNamespace(grid=grid, seed=1, layout=Layout())
    engine.shardings, engine.update_shardings = {"a": [complete]}, {"a": complete}
    engine.forward_pass = OfOneWeight([], Sum(), grid, {}, recomputes=False, loops=False)
    columns = {"sizes": jnp.array([[4096.0], [1.0]]), "index": jnp.array([[0], [1]])}
    with jax.set_mesh(grid):
        accumulate = jax.jit(partial(JaxEngine._accumulate, engine))
        totals, _ = accumulate({"a": jnp.ones(2, jnp.float16)}, columns, {}, jnp.float32(1.0))
    assert totals["a"].tolist() == [4097.0] * 2


@pytest.mark.parametrize(
    ("spec", "shape", "divided"),
    [
        ((), (4, 6), (None, "replica")),
        ((None, "tensor"), (4, 6), ("replica", "tensor")),
        ((), (4, 7), ("replica", None)),
    ],
)
def test_replicas_divide_the_longest_axis_that_they_can(spec, shape, divided):
    grid = SimpleNamespace(shape={"replica": 2})
    assert over_replicas(PartitionSpec(*spec), shape, grid) == PartitionSpec(*divided)
