"""Vocabularies: find one, read one, train one.

A vocabulary is a vocab.txt, a piece a line, the line number its id, with a tokenizer_config.json
beside it that says whether text is lower-cased. That is the form of every published BERT, so any of
them can be named, and what is trained here can be given to any other tool. What cannot be encoded
as its tokenizer_config.json says is refused; where that says nothing, its pieces tell by their capitals.
"""

import hashlib
import json
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bert_cli.config.data import VocabSettings
from bert_cli.config.model import BertConfig
from bert_cli.data.records.sentence_pairs import SpecialIds
from bert_cli.data.shards.manifest import (
    MANIFEST,
    OutputFolder,
    Shard,
    Stats,
    open_output,
)
from bert_cli.data.shards.runner import Progress, summary
from bert_cli.data.text.documents import text_pieces
from bert_cli.data.text.files import Part, Reading, recognise_all, refuse_without_effect
from bert_cli.errors import ConfigError, DataError
from bert_cli.files import read_json, write_atomically, write_json_atomically

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""Ids 0 to 4 of a vocabulary trained here; elsewhere they may stand anywhere."""

LETTERS = 1000
"""Most characters that a trained vocabulary knows; what has others is [UNK]."""
CODE_POINTS = 0x110000

VOCAB_FILE = "vocab.txt"
CONFIG_FILE = "tokenizer_config.json"
CAPITALS = 0.05
"""Share of the pieces of a cased vocabulary that hold a capital, at least: 30 % of Google's English one."""
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


@dataclass(frozen=True)
class Vocabulary:
    """The pieces of a vocab.txt in the order of their ids."""

    path: Path
    pieces: tuple[str, ...]
    sha256: str
    """Of the file's bytes."""

    @property
    def ids(self) -> dict[str, int]:
        """Id of each piece."""
        return {piece: number for number, piece in enumerate(self.pieces)}

    @property
    def special(self) -> SpecialIds:
        """Ids of the five special tokens."""
        ids = self.ids
        return SpecialIds(*(ids[token] for token in SPECIAL_TOKENS))

    @property
    def is_continuation(self) -> npt.NDArray[np.bool_]:
        """Which pieces continue a word [V]."""
        return np.array([piece.startswith("##") for piece in self.pieces], np.bool_)


def read_vocabulary(path: Path) -> Vocabulary:
    """Read a vocab.txt; DataError when it cannot be read or lacks one of the special tokens."""
    try:
        data = path.read_bytes()
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"vocabulary ({path}): cannot be read as text ({error}); give a vocab.txt"
        ) from error
    pieces = tuple(line.removesuffix("\r") for line in text.removesuffix("\n").split("\n"))
    missing = [token for token in SPECIAL_TOKENS if token not in set(pieces)]
    if missing:
        raise DataError(
            f"vocabulary ({path}): {' '.join(missing)} missing; give a BERT vocabulary, "
            "a piece a line, that holds " + " ".join(SPECIAL_TOKENS)
        )
    if len(set(pieces)) < len(pieces) or "" in pieces:
        seen: dict[str, int] = {"": 0}
        for line, piece in enumerate(pieces, 1):
            if seen.setdefault(piece, line) != line:
                wrong = f"repeats {piece!r} of line {seen[piece]}" if piece else "is blank"
                raise DataError(
                    f"vocabulary ({path}, line {line}): {wrong}, so an id would have no piece of its own; "
                    f"write [unused{line - 1}] there, which leaves all other ids as they are"
                )
    return Vocabulary(path, pieces, hashlib.sha256(data).hexdigest())


