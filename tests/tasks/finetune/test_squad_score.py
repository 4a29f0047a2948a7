"""`bert squad-score`: the files that it reads and what it prints."""

import json

import pytest

from bert_cli.cli import main
from bert_cli.data.finetune.squad import (
    Answer,
    Question,
    gold_of,
    read_gold,
    squad_scores,
)
from bert_cli.errors import DataError


def write_gold(path, golds, **row):
    """Write a SQuAD file of one paragraph with these gold texts by id; None is impossible."""
    rows = []
    for name, texts in golds.items():
        answers = [{"text": text, "answer_start": 0} for text in texts or []]
        about = {"id": name, "question": "?", "answers": answers, **row}
        rows.append(about if texts is not None else about | {"is_impossible": True})
    data = [{"title": "T", "paragraphs": [{"context": "c", "qas": rows}]}]
    path.write_text(json.dumps({"version": "1.1", "data": data}))
    return path


def test_one_object_is_printed_and_the_rest_goes_to_standard_error(tmp_path, capsys):
    gold = write_gold(tmp_path / "gold.json", {name: ["red"] for name in "abcde"})
    for answers, f1, missing, foreign in (
        ({"a": "the red", "z": "x"}, 20.0, "4 questions (b, c, d, ...) of 5", "1 question (z)"),
        (dict.fromkeys("abcde", "red"), 100.0, "", ""),
    ):
        (tmp_path / "predictions.json").write_text(json.dumps(answers))
        assert main(["squad-score", str(gold), str(tmp_path / "predictions.json")]) == 0
        out, err = capsys.readouterr()
        assert out == f'{{"f1": {f1}, "exact_match": {f1}}}\n'
        assert missing in err and foreign in err and bool(err) == bool(missing)


def test_probabilities_of_no_answer_have_a_threshold(tmp_path, capsys):
    gold = write_gold(tmp_path / "gold.json", {"a": ["red"], "d": None})
    predictions, odds = tmp_path / "predictions.json", tmp_path / "odds.json"
    predictions.write_text(json.dumps({"a": "red", "d": "car"}))
    odds.write_text('{"a": 0.2, "d": 0.7}')
    words = ["squad-score", str(gold), str(predictions), "--na-prob-file", str(odds)]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["exact"] == 50.0
    assert main([*words, "--na-prob-thresh", "0.5"]) == 0
    assert json.loads(capsys.readouterr().out)["exact"] == 100.0
    for text, message in {
        '{"a": 0.2}': "odds.json: lacks 1 question (d); give question id -> probability",
        '{"a": 0.2,\n "d": NaN}': "odds.json (d): ",
        '{"a": true, "d": 1}': "odds.json (a): ",
        "[1]": "odds.json: ",
    }.items():
        odds.write_text(text)
        assert main(words) == 3
        assert message in capsys.readouterr().err
    assert main([*words[:3], "--na-prob-thresh", "0.5"]) == 2
    write_gold(gold, {"a": ["red"]})
    odds.write_text('{"a": 0.2}')
    assert main(words) == 3
    assert "has no effect with" in capsys.readouterr().err


def test_questions_score_like_their_file(tmp_path):
    rows = [
        Question("a", "?", "red", (Answer("red", 0),), False),
        Question("b", "?", "red", (), True),
    ]
    scores = squad_scores(gold_of(rows), {"a": "Red", "b": ""})
    file = read_gold(write_gold(tmp_path / "gold.json", {"a": ["red"], "b": None}))
    assert scores == squad_scores(file, {"a": "Red", "b": ""}) and scores["f1"] == 100.0
    unmarked = Question("c", "?", "red", (), False)
    # Unmarked among marked ones: the script of 2.0 goes by the answers alone.
    gold = gold_of([*rows, unmarked])
    assert squad_scores(gold, {"c": ""})["NoAns_total"] == 2
    with pytest.raises(DataError, match="question 'c': has no answers"):
        gold_of([rows[0], unmarked])
    gold = read_gold(write_gold(tmp_path / "gold.json", {"a": ["The"]}, is_impossible=False))
    assert squad_scores(gold, {"a": "an"}) == {"f1": 0.0, "exact_match": 100.0}


def test_broken_predictions_are_refused_by_their_question(tmp_path, capsys):
    gold = write_gold(tmp_path / "gold.json", {"a": ["red"]})
    path = tmp_path / "p.json"
    for text, where in (
        *(('{"a": "x", "bé": ' + value + "}", " (bé)") for value in ("null", "3", '["x"]', "true")),
        ('{"a": "x",\n "b" "y"}', ""),
        ('["x"]', ""),
        ("", ""),
        (None, ""),
    ):
        path.unlink(missing_ok=True) if text is None else path.write_text(text)
        assert main(["squad-score", str(gold), str(path)]) == 3
        assert f"bert: {path}{where}: " in capsys.readouterr().err


def test_gold_files_that_cannot_be_scored_against_are_refused(tmp_path):
    path = tmp_path / "gold.json"
    with pytest.raises(DataError, match=r"\(question 'b'\): has no answers to score against"):
        read_gold(write_gold(path, {"a": ["x"], "b": []}))
    for text, message in (
        ('{"data": []}', "contains no questions"),
        ("{}", r"\(data\): Field required"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            read_gold(path)
    # In 2.0 a question without answers has none, marked or not.
    gold = read_gold(write_gold(path, {"a": None, "b": []}))
    assert squad_scores(gold, {"a": "", "b": ""})["NoAns_total"] == 2
