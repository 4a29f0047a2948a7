"""The entries of a tokenizer's files that name tokens or say how text is normalized."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import BaseModel, Field

from bert_cli.files import JSONObject


class AddedToken(BaseModel):
    """A token that a model's owner added to its vocabulary; the `tokenizers` library reads its other fields."""

    content: Annotated[str, Field(min_length=1)]
    id: int
    lstrip: bool = False
    special: bool = False


class TokenizerFile(BaseModel):
    """The entries of a tokenizer.json besides its model."""

    added_tokens: list[AddedToken] = []


def contents(entry: Any) -> Iterator[str]:
    """Yield the tokens of an entry: a text, an object with a `content`, or a list or object of these."""
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, dict):
        yield from contents(entry.get("content", [*entry.values()]))
    elif isinstance(entry, list):
        for part in entry:
            yield from contents(part)


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
        if lower is not None:
            cased = not lower
        return cls(cased, config.get("strip_accents"), chinese is not False)

    def changes(self) -> dict[str, bool]:
        """Return the fields that differ from BERT's models of the same case."""
        bert = vars(Normalization(self.cased))
        return {name: value for name, value in vars(self).items() if value != bert[name]}


# As for BERT's uncased models.
UNCASED = Normalization()


def normalizer_entries(description: JSONObject) -> JSONObject:
    """Return the normalization of a tokenizer.json, with the keys of tokenizer_config.json."""
    entries: JSONObject = description.get("normalizer") or {}
    return {
        "do_lower_case": entries.get("lowercase"),  # None for another kind of normalizer
        "strip_accents": entries.get("strip_accents"),
        "tokenize_chinese_chars": entries.get("handle_chinese_chars"),
    }
