#!/usr/bin/env python
"""Examples a second that one core reads from a folder of static records, beside TensorFlow's parser.

`bert` is what a run does in its reading thread: records of random places of the folder are fetched from
their files (which the system may hold in memory), both checksums of each are looked at, and they become
the columns of a step. Of 40 steps, about an epoch of half a million records, because a page of a file is
slower the first time. `parser` is `tf.io.parse_example` alone, on records of the folder that lie in
memory, in batches of 256. The sides take turns, each a process of its own on one core; told are medians
of all rounds so far, by the clock and by seconds of the processor. What a step of `bert pretrain` waits
for its batch is `input_wait_share` of `bert bench`.

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

from turns import Pairs, first_cores, in_a_process, in_turn

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
STEP = 16_384
"""Examples of a step, fetched in the order in which they lie on disk."""
AT_ONCE = 256
"""Examples that the parser is given at once."""


def rates(parts: Iterator[Any], examples: int, repetitions: int) -> Pairs:
    """Examples a second of the clock and of the processor, of each part but the first."""
    next(parts)
    found = []
    for _ in range(repetitions):
        clock, processor = time.perf_counter(), time.process_time()
        next(parts)
        found.append(
            (
                examples / (time.perf_counter() - clock),
                examples / (time.process_time() - processor),
            )
        )
    return found


def read_by_bert(folder: Path) -> Iterator[Any]:
    from bert_cli.data.stream.reader import Batching, Reader
    from bert_cli.data.stream.source import open_records

    reader = Reader(open_records(folder, seed=1), Batching(STEP, STEP))
    return (reader[step] for step in itertools.count())


def parse_by_tensorflow(folder: Path) -> Iterator[Any]:
    import numpy as np
    import tensorflow as tf

    from bert_cli.data.records.corpus import RecordFiles, read_corpus
    from bert_cli.data.records.formats import STATIC_FEATURES, static_lengths

    tf.config.threading.set_intra_op_parallelism_threads(1)
    corpus = read_corpus(folder)
    if corpus["format"] != "static":
        sys.exit(f"{folder}: has {corpus['format']} records; make some with --masking static")
    chosen = np.random.default_rng(1).integers(0, corpus["records"], STEP)
    payloads = RecordFiles(folder, corpus).payloads(chosen)
    kinds = {"int64": tf.int64, "float": tf.float32}
    features = {
        name: tf.io.FixedLenFeature([length], kinds[STATIC_FEATURES[name]])
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
    """Run the sides in turn and print their medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="static records that `bert tokenize` wrote")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repetitions", type=int, default=40)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        from bert_cli.parallel.tensorflow.runtime import keep_freed_memory

        keep_freed_memory()  # as a run does
        print(json.dumps(rates(SIDES[given.side](given.folder), STEP, given.repetitions)))
        return
    words = [sys.executable, *sys.argv, "--side"]
    sides = {side: partial(in_a_process, [*words, side], first_cores(1)) for side in SIDES}
    in_turn(sides, given.rounds, "{:,.0f} examples/s, {:,.0f} of the processor's seconds".format)


if __name__ == "__main__":
    main()
