"""The examples of pre-training: one corpus or several, on this disk or on object storage, or made up.

Whatever they are, they are asked for the batch of a step or for the examples at some positions. What
does not fit the run or the model it starts from is refused here, before anything is built.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from bert_cli.config.settings import is_remote, is_set
from bert_cli.config.training import PretrainSettings, WeightedCorpus
from bert_cli.data.records.corpus import read_corpus
from bert_cli.data.records.tokenizer import case_of, read_tokenizer
from bert_cli.data.records.vocab import VOCAB_FILE
from bert_cli.data.stream.mixture import Mixture
from bert_cli.data.stream.reader import Reader
from bert_cli.data.stream.remote import local_copy
from bert_cli.data.stream.synthetic import GeneratedReader
from bert_cli.errors import ConfigError, DataError
from bert_cli.train.step import Batch

TRAINING, VALIDATION = "dataset_dir", "validation_dir"


class Corpus(Protocol):
    """What can be asked for the examples at some positions of its stream."""

    def __len__(self) -> int:
        """Examples of an epoch."""
        ...

    def rows(self, positions: npt.ArrayLike) -> dict[str, npt.NDArray[Any]]:
        """The examples at these positions, columns [n, ...]."""
        ...


def open_reader(
    settings: PretrainSettings, examples_per_step: int, part: int = 0, parts: int = 1
) -> Reader | Mixture | GeneratedReader:
    """The run's examples, of each step one part of several.

    Raises ConfigError when none are named, DataError when they do not fit.
    """
    if settings.generated_dataset:
        return GeneratedReader(
            vocab_size=settings.bert_config.vocab_size,
            seed=settings.seed,
            examples_per_step=examples_per_step,
            micro_batch_size=settings.global_batch.micro_batch_size,
            sequence_length=settings.max_seq_length,
            predictions=settings.max_predictions_per_seq,
            max_sequences_per_pack=settings.max_sequences_per_pack,
            masking=settings.masking,
            part=part,
            parts=parts,
        )
    if settings.dataset_dir is None:
        raise ConfigError(
            "dataset_dir: is not given; give --dataset-dir, a folder of records that `bert tokenize` "
            "made, or --generated-dataset for made-up examples"
        )
    given = settings.dataset_dir
    named = [WeightedCorpus(path=given)] if isinstance(given, str) else given
    if settings.length_bins is not None and len(named) > 1:
        raise ConfigError(
            "length_bins: has no effect on several corpora, whose steps are of all their lengths; leave it out, or "
            "pack with --max-sequences-per-pack"
        )
    readers = [
        open_corpus(
            _folder_of(one.path, settings, TRAINING),
            settings,
            examples_per_step,
            part=part,
            parts=parts,
            most=_most_asked(settings),
            bins=settings.length_bins,
        )
        for one in named
    ]
    _refuse_masking_without_effect(settings, readers)
    if len(readers) == 1:
        return readers[0]
    return Mixture(
        [(reader, one.weight) for reader, one in zip(readers, named, strict=True)],
        seed=settings.seed,
        examples_per_step=examples_per_step,
        micro_batch_size=settings.global_batch.micro_batch_size,
        part=part,
        parts=parts,
    )


def open_corpus(
    folder: Path,
    settings: PretrainSettings,
    examples_per_step: int,
    *,
    part: int = 0,
    parts: int = 1,
    most: int | None,
    bins: int | None,
    name: str = TRAINING,
) -> Reader:
    """A reader of a folder of records whose vocabulary is the model's, with packs of `most` sequences or bins.

    `name` is the setting that names the folder.
    """
    reader = Reader(
        folder,
        seed=settings.seed,
        examples_per_step=examples_per_step,
        micro_batch_size=settings.global_batch.micro_batch_size,
        sequence_length=settings.max_seq_length,
        predictions=settings.max_predictions_per_seq,
        masking=settings.masking,
        max_sequences_per_pack=most,
        bins=bins,
        part=part,
        parts=parts,
    )
    words = reader.corpus["vocab_size"]
    if words == settings.bert_config.vocab_size:
        return reader
    if name == VALIDATION:
        raise ConfigError(
            f"{name} ({folder}): has a vocabulary of {words}, and the model one of "
            f"{settings.bert_config.vocab_size}; make these records with the vocabulary of dataset_dir"
        )
    raise ConfigError(
        f"bert_config.vocab_size ({settings.bert_config.vocab_size}): the corpus in {folder} has a "
        f"vocabulary of {words}; give --bert-config.vocab-size {words}"
    )


def _folder_of(path: str, settings: PretrainSettings, name: str) -> Path:
    """The folder that a path is, which the setting `name` gives, or a copy of what is at an address."""
    if is_remote(path):
        return local_copy(path, settings.dataset_cache.expanduser())
    if not Path(path).is_dir():
        raise DataError(
            f"{name} ({path}): there is no such folder; give one that `bert tokenize` has made"
        )
    return Path(path)


def _most_asked(settings: PretrainSettings) -> int | None:
    """Most sequences of an example where that was said; else they are as the records are."""
    return settings.max_sequences_per_pack if is_set(settings, "max_sequences_per_pack") else None


def _refuse_masking_without_effect(settings: PretrainSettings, readers: Sequence[Reader]) -> None:
    """Raise ConfigError for a way of masking where no record of the run, held-out ones too, is masked by it."""
    if not is_set(settings, "masking") or any(reader.is_dynamic for reader in readers):
        return
    held_out = settings.validation_dir
    if (
        held_out is None
        or read_corpus(_folder_of(held_out, settings, VALIDATION))["format"] != "dynamic"
    ):
        folders = ", ".join(str(reader.folder) for reader in readers)
        raise ConfigError(
            f"masking: has no effect on {folders}, whose records are static and masked already; leave it out, or "
            "make the records with --masking dynamic"
        )


def open_held_out(settings: PretrainSettings) -> Reader | None:
    """The examples to evaluate on, when there are any; packed and binned as those of the run where they can be."""
    if settings.validation_dir is None:
        return None
    folder, size = (
        _folder_of(settings.validation_dir, settings, VALIDATION),
        settings.global_batch.micro_batch_size,
    )
    corpus = read_corpus(folder)
    is_plain = corpus["format"] == "dynamic" and corpus.get("max_sequences_per_pack", 1) == 1
    has_bins = is_plain and corpus["records"] >= size
    return open_corpus(
        folder,
        settings,
        size,
        most=_most_asked(settings) if is_plain else None,
        bins=settings.length_bins if has_bins else None,
        name=VALIDATION,
    )


def size_of(reader: Reader | Mixture | GeneratedReader) -> tuple[int | None, float]:
    """Examples of an epoch, None for made-up ones, and how many sequences one is on average."""
    if isinstance(reader, Mixture):
        return len(reader), reader.sequences_per_example
    if isinstance(reader, Reader):
        return len(reader), reader.sequences / len(reader)
    some = reader.rows(np.arange(1024))["input_mask"]
    return None, float(some.max(axis=1).mean())


def folder_of(reader: Reader | Mixture | GeneratedReader) -> Path | None:
    """Where the tokenizer of the examples is; None for made-up ones."""
    if isinstance(reader, GeneratedReader):
        return None
    return reader.readers[0].folder if isinstance(reader, Mixture) else reader.folder


def refuse_another_vocabulary(corpus: Path, model: Path, run: Path | None) -> None:
    """Raise ConfigError where the records were made with other words than the model knows.

    Such a run would train, and slowly forget what the model had learnt: every number means another word.
    A model that has no tokenizer beside it cannot be compared. A model in the folder of the `run` is one
    that it would continue.
    """
    if not any((model / name).is_file() for name in (VOCAB_FILE, "tokenizer.json")):
        return
    ours, theirs = read_tokenizer(corpus).pieces, read_tokenizer(model).pieces
    if ours == theirs:
        _refuse_another_case(corpus, model)
        return
    if run is not None and run in model.parents:
        raise ConfigError(
            f"save_ckpt_path ({run}): holds a run whose model was trained with another vocabulary than the "
            f"records in {corpus} have; give a folder of its own to a new run, or to that one its own records"
        )
    pairs = enumerate(zip(ours, theirs, strict=False))
    number = next((n for n, (one, other) in pairs if one != other), min(len(ours), len(theirs)))
    told = [pieces[number] if number < len(pieces) else "none" for pieces in (ours, theirs)]
    raise ConfigError(
        f"dataset_dir ({corpus}): was made with another vocabulary than the model in {model} knows (word {number:,} "
        f"is {told[0]!r} in the one and {told[1]!r} in the other); make the records with --vocab {model}, or "
        "train new weights without --pretrained-ckpt-path"
    )


def _refuse_another_case(corpus: Path, model: Path) -> None:
    """Raise ConfigError where capital letters or accents are kept in the one and not in the other, if both say."""
    ours, theirs = case_of(corpus), case_of(model)
    if not ours or not theirs or ours == theirs:
        return
    name = next(name for name in ours if ours[name] != theirs[name])
    cased = "--no-cased" if theirs["do_lower_case"] else "--cased"
    can_be_made = theirs["do_lower_case"] == theirs["strip_accents"]
    raise ConfigError(
        f"dataset_dir ({corpus}): was made with {name} {ours[name]}, and the model in {model} knows text with {name} "
        f"{theirs[name]}; {f'make the records with {cased}, or ' if can_be_made else ''}train new weights without "
        "--pretrained-ckpt-path"
    )


def first_micro_batches(
    reader: Reader | Mixture | GeneratedReader, number: int, size: int
) -> Batch:
    """Some micro-batches [number, size, ...] to trace with; which ones does not matter."""
    rows = reader.rows(np.arange(number * size))
    return {name: column.reshape(number, size, *column.shape[1:]) for name, column in rows.items()}
