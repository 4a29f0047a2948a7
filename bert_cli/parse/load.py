"""Load settings from JSON files and flags, with the origin of every value.

A file may extend another one (`"extends": "other.json"`, in its folder or shipped) and then contains only
the differences. Flags are dotted paths in kebab case and override files. Files and command lines of
Graphcore's example load unchanged; `old_names.py` has its names. pydantic finds the mistakes, and all are
reported at once: the path of the setting, the file or flag of its value, and the nearest name.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from bert_cli.config.shipped import named_configs
from bert_cli.errors import ConfigError, combine, nearest, redact
from bert_cli.facts.bert import fields_of
from bert_cli.files import OWN_CHECKSUM, JSONObject, check_format, read_json
from bert_cli.parse.help import help_text
from bert_cli.parse.old_names import adapt, our_name, why_no_effect
from bert_cli.parse.options import flag_of, options_of, parse_words, split_at_dashes
from bert_cli.parse.removed import why_unknown
from bert_cli.processes import print_help
from bert_cli.settings.markers import POSITIONAL, group_of, is_path, kinds_of
from bert_cli.settings.settings import RUN_LENGTHS, SettingError, Settings

Model = TypeVar("Model", bound=Settings)
# Values by dotted paths.
Values = Mapping[str, Any]

BATCH_SIZES = (
    "global_batch.micro_batch_size",
    "global_batch.replicas",
    "global_batch.grad_acc_steps_per_replica",
)
EXAMPLES = "global_batch.examples_per_step"
# The origin of a positional argument.
ARGUMENT = "argument"


@dataclass(frozen=True)
class Loaded:
    """Unvalidated settings with the origin of each value, renamed keys and keys without effect."""

    values: Values
    """Dotted path -> value."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Dotted path -> the file or flag that set it; defaults are absent."""
    no_effect: Mapping[str, str] = field(default_factory=dict)
    """Dotted key or flag that was accepted and does nothing -> why."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Dotted key -> the old name that a file or flag has for it."""


def find_config(name: str, given_as: str = "--config", folder: Path = Path()) -> Path:
    """Return the path of a config: a file, relative to `folder`, or else a shipped config by name.

    Raises ConfigError with the nearest name.
    """
    path = folder / Path(os.path.expandvars(name)).expanduser()
    if path.is_file():
        return path
    shipped = named_configs()
    config = shipped.get(name.removesuffix(".json"))
    if config:
        return config
    # Names to suggest: of shipped configs, and of the files in the folder that was meant.
    files = {file.stem: str(Path(name).parent / file.name) for file in path.parent.glob("*.json")}
    stem = nearest(Path(name).stem, (*shipped, *files))
    remedy = f"shipped configs: {', '.join(shipped)}"
    if stem:
        remedy = f"did you mean {files.get(stem, stem)!r}?"
    raise ConfigError(f"{given_as} ({name})", "no such file", remedy)


def read_config(path: Path, extending: tuple[Path, ...] = ()) -> Loaded:
    """Read a JSON file and the files that it extends, with old keys renamed.

    Raises ConfigError for a file that is absent, is not a JSON object, or extends itself.
    """
    chain = (*extending, path.resolve())
    if path.resolve() in extending:
        names = " -> ".join(file.name for file in chain)
        remedy = "remove one of these `extends`"
        raise ConfigError(f"extends ({names})", "a config extends itself", remedy)
    remedy = "a config is one JSON object {...}"
    raw = read_json(path, JSONObject, ConfigError, remedy)
    number = raw.pop("format", None)
    if number is not None or OWN_CHECKSUM.encode() in path.read_bytes():  # a run wrote it
        check_format(str(path), number)
        raw.pop("command", None)
    dotted = next((name for name in raw if "." in name), None)
    if dotted is not None:
        raise ConfigError(f"{dotted} ({path})", "a file nests its settings", "write {...: {...}}")
    parent = raw.pop("extends", None)
    if not isinstance(parent, str | None):
        remedy = "write the name of one JSON file"
        raise ConfigError(f"extends ({path})", f"got {parent!r}", remedy)
    below = Loaded({})
    if parent:
        below = read_config(find_config(parent, f"extends in {path}", path.parent), chain)
    file = _rename(dict(leaves(raw)), str)
    if "about" not in raw:
        # The description of the extended file does not hold for the file that extends it.
        below = replace(below, values=_without_about(below.values))
    return _over(below, replace(file, origins=dict.fromkeys(file.values, str(path))))


