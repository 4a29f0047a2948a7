"""Baselines of a run: printed beside its scores, kept in its folder, and named where the model is not better."""

import json
import re
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow  # noqa: F401 (before conftest.py cuts the CPU into devices)
from sklearn.metrics import accuracy_score, f1_score
from support.tiny_models import (
    SENTENCES,
    flags_of,
    pretrain_words,
    write_base,
    write_model,
    write_records,
)

from bert_cli.cli import main
from bert_cli.data.finetune import simple
from bert_cli.data.finetune.embeddings import Retrieval, retrieval_of_pairs
from bert_cli.data.finetune.glue import TASKS
from bert_cli.data.finetune.tables import TextExamples
from bert_cli.data.random import chooses
from bert_cli.statistics import identify, mean_of, sample_of
from bert_cli.tasks.finetune import embed, texts
from bert_cli.tasks.run import pretrain
from bert_cli.tasks.run.task import Result, Task, compare, half_of, kept_baselines
from bert_cli.train import history


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("compared"), train=80, dev=40)


def classify(base, run, *more):
    files = {"train-file": "train.csv", "validation-file": "dev.csv", "cache-dir": "cache"}
    files |= {"pretrained-ckpt-path": "model", "save-ckpt-path": run}
    flags = {name: base / path for name, path in files.items()}
    words = flags_of(flags | {"num-epochs": 1, "max-seq-length": 32})
    assert main(["classify", *words, *more]) == 0
    return base / run


def test_a_run_that_loses_says_so_at_its_end_and_in_its_card(base, capsys, monkeypatch, tmp_path):
    run = classify(base, "run")
    out, err = capsys.readouterr()
    for name in ("majority class", "regression on vectors of the start", "regression on words"):
        assert f"baseline, {name}: accuracy " in out
    (warning,) = re.findall("warning: (the model does not beat the baseline '.*)", err)
    assert "its gain in accuracy is -0." in warning
    assert "accuracy" in json.loads(out.splitlines()[-1])
    card = (run / "step_00000003" / "README.md").read_text()
    assert warning in card and card.count("## Baselines") == 1

    monkeypatch.setattr(simple, "by_regression", lambda *_: pytest.fail("computed again"))
    classify(base, "run")
    printed = [re.findall("baseline, .*", text) for text in (capsys.readouterr().out, out)]
    assert printed[0] == printed[1] != []
    assert (run / "step_00000003" / "README.md").read_text() == card
    # The checkpoint with another card is whole, and its export has the section too.
    assert main(["export", str(run), str(tmp_path / "export"), "--format", "hf"]) == 0
    assert warning in (tmp_path / "export" / "README.md").read_text()


def test_without_baselines_nothing_is_computed(base, capsys, monkeypatch):
    monkeypatch.setattr(simple, "most_frequent", lambda *_: pytest.fail("computed"))
    run = classify(base, "without", "--no-baselines")
    assert "baseline" not in "".join(capsys.readouterr())
    assert not [*run.glob("baselines_*")]
    assert json.loads((run / "settings.json").read_text())["baselines"] is False
    state = json.loads((run / "step_00000003" / "state.json").read_text())
    assert "baselines" not in state["fixed"]


@pytest.mark.parametrize(
    ("metric", "model", "simple", "beats"),
    [
        ("accuracy", [1, 1, 1, 1, 1, 0], [0, 0, 0, 1, 0, 0], True),
        ("accuracy", [1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1], False),
        ("mlm_loss", [1.0, 1.2, 0.9, 1.1], [2.0, 2.1, 1.8, 2.2], True),
        ("mlm_loss", [1.0, 3.0, 0.9, 1.1], [2.0, 2.1, 1.8, 0.5], False),
    ],
)
def test_a_model_beats_the_best_baseline_if_the_interval_is_above_zero(
    metric, model, simple, beats, capsys
):
    worse = [n + (2.0 if metric == "mlm_loss" else -1.0) for n in simple]
    sides = {"worse": worse, "best": simple}
    found = {name: Result({metric: mean_of(values)}) for name, values in sides.items()}
    warning = compare([Result({metric: mean_of(model)})], found, metric)
    assert ("beats the baseline 'best'" in capsys.readouterr().out) == beats
    assert ("does not beat the baseline 'best'" in warning) == (not beats)


