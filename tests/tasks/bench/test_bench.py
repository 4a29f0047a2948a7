"""`bert bench pretrain` and `squad`: synthetic and real examples, layouts, processes, and sweeps."""

import json
import signal
import subprocess

import pytest
from support.bert import run_bert, start_bert
from support.corpora import make_corpus
from support.tiny_models import write_model, write_questions

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
    line = ["--config", str(folder / "config.json"), "--json", str(folder / "metrics.json")]
    pace = ["--steps", str(STEPS), "--warmup-steps", str(WARMUP)]
    return ["bench", kind, *line, *pace, *flags]


def measured(folder, kind, *flags, config=SMALL):
    assert main(words(folder, kind, *flags, config=config)) == 0
    metrics = json.loads((folder / "metrics.json").read_text())
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
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "metrics.json", "disk"}
    out = capsys.readouterr().out
    for name in ("examples/s", "model FLOPs utilisation", "input wait", "tracing", "checkpoint"):
        assert name in out


def test_packs_count_as_their_sequences_and_json_on_standard_output_is_alone(tmp_path, capsys):
    """A checkpoint that cannot be written costs only its metrics."""
    (tmp_path / "file").write_text("")
    disk = ["--checkpoint-dir", str(tmp_path / "file")]
    line = words(tmp_path, "pretrain", *disk, config={**SMALL, "max_sequences_per_pack": 3})
    assert main([*line, "--json", "-"]) == 0
    printed = capsys.readouterr()
    assert "measured steps" in printed.err and "checkpoint: not measured" in printed.err
    metrics = json.loads(printed.out)
    assert metrics["checkpoint_wait_seconds"] is metrics["checkpoint_write_seconds"] is None
    packs = metrics["places_per_second"] / 40
    assert 1.2 * packs < metrics["examples_per_second"] < 3.0 * packs


@pytest.mark.slow
def test_records_and_questions_that_a_flag_names_are_read(tmp_path):
    out = make_corpus(tmp_path / "records", "dynamic", [40])
    shape = ["--max-seq-length", "16", "--max-predictions-per-seq", "4"]
    flags = [*shape, "--bert-config.vocab-size", "1000", "--no-checkpoint"]
    metrics = measured(tmp_path, "pretrain", "--dataset-dir", str(out), *flags)
    assert metrics["input"] == {"dataset_dir": str(out)}
    assert 0.0 < metrics["tokens_per_second"] < metrics["places_per_second"]
    write_model(tmp_path / "model")
    write_questions(tmp_path / "train-v1.1.json", 40, 1)
    flags = ["--dataset-dir", str(tmp_path), "--cache-dir", str(tmp_path / "cache")]
    flags += ["--pretrained-ckpt-path", str(tmp_path / "model"), "--no-checkpoint"]
    config = {name: value for name, value in SQUAD.items() if name != "bert_config"}
    metrics = measured(tmp_path, "squad", *flags, config=config)
    assert metrics["what"] == "squad" and metrics["input"]["dataset_dir"] == str(tmp_path)
    assert metrics["settings"]["bert_config"]["hidden_size"] == 32


@pytest.mark.slow
def test_a_request_to_stop_ends_a_measurement_without_metrics(tmp_path):
    line = [*words(tmp_path, "pretrain", "--no-checkpoint"), "--steps", "1000000"]
    with start_bert(*line, stdout=subprocess.PIPE) as process:
        for printed in process.stdout:
            if "measured steps" in printed:
                process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130
    assert "nothing was measured" in printed
    assert not (tmp_path / "metrics.json").exists()


@pytest.mark.slow
def test_two_processes_with_a_pipeline_each_are_measured_and_rank_0_prints(tmp_path):
    batch = {"micro_batch_size": 2, "replicas": 2, "grad_acc_steps_per_replica": 2}
    stages = [["emb", "hid"], ["hid", "hid", "enc_out"], ["pool", "heads"]]
    parallel = {"pipeline_stages": stages, "pipeline_device_mapping": [0, 1, 0]}
    parallel["replicated_tensor_sharding"] = True
    config = {**SMALL, "global_batch": batch, "parallel": parallel}
    done = run_bert("launch", "--processes", "2", "--", *words(tmp_path, "pretrain", config=config))
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    check(metrics)
    described = metrics["machine"]
    names = ("processes", "replicas", "devices_of_a_replica")
    assert [described[name] for name in names] == [2, 2, 2]
    assert metrics["reduction_share"] > 0.0
    assert "[1] metric" not in done.stdout and "[0] metric" in done.stdout


