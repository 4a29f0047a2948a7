"""What a measurement says of itself, for people and for programs.

The figures are one JSON object; the table shows those of them that are looked at first. Beside them
stand the machine, the versions and the settings, since a figure without them cannot be compared.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from bert_cli.config.bench import BenchPretrainSettings, BenchSquadSettings
from bert_cli.config.layout import count, size
from bert_cli.config.plan import Plan
from bert_cli.data.shards.manifest import package_versions
from bert_cli.processes import cpu_count
from bert_cli.tasks.bench.timing import PARTS
from bert_cli.tasks.look import machine
from bert_cli.terminal import print_table

VERSIONS = ("tensorflow", "keras", "numpy", "tokenizers")
Figures = Mapping[str, Any]


def described(
    settings: BenchPretrainSettings | BenchSquadSettings, plan: Plan, mesh: Any
) -> dict[str, Any]:
    """What was measured, and on what."""
    named = settings.generated_dataset or {
        name: json.loads(settings.model_dump_json())[name] for name in settings.REAL_EXAMPLES
    }
    return {
        "what": settings.WHAT,
        "input": "made up" if named is True else named,
        "examples_per_step": plan.examples_per_step,
        "micro_batch_size": plan.micro_batch_size,
        "micro_batches_per_step": plan.micro_batches_per_step,
        "precision": settings.precision,
        "checkpoint_every_minutes": settings.checkpoint_every_minutes,
        "machine": {
            **machine_told(),
            "devices": mesh.kind,
            "devices_of_a_replica": len(mesh.devices[0]),
            "replicas": mesh.replicas,
            "processes": mesh.processes.count,
        },
        "versions": package_versions(VERSIONS),
        "settings": settings.model_dump(mode="json"),
    }


def machine_told() -> dict[str, Any]:
    """The processor and the memory, as `bert doctor` finds them."""
    found, *_ = machine.processor(machine.processor_text(), cpu_count(), machine.quota())
    total, free = machine.memory()
    return {"processor": found.found, **found.figures, "memory_bytes": total, "free_bytes": free}


def show(figures: Figures) -> None:
    """Print the tables of one measurement."""
    told = figures["machine"]
    processes = "1 process" if told["processes"] == 1 else f"{told['processes']} processes"
    print(f"\n{told['processor']}; {size(told['memory_bytes'])} of memory")
    print(
        f"{figures['what']}, {'made-up' if figures['input'] == 'made up' else 'real'} examples, "
        f"{figures['precision']}: {count(told['replicas'], 'replica')} of "
        f"{count(told['devices_of_a_replica'], told['devices'])}, {processes}\n"
    )
    print_table(("figure", "value", ""), list(_rows(figures)), right=(1,))
    print()
    step, rows = figures["step_seconds"]["median"], []
    for name in PARTS:
        share = figures[f"{name}_share"]
        rows.append((name.replace("_", " "), f"{share:.1%}", seconds(share * step)))
    print_table(("a step's time", "share", "of the median"), rows, right=(1, 2))
    print()
    start = figures["start_seconds"]
    print_table(
        ("start", ""), [(n.replace("_", " "), seconds(s)) for n, s in start.items()], right=(1,)
    )


def _rows(figures: Figures) -> list[tuple[str, str, str]]:
    step = figures["step_seconds"]
    spread = (
        f"quartiles {seconds(step['low'])} and {seconds(step['high'])}, {figures['steps']} steps"
    )
    share = f"{figures['flops_utilisation']:.1%} of the products'"
    where = "GPU" if figures["machine"]["devices"] == "GPU" else "process"
    grown = (
        f"of the fullest {where}; grown by {size(figures['memory_growth_bytes'])} with the model"
    )
    rows = [
        ("step", seconds(step["median"]), spread),
        ("examples/s", f"{figures['examples_per_second']:,.1f}", "sequences, of packs too"),
        ("tokens/s", f"{figures['tokens_per_second']:,.0f}", "without padding"),
        ("places/s", f"{figures['places_per_second']:,.0f}", "with padding"),
        ("FLOP/s", flops(figures["flops_per_second"]), f"{share} (model FLOPs utilisation)"),
        ("FLOP/s of products", flops(figures["matmul_flops_per_second"]), "the model's fastest"),
        ("memory", size(figures["peak_memory_bytes"]), grown),
    ]
    if figures["skipped_steps"]:
        why = "steps whose gradient was not finite: they moved nothing, so the optimizer seems cheaper"
        rows.append(("skipped", f"{figures['skipped_steps']}", why))
    waits, every = figures["checkpoint_wait_seconds"], figures["checkpoint_every_minutes"]
    if waits is not None:
        written = f"that the run waits, and {seconds(figures['checkpoint_write_seconds'])} to write beside it"
        part = f"; {waits / (waits + 60 * every):.2%} of a run that saves every {every:g} min"
        rows.append(("checkpoint", seconds(waits), written + (part if every else "")))
    return rows


def show_sweep(rows: Sequence[Figures]) -> None:
    """Print a row for each micro-batch of a sweep."""
    heads = ("micro-batch", "examples/s", "tokens/s", "step", "FLOP/s", "utilisation", "memory", "")
    shown = []
    for row in rows:
        number = f"{row['micro_batch_size']:,}"
        if not row["fits"]:
            shown.append((number, "", "", "", "", "", "", f"does not fit: {row['why']}"))
            continue
        shown.append(
            (
                number,
                f"{row['examples_per_second']:,.1f}",
                f"{row['tokens_per_second']:,.0f}",
                seconds(row["step_seconds"]["median"]),
                flops(row["flops_per_second"]),
                f"{row['flops_utilisation']:.1%}",
                size(row["peak_memory_bytes"]),
                "",
            )
        )
    print_table(heads, shown, right=range(7))


def seconds(value: float) -> str:
    """A time as it is read: 12.3 s, 456 ms, 78 us."""
    if value >= 1:
        return f"{value:,.2f} s"
    return f"{1e3 * value:.3g} ms" if value >= 1e-3 else f"{1e6 * value:.3g} us"


def flops(value: float) -> str:
    """Operations a second: 12.3 GFLOP/s."""
    for unit, name in ((1e12, "T"), (1e9, "G")):
        if value >= unit:
            return f"{value / unit:,.1f} {name}FLOP/s"
    return f"{value / 1e6:,.1f} MFLOP/s"
