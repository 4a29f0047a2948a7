"""Statistics of a sample of examples, counted block by block: lengths, masks, pairs, words, duplicates.

`SampleStatistics` adds up integers and returns ratios of them; a ratio without a denominator is None. An example is
counted as the sequences that its `input_mask` numbers, so an unpacked one is a pack of one. Tokens are unmasked first.

Shapes: B examples, S positions, P masked positions, C sequences of an example, V vocabulary size.
"""

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from bert_cli.data.records.vocab import Vocabulary
from bert_cli.errors import DataError

Batch = Mapping[str, npt.NDArray[Any]]
Ints = npt.NDArray[np.integer[Any]]
Flags = npt.NDArray[np.bool_]


def unmasked(batch: Batch) -> npt.NDArray[np.int32]:
    """Return the tokens [B, S] before masking."""
    tokens_BS = np.array(batch["input_ids"], np.int32)
    row, column = np.nonzero(batch["masked_lm_weights"] > 0)
    tokens_BS[row, batch["masked_lm_positions"][row, column]] = batch["masked_lm_ids"][row, column]
    return tokens_BS


def labels_of(batch: Batch) -> tuple[Ints, Flags]:
    """Return next-sentence labels [B, C], and which of them count."""
    labels_BC = batch["next_sentence_labels"].reshape(len(batch["input_ids"]), -1)
    weights = batch.get("next_sentence_weights")
    if weights is None:
        return labels_BC, np.ones(labels_BC.shape, np.bool_)
    return labels_BC, weights.reshape(labels_BC.shape) > 0


