"""`bert export`: each format, opened by its own runtime and compared with transformers' model, and its card."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file
from support.hf_models import MODELS, PIECES, SHAPE, change_weights, in_torch, need, opened
from support.vectors import write_pooling

import bert_cli
from bert_cli.cli import main
from bert_cli.config.use import ExportSettings, ServeSettings
from bert_cli.errors import CheckpointError, ConfigError
from bert_cli.parse.load import load
from bert_cli.tasks.model.opened import INPUTS
from bert_cli.tasks.use import export, int8, requests

CLOSE = 2e-5  # outputs here are as large as 10
FILES = {"README.md", "config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"}


def bert_export(*arguments: object) -> None:
    settings, _ = load(ExportSettings, [str(word) for word in arguments], "bert export")
    export.run(settings)


def columns(length: int = 9) -> dict[str, np.ndarray]:
    """Return other examples than those that the command itself compares."""
    draw = np.random.default_rng(11)
    mask = (np.arange(length) < np.array([[length], [4], [6]])).astype(np.int64)
    ids, segments = (draw.integers(0, most, mask.shape) * mask for most in (SHAPE["vocab_size"], 2))
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": segments}


def outputs_of(folder: Path, form: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the outputs of an export in the format's own runtime."""
    if form == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(folder / "model.onnx")
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(names, inputs), strict=True))
    import tensorflow as tf

    small = {name: column.astype(np.int32) for name, column in inputs.items()}
    if form == "tflite":
        interpreter = tf.lite.Interpreter(model_path=str(folder / "model.tflite"))
        return interpreter.get_signature_runner("serving_default")(**small)
    signature = tf.saved_model.load(str(folder)).signatures["serving_default"]
    tensors = {name: tf.constant(column) for name, column in small.items()}
    return {name: value.numpy() for name, value in signature(**tensors).items()}


TASKS = {
    "question": "question-answering", "token": "token-classification", "bare": "feature-extraction",
    **dict.fromkeys(("masked", "pretraining", "group"), "fill-mask"),
}  # fmt: skip


def check_card(folder: Path, name: str, form: str) -> str:
    """Check the card of an export that has a license; return its code."""
    _, front, body = (folder / "README.md").read_text().split("---\n", 2)
    task = TASKS.get(name, "text-classification")
    kind = {"group": "groupbert", "modern": "modernbert"}.get(name, "bert")
    library = "transformers" if form == "hf" else form
    expected = {"license": "apache-2.0", "library_name": library, "pipeline_tag": task}
    assert yaml.safe_load(front) == {**expected, "tags": [kind]}
    assert f"`bert export --format {form}`" in body and str(folder.parent) not in body
    return re.search(r"```python\n(.*?)```", body, re.DOTALL)[1]


@pytest.fixture
def run_code(monkeypatch, capsys):
    """A function that returns what the code of a card prints in its folder."""

    def run(code: str, folder: Path) -> str:
        monkeypatch.chdir(folder)
        capsys.readouterr()
        exec(code, {})
        return capsys.readouterr().out

    return run


# --- formats

TOO_LONG = {"saved-model": "than the model.*40 positions", "tflite": "bounds", "onnx": "40 by 41"}
"""Format -> its error for more tokens than positions."""
DAILY = [("masked", "saved-model"), ("question", "onnx")]
OTHERS = [
    ("pretraining", "tflite"), ("bare", "saved-model"), ("group", "tflite"), ("two", "saved-model"),
    ("token", "tflite"), ("bare", "onnx"), ("group", "onnx"),
]  # fmt: skip
"""Each head in a format, and each format with outputs of texts and of their tokens. The code of their cards is run."""


