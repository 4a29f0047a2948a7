"""`bert ner`: labelled tokens in CoNLL format, scored by whole entities.

A word is labelled at its first piece (Devlin et al. 2019, section 5.3). Precision, recall and F1 are
of entities, where type and both ends are right; predictions.conll has the words with both labels.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from bert_cli.config.finetune import NerSettings
from bert_cli.data.finetune.conll import (
    Sentences,
    WordPlaces,
    read_conll,
    word_features,
    word_labels,
)
from bert_cli.data.finetune.examples import write_lines
from bert_cli.data.finetune.features import Features
from bert_cli.data.finetune.metrics import chunks, entity_scores
from bert_cli.data.records.tokenizer import TextTokenizer
from bert_cli.tasks.finetune.task import Logits, Scores, Task
from bert_cli.tasks.run import finetune, start
from bert_cli.train.metrics import print_line

PREDICTIONS = "predictions.conll"
# Of synthetic examples: those of CoNLL-2003.
LABELS = ("O", *(f"{prefix}-{kind}" for kind in ("LOC", "MISC", "ORG", "PER") for prefix in "BI"))


def run(settings: NerSettings) -> None:
    """Fine-tune on the sentences and score the others; see `finetune.run` for what it raises."""
    wanted = {"train_file": settings.do_training, "validation_file": settings.do_validation}
    needs = [name for name, needed in wanted.items() if needed]
    finetune.run(settings, build, needs, LABELS)


def build(settings: NerSettings, tokenizer: TextTokenizer, source: start.Source | None) -> Task:
    """The sentences of both files, scored by entities."""
    names = source.label_names if source is not None and not settings.do_training else None
    train = None
    if settings.do_training:
        assert settings.train_file is not None
        sentences = read_conll(settings.train_file)
        names = sentences.label_names
        train, _ = _features(sentences, "train", settings, tokenizer)
    development: dict[str, Features] = {}
    score, write = None, None
    if settings.validation_file is not None:
        held_out = read_conll(settings.validation_file, names)
        features, places = _features(held_out, "validation", settings, tokenizer)
        development, names = {"validation": features}, held_out.label_names
        score, write = partial(_score, held_out, places), partial(_write, held_out, places)
    assert names is not None
    task = Task(len(names), names, train, development, score or _no_scores, best="f1")
    return task if write is None else replace(task, write=write)


def _features(
    sentences: Sentences, name: str, settings: NerSettings, tokenizer: TextTokenizer
) -> tuple[Features, WordPlaces]:
    features, places = word_features(sentences, tokenizer, settings.max_seq_length)
    remarks = {**sentences.remarks, **places.remarks}
    told = "".join(f"; {count:,} {what}" for what, count in remarks.items())
    print_line(f"{name}: {len(sentences):,} sentences, {len(places.places):,} words{told}")
    return features, places


def _no_scores(logits: Logits) -> Scores:
    return {}


def _predicted(sentences: Sentences, places: WordPlaces, logits: Logits) -> list[list[str]]:
    best = np.argmax(logits["validation"], axis=1)
    return sentences.names(word_labels(places, best))


def _score(sentences: Sentences, places: WordPlaces, logits: Logits) -> Scores:
    labels = sentences.names(sentences.labels)
    whole, by_type = entity_scores(labels, _predicted(sentences, places, logits))
    scores = {"f1": whole.f1, "precision": whole.precision, "recall": whole.recall}
    # Of the types that the sentences have: others, which were only predicted, come and go with a seed.
    types = sorted({kind for sentence in labels for kind, _, _ in chunks(sentence)})
    return scores | {f"f1_{name}": by_type[name].f1 for name in types}


def _write(sentences: Sentences, places: WordPlaces, folder: Path, logits: Logits) -> None:
    """The words with their labels and the predicted ones, in the form that conlleval reads."""
    lines = []
    predicted = _predicted(sentences, places, logits)
    for words, true, found in zip(
        sentences.words, sentences.names(sentences.labels), predicted, strict=True
    ):
        lines += [f"{w} {t} {f}" for w, t, f in zip(words, true, found, strict=True)]
        lines.append("")
    write_lines(folder / PREDICTIONS, lines)
    print_line(f"validation: {len(sentences):,} sentences in {folder / PREDICTIONS}")
