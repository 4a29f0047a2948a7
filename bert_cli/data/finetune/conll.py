"""Words with labels: CoNLL files, their features, and predictions brought back to the words.

A line is a word, in its first column, and its label, in its last; a blank line ends a sentence.
Labels are O, B-type and I-type. In the older IOB1 (CoNLL-2003 as published) I- starts an entity and
B- only parts two that touch; such a start becomes B- here and is counted, which leaves a BIO file
as it is. A word's first piece carries its label, as in Devlin et al. 2018, section 5.3, and a
sentence that is too long is cut between words, so that every word is labelled.
"""

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bert_cli.data.finetune.examples import label_numbers, read_lines
from bert_cli.data.finetune.features import Features
from bert_cli.data.records.tokenizer import TextTokenizer
from bert_cli.errors import ConfigError, DataError

CONVERTED = "entities that began with I- (IOB1), now with B-"
DOCUMENTS = "-DOCSTART- lines, left out"
COMMENTS = "comment lines, left out"
CUT_SENTENCES = "sentences longer than max_seq_length, cut between words"
CUT_WORDS = "words longer than max_seq_length, cut"
NO_PIECES = "words without pieces (control characters), read as [UNK]"
DOCUMENT = "-DOCSTART-"
_LABEL = re.compile(r"O|[BI](-.+)?")
_HAN = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_CHUNK = re.compile(f"[{_HAN}]|[^\\s{_HAN}]+")
_OTHER_SCHEME = re.compile(r"[ESLUM]-.+")


@dataclass(frozen=True)
class Sentences:
    """Words with a label number each, sentence by sentence."""

    words: list[list[str]]
    labels: list[list[int]]
    label_names: tuple[str, ...]
    """By number."""
    remarks: Mapping[str, int] = field(default_factory=dict)
    """What was left out or changed, and how often."""

    def __len__(self) -> int:
        """Sentences n."""
        return len(self.words)

    def names(self, labels: Sequence[Sequence[int]]) -> list[list[str]]:
        """Label numbers of each sentence's words as names."""
        return [[self.label_names[number] for number in sentence] for sentence in labels]


@dataclass(frozen=True)
class WordPlaces:
    """Where the words' first pieces are among the features' tokens [T]."""

    places: npt.NDArray[np.int64]
    """[words] of all sentences."""
    ends: npt.NDArray[np.int64]
    """[sentences] end of each among the words."""
    remarks: Mapping[str, int]
    """What was cut, and how often."""


def read_conll(path: Path, label_names: Sequence[str] | None = None) -> Sentences:
    """The sentences of a CoNLL file; columns are parted by tabs, or by spaces where there are none.

    Without label names the file tells them: O, then B- and I- of each type that occurs, sorted. A
    line that starts with "# " is a comment only when its last column is no label, or when it has
    no tab in a file of tabs. DataError, with file and line, for a file that is missing or without
    sentences, a line with other columns than the first, a label that is neither O, B- nor I-, and
    one that is not among the names.
    """
    lines = read_lines(path)
    parted = "\t" if any("\t" in line.strip(" \t") for line in lines) else " "
    remarks = dict.fromkeys((CONVERTED, DOCUMENTS, COMMENTS), 0)
    words: list[list[str]] = [[]]
    tags: list[list[tuple[int, str]]] = [[]]
    columns = 0
    for number, line in enumerate(lines, 1):
        cells = _cells(line, parted)
        if not cells or cells[0] == DOCUMENT:
            remarks[DOCUMENTS] += bool(cells)
            if words[-1]:
                words.append([])
                tags.append([])
        elif _is_comment(line, cells, parted):
            remarks[COMMENTS] += 1
        else:
            columns = columns or len(cells)
            word, tag = _checked(cells, columns, f"{path} (line {number})")
            words[-1].append(word)
            tags[-1].append((number, tag))
    if not words[-1]:
        del words[-1], tags[-1]
    if not words:
        raise DataError(
            f"{path}: holds no sentences; give a CoNLL file, a word and its label a line"
        )
    remarks[CONVERTED] = sum(_start_with_b(sentence) for sentence in tags)
    flat = [tag for sentence in tags for tag in sentence]
    names = tuple(label_names) if label_names else _learnt_names(tag for _, tag in flat)
    numbers = label_numbers(path, flat, names)
    ends = np.cumsum([len(sentence) for sentence in words])
    labels = [part.tolist() for part in np.split(numbers, ends[:-1])]
    return Sentences(words, labels, names, {name: n for name, n in remarks.items() if n})


def _cells(line: str, parted: str) -> list[str]:
    """The columns of a line, none for a blank one; other white space than ASCII's is text."""
    if not line.strip(" \t"):
        return []
    if parted == "\t":
        return [cell.strip(" ") for cell in line.split("\t")]
    return [cell for cell in line.strip(" \t").split(" ") if cell]


def _is_comment(line: str, cells: Sequence[str], parted: str) -> bool:
    if not line.startswith("# "):
        return False
    return (parted == "\t" and len(cells) == 1) or not _LABEL.fullmatch(cells[-1])


