"""What a step on JAX is given, and the keys of its random bits: functions of the run's seed, step and rank."""

import jax.numpy as jnp

from bert_cli.parallel.jax.engine import random_bits


def test_random_bits_differ_between_weights_and_between_steps():
    keys = ([5, 1], [5, 2], [6, 1], [1, 5], [5, 1])
    *others, again = (tuple(random_bits(jnp.array(key), (64,)).tolist()) for key in keys)
    assert len({*others}) == 4 and again == others[0]
