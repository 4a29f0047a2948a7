"""The examples of a folder of records by number, masked and packed when they are read.

Static records have their masks; dynamic ones are masked by (seed, epoch, record), each sequence as if it were alone, so
that packing changes no mask.

Shapes: n examples, R sequences, C maximum sequences of a pack, S sequence length, P masked positions.
"""

from dataclasses import replace

import numpy as np

from bert_cli.arrays import Ints, Ints64
from bert_cli.data.random import permute, row_keys
from bert_cli.data.records import formats
from bert_cli.data.records.corpus import RecordFiles
from bert_cli.data.records.formats import Batch
from bert_cli.data.records.masking import MaskRecipe, mask_examples
from bert_cli.data.tokens.notation import SpecialIds
from bert_cli.errors import DataError
from bert_cli.facts.masking import Masking, packed_predictions


class Records:
    """The examples of records."""

    def __init__(
        self,
        files: RecordFiles,
        *,
        seed: int,
        sequence_length: int | None = None,
        predictions: int | None = None,
        masking: Masking | None = None,
        max_sequences_per_pack: int = 1,
    ) -> None:
        """Read the records of `files`; an argument that is None takes its value from them.

        Dynamic records can be read with any P (of a sequence), with a longer S, and up to `max_sequences_per_pack` in
        an example. Raises DataError for lengths, packs or files that do not fit.
        """
        corpus = files.corpus
        self.files = files
        self.folder = files.folder
        self.corpus = corpus
        self.seed = seed
        self.is_dynamic: bool = corpus["masking"] == "dynamic"
        self.sequence_length: int = sequence_length or corpus["sequence_length"]
        self.predictions: int = predictions or corpus["mask_tokens"]
        """P of a sequence."""
        self.max_sequences_per_pack = max_sequences_per_pack
        self._check_sizes()
        self.fingerprint = str(corpus["fingerprint"])
        """Changes with the examples and with how they are packed."""
        self.has_next_sentences: bool = corpus.get("next_sentence", True)
        self.packs: Packs | None = None
        """Only for records that are packed when they are read."""
        if not self.is_dynamic:
            return
        masking = masking or Masking()
        special = SpecialIds(**corpus["special_ids"])
        continuations = None
        if masking.unit == "word":
            continuations = files.continuations()
        size = corpus["vocab_size"]
        self._masks = MaskRecipe(special, size, masking, self.predictions, continuations)
        if max_sequences_per_pack > 1:
            packs = f"{self.sequence_length} places for up to {max_sequences_per_pack} sequences"
            self.fingerprint += f", {packs}"
            self.packs = Packs(files.lengths(), self.sequence_length, max_sequences_per_pack, seed)

    def __len__(self) -> int:
        """Return the number of examples of an epoch."""
        if self.packs is None:
            return self.files.records
        return len(self.packs)

    @property
    def sequences_per_example(self) -> float:
        """Return the mean number of sequences in an example of an epoch, which has each sequence once."""
        return self.files.records / len(self)

    def examples(self, epochs: Ints, numbers: Ints, probability: float | None) -> Batch:
        """Return examples by their epochs [n] and numbers [n], as columns.

        For dynamic records, `probability` replaces the masking probability.
        """
        if not self.is_dynamic:
            columns = self.files.static(numbers)
            return {name: columns[name] for name in formats.FIELDS}
        recipe = self._masks
        if probability is not None:
            masking = recipe.masking.model_copy(update={"probability": probability})
            recipe = replace(recipe, masking=masking)
        if self.packs is None:
            columns = self._masked(epochs, numbers, recipe)
            return {name: columns[name] for name in formats.FIELDS}
        records_nC = self.packs.records(numbers, epochs)
        is_record_nC = records_nC >= 0
        counts = is_record_nC.sum(axis=1)
        columns = self._masked(np.repeat(epochs, counts), records_nC[is_record_nC], recipe)
        length = self.sequence_length
        pack_size = self.max_sequences_per_pack
        probability = self._masks.masking.highest_probability
        predictions = packed_predictions(length, pack_size, self.predictions, probability)
        sizes = (length, predictions, pack_size)
        return formats.pack_columns(columns, counts, sizes, recipe.special.pad)

    def _masked(self, epochs_R: Ints, numbers_R: Ints, recipe: MaskRecipe) -> Batch:
        """Return dynamic records [R], masked as in their epochs [R]."""
        length = self.sequence_length
        sequences = self.files.dynamic(numbers_R)
        tokens_RS = np.full((len(numbers_R), length), recipe.special.pad, np.int32)
        tokens_RS[np.arange(length) < sequences.lengths[:, None]] = sequences.tokens
        # By the number of the record, so that packing and the size of a micro-batch change no mask.
        keys_R = np.zeros(len(numbers_R), np.uint64)
        for epoch in np.unique(epochs_R):
            chosen = epochs_R == epoch
            keys_R[chosen] = row_keys(numbers_R[chosen], "mask", self.seed, int(epoch))
        columns = mask_examples(tokens_RS, *sequences[1:], keys_R, recipe)
        weight = np.float32(self.has_next_sentences)
        columns["next_sentence_weights"] = np.full(len(numbers_R), weight)
        return columns

    def _check_sizes(self) -> None:
        """Raise DataError for sizes that these records cannot be read with."""
        corpus = self.corpus
        length = self.sequence_length
        positions: int = corpus["sequence_length"]
        # Setting, its value, the stored value, the option that changes it, and whether dynamic records allow it.
        sizes = (
            ("max_seq_length", length, positions, f"--sequence-length {length}", length > positions),
            ("max_predictions_per_seq", self.predictions, corpus["mask_tokens"], f"--mask-tokens {self.predictions}",
             True),
            ("max_sequences_per_pack", self.max_sequences_per_pack, 1, "--masking dynamic", True),
        )  # fmt: skip
        for name, value, stored, option, fits in sizes:
            if value != stored and not (self.is_dynamic and fits):
                raise DataError(
                    f"{name} ({value})",
                    f"the {corpus['masking']} records in {self.folder} have {stored}",
                    f"use {stored}, or records made with `bert tokenize {option}`",
                )


