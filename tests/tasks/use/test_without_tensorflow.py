"""Everything but TensorFlow's own formats, with engine jax, in a process in which TensorFlow cannot be imported."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.metrics import scores_of
from support.tiny_models import TINY, TINY_RUN, flags_of, metrics_of, write_model, write_reviews

from bert_cli.cli import main
from bert_cli.config.use import PredictSettings
from bert_cli.parse.load import load
from bert_cli.tasks.use import predict

pytest.importorskip("jax")
# Runs the commands of a JSON file one after the other and prints exit code and output of each.
PROGRAM = """
import contextlib, io, json, sys
sys.modules["tensorflow"] = None  # as if it were not installed
from bert_cli.cli import main
for words in json.loads(sys.stdin.read()):
    texts = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(texts[0]), contextlib.redirect_stderr(texts[1]):
        code = main(words)
    print(json.dumps([code, *(text.getvalue() for text in texts)]), flush=True)
    if "keras" not in sys.modules:  # its failed import has chosen a backend
        for name in [name for name in sys.modules if name.startswith("keras.")]:
            del sys.modules[name]
assert not [name for name in sys.modules if name.startswith("tensorflow.")]
"""
LETTERS = ["ba", "ke", "lo", "mi", "nu", "ra", "si", "to"]
TASKS = ("pretraining", "question", "bare")
JAX = ("--engine", "jax")
NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")


def inputs_of(task: str) -> list[dict[str, str]]:
    """Return inputs of several lengths, so that batches are padded and the last one is filled up."""
    sizes = (1, 3, 2, 12, 5, 9, 3)
    texts = [f"the cat {'[MASK] ' * (n % 3)}sat on the mat {'in paris ' * n}[MASK]." for n in sizes]
    if task == "question":
        return [{"question": "where sat the cat", "context": text} for text in texts]
    return [{"text": text} for text in texts]


@pytest.fixture(scope="module")
def base(tmp_path_factory, models):
    """A folder with text, a small model, reviews, and inputs for models of each task."""
    base, draw = tmp_path_factory.mktemp("without"), random.Random(0)
    lines = [" ".join(draw.choices(LETTERS, k=draw.randint(3, 20))) + "." for _ in range(200)]
    (base / "text").mkdir()
    (base / "text" / "one.txt").write_text("\n".join([*lines[:100], "", *lines[100:]]))
    write_model(base / "model", TINY.model_copy(update={"num_hidden_layers": 1}))
    write_reviews(base / "reviews.csv", 40)
    (base / "google").mkdir()
    (base / "google" / "bert_model.ckpt.index").touch()
    for task in TASKS:
        rows = "".join(f"{json.dumps(row)}\n" for row in inputs_of(task))
        (base / f"{task}.jsonl").write_text(rows)
    return base


def predict_words(base: Path, models, task: str) -> list[str]:
    words = ["predict", str(models[task]), "--input", str(base / f"{task}.jsonl")]
    own = {"bare": ["--normalize"], "question": ["--doc-stride", "8"]}
    return [*words, "--batch-size", "2", *own.get(task, [])]


@pytest.fixture(scope="module")
def results(base, models):
    """Name of a step -> its exit code and output, all run in one process."""
    size = {"vocab": base / "vocab", "sequence-length": 16, "mask-tokens": 3}
    changes = {"generated_dataset": False, "bert_config__vocab_size": 32}
    run = flags_of(TINY_RUN, total_num_train_samples=8, **changes)
    steps = {
        "engine": ["pretrain", *run, "--dataset-dir", base / "records"],
        "export": ["export", base / "model", base / "out", "--format", "saved-model"],
        "version": ["--version"],
        "preprocess": ["preprocess", base / "text", base / "sentences"],
        "vocab": ["vocab", base / "sentences", base / "vocab", "--size", 100],
        "tokenize": ["tokenize", base / "sentences", base / "records", *flags_of(size)],
        "index": ["index", base / "records"],
        "inspect": ["inspect", base / "records"],
        "plan": ["plan", "pretrain", *run, "--dataset-dir", base / "records"],
        "pretrain": ["pretrain", *run, *JAX, "--dataset-dir", base / "records"],
        "classify": ["classify", *JAX, "--pretrained-ckpt-path", base / "model", "--num-epochs", 1],
        "google": ["predict", base / "google", "a [MASK]", *JAX],
    }
    steps["pretrain"] += ["--save-ckpt-path", base / "run", "--tensorboard-dir", base / "board"]
    steps["classify"] += ["--train-file", base / "reviews.csv", "--save-ckpt-path", base / "mine"]
    steps["classify"] += ["--max-seq-length", 32, "--held-out-fraction", 0.2]
    steps |= {task: [*predict_words(base, models, task), *JAX] for task in TASKS}
    words = json.dumps([[str(word) for word in step] for step in steps.values()])
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, input=words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(zip(steps, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "code", "message"),
    [
        ("engine", 2, "engine (tensorflow): needs TensorFlow, which is not installed; pass --engine jax"),
        ("export", 2, "bert export: needs TensorFlow, which is not installed; run `pip install -c requirements.lock"),
        ("google", 4, "bert_model.ckpt: is a TensorFlow checkpoint, and TensorFlow is not installed; run"),
    ],
)  # fmt: skip
def test_what_needs_tensorflow_is_refused_with_the_remedy(step, code, message, results):
    assert results[step][0] == code and message in results[step][2]


@pytest.mark.slow
def test_data_becomes_records_and_a_model_is_pretrained_and_fine_tuned(base, results):
    refused = ("engine", "export", "google")
    assert {code for name, (code, *_) in results.items() if name not in refused} == {0}
    assert "jax 0.10" in results["version"][1] and "static records" in results["inspect"][1]
    assert len(metrics_of(base / "run")) == 4 and [*(base / "board").glob("*tfevents*")]
    assert set(scores_of(base / "mine")) == {"accuracy", "macro_f1"}


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_predictions_are_those_of_tensorflow(task, base, models, results, capsys):
    settings, _ = load(PredictSettings, predict_words(base, models, task)[1:], "bert predict")
    predict.run(settings)
    texts = (results[task][1], capsys.readouterr().out)
    assert texts[0].count("\n") == len(inputs_of(task))
    words, expected_words = (NUMBER.sub("0", text) for text in texts)
    assert words == expected_words
    numbers, expected = (list(map(float, NUMBER.findall(text))) for text in texts)
    np.testing.assert_allclose(numbers, expected, atol=1e-5)


def test_an_engine_that_is_not_installed_is_named_with_its_extra(monkeypatch, capsys, models):
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")

    def absent(settings):
        raise ModuleNotFoundError("No module named 'jax'", name="jax")

    monkeypatch.setattr(predict, "run", absent)
    assert main(["predict", str(models["text"]), "a", *JAX]) == 2
    assert "engine (jax): needs the extra 'jax'; pip install" in capsys.readouterr().err
    assert os.environ["KERAS_BACKEND"] == "jax"
