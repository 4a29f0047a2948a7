"""`bert pretrain`: masked-LM and next-sentence pre-training, one phase.

Phase 1 and phase 2 are this same command with other lengths; phase 2 starts from the weights of
phase 1, and text of another kind from anybody's model. Its own are the records it reads and the
held-out records it is evaluated on.
"""

from contextlib import ExitStack

from bert_cli.config.plan import make_plan
from bert_cli.config.training import PretrainSettings
from bert_cli.parallel.engine import Engine
from bert_cli.tasks.run import build, corpora, start, train
from bert_cli.tasks.run.job import Job
from bert_cli.train.report import say


def run(settings: PretrainSettings) -> None:
    """Run one phase of pre-training, from wherever it stands to its end.

    Raises ConfigError, DataError, CheckpointError or DeviceError; a request to stop saves and returns.
    """
    train.needs_a_folder(settings)
    with ExitStack() as claims:
        source = start.source_of(settings)
        asked = start.with_shape_of(settings, source)
        settings, mesh, stop = train.prepare(corpora.with_sizes_of_records(asked), claims)
        words = settings.bert_config.vocab_size
        if words != asked.bert_config.vocab_size:
            say(f"bert_config.vocab_size: {words:,}, as the records have")
        part = mesh.processes.rank, mesh.processes.count
        stream = corpora.open_stream(settings, make_plan(settings, None).examples_per_step, *part)
        folder = stream.folder
        if source is not None and folder is not None:
            corpora.refuse_another_vocabulary(folder, source.folder, settings.save_ckpt_path)
        held_out = corpora.open_held_out(settings)
        if held_out is not None and stream.has_next_sentences and not held_out.has_next_sentences:
            say(
                f"validation_dir ({settings.validation_dir}): has no pairs, so no next-sentence score; "
                "make it without --no-nsp to have one"
            )
        plan = make_plan(settings, stream.epoch_size, stream.sequences_per_example)
        if description := stream.describe(plan.examples):
            say("\n".join(description))
        sample = stream.first_micro_batches(len(mesh.devices))

        def evaluate(engine: Engine, step: int) -> dict[str, float]:
            assert held_out is not None
            wanted = settings.evaluation_examples
            return build.evaluate(engine, held_out, wanted, plan.micro_batch_size)

        job = Job(
            plan=plan,
            reader=stream,
            sample=sample,
            form=lambda model: start.disk_format(settings, model, folder),
            evaluate=evaluate if held_out is not None else None,
            evaluate_every=settings.evaluate_every_steps,
        )
        walked = train.walk(settings, mesh, job, stop, claims)
    if walked is not None and not walked.finished:
        train.leave_stopped(settings)
