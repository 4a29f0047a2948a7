"""A published ModernBERT with byte-level BPE: asked, continued on records of its tokenizer, and fine-tuned."""

import json

import pytest
from support.byte_level import write_modernbert, write_tokenizer
from support.hf_models import need
from support.tiny_models import (
    RUN_OF_RECORDS,
    SENTENCES,
    flags_of,
    metrics_of,
    write_reviews,
)

from bert_cli.cli import main
from bert_cli.data.records.corpus import read_corpus

RECORDS = ["--sequence-length", 32, "--mask-tokens", 8, "--masking", "dynamic", "--processes", 1]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with the published `model`, `text`, `records` of it, and a `run` that continues it on them."""
    need("torch", "transformers")
    home = tmp_path_factory.mktemp("byte_level")
    model = write_modernbert(home / "model")
    (home / "text").mkdir()
    (home / "text/a.txt").write_text("\n".join([*SENTENCES[:6], "東京 😀 はどこ?", ""] * 5))
    records = home / "records"
    assert bert("tokenize", home / "text", records, "--vocab", model, "--no-nsp", *RECORDS) == 0
    assert bert("index", records, "--vocab", model) == 0
    changes = {"pretrained-ckpt-path": model, "max-predictions-per-seq": 8, "masking.unit": "word"}
    changes |= {"dataset-dir": records, "validation-dir": records, "save-ckpt-path": home / "run"}
    assert main(["pretrain", *flags_of(RUN_OF_RECORDS | changes)]) == 0
    return home


def bert(*words):
    return main([*map(str, words)])


def test_a_run_continues_with_the_records_and_the_tokenizer_of_the_model(home, capsys):
    folder = max((home / "run").glob("step_*"))
    published = (home / "model/tokenizer.json").read_bytes()
    assert (folder / "tokenizer.json").read_bytes() == published
    corpus = read_corpus(home / "records")
    described = json.loads((folder / "config.json").read_text())
    names = {"pad": "pad", "cls": "cls", "sep": "sep", "bos": "cls", "eos": "sep"}
    for theirs, ours in names.items():
        assert described[f"{theirs}_token_id"] == corpus["special_ids"][ours] > 400
    assert (corpus["vocab_size"], described["vocab_size"]) == (508, 512)
    assert {"tokenizer.json", "tokenizer_config.json"} <= {f["name"] for f in corpus["other_files"]}
    assert metrics_of(home / "run")[-1]["validation_bits_per_byte"] > 0
    assert bert("inspect", home / "records") == 0
    shown = capsys.readouterr().out
    assert " -> " in shown and "Ġ" not in shown


def test_what_does_not_fit_is_refused_before_any_work(home, tmp_path, capsys):
    model, text = home / "model", home / "text"
    pairs = ["tokenize", text, tmp_path / "pairs", "--vocab", model, *RECORDS]
    words = ["vocab", text, tmp_path / "vocab", "--extend", model, "--size", "+9"]
    write_tokenizer(home / "larger", size=600)
    reviews = write_reviews(tmp_path / "reviews.csv", 8)
    files = ["--train-file", reviews, "--save-ckpt-path", tmp_path / "classifier"]
    larger = ["classify", "--pretrained-ckpt-path", model, "--tokenizer-path", home / "larger"]
    for line, message in (
        (pairs, "models with byte-level BPE have no sentence pairs; pass --no-nsp"),
        (words, "is byte-level BPE, and only WordPiece can be extended"),
        ([*larger, *files], "pieces): is too large for the model"),
    ):
        assert bert(*line) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "pairs").exists()
