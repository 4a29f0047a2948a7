"""`bert bench pretrain` and `squad`: synthetic and real examples, layouts and processes."""

import json
import signal
import subprocess
import tempfile

import pytest
from support.bert import run_bert, start_bert

from bert_cli.cli import main

# Before the first run, so that the CPU is split into logical devices for all of them.
pytest.importorskip("tensorflow")
from bert_cli.tasks.bench import measure, run

STEPS, WARMUP = 3, 1  # an odd number has an exact median
# Sizes that differ from one another, for the operations that `test_measure.py` counts.
SMALL = {
    "bert_config": {
        "vocab_size": 70, "hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 20,
        "max_position_embeddings": 64,
    },
    "max_seq_length": 40,
    "max_predictions_per_seq": 5,
    "global_batch": {"micro_batch_size": 4, "grad_acc_steps_per_replica": 2},
    "optimizer_opts": {"name": "LAMB", "learning_rate": {"max_learning_rate": 0.01}},
    # Fewer steps than are measured: the measurement extends the run.
    "total_num_train_samples": 8,
}  # fmt: skip
SQUAD = {name: SMALL[name] for name in ("bert_config", "optimizer_opts", "global_batch")}
SQUAD |= {"max_seq_length": 48, "doc_stride": 8, "max_query_length": 8}
FRACTIONS = ("input_wait", "forward_backward", "reduction", "optimizer", "other")
ENDINGS = {
    "per_second": ("examples", "tokens", "positions", "flops", "matmul_flops"),
    "fraction": FRACTIONS,
    "bytes": ("peak_memory",),
    "seconds": ("step",),
}
KEYS = {
    *(f"{name}_{ending}" for ending, names in ENDINGS.items() for name in names),
    *("flops_utilisation", "steps", "warmup_steps", "skipped_steps", "what", "input"),
    *("examples_per_step", "micro_batch_size", "micro_batches_per_step", "precision"),
    *("machine", "versions", "settings"),
}


@pytest.fixture(autouse=True)
def short_products(monkeypatch):
    """Measure products once instead of in 7 rounds of 50 ms."""
    monkeypatch.setattr(measure, "ROUNDS", 1)
    monkeypatch.setattr(measure, "ROUND_SECONDS", 1e-3)


def words(folder, *flags, config=SMALL):
    (folder / "config.json").write_text(json.dumps({"generated_dataset": True, **config}))
    line = ["--config", str(folder / "config.json"), "--json", str(folder / "metrics.json")]
    pace = ["--steps", str(STEPS), "--warmup-steps", str(WARMUP)]
    return ["bench", "pretrain", *line, *pace, *flags]


def check(metrics):
    """Check what holds for every measurement of synthetic examples, whatever the speed of the machine."""
    assert set(metrics) == KEYS
    assert metrics["steps"] == STEPS and metrics["warmup_steps"] == WARMUP
    fractions = [metrics[f"{name}_fraction"] for name in FRACTIONS]
    assert sum(fractions) == pytest.approx(1.0, abs=1e-9) and min(fractions) > -1e-9
    assert metrics["forward_backward_fraction"] > 0.0 and metrics["optimizer_fraction"] > 0.0
    step = metrics["step_seconds"]
    assert 0.0 < step["low"] <= step["median"] <= step["high"]
    examples = metrics["examples_per_second"] * step["median"]
    # All steps have the same number of synthetic examples, so rate and median step agree.
    assert examples == pytest.approx(metrics["examples_per_step"], rel=1e-6)
    assert metrics["peak_memory_bytes"] > 0
    assert metrics["machine"]["cores"] >= 1 and "tensorflow" in metrics["versions"]


def test_a_measurement_of_pre_training_leaves_only_its_metrics(tmp_path, capsys, monkeypatch):
    disk = tmp_path / "disk"
    disk.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    monkeypatch.setattr(measure.machine, "resident_bytes", lambda: (10**9, 3 * 10**9))
    assert main(words(tmp_path)) == 0
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    check(metrics)
    assert metrics["input"] == "synthetic"
    assert list(disk.iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "metrics.json", "disk"}
    out = capsys.readouterr().out
    assert "3.0 GB  peak" in out and metrics["skipped_steps"] == 0
    # The time of a part is its fraction of the median step.
    metrics |= {"step_seconds": {"low": 1, "median": 2, "high": 8}, "other_fraction": 0.5}
    rows = run._rows(metrics | {"steps": 1, "skipped_steps": 2})
    assert rows[0] == ("step", "2 s", "median of 1 step; quartiles 1 s and 8 s")
    assert ("other", "50.0%", "1 s of a step") in rows and rows[5][:2] == ("skipped steps", "2")


def test_packs_count_as_their_sequences_and_json_on_standard_output_is_alone(tmp_path, bert):
    line = words(tmp_path, config={**SMALL, "max_sequences_per_pack": 3})
    printed = bert(*line, "--json", "-")
    assert "measured steps" in printed.err
    metrics = json.loads(printed.out)
    packs = metrics["positions_per_second"] / 40
    assert 1.2 * packs < metrics["examples_per_second"] < 3.0 * packs


@pytest.mark.slow
def test_a_request_to_stop_ends_a_measurement_without_metrics(tmp_path):
    line = [*words(tmp_path), "--steps", "1000000"]
    with start_bert(*line, stdout=subprocess.PIPE) as process:
        for printed in process.stdout:
            if "measured steps" in printed:
                process.send_signal(signal.SIGTERM)
        assert process.wait() == 130
    assert "nothing was measured" in printed
    assert not (tmp_path / "metrics.json").exists()


@pytest.mark.slow
def test_two_processes_with_a_pipeline_each_are_measured_and_rank_0_prints(tmp_path):
    batch = {"micro_batch_size": 2, "replicas": 2, "grad_acc_steps_per_replica": 2}
    stages = [["emb", "hid"], ["hid", "hid", "enc_out"], ["pool", "heads"]]
    parallel = {"pipeline_stages": stages, "pipeline_device_mapping": [0, 1, 0]}
    parallel["replicated_tensor_sharding"] = True
    config = {**SMALL, "global_batch": batch, "parallel": parallel}
    done = run_bert("launch", "--processes", "2", "--", *words(tmp_path, config=config))
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    check(metrics)
    described = metrics["machine"]
    names = ("processes", "replicas", "devices_of_a_replica")
    assert [described[name] for name in names] == [2, 2, 2]
    assert metrics["reduction_fraction"] > 0.0
    assert "[1] metric" not in done.stdout and "[0] metric" in done.stdout
