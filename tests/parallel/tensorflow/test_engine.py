"""Accumulation, recomputation, evaluation, stopping: what a step does on the devices it has."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from support.layouts import NO_DROPOUT, P, S, V, assert_close, built, gradients, settings_of
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.grappler import tf_optimizer
from tensorflow.python.training.saver import export_meta_graph

from bert_cli.model.heads import PretrainingHeads
from bert_cli.parallel.engine import StoppedBetweenMicroBatchesError, count, scaled_for_accumulation
from bert_cli.parallel.tensorflow.runtime import traced
from bert_cli.parallel.tensorflow.stage import Stage
from bert_cli.parallel.tensorflow.trace import Trace, overlap

KEY = np.array([3, 0], np.int32)


def examples(number: int, micro_batches: int = 1, seed: int = 0) -> dict[str, np.ndarray]:
    """Examples [M, B, ...] with padding and with different numbers of masked places."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(8, S + 1, number)
    mask = (np.arange(S) < lengths[:, None]).astype(np.int32)
    masked = generator.integers(1, P + 1, number)
    weights = (np.arange(P) < masked[:, None]).astype(np.float32)
    columns = {
        "input_ids": (generator.integers(5, V, (number, S)) * mask).astype(np.int32),
        "input_mask": mask,
        "segment_ids": (mask * (np.arange(S) > 6)).astype(np.int32),
        "masked_lm_positions": np.tile(np.arange(1, P + 1, dtype=np.int32), (number, 1)),
        "masked_lm_ids": generator.integers(5, V, (number, P)).astype(np.int32),
        "masked_lm_weights": weights,
        "next_sentence_labels": generator.integers(0, 2, number).astype(np.int32),
        "next_sentence_weights": np.ones(number, np.float32),
    }
    return {n: c.reshape(micro_batches, -1, *c.shape[1:]) for n, c in columns.items()}


def engine_of(layout: str = "1x1", **changes):
    return built(settings_of(layout, **changes), moves=False)[0]


def played(engine, batch, position: int = 0, scale: float = 1.0):
    """Sums and gradients of a batch from a clean start."""
    engine.clear_gradients()
    sums = engine.accumulate(batch, position, count(batch, PretrainingHeads.COUNTS), scale)
    engine.all_reduce_gradients(1.0)
    return sums, gradients(engine)


@pytest.fixture(scope="module")
def plain():
    """One device without dropout."""
    return engine_of(model=NO_DROPOUT)


@pytest.fixture(scope="module")
def dropping():
    """One device with dropout."""
    return engine_of()


def test_micro_batches_give_the_gradient_of_the_one_big_batch(plain):
    sums, whole = played(plain, examples(8))
    for micro_batches in (2, 4, 8):
        piece_sums, pieces = played(plain, examples(8, micro_batches))
        assert_close(pieces, whole, 1e-6)
        assert piece_sums["mlm_loss"] == pytest.approx(sums["mlm_loss"], rel=1e-6)


def test_a_mean_of_means_would_be_another_gradient():
    """The batch has uneven numbers of masked places, so the test above can fail."""
    counts = [np.sum(piece) for piece in examples(8, 4)["masked_lm_weights"]]
    assert len(set(counts)) > 1


def test_recomputation_in_16_bits_gives_the_same_gradients():
    batch = examples(4, 2)
    _, kept = played(engine_of(precision="mixed_bfloat16"), batch)
    _, again = played(engine_of(precision="mixed_bfloat16", parallel={"recompute": True}), batch)
    assert_close(again, kept, 1e-6)


def test_dropout_depends_on_the_position_of_the_micro_batch_and_on_nothing_else(dropping):
    batch = examples(4)
    _, first = played(dropping, batch, position=5)
    _, same = played(dropping, batch, position=5)
    _, other = played(dropping, batch, position=6)
    for name, gradient in first.items():
        np.testing.assert_array_equal(gradient, same[name])
    assert any(np.abs(gradient - other[name]).max() > 1e-4 for name, gradient in first.items())


