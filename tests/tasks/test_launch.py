"""`bert launch`: what it starts here and on hosts, what it refuses before it starts anything."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bert_cli.cli import main
from bert_cli.config.load import load
from bert_cli.config.parallel import Cluster
from bert_cli.config.tools import LaunchSettings
from bert_cli.errors import BertError, ConfigError, DeviceError
from bert_cli.parallel.cluster import find_processes
from bert_cli.parallel.supervise import Process, supervise
from bert_cli.tasks import launch
from bert_cli.train.checkpoint import whole_checkpoints

TINY = [
    "--generated-dataset",
    *("--max-seq-length", "16"),
    *("--max-predictions-per-seq", "3"),
    *("--bert-config.vocab-size", "60"),
    *("--bert-config.hidden-size", "16"),
    *("--bert-config.num-hidden-layers", "2"),
    *("--bert-config.num-attention-heads", "2"),
    *("--bert-config.intermediate-size", "32"),
    *("--bert-config.max-position-embeddings", "32"),
    *("--global-batch.micro-batch-size", "2"),
    *("--optimizer-opts.name", "LAMB"),
    *("--optimizer-opts.learning-rate.max-learning-rate", "0.01"),
]


@pytest.fixture(autouse=True)
def _cluster_of_nobody(monkeypatch):
    for name in ("TF_CONFIG", "SLURM_STEP_NODELIST"):
        monkeypatch.delenv(name, raising=False)


def settings(*words: str, command: tuple[str, ...] = ("--version",)) -> LaunchSettings:
    given, _ = load(LaunchSettings, words, "bert launch")
    return given.model_copy(update={"command": list(command)})


def variables(process: Process) -> dict[str, str]:
    """What a process finds in its environment, also when it is started by a line for a shell."""
    if process.variables:
        return dict(process.variables)
    after_env = shlex.split(process.words[-1].partition("exec env ")[2])
    pairs = (word.partition("=") for word in after_env if "=" in word)
    return {name: value for name, _, value in pairs}


def test_ranks_count_host_by_host_and_each_process_finds_its_own():
    asked = settings("--processes", "2", "--hosts", "me@a,b", "--port", "4000")
    processes = launch.commands(asked, {})
    assert [process.host for process in processes] == ["me@a", "me@a", "b", "b"]
    for rank, process in enumerate(processes):
        found = find_processes(Cluster(), variables(process))
        assert (process.rank, found.rank, found.source) == (rank, rank, "TF_CONFIG")
        assert found.workers == ("a:4000", "a:4001", "b:4000", "b:4001")
        assert f"--share {rank % 2}/2" in process.line
        assert variables(process)["PYTHONUNBUFFERED"] == "1"


def test_here_each_process_gets_a_port_that_is_free():
    processes = launch.commands(settings("--processes", "3"), {"CUDA_VISIBLE_DEVICES": ""})
    workers = find_processes(Cluster(), variables(processes[0])).workers
    assert len(set(workers)) == 3
    for worker in workers:
        with socket.socket() as trial:
            trial.bind(("127.0.0.1", int(worker.removeprefix("127.0.0.1:"))))


def test_a_port_that_is_taken_is_refused_by_its_number():
    with socket.socket() as held:
        held.bind(("", 0))
        held.listen()
        port = held.getsockname()[1]
        first = str(port - 1 if port == 65_535 else port)
        with pytest.raises(ConfigError, match=rf"--port \({port}\): cannot be had"):
            launch.commands(settings("--processes", "2", "--port", first), {})


def test_one_process_is_alone_and_has_no_cluster():
    for words in ((), ("--hosts", "a")):
        (process,) = launch.commands(settings(*words), {})
        assert "TF_CONFIG" not in variables(process)


def test_gpus_of_this_host_that_cannot_be_divided_are_refused_before_the_start():
    with pytest.raises(DeviceError, match=r"GPUs \(3 .*among 2 processes"):
        launch.commands(settings("--processes", "2"), {"CUDA_VISIBLE_DEVICES": "0,1,2"})


def test_hosts_get_the_variables_that_were_named_and_where_the_data_is():
    environment = {"DATASETS_DIR": "/data sets", "NCCL_DEBUG": "INFO", "SECRET": "x"}
    asked = settings("--hosts", "a,b", "--pass-variables", "NCCL_DEBUG")
    found = variables(launch.commands(asked, environment)[1])
    assert found["DATASETS_DIR"] == "/data sets" and found["NCCL_DEBUG"] == "INFO"
    assert "SECRET" not in found
    with pytest.raises(ConfigError, match=r"pass_variables \(NCCL_DEBUG\): is not set here"):
        launch.commands(asked, {})


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--hosts", "a,b,a"], "a is named twice"),
        (["--hosts", "me@a,you@a"], "a is named twice"),
        (["--hosts", "a:22"], "is no host"),
        (["--hosts=-oProxyCommand=x"], "is no host"),
        (["--hosts", "me@-a"], "is no host"),
        (["--remote-shell", "rsh"], "remote_shell has no effect without hosts"),
        (["--bind-address", "ib0"], "bind_address has no effect without hosts"),
        (["--pass-variables", "A"], "pass_variables has no effect without hosts"),
        (["--port", "65535", "--processes", "2"], "leaves too few"),
        (["--processes", "0"], "greater than or equal to 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(words, told):
    with pytest.raises(ConfigError) as refused:
        settings(*words)
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "(no command): starts pretrain"),
        (["--"], "(no command): starts pretrain"),
        (["--", "tokenize", "a", "b"], "(tokenize): starts pretrain"),
        (["--", "launch", "--", "pretrain"], "(launch): starts pretrain"),
        (["pretrain", "--config", "x"], "the command stands after --"),
        (["--", "pretrain", "--confg", "x"], "did you mean '--config'?"),
        (["--", "pretrain", *TINY, "--seed", "x"], "seed (--seed)"),
        (["--", "pretrain", *TINY, "--cluster.workers", "a:1,b:1", "--cluster.rank", "0"], "names the processes"),
        (["--", "pretrain", *TINY, "--exit-code-when-stopped", "75"], "any but 0 for a failure"),
        (["--processs", "2", "--", "pretrain"], "did you mean '--processes'?"),
    ],
)  # fmt: skip
def test_mistakes_are_found_once_before_anything_starts(words, told, capsys):
    began = time.monotonic()
    assert main(["launch", *words]) == 2
    found = capsys.readouterr()
    assert told in found.err and len(found.err.splitlines()) == 1
    assert found.out == ""
    # TensorFlow alone takes longer.
    assert time.monotonic() - began < 2


def test_inside_a_step_of_several_tasks_there_is_nothing_to_launch(monkeypatch, capsys):
    tasks = {"worker": ["a:1", "b:1"]}
    told = {"cluster": tasks, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(told))
    assert main(["launch", "--", "pretrain", *TINY]) == 2
    assert "TF_CONFIG (rank 1 of 2): this is one of several" in capsys.readouterr().err


def test_the_commands_own_help_is_shown(capsys):
    with pytest.raises(SystemExit) as end:
        main(["launch", "--processes", "2", "--", "pretrain", "--help"])
    assert end.value.code == 0
    assert "usage: bert pretrain" in capsys.readouterr().out


def test_a_dry_run_prints_every_command_and_starts_none(monkeypatch, capsys):
    monkeypatch.setattr(launch, "supervise", lambda *_: pytest.fail("started"))
    words = ["launch", "--dry-run", "--processes", "2", "--hosts", "a,b", "--", "pretrain", *TINY]
    assert main([*words, "--wandb.name", "it's -- mine"]) == 0
    told = capsys.readouterr().out
    assert "on every interface of their hosts" in told and "The network must be trusted" in told
    assert "(after --)" in told
    lines = [line for line in told.splitlines() if line.startswith("[")]
    assert [line[:9] for line in lines] == ["[0] ssh a", "[1] ssh a", "[2] ssh b", "[3] ssh b"]
    (remote,) = shlex.split(lines[0])[3:]
    assert shlex.split(remote)[-1] == "it's -- mine"


def test_the_interface_is_passed_on_to_every_process(monkeypatch, capsys):
    words = [
        "launch",
        "--dry-run",
        "--hosts",
        "a,b",
        "--bind-address",
        "ib0",
        "--",
        "pretrain",
        *TINY,
    ]
    assert main(words) == 0
    *lines, note = capsys.readouterr().out.splitlines()[-3:]
    assert all(line.endswith(" --cluster.bind-address ib0'") for line in lines), lines
    assert "on ib0 of their hosts" in note


FAR = """#!/bin/sh
# Stands for ssh: another session, and a shell that reads one string.
echo "$1" >> "{seen}"
exec setsid --wait sh -c "$2"
"""


@pytest.fixture
def far(tmp_path, monkeypatch):
    """A stand-in for ssh, in a folder whose name has to be quoted."""
    folder = tmp_path / "it's far"
    folder.mkdir()
    shell = tmp_path / "far"
    shell.write_text(FAR.format(seen=tmp_path / "seen"))
    shell.chmod(0o755)
    monkeypatch.chdir(folder)
    return ["--remote-shell", str(shell), "--hosts", "a,b"]


def far_away(monkeypatch, code: str, *words: str) -> list[Process]:
    """Processes on hosts that run a piece of Python."""
    monkeypatch.setattr(launch, "PROGRAM", (sys.executable, "-c", code))
    return launch.commands(settings(*words, command=("it's", "$HOME")), os.environ)


def test_a_process_on_a_host_runs_in_the_same_folder_with_its_words_as_they_were(
    far, monkeypatch, tmp_path, capsys
):
    code = (
        "import json, os, sys\n"
        "rank = json.loads(os.environ['TF_CONFIG'])['task']['index']\n"
        "print(rank, os.getcwd(), sys.argv[1:])"
    )
    supervise(far_away(monkeypatch, code, *far), 5)
    told = sorted(capsys.readouterr().out.splitlines())
    here = f"""{tmp_path}/it's far ["it's", '$HOME']"""
    assert told == [f"[0] 0 {here}", f"[1] 1 {here}"]
    assert sorted((tmp_path / "seen").read_text().split()) == ["a", "b"]


