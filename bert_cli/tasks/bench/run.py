"""`bert bench pretrain` and `bench squad`: measure a run with its imports."""

import time

import psutil

from bert_cli.config.bench import BenchRunSettings
from bert_cli.files import JSONObject, is_stdout, output_json
from bert_cli.processes import print_line, print_table, quiet_imports
from bert_cli.text import count, format_bytes, format_duration


def run(settings: BenchRunSettings) -> None:
    """Measure a run and print its metrics."""
    start = {"python_and_settings": max(0.0, time.time() - psutil.Process().create_time())}
    began = time.perf_counter()
    with quiet_imports():
        from bert_cli.tasks.bench.measure import measure
    start["imports"] = time.perf_counter() - began
    metrics = measure(settings, start)
    if metrics is None:
        return
    if not is_stdout(settings.json_file):
        _print_metrics(metrics)
    output_json(settings.json_file, metrics)


def format_flops(value: float) -> str:
    """Return operations per second as text: 12.3 GFLOP/s."""
    units = ((1e12, "T"), (1e9, "G"), (1e6, "M"))
    unit, name = next((entry for entry in units if value >= entry[0]), units[-1])
    return f"{value / unit:,.1f} {name}FLOP/s"


def _print_metrics(metrics: JSONObject) -> None:
    described = metrics["machine"]
    step = metrics["step_seconds"]["median"]
    examples = "synthetic" if metrics["input"] == "synthetic" else "real"
    print_line(f"\n{described['processor']}; {format_bytes(described['memory_bytes'])} of memory")
    print_line(
        f"{metrics['what']} on {metrics['settings']['engine']}, {examples} examples, {metrics['precision']}: "
        f"{count(described['replicas'], 'replica')} of "
        f"{count(described['devices_of_a_replica'], described['devices'])}, "
        f"{count(described['processes'], 'process')}\n"
    )
    print_table(("metric", "value", "notes"), _metric_rows(metrics), right=(1,))
    print_line("")
    parts = []
    for name, value in metrics.items():
        if name.endswith("_fraction"):
            label = name.removesuffix("_fraction").replace("_", " ")
            parts.append((label, f"{value:.1%}", format_duration(value * step)))
    print_table(("part of a step", "fraction", "time"), parts, right=(1, 2))
    if metrics["settings"]["engine"] == "jax":
        print_line("forward backward is the complete step, which is one compiled function")
    print_line("")
    start = metrics["start_seconds"].items()
    times = [(name.replace("_", " "), format_duration(seconds)) for name, seconds in start]
    print_table(("part of the start", "time"), times, right=(1,))


def _metric_rows(metrics: JSONObject) -> list[tuple[str, str, str]]:
    step = metrics["step_seconds"]
    checkpoint = metrics["checkpoint_wait_seconds"]
    low, median, high = (format_duration(step[name]) for name in ("low", "median", "high"))
    flops, products = (metrics[f"{name}_per_second"] for name in ("flops", "matmul_flops"))
    utilisation = f"{metrics['flops_utilisation']:.1%} of the matrix products'"
    device = "GPU" if metrics["machine"]["devices"] == "GPU" else "process"
    peak = format_bytes(metrics["peak_memory_bytes"])
    growth = format_bytes(metrics["memory_growth_bytes"])
    rows = [
        ("step", median, f"median of {metrics['steps']} steps; quartiles {low} and {high}"),
        ("examples/s", f"{metrics['examples_per_second']:,.1f}", "sequences, also inside packs"),
        ("tokens/s", f"{metrics['tokens_per_second']:,.0f}", "without padding"),
        ("positions/s", f"{metrics['positions_per_second']:,.0f}", "with padding"),
        ("FLOP/s", format_flops(flops), f"{utilisation} (model FLOPs utilisation)"),
        ("FLOP/s of matrix products", format_flops(products), "of large square matrices, alone"),
        ("memory", peak, f"peak of the fullest {device}; {growth} since the model was built"),
    ]
    if metrics["skipped_steps"]:
        why = "their gradient was not finite, so the optimizer did not run and seems cheaper"
        rows.append(("skipped steps", f"{metrics['skipped_steps']}", why))
    if checkpoint is not None:
        write = format_duration(metrics["checkpoint_write_seconds"])
        notes = f"the run waits for the copy; writing it takes {write} in the background"
        every = 60 * metrics["checkpoint_every_minutes"]
        if every:
            part = checkpoint / (checkpoint + every)
            notes += f"; {part:.2%} of the time with a checkpoint every {every / 60:g} min"
        rows.append(("checkpoint", format_duration(checkpoint), notes))
    return rows
