"""The settings that every training run has.

The nesting is that of the JSON file; a flag is the dotted path in kebab case (`--global-batch.replicas 4`).
The keys are those of Graphcore's BERT example.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from bert_cli.config.parallel import Cluster, Parallel, Wandb
from bert_cli.facts.architectures import ARCHITECTURES, ModelShape
from bert_cli.facts.bert import BertConfig
from bert_cli.facts.heads import Head
from bert_cli.facts.optimizers import OPTIMIZERS
from bert_cli.facts.products import BatchShape
from bert_cli.settings.markers import Engine, Fixed, PathOrName, Usual
from bert_cli.settings.numbers import Devices, Fraction, Length, Positive, Probability, UpToOne
from bert_cli.settings.settings import SettingError, Settings, Unless, is_set
from bert_cli.text import count

Precision = Literal["float32", "mixed_float16", "mixed_bfloat16", "float16"]
# Last part of the name of a weight.
WeightKind = Literal["kernel", "embeddings", "bias", "gamma", "beta"]


def _only(engine: Engine) -> Unless:
    """Return the need of a setting that only one engine has."""
    remedy = f"leave it out, or pass --engine {engine}"
    return Unless(lambda of: of.engine == engine, f"without engine {engine}", remedy)


class About(Settings):
    """The description of a config: JSON has no comments."""

    what: str
    """One sentence: the model, the phase, the data."""
    command: str
    """The command line that starts it."""
    expect: str
    """Time, hardware, or the expected loss or score."""


class GlobalBatch(Settings):
    """Examples per step: the product of the first three numbers."""

    NEEDS = {"growth_frac": "start_fraction"}

    micro_batch_size: Usual[Positive]
    """Examples that a replica processes at once; they must fit into its memory. `auto` chooses the largest number that
    fits, as long as larger numbers are faster, and adjusts the accumulation to keep the batch of the config, or
    `examples_per_step`."""
    replicas: Devices = 1
    """Number of model replicas; they divide the examples of a step."""
    grad_acc_steps_per_replica: Usual[Positive] = 1
    """Number of micro-batches whose gradients a replica accumulates before an update."""
    examples_per_step: Positive | None = None
    """Examples of a step, instead of grad_acc_steps_per_replica; with micro_batch_size `auto` as a flag, by default
    the number in the config."""
    start_fraction: Fraction | None = None
    """Fraction of the accumulation at the first step; the batch grows linearly from there."""
    growth_frac: UpToOne = 0.5
    """Fraction of the run's examples over which the batch grows to its full size."""

    @model_validator(mode="before")
    @classmethod
    def _accumulate_the_rest(cls, values: Any) -> Any:
        """Derive the accumulation; with micro_batch_size auto from 1 example, until the memory is known."""
        if not isinstance(values, Mapping):
            return values
        size = values.get("micro_batch_size")
        is_auto = size == "auto"
        micro_batches = values.get("grad_acc_steps_per_replica")
        # Values of a command line are texts here: pydantic has not made them numbers.
        total = str(values.get("examples_per_step"))
        if is_auto and (micro_batches is not None or total == "None"):
            problem = "auto computes the accumulation from examples_per_step"
            remedy = "set examples_per_step instead of grad_acc_steps_per_replica"
            raise SettingError("micro_batch_size", problem, remedy)
        numbers = [total, "1" if is_auto else str(size), str(values.get("replicas", 1))]
        # Other texts are rejected later, when pydantic validates them as numbers.
        if not all(map(str.isdecimal, numbers)):
            return values
        # `or 1`: zero is refused later, as a number below 1.
        examples, size, replicas = map(int, numbers)
        accumulation, rest = divmod(examples, size * replicas or 1)
        if rest:
            problem = f"{total} cannot be divided into micro-batches of {size} for {count(replicas, 'replica')}"
            raise SettingError("examples_per_step", problem, "change one of them")
        if str(micro_batches) not in ("None", str(accumulation)):
            problem = f"{total} is not the product of {size}, {replicas} and {micro_batches}, the other three numbers"
            remedy = "leave out examples_per_step or grad_acc_steps_per_replica"
            raise SettingError("examples_per_step", problem, remedy)
        changes = {"micro_batch_size": size, "grad_acc_steps_per_replica": accumulation}
        # Settings with `auto` are written with a micro-batch of 1 and all of the numbers, and are validated again.
        is_open = is_auto or (size == 1 and micro_batches is not None)
        return {**values, **changes, "examples_per_step": total if is_open else None}

    @property
    def examples(self) -> int:
        """Return the examples of a step when the batch is complete."""
        return self.micro_batch_size * self.replicas * self.grad_acc_steps_per_replica


