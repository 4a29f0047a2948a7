"""Sentences to records: groups of files, contents, equal bytes, rejections; `test_recipe` judges pairs and masks."""

import gzip
import hashlib
import json
import random
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from support.corpora import payloads

from bert_cli.config.data import TokenizeSettings
from bert_cli.data.examples.inspect import unmasked
from bert_cli.data.io.files import Part, Reading, recognise
from bert_cli.data.io.inputs import open_sentences
from bert_cli.data.io.manifest import read_manifest
from bert_cli.data.records import tokenize
from bert_cli.data.records.corpus import read_corpus
from bert_cli.data.records.formats import parse_dynamic, parse_static
from bert_cli.data.records.index import read_index
from bert_cli.data.records.tokenize import encode_parts, plan_groups
from bert_cli.data.steps.tokenize import run
from bert_cli.data.tokens.encoder import Encoder
from bert_cli.data.tokens.tokenizer import (
    Normalization,
    read_vocabulary,
    tokenizer_config,
    write_vocabulary,
)
from bert_cli.errors import DataError

S, P = 64, 10
SYLLABLES = ["ba", "ke", "lo", "mi", "nu", "ra", "si", "to", "va", "zu"]
WORDS = [a + b for a in SYLLABLES for b in SYLLABLES]
PIECES = [
    *["[unused0]", "[PAD]", "[UNK]", "[MASK]", "[CLS]", "[SEP]"],
    *[".", ",", "[", "]", "sep", "cls"],
    *[w for w in WORDS if not w.endswith("zu")],
    *["##zu", *SYLLABLES],
]


def write_text(folder):
    draw = random.Random(0)
    folder.mkdir()
    for number in range(3):
        lines = []
        for _ in range(20):
            for _ in range(draw.randint(2, 40)):
                words = draw.choices(WORDS, k=draw.randint(6, 30))
                lines.append(" ".join(words).capitalize() + ".")
            lines.append("")
        (folder / f"text_{number:02d}").write_text("\n".join(lines), encoding="utf-8")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenize")
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    write_text(folder / "sentences")
    return folder


def make(home, out, **changed):
    settings = {"input": home / "sentences", "vocab": str(home / "vocab.txt"), "processes": 1}
    settings |= {"sequence_length": S, "mask_tokens": P} | changed
    run(TokenizeSettings(out=out, **settings))
    return out


@pytest.fixture(scope="module")
def static(home):
    return make(home, home / "static")


def content(folder):
    """Return the bytes of every file but the manifest, which has times in it."""
    paths = filter(Path.is_file, folder.iterdir())
    return {path.name: path.read_bytes() for path in paths if path.name != "manifest.json"}


# --- which files are a group


def planned_groups(source):
    return plan_groups(open_sentences(source, source.parent / "out"))


def names(planned):
    return [[part.path.name for part in shard.arguments["parts"]] for shard in planned]


def write_manifest(folder, counts):
    shards = [{"output": name, "documents": count} for name, count in counts.items()]
    (folder / "manifest.json").write_text(
        json.dumps({"format": 1, "step": "preprocess", "shards": shards})
    )


def test_the_manifest_says_which_files_have_one_document(home, tmp_path, capsys):
    for n in range(3):
        (tmp_path / f"text_0{n}").write_text("ba ke\n\nlo mi\n")
    (tmp_path / "empty").write_text("")
    write_manifest(tmp_path, {"text_00": 2, "text_01": 2, "text_02": 1, "empty": 0})
    planned, (note,) = planned_groups(tmp_path)
    assert names(planned) == [["text_00"], ["text_01", "text_02"]]
    assert note.startswith(f"{tmp_path / 'text_02'}: has fewer than two documents")
    out = make(home, tmp_path / "out", input=tmp_path, mask_tokens=5)
    assert read_manifest(out)["notes"] == [note]
    assert f"tokenize: {note}" in capsys.readouterr().out
    write_manifest(tmp_path, {"text_00": 1, "text_01": 3, "text_02": 3})
    for source in (tmp_path, tmp_path / "text_00"):  # alone, it has no group to join
        if source.is_file():
            for name in ("text_01", "text_02", "empty"):
                (tmp_path / name).unlink()
            write_manifest(tmp_path, {"text_00": 1})
        problem = r"text_00 \(1 document in the group\).* or pass --no-nsp"
        with pytest.raises(DataError, match=problem):
            planned_groups(tmp_path)


