"""Two warnings about the masked-LM loss of a run: it stays above the unigram entropy, or it does not fall.

The unigram entropy of the masked tokens is the loss of a model that knows only how frequent each token is. The
loss of a healthy run falls below it, because the model uses the context; with wrong labels or a wrong learning rate it
stays there. The entropy is counted in the records of the run. docs/troubleshooting.md has the measured faults.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from scipy.special import entr

from bert_cli.arrays import Ints
from bert_cli.data.examples.reader import BLOCK, ExampleStream
from bert_cli.files import JSONObject
from bert_cli.train.history import Run

ENTROPY = "unigram_entropy"
USED = ("mlm_loss", "tokens", ENTROPY)
# LABELS masked tokens are counted, in at most MAX_BLOCKS blocks of examples: standard error below 0.01 nats.
LABELS = 250_000
MAX_BLOCKS = 64
# Later epochs of few records mask the same tokens again.
EPOCHS = 4
# Tokens after which the loss must be below the entropy: four times the need of healthy runs. A step counts at most
# TOKENS_OF_A_STEP tokens.
TOKENS = 2e6
TOKENS_OF_A_STEP = 2048
# Nats by which the loss must be below the entropy: the means of both have sampling errors.
MARGIN = 0.05
# Steps of a mean loss: with 300 masked tokens each, its standard error is about 0.02.
STEPS = 50
# Minimum steps, and fraction of the run, in which the loss must fall: with 300 masked tokens, a fall of 0.01 shows.
FLAT_STEPS = 1000
FLAT_FRACTION = 0.1
# Approximate number of steps that `Run.tail` reads at the end of metrics.jsonl.
TAIL_STEPS = 10_000
REMEDY = (
    "usually the learning rate is too high or far too low, or the labels do not belong to the masked positions; try a "
    "third of the rate, and run `bert inspect` on the records"
)


def masked_tokens(stream: ExampleStream) -> Ints:
    """Return the masked tokens of the first examples: until LABELS are counted, and in at most EPOCHS epochs.

    They are a function of the records and the seed alone, so every start of a run has the same.
    """
    labels: list[Any] = []
    blocks = MAX_BLOCKS
    if stream.epoch_size is not None:
        blocks = min(blocks, math.ceil(EPOCHS * stream.epoch_size / BLOCK))
    for block in range(blocks):
        rows = stream.rows(np.arange(block * BLOCK, (block + 1) * BLOCK))
        labels.append(rows["masked_lm_ids"][rows["masked_lm_weights"] > 0])
        if sum(map(len, labels)) >= LABELS:
            break
    return np.concatenate(labels)


def unigram_entropy(stream: ExampleStream) -> float:
    """Return the unigram entropy in nats of the masked tokens of a stream."""
    _, counts = np.unique(masked_tokens(stream), return_counts=True)
    total = max(1, counts.sum())
    # The counts of a sample are too uneven, which the correction of Miller (1955) accounts for.
    return float(entr(counts / total).sum() + (len(counts) - 1) / (2 * total))


def compared_steps(total_steps: int) -> int:
    """Return the number of steps within which the loss of a run must fall."""
    return max(FLAT_STEPS, math.ceil(FLAT_FRACTION * total_steps))


def find_warning(
    settings: JSONObject, total_steps: int, steps: Iterable[tuple[int, Mapping[str, float | None]]]
) -> str | None:
    """Return a warning for the last steps of a run and their metrics, None if there is none.

    `settings` come from settings.json. Only pre-training on real examples is checked, without the steps of the warm-up.
    """
    warmup = settings["optimizer_opts"]["learning_rate"]["warmup_frac"] * total_steps
    rows = [
        (n, row)
        for n, row in steps
        if n > warmup and math.isfinite(row.get("mlm_loss") or math.inf)
    ]
    losses = np.array([row["mlm_loss"] for _, row in rows])
    if settings.get("generated_dataset") or len(losses) < STEPS:
        return None
    step, last = rows[-1]
    loss = losses[-STEPS:].mean()
    entropy = last.get(ENTROPY)
    tokens = np.mean([row["tokens"] for _, row in rows[-STEPS:]])
    counted = (step - warmup) * min(tokens, TOKENS_OF_A_STEP)
    if entropy is not None and counted >= TOKENS and loss > entropy - MARGIN:
        return (
            f"masked-LM loss {loss:.2f} after {step * tokens / 1e6:,.1f} million tokens is not below the unigram "
            f"entropy of the records, {entropy:.2f}: {REMEDY}"
        )
    # Losses with other masks are not comparable.
    is_uniform = not settings["masking"].get("start_probability")
    compared = compared_steps(total_steps)
    before = losses[-2 * compared : -compared]
    after = losses[-compared:]
    if is_uniform and len(before) == compared and after.mean() >= before.mean():
        return (
            f"masked-LM loss {after.mean():.2f} has not fallen for {compared:,} steps, from {before.mean():.2f} in as "
            f"many before: {REMEDY}"
        )
    return None


def warning_of(run: Run) -> str | None:
    """Return the warning for the last steps of a run's folder; None if it has none, or lacks values for the check."""
    total = run.total_steps
    groups = [run.settings.get(name) for name in ("optimizer_opts", "masking")]
    if total is None or None in groups:
        return None
    compared = 2 * compared_steps(total)
    # The end of the file that is read has no more steps; parsing it takes 85 ms.
    steps = STEPS
    if compared <= TAIL_STEPS:
        steps = compared
    return find_warning(run.settings, total, run.tail(steps))
