"""Made-up examples in the shape of real ones, to try a machine or a layout without data.

Tokens are uniform noise, so there is nothing to learn but the label frequencies. Ids 0 to 4 stand for
the special tokens; of the others every fourth continues a word, where words or spans are masked. A
quarter of the examples is shorter than S and padded; a pack has one to C sequences that share its
places at random, and in a quarter of the packs leave some.

Fine-tuning has synthetic features: examples that are tokenized already, with labels of each head's kind.
"""

import numpy as np
import numpy.typing as npt

from bert_cli.config.data import Masking, packed_predictions
from bert_cli.data.finetune.features import Arrays, Features
from bert_cli.data.records.columns import FIELDS, PACKED_FIELDS, Batch, label_weights, pack_columns
from bert_cli.data.records.masking import TokenKinds, mask_examples
from bert_cli.data.records.random_bits import Keys, row_keys
from bert_cli.data.records.sentence_pairs import SpecialIds
from bert_cli.data.stream.permutation import GOLDEN, mix
from bert_cli.data.stream.prefetch import check_step, micro_batches, positions_of
from bert_cli.errors import ConfigError

BLOCK = 1024
"""Examples made at once."""
SHORTEST = 6
"""Tokens of a sequence at least."""
CONTINUES = 4
"""One of so many tokens continues a word, where whole words are masked."""
FIRST_WORD = 5
"""Ids below stand for special tokens."""
FIRST_TEXT = 12
"""Tokens of the first text of a synthetic pair, with [CLS] and [SEP]; fewer where S is short."""
SHORT_FRACTION = 0.25
"""Of synthetic features."""


class GeneratedReader:
    """Is asked as a `Reader` is."""

    has_next_sentences = True

    def __init__(
        self,
        *,
        vocab_size: int,
        seed: int,
        examples_per_step: int,
        micro_batch_size: int,
        sequence_length: int,
        predictions: int,
        max_sequences_per_pack: int = 1,
        masking: Masking | None = None,
        part: int = 0,
        parts: int = 1,
    ) -> None:
        """Make up examples, or packs of at most `max_sequences_per_pack` sequences.

        Raises ConfigError for a step that is no whole number of micro-batches in each part, and for
        too few words or places.
        """
        check_step(examples_per_step, micro_batch_size, parts)
        _check_sizes(vocab_size, sequence_length)
        self.most = max_sequences_per_pack
        if not 1 <= self.most <= sequence_length // SHORTEST:
            raise ConfigError(
                f"max_sequences_per_pack ({self.most}): a synthetic example of {sequence_length} positions "
                f"has room for 1 to {sequence_length // SHORTEST} sequences; give such a number"
            )
        self.vocab_size, self.seed = vocab_size, seed
        self.examples_per_step, self.micro_batch_size = examples_per_step, micro_batch_size
        self.part, self.parts = part, parts
        self.sequence_length, self.predictions = sequence_length, predictions
        self._masking = masking or Masking()
        self._is_continuation = np.arange(vocab_size) % CONTINUES == CONTINUES - 1
        self.masked_places = packed_predictions(
            sequence_length, self.most, predictions, self._masking.probability
        )
        """Places of the masked_lm columns."""
        packs = "" if self.most == 1 else f" N {self.most}"
        self.fingerprint = f"generated V {vocab_size} S {sequence_length} P {predictions}{packs}"
        self._special = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)

    def __getitem__(self, step: int) -> Batch:
        """Return the batch of a step, or its part of it, [M, B, ...]."""
        rows = self.rows(positions_of(step, self.examples_per_step, self.part, self.parts))
        return micro_batches(rows, self.micro_batch_size)

    def rows(self, positions: npt.ArrayLike) -> Batch:
        """Return the examples at these positions of the stream, [n, ...], in this order."""
        keys = row_keys(positions, "generated", self.seed)
        made_up = self._example if self.most == 1 else self._pack
        blocks = [made_up(keys[s : s + BLOCK]) for s in range(0, len(keys), BLOCK)]
        names = FIELDS if self.most == 1 else PACKED_FIELDS
        return {name: np.concatenate([block[name] for block in blocks]) for name in names}

    def _example(self, keys_B: Keys) -> Batch:
        length = self.sequence_length
        is_short_B, short_B = _numbers(keys_B, length, 2)
        lengths_B = np.where(is_short_B % 4 == 0, SHORTEST + short_B % (length - SHORTEST), length)
        columns = self._sequences(keys_B, lengths_B)
        return columns | {
            "next_sentence_weights": label_weights(columns["next_sentence_labels"], True)
        }

    def _pack(self, keys_B: Keys) -> Batch:
        """Cut the places of each pack at random into those of its sequences."""
        drawn = _numbers(keys_B, self.sequence_length, self.most + 2)
        counts_B = 1 + drawn[0] % self.most
        # Every sequence has its least, and a random part of what is left before it; the last of three
        # packs in four all of it.
        left_B = self.sequence_length - SHORTEST * counts_B
        lengths_BC = np.zeros((len(keys_B), self.most), np.int64)
        for number in range(self.most):
            there_B = number < counts_B
            more_B = drawn[2 + number] % (left_B + 1)
            is_last_B = (number == counts_B - 1) & (drawn[1] % 4 > 0)
            more_B = np.where(there_B, np.where(is_last_B, left_B, more_B), 0)
            lengths_BC[:, number] = np.where(there_B, SHORTEST + more_B, 0)
            left_B = left_B - more_B
        lengths_R = lengths_BC[lengths_BC > 0]
        keys_R = mix(
            np.repeat(keys_B, counts_B)
            + (np.nonzero(lengths_BC)[1].astype(np.uint64) + np.uint64(1)) * GOLDEN
        )
        return pack_columns(
            self._sequences(keys_R, lengths_R),
            lengths_R,
            counts_B,
            sequence_length=self.sequence_length,
            most=self.most,
            predictions=self.masked_places,
            next_sentence=True,
            pad=self._special.pad,
        )

    def _sequences(self, keys_B: Keys, lengths_B: npt.NDArray[np.int64]) -> Batch:
        """Sequences of these lengths [CLS] a [SEP] b [SEP], with at least a word on both sides."""
        length, special, first_word = self.sequence_length, self._special, np.uint64(FIRST_WORD)
        places = np.arange(length)
        steps = places.astype(np.uint64) * GOLDEN
        bits_BS = mix(keys_B[:, None] + steps) >> np.uint64(1)
        words_BS = first_word + bits_BS % (np.uint64(self.vocab_size) - first_word)
        _, _, cut_B, label_B = _numbers(keys_B, length, 4)
        first_lengths_B = 3 + cut_B % (lengths_B - 4)
        tokens_BS = np.where(places < lengths_B[:, None], words_BS.astype(np.int32), special.pad)
        tokens_BS[:, 0] = special.cls
        for ends_B in (first_lengths_B, lengths_B):
            tokens_BS[np.arange(len(keys_B)), ends_B - 1] = special.sep
        return mask_examples(
            tokens_BS,
            lengths_B,
            first_lengths_B,
            label_B % 2,
            keys_B,
            kinds=TokenKinds(special, self.vocab_size, self._is_continuation),
            masking=self._masking,
            predictions=self.predictions,
        )


