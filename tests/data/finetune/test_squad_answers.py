"""Answers from logits: known answers, a plain loop, and perfect logits on real data."""

import itertools
import math

import numpy as np
import pytest

from bert_cli.data.finetune.features import Features
from bert_cli.data.finetune.metrics import squad_scores
from bert_cli.data.finetune.squad import Answer, Question, Questions, gold_of, read_gold, read_squad
from bert_cli.data.finetune.squad_answers import answers, best_null_threshold, with_null_threshold
from bert_cli.data.finetune.squad_windows import Windows, make_windows
from bert_cli.data.records.tokenizer import read_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"
DEFAULTS = {"n_best": 20, "max_answer_length": 30, "version_2": False, "null_threshold": None}


def question(name="a", context=LETTERS, gold=(), *, impossible=False):
    return Question(name, "?", context, tuple(Answer(text, 0) for text in gold), impossible)


def windows_over(*parts):
    """Windows [CLS] ? [SEP] part [SEP]; a part is (question, its characters, which are best).

    Each character of a context is a piece.
    """
    offsets, best, ends = [], [], []
    for _, characters, bests in parts:
        offsets += [(-1, -1)] * 3 + [(c, c + 1) for c in characters] + [(-1, -1)]
        best += [False] * 3 + [c in bests for c in characters] + [False]
        ends.append(len(offsets))
    zeros = np.zeros(len(offsets), np.int32)
    features = Features(zeros, zeros.astype(np.int8), np.array(ends, np.int64))
    numbers = np.array([part[0] for part in parts], np.int32)
    return Windows(features, numbers, np.array(offsets, np.int32), np.array(best))


def answer_all(rows, windows, start, end, **settings):
    start, end = np.array(start, np.float32), np.array(end, np.float32)
    return answers(Questions(tuple(rows)), windows, start, end, **(DEFAULTS | settings))


def test_the_best_span_is_the_answer_with_the_text_of_the_context():
    made = windows_over((0, range(4), range(4)))
    # positions: CLS ? SEP a b c d SEP
    start = [9, 9, 9, 0, 3, 0, 0, 9]
    end = [9, 9, 9, 8, 0, 0, 2, 9]
    result = answer_all([question(context="a😀c.")], made, start, end)
    # "a" scores 0 + 8, "😀c." 3 + 2; [CLS], the question and [SEP] are no answers
    assert result.predictions == {"a": "a"}
    assert [entry["text"] for entry in result.nbest["a"]][:2] == ["a", "😀c."]
    assert result.null_odds == {}


def test_an_answer_is_no_longer_than_allowed_and_does_not_end_before_it_starts():
    made = windows_over((0, range(4), range(4)))
    start, end = [0, 0, 0, 5, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0, 5, 0]
    assert answer_all([question()], made, start, end).predictions == {"a": "abcd"}
    shorter = answer_all([question()], made, start, end, max_answer_length=3)
    assert shorter.predictions == {"a": "cd"}  # 1 + 5; "abc" has 5 + 0
    start, end = [0, 0, 0, 0, 0, 0, 5, 0], [0, 0, 0, 4, 0, 0, 0, 0]
    assert answer_all([question()], made, start, end).predictions == {"a": "d"}  # 5 + 0, not 5 + 4


def test_an_answer_starts_at_a_position_only_in_its_best_window():
    made = windows_over((0, range(3), [0, 1]), (0, range(1, 5), [2, 3, 4]))
    both = [*(0, 0, 0, 0, 0, 9, 0), *(0, 0, 0, 7, 1, 0, 0, 0)]
    # "c" scores 18 in the first window and "b" 14 in the second, where they are not best
    result = answer_all([question()], made, both, both)
    # "abc" and "bc" score 0 + 9 in the first window, of which the first is taken
    assert result.predictions == {"a": "abc"}
    logits = {
        entry["text"]: (entry["start_logit"], entry["end_logit"]) for entry in result.nbest["a"]
    }
    assert logits["c"] == (1.0, 1.0) and logits["b"] == (0.0, 0.0)


def test_n_best_has_different_texts_and_of_equal_ones_the_best():
    made = windows_over((0, range(6), range(6)))
    start, end = [0, 0, 0, 3, 0, 4, 0, 2, 0, 0], [0, 0, 0, 3, 0, 4, 0, 2, 0, 0]
    result = answer_all(
        [question(context="x-x-y-")], made, start, end, n_best=2, max_answer_length=1
    )
    assert [(entry["text"], entry["start_logit"]) for entry in result.nbest["a"]] == [
        ("x", 4.0), ("y", 2.0)
    ]  # fmt: skip
    # exp(8) and exp(4): 1 / (1 + exp(-4))
    assert result.nbest["a"][0]["probability"] == pytest.approx(1 / (1 + math.exp(-4)), abs=1e-12)
    assert sum(entry["probability"] for entry in result.nbest["a"]) == pytest.approx(1.0)