def _without_about(values: Values) -> JSONObject:
    return {path: value for path, value in values.items() if path.split(".")[0] != "about"}


def _over(below: Loaded, above: Loaded) -> Loaded:
    """Return the settings of a file with those of another file or of a command line over them."""
    values = override(below.values, above.values)
    # The origins of `above` come first and win: the first that sets a member is the origin of its group.
    origins = {**above.origins, **below.origins, **above.origins}
    renamed = {new: old for new, old in below.renamed.items() if new not in above.values}
    return Loaded(
        values,
        {path: origin for path, origin in origins.items() if path in values},
        {**below.no_effect, **above.no_effect},
        {**renamed, **above.renamed},
    )


def _rename(keys: Values, shown: Callable[[str], str]) -> Loaded:
    """Return the values of a file or a command line under our keys; keys without effect are left out.

    `shown` returns the form in which a key was given.
    Raises ConfigError for a setting under two names.
    """
    values = {}
    no_effect = {}
    renamed: dict[str, str] = {}
    for old, value in keys.items():
        new = our_name(old)
        if new == "parallel" and value == "auto":
            new = "parallel.layout"
        reason = why_no_effect(new, value)
        if reason is None:
            values[new] = value
        elif value is not None:
            no_effect[shown(old)] = reason
        if reason is not None or old in (new, "parallel"):
            continue
        second = new if new in keys else renamed.get(new)
        if second:
            problem = f"is the old name of {shown(new)}, which is also set ({shown(second)})"
            raise ConfigError(shown(old), problem, "use one of them")
        renamed[new] = old
    return Loaded(values, {}, no_effect, renamed)