def _numbers(keys_B: Keys, length: int, count: int) -> npt.NDArray[np.int64]:
    """What a row has one of, [count, B], drawn after the bits of its places."""
    steps = np.arange(length, length + count, dtype=np.uint64) * GOLDEN
    return (mix(keys_B[:, None] + steps) >> np.uint64(1)).astype(np.int64).T


def _check_sizes(vocab_size: int, sequence_length: int) -> None:
    if vocab_size < 8 or sequence_length < 8:
        raise ConfigError(
            f"generated_dataset (vocabulary {vocab_size}, {sequence_length} positions): synthetic "
            "examples need at least 8 of each"
        )


def generated_features(
    head: str, number: int, *, labels: int, vocab_size: int, sequence_length: int, seed: int
) -> Features:
    """Return synthetic examples for the block `head`: tokens of noise, and labels of the head's kind.

    Three in four have the full length S. `qa_head`: a span of at most eight tokens behind the
    question; `token_head`: a label for every token but the first and the last; `glue_head`: a label, or
    with one output a number from 0 to 5. Raises ConfigError for too small a vocabulary or length.
    """
    _check_sizes(vocab_size, sequence_length)
    first_text = min(FIRST_TEXT, sequence_length // 2 - 1)
    drawn = np.random.default_rng(seed)
    is_short = drawn.random(number) < SHORT_FRACTION
    # The first has the full length, so that every step of an epoch of one step is equally long.
    is_short[0] = False
    some = drawn.integers(2 * first_text, sequence_length, number)
    lengths = np.where(is_short, some, sequence_length)
    ends = np.cumsum(lengths)
    own = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    ids = drawn.integers(FIRST_WORD, vocab_size, ends[-1], np.int32)
    segments = (own >= first_text).astype(np.int8)
    if head == "qa_head":
        first = drawn.integers(first_text, lengths - 1)
        last = np.minimum(first + drawn.integers(0, 8, number), lengths - 1)
        spans = {"start_positions": first.astype(np.int32), "end_positions": last.astype(np.int32)}
        return Features(ids, segments, ends, spans)
    if head == "token_head":
        inside = (own > 0) & (own < np.repeat(lengths - 1, lengths))
        each = drawn.integers(0, labels, len(ids), np.int32) * inside
        by_place: Arrays = {"labels": each, "label_weights": inside.astype(np.float32)}
        return Features(ids, np.zeros_like(segments), ends, {}, by_place)
    one: Arrays = {"labels": drawn.integers(0, labels, number, np.int32)}
    if labels == 1:
        one = {"labels": drawn.uniform(0.0, 5.0, number).astype(np.float32)}
    return Features(ids, segments, ends, one)
