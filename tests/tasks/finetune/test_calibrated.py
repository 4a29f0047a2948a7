"""A classifier's probabilities are calibrated on held-out texts, in predictions and in every export alike."""

import json
import re
from contextlib import redirect_stdout
from io import StringIO

import numpy as np
import pytest
from scipy.special import softmax
from sklearn.metrics import log_loss
from support.hf_models import change_weights, need
from support.runs import lines_of
from support.tiny_models import write_base

import bert_cli
from bert_cli.cli import main
from bert_cli.data.random import chooses
from bert_cli.files import with_checksum
from bert_cli.statistics import identify
from bert_cli.tasks.use import model
from bert_cli.train.checkpoint import Folder

LONG = "--num-epochs", 20, "--evaluate-every-steps", 10**6
"""So long that the model learns the wrong labels too, and is too sure of itself."""
TEXTS = ["good plot", "bad music awful", "plot music very", "it is a fine good good bad"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model, and reviews of which a fifth have the wrong label."""
    base = write_base(tmp_path_factory.mktemp("calibrated"), train=40, dev=160)
    other = {"negative": "positive", "positive": "negative"}
    for name in ("train", "dev"):
        lines = (base / f"{name}.csv").read_text().splitlines()
        for number in range(1, len(lines), 5):
            lines[number] = re.sub("|".join(other), lambda label: other[label[0]], lines[number])
        (base / f"{name}.csv").write_text("\n".join(lines))
    return base


def arguments(base, *more):
    files = ["--train-file", base / "train.csv", "--validation-file", base / "dev.csv"]
    files += ["--pretrained-ckpt-path", base / "model", "--save-ckpt-path", base / "run"]
    rate = ["--optimizer-opts.learning-rate.max-learning-rate", "0.003"]
    return ["classify", *map(str, [*files, "--max-seq-length", 64, *rate, *more])]


@pytest.fixture(scope="module")
def printed(base):
    with redirect_stdout(StringIO()) as out:
        assert main(arguments(base, *LONG, "--cache-dir", base / "cache")) == 0
    return out.getvalue()


@pytest.fixture(scope="module")
def run(base, printed):
    return base / "run"


@pytest.fixture(scope="module")
def temperature(run):
    stored = json.loads((Folder(run).best_checkpoint / "decision.json").read_text())["temperature"]
    assert abs(stored - 1.0) > 0.1
    return stored


def logits_of(folder, texts):
    import torch
    import transformers

    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return np.stack([classifier(**tokenizer(t, return_tensors="pt")).logits[0] for t in texts])


def test_half_of_the_held_out_texts_chooses_the_temperature_and_the_other_is_reported(
    run, printed, temperature
):
    rows = lines_of(run / "predictions.jsonl")
    choosing = chooses(identify(row["text"] for row in rows).groups)
    logits = logits_of(Folder(run).best_checkpoint, [row["text"] for row in rows])
    expected = softmax(logits / temperature, 1).max(1)
    np.testing.assert_allclose([row["probability"] for row in rows], expected, atol=1e-5)
    best = [("negative", "positive")[number] for number in logits.argmax(1)]
    assert [row["predicted"] for row in rows] == best
    right = np.array([row["label"] == "positive" for row in rows]).astype(int)[choosing]
    lower, best, higher = (
        log_loss(right, softmax(logits[choosing] / (temperature * factor), 1))
        for factor in (0.98, 1.0, 1.02)
    )
    assert best < min(lower, higher)
    line = next(line for line in printed.splitlines() if line.startswith("calibration error"))
    assert f"at temperature {temperature:.4f}" in line
    assert line.endswith(f"n {(~choosing).sum()}") and "none below  answered  accuracy" in printed
    card = (Folder(run).best_checkpoint / "README.md").read_text()
    assert f"| temperature | {temperature:.4f} |" in card


def test_bert_predict_has_the_calibrated_probability_and_says_none_below_one(
    run, temperature, bert, tmp_path
):
    expected = softmax(logits_of(Folder(run).best_checkpoint, TEXTS) / temperature, 1)
    rows = bert_cli.load(run).label(TEXTS)
    found = [list(row["probabilities"].values()) for row in rows]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    level = float(np.sort(expected.max(1))[1:3].mean())
    words = ["--input", str(tmp_path / "texts.txt"), "--none-below", str(level)]
    sure = bert("predict", run, *words).rows
    for row, usual in zip(sure, rows, strict=True):
        label = usual["label"] if usual["probability"] >= level else "none"
        assert (row["text"], row["label"]) == (usual["text"], label)
        # The last bits depend on how the threads divide a product.
        assert row["probabilities"] == pytest.approx(usual["probabilities"], abs=1e-6)
    assert {row["label"] for row in sure} > {"none"}
    of_page = model.Model(str(run), none_below=level)
    answers = of_page.predict([of_page.check({"text": text}) for text in TEXTS])
    assert [row["label"] for row in answers] == [row["label"] for row in sure]


def runtime_logits(folder, form, source, texts):
    """Return the logits of an export by the runtime of its format; `source` has the tokenizer."""
    if form == "hf":
        return logits_of(folder, texts)
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    inputs = [tokenizer(text, return_tensors="np") for text in texts]
    if form == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(folder / "model.onnx")
        return np.concatenate([session.run(["logits"], dict(columns))[0] for columns in inputs])
    import tensorflow as tf

    signature = tf.saved_model.load(str(folder)).signatures["serving_default"]
    columns = [{n: tf.constant(v.astype(np.int32)) for n, v in of.items()} for of in inputs]
    return np.concatenate([signature(**of)["logits"].numpy() for of in columns])


@pytest.mark.parametrize(
    "form", ["hf", "saved-model", pytest.param("onnx", marks=pytest.mark.slow)]
)
def test_an_export_has_the_temperature_in_its_weights(form, base, run, temperature):
    if form == "onnx":
        need("torch", "onnx", "onnxscript", "onnxruntime")
    out = base / f"exported_{form}"
    assert main(["export", str(run), str(out), "--format", form]) == 0
    expected = logits_of(Folder(run).best_checkpoint, TEXTS) / temperature
    logits = runtime_logits(out, form, Folder(run).best_checkpoint, TEXTS)
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert not (out / "decision.json").exists()
    if form == "saved-model":
        return  # `bert predict` refuses it
    rows, expected_rows = (bert_cli.load(folder).label(TEXTS) for folder in (out, run))
    for row, other in zip(rows, expected_rows, strict=True):
        assert row["probabilities"] == pytest.approx(other["probabilities"], abs=1e-6)


def test_the_weights_of_a_checkpoint_stay_and_scoring_it_again_changes_nothing(
    base, run, printed, temperature, capsys
):
    before = {path: path.read_bytes() for path in Folder(run).best_checkpoint.iterdir()}
    scored = (run / "predictions.jsonl").read_bytes()
    assert main(arguments(base, *LONG, "--cache-dir", base / "cache")) == 0
    only = ["--no-do-training", "--save-ckpt-path", base / "scored", "--pretrained-ckpt-path", run]
    assert main(arguments(base, *only)) == 0
    shown = [line for line in printed.splitlines() if line.startswith("calibration error")]
    assert shown[-1] in capsys.readouterr().out
    assert before == {path: path.read_bytes() for path in Folder(run).best_checkpoint.iterdir()}
    assert scored == (run / "predictions.jsonl").read_bytes()
    rows = (lines_of(folder / "predictions.jsonl") for folder in (base / "scored", run))
    again, first = ([row["probability"] for row in part] for part in rows)
    assert again == first


def test_a_model_without_one_probable_label_or_with_a_damaged_temperature_is_refused(
    run, temperature, tmp_path, bert, capsys
):
    copied = change_weights(Folder(run).best_checkpoint, tmp_path / "copied", {})
    (copied / "decision.json").write_text(json.dumps(with_checksum({"temperature": 0.0})))
    assert "decision.json (temperature)" in bert("predict", copied, "good", code=4).err
    (copied / "decision.json").unlink()
    described = json.loads((copied / "config.json").read_text())
    described["problem_type"] = "multi_label_classification"
    (copied / "config.json").write_text(json.dumps(described))
    assert main(["predict", str(copied), "good", "--none-below", "0.5"]) == 2
    assert "none_below (0.5): needs a model for single_label" in capsys.readouterr().err
    assert "labels" in bert("predict", copied, "good").last
