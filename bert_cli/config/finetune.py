"""The settings of fine-tuning.

A task has the settings of any training run, with defaults that are known to work for BERT (Devlin et al.
2019, appendix A.3; Mosbach et al. 2021 for warm-up and clipping), and its files. The shape of the model
comes from the pretrained model.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, PositiveFloat

from bert_cli.config.training import GlobalBatch, LearningRate, OptimizerOpts, TrainSettings
from bert_cli.facts import heads
from bert_cli.facts.bert import BertConfig
from bert_cli.facts.windows import ANSWER_LENGTH, DOC_STRIDE, QUERY_LENGTH, window_error
from bert_cli.files import JSONObject
from bert_cli.settings.markers import Fixed, PathOrName, Usual
from bert_cli.settings.numbers import Fraction, Length, Positive, UpToOne
from bert_cli.settings.settings import SettingError, Settings, Unless, as_list

GLUE_TASKS = ("cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb", "wnli")
CLUE_TASKS = ("afqmc", "tnews", "iflytek", "cmnli", "ocnli", "wsc", "csl")
UNSCORED = Unless(
    lambda of: not of.generated_dataset,
    "with generated_dataset, whose examples are not scored",
    "leave out one of them",
)


def _adam(rate: float) -> OptimizerOpts:
    schedule = LearningRate(max_learning_rate=rate, warmup_frac=0.1)
    return OptimizerOpts(
        name="AdamW", learning_rate=schedule, weight_decay_rate=0.01, max_gradient_norm=1.0
    )


def _as_table(value: object) -> object:
    """Return the object of a JSON text, as on the command line, and other values unchanged."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            return json.loads(value)
        except json.JSONDecodeError:
            raise ValueError("is not a JSON object; write '{\"spam\": 5}'") from None
    return value


def _longest(validated: JSONObject) -> int:
    config: BertConfig = validated.get("bert_config", BertConfig())
    return config.max_position_embeddings


class Distillation(Settings):
    """A trained model from which the run learns besides the labels."""

    NEEDS = dict.fromkeys(("logits", "temperature", "unlabelled_file"), "teacher")

    teacher: Usual[PathOrName | None] = None
    """A model that was trained for the same task: a run folder, a checkpoint, a Hugging Face folder or name. It has the
    same vocabulary; its outputs on the training examples are computed once, before the first step, and cached."""
    logits: UpToOne = 0.9
    """Weight of the loss against the teacher's outputs; the loss against the labels has the rest."""
    temperature: PositiveFloat = 2.0
    """Divisor of the logits of both models before the softmax (Hinton et al. 2015); regression has no softmax."""
    unlabelled_file: Path | None = None
    """Texts for `classify` and `glue` in a file like the training file, without its column of labels, or, if there is
    one text column, a .txt with one text on each line. An epoch has them all. Their loss is the loss against the
    teacher's outputs, and the teacher's prediction counts as their label in the accuracy of the training."""


class FinetuneSettings(TrainSettings):
    """Settings of every fine-tuning run."""

    NEEDS = {
        "do_training": UNSCORED,
        "evaluate_every_steps": [UNSCORED, "do_validation"],
        "seeds": "do_training",
        "global_batch.start_fraction": Unless(lambda _: False, "on fine-tuning"),
        "early_stop": [UNSCORED, "do_training", "do_validation"],
        "baselines": [UNSCORED, "do_training", "do_validation"],
    }

    max_seq_length: Usual[Length] = Field(default_factory=_longest)
    """Maximum sequence length in tokens; a batch is padded only to its longest example. By default the
    model_max_length of the tokenizer, at most the model's max_position_embeddings."""
    global_batch: GlobalBatch = GlobalBatch(micro_batch_size=32)
    """Examples of a step."""
    optimizer_opts: OptimizerOpts = _adam(2e-5)
    tokenizer_path: PathOrName | None = None
    """Tokenizer: a folder written by `bert vocab`, or the folder or name of a model; by default the pretrained
    model's tokenizer. Without pretrained_ckpt_path, training starts from new weights."""
    generated_dataset: Fixed[bool] = False
    """Train on synthetic examples to test a machine or a layout, without a model or a tokenizer."""
    num_epochs: Usual[PositiveFloat] = 3.0
    """Number of epochs: passes over the training examples."""
    do_training: bool = True
    """Train the model; otherwise only score it."""
    do_validation: bool = True
    """Score on the development set after each epoch and at the end, and select the best checkpoint."""
    seeds: Positive = 1
    """Number of runs with consecutive seeds, each in a folder seed_*; scores get a mean and standard deviation. Where
    `classify` tests few rows in folds, the number of folds."""
    early_stop: Positive | None = None
    """End the training after this many evaluations in a row without a better score; by default it reaches its last
    step."""
    cache_dir: Path | None = Path("~/.cache/bert/features")
    """Folder that caches tokenized examples; null for no cache."""

    @property
    def knows_its_model(self) -> bool:
        """Return whether the config has the shape of the model; otherwise the pretrained model has it."""
        return "bert_config" in self.model_fields_set

    def _check(self) -> None:
        if not self.do_training and not self.do_validation:
            problem = "is off, and so is do_validation"
            raise SettingError("do_training", problem, "turn one of them on")


