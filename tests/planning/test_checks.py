"""The checks of a run that it shares with `bert doctor`."""

from functools import partial

from support.settings import RUN, merged, plan_of, small_run

from bert_cli.planning import checks

settings_of = partial(small_run, merged(RUN, {"global_batch": {"micro_batch_size": 16}}))
DAY = 86_400


def of_epochs(epochs: float) -> checks.Check:
    (check,) = checks.of_epochs(plan_of(settings_of(num_epochs=epochs), 1600))
    return check


def test_a_check_warns_beyond_its_limit_and_a_warning_has_a_remedy():
    read, has, takes = "the run reads", "the text has", "the run takes"
    for check, text, value, remedy in (
        (of_epochs(100), f"{read} 100.00 epochs of 1,600 examples", 100, ""),
        (of_epochs(101), f"{read} 101.00 epochs of 1,600 examples: it will overfit", 101, "use more"),
        (checks.of_vocabulary(2000, 20_000), f"{has} 10.0 tokens for each of the 2,000 ", 10, ""),
        (checks.of_vocabulary(8192, 73_728), f"{has} 9.0 tokens for each of the 8,192 ", 9, "train a sm"),
        (checks.of_duration(30 * DAY), f"{takes} 30 days at this pace", 30 * DAY, ""),
        (checks.of_duration(31 * DAY), f"{takes} 31 days at this pace", 31 * DAY, "lower --num-epochs"),
    ):  # fmt: skip
        assert check.text.startswith(text) and [*check.values.values()] == [value]
        assert check.warns == bool(remedy)
        # Epochs and vocabularies say what is wrong.
        assert (check.what != "duration" and check.warns) == (": " in check.text), check
        assert check.warning.startswith(f"warning: {check.text}; {remedy}")


def test_synthetic_examples_have_no_epochs_to_check():
    assert checks.of_epochs(plan_of(settings_of(total_num_train_samples=16_000), None)) == []
