"""`bert pretrain`: one phase of masked-LM and next-sentence pre-training.

Phase 2 is this command with other lengths that starts from the weights of phase 1.
"""

from contextlib import ExitStack

from bert_cli.config.training import PretrainSettings, make_plan
from bert_cli.data.records.tokenizer import VOCAB_FILE, read_vocabulary
from bert_cli.parallel.engine import Engine
from bert_cli.tasks.run import build, corpora, start, train
from bert_cli.train.metrics import print_line


def run(settings: PretrainSettings) -> None:
    """Train to the last step of the phase, or until a stop is requested, and save."""
    train.check_output_paths(settings)
    with ExitStack() as stack:
        source = start.source_of(settings)
        configured = start.with_shape_of(settings, source)
        rows = 0 if source is None else source.config.vocab_size
        sized = corpora.with_sizes_of_records(configured, rows)
        settings, mesh, stop = train.prepare(sized, stack)
        size = settings.bert_config.vocab_size
        if size != configured.bert_config.vocab_size:
            print_line(f"bert_config.vocab_size: {size:,}, as the records have")
        per_step = make_plan(settings, None).examples_per_step
        stream = corpora.open_stream(settings, per_step, mesh.processes.rank, mesh.processes.count)
        folder = stream.folder
        if source is not None and folder is not None:
            corpora.refuse_another_vocabulary(folder, source.folder, settings.save_ckpt_path)
        held_out = corpora.open_held_out(settings)
        if held_out is not None and stream.has_next_sentences and not held_out.has_next_sentences:
            print_line(
                f"validation_dir ({settings.validation_dir}): has no sentence pairs, so no next-sentence score; "
                "make it without --no-nsp to have one"
            )
        plan = make_plan(settings, stream.epoch_size, stream.sequences_per_example)
        if description := stream.describe(plan.examples):
            print_line("\n".join(description))

        def evaluate(engine: Engine, step: int) -> dict[str, float]:
            assert held_out is not None and held_out.folder is not None
            examples, size = settings.evaluation_examples, plan.micro_batch_size
            text_bytes = read_vocabulary(held_out.folder / VOCAB_FILE).text_bytes
            return build.evaluate(engine, held_out, examples, size, text_bytes)

        spec = build.RunSpec(
            plan=plan,
            stream=stream,
            sample=stream.first_micro_batches(len(mesh.devices)),
            tokenizer=folder,
            evaluate=evaluate if held_out is not None else None,
            evaluate_every=settings.evaluate_every_steps,
        )
        _, _, status = train.run_training(settings, mesh, spec, stop, stack)
    if status == "stopped" and settings.exit_code_when_stopped:
        raise SystemExit(settings.exit_code_when_stopped)
