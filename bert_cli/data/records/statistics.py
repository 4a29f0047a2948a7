"""What a sample of examples is like, counted block by block: lengths, masks, pairs, words, duplicates.

A `Tally` adds up whole numbers and hands out ratios of them; a ratio whose count is zero is None, and
nothing is guessed. An example is taken as the sequences that its `input_mask` numbers, so one that is
no pack is a pack of one. Tokens are first put back as they stood before masking.

Shapes: B examples, S places, P masked places, C sequences of an example, V words.
"""

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from bert_cli.data.records.sentence_pairs import SpecialIds
from bert_cli.errors import DataError

Batch = Mapping[str, npt.NDArray[Any]]
Ints = npt.NDArray[np.integer[Any]]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Words:
    """What a vocabulary says of its pieces."""

    special: SpecialIds
    is_continuation: Flags
    """[V] pieces that continue a word."""
    is_punctuation: Flags
    """[V] pieces without a letter or digit, as BERT parts them from words."""


def words_of(pieces: Sequence[str], special: SpecialIds) -> Words:
    """The kinds of the pieces of a vocabulary."""
    marks = [all(unicodedata.category(letter)[0] in "PS" for letter in piece) for piece in pieces]
    return Words(
        special,
        np.array([piece.startswith("##") for piece in pieces], np.bool_),
        np.array(marks, np.bool_),
    )


def unmasked(batch: Batch) -> npt.NDArray[np.int32]:
    """The tokens [B, S] as they stood before they were masked."""
    tokens_BS = np.array(batch["input_ids"], np.int32)
    row, column = np.nonzero(batch["masked_lm_weights"] > 0)
    tokens_BS[row, batch["masked_lm_positions"][row, column]] = batch["masked_lm_ids"][row, column]
    return tokens_BS


def labels_of(batch: Batch) -> tuple[Ints, Flags]:
    """Next-sentence labels [B, C], and which of them count."""
    labels_BC = batch["next_sentence_labels"].reshape(len(batch["input_ids"]), -1)
    weights = batch.get("next_sentence_weights")
    if weights is None:
        return labels_BC, np.ones(labels_BC.shape, np.bool_)
    return labels_BC, weights.reshape(labels_BC.shape) > 0


