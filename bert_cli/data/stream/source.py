"""The examples of a folder of records by number, masked and packed when they are read.

`source.examples(epochs, numbers)` is a function of its arguments and the seed. Static records have their
masks; dynamic ones are masked by (seed, epoch, record), each sequence as if it were alone, so that
packing changes no mask.

Shapes: n examples, R sequences, C most sequences of a pack, S sequence length, P masked positions,
V vocabulary.
"""

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from bert_cli.config.data import Masking, packed_predictions
from bert_cli.data.records.columns import FIELDS, PACKED_FIELDS, Batch, label_weights, pack_columns
from bert_cli.data.records.corpus import RecordFiles, read_corpus
from bert_cli.data.records.formats import DynamicRecords, parse_dynamic, parse_packs
from bert_cli.data.records.masking import TokenKinds, mask_examples
from bert_cli.data.records.random_bits import Ints, row_keys
from bert_cli.data.records.sentence_pairs import SpecialIds
from bert_cli.data.records.vocab import read_vocabulary
from bert_cli.data.stream.packing import Packs
from bert_cli.errors import DataError


class Source(Protocol):
    """Numbered examples."""

    folder: Path
    fingerprint: str
    """Changes with the examples and with how they are packed."""
    seed: int
    has_next_sentences: bool
    max_sequences_per_pack: int

    @property
    def sequences(self) -> int:
        """Sequences of an epoch, each of which is in exactly one example."""
        ...

    def __len__(self) -> int:
        """Return the number of examples of an epoch."""
        ...

    def examples(self, epochs: Ints, numbers: Ints) -> Batch:
        """Return examples by their epochs [n] and numbers [n], as columns [n, ...]."""
        ...


class Records(Source):
    """Static records of a folder, packed or not; the base of the sources of dynamic ones."""

    def __init__(self, folder: Path, corpus: dict[str, Any], seed: int) -> None:
        self.folder, self.corpus, self.seed = folder, corpus, seed
        self.files = RecordFiles(folder, corpus)
        self.fingerprint = str(corpus["fingerprint"])
        self.has_next_sentences: bool = corpus.get("next_sentence", True)
        self.sequence_length: int = corpus["sequence_length"]
        self.predictions: int = corpus["mask_tokens"]
        """P of a sequence."""
        self.max_sequences_per_pack: int = corpus.get("max_sequences_per_pack", 1)

    @property
    def is_dynamic(self) -> bool:
        """Whether the records are masked when they are read."""
        return bool(self.corpus["format"] == "dynamic")

    @property
    def sequences(self) -> int:
        """Sequences of an epoch, each of which is in exactly one example."""
        is_packed = self.corpus.get("max_sequences_per_pack", 1) > 1
        return int(self.corpus["sequences"]) if is_packed else self.files.records

    def __len__(self) -> int:
        """Return the number of examples of an epoch."""
        return self.files.records

    def examples(self, epochs: Ints, numbers: Ints) -> Batch:
        """Return examples by their epochs [n] and numbers [n], as columns [n, ...]."""
        return self._in_order(self.files.static(numbers))

    def _in_order(self, columns: Batch) -> Batch:
        if "position_ids" in columns:
            return {name: columns[name] for name in PACKED_FIELDS}
        weights = label_weights(columns["next_sentence_labels"], self.has_next_sentences)
        columns = columns | {"next_sentence_weights": weights}
        return {name: columns[name] for name in FIELDS}


