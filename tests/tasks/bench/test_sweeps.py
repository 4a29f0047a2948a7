"""The shipped sweeps: command lines of the tool, and metrics that its runs log."""

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.bert import run_bert
from support.tiny_models import PIECES, write_model, write_questions
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

import bert_cli
from bert_cli.cli import COMMANDS
from bert_cli.config.finetune import SquadSettings
from bert_cli.config.load import leaves, load
from bert_cli.config.training import PretrainSettings

ROOT = Path(bert_cli.__file__).parents[1]
SWEEPS = sorted((ROOT / "configs" / "sweeps").glob("*.yaml"))
KINDS = {"pretrain": PretrainSettings, "squad": SquadSettings}
KEYS = {"program", "command", "method", "metric", "parameters", "run_cap", "early_terminate"}
CONTINUOUS = {"uniform", "log_uniform_values"}
TINY_SQUAD = {
    "max-seq-length": 48, "doc-stride": 16, "max-query-length": 12, "num-epochs": 1, "precision": "float32",
    "parallel.pipeline-stages": '[["emb", "hid*2", "qa_head"]]', "parallel.pipeline-device-mapping": "[0]",
    "global-batch.replicas": 1,
    "bert-config.hidden-size": 32, "bert-config.num-hidden-layers": 2, "bert-config.num-attention-heads": 4,
    "bert-config.intermediate-size": 64, "bert-config.max-position-embeddings": 64,
    "bert-config.vocab-size": len(PIECES),
}  # fmt: skip


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
    assert set(sweep) <= KEYS and path.stem == f"{sweep['command'][1]}_{sweep['method']}"
    assert sweep["metric"]["goal"] in ("minimize", "maximize")
    assert sweep["method"] == "grid" or sweep["run_cap"] > 1  # these do not end otherwise
    if sweep["method"] == "grid":
        assert all("values" in about for about in sweep["parameters"].values())
    assert f"configs/sweeps/{path.name}" in path.read_text()
    names = list(sweep["parameters"])
    assert any("learning-rate" in name for name in names) and any("batch" in name for name in names)
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


def test_the_metrics_of_the_sweeps_are_ones_that_runs_log(tmp_path):
    sweeps = [read(path) for path in SWEEPS]
    named = {(one["command"][1], one["method"], one["metric"]["name"]) for one in sweeps}
    metrics = {"pretrain": "validation_mlm_loss", "squad": "validation_f1"}
    methods = ("grid", "random", "bayes")
    assert named == {(command, way, metrics[command]) for command in metrics for way in methods}
    model = write_model(tmp_path / "model")
    write_questions(tmp_path / "train-v1.1.json", 8, 1)
    write_questions(tmp_path / "dev-v1.1.json", 4, 2)
    flags = {
        **TINY_SQUAD,
        "pretrained-ckpt-path": model,
        "dataset-dir": tmp_path,
        "cache-dir": tmp_path / "cache",
        "save-ckpt-path": tmp_path / "$WANDB_RUN_ID",
    }
    sweep = read(ROOT / "configs" / "sweeps" / "squad_bayes.yaml")
    chosen = {name: choices(about)[0] for name, about in sweep["parameters"].items()}
    chosen["global-batch.grad-acc-steps-per-replica"] = 1
    words = [word for word in words_of(sweep, chosen)[1:] if word != "--parallel.layout=auto"]
    words = [word for word in words if word.partition("=")[0][2:] not in flags]
    words += [f"--{name}={value}" for name, value in flags.items()]
    names = {"WANDB_MODE": "offline", "WANDB_RUN_ID": "s4mple1d"}
    done = run_bert(*words, env={**os.environ, **names})
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "s4mple1d" / "wandb_id").read_text() == "s4mple1d"
    lines = (tmp_path / "s4mple1d" / "metrics.jsonl").read_text().splitlines()
    assert metrics["squad"] in {name for line in lines for name in json.loads(line)}