def check_once(name: str, values: Sequence[object]) -> None:
    """Raise SettingError for a value that comes twice in a list."""
    for number, value in enumerate(values):
        if value in values[:number]:
            raise SettingError(name, f"names {value} twice", "name each once")


class TaskSettings(FinetuneSettings):
    """Settings of every task with labels."""

    NEEDS = {"distillation": ["do_training", ("generated_dataset", False)]}

    doc_stride: Positive | None = None
    """Read a text of more than max_seq_length tokens in overlapping windows, whose starts are this many tokens apart.
    Each is trained with the text's label, and the text has the mean of their logits; a word of `ner` counts in the
    window where it is most central. By default such a text is truncated, and a sentence of `ner` is cut in parts."""
    distillation: Distillation = Distillation()
    """Soft labels of a larger model for a smaller one."""

    def _check(self) -> None:
        stride = self.doc_stride
        if stride is None:
            return
        error = window_error(self.max_seq_length, stride)
        if error:
            raise SettingError("max_seq_length", *error)


class SquadSettings(TaskSettings):
    """Fine-tune on question answering (SQuAD 1.1 and 2.0) and score the answers.

    Example: bert squad --config squad_base --pretrained-ckpt-path runs/base_512_phase2
    Example: bert squad --config squad_base --pretrained-ckpt-path bert-base-uncased --version-2
    --dataset-dir data/squad --save-ckpt-path runs/squad_2
    """

    COMMAND = "squad"
    HEAD = heads.QUESTION_ANSWERING
    NEEDS = {"null_score_diff_threshold": "version_2"}

    dataset_dir: Path | None = None
    """Folder with train-v1.1.json and dev-v1.1.json, or with the files of 2.0."""
    train_file: Path | None = None
    """Questions for training; by default the questions in dataset_dir."""
    validation_file: Path | None = None
    """Questions for scoring; by default the questions in dataset_dir."""
    max_seq_length: Usual[Annotated[int, Field(ge=32)]] = Field(default_factory=_longest)
    """Maximum length of a window, in tokens: the question and a part of the paragraph. By default the
    model_max_length of the tokenizer, at most the model's max_position_embeddings."""
    doc_stride: Positive = DOC_STRIDE
    """Distance in tokens between the starts of consecutive windows of a long paragraph."""
    max_query_length: Positive = QUERY_LENGTH
    """Maximum length of a question, in tokens; longer questions are truncated."""
    max_answer_length: Positive = ANSWER_LENGTH
    """Maximum length of an answer, in tokens."""
    version_2: bool = False
    """Allow no answer, as in SQuAD 2.0; the answer is then empty."""
    null_score_diff_threshold: float | None = None
    """With version_2, predict no answer if the score of no answer exceeds the best answer's score by more than this.
    By default it is chosen on the development set."""
    global_batch: GlobalBatch = GlobalBatch(micro_batch_size=16)
    """Windows of a step."""
    optimizer_opts: OptimizerOpts = _adam(3e-5)
    num_epochs: Usual[PositiveFloat] = 2.0

    def _check(self) -> None:
        error = window_error(self.max_seq_length, self.doc_stride, self.max_query_length)
        if error:
            raise SettingError("max_seq_length", *error)


class GlueSettings(TaskSettings):
    """Fine-tune on a task of GLUE or CLUE and score it with its official metrics.

    Example: bert glue --config glue_base --glue-task mrpc --dataset-dir data/glue
    Example: bert glue --glue-task rte --dataset-dir data/glue --pretrained-ckpt-path bert-base-uncased
    --save-ckpt-path runs/rte --seeds 5
    """

    COMMAND = "glue"
    HEAD = heads.SEQUENCE_CLASSIFICATION
    NEEDS = {"do_test": [UNSCORED, "do_validation", "save_ckpt_path"]}

    glue_task: Literal[(*GLUE_TASKS, *CLUE_TASKS)] = "mrpc"  # type: ignore[valid-type]
    """The task: cola, mnli, mrpc, qnli, qqp, rte, sst2, stsb, wnli of GLUE; afqmc, tnews, iflytek,
    cmnli, ocnli, wsc, csl of CLUE."""
    dataset_dir: Path | None = None
    """Folder of GLUE (with CoLA, MRPC and so on), of CLUE, or of the single task."""
    do_test: bool = False
    """Also predict the test set with the best checkpoint, in the format of the benchmark server."""


