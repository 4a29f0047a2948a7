"""What a run's settings leave to its records: how many sequences a stored pack holds.

`bert pack` decided that when it wrote them. It is asked for before anything is built, because memory,
the layout that is chosen and the layers that read several next-sentence places all follow from it.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from bert_cli.config.schema import PretrainSettings

Asked = TypeVar("Asked", bound=PretrainSettings)


def with_stored_packs(settings: Asked) -> Asked:
    """The settings with `max_sequences_per_pack` as in the folders on this disk, unless they say it.

    A folder that is not there or not whole says nothing here: the reader refuses it by name. Records
    at an address are read first when they are fetched.
    """
    if settings.generated_dataset or "max_sequences_per_pack" in settings.model_fields_set:
        return settings
    most = max((_stored(Path(path)) for path in settings.dataset_paths), default=1)
    return settings if most == 1 else settings.model_copy(update={"max_sequences_per_pack": most})


def _stored(folder: Path) -> int:
    with suppress(OSError, ValueError, TypeError, AttributeError):
        described = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
        return int(described.get("max_sequences_per_pack", 1))
    return 1
