"""`bert bench pretrain` and `squad`: synthetic and real examples, layouts and processes."""

import json
import signal
import subprocess
from unittest.mock import MagicMock

import numpy as np
import pytest
from support.bert import run_bert, start_bert
from support.tiny_models import OTHERS, PIECES, write_model, write_questions

from bert_cli.cli import main
from bert_cli.optim.schedule import LossScale
from bert_cli.train.loop import SavedValue, State

# Before the first run, so that the CPU is split into logical devices for all of them.
pytest.importorskip("tensorflow")
from bert_cli.tasks.bench import measure

STEPS, WARMUP = 3, 1  # an odd number has an exact median
SMALL = {
    "bert_config": {
        "vocab_size": 60,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 64,
    },
    "max_seq_length": 32,
    "max_predictions_per_seq": 4,
    "global_batch": {"micro_batch_size": 4, "grad_acc_steps_per_replica": 2},
    "optimizer_opts": {"name": "LAMB", "learning_rate": {"max_learning_rate": 0.01}},
    # Fewer steps than are measured: the measurement extends the run.
    "total_num_train_samples": 8,
}
SQUAD = {
    **{name: SMALL[name] for name in ("optimizer_opts", "global_batch")},
    "max_seq_length": 64,
    "doc_stride": 16,
    "max_query_length": 8,
}
STAGES = {
    "pipeline_stages": [["emb", "hid"], ["hid", "enc_out"], ["pool", "heads"]],
    "pipeline_device_mapping": [0, 1, 0],
}
SHARES = ("input_wait", "forward_backward", "reduction", "optimizer", "other")
KEYS = {
    *(f"{name}_per_second" for name in ("examples", "tokens", "places", "flops", "matmul_flops")),
    *(f"{name}_share" for name in SHARES),
    *(f"{name}_bytes" for name in ("peak_memory", "memory_growth", "host_peak_memory")),
    *(f"{name}_seconds" for name in ("checkpoint_wait", "checkpoint_write", "step", "start")),
    *("flops_utilisation", "steps", "warmup_steps", "skipped_steps", "what", "input"),
    *("examples_per_step", "micro_batch_size", "micro_batches_per_step", "precision"),
    *("checkpoint_every_minutes", "machine", "versions", "settings"),
}


@pytest.fixture(autouse=True)
def short_products(monkeypatch):
    """Measure products once instead of in 7 rounds of 50 ms."""
    monkeypatch.setattr(measure, "ROUNDS", 1)
    monkeypatch.setattr(measure, "ROUND_SECONDS", 1e-3)


def words(folder, kind, *flags, config=SMALL):
    (folder / "config.json").write_text(json.dumps(config))
    line = ["--config", str(folder / "config.json"), "--json", str(folder / "figures.json")]
    pace = ["--steps", str(STEPS), "--warmup-steps", str(WARMUP)]
    return ["bench", kind, *line, *pace, *flags]


def measured(folder, kind, *flags, config=SMALL):
    assert main(words(folder, kind, *flags, config=config)) == 0
    metrics = json.loads((folder / "figures.json").read_text())
    assert set(metrics) == KEYS
    return metrics


def check(metrics):
    """Check what holds for every measurement of synthetic examples, whatever the speed of the machine."""
    assert metrics["steps"] == STEPS and metrics["warmup_steps"] == WARMUP
    shares = [metrics[f"{name}_share"] for name in SHARES]
    assert sum(shares) == pytest.approx(1.0, abs=1e-9) and min(shares) > -1e-9
    assert metrics["forward_backward_share"] > 0.0 and metrics["optimizer_share"] > 0.0
    step = metrics["step_seconds"]
    assert 0.0 < step["low"] <= step["median"] <= step["high"]
    examples = metrics["examples_per_second"] * step["median"]
    # All steps have the same number of synthetic examples, so rate and median step agree.
    assert examples == pytest.approx(metrics["examples_per_step"], rel=1e-6)
    ratio = metrics["flops_per_second"] / metrics["matmul_flops_per_second"]
    assert metrics["flops_utilisation"] == pytest.approx(ratio)
    start = metrics["start_seconds"]
    parts = {"python_and_settings", "imports", "devices", "building", "tracing", "first_step"}
    assert set(start) == {*parts, "total"} and 0.0 < start["python_and_settings"] < 24 * 3600
    assert start["total"] == pytest.approx(sum(start[name] for name in parts))
    assert metrics["peak_memory_bytes"] > metrics["memory_growth_bytes"] >= 0
    assert metrics["machine"]["cores"] >= 1 and "tensorflow" in metrics["versions"]


