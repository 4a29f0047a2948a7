"""The official scores, with expected values worked out by hand."""

import json

import pytest

from bert_cli.cli import main
from bert_cli.config.finetune import SquadScoreSettings
from bert_cli.data.finetune.squad import Answer, Question, Questions
from bert_cli.data.finetune.squad_score import (
    best_score,
    gold_of,
    mismatches,
    normalize,
    read_gold,
    read_predictions,
    run,
    score,
)
from bert_cli.errors import DataError


def one(golds, prediction, *, version_2=False):
    """F1 and exact match of one answer."""
    return best_score(golds, prediction, version_2=version_2)


def squad_of(golds, **more):
    """A SQuAD file of one paragraph with these gold texts by id; None marks an impossible one."""
    rows = []
    for name, texts in golds.items():
        answers = [{"text": text, "answer_start": 0} for text in texts or []]
        row = {"id": name, "question": "?", "answers": answers}
        rows.append(row if texts is not None else row | {"is_impossible": True})
    return {"data": [{"title": "T", "paragraphs": [{"context": "c", "qas": rows}]}], **more}


@pytest.mark.parametrize(
    ("text", "compared"),
    [
        ("The Cat, a dog and an Ape!", "cat dog and ape"),
        ("theatre another ban", "theatre another ban"),  # articles are whole words
        ("U.S.A.", "usa"),  # dots go before articles are looked for
        ("a-b", "ab"),  # so this is no article
        ("a b", "b"),
        ("$3,000.50", "300050"),
        ("“Quoted” – ‘text’ …", "“quoted” – ‘text’ …"),  # punctuation is ASCII's
        ("the“x”", "“x”"),  # a word ends at a quotation mark
        ("  two\tand\n three\u00a0four  ", "two and three four"),
        ("The", ""),
        ("...!", ""),
        ("ÉTÉ Straße", "été straße"),  # lower case, not case folding; accents stay
        ("under_score", "underscore"),
        ("THE the The", ""),
        ("北京 The 大学", "北京 大学"),
    ],
)
def test_texts_are_normalized_as_officially(text, compared):
    assert normalize(text) == compared


def test_articles_case_and_punctuation_do_not_count():
    assert one(["the Denver Broncos"], "Denver  broncos.") == (1.0, 1.0)


def test_f1_of_two_common_words_of_three_and_four_is_4_7():
    # precision 2/3, recall 2/4: 2 * (1/3) / (7/6) = 4/7
    f1, exact = one(["red green blue black"], "red green white")
    assert f1 == pytest.approx(4 / 7, abs=1e-12)
    assert exact == 0.0


def test_repeated_words_count_as_often_as_both_have_them():
    # common: new x1, york x1 (the gold has each once); precision 2/4, recall 2/2: 2*0.5*1/1.5 = 2/3
    assert one(["New York"], "new new york york")[0] == pytest.approx(2 / 3, abs=1e-12)
    # common: ha x2; precision 2/2, recall 2/3: 2*1*(2/3)/(5/3) = 4/5
    assert one(["ha ha ha"], "ha ha")[0] == pytest.approx(4 / 5, abs=1e-12)


def test_the_order_of_words_matters_to_exact_match_only():
    assert one(["blue red"], "red blue") == (1.0, 0.0)


def test_nothing_in_common_is_0():
    assert one(["12"], "1 2") == (0.0, 0.0)


def test_unicode_quotes_stay_with_their_words():
    # words of the prediction: “red, car”; none is the gold's
    assert one(["red car"], "“red car”") == (0.0, 0.0)
    assert one(["red car"], '"red car"') == (1.0, 1.0)


def test_numbers_are_compared_as_they_are_spelt():
    assert one(["1,000"], "1000") == (1.0, 1.0)
    assert one(["ten"], "10") == (0.0, 0.0)


def test_the_best_of_several_golds_counts_for_each_score_apart():
    # F1 against the second: precision 2/2, recall 2/3: 0.8; no gold is equal
    assert one(["blue", "red green white"], "green red") == (pytest.approx(0.8, abs=1e-12), 0.0)
    assert one(["blue", "green"], "The Green") == (1.0, 1.0)


def test_texts_of_articles_alone_match_exactly_with_f1_0_in_1_1_and_1_in_2_0():
    assert one(["The"], "a") == (0.0, 1.0)
    assert one(["The"], "a", version_2=True) == (1.0, 1.0)
    assert one(["The"], "", version_2=True) == (1.0, 1.0)


def test_an_empty_answer_to_a_gold_text_is_0():
    assert one(["red"], "") == (0.0, 0.0)
    assert one(["red"], "", version_2=True) == (0.0, 0.0)


