#!/usr/bin/env python
r"""Print the fraction of positions that hold a token: unpacked, packed (N = 2, 3, 4) and in length buckets.

The input is folders of unpacked dynamic records of any sequence lengths. By default only their index is read.
`--read` also reads some steps of each and prints sequences per second. `--train` trains a small model
(4 layers of width 256) unpacked, packed and in length buckets, alternately: it runs the same steps once to warm up
and three more times, and uses the median time of each step.

    for length in 128 384 512; do
        bert tokenize sentences/ records/$length --vocab vocab.txt --sequence-length $length \
            --mask-tokens $((length * 3 / 20)) --masking dynamic
    done
    scripts/bench_packing.py records/128 records/384 records/512
"""

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from bert_cli.data.stream.reader import Batching, ExampleStream, Reader
from bert_cli.data.stream.source import Records

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

METHODS: dict[str, dict[str, Any]] = {
    "unpacked": {},
    "packed, N = 2": {"max_sequences_per_pack": 2},
    "packed, N = 3": {"max_sequences_per_pack": 3},
    "packed, N = 4": {"max_sequences_per_pack": 4},
    "4 buckets": {"buckets": 4},
    "8 buckets": {"buckets": 8},
}
TRAINING_METHODS = {
    "unpacked": {},
    "packed, N = 3": {"max_sequences_per_pack": 3},
    "8 buckets": {"length_buckets": 8},
}
MODEL = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
}
ROUNDS = 3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+", help="unpacked dynamic records")
    parser.add_argument("--examples", type=int, default=32, help="examples per step")
    parser.add_argument("--seed", type=int, default=1984)
    parser.add_argument("--read", type=int, default=0, help="steps to read and time")
    parser.add_argument("--train", type=int, default=0, help="steps to train and time")
    parser.add_argument("--positions", type=int, default=4096, help="positions per training step")
    return parser.parse_args()


def read_speed(reader: ExampleStream, steps: int) -> float:
    """Return the sequences per second over this number of steps."""
    reader[0]
    started = time.perf_counter()
    # In a pack the mask holds the number of each sequence, so its maximum is the count of sequences.
    sequences = sum(reader[step]["input_mask"].max(axis=-1).sum() for step in range(1, steps + 1))
    return float(sequences) / (time.perf_counter() - started)


def build_run(folder: Path, args: argparse.Namespace, method: str) -> tuple[Any, ExampleStream]:
    """Return the step and the reader of a run on these records, with one micro-batch per step."""
    from bert_cli.config.pretrain import PretrainSettings
    from bert_cli.parallel.cluster import Processes
    from bert_cli.planning.plan import make_plan
    from bert_cli.tasks.run import build, corpora
    from bert_cli.tasks.run.build import open_mesh

    source = Records(folder, seed=args.seed)
    settings = PretrainSettings.model_validate(
        {
            "dataset_dir": str(folder),
            "bert_config": {**MODEL, "vocab_size": source.corpus["vocab_size"]},
            "max_seq_length": source.sequence_length,
            "max_predictions_per_seq": source.corpus["mask_tokens"],
            "global_batch": {"micro_batch_size": args.positions // source.sequence_length},
            "optimizer_opts": {"name": "AdamW", "learning_rate": {"max_learning_rate": 1e-4}},
            "total_num_train_samples": 10**6,
            "seed": args.seed,
            **TRAINING_METHODS[method],
        }
    )
    mesh = open_mesh(settings, Processes(()))
    plan = make_plan(settings, None)
    engine, _, step = build.build_run(settings, mesh, plan)
    reader = corpora.open_stream(settings)
    engine.compile(reader.first_micro_batches(len(mesh.devices)))
    return step, reader


def train(folder: Path, args: argparse.Namespace) -> None:
    """Print a row for each training method; the methods alternate step by step."""
    runs = {method: build_run(folder, args, method) for method in TRAINING_METHODS}
    seconds: dict[str, list[list[float]]] = {
        method: [[] for _ in range(args.train)] for method in runs
    }
    batches = {
        method: [reader[n] for n in range(args.train)] for method, (_, reader) in runs.items()
    }
    for round_number in range(ROUNDS + 1):
        for number in range(args.train):
            for method, (step, _) in runs.items():
                began = time.perf_counter()
                step(batches[method][number])
                if round_number > 0:
                    seconds[method][number].append(time.perf_counter() - began)
    rates = {}
    for method in runs:
        sequences = sum(int(batch["input_mask"].max(axis=-1).sum()) for batch in batches[method])
        rates[method] = sequences / sum(statistics.median(times) for times in seconds[method])
        longest = max(batch["input_ids"].shape[-1] for batch in batches[method])
        print(
            f"| {longest} | {method} | {rates[method]:.1f} | {rates[method] / rates['unpacked']:.2f} |",
            flush=True,
        )


def main() -> None:
    args = arguments()
    if args.train:
        print("| positions | method | sequences/s | relative to unpacked |\n|---:|---|---:|---:|")
        for folder in args.folders:
            train(folder, args)
        return
    print("| positions | sequences | method | examples per epoch | real token fraction |", end="")
    print(" sequences/s |" if args.read else "")
    print("|---:|---:|---|---:|---:|" + ("---:|" if args.read else ""))
    for folder in args.folders:
        for method, settings in METHODS.items():
            settings = dict(settings)
            buckets = settings.pop("buckets", None)
            batching = Batching(args.examples, args.examples)
            source = Records(folder, seed=args.seed, **settings)
            reader: Any = Reader(source, batching)
            positions = reader.epoch_size * source.sequence_length
            if buckets is not None:
                reader = Reader(source, batching, buckets)
                steps = np.arange(reader.epoch_size).reshape(-1, args.examples)
                widths = [reader.buckets.records(step)[2] for step in steps]
                # The records left out count as the longest.
                positions = args.examples * sum(widths)
                positions += reader.buckets.left_out * int(reader.buckets.ends[-1])
            fraction = int(source.files.lengths().sum(dtype="int64")) / positions
            omitted = source.sequences - round(reader.epoch_size * reader.sequences_per_example)
            print(
                f"| {source.sequence_length} | {source.sequences:,} | {method} | {reader.epoch_size:,}"
                f"{f' ({omitted} omitted)' if omitted else ''} | {fraction:.3f} |",
                end="",
            )
            print(f" {read_speed(reader, args.read):,.0f} |" if args.read else "")


if __name__ == "__main__":
    main()
