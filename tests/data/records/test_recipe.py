"""The recipe as a whole, judged from records that the real command made of a text with known answers.

Every word of the text says which document it is of and what comes after it, so that pairs, cuts and
masks can be told from the tokens alone. Each property is checked over at least 20,000 sequences of
every kind of reader; bounds are exact or five standard deviations.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import open_stream

from bert_cli.config.data import Masking, PackSettings, TokenizeSettings
from bert_cli.data.records import pack, tokenize
from bert_cli.data.records.columns import Batch
from bert_cli.data.stream.permutation import record_at

S, P = 48, 7
LONGEST = S - 3
ENOUGH = 20_000
COPIES = 2
PACKS = {"sequence_length": 2 * S, "max_sequences_per_pack": 3}

# A document has words of its own. INNER ones follow each other in a circle through the whole
# document, some in several pieces; a sentence is OPEN, some of them, CLOSE.
PIECES_OF_INNER = [1, 1, 2, 1, 3, 1, 1, 2, 1, 1, 1, 4]
INNER = len(PIECES_OF_INNER)
OPEN, CLOSE, SUFFIX, SPECIAL = INNER, INNER + 1, -1, -2
SUFFIXES = ["qa", "qb", "qc"]
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PAD, UNK, CLS, SEP, MASK = range(5)

DOCUMENTS = 1000
LONG_DOCUMENTS = 6

FIRST_WORD = len(SPECIALS) + len(SUFFIXES)
WORDS = FIRST_WORD + DOCUMENTS * (INNER + 2)
NUMBERS = np.arange(WORDS) - FIRST_WORD
KIND = np.where(NUMBERS < 0, SUFFIX, NUMBERS % (INNER + 2))
KIND[: len(SPECIALS)] = SPECIAL
DOCUMENT = np.where(NUMBERS < 0, -1, NUMBERS // (INNER + 2))
"""What a token of the vocabulary is, and of which document."""


def code(document: int, kind: int) -> str:
    """Four letters, so that no word is the start of another."""
    number, letters = document * (INNER + 2) + kind, ""
    for _ in range(4):
        number, digit = divmod(number, 16)
        letters += "abcdefghijklmnop"[digit]
    return letters


def word(document: int, kind: int) -> str:
    pieces = PIECES_OF_INNER[kind] if kind < INNER else 1
    return code(document, kind) + "".join(SUFFIXES[: pieces - 1])


def sentences_of_many_words() -> Iterator[str]:
    """1,000 documents of 76 sentences of 3 to 11 words, 10 pieces on average."""
    draw = random.Random(1)
    for document in range(DOCUMENTS):
        words = [word(document, kind) for kind in range(INNER + 2)]
        place = 0
        for _ in range(76):
            count = draw.randint(1, 9)
            inner = [words[(place + step) % INNER] for step in range(count)]
            place += count
            yield " ".join([words[OPEN], *inner, words[CLOSE]])
        yield ""


def sentences_of_one_piece() -> Iterator[str]:
    """6 documents of 160,000 sentences of one piece: a pair's length is then just its target."""
    for document in range(LONG_DOCUMENTS):
        words = [word(document, kind) for kind in (0, 1, 3, 5)]
        yield from words * 40_000
        yield ""


EVEN = [OPEN, 0, 1, 3, 5, 6, 8, 9, 10, CLOSE]


def sentences_of_ten_pieces() -> Iterator[str]:
    """1,000 documents of 90 sentences of ten words, each of one piece, whose kind is its place."""
    for document in range(DOCUMENTS):
        yield from [" ".join(word(document, kind) for kind in EVEN)] * 90
        yield ""


TEXTS = {
    "words": sentences_of_many_words,
    "pieces": sentences_of_one_piece,
    "tens": sentences_of_ten_pieces,
}


@dataclass
class Sequences:
    """What was read: one row a sequence, however many of them an example holds."""

    tokens: np.ndarray
    """[n, S] what the text says: masks undone."""
    seen: np.ndarray
    """[n, S] what the model reads."""
    masked: np.ndarray
    """[n, S] places to be predicted."""
    lengths: np.ndarray
    first_lengths: np.ndarray
    """[n] with [CLS] and the first [SEP]."""
    labels: np.ndarray

    def rows(self, chosen: np.ndarray) -> "Sequences":
        return Sequences(**{name: column[chosen] for name, column in vars(self).items()})

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def ordinary(self) -> np.ndarray:
        """[n, S] places of neither padding nor [CLS] nor [SEP]."""
        return ~np.isin(self.tokens, [PAD, CLS, SEP])

    @property
    def full(self) -> "Sequences":
        return self.rows(self.lengths == S)