def find_vocabulary(name: str, *, cased: bool) -> Vocabulary:
    """Read the vocabulary that `--vocab` names: vocab.txt, a folder with one, or a name on the hub.

    ConfigError when its tokenizer_config.json, or where that does not say it its pieces, treats
    letters in another way than `cased`; DataError when it is nowhere.
    """
    place = Path(os.path.expandvars(name)).expanduser()
    if place.is_dir():
        if not (place / VOCAB_FILE).is_file():
            raise DataError(
                f"--vocab ({name}): the folder holds no {VOCAB_FILE}; give one that does, or a file"
            )
        path, config = place / VOCAB_FILE, place / CONFIG_FILE
    elif place.is_file():
        path, config = place, place.with_name(CONFIG_FILE)
    elif _HUB_NAME.fullmatch(name) and place.suffix != ".txt":
        path, config = _fetch(name)
    else:
        raise DataError(
            f"--vocab ({name}): no such file or folder; give a vocab.txt, a folder with one, or "
            "a model name on the Hugging Face hub"
        )
    case_is_said = config.is_file() and _check_config(config, name, cased=cased)
    vocabulary = read_vocabulary(path)
    if not case_is_said:
        _check_capitals(vocabulary, name, cased=cased)
    return vocabulary


def _fetch(name: str) -> tuple[Path, Path]:
    """Get vocab.txt, and tokenizer_config.json where there is one, from the hub or its cache."""
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    print(f"vocab: {name} is not here; asking the Hugging Face hub for it", file=sys.stderr)
    try:
        path = _file_of_hub(name, VOCAB_FILE)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise DataError(
            f"--vocab ({name}): no such file or folder here, and the Hugging Face hub gave no "
            f"{VOCAB_FILE} ({type(error).__name__}: {str(error).strip().splitlines()[0]}); "
            "check the name and the network, or give the path of a vocab.txt"
        ) from error
    try:
        return path, _file_of_hub(name, CONFIG_FILE)
    except LocalEntryNotFoundError as error:
        raise DataError(
            f"--vocab ({name}): the Hugging Face hub gave {VOCAB_FILE} and then could not be "
            "reached; try again"
        ) from error
    except EntryNotFoundError:
        return path, path.with_name(
            CONFIG_FILE
        )  # the repository has none: there is nothing to agree with


def _file_of_hub(name: str, file: str) -> Path:
    """A file of a model, or what is kept of it here where the hub cannot be reached.

    It is asked for once beforehand: where there is no network the download itself would try again
    for 23 s and write eleven lines.
    """
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    from huggingface_hub.errors import RepositoryNotFoundError as ModelNotFoundError

    try:
        huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(name, file))
    except (EntryNotFoundError, ModelNotFoundError, ValueError):
        raise
    except Exception as error:  # the client raises what lies below it raises
        try:
            return Path(huggingface_hub.hf_hub_download(name, file, local_files_only=True))
        except LocalEntryNotFoundError:
            raise LocalEntryNotFoundError(str(error) or type(error).__name__) from error
    return Path(huggingface_hub.hf_hub_download(name, file))


def _check_config(path: Path, name: str, *, cased: bool) -> bool:
    """Refuse a vocabulary whose tokenizer would cut text otherwise than we do.

    Whether the file says anything of capitals.
    """
    config = read_json(path, dict[str, Any], DataError, "fix or remove it")
    lower = config.get("do_lower_case", not cased)
    if lower == cased:
        raise ConfigError(
            f"--cased ({json.dumps(cased)}, with --vocab {name}): {path} says do_lower_case "
            f"{json.dumps(lower)}; {'leave out' if cased else 'give'} --cased"
        )
    strips = config.get("strip_accents")
    if (strips is not None and strips == cased) or not config.get("tokenize_chinese_chars", True):
        raise ConfigError(
            f"--vocab ({name}): {path} asks for strip_accents {json.dumps(strips)} and "
            f"tokenize_chinese_chars {json.dumps(config.get('tokenize_chinese_chars', True))}, "
            "which is not how BERT cuts text; choose another vocabulary"
        )
    return "do_lower_case" in config


