"""Synthetic examples in the shape of real ones, to try a machine or a layout without data.

They are dynamic records that are drawn when they are read, and are masked and packed like others. Tokens are uniform
noise, so a model can learn no more than the label frequencies. Ids 0 to 4 are the special tokens; of the others every
fourth continues a word.
"""

from pathlib import Path

import numpy as np

from bert_cli.arrays import Bools, Ints, Ints64, UInts16
from bert_cli.data.examples.reader import Batching, ExampleStream
from bert_cli.data.examples.source import Records
from bert_cli.data.random import GOLDEN, bits, row_keys
from bert_cli.data.records.corpus import RecordFiles
from bert_cli.data.records.formats import DynamicRecords
from bert_cli.errors import ConfigError
from bert_cli.facts.masking import Masking

# A step of BERT's largest batch, 65,536 examples, still has only different ones.
RECORDS = 1 << 17
SHORTEST = 6  # tokens of a sequence
FIRST_WORD = 5  # ids below are special tokens
SPECIAL_IDS = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}


class SyntheticFiles(RecordFiles):
    """RECORDS records; three in four are as long as possible, unless `pack_size` of them are packed into an example."""

    def __init__(self, vocab_size: int, sequence_length: int, seed: int, pack_size: int) -> None:
        """Raise ConfigError for too small a vocabulary or too few positions."""
        check_sizes(vocab_size, sequence_length)
        self.folder = Path()
        self.records = RECORDS
        self.corpus = {
            "masking": "dynamic",
            "sequence_length": sequence_length,
            "mask_tokens": sequence_length,
            "vocab_size": vocab_size,
            "special_ids": SPECIAL_IDS,
            "fingerprint": f"generated V {vocab_size} S {sequence_length}",
        }
        self._seed = seed
        self._pack_size = pack_size

    def continuations(self) -> Bools:
        """Return whether each token of the vocabulary [V] continues a word."""
        return np.arange(self.corpus["vocab_size"]) % 4 == 3

    def lengths(self) -> UInts16:
        """Return the number of tokens of each record."""
        return self._lengths_of(np.arange(RECORDS)).astype(np.uint16)

    def dynamic(self, records: Ints) -> DynamicRecords:
        """Return records [CLS] a [SEP] b [SEP] by their numbers [n], with at least one token in a and b."""
        positions = np.arange(self.corpus["sequence_length"])
        keys_B = row_keys(records, "generated", self._seed)
        drawn_BS = (bits(keys_B, GOLDEN, positions) >> np.uint64(1)).astype(np.int64)
        tokens_BS = FIRST_WORD + drawn_BS % (self.corpus["vocab_size"] - FIRST_WORD)
        lengths_B = self._lengths_of(records)
        first_lengths_B = 3 + self._drawn(records, "border") % (lengths_B - 4)
        tokens_BS[:, 0] = SPECIAL_IDS["cls"]
        for ends_B in (first_lengths_B, lengths_B):
            tokens_BS[np.arange(len(records)), ends_B - 1] = SPECIAL_IDS["sep"]
        labels_B = self._drawn(records, "label") % 2
        tokens = tokens_BS[positions < lengths_B[:, None]]
        columns = (tokens, lengths_B, first_lengths_B, labels_B)
        return DynamicRecords(*(column.astype(np.int32) for column in columns))

    def _lengths_of(self, records: Ints) -> Ints64:
        drawn = self._drawn(records, "length")
        length: int = self.corpus["sequence_length"]
        # On average, so many sequences fill a pack.
        longest = max(SHORTEST, min(length, 2 * length // self._pack_size))
        shorter = SHORTEST + (drawn >> 2) % (longest - SHORTEST + 1)
        return np.where((drawn % 4 == 0) | (self._pack_size > 1), shorter, longest)

    def _drawn(self, records: Ints, purpose: str) -> Ints64:
        return (row_keys(records, purpose, self._seed) >> np.uint64(1)).astype(np.int64)


class SyntheticStream(ExampleStream):
    """Synthetic pre-training examples, or packs of at most `max_sequences_per_pack` sequences."""

    def __init__(
        self,
        batching: Batching,
        *,
        seed: int,
        vocab_size: int,
        sequence_length: int,
        predictions: int,
        max_sequences_per_pack: int = 1,
        masking: Masking | None = None,
    ) -> None:
        """Raise ConfigError for too small a vocabulary or too few positions."""
        source = Records(
            SyntheticFiles(vocab_size, sequence_length, seed, max_sequences_per_pack),
            seed=seed,
            predictions=predictions,
            masking=masking,
            max_sequences_per_pack=max_sequences_per_pack,
        )
        super().__init__([source], batching)
        self.folder = self.epoch_size = None


def check_sizes(vocab_size: int, sequence_length: int) -> None:
    """Raise ConfigError for sizes that leave no room for the special tokens and a word."""
    if vocab_size < 8 or sequence_length < 8:
        where = f"generated_dataset (vocabulary {vocab_size}, {sequence_length} positions)"
        raise ConfigError(where, "needs at least 8 of each", "raise the smaller one")