def test_there_is_an_answer_even_where_the_best_end_precedes_the_best_start():
    made = windows_over((0, range(3), range(3)))
    start, end = [0, 0, 0, 0, 0, 9, 0], [0, 0, 0, 9, 0, -1, 0]
    result = answer_all([question()], made, start, end, n_best=1)
    assert result.predictions == {"a": "a"}  # 0 + 9; "c" 9 - 1
    assert len(result.nbest["a"]) == 1


def test_a_context_without_pieces_has_an_empty_answer():
    made = windows_over((0, [], []), (1, [0], [0]))
    rows = [question(), question("b")]
    logits = [0.0] * 4 + [0.0] * 5
    result = answer_all(rows, made, logits, logits)
    assert result.predictions == {"a": "", "b": "a"}
    assert result.nbest["a"] == [
        {"text": "", "probability": 1.0, "start_logit": 0.0, "end_logit": 0.0}
    ]
    assert answer_all(rows, made, logits, logits, version_2=True).predictions == {"a": "", "b": "a"}


def test_no_answer_is_given_when_it_is_better_by_more_than_the_threshold():
    # two windows of one question: no answer scores 6 and 4, so 4; the best text 3
    made = windows_over((0, [0], [0]), (0, [1], [1]))
    start = [*(3, 0, 0, 1, 0), *(2, 0, 0, 2, 0)]
    end = [*(3, 0, 0, 1, 0), *(2, 0, 0, 1, 0)]
    for threshold, text in ((None, "b"), (0.5, ""), (0.999, ""), (1.0, "b"), (2.0, "b")):
        result = answer_all(
            [question()], made, start, end, version_2=True, null_threshold=threshold
        )
        assert result.null_odds == {"a": 1.0}
        assert result.predictions == {"a": text}
    texts = [(entry["text"], entry["start_logit"]) for entry in result.nbest["a"]]
    assert texts == [("", 2.0), ("b", 2.0), ("a", 1.0)]


def test_logits_that_do_not_fit_the_windows_are_refused():
    with pytest.raises(ValueError, match="4 and 5 logits for 5 tokens"):
        answer_all([question()], windows_over((0, [0], [0])), [0.0] * 4, [0.0] * 5)
    with pytest.raises(ValueError, match="some questions have no windows"):
        answer_all([question(), question("b")], windows_over((0, [0], [0])), [0.0] * 5, [0.0] * 5)


@pytest.mark.parametrize("seed", range(6))
def test_answers_are_those_of_a_plain_loop(seed):
    source = np.random.default_rng(seed)
    rows, parts = [], []
    for number in range(25):
        size = int(source.integers(1, 26))
        context = "".join(source.choice(list("abcdef"), size))
        rows.append(question(str(number), context))
        cut = int(source.integers(0, size + 1))
        parts += [(number, range(cut), range(cut)), (number, range(cut, size), range(cut, size))]
    made = windows_over(*parts)
    start, end = source.normal(size=(2, len(made.offsets))).astype(np.float32)
    longest = int(source.integers(1, 8))
    result = answer_all(rows, made, start, end, n_best=5, max_answer_length=longest, version_2=True)
    for number, row in enumerate(rows):
        scores, nulls = {}, []
        for window in np.flatnonzero(made.question == number):
            positions = range(made.features.starts[window], made.features.ends[window])
            nulls.append(float(start[positions[0]]) + float(end[positions[0]]))
            for first, last in itertools.product(positions, positions):
                if 0 <= last - first < longest and min(made.offsets[[first, last], 0]) >= 0:
                    text = row.context[made.offsets[first, 0] : made.offsets[last, 1]]
                    total = float(start[first]) + float(end[last])
                    scores[text] = max(total, scores.get(text, -math.inf))
        ranked = sorted(scores, key=scores.get, reverse=True)
        entries = [entry for entry in result.nbest[row.id] if entry["text"]]
        assert [entry["text"] for entry in entries] == ranked[:5]
        assert result.predictions[row.id] == ranked[0]
        assert result.null_odds[row.id] == pytest.approx(min(nulls) - scores[ranked[0]], abs=1e-12)


# --- the threshold


