"""Split text into sentences: one per line, a blank line between documents.

A shard is a file of `bert extract`, a range of a large file, or several small files. Documents are read
line by line, so files and documents of any size fit in memory. White space becomes single spaces. Each
line is split alone, so no sentence spans two paragraphs. Of WikiExtractor's articles the titles are
dropped; headings stay, as lines such as `History.`, because they look like short paragraphs. Documents
without a sentence, duplicates where they are dropped, and lines outside articles are counted.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from bert_cli.config.data import PreprocessSettings
from bert_cli.data.shards.manifest import Shard, Stats, Step, recorded_settings
from bert_cli.data.shards.runner import Workers, run_shards
from bert_cli.data.text.documents import Kind, marked_lines
from bert_cli.data.text.duplicates import find_duplicates, new_signature
from bert_cli.data.text.files import (
    CLOSE,
    Outputs,
    Part,
    Reading,
    bundle,
    find_root,
    recognise_all,
    refuse_without_effect,
    shard_of,
    split_part,
    text_bytes,
)
from bert_cli.data.text.sentences import PARAMETERS, choose_punkt, load_splitter

SHARD_BYTES = 16_000_000
"""A range of a large file, and at most so much of small files together: some seconds of work."""
BYTES_WRITTEN = 1.0
"""Per byte of text: 0.995 for 10 MB of English articles, 1.000 for text without <doc> lines."""
SAMPLED_FILES, SAMPLED_BYTES = 16, 1 << 18
"""Read before the work to estimate the documents per file."""
MANY_DOCUMENTS = 4
"""Documents per file of plain text that may be paragraphs, which --documents files keeps together."""

NO_WORD = re.compile(r"[\W_]*")


def run(settings: PreprocessSettings) -> None:
    """Split files of text. Raises DataError for a file that is not text, and without any sentence."""
    reading = Reading(settings.input_format, settings.text_field, settings.documents)
    parts, notes = recognise_all(settings.input, reading)
    refuse_without_effect(parts, settings.model_fields_set)
    _suggest_files_as_documents(parts, reading)
    if settings.near_duplicates is not None:
        new_signature()  # fails early where rensa is not installed
    outputs = plan_outputs(settings.input, parts, reading)
    splitter, language = settings.sentence_splitter, settings.language
    parameters: str = splitter
    if splitter == "punkt":
        begun_with = (recorded_settings(settings.out, "preprocess") or {}).get("parameters")
        texts = partial(_body_lines, parts, reading)
        parameters, note = choose_punkt(language, settings.out, begun_with, texts)
        notes += [note] if note else []
    else:
        load_splitter(splitter, language, None)  # fails early where sentencex is not installed
    workers = Workers(settings.processes, settings.scheduler)
    shards, dropped = _shards(settings, outputs, reading, workers)
    learned = settings.out.absolute() / PARAMETERS if parameters == "learned" else None
    run_shards(
        Step(
            "preprocess",
            settings.out,
            settings={
                "language": language,
                "splitter": splitter,
                "parameters": parameters,
                **_changed_settings(settings),
            },
            packages={"punkt": ["nltk"], "sentencex": ["sentencex"], "lines": []}[splitter],
            counted="sentences",
            expected_bytes=round(BYTES_WRITTEN * sum(map(text_bytes, parts))),
        ),
        shards,
        partial(split_shard, reading=reading, splitter=(splitter, language, learned)),
        workers,
        notes=[*dropped, *notes],
    )


def _shards(
    settings: PreprocessSettings, outputs: Outputs, reading: Reading, workers: Workers
) -> tuple[list[Shard], list[str]]:
    """Return a shard for each output, with its duplicates, and a note on these."""
    threshold = settings.near_duplicates
    if not settings.deduplicate and threshold is None:
        return [shard_of(path, parts) for path, parts in outputs], []
    duplicates = find_duplicates(outputs, reading, settings.out, workers, threshold)
    exact, near = (sum(map(len, numbers)) for numbers in zip(*duplicates, strict=True))
    note = f"dropped are {exact:,} documents that an earlier one equals"
    if threshold is not None:
        note += f", and {near:,} that an earlier one nearly equals"
    shards = [
        shard_of(path, parts, duplicates=numbers)
        for (path, parts), numbers in zip(outputs, duplicates, strict=True)
    ]
    return shards, [note]


def _suggest_files_as_documents(parts: Sequence[Part], reading: Reading) -> None:
    """Print a line where the paragraphs of plain files may be taken for documents."""
    is_plain = reading.documents == "blank-lines" and all(part.format == "plain" for part in parts)
    if not is_plain or len(parts) < 2:
        return
    sample = parts[:: -(-len(parts) // SAMPLED_FILES)]
    documents = sum(
        kind == "document"
        for part in sample
        for kind, _ in marked_lines(replace(part, stop=SAMPLED_BYTES), reading)
    )
    if documents >= MANY_DOCUMENTS * len(sample):
        print(
            f"preprocess: {len(parts):,} files of about {documents / len(sample):.0f} documents or more, which blank "
            "lines end; if each file is one document, stop and add --documents files",
            flush=True,
        )


def _changed_settings(settings: PreprocessSettings) -> dict[str, str | float | bool | None]:
    """Return the later settings that are not the default, so that older folders can be continued."""
    names = ("input_format", "text_field", "documents", "deduplicate", "near_duplicates")
    fields = PreprocessSettings.model_fields
    values = {name: getattr(settings, name) for name in names}
    return {name: value for name, value in values.items() if value != fields[name].default}


def plan_outputs(source: Path, parts: Sequence[Part], reading: Reading) -> Outputs:
    """Return the outputs, each with its parts.

    The files of `bert extract` keep their names, one output each. Any other text becomes
    text_00000.txt, ...: ranges of large files, and small files together.
    """
    ranges = [piece for part in parts for piece in split_part(part, SHARD_BYTES, reading)]
    if len(ranges) == len(parts) and all(part.format == "wikiextractor" for part in parts):
        root = find_root(source)
        return [(Path(f"{part.path.relative_to(root)}.txt"), [part]) for part in parts]
    bundles = bundle(ranges, SHARD_BYTES)
    return [(Path(f"text_{number:05}.txt"), parts) for number, parts in enumerate(bundles)]


def split_shard(
    inputs: tuple[Path, ...],
    output: Path,
    *,
    parts: Sequence[Part],
    reading: Reading,
    splitter: tuple[str, str, Path | None],
    duplicates: tuple[list[int], list[int]] | None = None,
) -> Stats:
    """Write the sentences of some parts, without the documents that are `duplicates`."""
    split = load_splitter(*splitter)
    exact, near = duplicates or ([], [])
    dropped = {*exact, *near}
    read = documents = sentences = 0
    outside = {part.path: 0 for part in parts}
    is_first = is_kept = False  # the document's first sentence is next; the document is not dropped
    with open(output, "w", encoding="utf-8", newline="\n") as file:
        for path, kind, line in _all_lines(parts, reading):
            if kind == "document":
                is_first, is_kept = True, read not in dropped
                read += 1
            if kind != "body":
                outside[path] += kind == "outside"
                continue
            for sentence in split(line) if is_kept else ():
                text = " ".join(sentence.split())  # U+2028 and others would end the line
                if NO_WORD.fullmatch(text):
                    continue
                if is_first:
                    file.write("\n" if documents else "")
                    documents += 1
                    is_first = False
                file.write(text + "\n")
                sentences += 1
    extra = {
        "documents_without_text": read - documents - len(dropped),
        "lines_outside_documents": sum(outside.values()),
    }
    if duplicates is not None:
        extra |= {"duplicates": len(exact), "near_duplicates": len(near)}
    notes = tuple(
        f"{path}: left out is text outside <doc ...> ... {CLOSE}, lines: {lines}"
        for path, lines in outside.items()
        if lines
    )
    size = sum(part.size for part in parts)
    return Stats(documents, sentences, bytes_in=size, extra=extra, notes=notes)


def _all_lines(parts: Sequence[Part], reading: Reading) -> Iterator[tuple[Path, Kind, str]]:
    for part in parts:
        for kind, line in marked_lines(part, reading):
            yield part.path, kind, line


def _body_lines(parts: Sequence[Part], reading: Reading) -> Iterator[str]:
    yield from (line for _, kind, line in _all_lines(parts, reading) if kind == "body" and line)
