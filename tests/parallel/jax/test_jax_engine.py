"""What a step on JAX is given, and the keys of its random bits: functions of the run's seed, step and rank."""

from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from bert_cli.parallel.jax.engine import random_bits
from bert_cli.parallel.jax.state import over_replicas


def test_random_bits_differ_between_weights_and_between_steps():
    keys = ([5, 1], [5, 2], [6, 1], [1, 5], [5, 1])
    *others, again = (tuple(random_bits(jnp.array(key), (64,)).tolist()) for key in keys)
    assert len({*others}) == 4 and again == others[0]


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
