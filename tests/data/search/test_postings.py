"""Postings: BM25 as SQLite's own computes it, after any changes of the index, in blocks of any size."""

import sqlite3
from contextlib import closing

import numpy as np
import pytest

from bert_cli.data.search import lexical, postings, words, writing
from bert_cli.data.search.index import open_index
from bert_cli.data.search.passages import Document, Passage
from bert_cli.data.search.writing import write_index

LETTERS = ["mountain", "mounting", "river", "ice", "x12000", "x12", "é", "ÉCOLE", "ecoles", "北京"]
QUESTION = 'mounted rivers, ice x12 x12000 école "é" 北京 "mountain ice" "ice mountain" "x12 x12 river" "zebra"'


def add(index, draw, path):
    """Add a file in place of its earlier text, with a title of words on every other one."""
    texts = [" ".join(draw.choice(LETTERS, draw.integers(1, 200))) for _ in range(4)]
    passages = [Passage(0, len(text), text) for text in texts]
    document = Document("The École of ice", texts, is_named=bool(draw.integers(2)))
    index.add(index.add_file(path, path, ""), document, passages)


def check(index):
    """Compare the scores of a question, and how many passages have its terms, with those of SQLite's own."""
    with index.snapshot(), closing(sqlite3.connect(":memory:")) as own:
        own.execute("CREATE VIRTUAL TABLE words USING fts5(title, text, tokenize=ascii)")
        rows = index.table.execute("SELECT id, title, text FROM passages ORDER BY id").fetchall()
        folded = [(n, words.exactly(title), words.exactly(text)) for n, title, text in rows]
        own.executemany("INSERT INTO words(rowid, title, text) VALUES (?, ?, ?)", folded)
        asked = words.parse(QUESTION)
        assert len(asked.terms) == 12
        expected = np.zeros(len(rows))
        numbers = np.array([number for number, *_ in rows])
        for term in asked.terms:
            expression = f'"{term.rstrip("*")}"' + "*" * term.endswith("*")
            ranking = "SELECT rowid, -bm25(words) FROM words WHERE words MATCH ?"
            scores = own.execute(ranking, [expression]).fetchall()
            assert index.lexical.frequency(term) == len(scores)
            if term in index.lexical.terms(asked):
                for number, score in scores:
                    expected[numbers == number] += score
        np.testing.assert_allclose(index.lexical.scores(asked, numbers > 0), expected, rtol=1e-4)


@pytest.mark.parametrize("block", [1, 3, 1 << 14])
def test_words_are_scored_as_sqlite_does_after_any_changes(tmp_path, monkeypatch, block):
    monkeypatch.setattr(postings, "BLOCK", block)
    monkeypatch.setattr(lexical, "RERANKED", 0)
    draw = np.random.default_rng(block)
    for _ in range(6):
        with write_index(tmp_path / "index") as index:
            with index.changing():
                add(index, draw, f"/{draw.integers(3)}")
            check(open_index(tmp_path / "index"))  # before its postings are stored
            with index.changing():
                index.table.execute("DELETE FROM files WHERE path = ?", [f"/{draw.integers(3)}"])
                add(index, draw, "/3")
        index = open_index(tmp_path / "index")
        check(index)
        used = index.count(f"(SELECT DISTINCT id / {block} FROM passages)")
        assert index.count("(SELECT DISTINCT block FROM postings)") == used


def test_many_passages_have_postings_before_the_index_is_finished(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "AT_MOST_UNSTORED", 8)
    written = []
    number = 0

    def write_postings(table):
        postings.write_postings(table)
        written.append((number, table.execute("SELECT count(*) > 0 FROM postings").fetchone()))

    monkeypatch.setattr(writing, "write_postings", write_postings)
    draw = np.random.default_rng(0)
    with write_index(tmp_path / "index") as index:
        for number in range(1, 6):
            with index.changing():
                add(index, draw, f"/{number}")
        assert written == [(0, (0,)), (2, (1,)), (4, (1,))]


def test_a_word_of_a_long_passage_counts_at_most_255_times_and_phrases_are_found(tmp_path):
    texts = ["a b " * 400, "b c"]
    with write_index(tmp_path / "index") as index, index.changing():
        passages = [Passage(0, len(text), text) for text in texts]
        index.add(index.add_file("/long", "long", ""), Document("", []), passages)
    index = open_index(tmp_path / "index")
    assert index.lexical.find("a")[1].tolist() == [255]
    assert index.lexical.find("b")[1].tolist() == [255, 1]
    assert [index.lexical.frequency(term) for term in ("b a", "b c", "a c", "c b")] == [1, 1, 0, 0]
