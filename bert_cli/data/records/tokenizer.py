"""Vocabularies and tokenizers of BERT: read from a folder, written into one, and text to token ids.

A vocabulary is a vocab.txt with a piece in each line, whose number is its id, and a tokenizer_config.json that says how
text is normalized; newer models on the hub have a tokenizer.json. There are no added tokens, so text cannot
make special ids: a literal "[SEP]" is three tokens.

The texts of a task are encoded by the `tokenizers` library, with the character offsets of each piece. `Encoder` encodes
the text of `bert tokenize` to the same ids, five times as fast: every distinct word is encoded once. New words of ASCII
characters are split here, longest piece first (Schuster and Nakajima 2012); others go to the library.
"""

import hashlib
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeGuard

import numpy as np
import numpy.typing as npt

from bert_cli.config.settings import BertConfig
from bert_cli.errors import DataError
from bert_cli.files import read_json, write_atomically, write_json_atomically

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # anywhere in a vocabulary
VOCAB_FILE = "vocab.txt"
CONFIG_FILE = "tokenizer_config.json"
TOKENIZER_FILE = "tokenizer.json"
FILES = (VOCAB_FILE, CONFIG_FILE, TOKENIZER_FILE, "special_tokens_map.json")
"""The files of a tokenizer, which every checkpoint has so that it can be opened alone."""
LONGEST_WORD = 100  # characters of a word; a longer one is [UNK], as in Google's tokenizer
KNOWN_WORDS = 400_000  # distinct words in the cache, about 60 MB; then it is cleared

# BERT removes control characters, which joins their neighbours, but `str.split` takes all of these except the first for
# spaces. So they are removed beforehand, and the first one marks the end of a line or of a word.
_END = "\0"
_CONTROL_SPACES = "\0\x0b\x0c\x1c\x1d\x1e\x1f\x85"
_ASCII_CONTROLS = re.compile(r"[\x01-\x1f\x7f]")
_ASCII_PARTS = re.compile(r"[0-9A-Za-z]+|[^0-9A-Za-z]")

Ids = npt.NDArray[np.uint16 | np.uint32]
Numbers = npt.NDArray[np.int64]


# --- vocabularies


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the five special tokens in a vocabulary."""

    pad: int
    unk: int
    cls: int
    sep: int
    mask: int


@dataclass(frozen=True)
class Normalization:
    """How text is normalized before it is split into pieces; by default as for BERT's uncased models."""

    cased: bool = False
    strip_accents: bool | None = None  # None: as in BERT, where text is lower-cased
    split_chinese: bool = True  # into characters, each a word of its own

    def __post_init__(self) -> None:
        if self.strip_accents == (not self.cased):
            object.__setattr__(self, "strip_accents", None)  # so that equal ones compare equal

    @classmethod
    def of(cls, config: Mapping[str, Any], *, cased: bool) -> Self:
        """Return that of a tokenizer_config.json, with `cased` where it does not say the case."""
        lower, chinese = config.get("do_lower_case"), config.get("tokenize_chinese_chars")
        cased = cased if lower is None else not lower
        return cls(cased, config.get("strip_accents"), chinese is not False)

    def changes(self) -> dict[str, bool]:
        """Return the fields that BERT's models of this case have otherwise."""
        bert = vars(Normalization(self.cased))
        return {name: value for name, value in vars(self).items() if value != bert[name]}


@dataclass(frozen=True)
class Vocabulary:
    """The pieces of a vocab.txt in the order of their ids."""

    path: Path
    pieces: tuple[str, ...]
    sha256: str  # of the file's bytes
    normalization: Normalization = Normalization()

    @property
    def ids(self) -> dict[str, int]:
        """Id of each piece."""
        return {piece: number for number, piece in enumerate(self.pieces)}

    @property
    def special(self) -> SpecialIds:
        """Ids of the five special tokens."""
        ids = self.ids
        return SpecialIds(*(ids[token] for token in SPECIAL_TOKENS))

    @property
    def is_continuation(self) -> npt.NDArray[np.bool_]:
        """[V] pieces that continue a word."""
        return np.array([piece.startswith("##") for piece in self.pieces], np.bool_)

    @property
    def text_bytes(self) -> Numbers:
        """[V] bytes of each piece in a text, in UTF-8; none for special tokens."""
        texts = ["" if p in SPECIAL_TOKENS else p.removeprefix("##") for p in self.pieces]
        return np.array([len(text.encode()) for text in texts])


