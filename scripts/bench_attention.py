#!/usr/bin/env python3
"""Time and memory of a global and two local layers of ModernBERT, forward and backward, on one core.

    scripts/bench_attention.py --positions 512 1024 2048 8192 [--width 256] [--precision mixed_bfloat16]

`bert` are the layers of this project; `dense` the same with the scores of all positions in every layer; `pytorch`
Hugging Face's layers with scaled_dot_product_attention. Each runs in a process of its own, which prints the median
processor time and the growth of its largest memory since the model was built.
"""

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from turns import first_cores, in_a_process

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"


def measure(function: Callable[[], Any]) -> tuple[float, float]:
    """Return processor seconds and the growth of memory in MB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(4):
        began = time.process_time()
        function()
        seconds.append(time.process_time() - began)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return median(seconds[1:]), grown * 1024 / 1e6


def sizes(width: int) -> dict[str, Any]:
    """Return the sizes of three layers, with Ettin's proportions."""
    heads = {"num_hidden_layers": 3, "num_attention_heads": width // 64}
    return {"hidden_size": width, "intermediate_size": 3 * width // 2, "vocab_size": 1024, **heads}


def ours(options: argparse.Namespace, positions: int) -> tuple[float, float]:
    import tensorflow as tf

    from bert_cli.config.modernbert import ModernBertConfig
    from bert_cli.model import modernbert
    from bert_cli.model.bert import build_blocks, named_weights

    if options.side == "dense":
        modernbert.MIN_BLOCKS = modernbert.MAX_SCORED = sys.maxsize
    config = ModernBertConfig(**sizes(options.width), hidden_dropout_prob=0.0)
    blocks = build_blocks(config, seed=0, policy=options.precision, last_blocks=())
    weights = [weight.value for weight in named_weights(blocks).values()]
    ones = tf.ones((1, positions), tf.int32)

    @tf.function(autograph=False)
    def gradients() -> Any:
        hidden: Any = None
        with tf.GradientTape() as tape:
            for _, block in blocks:
                hidden = block(hidden, {"input_ids": ones, "input_mask": ones}, None)
            loss = tf.reduce_sum(tf.cast(hidden, tf.float32) ** 2)
        return [tf.reduce_sum(tf.convert_to_tensor(g)) for g in tape.gradient(loss, weights)]

    return measure(lambda: [value.numpy() for value in gradients()])


def pytorch(options: argparse.Namespace, positions: int) -> tuple[float, float]:
    import torch
    from transformers import ModernBertConfig, ModernBertModel

    torch.set_num_threads(1)
    tokens: dict[str, Any] = dict.fromkeys(("pad_token_id", "bos_token_id", "cls_token_id"), 0)
    attention: dict[str, Any] = {"attn_implementation": "sdpa"}
    config = ModernBertConfig(
        **sizes(options.width), **tokens, **attention, eos_token_id=1, sep_token_id=1
    )
    model = ModernBertModel(config).train()
    ones = torch.ones((1, positions), dtype=torch.long)
    is_autocast = options.precision == "mixed_bfloat16"

    def gradients() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_autocast):
            hidden = model(input_ids=ones, attention_mask=ones).last_hidden_state
        (hidden.float() ** 2).sum().backward()
        model.zero_grad(set_to_none=True)

    return measure(gradients)


SIDES = {"bert": ours, "dense": ours, "pytorch": pytorch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--positions", type=int, nargs="+", default=[512, 1024, 2048, 8192])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(SIDES[options.side](options, options.positions[0])))
        return
    for positions in options.positions:
        for side in options.sides:
            command = [sys.executable, __file__, *sys.argv[1:], "--positions", str(positions)]
            seconds, megabytes = in_a_process([*command, "--side", side], first_cores(1))
            print(f"{positions:,} {side}: {seconds:.3f} s, {megabytes:,.0f} MB", flush=True)


if __name__ == "__main__":
    main()
