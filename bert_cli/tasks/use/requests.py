"""What `bert serve` answers about a model or an index, over HTTP and by the Model Context Protocol."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path

from pydantic import Field

from bert_cli.config.use import ServeSettings
from bert_cli.data.search.index import AROUND, Half, Hit, Index
from bert_cli.errors import ConfigError, DataError
from bert_cli.files import JSONObject
from bert_cli.parse.load import Loaded, validate
from bert_cli.processes import quiet_imports
from bert_cli.settings.markers import Hidden
from bert_cli.settings.settings import Settings
from bert_cli.tasks.search import opened

Call = Callable[[JSONObject], object]
"""Answers the JSON of a request. Raises ConfigError for a wrong one."""


class Search(Settings):
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
    """Folder of the documents, as it stands in their names; by default all."""

    def hits(self, index: Index) -> list[Hit]:
        """Return the passages."""
        return index.ask(self.question, self.top, self.half, self.folder)


class Read(Settings):
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
    hits = validate(TOOLS[name], Loaded(sent)).hits(index)
    return {"hits": [row_of(hit, left_out) for hit in hits]}


def row_of(hit: Hit, left_out: Collection[str]) -> JSONObject:
    """Return the fields of a passage that it has, but for those left out."""
    fields = hit._asdict().items()
    return {name: value for name, value in fields if value is not None and name not in left_out}


def open_model(settings: ServeSettings) -> Mapping[str, Call]:
    """Open a model. `predict` takes an object of the JSON lines that `bert predict` reads, and returns its row."""
    with quiet_imports():
        from bert_cli.tasks.use.model import Model
    engine = settings.engine if "engine" in settings.model_fields_set else None
    model = Model(settings.path, engine, settings.none_below)

    def predict(sent: JSONObject) -> object:
        try:
            item = model.check(sent)
        except DataError as mistake:
            raise ConfigError(*mistake.args) from None
        return model.predict([item])[0]

    about = {"task": model.task, "name": Path(settings.path).name}
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
        return facts

    return {"about": about, **{name: partial(find, name, index, ("file",)) for name in TOOLS}}
