"""The errors about settings: the setting, the origin of its value, the problem, the remedy.

pydantic finds the mistakes. Each becomes one ConfigError with the dotted path of the setting, the file or
flag that the value came from, and the nearest name for an unknown one.
"""

from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from bert_cli.config.old_names import instead_of
from bert_cli.config.settings import SettingError, group_of, is_positional
from bert_cli.errors import ConfigError, combine, nearest


def field_paths(settings: type[BaseModel], above: str = "", *, in_lists: bool = False) -> list[str]:
    """Return the dotted path of every setting, of groups too and, if asked, of groups in lists."""
    paths: list[str] = []
    for name, about in settings.model_fields.items():
        path = f"{above}.{about.alias or name}" if above else about.alias or name
        paths.append(path)
        kinds = [about.annotation, *get_args(about.annotation)]
        if in_lists:
            kinds += [kind for one in kinds if get_origin(one) is list for kind in get_args(one)]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                paths += field_paths(kind, path, in_lists=in_lists)
    return paths


def members_of(settings: type[BaseModel], group: str) -> list[str]:
    """Return the paths of the settings directly in a group, none for another setting."""
    return [path for path in field_paths(settings) if path.rpartition(".")[0] == group]


def flag_of(path: str) -> str:
    """Return the flag of a setting."""
    return "--" + path.replace("_", "-")


def origin_of(path: str, origins: Mapping[str, str]) -> str:
    """Return the file or flag that set a setting, or that set something in a group last."""
    related = [
        origin
        for other, origin in origins.items()
        if not path or other == path or other.startswith(f"{path}.") or path.startswith(f"{other}.")
    ]
    flags = [origin for origin in related if origin.startswith("--")]
    if path and flags:
        return flags[0]
    # A file comes after those that it extends.
    files = [origin for origin in related if not origin.startswith("--")]
    return files[-1] if files else ""


def unknown_arguments(settings: type[BaseModel], words: Sequence[str], program: str) -> ConfigError:
    """Return the error for words that no option takes, with the nearest flag of each."""
    flags = ["--config"] if "about" in settings.model_fields else []
    flags += [flag_of(path) for path in field_paths(settings) if not members_of(settings, path)]
    # A word after an unknown flag is probably its value.
    unknown = [word for word in words if word.startswith("-")]
    no_dashes = program.endswith(" launch") and not words[0].startswith("-")
    if not unknown or no_dashes:
        problem, remedy = "too many arguments", f"write a list as A,B, see {program} --help"
        if no_dashes:
            problem, remedy = (
                "the command belongs after --",
                "write bert launch -- COMMAND [options]",
            )
        elif "--config" in flags and words[0].endswith(".json"):
            remedy = f"a config is given as --config {words[0]}"
        elif program.endswith(" predict"):
            remedy = "give several texts in a file, --input FILE, or a line each on standard input"
        return ConfigError(f"{program} ({' '.join(words)})", problem, remedy)
    errors = []
    for word in unknown:
        flag = word.partition("=")[0]
        near = nearest(flag, flags)
        remedy = f"did you mean {near!r}?" if near else f"see {program} --help"
        problem, remedy = instead_of(flag.lstrip("-")) or ("no such flag", remedy)
        errors.append(ConfigError(f"{program} ({word})", problem, remedy))
    return combine(errors)


def group_given(
    settings: type[BaseModel], group: str, program: str, renamed: Mapping[str, str]
) -> ConfigError:
    """Return the error for the flag of a group whose value is not a JSON object."""
    first = flag_of(members_of(settings, group)[0])
    auto = ", for auto --parallel.layout auto" if group == "parallel" else ""
    return ConfigError(
        f"{program} ({flag_of(renamed.get(group, group))})",
        "is a group of settings",
        f"give one of them, as {first}{auto}; {program} --help lists all",
    )


