"""`bert verdict`: its rule, its bits per byte, and folders without a test."""

import json
import math

import numpy as np
import pytest
from support.tiny_models import TINY, write_model

from bert_cli.statistics import Score, difference, identify, mean_bounds, sample_of
from bert_cli.tasks.init import verdict
from bert_cli.tasks.model import models
from bert_cli.tasks.run.task import Result, half_of
from bert_cli.train import scores

TEXTS = ["the good film was not a bad plot and it is very fine. " * 9, "bad music is awful. " * 20]


@pytest.mark.parametrize(
    ("low", "high", "documents", "expected"),
    [
        (0.1, 0.3, 6, "WIN"),
        (-0.3, -0.1, 6, "REGRESSION"),
        (-0.1, 0.3, 6, "NO DIFFERENCE"),
        (0.0, 0.0, 6, "NO DIFFERENCE"),
        (0.1, 0.3, 5, "NO DIFFERENCE"),
        (math.nan, math.nan, 1, "NO DIFFERENCE"),
    ],
)
def test_the_interval_decides(low, high, documents, expected):
    gain = Score((low + high) / 2, low, high, documents, documents)
    assert verdict.Measure("accuracy", 0.5, 0.7, gain).verdict == expected


def test_the_bits_per_byte_of_a_model_without_preference_are_those_of_its_vocabulary(tmp_path):
    """All words have the same score, so each masked token has log2 V bits."""
    flat = write_model(tmp_path / "flat", TINY.model_copy(update={"initializer_range": 1e-9}))
    source = models.find_source(str(flat))
    sample = verdict.bits_per_byte(source, TEXTS, 64)
    per_token = math.log2(source.config.vocab_size)
    tokens = sample.columns[:, 0] / per_token
    assert np.allclose(tokens, np.rint(tokens), atol=1e-3) and (tokens > 10).all()
    assert (sample.columns[:, 1] > tokens).all()


def test_two_models_fill_the_same_masks_and_equal_models_do_not_differ(tmp_path, monkeypatch):
    folders = (write_model(tmp_path / str(seed), seed=seed) for seed in (1, 2))
    first, second = (models.find_source(str(folder)) for folder in folders)
    scored = [verdict.bits_per_byte(source, TEXTS, 64) for source in (first, first, second)]
    assert difference([scored[0]], [scored[1]])[:3] == (0.0, 0.0, 0.0)
    assert np.array_equal(scored[0].columns[:, 1], scored[2].columns[:, 1])
    assert not np.array_equal(scored[0].columns[:, 0], scored[2].columns[:, 0])
    monkeypatch.setattr(verdict, "AT_ONCE", 1)
    one_by_one = verdict.bits_per_byte(first, TEXTS, 64)
    np.testing.assert_allclose(one_by_one.columns, scored[0].columns, rtol=1e-5)


def test_frequencies_of_seen_tokens_fill_the_masks_instead_of_a_model(tmp_path, monkeypatch):
    source = models.find_source(str(write_model(tmp_path / "model")))
    sample = verdict.bits_per_byte(source, TEXTS, 64, seen=TEXTS)
    assert sample.value < verdict.bits_per_byte(source, TEXTS, 64).value
    monkeypatch.setattr(verdict, "EXAMPLES", 2)
    of_two = verdict.bits_per_byte(source, TEXTS, 64, seen=TEXTS)
    assert of_two.columns[:, 1].all(), "a text has no example"


