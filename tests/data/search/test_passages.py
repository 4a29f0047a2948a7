"""Passages: whole sentences, headings with what follows them, no running heads."""

import re
from itertools import pairwise

from bert_cli.data.io import files
from bert_cli.data.search.passages import (
    LENGTH,
    Document,
    Passage,
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


def test_real_articles_lose_no_words(shared_data):
    reading = files.Reading(documents="files")
    part = files.recognise(shared_data / "text" / "extracted" / "AA" / "wiki_07", reading)
    documents = list(documents_of(part, reading))
    assert len(documents) > 10
    for _, lines, *_ in documents:
        heads = running_heads(lines)
        kept = " ".join(line for n, line in enumerate(lines) if n not in heads)
        assert re.findall(r"\w+", " ".join(passages(lines))) == re.findall(r"\w+", kept)
