"""Weights in the files of other programs: written by transformers, PyTorch and TensorFlow, read here."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import load_file, save_file
from support import tiny_models

from bert_cli.errors import CheckpointError
from bert_cli.model.bert import build_blocks, named_weights
from bert_cli.tasks.run import start
from bert_cli.tasks.run.start import find_source, load_weights

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose weights all differ, also the biases and norms."""
    folder = tiny_models.write_model(tmp_path_factory.mktemp("models") / "model")
    draw = np.random.default_rng(4)
    tensors = {
        name: draw.normal(0, 0.2, value.shape).astype(np.float32)
        for name, value in load_file(folder / "model.safetensors").items()
    }
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
    assert not (folder / "model.safetensors").exists()
    return folder


def assert_same_model(folder: Path, weights, left_out: tuple[str, ...] = ()) -> None:
    """The folder's weights have a place in the model, and are these."""
    source = find_source(str(folder))
    blocks = named_weights(build_blocks(source.config, seed=9, policy="float32"))
    new, _ = load_weights(source, blocks)
    assert new == list(left_out)
    found = source.tensors()
    assert len(found) > 30
    for name, value in weights.items():
        if name in found:
            np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_weights_in_shards_are_read(shards, weights):
    assert set(weights) <= set(find_source(str(shards)).tensors())
    assert_same_model(shards, weights)


def test_an_index_names_files_of_its_folder_that_have_the_weights(shards, tmp_path):
    folder = shutil.copytree(shards, tmp_path / "broken")
    (tmp_path / "outside.safetensors").write_bytes(b"")
    files = json.loads((folder / INDEX).read_text())["weight_map"]
    first = files["cls.predictions.bias"]
    for more, message in (
        ({"more": "../outside.safetensors"}, r"index\.json \('.*'\): is no file of weights"),
        ({"more": "/etc/passwd"}, r"index\.json \('.*'\): is no file of weights"),
        ({"bert.more": first}, rf"{first}: lacks the weight bert\.more"),
        ({"bert.more": "model-9.safetensors"}, r"model-9\.safetensors: is missing"),
        (None, r"index\.json"),
    ):
        index = [1] if more is None else {"weight_map": files | more}
        (folder / INDEX).write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match=message):
            find_source(str(folder)).tensors()


@pytest.fixture(scope="module")
def in_torch(model, tmp_path_factory):
    """The same weights in PyTorch's file, a bfloat16 among them."""
    import torch

    folder = tmp_path_factory.mktemp("torch")
    shutil.copy(model / "config.json", folder)
    tensors = {
        name: torch.from_numpy(value)
        for name, value in load_file(model / "model.safetensors").items()
    }
    tensors["cls.predictions.bias"] = tensors["cls.predictions.bias"].bfloat16()
    torch.save(tensors, folder / "pytorch_model.bin")
    return folder


def test_pytorchs_file_is_read(in_torch, weights):
    import torch

    rounded = torch.from_numpy(weights["cls.predictions.bias"]).bfloat16().float().numpy()
    assert_same_model(in_torch, {**weights, "cls.predictions.bias": rounded})