def test_the_half_that_is_not_reported_chooses_the_best_baseline(capsys):
    examples = identify(range(40))
    choosing = half_of(examples, choosing=True)
    rights = {"good": choosing, "lucky": ~choosing & (np.arange(40) > 3), "model": ~choosing}
    samples = {name: sample_of(examples, "ratio", right, 1) for name, right in rights.items()}
    results = {name: Result({"accuracy": sample}) for name, sample in samples.items()}
    model = results.pop("model").half(choosing=False)
    assert compare([model], results, "accuracy", halves=True) == ""
    out = capsys.readouterr().out
    assert "beats the baseline 'good': its gain in accuracy is 1.0" in out
    assert "baseline, good: accuracy 0.0000" in out


def test_one_group_of_examples_proves_nothing(capsys):
    alone = mean_of([0.9, 0.8], ["a", "a"])
    baselines = {"usual": Result({"accuracy": mean_of([0.1, 0.2], ["a", "a"])})}
    assert compare([Result({"accuracy": alone})], baselines, "accuracy") == ""
    assert "cannot be compared: all examples are one group" in capsys.readouterr().out


def test_other_judgements_texts_or_training_examples_have_other_baselines(tmp_path):
    kept = []
    for judged in ([{0: 1.0}, {1: 1.0}], [{0: 1.0}, {0: 1.0}]):
        retrieval = Retrieval(["a good day", "a bad day"], ["good day", "bad day"], judged)
        names = {"best": "ndcg_10", "held_out": retrieval.examples.digest}
        task = Task(2, None, None, **names, baselines=partial(embed._baselines, retrieval))
        kept.append(kept_baselines(task, tmp_path, "trained on")["BM25"].samples["ndcg_10"])
    assert kept[0].value != kept[1].value
    assert kept[0].examples.digest != kept[1].examples.digest
    kept_baselines(task, tmp_path, "other training examples")
    assert len([*tmp_path.iterdir()]) == 3
    texts_of = [examples_of([(text, "same")] * 2) for text in ("a day", "A day")]
    assert len({texts.digest_of({"validation": rows}) for rows in texts_of}) == 2


@pytest.mark.parametrize("kind", ["retrieval", "pairs"])
def test_no_text_both_chooses_and_reports(kind):
    rows = [(f"anchor {n}", f"positive {n} {m}") for n in range(20) for m in range(3)]
    texts = retrieval_of_pairs(rows) if kind == "retrieval" else examples_of(rows)
    is_choosing = chooses(texts.examples.groups)
    halves = [{rows[n][0] for n in np.flatnonzero(half)} for half in (is_choosing, ~is_choosing)]
    assert len(halves[0]) == len(halves[1]) == 10 and not halves[0] & halves[1]


def examples_of(rows, labels=None, names=None):
    first, second = zip(*rows, strict=True)
    ids = [str(n) for n in range(len(rows))]
    return TextExamples([*first], [*second], labels, ids, names)


def test_each_development_set_is_scored_by_the_metrics_of_its_task():
    rows = [("a good film", "it is"), ("a bad film", "it was"), ("bad plot", "so so")] * 8
    labels = np.array([1, 0, 0] * 8, np.int32)
    names = ("0", "1")
    sets = {
        "train": examples_of(rows, labels, names),
        "validation_matched": examples_of(rows[:7], labels[:7], names),
        "validation_mismatched": examples_of(rows[4:9], 1 - labels[4:9], names),
        "test": examples_of(rows, names=names),
    }
    found = texts.baselines_of(sets, TASKS["mrpc"].metrics, None)
    assert [*found] == ["majority class", "regression on words"]
    for name, predicted in (("majority class", 0 * labels), ("regression on words", labels)):
        scores = found[name].scores
        assert scores["accuracy_matched"] == accuracy_score(labels[:7], predicted[:7])
        mismatched = f1_score(1 - labels[4:9], predicted[4:9], zero_division=0.0)
        assert scores["f1_mismatched"] == pytest.approx(mismatched)


@pytest.mark.parametrize(("size", "is_computed"), [(499, True), (500, False)])
def test_vectors_of_the_start_are_a_baseline_of_all_of_few_rows(monkeypatch, size, is_computed):
    """By the number of rows alone: a slow machine computes the same baselines."""

    def of_texts(inputs):
        return np.float32([[len(item.fields["text"])] for item in inputs]), None

    monkeypatch.setattr(texts, "open_vectors", lambda *_, **__: SimpleNamespace(of_texts=of_texts))
    labels = np.arange(size, dtype=np.int32) % 2
    rows = [("long text" if label else "text", "second") for label in labels]
    sets = {name: examples_of(rows, labels, ("0", "1")) for name in ("train", "validation")}
    found = texts.baselines_of(sets, ("accuracy",), source=True)
    assert ("regression on vectors of the start" in found) == is_computed
    assert all(name == "majority class" or found[name].scores["accuracy"] == 1 for name in found)


