"""The entries of a tokenizer's files that name tokens or say how text is normalized."""

from dataclasses import dataclass
from typing import Annotated, Self

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


@dataclass(frozen=True)
class Normalization:
    """Normalization of text before it is split into pieces; by default as for BERT's uncased models."""

    cased: bool = False
    strip_accents: bool | None = None  # None: as in BERT, where text is lower-cased
    split_chinese: bool = True  # into characters, each a word of its own

    def __post_init__(self) -> None:
        if self.strip_accents == (not self.cased):
            object.__setattr__(self, "strip_accents", None)  # so that equal values are equal

    @classmethod
    def of(cls, config: JSONObject, *, cased: bool) -> Self:
        """Return the normalization of a tokenizer_config.json; `cased` applies if it does not state the case."""
        lower = config.get("do_lower_case")
        chinese = config.get("tokenize_chinese_chars")
        cased = cased if lower is None else not lower
        return cls(cased, config.get("strip_accents"), chinese is not False)

    def changes(self) -> dict[str, bool]:
        """Return the fields that differ from BERT's models of the same case."""
        bert = vars(Normalization(self.cased))
        return {name: value for name, value in vars(self).items() if value != bert[name]}


UNCASED = Normalization()
"""As for BERT's uncased models."""


def normalizer_entries(description: JSONObject) -> JSONObject:
    """Return the normalization of a tokenizer.json, with the keys of tokenizer_config.json."""
    entries: JSONObject = description.get("normalizer") or {}
    return {
        "do_lower_case": entries.get("lowercase"),  # None for another kind of normalizer
        "strip_accents": entries.get("strip_accents"),
        "tokenize_chinese_chars": entries.get("handle_chinese_chars"),
    }