def test_pytorchs_file_is_never_unpickled(in_torch, tmp_path, monkeypatch):
    import torch

    class Harm:
        def __reduce__(self):
            return Path.write_text, (tmp_path / "harm", "done")

    def refused(folder: Path, message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            find_source(str(folder)).tensors()

    folder = shutil.copytree(in_torch, tmp_path / "model")
    torch.save({"bert.pooler.dense.bias": Harm()}, folder / "pytorch_model.bin")
    refused(folder, r"pytorch_model\.bin: cannot be read as weights")
    assert not (tmp_path / "harm").exists()
    # An empty file is an error without a text.
    (folder / "pytorch_model.bin").write_bytes(b"")
    refused(folder, r"as weights only \(.*EOF.*\); convert")
    monkeypatch.setitem(sys.modules, "torch", None)
    refused(in_torch, r"extra 'export'.*save_pretrained\(FOLDER\)")


@pytest.mark.parametrize("kind", ["model", "in_torch"])
def test_a_name_on_the_hub_brings_the_weights_that_it_has(kind, request, tmp_path, monkeypatch):
    import huggingface_hub

    there, asked = request.getfixturevalue(kind), []

    def download(name, allow_patterns):
        asked.append(name)
        for file in there.iterdir():
            if any(file.match(pattern) for pattern in allow_patterns):
                shutil.copy(file, tmp_path)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    found = find_source("someone/model")
    assert set(found.tensors()) == set(find_source(str(there)).tensors())
    # PyTorch's files are large, and asked for only where there are no others.
    assert asked == ["someone/model"] * (2 if kind == "in_torch" else 1)


@pytest.mark.parametrize("name", ["tf_model.h5", "mine.keras", "saved_model.pb"])
def test_a_keras_model_is_refused_with_its_conversion(name, model, tmp_path):
    (tmp_path / name).write_bytes(b"")
    message = rf"{name}: is a Keras model, which cannot be read; .*save_pretrained"
    for path in (tmp_path, tmp_path / name, tmp_path):
        with pytest.raises(CheckpointError, match=message):
            find_source(str(path))
        shutil.copy(model / "config.json", tmp_path)


# --- TensorFlow 2


class Layer(tf.Module):
    """An object with attributes, tracked by TensorFlow as Keras 2 tracks its layers."""

    def __init__(self, **attributes: object) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


def objects(weights, *, scope: str = "tf_bert", merged: bool = False) -> dict[str, Layer]:
    """The layers of transformers' TFBertForPreTraining; `merged` drops what the original drops."""

    def variable(name: str, last: str) -> tf.Variable:
        value = weights[name]
        turned = value.T if last == "kernel" else value
        path = name.rpartition(".")[0].replace(".", "/")
        return tf.Variable(turned, name=f"{scope}/{path}/{last}")

    def dense(name: str, *, bias: bool = True) -> Layer:
        more = {"bias": variable(f"{name}.bias", "bias")} if bias else {}
        return Layer(kernel=variable(f"{name}.weight", "kernel"), **more)

    def norm(name: str) -> Layer:
        return Layer(
            gamma=variable(f"{name}.weight", "gamma"), beta=variable(f"{name}.bias", "beta")
        )

    def layer(number: int) -> Layer:
        own = f"bert.encoder.layer.{number}"
        names = [f"{own}.attention.self.{part}" for part in ("query", "key", "value")]
        if merged:
            whole = np.concatenate([weights[f"{name}.weight"].T for name in names], axis=1)
            attention = Layer(qkv_weight=tf.Variable(whole, name="qkv/qkv_weight"))
        else:
            attention = Layer(query=dense(names[0]), key=dense(names[1]), value=dense(names[2]))
        return Layer(
            attention=Layer(
                self_attention=attention,
                dense_output=Layer(
                    dense=dense(f"{own}.attention.output.dense", bias=not merged),
                    LayerNorm=norm(f"{own}.attention.output.LayerNorm"),
                ),
            ),
            intermediate=Layer(dense=dense(f"{own}.intermediate.dense")),
            bert_output=Layer(
                dense=dense(f"{own}.output.dense"), LayerNorm=norm(f"{own}.output.LayerNorm")
            ),
        )

    tables = {"weight": "word", "token_type_embeddings": "token_type"}
    tables["position_embeddings"] = "position"
    embeddings = Layer(
        LayerNorm=norm("bert.embeddings.LayerNorm"),
        **{
            attribute: variable(f"bert.embeddings.{table}_embeddings.weight", "embeddings")
            for attribute, table in tables.items()
        },
    )
    predictions = Layer(input_embeddings=embeddings)
    if not merged:
        predictions.bias = variable("cls.predictions.bias", "bias")
        predictions.transform = Layer(
            dense=dense("cls.predictions.transform.dense"),
            LayerNorm=norm("cls.predictions.transform.LayerNorm"),
        )
    return {
        "embeddings": embeddings,
        "layers": [layer(number) for number in range(tiny_models.TINY.num_hidden_layers)],
        "pooler": Layer(dense=dense("bert.pooler.dense")),
        "mlm": Layer(predictions=predictions),
        "nsp": Layer(seq_relationship=dense("cls.seq_relationship")),
    }


def write(root: Layer, model: Path, folder: Path) -> Path:
    folder.mkdir()
    root.save_counter = tf.Variable(3, name="save_counter")
    root.optimizer = Layer(iter=tf.Variable(170), m=tf.Variable([0.5]))
    root.keras_api = Layer(metrics=[Layer(total=tf.Variable(1.0))])
    tf.train.Checkpoint(root).write(str(folder / "170.ckpt"))
    shutil.copy(model / "config.json", folder)
    return folder


def test_a_tensorflow_checkpoint_of_transformers_is_read(model, weights, tmp_path):
    made = objects(weights)
    encoder = Layer(layer=made["layers"])
    bert = Layer(embeddings=made["embeddings"], encoder=encoder, pooler=made["pooler"])
    folder = write(Layer(bert=bert, mlm=made["mlm"], nsp=made["nsp"]), model, tmp_path / "tf")
    assert_same_model(folder, weights)
    assert set(weights) == set(find_source(str(folder)).tensors())


def test_the_originals_checkpoint_is_read_with_its_merged_kernels(model, weights, tmp_path):
    made, root = objects(weights, merged=True), Layer()
    order = [made["embeddings"], *made["layers"], made["pooler"], made["mlm"], made["nsp"]]
    for number, layer in enumerate(order):
        setattr(root, f"layer_with_weights-{number}", layer)
        setattr(root, f"layer-{number + 3}", layer)
    folder = write(root, model, tmp_path / "original")
    # Biases that are not there are zeros; a head without its transform is another one.
    zeros = {
        name: np.zeros_like(value)
        for name, value in weights.items()
        if name.endswith("bias") and ("attention.self" in name or "attention.output.dense" in name)
    }
    assert len(zeros) == 4 * tiny_models.TINY.num_hidden_layers
    assert_same_model(folder, {**weights, **zeros}, left_out=("heads/masked_lm",))
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"170\.ckpt: is a TensorFlow 2 .* without its shape"):
        find_source(str(folder / "170.ckpt"))


