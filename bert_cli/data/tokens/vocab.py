"""Find the vocabulary that `--vocab` names, and train a vocabulary.

A vocabulary's tokenizer_config.json decides how text is normalized. If it does not state the case, the capitals in the
pieces show it.
"""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bert_cli.data.io.documents import sentence_blocks
from bert_cli.data.io.files import Part
from bert_cli.data.io.manifest import Stats
from bert_cli.data.tokens import hub, tokenizer
from bert_cli.data.tokens.encoder import Encoder
from bert_cli.data.tokens.notation import BYTE_LEVEL, COPY_AGAIN, TOKENIZER_FILE
from bert_cli.data.tokens.tokenizer import Normalization, Vocabulary
from bert_cli.errors import ConfigError, DataError, logger
from bert_cli.files import JSONObject, read_json, verify_checkpoint
from bert_cli.text import count

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LETTERS = 1000  # most characters in a trained vocabulary, or as many as COVERAGE needs; words with others are [UNK]
COVERAGE = 0.9995  # fraction of a text's characters, by a quarter of the vocabulary at most
CODE_POINTS = 0x110000
MIN_FREQUENCY = 2  # of a piece in the text
MANY_STRIPPED = 0.02  # words that stripping accents changes; of dumps English 0.2 %, Bulgarian 2.1 %, Vietnamese 81 %
CAPITALS = 0.05  # minimum fraction of pieces with a capital in a cased vocabulary; Google's has 0.3
Texts = Callable[[], Iterable[str]]  # blocks of a text that is read several times
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


# --- the vocabulary that --vocab names


def find_vocabulary(name: str, *, cased: bool) -> Vocabulary:
    """Read the vocabulary that `--vocab` names: its file, a folder with one, a run, or a model on the hub.

    The file is a vocab.txt, or the tokenizer.json of a model that has no other, with WordPiece or byte-level BPE.
    """
    path = Path(name)
    if path.is_dir():
        # Each checkpoint of a run has a vocabulary.
        checkpoints = filter(tokenizer.has_tokenizer, path.glob("step_*"))
        path = tokenizer.vocabulary_path(max(checkpoints, default=path))
    if not path.is_file():
        if path.suffix in (".txt", ".json") or not _HUB_NAME.fullmatch(name):
            problem = f"no such file or folder with {tokenizer.VOCAB_FILE} or {TOKENIZER_FILE}"
            raise DataError(f"vocabulary ({name})", problem, "name one, or a model on the hub")
        path = tokenizer.vocabulary_path(_download(name))
    verify_checkpoint(path.parent, but=(".safetensors",))
    config_path = path.with_name(tokenizer.CONFIG_FILE)
    config = {}
    if path.suffix == ".json":
        config_path = path
        config = tokenizer.normalizer_entries(read_json(path, JSONObject, DataError, COPY_AGAIN))
    elif config_path.is_file():
        config = read_json(config_path, JSONObject, DataError, "copy it again or move it away")
    vocabulary = tokenizer.read_vocabulary(path)
    if config.get("do_lower_case", not cased) == cased:
        raise _wrong_case(name, cased, f"{config_path} says do_lower_case {json.dumps(cased)}")
    if vocabulary.notation is BYTE_LEVEL:
        if cased:
            raise _wrong_case(name, cased, f"has no effect on {BYTE_LEVEL.name}")
        return vocabulary
    if "do_lower_case" not in config:
        # Words of the other case would silently be split into letters. Scripts without case pass.
        pieces = [piece for piece in vocabulary.pieces if not piece.startswith("[")]
        pieces = [piece for piece in pieces if piece.lower() != piece.upper()]
        capitals = sum(piece.lower() != piece for piece in pieces)
        is_wrong = capitals > CAPITALS * len(pieces)
        if cased:
            has_accents = any(not unicodedata.is_normalized("NFD", piece) for piece in pieces)
            is_wrong = len(pieces) > 0 and not capitals and not has_accents
        if is_wrong:
            problem = (
                f"{capitals:,} of the {len(pieces):,} pieces with letters have a capital letter"
            )
            problem += f", and no {tokenizer.CONFIG_FILE} defines the case"
            raise _wrong_case(name, cased, problem)
    added = tokenizer.TokenizerFolder(path.parent).added_tokens
    if added:
        listed = ", ".join(token.content for token in added[:3])
        raise DataError(
            f"vocabulary ({name})",
            f"has {count(len(added), 'added token')} ({listed}), which records cannot contain",
            f"use a copy of its {tokenizer.VOCAB_FILE} in a folder without its other files",
        )
    return replace(vocabulary, normalization=Normalization.of(config, cased=cased))


