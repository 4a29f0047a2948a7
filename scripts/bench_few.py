#!/usr/bin/env python3
"""Compare ways to learn labels from a few rows: accuracy, and processor seconds.

    scripts/bench_few.py run MODEL GLUE SQUAD OUT --setfit /tmp/setfit/bin/python --rows 16 8 64 --draws 10
    scripts/bench_few.py report OUT
    scripts/bench_few.py suggest MODEL GLUE SQUAD

`run` appends a line to OUT for each task, number of rows of a label, draw and side, and skips the lines that are there.
MODEL is a folder of sentence-transformers, GLUE has SST-2, MRPC, CoLA and RTE, SQUAD is a file of questions. Topics are
the ten articles of SQUAD with the most questions: whose article does the question ask about? Their test questions are
of other paragraphs. All sides learn the same rows, cut to 64 tokens, and label the same test rows. `report` prints the
means over the draws with their 95 % intervals (t), and the differences from a side, paired by draw. `suggest` compares
ways to choose the rows that are labelled next. The seconds of a side are processor time from opening the model until it
is learned, without imports and without the test rows; what a draw builds and traces, later draws of the run use again.
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ |= {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
os.environ |= {"CUDA_VISIBLE_DEVICES": "-1", "KERAS_BACKEND": "tensorflow"}
LENGTH = 64
TEST_ROWS = 400
TOPICS = 10
Row = tuple[str, ...]


class Rows(NamedTuple):
    """Texts, or pairs of texts, and their labels from 0."""

    texts: list[Row]
    labels: list[int]

    def take(self, numbers: Sequence[int]) -> "Rows":
        """Return the rows with these numbers."""
        return Rows([self.texts[n] for n in numbers], [self.labels[n] for n in numbers])


# --- the tasks


def table(path: Path, texts: Sequence[int], label: int, names: Sequence[str], skip: int) -> Rows:
    lines = path.read_text("utf-8-sig").rstrip("\n").split("\n")[skip:]
    cells = [line.split("\t") for line in lines]
    return Rows(
        [tuple(row[n] for n in texts) for row in cells], [names.index(row[label]) for row in cells]
    )


def topics(path: Path) -> tuple[Rows, Rows]:
    articles = json.loads(path.read_text("utf-8"))["data"]
    sizes = {a["title"]: sum(len(p["qas"]) for p in a["paragraphs"]) for a in articles}
    titles = sorted(sizes, key=lambda title: (-sizes[title], title))[:TOPICS]
    sides = Rows([], []), Rows([], [])
    for article in articles:
        if article["title"] in titles:
            for number, paragraph in enumerate(article["paragraphs"]):
                for question in paragraph["qas"]:
                    side = sides[number % 3 == 0]
                    side.texts.append((question["question"],))
                    side.labels.append(titles.index(article["title"]))
    return sides


def read_task(name: str, glue: Path, squad: Path) -> tuple[Rows, Rows]:
    """Return the rows to draw from, and the test rows."""
    if name == "topics":
        train, test = topics(squad)
    else:
        tasks: dict[str, tuple[Any, ...]] = {
            "sst2": ("SST-2", (0,), 1, ("0", "1"), 1),
            "mrpc": ("MRPC", (3, 4), 0, ("0", "1"), 1),
            "cola": ("CoLA", (3,), 1, ("0", "1"), 0),
            "rte": ("RTE", (1, 2), 3, ("entailment", "not_entailment"), 1),
        }
        folder, *columns = tasks[name]
        train, test = (
            table(glue / folder / f"{split}.tsv", *columns) for split in ("train", "dev")
        )
    return train, test.take(
        random.Random(1).sample(range(len(test.texts)), min(TEST_ROWS, len(test.texts)))
    )


def draw(rows: Rows, size: int, seed: int) -> Rows:
    """Return `size` rows of each label, in random order."""
    drawn = random.Random(seed)
    chosen = []
    for label in sorted(set(rows.labels)):
        chosen += drawn.sample([n for n, other in enumerate(rows.labels) if other == label], size)
    drawn.shuffle(chosen)
    return rows.take(chosen)


# --- the sides: each returns the predicted labels of the test rows, and its processor seconds


Side = Callable[[argparse.Namespace, Rows, Rows, int], tuple[list[int], float]]
SHOWN: dict[Any, Any] = {}
"""Vectors by text, of the model as it starts: the test rows are the same in each draw."""


def units(vectors: Any) -> Any:
    import numpy as np

    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def frozen(options: argparse.Namespace, rows: Rows, pairs: str) -> Any:
    """Return the vectors [n, D] of rows by the start; of pairs joined, or [u, v, |u - v|, u * v]."""
    import numpy as np

    from bert_cli.tasks.run import models, vectors
    from bert_cli.tasks.run.opened import Input

    if "open" not in SHOWN:
        predictor = vectors.open_vectors(models.find_source(str(options.model)), warns=False)
        SHOWN["open"] = replace(predictor, max_seq_length=LENGTH)

    def of(texts: Sequence[Row]) -> Any:
        new = [text for text in dict.fromkeys(texts) if text not in SHOWN]
        if new:
            inputs = [Input("", dict(zip(("text", "second"), text, strict=False))) for text in new]
            for first in range(0, len(inputs), 32):
                part = SHOWN["open"].of_texts(inputs[first : first + 32])[0]
                SHOWN.update(zip(new[first : first + 32], part, strict=True))
        return np.stack([SHOWN[text] for text in texts])

    if pairs == "joined" or len(rows.texts[0]) == 1:
        return of(rows.texts)
    u, v = (units(of([(text[n],) for text in rows.texts])) for n in (0, 1))
    return np.concatenate([u, v, np.abs(u - v), u * v], axis=1)


def regression(learned: Any, labels: Sequence[int], strength: float | str, seed: int) -> Any:
    """Return scikit-learn's logistic regression on vectors; `strength` C, or "cv", or "std" of standardised vectors."""
    import warnings

    from sklearn import linear_model, pipeline, preprocessing

    method: Any = linear_model.LogisticRegression(
        C=1.0 if strength == "std" else strength if strength != "cv" else 1.0, max_iter=1000
    )
    if strength == "cv":
        from sklearn.model_selection import GridSearchCV, StratifiedKFold

        grid = {"C": [0.1, 1.0, 10.0, 100.0]}
        method = GridSearchCV(method, grid, cv=StratifiedKFold(4, shuffle=True, random_state=seed))
    if strength == "std":
        method = pipeline.make_pipeline(preprocessing.StandardScaler(), method)
    with warnings.catch_warnings(action="ignore"):
        return method.fit(learned, labels)


