"""mkdocs hook that generates pages of the documentation: the reference, contributing and changes.

The reference of a command is what its `--help-all` prints. The pages are generated at each build and not stored in
docs/, so they always match the code. mkdocs calls the functions whose names start with on_ (see mkdocs.yml).
"""

import os
import re
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from bert_cli.commands import COMMANDS
from bert_cli.config.shipped import named_configs
from bert_cli.parse.help import help_text
from bert_cli.parse.load import nested, read_config
from bert_cli.parse.old_names import IGNORED, RENAMES, SWITCHES
from bert_cli.parse.options import LOG_LEVELS

ROOT = Path(__file__).parents[1]
WIDTH = 84
"""Longest line of code, in characters, that fits the width of a page."""


def on_config(config: Any) -> Any:
    """Append the generated pages to the last part of the navigation of mkdocs.yml."""
    pages = [{f"bert {name}": f"reference/{page_of(name)}"} for name in COMMANDS]
    *_, reference = config.nav
    reference["Reference"] += [
        {"Commands": ["reference/index.md", *pages]},
        {"Contributing": "contributing.md"},
        {"Files of the package": "tree.md"},
        {"Changes": "changes.md"},
    ]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    pages = {
        "reference/index.md": commands_page(),
        "contributing.md": from_root("CONTRIBUTING.md"),
        "changes.md": from_root("CHANGELOG.md"),
        "tree.md": tree_page(),
        **{f"reference/{page_of(name)}": command_page(name) for name in COMMANDS},
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the markers of a page by generated tables."""
    for marker, generate in MARKERS.items():
        if marker in markdown:
            markdown = markdown.replace(marker, generate())
    return markdown


def from_root(name: str) -> str:
    """Return a page from the root of the repository, with its links changed to fit docs/."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return text.replace("](docs/", "](").replace("](CONTRIBUTING.md", "](contributing.md")


def page_of(name: str) -> str:
    """Return the file name of a command's page."""
    return f"bert-{name.replace(' ', '-')}.md"


def commands_page() -> str:
    """Return the page with a table of all commands."""
    rows = [f"| [`bert {name}`]({page_of(name)}) | {row.help} |" for name, row in COMMANDS.items()]
    table = "\n".join(rows)
    levels = ", ".join(f"`{level}`" for level in LOG_LEVELS)
    return f"""# Commands

All commands of this version. These pages are generated from the code, like `bert COMMAND --help`.

| command | what it does |
|---|---|
{table}

`bert --version` prints the versions of the libraries that affect numerical results. Every command has
`--help`, and `--log-level` {levels}: show log messages of
TensorFlow and other libraries of this level or higher. By default none are shown.
"""


def configs_table() -> str:
    """Return a table of the shipped configs."""
    lines = ["| name | content | expected result |", "|---|---|---|"]
    for name, path in named_configs().items():
        about = nested(read_config(path).values)["about"]
        lines.append(f"| `{name}` | {about['what']} | {about['expect']} |")
    return "\n".join(lines)


def old_names() -> str:
    """Return a table of old config keys and their new names."""
    rows = [f"| `{old}` | `{new}` |" for old, new in RENAMES.items()]
    return "\n".join(["| old | new |", "|---|---|", *rows])


def keys_without_effect() -> str:
    """Return a table of config keys that are accepted and have no effect."""
    rows = [f"| `{key}` | {why} |" for key, why in IGNORED.items()]
    for key, (words, why) in SWITCHES.items():
        rows.append(f"| `{key}` | {why}; only `{words[0]}` is accepted |")
    return "\n".join(["| key without effect | reason |", "|---|---|", *rows])


def tree_page() -> str:
    """Return the page with the tree of the package."""
    tree = subprocess.run([ROOT / "scripts" / "tree"], capture_output=True, text=True, check=True)
    return f"""# Files of the package

Each file of `bert_cli` with the first sentence of its docstring, as `scripts/tree` prints it.
[Where to find the code](contributing.md#where-to-find-the-code) describes the layers.

{code(tree.stdout)}
"""


# Marker in a page -> function that generates its replacement.
MARKERS: dict[str, Callable[[], str]] = {
    "<!-- shipped configs -->": configs_table,
    "<!-- old names -->": old_names,
    "<!-- keys without effect -->": keys_without_effect,
}


def command_page(name: str) -> str:
    """Return the page of a command: the output of `--help-all`, each group of options under its heading."""
    os.environ["COLUMNS"] = str(WIDTH)
    text = help_text(COMMANDS[name].settings_class(), name, is_complete=True)
    first, *groups = re.split(r"^(\S[^\n]*):\n(?=  )", text, flags=re.MULTILINE)
    sections = [f"# bert {name}", code(first)]
    for title, options in zip(groups[::2], groups[1::2], strict=True):
        language = "bash" if title == "examples" else "text"
        sections += [f"## {title}", code(options, language)]
    return "\n\n".join(sections)


def code(text: str, language: str = "text") -> str:
    """Return a block of code."""
    return f"```{language}\n{textwrap.dedent(text).strip()}\n```"
