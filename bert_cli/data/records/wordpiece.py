"""Text to token ids, exactly as the `tokenizers` library does it for BERT, five times as fast.

Text is split at white space and every distinct word is encoded once: a word is a number, and ten
megabytes of text become one array of word numbers in half a second. New words of ASCII characters
are cut here in the same way once more (lower case, punctuation apart), and only their distinct
parts into pieces, longest first (Schuster and Nakajima 2012); other words go to the library, whose
Unicode tables decide. There are no added tokens, so text cannot make special ids: a literal "[SEP]"
is three tokens.
"""

import os
import re
from collections.abc import Iterable, Sequence
from itertools import chain, compress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LONGEST_WORD = 100
"""Characters of a word, cut at punctuation; a longer one is [UNK], as in Google's tokenizer."""
KNOWN_WORDS = 400_000
"""Distinct words kept, about 60 MB; there are always new ones, so then all are forgotten."""

# BERT drops control characters, which joins their neighbours; `str.split` takes all of these but
# the first for spaces. The first is then free to stand for the end of a line, or of a word.
_END = "\0"
_CONTROL_SPACES = "\0\x0b\x0c\x1c\x1d\x1e\x1f\x85"
_ASCII_CONTROLS = re.compile(r"[\x01-\x1f\x7f]")
_ASCII_PARTS = re.compile(r"[0-9A-Za-z]+|[^0-9A-Za-z]")

Ids = npt.NDArray[np.uint16 | np.uint32]
Numbers = npt.NDArray[np.int64]


class Sentences(NamedTuple):
    """Tokens of some lines of text."""

    tokens: Ids
    """Ids of all lines, one after another."""
    lengths: Numbers
    """[lines] tokens of each line."""
    blank: npt.NDArray[np.bool_]
    """[lines] whether it holds nothing but white space, which ends a document."""


def library_tokenizer(vocabulary: dict[str, int], *, cased: bool) -> "Tokenizer":
    """The library's tokenizer: BERT's normalizer, pre-tokenizer and WordPiece; no added tokens."""
    # Worker processes already take every core; threads below them would only fight.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(
        models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=LONGEST_WORD)
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=not cased)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


class Encoder:
    """Encodes lines of text; keeps the words it has seen."""

    def __init__(self, vocabulary: dict[str, int], *, cased: bool) -> None:
        """Prepare the tables; the vocabulary must hold [UNK]."""
        self._vocabulary = vocabulary
        self._unknown = vocabulary["[UNK]"]
        self._longest_piece = max(map(len, vocabulary))
        self._cased = cased
        self._library = library_tokenizer(vocabulary, cased=cased)
        self._forget()

    def _forget(self) -> None:
        dtype = np.uint16 if max(self._vocabulary.values()) < 65536 else np.uint32
        self._words, self._parts = _Table(dtype), _Table(dtype)

    def encode(self, text: str) -> Sentences:
        """Encode every line of `text`, as it is cut by line feeds alone."""
        for character in _CONTROL_SPACES:
            if character in text:
                text = text.replace(character, "")
        if self._words.known > KNOWN_WORDS:
            self._forget()
        # One split of all lines together takes half the time of one for each.
        words = self._words.numbers_of(text.replace("\n", f" {_END} ").split())
        self._learn(self._words.new())
        tokens, lengths = self._words.runs(words)
        ends = _ends(words)
        blank = np.diff(ends, prepend=-1) == 1
        return Sentences(tokens, _between(ends, lengths), blank)

    def _learn(self, words: Sequence[str]) -> None:
        """Encode new words and put their tokens into the table."""
        ascii_flags = list(map(str.isascii, words))
        joined = _ASCII_CONTROLS.sub("", _END.join(compress(words, ascii_flags)))
        parts = self._parts.numbers_of(
            _ASCII_PARTS.findall(joined if self._cased else joined.lower())
        )
        pieces = [self._pieces(part) for part in self._parts.new()]
        self._parts.add(list(chain.from_iterable(pieces)), list(map(len, pieces)))
        near, near_lengths = self._parts.runs(parts)

        foreign = [word for word in words if not word.isascii()]
        encodings = self._library.encode_batch_fast(foreign, add_special_tokens=False)
        far = [encoding.ids for encoding in encodings]

        is_ascii = np.array(ascii_flags, np.bool_)
        lengths = np.zeros(len(words), np.int64)
        lengths[is_ascii] = _between(_ends(parts), near_lengths)[: np.count_nonzero(is_ascii)]
        lengths[~is_ascii] = list(map(len, far))
        tokens = np.append(near, np.array(list(chain.from_iterable(far)), near.dtype))
        self._words.add(tokens, lengths, np.argsort(~is_ascii, kind="stable"))

    def _pieces(self, part: str) -> list[int]:
        """Cut a part into the longest pieces there are, from the left; [UNK] if that fails."""
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
    """Numbers strings in the order of their first coming, and holds a run of tokens for each."""

    def __init__(self, dtype: type[np.unsignedinteger]) -> None:
        self._numbers = _Counting()
        self._tokens: Ids = np.zeros(0, dtype)
        self._starts = np.zeros(0, np.int64)
        self._lengths = np.zeros(0, np.int64)
        self.numbers_of([_END])
        self.add([], [0])  # number 0, and no token

    @property
    def known(self) -> int:
        return len(self._starts)

    def numbers_of(self, strings: Iterable[str]) -> Numbers:
        """The strings' numbers; a string not seen before gets the next one."""
        return np.fromiter(map(self._numbers.__getitem__, strings), np.int64)

    def new(self) -> list[str]:
        """Strings that have a number and no tokens yet, in the order of their numbers."""
        return list(self._numbers)[self.known :]

    def add(
        self, tokens: npt.ArrayLike, lengths: npt.ArrayLike, order: Numbers | None = None
    ) -> None:
        """Give the new strings their tokens, which stand in the order of numbers or in `order`."""
        lengths = np.asarray(lengths, np.int64)
        order = np.arange(len(lengths)) if order is None else order
        starts = np.empty(len(lengths), np.int64)
        starts[order] = len(self._tokens) + np.cumsum(lengths[order]) - lengths[order]
        added = np.asarray(tokens, self._tokens.dtype)
        self._tokens = np.concatenate((self._tokens, added))
        self._starts = np.concatenate((self._starts, starts))
        self._lengths = np.concatenate((self._lengths, lengths))

    def runs(self, numbers: Numbers) -> tuple[Ids, Numbers]:
        """The tokens of these strings one after another, and how many each has."""
        lengths = self._lengths[numbers]
        ends = np.cumsum(lengths)
        # The n-th token of the result is as far into its run as it is behind the run's first token.
        shift = self._starts[numbers] - (ends - lengths)
        total = int(ends[-1]) if len(ends) else 0
        return self._tokens[np.arange(total) + np.repeat(shift, lengths)], lengths


class _Counting(dict[str, int]):
    """Gives each new key the next number."""

    def __missing__(self, key: str) -> int:
        number = self[key] = len(self)
        return number


def _ends(numbers: Numbers) -> Numbers:
    """Where each line, or word, ends: at an _END, or at the end of all."""
    return np.append(np.flatnonzero(numbers == 0), len(numbers))


def _between(ends: Numbers, lengths: Numbers) -> Numbers:
    """Sums of the lengths before each end and behind the one before; an _END has none."""
    before = np.append(0, np.cumsum(lengths))
    return np.diff(before[ends], prepend=0)
