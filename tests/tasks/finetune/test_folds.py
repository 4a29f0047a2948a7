"""Few rows: each is tested once, by a model that has learned no copy of it, and the last model learns all."""

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
from sklearn import metrics
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from support.metrics import scores_of
from support.runs import assert_same_end, lines_of
from support.tiny_models import write_base

from bert_cli.cli import main
from bert_cli.config.finetune import ClassifySettings
from bert_cli.data.finetune.labels import best_temperature, best_thresholds
from bert_cli.data.finetune.split import folds_of
from bert_cli.data.finetune.tables import TextExamples, read_table
from bert_cli.data.random import chooses
from bert_cli.data.tokens.tokenizer import read_tokenizer
from bert_cli.tasks.finetune import classify, texts
from bert_cli.tasks.run import finetune
from bert_cli.tasks.run.job import Job
from bert_cli.train.checkpoint import complete_checkpoints
from bert_cli.train.loop import StoppedError


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = write_base(tmp_path_factory.mktemp("folds"), train=60)
    head, *rows = (folder / "train.csv").read_text().splitlines()
    cells = [row.split(",") for row in rows[:9]]
    copies = [f"{text.upper()},{label},copy{number}" for text, label, number in cells]
    (folder / "train.csv").write_text("\n".join([head, *rows, *copies]) + "\n")
    return folder


def arguments(base, run, *more):
    words = ["classify", "--train-file", base / "train.csv", "--save-ckpt-path", run]
    words += ["--pretrained-ckpt-path", base / "model", "--cache-dir", "null", "--num-epochs", "2"]
    words += ["--optimizer-opts.learning-rate.max-learning-rate", "0.003", "--max-seq-length", "64"]
    return [*map(str, words), *more]


@pytest.fixture(scope="module")
def trained(base):
    """A run in two folds; `killed` is its folder as a kill before the answers of the second leaves it."""
    run = base / "run"
    write = finetune.write_arrays

    def copies_and_writes(file, arrays):
        if (run / "fold_2").exists():
            shutil.copytree(run, base / "killed")
        write(file, arrays)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finetune, "write_arrays", copies_and_writes)
        assert main(arguments(base, run, "--seeds", "2")) == 0
    return run


def table(base):
    return read_table(base / "train.csv", text_columns=["text"], label_columns=["label"])


@pytest.mark.parametrize("stride", [None, 5])
def test_each_text_is_tested_once_and_no_copy_of_it_is_learned_in_its_fold(base, stride):
    settings = {"train_file": base / "train.csv", "cache_dir": None, "max_seq_length": 16}
    settings = ClassifySettings.model_validate(settings | {"doc_stride": stride})
    task = classify.build(settings, read_tokenizer(base / "model"), None)
    assert replace(task, folds=task.folds[::-1]).fingerprint != task.fingerprint
    sizes = np.bincount(task.folds)
    assert sizes.sum() == 69 and len(sizes) == 5

    def words_of(part):
        return {part.batch(np.array([n]), 16)["input_ids"].tobytes() for n in range(len(part))}

    assert max(sizes) <= min(sizes) + 4
    for number, size in enumerate(sizes):
        part = task.of_fold(task.folds == number)
        tested = part.development["validation"]
        if stride is None:
            assert not words_of(part.train) & words_of(tested)
            assert words_of(part.train) | words_of(tested) == words_of(task.train)
        else:
            assert tested.owner.max() + 1 == size == 69 - (part.train.owner.max() + 1)
        assert len(part.train) + len(tested) == len(task.train)


def test_the_scores_are_scikit_learns_of_models_that_one_training_each_makes(base, trained):
    rows = lines_of(trained / "predictions.jsonl")
    said = [row["predicted"] for row in rows]
    right = [row["label"] for row in rows]
    scores = scores_of(trained)
    assert scores["accuracy"] == pytest.approx(metrics.accuracy_score(right, said))
    assert scores["macro_f1"] == pytest.approx(metrics.f1_score(right, said, average="macro"))
    everything = table(base)
    folds = folds_of(everything, 2, 42)
    for name, side in (("train", folds == 0), ("validation", folds == 1)):
        part = everything.take(np.flatnonzero(side))
        cells = zip(part.first, part.labels, strict=True)
        lines = [json.dumps({"text": text, "label": str(label)}) for text, label in cells]
        (base / f"{name}.jsonl").write_text("\n".join(lines))
    alone = base / "alone"
    files = f"--train-file {base}/train.jsonl --validation-file {base}/validation.jsonl".split()
    words = ["--seed", "43", "--evaluate-every-steps", "1000", "--no-baselines"]
    assert main(arguments(base, alone, *files, *words)) == 0
    numbers = [int(row["predicted"]) for row in lines_of(alone / "predictions.jsonl")]
    tested = np.flatnonzero(folds == 1)
    assert [everything.label_names[n] for n in numbers] == [said[n] for n in tested]


