"""The operations of a model compared with its graph, the rate of products, and the parts of a step's time."""

import time
from math import prod

import numpy as np
import pytest
import tensorflow as tf

from bert_cli.config.settings import BertConfig
from bert_cli.config.tools import BenchPretrainSettings, BenchSquadSettings
from bert_cli.parallel.cluster import Processes
from bert_cli.parallel.engine import count
from bert_cli.tasks.bench import measure
from bert_cli.tasks.bench.flops import (
    Product,
    Shape,
    attention,
    model_flops,
    products,
    shape_of,
)
from bert_cli.tasks.run import build

MODEL = {
    "vocab_size": 70,
    "hidden_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 20,
}
COMMON = {
    "bert_config": MODEL,
    "global_batch": {"micro_batch_size": 2},
    "optimizer_opts": {"name": "AdamW", "learning_rate": {"max_learning_rate": 1e-3}},
}
PRETRAIN = {**COMMON, "max_seq_length": 40, "max_predictions_per_seq": 5}
JOBS = {
    "pretrain": (BenchPretrainSettings, PRETRAIN),
    "recomputed": (
        BenchPretrainSettings,
        {**PRETRAIN, "parallel": {"recompute": True, "recompute_by": "layer"}},
    ),
    "packs": (BenchPretrainSettings, {**PRETRAIN, "max_sequences_per_pack": 3}),
    "squad": (
        BenchSquadSettings,
        {**COMMON, "max_seq_length": 48, "doc_stride": 8, "max_query_length": 8},
    ),
}


def product_flops(graph) -> int:
    """Return 2 m n k of every product in a traced graph; functions that it calls must have none."""
    found = 0
    for operation in graph.get_operations():
        if operation.type in ("MatMul", "BatchMatMulV2"):
            names = ("transpose_a", "adj_x")
            name = next(name for name in names if name in operation.node_def.attr)
            left = operation.inputs[0].shape.as_list()
            inner = left[-2] if operation.get_attr(name) else left[-1]
            found += 2 * prod(operation.outputs[0].shape.as_list()) * inner
        assert operation.type not in ("Einsum", "_FusedMatMul"), operation
    library = graph.as_graph_def().library.function
    assert not [n for f in library for n in f.node_def if "MatMul" in n.op or n.op == "Einsum"]
    return found


def step_flops(kind, values):
    """Return the operations in the graph of a micro-batch, its settings and its shape."""
    settings = kind.model_validate(values)
    mesh = build.open_mesh(settings, Processes(()))
    job = measure.spec_of(settings, mesh)
    parts = build.build_run(settings, mesh, job.plan)
    (stage,) = parts.engine.replicas[0]
    # Without the shared trace of the layers, whose products are inside of functions.
    stage.run_block = lambda block, *given: block(*given)
    micro = {column: values[0] for column, values in job.sample.items()}
    counts = {name: tf.constant(1.0) for name in count(job.sample, parts.engine.head.COUNTS)}
    given = None, stage.columns(micro), tf.constant([1, 0]), counts, tf.constant(1.0)
    traced = stage._forward_backward.get_concrete_function(*given, tf.constant(True))
    return product_flops(traced.graph), settings, shape_of(job.sample)


@pytest.mark.parametrize("name", JOBS)
def test_the_formula_counts_the_products_of_the_graph(name):
    counted, settings, shape = step_flops(*JOBS[name])
    config = settings.bert_config
    # Exactly: look-ups are no products, and each product has two more in the backward pass.
    expected = model_flops(config, settings.LAST_BLOCKS, shape)
    if settings.parallel.recompute:
        # Recomputation of all blocks but the head is not in the formula.
        forward = products(config, ["enc_out", "pool"], shape)
        expected += attention(config, shape) + sum(one.flops for one in forward)
    assert counted == expected


def test_bert_base_at_128_follows_the_formula_of_palm():
    config, shape = BertConfig(vocab_size=30522), Shape(examples=1, positions=128, masked=20)
    # 84,934,656 parameters of the layers' matrices; those of the heads at 20 positions of 128.
    layers = 12 * (4 * 768**2 + 2 * 768 * 3072)
    head = 20 * (768**2 + 768 * 30522) + 768**2 + 2 * 768
    expected = 6 * (128 * layers + head) + 12 * 12 * 768 * 128 * 128
    assert layers == 84_934_656
    assert model_flops(config, ("enc_out", "pool", "heads"), shape) == expected


