"""Postings: BM25 as SQLite's own computes it, after any changes of the index, in blocks of any size."""

import numpy as np
import pytest

from bert_cli.data.search import postings, words
from bert_cli.data.search.index import open_index, write_index
from bert_cli.data.search.passages import Document, Passage

LETTERS = ["mountain", "mounting", "river", "ice", "x12000", "x12", "é", "ÉCOLE", "ecoles", "北京"]
QUESTION = 'mounted rivers, ice x12 école "é"'


def add(index, draw, path):
    """Add a file in place of its earlier text, with a title of words on every other one."""
    texts = [" ".join(draw.choice(LETTERS, draw.integers(1, 300))) for _ in range(4)]
    passages = [Passage(0, len(text), text) for text in texts]
    document = Document("The École of ice", texts, is_named=bool(draw.integers(2)))
    index.add(index.add_file(path, path, ""), document, passages)


def check(index):
    """Compare the scores of the words of a question with those of SQLite's ranking."""
    with index.snapshot():
        asked = [term for term in words.parse(QUESTION).terms if words.term_of(term)]
        assert len(asked) == 6
        ranking = "SELECT rowid, -bm25(words) FROM words WHERE words MATCH ?"
        expected = dict(index.table.execute(ranking, [words.any_of(asked)]).fetchall())
        numbers = [n for (n,) in index.table.execute("SELECT id FROM passages ORDER BY id")]
        scores = postings.Postings(index.table, np.array(numbers)).bm25(map(words.term_of, asked))
        np.testing.assert_allclose(scores, [expected.get(n, 0.0) for n in numbers], rtol=1e-4)
        for term in asked:
            count = "SELECT count(*) FROM words WHERE words MATCH ?"
            assert index.lexical.frequency(term) == index.table.execute(count, [term]).fetchone()[0]


@pytest.mark.parametrize("block", [1, 3, 1 << 14])
def test_words_are_scored_as_sqlite_does_after_any_changes(tmp_path, monkeypatch, block):
    monkeypatch.setattr(postings, "BLOCK", block)
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
        assert index.count("blocks") == used


def test_many_passages_have_postings_before_the_index_is_finished(tmp_path, monkeypatch):
    monkeypatch.setattr("bert_cli.data.search.index.AT_MOST_UNSTORED", 8)
    draw = np.random.default_rng(0)
    with write_index(tmp_path / "index") as index:
        for number, stored in ((1, False), (2, True)):
            with index.changing():
                add(index, draw, f"/{number}")
            assert bool(index.count("blocks")) == stored
