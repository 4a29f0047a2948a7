"""Which examples are held out, once or in turn, and how many of them are training examples.

Texts that differ only in case and white space are equal. Rows with a text in common are a group, which is on one side.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from bert_cli.arrays import Bools, Ints
from bert_cli.data.finetune.tables import TextExamples
from bert_cli.data.random import permute
from bert_cli.errors import DataError, logger
from bert_cli.statistics import identify, linked_texts, plain
from bert_cli.text import count

Rows = Sequence[Sequence[str]]  # the texts of each row


def hold_out(
    examples: TextExamples, fraction: float, seed: int
) -> tuple[TextExamples, TextExamples]:
    """Return the training examples and the held-out validation examples, both in file order; only for labels.

    The same fraction of each label is held out, as `held_out_rows`.
    """
    held = held_out_rows(examples.rows, _strata(examples), fraction, seed)
    return examples.take(np.flatnonzero(~held)), examples.take(np.flatnonzero(held))


def folds_of(examples: TextExamples, number: int, seed: int) -> Ints:
    """Return the fold [n] that tests each row, from 0: at most `number` folds, with about the same part of each label.

    Groups are as in `held_out_rows`. A row is -1, and trains every fold, if its fold would learn its label from none.
    """
    from sklearn.model_selection import StratifiedGroupKFold  # takes a second

    strata = _strata(examples)

    def divide(groups: Ints) -> Ints:
        folds = np.full(len(groups), -1)
        # Not more folds than rows of the most frequent label, nor than groups.
        size = min(number, np.bincount(strata + 1).max(), groups.max() + 1)
        if size > 1:
            method = StratifiedGroupKFold(size, shuffle=True, random_state=seed)
            with warnings.catch_warnings(action="ignore"):  # of labels with fewer texts than folds
                for fold, (_, tested) in enumerate(method.split(strata, strata, groups)):
                    folds[tested] = fold
        for stratum in np.unique(strata):
            having = strata == stratum
            # All texts of a label are in one fold, so its model would never see the label.
            if np.ptp(folds[having]) == 0:
                folds[np.isin(groups, groups[having])] = -1
        return folds

    folds = _divided(examples.rows, 1 / number, divide)
    # Numbers without gaps: a fold may have lost all its rows. The -1 in front keeps 0 the first fold.
    return np.unique(np.append(-1, folds), return_inverse=True)[1][1:] - 1


def _strata(examples: TextExamples) -> Ints:
    """Return the label of each row [n]; a text with several stands for its rarest, and -1 for none."""
    labels = examples.labels
    assert labels is not None and examples.label_names is not None
    if labels.ndim == 2:
        # A rare label has few texts to divide; frequent ones are divided evenly by chance.
        by_rarity = np.argsort(labels.sum(0), kind="stable")
        labels = np.where(labels.any(1), by_rarity[labels[:, by_rarity].argmax(1)], -1)
    return labels.astype(np.int64)


def held_out_rows(rows: Rows, strata: Ints, fraction: float, seed: int) -> Bools:
    """Return a mask [n] of held-out rows: the same fraction of each stratum, at least one group and never all.

    Rows with a text in common are a group. Where one text, such as the name of a product, links too many of them, only
    rows with equal texts are. Raises DataError when no stratum has two groups.
    """
    return _divided(rows, fraction, partial(_held_out, strata, fraction, seed)) == 0


def _divided(rows: Rows, fraction: float, divide: Callable[[Ints], Ints]) -> Ints:
    """Return the part [n] of each row's group: what `divide` makes of groups, -1 for none."""
    # First rows that share a text, then, if a group of these is too large, equal rows alone.
    for keys in (linked_texts(rows), None):
        groups = identify(rows, keys).groups
        parts = divide(groups)
        is_small = np.bincount(groups).max() <= (1 - fraction) * len(rows)
        if (parts >= 0).any() and (is_small or keys is None):
            return parts
    raise DataError(
        "train_file",
        "no label has two different texts, so none can be held out",
        "use more examples, or a validation file",
    )


def _held_out(strata: Ints, fraction: float, seed: int, owner: Ints) -> Ints:
    """Return 0 for rows that are held out, otherwise -1; a group has the stratum of its first row."""
    sizes = np.bincount(owner)
    of_group = strata[np.unique(owner, return_index=True)[1]]
    held = np.full(len(sizes), -1)
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
                held[group] = 0
                taken += sizes[group]
    return held[owner]


def warn_of_shared(train: str, rows: Rows, sets: Mapping[str, Rows]) -> None:
    """Print a warning for each of the `sets` that has texts of the training `rows`."""
    known: set[str] = set()
    for row in rows:
        known.update(map(plain, row))
    # Empty second texts of single texts are no texts in common.
    known.discard("")
    for name, scored in sets.items():
        shared = sum(not known.isdisjoint(map(plain, row)) for row in scored)
        if shared:
            logger.warning(
                f"warning: {shared:,} of {count(len(scored), 'row')} of {name} share a text with {train}, so the "
                "scores show memory, too; leave these texts out of one of them"
            )
