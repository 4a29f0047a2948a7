"""Models, files and command lines of `bert embed`, and the judge of its vectors."""

import json
import shutil
from pathlib import Path

import numpy as np
from support.tiny_models import OTHERS, PIECES, TINY, write_model

from bert_cli.arrays import Floats32
from bert_cli.data.finetune import embeddings
from bert_cli.data.search.late import Vectors
from bert_cli.data.tokens.tokenizer import Normalization, write_vocabulary

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
FLAGS = ["--max-seq-length", "32", "--optimizer-opts.learning-rate.max-learning-rate", "0.001"]


def write_home(home: Path) -> Path:
    """Write two models, pairs with a hard negative, texts, pairs with scores, and a folder for retrieval."""
    write_model(home / "model")
    write_model(home / "plain", TINY.model_copy(update=NO_DROPOUT))
    draw = np.random.default_rng(5)

    def text(word=None):
        words = list(draw.choice(OTHERS, int(draw.integers(3, 12))))
        return " ".join([*words, *([word] * 3 if word else [])])

    words = [f"{a}{b}" for a in "bcdfghjk" for b in "lmnpqrst"]
    rows = ["anchor\tpositive\tnegative"]
    rows += [f"{text(word)}\t{text(word)}\t{text()}" for word in words]
    (home / "pairs.tsv").write_text("\n".join(rows) + "\n")
    (home / "texts.txt").write_text("\n".join(text() for _ in range(40)) + "\n")
    judged = ["sentence1,sentence2,score"]
    judged += [f"{text(a)},{text(b)},{float(a == b)}" for a in words[:6] for b in words[:6]]
    (home / "sts.csv").write_text("\n".join(judged) + "\n")
    documents = [{"_id": f"d{n}", "title": w, "text": text(w)} for n, w in enumerate(words)]
    queries = [{"_id": f"q{n}", "text": text(w)} for n, w in enumerate(words[:9])]
    for name, objects in (("corpus", documents), ("queries", queries)):
        lines = "".join(f"{json.dumps(one)}\n" for one in objects)
        (home / f"{name}.jsonl").write_text(lines)
    (home / "qrels").mkdir()
    judgements = [f"q{n}\td{n}\t1" for n in range(9)]
    (home / "qrels" / "dev.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *judgements]))
    return home


def arguments(home, run, *more, micro_batch=8, accumulation=2):
    """Return the command line of a run in a folder below `home`."""
    words = ["embed", "--pretrained-ckpt-path", home / "model", "--save-ckpt-path", home / run]
    words += ["--global-batch.micro-batch-size", micro_batch]
    words += ["--global-batch.grad-acc-steps-per-replica", accumulation, "--cache-dir", "null"]
    return [*map(str, words), *FLAGS, *more]


def pairs(home, run, *more, **sizes):
    return arguments(home, run, "--train-file", str(home / "pairs.tsv"), *more, **sizes)


def write_pooling(
    folder: Path, pooling: str, size: int = TINY.hidden_size, longest: int = 32
) -> Path:
    """Write the files of sentence-transformers beside a model."""
    for name, content in embeddings.embedding_files(pooling, size, longest).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def vectors_of(values: Floats32) -> Vectors:
    """Return vectors of texts that are those of their only tokens."""
    return Vectors(values, [row[None] for row in values])


def opened(home, name, pooling):
    """Return the model without dropout in sentence-transformers."""
    from sentence_transformers import SentenceTransformer

    if not (home / name).exists():
        write_pooling(shutil.copytree(home / "plain", home / name), pooling)
    return SentenceTransformer(str(home / name), device="cpu")


def write_teachers(home: Path) -> Path:
    """Write models of vectors of the student's size and of more values, with another vocabulary; return the folder."""
    for name, size in (("equal", TINY.hidden_size), ("wide", 48)):
        if not (home / name).exists():
            folder = write_model(home / name, TINY.model_copy(update={"hidden_size": size}), seed=9)
            reordered = [*PIECES[:5], *reversed(PIECES[5:])]
            data = "".join(f"{piece}\n" for piece in reordered).encode()
            write_vocabulary(folder, data, Normalization())
            write_pooling(folder, "mean", size, 8)
    return home
