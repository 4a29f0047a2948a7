#!/usr/bin/env python3
"""Measure the costs and savings of layouts: memory, stages, processes.

    scripts/bench_parallel.py memory       # peak memory with and without recomputation
    scripts/bench_parallel.py moments      # memory of replicated, sharded and offloaded moments
    scripts/bench_parallel.py pipeline     # two stages on one core each compared with one stage on one core
    scripts/bench_parallel.py processes    # two processes, in one run or independent, compared with one process

Every measurement runs in its own process on synthetic examples. Compared measurements run alternately (A B A B), and
the results are medians. Peak memory is the growth of the process since TensorFlow's runtime started. With two
processes each one uses one core.
"""

import argparse
import json
import os
import socket
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
# The first and the last stage use the same token embedding table, so they run on the same device.
DEVICES = [0, 1, 2, 0]
# Stages for fine-tuning: its head is small and does not use the token embedding table.
HALVES = [["emb", "hid*4"], ["hid*4", "qa_head"]]
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
    """Return the settings of a run in the form of a config file."""
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


def in_child(settings: dict[str, Any], cores: str = "0-1") -> Any:
    """Run some steps in a child process and return the measurements."""
    return in_a_process([sys.executable, __file__, "--measure", json.dumps(settings)], cores)


def run_steps(settings: dict[str, Any]) -> dict[str, Any]:
    """Build a run and execute some steps; return the measurements."""
    import tensorflow as tf

    from bert_cli.config.pretrain import PretrainSettings
    from bert_cli.parallel.cluster import find_processes
    from bert_cli.planning.plan import make_plan
    from bert_cli.tasks.look.machine import resident_bytes
    from bert_cli.tasks.run import build, corpora
    from bert_cli.tasks.run.resolve import open_mesh

    steps = settings.pop("steps", 3)
    run = PretrainSettings.model_validate(settings)
    processes = find_processes(os.environ)
    mesh = open_mesh(run, processes)
    tf.linalg.matmul(tf.ones([256, 256]), tf.ones([256, 256]))
    before = resident_bytes()[0]
    plan = make_plan(run, None)
    parts: Any = build.build_run(run, mesh, plan)
    engine, state, step = parts
    stream = corpora.open_stream(run, processes.rank, processes.count)
    engine.compile(stream.first_micro_batches(len(mesh.devices)))
    batch = stream[0]
    seconds = [seconds_of(lambda: step(batch)) for _ in range(steps)]
    moments = [moment for slot in state.slots.values() for moment in slot.variables]
    return {
        "step": statistics.median(seconds[1:] or seconds),
        "growth": resident_bytes()[1] - before,
        "moments": sum(4 * int(tf.size(moment)) for moment in moments),
    }


def seconds_of(function: Any) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def memory() -> None:
    """Peak memory of 16 micro-batches through four stages."""
    for name, recompute in {"all activations": False, "recomputation": True}.items():
        run = in_child(settings_of(16, stages=True, recompute=recompute))
        print(f"{name}: {run['growth'] / 1e6:.0f} MB", flush=True)


def moments() -> None:
    """Size of the moments of one replica, and memory growth of its process."""
    for name, parallel in {
        "replicated": {},
        "sharded": {"replicated_tensor_sharding": True},
        "offloaded": {"optimizer_state_offload": True},
    }.items():
        run = two_ranks(settings_of(2, 1, replicas=2, **parallel))
        sizes = f"{run['moments'] / 1e6:.1f} MB of moments, growth {run['growth'] / 1e6:.0f} MB"
        print(f"{name}: {sizes}", flush=True)


