"""Whether this machine has what a run needs: devices, memory, instructions, disk.

The estimates are those by which `bert plan` judges and `parallel.layout auto` chooses; here they stand
beside what there is.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf

from bert_cli.config import layout
from bert_cli.config.memory import FLOAT32, WEIGHT_BYTES, estimate
from bert_cli.config.plan import Plan
from bert_cli.config.tools import DoctorSettings
from bert_cli.errors import BertError, ConfigError, install_command
from bert_cli.files import format_bytes, free_bytes
from bert_cli.parallel.cluster import Processes
from bert_cli.parallel.tensorflow.mesh import devices_here
from bert_cli.tasks.look import machine
from bert_cli.tasks.look.finding import Finding, Found, refused, tried
from bert_cli.tasks.run import train
from bert_cli.train.folder import complete_checkpoints

# Processors' flags for products in 16 bits.
FAST = {
    "mixed_bfloat16": {"avx512_bf16", "amx_bf16", "bf16"},
    "mixed_float16": {"avx512_fp16", "amx_fp16", "asimdhp"},
    "float16": {"avx512_fp16", "amx_fp16", "asimdhp"},
}
# Kinds of file systems that do not outlast what they belong to.
FLEETING = {
    "tmpfs": "memory, gone when the machine restarts",
    "ramfs": "memory, gone when the machine restarts",
    "overlay": "a container's own, gone with it",
}

MOST_IDLE = 1 / 3
"""Share of a step for which devices may wait for one another before it is warned of."""


def devices(processes: Processes) -> Found[tuple[str, int, int] | None]:
    """Kind and number of this process' devices, and the memory of each."""
    named = [
        str(tf.config.experimental.get_device_details(gpu).get("device_name", gpu.name))
        for gpu in tf.config.list_physical_devices("GPU")
    ]
    driver = shutil.which("nvidia-smi") is not None
    try:
        kind, number, memory = devices_here(processes)
    except BertError as error:
        yield refused("devices", error)
        return None
    figures = {"kind": kind, "devices": number, "memory": memory, "names": named}
    if kind == "GPU":
        told = f"{layout.count(number, 'GPU')} of {layout.size(memory)}: {', '.join(sorted(set(named)))}"
        yield Finding("ok", "devices", told, figures=figures)
    elif driver:
        yield Finding(
            "warning",
            "devices",
            "TensorFlow sees no GPU, though nvidia-smi is there",
            f"{install_command('cuda')}, and see that CUDA_VISIBLE_DEVICES hides none",
            figures,
        )
    else:
        yield Finding("ok", "devices", "no GPU; a run takes the CPU", figures=figures)
    return kind, number, memory


def the_layout(
    settings: DoctorSettings, processes: Processes, kind: str, number: int, memory: int
) -> Found[DoctorSettings]:
    """Whether replicas, stages and processes divide, and the devices suffice."""
    if settings.parallel.layout == "auto":
        wanted = processes.count * number
        chosen = yield from tried(
            "layout",
            lambda: layout.propose(settings, wanted, memory, processes.count),
            lambda one: f"chosen: {'; '.join(layout.describe_layout(one)) or 'one device'}",
        )
        return chosen or settings
    replicas, stretch = settings.global_batch.replicas, len(estimate(settings))
    told = f"{layout.count(replicas, 'replica')} of {layout.count(stretch, 'device')}"
    figures = {"replicas": replicas, "devices_of_a_replica": stretch, "idle": layout.idle(settings)}
    if replicas % processes.count:
        yield Finding(
            "error",
            "layout",
            f"{told} cannot be divided among {processes.count} processes",
            "change global_batch.replicas, or give --parallel.layout auto",
            figures,
            ConfigError,
        )
    elif kind == "GPU" and replicas // processes.count * stretch > number:
        yield Finding(
            "error",
            "layout",
            f"{told} needs {replicas // processes.count * stretch} GPUs in this process, and there are {number}",
            "give --parallel.layout auto to choose one that fits, with the same numbers",
            figures,
        )
    elif layout.idle(settings) > MOST_IDLE:
        yield Finding(
            "warning",
            "layout",
            f"{told}, idle for {layout.idle(settings):.1%} of a step",
            "give it more micro-batches a step (global_batch.grad_acc_steps_per_replica), or fewer stages; "
            "--parallel.pipeline-stages null --parallel.pipeline-device-mapping null is one device",
            figures,
        )
    else:
        waits = f", idle for {layout.idle(settings):.1%} of a step" if stretch > 1 else ""
        yield Finding("ok", "layout", f"{told}{waits}", figures=figures)
    return settings


