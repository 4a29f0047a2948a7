"""One update: counting, skipping what is not finite, clipping the whole step, stopping half way."""

import numpy as np
import pytest
import tensorflow as tf

from bert_cli.errors import DeviceError
from bert_cli.optim.loss_scale import first_loss_scale
from bert_cli.parallel.engine import Engine
from bert_cli.train.step import State, Step, StoppedBetweenMicroBatchesError, count, new_moments


class Weight:
    """A weight as the engine sees Keras' variables: a value and a shape."""

    def __init__(self, value: list[float]):
        self.value = tf.Variable(value, dtype=tf.float32)
        self.shape = self.value.shape


def block(hidden, batch, key):
    """Hands the ids on as numbers."""
    return tf.cast(batch["input_ids"], tf.float32)


def make(weight: Weight, *, scaling: float | str = 1.0, **options) -> Step:
    """A model of one weight w with loss mean(w * ids), whose gradient is mean(ids)."""

    def head(hidden, labels, counts, key):
        loss = tf.reduce_sum(hidden * weight.value) / counts["examples"]
        zero = tf.constant(0.0)
        return loss, {"mlm_loss": loss, "mlm_correct": zero, "nsp_loss": zero, "nsp_correct": zero}

    def descend(name, variable, gradient, first, second, before, rate, step):
        return variable - rate * gradient, first + 1.0, second + tf.cast(before, tf.float32)

    weights = {"w": weight}
    state = State(weights, new_moments(weights), first_loss_scale(scaling))
    engine = Engine([block], head, weights, seed=0, recompute=False)
    settings = {
        "update": descend,
        "learning_rate": lambda step: 0.5,
        "max_gradient_norm": None,
        "max_skipped_steps": 3,
        **options,
    }
    return Step(engine, state, **settings)


def batch(*micro_batches: list[float]) -> dict[str, np.ndarray]:
    """[M, B, 1] numbers as ids; one masked place an example."""
    ids = np.array(micro_batches, np.float32)[..., None]
    return {
        "input_ids": ids,
        "masked_lm_weights": np.ones(ids.shape, np.float32),
        "next_sentence_labels": np.zeros(ids.shape[:2], np.int32),
    }


def test_the_masked_tokens_of_the_whole_step_are_counted():
    weights = np.array([[[1, 1, 0]], [[1, 0, 0]]], np.float32)
    labels = np.zeros((2, 1), np.int32)
    counted = count({"masked_lm_weights": weights, "next_sentence_labels": labels})
    assert counted == {"masked": 3.0, "examples": 2.0}


def test_a_step_moves_by_the_mean_over_all_its_micro_batches():
    weight = Weight([1.0])
    figures = make(weight)(batch([1.0, 2.0], [3.0, 6.0]))
    assert weight.value.numpy() == pytest.approx([1.0 - 0.5 * 3.0])
    assert figures["gradient_norm"] == pytest.approx(3.0)
    assert figures["weight_norm"] == pytest.approx(0.5)


def test_a_second_step_starts_from_no_gradient():
    weight = Weight([0.0])
    step = make(weight)
    step(batch([2.0, 2.0]))
    step(batch([2.0, 2.0]))
    assert weight.value.numpy() == pytest.approx([-2.0])
    assert step.state.step == 2


def test_the_loss_scale_leaves_the_move_as_it_is():
    plain, scaled = Weight([0.0]), Weight([0.0])
    make(plain)(batch([1.0, 3.0]))
    make(scaled, scaling=4096.0)(batch([1.0, 3.0]))
    assert plain.value.numpy() == scaled.value.numpy()


def test_a_gradient_that_is_not_finite_moves_nothing_and_is_counted():
    weight = Weight([1.0])
    step = make(weight, scaling="dynamic")
    before = step.state.loss_scale.value
    figures = step(batch([np.inf, 1.0]))
    assert weight.value.numpy() == [1.0]
    assert all(not moment.numpy().any() for moment in step.state.moments["w"])
    assert figures["skipped"] == 1
    assert step.state.loss_scale.value == before / 2
    assert step.state.step == 1
    step(batch([1.0, 1.0]))
    # The update that follows is the first: the skipped one does not count in the bias correction.
    assert [moment.numpy()[0] for moment in step.state.moments["w"]] == [1.0, 0.0]
    assert weight.value.numpy() == pytest.approx([0.5])


def test_many_gradients_in_a_row_that_are_not_finite_stop_the_run_and_name_the_step():
    step = make(Weight([1.0]))
    step(batch([np.nan]))
    step(batch([np.nan]))
    with pytest.raises(
        DeviceError, match="step 3: the gradient was not finite in 3 steps in a row"
    ):
        step(batch([np.nan]))


def test_the_norm_of_the_whole_step_is_clipped_not_that_of_a_micro_batch():
    weight = Weight([0.0])
    make(weight, max_gradient_norm=1.5)(batch([8.0], [-4.0]))
    # The mean gradient is 2: clipped to 1.5. Clipped one by one they would cancel out.
    assert weight.value.numpy() == pytest.approx([-0.5 * 1.5])


def test_a_norm_below_the_limit_is_left_alone():
    weight = Weight([0.0])
    make(weight, max_gradient_norm=3.0)(batch([2.0]))
    assert weight.value.numpy() == pytest.approx([-1.0])


def test_a_stop_between_micro_batches_leaves_the_state_of_the_step_before():
    weight = Weight([1.0])
    wishes = iter([False, False, True])
    step = make(weight, asked_to_stop=lambda: next(wishes))
    with pytest.raises(StoppedBetweenMicroBatchesError):
        step(batch([1.0], [1.0], [1.0]))
    assert step.state.step == 0
    assert weight.value.numpy() == [1.0]
    assert not step.engine.accumulators[0].numpy().any()
