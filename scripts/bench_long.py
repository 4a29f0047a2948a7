#!/usr/bin/env python3
"""Compare ModernBERT on TensorFlow with transformers' in PyTorch on long texts, in time and memory, on one core.

    scripts/bench_long.py --lengths 512 2048 8192 --rounds 3

A model with random weights, which all sides read from the same folder, computes the hidden states of one text without
padding, in float32. transformers runs with attention `sdpa` and `eager`. Every side is a process for itself, and they
run alternately. The table shows medians of processor time, the largest memory of a process, and the memory
that the pass added to the process with the model loaded.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from turns import first_cores, in_a_process

from bert_cli.tasks.look.machine import resident_bytes

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")  # as `bert` does
os.environ |= {"CUDA_VISIBLE_DEVICES": "-1"}
SIDES = ("ours", "sdpa", "eager")
VOCABULARY = 4096


def write_model(folder: Path, options: argparse.Namespace) -> None:
    """Write a ModernBERT with random weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.ModernBertConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.width,
        intermediate_size=options.width * 3 // 2,
        num_hidden_layers=options.layers,
        num_attention_heads=options.width // 64,
        max_position_embeddings=max(options.lengths),
        pad_token_id=0,
        cls_token_id=1,
        sep_token_id=2,
        bos_token_id=3,
        eos_token_id=4,
    )
    transformers.ModernBertModel(config).save_pretrained(folder)


def ours(options: argparse.Namespace) -> Callable[[Any], Any]:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    from bert_cli.config.use import PredictSettings
    from bert_cli.tasks.model.models import find_source
    from bert_cli.tasks.model.opened import Predictor, open_model

    class Hidden(Predictor):
        def outputs(self, columns: Any) -> Any:
            return self.model.hidden(columns)

    source = find_source(str(options.folder))
    model = open_model(source, "embed", uses_library=True)
    predictor = Hidden(model, None, PredictSettings(model="."), options.length)  # type: ignore[arg-type]

    def run(ids: Any) -> Any:
        columns = {"input_ids": ids, "input_mask": np.ones_like(ids)}
        return predictor.traced({**columns, "segment_ids": np.zeros_like(ids)}).numpy()

    return run


def theirs(options: argparse.Namespace) -> Callable[[Any], Any]:
    import torch
    from transformers import ModernBertModel

    torch.set_num_threads(1)
    form = {"attn_implementation": options.side, "dtype": torch.float32}
    model = ModernBertModel.from_pretrained(options.folder, **form).eval()

    def run(ids: Any) -> Any:
        with torch.no_grad():
            tensor = torch.from_numpy(ids).long()
            return model(tensor, attention_mask=torch.ones_like(tensor)).last_hidden_state.numpy()

    return run


def used_memory() -> float:
    """Return the largest memory of this process so far in MB."""
    return resident_bytes()[1] / 1e6


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the processor time of each pass but the first, the memory, and some of the outputs."""
    run = (ours if options.side == "ours" else theirs)(options)
    ids = np.random.default_rng(0).integers(5, VOCABULARY, (1, options.length), dtype=np.int32)
    run(ids[:, :16])
    before = used_memory()
    times = []
    for _ in range(options.repetitions + 1):
        begun = time.process_time()
        hidden = run(ids)
        times.append(time.process_time() - begun)
    memory = used_memory()
    values = hidden[0, :: options.length // 8, :8].astype(float).tolist()
    return {"times": times[1:], "memory": memory, "added": memory - before, "values": values}


def main() -> None:
    """Measure all sides at each length and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(measure(options)))
        return
    print(
        "| tokens | side | processor time | of the first side | memory | added by the pass | largest difference |"
    )
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), options)
        command = [sys.executable, __file__, *sys.argv[1:], "--folder", folder]
        for length in options.lengths:
            sides: dict[str, list[dict[str, Any]]] = {side: [] for side in options.sides}
            for _ in range(options.rounds):
                for side, results in sides.items():
                    words = [*command, "--length", str(length), "--side", side]
                    results.append(in_a_process(words, first_cores(1)))
            median = {
                side: statistics.median(itertools.chain.from_iterable(r["times"] for r in results))
                for side, results in sides.items()
            }
            for side, results in sides.items():
                first = np.array(sides[options.sides[0]][0]["values"])
                difference = np.abs(np.array(results[0]["values"]) - first).max()
                memory, added = (max(r[name] for r in results) for name in ("memory", "added"))
                ratio = median[side] / median[options.sides[0]]
                print(
                    f"| {length:,} | {side} | {median[side]:.3f} s | {ratio:.2f} | {memory:,.0f} MB | "
                    f"{added:,.0f} MB | {difference:.1e} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
