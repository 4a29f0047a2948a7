"""The entries of a tokenizer's files that name tokens or say how text is normalized."""

from typing import Annotated

from pydantic import BaseModel, Field

from bert_cli.files import JSONObject


class AddedToken(BaseModel):
    """A token that a model's owner added to its vocabulary, with the fields of the `tokenizers` library."""

    content: Annotated[str, Field(min_length=1)]
    id: int | None = None  # None: the next free id
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


class TokenizerFile(BaseModel):
    """The entries of a tokenizer.json besides its model."""

    added_tokens: list[AddedToken] = []


class ConfigFile(BaseModel):
    """The entries of a tokenizer_config.json on tokens that a model's owner added."""

    added_tokens_decoder: dict[int, AddedToken] = {}
    additional_special_tokens: list[str | AddedToken] | None = None
    extra_special_tokens: list[str | AddedToken] | dict[str, str | AddedToken] | None = None
    split_special_tokens: bool | None = False


def normalizer_entries(description: JSONObject) -> JSONObject:
    """Return the normalization of a tokenizer.json, with the keys of tokenizer_config.json."""
    entries: JSONObject = description.get("normalizer") or {}
    return {
        "do_lower_case": entries.get("lowercase"),  # None for another kind of normalizer
        "strip_accents": entries.get("strip_accents"),
        "tokenize_chinese_chars": entries.get("handle_chinese_chars"),
    }
