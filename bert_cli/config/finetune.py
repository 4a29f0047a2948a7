"""Every setting of fine-tuning: what all tasks share, and what each reads.

A task has the settings of any run that trains (model, batch, layout, optimizer, folder) with defaults
that are known good for BERT (Devlin et al. 2019, appendix A.3; Mosbach et al. 2021 for the warm-up and
the clipping), and beside them its files. The shape of the model is that of the model it starts from.
"""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, model_validator
from pydantic_settings import CliPositionalArg

from bert_cli.config.model import BertConfig
from bert_cli.config.settings import Positive, Settings, is_set
from bert_cli.config.training import GlobalBatch, LearningRate, OptimizerOpts, TrainSettings

GLUE_TASKS = ("cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb", "wnli")
CLUE_TASKS = ("afqmc", "tnews", "iflytek", "cmnli", "ocnli", "wsc", "csl")
LENGTHS_OF_A_RUN = ("total_num_train_samples", "num_epochs")
QUESTION_SPECIALS = 3
"""Places of a window that [CLS] and both [SEP] take."""


def _adam(rate: float) -> OptimizerOpts:
    return OptimizerOpts(
        name="AdamW",
        learning_rate=LearningRate(max_learning_rate=rate, warmup_frac=0.1),
        weight_decay_rate=0.01,
        max_gradient_norm=1.0,
    )


def _longest(validated: dict[str, Any]) -> int:
    """The default of max_seq_length: the longest sequence that the model can read."""
    config: BertConfig = validated.get("bert_config", BertConfig())
    return config.max_position_embeddings


class FinetuneSettings(TrainSettings):
    """What every fine-tuning has."""

    max_seq_length: Annotated[int, Field(ge=8)] = Field(default_factory=_longest)
    """Longest example S, in tokens; batches are as long as their longest. By default the model_max_length
    of the tokenizer, at most the model's max_position_embeddings."""
    global_batch: GlobalBatch = GlobalBatch(micro_batch_size=32)
    """Examples of a step."""
    optimizer_opts: OptimizerOpts = _adam(2e-5)
    """How a gradient becomes a move of the weights."""
    tokenizer_path: str | None = None
    """A folder of `bert vocab`, or folder or name of the model whose tokenizer is used; by default the one
    that training starts from. With it alone, and no pretrained_ckpt_path, training starts from new weights."""
    generated_dataset: bool = False
    """Train on synthetic examples instead of files, to try a machine or a layout; nothing is scored. A
    model to start from and a tokenizer are not needed."""
    num_epochs: Annotated[float, Field(gt=0.0)] = 3.0
    """How often the run goes through the training examples."""
    total_num_train_samples: Positive | None = None
    """Examples that the run reads, rounded up to whole steps; instead of num_epochs."""
    output_dir: Path | None = None
    """Folder that the predictions are written into; by default save_ckpt_path."""
    do_training: bool = True
    """Train; without it the model is only scored."""
    do_validation: bool = True
    """Score on the development set after each epoch and at the end, and keep the best checkpoint."""
    seeds: Positive = 1
    """Runs with so many seeds, from `seed` on, each in a folder seed_* of its own, and tells mean and
    spread; what is held out of the examples is the same for all."""
    cache_dir: Path | None = Path("~/.cache/bert/features")
    """Where tokenized examples are kept for the next time; null in the config for nowhere."""

    @property
    def knows_its_model(self) -> bool:
        """By default the shape is read from the model that training starts from."""
        return "bert_config" in self.model_fields_set

    @model_validator(mode="before")
    @classmethod
    def _a_flag_says_how_long(cls, given: Any, info: ValidationInfo) -> Any:
        """Drop the length of the run that a config gives where a flag gives the other one."""
        origins = (info.context or {}).get("origins", {})
        flags = [name for name in LENGTHS_OF_A_RUN if origins.get(name, "").startswith("--")]
        if not isinstance(given, dict) or len(flags) != 1:
            return given
        return {k: one for k, one in given.items() if k in flags or k not in LENGTHS_OF_A_RUN}

    @model_validator(mode="after")
    def _has_one_length(self) -> "FinetuneSettings":
        if self.total_num_train_samples is not None and is_set(self, "num_epochs"):
            raise ValueError(
                f"total_num_train_samples ({self.total_num_train_samples}) and num_epochs ({self.num_epochs:g}) "
                "both say how long the run is; leave out one of them"
            )
        return self

    @model_validator(mode="after")
    def _does_something(self) -> "FinetuneSettings":
        if not self.do_training and not self.do_validation:
            raise ValueError("do_training and do_validation are both off; leave one on")
        if self.evaluate_every_steps is not None and not self.do_validation:
            raise ValueError(
                "evaluate_every_steps has no effect without do_validation; leave it out"
            )
        if not self.do_training and self.seeds > 1:
            raise ValueError("seeds has no effect without do_training; leave it out")
        return self


