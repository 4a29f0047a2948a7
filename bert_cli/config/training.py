"""The settings of a training run, and those of pre-training.

The field docstrings are the text of `--help`; the nesting is that of the JSON file; a flag is the dotted
path in kebab case (`--global-batch.replicas 4`). The key names are those of Graphcore's BERT example.
"""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from bert_cli.config.data import Masking, packed_predictions
from bert_cli.config.model import BertConfig
from bert_cli.config.parallel import Cluster, Parallel
from bert_cli.config.settings import Positive, Probability, Settings, is_remote, is_set


class About(Settings):
    """What a config is, how it is started, and what to expect of it; JSON has no comments."""

    what: str
    """One sentence: the model, the phase, the data."""
    command: str
    """The command line that starts it."""
    expect: str
    """Time, hardware, or the number one should see."""


class Wandb(Settings):
    """Weights & Biases; WANDB_MODE=offline keeps the figures on this machine."""

    enabled: bool = False
    """Log the run."""
    project: str = "bert"
    """Project that receives the run."""
    entity: str | None = None
    """Team or user that the project belongs to; by default that of the login."""
    name: str | None = None
    """Name of the run; by default the output folder's."""
    tags: list[str] = []
    """Tags of the run."""


class GlobalBatch(Settings):
    """How many examples one step reads: the product of the three numbers."""

    micro_batch_size: Positive
    """Examples that a replica runs at once; they must fit in its memory."""
    replicas: Positive = 1
    """Copies of the model that share a step's examples."""
    grad_acc_steps_per_replica: Positive = 1
    """Micro-batches whose gradients a replica adds up before the weights move."""


class LearningRate(Settings):
    """The learning rate as a function of the step."""

    schedule_name: Literal["up_down", "constant", "cosine"] = "up_down"
    """`up_down`: linear warm-up, linear decay, with 1e-7 on the last step; `cosine`: the same warm-up,
    half a cosine; `constant`: the maximum after the warm-up."""
    max_learning_rate: Annotated[float, Field(gt=0.0)]
    """Highest learning rate; for the batch of `reference_batch_size` when that is given."""
    warmup_frac: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Share of the steps in which the rate climbs from zero."""
    reference_batch_size: Positive | None = None
    """Linear scaling rule: the rate is multiplied by global batch / this number."""


class OptimizerOpts(Settings):
    """How a gradient becomes a move of the weights."""

    name: Literal["LAMB", "AdamW"]
    """LAMB for batches of thousands, AdamW for smaller ones."""
    learning_rate: LearningRate
    """Schedule of the learning rate."""
    weight_decay_rate: Annotated[float, Field(ge=0.0)] = 0.01
    """Decoupled weight decay."""
    loss_scaling: Annotated[float, Field(gt=0.0)] | Literal["dynamic"] = 1.0
    """Number that the loss is multiplied by before the backward pass and the gradients divided by
    after it, so that small float16 gradients survive; `dynamic` finds it."""
    beta_1: Probability = 0.9
    """Decay of the first moment."""
    beta_2: Probability = 0.999
    """Decay of the second moment."""
    epsilon: Annotated[float, Field(gt=0.0)] = 1e-6
    """Added to the root of the second moment."""
    layer_decay: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Layer-wise decay: the learning rate of the top encoder layer is multiplied by this number, that of
    the layer below by its square, and so on down to the embeddings; the heads have the whole rate."""
    max_gradient_norm: Annotated[float, Field(gt=0.0)] | None = None
    """Clip the norm of the whole step's gradient to this; none by default."""
    no_weight_decay: list[str] = ["bias", "beta"]
    """Weights without decay: the last part of their names."""
    no_layer_adaptation: list[str] = ["bias", "beta", "gamma"]
    """Weights without LAMB's trust ratio: the last part of their names."""
    stochastic_rounding: bool = False
    """Round the float32 update to float16 weights up or down at random, without bias; for
    precision float16 only."""


