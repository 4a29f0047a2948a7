"""Vocabularies and tokenizers of models: read from a folder, and written into one.

A vocabulary is a vocab.txt with a piece in each line, whose number is its id, and a tokenizer_config.json that says how
text is normalized; newer models have a tokenizer.json alone, and models made by this tool have all three files. The
tokenizer.json of byte-level BPE is copied unchanged. The texts of a task are encoded by the `tokenizers` library, with
the tokens that a model's owner added. Text never becomes one of the five special tokens: "[SEP]" is plain text.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bert_cli.arrays import Bools, Ints64
from bert_cli.data.tokens.entries import (
    UNCASED,
    AddedToken,
    Normalization,
    TokenizerFile,
    contents,
    normalizer_entries,
)
from bert_cli.data.tokens.notation import (
    BYTE_LEVEL,
    COPY_AGAIN,
    MASK,
    NAMES,
    ROBERTA_TOKENS,
    SPECIAL_TOKENS,
    TOKENIZER_FILE,
    TOKENS,
    UNIGRAM,
    WORDPIECE,
    Notation,
    SpecialIds,
    byte_level_library,
    frame_texts,
    library_tokenizer,
    read_notation,
    unigram_library,
)
from bert_cli.errors import DataError
from bert_cli.facts.bert import BertConfig
from bert_cli.files import JSONObject, Value, read_json, write_atomically, write_json_atomically

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCAB_FILE = "vocab.txt"
CONFIG_FILE = "tokenizer_config.json"
MAP_FILE = "special_tokens_map.json"
ADDED_FILE = "added_tokens.json"
# The files of a tokenizer, which every checkpoint has so that it can be opened alone.
FILES = (VOCAB_FILE, CONFIG_FILE, TOKENIZER_FILE, MAP_FILE, ADDED_FILE)
# Entries of tokenizer_config.json and special_tokens_map.json that list added tokens.
TOKEN_LISTS = ("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens")
# The class of transformers that reads a tokenizer.json for any model; others depend on its version and the model.
LIBRARY_CLASS = "PreTrainedTokenizerFast"
SPACE = 32  # a byte up to it is white space or a control character
NORMALIZER_KEYS = {key: key for key in ("lowercase", "strip_accents", "handle_chinese_chars")}


# --- vocabularies


@dataclass(frozen=True)
class Vocabulary:
    """The pieces of a vocab.txt, or of the tokenizer.json of byte-level BPE, in the order of their ids."""

    path: Path
    pieces: tuple[str, ...]
    sha256: str  # of the file's bytes
    normalization: Normalization = UNCASED
    notation: Notation = WORDPIECE

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
    def is_continuation(self) -> Bools:
        """[V] pieces that continue a word."""
        return np.array([self.notation.continues(piece) for piece in self.pieces], np.bool_)

    @property
    def text_bytes(self) -> Ints64:
        """[V] bytes of each piece in a text, in UTF-8, without spaces; none for special tokens."""
        content = self.notation.content
        texts = [b"" if piece in SPECIAL_TOKENS else content(piece) for piece in self.pieces]
        return np.array([sum(byte > SPACE for byte in text) for text in texts])

    def save(self, folder: Path) -> None:
        """Write the files of the vocabulary into a folder, each complete or not at all."""
        if self.notation is WORDPIECE:
            write_vocabulary(folder, vocabulary_bytes(self.path)[0], self.normalization)
            return
        for name in FILES:
            if (source := self.path.with_name(name)).is_file():
                write_atomically(folder / name, source.read_bytes())


def vocabulary_path(folder: Path) -> Path:
    """Return the file of a folder's vocabulary: its vocab.txt, or the tokenizer.json of a folder without one."""
    vocab = folder / VOCAB_FILE
    return vocab if vocab.is_file() else folder / TOKENIZER_FILE


