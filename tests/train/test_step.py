"""One update: counting, skipping what is not finite, clipping the whole step, stopping half way."""

from typing import ClassVar

import numpy as np
import pytest
import tensorflow as tf

from bert_cli.errors import DeviceError
from bert_cli.optim.adam import Rule
from bert_cli.optim.loss_scale import first_loss_scale
from bert_cli.parallel.cluster import Processes
from bert_cli.parallel.tensorflow.collectives import Peers, group_of
from bert_cli.parallel.tensorflow.engine import Engine, StoppedBetweenMicroBatchesError
from bert_cli.parallel.tensorflow.mesh import Mesh
from bert_cli.parallel.tensorflow.stage import Stage
from bert_cli.parallel.tensorflow.update import DeviceUpdate, Keeping
from bert_cli.parallel.tensorflow.variables import Copies
from bert_cli.train.step import State, Step, count

MESH = Mesh(1, (("CPU:0",),), "CPU:0", Processes(()))


def weight_of(value: list[float]) -> tf.Variable:
    return tf.Variable(value, dtype=tf.float32)


class Block:
    """Hands the ids on as numbers."""

    READS = ("input_ids",)

    def __call__(self, hidden, batch, key):
        return tf.cast(batch["input_ids"], tf.float32)


class Head:
    """loss = mean(w * ids), whose gradient is mean(ids)."""

    READS = ()
    COUNTS: ClassVar = {"masked": "masked_lm_weights"}
    MEANS: ClassVar = {"mlm_loss": ("mlm_loss", "masked")}

    def __init__(self, weight):
        self.weight = weight

    def __call__(self, hidden, labels, counts, key):
        loss = tf.reduce_sum(hidden * self.weight) / counts["examples"]
        zero = tf.constant(0.0)
        return loss, {"mlm_loss": loss, "mlm_correct": zero, "nsp_loss": zero, "nsp_correct": zero}


class Descent:
    """Moves along the gradient; the moments count calls and updates."""

    def __init__(self):
        self.rules = {"w": Rule(decays=False, adapts=False)}

    def number(self, name):
        return 0

    def key(self, number, step):
        return tf.stack([number, step])

    def straight(self, rule, weight, gradient, first, second, factor, rate, before, key):
        new = weight - rate * factor * gradient
        return new, first + 1.0, second + tf.cast(before, tf.float32)


def make(weight: tf.Variable, *, scaling: float | str = 1.0, **options) -> Step:
    """A step of a model of one weight."""
    stage = Stage([Block()], Head(weight), {"w": weight}, device="CPU:0", keeps="all")
    update = DeviceUpdate([stage], group_of(MESH, 0, 0), Descent(), Keeping())
    moments = {"w": tuple(Copies([moment]) for moment in update.moments["w"])}
    state = State({"w": Copies([weight])}, moments, first_loss_scale(scaling))
    engine = Engine([[stage]], [[update]], Peers(MESH), seed=0)
    settings = {
        "learning_rate": lambda step: 0.5,
        "max_gradient_norm": None,
        "max_skipped_steps": 3,
        "micro_batches": 1,
        **options,
    }
    return Step(engine, state, **settings)


def batch(*micro_batches: list[float]) -> dict[str, np.ndarray]:
    """[M, B, 1] numbers as ids; one masked place an example."""
    ids = np.array(micro_batches, np.float32)[..., None]
    return {
        "input_ids": ids,
        "input_mask": np.ones(ids.shape, np.int32),
        "masked_lm_weights": np.ones(ids.shape, np.float32),
        "next_sentence_labels": np.zeros(ids.shape[:2], np.int32),
    }


def test_the_masked_tokens_of_the_whole_step_are_counted():
    weights = np.array([[[1, 1, 0]], [[1, 0, 0]]], np.float32)
    mask = np.array([[[1, 1, 1, 0]], [[1, 1, 0, 0]]], np.int32)
    columns = {"masked_lm_weights": weights, "input_ids": mask, "input_mask": mask}
    assert count(columns, {"masked": "masked_lm_weights"}) == {
        "masked": 3.0,
        "examples": 2.0,
        "tokens": 5.0,
    }


def test_a_step_moves_by_the_mean_over_all_its_micro_batches():
    weight = weight_of([1.0])
    figures = make(weight)(batch([1.0, 2.0], [3.0, 6.0]))
    assert weight.numpy() == pytest.approx([1.0 - 0.5 * 3.0])
    assert figures["gradient_norm"] == pytest.approx(3.0)
    assert figures["weight_norm"] == pytest.approx(0.5)


def test_a_second_step_starts_from_no_gradient():
    weight = weight_of([0.0])
    step = make(weight)
    step(batch([2.0, 2.0]))
    step(batch([2.0, 2.0]))
    assert weight.numpy() == pytest.approx([-2.0])
    assert step.state.step == 2


def test_the_loss_scale_leaves_the_move_as_it_is():
    plain, scaled = weight_of([0.0]), weight_of([0.0])
    make(plain)(batch([1.0, 3.0]))
    make(scaled, scaling=4096.0)(batch([1.0, 3.0]))
    assert plain.numpy() == scaled.numpy()


def test_a_gradient_that_is_not_finite_moves_nothing_and_is_counted():
    weight = weight_of([1.0])
    step = make(weight, scaling="dynamic")
    before = step.state.loss_scale.value
    figures = step(batch([np.inf, 1.0]))
    assert weight.numpy() == [1.0]
    assert all(not moment.numpy().any() for moment in step.state.moments["w"])
    assert figures["skipped"] == 1
    assert step.state.loss_scale.value == before / 2
    assert step.state.step == 1
    step(batch([1.0, 1.0]))
    # The update that follows is the first: the skipped one does not count in the bias correction.
    assert [moment.numpy()[0] for moment in step.state.moments["w"]] == [1.0, 0.0]
    assert weight.numpy() == pytest.approx([0.5])


def test_many_gradients_in_a_row_that_are_not_finite_stop_the_run_and_name_the_step():
    step = make(weight_of([1.0]))
    step(batch([np.nan]))
    step(batch([np.nan]))
    with pytest.raises(
        DeviceError, match="step 3: the gradient was not finite in 3 steps in a row"
    ):
        step(batch([np.nan]))


def test_the_norm_of_the_whole_step_is_clipped_not_that_of_a_micro_batch():
    weight = weight_of([0.0])
    make(weight, max_gradient_norm=1.5)(batch([8.0], [-4.0]))
    # The mean gradient is 2: clipped to 1.5. Clipped one by one they would cancel out.
    assert weight.numpy() == pytest.approx([-0.5 * 1.5])


def test_a_norm_below_the_limit_is_left_alone():
    weight = weight_of([0.0])
    make(weight, max_gradient_norm=3.0)(batch([2.0]))
    assert weight.numpy() == pytest.approx([-1.0])


def test_a_stop_between_micro_batches_leaves_the_state_of_the_step_before():
    weight = weight_of([1.0])
    wishes = iter([False, False, True])
    step = make(weight, asked_to_stop=lambda: next(wishes))
    with pytest.raises(StoppedBetweenMicroBatchesError):
        step(batch([1.0], [1.0], [1.0]))
    assert step.state.step == 0
    assert weight.numpy() == [1.0]
    assert step.engine.replicas[0][0].empty
