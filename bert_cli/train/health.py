"""The masked-LM loss expected of pre-training after so many tokens, and a warning outside of this band.

The band is relative to the unigram entropy of the masked tokens: the loss of a model that knows only how frequent each
token is. A healthy run falls to it within some hundred steps and then below it, because it uses the context. Wrong
labels or a wrong rate keep it there. The floor is far below the fastest measured run. The band is wide: a run within
it may still be bad. docs/troubleshooting.md has the measured faults.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bert_cli.train.history import Run

ENTROPY: dict[float, float] = {1: 0.0, 1024: 5.98, 8192: 6.9, 30522: 7.2, 250000: 7.8}
"""Vocabulary size -> unigram entropy in nats of masked tokens of English (docs/measured.md); the last is a guess."""
FASTEST = {
    3e5: 0.0, 6.4e5: 0.25, 9.6e5: 0.51, 1.27e6: 0.89, 1.6e6: 1.27, 2.6e6: 1.75, 8.5e6: 2.6, 1e9: 4.5,
}  # fmt: skip
"""Tokens -> nats below that entropy, of the fastest measured run, `pretrain_small_32_phase1`; the last is a guess."""
FASTEST_WEIGHTS = 3.1e6
FLOOR_FACTOR, FLOOR_MARGIN = 1.5, 1.0
"""The floor is so many times as far below the entropy as the fastest run, and so many nats lower."""
LOWEST = 0.5
"""Nats that the loss of text stays above: BERT-base reaches ln 3.68 = 1.3 (Liu et al. 2019, RoBERTa, table 3)."""
SLOWEST = {4e5: 1.0, 8e5: -0.1}
"""Tokens after the warm-up -> nats above that entropy, which every healthy run was below."""
TOKENS_OF_A_STEP = 2048
"""Larger steps do not make the steps to the entropy fewer, so the ceiling counts no more tokens of a step."""
EXCESS = 1.0
"""Nats above ln V that the loss of new weights may have: a scaling or a wide initializer adds to it."""
STEPS = 50
"""Steps of the mean loss: with 300 masked tokens each, its standard error is about 0.02."""
LOW = (
    "usually the labels are visible in the input, the text repeats itself, or few records are read very often; "
    "run `bert inspect` on the records"
)
HIGH = (
    "usually the learning rate is too high or far too low, or the labels do not belong to the masked positions; try a "
    "third of the rate, and run `bert inspect` on the records"
)


def band(
    vocab_size: int, tokens_seen: float, weights: float, tokens_updated: float
) -> tuple[float, float]:
    """Return the lowest and the highest expected masked-LM loss in nats.

    `tokens_updated` are the tokens since the warm-up, at most TOKENS_OF_A_STEP of each step; `weights` are those of the
    layers, without embeddings.
    """
    entropy = _interpolate(ENTROPY, vocab_size)
    # Larger models need fewer tokens (Kaplan et al. 2020, figure 2); a quarter for ten times the weights is a guess.
    size = max(0.5, 1 + 0.25 * math.log10(weights / FASTEST_WEIGHTS))
    low = entropy - FLOOR_FACTOR * size * _interpolate(FASTEST, tokens_seen) - FLOOR_MARGIN
    high = math.log(vocab_size) + EXCESS
    # Rare tokens are learned later: with 30,522 tokens the entropy was reached after 0.5 million, with 8,192 after 0.4.
    # The square root is a guess on the safe side.
    tokens_updated /= max(1.0, math.sqrt(vocab_size / 8192))
    if tokens_updated >= min(SLOWEST):
        high = min(high, entropy + _interpolate(SLOWEST, tokens_updated))
    return max(low, min(LOWEST, entropy / 2)), high


def check(loss: float, tokens_seen: float, expected: tuple[float, float]) -> str | None:
    """Return a warning if a mean loss is outside the band: numbers, usual causes, and what to do."""
    low, high = expected
    if low <= loss <= high:
        return None
    side, causes = ("below", LOW) if loss < low else ("above", HIGH)
    return (
        f"masked-LM loss {loss:.2f} after {tokens_seen / 1e6:,.1f} million tokens is {side} the expected "
        f"{low:.1f} to {high:.1f}: {causes}"
    )


def checker(
    settings: Mapping[str, Any], total_steps: int | None
) -> Callable[[int, Mapping[str, Any]], str | None]:
    """Return a function that takes each step and its metrics and returns a warning or None.

    `settings` are those of settings.json. The losses of other runs than pre-training and of synthetic examples are not
    checked. Of a run from trained weights only the limits for any text are: not below LOWEST, not above ln V + EXCESS.
    """
    recent: deque[tuple[float, float]] = deque(maxlen=STEPS)
    shape, rate = settings["bert_config"], settings["optimizer_opts"]["learning_rate"]
    weights = 12.0 * shape["num_hidden_layers"] * shape["hidden_size"] ** 2
    warmup = rate["warmup_frac"] * total_steps if total_steps else math.inf

    def after_step(step: int, metrics: Mapping[str, Any]) -> str | None:
        loss = metrics.get("mlm_loss")
        if loss is None or not math.isfinite(loss) or settings.get("generated_dataset"):
            return None
        recent.append((loss, metrics["tokens"]))
        # The first steps of a new run are a complete mean; those after a restart are not.
        if len(recent) < min(step, STEPS):
            return None
        loss, tokens = np.mean(recent, axis=0).tolist()
        updated = max(0.0, step - warmup) * min(tokens, TOKENS_OF_A_STEP)
        expected = band(shape["vocab_size"], step * tokens, weights, updated)
        if settings.get("pretrained_ckpt_path"):
            expected = LOWEST, math.log(shape["vocab_size"]) + EXCESS
        return check(loss, step * tokens, expected)

    return after_step


def warning_of(run: Run) -> str | None:
    """Return the warning for the last steps of a run's folder; None if it has none, or not what the check needs."""
    warning = None
    try:
        after_step = checker(run.settings, run.total_steps)
        for step, metrics in run.tail(STEPS):
            warning = after_step(step, metrics)
    except (KeyError, TypeError):  # settings or metrics of an older version
        return None
    return warning


def _interpolate(table: Mapping[float, float], at: float) -> float:
    """Return the value of a table at a number, linear in its logarithm; outside of the table the nearest value."""
    return float(np.interp(math.log(max(at, 1.0)), np.log(list(table)), list(table.values())))
