"""Turn text into sentences: one a line, a blank line between documents.

A shard is a file of `bert extract`, a range of a large file, or several small files; its documents
pass through line by line, so files and documents of any size fit in memory. White space becomes
single spaces. A line is split by itself, so no sentence runs over two paragraphs. Of WikiExtractor's
articles the titles are dropped and the headings stay, as lines such as `History.`: nothing in the
text tells them from short paragraphs. Documents without a sentence are left out and counted, and so
are duplicates where that is asked for, and lines outside articles.
"""

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from bert_cli.config.data import PreprocessSettings
from bert_cli.data.shards.manifest import Shard, Stats, recorded_settings
from bert_cli.data.shards.runner import run_shards
from bert_cli.data.text.documents import marked_lines
from bert_cli.data.text.duplicates import Numbers, find_duplicates, new_signature
from bert_cli.data.text.files import (
    CLOSE,
    Part,
    Reading,
    find_root,
    recognise_all,
    refuse_without_effect,
)
from bert_cli.data.text.parts import Outputs, bundled, cut, read_parts, shard_of, text_bytes
from bert_cli.data.text.sentences import (
    PARAMETERS,
    Split,
    choose_punkt,
    one_a_line,
    punkt,
    sentencex,
)

SHARD_BYTES = 16_000_000
"""A range of a large file, and at most so much of small files together: a shard of some seconds."""
BYTES_WRITTEN = 1.0
"""For a byte of text: 0.995 for 10 MB of English articles, 1.000 for text without <doc> lines."""

MANY_DOCUMENTS = 4
"""In a file of plain text, on average: so many may be paragraphs, which --documents files keeps together."""

NO_WORD = re.compile(r"[\W_]*")


def run(settings: PreprocessSettings) -> None:
    """Split files of text.

    Raises DataError for a file that is not text, and if not one sentence came out of the folder.
    """
    reading = Reading(settings.input_format, settings.text_field, settings.documents)
    parts, notes = recognise_all(settings.input, reading)
    refuse_without_effect(parts, settings.model_fields_set)
    if settings.near_duplicates is not None:
        new_signature()  # says at once if it is not installed
    outputs = plan_outputs(settings.input, parts, reading)
    splitter = settings.sentence_splitter
    parameters: str = splitter
    if splitter == "punkt":
        corpus = partial(_corpus, parts, reading)
        before = recorded_settings(settings.out, "preprocess") or {}
        begun_with = before.get("parameters")
        parameters, note = choose_punkt(settings.language, settings.out, begun_with, corpus)
        notes += [note] if note else []
    elif splitter == "sentencex":
        sentencex(settings.language)  # says at once if it is not installed
    shards, dropped = _shards(settings, outputs, reading)
    notes = [*dropped, *notes]
    learned = settings.out.absolute() / PARAMETERS if parameters == "learned" else None
    manifest = run_shards(
        "preprocess",
        shards,
        partial(
            split_shard,
            reading=reading,
            splitter=splitter,
            language=settings.language,
            parameters=learned,
        ),
        out=settings.out,
        processes=settings.processes,
        settings={
            "language": settings.language,
            "splitter": splitter,
            "parameters": parameters,
            **_said(settings),
        },
        versions={"punkt": ["nltk"], "sentencex": ["sentencex"], "lines": []}[splitter],
        counted="sentences",
        notes=notes,
        needs=round(BYTES_WRITTEN * sum(map(text_bytes, parts))),
        scheduler=settings.scheduler,
    )
    _say_paragraphs(parts, reading, manifest["counts"]["documents"])


def _shards(
    settings: PreprocessSettings, outputs: Outputs, reading: Reading
) -> tuple[list[Shard], list[str]]:
    """A shard for each output, without the documents that are to be dropped, and a note on these."""
    if not settings.deduplicate and settings.near_duplicates is None:
        return [shard_of(path, of) for path, of in outputs], []
    duplicates = find_duplicates(
        outputs,
        reading,
        out=settings.out,
        processes=settings.processes,
        threshold=settings.near_duplicates,
        scheduler=settings.scheduler,
    )
    shards = [
        shard_of(path, of, exact=exact, near=near)
        for (path, of), (exact, near) in zip(outputs, duplicates, strict=True)
    ]
    return shards, [_told(duplicates, settings.near_duplicates)]


