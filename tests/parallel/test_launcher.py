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

from bert_cli.errors import BertError, ConfigError, DataError, DeviceError
from bert_cli.parallel.host import devices_of, remote_program
from bert_cli.parallel.launcher import KINDS, Process, supervise

SLEEP = "import time\ntime.sleep(600)"
SAVES = """
import pathlib, signal, sys, time
def save(*_):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
"""
IGNORES = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


def ready(path: Path) -> str:
    """Code that writes the number of its process to a file."""
    return (
        "import os, pathlib\n"
        f"partial = pathlib.Path({str(path.with_suffix('.partial'))!r})\n"
        "partial.write_text(str(os.getpid()))\n"
        f"partial.rename({str(path)!r})\n"
    )


def processes(*codes: str, cores: bool = False) -> list[Process]:
    """A rank on this host for each piece of Python."""
    found = []
    for rank, code in enumerate(codes):
        devices = devices_of(rank if cores else 0, len(codes) if cores else 1, os.environ)
        words = (sys.executable, "-u", "-c", code)
        found.append(Process(rank, "this host", words, devices.variables, devices.cores))
    return found


def wait_for(*paths: Path) -> list[int]:
    """The process numbers in these files, when all are written."""
    until = time.monotonic() + 30
    while not all(path.exists() for path in paths):
        assert time.monotonic() < until, f"{paths} were not written"
        time.sleep(0.005)
    return [int(path.read_text()) for path in paths]


