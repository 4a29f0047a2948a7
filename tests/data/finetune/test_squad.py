"""SQuAD files and the official scores of answers."""

import pytest
from support.contents import put
from support.metrics import values

from bert_cli.data.finetune import squad
from bert_cli.errors import DataError
from bert_cli.statistics import identify


def row(name="a", start=4, text="cat", **more):
    answers = [{"text": text, "answer_start": start}]
    return {"id": name, "question": "Who?", "answers": answers, **more}


def file_of(*rows, context="The cat sat."):
    return {"data": [{"title": "Cats", "paragraphs": [{"context": context, "qas": list(rows)}]}]}


def test_questions_are_read_with_their_answers(tmp_path):
    path = put(
        tmp_path / "squad.json", file_of(row(), row("b", is_impossible=True) | {"answers": []})
    )
    first = squad.Question("a", "Who?", "The cat sat.", (squad.Answer("cat", 4),), False)
    second = squad.Question("b", "Who?", "The cat sat.", (), True)
    assert squad.read_squad(path, version_2=True, training=True) == ([first, second], ())
    with pytest.raises(DataError, match=r"question 'b'\).*pass --version-2"):
        squad.read_squad(path, version_2=False, training=False)
    # A test file has no answers.
    path = put(
        tmp_path / "squad.json",
        file_of({"id": "a", "question": "Who?"}, row("b") | {"answers": []}),
    )
    assert len(squad.read_squad(path, version_2=False, training=False)[0]) == 2
    with pytest.raises(DataError, match=r"question 'a'\): has no answers"):
        squad.read_squad(path, version_2=False, training=True)


def test_a_question_with_no_answers_beside_others_with_some_is_impossible(tmp_path):
    empty = {"answers": []}
    path = put(
        tmp_path / "squad.json",
        file_of(row(), row("b") | empty, row("c", is_impossible=False) | empty),
    )
    questions, _ = squad.read_squad(path, version_2=True, training=False)
    assert [question.is_impossible for question in questions] == [False, True, False]
    for training in (False, True):
        with pytest.raises(DataError, match=r"question 'b'\).*has no answer.*pass --version-2"):
            squad.read_squad(path, version_2=False, training=training)
    # In a test file no question has answers.
    path = put(tmp_path / "squad.json", file_of(row() | empty, row("b") | empty))
    questions, _ = squad.read_squad(path, version_2=True, training=False)
    assert not any(question.is_impossible for question in questions)


def test_a_misplaced_answer_is_left_out_of_training_and_reported(tmp_path):
    both = row("b")
    both["answers"].append({"text": "sat", "answer_start": 7})
    rows = row("a", start=5), both, row("c", start=-8), row("d", text=" ", start=3)
    (read,), remarks = squad.read_squad(
        put(tmp_path / "squad.json", file_of(*rows)), version_2=False, training=True
    )
    assert (read.id, read.answers) == ("b", (squad.Answer("cat", 4),))
    assert remarks == (
        "4 answers whose text is not at answer_start, left out (a, b, c, ...)",
        "3 questions left out of training: no answer is at its answer_start (a, c, d)",
    )
    # Where only its text is scored it is included.
    path = put(tmp_path / "squad.json", file_of(row("a", start=5)))
    (read,), remarks = squad.read_squad(path, version_2=False, training=False)
    assert read.answers == (squad.Answer("cat", 5),)
    assert remarks == (
        "1 answer whose text is not at answer_start, included, as only texts count (a)",
    )
    with pytest.raises(DataError, match=r"nothing to read: 1 answer whose text"):
        squad.read_squad(path, version_2=False, training=True)


def gold_of(texts):
    """Return gold answers by id; None is an impossible question."""
    rows = {name: tuple(answers or ()) for name, answers in texts.items()}
    return squad.Gold(rows, any(answers is None for answers in texts.values()), identify(rows))


def test_texts_are_normalized_as_officially():
    for text, normalized in (
        ("The Cat, a dog and an Ape!", "cat dog and ape"),
        ("theatre another ban", "theatre another ban"),  # articles are complete words
        ("U.S.A.", "usa"),  # dots are removed before articles: A is none
        ("the“Quoted” – ‘text’ …", "“quoted” – ‘text’ …"),  # ASCII's punctuation; others end a word
        ("  two\tand\n three\u00a0four  ", "two and three four"),
        ("The ...!", ""),
        ("ÉTÉ Straße", "été straße"),  # lower case, not case folding; accents remain
        ("under_score", "underscore"),
    ):
        assert squad.normalize(text) == normalized


