"""Text to token ids, exactly as the `tokenizers` library does it for BERT, five times as fast.

Text is split at white space, and every distinct word is encoded once: a word is a number, and ten megabytes of text
become an array of word numbers in half a second. New words of ASCII characters are normalized and split here, and only
their distinct parts into pieces, longest first (Schuster and Nakajima 2012). Other words go to the library with its
Unicode tables. There are no added tokens, so text cannot make special ids: a literal "[SEP]" is three tokens.
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain, compress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LONGEST_WORD = 100
"""Characters of a word without punctuation; a longer one is [UNK], as in Google's tokenizer."""
KNOWN_WORDS = 400_000
"""Distinct words in the cache, about 60 MB; then it is cleared, since new words never end."""

# BERT removes control characters, which joins their neighbours, but `str.split` takes all of these except the first for
# spaces. So they are removed beforehand, and the first one marks the end of a line or of a word.
_END = "\0"
_CONTROL_SPACES = "\0\x0b\x0c\x1c\x1d\x1e\x1f\x85"
_ASCII_CONTROLS = re.compile(r"[\x01-\x1f\x7f]")
_ASCII_PARTS = re.compile(r"[0-9A-Za-z]+|[^0-9A-Za-z]")

Ids = npt.NDArray[np.uint16 | np.uint32]
Numbers = npt.NDArray[np.int64]


class Sentences(NamedTuple):
    """Tokens of some lines of text."""

    tokens: Ids
    """Ids of all lines in a row."""
    lengths: Numbers
    """[lines] tokens of each line."""
    blank: npt.NDArray[np.bool_]
    """[lines] lines of white space alone, which end a document."""


def library_tokenizer(vocabulary: dict[str, int], *, cased: bool) -> "Tokenizer":
    """Return a tokenizer of the library with BERT's normalizer, pre-tokenizer and WordPiece."""
    # Worker processes use every core already.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(
        models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=LONGEST_WORD)
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=not cased)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


class Encoder:
    """Encodes lines of text and caches their words; the vocabulary must hold [UNK]."""

    def __init__(self, vocabulary: dict[str, int], *, cased: bool) -> None:
        self._vocabulary = vocabulary
        self._unknown = vocabulary["[UNK]"]
        self._longest_piece = max(map(len, vocabulary))
        self._cased = cased
        self._library = library_tokenizer(vocabulary, cased=cased)
        self._clear()

    def _clear(self) -> None:
        dtype = np.uint16 if max(self._vocabulary.values()) < 65536 else np.uint32
        self._words, self._parts = _Table(dtype), _Table(dtype)

    def encode(self, text: str) -> Sentences:
        """Encode the lines of a text, which only line feeds separate."""
        for character in _CONTROL_SPACES:
            if character in text:
                text = text.replace(character, "")
        if self._words.known > KNOWN_WORDS:
            self._clear()
        # One split of all lines takes half the time of one for each line.
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
        pieces = [self._pieces(part) for part in self._parts.new()]
        self._parts.add(list(chain.from_iterable(pieces)), list(map(len, pieces)))
        ascii_tokens, part_lengths = self._parts.tokens(parts)

        others = [word for word in words if not word.isascii()]
        encodings = self._library.encode_batch_fast(others, add_special_tokens=False)
        other_ids = [encoding.ids for encoding in encodings]

        is_ascii = np.array(ascii_flags, np.bool_)
        lengths = np.zeros(len(words), np.int64)
        lengths[is_ascii] = _between(_ends(parts), part_lengths)[: np.count_nonzero(is_ascii)]
        lengths[~is_ascii] = list(map(len, other_ids))
        other_tokens = np.array(list(chain.from_iterable(other_ids)), ascii_tokens.dtype)
        tokens = np.append(ascii_tokens, other_tokens)
        self._words.add(tokens, lengths, np.argsort(~is_ascii, kind="stable"))

    def _pieces(self, part: str) -> list[int]:
        """Split a part into the longest pieces of the vocabulary, from the left; [UNK] if that fails."""
        if len(part) > LONGEST_WORD:
            return [self._unknown]
        find = self._vocabulary.get
        ids: list[int] = []
        rest = part
        while True:
            end = min(len(rest), self._longest_piece)
            while (number := find(rest[:end])) is None:
                end -= 1
                if end == (2 if ids else 0):
                    return [self._unknown]
            ids.append(number)
            if end == len(rest):
                return ids
            rest = "##" + rest[end:]


class _Table:
    """Numbers strings in the order of their first occurrence, and holds the tokens of each."""

    def __init__(self, dtype: type[np.unsignedinteger]) -> None:
        self._numbers: defaultdict[str, int] = defaultdict()
        self._numbers.default_factory = self._numbers.__len__
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


def _ends(numbers: Numbers) -> Numbers:
    """Return where each line, or word, ends: at an _END, or at the end of all."""
    return np.append(np.flatnonzero(numbers == 0), len(numbers))


def _between(ends: Numbers, lengths: Numbers) -> Numbers:
    """Return the sums of the lengths between the ends; the length of an _END is 0."""
    before = np.append(0, np.cumsum(lengths))
    return np.diff(before[ends], prepend=0)
