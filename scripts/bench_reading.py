#!/usr/bin/env python
"""Measure the examples a second that one core reads from a folder of static records.

`bert` is the work of a run's reading thread: records of random positions are read from their files, which may be in the
page cache, both checksums of each are verified, and they become the columns of a step. 40 steps are about an epoch of
half a million records, because the first access to a page of a file is slower. `parser` is `tf.io.parse_example` alone,
on batches of 256 records in memory. The sides run alternately, each in a process on one core. The script prints medians
of all rounds, of wall-clock and of processor time. How long a step of `bert pretrain` waits for its batch is
`input_wait_share` of `bert bench`.

    scripts/bench_reading.py data/records/128
"""

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from turns import Pairs, first_cores, in_a_process, run_alternately

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
STEP = 16_384
"""Examples of a step, read in the order of their files."""
AT_ONCE = 256
"""Examples of a batch of the parser."""


def rates(parts: Iterator[Any], examples: int, repetitions: int) -> Pairs:
    """Return examples a second by the clock and by processor seconds, without the first part."""
    next(parts)
    results = []
    for _ in range(repetitions):
        clock, processor = time.perf_counter(), time.process_time()
        next(parts)
        results.append(
            (
                examples / (time.perf_counter() - clock),
                examples / (time.process_time() - processor),
            )
        )
    return results


def read_by_bert(folder: Path) -> Iterator[Any]:
    from bert_cli.data.stream.reader import Batching, Reader
    from bert_cli.data.stream.source import Records

    reader = Reader(Records(folder, seed=1), Batching(STEP, STEP))
    return (reader[step] for step in itertools.count())


def parse_by_tensorflow(folder: Path) -> Iterator[Any]:
    import numpy as np
    import tensorflow as tf

    from bert_cli.data.records.corpus import RecordFiles, read_corpus
    from bert_cli.data.records.formats import static_lengths

    tf.config.threading.set_intra_op_parallelism_threads(1)
    corpus = read_corpus(folder)
    if corpus["format"] != "static":
        sys.exit(f"{folder}: has {corpus['format']} records; make some with --masking static")
    chosen = np.random.default_rng(1).integers(0, corpus["records"], STEP)
    payloads = RecordFiles(folder, corpus).payloads(chosen)
    features = {
        name: tf.io.FixedLenFeature([length], tf.float32 if "weights" in name else tf.int64)
        for name, length in static_lengths(corpus["sequence_length"], corpus["mask_tokens"]).items()
    }
    parse = tf.function(lambda texts: tf.io.parse_example(texts, features))
    batches = [tf.constant(payloads[start : start + AT_ONCE]) for start in range(0, STEP, AT_ONCE)]
    return ([parse(batch) for batch in batches] for _ in itertools.count())


SIDES: dict[str, Callable[[Path], Iterator[Any]]] = {
    "bert": read_by_bert,
    "parser": parse_by_tensorflow,
}


def main() -> None:
    """Run the sides alternately and print their medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="static records that `bert tokenize` wrote")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repetitions", type=int, default=40)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        from bert_cli.parallel.tensorflow.mesh import keep_freed_memory

        keep_freed_memory()  # as a run does
        print(
            json.dumps(rates(SIDES[arguments.side](arguments.folder), STEP, arguments.repetitions))
        )
        return
    words = [sys.executable, *sys.argv, "--side"]
    sides = {side: partial(in_a_process, [*words, side], first_cores(1)) for side in SIDES}
    run_alternately(
        sides, arguments.rounds, "{:,.0f} examples/s, {:,.0f} of the processor's seconds".format
    )


if __name__ == "__main__":
    main()
