"""The settings of the commands that inspect, plan, start, list and compare runs, and of completion."""

import re
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from bert_cli.config.training import TrainSettings
from bert_cli.facts.masking import Masking
from bert_cli.settings.markers import Hidden, Positional
from bert_cli.settings.numbers import Devices, Positive
from bert_cli.settings.settings import (
    DryRunSettings,
    EngineSettings,
    JsonSettings,
    MemorySize,
    SettingError,
    Settings,
    Shared,
)

SHELLS = ("bash", "zsh", "fish")
# TCP numbers ports in 16 bits.
LAST_PORT = 65_535


class InspectSettings(JsonSettings):
    """Show the contents of a folder of records, and warn of problems for training.

    Example: bert inspect data/wikipedia/128
    Example: bert inspect data/books/512 --masking.unit word
    """

    folder: Positional[Path]
    """Folder of records with a corpus.json, as `bert tokenize` or `bert index` writes it."""
    sample: int = Field(20_000, ge=1)
    """Records to read for the statistics, spread over the folder."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of the choice of records, and of the masks of dynamic records."""
    masking: Masking = Masking()
    """Masking of dynamic records for the statistics: use the settings of the run."""


class DoctorSettings(EngineSettings, JsonSettings):
    """Check this machine; with the command line of a run, as `bert doctor pretrain`, also the run.

    Prints a line for each check, with a remedy for each problem.
    Example: bert doctor
    Example: bert doctor --engine jax --json -
    """

    require_gpu: bool = False
    """Count a machine without a GPU and a TPU as an error."""


class DoctorRunSettings(TrainSettings, JsonSettings, Shared):
    """Check this machine, and a run of `bert {command}` before it starts.

    Takes every setting of `bert {command}`; prints a line for each check, with a remedy for each problem. Trains and
    writes nothing.
    Example: bert doctor {command} {flags}
    Example: bert doctor {command} {flags} --json checks.json
    """

    OPENS_FILES = False


class PlanSettings(Settings):
    """Estimate the memory, idle time and traffic of a layout, or propose a layout.

    Write `bert plan` before the command line of a run. It needs no data and builds nothing.
    Example: bert plan pretrain --config configs/pretrain_base_128_phase1.json --devices 8 --memory 80GB
    Example: bert plan squad --config squad_base --memory 16GB --devices 1
    """


class PlanRunSettings(TrainSettings, Shared):
    """Estimate the memory, idle time and traffic of the layout of `bert {command}`, or propose a layout.

    Takes every setting of `bert {command}`; needs no data and builds nothing.
    Example: bert plan {command} {flags} --devices 1 --memory 16GB
    Example: bert plan {command} {flags} --parallel.layout auto --devices 16 --memory 16GB
    """

    OPENS_FILES = False
    SAVES = False

    devices: Devices | None = None
    """Number of devices; by default as many as the layout needs."""
    memory: MemorySize | None = None
    """Memory of a device, such as 80GB, 24GiB, 640MB or 16e9; by default memory is not checked."""
    processes: Devices = 1
    """Number of processes; the devices are divided among them, and each replica is in one process."""


