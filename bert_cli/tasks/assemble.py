"""Wiring: settings become a model, an optimizer, an engine, a reader and a place to start from.

Only this floor holds data, model, optimizer and loop in one hand. Each function builds one thing;
the tasks choose which. Where a run starts is one ordered list, and the choice is printed: a whole
checkpoint of this run, else the weights it was told to start from, else new weights from the seed.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from keras import ops

from bert_cli.config.plan import Plan
from bert_cli.config.schema import BertConfig, OptimizerOpts, PretrainSettings
from bert_cli.data.ledger import versions_of
from bert_cli.data.reader import GeneratedReader, Reader
from bert_cli.errors import CheckpointError, ConfigError
from bert_cli.model import hf
from bert_cli.model.bert import build_blocks, named_weights
from bert_cli.optim import adam
from bert_cli.optim.loss_scale import first_loss_scale
from bert_cli.optim.schedule import learning_rate
from bert_cli.parallel.engine import Engine
from bert_cli.train import checkpoint
from bert_cli.train.step import State, Step, Update, means, new_moments

# What a corpus folder carries so that a checkpoint can carry it on.
TOKENIZER_FILES = ("vocab.txt", "tokenizer_config.json")
PARTS = ("tensorflow", "keras", "numpy", "tokenizers", "safetensors")


@dataclass(frozen=True)
class Model:
    """The ordered blocks of a model and its weights by name."""

    body: list[Any]
    head: Any
    weights: Mapping[str, Any]


def open_reader(settings: PretrainSettings, examples_per_step: int) -> Reader | GeneratedReader:
    """The run's examples. Raises ConfigError when none are named, DataError when they do not fit."""
    if settings.generated_dataset:
        return GeneratedReader(
            vocab_size=settings.bert_config.vocab_size,
            seed=settings.seed,
            examples_per_step=examples_per_step,
            micro_batch_size=settings.global_batch.micro_batch_size,
            sequence_length=settings.max_seq_length,
            predictions=settings.max_predictions_per_seq,
        )
    if settings.dataset_dir is None:
        raise ConfigError(
            "dataset_dir: is not given; give --dataset-dir, a folder of records that `bert tokenize` "
            "made, or --generated-dataset for made-up examples"
        )
    return open_corpus(settings.dataset_dir, settings, examples_per_step)


def open_corpus(folder: Path, settings: PretrainSettings, examples_per_step: int) -> Reader:
    """A reader of a folder of records whose vocabulary is the model's."""
    reader = Reader(
        folder,
        seed=settings.seed,
        examples_per_step=examples_per_step,
        micro_batch_size=settings.global_batch.micro_batch_size,
        sequence_length=settings.max_seq_length,
        predictions=settings.max_predictions_per_seq,
    )
    words = reader.corpus["vocab_size"]
    if words != settings.bert_config.vocab_size:
        raise ConfigError(
            f"bert_config.vocab_size ({settings.bert_config.vocab_size}): the corpus in {folder} has a "
            f"vocabulary of {words}; give --bert-config.vocab-size {words}"
        )
    return reader


def open_held_out(settings: PretrainSettings) -> Reader | None:
    """The examples to evaluate on, when there are any."""
    if settings.validation_dir is None:
        return None
    return open_corpus(settings.validation_dir, settings, settings.global_batch.micro_batch_size)


def build_model(settings: PretrainSettings) -> Model:
    """The blocks of a pre-training model with first values from the seed."""
    blocks = build_blocks(settings.bert_config, seed=settings.seed, policy=settings.precision)
    *body, head = [block for _, block in blocks]
    return Model(body, head, named_weights(blocks))


def build_state(model: Model, options: OptimizerOpts) -> State:
    """The four things at step 0."""
    return State(model.weights, new_moments(model.weights), first_loss_scale(options.loss_scaling))


def build_engine(model: Model, settings: PretrainSettings) -> Engine:
    """The engine of the 1 x 1 mesh."""
    return Engine(
        model.body,
        model.head,
        model.weights,
        seed=settings.seed,
        recompute=settings.parallel.recompute,
    )


def build_step(
    engine: Engine,
    state: State,
    settings: PretrainSettings,
    plan: Plan,
    asked_to_stop: Callable[[], bool],
) -> Step:
    """One update with the optimizer and schedule of the settings."""
    options = settings.optimizer_opts
    rate = learning_rate(
        options.learning_rate.schedule_name,
        plan.peak_learning_rate,
        plan.warmup_steps,
        plan.total_steps,
    )
    return Step(
        engine,
        state,
        update=build_update(options, list(state.weights), settings.seed),
        learning_rate=rate,
        max_gradient_norm=options.max_gradient_norm,
        max_skipped_steps=settings.max_skipped_steps,
        asked_to_stop=asked_to_stop,
    )