def test_f1_counts_common_words_and_exact_match_compares_normalized_texts():
    for golds, prediction, expected in (
        (["the Denver Broncos"], "Denver  broncos.", (1, 1)),
        # precision 2/3, recall 2/4: 2 * (1/3) / (7/6) = 4/7
        (["red green blue black"], "red green white", (4 / 7, 0)),
        # new x1, york x1 (the gold has each once); precision 2/4, recall 2/2: 2*0.5*1/1.5 = 2/3
        (["New York"], "new new york york", (2 / 3, 0)),
        # new x2, york x1: precision 3/4, recall 3/3: 2 * 0.75 / 1.75
        (["new york new"], "new new york york", (6 / 7, 0)),
        (["blue red"], "red blue", (1, 0)),
        # F1 against the second: precision 2/2, recall 2/3: 0.8; no gold is equal
        (["blue", "red green white"], "green red", (0.8, 0)),
        (["blue", "green"], "The Green", (1, 1)),
        (["red"], "", (0, 0)),
    ):
        f1, exact = squad.best_score(golds, prediction, version_2=False)
        assert (f1, exact) == (pytest.approx(expected[0], abs=1e-12), expected[1])


def test_1_1_and_2_0_differ_where_nothing_remains_of_a_text():
    for golds in (["The"], ["The", "red"]):
        assert squad.best_score(golds, "a", version_2=False) == (0.0, 1.0)
    for golds, prediction, score in (
        (["The"], "a", 1.0), (["The"], "", 1.0), (["red"], "", 0.0), (["The", "red"], "a", 0.0),
        ([], "", 1.0), ([], "the", 1.0), ([], "red", 0.0),
    ):  # fmt: skip
        assert squad.best_score(golds, prediction, version_2=True) == (score, score)


def test_squad_scores_are_per_cent_of_all_gold_questions_and_a_missing_answer_is_0():
    # F1: 1, 4/7 and 0 of 3; exact: 1 of 3
    gold = gold_of({"x": ["red"], "y": ["red green blue black"], "z": ["blue"]})
    scores = values(
        squad.squad_samples(gold, {"x": "Red", "y": "red green white", "foreign": "blue"})
    )
    expected = {"f1": 100 * (1 + 4 / 7) / 3, "exact_match": 100 / 3}
    assert scores == pytest.approx(expected, abs=1e-10)


def test_2_0_has_scores_of_questions_with_and_without_answers():
    # with: F1 1, 2/3 (precision 1, recall 1/2), 0 (missing); without: 1 and 0
    gold = gold_of({"a": ["red"], "b": ["red car"], "c": ["x"], "d": None, "e": None})
    samples = squad.squad_samples(gold, {"a": "red", "b": "car", "d": "", "e": "car"})
    expected = {"exact": 40.0, "f1": 100 * (1 + 2 / 3 + 1) / 5}
    expected |= {"HasAns_exact": 100 / 3, "HasAns_f1": 100 * (1 + 2 / 3) / 3}
    expected |= {"NoAns_exact": 50.0, "NoAns_f1": 50.0}
    assert values(samples) == pytest.approx(expected, abs=1e-10)
    assert [sample.examples.size for sample in samples.values()] == [5, 5, 3, 3, 2, 2]
    only_impossible = squad.squad_samples(gold_of({"a": None}), {"a": ""})
    assert list(only_impossible) == ["exact", "f1", "NoAns_exact", "NoAns_f1"]


def test_a_gold_file_needs_answers_unless_questions_are_impossible():
    cat = (squad.Answer("cat", 4),)
    rows = [squad.Question(name, "?", "The cat sat.", cat, False) for name in "ab"]
    without = squad.Question("c", "?", "The cat sat.", (), False)
    impossible = squad.Question("d", "?", "The cat sat.", (), True)
    gold = squad.gold_of([*rows, without, impossible])
    samples = squad.squad_samples(gold, {"a": "Cat", "c": "", "d": ""})
    assert samples["NoAns_f1"].examples.size == 2
    assert samples["f1"].examples.groups.tolist() == [0] * 4  # of one paragraph
    with pytest.raises(DataError, match=r"question 'c': has no answers to score against"):
        squad.gold_of([*rows, without])
