"""Runs of a small model on either engine, to compare them: TensorFlow's in this process, JAX's in a child process.

Keras has one backend in a process. The child has the CPU cut into devices for all layouts, and runs them one by one.
"""

import copy
import faulthandler
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

DEVICES = 8
MICRO_BATCHES = 8
KEY_BIAS = "attention/key/bias"
SPAN_BIAS = "qa_head/span/bias"
S, P = 16, 3
BASE: dict[str, Any] = {
    "bert_config": {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": S,
        "initializer_range": 0.1,
    },
    "max_seq_length": S,
    "parallel": {},
    "global_batch": {"micro_batch_size": 2},
    "optimizer_opts": {
        "name": "LAMB",
        "learning_rate": {"max_learning_rate": 0.02},
        "max_gradient_norm": 0.05,
    },
    "seed": 3,
}
# With `loops` equal layers run in a loop on JAX, as on TPUs. `save` and `resume` are paths.
OPTIONS = {"kind": "Pretrain", "steps": 4, "labels": 2, "loss_scale": None, "scores": False}
OPTIONS |= {"loops": False, "save": None, "resume": None}
Arrays = dict[str, np.ndarray]


class Result(NamedTuple):
    """What a run leaves behind; `memory` is of JAX alone."""

    first: Arrays
    """The weights before the first step."""
    weights: Arrays
    moments: Arrays
    metrics: list[dict[str, float]]
    sums: dict[str, float]
    """Of an evaluation of 5 examples, which two replicas do not divide."""
    logits: list[np.ndarray]
    """Of a prediction of the same examples."""
    memory: tuple[int, int]
    """Bytes on a device: arguments and temporaries of the first program."""


