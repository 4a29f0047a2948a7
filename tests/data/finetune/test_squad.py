"""SQuAD files and windows: what is refused, what is covered, where the labels point."""

import json
import random
import unicodedata

import numpy as np
import pytest

from bert_cli.data.finetune import squad, squad_windows
from bert_cli.data.finetune.metrics import normalize
from bert_cli.data.finetune.squad import Answer, Question, Questions, read_squad
from bert_cli.data.finetune.squad_windows import arrays_of_windows, make_windows, windows_of
from bert_cli.data.records.tokenizer import read_tokenizer
from bert_cli.errors import ConfigError, DataError

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


@pytest.fixture
def write(tmp_path):
    def _write(content):
        path = tmp_path / "squad.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return _write


def row(name="a", start=4, text="cat", **more):
    return {
        "id": name, "question": "Who?", "answers": [{"text": text, "answer_start": start}], **more
    }  # fmt: skip


def file_of(*rows, context="The cat sat."):
    return {"data": [{"title": "Cats", "paragraphs": [{"context": context, "qas": list(rows)}]}]}


def question_about(context, *, answer=None, question="who?", name="a"):
    """A question about a context; the answer is its characters."""
    answers = () if answer is None else (Answer(context[slice(*answer)], answer[0]),)
    return Question(name, question, context, answers, False)


def windows_for(questions, tokenizer, *, training=True, **sizes):
    rows = Questions(tuple(questions))
    return make_windows(rows, tokenizer, **(SIZES | sizes), training=training)


# --- reading


def test_a_question_is_read_with_its_answers(write):
    result = read_squad(write(file_of(row())), version_2=False, training=True)
    assert result.questions == (Question("a", "Who?", "The cat sat.", (Answer("cat", 4),), False),)
    assert result.remarks == ()


def test_impossible_questions_need_version_2(write):
    path = write(file_of(row(), row("b", is_impossible=True) | {"answers": []}))
    result = read_squad(path, version_2=True, training=True)
    assert [question.is_impossible for question in result.questions] == [False, True]
    with pytest.raises(DataError, match=r"question 2 'b'\).*give --version-2"):
        read_squad(path, version_2=False, training=False)


def test_test_files_without_answers_are_read_but_not_trained_on(write):
    bare = {"id": "a", "question": "Who?"}
    path = write(file_of(bare, row("b") | {"answers": []}))
    result = read_squad(path, version_2=False, training=False)
    assert len(result) == 2 and not result.can_be_scored
    with pytest.raises(DataError, match=r"question 1 'a'\): has no answers"):
        read_squad(path, version_2=False, training=True)


def test_a_misplaced_answer_is_left_out_of_training_and_reported(write):
    both = row("b")
    both["answers"].append({"text": "sat", "answer_start": 7})
    path = write(file_of(row("a", start=5), both, row("c", start=-8), row("d", text=" ", start=3)))
    result = read_squad(path, version_2=False, training=True)
    assert [(question.id, question.answers) for question in result.questions] == [
        ("b", (Answer("cat", 4),))
    ]
    assert list(result.remarks) == [
        f"4 {squad.MISPLACED} (a, b, c, ...)",
        f"3 {squad.UNUSABLE} (a, c, d)",
    ]


def test_a_misplaced_answer_is_included_where_only_its_text_is_scored(write):
    path = write(file_of(row("a", start=5)))
    result = read_squad(path, version_2=False, training=False)
    assert result.questions[0].answers == (Answer("cat", 5),)
    assert result.remarks == (f"1 {squad.MISPLACED_KEPT} (a)",)


def test_a_file_with_nothing_to_train_on_is_refused(write):
    with pytest.raises(DataError, match=r"nothing to train on.*1 answers whose text"):
        read_squad(write(file_of(row(start=5))), version_2=False, training=True)


