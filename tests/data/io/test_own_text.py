"""Any text through the commands: every format gives the same bytes, runs continue after a kill."""

import json
import random

import numpy as np
import pytest
from support.corpora import payloads

from bert_cli.config import data
from bert_cli.data.examples.inspect import unmasked
from bert_cli.data.io import files
from bert_cli.data.io.manifest import read_manifest
from bert_cli.data.records import tokenize
from bert_cli.data.records.corpus import read_corpus
from bert_cli.data.records.formats import parse_dynamic, parse_static
from bert_cli.data.steps.preprocess import run as preprocess_text
from bert_cli.data.steps.tokenize import run as tokenize_text
from bert_cli.data.text import preprocess

WORDS = [a + b for a in ("ba", "ke", "lo", "mi", "nu") for b in ("ra", "si", "to", "va", "zu")]
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *WORDS]


def documents(count=30, seed=0):
    draw = random.Random(seed)
    sizes = [draw.randint(2, 20) for _ in range(count)]
    return [
        [" ".join(draw.choices(WORDS, k=draw.randint(3, 20))) + "." for _ in range(size)]
        for size in sizes
    ]


def plain(found):
    return "\n\n".join(map("\n".join, found)) + "\n"


def write(path, found, pack=bytes):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = "".join(json.dumps({"text": "\n".join(lines)}) + "\n" for lines in found)
    path.write_bytes(pack((rows if path.suffix == ".jsonl" else plain(found)).encode()))
    return path


def test_the_bytes_that_tell_what_a_file_is_may_end_within_a_character(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "HEAD_BYTES", 14)
    for length in range(1, 9):
        (tmp_path / "a.txt").write_text("x" * length + "\n" + "é" * 20 + "\n", encoding="utf-8")
        assert files.recognise(tmp_path / "a.txt", files.Reading()).format == "plain"


def split(source, out, processes=1, **settings):
    settings = {"sentence_splitter": "lines", **settings}
    preprocess_text(data.PreprocessSettings(input=source, out=out, processes=processes, **settings))
    return "\n".join(path.read_text() for path in sorted(out.rglob("*.txt")))


@pytest.fixture
def pieces(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(PIECES) + "\n")
    return str(path)


def make(source, out, pieces, **settings):
    settings = {"processes": 1, "sequence_length": 32, "mask_tokens": 5, **settings}
    tokenize_text(data.TokenizeSettings(input=source, out=out, vocab=pieces, **settings))
    return out


def test_without_next_sentences_every_token_is_in_one_segment_and_records_say_so(tmp_path, pieces):
    expected = documents()
    source = write(tmp_path / "a", expected)
    out = make(source, tmp_path / "static", pieces, nsp=False, duplication_factor=1)
    assert read_corpus(out)["next_sentence"] is False
    assert read_manifest(out)["settings"]["nsp"] is False
    arrays = parse_static(payloads(out), 32, 5)
    ids, lengths = unmasked(arrays), arrays["input_mask"].sum(axis=1)
    assert not arrays["segment_ids"].any() and not arrays["next_sentence_labels"].any()
    words = sum(len(line.split()) + 1 for lines in expected for line in lines)
    assert lengths.sum() == words + 2 * len(lengths)

    out = make(source, tmp_path / "dynamic", pieces, nsp=False, masking="dynamic")
    records = parse_dynamic(payloads(out), 2)
    assert np.array_equal(records.first_lengths, records.lengths)
    assert np.array_equal(records.lengths, lengths)
    assert not records.next_sentence_labels.any()
    assert records.tokens.tolist() == ids[arrays["input_mask"] == 1].tolist()


def test_a_warning_names_lines_that_are_too_long_for_pairs(tmp_path, pieces, capsys):
    sentences = documents(count=10)
    lines = [[" ".join(document) for _ in range(2)] for document in sentences]
    for name, found, least, most, nsp in (
        ("sentences", sentences, 0.0, 0.3, True),
        ("single", lines, 0.0, 0.0, False),
        ("lines", lines, 0.6, 1.0, True),
    ):
        source = write(tmp_path / f"{name}.txt", found)
        make(source, tmp_path / name, pieces, sequence_length=64, mask_tokens=9, nsp=nsp)
        counts = read_manifest(tmp_path / name)["counts"]
        fraction = counts["tokens_cut"] / counts["tokens"]
        assert least <= fraction <= most
        printed = capsys.readouterr().out
        assert (f"warning: {fraction:.0%} of the tokens" in printed) == (name == "lines")
    mean = counts["tokens"] / counts["records"]
    assert f"a pair has {mean:.0f} tokens before truncation" in printed
    remedy = "run `bert preprocess` into another folder with --sentence-splitter sentencex and the "
    assert f"because lines are long; if they have several sentences, {remedy}" in printed


@pytest.fixture
def estimates(monkeypatch):
    seen, estimate = [], tokenize.bytes_written
    monkeypatch.setattr(tokenize, "bytes_written", lambda *a: seen.append(estimate(*a)) or seen[-1])
    return seen


def test_the_estimate_of_bytes_is_near_what_is_written(shared_data, tmp_path, estimates):
    source = shared_data / "text/extracted/AA/wiki_03"
    split(source, tmp_path / "sentences", sentence_splitter="sentencex")
    (wrote,) = (path.stat().st_size for path in (tmp_path / "sentences").glob("*.txt"))
    assert 0.9 < preprocess.BYTES_WRITTEN * source.stat().st_size / wrote < 1.15
    vocabulary = str(shared_data / "vocab/bert-base-uncased-vocab.txt")
    for number, settings in enumerate(({}, {"masking": "dynamic"}, {"nsp": False})):
        for length, most in ((128, 20), (512, 76)):
            out, sizes = tmp_path / f"{number}_{length}", {"mask_tokens": most, **settings}
            make(tmp_path / "sentences", out, vocabulary, sequence_length=length, **sizes)
            size = sum(path.stat().st_size for path in out.glob("*.*") if "vocab" not in path.name)
            assert 0.8 < estimates[-1] / size < 1.3, (length, estimates[-1], size)


def test_the_estimate_includes_many_short_documents(tmp_path, pieces, estimates):
    rows = [[f"{a} {b}.", f"{b} {a}."] for a in WORDS for b in WORDS]
    split(write(tmp_path / "a.jsonl", rows), tmp_path / "sentences")
    out = make(tmp_path / "sentences", tmp_path / "out", pieces)
    held = sum(path.stat().st_size for path in out.glob("wiki_*"))
    assert 0.7 < estimates[0] / held < 1.6
