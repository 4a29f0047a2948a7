"""`bert shrink`: the layers of the result equal the layers of the model, in PyTorch."""

import json
import shutil

import numpy as np
import pytest
from support.hf_models import MODELS, SHAPE, in_torch, opened
from support.vectors import write_pooling

from bert_cli.cli import main
from bert_cli.data.finetune.embeddings import embedding_files


@pytest.mark.parametrize("name", ["bare", "masked"])
def test_a_smaller_model_has_the_chosen_layers_embeddings_and_head(name, models, tmp_path):
    assert main(["shrink", str(models[name]), str(tmp_path / "out"), "--layers", "1"]) == 0
    large = opened(models[name], MODELS[name][0]).state_dict()
    small = opened(tmp_path / "out", MODELS[name][0]).state_dict()
    assert not [key for key in small if "layer.1." in key]
    for key, value in small.items():
        assert np.array_equal(value, large[key.replace("layer.0.", "layer.1.")]), key
    ids = np.arange(5, 14)[None] % SHAPE["vocab_size"]
    columns = {"input_ids": ids, "attention_mask": ids * 0 + 1, "token_type_ids": ids * 0}
    for output in in_torch(tmp_path / "out", MODELS[name][0], columns).values():
        assert np.isfinite(output).all()


def test_a_smaller_model_of_vectors_has_the_files_of_its_pooling(models, tmp_path, bert):
    source = shutil.copytree(models["bare"], tmp_path / "vectors")
    write_pooling(source, "cls", SHAPE["hidden_size"])
    files = embedding_files("cls", SHAPE["hidden_size"], 32)
    assert main(["shrink", str(source), str(tmp_path / "out"), "--layers", "0"]) == 0
    for name, content in files.items():
        assert (tmp_path / "out" / name).read_bytes() == content
    for module in json.loads(files["modules.json"]):
        assert (tmp_path / "out" / module["path"]).is_dir()
    (source / "modules.json").write_bytes(files["modules.json"].replace(b"Normalize", b"Dense"))
    assert "2_Dense" in bert("shrink", source, tmp_path / "no", "--layers", "0", code=4).err
