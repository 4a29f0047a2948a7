"""A sweep over micro-batch sizes: its decisions with simulated processes, and one with real ones."""

import json
import signal

import pytest
from test_bench import SMALL, words

from bert_cli.cli import main
from bert_cli.tasks.bench import run

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
    written = json.loads((tmp_path / "figures.json").read_text())
    assert (written["fastest"], written["largest"], written["limit_found"]) == (4, 8, True)
    assert [row["fits"] for row in written["rows"]] == [True, True, True, False]
    out = capsys.readouterr().out
    assert "does not fit: killed" in out and "fastest: 4; largest that fits: 8" in out


def test_a_size_above_most_or_that_needs_more_than_is_free_is_not_started(
    tmp_path, processes, capsys
):
    results, started = processes
    # 3, 5 and expected 9 GB; 8 are free.
    results += [(0, "", 5.0, 3 * GIGABYTE), (0, "", 6.0, 5 * GIGABYTE)]
    assert swept(tmp_path) == 0
    assert len(started) == 2
    row = json.loads((tmp_path / "figures.json").read_text())["rows"][-1]
    assert not row["fits"] and "about 9.0 GB of 8.0 GB" in row["why"]
    started.clear()
    assert swept(tmp_path, "--most", "3") == 0
    assert [size for size, _ in started] == [1, 2]
    assert "largest that fits of those tried: 2" in capsys.readouterr().out


def test_failures_are_errors_with_what_the_process_printed(
    tmp_path, processes, capsys, monkeypatch
):
    results, _ = processes
    results += [(1, "MemoryError", 0.0, 0), (3, "bert: no such folder: nowhere\n", 0.0, 0)]
    assert swept(tmp_path, "--from", "4") == 5
    assert "micro_batch_size (4): memory was refused" in capsys.readouterr().err
    assert swept(tmp_path) == 5
    error = capsys.readouterr().err
    assert "micro-batch 1: the process ended with 3" in error and "nowhere" in error
    assert not (tmp_path / "figures.json").exists()
    task = {"cluster": {"worker": ["a:1025", "b:1025"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(task))
    assert swept(tmp_path) == 2
    assert "without `bert launch`" in capsys.readouterr().err


def test_what_processes_print_when_memory_is_short_is_recognized():
    for errors, is_memory in (
        ("terminate called after throwing an instance of 'std::bad_alloc'", True),
        ("bert: global_batch.micro_batch_size: the run does not fit the device's memory", True),
        ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate", True),
        ("Thread tf_Compute creation via pthread_create() failed.", True),
        ("RuntimeError: can't start new thread", True),
        ("bert: --steps: got 0", False),
    ):
        assert bool(run.OUT_OF_MEMORY.search(errors)) == is_memory


def test_a_real_process_is_refused_more_than_its_limit(tmp_path, capsys):
    # TensorFlow alone needs more than 300 MB.
    assert swept(tmp_path, "--from", "4", "--memory", "300MB") == 5
    assert "start with a lower --from" in capsys.readouterr().err


@pytest.mark.slow
def test_a_sweep_of_real_processes_stops_at_the_limit_of_memory(tmp_path, capsys):
    # 512 examples need a few hundred megabytes, and TensorFlow half a gigabyte.
    model = {**SMALL["bert_config"], "hidden_size": 64, "intermediate_size": 512}
    flags = ["--from", "256", "--memory", "1200MB", "--most", "4096", "--sweep", "micro-batch"]
    line = words(tmp_path, "pretrain", *flags, config={**SMALL, "bert_config": model})
    assert main([*line, "--steps", "1", "--warmup-steps", "0"]) == 0
    written = json.loads((tmp_path / "figures.json").read_text())
    rows = written["rows"]
    fitting = [row for row in rows if row["fits"]]
    assert written["limit_found"] and len(fitting) == len(rows) - 1 >= 1
    assert [row["micro_batch_size"] for row in rows] == [256 * 2**n for n in range(len(rows))]
    assert max(row["host_peak_memory_bytes"] for row in fitting) < 1.6e9
    assert "memory was refused" in capsys.readouterr().out
