"""Cuts lie between documents, and the parts together are the whole."""

import gzip
import json
import random
from itertools import pairwise
from pathlib import Path

import pytest

from bert_cli.data.text.documents import marked_lines, text_pieces
from bert_cli.data.text.files import Part, Reading, recognise
from bert_cli.data.text.parts import bundled, cut, read_parts, shard_of, text_bytes
from bert_cli.errors import DataError

READING = Reading()


def documents(count, seed=0):
    draw = random.Random(seed)
    return [
        [f"Document {n} line {m} {'é' * draw.randint(0, 40)}." for m in range(draw.randint(1, 30))]
        for n in range(count)
    ]


def write(path, kind, count=300):
    found = documents(count)
    texts = ["\n".join(lines) for lines in found]
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=7)
        return found
    written = {
        "plain": "\n \n\n".join(texts) + "\n",
        "json-lines": "".join(json.dumps({"text": text}) + "\n" for text in texts),
        "wikiextractor": "".join(
            f'<doc id="{n}" url="u" title="t">\nt\n\n{text}\n</doc>\n\n'
            for n, text in enumerate(texts)
        ),
    }
    path.write_text(written[kind], encoding="utf-8")
    return found


def listed(parts):
    found = []
    for part in parts:
        for kind, line in marked_lines(part, READING):
            if kind == "document":
                found.append([])
            else:
                assert kind == "body"
                found[-1].append(line)
    return found


@pytest.mark.parametrize("kind", ["plain", "json-lines", "wikiextractor", "parquet"])
@pytest.mark.parametrize("size", [500, 5_000, 60_000])
def test_the_ranges_of_a_file_hold_its_documents_once_and_in_order(tmp_path, kind, size):
    expected = write(tmp_path / "a", kind)
    whole = recognise(tmp_path / "a", READING)
    parts = cut(whole, size, READING)
    assert len(parts) > min(42, whole.size / size / 6)  # there are 43 row groups
    assert listed(parts) == expected
    if kind != "parquet":
        assert sum(part.size for part in parts) == whole.size
        assert all(before.stop == after.start for before, after in pairwise(parts))
    if kind != "wikiextractor":
        lines = [
            line
            for part in parts
            for text in text_pieces(part, READING)
            for line in text.split("\n")
        ]
        assert [line for line in lines if line.strip()] == [line for d in expected for line in d]


def test_a_file_smaller_than_two_ranges_stays_whole(tmp_path):
    write(tmp_path / "a", "plain")
    part = recognise(tmp_path / "a", READING)
    assert cut(part, part.size // 2 + 1, READING) == [part]
    assert len(cut(part, part.size // 2, READING)) == 2


def test_what_cannot_be_entered_in_the_middle_stays_whole(tmp_path):
    write(tmp_path / "a", "plain")
    packed = tmp_path / "a.gz"
    packed.write_bytes(gzip.compress((tmp_path / "a").read_bytes()))
    part = recognise(packed, READING)
    assert cut(part, 100, READING) == [part]
    one = recognise(tmp_path / "a", Reading(documents="files"))
    assert cut(one, 100, Reading(documents="files")) == [one]
    (tmp_path / "b").write_text("No blank line in here.\n" * 1000)
    long = recognise(tmp_path / "b", READING)
    assert listed(cut(long, 100, READING)) == listed([long])
    assert len(cut(long, 100, READING)) == 1


def test_text_without_documents_may_be_cut_at_any_line(tmp_path):
    (tmp_path / "a").write_text("No blank line in here.\n" * 1000)
    whole = recognise(tmp_path / "a", READING)
    parts = cut(whole, 1000, READING, anywhere=True)
    assert 20 <= len(parts) <= 24
    assert [line for d in listed(parts) for line in d] == listed([whole])[0]
    # Where a document ends near, the cut is there.
    write(tmp_path / "b", "plain")
    found = cut(recognise(tmp_path / "b", READING), 40_000, READING, anywhere=True)
    assert len(found) > 1
    assert listed(found) == documents(300)


def test_a_mistake_in_a_range_is_told_with_its_line_of_the_file(tmp_path):
    rows = [json.dumps({"text": f"Row {n}."}) for n in range(1000)]
    rows[777] = "{broken"
    (tmp_path / "a.jsonl").write_text("\n".join(rows) + "\n")
    part = recognise(tmp_path / "a.jsonl", READING)
    last = cut(part, 4000, READING)[-2:]
    assert last[0].start > 0
    parts = cut(part, 1000, READING)
    wrong = next(p for p in parts if "broken" in Path(p.path).read_text()[p.start : p.stop])
    with pytest.raises(Exception, match=r"a.jsonl \(line 778\): is not JSON"):
        listed([wrong])


def test_small_files_come_together_and_keep_their_order():
    parts = [Part(Path(str(n)), "plain", "", 40) for n in range(10)]
    parts[6:6] = [Part(Path("large"), "plain", "", 500)]
    found = [[part.path.name for part in bundle] for bundle in bundled(parts, 100)]
    assert found == [["0", "1"], ["2", "3"], ["4", "5"], ["large"], ["6", "7"], ["8", "9"]]


def test_packed_files_count_as_the_text_in_them(tmp_path):
    text = "".join(f"{line}\n" for lines in documents(400) for line in lines).encode()
    (tmp_path / "a.gz").write_bytes(gzip.compress(text))
    part = recognise(tmp_path / "a.gz", READING)
    assert part.size < text_bytes(part) < 3 * part.size


def test_a_worker_gets_the_parts_that_were_planned(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parts = [Part(Path("a.txt"), "plain", "", 10, 3, 13), Part(Path("a.txt"), "plain", "gzip", 5)]
    for part in parts:
        part.path.write_text("x")
    shard = shard_of(Path("out"), parts, left_out=[1, 2])
    assert (shard.inputs, shard.weight) == ((Path("a.txt"),), 15)
    found, more = read_parts(shard.prepare(tmp_path))
    # Whole paths, for a worker that may be at home in another folder.
    assert [part.path for part in found] == [tmp_path / "a.txt"] * 2
    assert (found[0].start, found[0].stop, found[1].compression) == (3, 13, "gzip")
    assert more == {"left_out": [1, 2]}
    (tmp_path / "parts.json").write_text('{"parts": [{"path": "a.txt"}]}')
    with pytest.raises(DataError, match=r"parts\.json \(parts\.0\.format\): Field required"):
        read_parts([tmp_path / "parts.json"])


def test_a_file_of_carriage_returns_is_cut_between_documents(tmp_path):
    text = "\n\n".join(f"Document {n}.\nIt ends." for n in range(400))
    (tmp_path / "a").write_bytes(text.replace("\n", "\r").encode())
    whole = recognise(tmp_path / "a", READING)
    found = cut(whole, 2000, READING)
    assert len(found) > 3
    lines = [line for part in found for _, line in marked_lines(part, READING)]
    assert lines == [line for _, line in marked_lines(whole, READING)]
    assert lines.count("") == 400
