"""How the tool prints what has more than plain lines: help, tables, marked text.

Colours and widths are for people: on a terminal only, and no colour with NO_COLOR or on a terminal that
has none (TERM=dumb). Into a file or a pipe goes plain text, whose lines nothing cuts or wraps.
"""

import os
import re
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

UNLIKE_A_TERMINAL = 100
ENDLESS = 10_000


def console(width: int = UNLIKE_A_TERMINAL) -> "Console":
    """Where to print; `width` is that of lines where there is no terminal.

    Nothing in a text is taken for markup, since paths and records may hold brackets.
    """
    from rich.console import Console

    terminal = sys.stdout.isatty()
    return Console(
        file=sys.stdout,
        width=shutil.get_terminal_size().columns if terminal else width,
        force_terminal=terminal,
        color_system="auto" if terminal and not os.environ.get("NO_COLOR") else None,
        highlight=False,
        markup=False,
        emoji=False,
    )


def print_help(text: str) -> None:
    """Print a help: on a terminal with its headings and flags marked, else as it is."""
    if not sys.stdout.isatty():
        print(text.rstrip("\n"))
        return
    from rich.text import Text

    marked = Text(text.rstrip("\n"))
    marked.highlight_regex(re.compile(r"^\S[^\n]*:$", re.MULTILINE), "bold")
    marked.highlight_regex(r"(?<![\w.-])--?[a-z][\w.-]*", "cyan")
    console().print(marked, soft_wrap=True)


def print_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()
) -> None:
    """Print rows under their heads; the columns whose numbers are in `right` end together.

    On a terminal a cell that is too long goes on below itself; elsewhere each row is one line.
    """
    from rich.table import Table

    found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, head in enumerate(heads):
        found.add_column(head, justify="right" if number in right else "left", overflow="fold")
    for row in rows:
        found.add_row(*row)
    out = console(ENDLESS)
    if out.is_terminal:
        out.print(found)
        return
    with out.capture() as held:
        out.print(found)
    print("\n".join(line.rstrip() for line in held.get().splitlines()))
