"""AdamW and LAMB against the papers' formulas, and rounding at random against its average."""

import itertools
import math
import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

tf = pytest.importorskip("tensorflow")

from bert_cli.errors import ConfigError  # noqa: E402
from bert_cli.optim.adam import (  # noqa: E402
    Adam,
    Rule,
    assign,
    clip_factor,
    patterns,
    round_stochastically,
)
from bert_cli.optim.optimizer import Optimizer, squared_norm  # noqa: E402

Floats = npt.NDArray[np.float64]
STEPS = 50
SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 4)]
RULES = [Rule(decays, adapts) for decays, adapts in itertools.product([True, False], repeat=2)]
NAMES = [
    "emb/word/embeddings",
    "emb/layer_norm/gamma",
    "emb/layer_norm/beta",
    "hid_0/attention/query/kernel",
    "hid_0/attention/query/bias",
    "heads/mlm/bias",
]


def update(w, g, m, v, step, rate, *, adam, rule):
    """Both halves of an update on a float32 copy of the weight: new weight and moments."""
    optimizer = Optimizer(numbers=adam, rules={"w": rule}, seed=0)
    along, m, v = optimizer.along(rule, w, g, m, v, 1.0, step)
    wide = tf.cast(w, tf.float32)
    squared = squared_norm([wide]), squared_norm([along])
    key = optimizer.key(optimizer.number("w"), 0)
    return optimizer.moved(rule, 0, wide, along, squared, rate, key), m, v


def papers_adamw(
    x: Floats, gradients: list[Floats], rates: list[float], adam: Adam, decays: bool
) -> Floats:
    """Loshchilov & Hutter 2019, Algorithm 2, lines 5 to 12, alpha = 1 and eta the rate."""
    m, v = np.zeros_like(x), np.zeros_like(x)
    decay = adam.weight_decay_rate if decays else 0.0
    for t, (g, eta) in enumerate(zip(gradients, rates, strict=True), start=1):
        m = adam.beta_1 * m + (1 - adam.beta_1) * g
        v = adam.beta_2 * v + (1 - adam.beta_2) * g**2
        m_hat = m / (1 - adam.beta_1**t)
        v_hat = v / (1 - adam.beta_2**t)
        x = x - eta * (m_hat / (np.sqrt(v_hat) + adam.epsilon) + decay * x)
    return x


def papers_lamb(
    x: Floats, gradients: list[Floats], rates: list[float], adam: Adam, decays: bool
) -> Floats:
    """You et al. 2020, Algorithm 2, one layer, phi(z) = z."""
    m, v = np.zeros_like(x), np.zeros_like(x)
    decay = adam.weight_decay_rate if decays else 0.0
    for t, (g, eta) in enumerate(zip(gradients, rates, strict=True), start=1):
        m = adam.beta_1 * m + (1 - adam.beta_1) * g
        v = adam.beta_2 * v + (1 - adam.beta_2) * g**2
        r = (m / (1 - adam.beta_1**t)) / (np.sqrt(v / (1 - adam.beta_2**t)) + adam.epsilon)
        step = r + decay * x
        size, length = float(np.linalg.norm(x)), float(np.linalg.norm(step))
        x = x - eta * (size / length if size > 0 and length > 0 else 1.0) * step
    return x


PAPERS = {False: papers_adamw, True: papers_lamb}


def run_ours(
    weight: npt.NDArray[np.generic],
    gradients: list[Floats],
    rates: list[float],
    adam: Adam,
    rule: Rule,
) -> npt.NDArray[np.float32]:
    """Take all updates in one compiled function, the float32 weight carried on."""

    @tf.function(jit_compile=True)
    def one(w: object, g: object, m: object, v: object, step: object, rate: object) -> object:
        return update(w, g, m, v, step, rate, adam=adam, rule=rule)

    w = tf.constant(weight)
    m = v = tf.zeros(weight.shape, tf.float32)
    for step, (g, rate) in enumerate(zip(gradients, rates, strict=True)):
        w, m, v = one(
            w,
            tf.constant(g, tf.float32),
            m,
            v,
            tf.constant(step, tf.int64),
            tf.constant(rate, tf.float32),
        )
    assert w.dtype == m.dtype == v.dtype == tf.float32
    return np.asarray(w)


