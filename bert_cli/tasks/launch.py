"""`bert launch`: a command as several processes that make one run, here or on hosts.

Each process gets the addresses of all in TF_CONFIG, as a scheduler for TensorFlow would give them, and
its share of its host. Every command line is printed before it is run, so that a person can run it by
hand. How they are run, and seen to their ends, is `parallel/supervise.py`.
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
from bert_cli.config.bench import BenchPretrainSettings, BenchSquadSettings, expand_benchmark
from bert_cli.config.finetune import ClassifySettings, GlueSettings, NerSettings, SquadSettings
from bert_cli.config.flags import log_level_of
from bert_cli.config.load import load
from bert_cli.config.parallel import Cluster
from bert_cli.config.tools import LaunchSettings
from bert_cli.config.training import PretrainSettings, TrainSettings
from bert_cli.errors import ConfigError
from bert_cli.parallel.cluster import PORTS, find_processes
from bert_cli.parallel.launched import share_of_host
from bert_cli.parallel.supervise import Process, attended, supervise

# Commands that can be spread over processes, with their settings.
SPREAD: dict[str, type[TrainSettings]] = {
    "pretrain": PretrainSettings,
    "squad": SquadSettings,
    "glue": GlueSettings,
    "ner": NerSettings,
    "classify": ClassifySettings,
    "bench pretrain": BenchPretrainSettings,
    "bench squad": BenchSquadSettings,
}
PROGRAM = (sys.executable, "-m", "bert_cli")
REMOTE_PORT = 22_300  # one of PORTS: on another host we cannot look for a free one
PASSED = ("DATASETS_DIR",)
TRUST = (
    "the processes take connections on {on} of their hosts; connections are not authenticated, and whoever "
    "reaches the processes can run code there. The network must be trusted; --bind-address chooses the interface"
)


def run(settings: LaunchSettings) -> None:
    """Start all processes, print what they print, return when all have ended well.

    A request to stop goes to all of them. Raises ConfigError for a command that cannot be spread or
    has mistakes, DeviceError when this host cannot be divided, and when a process fails the error
    with its exit code; KeyboardInterrupt when they were killed on request.
    """
    _check(settings)
    processes = commands(settings, os.environ)
    for process in processes:
        print(f"[{process.rank}] {process.line}", flush=True)
    if settings.hosts:
        print(f"launch: {TRUST.format(on=settings.bind_address or 'every interface')}", flush=True)
    if not settings.dry_run:
        supervise(processes, settings.grace_seconds)


def _check(settings: LaunchSettings) -> None:
    """Find the mistakes of the command here, once, and not in every process."""
    name, options = split_command(expand_benchmark(settings.command) or ["no command"])
    if name not in SPREAD:
        raise ConfigError(
            f"bert launch ({name}): starts {', '.join(SPREAD)}; give it and its options after --, as "
            "`bert launch --processes 2 -- pretrain --config ...`"
        )
    asked, _ = load(SPREAD[name], log_level_of(options)[1], f"bert {name}")
    if asked.cluster.workers:
        raise ConfigError("--cluster.workers: bert launch names the processes; leave it out")
    if asked.exit_code_when_stopped:
        raise ConfigError(
            f"exit_code_when_stopped ({asked.exit_code_when_stopped}): bert launch takes any but 0 for a failure; "
            "leave it out, or have a scheduler start the processes"
        )
    here = find_processes(Cluster(), os.environ)
    if here.count > 1:
        raise ConfigError(
            f"{here.source} (rank {here.rank} of {here.count}): this is one of several processes already; run "
            f"`bert {name}` without launch"
        )


def commands(settings: LaunchSettings, environment: Mapping[str, str]) -> list[Process]:
    """What is started for each rank; ranks count host by host.

    Raises DeviceError when this host's GPUs cannot be divided, ConfigError for a port or a variable
    that is not to be had.
    """
    of = settings.processes
    if settings.hosts:
        first = REMOTE_PORT if settings.port is None else settings.port
        names = [host.rpartition("@")[2] for host in settings.hosts]
        ports = list(range(first, first + of))
    else:
        share_of_host(0, of, environment)
        names, ports = ["127.0.0.1"], _ports_here(of, settings.port)
    workers = [f"{name}:{port}" for name in names for port in ports]
    bound = ["--cluster.bind-address", settings.bind_address] if settings.bind_address else []
    processes = []
    for rank in range(len(workers)):
        variables = {"PYTHONUNBUFFERED": "1"}
        if len(workers) > 1:
            task = {"type": "worker", "index": rank}
            variables["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
        program = (*PROGRAM, *settings.command, *bound)
        words = attended(program, rank % of, of, settings.grace_seconds)
        process = Process(rank, "this host", words, variables)
        if settings.hosts:
            passed = _passed(settings.pass_variables, environment)
            line = Process(rank, "", words, variables | passed).line
            line = f"cd {shlex.quote(os.getcwd())} && exec {line}"
            host = settings.hosts[rank // of]
            process = Process(rank, host, (*shlex.split(settings.remote_shell), host, line), {})
        processes.append(process)
    return processes


def _ports_here(count: int, first: int | None) -> list[int]:
    """Ports that are free on this host now: those from `first` on, else any of PORTS."""
    if first is not None:
        wanted = list(range(first, first + count))
        taken = [port for port in wanted if not _is_free(port)]
        if taken:
            raise ConfigError(
                f"--port ({taken[0]}): cannot be had here; give another, or none to find free ones"
            )
        return wanted
    # In random order, so that two launches at a time do not find the same.
    free = (port for port in random.sample(PORTS, len(PORTS)) if _is_free(port))
    return list(itertools.islice(free, count))


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            trial.bind(("", port))
            return True
    return False


def _passed(names: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    absent = [name for name in names if name not in environment]
    if absent:
        raise ConfigError(
            f"pass_variables ({absent[0]}): is not set here; export it or leave it out"
        )
    return {name: environment[name] for name in (*PASSED, *names) if name in environment}
