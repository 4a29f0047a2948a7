"""The memory that the JAX engine's compiled step takes, by XLA's own analysis, and its estimate."""

import json
import os
import subprocess
import sys

import pytest
from support.settings import RUN, merged, small_run

from bert_cli.config.pretrain import PretrainSettings
from bert_cli.planning.memory import Estimate, estimate
from bert_cli.planning.workload import workload_of

# Compiles the step of each settings read, and prints the bytes of its arguments and temporaries on one device.
PROGRAM = """
import json, math, sys
import jax
jax.config.update("jax_num_cpu_devices", 4)
from bert_cli.planning.plan import length_of, make_plan
from bert_cli.planning.workload import workload_of
from bert_cli.config.pretrain import PretrainSettings
from bert_cli.parallel.cluster import Processes
from bert_cli.parallel.runtime import Mesh
from bert_cli.tasks.run import build, corpora, resolve
for values in json.loads(sys.stdin.read()):
    settings = PretrainSettings.model_validate(values)
    work = workload_of(settings)
    plan = make_plan(work, length_of(settings), None)
    replicas = settings.global_batch.replicas
    devices = (("CPU:0",) * math.prod(settings.parallel.tensor_shape),) * replicas
    mesh = Mesh(resolve.layout_of(work), devices, "", Processes(()))
    engine, _, _ = build.build_run(work, mesh, plan)
    engine.compile(corpora.open_stream(settings).first_micro_batches(replicas))
    sizes = next(iter(engine.programs.values())).memory_analysis()
    print(json.dumps([sizes.argument_size_in_bytes, sizes.temp_size_in_bytes]))
"""
# The scheduler is that of the engine; the others only make compilation faster.
FLAGS = (
    "--xla_cpu_enable_concurrency_optimized_scheduler=false "
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
LAYOUTS: list[tuple[int, dict[str, object]]] = [
    (1, {"tensor": 2, "recompute": True}),
    (4, {"shard_weights": True}),
]


MODEL = {
    "vocab_size": 6000, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 512, "max_position_embeddings": 128,
}  # fmt: skip
VALUES = {
    "engine": "jax",
    "generated_dataset": True,
    "bert_config": MODEL,
    "max_seq_length": 128,
    "max_predictions_per_seq": 20,
    "total_num_train_samples": 640,
}


def settings_of(
    replicas: int = 1, parallel: dict[str, object] | None = None, **more: object
) -> PretrainSettings:
    batch = {"replicas": replicas, "grad_acc_steps_per_replica": 8 // replicas}
    changes = {"global_batch": {"micro_batch_size": 8, **batch}, "parallel": parallel or {}}
    return small_run(merged(RUN, VALUES), **changes, **more)


def estimated(*layout: object, **more: object) -> Estimate:
    return estimate(workload_of(settings_of(*layout, **more)))[0]


def test_the_estimate_is_near_the_memory_of_the_compiled_step():
    environment = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS}
    layouts = json.dumps([settings_of(*layout).model_dump(mode="json") for layout in LAYOUTS])
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, input=layouts, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    compiled = list(map(json.loads, done.stdout.splitlines()))
    assert len(compiled) == len(LAYOUTS)
    for layout, (arguments, temporaries) in zip(LAYOUTS, compiled, strict=True):
        one = estimated(*layout)
        assert one.weights + one.moments == pytest.approx(arguments, rel=0.03), layout
        assert one.total == pytest.approx(arguments + temporaries, rel=0.15), layout


def test_shards_divide_what_they_shard_and_nothing_else():
    one, moments, weights = (
        estimated(4, parallel)
        for parallel in ({}, {"replicated_tensor_sharding": True}, {"shard_weights": True})
    )
    assert moments.moments == weights.moments == pytest.approx(one.moments / 4, abs=8)
    assert (moments.weights, moments.accumulators) == (one.weights, one.accumulators)
    assert weights.weights == pytest.approx(one.weights / 4, abs=4)
    assert weights.accumulators == pytest.approx(one.accumulators / 4, abs=4)
    # Three replicas divide no axis of 128.
    assert estimated(3, {"shard_weights": True}).weights == one.weights


def test_tensor_divides_matrices_and_logits_along_axes_that_it_divides():
    one, two, square = (estimated(1, {"tensor": shape}) for shape in (1, 2, [2, 2]))
    vectors = 4 * (2 * (13 * 128 - 128 * 4 + 512) + 128 * 128 * 2 + 128 * 134 + 6000)
    assert two.weights == pytest.approx(one.weights / 2, abs=vectors)
    assert square.weights < two.weights < one.weights
    assert square.total < two.total < one.total
    assert two.logits == one.logits // 2
    odd = {"bert_config": {"vocab_size": 6001}}
    assert estimated(1, {"tensor": 2}, **odd).logits == estimated(**odd).logits
    assert estimate(workload_of(settings_of(1, {"tensor": [2, 2]}))) == [square] * 4


def test_chunks_of_the_vocabulary_divide_the_logits():
    one, chunked = estimated(), estimated(1, {"embedding_serialization_factor": 4})
    assert chunked.logits == one.logits // 4 and chunked.weights == one.weights


def test_recomputation_saves_the_activations_of_all_layers_but_one():
    deep = {"bert_config": {"num_hidden_layers": 24}}
    saved, again = estimated(**deep), estimated(1, {"recompute": True}, **deep)
    assert again.weights == saved.weights and again.working < saved.working / 4


def test_of_the_stages_of_a_run_the_one_that_needs_most_counts():
    # As many positions in a micro-batch, but more of them are predicted.
    later = {"max_seq_length": 128, "max_predictions_per_seq": 40, "total_num_train_samples": 64}
    alone = estimated(max_predictions_per_seq=40)
    assert estimated(stages=[later]) == alone and alone.total > estimated().total
