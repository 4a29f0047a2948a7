"""Text to token ids for `bert tokenize`: the same ids as from the `tokenizers` library, WordPiece five times as fast.

Every distinct word is encoded once. New words of ASCII characters are split here, longest piece first (Schuster and
Nakajima 2012); others go to the library, and so do all lines for byte-level BPE.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, compress, count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bert_cli.data.random import Numbers
from bert_cli.data.tokens import tokenizer
from bert_cli.data.tokens.notation import BYTE_LEVEL
from bert_cli.data.tokens.tokenizer import Normalization, Vocabulary

KNOWN_WORDS = 400_000  # distinct words in the cache, about 60 MB; then it is cleared
# BERT removes control characters, which joins their neighbours, but `str.split` splits at all of these except \0. So
# they are removed beforehand, and \0 marks the end of a line or of a word.
_END = "\0"
_CONTROL_SPACES = "\0\x0b\x0c\x1c\x1d\x1e\x1f\x85"
_ASCII_CONTROLS = re.compile(r"[\x01-\x1f\x7f]")
_ASCII_PARTS = re.compile(r"[0-9A-Za-z]+|[^0-9A-Za-z]")

Ids = npt.NDArray[np.uint16 | np.uint32]


class Sentences(NamedTuple):
    """Tokens of all lines of a text in a row, the tokens of each line, and which lines are white space alone."""

    tokens: Ids
    lengths: Numbers
    blank: npt.NDArray[np.bool_]


class ByteLevelEncoder:
    """Encodes lines of text with the byte-level BPE of a folder."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = tokenizer.read_tokenizer(folder)
        self._dtype = _dtype(len(self._tokenizer.pieces) - 1)

    def encode(self, text: str) -> Sentences:
        """Encode the lines of a text. A line after a line of its document begins with a space, as in running text."""
        lines = [line.strip() for line in text.split("\n")]
        pairs = zip(["", *lines], lines, strict=False)
        spaced = [f" {line}" if before and line else line for before, line in pairs]
        encodings = self._tokenizer.library.encode_batch_fast(spaced, add_special_tokens=False)
        ids = [encoding.ids for encoding in encodings]
        blank = np.array([not line for line in lines], np.bool_)
        tokens = np.fromiter(chain.from_iterable(ids), self._dtype)
        return Sentences(tokens, np.array([len(row) for row in ids], np.int64), blank)


class Encoder:
    """Encodes lines of text and caches their words; the vocabulary must hold [UNK]."""

    def __init__(self, vocabulary: dict[str, int], normalization: Normalization) -> None:
        self._vocabulary = vocabulary
        self._longest_piece = max(map(len, vocabulary))
        self._cased = normalization.cased
        self._library = tokenizer.library_tokenizer(vocabulary, normalization)
        self._clear()

    def _clear(self) -> None:
        dtype = _dtype(max(self._vocabulary.values()))
        self._words = _Table(dtype)
        self._parts = _Table(dtype)

    def encode(self, text: str) -> Sentences:
        """Encode the lines of a text, which only line feeds separate."""
        for character in _CONTROL_SPACES:
            if character in text:
                text = text.replace(character, "")
        if self._words.known > KNOWN_WORDS:
            self._clear()
        # Splitting all lines at once takes half the time of splitting each line.
        words = self._words.numbers(text.replace("\n", f" {_END} ").split())
        self._learn(self._words.new())
        tokens, lengths = self._words.tokens(words)
        ends = _ends(words)
        blank = np.diff(ends, prepend=-1) == 1
        return Sentences(tokens, _between(ends, lengths), blank)

    def _learn(self, words: Sequence[str]) -> None:
        """Encode new words and add their tokens to the table."""
        ascii_flags = list(map(str.isascii, words))
        joined = _ASCII_CONTROLS.sub("", _END.join(compress(words, ascii_flags)))
        parts = self._parts.numbers(_ASCII_PARTS.findall(joined if self._cased else joined.lower()))
        pieces = [
            split_word(part, self._vocabulary, self._longest_piece) for part in self._parts.new()
        ]
        self._parts.add(list(chain.from_iterable(pieces)), list(map(len, pieces)))
        ascii_tokens, part_lengths = self._parts.tokens(parts)

        foreign = [word for word in words if not word.isascii()]
        encodings = self._library.encode_batch_fast(foreign, add_special_tokens=False)
        other_ids = [encoding.ids for encoding in encodings]

        is_ascii = np.array(ascii_flags, np.bool_)
        lengths = np.zeros(len(words), np.int64)
        lengths[is_ascii] = _between(_ends(parts), part_lengths)[: np.count_nonzero(is_ascii)]
        lengths[~is_ascii] = list(map(len, other_ids))
        other_tokens = np.array(list(chain.from_iterable(other_ids)), ascii_tokens.dtype)
        tokens = np.append(ascii_tokens, other_tokens)
        self._words.add(tokens, lengths, np.argsort(~is_ascii, kind="stable"))


