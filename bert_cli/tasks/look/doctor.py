"""`bert doctor`: check this machine and a run before the run is started.

The functions of the run determine its processes, layout, plan and examples, so that doctor refuses what the run would
refuse. Finally the model is built on the CPU and evaluates one batch. An untrained model gives each of V tokens the
same probability, so its loss is ln V, and ln 2 for the next sentence. A trained model has a lower loss.
"""

import math
import os
import shutil
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from bert_cli.config.parallel import Parallel
from bert_cli.config.pretrain import PretrainSettings
from bert_cli.config.tools import DoctorMachineSettings, DoctorSettings
from bert_cli.config.training import GlobalBatch
from bert_cli.errors import BertError, ConfigError, DataError, DeviceError, install_command
from bert_cli.files import existing, free_bytes, is_stdout, is_writable, output_json
from bert_cli.parallel.cluster import Processes, find_processes
from bert_cli.planning import checks, layout
from bert_cli.planning.checks import Check
from bert_cli.planning.memory import WEIGHT_BYTES, estimate
from bert_cli.planning.workload import Workload, workload_of
from bert_cli.processes import print_line
from bert_cli.tasks.look import machine
from bert_cli.tasks.look.machine import Level, Report
from bert_cli.text import count, format_bytes

try:
    from bert_cli.parallel.engine import Batch, Engine
    from bert_cli.parallel.engine import count as counts_of
    from bert_cli.parallel.runtime import Devices
    from bert_cli.tasks.run import job, resolve, start
    from bert_cli.tasks.run.build import build_engine
    from bert_cli.train import health, history
    from bert_cli.train.checkpoint import complete_checkpoints

    Draft = job.Draft[PretrainSettings]

    IMPORT_ERROR = ""
except ImportError as error:  # of Keras' backend; becomes a finding
    IMPORT_ERROR = f"{type(error).__name__}: {error}".splitlines()[0]

TEMPORARY_FILE_SYSTEMS = {
    "tmpfs": "memory, lost when the machine restarts",
    "ramfs": "memory, lost when the machine restarts",
    "overlay": "a container's disk, lost with the container",
}
MAX_IDLE = 1 / 3
"""Fraction of a step that devices may be idle without a warning."""
SAMPLE = 8
"""Examples whose loss is computed: about 160 masked tokens of 128 positions each."""
TOLERANCE = {"mlm_loss": 0.5, "nsp_loss": 0.3}
"""Maximum distance of a first loss from the loss of equal probabilities. The logits of an untrained model of width D
have the variance D x initializer_range^2 x 0.77; half of it is added to the loss: 0.12 for BERT-base."""
FIRST_LOSS = "first loss"


def run(settings: DoctorSettings) -> None:
    """Check the machine and a run. After all findings raises an error of the class of the first error, if any."""
    _finish(examine(settings, Report(quiet=is_stdout(settings.json_file))), settings.json_file)


def examine(settings: DoctorSettings, report: Report) -> Report:
    """Run all checks in order; a check that needs the result of a failed check is left out."""
    if _has_engine(settings.engine, report):
        _check_run(settings, report)
    return report


def check_machine(settings: DoctorMachineSettings) -> None:
    """Check the machine alone, with findings and errors as those of `run`."""
    report = Report(quiet=is_stdout(settings.json_file))
    if _has_engine(settings.engine, report):
        _check_devices(report, settings, Processes(()))
    _finish(report, settings.json_file)


def _finish(report: Report, json_file: Path | None) -> None:
    errors = [finding for finding in report.findings if finding.level == "error"]
    warnings = sum(finding.level == "warning" for finding in report.findings)
    rows = [finding.as_json() for finding in report.findings]
    output_json(json_file, {"errors": len(errors), "warnings": warnings, "findings": rows})
    total = f"{count(len(errors), 'error')}, {count(warnings, 'warning')}"
    if not report.quiet:
        print_line(f"{count(len(report.findings), 'check')}: {total}")
    if errors:
        failed = ", ".join(dict.fromkeys(finding.what for finding in errors))
        raise errors[0].kind(failed, f"did not pass ({total})", "follow the remedies above")


