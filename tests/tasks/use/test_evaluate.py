"""`bert evaluate`: the held-out metrics of a run's checkpoint are those that the run has computed itself."""

import json

import pytest
import tensorflow  # noqa: F401 (before conftest.py cuts the CPU into devices)
from support.tiny_models import metrics_of


@pytest.mark.parametrize("step", [5, 6])
def test_a_checkpoint_has_the_scores_that_its_run_computed(
    pretrained, step, tmp_path, bert, monkeypatch
):
    # A job of several processes, of which a run's rank 1 prints nothing; `evaluate` is a process of its own.
    group = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(group))
    run = pretrained / "run"
    model = run if step == 6 else run / "step_00000005"
    file = tmp_path / "scores.json"
    printed = bert("evaluate", model, "--json", file).out
    written = json.loads(file.read_text())
    (metrics,) = [row for row in metrics_of(run) if row["step"] == step]
    start = "validation_"
    scores = {name.removeprefix(start): n for name, n in metrics.items() if name.startswith(start)}
    assert written["scores"] == scores and {"mlm_loss", "bits_per_byte"} <= scores.keys()
    assert written["examples"] == 30 and written["model"].endswith(f"step_0000000{step}")
    assert f"{scores['mlm_loss']:.6f}" in printed and "first 30 examples" in printed
