"""Load settings from JSON files and flags, with the origin of every value.

A file may extend another one (`"extends": "other.json"`, in its folder or shipped) and then contains only
the differences. Flags are dotted paths in kebab case and override files. Files and command lines of
Graphcore's example load unchanged; `old_names.py` has its names. All mistakes are reported at once.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from bert_cli.config.messages import origin_of, setting_errors
from bert_cli.config.old_names import (
    DEFAULTS,
    adapt,
    both_names,
    our_name,
    translate_words,
    why_no_effect,
)
from bert_cli.config.options import help_text, parse_words, split_at_dashes
from bert_cli.errors import ConfigError, combine, nearest
from bert_cli.files import read_json
from bert_cli.terminal import print_help

Model = TypeVar("Model", bound=BaseModel)

PATH_KEYS = (
    "dataset_dir",
    "validation_dir",
    "save_ckpt_path",
    "pretrained_ckpt_path",
    "tensorboard_dir",
    "train_file",
    "validation_file",
    "test_file",
    "tokenizer_path",
    "cache_dir",
    "dataset_cache",
    "output_dir",
)
BENCHMARKS = "benchmarks.json"
"""A file among the shipped configs that is not a config: named command lines."""


@dataclass(frozen=True)
class Loaded:
    """Values before validation, and what is known about them."""

    values: Mapping[str, Any]
    origins: Mapping[str, str]
    """Dotted path -> the file or flag that set it; defaults are absent."""
    no_effect: Mapping[str, str] = field(default_factory=dict)
    """Dotted key or flag that was accepted and does nothing -> why."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Dotted key -> the old name that a file or flag has for it."""
    notes: Sequence[str] = ()
    """Lines on the defaults that differ from those of the original, for one of its configs."""


def configs_folder() -> Path:
    """Return the folder of the shipped configs, in a checkout or an installed wheel."""
    package = Path(__file__).parents[1]
    installed = package / "_configs"
    return installed if installed.is_dir() else package.parent / "configs"


def named_configs() -> dict[str, Path]:
    """Return the shipped configs by name."""
    return {p.stem: p for p in sorted(configs_folder().glob("*.json")) if p.name != BENCHMARKS}


def find_config(name: str, given_as: str = "--config", folder: Path = Path()) -> Path:
    """Return the path of a config: a file, relative to `folder`, or else a shipped config by name.

    Raises ConfigError with the nearest name.
    """
    path = folder / Path(os.path.expandvars(name)).expanduser()
    if path.is_file():
        return path
    shipped = named_configs()
    if name.removesuffix(".json") in shipped:
        return shipped[name.removesuffix(".json")]
    siblings = [file.name for file in sorted(path.parent.glob("*.json"))]
    sibling = nearest(Path(name).name, siblings)
    near = str(Path(name).with_name(sibling)) if sibling else nearest(Path(name).stem, shipped)
    remedy = f"did you mean {near!r}?" if near else f"shipped configs: {', '.join(shipped)}"
    raise ConfigError(f"{given_as} ({name})", "no such file", remedy)


def read_config(path: Path, extending: tuple[Path, ...] = ()) -> Loaded:
    """Read a JSON file and the files that it extends, with old keys renamed.

    Raises ConfigError for a file that is absent, is not a JSON object, or extends itself.
    """
    chain = (*extending, path.resolve())
    if path.resolve() in extending:
        names = " -> ".join(one.name for one in chain)
        raise ConfigError(f"extends ({names})", "a file extends itself", "break the circle")
    raw = read_json(path, dict[str, Any], ConfigError, "a config is one JSON object {...}")
    dotted = next((name for name in raw if "." in name), None)
    if dotted is not None:
        remedy = "write {...: {...}}"
        raise ConfigError(f"{dotted} ({path})", "a file nests its settings", remedy)
    parent = raw.pop("extends", None)
    if parent is not None and not isinstance(parent, str):
        remedy = "give the name of one JSON file"
        raise ConfigError(f"extends ({path})", f"got {parent!r}", remedy)
    below = Loaded({}, {})
    if parent is not None:
        below = read_config(find_config(parent, f"extends in {path}", path.parent), chain)
    own = _rename_keys(raw)
    # The description of the extended file does not hold for this one.
    under = {n: one for n, one in below.values.items() if n != "about" or n in own.values}
    origins = {where: one for where, one in below.origins.items() if where.split(".")[0] in under}
    origins |= {where: str(path) for where, _ in leaves(own.values)}
    renamed = {**_not_in(own.values, below.renamed), **own.renamed}
    return Loaded(merge(under, own.values), origins, {**below.no_effect, **own.no_effect}, renamed)


def _rename_keys(raw: Mapping[str, Any]) -> Loaded:
    """Return the values of a file under our keys, with the old keys and those without effect."""
    values: dict[str, Any] = {}
    no_effect: dict[str, str] = {}
    renamed: dict[str, str] = {}
    keys = dict(leaves(raw))
    for old, value in keys.items():
        new = our_name(old)
        if new == "parallel" and value == "auto":
            new = "parallel.layout"
        reason = why_no_effect(new, value)
        if reason is not None:
            no_effect |= {new: reason} if value is not None else {}
        elif new == old or old == "parallel":
            values = merge(values, _nest(new, value))
        else:
            other = new if new in keys else renamed.get(new)
            if other is not None:
                raise both_names(old, new, other)
            renamed[new] = old
            values = merge(_nest(new, value), values)
    return Loaded(values, {}, no_effect, renamed)


def _not_in(values: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, str]:
    """Return the renamed keys that `values` does not set again."""
    return {where: old for where, old in renamed.items() if where not in dict(leaves(values))}