class LearningRate(Settings):
    """The learning rate as a function of the step."""

    NEEDS = {"warmup_power": "warmup_frac"} | dict.fromkeys(
        ("decay_frac", "final_fraction"), ("schedule_name", "wsd")
    )

    schedule_name: Literal["up_down", "constant", "cosine", "wsd"] = "up_down"
    """After a linear warm-up: `up_down`, linear decay to 1e-7 on the last step; `cosine`, half a cosine;
    `constant`, the maximum; `wsd`, the maximum, then a decay over the last steps along 1 - sqrt(x)."""
    max_learning_rate: Usual[PositiveFloat]
    """Maximum learning rate; with reference_batch_size, the rate for a global batch of that size."""
    warmup_frac: Usual[Annotated[float, Field(ge=0.0, le=1.0)]] = 0.0
    """Fraction of the steps over which the learning rate rises from zero."""
    warmup_power: PositiveFloat = 1.0
    """Exponent of the warm-up curve: 1 rises linearly, 0.5 like a square root."""
    decay_frac: UpToOne = 0.1
    """Fraction of the steps, at the end of the run, over which `wsd` decays."""
    final_fraction: Probability = 0.0
    """Fraction of the maximum learning rate at the last step of `wsd`."""
    reference_batch_size: Positive | None = None
    """Linear scaling rule: multiply the learning rate by the global batch divided by this number."""


class OptimizerOpts(Settings):
    """The optimizer and its hyperparameters."""

    name: Literal[tuple(OPTIMIZERS)]  # type: ignore[valid-type]
    """LAMB for batches of thousands, AdamW for smaller batches. StableAdamW is AdamW that divides the update of a
    weight by the root mean square of gradient / sqrt(second moment) if that is above 1 (Wortsman et al. 2023);
    query, key, value and both halves of Wi are clipped apart: 2 % of the change of weights differs from fused ones."""
    learning_rate: LearningRate
    """Schedule of the learning rate."""
    weight_decay_rate: NonNegativeFloat = 0.01
    """Decoupled weight decay."""
    loss_scaling: PositiveFloat | Literal["dynamic"] = 1.0
    """Factor on the loss that keeps small float16 gradients from underflowing; `dynamic` adapts it."""
    beta_1: Probability = 0.9
    """Decay rate of the first moment."""
    beta_2: Probability = 0.999
    """Decay rate of the second moment."""
    epsilon: PositiveFloat = 1e-6
    """Added to the root of the second moment."""
    layer_decay: UpToOne = 1.0
    """Layer-wise learning rate decay: factor from each layer to the layer below; heads use the full rate."""
    max_gradient_norm: PositiveFloat | None = None
    """Clip the gradient norm of the complete step to this value; no clipping by default."""
    no_weight_decay: list[WeightKind] = ["bias", "beta"]
    """Weights without decay, by the last part of their names."""
    stochastic_rounding: bool = False
    """Round the update of float16 weights up or down at random, without bias."""


class WeightedCorpus(Settings):
    """One of several corpora that a run reads."""

    path: PathOrName
    """Folder of the records."""
    weight: PositiveFloat = 1.0
    """Relative weight of the corpus in the mixture."""


