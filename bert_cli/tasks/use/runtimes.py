"""A model in the forms of other runtimes: each writer gives a folder, and a way to ask what lies there.

All forms take `input_ids`, `attention_mask` and `token_type_ids` [B, S], as many examples and places
as come, and give the outputs that transformers' class of the architecture gives, by its names.
SavedModel and TFLite are made from the blocks here, ONNX by PyTorch from transformers' model of the
same files. Beside each lie the config and the tokenizer's files, which say how to feed it.

Shapes: B examples, S places, D model width, V words.
"""

import json
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from safetensors.numpy import save_file

from bert_cli.data.records.tokenizer import files_for_model
from bert_cli.errors import CheckpointError
from bert_cli.model.bert import named_weights
from bert_cli.tasks.use.model import Opened
from bert_cli.train import checkpoint

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
Outputs = dict[str, npt.NDArray[np.float32]]
Ask = Callable[[Any, Any, Any], Outputs]
"""ids, mask and segments [B, S] int32 -> outputs by name."""

# Architecture -> transformers' class that opens it.
AUTO = {
    "BertForPreTraining": "AutoModelForPreTraining",
    "BertForMaskedLM": "AutoModelForMaskedLM",
    "BertForQuestionAnswering": "AutoModelForQuestionAnswering",
    "BertForSequenceClassification": "AutoModelForSequenceClassification",
    "BertForTokenClassification": "AutoModelForTokenClassification",
    "BertModel": "AutoModel",
}
TFLITE = "model.tflite"
ONNX = "model.onnx"


