"""`bert inspect`: an example, statistics and warnings of a folder of records.

It reads what a run would read: the first records in the order of a seed, which are spread over the folder.
"""

import numpy as np

from bert_cli.config.tools import InspectSettings
from bert_cli.data.examples import inspect
from bert_cli.data.examples.reader import shuffled
from bert_cli.data.examples.repeats import TEXT_SAMPLE, repeats
from bert_cli.data.examples.source import Records
from bert_cli.data.records.corpus import RecordFiles, number_of_copies
from bert_cli.data.records.formats import BLOCK
from bert_cli.data.tokens.tokenizer import read_vocabulary, vocabulary_path
from bert_cli.errors import ConfigError
from bert_cli.files import JSONObject, is_stdout, output_json
from bert_cli.processes import print_line
from bert_cli.settings.settings import is_set
from bert_cli.text import count, format_bytes


def run(settings: InspectSettings) -> None:
    """Print an example, statistics and warnings of a folder of records; write them where --json says."""
    folder = settings.folder
    source = Records(RecordFiles(folder), seed=settings.seed, masking=settings.masking)
    if not source.is_dynamic and is_set(settings, "masking"):
        problem = f"has no effect on {folder}: static records are already masked"
        raise ConfigError("masking", problem, "leave it out")
    vocabulary = read_vocabulary(vocabulary_path(folder), source.corpus["vocab_sha256"])
    number = min(settings.sample, len(source))
    sample = inspect.SampleStatistics(vocabulary)
    for first in range(0, number, BLOCK):
        sample.add(shuffled(source, np.arange(first, min(number, first + BLOCK))))
    corpus = source.corpus
    size = sum(file["bytes"] for file in corpus["files"])
    report: JSONObject = {
        "folder": str(folder),
        "format": corpus["masking"],
        "records": len(source),
        "sequence_length": source.sequence_length,
        "vocab_size": corpus["vocab_size"],
        "bytes": size,
        "bytes_per_record": size / len(source),
        "files": len(corpus["files"]),
        "largest_shard_fraction": max(file["records"] for file in corpus["files"]) / len(source),
        "copies": number_of_copies(folder, corpus),
        **sample.report(),
    }
    report["repeats"] = repeats(shuffled(source, np.arange(min(TEXT_SAMPLE, number))), len(source))
    warnings = list(inspect.find_warnings(report))
    if settings.json_file is not None:
        lengths = {str(length): sample.lengths[length] for length in sorted(sample.lengths)}
        of_sample = {"sample": number, "seed": settings.seed, "lengths": lengths}
        of_sample["warnings"] = [warning._asdict() for warning in warnings]
        output_json(settings.json_file, report | of_sample)
        if is_stdout(settings.json_file):
            return
    sampled = "all records"
    if number < len(source):
        sampled = f"a sample of {number:,}, drawn from the complete folder"
    print_line(
        f"{folder}: {count(len(source), report['format'] + ' record')} of {source.sequence_length} positions, "
        f"in {count(report['files'], 'file')}, {format_bytes(report['bytes'])}, "
        f"vocabulary of {report['vocab_size']:,} tokens\n"
        f"read: {sampled} (seed {settings.seed})"
    )
    example = shuffled(source, np.arange(1))
    print_line("\nan example, with predicted tokens as {token -> what the model sees}")
    print_line(f"  {inspect.example_text(example, vocabulary)}")
    heading = "\nwarnings" if warnings else "\nno warnings"
    for line in (
        "\nlengths of examples, in tokens with [CLS] and [SEP]",
        *inspect.histogram(sample.lengths, source.sequence_length),
        "\nstatistics",
        *inspect.table(
            {name: value for name, value in report.items() if not isinstance(value, str)}
        ),
        heading,
        *(f"  {folder}: {warning.what}; {warning.remedy}" for warning in warnings),
    ):
        print_line(line)
