"""`bert launch`: the processes it starts here and on hosts, and the mistakes it reports before it starts any."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import assert_gone, numbers
from support.tiny_models import TINY_RUN, flags_of

from bert_cli.config.tools import LaunchSettings
from bert_cli.errors import BertError, ConfigError, DeviceError
from bert_cli.parallel.launcher import Process, supervise
from bert_cli.parse.load import load
from bert_cli.tasks import launch


def settings(*words: str, command: tuple[str, ...] = ("--version",)) -> LaunchSettings:
    loaded, _ = load(LaunchSettings, words, "bert launch")
    return loaded.model_copy(update={"command": list(command)})


def test_ports_on_this_host_are_free_and_gpus_can_be_divided():
    processes = launch.make_processes(settings("--processes", "3"), {"CUDA_VISIBLE_DEVICES": ""})
    (config,) = (word for word in processes[0].words if word.startswith("TF_CONFIG="))
    workers = json.loads(config.partition("=")[2])["cluster"]["worker"]
    assert len({*workers}) == 3 and all(worker.startswith("127.0.0.1:") for worker in workers)
    with socket.create_server(("", 0)) as used:
        port = used.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--port \({port}\): is in use"):
            launch.make_processes(settings("--processes", "2", "--port", str(port - 1)), {})
    with pytest.raises(DeviceError, match=r"GPUs \(3 .*among 2 processes"):
        launch.make_processes(settings("--processes", "2"), {"CUDA_VISIBLE_DEVICES": "0,1,2"})


def test_a_process_of_a_group_starts_no_group(monkeypatch, bert):
    config = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    printed = bert("launch", "--dry-run", "--", "pretrain", *flags_of(TINY_RUN), code=2).err
    assert "TF_CONFIG (rank 1 of 2): this process already belongs to a group" in printed


@pytest.fixture
def remote(tmp_path, monkeypatch) -> list[str]:
    """Flags for two hosts, which stand for ssh in another session, in a folder whose name has to be quoted."""
    folder = tmp_path / "it's far"
    folder.mkdir()
    shell = tmp_path / "shell"
    shell.write_text(f'#!/bin/sh\necho "$1" >> {tmp_path}/seen\nexec setsid --wait sh -c "$2"\n')
    shell.chmod(0o755)
    monkeypatch.chdir(folder)
    return ["--remote-shell", str(shell), "--hosts", "a,b"]


def on_hosts(monkeypatch, code: str, *words: str) -> list[Process]:
    """Processes on hosts that run a piece of Python."""
    monkeypatch.setattr(launch, "PROGRAM", (sys.executable, "-c", code))
    return launch.make_processes(settings(*words, command=("it's", "$HOME")), os.environ)


READY = """
import json, os, pathlib, signal, sys, time
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
def save(*_):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
partial = pathlib.Path(f".pid{rank}")
partial.write_text(str(os.getpid()))
partial.rename(f"pid{rank}")
while not os.path.exists("pid0") or not os.path.exists("pid1"): time.sleep(0.005)
"""

PIDS = [Path("pid0"), Path("pid1")]


def test_a_process_on_a_host_has_the_same_folder_and_words(remote, monkeypatch, tmp_path, capsys):
    # Rank 0 sends the launcher the signal of a scheduler.
    code = f"{READY}print(rank, os.getcwd(), sys.argv[1:])\nopen(f'printed{{rank}}', 'w')\n"
    code += "while not os.path.exists('printed1'): time.sleep(0.005)\n"
    code += f"if rank == 0: os.kill({os.getpid()}, signal.SIGTERM)\ntime.sleep(600)"
    supervise(on_hosts(monkeypatch, code, *remote), 5)
    lines = sorted(capsys.readouterr().out.splitlines())
    here = f"""{tmp_path}/it's far ["it's", '$HOME']"""
    assert lines == [f"[0] 0 {here}", "[0] saved", f"[1] 1 {here}", "[1] saved"]
    assert sorted((tmp_path / "seen").read_text().split()) == ["a", "b"]


def test_no_process_stays_on_a_host_when_the_launcher_is_killed(remote, monkeypatch):
    # They ignore requests: only the end of the grace period ends them.
    ignores = READY + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)"
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.5)
    processes = on_hosts(monkeypatch, ignores, *remote)
    code = "from bert_cli.parallel.launcher import Process, supervise\n"
    code += f"supervise({processes!r}, 0.5)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL) as launcher:
        numbers(*PIDS)
        launcher.kill()
    assert_gone(*PIDS)


def test_a_process_killed_or_cut_off_is_named_and_none_stays(remote, monkeypatch):
    # The parent is `host.main`; its parent is the remote shell.
    shell = "int(open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()[1])"
    for victim, message in (("os.getpid()", r" \(b\): was killed by SIGKILL"), (shell, r" \(b\)")):
        dies = f"if rank == 1: os.kill({victim}, signal.SIGKILL)\ntime.sleep(600)"
        with pytest.raises(BertError, match=f"rank 1{message}"):
            supervise(on_hosts(monkeypatch, READY + dies, *remote), 5)
        assert_gone(*PIDS)
        for path in PIDS:
            path.unlink()
