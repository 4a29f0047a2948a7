"""The words of passages and questions in SQLite's FTS5.

In scripts without spaces each letter is indexed as a word, and a question looks for pairs of neighbours: most words
of Chinese have two letters, which trigrams would miss.
"""

import re
import unicodedata

from bert_cli.data.search.passages import UNSPACED
from bert_cli.errors import ConfigError

TOKENIZER = "unicode61 remove_diacritics 2 categories 'L* M* N* Co'"
"""M*: vowels of Hindi, Tamil and Thai are marks, at which a word would end by default. 2: also letters with two
diacritics, as in Vietnamese, are found without them."""
LONGEST_QUESTION = 10_000  # characters
JOINER = "\u2060"  # invisible, and the end of a word
OPEN = "\x02"
CLOSE = "\x03"
LETTER = re.compile(f"[{UNSPACED}]")
RUN = re.compile(f"[{UNSPACED}]+|[^{UNSPACED}]+")


def indexed(text: str) -> str:
    """Return text with a JOINER around each letter of a script without spaces; its OPEN and CLOSE become spaces."""
    unmarked = text.replace(OPEN, " ").replace(CLOSE, " ")
    return LETTER.sub(rf"{JOINER}\g<0>{JOINER}", unmarked)


def plain(text: str) -> str:
    """Return text as it was before `indexed`, but for OPEN and CLOSE."""
    return text.replace(JOINER, "")


def words_of(question: str) -> list[str]:
    """Return the different words, and pairs of neighbours, of a question in order."""
    letters = (letter if _is_letter(letter) else " " for letter in question.lower())
    runs = (run for word in "".join(letters).split() for run in RUN.findall(word))
    parts: list[str] = []
    for run in runs:
        pairs = len(run) - 1 if LETTER.match(run) else 0
        parts += [run[n : n + 2] for n in range(pairs)] or [run]
    return list(dict.fromkeys(parts))


def _is_letter(letter: str) -> bool:
    kind = unicodedata.category(letter)
    return kind[0] in "LMN" or kind == "Co"


def any_of(words: list[str]) -> str:
    """Return a query of FTS5 for passages with any of the words."""
    return " OR ".join(f'"{indexed(word)}"' for word in words)


def check(question: str) -> None:
    """Raise ConfigError for a question without a word, or one that is too long."""
    if len(question) > LONGEST_QUESTION:
        problem = f"has {len(question):,} characters, more than {LONGEST_QUESTION:,}"
        raise ConfigError("question", problem, "ask a shorter one")
    if not words_of(question):
        raise ConfigError(f"question ({question!r})", "has no word", "ask with a word")


def spans(marked: str) -> list[tuple[int, int]]:
    """Return the characters between OPEN and CLOSE in the text without these and without JOINER."""
    bold: list[tuple[int, int]] = []
    at = 0
    for number, part in enumerate(re.split(f"[{OPEN}{CLOSE}]", plain(marked))):
        if number % 2:
            bold.append((at, at + len(part)))
        at += len(part)
    return bold
