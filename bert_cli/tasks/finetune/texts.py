"""What `bert classify` and `bert glue` do with texts and their labels: features, decisions, scores, baselines."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from bert_cli.arrays import Array, Floats32, Ints
from bert_cli.config.finetune import ClassifySettings, FinetuneSettings, GlueSettings
from bert_cli.data.finetune import simple
from bert_cli.data.finetune.features import Features, cached, encode_texts, texts_hash
from bert_cli.data.finetune.labels import Decision, decide, several_samples
from bert_cli.data.finetune.split import warn_of_shared
from bert_cli.data.finetune.tables import TextExamples, read_table, samples_of, write_lines
from bert_cli.data.tokens.tokenizer import TextTokenizer
from bert_cli.errors import logger
from bert_cli.processes import print_line
from bert_cli.statistics import Sample
from bert_cli.tasks.model import models
from bert_cli.tasks.model.opened import Input
from bert_cli.tasks.model.vectors import open_vectors
from bert_cli.tasks.run.task import Result, half_of
from bert_cli.text import count, remarks_of

# Training rows, below which vectors of the start are a baseline: they cost less than an epoch and one evaluation.
FEW = 500


def decided(
    rows: TextExamples, logits: Floats32, stored: Decision | None = None, *, folded: bool = False
) -> tuple[Decision, Array]:
    """Return the `stored` decision, or the one that half of the texts choose, and the answers by it.

    With `folded`, the answers to this half are by the decision of the other half.
    """
    labels = rows.labels
    names = rows.label_names
    assert labels is not None and names is not None
    choosing = half_of(rows.examples, choosing=True)
    several = labels.ndim == 2
    decision = stored or decide(logits[choosing], labels[choosing], names)
    answers = decision.answers(logits, several=several)
    if folded and not choosing.all():
        opposite = decide(logits[~choosing], labels[~choosing], names)
        answers[choosing] = opposite.answers(logits[choosing], several=several)
    return decision, answers


def digest_of(sets: Mapping[str, TextExamples]) -> str:
    """Return the digests of the sets that are scored."""
    digests = (sets[name].examples.digest for name in sets if name.startswith("validation"))
    return " ".join(digests)


def score(
    metrics: Sequence[str], sets: Mapping[str, TextExamples], answers: Mapping[str, Array]
) -> dict[str, Sample]:
    """Return the metrics of the answers to sets: numbers of labels, scores, or of several labels 0 and 1.

    Names of the mismatched set's metrics have a suffix.
    """
    samples: dict[str, Sample] = {}
    for split, column in answers.items():
        labels = sets[split].labels
        examples = sets[split].examples
        assert labels is not None
        if labels.ndim == 1:
            scored = samples_of(metrics, labels, column, examples)
        else:
            scored = several_samples(labels, column, examples)
        suffix = split.removeprefix("validation")
        samples |= {f"{metric}{suffix}": sample for metric, sample in scored.items()}
    return samples


def baselines_of(
    sets: Mapping[str, TextExamples],
    metrics: Sequence[str],
    source: models.Source | None,
    weights: Array | None = None,
    folds: Ints | None = None,
) -> dict[str, Result]:
    """Return the results of the mean, or of the majority class and of regressions, on the development sets.

    The regressions have the `weights` of the run. With `folds`, each is learned as often, from all other rows.
    """
    train = sets["train"]
    labels = train.labels
    assert labels is not None
    names = [name for name in sets if name.startswith("validation")]
    texts = train.joined
    folded = folds is not None
    if folds is None:
        held_out = chain.from_iterable(sets[name].joined for name in names)
        texts = [*texts, *held_out]
        # Without folds: one part that learns from the training rows and answers all held-out texts.
        folds = np.repeat([-1, 0], [len(train), len(texts) - len(train)])
    numbers = range(folds.max() + 1)
    parts = [(np.flatnonzero(folds[: len(train)] != n), folds == n) for n in numbers]
    inputs: dict[str, Any] = {}
    if train.label_names is not None:
        if simple.takes_long(train.joined, labels):
            print_line("baseline, regression on words: left out, it takes too long")
        else:
            inputs["words"] = np.array(texts, np.object_)
        if len(train) < FEW and source is not None:
            asked = [Input("texts", {"text": text}) for text in texts]
            inputs["vectors of the start"], _ = open_vectors(source, warns=False).of_texts(asked)
    usual = [simple.most_frequent(labels[rows], tested.sum()) for rows, tested in parts]
    usual_name = "mean" if train.label_names is None else "majority class"
    columns = {usual_name: usual}
    for name, values in inputs.items():
        predictions = []
        for rows, tested in parts:
            weights_of_rows = None if weights is None else weights[rows]
            answers_of_part = simple.by_regression(
                values[rows], labels[rows], values[tested], weights_of_rows
            )
            predictions.append(answers_of_part)
        columns[f"regression on {name}"] = predictions
    # Back from the order of the folds to the order of the texts: the rank of a rank.
    positions = np.argsort(np.argsort(folds[folds >= 0], kind="stable"))
    ends = np.cumsum([len(sets[name]) for name in names])[:-1]
    results: dict[str, Result] = {}
    for name, predicted in columns.items():
        column = np.concatenate(predicted)[positions]
        answers = dict(zip(names, np.split(column, ends), strict=True))
        if labels.ndim == 2:
            answers = {n: decided(sets[n], x, folded=folded)[1] for n, x in answers.items()}
        results[name] = Result(score(metrics, sets, answers))
    return results


def unlabelled(
    settings: ClassifySettings | GlueSettings,
    columns: Sequence[str],
    tokenizer: TextTokenizer,
    sets: Mapping[str, TextExamples],
) -> Features | None:
    """Return the texts that only the teacher labels; None without any, or if the task's texts are not columns.

    Prints a warning where one of the `sets` has texts that the run trains on.
    """
    scored = {name: examples.rows for name, examples in sets.items() if name != "train"}
    if "train" in sets:
        warn_of_shared("train", sets["train"].rows, scored)
    path = settings.distillation.unlabelled_file
    if path is None or not columns:
        return None
    examples = read_table(path, text_columns=columns)
    warn_of_shared("unlabelled_file", examples.rows, scored)
    return features_of_texts(examples, "unlabelled", settings, tokenizer)


def features_of_texts(
    examples: TextExamples,
    name: str,
    settings: FinetuneSettings,
    tokenizer: TextTokenizer,
    noun: str = "example",
) -> Features:
    """Return the examples as features; print their number and what was left out or truncated."""
    labels = {} if examples.labels is None else {"labels": examples.labels}
    sizes = settings.model_dump(include={"max_seq_length", "doc_stride"})

    def build() -> Mapping[str, Array]:
        texts = examples.first, examples.second
        features, is_cut = encode_texts(tokenizer, *texts, labels, **sizes)
        return {**features.arrays(), "cut": is_cut.sum()}

    made_from = {
        "texts": texts_hash(examples.first, examples.second or []),
        "labels": {n: hashlib.sha256(of.tobytes()).hexdigest() for n, of in labels.items()},
        "tokenizer": tokenizer.fingerprint,
        **sizes,
    }
    arrays = cached(settings.cache_dir, made_from, build)
    remarks = dict(examples.remarks)
    cut = int(arrays["cut"])
    if cut:
        remarks[f"text{{s}} longer than {settings.max_seq_length} tokens, cut"] = cut
    features = Features.of(arrays)
    windows = "" if features.owner is None else f" in {count(len(features), 'window')}"
    logger.info(f"{name}: {count(len(examples), noun)}{windows}{remarks_of(remarks)}")
    return features


def write_predictions(
    folder: Path, name: str, examples: TextExamples, answers: Array, probabilities: Array | None
) -> None:
    """Write the answer to each example with its text; the set "validation_x" goes to predictions_x.jsonl."""
    path = folder / f"predictions{name.removeprefix('validation')}.jsonl"
    assert examples.labels is not None
    names = examples.label_names
    lines = []
    for number, text in enumerate(examples.first):
        row: dict[str, object] = {"id": examples.ids[number], "text": text}
        if examples.second is not None:
            row["second"] = examples.second[number]
        label = examples.labels[number]
        answer = answers[number]
        if names is None:
            # As in the file: 3.8, and not the nearest float32 in 16 digits.
            row |= {"label": float(str(label)), "predicted": float(answer)}
        elif probabilities is None:
            sides = {"labels": label, "predicted": answer}
            row |= {n: [names[k] for k in np.flatnonzero(of)] for n, of in sides.items()}
        else:
            row |= {"label": names[label], "predicted": names[answer]}
            row["probability"] = round(float(probabilities[number]), 6)
        lines.append(json.dumps(row))
    write_lines(path, lines)
    print_line(f"{name}: {count(len(examples), 'prediction')} in {path}")
