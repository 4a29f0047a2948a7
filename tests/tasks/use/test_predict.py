"""What `bert predict` prints, compared with transformers' PyTorch models in the same folders."""

import csv
import io
import json
import lzma
import shutil
import sys
from functools import partial
from pathlib import Path
from textwrap import wrap
from types import SimpleNamespace

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from scipy.special import softmax
from support.hf_models import BIO, CLASSIFIER, MODELS, PIECES, ids_of
from support.hf_models import one_in_torch as in_torch
from support.terminal import Terminal
from support.vectors import write_pooling

import bert_cli
from bert_cli.cli import main
from bert_cli.config.use import PredictSettings, ServeSettings
from bert_cli.errors import BertError, ConfigError, DataError
from bert_cli.model import build
from bert_cli.model.names import hf
from bert_cli.parse.load import load
from bert_cli.progress import TerminalBar
from bert_cli.tasks.model.models import find_source
from bert_cli.tasks.model.opened import Input, open_model
from bert_cli.tasks.model.predictions import entities_of, predictors
from bert_cli.tasks.use.predict import build as build_predictor
from bert_cli.tasks.use.predict import prepare, run
from bert_cli.tasks.use.requests import open_model as serve_model

CLOSE = 1e-5
ROOT = Path(__file__).parents[3]
WINDOWS = {"doc_stride": 8, "max_query_length": 8}
"""Sizes of a run."""


