#!/usr/bin/env python3
"""Compare small models of vectors trained on neighbouring sentences, or on a teacher's vectors of the same sentences.

    scripts/bench_vector_students.py MODEL SENTENCES GLUE SQUAD OUT [--seeds 0 1 2]

MODEL (6 layers of 384) is the teacher; SENTENCES is a folder of `bert preprocess`. Students are three of the teacher's
layers and 2 layers of 128 with random weights. They learn from 5,000 pairs of neighbouring sentences: each finds its
neighbour, or its vector becomes the teacher's, or each finds its neighbour for the processor time of the second arm,
by the time of an epoch, which a run of one epoch gives.
Scores: the rank correlation of cosines with "is a paraphrase" on MRPC's development set, and nDCG@10 of 2,000
questions of SQuAD's development set among its paragraphs. The same command continues.
"""

import argparse
import csv
import json
import random
from pathlib import Path

from bench_distillation import EPOCHS, RATES, SMALL, bert

PAIRS = 5000
QUESTIONS = 2000


def write_pairs(sentences: Path, out: Path) -> None:
    """Write pairs of neighbouring sentences of 40 to 300 characters, spread over all documents."""
    pairs = []
    for file in sorted(sentences.glob("*/*.txt")):
        lines = file.read_text(encoding="utf-8").splitlines()
        for one, two in zip(lines[::2], lines[1::2], strict=False):
            if all(40 <= len(text) <= 300 for text in (one, two)):
                pairs.append({"anchor": one, "positive": two})
    random.Random(1).shuffle(pairs)
    rows = (json.dumps(pair) + "\n" for pair in pairs[:PAIRS])
    (out / "pairs.jsonl").write_text("".join(rows), encoding="utf-8")


def write_paraphrases(glue: Path, out: Path) -> None:
    """Write MRPC's development set as pairs with a score."""
    with (glue / "MRPC" / "dev.tsv").open(encoding="utf-8-sig") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]
    texts = [{"sentence1": row[3], "sentence2": row[4], "score": row[0]} for row in rows]
    (out / "sts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts), "utf-8")


def write_questions(squad: Path, out: Path) -> Path:
    """Write questions and paragraphs in the format of BEIR, and return the file of judgements."""
    articles = json.loads(squad.read_text(encoding="utf-8"))["data"]
    paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
    corpus = []
    asked = []
    for number, paragraph in enumerate(paragraphs):
        corpus.append({"_id": f"p{number}", "title": "", "text": paragraph["context"]})
        asked += [(question["id"], question["question"], number) for question in paragraph["qas"]]
    chosen = random.Random(1).sample(asked, QUESTIONS)
    folder = out / "questions"
    judgements = folder / "qrels" / "test.tsv"
    judgements.parent.mkdir(parents=True, exist_ok=True)
    queries = [{"_id": name, "text": text} for name, text, _ in chosen]
    for name, rows in (("corpus", corpus), ("queries", queries)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    lines = "".join(f"{name}\tp{number}\t1\n" for name, _, number in chosen)
    judgements.write_text("query-id\tcorpus-id\tscore\n" + lines, encoding="utf-8")
    return judgements


class Bench:
    """Runs, each made once."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.model, self.out = args.model, args.out
        self.epoch_seconds: dict[str, float] = {}
        self.scored: list[object] = ["--validation-file", self.out / "sts.jsonl"]
        self.scored += ["--retrieval-file", write_questions(args.squad, args.out)]
        self.scored += ["--precision", "mixed_bfloat16", "--max-seq-length", 128]

    def run(self, name: str, *words: object) -> list[float]:
        """Return both scores of a run and the processor seconds of its training."""
        folder = self.out / name.replace(" ", "")
        result = folder.with_suffix(".json")
        if not result.exists():
            train = ["--train-file", self.out / "pairs.jsonl", "--text-column", "anchor"]
            train += ["--text-column", "positive", "--precision", "mixed_bfloat16"]
            train += ["--max-seq-length", 128, "--cache-dir", folder / "cache"]
            train += ["--save-ckpt-path", folder, "--no-do-validation"]
            seconds = bert("embed", *train, *words)
            result.write_text(json.dumps([*self.scores(folder), seconds]), encoding="utf-8")
        return json.loads(result.read_text(encoding="utf-8"))

    def scores(self, model: Path) -> list[float]:
        """Return Spearman's correlation and nDCG@10 of a model."""
        folder = self.out / f"{model.name}_scores"
        words = ["--pretrained-ckpt-path", model, "--save-ckpt-path", folder, "--no-do-training"]
        bert("embed", *words, *self.scored)
        scores = json.loads((folder / "scores.json").read_text(encoding="utf-8"))
        return [scores["spearman"], scores["ndcg_10"]]

    def arms(self, student: str, seed: int) -> None:
        """Run all arms of a student with a seed, and print a line for each."""
        start: list[object] = ["--pretrained-ckpt-path", self.out / "shrunk"]
        if student == "2 x 128":
            start = ["--tokenizer-path", self.model]
            start += [word for n, v in SMALL.items() for word in (f"--bert-config.{n}", v)]
        start += ["--seed", seed, "--optimizer-opts.learning-rate.max-learning-rate"]
        start += [RATES[student]]

        def arm(name: str, epochs: float, *words: object) -> float:
            spearman, found, seconds = self.run(
                f"{student}_{name}_{seed}", "--num-epochs", epochs, *start, *words
            )
            print(f"| {student} | {seed} | {name} | {epochs:.1f} | {seconds:.0f} s ", end="")
            print(f"| {spearman:.3f} | {found:.3f} |", flush=True)
            return seconds

        alone = arm("neighbours", EPOCHS)
        taught = arm("teacher", EPOCHS, "--distillation.teacher", self.model)
        if student not in self.epoch_seconds:
            shorter = arm("neighbours once", 1)
            self.epoch_seconds[student] = (alone - shorter) / (EPOCHS - 1)
        longer = (taught - alone) / self.epoch_seconds[student]
        arm("neighbours for the time of the teacher", max(EPOCHS, round(EPOCHS + longer, 1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("model", "sentences", "glue", "squad", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--students", nargs="+", default=list(RATES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    args.out.mkdir(exist_ok=True)
    write_pairs(args.sentences, args.out)
    write_paraphrases(args.glue, args.out)
    bench = Bench(args)
    if not (args.out / "shrunk").exists():
        bert("shrink", args.model, args.out / "shrunk", *("--layers", "0,2,4"))
    for name, model in (("teacher", args.model), ("3 layers as cut", args.out / "shrunk")):
        print(f"| {name} | {bench.scores(model)} |", flush=True)
    for seed in args.seeds:
        for student in args.students:
            bench.arms(student, seed)


if __name__ == "__main__":
    main()