def sequences(batch: Batch) -> Sequences:
    """Undo masks and packing."""
    row, slot = np.nonzero(batch["masked_lm_weights"])
    place = batch["masked_lm_positions"][row, slot]
    tokens, masked = batch["input_ids"].copy(), np.zeros(batch["input_ids"].shape, bool)
    tokens[row, place] = batch["masked_lm_ids"][row, slot]
    masked[row, place] = True
    assert masked.sum() == len(row), "no place is predicted twice"
    if "next_sentence_positions" in batch:
        heads, labels = batch["next_sentence_positions"], batch["next_sentence_labels"]
    else:
        heads, labels = np.zeros((len(tokens), 1), int), batch["next_sentence_labels"][:, None]
    found = []
    for number in range(heads.shape[1]):
        held = batch["input_mask"] == number + 1
        lengths = held.sum(axis=1)
        places = heads[:, number : number + 1] + np.arange(S)
        inside = np.arange(S) < lengths[:, None]
        at = np.arange(len(tokens))[:, None], np.where(inside, places, 0)
        assert np.all(held[at][inside])
        columns = [np.where(inside, a[at], 0) for a in (tokens, batch["input_ids"], masked)]
        second = np.where(inside, batch["segment_ids"][at], 0).sum(axis=1)
        whole = [*columns, lengths, lengths - second, labels[:, number]]
        found.append([column[lengths > 0] for column in whole])
    tokens, seen, masked, *rest = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return Sequences(tokens, seen, masked.astype(bool), *rest)