def scaled_by(vectors: Any) -> float:
    """Return the factor that gives vectors the mean squared length 1: a constant, which a dense layer can absorb."""
    return float((vectors**2).sum(1).mean() ** -0.5)


def by_vectors(strength: float | str, pairs: str = "joined", unit: bool = True) -> Side:
    def side(
        options: argparse.Namespace, rows: Rows, test: Rows, seed: int
    ) -> tuple[list[int], float]:
        tested = frozen(options, test, pairs)
        for text in rows.texts:
            for part in (text, *((word,) for word in text)):
                SHOWN.pop(part, None)
        began = time.process_time()
        learned = frozen(options, rows, pairs)
        if unit and pairs == "joined":
            learned, tested = units(learned), units(tested)
        else:
            factor = scaled_by(learned)
            learned, tested = factor * learned, factor * tested
        method = regression(learned, rows.labels, strength, seed)
        return list(map(int, method.predict(tested))), time.process_time() - began

    return side


def trained(
    settings: Any, build: Any, sets: dict[str, Rows], first_weights: dict[str, Any]
) -> dict[str, Any]:
    """Train as the settings say, from the start with these weights; return the outputs for each set.

    What is built and traced is kept for other draws with the same settings, whose state begins anew.
    """
    from bert_cli.planning.workload import workload_of
    from bert_cli.tasks.finetune.texts import features_of_texts
    from bert_cli.tasks.run import finetune, saving, train
    from bert_cli.tasks.run.task import Scorer

    with ExitStack() as stack, redirect_stdout(sys.stderr):
        draft, task = finetune.prepare(settings, build, stack)
        job = finetune.resolve(draft, task)
        key = settings.model_dump_json(exclude={"seed", "train_file"}) + str(job.plan.total_steps)
        key += type(settings).__name__
        if key not in SHOWN:
            run = train._built(job)
            saving.load_start(run)
            tensors = {**run.state.weights, **run.state.slots}
            SHOWN[key] = run, {name: (w, w.numpy().copy()) for name, w in tensors.items()}
        run, values = SHOWN[key]
        for weight, value in values.values():
            weight.assign(value)
        for name, value in first_weights.items():
            run.state.weights[name].assign(value)
        run.state.step = 0
        for number in range(job.plan.total_steps):
            metrics = run.step(job.stream[number])
        print({name: round(value, 4) for name, value in metrics.items()})
        scorer = Scorer(workload_of(draft.order), task, draft.stop)
        outputs: dict[str, Any] = {}
        assert draft.tokenizer is not None
        for name, rows in sets.items():
            began = time.process_time()
            features = features_of_texts(
                examples(rows), name, draft.order, draft.tokenizer.tokenizer
            )
            outputs[name] = scorer.logits(run.engine, {name: features})[name]
            outputs[f"{name} seconds"] = time.process_time() - began
        return outputs


