"""Statistics and warnings of a sample of records, and an example as text.

Shapes: B examples, S positions, P masked positions, V vocabulary size.
"""

import json
import math
import unicodedata
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bert_cli.data.examples.repeats import MAX_REPEATS, WITHOUT_COPIES, N
from bert_cli.data.records.formats import Batch
from bert_cli.data.records.masking import continuations, unmasked
from bert_cli.data.tokens.tokenizer import Vocabulary
from bert_cli.errors import printable
from bert_cli.files import JSONObject

BARS = 16
BAR_WIDTH = 50
# Statistic of a sample -> the count, and the count that it is a fraction of.
STATISTICS: dict[str, tuple[str, str | None]] = {
    "examples": ("examples", None),
    "tokens": ("tokens", None),
    "real_token_fraction": ("tokens", "positions"),
    "tokens_per_example": ("tokens", "examples"),
    "predictions": ("predictions", None),
    "masked_token_fraction": ("predictions", "tokens"),
    "masks_shown_as_mask": ("masked", "predictions"),
    "masks_shown_as_another_word": ("replaced", "predictions"),
    "masks_shown_as_they_are": ("unchanged", "predictions"),
    "predictions_per_example": ("predictions", "examples"),
    "examples_with_all_predictions": ("full", "examples"),
    "next_sentence_labels": ("labels", None),
    "random_next_fraction": ("random_labels", "labels"),
    "unknown_token_fraction": ("unknown", "text_tokens"),
    "pieces_per_word": ("word_pieces", "words"),
}


class Check(NamedTuple):
    """A range of a statistic without a warning, and the words of the warning."""

    least: float
    highest: float
    counted: str
    """The statistic whose minimum is `enough`; below it a deviation may be chance."""
    enough: int
    problem: str
    remedy: str


class Finding(NamedTuple):
    """A property of the records that is bad for training."""

    what: str
    number: float
    remedy: str


CHECKS = {
    name: Check(**row)
    for name, row in json.loads(Path(__file__).with_suffix(".json").read_bytes()).items()
}
CHECKS["repeats"] = Check(
    *(0.0, MAX_REPEATS, "records", 1),
    f"a sequence of {N} tokens recurs {{:.2f}} times on average",
    WITHOUT_COPIES,
)


# --- statistics


