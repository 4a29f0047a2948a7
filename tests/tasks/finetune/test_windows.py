"""Texts that are longer than the model are read in windows: in training, in scores and in every prediction."""

import json
import shutil

import numpy as np
import pytest
from scipy.special import softmax
from support.answers import near
from support.metrics import scores_of
from support.runs import lines_of
from support.tiny_models import OTHERS, write_base

import bert_cli
from bert_cli.cli import main
from bert_cli.train.checkpoint import Folder

LENGTH, STRIDE = 16, 6
WINDOWS = ["--max-seq-length", str(LENGTH), "--doc-stride", str(STRIDE)]
FLAGS = [
    "--global-batch.micro-batch-size", "8", "--global-batch.grad-acc-steps-per-replica", "2",
    "--optimizer-opts.learning-rate.max-learning-rate", "0.003", "--log-every-steps", "100",
    "--num-epochs", "1", "--cache-dir", "null", "--keep-checkpoints", "99",
]  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    base = write_base(tmp_path_factory.mktemp("windows"), train=96, dev=41)
    draw = np.random.default_rng(5)
    for name in ("train", "dev"):
        words = draw.choice([*OTHERS, "good"], (12, 50))
        rows = [[f"{word} {'B-G' if word == 'good' else 'O'}" for word in row] for row in words]
        text = "\n\n".join("\n".join(row) for row in rows)
        (base / f"{name}.conll").write_text(f"{text}\n")
    return base


def arguments(base, command, run, *more):
    kind = "csv" if command == "classify" else "conll"
    files = ["--train-file", base / f"train.{kind}", "--validation-file", base / f"dev.{kind}"]
    files += ["--pretrained-ckpt-path", base / "model", "--save-ckpt-path", base / run]
    return [command, *map(str, files), *FLAGS, *more]


@pytest.fixture(scope="module")
def trained(base):
    words = arguments(base, "classify", "run", *WINDOWS, "--checkpoint-every-steps", "4")
    assert main(words) == 0
    return base / "run"


@pytest.fixture(scope="module")
def exported(base, trained):
    assert main(["export", str(trained), str(base / "exported"), "--format", "hf"]) == 0
    return base / "exported"


def in_torch(folder, texts):
    """Return the mean logits of the windows of texts, by transformers."""
    import torch
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    means = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        room = LENGTH - 2
        starts = range(0, max(1, len(ids) - room + STRIDE), STRIDE)
        windows = [[2, *ids[start : start + room], 3] for start in starts]
        with torch.no_grad():
            each = [model(torch.tensor([window])).logits[0].numpy() for window in windows]
        means.append(np.mean(each, axis=0))
    return np.stack(means)


@pytest.fixture(scope="module")
def expected(trained, exported):
    """The probabilities of the validation texts [n, 2], by transformers."""
    texts = [row["text"] for row in lines_of(trained / "predictions.jsonl")]
    assert max(len(text.split()) for text in texts) > 2 * LENGTH
    return softmax(in_torch(exported, texts), -1)


def test_a_text_has_the_mean_logits_of_its_windows_and_counts_once(trained, expected):
    rows = lines_of(trained / "predictions.jsonl")
    intervals = json.loads((trained / "scores.json").read_text())["intervals"]
    assert len(rows) == 41 and intervals["accuracy"]["n"] == 41
    right = [row["label"] == row["predicted"] for row in rows]
    assert scores_of(trained)["accuracy"] == np.mean(right)
    found = [row["probability"] for row in rows]
    np.testing.assert_allclose(found, expected.max(1), atol=1e-5)


def test_scoring_and_an_average_read_the_windows_of_the_training(base, trained, bert, capsys):
    words = ["classify", "--no-do-training", "--validation-file", base / "dev.csv"]
    words += ["--pretrained-ckpt-path", trained, "--save-ckpt-path", base / "scored"]
    assert main([*map(str, words), "--cache-dir", "null"]) == 0
    assert f"doc_stride is {STRIDE}, as in the training of" in capsys.readouterr().out
    assert scores_of(base / "scored") == scores_of(trained)
    words += ["--doc-stride", STRIDE + 1]
    assert main([*map(str, words), "--cache-dir", "null"]) == 0
    assert "doc_stride is" not in capsys.readouterr().out
    assert main(["average", str(trained), str(base / "average"), "--last", "2"]) == 0
    assert not (base / "average" / "decision.json").exists()
    capsys.readouterr()
    text = lines_of(trained / "predictions.jsonl")[0]["text"]
    row = json.loads(bert("predict", base / "average", text).out)
    expected = softmax(in_torch(base / "average", [text])[0])
    np.testing.assert_allclose([*row["probabilities"].values()], expected, atol=1e-5)


@pytest.mark.parametrize("name", ["run", "exported"])
def test_every_prediction_reads_the_windows_of_the_run(
    name, base, expected, bert, capsys, tmp_path
):
    texts = [row["text"] for row in lines_of(base / "run" / "predictions.jsonl")]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    rows = bert("predict", base / name, "--input", tmp_path / "texts.txt").rows
    assert not any("truncated" in row for row in rows)
    found = [list(row["probabilities"].values()) for row in rows]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert bert_cli.load(base / name).label(texts[:3]) == near(rows[:3])
    assert "warning" not in capsys.readouterr().err


def test_a_model_without_a_run_truncates_unless_windows_are_asked_for(trained, tmp_path, bert):
    model = shutil.copytree(Folder(trained).best_checkpoint, tmp_path / "model")
    words = ["predict", str(model), "good fine plot " * 30]
    assert bert(*words).last["truncated"]
    assert "truncated" not in bert(*words, "--doc-stride", "20").last


def test_a_run_with_other_windows_is_another_run(base, trained):
    words = arguments(base, "classify", "run", *WINDOWS, "--checkpoint-every-steps", "4")
    assert main([*words, "--doc-stride", "7"]) == 4


def test_words_are_labelled_in_windows_as_bert_predict_labels_them(base, bert, capsys):
    run = base / "ner"
    assert main(arguments(base, "ner", run, *WINDOWS, "--num-epochs", "3")) == 0
    assert "12 sentences longer than max_seq_length, read in windows" in capsys.readouterr().out
    blocks = (run / "predictions.conll").read_text().strip().split("\n\n")
    words, _, predicted = zip(*(line.split() for line in blocks[0].splitlines()), strict=True)
    assert len(blocks) == 12 and len(words) == 50
    # 50 words are 7 windows of 14 that begin 6 apart: 3 epochs of 84 in steps of 16.
    assert lines_of(run / "metrics.jsonl")[-1]["step"] == 16
    row = bert("predict", run, " ".join(words)).last
    assert tuple(word["label"] for word in row["words"]) == predicted


def test_windows_that_would_skip_text_are_refused(trained, bert):
    words = ["predict", str(trained), "good", "--max-seq-length", "16", "--doc-stride", "14"]
    assert "16 leaves 13 tokens of a text after the special tokens" in bert(*words, code=2).err
