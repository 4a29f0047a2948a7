"""The complete recipe, judged from 20,000 records that `bert tokenize` makes of a text with known answers.

Every word of the text shows its document and the word after it, so pairs, truncation and masks can be checked from the
tokens alone. Bounds are exact or five standard deviations.
"""

import random
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
from support.corpora import open_stream

from bert_cli.config.data import TokenizeSettings
from bert_cli.data.examples.inspect import unmasked
from bert_cli.data.records.formats import Batch
from bert_cli.data.steps.tokenize import run
from bert_cli.facts.masking import Masking

S, P = 48, 7
LONGEST = S - 3
ENOUGH = 20_000
COPIES = 2

# Every document has its own words. INNER ones follow each other in a circle through the document, some of them in
# several pieces; a sentence is OPEN, some of them, CLOSE.
PIECES_OF_INNER = [1, 1, 2, 1, 3, 1, 1, 2, 1, 1, 1, 4]
INNER = len(PIECES_OF_INNER)
OPEN, CLOSE, SUFFIX, SPECIAL = INNER, INNER + 1, -1, -2
SUFFIXES = ["qa", "qb", "qc"]
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PAD, UNK, CLS, SEP, MASK = range(5)

DOCUMENTS = 1000
LONG_DOCUMENTS = 6