def read_vocabulary(path: Path, sha256: str | None = None) -> Vocabulary:
    """Read a vocab.txt; DataError when it is none of BERT's, or not the one with the hash of some records."""
    try:
        data = path.read_bytes()
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        problem = f"cannot be read as text ({error})"
        raise DataError(f"vocabulary ({path})", problem, "give a vocab.txt") from error
    digest = hashlib.sha256(data).hexdigest()
    if sha256 not in (None, digest):
        problem = "is not the vocabulary that the records were made with"
        raise DataError(f"vocabulary ({path})", problem, "bring it back")
    pieces = tuple(line.removesuffix("\r") for line in text.removesuffix("\n").split("\n"))
    known: set[str] = set()
    for line, piece in enumerate(pieces, 1):
        if not piece or piece in known:
            raise DataError(
                f"vocabulary ({path}, line {line})",
                f"{piece!r} is blank or was there before, so an id would have no piece",
                f"write [unused{line - 1}] there, which leaves all other ids as they are",
            )
        known.add(piece)
    _check_special(f"vocabulary ({path})", known)
    return Vocabulary(path, pieces, digest)


def _check_special(where: str, pieces: Iterable[str]) -> None:
    missing = [token for token in SPECIAL_TOKENS if token not in pieces]
    if missing:
        raise DataError(where, f"{' '.join(missing)} missing", "give a model's BERT vocabulary")


def tokenizer_config(normalization: Normalization) -> dict[str, Any]:
    """Return what Hugging Face's tokenizer needs besides the vocabulary."""
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": not normalization.cased,
        "strip_accents": normalization.strip_accents,
        "tokenize_chinese_chars": normalization.split_chinese,
        **dict(zip(names, SPECIAL_TOKENS, strict=True)),
    }


def write_vocabulary(folder: Path, data: bytes, normalization: Normalization) -> None:
    """Write vocab.txt and tokenizer_config.json into a folder, each complete or not at all."""
    write_atomically(folder / VOCAB_FILE, data)
    # A vocabulary has no model yet; the folder of a model has the number of the model's positions.
    longest = {"model_max_length": BertConfig().max_position_embeddings}
    write_json_atomically(folder / CONFIG_FILE, tokenizer_config(normalization) | longest)


# --- the tokenizer of a model's folder


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder holds a tokenizer."""
    return any((folder / name).is_file() for name in (VOCAB_FILE, TOKENIZER_FILE))


@dataclass(frozen=True)
class TextTokenizer:
    """Text to pieces with their offsets; adds no special tokens."""

    library: "Tokenizer"
    special: SpecialIds
    pieces: tuple[str, ...]  # by id
    fingerprint: str  # of everything that decides how text is split


def read_tokenizer(folder: Path) -> TextTokenizer:
    """Read the tokenizer of a model's folder. DataError where there is none, or none of BERT's kind."""
    # The library reads this at its first use. The texts of a task are encoded by one process.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    if (folder / TOKENIZER_FILE).is_file():
        library = _from_json(folder / TOKENIZER_FILE)
    elif (folder / VOCAB_FILE).is_file():
        vocabulary = read_vocabulary(folder / VOCAB_FILE)
        # Google's first models have no config; all of those with "uncased" vocabularies lower-case.
        normalization = Normalization.of(_read_config(folder), cased=False)
        library = library_tokenizer(vocabulary.ids, normalization)
    else:
        problem = f"holds neither {VOCAB_FILE} nor {TOKENIZER_FILE}"
        raise DataError(str(folder), problem, "copy there the tokenizer files of the model")
    ids: dict[str, int] = library.get_vocab()
    _check_special(f"{folder} (tokenizer)", ids)
    pieces = [""] * (1 + max(ids.values()))
    for piece, number in ids.items():
        pieces[number] = piece
    special = SpecialIds(*(ids[token] for token in SPECIAL_TOKENS))
    digest = hashlib.sha256(library.to_str().encode()).hexdigest()
    return TextTokenizer(library, special, tuple(pieces), digest)


def _from_json(path: Path) -> "Tokenizer":
    from tokenizers import Tokenizer

    description = _read_json(path)
    if (kind := description.get("model", {}).get("type")) != "WordPiece":
        where = f"{path} (model.type {kind})"
        raise DataError(where, "is no WordPiece tokenizer", "give a BERT model")
    description |= dict.fromkeys(("post_processor", "truncation", "padding")) | {"added_tokens": []}
    try:
        return Tokenizer.from_str(json.dumps(description))
    except Exception as error:  # the library raises Exception itself
        raise DataError(
            str(path), f"cannot be read ({error})", "take it from the model again"
        ) from error


def model_max_length(folder: Path) -> int | None:
    """Return `model_max_length` of a folder's tokenizer, or None; DataError where it is no length."""
    longest = _read_config(folder).get("model_max_length")
    if longest is None:
        return None
    if not _is_length(longest):
        where = f"{folder / CONFIG_FILE} (model_max_length)"
        raise DataError(where, f"is {longest!r}", "give it as a number of tokens, or leave it out")
    return int(longest)


