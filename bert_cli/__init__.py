"""`bert`: from a Wikipedia dump, or text of your own, to a pre-trained BERT."""

import os
from typing import TYPE_CHECKING, Literal

from bert_cli.errors import ConfigError

if TYPE_CHECKING:  # loads NumPy
    from bert_cli.data.search.index import Index
    from bert_cli.tasks.use.model import Model

__version__ = "1.0.0"


def load(
    name: str | os.PathLike[str], engine: Literal["tensorflow", "jax"] | None = None
) -> "Model":
    """Return a trained model that answers as `bert predict` does.

    The name is a run folder, a checkpoint, or a Hugging Face folder or name. All models of a process have the engine of
    the first; without it, NumPy or a graph of ONNX answers where it can. Raises one of the errors of `bert_cli.errors`,
    with the message of the command.
    """
    if engine not in ("tensorflow", "jax", None):
        raise ConfigError(f"engine ({engine})", "is not known", "use 'tensorflow' or 'jax'")
    os.environ.setdefault("KERAS_BACKEND", engine or "tensorflow")
    from bert_cli.processes import quiet_imports

    with quiet_imports():
        from bert_cli.tasks.use.model import Model
    return Model(os.path.expanduser(name), engine)


def open_index(path: "str | os.PathLike[str]") -> "Index":
    """Return an index of `bert search make`; `open_index(path).ask(question, top=10)` returns its best passages.

    Raises DataError, ConfigError or CheckpointError (of `bert_cli.errors`) for an index that cannot be asked.
    """
    from bert_cli.tasks.search import opened

    return opened.open_index(os.path.expanduser(path))
