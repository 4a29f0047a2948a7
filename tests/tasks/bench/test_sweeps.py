"""The shipped sweeps: command lines of the tool, and metrics that its runs log."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

import bert_cli
from bert_cli.cli import COMMANDS
from bert_cli.config.finetune import SquadSettings
from bert_cli.config.load import leaves, load
from bert_cli.config.training import PretrainSettings

ROOT = Path(bert_cli.__file__).parents[1]
SWEEPS = sorted((ROOT / "configs" / "sweeps").glob("*.yaml"))
KINDS = {"pretrain": PretrainSettings, "squad": SquadSettings}
CONTINUOUS = {"uniform", "log_uniform_values"}


def read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def choices(about: dict[str, Any]) -> list[Any]:
    """Return the values of a parameter: all of them, or the ends of a range."""
    if "values" in about:
        return about["values"]
    assert about["distribution"] in CONTINUOUS and 0 < about["min"] < about["max"]
    return [about["min"], about["max"]]


def words_of(sweep: dict[str, Any], chosen: dict[str, Any]) -> list[str]:
    """Return the command line that wandb's agent starts, made by its own functions."""
    arguments = create_sweep_command_args(
        {"args": {name: {"value": v} for name, v in chosen.items()}}
    )
    words: list[str] = []
    for word in create_sweep_command(list(sweep["command"])):
        words += arguments[word[2:-1]] if word.startswith("${") else [word]
    return words


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("DATASETS_DIR", "/corpora")
    monkeypatch.setenv("WANDB_RUN_ID", "run1d")


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_choice_of_a_sweep_is_a_command_line_with_that_choice(path):
    sweep = read(path)
    assert path.stem == f"{sweep['command'][1]}_{sweep['method']}"
    assert sweep["metric"]["goal"] in ("minimize", "maximize")
    if sweep["method"] == "grid":
        assert all("values" in about for about in sweep["parameters"].values())
    else:
        assert sweep["run_cap"] > 1  # these do not end otherwise
    names = list(sweep["parameters"])
    for values in itertools.product(*(choices(sweep["parameters"][name]) for name in names)):
        chosen = dict(zip(names, values, strict=True))
        program, command, *words = words_of(sweep, chosen)
        assert program == sweep["program"] == "bert" and command in COMMANDS
        settings, loaded = load(KINDS[command], words, f"bert {command}")
        values_of = dict(leaves(settings.model_dump(mode="json")))
        for name, value in chosen.items():
            assert values_of[name.replace("-", "_")] == value
        assert settings.wandb.enabled and settings.save_ckpt_path == Path("runs/sweep/run1d")
        assert loaded.no_effect == {}


def test_the_metrics_of_the_sweeps_are_ones_that_runs_log():
    named = {(one["command"][1], one["method"], one["metric"]["name"]) for one in map(read, SWEEPS)}
    metrics = {"pretrain": "validation_mlm_loss", "squad": "validation_f1"}
    methods = ("grid", "random", "bayes")
    assert named == {(command, way, metrics[command]) for command in metrics for way in methods}
