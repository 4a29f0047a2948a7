"""What a run's settings leave to its records: sequences in a stored pack, and the size of the vocabulary.

The records decided both when they were written. They are asked before anything is built, because memory,
the layout that is chosen and the layers follow from it.
"""

from contextlib import suppress
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, Field

from bert_cli.config.training import PretrainSettings
from bert_cli.errors import DataError
from bert_cli.files import read_json

Asked = TypeVar("Asked", bound=PretrainSettings)


class Stored(BaseModel):
    """The entries of a corpus.json that settings may leave open."""

    max_sequences_per_pack: Annotated[int, Field(ge=1)] = 1
    vocab_size: Annotated[int, Field(ge=1)] | None = None


def as_stored(settings: Asked) -> Asked:
    """Return the settings with the packs and vocabulary size of their records, unless they give them.

    The folders on this disk are read. One that is absent or incomplete decides nothing here: the reader
    refuses it by name. Records at an address are read first when they are fetched.
    """
    if settings.generated_dataset:
        return settings
    found: list[Stored] = []
    for path in settings.dataset_paths:
        with suppress(DataError):
            found.append(read_json(Path(path) / "corpus.json", Stored, DataError, ""))
    changed: dict[str, object] = {}
    most = max((one.max_sequences_per_pack for one in found), default=1)
    if most > 1 and "max_sequences_per_pack" not in settings.model_fields_set:
        changed["max_sequences_per_pack"] = most
    sizes = [one.vocab_size for one in found if one.vocab_size is not None]
    model = settings.bert_config
    if sizes and "vocab_size" not in model.model_fields_set and sizes[0] != model.vocab_size:
        changed["bert_config"] = model.model_copy(update={"vocab_size": sizes[0]})
    return settings.model_copy(update=changed) if changed else settings
