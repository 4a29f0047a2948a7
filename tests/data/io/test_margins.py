"""Wrapped text with a layout: its prose comes out in sentences, its code, tables and lists in lines."""

import csv
import json
import random
import re
import textwrap
from itertools import islice

import pytest
from data.io.test_wrapping import PARAGRAPHS, sentences

from bert_cli.data.io import margins
from bert_cli.data.io.margins import margins_of
from bert_cli.data.io.wrapping import Joiner
from bert_cli.data.text import preprocess
from bert_cli.errors import DataError

MANUAL = """\
LAMP(8)                      System Administration                     LAMP(8)

NAME
       lamp  -  switch  the  lamp of a lighthouse on at dusk and switch it off
       again at dawn

SYNOPSIS
       lamp [-n nights] [logfile]

DESCRIPTION
       The keeper winds the clock once in each night, so  that  the  lens  can
       turn  until  the  early morning.  If the reservoir does not hold enough
       oil, the program rings the bell.  The length of each of the nights  de‐
       pends on the season and on the latitude of the tower.

       The file has these lines:
       dusk = 18:40    # in winter
       dawn = 06:10    # in winter
       bell = on       # rings when the oil does not last until dawn

OPTIONS
       -n, --nights nights
              Number of nights that are kept in the log. The oldest one is au‐
              tomatically removed first.

       EOIL   The oil does not last until the morning, and nobody has answered
              the bell that was rung.

SEE ALSO
       bell(8)

Harbour tools                     2026-03-01                           LAMP(8)
"""
MANUAL_LINES = [
    "NAME",
    "lamp - switch the lamp of a lighthouse on at dusk and switch it off again at dawn",
    "lamp [-n nights] [logfile]",
    "The keeper winds the clock once in each night, so that the lens can turn until the early morning.",
    "If the reservoir does not hold enough oil, the program rings the bell.",
    "The length of each of the nights depends on the season and on the latitude of the tower.",
    "The file has these lines:",
    "dusk = 18:40 # in winter",
    "dawn = 06:10 # in winter",
    "bell = on # rings when the oil does not last until dawn",
    "-n, --nights nights",
    "The oldest one is automatically removed first.",
    "EOIL The oil does not last until the morning, and nobody has answered the bell that was rung.",
    "Harbour tools 2026-03-01 LAMP(8)",
]


def test_a_manual_has_complete_sentences_and_its_code_in_lines(tmp_path):
    (tmp_path / "lamp.8").write_text(MANUAL)
    lines = sentences(tmp_path / "lamp.8", tmp_path / "out", documents="files")
    assert [line for line in MANUAL_LINES if line not in lines] == []


INDENTS = {
    "quoted mail": lambda n: ("> " * (n % 3), "> " * (n % 3)),
    "a list": lambda n: ("  * ", "    "),
    "a numbered pleading": lambda n: (f"{n:>4}) ", "      "),
    "an indented first line": lambda n: ("   ", ""),
    "an indented text": lambda n: (" " * 8, " " * 8),
}


@pytest.mark.parametrize("indents", INDENTS.values(), ids=list(INDENTS))
def test_wrapped_prose_has_its_sentences_in_any_layout(tmp_path, indents):
    (tmp_path / "a").write_text("\n\n".join(PARAGRAPHS[:40]))
    wrapped = []
    for number, text in enumerate(PARAGRAPHS[:40]):
        first, rest = indents(number)
        wrapped.append(textwrap.fill(text, 72, initial_indent=first, subsequent_indent=rest))
    (tmp_path / "b").write_text("\n\n".join(wrapped))
    expected = set(sentences(tmp_path / "a", tmp_path / "c", line_breaks="keep"))
    joined = sentences(tmp_path / "b", tmp_path / "d")
    marks = r"*0123456789) "
    missing = expected - {*joined, *(line.lstrip(marks) for line in joined)}
    assert len(missing) <= 0.02 * len(expected)


def write_json(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def write_csv(path, texts):
    with path.open("w") as file:
        csv.writer(file).writerows([("id", "text"), *((1, text) for text in texts)])


def write_parquet(path, texts):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=3)


@pytest.mark.parametrize(
    ("name", "write"), [("a.jsonl", write_json), ("a.csv", write_csv), ("a.parquet", write_parquet)]
)
def test_a_wrapped_text_field_has_the_sentences_of_the_unwrapped(
    tmp_path, name, write, monkeypatch
):
    texts = PARAGRAPHS[:20]
    (tmp_path / "flat").mkdir()
    write(tmp_path / "flat" / name, texts)
    write(tmp_path / name, [textwrap.fill(t, 76, break_on_hyphens=False) + "\n" for t in texts])
    expected = sentences(tmp_path / "flat" / name, tmp_path / "b")
    assert sentences(tmp_path / name, tmp_path / "c") == expected
    monkeypatch.setattr(preprocess, "SHARD_BYTES", 2000)
    assert sentences(tmp_path / name, tmp_path / "d", processes=2) == expected


