"""Who takes part in a run: the addresses of all processes, and which one this is.

Said by flags, else by TF_CONFIG (which `bert launch` and most schedulers for TensorFlow set), else by
SLURM, inside an `srun` step of several tasks; else a process is alone. No other process is called
here, so what a cluster says can be read and refused before TensorFlow is loaded.
"""

import json
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bert_cli.config.parallel import Cluster
from bert_cli.errors import ConfigError

# Below those that Linux gives to whoever does not ask for one (from 32,768 on).
PORTS = range(20_000, 32_000)
# A SLURM step's ports follow from its number, so that two steps on a host do not meet: a step may
# have so many tasks on a host, a job so many steps.
PORTS_OF_STEP, STEPS_OF_JOB = 64, 8
SCONTROL_SECONDS = 60


@dataclass(frozen=True)
class Processes:
    """The processes of a run in the order of their ranks, and this one's place."""

    workers: tuple[str, ...]
    """host:port of each; empty for a process alone."""
    rank: int = 0
    source: str = "this process alone"
    """What said so."""

    @property
    def count(self) -> int:
        """How many there are."""
        return max(1, len(self.workers))

    @property
    def local_ranks(self) -> list[int]:
        """Ranks of the processes on this one's host."""
        hosts = [worker.rpartition(":")[0] for worker in self.workers] or [""]
        return [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]

    @property
    def local_processes(self) -> int:
        """How many of them run on this host."""
        return len(self.local_ranks)

    @property
    def local_rank(self) -> int:
        """Number of this process among those on its host."""
        return self.local_ranks.index(self.rank)


def find_processes(cluster: Cluster, environment: Mapping[str, str]) -> Processes:
    """The processes as flags, TF_CONFIG or SLURM say.

    Raises ConfigError where what they say cannot be.
    """
    if cluster.workers:
        assert cluster.rank is not None
        return _checked(cluster.workers, cluster.rank, "--cluster.workers")
    if environment.get("TF_CONFIG", "").strip():
        return _from_tf_config(environment["TF_CONFIG"])
    # Only `srun` says so: the shell of an allocation and the script of a job are one process.
    if environment.get("SLURM_STEP_NODELIST"):
        return _from_slurm(environment)
    return Processes(())


def _checked(workers: Sequence[str], rank: int, source: str) -> Processes:
    for worker in workers:
        found = re.fullmatch(r"(?:[^\s:/\[\]]+|\[[^\s\[\]]+\]):(\d{1,5})", worker)
        if not found or not 0 < int(found[1]) < 65_536:
            raise ConfigError(f"{source} ({worker}): is no host:port; name every process so")
    if len(set(workers)) < len(workers):
        twice = next(worker for worker in workers if list(workers).count(worker) > 1)
        raise ConfigError(f"{source} ({twice}): is named twice; each process has its own port")
    if not 0 <= rank < len(workers):
        raise ConfigError(
            f"{source} (rank {rank}): is not one of {len(workers)} processes, which count from 0"
        )
    return Processes(tuple(workers), rank, source) if len(workers) > 1 else Processes(())


