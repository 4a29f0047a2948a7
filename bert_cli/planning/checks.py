"""Checks that a run makes of itself when it starts, and `bert doctor` before: epochs, vocabulary, repeats, duration."""

from collections.abc import Mapping
from typing import NamedTuple

from bert_cli.planning.plan import Plan

MAX_EPOCHS = 100
MIN_TOKENS = 10
"""Tokens of text for each of the vocabulary, on average: with fewer, half of them occur once or never."""
MAX_DAYS = 30


class Check(NamedTuple):
    """The result of a check: `remedy` is for one that warns."""

    what: str
    warns: bool
    text: str
    remedy: str
    values: Mapping[str, float]

    @property
    def warning(self) -> str:
        """Return the line of a run that warns."""
        return f"warning: {self.text}; {self.remedy}"


def of_epochs(plan: Plan) -> list[Check]:
    """Return whether a run reads its examples too often; nothing of synthetic examples, and of several stages."""
    if plan.epochs is None or plan.segments[-1].stage:
        return []
    warns = plan.epochs > MAX_EPOCHS
    text = f"the run reads {plan.epochs:,.2f} epochs of {plan.corpus_examples:,} examples"
    text += ": it will overfit" if warns else ""
    remedy = "use more text, or fewer --num-epochs or --total-num-train-samples"
    return [Check("epochs", warns, text, remedy, {"epochs": plan.epochs})]


def of_vocabulary(vocab_size: int, tokens: float) -> Check:
    """Return whether a text of so many tokens is enough to learn a vocabulary from scratch."""
    each = tokens / vocab_size
    warns = each < MIN_TOKENS
    text = f"the text has {each:,.1f} tokens for each of the {vocab_size:,} in the vocabulary"
    text += ": most occur too rarely to be learnt" if warns else ""
    remedy = (
        "train a smaller one (`bert vocab --size`), or start from a model (--pretrained-ckpt-path)"
    )
    return Check("vocabulary", warns, text, remedy, {"tokens_for_each": each})


def of_duration(seconds: float) -> Check:
    """Return whether a run takes too long."""
    days = seconds / 86400
    text = f"the run takes {days:,.0f} days at this pace"
    remedy = "take fewer --num-epochs or --total-num-train-samples, a smaller model or a faster machine; "
    remedy += "`bert init --hours` chooses a run that fits the hours"
    return Check("duration", days > MAX_DAYS, text, remedy, {"seconds": seconds})
