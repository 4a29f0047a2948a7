#!/usr/bin/env python3
"""Put faults of one line into the code, and report which of them the daily tests see.

    .venv/bin/python scripts/faults map -n 2                # once: which tests execute which lines; words go to pytest
    .venv/bin/python scripts/faults map tests/data/io       # after a change: these tests again
    .venv/bin/python scripts/faults run --seed 1 --count 100

Each fault is put into a copy of the working tree. The tests that execute its line run there, the fastest first, until
a test fails. A survivor is printed with its old and new lines: a person judges whether a user could see it.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import NamedTuple

from contexts import CHOSEN, OUTCOME
from kinds import Fault, sample
from tests_of_lines import PLUGIN, LineTests, copy_of_tree, environment

ROOT = Path(__file__).resolve().parents[2]


class Result(NamedTuple):
    """What the tests said about a fault."""

    fault: Fault
    verdict: str
    """`caught`, `survived`, or `not executed` by a test."""
    test: str
    """The test that failed, or what fails without the fault, too."""
    tests: int
    left_out: int
    """Tests that execute the line, too, and for which the time did not suffice."""
    seconds: float


class Bench:
    """A process that has imported the large packages, and forks a child for every run of tests."""

    def __init__(self, tree: Path, lines: LineTests, cap: float) -> None:
        import sqlite3  # before TensorFlow, whose own SQLite has no FTS5

        import jax
        import keras
        import pytest
        import tensorflow
        import torch

        self.imported = sqlite3, jax, keras, pytest, tensorflow, torch
        self.tree, self.lines, self.cap = tree, lines, cap
        self.reliable: set[str] = set()
        os.environ.update(environment(ROOT, tree))

    def failure(self, tests: list[str], words: Iterable[str] = ()) -> str:
        """Run tests until one fails; return its name, a signal's or none."""
        chosen, outcome = self.tree.parent / "chosen.json", self.tree.parent / "outcome.json"
        chosen.write_text(json.dumps(tests), encoding="utf-8")
        outcome.unlink(missing_ok=True)
        files = dict.fromkeys(test.partition("::")[0] for test in tests)
        pid = os.fork()
        if pid == 0:
            self.run_in_child(chosen, outcome, [*files, *words])
        deadline = time.monotonic() + 3 * self.cap + 60
        ended = 0
        while ended == 0 and time.monotonic() < deadline:
            time.sleep(0.05)
            ended, _ = os.waitpid(pid, os.WNOHANG)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
            time.sleep(0.1)
        if ended == 0:
            os.waitpid(pid, 0)
        if not outcome.exists():
            return "the process ended or hung"
        return next(iter(json.loads(outcome.read_text(encoding="utf-8"))["failed"]), "")

    def run_in_child(self, chosen: Path, outcome: Path, words: list[str]) -> None:
        """Run pytest in the copy of the tree; the output goes into a file."""
        os.setsid()
        os.chdir(self.tree)
        output = os.open(self.tree.parent / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ |= {CHOSEN: str(chosen), OUTCOME: str(outcome)}
        sys.path[0] = str(self.tree)
        options = ["-q", "-x", "-p", PLUGIN, f"--timeout={self.cap + 30:.0f}"]
        try:
            import pytest

            os._exit(pytest.main([*options, *words]))
        finally:
            os._exit(70)

    def tests_of(self, fault: Fault) -> tuple[list[str], int]:
        """Return the tests that execute the lines of a fault, the fastest that fit in the time, and how many do not."""
        lines = self.lines.tests.get(fault.file, {})
        names = set[str]().union(*(lines.get(n, ()) for n in range(fault.line, fault.last + 1)))
        first, last = fault.function
        if fault.kind == "wrong default" and ".get(" not in fault.old:
            names = set[str]().union(*(lines.get(n, ()) for n in range(first + 1, last + 1)))
        if first == 1:
            word = fault.old.strip().split(":")[0].split(" ")[0].strip("\"'")
            names |= self.lines.tests_with_word(word)
        if not names:  # a child that was killed or has another environment is not in the map
            file = Path(fault.file).relative_to("bert_cli")
            prefix = f"tests/{file.parent}/" if file.parent.name else f"tests/test_{file}"
            names = {name for name in self.lines.seconds if name.startswith(prefix)}
        chosen: list[str] = []
        left = self.cap
        for name in sorted(names, key=self.lines.seconds.__getitem__):
            left -= self.lines.seconds[name]
            if left < 0 and chosen:
                break
            chosen.append(name)
        files = list(dict.fromkeys(name.partition("::")[0] for name in chosen))
        in_files = sorted(chosen, key=lambda name: files.index(name.partition("::")[0]))
        return in_files, len(names) - len(chosen)

    def judge(self, fault: Fault, slow: bool) -> Result:
        """Put the fault in, run its tests, take it out."""
        path, began = self.tree / fault.file, time.monotonic()
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines(keepends=True)
        changed = [*lines[: fault.line - 1], fault.new, *lines[fault.last :]]
        tests, left_out = self.tests_of(fault)
        words: list[str] = []
        if not tests and slow:
            folder = self.tree / "tests" / Path(fault.file).parent.relative_to("bert_cli")
            tests = [str(file.relative_to(self.tree)) for file in sorted(folder.rglob("test_*.py"))]
            words = ["--slow", "-m", "slow"]
        failed = ""
        note = ""
        while tests:
            path.write_text("".join(changed), encoding="utf-8")
            failed = self.failure(tests, words)
            path.write_text(text, encoding="utf-8")
            if not failed or failed in self.reliable:
                break
            without_fault = self.failure([failed] if failed in tests else tests, words)
            if not without_fault:
                self.reliable.add(failed)
                break
            failed = ""
            if without_fault not in tests:
                note = f"also without the fault: {without_fault}"
                break
            tests.remove(without_fault)
        executed = self.lines.tests.get(fault.file, {}).get(fault.line)
        verdict = "caught" if failed else "survived" if executed else "not executed"
        seconds = time.monotonic() - began
        return Result(fault, verdict, failed or note, len(tests), left_out, seconds)


def print_table(results: list[Result], title: str, names: list[str]) -> None:
    """Print caught, survived and not executed by name."""
    verdicts = Counter((name, result.verdict) for name, result in zip(names, results, strict=True))
    print(f"\n{title:<24} faults  caught  survived  not executed")
    for name in [*sorted(set(names)), "all"]:
        counts = [
            sum(
                count
                for (of, verdict), count in verdicts.items()
                if name in (of, "all") and verdict == wanted
            )
            for wanted in ("caught", "survived", "not executed")
        ]
        print(f"{name:<24} {sum(counts):>6}  {counts[0]:>6}  {counts[1]:>8}  {counts[2]:>12}")


def run(options: argparse.Namespace) -> int:
    """Judge a sample of faults."""
    results: list[Result] = []
    with TemporaryDirectory(prefix="faults_") as name:
        tree = copy_of_tree(ROOT, Path(name))
        lines = LineTests(options.map)
        lines.move_to(tree)
        faults = sample(tree, options.under, options.seed, options.count)
        bench = Bench(tree, lines, options.cap)
        for number, fault in enumerate(faults, start=1):
            if options.only and not any(
                f"{fault.file}:{fault.line}".startswith(part) for part in options.only
            ):
                continue
            result = bench.judge(fault, options.slow)
            results.append(result)
            missed = result.verdict != "caught" and result.left_out
            longer = f" ({result.left_out} longer ones left out)" if missed else ""
            print(
                f"{number:>4} {result.verdict:<12} {fault.kind:<16} {fault.file}:{fault.line}"
                f"  {result.tests} tests{longer}, {result.seconds:.0f} s  {result.test}",
                flush=True,
            )
            if result.verdict != "caught":
                for sign, text in (("-", fault.old), ("+", fault.new)):
                    print(
                        "".join(f"     {sign} {line}\n" for line in text.rstrip().splitlines()),
                        end="",
                        flush=True,
                    )
    print_table(results, "kind", [result.fault.kind for result in results])
    print_table(results, "area", [result.fault.area for result in results])
    return 0


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--map", type=Path, default=Path(gettempdir(), "faults_map.json"))
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("map", help="run tests, and add to the map what they execute")
    command = commands.add_parser("run", help="put faults in")
    command.add_argument("--seed", type=int, default=1)
    command.add_argument("--count", type=int, default=100)
    command.add_argument(
        "--only", nargs="+", metavar="FILE", help="of the sample only faults in these"
    )
    command.add_argument("--cap", type=float, default=60.0, help="seconds of tests for a fault")
    command.add_argument(
        "--slow", action="store_true", help="slow tests of the folder where no daily test is"
    )
    command.add_argument(
        "--under",
        nargs="+",
        default=["data", "tasks", "parallel", "train"],
        metavar="PATH",
        help="folders and files of the package, as data or files.py",
    )
    options, words = parser.parse_known_args()
    if options.command == "map":
        return LineTests(options.map).measure(ROOT, words)
    if words:
        parser.error(f"unknown: {' '.join(words)}")
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