FIRST_WORD = len(SPECIALS) + len(SUFFIXES)
VOCAB_SIZE = FIRST_WORD + DOCUMENTS * (INNER + 2)
NUMBERS = np.arange(VOCAB_SIZE) - FIRST_WORD
KIND = np.where(NUMBERS < 0, SUFFIX, NUMBERS % (INNER + 2))
KIND[: len(SPECIALS)] = SPECIAL
DOCUMENT = np.where(NUMBERS < 0, -1, NUMBERS // (INNER + 2))
"""Kind and document of each token of the vocabulary."""


def code(number: int) -> str:
    """Return four letters, so that no word is the start of another."""
    return f"{number:04x}".translate(str.maketrans("0123456789abcdef", "abcdefghijklmnop"))


def word(document: int, kind: int) -> str:
    pieces = PIECES_OF_INNER[kind] if kind < INNER else 1
    return code(document * (INNER + 2) + kind) + "".join(SUFFIXES[: pieces - 1])


def sentences_of_many_words() -> Iterator[str]:
    """Yield documents of 76 sentences of 3 to 11 words, 10 pieces on average."""
    draw = random.Random(1)
    for document in range(DOCUMENTS):
        words = [word(document, kind) for kind in range(INNER + 2)]
        index = 0
        for _ in range(76):
            count = draw.randint(1, 9)
            inner = [words[(index + step) % INNER] for step in range(count)]
            index += count
            yield " ".join([words[OPEN], *inner, words[CLOSE]])
        yield ""


def sentences_of_one_piece() -> Iterator[str]:
    """Yield 6 documents of 160,000 sentences of one piece: the length of a pair is its target."""
    for document in range(LONG_DOCUMENTS):
        yield from [word(document, kind) for kind in (0, 1, 3, 5)] * 40_000
        yield ""


TEXTS = {"words": sentences_of_many_words, "pieces": sentences_of_one_piece}


class Sequences:
    def __init__(self, batch: Batch) -> None:
        row, slot = np.nonzero(batch["masked_lm_weights"])
        self.tokens = unmasked(batch)  # [n, S]
        self.shown = batch["input_ids"]  # [n, S] what the model reads
        self.masked = np.zeros(self.shown.shape, bool)  # [n, S] predicted positions
        self.masked[row, batch["masked_lm_positions"][row, slot]] = True
        assert self.masked.sum() == len(row), "no position is predicted twice"
        self.ordinary = ~np.isin(self.tokens, [PAD, CLS, SEP])
        self.lengths = batch["input_mask"].sum(axis=1)
        # With [CLS] and the first [SEP].
        self.first_lengths = self.lengths - batch["segment_ids"].sum(axis=1)
        self.labels = batch["next_sentence_labels"]

    def __len__(self) -> int:
        return len(self.lengths)


KINDS = ("static", "dynamic")


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """A function that reads about 22,000 sequences of an epoch, made and read once for all tests."""
    home = tmp_path_factory.mktemp("recipe")
    pieces = [*SPECIALS, *("##" + suffix for suffix in SUFFIXES)]
    pieces += map(code, range(VOCAB_SIZE - FIRST_WORD))
    (home / "vocab.txt").write_text("\n".join(pieces) + "\n")
    for name, lines in TEXTS.items():
        (home / name).write_text("\n".join(lines()))

    @cache
    def read(kind: str, text: str, unit: str = "token") -> Sequences:
        """Return static or dynamic records of a text that are masked by a unit."""
        is_static = kind == "static"
        out = home / f"{text}_{kind}_{unit if is_static else ''}"
        if not out.exists():
            masks = {"duplication_factor": COPIES, "whole_word_masking": unit == "word"}
            settings = {"sequence_length": S, "mask_tokens": P, "masking": kind, "processes": 1}
            settings |= {"input": home / text, "vocab": str(home / "vocab.txt")}
            run(TokenizeSettings(out=out, **settings, **(masks if is_static else {})))
        masking = {} if is_static else {"masking": Masking(unit=unit)}
        reader = open_stream(out, seed=5, examples=1, micro=1, **masking)
        rows = Sequences(reader.rows(np.arange(min(22_000, reader.epoch_size))))
        assert len(rows) >= ENOUGH
        return rows

    return read


def is_fraction(hits, trials, expected, tolerance=0.0):
    """Within five standard deviations of a binomial fraction, and a tolerance for known effects."""
    return (
        abs(hits / trials - expected) < 5 * np.sqrt(expected * (1 - expected) / trials) + tolerance
    )


def is_spread(counts, expected):
    """Pearson's chi-square within five standard deviations, made normal by its cube root.

    Wilson & Hilferty 1931, "The Distribution of Chi-Square".
    """
    freedom = len(counts) - 1
    ratio = ((counts - expected) ** 2 / expected).sum() / freedom
    variance = 2 / (9 * freedom)
    return abs(np.cbrt(ratio) - (1 - variance)) < 5 * np.sqrt(variance)


def is_zero(values):
    """The mean of independent values is zero, by their own deviation."""
    return abs(np.mean(values)) <= 5 * np.std(values) / np.sqrt(len(values))


# --- exact properties


@pytest.mark.parametrize("name", KINDS)
def test_an_example_is_two_segments_of_words_with_as_many_masks_as_the_recipe_says(read, name):
    rows = read(name, "words")
    position, row = np.arange(S), np.arange(len(rows))
    assert np.all(rows.tokens[:, 0] == CLS)
    assert np.all(rows.tokens[row, rows.first_lengths - 1] == SEP)
    assert np.all(rows.tokens[row, rows.lengths - 1] == SEP)
    assert np.array_equal(rows.tokens == PAD, position >= rows.lengths[:, None])
    assert np.all(rows.ordinary.sum(axis=1) == rows.lengths - 3)
    assert not np.any(np.isin(rows.tokens, [UNK, MASK]))
    assert rows.first_lengths.min() >= 3 and (rows.lengths - rows.first_lengths).min() >= 2
    assert np.array_equal(rows.masked.sum(axis=1), np.clip(np.rint(0.15 * rows.lengths), 1, P))
    assert not np.any(rows.masked & ~rows.ordinary)
    assert np.array_equal(rows.shown[~rows.masked], rows.tokens[~rows.masked])


@pytest.mark.parametrize("name", KINDS)
def test_an_actual_next_follows_the_first_segment_and_a_random_one_is_of_another_document(
    read, name
):
    rows = read(name, "words")
    kinds, documents = KIND[rows.tokens], DOCUMENT[rows.tokens]
    is_second = np.arange(S) >= rows.first_lengths[:, None]
    of_segment = []
    for inside in (~is_second, is_second):
        known = inside & (documents >= 0)
        high = np.where(known, documents, -1).max(axis=1)
        low = np.where(known, documents, DOCUMENTS).min(axis=1)
        assert np.array_equal(high, low), "all words of a segment are of one document"
        of_segment.append(high)
    assert np.array_equal(of_segment[0] != of_segment[1], rows.labels == 1)
    # Inner words follow each other in a circle, also from A to an actual next where nothing was truncated.
    row, position = np.nonzero((kinds >= 0) & (kinds < INNER))
    follows = (rows.labels == 0) & (rows.lengths < S)
    segment = np.where(follows[row], 2 * row, 2 * row + is_second[row, position])
    steps = np.diff(kinds[row, position])[np.diff(segment) == 0] % INNER
    assert np.all(steps == 1)


# --- what is drawn


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("unit", ["token", "word"])
def test_80_percent_of_masked_tokens_are_hidden_10_are_random_and_10_stay(read, name, unit):
    rows = read(name, "words", unit)
    shown, tokens = rows.shown[rows.masked], rows.tokens[rows.masked]
    is_mask, is_same = shown == MASK, shown == tokens
    # A random token is [MASK], or the token itself, once in V times.
    assert is_fraction(is_mask.sum(), len(shown), 0.8 + 0.1 / VOCAB_SIZE)
    assert is_fraction(is_same.sum(), len(shown), 0.1 + 0.1 / VOCAB_SIZE)
    other = shown[~is_mask & ~is_same]
    assert is_fraction(len(other), len(shown), 0.1 - 0.2 / VOCAB_SIZE)
    # It is any token of the vocabulary, also the first and the last.
    edges = np.linspace(0, VOCAB_SIZE, 65)
    assert is_spread(np.histogram(other, edges)[0], len(other) * np.diff(edges) / VOCAB_SIZE)
    assert other.min() < VOCAB_SIZE / 200
    assert other.max() > VOCAB_SIZE - VOCAB_SIZE / 200


def test_every_position_is_equally_likely_to_be_masked_whatever_its_neighbours_are(read):
    rows = read("dynamic", "pieces")
    is_full = rows.lengths == S
    words, masked = rows.ordinary[is_full].sum(axis=0), rows.masked[is_full]
    positions = np.flatnonzero(words)
    assert len(positions) == S - 2
    for position in positions:
        assert is_fraction(masked[:, position].sum(), words[position], P / LONGEST)
    # Two segments have 43 pairs of neighbours.
    both = (masked[:, 1:] & masked[:, :-1]).sum(axis=1)
    assert is_zero(both - (LONGEST - 2) * P * (P - 1) / (LONGEST * (LONGEST - 1)))


def test_half_of_the_examples_have_a_random_next_and_a_tenth_a_random_shorter_length(read):
    rows = read("static", "pieces")
    # About six pairs end with their document, as each random next halves it.
    tolerance = LONG_DOCUMENTS * COPIES * 6 / len(rows) + S / 160_000
    assert is_fraction(rows.labels.sum(), len(rows), 0.5, tolerance)
    # The shorter length is one of 2 to S - 3, so it may be the longest too.
    expected = 0.9 + 0.1 / (LONGEST - 1)
    assert is_fraction((rows.lengths == S).sum(), len(rows), expected, tolerance)
    counts = np.bincount(rows.lengths - 3, minlength=LONGEST)[2:LONGEST]
    assert is_spread(counts, len(rows) * 0.1 / (LONGEST - 1) * np.ones(LONGEST - 2))