def _checked(cells: Sequence[str], columns: int, where: str) -> tuple[str, str]:
    """Word and label of a line whose columns are right."""
    if len(cells) < 2 or len(cells) != columns:
        told = "1 column" if len(cells) == 1 else f"{len(cells)} columns"
        wanted = "two or more" if columns < 2 else f"{columns} as on the first line"
        raise DataError(f"{where}: '{' '.join(cells)}' has {told}; give {wanted}, the label last")
    word, tag = cells[0], cells[-1]
    if not word:
        raise DataError(f"{where}: has a label, '{tag}', and no word; mend it")
    if not _LABEL.fullmatch(tag):
        remedy = "convert the file to BIO" if _OTHER_SCHEME.fullmatch(tag) else "mend it"
        raise DataError(f"{where}: label '{tag}' is neither O nor starts with B- or I-; {remedy}")
    return word, tag


def _start_with_b(sentence: list[tuple[int, str]]) -> int:
    """Make every entity of a sentence begin with B-, in place; how many did not."""
    before, converted = "O", 0
    for place, (number, tag) in enumerate(sentence):
        if tag[0] == "I" and (before == "O" or before[1:] != tag[1:]):
            sentence[place] = (number, f"B{tag[1:]}")
            converted += 1
        before = tag
    return converted


def _learnt_names(tags: Iterable[str]) -> tuple[str, ...]:
    types = sorted({tag[1:] for tag in tags if tag != "O"})
    return ("O", *(f"{prefix}{kind}" for kind in types for prefix in "BI"))


def word_features(
    sentences: Sentences, tokenizer: TextTokenizer, max_seq_length: int
) -> tuple[Features, WordPlaces]:
    """[CLS] pieces [SEP] of each sentence, and where its words are.

    The features have the place columns `labels` int32 and `label_weights` float32 [T], 1 at a
    word's first piece and 0 elsewhere. A sentence that is too long becomes several examples, each as
    many whole words as fit. ConfigError for a max_seq_length that holds no word.
    """
    room = max_seq_length - 2
    if room < 1:
        raise ConfigError(f"max_seq_length ({max_seq_length}): holds no word; give 3 or more")
    pieces = _pieces_of_words(sentences, tokenizer)
    special = tokenizer.special
    tokens: list[int] = []
    ends: list[int] = []
    places: list[int] = []
    remarks = dict.fromkeys((CUT_SENTENCES, CUT_WORDS, NO_PIECES), 0)
    for words in sentences.words:
        parts, left = 0, 0
        for word in words:
            ids = pieces[word]
            remarks[NO_PIECES] += not ids
            remarks[CUT_WORDS] += len(ids) > room
            ids = ids[:room] or [special.unk]
            if len(ids) > left:
                if parts:
                    tokens.append(special.sep)
                    ends.append(len(tokens))
                tokens.append(special.cls)
                parts, left = parts + 1, room
            places.append(len(tokens))
            tokens += ids
            left -= len(ids)
        tokens.append(special.sep)
        ends.append(len(tokens))
        remarks[CUT_SENTENCES] += parts > 1
    where = np.array(places, np.int64)
    labels, weights = np.zeros(len(tokens), np.int32), np.zeros(len(tokens), np.float32)
    labels[where] = np.concatenate([np.array(row, np.int32) for row in sentences.labels])
    weights[where] = 1.0
    by_place = {"labels": labels, "label_weights": weights}
    told = {name: count for name, count in remarks.items() if count}
    word_ends = np.cumsum([len(words) for words in sentences.words])
    segments = np.zeros(len(tokens), np.int8)
    features = Features(
        np.array(tokens, np.int32), segments, np.array(ends, np.int64), {}, by_place
    )
    return features, WordPlaces(where, word_ends, told)


def words_of(text: str) -> list[tuple[int, int]]:
    """First character and the one behind the last of each word of running text, as CoNLL files part them.

    White space parts words, punctuation at either end of one stands alone, and so does each Han character,
    since Chinese files label characters.
    """
    spans: list[tuple[int, int]] = []
    for found in _CHUNK.finditer(text):
        begin, end = found.span()
        while begin < end - 1 and _is_punctuation(text[begin]):
            spans.append((begin, begin + 1))
            begin += 1
        last = end
        while last > begin + 1 and _is_punctuation(text[last - 1]):
            last -= 1
        spans.append((begin, last))
        spans += [(place, place + 1) for place in range(last, end)]
    return spans


def _is_punctuation(letter: str) -> bool:
    return unicodedata.category(letter).startswith("P")


def _pieces_of_words(sentences: Sentences, tokenizer: TextTokenizer) -> dict[str, list[int]]:
    """Ids of each different word: a word's pieces do not depend on those beside it."""
    once = list(dict.fromkeys(word for words in sentences.words for word in words))
    encoded = tokenizer.library.encode_batch_fast(once, add_special_tokens=False)
    return {word: found.ids for word, found in zip(once, encoded, strict=True)}


def word_labels(places: WordPlaces, predictions: npt.NDArray[np.integer[Any]]) -> list[list[int]]:
    """The labels of each sentence's words, from one for each token [T]."""
    flat = predictions[places.places]
    return [part.tolist() for part in np.split(flat, places.ends[:-1])]