def _is_length(value: Any) -> TypeGuard[int | float]:
    """Return whether this is a number of tokens; transformers writes 10**30 where there is no limit."""
    is_number = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return is_number and value >= 1


def files_for_model(folder: Path, positions: int, *, fills_masks: bool) -> dict[str, bytes]:
    """Return the tokenizer's files of a folder by name, with the limits of the model.

    transformers truncates a text at `model_max_length`, here the tokenizer's but at most the model's positions. With
    `split_special_tokens` it takes special tokens in a text for plain characters, as this tool does.
    """
    files = {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}
    if not files:
        return {}
    config = _read_config(folder)
    own = config.get("model_max_length")
    longest = min(positions, int(own)) if _is_length(own) else positions
    config |= {"model_max_length": longest, "split_special_tokens": not fills_masks}
    return {**files, CONFIG_FILE: json.dumps(config, indent=2, ensure_ascii=False).encode()}


def normalization_of(folder: Path) -> Normalization | None:
    """Return how a folder's tokenizer normalizes text, None where its files do not say the case."""
    config = _read_config(folder)
    if config.get("do_lower_case") is None and (folder / TOKENIZER_FILE).is_file():
        config = _read_json(folder / TOKENIZER_FILE).get("normalizer") or {}
        config["do_lower_case"] = config.get("lowercase")  # None of another kind of normalizer
        config["tokenize_chinese_chars"] = config.get("handle_chinese_chars")
    unknown = config.get("do_lower_case") is None
    return None if unknown else Normalization.of(config, cased=False)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    return _read_json(path) if path.is_file() else {}


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path, dict[str, Any], DataError, "take it from the model again")


# --- text to ids


def library_tokenizer(vocabulary: dict[str, int], normalization: Normalization) -> "Tokenizer":
    """Return a tokenizer of the library with BERT's normalizer, pre-tokenizer and WordPiece."""
    # Worker processes use every core already.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(
        models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=LONGEST_WORD)
    )
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=not normalization.cased,
        strip_accents=normalization.strip_accents,
        handle_chinese_chars=normalization.split_chinese,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


class Sentences(NamedTuple):
    """Tokens of all lines of a text in a row, the tokens of each line, and which lines are white space alone."""

    tokens: Ids
    lengths: Numbers
    blank: npt.NDArray[np.bool_]


class Encoder:
    """Encodes lines of text and caches their words; the vocabulary must hold [UNK]."""

    def __init__(self, vocabulary: dict[str, int], normalization: Normalization) -> None:
        self._vocabulary = vocabulary
        self._longest_piece = max(map(len, vocabulary))
        self._cased = normalization.cased
        self._library = library_tokenizer(vocabulary, normalization)
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
        pieces = [
            split_word(part, self._vocabulary, self._longest_piece) for part in self._parts.new()
        ]
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


def split_word(word: str, vocabulary: Mapping[str, int], longest_piece: int) -> list[int]:
    """Split a word into the longest pieces, from the left, or [UNK] if that fails; one with ## continues another."""
    ids: list[int] = []
    if len(word) > LONGEST_WORD:
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