def lacking_room(max_seq_length: int, doc_stride: int, max_query_length: int) -> str:
    """What is wrong with windows that leave text between two of them in none; empty where nothing is."""
    room = max_seq_length - QUESTION_SPECIALS - max_query_length
    if room >= doc_stride:
        return ""
    return (
        f"max_seq_length ({max_seq_length}) leaves {max(0, room)} places for the paragraph beside "
        f"max_query_length ({max_query_length}) and {QUESTION_SPECIALS} special tokens, fewer than doc_stride "
        f"({doc_stride}); raise it to {QUESTION_SPECIALS + max_query_length + doc_stride}, or lower the others"
    )


class SquadSettings(FinetuneSettings):
    """Fine-tune on questions about paragraphs (SQuAD 1.1 and 2.0) and score the answers.

    Example: bert squad --config squad_base --pretrained-ckpt-path runs/base_512_phase2
    Example: bert squad --config squad_base --pretrained-ckpt-path bert-base-uncased --version-2
    --dataset-dir data/squad --save-ckpt-path runs/squad_2
    Example: bert squad --config squad_base --no-do-training --save-ckpt-path runs/squad_base
    """

    LAST_BLOCKS: ClassVar[tuple[str, ...]] = ("qa_head",)

    dataset_dir: Path | None = None
    """Folder with train-v1.1.json and dev-v1.1.json, or with those of 2.0."""
    train_file: Path | None = None
    """Questions to train on; by default the one of dataset_dir."""
    validation_file: Path | None = None
    """Questions to score on; by default the one of dataset_dir."""
    version_2: bool = False
    """SQuAD 2.0: questions may have no answer, and the threshold for saying so is chosen on the
    development set."""
    max_seq_length: Annotated[int, Field(ge=32)] = Field(default_factory=_longest)
    """Longest window S, in tokens: the question and a part of the paragraph. By default the
    model_max_length of the tokenizer, at most the model's max_position_embeddings."""
    global_batch: GlobalBatch = GlobalBatch(micro_batch_size=16)
    """Windows of a step."""
    optimizer_opts: OptimizerOpts = _adam(3e-5)
    """How a gradient becomes a move of the weights."""
    num_epochs: Annotated[float, Field(gt=0.0)] = 2.0
    """How often the run goes through the training windows."""
    doc_stride: Positive = 128
    """Tokens from the start of a window of a long paragraph to that of the next."""
    max_query_length: Positive = 64
    """Longest question, in tokens; the rest is cut off."""
    n_best_size: Positive = 20
    """Answers of each question in nbest_predictions.json."""
    max_answer_length: Positive = 30
    """Longest answer, in tokens."""
    null_score_diff_threshold: float | None = None
    """With version_2, how much better no answer must score than the best one to be given; by default
    chosen on the development set."""

    @model_validator(mode="after")
    def _windows_cover_the_paragraph(self) -> "SquadSettings":
        lacking = lacking_room(self.max_seq_length, self.doc_stride, self.max_query_length)
        if lacking:
            raise ValueError(lacking)
        return self

    @model_validator(mode="after")
    def _threshold_is_of_version_2(self) -> "SquadSettings":
        if self.null_score_diff_threshold is not None and not self.version_2:
            raise ValueError(
                "null_score_diff_threshold has no effect without version_2; leave it out"
            )
        return self


class SquadScoreSettings(Settings):
    """Score a file of predictions for SQuAD as the official scripts do; prints one JSON object.

    Example: bert squad-score dev-v1.1.json runs/squad/predictions.json
    Example: bert squad-score dev-v2.0.json runs/squad_2/predictions.json
    Example: bert squad-score dev-v2.0.json predictions.json --na-prob-file null_odds.json
    """

    gold: CliPositionalArg[Path]
    """The development set, SQuAD 1.1 or 2.0."""
    predictions: CliPositionalArg[Path]
    """A JSON object: question id -> answer."""
    na_prob_file: Path | None = None
    """For SQuAD 2.0, a JSON object: question id -> probability that it has no answer, or odds. Also prints the
    thresholds that score best."""
    na_prob_thresh: float = 1.0
    """With na_prob_file, an answer counts as none where the probability is above this."""

    @model_validator(mode="after")
    def _threshold_has_probabilities(self) -> "SquadScoreSettings":
        if "na_prob_thresh" in self.model_fields_set and self.na_prob_file is None:
            raise ValueError("na_prob_thresh has no effect without na_prob_file; give both")
        return self


