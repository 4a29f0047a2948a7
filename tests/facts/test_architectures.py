"""An architecture is one file and one row: a toy trains on both engines, resumes and is planned."""

import ast
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import settings
from support.tiny_models import PIECES, metrics_of, write_model

import bert_cli
from bert_cli.errors import CheckpointError
from bert_cli.facts.architectures import ARCHITECTURES, shape_of

# Adds the row before a command reads the table.
PROGRAM = """
import json, shutil, sys
import bert_cli
from bert_cli.facts.architectures import ARCHITECTURES
from support import toy_architecture
ARCHITECTURES["toy"] = toy_architecture.RECORD
from bert_cli import cli
for words in json.loads(sys.argv[1]):
    if words[0] == "copy":
        shutil.copytree(*words[1:])
    else:
        assert cli.main(words) == 0
"""
# Layers 1 and 2 have the same trace key. Layer 3 has the same class and no window.
SHAPE = settings.SHAPE | {
    "architecture": "toy", "num_hidden_layers": 4, "window": 2, "initializer_range": 0.2,
}  # fmt: skip
CONFIG = settings.RUN | {
    "generated_dataset": True,
    "bert_config": SHAPE,
    "global_batch": {"micro_batch_size": 4, "grad_acc_steps_per_replica": 2},
    "total_num_train_samples": 16,
    "checkpoint_every_steps": 1,
}
LAST_BLOCKS = ("enc_out", "heads")
SAVED = ("model.safetensors", "optimizer.safetensors")


@pytest.fixture
def toy(monkeypatch):
    from support import toy_architecture

    monkeypatch.setitem(ARCHITECTURES, "toy", toy_architecture.RECORD)


