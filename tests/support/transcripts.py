"""Sessions of commands with all that they print, as text.

A line of a transcript is a comment (`# `), a command (`$ `, continued by `> `), or indented output; `exit N` follows a
command that failed. `# Needs pyarrow.` skips it without that package. In stored output `…` stands for any text
within a line, such as a time, and a number with decimals may differ by 1 % or by one in its last digit. Everything else
is exact. `bert` runs in this process, and any other command in bash. After `bert`, a line may have `| FILTER`, such as
`head -3`, which gets what is printed, and then `< FILE`.
"""

import contextlib
import io
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bert_cli.cli import main

ANY = "…"
"""Any text within a line."""
WITHIN = 0.01
"""Of a number with decimals: losses differ with the instructions of a processor."""
ALL_DECIMALS = 6
"""So many or more are all that a float has: zeros at its end are not printed."""
DECIMAL = r"-?\d+\.\d+(?:e[+-]?\d+)?"
CLOCK = re.compile(
    r"\b(?:\d+ h \d\d min|\d+ min \d\d s|[\d.]+ m?s)\b"
    r"|\b[\d.]+ [kMGT]B(?: free|/s)\b"
    r"|\b[\d.,]+(?: to [\d.,]+)?(?= (?:examples|tokens|sequences|texts|passages|steps|inputs)/s)"
)
"""Times, speeds and free space, which a new transcript leaves open."""


def run_line(line: str, home: Path) -> str:
    """Return what a command prints, and its exit code if it is not 0."""
    if line.startswith("bert "):
        line, _, source = line.partition(" < ")
        words, _, shown = line.partition(" | ")
        printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
        with (
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
            pytest.MonkeyPatch.context() as patch,
            open(source.strip() or "/dev/null", encoding="utf-8") as stdin,
        ):
            patch.setattr("sys.stdin", stdin)
            try:
                code = main(shlex.split(words)[1:])
            except SystemExit as end:  # of a help
                code = int(end.code or 0)
        text = printed.buffer.getvalue().decode()
        if shown:
            text = in_bash(shown, text).stdout
    else:
        done = in_bash(line)
        text, code = done.stdout, done.returncode
    text = text.replace(str(home), "HOME")
    if text and not text.endswith("\n"):
        text += "\n"
    return text + (f"exit {code}\n" if code else "")


def in_bash(line: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", line],
        input=given, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip


def split_transcript(text: str) -> Iterator[tuple[str, str]]:
    """Yield each comment or command of a transcript, and the output below it."""
    for part in re.findall(
        r"^(?:# .*\n|\$ .*\n(?:>(?: .*)?\n)*)(?:(?![#$] ).*\n)*", text, re.MULTILINE
    ):
        found = re.match(r"(?:# .*\n|\$ .*\n(?:>(?: .*)?\n)*)", part)
        output = part[found.end() :]
        yield found[0], re.sub("^  ", "", output, flags=re.MULTILINE)


def is_same_line(printed: str, stored: str) -> bool:
    """Compare a printed line with a stored one, which may have open parts and numbers with decimals."""
    pieces = re.split(f"({DECIMAL}|{ANY})", stored)
    pattern = "".join(
        re.escape(piece) if number % 2 == 0 else ".*?" if piece == ANY else f"({DECIMAL})"
        for number, piece in enumerate(pieces)
    )
    found = re.fullmatch(pattern, printed)
    numbers = [piece for piece in pieces[1::2] if piece != ANY]
    return found is not None and all(map(is_near, found.groups(), numbers))


def is_near(printed: str, stored: str) -> bool:
    """Return whether two numbers differ by 1 % or one unit of the last decimal, and have as many decimals, or many."""
    decimals = [len(re.sub("e.*", "", number).partition(".")[2]) for number in (printed, stored)]
    unit = 0.0 if "e" in stored else 10.0 ** -decimals[1]
    is_as_long = decimals[0] == decimals[1] or min(decimals) >= ALL_DECIMALS
    return is_as_long and float(printed) == pytest.approx(float(stored), rel=WITHIN, abs=unit)


def is_same(printed: str, stored: str) -> bool:
    lines = printed.splitlines()
    expected = stored.splitlines()
    return len(lines) == len(expected) and all(map(is_same_line, lines, expected))


def updated(printed: str, stored: str) -> str:
    """Return what is printed, with stored lines where they are the same: their open parts were written by hand."""
    left = stored.splitlines()
    lines = []
    for line in printed.splitlines():
        same = next((n for n, old in enumerate(left) if is_same_line(line, old)), None)
        lines.append(CLOCK.sub(ANY, line) if same is None else left[same])
        del left[: 0 if same is None else same + 1]
    return "\n".join(lines)


def run_transcript(text: str, home: Path) -> str:
    """Run the commands of a transcript in the working directory `home`.

    Return the transcript with what is printed now, wherever that differs from what is stored.
    """
    result = ""
    for first, stored in split_transcript(text):
        output = stored
        if first.startswith("$ "):
            command = "\n".join(line[2:] for line in first.splitlines())
            printed = run_line(command, home)
            output = stored if is_same(printed, stored) else updated(printed, stored)
        result += first + "".join(f"  {line}\n" if line else "\n" for line in output.splitlines())
    return result