# --- sweeps

GIGABYTE = 10**9


@pytest.fixture
def processes(monkeypatch):
    """Simulate the measured processes: each of (exit code, standard error, examples per second, peak memory)."""
    results: list[tuple[int, str, float, int]] = []
    started: list[tuple[int, int]] = []

    def simulated(command, config, limit):
        size = config["global_batch"]["micro_batch_size"]
        started.append((size, limit))
        code, errors, rate, memory = results[len(started) - 1]
        metrics = {"micro_batch_size": size, "host_peak_memory_bytes": memory}
        metrics |= {"examples_per_second": rate, "tokens_per_second": 2.0, "flops_per_second": 1e9}
        metrics |= {"step_seconds": {"median": 0.5}, "flops_utilisation": 0.5}
        metrics |= {"peak_memory_bytes": GIGABYTE}
        return code, errors, metrics if code == 0 else None

    monkeypatch.setattr(run, "_run_process", simulated)
    monkeypatch.setattr(run.machine, "memory", lambda: (16 * GIGABYTE, 8 * GIGABYTE))
    return results, started


def swept(tmp_path, *flags) -> int:
    return main(words(tmp_path, "pretrain", "--sweep", "micro-batch", *flags))


def test_a_sweep_reports_the_fastest_and_the_largest_size(tmp_path, processes, capsys):
    results, started = processes
    results += [(0, "", 5.0, 1), (0, "", 7.0, 1), (0, "", 6.0, 1), (-signal.SIGKILL, "", 0.0, 0)]
    assert swept(tmp_path, "--from", "2", "--memory", "2GB") == 0
    assert started == [(size, 2 * GIGABYTE) for size in (2, 4, 8, 16)]
    written = json.loads((tmp_path / "metrics.json").read_text())
    assert (written["fastest"], written["largest"], written["limit_found"]) == (4, 8, True)
    assert [row["fits"] for row in written["rows"]] == [True, True, True, False]
    out = capsys.readouterr().out
    assert "does not fit: killed" in out and "fastest: 4; largest that fits: 8" in out
    started.clear()
    assert swept(tmp_path, "--most", "3") == 0
    assert [size for size, _ in started] == [1, 2]
    assert "largest that fits of those tried: 2" in capsys.readouterr().out


def test_a_size_that_needs_more_than_is_free_is_not_started(tmp_path, processes):
    results, started = processes
    # 3, 5 and expected 9 GB; 8 are free.
    results += [(0, "", 5.0, 3 * GIGABYTE), (0, "", 6.0, 5 * GIGABYTE)]
    assert swept(tmp_path) == 0
    assert len(started) == 2
    row = json.loads((tmp_path / "metrics.json").read_text())["rows"][-1]
    assert not row["fits"] and "about 9.0 GB of 8.0 GB" in row["why"]


def test_failures_are_errors_with_their_output(tmp_path, processes, capsys, monkeypatch):
    results, _ = processes
    results += [(1, "MemoryError", 0.0, 0), (3, "bert: no such folder: nowhere\n", 0.0, 0)]
    assert swept(tmp_path, "--from", "4") == 5
    assert "micro_batch_size (4): memory was refused" in capsys.readouterr().err
    assert swept(tmp_path) == 5
    error = capsys.readouterr().err
    assert "micro-batch 1: the process ended with 3" in error and "nowhere" in error
    assert not (tmp_path / "metrics.json").exists()
    task = {"cluster": {"worker": ["a:1025", "b:1025"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(task))
    assert swept(tmp_path) == 2
    assert "without `bert launch`" in capsys.readouterr().err


def test_what_processes_print_when_memory_is_short_is_recognized():
    for errors in (
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "bert: global_batch.micro_batch_size: the run does not fit the device's memory",
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate",
        "Thread tf_Compute creation via pthread_create() failed.",
        "RuntimeError: can't start new thread",
    ):
        assert run.OUT_OF_MEMORY.search(errors)


def test_a_real_process_is_refused_more_than_its_limit(tmp_path, capsys):
    # The imports alone need more than 150 MB.
    assert swept(tmp_path, "--from", "4", "--memory", "150MB") == 5
    assert "start with a lower --from" in capsys.readouterr().err


@pytest.mark.slow
def test_a_real_process_is_measured(tmp_path):
    assert swept(tmp_path, "--from", "4", "--most", "4") == 0
    (row,) = json.loads((tmp_path / "metrics.json").read_text())["rows"]
    assert row["fits"] and row["micro_batch_size"] == 4 and row["examples_per_second"] > 0
