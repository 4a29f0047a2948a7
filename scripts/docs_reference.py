"""mkdocs hook that generates pages of the documentation: the reference, contributing and changes.

The reference comes from the settings classes, like `--help`: `options.py` defines the headings and options of
a command, and the fields define their bounds. The pages are generated at each build and not stored in docs/, so they
always match the code. mkdocs calls the functions whose names start with on_ (see mkdocs.yml).
"""

import html
import re
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from bert_cli.commands import COMMANDS
from bert_cli.config.help import wrap_command
from bert_cli.config.load import named_configs, read_config
from bert_cli.config.old_names import MODEL_HAS, NO_EFFECT, RENAMES
from bert_cli.config.options import (
    LOG_LEVELS,
    Option,
    Section,
    examples_of,
    group_of,
    purpose_of,
    sections_of,
)

ROOT = Path(__file__).parents[1]
# Groups of commands in the navigation, in the order of the pages.
GROUPS = {
    "Data": ("download", "extract", "preprocess", "vocab", "tokenize", "index", "pack", "data"),
    "Look": ("inspect", "doctor", "plan", "runs", "plot", "compare"),
    "Train": ("pretrain", "squad", "glue", "ner", "classify", "launch"),
    "Use": ("predict", "evaluate", "export", "average", "completion"),
    "Measure": ("bench", "bench pretrain", "bench squad", "bench data"),
}
OTHERS = "More"
WIDTH = 84
"""Longest line of code, in characters, that fits the width of a page."""
VALUE_KINDS = {
    "FILE": "path",
    "INT": "integer",
    "NUMBER": "number",
    "PATH": "path",
    "TEXT": "text",
    "JSON": "JSON",
}
BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
CORES = "the number of cores"


