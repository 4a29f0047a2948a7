"""`bert pack`: packs of both kinds hold the sequences and masks of their records, and a run can read them."""

import json
from itertools import accumulate

import numpy as np
import pytest
from support.corpora import (
    PIECES,
    WORDS,
    P,
    S,
    by_content,
    dynamic_records,
    examples_of,
    make_corpus,
    masked_examples,
    open_stream,
    sequences_of,
    static_examples,
    write_folder,
)

from bert_cli.config.data import IndexSettings, Masking, PackSettings, packed_predictions
from bert_cli.data.examples import pack
from bert_cli.data.records import index
from bert_cli.data.records.corpus import read_corpus
from bert_cli.data.records.formats import static_payloads
from bert_cli.errors import DataError

COUNTS = [100, 7, 0, 142, 1]
WIDE = 2 * S


def make_records(folder, kind, **changes):
    if kind == "dynamic":
        return make_corpus(folder, kind, COUNTS, **changes)
    shards = []
    for first, count in zip(accumulate([0, *COUNTS]), COUNTS, strict=False):
        examples = masked_examples(dynamic_records(first, count), S, P, WORDS) if count else None
        shards.append(static_payloads(examples) if examples else ())
    return write_folder(folder, kind, shards, PIECES, **changes)


KINDS = ("static", "dynamic")


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    home = tmp_path_factory.mktemp("corpora")
    return {kind: make_records(home / kind, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def packed(corpora):
    """The records of each kind in packs of up to three."""
    out = {kind: folder.with_name(f"{kind}_packed") for kind, folder in corpora.items()}
    for kind, folder in corpora.items():
        pack.run(settings_of(folder, out[kind]))
    return out


def settings_of(folder, out, **changes):
    settings = {"sequence_length": WIDE, "max_sequences_per_pack": 3, "processes": 1} | changes
    return PackSettings(input=folder, out=out, **settings)


def open_reader(folder, **settings):
    return open_stream(folder, examples=8, **settings)


def epoch_of(reader, epoch):
    return reader.rows(np.arange(reader.epoch_size) + epoch * reader.epoch_size)


def assert_same_examples(packs, plain, epoch):
    examples = examples_of(epoch_of(plain, epoch))
    assert by_content(sequences_of(epoch_of(packs, epoch))) == by_content(examples)


@pytest.mark.parametrize("kind", KINDS)
def test_packs_hold_every_sequence_once_with_the_masks_of_the_unpacked_records(
    corpora, packed, kind
):
    packs, plain = open_reader(packed[kind]), open_reader(corpora[kind])
    assert packs.source.max_sequences_per_pack == 3
    assert packs.source.sequences == plain.epoch_size == 250
    assert 250 / 3 <= packs.epoch_size < 170
    for epoch in (0, 3):
        assert_same_examples(packs, plain, epoch)
        rows = epoch_of(packs, epoch)
        assert rows["input_ids"].shape == (packs.epoch_size, WIDE)
        assert rows["masked_lm_ids"].shape[1] == packed_predictions(WIDE, 3, P, 0.15)
        counts = rows["input_mask"].max(axis=1)
        assert np.array_equal(rows["next_sentence_weights"], np.arange(3) < counts[:, None])
        stored = packs.source.corpus["real_token_fraction"]
        assert (rows["input_mask"] > 0).mean() == pytest.approx(stored)
    if kind == "dynamic":
        masking = Masking(unit="word", probability=0.4)
        packs = open_reader(packed[kind], masking=masking, sequence_length=WIDE + 8)
        assert_same_examples(packs, open_reader(corpora[kind], masking=masking), 2)


@pytest.mark.parametrize("kind", KINDS)
def test_corpus_and_manifest_describe_the_packs(corpora, packed, kind, capsys):
    out = packed[kind]
    corpus, before = read_corpus(out), read_corpus(corpora[kind])
    same = ("format", "vocab_sha256", "special_ids", "masked_lm_prob", "tokenizer", "mask_tokens")
    expected = {key: before[key] for key in same}
    expected |= {"max_sequences_per_pack": 3, "sequences": 250, "sequence_length": WIDE}
    assert {name: corpus[name] for name in expected} == expected
    names = {file["name"] for file in corpus["files"]}
    assert names == {f"wiki_{number:03}.tfrecord" for number in (0, 1, 3, 4)}
    for name in ("vocab.txt", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (corpora[kind] / name).read_bytes()
    assert json.loads((out / "manifest.json").read_text())["counts"]["sequences"] == 250
    index.run(IndexSettings(folder=out, processes=1))
    assert read_corpus(out) == corpus
    path = out / "corpus.json"
    written = path.read_text()
    older = {"real_token_fraction": "real_token_share", "other_files": "beside"}
    path.write_text(json.dumps({older.get(key, key): value for key, value in corpus.items()}))
    assert read_corpus(out) == corpus
    index.run(IndexSettings(folder=out, processes=1))
    assert path.read_text() == written
    capsys.readouterr()
    pack.run(settings_of(corpora[kind], out))  # everything is complete
    line = f"pack: 250 sequences in {corpus['records']} packs of at most 3; "
    printed = capsys.readouterr().out
    assert line in printed and f" of the {WIDE} positions hold a token" in printed


def test_the_bytes_depend_on_the_seed_and_not_on_the_processes(corpora, packed, tmp_path):
    def content(folder):
        return [path.read_bytes() for path in sorted(folder.glob("[cw]*"))]

    expected = content(packed["dynamic"])
    pack.run(settings_of(corpora["dynamic"], tmp_path / "b", processes=2))
    assert content(tmp_path / "b") == expected
    pack.run(settings_of(corpora["dynamic"], tmp_path / "c", random_seed=1))
    assert content(tmp_path / "c") != expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_corpus_without_pairs_or_of_unknown_masks_stays_one(tmp_path, kind):
    unknown = {"masked_lm_prob": None} if kind == "static" else {}
    folder = make_records(tmp_path / kind, kind, next_sentence=False, **unknown)
    pack.run(settings_of(folder, tmp_path / "packed"))
    packs, plain = open_reader(tmp_path / "packed"), open_reader(folder)
    for reader in (packs, plain):
        assert not epoch_of(reader, 0)["next_sentence_weights"].any()
        assert not reader.has_next_sentences
    assert_same_examples(packs, plain, 0)
    if kind == "static":
        assert epoch_of(packs, 0)["masked_lm_ids"].shape[1] == 3 * P


def test_records_that_cannot_be_packed_are_rejected(corpora, packed, tmp_path):
    folder, out = corpora["dynamic"], tmp_path / "out"
    examples = static_examples(0, 20)
    examples["input_mask"][7, 3] = 0
    gaps = write_folder(tmp_path / "gaps", "static", [static_payloads(examples)], PIECES)
    wrong = make_records(tmp_path / "wrong", "static", masked_lm_prob=0.001)
    for source, to, changes, message in (
        (folder, out, {"sequence_length": 8}, r"sequence_length \(8\): .* 16 positions"),
        (folder, folder / "packed", {}, r"out \(.*\): is inside"),
        (packed["static"], out, {}, r"is packed already, with up to 3 sequences"),
        (gaps, out, {}, r"tfrecord \(record 7, counted from 0\): input_mask has padding"),
        (wrong, tmp_path / "none", {"sequence_length": 4 * S}, "masked positions.*: is more than"),
        (folder, packed["dynamic"], {"max_sequences_per_pack": 2}, "was 3, now 2"),
    ):
        with pytest.raises(DataError, match=message):
            pack.run(settings_of(source, to, **changes))
    with pytest.raises(DataError, match=r"\(2\): .* have 3; use 3"):
        open_reader(packed["static"], max_sequences_per_pack=2)
    with pytest.raises(DataError, match=r"max_seq_length \(16\): .* have 32;"):
        open_reader(packed["static"], sequence_length=S)
