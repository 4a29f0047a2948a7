"""Held-out examples: the same part of each label, and no text on both sides."""

import numpy as np
import pytest

from bert_cli.data.finetune.split import held_out_rows, hold_out, warn_of_shared
from bert_cli.data.finetune.tables import TextExamples
from bert_cli.errors import DataError


def examples(values, names=("a", "b", "c"), second=None):
    ids = [*map(str, range(len(values)))]
    texts = [f"text {n}" for n in ids]
    return TextExamples(texts, second, np.array(values), ids, names, {"odd": 1})


def test_the_same_fraction_of_each_label_is_held_out_by_the_seed():
    second = [f"second {n}" for n in range(100)]
    everything = examples([0] * 60 + [1] * 30 + [2] * 10, second=second)
    train, held = hold_out(everything, 0.1, 7)
    assert np.bincount(held.labels).tolist() == [6, 3, 1] and held.remarks == {}
    assert sorted(train.ids + held.ids, key=int) == everything.ids
    assert held.ids == sorted(held.ids, key=int) and train.ids == sorted(train.ids, key=int)
    assert held.first == [f"text {n}" for n in held.ids]
    assert held.second == [f"second {n}" for n in held.ids]
    again, other = (hold_out(everything, 0.1, seed)[1].ids for seed in (7, 8))
    assert held.ids == again != other


def test_each_label_keeps_an_example_and_gives_one_if_it_has_two():
    rows = examples([0, 0, 1, 1, 1, 2])
    assert np.bincount(hold_out(rows, 0.01, 1)[1].labels, minlength=3).tolist() == [1, 1, 0]
    assert np.bincount(hold_out(rows, 0.99, 1)[0].labels).tolist() == [1, 1, 1]
    with pytest.raises(DataError, match="no label has two different texts"):
        hold_out(examples([0, 1, 2]), 0.5, 1)


def test_texts_with_several_labels_are_held_out_by_their_rarest():
    draw = np.random.default_rng(0)
    labels = (draw.random((400, 3)) < [0.6, 0.3, 0.02]).astype(np.int8)
    _, held = hold_out(examples(labels), 0.2, 1)
    assert len(held) == pytest.approx(80, abs=2)
    assert held.labels.sum(0) == pytest.approx(labels.sum(0) * 0.2, rel=0.25)
    alone = np.array([[1, 0], [1, 0], [1, 1]], np.int8)
    train, _ = hold_out(examples(alone, ("a", "b")), 0.5, 1)
    assert train.labels.any(0).all()


def copies(number):
    texts = [f"The ship of day {n}" for n in range(number)]
    other = (text.replace(" ", "\n\u00a0 ").replace("h", "\uff48\u200b") for text in texts)
    return [*texts, *map(str.upper, texts), *other]


@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.9])
def test_equal_texts_but_for_case_white_space_and_forms_of_letters_are_on_one_side(fraction):
    rows = [[text] for text in copies(40)]
    # A copy may have another label.
    strata = np.random.default_rng(0).integers(0, 2, len(rows))
    held = held_out_rows(rows, strata, fraction, 3)
    assert held.sum() == pytest.approx(max(6, fraction * len(rows)), abs=6)
    train, test = ({n % 40 for n in np.flatnonzero(side)} for side in (~held, held))
    assert not train & test and len(train) + len(test) == 40


def test_pairs_with_a_text_in_common_are_on_one_side():
    texts = copies(60)
    rows = [
        [texts[n], texts[120 + n - n % 3]] for n in range(60)
    ]  # the first of three is in both columns
    held = held_out_rows(rows, np.zeros(60, int), 0.2, 1)
    sides = ({text for n in np.flatnonzero(side) for text in rows[n]} for side in (held, ~held))
    train, test = ({"".join(text.lower().split()) for text in side} for side in sides)
    assert not train & test and held.sum() >= 6


def test_a_text_that_links_most_pairs_leaves_only_equal_pairs_together(capsys):
    rows = [[f"ticket {n // 2}", f"product {n // 2 % 3}"] for n in range(120)]
    rows += [[f"ticket {n}", f"product {(n + 1) % 3}"] for n in range(30)]
    held = held_out_rows(rows, np.zeros(150, int), 0.1, 1)
    assert held.sum() == pytest.approx(15, abs=1)
    assert held[:120:2].tolist() == held[1:120:2].tolist()
    train, test = ([rows[n] for n in np.flatnonzero(side)] for side in (~held, held))
    warn_of_shared("train", train, {"validation": test, "other": [["ticket", ""]]})
    assert capsys.readouterr().err == (
        f"warning: {len(test)} of {len(test)} rows of validation share a text with train, so the scores show memory, "
        "too; leave these texts out of one of them\n"
    )


def test_one_large_group_of_equal_texts_does_not_become_the_held_out_part():
    rows = [["the same"]] * 50 + [[f"text {n}"] for n in range(50)]
    held = held_out_rows(rows, np.zeros(100, int), 0.2, 1)
    assert held.sum() == 20 and not held[:50].any()
