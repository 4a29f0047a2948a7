#!/usr/bin/env python
"""Controls of `bert verdict`: runs whose verdict is known, with several seeds.

A tiny model of generated sentences, of which it has learned the words and some of what belongs together, continues on
more of them. With their words in any order it must become worse (REGRESSION), with the sentences as they are better
(WIN), and with a learning rate of zero not different (NO DIFFERENCE, and a gain of exactly zero). All are judged on
sentences as they are. A seed decides all documents, the order of the words, and that of the examples.

    .venv/bin/python scripts/verdict_controls.py --seeds 20
"""

import argparse
import io
import json
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from bert_cli.cli import main
from bert_cli.tasks.init import verdict as judging
from bert_cli.tasks.init.text import divide
from bert_cli.tasks.run import build

EXPECTED = {"shuffled": "REGRESSION", "real": "WIN", "still": "NO DIFFERENCE"}
STEPS = {"start": 600, "shuffled": 100, "real": 100, "still": 2}
RATE = 3e-3
LENGTH, MASKS = 64, 10
LINES = 40  # of a document
RUN = {
    "max_seq_length": LENGTH,
    "max_predictions_per_seq": MASKS,
    "global_batch": {"micro_batch_size": 32},
    "log_every_steps": 100,
}
SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 256,
    "max_position_embeddings": LENGTH,
}
KINDS = (
    "cat milk kitchen white",
    "dog bone garden brown",
    "horse grass meadow black",
    "bee honey forest yellow",
    "mouse cheese cellar grey",
    "bear fish river huge",
    "owl mice barn old",
    "goat leaves hill small",
    "pig apples farm pink",
    "fox hens village red",
    "duck bread lake green",
    "wolf meat mountain wild",
)
"""What belongs together: an animal, its food, its place and its look."""
SENTENCES = (
    "The {0} eats {1} in the {2}.",
    "Every {3} {0} that lives in the {2} wants more {1}.",
    "When a {0} comes to the {2}, the {1} is gone.",
    "People give {1} to the {3} {0} because the {2} is cold.",
)
Documents = Sequence[list[str]]


def generated(number: int, seed: int) -> list[list[str]]:
    """Return so many documents, each of LINES lines of a sentence."""
    draw = random.Random(seed)
    lines = (
        draw.choice(SENTENCES).format(*draw.choice(KINDS).split()) for _ in range(LINES * number)
    )
    return [[next(lines) for _ in range(LINES)] for _ in range(number)]


def bert(*words: object) -> str:
    """Run a command without its output; return what it printed. Raises SystemExit if it fails."""
    with redirect_stdout(io.StringIO()) as printed:
        code = main([*map(str, words)])
    if code:
        raise SystemExit(f"{printed.getvalue()}\nbert {words[0]}: exit code {code}")
    return printed.getvalue()


def shuffled(documents: Documents, seed: int) -> list[list[str]]:
    """Return documents, each with its words in any order, in sentences of twelve."""
    draw = random.Random(seed)
    mixed = []
    for lines in documents:
        words = " ".join(lines).split()
        draw.shuffle(words)
        mixed.append([" ".join(words[n : n + 12]) + "." for n in range(0, len(words), 12)])
    return mixed


def train(folder: Path, kind: str, vocabulary: Path, start: Path | None, seed: int) -> None:
    """Make records of FOLDER/text/train.jsonl and pre-train FOLDER/run."""
    text = folder / "text/train.jsonl"
    bert("preprocess", text, folder / "sentences", "--language", "en", "--processes", 1)
    if start is None:
        bert("vocab", folder / "sentences", vocabulary, "--size", 300)
    sizes = ("--sequence-length", LENGTH, "--mask-tokens", MASKS, "--processes", 1)
    how = ("--vocab", vocabulary, "--masking", "dynamic", "--no-nsp", *sizes)
    bert("tokenize", folder / "sentences", folder / "records", *how)
    rate = {"schedule_name": "up_down", "max_learning_rate": RATE, "warmup_frac": 0.1}
    model = {"bert_config": SHAPE} if start is None else {"pretrained_ckpt_path": str(start)}
    config = {
        **RUN,
        **model,
        "seed": seed,
        "dataset_dir": str(folder / "records"),
        "save_ckpt_path": str(folder / "run"),
        "total_num_train_samples": 32 * STEPS[kind],
        "optimizer_opts": {"name": "AdamW", "max_gradient_norm": 1.0, "learning_rate": rate},
    }
    (folder / "pretrain.json").write_text(json.dumps(config), encoding="utf-8")
    bert("pretrain", "--config", folder / "pretrain.json")


def make_start(folder: Path) -> Path:
    """Train the start; return its folder, beside which its vocabulary is."""
    divide(folder, generated(60, -1), 0, lambda line: [line], has_pairs=False)
    train(folder, "start", folder / "vocab", None, seed=0)
    return folder / "run"


def verdict(folder: Path, kind: str, start: Path, seed: int) -> tuple[str, float]:
    """Train one control in a new folder; return its verdict and the gain."""
    documents = generated(60, seed)
    divide(folder, documents, len(documents), lambda line: [line], has_pairs=False)
    if kind == "shuffled":
        path = folder / "text/train.jsonl"
        rows = [json.loads(line)["text"].split("\n") for line in path.read_text().splitlines()]
        lines = (json.dumps({"text": "\n".join(row)}) for row in shuffled(rows, seed))
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    vocabulary = start.parent / "vocab"
    if kind == "still":
        with mock.patch.object(build, "learning_rate", lambda *_, **__: lambda step: 0.0):
            train(folder, kind, vocabulary, start, seed)
    else:
        train(folder, kind, vocabulary, start, seed)
    with mock.patch.object(judging, "EXAMPLES", 100):  # the test has no more
        last = bert("verdict", folder).splitlines()[-1]
    found = re.match(r"(WIN|NO DIFFERENCE|REGRESSION): gain ([+-]?[\d.]+)", last)
    assert found, last
    print(f"seed {seed} {kind}: {last}", flush=True)
    return found[1], float(found[2])


def controls(
    seeds: Sequence[int], kinds: Sequence[str] = tuple(EXPECTED)
) -> dict[str, Counter[str]]:
    """Return how often each control has each verdict."""
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    with TemporaryDirectory() as folder:
        start = make_start(Path(folder) / "start")
        for seed in seeds:
            for kind in kinds:
                found, gain = verdict(Path(folder) / f"{kind}_{seed}", kind, start, seed)
                counts[kind][found] += 1
                if kind == "still" and gain:
                    raise SystemExit(f"seed {seed}: a learning rate of zero changed the score")
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=20)
    number = parser.parse_args().seeds
    found = controls(range(number))
    for kind, expected in EXPECTED.items():
        print(f"{kind}: {found[kind][expected]} of {number} {expected}; {dict(found[kind])}")
    sys.exit(any(found[kind][name] < 0.95 * number for kind, name in EXPECTED.items()))