class TrainSettings(Settings):
    """Settings of every training run: model, batch, length, layout, precision, optimizer, folder, logging."""

    NEEDS = {
        **dict.fromkeys(("compile", "parallel.optimizer_state_offload"), _only("tensorflow")),
        **dict.fromkeys(("parallel.tensor", "parallel.shard_weights"), _only("jax")),
        "parallel.pipeline_stages": Unless(
            lambda of: (
                of.parallel.layout == "auto"
                or of.engine == "tensorflow"
                or len(of.parallel.pipeline_stages) == 1
            ),
            "without engine tensorflow",
            "pass --parallel.layout auto, or pass --engine tensorflow",
        ),
        "optimizer_opts.stochastic_rounding": ("precision", "float16"),
    }
    HEAD: ClassVar[Head]
    """The head that the command trains."""
    COMMAND: ClassVar[str]
    """The command that trains, also of settings that plan, measure or check a run."""
    SAVES = True
    about: About | None = None
    """Description of this config, printed when the run starts."""
    bert_config: Fixed[ModelShape] = BertConfig()
    """The shape of the model."""
    max_seq_length: Fixed[Usual[Length]]
    """Sequence length of an example."""
    global_batch: GlobalBatch
    """Examples of a step."""
    num_epochs: Usual[PositiveFloat | None] = None
    """Number of epochs. An epoch is one pass over the records; for a mixture, as many examples as all its corpora have
    together. The copies of an example in static records (duplication_factor) count separately."""
    total_num_train_samples: Usual[Positive | None] = None
    """Number of examples that the run reads, rounded up to full steps; an alternative to num_epochs."""
    engine: Usual[Engine] = "tensorflow"
    """Framework that trains: `tensorflow` supports pipelines, `jax` tensor parallelism; both share checkpoints."""
    parallel: Parallel = Parallel()
    """Layout over devices."""
    cluster: Cluster = Cluster()
    """The processes of a run on several GPUs or hosts."""
    require_gpu: bool = False
    """Stop with exit code 5 if the engine finds neither a GPU nor a TPU, instead of running on the CPU."""
    precision: Fixed[Usual[Precision]] = "float32"
    """Number format of weights and matrix products; optimizer state, update and losses are always float32."""
    optimizer_opts: Fixed[OptimizerOpts]
    """The optimizer and its hyperparameters."""
    seed: Fixed[Annotated[int, Field(ge=0, lt=2**31)]] = 1984
    """Seed of initial weights, order of examples, dropout and dynamic masks."""
    save_ckpt_path: Usual[Path | None] = None
    """The run folder, from which the same command resumes; by default checkpoints/ plus the name of the config."""
    pretrained_ckpt_path: Usual[PathOrName | None] = None
    """Weights to start from: a checkpoint or run folder of this tool, a Hugging Face folder or a name on its
    hub, or a TensorFlow checkpoint of Google's or Graphcore's example (its folder or `bert_model.ckpt`).
    The optimizer starts fresh."""
    checkpoint_every_steps: Positive | None = None
    """Save every N steps; the last step is always saved."""
    checkpoint_every_minutes: PositiveFloat | None = 30.0
    """Save when this many minutes have passed since the last save; null turns this off."""
    keep_checkpoints: Positive = 3
    """Number of newest checkpoints to keep."""
    keep_every_steps: Positive | None = None
    """Also keep every checkpoint whose step is a multiple of this number."""
    log_every_steps: Positive = 1
    """Print a line every N steps; metrics.jsonl has every step."""
    evaluate_every_steps: Positive | None = None
    """Evaluate every N steps and at the end."""
    baselines: bool = True
    """Compare the last scores with what a person would use instead, learned from the same training examples: the most
    frequent label, regression on words, BM25, the frequencies of tokens. It takes some ten seconds."""
    tensorboard_dir: Path | None = None
    """Write TensorBoard event files to this folder."""
    wandb: Wandb = Wandb()
    """Weights & Biases."""
    exit_code_when_stopped: Annotated[int, Field(ge=0, le=125)] = 0
    """Exit code of a run that stopped and saved on request, such as 75 to make a scheduler restart it."""
    dry_run: Usual[bool] = False
    """Print settings with their origins and the plan, run two complete steps, save nothing."""
    compile: Literal["auto", "chains", "stages", "nothing"] = "auto"
    """Parts that XLA compiles: the update and the element-wise `chains` between matrix products, or complete
    `stages`. `auto` means chains on CPUs, where matrix products are faster outside XLA, and stages on GPUs."""
    deterministic: bool = True
    """Use only reproducible operations, so that a resumed run equals the uninterrupted run bit for bit."""

    @property
    def head(self) -> Head:
        """Return the head of this run."""
        return ARCHITECTURES[self.bert_config.architecture].heads[self.HEAD.name]

    @property
    def saves(self) -> bool:
        """Return whether the run writes into its folder."""
        return self.SAVES and not self.dry_run

    @property
    def masked(self) -> int:
        """Return the maximum number of masked positions of an example; 0 where the head reads every position."""
        return 0

    @property
    def sequences(self) -> int:
        """Return the maximum number of sequences of an example."""
        return 1

    @property
    def mask_probabilities(self) -> tuple[float, float] | None:
        """Return the fractions of tokens that the first and the last step mask, if they differ."""
        return None

    @property
    def unit_scaling(self) -> str | None:
        """Return `unit` for Unit Scaling, by which weights and activations have factors."""
        return None

    @property
    def shape(self) -> BatchShape:
        """Return the shape of a micro-batch."""
        size = self.global_batch.micro_batch_size
        return BatchShape(size, self.max_seq_length, self.masked, self.sequences)

    @property
    def is_open(self) -> bool:
        """Return whether the layout or the micro-batch is left to the devices."""
        return self.parallel.layout == "auto" or self.global_batch.examples_per_step is not None

    def with_batch(self, **changes: int | None) -> Self:
        """Return the order with other numbers of the batch, which are not checked again."""
        batch = self.global_batch.model_copy(update=changes)
        return self.model_copy(update={"global_batch": batch})

    @property
    def texts_per_example(self) -> int:
        """Return the number of texts of an example that go through the model as separate sequences."""
        return 1

    @property
    def pools_by(self) -> str | None:
        """Return how the vector of a text is computed; None for models that are not trained for vectors."""
        return None

    @property
    def knows_its_model(self) -> bool:
        """Return whether bert_config has the shape of the model; otherwise a checkpoint has it."""
        return self.pretrained_ckpt_path is None or "bert_config" in self.model_fields_set

    def _check(self) -> None:
        model = self.bert_config
        first, second = self.parallel.tensor_shape
        # The first number divides heads and inner columns, the second the hidden size.
        shards = {"num_attention_heads": first, "intermediate_size": first, "hidden_size": second}
        divided = shards.items() if self.knows_its_model else ()
        for name, number in divided:
            if getattr(model, name) % number:
                problem = f"{number} does not divide bert_config.{name} ({getattr(model, name)})"
                raise SettingError("parallel.tensor", problem, "choose a number that does")
        if self.total_num_train_samples is not None and is_set(self, "num_epochs"):
            problem = "and num_epochs both set the length of the run"
            raise SettingError("total_num_train_samples", problem, "leave out one of them")
        longest = model.max_position_embeddings
        if self.knows_its_model and self.max_seq_length > longest:
            problem = f"{self.max_seq_length} is more than bert_config.max_position_embeddings ({longest})"
            raise SettingError("max_seq_length", problem, "shorten it or make the model longer")
        stages = self.parallel.pipeline_stages
        if stages is None or self.parallel.layout == "auto" or not self.knows_its_model:
            return  # no stages, stages that `auto` replaces, or an unknown number of layers
        # Stages are slices of this list, in its order.
        expected = ["emb", *["hid"] * model.num_hidden_layers, *self.head.last_blocks]
        listed = list(itertools.chain.from_iterable(stages))
        if listed != expected:
            problem = (
                f"lists {', '.join(short(listed))}; the model has {', '.join(short(expected))}"
            )
            raise SettingError("parallel.pipeline_stages", problem, "list its blocks in this order")


# The settings of a run, which planning completes.
Order = TypeVar("Order", bound=TrainSettings)


def short(blocks: Sequence[str]) -> list[str]:
    """Return blocks as in a config: emb, hid*4."""
    runs = [(name, len(list(equal))) for name, equal in itertools.groupby(blocks)]
    return [name if times == 1 else f"{name}*{times}" for name, times in runs]