def two_ranks(settings: dict[str, Any]) -> Any:
    """Return the measurements of rank 0 in a run of two processes with one core each."""
    sockets = [socket.socket() for _ in range(2)]
    for bound in sockets:
        bound.bind(("localhost", 0))
    workers = [f"localhost:{bound.getsockname()[1]}" for bound in sockets]
    for bound in sockets:
        bound.close()
    ranks = []
    for rank in range(2):
        task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
        command = ["taskset", "--cpu-list", str(rank), sys.executable, __file__]
        ranks.append(
            subprocess.Popen(
                [*command, "--measure", json.dumps(settings)],
                env={**os.environ, "TF_CONFIG": json.dumps(task)},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        )
    outputs = [process.communicate()[0] for process in ranks]
    return json.loads(outputs[0].strip().splitlines()[-1])


def seconds_of_squad(micro_batches: int, parallel: dict[str, Any], cores: str) -> float:
    """Return the seconds of a fine-tuning step from `bert bench squad`, with one thread per operation."""
    settings = {
        **{name: settings_of(micro_batches)[name] for name in ("bert_config", "global_batch")},
        "max_seq_length": 128,
        "doc_stride": 32,
        "parallel": parallel,
        "generated_dataset": True,
    }
    with tempfile.TemporaryDirectory() as folder:
        config, output = Path(folder, "config.json"), Path(folder, "output.json")
        config.write_text(json.dumps(settings), encoding="utf-8")
        command = ["taskset", "--cpu-list", cores, sys.executable, "-m", "bert_cli", "bench"]
        command += ["squad", "--config", str(config), "--json", str(output)]
        command += ["--steps", "7", "--warmup-steps", "2"]
        environment = {**os.environ, "TF_NUM_INTRAOP_THREADS": "1"}
        subprocess.run(command, capture_output=True, check=True, env=environment)
        return float(json.loads(output.read_text(encoding="utf-8"))["step_seconds"]["median"])


def pipeline() -> None:
    """Two stages on one core each compared with one stage on one core."""
    halves = {"pipeline_stages": HALVES, "pipeline_device_mapping": [0, 1]}
    for micro_batches in (2, 4, 8, 16):
        one_stage: list[float] = []
        two_stages: list[float] = []
        for _ in range(ROUNDS):
            one_stage.append(seconds_of_squad(micro_batches, {}, "0"))
            two_stages.append(seconds_of_squad(micro_batches, halves, "0-1"))
        one, two = statistics.median(one_stage), statistics.median(two_stages)
        efficiency, ideal = one / two / 2, micro_batches / (micro_batches + 1)
        print(
            f"{micro_batches} micro-batches: one stage {one:.3f} s, two stages {two:.3f} s; efficiency "
            f"{efficiency:.3f}, at best {ideal:.3f}",
            flush=True,
        )


def seconds_of_independent(settings: dict[str, Any]) -> float:
    """Return the mean step time of two independent processes: the slowdown that the machine causes."""
    with ThreadPoolExecutor(2) as pool:
        runs = pool.map(lambda core: in_child(settings, core)["step"], ("0", "1"))
        return statistics.mean(runs)


def processes() -> None:
    """Two processes compared with one process, with the same run per process."""
    for micro_batches in (8, 32):
        # Enough steps that both processes measure at the same time, although one starts later.
        steps = {"steps": 128 // micro_batches}
        single = settings_of(micro_batches) | steps
        double = settings_of(2 * micro_batches, replicas=2) | steps
        rounds = [
            (
                in_child(single, cores="0")["step"],
                seconds_of_independent(single),
                two_ranks(double)["step"],
            )
            for _ in range(ROUNDS)
        ]
        one, independent, both = map(statistics.median, zip(*rounds, strict=True))
        print(
            f"{8 * micro_batches} examples per process: one process {one:.3f} s; two in one run {both:.3f} s, "
            f"efficiency {one / both:.3f}; two independent {independent:.3f} s, efficiency {one / independent:.3f}",
            flush=True,
        )


MEASUREMENTS = {f.__name__: f for f in (memory, moments, pipeline, processes)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    choices = [[], *MEASUREMENTS]
    parser.add_argument("what", nargs="*", choices=choices, help="default: all")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(run_steps(json.loads(options.measure))))
        return
    for name in options.what or MEASUREMENTS:
        print(f"# {name}: {MEASUREMENTS[name].__doc__}", flush=True)
        MEASUREMENTS[name]()


if __name__ == "__main__":
    main()
