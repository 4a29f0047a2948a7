"""The settings of the data steps, one frozen class per command.

The docstring under a field is its `--help` text. Positional paths come first; everything else is a
flag in kebab case. Only whole questions about one value are answered here (ranges, choices); what
depends on files is checked by the step that opens them.
"""

import os
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AliasChoices,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import CliPositionalArg

from bert_cli.config.settings import Settings, is_remote, is_set
from bert_cli.processes import cpu_count

Processes = Annotated[int, Field(ge=1)]
Splitter = Literal["punkt", "sentencex", "lines"]
SPLITTER_NAMES = AliasChoices("sentence_splitter", "splitter")
"""The flag and the name that it had before."""


class DataSettings(Settings):
    """What every data step has in common: frozen, no key it does not know, paths of this machine."""

    @field_validator("*", mode="before")
    @classmethod
    def _paths_are_on_this_machine(cls, value: Any, info: ValidationInfo) -> Any:
        """A `~` that the shell left is expanded; an address is no path, which would swallow a slash."""
        kind = cls.model_fields[info.field_name or ""].annotation
        if Path not in (kind, *get_args(kind)) or not isinstance(value, str | Path):
            return value
        if is_remote(str(value)):
            raise ValueError(
                f"{value} is an address, and this is done with files; copy them here first, as with "
                "`aws s3 cp --recursive` or `gsutil cp -r`"
            )
        return os.path.expanduser(value)


class TextSettings(DataSettings):
    """What is read where text of one's own may stand, and how."""

    input_format: Literal["auto", "wikiextractor", "plain", "json-lines", "parquet"] = "auto"
    """What the files are; `auto` looks at how each begins. gzip, xz, bzip2 and zstandard are unpacked."""
    text_field: str = Field("text", min_length=1)
    """Field of JSON lines, or column of Parquet, that holds a document's text."""


class ExecutorSettings(DataSettings):
    """Where the shards of a step are done: by processes of this machine, or by a cluster."""

    executor: Literal["local", "dask"] = "local"
    """`local` processes, or the workers of a `dask` cluster that share the file system. Its messages are
    pickled and not authenticated: whoever reaches its ports can run code, so the network must be trusted."""
    scheduler: str | None = None
    """Address of the dask scheduler, as tcp://HOST:8786, or the file that `dask scheduler
    --scheduler-file` wrote."""

    @model_validator(mode="after")
    def _executor_has_its_scheduler(self) -> "ExecutorSettings":
        if self.executor == "dask" and self.scheduler is None:
            raise ValueError(
                "executor (dask): needs the scheduler's address; add --scheduler tcp://HOST:8786"
            )
        if self.executor == "local" and self.scheduler is not None:
            raise ValueError(
                f"scheduler ({self.scheduler}): has no effect with executor 'local'; "
                "add --executor dask or leave it out"
            )
        if self.executor == "dask" and "processes" in self.model_fields_set:
            raise ValueError(
                "processes: has no effect with executor 'dask', whose workers say how many threads "
                "they have; leave it out"
            )
        return self


def packed_predictions(
    sequence_length: int, sequences: int, predictions: int, probability: float | None
) -> int:
    """Masked places that a pack of at most C sequences has room for: none of it can have more.

    A sequence has at most P of them, and `max(1, round(probability length))`, which is at most one
    more than its share. `probability` is None for records that do not say how they were masked.
    """
    if sequences == 1 or probability is None:
        return sequences * predictions
    return min(sequences * predictions, int(sequence_length * probability) + sequences)


class Masking(DataSettings):
    """How tokens are chosen for prediction: where records are dynamic a setting of the run."""

    unit: Literal["token", "word", "span"] = "token"
    """What is chosen as a whole: single pieces, words with all their pieces, or spans of such words."""
    probability: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.15
    """Share of an example's tokens that are to be predicted, at most P of them."""
    span_stop: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    """Chance that a span ends after each of its words; spans only. 0.2 gives 3.8 words on average."""
    longest_span: Annotated[int, Field(ge=1, le=1000)] = 10
    """Most words of a span; spans only."""

    @model_validator(mode="after")
    def _settings_of_spans_have_spans(self) -> "Masking":
        for name in ("span_stop", "longest_span"):
            if is_set(self, name) and self.unit != "span":
                raise ValueError(
                    f"{name} ({getattr(self, name)}): has no effect with unit {self.unit!r}; leave it out "
                    "or choose unit 'span'"
                )
        return self


