"""The examples of pre-training: one corpus or several, on this disk or on object storage, or made up.

Whatever they are, they are asked for the batch of a step or for the examples at some positions. What
does not fit the run or the model it starts from is refused here, before anything is built.
"""

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from bert_cli.config.schema import PretrainSettings
from bert_cli.data.generated import GeneratedReader
from bert_cli.data.mixture import Mixture
from bert_cli.data.reader import Reader
from bert_cli.data.remote import is_remote, local_copy
from bert_cli.data.tokenizer import read_tokenizer
from bert_cli.data.vocab import VOCAB_FILE
from bert_cli.errors import ConfigError
from bert_cli.train.step import Batch


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
            probability=settings.masking.probability,
            part=part,
            parts=parts,
        )
    if settings.dataset_dir is None:
        raise ConfigError(
            "dataset_dir: is not given; give --dataset-dir, a folder of records that `bert tokenize` "
            "made, or --generated-dataset for made-up examples"
        )
    if isinstance(settings.dataset_dir, str):
        return open_corpus(settings.dataset_dir, settings, examples_per_step, part, parts)
    named = settings.dataset_dir
    if settings.length_bins is not None and len(named) > 1:
        raise ConfigError(
            "length_bins: has no effect on several corpora, whose steps are of all their lengths; leave it out, or "
            "pack with --max-sequences-per-pack"
        )
    corpora = [open_corpus(one.path, settings, examples_per_step, part, parts) for one in named]
    if len(corpora) == 1:
        return corpora[0]
    return Mixture(
        [(reader, one.weight) for reader, one in zip(corpora, named, strict=True)],
        seed=settings.seed,
        examples_per_step=examples_per_step,
        micro_batch_size=settings.global_batch.micro_batch_size,
        part=part,
        parts=parts,
    )


def open_corpus(
    name: str, settings: PretrainSettings, examples_per_step: int, part: int = 0, parts: int = 1
) -> Reader:
    """A reader of a folder of records, or of what is at an address, whose vocabulary is the model's."""
    folder = (
        local_copy(name, settings.dataset_cache.expanduser()) if is_remote(name) else Path(name)
    )
    given = settings.model_fields_set
    reader = Reader(
        folder,
        seed=settings.seed,
        examples_per_step=examples_per_step,
        micro_batch_size=settings.global_batch.micro_batch_size,
        sequence_length=settings.max_seq_length,
        predictions=settings.max_predictions_per_seq,
        masking=settings.masking,
        max_sequences_per_pack=settings.max_sequences_per_pack
        if "max_sequences_per_pack" in given
        else None,
        bins=settings.length_bins,
        part=part,
        parts=parts,
    )
    if not reader.is_dynamic and "masking" in given:
        raise ConfigError(
            f"masking: has no effect on {folder}, whose records are static and masked already; leave it out, or "
            "make the records with --masking dynamic"
        )
    words = reader.corpus["vocab_size"]
    if words != settings.bert_config.vocab_size:
        raise ConfigError(
            f"bert_config.vocab_size ({settings.bert_config.vocab_size}): the corpus in {folder} has a "
            f"vocabulary of {words}; give --bert-config.vocab-size {words}"
        )
    return reader


def open_held_out(settings: PretrainSettings) -> Reader | None:
    """The examples to evaluate on, when there are any."""
    if settings.validation_dir is None:
        return None
    return open_corpus(settings.validation_dir, settings, settings.global_batch.micro_batch_size)


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


def refuse_another_vocabulary(corpus: Path, model: Path) -> None:
    """Raise ConfigError where the records were made with other words than the model knows.

    Such a run would train, and slowly forget what the model had learnt: every number means another word.
    A model that has no tokenizer beside it cannot be compared.
    """
    if not any((model / name).is_file() for name in (VOCAB_FILE, "tokenizer.json")):
        return
    ours, theirs = read_tokenizer(corpus).pieces, read_tokenizer(model).pieces
    if ours == theirs:
        return
    pairs = enumerate(zip(ours, theirs, strict=False))
    number = next((n for n, (one, other) in pairs if one != other), min(len(ours), len(theirs)))
    told = [pieces[number] if number < len(pieces) else "none" for pieces in (ours, theirs)]
    raise ConfigError(
        f"dataset_dir ({corpus}): was made with another vocabulary than the model in {model} knows (word {number:,} "
        f"is {told[0]!r} in the one and {told[1]!r} in the other); make the records with --vocab {model}, or "
        "train new weights without --pretrained-ckpt-path"
    )


def first_micro_batches(
    reader: Reader | Mixture | GeneratedReader, number: int, size: int
) -> Batch:
    """Some micro-batches [number, size, ...] to trace with; which ones does not matter."""
    rows = reader.rows(np.arange(number * size))
    return {name: column.reshape(number, size, *column.shape[1:]) for name, column in rows.items()}
