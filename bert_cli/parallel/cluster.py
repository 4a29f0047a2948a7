"""The process group of a run as its environment describes it: the addresses of all, and this rank.

Flags come first, then TF_CONFIG (which `bert launch` and schedulers for TensorFlow set), then SLURM
inside an `srun` step of several tasks. Nothing connects to another process here, so mistakes are
reported before TensorFlow is loaded.
"""

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bert_cli.config.settings import Cluster
from bert_cli.errors import ConfigError

# Below those that Linux gives to a socket without a port (from 32,768 on).
PORTS = range(20_000, 32_000)
# The ports of a SLURM step follow from its number, so that two steps on a host have different ones: for
# so many tasks of a step on a host, and so many steps of a job.
PORTS_OF_STEP, STEPS_OF_JOB = 64, 8
SCONTROL_SECONDS = 60


@dataclass(frozen=True)
class Processes:
    """The addresses of a run's processes in the order of their ranks, and the rank of this one."""

    workers: tuple[str, ...]
    """host:port of each; empty for a single process."""
    rank: int = 0
    source: str = "this process alone"
    """The flag or environment variable that described them."""

    @property
    def count(self) -> int:
        """Return the world size."""
        return max(1, len(self.workers))

    @property
    def local_ranks(self) -> list[int]:
        """Return the ranks of the processes on this host."""
        hosts = [worker.rpartition(":")[0] for worker in self.workers] or [""]
        return [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]

    @property
    def local_processes(self) -> int:
        """Return the number of processes on this host."""
        return len(self.local_ranks)

    @property
    def local_rank(self) -> int:
        """Return the number of this process among those on its host."""
        return self.local_ranks.index(self.rank)


def find_processes(cluster: Cluster, environment: Mapping[str, str]) -> Processes:
    """Return the processes as flags, TF_CONFIG or SLURM describe them.

    Raises ConfigError for a description that is incomplete or contradicts itself.
    """
    if cluster.workers:
        assert cluster.rank is not None
        return _checked(cluster.workers, cluster.rank, "--cluster.workers")
    if environment.get("TF_CONFIG", "").strip():
        return _from_tf_config(environment["TF_CONFIG"])
    # Only `srun` sets it: the shell of an allocation and the script of a job are single processes.
    if environment.get("SLURM_STEP_NODELIST"):
        return _from_slurm(environment)
    return Processes(())


def _checked(workers: Sequence[str], rank: int, source: str) -> Processes:
    for worker in workers:
        match = re.fullmatch(r"(?:[^\s:/\[\]]+|\[[^\s\[\]]+\]):(\d{1,5})", worker)
        if not match or not 0 < int(match[1]) < 65_536:
            raise ConfigError(
                f"{source} ({worker})", "is no host:port", "give one for each process"
            )
    if len(set(workers)) < len(workers):
        twice = next(worker for worker in workers if list(workers).count(worker) > 1)
        raise ConfigError(f"{source} ({twice})", "is named twice", "give each process its own port")
    if not 0 <= rank < len(workers):
        raise ConfigError(
            f"{source} (rank {rank})", f"is not one of {len(workers)} processes", "count from 0"
        )
    return Processes(tuple(workers), rank, source) if len(workers) > 1 else Processes(())