def development():
    """Four questions; without a threshold F1 is 1, 0, 1 and 0."""
    rows = [
        question("a", gold=["red"]),
        question("b", impossible=True),
        question("c", gold=["blue"]),
        question("d", impossible=True),
    ]
    return Questions(tuple(rows)), {"a": "red", "b": "x", "c": "blue", "d": "y"}


def test_the_threshold_that_scores_best_is_chosen():
    questions, given = development()
    # answered from below: none 2 of 4 right, a 3, a c 4, a c b 3, all 2
    odds = {"a": -3.0, "c": -1.0, "b": 0.5, "d": 2.0}
    best = best_null_threshold(odds, given, questions)
    assert (best.f1, best.f1_threshold) == (100.0, -1.0)
    assert (best.exact_match, best.exact_threshold) == (100.0, -1.0)
    chosen = with_null_threshold(given, odds, best.f1_threshold)
    assert chosen == {"a": "red", "c": "blue", "b": "", "d": ""}
    assert squad_scores(gold_of(questions), chosen)["f1"] == 100.0


def test_a_threshold_below_all_odds_empties_every_answer_even_where_odds_are_negative():
    questions, given = development()
    # answered from below: none 2, b 1, b d 0, b d a 1, all 2: the first of the best is none
    odds = {"b": -9.0, "d": -8.0, "a": -3.0, "c": -1.0}
    best = best_null_threshold(odds, given, questions)
    assert best.f1 == 50.0 and best.f1_threshold < -9.0
    assert set(with_null_threshold(given, odds, best.f1_threshold).values()) == {""}


def test_questions_of_equal_odds_change_together():
    questions, given = development()
    # answered: none 2, all but c 1 (a, b, d together), all 2
    odds = {"a": 0.0, "b": 0.0, "d": 0.0, "c": 1.0}
    best = best_null_threshold(odds, given, questions)
    assert best.f1 == 50.0 and best.f1_threshold < 0.0


@pytest.mark.parametrize("seed", range(5))
def test_no_other_threshold_scores_better(seed):
    source = np.random.default_rng(seed)
    words = ["red car", "blue car", "the red", "car", "x"]
    rows, given, odds = [], {}, {}
    for number in range(40):
        name = str(number)
        impossible = bool(source.integers(2)) and number > 0
        rows.append(
            question(name, gold=[] if impossible else [source.choice(words)], impossible=impossible)
        )
        given[name] = str(source.choice(words))
        odds[name] = float(source.integers(-6, 7))
    questions = Questions(tuple(rows))
    gold = gold_of(questions)
    best = best_null_threshold(odds, given, questions)
    for metric, threshold, mine in (
        ("f1", best.f1_threshold, best.f1),
        ("exact", best.exact_threshold, best.exact_match),
    ):
        assert squad_scores(gold, with_null_threshold(given, odds, threshold))[metric] == (
            pytest.approx(mine, abs=1e-9)
        )
        tried = [-100.0, *(float(value) + 0.5 for value in range(-8, 8))]
        scores = [
            squad_scores(gold, with_null_threshold(given, odds, value))[metric] for value in tried
        ]
        assert max(scores) == pytest.approx(mine, abs=1e-9)


# --- real data


def test_perfect_logits_on_real_data_score_almost_100(shared_data, tmp_path):
    vocabulary = shared_data / "vocab" / "bert-base-cased-vocab.txt"
    (tmp_path / "vocab.txt").write_bytes(vocabulary.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    path = shared_data / "squad" / "dev-v1.1.rebuilt.json"
    questions = read_squad(path, version_2=False, training=True)
    made = make_windows(
        questions, read_tokenizer(tmp_path), max_seq_length=192, doc_stride=64, max_query_length=64,
        training=True,
    )  # fmt: skip
    assert len(made.question) > 1.3 * len(questions)
    logits = np.zeros((2, len(made.offsets)), np.float32)
    for row, name in enumerate(("start_positions", "end_positions")):
        positions = made.features.labels[name]
        logits[row, (made.features.starts + positions)[positions > 0]] = 10.0
    # A little noise breaks ties: of a thousand equal runs any would do.
    logits += np.random.default_rng(0).normal(scale=0.01, size=logits.shape).astype(np.float32)
    result = answers(questions, made, logits[0], logits[1], **DEFAULTS)
    scores = squad_scores(read_gold(path), result.predictions)
    # What is missing are answers cut inside a word, and those longer than 30 pieces.
    assert scores["f1"] > 99.0 and scores["exact_match"] > 98.8
    assert set(map(len, result.nbest.values())) == {20}