def draws(shape: tuple[int, ...], seed: int) -> tuple[Floats, list[Floats], list[float]]:
    """A weight, gradients whose size changes from step to step, and changing learning rates.

    All are float32 numbers, so that both sides start from the very same ones.
    """
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=shape).astype(np.float32).astype(np.float64)
    gradients = [
        np.asarray(rng.normal(size=shape) * 10.0 ** rng.uniform(-4, 1), np.float32).astype(float)
        for _ in range(STEPS)
    ]
    rates = [float(np.float32(0.01 * (1 - step / STEPS))) for step in range(STEPS)]
    return np.asarray(weight), gradients, rates


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fifty_updates_equal_the_papers_formulas(shape: tuple[int, ...], rule: Rule) -> None:
    weight, gradients, rates = draws(shape, seed=len(shape))
    adam = Adam(weight_decay_rate=0.1)
    expected = PAPERS[rule.adapts](weight, gradients, rates, adam, rule.decays)
    got = run_ours(weight.astype(np.float32), gradients, rates, adam, rule)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)
    assert not np.allclose(got, weight, atol=1e-3), "the weights hardly moved"


@pytest.mark.parametrize("beta_1", [0.0, 0.5])
def test_other_betas_and_epsilon_equal_the_formulas_too(beta_1: float) -> None:
    weight, gradients, rates = draws((4, 6), seed=9)
    adam = Adam(beta_1=beta_1, beta_2=0.98, epsilon=1e-3, weight_decay_rate=0.0)
    for rule in RULES:
        expected = PAPERS[rule.adapts](weight, gradients, rates, adam, rule.decays)
        got = run_ours(weight.astype(np.float32), gradients, rates, adam, rule)
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_weight_of_zeros_moves_with_a_trust_ratio_of_one(rule: Rule) -> None:
    _, gradients, rates = draws((3, 4), seed=3)
    zeros = np.zeros((3, 4))
    expected = PAPERS[rule.adapts](zeros, gradients, rates, Adam(), rule.decays)
    got = run_ours(zeros.astype(np.float32), gradients, rates, Adam(), rule)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)
    first = run_ours(zeros.astype(np.float32), gradients[:1], rates[:1], Adam(), rule)
    np.testing.assert_allclose(np.abs(first), rates[0], rtol=0.01)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_gradients_of_zero_leave_finite_weights(rule: Rule) -> None:
    nothing = [np.zeros((2, 2)) for _ in range(3)]
    for start in (np.zeros((2, 2)), np.ones((2, 2))):
        expected = PAPERS[rule.adapts](start, nothing, [0.1] * 3, Adam(), rule.decays)
        got = run_ours(start.astype(np.float32), nothing, [0.1] * 3, Adam(), rule)
        np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adamw_equals_that_of_pytorch(decay: float) -> None:
    torch = pytest.importorskip("torch")
    weight, gradients, rates = draws((5, 8), seed=1)
    theirs = torch.nn.Parameter(torch.tensor(weight, dtype=torch.float32))
    optimizer = torch.optim.AdamW([theirs], betas=(0.9, 0.999), eps=1e-6, weight_decay=decay)
    for g, rate in zip(gradients, rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        theirs.grad = torch.tensor(g, dtype=torch.float32)
        optimizer.step()
    adam = Adam(weight_decay_rate=decay)
    ours = run_ours(weight.astype(np.float32), gradients, rates, adam, Rule(True, False))
    np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_sixteen_bit_weights_are_updated_in_float32(dtype: npt.DTypeLike) -> None:
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(4, 4)).astype(dtype)
    gradient = rng.normal(size=(4, 4)).astype(dtype)
    zeros = tf.zeros((4, 4), tf.float32)
    rule, adam = Rule(True, True), Adam()
    new, m, v = update(
        tf.constant(weight), tf.constant(gradient), zeros, zeros, 0, 1e-5, adam=adam, rule=rule
    )
    assert new.dtype == m.dtype == v.dtype == tf.float32
    wide = weight.astype(np.float64)
    expected = papers_lamb(wide, [gradient.astype(np.float64)], [1e-5], adam, True)
    np.testing.assert_allclose(np.asarray(new) - wide, expected - wide, rtol=0.02)
    assert np.any(new.numpy() != new.numpy().astype(dtype)), "the update was lost in 16 bits"


