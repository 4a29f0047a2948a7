"""The words of passages and questions: one folding for both, and the positions of words in the original text.

Python decides what a word is and which words are equal; SQLite's FTS5 gets folded words between spaces. In scripts
without spaces each letter is indexed as a word, and a question looks for pairs of neighbours: most words of Chinese
have two letters, which trigrams would miss.
"""

import re
import unicodedata
from collections.abc import Collection, Iterable
from functools import lru_cache
from itertools import pairwise

from bert_cli.data.search.passages import UNSPACED
from bert_cli.errors import ConfigError

TOKENIZER = "ascii"
"""Each character that is not ASCII is a letter for it: `indexed` has replaced those that are none."""
LONGEST_QUESTION = 10_000  # characters
LETTER = re.compile(f"[{UNSPACED}]")
RUN_OF_KIND = re.compile(r"[\0-\x7f]+|[^\0-\x7f]+")
NOT_ASCII = re.compile(r"[^\0-\x7f]+")
NO_WORD = r"\0-/:-`{-\x7f"  # in folded text, which has no other characters that are not of a word
WORD = re.compile(f"[{UNSPACED}]|[^{NO_WORD}{UNSPACED}]+")
RUN = re.compile(f"[{UNSPACED}]+|[^{NO_WORD}{UNSPACED}]+")
WITH_STROKE = re.compile(r"LATIN SMALL LETTER (?:BARRED )?([A-Z])(?: WITH |$)")
ASCII = {"ı": "i", "æ": "ae", "œ": "oe", "ð": "d", "þ": "th"}
"""Letters that Unicode does not decompose, as others type them."""
MARKS = (*range(10, 37), *range(200, 256), 1)
"""Combining classes of marks that do not count: accents, strokes, and the vowels of Hebrew and Arabic. Those of Indic
scripts and Thai are letters of a word, and the marks of kana make other syllables."""
UNSEEN = re.compile("[\u00ad\u034f\u0640\u115f\u1160\u180b-\u180f\u200c-\u200f\u202a-\u202e\u2060-\u206f\u3164"
                    "\ufe00-\ufe0f\ufeff\U000e0000-\U000e0fff]")  # fmt: skip
"""Characters within words that nobody sees: soft hyphens, joiners, directions; and the stretching of Arabic words."""


class _Letters(dict[int, str]):
    """Code of a decomposed character -> what it is in a folded text; filled when it is asked."""

    def __missing__(self, code: int) -> str:
        letter = chr(code)
        kind = unicodedata.category(letter)
        if unicodedata.combining(letter) in MARKS or UNSEEN.match(letter):
            folded = ""
        elif kind[0] not in "LMN" and kind != "Co":
            folded = " " if code > 127 else letter
        elif kind == "Nd":
            folded = str(unicodedata.decimal(letter))
        else:
            small = letter.casefold()
            stroke = WITH_STROKE.match(unicodedata.name(small, "")) if len(small) == 1 else None
            folded = stroke[1].casefold() if stroke else ASCII.get(small, small)
        self[code] = folded
        return folded


_LETTERS = _Letters()


@lru_cache(1 << 16)
def _folded(run: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFKD", run).translate(_LETTERS))


@lru_cache(1 << 16)
def _indexed(run: str) -> str:
    return LETTER.sub(r" \g<0> ", _folded(run))


def folded(text: str) -> str:
    """Return text without case, marks and forms of letters, for comparisons; other characters become spaces."""
    return NOT_ASCII.sub(lambda run: _folded(run[0]), text.lower())


def indexed(text: str) -> str:
    """Return folded text with spaces around each letter of a script without spaces."""
    small = text.lower()
    return small if small.isascii() else NOT_ASCII.sub(lambda run: _indexed(run[0]), small)


def words_of(question: str) -> list[str]:
    """Return the different words, and pairs of neighbours, of a question in order."""
    parts: list[str] = []
    for run in RUN.findall(folded(question)):
        pairs = len(run) - 1 if LETTER.match(run) else 0
        parts += [run[n : n + 2] for n in range(pairs)] or [run]
    return list(dict.fromkeys(parts))


def any_of(words: Iterable[str]) -> str:
    """Return a query of FTS5 for passages with any of the words."""
    return " OR ".join(f'"{indexed(word)}"' for word in words)


def check_signs(question: str) -> None:
    """Raise ConfigError for a question without a word or a sign, such as an emoji, or one that is too long."""
    if len(question) > LONGEST_QUESTION:
        problem = f"has {len(question):,} characters, more than {LONGEST_QUESTION:,}"
        raise ConfigError("question", problem, "ask a shorter one")
    if not any(unicodedata.category(letter)[0] in "LMNS" for letter in question):
        raise ConfigError(f"question ({question!r})", "has no word", "ask with a word")


def check(question: str) -> None:
    """Raise ConfigError for a question without a word, or one that is too long."""
    check_signs(question)
    if not words_of(question):
        raise ConfigError(f"question ({question!r})", "has no word", "ask with a word")


def spans(text: str, asked: Collection[str]) -> list[tuple[int, int]]:
    """Return the characters of a text that are words, or pairs of neighbours, of those that are asked."""
    compared, positions = _folded_with_positions(text)
    matches = list(WORD.finditer(compared))
    marked = {n for n, word in enumerate(matches) if word[0] in asked}
    for n, (first, second) in enumerate(pairwise(matches)):
        if LETTER.match(first[0]) and first[0] + second[0] in asked:
            marked |= {n, n + 1}
    bold: list[tuple[int, int]] = []
    for n in sorted(marked):
        start = positions[matches[n].start()][0]
        stop = positions[matches[n].end() - 1][1]
        if bold and bold[-1][1] >= start:
            start = bold.pop()[0]
        bold.append((start, stop))
    return bold


def _folded_with_positions(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Return the folded text, and the characters of the text that each of its characters was."""
    compared: list[str] = []
    positions: list[tuple[int, int]] = []
    for run in RUN_OF_KIND.finditer(text):
        if run[0].isascii():
            compared.append(run[0].lower())
            positions += [(n, n + 1) for n in range(run.start(), run.end())]
            continue
        start = run.start()
        for stop in range(start + 1, run.end() + 1):
            letters = _folded(text[start:stop])
            more = _folded(text[start : stop + 1]) if stop < run.end() else letters
            if stop < run.end() and more != letters + _folded(text[stop]):
                continue  # parts of a syllable
            if not letters and positions:  # a mark
                positions[-1] = (positions[-1][0], stop)
            compared.append(letters)
            positions += [(start, stop)] * len(letters)
            start = stop
    return "".join(compared), positions