def products_of(function, *arguments) -> int:
    """Matrix products left in a function's graph after the graph optimizer has merged what it can."""
    graph = function.get_concrete_function(*arguments).graph
    meta = export_meta_graph(graph=graph, graph_def=graph.as_graph_def())
    kept = [op.name for op in graph.get_operations() if op.type == "If"]  # where gradients go
    meta.collection_def["train_op"].node_list.value.extend(kept)
    optimized = tf_optimizer.OptimizeGraph(config_pb2.ConfigProto(), meta)
    return sum("MatMul" in node.op for node in optimized.node)


def test_recomputation_within_a_turn_really_runs_the_forward_pass_again(plain):
    """If the graph optimizer merged the two passes, all activations would be kept after all."""

    def products(engine) -> int:
        (stage,) = engine.replicas[0]
        batch = {name: column[0] for name, column in examples(2).items()}
        counts = {name: tf.constant(1.0) for name in ("masked", "pairs", "examples", "tokens")}
        given = None, stage.columns(batch), KEY, counts, tf.constant(1.0), tf.constant(True)
        return products_of(stage._forward_backward, *given)

    again = engine_of(model=NO_DROPOUT, parallel={"recompute": True})
    # One more forward pass of every block but the last: the products of three layers and the pooler.
    assert products(again) - products(plain) >= 3 * 6


def test_what_a_stage_keeps_is_its_input_or_those_of_its_layers():
    kept = {}
    for by in ("stage", "layer"):
        engine = engine_of("1x2", parallel={"recompute": True, "recompute_by": by})
        middle = engine.replicas[0][1]
        batch = {name: column[0] for name, column in examples(2).items()}
        hidden = tf.zeros([2, S, 16])
        _, kept[by] = middle.forward(hidden, middle.columns(batch), KEY)
    assert [tuple(value.shape) for value in kept["stage"]] == [(2, S, 16)]
    assert [tuple(value.shape) for value in kept["layer"]] == [(2, S, 16)] * 3


def test_evaluation_has_no_dropout_and_leaves_no_gradient(plain, dropping):
    batch = {name: column[0] for name, column in examples(4).items()}
    plain.clear_gradients()
    dropping.clear_gradients()
    assert dropping.evaluate(batch) == plain.evaluate(batch)
    spread = engine_of("2x2")
    assert spread.evaluate(batch) == pytest.approx(plain.evaluate(batch), rel=1e-6)
    for stage in dropping.replicas[0] + spread.replicas[0]:
        assert not stage.has_gradients


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("1x1", {}),
        ("1x1", {"parallel": {"recompute": True}}),
        ("1x1", {"parallel": {"recompute": True}, "compile": "stages"}),
        ("1x2", {}),
        ("1x2", {"compile": "stages"}),
        ("1x2", {"parallel": {"recompute": True}}),
        ("1x2", {"parallel": {"recompute": True, "recompute_by": "stage"}}),
    ],
)
def test_of_what_was_there_before_a_step_nothing_is_added_to_its_gradients(layout, changes):
    """Also to the word table's, which has two in a micro-batch where layers are run again."""
    engine = engine_of(layout, **changes)
    _, clean = played(engine, examples(4))
    for stage in engine.replicas[0]:
        for accumulator in stage.accumulators.values():
            accumulator.assign(np.full(accumulator.shape, np.nan, np.float32))
    _, again = played(engine, examples(4))
    for name, gradient in again.items():
        np.testing.assert_array_equal(gradient, clean[name], err_msg=name)
    engine.apply_update(1.0, 0.0, 0, 0)
    assert all(not stage.has_gradients for stage in engine.replicas[0])


