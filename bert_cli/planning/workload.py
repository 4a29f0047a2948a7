"""What memory, layout, operations and plan read of a run: values that `_replace` changes and nothing checks again."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from bert_cli.config.markers import Engine
from bert_cli.config.parallel import Parallel
from bert_cli.config.training import GlobalBatch, LearningRate, Precision, TrainSettings
from bert_cli.facts.bert import BertConfig
from bert_cli.facts.heads import Head
from bert_cli.facts.optimizers import OPTIMIZERS, OptimizerKind
from bert_cli.facts.products import BatchShape
from bert_cli.parse.load import changed

Settings = TypeVar("Settings", bound=TrainSettings)


class Stage(NamedTuple):
    """What a later stage of a run changes."""

    max_seq_length: int
    masked: int
    micro_batch_size: int | None
    """None: that of the stage before."""
    samples: int


class Workload(NamedTuple):
    """The work of a run: its model, its batches and their layout, and how a device computes them."""

    model: BertConfig
    head: Head
    batch: GlobalBatch
    parallel: Parallel
    max_seq_length: int
    masked: int
    """Masked positions P of an example; 0 where the head reads every position."""
    sequences: int
    """Sequences of a pack, at most."""
    texts_per_example: int
    """Texts of an example that go through the model as separate sequences."""
    engine: Engine
    precision: Precision
    optimizer: OptimizerKind
    rate: LearningRate
    compile: str
    deterministic: bool
    has_factors: bool
    """Whether weights and activations have factors of Unit Scaling."""
    mask_probabilities: tuple[float, float] | None
    later: tuple[Stage, ...] = ()

    @property
    def last_blocks(self) -> tuple[str, ...]:
        """Return the blocks after the encoder layers."""
        return self.head.last_blocks

    @property
    def shape(self) -> BatchShape:
        """Return the shape of a micro-batch."""
        size = self.batch.micro_batch_size
        return BatchShape(size, self.max_seq_length, self.masked, self.sequences)

    @property
    def positions_read(self) -> int:
        """Return the positions of an example, with [CLS], that the blocks after the encoder read."""
        return self.sequences + self.masked if self.masked else self.max_seq_length

    @property
    def is_open(self) -> bool:
        """Whether the layout or the micro-batch is left to the devices."""
        return self.parallel.layout == "auto" or self.batch.examples_per_step is not None

    @property
    def stages(self) -> Sequence["Workload"]:
        """Return the work of each stage of the run; the first is this one."""
        stages = [self._replace(later=())]
        for stage in self.later:
            work = stages[-1]
            if stage.micro_batch_size is not None:
                work = work.with_batch(micro_batch_size=stage.micro_batch_size)
            stages.append(work._replace(max_seq_length=stage.max_seq_length, masked=stage.masked))
        return stages

    def with_batch(self, **changes: int | None) -> "Workload":
        """Return the work with other numbers of the batch."""
        return self._replace(batch=self.batch.model_copy(update=changes))

    def with_parallel(self, **changes: Any) -> "Workload":
        """Return the work with another layout."""
        return self._replace(parallel=self.parallel.model_copy(update=changes))


def workload_of(order: TrainSettings) -> Workload:
    """Return the work that settings describe; their model is the run's."""
    shape = order.micro_batch_shape
    later = [
        Stage(settings.max_seq_length, settings.micro_batch_shape.masked, size, samples)
        for settings, (size, samples) in zip(order.later_stages, order.stage_sizes, strict=True)
    ]
    return Workload(
        model=order.bert_config,
        head=order.head,
        batch=order.global_batch,
        parallel=order.parallel,
        max_seq_length=order.max_seq_length,
        masked=shape.masked,
        sequences=shape.sequences,
        texts_per_example=order.texts_per_example,
        engine=order.engine,
        precision=order.precision,
        optimizer=OPTIMIZERS[order.optimizer_opts.name],
        rate=order.optimizer_opts.learning_rate,
        compile=order.compile,
        deterministic=order.deterministic,
        has_factors=order.unit_scaling is not None,
        mask_probabilities=order.mask_probabilities,
        later=tuple(later),
    )


def laid_out(settings: Settings, work: Workload) -> Settings:
    """Return the settings with the batch and the layout of a workload."""
    batch = ("micro_batch_size", "replicas", "grad_acc_steps_per_replica", "examples_per_step")
    parallel = ("layout", "pipeline_stages", "pipeline_device_mapping")
    changes = {"global_batch": {name: getattr(work.batch, name) for name in batch}}
    if work.parallel != settings.parallel:
        changes["parallel"] = {name: getattr(work.parallel, name) for name in parallel}
    return changed(settings, **changes)
