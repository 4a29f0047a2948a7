"""Checks of a run at its start, and of `bert doctor` before: epochs, vocabulary, repeats, duration."""

from collections.abc import Mapping
from typing import NamedTuple

from bert_cli.planning.plan import Plan

# BERT's own pre-training read its text about 40 times (Devlin et al. 2019, appendix A.2).
MAX_EPOCHS = 100
# Minimum mean number of text tokens per vocabulary entry: with fewer, half of the entries occur once or never.
MIN_TOKENS = 10
MAX_DAYS = 30


class Check(NamedTuple):
    """The result of a check; `remedy` is for a warning."""

    what: str
    warns: bool
    text: str
    remedy: str
    values: Mapping[str, float]

    @property
    def warning(self) -> str:
        """Return the warning as a line of a run."""
        return f"warning: {self.text}; {self.remedy}"


def of_epochs(plan: Plan) -> list[Check]:
    """Return a check of the number of epochs; none for synthetic examples."""
    if plan.epochs is None:
        return []
    warns = plan.epochs > MAX_EPOCHS
    text = f"the run reads {plan.epochs:,.2f} epochs of {plan.corpus_examples:,} examples"
    if warns:
        text += ": it will overfit"
    remedy = "use more text, or lower --num-epochs or --total-num-train-samples"
    return [Check("epochs", warns, text, remedy, {"epochs": plan.epochs})]


def of_vocabulary(vocab_size: int, tokens: float) -> Check:
    """Return a check whether a text of `tokens` tokens suffices to learn a vocabulary from scratch."""
    frequency = tokens / vocab_size
    warns = frequency < MIN_TOKENS
    text = f"the text has {frequency:,.1f} tokens for each of the {vocab_size:,} vocabulary entries"
    if warns:
        text += ": most entries occur too rarely to be learnt"
    remedy = "train a smaller vocabulary (`bert vocab --size`), or start from a model (--pretrained-ckpt-path)"
    return Check("vocabulary", warns, text, remedy, {"tokens_for_each": frequency})


def of_duration(seconds: float) -> Check:
    """Return a check of a run's duration."""
    days = seconds / 86400
    text = f"the run takes {days:,.0f} days at this pace"
    remedy = "lower --num-epochs or --total-num-train-samples, or use a smaller model or a faster machine; "
    remedy += "`bert init --hours` chooses a run that fits the hours"
    return Check("duration", days > MAX_DAYS, text, remedy, {"seconds": seconds})
