"""What memory, layout, operations and plan read of a run: values that `_replace` changes and nothing checks again."""

from typing import NamedTuple, TypeVar

from bert_cli.config.parallel import Parallel
from bert_cli.config.pretrain import PretrainSettings
from bert_cli.config.training import (
    GlobalBatch,
    OptimizerOpts,
    Precision,
    TrainSettings,
)
from bert_cli.facts.bert import BertConfig
from bert_cli.facts.heads import Head
from bert_cli.facts.products import BatchShape
from bert_cli.settings.markers import Engine

Order = TypeVar("Order", bound=TrainSettings)


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
    optimizer: OptimizerOpts
    samples: int | None
    """Examples that the run reads; None if `epochs` says it."""
    epochs: float | None
    seed: int
    compile: str
    deterministic: bool
    scaling: str | None
    """`unit` for Unit Scaling, by which weights and activations have factors."""
    mask_probabilities: tuple[float, float] | None

    @property
    def shape(self) -> BatchShape:
        """Return the shape of a micro-batch."""
        size = self.batch.micro_batch_size
        return BatchShape(size, self.max_seq_length, self.masked, self.sequences)

    @property
    def is_open(self) -> bool:
        """Whether the layout or the micro-batch is left to the devices."""
        return self.parallel.layout == "auto" or self.batch.examples_per_step is not None

    def with_batch(self, **changes: int | None) -> "Workload":
        """Return the work with other numbers of the batch."""
        return self._replace(batch=self.batch.model_copy(update=changes))


def workload_of(order: TrainSettings) -> Workload:
    """Return the work that settings describe; their model is the run's."""
    work = Workload(
        model=order.bert_config,
        head=order.head,
        batch=order.global_batch,
        parallel=order.parallel,
        max_seq_length=order.max_seq_length,
        masked=0,
        sequences=1,
        texts_per_example=order.texts_per_example,
        engine=order.engine,
        precision=order.precision,
        optimizer=order.optimizer_opts,
        samples=order.total_num_train_samples,
        epochs=order.num_epochs,
        seed=order.seed,
        compile=order.compile,
        deterministic=order.deterministic,
        scaling=None,
        mask_probabilities=None,
    )
    if not isinstance(order, PretrainSettings):
        return work
    return work._replace(
        masked=order.masked,
        sequences=order.max_sequences_per_pack,
        scaling=order.scaling,
        mask_probabilities=order.mask_probabilities,
    )


def laid_out(order: Order, work: Workload) -> Order:
    """Return the order with the batch and the layout of a workload."""
    return order.model_copy(update={"global_batch": work.batch, "parallel": work.parallel})
