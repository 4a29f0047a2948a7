"""The choice of `bert init`: a function of the text, the machine, the model to start from and the hours.

The values and their sources are in configs/recipes.json; docs/init-rules.md shows them, with the choice for some texts.
Hours follow from the operations of an example and the measured rate of the machine.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bert_cli.config.shipped import RECIPES, configs_folder
from bert_cli.config.training import Precision
from bert_cli.errors import ConfigError
from bert_cli.facts.bert import BertConfig
from bert_cli.facts.heads import PRETRAINING
from bert_cli.facts.modernbert import ModernBertConfig
from bert_cli.facts.products import BatchShape
from bert_cli.files import JSONObject
from bert_cli.planning.flops import model_flops
from bert_cli.text import count

TABLE: JSONObject = json.loads((configs_folder() / RECIPES).read_text(encoding="utf-8"))
# Estimated before a vocabulary exists; with a model to start from its own vocabulary is asked.
PIECES_PER_WORD = 1.4  # for a new vocabulary, punctuation included
FILLED = 0.8  # of the positions: 7.4 MB of articles make 15,246 records of 128 with 103 tokens each
HELD_OUT = 10  # every tenth document
LEAST_HELD_OUT = 12  # documents, if half of them are as many
MOST_HELD_OUT = 500  # documents
MOST_POSITIONS = 512  # of a new model
USABLE = 0.9  # of the hours: the rest is for data steps, evaluations and checkpoints
# A hundred updates of the smallest batch.
LEAST_EXAMPLES = 3200
LITTLE_TIME = 0.5  # of the hours, or of all epochs: less is explained
MANY_UNKNOWN = 0.05  # words that a vocabulary lacks
MICRO_BATCH = {"CPU": 16, "GPU": 32}  # a CPU is not faster with more
EVALUATIONS = 10
EVALUATION_EXAMPLES = 1000
LOG_LINES = 200
SPOILS = (
    "this training makes a model for sentences worse at search (in our trial nDCG@10 fell from 0.612 to 0.360); "
    "--for search uses it as published instead"
)


@dataclass(frozen=True)
class TextFacts:
    """The size and the languages of a text."""

    text_bytes: float
    words: float
    documents: float
    languages: Mapping[str, float]  # ISO 639 code -> fraction of the documents, largest first
    long_document: float  # words that nine of ten documents do not exceed
    pieces_per_word: float = PIECES_PER_WORD
    unknown: float = 0.0  # fraction of the words that the vocabulary of the model lacks
    is_estimated: bool = False
    is_cut: bool = False  # its few documents are cut into pieces, which are counted

    @property
    def trained(self) -> float:
        """Return the part of the documents that is not held out."""
        return 1 - min(1 / held_out_every(self.documents), MOST_HELD_OUT / self.documents)


def held_out_every(documents: float) -> int:
    """Return n if every n-th of so many documents is held out."""
    return int(max(2, min(HELD_OUT, documents // LEAST_HELD_OUT)))


@dataclass(frozen=True)
class Machine:
    """The devices of a run, and how fast they train."""

    kind: str
    devices: int
    precision: Precision
    flops: float  # operations per second in training, of all devices
    is_timed: bool = True
    spread: tuple[float, float] = (0.95, 1.2)  # factors of the time, from the measured steps


@dataclass(frozen=True)
class Start:
    """The model to start from."""

    name: str
    config: BertConfig
    vocabulary: str = ""  # what `--vocab` takes
    is_cased: bool = False
    is_for_sentences: bool = False


@dataclass
class Recipe:
    """The choice of `bert init`; `choose` fills it."""

    text: TextFacts
    machine: Machine
    start: Start | None
    out: Path
    name: str  # of the model to start from, or the size of a new one
    model: BertConfig
    new_pieces: int = 0
    seconds: float = 0.0
    config: JSONObject = field(default_factory=dict)  # of `bert pretrain`
    rows: list[tuple[str, str, str]] = field(default_factory=list)  # what, value, reason
    warnings: list[str] = field(default_factory=list)
    refusal: ConfigError | None = None
    """Why it cannot be trained in the hours; the rest is then the shortest training."""

    def add_row(self, rule: str, value: str) -> None:
        """Add the value of a rule, with its source as the reason."""
        self.rows.append((rule, value, TABLE[rule]["source"]))


def choose(
    text: TextFacts, machine: Machine, start: Start | None, hours: float, out: Path
) -> Recipe:
    """Return the recipe, which has a refusal for hours too short to learn anything."""
    seconds = 3600 * hours * USABLE
    warnings: list[str] = []
    if start is None:
        (name, _, _, rate), model = new_model(text, machine, seconds, warnings)
    else:
        name = start.name
        model = start.config
        rate = step(TABLE["learning rate"]["rates"], model.hidden_size)
        warnings += unknown_words(text, start)
        if start.is_for_sentences:
            warnings.append(SPOILS)
    chosen = Recipe(text, machine, start, out, name, model, warnings=warnings)
    _add_masked_lm(chosen, seconds, rate)
    times = dict.fromkeys(hours_of(factor * chosen.seconds) for factor in machine.spread)
    reason = "5 % less to 20 % more, or as measured steps differ; a busy machine is slower"
    if machine.spread[1] * chosen.seconds > 3600 * hours:
        reason += "; the second is more than --hours, which end no run"
    if chosen.seconds < LITTLE_TIME * seconds:
        reason += "; the text is small: more text would use more of the time"
    chosen.rows.append(("time", " to ".join(times), reason))
    return chosen


def unknown_words(text: TextFacts, start: Start) -> list[str]:
    """Return a warning if the vocabulary of the model lacks many words of the text."""
    if text.unknown <= MANY_UNKNOWN:
        return []
    problem = f"{start.name} lacks {text.unknown:.0%} of the words of the text"
    return [f"{problem}; start from a model of this language, or from scratch"]


def hours_of(seconds: float) -> str:
    """Return seconds as hours or minutes."""
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{math.ceil(seconds / 60)} min"


def step(steps: Sequence[tuple[float, Any]], value: float) -> Any:
    """Return the entry of the first limit that the value does not exceed."""
    return next(entry for limit, entry in steps if value <= limit)


def length_for(text: TextFacts, start: Start | None) -> tuple[int, int]:
    """Return the sequence length S and the number of masked positions P, of a new model without a start."""
    lengths = TABLE["length"]["lengths"]
    needed = 2 + text.long_document * text.pieces_per_word
    length = next((length for length in lengths if needed <= length), lengths[-1])
    positions = start.config.max_position_embeddings if start else MOST_POSITIONS
    length = min(length, positions)
    return length, math.ceil(mask_fraction(start) * length)


def mask_fraction(start: Start | None) -> float:
    """Return the fraction of the tokens that are masked."""
    origin = "model" if start else "scratch"
    return float(TABLE["masks"][origin])


def flops_of(config: BertConfig, length: int, predictions: int) -> int:
    """Return the operations of training on an example of pre-training."""
    return model_flops(config, PRETRAINING.last_blocks, BatchShape(1, length, predictions))


def _records(text: TextFacts, length: int) -> int:
    return max(1, round(text.trained * text.words * text.pieces_per_word / (FILLED * length)))


def new_model(
    text: TextFacts, machine: Machine, seconds: float, warnings: list[str]
) -> tuple[Sequence[Any], BertConfig]:
    """Return the size to train from scratch (name, layers, width, rate), and its shape.

    The largest model that reads enough tokens for its weights; the smallest model, with a warning, if none does.
    """
    pieces = step(TABLE["vocabulary"]["pieces"], text.words)
    length, predictions = length_for(text, None)
    epochs = TABLE["epochs"]["scratch"]
    # Tokens that all epochs read; `fitting` are those for which the hours suffice.
    available = epochs * _records(text, length) * FILLED * length
    # From the largest; after the loop `size` and `config` are the smallest.
    for size in reversed(TABLE["size"]["sizes"]):
        _, layers, width, _ = size
        config = ModernBertConfig(
            vocab_size=pieces,
            hidden_size=width,
            num_hidden_layers=layers,
            # Heads of 64 values, as in BERT of every size.
            num_attention_heads=width // 64,
            # With the gate, products of 13 times width x width in a layer; BERT's four times as wide inner layer has
            # 12.
            intermediate_size=3 * width,
            max_position_embeddings=MOST_POSITIONS,
            initializer_range=step(TABLE["architecture"]["deviations"], width),
        )
        fitting = machine.flops * seconds / flops_of(config, length, predictions) * FILLED * length
        needed = TABLE["size"]["tokens"] * layers * config.layer_matrices
        if min(available, fitting) >= needed:
            return size, config
    language = next(iter(text.languages), "en")
    name = "bert-base-multilingual-cased"
    if language == "en":
        name = "bert-base-uncased"
    remedy = f"continue from a model with --from {name}"
    if available < needed:
        subject = f"{text.text_bytes / 1e6:.2g} MB of text is too little"
        verb = "its training part has"
        read = available / epochs  # as the table shows them
        needed /= epochs
    else:
        subject = f"{seconds / USABLE / 3600:.2g} hours are too short"
        verb = "they read"
        read = fitting
        remedy = f"raise --hours, or {remedy}"
    tokens = f"{read / 1e6:.2g} million tokens, and the smallest model needs {needed / 1e6:.2g}"
    warnings.append(f"{subject} to train from scratch: {verb} {tokens} million; {remedy}")
    return size, config


def _epochs(chosen: Recipe, records: int, seconds_each: float, seconds: float) -> tuple[float, int]:
    """Return the epochs of masked-LM training that fit, and all of them, at `seconds_each` seconds for a record."""
    rule = TABLE["epochs"]
    fitting = seconds / seconds_each
    complete = rule["scratch"]
    if chosen.start is not None:
        enough = math.ceil(rule["updates"] * TABLE["batch"]["batches"][-1] / records)
        complete = max(rule["model"], min(rule["most"], enough))
    least = min(LEAST_EXAMPLES, records * complete)
    if fitting < least:
        needed = least * seconds_each / USABLE / 3600
        problem = f"is time for {fitting:,.0f} examples on this machine, too few to learn from"
        remedy = f"use --hours {math.ceil(10 * needed) / 10:g} or more"
        if chosen.start is not None:
            remedy += ", or --from a smaller model"
        if chosen.machine.is_timed:
            remedy += "; if the machine was busy, start again or pass --speed with its examples/s"
        chosen.refusal = ConfigError("hours (--hours)", problem, remedy)
        fitting = least
    epochs = min(float(complete), float(f"{fitting / records:.2g}"))
    # A new model without a warning reads enough tokens, in few epochs of much text too.
    needed_epochs = LITTLE_TIME * complete if chosen.start or chosen.warnings else 1
    if chosen.refusal is None and epochs < needed_epochs:
        hours = seconds / USABLE / 3600
        needed = complete * records * seconds_each / USABLE / 3600
        problem = f"--hours {float(f'{hours:.3g}'):g} is enough for {epochs:g} of {complete} epochs"
        remedy = f"raise --hours to {math.ceil(needed)}"
        if chosen.start is None and not chosen.warnings:
            remedy = "use a part of the text; with more hours the model is larger"
        chosen.warnings.append(f"{problem}; {remedy}")
    return epochs, complete


def _add_masked_lm(chosen: Recipe, seconds: float, rate: float) -> None:
    """Add the training in so many seconds: its rows of the table, its duration and its config."""
    machine = chosen.machine
    length, predictions = length_for(chosen.text, chosen.start)
    records = _records(chosen.text, length)
    seconds_each = flops_of(chosen.model, length, predictions) / machine.flops
    epochs, complete = _epochs(chosen, records, seconds_each, seconds)
    examples = math.ceil(epochs * records)
    sizes = TABLE["batch"]["batches"]
    origin = "model" if chosen.start else "scratch"
    least = TABLE["batch"][origin]
    global_batch = batch_of(next((n for n in sizes if examples >= least * n), sizes[-1]), machine)
    batch = math.prod(global_batch.values())
    updates = math.ceil(examples / batch)
    warmup = TABLE["warm-up"]["fraction"]
    decay = TABLE["decay"]["fraction"]
    if chosen.start is not None:
        decay = None
    _add_model(chosen)
    tokens = float(f"{records * FILLED * length:.2g}")
    chosen.add_row("length", f"{length}: about {records:,} training examples, {tokens:,.0f} tokens")
    reason = TABLE["epochs"]["source"]
    if chosen.refusal is not None:
        reason = "the fewest examples that teach a model"
    elif epochs != complete:
        reason = f"what fits in the hours, of {complete} ({reason})"
    chosen.rows.append(("epochs", f"{epochs:g}, {examples:,} examples", reason))
    chosen.add_row("batch", f"{batch}, {count(updates, 'update')}")
    chosen.add_row("learning rate", f"{rate:g}")
    chosen.add_row("warm-up", f"{warmup:.0%}")
    if decay:
        chosen.add_row("decay", f"the last {decay:.0%}")
    chosen.add_row("masks", f"{predictions} of {length}")
    chosen.add_row("precision", machine.precision)
    chosen.seconds = examples * seconds_each
    chosen.config = {
        **_describe_run(chosen),
        "max_seq_length": length,
        "max_predictions_per_seq": predictions,
        "num_epochs": epochs,
        "global_batch": global_batch,
        "optimizer_opts": optimizer(rate, warmup, machine.precision, decay),
        "evaluate_every_steps": max(1, updates // EVALUATIONS),
        "evaluation_examples": EVALUATION_EXAMPLES,
        "log_every_steps": max(1, updates // LOG_LINES),
        "precision": machine.precision,
    }
    if machine.devices > 1:
        chosen.config["parallel"] = {"layout": "auto"}


def _add_model(chosen: Recipe) -> None:
    """Add the rows of the model and, for one with a start, of the pieces that its vocabulary gets."""
    text = chosen.text
    shape = chosen.model
    shown = f"{chosen.name}, {count(shape.num_hidden_layers, 'layer')} of {shape.hidden_size}"
    if chosen.start is None:
        chosen.add_row("size", shown)
        chosen.add_row("vocabulary", f"{shape.vocab_size:,} new pieces")
        return
    chosen.rows.append(("model", shown, "--from"))
    rule = TABLE["new pieces"]
    if text.pieces_per_word >= rule["pieces_per_word"] and text.words >= rule["words"]:
        chosen.new_pieces = step(rule["pieces"], text.words)
        chosen.add_row("new pieces", f"{chosen.new_pieces:,}")


def _describe_run(chosen: Recipe) -> JSONObject:
    """Return the settings that say what the run is, where its files are and what it starts from."""
    out = chosen.out
    described: JSONObject = {
        "about": {
            "what": f"A masked LM of the text, {chosen.name}; README.md beside this file has the reason of each value.",
            "command": f"bert pretrain --config {out / 'pretrain'}.json",
            "expect": f"About {hours_of(chosen.seconds)} on the machine where it was written.",
        },
        "dataset_dir": str(out / "records/train"),
        "validation_dir": str(out / "records/held_out"),
        "save_ckpt_path": str(out / "run"),
    }
    if chosen.start is not None:
        return {**described, "pretrained_ckpt_path": chosen.name}
    shape = chosen.model.model_dump(exclude={"vocab_size"})
    return {**described, "bert_config": shape, "masking": {"probability": mask_fraction(None)}}


def fast_micro_batch(kind: str) -> int:
    """Return the examples of a micro-batch that is fast on a kind of device."""
    return MICRO_BATCH["CPU" if kind == "CPU" else "GPU"]


def batch_of(batch: int, machine: Machine) -> dict[str, int]:
    """Return the settings of a batch, in micro-batches that are fast and fit into any device.

    Where the devices do not divide it, the batch may become smaller.
    """
    fast = fast_micro_batch(machine.kind)
    micro_batch = min(fast, max(1, batch // machine.devices))
    return {"micro_batch_size": micro_batch, "grad_acc_steps_per_replica": batch // micro_batch}


def optimizer(rate: float, warmup: float, precision: str, decay: float | None = None) -> JSONObject:
    """Return the settings of AdamW, whose rate falls linearly or over the last fraction `decay` of the updates."""
    name = "wsd" if decay else "up_down"
    schedule: JSONObject = {"schedule_name": name, "max_learning_rate": rate, "warmup_frac": warmup}
    if decay:
        schedule["decay_frac"] = decay
    options: JSONObject = {"name": "AdamW", "max_gradient_norm": 1.0}
    if precision == "mixed_float16":
        options["loss_scaling"] = "dynamic"
    return {**options, "learning_rate": schedule}
