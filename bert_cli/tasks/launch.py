"""`bert launch`: start a command as several processes that make one run, on this host or on others.

Each process gets the addresses of all in TF_CONFIG and its part of its host's devices. Every command
is printed before it is run. `parallel/launcher.py` runs them.
"""

import itertools
import json
import os
import random
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from bert_cli.commands import split_command
from bert_cli.config.finetune import ClassifySettings, GlueSettings, NerSettings, SquadSettings
from bert_cli.config.load import load
from bert_cli.config.options import split_log_level
from bert_cli.config.settings import Cluster
from bert_cli.config.tools import (
    BenchPretrainSettings,
    BenchSquadSettings,
    LaunchSettings,
    expand_benchmark,
)
from bert_cli.config.training import PretrainSettings, TrainSettings
from bert_cli.errors import ConfigError
from bert_cli.parallel.cluster import PORTS, find_processes
from bert_cli.parallel.host import devices_of, remote_program
from bert_cli.parallel.launcher import Process, supervise

# Commands that can run as several processes, with their settings.
COMMANDS: dict[str, type[TrainSettings]] = {
    "pretrain": PretrainSettings,
    "squad": SquadSettings,
    "glue": GlueSettings,
    "ner": NerSettings,
    "classify": ClassifySettings,
    "bench pretrain": BenchPretrainSettings,
    "bench squad": BenchSquadSettings,
}
PROGRAM = (sys.executable, "-m", "bert_cli")
REMOTE_PORT = 22_300  # one of PORTS; a free one on another host cannot be found from here
PASSED = ("DATASETS_DIR",)
TRUST = (
    "the processes take connections on {on} of their hosts; connections are not authenticated, and whoever "
    "reaches the processes can run code there. The network must be trusted; --bind-address chooses the interface"
)


def run(settings: LaunchSettings) -> None:
    """Start all processes, print what they write, and return when all have ended with 0.

    Raises ConfigError for a command that cannot run as several processes or has mistakes, DeviceError
    when the devices of this host cannot be divided, and as `supervise` does.
    """
    _check_command(settings)
    processes = make_processes(settings, os.environ)
    for process in processes:
        print(f"[{process.rank}] {process.line}", flush=True)
    if settings.hosts:
        print(f"launch: {TRUST.format(on=settings.bind_address or 'every interface')}", flush=True)
    if not settings.dry_run:
        supervise(processes, settings.grace_seconds)


def _check_command(settings: LaunchSettings) -> None:
    """Raise ConfigError for the mistakes of the command, here and once, not in every process."""
    name, options = split_command(expand_benchmark(settings.command) or ["no command"])
    if name not in COMMANDS:
        raise ConfigError(
            f"bert launch ({name})",
            f"starts {', '.join(COMMANDS)}",
            "give one of them and its options after --, as `bert launch --processes 2 -- pretrain --config ...`",
        )
    inner, _ = load(COMMANDS[name], split_log_level(options)[1], f"bert {name}")
    if inner.cluster.workers:
        raise ConfigError("--cluster.workers", "is set by bert launch", "leave it out")
    if inner.exit_code_when_stopped:
        raise ConfigError(
            f"exit_code_when_stopped ({inner.exit_code_when_stopped})",
            "would be a failure to bert launch, as every code but 0",
            "leave it out, or have a scheduler start the processes",
        )
    group = find_processes(Cluster(), os.environ)
    if group.count > 1:
        raise ConfigError(
            f"{group.source} (rank {group.rank} of {group.count})",
            "this process is one of several already",
            f"run `bert {name}` without launch",
        )


def make_processes(settings: LaunchSettings, environment: Mapping[str, str]) -> list[Process]:
    """Return the process of each rank, host by host.

    Raises DeviceError when this host's GPUs cannot be divided, ConfigError for a port in use or an
    environment variable that is not set.
    """
    count = settings.processes
    if settings.hosts:
        first = REMOTE_PORT if settings.port is None else settings.port
        names = [host.rpartition("@")[2] for host in settings.hosts]
        ports = list(range(first, first + count))
    else:
        names, ports = ["127.0.0.1"], _free_ports(count, settings.port)
    workers = [f"{name}:{port}" for name in names for port in ports]
    bind = ["--cluster.bind-address", settings.bind_address] if settings.bind_address else []
    program = (*PROGRAM, *settings.command, *bind)
    processes = []
    for rank in range(len(workers)):
        variables = {"PYTHONUNBUFFERED": "1"}
        if len(workers) > 1:
            task = {"type": "worker", "index": rank}
            variables["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
        if settings.hosts:
            variables |= _passed_variables(settings.pass_variables, environment)
            process = _remote_process(settings, rank, program, variables)
        else:
            devices = devices_of(rank, count, environment)
            if devices.message and rank == 0:
                print(f"launch: {devices.message}", file=sys.stderr, flush=True)
            variables |= devices.variables
            process = Process(rank, "this host", program, variables, devices.cores)
        processes.append(process)
    return processes


def _remote_process(
    settings: LaunchSettings, rank: int, program: Sequence[str], variables: Mapping[str, str]
) -> Process:
    """Return the process that runs the program in this folder on the host of a rank."""
    host_index, local_rank = divmod(rank, settings.processes)
    host = settings.hosts[host_index]
    words = remote_program(program, local_rank, settings.processes, settings.grace_seconds)
    line = Process(rank, host, words, variables).line
    line = f"cd {shlex.quote(os.getcwd())} && exec {line}"
    shell = (*shlex.split(settings.remote_shell), host, line)
    return Process(rank, host, shell, {}, is_remote=True)


def _free_ports(count: int, first: int | None) -> list[int]:
    """Return ports that are free on this host: those from `first` on, or any of PORTS."""
    if first is not None:
        wanted = list(range(first, first + count))
        if used := [port for port in wanted if not _is_free(port)]:
            raise ConfigError(
                f"--port ({used[0]})",
                "is in use on this host",
                "give another, or none to find free ones",
            )
        return wanted
    # In random order, so that two launches at the same time find different ones.
    free = (port for port in random.sample(PORTS, len(PORTS)) if _is_free(port))
    return list(itertools.islice(free, count))


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            trial.bind(("", port))
            return True
    return False


def _passed_variables(names: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    if absent := [name for name in names if name not in environment]:
        raise ConfigError(
            f"pass_variables ({absent[0]})", "is not set here", "export it or leave it out"
        )
    return {name: environment[name] for name in (*PASSED, *names) if name in environment}
