"""The settings of the data steps, one frozen class per command.

The docstring under a field is its `--help` text. Positional paths come first; everything else is a
flag in kebab case. Only whole questions about one value are answered here (ranges, choices); what
depends on files is checked by the step that opens them.
"""

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_settings import CliPositionalArg


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


Processes = Annotated[int, Field(ge=1)]


class DataSettings(BaseModel):
    """What every data step has in common: frozen, and no key it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Masking(DataSettings):
    """How tokens are chosen for prediction: where records are dynamic a setting of the run."""

    unit: Literal["token", "word"] = "token"
    """What is chosen as a whole: single pieces, or words with all their pieces."""
    probability: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.15
    """Share of an example's tokens that are to be predicted, at most P of them."""


class DownloadSettings(DataSettings):
    """Fetch a Wikipedia dump (or the shipped sample), resumed and verified.

    Example: bert download data/dump --language en --date latest
    """

    out: CliPositionalArg[Path]
    """Folder that receives the dump file."""
    language: str = Field("en", pattern=r"^[a-z][a-z0-9_-]*$")
    """Wikipedia's language code: en, de, simple, zh_yue, ..."""
    date: str = Field("latest", pattern=r"^(latest|\d{8})$")
    """`latest`, or the day of a dump as YYYYMMDD."""
    mirror: str = "https://dumps.wikimedia.org"
    """Base address of the dump server or of a mirror of it."""
    sample: bool = False
    """Copy the small sample that ships with the tool instead of downloading."""


class ExtractSettings(DataSettings):
    """Turn a dump into text with WikiExtractor: folders AA, AB, ... of <doc> blocks.

    Example: bert extract data/dump data/extracted
    """

    dump: CliPositionalArg[Path]
    """A MediaWiki dump: .xml, .xml.bz2, .xml.xz or .xml.gz; or a folder that holds exactly one."""
    out: CliPositionalArg[Path]
    """Folder that receives the text."""
    processes: Processes = Field(default_factory=_cores)
    """Local processes."""
    expand_templates: bool = False
    """Expand templates as far as WikiExtractor can; reads the dump twice and is several times slower."""
    chunk_megabytes: int = Field(16, ge=1)
    """Megabytes (10^6 bytes) of XML per output file: the unit of restart and of parallel work."""


class PreprocessSettings(DataSettings):
    """Split extracted text into sentences: one a line, a blank line between documents.

    Example: bert preprocess data/extracted data/sentences --language english
    """

    input: CliPositionalArg[Path]
    """Folder of extracted text, as `bert extract` leaves it."""
    out: CliPositionalArg[Path]
    """Folder that receives the sentences."""
    processes: Processes = Field(default_factory=_cores)
    """Local processes."""
    language: str = "english"
    """Language of the sentence splitter, by NLTK's name (english, german, ...)."""
    splitter: Literal["punkt", "sentencex"] = "punkt"
    """`punkt` (NLTK) or `sentencex` (Rust, many times faster; needs the extra of that name)."""


def check_recipe(settings: "TokenizeSettings | DataChainSettings") -> None:
    """Refuse what cannot be or would do nothing; ValueError, which pydantic tells with the place."""
    copies = settings.duplication_factor
    if settings.masking == "dynamic" and "duplication_factor" in settings.model_fields_set:
        raise ValueError(
            f"duplication_factor ({copies}): has no effect with masking 'dynamic', which stores each example "
            "once; leave it out or choose masking 'static'"
        )
    for name in ("whole_word_masking", "masked_lm_prob"):
        if settings.masking == "dynamic" and name in settings.model_fields_set:
            raise ValueError(
                f"{name}: has no effect with masking 'dynamic', whose masks are drawn when records are read; "
                "give it to the run, as `bert pretrain --masking.unit word` or --masking.probability"
            )
    if settings.mask_tokens > settings.sequence_length - 3:
        raise ValueError(
            f"mask_tokens ({settings.mask_tokens}): is more than the tokens of an example "
            f"(sequence_length - 3 = {settings.sequence_length - 3}); lower it"
        )