def predict(capsys, *arguments: object) -> list[dict]:
    settings, _ = load(PredictSettings, [str(word) for word in arguments], "bert predict")
    capsys.readouterr()
    run(settings)
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def as_file(folder: Path, name: str, *rows: object) -> Path:
    path = folder / name
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def on_standard_input(monkeypatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_several_batches_show_their_progress(models, capsys, tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(
        TerminalBar, "show", lambda bar, *values: shown.append((bar.shown, *values))
    )
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    lines = as_file(tmp_path, "lines.txt", *["the cat [MASK]"] * 5)
    predict(capsys, models["pretraining"], "--input", lines, "--batch-size", 2)
    assert shown == [(True, f"{done} of 5 texts", done) for done in (2, 4, 5)]
    shown.clear()
    predict(capsys, models["pretraining"], "--input", lines, "--batch-size", 8)
    assert shown == [(False, "5 of 5 texts", 5)]
    # The inputs of every slice are counted among all.
    shown.clear()
    monkeypatch.setattr("bert_cli.tasks.use.predict.BATCHES_AT_ONCE", 2)
    predict(capsys, models["pretraining"], "--input", lines, "--batch-size", 1)
    assert shown == [(True, f"{done} of 5 texts", done) for done in range(1, 6)]


# --- tasks


@pytest.mark.parametrize("name", ["pretraining", "group"])
def test_masks_are_filled_as_transformers_fills_them(name, models, capsys, tmp_path):
    examples = {
        "The cat [MASK] on the [MASK].": "[CLS] the cat [MASK] on the [MASK] . [SEP]",
        # only [MASK] itself is special
        "[SEP] the [mask] [MASK]": "[CLS] [ [UNK] ] the [ mask ] [MASK] [SEP]",
        "do [MASK]": "[CLS] do [MASK] [SEP]",
    }
    texts = [*examples, "[MASK] " + "the cat " * 30 + "[MASK]"]
    path = as_file(tmp_path, "texts.txt", *texts)
    model = models[name]
    rows = predict(capsys, model, "--input", path, "--top", 4, "--batch-size", 3)
    assert [row["text"] for row in rows] == texts
    for row, example in zip(rows, examples.values(), strict=False):
        ids = ids_of(example)
        outputs = in_torch(model, MODELS[name][0], ids)
        expected = softmax(outputs["prediction_logits"], axis=-1)
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
        ("[CLS] the cat [SEP] a dog sat on the mat [SEP]", [0] * 4 + [1] * 7),
        ("[CLS] we like to eat un ##known ##s . [SEP]", None),
        ("[CLS] the [ [UNK] ] cat [SEP]", None),
        ("[CLS] the cat [SEP]", None),
    ]
    for row, (pieces, segments) in zip(result, examples, strict=False):
        logits = in_torch(models["text"], CLASSIFIER, ids_of(pieces), segments)["logits"]
        expected = softmax(logits)
        assert row["label"] == f"LABEL_{expected.argmax()}"
        assert row["probability"] == pytest.approx(expected.max(), abs=CLOSE)
        np.testing.assert_allclose(list(row["probabilities"].values()), expected, atol=CLOSE)
    assert [row["text"] for row in result] == [row["text"] for row in rows]
    assert "second" in result[0] and "second" not in result[1] and result[1]["mine"] == 3
    assert [row.get("truncated") for row in result] == [None] * 4 + [True]
    packed, table = tmp_path / "pairs.jsonl.xz", tmp_path / "pairs.parquet"
    packed.write_bytes(lzma.compress(path.read_bytes()))
    parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    for other in (packed, table):
        again = predict(capsys, models["text"], "--input", other, "--batch-size", 2)
        same = ("text", "label", "probabilities")
        assert [[row[n] for n in same] for row in again] == [
            [row[n] for n in same] for row in result
        ]
    rough = ["--second", rows[0]["second"], "--precision", "mixed_bfloat16"]
    (rough,) = predict(capsys, models["text"], rows[0]["text"], *rough)
    assert rough["probability"] == pytest.approx(result[0]["probability"], abs=0.05)
    assert rough["probability"] != result[0]["probability"]


def as_run(model, folder, **settings):
    """Return a copy of a model with the settings of the run that trained it."""
    shutil.copytree(model, folder)
    state = {"format": 1, "crc32c": {}, "settings": settings}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def test_the_rows_of_a_table_are_read_by_columns(models, capsys, tmp_path):
    rows = [("the cat", "a dog", "x"), ("", "a mat", "y"), ("we eat, dogs sat", "", "x")]
    objects = [{"text": text, "second": second} for text, second, _ in rows]
    expected = predict(
        capsys, models["text"], "--input", as_file(tmp_path, "a.jsonl", *objects, "", "")
    )
    assert len(expected) == 3
    alone = predict(
        capsys,
        models["text"],
        "--input",
        as_file(tmp_path, "b.jsonl", *({"text": row[0]} for row in rows)),
    )
    columns = ["--text-column", "review", "--text-column", "reply"]
    run = as_run(models["text"], tmp_path / "run", text_column=["review"])
    for mark, name in ((",", "a.csv"), (";", "b.csv"), ("\t", "a.tsv")):
        cells = [f'"{text}"' if mark in text else text for text, _, _ in rows]
        others = [mark.join([text, *row[1:]]) for text, row in zip(cells, rows, strict=True)]
        by_name = as_file(tmp_path, name, mark.join(["text", "second", "label"]), *others)
        renamed = as_file(tmp_path, f"c{name}", mark.join(["review", "reply", "label"]), *others)
        words = ([models["text"], by_name], [models["text"], renamed, *columns], [run, renamed])
        for (model, path, *flags), like in zip(words, (expected, expected, alone), strict=True):
            for row, answer in zip(
                predict(capsys, model, "--input", path, *flags), like, strict=True
            ):
                assert row["probabilities"] == answer["probabilities"]
                assert row["predicted_label"] == answer["label"]
    parquet.write_table(
        pyarrow.Table.from_pylist([{"review": row[0]} for row in rows]), tmp_path / "a.parquet"
    )
    again = predict(capsys, run, "--input", tmp_path / "a.parquet", *columns[:2])
    assert [{"text": row.pop("review"), **row} for row in again] == alone


@pytest.fixture
def reviews(tmp_path):
    """A table as Excel in German writes it: a byte order mark, semicolons, line breaks in cells, empty rows."""
    rows = [
        "ID;Comment;label",
        '7;"the cat\nsat; ""so""";x',
        ";;;"[:2],
        "8;;y",
        '9;"the dog";',
        ";;",
    ]
    path = tmp_path / "reviews.csv"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join([*rows, ""]).encode())
    return path


