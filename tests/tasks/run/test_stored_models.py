"""Models on disk: what reads a checkpoint verifies it, and a vocabulary may have padding rows."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow  # noqa: F401 (before conftest.py cuts the CPU into devices)
from safetensors.numpy import load_file
from support.tiny_models import (
    PIECES,
    SENTENCES,
    TINY,
    pretrain_words,
    write_model,
    write_records,
)

from bert_cli.cli import main
from bert_cli.data.tokens.tokenizer import TokenizerFolder
from bert_cli.errors import ConfigError
from bert_cli.tasks.model import models
from bert_cli.tasks.run import start
from bert_cli.train.checkpoint import MODEL, complete_checkpoints


def bert(*words: object) -> int:
    return main([*map(str, words)])


def pretrain(home: Path, run: Path, *words: object, model: object = False) -> int:
    return main(pretrain_words(home, run, *words, pretrained_ckpt_path=model))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder with a model and records of its tokenizer."""
    home = tmp_path_factory.mktemp("start")
    write_model(home / "model")
    write_records(home / "records", SENTENCES, home / "model")
    return home


@pytest.mark.parametrize("scaling", ["unit", None])
def test_the_line_of_a_start_names_scaling_new_and_unloaded_weights(scaling, home, monkeypatch):
    source = models.find_source(str(home / "model"))
    source = replace(source, described=source.described | {"scaling": scaling}, replaced={7: [1]})
    monkeypatch.setattr(start, "load_weights", lambda *_, **__: (["pool", "heads"], ["glue_head"]))
    order = SimpleNamespace(bert_config=source.config, unit_scaling=None)
    expected = [f"starts from the weights in {home / 'model'}", "trained with scaling unit"]
    expected += [
        "1 new piece, each starting as the mean of the embeddings of the pieces it replaces"
    ]
    expected += ["new weights from the seed: pool, heads", "not loaded: glue_head"]
    if scaling is None:
        del expected[1]
    assert start.load_pretrained(source, order, {}).split("; ") == expected
    order.unit_scaling = "unit"
    monkeypatch.setattr(start, "factors_of", lambda order: {})
    if scaling is None:
        with pytest.raises(ConfigError, match=r"model/config.json were trained with no scaling"):
            start.load_pretrained(source, order, {})
    else:
        assert start.load_pretrained(source, order, {}).split("; ") == expected


# --- vocabularies with padding rows

ROWS = len(PIECES)
PADDED = ROWS + 6


@pytest.fixture(scope="module")
def padded(home):
    """Return a model with six rows more than its tokenizer has pieces."""
    return write_model(home / "padded", TINY.model_copy(update={"vocab_size": PADDED}))


def rows_of(model: Path) -> set[int]:
    """Return the rows of a model according to its config, its word embeddings and its output bias."""
    tensors = load_file(model / MODEL)
    names = "bert.embeddings.word_embeddings.weight", "cls.predictions.bias"
    config = json.loads((model / "config.json").read_text())
    return {config["vocab_size"], *(len(tensors[name]) for name in names)}


def test_a_padded_model_is_trained_further_and_stays_padded(home, padded, tmp_path, capsys):
    assert pretrain(home, tmp_path / "run", model=padded) == 0
    printed = capsys.readouterr().out
    message = f"bert_config.vocab_size: {PADDED}, and the records have {ROWS} tokens; 6 rows of"
    assert f"{message} the word embeddings are padding" in printed
    saved = complete_checkpoints(tmp_path / "run")[-1]
    assert rows_of(saved) == {PADDED}
    assert (saved / "vocab.txt").read_text().split() == PIECES
    # Opened by transformers and compared, output by output.
    assert bert("export", saved, tmp_path / "export", "--format", "hf") == 0
    # Any number in the settings: the model's rows decide, and the same command continues.
    sized = ["--bert-config.vocab-size", ROWS]
    assert pretrain(home, tmp_path / "run", *sized, model=padded) == 0
    printed = capsys.readouterr().out
    assert "nothing to do" in printed
    assert f"bert_config.vocab_size: {PADDED}, as in the model, instead of {ROWS}" in printed


@pytest.mark.parametrize("new", [2, 9])
def test_new_pieces_replace_padding_rows_first(new, padded, tmp_path):
    words = [f"good{number}" for number in range(new)]
    (tmp_path / "vocab.txt").write_text("".join(f"{piece}\n" for piece in [*PIECES, *words]))
    source = models.find_source(str(padded))
    extended, before = models.extended(source, TokenizerFolder(tmp_path)), source.tensors()
    assert extended.config.vocab_size == max(PADDED, ROWS + new)
    for name, value in extended.tensors().items():
        if len(value) == len(before[name]) != PADDED:
            continue
        rows = before[name]
        assert len(value) == extended.config.vocab_size
        assert np.array_equal(value[:ROWS], rows[:ROWS])
        assert np.array_equal(value[ROWS + new :], rows[ROWS + new :])
        parts = [PIECES.index("good"), PIECES.index("##1")]
        np.testing.assert_allclose(value[ROWS + 1], rows[parts].mean(0), rtol=1e-6)