def test_only_text_with_one_sentence_on_each_line_is_read(tmp_path):
    article = '<doc id="1" url="" title="A">\nA\n\nText.\n</doc>\n'
    row = '{"text": "One."}\n'
    for name, data, kind, remedy in (
        ("a", article.encode(), "wikiextractor", "run `bert preprocess` on it"),
        ("a.jsonl", row.encode(), "json-lines", "run `bert preprocess` on it"),
        ("a.csv", b"text\nOne.\n", "csv", "run `bert preprocess` on it"),
        ("a.gz", gzip.compress(b"One."), "gzip", "unpack it"),
    ):
        (tmp_path / name).write_bytes(data)
        problem = f"{name}: is {kind}, not plain text with one .*; {remedy} first"
        with pytest.raises(DataError, match=problem):
            open_sentences(tmp_path / name, tmp_path / "out")
    # The first sentence of a step that splits sentences may begin like JSON.
    (tmp_path / "split").mkdir()
    (tmp_path / "split/text_00").write_text(row)
    write_manifest(tmp_path / "split", {"text_00": 2})
    assert open_sentences(tmp_path / "split", tmp_path / "out").parts[0].format == "plain"


# --- from text to groups


def documents(count, seed=0, most=30):
    draw = random.Random(seed)
    return [
        [" ".join(draw.choices(WORDS, k=draw.randint(1, 12))) for _ in range(draw.randint(1, most))]
        for _ in range(count)
    ]


def documents_of(parts):
    encoder = Encoder({word: n for n, word in enumerate(["[UNK]", *WORDS])}, Normalization())
    group = encode_parts(parts, encoder)
    ends = group.sentences.tolist()
    lines = [" ".join(WORDS[t - 1] for t in group.tokens[a:b]) for a, b in pairwise(ends)]
    return [lines[a:b] for a, b in pairwise(group.documents.tolist())]


def test_a_large_file_becomes_several_groups_whose_names_sort_in_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize, "RANGE_BYTES", 20)
    monkeypatch.setattr("bert_cli.data.io.documents.BLOCK_BYTES", 50)
    expected = documents(1500, most=2)
    (tmp_path / "a").write_text("\n\n".join("\n".join(lines) for lines in expected))
    planned, notes = planned_groups(tmp_path / "a")
    outputs = [shard.output.name for shard in planned]
    assert len(outputs) > 1000 and notes == [] and sorted(outputs) == outputs
    assert outputs[0] == "wiki_0000.tfrecord"
    parts = [part for shard in planned for part in shard.arguments["parts"]]
    found = documents_of(parts)
    assert found == expected


def test_blank_lines_and_the_ends_of_files_end_documents(tmp_path):
    (tmp_path / "a").write_bytes(b"\n\nbake\nlomi\r\n\r\n \t\n\nnura\n\x0c\nsito")
    (tmp_path / "b").write_text("vaba\n\u200b\nkelo\n\n\u200b\n\n", encoding="utf-8")
    parts = [recognise(tmp_path / name, Reading()) for name in "ab"]
    # A line of removed characters alone is no sentence and ends nothing.
    assert documents_of(parts) == [["bake", "lomi"], ["nura"], ["sito"], ["vaba", "kelo"]]
    (tmp_path / "c").write_text(" \n\n")
    assert documents_of([Part(tmp_path / "c", "plain", "", 3)]) == []


# --- what is in the records


def test_the_folder_holds_records_indexes_tokenizer_and_a_description(home, static):
    names = {path.name for path in static.iterdir() if not path.name.startswith(".")}
    records = {f"wiki_00{n}.{kind}" for n in range(3) for kind in ("tfrecord", "index")}
    others = {"vocab.txt", "tokenizer_config.json", "corpus.json", "corpus.offsets"}
    assert names == records | others | {"manifest.json"}
    assert all(read_index(path) is not None for path in static.glob("*.tfrecord"))
    corpus, vocabulary = read_corpus(static), read_vocabulary(static / "vocab.txt")
    expected = {
        "format": 1,
        "masking": "static",
        "sequence_length": S,
        "mask_tokens": P,
        "token_bytes": 2,
    }
    expected |= {"special_ids": {"pad": 1, "unk": 2, "cls": 4, "sep": 5, "mask": 3}}
    expected |= {"vocab_size": len(PIECES), "vocab_sha256": vocabulary.sha256}
    assert {name: corpus[name] for name in expected} == expected
    manifest = read_manifest(static)
    assert (manifest["counts"]["records"], manifest["counts"]["documents"]) == (3003, 60)
    assert manifest["settings"]["duplication_factor"] == 5


def test_dynamic_records_hold_each_pair_once_and_unmasked(home):
    dynamic = make(home, home / "dynamic", masking="dynamic")
    corpus = read_corpus(dynamic)
    records = parse_dynamic(payloads(dynamic), corpus["token_bytes"])
    assert len(records.lengths) == corpus["records"]
    # One copy of static records has the same pairs in the same order.
    once = make(home, home / "once", duplication_factor=1)
    columns = parse_static(payloads(once), S, P)
    is_token = columns["input_mask"] == 1
    assert np.array_equal(is_token.sum(axis=1), records.lengths)
    assert np.array_equal(unmasked(columns)[is_token], records.tokens)
    first_lengths = records.lengths - columns["segment_ids"].sum(axis=1)
    assert np.array_equal(first_lengths, records.first_lengths)
    assert np.array_equal(columns["next_sentence_labels"], records.next_sentence_labels)