@pytest.mark.filterwarnings("ignore")  # TensorFlow Lite's: its interpreter will move
@pytest.mark.parametrize(
    ("name", "form"),
    [*DAILY, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in OTHERS)],
)
def test_each_format_gives_transformers_numbers(
    name, form, models, tmp_path, bert, capsys, run_code
):
    if form == "onnx":
        need("torch", "onnx", "onnxscript", "onnxruntime")
    expected = in_torch(models[name], MODELS[name][0], columns())
    capsys.readouterr()
    bert_export(models[name], tmp_path / "out", "--format", form, "--license", "apache-2.0")
    out = capsys.readouterr().out
    assert f"export: {tmp_path / 'out'}, " in out and "outputs differ by at most" in out
    assert "; a text may have at most 40 tokens" in out and len(out.splitlines()) == 2
    result = outputs_of(tmp_path / "out", form, columns())
    number = sum(value.numel() for value in opened(models[name], MODELS[name][0]).parameters())
    code = check_card(tmp_path / "out", name, form)
    assert f" with {number:,} parameters: " in (tmp_path / "out" / "README.md").read_text()
    if (name, form) in OTHERS:
        assert re.search("array|numpy", run_code(code, tmp_path / "out"))
    assert result.keys() == expected.keys()
    for output, value in expected.items():
        assert result[output].shape == value.shape
        np.testing.assert_allclose(result[output], value, atol=CLOSE, err_msg=output)
    with pytest.raises(Exception, match=TOO_LONG[form]):
        outputs_of(tmp_path / "out", form, columns(length=41))
    if form == "onnx":
        files = {path.name for path in (tmp_path / "out").iterdir()}
        assert files - {"modeling_groupbert.py"} == {*FILES, "model.onnx", "made_from.txt"}
        if name == "question":
            asked = ["--question", "where is the cat", "--context", "the cat sat in paris ."]
            answers = []
            for model in (models[name], tmp_path / "out"):
                printed = bert("predict", model, *asked)
                answers.append(json.loads(printed.out))
            assert "by ONNX Runtime (" in printed.err
            assert answers[1].pop("probability") == pytest.approx(answers[0].pop("probability"))
            assert answers[0] == answers[1]
            for words in (["--engine", "tensorflow", *asked], ["--task", "embed", "the cat"]):
                assert main(["predict", str(tmp_path / "out"), *words]) == 4
                assert "is an export, which" in capsys.readouterr().err
    else:
        assert main(["predict", str(tmp_path / "out"), "the [MASK]"]) == 4
        assert "use the model that it was exported from" in capsys.readouterr().err


def longer_modernbert(models, folder, positions):
    model = shutil.copytree(models["modern"], folder)
    described = json.loads((model / "config.json").read_text())
    described |= {"max_position_embeddings": positions, "local_attention": 16}
    (model / "config.json").write_text(json.dumps(described))
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "bound"), [("float32", CLOSE), ("int8", 0.15)])
def test_the_graph_of_modernbert_reads_its_longest_texts(
    precision, bound, models, tmp_path, run_code
):
    """Logits are as large as 1.8. Those of int8 differed by 0.11 at 9 tokens, and by 0.08 at 1,201."""
    need("torch", "onnx", "onnxscript", "onnxruntime")
    model = longer_modernbert(models, tmp_path / "model", 1201)
    words = ["--format", "onnx", "--precision", precision, "--license", "apache-2.0"]
    bert_export(model, tmp_path / "out", *words)
    if precision == "float32":
        code = check_card(tmp_path / "out", "modern", "onnx")
        assert "array" in run_code(code, tmp_path / "out")
    written = (tmp_path / "out" / "model.onnx").read_bytes()
    assert (b"MatMulInteger" in written) == (precision == "int8")
    for length in (9, 513, 1201):
        inputs = columns(length)
        inputs["attention_mask"][1] = np.arange(length) < length * 3 // 4
        del inputs["token_type_ids"]
        result = outputs_of(tmp_path / "out", "onnx", inputs)["logits"]
        expected = in_torch(model, MODELS["modern"][0], inputs)["logits"]
        np.testing.assert_allclose(result, expected, atol=bound, err_msg=str(length))


