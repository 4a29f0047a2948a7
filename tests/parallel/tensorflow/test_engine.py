"""Accumulation, recomputation, evaluation, stopping: what a step does on the devices of a process."""

import threading
import time

import numpy as np
import pytest
import tensorflow as tf
from support.bert import run_python
from support.layouts import (
    NO_DROPOUT,
    P,
    S,
    V,
    accumulate,
    assert_close,
    settings_of,
    untraced,
)
from support.model_inputs import make_examples
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.grappler import tf_optimizer
from tensorflow.python.training.saver import export_meta_graph

from bert_cli.model.bert.heads import PretrainingHeads
from bert_cli.parallel.engine import (
    StoppedBetweenMicroBatchesError,
    count,
    scaled_for_accumulation,
)
from bert_cli.parallel.tensorflow import update


def examples(number: int, micro_batches: int = 1) -> dict[str, np.ndarray]:
    """Return examples [M, B, ...] with padding and with different numbers of masked positions."""
    columns = make_examples(V, number, S, P)
    columns["next_sentence_weights"] = np.ones(number, np.float32)
    return {n: c.reshape(micro_batches, -1, *c.shape[1:]) for n, c in columns.items()}


def micro_batch(number: int) -> dict[str, np.ndarray]:
    return {name: column[0] for name, column in examples(number).items()}


@pytest.fixture(scope="module")
def plain():
    return untraced(settings_of("1x1", model=NO_DROPOUT))[0]


NAP = {"seconds": 0.0}
asleep: list[tuple[str, str]] = []
naps: list[list[tuple[str, str]]] = []
"""Who slept whenever one fell asleep: the methods of stages, and their devices."""


def napping(device, forward, backward):
    """Return a block that sleeps in both passes without using a core, as another device would."""

    def slept(method, tensor):
        def sleep(value):
            asleep.append((method, device))
            naps.append([*asleep])
            time.sleep(NAP["seconds"])
            asleep.remove((method, device))
            return value

        return tf.ensure_shape(tf.numpy_function(sleep, [tensor], tensor.dtype), tensor.shape)

    nap = tf.custom_gradient(lambda x: (slept(forward, x), lambda dy: slept(backward, dy)))

    def block(hidden, columns, key):
        return nap(hidden)

    block.trace_key = "nap"
    return block


@pytest.fixture(scope="module")
def run():
    """A run in two pipelines, of stages that can sleep."""
    made = untraced(settings_of("2x2"))
    for first, *others, last in made[0].replicas:
        first.body.insert(1, napping(first.device, "forward", "backward"))
        last.body.insert(0, napping(last.device, "forward_backward", "forward_backward"))
        for stage in others:
            stage.body.insert(0, napping(stage.device, "forward", "backward"))
    return made


@pytest.fixture(scope="module")
def pipelines(run):
    return run[0]


def test_micro_batches_have_the_gradient_of_one_large_batch(plain):
    sums, expected = accumulate(plain, examples(8))
    # Their numbers of masked positions differ, so a mean of their means would be another gradient.
    their_sums, gradient = accumulate(plain, examples(8, 4))
    assert_close(gradient, expected, 1e-6)
    assert their_sums["mlm_loss"] == pytest.approx(sums["mlm_loss"], rel=1e-6)


def test_dropout_depends_on_the_index_of_the_micro_batch_and_on_nothing_else(pipelines):
    first, same, other = (accumulate(pipelines, examples(4, 2), n)[1] for n in (5, 5, 6))
    for name, gradient in first.items():
        np.testing.assert_array_equal(gradient, same[name])
    assert any(np.abs(gradient - other[name]).max() > 1e-4 for name, gradient in first.items())
    # After two micro-batches without weight in the loss, the next two are those of index 6.
    batch = {name: np.concatenate([c, c]) for name, c in examples(4, 2).items()}
    for name in ("masked_lm_weights", "next_sentence_weights"):
        batch[name][:2] = 0.0
    alone = {name: column[2:] for name, column in batch.items()}
    assert_close(accumulate(pipelines, batch, 4)[1], accumulate(pipelines, alone, 6)[1], 1e-6)


def products_of(engine) -> int:
    """Return the matrix products that the graph optimizer leaves in the step of the last stage."""
    (stage,) = engine.replicas[0]
    counts = {name: tf.constant(1.0) for name in ("masked", "pairs", "examples", "tokens")}
    arguments = None, stage.columns(micro_batch(2)), np.array([3, 0], np.int32), counts
    scale, is_first = tf.constant(1.0), tf.constant(True)
    graph = stage._forward_backward.get_concrete_function(*arguments, scale, is_first).graph
    meta = export_meta_graph(graph=graph, graph_def=graph.as_graph_def())
    fetched = [op.name for op in graph.get_operations() if op.type == "If"]  # which add gradients
    meta.collection_def["train_op"].node_list.value.extend(fetched)
    optimized = tf_optimizer.OptimizeGraph(config_pb2.ConfigProto(), meta)
    return sum("MatMul" in node.op for node in optimized.node)


def test_recomputation_in_the_last_stage_really_runs_the_forward_pass_again(plain):
    """If the graph optimizer merged the two passes, all activations would be alive after all."""
    again, *_ = untraced(settings_of("1x1", model=NO_DROPOUT, parallel={"recompute": True}))
    # One more forward pass of every block but the last: the products of two layers and the pooler.
    assert products_of(again) - products_of(plain) >= 2 * 6