def read_vocabulary(path: Path, sha256: str | None = None) -> Vocabulary:
    """Read a vocab.txt or tokenizer.json. Raises DataError if it is not supported, or if `sha256` is not its hash."""
    try:
        data, notation = vocabulary_bytes(path)
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        problem = f"cannot be read as text ({error})"
        raise DataError(f"vocabulary ({path})", problem, "use a vocab.txt") from error
    digest = hashlib.sha256(data).hexdigest()
    if sha256 not in (None, digest):
        problem = "is not the vocabulary that the records were made with"
        raise DataError(f"vocabulary ({path})", problem, "restore the original file")
    if notation is BYTE_LEVEL:
        # Worker processes use every core already.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        pieces = read_tokenizer(path.parent).pieces
        _check_special(f"vocabulary ({path})", pieces)
        return Vocabulary(path, pieces, digest, notation=BYTE_LEVEL)
    pieces = tuple(line.removesuffix("\r") for line in text.removesuffix("\n").split("\n"))
    known: set[str] = set()
    for line, piece in enumerate(pieces, 1):
        if not piece or piece in known:
            problem = f"{piece!r} is blank or a duplicate, so its id would have no piece"
            remedy = f"write [unused{line - 1}] there, which leaves all other ids as they are"
            raise DataError(f"vocabulary ({path}, line {line})", problem, remedy)
        known.add(piece)
    _check_special(f"vocabulary ({path})", known)
    return Vocabulary(path, pieces, digest)


def vocabulary_bytes(path: Path) -> tuple[bytes, Notation]:
    """Return a vocabulary as the bytes of a vocab.txt (of byte-level BPE, of its tokenizer.json), and its kind."""
    if path.suffix != ".json":  # a byte order mark and blank lines at the end are no pieces
        data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
        return re.sub(rb"\n\s+\Z", b"\n", data), WORDPIECE
    description, notation = read_notation(path)
    if notation is BYTE_LEVEL:
        return path.read_bytes(), notation
    if notation is UNIGRAM:
        problem = "is Unigram, for which this tool makes no records of pre-training"
        raise DataError(str(path), problem, "train a vocabulary of your own with bert vocab")
    pieces: dict[str, int] = description["model"].pop("vocab")
    normalization = Normalization.of(normalizer_entries(description), cased=False)
    expected = json.loads(library_tokenizer({"[UNK]": 0}, normalization).to_str())
    for part in ("normalizer", "pre_tokenizer", "model"):
        for name, value in expected[part].items():
            actual = (description[part] or {}).get(name)
            # BERT strips accents by default where it lower-cases; both are the same vocabulary.
            is_default = name == "strip_accents" and actual == (not normalization.cased)
            if name != "vocab" and actual != value and not is_default:
                problem = f"is {actual!r}, but BERT has {value!r}"
                raise DataError(f"{path} ({part}.{name})", problem, "use a BERT model's vocabulary")
    if sorted(pieces.values()) != [*range(len(pieces))]:
        raise DataError(f"{path} (model.vocab)", "has ids without a piece", COPY_AGAIN)
    text = "".join(f"{piece}\n" for piece in sorted(pieces, key=pieces.__getitem__))
    return text.encode(), notation


def _check_special(
    where: str, pieces: Iterable[str], tokens: Sequence[str] = SPECIAL_TOKENS
) -> None:
    missing = [token for token in tokens if token not in pieces]
    if missing:
        raise DataError(where, f"lacks {' '.join(missing)}", "use a model that has them")


def tokenizer_config(normalization: Normalization) -> JSONObject:
    """Return the tokenizer_config.json of BERT's tokenizer."""
    return {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": not normalization.cased,
        "strip_accents": normalization.strip_accents,
        "tokenize_chinese_chars": normalization.split_chinese,
        **TOKENS,
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
    notation: Notation = WORDPIECE
    mask_takes_space: bool = False  # whether the spaces before a [MASK] belong to it

    @cached_property
    def fingerprint(self) -> str:
        """A digest of everything that decides how text is split."""
        return hashlib.sha256(self.library.to_str().encode()).hexdigest()

    @cached_property
    def with_masks(self) -> "Tokenizer":
        """The tokenizer of texts in which a literal [MASK] is the special token."""
        from tokenizers import AddedToken, Tokenizer

        description = json.loads(self.library.to_str())
        pieces = description["model"]["vocab"]
        if self.notation is UNIGRAM:
            pieces[self.special.mask][0] = MASK
        else:
            pieces[MASK] = pieces.pop(self.pieces[self.special.mask])
        library = Tokenizer.from_str(json.dumps(description))
        library.encode_special_tokens = self.library.encode_special_tokens
        library.add_tokens([AddedToken(MASK, lstrip=self.mask_takes_space, normalized=False)])
        return library

    def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        """Return the ids of words, each as within a text."""
        texts = [self.notation.before_word + word for word in words]
        encodings = self.library.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]


def read_tokenizer(folder: Path) -> TextTokenizer:
    """Read the tokenizer of a model's folder. Raises DataError if it is absent or not of BERT's kind."""
    return TokenizerFolder(folder).tokenizer


