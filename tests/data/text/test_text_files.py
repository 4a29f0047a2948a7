"""What a file is, which files there are, and what is said of those that cannot be read."""

import bz2
import gzip
import json
import lzma
import random
import sys

import pytest

from bert_cli.config.data import PreprocessSettings
from bert_cli.data.text import files, preprocess
from bert_cli.data.text.documents import marked_lines
from bert_cli.data.text.files import (
    Part,
    Reading,
    find_files,
    line_at,
    open_part,
    recognise,
    recognise_all,
    refuse_without_effect,
)
from bert_cli.errors import ConfigError, DataError

LINES = "".join(f"Sentence {n} is here.\n" for n in range(3000)).encode()


def zstandard_frames(data):
    """Two frames one after the other, as programs with several threads write."""
    zstandard = pytest.importorskip("zstandard")
    half = len(data) // 2
    return b"".join(
        zstandard.ZstdCompressor().compress(piece) for piece in (data[:half], data[half:])
    )


PACKERS = {
    "gzip": lambda data: gzip.compress(data[:999]) + gzip.compress(data[999:]),
    "xz": lzma.compress,
    "bzip2": bz2.compress,
    "zstandard": zstandard_frames,
}


def parquet_of(path, texts, **more):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": texts}), path, **more)
    return path


@pytest.mark.parametrize("packing", PACKERS)
def test_a_packed_file_is_known_by_its_first_bytes_whatever_its_name(tmp_path, packing):
    path = tmp_path / "no_suffix"
    path.write_bytes(PACKERS[packing](LINES))
    part = recognise(path, Reading())
    assert part == Part(path, "plain", packing, path.stat().st_size)
    with open_part(part) as file:
        assert file.read() == LINES
    assert line_at(part, LINES.index(b"Sentence 2500 ")) == 2501


@pytest.mark.parametrize("packing", PACKERS)
@pytest.mark.parametrize("share", [0.5, 0.99])
def test_a_packed_file_that_is_cut_off_is_refused_with_its_last_line(tmp_path, packing, share):
    draw = random.Random(0)
    text = "".join(f"{draw.random()} {draw.random()}\n" for _ in range(60_000)).encode()
    path = tmp_path / "cut"
    packed = PACKERS[packing](text)
    path.write_bytes(packed[: int(len(packed) * share)])
    with pytest.raises(DataError, match=rf"cut \(after line \d+\): the {packing} data are damaged"):
        part = recognise(path, Reading())
        list(marked_lines(part, Reading()))


@pytest.mark.parametrize("packing", PACKERS)
def test_a_packed_file_with_wrong_bytes_in_it_is_refused(tmp_path, packing):
    draw = random.Random(0)
    text = "".join(f"{draw.random()} {draw.random()}\n" for _ in range(60_000)).encode()
    packed = bytearray(PACKERS[packing](text))
    middle = len(packed) // 3
    packed[middle : middle + 50] = bytes(50)
    path = tmp_path / "wrong"
    path.write_bytes(packed)
    with pytest.raises(DataError, match=r"wrong \(after line \d+\): .*; get the file again"):
        list(marked_lines(recognise(path, Reading()), Reading()))


def test_a_file_named_as_packed_that_is_not_is_refused(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(b"Plain text.\n")
    with pytest.raises(DataError, match=r"a.txt.gz \(line 1\): is named as gzip but"):
        recognise(path, Reading())


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
        ("a.txt", "\ufeffWith a mark of byte order.\n", "plain"),
    ],
)
def test_a_format_is_known_by_what_the_file_holds(tmp_path, name, text, kind):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    assert recognise(path, Reading()).format == kind
    path.write_bytes(gzip.compress(text.encode()))
    assert recognise(path, Reading()).format == kind
    assert recognise(path, Reading(format="plain")).format == "plain"


def test_parquet_is_known_by_its_first_bytes(tmp_path):
    path = parquet_of(tmp_path / "a", ["One.", "Two."])
    assert recognise(path, Reading()).format == "parquet"