def test_2_0_leaves_out_golds_that_are_empty_when_others_are_not():
    assert one(["The", "red"], "a", version_2=True) == (0.0, 0.0)
    assert one(["The", "red"], "a") == (0.0, 1.0)


def test_no_answer_to_a_question_without_is_1_and_any_answer_0():
    assert one([], "", version_2=True) == (1.0, 1.0)
    assert one([], "the", version_2=True) == (1.0, 1.0)  # nothing is left of it
    assert one([], "red", version_2=True) == (0.0, 0.0)


def test_scores_are_per_cent_of_all_gold_questions_and_a_missing_answer_is_0():
    # F1: 1, 4/7 and 0 of 3; exact: 1 of 3
    gold = squad_of({"x": ["red"], "y": ["red green blue black"], "z": ["blue"]})
    told = score(gold, {"x": "Red", "y": "red green white", "foreign": "blue"})
    assert told == {
        "f1": pytest.approx(100 * (1 + 4 / 7) / 3, abs=1e-10),
        "exact_match": pytest.approx(100 / 3, abs=1e-10),
    }


def test_a_question_that_comes_twice_counts_twice_in_1_1():
    gold = squad_of({"x": ["red"], "y": ["blue"]})
    rows = gold["data"][0]["paragraphs"][0]["qas"]
    rows.append(rows[0])
    assert score(gold, {"x": "red", "y": "no"})["f1"] == pytest.approx(200 / 3, abs=1e-10)


def test_2_0_tells_the_scores_with_and_without_answers_apart():
    # with: F1 1, 2/3 (precision 1, recall 1/2), 0 (missing); without: 1 and 0
    gold = squad_of({"a": ["red"], "b": ["red car"], "c": ["x"], "d": None, "e": None})
    told = score(gold, {"a": "red", "b": "car", "d": "", "e": "car"})
    assert told == {
        "exact": pytest.approx(40.0),
        "f1": pytest.approx(100 * (1 + 2 / 3 + 1) / 5, abs=1e-10),
        "total": 5,
        "HasAns_f1": pytest.approx(100 * (1 + 2 / 3) / 3, abs=1e-10),
        "HasAns_exact": pytest.approx(100 / 3, abs=1e-10),
        "HasAns_total": 3,
        "NoAns_f1": pytest.approx(50.0),
        "NoAns_exact": pytest.approx(50.0),
        "NoAns_total": 2,
    }


def test_an_answer_counts_as_none_above_the_threshold_and_the_best_ones_are_found():
    gold = squad_of({"a": ["red"], "b": ["red car"], "c": ["x"], "d": None, "e": None})
    given = {"a": "red", "b": "car", "c": "no", "d": "", "e": "car"}
    odds = {"a": 0.1, "b": 0.4, "c": 0.6, "d": 0.5, "e": 0.9}
    # At 0.3 all but a are none: F1 and exact 1 of three with answers, and both of those without.
    told = score(gold, given, odds, 0.3)
    assert (told["exact"], told["f1"], told["total"]) == (60.0, 60.0, 5)
    assert (told["HasAns_f1"], told["NoAns_exact"]) == (pytest.approx(100 / 3), 100.0)
    # Above none but a: 3 of 5 are right. With b as well F1 has 2/3 more, and nothing comes after it.
    assert list(told)[-4:] == ["best_exact", "best_exact_thresh", "best_f1", "best_f1_thresh"]
    assert (told["best_exact"], told["best_exact_thresh"]) == (60.0, 0.1)
    assert told["best_f1"] == pytest.approx(100 * (3 + 2 / 3) / 5, abs=1e-10)
    assert told["best_f1_thresh"] == 0.4
    # The default leaves all answers, also one whose probability is 1.
    assert score(gold, given, odds | {"a": 1.0})["exact"] == score(gold, given)["exact"] == 40.0
    # An answer that is not there stays wrong, however probable none is.
    assert score(gold, given | {"x": ""}, odds | {"e": 0.2}, 0.3)["NoAns_exact"] == 50.0
    del given["d"]
    assert score(gold, given, odds, 0.3)["NoAns_exact"] == 50.0


