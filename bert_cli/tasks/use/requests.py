"""What `bert serve` answers about a model or an index, over HTTP and by the Model Context Protocol."""

from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import Field

from bert_cli.config.use import ServeSettings
from bert_cli.data.search import words
from bert_cli.data.search.index import Half
from bert_cli.files import JSONObject
from bert_cli.parse.load import Loaded, validate
from bert_cli.processes import quiet_imports
from bert_cli.settings.settings import Settings
from bert_cli.tasks.search import opened

Call = Callable[[JSONObject], Callable[[], object]]
"""Checks the JSON of a request and returns the function that answers it. Raises BertError for a wrong request."""


class Question(Settings):
    """The request `search`. Without a question it is refused, as one without a word."""

    question: str = ""
    """A question, or words; a "phrase" as it stands, and no passages with a -word."""
    top: int = Field(10, ge=1, le=100)
    """Number of passages."""
    half: Half | None = None
    """Rank by words or by meaning alone."""
    folder: str = ""
    """Folder of the documents, as it stands in their names; by default all."""


class Place(Settings):
    """The request `document`."""

    passage: int = Field(0, ge=1, validate_default=True)
    """Number of a passage."""


def open_model(settings: ServeSettings) -> tuple[JSONObject, Mapping[str, Call]]:
    """Open a model. `predict` takes an object of the JSON lines that `bert predict` reads, and returns its row."""
    with quiet_imports():
        from bert_cli.tasks.use.model import Model
    engine = settings.engine if "engine" in settings.model_fields_set else None
    model = Model(settings.path, engine, settings.none_below)

    def predict(sent: JSONObject) -> Callable[[], object]:
        item = model.check(sent)
        return lambda: model.predict([item])[0]

    return {"task": model.task, "name": Path(settings.path).name}, {"predict": predict}


def open_index(settings: ServeSettings) -> tuple[JSONObject, Mapping[str, Call]]:
    """Open an index. `search` returns passages that answer a question, `document` the passages around one."""
    index = opened.open_index(settings.path)
    about: JSONObject = {"task": "search", "name": Path(settings.path).name}
    about["has_meaning"] = index.embed is not None
    about |= {name: index.count(name) for name in ("passages", "documents")}
    about["folders"] = index.folders()

    def search(sent: JSONObject) -> Callable[[], object]:
        asked = validate(Question, Loaded(sent))
        words.parse(asked.question)

        def answer() -> object:
            hits = index.ask(asked.question, asked.top, asked.half, asked.folder)
            rows = [hit._asdict() for hit in hits]
            return {"hits": [{n: v for n, v in row.items() if n != "file"} for row in rows]}

        return answer

    def document(sent: JSONObject) -> Callable[[], object]:
        passage = validate(Place, Loaded(sent)).passage
        return lambda: {"passages": [hit.text for hit in index.document(passage)]}

    return about, {"search": search, "document": document}
