"""The shipped sweeps: command lines of the tool, and metrics that its runs log."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

import bert_cli
from bert_cli.cli import COMMANDS
from bert_cli.parse.load import leaves, load

ROOT = Path(bert_cli.__file__).parents[1]
METRICS = {"pretrain": "validation_mlm_loss", "squad": "validation_f1"}
METHODS = ("grid", "random", "bayes")


def words_of(sweep: dict[str, Any], chosen: dict[str, Any]) -> list[str]:
    """Return the command line that wandb's agent starts, made by its own functions."""
    values = {name: {"value": value} for name, value in chosen.items()}
    arguments = create_sweep_command_args({"args": values})
    words: list[str] = []
    for word in create_sweep_command(list(sweep["command"])):
        words += arguments[word[2:-1]] if word.startswith("${") else [word]
    return words


@pytest.mark.parametrize(("command", "method"), [*itertools.product(METRICS, METHODS)])
def test_every_choice_of_a_sweep_is_a_command_line_with_that_choice(command, method, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("DATASETS_DIR", "/corpora")
    monkeypatch.setenv("WANDB_RUN_ID", "run1d")
    sweep = yaml.safe_load(Path("configs", "sweeps", f"{command}_{method}.yaml").read_text())
    assert (sweep["method"], sweep["metric"]["name"]) == (method, METRICS[command])
    parameters = sweep["parameters"]
    if method == "grid":
        assert all("values" in about for about in parameters.values())
    else:
        assert sweep["run_cap"] > 1  # these do not end otherwise
    # All values of a parameter, or the ends of its range.
    ranges = (about.get("values") or [about["min"], about["max"]] for about in parameters.values())
    for values in itertools.product(*ranges):
        chosen = dict(zip(parameters, values, strict=True))
        program, started, *words = words_of(sweep, chosen)
        assert program == sweep["program"] == "bert" and started == command
        settings, loaded = load(COMMANDS[command].settings_class(), words, f"bert {command}")
        values_of = dict(leaves(settings.model_dump(mode="json")))
        for name, value in chosen.items():
            assert values_of[name.replace("-", "_")] == value
        assert settings.wandb.enabled and settings.save_ckpt_path == Path("runs/sweep/run1d")
        assert loaded.no_effect == {}