def _check_capitals(vocabulary: Vocabulary, name: str, *, cased: bool) -> None:
    """Refuse a vocabulary that is cased, by its pieces, where text is lower-cased; or the reverse.

    Lower-cased text never meets a piece with a capital, and no word with one is in a vocabulary of
    lower-cased text: either would be cut to bits without a word. Pieces of letters that come in one
    case only, as Chinese ones, tell nothing.
    """
    pieces = [piece for piece in vocabulary.pieces if not piece.startswith("[")]
    with_case = [piece for piece in pieces if piece.lower() != piece.upper()]
    capital = sum(piece.lower() != piece for piece in with_case)
    accents = any(unicodedata.normalize("NFD", piece) != piece for piece in with_case)
    if not cased and capital > CAPITALS * len(with_case):
        wrong, remedy = "so it is a cased vocabulary", "give --cased"
    elif cased and with_case and not capital and not accents:
        wrong, remedy = "so it is one of lower-cased text", "leave out --cased"
    else:
        return
    raise ConfigError(
        f"--cased ({json.dumps(cased)}, with --vocab {name}): {capital:,} of the {len(with_case):,} pieces "
        f"with letters hold a capital, {wrong}; {remedy}, or lay a {CONFIG_FILE} beside it that says "
        f'{{"do_lower_case": {json.dumps(not cased)}}}'
    )


def tokenizer_config(*, cased: bool) -> dict[str, Any]:
    """What Hugging Face's tokenizer has to know beside the vocabulary."""
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    settings: dict[str, Any] = {"tokenizer_class": "BertTokenizer", "do_lower_case": not cased}
    settings |= {"strip_accents": None, "tokenize_chinese_chars": True}
    return settings | dict(zip(names, SPECIAL_TOKENS, strict=True))


def write_vocabulary(folder: Path, data: bytes, *, cased: bool) -> None:
    """Write vocab.txt and tokenizer_config.json into a folder, each whole or not at all."""
    write_atomically(folder / VOCAB_FILE, data)
    # A vocabulary has no model yet; a model's folder has the number of its own positions.
    most = {"model_max_length": BertConfig().max_position_embeddings}
    write_json_atomically(folder / CONFIG_FILE, tokenizer_config(cased=cased) | most)


def run(settings: VocabSettings) -> None:
    """Train a WordPiece vocabulary (Schuster and Nakajima 2012) on all sentences of a folder.

    The same text gives the same vocabulary. DataError when there is no text, or when OUT is the
    folder of another step, or holds a vocabulary of other settings or another text.
    """
    kept = settings.model_dump(include={"size", "cased", "min_frequency"})
    kept |= settings.model_dump(include={"input_format", "text_field"}, exclude_defaults=True)
    with open_output(settings.out, "vocab", kept, ["tokenizers"]) as output:
        _run(settings, output)


def _run(settings: VocabSettings, output: OutputFolder) -> None:
    started = monotonic()
    reading = Reading(settings.input_format, settings.text_field)
    parts, notes = recognise_all(settings.input, reading)
    refuse_without_effect(parts, settings.model_fields_set)
    shard = Shard(tuple(dict.fromkeys(part.path for part in parts)), Path(VOCAB_FILE))
    if output.is_complete(shard) and (settings.out / MANIFEST).exists():
        print(f"vocab: {settings.out / VOCAB_FILE} is here, made so of this text (nothing to do)")
        return
    size = sum(part.size for part in parts)
    packed = any(part.compression or part.format == "parquet" for part in parts)
    with Progress("vocab", None if packed else 2 * size) as bar:  # the text is read twice
        pieces, sentences = _train(partial(_texts, parts, reading, bar), settings)
    data = "".join(piece + "\n" for piece in pieces).encode()
    fresh = output.work_folder(shard) / "out"
    fresh.mkdir(parents=True)
    write_vocabulary(fresh, data, cased=settings.cased)
    seconds = monotonic() - started
    stats = Stats(
        sentences=sentences, bytes_in=size, bytes_out=len(data), extra={"pieces": len(pieces)}
    )
    output.commit(shard, stats)
    write_json_atomically(
        settings.out / MANIFEST,
        {
            "step": "vocab",
            "settings": output.settings,
            "counts": stats.counts(),
            "seconds": round(seconds, 3),
            "mb_per_second": round(size / 1e6 / seconds, 3),
            "versions": output.versions,
            "notes": notes,
        },
    )
    if len(pieces) < settings.size:
        notes = [*notes, _fewer(len(pieces), settings)]
    for note in notes:
        print(f"vocab: {note}")
    line = summary("vocab", stats, seconds, size)
    print(line.replace("vocab: ", f"vocab: {len(pieces):,} pieces from ", 1))


