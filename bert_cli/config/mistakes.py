"""What is said of a mistake in settings: where it stands, who set it, what was probably meant.

pydantic finds the mistakes; here each becomes one line with the dotted name, the file or flag that the
value came from, and the nearest name that there is.
"""

from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from bert_cli.config.options import is_by_place
from bert_cli.config.original import instead_of
from bert_cli.errors import nearest


def field_paths(settings: type[BaseModel], above: str = "", *, in_lists: bool = False) -> list[str]:
    """Dotted path of every setting of a class, groups included, and with `in_lists` groups in lists."""
    paths: list[str] = []
    for name, about in settings.model_fields.items():
        name = about.alias or name
        path = f"{above}.{name}" if above else name
        paths.append(path)
        kinds = [about.annotation, *get_args(about.annotation)]
        if in_lists:
            kinds += [kind for one in kinds if get_origin(one) is list for kind in get_args(one)]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                paths += field_paths(kind, path, in_lists=in_lists)
    return paths


def required_paths(settings: type[BaseModel], group: str) -> list[str]:
    """Dotted path of every setting of a group that has no default; none where it is no group."""
    inside: Any = settings
    for name in group.split("."):
        about = inside.model_fields.get(name)
        kinds = [about.annotation, *get_args(about.annotation)] if about else []
        groups = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not groups:
            return []
        inside = groups[0]
    needed = [
        f"{group}.{name}" for name, about in inside.model_fields.items() if about.is_required()
    ]
    return [leaf for path in needed for leaf in required_paths(settings, path) or [path]]


def _flag(path: str) -> str:
    return "--" + path.replace("_", "-")


def flag_mistake(settings: type[BaseModel], message: str, program: str) -> str:
    """What to say of flags that could not be read: a line for each, with the nearest flag."""
    message = message.removeprefix("error parsing CLI: ")
    unknown = message.partition("unrecognized arguments: ")[2].split()
    if not unknown:
        return f"{program}: {message}; see {program} --help"
    flags = ["--config"] if "about" in settings.model_fields else []
    flags += [_flag(where) for where in field_paths(settings) if not members_of(settings, where)]
    named = [word for word in unknown if word.startswith("-")]
    if not named:  # else what is no flag is the value of one that is not known
        return f"{program} ({' '.join(unknown)}): too many arguments; {_meant(unknown, flags, program)}"
    lines = []
    for word in named:
        near = nearest(word.partition("=")[0], flags)
        hint = f"did you mean {near!r}?" if near else f"see {program} --help"
        told = instead_of(word.partition("=")[0].lstrip("-"))
        lines.append(f"{program} ({word}): {told or f'no such flag; {hint}'}")
    return "\n".join(lines)


def members_of(settings: type[BaseModel], group: str) -> list[str]:
    """Dotted path of every setting directly in a group; none where the path is no group."""
    return [path for path in field_paths(settings) if path.rpartition(".")[0] == group]


def group_mistake(
    settings: type[BaseModel], words: Sequence[str], program: str, renamed: Mapping[str, str]
) -> str:
    """Return the message for flags that name a group, a line each; a group may be given as JSON."""
    lines = []
    for word, behind in zip(words, [*words, ""][1:], strict=True):
        flag, _, value = word.partition("=")
        group = flag[2:].replace("-", "_")
        inside = members_of(settings, group) if flag.startswith("--") else []
        if inside and not (value or behind).lstrip().startswith("{"):
            auto = ", for auto --parallel.layout auto" if flag == "--parallel" else ""
            lines.append(
                f"{program} ({_flag(renamed.get(group, group))}): is a group of settings; give one of them, as "
                f"{_flag(inside[0])}{auto}; {program} --help tells all"
            )
    return "\n".join(lines)


def _meant(words: Sequence[str], flags: Sequence[str], program: str) -> str:
    """What to do about words that no argument takes."""
    if "--config" in flags and words[0].endswith(".json"):
        return f"a config is given as --config {words[0]}"
    if program.endswith(" predict"):
        return "several texts are given in a file, --input FILE, or a line each on standard input"
    return f"a list is given as JSON in quotes, see {program} --help"


def worth_saying(items: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The mistakes without those of a choice that was not made: of `str | list` where a list was given."""

    def is_of_another_choice(item: Mapping[str, Any]) -> bool:
        place = item["loc"]
        return item["type"].endswith("_type") and any(
            len(other["loc"]) > len(place) and other["loc"][: len(place) - 1] == place[:-1]
            for other in items
            if len(place) > 1
        )

    return [item for item in items if not is_of_another_choice(item)]


def mistake(settings: type[BaseModel], item: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    """What to say of a setting that did not pass; `item` is pydantic's account of it."""
    valid = field_paths(settings, in_lists=True)
    # A union's branch ("float", "literal['dynamic']") is pydantic's name for a choice, not a place.
    steps: list[str] = []
    for step in map(str, item["loc"]):
        if _bare([*steps, step]) in valid or step.isdigit():
            steps.append(step)
    if item["type"] == "extra_forbidden":
        steps.append(str(item["loc"][-1]))
    where = ".".join(steps)
    # What is given by its place has no flag to be named.
    origin = "" if is_positional(settings, where) else origin_of(where, origins)
    place = f"{where} ({origin})" if where and origin else where or origin
    if item["type"] == "extra_forbidden":
        siblings = [
            path.rpartition(".")[2]
            for path in valid
            if path.rpartition(".")[0] == _bare(steps[:-1])
        ]
        anywhere = [path for path in valid if path.rpartition(".")[2] == steps[-1]]
        near = nearest(steps[-1], siblings) or next(iter(anywhere), None)
        hint = f"did you mean {near!r}?" if near else "remove it"
        return f"{place}: {instead_of(steps[-1]) or f'no such setting; {hint}'}"
    if item["type"] == "missing":
        needed = required_paths(settings, where) or [where]
        flags = [where if is_positional(settings, one) else _flag(one) for one in needed]
        if any(step.isdigit() for step in steps):
            return f"{place}: is not given; set it there"
        return f"{where}: is not given; give {' and '.join(flags)}" + (
            " or set it in the config" if "about" in valid else ""
        )
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error" and not where:
        # A mistake between settings begins with the one to mend.
        named = message.split()[0]
        place = origin_of(named, origins) if named in valid else place
        return f"{place}: {message}" if place else message
    if item["type"] == "value_error":
        return f"{place}: {message}" if place else message
    message = message[:1].lower() + message[1:]
    return f"{place}: got {item['input']!r}; {message}"


def _bare(steps: Sequence[str]) -> str:
    """A dotted path without the numbers of what is in lists."""
    return ".".join(step for step in steps if not step.isdigit())


def origin_of(where: str, origins: Mapping[str, str]) -> str:
    """Who set a setting; of a group, or of all settings, who had the last word in it."""
    related = [
        origin
        for path, origin in origins.items()
        if not where
        or path == where
        or path.startswith(f"{where}.")
        or where.startswith(f"{path}.")
    ]
    flags = [origin for origin in related if origin.startswith("--")]
    if where and flags:
        return flags[0]
    # A file comes after those that it extends.
    files = [origin for origin in related if not origin.startswith("--")]
    return files[-1] if files else ""


def is_positional(settings: type[BaseModel], where: str) -> bool:
    """Whether a setting is given by its place in the command line, without a flag."""
    about = settings.model_fields.get(where)
    return about is not None and is_by_place(about)
