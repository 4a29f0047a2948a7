"""Predictions without TensorFlow: BERT in NumPy, and an ONNX graph beside the model."""

import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.hf_models import Models, need

from bert_cli.cli import main
from bert_cli.tasks.model import models as sources
from bert_cli.tasks.model import opened, runtimes

TEXT = "the [MASK] sat on the mat in paris"
NUMPY = {
    "bare": [TEXT, "--task", "embed", "--normalize"],
    "pretraining": [TEXT],
    "masked": [TEXT],
    "text": [TEXT],
    "score": [TEXT, "--second", "a dog"],
    "token": [TEXT],
    "question": ["--question", "where sat the cat", "--context", f"{TEXT} . the dog is in france"],
}
"""Model -> the words of a prediction."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Name -> folder of a random model of transformers with a tokenizer."""
    return Models(tmp_path_factory.mktemp("models"))


def words_of(value: object) -> object:
    """Return an answer with numbers that are equal if they differ by rounding."""
    if isinstance(value, dict):
        return {name: words_of(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [words_of(inner) for inner in value]
    return pytest.approx(value, abs=2e-5) if isinstance(value, float) else value


@pytest.mark.parametrize("name", NUMPY)
def test_numpy_answers_as_tensorflow_does(name, folders, bert):
    answers = []
    for more in ([], ["--engine", "tensorflow"]):
        out, err = bert("predict", folders[name], *NUMPY[name], *more)
        assert ("by tensorflow on one CPU, float32" if more else "by NumPy;") in err
        answers.append(json.loads(out))
    assert answers[0] == words_of(answers[1])


@pytest.mark.parametrize("name", ["masked", "text"])
def test_numpy_answers_texts_of_several_threads_in_their_order(name, folders, tmp_path, bert):
    lines = [f"{TEXT} {'a dog ' * (7 * n % 11)}" for n in range(2 * runtimes.AT_ONCE + 1)]
    (tmp_path / "texts").write_text("\n".join(lines))
    words = ["predict", str(folders[name]), "--input", str(tmp_path / "texts")]
    answers = []
    for more in ([], ["--engine", "tensorflow"]):
        out, err = bert(*words, *more)
        assert more or "by NumPy; 9 inputs" in err
        answers.append([json.loads(line) for line in out.splitlines()])
    assert answers[0] == words_of(answers[1])


def test_a_model_without_segments_has_no_input_for_them():
    inputs = ["input_ids", "attention_mask", "token_type_ids"]
    for segments, expected in ((0, inputs[:2]), (1, inputs[:2]), (2, inputs), (3, inputs)):
        assert opened.inputs_of(SimpleNamespace(type_vocab_size=segments)) == expected


def test_many_texts_are_left_to_an_engine_where_one_is_installed(folders, monkeypatch):
    source = sources.find_source(str(folders["bare"]))

    def runtime(texts: int | None) -> str:
        light = runtimes.open_without_engine(source, "embed", texts)
        return light.runtime if light else "engine"

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    several = (runtimes.FEW, None, runtimes.FEW + 1)
    assert [*map(runtime, several)] == ["NumPy", "NumPy", "engine"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert [*map(runtime, several)] == ["NumPy", "engine", "engine"]
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    assert [*map(runtime, several)] == ["NumPy"] * 3


def test_a_prediction_of_one_text_loads_neither_keras_nor_tensorflow(folders):
    program = (
        "import sys; from bert_cli.cli import main; assert main(sys.argv[1:]) == 0;"
        "assert not {'keras', 'tensorflow', 'jax'} & {*sys.modules}"
    )
    words = ["predict", str(folders["text"]), TEXT]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["bert.adapter.weight", "bert.encoder.layer.0.output.dense.bias"])
def test_weights_that_do_not_fit_are_left_to_the_model_that_knows_why(name, folders, tmp_path):
    folder = shutil.copytree(folders["text"], tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = np.ones(31, np.float32)
    save_file(tensors, folder / "model.safetensors")
    source = sources.find_source(str(folder))
    assert runtimes.open_without_engine(source, "text-classification", 1) is None
    assert main(["predict", str(folder), TEXT]) == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["text", "question", "modern"])
def test_a_graph_beside_the_model_answers_many_texts_until_the_model_changes(
    name, folders, tmp_path, bert, capsys
):
    need("torch", "onnx", "onnxscript", "onnxruntime")
    model = shutil.copytree(folders[name], tmp_path / "model")
    context = {"question": "where sat the cat", "context": TEXT}
    row = json.dumps(context if name == "question" else {"text": TEXT})
    (tmp_path / "texts.jsonl").write_text(f"{row}\n" * (runtimes.FEW + 1))
    words = ["predict", str(model), "--input", str(tmp_path / "texts.jsonl")]
    assert main(["export", str(model), str(model / "onnx"), "--format", "onnx"]) == 0
    capsys.readouterr()
    answers = []
    for more, runtime in (([], "onnx, float32)"), (["--engine", "tensorflow"], "CPU, float32")):
        out, err = bert(*words, *more)
        assert f"{runtime}; {runtimes.FEW + 1} inputs" in err
        answers.append([json.loads(line) for line in out.splitlines()])
    assert answers[0] == words_of(answers[1])
    made_from = model / "onnx" / "made_from.txt"
    graph = made_from.read_text()
    assert graph.endswith(" 1.0 float32")
    for other in ("00000000 float32", graph.replace(" 1.0 ", " 2.0 ")):
        made_from.write_text(other)
        assert main(words) == 0
        not_used = "is not used: its model or this program has changed; export"
        assert not_used in capsys.readouterr().err
