"""`bert bench pretrain` and `bench squad`: measure a run."""

from bert_cli.config.bench import BenchRunSettings
from bert_cli.files import JSONObject, is_stdout, output_json
from bert_cli.processes import lines_to, print_line, print_table, quiet_imports
from bert_cli.text import count, format_bytes, format_duration


def run(settings: BenchRunSettings) -> None:
    """Measure a run and print its metrics."""
    with quiet_imports():
        from bert_cli.tasks.bench.measure import measure
    is_json = is_stdout(settings.json_file)
    with lines_to("stderr" if is_json else "stdout"):
        metrics = measure(settings)
    if metrics is None:
        return
    output_json(settings.json_file, metrics)
    if is_json:
        return
    described = metrics["machine"]
    engine = metrics["settings"]["engine"]
    examples = "synthetic" if metrics["input"] == "synthetic" else "real"
    print_line(
        f"\n{described['processor']}; {format_bytes(described['memory_bytes'])} of memory\n"
        f"{metrics['what']} on {engine}, {examples} examples, {metrics['precision']}: "
        f"{count(described['replicas'], 'replica')} of "
        f"{count(described['devices_of_a_replica'], described['devices'])}, "
        f"{count(described['processes'], 'process')}\n"
    )
    print_table(("metric", "value", "notes"), _rows(metrics), right=(1,))
    if engine == "jax":
        print_line("forward backward is the complete step, which is one compiled function")


def format_flops(value: float) -> str:
    """Return operations per second as text: 12.3 GFLOP/s."""
    units = ((1e12, "T"), (1e9, "G"), (1e6, "M"))
    unit, name = next((entry for entry in units if value >= entry[0]), units[-1])
    return f"{value / unit:,.1f} {name}FLOP/s"


def _rows(metrics: JSONObject) -> list[tuple[str, str, str]]:
    step = metrics["step_seconds"]
    low, median, high = (format_duration(step[name]) for name in ("low", "median", "high"))
    utilisation = f"{metrics['flops_utilisation']:.1%} of the matrix products'"
    peak = format_bytes(metrics["peak_memory_bytes"])
    rows = [
        (
            "step",
            median,
            f"median of {count(metrics['steps'], 'step')}; quartiles {low} and {high}",
        ),
        ("examples/s", f"{metrics['examples_per_second']:,.1f}", "sequences, also inside packs"),
        ("tokens/s", f"{metrics['tokens_per_second']:,.0f}", "without padding"),
        (
            "FLOP/s",
            format_flops(metrics["flops_per_second"]),
            f"{utilisation} (model FLOPs utilisation)",
        ),
        ("memory", peak, "peak of the fullest device"),
    ]
    if metrics["skipped_steps"]:
        why = "their gradient was not finite, so the optimizer did not run and seems cheaper"
        rows.append(("skipped steps", f"{metrics['skipped_steps']}", why))
    for name, value in metrics.items():
        if name.endswith("_fraction"):
            label = name.removesuffix("_fraction").replace("_", " ")
            rows.append(
                (label, f"{value:.1%}", f"{format_duration(value * step['median'])} of a step")
            )
    return rows
