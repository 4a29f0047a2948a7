"""Sources: the examples of a folder of records, and errors for damaged or impossible ones."""

import json
import os
import time

import numpy as np
import pytest
from support.corpora import (
    WORDS,
    S,
    dynamic_records,
    examples_of,
    make_corpus,
    open_stream,
    static_examples,
)

from bert_cli.config.data import IndexSettings
from bert_cli.data.examples.inspect import unmasked
from bert_cli.data.records.formats import (
    STATIC_FEATURES,
    dynamic_payloads,
    find_features,
    static_payloads,
)
from bert_cli.data.records.index import write_corpus
from bert_cli.data.records.tfrecord import RecordWriter, serialize_examples, varint
from bert_cli.data.steps import index
from bert_cli.errors import DataError
from bert_cli.facts.masking import Masking, packed_predictions


def test_dynamic_examples_are_the_pairs_with_a_mask_of_their_epoch(tmp_path):
    pairs = dynamic_records(0, 60)
    parts = np.split(pairs.tokens, np.cumsum(pairs.lengths)[:-1])
    firsts, labels = pairs.first_lengths.tolist(), pairs.next_sentence_labels.tolist()
    written = {
        tuple(part.tolist()): ((0,) * first + (1,) * (len(part) - first), label)
        for part, first, label in zip(parts, firsts, labels, strict=True)
    }
    reader = open_stream(make_corpus(tmp_path / "c", "dynamic", [60]))
    masks = []
    for epoch in range(4):
        rows = reader.rows(np.arange(60 * epoch, 60 * (epoch + 1)))
        examples = examples_of(rows | {"input_ids": unmasked(rows)})
        assert {e["tokens"]: (e["segments"], e["label"]) for e in examples} == written
        masks.append({e["tokens"]: e["masked"] for e in examples})
    changed = [tokens for tokens in written if len({mask[tokens] for mask in masks}) > 1]
    assert len(changed) > 45, "epochs have the same masks"


def test_without_a_checksum_another_vocabulary_is_noticed_where_it_decides_the_masks(tmp_path):
    words = Masking(unit="word")
    folder = make_corpus(tmp_path / "c", "dynamic", [5])
    open_stream(folder, masking=words)
    with (folder / "vocab.txt").open("a") as file:
        file.write("more\n")
    corpus = json.loads((folder / "corpus.json").read_text())
    (folder / "corpus.json").write_text(json.dumps(corpus | {"other_files": []}))
    open_stream(folder)
    with pytest.raises(DataError, match="is not the vocabulary"):
        open_stream(folder, masking=words)


def rewrite(folder, payloads):
    with RecordWriter(folder / "wiki_001.tfrecord") as writer:
        writer.write_all(iter(payloads))
    write_corpus(folder, json.loads((folder / "corpus.json").read_text()))


def with_values(**values):
    """Return static records of which number 3 has another value in each column, at an index."""
    examples = static_examples(5, 5)
    for column, (place, value) in values.items():
        examples[column].reshape(5, -1)[3, place] = value
    return list(static_payloads(examples))


def with_bytes(payloads, name, data):
    """Return records of which number 3 has other bytes in a feature."""
    payloads = list(payloads)
    dynamic = ["first_length", "next_sentence_labels", "tokens"]
    features = find_features(payloads[3:4], STATIC_FEATURES if "ids" in name else dynamic)
    kinds = {"tokens": "bytes", "masked_lm_weights": "float"}
    lists = (features | {name: [data]}).items()
    columns = [(feature, kinds.get(feature, "int64"), values) for feature, values in lists]
    payloads[3:4] = serialize_examples(columns)
    return payloads