class NerSettings(TaskSettings):
    """Fine-tune on token classification, such as named entities, in CoNLL format.

    Example: bert ner --pretrained-ckpt-path runs/base --train-file train.conll
    --validation-file dev.conll --save-ckpt-path runs/ner
    Example: bert ner --pretrained-ckpt-path bert-base-cased --train-file train.conll
    --validation-file dev.conll --save-ckpt-path runs/ner --num-epochs 5 --seeds 3
    """

    COMMAND = "ner"
    HEAD = heads.TOKEN_CLASSIFICATION

    train_file: Path | None = None
    """Training sentences: a token and its BIO label on each line, a blank line between sentences."""
    validation_file: Path | None = None
    """Sentences for scoring."""
    optimizer_opts: OptimizerOpts = _adam(5e-5)


class ClassifySettings(TaskSettings):
    """Fine-tune on text classification with your own CSV, TSV or JSON lines file.

    Example: bert classify --pretrained-ckpt-path runs/base --train-file train.csv
    --text-column text --label-column label --save-ckpt-path runs/mine
    Example: bert classify --pretrained-ckpt-path bert-base-uncased --train-file pairs.tsv
    --text-column first --text-column second --save-ckpt-path runs/pairs
    Example: bert classify --pretrained-ckpt-path runs/base --train-file posts.csv
    --label-separator "|" --class-weights balanced --save-ckpt-path runs/several
    """

    COMMAND = "classify"
    HEAD = heads.SEQUENCE_CLASSIFICATION
    NEEDS = {
        "held_out_fraction": [UNSCORED, "do_validation", ("validation_file", None)],
        "few": [
            ("generated_dataset", False),
            ("distillation", Distillation()),
            ("class_weights", None),
            ("doc_stride", None),
        ],
        "class_weights": [
            "do_training",
            UNSCORED,
            Unless(lambda of: of.distillation.unlabelled_file is None, "with unlabelled_file"),
        ],
        "label_separator": Unless(
            lambda of: len(of.label_column) == 1, "with a column for each label"
        ),
    }
    DEFAULTS_WITH: ClassVar[Mapping[str, JSONObject]] = {
        "few": {
            "num_epochs": 1.0,
            "global_batch": {"micro_batch_size": 16},
            "optimizer_opts": {"learning_rate": {"max_learning_rate": 1e-4}},
        }
    }
    """Switch -> values that are the defaults with it."""

    train_file: Path | None = None
    """Rows for training: .csv, .tsv, .jsonl or .parquet, also compressed (.gz, .bz2, .xz, .zst)."""
    validation_file: Path | None = None
    """Rows for scoring; by default `held_out_fraction` of train_file, also without do_training."""
    text_column: list[str] = ["text"]
    """The column of the text; repeat it for pairs of texts."""
    label_column: Annotated[list[str], BeforeValidator(as_list)] = ["label"]
    """The column of the label. A text may have several: in a list (JSON lines, Parquet), in a text with a
    label_separator, or in a column of 0 and 1 for each label, which are named by repeating the flag."""
    label_separator: Fixed[Annotated[str, Field(min_length=1)] | None] = None
    """What stands between the labels of a text in its column, such as | in `food|earth`."""
    class_weights: Fixed[
        Annotated[
            Literal["balanced"] | Annotated[dict[str, PositiveFloat], Field(min_length=1)] | None,
            BeforeValidator(_as_table),
        ]
    ] = None
    """Weights of the labels in the loss, for labels that are not equally frequent: `balanced`, inverse to the number of
    their texts, or a JSON object such as {"spam": 5}, where other labels have 1. Of several labels of a text, the
    weight of a label where the text has it."""
    few: Fixed[bool] = False
    """For 8 to 100 rows of a label, and a start that was trained for similarity: train the vectors of the start on
    pairs of texts with the same label, at most 320, and compute the classifier by logistic regression."""
    held_out_fraction: Fraction | None = None
    """Fraction of the training rows of each label held out for scoring if there is no validation_file. Rows with a text
    in common are on one side. By default 0.1; of fewer than 1,000 rows each is tested once, in 5 folds or as many as
    seeds, and a last training has all rows, but not with evaluate_every_steps, early_stop or a teacher."""

    @property
    def head(self) -> heads.Head:
        """Return the head of this run."""
        if self.few:
            return heads.MEAN_CLASSIFICATION
        return super().head

    @property
    def texts_per_example(self) -> int:
        """Return the number of texts in an example: a pair of them, or one."""
        if self.few:
            return 2
        return 1

    def _check(self) -> None:
        if not 1 <= len(self.text_column) <= 2:
            problem = f"names {len(self.text_column)} columns"
            raise SettingError("text_column", problem, "name one or two")
        check_once("text_column", [*self.label_column, *self.text_column])
