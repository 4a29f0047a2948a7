"""A task with its own head in one file: the number of a text's tokens, from the mean of their vectors."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from keras import ops

from bert_cli.config.finetune import FinetuneSettings
from bert_cli.data.finetune.features import Features
from bert_cli.data.finetune.synthetic import Texts
from bert_cli.data.tokens.tokenizer import TextTokenizer
from bert_cli.facts.heads import MEAN_POOL, Head, Product
from bert_cli.model import heads
from bert_cli.tasks.run import finetune
from bert_cli.tasks.run.finetune import Task
from bert_cli.tasks.run.models import Source
from bert_cli.tasks.run.opened import Input, Predictor, Row, exact, row_of

RECORD = Head(
    name="length_head",
    layer="support.toy_task:LengthHead",
    before=(MEAN_POOL.name,),
    weights=lambda config: config.hidden_size + 1,
    products=lambda config, shape: [Product(shape.examples, config.hidden_size, 1)],
    hf_names={"length_head/length": "regressor"},
    parts={"length_head": "regressor"},
    task="text-length",
    hf_classes=("BertForTextLength",),
    needs=("length_head",),
    predictor="support.toy_task:TextLength",
    commands=("length",),
    synthetic="support.toy_task:length_labels",
)


class LengthSettings(FinetuneSettings):
    """Train the head."""

    COMMAND = "length"
    HEAD = RECORD
    length_unit: int = 1
    """Tokens of a unit of length."""


class LengthHead(heads.Head):
    """Block `length_head`: one product, and the absolute error in units."""

    READS = ("lengths", "length_weights")
    COUNTS: ClassVar[Mapping[str, str]] = {"weighed": "length_weights"}
    MEANS: ClassVar[Mapping[str, tuple[str, str]]] = {"loss": ("error", "weighed")}

    def _create_weights(self):
        self.length = self.dense("length", self.config.hidden_size, 1)

    def logits(self, hidden, key):
        return self.length(ops.cast(hidden[:, 0], self.compute_dtype))

    def call(self, hidden, labels, counts, key):
        errors = ops.abs(self.logits(hidden, key)[:, 0] - labels["lengths"])
        error = ops.sum(errors * labels["length_weights"])
        return error / counts["weighed"], {"error": error}


def length_labels(texts: Texts, labels: int) -> Features:
    lengths = texts.lengths.astype(np.float32)
    columns = {"lengths": lengths, "length_weights": np.ones_like(lengths)}
    return Features(texts.ids, texts.segments, np.cumsum(texts.lengths), columns)


class TextLength(Predictor):
    """The number of a text's tokens."""

    EMPTY: ClassVar[Row] = {"length": None}

    def answer(self, inputs: Sequence[Input]) -> list[Row]:
        rows = zip(inputs, *self.of_texts(inputs), strict=True)
        return [row_of(item.fields, {"length": exact(value)}, cut) for item, (value,), cut in rows]


def run(settings: LengthSettings) -> None:
    finetune.run(settings, _build)


def _build(settings: LengthSettings, tokenizer: TextTokenizer, source: Source | None) -> Task:
    raise NotImplementedError  # the test trains on synthetic examples