def examples(rows: Rows) -> Any:
    import numpy as np

    from bert_cli.data.finetune.tables import TextExamples

    first, *second = map(list, zip(*rows.texts, strict=True))
    labels = np.array(rows.labels, np.int32)
    names = tuple(map(str, sorted(set(rows.labels))))
    return TextExamples(
        first, second[0] if second else None, labels, [*map(str, range(len(first)))], names
    )


def order_of(
    options: argparse.Namespace, file: Path, batch: int, rate: float, epochs: float, seed: int
) -> dict[str, Any]:
    return {
        "pretrained_ckpt_path": str(options.model),
        "train_file": file,
        "max_seq_length": LENGTH,
        "do_validation": False,
        "dry_run": True,
        "cache_dir": None,
        "seed": seed,
        "num_epochs": epochs,
        "global_batch": {"micro_batch_size": batch},
        "optimizer_opts": {
            "name": "AdamW",
            "weight_decay_rate": 0.01,
            "max_gradient_norm": 1.0,
            "learning_rate": {"max_learning_rate": rate, "warmup_frac": 0.1},
        },
    }


def by_classify(rate: float, epochs: float, batch: int = 32, strength: float = 0.0) -> Side:
    """Return plain `bert classify`; with a strength on the mean of the tokens, and beginning with the regression."""

    def side(
        options: argparse.Namespace, rows: Rows, test: Rows, seed: int
    ) -> tuple[list[int], float]:
        import numpy as np

        from bert_cli.config.finetune import ClassifySettings
        from bert_cli.tasks.finetune import texts

        began = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "rows.jsonl"
            names = ("text", "second")[: len(rows.texts[0])]
            lines = (
                dict(zip((*names, "label"), (*t, str(n)), strict=True))
                for t, n in zip(*rows, strict=True)
            )
            file.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
            values = order_of(options, file, min(batch, len(rows.labels)), rate, epochs, seed)
            first = begin_with_regression(options, rows, strength, seed) if strength else {}
            kind = mean_settings() if strength else ClassifySettings
            settings = kind.model_validate({**values, "text_column": list(names)})
            outputs = trained(settings, texts.build, {"test": test}, first)
        seconds = time.process_time() - began - outputs["test seconds"]
        return list(map(int, np.argmax(outputs["test"], 1))), seconds

    return side


def mean_settings() -> Any:
    from bert_cli.config.finetune import ClassifySettings

    class MeanSettings(ClassifySettings):
        """A classifier of the mean over the tokens."""

        @property
        def last_blocks(self) -> tuple[str, ...]:
            return ("mean_pool", "glue_head")

    return MeanSettings


def begin_with_regression(
    options: argparse.Namespace, rows: Rows, strength: float, seed: int
) -> Any:
    import numpy as np

    vectors = frozen(options, rows, "joined")
    factor = scaled_by(vectors)
    method = regression(factor * vectors, rows.labels, strength, seed)
    kernel, bias = method.coef_.T * factor, method.intercept_
    if len(bias) == 1:
        kernel, bias = (
            np.concatenate([-kernel / 2, kernel / 2], 1),
            np.concatenate([-bias / 2, bias / 2]),
        )

    names = ("glue_head/classifier/kernel", "glue_head/classifier/bias")
    return dict(zip(names, (kernel.astype(np.float32), bias.astype(np.float32)), strict=True))