def test_a_table_comes_back_with_its_columns_and_those_of_the_answers(
    models, reviews, bert, capsys, tmp_path
):
    columns = ["--text-column", "Comment"]
    rows = predict(capsys, models["text"], "--input", reviews, *columns)
    first = {"ID": "7", "Comment": 'the cat\nsat; "so"', "label": "x"}
    (alone,) = predict(capsys, models["text"], first["Comment"])
    assert {n: rows[0][n] for n in first} == first
    assert rows[0]["predicted_label"] == alone["label"]
    assert rows[0]["probability"] == pytest.approx(alone["probability"], abs=CLOSE)
    assert [row["ID"] for row in rows] == ["7", "8", "9"]
    assert rows[1]["predicted_label"] is None
    out = tmp_path / "new" / "answers.csv"
    words = ["predict", models["text"], "--input", reviews, *columns, "--output", out]
    said = bert(*words)
    assert said.out == ""
    assert (
        "of the answers 'label' is 'predicted_label', because the input has that column" in said.err
    )
    assert "2 rows without text or label, skipped" in said.err
    data = out.read_bytes()
    assert data.startswith(
        b"\xef\xbb\xbfID;Comment;label;predicted_label;probability;probability of LABEL_0;"
    )
    with out.open(encoding="utf-8-sig", newline="") as file:
        again = [*csv.DictReader(file, delimiter=";", strict=True)]
    for written, row in zip(again, rows, strict=True):
        of_labels = {f"probability of {label}": "" for label in rows[0]["probabilities"]}
        of_labels |= {f"probability of {n}": v for n, v in row["probabilities"].items()}
        flat = {n: v for n, v in row.items() if n != "probabilities"} | of_labels
        expected = {n: "" if v is None else str(v) for n, v in flat.items()}
        assert written == expected
    lines = tmp_path / "answers.jsonl"
    predict(capsys, models["text"], "--input", reviews, *columns, "--output", lines)
    assert [*map(json.loads, lines.read_text().splitlines())] == rows
    # The table that was written is read as well.
    predict(capsys, models["text"], "--input", out, *columns, "--output", tmp_path / "twice.csv")
    assert (
        b";predicted_predicted_label;predicted_probability;"
        in (tmp_path / "twice.csv").read_bytes()
    )


def test_json_lines_keep_their_fields_and_a_tsv_holds_no_line_break(models, capsys, tmp_path):
    objects = [
        {"Comment": "the cat " * 30, "ID": 7},
        {"Comment": "a dog", "label": ["x"], "day": None},
    ]
    path = as_file(tmp_path, "in.jsonl", *objects)
    column = ["--text-column", "Comment"]
    rows = predict(capsys, models["text"], "--input", path, *column)
    assert [{n: row[n] for n in of} for row, of in zip(rows, objects, strict=True)] == objects
    # Also in the row without that column.
    assert [row["predicted_label"][:6] for row in rows] == ["LABEL_"] * 2
    out = tmp_path / "out.tsv"
    predict(capsys, models["text"], "--input", path, *column, "--output", out)
    header, *cells = [line.split("\t") for line in out.read_text().splitlines()]
    assert header[:4] == ["Comment", "ID", "label", "day"]
    cut = header.index("truncated")
    assert [row[1] + row[2] + row[cut] for row in cells] == ["7true", '["x"]']
    for number, separator in enumerate("\t\n\r"):
        path = as_file(tmp_path, f"{number}.jsonl", {"text": f"the{separator}cat"})
        with pytest.raises(DataError, match=r"a \.tsv holds no tab and no line break, as in 'the"):
            predict(capsys, models["text"], "--input", path, "--output", tmp_path / "new.tsv")
        assert not (tmp_path / "new.tsv").exists()
    rows = [{"question": "a cat?", "context": "the cat", "id": "q1"}]
    (row,) = predict(capsys, models["question"], "--input", as_file(tmp_path, "q.jsonl", *rows))
    assert row["id"] == "q1" and "context" not in row


QUESTIONS = ["--text-column", "question", "--text-column", "answer"]


