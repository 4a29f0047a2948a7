#!/usr/bin/env python3
"""Measure BERT-base beside what people would use instead, in turn, A B A B, each side a process of its own.

    scripts/bench_training.py micro-batch --precision mixed_bfloat16 --examples 8 --places 128
    scripts/bench_training.py update --optimizer LAMB
    scripts/bench_training.py scores --examples 64 --places 853

`micro-batch` is forward and backward pass of one micro-batch on made-up examples, beside Hugging Face's
BertForPreTraining in PyTorch, and whatever else `--beside` names: `pytorch-compiled` is torch.compile,
`tensorflow` and `tensorflow-compiled` (XLA) TFBertForPreTraining, in an environment of its own, whose
Python `--tensorflow-python` is (tensorflow==2.19.1 tf-keras==2.19.0 transformers==4.49.0). 15 % of the
places are masked on all sides, and dropout is 0.1. `update` is the end of a step (the gradient's norm,
clipping, the move) of 110 million weights beside Keras' AdamW with a global norm, as a graph; with
`--beside lamb` beside ours by LAMB, with `--beside memory` beside memory: each array that AdamW needs read
and written once, on one thread. `scores` is the memory that the masked-LM loss and its gradients take in 1, 8 and 32
chunks of the vocabulary, in float32, beyond what the process had. Told are medians, of all rounds so far,
of seconds by the clock and of the processor's own time, which others on the machine disturb less.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from turns import Pairs, first_cores, in_a_process, in_turn

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"


def timed(act: Callable[[], Any], repetitions: int) -> Pairs:
    """Seconds of an action, after it was done twice for nothing."""
    act()
    act()
    found = []
    for _ in range(repetitions):
        clock, processor = time.perf_counter(), time.process_time()
        act()
        found.append((time.perf_counter() - clock, time.process_time() - processor))
    return found


def masked_of(places: int) -> int:
    return round(0.15 * places)


def build_ours(given: argparse.Namespace) -> Any:
    """A run of one micro-batch a step: its engine, step and batch."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(given.cores)
    from bert_cli.config.parallel import Cluster
    from bert_cli.config.plan import make_plan
    from bert_cli.config.training import PretrainSettings
    from bert_cli.parallel.cluster import find_processes
    from bert_cli.tasks.run import build, corpora

    settings = PretrainSettings.model_validate(
        {
            "generated_dataset": True,
            "bert_config": {"num_hidden_layers": given.layers},
            "max_seq_length": given.places,
            "max_predictions_per_seq": masked_of(given.places),
            "precision": given.precision,
            "compile": given.compile,
            "global_batch": {"micro_batch_size": given.examples},
            "optimizer_opts": {
                "name": given.optimizer,
                "learning_rate": {"max_learning_rate": 1e-4},
                "max_gradient_norm": 1.0,
            },
            "total_num_train_samples": 10**6,
        }
    )
    mesh = build.open_mesh(settings, find_processes(Cluster(), os.environ))
    plan = make_plan(settings, None)
    parts = build.build_run(settings, mesh, plan)
    return parts.engine, corpora.open_stream(settings, plan.examples_per_step, 0, 1)[0]


def micro_batch_of_bert(given: argparse.Namespace) -> Pairs:
    from bert_cli.parallel.engine import count

    engine, batch = build_ours(given)
    counts = count(batch, engine.head.COUNTS)
    return timed(lambda: engine.accumulate(batch, 0, counts, 1.0), given.repetitions)


def update_of_bert(given: argparse.Namespace) -> Pairs:
    engine, _ = build_ours(given)
    for stage in engine.replicas[0]:
        for accumulator in stage.accumulators.values():
            accumulator.assign(1e-3 + accumulator)

    def update() -> None:
        squared = engine.all_reduce_gradients(1.0)
        engine.apply_update(min(1.0, squared**-0.5), 1e-4, 3, 3)

    return timed(update, given.repetitions)


def update_by_lamb(given: argparse.Namespace) -> Pairs:
    given.optimizer = "LAMB"
    return update_of_bert(given)