def room_for_it(
    settings: DoctorSettings, processes: Processes, kind: str, memory: int
) -> Iterator[Finding]:
    """The plan's estimate of memory against what there is: of each GPU, or of the CPU for all devices."""
    parts = estimate(settings)
    remedy = "lower micro_batch_size and raise accumulation, set --parallel.recompute, or ask `bert plan`"
    if kind == "GPU":
        device, most = layout.fullest(settings)
        needed, there, free = most.total, memory, memory
        told = f"device {device} of a replica needs {layout.size(needed)}"
    else:
        here = settings.global_batch.replicas * len(processes.local_ranks) // processes.count
        needed = max(1, here) * sum(one.total for one in parts)
        there, free = machine.memory()
        told = f"all devices of this host together need {layout.size(needed)}"
    figures = {"needed": needed, "there": there, "free": free}
    usable = layout.USABLE * there
    told += f" of the {layout.size(usable)} that can be filled of {layout.size(there)}"
    if needed > usable:
        yield Finding("error", "memory of a run", told, remedy, figures)
    elif needed > free:
        yield Finding(
            "warning",
            "memory of a run",
            f"{told}, but {layout.size(free)} are free now",
            "end what else runs on this machine",
            figures,
        )
    else:
        yield Finding("ok", "memory of a run", told, figures=figures)


def precision(settings: DoctorSettings, kind: str) -> Iterator[Finding]:
    """Whether the processor is made for the number format; a GPU is taken to be."""
    wanted = settings.precision
    flags = machine.instructions(machine.processor_text())
    fast = FAST.get(wanted)
    if kind == "GPU" or fast is None or not flags or flags & fast:
        yield Finding("ok", "precision", wanted)
        return
    better = "mixed_bfloat16" if flags & FAST["mixed_bfloat16"] else "float32"
    yield Finding(
        "warning",
        "precision",
        f"{wanted}: this processor has no instructions for it, so it is no faster than float32",
        f"give --precision {better}, unless a GPU's run is tried here",
    )


# --- the run's folder


def checkpoint_bytes(settings: DoctorSettings) -> int:
    """Bytes of a checkpoint: the weights in their format, two float32 moments of each."""
    return layout.parameters(settings) * (WEIGHT_BYTES[settings.precision] + 2 * FLOAT32)


def run_folder(settings: DoctorSettings, plan: Plan | None) -> Iterator[Finding]:
    """Where checkpoints go: whether it can be written, on what, and whether all of them fit."""
    try:
        train.check_output_paths(settings)
    except BertError as error:
        yield refused("save_ckpt_path", error)
        return
    folder = settings.save_ckpt_path
    if folder is None:
        yield Finding("ok", "save_ckpt_path", "nothing is to be saved")
        return
    nearest = next(above for above in (folder, *folder.absolute().parents) if above.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        yield Finding(
            "error",
            "save_ckpt_path",
            f"{nearest} cannot be written",
            "choose another folder",
            kind=ConfigError,
        )
        return
    kind = machine.file_system(nearest, machine.mounts())
    if kind in FLEETING:
        yield Finding(
            "warning",
            "save_ckpt_path",
            f"{folder} is on {kind}: {FLEETING[kind]}",
            "choose a folder on a disk",
            {"file_system": kind},
        )
    there = complete_checkpoints(folder)
    if there:
        yield Finding("ok", "save_ckpt_path", f"the run would continue from {there[-1]}")
    yield _disk(settings, plan, folder, there, kind)


def _disk(
    settings: DoctorSettings, plan: Plan | None, folder: Path, there: list[Path], kind: str | None
) -> Finding:
    """The new checkpoint is written before the oldest is removed, so there is one more for a while."""
    each, every = checkpoint_bytes(settings), settings.keep_every_steps
    kept = settings.keep_checkpoints + (plan.total_steps // every if plan and every else 0)
    held = sum(file.stat().st_size for path in there for file in path.iterdir())
    free = free_bytes(folder)
    needed = max(0, (kept + 1) * each - held)
    told = (
        f"{format_bytes(free)} free{f' on {kind}' if kind else ''}, and a checkpoint has {format_bytes(each)}: "
        f"{kept} kept and one being written {'need' if not held else 'still need'} {format_bytes(needed)}"
    )
    figures = {"checkpoint": each, "kept": kept, "needed": needed, "free": free, "kind": kind}
    if needed <= free:
        return Finding("ok", "disk", told, figures=figures)
    return Finding(
        "error",
        "disk",
        told,
        "make room, choose another --save-ckpt-path, or lower --keep-checkpoints",
        figures,
    )
