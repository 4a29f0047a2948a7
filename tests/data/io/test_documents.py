"""Formats of input files: recognised, split, read to the same documents, rejected with the line at fault."""

import bz2
import gzip
import json
import lzma
import os
import random
import subprocess
import sys
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path

import pytest
from support.bert import ROOT

from bert_cli.data.io import documents, files, inputs
from bert_cli.data.io.documents import marked_lines, sentence_blocks
from bert_cli.errors import ConfigError, DataError

pyarrow = pytest.importorskip("pyarrow")
zstandard = pytest.importorskip("zstandard")
READING = files.Reading()
ARTICLE = '<doc id="1" url="" title="A">\nA\n\nText.\n</doc>\n'


def frames(compress):
    return lambda data: compress(data[: len(data) // 2]) + compress(data[len(data) // 2 :])


PACKERS = {
    "gzip": frames(gzip.compress),
    "xz": frames(lzma.compress),
    "bzip2": frames(bz2.compress),
}
PACKERS["zstandard"] = frames(lambda data: zstandard.ZstdCompressor().compress(data))


def made_documents(count=300):
    draw = random.Random(0)
    texts = [
        [f"Document {n} line {m} {'é' * draw.randint(0, 40)}." for m in range(draw.randint(1, 30))]
        for n in range(count)
    ]
    return [*texts, ["日本語。", "\u2028odd space\u00a0here"]]


def write_parquet(path, texts, **more):
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": texts}), path, **more)


def write(path, kind):
    """Write the documents and return them as they are read."""
    texts = ["\n".join(lines) for lines in made_documents()]
    if kind == "parquet":
        write_parquet(path, texts, row_group_size=7)
    elif kind == "plain":
        path.write_text("\n\n" + "\n \n\n".join(texts) + "\n")
    elif kind == "json-lines":
        path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts))
    else:
        articles = (f'<doc id="1" url="u" title="t">\nt\n\n{text}\n</doc>\n\n' for text in texts)
        path.write_text("".join(articles))
    return [[line.strip() for line in lines] for lines in made_documents()]


def read(parts, reading=READING):
    found = []
    for kind, line in chain.from_iterable(marked_lines(part, reading) for part in parts):
        if kind == "document":
            found.append([])
        else:
            assert kind == "body"
            found[-1].append(line)
    return found


def lines_of(found):
    return [line for document in found for line in document]


def read_blocks(parts):
    text = "\n\n".join(block for part in parts for block in sentence_blocks(part))
    return [line.strip() for line in text.split("\n") if line.strip()]


def read_file(path, reading=READING):
    return read([files.recognise(path, reading)], reading)


@pytest.mark.parametrize("kind", ["plain", "json-lines", "wikiextractor", "parquet"])
def test_every_format_compression_and_range_gives_the_same_documents(tmp_path, kind, monkeypatch):
    expected = write(tmp_path / "a", kind)
    lines = lines_of(expected)
    for packing, pack in PACKERS.items():
        path = tmp_path / packing
        path.write_bytes(pack((tmp_path / "a").read_bytes()))
        part = files.recognise(path, READING)
        assert part == files.Part(path, kind, packing, path.stat().st_size)
        assert read([part]) == expected
        assert files.split_part(part, 100, READING) == [part]
    whole = files.recognise(tmp_path / "a", READING)
    for size in (500, 5_000, 60_000):
        parts = files.split_part(whole, size, READING)
        assert len(parts) == 1 if kind == "parquet" else len(parts) > whole.size / size / 6
        assert read(parts) == expected
        assert sum(part.size for part in parts) == whole.size
        assert all(before.stop == after.start for before, after in pairwise(parts))
        if kind == "plain":
            assert read_blocks(parts) == read_blocks([part]) == lines
    for size in (1, 40, 10**6) if kind == "plain" else ():
        monkeypatch.setattr(documents, "BLOCK_BYTES", size)
        assert read_blocks([part]) == lines
        assert (len(list(sentence_blocks(part))) > 1) == (size < 10**6)


@pytest.mark.parametrize("size", [2, 1 << 16])
def test_a_line_in_which_a_range_stops_is_read_to_its_end(size, tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "LINES_BYTES", size)
    (tmp_path / "a.txt").write_text("é ü\nß ö\nä\n")
    part = files.recognise(tmp_path / "a.txt", READING)
    for stop in range(1, 16):
        lines = [line for _, line in marked_lines(replace(part, stop=stop), READING)]
        assert lines[1:] == ["é ü", "ß ö", "ä"][: 1 + (stop > 6) + (stop > 12)]


def test_a_format_is_recognised_by_the_content_of_the_file(tmp_path):
    for name, text, kind in (
        ("a.txt", "A sentence.\n", "plain"),
        ("a", '{"text": "A sentence."}\n', "json-lines"),
        ("a", '{"text": "' + "word " * 400_000, "json-lines"),  # longer than what is looked at
        ("a.JSONL", "broken\n", "json-lines"),
        ("a.json.gz", "broken\n", "json-lines"),
        ("a.json.txt", "A sentence.\n", "plain"),
        ("a.txt", "{as a set is written}\n", "plain"),
        ("a.txt", f"\n{ARTICLE}", "wikiextractor"),
        ("a.txt", "The tail of an article.\n</doc>\n", "wikiextractor"),
        ("a.txt", "\ufeffWith a byte order mark.\n", "plain"),
    ):
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()))
        assert files.recognise(path, READING).format == kind
        assert files.recognise(path, files.Reading(format="plain")).format == "plain"