def test_probabilities_are_read_with_their_threshold(tmp_path, capsys):
    gold = tmp_path / "gold.json"
    predictions, odds = tmp_path / "predictions.json", tmp_path / "odds.json"
    gold.write_text(json.dumps(squad_of({"a": ["red"], "d": None})))
    predictions.write_text(json.dumps({"a": "red", "d": "car"}))
    odds.write_text('{"a": 0.2, "d": 0.7}')
    words = ["squad-score", str(gold), str(predictions), "--na-prob-file", str(odds)]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["exact"] == 50.0
    assert main([*words, "--na-prob-thresh", "0.5"]) == 0
    assert json.loads(capsys.readouterr().out)["exact"] == 100.0
    for text, told in {
        '{"a": 0.2}': "odds.json: lacks 1 question (d); give a probability",
        '{"a": 0.2,\n "d": NaN}': "odds.json (line 2): 'd' has no number",
        '{"a": true, "d": 1}': "odds.json (line 1): 'a' has no number",
        "[1]": "odds.json: is no JSON object",
    }.items():
        odds.write_text(text)
        assert main(words) == 3
        assert told in capsys.readouterr().err
    assert main([*words[:3], "--na-prob-thresh", "0.5"]) == 2
    gold.write_text(json.dumps(squad_of({"a": ["red"]})))
    odds.write_text('{"a": 0.2}')
    assert main(words) == 3
    assert "has no effect with" in capsys.readouterr().err


def test_2_0_without_any_answerable_question_tells_of_the_others_only():
    told = score(squad_of({"a": None}), {"a": ""})
    assert told["NoAns_total"] == 1 and "HasAns_total" not in told


def test_is_impossible_false_everywhere_is_scored_as_1_1():
    gold = squad_of({"a": ["The"]})
    gold["data"][0]["paragraphs"][0]["qas"][0]["is_impossible"] = False
    assert score(gold, {"a": "an"}) == {"f1": 0.0, "exact_match": 100.0}


def test_what_only_one_side_has_is_told():
    gold = read_gold(squad_of({name: ["x"] for name in "abcde"}))
    missing, foreign = mismatches(gold, {"a": "x", "other": "x"})
    assert missing == "4 questions (b, c, d, ...) of 5 have no answer; each scores 0"
    assert foreign.startswith("1 question (other) ")
    assert mismatches(gold, dict.fromkeys("abcde", "x")) == []


def test_the_command_prints_one_object_and_tells_the_rest_to_stderr(tmp_path, capsys):
    gold, predictions = tmp_path / "gold.json", tmp_path / "predictions.json"
    gold.write_text(json.dumps(squad_of({"a": ["red"], "b": ["blue"]}, version="1.1")))
    predictions.write_text(json.dumps({"a": "the red", "z": "x"}))
    run(SquadScoreSettings(gold=gold, predictions=predictions))
    out, err = capsys.readouterr()
    assert json.loads(out) == {"f1": 50.0, "exact_match": 50.0}
    assert len(out.splitlines()) == 1
    assert "1 question (b) of 2" in err and "1 question (z)" in err


def test_questions_that_were_read_score_like_their_file():
    rows = [
        Question("a", "?", "red", (Answer("red", 0),), False),
        Question("b", "?", "red", (), True),
    ]
    told = score(gold_of(Questions(tuple(rows))), {"a": "Red", "b": ""})
    assert told["f1"] == 100.0 and told["NoAns_total"] == 1
    bare = Question("c", "?", "red", (), False)
    # Unmarked among marked ones: the script of 2.0 goes by the answers alone.
    assert score(gold_of(Questions((*rows, bare))), {"c": ""})["NoAns_total"] == 2
    with pytest.raises(DataError, match="question 'c': has no answers"):
        gold_of(Questions((rows[0], bare)))


@pytest.mark.parametrize("value", ["null", "3", '["x"]', '{"text": "x"}', "true"])
def test_an_answer_that_is_no_string_is_refused_with_its_line(tmp_path, value):
    path = tmp_path / "p.json"
    path.write_text('{\n "a": "x",\n "b\\u00e9": ' + value + "\n}")
    with pytest.raises(DataError, match=r"p\.json \(line 3\): the answer to 'bé'"):
        read_predictions(path)


def test_broken_predictions_are_refused_with_their_line(tmp_path):
    path = tmp_path / "p.json"
    path.write_text('{\n "a": "x",\n "b" "y"\n}')
    with pytest.raises(DataError, match=r"p\.json \(line 3, column 6\): is no JSON"):
        read_predictions(path)
    path.write_text('["x"]')
    with pytest.raises(DataError, match="is no JSON object"):
        read_predictions(path)
    path.write_text("")
    with pytest.raises(DataError, match="is empty"):
        read_predictions(path)
    with pytest.raises(DataError, match="no such file"):
        read_predictions(tmp_path / "absent.json")


def test_gold_files_that_cannot_be_scored_against_are_refused():
    with pytest.raises(DataError, match=r"question 2 'b'\): has no answers to score against"):
        read_gold(squad_of({"a": ["x"], "b": []}))
    with pytest.raises(DataError, match="holds no questions"):
        read_gold({"data": []})
    with pytest.raises(DataError, match="has no 'data'"):
        read_gold({"questions": []})
    # In 2.0 a question without answers is one that has none, marked or not.
    assert score(squad_of({"a": None, "b": []}), {"a": "", "b": ""})["NoAns_total"] == 2
