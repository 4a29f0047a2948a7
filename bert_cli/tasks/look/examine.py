"""The checks of `bert doctor` that need an engine: its devices, and the steps of a run up to its plan.

The functions of the run find its model, layout, examples and plan, so that doctor refuses what the run would refuse.
"""

import shutil
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from pkgutil import resolve_name
from typing import Any

from bert_cli.commands import COMMANDS
from bert_cli.config.finetune import FinetuneSettings
from bert_cli.config.tools import DoctorRunSettings, DoctorSettings
from bert_cli.config.training import TrainSettings
from bert_cli.disk import free_bytes, is_writable, size_of
from bert_cli.errors import install_command
from bert_cli.facts.optimizers import MOMENT_BYTES
from bert_cli.parallel.cluster import Processes
from bert_cli.parallel.runtime import Devices
from bert_cli.planning import checks, layout
from bert_cli.planning.checks import Check
from bert_cli.planning.memory import WEIGHT_BYTES, estimate
from bert_cli.tasks.look import machine
from bert_cli.tasks.look.machine import Level, Report
from bert_cli.tasks.run import resolve
from bert_cli.tasks.run.finetune_steps import OUTPUTS
from bert_cli.tasks.run.job import NEW, Draft, Steps
from bert_cli.text import count, format_bytes
from bert_cli.train.checkpoint import complete_checkpoints


def check_devices(report: Report, settings: DoctorSettings | DoctorRunSettings) -> Devices | None:
    """Find the devices of this machine; return None if it lacks a device that is required."""
    engine = settings.engine
    devices = report.attempt("devices", partial(resolve.find_devices, settings))
    if devices is None:
        return None
    kind, number, memory = devices
    names = []
    if kind != "CPU":
        names = resolve.runtime(engine).device_names()
    values = {"kind": kind, "devices": number, "memory": memory, "names": names}
    if kind != "CPU":
        text = f"{count(number, kind)} of {format_bytes(memory)}: {', '.join(sorted(set(names)))}"
        report.add("ok", "devices", text, "", **values)
    elif shutil.which("nvidia-smi") is not None:
        problem = f"{engine} finds no GPU, although nvidia-smi is installed"
        extra = "jax-cuda" if engine == "jax" else "cuda"
        remedy = f"{install_command(extra)}, and check CUDA_VISIBLE_DEVICES"
        report.add("warning", "devices", problem, remedy, **values)
    else:
        report.add("ok", "devices", "no GPU; the run uses the CPU", "", **values)
    machine.check_engine(report, engine, kind)
    return devices


def check_run(report: Report, settings: TrainSettings, devices: Devices) -> None:
    """Take the steps of the run, and check its memory, its precision and its folder."""
    steps: Steps = resolve_name(f"bert_cli.{COMMANDS[settings.COMMAND].module}").STEPS
    if isinstance(settings, FinetuneSettings):
        settings = settings.model_copy(update={"cache_dir": None})  # nothing is written
    with ExitStack() as stack:
        draft = Draft(settings, stack)
        for name, step in steps:
            if name == OUTPUTS:
                continue  # takes as long as an epoch of the teacher
            if name == "devices" and draft.processes.count > 1:
                continue  # the other processes need not be there
            result = report.attempt(name, partial(step, draft))
            if name == "layout" and result is None:
                return
            add_checks(report, draft.checks)
            draft.checks.clear()
    if draft.plan is not None:
        add_checks(report, checks.of_epochs(draft.plan))
    machine.check_precision(report, settings.precision, devices.kind)
    if isinstance(settings, FinetuneSettings) and not settings.do_training:
        return
    if draft.start is NEW and not settings.knows_its_model:
        return  # without the model, its size is unknown
    check_memory(report, draft.order, draft.processes, devices)
    check_disk(report, draft)


def add_checks(report: Report, results: Iterable[Check]) -> None:
    """Add the results of the checks that a run also makes."""
    for check in results:
        level: Level = "warning" if check.warns else "ok"
        report.add(level, check.what, check.text, check.remedy, **check.values)


def check_memory(
    report: Report, order: TrainSettings, processes: Processes, devices: Devices
) -> None:
    """Compare the estimate of `bert plan` with the memory of the fullest accelerator, or of this host."""
    kind, _, memory = devices
    sizes = [part.total for part in estimate(order)]
    if kind == "CPU":
        # The replicas of this host share its memory.
        local = order.global_batch.replicas * len(processes.local_ranks) // processes.count
        needed = max(1, local) * sum(sizes)
        total, free = machine.memory()
    else:
        # An accelerator is assumed to run nothing else.
        needed = max(sizes)
        total = free = memory
    text = f"{format_bytes(needed)} needed, {format_bytes(layout.USABLE * total)} of {format_bytes(total)} usable"
    level: Level = "ok"
    remedy = ""
    if needed > layout.USABLE * total:
        level = "error"
        remedy = "lower micro_batch_size and raise accumulation, set --parallel.recompute, or see `bert plan`"
    elif needed > free:
        level = "warning"
        text += f", but only {format_bytes(free)} free now"
        remedy = "end other programs on this machine"
    report.add(level, "memory of a run", text, remedy, needed=needed, there=total, free=free)


def checkpoint_bytes(order: TrainSettings) -> int:
    """Return the size of a checkpoint: the weights in their dtype and the slots of the optimizer."""
    # Weights and two moments in float32 are 12 bytes: 1.3 GB for BERT-base.
    weights = layout.parameters(order)
    return weights * (WEIGHT_BYTES[order.precision] + MOMENT_BYTES)


def check_disk(report: Report, draft: Draft[Any]) -> None:
    """Check that the disk is large enough for the checkpoints of all seeds."""
    order = draft.order
    folder = order.save_ckpt_path
    if folder is None or not is_writable(folder):
        return
    folders = [folder]
    if isinstance(order, FinetuneSettings) and order.seeds > 1 and draft.task.folds is None:
        folders = [folder / f"seed_{order.seed + number}" for number in range(order.seeds)]
    saved = []
    for part in folders:
        saved += complete_checkpoints(part)
    if saved:
        report.add("ok", "save_ckpt_path", f"the run would continue from {saved[-1]}")
    # A new checkpoint is written before the oldest is removed, so one more has to fit.
    size = checkpoint_bytes(order)
    interval = order.keep_every_steps
    steps = draft.plan.total_steps if draft.plan is not None else 0
    number = len(folders) * (order.keep_checkpoints + (steps // interval if interval else 0))
    used = size_of(file for path in saved for file in path.iterdir())
    free = free_bytes(folder)
    needed = max(0, (number + 1) * size - used)
    text = (
        f"{format_bytes(free)} free; {count(number, 'checkpoint')} of {format_bytes(size)} and one being written "
        f"need {format_bytes(needed)} more"
    )
    values = {"checkpoint": size, "kept": number, "needed": needed, "free": free}
    remedy = "free disk space, choose another --save-ckpt-path, or lower --keep-checkpoints"
    level: Level = "error"
    if needed <= free:
        level = "ok"
    report.add(level, "disk", text, remedy, **values)
