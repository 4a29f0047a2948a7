"""A model in the formats of other runtimes: each writer fills a folder and returns the model loaded from it.

All formats take `input_ids`, `attention_mask` and `token_type_ids` [B, S], with any number of examples and
positions, and return the outputs of transformers' class of the architecture, by its names. SavedModel and
TFLite are made from the blocks here, ONNX by PyTorch from transformers' model of the same files. Each folder
has the config and the tokenizer's files too.

A SavedModel can also take strings, with the tokenizer in tensorflow-text. Its normalization is written out here,
because that of tensorflow-text decomposes compatibility characters (½ becomes 1⁄2): so 6,000 paragraphs of
Wikipedia became the same pieces. It is compared with the tokenizer before it is used.

Shapes: B examples, S positions, D hidden size, V vocabulary size.
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

from bert_cli.data.finetune.features import encode_texts
from bert_cli.data.records.sentence_pairs import SpecialIds
from bert_cli.data.records.tokenizer import TextTokenizer, files_for_model
from bert_cli.errors import CheckpointError, ConfigError
from bert_cli.model.bert import named_weights
from bert_cli.tasks.use.model import Opened
from bert_cli.train import checkpoint

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
Outputs = dict[str, npt.NDArray[np.float32]]
Predict = Callable[[Any, Any, Any], Outputs]
"""ids, mask and segments [B, S] int32 -> outputs by name."""
Encoder = Callable[..., dict[str, tf.Tensor]]
"""One or two columns of strings [B] -> `INPUTS` by name."""

AUTO = {
    "BertForPreTraining": "AutoModelForPreTraining",
    "BertForMaskedLM": "AutoModelForMaskedLM",
    "BertForQuestionAnswering": "AutoModelForQuestionAnswering",
    "BertForSequenceClassification": "AutoModelForSequenceClassification",
    "BertForTokenClassification": "AutoModelForTokenClassification",
    "BertModel": "AutoModel",
}
"""Architecture -> class of transformers that opens it."""
TFLITE = "model.tflite"
ONNX = "model.onnx"

LONGEST_WORD = 100
"""Characters; a longer word is [UNK]."""
# A private character: no vocabulary has it, and cleaned text does not contain it.
UNKNOWN_WORD = "\ue000"
# Characters that BERT's tokenizer removes: control, format and private ones, but not tab and line ends.
CLEANED = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\p{Cf}\p{Co}\x{FFFD}]"
# ASCII only: the class of all letters with a count exceeds the memory of a regular expression. In other scripts, words
# between 100 characters and 400 bytes are cut into pieces instead of becoming [UNK].
TOO_LONG = rf"[0-9A-Za-z]{{{LONGEST_WORD + 1},}}"
COMPARED = (
    "The cat sat on the mat, didn't it?",
    "Ångström naïve résumé e\u0301 ½ 8″ … ﬁ İstanbul ΑΣ ΣΑΣ ß",
    "東京タワー 한국어 हिन्दी भाषा تجربة кириллица עברית",
    "ไม่มีช่องว่างระหว่างคำในภาษาไทยเลยแม้แต่น้อยจริงๆนะ",
    "a\u00a0b\tc\x01d\ufffde\u200bf\u00adg",
    "[MASK] [SEP] $5.00 ~50% `x^2` <tag> C++ snake_case 😀",
    "x" * 100 + " " + "y" * 101,
    "",
)
"""Texts for which an encoder must give the tokenizer's pieces."""


