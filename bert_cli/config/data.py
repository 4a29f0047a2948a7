"""The settings of the data steps. The steps themselves check files."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field

from bert_cli.facts.masking import usual_mask_tokens
from bert_cli.processes import cpu_count
from bert_cli.settings.markers import PathOrAddress, PathOrName, Positional, Recorded
from bert_cli.settings.numbers import Positive
from bert_cli.settings.settings import OutSettings, SettingError, Settings, Shared, Unless

Documents = Literal["blank-lines", "files"]
PROCESSES = "Number of local processes; it does not change the results."
Processes = Annotated[int, Field(ge=1, default_factory=cpu_count, description=PROCESSES)]


class TextSettings(Settings):
    """Formats of text files."""

    input_format: Recorded[
        Literal["auto", "wikiextractor", "plain", "json-lines", "csv", "tsv", "parquet"]
    ] = "auto"
    """Format of the files; `auto` detects it for each. gzip, xz, bzip2 and zstandard are decompressed."""
    text_field: Recorded[str] = Field("text", min_length=1)
    """Field of JSON lines, or column of CSV, TSV or Parquet, with the text of a document."""
    strict: bool = False
    """Stop at a file of a folder that cannot be read as text; by default such files are left out and named."""


class DocumentSettings(Shared):
    """Documents of plain text."""

    documents: Recorded[Documents] = "blank-lines"
    """End of a document in plain text: a blank line, or only the end of its file."""


class TextInputSettings(Shared):
    """Text as input."""

    input: Positional[Path]
    """Your text: a folder, a file, or a quoted 'pattern*'; or the output of `bert extract`."""


class SentenceInputSettings(Shared):
    """Sentences as input."""

    input: Positional[Path]
    """The output of `bert preprocess`, or text with one sentence on each line: a folder, a file, 'pattern*'."""


class ExecutorSettings(Settings):
    """Execution: local processes, or a cluster."""

    NEEDS = {"scheduler": ("executor", "dask"), "processes": ("executor", "local")}

    processes: Processes
    executor: Literal["local", "dask"] = "local"
    """`local` processes, or the workers of a `dask` cluster with a shared file system. Dask is not
    authenticated: anyone who can reach its ports can run code, so the network must be trusted."""
    scheduler: PathOrAddress | None = None
    """Address of the dask scheduler, such as tcp://HOST:8786, or its scheduler file."""

    def _check(self) -> None:
        if self.executor == "dask" and self.scheduler is None:
            remedy = "add --scheduler tcp://HOST:8786"
            raise SettingError("executor", "dask needs the address of the scheduler", remedy)


def check_mask_tokens(settings: BaseModel, predictions: str, length: str) -> None:
    """Raise SettingError for more masked positions than an example has tokens besides [CLS] and two [SEP]."""
    number = getattr(settings, predictions)
    tokens = getattr(settings, length) - 3
    if number > tokens:
        problem = f"{number} is more than the {tokens} tokens of an example ({length} - 3)"
        raise SettingError(predictions, problem, "lower it")


class DownloadSettings(OutSettings):
    """Download a Wikipedia dump, or copy the shipped sample; resumable and verified.

    Example: bert download data/dump --language en --date latest
    Example: bert download data/dump --language simple --date 20260901
    """

    language: Recorded[str] = Field("en", pattern=r"^[a-z][a-z0-9_-]*$")
    """Language code of Wikipedia: en, de, simple, zh_yue, ..."""
    date: Recorded[str] = Field("latest", pattern=r"^(latest|\d{8})$")
    """`latest`, or the date of a dump as YYYYMMDD."""
    sample: Recorded[bool] = False
    """Copy the small sample that ships with the tool instead of downloading."""