class DownloadSettings(DataSettings):
    """Fetch a Wikipedia dump (or the shipped sample), resumed and verified.

    Example: bert download data/dump --language en --date latest
    Example: bert download data/dump --language simple --date 20260901
    Example: bert download data/dump --sample
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


class ExtractSettings(ExecutorSettings):
    """Turn a dump into text with WikiExtractor: folders AA, AB, ... of <doc> blocks.

    Example: bert extract data/dump data/extracted
    Example: bert extract simplewiki.xml.bz2 data/extracted --processes 8
    """

    dump: CliPositionalArg[Path]
    """A MediaWiki dump: .xml, .xml.bz2, .xml.xz or .xml.gz; or a folder that holds exactly one."""
    out: CliPositionalArg[Path]
    """Folder that receives the text."""
    processes: Processes = Field(default_factory=cpu_count)
    """Local processes."""
    expand_templates: bool = False
    """Expand templates as far as WikiExtractor can; reads the dump twice and is several times slower."""
    chunk_megabytes: int = Field(16, ge=1)
    """Megabytes (10^6 bytes) of XML per output file: the unit of restart and of parallel work."""


class PreprocessSettings(TextSettings, ExecutorSettings):
    """Split text into sentences: one a line, a blank line between documents.

    Example: bert preprocess data/extracted data/sentences --language english
    Example: bert preprocess 'books/*.jsonl.gz' data/sentences --text-field body --deduplicate
    """

    input: CliPositionalArg[Path]
    """What `bert extract` leaves, or text of one's own: a folder, a file, or a quoted 'pattern*'."""
    out: CliPositionalArg[Path]
    """Folder that receives the sentences."""
    documents: Literal["blank-lines", "files"] = "blank-lines"
    """What ends a document of plain text: a blank line, or only the end of its file."""
    processes: Processes = Field(default_factory=cpu_count)
    """Local processes."""
    language: str = "english"
    """Language of the sentence splitter, by NLTK's name (english, german, ...)."""
    sentence_splitter: Splitter = Field("punkt", validation_alias=SPLITTER_NAMES)
    """`punkt` (NLTK), `sentencex` (Rust, many times faster; needs the extra of that name), or
    `lines` for text that has one sentence a line already."""
    deduplicate: bool = False
    """Drop documents that are equal, but for white space, to an earlier one."""
    near_duplicates: float | None = Field(None, gt=0.0, le=1.0)
    """Drop documents, beside equal ones, that share this much of their runs of five words with an
    earlier one (0.8 say; needs the extra of that name)."""

    @model_validator(mode="after")
    def _language_has_an_effect(self) -> "PreprocessSettings":
        check_language(self)
        return self


def check_language(settings: "PreprocessSettings | DataChainSettings") -> None:
    """Refuse a language where nothing depends on it."""
    if settings.sentence_splitter == "lines" and is_set(settings, "language"):
        raise ValueError(
            f"language ({settings.language}): has no effect with sentence_splitter 'lines', which splits no "
            "line; leave it out or choose another splitter"
        )


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


