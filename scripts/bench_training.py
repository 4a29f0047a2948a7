#!/usr/bin/env python3
"""Compare training speed of BERT-base with other implementations.

    scripts/bench_training.py micro-batch --precision mixed_bfloat16 --examples 8 --positions 128
    scripts/bench_training.py update --optimizer LAMB

The implementations run alternately (A B A B), each in its own process. After each round the script prints
medians over all rounds so far: of wall-clock time, and of processor time, which other programs on the machine
disturb less. The last line names the fastest of the others. All sides run with glibc's settings that keep freed
memory, which `bert` sets itself.

`micro-batch`  times forward and backward of one micro-batch of synthetic examples. 15 % of the positions are
               masked and dropout is 0.1. `pytorch` is Hugging Face's BertForPreTraining; `pytorch-masked` scores only
               the masked positions, as this project does, and `pytorch-masked-bfloat16` has weights of bfloat16
               instead of autocast. Each of them exists with `-compiled`, by torch.compile. The default comparison is
               all six.
`update`       times the gradient norm, clipping and the update of 110 million weights. The default comparison is
               Keras' AdamW with a global norm, as a graph. `--beside pytorch` clips and calls PyTorch's fused AdamW;
               `--beside lamb` compares with LAMB of this project, `--beside memory` with memory bandwidth: one
               thread reads and writes each array that AdamW needs once.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from turns import Pairs, first_cores, in_a_process, run_alternately

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")  # as `bert` does
# The settings of bert_cli/parallel/devices.py. PyTorch gains 2 % by them.
os.environ["MALLOC_MMAP_MAX_"] = "0"
os.environ["MALLOC_TRIM_THRESHOLD_"] = str(2**31 - 1)
os.environ["MALLOC_ARENA_MAX"] = "1"


def measure(function: Callable[[], Any], repetitions: int) -> Pairs:
    """Return wall-clock and processor time of each repetition, after two warm-up calls."""
    function()
    function()
    times = []
    for _ in range(repetitions):
        clock, processor = time.perf_counter(), time.process_time()
        function()
        times.append((time.perf_counter() - clock, time.process_time() - processor))
    return times


def masked_positions(sequence_length: int) -> int:
    """Return the number of masked positions in a sequence."""
    return round(0.15 * sequence_length)


def build_ours(options: argparse.Namespace) -> Any:
    """Return the engine and the batch of a run with one micro-batch per step."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(options.cores)
    from bert_cli.config.pretrain import PretrainSettings
    from bert_cli.parallel.cluster import find_processes
    from bert_cli.planning.plan import make_plan
    from bert_cli.tasks.run import build, corpora
    from bert_cli.tasks.run.resolve import open_mesh

    settings = PretrainSettings.model_validate(
        {
            "generated_dataset": True,
            "bert_config": {"num_hidden_layers": options.layers},
            "max_seq_length": options.positions,
            "max_predictions_per_seq": masked_positions(options.positions),
            "precision": options.precision,
            "compile": options.compile,
            "global_batch": {"micro_batch_size": options.examples},
            "optimizer_opts": {
                "name": options.optimizer,
                "learning_rate": {"max_learning_rate": 1e-4},
                "max_gradient_norm": 1.0,
            },
            "total_num_train_samples": 10**6,
        }
    )
    mesh = open_mesh(settings, find_processes(os.environ))
    plan = make_plan(settings, None)
    engine, _, _ = build.build_run(settings, mesh, plan)
    return engine, corpora.open_stream(settings)[0]


def micro_batch_of_bert(options: argparse.Namespace) -> Pairs:
    from bert_cli.parallel.engine import count

    engine, batch = build_ours(options)
    counts = count(batch, engine.head.COUNTS)
    return measure(lambda: engine.accumulate(batch, 0, counts, 1.0), options.repetitions)


def update_of_bert(options: argparse.Namespace) -> Pairs:
    from bert_cli.parallel.engine import UpdateRequest

    engine, _ = build_ours(options)
    request = UpdateRequest(learning_rate=1e-4, updates=3, step=3)
    for stage in engine.replicas[0]:
        for accumulator in stage.accumulators.values():
            accumulator.assign(1e-3 + accumulator)

    def update() -> None:
        squared = engine.all_reduce_gradients()
        engine.apply_update(min(1.0, squared**-0.5), request)

    return measure(update, options.repetitions)


