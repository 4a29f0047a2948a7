"""Which tests execute which lines: made by one run of the tests, moved along when lines move.

The map is a file outside the repository. It has the text of the package that it was made of, so that a later tree
finds its unchanged lines in it; a changed line has the tests of its neighbours.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from difflib import SequenceMatcher
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from contexts import OUTCOME

PLUGIN = "faults_contexts"
"""The name of contexts.py in the copy, which every process that a test starts can import from."""
CONFIG = """
[run]
source = {tree}/bert_cli
data_file = {folder}/data
parallel = true
patch = subprocess, _exit
sigterm = true
plugins = faults_contexts
"""


def copy_of_tree(root: Path, folder: Path) -> Path:
    """Copy the files that git knows; a run in the copy sees no later change of the working tree."""
    tree = folder / "tree"
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=root, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (root / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, tree / name)
    shutil.copy2(Path(__file__).with_name("contexts.py"), tree / f"{PLUGIN}.py")
    (tree / ".venv").symlink_to(Path(sys.prefix))
    return tree


def environment(root: Path, tree: Path) -> dict[str, str]:
    """Return the environment of a run of tests in a copy of the tree."""
    data = root.parent / "shared" / "data"
    paths = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    return {"BERT_SHARED_DATA": str(data)} | dict(os.environ) | paths


class LineTests:
    """Tests by file and line, with the seconds that they take."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seconds: dict[str, float] = {}
        self.tests: dict[str, dict[int, set[str]]] = {}
        self.sources: dict[str, str] = {}
        if path.exists():
            known = json.loads(path.read_text(encoding="utf-8"))
            self.seconds, self.sources = known["seconds"], known["sources"]
            names = list(self.seconds)
            for file, lines in known["tests"].items():
                self.tests[file] = {
                    int(n): {names[i] for i in numbers} for n, numbers in lines.items()
                }

    def save(self) -> None:
        """Write the map."""
        number = {name: index for index, name in enumerate(self.seconds)}
        tests = {
            file: {n: sorted(number[name] for name in names) for n, names in lines.items()}
            for file, lines in self.tests.items()
        }
        content = {"seconds": self.seconds, "sources": self.sources, "tests": tests}
        self.path.write_text(json.dumps(content), encoding="utf-8")

    def move_to(self, tree: Path) -> None:
        """Move the lines to where they stand in a tree."""
        for path in sorted((tree / "bert_cli").rglob("*.py")):
            file, text = str(path.relative_to(tree)), path.read_text(encoding="utf-8")
            before, after = self.sources.get(file, "").splitlines(), text.splitlines()
            lines, moved = self.tests.get(file, {}), dict[int, set[str]]()
            if before != after:
                for a, b, size in SequenceMatcher(
                    None, before, after, autojunk=False
                ).get_matching_blocks():
                    moved |= {b + i: lines[a + i] for i in range(1, size + 1) if a + i in lines}
                self.tests[file] = moved
            self.sources[file] = text

    def tests_with_word(self, word: str) -> set[str]:
        """Return the tests that execute a line inside a function which has the word."""
        pattern = re.compile(rf"^\s.*\b{re.escape(word)}\b")
        names: set[str] = set()
        for file, text in self.sources.items():
            lines = self.tests.get(file, {})
            for number, line in enumerate(text.splitlines(), start=1):
                if number in lines and pattern.search(line):
                    names |= lines[number]
        return names

    def measure(self, root: Path, words: list[str]) -> int:
        """Run tests in a copy of the tree and add what they execute; return the exit code of pytest."""
        with TemporaryDirectory(prefix="faults_") as name:
            folder = Path(name)
            tree = copy_of_tree(root, folder)
            config = folder / "coveragerc"
            config.write_text(CONFIG.format(tree=tree, folder=folder), encoding="utf-8")
            variables = {
                "COVERAGE_PROCESS_START": str(config),
                OUTCOME: str(folder / "outcome.json"),
            }
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                PLUGIN,
                "--timeout",
                "1200",
            ]
            done = subprocess.run(
                [*command, *words], cwd=tree, env=environment(root, tree) | variables
            )
            outcome = folder / "outcome.json"
            if not outcome.is_file():
                print(
                    f"pytest ended with {done.returncode} before it wrote what it ran",
                    file=sys.stderr,
                )
                return done.returncode or 1
            self.move_to(tree)
            seconds = json.loads(outcome.read_text(encoding="utf-8"))["seconds"]
            for lines in self.tests.values():
                for names in lines.values():
                    names.difference_update(seconds)
            self.seconds |= seconds
            self.add(folder, tree)
        self.save()
        return done.returncode

    def add(self, folder: Path, tree: Path) -> None:
        """Add what the processes wrote."""
        from coverage import CoverageData

        for part in folder.glob("data.*"):
            data: Any = CoverageData(basename=str(part))
            data.read()
            for path in data.measured_files():
                file = str(Path(path).relative_to(tree))
                lines = self.tests.setdefault(file, defaultdict(set))
                for line, contexts in data.contexts_by_lineno(path).items():
                    names = {context.split("|")[-1] for context in contexts} & self.seconds.keys()
                    lines.setdefault(line, set()).update(names)