def on_config(config: Any) -> Any:
    """Append the generated pages to the navigation of mkdocs.yml."""
    commands: dict[str, list[str]] = {group: [] for group in (*GROUPS, OTHERS)}
    for name in COMMANDS:
        group = next((group for group, names in GROUPS.items() if name in names), OTHERS)
        commands[group].append(name)
    pages: list[Any] = ["reference/index.md"]
    for group, names in commands.items():
        # Commands that GROUPS does not list come last.
        known = [name for name in GROUPS.get(group, ()) if name in names]
        ordered = [*known, *(name for name in names if name not in known)]
        if ordered:
            pages.append(
                {group: [{f"bert {name}": f"reference/{page_of(name)}"} for name in ordered]}
            )
    config.nav += [
        {"Reference": pages},
        {
            "Project": [
                {"Measured": "measured.md"},
                {"Contributing": "contributing.md"},
                {"Files of the package": "tree.md"},
                {"Changes": "changes.md"},
            ]
        },
    ]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    pages = {
        "reference/index.md": commands_page(),
        "contributing.md": from_root("CONTRIBUTING.md"),
        "changes.md": from_root("CHANGELOG.md"),
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


def settings_of(name: str) -> type[BaseModel]:
    """Return the settings class of a command."""
    return COMMANDS[name].settings_class()


def commands_page() -> str:
    """Return the page with a table of all commands."""
    rows = [f"| [`bert {name}`]({page_of(name)}) | {row.help} |" for name, row in COMMANDS.items()]
    return "\n".join(
        [
            "# Commands",
            "",
            "All commands of this version. These pages are generated from the code, like `bert COMMAND --help`.",
            "",
            "| command | what it does |",
            "|---|---|",
            *rows,
            "",
            "`bert --version` prints the versions of the libraries that affect numerical results. Every command has",
            f"`--help`, and `--log-level` {', '.join(f'`{level}`' for level in LOG_LEVELS)}: show log messages of",
            "TensorFlow and other libraries of this level or higher. By default none are shown.",
            "",
        ]
    )


def configs_table() -> str:
    """Return a table of the shipped configs."""
    lines = ["| name | content | expected result |", "|---|---|---|"]
    for name, path in named_configs().items():
        about = read_config(path).values["about"]
        lines.append(f"| `{name}` | {about['what']} | {about['expect']} |")
    return "\n".join(lines)


def old_names() -> str:
    """Return a table of old config keys and their new names."""
    rows = [f"| `{old}` | `{new}` |" for old, new in RENAMES.items()]
    return "\n".join(["| old | new |", "|---|---|", *rows])


def keys_without_effect() -> str:
    """Return a table of config keys that are accepted and have no effect."""
    rows = [f"| `{name}` | {why} |" for name, why in NO_EFFECT.items()]
    rows += [
        f"| `{name}` | the model always has {what}; `false` is an error |"
        for name, what in MODEL_HAS.items()
    ]
    return "\n".join(["| key | reason |", "|---|---|", *rows])


def first_screen() -> str:
    """Return the top of the README, which is the front page too: without its title, to the text for Wikipedia."""
    _, _, screen = from_root("README.md").partition("# bert\n")
    return screen.partition("## From Wikipedia to BERT")[0]


def package_tree() -> str:
    """Return the tree of the package as a block of code."""
    tree = subprocess.run([ROOT / "scripts" / "tree"], capture_output=True, text=True, check=True)
    return f"```text\n{tree.stdout}```"


# Marker in a page -> function that generates its replacement.
MARKERS: dict[str, Callable[[], str]] = {
    "<!-- first screen -->": first_screen,
    "<!-- shipped configs -->": configs_table,
    "<!-- old names -->": old_names,
    "<!-- keys without effect -->": keys_without_effect,
    "<!-- tree -->": package_tree,
}


def command_page(name: str) -> str:
    """Return the page of a command."""
    settings = settings_of(name)
    reads_config = "about" in settings.model_fields
    sections = sections_of(settings, name)
    positionals = [option for section in sections for option in section.options if not option.flags]
    usage = " ".join([f"bert {name} [options]", *map(usage_of, positionals)])
    lines = [
        f"# bert {name}",
        "",
        *(escape_markdown(text) for text in paragraphs(purpose_of(settings))),
    ]
    lines += ["```text", usage + (" -- COMMAND [options]" if name == "launch" else ""), "```", ""]
    if examples_of(settings):
        examples = [textwrap.dedent(wrap_command(line, WIDTH)) for line in examples_of(settings)]
        lines += ["```bash", *examples, "```", ""]
    if reads_config:
        lines += [
            "Each setting is a flag and also a key of the `--config` file, with the JSON path shown next to it. Flags "
            "override the file. See [configs](../configs.md).",
            "",
        ]
    for section in sections:
        lines += section_lines(section, settings, reads_config)
    return "\n".join(lines)


def paragraphs(text: str) -> list[str]:
    """Return the paragraphs of a text, each followed by an empty line."""
    return [line for part in text.split("\n\n") for line in (" ".join(part.split()), "")]


def usage_of(option: Option) -> str:
    """Return a positional argument in the form of the usage line."""
    word = f"{option.takes} ..." if option.is_list else option.takes
    return word if option.is_required else f"[{word}]"


def section_lines(section: Section, settings: type[BaseModel], reads_config: bool) -> list[str]:
    """Return the options of a section, each with its type, JSON path and default."""
    is_group = bool(section.options) and "." in section.options[0].name
    lines = [f"## {f'`{section.title}`' if is_group else section.title}", ""]
    if section.about:
        lines += [escape_markdown(section.about), ""]
    for option in section.options:
        field = field_of(settings, option.name)
        text, default = split_default(option.text)
        if field is not None and field.default_factory is not None and "processes" in option.name:
            default = CORES
        flags = " ".join(f"`{flag}`" for flag in option.flags) or f"`{option.takes}`"
        value = value_description(option, field)
        facts = [value] if value else []
        if reads_config and option.flags and option.name != "config":
            facts.append(f"JSON `{option.name}`")
        facts.append("required" if option.is_required else "")
        facts.append(f"default: `{default}`" if default and default != CORES else "")
        facts.append(f"default: {CORES}" if default == CORES else "")
        anchor = option.name.replace("_", "-")
        lines += [
            f'<a id="{anchor}"></a>{flags}',
            f":   {escape_markdown(text)}",
            f"    <br><small>{' · '.join(fact for fact in facts if fact)}</small>",
            "",
        ]
    return lines


def split_default(text: str) -> tuple[str, str]:
    """Return the description of an option and its default, which may be empty."""
    match = re.fullmatch(r"(.*?)(?: \(required\)| \(default: (.*)\))?", text, re.DOTALL)
    assert match is not None
    return match[1], match[2] or ""


def value_description(option: Option, field: FieldInfo | None) -> str:
    """Return the type, choices and bounds of the value of an option."""
    if option.choices:
        return "one of " + ", ".join(f"`{choice}`" for choice in option.choices)
    if not option.takes:
        return "switch"
    if not option.flags and option.name == "command":
        return "text"
    words = [option.takes] if not option.flags else option.takes.split("|")
    kinds = [
        VALUE_KINDS.get(word, f"`{word}`" if option.flags else "path" if option.is_path else "text")
        for word in words
    ]
    kind = " or ".join(dict.fromkeys(kinds)) + (", one or more" if option.is_list else "")
    bounds = [
        f"{phrase} {getattr(constraint, name):g}"
        for constraint in constraints_of(field)
        for name, phrase in BOUNDS.items()
        if isinstance(getattr(constraint, name, None), int | float)
    ]
    return ", ".join([kind, *dict.fromkeys(bounds)])


def constraints_of(field: FieldInfo | None) -> list[Any]:
    """Return the constraints of a field, including those of the type in `X | None`."""
    if field is None:
        return []
    inner = [
        constraint
        for kind in getattr(field.annotation, "__args__", ())
        for constraint in getattr(kind, "__metadata__", ())
    ]
    # A FieldInfo inside the annotation holds its constraints as metadata.
    return [
        constraint
        for item in (*field.metadata, *inner)
        for constraint in (getattr(item, "metadata", None) or [item])
    ]


def field_of(settings: type[BaseModel], path: str) -> FieldInfo | None:
    """Return the field with this dotted path; None for an option that is not a field, such as --config."""
    first, _, rest = path.partition(".")
    for name, field in settings.model_fields.items():
        if first in (name, field.alias):
            group = group_of(field.annotation)
            return field_of(group, rest) if rest and group is not None else field
    return None


def escape_markdown(text: str) -> str:
    """Return a docstring as Markdown: `code` is unchanged, other special characters are escaped."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(
        part
        if part.startswith("`")
        else re.sub(r"([*_\[\]{}])", r"\\\1", html.escape(part, quote=False))
        for part in parts
    )