class ExtractorSettings(Settings):
    """Conversion of wikitext to text."""

    with_program: str | None = Field(None, alias="with", min_length=1)
    """Run this program instead of the built-in converter, such as "wicket --output - --quiet". It receives a dump of
    some pages as its last argument and writes <doc> blocks to standard output.
    `wikiextractor` runs WikiExtractor with fitting options (needs the extra `wikiextractor`)."""
    templates: Path | None = None
    """JSON file {"name of a template": "text with {1}", ...} with the text that the built-in converter writes for
    templates."""
    keep_damaged: bool = False
    """Accept a damaged or truncated dump: keep its complete articles and exit with 0 instead of 3."""
    dump: Positional[Path]
    """A MediaWiki dump: .xml, or compressed as .bz2, .xz, .gz or .zst; or a folder with exactly one dump."""


class ExtractSettings(OutSettings, ExtractorSettings, ExecutorSettings):
    """Extract the text of a dump into folders AA, AB, ... of <doc> blocks.

    Example: bert extract data/dump data/extracted
    Example: bert extract simplewiki.xml.bz2 data/extracted --with wikiextractor
    """


class SplittingSettings(Settings):
    """Sentence splitting and duplicate documents."""

    NEEDS = {"language": ("sentence_splitter", "punkt", "sentencex")}

    language: str = "english"
    """Language of the text: its ISO 639 code (en, ja, ...), or NLTK's name (english, german, ...)."""
    sentence_splitter: Literal["punkt", "sentencex", "lines"] = "sentencex"
    """`sentencex`, `punkt` (NLTK's, with its data for the language), or `lines` for text with one sentence on each
    line."""
    deduplicate: Recorded[bool] = False
    """Drop documents that equal an earlier document except for white space."""
    near_duplicates: Recorded[float | None] = Field(None, gt=0.0, le=1.0)
    """Also drop documents that share about this fraction of five-word sequences, such as 0.8, or more with an earlier
    document. The fraction is estimated, mostly within 0.04 (needs the extra `near-duplicates`)."""


class PreprocessSettings(
    OutSettings,
    TextInputSettings,
    DocumentSettings,
    SplittingSettings,
    TextSettings,
    ExecutorSettings,
):
    """Split text into sentences: one on each line, a blank line between documents.

    Example: bert preprocess data/extracted data/sentences --language english
    Example: bert preprocess 'books/*.jsonl.gz' data/sentences --text-field body --deduplicate
    """

    line_breaks: Recorded[Literal["auto", "keep", "join"]] = "auto"
    """How to treat hard line breaks within paragraphs, for example from a PDF, a manual or an e-mail: `join` lines and
    words split by a hyphen, `keep` each line, or `auto`, which joins the lines of files that look wrapped."""


class RecipeSettings(Settings):
    """Examples and their masks."""

    NEEDS = dict.fromkeys(
        ("duplication_factor", "whole_word_masking", "masked_lm_prob"),
        Unless(
            lambda of: of.masking == "static",
            "with masking 'dynamic', which stores each example once and masks it when it is read",
            "leave it out; the run has --masking.unit word and --masking.probability",
        ),
    )

    vocab: PathOrName
    """A vocab.txt or tokenizer.json, a folder with one, a run, or a model name on the Hugging Face hub."""
    sequence_length: Recorded[int] = Field(128, ge=8, le=65535)
    """Sequence length of an example, including special tokens."""
    masked_lm_prob: Recorded[float] = Field(0.15, gt=0.0, lt=1.0)
    """Fraction of an example's tokens that are masked, at most mask_tokens; only for static masking."""
    mask_tokens: Recorded[Positive] = Field(
        default_factory=lambda of: usual_mask_tokens(
            of.get("sequence_length", 128), of.get("masked_lm_prob", 0.15)
        )
    )
    """Maximum number of masked tokens of an example. By default that of BERT (20 for 128 tokens, 56 for 384, 76 for
    512), and for other lengths masked_lm_prob of the length, rounded up."""
    masking: Recorded[Literal["static", "dynamic"]] = "static"
    """`static` writes masked examples; `dynamic` stores each example once and masks it when it is read."""
    duplication_factor: Recorded[int] = Field(5, ge=1)
    """Number of passes over the text, each with different pairs and masks; only for static masking."""
    short_seq_prob: Recorded[float] = Field(0.1, ge=0.0, le=1.0)
    """Fraction of examples with a random shorter target length."""
    nsp: Recorded[bool] = True
    """Make sentence pairs with a next-sentence label; otherwise single segments of consecutive sentences."""
    whole_word_masking: Recorded[bool] = False
    """Mask complete words with all their tokens; only for static masking."""
    cased: Recorded[bool] = False
    """Preserve case and accents; by default text is lower-cased, as for the uncased models."""
    random_seed: Recorded[int] = Field(12345, ge=0)
    """Seed of pairs and masks; the same seed and input give the same bytes."""

    def _check(self) -> None:
        check_mask_tokens(self, "mask_tokens", "sequence_length")


