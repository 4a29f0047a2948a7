"""Measure a training run: its steps, their parts, memory, and the rate of matrix products.

The run is an ordinary one without a folder, with a hook that times its steps. The metrics cover all processes.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import keras
from keras import ops

from bert_cli.config.bench import BenchRunSettings
from bert_cli.config.finetune import SquadSettings
from bert_cli.config.pretrain import PretrainSettings
from bert_cli.files import JSONObject
from bert_cli.planning.flops import model_flops, shape_of
from bert_cli.processes import print_line
from bert_cli.tasks.finetune import squad
from bert_cli.tasks.look import machine
from bert_cli.tasks.run import finetune, pretrain
from bert_cli.tasks.run import train as training
from bert_cli.tasks.run.build import Run
from bert_cli.tasks.run.job import Draft, Job
from bert_cli.tasks.run.resolve import runtime
from bert_cli.train.loop import Hook, Info
from bert_cli.versions import package_versions

# The seconds of a step since the end of the previous step, the seconds of its `PARTS`, and the numbers of examples,
# tokens, positions and operations; `skipped` counts the steps so far whose gradient was not finite.
Step = dict[str, float]
# The measured parts of a step; the rest is `other`.
PARTS = ("input_wait", "forward_backward", "reduction", "optimizer")
# Steps between the lines of a measurement, besides the lines of the first and the last step: a line takes time.
LOG_EVERY_STEPS = 1000
ROUNDS = 7
# Minimum seconds for which a round repeats a product: a shorter round measures the clock.
ROUND_SECONDS = 0.05
CPU_SIDE = 1024
# Rows and columns of the matrices: a product has 2 or 1,100 GFLOP, much more time than a call takes.
DEVICE_SIDE = 8192


class Timer:
    """The hook of a run that times each step and its parts."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        """`synchronize` waits for devices that work asynchronously: it ends each part."""
        self.synchronize = synchronize
        self.parts: dict[str, float] = {}
        """The seconds of the parts of the current step."""
        self.steps: list[Step] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the duration of the block to the seconds of this part."""
        began = time.perf_counter()
        try:
            yield
            self.synchronize()
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - began

    def __call__(self, run: Run) -> Hook:
        """Return the hook of a run that is about to take its first step."""
        order = run.job.order
        run.engine.record = self.part
        began = time.perf_counter()

        def record(info: Info) -> None:
            nonlocal began
            now = time.perf_counter()
            shape = shape_of(info.batch)
            self.steps.append(
                {
                    **{name: info.metrics[name] for name in ("examples", "tokens", "skipped")},
                    "seconds": now - began,
                    "positions": shape.examples * shape.positions,
                    "flops": model_flops(order.bert_config, order.head.last_blocks, shape),
                    "input_wait": info.seconds_waited,
                    **self.parts,
                }
            )
            began = now
            self.parts = {}

        return record


def measure(settings: BenchRunSettings) -> JSONObject | None:
    """Measure a run and return its metrics, None on ranks above 0. Raises SystemExit on a stop."""
    with ExitStack() as stack:
        job = resolve(settings, stack)
        warmup = settings.warmup_steps
        print_line(f"bench: {warmup} warm-up steps, then {settings.steps} measured steps")
        timer = Timer(runtime(settings.engine).synchronize)
        training.describe_run(job)
        run, finished = training.run_training(job, stack, timer, warmup + settings.steps)
        if not finished:
            print_line("bench: stopped before its last step; nothing was measured")
            raise SystemExit(130)
        group = run.engine.group
        # Examples and tokens are sums over all processes already.
        for name in ("positions", "flops"):
            totals = group.all_reduce([step[name] for step in timer.steps])
            for step, total in zip(timer.steps, totals, strict=True):
                step[name] = float(total)
        metrics = {
            **summarize(timer.steps, warmup),
            "peak_memory_bytes": int(max(group.all_gather(_peak_memory(job)))),
        }
        # On all devices of the run; a host's cores count once.
        is_cpu = job.mesh.kind == "CPU"
        devices = 1 if is_cpu else sum(map(len, job.mesh.devices))
        dtype = str(keras.DTypePolicy(job.order.precision).compute_dtype)
        group.barrier()
        # Alone on its device, as an upper limit of what the model's products can reach.
        of_one = product_rate(CPU_SIDE if is_cpu else DEVICE_SIDE, dtype)
        rate = float(group.all_reduce([of_one * devices])[0])
        metrics["matmul_flops_per_second"] = rate
        metrics["flops_utilisation"] = metrics["flops_per_second"] / rate
        group.barrier()
        if group.rank != 0:
            return None
        return {**metrics, **_description(settings, job)}


