"""Synthetic examples in the shape of real ones, to try a machine or a layout without data.

Tokens are uniform noise, so a model can learn no more than the label frequencies. Ids 0 to 4 are the special tokens; of
the others every fourth continues a word. A quarter of the examples is shorter than S and padded; a pack has one to C
sequences of random lengths.
"""

import numpy as np
import numpy.typing as npt

from bert_cli.config.data import Masking, packed_predictions
from bert_cli.data.examples.reader import BLOCK, Batching, ExampleStream
from bert_cli.data.random import GOLDEN, Keys, mix, row_keys
from bert_cli.data.records.formats import FIELDS, PACKED_FIELDS, Batch, pack_columns
from bert_cli.data.records.masking import MaskRecipe, mask_examples
from bert_cli.data.tokens.tokenizer import SpecialIds
from bert_cli.errors import ConfigError

SHORTEST = 6  # tokens of a sequence
FIRST_WORD = 5  # ids below are special tokens


class SyntheticStream(ExampleStream):
    """Synthetic pre-training examples, or packs of at most `max_sequences_per_pack` sequences."""

    epoch_size = None
    folder = None
    has_next_sentences = True

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
        check_sizes(vocab_size, sequence_length)
        self.pack_size = max_sequences_per_pack
        longest = sequence_length // SHORTEST
        if not 1 <= self.pack_size <= longest:
            problem = f"{sequence_length} positions hold 1 to {longest} synthetic sequences"
            where = f"max_sequences_per_pack ({self.pack_size})"
            raise ConfigError(where, problem, f"use a number from 1 to {longest}")
        self.batching = batching
        self.seed = seed
        self.sequence_length = sequence_length
        special = SpecialIds(0, 1, 2, 3, 4)
        continues = np.arange(vocab_size) % 4 == 3
        self._masks = MaskRecipe(special, vocab_size, masking or Masking(), predictions, continues)
        packs = "" if self.pack_size == 1 else f" N {self.pack_size}"
        self.fingerprint = f"generated V {vocab_size} S {sequence_length} P {predictions}{packs}"
        self.sequences_per_example = 1.0
        if self.pack_size > 1:
            counts = self.rows(np.arange(1024))["input_mask"].max(axis=1)
            self.sequences_per_example = float(counts.mean())

    def rows(self, sample_indices: npt.ArrayLike, probability: float | None = None) -> Batch:
        """Return the examples at sample indices [n], in this order, as columns [n, ...]."""
        keys = row_keys(sample_indices, "generated", self.seed)
        make = self._example if self.pack_size == 1 else self._pack
        masks = self._masks.with_probability(probability)
        blocks = [make(keys[s : s + BLOCK], masks) for s in range(0, len(keys), BLOCK)]
        names = FIELDS if self.pack_size == 1 else PACKED_FIELDS
        return {name: np.concatenate([block[name] for block in blocks]) for name in names}

    def _example(self, keys_B: Keys, masks: MaskRecipe) -> Batch:
        length = self.sequence_length
        is_short_B, short_B = _numbers(keys_B, length, 2)
        lengths_B = np.where(is_short_B % 4 == 0, SHORTEST + short_B % (length - SHORTEST), length)
        return self._sequences(keys_B, lengths_B, masks)

    def _pack(self, keys_B: Keys, masks: MaskRecipe) -> Batch:
        """Divide the positions of each pack among its sequences at random."""
        length = self.sequence_length
        drawn = _numbers(keys_B, length, self.pack_size + 2)
        counts_B = 1 + drawn[0] % self.pack_size
        # Every sequence has SHORTEST tokens and a random part of the free positions; in three packs of
        # four the last sequence has all that remain.
        left_B = length - SHORTEST * counts_B
        lengths_BC = np.zeros((len(keys_B), self.pack_size), np.int64)
        for number in range(self.pack_size):
            is_used_B = number < counts_B
            more_B = drawn[2 + number] % (left_B + 1)
            is_last_B = (number == counts_B - 1) & (drawn[1] % 4 > 0)
            more_B = np.where(is_used_B, np.where(is_last_B, left_B, more_B), 0)
            lengths_BC[:, number] = np.where(is_used_B, SHORTEST + more_B, 0)
            left_B = left_B - more_B
        lengths_R = lengths_BC[lengths_BC > 0]
        slots_R = np.nonzero(lengths_BC)[1].astype(np.uint64) + np.uint64(1)
        keys_R = mix(np.repeat(keys_B, counts_B) + slots_R * GOLDEN)
        probability = self._masks.masking.highest_probability
        predictions = packed_predictions(length, self.pack_size, masks.predictions, probability)
        sequences = self._sequences(keys_R, lengths_R, masks)
        sizes = (length, predictions, self.pack_size)
        return pack_columns(sequences, counts_B, sizes, masks.special.pad)

    def _sequences(
        self, keys_B: Keys, lengths_B: npt.NDArray[np.int64], masks: MaskRecipe
    ) -> Batch:
        """Return sequences [CLS] a [SEP] b [SEP] of these lengths, with at least one token in a and b."""
        first_word = np.uint64(FIRST_WORD)
        length = self.sequence_length
        special = masks.special
        positions = np.arange(length)
        steps = positions.astype(np.uint64) * GOLDEN
        bits_BS = mix(keys_B[:, None] + steps) >> np.uint64(1)
        words_BS = first_word + bits_BS % (np.uint64(masks.vocab_size) - first_word)
        _, _, border_B, label_B = _numbers(keys_B, length, 4)
        first_lengths_B = 3 + border_B % (lengths_B - 4)
        tokens_BS = np.where(positions < lengths_B[:, None], words_BS.astype(np.int32), special.pad)
        tokens_BS[:, 0] = special.cls
        for ends_B in (first_lengths_B, lengths_B):
            tokens_BS[np.arange(len(keys_B)), ends_B - 1] = special.sep
        columns = mask_examples(tokens_BS, lengths_B, first_lengths_B, label_B % 2, keys_B, masks)
        return columns | {"next_sentence_weights": np.ones(len(keys_B), np.float32)}


def _numbers(keys_B: Keys, length: int, count: int) -> npt.NDArray[np.int64]:
    """Return random numbers of each row [count, B], drawn after the bits of its positions."""
    steps = np.arange(length, length + count, dtype=np.uint64) * GOLDEN
    return (mix(keys_B[:, None] + steps) >> np.uint64(1)).astype(np.int64).T


def check_sizes(vocab_size: int, sequence_length: int) -> None:
    """Raise ConfigError for sizes that leave no room for the special tokens and a word."""
    if vocab_size < 8 or sequence_length < 8:
        where = f"generated_dataset (vocabulary {vocab_size}, {sequence_length} positions)"
        raise ConfigError(where, "needs at least 8 of each", "raise the smaller one")