class SampleStatistics:
    """Counts over a sample of unmasked examples; a ratio without a denominator is None."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._special = vocabulary.special
        self._is_continuation_V = vocabulary.is_continuation
        texts = [vocabulary.notation.shown(piece).strip() for piece in vocabulary.pieces]
        # Tokens without a letter or digit, which BERT separates from words.
        self._is_punctuation_V = np.array(
            [text != "" and all(unicodedata.category(c)[0] in "PS" for c in text) for text in texts]
        )
        self.counts: Counter[str] = Counter()
        self.lengths: Counter[int] = Counter()

    def add(self, batch: Batch) -> None:
        """Count a block of examples."""
        special = self._special
        tokens_BS = unmasked(batch)
        is_token_BS = batch["input_mask"] > 0
        is_text_BS = is_token_BS & (tokens_BS != special.cls) & (tokens_BS != special.sep)
        is_unknown_BS = is_text_BS & (tokens_BS == special.unk)
        continues_BS = continuations(tokens_BS, is_text_BS, self._is_continuation_V)
        is_punctuation_BS = is_text_BS & ~continues_BS & self._is_punctuation_V[tokens_BS]
        is_piece_BS = is_text_BS & ~is_unknown_BS & ~is_punctuation_BS
        is_predicted_BP = batch["masked_lm_weights"] > 0
        shown_BP = np.take_along_axis(batch["input_ids"], batch["masked_lm_positions"], axis=1)
        is_mask_BP = is_predicted_BP & (shown_BP == special.mask)
        counts_B = batch["next_sentence_weights"] > 0
        flags = {
            "labels": counts_B,
            "random_labels": counts_B & (batch["next_sentence_labels"] == 1),
            "tokens": is_token_BS,
            "text_tokens": is_text_BS,
            "unknown": is_unknown_BS,
            "word_pieces": is_piece_BS,
            "words": is_piece_BS & ~continues_BS,
            "predictions": is_predicted_BP,
            "masked": is_mask_BP,
            "unchanged": is_predicted_BP & ~is_mask_BP & (shown_BP == batch["masked_lm_ids"]),
            "full": is_predicted_BP.all(axis=1),
        }
        self.counts.update({name: int(counted.sum()) for name, counted in flags.items()})
        self.counts.update(examples=len(tokens_BS), positions=tokens_BS.size)
        self.lengths.update(is_token_BS.sum(axis=1).tolist())

    def report(self) -> JSONObject:
        """Return all statistics of the sample."""
        counts = self.counts
        counts["replaced"] = counts["predictions"] - counts["masked"] - counts["unchanged"]
        report: JSONObject = {}
        for name, (part, total) in STATISTICS.items():
            report[name] = counts[part]
            if total is not None:
                report[name] = None
                if counts[total]:
                    report[name] = counts[part] / counts[total]
        return report


def find_warnings(report: JSONObject) -> Iterator[Finding]:
    """Yield a finding for each property of the records that is bad for training."""
    for name, check in CHECKS.items():
        value = report[name]
        number = report[check.counted]
        if value is None or number < check.enough:
            continue
        least, highest = check[:2]
        if name == "random_next_fraction":
            # A small number of pairs deviates by chance: allow three standard deviations of a half.
            chance = 1.5 / math.sqrt(number)
            least = min(least, 0.5 - chance)
            highest = max(highest, 0.5 + chance)
        if name == "repeats":
            # Static records repeat each pair with other masks; records of other tools do not say how often.
            copies = report["copies"]
            if not copies:
                copies = math.inf if report["format"] == "static" else 1
            highest *= copies
        if not least <= value <= highest:
            yield Finding(check.problem.format(value), value, check.remedy)
    if report["predictions"] == 0:
        yield Finding("no token is masked (0 predictions)", 0, "make the records again with masks")
    if report["copies"] == 1:
        problem = "static records of one copy: every epoch has the same masks"
        remedy = "make them with --masking dynamic, or with --duplication-factor 5"
        yield Finding(problem, 1, remedy)


# --- as text


def table(report: JSONObject) -> list[str]:
    """Return a line of text for each statistic by its name in JSON; `-` is an unknown value."""
    width = max(map(len, report))
    lines = []
    for name, value in report.items():
        if value is None:
            shown = "-"
        elif isinstance(value, float):
            shown = f"{value:.4g}"
        else:
            shown = f"{value:,}"
        lines.append(f"  {name.replace('_', ' '):<{width}}  {shown}")
    return lines


def histogram(lengths: Counter[int], longest: int) -> list[str]:
    """Return lengths up to `longest` in at most BARS ranges, a line each."""
    step = -(-longest // BARS)
    ranges = [(first, min(longest, first + step - 1)) for first in range(1, longest + 1, step)]
    counts = [sum(lengths[n] for n in range(first, last + 1)) for first, last in ranges]
    highest = max(1, *counts)
    width = len(f"{max(counts):,}")
    digits = len(str(longest))
    lines = []
    for (first, last), records in zip(ranges, counts, strict=True):
        bar = "#" * -(-BAR_WIDTH * records // highest)
        lines.append(f"  {first:>{digits}} - {last:>{digits}}  {records:>{width},}  {bar}".rstrip())
    return lines


def example_text(batch: Batch, vocabulary: Vocabulary) -> str:
    """Return the first example as text, with the pieces of a word joined."""
    notation = vocabulary.notation
    tokens_S = unmasked(batch)[0]
    predicted = batch["masked_lm_positions"][0][batch["masked_lm_weights"][0] > 0].tolist()
    words: list[str] = []
    for position in np.flatnonzero(batch["input_mask"][0]).tolist():
        piece = vocabulary.pieces[tokens_S[position]]
        text = notation.shown(piece).strip()
        continues = notation.continues(piece) and len(words) > 0
        if position in predicted:
            seen = vocabulary.pieces[batch["input_ids"][0, position]]
            text = f"{{{text} -> {notation.shown(seen).strip()}}}"
        elif continues:
            text = text.removeprefix("##")
        if continues:
            words[-1] += text
        else:
            words.append(text)
    return printable(" ".join(words))