def _has_engine(engine: str, report: Report) -> bool:
    """Check the machine; return whether the engine's framework can be imported."""
    machine.check_machine(report, os.environ)
    if IMPORT_ERROR:
        remedy = "install the tool in a new environment"
        report.error(engine, DeviceError(engine, f"import failed: {IMPORT_ERROR}", remedy))
    return not IMPORT_ERROR


def _described(processes: Processes) -> str:
    if processes.count == 1:
        return "1 process"
    local = len(processes.local_ranks)
    return f"{processes.count:,} processes, {local} on this host, according to {processes.source}"


def _check_run(settings: DoctorSettings, report: Report) -> None:
    draft: Draft = job.Draft(settings)
    devices = None
    for name, step in job.STEPS:
        if name == "devices":
            devices = _take_devices(report, draft)
            if devices is None:
                return
        else:
            report.attempt(name, partial(step, draft), str)
        add_checks(report, draft.checks)
        draft.checks.clear()
    assert devices is not None
    if draft.plan is not None:
        add_checks(report, checks.of_epochs(draft.plan))
    check_memory(report, workload_of(draft.order), draft.processes, devices)
    machine.check_precision(report, settings.precision, devices.kind)
    check_folder(report, draft)
    if draft.stream is not None and (draft.start.source or settings.pretrained_ckpt_path is None):
        check_first_loss(report, draft, build=settings.build)


def _take_devices(report: Report, draft: "Draft") -> "Devices | None":
    """Find the processes and devices and choose the layout; the other processes need not be there."""
    cluster = draft.order.cluster
    find = partial(find_processes, os.environ, cluster.workers, cluster.rank)
    processes = report.attempt("processes", find, _described)
    if processes is None:
        return None
    draft.processes = processes
    devices = _check_devices(report, draft.order, processes)
    if devices is not None:
        check_layout(report, draft, devices)
    return devices


# --- the machine's part of a run


def _check_devices(
    report: Report, settings: PretrainSettings | DoctorMachineSettings, processes: Processes
) -> "Devices | None":
    engine = settings.engine
    find = partial(resolve.find_devices, engine, processes, require_gpu=settings.require_gpu)
    devices = report.attempt("devices", find, lambda _: "")
    if devices is None:
        return None
    kind, number, memory = devices
    names = resolve.runtime(engine).device_names() if kind != "CPU" else []
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


def check_layout(report: Report, draft: "Draft", devices: "Devices") -> None:
    """Choose an open layout; else check that processes divide the replicas and that the devices suffice."""
    kind, number, _ = devices
    order = draft.order
    processes = draft.processes
    work = workload_of(order)
    if work.is_open:
        chosen = report.attempt(
            "layout",
            lambda: resolve.with_layout(order, devices, processes.count, draft.start),
            lambda fit: "chosen: " + "; ".join(layout.describe_layout(workload_of(fit))),
        )
        draft.order = chosen or order
        return
    replicas = work.batch.replicas
    stages = len(estimate(work))
    idle = layout.idle(work)
    needed = replicas // processes.count * stages
    text = f"{count(replicas, 'replica')} of {count(stages, 'device')}"
    values = {"replicas": replicas, "devices_of_a_replica": stages, "idle": idle}
    try:
        layout.check_processes(work.batch, processes.count)
    except ConfigError as error:
        report.error("layout", error, **values)
        return
    if kind == "GPU" and needed > number:
        text += f": needs {count(needed, 'GPU')} in this process, which has {number}"
        report.add("error", "layout", text, layout.AUTO, **values)
    elif needed > number:
        text += f": {layout.simulated(needed)}"
        report.add("warning", "layout", text, layout.AUTO, **values)
    else:
        text += f", idle for {idle:.1%} of a step"
        remedy = (
            "use more micro-batches per step (global_batch.grad_acc_steps_per_replica) or fewer stages; "
            "--parallel.pipeline-stages null --parallel.pipeline-device-mapping null is one device"
        )
        report.add("warning" if idle > MAX_IDLE else "ok", "layout", text, remedy, **values)