class GlueSettings(FinetuneSettings):
    """Fine-tune on a task of GLUE or CLUE and score it with its official metrics.

    Example: bert glue --config glue_base --glue-task mrpc --dataset-dir data/glue
    Example: bert glue --glue-task rte --dataset-dir data/glue --pretrained-ckpt-path bert-base-uncased
    --save-ckpt-path runs/rte --seeds 5
    Example: bert glue --glue-task cola --dataset-dir data/glue --pretrained-ckpt-path runs/base_512_phase2
    --save-ckpt-path runs/cola --do-test
    """

    LAST_BLOCKS: ClassVar[tuple[str, ...]] = ("pool", "glue_head")

    glue_task: Literal[(*GLUE_TASKS, *CLUE_TASKS)] = "mrpc"  # type: ignore[valid-type]
    """The task: cola, mnli, mrpc, qnli, qqp, rte, sst2, stsb, wnli of GLUE; afqmc, tnews, iflytek,
    cmnli, ocnli, wsc, csl of CLUE."""
    dataset_dir: Path | None = None
    """Folder of GLUE (holding CoLA, MRPC and so on) or of CLUE, or the task's own."""
    do_test: bool = False
    """Also predict the test set and write the file that the benchmark's server accepts."""

    @model_validator(mode="after")
    def _test_predictions_have_a_model_and_a_place(self) -> "GlueSettings":
        if self.do_test and not self.do_validation:
            raise ValueError(
                "do_test has no effect without do_validation, whose scores choose the checkpoint that predicts; "
                "leave out one of them"
            )
        if self.do_test and self.save_ckpt_path is None and self.output_dir is None:
            raise ValueError(
                "do_test writes a file; give --save-ckpt-path or --output-dir, the folder that receives it"
            )
        return self


class NerSettings(FinetuneSettings):
    """Fine-tune on labelled tokens (named entities and the like) in CoNLL format.

    Example: bert ner --pretrained-ckpt-path runs/base --train-file train.conll
    --validation-file dev.conll --save-ckpt-path runs/ner
    Example: bert ner --pretrained-ckpt-path bert-base-cased --train-file train.conll
    --validation-file dev.conll --save-ckpt-path runs/ner --num-epochs 5 --seeds 3
    """

    LAST_BLOCKS: ClassVar[tuple[str, ...]] = ("token_head",)

    train_file: Path | None = None
    """Sentences to train on: a token and its BIO label a line, blank lines between sentences."""
    validation_file: Path | None = None
    """Sentences to score on."""
    optimizer_opts: OptimizerOpts = _adam(5e-5)
    """How a gradient becomes a move of the weights."""


class ClassifySettings(FinetuneSettings):
    """Fine-tune on labelled texts of your own, in a CSV, TSV or JSON-lines file.

    Example: bert classify --pretrained-ckpt-path runs/base --train-file train.csv
    --text-column text --label-column label --save-ckpt-path runs/mine
    Example: bert classify --pretrained-ckpt-path bert-base-uncased --train-file pairs.tsv
    --text-column first --text-column second --save-ckpt-path runs/pairs
    """

    LAST_BLOCKS: ClassVar[tuple[str, ...]] = ("pool", "glue_head")

    train_file: Path | None = None
    """Rows to train on: .csv, .tsv, .jsonl, also .gz of each."""
    validation_file: Path | None = None
    """Rows to score on; by default `held_out_share` of train_file, also without do_training."""
    text_column: list[str] = ["text"]
    """The column of the text; give it twice for pairs of texts."""
    label_column: str = "label"
    """The column of the label."""
    held_out_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """Share of the training rows to score on where no validation_file is given, of each label alike."""

    @model_validator(mode="after")
    def _one_text_or_two(self) -> "ClassifySettings":
        if not 1 <= len(self.text_column) <= 2:
            raise ValueError(f"text_column names {len(self.text_column)} columns; give one or two")
        if is_set(self, "held_out_share") and self.validation_file is not None:
            raise ValueError("held_out_share has no effect with validation_file; leave one out")
        if is_set(self, "held_out_share") and not self.do_validation:
            raise ValueError("held_out_share has no effect without do_validation; leave it out")
        return self