def _from_tf_config(text: str) -> Processes:
    try:
        told = dict(json.loads(text))
        if not told.get("cluster"):
            return Processes(())
        jobs = {name: _addresses(name, given) for name, given in told["cluster"].items()}
        kind, index = told["task"]["type"], int(told["task"]["index"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"TF_CONFIG ({text[:60]}): cannot be read ({type(error).__name__}: {error}); it is JSON with "
            '"cluster": {"worker": [...]} and "task": {"type": "worker", "index": 0}'
        ) from error
    others = set(jobs) - {"chief", "worker"}
    if others or kind not in jobs:
        raise ConfigError(
            f"TF_CONFIG (task {kind}, jobs {', '.join(sorted(jobs))}): all processes of a run are workers, one of "
            "them perhaps the chief; leave out the others"
        )
    if not 0 <= index < len(jobs[kind]):
        raise ConfigError(
            f"TF_CONFIG (task {kind} {index}): the cluster has {len(jobs[kind])} of that kind; count from 0"
        )
    chiefs = jobs.get("chief", [])
    if len(chiefs) > 1:
        raise ConfigError(
            f"TF_CONFIG ({len(chiefs)} chiefs): a run has one; make the others workers"
        )
    rank = index if kind == "chief" else len(chiefs) + index
    return _checked([*chiefs, *jobs.get("worker", [])], rank, "TF_CONFIG")


def _addresses(kind: str, given: object) -> list[str]:
    if not isinstance(given, list):
        raise TypeError(f'"{kind}" is no list')
    return [str(address) for address in given]


def _from_slurm(environment: Mapping[str, str]) -> Processes:
    try:
        tasks = int(environment.get("SLURM_STEP_NUM_TASKS") or environment["SLURM_NTASKS"])
        if tasks == 1:
            return Processes(())
        rank = int(environment["SLURM_PROCID"])
        per_node = environment.get("SLURM_STEP_TASKS_PER_NODE")
        counts = _counts(per_node or environment["SLURM_TASKS_PER_NODE"])
        job, step = int(environment["SLURM_JOB_ID"]), int(environment.get("SLURM_STEP_ID", "0"))
    except (KeyError, ValueError) as error:
        why = f"lacks {error.args[0]}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            f"SLURM ({why}): does not say who takes part; start the run with `srun bert ...`, or set TF_CONFIG"
        ) from error
    nodes = environment["SLURM_STEP_NODELIST"]
    hosts = _host_names(nodes, environment)
    if len(hosts) != len(counts) or sum(counts) != tasks:
        raise ConfigError(
            f"SLURM_STEP_NODELIST ({nodes}): names {len(hosts)} hosts, of which {len(counts)} run "
            f"{sum(counts)} of the step's {tasks} tasks; set TF_CONFIG instead"
        )
    places = list(_places(counts, environment.get("SLURM_DISTRIBUTION", "block")))
    names = ("SLURM_NODEID", "SLURM_LOCALID")
    said = [environment.get(name) for name in names]
    if rank < tasks and None not in said and said != [str(number) for number in places[rank]]:
        raise ConfigError(
            f"SLURM (task {rank}): is number {said[1]} on host {said[0]}, and would be {places[rank][1]} on "
            f"{places[rank][0]}; use `srun --distribution=block`"
        )
    offset = (job * STEPS_OF_JOB + step) * PORTS_OF_STEP
    first = PORTS[offset % (len(PORTS) - max(counts))]
    workers = [f"{hosts[host]}:{first + number}" for host, number in places]
    return _checked(workers, rank, "SLURM")


def _places(counts: Sequence[int], distribution: str) -> Iterator[tuple[int, int]]:
    """Host, and number on it, of each rank."""
    by_host = [(host, number) for host, count in enumerate(counts) for number in range(count)]
    over_hosts = re.split("[:,]", distribution.lower())[0]
    if over_hosts in ("block", "*") or len(counts) == 1 or max(counts) == 1:
        return iter(by_host)
    if over_hosts == "cyclic":
        return iter(sorted(by_host, key=lambda place: place[::-1]))
    raise ConfigError(
        f"SLURM_DISTRIBUTION ({distribution}): does not tell which task is on which host; use "
        "`srun --distribution=block`"
    )


def _counts(text: str) -> list[int]:
    """`2(x3),1` -> [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not found:
            raise ValueError(f"tasks per node {text!r}")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _host_names(nodes: str, environment: Mapping[str, str]) -> list[str]:
    """`n[1-3]` -> n1, n2, n3, by SLURM's own program, which knows every form."""
    if "[" not in nodes:
        return nodes.split(",")
    asked = ["scontrol", "show", "hostnames", nodes]
    try:
        done = subprocess.run(
            asked,
            capture_output=True,
            text=True,
            check=True,
            timeout=SCONTROL_SECONDS,
            env=dict(environment),
        )
    except FileNotFoundError:
        return _expanded(nodes)  # a container rarely has it
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"SLURM_STEP_NODELIST ({nodes}): `scontrol show hostnames` does not tell the hosts ({error}); set "
            "TF_CONFIG instead"
        ) from error
    return done.stdout.split()


def _expanded(nodes: str) -> list[str]:
    """`a,n[08-10,12]` -> a, n08, n09, n10, n12: the form that clusters of numbered hosts have."""
    hosts: list[str] = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", nodes):
        found = re.fullmatch(r"([^\[\]]*)\[([\d,-]+)\]([^\[\]]*)", part)
        if not found and "[" in part:
            raise ConfigError(
                f"SLURM_STEP_NODELIST ({part}): there is no `scontrol` here to tell the hosts; set TF_CONFIG instead"
            )
        if not found:
            hosts.append(part)
            continue
        before, numbers, after = found.groups()
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", numbers):
            for number in range(int(first), int(last or first) + 1):
                hosts.append(f"{before}{number:0{len(first)}}{after}")
    return hosts
