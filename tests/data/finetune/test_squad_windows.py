"""Windows of SQuAD: what is covered, where the labels point, and the answers from logits."""

import math

import numpy as np
import pytest

from bert_cli.data.finetune import squad, squad_windows
from bert_cli.data.finetune.features import Features
from bert_cli.data.tokens.tokenizer import read_tokenizer
from bert_cli.errors import ConfigError

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SIZES = {"max_seq_length": 24, "doc_stride": 5, "max_query_length": 8}


@pytest.fixture(scope="module")
def tokenizer(tokenizer_of):
    """Every ASCII letter and digit, some other characters, and a few words in pieces."""
    letters = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    words = ["walk", "##ing", "the", "cafe", "北", "😀", "##😀"]
    plain = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters]
    return tokenizer_of(dict.fromkeys([*plain, *(f"##{letter}" for letter in letters), *words]))


def question(context=LETTERS, *, answer=None, text="who?", name="a"):
    spans = [] if answer is None else [squad.Answer(context[slice(*answer)], answer[0])]
    return squad.Question(name, text, context, tuple(spans), False)


def windows_for(questions, tokenizer, *, training=True, **sizes):
    return squad_windows.make_windows(questions, tokenizer, **(SIZES | sizes), training=training)


def test_a_window_is_question_and_context_with_their_segments_and_offsets(tokenizer):
    made = windows_for([question("The walking, cafe", answer=(4, 11))], tokenizer)
    pieces = " ".join(tokenizer.pieces[number] for number in made.features.tokens)
    assert pieces == "[CLS] w ##h ##o ? [SEP] the walk ##ing , cafe [SEP]"
    assert made.features.segments.tolist() == [0] * 6 + [1] * 6
    assert made.offsets[6:11].tolist() == [[0, 3], [4, 8], [8, 11], [11, 12], [13, 17]]
    assert (made.offsets[[0, 1, 2, 3, 4, 5, 11]] == -1).all()
    assert made.best_context.tolist() == [False] * 6 + [True] * 5 + [False]
    # "lki" is of walk and ##ing; an impossible question has its [CLS].
    inside = windows_for([question("The walking, cafe", answer=(6, 9))], tokenizer)
    impossible = windows_for([squad.Question("a", "who?", "the cafe", (), True)], tokenizer)
    for windows, start, end in ((made, 7, 8), (inside, 7, 8), (impossible, 0, 0)):
        labels = windows.features.labels
        assert labels["start_positions"].tolist() == [start]
        assert labels["end_positions"].tolist() == [end]
        assert {str(column.dtype) for column in labels.values()} == {"int32"}


def test_the_stride_is_from_a_windows_start_to_the_next_ones(tokenizer):
    # 20 pieces; room 24 - 3 - 4 of the question = 17: windows at 0 and 5
    letters = " ".join("abcdefghijklmnopqrst")
    rows = [question("the 😀大 cafe", answer=(4, 6)), question(letters, answer=(36, 39))]
    made = windows_for(rows, tokenizer)
    features = made.features
    assert (made.question.tolist(), features.ends.tolist()) == ([0, 1, 1], [11, 35, 57])
    pieces = [tokenizer.pieces[number] for number in features.tokens]
    texts = [" ".join(pieces[start + 6 : start + 23]) for start in features.starts[1:]]
    assert pieces[6:10] == ["the", "😀", "[UNK]", "cafe"]
    assert texts == [letters[:33], letters[10:] + " [SEP]"]
    assert made.offsets[6:10].tolist() == [[0, 3], [4, 5], [5, 6], [7, 11]]
    assert features.labels["start_positions"].tolist() == [7, 0, 6 + 18 - 5]
    assert features.labels["end_positions"].tolist() == [8, 0, 6 + 19 - 5]
    # Piece 10 has 6 others to its right in the first window, and 5 to its left in the second.
    assert np.flatnonzero(made.best_context[11:35]).tolist() == [*range(6, 17)]
    assert np.flatnonzero(made.best_context[35:]).tolist() == [*range(6 + 6, 6 + 15)]
    # exactly full: one window
    full = question(letters[:33])
    assert len(windows_for([full], tokenizer, training=False).question) == 1
    windows_for([question("the")], tokenizer, training=False, doc_stride=13)
    with pytest.raises(ConfigError, match=r"24 leaves 13 .* raise it to 25"):
        windows_for([question("the")], tokenizer, doc_stride=14)


