"""The operations of a model compared with its graph, the rate of products, and the parts of a step's time."""

import itertools
import timeit
from contextlib import ExitStack
from functools import partial
from math import prod
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from test_bench import SMALL, SQUAD

from bert_cli.commands import COMMANDS
from bert_cli.facts.bert import BertConfig
from bert_cli.facts.groupbert import GroupBertConfig
from bert_cli.facts.products import BatchShape
from bert_cli.parallel.engine import count
from bert_cli.planning.flops import attention, model_flops, products, shape_of
from bert_cli.tasks.bench import measure
from bert_cli.tasks.run import build

GROUP = {"architecture": "groupbert", "conv_group_size": 4, "num_hidden_layers": 2}
JOBS = {
    "recomputed": ("pretrain", SMALL | {"parallel": {"recompute": True}}),
    "packs": ("pretrain", SMALL | {"max_sequences_per_pack": 3}),
    "squad": ("squad", SQUAD),
    "groupbert": ("pretrain", SMALL | {"bert_config": SMALL["bert_config"] | GROUP}),
}  # fmt: skip
slow = partial(pytest.param, marks=pytest.mark.slow)
# Operation -> which of its inputs and outputs have the shape of the forward output and of the kernel.
CONVOLUTIONS = {"Conv2D": (2, 1), "Conv2DBackpropInput": (2, 1), "Conv2DBackpropFilter": (2, 3)}


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
        if operation.type in CONVOLUTIONS:
            tensors = [*operation.inputs, *operation.outputs]
            output, kernel = (tensors[n].shape for n in CONVOLUTIONS[operation.type])
            found += 2 * prod(output) * prod(kernel[:3])
        assert operation.type not in ("Einsum", "_FusedMatMul"), operation
    library = graph.as_graph_def().library.function
    assert not [n for f in library for n in f.node_def if "MatMul" in n.op or n.op == "Einsum"]
    return found


@pytest.mark.parametrize("name", ["recomputed", "groupbert", *map(slow, ("packs", "squad"))])
def test_the_formula_counts_the_products_of_the_graph(name):
    command, values = JOBS[name]
    kind = COMMANDS[f"bench {command}"].settings_class()
    settings = kind.model_validate({"generated_dataset": True, **values})
    with ExitStack() as stack:
        job = measure.resolve(settings, stack)
    engine, _, _ = build.build_run(job.order, job.mesh, job.plan)
    (stage,) = engine.replicas[0]
    # Without the shared trace of the layers, whose products are inside of functions.
    stage.run_block = lambda block, *given: block(*given)
    micro = {column: values[0] for column, values in job.sample.items()}
    counts = {name: tf.constant(1.0) for name in count(job.sample, engine.head.COUNTS)}
    given = None, stage.columns(micro), tf.constant([1, 0]), counts, tf.constant(1.0)
    traced = stage._forward_backward.get_concrete_function(*given, tf.constant(True))
    config, shape = settings.bert_config, shape_of(job.sample)
    # Exactly: look-ups are no products, and each product has two more in the backward pass.
    expected = model_flops(config, settings.HEAD.last_blocks, shape)
    if settings.parallel.recompute:
        # Recomputation of all blocks but the head is not in the formula.
        forward = products(config, ["enc_out", "pool"], shape)
        expected += attention(config, shape) + sum(one.flops for one in forward)
    assert product_flops(traced.graph) == expected