def test_bias_correction_of_the_first_step_is_exact_to_one_rounding() -> None:
    gradient = tf.constant([3.0])
    zeros = tf.zeros((1,), tf.float32)
    adam = Adam(epsilon=0.0)
    new, _, _ = update(zeros, gradient, zeros, zeros, 0, 1.0, adam=adam, rule=Rule(False, False))
    assert new.numpy()[0] == pytest.approx(-1.0, rel=3e-7)


def test_every_weight_gets_one_rule_as_the_original_has_it() -> None:
    rules = assign(NAMES, patterns("LAMB"))
    assert list(rules) == NAMES
    assert rules["emb/word/embeddings"] == Rule(decays=True, adapts=True)
    assert rules["hid_0/attention/query/kernel"] == Rule(decays=True, adapts=True)
    assert rules["emb/layer_norm/gamma"] == Rule(decays=True, adapts=False)
    assert rules["emb/layer_norm/beta"] == Rule(decays=False, adapts=False)
    assert rules["hid_0/attention/query/bias"] == Rule(decays=False, adapts=False)
    assert rules["heads/mlm/bias"] == Rule(decays=False, adapts=False)


def test_googles_choice_and_adamw_are_other_tables() -> None:
    google = assign(NAMES, patterns("AdamW", no_weight_decay=("bias", "beta", "gamma")))
    assert [name for name, rule in google.items() if rule.decays] == [
        "emb/word/embeddings",
        "hid_0/attention/query/kernel",
    ]
    assert not any(rule.adapts for rule in google.values())
    everything = assign(NAMES, patterns("LAMB", no_weight_decay=(), no_layer_adaptation=()))
    assert set(everything.values()) == {Rule(decays=True, adapts=True)}


def test_weights_that_match_no_pattern_or_two_are_all_named() -> None:
    table = {**patterns("LAMB"), "heads/.*": Rule(False, False)}
    with pytest.raises(ConfigError) as error:
        assign([*NAMES, "emb/word/scale", "kernels"], table)
    for words in ("emb/word/scale (matches nothing)", "kernels (matches nothing)"):
        assert words in str(error.value)
    assert "heads/mlm/bias (matches (.*/)?bias and heads/.*)" in str(error.value)
    assert "emb/word/embeddings" not in str(error.value)


def test_settings_that_name_no_kind_of_weight_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no_weight_decay \(gama\).*did you mean 'gamma'"):
        patterns("LAMB", no_weight_decay=["bias", "gama"])
    with pytest.raises(ConfigError, match=r"no_layer_adaptation \(LayerNorm\)"):
        patterns("LAMB", no_layer_adaptation=["LayerNorm"])
    with pytest.raises(ConfigError, match=r"name \(Lamb\)"):
        patterns("Lamb")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_squared_norm_of_millions_of_elements_is_right_to_float32(dtype: str) -> None:
    tensor = tf.cast(tf.random.stateless_normal([3000, 768], [1, 2]) + 1.0, dtype)
    exact = np.sum(tensor.numpy().astype(np.float64) ** 2)
    assert float(squared_norm([tensor, tensor])) == pytest.approx(2 * exact, rel=3e-7)


def test_clipping_scales_the_whole_step_to_the_norm_and_leaves_small_ones() -> None:
    gradients = [tf.constant([3.0, 0.0]), tf.constant([[4.0]], tf.float16)]
    squared = squared_norm(gradients)
    assert squared.dtype == tf.float32
    assert float(squared) == pytest.approx(25.0)
    assert clip_factor(float(squared), 1.0) == pytest.approx(0.2)
    assert clip_factor(float(squared), 5.0) == 1.0
    assert clip_factor(float(squared), 100.0) == 1.0
    assert clip_factor(float(squared), math.inf) == 1.0
    assert clip_factor(float(squared_norm([])), 1.0) == 1.0


FORMATS = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def all_numbers(dtype: str) -> npt.NDArray[np.float32]:
    every = np.arange(2**16, dtype=np.uint16).view(FORMATS[dtype]).astype(np.float32)
    return every[np.isfinite(every)]