@pytest.mark.parametrize("count", [2, 3])
def test_the_baseline_learns_all_other_folds(base, trained, count):
    everything = table(base)
    if count == 3:  # labels that no model learns, so that other training rows have other answers
        shuffled = np.random.default_rng(0).permutation(everything.labels)
        everything = replace(everything, labels=shuffled)
    folds = folds_of(everything, count, 42)
    answers = np.zeros(len(folds), int)
    for number in range(count):
        words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
        learned, tested = (np.flatnonzero(side) for side in (folds != number, folds == number))
        vectors = words.fit_transform([everything.first[n] for n in learned])
        judge = LogisticRegression(C=10.0, max_iter=1000).fit(vectors, everything.labels[learned])
        asked = words.transform([everything.first[n] for n in tested])
        answers[tested] = judge.predict(asked)
    expected = {
        "accuracy": metrics.accuracy_score(everything.labels, answers),
        "macro_f1": metrics.f1_score(everything.labels, answers, average="macro"),
    }
    if count == 2:
        (folder,) = trained.glob("baselines_*/regression on words")
        found = scores_of(folder)
    else:
        sets = {"train": everything, "validation": everything}
        results = texts.baselines_of(sets, classify.METRICS, None, folds=folds)
        found = results["regression on words"].scores
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("change", "fold"), [("", 2), ("!", 1)], ids=["nothing changed", "a tested text changed"]
)
def test_a_fold_is_trained_again_if_a_text_that_it_tests_has_changed(
    base, trained, monkeypatch, change, fold
):
    """The first fold has its answers, so that otherwise the second is trained."""
    again = shutil.copytree(base / "killed", base / f"changed{change}")
    folds = folds_of(table(base), 2, 42)
    lines = (base / "train.csv").read_text().splitlines()
    row = 1 + int(np.flatnonzero(folds[9:] == 0)[0]) + 9  # the first nine have copies
    lines[row] = lines[row].replace(",", f"{change},", 1)
    (base / "changed.csv").write_text("\n".join(lines))
    begun: list[Job] = []

    def stops(job, locks):
        begun.append(job)
        raise StoppedError

    monkeypatch.setattr(finetune, "_train_to_end", stops)
    words = ["--train-file", str(base / "changed.csv"), "--tensorboard-dir", str(base / "curves")]
    assert main(arguments(base, again, "--seeds", "2", *words)) == 0
    (job,) = begun
    assert job.folder == again / f"fold_{fold}"
    assert job.order.tensorboard_dir == base / "curves" / f"fold_{fold}"
    steps = np.count_nonzero(folds != fold - 1) / job.plan.examples_per_step
    assert steps % 1 and job.evaluate_every == math.ceil(steps)


def test_a_killed_run_continues_and_ends_as_one_that_was_not(base, trained, capsys):
    again = shutil.copytree(base / "killed", base / "again")
    kept = {path.name: path.stat().st_mtime_ns for path in again.glob("fold_*.npz")}
    assert len(kept) == 1 and not complete_checkpoints(again)
    assert complete_checkpoints(again / "fold_2") and [*again.glob(".fold_*.part")]
    capsys.readouterr()
    for attempt in ("continued", "complete"):
        assert main(arguments(base, again, "--seeds", "2")) == 0, attempt
        assert_same_end(again, trained)
        for name in ("scores.json", "predictions.jsonl"):
            assert (again / name).read_bytes() == (trained / name).read_bytes(), attempt
    (name,) = kept
    assert (again / name).stat().st_mtime_ns == kept[name]
    assert not [path for path in again.glob("*fold_*") if path.suffix != ".npz"]
    printed = capsys.readouterr().out
    assert "nothing to do" in printed and printed.count("plan:") == 2


def test_the_folder_of_another_run_is_refused_before_a_fold_is_trained(base, trained, capsys):
    lines = (base / "train.csv").read_text().splitlines(keepends=True)
    (base / "other.csv").write_text("".join(lines[:-1]))
    words = ["--train-file", str(base / "other.csv"), "--seeds", "2"]
    assert main([*arguments(base, trained), *words]) == 4
    printed = capsys.readouterr()
    assert "belongs to a run with other settings: corpus" in printed.err
    assert "fold 1" not in printed.out and not (trained / "fold_1").exists()


def test_each_half_of_texts_with_several_labels_is_answered_by_thresholds_of_the_other():
    names = ("food", "sea")
    drawn = np.random.default_rng(0)
    labels = (drawn.random((40, 2)) < 0.4).astype(np.int8)
    rows = TextExamples([f"text {n}" for n in range(40)], None, labels, [], names)
    logits = (2.0 * labels + drawn.normal(-2.0, 1.5, (40, 2))).astype(np.float32)
    # A change of the labels of a text changes the answers of the half without it alone.
    _, before = texts.decided(rows, logits, folded=True)
    halves = [set(), set()]
    for row in range(40):
        changed = labels.copy()
        changed[row] = 1 - changed[row]
        _, after = texts.decided(replace(rows, labels=changed), logits, folded=True)
        moved = {*np.flatnonzero((after != before).any(1)).tolist()}
        side = chooses(rows.examples.groups)[row]
        assert row not in moved
        halves[int(side)] |= moved
    assert halves[0] and halves[1] and not halves[0] & halves[1]
    kept = classify._evaluate(
        {"validation": rows}, None, {"validation": logits}, folded=True, scores_all=False
    ).decision
    expected = best_thresholds(labels, 1 / (1 + np.exp(-logits)))
    assert [*kept.thresholds.values()] == pytest.approx(expected)


def test_the_checkpoint_has_the_temperature_fitted_on_all_texts(capsys, tmp_path):
    drawn = np.random.default_rng(0)
    labels = drawn.integers(0, 2, 400)
    logits = drawn.normal(0.0, 3.0, (400, 2)).astype(np.float32)
    logits[np.arange(400), labels] += 3.0  # too sure: the odds are a third of these
    asked = [f"text {n}" for n in range(400)]
    rows = TextExamples(asked, None, labels, asked, ("food", "sea"))
    result = classify._evaluate(
        {"validation": rows}, None, {"validation": logits}, folded=True, scores_all=False
    )
    expected = best_temperature(logits, labels)
    assert result.decision.temperature == expected > 1.5
    result.write(tmp_path, {})
    assert f"fitted on all texts: temperature {expected:.4f}" in capsys.readouterr().out
