"""Real processes, started, stopped and killed: which one is blamed, and that none is left."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import assert_gone, numbers, ready

from bert_cli.errors import BertError, ConfigError, DataError, DeviceError
from bert_cli.parallel.launcher import KINDS, Process, command_on_host, cores_of, supervise

SLEEP = "import time\ntime.sleep(600)"
SAVES = """
import pathlib, signal, sys, time
def save(*_):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
"""
IGNORES = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


def processes(*codes: str) -> list[Process]:
    """A rank on this host for each piece of Python."""
    return [
        Process(rank, "this host", command_on_host([sys.executable, "-u", "-c", code], 0, 1, 5.0))
        for rank, code in enumerate(codes)
    ]


def when_ready(*paths: Path, act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=lambda: (numbers(*paths), act()))
    thread.start()
    return thread


def test_the_error_has_the_exit_code_of_the_process_whose_last_lines_are_shown_again(capsys):
    talks = "import sys, time\nprint('I am fine', file=sys.stderr)\ntime.sleep(600)"
    fails = (
        "import os, sys\nfor n in range(100): print('line', n, file=sys.stderr)\n"
        "os.write(1, b'caf\\xe9')\nsys.exit({})"
    )
    for code in (3, 77):
        with pytest.raises(BertError) as error:
            supervise(processes(talks, fails.format(code)), 20)
        assert error.type is KINDS.get(code, DeviceError)
        printed, how = capsys.readouterr(), f"ended with exit code {code}"
        assert printed.out == "[1] caf\ufffd\n" and "[1] line 99\n" in printed.err
        report = printed.err.partition(f"launch: rank 1 (this host) {how}")[2]
        assert "rank 0 asked to stop; its last lines:" in report
        assert "  line 99\n" in report and "  line 50\n" not in report
        assert "  I am fine" not in report and "killed" not in report


def test_every_line_is_printed_also_on_a_terminal_that_is_slower_than_the_process(monkeypatch):
    printed = []
    monkeypatch.setattr("bert_cli.parallel.launcher.DRAIN_SECONDS", 60)
    monkeypatch.setattr(
        "bert_cli.parallel.launcher.print_line",
        lambda text: (time.sleep(0.02), printed.append(text)),
    )
    supervise(processes("for n in range(50): print(n)"), 20)
    assert len(printed) == 50


def test_the_killed_process_is_blamed_and_not_those_that_fail_because_of_it(tmp_path, capsys):
    # Another rank notices at once and fails too, as one of a cluster does.
    gone = tmp_path / "gone"
    waits = f"import sys, time\nwhile not os.path.exists({str(gone)!r}): time.sleep(0.001)\n"
    notices = IGNORES + ready(tmp_path / "a") + waits + "sys.exit('rank 1 is gone')"
    victim = ready(tmp_path / "victim") + SLEEP
    ignores = IGNORES + ready(tmp_path / "ignores") + SLEEP
    paths = [tmp_path / name for name in ("a", "victim", "ignores")]

    def kill() -> None:
        os.kill(numbers(paths[1])[0], signal.SIGKILL)
        time.sleep(0.1)
        gone.touch()

    killer = when_ready(*paths, act=kill)
    with pytest.raises(DeviceError, match=r"rank 1 \(this host\): was killed by SIGKILL"):
        supervise(processes(notices, victim, ignores), 0.5)
    killer.join()
    printed = capsys.readouterr().err
    assert "ranks 0, 2 asked to stop" in printed
    assert "rank 2 did not end in 0.5 s: killed" in printed
    assert "launch: rank 0" not in printed
    assert_gone(*paths)


def test_a_second_request_kills(tmp_path, monkeypatch):
    paths = [tmp_path / name for name in "ab"]
    printed = threading.Event()
    monkeypatch.setattr("bert_cli.parallel.launcher._print_line", lambda text: printed.set())

    def ask_twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert printed.wait()
        os.kill(os.getpid(), signal.SIGINT)

    asks = when_ready(*paths, act=ask_twice)
    with pytest.raises(KeyboardInterrupt):
        supervise(processes(*[IGNORES + ready(path) + SLEEP for path in paths]), 60)
    asks.join()
    assert_gone(*paths)


def test_a_process_stopped_before_it_can_save_is_not_blamed_but_one_that_fails_is(tmp_path, capsys):
    fails = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(4))\n"
    cases = ("", KeyboardInterrupt, signal.SIGTERM), (fails, BertError, signal.SIGHUP)
    for code, error, request in cases:
        paths = [tmp_path / f"{error.__name__}{number}" for number in (0, 1)]
        codes = [code + ready(paths[0]) + SLEEP, SAVES + ready(paths[1]) + SLEEP]
        asks = when_ready(*paths, act=lambda number=request: os.kill(os.getpid(), number))
        with pytest.raises(error, match=None if error is KeyboardInterrupt else "exit code 4"):
            supervise(processes(*codes), 5)
        asks.join()
        printed = capsys.readouterr()
        assert "[1] saved\n" in printed.out and f"launch: {request.name}: all" in printed.err


def test_the_children_of_a_process_end_with_it(tmp_path):
    fails = (
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {ready(tmp_path / 'child') + SLEEP!r}])\n"
        f"while not os.path.exists({str(tmp_path / 'child')!r}): time.sleep(0.005)\n"
        "sys.exit(3)"
    )
    with pytest.raises(DataError):
        supervise(processes(fails), 5)
    assert_gone(tmp_path / "child")


def test_a_launcher_without_readers_goes_on_until_it_is_asked_to_stop(tmp_path):
    """The process prints more than a pipe holds after both readers of the launcher have gone."""
    prints = SAVES + "for _ in range(20_000): print('more', file=sys.stderr); print('more')\n"
    code = (
        "import sys\nimport bert_cli.cli\n"
        "from bert_cli.parallel.launcher import Process, supervise\n"
        f"ranks = {processes(prints + ready(tmp_path / 'a') + SLEEP)!r}\n"
        "bert_cli.cli.dispatch = lambda _: (bert_cli.cli.set_result(False), supervise(ranks, 20.0))\n"
        "sys.exit(bert_cli.cli.main([]))"
    )
    read, write = os.pipe()
    os.close(read)
    with subprocess.Popen([sys.executable, "-c", code], stdout=write, stderr=write) as process:
        os.close(write)
        numbers(tmp_path / "a")
        for number in (signal.SIGHUP, signal.SIGHUP):  # from the system and from the shell
            process.send_signal(number)
        assert process.wait() == 0
    assert_gone(tmp_path / "a")


def test_a_program_that_does_not_exist_ends_those_that_started(tmp_path):
    absent = Process(1, "n2", ("/nowhere/ssh", "n2", "true"))
    with pytest.raises(ConfigError, match=r"/nowhere/ssh \(for rank 1 \(n2\)\): cannot be started"):
        supervise([*processes(ready(tmp_path / "a") + SLEEP), absent], 5)
    assert not (tmp_path / "a").exists() or assert_gone(tmp_path / "a") is None


def test_the_printed_command_runs_without_a_launcher(tmp_path):
    exits = "import signal, sys\nsignal.signal(signal.SIGINT, lambda *_: sys.exit(7))\n"
    (by_hand,) = processes(exits + ready(tmp_path / "a") + SLEEP)
    with subprocess.Popen(by_hand.words, stdin=subprocess.DEVNULL) as process:
        numbers(tmp_path / "a")
        process.send_signal(signal.SIGINT)
    assert process.returncode == 7


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core cannot be divided")
def test_each_process_has_its_own_gpus_or_else_cores(monkeypatch, capsys):
    available = os.sched_getaffinity(0)
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], *os.sched_getaffinity(0))"
    for gpus in ("", "4,7"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        program = [sys.executable, "-c", code]
        ranks = [Process(rank, "here", command_on_host(program, rank, 2, 5.0)) for rank in (0, 1)]
        supervise(ranks, 5)
        lines = [line.split(" ") for line in sorted(capsys.readouterr().out.splitlines())]
        cores = [{int(core) for core in line[2:]} for line in lines]
        if gpus:
            assert [line[1] for line in lines] == ["4", "7"] and cores == [available, available]
        else:
            assert not cores[0] & cores[1]
            assert len(cores[0]) == len(cores[1]) == len(available) // 2
    assert len(cores_of(0, len(available))) == 1 and not capsys.readouterr().err
    many = len(available) + 1
    assert cores_of(0, many) == []
    assert f"{many} processes use the same {len(available)} cores" in capsys.readouterr().err