def test_a_weight_without_a_part_in_the_loss_has_no_gradient_whatever_was_there():
    used, other = tf.Variable([1.0, 2.0]), tf.Variable([3.0])

    def head(hidden, labels, counts, key):
        loss = tf.reduce_sum(used**2)
        return loss, {"loss": loss}

    head.READS, head.COUNTS = (), ()
    stage = Stage([], head, {"used": used, "other": other}, device="CPU:0", saved="all")
    for _ in range(2):
        stage.accumulators["other"].assign([7.0])
        stage.forward_backward(None, {}, KEY, {}, tf.constant(1.0))
    np.testing.assert_array_equal(stage.accumulators["used"], [4.0, 8.0])
    np.testing.assert_array_equal(stage.accumulators["other"], [0.0])


def test_the_loss_scale_multiplies_the_gradients(plain):
    _, once = played(plain, examples(2))
    _, scaled = played(plain, examples(2), scale=1024.0)
    assert_close({name: value / 1024.0 for name, value in scaled.items()}, once, 1e-6)


@pytest.mark.parametrize("policy", ["float16", "mixed_float16"])
def test_float16_gradients_survive_a_step_of_thousands_of_micro_batches(policy, plain):
    """A micro-batch's share of such a step is small: the step's scaling has to make up for it."""
    batch = examples(4)
    _, exact = played(plain, batch)
    engine = engine_of(model=NO_DROPOUT, precision=policy)

    def error(micro_batches: int, scale: float) -> float:
        """The largest relative error of a kernel's gradient in a step of so many micro-batches."""
        counts = {
            name: value * micro_batches
            for name, value in count(batch, PretrainingHeads.COUNTS).items()
        }
        engine.clear_gradients()
        engine.accumulate(batch, 0, counts, scale)
        engine.all_reduce_gradients(1.0)
        return max(
            np.linalg.norm(found * micro_batches / scale - exact[name])
            / np.linalg.norm(exact[name])
            for name, found in gradients(engine).items()
            if name.endswith("kernel")
        )

    assert error(2048, scaled_for_accumulation(1.0, 2048)) == pytest.approx(
        error(1, scaled_for_accumulation(1.0, 1)), rel=0.05
    )
    assert error(2048, scaled_for_accumulation(1.0, 2048)) < 0.01
    # What the scale alone would give, so that this test can fail.
    assert error(2048, 1.0) > 0.02


@pytest.mark.parametrize("layout", ["1x1", "5 stages on 4 devices"])
def test_functions_are_traced_once_however_many_micro_batches_there_are(layout):
    engine = engine_of(layout)
    names = (
        "_forward_backward",
        "_forward",
        "_forward_saving_inputs",
        "_recompute_backward",
        "_accumulate",
    )

    def traces() -> list[int]:
        return [
            getattr(stage, name).experimental_get_tracing_count()
            for stage in engine.replicas[0]
            for name in names
        ]

    before = traces()
    assert sum(before) >= len(engine.replicas[0])
    for micro_batches in (1, 8, 64):
        played(engine, examples(2 * micro_batches, micro_batches))
    assert traces() == before


def test_a_wish_to_stop_ends_a_step_of_a_pipeline_soon_and_leaves_no_gradient():
    engine = engine_of("2x2")
    asked = threading.Event()
    threading.Timer(0.5, asked.set).start()
    # Minutes of work.
    batch = examples(2 * 40_000, 40_000)
    began = time.monotonic()
    with pytest.raises(StoppedBetweenMicroBatchesError):
        engine.accumulate(batch, 0, count(batch, PretrainingHeads.COUNTS), 1.0, asked.is_set)
    assert time.monotonic() - began < 15
    for row in engine.replicas:
        for stage in row:
            assert not stage.has_gradients
    # And the engine is fit for the next step.
    played(engine, examples(4, 2))