def alive(number: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def all_gone(*paths: Path) -> bool:
    numbers, until = wait_for(*paths), time.monotonic() + 10
    while any(map(alive, numbers)) and time.monotonic() < until:
        time.sleep(0.01)
    return not any(map(alive, numbers))


def when_ready(*paths: Path, act: Callable[[], None]) -> threading.Thread:
    """Act from a thread once all files are written."""

    def work() -> None:
        wait_for(*paths)
        act()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_output_is_printed_with_its_rank_on_the_same_stream(capsys):
    code = "import os, sys; print('out'); print('err', file=sys.stderr); os.write(1, b'caf\\xe9')"
    supervise(processes(code, code), 5)
    printed = capsys.readouterr()
    for rank in (0, 1):
        lines = [line for line in printed.out.splitlines() if line.startswith(f"[{rank}] ")]
        assert lines == [f"[{rank}] out", f"[{rank}] caf\ufffd"]
        assert f"[{rank}] err\n" in printed.err


def test_the_error_has_the_exit_code_of_the_process(capsys):
    for code in (1, 3, 77):
        with pytest.raises(BertError) as error:
            supervise(processes(f"import sys; sys.exit({code})", SLEEP), 5)
        assert error.type is KINDS.get(code, DeviceError)
        assert f"rank 0 (this host): ended with exit code {code}" in str(error.value)
        assert "it wrote nothing to standard error" in capsys.readouterr().err


def test_the_last_lines_of_the_failed_process_alone_are_shown_again(capsys):
    fails = "import sys\nfor n in range(100): print('line', n, file=sys.stderr)\nsys.exit(3)"
    talks = "import sys, time\nprint('I am fine', file=sys.stderr)\ntime.sleep(600)"
    with pytest.raises(DataError, match="rank 1"):
        supervise(processes(talks, fails), 5)
    report = capsys.readouterr().err.partition("launch: rank 1 (this host) ended with exit code 3")[
        2
    ]
    assert "rank 0 asked to stop; its last lines:" in report
    assert "  line 99\n" in report and "  line 50\n" not in report and "  I am fine" not in report


def test_the_killed_process_is_blamed_and_not_those_that_fail_because_of_it(tmp_path, capsys):
    # Another rank notices at once and fails too, as one of a cluster does.
    notices = (
        ready(tmp_path / "a") + "import sys, time\n"
        f"victim = pathlib.Path({str(tmp_path / 'victim')!r})\n"
        "while not victim.exists(): time.sleep(0.001)\n"
        "number = int(victim.read_text())\n"
        "try:\n"
        "    while open(f'/proc/{number}/stat').read().rpartition(')')[2].split()[0] not in 'ZX':\n"
        "        time.sleep(0.001)\n"
        "except (FileNotFoundError, ProcessLookupError): pass\n"
        "time.sleep(0.1)\n"
        "sys.exit('rank 1 is gone')"
    )
    victim = ready(tmp_path / "victim") + SLEEP
    ignores = IGNORES + ready(tmp_path / "ignores") + SLEEP
    paths = [tmp_path / name for name in ("a", "victim", "ignores")]
    killer = when_ready(*paths, act=lambda: os.kill(wait_for(paths[1])[0], signal.SIGKILL))
    with pytest.raises(DeviceError, match=r"rank 1 \(this host\): was killed by SIGKILL"):
        supervise(processes(notices, victim, ignores), 0.5)
    killer.join()
    printed = capsys.readouterr().err
    assert "launch: rank 1 (this host) was killed by SIGKILL" in printed
    assert "ranks 0, 2 asked to stop" in printed
    assert "rank 2 did not end in 0.5 s: killed" in printed
    assert "launch: rank 0" not in printed
    assert all_gone(*paths)


def test_a_hung_rank_is_named_when_the_ranks_that_notice_it_end_first(tmp_path):
    path = tmp_path / "hangs"
    notices = f"import os, sys, time\nwhile not os.path.exists({str(path)!r}): time.sleep(0.01)\nsys.exit(5)"
    with pytest.raises(DeviceError) as error:
        supervise(processes(notices, IGNORES + ready(path) + SLEEP), 0.5)
    assert "rank 0 (this host): ended with exit code 5" in str(error.value)
    assert str(error.value).endswith("The cause may be rank 1, which hung and had to be killed")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_request_reaches_all_processes_and_is_no_error(number, tmp_path, capsys):
    paths = [tmp_path / name for name in "ab"]
    asks = when_ready(*paths, act=lambda: os.kill(os.getpid(), number))
    supervise(processes(*[SAVES + ready(path) + SLEEP for path in paths]), 5)
    asks.join()
    printed = capsys.readouterr()
    assert "[0] saved\n" in printed.out and "[1] saved\n" in printed.out
    assert f"launch: {number.name}: all processes save and stop" in printed.err


def test_a_second_request_kills(tmp_path, monkeypatch):
    paths = [tmp_path / name for name in "ab"]
    printed = threading.Event()
    monkeypatch.setattr("bert_cli.parallel.launcher._print_line", lambda text: printed.set())

    def ask_twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert printed.wait(30)
        os.kill(os.getpid(), signal.SIGINT)

    asks = when_ready(*paths, act=ask_twice)
    with pytest.raises(KeyboardInterrupt):
        supervise(processes(*[IGNORES + ready(path) + SLEEP for path in paths]), 60)
    asks.join()
    assert all_gone(*paths)


def test_a_process_stopped_before_it_can_save_is_not_blamed_but_one_that_fails_to_save_is(tmp_path):
    fails = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(4))\n"
    for code, error in (("", KeyboardInterrupt), (fails, BertError)):
        paths = [tmp_path / f"{error.__name__}{number}" for number in (0, 1)]
        codes = [code + ready(paths[0]) + SLEEP, SAVES + ready(paths[1]) + SLEEP]
        asks = when_ready(*paths, act=lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(error, match=None if error is KeyboardInterrupt else "exit code 4"):
            supervise(processes(*codes), 5)
        asks.join()


def test_the_children_of_a_process_end_with_it(tmp_path):
    parent = (
        "import subprocess, sys, time, os\n"
        "subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        f"while len(os.listdir({str(tmp_path)!r})) < 2: time.sleep(0.005)\n"
        "{then}"
    )
    fails = parent.format(child=ready(tmp_path / "a") + SLEEP, then="time.sleep(0.1)\nsys.exit(3)")
    stays = parent.format(child=ready(tmp_path / "b") + SLEEP, then="time.sleep(600)")
    with pytest.raises(DataError):
        supervise(processes(fails, stays), 5)
    assert all_gone(tmp_path / "a", tmp_path / "b")


def launcher(*codes: str) -> subprocess.Popen:
    """`supervise` in a process of its own, under `main`."""
    code = (
        "import sys\nfrom bert_cli.cli import main\nimport bert_cli.cli\n"
        "from bert_cli.parallel.launcher import Process, supervise\n"
        f"bert_cli.cli.dispatch = lambda _: supervise({processes(*codes)!r}, 20.0)\n"
        "sys.exit(main([]))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_kill_9_of_the_launcher_ends_all_processes(tmp_path):
    paths = [tmp_path / "a", tmp_path / "ignores"]
    with launcher(SAVES + ready(paths[0]) + SLEEP, IGNORES + ready(paths[1]) + SLEEP) as process:
        assert all(map(alive, wait_for(*paths)))
        process.kill()
    assert all_gone(*paths)


def test_a_closed_output_ends_all_without_a_traceback(tmp_path):
    with launcher(
        SAVES + ready(tmp_path / "a") + "while True: print('more'); time.sleep(0.01)"
    ) as process:
        assert process.stdout.readline() == "[0] more\n"
        process.stdout.close()
        printed = process.stderr.read()
        assert process.wait(timeout=30) == 0
    assert "Traceback" not in printed and "SIGPIPE: all processes save and stop" in printed
    assert all_gone(tmp_path / "a")


def test_a_program_that_does_not_exist_ends_those_that_started(tmp_path):
    first = Process(0, "n1", ("sh", "-c", f"echo $$ > {tmp_path}/a; exec sleep 600"), {})
    absent = Process(1, "n2", ("/nowhere/ssh", "n2", "true"), {})
    with pytest.raises(ConfigError, match=r"/nowhere/ssh \(for rank 1 \(n2\)\): cannot be started"):
        supervise([first, absent], 5)
    assert not (tmp_path / "a").exists() or all_gone(tmp_path / "a")


def test_the_printed_command_of_another_host_runs_without_a_launcher(tmp_path):
    exits = "import signal, sys\nsignal.signal(signal.SIGINT, lambda *_: sys.exit(7))\n"
    words = remote_program((sys.executable, "-c", exits + ready(tmp_path / "a") + SLEEP), 0, 1, 5.0)
    with subprocess.Popen(words, stdin=subprocess.DEVNULL) as process:
        wait_for(tmp_path / "a")
        process.send_signal(signal.SIGINT)
    assert process.returncode == 7
    words = remote_program(("sh", "-c", "kill -9 $$"), 0, 1, 5.0)
    assert subprocess.run(words, stdin=subprocess.DEVNULL).returncode == 128 + signal.SIGKILL


GPU_LIST = """GPU 0: NVIDIA H200 (UUID: GPU-1)
  MIG 1g.18gb Device 0: (UUID: MIG-1)
GPU 1: NVIDIA H200 (UUID: GPU-2)
"""


def test_gpus_are_divided_evenly(tmp_path):
    (tmp_path / "list").write_text(GPU_LIST)
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\n/bin/cat {tmp_path}/list\n")
    smi.chmod(0o755)
    environment = {"PATH": str(tmp_path)}
    assert [devices_of(rank, 2, environment).gpus for rank in (0, 1)] == [("0",), ("1",)]
    environment["CUDA_VISIBLE_DEVICES"] = "3,GPU-abc, 5,6"
    devices = devices_of(1, 2, environment)
    assert (devices.gpus, devices.variables) == (("5", "6"), {"CUDA_VISIBLE_DEVICES": "5,6"})
    # A single process uses all, as without a launcher.
    assert devices_of(0, 1, environment).gpus == ()
    with pytest.raises(DeviceError, match=r"GPUs \(4 on .*divided evenly among 3 processes"):
        devices_of(0, 3, environment)
    for hidden in ("", "-1", "-1,0"):
        assert devices_of(0, 2, {"CUDA_VISIBLE_DEVICES": hidden}).gpus == ()
    smi.write_text(f"{smi.read_text()}exit 9\n")
    assert devices_of(0, 2, {"PATH": str(tmp_path)}).gpus == ()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core cannot be divided")
def test_without_gpus_each_process_has_its_own_cores(monkeypatch, capsys):
    available = os.sched_getaffinity(0)
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], *os.sched_getaffinity(0))"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    supervise(processes(code, code, cores=True), 5)
    lines = sorted(capsys.readouterr().out.splitlines())
    sets = [{int(core) for core in line.split()[1:]} for line in lines]
    assert not sets[0] & sets[1] and len(sets[0]) == len(sets[1]) == len(available) // 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    supervise(processes(code, code, cores=True), 5)
    lines = sorted(capsys.readouterr().out.splitlines())
    assert [line[:5] for line in lines] == ["[0] 4", "[1] 7"]
    assert all({int(core) for core in line.split()[2:]} == available for line in lines)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    many = len(available) + 1
    assert (
        devices_of(0, many, os.environ).message
        == f"{many} processes use the same {len(available)} cores"
    )
