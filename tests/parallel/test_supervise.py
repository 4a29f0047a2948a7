"""Real processes, started, asked, killed: whose fault it was, and that nobody is left."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from bert_cli.errors import BertError, ConfigError, DataError, DeviceError
from bert_cli.parallel.launched import share_of_host
from bert_cli.parallel.supervise import KINDS, Process, attended, supervise

FOR_EVER = "import time\ntime.sleep(600)"
SAVES = """
import pathlib, signal, sys, time
def save(*_):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
"""
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


def ready(folder: Path, name: str) -> str:
    """Code that leaves the number of its process in a file."""
    return (
        "import os, pathlib\n"
        f"written = pathlib.Path({str(folder / f'.{name}')!r})\n"
        "written.write_text(str(os.getpid()))\n"
        f"written.rename({str(folder / name)!r})\n"
    )


def processes(*codes: str, grace_seconds: float = 20.0) -> list[Process]:
    """A rank on this host for each piece of Python."""
    programs = [(sys.executable, "-u", "-c", code) for code in codes]
    return [
        Process(rank, "this host", attended(program, rank, len(codes), grace_seconds), {})
        for rank, program in enumerate(programs)
    ]


def wait_for(*paths: Path, seconds: float = 30.0) -> list[int]:
    """The numbers of the processes that leave these files."""
    until = time.monotonic() + seconds
    while not all(path.exists() for path in paths):
        assert time.monotonic() < until, f"{paths} did not come"
        time.sleep(0.005)
    return [int(path.read_text()) for path in paths]


def alive(number: int) -> bool:
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def all_gone(numbers: list[int], seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while any(map(alive, numbers)) and time.monotonic() < until:
        time.sleep(0.01)
    return not any(map(alive, numbers))


def when_there(*paths: Path, do: object) -> threading.Thread:
    """Do something from a thread once all files are there."""

    def work() -> None:
        wait_for(*paths)
        do()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_what_each_writes_is_printed_with_its_rank_where_it_was_written(capsys):
    code = (
        "import sys; print('to you'); print('to me', file=sys.stderr); sys.stdout.write('the end')"
    )
    supervise(processes(code, code), 5)
    told = capsys.readouterr()
    for rank in (0, 1):
        mine = [line for line in told.out.splitlines() if line.startswith(f"[{rank}] ")]
        assert mine == [f"[{rank}] to you", f"[{rank}] the end"]
        assert f"[{rank}] to me\n" in told.err


def test_text_that_is_not_utf_8_is_printed_all_the_same(capsys):
    supervise(processes("import os; os.write(1, b'caf\\xe9\\n')"), 5)
    assert capsys.readouterr().out == "[0] caf\ufffd\n"


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 77])
def test_the_error_has_the_exit_code_of_the_process_where_the_door_has_such_a_code(code, capsys):
    with pytest.raises(BertError) as ended:
        supervise(processes(f"import sys; sys.exit({code})", FOR_EVER), 5)
    assert ended.type is KINDS.get(code, DeviceError)
    assert f"rank 0 (this host): ended with exit code {code}" in str(ended.value)
    assert "it wrote nothing to standard error" in capsys.readouterr().err


def test_the_last_words_of_the_one_who_failed_are_shown_and_only_those(capsys):
    fails = "import sys\nfor n in range(100): print('line', n, file=sys.stderr)\nsys.exit(3)"
    talks = "import sys, time\nprint('I am fine', file=sys.stderr)\ntime.sleep(600)"
    with pytest.raises(DataError, match="rank 1"):
        supervise(processes(talks, fails), 5)
    told = capsys.readouterr().err
    said = told.partition("launch: rank 1 (this host) ended with exit code 3")[2]
    assert "rank 0 asked to end; it said last:" in said
    assert "  line 99\n" in said and "  line 50\n" not in said and "  I am fine" not in said


def test_the_process_killed_is_to_blame_and_not_those_that_fall_after_it(tmp_path, capsys):
    # A peer notices at once and ends with an error of its own, as one of a cluster does.
    notices = (
        ready(tmp_path, "a") + "import sys, time\n"
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
    victim = ready(tmp_path, "victim") + FOR_EVER
    stubborn = STUBBORN + ready(tmp_path, "stubborn") + FOR_EVER
    paths = [tmp_path / name for name in ("a", "victim", "stubborn")]
    killer = when_there(*paths, do=lambda: os.kill(wait_for(paths[1])[0], signal.SIGKILL))
    began = time.monotonic()
    with pytest.raises(DeviceError, match=r"rank 1 \(this host\): was killed by SIGKILL"):
        supervise(processes(notices, victim, stubborn), 1.0)
    assert time.monotonic() - began < 15
    killer.join()
    told = capsys.readouterr().err
    assert "launch: rank 1 (this host) was killed by SIGKILL" in told
    assert "ranks 0, 2 asked to end" in told
    assert "rank 2 did not end in 1 s: killed" in told
    assert "launch: rank 0" not in told
    assert all_gone(wait_for(*paths))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_request_to_stop_reaches_all_who_save_and_that_is_no_error(number, tmp_path, capsys):
    codes = [SAVES + ready(tmp_path, name) + FOR_EVER for name in "ab"]
    before = signal.getsignal(number)
    asker = when_there(tmp_path / "a", tmp_path / "b", do=lambda: os.kill(os.getpid(), number))
    supervise(processes(*codes), 5)
    asker.join()
    told = capsys.readouterr()
    assert "[0] saved\n" in told.out and "[1] saved\n" in told.out
    assert f"launch: {number.name}: all are asked to save" in told.err
    assert signal.getsignal(number) is before


def test_a_second_request_kills(tmp_path):
    codes = [STUBBORN + ready(tmp_path, name) + FOR_EVER for name in "ab"]

    def ask_twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    asker = when_there(tmp_path / "a", tmp_path / "b", do=ask_twice)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        supervise(processes(*codes), 60)
    assert time.monotonic() - began < 15
    asker.join()
    assert all_gone(wait_for(tmp_path / "a", tmp_path / "b"))


def test_one_asked_before_it_can_save_is_interrupted_and_not_to_blame(tmp_path):
    codes = [ready(tmp_path, "a") + FOR_EVER, SAVES + ready(tmp_path, "b") + FOR_EVER]
    asker = when_there(
        tmp_path / "a", tmp_path / "b", do=lambda: os.kill(os.getpid(), signal.SIGTERM)
    )
    with pytest.raises(KeyboardInterrupt):
        supervise(processes(*codes), 5)
    asker.join()


def test_one_that_fails_while_it_saves_is_to_blame(tmp_path):
    fails = (
        "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(4))\n"
        + ready(tmp_path, "a")
        + FOR_EVER
    )
    asker = when_there(tmp_path / "a", do=lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(BertError, match="exit code 4"):
        supervise(processes(fails), 5)
    asker.join()


def test_what_a_process_started_ends_with_it(tmp_path):
    child = ready(tmp_path, "{name}") + FOR_EVER
    parent = (
        "import subprocess, sys, time, os\n"
        "subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        f"while len(os.listdir({str(tmp_path)!r})) < 2: time.sleep(0.005)\n"
        "{then}"
    )
    fails = parent.format(child=child.format(name="a"), then="time.sleep(0.1)\nsys.exit(3)")
    stays = parent.format(child=child.format(name="b"), then="time.sleep(600)")
    with pytest.raises(DataError):
        supervise(processes(fails, stays), 5)
    assert all_gone(wait_for(tmp_path / "a", tmp_path / "b"))


def launcher(*codes: str, grace_seconds: float) -> subprocess.Popen:
    """`supervise` in a process of its own."""
    code = (
        "import sys\nfrom bert_cli.cli import main\nimport bert_cli.cli\n"
        "from bert_cli.parallel.supervise import Process, supervise\n"
        f"processes = {processes(*codes, grace_seconds=grace_seconds)!r}\n"
        f"bert_cli.cli.dispatch = lambda _: supervise(processes, {grace_seconds})\n"
        "sys.exit(main([]))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_launcher_killed_by_signal_9_takes_all_with_it(tmp_path):
    codes = [
        SAVES + ready(tmp_path, "obeys") + FOR_EVER,
        STUBBORN + ready(tmp_path, "stubborn") + FOR_EVER,
    ]
    with launcher(*codes, grace_seconds=1.0) as process:
        numbers = wait_for(tmp_path / "obeys", tmp_path / "stubborn")
        assert all(map(alive, numbers))
        process.kill()
    assert all_gone(numbers)


def test_whoever_stands_beside_a_process_takes_it_with_it(tmp_path):
    with launcher(ready(tmp_path, "a") + FOR_EVER, grace_seconds=20.0) as process:
        (number,) = wait_for(tmp_path / "a")
        beside = int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(beside, signal.SIGKILL)
        _, told = process.communicate(timeout=30)
    assert process.returncode == DeviceError.exit_code
    assert "rank 0 (this host) was killed by SIGKILL" in told
    assert all_gone([number])


def test_a_reader_that_hangs_up_ends_all_without_a_traceback(tmp_path):
    talks = SAVES + ready(tmp_path, "a") + "while True: print('more'); time.sleep(0.01)"
    with launcher(talks, grace_seconds=20.0) as process:
        assert process.stdout.readline() == "[0] more\n"
        process.stdout.close()
        told = process.stderr.read()
        assert process.wait(timeout=30) == 0
    assert "Traceback" not in told and "SIGPIPE: all are asked" in told
    assert all_gone(wait_for(tmp_path / "a"))


def test_a_program_that_is_not_there_ends_those_that_started(tmp_path):
    first = Process(0, "n1", ("sh", "-c", f"echo $$ > {tmp_path}/a; exec sleep 600"), {})
    absent = Process(1, "n2", ("/nowhere/ssh", "n2", "true"), {})
    with pytest.raises(ConfigError, match=r"/nowhere/ssh \(for rank 1 \(n2\)\): cannot be started"):
        supervise([first, absent], 5)
    assert not (tmp_path / "a").exists() or all_gone(wait_for(tmp_path / "a"))


def by_hand(*program: str) -> subprocess.CompletedProcess:
    """The printed command, where no launcher listens: with nothing on standard input."""
    return subprocess.run(
        attended(program, 0, 1, 5.0), stdin=subprocess.DEVNULL, capture_output=True, text=True
    )


def test_a_command_run_by_hand_needs_no_launcher():
    done = by_hand(sys.executable, "-c", "import time; time.sleep(0.2); print('ran'); exit(3)")
    assert (done.returncode, done.stdout, done.stderr) == (3, "ran\n", "")
    assert by_hand("sh", "-c", "kill -9 $$").returncode == 128 + signal.SIGKILL


def test_ctrl_c_to_a_command_run_by_hand_reaches_the_program(tmp_path):
    code = (
        "import signal, sys\nsignal.signal(signal.SIGINT, lambda *_: sys.exit(7))\n"
        + ready(tmp_path, "a")
        + FOR_EVER
    )
    words = attended((sys.executable, "-c", code), 0, 1, 5.0)
    with subprocess.Popen(words, stdin=subprocess.DEVNULL) as process:
        wait_for(tmp_path / "a")
        process.send_signal(signal.SIGINT)
    assert process.returncode == 7


GPU_LIST = "\n".join(
    [
        "GPU 0: NVIDIA H200 (UUID: GPU-1)",
        "  MIG 1g.18gb Device 0: (UUID: MIG-1)",
        "GPU 1: NVIDIA H200 (UUID: GPU-2)",
        "",
    ]
)


def nvidia_smi(folder: Path, text: str, code: int = 0) -> dict[str, str]:
    """An environment with an `nvidia-smi` that says so."""
    (folder / "list").write_text(text)
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n/bin/cat {folder}/list\nexit {code}\n")
    (folder / "nvidia-smi").chmod(0o755)
    return {"PATH": str(folder)}


def test_gpus_are_divided_evenly(tmp_path):
    environment = nvidia_smi(tmp_path, GPU_LIST)
    assert [share_of_host(place, 2, environment).gpus for place in (0, 1)] == [("0",), ("1",)]
    environment["CUDA_VISIBLE_DEVICES"] = "3,GPU-abc, 5,6"
    assert share_of_host(1, 2, environment).gpus == ("5", "6")
    # One process has all there is, as without a launcher.
    assert share_of_host(0, 1, environment).gpus == ()


@pytest.mark.parametrize("of", [3, 8])
def test_gpus_that_cannot_be_divided_are_refused_with_both_numbers(of):
    with pytest.raises(DeviceError, match=rf"GPUs \(4 on .*divided evenly among {of} processes"):
        share_of_host(0, of, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"})


@pytest.mark.parametrize("hidden", ["", "-1", "-1,0"])
def test_hidden_gpus_are_none(hidden):
    assert share_of_host(0, 2, {"CUDA_VISIBLE_DEVICES": hidden}).gpus == ()


def test_a_driver_that_does_not_answer_means_no_gpus(tmp_path):
    assert share_of_host(0, 2, nvidia_smi(tmp_path, GPU_LIST, code=9)).gpus == ()


@pytest.fixture
def cores(monkeypatch):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core cannot be divided")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return os.sched_getaffinity(0)


def test_without_gpus_each_process_has_cores_of_its_own(cores, capsys):
    supervise(processes(*["import os; print(*os.sched_getaffinity(0))"] * 2), 5)
    lines = capsys.readouterr().out.splitlines()
    shares = [{int(core) for core in line.split()[1:]} for line in sorted(lines)]
    assert shares[0] | shares[1] == cores and not shares[0] & shares[1]
    assert abs(len(shares[0]) - len(shares[1])) <= 1


def test_gpus_are_seen_by_the_process_they_belong_to(cores, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], len(os.sched_getaffinity(0)))"
    supervise(processes(code, code), 5)
    lines = sorted(capsys.readouterr().out.splitlines())
    assert lines == [f"[0] 4 {len(cores)}", f"[1] 7 {len(cores)}"]


def test_more_processes_than_cores_share_them_and_it_is_said_once(cores, capsys):
    many = len(cores) + 1
    supervise(processes(*["import os; print(len(os.sched_getaffinity(0)))"] * many), 5)
    told = capsys.readouterr()
    assert {line.split()[1] for line in told.out.splitlines()} == {str(len(cores))}
    assert told.err == (
        f"[0] launch: {many} processes share {len(cores)} cores; none has cores of its own\n"
    )


def test_one_that_hangs_is_named_when_those_who_miss_it_end_first(tmp_path, capsys):
    misses = "import sys, time\ntime.sleep(1)\nsys.exit(5)"
    hangs = STUBBORN + FOR_EVER
    with pytest.raises(DeviceError) as ended:
        supervise(processes(misses, hangs), 2)
    assert "rank 0 (this host): ended with exit code 5" in str(ended.value)
    assert str(ended.value).endswith("The cause may be rank 1, which hung and had to be killed")
