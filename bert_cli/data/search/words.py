"""The words of passages and questions: one folding for both, and the positions of words in the original text.

In scripts without spaces each letter is a word, and a question looks for pairs of neighbours: most words of Chinese
have two letters, which trigrams would miss. A question finds other forms of its words by their first letters
(McNamee and Mayfield 2004). A term is a word, the first letters of words before a star, or the words of a phrase.
"""

import re
import unicodedata
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from bert_cli.data.search.passages import IS_UNSPACED, UNSPACED
from bert_cli.errors import ConfigError

LONGEST_QUESTION = 10_000  # characters
FIRST = 5  # letters that the forms of a word share
NO_WORD = r"\0-/:-`{-\x7f"  # in folded text, which has no other characters that are not of a word
WORD = re.compile(f"[{UNSPACED}]|[^{NO_WORD}{UNSPACED}]+")
DIGIT = re.compile(r"\d")
RUN = re.compile(f"[{UNSPACED}]+|[^{NO_WORD}{UNSPACED}]+")
PIECES = re.compile(r"[\0-\x7f]+(?![^\0-\x7f])|.", re.DOTALL)
"""Characters of ASCII that no mark follows, or one character."""
FOLDED = re.compile(r"[A-Z\x80-\U0010ffff]+(?:[ ,.]*[A-Z\x80-\U0010ffff]+)*")
"""What changes in a decomposed text, with what stands between such words; letters decompose into capitals too."""
WITH_STROKE = re.compile(r"LATIN SMALL LETTER (?:BARRED )?([A-Z])(?: WITH |$)")
TYPED = (
    {"ı": "i", "æ": "ae", "œ": "oe", "ð": "d", "þ": "th"} | dict.fromkeys("یى", "ي") | {"ک": "ك"}
)
"""Letters that Unicode does not decompose, as others type them: Persian has its own codes of yeh and kaf."""
MARKS = (*range(10, 37), *range(200, 256), 1)
"""Combining classes of marks that do not count: accents, strokes, and the vowels of Hebrew and Arabic. Those of Indic
scripts and Thai are letters of a word, and the marks of kana make other syllables."""
UNSEEN = re.compile("[\u00ad\u034f\u0640\u115f\u1160\u180b-\u180f\u200c-\u200f\u202a-\u202e\u2060-\u206f\u3164"
                    "\ufe00-\ufe0f\ufeff\U000e0000-\U000e0fff]")  # fmt: skip
"""Characters within words that nobody sees: soft hyphens, joiners, directions; and the stretching of Arabic words."""
QUOTES = str.maketrans("“”„", '"' * 3)
OPERATOR = re.compile(
    r'(?P<excluded>(?<!\S)-(?:"[^"]*"|(?:[A-Z]{3}|[^\W\d_]{4}|[^\x00-\x7f])[^\s"]*))|'
    r'(?P<exact>"[^"]*"|(?<!\w)(?:--|[~.]{0,2}/)\w[^\s"]*)'
)
"""What a question excludes, a word or a phrase, and what it means exactly: a phrase, an option or a path.

Up to three letters from a to z after a dash are an option, as in `tar -xzf`, which is asked for; `-NFS` excludes.
"""


class Question(NamedTuple):
    """What is asked."""

    text: str
    """The question without what it excludes."""
    terms: list[str]
    """What is meant exactly, and the other words in any of their forms."""
    excluded: list[str]
    """The terms that a passage must not have."""
    folder: str = ""
    """Folder of its file, as in names of documents; by default any."""
    passage: int | None = None
    """Number of a passage of its document; by default any."""


class _Letters(dict[int, str]):
    """Code of a decomposed character -> what it is in a folded text; filled when it is asked."""

    def __missing__(self, code: int) -> str:
        letter = chr(code)
        kind = unicodedata.category(letter)
        if unicodedata.combining(letter) in MARKS or kind == "Me" or UNSEEN.match(letter):
            folded = ""
        elif kind[0] not in "LMN" and kind != "Co":
            folded = " " if code > 127 else letter
        elif kind == "Nd":
            folded = str(unicodedata.decimal(letter))
        else:
            small = letter.casefold()
            stroke = None
            if len(small) == 1:
                stroke = WITH_STROKE.match(unicodedata.name(small, ""))
            if stroke:
                folded = stroke[1].casefold()
            else:
                folded = TYPED.get(small, small)
        self[code] = folded
        return folded


_LETTERS = _Letters()