def test_bad_files_are_refused_with_the_place_in_the_file(write):
    for content, message in (
        ("", r"squad\.json: is empty"),
        ('{"data":\n [}', r"squad\.json \(line 2, column 3\): is not JSON"),
        ("[]", r"squad\.json: has no 'data'"),
        ({"version": "1.1"}, r"squad\.json: has no 'data'"),
        ({"data": {}}, r"squad\.json: 'data' is not a list"),
        ({"data": []}, "nothing to train on: the file contains no questions"),
        ({"data": ["x"]}, r"squad\.json: article 1 is not a JSON object"),
        ({"data": [{"title": "Cats"}]}, r"\(article 1 'Cats'\): has no 'paragraphs'"),
        ({"data": [{"paragraphs": [{"context": "x"}]}]}, r"\(article 1, paragraph 1\): has no 'qas'"),
        ({"data": [{"paragraphs": [{"qas": [row()]}]}]}, r"question 1 'a'\): has no 'context'"),
        (file_of(row(), context=" \n"), r"question 1 'a'\): the context is empty"),
        (file_of(row() | {"id": 3}), r"paragraph 1, question 1\): 'id' is not a string"),
        (file_of({"id": "a", "answers": []}), r"question 1 'a'\): has no 'question'"),
        (file_of(row(), row()), r"question 2 'a'\): this id comes twice"),
        (file_of(row() | {"answers": [{"text": "cat"}]}), "has no integer 'answer_start'"),
        (file_of(row() | {"answers": [{"answer_start": 4}]}), "has no 'text'"),
        (file_of(row() | {"answers": "cat"}), "'answers' is not a list"),
        (file_of(row(is_impossible=True)), "marked impossible and has answers"),
        (file_of(row(is_impossible="no")), "'is_impossible' is neither true nor false"),
        (file_of(row() | {"question": "\ud83d"}), "'question' has half a surrogate pair"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=message):
            read_squad(write(content), version_2=True, training=True)


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
    assert made.features.labels["start_positions"].tolist() == [7]
    assert made.features.labels["end_positions"].tolist() == [8]


def test_the_stride_is_from_a_windows_start_to_the_next_ones(tokenizer):
    # 20 pieces; room 24 - 3 - 4 of the question = 17: windows at 0 and 5
    context = " ".join("abcdefghijklmnopqrst")
    made = windows_for([question_about(context)], tokenizer, training=False)
    assert made.features.lengths.tolist() == [24, 22]
    first = [made.offsets[start + 6, 0] // 2 for start in made.features.starts]
    assert first == [0, 5]
    # exactly full: one window
    assert len(windows_for([question_about(context[:33])], tokenizer, training=False).question) == 1


def test_a_long_question_is_cut_and_reported(tokenizer):
    made = windows_for([question_about("the cafe", question="the " * 9)], tokenizer, training=False)
    assert made.features.lengths.tolist() == [3 + 8 + 2]
    assert list(made.remarks) == [f"1 {squad_windows.CUT_QUESTIONS} (a)"]
    assert (
        windows_for([question_about("the", question="the " * 8)], tokenizer, training=False).remarks
        == ()
    )


def test_answers_at_the_edges_of_windows(tokenizer):
    for answer, labels in (
        # 20 pieces of one character, windows 0..16 and 5..19; positions 6.. in a window
        ((0, 1), [(6, 6), (0, 0)]),
        ((32, 33), [(22, 22), (17, 17)]),  # the last of the first window
        ((34, 35), [(0, 0), (18, 18)]),  # the one after it
        ((32, 35), [(0, 0), (17, 18)]),  # over its edge
        ((10, 11), [(11, 11), (6, 6)]),  # the first of the second window
        ((8, 11), [(10, 11), (0, 0)]),  # over its edge
        ((38, 39), [(0, 0), (20, 20)]),  # the very last
    ):
        made = windows_for(
            [question_about(" ".join("abcdefghijklmnopqrst"), answer=answer)], tokenizer
        )
        result = made.features.labels
        starts, ends = result["start_positions"].tolist(), result["end_positions"].tolist()
        assert list(zip(starts, ends, strict=True)) == labels
        assert result["start_positions"].dtype == result["end_positions"].dtype == np.int32


def test_an_impossible_question_is_labelled_with_its_cls(tokenizer):
    impossible = Question("a", "who?", "the cafe", (), True)
    made = windows_for([impossible], tokenizer)
    assert made.features.labels["start_positions"].tolist() == [0]
    assert made.features.labels["end_positions"].tolist() == [0]


def test_an_answer_inside_a_piece_takes_the_complete_piece(tokenizer):
    made = windows_for([question_about("the walking cafe", answer=(6, 9))], tokenizer)
    # "lki": of walk and ##ing
    assert made.features.labels["start_positions"].tolist() == [7]
    assert made.features.labels["end_positions"].tolist() == [8]


def test_an_answer_without_pieces_is_left_out_of_training_and_reported(tokenizer):
    rows = [
        question_about("the \u0007 cafe", answer=(4, 5)),
        question_about("the cafe", answer=(0, 3), name="b"),
    ]
    made = windows_for(rows, tokenizer)
    assert made.question.tolist() == [1]
    assert list(made.remarks) == [f"1 {squad_windows.NO_PIECES} (a)"]


def test_a_context_without_pieces_still_makes_a_window(tokenizer):
    made = windows_for([question_about("\u0007")], tokenizer, training=False)
    assert made.features.lengths.tolist() == [7]
    assert not made.best_context.any()


def test_settings_that_leave_no_room_are_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"24 leaves 13 .* raise it to 25"):
        windows_for([question_about("the")], tokenizer, doc_stride=14)
    assert (
        len(windows_for([question_about("the")], tokenizer, training=False, doc_stride=13).question)
        == 1
    )
    with pytest.raises(ConfigError, match="leaves 0 tokens"):
        windows_for([question_about("the")], tokenizer, max_query_length=64)
    with pytest.raises(ConfigError, match=r"doc_stride \(0\)"):
        windows_for([question_about("the")], tokenizer, doc_stride=0)
    with pytest.raises(ValueError, match="training=True"):
        windows_for([question_about("the")], tokenizer, training=True)


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


@pytest.mark.parametrize("seed", range(8))
def test_windows_are_those_of_a_plain_loop(tokenizer, seed):
    rows = random_questions(seed, 30)
    sizes = SIZES | {"doc_stride": 1 + 3 * (seed % 5)}
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


@pytest.mark.parametrize("seed", range(8))
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


# --- real data


@pytest.fixture(scope="module")
def real(shared_data, tmp_path_factory):
    """The development set of 1.1 whose offsets were rebuilt, and its windows for training."""
    folder = tmp_path_factory.mktemp("uncased")
    vocabulary = shared_data / "vocab" / "bert-base-uncased-vocab.txt"
    (folder / "vocab.txt").write_bytes(vocabulary.read_bytes())
    path = shared_data / "squad" / "dev-v1.1.rebuilt.json"
    questions = read_squad(path, version_2=False, training=True)
    made = make_windows(
        questions, read_tokenizer(folder), max_seq_length=384, doc_stride=128, max_query_length=64,
        training=True,
    )  # fmt: skip
    return questions, made


def test_the_development_set_is_read_completely(real):
    questions, made = real
    assert len(questions) == 10_570 and questions.remarks == () and made.remarks == ()
    assert set(made.question.tolist()) == set(range(10_570))


def test_every_real_answer_is_recovered_from_its_label_except_those_that_end_inside_a_word(real):
    questions, made = real
    labels, starts = made.features.labels, made.features.starts
    seen, differ = set(), 0
    labelled = np.flatnonzero(labels["start_positions"] > 0)
    for window in labelled:
        one = questions.questions[made.question[window]]
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


def test_long_real_contexts_are_covered_completely_and_each_piece_is_best_once(real):
    questions, made = real
    inside = made.offsets[:, 0] >= 0
    of = np.repeat(made.question, made.features.lengths)
    several = np.flatnonzero(np.bincount(made.question) > 1)
    assert len(several) == 183
    for number in several:
        characters = {tuple(place) for place in made.offsets[inside & (of == number)].tolist()}
        covered = np.zeros(len(questions.questions[number].context), bool)
        for first, last in characters:
            covered[first:last] = True
        missed = np.array(list(questions.questions[number].context))[~covered]
        assert "".join(missed).strip() == ""
        assert (made.best_context & (of == number)).sum() == len(characters)