def test_evaluation_has_no_dropout_and_leaves_no_gradient(plain, pipelines):
    pipelines.clear_gradients()
    batch = micro_batch(4)
    assert pipelines.evaluate(batch) == pytest.approx(plain.evaluate(batch), rel=1e-6)
    assert not any(stage.has_gradients for stage in pipelines.replicas[0])


def test_the_loss_of_a_micro_batch_is_scaled_by_the_power_of_two_below_their_number():
    sizes = {1: 1.0, 2: 2.0, 3: 2.0, 4: 4.0, 1023: 512.0, 2048: 2048.0}
    for micro_batches, factor in sizes.items():
        assert scaled_for_accumulation(1.0, micro_batches) == factor
        assert scaled_for_accumulation(0.5, micro_batches) == 0.5 * factor


def test_a_request_to_stop_ends_a_step_of_a_pipeline_soon_and_leaves_no_gradient(
    pipelines, monkeypatch
):
    monkeypatch.setattr("bert_cli.parallel.tensorflow.engine.AGREE_SECONDS", 0.05)
    # Minutes of work.
    batch = {name: np.repeat(column, 20_000, 0) for name, column in examples(4, 2).items()}
    requested = threading.Event()
    threading.Timer(0.2, requested.set).start()
    counts = count(batch, PretrainingHeads.COUNTS)
    with pytest.raises(StoppedBetweenMicroBatchesError):
        pipelines.accumulate(batch, 0, counts, 1.0, requested.is_set)
    assert not any(stage.has_gradients for row in pipelines.replicas for stage in row)
    # The engine can run the next step.
    accumulate(pipelines, examples(4, 2))


def test_an_error_in_one_stage_ends_the_step_with_that_error(pipelines, monkeypatch):
    stage = pipelines.replicas[0][1]
    backward, calls = stage.backward, []

    def fail_at_the_third(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("a stage broke")
        return backward(*arguments)

    monkeypatch.setattr(stage, "backward", fail_at_the_third)
    with pytest.raises(ValueError, match="a stage broke"):
        accumulate(pipelines, examples(16, 8))


FAILING = """
import time
from support.layouts import SHALLOW, settings_of, untraced

engine, *_ = untraced(settings_of("2x1", model=SHALLOW))
engine.all_reduce_gradients()

def fail():
    time.sleep(0.5)  # the other device is in the all-reduce by now
    raise MemoryError("no room")

engine.updates[1][0].all_reduce_gradients = fail
try:
    engine.all_reduce_gradients()
except MemoryError as error:
    print("raised", error)
"""


@pytest.mark.tensorflow
def test_a_device_that_fails_in_the_update_does_not_leave_the_others_waiting():
    """In a process of its own: after a failed collective TensorFlow accepts no other."""
    done = run_python(FAILING)
    assert done.stdout == "raised no room\n", done.stderr


def test_stages_on_different_devices_work_at_the_same_time(pipelines, monkeypatch):
    monkeypatch.setitem(NAP, "seconds", 0.05)
    naps.clear()
    accumulate(pipelines, examples(32, 16))
    assert len(naps) >= 2 * 3 * 16 and not asleep

    def most(methods):
        return max(len({device for name, device in nap if name in methods}) for nap in naps)

    # The stages of a replica, and the same method on both replicas.
    assert most(["forward", "backward"]) >= 3
    assert min(most([name]) for name in ("forward", "backward", "forward_backward")) == 2


def test_a_gradient_that_overflows_on_one_replica_skips_one_step_on_all(run, monkeypatch):
    engine, state, step, reader = run
    before = {name: weight.numpy().copy() for name, weight in state.weights.items()}
    # Of the second replica alone, whose micro-batches the first one does not have.
    poisoned = engine.replicas[1][0].accumulators["hid_0/attention/query/kernel"]
    all_reduce = engine.all_reduce_gradients

    def poison_and_reduce():
        poisoned.assign_add(np.full(poisoned.shape, np.nan, np.float32))
        return all_reduce()

    batches = [reader[0], reader[1]]
    for batch in batches:  # as in the other tests, which have traced this
        batch["next_sentence_weights"] = np.ones(batch["next_sentence_labels"].shape, np.float32)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "all_reduce_gradients", poison_and_reduce)
        assert step(batches[0])["skipped"] == 1
    for name, weight in state.weights.items():
        for replica in weight.variables:
            np.testing.assert_array_equal(replica.numpy(), before[name])
    assert not any(moment.numpy().any() for moment in state.slots.values())
    assert not any(stage.has_gradients for row in engine.replicas for stage in row)
    # The next one is not; eagerly, because to trace the update takes five seconds.
    monkeypatch.setattr(update, "traced", lambda function, *_: function)
    assert step(batches[1])["skipped"] == 1
    for name, weight in state.weights.items():
        for replica in weight.variables:
            assert np.isfinite(replica).all() and (replica.numpy() != before[name]).any(), name


def test_what_is_assigned_is_on_every_replica(run):
    _, state, *_ = run
    for value in (*state.weights.values(), *state.slots.values()):
        first, second = value.variables
        second.assign_add(tf.ones_like(second))
        value.assign(value.numpy())
        np.testing.assert_array_equal(first.numpy(), second.numpy())
