#!/usr/bin/env python3
"""Measure what spreading a run costs and saves: trace time, memory, overhead, stages, processes.

    scripts/bench_parallel.py trace        # trace time at 8, 64 and 510 micro-batches
    scripts/bench_parallel.py memory       # peak memory of GPipe, 1F1B and recomputation
    scripts/bench_parallel.py moments      # memory that sharded and offloaded moments save
    scripts/bench_parallel.py overhead     # the engine on one device beside a bare step
    scripts/bench_parallel.py pipeline     # two stages of one core each beside one stage on one core
    scripts/bench_parallel.py processes    # two processes of a core each, in one run or unrelated, beside one

Every measurement is a process of its own on made-up examples; what is compared runs in turn, A B A B,
and figures are medians. Peak memory is what the process has grown by since its runtime was up.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from turns import in_a_process

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

STAGES = [["emb", "hid*2"], ["hid*2"], ["hid*2"], ["hid*2", "enc_out", "pool", "heads"]]
# Of fine-tuning, whose head is small and has no word table.
HALVES = [["emb", "hid*4"], ["hid*4", "qa_head"]]
# The word table is in the first and in the last stage.
DEVICES = [0, 1, 2, 0]
MODEL = {
    "vocab_size": 2000,
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
}
ROUNDS = 3


def settings_of(
    micro_batches: int, size: int = 8, replicas: int = 1, stages: bool = False, **parallel: Any
) -> dict[str, Any]:
    """Settings of a run as a config would say them."""
    if stages:
        parallel |= {"pipeline_stages": STAGES, "pipeline_device_mapping": DEVICES}
    return {
        "generated_dataset": True,
        "bert_config": MODEL,
        "max_seq_length": 128,
        "max_predictions_per_seq": 20,
        "global_batch": {
            "micro_batch_size": size,
            "replicas": replicas,
            "grad_acc_steps_per_replica": micro_batches // replicas,
        },
        "parallel": parallel,
        "optimizer_opts": {"name": "LAMB", "learning_rate": {"max_learning_rate": 1e-3}},
        "total_num_train_samples": 10**6,
    }


def work_in_a_process(work: str, settings: dict[str, Any], cores: str = "0-1") -> Any:
    """What this script's function `work` finds in a process of its own."""
    return in_a_process([sys.executable, __file__, "--work", work, json.dumps(settings)], cores)


def measured(settings: dict[str, Any], steps: int) -> dict[str, Any]:
    """Build the run of these settings, take some steps; seconds and growth of memory in bytes."""
    import tensorflow as tf

    from bert_cli.config.parallel import Cluster
    from bert_cli.config.plan import make_plan
    from bert_cli.config.training import PretrainSettings
    from bert_cli.parallel.cluster import find_processes
    from bert_cli.tasks.bench.timing import resident_bytes
    from bert_cli.tasks.run import build, corpora

    asked = PretrainSettings.model_validate(settings)
    processes = find_processes(Cluster(), os.environ)
    mesh = build.open_mesh(asked, processes)
    tf.linalg.matmul(tf.ones([256, 256]), tf.ones([256, 256]))
    before = resident_bytes()[0]
    plan = make_plan(asked, None)
    model, engine, state, step = build.build_run(asked, mesh, plan)
    reader = corpora.open_stream(asked, plan.examples_per_step, processes.rank, processes.count)
    began = time.perf_counter()
    sample = reader.first_micro_batches(len(mesh.devices))
    engine.compile(sample)
    traced = time.perf_counter() - began
    batch = reader[0]
    taken = []
    for _ in range(steps):
        began = time.perf_counter()
        step(batch)
        taken.append(time.perf_counter() - began)
    moments = [
        moment for pair in state.moments.values() for value in pair for moment in value.variables
    ]
    return {
        "traced": traced,
        "first": taken[0],
        "step": statistics.median(taken[1:] or taken),
        "grown": resident_bytes()[1] - before,
        "moments": sum(4 * int(tf.size(moment)) for moment in moments),
        "kept": engine.max_in_flight,
        "engine": engine,
        "model": model,
        "batch": batch,
        "state": state,
    }


FIGURES = ("traced", "first", "step", "grown", "moments", "kept")


def work_measure(settings: dict[str, Any]) -> dict[str, Any]:
    """The figures of a run of a few steps."""
    found = measured(settings, steps=settings.pop("steps", 3))
    return {name: found[name] for name in FIGURES}