class TrainSettings(Settings):
    """What every run that trains has: model, batch, layout, precision, optimizer, folder, reports."""

    LAST_BLOCKS: ClassVar[tuple[str, ...]]
    """The blocks after the encoder layers."""
    SAVES: ClassVar[bool] = True
    """Whether the command needs a run's folder, its own or that of the run that it looks at."""

    about: About | None = None
    """What this config is; printed when the run starts."""
    bert_config: BertConfig = BertConfig()
    """The shape of the model."""
    max_seq_length: Annotated[int, Field(ge=8)]
    """Places S of an example."""
    global_batch: GlobalBatch
    """Examples of a step."""
    parallel: Parallel = Parallel()
    """Layout over devices."""
    cluster: Cluster = Cluster()
    """The processes of a run over several GPUs or hosts."""
    precision: Literal["float32", "mixed_float16", "mixed_bfloat16", "float16"] = "float32"
    """Number format of weights and products; optimizer state, update and losses are always float32."""
    optimizer_opts: OptimizerOpts
    """How a gradient becomes a move of the weights."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1984
    """Seed of first weights, order of examples, dropout and dynamic masks."""
    save_ckpt_path: Path | None = None
    """The run's folder: checkpoints step_00000100/, metrics.jsonl, settings.json. The same command
    again continues what is there. By default checkpoints/ and the name of the config."""
    pretrained_ckpt_path: str | None = None
    """Weights to start from: a checkpoint of ours or a run's folder, a Hugging Face folder or a name on
    its hub, or a TensorFlow checkpoint of Google's or Graphcore's example (its folder or `bert_model.ckpt`).
    The optimizer starts fresh."""
    checkpoint_every_steps: Positive | None = None
    """Save every N steps; the last step is always saved."""
    checkpoint_every_minutes: Annotated[float, Field(gt=0.0)] | None = 30.0
    """Save when this much time has passed since the last save; null in the config for never."""
    keep_checkpoints: Positive = 3
    """The newest N checkpoints are kept."""
    keep_every_steps: Positive | None = None
    """Checkpoints of steps that this number divides are kept for ever."""
    log_every_steps: Positive = 1
    """Print a line every N steps; metrics.jsonl has every step."""
    evaluate_every_steps: Positive | None = None
    """Evaluate every N steps and at the end."""
    max_skipped_steps: Positive = 20
    """So many non-finite gradients in a row stop the run."""
    tensorboard_dir: Path | None = None
    """Write TensorBoard event files here."""
    wandb: Wandb = Wandb()
    """Weights & Biases."""
    exit_code_when_stopped: Annotated[int, Field(ge=0, le=125)] = 0
    """What a run ends with that was asked to stop and has saved; another number than 0, as 75, tells a
    scheduler that the same command has to be started again."""
    dry_run: bool = False
    """Print settings with their origins and the plan, run two steps, save nothing."""
    compile: Literal["auto", "chains", "stages", "nothing"] = "auto"
    """What XLA compiles: the update and the element-wise `chains` between the products, or whole
    `stages`; `auto` is chains on CPUs, whose products are faster outside XLA, and stages on GPUs."""
    compile_only: bool = False
    """Read the weights to start from, trace and compile everything a step needs, print how long it took,
    and stop."""
    deterministic: bool = True
    """Use only operations whose result does not change from run to run, so that a resumed run equals
    the uninterrupted one bit for bit."""

    @property
    def places_read(self) -> int:
        """Places of an example, [CLS] among them, that go through the blocks after the encoder."""
        return self.max_seq_length

    @property
    def knows_its_model(self) -> bool:
        """Whether bert_config is the model's shape already, and not still to be read from one."""
        return self.pretrained_ckpt_path is None or "bert_config" in self.model_fields_set

    @model_validator(mode="after")
    def _model_and_optimizer_fit(self) -> "TrainSettings":
        longest = self.bert_config.max_position_embeddings
        if self.knows_its_model and self.max_seq_length > longest:
            raise ValueError(
                f"max_seq_length ({self.max_seq_length}) is more than bert_config.max_position_embeddings "
                f"({self.bert_config.max_position_embeddings}); shorten it or make the model longer"
            )
        if self.optimizer_opts.stochastic_rounding and self.precision != "float16":
            raise ValueError(
                f"optimizer_opts.stochastic_rounding has no effect with precision {self.precision!r}, whose "
                "weights are float32; leave it out or choose precision float16"
            )
        options = self.optimizer_opts
        if options.name == "AdamW" and is_set(options, "no_layer_adaptation"):
            raise ValueError(
                "optimizer_opts.no_layer_adaptation has no effect with AdamW, which adapts no layer; leave it out"
            )
        self._stages_hold_every_block()
        return self

    def _stages_hold_every_block(self) -> None:
        parallel = self.parallel
        if (
            parallel.pipeline_stages is None
            or parallel.layout == "auto"
            or not self.knows_its_model
        ):
            return  # no stages, stages that `auto` replaces, or a model whose number of layers is not read yet
        layers = self.bert_config.num_hidden_layers
        wanted = ["emb", *["hid"] * layers, *self.LAST_BLOCKS]
        listed = [name for stage in parallel.pipeline_stages for name in stage]
        if listed != wanted:
            order = ", ".join(["emb", f"hid*{layers}", *self.LAST_BLOCKS])
            raise ValueError(
                f"parallel.pipeline_stages {_difference(listed, wanted)}; give {order}, in this order"
            )


def _difference(listed: list[str], wanted: list[str]) -> str:
    """Describe how the blocks that the stages list differ from those of the model."""
    problems = []
    for name in dict.fromkeys([*wanted, *listed]):
        count, expected = listed.count(name), wanted.count(name)
        if count != expected:
            what = f"layer{'s' * (count != 1)} (hid)" if name == "hid" else name
            problems.append(f"lists {count} {what}, the model has {expected}")
    return "; ".join(problems) or "lists the blocks in another order"


