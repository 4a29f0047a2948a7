"""The rules of static and dynamic loss scales."""

from bert_cli.optim.loss_scale import GROWTH_STEPS, LossScale, first_loss_scale


def test_a_static_scale_stays_and_counts_skipped_updates():
    scale = first_loss_scale(4096.0).after(False).after(True).after(False)
    assert scale.value == 4096.0
    assert (scale.skipped, scale.skipped_in_a_row) == (2, 1)


def test_a_dynamic_scale_is_halved_by_a_gradient_that_is_not_finite_but_stays_at_one_or_more():
    scale = first_loss_scale("dynamic")
    assert scale.after(False).value == scale.value / 2
    for _ in range(40):
        scale = scale.after(False)
    assert scale.value == 1.0
    assert scale.skipped_in_a_row == 40


def test_a_dynamic_scale_doubles_after_its_growth_steps_and_not_before():
    first = scale = first_loss_scale("dynamic")
    for _ in range(GROWTH_STEPS - 1):
        scale = scale.after(True)
    assert scale.value == first.value
    assert scale.after(True).value == 2 * first.value
    assert scale.after(False).after(True).value == first.value / 2


def test_a_scale_comes_back_from_json():
    scale = first_loss_scale("dynamic").after(False).after(True)
    assert LossScale(**scale.as_json()) == scale
