"""`bert pretrain`: one phase of masked-LM and next-sentence pre-training.

Phase 2 is this command with other lengths that starts from the weights of phase 1.
"""

from contextlib import ExitStack

from bert_cli.config.load import changed
from bert_cli.config.pretrain import PretrainSettings
from bert_cli.data.records.tokenizer import VOCAB_FILE, read_vocabulary
from bert_cli.data.stream.reader import ExampleStream
from bert_cli.errors import count
from bert_cli.parallel.engine import Engine
from bert_cli.tasks.run import build, corpora, probe, start, train
from bert_cli.train import health
from bert_cli.train.metrics import PROBE, print_line


def run(settings: PretrainSettings) -> None:
    """Train to the last step of the phase, or until a stop is requested, and save."""
    train.check_output_paths(settings)
    with ExitStack() as stack:
        source = start.source_of(settings)
        configured = start.with_shape_of(settings, source)
        sized = corpora.with_sizes_of_records(configured, source)
        settings, mesh, stop = train.prepare(sized, stack)
        stream = corpora.open_stream(settings, mesh.processes.rank, mesh.processes.count)
        folder = stream.folder
        for line in corpora.describe_vocabulary(configured, settings, stream):
            print_line(line)
        if source is not None and folder is not None:
            corpora.refuse_another_vocabulary(folder, source.folder, settings.save_ckpt_path)
        if settings.new_rows_only_steps and settings.decay_from is None:
            known = start.known_rows(settings, folder)
            steps = settings.new_rows_only_steps
            print_line(
                f"new rows: the first {count(steps, 'step')} train only the rows from {known:,} on"
            )
            settings = changed(settings, known_rows=known)
        held_out = corpora.open_held_out(settings)
        if held_out is not None and stream.has_next_sentences and not held_out.has_next_sentences:
            print_line(
                f"validation_dir ({settings.validation_dir}): has no sentence pairs, so no next-sentence score; "
                "make it without --no-nsp to get one"
            )
        pairs = probe.read_probe(settings, folder) if settings.probe and folder else None
        if pairs is not None:
            print_line(f"probe: {pairs.describe()}")
        plan = corpora.plan_for(settings, stream)
        if description := stream.describe(plan.examples):
            print_line("\n".join(description))
        for check in [] if folder is None else corpora.text_checks(stream, settings):
            if check.warns:
                print_line(check.warning)

        def score(engine: Engine, step: int) -> dict[str, float]:
            values = {} if held_out is None else evaluate(settings, held_out, engine)
            if pairs is not None:
                values[PROBE] = probe.accuracy(probe.log_likelihoods(engine, pairs))
            return values

        spec = build.RunSpec(
            plan=plan,
            stream=stream,
            sample=stream.first_micro_batches(len(mesh.devices)),
            tokenizer=folder,
            evaluate=None if held_out is None and pairs is None else score,
            held_out="" if pairs is None else pairs.sentences.fingerprint,
            evaluate_every=settings.evaluate_every_steps,
            unigram_entropy=None if folder is None else health.unigram_entropy(stream),
        )
        _, _, status = train.run_training(settings, mesh, spec, stop, stack)
    if status == "stopped" and settings.exit_code_when_stopped:
        raise SystemExit(settings.exit_code_when_stopped)


def evaluate(
    settings: PretrainSettings, held_out: ExampleStream, engine: Engine
) -> dict[str, float]:
    """Return metrics on the first held-out examples, with their bits per byte."""
    assert held_out.folder is not None
    examples = settings.evaluation_examples
    size = held_out.batching.micro_batch_size
    text_bytes = read_vocabulary(held_out.folder / VOCAB_FILE).text_bytes
    return build.evaluate(engine, held_out, examples, size, text_bytes)