class WeightedCorpus(Settings):
    """One of several corpora that a run reads."""

    path: str
    """Folder of records, or the address of one."""
    weight: Annotated[float, Field(gt=0.0)] = 1.0
    """Its share of the examples, beside the weights of the others."""


class PretrainSettings(TrainSettings):
    """Pre-train BERT with masked-LM and next-sentence prediction.

    Example: bert pretrain --config configs/pretrain_tiny_128_phase1.json --dataset-dir data/demo/128
    Example: bert pretrain --config pretrain_base_512_phase2 --pretrained-ckpt-path runs/base_128_phase1
    Example: bert pretrain --config pretrain_base_128_phase1 --dataset-dir data/128 --save-ckpt-path runs/mine
    --global-batch.micro-batch-size 16 --optimizer-opts.learning-rate.max-learning-rate 1e-4
    """

    LAST_BLOCKS: ClassVar[tuple[str, ...]] = ("enc_out", "pool", "heads")

    dataset_dir: str | list[WeightedCorpus] | None = None
    """Folder of records with a corpus.json, or the address of one (s3://...); given several times, or in a
    config as a list of {"path": ..., "weight": ...}, all of them by their weights. `$DATASETS_DIR` and
    `~` are expanded."""
    validation_dir: str | None = None
    """Folder of records to evaluate on every `evaluate_every_steps`."""
    dataset_cache: Path = Path("~/.cache/bert/records")
    """Where records from object storage are kept on this machine's disk."""
    generated_dataset: bool = False
    """Train on made-up examples instead of those in dataset_dir, to try a machine or a layout."""
    max_predictions_per_seq: Positive
    """Most masked places P of an example."""
    masking: Masking = Masking()
    """How the tokens to be predicted are chosen, anew each epoch; for dynamic records."""
    max_sequences_per_pack: Positive = 1
    """Most sequences C of an example: from 2 on short ones are packed together as they are read, from
    dynamic records. Batches, samples and learning rates are then counted in sequences."""
    length_bins: Positive | None = None
    """Read records by length, in at most so many groups, so that a step is only as long as its longest
    example: the simpler way to less padding; for dynamic records that are not packed."""
    total_num_train_samples: Positive | None = None
    """Examples that the run reads, rounded up to whole steps; by default those of Graphcore's example:
    460,849,152 for sequences of at most 128 positions, 34,239,360 for longer ones."""
    evaluation_examples: Positive = 10_000
    """Examples of an evaluation, from the start of the validation order; at most all there are."""

    @field_validator("dataset_dir", mode="before")
    @classmethod
    def _paths_are_corpora(cls, value: Any) -> Any:
        """A flag gives a list of paths, mostly of one."""
        if not isinstance(value, list):
            return str(value) if isinstance(value, Path) else value
        if len(value) == 1 and isinstance(value[0], str):
            return value[0]
        return [{"path": one} if isinstance(one, str) else one for one in value]

    @property
    def dataset_paths(self) -> list[str]:
        """The folders or addresses of `dataset_dir`, one or several."""
        named = self.dataset_dir
        return [named] if isinstance(named, str) else [one.path for one in named or ()]

    @property
    def places_read(self) -> int:
        """Each sequence's [CLS] and the masked places: the others end with the encoder."""
        most, places = self.max_sequences_per_pack, self.max_seq_length
        if most == 1:
            return 1 + self.max_predictions_per_seq
        return most + packed_predictions(
            places, most, self.max_predictions_per_seq, self.masking.probability
        )

    @model_validator(mode="after")
    def _corpus_settings_fit(self) -> "PretrainSettings":
        if self.max_predictions_per_seq > self.max_seq_length - 3:
            raise ValueError(
                f"max_predictions_per_seq ({self.max_predictions_per_seq}) is more than the tokens of an "
                f"example (max_seq_length - 3 = {self.max_seq_length - 3}); lower it"
            )
        for name in ("evaluate_every_steps", "evaluation_examples"):
            if is_set(self, name) and self.validation_dir is None:
                raise ValueError(
                    f"{name} has no effect without validation_dir; give both or neither"
                )
        if self.generated_dataset and self.length_bins is not None:
            raise ValueError(
                f"length_bins ({self.length_bins}) has no effect with generated_dataset, whose examples are of all "
                "lengths; leave it out"
            )
        self._a_cache_has_something_to_keep()
        return self

    def _a_cache_has_something_to_keep(self) -> None:
        usual: Path = PretrainSettings.model_fields["dataset_cache"].default
        given = self.dataset_dir if isinstance(self.dataset_dir, list) else [self.dataset_dir]
        named = [one.path if isinstance(one, WeightedCorpus) else one for one in given]
        if self.dataset_cache.expanduser() == usual.expanduser():
            return
        if not any(name is not None and is_remote(name) for name in (*named, self.validation_dir)):
            raise ValueError(
                f"dataset_cache ({self.dataset_cache}) has no effect without records at an address, as "
                "s3://bucket/records, in dataset_dir or validation_dir; leave it out"
            )