def micro_batch_of_pytorch(given: argparse.Namespace, *, compiled: bool = False) -> Pairs:
    import torch
    from transformers import BertConfig, BertForPreTraining

    torch.set_num_threads(given.cores)
    model = BertForPreTraining(BertConfig(num_hidden_layers=given.layers)).train()
    shape = given.examples, given.places
    ids = torch.randint(1000, 30000, shape)
    labels = torch.full(shape, -100)
    labels[:, : masked_of(given.places)] = ids[:, : masked_of(given.places)]
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones(shape, dtype=torch.long),
        "labels": labels,
        "next_sentence_label": torch.zeros(given.examples, dtype=torch.long),
    }
    run = torch.compile(model) if compiled else model

    def both_ways() -> float:
        sixteen = given.precision == "mixed_bfloat16"
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=sixteen):
            loss = run(**inputs).loss
        loss.backward()
        model.zero_grad(set_to_none=True)
        return float(loss)

    return timed(both_ways, given.repetitions)


def micro_batch_of_compiled_pytorch(given: argparse.Namespace) -> Pairs:
    return micro_batch_of_pytorch(given, compiled=True)


def micro_batch_of_tensorflow(given: argparse.Namespace, *, compiled: bool = False) -> Pairs:
    import tensorflow as tf
    import tf_keras
    from transformers import BertConfig, TFBertForPreTraining

    tf.config.threading.set_intra_op_parallelism_threads(given.cores)
    tf_keras.mixed_precision.set_global_policy(given.precision)
    model = TFBertForPreTraining(BertConfig(num_hidden_layers=given.layers))
    shape = given.examples, given.places
    ids = tf.random.uniform(shape, 1000, 30000, tf.int32)
    masked = tf.range(given.places) < masked_of(given.places)
    inputs = {
        "input_ids": ids,
        "attention_mask": tf.ones(shape, tf.int32),
        "labels": tf.where(masked[None, :], ids, -100),
        "next_sentence_label": tf.zeros(given.examples, tf.int32),
    }
    model(**inputs)

    @tf.function(jit_compile=compiled)
    def both_ways() -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(**inputs, training=True).loss)
        return loss, [
            tf.convert_to_tensor(g) for g in tape.gradient(loss, model.trainable_variables)
        ]

    return timed(lambda: float(both_ways()[0]), given.repetitions)


def micro_batch_of_compiled_tensorflow(given: argparse.Namespace) -> Pairs:
    return micro_batch_of_tensorflow(given, compiled=True)


def weights_of_bert(given: argparse.Namespace) -> list[Any]:
    from bert_cli.config.model import BertConfig
    from bert_cli.model.bert import build_blocks, named_weights

    blocks = build_blocks(BertConfig(num_hidden_layers=given.layers), seed=1, policy="float32")
    return list(named_weights(blocks).values())


def update_of_keras(given: argparse.Namespace) -> Pairs:
    import keras
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(given.cores)
    weights = weights_of_bert(given)
    gradients = [tf.Variable(tf.fill(weight.shape, 1e-3)) for weight in weights]
    optimizer = keras.optimizers.AdamW(1e-4, global_clipnorm=1.0)
    optimizer.build(weights)

    @tf.function(autograph=False)
    def apply() -> None:
        optimizer.apply([gradient.read_value() for gradient in gradients])

    def update() -> float:
        apply()
        return float(weights[-1].value[0])

    return timed(update, given.repetitions)


def memory_of_an_update(given: argparse.Namespace) -> Pairs:
    """Read four numbers of each weight and write three of them, each array once, on one thread."""
    import numpy as np

    weights = sum(math.prod(weight.shape) for weight in weights_of_bert(given))
    gradient, *state = (np.ones(weights, np.float32) for _ in range(4))

    def one_pass() -> None:
        np.max(gradient)
        for array in state:
            np.multiply(array, np.float32(0.999), out=array)

    return timed(one_pass, given.repetitions)


SIDES: dict[str, dict[str, Callable[[argparse.Namespace], Pairs]]] = {
    "micro-batch": {
        "bert": micro_batch_of_bert,
        "pytorch": micro_batch_of_pytorch,
        "pytorch-compiled": micro_batch_of_compiled_pytorch,
        "tensorflow": micro_batch_of_tensorflow,
        "tensorflow-compiled": micro_batch_of_compiled_tensorflow,
    },
    "update": {
        "bert": update_of_bert,
        "keras": update_of_keras,
        "lamb": update_by_lamb,
        "memory": memory_of_an_update,
    },
}


