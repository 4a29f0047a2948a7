"""An index with the model of its vectors; words alone rank without loading what reads a model."""

from pathlib import Path

from bert_cli.data.search import index
from bert_cli.data.search.index import TO_ITS_END, Half, Index
from bert_cli.errors import ConfigError, DataError
from bert_cli.processes import print_error


def open_index(path: str | Path, half: Half | None = None) -> Index:
    """Return an index with the model of its vectors, unless the half is words; `ask` of it ranks passages.

    Without vectors it ranks by words alone; a warning says so where only some are missing, or where not all of the text
    was read. Raises DataError for a file that is not an index or has no passages, ConfigError for vectors of another
    model, CheckpointError without the model.
    """
    opened = index.open_index(Path(path))
    if opened.is_empty:
        raise DataError(str(path), "has no passages", TO_ITS_END)
    if opened.fact("lacks_text"):
        problem = (
            "may lack some text, because the last `bert search make` did not finish or still runs"
        )
        print_error(f"warning: {path} {problem}; {TO_ITS_END}")
    name = opened.fact("model")
    if name is None or half == "words":
        return opened
    if not opened.has_vectors:
        problem = "lacks some vectors, and ranks by words alone"
        print_error(f"warning: {path} {problem}; {TO_ITS_END}")
        return opened
    from bert_cli.tasks.search.vectors import model_of  # three times what words alone load

    model = model_of(opened)
    assert model is not None
    opened.embed = model.of_questions
    opened.weights = model.weights
    if opened.fact("weights") != opened.weights:
        problem = f"has vectors of {name} before it was changed"
        raise ConfigError(
            str(path), problem, "run `bert search make` again, or `bert search ask` with --words"
        )
    return opened
