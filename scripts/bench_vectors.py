#!/usr/bin/env python3
"""Compare `bert embed` and `bert predict` with sentence-transformers and pipelines of transformers, on one core.

    scripts/bench_vectors.py train MODEL GLUE --precision mixed_bfloat16 --micro-batches 4
    scripts/bench_vectors.py embed MODEL GLUE --texts 2000
    scripts/bench_vectors.py fill-mask MODEL GLUE      # or text-classification

`train` measures a step of pairs of MRPC without the first steps: MultipleNegativesRankingLoss with one micro-batch,
CachedMultipleNegativesRankingLoss with several, in PyTorch under autocast. The other tasks measure all texts,
sentences and paragraphs of MRPC, without loading the MODEL, which has the head of the task: `encode`, or a pipeline
that gets them sorted by length, in PyTorch with weights of the same precision.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from turns import Pairs, first_cores, in_a_process, run_alternately

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "TOKENIZERS_PARALLELISM": "false"}
os.environ |= {"CUDA_VISIBLE_DEVICES": "-1", "KERAS_BACKEND": "tensorflow"}
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")  # as `bert` does
LENGTH = 64
"""Maximum length of a text in training, in tokens."""


def pairs_of(glue: Path) -> list[list[str]]:
    """Return the paraphrases of MRPC, shuffled."""
    lines = (glue / "MRPC/train.tsv").read_text("utf-8-sig").splitlines()[1:]
    pairs = [line.split("\t")[3:5] for line in lines if line.startswith("1")]
    random.Random(1).shuffle(pairs)
    return pairs


def texts_of(options: argparse.Namespace) -> list[str]:
    """Return texts of one to six sentences; for fill-mask with a [MASK]."""
    draw = random.Random(1)
    sentences = [pair[0] for pair in pairs_of(options.glue)]
    texts = [
        " ".join(draw.choices(sentences, k=draw.choice((1, 1, 1, 2, 3, 6))))
        for _ in range(options.texts)
    ]
    return [f"[MASK] {text}" for text in texts] if options.task == "fill-mask" else texts


class Clock:
    """Wall-clock and processor time since the last call."""

    def __init__(self) -> None:
        self.lap()

    def lap(self) -> tuple[float, float]:
        """Return both times, and start again."""
        before = getattr(self, "now", (0.0, 0.0))
        self.now = time.perf_counter(), time.process_time()
        return self.now[0] - before[0], self.now[1] - before[1]


def train_ours(options: argparse.Namespace) -> Pairs:
    from bert_cli.config.embed import EmbedSettings
    from bert_cli.tasks.finetune import embed
    from bert_cli.tasks.run import finetune, train
    from bert_cli.tasks.run.job import Draft

    file = Path(f"/tmp/pairs.{os.getpid()}.tsv")
    rows = ["anchor\tpositive", *map("\t".join, pairs_of(options.glue))]
    file.write_text("\n".join(rows) + "\n")
    settings = EmbedSettings.model_validate(
        {
            "pretrained_ckpt_path": str(options.model),
            "train_file": file,
            "max_seq_length": LENGTH,
            "precision": options.precision,
            "do_validation": False,
            "dry_run": True,
            "cache_dir": None,
            "global_batch": {
                "micro_batch_size": options.pairs // options.micro_batches,
                "grad_acc_steps_per_replica": options.micro_batches,
            },
            "optimizer_opts": {
                "name": "AdamW",
                "max_gradient_norm": 1.0,
                "learning_rate": {"max_learning_rate": 2e-5},
            },
        }
    )
    times: Pairs = []

    def timer(*_: Any) -> Callable[[Any], None]:
        clock = Clock()
        return lambda info: times.append(clock.lap())

    with ExitStack() as stack, redirect_stdout(sys.stderr):
        draft = Draft(settings, stack)
        draft.take(embed.STEPS)
        train.run_training(finetune.resolve(draft), stack, timer, options.steps + 1)
    file.unlink()
    return times[1:]


def sentence_transformer(options: argparse.Namespace, length: int) -> Any:
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer

    torch.set_num_threads(1)
    encoder = Transformer(str(options.model), max_seq_length=length)
    pooling = Pooling(encoder.get_word_embedding_dimension(), "mean")
    return SentenceTransformer(modules=[encoder, pooling], device="cpu")


def train_theirs(options: argparse.Namespace) -> Pairs:
    import torch
    from sentence_transformers.losses import (
        CachedMultipleNegativesRankingLoss,
        MultipleNegativesRankingLoss,
    )

    model = sentence_transformer(options, LENGTH)
    loss: Any = MultipleNegativesRankingLoss(model)
    if options.micro_batches > 1:
        size = options.pairs // options.micro_batches
        loss = CachedMultipleNegativesRankingLoss(model, mini_batch_size=size)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=2e-5)
    pairs = pairs_of(options.glue)
    times: Pairs = []
    clock = Clock()
    for step in range(options.steps + 1):
        batch = pairs[step * options.pairs :][: options.pairs]
        features = [model.tokenize([pair[side] for pair in batch]) for side in (0, 1)]
        enabled = options.precision == "mixed_bfloat16"
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            value = loss(features, None)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(clock.lap())
    return times[1:]


def predict_ours(options: argparse.Namespace) -> Pairs:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    from bert_cli.config.use import PredictSettings
    from bert_cli.data.tokens.tokenizer import read_tokenizer
    from bert_cli.tasks.model.models import find_source
    from bert_cli.tasks.model.opened import Input, OpenedModel, open_model
    from bert_cli.tasks.model.predictions import predictors
    from bert_cli.tasks.model.runtimes import open_numpy

    source = find_source(str(options.model))
    settings = PredictSettings(model=str(options.model), precision=options.precision)
    model: OpenedModel | None = open_numpy(source, options.task) if options.numpy else None
    model = model or open_model(source, options.task, options.precision, uses_library=True)
    predictor = predictors()[options.task](model, read_tokenizer(source.folder), settings, 256)
    inputs = [Input(f"line {n}", {"text": text}) for n, text in enumerate(texts_of(options))]
    return timed(lambda items: list(map(json.dumps, predictor.answer(items))), inputs, options)


def predict_theirs(options: argparse.Namespace) -> Pairs:
    import torch

    dtype = torch.bfloat16 if options.precision == "mixed_bfloat16" else torch.float32
    texts = texts_of(options)
    if options.task == "embed":
        encode = sentence_transformer(options, 256).to(dtype).encode
        return timed(partial(encode, batch_size=32, show_progress_bar=False), texts, options)
    from transformers import pipeline

    torch.set_num_threads(1)
    run = pipeline(options.task, str(options.model), dtype=dtype, device="cpu", batch_size=32)
    answer = (
        partial(run, truncation=True, max_length=256)
        if options.task == "text-classification"
        else run
    )
    return timed(lambda texts: list(answer(sorted(texts, key=len))), texts, options)


def timed(answer: Callable[[Any], Any], texts: list[Any], options: argparse.Namespace) -> Pairs:
    """Return the times of answering all texts, after a first batch."""
    answer(texts[:32])
    times = []
    for _ in range(options.repetitions):
        clock = Clock()
        answer(texts)
        times.append(clock.lap())
    return times


def main() -> None:
    """Run both sides alternately and print their medians and the ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("task", choices=("train", "embed", "fill-mask", "text-classification"))
    parser.add_argument("model", type=Path)
    parser.add_argument("glue", type=Path)
    parser.add_argument("--precision", default="float32", choices=("float32", "mixed_bfloat16"))
    parser.add_argument("--pairs", type=int, default=128, help="pairs of a step")
    parser.add_argument("--micro-batches", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--steps", type=int, default=5, help="measured steps")
    parser.add_argument("--numpy", action="store_true", help="ours without TensorFlow")
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--side", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        kind = "train" if options.task == "train" else "predict"
        print(json.dumps(globals()[f"{kind}_{options.side}"](options)))
        return
    command = [sys.executable, __file__, *sys.argv[1:], "--side"]
    cores = first_cores(1)
    sides = {side: partial(in_a_process, [*command, side], cores) for side in ("ours", "theirs")}
    medians = run_alternately(sides, options.rounds, "{:.3f} s, processor {:.3f} s".format)
    ratios = [b / a for a, b in zip(medians["ours"], medians["theirs"], strict=True)]
    print(
        f"theirs takes {ratios[0]:.2f} times our wall-clock time, {ratios[1]:.2f} our processor time"
    )


if __name__ == "__main__":
    main()
