"""Small models with random weights on disk, and small tasks for them, for the tests of the tasks."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert_cli.cli import main
from bert_cli.data.tokens.tokenizer import Normalization, write_vocabulary
from bert_cli.facts.bert import BertConfig

SENTIMENT = {"negative": ["bad", "awful"], "positive": ["good", "fine"]}
OTHERS = ["film", "plot", "actor", "music", "was", "is", "the", "a", "not", "very", "it", "and"]
WORDS = ["good", "bad", "fine", "awful", *OTHERS, "who", "what", "where"]
LETTERS = "bcdefghijklmnopqrstuvwxyz0123456789.,?"  # "a" is one of the words
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *LETTERS]
PIECES += [f"##{letter}" for letter in "a" + LETTERS]

TINY = BertConfig(
    vocab_size=len(PIECES),
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=64,
    # Much for training, but random features of words that a head can use within a few steps.
    initializer_range=0.2,
)

TINY_RUN = {
    "generated-dataset": None,
    "max-seq-length": 16,
    "max-predictions-per-seq": 3,
    "bert-config.vocab-size": 60,
    "bert-config.hidden-size": 16,
    "bert-config.num-hidden-layers": 1,
    "bert-config.num-attention-heads": 2,
    "bert-config.intermediate-size": 32,
    "bert-config.max-position-embeddings": 32,
    "global-batch.micro-batch-size": 2,
    "optimizer-opts.name": "LAMB",
    "optimizer-opts.learning-rate.max-learning-rate": 0.01,
    "keep-checkpoints": 100,
}
"""Flags of a pre-training run of seconds; see `flags_of`."""


RUN_OF_RECORDS = {
    "max-seq-length": 32,
    "max-predictions-per-seq": 5,
    "global-batch.micro-batch-size": 4,
    "optimizer-opts.name": "AdamW",
    "optimizer-opts.learning-rate.max-learning-rate": 0.003,
    "total-num-train-samples": 8,
    "checkpoint-every-steps": 1,
    "keep-checkpoints": 99,
}
"""Flags of a run of seconds that starts from `write_model` and reads `write_records`."""
SENTENCES = ["The good plot was not very fine.", "Bad music is very bad, and it is not fine."] * 20


def flags_of(flags: dict[str, object], **changes: object) -> list[str]:
    """Return flags as words: None is a switch, and False leaves one out; `a__b_c` changes `--a.b-c`."""
    changed = {name.replace("__", ".").replace("_", "-"): value for name, value in changes.items()}
    words = []
    for name, value in {**flags, **changed}.items():
        if value is not False:
            words += [f"--{name}"] if value is None else [f"--{name}", str(value)]
    return words


def pretrain_words(
    home: Path, run: str | Path = "run", *words: object, **changes: object
) -> list[str]:
    """Return the command line of a run from `home/model` on `home/records`, with changed flags."""
    folders = {"dataset-dir": "records", "pretrained-ckpt-path": "model", "save-ckpt-path": run}
    flags = {name: home / folder for name, folder in folders.items()} | RUN_OF_RECORDS
    return ["pretrain", *flags_of(flags, **changes), *map(str, words)]


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def write_model(folder: Path, config: BertConfig = TINY, seed: int = 3, blocks: Any = None) -> Path:
    """Write a pre-training checkpoint of new weights, or of `blocks`, which transformers can open."""
    from bert_cli.model.build import build_blocks, named_weights
    from bert_cli.model.names.hf import class_files, hf_config, to_hf
    from bert_cli.train.checkpoint import MODEL, write_tensors

    folder.mkdir(parents=True)
    weights = named_weights(blocks or build_blocks(config, seed=seed, policy="float32"))
    tensors = to_hf({name: weight.numpy() for name, weight in weights.items()}, config)
    for name, content in class_files(config).items():
        (folder / name).write_bytes(content)
    write_tensors(folder / MODEL, tensors)
    (folder / "config.json").write_text(json.dumps(hf_config(config)))
    write_vocabulary(folder, "".join(f"{piece}\n" for piece in PIECES).encode(), Normalization())
    return folder


def write_records(
    folder: Path, sentences: Sequence[str], vocab: Path, length: int = 32, masking: str = "dynamic"
) -> Path:
    """Write five equal documents into FOLDER_text, and records of them with 5 masked positions."""
    text = folder.with_name(f"{folder.name}_text") / "a.txt"
    text.parent.mkdir(exist_ok=True)
    text.write_text("\n".join([*sentences, ""] * 5), encoding="utf-8")
    words = ["tokenize", text.parent, folder, "--vocab", vocab, "--masking", masking]
    words += ["--sequence-length", length, "--mask-tokens", 5, "--processes", 1]
    assert main([*map(str, words)]) == 0
    return folder


def write_reviews(path: Path, rows: int, seed: int = 0) -> Path:
    """Write a CSV of synthetic reviews: "good" and "fine" are positive, "bad" and "awful" negative."""
    draw = np.random.default_rng(seed)
    lines = ["text,label,id"]
    for number in range(rows):
        label = draw.choice(list(SENTIMENT))
        words = draw.choice(OTHERS, int(draw.integers(2, 40)))
        # A third of the words: enough of them for a small model to learn in seconds.
        words[::3] = draw.choice(SENTIMENT[label], len(words[::3]))
        lines.append(f"{' '.join(draw.permutation(words))},{label},r{number}")
    path.write_text("\n".join(lines) + "\n")
    return path


def write_base(folder: Path, **rows: int) -> Path:
    """Write a model of one layer, and for each name a CSV of so many reviews; return the folder."""
    write_model(folder / "model", TINY.model_copy(update={"num_hidden_layers": 1}))
    for seed, (name, number) in enumerate(rows.items()):
        write_reviews(folder / f"{name}.csv", number, seed)
    return folder


def write_questions(path: Path, articles: int, seed: int, impossible: bool = False) -> Path:
    """Write paragraphs of a few words; the answer to the question "who" is "good" or "fine"."""
    draw = np.random.default_rng(seed)
    paragraphs = []
    for number in range(articles):
        words = list(draw.choice(OTHERS, 18))
        none = impossible and number % 3 == 0
        answer, at = str(draw.choice(["good", "fine"])), int(draw.integers(2, 16))
        words[at] = words[at] if none else answer
        found = {"text": answer, "answer_start": len(" ".join(words[:at])) + 1}
        question = {"id": f"{seed}-{number}", "question": "who was it?", "is_impossible": none}
        question["answers"] = [] if none else [found]
        paragraphs.append({"context": " ".join(words), "qas": [question]})
    path.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    return path
