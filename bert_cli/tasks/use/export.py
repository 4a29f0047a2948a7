"""`bert export`: write a model for another runtime, open it there and compare it before it gets its name.

Each writer fills a folder beside OUT and returns the model loaded from it. The folder is renamed to OUT only if all
outputs on synthetic examples agree. All formats take transformers' inputs [B, S] (`inputs_of`) and return the outputs
of its class of the architecture, by its names. SavedModel and TFLite are made from our blocks, ONNX by PyTorch from
transformers' model of the same files.

Shapes: B examples, S positions, D hidden size, V vocabulary size.
"""

import logging
import shlex
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from bert_cli.arrays import Floats32, Ints32
from bert_cli.config.use import ExportSettings
from bert_cli.disk import size_of
from bert_cli.errors import CheckpointError, ConfigError, install_command
from bert_cli.facts.architectures import ARCHITECTURES
from bert_cli.facts.bert import BertConfig
from bert_cli.facts.heads import POOL
from bert_cli.facts.modernbert import MAX_SCORED, QUERIES
from bert_cli.files import atomic_folder, check_new_folder
from bert_cli.model.build import named_weights
from bert_cli.model.names import hf, published
from bert_cli.processes import print_line
from bert_cli.tasks.model import models, opened
from bert_cli.tasks.model.runtimes import GRAPH, MADE_FROM, made_of, run_graph
from bert_cli.tasks.use import export_card, int8, static
from bert_cli.tasks.use.predict import trained_columns
from bert_cli.train import checkpoint

Outputs = dict[str, Floats32]
# `INPUTS` [B, S] int32 by name -> outputs by name.
Predict = Callable[[Mapping[str, Any]], Outputs]
# Largest difference of an output in float32, relative to the largest output if that is above 1.
LARGEST_DIFFERENCE = 1e-4
# Limit of the largest output in this comparison: logits and hidden states of a sound model are below 100.
LARGEST_OUTPUT = 1e3
# Examples and positions of the compared batches; both vary, to detect an export with a fixed size. The last has more
# positions than are scored together.
SHAPES = ((1, 7), (3, 16), (1, QUERIES + 100))
# The same for an int8 export, unless it is compared on texts.
INT8_SHAPES = ((int8.BATCH, 32),) * 16


def run(settings: ExportSettings) -> None:
    """Write the model in the requested format, compare it, and give the folder its name.

    Raises ConfigError for a folder in use, a missing package or an unsupported model, and CheckpointError if there is
    no model or if its export gives other outputs.
    """
    check_new_folder(settings.out)
    if settings.format == "static":
        static.run(settings)
        return
    missing = [name for name in FORMATS[settings.format][1] if find_spec(name) is None]
    if missing:
        problem = f"needs the extra 'export', but lacks {' and '.join(missing)}"
        raise ConfigError(f"format ({settings.format})", problem, install_command("export"))
    # RuntimeError: TensorFlow is initialized already. A GPU's products differ in the third digit.
    with suppress(RuntimeError):
        tf.config.set_visible_devices([], "GPU")
    source = models.as_trained(models.find_source(settings.model, "MODEL"))
    positions = source.config.max_position_embeddings
    if settings.format == "onnx" and positions > MAX_SCORED:
        problem = (
            f"an ONNX graph scores all pairs of tokens, of at most {MAX_SCORED:,}, "
            f"and the model has {positions:,} positions"
        )
        remedy = (
            "export it as hf, or set max_position_embeddings to 2048 in the config.json of that export "
            "and export it from there"
        )
        raise ConfigError("format (onnx)", problem, remedy)
    _write(settings, source)
    if settings.format == "hf":
        out = shlex.quote(str(settings.out))
        print_line(f"export: to publish it, run hf upload OWNER/NAME {out}")


