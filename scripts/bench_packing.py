#!/usr/bin/env python
r"""Real tokens per place of a corpus: unpacked, packed (N = 2, 3, 4), and read by length in bins.

Takes folders of dynamic records that are not packed, made at any lengths, and needs nothing but where
their records lie; `--read` also reads some steps of each and tells sequences per second on one core.

    for length in 128 384 512; do
        bert tokenize sentences/ records/$length --vocab vocab.txt --sequence-length $length \
            --mask-tokens $((length * 3 / 20)) --masking dynamic
    done
    scripts/bench_packing.py records/128 records/384 records/512
"""

import argparse
import time
from pathlib import Path
from typing import Any

from bert_cli.data.reader import Reader

WAYS: dict[str, dict[str, Any]] = {
    "unpacked": {},
    "packed, N = 2": {"max_sequences_per_pack": 2},
    "packed, N = 3": {"max_sequences_per_pack": 3},
    "packed, N = 4": {"max_sequences_per_pack": 4},
    "4 bins": {"bins": 4},
    "8 bins": {"bins": 8},
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+", help="dynamic records, not packed")
    parser.add_argument("--examples", type=int, default=32, help="of a step")
    parser.add_argument("--seed", type=int, default=1984)
    parser.add_argument("--read", type=int, default=0, help="steps to read and time")
    return parser.parse_args()


def read_speed(reader: Reader, steps: int) -> float:
    """Sequences per second over so many steps."""
    reader[0]
    started = time.perf_counter()
    labels = sum(reader[step]["input_mask"].max(axis=-1).sum() for step in range(1, steps + 1))
    return float(labels) / (time.perf_counter() - started)


def main() -> None:
    given = arguments()
    print("| places | sequences | way | examples of an epoch | real tokens per place |", end="")
    print(" sequences/s |" if given.read else "")
    print("|---:|---:|---|---:|---:|" + ("---:|" if given.read else ""))
    for folder in given.folders:
        for way, settings in WAYS.items():
            reader = Reader(
                folder,
                seed=given.seed,
                examples_per_step=given.examples,
                micro_batch_size=given.examples,
                **settings,
            )
            left = f" ({reader.left_out} left out)" if reader.left_out else ""
            print(
                f"| {reader.sequence_length} | {reader.sequences + reader.left_out:,} | {way} | "
                f"{len(reader):,}{left} | {reader.real_token_share:.3f} |",
                end="",
            )
            print(f" {read_speed(reader, given.read):,.0f} |" if given.read else "")


if __name__ == "__main__":
    main()
