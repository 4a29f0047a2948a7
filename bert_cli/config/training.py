"""The settings of a training run, and those of pre-training.

The nesting is that of the JSON file; a flag is the dotted path in kebab case (`--global-batch.replicas 4`).
The keys are those of Graphcore's BERT example.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, field_validator, model_validator

from bert_cli.config.data import Masking, check_mask_tokens, packed_predictions
from bert_cli.config.settings import (
    BertConfig,
    Cluster,
    Engine,
    Hidden,
    Parallel,
    Positive,
    Probability,
    SettingError,
    Settings,
    Wandb,
    is_remote,
    is_set,
    without_effect,
)


class About(Settings):
    """The description of a config: JSON has no comments."""

    what: str
    """One sentence: the model, the phase, the data."""
    command: str
    """The command line that starts it."""
    expect: str
    """Time, hardware, or the expected loss or score."""


Scaling = Literal["unit", "u-mup"]
# Of global_batch, those that a stage may change.
BATCH_SIZES = ("micro_batch_size", "grad_acc_steps_per_replica")


class BatchShape(NamedTuple):
    """The sizes B, S, P and C of a batch, in examples and in positions of an example."""

    examples: int
    positions: int
    masked: int = 0
    sequences: int = 1


class GlobalBatch(Settings):
    """How many examples one step reads: the product of the first three numbers."""

    micro_batch_size: Positive
    """Examples that a replica processes at once; they must fit in its memory."""
    replicas: Positive = 1
    """Model replicas that divide the examples of a step among them."""
    grad_acc_steps_per_replica: Positive = 1
    """Micro-batches whose gradients a replica accumulates before an update."""
    start_fraction: Annotated[float, Field(gt=0.0, le=1.0, exclude_if=lambda one: one == 1.0)] = 1.0
    """Fraction of the accumulation at the first step, from which the batch grows linearly."""
    growth_frac: Annotated[float, Field(gt=0.0, le=1.0, exclude_if=lambda one: one == 0.5)] = 0.5
    """Fraction of the run's examples after which the batch is complete."""

    @property
    def examples(self) -> int:
        """Return the examples of a step when the batch is complete."""
        return self.micro_batch_size * self.replicas * self.grad_acc_steps_per_replica


class LearningRate(Settings):
    """The learning rate as a function of the step."""

    NEEDS: ClassVar = {"warmup_power": "warmup_frac", "decay_frac": ("schedule_name", "wsd")}

    schedule_name: Literal["up_down", "constant", "cosine", "wsd"] = "up_down"
    """`up_down`: linear warm-up, linear decay to 1e-7 on the last step; `cosine`: the same warm-up, half a
    cosine; `constant`: the maximum after the warm-up; `wsd`: the maximum, then a decay over the last steps."""
    max_learning_rate: Annotated[float, Field(gt=0.0)]
    """Maximum learning rate; with reference_batch_size, the one for that batch."""
    warmup_frac: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Fraction of the steps in which the learning rate rises from zero."""
    warmup_power: Annotated[float, Field(gt=0.0, exclude_if=lambda power: power == 1.0)] = 1.0
    """Power of the fraction of the warm-up that has passed; 1 rises linearly, 0.5 like a square root."""
    decay_frac: Annotated[float, Field(gt=0.0, le=1.0, exclude_if=lambda one: one == 0.1)] = 0.1
    """Fraction of the steps over which `wsd` decays at the end."""
    decay_shape: Annotated[
        Literal["1-sqrt", "linear", "cosine"], Field(exclude_if=lambda one: one == "1-sqrt")
    ] = "1-sqrt"
    """Curve of the decay of `wsd` over its steps."""
    reference_batch_size: Positive | None = None
    """Linear scaling rule: multiply the learning rate by global batch / this number."""


class OptimizerOpts(Settings):
    """The optimizer and its hyperparameters."""

    NEEDS: ClassVar = {"no_layer_adaptation": ("name", "LAMB")}

    name: Literal["LAMB", "AdamW"]
    """LAMB for batches of thousands, AdamW for smaller ones."""
    learning_rate: LearningRate
    """Schedule of the learning rate."""
    weight_decay_rate: Annotated[float, Field(ge=0.0)] = 0.01
    """Decoupled weight decay."""
    loss_scaling: Annotated[float, Field(gt=0.0)] | Literal["dynamic"] = 1.0
    """Factor of the loss that keeps small float16 gradients from underflow; `dynamic` adapts it."""
    beta_1: Probability = 0.9
    """Decay rate of the first moment."""
    beta_2: Probability = 0.999
    """Decay rate of the second moment."""
    epsilon: Annotated[float, Field(gt=0.0)] = 1e-6
    """Added to the root of the second moment."""
    layer_decay: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Layer-wise learning rate decay: the factor from each layer to the one below; the heads have none."""
    max_gradient_norm: Annotated[float, Field(gt=0.0)] | None = None
    """Clip the gradient norm of the complete step to this value; no clipping by default."""
    no_weight_decay: list[str] = ["bias", "beta"]
    """Weights without decay, by the last part of their names."""
    no_layer_adaptation: list[str] = ["bias", "beta", "gamma"]
    """Weights without LAMB's trust ratio, by the last part of their names."""
    stochastic_rounding: bool = False
    """Round the update of float16 weights up or down at random, without bias."""


