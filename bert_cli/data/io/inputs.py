"""The input of a step: which files it reads, and what it knows of them before it reads them.

Hidden files and folders belong to programs and are not read, a file with several links is read once, and an output
folder must not be among the files that are searched.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from glob import glob
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from bert_cli.data.io.documents import marked_lines, recognise_lines, sample_of
from bert_cli.data.io.files import DOCUMENTS, Part, Reading, format_by_name, recognise
from bert_cli.data.io.manifest import DONE, Manifest, read_manifest
from bert_cli.data.io.wrapping import CUT, MISSING, NUMBERED, TWO_COLUMNS
from bert_cli.errors import ConfigError, DataError, logger
from bert_cli.files import is_utf8, report_failure
from bert_cli.text import count

NAMED = 3  # files that were left out
GLOB = re.compile(r"[*?\[]")
TABLE = {"json-lines", "csv", "tsv", "parquet"}
# Setting -> the formats that it applies to.
APPLIES = {"text_field": TABLE, "documents": {"plain"}, "line_breaks": {"plain", "pdf", *TABLE}}
CURES = {
    NUMBERED: "they stay in the text, and no lines are joined; if they are no part of it, remove them, as with "
    "sed -E 's/^ *[0-9]+//'",
    TWO_COLUMNS: "columns are not joined; extract the text again, as with pdftotext without -layout",
    CUT: "no right margin was found, and no lines are joined; `bert preprocess --line-breaks join` joins them",
    MISSING: "if these are pictures, recognise their text first, as with `ocrmypdf --skip-text IN.pdf OUT.pdf`",
}
KEEP_LINES = "to keep the lines, use the output of `bert preprocess --line-breaks keep`"
# Read before the work to estimate the documents per file.
SAMPLED_FILES = 16
SAMPLED_BYTES = 1 << 18
MANY_DOCUMENTS = 4  # per file of plain text: they may be paragraphs


class Sentences(NamedTuple):
    """Files of one sentence on each line, a blank line between documents; none of them is empty."""

    parts: list[Part]
    notes: list[str]
    """For the manifest."""
    documents: dict[Path, int]
    """The number of documents of each file, where the step that made it says it."""


class LeftOut:
    """Files that cannot be read as text; one that a person has named stops the command, with `strict` every one."""

    def __init__(self, command: str, named: Collection[Path], strict: bool) -> None:
        self._command = command
        self._named = {path.resolve() for path in named}
        self.strict = strict
        self.problems: dict[Path, DataError] = {}

    @contextmanager
    def unless_text(self, path: Path) -> Iterator[None]:
        """Leave a file out if the block raises DataError, or an error of the system."""
        try:
            with report_failure(str(path), "read", "check its permissions, or move it away"):
                yield
        except DataError as error:
            if self.strict or path.resolve() in self._named:
                raise
            self.problems[path] = error

    def report(self) -> None:
        """Print how many files were left out, and the first ones: texts and documents, which a person can mend."""
        ranks: dict[str | None, int] = {"plain": 0, **dict.fromkeys(DOCUMENTS, 1)}
        paths = sorted(self.problems, key=lambda path: ranks.get(format_by_name(path), 2))
        # A .json is rather a file of settings than one of texts in a field of another name.
        lines: list[str] = []
        for path in paths[:NAMED]:
            error = self.problems[path]
            if path.suffix == ".json":
                lines.append(f"{error.where}: {error.problem}")
            else:
                lines.append(str(error))
        suffixes = Counter(path.suffix or "without a suffix" for path in paths[NAMED:])
        if suffixes:
            counts = ", ".join(f"{number:,} {suffix}" for suffix, number in suffixes.most_common())
            lines.append(f"and {suffixes.total():,} more: {counts}")
        if lines:
            what = f"{count(len(paths), 'file')} that cannot be read as text"
            logger.warning("\n  ".join([f"{self._command}: warning: left out {what}:", *lines]))


def open_sentences(source: Path, out: Path, left_out: LeftOut | None = None) -> Sentences:
    """Find the files of sentences of an input, with `left_out` also documents. Raises DataError for another format."""
    manifest = read_manifest(source)
    refuse_output_inside(source, out, manifest)
    # What `bert preprocess` wrote may begin like JSON.
    text_format = "plain" if manifest.get("step") == "preprocess" else "auto"
    reading = Reading(text_format)
    parts, notes = recognise_all(source, reading, manifest, left_out)
    for part in parts:
        kind = part.compression or part.format
        if kind != "plain" and not (left_out and part.format in DOCUMENTS):
            problem = f"is {kind}, not plain text with one sentence on each line"
            remedy = "run `bert preprocess` on it"
            if part.compression:
                remedy = "unpack it"
            raise DataError(str(part.path), problem, f"{remedy} first")
    shards = manifest.get("shards", [])
    documents = {source / shard["output"]: shard.get("documents", 0) for shard in shards}
    return Sentences(parts, notes, documents)


def open_text(
    command: str,
    source: Path,
    out: Path,
    reading: Reading,
    names: Collection[str],
    *,
    strict: bool,
    remedy: str = KEEP_LINES,
) -> tuple[list[Part], list[str]]:
    """Return all files of an input, none of them empty, and notes for the manifest; log what a person should know.

    `names` are the settings that a person set; `remedy` says how to keep lines that are joined.
    """
    manifest = read_manifest(source)
    refuse_output_inside(source, out, manifest)
    left_out = LeftOut(command, [source], strict)
    parts, notes = recognise_all(source, reading, manifest, left_out)
    parts = recognise_lines(parts, reading)
    refuse_without_effect(parts, names)
    report_joined_lines(command, parts, reading, remedy)
    if "documents" not in names:
        _suggest_files_as_documents(command, parts, reading)
    return parts, notes


def refuse_without_effect(parts: Sequence[Part], names: Collection[str]) -> None:
    """Raise ConfigError for a setting in `names` that applies to none of these files."""
    formats = {part.format for part in parts}
    for name in sorted(APPLIES.keys() & names):
        if not APPLIES[name] & formats:
            raise ConfigError(
                f"--{name.replace('_', '-')}",
                f"has no effect, the input is {', '.join(sorted(formats))}",
                "leave it out, or pass the format of the files as --input-format",
            )


def report_joined_lines(
    command: str,
    parts: Sequence[Part],
    reading: Reading,
    remedy: str = KEEP_LINES,
) -> None:
    """Log how many files have hard line breaks, and how to keep them; warn of lines that cannot be joined."""
    of_all = f"of {len(parts):,} files"
    for fault, cure in CURES.items():
        faulty = [part for part in parts if part.fault.startswith(fault)]
        if faulty:
            first = faulty[0]
            what = f"the lines of {len(faulty):,} {of_all}, as {first.path}, {first.fault}"
            logger.warning(f"{command}: warning: {what}; {cure}")
    wrapped = [part for part in parts if part.margins is not None and part.format != "pdf"]
    if not wrapped:
        return
    ends = "each text is one document"
    if any(part.format == "plain" for part in wrapped):
        ends = "each file is one document"
        if reading.documents != "files":
            ends = f"a blank line still ends a document; add --documents files if {ends}"
    logger.info(
        f"{command}: joined the wrapped lines of {len(wrapped):,} {of_all}, as {wrapped[0].path} ({ends}; {remedy})"
    )


def _suggest_files_as_documents(command: str, parts: Sequence[Part], reading: Reading) -> None:
    """Log a line if the paragraphs of plain files may be taken for documents."""
    is_plain = reading.documents == "blank-lines" and all(part.format == "plain" for part in parts)
    if not is_plain or len(parts) < 2:
        return
    every = math.ceil(len(parts) / SAMPLED_FILES)
    sample = [replace(part, stop=SAMPLED_BYTES) for part in parts[::every]]
    lines = chain.from_iterable(marked_lines(piece, reading) for piece in sample)
    documents = sum(kind == "document" for kind, _ in lines)
    average = documents / len(sample)
    if average >= MANY_DOCUMENTS:
        logger.warning(
            f"{command}: warning: each of {len(parts):,} files becomes about {average:.0f} documents or more, because "
            "a blank line ends a document; if each file is one document, stop and add --documents files"
        )


def find_files(source: Path, manifest: Manifest, strict: bool = False) -> list[Path]:
    """Return a file, the files of a folder (of a step's folder, its outputs) or the matches of a pattern, in order.

    A link in a folder that is to no file is refused if `strict`.
    """
    where = f"input ({source})"
    if source.is_file():
        return [source]
    if not source.exists() and GLOB.search(str(source)):
        files = _each_once(map(Path, glob(str(source), recursive=True)))
        if not files:
            raise DataError(where, "no file matches", "check the pattern, and quote it")
        return files
    if manifest:
        files = [source / shard["output"] for shard in manifest.get("shards", [])]
    elif (source / DONE).exists():
        problem = "the step that writes it has not finished"
        raise DataError(where, problem, "run that step again; it continues")
    else:
        files = visible_files(source)
        for path in source.rglob("*"):
            if path.is_symlink() and not path.is_file() and not _is_hidden(path, source):
                problem = "is a link to a folder, or to nothing, and is not read"
                error = DataError(str(path), problem, "name what it links to, in its place")
                if strict:
                    raise error
                logger.warning(f"warning: {error}")
    if not files:
        if not source.exists():
            raise DataError(where, "does not exist", "check the path")
        raise DataError(where, "holds no files", "name a folder with text files")
    return files


def visible_files(folder: Path, pattern: str = "*") -> list[Path]:
    """Return the files below a folder, each once; hidden files and folders, at any depth, belong to programs."""
    return _each_once(path for path in folder.rglob(pattern) if not _is_hidden(path, folder))


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(name.startswith(".") for name in path.relative_to(folder).parts)


def _each_once(paths: Iterable[Path]) -> list[Path]:
    """Return the files of some paths in order, one with several links once: by its own name if that is among them."""
    files = sorted(_in_order(filter(Path.is_file, paths)), key=Path.is_symlink)
    return _in_order({path.resolve(): path for path in reversed(files)}.values())


def _in_order(paths: Iterable[Path]) -> list[Path]:
    """Return the sorted paths. Raises DataError for a name that is not UTF-8, which no manifest can hold."""
    ordered = sorted(paths)
    for path in ordered:
        if not is_utf8(path):
            raise DataError(ascii(str(path)), "has a name that is not UTF-8", "rename it")
    return ordered


def refuse_output_inside(source: Path, out: Path, manifest: Manifest) -> None:
    """Raise DataError for an output below a folder that is searched for text; one with a hidden name is not read."""
    if source.exists():
        is_searched = source.is_dir() and not manifest
    else:
        is_searched = "**" in source.parts
    folder = find_root(source)
    inner = out.resolve()
    root = folder.resolve()
    if is_searched and inner.is_relative_to(root) and not _is_hidden(inner, root):
        problem = f"is {folder} or inside it, where the next run would read its files as text"
        raise DataError(f"output ({out})", problem, "choose another place")


def find_root(source: Path) -> Path:
    """Return the folder that the names of output files are relative to."""
    return next(folder for folder in (source, *source.parents) if folder.is_dir())


def recognise_all(
    source: Path, reading: Reading, manifest: Manifest, left_out: LeftOut | None = None
) -> tuple[list[Part], list[str]]:
    """Return every file of the input that has text, and notes. Raises DataError for a file that cannot be left out."""
    left_out = left_out or LeftOut("", [], strict=True)
    paths = find_files(source, manifest, left_out.strict)
    files = recognise_each(paths, reading, left_out)
    left_out.report()
    empty = [path for path, part in files.items() if part is None]
    parts = list(filter(None, files.values()))
    if not parts:
        raise DataError(f"input ({source})", "has no file with text", "use files with text")
    notes = []
    if empty and not manifest:
        notes.append(f"{empty[0]}: is empty and left out; empty files: {len(empty)}")
    return parts, notes


def recognise_each(
    paths: Iterable[Path], reading: Reading, left_out: LeftOut
) -> dict[Path, Part | None]:
    """Return files with their formats, None for an empty file, without those that are left out."""
    files: dict[Path, Part | None] = {}
    for path in paths:
        with left_out.unless_text(path):
            part = recognise(path, reading)
            if part and reading.line_breaks != "keep":
                sample_of(part, reading)  # fails early
            files[path] = part
    return files
