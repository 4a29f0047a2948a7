"""Split text into sentences: one per line, a blank line between documents.

Each line, or each paragraph of wrapped text, is split separately. The titles of WikiExtractor's articles are dropped;
headings stay. The splitter is sentencex, or on request Punkt (Kiss and Strunk, 2006) with NLTK's parameters for the
language. F1 of sentence boundaries in English articles: sentencex 95.1, Punkt 93.2. Punkt never splits after the full
stop of Japanese.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import product
from pathlib import Path

from bert_cli.data.io import files
from bert_cli.data.io.documents import HEADING, Kind, marked_lines
from bert_cli.data.io.inputs import find_root
from bert_cli.data.io.manifest import Stats
from bert_cli.errors import ConfigError, DataError, logger

SHARD_BYTES = 16_000_000  # of a large file, or of small files together: some seconds of work
BYTES_WRITTEN = 1.0  # per byte of text: 0.995 for 10 MB of English articles
NO_WORD = re.compile(r"[\W_]*")
LANGUAGES = json.loads(Path(__file__).with_name("languages.json").read_text(encoding="utf-8"))
NLTK_CODES = LANGUAGES["nltk"]
LANGUAGE_CHARACTERS = 1000  # of a text, which show its language
NO_LANGUAGE = "zxx"  # the code of numbers and signs
NLTK_NAMES = {code: name for name, code in NLTK_CODES.items()}
ENDS = LANGUAGES["ends"]
CODE = re.compile(r"[a-z]{2,3}(-[a-z0-9]+)*")
WITHOUT_RULES = "it splits at the punctuation of every script, with the abbreviations of a related language or English"

# Abbreviations by language; the file names their sources and license.
LISTS = json.loads(Path(__file__).with_name("abbreviations.json").read_text(encoding="utf-8"))
BEFORE = ["", *"([«„“\"'’و"]
BEFORE += [letter + mark for letter, mark in product("dlDL", "'’")]  # l'art.
NUMBER = re.compile(
    r"[(\[<>≤≥≈~+−±§№$€£-]*(\d|[IVX]{2,}\b|[VX]\b|[A-Z](\.( No\.)? ?)?\d)"
)  # 5, (3), IV, A.1

# Splitter -> the packages whose versions change its sentences.
PACKAGES = {"punkt": ["nltk"], "sentencex": ["sentencex"], "lines": []}
Split = Callable[[str], list[str]]


def plan_outputs(
    source: Path, parts: Sequence[files.Part], reading: files.Reading
) -> list[tuple[Path, list[files.Part]]]:
    """Return the outputs, each with its parts.

    The files of `bert extract` keep their names, one output each. Any other text becomes
    text_00000.txt, ...: ranges of large files, and small files together.
    """
    # Shards are the unit of restarts and of processes, so large files are cut and small ones joined.
    ranges: list[files.Part] = []
    for part in parts:
        ranges += files.split_part(part, SHARD_BYTES, reading)
    if len(ranges) == len(parts) and all(part.format == "wikiextractor" for part in parts):
        root = find_root(source)
        return [(Path(f"{part.path.relative_to(root)}.txt"), [part]) for part in parts]
    bundles = files.bundle(ranges, SHARD_BYTES)
    return [(Path(f"text_{number:05}.txt"), parts) for number, parts in enumerate(bundles)]


def split_shard(
    inputs: tuple[Path, ...],
    output: Path,
    *,
    parts: Sequence[files.Part],
    reading: files.Reading,
    splitter: str,
    language: str,
    duplicates: tuple[list[int], list[int]] | None = None,
) -> Stats:
    """Write the sentences of some parts, without the documents that are `duplicates`."""
    split = splitter_of(splitter, language)
    exact, near = duplicates or ([], [])
    dropped = {*exact, *near}
    read = documents = sentences = without_words = 0
    outside = Counter[Path]()
    is_first = is_kept = False  # the document's first sentence is next; the document is not dropped
    with open(output, "w", encoding="utf-8", newline="\n") as file:
        for path, kind, line in _all_lines(parts, reading):
            if kind == "document":
                is_first = True
                is_kept = read not in dropped
                read += 1
            if kind != "body":
                outside[path] += kind == "outside"
                continue
            if not is_kept:
                continue
            for sentence in split(line):
                text = " ".join(sentence.split())  # U+2028 and others would end the line
                if NO_WORD.fullmatch(text):
                    without_words += bool(text)
                    continue
                if is_first:
                    if documents:  # a blank line between documents
                        file.write("\n")
                    documents += 1
                    is_first = False
                file.write(text + "\n")
                sentences += 1
    extra = {
        "documents_without_text": read - documents - len(dropped),
        "lines_outside_documents": sum(outside.values()),
        "sentences_without_words": without_words,
    }
    if duplicates is not None:
        extra |= {"duplicates": len(exact), "near_duplicates": len(near)}
    notes = tuple(
        f"{path}: left out text outside <doc ...> ... {files.CLOSE}, lines: {lines}"
        for path, lines in outside.items()
        if lines
    )
    return Stats(documents, sentences, extra=extra, notes=notes)


def _all_lines(
    parts: Sequence[files.Part], reading: files.Reading
) -> Iterator[tuple[Path, Kind, str]]:
    for part in parts:
        is_document = part.format in files.DOCUMENTS
        for kind, line in marked_lines(part, reading):
            if is_document:
                line = HEADING.sub("", line)
            yield part.path, kind, line


def language_code(language: str) -> str:
    """Return the ISO 639 code of a language that is named by it or by NLTK's name, or else the name."""
    return NLTK_CODES.get(language, language.lower().replace("_", "-"))