class TokenizeSettings(TextSettings, ExecutorSettings):
    """Make masked-LM + next-sentence records from sentences.

    Example: bert tokenize data/sentences data/128 --vocab vocab.txt --sequence-length 128 --mask-tokens 20
    Example: bert tokenize data/sentences data/512 --vocab bert-base-uncased --sequence-length 512
    --mask-tokens 76 --masking dynamic
    Example: bert tokenize notes.txt.gz data/128 --vocab vocab.txt --masking dynamic --no-nsp
    """

    input: CliPositionalArg[Path]
    """What `bert preprocess` leaves, or text of one sentence a line: a folder, a file, 'pattern*'."""
    out: CliPositionalArg[Path]
    """Folder that receives the records."""
    documents: Literal["blank-lines", "files"] = "blank-lines"
    """What ends a document of plain text: a blank line, or only the end of its file."""
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
    nsp: bool = True
    """Make sentence pairs with a next-sentence label; without, single segments of consecutive
    sentences, for text that has no documents."""
    whole_word_masking: bool = False
    """Choose whole words for masking, with all their pieces."""
    cased: bool = False
    """Keep case and accents; by default text is lower-cased as for the uncased models."""
    random_seed: int = Field(12345, ge=0)
    """Seed of pairs and masks: same seed and input, same bytes."""
    group_files: int = Field(1, ge=1)
    """How many input files are paired and shuffled together; each group becomes one record file,
    and is what a process holds in memory (51 MB of text: 0.3 GB). A file counts 64 MB at most."""
    processes: Processes = Field(default_factory=cpu_count)
    """Local processes; the bytes written do not depend on it."""

    @model_validator(mode="after")
    def _recipe_is_possible(self) -> "TokenizeSettings":
        check_recipe(self)
        return self


class VocabSettings(TextSettings):
    """Train a WordPiece vocabulary on sentences of one's own.

    Example: bert vocab data/sentences data/vocab --size 30522
    Example: bert vocab 'books/*.txt.gz' data/vocab --size 28996 --cased
    """

    input: CliPositionalArg[Path]
    """What `bert preprocess` leaves, or text of one sentence a line: a folder, a file, 'pattern*'."""
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
    Example: bert index records_of_another_tool --vocab vocab.txt --check
    """

    folder: CliPositionalArg[Path]
    """Folder of .tfrecord files."""
    vocab: str | None = None
    """Vocabulary of records that another tool made (a folder without corpus.json)."""
    check: bool = False
    """Read every record and refuse checksums, lengths and values that a run would refuse."""
    processes: Processes = Field(default_factory=cpu_count)
    """Local processes."""


class DataChainSettings(ExecutorSettings):
    """Chain extract, preprocess, tokenize and index in one restartable call.

    Example: bert data dump.xml.bz2 data/wikipedia --vocab vocab.txt --sequence-length 128 --mask-tokens 20
    Example: bert data dump.xml.bz2 data/wikipedia --vocab vocab.txt --executor dask
    --scheduler tcp://host:8786
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
    nsp: bool = True
    """Make sentence pairs with a next-sentence label, as for `bert tokenize`."""
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
    sentence_splitter: Splitter = Field("punkt", validation_alias=SPLITTER_NAMES)
    """Sentence splitter, as for `bert preprocess`."""
    deduplicate: bool = False
    """Drop documents that are equal to an earlier one."""
    near_duplicates: float | None = Field(None, gt=0.0, le=1.0)
    """Drop documents that are nearly equal to an earlier one, as for `bert preprocess`."""
    expand_templates: bool = False
    """Expand templates, as for `bert extract`."""
    processes: Processes = Field(default_factory=cpu_count)
    """Local processes."""

    @model_validator(mode="after")
    def _recipe_is_possible(self) -> "DataChainSettings":
        check_recipe(self)
        check_language(self)
        return self


class PackSettings(ExecutorSettings):
    """Put several sequences into one example, so that few places of a batch are padding.

    Example: bert pack data/512 data/512_packed --sequence-length 512 --max-sequences-per-pack 3
    Example: bert pack data/128 data/512_packed --sequence-length 512 --max-sequences-per-pack 8
    """

    input: CliPositionalArg[Path]
    """Folder of records, static or dynamic, that are not packed yet."""
    out: CliPositionalArg[Path]
    """Folder that receives the packed records, of the same kind."""
    sequence_length: int | None = Field(None, ge=8, le=65535)
    """Places S of a pack; as many as the records have, or more. By default as many."""
    max_sequences_per_pack: int = Field(3, ge=2)
    """Most sequences in a pack."""
    random_seed: int = Field(12345, ge=0)
    """Which records of a length stand together: same seed and input, same bytes."""
    processes: Processes = Field(default_factory=cpu_count)
    """Local processes; the bytes written do not depend on it."""
