"""The settings of using a trained model: predict, serve, export, evaluate and average."""

from os.path import realpath
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt

from bert_cli.facts import heads
from bert_cli.settings.markers import PathOrName, Positional
from bert_cli.settings.numbers import Length, Positive
from bert_cli.settings.settings import (
    EngineSettings,
    JsonSettings,
    NewOutSettings,
    SettingError,
    Shared,
    Unless,
)

PREDICT_TASKS = (*dict.fromkeys(head.task for head in heads.heads()), "similarity")


class ModelSettings(Shared):
    """The model that a command reads."""

    model: Positional[PathOrName]
    """A run folder, a checkpoint, a Hugging Face folder or name, or a TensorFlow checkpoint."""


class ThresholdSettings(Shared):
    """Texts without a label."""

    none_below: Annotated[float | None, Field(ge=0.0, le=1.0)] = None
    """Label a text `none` if its most probable label is less probable than this. `bert classify` prints which part of
    the held-out texts is answered then, and how well."""


class RunSettings(Shared):
    """The run that a command reads."""

    run: Positional[Path]
    """Folder of a run, whose newest checkpoint is scored, of one of its checkpoints, or of `bert average`."""


class PredictSettings(ModelSettings, ThresholdSettings, EngineSettings):
    """Run a model on texts and print one JSON object for each text, or write a table, in the same order.

    The texts are TEXT, the lines of --input, or standard input. The task, the labels and the shape are read from
    the model.
    Example: bert predict runs/base "The capital of France is [MASK]."
    Example: bert predict runs/mine --input texts.txt
    Example: bert predict runs/mine --input reviews.csv --output labelled.csv
    """

    NEEDS = {
        "question": "context",
        "context": "question",
        "second": "text",
        "text_column": "input",
    }

    text: Positional[str | None] = None
    """A single text; for several, use a file or standard input."""
    task: Literal[PREDICT_TASKS] | None = None  # type: ignore[valid-type]
    """fill-mask, question-answering, text-classification, token-classification, embed, or similarity, which ranks
    the texts of --input by their similarity to TEXT. By default the task that the model was trained for."""
    input: Path | None = None
    """File with one text on each line, or .jsonl with one object on each line: `text` and, for pairs, `second`, or
    `question` and `context`; or .csv, .tsv or .parquet with these columns. Also compressed: .gz, .bz2, .xz, .zst."""
    text_column: list[str] | None = None
    """The column or field of --input with the text; repeat it for pairs, or for question and context. By default the
    names above or, in a .csv, .tsv or .jsonl for a model of `bert classify`, the columns of its run."""
    output: Path | None = None
    """File for the answers, by default standard output: a .csv or .tsv with the columns of --input and of the answers,
    in which a list is JSON, or .jsonl."""
    second: str | None = None
    """The second text of a pair, for text-classification."""
    question: str | None = None
    """A question, for question-answering; for several, use JSON lines."""
    context: str | None = None
    """The text that contains the answer."""
    version_2: bool = False
    """Allow no answer, as in SQuAD 2.0; the answer is then empty. It is predicted if its score exceeds the best
    answer's by more than the threshold that `bert squad` chose, or 0."""
    doc_stride: Positive | None = None
    """Read a text of more than max_seq_length tokens in overlapping windows, whose starts are this many tokens apart.
    By default as the run did; without windows of its run, text-classification truncates the text, and
    token-classification and question-answering choose windows that fit."""
    batch_size: Positive = 32
    """Texts in a batch; texts of similar length are batched together."""
    max_seq_length: Length | None = None
    """Maximum length of a text in tokens; by default the length of a run of `bert squad` or `bert embed`, or of one
    with doc_stride, otherwise of the model.
    Longer texts are truncated, unless they are read in windows; their row has `"truncated": true`."""
    precision: Literal["float32", "mixed_bfloat16"] = "float32"
    """Number format of the matrix products."""
    top: Positive = 5
    """Number of predictions per [MASK], or of texts for similarity, best first."""
    pooling: Literal["mean", "cls"] | None = None
    """How the vector of a text is computed: the `mean` over all tokens, or the output at [CLS]; by default as in the
    run of `bert embed`, otherwise the mean."""
    normalize: bool | None = None
    """Scale the vectors of task embed to length 1; by default as in the run of `bert embed`, otherwise not."""
    dimensions: Positive | None = None
    """Number of values to which vectors are shortened, before they are scaled; by default all. Use a size that the
    model was trained for (`bert embed --matryoshka`)."""

    def _check(self) -> None:
        sources = [
            name for name in ("text", "question", "input") if getattr(self, name) is not None
        ]
        if self.output is not None and self.output.suffix.lower() not in (".csv", ".tsv", ".jsonl"):
            problem = f"{self.output} is of an unknown kind"
            raise SettingError("output", problem, "name it .csv, .tsv or .jsonl")
        if self.output and self.input and realpath(self.output) == realpath(self.input):
            raise SettingError("output", "is the input", "choose another file")
        is_search = self.task == "similarity" and sources == ["text", "input"]
        if len(sources) > 1 and not is_search:
            problem = f"cannot be combined with {sources[0]}"
            raise SettingError(sources[1], problem, "use one of them")


