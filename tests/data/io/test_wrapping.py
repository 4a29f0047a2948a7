"""Hard line breaks: wrapped prose has the sentences of the same text without them; other lines stay as they are."""

import json
import random
import re
import textwrap
from collections import Counter
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
from support.bert import ROOT

from bert_cli.config.data import PreprocessSettings
from bert_cli.data.io import files
from bert_cli.data.io.documents import marked_lines, recognise_lines
from bert_cli.data.io.wrapping import (
    Joiner,
    common_length,
    ends_within_sentences,
    fill,
    has_two_columns,
    margins_of,
    wrapped_width,
)
from bert_cli.data.steps.preprocess import run
from bert_cli.data.text import preprocess

ARTICLES = sorted((ROOT / "data/sample/articles").glob("*.wiki"))
PARAGRAPHS = [
    re.sub(r"<.*?>|'{2,}|\[\[(?:[^]|]*\|)?|\]\]", "", line)
    for path in ARTICLES
    for line in path.read_text().split("\n")
    if len(line) > 200 and line[0].isupper()
]
SONNET = Path(__file__).with_name("sonnet.txt").read_text()


def hyphenated(paragraph, width, draw):
    """Wrap a paragraph and break a word of six letters or more at the end of each line."""
    lines = []
    line = ""
    for word in paragraph.split():
        room = width - len(line) - 2
        if len(line) + 1 + len(word) <= width:
            line = f"{line} {word}".strip()
        elif room >= 3 and re.fullmatch(r"[a-z]{6,}\W*", word):
            cut = draw.randint(2, min(room, 4))
            lines.append(f"{line} {word[:cut]}-")
            line = word[cut:]
        else:
            lines.append(line)
            line = word
    return "\n".join([*lines, line])


WRAPPERS = {
    "60": partial(textwrap.fill, width=60),
    "72": partial(textwrap.fill, width=72),
    "80": partial(textwrap.fill, width=80, break_on_hyphens=False),
    "100": partial(textwrap.fill, width=100),
    "hyphenated": partial(hyphenated, width=66, draw=random.Random(0)),
}


def sentences(source, out, **settings):
    settings = {"sentence_splitter": "sentencex", "processes": 1, **settings}
    run(PreprocessSettings(input=source, out=out, **settings))
    text = "".join(path.read_text() for path in sorted(out.glob("*.txt")))
    return [line for line in text.split("\n") if line]


def lines_of(path, breaks="auto", size=None):
    reading = files.Reading(line_breaks=breaks)
    parts = recognise_lines([files.recognise(path, reading)], reading)
    parts = parts if size is None else files.split_part(*parts, size, reading)
    return [line for part in parts for kind, line in marked_lines(part, reading) if kind == "body"]


@pytest.mark.parametrize(
    ("wrapper", "separator"),
    [*((name, "\n\n") for name in WRAPPERS), ("72", "\n"), ("hyphenated", "\n")],
)
def test_wrapped_text_has_the_sentences_of_the_unwrapped(tmp_path, wrapper, separator, capsys):
    (tmp_path / "plain.txt").write_text(separator.join(PARAGRAPHS))
    (tmp_path / "wrapped.txt").write_text(separator.join(map(WRAPPERS[wrapper], PARAGRAPHS)))
    expected = sentences(tmp_path / "plain.txt", tmp_path / "a")
    assert "joined the wrapped lines" not in capsys.readouterr().out
    joined = sentences(tmp_path / "wrapped.txt", tmp_path / "b")
    assert "1 of 1 files, as " in capsys.readouterr().out
    kept = sentences(tmp_path / "wrapped.txt", tmp_path / "c", line_breaks="keep")
    assert len(kept) > 1.5 * len(expected) > 900
    assert abs(len(joined) - len(expected)) < 0.01 * len(expected)
    equal = sum((Counter(joined) & Counter(expected)).values())
    assert equal > (0.95 if wrapper == "hyphenated" else 0.98) * len(expected)


def test_lines_that_their_author_broke_stay(tmp_path):
    words = sorted({word for text in PARAGRAPHS for word in text.split()})
    rows = [sentence for text in PARAGRAPHS for sentence in text.split(". ")]
    text = {
        "verse": SONNET * 3,
        "one sentence per line": ".\n".join(rows),
        "one sentence per line, in lower case and without full stops": "\n".join(rows).lower(),
        "a list": "\n".join(words),
        "a list of long items": "\n".join(f"- {row[:60]}" for row in rows if len(row) > 20),
        "paragraphs": "\n".join(PARAGRAPHS),
        "code": (ROOT / "bert_cli/files.py").read_text(),
        "a few lines": textwrap.fill(PARAGRAPHS[0], 72)[:500],
        "Japanese": re.sub("。", "。\n", (ROOT / "data/sample/japanese/Bridge.txt").read_text()),
    }
    assert {kind: wrapped_width(lines) for kind, lines in text.items()} == dict.fromkeys(text, 0)
    prose = "\n\n".join(WRAPPERS["80"](text) for text in PARAGRAPHS[:20])
    kept = ["CHAPTER I", "In which we start", *SONNET.splitlines(), "```sh"]
    kept += [*WRAPPERS["80"](PARAGRAPHS[0]).splitlines(), "```"]
    (tmp_path / "a").write_text("\n".join([prose, "", *kept, "", prose]))
    # Long items of a list say nothing about the margin of the prose.
    assert margins_of(f"{prose}\n\n{text['a list of long items']}") == margins_of(prose) == (80,)
    lines = lines_of(tmp_path / "a")
    start = lines.index("CHAPTER I")
    assert lines[start:-20] == kept
    assert lines[:start] == lines[-20:] == PARAGRAPHS[:20]


