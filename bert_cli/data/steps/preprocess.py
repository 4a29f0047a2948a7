"""`bert preprocess`: sentences from text of any format."""

from functools import partial

from bert_cli.config.data import PreprocessSettings
from bert_cli.data.io.files import Reading, text_bytes
from bert_cli.data.io.inputs import open_text
from bert_cli.data.io.manifest import Step, shard_of
from bert_cli.data.text import preprocess
from bert_cli.data.workers.runner import Workers, run_shards
from bert_cli.files import JSONObject
from bert_cli.processes import print_line
from bert_cli.settings.markers import recorded
from bert_cli.text import count


def run(settings: PreprocessSettings) -> None:
    """Split files of text."""
    reading = Reading(
        settings.input_format, settings.text_field, settings.documents, settings.line_breaks
    )
    parts, notes = open_text(
        "preprocess",
        settings.input,
        settings.out,
        reading,
        settings.model_fields_set,
        strict=settings.strict,
        remedy="--line-breaks keep splits at each line",
    )
    outputs = preprocess.plan_outputs(settings.input, parts, reading)
    shards = [shard_of(path, group) for path, group in outputs]
    splitter = settings.sentence_splitter
    language = settings.language
    notes += preprocess.check_splitter(splitter, language)
    workers = Workers(settings.processes, settings.scheduler)
    threshold = settings.near_duplicates
    if settings.deduplicate or threshold is not None:
        from bert_cli.data.text.duplicates import mark_duplicates  # NumPy: a fifth of a start

        shards, note = mark_duplicates(shards, reading, settings.out, workers, threshold)
        notes.insert(0, note)
    values: JSONObject = {"language": preprocess.language_code(language), "splitter": splitter}
    record = run_shards(
        Step(
            "preprocess",
            settings.out,
            settings=values | recorded(settings),
            packages=preprocess.PACKAGES[splitter],
            counted="sentences",
            expected_bytes=round(preprocess.BYTES_WRITTEN * sum(map(text_bytes, parts))),
        ),
        shards,
        partial(preprocess.split_shard, reading=reading, splitter=splitter, language=language),
        workers,
        notes=notes,
    )
    number = record["counts"]["sentences_without_words"]
    if number:
        print_line(f"preprocess: dropped {count(number, 'sentence')} without a letter or a digit")