@cache
def run(described: str) -> Result:
    """Run a case, JSON of the arguments of `case`, on the engine that it names; equal cases are run once."""
    import keras
    from support.settings import plan_of

    from bert_cli.config import finetune as kinds
    from bert_cli.config.pretrain import PretrainSettings
    from bert_cli.optim.schedule import LossScale
    from bert_cli.tasks.run import build, corpora, finetune, finetune_steps, resolve, start
    from bert_cli.train import checkpoint
    from bert_cli.train.loop import copy_state

    of = json.loads(described)
    steps, labels = of["steps"], of["labels"]
    if of["kind"] == "Pretrain":
        settings: Any = corpora.with_rows_for_records(PretrainSettings.model_validate(of["values"]))
        mesh = resolve.open_mesh(settings)
        stream = corpora.open_stream(settings)
        plan = plan_of(settings, stream.epoch_size, stream.sequences_per_example)
        sample = stream.first_micro_batches(len(mesh.devices))
        held_out = stream.rows(np.arange(100, 105))
    else:
        settings = getattr(kinds, f"{of['kind']}Settings").model_validate(of["values"])
        mesh = resolve.open_mesh(settings)
        features = finetune_steps.synthetic_examples(settings, 200, labels)
        plan, stream, sample = finetune.open_features(settings, features, mesh)
        held_out = features.batch(np.arange(5), settings.max_seq_length)
    with pytest.MonkeyPatch.context() as patch:
        if of["loops"]:
            from bert_cli.parallel.jax.forward import LOOPS

            patch.setitem(LOOPS, "CPU", True)
        engine, state, step = build.build_run(settings, mesh, plan, labels)
    form, fixed = start.disk_format(settings, state.weights, None), {"total_steps": 10}
    if of["loss_scale"]:
        state.loss_scale = LossScale(value=of["loss_scale"], dynamic=True)
    if of["resume"]:
        checkpoint.resume(checkpoint.Saved(Path(of["resume"])), state, form, fixed)
    engine.compile(sample)
    first, metrics = copy_state(state).weights, []
    while state.step < steps:
        metrics.append(step(stream[state.step]))
        if of["save"] and state.step in (steps // 2, steps):
            checkpoint.save(Path(of["save"]), copy_state(state), form, fixed=fixed, settings={})
    programs = list(getattr(engine, "programs", {}).values())
    memory = programs[0].memory_analysis() if programs else None
    sums, logits = {}, []
    if of["scores"]:
        sums = engine.evaluate(held_out)
        logits = [*map(np.asarray, keras.tree.flatten(engine.predict(held_out)))]
    last = copy_state(state)
    values = dict(last.weights), dict(last.slots)
    sizes = (memory.argument_size_in_bytes, memory.temp_size_in_bytes) if memory else (0, 0)
    return Result(first, *values, metrics, sums, logits, sizes)


def case(engine: str, *, replicas: int = 1, **changes: Any) -> str:
    """Return a description for `run`: OPTIONS, and changes of settings; groups are merged into the groups of BASE."""
    options = {name: changes.pop(name, default) for name, default in OPTIONS.items()}
    values: dict[str, Any] = copy.deepcopy(BASE) | {"engine": engine}
    if options["kind"] == "Pretrain":
        values |= {"max_predictions_per_seq": P, "total_num_train_samples": 6400}
    values["generated_dataset"] = "dataset_dir" not in changes
    for name, value in changes.items():
        values[name] = {**values[name], **value} if isinstance(values.get(name), dict) else value
    values["global_batch"]["replicas"] = replicas
    values["global_batch"]["grad_acc_steps_per_replica"] = MICRO_BATCHES // replicas
    return json.dumps({"values": values, **options}, sort_keys=True, default=str)


class Jax:
    """JAX's engine, in another process."""

    def __init__(self, executor: ProcessPoolExecutor) -> None:
        self.executor = executor
        self._runs: dict[str, Future[Result]] = {}

    def start(self, **options: Any) -> Future[Result]:
        described = case("jax", **options)
        if described not in self._runs:
            test = os.environ.get("BERT_FAULTS_TEST", "")
            self._runs[described] = self.executor.submit(_run_for, test, described)
        return self._runs[described]

    def run(self, **options: Any) -> Result:
        return self.start(**options).result()


@contextmanager
def jax_process() -> Iterator[Jax]:
    """Start a process with the CPU cut into devices for JAX."""
    with ProcessPoolExecutor(1, get_context("spawn")) as executor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KERAS_BACKEND", "jax")
            # Halves the time of compiling: how a program is divided does not depend on it.
            flags = os.environ.get("XLA_FLAGS", "")  # may have a limit of the instruction sets
            patch.setenv("XLA_FLAGS", f"{flags} --xla_backend_optimization_level=0")
            executor.submit(_use_devices).result()
        yield Jax(executor)


def _run_for(test: str, described: str) -> Result:
    os.environ["BERT_FAULTS_TEST"] = test  # scripts/faults asks which test executes a line
    return run(described)


def _use_devices() -> None:
    import jax

    from bert_cli.parallel.jax.mesh import configure_runtime

    faulthandler.enable()
    configure_runtime("float32", deterministic=False)  # before the start of JAX
    jax.config.update("jax_num_cpu_devices", DEVICES)
    assert len(jax.devices()) == DEVICES


def on_tensorflow(**options: Any) -> Result:
    return run(case("tensorflow", **options))


def assert_same(result: Result, expected: Result, weights_within: float = 1e-6) -> None:
    """Assert equal first weights, losses and norms, and weights and moments within a relative tolerance.

    The first losses and norms are within 1e-6, later ones as near as the weights that they come from. The tolerance of
    these is relative to what all weights together have moved. Rounding alone comes near to 1e-6: a weight of 1 is
    stored to 6e-8 and moves by 0.01 with AdamW, and the first steps divide tiny gradients by their own size.
    """
    for name, weight in expected.first.items():
        np.testing.assert_array_equal(result.first[name], weight, err_msg=name)
    steps = zip(result.metrics, expected.metrics, strict=True)
    for step, (mine, other) in enumerate(steps):
        losses = [name for name in other if name.endswith("loss")]
        for name in (*losses, "gradient_norm", "weight_norm"):
            within = weights_within if step else 1e-6
            assert mine[name] == pytest.approx(other[name], rel=within), name
        for name in ("loss_scale", "skipped", "examples", "tokens"):
            assert mine[name] == other[name], name
    apart = {"weights": moved_apart(result, expected)}
    apart["moments"] = difference(result.moments, expected.moments)
    for name, by in apart.items():
        assert by <= weights_within, f"{name} are {by:.2e} apart"


def difference(mine: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> float:
    """Return the norm of the difference of all arrays, relative to the norm of all of the others."""
    assert mine.keys() == other.keys()
    apart = sum(np.sum(np.square(mine[name].astype("f8") - other[name])) for name in other)
    norm = sum(np.sum(np.square(value.astype("f8"))) for value in other.values())
    return float(np.sqrt(apart / norm))


def moved_apart(result: Result, expected: Result) -> float:
    """Return the norm of the difference of all weights, relative to the norm of what all have moved.

    Without the weights whose gradients are rounding alone: the bias of attention keys changes no output, and that of
    SQuAD's head, one number for the starts and one for the ends of all positions, changes no softmax over positions.
    """
    names = [name for name in expected.weights if not name.endswith((KEY_BIAS, SPAN_BIAS))]
    mine, other = (
        {n: r.weights[n].astype("f8") - expected.first[n] for n in names}
        for r in (result, expected)
    )
    return difference(mine, other)
