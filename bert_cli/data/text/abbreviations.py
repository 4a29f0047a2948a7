"""Join what a splitter cut after an abbreviation. abbreviations.json has the lists, their sources and their license."""

import json
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

Split = Callable[[str], list[str]]
LISTS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
BEFORE = ["", *"([«„“\"'’و", *(f"{letter}{mark}" for letter in "dlDL" for mark in "'’")]  # l'art.
NUMBER = re.compile(
    r"[(\[<>≤≥≈~+−±§№$€£-]*(\d|[IVX]{2,}\b|[VX]\b|[A-Z](\.( No\.)? ?)?\d)"
)  # 5, (3), IV, A.1


@lru_cache(maxsize=2)  # for all shards
def keep_abbreviations(split: Split, language: str) -> Split:
    """Return `split` less its cuts after the abbreviations of a language (ISO 639) that end no sentence there.

    Those of `never_last`, such as titles, end none, except after a number ("500 Ft. Molnár"); the `others` end none
    before a number and before a word without a capital. A language without a list stays as it is.
    """
    never_last, others = (
        {mark + word for word in f"{words} {words.title()}".split() for mark in BEFORE}
        for words in LISTS["languages"].get(language, {"never_last": "", "others": ""}).values()
    )
    listed = never_last | others

    def join(text: str) -> list[str]:
        pieces = split(text)
        if listed.isdisjoint([(piece.rsplit(None, 1) or " ")[-1] for piece in pieces[:-1]]):
            return pieces
        joined = pieces[:1]
        for piece in pieces[1:]:
            before, word = ["", "", *joined[-1].rsplit(None, 2)][-2:]
            is_inside = NUMBER.match(piece) or piece[:1].isalpha() > piece[:1].isupper()
            is_title = word in never_last and not before[-1:].isdigit()
            if is_title or (is_inside and word in others):
                joined[-1] += piece if joined[-1] + piece in text else f" {piece}"
            else:
                joined.append(piece)
        return joined

    return join if listed else split
