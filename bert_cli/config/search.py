"""The settings of `bert search`: a file that finds the passages of a text, by their words and by vectors."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from bert_cli.config.data import Documents, TextSettings
from bert_cli.settings.markers import PathOrName, Positional
from bert_cli.settings.numbers import Positive
from bert_cli.settings.settings import JsonSettings, SettingError, Settings, Shared


class IndexFileSettings(Shared):
    """The index."""

    index: Positional[Path]
    """File of the index, which `bert search make` writes."""


class SearchSettings(Settings):
    """Find passages of your own text, by their words (BM25) and, with a model, by the meaning of a question.

    `make` reads text into an index, one file; `ask` prints the best passages; `score` measures how well your own
    questions are answered; `export` writes passages and vectors for a database. `bert search ask --help` lists the
    options of `ask`; each command has its own help.
    Example: bert search make manuals.index manuals --model runs/vectors
    Example: bert search ask manuals.index "how do I mount a disk?"
    """


class SearchMakeSettings(IndexFileSettings, TextSettings):
    """Read text into an index; again: only what changed.

    The index holds the passages of TEXT and of no other files. A second call reads only new and changed files, and
    computes only missing vectors. A call that was stopped continues.
    Example: bert search make manuals.index manuals
    Example: bert search make manuals.index 'manuals/*.txt' notes.jsonl --model sentence-transformers/all-MiniLM-L6-v2
    """

    text: Positional[Annotated[list[Path], Field(min_length=1)]]
    """Folders, files or quoted patterns of text, in any format that `bert preprocess` reads."""
    model: PathOrName | None = None
    """Model of the vectors, such as a run of `bert embed`: a run folder, a checkpoint, a Hugging Face folder or name.
    By default the model of the index; without one, words alone are searched."""
    token_vectors: bool | None = None
    """Also store token vectors, which re-rank the best passages and take 8 kB for each. By default the index stays as
    it is, and a new one has them."""
    documents: Documents = "files"
    """End of a document in plain text: the end of its file, or a blank line."""


class SearchAskSettings(IndexFileSettings, JsonSettings):
    """Print the passages that answer a question best, with title and file.

    Example: bert search ask manuals.index "how do I mount a disk?"
    Example: bert search ask manuals.index "mount" --words --top 3
    """

    question: Positional[str]
    """A question, or words; a "phrase" and --option as they stand, and passages without a -word."""
    words: bool = False
    """Rank by words alone."""
    meaning: bool = False
    """Rank by vectors alone."""
    top: Positive = 5
    """Number of passages."""

    def _check(self) -> None:
        if self.words and self.meaning:
            problem = "cannot be combined with words"
            raise SettingError("meaning", problem, "leave out both to rank by both")


class SearchScoreSettings(IndexFileSettings):
    """Score the answers to your own questions: nDCG@10, recall@10 and MRR of words, meaning and both.

    Documents are ranked by their best passage. Half of the documents choose the weight of the meaning, which the index
    keeps if the other half confirms it.
    Example: bert search score manuals.index --queries questions.tsv
    Example: bert search score mine/search.index --queries mine/questions.jsonl
    """

    queries: Path
    """Table with the columns `question` and `document`: .csv, .tsv or .jsonl. A document is named by its title, by its
    file, or by file and number, as in `notes.jsonl:17`; a question may have several rows."""


class SearchExportSettings(IndexFileSettings):
    """Write the passages of an index, and their vectors, as a table for a database.

    Example: bert search export manuals.index passages.parquet
    Example: bert search export mine/search.index out/passages.parquet --format parquet
    """

    out: Positional[Path]
    """The file to write; new."""
    format: Literal["parquet"] = "parquet"
    """parquet, which needs the extra `parquet`; PostgreSQL, OpenSearch, Qdrant and others load it."""
