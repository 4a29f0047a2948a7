"""Split text into sentences with NLTK's Punkt or sentencex.

Punkt (Kiss and Strunk, 2006, "Unsupervised Multilingual Sentence Boundary Detection") needs parameters
for the language. They come from NLTK's installed data, else from a download of these, else Punkt learns
them from the first 2 MB of the corpus. On English articles the learned parameters find boundaries with
an F1 of 93.1, the installed ones 93.2, none 91.7. Learned parameters are written to the output folder,
so a second run splits as the first did. sentencex needs no data.
"""

import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from bert_cli.errors import ConfigError, DataError, install_command
from bert_cli.files import JSON, read_json, write_json_atomically

if TYPE_CHECKING:
    from nltk.tokenize.punkt import PunktParameters

Split = Callable[[str], list[str]]

TRAINING_CHARACTERS = 2_000_000  # 3 s of work; four times as much gains 0.1 of F1
DOWNLOAD_SECONDS = 30.0
CONNECT_SECONDS = 5.0
NLTK_SERVER = ("raw.githubusercontent.com", 443)
"""The server of NLTK's data."""
PARAMETERS = "punkt.json"

# NLTK's name of each language in its Punkt data, and the code of sentencex.
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
    """Punkt's parameters in punkt.json."""

    abbreviations: set[str]
    collocations: set[tuple[str, str]]
    sentence_starters: set[str]
    orthographic_context: dict[str, int]


@lru_cache(maxsize=2)
def load_splitter(name: str, language: str, parameters: Path | None) -> Split:
    """Return the function that splits a line: `punkt`, `sentencex`, or `lines`, which splits nothing.

    `parameters` is Punkt's file of learned parameters; None uses the installed ones.
    """
    if name == "punkt":
        return _load_punkt(language, parameters)
    return _load_sentencex(language) if name == "sentencex" else lambda text: [text]


def _load_punkt(language: str, parameters: Path | None) -> Split:
    from nltk.tokenize.punkt import PunktSentenceTokenizer, PunktTokenizer

    if parameters is None:
        tokenizer = PunktTokenizer(language)
    else:
        tokenizer = PunktSentenceTokenizer()
        tokenizer._params = _read_parameters(parameters)  # as its subclass PunktTokenizer does
    split: Split = tokenizer.tokenize
    return split


def _load_sentencex(language: str) -> Split:
    try:
        from sentencex import segment
    except ImportError:
        problem = "needs the extra 'sentencex'"
        remedy = f"{install_command('sentencex')}, or choose punkt"
        raise ConfigError("sentence_splitter (sentencex)", problem, remedy) from None
    code = LANGUAGES.get(language, language)
    if not 2 <= len(code) <= 3:
        problem = "sentencex does not know this name"
        raise ConfigError(f"language ({language})", problem, "give the ISO 639 code, as `en`")
    return lambda text: list(segment(code, text))


# --- Punkt's parameters


def choose_punkt(
    language: str, out: Path, begun_with: str | None, lines: Callable[[], Iterable[str]]
) -> tuple[str, str]:
    """Find or learn Punkt's parameters; return `installed` or `learned`, and a note for the manifest.

    Learned parameters are written to `out/punkt.json`, and once they exist they are used. `begun_with`
    is what an earlier run on this folder returned. `lines` returns lines of the corpus. Raises DataError
    when the earlier run used installed data that are gone.
    """
    note = f"Punkt's parameters were learned from the corpus ({out / PARAMETERS})"
    if (out / PARAMETERS).exists():
        return "learned", note
    if language in LANGUAGES:
        if _is_installed(language):
            return "installed", ""
        print(
            f"preprocess: no Punkt data are installed in NLTK_DATA or its usual folders; asking NLTK to download "
            f"them ({DOWNLOAD_SECONDS:.0f} s at most)",
            flush=True,
        )
        if _download() and _is_installed(language):
            print("preprocess: Punkt data were downloaded by NLTK")
            return "installed", ""
        reason = "Punkt data are not installed and could not be downloaded"
    else:
        reason = f"NLTK has no Punkt data for {language!r}"
    if begun_with == "installed":
        problem = f"was begun with NLTK's Punkt data, but {reason}"
        raise DataError(f"out ({out})", problem, "install them or choose another folder")
    text: list[str] = []
    characters = 0
    for line in lines():
        text.append(line)
        characters += len(line)
        if characters >= TRAINING_CHARACTERS:
            break
    _learn("\n".join(text), out / PARAMETERS)
    source = f"the first {characters / 1e6:.1f} million characters"
    print(f"preprocess: {reason}: learned from {source} instead")
    return "learned", note


def _is_installed(language: str) -> bool:
    try:
        _load_punkt(language, None)
    except LookupError:
        return False
    return True


def _download() -> bool:
    """Have NLTK download its data in a child process, and return whether it did.

    Looking up a name in a dead network may block for minutes and takes no time limit. NLTK takes
    seconds to import, so its server is tried first, except through a proxy.
    """
    host, port = NLTK_SERVER
    program = (
        "import socket, sys, urllib.request as request\n"
        f"request.getproxies() or socket.create_connection(({host!r}, {port}), {CONNECT_SECONDS}).close()\n"
        "import nltk\n"
        "sys.exit(not nltk.download('punkt_tab', quiet=True))"
    )
    command = [sys.executable, "-c", program]
    try:
        done = subprocess.run(command, capture_output=True, timeout=DOWNLOAD_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def _learn(text: str, path: Path) -> None:
    from nltk.tokenize.punkt import PunktTrainer

    trainer = PunktTrainer()
    trainer.train(text, finalize=True)
    learned = trainer.get_params()
    path.parent.mkdir(parents=True, exist_ok=True)
    parameters: dict[str, JSON] = {
        "abbreviations": sorted(learned.abbrev_types),
        "collocations": sorted(map(list, learned.collocations)),
        "sentence_starters": sorted(learned.sent_starters),
        "orthographic_context": dict(sorted(learned.ortho_context.items())),
    }
    write_json_atomically(path, parameters)


def _read_parameters(path: Path) -> "PunktParameters":
    from nltk.tokenize.punkt import PunktParameters

    read = read_json(path, _Parameters, DataError, "remove it; it is then learned again")
    parameters = PunktParameters()
    parameters.abbrev_types = read.abbreviations
    parameters.collocations = read.collocations
    parameters.sent_starters = read.sentence_starters
    parameters.ortho_context.update(read.orthographic_context)
    return parameters
