"""`bert evaluate`: the held-out metrics of a run's checkpoint are those that the run has computed itself."""

import json

import pytest
import tensorflow  # noqa: F401 (before conftest.py cuts the CPU into devices)
from support.tiny_models import metrics_of, write_model, write_records

from bert_cli.cli import main

TEXT = ["The good plot was not very fine.", "Bad music is very bad, and it is not fine."] * 40
FLAGS = {
    "max-seq-length": 32,
    "max-predictions-per-seq": 5,
    "global-batch.micro-batch-size": 4,
    "global-batch.replicas": 2,
    "total-num-train-samples": 24,
    "evaluate-every-steps": 1,
    "checkpoint-every-steps": 1,
    "evaluation-examples": 30,
    "optimizer-opts.name": "AdamW",
    "optimizer-opts.learning-rate.max-learning-rate": 0.003,
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A run of three steps on two replicas, with the scores and the checkpoint of each."""
    home = tmp_path_factory.mktemp("evaluate")
    write_model(home / "model")
    write_records(home / "records", TEXT, home / "model", masking="dynamic")
    paths = {"dataset-dir": "records", "validation-dir": "records", "save-ckpt-path": "run"}
    flags = FLAGS | {name: home / path for name, path in paths.items()}
    flags["pretrained-ckpt-path"] = home / "model"
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    assert main(["pretrain", *words]) == 0
    return home


@pytest.mark.parametrize("step", [2, 3])
def test_a_checkpoint_has_the_scores_that_its_run_computed(home, step, tmp_path, capsys):
    run = home / "run"
    model = run if step == 3 else run / "step_00000002"
    file = tmp_path / "scores.json"
    assert main(["evaluate", str(model), "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    written = json.loads(file.read_text())
    (metrics,) = [row for row in metrics_of(run) if row["step"] == step]
    start = "validation_"
    scores = {name.removeprefix(start): n for name, n in metrics.items() if name.startswith(start)}
    assert written["scores"] == scores and {"mlm_loss", "bits_per_byte"} <= scores.keys()
    assert written["examples"] == 30 and written["model"].endswith(f"step_0000000{step}")
    assert f"{scores['mlm_loss']:.6f}" in printed and "first 30 examples" in printed


def test_other_records_are_scored_and_their_mistakes_have_the_name_of_the_flag(home, capsys):
    run = str(home / "run")
    records = ["--dataset-dir", str(home / "records")]
    assert main(["evaluate", run, *records, "--examples", "7"]) == 0
    assert "first 7 examples" in capsys.readouterr().out
    assert main(["evaluate", run, "--dataset-dir", str(home / "absent")]) == 3
    assert f"dataset_dir ({home / 'absent'}): no such folder" in capsys.readouterr().err


def test_what_is_no_run_of_pretrain_is_refused(home, tmp_path, capsys):
    assert main(["evaluate", str(home / "model")]) == 2
    assert "is no run of pretrain; give a run of `bert pretrain`" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path)]) == 4
    assert "has neither a checkpoint nor a model" in capsys.readouterr().err
