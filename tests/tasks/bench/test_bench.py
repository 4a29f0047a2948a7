"""`bert bench` as a person has it: on made-up and real examples, in layouts, in processes, to a limit."""

import json
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from support.tiny_models import OTHERS, PIECES, write_model, write_questions

from bert_cli.cli import main
from bert_cli.optim.loss_scale import LossScale
from bert_cli.tasks.bench import measurement
from bert_cli.tasks.bench.timing import PARTS
from bert_cli.train.saving import SavedValue
from bert_cli.train.step import State

# Before the first run, so that the CPU is cut into devices for all of them.
pytest.importorskip("tensorflow")

STEPS, WARMUP = 3, 2
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
    # Fewer steps than are measured: a measurement is as long as it is asked to be.
    "total_num_train_samples": 8,
}
STAGES = {
    "pipeline_stages": [["emb", "hid"], ["hid", "enc_out"], ["pool", "heads"]],
    "pipeline_device_mapping": [0, 1, 0],
}
FIGURES = {
    "examples_per_second",
    "tokens_per_second",
    "places_per_second",
    "flops_per_second",
    "matmul_flops_per_second",
    "flops_utilisation",
    "peak_memory_bytes",
    "memory_growth_bytes",
    "host_peak_memory_bytes",
    "checkpoint_wait_seconds",
    "checkpoint_write_seconds",
    "step_seconds",
    "start_seconds",
    "steps",
    "warmup_steps",
    "skipped_steps",
    "what",
    "input",
    "examples_per_step",
    "micro_batch_size",
    "micro_batches_per_step",
    "precision",
    "checkpoint_every_minutes",
    "machine",
    "versions",
    "settings",
    *(f"{name}_share" for name in PARTS),
}


def words(folder, kind, *flags, config=SMALL):
    (folder / "config.json").write_text(json.dumps(config))
    given = ["--config", str(folder / "config.json"), "--json", str(folder / "figures.json")]
    pace = ["--steps", str(STEPS), "--warmup-steps", str(WARMUP)]
    return ["bench", kind, *given, *pace, *flags]


def measured(folder, kind, *flags, config=SMALL):
    assert main(words(folder, kind, *flags, config=config)) == 0
    return json.loads((folder / "figures.json").read_text())


def check(figures):
    """What holds for every measurement, however fast the machine is."""
    assert set(figures) == FIGURES
    assert figures["steps"] == STEPS and figures["warmup_steps"] == WARMUP
    shares = [figures[f"{name}_share"] for name in PARTS]
    assert sum(shares) == pytest.approx(1.0, abs=1e-9) and min(shares) > -1e-9
    assert figures["forward_backward_share"] > 0.0 and figures["optimizer_share"] > 0.0
    step = figures["step_seconds"]
    assert 0.0 < step["low"] <= step["median"] <= step["high"]
    paced = figures["examples_per_second"] * step["median"]
    # Made-up examples are of one number a step, so pace and median step say the same.
    assert paced == pytest.approx(figures["examples_per_step"], rel=1e-6)
    ratio = figures["flops_per_second"] / figures["matmul_flops_per_second"]
    assert figures["flops_utilisation"] == pytest.approx(ratio)
    start = figures["start_seconds"]
    parts = {"python_and_settings", "imports", "devices", "building", "tracing", "first_step"}
    assert set(start) == {*parts, "total"}
    assert start["total"] == pytest.approx(sum(start[name] for name in parts))
    assert figures["peak_memory_bytes"] > figures["memory_growth_bytes"] >= 0
    assert figures["machine"]["cores"] >= 1 and "tensorflow" in figures["versions"]


def test_pre_training_is_measured_and_leaves_nothing_but_its_figures(tmp_path, capsys):
    room = tmp_path / "disk"
    figures = measured(tmp_path, "pretrain", "--checkpoint-dir", str(room))
    check(figures)
    assert figures["input"] == "made up"
    assert min(figures["checkpoint_wait_seconds"], figures["checkpoint_write_seconds"]) > 0.0
    assert list(room.iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "figures.json", "disk"}
    told = capsys.readouterr().out
    for name in ("examples/s", "model FLOPs utilisation", "input wait", "tracing", "checkpoint"):
        assert name in told


def test_two_replicas_of_two_devices_are_measured(tmp_path):
    batch = {"micro_batch_size": 2, "replicas": 2, "grad_acc_steps_per_replica": 2}
    config = {**SMALL, "global_batch": batch, "parallel": STAGES}
    figures = measured(tmp_path, "pretrain", config=config)
    check(figures)
    assert figures["machine"]["replicas"] == figures["machine"]["devices_of_a_replica"] == 2
    assert figures["reduction_share"] > 0.0


