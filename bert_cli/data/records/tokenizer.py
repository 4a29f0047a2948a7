"""The tokenizer of a model's folder, for texts of a task.

A folder holds a vocab.txt with its tokenizer_config.json, as our checkpoints do, or a tokenizer.json,
as newer ones on the hub. Either becomes one tokenizer of the `tokenizers` library without added
tokens and without a template: text cannot make special ids, and whoever needs [CLS] and [SEP] puts
them there. Encodings come with the places of each piece in the text.
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
"""A tokenizer's files, which a checkpoint has so that it can be opened alone."""


@dataclass(frozen=True)
class TextTokenizer:
    """Text to pieces with their places; adds no special tokens."""

    library: "Tokenizer"
    special: SpecialIds
    pieces: tuple[str, ...]
    """By id."""
    fingerprint: str
    """Of everything that decides how text is cut."""


def read_tokenizer(folder: Path) -> TextTokenizer:
    """The tokenizer of a model's folder. DataError where there is none, or none of BERT's kind."""
    # Decided before the library is first asked: a task's texts are encoded by this process alone.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    if (folder / TOKENIZER_FILE).is_file():
        library = _from_description(folder / TOKENIZER_FILE)
    elif (folder / VOCAB_FILE).is_file():
        vocabulary = read_vocabulary(folder / VOCAB_FILE)
        library = library_tokenizer(vocabulary.ids, cased=_is_cased(folder / CONFIG_FILE))
    else:
        raise DataError(
            f"{folder}: holds neither {VOCAB_FILE} nor {TOKENIZER_FILE}; copy there the tokenizer files "
            "that the model was trained with"
        )
    ids: dict[str, int] = library.get_vocab()
    missing = [token for token in SPECIAL_TOKENS if token not in ids]
    if missing:
        raise DataError(
            f"{folder} (tokenizer): lacks {' '.join(missing)}; give a model with BERT's vocabulary"
        )
    pieces = [""] * (1 + max(ids.values()))
    for piece, number in ids.items():
        pieces[number] = piece
    special = SpecialIds(*(ids[token] for token in SPECIAL_TOKENS))
    digest = hashlib.sha256(library.to_str().encode()).hexdigest()
    return TextTokenizer(library, special, tuple(pieces), digest)


def model_max_length(folder: Path) -> int | None:
    """The longest sequence that a folder's tokenizer is for, where its config says so.

    DataError for a config that cannot be read, or has no number there.
    """
    path = folder / CONFIG_FILE
    longest = _read_json(path).get("model_max_length") if path.is_file() else None
    if longest is None:
        return None
    if not _is_length(longest):
        raise DataError(
            f"{path} (model_max_length): is {longest!r}; give it as a number of tokens, or leave it out"
        )
    return int(longest)


def _is_length(value: Any) -> TypeGuard[int | float]:
    """Return whether this is a number of tokens; transformers writes 10**30 where there is no limit."""
    is_number = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return is_number and value >= 1


def files_for_model(folder: Path, positions: int, *, fills_masks: bool) -> dict[str, bytes]:
    """Return the tokenizer's files of a folder by name, with what other tools have to know of the model.

    transformers cuts a text at `model_max_length`, the tokenizer's own and at most the model's positions,
    and with `split_special_tokens` takes special tokens in a text for plain characters, as here; a model
    that fills masks has to find its [MASK]. DataError for a tokenizer_config.json that cannot be read.
    """
    found = {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}
    if not found:
        return {}
    config = _read_json(folder / CONFIG_FILE) if CONFIG_FILE in found else {}
    own = config.get("model_max_length")
    longest = min(positions, int(own)) if _is_length(own) else positions
    config |= {"model_max_length": longest, "split_special_tokens": not fills_masks}
    return {**found, CONFIG_FILE: json.dumps(config, indent=2, ensure_ascii=False).encode()}


def _is_cased(path: Path) -> bool:
    if not path.is_file():
        # Google's first models came without; all of those with "uncased" vocabularies lower-case.
        return False
    return not _read_json(path).get("do_lower_case", True)


def case_of(folder: Path) -> dict[str, bool]:
    """Whether text is lower-cased and loses its accents, by `do_lower_case` and `strip_accents`.

    Of both where the folder's files say so, else of none; the config first, as it is for `--vocab`
    and in transformers. DataError for files that cannot be read.
    """
    said = _read_json(folder / CONFIG_FILE) if (folder / CONFIG_FILE).is_file() else {}
    if said.get("do_lower_case") is None and (folder / TOKENIZER_FILE).is_file():
        normalizer = _read_json(folder / TOKENIZER_FILE).get("normalizer") or {}
        if normalizer.get("type") == "BertNormalizer":
            said = {**normalizer, "do_lower_case": normalizer.get("lowercase")}
    lower, strip = said.get("do_lower_case"), said.get("strip_accents")
    if lower is None:
        return {}
    # As Google's code has it: accents go where capital letters do, if nothing else is said.
    return {"do_lower_case": bool(lower), "strip_accents": bool(lower if strip is None else strip)}


def _from_description(path: Path) -> "Tokenizer":
    from tokenizers import Tokenizer

    described = _read_json(path)
    kind = described.get("model", {}).get("type")
    if kind != "WordPiece":
        raise DataError(f"{path} (model.type {kind}): is no WordPiece tokenizer; give a BERT model")
    bare: dict[str, Any] = {
        "added_tokens": [],
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }
    try:
        return Tokenizer.from_str(json.dumps({**described, **bare}))
    except Exception as error:  # the library raises Exception itself
        raise DataError(
            f"{path}: cannot be read ({error}); take it from the model again"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path, dict[str, Any], DataError, "take it from the model again")
