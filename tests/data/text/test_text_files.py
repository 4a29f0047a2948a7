"""What an input file is, which files there are, how they are split, and errors for unreadable ones."""

import bz2
import gzip
import json
import lzma
import random
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from bert_cli.config.data import PreprocessSettings
from bert_cli.data.text import files, preprocess
from bert_cli.data.text.documents import marked_lines, text_blocks
from bert_cli.data.text.files import (
    Part,
    Reading,
    bundle,
    find_files,
    line_number,
    open_part,
    recognise,
    recognise_all,
    refuse_without_effect,
    shard_of,
    split_part,
    text_bytes,
)
from bert_cli.errors import ConfigError, DataError

READING = Reading()
LINES = "".join(f"Sentence {n} is here.\n" for n in range(3000)).encode()


def zstandard_frames(data):
    """Return two frames one after the other, as programs with several threads write."""
    zstandard = pytest.importorskip("zstandard")
    half = len(data) // 2
    return b"".join(zstandard.ZstdCompressor().compress(d) for d in (data[:half], data[half:]))


PACKERS = {
    "gzip": lambda data: gzip.compress(data[:999]) + gzip.compress(data[999:]),
    "xz": lzma.compress,
    "bzip2": bz2.compress,
    "zstandard": zstandard_frames,
}


def write_parquet(path, texts, **more):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": texts}), path, **more)
    return path


# --- format


@pytest.mark.parametrize("packing", PACKERS)
def test_a_packed_file_is_recognised_by_its_first_bytes_and_damage_is_an_error(tmp_path, packing):
    path = tmp_path / "no_suffix"
    path.write_bytes(PACKERS[packing](LINES))
    part = recognise(path, READING)
    assert part == Part(path, "plain", packing, path.stat().st_size)
    with open_part(part) as file:
        assert file.read() == LINES
    assert line_number(part, LINES.index(b"Sentence 2500 ")) == 2501
    draw = random.Random(0)
    text = "".join(f"{draw.random()} {draw.random()}\n" for _ in range(60_000)).encode()
    packed = PACKERS[packing](text)
    third = len(packed) // 3
    for wrong in (
        packed[: len(packed) // 2],
        packed[: int(len(packed) * 0.99)],
        packed[:third] + bytes(50) + packed[third + 50 :],
    ):
        path.write_bytes(wrong)
        problem = (
            rf"no_suffix \(after line \d+\): the {packing} data are damaged .*; get the file again"
        )
        with pytest.raises(DataError, match=problem):
            list(marked_lines(recognise(path, READING), READING))


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("a.txt", "A sentence.\n", "plain"),
        ("a", '{"text": "A sentence."}\n', "json-lines"),
        ("a.jsonl", "broken\n", "json-lines"),
        ("a.json", '\n {"text": "A sentence."}\n', "json-lines"),
        ("a.txt", "{as a set is written}\n", "plain"),
        ("a.txt", '\n<doc id="1" url="" title="A">\nA\n\nText.\n</doc>\n', "wikiextractor"),
        ("a.txt", "The tail of an article.\n</doc>\n", "wikiextractor"),
        ("a.txt", "\ufeffWith a byte order mark.\n", "plain"),
    ],
)
def test_a_format_is_recognised_by_the_content_of_the_file(tmp_path, name, text, kind):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    assert recognise(path, READING).format == kind
    path.write_bytes(gzip.compress(text.encode()))
    assert recognise(path, READING).format == kind
    assert recognise(path, Reading(format="plain")).format == "plain"


def test_files_that_are_not_text_are_rejected_by_name(tmp_path):
    for name, data, problem in (
        ("a.json", b'[{"text": "A."}]', "is one JSON array; write JSON lines"),
        ("a.txt", "In sixteen bits.".encode("utf-16-le"), "is not UTF-8 text"),
        ("a.png", b"\x89PNG\r\n\x1a\n" + bytes(2000), "is not UTF-8 text"),
        ("a.mac", b"One.\rTwo.\r\rThree.\r", r"has lines that end in carriage returns .* tr '\\r'"),
        ("a.txt.gz", b"Plain text.\n", "is named as gzip but"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=problem) as error:
            recognise(tmp_path / name, READING)
        assert error.value.where == f"{tmp_path / name} (line 1)"
    assert recognise(write_parquet(tmp_path / "a", ["One.", "Two."]), READING).format == "parquet"


def test_without_a_package_the_error_names_the_extra(tmp_path, monkeypatch):
    table = write_parquet(tmp_path / "a.parquet", ["One."])
    packed = tmp_path / "b.zst"
    packed.write_bytes(zstandard_frames(b"One.\n"))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"b.zst: .* needs the extra 'zstandard'; pip install"):
        recognise(packed, READING)
    with pytest.raises(ConfigError, match=r"a.parquet: .* needs the extra 'parquet'; pip install"):
        list(marked_lines(recognise(table, READING), READING))