def _nest(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return dict(value)


def leaves(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each dotted path with its value; an empty group is a leaf."""
    for name, value in values.items():
        path = f"{above}.{name}" if above else name
        if isinstance(value, Mapping) and value:
            yield from leaves(value, path)
        else:
            yield path, value


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `under` updated with `over`, group by group; lists are replaced."""
    merged = dict(under)
    for name, value in over.items():
        below = merged.get(name)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        merged[name] = merge(below, value) if both else value  # type: ignore[arg-type]
    return merged


def load(settings: type[Model], words: Sequence[str], program: str) -> tuple[Model, Loaded]:
    """Return the settings of a command from its words, with the origins of the values.

    A settings class with an `about` field also takes `--config FILE`. `--help` prints and exits. Raises
    ConfigError with every mistake on its own line.
    """
    if {"-h", "--help"} & set(split_at_dashes(words)[0]):
        print_help(help_text(settings, program.removeprefix("bert ")))
        raise SystemExit(0)
    typed = translate_words(words, settings)
    flags = parse_words(settings, typed.words, program, typed.renamed)
    config = flags.pop("config", None) if "about" in settings.model_fields else None
    path = None if config is None else find_config(config)
    files = Loaded({}, {}) if path is None else read_config(path)
    given = merge(files.values, flags)
    saves = getattr(settings, "SAVES", False) and given.get("do_training") is not False
    if path is not None and saves:
        given.setdefault("save_ckpt_path", f"checkpoints/{path.stem}")
    changed = [where for where, _ in leaves(flags) if where.split(".")[0] not in PATH_KEYS]
    if any(where in files.origins for where in changed):
        # The description of a file does not hold for a run with other values.
        given.pop("about", None)
    renamed = {**_not_in(flags, files.renamed), **typed.renamed}
    values, left_out = adapt(merge(_default_groups(settings), given), renamed, settings)
    origins = dict(files.origins)
    for where, _ in leaves(flags):
        origins = {one: o for one, o in origins.items() if not one.startswith(f"{where}.")}
        origins[where] = "--" + typed.renamed.get(where, where).replace("_", "-")
    if "command" in flags:
        origins["command"] = "after --"
    no_effect = {**files.no_effect, **typed.no_effect, **left_out}
    errors: list[ConfigError] = []
    values = _expand_paths(values, errors if getattr(settings, "OPENS_FILES", True) else None)
    loaded = Loaded(values, origins, no_effect, renamed)
    try:
        validated = validate(settings, loaded)
    except ConfigError as error:
        raise combine([*errors, error]) from None
    if errors:
        raise combine(errors)
    if files.renamed or files.no_effect:
        loaded = replace(loaded, notes=_other_defaults(validated, origins))
    return validated, loaded


def validate(settings: type[Model], loaded: Loaded) -> Model:
    """Return the frozen settings. Raises one ConfigError that lists every mistake."""
    try:
        return settings.model_validate(loaded.values, context={"origins": loaded.origins})
    except ValidationError as error:
        raise setting_errors(settings, error.errors(), loaded.origins) from error


def describe(settings: BaseModel, loaded: Loaded) -> str:
    """Return every setting with its value and origin, one on each line, as `--dry-run` prints them."""
    rows = [
        (where, json.dumps(value), origin_of(where, loaded.origins) or "default")
        for where, value in leaves(settings.model_dump(mode="json"))
    ]
    width = max(len(where) for where, _, _ in rows)
    return "\n".join(f"  {where:<{width}}  {value}  ({origin})" for where, value, origin in rows)


def _other_defaults(settings: BaseModel, origins: Mapping[str, str]) -> list[str]:
    """Return a line for each default in use that differs from the original's."""
    values = dict(leaves(settings.model_dump(mode="json")))
    return [
        f"{where} is {json.dumps(values[where])} here by default; "
        f"the default of Graphcore's example is {json.dumps(theirs)}"
        for where, theirs in DEFAULTS.items()
        if not origin_of(where, origins) and values[where] != theirs
    ]


def _default_groups(settings: type[BaseModel]) -> dict[str, Any]:
    """Return the values that a command's default groups set, so that a part of one can be changed."""
    groups = {
        name: about.default.model_dump(exclude_unset=True)
        for name, about in settings.model_fields.items()
        if isinstance(about.default, BaseModel)
    }
    return {name: values for name, values in groups.items() if values}


def _expand_paths(values: Mapping[str, Any], errors: list[ConfigError] | None) -> dict[str, Any]:
    """Expand `$DATASETS_DIR` and `~` in the settings that are paths.

    Adds an error for a variable that is not set, instead of creating a folder called $DATASETS_DIR; not for
    a path that is never opened, and never if `errors` is None.
    """
    expanded = dict(values)
    has_files = bool(values.get("train_file") and values.get("validation_file"))
    for name in PATH_KEYS:
        value = values.get(name)
        opened = name != "dataset_dir" or not (values.get("generated_dataset") or has_files)
        found = errors if opened else None
        if name == "dataset_dir" and isinstance(value, list):
            expanded[name] = [
                {**one, "path": _expand(f"{name}.{number}.path", one.get("path"), found)}
                if isinstance(one, Mapping) and "path" in one
                else _expand(f"{name}.{number}", one, found)
                for number, one in enumerate(value)
            ]
        elif name in values:
            expanded[name] = _expand(name, value, found)
    return expanded


def _expand(name: str, value: Any, errors: list[ConfigError] | None) -> Any:
    if not isinstance(value, str):
        return value
    path = os.path.expanduser(os.path.expandvars(value))
    if "$" in path and errors is not None:
        flag = name.replace("_", "-")
        where, remedy = f"{name} ({value})", f"export it or give --{flag}"
        errors.append(ConfigError(where, "the variable is not set", remedy))
    return path
