"""A small step for the tests of shards: it upper-cases files. As a program it does so in another process."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from support.bert import PYTHONPATH

from bert_cli.data.io.manifest import Shard, Stats, Step
from bert_cli.data.workers.runner import Workers, run_shards
from bert_cli.errors import BertError


def make_inputs(folder: Path, count: int = 4) -> list[Shard]:
    """Write `count` files of 350 letters or more, and return a shard for each."""
    source = folder / "in"
    source.mkdir(exist_ok=True)
    for number in range(count):
        (source / f"{number:02}").write_text(f"text {number} " * 50)
    return shards_of(source)


def shards_of(source: Path) -> list[Shard]:
    return [
        Shard((path,), Path("AA") / path.name, size=path.stat().st_size)
        for path in sorted(source.iterdir())
    ]


def prepared_shards(folder: Path, out: Path) -> tuple[list[Shard], list[tuple[int, int]]]:
    """Return 12 shards of prepared inputs, and the number of each and those in progress at its preparation."""
    source, prepared = folder / "source", list[tuple[int, int]]()
    source.write_text("dump")

    def prepare(work: Path, number: int) -> tuple[Path, ...]:
        (work / "chunk").write_text(f"chunk {number}")
        prepared.append((number, len(list((out / ".partial").iterdir()))))
        return (work / "chunk",)

    parts = [partial(prepare, number=number) for number in range(12)]
    shards = [Shard((source,), Path(f"{n:02}"), prepare=part) for n, part in enumerate(parts)]
    return shards, prepared


def shout(inputs: tuple[Path, ...], output: Path, pause: float = 0.0) -> Stats:
    """Write the upper-cased text in two halves, and a second file; a text with DIE kills the process."""
    text = inputs[0].read_text()
    with output.open("w") as file:
        file.write(text[: len(text) // 2].upper())
        file.flush()
        output.with_suffix(".index").write_text("0 5\n")
        time.sleep(pause)
        if "DIE" in text:
            os.kill(os.getpid(), signal.SIGKILL)
        file.write(text[len(text) // 2 :].upper())
    return Stats(documents=1, extra={"letters": len(text)})


def tree(out: Path) -> dict[str, bytes]:
    """Return the content of every output file of a step."""
    paths = ((path, path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    return {
        str(name): path.read_bytes()
        for path, name in paths
        if not name.parts[0].startswith(".") and name.name != "manifest.json"
    }


def start_shout(folder: Path, workers: Path | int, pause: float) -> "subprocess.Popen[str]":
    """Upper-case `folder/in` in so many processes or with a scheduler, with a pause in each shard."""
    # A background job of a shell ignores Ctrl-C, and so would its children.
    words = ["env", "--default-signal=INT", sys.executable, "-m", "support.shards"]
    words += [str(workers), str(pause)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(words, **pipes, text=True, cwd=folder, env=os.environ | PYTHONPATH)


if __name__ == "__main__":
    where, convert = sys.argv[1], partial(shout, pause=float(sys.argv[2]))
    workers = Workers(int(where)) if where.isdigit() else Workers(scheduler=where)
    try:
        run_shards(Step("shout", Path("out")), shards_of(Path("in")), convert, workers)
    except BertError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