def random_bits(shape: tuple[int, ...], seed: int = 0) -> npt.NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 2**32, shape, dtype=np.uint32)


COMPILED = tf.function(round_stochastically, jit_compile=True)


def rounded(
    values: npt.NDArray[np.float32], bits: npt.NDArray[np.uint32], dtype: str
) -> npt.NDArray[np.float32]:
    """Round in a compiled function; back to float32, which holds both formats."""
    out = COMPILED(tf.constant(values), tf.constant(bits), dtype)
    plain = round_stochastically(tf.constant(values), tf.constant(bits), dtype)
    assert out.dtype == dtype
    ours = out.numpy().astype(np.float32)
    np.testing.assert_array_equal(ours, plain.numpy().astype(np.float32))
    return ours


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("draw", [0, 2**32 - 1, None])
def test_every_number_of_the_format_is_kept_whatever_the_bits(dtype: str, draw: int | None) -> None:
    numbers = all_numbers(dtype)
    # Below 2**-126 TensorFlow's threads flush to zero, so such bfloat16 numbers cannot be kept.
    numbers = numbers[(numbers == 0) | (np.abs(numbers) >= 2.0**-126)]
    full = random_bits(numbers.shape)
    bits = full if draw is None else np.full_like(full, draw)
    np.testing.assert_array_equal(rounded(numbers, bits, dtype), numbers)


@pytest.mark.parametrize("dtype", FORMATS)
def test_rounding_at_random_gives_one_of_the_two_neighbours(dtype: str) -> None:
    rng = np.random.default_rng(5)
    small = rng.normal(size=20_000) * 10.0 ** rng.uniform(-9, 4, size=20_000)
    values = small.astype(np.float32)
    got = rounded(values, random_bits(values.shape), dtype)
    numbers = np.unique(all_numbers(dtype))
    above = np.searchsorted(numbers, values, side="left")
    up, down = numbers[np.minimum(above, numbers.size - 1)], numbers[above - 1]
    assert np.all((got == up) | (got == down))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(
    "value", [1.0 + 2.0**-12, -1.0 - 2.0**-9 * 0.7, 3.1e-5, 2.0**-24 * 0.3, -5e-6, 1000.3, 0.99999]
)
def test_rounding_at_random_is_right_on_average(dtype: str, value: float) -> None:
    count = 200_000
    values = np.full(count, value, np.float32)
    got = rounded(values, random_bits(values.shape, seed=7), dtype).astype(np.float64)
    spread = got.max() - got.min()
    # Standard error of a coin's mean is at most half its spread / sqrt(count); five of them.
    assert abs(got.mean() - float(values[0])) <= 5 * 0.5 * spread / count**0.5
    assert len(np.unique(got)) == 2


@pytest.mark.parametrize("dtype", FORMATS)
def test_rounding_never_makes_an_infinity_and_keeps_those_there_are(dtype: str) -> None:
    largest = float(all_numbers(dtype).max())
    most = np.finfo(np.float32).max
    values = np.array([most, -most, largest, np.nextafter(largest, np.inf)], np.float32)
    for draw in (0, 2**32 - 1):
        got = rounded(values, np.full(4, draw, np.uint32), dtype)
        np.testing.assert_array_equal(got, [largest, -largest, largest, largest])
        odd = np.array([np.inf, -np.inf, np.nan], np.float32)
        np.testing.assert_array_equal(rounded(odd, np.full(3, draw, np.uint32), dtype), odd)


def test_a_thousand_updates_too_small_for_float16_add_up() -> None:
    weights = np.ones(2000, np.float32)
    nearest = np.ones(2000, np.float16)
    for step in range(100):
        weights = rounded(weights + 1e-4, random_bits(weights.shape, seed=step), "float16")
        nearest = (nearest.astype(np.float32) + 1e-4).astype(np.float16)
    assert np.all(nearest == 1.0)
    assert weights.mean() == pytest.approx(1.01, abs=2e-4)


def test_rounding_to_a_format_without_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="float32"):
        round_stochastically(tf.constant([1.0]), tf.constant([0], tf.uint32), "float32")