def update_by_lamb(options: argparse.Namespace) -> Pairs:
    options.optimizer = "LAMB"
    return update_of_bert(options)


def micro_batch_of_pytorch(options: argparse.Namespace, *, compiled: bool = False) -> Pairs:
    import torch
    from transformers import BertConfig, BertForPreTraining

    torch.set_num_threads(options.cores)
    model = BertForPreTraining(BertConfig(num_hidden_layers=options.layers)).train()
    shape = options.examples, options.positions
    ids = torch.randint(1000, 30000, shape)
    labels = torch.full(shape, -100)
    labels[:, : masked_positions(options.positions)] = ids[:, : masked_positions(options.positions)]
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones(shape, dtype=torch.long),
        "labels": labels,
        "next_sentence_label": torch.zeros(options.examples, dtype=torch.long),
    }
    run = torch.compile(model) if compiled else model

    is_autocast = options.precision == "mixed_bfloat16"
    return measure_pytorch(options, model, lambda: run(**inputs).loss, is_autocast=is_autocast)


def measure_pytorch(
    options: argparse.Namespace, model: Any, loss_of_batch: Callable[[], Any], *, is_autocast: bool
) -> Pairs:
    """Time forward and backward of a model in PyTorch."""
    import torch

    def forward_backward() -> float:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_autocast):
            loss = loss_of_batch()
        loss.backward()
        model.zero_grad(set_to_none=True)
        return float(loss)

    return measure(forward_backward, options.repetitions)


def micro_batch_of_masked_pytorch(
    options: argparse.Namespace, *, bfloat16_weights: bool = False, compiled: bool = False
) -> Pairs:
    """Time the strongest baseline, which scores the masked positions alone."""
    import torch
    from transformers import BertConfig, BertForPreTraining

    torch.set_num_threads(options.cores)
    model = BertForPreTraining(BertConfig(num_hidden_layers=options.layers)).train()
    if bfloat16_weights:
        model = model.to(torch.bfloat16)
    shape = options.examples, options.positions
    ids = torch.randint(1000, 30000, shape)
    mask = torch.ones(shape, dtype=torch.long)
    each = masked_positions(options.positions)
    rows = [
        n * options.positions + torch.randperm(options.positions)[:each] for n in range(shape[0])
    ]
    positions = torch.cat(rows)
    pairs = torch.zeros(options.examples, dtype=torch.long)
    is_autocast = options.precision == "mixed_bfloat16" and not bfloat16_weights

    def loss_of_batch() -> Any:
        output = model.bert(input_ids=ids, attention_mask=mask)
        masked = output.last_hidden_state.flatten(0, 1).index_select(0, positions)
        scores = model.cls.predictions(masked).float()
        next_sentence = model.cls.seq_relationship(output.pooler_output).float()
        entropy = torch.nn.functional.cross_entropy
        return entropy(scores, ids.flatten()[positions]) + entropy(next_sentence, pairs)

    run = torch.compile(loss_of_batch) if compiled else loss_of_batch
    return measure_pytorch(options, model, run, is_autocast=is_autocast)


def weights_of_bert(options: argparse.Namespace) -> list[Any]:
    from bert_cli.facts.bert import BertConfig
    from bert_cli.model.build import build_blocks, named_weights

    blocks = build_blocks(BertConfig(num_hidden_layers=options.layers), seed=1, policy="float32")
    return list(named_weights(blocks).values())


def update_of_keras(options: argparse.Namespace) -> Pairs:
    import keras
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(options.cores)
    weights = weights_of_bert(options)
    gradients = [tf.Variable(tf.fill(weight.shape, 1e-3)) for weight in weights]
    optimizer = keras.optimizers.AdamW(1e-4, global_clipnorm=1.0)
    optimizer.build(weights)

    @tf.function(autograph=False)
    def apply() -> None:
        optimizer.apply([gradient.read_value() for gradient in gradients])

    def update() -> float:
        apply()
        return float(weights[-1].value[0])

    return measure(update, options.repetitions)


