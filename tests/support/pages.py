"""Servers of pages, as processes and in threads, and a page in a browser."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import uvicorn
from support.bert import start_bert

from bert_cli.config.use import ServeSettings
from bert_cli.tasks.use import page as over_http
from bert_cli.tasks.use import requests


@contextmanager
def served(model: Path, *words: object, log: Path | None = None) -> Iterator[str]:
    """Start `bert serve` and yield its address; it must end with Ctrl-C without an error."""
    with open(log or os.devnull, "wb") as stderr:
        words = ("serve", model, "--port", 0, *words)
        with start_bert(*words, stdout=subprocess.PIPE, stderr=stderr) as process:
            assert process.stdout is not None
            try:
                line = process.stdout.readline()
                assert line.startswith("open http://"), line
                yield line.split()[1]
            finally:
                process.send_signal(signal.SIGINT)
                code = process.wait()
    assert code == 0


@contextmanager
def in_a_thread(path: Path, **settings: object) -> Iterator[str]:
    """Serve a model or an index in a thread of this process, and yield its address."""
    opening = requests.open_index if path.is_file() else requests.open_model
    app = over_http.build_app(opening(ServeSettings(path=str(path), **settings)), None)
    # Its logging would close the stream of another library's, which is that of pytest.
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, ws="none"))
    with over_http.listen(None, 0) as listener:
        thread = Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join()


def open_page(page, address: str) -> None:
    """Open a page and wait until its first field has the focus."""
    page.goto(address)
    page.locator("#form :focus").wait_for()