class DynamicSource(Records):
    """Dynamic records, one in an example, masked for their epoch."""

    def __init__(
        self,
        folder: Path,
        corpus: dict[str, Any],
        seed: int,
        sequence_length: int,
        predictions: int,
        masking: Masking,
    ) -> None:
        super().__init__(folder, corpus, seed)
        self.sequence_length, self.predictions, self.masking = sequence_length, predictions, masking
        self._special = SpecialIds(**corpus["special_ids"])
        continuations = None if masking.unit == "token" else self._read_continuations()
        self._kinds = TokenKinds(self._special, corpus["vocab_size"], continuations)

    def examples(self, epochs: Ints, numbers: Ints) -> Batch:
        """Return examples by their epochs [n] and numbers [n], as columns [n, ...]."""
        return self.padded_examples(epochs, numbers, self.sequence_length)

    def padded_examples(self, epochs: Ints, numbers: Ints, length: int) -> Batch:
        """Return examples padded to `length` positions instead of S."""
        return self._in_order(self._masked(self._read(numbers), epochs, numbers, length))

    def _read(self, numbers: Ints) -> DynamicRecords:
        sequences = parse_dynamic(self.files.payloads(numbers), self.corpus["token_bytes"])
        self.files.check_dynamic(sequences, numbers)
        return sequences

    def _masked(self, sequences: DynamicRecords, epochs: Ints, numbers: Ints, length: int) -> Batch:
        """Pad sequences [R] to a length and mask them by their epochs and numbers."""
        longest = int(sequences.lengths.max(initial=0))
        if longest > length:
            raise DataError(
                f"{self.folder} (a record of {longest} tokens)",
                f"is longer than the {length} positions that corpus.json names",
                "rebuild the records",
            )
        tokens_RS = np.full((len(numbers), length), self._special.pad, np.int32)
        tokens_RS[np.arange(length) < sequences.lengths[:, None]] = sequences.tokens
        keys_R = np.zeros(len(numbers), np.uint64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            keys_R[chosen] = row_keys(numbers[chosen], "mask", self.seed, int(epoch))
        return mask_examples(
            tokens_RS,
            sequences.lengths,
            sequences.first_lengths,
            sequences.next_sentence_labels,
            keys_R,
            kinds=self._kinds,
            masking=self.masking,
            predictions=self.predictions,
        )

    def _read_continuations(self) -> npt.NDArray[np.bool_]:
        """Return which pieces continue a word [V]; complete words are masked by it."""
        vocabulary = read_vocabulary(self.folder / "vocab.txt")
        if vocabulary.sha256 != self.corpus["vocab_sha256"]:
            raise DataError(
                str(vocabulary.path),
                "is not the vocabulary that the records were made with, which decides the masks",
                "bring it back",
            )
        return vocabulary.is_continuation


class StoredPacks(DynamicSource):
    """Packs of dynamic records, as `bert pack` has stored them."""

    @property
    def masked_positions(self) -> int:
        """P of a pack."""
        return packed_predictions(
            self.sequence_length,
            self.max_sequences_per_pack,
            self.predictions,
            self.masking.probability,
        )

    def examples(self, epochs: Ints, numbers: Ints) -> Batch:
        """Return examples by their epochs [n] and numbers [n], as columns [n, ...]."""
        packs = parse_packs(self.files.payloads(numbers), self.corpus["token_bytes"])
        self.files.check_dynamic(packs.sequences, np.repeat(numbers, packs.counts))
        epochs = np.repeat(epochs, packs.counts)
        return self._packed(packs.sequences, epochs, packs.numbers, packs.counts)

    def _packed(
        self, sequences: DynamicRecords, epochs: Ints, numbers: Ints, counts: Ints
    ) -> Batch:
        """Mask sequences [R] and pack them: the first `counts[0]` into the first example, and so on."""
        packed = pack_columns(
            self._masked(sequences, epochs, numbers, self.sequence_length),
            sequences.lengths,
            counts,
            sequence_length=self.sequence_length,
            most=self.max_sequences_per_pack,
            predictions=self.masked_positions,
            next_sentence=self.has_next_sentences,
            pad=self._special.pad,
        )
        return self._in_order(packed)


class PackedSource(StoredPacks):
    """Dynamic records that are packed when they are read, with other neighbours in each epoch."""

    def __init__(
        self,
        folder: Path,
        corpus: dict[str, Any],
        seed: int,
        sequence_length: int,
        predictions: int,
        masking: Masking,
        max_sequences_per_pack: int,
    ) -> None:
        super().__init__(folder, corpus, seed, sequence_length, predictions, masking)
        self.max_sequences_per_pack = most = max_sequences_per_pack
        # Checkpoints compare this text, so its words stay.
        self.fingerprint += f", {sequence_length} places for up to {most} sequences"
        self.packs = Packs(self.files.lengths(), sequence_length, most, seed)

    def __len__(self) -> int:
        """Return the number of examples of an epoch."""
        return len(self.packs)

    def examples(self, epochs: Ints, numbers: Ints) -> Batch:
        """Return examples by their epochs [n] and numbers [n], as columns [n, ...]."""
        records_nC = self.packs.records(numbers, epochs)
        counts = (records_nC >= 0).sum(axis=1)
        records_R = records_nC[records_nC >= 0]
        return self._packed(self._read(records_R), np.repeat(epochs, counts), records_R, counts)


def open_records(
    folder: Path,
    *,
    seed: int,
    sequence_length: int | None = None,
    predictions: int | None = None,
    masking: Masking | None = None,
    max_sequences_per_pack: int | None = None,
) -> Records:
    """Open a folder of records; an argument that is None is as the records are.

    Static records fix S, P, their masks and their packs. Dynamic ones can be read with any P (of a
    sequence) and with a longer S, and, unless they are packs already, up to `max_sequences_per_pack`
    in an example. Raises DataError for lengths, packs or files that do not fit.
    """
    corpus = read_corpus(folder)
    length = sequence_length or corpus["sequence_length"]
    predictions = predictions or corpus["mask_tokens"]
    _check_lengths(folder, corpus, length, predictions)
    stored: int = corpus.get("max_sequences_per_pack", 1)
    most = max_sequences_per_pack or stored
    _check_packs(folder, corpus, most, stored)
    if corpus["format"] != "dynamic":
        return Records(folder, corpus, seed)
    arguments = folder, corpus, seed, length, predictions, masking or Masking()
    if most == 1:
        return DynamicSource(*arguments)
    return PackedSource(*arguments, most) if stored == 1 else StoredPacks(*arguments)


def _check_packs(folder: Path, corpus: dict[str, Any], most: int, stored: int) -> None:
    if most == stored or (stored == 1 and corpus["format"] == "dynamic"):
        return
    if stored > 1:
        raise DataError(
            f"max_sequences_per_pack ({most})",
            f"the records in {folder} are packs of up to {stored} sequences",
            f"give {stored}, or the folder that they were packed from",
        )
    raise DataError(
        f"max_sequences_per_pack ({most})",
        f"the records in {folder} are static and not packed",
        f"pack them first, with `bert pack {folder} OUT --max-sequences-per-pack {most}`",
    )


def _check_lengths(folder: Path, corpus: dict[str, Any], length: int, predictions: int) -> None:
    stored, masked = corpus["sequence_length"], corpus["mask_tokens"]
    is_dynamic = corpus["format"] == "dynamic"
    if length < stored or (length != stored and not is_dynamic):
        raise DataError(
            f"max_seq_length ({length})",
            f"the records in {folder} have {stored} positions",
            f"give {stored}{' or more' if is_dynamic else ''}, or records made with --sequence-length {length}",
        )
    if predictions != masked and not is_dynamic:
        raise DataError(
            f"max_predictions_per_seq ({predictions})",
            f"the records in {folder} have {masked} masked positions",
            f"give {masked}, or records made with --mask-tokens {predictions}",
        )
