"""`bert squad-score`: the files that it reads and what it prints."""

import json

import pytest

from bert_cli.cli import main
from bert_cli.data.finetune.squad import read_gold, squad_scores
from bert_cli.errors import DataError


def write_gold(path, golds):
    """Write a SQuAD file of one paragraph with these gold texts by id; None is impossible."""
    rows = []
    for name, texts in golds.items():
        answers = [{"text": text, "answer_start": 0} for text in texts or []]
        rows.append(
            {"id": name, "question": "?", "answers": answers, "is_impossible": texts is None}
        )
    path.write_text(json.dumps({"data": [{"paragraphs": [{"context": "c", "qas": rows}]}]}))
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


def test_probabilities_of_no_answer_have_a_threshold_and_broken_files_are_refused(tmp_path, capsys):
    gold = write_gold(tmp_path / "gold.json", {"a": ["red"], "d": None})
    predictions, odds = tmp_path / "predictions.json", tmp_path / "odds.json"
    predictions.write_text(json.dumps({"a": "red", "d": "car"}))
    odds.write_text('{"a": 0.2, "d": 0.7}')
    words = ["squad-score", str(gold), str(predictions), "--na-prob-file", str(odds)]
    for more, exact in (([], 50.0), (["--na-prob-thresh", "0.5"], 100.0)):
        assert main([*words, *more]) == 0
        assert json.loads(capsys.readouterr().out)["exact"] == exact
    for path, text, message in (
        (odds, '{"a": 0.2}', "odds.json: lacks 1 question (d); give question id -> probability"),
        (odds, '{"a": 0.2,\n "d": NaN}', "odds.json (d): "),
        (odds, '{"a": true, "d": 1}', "odds.json (a): "),
        (predictions, '{"a": "x", "bé": null}', "predictions.json (bé): "),
        (predictions, '{"a": "x",\n "b" "y"}', "predictions.json: "),
    ):
        before = path.read_text()
        path.write_text(text)
        assert main(words) == 3
        assert message in capsys.readouterr().err
        path.write_text(before)
    write_gold(gold, {"a": ["red"]})
    assert main(words) == 3
    assert "has no effect with" in capsys.readouterr().err


def test_a_gold_file_needs_answers_unless_questions_are_impossible(tmp_path):
    path = tmp_path / "gold.json"
    gold = read_gold(write_gold(path, {"a": ["red"], "b": None, "c": []}))
    assert squad_scores(gold, {"a": "Red", "b": "", "c": ""})["NoAns_total"] == 2
    with pytest.raises(DataError, match=r"\(question 'b'\): has no answers to score against"):
        read_gold(write_gold(path, {"a": ["x"], "b": []}))
    path.write_text('{"data": []}')
    with pytest.raises(DataError, match="contains no questions"):
        read_gold(path)