class Served(tf.Module):
    """The model with transformers' inputs and outputs, as TensorFlow saves it."""

    def __init__(
        self, model: Opened, columns_of_texts: Callable[..., dict[str, Any]] | None = None
    ) -> None:
        super().__init__(name="bert")
        self.model, self.columns_of_texts = model, columns_of_texts
        self.weights = [weight.value for weight in named_weights(model.blocks).values()]
        shape = [tf.TensorSpec([None, None], tf.int32, name=name) for name in INPUTS]
        # As a partial: TensorFlow takes the methods of two objects for one function traced often.
        self.serve = tf.function(partial(self._serve), input_signature=shape, autograph=False)

    @property
    def names(self) -> list[str]:
        """The outputs."""
        return list(self.serve.get_concrete_function().structured_outputs)

    def ask(self, *columns: Any) -> Outputs:
        """The outputs of the model itself."""
        return {name: found.numpy() for name, found in self.serve(*columns).items()}

    def reading(self, *names: str) -> Any:
        """The model for columns of strings [B] by these names; gives the inputs made of them too."""

        def read(*texts: Any) -> dict[str, Any]:
            assert self.columns_of_texts is not None
            columns = self.columns_of_texts(*texts)
            return {**columns, **self._outputs(**columns)}

        shape = [tf.TensorSpec([None], tf.string, name=name) for name in names]
        return tf.function(read, input_signature=shape, autograph=False)

    def _serve(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> dict[str, Any]:
        """The outputs of ids; too many of them are an error, which a GPU would not notice."""
        most = self.model.config.max_position_embeddings
        told = f"input_ids: has more tokens than the model's {most} positions; cut the texts"
        check = tf.debugging.assert_less_equal(tf.shape(input_ids)[1], most, told)
        with tf.control_dependencies([check]):
            return self._outputs(tf.identity(input_ids), attention_mask, token_type_ids)

    def _outputs(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> dict[str, Any]:
        columns = {
            "input_ids": input_ids,
            "input_mask": attention_mask,
            "segment_ids": token_type_ids,
        }
        hidden_BSD, blocks = self.model.hidden(columns), dict(self.model.blocks)
        if "heads" in blocks:
            # [CLS] for the pooler, and then every place as if it were masked.
            rows = tf.concat([hidden_BSD[:, :1], hidden_BSD], axis=1)
            words_BSV, next_B2 = blocks["heads"].logits(blocks["pool"](rows, columns, None), None)
            if architecture_of(self.model) == "BertForMaskedLM":
                return {"logits": words_BSV}
            return {"prediction_logits": words_BSV, "seq_relationship_logits": next_B2}
        if "qa_head" in blocks:
            spans_BS2 = blocks["qa_head"].logits(hidden_BSD, None)
            return {"start_logits": spans_BS2[:, :, 0], "end_logits": spans_BS2[:, :, 1]}
        if "token_head" in blocks:
            return {"logits": blocks["token_head"].logits(hidden_BSD, None)}
        pooled_B1D = blocks["pool"](hidden_BSD[:, :1], columns, None)
        if "glue_head" in blocks:
            return {"logits": blocks["glue_head"].logits(pooled_B1D, None)}
        outputs = {"last_hidden_state": hidden_BSD}
        return (
            outputs if "pool" in self.model.new else {**outputs, "pooler_output": pooled_B1D[:, 0]}
        )


def architecture_of(model: Opened) -> str:
    """Transformers' class for what is really in the file."""
    named = model.source.architecture
    if named in ("?", "BertForPreTraining") and "heads" in dict(model.blocks):
        lacks = {"pool", "heads/next_sentence"} & set(model.new)
        return "BertForMaskedLM" if lacks else "BertForPreTraining"
    return "BertModel" if named == "?" else named


def write_hf(served: Served, folder: Path) -> Ask:
    """Config, weights and tokenizer, without a run's optimizer and state; asked through transformers."""
    _write_hf_files(served.model, folder)
    theirs = _in_transformers(served.model, folder)

    def ask(*columns: Any) -> Outputs:
        import torch

        with torch.no_grad():
            given = {n: torch.from_numpy(c).long() for n, c in zip(INPUTS, columns, strict=True)}
            return {name: found.numpy() for name, found in theirs(**given).items()}

    return ask


def write_saved_model(served: Served, folder: Path) -> Ask:
    """A TensorFlow SavedModel with the signature `serving_default`."""
    signatures = {"serving_default": served.serve}
    if served.columns_of_texts is not None:
        # Named inputs only: a signature's are.
        signatures["texts"] = served.reading("texts")
        signatures["pairs"] = served.reading("texts", "seconds")
    tf.saved_model.save(served, str(folder), signatures=signatures)
    _write_beside(served.model, folder)
    loaded = tf.saved_model.load(str(folder))
    signature = loaded.signatures["serving_default"]

    def ask(*columns: Any) -> Outputs:
        # The variables live as long as what was loaded.
        assert loaded is not None
        given = {n: tf.constant(c) for n, c in zip(INPUTS, columns, strict=True)}
        return {name: found.numpy() for name, found in signature(**given).items()}

    return ask


def write_tflite(served: Served, folder: Path) -> Ask:
    """A flat buffer of TensorFlow Lite (LiteRT), float32, with operators of its own only."""
    converter = tf.lite.TFLiteConverter.from_concrete_functions(
        [served.serve.get_concrete_function()], served
    )
    data = converter.convert()
    (folder / TFLITE).write_bytes(data)
    _write_beside(served.model, folder)
    with warnings.catch_warnings():
        # Of TensorFlow's own interpreter, that another package will have it one day.
        warnings.simplefilter("ignore")
        interpreter = tf.lite.Interpreter(model_path=str(folder / TFLITE))

    def ask(*columns: Any) -> Outputs:
        runner = interpreter.get_signature_runner()
        found: Outputs = runner(**dict(zip(INPUTS, columns, strict=True)))
        return found

    return ask


def write_onnx(served: Served, folder: Path) -> Ask:
    """An ONNX graph of transformers' model, asked through ONNX Runtime."""
    import onnxruntime
    import torch

    files = folder / "hf"
    files.mkdir()
    _write_hf_files(served.model, files)
    theirs = _in_transformers(served.model, files)
    outputs = served.names

    class Ordered(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = theirs

        def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> Any:
            columns = (input_ids, attention_mask, token_type_ids)
            found = self.model(**dict(zip(INPUTS, columns, strict=True)))
            return tuple(found[name] for name in outputs)

    # Three tensors: of one given three times the exporter would make one input.
    example = tuple(torch.ones((2, 4), dtype=torch.int64) for _ in INPUTS)
    free = {
        0: torch.export.Dim("batch", min=1),
        1: torch.export.Dim("length", min=1, max=served.model.config.max_position_embeddings),
    }
    with _without_remarks():
        torch.onnx.export(
            Ordered().eval(),
            example,
            str(folder / ONNX),
            input_names=list(INPUTS),
            output_names=outputs,
            dynamic_shapes=(free,) * len(INPUTS),
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    shutil.rmtree(files)
    _write_beside(served.model, folder)
    session = onnxruntime.InferenceSession(str(folder / ONNX), providers=["CPUExecutionProvider"])

    def ask(*columns: Any) -> Outputs:
        given = {n: c.astype(np.int64) for n, c in zip(INPUTS, columns, strict=True)}
        return dict(zip(outputs, session.run(outputs, given), strict=True))

    return ask


def _in_transformers(model: Opened, folder: Path) -> Any:
    """The folder's model in PyTorch, float32. CheckpointError when weights are missing or left over."""
    import torch
    import transformers

    kind = getattr(transformers, AUTO[architecture_of(model)])
    with _without_remarks():
        theirs, told = kind.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
            local_files_only=True,
        )
    # An encoder's file may have no pooler; its output is then not among those that are compared.
    wrong = sorted(name for name in told["missing_keys"] if "pooler.dense." not in name)
    if wrong:
        raise CheckpointError(f"{folder}: transformers finds no {', '.join(wrong[:8])} in it")
    return theirs.eval()


def _write_hf_files(model: Opened, folder: Path) -> None:
    source = model.source
    if source.weights.name == checkpoint.MODEL:
        shutil.copyfile(source.weights, folder / checkpoint.MODEL)
    else:
        # transformers asks for this mark of the framework whose layout the tensors have.
        tensors = {name: np.ascontiguousarray(v) for name, v in source.tensors().items()}
        save_file(tensors, folder / checkpoint.MODEL, metadata={"format": "pt"})
    _write_beside(model, folder)
    shutil.copymode(folder / "config.json", folder / checkpoint.MODEL)


def _write_beside(model: Opened, folder: Path) -> None:
    """config.json, with the names of the labels, and the tokenizer's files."""
    described = {
        "model_type": "bert",
        **model.source.described,
        "architectures": [architecture_of(model)],
    }
    (folder / "config.json").write_text(json.dumps(described, indent=2), encoding="utf-8")
    files = files_for_model(
        model.source.folder,
        model.config.max_position_embeddings,
        fills_masks="heads" in dict(model.blocks),
    )
    for name, content in files.items():
        (folder / name).write_bytes(content)


@contextmanager
def _without_remarks() -> Iterator[None]:
    """Without what PyTorch and transformers say about themselves: bars, absent extras, deprecations."""
    import transformers

    logging_there = transformers.utils.logging
    level, bars = logging_there.get_verbosity(), logging_there.is_progress_bar_enabled()
    quiet = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript")]
    before = [logger.level for logger in quiet]
    logging_there.set_verbosity_error()
    logging_there.disable_progress_bar()
    for logger in quiet:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging_there.set_verbosity(level)
        if bars:
            logging_there.enable_progress_bar()
        for logger, old in zip(quiet, before, strict=True):
            logger.setLevel(old)


WRITERS: Mapping[str, Callable[[Served, Path], Ask]] = {
    "hf": write_hf,
    "saved-model": write_saved_model,
    "tflite": write_tflite,
    "onnx": write_onnx,
}