def test_a_graph_for_longer_texts_is_refused(models, tmp_path):
    need("torch", "onnx", "onnxscript", "onnxruntime")
    model = longer_modernbert(models, tmp_path / "model", 2049)
    with pytest.raises(ConfigError, match=r"of at most 2,048, .* 2,049 positions; export it as hf"):
        bert_export(model, tmp_path / "out", "--format", "onnx")


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("masked", r"'sequence'"),
        ("token", r"'entity'"),
        ("bare", r"^\[\[\["),
        ("group", r"'sequence'"),
        pytest.param("text", r"'label': 'LABEL_\d'", marks=pytest.mark.slow),
        pytest.param("several", r"(LABEL_\d.*){3}", marks=pytest.mark.slow),
        pytest.param("question", "", marks=pytest.mark.slow),
    ],
)
def test_a_hugging_face_folder_has_the_model_alone_and_the_code_of_its_card_runs(
    name, printed, models, tmp_path, capsys, run_code
):
    import torch
    import transformers
    from safetensors.torch import load_file

    model, out = shutil.copytree(models[name], tmp_path / "model"), tmp_path / "out"
    # As a run's checkpoint.
    (model / "optimizer.safetensors").write_bytes(b"moments")
    (model / "state.json").write_text('{"format": 1, "crc32c": {}}')
    for file in ("config.json", "tokenizer_config.json"):
        described = json.loads((model / file).read_text())
        described["auto_map"] = {"AutoModel": "modeling_foreign.Model"}
        (model / file).write_text(json.dumps(described))
    weights = load_file(model / "model.safetensors")
    if name == "bare":
        (model / "model.safetensors").unlink()
        torch.save(weights, model / "pytorch_model.bin")
    bert_export(model, out, "--format", "hf", "--license", "apache-2.0")
    assert f"run hf upload OWNER/NAME {out}\n" in capsys.readouterr().out
    assert re.search(printed, run_code(check_card(out, name, "hf"), out))
    is_group, architecture = name == "group", MODELS[name][0]
    files = {*FILES, "model.safetensors", *(["modeling_groupbert.py"] if is_group else [])}
    assert {path.name for path in out.iterdir()} == files
    assert not [
        file
        for file in ("config.json", "tokenizer_config.json")
        if "foreign" in (out / file).read_text()
    ]
    written = load_file(out / "model.safetensors")
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[tensor], value) for tensor, value in weights.items())
    auto = "AutoModel" if name == "bare" else f"AutoModel{architecture.partition('Bert')[2]}"
    trust = {"trust_remote_code": is_group}
    opened = getattr(transformers, auto).from_pretrained(out, **trust)
    assert type(opened).__name__ == architecture
    # Special tokens in a text are plain there as here, except where [MASK] is to be filled.
    tokenizer = transformers.AutoTokenizer.from_pretrained(out, **trust)
    ids = tokenizer("cat [MASK] dog [SEP]")["input_ids"]
    expected = [2, PIECES.index("cat"), 4, PIECES.index("dog"), 3, 3]
    assert (ids == expected) == (name in ("masked", "group"))
    assert ids == expected or not {3, 4} & {*ids[1:-1]}


# --- the folder


def test_an_export_with_other_outputs_is_removed(models, tmp_path, monkeypatch):
    for change, message in (
        (lambda logits: {"logits": logits + 0.01}, r"differ by 1\.0e-02"),
        (lambda logits: {"logits": logits * np.nan}, "the export was removed"),
        (lambda logits: {}, "the export was removed"),
    ):

        def wrong(served, folder, change=change):
            (folder / "model").write_text("")
            return lambda inputs: change(served.serve(*inputs.values())["logits"].numpy())

        monkeypatch.setattr(export, "FORMATS", {"saved-model": (wrong, ())})
        with pytest.raises(CheckpointError, match=message):
            bert_export(models["two"], tmp_path / "out", "--format", "saved-model")
        assert list(tmp_path.iterdir()) == []


