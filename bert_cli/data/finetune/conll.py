"""Words with labels: CoNLL files, their features, predictions of words, and the scores of entities.

Labels are O, B-type and I-type. Files in the older IOB1 (CoNLL-2003 as published) start entities with I-, which is
converted to B-. The first piece of a word carries its label (Devlin et al. 2019, section 5.3). Entities are counted
as by conlleval (Tjong Kim Sang and Buchholz 2000).
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np

from bert_cli.arrays import Array, Ints64
from bert_cli.data.finetune.features import (
    Features,
    Pieces,
    framed,
    most_central,
    runs,
    window_spans,
)
from bert_cli.data.finetune.label_cells import check_spellings, label_numbers
from bert_cli.data.finetune.tables import read_lines, repeats
from bert_cli.data.tokens.tokenizer import TextTokenizer
from bert_cli.errors import DataError
from bert_cli.statistics import Examples, Sample, identify, sample_of

CONVERTED = "label{s} I- at the start of an entity (IOB1), converted to B-"
DOCUMENTS = "-DOCSTART- line{s}, left out"
COMMENTS = "comment line{s}, left out"
WINDOWS = "sentence{s} longer than max_seq_length, read in windows"
CUT_WORDS = "word{s} longer than max_seq_length, truncated"
NO_PIECES = "word{s} without pieces (control characters), read as [UNK]"
PREFIXED = "word{s} after a language, as in WikiANN's files, which is left out"
COUNTED = "sentence{s} whose first column counts the words, which are read from the second"
REPEATED = "sentence{s} repeating an earlier sentence"
DOCUMENT = "-DOCSTART-"
_LABEL = re.compile(r"O|[BI](-.+)?")
_HAN = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_LANGUAGE = re.compile(r"([a-z]{2,3}(-[a-z]+)*|simple):")
_CHUNK = re.compile(f"[{_HAN}]|[^\\s{_HAN}]+")

Line = tuple[str, list[str]]  # "FILE (line 3)", cells


@dataclass(frozen=True)
class Sentences:
    """The words of sentences, and a label number for each word."""

    words: list[list[str]]
    labels: list[list[int]]
    label_names: tuple[str, ...]  # by number
    remarks: Mapping[str, int] = field(default_factory=dict)  # what was changed -> how often
    documents: Sequence[int] = ()  # of each sentence; none if all are of one

    def __len__(self) -> int:
        """Return the number of sentences."""
        return len(self.words)

    @property
    def examples(self) -> Examples:
        """Return the identity of the sentences; those of a document are a group."""
        return identify(map(" ".join, self.words), self.documents or None)

    def names(self, labels: Iterable[Iterable[int]]) -> list[list[str]]:
        """Return the label names for the label numbers of each sentence's words."""
        return [[self.label_names[number] for number in sentence] for sentence in labels]


def read_conll(path: Path, label_names: Sequence[str] | None = None) -> Sentences:
    """Return the sentences of a CoNLL file; tabs separate columns, or spaces where no line but comments has a tab.

    Without `label_names` the names are O, then B- and I- of each type in the file, sorted; a file without a type is
    refused. Words are in the first column, or in the second after a column that counts them; a language that begins
    all of them ("en:") is left out. A line that starts with "# " is a comment only if its last column is no label, or
    if it has no tab in a file of tabs. Raises DataError with file and line.
    """
    lines = read_lines(path)
    if lines[0].lstrip().startswith(("{", "[{")):
        remedy = "write each word and its label on a line, as 'Ada B-PER', and a blank line after a sentence"
        raise DataError(str(path), "is JSON, but sentences are read from CoNLL files", remedy)
    written = (line.strip(" \t") for line in lines if not line.startswith("# "))
    separator = " "
    if any("\t" in line for line in written):
        separator = "\t"
    remarks: Counter[str] = Counter()
    rows, documents = _rows_of(path, lines, separator, remarks)
    column = _word_column(rows)
    words = [[cells[column] for _, cells in sentence] for sentence in rows]
    language = _LANGUAGE.match(words[0][0])
    if language and all(word.startswith(language[0]) for word in chain.from_iterable(words)):
        # A word of the language alone was a space.
        prefix = language[0]
        words = [[word.removeprefix(prefix) or word for word in sentence] for sentence in words]
        remarks[PREFIXED] = sum(map(len, words))
    remarks[REPEATED] = repeats([[" ".join(sentence)] for sentence in words])
    remarks[COUNTED] = column * len(words)
    tags = [[(where, cells[-1]) for where, cells in sentence] for sentence in rows]
    if label_names is None:
        marked = [(where, tag[1:]) for where, tag in chain.from_iterable(tags) if tag != "O"]
        if not marked:
            problem = "has no entity: the label in the last column of each line is O"
            raise DataError(str(path), problem, "use a file whose last column labels entities")
        check_spellings((where, entity_type[1:]) for where, entity_type in marked)
        types = sorted({entity_type for _, entity_type in marked})
        prefixed: list[str] = []
        for entity_type in types:
            prefixed += (f"B{entity_type}", f"I{entity_type}")
        label_names = ("O", *prefixed)
    labels = [label_numbers(sentence, label_names).tolist() for sentence in tags]
    if len({*documents}) <= 1:
        documents = []
    return Sentences(words, labels, tuple(label_names), +remarks, documents)