def resolve(settings: BenchRunSettings, stack: ExitStack) -> Job:
    """Return the run that is measured: it has no folder, starts at step 0, scores nothing, and is long enough."""
    assert isinstance(settings, PretrainSettings | SquadSettings)
    # `about` describes the complete run, not the measured steps.
    changes: dict[str, object] = {"about": None, "save_ckpt_path": None}
    if "log_every_steps" not in settings.model_fields_set:
        changes["log_every_steps"] = LOG_EVERY_STEPS
    if settings.generated_dataset and "bert_config" in settings.model_fields_set:
        changes["pretrained_ckpt_path"] = None  # the machine may not have it
    if isinstance(settings, PretrainSettings):
        if settings.total_num_train_samples is None and settings.generated_dataset:
            examples = settings.global_batch.examples
            changes |= {"num_epochs": None, "total_num_train_samples": examples}
        job = pretrain.resolve(settings.model_copy(update=changes), stack)
    else:
        changes |= {"do_validation": False, "evaluate_every_steps": None}
        draft = Draft(settings.model_copy(update=changes), stack)
        draft.take(squad.STEPS)
        job = finetune.resolve(draft)
    # A shorter run is extended, so that the learning rate is defined for all measured steps.
    last = settings.warmup_steps + settings.steps
    return replace(job, plan=replace(job.plan, total_steps=max(job.plan.total_steps, last)))


# --- the measurements


def summarize(steps: Sequence[Step], warmup_steps: int) -> JSONObject:
    """Return the metrics of the steps after the warm-up; rates are medians, so that one slow step does not count."""
    measured = steps[warmup_steps:]
    skipped_before = 0.0
    if warmup_steps:
        skipped_before = steps[warmup_steps - 1]["skipped"]
    seconds = [step["seconds"] for step in measured]
    low = median = high = seconds[0]
    if len(seconds) > 1:
        # Inclusive: with few steps the quartiles stay within what was measured.
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    rates = {
        f"{name}_per_second": statistics.median(step[name] / step["seconds"] for step in measured)
        for name in ("examples", "tokens", "positions", "flops")
    }
    fractions = {
        f"{name}_fraction": sum(step.get(name, 0.0) for step in measured) / sum(seconds)
        for name in PARTS
    }
    return {
        "steps": len(measured),
        "warmup_steps": warmup_steps,
        "skipped_steps": round(measured[-1]["skipped"] - skipped_before),
        "step_seconds": {"median": median, "low": low, "high": high},
        **rates,
        **fractions,
        "other_fraction": 1.0 - sum(fractions.values()),
    }


def _peak_memory(job: Job) -> int:
    """Return the peak memory of this process, or of its fullest accelerator."""
    if job.mesh.kind == "CPU":
        return machine.resident_bytes()[1]
    return runtime(job.order.engine).used_memory(job.mesh)[1]


def _description(settings: BenchRunSettings, job: Job) -> JSONObject:
    plan = job.plan
    mesh = job.mesh
    values = job.record
    examples = {name: values[name] for name in ("dataset_dir", "train_file") if values.get(name)}
    return {
        "what": settings.COMMAND,
        "input": "synthetic" if values["generated_dataset"] else examples,
        "examples_per_step": plan.examples_per_step,
        "micro_batch_size": plan.micro_batch_size,
        "micro_batches_per_step": plan.micro_batches_per_step,
        "precision": settings.precision,
        "machine": {
            **machine.description(),
            "devices": mesh.kind,
            "devices_of_a_replica": len(mesh.devices[0]),
            "replicas": mesh.replicas,
            "processes": mesh.processes.count,
        },
        "versions": package_versions((settings.engine, "keras", "numpy", "tokenizers")),
        "settings": values,
    }


# --- the rate of matrix products


def product_rate(side: int, dtype: str) -> float:
    """Return the operations per second of a product of square matrices on the first device.

    No datasheet has the rate of a virtual machine; it is measured with the threads and in the dtype of the run.
    """
    left, right = (keras.random.normal([side, side], dtype=dtype, seed=seed) for seed in (1, 2))

    def repeat(times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            result = ops.matmul(left, right)
        # A device computes in order, so all products are done. NumPy does not read TensorFlow's bfloat16.
        ops.convert_to_numpy(ops.cast(result[0, 0], "float32"))
        return time.perf_counter() - began

    repeat(1)
    # As many products as fill the round, so that reading the clock does not count.
    times = max(1, round(ROUND_SECONDS / max(repeat(1), 1e-6)))
    return 2 * side**3 / statistics.median(repeat(times) / times for _ in range(ROUNDS))
