"""Pages that mkdocs makes from the code when it builds: the reference, and what stands at the root.

The settings classes are the one source, as for `--help`: `options.py` gives the headings and options of
a command, the fields their bounds. Nothing of it is written to docs/, so it cannot be older than the code.
mkdocs calls the functions whose names begin with on_ (see mkdocs.yml).
"""

import html
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from bert_cli.commands import COMMANDS
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
    wrap_command,
)

ROOT = Path(__file__).parents[1]
# Commands that belong together, in the order of the pages.
GROUPS = {
    "Data": ("download", "extract", "preprocess", "vocab", "tokenize", "index", "pack", "data"),
    "Look": ("inspect", "doctor", "plan", "runs", "plot", "compare"),
    "Train": ("pretrain", "squad", "glue", "ner", "classify", "squad-score", "launch"),
    "Use": ("predict", "export", "completion"),
    "Measure": ("bench", "bench pretrain", "bench squad", "bench data"),
}
OTHERS = "More"
WIDTH = 84
"""Characters of a line of code that fits a page."""
TAKES = {
    "FILE": "path",
    "INT": "whole number",
    "NUMBER": "number",
    "PATH": "path",
    "TEXT": "text",
    "JSON": "JSON",
}
BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
CORES = "as many as there are cores"


def on_config(config: Any) -> Any:
    """Put the pages that are made here behind those that mkdocs.yml names."""
    commands: dict[str, list[str]] = {group: [] for group in (*GROUPS, OTHERS)}
    for name in COMMANDS:
        group = next((group for group, names in GROUPS.items() if name in names), OTHERS)
        commands[group].append(name)
    pages: list[Any] = ["reference/index.md"]
    for group, names in commands.items():
        # In the order that GROUPS tells them in; new ones behind.
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
                {"Changes": "changes.md"},
            ]
        },
    ]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""
    made = {
        "reference/index.md": commands_page(),
        "contributing.md": from_root("CONTRIBUTING.md"),
        "changes.md": from_root("CHANGELOG.md"),
        **{f"reference/{page_of(name)}": command_page(name) for name in COMMANDS},
    }
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put what the code says where a page has a mark for it."""
    for mark, told in MARKS.items():
        if mark in markdown:
            markdown = markdown.replace(mark, told())
    return markdown


def from_root(name: str) -> str:
    """A page at the root of the repository, whose links into docs/ are those of a page in there."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return text.replace("](docs/", "](").replace("](CONTRIBUTING.md", "](contributing.md")


def page_of(name: str) -> str:
    """The file of a command's page, beside the list of them."""
    return f"bert-{name.replace(' ', '-')}.md"


def settings_of(name: str) -> type[BaseModel]:
    """The settings class of a command."""
    return COMMANDS[name].settings_class()


def commands_page() -> str:
    """Every command in a line."""
    rows = [f"| [`bert {name}`]({page_of(name)}) | {row.help} |" for name, row in COMMANDS.items()]
    return "\n".join(
        [
            "# Commands",
            "",
            "Every command of this version. The pages are made from the code, as `bert COMMAND --help` is.",
            "",
            "| command | what it does |",
            "|---|---|",
            *rows,
            "",
            "`bert --version` tells the versions of the parts that decide its numbers. Every command takes",
            f"`--help`, and `--log-level` {', '.join(f'`{level}`' for level in LOG_LEVELS)}: show the log messages of",
            "TensorFlow and other libraries from this level on; by default none.",
            "",
        ]
    )


def configs_table() -> str:
    """The shipped configs, and what they say of themselves."""
    lines = ["| name | what | expect |", "|---|---|---|"]
    for name, path in named_configs().items():
        about = read_config(path).values["about"]
        lines.append(f"| `{name}` | {about['what']} | {about['expect']} |")
    return "\n".join(lines)


def old_names() -> str:
    """Keys that have another name than in the example's own files."""
    rows = [f"| `{old}` | `{new}` |" for old, new in RENAMES.items()]
    return "\n".join(["| old | now |", "|---|---|", *rows])


def without_effect() -> str:
    """Keys that are accepted and do nothing."""
    rows = [f"| `{name}` | {why} |" for name, why in NO_EFFECT.items()]
    rows += [
        f"| `{name}` | the model always has {what}; `false` is refused |"
        for name, what in MODEL_HAS.items()
    ]
    return "\n".join(["| key | why |", "|---|---|", *rows])


# Mark in a page -> what stands there instead.
MARKS: dict[str, Callable[[], str]] = {
    "<!-- shipped configs -->": configs_table,
    "<!-- old names -->": old_names,
    "<!-- keys without effect -->": without_effect,
}


def command_page(name: str) -> str:
    """All that a command takes."""
    settings = settings_of(name)
    reads_config = "about" in settings.model_fields
    sections = sections_of(settings, name)
    places = [option for section in sections for option in section.options if not option.flags]
    usage = " ".join([f"bert {name} [options]", *map(place_of, places)])
    lines = [f"# bert {name}", "", *(escaped(text) for text in paragraphs(purpose_of(settings)))]
    lines += ["```text", usage + (" -- COMMAND [options]" if name == "launch" else ""), "```", ""]
    if examples_of(settings):
        examples = [textwrap.dedent(wrap_command(line, WIDTH)) for line in examples_of(settings)]
        lines += ["```bash", *examples, "```", ""]
    if reads_config:
        lines += [
            "Each setting is a flag and, by the JSON path beside it, a key of the file that `--config` names; flags "
            "win. [How a config is written](../configs.md).",
            "",
        ]
    for section in sections:
        lines += told_section(section, settings, reads_config)
    return "\n".join(lines)


def paragraphs(text: str) -> list[str]:
    """Paragraphs, each followed by an empty line."""
    return [part for one in text.split("\n\n") for part in (" ".join(one.split()), "")]


def place_of(option: Option) -> str:
    """What stands by its place, as the usage tells it."""
    word = f"{option.takes} ..." if option.is_list else option.takes
    return word if option.is_required else f"[{word}]"


def told_section(section: Section, settings: type[BaseModel], reads_config: bool) -> list[str]:
    """The options under a heading, each with what it takes, its JSON path, its default."""
    is_group = bool(section.options) and "." in section.options[0].name
    lines = [f"## {f'`{section.title}`' if is_group else section.title}", ""]
    if section.about:
        lines += [escaped(section.about), ""]
    for option in section.options:
        field = field_of(settings, option.name)
        text, default = divided(option.text)
        if field is not None and field.default_factory is not None and "processes" in option.name:
            default = CORES
        flags = " ".join(f"`{flag}`" for flag in option.flags) or f"`{option.takes}`"
        takes = taken(option, field)
        facts = [takes] if takes else []
        if reads_config and option.flags and option.name != "config":
            facts.append(f"JSON `{option.name}`")
        facts.append("required" if option.is_required else "")
        facts.append(f"default: `{default}`" if default and default != CORES else "")
        facts.append(f"default: {CORES}" if default == CORES else "")
        anchor = option.name.replace("_", "-")
        lines += [
            f'<a id="{anchor}"></a>{flags}',
            f":   {escaped(text)}",
            f"    <br><small>{' · '.join(fact for fact in facts if fact)}</small>",
            "",
        ]
    return lines


def divided(text: str) -> tuple[str, str]:
    """The text of an option and its default, which is none for what has none to tell."""
    found = re.fullmatch(r"(.*?)(?: \(required\)| \(default: (.*)\))?", text, re.DOTALL)
    assert found is not None
    return found[1], found[2] or ""


def taken(option: Option, field: FieldInfo | None) -> str:
    """What stands behind a flag, in words."""
    if option.choices:
        return "one of " + ", ".join(f"`{choice}`" for choice in option.choices)
    if not option.takes:
        return "switch"
    if not option.flags and option.name == "command":
        return "text"
    words = [option.takes] if not option.flags else option.takes.split("|")
    kinds = [
        TAKES.get(word, f"`{word}`" if option.flags else "path" if option.is_path else "text")
        for word in words
    ]
    told = " or ".join(dict.fromkeys(kinds)) + (", may be several" if option.is_list else "")
    bounds = [
        f"{words} {getattr(mark, name):g}"
        for mark in marks_of(field)
        for name, words in BOUNDS.items()
        if isinstance(getattr(mark, name, None), int | float)
    ]
    return ", ".join([told, *dict.fromkeys(bounds)])


def marks_of(field: FieldInfo | None) -> list[Any]:
    """The conditions on a field: its own, and those of the type in `X | None`."""
    if field is None:
        return []
    inner = [
        mark
        for kind in getattr(field.annotation, "__args__", ())
        for mark in getattr(kind, "__metadata__", ())
    ]
    marks = [*field.metadata, *inner]
    return [one for mark in marks for one in (getattr(mark, "metadata", None) or [mark])]


def field_of(settings: type[BaseModel], where: str) -> FieldInfo | None:
    """The field behind a dotted path; None for what is none, as --config."""
    first, _, rest = where.partition(".")
    for name, about in settings.model_fields.items():
        if first in (name, about.alias):
            group = group_of(about.annotation)
            return field_of(group, rest) if rest and group is not None else about
    return None


def escaped(text: str) -> str:
    """A docstring as Markdown: its `code` stays, its angle brackets and stars are no markup."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(
        part
        if part.startswith("`")
        else re.sub(r"([*_\[\]{}])", r"\\\1", html.escape(part, quote=False))
        for part in parts
    )
