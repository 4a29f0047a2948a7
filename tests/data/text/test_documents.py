"""The same documents out of every kind of file, and the place of what is wrong with one."""

import gzip
import io
import json
import lzma
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import bert_cli
from bert_cli.data.text import documents, files
from bert_cli.data.text.documents import marked_lines, text_pieces
from bert_cli.data.text.files import Reading, recognise
from bert_cli.errors import DataError

# Documents of lines; the blank lines within one are kept out of the files that have no other end.
DOCUMENTS = [
    ["It is far.", "It is bright."],
    ["Été à Łódź.", "日本語。", "\u2028odd space\u00a0here"],
    ["One line."],
]
FIELDS = Reading(text_field="body")


def write_plain(path):
    text = "\n \n\n".join("\n".join(lines) for lines in DOCUMENTS)
    path.write_text(f"\n\n{text}\n", encoding="utf-8")


def write_json(path):
    rows = [{"id": n, "body": "\n\n".join(lines)} for n, lines in enumerate(DOCUMENTS)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


def write_parquet(path, **more):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts = ["\n\n".join(lines) for lines in DOCUMENTS]
    table = pyarrow.table({"id": range(len(texts)), "body": texts})
    parquet.write_table(table, path, **{"row_group_size": 2, **more})


def zstandard(data):
    return pytest.importorskip("zstandard").ZstdCompressor().compress(data)


WRITERS = {"plain": write_plain, "json-lines": write_json, "parquet": write_parquet}
PACKERS = {"": bytes, "gzip": gzip.compress, "xz": lzma.compress, "zstandard": zstandard}


def listed(part, reading=FIELDS):
    found = []
    for kind, line in marked_lines(part, reading):
        if kind == "document":
            found.append([])
        else:
            found[-1].append(line)
    return found


def stripped(documents_):
    return [[line.strip() for line in lines] for lines in documents_]


@pytest.mark.parametrize("packing", PACKERS)
@pytest.mark.parametrize("kind", WRITERS)
def test_every_format_in_every_packing_gives_the_same_documents(tmp_path, kind, packing):
    path = tmp_path / "file"
    WRITERS[kind](path)
    path.write_bytes(PACKERS[packing](path.read_bytes()))
    part = recognise(path, FIELDS)
    assert (part.format, part.compression) == (kind, packing)
    assert listed(part) == stripped(DOCUMENTS)
    pieces = "\n".join(text_pieces(part, FIELDS)).split("\n")
    blocks = [[]]
    for line in pieces:
        if line.strip():
            blocks[-1].append(line.strip())
        elif blocks[-1]:
            blocks.append([])
    assert [block for block in blocks if block] == stripped(DOCUMENTS)


def test_a_file_can_be_one_document(tmp_path):
    write_plain(tmp_path / "a")
    reading = Reading(documents="files")
    part = recognise(tmp_path / "a", reading)
    everything = [line for lines in stripped(DOCUMENTS) for line in lines]
    assert listed(part, reading) == [everything]
    assert "".join(text_pieces(part, reading)).count("\n") == len(everything) - 1


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("size", [1, 7, 40, 10**6])
def test_pieces_of_any_size_hold_the_same_text(tmp_path, monkeypatch, kind, size):
    WRITERS[kind](tmp_path / "a")
    part = recognise(tmp_path / "a", FIELDS)
    whole = "\n".join(text_pieces(part, FIELDS))
    monkeypatch.setattr(documents, "TEXT_PIECE", size)
    pieces = list(text_pieces(part, FIELDS))
    assert "\n".join(pieces).split() == whole.split()
    assert (len(pieces) > 1) == (size < 10**6)


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfOne.\n")
    (tmp_path / "b").write_bytes(b'\xef\xbb\xbf{"body": "One."}\n')
    for name in "ab":
        part = recognise(tmp_path / name, FIELDS)
        assert listed(part) == [["One."]]
        assert "".join(text_pieces(part, FIELDS)).strip() == "One."


def test_a_null_is_a_document_without_text(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (tmp_path / "a").write_text('{"body": null}\n{"body": "One."}\n')
    parquet.write_table(pyarrow.table({"body": [None, "One."]}), tmp_path / "b")
    for name in "ab":
        assert listed(recognise(tmp_path / name, FIELDS)) == [[], ["One."]]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ('{"body": "cut', "is not JSON"),
        ('{"text": "elsewhere"}', "has no field 'body', only 'text'; say where .* --text-field"),
        ('["body"]', "has no field 'body', no object"),
        ('{"body": ["a", "list"]}', "'body' is a list, not a text"),
        ('{"body": 3}', "'body' is a int, not a text"),
    ],
)
@pytest.mark.parametrize("packing", ["", "gzip"])
def test_what_is_wrong_with_json_is_told_with_its_line(tmp_path, row, told, packing):
    text = '{"body": "One."}\n\n' + row + '\n{"body": "Two."}\n'
    path = tmp_path / "rows.jsonl"
    path.write_bytes(PACKERS[packing](text.encode()))
    for read in (marked_lines, text_pieces):
        with pytest.raises(DataError, match=rf"rows.jsonl \(line 3\): .*{told}"):
            list(read(recognise(path, FIELDS), FIELDS))


