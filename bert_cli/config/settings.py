"""The base class of all settings and the types that several of them use."""

import re
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]


class Settings(BaseModel):
    """What all settings have in common: frozen, and no key they do not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def is_set(settings: BaseModel, name: str) -> bool:
    """Whether a setting was given and is not its default, which a run writes into its settings.json too."""
    default = type(settings).model_fields[name].get_default(call_default_factory=False)
    return name in settings.model_fields_set and getattr(settings, name) != default


def is_remote(name: str) -> bool:
    """Whether a folder of records is named by an address, as `s3://bucket/records`."""
    return re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*(::|://)", name) is not None


def parse_bytes(text: str) -> int:
    """80GB, 24GiB, 640MB, 16e9 -> bytes. Raises ValueError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*(?:([kMGT])(i?)B|B?)", text.strip())
    size = 0
    if found:
        base = 1024 if found[3] else 1000
        size = int(float(found[1]) * base ** " kMGT".index(found[2] or " "))
    if size < 10**6:
        raise ValueError(f"{text!r} is no size of a memory; write it as 80GB, 24GiB, 640MB or 16e9")
    return size
