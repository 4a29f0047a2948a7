"""From JSON files and flags to settings, knowing where each value came from.

A file may extend another (`"extends": "other.json"`, beside it or shipped) and then says only what
differs; flags are dotted paths in kebab case and win over files. Old files load as they are: `RENAMES`
turns the original's keys into ours, `NO_EFFECT` names what only its hardware had. All mistakes are
reported at once, each with its origin and the nearest valid name.
"""

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from bert_cli.config.help import LEVELS, help_of
from bert_cli.config.mistakes import (
    flag_mistake,
    is_positional,
    mistake,
    origin_of,
    worth_saying,
)
from bert_cli.config.shipped import find_config
from bert_cli.config.terminal import tell
from bert_cli.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)

# Old dotted key -> ours. A rename of a group moves everything under it.
RENAMES = {
    "ipu_config": "parallel",
    "enable_recomputation": "parallel.recompute",
    "parallel.enable_recomputation": "parallel.recompute",
    "optimizer_state_offchip": "parallel.optimizer_state_offload",
    "parallel.optimizer_state_offchip": "parallel.optimizer_state_offload",
    "replicated_tensor_sharding": "parallel.replicated_tensor_sharding",
    "global_batches_per_log": "log_every_steps",
    "enable_wandb": "wandb.enabled",
    "log_to_wandb": "wandb.enabled",
    "wandb_tags": "wandb.tags",
    "wandb_name": "wandb.project",
    "name": "wandb.name",
}
# Last part of a key -> why it is accepted and does nothing; said once, by name, with the plan.
NO_EFFECT = {
    "matmul_available_memory_proportion_per_pipeline_stage": "only the original's hardware has it",
    "matmul_partials_type": "only the original's hardware has it",
    "min_remote_tensor_size": "only the original's hardware has it",
    "use_outlining": "only the original's hardware has it",
    "replace_layers": "only the original's hardware has it",
    "fp_exceptions": "only the original's hardware has it",
    "show_accuracy": "accuracy is always shown",
}
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
)


@dataclass(frozen=True)
class Loaded:
    """What was asked for, before it is validated."""

    values: Mapping[str, Any]
    origins: Mapping[str, str]
    """Dotted leaf -> file or flag that set it; what is absent here is a default."""
    no_effect: Mapping[str, str] = field(default_factory=dict)
    """Dotted key that was accepted and does nothing -> why."""


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
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    except ValueError as error:
        raise ConfigError(
            f"{path}: is not JSON, which a config is ({error}); mend that line"
        ) from error
    if not isinstance(raw, dict):
        raise ConfigError(
            f"{path}: holds a {type(raw).__name__}; a config is one JSON object {{...}}"
        )
    parent = raw.pop("extends", None)
    if parent is not None and not isinstance(parent, str):
        raise ConfigError(f"extends ({path}): got {parent!r}; give the name of one JSON file")
    below = Loaded({}, {})
    if parent is not None:
        below = _read_config(find_config(parent, f"extends in {path}", path.parent), chain)
    renamed, no_effect = _in_our_names(raw)
    # What the other file says of itself is not true of this one.
    under = {name: one for name, one in below.values.items() if name != "about" or name in renamed}
    origins = {where: one for where, one in below.origins.items() if where.split(".")[0] in under}
    origins |= {where: str(path) for where, _ in leaves(renamed)}
    return Loaded(merge(under, renamed), origins, {**below.no_effect, **no_effect})


