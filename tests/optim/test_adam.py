"""AdamW and LAMB against the papers' formulas, the rules of weights, and random rounding."""

import itertools
import math

import numpy as np
import pytest
import tensorflow as tf

from bert_cli.config.training import OptimizerOpts
from bert_cli.facts.optimizers import OPTIMIZERS
from bert_cli.optim.optimizer import (
    Hyperparameters,
    Optimizer,
    Rule,
    clip_factor,
    round_stochastically,
    weight_rules,
)
from bert_cli.parallel.tensorflow.update import random_bits

LAMB, ADAMW = OPTIMIZERS["LAMB"], OPTIMIZERS["AdamW"]
STEPS = 50
SHAPES = [(), (1,), (2, 3, 4)]
RULES = [Rule(decays, adapts) for decays, adapts in itertools.product([True, False], repeat=2)]
RULES += [Rule(True, True, 0.25)]
NO_DECAY = OptimizerOpts.model_fields["no_weight_decay"].get_default(call_default_factory=True)
EXEMPT = {"no_weight_decay": NO_DECAY}  # of a run without settings of its own


def optimizer_of(**values):
    usual = {"kind": ADAMW, "hyperparameters": Hyperparameters(), "rules": {}, "seed": 3}
    return Optimizer(**usual | values)


def papers_update(x, gradients, rates, numbers, rule):
    """Loshchilov & Hutter 2019, Algorithm 2, lines 5 to 12; with the trust ratio of You et al. 2020, Algorithm 2."""
    m, v = np.zeros_like(x), np.zeros_like(x)
    decay = numbers.weight_decay_rate if rule.decays else 0.0
    for t, (g, eta) in enumerate(zip(gradients, rates, strict=True), start=1):
        m = numbers.beta_1 * m + (1 - numbers.beta_1) * g
        v = numbers.beta_2 * v + (1 - numbers.beta_2) * g**2
        m_hat, v_hat = m / (1 - numbers.beta_1**t), v / (1 - numbers.beta_2**t)
        step = m_hat / (np.sqrt(v_hat) + numbers.epsilon) + decay * x
        size, length = float(np.linalg.norm(x)), float(np.linalg.norm(step))
        ratio = size / length if rule.adapts and size > 0 and length > 0 else 1.0
        x = x - eta * rule.rate * ratio * step
    return x


def our_updates(weights, gradients, rates, numbers, rules, kind=ADAMW):
    """Update several weights under their rules, all in one compiled function, one call a step."""
    optimizer = optimizer_of(hyperparameters=numbers, kind=kind)

    def updated(rule, weight, slots, gradient, step, rate):
        direction, *slots = optimizer.update_direction(rule, weight, gradient, slots, 1.0, step)
        norms = tf.reduce_sum(weight**2), tf.reduce_sum(direction**2)
        return optimizer.apply_update(rule, weight, direction, norms, rate, None), *slots

    @tf.function(jit_compile=True)
    def one_step(state, gradients, step, rate):
        parts = zip(rules, state, gradients, strict=True)
        return [updated(rule, weight, slots, g, step, rate) for rule, (weight, *slots), g in parts]

    starts = [tf.constant(weight, tf.float32) for weight in weights]
    state = [(start, tf.zeros_like(start), tf.zeros_like(start)) for start in starts]
    for step, rate in enumerate(rates):
        now = [tf.constant(gradient[step], tf.float32) for gradient in gradients]
        state = one_step(state, now, tf.constant(step, tf.int64), tf.constant(rate, tf.float32))
    assert {part.dtype for parts in state for part in parts} == {tf.float32}
    return [np.asarray(weight) for weight, _, _ in state]


def draws(shape, seed):
    """A weight, and gradients whose size changes from step to step: float32 numbers, the same for both sides."""
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=shape)
    gradients = [rng.normal(size=shape) * 10.0 ** rng.uniform(-4, 1) for _ in range(STEPS)]
    return [np.asarray(array, np.float32).astype(float) for array in (weight, gradients)]


RATES = [float(np.float32(0.01 * (1 - step / STEPS))) for step in range(STEPS)]