def test_questions_are_cut_and_odd_ones_reported(tokenizer, tmp_path):
    long, full = (question("the cafe", text="the " * count) for count in (9, 8))
    made = windows_for([long], tokenizer, training=False)
    assert made.features.lengths.tolist() == [3 + 8 + 2]
    assert made.remarks == ("1 question longer than max_query_length, truncated (a)",)
    assert windows_for([full], tokenizer, training=False).remarks == ()
    # An answer without pieces is left out of the training.
    odd = question("the \u0007 cafe", answer=(4, 5))
    made = windows_for([odd, question("the cafe", answer=(0, 3), name="b")], tokenizer)
    assert made.question.tolist() == [1]
    assert made.remarks == ("1 question left out of training, whose answer contains no token (a)",)
    np.savez(tmp_path / "cache.npz", **squad_windows.arrays_of_windows(made))
    with np.load(tmp_path / "cache.npz") as arrays:
        again = squad_windows.windows_of(dict(arrays))
    assert (made.features.fingerprint, made.remarks) == (again.features.fingerprint, again.remarks)
    for name in ("question", "offsets", "best_context"):
        assert (getattr(made, name) == getattr(again, name)).all()
    # A context without pieces still makes a window.
    made = windows_for([question("\u0007")], tokenizer, training=False)
    assert made.features.lengths.tolist() == [7] and not made.best_context.any()


def test_every_real_answer_is_recovered_from_its_label_except_those_that_end_inside_a_word(
    shared_data, tmp_path
):
    vocabulary = shared_data / "vocab" / "bert-base-uncased-vocab.txt"
    (tmp_path / "vocab.txt").write_bytes(vocabulary.read_bytes())
    path = shared_data / "squad" / "dev-v1.1.rebuilt.json"
    questions, remarks = squad.read_squad(path, version_2=False, training=True)
    assert remarks == ()
    sizes = {"max_seq_length": 384, "doc_stride": 128, "max_query_length": 64}
    made = windows_for(questions, read_tokenizer(tmp_path), **sizes)
    assert len(questions) == 10_570 and made.remarks == ()
    labels, starts = made.features.labels, made.features.starts
    labelled = np.flatnonzero(labels["start_positions"] > 0)
    first = made.offsets[(starts + labels["start_positions"])[labelled], 0]
    last = made.offsets[(starts + labels["end_positions"])[labelled], 1]
    rows = [questions[number] for number in made.question[labelled]]
    texts = [row.context[a:b] for row, a, b in zip(rows, first, last, strict=True)]
    pairs = list(zip(texts, (row.answers[0].text for row in rows), strict=True))
    assert all(answer in text for text, answer in pairs)
    differ = sum(squad.normalize(text) != squad.normalize(answer) for text, answer in pairs)
    assert len({row.id for row in rows}) == 10_570  # each has a window that contains it completely
    assert differ / len(labelled) < 0.007  # 67 of 10,660


DEFAULTS = {"max_answer_length": 30, "version_2": False}


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
    return squad_windows.Windows(features, numbers, np.array(offsets, np.int32), np.array(best))


def answer_all(rows, windows, start, end, **settings):
    logits = np.array([start, end], np.float32).T
    return squad_windows.answers(rows, windows, logits, **(DEFAULTS | settings))


def test_an_answer_starts_at_a_position_only_in_its_best_window():
    made = windows_over((0, range(3), [0, 1]), (0, range(1, 5), [2, 3, 4]))
    both = [*(0, 0, 0, 0, 0, 9, 0), *(0, 0, 0, 7, 1, 0, 0, 0)]
    # "c" scores 18 in the first window and "b" 14 in the second, where they are not best
    result = answer_all([question()], made, both, both)
    # "abc" and "bc" score 0 + 9 in the first window, of which the first is taken
    assert result.predictions == {"a": "abc"}
    logits = {entry["text"]: entry["start_logit"] for entry in result.nbest["a"]}
    assert logits["c"] == 1.0 and logits["b"] == 0.0


