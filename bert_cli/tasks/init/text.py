"""The text of `bert init`: its words, documents and languages, a part that is held out, and pairs for search.

A few long documents, such as books, count as many short ones, so that a part of them can be held out.
"""

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from bert_cli.data.io import files
from bert_cli.data.search import passages
from bert_cli.data.text.preprocess import language_of
from bert_cli.data.tokens.encoder import encoder_of
from bert_cli.data.tokens.tokenizer import Vocabulary
from bert_cli.errors import DataError
from bert_cli.tasks.init.recipe import MOST_HELD_OUT, TABLE, TextFacts, held_out_every
from bert_cli.text import count

SAMPLED_BYTES = 1 << 26
PIECE_BYTES = 1 << 20  # bytes that are read of a larger text, in pieces
FEW_DOCUMENTS = 20  # so few documents are cut into pieces
MIN_WORDS = 1000  # fewer words have no clear language, and are too little to train and to score on
MIN_DOCUMENTS = 4  # two to train on, one that chooses a checkpoint and one for the test
LONG_DOCUMENT = TABLE["pairs"]["document"]  # characters of a piece
# Chinese and Japanese have no spaces: each of their characters is a word, as in BERT's vocabularies.
CHARACTERS = r"\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
WORD = re.compile(rf"[{CHARACTERS}]|[^\s{CHARACTERS}]+")
LANGUAGE_SAMPLE = 500  # documents whose language is recognised
NAMED_LANGUAGE = 0.02  # of the documents: fewer may be mistakes
VOCABULARY_SAMPLE = 2000  # documents
SENTENCE_CHARACTERS = 20  # shortest sentence of a pair
KEY_WORD = re.compile(rf"[{CHARACTERS}]|[^\W{CHARACTERS}]+")
REMOVED = 0.35  # of the words of a sentence, the rarest ones
LONGEST_TITLE = 80  # characters
# Of four words: fewer are a heading.
QUESTION = re.compile(rf"([\w'’-]+[ ,;]+){{3,15}}[\w'’-]+\?|[{CHARACTERS}]{{8,100}}[?\uff1f]")
PLAIN_TITLE = re.compile(rf"\w[\w ,;.'’-]{{,{LONGEST_TITLE}}}")
QUESTIONS = 3  # that are suggested
PLAIN_SENTENCE = re.compile(r"[\w ,;.-]{40,120}")
PRONOUN = re.compile(r"(?i:its?|this|that|these|those|he|his|she|her|they|their|we|i|you|there)\b")
PARTS = ("train", "held_out", "test")
"""Of the documents; those held out choose a checkpoint, those of the test are for `bert verdict` alone."""
PAIRS = "pairs.jsonl"
QUERIES = "queries.jsonl"
CORPUS = "corpus.jsonl"
JUDGED = "qrels/test.tsv"
SEARCH = {"held_out": "search", "test": "test"}
"""Part -> the folder of its QUERIES, their passages (CORPUS) and which of these are relevant (JUDGED)."""


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
    pieces = [piece for part in parts for piece in files.split_part(part, PIECE_BYTES, reading)]
    every = max(1, int(sum(map(files.text_bytes, parts))) // SAMPLED_BYTES)
    documents: list[list[str]] = []
    size = 0
    for lines in documents_of(pieces[::every], reading):
        documents.append(lines)
        size += sum(len(line.encode()) + 1 for line in lines)
        if size > SAMPLED_BYTES:  # of compressed files, which are not split
            break
    is_cut = len(documents) < FEW_DOCUMENTS
    sample = ["\n".join(lines) for lines in (cut(documents) if is_cut else documents)]
    lengths = [len(WORD.findall(text)) for text in sample]
    if len(lengths) < MIN_DOCUMENTS or sum(lengths) < MIN_WORDS:
        problem = f"has {count(len(lengths), 'document')} of {count(sum(lengths), 'word')}"
        remedy = (
            f"use at least {MIN_WORDS:,} words in {MIN_DOCUMENTS} documents: a part of the documents is "
            "held out, to score the model on"
        )
        raise DataError(f"input ({parts[0].path})", problem, remedy)
    is_estimated = every > 1 or size > SAMPLED_BYTES
    scale = sum(map(files.text_bytes, parts)) / size if is_estimated else 1.0
    facts = TextFacts(
        text_bytes=scale * size,
        words=scale * sum(lengths),
        documents=scale * len(lengths),
        languages=_languages(sample[:: 1 + len(sample) // LANGUAGE_SAMPLE]),
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


def _languages(sample: Sequence[str]) -> dict[str, float]:
    codes = Counter(filter(None, map(language_of, sample)))
    return {code: number / codes.total() for code, number in codes.most_common()}


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
    documents: Iterable[list[str]],
    number: float,
    split: Callable[[str], list[str]],
    has_pairs: bool,
) -> tuple[str, list[str]]:
    """Write about so many documents into a folder: for training, held out and for a test, and as pairs for search.

    Return a held-out sentence, and whole questions or else titles of the text, to ask it. A held-out pair is a query
    and a passage; the passages of its document are relevant.
    """
    every = held_out_every(number)
    held_out = 0
    shown: list[str] = []
    questions: list[str] = []
    titles: list[str] = []
    frequencies: Counter[str] = Counter()  # documents so far that have a word
    seen: set[str] = set()  # texts of pairs
    with ExitStack() as stack:
        out = {}
        names = [f"text/{part}.jsonl" for part in PARTS]
        if has_pairs:
            kinds = (QUERIES, CORPUS, JUDGED)
            names += [
                PAIRS,
                *(f"{subfolder}/{kind}" for subfolder in SEARCH.values() for kind in kinds),
            ]
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            out[name] = stack.enter_context(open(folder / name, "w", encoding="utf-8"))
            if name.endswith(JUDGED):
                out[name].write("query-id\tcorpus-id\tscore\n")

        def write(name: str, **values: Any) -> None:
            out[name].write(json.dumps(values, ensure_ascii=False) + "\n")

        for index, lines in enumerate(documents):
            is_held_out = index % every == every - 1 and held_out < MOST_HELD_OUT
            held_out += is_held_out
            part = PARTS[1 + held_out % 2 if is_held_out else 0]
            write(f"text/{part}.jsonl", text="\n".join(lines))
            sentences = [" ".join(text.split()) for line in lines for text in split(line)]
            pairs = []
            if has_pairs:
                frequencies.update({*KEY_WORD.findall("\n".join(lines).lower())})
                for pair in pairs_of(lines, split, frequencies):
                    if not seen.intersection(pair):
                        pairs.append(pair)
                        seen.update(pair)
            if len(questions) < QUESTIONS:
                questions += filter(QUESTION.fullmatch, sentences)
                titles += filter(PLAIN_TITLE.fullmatch, [lines[0]])
            if not is_held_out:
                for anchor, positive in pairs:
                    write(PAIRS, anchor=anchor, positive=positive)
                continue
            shown += filter(PLAIN_SENTENCE.fullmatch, sentences)
            subfolder = SEARCH[part]
            ids = [f"{held_out}-{at}" for at in range(len(pairs))]
            for asked, (anchor, positive) in zip(ids, pairs, strict=True):
                write(f"{subfolder}/{QUERIES}", _id=asked, text=anchor)
                write(f"{subfolder}/{CORPUS}", _id=asked, text=positive)
                out[f"{subfolder}/{JUDGED}"].writelines(
                    f"{asked}\t{relevant}\t1\n" for relevant in ids
                )
    sentence = next(itertools.filterfalse(PRONOUN.match, shown), (shown or sentences)[0])
    return sentence, list(dict.fromkeys([*questions, *titles, sentence]))[:QUESTIONS]


def mask_word(sentence: str) -> str:
    """Return a sentence with [MASK] in place of its middle word."""
    words = [match.span() for match in WORD.finditer(sentence)]
    first, end = words[len(words) // 2]
    return f"{sentence[:first]}[MASK]{sentence[end:]}"


def pairs_of(
    lines: Sequence[str], split: Callable[[str], list[str]], frequencies: Counter[str]
) -> list[tuple[str, str]]:
    """Return pairs of a question and a passage that answers it, from all parts of a document.

    A question is the heading of the document, the first sentence of a passage, or any of its sentences without the
    rarest words, as their `frequencies` tell.
    """
    has_title = 0 in passages.headings_of(lines)
    whole = passages.passages_of(lines[has_title:], split)
    of_document = TABLE["pairs"]["of_document"]
    of_length = math.ceil(of_document * sum(map(len, lines)) / LONG_DOCUMENT)
    number = min(max(of_document, of_length), len(whole))
    pairs = []
    for n in range(number):
        passage = " ".join(whole[len(whole) * n // number].text.split())
        sentences = [text.strip() for text in split(passage) if len(text) >= SENTENCE_CHARACTERS]
        by_chance = len(passage)  # the same in each run
        if n == 0 and has_title:
            pairs.append((lines[0], passage))
        elif by_chance % 2 and len(sentences) > 1:
            pairs.append((sentences[0], " ".join(sentences[1:])))
        elif sentences:
            asked = sentences[by_chance // 2 % len(sentences)]
            pairs.append((without_rarest(asked, frequencies), passage))
    return [pair for pair in pairs if all(pair)]


def without_rarest(sentence: str, frequencies: Counter[str]) -> str:
    """Return the words of a sentence without the rarest, so that a model must find more than these."""
    words = KEY_WORD.findall(sentence)
    by_rarity = sorted(range(len(words)), key=lambda n: frequencies[words[n].lower()])
    gone = {*by_rarity[: math.ceil(REMOVED * len(words))]}
    return " ".join(word for n, word in enumerate(words) if n not in gone)