@pytest.mark.parametrize(
    "numbers",
    [
        Hyperparameters(weight_decay_rate=0.1),
        Hyperparameters(beta_1=0.0, beta_2=0.98, epsilon=1e-3, weight_decay_rate=0.0),
    ],
)
def test_fifty_updates_equal_the_papers_formulas(numbers):
    cases = [(*draws((3, 5), 2), rule) for rule in RULES]
    cases += [(*draws(shape, seed), RULES[0]) for seed, shape in enumerate(SHAPES)]
    # A weight of zeros, and gradients of zero, have a trust ratio of 1.
    special = [(np.zeros((3, 4)), draws((3, 4), 3)[1])]
    special += [(start, np.zeros((STEPS, 2, 2))) for start in (np.zeros((2, 2)), np.ones((2, 2)))]
    cases += [(*drawn, rule) for drawn in special for rule in (RULES[0], RULES[2])]
    weights, gradients, rules = zip(*cases, strict=True)
    ours = our_updates(weights, gradients, RATES, numbers, rules)
    for got, (weight, gradients, rule) in zip(ours, cases, strict=True):
        expected = papers_update(weight, gradients, RATES, numbers, rule)
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6, err_msg=str(rule))


def test_fifty_updates_of_stable_adamw_equal_its_formulas_with_debiased_decay_rates():
    """The form in which ModernBERT's authors train: debiased rates, and the clipped rate also scales the decay."""
    numbers = Hyperparameters(beta_2=0.98, weight_decay_rate=0.1)
    x, gradients = draws((3, 5), 2)
    inputs = [x], [gradients], RATES, numbers, [Rule(True, False)]
    (ours,) = our_updates(*inputs, kind=OPTIMIZERS["StableAdamW"])
    m, v, clipped = np.zeros_like(x), np.zeros_like(x), 0
    for step, (g, rate) in enumerate(zip(gradients, RATES, strict=True)):
        betas = numbers.beta_1, numbers.beta_2
        beta_1, beta_2 = (b * (1 - b**step) / (1 - b ** (step + 1)) for b in betas)
        m = beta_1 * m + (1 - beta_1) * g
        v = beta_2 * v + (1 - beta_2) * g**2
        size = np.sqrt(np.mean(g**2 / np.maximum(v, numbers.epsilon**2)))
        clipped += size > 1
        eta = rate / max(1.0, size)
        x = x * (1 - eta * numbers.weight_decay_rate) - eta * m / (np.sqrt(v) + numbers.epsilon)
    assert 10 < clipped < STEPS
    np.testing.assert_allclose(ours, x, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_reads_its_gradient_times_the_factor(name):
    x, gradient = np.random.default_rng(3).normal(0, 3, (2, 4, 6))
    optimizer = optimizer_of(kind=OPTIMIZERS[name])

    def direction(larger):
        weight, g = (tf.constant(array, tf.float32) for array in (x, gradient * larger))
        slots = [tf.fill(weight.shape, 1e-3 * number) for number in (1, 2)]
        return optimizer.update_direction(RULES[0], weight, g, slots, 1.0 / larger, 3)[0].numpy()

    np.testing.assert_allclose(direction(256.0), direction(1.0), rtol=1e-5)


def test_bias_correction_of_the_first_step_is_exact_to_one_rounding():
    numbers = Hyperparameters(epsilon=0.0)
    (new,) = our_updates([np.zeros(1)], [[[3.0]]], [1.0], numbers, [RULES[3]])
    assert new[0] == pytest.approx(-1.0, rel=3e-7)


NAMES = [
    "emb/word/embeddings", "emb/layer_norm/gamma", "hid_0/attention/query/kernel", "hid_1/feed_forward/inner/bias",
    "hid_10/feed_forward/inner/bias", "hid_11/attention/output/layer_norm/beta", "pool/dense/kernel",
    "glue_head/classifier/kernel",
]  # fmt: skip


def test_weights_are_exempt_as_in_the_original_and_unknown_kinds_are_refused():
    # Graphcore's example: no decay of biases and LayerNorm's beta, no LAMB of these and gamma.
    expected = {
        "kernel": Rule(True, True),
        "embeddings": Rule(True, True),
        "gamma": Rule(True, False),
        "bias": Rule(False, False),
        "beta": Rule(False, False),
    }
    rules = weight_rules(NAMES, LAMB, **EXEMPT)
    assert rules == {name: expected[name.rpartition("/")[2]] for name in NAMES}
    adamw = weight_rules(NAMES, ADAMW, **EXEMPT | {"no_weight_decay": ["bias", "beta", "gamma"]})
    decaying = {name.rpartition("/")[2] for name, rule in adamw.items() if rule.decays}
    assert decaying == {"kernel", "embeddings"}
    assert not any(rule.adapts for rule in adamw.values())


def test_layer_decay_falls_from_the_top_layer_to_the_embeddings():
    rules = weight_rules(NAMES, ADAMW, **EXEMPT, layer_decay=0.5)
    powers = [int(np.log2(1 / rule.rate)) for rule in rules.values()]
    assert powers == [13, 13, 12, 11, 2, 1, 0, 0]
    rules = weight_rules(["emb/a/bias", "pool/dense/bias"], LAMB, **EXEMPT, layer_decay=0.5)
    assert [rule.rate for rule in rules.values()] == [0.5, 1.0]
    assert {rule.rate for rule in weight_rules(NAMES, LAMB, **EXEMPT).values()} == {1.0}


def test_clipping_limits_the_norm_of_the_complete_step_and_leaves_smaller_ones():
    assert [clip_factor(25.0, 1.0), clip_factor(0.25, 0.1)] == pytest.approx([0.2, 0.2])
    assert [clip_factor(25.0, most) for most in (5.0, 100.0, math.inf)] == [1.0] * 3
    assert clip_factor(0.0, 1.0) == 1.0


ALL_FLOAT16 = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
NUMBERS = ALL_FLOAT16[np.isfinite(ALL_FLOAT16)]
COMPILED = tf.function(round_stochastically, jit_compile=True)


def rounded(values, bits):
    values, bits = tf.constant(values, tf.float32), tf.constant(bits, tf.uint32)
    compiled, plain = COMPILED(values, bits), round_stochastically(values, bits)
    assert compiled.dtype == plain.dtype == tf.float16
    np.testing.assert_array_equal(compiled, plain)
    return compiled.numpy().astype(np.float32)


def test_random_rounding_keeps_a_number_or_takes_a_neighbour_and_is_exact_on_average():
    for bits in (0, 2**32 - 1):
        np.testing.assert_array_equal(rounded(NUMBERS, np.full(NUMBERS.shape, bits)), NUMBERS)
    rng, numbers = np.random.default_rng(5), np.unique(NUMBERS)
    values = rng.uniform(-1, 1, (2000, 1)) * 10.0 ** rng.uniform(-9, 4.8, (2000, 1))
    values = values.astype(np.float32)
    above = np.searchsorted(numbers, values)
    lower, upper = numbers[above - 1].astype(float), numbers[above].astype(float)
    bits = np.tile(np.arange(256, dtype=np.uint32) << 24, (2000, 1))
    got = rounded(np.repeat(values, 256, axis=1), bits).astype(float)
    assert np.all((got == lower) | (got == upper))
    error = np.abs(got.mean(axis=1, keepdims=True) - values)
    assert np.all(error <= (upper - lower) / 256)
    # It never makes an infinity, and keeps infinities and NaN.
    largest, most = NUMBERS.max(), np.finfo(np.float32).max
    values = np.array([most, -most, largest, np.nextafter(largest, np.inf)], np.float32)
    special = np.array([np.inf, -np.inf, np.nan], np.float32)
    for draw in (0, 2**32 - 1):
        got = rounded(values, np.full(4, draw))
        np.testing.assert_array_equal(got, [largest, -largest, largest, largest])
        np.testing.assert_array_equal(rounded(special, np.full(3, draw)), special)


def test_rounding_at_random_differs_between_weights_and_steps_and_is_exact_on_average():
    optimizer, weight = optimizer_of(random_bits=random_bits), tf.ones(20_000, tf.float16)
    direction = np.linspace(0, 1e-3, 20_000, dtype=np.float32)

    def new(name, step):
        key = optimizer.key(optimizer.weight_id(name), step)
        return optimizer.apply_update(RULES[3], weight, direction, None, 1.0, key)

    complete = new("w", 5)
    np.testing.assert_array_equal(new("w", 5), complete)
    # Float16 numbers below 1 are 5e-4 apart: five standard errors of the mean of so many.
    assert complete.numpy().astype(float).mean() == pytest.approx(0.9995, abs=7e-6)
    assert np.any(new("other", 5) != complete) and np.any(new("w", 6) != complete)
    assert optimizer_of(seed=4).weight_id("w") != optimizer.weight_id("w")