class TrainSettings(Settings):
    """Settings of every training run: model, batch, layout, precision, optimizer, folder, reports."""

    NEEDS: ClassVar = {"compile": ("engine", "tensorflow")}
    LAST_BLOCKS: ClassVar[tuple[str, ...]]
    """The blocks after the encoder layers."""
    SAVES: ClassVar[bool] = True
    """Whether the command has a run folder."""
    about: About | None = None
    """Description of this config, printed when the run starts."""
    bert_config: BertConfig = BertConfig()
    """The shape of the model."""
    max_seq_length: Annotated[int, Field(ge=8)]
    """Sequence length S of an example."""
    global_batch: GlobalBatch
    """Examples of a step."""
    engine: Engine = "tensorflow"
    """Framework of the steps: `tensorflow` has pipelines, `jax` tensor parallelism; checkpoints are the same."""
    parallel: Parallel = Parallel()
    """Layout over devices."""
    cluster: Cluster = Cluster()
    """The processes of a run on several GPUs or hosts."""
    precision: Literal["float32", "mixed_float16", "mixed_bfloat16", "float16"] = "float32"
    """Number format of weights and matrix products; optimizer state, update and losses are always float32."""
    optimizer_opts: OptimizerOpts
    """The optimizer and its hyperparameters."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1984
    """Seed of initial weights, order of examples, dropout and dynamic masks."""
    save_ckpt_path: Path | None = None
    """The run folder, from which the same command resumes; by default checkpoints/ and the config's name."""
    pretrained_ckpt_path: str | None = None
    """Weights to start from: a checkpoint or run folder of this tool, a Hugging Face folder or a name on its
    hub, or a TensorFlow checkpoint of Google's or Graphcore's example (its folder or `bert_model.ckpt`).
    The optimizer starts fresh."""
    checkpoint_every_steps: Positive | None = None
    """Save every N steps; the last step is always saved."""
    checkpoint_every_minutes: Annotated[float, Field(gt=0.0)] | None = 30.0
    """Save when this many minutes have passed since the last save; null for never."""
    keep_checkpoints: Positive = 3
    """Number of newest checkpoints that are not deleted."""
    keep_every_steps: Positive | None = None
    """Never delete checkpoints of steps that this number divides."""
    log_every_steps: Positive = 1
    """Print a line every N steps; metrics.jsonl has every step."""
    evaluate_every_steps: Positive | None = None
    """Evaluate every N steps and at the end."""
    max_skipped_steps: Positive = 20
    """Stop the run after this many non-finite gradients in a row."""
    tensorboard_dir: Path | None = None
    """Write TensorBoard event files to this folder."""
    wandb: Wandb = Wandb()
    """Weights & Biases."""
    exit_code_when_stopped: Annotated[int, Field(ge=0, le=125)] = 0
    """Exit code of a run that saved after a request to stop, such as 75 to tell a scheduler to restart it."""
    dry_run: bool = False
    """Print settings with their origins and the plan, run two steps, save nothing."""
    compile: Literal["auto", "chains", "stages", "nothing"] = "auto"
    """What XLA compiles: the update and the element-wise `chains` between matrix products, or complete
    `stages`; `auto` is chains on CPUs, whose products are faster outside XLA, and stages on GPUs."""
    compile_only: bool = False
    """Load the initial weights, trace and compile everything that a step needs, print the time, and stop."""
    deterministic: bool = True
    """Use only reproducible operations, so that a resumed run equals the uninterrupted one bit for bit."""

    @property
    def positions_read(self) -> int:
        """Return how many positions of an example, [CLS] among them, the blocks after the encoder read."""
        return self.max_seq_length

    @property
    def mask_probabilities(self) -> tuple[float, float] | None:
        """Return the fractions of tokens that the first and the last step mask, if they differ."""
        return None

    @property
    def later_stages(self) -> Sequence["PretrainSettings"]:
        """Return the settings of the stages after the first."""
        return ()

    @property
    def knows_its_model(self) -> bool:
        """Return whether bert_config is the shape of the model, not one to be read from a checkpoint."""
        return self.pretrained_ckpt_path is None or "bert_config" in self.model_fields_set

    @model_validator(mode="after")
    def _check_model_and_optimizer(self) -> "TrainSettings":
        options, model = self.optimizer_opts, self.bert_config
        self.parallel.check_engine(self.engine, model if self.knows_its_model else None)
        longest = model.max_position_embeddings
        if self.knows_its_model and self.max_seq_length > longest:
            problem = f"{self.max_seq_length} is more than bert_config.max_position_embeddings ({longest})"
            raise SettingError("max_seq_length", problem, "shorten it or make the model longer")
        if options.stochastic_rounding and self.precision != "float16":
            problem = f"has no effect with precision {self.precision!r}, whose weights are float32"
            remedy = "leave it out or choose precision float16"
            raise SettingError("optimizer_opts.stochastic_rounding", problem, remedy)
        stages = self.parallel.pipeline_stages
        if stages is None or self.parallel.layout == "auto" or not self.knows_its_model:
            return self  # no stages, stages that `auto` replaces, or an unknown number of layers
        expected = ["emb", *["hid"] * model.num_hidden_layers, *self.LAST_BLOCKS]
        listed = [block for stage in stages for block in stage]
        if listed != expected:
            named, needed = (", ".join(short(blocks)) for blocks in (listed, expected))
            problem = f"lists {named}; the model has {needed}"
            raise SettingError("parallel.pipeline_stages", problem, "list its blocks in this order")
        return self