def test_the_shape_of_a_batch_includes_all_its_micro_batches():
    names = {"input_ids": 16, "masked_lm_positions": 5, "next_sentence_positions": 4}
    batch = {name: np.zeros((3, 2, size)) for name, size in names.items()}
    assert shape_of(batch) == Shape(examples=6, positions=16, masked=5, sequences=4)
    assert shape_of({"input_ids": np.zeros((2, 8))}) == Shape(examples=2, positions=8)


def test_the_rate_is_that_of_the_fastest_product_of_the_largest_matrices(monkeypatch):
    measured = []

    def rate(product, dtype, device):
        measured.append(product)
        return product.width

    monkeypatch.setattr(measure, "_rate", rate)
    monkeypatch.setattr(measure, "resize", lambda product, kind: product)
    layer = [Product(4096, 768, 768)] * 4 + [Product(4096, 768, 3072), Product(4096, 3072, 768)]
    head = [Product(32, 768, 2), Product(640, 768, 768), Product(640, 768, 30522)]
    assert measure.product_rate(layer * 12 + head, "bfloat16", "CPU:0") == 3072
    assert measured == [
        Product(640, 768, 30522),
        Product(4096, 768, 3072),
        Product(4096, 3072, 768),
    ]


def test_a_measured_product_has_enough_work_and_no_more_memory_than_a_step():
    least, most = measure.PRODUCT_FLOPS["CPU"]
    limit = measure.PRODUCT_ELEMENTS["CPU"]
    for matrix in ((768, 30522), (768, 3072), (64, 60), (16, 2)):
        for rows in (1, 300, 10**7):
            product = measure.resize(Product(rows, *matrix), "CPU")
            elements = product.rows * (product.width + product.outputs)
            assert elements <= limit and product.flops <= 1.01 * most
            assert product.flops >= least or elements > 0.99 * limit


def test_a_product_is_really_multiplied(monkeypatch):
    """Its rate is that of NumPy within a factor of 15; without the product it would be a thousand times as high."""
    monkeypatch.setattr(measure, "ROUNDS", 3)
    rate = measure.product_rate([Product(1024, 1024, 1024)], "float32", "CPU:0")
    matrix = np.ones((1024, 1024), np.float32)
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - began)
    assert 1 / 15 < rate / (2 * 1024**3 / min(seconds)) < 15


def step(seconds: float, waited: float = 0.0, computed: float = 0.0, skipped: float = 0.0):
    counts = {"examples": 8, "tokens": 80, "places": 100, "flops": 1000, "skipped": skipped}
    return {"seconds": seconds, "input_wait": waited, "forward_backward": computed, **counts}


def test_the_parts_of_an_update_include_the_synchronization_of_the_devices(monkeypatch):
    now = [0.0]

    def work(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    watch = measure.Stopwatch(lambda: work(0.25))
    for seconds in (3.0, 1.0):
        with watch.part("forward_backward"):
            work(seconds)
    with pytest.raises(ValueError, match="failed"), watch.part("optimizer"):
        work(1.0)
        raise ValueError("failed")
    assert watch.seconds == {"forward_backward": 4.5, "optimizer": 1.0}


def test_warm_up_and_one_slow_step_change_no_rate_and_the_shares_add_up_to_one():
    steps = [step(100.0, 90.0), step(50.0), step(2.0, 0.5, 1.0), step(2.0, 0.5, 1.0)]
    metrics = measure.summarize(steps, 2)
    assert metrics["steps"] == 2 and metrics["input_wait_share"] == 0.25
    assert metrics["step_seconds"] == {"median": 2.0, "low": 2.0, "high": 2.0}
    names = ("examples", "tokens", "places", "flops")
    assert [metrics[f"{name}_per_second"] for name in names] == [4.0, 40.0, 50.0, 500.0]
    metrics = measure.summarize([step(2.0, 0.5, 1.0), step(4.0, 0.1, 3.0), step(3.0)], 0)
    shares = [value for name, value in metrics.items() if name.endswith("_share")]
    assert sum(shares) == pytest.approx(1.0, abs=1e-12)
    assert metrics["other_share"] == pytest.approx((0.5 + 0.9 + 3.0) / 9.0)
    metrics = measure.summarize([step(2.0), step(2.0), step(200.0)], 0)
    assert metrics["places_per_second"] == 50.0
    assert metrics["step_seconds"] == {"median": 2.0, "low": 2.0, "high": 101.0}
    assert measure.summarize([step(7.0)], 0)["step_seconds"]["high"] == 7.0
    skipped = [step(1.0, skipped=number) for number in (1, 2, 2, 3)]
    assert [measure.summarize(skipped, warmup)["skipped_steps"] for warmup in (2, 0)] == [1, 3]
