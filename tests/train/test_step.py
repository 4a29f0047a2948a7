"""A step: counting, skipping a non-finite gradient, clipping the complete step, stopping between micro-batches."""

from typing import ClassVar

import numpy as np
import pytest
import tensorflow as tf

from bert_cli.errors import DeviceError
from bert_cli.optim.adam import Rule
from bert_cli.optim.schedule import first_loss_scale
from bert_cli.parallel.cluster import Processes
from bert_cli.parallel.engine import Mesh, StoppedBetweenMicroBatchesError, count
from bert_cli.parallel.tensorflow.engine import TensorFlowEngine
from bert_cli.parallel.tensorflow.stage import Stage
from bert_cli.train.loop import State, Step

MESH = Mesh(1, (("CPU:0",),), "CPU:0", Processes(()))


class Block:
    """Returns the ids as floats."""

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
        total = tf.reduce_sum(hidden * self.weight)
        return total / counts["examples"], {"mlm_loss": total}


class Descent:
    """Gradient descent; the first moment counts calls, the second adds up the updates before each."""

    rules: ClassVar = {"w": Rule(decays=False, adapts=False)}

    def weight_id(self, name):
        return 0

    def key(self, weight_id, step):
        return tf.stack([weight_id, step])

    def update(self, rule, weight, gradient, first, second, factor, rate, updates, key):
        new = weight - rate * factor * gradient
        return new, first + 1.0, second + tf.cast(updates, tf.float32)


def make(value: float, micro_batches: int = 1, *, scaling: float | str = 1.0, **options) -> Step:
    """Return a step of a model with one weight, at a learning rate of 0.5."""
    weight = tf.Variable([value])
    stage = Stage([Block()], Head(weight), {"w": weight}, device="CPU:0")
    engine = TensorFlowEngine([[stage]], MESH, seed=0, optimizer=Descent())
    state = State(engine.weights, engine.moments, first_loss_scale(scaling))
    values = {"max_gradient_norm": None, "max_skipped_steps": 3, **options}
    rate = {"learning_rate": lambda step: 0.5}
    return Step(engine, state, micro_batches=micro_batches, **rate, **values)


def weight_of(step: Step) -> float:
    return float(step.state.weights["w"].numpy()[0])


def batch(*micro_batches: list[float]) -> dict[str, np.ndarray]:
    """Return [M, B, 1] numbers as ids, with one masked position an example."""
    ids = np.array(micro_batches, np.float32)[..., None]
    return {
        "input_ids": ids,
        "input_mask": np.ones(ids.shape, np.int32),
        "masked_lm_weights": np.ones(ids.shape, np.float32),
    }


def test_counts_are_of_all_micro_batches_and_of_every_sequence_of_a_pack():
    weights = np.array([[[1, 1, 0]], [[1, 0, 0]]], np.float32)
    mask = np.array([[[1, 1, 2, 0]], [[1, 1, 0, 0]]], np.int32)
    columns = {"masked_lm_weights": weights, "input_mask": mask}
    table = {"masked": "masked_lm_weights", "pairs": "absent"}
    assert count(columns, table) == {"masked": 3.0, "pairs": 3.0, "examples": 3.0, "tokens": 5.0}


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("scaling", [1.0, 4096.0])
def test_norm_and_update_do_not_depend_on_loss_scale_and_accumulation(micro_batches, scaling):
    """The mean of the ids is 3, and of unequal ids in each micro-batch."""
    numbers = np.linspace(-9.0, 15.0, 24).reshape(micro_batches, -1).tolist()
    free = make(2.0, micro_batches, scaling=scaling)
    metrics = free(batch(*numbers))
    assert metrics["gradient_norm"] == pytest.approx(3.0, rel=1e-6)
    assert metrics["mlm_loss"] == pytest.approx(6.0, rel=1e-6)
    assert weight_of(free) == pytest.approx(2.0 - 0.5 * 3.0, rel=1e-5)
    assert metrics["weight_norm"] == pytest.approx(0.5, rel=1e-5)
    assert metrics["loss_scale"] == scaling
    for limit, norm in ((2.0, 2.0), (4.0, 3.0)):
        clipped = make(2.0, micro_batches, scaling=scaling, max_gradient_norm=limit)
        assert clipped(batch(*numbers))["gradient_norm"] == pytest.approx(3.0, rel=1e-6)
        assert weight_of(clipped) == pytest.approx(2.0 - 0.5 * norm, rel=1e-5)


def test_a_second_step_starts_from_no_gradient():
    step = make(0.0)
    step(batch([2.0, 2.0]))
    step(batch([2.0, 2.0]))
    assert weight_of(step) == -2.0
    assert step.state.step == 2


def test_the_complete_gradient_is_clipped_and_not_that_of_a_micro_batch():
    step = make(0.0, 2, max_gradient_norm=1.5)
    step(batch([8.0], [-4.0]))
    # The mean gradient is 2, clipped to 1.5. The two clipped gradients would cancel.
    assert weight_of(step) == pytest.approx(-0.5 * 1.5)


def test_a_gradient_that_is_not_finite_updates_nothing_and_is_counted():
    step = make(1.0, scaling="dynamic")
    scale = step.state.loss_scale.value
    metrics = step(batch([np.inf, 1.0]))
    assert weight_of(step) == 1.0
    assert all(not moment.numpy().any() for moment in step.state.moments["w"])
    assert (metrics["skipped"], metrics["weight_norm"]) == (1, 1.0)
    assert step.state.loss_scale.value == scale / 2
    assert step.state.step == 1
    step(batch([1.0, 1.0]))
    # The update that follows is the first: the skipped one does not count in the bias correction.
    assert [moment.numpy()[0] for moment in step.state.moments["w"]] == [1.0, 0.0]
    assert weight_of(step) == 0.5


def test_non_finite_gradients_in_a_row_end_the_run_with_the_step():
    step = make(1.0)
    step(batch([np.nan]))
    step(batch([np.nan]))
    with pytest.raises(DeviceError, match="step 3: the gradient was not finite in 3 steps in a"):
        step(batch([np.nan]))


def test_a_stop_between_micro_batches_leaves_the_state_of_the_step_before():
    answers = iter([False, False, True])
    step = make(1.0, 3, stop_requested=lambda: next(answers))
    with pytest.raises(StoppedBetweenMicroBatchesError):
        step(batch([1.0], [1.0], [1.0]))
    assert step.state.step == 0
    assert weight_of(step) == 1.0
    step.stop_requested = lambda: False
    step(batch([2.0], [2.0], [2.0]))
    assert weight_of(step) == 0.0
