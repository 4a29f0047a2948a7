"""The settings of what a trained model is used for: `bert predict` and `bert export`.

A model is whatever a run can start from: a run's folder, a checkpoint, a Hugging Face folder or name,
a TensorFlow checkpoint. Its shape, its labels and its task are read from it; what is
asked here is only what to read and how to answer.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic_settings import CliPositionalArg

from bert_cli.config.parallel import Positive, Settings

PREDICT_TASKS = (
    "fill-mask",
    "question-answering",
    "text-classification",
    "token-classification",
    "embed",
)
EXPORT_FORMATS = ("hf", "saved-model", "tflite", "onnx")


class PredictSettings(Settings):
    """What a model says to texts: a JSON object a line on standard output, in the texts' order.

    The texts come from TEXT, from --input, or from standard input.
    Example: bert predict runs/base "The capital of France is [MASK]."
    Example: bert predict runs/mine --input texts.txt
    Example: bert predict runs/squad_base --question "Who was it?" --context "It was Ada."
    """

    model: CliPositionalArg[str]
    """A run's folder, a checkpoint, a Hugging Face folder or name, a TensorFlow checkpoint."""
    text: CliPositionalArg[str | None] = None
    """One text, right behind MODEL; more of them go into a file or through standard input."""
    task: Literal[PREDICT_TASKS] | None = None  # type: ignore[valid-type]
    """fill-mask, question-answering, text-classification, token-classification or embed; by default
    what the model was trained for."""
    input: Path | None = None
    """A file of texts, one a line; one whose name ends in .jsonl has an object a line, with `text` and,
    for pairs, `second`, or with `question` and `context`. Also .gz of each."""
    second: str | None = None
    """The second text of a pair, for text-classification."""
    question: str | None = None
    """A question, for question-answering; without it they come as JSON lines."""
    context: str | None = None
    """The text that holds the question's answer."""
    batch_size: Positive = 32
    """Texts that the model reads at once; those of like length go together."""
    max_seq_length: Annotated[int, Field(ge=8)] | None = None
    """Most tokens of a text; by default all places that the model has. What is longer is cut, and its
    answer says so."""
    precision: Literal["float32", "mixed_bfloat16"] = "float32"
    """Number format of the products."""
    top: Positive = 5
    """Words for each [MASK], the best first, for fill-mask."""
    pooling: Literal["mean", "cls"] = "mean"
    """What embed takes: the `mean` over all tokens, or the vector of [CLS]."""
    normalize: bool = False
    """Scale the vectors of embed to length 1."""
    doc_stride: Positive = 128
    """Tokens from the start of a window of a long context to that of the next, for
    question-answering."""
    max_query_length: Positive = 64
    """Longest question, in tokens; the rest is cut off."""
    max_answer_length: Positive = 30
    """Longest answer, in tokens."""
    version_2: bool = False
    """The model may say that the context has no answer, as one trained on SQuAD 2.0 can; the answer is
    then empty."""
    null_score_diff_threshold: float | None = None
    """With version_2, how much better no answer must score than the best one to be given; by default
    what `bert squad` chose for this model, or 0."""

    @model_validator(mode="after")
    def _one_place_for_texts(self) -> "PredictSettings":
        given = [name for name in ("text", "question", "input") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are both given; give one of them")
        if (self.question is None) != (self.context is None):
            raise ValueError("question and context belong together; give both or neither")
        if self.second is not None and self.text is None:
            raise ValueError("second has no effect without TEXT; give both, or .jsonl as input")
        if "null_score_diff_threshold" in self.model_fields_set and not self.version_2:
            raise ValueError("null_score_diff_threshold has no effect without version_2; give both")
        return self


class ExportSettings(Settings):
    """Write a model in the form of another runtime, and compare what it says there.

    Example: bert export runs/mrpc exported/mrpc --format onnx
    Example: bert export runs/mine exported/mine --format saved-model
    """

    model: CliPositionalArg[str]
    """A run's folder, a checkpoint, a Hugging Face folder or name, a TensorFlow checkpoint."""
    out: CliPositionalArg[Path]
    """Folder that receives the export; a new one, or one that is empty."""
    format: Literal[EXPORT_FORMATS]  # type: ignore[valid-type]
    """hf (config, weights and tokenizer alone), saved-model (TensorFlow), tflite or onnx."""
    texts: bool = False
    """Of a saved-model for text-classification or of an encoder: also the signatures `texts` and `pairs`,
    which take strings. Whoever loads it has to import tensorflow_text first."""

    @model_validator(mode="after")
    def _texts_are_of_saved_models(self) -> "ExportSettings":
        if self.texts and self.format != "saved-model":
            raise ValueError(f"texts has no effect with format {self.format!r}; leave it out")
        return self