def _rows_of(
    path: Path, lines: Sequence[str], separator: str, remarks: Counter[str]
) -> tuple[list[list[Line]], list[int]]:
    """Return the lines of each sentence, whose labels are BIO, and the number of its document."""
    rows: list[list[Line]] = []
    documents: list[int] = []
    columns = 0
    sentence: list[Line] = []
    before = "O"
    for number, line in enumerate(lines, 1):
        cells = _cells(line, separator)
        is_label = bool(cells) and _LABEL.fullmatch(cells[-1]) is not None
        if not cells or cells[0] == DOCUMENT:
            remarks[DOCUMENTS] += bool(cells)
            sentence = []
            before = "O"
            continue
        if line.startswith("# ") and (not is_label or (separator == "\t" and len(cells) == 1)):
            remarks[COMMENTS] += 1
            continue
        columns = columns or max(2, len(cells))
        where = f"{path} (line {number})"
        if len(cells) != columns or not cells[0] or not is_label:
            raise DataError(
                where,
                f"'{' '.join(cells)}' is not a line of {columns} columns, from a word to a BIO label",
                "fix the line; labels are O, B-type or I-type: convert other schemes to BIO",
            )
        if not sentence:
            rows.append(sentence)
            documents.append(remarks[DOCUMENTS])
        label = cells[-1]
        if label[0] == "I" and (before == "O" or before[1:] != label[1:]):
            cells[-1] = f"B{label[1:]}"
            remarks[CONVERTED] += 1
        before = cells[-1]
        sentence.append((where, cells))
    if not rows:
        remedy = "use a CoNLL file, with a word and its label on each line"
        raise DataError(str(path), "contains no sentences", remedy)
    return rows, documents


def _word_column(sentences: Sequence[Sequence[Line]]) -> int:
    """Return the column of the words: 0, or 1 where column 0 counts the words of each sentence."""
    long = [lines for lines in sentences if len(lines) > 1]
    # Most sentences of two words or more: some may begin with a number by chance.
    if 2 * sum(map(_is_counted, long)) <= len(long):
        return 0
    for lines in sentences:
        for where, cells in lines:
            if not _is_counted(lines) or len(cells) < 3 or not cells[1]:
                problem = "column 1 counts the words of sentences, but not here, or no word follows"
                raise DataError(where, problem, "fix the sentence, or leave out that column")
    return 1


def _is_counted(lines: Sequence[Line]) -> bool:
    cells = [cells[0] for _, cells in lines]
    first = 0
    if cells[0].isdecimal():
        first = int(cells[0][:9])
    return cells == [str(first + number) for number in range(len(cells))]


def _cells(line: str, separator: str) -> list[str]:
    """Return the columns of a line, none for a blank one; white space beyond ASCII is text."""
    if not line.strip(" \t"):
        return []
    if separator == "\t":
        return [cell.strip(" ") for cell in line.split("\t")]
    return [cell for cell in line.strip(" \t").split(" ") if cell]


