"""What `bert serve` answers about a model or an index, over HTTP and by the Model Context Protocol."""

import os
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from pydantic import Field

from bert_cli.config.use import ServeSettings
from bert_cli.data.io import files
from bert_cli.data.search.database import state_of
from bert_cli.data.search.index import AROUND, Half, Index
from bert_cli.data.search.passages import Hit
from bert_cli.errors import BertError, ConfigError, DataError
from bert_cli.files import JSONObject
from bert_cli.parse.load import Loaded, validate
from bert_cli.processes import quiet_imports
from bert_cli.settings.markers import Hidden
from bert_cli.settings.settings import Settings
from bert_cli.tasks.search import opened
from bert_cli.tasks.search.ask import missing

# A short sentence that asks.
QUESTION = re.compile(
    r"(?:^|(?<=[.!?] ))[^\W\d_a-z][^.!?:;\n\"“]{20,70}[^\W\d_][\u00a0\u202f]?\?(?!\S)|[^。！？\n]{6,30}？",
    re.MULTILINE,
)
SAMPLE = 500  # passages in which questions are sought: it takes 20 ms
TEXT = "text/plain; charset=utf-8"
# Answers the JSON of a request. Raises ConfigError for a wrong one.
Call = Callable[[JSONObject], object]


class Search(Settings, use_attribute_docstrings=True):
    """Find the passages of the user's own documents that answer a question; the best stands first.

    Each has its document, the characters from start to stop there, its page in a PDF, and its number, `passage`.
    """

    question: Hidden[str]
    """A question, or words; a "phrase" as it stands, and no passages with a -word."""
    top: int = Field(10, ge=1, le=100)
    """Number of passages."""
    half: Half | None = None
    """Rank by words or by meaning alone."""
    folder: str = ""
    """Folder of the documents, as it stands in their names, or a document; by default all."""
    passage: int | None = Field(None, ge=1)
    """Number of a passage, whose document alone is searched."""

    def hits(self, index: Index) -> list[Hit]:
        """Return the passages."""
        return index.ask(self.question, self.top, self.half, self.folder, self.passage)


class Read(Settings, use_attribute_docstrings=True):
    """Read a passage that `search` has found, and the passages of its document before and after it."""

    passage: Hidden[int] = Field(ge=1)
    """Number of a passage."""
    around: int = Field(5, ge=0, le=AROUND)
    """Number of passages before it, and after it."""

    def hits(self, index: Index) -> list[Hit]:
        """Return the passages; none if the index no longer has the number."""
        return index.document(self.passage, self.around)


TOOLS: dict[str, type[Search] | type[Read]] = {"search": Search, "read": Read}


def find(name: str, index: Index, left_out: Collection[str], sent: JSONObject) -> JSONObject:
    """Answer a request of TOOLS with passages, without the fields left out and what they lack."""
    request = validate(TOOLS[name], Loaded(sent))
    answer: JSONObject = {"hits": [row_of(hit, left_out) for hit in request.hits(index)]}
    if isinstance(request, Search):
        answer["missing"] = missing(index, request.question)
    return answer


def row_of(hit: Hit, left_out: Collection[str]) -> JSONObject:
    """Return the fields of a passage that it has, but for those left out."""
    fields = hit._asdict().items()
    return {name: value for name, value in fields if value is not None and name not in left_out}


def open_model(settings: ServeSettings) -> Mapping[str, Call]:
    """Open a model. `predict` takes an object of the JSON lines that `bert predict` reads, and returns its row."""
    with quiet_imports():
        from bert_cli.tasks.use.model import Model
        from bert_cli.tasks.use.predict import check_number_of_texts, trained_columns
    engine = None
    if "engine" in settings.model_fields_set:
        engine = settings.engine
    model = Model(settings.path, engine, settings.none_below)

    def predict(sent: JSONObject) -> object:
        try:
            item = model.check(sent)
            if item.fields.get("second"):  # one text would print a warning at every request
                check_number_of_texts(model.source, model.task, [item])
        except DataError as mistake:
            raise ConfigError(*mistake.args) from None
        return model.predict([item])[0]

    # Of how many texts an input was in training: 0 is unknown.
    about = {
        "task": model.task,
        "name": Path(settings.path).name,
        "texts": len(trained_columns(model.source)),
    }
    return {"about": lambda sent: about, "predict": predict}


def open_index(settings: ServeSettings) -> Mapping[str, Call]:
    """Open an index, which has the requests of TOOLS."""
    index = opened.open_index(settings.path)

    def about(sent: JSONObject) -> object:
        facts: JSONObject = {"task": "search", "name": Path(settings.path).name}
        with index.snapshot():
            facts["has_meaning"] = index.embed is not None
            facts["has_new_vectors"] = index.has_vectors and index.fact("weights") != index.weights
            facts |= {name: index.count(name) for name in ("passages", "documents")}
            facts["folders"] = index.folders()
            facts["examples"] = examples(index)
        return facts

    def file(sent: JSONObject) -> object:
        request = validate(Read, Loaded({"passage": sent.get("passage")}))
        name, mark = index.file_of(request.passage)
        path = Path(name)
        with suppress(OSError):
            if os.path.realpath(name) == name and mark.startswith(state_of(path)):
                return path, shown_as(path)
        problem = "its file is gone, or has changed since `bert search make`"
        raise ConfigError("passage", problem, "run it again")

    answers = {name: partial(find, name, index, ("file",)) for name in TOOLS}
    return {"about": about, "file": file, **answers}


def shown_as(path: Path) -> str | None:
    """Return the media type of a file that a browser shows and runs nothing of: plain text or PDF; None for others."""
    if path.suffix.lower() == ".pdf":
        return "application/pdf"
    if files.format_by_name(path) in (None, "plain") and not files.compression_of(path):
        with suppress(BertError):
            part = files.recognise(path, files.Reading())
            if part and part.format == "plain":
                return TEXT
    return None


def examples(index: Index) -> list[str]:
    """Return up to three questions: some that a sample of the text asks, or else titles of its documents."""
    texts = [text for text in index.sample(SAMPLE) if "?" in text or "？" in text]
    titles = index.table.execute("SELECT DISTINCT title FROM documents ORDER BY id LIMIT 1000")
    asked = dict.fromkeys(text.strip() for text in QUESTION.findall("\n".join(texts)))
    few = []
    for row in ([*asked], [title for (title,) in titles]):
        if row:
            few += [row[n * len(row) // 3] for n in range(3)]
    return list(dict.fromkeys(few))[:3]