def folded(text: str) -> str:
    """Return text without case, marks and forms of letters, for comparisons; other characters become spaces."""
    small = text.lower()
    if small.isascii():
        return small
    decomposed = unicodedata.normalize("NFKD", small)
    letters = FOLDED.sub(lambda run: run[0].translate(_LETTERS), decomposed)
    return unicodedata.normalize("NFC", letters)


_folded = lru_cache(1 << 16)(folded)  # of letters


def words_of(text: str) -> list[str]:
    """Return the words of a text in order; of scripts without spaces pairs of neighbours."""
    parts: list[str] = []
    for run in RUN.findall(folded(text)):
        pairs = len(run) - 1 if IS_UNSPACED.match(run) else 0
        parts += [run[n : n + 2] for n in range(pairs)] or [run]
    return parts


def without_letters(parts: Iterable[str]) -> list[str]:
    """Return words without single letters: pronouns, articles, or options such as -i, which 4-grams score."""
    return [word for word in parts if len(word) > 1 or IS_UNSPACED.match(word) or word.isdigit()]


def all_words_of(text: str) -> list[str]:
    """Return the words of a text in order."""
    return WORD.findall(folded(text))


def exactly(text: str) -> str:
    """Return the term of the words of a text, one after another."""
    return " ".join(all_words_of(text))


def in_any_form(word: str) -> str:
    """Return the term of a word and its other forms, which begin as it does; numbers have none."""
    if DIGIT.search(word):
        return exactly(word)
    return first_letters(word) or exactly(word)


def first_letters(word: str) -> str:
    """Return the term of all words that begin as a long one does; empty for a short one, which has no forms."""
    if len(word) < FIRST:
        return ""
    return f"{word[:FIRST]}*"


def parse(question: str) -> Question:
    """Return what a question asks; a sign alone, such as an emoji, has no terms.

    Raises ConfigError for one that is too long, that has neither a word nor a sign, or whose phrase does not end.
    """
    question = question.encode(errors="replace").decode().translate(QUOTES)
    if len(question) > LONGEST_QUESTION:
        problem = f"has {len(question):,} characters, more than {LONGEST_QUESTION:,}"
        raise ConfigError("question", problem, "ask a shorter one")
    if question.count('"') % 2:
        raise ConfigError(
            f"question ({question!r})",
            "has a quotation mark without its other",
            "end the phrase with it, or leave it out",
        )
    text = OPERATOR.sub(r"\g<exact>", question)
    if not any(unicodedata.category(letter)[0] in "LMNS" for letter in text):
        raise no_word(question)
    parts = list(OPERATOR.finditer(question))
    excluded = [exactly(part["excluded"]) for part in parts if part["excluded"]]
    exact = [exactly(part["exact"]) for part in parts if part["exact"]]
    asked = words_of(OPERATOR.sub(" ", question))
    terms = dict.fromkeys([*exact, *map(in_any_form, without_letters(asked) or asked)])
    return Question(text, [*filter(None, terms)], [*filter(None, excluded)])


def no_word(question: str) -> ConfigError:
    """Return the error of a question without a word."""
    return ConfigError(
        f"question ({question!r})", "has no word", "ask with a word; -word only excludes"
    )


def spans(text: str, terms: Iterable[str]) -> list[tuple[int, int]]:
    """Return the characters of a text that the terms of a question find; neighbours without a space are one."""
    compared, positions = _folded_with_positions(text)
    matches = list(WORD.finditer(compared))
    parts = [match[0] for match in matches]
    asked = {*terms}
    marked = {n for n, word in enumerate(parts) if first_letters(word) in asked}
    for size in {term.count(" ") + 1 for term in asked}:
        for n in range(len(parts) - size + 1):
            if " ".join(parts[n : n + size]) in asked:
                marked |= {*range(n, n + size)}
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
    start = 0
    for piece in PIECES.finditer(text):
        stop = piece.end()
        if stop - start > 1 and piece[0].isascii():
            compared.append(piece[0].lower())
            positions += [(n, n + 1) for n in range(start, stop)]
            start = stop
            continue
        letters = _folded(text[start:stop])
        if _folded(text[start : stop + 1]) != letters + _folded(text[stop : stop + 1]):
            continue  # parts of a syllable
        if not letters and positions:  # a mark
            positions[-1] = (positions[-1][0], stop)
        compared.append(letters)
        positions += [(start, stop)] * len(letters)
        start = stop
    return "".join(compared), positions