@pytest.mark.parametrize("has_start", [True, False])
def test_the_test_texts_are_filled_by_the_start_and_the_trained_model(
    has_start, tmp_path, monkeypatch, bert
):
    """Train, held-out and test texts differ, and so do both models: any other choice gives other numbers."""
    start, trained = (
        write_model(tmp_path / name, seed=n) for n, name in enumerate(("start", "run"))
    )
    parts = {"train": TEXTS[:1], "held_out": [TEXTS[0][::-1]], "test": [*TEXTS, "fine music " * 9]}
    for name, texts in parts.items():
        rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (tmp_path / "text").mkdir(exist_ok=True)
        (tmp_path / f"text/{name}.jsonl").write_text(rows)
    settings = {"max_seq_length": 48, "pretrained_ckpt_path": str(start) if has_start else None}
    (tmp_path / "pretrain.json").write_text(json.dumps(settings))
    before, after = (models.find_source(str(folder)) for folder in (start, trained))
    expected = [verdict.bits_per_byte(after, parts["test"], 48).value]
    if has_start:
        expected.insert(0, verdict.bits_per_byte(before, parts["test"], 48).value)
    else:
        seen = verdict.bits_per_byte(after, parts["test"], 48, seen=parts["train"])
        expected.insert(0, seen.value)
    measures = [*verdict._of_masked_lm(tmp_path)]
    measure, *others = measures
    assert [measure.start, measure.trained] == pytest.approx(expected, rel=1e-5)
    assert measure.gain.value == pytest.approx(expected[0] - expected[1], rel=1e-5)
    assert measure.gain.n == 3 and [other.gain.n > 10 for other in others] == [True] * has_start
    assert ("frequencies" in measure.name) != has_start
    (trained / "step_00000001").mkdir()
    (trained / "step_00000001/state.json").write_text("{}")
    monkeypatch.setattr(verdict, "_of_masked_lm", lambda _: measures)
    *_, note, last = bert("verdict", tmp_path).out.splitlines()
    assert note == "fewer than 6 documents show no difference; use more text"
    assert last == f"NO DIFFERENCE: gain {measure.gain:+.3f}, {measure.name}"


def test_labels_are_judged_on_half_of_the_texts_beside_the_best_baseline_of_the_other(tmp_path):
    examples = identify(range(40))
    choosing = half_of(examples, choosing=True)

    def write(folder, right, is_half):
        values = Result({"accuracy": sample_of(examples, "ratio", right, 1.0)})
        values = values.half(choosing=False) if is_half else values
        folder.mkdir(parents=True)
        scores.write(folder, values.samples, values.intervals)

    write(tmp_path / "classifier", np.arange(40) < 36, is_half=True)
    lucky = ~choosing & (np.arange(40) < 24)
    for name, right in (("majority class", lucky), ("regression on words", choosing)):
        write(tmp_path / "classifier/baselines_0" / name, right, is_half=False)
    measures = list(verdict._of_labels(tmp_path))
    starts = ("regression on words", "majority class")
    assert [m.name for m in measures] == [f"accuracy (start: {start})" for start in starts]
    assert {m.verdict for m in measures} == {"WIN"} and measures[0].gain.n == 20


# Whether each of some systems is right on 4 texts of each document, and all are equally good.
SHAPES = {
    "easy and hard documents": lambda random, shape: (
        random.random((*shape, 4)) < random.beta(1, 0.4, shape[1:])[..., None]
    ),
    "independent": lambda random, shape: random.random((*shape, 4)) < 0.8,
    "few mistakes": lambda random, shape: random.random((*shape, 4)) < 0.97,
    "right or wrong on a document": lambda random, shape: (
        (random.random(shape) < 0.75)[..., None] ^ (random.random((*shape, 4)) < 0.05)
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_equal_classifiers_rarely_win_or_lose(shape):
    """At most 2.5 % of each, within three standard errors, although the best of three is chosen as the start."""
    random = np.random.default_rng(0)
    tests = 1000
    for documents in (6, 10, 20, 60):
        choosing = half_of(identify(range(2 * documents)), choosing=True)
        right = SHAPES[shape](random, (4, tests, 2 * documents)).mean(-1)
        best = right[:3, :, choosing].mean(-1).argmax(0)
        gains = right[3] - right[best, np.arange(tests)]
        low, high = mean_bounds(gains[:, ~choosing])
        rates = np.mean(low > 0), np.mean(high < 0)
        assert max(rates) < 0.025 + 3 * np.sqrt(0.025 * 0.975 / tests), (documents, rates)
