"""Which examples are held out, and how many of them are training examples.

Texts that differ only in case and white space are equal. Rows with a text in common are a group, which is on one side.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from bert_cli.arrays import Bools, Ints
from bert_cli.data.finetune.tables import TextExamples
from bert_cli.data.random import permute
from bert_cli.errors import DataError
from bert_cli.processes import print_error
from bert_cli.statistics import identify, linked_texts, plain
from bert_cli.text import count

Rows = Sequence[Sequence[str]]  # the texts of each row


def hold_out(
    examples: TextExamples, fraction: float, seed: int
) -> tuple[TextExamples, TextExamples]:
    """Return the training examples and the held-out validation examples, both in file order; only for labels.

    The same fraction of each label is held out, as `held_out_rows`.
    """
    assert examples.labels is not None and examples.label_names is not None
    strata = examples.labels
    if strata.ndim == 2:  # a text with several labels stands for its rarest
        by_rarity = np.argsort(strata.sum(0), kind="stable")
        strata = np.where(strata.any(1), by_rarity[strata[:, by_rarity].argmax(1)], -1)
    held = held_out_rows(examples.rows, strata.astype(np.int64), fraction, seed)
    return examples.take(np.flatnonzero(~held)), examples.take(np.flatnonzero(held))


def held_out_rows(rows: Rows, strata: Ints, fraction: float, seed: int) -> Bools:
    """Return a mask [n] of held-out rows: the same fraction of each stratum, at least one group and never all.

    Rows with a text in common are a group. Where one text, such as the name of a product, links too many of them, only
    rows with equal texts are. Raises DataError when no stratum has two groups.
    """
    linked = identify(rows, linked_texts(rows)).groups
    if np.bincount(linked).max() <= (1 - fraction) * len(rows):
        held = _held_out_groups(linked, strata, fraction, seed)
        if held.any():
            return held[linked]
    equal = identify(rows).groups
    held = _held_out_groups(equal, strata, fraction, seed)
    if not held.any():
        remedy = "use more examples, or a validation file"
        problem = "no label has two different texts, so none can be held out"
        raise DataError(f"held_out_fraction ({fraction})", problem, remedy)
    return held[equal]


def _held_out_groups(owner: Ints, strata: Ints, fraction: float, seed: int) -> Bools:
    """Return a mask of the groups that are held out; a group has the stratum of its first row."""
    sizes = np.bincount(owner)
    of_group = strata[np.unique(owner, return_index=True)[1]]
    held = np.zeros(len(sizes), np.bool_)
    for stratum in np.unique(of_group):
        groups = np.flatnonzero(of_group == stratum)
        drawn = groups[permute(np.arange(len(groups)), len(groups), seed, stratum)].tolist()
        # The largest group is trained on. Of equal ones it is the last.
        drawn.remove(max(reversed(drawn), key=sizes.__getitem__))
        room = max(1, int(fraction * sizes[groups].sum() + 0.5))
        small = [n for n in drawn if sizes[n] <= room] or sorted(drawn, key=sizes.__getitem__)[:1]
        taken = 0
        for group in small:
            if not taken or taken + sizes[group] <= room:
                held[group] = True
                taken += sizes[group]
    return held


def warn_of_shared(train: str, rows: Rows, sets: Mapping[str, Rows]) -> None:
    """Print a warning for each of the `sets` that has texts of the training `rows`."""
    known = {plain(text) for row in rows for text in row} - {""}
    for name, scored in sets.items():
        if shared := sum(not known.isdisjoint(map(plain, row)) for row in scored):
            print_error(
                f"warning: {shared:,} of {count(len(scored), 'row')} of {name} share a text with {train}, so the "
                "scores show memory, too; leave these texts out of one of them"
            )
