"""`bert bench`, `bench pretrain` and `bench squad`: list the standard benchmarks, or measure a run.

Nothing heavy is imported before the clock has started, because the imports are a part of the start. A
sweep needs none of them: the processes that it starts measure.
"""

import shlex
from collections.abc import Mapping
from typing import Any

from bert_cli.config.layout import size
from bert_cli.config.tools import (
    BenchPretrainSettings,
    BenchSettings,
    BenchSquadSettings,
    benchmarks,
)
from bert_cli.config.training import count
from bert_cli.files import is_stdout, output_json
from bert_cli.processes import print_table, quiet_imports
from bert_cli.tasks.bench import sweep
from bert_cli.tasks.bench.timing import (
    PARTS,
    Stopwatch,
    format_flops,
    format_seconds,
    process_age,
)


def run(settings: BenchSettings | BenchPretrainSettings | BenchSquadSettings) -> None:
    """List the benchmarks, sweep over micro-batch sizes, or measure a run and print its metrics.

    Raises what the run itself raises before its first step.
    """
    if isinstance(settings, BenchSettings):
        rows = [
            (name, one.about, shlex.join(["bert", *one.words]))
            for name, one in benchmarks().items()
        ]
        print_table(("name", "measures", "command"), rows)
        return
    if settings.sweep is not None:
        sweep.run(settings)
        return
    start = Stopwatch()
    start.seconds["python_and_settings"] = process_age()
    with start.part("imports"), quiet_imports():
        from bert_cli.tasks.bench.measure import measure
    metrics = measure(settings, start)
    if metrics is None:
        return
    if not is_stdout(settings.json_file):
        print_metrics(metrics)
    if settings.json_file is not None:
        output_json(settings.json_file, metrics)


def print_metrics(metrics: Mapping[str, Any]) -> None:
    """Print the tables of a measurement."""
    machine, step = metrics["machine"], metrics["step_seconds"]["median"]
    examples = "synthetic" if metrics["input"] == "made up" else "real"
    print(f"\n{machine['processor']}; {size(machine['memory_bytes'])} of memory")
    print(
        f"{metrics['what']}, {examples} examples, {metrics['precision']}: "
        f"{count(machine['replicas'], 'replica')} of "
        f"{count(machine['devices_of_a_replica'], machine['devices'])}, "
        f"{machine['processes']} process{'es' * (machine['processes'] > 1)}\n"
    )
    print_table(("metric", "value", "notes"), _metric_rows(metrics), right=(1,))
    print()
    fractions = [(name.replace("_", " "), metrics[f"{name}_share"]) for name in PARTS]
    parts = [(name, f"{value:.1%}", format_seconds(value * step)) for name, value in fractions]
    print_table(("part of a step", "share", "time"), parts, right=(1, 2))
    print()
    start = metrics["start_seconds"].items()
    times = [(name.replace("_", " "), format_seconds(seconds)) for name, seconds in start]
    print_table(("part of the start", "time"), times, right=(1,))


def _metric_rows(metrics: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    step, checkpoint = metrics["step_seconds"], metrics["checkpoint_wait_seconds"]
    quartiles = f"{format_seconds(step['low'])} and {format_seconds(step['high'])}"
    utilisation = (
        f"{metrics['flops_utilisation']:.1%} of the matrix products' (model FLOPs utilisation)"
    )
    device = "GPU" if metrics["machine"]["devices"] == "GPU" else "process"
    rows = [
        (
            "step",
            format_seconds(step["median"]),
            f"median of {metrics['steps']} steps; quartiles {quartiles}",
        ),
        ("examples/s", f"{metrics['examples_per_second']:,.1f}", "sequences, also inside packs"),
        ("tokens/s", f"{metrics['tokens_per_second']:,.0f}", "without padding"),
        ("positions/s", f"{metrics['places_per_second']:,.0f}", "with padding"),
        ("FLOP/s", format_flops(metrics["flops_per_second"]), utilisation),
        (
            "FLOP/s of matrix products",
            format_flops(metrics["matmul_flops_per_second"]),
            "the fastest product of the model, measured alone",
        ),
        (
            "memory",
            size(metrics["peak_memory_bytes"]),
            f"peak of the {device} that uses the most; "
            f"{size(metrics['memory_growth_bytes'])} of it since the model was built",
        ),
    ]
    if metrics["skipped_steps"]:
        why = "their gradient was not finite, so the optimizer did not run and seems cheaper"
        rows.append(("skipped steps", f"{metrics['skipped_steps']}", why))
    if checkpoint is not None:
        write = format_seconds(metrics["checkpoint_write_seconds"])
        notes = f"the run waits for the copy; writing it takes {write} in the background"
        every = 60 * metrics["checkpoint_every_minutes"]
        if every:
            part = checkpoint / (checkpoint + every)
            notes += f"; {part:.2%} of the time with a checkpoint every {every / 60:g} min"
        rows.append(("checkpoint", format_seconds(checkpoint), notes))
    return rows