LineEncoder = Encoder | ByteLevelEncoder


def encoder_of(vocabulary: Vocabulary) -> LineEncoder:
    """Return an encoder with a vocabulary and its normalization."""
    if vocabulary.notation is BYTE_LEVEL:
        return ByteLevelEncoder(vocabulary.path.parent)
    return Encoder(vocabulary.ids, vocabulary.normalization)


def split_word(word: str, vocabulary: Mapping[str, int], longest_piece: int) -> list[int]:
    """Split a word into the longest pieces, from the left, or [UNK] if that fails; later pieces begin with ##."""
    ids: list[int] = []
    if len(word) > tokenizer.LONGEST_WORD:
        return [vocabulary["[UNK]"]]
    while True:
        end = min(len(word), longest_piece)
        while (number := vocabulary.get(word[:end])) is None:
            end -= 1
            if end == 2 * word.startswith("##"):
                return [vocabulary["[UNK]"]]
        ids.append(number)
        if end == len(word):
            return ids
        word = "##" + word[end:]


class _Table:
    """Numbers strings in the order of their first occurrence, and holds the tokens of each."""

    def __init__(self, dtype: type[np.unsignedinteger]) -> None:
        # A counter: its own __len__ would make the table refer to itself, and nothing collects cycles meanwhile.
        self._numbers: defaultdict[str, int] = defaultdict(count().__next__)
        self._tokens: Ids = np.zeros(0, dtype)
        self._starts = np.zeros(0, np.int64)
        self._lengths = np.zeros(0, np.int64)
        self.numbers([_END])
        self.add([], [0])  # number 0, without tokens

    @property
    def known(self) -> int:
        return len(self._starts)

    def numbers(self, strings: Iterable[str]) -> Numbers:
        """Return the numbers of strings; a new string gets the next one."""
        return np.fromiter(map(self._numbers.__getitem__, strings), np.int64)

    def new(self) -> list[str]:
        """Return the strings that have no tokens yet, in the order of their numbers."""
        return list(self._numbers)[self.known :]

    def add(
        self, tokens: npt.ArrayLike, lengths: npt.ArrayLike, order: Numbers | None = None
    ) -> None:
        """Add the tokens of the new strings, in the order of their numbers or in `order`."""
        lengths = np.asarray(lengths, np.int64)
        order = np.arange(len(lengths)) if order is None else order
        starts = np.empty(len(lengths), np.int64)
        starts[order] = len(self._tokens) + np.cumsum(lengths[order]) - lengths[order]
        added = np.asarray(tokens, self._tokens.dtype)
        self._tokens = np.concatenate((self._tokens, added))
        self._starts = np.concatenate((self._starts, starts))
        self._lengths = np.concatenate((self._lengths, lengths))

    def tokens(self, numbers: Numbers) -> tuple[Ids, Numbers]:
        """Return the tokens of these strings in a row, and the number of tokens of each."""
        lengths = self._lengths[numbers]
        ends = np.cumsum(lengths)
        # From the index of a token in the result to its index in the table.
        shift = self._starts[numbers] - (ends - lengths)
        total = int(ends[-1]) if len(ends) else 0
        return self._tokens[np.arange(total) + np.repeat(shift, lengths)], lengths


def _dtype(largest: int) -> type[np.unsignedinteger]:
    """Return the type of token ids up to `largest`."""
    return np.uint16 if largest < 65536 else np.uint32


def _ends(numbers: Numbers) -> Numbers:
    """Return the index where each line (or word) ends: at an _END, or at the end of the text."""
    return np.append(np.flatnonzero(numbers == 0), len(numbers))


def _between(ends: Numbers, lengths: Numbers) -> Numbers:
    """Return the sums of the lengths between the ends; the length of an _END is 0."""
    before = np.append(0, np.cumsum(lengths))
    return np.diff(before[ends], prepend=0)
