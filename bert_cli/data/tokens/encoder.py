"""Text to token ids for `bert tokenize`: the same ids as from the `tokenizers` library.

WordPiece splits each word alone. So the library encodes each distinct word once, and its tokens are cached. This takes
less than half the time of encoding every line, which byte-level BPE requires.
"""

from collections import defaultdict
from itertools import chain, count, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bert_cli.arrays import Bools, Ints64
from bert_cli.data.tokens import tokenizer
from bert_cli.data.tokens.notation import BYTE_LEVEL
from bert_cli.data.tokens.tokenizer import Normalization, Vocabulary

KNOWN_WORDS = 400_000  # distinct words in the cache, about 60 MB; then it is cleared
# BERT removes control characters, which joins their neighbours, but `str.split` splits at all of these except \0. So
# they are removed beforehand, and \0 marks the end of a line.
_END = "\0"
_CONTROL_SPACES = "\0\x0b\x0c\x1c\x1d\x1e\x1f\x85"

Ids = npt.NDArray[np.uint16 | np.uint32]


class Sentences(NamedTuple):
    """Tokens of all lines of a text in a row, the tokens of each line, and which lines are white space alone."""

    tokens: Ids
    lengths: Ints64
    blank: Bools


class ByteLevelEncoder:
    """Encodes lines of text with the byte-level BPE of a folder."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = tokenizer.read_tokenizer(folder)
        self._dtype = _dtype(len(self._tokenizer.pieces) - 1)

    def encode(self, text: str) -> Sentences:
        """Encode the lines of a text. A line after a line of its document begins with a space, as in running text."""
        lines = [line.strip() for line in text.split("\n")]
        pairs = zip(["", *lines], lines, strict=False)
        # In byte-level BPE a space is a part of the word after it.
        spaced = [f" {line}" if before and line else line for before, line in pairs]
        encodings = self._tokenizer.library.encode_batch_fast(spaced, add_special_tokens=False)
        ids = [encoding.ids for encoding in encodings]
        blank = np.array([not line for line in lines], np.bool_)
        tokens = np.fromiter(chain.from_iterable(ids), self._dtype)
        return Sentences(tokens, np.array([len(row) for row in ids], np.int64), blank)


class Encoder:
    """Encodes lines of text and caches their words; the vocabulary must hold [UNK]."""

    def __init__(self, vocabulary: dict[str, int], normalization: Normalization) -> None:
        self._library = tokenizer.library_tokenizer(vocabulary, normalization)
        self._dtype = _dtype(max(vocabulary.values()))
        self._clear()

    def _clear(self) -> None:
        # Numbers of words by a counter: the dictionary's __len__ would make it refer to itself, and nothing collects
        # cycles meanwhile. _END is the word 0, without tokens.
        self._numbers: defaultdict[str, int] = defaultdict(count(1).__next__, {_END: 0})
        self._tokens: Ids = np.zeros(0, self._dtype)
        self._ends = np.zeros(1, np.int64)  # of the tokens of each word

    def encode(self, text: str) -> Sentences:
        """Encode the lines of a text, which only line feeds separate."""
        for character in _CONTROL_SPACES:
            text = text.replace(character, "")
        if len(self._ends) > KNOWN_WORDS:
            self._clear()
        # Splitting all lines at once takes half the time of splitting each line.
        strings = text.replace("\n", f" {_END} ").split()
        words = np.fromiter(map(self._numbers.__getitem__, strings), np.int64, len(strings))
        self._learn(list(islice(self._numbers, len(self._ends), None)))
        lengths = np.diff(self._ends, prepend=0)[words]
        # The first token of each word in the text, and the end.
        until = np.append(0, np.cumsum(lengths))
        # From the index of a token in the text to its index in the cache.
        shift = self._ends[words] - until[1:]
        tokens = self._tokens[np.arange(until[-1]) + np.repeat(shift, lengths)]
        ends = np.append(np.flatnonzero(words == 0), len(words))
        blank = np.diff(ends, prepend=-1) == 1
        return Sentences(tokens, np.diff(until[ends], prepend=0), blank)

    def _learn(self, words: list[str]) -> None:
        """Add the tokens of the words that the cache lacks."""
        encoding = self._library.encode(words, is_pretokenized=True, add_special_tokens=False)
        lengths = np.bincount(np.array(encoding.word_ids, np.int64), minlength=len(words))
        tokens = np.array(encoding.ids, self._dtype)
        ends = len(self._tokens) + np.cumsum(lengths)
        self._tokens = np.concatenate((self._tokens, tokens))
        self._ends = np.concatenate((self._ends, ends))


LineEncoder = Encoder | ByteLevelEncoder


def encoder_of(vocabulary: Vocabulary) -> LineEncoder:
    """Return an encoder with a vocabulary and its normalization."""
    if vocabulary.notation is BYTE_LEVEL:
        return ByteLevelEncoder(vocabulary.path.parent)
    return Encoder(vocabulary.ids, vocabulary.normalization)


def _dtype(largest: int) -> type[np.unsignedinteger]:
    """Return the type of token ids up to `largest`."""
    if largest < 65536:
        return np.uint16
    return np.uint32