def _fewer(pieces: int, settings: VocabSettings) -> str:
    return (
        f"{pieces:,} pieces are all that occur {settings.min_frequency} times in this text, not the {settings.size:,} "
        f"of --size; a model for them has --bert-config.vocab-size {pieces}"
    )


def _train(texts: Callable[[], Iterable[str]], settings: VocabSettings) -> tuple[list[str], int]:
    """The pieces in the order of their ids, and how many sentences they come from.

    The library numbers the letters that continue a word in the order in which a randomly seeded
    hash table gives it the words, and breaks ties between pairs by these numbers. So all letters
    are found beforehand, and given to it in a fixed order.
    """
    from tokenizers import trainers

    from bert_cli.data.records.wordpiece import library_tokenizer

    tokenizer = library_tokenizer({"[UNK]": 0}, cased=settings.cased)
    letters, continuing = _alphabet(texts(), tokenizer)
    if not letters:
        raise DataError(
            f"input ({settings.input}): no text; give a folder that `bert preprocess` wrote"
        )
    fixed = [*SPECIAL_TOKENS, *("##" + letter for letter in continuing)]
    if len(fixed) + len(letters) > settings.size:
        raise ConfigError(
            f"--size ({settings.size}): less than the special tokens and letters of this text; "
            f"give at least {len(fixed) + len(letters)}"
        )
    trainer = trainers.WordPieceTrainer(
        vocab_size=settings.size,
        min_frequency=settings.min_frequency,
        special_tokens=fixed,
        initial_alphabet=letters,
        limit_alphabet=len(letters),
        show_progress=False,
    )
    sentences = 0

    def lines() -> Iterator[str]:
        nonlocal sentences
        for text in texts():
            kept = [line for line in text.split("\n") if line.strip()]
            sentences += len(kept)
            yield from kept

    tokenizer.train_from_iterator(lines(), trainer)
    ids = tokenizer.get_vocab()
    first = [*SPECIAL_TOKENS, *letters, *fixed[len(SPECIAL_TOKENS) :]]
    merged = sorted(ids.keys() - set(first), key=ids.__getitem__)
    return [*first, *merged], sentences


def _texts(parts: Sequence[Part], reading: Reading, bar: Progress) -> Iterator[str]:
    for part in parts:
        for text in text_pieces(part, reading):
            yield text
            bar.advance(len(text))


def _alphabet(texts: Iterable[str], tokenizer: "Tokenizer") -> tuple[list[str], list[str]]:
    """The most frequent LETTERS characters of all words, and those of them that continue one.

    Both in the order of their code points; of equally frequent ones the lower are kept.
    """
    counts, continuing = np.zeros(CODE_POINTS, np.int64), np.zeros(CODE_POINTS, np.bool_)
    kinds = np.full(CODE_POINTS, -1, np.int8)  # -1 not seen, 0 space, 1 punctuation, 2 in words
    for text in texts:
        codes = np.frombuffer(
            tokenizer.normalizer.normalize_str(text).encode("utf-32-le"), np.uint32
        )
        seen = np.bincount(codes, minlength=CODE_POINTS)
        for code in np.flatnonzero((seen > 0) & (kinds < 0)).tolist():
            # The library tells: does it cut before and after this one, and keep it?
            parts = tokenizer.pre_tokenizer.pre_tokenize_str(f"a{chr(code)}a")
            kinds[code] = {1: 2, 2: 0, 3: 1}[len(parts)]
        counts += seen
        in_word = kinds[codes] == 2
        continuing[codes[1:][in_word[1:] & in_word[:-1]]] = True
    letters = np.flatnonzero((counts > 0) & (kinds > 0))
    letters = np.sort(letters[np.argsort(-counts[letters], kind="stable")][:LETTERS])
    return [chr(c) for c in letters], [chr(c) for c in letters if continuing[c]]