class Served(tf.Module):
    """The model with transformers' inputs and outputs, as TensorFlow saves it."""

    def __init__(self, model: Opened, encoder: Encoder | None = None) -> None:
        super().__init__(name="bert")
        self.model, self.encoder = model, encoder
        self.weights = [weight.value for weight in named_weights(model.blocks).values()]
        shape = [tf.TensorSpec([None, None], tf.int32, name=name) for name in INPUTS]
        # A partial: TensorFlow would count the methods of two objects as one function that is traced again and again.
        self.serve = tf.function(partial(self._serve), input_signature=shape, autograph=False)

    @property
    def names(self) -> list[str]:
        """Return the names of the outputs."""
        return list(self.serve.get_concrete_function().structured_outputs)

    def predict(self, *columns: Any) -> Outputs:
        """Return the outputs of the model itself."""
        return {name: values.numpy() for name, values in self.serve(*columns).items()}

    def serve_texts(self, *names: str) -> Any:
        """Return the model as a function of columns of strings [B]; it returns the encoded inputs too."""

        def serve(*texts: Any) -> dict[str, Any]:
            assert self.encoder is not None
            columns = self.encoder(*texts)
            return {**columns, **self._outputs(**columns)}

        shape = [tf.TensorSpec([None], tf.string, name=name) for name in names]
        return tf.function(serve, input_signature=shape, autograph=False)

    def _serve(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> dict[str, Any]:
        """Return the outputs; too many positions are an error, which a GPU would not notice."""
        most = self.model.config.max_position_embeddings
        message = f"input_ids: has more tokens than the model's {most} positions; cut the texts"
        check = tf.debugging.assert_less_equal(tf.shape(input_ids)[1], most, message)
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
            # [CLS] for the pooler, and then every position as if it were masked.
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
    """Return transformers' class for the weights in the file."""
    named = model.source.architecture
    if named in ("?", "BertForPreTraining") and "heads" in dict(model.blocks):
        lacks = {"pool", "heads/next_sentence"} & set(model.new)
        return "BertForMaskedLM" if lacks else "BertForPreTraining"
    return "BertModel" if named == "?" else named


# --- writers


def write_hf(served: Served, folder: Path) -> Predict:
    """Write config, weights and tokenizer, without a run's optimizer and state; opened by transformers."""
    _write_hf_files(served.model, folder)
    model = _in_transformers(served.model, folder)

    def predict(*columns: Any) -> Outputs:
        import torch

        with torch.no_grad():
            inputs = {n: torch.from_numpy(c).long() for n, c in zip(INPUTS, columns, strict=True)}
            return {name: values.numpy() for name, values in model(**inputs).items()}

    return predict


def write_saved_model(served: Served, folder: Path) -> Predict:
    """Write a TensorFlow SavedModel with the signature `serving_default`."""
    signatures = {"serving_default": served.serve}
    if served.encoder is not None:
        # Two signatures, because one has a fixed number of inputs.
        signatures["texts"] = served.serve_texts("texts")
        signatures["pairs"] = served.serve_texts("texts", "seconds")
    tf.saved_model.save(served, str(folder), signatures=signatures)
    _write_config_and_tokenizer(served.model, folder)
    loaded = tf.saved_model.load(str(folder))
    signature = loaded.signatures["serving_default"]

    def predict(*columns: Any) -> Outputs:
        # The variables live as long as the loaded object.
        assert loaded is not None
        inputs = {n: tf.constant(c) for n, c in zip(INPUTS, columns, strict=True)}
        return {name: values.numpy() for name, values in signature(**inputs).items()}

    return predict


def write_tflite(served: Served, folder: Path) -> Predict:
    """Write a flat buffer of TensorFlow Lite (LiteRT), float32, with its own operators only."""
    converter = tf.lite.TFLiteConverter.from_concrete_functions(
        [served.serve.get_concrete_function()], served
    )
    data = converter.convert()
    (folder / TFLITE).write_bytes(data)
    _write_config_and_tokenizer(served.model, folder)
    with warnings.catch_warnings():
        # TensorFlow warns that its interpreter will move to another package.
        warnings.simplefilter("ignore")
        interpreter = tf.lite.Interpreter(model_path=str(folder / TFLITE))

    def predict(*columns: Any) -> Outputs:
        runner = interpreter.get_signature_runner()
        outputs: Outputs = runner(**dict(zip(INPUTS, columns, strict=True)))
        return outputs

    return predict


def write_onnx(served: Served, folder: Path) -> Predict:
    """Write an ONNX graph of transformers' model; opened by ONNX Runtime."""
    import onnxruntime
    import torch

    files = folder / "hf"
    files.mkdir()
    _write_hf_files(served.model, files)
    model = _in_transformers(served.model, files)
    outputs = served.names

    class Ordered(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> Any:
            columns = (input_ids, attention_mask, token_type_ids)
            values = self.model(**dict(zip(INPUTS, columns, strict=True)))
            return tuple(values[name] for name in outputs)

    # Three tensors: the exporter would merge inputs that are the same object.
    example = tuple(torch.ones((2, 4), dtype=torch.int64) for _ in INPUTS)
    free = {
        0: torch.export.Dim("batch", min=1),
        1: torch.export.Dim("length", min=1, max=served.model.config.max_position_embeddings),
    }
    with _without_log_noise():
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
    _write_config_and_tokenizer(served.model, folder)
    session = onnxruntime.InferenceSession(str(folder / ONNX), providers=["CPUExecutionProvider"])

    def predict(*columns: Any) -> Outputs:
        inputs = {n: c.astype(np.int64) for n, c in zip(INPUTS, columns, strict=True)}
        return dict(zip(outputs, session.run(outputs, inputs), strict=True))

    return predict


WRITERS: Mapping[str, Callable[[Served, Path], Predict]] = {
    "hf": write_hf,
    "saved-model": write_saved_model,
    "tflite": write_tflite,
    "onnx": write_onnx,
}


def _in_transformers(model: Opened, folder: Path) -> Any:
    """Return the folder's model in PyTorch, float32. CheckpointError when weights are missing."""
    import torch
    import transformers

    kind = getattr(transformers, AUTO[architecture_of(model)])
    with _without_log_noise():
        loaded, report = kind.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
            local_files_only=True,
        )
    # An encoder's file may have no pooler; its output is then not compared.
    missing = sorted(name for name in report["missing_keys"] if "pooler.dense." not in name)
    if missing:
        raise CheckpointError(
            str(folder), f"transformers misses the weights {', '.join(missing[:8])}"
        )
    return loaded.eval()


def _write_hf_files(model: Opened, folder: Path) -> None:
    source = model.source
    if source.weights.name == checkpoint.MODEL:
        shutil.copyfile(source.weights, folder / checkpoint.MODEL)
    else:
        # transformers requires the mark of the framework whose layout the tensors have.
        tensors = {name: np.ascontiguousarray(v) for name, v in source.tensors().items()}
        save_file(tensors, folder / checkpoint.MODEL, metadata={"format": "pt"})
    _write_config_and_tokenizer(model, folder)
    shutil.copymode(folder / "config.json", folder / checkpoint.MODEL)


def _write_config_and_tokenizer(model: Opened, folder: Path) -> None:
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
def _without_log_noise() -> Iterator[None]:
    """Silence PyTorch and transformers: progress bars, absent extras, deprecations."""
    import transformers

    library = transformers.utils.logging
    level, bars = library.get_verbosity(), library.is_progress_bar_enabled()
    quiet = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript")]
    before = [logger.level for logger in quiet]
    library.set_verbosity_error()
    library.disable_progress_bar()
    for logger in quiet:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        library.set_verbosity(level)
        if bars:
            library.enable_progress_bar()
        for logger, old in zip(quiet, before, strict=True):
            logger.setLevel(old)


# --- strings


def text_encoder(tokenizer: TextTokenizer, length: int) -> Encoder:
    """Return a tokenizer in TensorFlow, which cuts texts to `length` tokens as in training.

    As there, a second text without tokens adds no [SEP], and special tokens in a text are plain. ConfigError
    for a tokenizer that is not BERT's own.
    """
    import tensorflow_text as text

    lowers, strips = _normalization(tokenizer)
    pieces = text.FastBertTokenizer(
        vocab=list(tokenizer.pieces),
        suffix_indicator="##",
        max_bytes_per_word=4 * LONGEST_WORD,
        token_out_type=tf.int32,
        unknown_token="[UNK]",
        lower_case_nfd_strip_accents=False,
    )
    special = tokenizer.special

    def normalized(texts: tf.Tensor) -> tf.Tensor:
        texts = tf.strings.regex_replace(texts, CLEANED, "")
        if strips:
            texts = text.normalize_utf8(texts, "NFD")
            texts = tf.strings.regex_replace(texts, r"\p{Mn}", "")
        if lowers:
            # First, because the lower case of a complete word would end in the final form of sigma.
            texts = tf.strings.regex_replace(texts, "Σ", "σ")
            texts = tf.strings.lower(texts, encoding="utf-8")
        return tf.strings.regex_replace(texts, TOO_LONG, UNKNOWN_WORD)

    def encode(*texts: tf.Tensor) -> dict[str, tf.Tensor]:
        parts = [pieces.tokenize(normalized(column)) for column in texts]
        ids, segments = _joined(parts[:1], special, length)
        if len(parts) == 2:
            both = zip((ids, segments), _joined(parts, special, length), strict=True)
            # Each row from the single texts or, after them, from the pairs.
            count = ids.nrows()
            rows = tf.range(count) + tf.where(parts[1].row_lengths() > 0, count, 0)
            ids, segments = (tf.gather(tf.concat(pair, 0), rows) for pair in both)
        return {
            "input_ids": ids.to_tensor(special.pad),
            "attention_mask": tf.ones_like(ids).to_tensor(0),
            "token_type_ids": segments.to_tensor(0),
        }

    return encode


def _normalization(tokenizer: TextTokenizer) -> tuple[bool, bool]:
    """Return whether the tokenizer lower-cases and strips accents. ConfigError for another kind."""
    described = json.loads(tokenizer.library.to_str())
    normalizer, model = described.get("normalizer") or {}, described["model"]
    usual = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True}
    rest = {"max_input_chars_per_word": LONGEST_WORD, "continuing_subword_prefix": "##"}
    is_bert = all(normalizer.get(name) == value for name, value in usual.items())
    if not is_bert or any(model.get(name) != value for name, value in rest.items()):
        problem = "is configured differently from BERT's"
        raise ConfigError("texts (tokenizer)", problem, "leave out --texts and give ids")
    lowers, strips = bool(normalizer.get("lowercase")), normalizer.get("strip_accents")
    return lowers, lowers if strips is None else bool(strips)