@pytest.mark.parametrize("packing", ["", "xz"])
def test_bytes_that_are_not_utf8_are_told_with_line_and_byte(tmp_path, packing):
    for name, data in (("a", b"One.\nTwo.\nCaf\xe9.\n"), ("b.jsonl", b'{"body": 1}\n'[:0])):
        if not data:
            data = b'{"body": "One."}\n\n{"body": "Caf\xe9"}\n'
        (tmp_path / name).write_bytes(PACKERS[packing](data))
        place = data.index(b"\xe9")
        for read in (marked_lines, text_pieces):
            with pytest.raises(DataError, match=rf"{name} \(line 3, byte {place}\): not UTF-8"):
                list(read(recognise(tmp_path / name, FIELDS), FIELDS))


def test_what_is_wrong_with_parquet_is_told(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    write_parquet(tmp_path / "good")
    with pytest.raises(DataError, match="good: has no column 'text', only 'id', 'body'"):
        listed(recognise(tmp_path / "good", Reading()), Reading())
    with pytest.raises(DataError, match=r"good \(row 1\): 'id' is a int, not a text"):
        listed(recognise(tmp_path / "good", Reading()), Reading(text_field="id"))
    data = (tmp_path / "good").read_bytes()
    for name, cut in (("head", data[: len(data) // 2]), ("tail", data[:-20])):
        (tmp_path / name).write_bytes(cut)
        with pytest.raises(DataError, match=f"{name}: is damaged or cut off"):
            listed(recognise(tmp_path / name, FIELDS))
    wrong = pyarrow.array([b"One.", b"Caf\xe9"], pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"body": wrong}), tmp_path / "wrong")
    with pytest.raises(DataError, match=r"wrong \(row 2\): not UTF-8"):
        listed(recognise(tmp_path / "wrong", FIELDS))


def test_articles_are_not_taken_for_sentences(tmp_path):
    (tmp_path / "a").write_text('<doc id="1" url="" title="A">\nA\n\nText.\n</doc>\n')
    with pytest.raises(DataError, match="give it to `bert preprocess` first"):
        list(text_pieces(recognise(tmp_path / "a", Reading()), Reading()))


PEAK = (
    "import re, sys\n"
    "from pathlib import Path\n"
    "from bert_cli.data.text.documents import marked_lines, text_pieces\n"
    "from bert_cli.data.text.files import Reading, recognise\n"
    "part = recognise(Path(sys.argv[1]), Reading())\n"
    "for read in (marked_lines, text_pieces):\n"
    "    for _ in read(part, Reading()): pass\n"
    "print(re.search(r'VmHWM:\\s*(\\d+)', Path('/proc/self/status').read_text())[1])"
)


def peak_kilobytes(path):
    told = subprocess.run(
        [sys.executable, "-c", PEAK, str(path)],
        env=os.environ | {"PYTHONPATH": str(Path(bert_cli.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(told.stdout)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to read the peak from")
@pytest.mark.parametrize("kind", ["gzip", "parquet"])
def test_memory_does_not_grow_with_the_file(tmp_path, kind):
    """Of 90 MB more, in one gzip stream or one row group, no more than 40 are ever held.

    pyarrow's own memory comes to rest at 30 MB more, with 30 MB of text and with 300.
    """
    peaks = []
    for times in (10, 100):
        path = tmp_path / str(times)
        texts = [f"Row {n} of {times} says this." * 500 for n in range(80 * times)]
        if kind == "gzip":
            data = io.BytesIO()
            with gzip.GzipFile(fileobj=data, mode="wb", compresslevel=1) as file:
                for text in texts:
                    file.write(json.dumps({"text": text}).encode() + b"\n")
            path.write_bytes(data.getvalue())
        else:
            pyarrow = pytest.importorskip("pyarrow")
            from pyarrow import parquet

            table = pyarrow.table({"text": texts})
            parquet.write_table(table, path, use_dictionary=False, row_group_size=10**6)
        peaks.append(peak_kilobytes(path))
    assert sum(map(len, texts)) > 90_000_000
    assert peaks[1] - peaks[0] < 40_000


@pytest.mark.parametrize("line", ['{"body": "a \\ud800 b"}', "[" * 100_000 + "]" * 100_000])
def test_json_that_is_no_text_or_has_no_bottom_is_told_with_its_line(tmp_path, line):
    (tmp_path / "a.jsonl").write_text('{"body": "One \\ud83d\\ude00."}\n' + line + "\n")
    part = recognise(tmp_path / "a.jsonl", FIELDS)
    for read in (marked_lines, text_pieces):
        with pytest.raises(DataError, match=r"a\.jsonl \(line 2\): .*; mend that line"):
            list(read(part, FIELDS))


def test_an_object_of_many_levels_is_json_that_is_refused_and_not_text(tmp_path):
    (tmp_path / "a").write_text('{"a":' * 100_000 + "\n")
    part = recognise(tmp_path / "a", FIELDS)
    with pytest.raises(DataError, match=r"a \(line 1\): is not JSON \(nested too deeply\)"):
        listed(part)


@pytest.mark.parametrize("packing", PACKERS)
@pytest.mark.parametrize("kind", ["plain", "json-lines"])
def test_carriage_returns_alone_end_lines(tmp_path, kind, packing):
    WRITERS[kind](tmp_path / "a")
    data = (tmp_path / "a").read_bytes().replace(b"\n", b"\r").replace(b"\\n", b"\\r")
    (tmp_path / "a").write_bytes(PACKERS[packing](data))
    part = recognise(tmp_path / "a", FIELDS)
    assert part.format == kind
    assert listed(part) == stripped(DOCUMENTS)
    lines = "\n".join(text_pieces(part, FIELDS)).split("\n")
    expected = [line for document in stripped(DOCUMENTS) for line in document]
    assert [line.strip() for line in lines if line.strip()] == expected


def test_carriage_returns_change_nothing_where_line_feeds_end_lines(tmp_path):
    (tmp_path / "a").write_bytes(b"One\r thing.\r\nTwo.\r\n\r\nThree.\r\n")
    part = recognise(tmp_path / "a", Reading())
    assert not part.carriage_returns
    assert listed(part, Reading()) == [["One\r thing.", "Two."], ["Three."]]


def test_carriage_returns_before_line_feeds_further_on_end_no_second_line(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LOOKED_AT", 10)
    for size in range(9, 20):
        data = b"x" * size + b"\rTwo.\r\nThree.\r\r\n\rFour."
        (tmp_path / "a").write_bytes(data)
        part = replace(recognise(tmp_path / "a", Reading()), carriage_returns=True)
        assert listed(part, Reading()) == [["x" * size, "Two.", "Three."], ["Four."]]