def _say_paragraphs(parts: Sequence[Part], reading: Reading, documents: int) -> None:
    """Files of plain text that hold many documents each may have meant their paragraphs."""
    files = len(parts)
    plain = reading.documents == "blank-lines" and all(part.format == "plain" for part in parts)
    if plain and files > 1 and documents >= MANY_DOCUMENTS * files:
        print(
            f"preprocess: {files:,} files, {documents:,} documents: a blank line ends one; --documents files, with "
            "another folder, takes each file as one"
        )


def _said(settings: PreprocessSettings) -> dict[str, str | float | bool | None]:
    # Only what departs from the default: folders begun before there were these settings go on.
    names = ("input_format", "text_field", "documents", "deduplicate", "near_duplicates")
    fields = PreprocessSettings.model_fields
    values = {name: getattr(settings, name) for name in names}
    return {name: value for name, value in values.items() if value != fields[name].default}


def plan_outputs(given: Path, parts: Sequence[Part], reading: Reading) -> Outputs:
    """What each output is made of.

    The files of `bert extract` keep their names, one output each. Any other text becomes
    text_00000.txt, ...: ranges of large files, and small files together.
    """
    ranges = [piece for part in parts for piece in cut(part, SHARD_BYTES, reading)]
    if len(ranges) == len(parts) and all(part.format == "wikiextractor" for part in parts):
        root = find_root(given)
        return [(Path(f"{part.path.relative_to(root)}.txt"), [part]) for part in parts]
    bundles = bundled(ranges, SHARD_BYTES)
    return [(Path(f"text_{number:05}.txt"), bundle) for number, bundle in enumerate(bundles)]


def _told(duplicates: Sequence[Numbers], threshold: float | None) -> str:
    exact, near = (sum(map(len, numbers)) for numbers in zip(*duplicates, strict=True))
    note = f"dropped are {exact:,} documents that an earlier one equals"
    return note if threshold is None else f"{note}, and {near:,} that an earlier one nearly equals"


def split_shard(
    inputs: tuple[Path, ...],
    output: Path,
    *,
    reading: Reading,
    splitter: str = "punkt",
    language: str = "english",
    parameters: Path | None = None,
) -> Stats:
    """Write the sentences of the parts that `inputs` tells of."""
    parts, told = read_parts(inputs)
    split: Split
    if splitter == "punkt":
        split = punkt(language, parameters)
    else:
        split = sentencex(language) if splitter == "sentencex" else one_a_line
    dropped: Numbers = (told.get("exact", []), told.get("near", []))
    left_out = set(dropped[0]) | set(dropped[1])
    found = documents = sentences = 0
    outside = {part.path: 0 for part in parts}
    fresh = wanted = False  # whether the document at hand has no sentence yet, and is to have any
    with open(output, "w", encoding="utf-8", newline="\n") as file:
        for path, kind, line in _marked(parts, reading):
            if kind == "document":
                fresh = True
                wanted = found not in left_out
                found += 1
            if kind != "body":
                outside[path] += kind == "outside"
                continue
            for sentence in split(line) if wanted else ():
                text = " ".join(sentence.split())  # U+2028 and its like would break the line
                if NO_WORD.fullmatch(text):
                    continue
                if fresh:
                    file.write("\n" if documents else "")
                    documents += 1
                    fresh = False
                file.write(text + "\n")
                sentences += 1
    extra = {
        "documents_without_text": found - documents - len(left_out),
        "lines_outside_documents": sum(outside.values()),
    }
    if told:
        extra |= {"duplicates": len(dropped[0]), "near_duplicates": len(dropped[1])}
    notes = (
        f"{path}: left out is text outside <doc ...> ... {CLOSE}, lines: {lines}"
        for path, lines in outside.items()
        if lines
    )
    size = sum(part.size for part in parts)
    return Stats(documents, sentences, bytes_in=size, extra=extra, notes=tuple(notes))


def _marked(parts: Sequence[Part], reading: Reading) -> Iterator[tuple[Path, str, str]]:
    for part in parts:
        for kind, line in marked_lines(part, reading):
            yield part.path, kind, line


def _corpus(parts: Sequence[Part], reading: Reading) -> Iterator[str]:
    yield from (line for _, kind, line in _marked(parts, reading) if kind == "body" and line)