def find_of_any_case(name: str) -> Vocabulary:
    """Read the vocabulary that `--vocab` names, cased or not."""
    try:
        return find_vocabulary(name, cased=False)
    except ConfigError:  # its files or pieces are cased
        return find_vocabulary(name, cased=True)


def _download(name: str) -> Path:
    """Return the folder of a model's tokenizer files, from the hub, or from its cache where that cannot be reached."""
    logger.info(f"vocab: {name} is not here; asking the Hugging Face hub for it")
    files = [tokenizer.VOCAB_FILE, TOKENIZER_FILE, tokenizer.CONFIG_FILE]
    reason = "it has no such file"
    try:
        folder = hub.download(name, files, tokenizer.has_tokenizer)
        if tokenizer.has_tokenizer(folder):
            return folder
    except Exception as error:  # the hub's client raises a dozen kinds
        first = error.__cause__ or error  # that of the connection
        reason = f"{type(first).__name__}: {str(first).strip().splitlines()[0]}"
    raise DataError(
        f"vocabulary ({name})",
        f"no such file or folder here, and the Hugging Face hub has no {tokenizer.VOCAB_FILE} ({reason})",
        "check the name and the network, or use the path of a vocab.txt",
    )


def _wrong_case(name: str, cased: bool, problem: str) -> ConfigError:
    where = f"--cased ({json.dumps(cased)}, with the vocabulary {name})"
    remedy = "leave out --cased" if cased else "pass --cased"
    return ConfigError(where, problem, remedy)


# --- training


def convert(
    inputs: tuple[Path, ...],
    output: Path,
    *,
    parts: Sequence[Part],
    size: int,
    normalization: Normalization,
    base: Vocabulary | None,
) -> Stats:
    """Write the vocabulary of a text, of `size` pieces after those of a vocabulary to extend."""

    def texts() -> Iterator[str]:
        return chain.from_iterable(map(sentence_blocks, parts))

    _warn_of_stripping(next(texts(), ""), normalization)
    known = base.pieces if base else ()
    pieces, sentences = _train(texts, str(inputs[0]), normalization, len(known), size)
    if base is not None:
        pieces = [*known, *_new_pieces(base, pieces, texts, size)]
    data = "".join(piece + "\n" for piece in pieces).encode()
    tokenizer.write_vocabulary(output.parent, data, normalization)
    return Stats(sentences=sentences, extra={"pieces": len(pieces)})


def normalization_to_extend(
    base: Vocabulary, name: str, changes: Mapping[str, bool]
) -> Normalization:
    """Return the normalization of a vocabulary. Raises ConfigError for settings that would change it."""
    for setting, value in changes.items():
        if replace(base.normalization, **{setting: value}) != base.normalization:
            where = f"--{setting.replace('_', '-')} ({json.dumps(value)})"
            kept = json.dumps(not value)
            problem = f"an extended vocabulary keeps the {kept} of {name}"
            raise ConfigError(where, problem, "leave it out")
    return base.normalization


def _warn_of_stripping(text: str, normalization: Normalization) -> None:
    """Print a line if the normalization changes many words of a text other than by their case."""
    from tokenizers.normalizers import BertNormalizer

    words = Counter(text.split())
    normalizer = BertNormalizer(
        clean_text=False,
        handle_chinese_chars=False,
        strip_accents=normalization.strip_accents,
        lowercase=not normalization.cased,
    )
    strip = normalizer.normalize_str
    changed = sum(count for word, count in words.items() if strip(word).lower() != word.lower())
    if changed > MANY_STRIPPED * words.total():
        logger.warning(
            f"vocab: warning: stripping accents changes {changed / words.total():.0%} of the words of this text, where "
            "marks may be parts of letters; --no-strip-accents preserves them"
        )


