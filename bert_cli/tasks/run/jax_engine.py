"""Build the JAX engine of a run: the blocks of the model, and their update."""

import jax

from bert_cli.config.training import TrainSettings
from bert_cli.model.bert import build_blocks, named_weights
from bert_cli.model.fused import compile_fused
from bert_cli.parallel.engine import Mesh
from bert_cli.parallel.jax.engine import JaxEngine, random_bits
from bert_cli.tasks.run.build import factors_of, optimizer_for


def build_engine(settings: TrainSettings, mesh: Mesh, labels: int, *, trains: bool) -> JaxEngine:
    """Return the engine with new weights."""
    compile_fused(True)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        blocks = build_blocks(
            settings.bert_config,
            last_blocks=settings.last_blocks,
            seed=settings.seed,
            policy=settings.precision,
            labels=labels,
            chunks=settings.parallel.embedding_serialization_factor,
            factors=factors_of(settings),
        )
    names = list(named_weights(blocks))
    return JaxEngine(
        blocks,
        mesh,
        seed=settings.seed,
        optimizer=optimizer_for(settings, names, random_bits) if trains else None,
        parallel=settings.parallel,
        accumulation=settings.global_batch.grad_acc_steps_per_replica,
    )