def test_similarities_have_the_mean():
    labels = np.array([0.0, 2.5, 5.0, 4.0], np.float32)
    rows = [(f"text {n}", f"other {n}") for n in range(4)]
    sets = {name: examples_of(rows, labels) for name in ("train", "validation")}
    found = texts.baselines_of(sets, ("pearson",), None)
    assert [*found] == ["mean"]
    assert (found["mean"].samples["pearson"].columns[:, 1] == labels.mean()).all()


def test_bm25_of_many_queries_is_left_out(monkeypatch, capsys):
    queries = [f"word{n} common" for n in range(12)]
    documents = [f"common word{n}" for n in range(12)]
    retrieval = Retrieval(queries, documents, [{n: 1.0} for n in range(12)])
    (name,) = (found := embed._baselines(retrieval))
    assert name == "BM25" and found[name].scores["ndcg_10"] == 1.0
    monkeypatch.setattr(embed, "BM25_PAIRS", 40)
    assert embed._baselines(retrieval) == {}
    assert "baseline, BM25: left out, it takes too long" in capsys.readouterr().out
    assert embed._baselines(None) == {}


def test_words_have_their_most_frequent_labels(base, tmp_path):
    lines = {"train": "Ada B-PER\nmet O\nMay B-PER\n\nin O\nMay O\n\nMay O\n"}
    lines["dev"] = "May B-PER\nmet O\nAda B-PER\n\nin O\nMay O\n"
    files = {name: tmp_path / f"{name}.conll" for name in lines}
    for name, text in lines.items():
        files[name].write_text(text)
    flags = {"pretrained-ckpt-path": base / "model", "num-epochs": 1, "max-seq-length": 16}
    flags |= {"train-file": files["train"], "validation-file": files["dev"], "cache-dir": tmp_path}
    assert main(["ner", *flags_of(flags, save_ckpt_path=tmp_path / "run")]) == 0
    (kept,) = (tmp_path / "run").glob("baselines_*/*/scores.json")
    assert kept.parent.name == "most frequent label of each word"
    # One of two entities, and no wrong one.
    scores = history.Run(kept.parent).scores
    assert (scores["precision"], scores["recall"]) == (1.0, 0.5)


@pytest.mark.slow
def test_a_masked_model_is_compared_with_the_frequencies_of_tokens(
    tmp_path, bert, capsys, monkeypatch
):
    write_model(tmp_path / "model")
    write_records(tmp_path / "records", SENTENCES * 2, tmp_path / "model", masking="static")
    changes = {"validation_dir": tmp_path / "records", "evaluation_examples": 30}
    seen = []
    unigram = pretrain.unigram
    monkeypatch.setattr(
        pretrain, "unigram", lambda *of: seen.append((of, unigram(*of))) or seen[0][1]
    )
    words = pretrain_words(tmp_path, **changes)
    out, err = bert(*words)
    assert "baseline, frequencies of tokens: mlm_loss " in out
    assert "warning: the model does not beat the baseline 'frequencies of tokens'" in err
    (((stream, held_out, _), found),) = seen
    tokens = [
        batch["masked_lm_ids"][batch["masked_lm_weights"] > 0]
        for batch in (stream.rows(np.arange(stream.epoch_size)), held_out.rows(np.arange(30)))
    ]
    scores = found["frequencies of tokens"].scores
    most = np.bincount(tokens[0]).argmax()
    assert scores["mlm_accuracy"] == pytest.approx(np.mean(tokens[1] == most))
    assert scores.keys() == {"mlm_loss", "mlm_accuracy", "bits_per_byte"}
    assert main(words) == 0 and len(seen) == 1
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run")]) == 0
    line = f"mlm_loss {scores['mlm_loss']:.4f} ["
    assert line in out and line in capsys.readouterr().out
    assert main(["evaluate", str(tmp_path / "run"), "--no-baselines"]) == 0
    assert "baseline" not in "".join(capsys.readouterr())
    (tmp_path / "records").rename(tmp_path / "moved")
    assert main(["evaluate", str(tmp_path / "run"), "--dataset-dir", str(tmp_path / "moved")]) == 0
    assert "baseline: left out, because it reads the run's records" in capsys.readouterr().out