def _write(settings: ExportSettings, source: models.Source) -> None:
    out = settings.out
    task = opened.task_of(source, None)
    pool = ARCHITECTURES[source.config.architecture].last_blocks[POOL.name]
    texts = int8.read_texts(settings.compare_on, source, task)
    text_columns = trained_columns(source)
    if text_columns:
        source = replace(source, described={**source.described, "text_column": text_columns})
    without_head = (pool.name,) if pool.hf_names else ()
    model = opened.open_model(source, task, without_head=without_head)
    with atomic_folder(out) as folder:
        print_line(f"export: {source.folder} ({source.architecture}) as {settings.format}")
        served = Served(model)
        write, _ = FORMATS[settings.format]
        exported = write(served, folder)
        difference = relative = 0.0
        for columns in _synthetic_batches(source.config, SHAPES):
            mask = columns["attention_mask"]
            outputs = exported(columns)
            for name, values in served.predict(columns).items():
                if name not in outputs or outputs[name].shape != values.shape:
                    problem = f"the export lacks the model's output {name} {values.shape}"
                    raise CheckpointError(str(out), problem, "the export was removed")
                largest = int8.largest_difference(outputs[name], values, mask)
                # np.maximum, because a NaN must not be lost.
                difference = float(np.maximum(difference, largest))
                scale = float(np.clip(np.abs(values).max(), 1.0, LARGEST_OUTPUT))
                relative = float(np.maximum(relative, largest / scale))
        if not relative <= LARGEST_DIFFERENCE:
            problem = (
                f"the outputs of export and model differ by {difference:.1e}, more than by rounding"
            )
            raise CheckpointError(str(out), problem, "the export was removed")
        notes = []
        agrees = True
        if settings.precision == "int8":
            path = folder / GRAPH
            with _without_log_noise():
                int8.quantize(path)
            batches = int8.read_batches(texts, model, task)
            if not texts:
                batches = _synthetic_batches(source.config, INT8_SHAPES)
            note, agrees = int8.compare(model, batches, served.predict, run_graph(path))
            notes.append(note)
            print_line(f"export: {note}")
        if settings.format == "onnx" and agrees and source.weights.is_file():
            made_from = f"{made_of(source)} {settings.precision}"
            (folder / MADE_FROM).write_text(made_from, encoding="utf-8")
        export_card.write_card(settings, model, folder, notes)
    size = size_of(filter(Path.is_file, out.rglob("*")))
    print_line(
        f"export: {out}, {size / 1e6:.1f} MB; in float32 its outputs differ by at most {difference:.1e}; "
        f"a text may have at most {source.config.max_position_embeddings:,} tokens"
    )


def _synthetic_batches(
    config: BertConfig, shapes: Iterable[tuple[int, int]]
) -> Iterator[dict[str, Ints32]]:
    """Yield columns of random token ids, for each number of examples and positions."""
    # The same batches each time, so that a difference can be reproduced.
    draw = np.random.default_rng(0)
    for examples, length in shapes:
        length = min(length, config.max_position_embeddings)
        lengths = draw.integers(1, length + 1, examples)
        # At least one example without padding.
        lengths[0] = length
        mask = (np.arange(length) < lengths[:, None]).astype(np.int32)
        ids = draw.integers(0, config.vocab_size, (examples, length), dtype=np.int32) * mask
        segments = draw.integers(0, config.type_vocab_size, (examples, length), dtype=np.int32)
        columns = dict(zip(opened.INPUTS, (ids, mask, segments * mask), strict=True))
        yield {name: columns[name] for name in opened.inputs_of(config)}


class Served(tf.Module):
    """The model with transformers' inputs and outputs, in the form that TensorFlow saves."""

    def __init__(self, model: opened.OpenedModel) -> None:
        super().__init__(name="bert")
        self.model = model
        self.weights = [weight.value for weight in named_weights(model.blocks).values()]
        inputs = opened.inputs_of(model.source.config)
        shape = [tf.TensorSpec([None, None], tf.int32, name=name) for name in inputs]
        # A partial: TensorFlow would count the methods of two objects as one function that is traced again and again.
        self.serve = tf.function(partial(self._serve), input_signature=shape, autograph=False)

    def predict(self, columns: Mapping[str, Any]) -> Outputs:
        """Return the outputs by name for columns in the order of `inputs_of`."""
        return {name: value.numpy() for name, value in self.serve(*columns.values()).items()}

    def _serve(
        self, input_ids: Any, attention_mask: Any, token_type_ids: Any = None
    ) -> dict[str, Any]:
        """Return the outputs. Raises an error for too many positions, which a GPU would not detect."""
        limit = self.model.source.config.max_position_embeddings
        message = f"input_ids: has more tokens than the model's {limit} positions; cut the texts"
        check = tf.debugging.assert_less_equal(tf.shape(input_ids)[1], limit, message)
        with tf.control_dependencies([check]):
            input_ids = tf.identity(input_ids)
        if token_type_ids is None:
            token_type_ids = tf.zeros_like(input_ids)
        columns = {
            "input_ids": input_ids,
            "input_mask": attention_mask,
            "segment_ids": token_type_ids,
        }
        *_, (name, last) = self.model.blocks
        if self.model.head is not None:
            # Every position as if it were masked.
            positions = tf.range(tf.shape(input_ids)[1]) + tf.zeros_like(input_ids)
            logits = self.model.logits({**columns, "masked_lm_positions": positions})
            outputs: dict[str, Any] = last.outputs(logits, self.model.architecture)
            return outputs
        outputs = {"last_hidden_state": self.model.hidden(columns)}
        if name == POOL.name and name not in self.model.new:
            first_B1D = outputs["last_hidden_state"][:, :1]
            outputs["pooler_output"] = last(first_B1D, columns, None)[:, 0]
        return outputs


# --- writers