def word_features(
    sentences: Sentences,
    tokenizer: TextTokenizer,
    max_seq_length: int,
    doc_stride: int | None = None,
) -> tuple[Features, Mapping[str, int]]:
    """Return the features, [CLS] pieces [SEP] for each sentence, and the number of cuts of each kind.

    Position labels are `labels` and `label_weights` [T]; the weight is 1 at a word's first piece. A sentence that is
    too long becomes several examples, its `window_spans`, which overlap with `doc_stride` alone; a word has the weight
    in the window where it is most central.
    """
    room = max_seq_length - 2
    # A word's pieces do not depend on its neighbours.
    distinct = list(dict.fromkeys(chain.from_iterable(sentences.words)))
    ids_of = dict(zip(distinct, tokenizer.encode_words(distinct), strict=True))
    words = list(map(ids_of.__getitem__, chain.from_iterable(sentences.words)))
    remarks: Counter[str] = Counter()
    remarks[NO_PIECES] = sum(not ids for ids in words)
    remarks[CUT_WORDS] = sum(len(ids) > room for ids in words)
    words = [ids[:room] or [tokenizer.special.unk] for ids in words]
    flat = np.array(list(chain.from_iterable(words)), np.int32)
    first_pieces = np.cumsum([0, *map(len, words)])  # of words, and the end
    # Pieces of each sentence, from the offsets of its first and its last word.
    sizes = np.diff(first_pieces[np.cumsum([0, *map(len, sentences.words)])])
    remarks[WINDOWS] = int(np.count_nonzero(sizes > room))
    owner, start, length = window_spans(sizes, room, doc_stride or room)
    none = np.zeros_like(length)
    starts = sizes.cumsum() - sizes
    pieces = Pieces(flat, starts, sizes, np.zeros((0, 2), np.int32))
    part = pieces.part(owner, start, length)
    features = framed(tokenizer, part, part._replace(lengths=none), none > 0)
    is_first = np.zeros(len(flat), np.bool_)
    is_first[first_pieces[:-1]] = True
    weights = np.zeros(len(features.tokens), np.float32)
    is_best = most_central(owner, start, length)
    # After [CLS]: 1 at the first piece of a word, in the window where the piece is most central.
    weights[runs(features.starts + 1, length)] = is_first[runs(part.starts, length)] & is_best
    labels = np.zeros(len(weights), np.int32)
    labels[weights > 0] = list(chain.from_iterable(sentences.labels))
    columns = {"labels": labels, "label_weights": weights}
    of_windows = None if doc_stride is None else owner
    return replace(features, position_labels=columns, owner=of_windows), +remarks


def word_spans(text: str) -> list[tuple[int, int]]:
    """Return the (start, end) characters of each word of a text, split as in CoNLL files.

    Punctuation at either end of a word is a word itself, and so is each Han character: Chinese files label
    characters.
    """
    spans: list[tuple[int, int]] = []
    for chunk in _CHUNK.finditer(text):
        begin, end = chunk.span()
        letters = enumerate(chunk[0], begin)
        inner = [n for n, letter in letters if not unicodedata.category(letter).startswith("P")]
        inner = inner or [end - 1]  # of marks alone, the last is the word
        after = inner[-1] + 1
        spans += [(n, n + 1) for n in range(begin, inner[0])]
        spans.append((inner[0], after))
        spans += [(n, n + 1) for n in range(after, end)]
    return spans


def of_words(sentences: Sentences, features: Features, values: Array) -> list[Array]:
    """Return the values of each sentence's words: of `values` [T], the entry at each word's first piece."""
    ends = np.cumsum([len(words) for words in sentences.words])
    return np.split(values[features.position_labels["label_weights"] > 0], ends[:-1])


def chunks(labels: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return the entities of labels O, B-type, I-type: type, first word, last word.

    A bare B or I has the type "_", as in seqeval.
    """
    entities: list[tuple[str, int, int]] = []
    begin = 0
    before = "O"
    for position, label in enumerate([*labels, "O"]):
        continues = label[0] == "I" and before != "O" and label[1:] == before[1:]
        if not continues:
            if before != "O":
                entities.append((before[2:] or "_", begin, position - 1))
            begin = position
        before = label
    return entities


def entity_samples(
    labels: Sequence[Sequence[str]], predictions: Sequence[Sequence[str]], examples: Examples
) -> dict[str, Sample]:
    """Return F1, precision and recall of all entities (the micro average), and the F1 of each type in the labels.

    `labels` and `predictions` are the label names of each sentence's words. Other predicted types vary with the seed.
    """
    # An entity is right if its type and both its ends are, so entities are compared as sets.
    sides = ([{*chunks(sentence)} for sentence in side] for side in (labels, predictions))
    rows = [(gold & guessed, guessed, gold) for gold, guessed in zip(*sides, strict=True)]
    columns: dict[str, tuple[Ints64, Ints64]] = {}
    types = {name for _, _, gold in rows for name, _, _ in gold}
    for entity_type in ("", *sorted(types)):
        # Of each sentence: right, predicted and labelled entities of a type, or all.
        right, guessed, labelled = np.array(
            [[sum(entity_type in ("", name) for name, *_ in side) for side in row] for row in rows]
        ).T
        name = f"f1_{entity_type}" if entity_type else "f1"
        columns[name] = (2 * right, guessed + labelled)
        if not entity_type:
            columns |= {"precision": (right, guessed), "recall": (right, labelled)}
    return {name: sample_of(examples, "ratio", *pair) for name, pair in columns.items()}