@pytest.mark.parametrize(
    ("model", "words", "table", "header"),
    [
        ("text", [], "text\tn\nthe cat\t1\n", "text\tn\tlabel\t"),
        ("text", [], 'text;"a,b,c"\nthe cat;1\n', "text;a,b,c;label;"),
        ("text", [], "text,context\nthe cat,1\n", "text,context,label,"),
        ("question", [], "question,context\nwhere,the cat\n", "question,answer,"),
        ("question", QUESTIONS, "question,answer\nwhere,a\n", "question,predicted_answer,"),
        ("bare", ["the cat", "--task", "similarity"], "text,n\na dog,1\n", "text,n,similarity"),
    ],
)
def test_a_written_table_has_the_columns_of_its_input_then_those_of_the_answers(
    model, words, table, header, models, capsys, tmp_path
):
    path, out = tmp_path / "in.csv", tmp_path / "out.csv"
    path.write_text(table)
    assert predict(capsys, models[model], *words, "--input", path, "--output", out) == []
    first, row, *_ = out.read_text().splitlines()
    assert first.startswith(header)
    mark = next(mark for mark in ";\t," if mark in header)
    cells = row.split(mark)
    assert cells[header.count(mark) - 1]


def test_a_label_called_none_is_refused_with_none_below(models, capsys, tmp_path):
    model = shutil.copytree(models["text"], tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    names = ["none", *(f"label {n}" for n in range(1, len(config["id2label"])))]
    config |= {"id2label": dict(enumerate(names)), "label2id": {n: k for k, n in enumerate(names)}}
    (model / "config.json").write_text(json.dumps(config))
    assert "none" in predict(capsys, model, "the cat")[0]["probabilities"]
    with pytest.raises(ConfigError, match=r"none_below \(0\.5\): .* without a label 'none'"):
        predict(capsys, model, "the cat", "--none-below", 0.5)


@pytest.mark.parametrize(
    ("column", "row", "read"),
    [
        ("Comment", {"ID": 7, "Comment": "the cat"}, "the cat"),
        ("Comment", {"text": "a dog", "Comment": "the cat"}, "the cat"),
        ("Comment", {"text": "a dog", "ID": 7}, "a dog"),
        ("text", {"text": "a dog", "n": "the cat"}, "a dog"),
    ],
)
def test_json_lines_have_the_field_of_the_run_or_the_usual_ones(
    column, row, read, models, capsys, tmp_path
):
    run = as_run(models["text"], tmp_path / "run", text_column=[column])
    (answer,) = predict(capsys, run, "--input", as_file(tmp_path, "new.jsonl", row))
    (expected,) = predict(capsys, run, read)
    assert answer["probabilities"] == expected["probabilities"]
    path = as_file(tmp_path, "other.jsonl", {"Review": "the cat"})
    message = rf"line 1\): has no column '{column}', only 'Review'; pass one by --text-column"
    with pytest.raises(DataError, match=message):
        predict(capsys, run, "--input", path)


@pytest.mark.parametrize("settings", [{"text_column": ["a", "b"]}, {"glue_task": "rte"}])
def test_one_text_for_a_model_of_pairs_is_a_warning(settings, models, capsys, tmp_path):
    run = as_run(models["text"], tmp_path / "run", **settings)
    for words, number in ((["the cat"], 1), (["the cat", "--second", "a dog"], 0)):
        assert main(["predict", str(run), *words]) == 0
        warning = f"trained on pairs of texts, but {number} input of 1 have no second text"
        assert (warning in capsys.readouterr().err) == bool(number)
    bert_cli.load(run).label(["the cat", ("the cat", "a dog")])
    assert "but 1 input of 2 have no second text" in capsys.readouterr().err
    serve_model(ServeSettings(path=str(run)))["predict"]({"text": "the cat"})
    assert "second text" not in capsys.readouterr().err


def test_a_pair_for_a_model_of_single_texts_is_refused(models, capsys, tmp_path):
    run = as_run(models["text"], tmp_path / "run", text_column=["text"])
    model = bert_cli.load(run)
    path = as_file(tmp_path, "new.jsonl", {"text": "the cat"}, {"text": "a", "second": "a dog"})
    for call in (
        partial(predict, capsys, run, "--input", path),
        partial(predict, capsys, run, "a", "--second", "a dog"),
        partial(model.label, [("the cat", "a dog")]),
        partial(serve_model(ServeSettings(path=str(run)))["predict"], {"text": "a", "second": "b"}),
    ):
        with pytest.raises(BertError, match=r"a second text, but .* was trained on single texts"):
            call()
    assert len(model.label(["the cat"])) == 1


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
    expected = softmax(logits, axis=-1)[[1, 3, 5, 6, 7]]
    labels = [BIO[n] for n in expected.argmax(1)]
    words, found, probabilities = zip(*(word.values() for word in row["words"]), strict=True)
    assert (list(words), list(found)) == (text.split(), labels)
    np.testing.assert_allclose(probabilities, expected.max(1), atol=CLOSE)
    assert bool(row["entities"]) == any(label != "O" for label in labels)
    # A long sentence is cut; every word has a label.
    assert len(cut["words"]) == 90
    # Punctuation at the end of a word is a word.
    assert [word["word"] for word in attached["words"]] == ["(", "cats", "in", "paris", ".", ")"]
    tags = ["O", "B-LOC", "I-LOC", "B-PER"]
    assert entities_of("In New York, Ada", [(0, 2), (3, 6), (7, 11), (13, 16)], tags) == [
        {"type": "LOC", "text": "New York", "start": 3, "end": 11},
        {"type": "PER", "text": "Ada", "start": 13, "end": 16},
    ]


def of_run(model, folder, **sizes):
    """Copy a model to the checkpoint of a run with such windows, and return it."""
    step = shutil.copytree(model, folder / "step_00000010")
    (folder / "settings.json").write_text(json.dumps({"format": 1, **WINDOWS, **sizes}))
    return step


def test_answers_are_the_best_spans_of_transformers_logits(models, capsys, tmp_path):
    import transformers

    question, context = "Where do we eat?", "The cats sat on the mat. We like to eat in Paris."
    step = of_run(models["question"], tmp_path / "run", max_answer_length=3)
    (row,) = predict(capsys, step, "--question", question, "--context", context)
    tokenizer = transformers.AutoTokenizer.from_pretrained(models["question"])
    inputs = tokenizer(question, context, return_offsets_mapping=True)
    columns = inputs["input_ids"], inputs["token_type_ids"]
    start, end = in_torch(models["question"], MODELS["question"][0], *columns).values()
    inside = [n for n, part in enumerate(inputs.sequence_ids()) if part == 1]
    pairs = [(i, j) for i in inside for j in inside if 0 <= j - i < 3]
    offsets, scores = inputs["offset_mapping"], dict[str, float]()
    for i, j in sorted(pairs, key=lambda pair: -start[pair[0]] - end[pair[1]]):
        scores.setdefault(context[offsets[i][0] : offsets[j][1]], start[i] + end[j])
    assert row["answer"] == context[row["start"] : row["end"]] == next(iter(scores))
    best = softmax(list(scores.values())[:20])
    assert row["probability"] == pytest.approx(best[0], abs=CLOSE)


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
    step = of_run(models["question"], tmp_path / "run")
    result = predict(capsys, step, "--input", path, "--batch-size", 4)
    for one, row in zip(rows[:3], result, strict=False):
        assert row["question"] == one["question"]
        assert one["context"][row["start"] : row["end"]] == row["answer"] != ""
        assert 0.0 < row["probability"] <= 1.0
    assert [row.get("truncated") for row in result] == [None, None, True, None, None]
    nothing = {"answer": "", "probability": None, "start": None, "end": None}
    assert result[3:] == [{"question": "", **nothing}, {"question": "What?", **nothing}]
    on_standard_input(monkeypatch, path.read_bytes())
    assert predict(capsys, step, "--batch-size", 4) == result


def test_questions_are_read_in_the_windows_of_the_run(models, capsys, tmp_path):
    run = tmp_path / "run"
    step = of_run(models["question"], run)
    context = "the cats sat on the mat . we like to eat in paris ." * 4
    question = ["--question", "Where do we eat?", "--context", context]
    sizes = {"max_seq_length": 24, "doc_stride": 5, "max_query_length": 6, "max_answer_length": 2}
    (run / "settings.json").write_text(json.dumps({**sizes, "format": 1, "seed": 1}))
    (taken,) = predict(capsys, step, *question)
    assert predict(capsys, step, *question, "--max-seq-length", 24, "--doc-stride", 5) == [taken]
    assert len(taken["answer"].split()) <= 2
    for name, value in (("doc_stride", 9), ("max_query_length", 2), ("max_answer_length", 20)):
        changed = json.dumps({**sizes, name: value, "format": 1, "seed": 1})
        (run / "settings.json").write_text(changed)
        assert predict(capsys, step, *question)[0]["probability"] != taken["probability"], name
    (run / "settings.json").write_text('{"doc_stride": "x"}')
    with pytest.raises(DataError, match=r"settings.json \(doc_stride\)"):
        predict(capsys, step, *question)


LONG = "the cats sat on the mat . we like to eat in paris ." * 4
ASKED = ["--question", "Where do we eat?", "--context", LONG]
RUN = {"max_seq_length": 24, "doc_stride": 5}


@pytest.mark.parametrize(
    ("name", "words", "setting", "value"),
    [
        ("question", ASKED, "max_seq_length", 20),
        ("question", ASKED, "doc_stride", 9),
        ("text", [LONG], "max_seq_length", 16),
        ("text", [LONG], "doc_stride", 9),
        ("token", [LONG], "max_seq_length", 16),
        ("bare", [LONG, "--task", "embed"], "max_seq_length", 16),
        ("bare", [LONG, "--task", "embed"], "pooling", "cls"),
        ("text", ["--input", "rows.csv"], "text_column", ["reply"]),
    ],
)
def test_a_setting_that_is_passed_wins_over_that_of_the_models_run(
    name, words, setting, value, models, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    as_file(tmp_path, "rows.csv", "review,reply", "the cat,a dog sat", "paris,france")
    answers = []
    for number, (changes, flags) in enumerate(
        (
            ({}, []),
            ({setting: value}, []),
            ({}, [f"--{setting.replace('_', '-')}", *np.ravel(value)]),
        )
    ):
        settings = {**RUN, "text_column": ["review"], "pooling": "mean", **changes}
        run = of_run(models[name], tmp_path / f"run{number}", **settings)
        state = {"format": 1, "crc32c": {}, "settings": settings}
        (run / "state.json").write_text(json.dumps(state))
        if name == "bare":
            write_pooling(run, settings["pooling"], longest=settings["max_seq_length"])
        answers.append(predict(capsys, run, *words, *flags))
    of_the_run, of_another_run, by_flag = answers
    assert by_flag == of_another_run != of_the_run


def test_the_threshold_decides_when_there_is_no_answer(models, capsys, tmp_path):
    question = ["--question", "What?", "--context", "the cat sat on the mat", "--version-2"]
    run = tmp_path / "run"
    step = of_run(models["question"], run)
    for threshold, is_empty in ((-1e9, True), (1e9, False)):
        (run / "null_threshold.json").write_text(json.dumps({"threshold": threshold}))
        (row,) = predict(capsys, step, *question)
        assert (row["answer"] == "", row["start"] is None) == (is_empty, is_empty)
    (run / "null_threshold.json").write_text("{}")
    with pytest.raises(DataError, match=r"null_threshold.json \(threshold\): Field required"):
        predict(capsys, step, *question)


def test_any_model_embeds_as_transformers_encoder_does(models, capsys, monkeypatch):
    data = f"{'the cat ' * 3}\r\na dog\n{'the cat ' * 3}lé\n".encode()
    words = [models["question"], "--task", "embed", "--max-seq-length", 8]
    on_standard_input(monkeypatch, data)
    means = predict(capsys, *words)
    on_standard_input(monkeypatch, data)
    firsts = predict(capsys, *words, "--pooling", "cls", "--normalize")
    assert [row["text"] for row in means] == ["the cat " * 3, "a dog", "the cat " * 3 + "lé"]
    assert [row.get("truncated") for row in means] == [None, None, True]
    for mean, first in zip(means[:2], firsts, strict=False):
        ids = ids_of("[CLS]", mean["text"], "[SEP]")
        hidden = in_torch(models["question"], "BertModel", ids)["last_hidden_state"]
        np.testing.assert_allclose(mean["embedding"], hidden.mean(0), atol=CLOSE)
        vector = hidden[0] / np.linalg.norm(hidden[0])
        np.testing.assert_allclose(first["embedding"], vector, atol=CLOSE)


# --- inputs and settings


def test_texts_with_hard_line_breaks_come_with_a_warning(models, capsys, tmp_path):
    article = (ROOT / "data" / "sample" / "articles" / "Glacier.wiki").read_text(encoding="utf-8")
    paragraphs = [line for line in article.split("\n") if len(line) > 400][:4]
    lines = [line for text in paragraphs for line in (*wrap(text, 80), "")]
    for texts, is_warned in ((lines, True), (paragraphs, False)):
        path = as_file(tmp_path, "texts.txt", *texts)
        assert main(["predict", str(models["text"]), "--input", str(path)]) == 0
        warning = f"warning: {path}: its lines end within sentences, but each line is read as one"
        assert (warning in capsys.readouterr().err) == is_warned


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
        rows = predict(capsys, models[model], "--input", as_file(tmp_path, "t", text, "", " \t"))
        assert rows[1:] == [{"text": "", **nothing}, {"text": " \t", **nothing}]
        assert set(rows[0]) == set(rows[1]) and rows[0] != rows[1] and rows[0]["text"] == text


ANSWERED = {
    "fill-mask": "masked",
    "text-classification": "text",
    "token-classification": "token",
    "question-answering": "question",
}
"""Task -> a model for it; any model has vectors."""


@pytest.mark.parametrize("task", predictors())
def test_an_empty_answer_has_the_keys_of_an_answer(task, models):
    kind = predictors()[task]
    query = {"text": "the cat"} if kind.COMPARES else {}
    model = str(models[ANSWERED.get(task, "bare")])
    predictor = build_predictor(prepare(PredictSettings(model=model, task=task, **query)))
    item = Input("text", dict.fromkeys(kind.FIELDS, "the [MASK]"))
    row = predictor.answer([item, item])[-1]
    assert row.keys() - item.fields.keys() == predictor.empty_answer().keys()


def test_nothing_is_waited_for_at_a_terminal_and_its_input_is_text(models, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    with pytest.raises(ConfigError, match="--input FILE"):
        predict(capsys, models["text"])
    on_standard_input(monkeypatch, b"\xff\xfe")
    with pytest.raises(DataError, match="standard input: is UTF-16, not UTF-8"):
        predict(capsys, models["text"])


FITTING = {
    "masked": {"text": "[MASK] a cat sat on a"},
    "text": {"text": "the a cat sat on a"},
    "bare": {"text": "a cat sat on a mat"},
    "question": {"context": "the cat sat on the mat", "question": "where is a cat sat on"},
}


@pytest.mark.parametrize("name", FITTING)
def test_a_text_that_just_fits_is_not_truncated(name, models, capsys, tmp_path):
    *_, (field, words) = FITTING[name].items()
    path = as_file(tmp_path, "a.jsonl", FITTING[name], FITTING[name] | {field: f"{words} dog"})
    limit = ["--max-seq-length", 8]
    model = models[name]
    if name == "question":
        limit = []
        model = of_run(model, tmp_path / "run", max_query_length=6)
    rows = predict(capsys, model, "--input", path, *limit)
    assert [row.get("truncated") for row in rows] == [None, True]


def test_a_length_that_is_passed_wins_over_that_of_a_sentence_model(models, capsys, tmp_path):
    folder = write_pooling(shutil.copytree(models["bare"], tmp_path / "model"), "mean", 32, 6)
    texts = ["the cat sat on the mat in paris", "a dog", "paris"]
    path = as_file(tmp_path, "a.jsonl", *({"text": text} for text in texts))
    words = ["the cat", "--task", "similarity", "--input", path]
    for limit, marked in (([], {texts[0]}), (["--max-seq-length", 20], set())):
        rows = predict(capsys, folder, *words, *limit)
        assert {row["text"] for row in rows if row.get("truncated")} == marked


def test_opening_a_model_draws_no_weights_and_copies_no_kernel(models, monkeypatch):
    """ModernBERT with 20 MB of weights took 77 MB to open; random values and copies were 26 of them."""
    monkeypatch.setattr(build, "initial_value", None)
    source = find_source(str(models["bare"]))
    shapes = {
        n: w.shape for n, w in build.named_weights(open_model(source, "embed").blocks).items()
    }
    tensors, _ = hf.fitting(source.tensors(), shapes, source.config)
    values, _ = hf.from_hf(tensors, shapes, source.config)
    assert len(values) == len(shapes) > 30
    for name, value in values.items():
        assert any(np.may_share_memory(value, tensor) for tensor in tensors.values()), name