def test_the_vocabularys_folder_decides_about_case_accents_and_chinese_characters(home, tmp_path):
    import transformers

    words = ["Über", "über", "uber", "日本", "日", "本", "b", "##b"]
    data = "".join(f"{piece}\n" for piece in [*PIECES, *words]).encode()
    text = ["Über 日本 bb", "uber 日本 b", "ÜBER b"]
    (tmp_path / "a").write_text("\n".join(text) + "\n\n" + "\n".join(text) + "\n")
    same = {"input": tmp_path / "a", "nsp": False, "masking": "dynamic"}
    changes = ({}, {"cased": True}, {"strip_accents": False}, {"split_chinese": False})
    for number, more in enumerate(changes):
        vocab, out = tmp_path / f"vocab{number}", tmp_path / f"out{number}"
        vocab.mkdir()
        write_vocabulary(vocab, data, Normalization(**more))
        make(home, out, vocab=str(vocab), cased="cased" in more, **same)
        theirs = transformers.AutoTokenizer.from_pretrained(out)
        assert ("Über" in theirs.tokenize("Über")) == ("cased" in more)
        expected = {number for line in text for number in theirs(line)["input_ids"]}
        records = parse_dynamic(payloads(out), read_corpus(out)["token_bytes"])
        assert set(records.tokens.tolist()) == expected
        assert read_corpus(out)["tokenizer"] == tokenizer_config(Normalization(**more))
        settings = read_manifest(out)["settings"]
        expected = {"cased": False, "strip_accents": None, "split_chinese": None, **more}
        assert {name: settings.get(name) for name in expected} == expected
    write_vocabulary(vocab, data, Normalization())
    with pytest.raises(DataError, match="split_chinese was False, now the default"):
        make(home, out, vocab=str(vocab), **same)


def test_a_vocabulary_of_more_than_65536_pieces_takes_four_bytes(home, tmp_path):
    vocab = tmp_path / "vocab.txt"
    others = (f"w{n}" for n in range(65_537 - len(PIECES)))
    vocab.write_text("\n".join([*PIECES[:6], *others, *PIECES[6:]]))
    out = make(home, tmp_path / "d", vocab=str(vocab), masking="dynamic")
    assert read_corpus(out)["token_bytes"] == 4
    assert parse_dynamic(payloads(out), 4).tokens.max() == 65_536


def test_the_records_of_a_seed_never_change(static, pins):
    digest = hashlib.sha256(b"".join(payloads(static))).hexdigest()
    assert digest == pins["static records"]


def test_the_bytes_depend_on_the_seed_and_not_on_processes_or_a_second_run(
    home, static, tmp_path, capsys
):
    ours = content(static)
    out = make(home, tmp_path / "two", processes=2)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[0].startswith("tokenize: plan: ")
    assert re.match(r"tokenize: 60 documents, [\d,]+ sentences, [\d,]+ records", lines[1])
    assert content(out) == ours
    # A second run makes only what is lost.
    time = (out / "wiki_000.tfrecord").stat().st_mtime_ns
    (out / "wiki_001.tfrecord").unlink()
    make(home, out)
    assert content(out) == ours
    assert (out / "wiki_000.tfrecord").stat().st_mtime_ns == time
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join([*PIECES, "more"]))
    for name, value in (("random_seed", 7), ("vocab", str(vocab))):
        with pytest.raises(DataError, match=name):
            make(home, out, **{name: value})
    other = content(make(home, tmp_path / "out", random_seed=1))
    names = [name for name in sorted(other) if name.endswith(".tfrecord")]
    assert names == [name for name in sorted(ours) if name.endswith(".tfrecord")]
    assert all(other[name] != ours[name] for name in names)


def test_bad_input_is_rejected_and_leaves_no_records(home, tmp_path):
    folder, out = tmp_path / "sentences", tmp_path / "out"
    folder.mkdir()
    (folder / "text_00").write_text("")
    with pytest.raises(DataError, match="has no file with text; use files with text"):
        make(home, out, input=folder)
    assert not out.exists()
    (folder / "text_00").write_text("ba ke.\nlo mi.\n")
    (folder / "text_01").write_text("nu ra.\nsi to.\n\nva.\n")
    with pytest.raises(DataError, match=r"text_00 \(1 document in the group\).*join the file"):
        make(home, out, input=folder)
    assert not list(out.glob("*.tfrecord")) and not (out / "manifest.json").exists()