class SampleStatistics:
    """Counts over a sample; `add` counts the next block of examples."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._special = vocabulary.special
        self._is_continuation_V = vocabulary.is_continuation
        # Tokens without a letter or digit, which BERT separates from words.
        self._is_punctuation_V = np.array(
            [all(unicodedata.category(c)[0] in "PS" for c in piece) for piece in vocabulary.pieces]
        )
        self.counts: Counter[str] = Counter()
        self.lengths: Counter[int] = Counter()
        """Sequences by their number of tokens."""
        self._texts: Counter[bytes] = Counter()
        """Sequences by the hash of their tokens and segments."""
        self._masked_texts: Counter[bytes] = Counter()
        """The same with their masks."""

    def add(self, batch: Batch) -> None:
        """Count a block of examples. DataError for a token that the vocabulary does not have."""
        tokens_BS = unmasked(batch)
        self._check_ids(batch["input_ids"], tokens_BS)
        labels_BC, counts_BC = labels_of(batch)
        self.counts.update(
            examples=len(tokens_BS),
            positions=tokens_BS.size,
            labels=int(counts_BC.sum()),
            random_labels=int((counts_BC & (labels_BC == 1)).sum()),
        )
        self._count_words(tokens_BS, batch["input_mask"] > 0)
        self._count_masks(batch)
        for row in range(len(tokens_BS)):
            self._count_sequences(batch, tokens_BS[row], row)

    def _check_ids(self, *tokens: Ints) -> None:
        size = len(self._is_continuation_V)
        largest = max((int(ids.max(initial=0)) for ids in tokens), default=0)
        if largest >= size or min(int(ids.min(initial=0)) for ids in tokens) < 0:
            raise DataError(
                f"records (a token with id {largest})",
                f"the vocabulary has {size} tokens, so they were made with another one",
                "index the folder again with the right --vocab",
            )

    def _count_words(self, tokens_BS: Ints, is_token_BS: Flags) -> None:
        special = self._special
        is_text_BS = is_token_BS & (tokens_BS != special.cls) & (tokens_BS != special.sep)
        is_unknown_BS = is_text_BS & (tokens_BS == special.unk)
        # A continuation whose first piece was cut off begins a word, as it does for masks.
        continues_BS = is_text_BS & self._is_continuation_V[tokens_BS]
        continues_BS[:, 0] = False
        continues_BS[:, 1:] &= is_text_BS[:, :-1]
        is_punctuation_BS = is_text_BS & ~continues_BS & self._is_punctuation_V[tokens_BS]
        is_piece_BS = is_text_BS & ~is_unknown_BS & ~is_punctuation_BS
        self.counts.update(
            tokens=int(is_token_BS.sum()),
            text_tokens=int(is_text_BS.sum()),
            unknown=int(is_unknown_BS.sum()),
            word_pieces=int(is_piece_BS.sum()),
            words=int((is_piece_BS & ~continues_BS).sum()),
        )

    def _count_masks(self, batch: Batch) -> None:
        is_predicted_BP = batch["masked_lm_weights"] > 0
        shown_BP = np.take_along_axis(batch["input_ids"], batch["masked_lm_positions"], axis=1)
        is_mask_BP = is_predicted_BP & (shown_BP == self._special.mask)
        is_same_BP = is_predicted_BP & ~is_mask_BP & (shown_BP == batch["masked_lm_ids"])
        self.counts.update(
            predictions=int(is_predicted_BP.sum()),
            masked=int(is_mask_BP.sum()),
            unchanged=int(is_same_BP.sum()),
            full=int(is_predicted_BP.all(axis=1).sum()),
        )

    def _count_sequences(self, batch: Batch, tokens_S: Ints, row: int) -> None:
        sequence_S, segments_S = batch["input_mask"][row], batch["segment_ids"][row]
        is_predicted_S = np.zeros(len(tokens_S), np.bool_)
        is_predicted_S[batch["masked_lm_positions"][row][batch["masked_lm_weights"][row] > 0]] = (
            True
        )
        for number in range(1, int(sequence_S.max(initial=0)) + 1):
            positions = np.flatnonzero(sequence_S == number)
            if not len(positions):
                continue
            self.counts["sequences"] += 1
            self.lengths[len(positions)] += 1
            text = tokens_S[positions].tobytes() + segments_S[positions].astype(np.int8).tobytes()
            self._texts[_digest(text)] += 1
            masks = (
                batch["input_ids"][row][positions].tobytes() + is_predicted_S[positions].tobytes()
            )
            self._masked_texts[_digest(text + masks)] += 1

    def report(self, records: int) -> dict[str, Any]:
        """Return all statistics; `records` is the number of records in the folder, of which this is a sample."""
        counts = self.counts

        def ratio(part: str, of: str) -> float | None:
            return counts[part] / counts[of] if counts[of] else None

        counts["replaced"] = counts["predictions"] - counts["masked"] - counts["unchanged"]
        pairs = sum(count * (count - 1) // 2 for count in self._texts.values())
        duplicates = None
        if counts["examples"] > 1:
            # The sample has a pair of equal texts as often as it has any pair of examples.
            duplicates = 2 * pairs / counts["sequences"] * (records - 1) / (counts["examples"] - 1)
        return {
            "examples": counts["examples"],
            "sequences": counts["sequences"],
            "tokens": counts["tokens"],
            "sequences_per_example": ratio("sequences", "examples"),
            "real_token_share": ratio("tokens", "positions"),
            "tokens_per_sequence": ratio("tokens", "sequences"),
            "predictions": counts["predictions"],
            "masked_share_of_tokens": ratio("predictions", "tokens"),
            "masks_shown_as_mask": ratio("masked", "predictions"),
            "masks_shown_as_another_word": ratio("replaced", "predictions"),
            "masks_shown_as_they_are": ratio("unchanged", "predictions"),
            "predictions_per_example": ratio("predictions", "examples"),
            "examples_with_all_predictions": ratio("full", "examples"),
            "next_sentence_labels": counts["labels"],
            "random_next_share": ratio("random_labels", "labels"),
            "unknown_share_of_tokens": ratio("unknown", "text_tokens"),
            "pieces_per_word": ratio("word_pieces", "words"),
            "repeated_texts": self._texts.total() - len(self._texts),
            "repeated_texts_with_their_masks": self._masked_texts.total() - len(self._masked_texts),
            "equal_pairs": pairs,
            "equals_per_example": duplicates,
        }


def _digest(data: bytes) -> bytes:
    # 8 bytes: two of a million different texts have the same hash once in 37 million samples.
    return hashlib.blake2b(data, digest_size=8).digest()
