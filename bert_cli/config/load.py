"""From JSON files and flags to settings, knowing where each value came from.

A file may extend another (`"extends": "other.json"`, beside it or shipped) and then says only what
differs; flags are dotted paths in kebab case and win over files. Files and command lines of the original
load as they are: `original.py` has its names. All mistakes are reported at once, each with its origin and
the nearest valid name.
"""

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from bert_cli.config.flags import parse_flags
from bert_cli.config.help import help_of
from bert_cli.config.mistakes import mistake, origin_of, worth_saying
from bert_cli.config.original import (
    DEFAULTS,
    both_names,
    fitted,
    our_name,
    our_words,
    why_no_effect,
)
from bert_cli.errors import ConfigError, nearest
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
"""What lies among the shipped configs and is none: command lines of them with names."""


def configs_folder() -> Path:
    """The folder of the configs that come with the tool, in a checkout or an installed wheel."""
    package = Path(__file__).parents[1]
    installed = package / "_configs"
    return installed if installed.is_dir() else package.parent / "configs"


def named_configs() -> dict[str, Path]:
    """The shipped configs of runs by name; the list of benchmarks beside them is none."""
    return {p.stem: p for p in sorted(configs_folder().glob("*.json")) if p.name != BENCHMARKS}


def find_config(name: str, given_as: str = "--config", folder: Path = Path()) -> Path:
    """A path, from `folder` on, as it is; else a shipped config of that name.

    Raises ConfigError with the nearest file beside it or shipped one, or that lists the shipped ones.
    """
    path = folder / Path(os.path.expandvars(name)).expanduser()
    if path.is_file():
        return path
    known = named_configs()
    if name.removesuffix(".json") in known:
        return known[name.removesuffix(".json")]
    beside = [file.name for file in sorted(path.parent.glob("*.json"))]
    here = nearest(Path(name).name, beside)
    near = str(Path(name).with_name(here)) if here else nearest(Path(name).stem, known)
    hint = f"did you mean {near!r}?" if near else f"shipped configs: {', '.join(known)}"
    raise ConfigError(f"{given_as} ({name}): no such file; {hint}")


@dataclass(frozen=True)
class Loaded:
    """What was asked for, before it is validated."""

    values: Mapping[str, Any]
    origins: Mapping[str, str]
    """Dotted leaf -> file or flag that set it; what is absent here is a default."""
    no_effect: Mapping[str, str] = field(default_factory=dict)
    """Dotted key that was accepted and does nothing -> why."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Dotted key -> the old name that a file or flag has for it."""
    notes: Sequence[str] = ()
    """Where a config of the original means other values than ours are by default, a line each."""


def describe(settings: BaseModel, loaded: Loaded) -> str:
    """Every setting with its value and origin, a line each: what `--dry-run` prints first."""
    rows = [
        (where, json.dumps(value), origin_of(where, loaded.origins) or "default")
        for where, value in leaves(settings.model_dump(mode="json"))
    ]
    width = max(len(where) for where, _, _ in rows)
    return "\n".join(f"  {where:<{width}}  {value}  ({origin})" for where, value, origin in rows)