def test_outputs_that_no_model_has_are_not_compared_by_their_own_size(models, tmp_path):
    """Float32 rounds numbers of 1e30 by 1e23, which must not pass as an equal output."""
    huge = {"classifier.weight": lambda value: value * 1e30}
    model = change_weights(models["two"], tmp_path / "model", huge)
    with pytest.raises(CheckpointError, match="outputs of export and model differ by"):
        bert_export(model, tmp_path / "out", "--format", "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_packages_that_a_format_lacks_are_named(models, tmp_path, monkeypatch):
    model = models["bare"]
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    message = "lacks torch and onnx and onnxscript and onnxruntime;.*pip install .*'onnxruntime=="
    with pytest.raises(ConfigError, match=message):
        bert_export(model, tmp_path / "out", "--format", "onnx")


@pytest.mark.parametrize("form", ["hf", "onnx"])
def test_an_export_knows_the_columns_and_the_temperature_of_its_run(form, models, tmp_path, bert):
    need("torch", "onnx", "onnxscript", "onnxruntime")
    run = shutil.copytree(models["text"], tmp_path / "run")
    state = {"format": 1, "crc32c": {}, "settings": {"text_column": ["Comment"]}}
    (run / "state.json").write_text(json.dumps(state))
    (run / "decision.json").write_text(json.dumps({"temperature": 2.0}))
    (tmp_path / "new.csv").write_text("ID,Comment\n7,the cat\n")
    bert_export(run, tmp_path / "out", "--format", form)
    answers = []
    for model in (run, tmp_path / "out"):
        answers.append(bert("predict", model, "--input", tmp_path / "new.csv").last)
        assert requests.open_model(ServeSettings(path=str(model)))["about"]({})["texts"] == 1
    assert [answers[1][name] for name in ("Comment", "label")] == ["the cat", answers[0]["label"]]
    assert not (tmp_path / "out" / "decision.json").exists()
    assert answers[1]["probability"] == pytest.approx(answers[0]["probability"], abs=CLOSE)


# --- int8


@pytest.mark.parametrize(
    "name",
    ["pretraining", *(pytest.param(n, marks=pytest.mark.slow) for n in ("question", "group"))],
)
def test_an_int8_graph_multiplies_integers_and_has_no_weights_in_float32(
    name, models, tmp_path, monkeypatch, capfd
):
    need("torch", "onnx", "onnxscript", "onnxruntime")
    import onnx

    texts = tmp_path / "texts.jsonl"
    fields = {"question": "where is the cat", "context": "the cat sat on the mat in paris"}
    row = fields if name == "question" else {"text": "the cat is in paris ."}
    long = {field: f"{text} " * 20 for field, text in row.items()}  # more than 40 positions
    texts.write_text(f"{json.dumps(row)}\n" * 19 + f"{json.dumps(long)}\n" * 9)
    monkeypatch.setattr(int8, "MAX_TEXTS", 20)
    monkeypatch.setattr(int8, "LEAST_AGREEMENT", 1.1)  # so that every graph is doubtful
    words = ["--format", "onnx", "--precision", "int8", "--compare-on", texts]
    bert_export(models[name], tmp_path / "out", *words)
    printed = capfd.readouterr()
    said = re.search(r"int8 against float32 on 20 examples: fraction .* \d\.\d{4}", printed.out)
    assert said and f"I{said[0][1:]}" in (tmp_path / "out" / "README.md").read_text()
    assert "; in float32 its outputs differ by at most" in printed.out
    assert not (tmp_path / "out/made_from.txt").exists(), "`bert predict` would use it"
    graph = onnx.load(tmp_path / "out" / "model.onnx").graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    products = [n for n in graph.node if n.op_type in ("MatMul", "Gemm")]
    assert not {i for node in products for i in node.input} & weights.keys(), "only q k' and p v"
    in_float = [t.name for t in weights.values() if t.data_type == 1 and len(t.dims) == 2]
    assert not in_float
    for product in (node.input[1] for node in graph.node if node.op_type == "MatMulInteger"):
        scale = weights[product.replace("_quantized", "_scale")]
        assert [*scale.dims] == [weights[product].dims[1]], "each column of a product has its scale"
    if name == "pretraining":
        (masks,) = bert_cli.load(str(tmp_path / "out")).fill("the cat [MASK]")
        (expected,) = bert_cli.load(str(models[name])).fill("the cat [MASK]")
        assert masks[0]["word"] == expected[0]["word"]
        assert masks[0]["probability"] == pytest.approx(expected[0]["probability"], abs=0.1)
    result = outputs_of(tmp_path / "out", "onnx", columns())
    for output, value in in_torch(models[name], MODELS[name][0], columns()).items():
        correlation = np.corrcoef(result[output].ravel(), value.ravel())[0, 1]
        assert 0.97 < correlation < 0.999999, output


# Output, its shape [50, 4 positions, ...], and labels of the model.
COMPARED = {
    "fraction of equal predictions": (("logits",), (50, 3), ("a", "b", "c")),
    "fraction of equal predictions of masks": (("prediction_logits",), (50, 4, 9), ("a", "b")),
    "fraction of equal predictions of ends": (("start_logits", "end_logits"), (50, 4), ("a", "b")),
    "rank correlation of the scores": (("logits",), (50, 1), None),
    "rank correlation of the similarities of texts": (("last_hidden_state",), (50, 4, 8), None),
}
PADDING = 3


def model_of(folder, labels=None):
    source = SimpleNamespace(folder=folder, has_several_labels=False)
    return SimpleNamespace(source=source, label_names=labels)


@pytest.mark.filterwarnings("ignore:An input array is constant")
@pytest.mark.parametrize("what", COMPARED)
def test_int8_warns_if_it_changes_more_than_one_of_fifty_predictions(what, tmp_path, capsys):
    """Changes in padding do not count; outputs that are all equal have no rank correlation."""
    draw = np.random.default_rng(3)
    columns = {name: np.ones((50, 4), np.int32) for name in INPUTS}
    columns["attention_mask"][:, PADDING] = 0
    names, shape, labels = COMPARED[what]
    values = {name: draw.standard_normal(shape).astype(np.float32) for name in names}
    model = model_of(tmp_path, labels)
    for change, warns in (
        (lambda x: x + 1e-3 * draw.standard_normal(x.shape), False),
        (lambda x: x + draw.standard_normal(x.shape), True),
        (np.zeros_like, True),
    ):
        other = {name: change(x).astype(np.float32) for name, x in values.items()}
        if len(shape) == 3 or len(names) == 2:
            for x in other.values():
                x[:, PADDING] = 90.0 + draw.standard_normal(x[:, PADDING].shape)
        sentence, agrees = int8.compare(model, [columns], lambda _: values, lambda _, x=other: x)
        assert " ".join(what.split()[:4]) in sentence
        message = capsys.readouterr().err
        assert ("warning: precision (int8): the" in message) == warns != agrees, sentence


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_int8_compares_the_vectors_that_a_model_of_sentences_has(pooling, tmp_path, capsys):
    """The second text differs after [CLS] alone."""
    write_pooling(tmp_path, pooling, 8, 40)
    draw = np.random.default_rng(3)
    columns = {name: np.ones((50, 4), np.int32) for name in INPUTS}
    values = draw.standard_normal((50, 4, 8)).astype(np.float32)
    other = np.concatenate([values[:, :1], draw.standard_normal((50, 3, 8))], 1, dtype=np.float32)
    outputs = ({"last_hidden_state": x} for x in (values, other))
    sentence, _ = int8.compare(model_of(tmp_path), [columns], *(lambda _, x=x: x for x in outputs))
    assert sentence.endswith("texts 1.0000") == (pooling == "cls")
    assert bool(capsys.readouterr().err) == (pooling == "mean")


# --- static vectors


@pytest.mark.parametrize("pooling", ["mean", pytest.param("cls", marks=pytest.mark.slow)])
def test_static_vectors_open_in_sentence_transformers_and_are_principal_components(
    pooling, models, tmp_path, capfd
):
    """The judge is NumPy on PyTorch's vectors of [CLS] piece [SEP], weighted by Zipf's law."""
    need("torch")
    from sentence_transformers import SentenceTransformer

    texts = ["the cat sat on the mat", "paris is in france .", "we like to eat"]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    source = write_pooling(shutil.copytree(models["bare"], tmp_path / "model"), pooling, 32, 40)
    words = ["--format", "static", "--dimensions", "8", "--compare-on", tmp_path / "texts.txt"]
    bert_export(source, tmp_path / "out", *words)
    printed = capfd.readouterr().out
    assert "3 texts: rank correlation of the similarities" in printed
    assert f"{len(PIECES)} vectors of 8 values" in printed
    table = load_file(tmp_path / "out" / "model.safetensors")["embeddings"]
    assert table.shape == (len(PIECES), 8) and not table[:5].any(), "special tokens have no vector"
    ids = np.array([[2, piece, 3] for piece in range(5, len(PIECES))])
    inputs = {"input_ids": ids, "attention_mask": ids * 0 + 1, "token_type_ids": ids * 0}
    hidden = in_torch(models["bare"], "BertModel", inputs)["last_hidden_state"]
    hidden = hidden.mean(1) if pooling == "mean" else hidden[:, 0]
    left, values, _ = np.linalg.svd(hidden - hidden.mean(0), full_matrices=False)
    chance = 1.0 / np.arange(2, len(PIECES) + 2)
    weights = 1e-4 / (1e-4 + chance / chance.sum())
    expected = (left[:, :8] * values[:8]) * weights[5:, None]
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(table[5:] @ table[5:].T, expected @ expected.T, rtol=2e-3, atol=1e-9)
    model = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    pieces = [PIECES.index(word) for word in texts[1].split()]
    mean = table[pieces].mean(0)
    vector = model.encode(texts[1])
    np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=1e-5)
