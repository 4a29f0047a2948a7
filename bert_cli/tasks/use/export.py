"""`bert export`: a model for another runtime, opened there and compared before it gets its name.

The export is written next to OUT, loaded by its own runtime, and run on synthetic examples of several lengths
with padding. Only when all outputs agree with the model's is the folder renamed to OUT; an export that is
killed or differs leaves no folder of that name.
"""

import importlib.util
import os
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import tensorflow as tf

from bert_cli.config.finetune import ExportSettings
from bert_cli.data.records.tokenizer import read_tokenizer
from bert_cli.errors import CheckpointError, ConfigError, install_command
from bert_cli.files import fsync_paths
from bert_cli.tasks.run import start
from bert_cli.tasks.use import runtimes
from bert_cli.tasks.use.model import open_model, task_of
from bert_cli.train.metrics import print_line

NEEDS = {
    "hf": ("torch",),
    "saved-model": (),
    "tflite": (),
    "onnx": ("torch", "onnx", "onnxscript", "onnxruntime"),
}
"""Format -> the packages of the extra that it needs."""
TEXT_TASKS = ("text-classification", "embed")
"""Tasks whose outputs are of a text, not of tokens."""
PARTIAL = ".partial_"
LARGEST_DIFFERENCE = 1e-4
"""Of an output in float32, relative to the largest one where that is more than 1."""
SHAPES = ((1, 7), (3, 16))
"""Examples and positions that are compared; both vary, so that neither can have been fixed."""


def run(settings: ExportSettings) -> None:
    """Write the model in the requested format, compare it, and give the folder its name.

    ConfigError for a folder in use, a missing package or an unsupported model, CheckpointError when there is
    no model or its export gives other outputs.
    """
    _check_packages(settings)
    out = settings.out.expanduser()
    _check_unused(out)
    _stay_on_the_cpu()
    source = start.find_source(settings.model, "MODEL")
    task = task_of(source, None)
    if settings.texts and task not in TEXT_TASKS:
        problem = "its outputs are of tokens, which a string does not show"
        raise ConfigError(f"texts ({task})", problem, "leave it out")
    model = open_model(source, "encoder" if task == "embed" else task)
    partial = out.parent / f"{PARTIAL}{out.name}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        print_line(f"export: {source.folder} ({source.architecture}) as {settings.format}")
        served = runtimes.Served(model, _encoder(source) if settings.texts else None)
        exported = runtimes.WRITERS[settings.format](served, partial)
        difference = _compare(served, exported, str(out))
        # On the disk before the rename, so that a power cut cannot leave a damaged export.
        fsync_paths([*partial.rglob("*"), partial])
        # Replaces an empty folder too.
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    print_line(
        f"export: {out}, {size / 1e6:.1f} MB; loaded again, its outputs differ by at most {difference:.1e} "
        f"on {len(SHAPES)} synthetic batches; more than {model.config.max_position_embeddings:,} tokens are an error"
    )


def _check_packages(settings: ExportSettings) -> None:
    needs = [*NEEDS[settings.format], *(["tensorflow_text"] if settings.texts else [])]
    missing = [name for name in needs if importlib.util.find_spec(name) is None]
    if missing:
        purpose = " (PyTorch opens the written files)" if settings.format == "hf" else ""
        are = f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not installed"
        problem = f"needs the extra 'export'{purpose}, but {are}"
        raise ConfigError(f"format ({settings.format})", problem, install_command("export"))


def _encoder(source: start.Source) -> runtimes.Encoder:
    """Return the tokenizer in TensorFlow, after comparing it with the original."""
    tokenizer, length = read_tokenizer(source.folder), source.config.max_position_embeddings
    encoder = runtimes.text_encoder(tokenizer, length)
    runtimes.compare_encoders(tokenizer, encoder, length)
    return encoder


def _check_unused(out: Path) -> None:
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists() or out.is_symlink():
        raise ConfigError(f"out ({out})", "exists and is not an empty folder", "give a new one")


def _stay_on_the_cpu() -> None:
    """Hide the GPU: it cannot speed up a conversion, and its products differ in the third digit."""
    # RuntimeError: TensorFlow is initialized already.
    with suppress(RuntimeError):
        tf.config.set_visible_devices([], "GPU")


def _compare(served: runtimes.Served, exported: runtimes.Predict, where: str) -> float:
    """Return the largest difference over all outputs and batches. CheckpointError if it is too large."""
    config, draw = served.model.config, np.random.default_rng(0)
    largest = relative = 0.0
    for examples, length in SHAPES:
        length = min(length, config.max_position_embeddings)
        lengths = draw.integers(1, length + 1, examples)
        lengths[0] = length
        mask = (np.arange(length) < lengths[:, None]).astype(np.int32)
        ids = draw.integers(0, config.vocab_size, (examples, length), dtype=np.int32) * mask
        segments = draw.integers(0, config.type_vocab_size, (examples, length), dtype=np.int32)
        columns = (ids, mask, segments * mask)
        expected, outputs = served.predict(*columns), exported(*columns)
        for name, values in expected.items():
            if name not in outputs or outputs[name].shape != values.shape:
                shapes = {other: array.shape for other, array in outputs.items()}
                problem = f"the export's outputs are {shapes}, the model's {name} {values.shape}"
                raise CheckpointError(where, problem, "it was removed")
            difference = float(np.abs(outputs[name] - values).max())
            # np.maximum, because a NaN must not be lost.
            largest = float(np.maximum(largest, difference))
            scale = max(1.0, float(np.abs(values).max()))
            relative = float(np.maximum(relative, difference / scale))
    if not relative <= LARGEST_DIFFERENCE:
        problem = (
            f"the export's outputs differ from the model's by {largest:.1e}, more than rounding"
        )
        raise CheckpointError(where, problem, "it was removed")
    return largest
