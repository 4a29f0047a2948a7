"""The text of `bert init`: its words, documents and languages, a part that is held out, and a sentence of it.

A few long documents, such as books, count as many short ones, so that a part of them can be held out.
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain
from operator import itemgetter
from pathlib import Path

import numpy as np

from bert_cli.data.io import files
from bert_cli.data.search import passages
from bert_cli.data.text import duplicates
from bert_cli.data.text.preprocess import language_of
from bert_cli.data.tokens.encoder import encoder_of
from bert_cli.data.tokens.tokenizer import Vocabulary
from bert_cli.errors import DataError, needs_extra
from bert_cli.processes import print_line
from bert_cli.statistics import plain
from bert_cli.tasks.init.recipe import MOST_HELD_OUT, TextFacts, held_out_every
from bert_cli.text import count

SAMPLED_BYTES = 1 << 26
PIECE_BYTES = 1 << 20  # bytes that are read of a larger text, in pieces
FEW_DOCUMENTS = 20  # so few documents are cut into pieces
MIN_WORDS = 1000  # fewer words have no clear language, and are too little to train and to score on
MIN_DOCUMENTS = 4  # two to train on, one that chooses a checkpoint and one for the test
LONG_DOCUMENT = 20_000  # characters of a piece
# Chinese and Japanese have no spaces: each of their characters is a word, as in BERT's vocabularies.
CHARACTERS = r"\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
WORD = re.compile(rf"[{CHARACTERS}]|[^\s{CHARACTERS}]+")
LANGUAGE_SAMPLE = 500  # documents whose language is recognised
NAMED_LANGUAGE = 0.02  # of the documents: fewer may be mistakes
VOCABULARY_SAMPLE = 2000  # documents
PLAIN_SENTENCE = re.compile(r"[\w ,;.-]{40,120}")
SIMILAR = 0.8  # of the runs of words of two documents
# Of the documents; those held out choose a checkpoint, those of the test are for `bert verdict` alone.
PARTS = ("train", "held_out", "test")


def documents_of(parts: Iterable[files.Part], reading: files.Reading) -> Iterator[list[str]]:
    """Yield the lines of each document."""
    for part in parts:
        for document in passages.documents_of(part, reading):
            yield list(document.lines)


def cut(documents: Iterable[list[str]]) -> Iterator[list[str]]:
    """Yield the documents, cut into pieces of LONG_DOCUMENT characters."""
    for lines in documents:
        sizes = itertools.accumulate(map(len, lines))
        numbered = zip((size // LONG_DOCUMENT for size in sizes), lines, strict=True)
        for _, piece in itertools.groupby(numbered, itemgetter(0)):
            yield [line for _, line in piece]


def read_facts(
    parts: Sequence[files.Part], reading: files.Reading, vocabulary: Vocabulary | None
) -> TextFacts:
    """Return the facts of a text, by the vocabulary of a model. Those of a large text are estimated from pieces of it.

    Raises DataError for a text of fewer than MIN_DOCUMENTS documents or MIN_WORDS words.
    """
    pieces: list[files.Part] = []
    for part in parts:
        pieces += files.split_part(part, PIECE_BYTES, reading)
    # Every n-th piece, so that all parts of the text are in the sample.
    whole = sum(map(files.text_bytes, parts))
    interval = max(1, int(whole) // SAMPLED_BYTES)
    documents = []
    size = 0
    for lines in documents_of(pieces[::interval], reading):
        documents.append(lines)
        size += sum(len(line.encode()) + 1 for line in lines)
        if size > SAMPLED_BYTES:  # of compressed files, which are not split
            break
    is_cut = len(documents) < FEW_DOCUMENTS
    texts = cut(documents) if is_cut else documents
    sample = list(map("\n".join, texts))
    lengths = [len(WORD.findall(text)) for text in sample]
    if len(lengths) < MIN_DOCUMENTS or sum(lengths) < MIN_WORDS:
        problem = f"has {count(len(lengths), 'document')} of {count(sum(lengths), 'word')}"
        remedy = (
            f"use at least {MIN_WORDS:,} words in {MIN_DOCUMENTS} documents: a part of the documents is "
            "held out, to score the model on"
        )
        raise DataError(f"input ({parts[0].path})", problem, remedy)
    is_estimated = interval > 1 or size > SAMPLED_BYTES
    scale = 1.0
    if is_estimated:
        scale = whole / size
    codes = Counter(filter(None, map(language_of, sample[:: 1 + len(sample) // LANGUAGE_SAMPLE])))
    facts = TextFacts(
        text_bytes=scale * size,
        words=scale * sum(lengths),
        documents=scale * len(lengths),
        languages={code: number / codes.total() for code, number in codes.most_common()},
        # The length of a run is chosen for nine of ten documents; the longest would set it for all.
        long_document=float(np.percentile(lengths, 90)),
        is_estimated=is_estimated,
        is_cut=is_cut,
    )
    if vocabulary is None:
        return facts
    text = "\n".join(sample[:: 1 + len(sample) // VOCABULARY_SAMPLE])
    tokens = encoder_of(vocabulary).encode(text).tokens
    unknown = np.count_nonzero(tokens == vocabulary.special.unk)
    words = len(WORD.findall(text))
    return replace(facts, pieces_per_word=len(tokens) / words, unknown=unknown / words)


def describe(facts: TextFacts) -> str:
    """Return the facts as text."""
    parts = facts.languages.items()
    languages = ", ".join(f"{code} {part:.0%}" for code, part in parts if part >= NAMED_LANGUAGE)
    size = f"{facts.text_bytes / 1e6:,.3g} MB of text, {facts.words:,.0f} words"
    estimated = " (estimated from a sample)" if facts.is_estimated else ""
    return (
        f"{size} in {facts.documents:,.0f} documents{estimated}; language {languages or 'unknown'}"
    )


def divide(
    folder: Path,
    read: Callable[[], Iterable[list[str]]],
    number: float,
    split: Callable[[str], list[str]],
) -> str:
    """Write about so many documents to text/PART.jsonl of a folder. Return a sentence that is not trained on.

    `read` begins to read the documents. Those that repeat a held-out one are left out. Raises DataError for fewer than
    two documents to hold out and as many to train on.
    """
    interval = held_out_every(number)
    candidates = [*itertools.islice(read(), interval - 1, MOST_HELD_OUT * interval, interval)]
    groups, total = copies_of(read(), candidates)
    part_of: dict[int, str] = {}
    left_out: set[int] = set()
    for number, group in zip(itertools.count(interval - 1, interval), groups, strict=False):
        # At most half of the documents, also with their copies, may be lost to training.
        if number in group and len(part_of) + len(left_out) + len(group) <= total / 2:
            # In turn: the first for the test, the second held out, and so on.
            part_of[number] = PARTS[2 - len(part_of) % 2]
            left_out |= group - {number}
    if len(part_of) < 2:
        problem = f"has fewer than {MIN_DOCUMENTS} different documents"
        raise DataError("input", problem, "use more text: a part of the documents is held out")
    if left_out:
        print_line(f"init: left out {count(len(left_out), 'repetition')} of held-out documents")
    sentences = []
    (folder / "text").mkdir(parents=True)
    with ExitStack() as stack:
        out = {}
        for part in PARTS:
            path = folder / f"text/{part}.jsonl"
            out[part] = stack.enter_context(open(path, "w", encoding="utf-8"))
        for index, lines in enumerate(read()):
            if index in part_of:
                sentences += sentences_of(lines, split)
            if index not in left_out:
                row = json.dumps({"text": "\n".join(lines)}, ensure_ascii=False)
                out[part_of.get(index, "train")].write(f"{row}\n")
    return plain_sentence(sentences)


def copies_of(
    documents: Iterable[list[str]], candidates: Sequence[list[str]]
) -> tuple[list[set[int]], int]:
    """Return the numbers of the documents that repeat each candidate and no earlier one, and how many documents are.

    A text repeats another if they are equal by `plain` and, where rensa is installed, if they share SIMILAR of their
    runs of words.
    """
    names: dict[str, int] = {}
    for number, lines in enumerate(candidates):
        names.setdefault(plain("".join(lines)), number)
    signatures = None
    if find_spec("rensa"):
        signatures = np.stack([duplicates.signature_of(lines) for lines in candidates])
    else:
        print_line(f"init: near-equal documents are not found: {needs_extra('near-duplicates')}")
    groups: list[set[int]] = [set() for _ in candidates]
    index = -1
    for index, lines in enumerate(documents):
        copies = []
        name = plain("".join(lines))
        if name in names:
            copies.append(names[name])
        if signatures is not None:
            shared = (signatures == duplicates.signature_of(lines)).mean(1)
            copies += np.flatnonzero(shared >= SIMILAR)[:1].tolist()
        if copies:
            groups[min(copies)].add(index)
    return groups, index + 1


def sentences_of(lines: Iterable[str], split: Callable[[str], list[str]]) -> list[str]:
    """Return the sentences of a document without line breaks."""
    sentences = chain.from_iterable(map(split, lines))
    return [" ".join(sentence.split()) for sentence in sentences]


def plain_sentence(sentences: Sequence[str]) -> str:
    """Return the first sentence of plain words, or the first one."""
    return next(filter(PLAIN_SENTENCE.fullmatch, sentences), sentences[0])


def mask_word(sentence: str) -> str:
    """Return a sentence with [MASK] in place of its middle word."""
    words = [match.span() for match in WORD.finditer(sentence)]
    first, end = words[len(words) // 2]
    return f"{sentence[:first]}[MASK]{sentence[end:]}"
