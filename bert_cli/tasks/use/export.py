"""`bert export`: a model in the form of another runtime, opened there and compared before it counts.

Each form is written beside OUT, loaded again by the runtime it is for, and asked what the model here
is asked: synthetic examples of several numbers and lengths, with padding. Only when all outputs agree
does the folder get its name; an export that is killed or that differs leaves nothing behind.
"""

import importlib.util
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import tensorflow as tf

from bert_cli.config.tools import ExportSettings
from bert_cli.data.records.tokenizer import read_tokenizer
from bert_cli.errors import CheckpointError, ConfigError, needs_extra
from bert_cli.files import fsync_paths
from bert_cli.tasks.run import start
from bert_cli.tasks.use import runtimes
from bert_cli.tasks.use.model import open_model, task_of
from bert_cli.train.metrics import print_line

# Format -> the packages that it needs beyond what every command has.
NEEDS = {
    "hf": ("torch",),
    "saved-model": (),
    "tflite": (),
    "onnx": ("torch", "onnx", "onnxscript", "onnxruntime"),
}
# Tasks whose outputs print_line something about a whole text.
READ_TEXTS = ("text-classification", "embed")
PARTIAL = ".partial_"
LARGEST_DIFFERENCE = 1e-4
"""Of an output in float32, or of the largest one where that is more than 1."""
SHAPES = ((1, 7), (3, 16))
"""Examples and places that are compared: other numbers of both, so that neither can have been fixed."""


def run(settings: ExportSettings) -> None:
    """Write the model in the asked form, compare it, and give the folder its name.

    Raises ConfigError for a folder in use, a package that is missing or a model that is not known
    here, CheckpointError when there is no model or its export says something else.
    """
    needs = [*NEEDS[settings.format], *(["tensorflow_text"] if settings.texts else [])]
    missing = [name for name in needs if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"format ({settings.format}): {', '.join(missing)} is not installed; {needs_extra('export')}"
        )
    out = settings.out.expanduser()
    _refuse_in_use(out)
    _stay_on_the_cpu()
    source = start.find_source(settings.model, "MODEL")
    task = task_of(source, None)
    if settings.texts and task not in READ_TEXTS:
        raise ConfigError(
            f"texts ({task}): its outputs belong to tokens, which a string does not show; leave it out"
        )
    model = open_model(source, "encoder" if task == "embed" else task)
    partial = out.parent / f"{PARTIAL}{out.name}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        print_line(f"export: {source.folder} ({source.architecture}) as {settings.format}")
        columns_of_texts = _columns_of_texts(source) if settings.texts else None
        served = runtimes.Served(model, columns_of_texts)
        ask = runtimes.WRITERS[settings.format](served, partial)
        difference = _compare(served, ask, str(out))
        # The name must not stand for bytes that a power cut takes away.
        fsync_paths([*partial.rglob("*"), partial])
        # Takes the place of an empty folder too.
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    print_line(
        f"export: {out}, {size / 1e6:.1f} MB; loaded again, its outputs differ by at most {difference:.1e} "
        f"on {len(SHAPES)} synthetic batches; more than {model.config.max_position_embeddings:,} tokens are an error"
    )


def _columns_of_texts(source: start.Source) -> Callable[..., dict[str, tf.Tensor]]:
    """The tokenizer in TensorFlow, found to be the same."""
    from bert_cli.tasks.use import strings

    tokenizer, places = read_tokenizer(source.folder), source.config.max_position_embeddings
    columns = strings.columns_of_texts(tokenizer, places)
    strings.compare(tokenizer, columns, places)
    return columns


def _refuse_in_use(out: Path) -> None:
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists() or out.is_symlink():
        raise ConfigError(f"out ({out}): exists and is not an empty folder; give a new one")


def _stay_on_the_cpu() -> None:
    """A conversion has nothing to gain from a GPU, whose products would differ in the third digit."""
    # TensorFlow refuses where it runs already, in a process that has done something before.
    with suppress(RuntimeError):
        tf.config.set_visible_devices([], "GPU")


def _compare(ours: runtimes.Served, ask: runtimes.Ask, where: str) -> float:
    """The largest difference over all outputs and batches. CheckpointError when it is too large."""
    config, draw = ours.model.config, np.random.default_rng(0)
    largest = relative = 0.0
    for examples, places in SHAPES:
        places = min(places, config.max_position_embeddings)
        lengths = draw.integers(1, places + 1, examples)
        lengths[0] = places
        mask = (np.arange(places) < lengths[:, None]).astype(np.int32)
        ids = draw.integers(0, config.vocab_size, (examples, places), dtype=np.int32) * mask
        segments = draw.integers(0, config.type_vocab_size, (examples, places), dtype=np.int32)
        expected = ours.ask(ids, mask, segments * mask)
        found = ask(ids, mask, segments * mask)
        for name, values in expected.items():
            if name not in found or found[name].shape != values.shape:
                there = {other: array.shape for other, array in found.items()}
                raise CheckpointError(
                    f"{where}: the export gives {there}, the model {name} {values.shape}; it was removed"
                )
            difference = float(np.abs(found[name] - values).max())
            # A NaN stays one, whatever comes behind it.
            largest = float(np.maximum(largest, difference))
            scale = max(1.0, float(np.abs(values).max()))
            relative = float(np.maximum(relative, difference / scale))
    if not relative <= LARGEST_DIFFERENCE:
        raise CheckpointError(
            f"{where}: the export's outputs differ from the model's by {largest:.1e}, which is more than "
            "rounding; it was removed"
        )
    return largest
