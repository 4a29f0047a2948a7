"""A small step for the tests of shards: it upper-cases files."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

from support.bert import ROOT

from bert_cli.data.shards.manifest import Shard, Stats

# Upper-cases files slowly; an input with DIE kills its worker.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from bert_cli.data.shards.manifest import Shard, Stats, Step
from bert_cli.data.shards.runner import Workers, run_shards
from bert_cli.errors import BertError

def convert(inputs, output):
    text = inputs[0].read_text()
    with open(output, "w") as file:
        file.write(text[: len(text) // 2].upper())
        file.flush()
        (output.parent / (output.name + ".index")).write_text("1")
        time.sleep(PAUSE)
        if "DIE" in text:
            os.kill(os.getpid(), signal.SIGKILL)
        file.write(text[len(text) // 2 :].upper())
    return Stats(documents=1)

if __name__ == "__main__":
    shards = [Shard((path,), Path("AA") / path.name) for path in sorted(Path("in").iterdir())]
    try:
        run_shards(Step("shout", Path("out")), shards, convert, Workers(WORKERS))
    except BertError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
"""


def make_inputs(folder: Path, count: int = 4) -> list[Shard]:
    """Write `count` files of 350 letters or more, and return a shard for each."""
    source = folder / "in"
    source.mkdir(exist_ok=True)
    for number in range(count):
        (source / f"{number:02}").write_text(f"text {number} " * 50)
    return [Shard((path,), Path("AA") / path.name) for path in sorted(source.iterdir())]


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


def shout(inputs: tuple[Path, ...], output: Path) -> Stats:
    """Write the upper-cased text, and a second file."""
    text = inputs[0].read_text()
    output.with_suffix(".index").write_text("0 5\n")
    output.write_text(text.upper())
    return Stats(documents=1, extra={"letters": len(text)})


def tree(out: Path) -> dict[str, bytes]:
    """Return the content of every output file of a step."""
    paths = ((path, path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    return {
        str(name): path.read_bytes()
        for path, name in paths
        if not name.parts[0].startswith(".") and name.name != "manifest.json"
    }


def start_shout(folder: Path, workers: str, pause: float) -> "subprocess.Popen[str]":
    """Start the script on `folder/in`, with these arguments of Workers and a pause in each shard."""
    (folder / "script.py").write_text(
        SCRIPT.replace("WORKERS", workers).replace("PAUSE", f"{pause}")
    )
    return subprocess.Popen(
        [sys.executable, "script.py"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        # A background job of a shell ignores Ctrl-C, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