DYNAMIC = dynamic_records(5, 5)
STATIC = list(static_payloads(static_examples(5, 5)))
ALL, TWO, REST = slice(None), slice(2), slice(4, None)
OUTSIDE = ", which is outside 0 to "
# Format of the records, records of which number 3 is wrong, and what is said of it.
WRONG = [
    ("static", with_values(input_ids=(-1, 999_999)), f"input_ids has 999999{OUTSIDE}"),
    ("static", with_values(input_ids=(-1, 2**32 + 5)), f"input_ids has 2147483647{OUTSIDE}"),
    ("static", with_values(input_mask=(-1, 2)), f"input_mask has 2{OUTSIDE}"),
    ("static", with_values(segment_ids=(-1, 7)), f"segment_ids has 7{OUTSIDE}"),
    ("static", with_values(masked_lm_positions=(-1, 500)), f"masked_lm_positions has 500{OUTSIDE}"),
    ("static", with_values(masked_lm_ids=(-1, WORDS)), f"masked_lm_ids has {WORDS}{OUTSIDE}{WORDS - 1}"),
    ("static", with_values(masked_lm_weights=(-1, np.nan)), f"masked_lm_weights has nan{OUTSIDE}"),
    ("static", with_values(next_sentence_labels=(-1, 9)), f"next_sentence_labels has 9{OUTSIDE}"),
    ("static", with_bytes(STATIC, "input_ids", varint(2**64 - 3) * S), f"input_ids has -3{OUTSIDE}"),
    ("static", with_bytes(STATIC, "input_ids", varint(7) * (S - 1)), rf".*S {S}.*input_ids has"),
    ("static", with_values(input_mask=(2, 0)), "input_mask has padding before a token; make the records again"),
    ("static", with_values(input_mask=(ALL, 0), masked_lm_weights=(ALL, 0)), "input_mask has padding before a "),
    ("static", with_values(input_mask=(REST, 0), masked_lm_positions=(0, 4), masked_lm_weights=(0, 1)),
     "masked_lm_positions names padding; "),
    ("static", with_values(masked_lm_positions=(TWO, 1), masked_lm_weights=(TWO, 1)),
     "masked_lm_positions names a position twice; "),
    *(
        ("dynamic", with_bytes(dynamic_payloads(DYNAMIC), "first_length", varint(int(DYNAMIC.lengths[3]) + more)),
        f"first_lengths has {shown}{OUTSIDE}")
        for more, shown in ((1, r"\d+"), (2**70, "2147483647"))
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "payloads", "message"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_record_is_named_by_file_number_and_problem(kind, payloads, message, tmp_path):
    """By a run and `bert index --check`; `bert index` alone does not look."""
    folder = make_corpus(tmp_path / "c", kind, [5, 5])
    rewrite(folder, payloads)
    expected = rf"wiki_001\.tfrecord \(record 3, counted from 0\): {message}"
    with pytest.raises(DataError, match=expected):
        open_stream(folder)[0]
    with pytest.raises(DataError, match=expected):
        index.run(IndexSettings(folder=folder, check=True, processes=1))
    index.run(IndexSettings(folder=folder, processes=1))


def test_dynamic_records_are_compared_with_their_description(tmp_path, capsys):
    for change, wrong in (
        ({"vocab_size": 500}, r"tokens has \d+, which is outside 0 to 499"),
        ({"sequence_length": S - 1}, r"lengths has 16, which is outside 0 to 15"),
    ):
        folder = make_corpus(tmp_path / next(iter(change)), "dynamic", [5, 5], **change)
        with pytest.raises(DataError, match=wrong):
            open_stream(folder)[0]
    folder = make_corpus(tmp_path / "c", "dynamic", [5, 5])
    index.run(IndexSettings(folder=folder, check=True, processes=1))
    assert "the values of all 10 records are valid" in capsys.readouterr().out


def test_an_impossible_offset_or_a_file_cut_during_the_run_is_an_error_and_no_crash(tmp_path):
    folder = make_corpus(tmp_path / "c", "dynamic", [20, 10])
    good = np.fromfile(folder / "corpus.offsets", "<u8")
    for record in (0, 7, 29):
        for offset in (2**63 + 5, 2**40, 1):
            offsets = good.copy()
            offsets[record] = offset
            offsets.tofile(folder / "corpus.offsets")
            with pytest.raises(DataError, match=r"run `bert index"):
                open_stream(folder, examples=30, micro=30)[0]
    offsets = good.copy()
    offsets[7] += 1
    offsets.tofile(folder / "corpus.offsets")
    problem = r"no record starts here|does not have the size of a dynamic record"
    with pytest.raises(DataError, match=problem):
        open_stream(folder, max_sequences_per_pack=2).rows(np.arange(15))
    good.tofile(folder / "corpus.offsets")
    reader = open_stream(folder, examples=30, micro=30)
    os.truncate(folder / "wiki_000.tfrecord", int(good[7]) + 3)
    starts = "|".join(map(str, good[7:20]))
    with pytest.raises(DataError, match=rf"wiki_000\.tfrecord \(byte ({starts})\)"):
        reader[0]


def test_a_million_records_give_their_first_batch_within_two_seconds_of_a_core(tmp_path):
    """Forty files of 25,000 real records; they are names of one file, so as not to fill the disk."""
    folder = make_corpus(tmp_path / "c", "dynamic", [25_000], vocab_size=25_000)
    for number in range(1, 40):
        for suffix in (".tfrecord", ".index"):
            os.link(folder / f"wiki_000{suffix}", folder / f"wiki_{number:03}{suffix}")
    write_corpus(folder, json.loads((folder / "corpus.json").read_text()))
    for text in folder.glob("*.index"):
        text.unlink()  # the text indexes are not for the reader
    began = time.process_time()  # a busy machine takes longer, not more of it
    reader = open_stream(folder, examples=256, micro=32)
    assert reader.epoch_size == 1_000_000
    assert reader[3000]["input_ids"].shape == (8, 32, S)
    assert time.process_time() - began < 2.0


# --- packs


def test_a_pack_has_room_for_the_predictions_of_its_sequences():
    cases = ((3, 76, 0.15), (1, 76, 0.15), (8, 20, 0.9))
    assert [packed_predictions(512, *case) for case in cases] == [79, 76, 160]
