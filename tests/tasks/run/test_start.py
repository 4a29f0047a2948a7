"""Models on disk: what reads a checkpoint verifies it, and a vocabulary may have padding rows."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow  # noqa: F401 (before conftest.py cuts the CPU into devices)
from safetensors.numpy import load_file, save_file
from support.tiny_models import (
    PIECES,
    SENTENCES,
    TINY,
    pretrain_words,
    write_model,
    write_records,
    write_reviews,
)

from bert_cli.cli import main
from bert_cli.data.tokens.tokenizer import TokenizerFolder
from bert_cli.tasks.run import models
from bert_cli.train.checkpoint import MODEL, complete_checkpoints


def bert(*words: object) -> int:
    return main([*map(str, words)])


def pretrain(home: Path, run: Path, *words: object, model: object = False) -> int:
    return main(pretrain_words(home, run, *words, pretrained_ckpt_path=model))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder with a model, records, a table of texts, and a run of two steps."""
    home = tmp_path_factory.mktemp("start")
    write_model(home / "model")
    write_records(home / "records", SENTENCES, home / "model")
    write_reviews(home / "reviews.csv", 8)
    assert pretrain(home, home / "run", model=home / "model") == 0
    return home


def readers(home: Path, model: Path, out: Path) -> dict[str, list[object]]:
    """Return command lines that read a model, or its vocabulary alone."""
    tuned = ["classify", "--train-file", home / "reviews.csv", "--num-epochs", 1]
    tuned.append("--pretrained-ckpt-path")
    return {
        "predict": ["predict", model, "good [MASK]"],
        "export": ["export", model, out / "export", "--format", "saved-model"],
        "average": ["average", model.parent, out / "mean", "--last", 2],
        "classify": [*tuned, model, "--save-ckpt-path", out / "c"],
        "tokenizer": [
            *tuned,
            home / "model",
            "--tokenizer-path",
            model,
            "--save-ckpt-path",
            out / "t",
        ],
        "tokenize": ["tokenize", home / "records_text", out / "r", "--vocab", model],
        "pretrain": pretrain_words(home, out / "p", pretrained_ckpt_path=model),
    }


@pytest.mark.parametrize("name", [MODEL, "vocab.txt", "state.json"])
def test_a_flipped_bit_is_found_by_whatever_reads_the_file(name, home, tmp_path, capsys):
    saved = complete_checkpoints(shutil.copytree(home / "run", tmp_path / "run"))[-1]
    data = bytearray((saved / name).read_bytes())
    if name == "state.json":
        data = data.replace(b'"value": 1.0', b'"value": 2.0')
    else:
        data[len(data) // 2] ^= 0x80
    (saved / name).write_bytes(data)
    commands = readers(home, saved, tmp_path)
    for unread in {MODEL: ["tokenizer", "tokenize"], "vocab.txt": ["average"]}.get(name, []):
        del commands[unread]
    for command, words in commands.items():
        capsys.readouterr()
        assert bert(*words) == 4, command
        output = capsys.readouterr()
        assert f"{saved / name}: has changed since it was saved" in output.err, command
        assert "probability" not in output.out
    # The runs that were refused have their folders and locks, and no results.
    assert not any((tmp_path / out).exists() for out in ("export", "mean", "r"))
    assert not list(tmp_path.glob("?/step_*"))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_named_with_its_file(value, home, tmp_path, capsys):
    model = shutil.copytree(home / "model", tmp_path / "model")
    tensors = load_file(model / MODEL)
    name = "bert.encoder.layer.1.output.dense.weight"
    tensors[name].flat[5] = value
    save_file(tensors, model / MODEL, metadata={"format": "pt"})
    commands = readers(home, model, tmp_path)
    for command in ("predict", "export", "classify", "pretrain"):
        assert bert(*commands[command]) == 4, command
        message = f"{model / MODEL}: {name}: has values that are not finite"
        assert message in capsys.readouterr().err, command


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_weights_of_a_dtype_that_numpy_lacks_are_named(dtype, home, tmp_path, capsys):
    model = shutil.copytree(home / "model", tmp_path / "model")
    entries, offset = {}, 0
    for name, value in load_file(model / MODEL).items():
        offsets = [offset, offset + value.size]
        entries[name] = {"dtype": dtype, "shape": value.shape, "data_offsets": offsets}
        offset += value.size
    header = json.dumps(entries).encode()
    (model / MODEL).write_bytes(len(header).to_bytes(8, "little") + header + bytes(offset))
    assert bert("predict", model, "good [MASK]") == 4
    error = capsys.readouterr().err
    assert error.startswith(f"bert: {model / MODEL}: ") and f" is {dtype}, which cannot" in error


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
    assert "nothing to do" in capsys.readouterr().out


@pytest.mark.slow
def test_settings_with_fewer_tokens_than_the_records_train_and_more_are_padding(
    home, tmp_path, capsys
):
    """The original's configs have 30,400 tokens, for records of 30,522."""
    for size, rows in ((ROWS - 20, ROWS), (PADDED, PADDED)):
        config, run = tmp_path / f"{size}.json", tmp_path / f"run{size}"
        config.write_text(json.dumps({"bert_config": {**TINY.model_dump(), "vocab_size": size}}))
        assert pretrain(home, run, "--config", config) == 0
        printed = capsys.readouterr().out
        changed = f"bert_config.vocab_size: {ROWS}, as in the records, instead of {size}"
        assert (changed in printed) == (rows != size)
        assert rows_of(complete_checkpoints(run)[-1]) == {rows}
        # Phase 2 has the same number in its config.
        assert pretrain(home, tmp_path / f"next{size}", "--config", config, model=run) == 0
        assert rows_of(complete_checkpoints(tmp_path / f"next{size}")[-1]) == {rows}


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