def _in_our_names(raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    values: dict[str, Any] = dict(raw)
    if values.get("parallel") == "auto":
        values["parallel"] = {"layout": "auto"}
    # Groups first, so that a key inside a renamed group is found under its new place.
    for old in sorted(RENAMES, key=lambda key: key.count(".")):
        found, value = _take(values, old)
        if found:
            moved = _nested(RENAMES[old], value)
            twice = [where for where, _ in leaves(moved) if where in dict(leaves(values))]
            if twice:
                raise ConfigError(
                    f"{old}: is the old name of {twice[0]}, which is given too; keep one of them"
                )
            values = merge(moved, values)
    no_effect: dict[str, str] = {}
    for where, _ in list(leaves(values)):
        name = where.rpartition(".")[2]
        if name in NO_EFFECT:
            _, value = _take(values, where)
            if value not in (False, None):
                no_effect[where] = NO_EFFECT[name]
    return values, no_effect


def _take(values: dict[str, Any], where: str) -> tuple[bool, Any]:
    first, _, rest = where.partition(".")
    if first not in values:
        return False, None
    if not rest:
        return True, values.pop(first)
    if not isinstance(values[first], Mapping):
        return False, None
    values[first] = dict(values[first])
    return _take(values[first], rest)


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
        tell(help_of(settings, program.removeprefix("bert ")))
        raise SystemExit(0)
    files = Loaded({}, {})
    rest = list(arguments)
    if "about" in settings.model_fields:
        config = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        config.add_argument("--config")
        try:
            known, rest = config.parse_known_args(rest)
        except argparse.ArgumentError as error:
            raise ConfigError(f"--config: {error.message}; give the path of a JSON file") from error
        if known.config is not None:
            files = read_config(find_config(known.config))
    flags = parse_flags(settings, rest, program)
    given = merge(_default_groups(settings), merge(files.values, flags))
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
        origins[where] = "--" + where.replace("_", "-")
    loaded = Loaded(values, origins, files.no_effect)
    try:
        validated = validate(settings, loaded)
    except ConfigError as error:
        raise error if unset is None else ConfigError(f"{unset}\n{error}") from None
    if unset is not None:
        raise unset
    return validated, loaded


def _default_groups(settings: type[BaseModel]) -> dict[str, Any]:
    """What a command's groups hold by default beyond their class, so that a part of one can be changed."""
    groups = {
        name: about.default.model_dump(exclude_unset=True)
        for name, about in settings.model_fields.items()
        if isinstance(about.default, BaseModel)
    }
    return {name: values for name, values in groups.items() if values}


def parse_flags(
    settings: type[BaseModel], arguments: Sequence[str], program: str
) -> dict[str, Any]:
    """The values that flags and positional paths give, nested like the settings.

    Raises ConfigError for a flag that does not exist, with the nearest one that does.
    """
    # 0.2 s to import: only when a command's arguments are read.
    from pydantic_settings import BaseSettings, CliSettingsSource, SettingsError

    described = type(settings.__name__, (settings, BaseSettings), {"__doc__": settings.__doc__})
    try:
        source: Any = CliSettingsSource(
            described,
            cli_prog_name=program,
            cli_parse_args=_words_first(settings, arguments),
            cli_kebab_case=True,
            cli_implicit_flags=True,
            cli_hide_none_type=True,
            cli_avoid_json=True,
            cli_enforce_required=False,
            cli_exit_on_error=False,
        )
        given = source()
    except SettingsError as error:
        raise ConfigError(flag_mistake(settings, str(error), program)) from error
    return _without_null_lists(given)


def _without_null_lists(given: Mapping[str, Any]) -> dict[str, Any]:
    """What flags give; `null` for a list is none, as in a file, and no list that holds it."""
    return {
        name: _without_null_lists(value)
        if isinstance(value, Mapping)
        else None
        if value == [None]
        else value
        for name, value in given.items()
    }


def log_level_of(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The level that `--log-level` gives, wherever it stands, and the other words; empty where it is not given.

    Raises ConfigError for a level that there is not.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--log-level", choices=LEVELS, default="")
    try:
        found, rest = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        known = ", ".join(LEVELS)
        raise ConfigError(f"--log-level: takes one of {known}; give one of them") from error
    return found.log_level, rest


def _words_first(settings: type[BaseModel], arguments: Sequence[str]) -> list[str]:
    """Positional arguments before flags where their number is open: argparse ends them at the first flag."""
    fields = settings.model_fields
    places = [about for name, about in fields.items() if is_positional(settings, name)]
    if not any(not about.is_required() or "list[" in str(about.annotation) for about in places):
        return list(arguments)
    switches = set()
    for name, about in fields.items():
        if about.annotation is bool:
            switches |= {f"--{name.replace('_', '-')}", f"--no-{name.replace('_', '-')}"}
    words, flags, rest = [], [], list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            words.append(word)
            continue
        flags.append(word)
        if "=" not in word and word not in switches and rest:
            flags.append(rest.pop(0))
    return [*words, *flags]


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
