"""How the pieces of a vocabulary stand for text: WordPiece marks pieces that continue a word, the others spaces.

A byte-level vocabulary (Radford et al. 2019), as ModernBERT's, writes a byte as a letter: a printable byte as itself
in Latin-1, the others as the letters from 256 on, so that a space is Ġ. Unigram (Kudo 2018), as in XLM-RoBERTa and all
multilingual models that come from it, chooses the most probable pieces of a word, and writes a space as ▁.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bert_cli.data.tokens.entries import Normalization
from bert_cli.errors import DataError
from bert_cli.files import JSONObject, read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

COPY_AGAIN = "copy it from the model again"
TOKENIZER_FILE = "tokenizer.json"
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # anywhere in a vocabulary
# The special tokens of RoBERTa's and XLM-RoBERTa's vocabularies, in the same order.
ROBERTA_TOKENS = ("<pad>", "<unk>", "<s>", "</s>", "<mask>")
MASK = "[MASK]"  # in texts of `bert predict`, whatever a vocabulary calls it
# Names of the special tokens in a tokenizer_config.json.
NAMES = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
TOKENS = dict(zip(NAMES, SPECIAL_TOKENS, strict=True))
LONGEST_WORD = 100  # characters of a word; a longer one is [UNK], as in Google's tokenizer

_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE)
_BYTES = {chr(byte): byte for byte in _PRINTABLE}
_BYTES |= {chr(256 + number): byte for number, byte in enumerate(_OTHERS)}


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the five special tokens in a vocabulary."""

    pad: int
    unk: int
    cls: int
    sep: int
    mask: int


class Notation(NamedTuple):
    """A kind of tokenizer."""

    name: str
    content: Callable[[str], bytes]
    """The text of a piece, in UTF-8; of a byte-level piece perhaps a part of a character."""
    shown: Callable[[str], str]
    """A piece as the answers of `predict` write it."""
    continues: Callable[[str], bool]
    """Whether a piece continues the word of the piece before it."""
    before_word: str
    """Text before a word that is encoded alone, so that it has its pieces within a text."""


def _content(piece: str) -> bytes:
    """Return the bytes of a byte-level piece; a token that an owner added is text."""
    if all(letter in _BYTES for letter in piece):
        return bytes(_BYTES[letter] for letter in piece)
    return piece.encode()


def _continues(piece: str) -> bool:
    """Return whether a byte-level piece begins with a letter or a digit, and not with a space or a punctuation mark."""
    first = _content(piece)[:1]
    return first.isalnum() or first >= b"\x80"


WORDPIECE = Notation(
    name="WordPiece",
    content=lambda piece: piece.removeprefix("##").encode(),
    shown=str,
    continues=lambda piece: piece.startswith("##"),
    before_word="",
)
BYTE_LEVEL = Notation(
    name="byte-level BPE",
    content=_content,
    shown=lambda piece: _content(piece).decode(errors="replace"),
    continues=_continues,
    before_word=" ",
)
UNIGRAM = Notation(
    name="Unigram",
    content=lambda piece: piece.replace("▁", " ").encode(),
    shown=lambda piece: piece.replace("▁", " "),
    continues=lambda piece: not piece.startswith("▁"),
    before_word="",  # the library puts a space before each text
)


_LATER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Regular expressions of published tokenizers; others may take a time that grows exponentially with the text.
PATTERNS = {
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    *(_LATER, _LATER.replace("{1,3}", ""), r"\s+", r"\s", " {2,}"),
}


def read_notation(path: Path) -> tuple[JSONObject, Notation]:
    """Return the content of a tokenizer.json and its kind."""
    description = read_json(path, JSONObject, DataError, COPY_AGAIN)
    patterns: list[str | None] = []
    parts = [description.get("normalizer"), description.get("pre_tokenizer")]
    json.loads(json.dumps(parts), object_hook=lambda part: patterns.append(part.get("Regex")))
    unknown = {*filter(None, patterns)} - PATTERNS
    if unknown:
        problem = "is a regular expression of no known tokenizer, whose time has no bound"
        raise DataError(f"{path} ({min(unknown)!r})", problem, "use another tokenizer")
    kind = (description.get("model") or {}).get("type")
    if kind == "WordPiece":
        return description, WORDPIECE
    if kind == "Unigram":
        notation = UNIGRAM
    elif kind == "BPE" and '"ByteLevel"' in json.dumps(description.get("pre_tokenizer")):
        notation = BYTE_LEVEL
    else:
        names = f"{WORDPIECE.name}, {BYTE_LEVEL.name} and {UNIGRAM.name}"
        problem = f"is none of {names}"
        raise DataError(f"{path} (model.type {kind})", problem, "use a model with one of these")
    if path.name != TOKENIZER_FILE:
        problem = f"is {notation.name}, whose file is always {TOKENIZER_FILE}"
        raise DataError(str(path), problem, f"rename it to {TOKENIZER_FILE}")
    return description, notation


def library_tokenizer(vocabulary: dict[str, int], normalization: Normalization) -> "Tokenizer":
    """Return a tokenizer of the library with BERT's normalizer, pre-tokenizer and WordPiece."""
    # Worker processes use every core already.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    pieces = models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=LONGEST_WORD)
    tokenizer = Tokenizer(pieces)
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=not normalization.cased,
        strip_accents=normalization.strip_accents,
        handle_chinese_chars=normalization.split_chinese,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def byte_level_library(description: JSONObject, added: Mapping[str, int | None]) -> "Tokenizer":
    """Return the library's tokenizer of a byte-level tokenizer.json, with the ids of added tokens.

    These tokens become pieces that no merge makes, so that no text becomes a special token. Offsets leave out the
    spaces of a piece.
    """
    from tokenizers import Tokenizer, processors

    description["model"]["vocab"] |= added
    library = Tokenizer.from_str(json.dumps(description))
    library.post_processor = processors.ByteLevel(trim_offsets=True)
    return library


def unigram_library(description: JSONObject, added: Mapping[str, int | None]) -> "Tokenizer":
    """Return the library's tokenizer of a Unigram tokenizer.json, with the ids of special tokens.

    A piece with a space fits no text, since the library writes spaces as ▁. So no text becomes a special token.
    """
    from tokenizers import Tokenizer

    pieces = description["model"]["vocab"]
    for name, number in added.items():
        if number == len(pieces):
            pieces.append([name, 0.0])
        if number is not None and number < len(pieces):
            pieces[number] = [f" {name}", pieces[number][1]]
    return Tokenizer.from_str(json.dumps(description))


def frame_texts(tokenizer: bytes, tokens: Sequence[str]) -> bytes:
    """Return a tokenizer.json that adds [CLS] and [SEP], in the words of `tokens`, to a text or two as BERT does."""
    from tokenizers import Tokenizer, processors

    library = Tokenizer.from_str(tokenizer.decode())
    _, _, cls, sep, _ = tokens
    single = f"{cls}:0 $A:0 {sep}:0"
    special = [(token, library.token_to_id(token)) for token in (cls, sep)]
    library.post_processor = processors.TemplateProcessing(
        single=single, pair=f"{single} $B:1 {sep}:1", special_tokens=special
    )
    return json.dumps(json.loads(library.to_str())).encode()