def update_of_pytorch(options: argparse.Namespace) -> Pairs:
    """Time clipping and the fused AdamW, the fastest in PyTorch."""
    import torch
    from transformers import BertConfig, BertForPreTraining

    torch.set_num_threads(options.cores)
    weights = list(BertForPreTraining(BertConfig(num_hidden_layers=options.layers)).parameters())
    for weight in weights:
        weight.grad = torch.full_like(weight, 1e-3)
    optimizer = torch.optim.AdamW(weights, lr=1e-4, fused=True)

    def update() -> float:
        norm = torch.nn.utils.clip_grad_norm_(weights, 1.0, foreach=True)
        optimizer.step()
        return float(norm)

    return measure(update, options.repetitions)


def memory_of_an_update(options: argparse.Namespace) -> Pairs:
    """Time one pass over the arrays of AdamW on one thread: read four numbers per weight, write three."""
    import numpy as np

    weights = sum(math.prod(weight.shape) for weight in weights_of_bert(options))
    gradient, *state = (np.ones(weights, np.float32) for _ in range(4))

    def one_pass() -> None:
        np.max(gradient)
        for array in state:
            np.multiply(array, np.float32(0.999), out=array)

    return measure(one_pass, options.repetitions)


Side = Callable[[argparse.Namespace], Pairs]
PYTORCH: dict[str, Callable[..., Pairs]] = {
    "pytorch": micro_batch_of_pytorch,
    "pytorch-masked": micro_batch_of_masked_pytorch,
    "pytorch-masked-bfloat16": partial(micro_batch_of_masked_pytorch, bfloat16_weights=True),
}
SIDES: dict[str, dict[str, Side]] = {
    "micro-batch": {
        "bert": micro_batch_of_bert,
        **PYTORCH,
        **{f"{name}-compiled": partial(side, compiled=True) for name, side in PYTORCH.items()},
    },
    "update": {
        "bert": update_of_bert,
        "keras": update_of_keras,
        "pytorch": update_of_pytorch,
        "lamb": update_by_lamb,
        "memory": memory_of_an_update,
    },
}


BASELINES = [side for sides in SIDES.values() for side in sides if side != "bert"]


def measure_in_a_process(options: argparse.Namespace, side: str) -> Pairs:
    """Return the times of one implementation, measured in a child process."""
    command = [sys.executable, __file__, *sys.argv[1:], "--side", side]
    times: Pairs = in_a_process(command, first_cores(options.cores))
    return times


def main() -> None:
    """Run the implementations alternately and print their medians and ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=SIDES)
    parser.add_argument("--precision", default="mixed_bfloat16", help="Keras dtype policy")
    parser.add_argument("--examples", type=int, default=8, help="micro-batch size")
    parser.add_argument("--positions", type=int, default=128, help="sequence length")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--optimizer", default="AdamW", choices=("AdamW", "LAMB"))
    parser.add_argument("--compile", default="auto", help="setting `compile` of `bert`")
    parser.add_argument(
        "--beside",
        nargs="+",
        choices=BASELINES,
        help="compare with these; default: all for micro-batch, Keras for update",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(SIDES[options.what][options.side](options)))
        return
    defaults = [name for name in SIDES[options.what] if name != "bert"]
    baselines = options.beside or (defaults if options.what == "micro-batch" else defaults[:1])
    for baseline in baselines:
        if baseline not in SIDES[options.what]:
            others = [side for side in SIDES[options.what] if side != "bert"]
            parser.error(f"--beside {baseline}: {options.what} has {', '.join(others)}")
    sides = {side: partial(measure_in_a_process, options, side) for side in ("bert", *baselines)}
    medians = run_alternately(sides, options.rounds, "{:.3f} s, processor {:.3f} s".format)
    clock, processor = medians.pop("bert")
    for side, medians_of_side in medians.items():
        print(
            f"{side} takes {medians_of_side[0] / clock:.2f} times the wall-clock time of bert and "
            f"{medians_of_side[1] / processor:.2f} times its processor time"
        )
    print(f"the fastest beside bert: {min(medians, key=lambda side: medians[side][1])}")


if __name__ == "__main__":
    main()