class TokenizeSettings(OutSettings, SentenceInputSettings, RecipeSettings, ExecutorSettings):
    """Make records, which are training examples that are tokenized once and saved, from sentences.

    Example: bert tokenize data/sentences data/128 --vocab vocab.txt --sequence-length 128
    Example: bert tokenize data/sentences data/512 --vocab bert-base-uncased --sequence-length 512 --masking dynamic
    """


def _check_vocabulary_size(value: object) -> int | str:
    """Return a number of pieces, or +N as it is. Raises SettingError for anything else."""
    text = str(value)
    if re.fullmatch(r"\+\d{1,7}", text):
        return text
    if not re.fullmatch(r"\d{3,7}", text) or int(text) < 100:
        remedy = "use a number from 100 to 9,999,999, or +2000 with --extend"
        raise SettingError("", f"got {text}", remedy)
    return int(text)


class VocabSettings(OutSettings, SentenceInputSettings):
    """Train a WordPiece vocabulary on your own sentences; OUT gets vocab.txt and the tokenizer's settings.

    Example: bert vocab data/sentences data/vocab --size 30522
    Example: bert vocab data/sentences data/vocab --size 32000 --no-strip-accents
    Example: bert vocab data/sentences data/vocab --extend bert-base-uncased --size +2000
    """

    size: Recorded[Annotated[int | str, BeforeValidator(_check_vocabulary_size)]] = 30522
    """Vocabulary size, including special tokens; with `extend` the number of new pieces, such as +2000."""
    extend: PathOrName | None = None
    """Vocabulary to extend: a vocab.txt, a folder with one, or a model on the hub. Its pieces keep their order; the
    most frequent missing pieces of this text are appended."""
    cased: Recorded[bool] = False
    """Preserve case and accents."""
    strip_accents: bool | None = None
    """Strip accents and marks, which are parts of letters in many scripts; by default only in lower-cased text."""
    split_chinese: bool = True
    """Treat each Chinese character as a separate word, also in Japanese and Korean text, as BERT does."""

    def _check(self) -> None:
        if isinstance(self.size, str) != (self.extend is not None):
            if self.extend:
                problem = f"got {self.size} with --extend"
                remedy = f"use +{self.size}"
            else:
                problem = f"got {self.size} without --extend"
                remedy = "use a size without a plus"
            raise SettingError("size", problem, remedy)


class IndexSettings(Settings):
    """Write an `offset length` index for each record file, and corpus.json.

    Example: bert index data/128
    Example: bert index records_of_another_tool --vocab vocab.txt --check
    """

    folder: Positional[Path]
    """Folder of .tfrecord files."""
    vocab: Recorded[PathOrName | None] = None
    """Vocabulary of records made by another tool (a folder without corpus.json)."""
    processes: Processes
    check: bool = False
    """Compare every file with the checksums of an earlier corpus.json, and check every record as a run does."""


class DataChainSettings(
    OutSettings, ExtractorSettings, SplittingSettings, RecipeSettings, ExecutorSettings
):
    """Run extract, preprocess, tokenize and index in one restartable call.

    Example: bert data dump.xml.bz2 data/wikipedia --vocab vocab.txt --sequence-length 128 --mask-tokens 20
    Example: bert data dump.xml.bz2 data/wikipedia --vocab vocab.txt --executor dask
    --scheduler tcp://host:8786
    """

    out: Positional[Path]
    """Folder of extracted/, sentences/ and one folder of records per sequence length."""