PEERS = [side for sides in SIDES.values() for side in sides if side != "bert"]


def growth_by_scores(given: argparse.Namespace) -> int:
    """Bytes that this process grows by, at most, over the loss and its gradients."""
    import tensorflow as tf

    from bert_cli.model.chunked_loss import chunked_loss
    from bert_cli.model.fused import compile_fused
    from bert_cli.model.heads import loss_sums
    from bert_cli.tasks.bench.timing import resident_bytes

    compile_fused(given.compile != "nothing")
    rows, width, words = given.examples * masked_of(given.places), 768, 30522
    x, table, bias = tf.ones([rows, width]), tf.ones([words, width]), tf.zeros([words])
    labels, weights = tf.zeros([rows], tf.int32), tf.ones([rows])

    @tf.function(autograph=False)
    def run(x: Any, table: Any, bias: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch([x, table, bias])
            if given.chunks == 1:
                scores = tf.matmul(x, table, transpose_b=True) + bias
                loss, _ = loss_sums(scores, labels, weights)
            else:
                loss, _ = chunked_loss(x, table, bias, labels, weights, given.chunks)
        return [tf.reduce_sum(value) for value in tape.gradient(loss, [x, table, bias])]

    before = resident_bytes()[1]
    run(x, table, bias)
    return resident_bytes()[1] - before


def scores(given: argparse.Namespace) -> None:
    """Print the growth of a process for each number of chunks."""
    rows = given.examples * masked_of(given.places)
    for chunks in (1, 8, 32):
        words = [sys.executable, __file__, *sys.argv[1:], "--chunks", str(chunks), "--side", "bert"]
        told = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        grown = int(told.strip().splitlines()[-1]) / 1e6
        print(f"{rows} masked places, {chunks} chunks: grew by {grown:.0f} MB", flush=True)


def side_in_a_process(given: argparse.Namespace, side: str) -> Pairs:
    is_tensorflow = side.startswith("tensorflow")
    python = given.tensorflow_python if is_tensorflow else sys.executable
    environment = {"TF_USE_LEGACY_KERAS": "1"} if is_tensorflow else {}
    words = [python, __file__, *sys.argv[1:], "--side", side]
    found: Pairs = in_a_process(words, first_cores(given.cores), **environment)
    return found


def main() -> None:
    """Run the sides in turn and print their medians and ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=[*SIDES, "scores"])
    parser.add_argument("--precision", default="mixed_bfloat16")
    parser.add_argument("--examples", type=int, default=8)
    parser.add_argument("--places", type=int, default=128)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--optimizer", default="AdamW", choices=("AdamW", "LAMB"))
    parser.add_argument("--compile", default="auto", help="that of `bert`")
    parser.add_argument(
        "--beside", nargs="+", choices=PEERS, help="peers; the first of each by default"
    )
    parser.add_argument("--tensorflow-python", help="of an environment with TFBertForPreTraining")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--chunks", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.what == "scores":
        print(growth_by_scores(given)) if given.side else scores(given)
        return
    if given.side:
        print(json.dumps(SIDES[given.what][given.side](given)))
        return
    peers = given.beside or [name for name in SIDES[given.what] if name != "bert"][:1]
    for peer in peers:
        if peer not in SIDES[given.what]:
            others = [side for side in SIDES[given.what] if side != "bert"]
            parser.error(f"--beside {peer}: {given.what} has {', '.join(others)}")
        if peer.startswith("tensorflow") and not given.tensorflow_python:
            parser.error(f"--beside {peer}: needs --tensorflow-python, see above")
    sides = {side: partial(side_in_a_process, given, side) for side in ("bert", *peers)}
    medians = in_turn(sides, given.rounds, "{:.3f} s, processor {:.3f} s".format)
    clock, processor = medians.pop("bert")
    for side, theirs in medians.items():
        print(
            f"{side} takes {theirs[0] / clock:.2f} times bert's seconds, {theirs[1] / processor:.2f} times "
            "its processor's"
        )


if __name__ == "__main__":
    main()
