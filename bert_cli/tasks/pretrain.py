"""`bert pretrain`: masked-LM and next-sentence pre-training, one phase.

Phase 1 and phase 2 are this same command with other lengths; phase 2 starts from the weights of
phase 1. Its own are the records it reads and the held-out records it is evaluated on.
"""

from contextlib import ExitStack

from bert_cli.config.plan import make_plan
from bert_cli.config.schema import PretrainSettings
from bert_cli.data.reader import Reader
from bert_cli.parallel.engine import Engine
from bert_cli.tasks import assemble, start, training
from bert_cli.tasks.job import Job


def run(settings: PretrainSettings) -> None:
    """Run one phase of pre-training, from wherever it stands to its end.

    Raises ConfigError, DataError, CheckpointError or DeviceError; a request to stop saves and returns.
    """
    training.needs_a_folder(settings)
    with ExitStack() as claims:
        settings, mesh, stop = training.prepare(settings, claims)
        part = mesh.processes.rank, mesh.processes.count
        reader = assemble.open_reader(settings, make_plan(settings, None).examples_per_step, *part)
        held_out = assemble.open_held_out(settings)
        plan = make_plan(settings, len(reader) if isinstance(reader, Reader) else None)
        sample = assemble.first_micro_batches(reader, len(mesh.devices), plan.micro_batch_size)
        corpus = None if settings.generated_dataset else settings.dataset_dir

        def evaluate(engine: Engine, step: int) -> dict[str, float]:
            assert held_out is not None
            wanted = settings.evaluation_examples
            return assemble.evaluate(engine, held_out, wanted, plan.micro_batch_size)

        job = Job(
            plan=plan,
            reader=reader,
            sample=sample,
            form=lambda model: start.disk_format(settings, model, corpus),
            evaluate=evaluate if held_out is not None else None,
            evaluate_every=settings.evaluate_every_steps,
        )
        training.walk(settings, mesh, job, stop, claims)