def write_hf(served: Served, folder: Path) -> Predict:
    """Write config, weights and tokenizer, without a run's optimizer and state; opened by transformers."""
    model = _write_hf_files(served.model, folder)

    def predict(columns: Mapping[str, Any]) -> Outputs:
        import torch

        with torch.no_grad():
            outputs = model(**{name: torch.from_numpy(c).long() for name, c in columns.items()})
        return {name: values.numpy() for name, values in outputs.items()}

    return predict


def write_saved_model(served: Served, folder: Path) -> Predict:
    """Write a TensorFlow SavedModel with the signature `serving_default`."""
    tf.saved_model.save(served, str(folder), signatures={"serving_default": served.serve})
    opened.write_model_files(served.model.source, served.model.architecture, folder)
    loaded = tf.saved_model.load(str(folder))

    def predict(columns: Mapping[str, Any]) -> Outputs:
        inputs = {name: tf.constant(column) for name, column in columns.items()}
        outputs = loaded.signatures["serving_default"](**inputs)
        return {name: values.numpy() for name, values in outputs.items()}

    return predict


def write_tflite(served: Served, folder: Path) -> Predict:
    """Write a flat buffer of TensorFlow Lite (LiteRT), float32, with its own operators only."""
    concrete = served.serve.get_concrete_function()
    data = tf.lite.TFLiteConverter.from_concrete_functions([concrete], served).convert()
    (folder / "model.tflite").write_bytes(data)
    opened.write_model_files(served.model.source, served.model.architecture, folder)
    with warnings.catch_warnings():
        # TensorFlow warns that its interpreter will move to another package.
        warnings.simplefilter("ignore")
        interpreter = tf.lite.Interpreter(model_path=str(folder / "model.tflite"))
    return lambda columns: interpreter.get_signature_runner()(**columns)


def write_onnx(served: Served, folder: Path) -> Predict:
    """Write an ONNX graph of transformers' model; opened by ONNX Runtime."""
    import torch

    path = folder / GRAPH
    model = _write_hf_files(served.model, folder)
    outputs = list(served.serve.get_concrete_function().structured_outputs)
    inputs = opened.inputs_of(served.model.source.config)

    class Ordered(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *columns: Any) -> Any:
            values = self.model(**dict(zip(inputs, columns, strict=True)))
            return tuple(values[name] for name in outputs)

    # A tensor for each input: the exporter would merge inputs that are the same object.
    # Two examples: the exporter would take a size of 1 for a constant.
    example = tuple(torch.ones((2, 4), dtype=torch.int64) for _ in inputs)
    positions = served.model.source.config.max_position_embeddings
    batch = torch.export.Dim("batch", min=1)
    length = torch.export.Dim("length", min=1, max=positions)
    with _without_log_noise():
        torch.onnx.export(
            Ordered().eval(),
            example,
            str(path),
            input_names=inputs,
            output_names=outputs,
            dynamic_shapes=(({0: batch, 1: length},) * len(inputs),),
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    (folder / checkpoint.MODEL).unlink()  # The graph has the weights.
    return run_graph(path)


# Format -> its writer, and the packages of the extra that it needs.
FORMATS: Mapping[str, tuple[Callable[[Served, Path], Predict], Sequence[str]]] = {
    "hf": (write_hf, ("torch",)),
    "saved-model": (write_saved_model, ()),
    "tflite": (write_tflite, ()),
    "onnx": (write_onnx, ("torch", "onnx", "onnxscript", "onnxruntime")),
}


def _write_hf_files(model: opened.OpenedModel, folder: Path) -> Any:
    """Write a Hugging Face folder; return its model in PyTorch, float32."""
    import torch
    import transformers

    source = model.source
    weights = folder / checkpoint.MODEL
    is_renamed = source.stored.get("model_type") in published.TYPES
    if source.weights.name == checkpoint.MODEL and source.temperature == 1.0 and not is_renamed:
        shutil.copyfile(source.weights, weights)
    else:
        checkpoint.write_tensors(weights, source.tensors())
    opened.write_model_files(source, model.architecture, folder)
    with _without_log_noise():
        _, name = model.architecture.split("Bert")
        kind = f"AutoModel{name.removeprefix('Model')}"
        if model.head is not None and model.head.hf_modeling is not None:
            _, kind = model.head.hf_modeling
        is_own = bool(hf.class_files(source.config, model.head))
        options = {"dtype": torch.float32, "local_files_only": True, "trust_remote_code": is_own}
        opens = getattr(transformers, kind)
        return opens.from_pretrained(folder, attn_implementation="eager", **options).eval()


@contextmanager
def _without_log_noise() -> Iterator[None]:
    """Silence PyTorch and transformers: progress bars, absent extras, deprecations."""
    import transformers

    before = logging.root.manager.disable
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
