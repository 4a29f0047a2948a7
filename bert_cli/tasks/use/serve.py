"""`bert serve`: a page on which to search an index or try a model, the same as JSON, and an index for agents."""

from contextlib import suppress
from functools import partial
from pathlib import Path

from bert_cli.config.use import ServeSettings
from bert_cli.errors import ConfigError
from bert_cli.processes import answer_lines
from bert_cli.tasks.search import opened
from bert_cli.tasks.use import mcp
from bert_cli.tasks.use.requests import open_index, open_model


def run(settings: ServeSettings) -> None:
    """Answer until Ctrl-C or, with `mcp`, the end of standard input.

    Raises ConfigError if the port is taken, CheckpointError without a model, DataError for a file that is no index.
    """
    # A model is a folder, a prefix of files, or a name.
    is_index = Path(settings.path).is_file()
    if is_index and settings.none_below is not None:
        raise ConfigError("none_below", "has no effect on an index", "leave it out")
    with suppress(KeyboardInterrupt):
        if settings.mcp:
            answer_lines(partial(mcp.answer_of, opened.open_index(settings.path)))
            return
        from bert_cli.tasks.use import page  # the extra `serve`

        opening = open_index if is_index else open_model
        page.run(settings.host, settings.port, partial(opening, settings))