@dataclass
class Tally:
    """Counts over a sample; `add` takes the next block of examples."""

    words: Words
    examples: int = 0
    sequences: int = 0
    places: int = 0
    tokens: int = 0
    """Places that are no padding, [CLS] and [SEP] among them."""
    lengths: Counter[int] = field(default_factory=Counter)
    """Tokens of a sequence -> how many sequences have so many."""
    text_tokens: int = 0
    """Tokens without [CLS] and [SEP]."""
    unknown: int = 0
    """[UNK] among the text's tokens."""
    whole_words: int = 0
    """Words that are neither punctuation nor unknown."""
    word_pieces: int = 0
    """Pieces of those words."""
    predictions: int = 0
    masked: int = 0
    """Of the predictions, those that the model reads as [MASK]."""
    kept: int = 0
    full: int = 0
    """Examples that use all their places for predictions."""
    labelled: int = 0
    random_next: int = 0
    texts: Counter[bytes] = field(default_factory=Counter)
    """Hash of a sequence's tokens and segments -> how often it is there."""
    masked_texts: Counter[bytes] = field(default_factory=Counter)
    """The same with its masks."""

    def add(self, batch: Batch) -> None:
        """Count a block of examples. DataError for a token that the vocabulary does not have."""
        tokens_BS, sequence_BS = unmasked(batch), batch["input_mask"]
        self._refuse_strangers(batch["input_ids"], tokens_BS)
        rows, length = tokens_BS.shape
        self.examples += rows
        self.places += rows * length
        self._count_words(tokens_BS, sequence_BS)
        self._count_masks(batch)
        labels_BC, counts_BC = labels_of(batch)
        self.labelled += int(counts_BC.sum())
        self.random_next += int((counts_BC & (labels_BC == 1)).sum())
        for row in range(rows):
            self._count_sequences(batch, tokens_BS[row], row)

    def _refuse_strangers(self, *tokens: Ints) -> None:
        words = len(self.words.is_continuation)
        worst = max((int(one.max(initial=0)) for one in tokens), default=0)
        if worst >= words or min(int(one.min(initial=0)) for one in tokens) < 0:
            raise DataError(
                f"records (a token with id {worst}): the vocabulary has {words} words, so they were made "
                "with another one; index the folder again with the right --vocab"
            )

    def _count_words(self, tokens_BS: Ints, sequence_BS: Ints) -> None:
        special, words = self.words.special, self.words
        real_BS = sequence_BS > 0
        text_BS = real_BS & (tokens_BS != special.cls) & (tokens_BS != special.sep)
        unknown_BS = text_BS & (tokens_BS == special.unk)
        # What was cut off from its word begins one, as it does for the masks.
        follows_BS = text_BS & words.is_continuation[tokens_BS]
        follows_BS[:, 0] = False
        follows_BS[:, 1:] &= text_BS[:, :-1]
        marks_BS = text_BS & ~follows_BS & words.is_punctuation[tokens_BS]
        counted_BS = text_BS & ~unknown_BS & ~marks_BS
        self.tokens += int(real_BS.sum())
        self.text_tokens += int(text_BS.sum())
        self.unknown += int(unknown_BS.sum())
        self.word_pieces += int(counted_BS.sum())
        self.whole_words += int((counted_BS & ~follows_BS).sum())

    def _count_masks(self, batch: Batch) -> None:
        chosen_BP = batch["masked_lm_weights"] > 0
        read_BP = np.take_along_axis(batch["input_ids"], batch["masked_lm_positions"], axis=1)
        masked_BP = chosen_BP & (read_BP == self.words.special.mask)
        kept_BP = chosen_BP & ~masked_BP & (read_BP == batch["masked_lm_ids"])
        self.predictions += int(chosen_BP.sum())
        self.masked += int(masked_BP.sum())
        self.kept += int(kept_BP.sum())
        self.full += int(chosen_BP.all(axis=1).sum())

    def _count_sequences(self, batch: Batch, tokens_S: Ints, row: int) -> None:
        sequence_S, segments_S = batch["input_mask"][row], batch["segment_ids"][row]
        chosen = batch["masked_lm_positions"][row][batch["masked_lm_weights"][row] > 0]
        predicted_S = np.zeros(len(tokens_S), np.bool_)
        predicted_S[chosen] = True
        for number in range(1, int(sequence_S.max(initial=0)) + 1):
            places = np.flatnonzero(sequence_S == number)
            if not len(places):
                continue
            self.sequences += 1
            self.lengths[len(places)] += 1
            text = tokens_S[places].tobytes() + segments_S[places].astype(np.int8).tobytes()
            self.texts[_digest(text)] += 1
            masks = batch["input_ids"][row][places].tobytes() + predicted_S[places].tobytes()
            self.masked_texts[_digest(text + masks)] += 1

    def figures(self, records: int) -> dict[str, Any]:
        """All figures; `records` are those of the whole folder, of which this is a sample."""
        other = self.predictions - self.masked - self.kept
        return {
            "examples": self.examples,
            "sequences": self.sequences,
            "tokens": self.tokens,
            "sequences_per_example": ratio(self.sequences, self.examples),
            "real_token_share": ratio(self.tokens, self.places),
            "tokens_per_sequence": ratio(self.tokens, self.sequences),
            "predictions": self.predictions,
            "masked_share_of_tokens": ratio(self.predictions, self.tokens),
            "masks_shown_as_mask": ratio(self.masked, self.predictions),
            "masks_shown_as_another_word": ratio(other, self.predictions),
            "masks_shown_as_they_are": ratio(self.kept, self.predictions),
            "predictions_per_example": ratio(self.predictions, self.examples),
            "examples_with_all_predictions": ratio(self.full, self.examples),
            "next_sentence_labels": self.labelled,
            "random_next_share": ratio(self.random_next, self.labelled),
            "unknown_share_of_tokens": ratio(self.unknown, self.text_tokens),
            "pieces_per_word": ratio(self.word_pieces, self.whole_words),
            "repeated_texts": _repeated(self.texts),
            "repeated_texts_with_their_masks": _repeated(self.masked_texts),
            "equal_pairs": equal_pairs(self.texts),
            "equals_per_example": self._equals(records),
        }

    def _equals(self, records: int) -> float | None:
        """How many others of the folder an example's text equals, on average.

        A pair of equal texts is in the sample with the share of the pairs that are, so the mean over
        the folder is that over the sample, raised by the folder's size over the sample's.
        """
        if self.examples < 2:
            return None
        each = 2 * equal_pairs(self.texts) / self.sequences
        return each * (records - 1) / (self.examples - 1)


def equal_pairs(texts: Counter[bytes]) -> int:
    """Pairs of equal texts among the counted ones."""
    return sum(count * (count - 1) // 2 for count in texts.values())


def _repeated(texts: Counter[bytes]) -> int:
    """How many texts are there once more than they need to be."""
    return sum(texts.values()) - len(texts)


def ratio(part: int, whole: int) -> float | None:
    """Part over whole, None of nothing."""
    return part / whole if whole else None


def _digest(data: bytes) -> bytes:
    # 8 bytes: two of a million different texts are taken for equal once in 37 million samples.
    return hashlib.blake2b(data, digest_size=8).digest()
