"""Windows of SQuAD: what is covered, where the labels point, and the answers from logits."""

import itertools
import math
import random
import unicodedata

import numpy as np
import pytest

from bert_cli.data.finetune import squad_windows
from bert_cli.data.finetune.features import Features
from bert_cli.data.finetune.squad import (
    Answer,
    Question,
    gold_of,
    normalize,
    read_gold,
    read_squad,
    squad_scores,
)
from bert_cli.data.finetune.squad_windows import (
    Windows,
    answers,
    arrays_of_windows,
    best_null_threshold,
    make_windows,
    windows_of,
    with_null_threshold,
)
from bert_cli.data.records.tokenizer import read_tokenizer
from bert_cli.errors import ConfigError

SIZES = {"max_seq_length": 24, "doc_stride": 5, "max_query_length": 8}
WORDS = [
    "the", "Walking", "café", "ÉTÉ", "e\u0301te", "北京", "大", "😀", "x😀y", "İstanbul", "don't", "U.S.", "3,000",
    "\u201cquoted\u201d", "a\u00adb", "한국", "naïvely", "\u00a0", "longlonglong", "\u200b", "ﬁne", "Zürich",
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Every ASCII letter and digit, some other characters, and a few words in pieces."""
    folder = tmp_path_factory.mktemp("vocabulary")
    letters = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    words = [
        "walk",
        "##ing",
        "the",
        "cafe",
        "ete",
        "北",
        "京",
        "😀",
        "##😀",
        "“",
        "”",
        "ist",
        "##anbul",
    ]
    plain = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters]
    pieces = dict.fromkeys([*plain, *(f"##{letter}" for letter in letters), *words])
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    return read_tokenizer(folder)


def question_about(context, *, answer=None, question="who?", name="a"):
    """A question about a context; the answer is its characters."""
    answers = () if answer is None else (Answer(context[slice(*answer)], answer[0]),)
    return Question(name, question, context, answers, False)


def windows_for(questions, tokenizer, *, training=True, **sizes):
    return make_windows(questions, tokenizer, **(SIZES | sizes), training=training)


# --- windows


def test_a_window_is_question_and_context_with_their_segments_and_offsets(tokenizer):
    made = windows_for([question_about("The walking, cafe", answer=(4, 11))], tokenizer)
    pieces = [tokenizer.pieces[number] for number in made.features.tokens]
    assert pieces == [
        "[CLS]", "w", "##h", "##o", "?", "[SEP]", "the", "walk", "##ing", ",", "cafe", "[SEP]"
    ]  # fmt: skip
    assert made.features.segments.tolist() == [0] * 6 + [1] * 6
    assert made.offsets[6:11].tolist() == [[0, 3], [4, 8], [8, 11], [11, 12], [13, 17]]
    assert (made.offsets[[0, 1, 2, 3, 4, 5, 11]] == -1).all()
    assert made.best_context.tolist() == [False] * 6 + [True] * 5 + [False]
    # "lki" is of walk and ##ing; an impossible question has its [CLS].
    inside = question_about("The walking, cafe", answer=(6, 9))
    impossible = Question("a", "who?", "the cafe", (), True)
    labels = [windows_for([one], tokenizer).features.labels for one in (inside, impossible)]
    for columns, (start, end) in zip(
        [made.features.labels, *labels], ((7, 8), (7, 8), (0, 0)), strict=True
    ):
        assert columns["start_positions"].tolist() == [start]
        assert columns["end_positions"].tolist() == [end]
        assert {str(column.dtype) for column in columns.values()} == {"int32"}


def test_the_stride_is_from_a_windows_start_to_the_next_ones(tokenizer):
    # 20 pieces; room 24 - 3 - 4 of the question = 17: windows at 0 and 5
    context = " ".join("abcdefghijklmnopqrst")
    made = windows_for([question_about(context)], tokenizer, training=False)
    assert made.features.lengths.tolist() == [24, 22]
    first = [made.offsets[start + 6, 0] // 2 for start in made.features.starts]
    assert first == [0, 5]
    # exactly full: one window
    assert len(windows_for([question_about(context[:33])], tokenizer, training=False).question) == 1
    windows_for([question_about("the")], tokenizer, training=False, doc_stride=13)
    with pytest.raises(ConfigError, match=r"24 leaves 13 .* raise it to 25"):
        windows_for([question_about("the")], tokenizer, doc_stride=14)


def test_questions_are_cut_and_odd_ones_reported(tokenizer):
    long, full = (question_about("the cafe", question="the " * count) for count in (9, 8))
    made = windows_for([long], tokenizer, training=False)
    assert made.features.lengths.tolist() == [3 + 8 + 2]
    assert list(made.remarks) == [f"1 {squad_windows.CUT_QUESTIONS} (a)"]
    assert windows_for([full], tokenizer, training=False).remarks == ()
    # An answer without pieces is left out of the training.
    rows = [
        question_about("the \u0007 cafe", answer=(4, 5)),
        question_about("the cafe", answer=(0, 3), name="b"),
    ]
    made = windows_for(rows, tokenizer)
    assert made.question.tolist() == [1]
    assert list(made.remarks) == [f"1 {squad_windows.NO_PIECES} (a)"]
    # A context without pieces still makes a window.
    made = windows_for([question_about("\u0007")], tokenizer, training=False)
    assert made.features.lengths.tolist() == [7] and not made.best_context.any()


def test_windows_come_back_from_their_arrays(tokenizer, tmp_path):
    made = windows_for(
        [question_about("the cafe " * 9, answer=(4, 8), question="x " * 9)], tokenizer
    )
    np.savez(tmp_path / "cache.npz", **arrays_of_windows(made))
    with np.load(tmp_path / "cache.npz") as arrays:
        again = windows_of(dict(arrays))
    assert made.features.fingerprint == again.features.fingerprint
    assert made.remarks == again.remarks != ()
    for name in ("question", "offsets", "best_context"):
        assert (getattr(made, name) == getattr(again, name)).all()


def random_questions(seed, count):
    """Questions about few contexts of odd words; the answers run from any character to any."""
    source = random.Random(seed)
    contexts = [
        " ".join(source.choices(WORDS, k=source.randint(1, 40))).strip("\u200b\u00a0 ") or "the"
        for _ in range(count // 3)
    ]
    rows = []
    for number in range(count):
        context = source.choice(contexts)
        first = source.randrange(len(context))
        last = min(len(context), first + source.randint(1, 12))
        question = " ".join(source.choices(WORDS, k=source.randint(0, 6)))
        rows.append(
            question_about(context, answer=(first, last), question=question, name=str(number))
        )
    return rows


def brute_windows(row, tokenizer, sizes):
    """Google's loop over one question: pieces, first piece and length of each window."""
    library = tokenizer.library
    query = len(library.encode(row.question, add_special_tokens=False).ids)
    pieces = library.encode(row.context, add_special_tokens=False)
    room = sizes["max_seq_length"] - 3 - min(query, sizes["max_query_length"])
    spans, start = [], 0
    while True:
        length = min(len(pieces.ids) - start, room)
        spans.append((start, length))
        if start + length == len(pieces.ids):
            return pieces, min(query, sizes["max_query_length"]), spans
        start += sizes["doc_stride"]


@pytest.mark.parametrize("seed", range(5))
def test_windows_are_those_of_a_plain_loop(tokenizer, seed):
    rows = random_questions(seed, 30)
    sizes = SIZES | {"doc_stride": 1 + 3 * seed}
    made = windows_for(rows, tokenizer, training=False, **sizes)
    window = 0
    for number, one in enumerate(rows):
        pieces, query, spans = brute_windows(one, tokenizer, sizes)
        best = [
            max(spans, key=lambda span: -1 if not span[0] <= p < sum(span)
                else min(p - span[0], sum(span) - 1 - p) + 0.01 * span[1])
            for p in range(len(pieces.ids))
        ]  # fmt: skip
        for start, length in spans:
            begin = made.features.starts[window] + query + 2
            assert made.question[window] == number
            assert made.features.lengths[window] == query + length + 3
            part = slice(begin, begin + length)
            assert made.features.tokens[part].tolist() == pieces.ids[start : start + length]
            assert made.offsets[part].tolist() == [
                list(place) for place in pieces.offsets[start : start + length]
            ]
            assert made.best_context[part].tolist() == [
                best[p] == (start, length) for p in range(start, start + length)
            ]
            window += 1
    assert window == len(made.question)


@pytest.mark.parametrize("seed", range(3))
def test_labelled_positions_contain_the_answer_and_only_the_pieces_it_touches(tokenizer, seed):
    rows = random_questions(100 + seed, 60)
    made = windows_for(rows, tokenizer)
    labels, labelled = made.features.labels, 0
    for window, number in enumerate(made.question):
        one = rows[number]
        begin, end = one.answers[0].start, one.answers[0].start + len(one.answers[0].text)
        part = slice(made.features.starts[window], made.features.ends[window])
        offsets = made.offsets[part]
        touched = np.flatnonzero((offsets[:, 1] > begin) & (offsets[:, 0] < end))
        pieces = tokenizer.library.encode(one.context, add_special_tokens=False).offsets
        wanted = sum(last > begin and first < end for first, last in pieces)
        place = (int(labels["start_positions"][window]), int(labels["end_positions"][window]))
        if len(touched) == wanted:
            assert place == (touched[0], touched[-1])
            labelled += 1
        else:
            assert place == (0, 0)
    assert labelled > 20


@pytest.fixture(scope="module")
def real(shared_data, tmp_path_factory):
    """The development set of 1.1 whose offsets were rebuilt, and its windows for training."""
    folder = tmp_path_factory.mktemp("uncased")
    vocabulary = shared_data / "vocab" / "bert-base-uncased-vocab.txt"
    (folder / "vocab.txt").write_bytes(vocabulary.read_bytes())
    path = shared_data / "squad" / "dev-v1.1.rebuilt.json"
    questions, remarks = read_squad(path, version_2=False, training=True)
    assert remarks == ()
    made = make_windows(
        questions, read_tokenizer(folder), max_seq_length=384, doc_stride=128, max_query_length=64,
        training=True,
    )  # fmt: skip
    return questions, made


def test_every_real_answer_is_recovered_from_its_label_except_those_that_end_inside_a_word(real):
    questions, made = real
    assert len(questions) == 10_570 and made.remarks == ()
    labels, starts = made.features.labels, made.features.starts
    seen, differ = set(), 0
    labelled = np.flatnonzero(labels["start_positions"] > 0)
    for window in labelled:
        one = questions[made.question[window]]
        answer = one.answers[0]
        first = made.offsets[starts[window] + labels["start_positions"][window], 0]
        last = made.offsets[starts[window] + labels["end_positions"][window], 1]
        seen.add(one.id)
        if normalize(one.context[first:last]) != normalize(answer.text):
            differ += 1
            # It starts or ends within a word: "Japan" of "Japanese".
            end = answer.start + len(answer.text)
            around = one.context[answer.start - 1 : answer.start] + one.context[end : end + 1]
            assert answer.text in one.context[first:last]
            assert any(unicodedata.category(character)[0] not in "ZP" for character in around)
    assert len(seen) == 10_570  # each has a window that contains it completely
    assert differ / len(labelled) < 0.007  # 67 of 10,660


# --- answers

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
    return answers(rows, windows, start, end, **(DEFAULTS | settings))


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
    assert result.null_odds == {}
    # exp(8) and exp(4): 1 / (1 + exp(-4))
    assert result.nbest["a"][0]["probability"] == pytest.approx(1 / (1 + math.exp(-4)), abs=1e-12)
    assert sum(entry["probability"] for entry in result.nbest["a"]) == pytest.approx(1.0)


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


@pytest.mark.parametrize("seed", range(4))
def test_answers_are_those_of_a_plain_loop(seed):
    source = np.random.default_rng(seed)
    rows, parts = [], []
    for number in range(25):
        size = int(source.integers(1, 26))
        context = "".join(source.choice(list("ab😀d.f"), size))
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


def test_the_threshold_that_scores_best_is_chosen():
    questions = [question("a", gold=["red"]), question("c", gold=["blue"])]
    questions += [question("b", impossible=True), question("d", impossible=True)]
    given = {"a": "red", "b": "x", "c": "blue", "d": "y"}  # F1 1, 0, 1 and 0
    # answered from below: none 2 of 4 right, a 3, a c 4, a c b 3, all 2
    odds = {"a": -3.0, "c": -1.0, "b": 0.5, "d": 2.0}
    best = best_null_threshold(odds, given, questions)
    chosen = with_null_threshold(given, odds, best)
    assert best == -1.0 and chosen == {"a": "red", "c": "blue", "b": "", "d": ""}
    assert squad_scores(gold_of(questions), chosen)["f1"] == 100.0
    # answered from below: none 2, b 1, b d 0, b d a 1, all 2: the first of the best is none
    odds = {"b": -9.0, "d": -8.0, "a": -3.0, "c": -1.0}
    assert best_null_threshold(odds, given, questions) < -9.0
    # Questions of equal odds change together. none 2, all but c 1 (a, b, d together), all 2
    odds = {"a": 0.0, "b": 0.0, "d": 0.0, "c": 1.0}
    assert best_null_threshold(odds, given, questions) < 0.0


@pytest.mark.parametrize("seed", range(5))
def test_no_other_threshold_scores_better(seed):
    source = np.random.default_rng(seed)
    words = ["red car", "blue car", "the red", "car", "x"]
    questions, given, odds = [], {}, {}
    for number in range(40):
        name = str(number)
        impossible = bool(source.integers(2)) and number > 0
        gold = [] if impossible else [source.choice(words)]
        questions.append(question(name, gold=gold, impossible=impossible))
        given[name] = str(source.choice(words))
        odds[name] = float(source.integers(-6, 7))

    def f1(threshold):
        chosen = with_null_threshold(given, odds, threshold)
        return squad_scores(gold_of(questions), chosen)["f1"]

    best = f1(best_null_threshold(odds, given, questions))
    others = [-100.0, *(float(value) + 0.5 for value in range(-8, 8))]
    assert max(map(f1, others)) == pytest.approx(best, abs=1e-9)


# --- real data


def test_perfect_logits_on_real_data_score_almost_100(real, shared_data):
    questions, made = real
    logits = np.zeros((2, len(made.offsets)), np.float32)
    for row, name in enumerate(("start_positions", "end_positions")):
        positions = made.features.labels[name]
        logits[row, (made.features.starts + positions)[positions > 0]] = 10.0
    # A little noise breaks ties: of a thousand equal runs any would do.
    logits += np.random.default_rng(0).normal(scale=0.01, size=logits.shape).astype(np.float32)
    result = answers(questions, made, logits[0], logits[1], **DEFAULTS)
    path = shared_data / "squad" / "dev-v1.1.rebuilt.json"
    scores = squad_scores(read_gold(path), result.predictions)
    # What is missing are answers cut inside a word, and those longer than 30 pieces.
    assert scores["f1"] > 99.0 and scores["exact_match"] > 98.8
    assert set(map(len, result.nbest.values())) == {20}