def build_update(options: OptimizerOpts, names: list[str], seed: int) -> Update:
    """The optimizer as a function of one weight, with its rule and its rounding."""
    table = adam.patterns(options.name, options.no_weight_decay, options.no_layer_adaptation)
    rules = adam.assign(names, table)
    numbers = adam.Adam(
        beta_1=options.beta_1,
        beta_2=options.beta_2,
        epsilon=options.epsilon,
        weight_decay_rate=options.weight_decay_rate,
    )

    def update(
        name: str,
        weight: Any,
        gradient: Any,
        first: Any,
        second: Any,
        before: Any,
        rate: Any,
        step: Any,
    ) -> tuple[Any, Any, Any]:
        moved, first, second = adam.update(
            weight, gradient, first, second, before, rate, adam=numbers, rule=rules[name]
        )
        if options.stochastic_rounding:
            # Integer bits from (seed and weight, step): no generator whose state a checkpoint lacks.
            key = tf.stack(
                [tf.constant((seed * 1000003 + names.index(name)) % 2**31, tf.int32), step]
            )
            bits = tf.random.stateless_uniform(
                moved.shape, key, minval=None, maxval=None, dtype=tf.uint32, alg="philox"
            )
            return adam.round_stochastically(moved, bits, "float16"), first, second
        return ops.cast(moved, weight.dtype), first, second

    return update


def disk_format(settings: PretrainSettings, model: Model) -> checkpoint.Format:
    """How this model is written and read: Hugging Face's names, config and tokenizer files."""
    shapes = _shapes(model.weights)
    folder = settings.dataset_dir if not settings.generated_dataset else None
    files = (
        [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()] if folder else []
    )
    return checkpoint.Format(
        to_disk=hf.to_hf,
        from_disk=lambda tensors: hf.from_hf(tensors, shapes)[0],
        config=hf.hf_config(
            settings.bert_config, dtype="float16" if settings.precision == "float16" else "float32"
        ),
        tokenizer_files=files,
    )


def start(
    settings: PretrainSettings, state: State, form: checkpoint.Format, fixed: Mapping[str, Any]
) -> str:
    """Put the first values into the state; the sentence that says where they came from.

    Raises CheckpointError when a checkpoint does not fit.
    """
    folder = settings.save_ckpt_path
    found = checkpoint.whole_checkpoints(folder) if folder is not None else []
    if found:
        checkpoint.resume(found[-1], state, form, fixed)
        return f"continues from {found[-1]} (step {state.step:,})"
    if settings.pretrained_ckpt_path is not None:
        return start_from(settings.pretrained_ckpt_path, settings.bert_config, state)
    return f"starts with new weights from seed {settings.seed}"


def start_from(source: str, config: BertConfig, state: State) -> str:
    """Take the weights of a Hugging Face model directory or name; the optimizer stays fresh."""
    folder = _model_folder(source)
    described = folder / "config.json"
    try:
        found = json.loads(described.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{described}: cannot be read ({error}); a model's folder has its config.json and {checkpoint.MODEL}"
        ) from error
    hf.check_hf_config(found, config, where=str(described))
    tensors = checkpoint.read_tensors(folder / checkpoint.MODEL)
    shapes = _shapes(state.weights)
    values, absent = hf.from_hf(tensors, shapes, where=str(folder / checkpoint.MODEL))
    for name, value in values.items():
        state.weights[name].assign(value)
    told = f"starts from the weights in {folder} with a fresh optimizer"
    return told + (f"; new from the seed: {', '.join(absent)}" if absent else "")


def _shapes(weights: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in weights.items()}


def _model_folder(source: str) -> Path:
    path = Path(source)
    if path.is_dir():
        # A run's folder stands for its newest checkpoint.
        whole = checkpoint.whole_checkpoints(path)
        return whole[-1] if whole else path
    if path.exists() or source.startswith((".", "/", "~")):
        raise CheckpointError(
            f"--pretrained-ckpt-path ({source}): is no folder; give a checkpoint or a model's name"
        )
    # 1 s to import, so only where a model has to come from the hub.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=["*.json", "*.txt", checkpoint.MODEL]))
    except Exception as error:  # the hub's client raises a dozen kinds; all mean the same here
        raise CheckpointError(
            f"--pretrained-ckpt-path ({source}): is neither a folder nor to be had from the hub "
            f"({type(error).__name__}); check the name and the network"
        ) from error


def versions() -> dict[str, str]:
    """Versions of the parts that decide the numbers, for state.json."""
    return versions_of(PARTS)


def evaluate(
    engine: Engine, reader: Reader, examples: int, micro_batch_size: int
) -> dict[str, float]:
    """Means over the first examples of a held-out corpus, without dropout."""
    total = min(examples, len(reader))
    sums: dict[str, Any] = {}
    masked = 0.0
    for first in range(0, total, micro_batch_size):
        rows = reader.rows(np.arange(first, min(total, first + micro_batch_size)))
        masked += float(rows["masked_lm_weights"].sum())
        for name, value in engine.evaluate(rows).items():
            sums[name] = sums.get(name, 0.0) + float(value)
    counted = means(sums, {"masked": max(masked, 1.0), "examples": float(total)})
    return {f"validation_{name}": value for name, value in counted.items()}
