"""The tokenizer of a model's folder, for the texts of a task.

A folder holds a vocab.txt with its tokenizer_config.json, as our checkpoints do, or a tokenizer.json, as newer models
on the hub. Both become a tokenizer of the `tokenizers` library without added tokens and without a template: text cannot
make special ids, and the caller adds [CLS] and [SEP]. Encodings have the character offsets of each piece.
"""

import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from bert_cli.data.records.sentence_pairs import SpecialIds
from bert_cli.data.records.vocab import CONFIG_FILE, SPECIAL_TOKENS, VOCAB_FILE, read_vocabulary
from bert_cli.data.records.wordpiece import library_tokenizer
from bert_cli.errors import DataError
from bert_cli.files import read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"
FILES = (VOCAB_FILE, CONFIG_FILE, TOKENIZER_FILE, "special_tokens_map.json")
"""The files of a tokenizer, which every checkpoint has so that it can be opened alone."""


@dataclass(frozen=True)
class TextTokenizer:
    """Text to pieces with their offsets; adds no special tokens."""

    library: "Tokenizer"
    special: SpecialIds
    pieces: tuple[str, ...]
    """By id."""
    fingerprint: str
    """Of everything that decides how text is split."""


def read_tokenizer(folder: Path) -> TextTokenizer:
    """Read the tokenizer of a model's folder. DataError where there is none, or none of BERT's kind."""
    # The library reads this at its first use. The texts of a task are encoded by one process.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    if (folder / TOKENIZER_FILE).is_file():
        library = _from_json(folder / TOKENIZER_FILE)
    elif (folder / VOCAB_FILE).is_file():
        vocabulary = read_vocabulary(folder / VOCAB_FILE)
        # Google's first models have no config; all of those with "uncased" vocabularies lower-case.
        lower = _read_config(folder).get("do_lower_case", True)
        library = library_tokenizer(vocabulary.ids, cased=not lower)
    else:
        raise DataError(
            str(folder),
            f"holds neither {VOCAB_FILE} nor {TOKENIZER_FILE}",
            "copy there the tokenizer files that the model was trained with",
        )
    ids: dict[str, int] = library.get_vocab()
    missing = [token for token in SPECIAL_TOKENS if token not in ids]
    if missing:
        raise DataError(
            f"{folder} (tokenizer)",
            f"lacks {' '.join(missing)}",
            "give a model with BERT's vocabulary",
        )
    pieces = [""] * (1 + max(ids.values()))
    for piece, number in ids.items():
        pieces[number] = piece
    special = SpecialIds(*(ids[token] for token in SPECIAL_TOKENS))
    digest = hashlib.sha256(library.to_str().encode()).hexdigest()
    return TextTokenizer(library, special, tuple(pieces), digest)


def _from_json(path: Path) -> "Tokenizer":
    from tokenizers import Tokenizer

    description = _read_json(path)
    kind = description.get("model", {}).get("type")
    if kind != "WordPiece":
        raise DataError(
            f"{path} (model.type {kind})", "is no WordPiece tokenizer", "give a BERT model"
        )
    description |= dict.fromkeys(("post_processor", "truncation", "padding")) | {"added_tokens": []}
    try:
        return Tokenizer.from_str(json.dumps(description))
    except Exception as error:  # the library raises Exception itself
        raise DataError(
            str(path), f"cannot be read ({error})", "take it from the model again"
        ) from error


def model_max_length(folder: Path) -> int | None:
    """Return `model_max_length` of a folder's tokenizer, or None.

    DataError for a config that cannot be read, or has no number there.
    """
    longest = _read_config(folder).get("model_max_length")
    if longest is None:
        return None
    if not _is_length(longest):
        raise DataError(
            f"{folder / CONFIG_FILE} (model_max_length)",
            f"is {longest!r}",
            "give it as a number of tokens, or leave it out",
        )
    return int(longest)


def _is_length(value: Any) -> TypeGuard[int | float]:
    """Return whether this is a number of tokens; transformers writes 10**30 where there is no limit."""
    is_number = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return is_number and value >= 1


def files_for_model(folder: Path, positions: int, *, fills_masks: bool) -> dict[str, bytes]:
    """Return the tokenizer's files of a folder by name, with the limits of the model.

    transformers truncates a text at `model_max_length`, here the tokenizer's but at most the model's positions. With
    `split_special_tokens` it takes special tokens in a text for plain characters, as this tool does, except for models
    that fill masks. DataError for a tokenizer_config.json that cannot be read.
    """
    files = {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}
    if not files:
        return {}
    config = _read_config(folder)
    own = config.get("model_max_length")
    longest = min(positions, int(own)) if _is_length(own) else positions
    config |= {"model_max_length": longest, "split_special_tokens": not fills_masks}
    return {**files, CONFIG_FILE: json.dumps(config, indent=2, ensure_ascii=False).encode()}


def case_of(folder: Path) -> dict[str, bool]:
    """Return `do_lower_case` and `strip_accents` of a folder's tokenizer, or nothing where its files do not say them.

    The config is read first, as for `--vocab` and in transformers. DataError for files that cannot be read.
    """
    config = _read_config(folder)
    if config.get("do_lower_case") is None and (folder / TOKENIZER_FILE).is_file():
        normalizer = _read_json(folder / TOKENIZER_FILE).get("normalizer") or {}
        if normalizer.get("type") == "BertNormalizer":
            config = {**normalizer, "do_lower_case": normalizer.get("lowercase")}
    lower, strip = config.get("do_lower_case"), config.get("strip_accents")
    if lower is None:
        return {}
    # As in Google's code, lower-casing strips accents unless the config says otherwise.
    return {"do_lower_case": bool(lower), "strip_accents": bool(lower if strip is None else strip)}


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    return _read_json(path) if path.is_file() else {}


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path, dict[str, Any], DataError, "take it from the model again")