@dataclass
class Home:
    """The corpora of this module, each made when it is first asked for."""

    folder: Path

    def text(self, name: str) -> Path:
        folder = self.folder / name
        if not folder.exists():
            folder.mkdir()
            (folder / "all").write_text("\n".join(TEXTS[name]()))
            pieces = [*SPECIALS, *("##" + suffix for suffix in SUFFIXES)]
            pieces += [code(*divmod(number, INNER + 2)) for number in range(WORDS - FIRST_WORD)]
            (self.folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
        return folder

    def corpus(self, text: str, kind: str, whole_words: bool = False) -> Path:
        out = self.folder / f"{text}_{kind}_{whole_words}"
        if not out.exists():
            of_kind = {"duplication_factor": COPIES, "whole_word_masking": whole_words}
            tokenize.run(
                TokenizeSettings(
                    input=self.text(text),
                    out=out,
                    vocab=str(self.folder / "vocab.txt"),
                    sequence_length=S,
                    mask_tokens=P,
                    masking=kind,
                    processes=1,
                    **(of_kind if kind == "static" else {}),
                )
            )
        return out


def open_static(home: Home, text: str, unit: str) -> Any:
    assert unit != "span"
    folder = home.corpus(text, "static", unit == "word")
    return open_stream(folder, seed=5, examples=1, micro=1)


def open_dynamic(home: Home, text: str, unit: str) -> Any:
    folder = home.corpus(text, "dynamic")
    return open_stream(folder, seed=5, examples=1, micro=1, masking=Masking(unit=unit))


def packed_on_disk(home: Home, text: str, kind: str, whole_words: bool = False) -> Path:
    """The corpus after `bert pack`, up to three sequences in an example of twice the places."""
    folder = home.corpus(text, kind, whole_words)
    out = folder.with_name(f"{folder.name}_packed")
    if not out.exists():
        pack.run(PackSettings(input=folder, out=out, processes=1, **PACKS))
    return out


def open_packed_static(home: Home, text: str, unit: str) -> Any:
    folder = packed_on_disk(home, text, "static", unit == "word")
    return open_stream(folder, seed=5, examples=1, micro=1)


def open_packed_dynamic(home: Home, text: str, unit: str) -> Any:
    folder = packed_on_disk(home, text, "dynamic")
    return open_stream(folder, seed=5, examples=1, micro=1, masking=Masking(unit=unit))


def open_dynamic_in_packs(home: Home, text: str, unit: str) -> Any:
    folder = home.corpus(text, "dynamic")
    return open_stream(
        folder,
        seed=5,
        examples=1,
        micro=1,
        masking=Masking(unit=unit),
        **PACKS,
    )


# Each opens a corpus of a text, masked by a unit.
READERS = {
    "static": open_static,
    "dynamic": open_dynamic,
    "packed static": open_packed_static,
    "packed dynamic": open_packed_dynamic,
    "dynamic in packs": open_dynamic_in_packs,
}
DYNAMIC = [name for name in READERS if "dynamic" in name]

Read = Callable[..., Sequences]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return Home(tmp_path_factory.mktemp("recipe"))


@pytest.fixture(scope="module")
def readers(home):
    """A function that reads an epoch, or what of it has about 22,000 sequences, once for all tests."""

    @cache
    def read(kind: str, text: str, unit: str) -> Sequences:
        reader = READERS[kind](home, text, unit)
        examples = min(22_000 / reader.source.sequences, 1) * reader.epoch_size
        found = sequences(reader.rows(np.arange(int(examples))))
        assert len(found) >= ENOUGH
        return found

    return read


@pytest.fixture(params=READERS)
def read(request, readers) -> Read:
    return lambda text, unit="token": readers(request.param, text, unit)


def is_share(hits, trials, wanted, beside=0.0):
    """Within five standard deviations of a binomial share, and `beside` of it for what is known."""
    return abs(hits / trials - wanted) < 5 * np.sqrt(wanted * (1 - wanted) / trials) + beside


def is_spread(counts, expected):
    """Pearson's chi-square within five standard deviations, made normal by its cube root.

    Wilson & Hilferty 1931, "The Distribution of Chi-Square".
    """
    freedom = len(counts) - 1
    ratio = ((counts - expected) ** 2 / expected).sum() / freedom
    variance = 2 / (9 * freedom)
    return abs(np.cbrt(ratio) - (1 - variance)) < 5 * np.sqrt(variance)


def is_zero(values):
    """The mean of independent values is zero, by their own spread."""
    return abs(np.mean(values)) <= 5 * np.std(values) / np.sqrt(len(values))


def document_ends(found: Sequences) -> float:
    """Share of sequences that may be shorter than they aimed at in the text of six documents.

    A document's rest is halved by every random next, so about six pairs run into its end; and a
    random next may start within S of an end.
    """
    ends = LONG_DOCUMENTS * COPIES * 6
    return ends / len(found) + S / 160_000


# --- what an example is


def test_an_example_is_two_segments_of_words_between_special_tokens(read):
    for text in TEXTS:
        found = read(text)
        place, row = np.arange(S), np.arange(len(found))
        assert np.all(found.tokens[:, 0] == CLS)
        assert np.all(found.tokens[row, found.first_lengths - 1] == SEP)
        assert np.all(found.tokens[row, found.lengths - 1] == SEP)
        assert np.array_equal(found.tokens == PAD, place >= found.lengths[:, None])
        # One [CLS] and two [SEP], so all else is words, and none is unknown.
        assert np.all(found.ordinary.sum(axis=1) == found.lengths - 3)
        assert not np.any(np.isin(found.tokens, [UNK, MASK]))
        assert found.first_lengths.min() >= 3
        assert np.all(found.lengths - found.first_lengths >= 2)
        assert np.all(found.lengths <= S)


# --- masks


def test_as_many_tokens_are_masked_as_the_recipe_says_and_no_special_one(read):
    for text in TEXTS:
        found = read(text)
        wanted = np.clip(np.rint(0.15 * found.lengths), 1, P)
        assert np.array_equal(found.masked.sum(axis=1), wanted)
        assert not np.any(found.masked & ~found.ordinary)
        assert np.array_equal(found.seen[~found.masked], found.tokens[~found.masked])


@pytest.mark.parametrize("unit", ["token", "word"])
def test_of_masked_tokens_80_percent_are_hidden_10_another_word_and_10_stay(read, unit):
    found = read("words", unit)
    seen, said = found.seen[found.masked], found.tokens[found.masked]
    hidden, kept = seen == MASK, seen == said
    # A random word is [MASK], or the word itself, once in V times.
    assert is_share(hidden.sum(), len(seen), 0.8 + 0.1 / WORDS)
    assert is_share(kept.sum(), len(seen), 0.1 + 0.1 / WORDS)
    other = seen[~hidden & ~kept]
    assert is_share(len(other), len(seen), 0.1 - 0.2 / WORDS)
    # The random word is any of the whole vocabulary, the first and the last too.
    parts = np.linspace(0, WORDS, 65)
    assert is_spread(np.histogram(other, parts)[0], len(other) * np.diff(parts) / WORDS)
    assert other.min() < WORDS / 200
    assert other.max() > WORDS - WORDS / 200


def test_every_place_is_as_likely_to_be_masked_whatever_its_neighbours_are(read):
    found = read("pieces").full
    words = found.ordinary.sum(axis=0)
    places = np.flatnonzero(words)
    assert len(places) == S - 2
    for place in places:
        assert is_share(found.masked[:, place].sum(), words[place], P / LONGEST)
    # Two segments have 43 pairs of neighbours.
    both = (found.masked[:, 1:] & found.masked[:, :-1]).sum(axis=1)
    assert is_zero(both - (LONGEST - 2) * P * (P - 1) / (LONGEST * (LONGEST - 1)))


@pytest.mark.parametrize("unit", ["token", "word", "span"])
def test_the_masks_of_a_record_in_two_epochs_have_nothing_to_do_with_each_other(home, unit):
    reader = open_dynamic(home, "pieces", unit)
    size = reader.epoch_size
    both = []
    for epoch in (0, 1):
        positions = np.arange(epoch * size, (epoch + 1) * size)
        epochs, records = record_at(positions, size, reader.source.seed)
        assert np.all(epochs == epoch)
        both.append(sequences(reader.rows(positions[np.argsort(records)][:ENOUGH])))
    one, other = both
    assert len(one) >= ENOUGH
    assert np.array_equal(one.tokens, other.tokens)
    is_full = one.lengths == S
    shared = (one.masked & other.masked)[is_full].sum(axis=1)
    if unit == "span":
        # Not all places are as likely, those at the edges less: what is expected follows from how
        # often each is masked where the first segment is as long.
        counts = [masks.masked[is_full] for masks in both]
        groups = one.first_lengths[is_full]
        expected = np.zeros(len(groups))
        for length in np.unique(groups):
            chosen = groups == length
            rates = (counts[0][chosen].mean(axis=0) + counts[1][chosen].mean(axis=0)) / 2
            expected[chosen] = (rates**2).sum()
        shared = shared - expected
    else:
        shared = shared - P * P / LONGEST
    assert is_zero(shared)


def words_of(found: Sequences) -> tuple[np.ndarray, np.ndarray]:
    """Whether a place goes on with the word before it [n, S], and the pieces of the word it begins."""
    goes_on = KIND[found.tokens] == SUFFIX
    goes_on[:, 1:] &= found.ordinary[:, :-1]
    begins = found.ordinary & ~goes_on
    numbers = np.cumsum(begins.ravel()) - 1
    pieces = np.bincount(numbers[found.ordinary.ravel()])
    sizes = np.zeros(begins.shape, int)
    sizes[begins] = pieces
    return goes_on, sizes


def test_whole_words_are_masked_whole_and_none_that_fits_is_left_out(read):
    found = read("words", "word")
    goes_on, sizes = words_of(found)
    assert goes_on.sum() > ENOUGH
    assert np.array_equal(found.masked[:, 1:][goes_on[:, 1:]], found.masked[:, :-1][goes_on[:, 1:]])
    left = np.clip(np.rint(0.15 * found.lengths), 1, P) - found.masked.sum(axis=1)
    assert left.min() == 0
    assert not np.any((sizes > 0) & (sizes <= left[:, None]) & ~found.masked)
    assert found.masked.sum() > 0.98 * np.clip(np.rint(0.15 * found.lengths), 1, P).sum()


# --- spans


def drawn_spans(sizes: list[int], segment: list[bool], wanted: int, draw: random.Random):
    """Spans of one row by the paper's words, with a generator of its own: [words], then its toss."""
    taken = [False] * len(sizes)
    left, tries = wanted, 0
    spans = []
    while left and tries < 30 * len(sizes):
        tries += 1
        first = draw.randrange(len(sizes))
        if taken[first]:
            continue
        longest = draw.choices(range(1, 11), [0.2 * 0.8**count for count in range(10)])[0]
        span = []
        for number in range(first, min(first + longest, len(sizes))):
            if taken[number] or sizes[number] > left or segment[number] != segment[first]:
                break
            taken[number] = True
            left -= sizes[number]
            span.append(number)
        if span:
            spans.append((span, draw.random()))
    return spans


def runs_of(fates: list[int], segment: list[bool]) -> list[list[int]]:
    """Fates of the words of each unbroken row of masked words; the fate is 0 where nothing is masked."""
    runs, before = [], None
    for number, fate in enumerate(fates):
        if fate and before == (number - 1, segment[number]):
            runs[-1].append(fate)
        elif fate:
            runs.append([fate])
        before = (number, segment[number]) if fate else None
    return runs


def summary(fates: list[int], segment: list[bool], pieces: int) -> list[int]:
    """Numbers of a row to be compared.

    Masked pieces, runs of each length and of each fate, and what is masked on both sides of [SEP].
    """
    runs = runs_of(fates, segment)
    lengths = [len(run) for run in runs]
    kinds = ["all hidden" if set(run) == {1} else "mixed" if 1 in run else "other" for run in runs]
    return [
        pieces,
        *(lengths.count(length) for length in range(1, P + 1)),
        *(kinds.count(kind) for kind in ("all hidden", "mixed", "other")),
        int(fates[segment.index(True)] > 0),
        int(fates[segment.index(True)] > 0 and fates[segment.index(True) - 1] > 0),
    ]


@pytest.mark.parametrize("kind", DYNAMIC)
def test_spans_are_as_those_drawn_by_the_words_of_the_paper(readers, kind):
    found = readers(kind, "words", "span")
    goes_on, sizes = words_of(found)
    # Whole words, as many as are wanted or nearly so, never a special token.
    assert np.array_equal(found.masked[:, 1:][goes_on[:, 1:]], found.masked[:, :-1][goes_on[:, 1:]])
    assert not np.any(found.masked & ~found.ordinary)
    wanted = np.clip(np.rint(0.15 * found.lengths), 1, P).astype(int)
    assert np.all(found.masked.sum(axis=1) <= wanted)
    assert found.masked.sum() > 0.98 * wanted.sum()
    hidden = found.masked & (found.seen == MASK)
    kept = found.masked & (found.seen == found.tokens)
    for fate, share in ((hidden, 0.8), (kept, 0.1)):
        # What becomes of the tokens of a row is not independent, of rows it is.
        assert is_zero(fate.sum(axis=1) - share * found.masked.sum(axis=1))
    other = found.seen[found.masked & ~hidden & ~kept]
    parts = np.linspace(0, WORDS, 65)
    assert is_spread(np.histogram(other, parts)[0], len(other) * np.diff(parts) / WORDS)
    # Rows, each beside one that is drawn here over the same words.
    draw = random.Random(11)
    ours, theirs = [], []
    for row in range(ENOUGH):
        begins = np.flatnonzero(sizes[row])
        segment = (begins >= found.first_lengths[row]).tolist()
        fates = np.where(hidden[row, begins], 1, 2 * found.masked[row, begins]).tolist()
        ours.append(summary(fates, segment, int(found.masked[row].sum())))
        of_words = sizes[row, begins].tolist()
        fates = [0] * len(begins)
        for span, toss in drawn_spans(of_words, segment, int(wanted[row]), draw):
            for number in span:
                fates[number] = 1 if toss < 0.8 else 2
        pieces = sum(size for size, fate in zip(of_words, fates, strict=True) if fate)
        theirs.append(summary(fates, segment, pieces))
    differences = np.array(ours) - np.array(theirs)
    for column in range(differences.shape[1]):
        assert np.any(np.array(ours)[:, column])
        assert is_zero(differences[:, column]), column


# --- pairs


def test_half_of_the_examples_have_a_random_next_sentence(read):
    found = read("pieces")
    assert is_share(found.labels.sum(), len(found), 0.5, document_ends(found))


def test_an_actual_next_goes_on_where_the_first_ended_and_a_random_one_is_of_another_document(read):
    found = read("words")
    kinds, documents = KIND[found.tokens], DOCUMENT[found.tokens]
    second = np.arange(S) >= found.first_lengths[:, None]
    # All words of a segment are of one document.
    of_segment = []
    for inside in (~second, second):
        known = inside & (documents >= 0)
        high = np.where(known, documents, -1).max(axis=1)
        low = np.where(known, documents, DOCUMENTS).min(axis=1)
        assert np.array_equal(high, low)
        of_segment.append(high)
    assert np.array_equal(of_segment[0] != of_segment[1], found.labels == 1)
    # In the order of the text: inner words follow each other in a circle.
    row, place = np.nonzero((kinds >= 0) & (kinds < INNER))
    here, side = kinds[row, place], 2 * row + second[row, place]
    same = side[1:] == side[:-1]
    assert np.all((here[1:] - here[:-1])[same] % INNER == 1)
    # From one segment to the next too, where nothing was cut.
    goes_on = (found.labels == 0) & (found.lengths < S)
    crosses = (row[1:] == row[:-1]) & ~same & goes_on[row[1:]]
    assert crosses.sum() == goes_on.sum() > ENOUGH / 50
    assert np.all((here[1:] - here[:-1])[crosses] % INNER == 1)


def test_a_random_next_is_of_any_other_document_alike(read):
    found = read("words")
    second = np.arange(S) >= found.first_lengths[:, None]
    is_random = found.labels == 1
    documents = DOCUMENT[found.tokens]
    of = [np.where(inside, documents, -1).max(axis=1)[is_random] for inside in (~second, second)]
    firsts, seconds = (np.bincount(numbers, minlength=DOCUMENTS) for numbers in of)
    # Documents are as long as each other, to within a few per cent.
    expected = (is_random.sum() - firsts) / (DOCUMENTS - 1)
    assert is_spread(seconds, expected)
    # In twenties too, where a slope would show that is lost in the noise of single ones.
    assert is_spread(seconds.reshape(20, -1).sum(axis=1), expected.reshape(20, -1).sum(axis=1))


def test_a_tenth_of_the_examples_aim_at_a_length_that_is_any_shorter_one_alike(read):
    found = read("pieces")
    beside = document_ends(found)
    # The shorter length is one of 2 to S - 3, and may be the longest too.
    assert is_share((found.lengths == S).sum(), len(found), 0.9 + 0.1 / (LONGEST - 1), beside)
    counts = np.bincount(found.lengths - 3, minlength=LONGEST)[2:LONGEST]
    assert is_spread(counts, len(found) * 0.1 / (LONGEST - 1) * np.ones(LONGEST - 2))


def test_the_first_segment_ends_anywhere_alike(read):
    found = read("pieces").full
    counts = np.bincount(found.first_lengths - 2, minlength=LONGEST)[1:LONGEST]
    assert counts.sum() == len(found)
    assert is_spread(counts, len(found) / (LONGEST - 1) * np.ones(LONGEST - 1))


def test_what_is_too_long_is_cut_to_fit_from_the_longer_segment_in_front_or_behind(read):
    found = read("words")
    kinds, rows = KIND[found.tokens], np.arange(len(found))
    first, second = found.first_lengths - 2, found.lengths - found.first_lengths - 1
    front = [kinds[:, 1] != OPEN, kinds[rows, found.first_lengths] != OPEN]
    behind = [
        kinds[rows, found.first_lengths - 2] != CLOSE,
        kinds[rows, found.lengths - 2] != CLOSE,
    ]
    cut = [front[side] | behind[side] for side in (0, 1)]
    # Cut only where it must be, and then not a token more.
    assert np.all(found.lengths[cut[0] | cut[1]] == S)
    assert np.all((first >= second)[cut[0] & ~cut[1]])
    assert np.all((second >= first - 1)[cut[1] & ~cut[0]])
    assert np.all((first - second == LONGEST % 2)[cut[0] & cut[1]])
    for side in (0, 1):
        assert cut[side].sum() > ENOUGH / 20
        assert (front[side] & behind[side]).sum() > ENOUGH / 100


def test_each_token_that_is_cut_goes_in_front_or_behind_by_the_toss_of_a_coin(read):
    found = read("tens").full
    # Five sentences of ten are five tokens too many, all of them cut from the longer segment.
    place_in_sentence = np.zeros(INNER + 2, int)
    place_in_sentence[EVEN] = np.arange(10)
    lengths = np.stack([found.first_lengths - 2, S - found.first_lengths - 1])
    assert np.all(np.sort(lengths % 10, axis=0) == [[0], [5]])
    longer = lengths[1] % 10 == 5
    start = np.where(longer, found.first_lengths, 1)
    in_front = place_in_sentence[KIND[found.tokens[np.arange(len(found)), start]]]
    chances = np.array([1, 5, 10, 10, 5, 1]) / 32
    assert is_spread(np.bincount(in_front, minlength=6), len(found) * chances)
