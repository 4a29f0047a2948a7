"""Labels of few texts: pairs train the vectors, and the classifier is scikit-learn's regression on them."""

import shutil

import numpy as np
import pytest
from scipy.special import expit
from support.metrics import scores_of
from support.runs import continues_bit_for_bit, lines_of
from support.tiny_models import write_base

from bert_cli.cli import main
from bert_cli.data.finetune.labels import read_decision
from bert_cli.errors import DataError
from bert_cli.tasks.finetune import few
from bert_cli.tasks.model import models
from bert_cli.tasks.model.opened import Input
from bert_cli.tasks.model.vectors import open_vectors
from bert_cli.tasks.run import finetune
from bert_cli.tasks.run.task import Result
from bert_cli.train.checkpoint import Folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("few"), train=24, dev=40)


def arguments(base, run, *more, in_folds=False):
    words = ["classify", "--few", "--train-file", base / "train.csv", "--save-ckpt-path", run]
    words += [] if in_folds else ["--validation-file", base / "dev.csv"]
    words += ["--pretrained-ckpt-path", base / "model", "--cache-dir", "null"]
    words += ["--max-seq-length", "40", "--no-baselines"]
    # Longer vectors than a tiny model's would need fewer and smaller steps.
    return [*map(str, words), "--optimizer-opts.learning-rate.max-learning-rate", "0.003", *more]


@pytest.fixture(scope="module")
def trained(base):
    run, opened, real = base / "trained", [], few.open_vectors
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(few, "open_vectors", lambda *of, **how: opened.append(1) or real(*of, **how))
        assert main(arguments(base, run, "--checkpoint-every-steps", "8")) == 0
    assert opened == [1], "once for all classifiers"
    return run


def test_tensorflow_does_not_warn_of_a_model_that_is_opened_often(base, monkeypatch):
    import tensorflow as tf
    from tensorflow.python.platform import tf_logging

    warned: list[object] = []
    monkeypatch.setattr(tf_logging, "warning", lambda *words: warned.append(words))
    source = models.find_source(str(base / "model"))
    for _ in range(6):
        open_vectors(source, warns=False).of_texts([Input("a", {"text": "good"})])
    assert not warned

    class Counter:
        def add(self, number):
            return number + 1

    for _ in range(6):  # TensorFlow warns of these
        tf.function(Counter().add)(tf.constant(1))
    assert warned


@pytest.mark.parametrize("parts", ["folds", "seeds"])
def test_each_fold_and_each_seed_draws_pairs_of_its_own_rows_by_its_own_seed(
    parts, base, tmp_path, monkeypatch
):
    drawn, jobs = [], []

    def pairs_of(labels, seed):
        drawn.append((len(labels), seed))
        return real(labels, seed)

    real = few.pairs_of
    monkeypatch.setattr(few, "pairs_of", pairs_of)
    monkeypatch.setattr(finetune, "_answers_of_fold", lambda job: jobs.append(job) or 0.0)
    monkeypatch.setattr(
        finetune, "_train_and_score", lambda of, **_: jobs.append(finetune.resolve(of)) or Result()
    )
    assert main(arguments(base, tmp_path, "--seeds", "2", in_folds=parts == "folds")) == 0
    expected = {(24, 1984), (24, 1985)}
    if parts == "folds":
        expected = {(12, 1984), (12, 1985), (24, 1984)}
    assert {*drawn} == expected
    assert len({job.fixed["corpus"] for job in jobs}) == len(jobs) == len(expected)
    assert len({id(job.task.fit) for job in jobs}) == 1, "a model that is opened once"


@pytest.mark.slow
def test_a_run_in_folds_answers_each_row_once(base, tmp_path):
    words = ["--seeds", "2", "--num-epochs", "0.1"]
    assert main(arguments(base, tmp_path, *words, in_folds=True)) == 0
    rows = lines_of(tmp_path / "predictions.jsonl")
    given = (base / "train.csv").read_text().splitlines()[1:]
    answered = [f"{row['text']},{row['label']}" for row in rows]
    assert answered == [line.rpartition(",")[0] for line in given]
    # Of two labels, a row that no fold tests has equal ones.
    assert all(float(row["probability"]) > 0.5 for row in rows)


@pytest.mark.parametrize("name", ["", "step_00000008"])
def test_the_classifier_of_each_checkpoint_is_scikit_learns_regression(name, base, trained):
    import torch
    import transformers
    from sklearn.linear_model import LogisticRegression

    checkpoint = trained / name if name else Folder(trained).best_checkpoint
    out = base / f"exported_{name}"
    assert main(["export", str(checkpoint), str(out), "--format", "hf"]) == 0
    assert "trust_remote_code=True" in (out / "README.md").read_text()
    opens = transformers.AutoModelForSequenceClassification.from_pretrained
    model = opens(out, trust_remote_code=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)

    def read(name):
        lines = (base / name).read_text().splitlines()[1:]
        texts, labels, _ = zip(*(line.split(",") for line in lines), strict=True)
        options = {"max_length": 40, "truncation": True, "padding": True, "return_tensors": "pt"}
        columns = tokenizer(list(texts), **options)
        with torch.no_grad():
            hidden = model.bert(**columns).last_hidden_state.numpy()
            probabilities = model(**columns).logits.softmax(-1).numpy()
        mask = columns["attention_mask"].numpy()[:, :, None]
        return (hidden * mask).sum(1) / mask.sum(1), labels, probabilities

    vectors, labels, _ = read("train.csv")
    tested, right, probabilities = read("dev.csv")
    scale = np.mean(np.sum(vectors**2, 1)) ** 0.5  # as vectors of length 1 on average
    judge = LogisticRegression(max_iter=1000).fit(vectors / scale, labels)
    tested = tested / scale
    heat = read_decision(checkpoint).temperature
    expected = expit(judge.decision_function(tested) / heat)
    np.testing.assert_allclose(probabilities[:, 1], expected, atol=1e-3)
    if name:
        return
    rows = lines_of(trained / "predictions.jsonl")
    assert [row["predicted"] for row in rows] == judge.predict(tested).tolist()
    assert judge.score(tested, right) > 0.7
    both = [float(row["probability"]) for row in rows]
    np.testing.assert_allclose(both, probabilities.max(1), atol=1e-5)


def test_a_run_resumes_bit_for_bit_and_its_scores_are_found_again(base, trained, bert):
    again = ["--checkpoint-every-steps", "8"]
    continues_bit_for_bit(trained, lambda run: main(arguments(base, run, *again)), 8)
    scored = shutil.copytree(trained, base / "scored")
    words = ["classify", "--no-do-training", "--validation-file", base / "dev.csv"]
    words += ["--save-ckpt-path", scored, "--cache-dir", "null", "--max-seq-length", "40"]
    assert bert(*words).last == scores_of(trained)


def test_pairs_are_of_one_label_and_bounded():
    labels = np.repeat([0, 1, 2], [3, 1, 40])
    pairs = few.pairs_of(labels, 0).reshape(-1, 2)
    assert len(pairs) == few.PAIRS and (labels[pairs[:, 0]] == labels[pairs[:, 1]]).all()
    assert (pairs[:, 0] != pairs[:, 1]).all() and set(labels[pairs.ravel()]) == {0, 2}
    assert np.array_equal(pairs.ravel(), few.pairs_of(labels, 0))
    assert not np.array_equal(pairs.ravel(), few.pairs_of(labels, 1))
    with pytest.raises(DataError, match="no label has two texts"):
        few.pairs_of(np.arange(4), 0)