class ServeSettings(ThresholdSettings, EngineSettings):
    """Open a page on which to search an index or try a model, and answer the same as JSON.

    The page of an index searches as you type. The page of a model has what it was trained for: words in place of
    [MASK], labels, entities, answers in a context, or similarities of texts. It is on this machine alone, and ends with
    Ctrl-C. It needs the extra `serve`. With `--mcp` an agent searches the index instead.
    Example: bert serve manuals.index
    Example: bert serve runs/labels --port 8080
    Example: bert serve manuals.index --mcp
    """

    NEEDS = {name: Unless(lambda of: not of.mcp, "with mcp") for name in ("port", "host")}

    path: Positional[PathOrName]
    """An index of `bert search make`; or a model: a run folder, a checkpoint, a Hugging Face folder or name, or a
    TensorFlow checkpoint."""
    port: Annotated[int, Field(ge=0, le=65_535)] = 8321
    """Port of the page; 0 for any free port."""
    host: str | None = None
    """Address of this machine for a page that other machines can open, such as 0.0.0.0 for all its addresses. The
    printed address of the page then has a token, without which nothing is answered."""
    mcp: bool = False
    """Instead of a page, let an agent search the index: the Model Context Protocol on standard input and output."""


class ExportSettings(NewOutSettings, ModelSettings):
    """Export a model to another runtime, and compare the outputs of both.

    Example: bert export runs/mrpc exported/mrpc --format onnx --precision int8 --compare-on texts.txt
    Example: bert export runs/mine exported/mine --format saved-model
    Example: bert export runs/mine exported/mine --format hf --license apache-2.0
    """

    NEEDS = {
        "precision": ("format", "onnx"),
        "dimensions": ("format", "static"),
        "compare_on": Unless(
            lambda of: of.format == "static" or of.precision != "float32",
            "with an exact export",
            "leave it out, or pass --precision int8 or --format static",
        ),
    }

    format: Literal["hf", "saved-model", "tflite", "onnx", "static"]
    """hf (config, weights and tokenizer), saved-model (TensorFlow), tflite or onnx; static has a vector for each piece
    of the vocabulary, of which model2vec computes vectors of texts. hf and onnx need the extra `export`: PyTorch opens
    the written files. All formats need TensorFlow."""
    precision: Literal["float32", "int8"] = "float32"
    """Number format of an onnx. int8 has a quarter of the size and is faster on CPUs: ONNX Runtime's dynamic
    quantization of weights and activations. The command reports how many predictions change, and warns if it is more
    than one of fifty."""
    compare_on: Path | None = None
    """File of texts in the form of `bert predict --input`, on which the predictions of int8 are compared with
    float32, and static vectors with the model's. int8 uses synthetic token ids by default, which say less."""
    dimensions: Positive = 256
    """Size of static vectors, at most the model's."""
    license: Annotated[str, Field(pattern=r"^[a-z0-9.-]+$")] | None = None
    """License in the model card (README.md), by its name on the Hugging Face hub, such as apache-2.0."""


class AverageSettings(NewOutSettings, RunSettings, EngineSettings):
    """Average the weights of a run's newest checkpoints, and compare the mean with the newest checkpoint.

    The mean is a model folder without an optimizer, for --pretrained-ckpt-path and transformers.
    Example: bert average runs/base_128_phase1 runs/base_mean
    Example: bert average runs/field runs/field_mean --last 8 --validation-dir data/held_out
    """

    run: Positional[Path]
    """Folder of a run that has kept enough checkpoints (--keep-checkpoints or --keep-every-steps)."""
    last: int = Field(4, ge=2)
    """Number of newest complete checkpoints to average."""
    validation_dir: PathOrName | None = None
    """Folder of records to score both models on, for a pre-training run; by default the run's validation_dir."""


class ShrinkSettings(NewOutSettings, ModelSettings):
    """Write some of a model's layers as a smaller model, which can learn from the large one.

    The embeddings and the head are copied. Train the result before you use it: see `--distillation.teacher`.
    Example: bert shrink runs/base runs/half --layers 0,2,4
    Example: bert shrink bert-base-uncased small --layers 0,1,2,3
    """

    layers: Annotated[list[NonNegativeInt], Field(min_length=1)]
    """Numbers of the layers in ascending order, from 0 at the embeddings."""

    def _check(self) -> None:
        if self.layers != sorted(set(self.layers)):
            raise SettingError("layers", "are not in ascending order", "sort them")


class EvaluateSettings(RunSettings, EngineSettings, JsonSettings):
    """Score a checkpoint of a pre-training run on records: losses, accuracies and bits per byte.

    The masks, the length of the examples and the precision are taken from the run.
    Example: bert evaluate runs/base_128_phase1 --dataset-dir data/held_out
    Example: bert evaluate runs/base_128_phase1/step_00001000 --dataset-dir data/field --json scores.json
    """

    dataset_dir: PathOrName | None = None
    """Folder of records; by default the run's validation_dir."""
    examples: Positive | None = None
    """Number of examples; by default the run's evaluation_examples."""
    baselines: bool = True
    """Also score a model that knows only how frequent each token is in the records of the run."""
