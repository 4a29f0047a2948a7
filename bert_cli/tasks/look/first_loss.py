"""The losses of a model before its first step, beside what they must be.

Before it has learnt anything a model gives each of V words the same chance, a loss of ln V, and a next
sentence or a random one too, ln 2. Far from it something is wrong that would otherwise be seen after
hours. Weights that were trained must do better than that, or their vocabulary is another one.
"""

import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from bert_cli.config import layout
from bert_cli.config.memory import estimate
from bert_cli.config.parallel import Parallel
from bert_cli.config.tools import DoctorSettings
from bert_cli.config.training import GlobalBatch
from bert_cli.errors import BertError
from bert_cli.optim.loss_scale import first_loss_scale
from bert_cli.parallel.cluster import Processes
from bert_cli.parallel.engine import Mesh, count
from bert_cli.parallel.tensorflow.engine import TensorFlowEngine
from bert_cli.tasks.look import machine
from bert_cli.tasks.look.finding import Finding, refused
from bert_cli.tasks.run import build, start
from bert_cli.train.step import State, means

# Examples of the batch whose loss is computed: enough for 160 masked places of 128 a row.
FIRST_BATCH = 8
# How far a first loss may be from that of equal chances. The scores of an untrained model of width D
# have a variance of D x initializer_range^2 x 0.77, half of which comes on top: 0.12 in BERT-base.
NEAR = {"mlm_loss": 0.5, "nsp_loss": 0.3}
# The column that says what counts in each of them.
COUNTED = {"mlm_loss": "masked_lm_weights", "nsp_loss": "next_sentence_weights"}


def first_loss(settings: DoctorSettings, reader: Any) -> Iterator[Finding]:
    """The losses of the model before its first step, beside those of equal chances."""
    what = "first loss"
    alone = settings.model_copy(
        update={
            "parallel": Parallel(),
            "global_batch": GlobalBatch(micro_batch_size=FIRST_BATCH),
            "precision": "float32",
        }
    )
    needed, (_, free) = estimate(alone)[0].total, machine.memory()
    if not settings.build:
        yield Finding("ok", what, "not computed: --no-build")
        return
    if needed > layout.USABLE * free:
        yield Finding(
            "warning",
            what,
            f"not computed: the model needs {layout.size(needed)}, and {layout.size(free)} are free",
            "end what else runs on this machine, or give --no-build",
        )
        return
    began = time.monotonic()
    try:
        source = start.source_of(settings)
        figures, told = _first_figures(alone, reader, source)
    except BertError as error:
        yield refused(what, error)
        return
    equal = {"mlm_loss": math.log(settings.bert_config.vocab_size), "nsp_loss": math.log(2)}
    took = f"{FIRST_BATCH} examples, float32 on the CPU, {time.monotonic() - began:.1f} s; {told}"
    yield from judged(alone, figures, equal, took, is_trained=source is not None)


def _first_figures(
    settings: DoctorSettings, reader: Any, source: start.Source | None
) -> tuple[dict[str, float], str]:
    """Means over the first examples without dropout, and where the weights come from.

    Without the loss of what is not there to be predicted: a corpus may have no pairs.
    """
    if tf.config.list_physical_devices("GPU"):
        # Else TensorFlow takes all their memory with its first operation.
        tf.config.set_visible_devices([], "GPU")
    cpu = tf.config.list_logical_devices("CPU")[0].name
    mesh = Mesh(1, ((cpu,),), cpu, Processes(()))
    model = build.build_model(settings, mesh)
    told = "a fresh model"
    if source is not None:
        state = State(model.weights, {}, first_loss_scale(1.0))
        told = start.load_pretrained(source, settings.bert_config, state)
    engine = TensorFlowEngine(model.replicas, mesh, seed=settings.seed)
    rows = reader.rows(np.arange(FIRST_BATCH))
    counts = count({name: column[None] for name, column in rows.items()}, engine.head.COUNTS)
    counts = {name: max(value, 1.0) for name, value in counts.items()}
    figures = means(engine.evaluate(rows), counts, engine.head.MEANS)
    there = {name: rows[column].any() for name, column in COUNTED.items() if column in rows}
    return {name: figures[name] for name in NEAR if there.get(name, True)}, told


def judged(
    settings: DoctorSettings,
    figures: dict[str, float],
    equal: dict[str, float],
    took: str,
    *,
    is_trained: bool,
) -> Iterator[Finding]:
    """The first losses beside those of equal chances; weights that were trained must do better."""
    named = {
        "mlm_loss": ("masked-LM", f"ln {settings.bert_config.vocab_size:,}"),
        "nsp_loss": ("next sentence", "ln 2"),
    }
    losses = ", ".join(
        f"{named[name][0]} {value:.2f} ({named[name][1]} = {equal[name]:.2f})"
        for name, value in figures.items()
    )
    told = f"{losses or 'nothing is to be predicted'}; {took}"
    both = {**figures, **{f"equal_{name}": equal[name] for name in figures}}
    if is_trained:
        if figures.get("mlm_loss", 0.0) < equal["mlm_loss"] - NEAR["mlm_loss"]:
            yield Finding("ok", "first loss", told, figures=both)
            return
        yield Finding(
            "warning",
            "first loss",
            f"{told}: these weights know nothing of these tokens",
            "make the records with the vocabulary of the model that the run starts from",
            both,
        )
        return
    # Written so that what is no number is far, too.
    if all(abs(value - equal[name]) <= NEAR[name] for name, value in figures.items()):
        yield Finding("ok", "first loss", told, figures=both)
        return
    yield Finding(
        "warning",
        "first loss",
        f"{told}: far from equal chances",
        f"lower bert_config.initializer_range ({settings.bert_config.initializer_range:g})",
        both,
    )