def by_pairs(
    rate: float,
    pairs: int,
    batch: int,
    strength: float | str,
    temperature: float = 0.05,
    unit: bool = True,
) -> Side:
    """Return vectors trained on pairs of texts with the same label by `bert embed`, and regression on them."""

    def side(
        options: argparse.Namespace, rows: Rows, test: Rows, seed: int
    ) -> tuple[list[int], float]:
        import numpy as np

        from bert_cli.config.embed import EmbedSettings
        from bert_cli.data.finetune.features import PackReader
        from bert_cli.tasks.finetune.contrast import Contrast, add_candidates
        from bert_cli.tasks.finetune.texts import features_of_texts
        from bert_cli.tasks.run.task import Task

        began = time.process_time()
        labels = np.array(rows.labels)
        rounds = [pairs_of(labels, seed, number) for number in range(-(-2 * pairs // len(labels)))]
        texts = np.concatenate(rounds).reshape(-1, 2)[:pairs]

        class Reader(PackReader):
            """Texts with the same label are no negatives of one another."""

            FINGERPRINT_SUFFIX = ", labels"

            def _text_numbers(self, chosen: Any) -> Any:
                return self.features.labels["labels"][chosen].astype(np.int32)

        def build(order: Any, tokenizer: Any, source: Any) -> Task:
            shown = rows.take(texts.ravel().tolist())
            features = features_of_texts(examples(shown), "train", order, tokenizer)
            contrast = Contrast(batch, 2, temperature, (order.bert_config.hidden_size,))
            from functools import partial

            return Task(
                labels=order.bert_config.hidden_size,
                label_names=None,
                train=features,
                reader=Reader,
                prepare=partial(add_candidates, contrast),
            )

        values = order_of(options, Path("pairs.tsv"), batch, rate, 1.0, seed)
        settings = EmbedSettings.model_validate(values)
        key = (settings.model_dump_json(), pairs, temperature, tuple(rows.texts))
        if SHOWN.get("pairs", [None])[0] != key:  # two regressions may follow one training
            outputs = trained(settings, build, {"learned": rows, "test": test}, {})
            SHOWN["pairs"] = key, outputs, time.process_time() - began - outputs["test seconds"]
        _, outputs, seconds = SHOWN["pairs"]
        began = time.process_time()
        learned, tested = outputs["learned"], outputs["test"]
        if unit:
            learned, tested = units(learned), units(tested)
        elif strength != "std":
            factor = scaled_by(learned)
            learned, tested = factor * learned, factor * tested
        predicted = list(map(int, regression(learned, rows.labels, strength, seed).predict(tested)))
        return predicted, seconds + time.process_time() - began

    return side


def pairs_of(labels: Any, seed: int, number: int) -> Any:
    """Return the numbers of all texts, such that neighbours have the same label; the pairs are in random order."""
    import numpy as np

    drawn = np.random.default_rng([seed, number])
    pairs = []
    for label in np.unique(labels):
        own = drawn.permutation(np.flatnonzero(labels == label))
        pairs.append(own[: len(own) // 2 * 2].reshape(-1, 2))
    joined = np.concatenate(pairs)
    return joined[drawn.permutation(len(joined))].ravel()


def by_setfit(steps: int) -> Side:
    """Return SetFit with its defaults, but at most so many steps; its process stays."""

    def side(
        options: argparse.Namespace, rows: Rows, test: Rows, seed: int
    ) -> tuple[list[int], float]:
        if "setfit" not in SHOWN:
            command = [str(options.setfit), __file__, "setfit", str(options.model)]
            SHOWN["setfit"] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        process = SHOWN["setfit"]
        learned, tested = ([" [SEP] ".join(text) for text in part.texts] for part in (rows, test))
        request = json.dumps([[learned, rows.labels], tested, seed, steps])
        process.stdin.write(request + "\n")
        process.stdin.flush()
        predicted, seconds = json.loads(process.stdout.readline())
        return predicted, seconds

    return side


def serve_setfit(options: argparse.Namespace) -> None:
    import torch
    from datasets import Dataset
    from setfit import SetFitModel, Trainer, TrainingArguments

    torch.set_num_threads(1)
    for line in sys.stdin:
        (texts, labels), tested, seed, steps = json.loads(line)
        with redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as folder:
            began = time.process_time()
            model = SetFitModel.from_pretrained(str(options.model), local_files_only=True)
            model.model_body.max_seq_length = LENGTH
            arguments = TrainingArguments(
                output_dir=folder,
                batch_size=16,
                num_epochs=1,
                max_steps=steps,
                seed=seed,
                report_to="none",
                save_strategy="no",
                eval_strategy="no",
                show_progress_bar=False,
            )
            data = Dataset.from_dict({"text": texts, "label": labels})
            same = sum(
                labels.count(label) * (labels.count(label) + 1) // 2 for label in set(labels)
            )
            others = len(labels) * (len(labels) + 1) // 2 - same
            if 2 * max(same, others) <= steps * 16:
                arguments.max_steps = -1  # its own number, an epoch of all pairs
            Trainer(model=model, args=arguments, train_dataset=data).train()
            seconds = time.process_time() - began
            predicted = [int(value) for value in model.predict(tested)]
        print(json.dumps([predicted, seconds]), flush=True)


SIDES: dict[str, Side] = {
    "regression, unit, C=1": by_vectors(1.0),
    "regression, unit, C=10": by_vectors(10.0),
    "regression, unit, C=100": by_vectors(100.0),
    "regression, unit, cv": by_vectors("cv"),
    "regression, standardised": by_vectors("std"),
    "regression, scaled, C=10": by_vectors(10.0, unit=False),
    "regression, u v |u-v| uv, C=10": by_vectors(10.0, "both"),
    "classify": by_classify(2e-5, 3),
    "classify, 1e-4, 30 epochs": by_classify(1e-4, 30),
    "regression, then classify, 2e-5, 10": by_classify(2e-5, 10, strength=10.0),
    "setfit": by_setfit(34),
    "regression, then classify, 1e-4, 20": by_classify(1e-4, 20, strength=10.0),
    "pairs": by_pairs(1e-4, 320, 16, 1.0),
    "pairs, scaled": by_pairs(1e-4, 320, 16, 1.0, unit=False),
    "pairs, standardised": by_pairs(1e-4, 320, 16, "std", unit=False),
    "pairs, 3e-4": by_pairs(3e-4, 320, 16, 1.0),
    "pairs, 5e-5": by_pairs(5e-5, 320, 16, 1.0),
    "pairs, temperature 0.2": by_pairs(1e-4, 320, 16, 1.0, 0.2),
    "pairs, 640": by_pairs(1e-4, 640, 16, 1.0),
}


# --- run and report


def run(options: argparse.Namespace) -> None:
    options.out.touch()
    done = {tuple(json.loads(line)["cell"]) for line in options.out.read_text().splitlines()}
    for name in options.tasks:
        rows, test = read_task(name, options.glue, options.squad)
        for size in options.rows:
            for number in range(options.first_draw, options.first_draw + options.draws):
                learned = draw(rows, size, number)
                for title in options.sides or SIDES:
                    cell = [name, size, number, title]
                    if tuple(cell) in done:
                        continue
                    predicted, seconds = SIDES[title](options, learned, test, number)
                    right = [a == b for a, b in zip(predicted, test.labels, strict=True)]
                    line = {
                        "cell": cell,
                        "accuracy": sum(right) / len(right),
                        "seconds": round(seconds, 2),
                    }
                    with options.out.open("a") as file:
                        file.write(json.dumps(line) + "\n")
                    print(json.dumps(line), file=sys.stderr, flush=True)


def next_rows(how: str, model: Any, vectors: Any, unlabelled: Any, size: int, seed: int) -> Any:
    """Return the numbers of the rows to label next: `random`, the most `uncertain`, or those of `clusters`."""
    import numpy as np
    from sklearn.cluster import KMeans

    if how == "random":
        return np.random.default_rng(seed).permutation(unlabelled)[:size]
    best = np.sort(model.predict_proba(vectors[unlabelled]), axis=1)
    order = unlabelled[np.argsort(best[:, -1] - best[:, -2], kind="stable")]
    if how == "uncertain":
        return order[:size]
    order = order[: 10 * size]
    cluster = KMeans(size, n_init=1, random_state=seed).fit_predict(vectors[order])
    return np.array([order[np.argmax(cluster == number)] for number in range(size)])


def suggest(options: argparse.Namespace) -> None:
    """Print the accuracies of regression on the start's vectors when rows are labelled in rounds of 20."""
    import numpy as np

    for name in options.tasks:
        rows, test = read_task(name, options.glue, options.squad)
        rows = rows.take(
            random.Random(2).sample(range(len(rows.texts)), min(2000, len(rows.texts)))
        )
        vectors, tested = (units(frozen(options, side, "joined")) for side in (rows, test))
        labels = np.array(rows.labels)
        values: dict[tuple[str, int], list[float]] = defaultdict(list)
        for number in range(options.draws):
            drawn = np.random.default_rng(number)
            each = [drawn.permutation(np.flatnonzero(labels == n)) for n in np.unique(labels)]
            first = np.concatenate([own[: max(2, 16 // len(each))] for own in each])
            for how in ("random", "uncertain", "clusters"):
                known = first
                for turn in range(4):
                    model = regression(vectors[known], labels[known], "std", number)
                    accuracy = float(np.mean(model.predict(tested) == np.array(test.labels)))
                    values[how, len(known)].append(accuracy)
                    rest = np.setdiff1d(np.arange(len(labels)), known)
                    chosen = next_rows(how, model, vectors, rest, 20, 100 * number + turn)
                    known = np.concatenate([known, chosen])
        for (how, size), scores in values.items():
            gains = [a - b for a, b in zip(scores, values["random", size], strict=True)]
            gain = interval(gains) if how != "random" else ""
            print(f"| {name} | {size} | {how} | {interval(scores)} | {gain} |", flush=True)


def interval(values: Sequence[float]) -> str:
    from scipy import stats

    mean = sum(values) / len(values)
    if len(values) < 2:
        return f"{mean:.4f}"
    half = stats.t.ppf(0.975, len(values) - 1) * stats.tstd(values) / math.sqrt(len(values))
    return f"{mean:.4f} ± {half:.4f}"


def report(options: argparse.Namespace) -> None:
    cells: dict[Any, dict[str, dict[int, Any]]] = defaultdict(lambda: defaultdict(dict))
    for line in map(json.loads, options.out.read_text().splitlines()):
        task, size, number, side = line["cell"]
        cells[task, size][side][number] = line
    print(
        "| task | rows of a label | side | accuracy | difference | seconds | draws |\n|---|---|---|---|---|---|---|"
    )
    for (task, size), sides in cells.items():
        base = sides.get(options.base, {})
        for side, draws in sides.items():
            common = sorted(draws.keys() & base.keys())
            gains = [draws[n]["accuracy"] - base[n]["accuracy"] for n in common]
            seconds = sum(line["seconds"] for line in draws.values()) / len(draws)
            accuracy = interval([line["accuracy"] for line in draws.values()])
            gain = interval(gains) if gains and side != options.base else ""
            print(
                f"| {task} | {size} | {side} | {accuracy} | {gain} | {seconds:.1f} | {len(draws)} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("suggest")
    for name in ("model", "glue", "squad"):
        command.add_argument(name, type=Path)
    command.add_argument("--tasks", nargs="+", default=["sst2", "topics"])
    command.add_argument("--draws", type=int, default=10)
    command.set_defaults(action=suggest)
    command = commands.add_parser("run")
    for name in ("model", "glue", "squad", "out"):
        command.add_argument(name, type=Path)
    command.add_argument("--setfit", type=Path, help="a Python that has setfit")
    command.add_argument("--tasks", nargs="+", default=["sst2", "mrpc", "topics"])
    command.add_argument("--rows", nargs="+", type=int, default=[16, 8, 64])
    command.add_argument("--draws", type=int, default=10)
    command.add_argument("--first-draw", type=int, default=0)
    command.add_argument("--sides", nargs="+", choices=SIDES)
    command.set_defaults(action=run)
    command = commands.add_parser("report")
    command.add_argument("out", type=Path)
    command.add_argument("--base", default="regression, unit, C=10")
    command.set_defaults(action=report)
    command = commands.add_parser("setfit")
    command.add_argument("model", type=Path)
    command.set_defaults(action=serve_setfit)
    options = parser.parse_args()
    options.action(options)


if __name__ == "__main__":
    main()
