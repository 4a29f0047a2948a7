"""The same documents from files of every format, and errors with the line at fault."""

import gzip
import io
import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import pytest

import bert_cli
from bert_cli.data.text import documents
from bert_cli.data.text.documents import marked_lines, text_blocks
from bert_cli.data.text.files import Reading, recognise
from bert_cli.errors import DataError

DOCUMENTS = [
    ["It is far.", "It is bright."],
    ["Été à Łódź.", "日本語。", "\u2028odd space\u00a0here"],
    ["One line."],
]
STRIPPED = [[line.strip() for line in lines] for lines in DOCUMENTS]
FIELDS = Reading(text_field="body")


def write_plain(path):
    text = "\n \n\n".join("\n".join(lines) for lines in DOCUMENTS)
    path.write_text(f"\n\n{text}\n", encoding="utf-8")


def write_json(path):
    rows = [{"id": n, "body": "\n\n".join(lines)} for n, lines in enumerate(DOCUMENTS)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


def write_table(path, columns, **more):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path, **more)


def write_parquet(path):
    texts = ["\n\n".join(lines) for lines in DOCUMENTS]
    write_table(path, {"id": range(len(texts)), "body": texts}, row_group_size=2)


def zstandard(data):
    return pytest.importorskip("zstandard").ZstdCompressor().compress(data)


WRITERS = {"plain": write_plain, "json-lines": write_json, "parquet": write_parquet}
PACKERS = {"": bytes, "gzip": gzip.compress, "xz": lzma.compress, "zstandard": zstandard}


def read(part, reading=FIELDS):
    found = []
    for kind, line in marked_lines(part, reading):
        if kind == "document":
            found.append([])
        else:
            found[-1].append(line)
    return found


@pytest.mark.parametrize("kind", WRITERS)
def test_every_format_and_compression_gives_the_same_documents(tmp_path, kind, monkeypatch):
    for packing, pack in PACKERS.items():
        path = tmp_path / f"file_{packing}"
        WRITERS[kind](path)
        path.write_bytes(pack(path.read_bytes()))
        part = recognise(path, FIELDS)
        assert (part.format, part.compression) == (kind, packing)
        assert read(part) == STRIPPED
        paragraphs = [[]]
        for line in "\n".join(text_blocks(part, FIELDS)).split("\n"):
            if line.strip():
                paragraphs[-1].append(line.strip())
            elif paragraphs[-1]:
                paragraphs.append([])
        assert [lines for lines in paragraphs if lines] == STRIPPED
    words = "\n".join(text_blocks(part, FIELDS)).split()
    for size in (1, 7, 40, 10**6):
        monkeypatch.setattr(documents, "BLOCK_BYTES", size)
        blocks = list(text_blocks(part, FIELDS))
        assert "\n".join(blocks).split() == words
        assert (len(blocks) > 1) == (size < 10**6)


def test_a_file_can_be_one_document(tmp_path):
    write_plain(tmp_path / "a")
    reading = Reading(documents="files")
    part = recognise(tmp_path / "a", reading)
    lines = [line for document in STRIPPED for line in document]
    assert read(part, reading) == [lines]
    assert "".join(text_blocks(part, reading)).count("\n") == len(lines) - 1


def test_byte_order_marks_nulls_and_carriage_returns_are_no_text(tmp_path):
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfOne.\n")
    (tmp_path / "b").write_bytes(b'\xef\xbb\xbf{"body": "One."}\n')
    for name in "ab":
        part = recognise(tmp_path / name, FIELDS)
        assert read(part) == [["One."]]
        assert "".join(text_blocks(part, FIELDS)).strip() == "One."
    (tmp_path / "c").write_text('{"body": null}\n{"body": "One.\\rTwo."}\n')
    write_table(tmp_path / "d", {"body": [None, "One.\rTwo."]})
    for name in "cd":
        assert read(recognise(tmp_path / name, FIELDS)) == [[], ["One.", "Two."]]
    (tmp_path / "e").write_bytes(b"One\r thing.\r\nTwo.\r\n\r\nThree.\r\n")
    assert read(recognise(tmp_path / "e", FIELDS)) == [["One\r thing.", "Two."], ["Three."]]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ('{"body": "cut', "is not JSON"),
        ('{"text": "elsewhere"}', "has no field 'body', only 'text'; give .* --text-field"),
        ('["body"]', "has no field 'body', it is no object"),
        ('{"body": ["a", "list"]}', "'body' is a list, not a text"),
        ('{"body": 3}', "'body' is a int, not a text"),
        ('{"body": "a \\ud800 b"}', r"has \\ud800, which is half of a letter; fix that line"),
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
    ],
)
def test_an_error_in_json_has_its_line(tmp_path, row, problem):
    text = '{"body": "One \\ud83d\\ude00."}\n\n' + row + '\n{"body": "Two."}\n'
    path = tmp_path / "rows.jsonl"
    for packing in ("", "gzip"):
        path.write_bytes(PACKERS[packing](text.encode()))
        for reader in (marked_lines, text_blocks):
            with pytest.raises(DataError, match=rf"rows.jsonl \(line 3\): .*{problem}"):
                list(reader(recognise(path, FIELDS), FIELDS))