@pytest.mark.slow
def test_the_lines_of_a_file_do_not_depend_on_its_parts(tmp_path, monkeypatch):
    wrapped = list(map(WRAPPERS["hyphenated"], PARAGRAPHS))
    for paragraphs, size in ((wrapped[:60], 300), (wrapped, 5000), (wrapped, 40_000)):
        (tmp_path / "a").write_text("\n\n".join(paragraphs))
        assert lines_of(tmp_path / "a", size=size) == lines_of(tmp_path / "a")
    alone = sentences(tmp_path / "a", tmp_path / "out")
    monkeypatch.setattr(preprocess, "SHARD_BYTES", 30_000)
    assert sentences(tmp_path / "a", tmp_path / "parts", processes=2) == alone


def test_a_hyphen_at_a_line_end_stays_where_the_text_has_it_elsewhere():
    text = "A well-known river.\nThe recognition of the well-\nknown and the recog-\nnition. "
    text += "Soft hy\u00ad\nphens."
    lines = [*text.split("\n"), "", "The long years of 1914-"]
    lines += ["1918 in the rather pre-", "Roman times of older 日本", "語"]
    joiner = Joiner(text)
    joiner.width = 30
    assert list(joiner.paragraphs(lines)) == [
        "A well-known river.",
        "The recognition of the well-known and the recognition. Soft hyphens.",
        "",
        "The long years of 1914-1918 in the rather pre-Roman times of older 日本語",
    ]


@pytest.mark.parametrize(
    ("head", "foot"),
    [
        ("\fA running TITLE\n", "\nPage {} of 9\n"),
        ("\f{}\nTHE SAME TITLE", "THE SAME FOOTER\nPage {}\n"),
    ],
    ids=["apart", "beside the number of the page"],
)
def test_a_sentence_goes_on_over_a_page_break_without_its_number_and_title(head, foot):
    prose = textwrap.wrap(" ".join(PARAGRAPHS[:20]), 70)
    pages = [prose[start : start + 9] for start in range(0, len(prose), 9)]
    framed = ([head.format(n), *page, foot.format(n)] for n, page in enumerate(pages))
    text = "".join(map("\n".join, framed))
    lines = [line for line in Joiner(text).paragraphs(text.split("\n")) if line]
    framing = ("TITLE", "FOOTER", "Page")
    assert not any(word in line for line in lines for word in framing)
    starts = sum(page[0][0].islower() for page in pages[1:])
    assert starts > 3
    assert len(lines) <= len(pages) - starts


MANUAL = Path(__file__).with_name("lamp.8").read_text()
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


def test_a_wrapped_text_field_has_the_sentences_of_the_unwrapped(tmp_path, monkeypatch):
    """In JSON lines; test_documents shows that every format gives the same text."""
    texts, name = PARAGRAPHS[:20], "a.jsonl"
    (tmp_path / "flat").mkdir()
    write_json(tmp_path / "flat" / name, texts)
    write_json(
        tmp_path / name, [textwrap.fill(t, 76, break_on_hyphens=False) + "\n" for t in texts]
    )
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
        ("ragged", "\n".join(ragged), "end within sentences; .* `bert preprocess --line-breaks"),
        (
            "pleading",
            "\n".join(f"{n % 28 + 1:>2}  {line}" for n, line in enumerate(left)),
            "begin with numbers; they stay in the text",
        ),
    ):
        (tmp_path / name).write_text(text)
        sentences(tmp_path / name, tmp_path / f"{name}.out", sentence_splitter="lines")
        printed = capsys.readouterr()
        assert "joined the wrapped lines" not in printed.out
        assert re.search(problem, printed.err)
    assert has_two_columns(columns) and not has_two_columns(MANUAL)
    lines = textwrap.wrap("The keeper winds the clock of the tower once in a night. " * 4, 44)[:4]
    assert [ends_within_sentences("\n".join(lines[:n])) for n in (3, 4)] == [False, True]
    assert not ends_within_sentences("\n".join(PARAGRAPHS))
    assert not ends_within_sentences("\n".join(PARAGRAPHS).lower().replace(". ", "\n"))


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
@pytest.mark.parametrize("margins", [(45,), (70, 45)], ids=str)
def test_a_line_continues_another_that_was_broken_at_a_margin(first, second, is_one, margins):
    # An indented first line may be shorter than it was when it was wrapped: only the widest margin shows it.
    is_one = is_one and not (first.startswith("   ") and len(margins) > 1)
    lines = list(Joiner("", margins).paragraphs([first, second]))
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
    assert not margins_of(text) and wrapped_width(text)
    # Of lengths from nine tenths on; a line that was joined of two has its last row counted, with the next word.
    assert common_length([10, 10, 9, 8, 20, 18]) == 10 and common_length([20, 18, 10]) == 20
    assert fill("x" * 40, "four five", 50) == 0.9 and fill("x" * 90, "four five", 50) == 0.9


def test_hyphens_of_options_and_names_stay():
    text = "The latitude of a non‐existent XftColor is re‐\nturned by the keeper."
    assert Joiner("", (40,))._join("the UNI-", "TED") == "the UNI-TED"
    join = Joiner(text, (40,))._join
    assert join("it is re‐", "turned") == "it is returned"
    assert join("oil the lan‐", "tern") == "oil the lantern"
    assert join("oil the lan-", "tern") == "oil the lan-tern"  # the text has two kinds of hyphens
    assert join("with --sort-", "key") == "with --sort-key"
    assert join("an Xft‐", "Color") == "an XftColor"
    assert join("the LD_PRE‐", "LOAD") == "the LD_PRELOAD"
    assert join("is non‐", "existent") == "is non‐existent"
