"""`bert ner`: labelled tokens in CoNLL format, scored by entities.

A word is labelled at its first piece (Devlin et al. 2019, section 5.3). Precision, recall and F1 count
entities; their type and both ends must be correct. predictions.conll has the words with both labels.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from bert_cli.config.finetune import NerSettings
from bert_cli.data.finetune import conll
from bert_cli.data.finetune.features import Features
from bert_cli.data.finetune.simple import by_word
from bert_cli.data.finetune.split import warn_of_shared
from bert_cli.data.finetune.tables import write_lines
from bert_cli.data.tokens.tokenizer import TextTokenizer
from bert_cli.errors import logger
from bert_cli.processes import print_line
from bert_cli.tasks.model import models
from bert_cli.tasks.run import finetune
from bert_cli.tasks.run.finetune_steps import steps_of
from bert_cli.tasks.run.task import Logits, Result, Task
from bert_cli.text import count, remarks_of


def run(settings: NerSettings) -> None:
    """Fine-tune on the sentences and score held-out sentences; raises the errors of `finetune.run`."""
    finetune.run(settings, STEPS)


def required_settings(settings: NerSettings) -> list[str]:
    """Return the settings that a run needs."""
    needs = {"train_file": settings.do_training, "validation_file": settings.do_validation}
    return [name for name in needs if needs[name]]


def build(settings: NerSettings, tokenizer: TextTokenizer, source: models.Source | None) -> Task:
    """Return the task: the sentences of both files."""
    names = None
    if source is not None and not settings.do_training:
        names = source.label_names
    train = None
    if settings.do_training:
        assert settings.train_file is not None
        sentences = conll.read_conll(settings.train_file)
        names = sentences.label_names
        train = _features(sentences, "train", settings, tokenizer)
    if settings.validation_file is None:
        assert names is not None
        return Task(len(names), names, train, best="f1")
    held_out = conll.read_conll(settings.validation_file, names)
    features = _features(held_out, "validation", settings, tokenizer)
    names = held_out.label_names
    evaluate = partial(_evaluate, held_out, features)
    task = Task(len(names), names, train, {"validation": features}, evaluate, best="f1")
    if train is None:
        return task
    trained, scored = (
        [[" ".join(words)] for words in read.words] for read in (sentences, held_out)
    )
    warn_of_shared("train", trained, {"validation": scored})

    def of_each_word() -> dict[str, Result]:
        predicted = np.concatenate(by_word(sentences.words, sentences.labels, held_out.words))
        logits = np.zeros((len(features.tokens), len(names)), np.float32)
        logits[features.position_labels["label_weights"] > 0] = np.eye(len(names))[predicted]
        return {"most frequent label of each word": evaluate({"validation": logits})}

    return replace(task, baselines=of_each_word, held_out=held_out.examples.digest)


def _features(
    sentences: conll.Sentences, name: str, settings: NerSettings, tokenizer: TextTokenizer
) -> Features:
    sizes = settings.max_seq_length, settings.doc_stride
    features, cut = conll.word_features(sentences, tokenizer, *sizes)
    remarks = {**sentences.remarks, **cut}
    words = sum(map(len, sentences.words))
    sizes_read = f"{count(len(sentences), 'sentence')}, {count(words, 'word')}"
    logger.info(f"{name}: {sizes_read}{remarks_of(remarks)}")
    return features


def _evaluate(sentences: conll.Sentences, features: Features, logits: Logits) -> Result:
    best = conll.of_words(sentences, features, np.argmax(logits["validation"], axis=1))
    labels = sentences.names(sentences.labels)
    predicted = sentences.names(best)

    def write(folder: Path, _: Logits) -> None:
        """Write the words with both labels, in the form that conlleval reads."""
        lines = []
        for rows in zip(sentences.words, labels, predicted, strict=True):
            lines += [*map(" ".join, zip(*rows, strict=True)), ""]
        path = folder / "predictions.conll"
        write_lines(path, lines)
        print_line(f"validation: {count(len(sentences), 'sentence')} in {path}")

    return Result(conll.entity_samples(labels, predicted, sentences.examples), write)


STEPS = steps_of(build, required_settings)
