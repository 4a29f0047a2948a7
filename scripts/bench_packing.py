#!/usr/bin/env python
r"""Real tokens per place of a corpus: unpacked, packed (N = 2, 3, 4), and in length buckets.

Takes folders of dynamic records that are not packed, made at any lengths, and needs nothing but where
their records lie; `--read` also reads some steps of each and tells sequences per second, `--train` also
trains a small model (4 layers of 256) on them: unpacked, in packs and in length buckets take turns, the same steps
three times after once for nothing, and the median of each step counts.

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

from bert_cli.data.stream.buckets import BucketReader
from bert_cli.data.stream.reader import Batching, ExampleStream, Reader
from bert_cli.data.stream.source import open_records

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

WAYS: dict[str, dict[str, Any]] = {
    "unpacked": {},
    "packed, N = 2": {"max_sequences_per_pack": 2},
    "packed, N = 3": {"max_sequences_per_pack": 3},
    "packed, N = 4": {"max_sequences_per_pack": 4},
    "4 buckets": {"buckets": 4},
    "8 buckets": {"buckets": 8},
}
TRAINED = {
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
    parser.add_argument("folders", type=Path, nargs="+", help="dynamic records, not packed")
    parser.add_argument("--examples", type=int, default=32, help="of a step")
    parser.add_argument("--seed", type=int, default=1984)
    parser.add_argument("--read", type=int, default=0, help="steps to read and time")
    parser.add_argument("--train", type=int, default=0, help="steps to train and time")
    parser.add_argument("--places", type=int, default=4096, help="of a step that is trained")
    return parser.parse_args()


def read_speed(reader: ExampleStream, steps: int) -> float:
    """Sequences per second over so many steps."""
    reader[0]
    started = time.perf_counter()
    labels = sum(reader[step]["input_mask"].max(axis=-1).sum() for step in range(1, steps + 1))
    return float(labels) / (time.perf_counter() - started)


def trained(folder: Path, args: argparse.Namespace, way: str) -> tuple[Any, ExampleStream]:
    """The step and the reader of a run on these records, a micro-batch of so many places a step."""
    from bert_cli.config.plan import make_plan
    from bert_cli.config.training import PretrainSettings
    from bert_cli.parallel.cluster import Processes
    from bert_cli.tasks.run import build, corpora

    seen = open_records(folder, seed=args.seed)
    settings = PretrainSettings.model_validate(
        {
            "dataset_dir": str(folder),
            "bert_config": {**MODEL, "vocab_size": seen.corpus["vocab_size"]},
            "max_seq_length": seen.sequence_length,
            "max_predictions_per_seq": seen.corpus["mask_tokens"],
            "global_batch": {"micro_batch_size": args.places // seen.sequence_length},
            "optimizer_opts": {"name": "AdamW", "learning_rate": {"max_learning_rate": 1e-4}},
            "total_num_train_samples": 10**6,
            "seed": args.seed,
            **TRAINED[way],
        }
    )
    mesh = build.open_mesh(settings, Processes(()))
    plan = make_plan(settings, None)
    _, engine, _, step = build.build_run(settings, mesh, plan)
    reader = corpora.open_stream(settings, plan.examples_per_step)
    engine.compile(reader.first_micro_batches(len(mesh.devices)))
    return step, reader


def train(folder: Path, args: argparse.Namespace) -> None:
    """Print the rows of the ways that are trained, taking turns step by step."""
    runs = {way: trained(folder, args, way) for way in TRAINED}
    seconds: dict[str, list[list[float]]] = {way: [[] for _ in range(args.train)] for way in runs}
    batches = {way: [reader[n] for n in range(args.train)] for way, (_, reader) in runs.items()}
    for turn in range(ROUNDS + 1):
        for number in range(args.train):
            for way, (step, _) in runs.items():
                began = time.perf_counter()
                step(batches[way][number])
                if turn:
                    seconds[way][number].append(time.perf_counter() - began)
    rates = {}
    for way in runs:
        sequences = sum(int(batch["input_mask"].max(axis=-1).sum()) for batch in batches[way])
        rates[way] = sequences / sum(statistics.median(times) for times in seconds[way])
        longest = max(batch["input_ids"].shape[-1] for batch in batches[way])
        print(
            f"| {longest} | {way} | {rates[way]:.1f} | {rates[way] / rates['unpacked']:.2f} |",
            flush=True,
        )


def main() -> None:
    args = arguments()
    if args.train:
        print("| places | way | sequences/s | of unpacked |\n|---:|---|---:|---:|")
        for folder in args.folders:
            train(folder, args)
        return
    print("| places | sequences | way | examples of an epoch | real tokens per place |", end="")
    print(" sequences/s |" if args.read else "")
    print("|---:|---:|---|---:|---:|" + ("---:|" if args.read else ""))
    for folder in args.folders:
        for way, settings in WAYS.items():
            settings = dict(settings)
            buckets = settings.pop("buckets", None)
            batching = Batching(args.examples, args.examples)
            source = open_records(folder, seed=args.seed, **settings)
            reader: Any = Reader(source, batching)
            if buckets is not None:
                reader = BucketReader(source, batching, buckets)
                fraction = reader.buckets.real_token_fraction
            else:
                tokens = int(source.files.lengths().sum(dtype="int64"))
                fraction = tokens / (reader.epoch_size * source.sequence_length)
            left = source.sequences - round(reader.epoch_size * reader.sequences_per_example)
            print(
                f"| {source.sequence_length} | {source.sequences:,} | {way} | {reader.epoch_size:,}"
                f"{f' ({left} left out)' if left else ''} | {fraction:.3f} |",
                end="",
            )
            print(f" {read_speed(reader, args.read):,.0f} |" if args.read else "")


if __name__ == "__main__":
    main()
