"""Passages: whole sentences, headings with what follows them, no running heads."""

import re
from itertools import pairwise

import pytest

from bert_cli.data.io import files
from bert_cli.data.search.passages import (
    LENGTH,
    Document,
    Passage,
    characters_left_out,
    documents_of,
    page_of,
    pages_of,
    passages_of,
    running_heads,
)
from bert_cli.data.text.preprocess import load_splitter

SPLIT = load_splitter("sentencex", "en")
SENTENCE = "This sentence has some words and ends here"


def passages(lines: list[str]) -> list[str]:
    return [passage.text for passage in passages_of(lines, SPLIT)]


def test_a_passage_is_whole_sentences_up_to_a_length_and_none_overlap():
    lines = [" ".join(f"{SENTENCE} {n}.{m}." for m in range(9)) for n in range(20)]
    found = passages_of(lines, SPLIT)
    text = "\n".join(lines)
    assert len(found) > 5
    assert all(text[p.start : p.stop] == p.text and len(p.text) <= LENGTH for p in found)
    assert all(p.text.startswith("This") and p.text.endswith(".") for p in found)
    assert all(text[a.stop : b.start] in (" ", "\n") for a, b in pairwise(found))
    assert " ".join(p.text for p in found).split() == text.split()


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["NAME", f"{SENTENCE * 10}.", "OPTIONS", "It has options."],
         [f"NAME\n{SENTENCE * 10}.", "OPTIONS\nIt has options."]),
        (["NAME", "It lists files.", "OPTIONS", "-a", f"{SENTENCE * 9}.", "-b", "It has options.", "-c", "All."],
         [f"NAME\nIt lists files.\nOPTIONS\n-a\n{SENTENCE * 9}.", "-b\nIt has options.\n-c\nAll."]),
        (["Title", "Part one", "It begins."], ["Title\nPart one\nIt begins."]),
        (["# Title", f"{SENTENCE * 10}.", "## Next", "# Last", "It ends."],
         [f"# Title\n{SENTENCE * 10}.", "## Next\n# Last\nIt ends."]),
        ([f"{SENTENCE * 8}.", "# Installing", f"{SENTENCE * 17}."],
         [f"{SENTENCE * 8}.", f"# Installing\n{SENTENCE * 17}."]),
        (["Take:", "soap", "tea", "milk", "and stir it."], ["Take:\nsoap\ntea\nmilk\nand stir it."]),
        (["It begins.", "The end"], ["It begins.\nThe end"]),
        ([f"{SENTENCE * 10}.", "Part one", "The sea", "It ends."],
         [f"{SENTENCE * 10}.", "Part one\nThe sea\nIt ends."]),
        (["..., ---", "* * *"], []),
        (["It begins.", f"# {SENTENCE * 3}", "It ends."], [f"It begins.\n# {SENTENCE * 3}\nIt ends."]),
    ],
    ids=["headings", "options", "two", "markup", "long after", "list", "last", "two after", "no word", "long"],
)  # fmt: skip
def test_a_heading_begins_a_passage_and_a_list_does_not(lines, expected):
    assert passages(lines) == expected


def test_a_passage_on_several_pages_has_the_page_with_the_most_words():
    document = Document("", ["x" * 40], pages=[10, 20, 30])
    pages = pages_of(document, Passage(15, 35, "x" * 20))
    # It begins on the second page; the others begin at its characters 5 and 15.
    assert pages == [2, 5, 15]
    for spans, page in (([], 2), ([(6, 7)], 3), ([(1, 2), (16, 17), (18, 19)], 4)):
        assert page_of(pages, spans) == page


def test_headings_in_a_row_are_passages_up_to_the_length():
    lines = [*(f"# Heading {n}" for n in range(300)), f"{SENTENCE}."]
    found = passages(lines)
    assert "\n".join(found) == "\n".join(lines) and max(map(len, found)) <= LENGTH
    sentence = "word " * 199 + "end."
    assert passages(["# Title", sentence]) == [f"# Title\n{sentence}"]
    assert passages(["# Title", "# Part", sentence]) == ["# Title\n# Part", sentence]


def test_running_heads_are_in_no_passage():
    lines = ["LS(1)     User Commands     LS(1)", "It lists files.", "GNU 9.1    2022    LS(1)"]
    assert running_heads(lines) == {0, 2}
    assert passages(lines) == ["It lists files."]
    pages = [line for n in range(4) for line in (f"{SENTENCE} {n}.", "LS(1)    page    LS(1)")]
    assert passages(["LS(1)    page    LS(1)", *pages]) == [f"{SENTENCE} {n}." for n in range(4)]
    song = ["A river is long", "and deep", "O river", "It runs", "and runs", "O river"] * 3
    assert passages(song) == ["\n".join(song)]


