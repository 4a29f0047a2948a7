"""`bert doctor`: this machine and a run, looked at before the run is started.

A finding is one line: ok, warning or error, what was looked at, what was found, what to do. What a run
would do first is done here, so it is refused here as there: its processes, its plan, its layout, its
examples are those of `bert pretrain`. At last the model is built on the CPU and reads one batch: before
it has learnt anything it must give each of V words the same chance, a loss of ln V.
"""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from bert_cli.config import layout
from bert_cli.config.plan import Plan, make_plan
from bert_cli.config.tools import DoctorSettings
from bert_cli.errors import ConfigError
from bert_cli.files import is_stdout, output_json
from bert_cli.parallel.cluster import Processes, find_processes
from bert_cli.tasks.look import machine
from bert_cli.tasks.look.finding import Finding, Found, tried
from bert_cli.tasks.run import corpora

try:
    from bert_cli.tasks.look import capacity, first_loss
    from bert_cli.tasks.run import start

    BROKEN = ""
except ImportError as error:
    # What cannot be imported is a finding too, and the rest of the machine is still to be looked at.
    BROKEN = f"{type(error).__name__}: {error}".splitlines()[0]

MOST_EPOCHS = 100
# Examples that are read to see that they can be.
SOME = 8


def run(settings: DoctorSettings) -> None:
    """Print all findings, and write them where --json says.

    Raises the kind of the first error, when there is one, after all were printed.
    """
    findings: list[Finding] = []
    speaks = not is_stdout(settings.json_file)
    for finding in examine(settings):
        if speaks:
            print(finding, flush=True)
        findings.append(finding)
    errors = [finding for finding in findings if finding.level == "error"]
    warnings = sum(finding.level == "warning" for finding in findings)
    if settings.json_file is not None:
        figures: dict[str, Any] = {"errors": len(errors), "warnings": warnings}
        figures["findings"] = [finding.figures_too() for finding in findings]
        output_json(settings.json_file, figures)
    told = f"{layout.count(len(errors), 'error')}, {layout.count(warnings, 'warning')}"
    if speaks:
        print(f"{told} in {layout.count(len(findings), 'finding')}", flush=True)
    if errors:
        first = errors[0]
        raise first.kind(f"{first.what}: is not in order ({told} above); mend that first")


def examine(settings: DoctorSettings) -> Iterator[Finding]:
    """Everything that is looked at, in order."""
    yield from machine.look(os.environ)
    if BROKEN:
        yield Finding(
            "error",
            "tensorflow",
            f"cannot be loaded ({BROKEN})",
            "install the tool in a new environment",
        )
        return
    if settings.machine_only:
        yield from capacity.devices(Processes(()))
        return
    source, settings = yield from model(settings)
    settings = corpora.with_sizes_of_records(settings)
    processes = yield from tried(
        "processes", lambda: find_processes(settings.cluster, os.environ), told_processes
    )
    if processes is None:
        return
    there = yield from capacity.devices(processes)
    if there is None:
        return
    chosen = yield from capacity.the_layout(settings, processes, *there)
    reader = yield from examples(chosen, processes, source)
    size = (None, 1.0) if reader is None else (reader.epoch_size, reader.sequences_per_example)
    plan = yield from tried("plan", lambda: make_plan(chosen, *size), told_plan)
    if plan is not None and plan.epochs is not None:
        yield told_epochs(plan)
    yield from capacity.room_for_it(chosen, processes, there[0], there[2])
    yield from capacity.precision(chosen, there[0])
    yield from capacity.run_folder(chosen, plan)
    if reader is not None and (source is not None or settings.pretrained_ckpt_path is None):
        yield from first_loss.first_loss(chosen, reader)


def model(settings: DoctorSettings) -> Found[tuple[start.Source | None, DoctorSettings]]:
    """The model that the run starts from, if any, and the settings with its shape."""

    def found() -> tuple[start.Source | None, DoctorSettings]:
        source = start.source_of(settings)
        return source, start.with_shape_of(settings, source)

    def told(pair: tuple[start.Source | None, DoctorSettings]) -> str:
        return "none: new weights" if pair[0] is None else f"from {pair[0].folder}"

    if settings.pretrained_ckpt_path is None and settings.save_ckpt_path is None:
        return None, settings
    return (yield from tried("model", found, told)) or (None, settings)


def told_processes(processes: Processes) -> str:
    """How many there are, and who says so."""
    if processes.count == 1:
        return processes.source
    return (
        f"{processes.count}, {processes.local_processes} on this host, as {processes.source} says"
    )


def told_plan(plan: Plan) -> str:
    """The whole numbers of the run."""
    return (
        f"{layout.count(plan.total_steps, 'step')} of {plan.step_in_words}, "
        f"{layout.count(plan.micro_batches_per_step, 'micro-batch')} of {plan.micro_batch_size}; learning rate up to "
        f"{plan.peak_learning_rate:g}, {layout.count(plan.warmup_steps, 'step')} of warm-up"
    )


# --- the examples and the model


def examples(
    settings: DoctorSettings, processes: Processes, source: start.Source | None
) -> Found[Any]:
    """The run's reader, when its records are there, whole, readable and fit the model and the run."""
    asked = {
        "dataset_dir": settings.dataset_paths,
        "validation_dir": [settings.validation_dir] if settings.validation_dir else [],
    }
    for name, path in ((name, path) for name, paths in asked.items() for path in paths):
        if "$" in path and not settings.generated_dataset:
            yield Finding(
                "error",
                name,
                f"{path}: the variable is not set",
                f"export it or give --{name.replace('_', '-')}",
                kind=ConfigError,
            )
            return None

    def opened() -> Any:
        part = processes.rank, processes.count
        reader = corpora.open_stream(settings, make_plan(settings, None).examples_per_step, *part)
        folder = reader.folder
        if source is not None and folder is not None:
            corpora.refuse_another_vocabulary(folder, source.folder, settings.save_ckpt_path)
        reader.rows(np.arange(SOME))
        return reader

    reader = yield from tried("dataset_dir", opened, lambda one: _told_examples(settings, one))
    if reader is None:
        return None
    if settings.validation_dir is not None:
        yield from tried(
            "validation_dir",
            lambda: corpora.open_held_out(settings),
            lambda one: f"{one and one.epoch_size:,} records",
        )
    return reader


def _told_examples(settings: DoctorSettings, reader: Any) -> str:
    if reader.epoch_size is None:
        return "synthetic examples"
    return (
        f"{', '.join(settings.dataset_paths)}: {reader.epoch_size:,} records, readable, of "
        f"{settings.bert_config.vocab_size:,} words and {settings.max_seq_length} places as the model's; "
        "`bert inspect` looks into them"
    )


def told_epochs(plan: Plan) -> Finding:
    """How often the run goes through its corpus, and a warning where that is too often."""
    told = f"the run reads {plan.epochs:,.2f} epochs of {plan.corpus_examples:,} records"
    figures = {"epochs": plan.epochs}
    if plan.epochs is None or plan.epochs <= MOST_EPOCHS:
        return Finding("ok", "epochs", told, figures=figures)
    return Finding(
        "warning",
        "epochs",
        f"{told}: it will know them by heart",
        "give more text, or a lower --total-num-train-samples",
        figures,
    )