def test_an_error_in_one_stage_ends_the_step_with_that_error():
    engine = engine_of("1x4")
    stage = engine.replicas[0][2]
    backward, calls = stage.backward, []

    def break_at_the_third(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("a stage broke")
        return backward(*arguments)

    stage.backward = break_at_the_third
    batch = examples(16, 8)
    with pytest.raises(ValueError, match="a stage broke"):
        engine.accumulate(batch, 0, count(batch, PretrainingHeads.COUNTS), 1.0)


FAILING = """
import sys, time
import numpy as np
from support.layouts import built, settings_of
from bert_cli.model.heads import PretrainingHeads
from bert_cli.parallel.engine import count

engine, _, _, reader = built(settings_of("2x1"), moves=False)
batch = reader[0]
engine.accumulate(batch, 0, count(batch, PretrainingHeads.COUNTS), 1.0)

def fail(shrink):
    time.sleep(1)  # the other one stands in the sum by now
    raise MemoryError("no room")

engine.updates[1][0].all_reduce_gradients = fail
try:
    engine.all_reduce_gradients(1.0)
except MemoryError as error:
    print("raised", error)
"""


def test_a_device_that_fails_in_the_update_does_not_leave_the_others_waiting():
    """In a process of its own: the collectives of one that failed are of no more use."""
    done = subprocess.run(
        [sys.executable, "-c", FAILING],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "raised no room\n", done.stderr


class Sleeper:
    """A block that takes its time without using a core, as a device of its own would."""

    READS = ("input_mask",)

    def __init__(self, seconds: float):
        self.seconds = seconds

    def __call__(self, hidden, batch, key):
        def wait(value):
            time.sleep(self.seconds)
            return value

        asleep = tf.numpy_function(wait, [tf.stop_gradient(hidden)], hidden.dtype)
        asleep.set_shape(hidden.shape)
        return hidden + 0.0 * asleep


def test_stages_on_different_devices_work_at_the_same_time():
    """Three sleeping stages: the step takes little more than the bubble and one stage's work."""
    nap, micro_batches = 0.05, 8
    trace = Trace(1)
    settings = settings_of("gather alone", parallel={"recompute": True, "recompute_by": "stage"})
    engine = built(settings, moves=False)[0]
    first, *middle, _ = engine.replicas[0]
    first.body.append(Sleeper(nap))
    for stage in middle:
        stage.body.append(Sleeper(nap))
        stage.reads = [*stage.reads, "input_mask"]
        stage.segments = [stage.body]
        # Traced before it slept.
        stage._forward_saving_inputs = traced(stage._run_segments)
        stage._recompute_backward = traced(stage._recompute)
    first.segments = [first.body]
    first._forward_saving_inputs = traced(first._run_segments)
    first._recompute_backward = traced(first._recompute)
    batch = examples(2 * micro_batches, micro_batches)
    engine.compile_stages(batch, count(batch, PretrainingHeads.COUNTS))
    engine.trace = trace
    began = time.monotonic()
    engine.accumulate(batch, 0, count(batch, PretrainingHeads.COUNTS), 1.0)
    took = time.monotonic() - began
    # Forward and again in the backward pass, three stages, one after the other.
    in_series = 2 * 3 * nap * micro_batches
    ideal = 2 * nap * (micro_batches + 2)
    busy, together = overlap(trace.bars)
    assert took < 0.6 * in_series, (took, ideal)
    assert together > 0.5 * busy
    assert {(bar.stage, bar.kind) for bar in trace.bars} == {
        *((stage, kind) for stage in range(3) for kind in ("forward", "backward")),
        (3, "forward-backward"),
    }


def test_stages_that_compute_work_at_the_same_time_too():
    """From the trace of real work: on two cores two stages are seen at work at once."""
    wide = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4}
    engine = engine_of("1x4", model=wide)
    batch = examples(32 * 8, 8)
    engine.compile_stages(
        {name: column[:1] for name, column in batch.items()}, count(batch, PretrainingHeads.COUNTS)
    )
    engine.trace = Trace(1)
    engine.accumulate(batch, 0, count(batch, PretrainingHeads.COUNTS), 1.0)
    busy, together = overlap(engine.trace.bars)
    assert together > 0.3 * busy