def _joined(
    parts: list[tf.RaggedTensor], special: SpecialIds, length: int
) -> tuple[tf.RaggedTensor, tf.RaggedTensor]:
    """Return ids and segments of one or two texts [B, (S)] with special tokens, cut to `length`."""
    import tensorflow_text as text

    trimmed = text.RoundRobinTrimmer(length - 1 - len(parts)).trim(parts)
    ids, segments = text.combine_segments(trimmed, special.cls, special.sep)
    return ids, segments


def compare_encoders(tokenizer: TextTokenizer, encoder: Encoder, length: int) -> None:
    """Refuse an encoder that splits a text differently from the tokenizer; CheckpointError names it."""
    for second in (None, COMPARED[::-1]):
        features, _ = encode_texts(tokenizer, COMPARED, second, {}, max_seq_length=length)
        texts = [list(COMPARED)] if second is None else [list(COMPARED), list(second)]
        columns = encoder(*map(tf.constant, texts))
        rows = features.batch(np.arange(len(COMPARED)), int(features.lengths.max()))
        ids = np.where(rows["input_mask"], rows["input_ids"], tokenizer.special.pad)
        expected = zip(INPUTS, (ids, rows["input_mask"], rows["segment_ids"]), strict=True)
        for name, column in expected:
            found = columns[name].numpy()
            wrong = found.shape != column.shape or (found != column).any(axis=1)
            if np.any(wrong):
                row = int(np.argmax(wrong))
                problem = "becomes other pieces in the export than in the model's tokenizer"
                remedy = "leave out --texts and give ids"
                raise CheckpointError(f"texts ({COMPARED[row][:40]!r})", problem, remedy)