def _from_tf_config(text: str) -> Processes:
    try:
        config = dict(json.loads(text))
        if not config.get("cluster"):
            return Processes(())
        jobs = {name: _addresses(name, listed) for name, listed in config["cluster"].items()}
        kind, index = config["task"]["type"], int(config["task"]["index"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"TF_CONFIG ({text[:60]})",
            f"cannot be read ({type(error).__name__}: {error})",
            'give JSON with "cluster": {"worker": [...]} and "task": {"type": "worker", "index": 0}',
        ) from error
    chiefs = jobs.get("chief", [])
    if {*jobs} - {"chief", "worker"} or kind not in jobs or len(chiefs) > 1:
        raise ConfigError(
            f"TF_CONFIG (task {kind}, {len(chiefs)} chiefs, jobs {', '.join(sorted(jobs))})",
            "describes a process that is neither a worker nor the one chief",
            "all processes of a run are workers, one of them perhaps the chief; leave out the others",
        )
    if not 0 <= index < len(jobs[kind]):
        raise ConfigError(
            f"TF_CONFIG (task {kind} {index})",
            f"the cluster has {len(jobs[kind])} of that kind",
            "count from 0",
        )
    rank = index if kind == "chief" else len(chiefs) + index
    return _checked([*chiefs, *jobs.get("worker", [])], rank, "TF_CONFIG")


def _addresses(kind: str, listed: object) -> list[str]:
    if not isinstance(listed, list):
        raise TypeError(f'"{kind}" is no list')
    return [str(address) for address in listed]


def _from_slurm(environment: Mapping[str, str]) -> Processes:
    """Return the processes of an `srun` step.

    TensorFlow's SlurmClusterResolver would import TensorFlow before mistakes are reported, sorts hosts by
    name (n10 before n2), takes the block distribution without a check and one port for all steps.
    """
    try:
        tasks = int(environment.get("SLURM_STEP_NUM_TASKS") or environment["SLURM_NTASKS"])
        if tasks == 1:
            return Processes(())
        rank = int(environment["SLURM_PROCID"])
        per_node = environment.get("SLURM_STEP_TASKS_PER_NODE")
        counts = _counts(per_node or environment["SLURM_TASKS_PER_NODE"])
        job, step = int(environment["SLURM_JOB_ID"]), int(environment.get("SLURM_STEP_ID", "0"))
    except (KeyError, ValueError) as error:
        reason = f"lacks {error.args[0]}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            f"SLURM ({reason})",
            "does not describe the tasks of the step",
            "start the run with `srun bert ...`, or set TF_CONFIG",
        ) from error
    nodes = environment["SLURM_STEP_NODELIST"]
    hosts = _host_names(nodes, environment)
    if len(hosts) != len(counts) or sum(counts) != tasks:
        raise ConfigError(
            f"SLURM_STEP_NODELIST ({nodes})",
            f"names {len(hosts)} hosts, of which {len(counts)} run {sum(counts)} of the step's {tasks} tasks",
            "set TF_CONFIG instead",
        )
    ranks = _hosts_of_ranks(counts, environment.get("SLURM_DISTRIBUTION", "block"))
    slurm = [environment.get(name) for name in ("SLURM_NODEID", "SLURM_LOCALID")]
    if rank < tasks and None not in slurm and slurm != [str(number) for number in ranks[rank]]:
        raise ConfigError(
            f"SLURM (task {rank})",
            f"is number {slurm[1]} on host {slurm[0]}, but {ranks[rank][1]} on {ranks[rank][0]} was expected",
            "use `srun --distribution=block`",
        )
    offset = (job * STEPS_OF_JOB + step) * PORTS_OF_STEP
    first = PORTS[offset % (len(PORTS) - max(counts))]
    workers = [f"{hosts[host]}:{first + number}" for host, number in ranks]
    return _checked(workers, rank, "SLURM")


def _hosts_of_ranks(counts: Sequence[int], distribution: str) -> list[tuple[int, int]]:
    """Return the host of each rank and its number on that host."""
    by_host = [(host, number) for host, count in enumerate(counts) for number in range(count)]
    over_hosts = re.split("[:,]", distribution.lower())[0]
    if over_hosts in ("block", "*") or len(counts) == 1 or max(counts) == 1:
        return by_host
    if over_hosts == "cyclic":
        return sorted(by_host, key=lambda pair: pair[::-1])
    raise ConfigError(
        f"SLURM_DISTRIBUTION ({distribution})",
        "does not say which task is on which host",
        "use `srun --distribution=block`",
    )


def _counts(text: str) -> list[int]:
    """Expand `2(x3),1` to [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not match:
            raise ValueError(f"tasks per node {text!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _host_names(nodes: str, environment: Mapping[str, str]) -> list[str]:
    """Expand `n[1-3]` to n1, n2, n3 by SLURM's own program, which knows every form."""
    if "[" not in nodes:
        return nodes.split(",")
    try:
        return subprocess.run(
            ["scontrol", "show", "hostnames", nodes],
            capture_output=True,
            text=True,
            check=True,
            timeout=SCONTROL_SECONDS,
            env=dict(environment),
        ).stdout.split()
    except FileNotFoundError:
        return _expanded(nodes)  # containers rarely have it
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"SLURM_STEP_NODELIST ({nodes})",
            f"`scontrol show hostnames` failed ({error})",
            "set TF_CONFIG instead",
        ) from error


def _expanded(nodes: str) -> list[str]:
    """Expand `a,n[08-10,12]` to a, n08, n09, n10, n12: one list of numbers a name."""
    hosts: list[str] = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", nodes):
        match = re.fullmatch(r"([^\[\]]*)\[([\d,-]+)\]([^\[\]]*)", part)
        if not match and "[" in part:
            raise ConfigError(
                f"SLURM_STEP_NODELIST ({part})",
                "needs `scontrol` to be expanded, which is not installed here",
                "set TF_CONFIG instead",
            )
        if not match:
            hosts.append(part)
            continue
        before, numbers, after = match.groups()
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", numbers):
            for number in range(int(first), int(last or first) + 1):
                hosts.append(f"{before}{number:0{len(first)}}{after}")
    return hosts