@pytest.mark.parametrize("command", ["pretrain", "squad"])
def test_a_measured_run_has_no_folder_scores_nothing_and_is_long_enough(command, tmp_path):
    values = {"pretrain": SMALL, "squad": SQUAD}[command] | {"generated_dataset": True}
    values |= {"steps": 3300, "warmup_steps": 7, "save_ckpt_path": str(tmp_path / "run")}
    values |= {"pretrained_ckpt_path": str(tmp_path / "absent"), "log_every_steps": 3}
    settings = COMMANDS[f"bench {command}"].settings_class().model_validate(values)
    with ExitStack() as stack:
        job = measure.resolve(settings, stack)
        order = job.order
    assert order.save_ckpt_path is order.pretrained_ckpt_path is order.about is None
    assert job.plan.total_steps == 3307 and order.log_every_steps == 3
    if command == "squad":
        assert settings.do_validation and not order.do_validation
    described = measure._description(settings, job)
    assert described["what"] == command and described["input"] == "synthetic"
    assert described["examples_per_step"] == 8 and described["micro_batch_size"] == 4
    assert described["micro_batches_per_step"] == 2
    machine = described["machine"]
    assert machine.keys() > {"processor", "cores", "instructions", "memory_bytes"}
    names = ("devices", "devices_of_a_replica", "replicas", "processes")
    assert [machine[name] for name in names] == ["CPU", 1, 1, 1]


def test_the_forward_operations_of_groupbert_base_are_those_published():
    group = GroupBertConfig()
    for positions, ratio in ((128, 1.58), (512, 1.54)):
        shape = BatchShape(1, positions)
        ours, plain = (model_flops(config, (), shape) for config in (group, BertConfig()))
        assert ours / plain == pytest.approx(ratio, abs=0.005)


def test_a_product_is_really_multiplied(monkeypatch):
    """Its rate is that of NumPy within a factor of 15; without the product it would be a thousand times as high."""
    monkeypatch.setattr(measure, "ROUNDS", 3)
    rate = measure.product_rate(1024, "float32")
    matrix = np.ones((1024, 1024), np.float32)
    seconds = timeit.repeat(lambda: matrix @ matrix, number=1, repeat=3)
    assert 1 / 15 < rate / (2 * 1024**3 / min(seconds)) < 15
    assert measure.product_rate(64, "bfloat16") > 0
    # By a clock that goes a second each time: a product of 64 rows has 2 x 64^3 operations.
    clock = SimpleNamespace(perf_counter=itertools.count().__next__)
    monkeypatch.setattr(measure, "time", clock)
    assert measure.product_rate(64, "float32") == 2 * 64**3


def test_the_parts_of_an_update_include_the_synchronization_of_the_devices(monkeypatch):
    now = [0.0]

    def work(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    timer = measure.Timer(lambda: work(0.25))
    for seconds in (3.0, 1.0):
        with timer.part("forward_backward"):
            work(seconds)
    assert timer.parts == {"forward_backward": 4.5}


def step(seconds: float, waited: float = 0.0, computed: float = 0.0, skipped: float = 0.0):
    counts = {"examples": 8, "tokens": 80, "positions": 100, "flops": 1000, "skipped": skipped}
    return {"seconds": seconds, "input_wait": waited, "forward_backward": computed, **counts}


def test_warm_up_and_one_slow_step_change_no_rate_and_the_fractions_add_up_to_one():
    steps = [step(100.0, 90.0), step(50.0), step(2.0, 0.5, 1.0), step(2.0, 0.5, 1.0)]
    metrics = measure.summarize(steps, 2)
    assert metrics["steps"] == 2 and metrics["input_wait_fraction"] == 0.25
    assert metrics["step_seconds"] == {"median": 2.0, "low": 2.0, "high": 2.0}
    names = ("examples", "tokens", "positions", "flops")
    assert [metrics[f"{name}_per_second"] for name in names] == [4.0, 40.0, 50.0, 500.0]
    metrics = measure.summarize([step(2.0, 0.5, 1.0), step(4.0, 0.1, 3.0), step(300.0)], 0)
    fractions = [value for name, value in metrics.items() if name.endswith("_fraction")]
    assert sum(fractions) == pytest.approx(1.0, abs=1e-12)
    assert metrics["other_fraction"] == pytest.approx((0.5 + 0.9 + 300.0) / 306.0)
    assert metrics["step_seconds"] == {"median": 4.0, "low": 3.0, "high": 152.0}
    assert measure.summarize([step(7.0)], 0)["step_seconds"]["high"] == 7.0
    skipped = [step(1.0, skipped=number) for number in (1, 2, 3, 4)]
    assert [measure.summarize(skipped, warmup)["skipped_steps"] for warmup in (2, 0)] == [2, 4]