def leaves(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Each dotted path with its value; an empty group counts as a leaf."""
    for name, value in values.items():
        path = f"{above}.{name}" if above else name
        if isinstance(value, Mapping) and value:
            yield from leaves(value, path)
        else:
            yield path, value


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `under`, group by group; a list is replaced whole."""
    merged = dict(under)
    for name, value in over.items():
        below = merged.get(name)
        merged[name] = (
            merge(below, value)
            if isinstance(below, Mapping) and isinstance(value, Mapping)
            else value
        )
    return merged


def read_config(path: Path) -> Loaded:
    """A JSON file with all it extends, in our names.

    Raises ConfigError for a file that is absent, is not a JSON object, or extends itself.
    """
    return _read_config(path, ())


def _read_config(path: Path, extending: tuple[Path, ...]) -> Loaded:
    chain = (*extending, path.resolve())
    if path.resolve() in extending:
        raise ConfigError(
            f"extends ({' -> '.join(p.name for p in chain)}): a file extends itself; break the circle"
        )
    raw = read_json(path, dict[str, Any], ConfigError, "a config is one JSON object {...}")
    dotted = next((name for name in raw if "." in name), None)
    if dotted is not None:
        raise ConfigError(f"{dotted} ({path}): a file nests its settings; write {{...: {{...}}}}")
    parent = raw.pop("extends", None)
    if parent is not None and not isinstance(parent, str):
        raise ConfigError(f"extends ({path}): got {parent!r}; give the name of one JSON file")
    below = Loaded({}, {})
    if parent is not None:
        below = _read_config(find_config(parent, f"extends in {path}", path.parent), chain)
    ours = _in_our_names(raw)
    # What the other file says of itself is not true of this one.
    under = {n: one for n, one in below.values.items() if n != "about" or n in ours.values}
    origins = {where: one for where, one in below.origins.items() if where.split(".")[0] in under}
    origins |= {where: str(path) for where, _ in leaves(ours.values)}
    renamed = {**_not_in(ours.values, below.renamed), **ours.renamed}
    return Loaded(
        merge(under, ours.values), origins, {**below.no_effect, **ours.no_effect}, renamed
    )


def _not_in(over: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, str]:
    """Return our key -> old name without the keys that `over` sets anew."""
    return {where: old for where, old in renamed.items() if where not in dict(leaves(over))}


def _in_our_names(raw: Mapping[str, Any]) -> Loaded:
    """Our names for a file's keys, which of them are old, and what has no effect."""
    values: dict[str, Any] = {}
    no_effect: dict[str, str] = {}
    renamed: dict[str, str] = {}
    given = dict(leaves(raw))
    for old, value in given.items():
        where = our_name(old)
        if where == "parallel" and value == "auto":
            where = "parallel.layout"
        reason = why_no_effect(where, value)
        if reason is not None:
            no_effect |= {where: reason} if value is not None else {}
            continue
        if where != old and old != "parallel":
            twice = where if where in given else renamed.get(where)
            if twice is not None:
                raise both_names(old, where, twice)
            renamed[where] = old
            values = merge(_nested(where, value), values)
        else:
            values = merge(values, _nested(where, value))
    return Loaded(values, {}, no_effect, renamed)


def _nested(where: str, value: Any) -> dict[str, Any]:
    for name in reversed(where.split(".")):
        value = {name: value}
    return dict(value)


def load(settings: type[Model], arguments: Sequence[str], program: str) -> tuple[Model, Loaded]:
    """Settings of a command from its arguments, and where each came from.

    A settings class with an `about` field also takes `--config FILE`. `--help` prints and exits. Raises
    ConfigError with every mistake on a line of its own.
    """
    if {"-h", "--help"} & set(arguments):
        print_help(help_of(settings, program.removeprefix("bert ")))
        raise SystemExit(0)
    files, folder, rest = _files_of(settings, arguments)
    words, unused, old_flags = (
        our_words(rest, settings) if "about" in settings.model_fields else (rest, {}, {})
    )
    flags = parse_flags(settings, words, program, old_flags)
    asked = merge(files.values, flags)
    if folder and asked.get("do_training") is not False:
        asked.setdefault("save_ckpt_path", folder)
    if any(
        where.split(".")[0] not in PATH_KEYS and where in files.origins
        for where, _ in leaves(flags)
    ):
        # What the file says of itself is not true of a run with other values.
        asked.pop("about", None)
    renamed = {**_not_in(flags, files.renamed), **old_flags}
    given, left_out = fitted(merge(_default_groups(settings), asked), renamed, settings)
    unset: ConfigError | None = None
    try:
        values = _expand_paths(given, getattr(settings, "OPENS_FILES", True))
    except ConfigError as error:
        values, unset = given, error
    origins = dict(files.origins)
    for where, _ in leaves(flags):
        origins = {
            path: origin for path, origin in origins.items() if not path.startswith(f"{where}.")
        }
        origins[where] = "--" + old_flags.get(where, where).replace("_", "-")
    loaded = Loaded(values, origins, {**files.no_effect, **unused, **left_out}, renamed)
    try:
        validated = validate(settings, loaded)
    except ConfigError as error:
        raise error if unset is None else ConfigError(f"{unset}\n{error}") from None
    if unset is not None:
        raise unset
    is_original = files.renamed or files.no_effect
    return validated, replace(
        loaded, notes=_other_defaults(validated, origins) if is_original else ()
    )


def _files_of(settings: type[BaseModel], arguments: Sequence[str]) -> tuple[Loaded, str, list[str]]:
    """The config and what it extends, the folder of a run that names none, and the other words."""
    if "about" not in settings.model_fields:
        return Loaded({}, {}), "", list(arguments)
    config = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    config.add_argument("--config")
    try:
        known, rest = config.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise ConfigError(f"--config: {error.message}; give the path of a JSON file") from error
    if known.config is None:
        return Loaded({}, {}), "", rest
    path = find_config(known.config)
    folder = f"checkpoints/{path.stem}" if getattr(settings, "SAVES", False) else ""
    return read_config(path), folder, rest


def _other_defaults(settings: BaseModel, origins: Mapping[str, str]) -> list[str]:
    """Where settings have our default and the original has another one, a line each."""
    ours = dict(leaves(settings.model_dump(mode="json")))
    return [
        f"{where} is {json.dumps(ours[where])} here by default; "
        f"the default of Graphcore's example is {json.dumps(theirs)}"
        for where, theirs in DEFAULTS.items()
        if not origin_of(where, origins) and ours[where] != theirs
    ]


def _default_groups(settings: type[BaseModel]) -> dict[str, Any]:
    """What a command's groups hold by default beyond their class, so that a part of one can be changed."""
    groups = {
        name: about.default.model_dump(exclude_unset=True)
        for name, about in settings.model_fields.items()
        if isinstance(about.default, BaseModel)
    }
    return {name: values for name, values in groups.items() if values}


def validate(settings: type[Model], loaded: Loaded) -> Model:
    """The frozen settings, or one ConfigError that lists every mistake."""
    try:
        return settings.model_validate(loaded.values, context={"origins": loaded.origins})
    except ValidationError as error:
        items = worth_saying(error.errors())
        lines = [mistake(settings, item, loaded.origins) for item in items]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from error


def _expand_paths(values: Mapping[str, Any], opens_files: bool) -> dict[str, Any]:
    """`$DATASETS_DIR` and `~` in the settings that are paths.

    Raises ConfigError for a variable that is not set, instead of making a folder called
    $DATASETS_DIR; but not for a path that nobody will open.
    """
    expanded = dict(values)
    for name in PATH_KEYS:
        value = expanded.get(name)
        instead = bool(values.get("train_file") and values.get("validation_file"))
        unread = name == "dataset_dir" and (values.get("generated_dataset") or instead)
        if isinstance(value, str):
            expanded[name] = _expanded(name, value, opens_files and not unread)
        elif name == "dataset_dir" and isinstance(value, list):
            expanded[name] = [
                _expanded_corpus(f"{name}.{number}", one, opens_files and not unread)
                for number, one in enumerate(value)
            ]
    return expanded


def _expanded_corpus(name: str, value: Any, is_opened: bool) -> Any:
    """One of several corpora: a path, or a path with a weight."""
    if isinstance(value, str):
        return _expanded(name, value, is_opened)
    if isinstance(value, Mapping) and isinstance(value.get("path"), str):
        return {**value, "path": _expanded(f"{name}.path", value["path"], is_opened)}
    return value


def _expanded(name: str, value: str, is_opened: bool) -> str:
    path = os.path.expanduser(os.path.expandvars(value))
    if "$" in path and is_opened:
        raise ConfigError(
            f"{name} ({value}): the variable is not set; export it or give --{name.replace('_', '-')}"
        )
    return path
