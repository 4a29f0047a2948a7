"""An optimizer is one file and one row: a toy with one slot is trained, sharded, saved and resumed on both engines."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.settings import RUN, SHAPE, merged

from bert_cli.config.pretrain import PretrainSettings
from bert_cli.facts.optimizers import OPTIMIZERS, OptimizerKind, Slot
from bert_cli.planning.memory import estimate
from bert_cli.planning.workload import workload_of
from bert_cli.tasks.look.examine import checkpoint_bytes

# Adds the rows before the settings read the table, and runs commands.
PROGRAM = """
import json, shutil, sys
from bert_cli.facts.optimizers import OPTIMIZERS, OptimizerKind, Slot
slots = lambda shape: {"momentum": Slot(shape)}
OPTIMIZERS["Momentum"] = OptimizerKind("support.toy_optimizer", slots)
OPTIMIZERS["Complete"] = OptimizerKind("support.toy_optimizer", slots, needs_complete_matrix=True)
from bert_cli import cli
for words in json.loads(sys.argv[1]):
    if words[0] == "copy":
        shutil.copytree(*words[1:])
    else:
        print("exit code", cli.main(words), flush=True)
"""
CHANGES = {
    "generated_dataset": True,
    "bert_config": SHAPE | {"num_hidden_layers": 1},
    "global_batch": {"replicas": 2, "grad_acc_steps_per_replica": 2},
    "parallel": {"replicated_tensor_sharding": True},
    "optimizer_opts": {"name": "Momentum", "learning_rate": {"max_learning_rate": 0.5}},
    "total_num_train_samples": 32,
    "checkpoint_every_steps": 2,
}
CONFIG = merged(RUN, CHANGES)
ONE_REPLICA = {"micro_batch_size": 2, "replicas": 1, "grad_acc_steps_per_replica": 4}
COMPLETE = {"global_batch": ONE_REPLICA, "parallel": {}}


@pytest.mark.slow
@pytest.mark.tensorflow
@pytest.mark.parametrize("engine", ["tensorflow", "jax"])
def test_a_toy_with_one_slot_is_trained_sharded_saved_and_resumed(engine, tmp_path):
    configs = {
        "sharded": CONFIG,
        "complete": CONFIG | COMPLETE,
        "refused": merged(CONFIG, {"optimizer_opts": {"name": "Complete"}}),
    }
    runs = {"first": "sharded", "resumed": "sharded", "other": "complete", "needs all": "refused"}
    commands = []
    for name, config in configs.items():
        (tmp_path / name).write_text(json.dumps(config | {"engine": engine}), encoding="utf-8")
    for run, config in runs.items():
        if run in ("resumed", "other"):
            paths = (tmp_path / folder / "step_00000002" for folder in ("first", run))
            commands.append(["copy", *map(str, paths)])
        words = ["--config", str(tmp_path / config), "--save-ckpt-path", str(tmp_path / run)]
        commands.append(["pretrain", *words])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "HOME": str(tmp_path)},
        check=True,
    )
    codes = [line.split()[-1] for line in done.stdout.splitlines() if line.startswith("exit code")]
    assert codes == ["0", "0", "0", "2" if engine == "tensorflow" else "0"], done.stderr
    assert (engine == "jax") != ("update of this optimizer needs complete weights" in done.stderr)
    first, resumed, other = (
        load_file(tmp_path / run / "step_00000004" / "optimizer.safetensors")
        for run in ("first", "resumed", "other")
    )
    assert {name.rpartition("/")[2] for name in first} == {"momentum"}
    for name, slot in first.items():
        assert resumed[name].tobytes() == slot.tobytes(), name
        np.testing.assert_allclose(other[name], slot, rtol=1e-4, atol=1e-7, err_msg=name)
    paths = (tmp_path / run / "step_00000004/model.safetensors" for run in ("first", "resumed"))
    assert len({path.read_bytes() for path in paths}) == 1


def test_the_memory_of_a_layout_and_the_size_of_a_checkpoint_ask_the_optimizer(monkeypatch):
    adamw = merged(CONFIG, {"optimizer_opts": {"name": "AdamW"}})
    settings = PretrainSettings.model_validate(adamw)
    moments = estimate(workload_of(settings))[0].moments
    size = checkpoint_bytes(workload_of(settings))
    one_slot = OptimizerKind("", lambda shape: {"momentum": Slot(shape)})
    monkeypatch.setitem(OPTIMIZERS, "AdamW", one_slot)
    assert estimate(workload_of(settings))[0].moments == moments / 2
    # float32 weights and one slot instead of two
    assert checkpoint_bytes(workload_of(settings)) == size * 2 / 3