def test_a_first_line_may_be_long_but_needs_an_end_or_a_format(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_text(json.dumps({"text": "word " * 400_000}) + '\n{"text": "Two."}\n')
    part = recognise(path, READING)
    assert part.format == "json-lines"
    assert [line for kind, line in marked_lines(part, READING) if kind == "body"][1] == "Two."
    path.write_text("{ is no object " + "word " * 400_000)
    assert recognise(path, READING).format == "plain"
    monkeypatch.setattr(files, "LONGEST_HEAD", 3 << 20)
    path.write_text('{"text": "' + "word " * 800_000)
    with pytest.raises(DataError, match=r"a \(line 1\): is longer than 3 MiB.*--input-format json"):
        recognise(path, READING)
    assert recognise(path, Reading(format="plain")).format == "plain"
    path.rename(tmp_path / "a.jsonl")
    assert recognise(tmp_path / "a.jsonl", READING).format == "json-lines"


# --- which files


def test_folders_files_and_patterns_are_inputs(tmp_path):
    for name in ("b.txt", "a.txt", "deep/c.txt", "d.md", ".hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("Text.")
    root = tmp_path

    def names(given):
        return [str(path.relative_to(root)) for path in find_files(given)]

    assert names(root) == ["a.txt", "b.txt", "d.md", "deep/c.txt"]
    assert names(root / "b.txt") == ["b.txt"]
    assert names(root / "*.txt") == ["a.txt", "b.txt"]
    assert names(root / "**" / "*.txt") == ["a.txt", "b.txt", "deep/c.txt"]
    (root / "odd[1].txt").write_text("A name with letters of a pattern.")
    assert names(root / "odd[1].txt") == ["odd[1].txt"]
    with pytest.raises(DataError, match="no file matches"):
        find_files(root / "*.gz")
    with pytest.raises(DataError, match="does not exist"):
        find_files(root / "nothing.txt")


def test_empty_files_are_counted_and_an_input_without_text_is_rejected(tmp_path):
    for name in ("a", "b.gz"):
        (tmp_path / name).write_bytes(b"" if name == "a" else gzip.compress(b""))
    with pytest.raises(DataError, match=r"input \(.*\): .*/a and 1 more files are empty; give"):
        recognise_all(tmp_path, READING)
    (tmp_path / "c").write_text("Text.")
    (tmp_path / "d").write_text('{"text": "Text."}')
    parts, notes = recognise_all(tmp_path, READING)
    assert [part.path.name for part in parts] == ["c", "d"]
    assert notes == [
        f"{tmp_path / 'a'}: is empty and left out; empty files: 2",
        f"{tmp_path}: holds files of several formats: 1 plain, 1 json-lines",
    ]


def test_a_setting_that_applies_to_no_file_is_rejected(tmp_path):
    (tmp_path / "a").write_text("Text.")
    parts, _ = recognise_all(tmp_path, READING)
    refuse_without_effect(parts, {"documents", "input"})
    with pytest.raises(ConfigError, match="--text-field: has no effect, the input is plain"):
        refuse_without_effect(parts, {"text_field"})
    (tmp_path / "a").write_text(json.dumps({"text": "A."}))
    parts, _ = recognise_all(tmp_path, READING)
    refuse_without_effect(parts, {"text_field"})
    with pytest.raises(ConfigError, match="--documents: has no effect, the input is json-lines"):
        refuse_without_effect(parts, {"documents"})


def test_a_tilde_that_the_shell_left_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "file.txt").write_text('<doc id="1" url="" title="A">\nA\n\nText.\n</doc>\n')
    for name, out in (("file.txt", "one"), ("*.txt", "two")):
        given = {"input": f"~/{name}", "out": f"~/{out}", "sentence_splitter": "lines"}
        preprocess.run(PreprocessSettings(**given, processes=1))
        assert (tmp_path / out / "file.txt.txt").read_text() == "Text.\n"


# --- parts


def documents(count):
    draw = random.Random(0)
    return [
        [f"Document {n} line {m} {'é' * draw.randint(0, 40)}." for m in range(draw.randint(1, 30))]
        for n in range(count)
    ]


def write(path, kind, count=300):
    texts = ["\n".join(lines) for lines in documents(count)]
    if kind == "parquet":
        write_parquet(path, texts, row_group_size=7)
        return documents(count)
    content = {
        "plain": "\n \n\n".join(texts) + "\n",
        "json-lines": "".join(json.dumps({"text": text}) + "\n" for text in texts),
        "wikiextractor": "".join(
            f'<doc id="{n}" url="u" title="t">\nt\n\n{text}\n</doc>\n\n'
            for n, text in enumerate(texts)
        ),
    }
    path.write_text(content[kind], encoding="utf-8")
    return documents(count)


def read_documents(parts):
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
def test_the_ranges_of_a_file_hold_its_documents_once_and_in_order(tmp_path, kind):
    expected = write(tmp_path / "a", kind)
    whole = recognise(tmp_path / "a", READING)
    for size in (500, 5_000, 60_000):
        parts = split_part(whole, size, READING)
        assert len(parts) > min(42, whole.size / size / 6)  # there are 43 row groups
        assert read_documents(parts) == expected
        if kind != "parquet":
            assert sum(part.size for part in parts) == whole.size
            assert all(before.stop == after.start for before, after in pairwise(parts))
        if kind != "wikiextractor":
            text = "\n".join(block for part in parts for block in text_blocks(part, READING))
            lines = [line for line in text.split("\n") if line.strip()]
            assert lines == [line for document in expected for line in document]


def test_files_that_cannot_be_split_stay_whole(tmp_path):
    write(tmp_path / "a", "plain")
    part = recognise(tmp_path / "a", READING)
    assert split_part(part, part.size // 2 + 1, READING) == [part]
    assert len(split_part(part, part.size // 2, READING)) == 2
    reading = Reading(documents="files")
    assert split_part(part, 100, reading) == [part]
    (tmp_path / "a.gz").write_bytes(gzip.compress((tmp_path / "a").read_bytes()))
    packed = recognise(tmp_path / "a.gz", READING)
    assert split_part(packed, 100, READING) == [packed]
    assert packed.size < text_bytes(packed) < 8 * packed.size
    (tmp_path / "b").write_text("No blank line in here.\n" * 1000)
    long = recognise(tmp_path / "b", READING)
    assert len(split_part(long, 100, READING)) == 1
    assert read_documents(split_part(long, 100, READING)) == read_documents([long])


def test_text_without_documents_may_be_split_at_any_line(tmp_path):
    (tmp_path / "a").write_text("No blank line in here.\n" * 1000)
    whole = recognise(tmp_path / "a", READING)
    parts = split_part(whole, 1000, READING, anywhere=True)
    assert 20 <= len(parts) <= 24
    lines = [line for document in read_documents(parts) for line in document]
    assert lines == read_documents([whole])[0]
    # Where a document ends near, the range ends there.
    expected = write(tmp_path / "b", "plain")
    parts = split_part(recognise(tmp_path / "b", READING), 40_000, READING, anywhere=True)
    assert len(parts) > 1
    assert read_documents(parts) == expected


def test_an_error_in_a_range_has_the_line_of_the_file(tmp_path):
    rows = [json.dumps({"text": f"Row {n}."}) for n in range(1000)]
    rows[777] = "{broken"
    (tmp_path / "a.jsonl").write_text("\n".join(rows) + "\n")
    parts = split_part(recognise(tmp_path / "a.jsonl", READING), 1000, READING)
    wrong = next(p for p in parts if "broken" in p.path.read_text()[p.start : p.stop])
    assert wrong.start > 0
    with pytest.raises(DataError, match=r"a.jsonl \(line 778\): is not JSON"):
        read_documents([wrong])


def test_small_files_are_bundled_in_order_and_a_shard_carries_its_parts():
    parts = [Part(Path(str(n)), "plain", "", 40) for n in range(10)]
    parts[6:6] = [Part(Path("large"), "plain", "", 500)]
    names = [[part.path.name for part in group] for group in bundle(parts, 100)]
    assert names == [["0", "1"], ["2", "3"], ["4", "5"], ["large"], ["6", "7"], ["8", "9"]]
    ranges = [Part(Path("a"), "plain", "", 10, 3, 13), Part(Path("a"), "plain", "", 5, 13)]
    shard = shard_of(Path("out"), ranges, more=1)
    assert (shard.inputs, shard.weight) == ((Path("a"),), 15)
    assert shard.arguments == {"parts": ranges, "more": 1}
