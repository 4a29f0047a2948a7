"""Unit Scaling: a scaled model is a plain BERT with other units, and its first step is in float16's range."""

import numpy as np
import pytest
from support import layouts
from support.model_inputs import counts_of, gradients_of, make_examples, values_of
from support.scales import is_far, scales

from bert_cli.errors import ConfigError
from bert_cli.facts.bert import BertConfig
from bert_cli.facts.products import BatchShape
from bert_cli.model.arithmetic.operations import Operations
from bert_cli.model.arithmetic.scaling import check_trained_with, factors, folded
from bert_cli.model.build import build_blocks, named_weights
from bert_cli.tasks.run.start import factors_of

S, P = 24, 5


@pytest.fixture(scope="module")
def table(tiny):
    return factors(tiny, BatchShape(4, S, P))


def blocks_of(config, table):
    return build_blocks(config, seed=1, policy="float32", operations=Operations(factors=table))


@pytest.fixture(scope="module")
def models(tiny, table):
    """Return the blocks of a scaled model and of the plain one with the same function."""
    scaled, plain = (blocks_of(tiny, factors) for factors in (table, {}))
    draw, weights, targets = np.random.default_rng(3), named_weights(scaled), named_weights(plain)
    assert weights.keys() == targets.keys() == table.keys() & weights.keys()
    for weight in weights.values():
        weight.assign(weight.numpy() + draw.normal(0, 0.3, weight.shape))
    for name, value in folded(values_of(scaled), table).items():
        targets[name].assign(value)
    return scaled, plain


@pytest.mark.parametrize("chunks", [1, 3])
def test_losses_are_those_of_the_folded_plain_bert_and_gradients_proportional(models, tiny, chunks):
    columns = make_examples(tiny.vocab_size, examples=4, length=S, predictions=P)
    for blocks in models:
        blocks[-1][1].chunks = chunks
    results = [gradients_of(blocks, columns, counts_of(columns)) for blocks in models]
    (loss, sums, ours), (plain_loss, plain_sums, plain) = results
    np.testing.assert_allclose(loss, plain_loss, rtol=1e-6)
    np.testing.assert_allclose(sums["nsp_loss"], plain_sums["nsp_loss"], rtol=1e-6)
    for name, gradient in ours.items():
        if not name.endswith("key/bias"):  # whose true gradient is zero
            one, other = gradient.numpy().ravel(), plain[name].numpy().ravel()
            cosine = one @ other / (np.linalg.norm(one) * np.linalg.norm(other))
            assert cosine > 1 - 1e-6, name


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_folding_and_unfolding_a_weight_gives_the_same_bits(models, table, dtype):
    weights = {name: value.astype(dtype) for name, value in values_of(models[0]).items()}
    again = folded(folded(weights, table), table, -1)
    for name, value in weights.items():
        assert again[name].astype(dtype).tobytes() == value.tobytes(), name


SCALED = {"model": {**layouts.NO_DROPOUT, "num_hidden_layers": 4, "initializer_range": 0.02}}


@pytest.mark.slow
def test_each_layer_of_a_stage_has_its_own_factors():
    settings = layouts.settings_of("1x1", 1, scaling="unit", **SCALED)
    engine, reader = layouts.engine_of("1x1", 1, scaling="unit", **SCALED)
    _, ours = layouts.accumulate(engine, reader[0])
    operations = Operations(factors=factors_of(settings))
    named = build_blocks(
        settings.bert_config, seed=settings.seed, policy="float32", operations=operations
    )
    columns = {name: column[0] for name, column in reader[0].items()}
    _, _, expected = gradients_of(named, columns, counts_of(columns))
    layouts.assert_close(ours, {name: value.numpy() for name, value in expected.items()}, 1e-6)


@pytest.mark.slow
def test_a_step_of_adamw_changes_each_weight_by_its_rate():
    optimizer = {"name": "AdamW", "weight_decay_rate": 0.0}
    settings = layouts.settings_of("1x1", 1, scaling="unit", optimizer=optimizer, **SCALED)
    _, state, step, reader = layouts.built(settings)
    before = {name: weight.numpy().copy() for name, weight in state.weights.items()}
    step(reader[0])
    for name, factor in factors_of(settings).items():
        if name in before and not name.endswith("key/bias"):
            largest = np.abs(state.weights[name].numpy() - before[name]).max()
            assert largest == pytest.approx(0.01 * factor.deviation, rel=1e-3), name


TINY = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
DEEP = {"hidden_size": 256, "num_hidden_layers": 24, "num_attention_heads": 4}


def scales_of(shape, is_scaled, examples=8):
    """Return the scales of the first step of a model, without scaling or with it."""
    config = BertConfig(**shape, intermediate_size=4 * shape["hidden_size"], vocab_size=8192)
    table = factors(config, BatchShape(examples, 128, 20)) if is_scaled else {}
    blocks = blocks_of(config, table)
    batch = make_examples(8192, examples=examples, length=128, predictions=20)
    return scales([block for _, block in blocks], batch)


@pytest.mark.parametrize(
    "shape", [TINY, *(pytest.param(large, marks=pytest.mark.slow) for large in (BASE, DEEP))]
)
def test_all_scales_of_the_first_step_are_within_a_tenth_and_ten(shape):
    # All values and gradients of an example are in memory.
    sizes = scales_of(shape, True, 2 if shape is BASE else 8)
    assert len(sizes) > 40 * shape["num_hidden_layers"]
    # A label of next-sentence prediction has the gradient of all masked tokens of its sequence, at [CLS] alone. The
    # true gradient of a key's bias is 0. The readout of BERT-base has 0.09 with two examples.
    wider = {"pool/dense/input, before": (0.5, 20), "heads/next_sentence/input, after": (0.05, 10)}
    for name, size in sizes.items():
        if name in wider:
            least, most = wider[name]
            assert all(least < number < most for number in size), (name, size)
        elif not name.endswith("key/bias"):
            assert not is_far(size), (name, size)


def test_a_plain_model_is_far_outside_that_range():
    sizes = scales_of(TINY, False).values()
    assert sum(map(is_far, sizes)) > 0.9 * len(sizes)


def test_scaling_refuses_weights_that_were_trained_without_it():
    check_trained_with({"scaling": "unit"}, None, "old")  # a plain BERT for everybody
    with pytest.raises(
        ConfigError, match="the weights of old were trained with no scaling"
    ) as error:
        check_trained_with({}, "unit", "old")
    assert error.value.where == "scaling (unit)"


def test_the_rules_are_those_of_the_papers():
    """Literals of a width of 128 and 4 layers; 2407.17465, appendix G, for the residual branches."""
    sizes = {**TINY, "num_hidden_layers": 4, "intermediate_size": 512}
    config = BertConfig(**sizes, hidden_dropout_prob=0.0)
    table = factors(config, BatchShape(8, 128, 20))
    products = ("attention/query", "attention/key", "attention/value", "feed_forward/inner")
    # The deviation of the first value of plain BERT's weight is 1 / sqrt(width).
    for name in (*(f"hid_3/{product}/kernel" for product in products), "heads/masked_lm/table"):
        assert table[name].fold * table[name].deviation == pytest.approx(128**-0.5), name
    # Branch k of the stack has the weight 1 / sqrt(4 + k): two branches in each layer.
    for layer in range(4):
        products = ("attention/value", "feed_forward/inner")
        weights = [table[f"hid_{layer}/{product}/input"].backward for product in products]
        assert weights == pytest.approx([(4 + 2 * layer) ** -0.5, (5 + 2 * layer) ** -0.5])