@pytest.fixture
def with_squad_head(model, weights, tmp_path):
    """A checkpoint with a Dense layer of the model's own that has no bias, as `N.ckpt` with N = 170."""
    made = objects(weights)
    kernel = tf.Variable(np.ones((32, 2), np.float32), name="model/qa_outputs/kernel")
    encoder = Layer(layer=made["layers"])
    root = Layer(embeddings=made["embeddings"], encoder=encoder, qa_outputs=Layer(kernel=kernel))
    return write(root, model, tmp_path / "squad")


def test_a_head_without_a_bias_is_read_and_a_damaged_graph_of_objects_is_named(
    with_squad_head, monkeypatch
):
    found = find_source(str(with_squad_head)).tensors()
    np.testing.assert_array_equal(found["qa_outputs.weight"], np.ones((2, 32)))
    assert "qa_outputs.bias" not in found
    own = start.TrackableObjectGraph.FromString

    def of_other_objects(data: bytes):
        changed = own(data)
        del changed.nodes[5:]
        return changed

    for parse in (lambda data: own(b"\xff" + data[1:]), of_other_objects):
        monkeypatch.setattr(start, "TrackableObjectGraph", SimpleNamespace(FromString=parse))
        with pytest.raises(CheckpointError, match=r"170\.ckpt: cannot be read \("):
            find_source(str(with_squad_head)).tensors()


def test_of_several_checkpoints_the_newest_is_read(with_squad_head):
    folder = with_squad_head

    def copy(name: str) -> None:
        for path in list(folder.glob("170.ckpt*")):
            shutil.copy(path, folder / path.name.replace("170.ckpt", name))

    copy("20.ckpt")
    copy("1000.ckpt")
    assert find_source(str(folder)).weights == folder / "1000.ckpt"
    # As TensorFlow writes it, but in another folder, from which this one was moved.
    state = folder / "checkpoint"
    state.write_text('model_checkpoint_path: "/elsewhere/20.ckpt"\n')
    assert find_source(str(folder)).weights == folder / "20.ckpt"
    for text in ("damaged", 'model_checkpoint_path: "30.ckpt"\n'):
        state.write_text(text)
        assert find_source(str(folder)).weights == folder / "1000.ckpt"
    state.write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"checkpoint: cannot be read \(.*; remove it"):
        find_source(str(folder))
    state.unlink()
    copy("best.ckpt")
    with pytest.raises(
        CheckpointError, match=r"4 checkpoints \(1000\.ckpt, 170\.ckpt, 20\.ckpt, best"
    ):
        find_source(str(folder))


def test_a_tensorflow_checkpoint_of_another_model_is_named(model, weights, tmp_path):
    root = Layer(embeddings=objects(weights)["embeddings"], adapter=tf.Variable(1.0))
    folder = write(root, model, tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"at other attributes than BERT: adapter; give one"):
        find_source(str(folder)).tensors()
