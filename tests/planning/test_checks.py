"""The checks of a run that it shares with `bert doctor`."""

from functools import partial

import pytest
from support.settings import RUN, merged, plan_of, small_run

from bert_cli.planning import checks

settings_of = partial(small_run, merged(RUN, {"global_batch": {"micro_batch_size": 16}}))


@pytest.mark.parametrize(("epochs", "warns"), [(100, False), (101, True)])
def test_many_epochs_are_a_warning(epochs, warns):
    (check,) = checks.of_epochs(plan_of(settings_of(num_epochs=epochs), 1600))
    assert check.warns == warns and ("it will overfit" in check.text) == warns
    assert f"{epochs}.00 epochs of 1,600 examples" in check.text


def test_synthetic_examples_have_no_epochs_to_check():
    many = {"total_num_train_samples": 16_000}
    assert checks.of_epochs(plan_of(settings_of(**many), None)) == []
    assert checks.of_epochs(plan_of(settings_of(**many), 2))[0].warns


def test_a_vocabulary_that_is_large_for_its_text_is_a_warning():
    # 1 MB of English has about 230,000 tokens.
    assert checks.of_vocabulary(30_522, 230_000).warns
    assert not checks.of_vocabulary(8192, 230_000).warns


def test_a_run_of_more_than_30_days_is_a_warning():
    assert not checks.of_duration(30 * 86_400).warns
    check = checks.of_duration(300 * 86_400)
    assert check.warning.startswith("warning: the run takes 300 days at this pace; ")