def _new_pieces(base: Vocabulary, trained: Sequence[str], texts: Texts, size: int) -> list[str]:
    """Return the most frequent trained pieces that `base` lacks, counted in text encoded with all pieces."""
    ids = base.ids
    first = len(base.pieces)
    candidates = [piece for piece in trained if piece not in ids]
    ids |= {piece: first + number for number, piece in enumerate(candidates)}
    encoder = Encoder(ids, base.normalization)
    counts = np.zeros(first + len(candidates), np.int64)
    for text in texts():
        counts += np.bincount(encoder.encode(text).tokens, minlength=len(counts))
    counts = counts[first:]
    # Counted again, because the pieces compete for the same text.
    order = np.argsort(-counts, kind="stable")[:size].tolist()
    return [candidates[n] for n in order if counts[n] >= MIN_FREQUENCY]


def _train(
    texts: Texts, where: str, normalization: Normalization, known: int, new: int
) -> tuple[list[str], int]:
    """Return at most `known + new` pieces in the order of their ids, and the number of sentences.

    The library numbers the letters that continue a word in the order of a randomly seeded hash table, and breaks ties
    between pairs by these numbers. So all letters are counted first and given to it in a fixed order.
    """
    from tokenizers import trainers

    size = known + new
    library = tokenizer.library_tokenizer({"[UNK]": 0}, normalization)
    # At most a quarter of the pieces: the rest must be left for words.
    letters, continuing = _alphabet(texts(), library, size // 4)
    if not letters:
        raise DataError(where, "has no text", "use files with sentences")
    fixed = [*tokenizer.SPECIAL_TOKENS, *("##" + letter for letter in continuing)]
    least = len(fixed) + len(letters)
    if least > size:
        problem = f"is less than the {least} special tokens and letters of this text"
        sign = "+" if known else ""
        remedy = f"use at least {sign}{least - known}"
        raise ConfigError(f"--size ({sign}{new})", problem, remedy)
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        min_frequency=MIN_FREQUENCY,
        special_tokens=fixed,
        initial_alphabet=letters,
        limit_alphabet=len(letters),
        show_progress=False,
    )
    sentences = 0

    def lines() -> Iterator[str]:
        nonlocal sentences
        for text in texts():
            with_text = [line for line in text.split("\n") if line.strip()]
            sentences += len(with_text)
            yield from with_text

    library.train_from_iterator(lines(), trainer)
    ids = library.get_vocab()
    first = [*tokenizer.SPECIAL_TOKENS, *letters, *fixed[len(tokenizer.SPECIAL_TOKENS) :]]
    merged = sorted(ids.keys() - set(first), key=ids.__getitem__)
    return [*first, *merged], sentences


def _alphabet(
    texts: Iterable[str], library: "Tokenizer", limit: int
) -> tuple[list[str], list[str]]:
    """Return the most frequent characters of words, and which of them continue a word.

    There are LETTERS characters, or up to `limit` if COVERAGE of the text needs more. Both lists are sorted by code
    point; among equally frequent characters, lower code points are preferred.
    """
    # 9 MB, whatever the text: a counter for each code point.
    counts = np.zeros(CODE_POINTS, np.int64)
    continuing = np.zeros(CODE_POINTS, np.bool_)
    kinds = np.full(CODE_POINTS, -1, np.int8)  # -1 unknown, 0 space, 1 punctuation, 2 in words
    for text in texts:
        normalized = library.normalizer.normalize_str(text)
        codes = np.frombuffer(normalized.encode("utf-32-le"), np.uint32)
        occurrences = np.bincount(codes, minlength=CODE_POINTS)
        for code in np.flatnonzero((occurrences > 0) & (kinds < 0)).tolist():
            # The number of parts shows whether the library splits at this character and removes it.
            parts = library.pre_tokenizer.pre_tokenize_str(f"a{chr(code)}a")
            kinds[code] = {1: 2, 2: 0, 3: 1}[len(parts)]
        counts += occurrences
        in_word = kinds[codes] == 2
        continuing[codes[1:][in_word[1:] & in_word[:-1]]] = True
    letters = np.flatnonzero((counts > 0) & (kinds > 0))
    letters = letters[np.argsort(-counts[letters], kind="stable")]
    covered = np.cumsum(counts[letters])
    needed = int(np.searchsorted(covered, COVERAGE * counts[letters].sum())) + 1
    letters = np.sort(letters[: max(LETTERS, min(needed, limit))])
    return [chr(c) for c in letters], [chr(c) for c in letters if continuing[c]]
