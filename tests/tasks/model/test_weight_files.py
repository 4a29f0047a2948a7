"""Weights in the files of other programs: written by transformers, PyTorch and TensorFlow, read here."""

import json
import shutil
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import load_file, save_file
from support import tiny_models

from bert_cli.errors import CheckpointError
from bert_cli.model.build import build_blocks, named_weights
from bert_cli.tasks.model.models import find_source, load_weights
from bert_cli.tasks.model.weight_files import tensorflow_prefix

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose weights all differ, also the biases and norms."""
    folder = tiny_models.write_model(tmp_path_factory.mktemp("models") / "model")
    draw = np.random.default_rng(4)
    tensors = load_file(folder / "model.safetensors")
    for name, value in tensors.items():
        tensors[name] = draw.normal(0, 0.2, value.shape).astype(np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def weights(model):
    return load_file(model / "model.safetensors")


@pytest.fixture(scope="module")
def shards(model, tmp_path_factory):
    """The same model as transformers saves a large one."""
    import transformers

    folder = tmp_path_factory.mktemp("shards")
    theirs = transformers.AutoModelForPreTraining.from_pretrained(model)
    theirs.save_pretrained(folder, max_shard_size="30KB")
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
    return folder


def assert_same_model(folder: Path, weights) -> None:
    """The folder's weights fit the model, and are these."""
    source = find_source(str(folder))
    blocks = named_weights(build_blocks(source.config, seed=9, policy="float32"))
    new, _ = load_weights(source, blocks)
    assert new == []
    tensors = source.tensors()
    assert len(tensors) > 30
    for name in weights.keys() & tensors.keys():
        np.testing.assert_array_equal(tensors[name], weights[name], err_msg=name)


def test_an_index_names_files_of_its_folder_that_have_the_weights(shards, tmp_path):
    folder = shutil.copytree(shards, tmp_path / "broken")
    (tmp_path / "outside.safetensors").write_bytes(b"")
    files = json.loads((folder / INDEX).read_text())["weight_map"]
    first = files["cls.predictions.bias"]
    for more, message in (
        ({"more": "../outside.safetensors"}, r"index\.json \('.*'\): is not a weight file"),
        ({"bert.more": first}, rf"{first}: lacks the weight bert\.more"),
        ({"bert.more": "model-9.safetensors"}, r"model-9\.safetensors: is missing"),
        (None, r"index\.json"),
    ):
        index = [1] if more is None else {"weight_map": files | more}
        (folder / INDEX).write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match=message):
            find_source(str(folder)).tensors()


@pytest.fixture(scope="module")
def in_torch(model, weights, tmp_path_factory):
    """The same weights in PyTorch's file, a bfloat16 among them."""
    import torch

    folder = tmp_path_factory.mktemp("torch")
    shutil.copy(model / "config.json", folder)
    tensors = {name: torch.from_numpy(value) for name, value in weights.items()}
    tensors["cls.predictions.bias"] = tensors["cls.predictions.bias"].bfloat16()
    torch.save(tensors, folder / "pytorch_model.bin")
    return folder


def test_weights_in_shards_and_in_pytorchs_file_are_read(shards, in_torch, weights):
    import torch

    assert set(weights) <= set(find_source(str(shards)).tensors())
    assert_same_model(shards, weights)
    rounded = torch.from_numpy(weights["cls.predictions.bias"]).bfloat16().float().numpy()
    assert_same_model(in_torch, {**weights, "cls.predictions.bias": rounded})


def test_pytorchs_file_is_never_unpickled(in_torch, tmp_path, monkeypatch):
    import torch

    class Harm:
        def __reduce__(self):
            return Path.write_text, (tmp_path / "harm", "done")

    folder = shutil.copytree(in_torch, tmp_path / "model")
    more = torch.zeros(1 << 16)
    torch.save({"bert.pooler.dense.bias": Harm(), "more": more}, folder / "pytorch_model.bin")
    unread = r"pytorch_model\.bin: cannot be read as weights only \(.*\); convert"
    with pytest.raises(CheckpointError, match=unread):
        find_source(str(folder)).tensors()
    assert not (tmp_path / "harm").exists()
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(CheckpointError, match=r"extra 'export'.*save_pretrained\(FOLDER\)"):
        find_source(str(in_torch)).tensors()


def test_a_name_on_the_hub_brings_the_weights_that_it_has(model, in_torch, tmp_path, monkeypatch):
    import huggingface_hub

    requests = []

    def download(folder, name, allow_patterns, local_files_only):
        assert not local_files_only
        requests.append(name)
        (tmp_path / name).mkdir(exist_ok=True)
        for file in folder.iterdir():
            if any(file.match(pattern) for pattern in allow_patterns):
                shutil.copy(file, tmp_path / name)
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda api, name, timeout: None)
    for name, folder in (("one", model), ("old", in_torch)):
        monkeypatch.setattr(huggingface_hub, "snapshot_download", partial(download, folder))
        assert set(find_source(name).tensors()) == set(find_source(str(folder)).tensors())
    # PyTorch's files are large, and requested only where there are no others.
    assert requests == ["one", "old", "old"]


