"""A model from Python answers as `bert predict` does, and says what is wrong as the command does."""

import json
import subprocess
import sys

import numpy as np
import pytest
from support.answers import near

import bert_cli
from bert_cli.cli import main
from bert_cli.errors import CheckpointError, ConfigError, DataError

CONTEXT = "The cats sat on the mat. We like to eat in Paris."


@pytest.fixture
def rows(capsys, tmp_path, models):
    def predict(name: str, *objects: dict[str, str], task: str | None = None) -> list[dict]:
        path = tmp_path / "inputs.jsonl"
        path.write_text("".join(f"{json.dumps(one)}\n" for one in objects))
        task_words = [] if task is None else ["--task", task]
        words = ["predict", str(models[name]), "--input", str(path), "--engine", "tensorflow"]
        assert main([*words, *task_words]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return predict


def test_vectors_of_any_model_are_those_of_bert_predict(models, rows):
    texts = ["the cat", "a dog sat on the mat", "the cat"]
    for name in ("bare", "text"):
        assert len(bert_cli.load(models[name]).embed([])) == 0
        vectors = bert_cli.load(models[name]).embed(texts)
        printed = rows(name, *({"text": text} for text in texts), task="embed")
        expected = np.float32([row["embedding"] for row in printed])
        # NumPy's GELU is off by up to 2e-7 of its input, in each layer.
        np.testing.assert_allclose(vectors, expected, atol=3e-6)
        assert vectors.dtype == np.float32


def test_masks_labels_entities_and_answers_are_those_of_bert_predict(models, rows):
    (row,) = rows("masked", {"text": "the [MASK] sat on [MASK]"})
    assert bert_cli.load(models["masked"]).fill("the [MASK] sat on [MASK]") == near(row["masks"])
    texts = ["the cat", "a dog sat in paris"]
    objects = [{"text": text} for text in texts]
    assert bert_cli.load(models["text"]).label([]) == []
    for name in ("text", "several", "score"):
        assert bert_cli.load(models[name]).label(texts) == near(rows(name, *objects))
    pairs = [{**row, "second": "on the mat"} for row in objects]
    asked = [*objects[:1], *pairs]
    given = [texts[0], *((text, "on the mat") for text in texts)]
    assert bert_cli.load(models["text"]).label(given) == near(rows("text", *asked))
    printed = rows("token", *objects)
    entities = [row["entities"] for row in printed]
    assert bert_cli.load(models["token"]).entities(texts) == near(entities)
    (row,) = rows("question", {"question": "Where do we eat?", "context": CONTEXT})
    assert bert_cli.load(models["question"]).answer("Where do we eat?", CONTEXT) == near(row)


def test_a_mistake_is_told_as_by_the_command(models, capsys):
    model = bert_cli.load(models["text"])
    assert model.task == "text-classification"
    for call, kind, message in (
        (lambda: model.fill("a [MASK]"), ConfigError, "a model for text-classification"),
        (lambda: model.label("the cat"), ConfigError, "texts: is one text; put it into a list"),
        (
            lambda: model.label([("a", "b", "c")]),
            DataError,
            "text 1: 'second' is not a string",
        ),
        (lambda: model.embed([("a", "b")]), DataError, "'second' is not read by task embed"),
        (lambda: model.label(["the cat", " "]), DataError, "text 2: is empty"),
        (lambda: model.label(["the cat", 3]), DataError, "text 2: 'text' is not a string"),
        (lambda: bert_cli.load(models["masked"]).fill("a"), DataError, r"text 1: has no \[MASK\]"),
        (lambda: bert_cli.load("./nothing"), CheckpointError, "no such folder"),
        (
            lambda: bert_cli.load(models["plain_token"]).entities(["the cat"]),
            ConfigError,
            "the model's labels: are not labels of entities",
        ),
    ):
        with pytest.raises(kind, match=message):
            call()
    capsys.readouterr()
    row, _ = model.label(["the cat " * 30, "the cat"])
    assert row["truncated"] is True
    assert "warning: only the beginnings of 1 text were read" in capsys.readouterr().err


@pytest.mark.tensorflow
def test_the_package_loads_nothing_until_a_model_is_loaded_and_then_opens_an_index(
    models, tmp_path
):
    (tmp_path / "tea.txt").write_text("Tea is made of leaves.\n")
    index = tmp_path / "my.index"
    assert main(["search", "make", str(index), str(tmp_path / "tea.txt")]) == 0
    code = (
        "import sys, bert_cli\n"
        "assert not {'keras', 'numpy', 'pydantic'} & {*sys.modules}\n"
        f"model = bert_cli.load({str(models['bare'])!r})\n"
        "print(model.embed(['the cat']).shape)\n"
        f"print(bert_cli.open_index({str(index)!r}).ask('tea', top=10)[0].text)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "(1, 32)\nTea is made of leaves.\n")
