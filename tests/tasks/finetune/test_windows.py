"""Texts that are longer than the model are read in windows: in training, in scores and in every prediction."""

import json
import subprocess
import sys

import numpy as np
import pytest
from scipy.special import softmax
from support.metrics import scores_of
from support.runs import assert_same_end, continues_bit_for_bit, last_line, lines_of
from support.tiny_models import OTHERS, TINY, metrics_of, write_model, write_reviews

import bert_cli
from bert_cli.cli import main
from bert_cli.train.checkpoint import best_checkpoint

LENGTH, STRIDE = 16, 6
WINDOWS = ["--max-seq-length", str(LENGTH), "--doc-stride", str(STRIDE)]
FLAGS = [
    "--global-batch.micro-batch-size", "8", "--global-batch.grad-acc-steps-per-replica", "2",
    "--optimizer-opts.learning-rate.max-learning-rate", "0.003", "--log-every-steps", "100",
    "--num-epochs", "1", "--cache-dir", "null", "--keep-checkpoints", "99",
]  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    base = tmp_path_factory.mktemp("windows")
    write_model(base / "model", TINY.model_copy(update={"num_hidden_layers": 1}))
    write_reviews(base / "train.csv", 96)
    write_reviews(base / "dev.csv", 41, seed=1)
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


def train(base, command, run, *more):
    assert main(arguments(base, command, run, *more)) == 0
    return base / run


@pytest.fixture(scope="module")
def trained(base):
    return train(base, "classify", "run", *WINDOWS, "--checkpoint-every-steps", "4")


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


def test_a_text_has_the_mean_logits_of_its_windows_and_counts_once(trained, capsys):
    rows = lines_of(trained / "predictions.jsonl")
    assert (
        len(rows) == 41
        and json.loads((trained / "scores.json").read_text())["intervals"]["accuracy"]["n"] == 41
    )
    right = [row["label"] == row["predicted"] for row in rows]
    assert scores_of(trained)["accuracy"] == np.mean(right)
    best = best_checkpoint(trained)
    expected = softmax(in_torch(best, [row["text"] for row in rows]), -1)
    assert max(len(row["text"].split()) for row in rows) > 2 * LENGTH
    printed = [row["probability"] for row in rows]
    np.testing.assert_allclose(printed, expected.max(1), atol=1e-5)


def test_scoring_and_an_average_read_the_windows_of_the_training(base, trained, capsys):
    words = ["classify", "--no-do-training", "--validation-file", base / "dev.csv"]
    words += ["--pretrained-ckpt-path", trained, "--save-ckpt-path", base / "scored"]
    assert main([*map(str, words), "--cache-dir", "null"]) == 0
    assert f"doc_stride is {STRIDE}, as in the training of" in capsys.readouterr().out
    assert scores_of(base / "scored") == scores_of(trained)
    assert main(["average", str(trained), str(base / "average"), "--last", "2"]) == 0
    assert not (base / "average" / "decision.json").exists()
    capsys.readouterr()
    text = lines_of(trained / "predictions.jsonl")[0]["text"]
    assert main(["predict", str(base / "average"), text]) == 0
    row = json.loads(capsys.readouterr().out)
    expected = softmax(in_torch(base / "average", [text])[0])
    np.testing.assert_allclose([*row["probabilities"].values()], expected, atol=1e-5)


@pytest.mark.parametrize("name", ["run", "exported"])
def test_every_prediction_reads_the_windows_of_the_run(name, base, exported, capsys, tmp_path):
    texts = [row["text"] for row in lines_of(base / "run" / "predictions.jsonl")]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    capsys.readouterr()
    assert main(["predict", str(base / name), "--input", str(tmp_path / "texts.txt")]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert not any("truncated" in row for row in rows)
    expected = softmax(in_torch(exported, texts), -1)
    found = [list(row["probabilities"].values()) for row in rows]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert bert_cli.load(base / name).label(texts[:3]) == rows[:3]
    assert "warning" not in capsys.readouterr().err


@pytest.mark.slow
def test_short_texts_are_read_as_without_windows(base, capsys):
    plain, windows = (
        train(base, "classify", run, "--max-seq-length", "64", *more)
        for run, more in (("plain", []), ("short", ["--doc-stride", "20"]))
    )
    assert_same_end(windows, plain)
    for file in ("predictions.jsonl", "confusion.json"):
        assert (windows / file).read_bytes() == (plain / file).read_bytes()
    # A model that was trained without windows truncates, unless windows are asked for.
    words = ["predict", str(plain), "good fine plot " * 30]
    capsys.readouterr()
    assert main(words) == 0
    assert last_line(capsys)["truncated"]
    assert main([*words, "--doc-stride", "20"]) == 0
    assert "truncated" not in last_line(capsys)


def test_a_stopped_run_continues_bit_for_bit(base, trained):
    words = arguments(base, "classify", "run", *WINDOWS, "--checkpoint-every-steps", "4")
    continues_bit_for_bit(trained, lambda run: main([*words, "--save-ckpt-path", str(run)]), 4)
    assert main([*words, "--doc-stride", "7"]) == 4, "other examples are another run"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["classify", "ner"])
def test_every_layout_and_engine_trains_and_scores_the_same(command, base):
    head = 'pool","glue_head' if command == "classify" else "token_head"
    stages = f'[["emb"],["hid"],["{head}"]]'
    expected = train(base, command, f"{command}_one", *WINDOWS)
    for name, flags in (
        ("replicas", ["--global-batch.replicas", "2", "--global-batch.grad-acc-steps-per-replica", "1"]),
        ("stages", ["--parallel.pipeline-stages", stages, "--parallel.pipeline-device-mapping", "[0,0,0]"]),
        ("jax", ["--engine", "jax"]),
    ):  # fmt: skip
        run = f"{command}_{name}"
        words = [sys.executable, "-m", "bert_cli", *arguments(base, command, run, *WINDOWS, *flags)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        for mine, other in zip(metrics_of(base / run), metrics_of(expected), strict=True):
            assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5), name
        assert scores_of(base / run) == pytest.approx(scores_of(expected), abs=1e-6), name


def test_words_are_labelled_in_windows_as_bert_predict_labels_them(base, capsys):
    run = train(base, "ner", "ner", *WINDOWS, "--num-epochs", "3")
    assert "12 sentences longer than max_seq_length, read in windows" in capsys.readouterr().out
    blocks = (run / "predictions.conll").read_text().strip().split("\n\n")
    words, _, predicted = zip(*(line.split() for line in blocks[0].splitlines()), strict=True)
    assert len(blocks) == 12 and len(words) == 50
    assert main(["predict", str(run), " ".join(words)]) == 0
    row = last_line(capsys)
    assert tuple(word["label"] for word in row["words"]) == predicted


def test_windows_that_would_skip_text_are_refused(trained, capsys):
    words = ["predict", str(trained), "good", "--max-seq-length", "16", "--doc-stride", "14"]
    assert main(words) == 2
    assert "16 leaves 13 tokens of a text after the special tokens" in capsys.readouterr().err