class LaunchSettings(DryRunSettings):
    """Start a command as several processes of one run.

    Example: bert launch --processes 2 -- pretrain --config pretrain_demo_128_phase1
    --global-batch.replicas 2
    Example: bert launch --processes 8 --hosts a,b -- pretrain --config pretrain_base_128_phase1
    --parallel.layout auto
    """

    NEEDS = dict.fromkeys(("remote_shell", "pass_variables"), "hosts")

    processes: Positive = 1
    """Number of processes on each host. They divide the GPUs of the host, or its cores if it has no GPU."""
    hosts: list[str] = []
    """Hosts on which to start processes by ssh, such as a,b or user@a,user@b; by default only this host. All hosts
    need the same folder, environment and file system. The processes listen on the interface that has the address of
    their host's name, without authentication, so the network must be trusted."""
    port: Annotated[int, Field(ge=1024, le=LAST_PORT)] | None = None
    """First port of the processes on a host; by default free ports on this host, and 22300 on other hosts."""
    remote_shell: str = "ssh"
    """Program that runs a command on a host, called with host and command; may have options, as 'ssh -p 2222'."""
    pass_variables: list[str] = []
    """Environment variables for the processes on hosts, such as NCCL_DEBUG,HF_HOME; DATASETS_DIR is always
    passed. They are visible in the hosts' list of processes, so pass no passwords."""
    command: Hidden[list[str]] = []
    """The command and its options, after `--`."""

    @field_validator("hosts")
    @classmethod
    def _each_host_once(cls, hosts: list[str]) -> list[str]:
        names = [host.rpartition("@")[2] for host in hosts]
        for host, name in zip(hosts, names, strict=True):
            if names.count(name) > 1:
                raise SettingError("", f"{name} is named twice", "pass --processes for several")
            if not re.fullmatch(r"(?:[^\s@:/-][^\s@:/]*@)?[^\s@:/-][^\s@:/]*", host):
                problem = f"{host!r} is not the name of a host"
                raise SettingError("", problem, "write names, as a,b or user@a,user@b")
        return hosts

    def _check(self) -> None:
        if self.port is not None and self.port + self.processes - 1 > LAST_PORT:
            problem = f"{self.port} leaves fewer than {self.processes} ports up to {LAST_PORT}"
            raise SettingError("port", problem, "lower it")


class RunsSettings(JsonSettings):
    """List the runs below some folders: progress, losses, and whether they are running.

    Reads only the files in the folder of each run and changes nothing.
    Example: bert runs
    Example: bert runs runs /shared/runs
    """

    folders: Positional[list[Path]] = [Path(".")]
    """Folders to search, with their subfolders."""


class PlotSettings(Settings):
    """Plot loss, accuracy, learning rate, throughput, gradient norm and evaluation scores over the steps.

    Writes one SVG file per plot, and index.html, a self-contained page with all plots.
    Example: bert plot runs/base_128_phase1 --output pictures
    Example: bert plot runs/lr_1e-4 runs/lr_3e-4 --output pictures
    """

    runs: Positional[list[Path]]
    """Run folders, plotted together; a folder of runs, such as the runs of several seeds, adds all of them."""
    output: Path
    """Folder of the pictures and the page; existing files are replaced."""


class CompareSettings(JsonSettings):
    """Show the settings that differ between two runs, and the difference of their scores with its interval.

    A folder of several seeds (seed_1984/, ...) counts as one run, with the mean of its scores.
    Example: bert compare runs/adamw runs/lamb
    Example: bert compare runs/mrpc_2e-5 runs/mrpc_5e-5 --json differences.json
    """

    first: Positional[Path]
    """Folder of a run."""
    second: Positional[Path]
    """Folder of the other run."""


class CompletionSettings(Settings):
    """Print a script that completes commands, options, choices and file names of `bert` in a shell.

    The script holds the options of this version; print it again after an update.
    Example: bert completion bash > ~/.local/share/bash-completion/completions/bert
    Example: bert completion zsh > "${fpath[1]}/_bert"
    """

    shell: Positional[Literal[SHELLS]]  # type: ignore[valid-type]
    """The shell that reads the script."""


# Training command -> flags with which its settings are complete.
EXAMPLES = {
    "pretrain": "--config pretrain_base_128_phase1",
    "squad": "--config squad_base",
    "glue": "--config glue_base",
    "ner": "--max-seq-length 128",
    "classify": "--max-seq-length 256",
    "embed": "--config embed_demo",
}


@cache
def over(verb: type[TrainSettings], command: str, training: type[TrainSettings]) -> type[Settings]:
    """Return the class with the settings of a verb and of the training command, as `bert plan squad` has both.

    `{command}` and `{flags}` in the docstring of the verb become the command and the flags of its example.
    """
    text = (verb.__doc__ or "").format(command=command, flags=EXAMPLES[command])
    name = verb.__name__.replace("Run", training.__name__.removesuffix("Settings"))
    return type(name, (training, verb), {"__doc__": text, "__module__": __name__})