class TokenizerFolder:
    """The tokenizer of a model's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _part(self, name: str, kind: type[Value]) -> Value:
        path = self.folder / name
        if not path.is_file():
            return kind()
        return read_json(path, kind, DataError, COPY_AGAIN)

    @cached_property
    def config(self) -> JSONObject:
        """The content of tokenizer_config.json, empty without one."""
        return self._part(CONFIG_FILE, JSONObject)

    @cached_property
    def listed_tokens(self) -> list[AddedToken]:
        """The special and added tokens that tokenizer.json lists."""
        return self._part(TOKENIZER_FILE, TokenizerFile).added_tokens

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of texts. Raises DataError if it is absent or not of BERT's kind."""
        # The library reads this variable at its first use. One process encodes the texts of a task.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        folder = self.folder
        if not has_tokenizer(folder):
            problem = f"holds neither {VOCAB_FILE} nor {TOKENIZER_FILE}"
            raise DataError(str(folder), problem, "copy the tokenizer files of the model there")
        if (folder / TOKENIZER_FILE).is_file():
            library, notation = self._from_json()
        else:
            library = self._from_vocabulary()
            notation = WORDPIECE
        if self.added_tokens and self.config.get("split_special_tokens"):
            library.encode_special_tokens = True
        ids: dict[str, int] = library.get_vocab()
        if notation is UNIGRAM:
            ids = {piece.removeprefix(" "): number for piece, number in ids.items()}
        _check_special(f"{folder} (tokenizer)", ids, self.special_tokens)
        last_piece, last = max(ids.items(), key=itemgetter(1))
        if last >= 2 * len(ids):  # a list up to it could fill the memory
            where = f"{folder} (tokenizer, id {last} of {last_piece!r})"
            raise DataError(where, f"is too large for its {len(ids):,} pieces", COPY_AGAIN)
        pieces = [""] * (1 + last)
        for piece, number in ids.items():
            pieces[number] = piece
        special = SpecialIds(*(ids[token] for token in self.special_tokens))
        mask = self.special_tokens[-1]
        takes_space = any(token.content == mask and token.lstrip for token in self.listed_tokens)
        return TextTokenizer(library, special, tuple(pieces), notation, takes_space)

    @cached_property
    def special_tokens(self) -> Sequence[str]:
        """The five special tokens, as this vocabulary writes them."""
        listed = {token.content for token in self.listed_tokens}
        has_roberta_tokens = listed.issuperset(ROBERTA_TOKENS) and not listed.issuperset(
            SPECIAL_TOKENS
        )
        return ROBERTA_TOKENS if has_roberta_tokens else SPECIAL_TOKENS

    def _from_json(self) -> tuple["Tokenizer", Notation]:
        """Return the tokenizer of tokenizer.json, which reads the five special tokens as text, and its kind."""
        from tokenizers import Tokenizer

        path = self.folder / TOKENIZER_FILE
        description, notation = read_notation(path)
        ids = {token.content: token.id for token in self.listed_tokens}
        normalizer = description.get("normalizer") or {}
        kind = str(self.config.get("tokenizer_class") or "BertTokenizer").removesuffix("Fast")
        if normalizer.get("type") == "BertNormalizer" and kind.endswith("BertTokenizer"):
            # transformers prefers what tokenizer_config.json says.
            entries = normalizer_entries({"normalizer": NORMALIZER_KEYS}).items()
            normalizer |= {key: self.config[name] for name, key in entries if name in self.config}
        description |= dict.fromkeys(("post_processor", "truncation", "padding"))
        tokens = description.get("added_tokens", [])
        added = [token for token in tokens if token["content"] not in self.special_tokens]
        description["added_tokens"] = sorted(added, key=itemgetter("id"))
        try:
            if notation is BYTE_LEVEL:
                library = byte_level_library(description, ids)
            elif notation is UNIGRAM:
                special = {name: ids.get(name) for name in self.special_tokens}
                library = unigram_library(description, special)
            else:
                library = Tokenizer.from_str(json.dumps(description))
        except Exception as error:  # the library raises Exception itself
            raise DataError(str(path), f"cannot be read ({error})", COPY_AGAIN) from error
        for token in self.added_tokens:
            number = library.token_to_id(token.content)
            if token.id != number:
                where = f"{self.folder} (added token {token.content!r}, id {token.id})"
                problem = f"the ids of added tokens have a gap, so it would get the id {number}"
                raise DataError(where, problem, COPY_AGAIN)
        return library, notation

    def _from_vocabulary(self) -> "Tokenizer":
        """Return the tokenizer of vocab.txt; its fingerprint is that of what `for_model` makes."""
        from tokenizers import decoders

        vocabulary = read_vocabulary(self.folder / VOCAB_FILE)
        # Google's first models have no config; all models with "uncased" vocabularies lower-case text.
        normalization = Normalization.of(self.config, cased=False)
        library = library_tokenizer(vocabulary.ids, normalization)
        library.decoder = decoders.WordPiece(prefix="##")
        return library

    @cached_property
    def added_tokens(self) -> list[AddedToken]:
        """The tokens that a model's owner added besides the five special ones."""
        tokens = self.listed_tokens
        known = {*self.special_tokens, *(token.content for token in tokens)}
        entries: list[object] = [*self._part(ADDED_FILE, JSONObject)]
        for config in (self.config, self._part(MAP_FILE, JSONObject)):
            entries += [config.get(key) for key in TOKEN_LISTS]
        for content in contents(entries):
            if content not in known:
                raise DataError(
                    f"{self.folder} (added token {content!r})",
                    f"is not in a {TOKENIZER_FILE}",
                    "make it by AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) in transformers",
                )
        return [token for token in tokens if token.content not in self.special_tokens]

    @property
    def max_length(self) -> int | None:
        """The `model_max_length`, or None. Raises DataError if it is not a length."""
        longest = self.config.get("model_max_length")
        if longest is None:
            return None
        # transformers writes 10**30 where there is no limit.
        if not isinstance(longest, int | float) or not 1 <= longest < math.inf:
            where = f"{self.folder / CONFIG_FILE} (model_max_length)"
            remedy = "write it as a number of tokens, or leave it out"
            raise DataError(where, f"is {longest!r}", remedy)
        return int(longest)

    def for_model(self, shape: BertConfig, *, fills_masks: bool) -> dict[str, bytes]:
        """Return the tokenizer's files by name, with the limits of the model and a tokenizer.json.

        transformers truncates a text at `model_max_length`: the tokenizer's value, at most the model's positions. With
        `split_special_tokens` it reads special tokens in a text as plain characters, as this tool does with BERT's
        five. This would also split special tokens that the model's owner added; with any, the stored value stays.
        """
        paths = [self.folder / name for name in FILES]
        files = {path.name: path.read_bytes() for path in paths if path.is_file()}
        if not files:
            return {}
        if TOKENIZER_FILE not in files and VOCAB_FILE in files:
            library = self._from_vocabulary()
            # As other programs add them.
            library.add_special_tokens([*SPECIAL_TOKENS])
            files[TOKENIZER_FILE] = frame_texts(library.to_str().encode(), SPECIAL_TOKENS)
        if shape.type_vocab_size > 1 and self.special_tokens is ROBERTA_TOKENS:
            # RoBERTa joins two texts by two separators, this tool as BERT.
            files[TOKENIZER_FILE] = frame_texts(files[TOKENIZER_FILE], self.special_tokens)
        positions = shape.max_position_embeddings
        longest = min(positions, self.max_length or positions)
        splits = not fills_masks
        if any(token.special for token in self.added_tokens):
            splits = bool(self.config.get("split_special_tokens"))
        tokens = dict(zip(NAMES, self.special_tokens, strict=True))
        config = {**tokens, **self.config, "tokenizer_class": LIBRARY_CLASS}
        config.pop("auto_map", None)  # code of the folder that it came from
        config |= {"model_max_length": longest, "split_special_tokens": splits}
        # A class of transformers without segments refuses token_type_ids; their default depends on the version.
        segments = ["token_type_ids"] if shape.type_vocab_size > 1 else []
        config["model_input_names"] = ["input_ids", *segments, "attention_mask"]
        return {**files, CONFIG_FILE: json.dumps(config, indent=2, ensure_ascii=False).encode()}

    @property
    def special_ids(self) -> dict[str, int]:
        """The ids of the special tokens by their names in a config.json; none without a tokenizer."""
        if not has_tokenizer(self.folder):
            return {}
        ids = self.tokenizer.special
        by_name = vars(ids) | {"bos": ids.cls, "eos": ids.sep}
        return {f"{name}_token_id": number for name, number in by_name.items()}

    @property
    def normalization(self) -> Normalization | None:
        """The normalization of texts, or None if the files do not state the case."""
        config = self.config
        if config.get("do_lower_case") is None and (self.folder / TOKENIZER_FILE).is_file():
            config = normalizer_entries(self._part(TOKENIZER_FILE, JSONObject))
        is_known = config.get("do_lower_case") is not None
        return Normalization.of(config, cased=False) if is_known else None