def shortest_pack_first(histogram: Ints, sequences: int) -> tuple[Ints64, Ints64]:
    """Pack a histogram of lengths [S + 1] into packs of S positions and at most C sequences.

    Returns combinations of lengths [K, C], the longest first and then zeros, and the packs [K] of each. From the
    longest to the shortest, each sequence goes into the open pack with the most free positions, or into a new one.
    Packs of equal lengths are counted together, so the work grows with S and not with the number of sequences.
    """
    longest = len(histogram) - 1
    done: dict[tuple[int, ...], int] = {}
    # Open packs by their free positions: their lengths -> the number of such packs.
    open_packs: list[dict[tuple[int, ...], int]] = [{} for _ in range(longest + 1)]

    def put(lengths: tuple[int, ...], count: int) -> None:
        free = longest - sum(lengths)
        if len(lengths) == sequences:
            packs = done
        else:
            packs = open_packs[free]
        packs[lengths] = packs.get(lengths, 0) + count

    # Long sequences first: short ones fill what they leave.
    for length in range(longest, 0, -1):
        left = int(histogram[length])
        free = longest
        while left and free >= length:
            if not open_packs[free]:
                free -= 1
                continue
            # Any pack with so much room will do: they differ only in what they hold.
            lengths, count = open_packs[free].popitem()
            used = min(count, left)
            if count > used:
                open_packs[free][lengths] = count - used
            put((*lengths, length), used)
            left -= used
        # The rest goes into new packs; a new pack has the most free positions until it is full.
        each = min(longest // length, sequences)
        full, rest = divmod(left, each)
        for copies, count in ((each, full), (rest, 1)):
            if copies and count:
                put((length,) * copies, count)
    for packs in open_packs:
        for lengths, count in packs.items():
            done[lengths] = done.get(lengths, 0) + count
    square = np.zeros((len(done), sequences), np.int64)
    for row, lengths in enumerate(done):
        square[row, : len(lengths)] = lengths
    return square, np.array(list(done.values()), np.int64)


class Packs:
    """Record numbers by pack number, in any epoch.

    A pack is a combination of lengths, and each combination is used several times (shortest-pack-first histogram
    packing: Krell et al. 2021, "Efficient Sequence Packing without Cross-contamination", section 3.1). The records of a
    length are assigned by a permutation drawn by (seed, epoch, length), so an epoch has each record in exactly one
    pack.
    """

    def __init__(self, lengths: Ints, sequence_length: int, sequences: int, seed: int) -> None:
        """Pack records of these lengths [records], each from 1 to S, at most C together."""
        longest = sequence_length
        assert len(lengths) == 0 or 0 < int(lengths.min()) <= int(lengths.max()) <= longest <= 65535
        histogram: Ints64 = np.bincount(lengths, minlength=longest + 1)
        # A stable sort of 16-bit numbers counts them instead of comparing.
        by_length = np.argsort(lengths.astype(np.uint16), kind="stable")
        # Half of the memory where 32 bits suffice.
        number_type = np.uint32 if len(lengths) < 1 << 32 else np.int64
        self._by_length = by_length.astype(number_type)
        self._starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(histogram)))
        """[S + 2] where the records of a length begin in `_by_length`."""
        self._seed = int(row_keys(0, "pack", seed)[0])
        self._lengths, self._counts = shortest_pack_first(histogram, sequences)
        self._ends = np.cumsum(self._counts)
        # For each combination and slot, the first of the records of its length that the slot takes:
        # the k-th pack of the combination takes the k-th from there.
        self._first = np.zeros_like(self._lengths)
        taken = np.zeros(longest + 1, np.int64)
        for row, count in enumerate(self._counts.tolist()):
            for slot, length in enumerate(self._lengths[row].tolist()):
                self._first[row, slot] = taken[length]
                taken[length] += count

    def __len__(self) -> int:
        """Return the number of packs of an epoch."""
        return int(self._counts.sum())

    def records(self, packs: Ints, epochs: Ints) -> Ints64:
        """Return the record numbers [n, C] of packs [n] in epochs [n], longest first, then -1."""
        combinations = np.searchsorted(self._ends, packs, side="right")
        within = packs - (self._ends - self._counts)[combinations]
        lengths = self._lengths[combinations]
        is_used = lengths > 0
        used = lengths[is_used]
        records = np.full(lengths.shape, -1, np.int64)
        slots = (self._first[combinations] + within[:, None])[is_used]
        epochs = np.broadcast_to(epochs[:, None], lengths.shape)[is_used]
        firsts = self._starts[used]
        groups = epochs * np.int64(65536) + used
        drawn = permute(slots, self._starts[used + 1] - firsts, self._seed, groups)
        records[is_used] = self._by_length[firsts + drawn]
        return records