def test_a_short_file_has_the_margin_of_its_corpus(tmp_path):
    (tmp_path / "in").mkdir()
    for n, text in enumerate(PARAGRAPHS[:12]):
        (tmp_path / "in" / f"{n}").write_text(textwrap.fill(text[:200], 72) + "\n")
    assert not margins_of((tmp_path / "in" / "3").read_text())
    lines = sentences(tmp_path / "in", tmp_path / "out", sentence_splitter="lines")
    assert lines == [" ".join(PARAGRAPHS[n][:200].split()) for n in (0, 1, 10, 11, *range(2, 10))]


def test_lines_that_cannot_be_joined_are_named(tmp_path, capsys):
    left = textwrap.wrap(" ".join(PARAGRAPHS[:6]), 38)
    right = textwrap.wrap(" ".join(PARAGRAPHS[6:14]), 38)[: len(left)]
    columns = "\n".join(f"{a:<42}{b}" for a, b in zip(left, right, strict=False))
    draw = random.Random(0)
    words = iter(" ".join(PARAGRAPHS[:9]).split())
    ragged = [" ".join(islice(words, draw.randint(6, 30))) for _ in range(60)]
    for name, text, problem in (
        ("columns", columns, "hold two columns; .* pdftotext without -layout"),
        ("ragged", "\n".join(ragged), "end within sentences; .* add --line-breaks join"),
    ):
        (tmp_path / name).write_text(text)
        sentences(tmp_path / name, tmp_path / f"{name}.out", sentence_splitter="lines")
        printed = capsys.readouterr()
        assert "hard line breaks" not in printed.out
        assert re.search(problem, printed.err)
    assert margins.has_two_columns(columns) and not margins.has_two_columns(MANUAL)
    assert not margins.ends_within_sentences("\n".join(PARAGRAPHS))
    assert not margins.ends_within_sentences("\n".join(PARAGRAPHS).lower().replace(". ", "\n"))


@pytest.mark.parametrize(
    ("first", "second", "is_one"),
    [
        ("The keeper winds the clock once in a night,", "so that it turns.", True),
        ("lamp      the light of the tower in the port", "bell      rings at noon", False),
        ("1. The keeper winds the clock once in a day", "2. The bell rings at noon.", False),
        ("1. The keeper winds the clock once in a day", "   and oils it.", True),
        ("   The keeper winds the clock each evening", "and oils it.", True),
        ("The keeper winds the clock.", "The bell rings at noon.", False),
        ("> The keeper winds the clock once in a night", "The bell rings.", False),
    ],
)
def test_a_line_continues_another_that_was_broken_at_the_margin(first, second, is_one):
    lines = list(Joiner("", (45,)).paragraphs([first, second]))
    assert len(lines) == (1 if is_one else 2)


def test_lines_of_a_proportional_font_have_no_margin():
    narrow = {" ": 0.25, **dict.fromkeys("fijlrt.,;:'", 0.28), **dict.fromkeys("mwMW", 0.8)}
    lines = [""]
    for word in " ".join(PARAGRAPHS[:40]).split():
        longer = f"{lines[-1]} {word}".strip()
        if sum(narrow.get(letter, 0.5) for letter in longer) <= 28:
            lines[-1] = longer
        else:
            lines.append(word)
    text = "\n".join(lines)
    assert not margins_of(text) and margins.wrapped_width(text)


def test_hyphens_of_options_and_names_stay():
    text = "The latitude of a non‐existent XftColor is re‐\\nturned by the keeper."
    join = Joiner(text, (40,))._join
    assert join("it is re‐", "turned") == "it is returned"
    assert join("with --sort-", "key") == "with --sort-key"
    assert join("an Xft‐", "Color") == "an XftColor"
    assert join("the LD_PRE‐", "LOAD") == "the LD_PRELOAD"
    assert join("is non‐", "existent") == "is non‐existent"


def test_a_folder_that_joined_lines_by_other_rules_is_not_continued(tmp_path):
    (tmp_path / "in").write_text("\n\n".join(textwrap.fill(text, 72) for text in PARAGRAPHS[:20]))
    sentences(tmp_path / "in", tmp_path / "out")
    for path in (tmp_path / "out").rglob("*.json"):
        record = json.loads(path.read_text())
        if "joined_by" in record.get("settings", {}):
            del record["settings"]["joined_by"]
            path.write_text(json.dumps(record))
    with pytest.raises(DataError, match=r"made with other settings .*joined_by"):
        sentences(tmp_path / "in", tmp_path / "out")
