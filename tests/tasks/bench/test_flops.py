"""The operations of a model beside a count of the products in the graph that really runs."""

from math import prod

import numpy as np
import pytest
import tensorflow as tf

from bert_cli.config.bench import BenchPretrainSettings, BenchSquadSettings
from bert_cli.config.model import BertConfig
from bert_cli.parallel.cluster import Processes
from bert_cli.parallel.engine import count
from bert_cli.tasks.bench import jobs
from bert_cli.tasks.bench.flops import Shape, attention, model_flops, products, shape_of
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
    "packs": (BenchPretrainSettings, {**PRETRAIN, "max_sequences_per_pack": 3}),
    "squad": (
        BenchSquadSettings,
        {**COMMON, "max_seq_length": 48, "doc_stride": 8, "max_query_length": 8},
    ),
}


def of_products(graph) -> int:
    """2 m n k for every product of a traced graph; there must be none in the functions that it calls."""
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


def of_a_step(kind, asked):
    """Operations of a micro-batch as its graph has them; its settings and its shape."""
    settings = kind.model_validate(asked)
    mesh = build.open_mesh(settings, Processes(()))
    job = jobs.job_of(settings, mesh)
    parts = build.build_run(settings, mesh, job.plan)
    (stage,) = parts.engine.replicas[0]
    # As they are: calls of one function for layers alike would be counted in the functions.
    stage.run_block = lambda block, *given: block(*given)
    micro = {column: values[0] for column, values in job.sample.items()}
    counts = {name: tf.constant(1.0) for name in count(job.sample, parts.engine.head.COUNTS)}
    given = None, stage.columns(micro), tf.constant([1, 0]), counts, tf.constant(1.0)
    traced = stage._forward_backward.get_concrete_function(*given, tf.constant(True))
    return of_products(traced.graph), settings, shape_of(job.sample)


@pytest.mark.parametrize("name", JOBS)
def test_the_formula_is_the_count_of_the_products_that_the_graph_has(name):
    counted, settings, shape = of_a_step(*JOBS[name])
    # Exactly: look-ups are no products, and each product has two more on the way back.
    assert counted == model_flops(settings.bert_config, settings.LAST_BLOCKS, shape)


def test_what_is_recomputed_is_not_counted():
    asked = {**PRETRAIN, "parallel": {"recompute": True, "recompute_by": "layer"}}
    counted, settings, shape = of_a_step(BenchPretrainSettings, asked)
    config = settings.bert_config
    # All but the head is run forward once more.
    again = attention(config, shape)
    again += sum(one.flops for one in products(config, ["enc_out", "pool"], shape))
    assert counted == model_flops(config, settings.LAST_BLOCKS, shape) + again


def test_bert_base_at_128_is_what_palms_formula_says():
    config, shape = BertConfig(vocab_size=30522), Shape(examples=1, places=128, masked=20)
    # 84,934,656 parameters of the layers' matrices; the heads' at 20 places of 128.
    layers = 12 * (4 * 768**2 + 2 * 768 * 3072)
    head = 20 * (768**2 + 768 * 30522) + 768**2 + 2 * 768
    expected = 6 * (128 * layers + head) + 12 * 12 * 768 * 128 * 128
    assert layers == 84_934_656
    assert model_flops(config, ("enc_out", "pool", "heads"), shape) == expected


def test_the_shape_of_a_batch_is_all_its_micro_batches():
    batch = {
        "input_ids": np.zeros((3, 2, 16)),
        "masked_lm_positions": np.zeros((3, 2, 5)),
        "next_sentence_positions": np.zeros((3, 2, 4)),
    }
    assert shape_of(batch) == Shape(examples=6, places=16, masked=5, sequences=4)
    assert shape_of({"input_ids": np.zeros((2, 8))}) == Shape(examples=2, places=8)
