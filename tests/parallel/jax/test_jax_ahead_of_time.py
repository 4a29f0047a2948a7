"""The step that is compiled for absent devices is the step of a run: both are lowered to the same program."""

import json
import os
import subprocess
import sys

import pytest
from support.tiny_models import TINY_RUN, flags_of

COMPARE = """
import json
import sys
import numpy as np
from bert_cli.parallel.jax import ahead_of_time
import jax
from bert_cli.commands import COMMANDS
from bert_cli.parse.load import load
from bert_cli.planning.workload import workload_of
from bert_cli.parallel.engine import UpdateRequest, count
from bert_cli.tasks.look.ahead_of_time import micro_batch
from bert_cli.tasks.run import build, resolve

for command, words in json.loads(sys.argv[1]):
    settings, _ = load(COMMANDS[command].settings_class(), words, command)
    work = workload_of(settings)
    sample = micro_batch(settings, work)
    labels = settings.head.outputs
    mesh = resolve.open_mesh(work)
    run = build.build_engine(work, mesh, labels)
    number = run.layout.replicas * run.layout.accumulation
    batch = {name: np.repeat(column, number, 0) for name, column in sample.items()}
    real = run._lowered(run._arguments(batch, UpdateRequest(), count(batch, run.head.COUNTS)))
    model = build.model_of(work, labels, has_values=False)
    engine = ahead_of_time.build_engine(model, run.layout, "CPU", jax.devices())
    state = [part for parts in engine.state.values() for part in parts]
    assert not any(isinstance(part, jax.Array) for part in state), words
    assert len(real.as_text()) > 10_000 and engine.lowered(sample).as_text() == real.as_text(), words
print("equal")
"""


@pytest.mark.slow
def test_the_step_for_absent_devices_is_the_step_of_a_run():
    tiny = {name: value for name, value in TINY_RUN.items() if name != "generated-dataset"}
    task = {n: value for n, value in tiny.items() if n[:3] not in ("max", "kee")}
    batch = "global-batch.replicas"
    cases = [
        ("plan", {batch: 2, "parallel.tensor": 2, "precision": "mixed_bfloat16"}),
        ("plan", {batch: 2, "parallel.shard-weights": None, "parallel.recompute": None}),
        ("plan", {"max-sequences-per-pack": 2, "precision": "mixed_float16"}),
        ("plan", {"bert-config.architecture": "groupbert", "optimizer-opts.name": "AdamW"}),
        ("plan", {"bert-config.architecture": "modernbert"}),
        ("plan squad", {"max-seq-length": 32, "max-query-length": 4, "doc-stride": 2}),
        ("plan ner", {"max-seq-length": 16}),
        ("plan classify", {"max-seq-length": 16}),
    ]
    lines = [
        (command, flags_of((tiny if command == "plan" else task) | flags | {"engine": "jax"}))
        for command, flags in cases
    ]
    four = "--xla_force_host_platform_device_count=4"
    environment = os.environ | {"KERAS_BACKEND": "jax", "XLA_FLAGS": four}
    command = [sys.executable, "-c", COMPARE, json.dumps(lines)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout.endswith("equal\n"), done.stderr[-2000:]