def test_an_address_with_data_is_no_text_however_short():
    lines = [
        "---",
        "A logo ![logo](data:image/svg+xml,%3Csvg%3E) and [one]: data:image/gif;base64,R0lG here.",
    ]
    passages = passages_of(lines, SPLIT)
    assert [passage.text for passage in passages] == [
        "---\nA logo ![logo](",
        ") and [one]: ",
        " here.",
    ]


def test_data_in_base64_is_in_no_passage_and_is_counted():
    data = "iVBORw0KGgoAAAANSUhEUgAA" * 40
    lines = [
        f"A map ![map](data:image/png;base64,{data}==) of the bay.",
        data[:76],
        data[:60] + "==",
    ]
    found = passages_of(lines, SPLIT)
    assert [passage.text for passage in found] == ["A map ![map](", ") of the bay."]
    left_out = len(f"data:image/png;base64,{data}==") + 76 + 62
    assert characters_left_out(lines, found) == left_out


@pytest.mark.parametrize(
    ("content", "title"),
    [
        (
            '---\ntitle: "Painting: hull"\ntags: [a]\n\nmore:\n  - x\n---\nClean it.',
            "Painting: hull",
        ),
        ("+++\ntitle = 'Oil = gold'\n[params]\n+++\nClean it.", "Oil = gold"),
        ("---\n\nClean it.\n\n---\n\nAgain.", "Clean it."),
        ("=====\nRules\n=====\nClean it.", "Rules"),
        ("<!-- a\nlong comment -->\n# Clean it.", "Clean it."),
        ("#+AUTHOR: A\n#+TITLE: Tides\n* Clean it.", "Tides"),
        ("---\ntitle: Oil\n...\nClean it.", "Oil"),
        ("= Rope\n:toc:\nClean it.", "Rope"),
        ("\\documentclass{article}\n\\title{Anchors}\nClean it.", "Anchors"),
        ("[![Build](a.svg)](b) ![](c)\n<h1 align='center'>Ship</h1>\nClean it.", "Ship"),
        (".. image:: x.png\n:tags: y\nClean it.", "Clean it."),
    ],
)
def test_a_title_is_no_markup_and_front_matter_is_no_text(tmp_path, content, title):
    (tmp_path / "a.md").write_text(content + "\n")
    reading = files.Reading(documents="files")
    (document,) = documents_of(files.recognise(tmp_path / "a.md", reading), reading)
    assert document.title == title
    assert "Clean it." in "\n".join(document.lines)
    assert document.is_named == ("title" not in "\n".join(document.lines) and title[0] in "PO")


@pytest.mark.parametrize(
    ("name", "content", "documents"),
    [
        ("b.csv", "title,text\nHours,We open.\nEmpty,\nTickets,A new one.\n", [("Hours", 1), ("Tickets", 1)]),
        ("b.jsonl", '{"text": "A b."}\n{"text": "C", "title": " D  e "}\n{"title": 1984, "text": "F"}\n'
         '{"title": true, "text": "G"}\n', [("A b.", 1), ("D e", 1), ("1984", 1), ("G", 1)]),
        ("a.txt", "Title\n\nFirst text.\n\nSecond text.\n", [("Title", 3)]),
        ("a.jsonl", '{"text": "One text."}\n{"text": ""}\n{"text": "Two\\ntexts."}\n',
         [("One text.", 1), ("Two", 2)]),
        ("mount.txt", "MOUNT(8)    System    MOUNT(8)\n\nNAME\n\nIt mounts.\n\n2.38    2022    MOUNT(8)\n",
         [("MOUNT(8)", 4)]),
        ("a.txt", "A(8)    System\n\nNAME\n\nIt mounts.\n\nA(8)    2022    A(8)\n", [("A(8)", 4)]),
        ("wiki_00", '<doc id="1" url="u" title="A &amp; B">\nA &amp; B\n\nIts text.\n</doc>\n', [("A & B", 1)]),
        ("a.csv", f"text\n{SENTENCE * 3}\n", [(f"{(SENTENCE * 3)[:79]}…", 1)]),
    ],
)  # fmt: skip
def test_documents_of_any_format_have_their_title(tmp_path, name, content, documents):
    (tmp_path / name).write_text(content)
    reading = files.Reading(documents="files")
    part = files.recognise(tmp_path / name, reading)
    found = [(document.title, len(document.lines)) for document in documents_of(part, reading)]
    if name == "b.csv":
        assert [document.number for document in documents_of(part, reading)] == [1, 3]
    assert found == documents


def test_real_articles_lose_no_words(shared_data):
    reading = files.Reading(documents="files")
    part = files.recognise(shared_data / "text" / "extracted" / "AA" / "wiki_07", reading)
    documents = list(documents_of(part, reading))
    assert len(documents) > 10
    for _, lines, *_ in documents:
        heads = running_heads(lines)
        kept = " ".join(line for n, line in enumerate(lines) if n not in heads)
        assert re.findall(r"\w+", " ".join(passages(lines))) == re.findall(r"\w+", kept)
