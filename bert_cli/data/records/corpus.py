"""corpus.json: what the records of a folder are, read against types and bounds.

Another tool, another version or a text editor may have written it, so its sizes and file names are
checked once, here, before memory is allocated or a path is opened by them.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from bert_cli.data.records.sentence_pairs import SpecialIds
from bert_cli.data.shards.manifest import MANIFEST as STEP_MANIFEST
from bert_cli.data.shards.manifest import recorded_step
from bert_cli.errors import DataError
from bert_cli.files import InnerPath, parse_json, read_json

CORPUS = "corpus.json"
COPY_LOCK = ".lock"
"""Lies in a folder that is a copy of one at an address."""

Count = Annotated[int, Field(ge=0)]
Positions = Annotated[int, Field(ge=1, le=65535)]


class _Checked(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _File(_Checked):
    name: InnerPath
    bytes: Count


class _RecordFile(_File):
    records: Count
    crc32c: str | None = None


class _FileBeside(_File):
    crc32c: str


class Corpus(_Checked):
    """The fields that the tool reads; what is optional here is absent for some records."""

    format: Literal["static", "dynamic"]
    sequence_length: Positions
    mask_tokens: Positions
    masked_lm_prob: float | None
    whole_word_masking: bool | None
    vocab_size: Annotated[int, Field(ge=1, lt=2**31)]
    vocab_sha256: str
    token_bytes: Literal[2, 4]
    special_ids: SpecialIds
    tokenizer: dict[str, Any]
    files: list[_RecordFile]
    beside: list[_FileBeside] = []
    records: Count
    fingerprint: str
    next_sentence: bool = True
    max_sequences_per_pack: Positions = 1
    sequences: Count = 0
    real_token_share: float = 1.0
    duplication_factor: int | None = None


def read_corpus(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's corpus.json; DataError where there is none that holds."""
    path = folder / CORPUS
    refuse_unfinished(folder)
    if not path.exists():
        is_run = any(folder.glob("step_*/"))
        hint = f"{folder} is a run, see `bert runs {folder.parent}`; " if is_run else ""
        raise DataError(
            f"{path}: does not exist; {hint}give a folder of records that `bert tokenize` or `bert index` "
            "has finished"
        )
    corpus = read_json(path, Corpus, DataError, _remedy(folder))
    return corpus.model_dump(exclude_unset=True)


def parse_corpus(address: str, text: bytes) -> dict[str, Any]:
    """Return the content of a corpus.json at an address; DataError for one that does not hold."""
    remedy = "run `bert index` on the folder that was copied there, and copy it again"
    return parse_json(address, text, Corpus, DataError, remedy).model_dump(exclude_unset=True)


def is_copy(folder: Path) -> bool:
    """Whether a folder is a copy of one at an address, which is fetched again when it is gone."""
    return (folder / COPY_LOCK).exists()


def refuse_unfinished(folder: Path) -> None:
    """Raise DataError while records are made again: an older corpus.json must not stand for them."""
    if (folder / ".done").exists() and not (folder / STEP_MANIFEST).exists():
        step = recorded_step(folder) or "tokenize"
        raise DataError(
            f"folder ({folder}): `bert {step}` has not finished in it; run it again to go on"
        )


def _remedy(folder: Path) -> str:
    """What brings a corpus.json back that cannot be read, by who wrote it."""
    if is_copy(folder):
        return f"remove {folder}, it will be fetched again"
    step = recorded_step(folder)
    if step is not None:
        return (
            f"remove it and run the same `bert {step}` again, which keeps the records and writes it"
        )
    vocab = folder / "vocab.txt"
    return (
        f"remove it and run `bert index {folder} --vocab {vocab if vocab.exists() else 'vocab.txt'}`, with "
        "the vocabulary that the records were made with"
    )