def test_a_first_object_of_many_levels_is_rejected_json_and_not_text(tmp_path):
    (tmp_path / "a").write_text('{"a":' * 100_000 + "\n")
    with pytest.raises(DataError, match=r"a \(line 1\): is not JSON \(nested too deeply\)"):
        read(recognise(tmp_path / "a", FIELDS))


def test_bytes_that_are_not_utf8_are_an_error_with_line_and_byte(tmp_path):
    for name, data in (
        ("a", b"One.\nTwo.\nCaf\xe9.\n"),
        ("b", b'{"body": "A"}\n\n{"body": "Caf\xe9"}\n'),
    ):
        for packing in ("", "xz"):
            (tmp_path / name).write_bytes(PACKERS[packing](data))
            where = rf"{name} \(line 3, byte {data.index(0xE9)}\): not UTF-8"
            for reader in (marked_lines, text_blocks):
                with pytest.raises(DataError, match=where):
                    list(reader(recognise(tmp_path / name, FIELDS), FIELDS))


def test_errors_in_parquet_name_the_file_and_the_row(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    write_parquet(tmp_path / "good")
    with pytest.raises(DataError, match="good: has no field 'text', only 'id', 'body'"):
        read(recognise(tmp_path / "good", Reading()), Reading())
    with pytest.raises(DataError, match=r"good \(row 1\): 'id' is a int, not a text"):
        read(recognise(tmp_path / "good", Reading()), Reading(text_field="id"))
    data = (tmp_path / "good").read_bytes()
    for name, damaged in (("head", data[: len(data) // 2]), ("tail", data[:-20])):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(DataError, match=f"{name}: is damaged or cut off"):
            read(recognise(tmp_path / name, FIELDS))
    wrong = pyarrow.array([b"One.", b"Caf\xe9"], pyarrow.binary()).view(pyarrow.string())
    write_table(tmp_path / "wrong", {"body": wrong})
    with pytest.raises(DataError, match=r"wrong \(row 2\): not UTF-8"):
        read(recognise(tmp_path / "wrong", FIELDS))


def test_articles_are_rejected_where_sentences_are_wanted(tmp_path):
    (tmp_path / "a").write_text('<doc id="1" url="" title="A">\nA\n\nText.\n</doc>\n')
    with pytest.raises(DataError, match="give it to `bert preprocess` first"):
        list(text_blocks(recognise(tmp_path / "a", Reading()), Reading()))


PEAK = (
    "import re, sys\n"
    "from pathlib import Path\n"
    "from bert_cli.data.text.documents import marked_lines, text_blocks\n"
    "from bert_cli.data.text.files import Reading, recognise\n"
    "part = recognise(Path(sys.argv[1]), Reading())\n"
    "for read in (marked_lines, text_blocks):\n"
    "    for _ in read(part, Reading()): pass\n"
    "print(re.search(r'VmHWM:\\s*(\\d+)', Path('/proc/self/status').read_text())[1])"
)


def peak_kilobytes(path):
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(path)],
        env=os.environ | {"PYTHONPATH": str(Path(bert_cli.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to read the peak from")
@pytest.mark.parametrize("kind", ["gzip", "parquet"])
def test_memory_does_not_grow_with_the_file(tmp_path, kind):
    """Of 90 MB more, in one gzip stream or one row group, at most 40 are ever in memory.

    pyarrow's own memory grows by 30 MB, with 30 MB of text and with 300.
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
            write_table(path, {"text": texts}, use_dictionary=False, row_group_size=10**6)
        peaks.append(peak_kilobytes(path))
    assert sum(map(len, texts)) > 90_000_000
    assert peaks[1] - peaks[0] < 40_000
