"""One step on one device: accumulation, recomputation and evaluation give the gradients they should."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.grappler import tf_optimizer
from tensorflow.python.training.saver import export_meta_graph

from bert_cli.config.schema import BertConfig
from bert_cli.model.bert import build_blocks, named_weights
from bert_cli.parallel.engine import Engine
from bert_cli.train.step import count, raised

S, P, V = 16, 3, 50
SHAPE = {
    "vocab_size": V,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": S,
    "initializer_range": 0.2,
}
DROPOUT = BertConfig(**SHAPE)
NO_DROPOUT = BertConfig(**SHAPE, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


NAMES = list(named_weights(build_blocks(DROPOUT, seed=0, policy="float32")))


def examples(number: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Examples with padding and with different numbers of masked places."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(8, S + 1, number)
    mask = (np.arange(S) < lengths[:, None]).astype(np.int32)
    masked = generator.integers(1, P + 1, number)
    weights = (np.arange(P) < masked[:, None]).astype(np.float32)
    return {
        "input_ids": (generator.integers(5, V, (number, S)) * mask).astype(np.int32),
        "input_mask": mask,
        "segment_ids": (mask * (np.arange(S) > 6)).astype(np.int32),
        "masked_lm_positions": np.tile(np.arange(1, P + 1, dtype=np.int32), (number, 1)),
        "masked_lm_ids": generator.integers(5, V, (number, P)).astype(np.int32),
        "masked_lm_weights": weights,
        "next_sentence_labels": generator.integers(0, 2, number).astype(np.int32),
    }


def engine(config: BertConfig, *, recompute: bool = False, policy: str = "float32") -> Engine:
    blocks = build_blocks(config, seed=3, policy=policy)
    *body, head = [block for _, block in blocks]
    return Engine(body, head, named_weights(blocks), seed=3, recompute=recompute)


def gradients(player: Engine, batch: dict[str, np.ndarray], micro_batches: int, first: int = 0):
    """The accumulated gradients of a batch cut into micro-batches, and the sums."""
    player.clear()
    counts = count(batch)
    sums: dict[str, float] = {}
    cut = {name: np.split(column, micro_batches) for name, column in batch.items()}
    for number in range(micro_batches):
        piece = {name: pieces[number] for name, pieces in cut.items()}
        for name, value in player.accumulate(piece, first + number, counts, 1.0).items():
            sums[name] = sums.get(name, 0.0) + float(value)
    return [accumulator.numpy() for accumulator in player.accumulators], sums


def assert_equal(a, b, tolerance: float) -> None:
    """Equal relative to the norm of each tensor.

    The true gradient of an attention key's bias is zero: what is there is rounding, compared with
    the norm of the whole gradient.
    """
    whole = np.sqrt(sum(np.sum(np.square(right)) for right in b))
    for name, left, right in zip(NAMES, a, b, strict=True):
        scale = whole if name.endswith("attention/key/bias") else np.linalg.norm(right)
        assert np.linalg.norm(left - right) <= tolerance * scale, name


@pytest.mark.parametrize("recompute", [False, True])
def test_micro_batches_give_the_gradient_of_the_one_big_batch(recompute):
    player, batch = engine(NO_DROPOUT, recompute=recompute), examples(8)
    whole, sums = gradients(player, batch, 1)
    for micro_batches in (2, 4, 8):
        pieces, piece_sums = gradients(player, batch, micro_batches)
        assert_equal(pieces, whole, 1e-6)
        assert piece_sums["mlm_loss"] == pytest.approx(sums["mlm_loss"], rel=1e-6)


def test_a_mean_of_means_would_be_another_gradient():
    """The batch has uneven numbers of masked places, so the test above can fail."""
    batch = examples(8)
    counts = [np.sum(piece) for piece in np.split(batch["masked_lm_weights"], 4)]
    assert len(set(counts)) > 1


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_recomputation_draws_the_same_dropout_and_gives_the_same_gradients(policy):
    batch = examples(4)
    plain, _ = gradients(engine(DROPOUT, policy=policy), batch, 2)
    again, _ = gradients(engine(DROPOUT, recompute=True, policy=policy), batch, 2)
    assert_equal(again, plain, 1e-6)


def test_dropout_depends_on_the_position_of_the_micro_batch_and_on_nothing_else():
    player, batch = engine(DROPOUT), examples(4)
    first, _ = gradients(player, batch, 1, first=5)
    same, _ = gradients(player, batch, 1, first=5)
    other, _ = gradients(player, batch, 1, first=6)
    for left, right in zip(first, same, strict=True):
        np.testing.assert_array_equal(left, right)
    assert any(np.abs(left - right).max() > 1e-4 for left, right in zip(first, other, strict=True))


def test_recomputation_really_runs_the_forward_pass_again():
    """If the graph optimizer merged the two passes, all activations would be kept after all."""

    def products(recompute: bool) -> int:
        player, batch = engine(NO_DROPOUT, recompute=recompute), examples(2)
        gradients(player, batch, 1)
        function = player._accumulate.get_concrete_function(
            {name: tf.TensorSpec(c.shape, c.dtype) for name, c in batch.items()},
            tf.TensorSpec([2], tf.int32),
            {name: tf.TensorSpec([], tf.float32) for name in ("masked", "examples")},
            tf.TensorSpec([], tf.float32),
        )
        graph = function.graph
        meta = export_meta_graph(graph=graph, graph_def=graph.as_graph_def())
        kept = [op.name for op in graph.get_operations() if op.type == "AssignAddVariableOp"]
        meta.collection_def["train_op"].node_list.value.extend(kept)
        optimized = tf_optimizer.OptimizeGraph(config_pb2.ConfigProto(), meta)
        return sum("MatMul" in node.op for node in optimized.node)

    plain, recomputed = products(False), products(True)
    # One more forward pass of every block but the last: the products of two layers and the pooler.
    assert recomputed - plain >= 2 * 6


def test_evaluation_has_no_dropout_and_leaves_no_gradient():
    player, batch = engine(DROPOUT), examples(4)
    player.clear()
    a = {name: float(value) for name, value in player.evaluate(batch).items()}
    b = {name: float(value) for name, value in engine(NO_DROPOUT).evaluate(batch).items()}
    assert a == b
    assert all(not accumulator.numpy().any() for accumulator in player.accumulators)


def test_the_loss_scale_multiplies_the_gradients():
    player, batch = engine(NO_DROPOUT), examples(2)
    plain, _ = gradients(player, batch, 1)
    player.clear()
    player.accumulate(batch, 0, count(batch), 1024.0)
    scaled = [accumulator.numpy() / 1024.0 for accumulator in player.accumulators]
    assert_equal(scaled, plain, 1e-6)


@pytest.mark.parametrize("policy", ["float16", "mixed_float16"])
def test_float16_gradients_survive_a_step_of_thousands_of_micro_batches(policy):
    """A micro-batch's share of such a step is small: the step's scaling has to make up for it."""
    batch = {name: column[None] for name, column in examples(4).items()}
    exact, _ = gradients(engine(NO_DROPOUT), examples(4), 1)

    def error(micro_batches: int, scale: float) -> float:
        """The largest relative error of a kernel's gradient in a step of so many micro-batches."""
        player = engine(NO_DROPOUT, policy=policy)
        counts = {name: value * micro_batches for name, value in count(batch).items()}
        player.clear()
        player.accumulate({n: c[0] for n, c in batch.items()}, 0, counts, scale)
        found = [a.numpy() * micro_batches / scale for a in player.accumulators]
        return max(
            np.linalg.norm(left - right) / np.linalg.norm(right)
            for name, left, right in zip(NAMES, found, exact, strict=True)
            if name.endswith("kernel")
        )

    assert error(2048, raised(1.0, 2048)) == pytest.approx(error(1, raised(1.0, 1)), rel=0.05)
    assert error(2048, raised(1.0, 2048)) < 0.01
    # What the scale alone would give, so that this test can fail.
    assert error(2048, 1.0) > 0.02


def test_a_function_is_traced_once_however_many_micro_batches_there_are():
    player, batch = engine(DROPOUT), examples(8)
    gradients(player, batch, 8)
    gradients(player, batch, 8, first=8)
    assert player._accumulate.experimental_get_tracing_count() == 1
