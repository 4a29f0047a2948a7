"""A sweep: real processes up to a real limit of memory, and what is made of how they end."""

import json
import signal
from types import SimpleNamespace

import pytest
from test_bench import SMALL, words

from bert_cli.cli import main
from bert_cli.tasks.bench import sweep


def test_a_sweep_stops_at_the_limit_of_memory_and_tells_the_fastest_and_the_largest(
    tmp_path, capsys
):
    # Of 512 examples a few hundred megabytes, and TensorFlow itself takes half a gigabyte.
    flags = ["--sweep", "micro-batch", "--from", "256", "--memory", "1200MB", "--most", "4096"]
    model = {**SMALL["bert_config"], "hidden_size": 64, "intermediate_size": 512}
    given = words(tmp_path, "pretrain", *flags, config={**SMALL, "bert_config": model})
    assert main([*given, "--steps", "1", "--warmup-steps", "0"]) == 0
    told = json.loads((tmp_path / "figures.json").read_text())
    rows = told["rows"]
    fitting = [row for row in rows if row["fits"]]
    assert told["limit_found"] and not rows[-1]["fits"] and len(fitting) == len(rows) - 1 >= 1
    assert [row["micro_batch_size"] for row in rows] == [256 * 2**n for n in range(len(rows))]
    assert told["largest"] == fitting[-1]["micro_batch_size"]
    assert max(row["host_peak_memory_bytes"] for row in fitting) < 1.6e9
    best = max(fitting, key=lambda row: row["examples_per_second"])
    assert told["fastest"] == best["micro_batch_size"]
    shown = capsys.readouterr().out
    assert "memory was refused" in shown and f"largest that fits: {told['largest']}" in shown


def test_where_not_even_the_first_fits_that_is_said(tmp_path, capsys):
    # TensorFlow alone takes more.
    flags = ["--sweep", "micro-batch", "--from", "4", "--memory", "300MB"]
    assert main(words(tmp_path, "pretrain", *flags)) == 5
    assert "start with a lower --from" in capsys.readouterr().err
    assert not (tmp_path / "figures.json").exists()


def test_a_process_that_fails_by_something_else_is_told_with_its_words(tmp_path, capsys):
    flags = ["--sweep", "micro-batch", "--dataset-dir", str(tmp_path / "nowhere")]
    assert main(words(tmp_path, "pretrain", *flags)) == 5
    told = capsys.readouterr().err
    assert "micro-batch 1: the process ended with 3" in told and "nowhere" in told


@pytest.mark.parametrize(
    ("code", "said", "fits"),
    [
        (-signal.SIGKILL, "", False),
        (-signal.SIGABRT, "terminate called after throwing an instance of 'std::bad_alloc'", False),
        (5, "bert: global_batch.micro_batch_size: the run does not fit the device's memory", False),
        (1, "numpy._core._exceptions._ArrayMemoryError: Unable to allocate", False),
        (-signal.SIGABRT, "Thread tf_Compute creation via pthread_create() failed.", False),
        (1, "RuntimeError: can't start new thread", False),
        (2, "bert: --steps: got 0", True),
        (-signal.SIGSEGV, "", True),
    ],
)
def test_how_a_process_ended_says_whether_memory_was_short(code, said, fits):
    assert (sweep.why_not(code, said, 10**9) is None) == fits


def test_what_would_fill_the_machine_is_not_started(monkeypatch):
    rows = [{"host_peak_memory_bytes": 3 * 10**9}, {"host_peak_memory_bytes": 5 * 10**9}]
    assert sweep.expected(rows) == 9 * 10**9
    settings = SimpleNamespace(memory=None)
    monkeypatch.setattr(sweep.machine, "memory", lambda: (16 * 10**9, 8 * 10**9))
    row = sweep._unless_too_large(4, rows, settings)
    assert row is not None and not row["fits"] and "about 9.0 GB of 8.0 GB" in row["why"]
    monkeypatch.setattr(sweep.machine, "memory", lambda: (16 * 10**9, 10 * 10**9))
    assert sweep._unless_too_large(4, rows, settings) is None


def test_a_sweep_starts_processes_and_is_none_of_several(tmp_path, capsys, monkeypatch):
    task = {"cluster": {"worker": ["a:1025", "b:1025"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(task))
    assert main(words(tmp_path, "pretrain", "--sweep", "micro-batch")) == 2
    assert "without `bert launch`" in capsys.readouterr().err
