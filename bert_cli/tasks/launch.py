"""`bert launch`: start a command as several processes of one run, on this host or on other hosts.

Each process gets the addresses of all processes in TF_CONFIG. `parallel/launcher.py` runs them.
"""

import itertools
import json
import os
import random
import shlex
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress

from bert_cli.commands import COMMANDS, split_command
from bert_cli.config.tools import LaunchSettings
from bert_cli.config.training import TrainSettings
from bert_cli.errors import ConfigError
from bert_cli.parallel.cluster import PORTS, find_processes
from bert_cli.parallel.devices import gpus_of
from bert_cli.parallel.launcher import Process, command_on_host, supervise
from bert_cli.parse.load import load
from bert_cli.parse.options import split_log_level
from bert_cli.planning.layout import check_processes
from bert_cli.processes import print_line

PROGRAM = (sys.executable, "-m", "bert_cli")
REMOTE_PORT = 22_300  # one of PORTS; free ports of another host are not visible from this host
PASSED = ("DATASETS_DIR",)
# Seconds that the other processes have to stop after a process has failed; then they are killed.
GRACE_SECONDS = 30.0
TRUST = (
    "the processes accept connections on the interfaces of these hosts' addresses without authentication: anyone who "
    "can reach them can run code. The network must be trusted"
)


def run(settings: LaunchSettings) -> None:
    """Start all processes, print what they write, and return when all have ended with 0; raises as `supervise` does."""
    name, options = split_command(settings.command or ["no command"])
    training = {command.training for command in COMMANDS.values()}
    several = [command for command in COMMANDS if command.removeprefix("bench ") in training]
    if name not in several:
        problem = f"can only start {', '.join(several)}"
        remedy = (
            "write a command after --, such as `bert launch --processes 2 -- pretrain --config ...`"
        )
        raise ConfigError(f"bert launch ({name})", problem, remedy)
    kind = COMMANDS[name].settings_class()
    assert issubclass(kind, TrainSettings)
    # Checked once, what every process would check.
    inner, _ = load(kind, split_log_level(options)[1], f"bert {name}")
    if inner.cluster.workers:
        raise ConfigError("--cluster.workers", "is set by bert launch", "leave it out")
    processes = settings.processes * max(1, len(settings.hosts))
    check_processes(inner.global_batch, processes, is_auto=inner.parallel.layout == "auto")
    if inner.exit_code_when_stopped:
        problem = "does not work under bert launch, which treats every code but 0 as a failure"
        raise ConfigError("exit_code_when_stopped", problem, "have a scheduler start the processes")
    group = find_processes(os.environ)
    if group.count > 1:
        where = f"{group.source} (rank {group.rank} of {group.count})"
        problem = "this process already belongs to a group of processes"
        raise ConfigError(where, problem, f"run `bert {name}` without bert launch")
    started = make_processes(settings, os.environ)
    for process in started:
        print_line(f"[{process.rank}] {shlex.join(process.words)}")
    if settings.hosts:
        print_line(f"launch: {TRUST}")
    if not settings.dry_run:
        supervise(started, GRACE_SECONDS)


def make_processes(settings: LaunchSettings, environment: Mapping[str, str]) -> list[Process]:
    """Return the process of each rank, host by host. Raises DeviceError or ConfigError if the host lacks something."""
    count = settings.processes
    hosts = settings.hosts or ["this host"]
    variables = {"PYTHONUNBUFFERED": "1"}
    if settings.hosts:
        names = [host.rpartition("@")[2] for host in hosts]
        first = REMOTE_PORT if settings.port is None else settings.port
        ports = list(range(first, first + count))
        absent = sorted({*settings.pass_variables} - {*environment})
        if absent:
            where = f"pass_variables ({', '.join(absent)})"
            raise ConfigError(where, "is not set here", "export it or leave it out")
        passed = (*PASSED, *settings.pass_variables)
        variables |= {name: environment[name] for name in passed if name in environment}
    else:
        names = ["127.0.0.1"]
        # In random order, so that simultaneous launches find different ports.
        tried = random.sample(PORTS, len(PORTS))
        if settings.port is not None:
            tried = list(range(settings.port, settings.port + count))
        ports = list(itertools.islice(filter(_is_free, tried), count))
        if settings.port is not None and len(ports) < count:
            used = {*tried} - {*ports}
            remedy = "use another port, or leave it out to use free ports"
            raise ConfigError(f"--port ({min(used)})", "is in use on this host", remedy)
        gpus_of(0, count, environment)
    workers: list[str] = []
    for name in names:
        workers += [f"{name}:{port}" for port in ports]
    program = [*PROGRAM, *settings.command]
    processes = []
    for rank in range(len(workers)):
        host = hosts[rank // count]
        local_rank = rank % count
        if len(workers) > 1:
            task = {"type": "worker", "index": rank}
            variables["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
        # By `env`, because ssh passes no variables to the other host.
        words = ["env", *(f"{name}={value}" for name, value in variables.items())]
        words += command_on_host(program, local_rank, count, GRACE_SECONDS)
        if settings.hosts:
            line = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(words)}"
            words = [*shlex.split(settings.remote_shell), host, line]
        processes.append(Process(rank, host, words))
    return processes


def _is_free(port: int) -> bool:
    with socket.socket() as trial, suppress(OSError):
        # A port of a run that has just ended waits a minute in the system, and can be used.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        trial.bind(("", port))
        return True
    return False