class TokenizeSettings(DataSettings):
    """Make masked-LM + next-sentence records from sentences.

    Example: bert tokenize data/sentences data/128 --vocab vocab.txt --sequence-length 128 --mask-tokens 20
    """

    input: CliPositionalArg[Path]
    """Folder of sentences, as `bert preprocess` leaves it."""
    out: CliPositionalArg[Path]
    """Folder that receives the records."""
    vocab: str
    """A vocab.txt, a folder that holds one, or a model name on the Hugging Face hub."""
    sequence_length: int = Field(128, ge=8, le=65535)
    """Places S of an example, special tokens included."""
    mask_tokens: int = Field(20, ge=1)
    """Most masked places P of an example (20 for 128, 56 for 384, 76 for 512)."""
    masking: Literal["static", "dynamic"] = "static"
    """`static` writes masked examples; `dynamic` stores each example once and masks when read."""
    duplication_factor: int = Field(5, ge=1)
    """How often the text is gone through, with other pairs and masks; static only."""
    short_seq_prob: float = Field(0.1, ge=0.0, le=1.0)
    """Share of examples that aim at a random shorter length."""
    masked_lm_prob: float = Field(0.15, gt=0.0, lt=1.0)
    """Share of an example's tokens that are to be predicted, at most P of them."""
    whole_word_masking: bool = False
    """Choose whole words for masking, with all their pieces."""
    cased: bool = False
    """Keep case and accents; by default text is lower-cased as for the uncased models."""
    random_seed: int = Field(12345, ge=0)
    """Seed of pairs and masks: same seed and input, same bytes."""
    group_files: int = Field(1, ge=1)
    """How many input files are paired and shuffled together; each group becomes one record file,
    and is what a process holds in memory (51 MB of text: 0.3 GB)."""
    processes: Processes = Field(default_factory=_cores)
    """Local processes; the bytes written do not depend on it."""

    @model_validator(mode="after")
    def _recipe_is_possible(self) -> "TokenizeSettings":
        check_recipe(self)
        return self


class VocabSettings(DataSettings):
    """Train a WordPiece vocabulary on sentences of one's own.

    Example: bert vocab data/sentences data/vocab --size 30522
    """

    input: CliPositionalArg[Path]
    """Folder of sentences, as `bert preprocess` leaves it."""
    out: CliPositionalArg[Path]
    """Folder that receives vocab.txt and the tokenizer's settings."""
    size: int = Field(30522, ge=100)
    """Pieces in the vocabulary, special tokens included."""
    cased: bool = False
    """Keep case and accents."""
    min_frequency: int = Field(2, ge=1)
    """A piece must occur this often."""


class IndexSettings(DataSettings):
    """Write the `offset length` index beside each record file, and corpus.json.

    Example: bert index data/128
    """

    folder: CliPositionalArg[Path]
    """Folder of .tfrecord files."""
    vocab: str | None = None
    """Vocabulary of records that another tool made (a folder without corpus.json)."""
    processes: Processes = Field(default_factory=_cores)
    """Local processes."""


class DataChainSettings(DataSettings):
    """Chain extract, preprocess, tokenize and index in one restartable call.

    Example: bert data dump.xml.bz2 data/wikipedia --vocab vocab.txt --sequence-length 128 --mask-tokens 20
    """

    dump: CliPositionalArg[Path]
    """A MediaWiki dump, as for `bert extract`."""
    out: CliPositionalArg[Path]
    """Folder that receives extracted/, sentences/ and one folder of records per sequence length."""
    vocab: str
    """A vocab.txt, a folder that holds one, or a model name on the Hugging Face hub."""
    sequence_length: int = Field(128, ge=8, le=65535)
    """Places S of an example, special tokens included."""
    mask_tokens: int = Field(20, ge=1)
    """Most masked places P of an example."""
    masking: Literal["static", "dynamic"] = "static"
    """`static` writes masked examples; `dynamic` masks when read."""
    duplication_factor: int = Field(5, ge=1)
    """How often the text is gone through; static only."""
    short_seq_prob: float = Field(0.1, ge=0.0, le=1.0)
    """Share of examples that aim at a random shorter length."""
    whole_word_masking: bool = False
    """Choose whole words for masking."""
    cased: bool = False
    """Keep case and accents."""
    random_seed: int = Field(12345, ge=0)
    """Seed of pairs and masks."""
    group_files: int = Field(1, ge=1)
    """How many input files are paired and shuffled together."""
    language: str = "english"
    """Language of the sentence splitter, by NLTK's name."""
    splitter: Literal["punkt", "sentencex"] = "punkt"
    """Sentence splitter, as for `bert preprocess`."""
    expand_templates: bool = False
    """Expand templates, as for `bert extract`."""
    processes: Processes = Field(default_factory=_cores)
    """Local processes."""

    @model_validator(mode="after")
    def _recipe_is_possible(self) -> "DataChainSettings":
        check_recipe(self)
        return self