def check_memory(report: Report, work: Workload, processes: Processes, devices: "Devices") -> None:
    """Compare the estimate of `bert plan` with the memory of an accelerator, or of this host for all its devices."""
    kind, _, memory = devices
    sizes = [part.total for part in estimate(work)]
    if kind != "CPU":
        device, largest = layout.fullest(work)
        needed = largest.total
        total = free = memory
        text = f"device {device} of a replica needs {format_bytes(needed)}"
    else:
        local = work.batch.replicas * len(processes.local_ranks) // processes.count
        needed = max(1, local) * sum(sizes)
        total, free = machine.memory()
        text = f"all devices of this host together need {format_bytes(needed)}"
    usable = layout.USABLE * total
    text += f"; {format_bytes(usable)} of {format_bytes(total)} are usable"
    level: Level = "ok"
    remedy = ""
    if needed > usable:
        level = "error"
        remedy = "lower micro_batch_size and raise accumulation, set --parallel.recompute, or see `bert plan`"
        if needed > max(sizes):  # of several devices
            remedy = f"{layout.AUTO}, {remedy}"
    elif needed > free:
        level = "warning"
        text += f", but only {format_bytes(free)} are free now"
        remedy = "end other programs on this machine"
    report.add(level, "memory of a run", text, remedy, needed=needed, there=total, free=free)


def checkpoint_bytes(work: Workload) -> int:
    """Return the size of a checkpoint: the weights in their dtype and the slots of the optimizer."""
    weights = layout.parameters(work)
    return weights * WEIGHT_BYTES[work.precision] + work.optimizer_kind.slot_bytes(weights)