LIVES = """
import json, os, pathlib, signal, sys, time
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
def save(*_):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
mine = pathlib.Path(f".pid{rank}")
mine.write_text(str(os.getpid()))
mine.rename(f"pid{rank}")
"""


def numbers(folder: Path) -> list[int]:
    """Of the processes of two ranks, once they run."""
    paths = [folder / "pid0", folder / "pid1"]
    until = time.monotonic() + 30
    while not all(path.exists() for path in paths):
        assert time.monotonic() < until
        time.sleep(0.005)
    return [int(path.read_text()) for path in paths]


def gone(process_numbers: list[int]) -> bool:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        left = [n for n in process_numbers if Path(f"/proc/{n}/cmdline").exists()]
        left = [n for n in left if Path(f"/proc/{n}/cmdline").read_bytes()]  # empty: a zombie
        if not left:
            return True
        time.sleep(0.01)
    return False


def test_processes_on_hosts_are_asked_to_stop_and_their_last_words_arrive(far, monkeypatch, capsys):
    # The first one asks the launcher, as a scheduler would.
    asks = "while rank == 0 and not os.path.exists('pid1'): time.sleep(0.005)\n"
    asks += f"if rank == 0: os.kill({os.getpid()}, signal.SIGTERM)\ntime.sleep(600)"
    supervise(far_away(monkeypatch, LIVES + asks, *far), 5)
    told = capsys.readouterr().out
    assert "[0] saved" in told and "[1] saved" in told