def short(blocks: Sequence[str]) -> list[str]:
    """Return blocks as in a config: emb, hid*4."""
    runs = [(name, len(list(equal))) for name, equal in itertools.groupby(blocks)]
    return [name if times == 1 else f"{name}*{times}" for name, times in runs]


class WeightedCorpus(Settings):
    """One of several corpora that a run reads."""

    path: str
    """Folder or address of the records."""
    weight: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1.0
    """Relative weight of the corpus in the mixture."""


class Stage(Settings):
    """A later stage of a run, with sequences of another length."""

    dataset_dir: str | list[WeightedCorpus] | None = None
    """Records of the stage, by default those of the run."""
    max_seq_length: Annotated[int, Field(ge=8)]
    """Sequence length S of the stage."""
    max_predictions_per_seq: Positive
    """Maximum number P of masked positions of an example of the stage."""
    total_num_train_samples: Positive
    """Examples that the stage reads, rounded up to full steps."""
    micro_batch_size: Positive | None = None
    """Examples of a micro-batch, by default as many as before."""
    grad_acc_steps_per_replica: Positive | None = None
    """Micro-batches that a replica accumulates, by default as many as before."""


class PretrainSettings(TrainSettings):
    """Pre-train BERT with masked-LM and next-sentence prediction.

    Example: bert pretrain --config configs/pretrain_tiny_128_phase1.json --dataset-dir data/demo/128
    Example: bert pretrain --config pretrain_base_512_phase2 --pretrained-ckpt-path runs/base_128_phase1
    """

    LAST_BLOCKS: ClassVar[tuple[str, ...]] = ("enc_out", "pool", "heads")
    NEEDS: ClassVar = {
        "evaluation_examples": "validation_dir",
        "new_rows_only_steps": "pretrained_ckpt_path",
        "decay_from": "pretrained_ckpt_path",
        "stages": ("max_sequences_per_pack", 1),
        "length_buckets": ("generated_dataset", False),
        "probe": ("generated_dataset", False),
    }

    dataset_dir: str | list[WeightedCorpus] | None = None
    """Folder of records with a corpus.json, or its address (s3://...). Given several times, or in a config
    as a list of {"path": ..., "weight": ...}, the run mixes them by weight. `$DATASETS_DIR` and `~` are
    expanded."""
    validation_dir: str | None = None
    """Folder of records for the evaluation every `evaluate_every_steps`."""
    dataset_cache: Path = Path("~/.cache/bert/records")
    """Folder on this machine that caches records from object storage."""
    generated_dataset: bool = False
    """Train on synthetic examples instead of those in dataset_dir, to try a machine or a layout."""
    max_predictions_per_seq: Positive
    """Maximum number P of masked positions of an example."""
    scaling: Scaling | None = None
    """Unit Scaling: `unit` gives weights, activations and gradients a variance of about 1, so that float16 needs no
    loss scale; `u-mup` also divides logits by the width, attention scores by the head size and AdamW's rates by the
    roots of fan-in and depth, so that the best rate of a narrow model fits a wide one. Checkpoints are plain BERTs."""
    masking: Masking = Masking()
    """How the masked tokens are chosen, anew in each epoch; for dynamic records."""
    max_sequences_per_pack: Positive = 1
    """Maximum number C of sequences in a pack: from 2 on, short sequences of dynamic records are packed
    together while reading. Batches, samples and learning rates are then counted in sequences."""
    length_buckets: Positive | None = None
    """Read records in at most this many buckets of similar length, so that a step is only as long as its
    longest example; for dynamic records without packs."""
    total_num_train_samples: Positive | None = None
    """Examples that the run reads, rounded up to full steps; by default those of Graphcore's example:
    460,849,152 for sequence lengths up to 128, 34,239,360 for longer ones."""
    stages: Annotated[list[Stage], Field(exclude_if=lambda stages: not stages)] = []
    """Stages after that of the other settings, in one run with one learning rate schedule."""
    decay_from: Annotated[Positive | None, Field(exclude_if=lambda step: step is None)] = None
    """Decay the learning rate as `wsd` does, from this step of the run in `pretrained_ckpt_path` to the last step
    of this one, which continues it with its optimizer and its examples."""
    budget_hours: Annotated[float | None, Field(gt=0.0, exclude_if=lambda hours: hours is None)] = (
        None
    )
    """Hours that the run may take: the number of examples follows from the pace of steps that are measured at its
    start. Those of stages keep their ratio to `total_num_train_samples`."""
    evaluation_examples: Positive = 10_000
    """Examples of an evaluation, from the start of the validation order."""
    probe: str | None = None
    """File of minimal pairs of sentences that each evaluation scores, JSON lines {"good": ..., "bad": ...}, or
    `english` for those of this tool. The good one should have the higher pseudo-log-likelihood (Salazar et al.
    2020, equation 1)."""
    new_rows_only_steps: Annotated[int, Field(ge=0)] = 0
    """Steps at the start in which only the rows of the pieces are trained that extend the vocabulary of
    `pretrained_ckpt_path`."""
    known_rows: Hidden[int] = 0
    """Rows of the word embeddings that the model had before."""

    @field_validator("dataset_dir", mode="before")
    @classmethod
    def _paths_become_corpora(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return str(value) if isinstance(value, Path) else value
        if len(value) == 1 and isinstance(value[0], str):
            return value[0]
        return [{"path": one} if isinstance(one, str) else one for one in value]

    @property
    def dataset_paths(self) -> list[str]:
        """Return the folders or addresses of `dataset_dir`."""
        named = self.dataset_dir
        return [named] if isinstance(named, str) else [one.path for one in named or ()]

    @property
    def positions_read(self) -> int:
        """Return the [CLS] of each sequence plus the masked positions; the rest ends with the encoder."""
        most, predictions = self.max_sequences_per_pack, self.max_predictions_per_seq
        probability = self.masking.highest
        return most + packed_predictions(self.max_seq_length, most, predictions, probability)

    @property
    def mask_probabilities(self) -> tuple[float, float] | None:
        """Return the fractions of tokens that the first and the last step mask, if they differ."""
        first, last = self.masking.start_probability, self.masking.probability
        return None if first is None else (first, last)

    @property
    def later_stages(self) -> Sequence["PretrainSettings"]:
        """Return the settings of the stages after the first."""
        found, batch = [], self.global_batch
        for stage in self.stages:
            changed = stage.model_dump(exclude_none=True)
            sizes = {name: changed.pop(name) for name in BATCH_SIZES if name in changed}
            batch = batch.model_copy(update=sizes)
            named = {"dataset_dir": stage.dataset_dir} if stage.dataset_dir else {}
            changed |= {"global_batch": batch, "stages": [], **named}
            found.append(self.model_copy(update=changed))
        return found

    @model_validator(mode="after")
    def _check_scaling(self) -> "PretrainSettings":
        model, optimizer = self.bert_config, self.optimizer_opts
        needed = {
            "bert_config.architecture": (model.architecture, "bert"),
            "bert_config.initializer_range": (model.initializer_range, 0.02),
            "optimizer_opts.max_gradient_norm": (optimizer.max_gradient_norm, None),
            "optimizer_opts.loss_scaling": (optimizer.loss_scaling, 1.0),
        }
        for name, (value, default) in needed.items() if self.scaling else ():
            if value != default:
                problem = f"{value} cannot be combined with scaling {self.scaling}"
                remedy = f"leave out scaling, or give the default ({default or 'none'})"
                raise SettingError(name, problem, remedy)
        return self

    @model_validator(mode="after")
    def _check_schedules(self) -> "PretrainSettings":
        rate, batch, longest = (
            self.optimizer_opts.learning_rate,
            self.global_batch,
            self.bert_config,
        )
        if self.decay_from is not None and rate.schedule_name not in ("constant", "wsd"):
            problem = f"has no effect with schedule_name {rate.schedule_name!r}"
            remedy = "give it with constant or wsd, as the run that it continues"
            raise SettingError("decay_from", problem, remedy)
        if rate.decay_shape != "1-sqrt" and rate.schedule_name != "wsd" and not self.decay_from:
            raise without_effect(rate, "decay_shape", "without schedule_name wsd or decay_from")
        differ = {"start_fraction": batch.start_fraction < 1.0, "stages": bool(self.stages)}
        if self.length_buckets is not None and any(differ.values()):
            names = " and ".join(name for name, differs in differ.items() if differs)
            problem = f"has no effect with {names}, whose steps differ in size"
            raise SettingError("length_buckets", problem, "leave out one of them")
        for number, stage in enumerate(self.later_stages):
            where = f"stages[{number}].max_seq_length"
            if self.knows_its_model and stage.max_seq_length > longest.max_position_embeddings:
                problem = f"{stage.max_seq_length} is more than bert_config.max_position_embeddings"
                raise SettingError(where, problem, "shorten it or make the model longer")
            check_mask_tokens(stage, "max_predictions_per_seq", "max_seq_length")
        for stage in (self, *self.later_stages):
            needed = round(stage.max_seq_length * self.masking.highest)
            if self.mask_probabilities and stage.max_predictions_per_seq < needed:
                problem = f"{stage.max_predictions_per_seq} are fewer than masking.start_probability takes, {needed}"
                raise SettingError("max_predictions_per_seq", problem, "raise it")
        return self

    @model_validator(mode="after")
    def _check_corpus_settings(self) -> "PretrainSettings":
        check_mask_tokens(self, "max_predictions_per_seq", "max_seq_length")
        name = "evaluate_every_steps"
        if is_set(self, name) and self.validation_dir is None and self.probe is None:
            condition = "without validation_dir or probe"
            raise without_effect(self, name, condition, "give one of them, or leave it out")
        usual: Path = PretrainSettings.model_fields["dataset_cache"].default
        named = (*self.dataset_paths, self.validation_dir or "")
        if self.dataset_cache.expanduser() != usual.expanduser() and not any(map(is_remote, named)):
            condition = "without records at an address, such as s3://bucket/records"
            raise without_effect(self, "dataset_cache", condition)
        return self


def count(number: int, what: str) -> str:
    """Return a number with its noun: 1 device, 2 devices, 1,000 micro-batches."""
    plural = "" if number == 1 else "es" if what.endswith("ch") else "s"
    return f"{number:,} {what}{plural}"