def check_folder(report: Report, draft: "Draft") -> None:
    """Check that the checkpoints can be written, and that the disk is permanent and large enough."""
    what = "save_ckpt_path"
    order = draft.order
    folder = order.save_ckpt_path
    try:
        resolve.check_output_paths(order)
        if folder is not None and not is_writable(folder):
            raise DataError(str(existing(folder)), "cannot be written", "choose another folder")
    except BertError as error:
        report.error(what, error)
        return
    if folder is None:
        report.add("ok", what, "nothing will be saved")
        return
    kind = machine.file_system(existing(folder))
    if kind in TEMPORARY_FILE_SYSTEMS:
        problem = f"{folder} is on {kind}: {TEMPORARY_FILE_SYSTEMS[kind]}"
        report.add("warning", what, problem, "choose a folder on a disk", file_system=kind)
    if saved := complete_checkpoints(folder):
        report.add("ok", what, f"the run would continue from {saved[-1]}")
    if (so_far := history.Run(folder)).step:
        warning = health.warning_of(so_far)
        state, _, remedy = (warning or "no warning").partition(": ")
        report.add("warning" if warning else "ok", "loss so far", state, remedy)
    # A new checkpoint is written before the oldest is removed, so one more has to fit.
    each = checkpoint_bytes(workload_of(order))
    every = order.keep_every_steps
    steps = draft.plan.total_steps if draft.plan is not None else 0
    number = order.keep_checkpoints + (steps // every if every else 0)
    used = sum(file.stat().st_size for path in saved for file in path.iterdir())
    free = free_bytes(folder)
    needed = max(0, (number + 1) * each - used)
    text = (
        f"{format_bytes(free)} free{f' on {kind}' if kind else ''}; {count(number, 'checkpoint')} of "
        f"{format_bytes(each)} and one being written {'still need' if used else 'need'} {format_bytes(needed)}"
    )
    values = {"checkpoint": each, "kept": number, "needed": needed, "free": free, "kind": kind}
    remedy = "free disk space, choose another --save-ckpt-path, or lower --keep-checkpoints"
    report.add("ok" if needed <= free else "error", "disk", text, remedy, **values)


# --- the examples and the model


def add_checks(report: Report, results: Iterable[Check]) -> None:
    """Add the results of the checks that a run also makes."""
    for check in results:
        level: Level = "warning" if check.warns else "ok"
        report.add(level, check.what, check.text, check.remedy, **check.values)


def check_first_loss(report: Report, draft: "Draft", *, build: bool) -> None:
    """Compute the losses before the first step and compare them with the losses of equal probabilities."""
    if not build:
        report.add("ok", FIRST_LOSS, "not computed: --no-build")
        return
    batch = GlobalBatch(micro_batch_size=SAMPLE)
    work = workload_of(draft.order)._replace(parallel=Parallel(), batch=batch)
    work = work._replace(precision="float32")
    needed = estimate(work)[0].total
    (_, free) = machine.memory()
    if needed > layout.USABLE * free:
        problem = f"not computed: the model needs {format_bytes(needed)}, and {format_bytes(free)} are free"
        remedy = "end other programs on this machine, or pass --no-build"
        report.add("warning", FIRST_LOSS, problem, remedy)
        return
    source = draft.start.source
    weights = "new weights"
    try:
        engine = build_engine(work, resolve.runtime(work.engine).cpu_mesh(), trains=False)
        if source is not None:
            weights = start.load_pretrained(source, work, engine.weights)
    except BertError as error:
        report.error(FIRST_LOSS, error)
        return
    assert draft.stream is not None
    losses = _losses(engine, draft.stream.rows(np.arange(SAMPLE)))
    notes = f"{SAMPLE} examples, float32 on the CPU; {weights}"
    judge(report, work, losses, notes, is_trained=source is not None)


def _losses(built: "Engine", rows: "Batch") -> dict[str, float]:
    """Return the mean losses without dropout; a loss that no example has is left out (no sentence pairs)."""
    counts = counts_of({name: column[None] for name, column in rows.items()}, built.head.COUNTS)
    losses = built.means(built.evaluate(rows), counts)
    return {name: losses[name] for name in TOLERANCE if name in losses}


def judge(
    report: Report, work: Workload, losses: Mapping[str, float], notes: str, *, is_trained: bool
) -> None:
    """Check that losses are near the losses of equal probabilities, or lower if the weights were trained."""
    vocab_size = work.model.vocab_size
    equal = {"mlm_loss": math.log(vocab_size), "nsp_loss": math.log(2)}
    names = {"mlm_loss": f"masked-LM, ln {vocab_size:,}", "nsp_loss": "next sentence, ln 2"}
    parts = [f"{loss:.2f} ({names[name]} = {equal[name]:.2f})" for name, loss in losses.items()]
    text = f"{', '.join(parts) or 'nothing to predict'}; {notes}"
    values = {**losses, **{f"equal_{name}": equal[name] for name in losses}}
    # Both comparisons are false for NaN.
    if is_trained:
        is_right = losses.get("mlm_loss", 0.0) < equal["mlm_loss"] - TOLERANCE["mlm_loss"]
        problem = "no better than an untrained model"
        remedy = "tokenize the text with the vocabulary of the model that the run starts from"
    else:
        # Unit logits add about 0.5 to a loss, and next-sentence logits are nearly the same for all examples.
        wider = 1.5 if work.scaling else 0.0
        distances = {name: abs(value - equal[name]) for name, value in losses.items()}
        is_right = all(value <= TOLERANCE[name] + wider for name, value in distances.items())
        problem = "far from equal probabilities"
        remedy = f"lower bert_config.initializer_range ({work.model.initializer_range:g})"
        remedy = "leave out scaling" if work.scaling else remedy
    level: Level = "ok" if is_right else "warning"
    report.add(level, FIRST_LOSS, text if is_right else f"{text}: {problem}", remedy, **values)