def _base_code(language: str) -> str:
    return language_code(language).partition("-")[0]


def language_of(text: str) -> str | None:
    """Return the code of the language in which a text begins, None for numbers and signs."""
    import py3langid  # loads its model in a second

    code: str = py3langid.classify(text[:LANGUAGE_CHARACTERS])[0]
    if code != NO_LANGUAGE:
        return code
    return None


def check_splitter(name: str, language: str) -> list[str]:
    """Load a splitter, so that it fails early, and log its name; return notes on it for the manifest."""
    load_splitter(name, language)
    if name != "lines":
        logger.info(f"preprocess: {name} splits the sentences, language {language}")
    if name != "sentencex" or _base_code(language) in (*LANGUAGES["sentencex"], *ENDS):
        return []
    return [f"sentencex has no rules for {language} itself; {WITHOUT_RULES}"]


def splitter_of(name: str, language: str) -> Split:
    """Return `load_splitter` less its cuts after abbreviations."""
    split = load_splitter(name, language)
    if name == "lines":
        return split
    return keep_abbreviations(split, _base_code(language))


@lru_cache(maxsize=2)
def load_splitter(name: str, language: str) -> Split:
    """Return the function that splits a line: `punkt`, `sentencex`, or `lines`, which splits nothing."""
    code = language_code(language)
    if name == "lines":
        return lambda text: [text]
    if name == "punkt":
        from nltk.tokenize.punkt import PunktTokenizer

        remedy = "pass --sentence-splitter sentencex and use a new folder"
        if code not in NLTK_NAMES:
            raise DataError(f"language ({language})", "NLTK has no Punkt data for it", remedy)
        try:
            split: Split = PunktTokenizer(NLTK_NAMES[code]).tokenize
        except LookupError:
            problem = "Punkt's data are not installed"
            remedy = (
                f"run python -m nltk.downloader punkt_tab where there is a network, or {remedy}"
            )
            raise DataError("sentence_splitter (punkt)", problem, remedy) from None
        return split
    import sentencex

    if not CODE.fullmatch(code):
        problem = "sentencex does not know this name"
        raise ConfigError(f"language ({language})", problem, "use the ISO 639 code, such as `en`")
    segment: Split = partial(sentencex.segment, code)
    pattern = ENDS.get(_base_code(language))
    if pattern is None:
        return segment

    def split_at_ends(text: str) -> list[str]:
        pieces: list[str] = []
        for whole in segment(text):
            pieces += re.split(pattern, whole)
        return pieces

    return split_at_ends


def _spellings(words: str) -> set[str]:
    """Return abbreviations as texts have them: also with a capital, and after an opening mark or an article."""
    spelled = f"{words} {words.title()}".split()
    return set(map("".join, product(BEFORE, spelled)))


@lru_cache(maxsize=2)  # for all shards
def keep_abbreviations(split: Split, language: str) -> Split:
    """Return `split` less its cuts after the abbreviations of a language (ISO 639) that end no sentence there.

    Those of `never_last`, such as titles, end none, except after a number ("500 Ft. Molnár"); the `others` end none
    before a number and before a word without a capital. A language without a list stays as it is.
    """
    words_of = LISTS["languages"].get(language, {"never_last": "", "others": ""})
    never_last, others = map(_spellings, words_of.values())
    listed = never_last | others

    def ends_sentence(text: str, following: str) -> bool:
        *before, word = text.rsplit(None, 2)[-2:] or [""]
        if word in never_last and not "".join(before)[-1:].isdigit():
            return False
        first = following[:1]
        is_small = first.isalpha() and not first.isupper()
        return not (word in others and (is_small or NUMBER.match(following)))

    def join(text: str) -> list[str]:
        pieces = split(text)
        if listed.isdisjoint([(piece.rsplit(None, 1) or " ")[-1] for piece in pieces[:-1]]):
            return pieces
        joined = pieces[:1]
        for piece in pieces[1:]:
            if ends_sentence(joined[-1], piece):
                joined.append(piece)
            elif joined[-1] + piece in text:
                joined[-1] += piece
            else:
                joined[-1] += f" {piece}"
        return joined

    if listed:
        return join
    return split