def test_a_keras_model_is_refused_with_its_conversion(model, tmp_path):
    for name in ("tf_model.h5", "mine.keras", "saved_model.pb"):
        folder = tmp_path / name[:2]
        folder.mkdir()
        (folder / name).write_bytes(b"")
        for path in (folder, folder / name, folder):
            with pytest.raises(
                CheckpointError, match=rf"{name}: is a model of Keras .*save_pretrained"
            ):
                find_source(str(path))
            shutil.copy(model / "config.json", folder)


# --- TensorFlow


def test_an_object_checkpoint_of_tensorflow_2_is_refused(model, tmp_path):
    root = tf.Module()
    root.kernel = tf.Variable(3.0)
    tf.train.Checkpoint(root).write(str(tmp_path / "170.ckpt"))
    shutil.copy(model / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"170\.ckpt: is an object checkpoint .*; export it"):
        find_source(str(tmp_path))


def test_of_several_checkpoints_the_one_that_tensorflow_names_is_read(tmp_path):
    for name in ("20.ckpt", "170.ckpt"):
        (tmp_path / f"{name}.index").touch()
    with pytest.raises(CheckpointError, match=r"2 checkpoints \(170\.ckpt, 20\.ckpt\)"):
        tensorflow_prefix(tmp_path)
    state = tmp_path / "checkpoint"
    # As TensorFlow writes it, but in another folder, from which this one was moved.
    state.write_text('model_checkpoint_path: "/elsewhere/20.ckpt"\n')
    assert tensorflow_prefix(tmp_path) == tmp_path / "20.ckpt"
    state.write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"checkpoint: cannot be read \(.*; move it away"):
        tensorflow_prefix(tmp_path)


# --- folders that do not say what they hold, or that say more than is applied


def changed_copy(model, folder, changes, tensors=None):
    """A copy of the model with changed entries of its config.json, None for an absent one, and other weights."""
    shutil.copytree(model, folder)
    described = {**json.loads((folder / "config.json").read_text()), **changes}
    described = {name: value for name, value in described.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(described))
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


NAMELESS = dict.fromkeys(("architectures", "model_type"))


@pytest.mark.parametrize(
    ("parts", "rows", "architecture"),
    [
        (("cls.", "bert.pooler."), 0, "BertForPreTraining"),
        (("cls.predictions.",), 0, "BertForMaskedLM"),
        (("qa_outputs.",), 2, "BertForQuestionAnswering"),
        (("bert.pooler.", "classifier."), 3, "BertForSequenceClassification"),
        (("classifier.",), 3, "BertForTokenClassification"),
        (("bert.pooler.",), 0, "BertModel"),
    ],
)
def test_a_folder_without_a_class_has_the_class_of_its_weights(
    parts, rows, architecture, model, weights, tmp_path
):
    names = ("bert.embeddings.", "bert.encoder.", *parts)
    tensors = {name: value for name, value in weights.items() if name.startswith(names)}
    for part in parts:
        if rows and not part.startswith("bert."):
            tensors[f"{part}weight"] = np.ones((rows, 32), np.float32)
            tensors[f"{part}bias"] = np.ones(rows, np.float32)
    source = find_source(str(changed_copy(model, tmp_path / "model", NAMELESS, tensors)))
    assert source.architecture == architecture
    assert source.described.get("num_labels") == (rows if "classifier." in parts else None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_decoder": True}, r"config\.json \(is_decoder True\)"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads"),
        ({"id2label": {"0": "a", "2": "b"}}, r"\(id2label\): .*0, 1, 2"),
        ({"id2label": {"0": "a", "1": "a"}}, r"\(id2label\): .*different"),
        ({"id2label": ["a", "b"]}, r"\(id2label\)"),
        ({"architectures": "BertModel"}, r"\(architectures\)"),
        ({"model_type": ["bert"]}, r"\(model_type\)"),
        ({"vocab_size": 10**7}, r"describes 320,0.* have only"),
        ({"num_hidden_layers": 1000}, "have only"),
    ],
)
def test_entries_of_a_config_that_mean_another_model_are_refused(changes, message, model, tmp_path):
    folder = changed_copy(model, tmp_path / "model", changes)
    with pytest.raises(CheckpointError, match=message):
        find_source(str(folder))


def test_weights_in_a_checkpoint_of_training_are_read(in_torch, weights, tmp_path):
    import torch

    tensors = torch.load(in_torch / "pytorch_model.bin", weights_only=True)
    rounded = {**weights, "cls.predictions.bias": tensors["cls.predictions.bias"].float().numpy()}
    parallel = {f"module.{name}": value for name, value in tensors.items()}
    optimizer = {"state": {0: {"step": 3}}, "param_groups": []}
    folder = shutil.copytree(in_torch, tmp_path / "model")
    for content in (parallel, {"state_dict": parallel, "epoch": 3, "optimizer": optimizer}):
        torch.save(content, folder / "pytorch_model.bin")
        assert_same_model(folder, rounded)
    torch.save({"model": tensors, "ema": tensors}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"2 of its entries are weights.*'model', 'ema'"):
        find_source(str(folder)).tensors()
