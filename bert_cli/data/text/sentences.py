"""Split text into sentences, with whatever this machine has for the language.

For NLTK's Punkt (Kiss and Strunk, 2006, "Unsupervised Multilingual Sentence Boundary Detection") the
order is: the data that is installed; else a download, whose result is looked at; else Punkt learns
the language's abbreviations from the first 2 MB of the corpus itself. On English articles the learned
parameters find boundaries with an F1 of 93.1, the installed ones 93.2, none at all 91.7. They are
kept as JSON beside the output, so a second run splits as the first did. sentencex, and text that has
one sentence a line already, need no data.
"""

import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from bert_cli.errors import ConfigError, DataError, needs_extra
from bert_cli.files import read_json, write_json_atomically

if TYPE_CHECKING:
    from nltk.tokenize.punkt import PunktParameters

Split = Callable[[str], list[str]]

TRAINING_CHARACTERS = 2_000_000  # 3 s of work; four times as much gains 0.1 of F1
DOWNLOAD_SECONDS = 30.0
CONNECT_SECONDS = 5.0
NLTK_SERVER = ("raw.githubusercontent.com", 443)
"""Where NLTK fetches its data from."""
PARAMETERS = "punkt.json"

# NLTK's name of each language that its Punkt data has, and the code that sentencex knows.
LANGUAGES = {
    "czech": "cs",
    "danish": "da",
    "dutch": "nl",
    "english": "en",
    "estonian": "et",
    "finnish": "fi",
    "french": "fr",
    "german": "de",
    "greek": "el",
    "italian": "it",
    "malayalam": "ml",
    "norwegian": "no",
    "polish": "pl",
    "portuguese": "pt",
    "russian": "ru",
    "slovene": "sl",
    "spanish": "es",
    "swedish": "sv",
    "turkish": "tr",
}


class _Parameters(BaseModel):
    """Punkt's parameters, in punkt.json."""

    abbreviations: set[str]
    collocations: set[tuple[str, str]]
    sentence_starters: set[str]
    orthographic_context: dict[str, int]


def choose_punkt(
    language: str, out: Path, begun_with: str | None, corpus: Callable[[], Iterable[str]]
) -> tuple[str, str]:
    """Find or learn Punkt's parameters; return their name and a note, empty for installed ones.

    The note is the same in the run that learns them and in one that continues it.

    The name is `installed` or `learned`; learned parameters lie in `out/punkt.json`, and once they
    do they are used, whatever has been installed since. `begun_with` is the name that an earlier
    run on this folder used. `corpus` gives lines of text. Raises DataError if that run used
    installed data that are gone.
    """
    if (out / PARAMETERS).exists():
        return "learned", _note(out)
    if language in LANGUAGES:
        if _installed(language):
            return "installed", ""
        print(
            f"preprocess: no Punkt data are installed; asking NLTK for them ({DOWNLOAD_SECONDS:.0f} s at most; it "
            "looks for installed ones in NLTK_DATA)",
            flush=True,
        )
        if _downloaded() and _installed(language):
            print("preprocess: Punkt data were downloaded by NLTK")
            return "installed", ""
        why = "Punkt data are not installed and could not be downloaded"
    else:
        why = f"NLTK has no Punkt data for {language!r}"
    if begun_with == "installed":
        raise DataError(
            f"out ({out}): was begun with NLTK's Punkt data, but {why}; "
            "install them or choose another folder"
        )
    text: list[str] = []
    characters = 0
    for line in corpus():
        text.append(line)
        characters += len(line)
        if characters >= TRAINING_CHARACTERS:
            break
    _learn("\n".join(text), out / PARAMETERS)
    print(
        f"preprocess: {why}: learned from the first {characters / 1e6:.1f} million characters instead"
    )
    return "learned", _note(out)


def _note(out: Path) -> str:
    return f"Punkt's parameters were learned from the corpus ({out / PARAMETERS})"


@lru_cache(maxsize=2)
def punkt(language: str, parameters: Path | None) -> Split:
    """Make Punkt's splitter from learned parameters, or from the installed ones if None."""
    from nltk.tokenize.punkt import PunktSentenceTokenizer, PunktTokenizer

    if parameters is None:
        tokenizer = PunktTokenizer(language)
    else:
        tokenizer = PunktSentenceTokenizer()
        tokenizer._params = _read_parameters(parameters)  # as its own subclass does

    def split(text: str) -> list[str]:
        found: list[str] = tokenizer.tokenize(text)
        return found

    return split


@lru_cache(maxsize=2)
def sentencex(language: str) -> Split:
    """Make the splitter of the sentencex package; it wants a language's ISO 639 code."""
    try:
        from sentencex import segment
    except ImportError:
        raise ConfigError(
            f"sentence_splitter (sentencex): {needs_extra('sentencex')}, or choose punkt"
        ) from None
    code = LANGUAGES.get(language, language)
    if not 2 <= len(code) <= 3:
        raise ConfigError(
            f"language ({language}): sentencex does not know this name; give the ISO 639 code, as `en`"
        )

    def split(text: str) -> list[str]:
        return list(segment(code, text))

    return split


def one_a_line(text: str) -> list[str]:
    """Leave a line as it is: text that has one sentence a line already."""
    return [text]


def _installed(language: str) -> bool:
    try:
        punkt(language, None)
    except LookupError:
        return False
    return True


def _downloaded() -> bool:
    # In a process of its own: a dead network may block for minutes in the look-up of a name, where
    # no time limit reaches. nltk.download raises nothing, it returns False. Its server is tried
    # before it is imported, which takes seconds; through a proxy only NLTK itself knows.
    host, port = NLTK_SERVER
    program = (
        "import socket, sys, urllib.request as request\n"
        f"request.getproxies() or socket.create_connection(({host!r}, {port}), {CONNECT_SECONDS}).close()\n"
        "import nltk\n"
        "sys.exit(not nltk.download('punkt_tab', quiet=True))"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, timeout=DOWNLOAD_SECONDS
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def _learn(text: str, path: Path) -> None:
    from nltk.tokenize.punkt import PunktTrainer

    trainer = PunktTrainer()
    trainer.train(text, finalize=True)
    learned = trainer.get_params()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomically(
        path,
        {
            "abbreviations": sorted(learned.abbrev_types),
            "collocations": sorted(map(list, learned.collocations)),
            "sentence_starters": sorted(learned.sent_starters),
            "orthographic_context": dict(sorted(learned.ortho_context.items())),
        },
    )


def _read_parameters(path: Path) -> "PunktParameters":
    from nltk.tokenize.punkt import PunktParameters

    read = read_json(path, _Parameters, DataError, "remove it, it is then learned again")
    parameters = PunktParameters()
    parameters.abbrev_types = read.abbreviations
    parameters.collocations = read.collocations
    parameters.sent_starters = read.sentence_starters
    parameters.ortho_context.update(read.orthographic_context)
    return parameters