def setting_errors(
    settings: type[BaseModel], items: Sequence[Mapping[str, Any]], origins: Mapping[str, str]
) -> ConfigError:
    """Return one error for all mistakes that pydantic found in a command's settings."""
    errors = [
        _setting_error(settings, item, origins) for item in items if _is_relevant(item, items)
    ]
    return combine(list({str(error): error for error in errors}.values()))


def _is_relevant(item: Mapping[str, Any], items: Sequence[Mapping[str, Any]]) -> bool:
    """Return False for a mistake of a union's type that was not meant, as `str` where a list was given."""
    path = item["loc"]
    return not item["type"].endswith("_type") or not any(
        len(other["loc"]) > len(path) > 1 and other["loc"][: len(path) - 1] == path[:-1]
        for other in items
    )


def _setting_error(
    settings: type[BaseModel], item: Mapping[str, Any], origins: Mapping[str, str]
) -> ConfigError:
    valid = field_paths(settings, in_lists=True)
    # pydantic names the type of a union ("float", "literal['dynamic']") like a key; leave it out.
    steps: list[str] = []
    for step in map(str, item["loc"]):
        if _without_numbers([*steps, step]) in valid or step.isdigit():
            steps.append(step)
    error = item.get("ctx", {}).get("error")
    if item["type"] == "extra_forbidden":
        steps.append(str(item["loc"][-1]))
    elif isinstance(error, SettingError) and error.name:
        steps.append(error.name)
    path = ".".join(steps)
    about = settings.model_fields.get(path)
    positional = about is not None and is_positional(about)
    origin = "" if positional else origin_of(path, origins)
    where = f"{path} ({origin})" if path and origin else path or origin
    if isinstance(error, SettingError):
        return ConfigError(where, error.problem, error.remedy)
    if item["type"] == "extra_forbidden":
        return ConfigError(where, *_unknown_setting(steps, valid))
    if item["type"] == "missing":
        return _missing(settings, path, where)
    if item["type"] == "bool_parsing":
        return ConfigError(where, f"got {item['input']!r}, not a boolean", "give true or false")
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error":
        return ConfigError(where, message)
    return ConfigError(where, f"got {item['input']!r}", message[:1].lower() + message[1:])


def _unknown_setting(steps: Sequence[str], valid: Sequence[str]) -> tuple[str, str]:
    """Return problem and remedy for an unknown key, with the nearest one of its group."""
    group, name = _without_numbers(steps[:-1]), steps[-1]
    siblings = [path.rpartition(".")[2] for path in valid if path.rpartition(".")[0] == group]
    anywhere = [path for path in valid if path.rpartition(".")[2] == name]
    near = nearest(name, siblings) or next(iter(anywhere), None)
    remedy = f"did you mean {near!r}?" if near else "remove it"
    return instead_of(name) or ("no such setting", remedy)


def _missing(settings: type[BaseModel], path: str, where: str) -> ConfigError:
    """Return the error for a setting without a value; of a group, name the flags that it needs."""
    if any(step.isdigit() for step in path.split(".")):
        return ConfigError(where, "is not given", "set it there")
    about = settings.model_fields.get(path)
    if about is not None and is_positional(about):
        return ConfigError(path, "is not given", f"give {path.upper()}")
    flags = " and ".join(flag_of(one) for one in _required_paths(settings, path) or [path])
    remedy = f"give {flags}" + (
        " or set it in the config" if "about" in settings.model_fields else ""
    )
    return ConfigError(path, "is not given", remedy)


def _required_paths(settings: type[BaseModel], group: str) -> list[str]:
    """Return the paths of the settings of a group that have no default; none for another setting."""
    inside: type[BaseModel] | None = settings
    for name in group.split("."):
        about = inside.model_fields.get(name) if inside else None
        inside = group_of(about.annotation) if about else None
    if inside is None:
        return []
    paths = [f"{group}.{name}" for name, one in inside.model_fields.items() if one.is_required()]
    return [leaf for path in paths for leaf in _required_paths(settings, path) or [path]]


def _without_numbers(steps: Sequence[str]) -> str:
    """Return a dotted path without the indices of list elements."""
    return ".".join(step for step in steps if not step.isdigit())
