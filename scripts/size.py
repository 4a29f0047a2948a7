#!/usr/bin/env python3
"""Print the size of the package and of the tests, and fail above the bounds of `pyproject.toml`.

Lines can be saved by denser lines, so the package is also bounded in syntax nodes: expressions and
statements. Nodes per code line show how dense the lines are. `scripts/check` runs it.
"""

import ast
import itertools
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Size(NamedTuple):
    """Counts over some Python files."""

    files: int = 0
    lines: int = 0
    code_lines: int = 0
    """Lines that are neither blank nor comments nor part of a docstring or an import."""
    comment_lines: int = 0
    nodes: int = 0

    def __str__(self) -> str:
        per_line = self.nodes / max(self.code_lines, 1)
        comments = self.comment_lines / max(self.lines, 1)
        return (
            f"{self.files} files, {self.lines:,} lines, {self.code_lines:,} code lines, "
            f"{self.nodes:,} nodes ({per_line:.2f} per code line), {comments:.1%} comments"
        )


def python_files(folder: Path) -> list[Path]:
    """Return the Python files below a folder."""
    return sorted(folder.rglob("*.py"))


def is_silent(node: ast.AST) -> bool:
    """Return whether a statement is a docstring or an import, whose lines are no code lines."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return isinstance(node.value.value, str)
    return isinstance(node, ast.Import | ast.ImportFrom)


def size_of_source(source: str) -> Size:
    """Return the size of a file's text."""
    nodes = 0
    silent: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.expr | ast.stmt):
            nodes += 1
            if is_silent(node):
                silent.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code_lines = comment_lines = 0
    lines = source.splitlines()
    for number, line in enumerate(lines, start=1):
        if line.lstrip().startswith("#"):
            comment_lines += 1
        elif line.strip() and number not in silent:
            code_lines += 1
    return Size(1, len(lines), code_lines, comment_lines, nodes)


def size_of_folder(folder: Path) -> Size:
    """Return the sums over the Python files below a folder."""
    sizes = [size_of_source(path.read_text(encoding="utf-8")) for path in python_files(folder)]
    return Size(*map(sum, zip(*sizes, strict=True))) if sizes else Size()


def imported_files(path: Path, package: Path) -> Iterator[Path]:
    """Yield the files of the package that a file imports, also those that only types need."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            for module in (node.module, *(f"{node.module}.{name.name}" for name in node.names)):
                file = package.parent.joinpath(*module.split(".")).with_suffix(".py")
                if file.is_relative_to(package) and file.is_file():
                    yield file


def folder_circles(package: Path) -> list[str]:
    """Return the pairs of folders of a package that import each other.

    A folder and one inside it are not counted, nor are the files on the top level.
    """
    imports: set[tuple[Path, Path]] = set()
    for path in python_files(package):
        for imported in imported_files(path, package):
            imports.add((path.parent, imported.parent))
    folders = sorted({folder for pair in imports for folder in pair} - {package})
    circles = []
    for one, other in itertools.combinations(folders, 2):
        is_inside = one.is_relative_to(other) or other.is_relative_to(one)
        if (one, other) in imports and (other, one) in imports and not is_inside:
            names = [folder.relative_to(package).as_posix() for folder in (one, other)]
            circles.append(" <-> ".join(names))
    return circles


def exceeded(package: Size, tests: Size, bounds: dict[str, int]) -> list[str]:
    """Return a message for each number that is above its bound."""
    numbers = {
        "package-lines": package.lines,
        "package-nodes": package.nodes,
        "test-lines": tests.lines,
    }
    return [
        f"{name} is {number:,}, above the bound {bounds[name]:,} in [tool.bert.size] of "
        "pyproject.toml: make something simpler"
        for name, number in numbers.items()
        if number > bounds[name]
    ]


def main() -> int:
    """Print the numbers; return 1 if one is above its bound or two folders import each other."""
    package, tests = size_of_folder(ROOT / "bert_cli"), size_of_folder(ROOT / "tests")
    print(f"bert_cli: {package}")
    print(f"tests: {tests}")
    circles = folder_circles(ROOT / "bert_cli")
    print(f"folders that import each other: {', '.join(circles) or 'none'}")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    problems = exceeded(package, tests, settings["tool"]["bert"]["size"])
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems or circles else 0


if __name__ == "__main__":
    sys.exit(main())
