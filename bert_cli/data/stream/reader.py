"""`reader[step]` is the batch of a step: a function of (seed, step) and nothing else.

Step and row give a position in the endless stream, the permutation gives the record there, or the
pack or the bin and their records: resuming is asking for another step, and how rows are cut into
micro-batches changes nothing about them. Dynamic records are masked here by (seed, epoch, record
number), each sequence as if it stood alone: packing changes no mask.

Shapes: M micro-batches of a step, B examples of a micro-batch, R sequences of packs, C most of them in
one, S places, P masked places, V words.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bert_cli.config.data import Masking, packed_predictions
from bert_cli.data.records.columns import FIELDS, PACKED_FIELDS, Batch, label_weights, pack_columns
from bert_cli.data.records.corpus import RecordFiles, read_corpus
from bert_cli.data.records.formats import DynamicRecords, parse_dynamic, parse_packs
from bert_cli.data.records.masking import TokenKinds, mask_examples
from bert_cli.data.records.random_bits import Ints, Keys, row_keys
from bert_cli.data.records.sentence_pairs import SpecialIds
from bert_cli.data.records.vocab import read_vocabulary
from bert_cli.data.stream.buckets import Bins
from bert_cli.data.stream.packing import Packs
from bert_cli.data.stream.permutation import record_at
from bert_cli.data.stream.prefetch import check_step, micro_batches, positions_of
from bert_cli.errors import ConfigError, DataError

BLOCK = 1024
"""Dynamic sequences parsed and masked at once; at 512 places that takes 15 MB, whatever the size of a step."""


class Reader:
    """The examples of a folder of records in an endless order drawn by the seed."""

    def __init__(
        self,
        folder: Path,
        *,
        seed: int,
        examples_per_step: int,
        micro_batch_size: int,
        sequence_length: int | None = None,
        predictions: int | None = None,
        masking: Masking | None = None,
        max_sequences_per_pack: int | None = None,
        bins: int | None = None,
        part: int = 0,
        parts: int = 1,
    ) -> None:
        """Open a corpus; what is left out is as the corpus says.

        Static records fix S, P, their masks and their packs. Dynamic ones can be read with any P (of a
        sequence), with an S that is not smaller, and are masked as `masking` says. Those that are not
        packed yet can be, up to `max_sequences_per_pack` in an example, or be read by length in at
        most so many `bins`, each step padded to its own. Of each step's micro-batches the reader gives
        those of part `part` of `parts`, in the order of the stream. Raises DataError for lengths, packs
        or files that do not fit, ConfigError for a step that is no whole number of micro-batches in
        each part.
        """
        self.folder, self.seed = folder, seed
        self.examples_per_step, self.micro_batch_size = examples_per_step, micro_batch_size
        self.part, self.parts = part, parts
        check_step(examples_per_step, micro_batch_size, parts)
        self.corpus = read_corpus(folder)
        self.fingerprint: str = self.corpus["fingerprint"]
        self.is_dynamic = self.corpus["format"] == "dynamic"
        self.is_packed = self.corpus.get("max_sequences_per_pack", 1) > 1
        """Whether the records are packs."""
        self.has_next_sentences: bool = self.corpus.get("next_sentence", True)
        self.sequence_length: int = sequence_length or self.corpus["sequence_length"]
        self.predictions: int = predictions or self.corpus["mask_tokens"]
        self.masking = masking or Masking()
        self.max_sequences_per_pack = self._most_sequences(max_sequences_per_pack, bins)
        self._check_lengths()
        self.masked_places = packed_predictions(
            self.sequence_length,
            self.max_sequences_per_pack,
            self.predictions,
            self.masking.probability if self.is_dynamic else self.corpus["masked_lm_prob"],
        )
        """Places of the masked_lm columns: P, or those of a pack."""
        self._files = RecordFiles(folder, self.corpus)
        self._packs, self._bins = self._pack(), self._bin(bins)
        self._special = SpecialIds(**self.corpus["special_ids"])
        self._kinds = TokenKinds(self._special, self.corpus["vocab_size"], self._continuations())

    def __len__(self) -> int:
        """Examples of an epoch: records of the corpus, or packs; without those that bins leave out."""
        if self._bins is not None:
            return len(self._bins)
        return self._files.records if self._packs is None else len(self._packs)

    @property
    def is_binned(self) -> bool:
        """Whether a step has examples of like length."""
        return self._bins is not None

    @property
    def sequences(self) -> int:
        """Sequences of an epoch, each of which is in exactly one of its examples."""
        if self.is_packed:
            return int(self.corpus["sequences"])
        return self._files.records - self.left_out

    @property
    def left_out(self) -> int:
        """Records that no step of an epoch has, others in each epoch: only bins leave any out."""
        return 0 if self._bins is None else self._bins.left_out

    @cached_property
    def real_token_share(self) -> float | None:
        """Share of an epoch's places that hold a token; None for static records that are not packed."""
        if self.is_packed:
            stored: float = self.corpus["real_token_share"]
            return stored * self.corpus["sequence_length"] / self.sequence_length
        for drawn in (self._packs, self._bins):
            if drawn is not None:
                return drawn.real_token_share
        if not self.is_dynamic:
            return None
        tokens = int(self._files.lengths().sum(dtype=np.int64))
        return tokens / (self._files.records * self.sequence_length)

    def __getitem__(self, step: int) -> Batch:
        """Return the batch of a step, or its part of it, [M, B, ...]."""
        rows = self.rows(positions_of(step, self.examples_per_step, self.part, self.parts))
        return micro_batches(rows, self.micro_batch_size)

    def rows(self, positions: npt.ArrayLike) -> Batch:
        """Return the examples at these positions of the stream, [n, ...], in this order.

        With bins they have the places of the widest step that they are from.
        """
        width = self.sequence_length
        if self._bins is not None:
            epochs, records, width = self._bins.records(np.array(positions, np.int64, ndmin=1))
        else:
            epochs, records = record_at(positions, len(self), self.seed)
        counts = np.ones(len(records), np.int64)  # records of each example
        if self._packs is not None:
            chosen = self._packs.records(records, epochs)
            counts = (chosen >= 0).sum(axis=1)
            epochs, records = np.repeat(epochs, counts), chosen[chosen >= 0]
        names = FIELDS if self.max_sequences_per_pack == 1 else PACKED_FIELDS
        if not self.is_dynamic:
            static = self._files.static(records)
            static = static if self.is_packed else self._with_weights(static)
            return {name: static[name] for name in names}
        payloads = self._files.payloads(records)
        ends = np.cumsum(counts)
        step = max(1, BLOCK // self.max_sequences_per_pack)
        columns: Batch = {}
        for start in range(0, len(counts), step):
            chunk = counts[start : start + step]
            end = int(ends[start + len(chunk) - 1])
            part = slice(end - int(chunk.sum()), end)
            block = self._read(payloads[part], epochs[part], records[part], chunk, width)
            for name in names:
                if start == 0:
                    shape = len(counts), *block[name].shape[1:]
                    columns[name] = np.empty(shape, block[name].dtype)
                columns[name][start : start + len(chunk)] = block[name]
        return columns

    def _read(
        self, payloads: Sequence[bytes], epochs: Ints, records: Ints, counts: Ints, width: int
    ) -> Batch:
        """A block of examples from their dynamic records, of which each has so many."""
        if self.is_packed:
            packs = parse_packs(payloads, self.corpus["token_bytes"])
            epochs = np.repeat(epochs, packs.counts)
            self._files.check_dynamic(packs.sequences, np.repeat(records, packs.counts))
            return self._packed(packs.sequences, epochs, packs.numbers, packs.counts)
        sequences = parse_dynamic(payloads, self.corpus["token_bytes"])
        self._files.check_dynamic(sequences, records)
        if self._packs is not None:
            return self._packed(sequences, epochs, records, counts)
        return self._with_weights(self._masked(sequences, epochs, records, width))

    def _with_weights(self, columns: Batch) -> Batch:
        labels = columns["next_sentence_labels"]
        return columns | {"next_sentence_weights": label_weights(labels, self.has_next_sentences)}

    def _packed(
        self, sequences: DynamicRecords, epochs: Ints, records: Ints, counts: Ints
    ) -> Batch:
        """Mask sequences [R], the first `counts` [n] of which are the first pack, ..., and pack them."""
        return pack_columns(
            self._masked(sequences, epochs, records, self.sequence_length),
            sequences.lengths,
            counts,
            sequence_length=self.sequence_length,
            most=self.max_sequences_per_pack,
            predictions=self.masked_places,
            next_sentence=self.has_next_sentences,
            pad=self._special.pad,
        )

    def _masked(self, sequences: DynamicRecords, epochs: Ints, records: Ints, width: int) -> Batch:
        """Pad sequences [R] to a width and mask them, with the mask of their epoch and record."""
        longest = int(sequences.lengths.max(initial=0))
        if longest > width:
            raise DataError(
                f"{self.folder} (a record of {longest} tokens): is longer than the {width} places that "
                "corpus.json names; rebuild the records"
            )
        tokens_RS = np.full((len(records), width), self._special.pad, np.int32)
        tokens_RS[np.arange(width) < sequences.lengths[:, None]] = sequences.tokens
        return mask_examples(
            tokens_RS,
            sequences.lengths,
            sequences.first_lengths,
            sequences.next_sentence_labels,
            self._keys(epochs, records),
            kinds=self._kinds,
            masking=self.masking,
            predictions=self.predictions,
        )

    def _keys(self, epochs: Ints, records: Ints) -> Keys:
        """Keys of masks: of a record one in each epoch, whether it is packed or not."""
        keys = np.zeros(len(records), np.uint64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            keys[chosen] = row_keys(records[chosen], "mask", self.seed, int(epoch))
        return keys

    def _most_sequences(self, asked: int | None, bins: int | None) -> int:
        """C of an example, of what is asked for and what the records are."""
        stored: int = self.corpus.get("max_sequences_per_pack", 1)
        if asked is not None and asked < 1:
            raise ConfigError(f"max_sequences_per_pack ({asked}): must be 1 or more; raise it")
        if self.is_packed and asked not in (None, stored):
            raise DataError(
                f"max_sequences_per_pack ({asked}): the records in {self.folder} are packs of up to "
                f"{stored} sequences; give {stored}, or the folder that they were packed from"
            )
        most = asked or stored
        if most > 1 and not self.is_packed and not self.is_dynamic:
            raise DataError(
                f"max_sequences_per_pack ({most}): the records in {self.folder} are static and not packed; "
                f"pack them first, with `bert pack {self.folder} OUT --max-sequences-per-pack {most}`"
            )
        if bins is not None and bins < 1:
            raise ConfigError(f"length_bins ({bins}): must be 1 or more; raise it")
        if bins is not None and most > 1:
            raise ConfigError(
                f"length_bins ({bins}): are for examples of one sequence, and these are packs of up to {most}; "
                "leave out one of the two"
            )
        if bins is not None and not self.is_dynamic:
            raise DataError(
                f"length_bins ({bins}): the records in {self.folder} are static and padded already; leave them "
                "out, or make the records with --masking dynamic"
            )
        return most

    def _pack(self) -> Packs | None:
        """Packs that are made on the fly."""
        most = self.max_sequences_per_pack
        if most == 1 or self.is_packed:
            return None
        self.fingerprint += f", {self.sequence_length} places for up to {most} sequences"
        return Packs(self._files.lengths(), self.sequence_length, most, self.seed)

    def _bin(self, bins: int | None) -> Bins | None:
        if bins is None:
            return None
        if self._files.records < self.examples_per_step:
            raise DataError(
                f"length_bins ({bins}): the {self._files.records} records in {self.folder} are fewer than a step's "
                f"{self.examples_per_step} examples, so no step could be made of them; leave the bins out"
            )
        self.fingerprint += f", {bins} bins for steps of {self.examples_per_step}"
        return Bins(
            self._files.lengths(), self.sequence_length, bins, self.examples_per_step, self.seed
        )

    def _check_lengths(self) -> None:
        stored, masked = self.corpus["sequence_length"], self.corpus["mask_tokens"]
        fits = self.sequence_length >= stored if self.is_dynamic else self.sequence_length == stored
        if not fits:
            raise DataError(
                f"max_seq_length ({self.sequence_length}): the records in {self.folder} have "
                f"{stored} places; give {stored}{' or more' if self.is_dynamic else ''}, or a "
                f"corpus made with --sequence-length {self.sequence_length}"
            )
        if self.predictions != masked and not self.is_dynamic:
            raise DataError(
                f"max_predictions_per_seq ({self.predictions}): the records in {self.folder} have "
                f"{masked} masked places; give {masked}, or a corpus made with "
                f"--mask-tokens {self.predictions}"
            )

    def _continuations(self) -> npt.NDArray[np.bool_] | None:
        """Which words continue another one [V], when whole words are masked here."""
        if not self.is_dynamic or self.masking.unit == "token":
            return None
        vocabulary = read_vocabulary(self.folder / "vocab.txt")
        if vocabulary.sha256 != self.corpus["vocab_sha256"]:
            raise DataError(
                f"{vocabulary.path}: is not the vocabulary that the records were made with, but "
                "says which pieces continue a word; bring it back"
            )
        return vocabulary.is_continuation
