"""Another program that turns a dump into text, which `bert extract --with` names.

It gets a small dump as its last argument, and prints the text. WikiExtractor is such a program, with a short name (it
is AGPL: called, never imported).
"""

import errno
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from bert_cli.errors import ConfigError, DataError, needs_extra
from bert_cli.processes import kill_program, start_program

SECONDS = 300.0
SECONDS_PER_MEGABYTE = 60.0  # WikiExtractor takes 0.12, or 0.5 a megabyte
DOC = re.compile(rb'<doc id="(\d{0,18})" ')
WIKIEXTRACTOR = [sys.executable, "-P", "-m", "wikiextractor.WikiExtractor", "-o", "-"]
WIKIEXTRACTOR += ["--processes", "1", "--quiet", "--no-templates"]


def command_of(program: str) -> list[str]:
    """Return the command line of a program that `--with` names. Raises ConfigError if it is missing."""
    where = f"with ({program})"
    if program == "wikiextractor":
        if find_spec("wikiextractor") is None:
            raise ConfigError(where, needs_extra("wikiextractor"))
        return WIKIEXTRACTOR
    try:
        command = shlex.split(program)
    except ValueError as error:
        problem = f"is not a valid command line ({error})"
        raise ConfigError(where, problem, "close the quotation") from error
    if not command or shutil.which(command[0]) is None:
        raise ConfigError(where, "no such program", "install it or use its path")
    return command


def run_program(command: Sequence[str], path: Path, where: str) -> bytes:
    """Run a program on a dump of some pages and return its <doc> blocks.

    If a process of WikiExtractor dies, its other processes wait forever. Raises OSError for a full disk.
    """
    limit = SECONDS + SECONDS_PER_MEGABYTE * path.stat().st_size / 1e6
    text = path.with_name("text")
    messages = path.with_name("messages")
    with text.open("wb") as out, messages.open("wb") as err:
        program = start_program([*command, str(path)], stdout=out, stderr=err)
        try:
            status = program.wait(limit)
            problem = ""
            if status:
                problem = f"exit status {status}"
        except subprocess.TimeoutExpired:
            problem = f"did not finish within {limit:.0f} s"
        finally:
            kill_program(program)
    message = messages.read_text(errors="replace").strip()
    reason = os.strerror(errno.ENOSPC)
    if reason in message:
        raise OSError(errno.ENOSPC, reason, str(path))
    blocks = text.read_bytes()
    if problem or "Traceback" in message:
        reason = message.splitlines()[-1] if message else "no message"
        problem = f"{problem or 'a crash'} ({reason})"
    elif not DOC.search(blocks):
        problem = "it writes no <doc> blocks"
    if problem:
        remedy = "correct the program: it must take a dump as its last argument and print the text"
        raise DataError(where, f"the program fails ({problem})", remedy)
    return blocks