def test_answers_that_are_longer_than_the_maximum_are_reported(tokenizer):
    """Of "the walking, cafe" in windows of a paragraph: the, walk, ##ing, comma, cafe."""
    context = "a b c d e f g h i j k l the walking, cafe m n o p q"
    start = context.index("the")
    ends = (("one", 3), ("three", 11), ("part", 9), ("five", 17))
    rows = [question(context, answer=(start, start + end), name=name) for name, end in ends]
    rows.append(squad.Question("none", "who?", context, (), True))
    for training in (True, False):
        made = windows_for(rows, tokenizer, training=training)
        assert len(made.question) > len(rows)
        for longest, ids in (
            (0, "4 questions * (one, three, part, ...)"),
            (2, "3 questions * (three, part, five)"),
        ):
            remark = ids.replace("*", squad_windows.LONG_ANSWERS.partition(" ")[2])
            assert squad_windows.long_answers(rows, made, longest) == (remark,)
        assert squad_windows.long_answers(rows, made, 5) == ()


def test_n_best_has_different_texts_and_of_equal_ones_the_best(monkeypatch):
    monkeypatch.setattr(squad_windows, "N_BEST", 2)
    made, row = windows_over((0, range(6), range(6))), question("x-x-y-")
    logits = [0, 0, 0, 3, 0, 4, 0, 2, 0, 0]
    result = answer_all([row], made, logits, logits, max_answer_length=1)
    texts = [(entry["text"], entry["start_logit"]) for entry in result.nbest["a"]]
    assert texts == [("x", 4.0), ("y", 2.0)] and result.null_odds == {}
    # exp(8) and exp(4): 1 / (1 + exp(-4))
    assert result.nbest["a"][0]["probability"] == pytest.approx(1 / (1 + math.exp(-4)), abs=1e-12)
    assert sum(entry["probability"] for entry in result.nbest["a"]) == pytest.approx(1.0)


def test_a_context_without_pieces_has_an_empty_answer():
    made, rows = windows_over((0, [], []), (1, [0], [0])), [question(), question(name="b")]
    for version_2 in (True, False):
        result = answer_all(rows, made, [0.0] * 9, [0.0] * 9, version_2=version_2)
        assert result.predictions == {"a": "", "b": "a"}
    nothing = {"text": "", "probability": 1.0, "start_logit": 0.0, "end_logit": 0.0}
    assert result.nbest["a"] == [nothing]


def test_no_answer_is_given_when_it_is_better_by_more_than_the_threshold():
    # two windows of one question: no answer scores 6 and 4, so 4; the best text 3
    made = windows_over((0, [0], [0]), (0, [1], [1]))
    start = [*(3, 0, 0, 1, 0), *(2, 0, 0, 2, 0)]
    end = [*(3, 0, 0, 1, 0), *(2, 0, 0, 1, 0)]
    result = answer_all([question()], made, start, end, version_2=True)
    assert (result.predictions, result.null_odds) == ({"a": "b"}, {"a": 1.0})
    for threshold, text in ((0.999, ""), (1.0, "b")):
        chosen = squad_windows.with_null_threshold({"a": "b"}, result.null_odds, threshold)
        assert chosen == {"a": text}
    texts = [(entry["text"], entry["start_logit"]) for entry in result.nbest["a"]]
    assert texts == [("", 2.0), ("b", 2.0), ("a", 1.0)]


def test_the_threshold_that_scores_best_is_chosen():
    golds = {"a": (squad.Answer("red", 0),), "c": (squad.Answer("blue", 0),), "b": (), "d": ()}
    questions = [squad.Question(name, "?", "", gold, not gold) for name, gold in golds.items()]
    given = {"a": "red", "b": "x", "c": "blue", "d": "y"}  # F1 1, 0, 1 and 0
    # answered from below: none 2 of 4 right, a 3, a c 4, a c b 3, all 2
    odds = {"a": -3.0, "c": -1.0, "b": 0.5, "d": 2.0}
    best = squad_windows.best_null_threshold(odds, given, questions)
    chosen = squad_windows.with_null_threshold(given, odds, best)
    assert best == -1.0 and chosen == {"a": "red", "c": "blue", "b": "", "d": ""}
    assert squad.squad_samples(squad.gold_of(questions), chosen)["f1"].value == 100.0
    # answered from below: none 2, b 1, b d 0, b d a 1, all 2: the first of the best is none
    odds = {"b": -9.0, "d": -8.0, "a": -3.0, "c": -1.0}
    assert squad_windows.best_null_threshold(odds, given, questions) < -9.0
    # Questions of equal odds change together. none 2, all but c 1 (a, b, d together), all 2
    odds = {"a": 0.0, "b": 0.0, "d": 0.0, "c": 1.0}
    assert squad_windows.best_null_threshold(odds, given, questions) < 0.0
