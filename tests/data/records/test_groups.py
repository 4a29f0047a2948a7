"""Groups: which files are in one, and that a group that is split while it is read loses nothing."""

import gzip
import json
import random
from itertools import pairwise

import numpy as np
import pytest

from bert_cli.data.records import groups
from bert_cli.data.records.tokenize import encode_groups, plan_groups
from bert_cli.data.records.tokenizer import Encoder
from bert_cli.data.text.files import Part, Reading, recognise
from bert_cli.errors import DataError

WORDS = [f"w{n}" for n in range(50)]
VOCABULARY = {word: n for n, word in enumerate(["[UNK]", *WORDS])}


def encoder():
    return Encoder(VOCABULARY, cased=False)


def documents(count, seed=0, most=30):
    draw = random.Random(seed)
    return [
        [" ".join(draw.choices(WORDS, k=draw.randint(1, 12))) for _ in range(draw.randint(1, most))]
        for _ in range(count)
    ]


def write(path, found, packed=False):
    data = "\n\n".join("\n".join(lines) for lines in found).encode()
    path.write_bytes(gzip.compress(data) if packed else data)
    return recognise(path, Reading())


def texts(group):
    """Return the documents of a group as lines of words."""
    names = list(VOCABULARY)
    ends = group.sentences.tolist()
    lines = [" ".join(names[t] for t in group.tokens[a:b]) for a, b in pairwise(ends)]
    stops = group.documents.tolist()
    return [lines[a:b] for a, b in pairwise(stops)]


def grouped(parts, limit, least=2):
    found = encode_groups(parts, encoder(), Reading(), limit=limit, least=least)
    return [texts(group) for group in found]


@pytest.mark.parametrize(("limit", "piece"), [(1, 1), (300, 500), (3000, 500), (10**9, 1)])
def test_a_large_compressed_file_is_split_between_documents(tmp_path, monkeypatch, limit, piece):
    monkeypatch.setattr("bert_cli.data.text.documents.BLOCK_BYTES", piece)
    expected = documents(60)
    found = grouped([write(tmp_path / "a.gz", expected, packed=True)], limit)
    assert [document for group in found for document in group] == expected
    assert all(len(group) >= 2 for group in found)
    assert (len(found) == 1) == (limit == 10**9)


@pytest.mark.parametrize("least", [1, 2])
def test_documents_end_with_their_file(tmp_path, least):
    parts = [write(tmp_path / str(n), documents(3, n)) for n in range(3)]
    (whole,) = grouped(parts, 10**9, least)
    assert whole == [document for n in range(3) for document in documents(3, n)]


def test_a_document_beyond_the_limit_is_complete_for_pairs_and_split_for_single_segments(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("bert_cli.data.text.documents.BLOCK_BYTES", 200)
    expected = documents(1, most=2000) + documents(1, 1)
    part = write(tmp_path / "a", expected)
    assert grouped([part], 1000) == [expected]
    found = grouped([part], 1000, least=1)
    assert len(found) > 5
    assert max(sum(map(len, group)) for group in found) < 100
    lines = [line for group in found for document in group for line in document]
    assert lines == [line for document in expected for line in document]


def test_an_input_without_a_word_gives_an_empty_group(tmp_path):
    (tmp_path / "a").write_text(" \n\n")
    (group,) = encode_groups(
        [Part(tmp_path / "a", "plain", "", 3)], encoder(), Reading(), limit=9, least=2
    )
    assert texts(group) == [] and group.documents.tolist() == [0]
    assert group.sentences.dtype == np.int64


def names(planned):
    return [[part.path.name for part in parts] for _, parts in planned]


def test_a_large_file_becomes_several_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(groups, "RANGE_BYTES", 1000)
    expected = documents(200)
    write(tmp_path / "a", expected)
    planned, notes = plan_groups(tmp_path / "a", None)
    assert len(planned) > 10 and notes == []
    assert planned[3][0].name == "wiki_003.tfrecord"
    found = [document for _, parts in planned for document in grouped(parts, 10**9)[0]]
    assert found == expected


def test_files_of_one_document_each_are_bundled(tmp_path, monkeypatch):
    monkeypatch.setattr(groups, "BUNDLE_BYTES", 100)
    for n in range(7):
        (tmp_path / str(n)).write_text("w1 w2\n\nw3 w4\n" * 3)
    reading = Reading(documents="files")
    planned, notes = plan_groups(tmp_path, None, reading)
    assert names(planned) == [["0", "1"], ["2", "3"], ["4", "5", "6"]]
    assert notes[0].startswith(f"{tmp_path / '6'}: holds fewer than two documents")
    assert names(plan_groups(tmp_path, 4, reading)[0]) == [list("0123"), list("456")]
    with pytest.raises(DataError, match=r"0 \(1 document in the group\).* or give --no-nsp"):
        plan_groups(tmp_path, 1, reading)
    assert len(plan_groups(tmp_path, 1, reading, pairs=False)[0]) == 7


def write_manifest(folder, counts):
    shards = [{"output": name, "documents": count} for name, count in counts.items()]
    (folder / "manifest.json").write_text(json.dumps({"step": "preprocess", "shards": shards}))


def test_the_manifest_says_which_files_have_one_document(tmp_path):
    for n in range(3):
        (tmp_path / f"text_0{n}").write_text("w1 w2\n\nw3 w4\n")
    (tmp_path / "empty").write_text("")
    write_manifest(tmp_path, {"text_00": 2, "text_01": 2, "text_02": 1, "empty": 0})
    planned, notes = plan_groups(tmp_path, 1)
    assert names(planned) == [["text_00"], ["text_01", "text_02"]]
    (note,) = notes
    assert note.startswith(f"{tmp_path / 'text_02'}: holds fewer than two documents, which cannot")
    assert note.endswith("so it went into the group before it, wiki_001.tfrecord")
    assert plan_groups(tmp_path, 2)[1] == [note.replace("wiki_001", "wiki_000")]
    assert plan_groups(tmp_path, 3)[1] == []
    write_manifest(tmp_path, {"text_00": 1, "text_01": 3, "text_02": 3})
    with pytest.raises(DataError, match=r"text_00 \(1 document in the group\)"):
        plan_groups(tmp_path, 1)


def test_the_names_of_many_groups_sort_in_their_order(tmp_path):
    for number in range(1001):
        (tmp_path / f"{number:04d}").write_text("x")
    outputs = [output.name for output, _ in plan_groups(tmp_path, 1)[0]]
    assert (outputs[0], outputs[-1]) == ("wiki_0000.tfrecord", "wiki_1000.tfrecord")
    assert sorted(outputs) == outputs
    assert plan_groups(tmp_path, 2)[0][-1][0].name == "wiki_500.tfrecord"