def test_packs_count_as_their_sequences_and_json_on_standard_output_stands_alone(tmp_path, capsys):
    config = {**SMALL, "max_sequences_per_pack": 3}
    given = words(tmp_path, "pretrain", "--no-checkpoint", config=config)
    assert main([*given, "--json", "-"]) == 0
    told = capsys.readouterr()
    assert "that are measured" in told.err
    figures = json.loads(told.out)
    assert figures["checkpoint_wait_seconds"] is figures["checkpoint_write_seconds"] is None
    packs = figures["places_per_second"] / 32
    assert 1.2 * packs < figures["examples_per_second"] < 3.0 * packs


def test_records_that_a_flag_names_are_read(tmp_path):
    write_model(tmp_path / "model")
    drawn = np.random.default_rng(1)
    documents = ["\n".join(" ".join(drawn.choice(OTHERS, 6)) for _ in range(9)) for _ in range(30)]
    (tmp_path / "text").write_text("\n\n".join(documents) + "\n")
    out, recipe = tmp_path / "records", ["--vocab", str(tmp_path / "model"), "--masking", "dynamic"]
    places = ["--sequence-length", "32", "--mask-tokens", "4"]
    assert main(["tokenize", str(tmp_path / "text"), str(out), *recipe, *places]) == 0
    size = ["--bert-config.vocab-size", str(len(PIECES))]
    figures = measured(tmp_path, "pretrain", "--dataset-dir", str(out), "--no-checkpoint", *size)
    assert figures["input"] == {"dataset_dir": str(out)}
    assert 0.0 < figures["tokens_per_second"] < figures["places_per_second"]


SQUAD = {
    **{name: SMALL[name] for name in ("bert_config", "optimizer_opts", "global_batch")},
    "max_seq_length": 64,
    "doc_stride": 16,
    "max_query_length": 8,
}


def test_questions_are_measured_on_made_up_windows(tmp_path):
    figures = measured(tmp_path, "squad", config=SQUAD)
    check(figures)
    assert figures["what"] == "squad"


def test_questions_that_a_flag_names_are_read(tmp_path):
    write_model(tmp_path / "model")
    write_questions(tmp_path / "train-v1.1.json", 40, 1)
    config = {name: value for name, value in SQUAD.items() if name != "bert_config"}
    flags = ["--dataset-dir", str(tmp_path), "--cache-dir", str(tmp_path / "cache")]
    flags += ["--pretrained-ckpt-path", str(tmp_path / "model")]
    figures = measured(tmp_path, "squad", *flags, config=config)
    assert figures["input"]["dataset_dir"] == str(tmp_path)
    assert figures["settings"]["bert_config"]["hidden_size"] == 32


def test_a_disk_that_refuses_the_checkpoint_costs_only_that_figure(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    figures = measured(tmp_path, "pretrain", "--checkpoint-dir", str(tmp_path / "file"))
    assert figures["checkpoint_wait_seconds"] is figures["checkpoint_write_seconds"] is None
    assert "checkpoint: not measured" in capsys.readouterr().out


def test_a_state_that_cannot_be_saved_costs_only_the_figures_of_the_checkpoint(capsys):
    state = State({"w": SavedValue(np.array([np.nan]))}, {}, LossScale(value=1.0, dynamic=False), 5)
    built = SimpleNamespace(
        settings=SimpleNamespace(checkpoint_dir=None),
        state=state,
        form=None,
        engine=SimpleNamespace(peers=SimpleNamespace(count=1)),
    )
    assert measurement._save(built, {}, {}) == [-1.0, -1.0]
    assert "checkpoint: not measured (step 5: w has values that" in capsys.readouterr().out


def test_a_request_to_stop_ends_a_measurement_without_figures(tmp_path):
    given = [*words(tmp_path, "pretrain", "--no-checkpoint"), "--steps", "1000000"]
    command = [sys.executable, "-u", "-m", "bert_cli", *given]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if "that are measured" in line:
                process.send_signal(signal.SIGTERM)
    assert process.returncode == 130
    assert "nothing was measured" in line
    assert not (tmp_path / "figures.json").exists()


def test_two_processes_are_measured_and_rank_0_speaks(tmp_path):
    batch = {"micro_batch_size": 2, "replicas": 2, "grad_acc_steps_per_replica": 2}
    config = {**SMALL, "global_batch": batch, "parallel": {"replicated_tensor_sharding": True}}
    inner = words(tmp_path, "pretrain", config=config)
    done = subprocess.run(
        [sys.executable, "-m", "bert_cli", "launch", "--processes", "2", "--", *inner],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    check(figures)
    assert figures["machine"]["processes"] == 2
    assert "[1] figure" not in done.stdout and "[0] figure" in done.stdout
