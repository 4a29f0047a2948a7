"""A small step for the tests of shards: it upper-cases files."""

from functools import partial
from pathlib import Path

from bert_cli.data.shards.manifest import Shard, Stats


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