def leaves(values: Mapping[str, object], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each dotted path with its value; an empty group is a leaf, and one with names that are no paths."""
    for name, value in values.items():
        path = f"{above}.{name}" if above else name
        if isinstance(value, Mapping) and value and "." not in "".join(value):
            yield from leaves(value, path)
        else:
            yield path, value


def nested(values: Values) -> JSONObject:
    """Return values by dotted paths as groups in groups."""
    result: JSONObject = {}
    # A group comes before its members.
    for path in sorted(values, key=lambda path: path.count(".")):
        *groups, name = path.split(".")
        inside = result
        for group in groups:
            inside = inside.setdefault(group, {})
            if not isinstance(inside, dict):
                break  # a value in place of a group, which is refused
        else:
            inside[name] = values[path]
    return result


def overlaid(under: Values, over: Values) -> JSONObject:
    """Return `under` with the values of `over`, by their paths; one of a group replaces its members, unless empty."""
    replaced = [f"{path}." for path, value in over.items() if value != {}]
    kept = {
        path: value
        for path, value in under.items()
        if not any(
            f"{path}.".startswith(prefix) or prefix.startswith(f"{path}.") for prefix in replaced
        )
    }
    return {**kept, **over}


def override(under: Values, over: Values) -> JSONObject:
    """Return `overlaid`, but a value of `over` also removes the values of `under` that contradict it.

    A length of the run replaces either length, and a micro-batch `auto` the product of the batch, which stays.
    """
    base = dict(under)
    removed: Sequence[str] = ()
    if any(over.get(name) is not None for name in RUN_LENGTHS):
        removed = RUN_LENGTHS
    size, _, accumulation = BATCH_SIZES
    # The batch is the product of three settings; it stays when the micro-batch becomes `auto`.
    numbers = [base.get(path, 1) for path in BATCH_SIZES]
    has_batch = any(path.startswith("global_batch.") for path in base)
    if has_batch and over.get(size) == "auto" and all(isinstance(n, int) for n in numbers):
        removed = [*removed, accumulation]
        base.setdefault(EXAMPLES, math.prod(numbers))
    elif accumulation in over:
        removed = [*removed, EXAMPLES]
    return overlaid({path: value for path, value in base.items() if path not in removed}, over)


def load(settings: type[Model], words: Sequence[str], program: str) -> tuple[Model, Loaded]:
    """Return the settings of a command from its words, with the origins of the values.

    A settings class with an `about` field also takes `--config FILE`. `--help` and `--help-all` print and
    exit. Raises ConfigError with every mistake on its own line.
    """
    help_flags = {"-h", "--help", "--help-all"} & set(split_at_dashes(words)[0])
    if help_flags:
        command = program.removeprefix("bert ")
        print_help(help_text(settings, command, is_complete="--help-all" in help_flags))
        raise SystemExit(0)
    typed = _rename(dict(leaves(parse_words(settings, words, program))), flag_of)
    flags = dict(typed.values)
    config = None
    if "about" in settings.model_fields:
        config = flags.pop("config", None)
    path = None
    files = Loaded({})
    if config is not None:
        path = find_config(config)
        files = read_config(path)
    arguments = {n for n, about in settings.model_fields.items() if POSITIONAL in about.metadata}
    origins = {}
    for where in flags:
        # Messages name the flag that was typed, which may be an old one.
        origins[where] = flag_of(typed.renamed.get(where, where))
        if where in arguments:
            origins[where] = ARGUMENT
    if "command" in flags:
        origins["command"] = "after --"
    settled = _over(files, replace(typed, values=flags, origins=origins))
    raw = dict(settled.values)
    if path and settings.SAVES and raw.get("do_training") is not False:
        raw.setdefault("save_ckpt_path", f"checkpoints/{path.stem}")
    paths = {about.alias or name for name, about in settings.model_fields.items() if is_path(about)}
    changed = {where for where in origins if where.split(".")[0] not in paths}
    if changed & {*files.origins, *RUN_LENGTHS}:
        # The description of a file does not hold for a run with other values.
        raw = _without_about(raw)
    loaded = _adapted(settings, replace(settled, values=raw), origins)
    return validate(settings, loaded), loaded


def load_file(settings: type[Model], path: Path) -> Model:
    """Return the settings of a file, such as a run's settings.json. Raises ConfigError with every mistake."""
    return validate(settings, _adapted(settings, read_config(path), {}))


def _adapted(settings: type[Model], settled: Loaded, flags: Mapping[str, str]) -> Loaded:
    """Return the values that a command can use; `flags` are the flags that set some of them."""
    # So that a part of a group can be changed.
    groups = {
        name: about.default.model_dump(exclude_unset=True)
        for name, about in settings.model_fields.items()
        if isinstance(about.default, BaseModel)
    }
    defaults = {path: value for path, value in leaves(groups) if value != {}}
    for switch, values in getattr(settings, "DEFAULTS_WITH", {}).items():
        if settled.values.get(switch):
            defaults = overlaid(defaults, dict(leaves(values)))
    raw = override(defaults, settled.values)
    values, left_out = adapt(raw, settled.renamed, settings)
    no_effect = {flags.get(name, name): why for name, why in left_out.items()}
    return replace(settled, values=values, no_effect={**settled.no_effect, **no_effect})


def describe(settings: BaseModel, loaded: Loaded) -> str:
    """Return every setting with its value and origin, a line each, for `--dry-run`."""
    rows = [
        (where, redact(json.dumps(value)), _origin_of(where, loaded.origins) or "default")
        for where, value in leaves(settings.model_dump(mode="json", by_alias=True))
    ]
    width = max(len(where) for where, _, _ in rows)
    return "\n".join(f"  {where:<{width}}  {value}  ({origin})" for where, value, origin in rows)


# --- validation


def validate(settings: type[Model], loaded: Loaded) -> Model:
    """Return the frozen settings. Raises one ConfigError that lists every mistake."""
    values = loaded.values
    has_files = values.get("train_file") and values.get("validation_file")
    # A variable in a path that the command does not open may be unset; `path` is that of one of several corpora.
    is_free = has_files or values.get("generated_dataset")
    unread = ("dataset_dir", "path") if is_free else ()
    context = {"is_opened": lambda name: settings.OPENS_FILES and name not in unread}
    try:
        return settings.model_validate(nested(values), context=context)
    except ValidationError as failure:
        items = failure.errors()
        errors = [
            _setting_error(settings, item, loaded.origins)
            for item in items
            if _is_relevant(item, items)
        ]
        raise combine(list({str(error): error for error in errors}.values())) from failure


def changed(settings: Model, **values: object) -> Model:
    """Return a validated copy of settings with other values; a mapping changes values of a group.

    Raises ConfigError.
    """
    before = settings.model_dump(exclude_unset=True, by_alias=True)
    return validate(type(settings), Loaded(overlaid(dict(leaves(before)), dict(leaves(values)))))


def _is_relevant(item: ErrorDetails, items: Sequence[ErrorDetails]) -> bool:
    """Return False for the type of a union that was not meant, and for a default that follows from other mistakes."""
    path = item["loc"]
    if item["type"] == "default_factory_not_called":
        return False
    return not item["type"].endswith("_type") or not any(
        len(mistake["loc"]) > len(path) > 1 and mistake["loc"][: len(path) - 1] == path[:-1]
        for mistake in items
    )


def _setting_error(
    settings: type[BaseModel], item: ErrorDetails, origins: Mapping[str, str]
) -> ConfigError:
    known = field_paths(settings)
    names: set[str] = set()
    for path in known:
        names.update(path.split("."))
    # pydantic names the type of a union ("float", "literal['dynamic']") like a key; leave it out.
    if item["type"] == "extra_forbidden":
        names.add(str(item["loc"][-1]))
    steps = [step for step in map(str, item["loc"]) if step in names or step.isdigit()]
    error = item.get("ctx", {}).get("error")
    if isinstance(error, SettingError) and error.name:
        steps.append(error.name)
    path = ".".join(steps)
    origin = _origin_of(path, origins)
    where = path or origin
    if path and origin not in ("", ARGUMENT):
        where = f"{path} ({origin})"
    message = item["msg"].removeprefix("Value error, ")
    if isinstance(error, SettingError):
        return ConfigError(where, error.problem, error.remedy)
    if item["type"] == "extra_forbidden":
        path = ".".join([*(step for step in steps[:-1] if not step.isdigit()), steps[-1]])
        group, _, name = path.rpartition(".")
        parts = [setting.rpartition(".") for setting in known]
        near = nearest(name, [last for above, _, last in parts if above == group])
        near = near or next(("".join(part) for part in parts if part[2] == name), None)
        remedy = "remove it"
        if near:
            remedy = f"did you mean {near!r}?"
        return ConfigError(where, *(why_unknown(path) or ("no such name", remedy)))
    if item["type"] == "missing":
        inside = [o for o in options_of(settings) if f"{o.name}.".startswith(f"{path}.")]
        needed = [option for option in inside if option.is_required] or inside
        words = [option.flags[0] if option.flags else option.takes for option in needed]
        flags = " and ".join(words)
        remedy = "set it there"
        if flags:
            remedy = f"pass {flags}"
        if flags and "about" in settings.model_fields:
            remedy += " or set it in a config (--config FILE)"
        return ConfigError(where, "is missing", remedy)
    if item["type"] == "bool_parsing":
        return ConfigError(where, f"got {item['input']!r}, not a boolean", "use true or false")
    if item["type"] == "value_error":
        return ConfigError(where, message)
    expected = message.partition(", unable to parse")[0]
    return ConfigError(where, f"got {item['input']!r}", expected[:1].lower() + expected[1:])


def field_paths(settings: type[BaseModel], above: str = "") -> list[str]:
    """Return the dotted path of every setting, including groups and groups in lists."""
    paths = []
    for name, about in fields_of(settings).items():
        path = above + (about.alias or name)
        paths.append(path)
        for kind in kinds_of(about.annotation):
            # A list has the class of its items.
            for item in (kind, *get_args(kind)):
                group = group_of(item)
                if group:
                    paths += field_paths(group, f"{path}.")
    return paths


def _origin_of(path: str, origins: Mapping[str, str]) -> str:
    """Return the file or flag of a setting; for a group, the last file or flag that set a member."""
    related = [
        origin
        for where, origin in origins.items()
        if not path or f"{where}.".startswith(f"{path}.") or path.startswith(f"{where}.")
    ]
    flags = [origin for origin in related if path and origin.startswith("--")]
    # A file comes before the files that it extends.
    files = [origin for origin in related if not origin.startswith("--")]
    return next(iter([*flags, *files]), "")