def work_overhead(settings: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds of the engine's step and of a bare one on the same blocks, in turn."""
    import numpy as np
    import tensorflow as tf

    found = measured(settings, steps=2)
    (stage,) = found["engine"].replicas[0]
    (update,) = found["engine"].updates[0]
    names = list(stage.weights)
    columns = list(found["batch"])

    @tf.function(autograph=False)
    def accumulate(
        arrays: list[tf.Tensor], key: tf.Tensor, counts: dict[str, tf.Tensor], first: bool
    ) -> Any:
        batch = dict(zip(columns, arrays, strict=True))
        with tf.GradientTape() as tape:
            hidden = None
            for block in stage.body:
                hidden = block(hidden, batch, key)
            loss, _ = stage.head(hidden, batch, counts, key)
        for name, gradient in zip(
            names, tape.gradient(loss, list(stage.weights.values())), strict=True
        ):
            held = stage.accumulators[name]
            (held.assign if first else held.assign_add)(tf.convert_to_tensor(gradient))
        return loss

    def bare(batch: dict[str, Any], number: int) -> None:
        from bert_cli.model.heads import PretrainingHeads
        from bert_cli.parallel.engine import count

        counts = {
            name: tf.constant(value, tf.float32)
            for name, value in count(batch, PretrainingHeads.COUNTS).items()
        }
        losses = []
        for micro_batch in range(len(batch["input_ids"])):
            key = tf.constant(np.array([1984, micro_batch], np.int32))
            arrays = [tf.convert_to_tensor(column[micro_batch]) for column in batch.values()]
            losses.append(accumulate(arrays, key, counts, not losses))
        float(tf.add_n(losses))
        float(update._squared())
        update._move_all(
            tf.constant(1.0), tf.constant(1e-3), tf.constant(number), tf.constant(number)
        )

    from bert_cli.config.plan import make_plan
    from bert_cli.config.training import PretrainSettings
    from bert_cli.tasks.run import build

    asked = PretrainSettings.model_validate(settings)
    plan = make_plan(asked, None)
    step = build.build_step(found["engine"], found["state"], asked, plan, build.never)
    bare(found["batch"], 0)
    taken: dict[str, list[float]] = {"engine": [], "bare": []}
    for number in range(settings.get("rounds", 12)):
        for name, act in (
            ("bare", lambda n=number: bare(found["batch"], n)),
            ("engine", lambda: step(found["batch"])),
        ):
            began = time.perf_counter()
            act()
            taken[name].append(time.perf_counter() - began)
    return taken


def trace() -> None:
    """Trace time does not depend on the accumulation."""
    for micro_batches in (8, 64, 510):
        runs = [
            work_in_a_process("measure", {**settings_of(micro_batches, 1, stages=True), "steps": 1})
            for _ in range(ROUNDS)
        ]
        seconds = statistics.median(run["traced"] for run in runs)
        print(f"{micro_batches} micro-batches, 4 stages: traced in {seconds:.2f} s", flush=True)


LAYOUTS = {
    "GPipe": {"schedule": "GPipe"},
    "1F1B": {"schedule": "1F1B"},
    "GPipe, recompute by layer": {"schedule": "GPipe", "recompute": True},
    "1F1B, recompute by layer": {"recompute": True},
    "1F1B, recompute by stage": {"recompute": True, "recompute_by": "stage"},
}


def memory() -> None:
    """Peak memory of 16 micro-batches through four stages."""
    for name, parallel in LAYOUTS.items():
        run = work_in_a_process("measure", settings_of(16, stages=True, **parallel))
        print(f"{name}: {run['grown'] / 1e6:.0f} MB, kept at most {run['kept']}", flush=True)


def moments() -> None:
    """What moments take on a replica and in the host's memory, and what the processes take."""
    for name, parallel in {
        "whole": {},
        "sharded": {"replicated_tensor_sharding": True},
        "offloaded": {"optimizer_state_offload": True},
    }.items():
        found = together(settings_of(2, 1, replicas=2, **parallel), 2)
        print(
            f"{name}: {found[0]['moments'] / 1e6:.1f} MB of moments a replica, process grown by "
            f"{found[0]['grown'] / 1e6:.0f} MB",
            flush=True,
        )


def together(settings: dict[str, Any], number: int) -> list[Any]:
    """The figures of the processes of one run, each on a core."""
    import socket

    held = [socket.socket() for _ in range(number)]
    for one in held:
        one.bind(("localhost", 0))
    workers = [f"localhost:{one.getsockname()[1]}" for one in held]
    for one in held:
        one.close()
    running = []
    for rank in range(number):
        task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
        words = ["taskset", "--cpu-list", str(rank), sys.executable, __file__, "--work", "measure"]
        running.append(
            subprocess.Popen(
                [*words, json.dumps(settings)],
                env={**os.environ, "TF_CONFIG": json.dumps(task)},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        )
    return [json.loads(one.communicate()[0].strip().splitlines()[-1]) for one in running]


def overhead() -> None:
    """The engine's step on one device beside a bare one."""
    for micro_batches, size in ((1, 8), (8, 8), (8, 1)):
        taken = work_in_a_process("overhead", settings_of(micro_batches, size))
        middle = {name: statistics.median(values) for name, values in taken.items()}
        print(
            f"{micro_batches} micro-batches of {size}: bare {middle['bare']:.3f} s, engine {middle['engine']:.3f} s, "
            f"ratio {middle['engine'] / middle['bare']:.3f}",
            flush=True,
        )


def seconds_of_squad(micro_batches: int, parallel: dict[str, Any], cores: str) -> float:
    """A step of fine-tuning as `bert bench squad` measures it, an operation on one thread."""
    settings = {
        **{name: settings_of(micro_batches)[name] for name in ("bert_config", "global_batch")},
        "max_seq_length": 128,
        "doc_stride": 32,
        "parallel": parallel,
    }
    with tempfile.TemporaryDirectory() as home:
        config, figures = Path(home, "config.json"), Path(home, "figures.json")
        config.write_text(json.dumps(settings), encoding="utf-8")
        words = ["taskset", "--cpu-list", cores, sys.executable, "-m", "bert_cli", "bench", "squad"]
        words += ["--config", str(config), "--json", str(figures), "--no-checkpoint"]
        words += ["--steps", "7", "--warmup-steps", "2"]
        environment = {**os.environ, "TF_NUM_INTRAOP_THREADS": "1"}
        subprocess.run(words, capture_output=True, check=True, env=environment)
        told = json.loads(figures.read_text(encoding="utf-8"))
    return float(told["step_seconds"]["median"])


def pipeline() -> None:
    """Two stages of a core's worth of threads each, beside one stage on one core."""
    halves = {"pipeline_stages": HALVES, "pipeline_device_mapping": [0, 1]}
    for micro_batches in (2, 4, 8, 16):
        one: list[float] = []
        two: list[float] = []
        for _ in range(ROUNDS):
            for taken, cores, parallel in ((one, "0", {}), (two, "0-1", halves)):
                taken.append(seconds_of_squad(micro_batches, parallel, cores))
        alone, both = statistics.median(one), statistics.median(two)
        ideal = micro_batches / (micro_batches + 1)
        print(
            f"{micro_batches} micro-batches: one stage {alone:.3f} s, two {both:.3f} s; efficiency "
            f"{alone / both / 2:.3f} of an ideal {ideal:.3f}",
            flush=True,
        )


def side_by_side(settings: dict[str, Any]) -> float:
    """Seconds of a step of two unrelated processes, each on a core: what the machine itself takes."""
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(
            lambda core: work_in_a_process("measure", settings, core)["step"], ("0", "1")
        )
        return statistics.mean(found)


def processes() -> None:
    """Two processes of one core each do twice the work of one process of one core, or less."""
    for micro_batches in (8, 32):
        alone: list[float] = []
        unrelated: list[float] = []
        one_run: list[float] = []
        # Long enough for a process that starts later than the other.
        settings = settings_of(micro_batches) | {"steps": 128 // micro_batches}
        spread = settings_of(2 * micro_batches, replicas=2) | {"steps": 128 // micro_batches}
        for _ in range(ROUNDS):
            alone.append(work_in_a_process("measure", settings, cores="0")["step"])
            unrelated.append(side_by_side(settings))
            one_run.append(together(spread, 2)[0]["step"])
        one, apart, both = map(statistics.median, (alone, unrelated, one_run))
        print(
            f"{8 * micro_batches} examples each: one process {one:.3f} s, two of one run {both:.3f} s, efficiency "
            f"{one / both:.3f}; two unrelated ones {apart:.3f} s, {one / apart:.3f}",
            flush=True,
        )


WORK = {"measure": work_measure, "overhead": work_overhead}
MEASURES = {f.__name__: f for f in (trace, memory, moments, overhead, pipeline, processes)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", choices=[[], *MEASURES], help="all of them by default")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        print(json.dumps(WORK[given.work[0]](json.loads(given.work[1]))))
        return
    for name in given.what or MEASURES:
        print(f"# {name}: {MEASURES[name].__doc__}", flush=True)
        MEASURES[name]()


if __name__ == "__main__":
    main()
