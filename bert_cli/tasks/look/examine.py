"""The checks of `bert doctor` that need an engine: its devices, and the steps of a run up to its plan.

The functions of the run find its model, layout, examples and plan, so that doctor refuses what the run would refuse.
"""

import shutil
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from copy import copy
from functools import partial
from pathlib import Path
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
from bert_cli.tasks.run import finetune, resolve
from bert_cli.tasks.run.finetune_steps import TEACHER_OUTPUTS
from bert_cli.tasks.run.job import NEW, Draft, Steps
from bert_cli.text import count, format_bytes
from bert_cli.train.checkpoint import complete_checkpoints, refuse_another_run


def check_devices(report: Report, settings: DoctorSettings | DoctorRunSettings) -> Devices | None:
    """Find the devices of this machine; return None if it lacks a device that is required."""
    engine = settings.engine
    devices = report.attempt("devices", partial(resolve.find_devices, settings))
    if devices is None:
        return None
    kind, number, memory = devices
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
    """Take the steps of the run, and check its precision, its memory and its disk."""
    steps: Steps = resolve_name(f"bert_cli.{COMMANDS[settings.COMMAND].module}").STEPS
    # The description of a config would be printed as a check.
    settings = settings.model_copy(update={"about": None})
    if isinstance(settings, FinetuneSettings):
        report.attempt("cache_dir", partial(resolve.check_folder, settings, "cache_dir"))
        settings = settings.model_copy(update={"cache_dir": None})  # nothing is written
    with ExitStack() as stack:
        draft = Draft[Any](settings, stack)
        for name, step in steps:
            if name == TEACHER_OUTPUTS:
                continue  # takes as long as an epoch of the teacher
            if name == "devices" and draft.processes.count > 1:
                continue  # the other processes need not be there
            result = report.attempt(name, partial(step, draft))
            if name == "layout" and result is None:
                return
            if name == "devices" and result is not None:
                # Nothing is saved here, so Ctrl-C has to end doctor at once.
                draft.stop.restore()
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
    parts: list[Draft[Any]] = [draft]
    if isinstance(settings, FinetuneSettings):
        parts = finetune.parts_of_seeds(draft)
    for part in parts:
        check_continued(report, part)
    check_disk(report, draft, [part.order.save_ckpt_path for part in parts])


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


def check_continued(report: Report, draft: Draft[Any]) -> None:
    """Check that the run may continue the newest checkpoint of its folder, if there is one."""
    newest = draft.start.folder.newest
    # The examples of a teacher have its outputs, which doctor does not compute.
    if newest is None or draft.plan is None or draft.learn is not None:
        return
    if isinstance(draft.order, FinetuneSettings):
        job = finetune.resolve(copy(draft))
    elif draft.stream is None:
        return
    else:
        job = draft.job(draft.plan, draft.stream, {})
    text = f"the run would continue from {newest.path}"
    if newest.state.step >= draft.plan.total_steps:
        text = f"the last step is done ({newest.path}); nothing to do"

    def compare() -> str:
        refuse_another_run(newest, job.fixed, job.record)
        return text

    report.attempt("save_ckpt_path", compare)


def check_disk(report: Report, draft: Draft[Any], folders: Sequence[Path | None]) -> None:
    """Check that the disk is large enough for the checkpoints of all seeds, which have a folder each."""
    order = draft.order
    folder = order.save_ckpt_path
    if folder is None or not is_writable(folder):
        return
    saved = []
    for part in folders:
        saved += complete_checkpoints(part)
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