def test_prose_that_begins_like_another_file_is_text(tmp_path):
    for mark in ("BZh", "BZh9", "PAR1", "PK", "WARC", "%PDF", "Obj", "<a>"):
        (tmp_path / "a").write_text(f"{mark} is short.\n")
        assert read_file(tmp_path / "a") == [[f"{mark} is short."]]
    markup = "<?xml version='1.0'?>"
    (tmp_path / "a").write_text(f"{markup}\n")
    assert read_file(tmp_path / "a", files.Reading(format="plain")) == [[markup]]


def test_frames_with_the_largest_window_of_zstandard_are_read(tmp_path):
    """`zstd --long=31` writes a window of 2 GiB into the frame; libraries refuse more than 128 MiB by themselves."""
    window = {"window_log": 31, "enable_ldm": True, "write_content_size": False}
    parameters = zstandard.ZstdCompressionParameters(**window)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / "a.zst").write_bytes(packer.compress(b"One.\n") + packer.flush())
    with pytest.raises(zstandard.ZstdError, match="memory"):
        zstandard.ZstdDecompressor().decompressobj().decompress((tmp_path / "a.zst").read_bytes())
    assert read_file(tmp_path / "a.zst") == [["One."]]


@pytest.mark.parametrize("packing", PACKERS)
def test_damaged_data_are_an_error(tmp_path, packing):
    draw = random.Random(0)
    text = "".join(f"{draw.random()}\n" for _ in range(20_000)).encode()
    packed, path = PACKERS[packing](text), tmp_path / "a"
    third = len(packed) // 3
    cases = [(packing, packed[:third]), (packing, packed[: int(len(packed) * 0.99)])]
    cases += [(packing, packed[:third] + bytes(50) + packed[third + 50 :])]
    write(path, "parquet")
    data = path.read_bytes()
    cases += [("parquet", data[: len(data) // 2]), ("parquet", data[:-20])]
    for kind, wrong in cases:
        path.write_bytes(wrong)
        problem = rf"/a: the {kind} data are damaged .*; download or copy"
        with pytest.raises(DataError, match=problem):
            read_file(path)


def test_without_a_package_the_error_names_the_extra(tmp_path, monkeypatch):
    write_parquet(tmp_path / "a.parquet", ["One."])
    (tmp_path / "b.zst").write_bytes(PACKERS["zstandard"](b"One.\n"))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"b.zst: needs the extra 'zstandard'; pip install"):
        files.recognise(tmp_path / "b.zst", READING)
    with pytest.raises(ConfigError, match=r"a.parquet: needs the extra 'parquet'; pip install"):
        read_file(tmp_path / "a.parquet")


def test_folders_files_and_patterns_are_inputs(tmp_path):
    names = ["b.txt", "a.txt", "deep/c.txt", "d.md", "odd[1].md", "odd[2]/e.md"]
    hidden = [".hidden", ".git/c.txt", "deep/.ipynb_checkpoints/c.txt", "deep/.c.txt"]
    for name in (*names, *hidden):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("Text.")
    (tmp_path / "a_link.txt").symlink_to("b.txt")  # before the file in the order of names
    (tmp_path / "z.txt").symlink_to(tmp_path / "a.txt")
    for name in (".links/1", ".links/2"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(tmp_path / "a.txt")
    for pattern, found in (
        ("", "a.txt b.txt d.md deep/c.txt odd[1].md odd[2]/e.md"),
        ("odd[2]", "odd[2]/e.md"),
        ("b.txt", "b.txt"),
        ("*.txt", "a.txt b.txt"),
        ("**/*.txt", "a.txt b.txt deep/c.txt"),
        ("odd[1].md", "odd[1].md"),
        (".links", ".links/1"),
    ):
        assert inputs.find_files(tmp_path / pattern, {}) == [tmp_path / n for n in found.split()]
    for name, problem in (("*.gz", "no file matches"), ("nothing.txt", "does not exist")):
        with pytest.raises(DataError, match=problem):
            inputs.find_files(tmp_path / name, {})
    (tmp_path / "broken").symlink_to("nothing")
    with pytest.raises(DataError, match="broken: is a link to a folder, or to nothing"):
        inputs.find_files(tmp_path, {}, strict=True)


def test_a_file_without_documents_is_split_only_where_that_is_allowed(tmp_path):
    expected = write(tmp_path / "a", "plain")
    part = files.recognise(tmp_path / "a", READING)
    assert files.split_part(part, part.size // 2 + 1, READING) == [part]
    assert len(files.split_part(part, part.size // 2, READING)) == 2
    reading = files.Reading(documents="files")
    assert files.split_part(part, 100, reading) == [part]
    assert read([part], reading) == [lines_of(expected)]
    # Where a document ends near, the range ends there, else at a line.
    parts = files.split_part(part, 40_000, READING, anywhere=True)
    assert len(parts) > 1 and read(parts) == expected
    (tmp_path / "b").write_text("No blank line in here.\n" * 1000)
    long = files.recognise(tmp_path / "b", READING)
    assert read(files.split_part(long, 100, READING)) == read([long])
    parts = files.split_part(long, 1000, READING, anywhere=True)
    assert 20 <= len(parts) <= 24
    assert lines_of(read(parts)) == read([long])[0]
    bundles = files.bundle([replace(long, size=size) for size in (4, 6, 1, 20, 3)], 10)
    assert [[part.size for part in group] for group in bundles] == [[4, 6], [1], [20], [3]]


def test_byte_order_marks_nulls_and_carriage_returns_are_no_text(tmp_path):
    mark = b"\xef\xbb\xbf"
    for data, expected in (
        (mark + b"One.\n", [["One."]]),
        (mark + b'{"text": "One."}\n', [["One."]]),
        (b'{"text": null}\n{"text": "One.\\rTwo."}\n', [[], ["One.", "Two."]]),
        (b"One\r thing.\r\nTwo.\r\n\r\nThree.\r\n", [["One\r thing.", "Two."], ["Three."]]),
    ):
        (tmp_path / "a").write_bytes(data)
        assert read_file(tmp_path / "a") == expected
    write_parquet(tmp_path / "a", [None, "One.\rTwo."])
    assert read_file(tmp_path / "a") == [[], ["One.", "Two."]]


def test_an_error_in_a_range_or_in_plain_text_has_the_line_of_the_file(tmp_path):
    rows = [json.dumps({"text": f"Row {n}."}) for n in range(1000)]
    rows[777] = "{broken"
    (tmp_path / "a.jsonl").write_text("\n".join(rows) + "\n")
    parts = files.split_part(files.recognise(tmp_path / "a.jsonl", READING), 1000, READING)
    wrong = next(p for p in parts if "broken" in p.path.read_text()[p.start : p.stop])
    assert wrong.start > 0
    with pytest.raises(DataError, match=r"a.jsonl \(line 778\): is not JSON"):
        read([wrong])
    (tmp_path / "b").write_bytes(b"One.\nTwo.\nCaf\xe9.\n")
    with pytest.raises(DataError, match=r"b \(line 3\): byte 0xE9 is not UTF-8"):
        read_blocks([files.recognise(tmp_path / "b", READING)])


def test_tables_are_read_by_their_header(tmp_path):
    body = files.Reading(text_field="body")
    rows = b'id,body\r\n1,"Say ""x"", then\n\nleave."\r\n\r\n2,Two.\r\n3,\r\n'
    (tmp_path / "a.csv").write_bytes(rows)
    assert read_file(tmp_path / "a.csv", body) == [['Say "x", then', "leave."], ["Two."], []]
    (tmp_path / "a.tsv.gz").write_bytes(gzip.compress(b'body\tid\n"Quote.\t1\nTwo, too.\t2\n'))
    assert read_file(tmp_path / "a.tsv.gz", body) == [['"Quote.'], ["Two, too."]]
    part = files.recognise(tmp_path / "a.csv", body)
    assert files.split_part(part, 10, body) == [part]
    (tmp_path / "b.csv").write_bytes(b'body,b\n1,2\n"cut')
    assert read_file(tmp_path / "b.csv", files.Reading("plain")) == [["body,b", "1,2", '"cut']]


PEAK = """
import re, sys
from pathlib import Path
from bert_cli.data.text import preprocess
from bert_cli.data.io.files import Reading, recognise
part = recognise(Path(sys.argv[1]), Reading())
preprocess.load_splitter = lambda *_: lambda line: line.split('. ')
out = Path(sys.argv[1] + '.out')
preprocess.split_shard((), out, parts=[part], reading=Reading(), splitter='lines', language='')
print(re.search(r'VmHWM:\\s*(\\d+)', Path('/proc/self/status').read_text())[1])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to read the peak from")
@pytest.mark.parametrize(
    ("kind", "times", "most"),
    [
        ("wikiextractor", (2, 10), 5_000),
        pytest.param("gzip", (10, 60), 40_000, marks=pytest.mark.slow),
        ("parquet", (10, 60), 40_000),
    ],
)
def test_memory_does_not_grow_with_the_file(tmp_path, kind, times, most):
    """Of 8 MB more in one article, 50 in a gzip stream or row group; pyarrow itself takes up to 30 of 300 MB."""
    peaks = []
    for count in times:
        path = tmp_path / str(count)
        texts = [f"Row {n} of {count} says this. " * 500 for n in range(80 * count)]
        if kind == "gzip":
            rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
            path.write_bytes(gzip.compress(rows.encode(), 1))
        elif kind == "parquet":
            write_parquet(path, texts, use_dictionary=False, row_group_size=10**6)
        else:
            path.write_text(ARTICLE.replace("Text.", "\n".join(texts)))
        command = [sys.executable, "-c", PEAK, str(path)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        peaks.append(int(subprocess.check_output(command, env=environment)))
    assert peaks[1] - peaks[0] < most