@pytest.mark.parametrize(
    ("name", "data", "told"),
    [
        ("a.json", b'[{"text": "A."}]', "is one JSON array; write JSON lines"),
        ("a.txt", "In sixteen bits.".encode("utf-16-le"), "is not UTF-8 text"),
        ("a.png", b"\x89PNG\r\n\x1a\n" + bytes(2000), "is not UTF-8 text"),
    ],
)
def test_what_is_no_text_is_refused_by_name(tmp_path, name, data, told):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=told) as caught:
        recognise(tmp_path / name, Reading())
    assert str(caught.value).startswith(f"{tmp_path / name} (line 1): ")


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


def test_empty_files_are_counted_and_an_input_of_nothing_is_refused(tmp_path):
    for name in ("a", "b.gz"):
        (tmp_path / name).write_bytes(b"" if name == "a" else gzip.compress(b""))
    with pytest.raises(DataError, match=r"a: is empty, and so are 1 more; input .* holds no text"):
        recognise_all(tmp_path, Reading())
    (tmp_path / "c").write_text("Text.")
    (tmp_path / "d").write_text('{"text": "Text."}')
    parts, notes = recognise_all(tmp_path, Reading())
    assert [part.path.name for part in parts] == ["c", "d"]
    assert notes == [
        f"{tmp_path / 'a'}: is empty and left out; empty files: 2",
        f"{tmp_path}: holds files of several formats: 1 plain, 1 json-lines",
    ]


def test_a_setting_that_no_file_needs_is_refused(tmp_path):
    (tmp_path / "a").write_text("Text.")
    parts, _ = recognise_all(tmp_path, Reading())
    refuse_without_effect(parts, {"documents", "input"})
    with pytest.raises(ConfigError, match="--text-field: has no effect, the input is plain"):
        refuse_without_effect(parts, {"text_field"})
    (tmp_path / "a").write_text(json.dumps({"text": "A."}))
    parts, _ = recognise_all(tmp_path, Reading())
    refuse_without_effect(parts, {"text_field"})
    with pytest.raises(ConfigError, match="--documents: has no effect, the input is json-lines"):
        refuse_without_effect(parts, {"documents"})


def test_without_a_package_the_error_names_the_extra(tmp_path, monkeypatch):
    table = parquet_of(tmp_path / "a.parquet", ["One."])
    packed = tmp_path / "b.zst"
    packed.write_bytes(zstandard_frames(b"One.\n"))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"b.zst: .* needs the extra 'zstandard'; pip install"):
        recognise(packed, Reading())
    with pytest.raises(ConfigError, match=r"a.parquet: .* needs the extra 'parquet'; pip install"):
        list(marked_lines(recognise(table, Reading()), Reading()))


def test_json_lines_are_known_by_a_first_line_of_any_length(tmp_path):
    path = tmp_path / "a"
    path.write_text(json.dumps({"text": "word " * 400_000}) + '\n{"text": "Two."}\n')
    part = recognise(path, Reading())
    assert part.format == "json-lines"
    assert [line for kind, line in marked_lines(part, Reading()) if kind == "body"][1] == "Two."
    path.write_text("{ is no object " + "word " * 400_000)
    assert recognise(path, Reading()).format == "plain"


def test_a_first_line_without_an_end_needs_a_format(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LONGEST_LOOK", 3 << 20)
    path = tmp_path / "a"
    path.write_text('{"text": "' + "word " * 800_000)
    with pytest.raises(DataError, match=r"a \(line 1\): is longer than 3 MiB.*--input-format json"):
        recognise(path, Reading())
    assert recognise(path, Reading(format="plain")).format == "plain"
    path.rename(tmp_path / "a.jsonl")
    assert recognise(tmp_path / "a.jsonl", Reading()).format == "json-lines"


@pytest.mark.parametrize("name", ["file.txt", "*.txt"])
def test_a_tilde_that_the_shell_left_is_the_home_folder(tmp_path, monkeypatch, name):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "file.txt").write_text('<doc id="1" url="" title="A">\nA\n\nText.\n</doc>\n')
    given = PreprocessSettings(
        input=f"~/{name}", out="~/out", sentence_splitter="lines", processes=1
    )
    preprocess.run(given)
    assert (tmp_path / "out" / "file.txt.txt").read_text() == "Text.\n"