def train(folder, engine, *more):
    """Train two steps, and the second step again from the first checkpoint; then run one more command."""
    folder.mkdir()
    config = folder / "config"
    config.write_text(json.dumps(CONFIG | {"engine": engine}), encoding="utf-8")
    first, resumed = folder / "first", folder / "resumed"
    words = ["--config", str(config)]
    commands = [
        ["plan", "pretrain", *words],
        ["pretrain", *words, "--save-ckpt-path", str(first)],
        ["copy", *(str(run / "step_00000001") for run in (first, resumed))],
        ["pretrain", *words, "--save-ckpt-path", str(resumed)],
        [*more, *words],
    ]
    environment = {"KERAS_BACKEND": engine, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)],
        capture_output=True,
        text=True,
        env=os.environ | environment | {"HOME": str(folder)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "parameters" in done.stdout and "continues from" in done.stdout
    for name in SAVED:
        left, right = (run / "step_00000002" / name for run in (first, resumed))
        assert left.read_bytes() == right.read_bytes(), name


@pytest.mark.slow
@pytest.mark.tensorflow
def test_a_toy_of_one_file_and_one_row_trains_resumes_and_plans_on_both_engines(tmp_path, toy):
    train(tmp_path / "tensorflow", "tensorflow", "doctor", "pretrain")
    changed = ["--save-ckpt-path", str(tmp_path / "jax" / "changed"), "--parallel.recompute"]
    train(tmp_path / "jax", "jax", "pretrain", *changed)
    expected, *shared = (
        [line["mlm_loss"] for line in metrics_of(tmp_path / run)]
        for run in ("jax/first", "jax/changed", "tensorflow/first")
    )
    for losses in shared:  # layers share traces in both runs
        assert losses == pytest.approx(expected, rel=1e-5)
    from bert_cli.planning import layout
    from bert_cli.planning.workload import workload_of

    last = tmp_path / "tensorflow" / "first" / "step_00000002"
    described = json.loads((last / "config.json").read_text(encoding="utf-8"))
    assert described["architectures"] == ["ToyBertForMaskedLM"]
    assert described["model_type"] == "toy" and "type_vocab_size" not in described
    assert described["local_attention"] == 4 and "window" not in described
    weights = load_file(last / "model.safetensors")
    assert weights["model.layers.0.attn.Wqkv.weight"].shape == (48, 16)
    assert weights["model.layers.0.mlp.Wi.weight"].shape == (64, 16)
    counted = sum(math.prod(weight.shape) for weight in weights.values())
    assert layout.parameters(workload_of(settings.small_run(CONFIG))) == counted


@pytest.mark.tensorflow
def test_fused_weights_are_joined_and_split_and_their_shape_is_checked(toy):
    from bert_cli.model.bert import build_blocks, named_weights
    from bert_cli.model.hf import fitting, from_hf, to_hf

    config = shape_of(SHAPE)
    draw = np.random.default_rng(0)
    blocks = build_blocks(config, seed=1, policy="float32", last_blocks=LAST_BLOCKS)
    weights = {
        name: draw.normal(size=weight.shape).astype(np.float32)
        for name, weight in named_weights(blocks).items()
    }
    shapes = {name: value.shape for name, value in weights.items()}
    tensors = to_hf(weights, config)
    start = "hid_1/attention"
    joined = np.vstack([weights[f"{start}/{part}/kernel"].T for part in ("query", "key", "value")])
    assert np.array_equal(tensors["model.layers.1.attn.Wqkv.weight"], joined)
    gated = np.vstack([weights[f"hid_1/{part}/kernel"].T for part in ("inner", "gate")])
    assert np.array_equal(tensors["model.layers.1.mlp.Wi.weight"], gated)
    encoder = {name: shape for name, shape in shapes.items() if not name.startswith("heads/")}
    taken, left_out = fitting(tensors, encoder, config)
    assert left_out == ["head.dense", "head.norm", "decoder"]
    assert {*from_hf(taken, encoder, config)[0]} == {*encoder}
    taken, left_out = fitting(tensors, shapes, config)
    values, missing = from_hf(taken, shapes, config)
    assert (left_out, missing) == ([], [])
    assert values.keys() == weights.keys()
    assert all(values[name].tobytes() == weight.tobytes() for name, weight in weights.items())
    # The file of an encoder alone has no beginning `model`; a tied copy is understood.
    bare = {name.removeprefix("model."): value for name, value in tensors.items()}
    bare["decoder.weight"] = bare["embeddings.tok_embeddings.weight"]
    assert from_hf(bare, shapes, config)[1] == []
    tensors["model.layers.1.attn.Wqkv.weight"] = joined[:-1]
    del tensors["model.layers.0.mlp.Wi.weight"]
    with pytest.raises(CheckpointError) as refusal:
        from_hf(tensors, shapes, config)
    assert "1 tensors are missing: model.layers.0.mlp.Wi.weight;" in str(refusal.value)
    assert "Wqkv.weight ((16, 47) there, (16, 16) here as hid_1/attention/key" in str(refusal.value)


@pytest.mark.tensorflow
def test_a_masked_lm_without_next_sentences_fills_masks(toy, tmp_path, capsys):
    from bert_cli.cli import main
    from bert_cli.model.bert import build_blocks
    from bert_cli.model.hf import check_hf_config, vocabulary_tensors
    from bert_cli.tasks.run.models import find_source

    config = shape_of(SHAPE | {"vocab_size": len(PIECES)})
    blocks = build_blocks(config, seed=1, policy="float32", last_blocks=LAST_BLOCKS)
    model = write_model(tmp_path / "model", config, blocks=blocks)
    assert main(["predict", str(model), "the film was [MASK]", "--top", "2"]) == 0
    assert find_source(str(model)).config == config
    with pytest.raises(CheckpointError, match="architecture is 'bert' there and 'toy' here"):
        check_hf_config({}, config)
    (mask,) = json.loads(capsys.readouterr().out)["masks"]
    assert len(mask) == 2
    expected = {"embeddings.tok_embeddings.weight", "decoder.weight", "decoder.bias"}
    assert expected <= {*vocabulary_tensors(config)}


@pytest.mark.tensorflow
def test_the_saved_settings_of_an_architecture_have_its_own_fields_alone(toy):
    bert, own = (set(shape_of({"architecture": name}).model_dump()) for name in ("bert", "toy"))
    assert own == bert - {"type_vocab_size"} | {"window", "architecture"}


def test_no_value_is_compared_with_the_name_of_an_architecture():
    package = Path(bert_cli.__file__).parent
    for path in package.rglob("*.py"):
        if path.stem not in ("shape", *ARCHITECTURES):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                parts = ast.walk(node) if isinstance(node, ast.Compare | ast.MatchValue) else ()
                assert not {getattr(part, "value", None) for part in parts} & {*ARCHITECTURES}, path