def test_a_process_killed_on_a_host_is_named_with_its_host(far, monkeypatch, capsys):
    dies = "while not os.path.exists('pid0'): time.sleep(0.005)\n"
    dies += "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)"
    with pytest.raises(DeviceError, match=r"rank 1 \(b\): was killed by SIGKILL"):
        supervise(far_away(monkeypatch, LIVES + dies, *far), 5)
    assert gone(numbers(Path.cwd()))


def test_nothing_stays_on_a_host_when_the_launcher_is_killed(far, monkeypatch):
    # Deaf to requests: only the grace ends them.
    deaf = LIVES + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)"
    processes = far_away(monkeypatch, deaf, *far, "--grace-seconds", "1")
    code = (
        f"from bert_cli.parallel.supervise import Process, supervise\nsupervise({processes!r}, 1.0)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL) as launcher:
        found = numbers(Path.cwd())
        launcher.kill()
    assert gone(found)


def test_a_remote_shell_that_is_cut_off_ends_the_process_behind_it(far, monkeypatch):
    # Above this one stand `launched` and the shell, whose death the launcher sees as that of ssh.
    cut = "above = open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()[1]\n"
    cut += "while not os.path.exists('pid0'): time.sleep(0.005)\n"
    cut += "if rank == 1: os.kill(int(above), signal.SIGKILL)\ntime.sleep(600)"
    with pytest.raises(BertError, match=r"rank 1 \(b\)"):
        supervise(far_away(monkeypatch, LIVES + cut, *far), 5)
    assert gone(numbers(Path.cwd()))


def test_two_processes_train_and_a_request_to_stop_saves_once(tmp_path):
    run = tmp_path / "run"
    words = ["--save-ckpt-path", str(run), "--total-num-train-samples", "4000000"]
    command = ["pretrain", *TINY, *words, "--global-batch.replicas", "2"]
    launcher = subprocess.Popen(
        [sys.executable, "-m", "bert_cli", "launch", "--processes", "2", "--", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = []
    with launcher:
        for line in launcher.stdout:
            lines.append(line)
            if line.startswith("[0] step ") and not launcher.poll():
                launcher.send_signal(signal.SIGINT)
                break
        lines += launcher.stdout
    text = "".join(lines)
    assert launcher.returncode == 0, text
    assert "2 processes, as TF_CONFIG says" in text and "stopped at step" in text
    assert len(whole_checkpoints(run)) == 1


def test_a_measurement_is_started_as_several_processes_by_its_kind_or_its_name(capsys):
    for words in (["bench", "squad", "--config", "squad_tiny"], ["bench", "tiny_128"]):
        assert main(["launch", "--processes", "2", "--dry-run", "--", *words]) == 0
        told = [line for line in capsys.readouterr().out.splitlines() if line[0] == "["]
        assert len(told) == 2 and all(line.endswith(" ".join(words)) for line in told)
    assert main(["launch", "--processes", "2", "--", "bench", "data"]) == 2
    assert "(bench data): starts pretrain" in capsys.readouterr().err
    assert main(["launch", "--processes", "2", "--", "bench", "tiny_127"]) == 2
    assert "did you mean 'tiny_128'?" in capsys.readouterr().err