def test_a_measurement_of_pre_training_leaves_only_its_metrics(tmp_path, capsys):
    disk = tmp_path / "disk"
    metrics = measured(tmp_path, "pretrain", "--checkpoint-dir", str(disk))
    check(metrics)
    assert metrics["input"] == "made up"
    assert min(metrics["checkpoint_wait_seconds"], metrics["checkpoint_write_seconds"]) > 0.0
    assert list(disk.iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "figures.json", "disk"}
    out = capsys.readouterr().out
    for name in ("examples/s", "model FLOPs utilisation", "input wait", "tracing", "checkpoint"):
        assert name in out


def test_packs_count_as_their_sequences_and_json_on_standard_output_is_alone(tmp_path, capsys):
    config = {**SMALL, "max_sequences_per_pack": 3}
    line = words(tmp_path, "pretrain", "--no-checkpoint", config=config)
    assert main([*line, "--json", "-"]) == 0
    printed = capsys.readouterr()
    assert "measured steps" in printed.err
    metrics = json.loads(printed.out)
    assert metrics["checkpoint_wait_seconds"] is metrics["checkpoint_write_seconds"] is None
    packs = metrics["places_per_second"] / 32
    assert 1.2 * packs < metrics["examples_per_second"] < 3.0 * packs


def test_records_and_questions_that_a_flag_names_are_read(tmp_path):
    write_model(tmp_path / "model")
    rng = np.random.default_rng(1)
    documents = ["\n".join(" ".join(rng.choice(OTHERS, 6)) for _ in range(9)) for _ in range(30)]
    (tmp_path / "text").write_text("\n\n".join(documents) + "\n")
    out, recipe = tmp_path / "records", ["--vocab", str(tmp_path / "model"), "--masking", "dynamic"]
    shape = ["--sequence-length", "32", "--mask-tokens", "4"]
    assert main(["tokenize", str(tmp_path / "text"), str(out), *recipe, *shape]) == 0
    size = ["--bert-config.vocab-size", str(len(PIECES))]
    metrics = measured(tmp_path, "pretrain", "--dataset-dir", str(out), "--no-checkpoint", *size)
    assert metrics["input"] == {"dataset_dir": str(out)}
    assert 0.0 < metrics["tokens_per_second"] < metrics["places_per_second"]
    write_questions(tmp_path / "train-v1.1.json", 40, 1)
    flags = ["--dataset-dir", str(tmp_path), "--cache-dir", str(tmp_path / "cache")]
    flags += ["--pretrained-ckpt-path", str(tmp_path / "model"), "--no-checkpoint"]
    metrics = measured(tmp_path, "squad", *flags, config=SQUAD)
    assert metrics["what"] == "squad" and metrics["input"]["dataset_dir"] == str(tmp_path)
    assert metrics["settings"]["bert_config"]["hidden_size"] == 32


def test_a_checkpoint_that_cannot_be_written_costs_only_its_metrics(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    metrics = measured(tmp_path, "pretrain", "--checkpoint-dir", str(tmp_path / "file"))
    check(metrics)
    assert metrics["checkpoint_wait_seconds"] is metrics["checkpoint_write_seconds"] is None
    assert "checkpoint: not measured" in capsys.readouterr().out
    state = State({"w": SavedValue(np.array([np.nan]))}, {}, LossScale(value=1.0, dynamic=False), 5)
    run = MagicMock()
    run.settings.checkpoint_dir, run.settings.model_dump.return_value = None, SMALL
    run.parts.state, run.parts.engine.group.world_size = state, 1
    assert measure.save(run) == measure.FAILED
    assert "checkpoint: not measured (step 5: " in capsys.readouterr().out


def test_a_request_to_stop_ends_a_measurement_without_metrics(tmp_path):
    line = [*words(tmp_path, "pretrain", "--no-checkpoint"), "--steps", "1000000"]
    with start_bert(*line, stdout=subprocess.PIPE) as process:
        for printed in process.stdout:
            if "measured steps" in printed:
                process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130
    assert "nothing was measured" in printed
    assert not (tmp_path / "figures.json").exists()


def test_two_processes_with_a_pipeline_each_are_measured_and_rank_0_prints(tmp_path):
    batch = {"micro_batch_size": 2, "replicas": 2, "grad_acc_steps_per_replica": 2}
    parallel = {**STAGES, "replicated_tensor_sharding": True}
    config = {**SMALL, "global_batch": batch, "parallel": parallel}
    done = run_bert("launch", "--processes", "2", "--", *words(tmp_path, "pretrain", config=config))
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "figures.json").read_text())
    check(metrics)
    described = metrics["machine"]
    names = ("processes", "replicas", "devices_of_a_replica")
    assert [described[name] for name in names] == [2, 2, 2]
    assert metrics["reduction_share"] > 0.0
    assert "[1] metric" not in done.stdout and "[0] metric" in done.stdout
