"""CoNLL files as people have them, labels of first pieces, labels of words, and scores of entities."""

from itertools import count

import numpy as np
import pytest
from support.contents import put
from support.metrics import values

from bert_cli.data.finetune import conll
from bert_cli.statistics import identify

PIECES = [
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]",
    "jo", "##han", "##n", "lives", "in", "new", "york", ".", "-", "a", "b",
]  # fmt: skip
NAMES = ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")


@pytest.fixture(scope="module")
def tokenizer(tokenizer_of):
    return tokenizer_of(PIECES)


def test_words_and_labels_are_the_first_and_the_last_column(tmp_path):
    text = "\ufeffJohann NNP I-NP B-PER\nlives VBZ I-VP O\t\n\n \t\n"
    text += "York  NNP I-NP  B-LOC\r\n. . O O"
    for end in ("", "\n\n\n"):
        result = conll.read_conll(put(tmp_path / "dev.txt", text + end))
        assert result.words == [["Johann", "lives"], ["York", "."]]
        assert result.labels == [[3, 0], [1, 0]]
        assert result.label_names == NAMES and result.remarks == {}
    given = conll.read_conll(put(tmp_path / "dev.txt", text), NAMES[::-1])
    assert given.label_names == NAMES[::-1] and given.labels == [[1, 4], [3, 4]]


READ = [
    # Separators, marks of documents, and comments; a word may be a hash.
    ("New York\tB-LOC\n10\u00a0000\tO\n\u3000\tO\n", {"words": [["New York", "10\u00a0000", "\u3000"]]}),
    ("10\u00a0000 O\n\u2028 B-LOC\n", {"words": [["10\u00a0000", "\u2028"]]}),
    ("-DOCSTART- -X- O O\n\na A B O\n-DOCSTART- -X- O O\nb A B O\n",
     {"words": [["a"], ["b"]], "remarks": {conll.DOCUMENTS: 2}}),
    ("# id 52 domain=en\n# _ _ O\n#1 _ _ O\n# _ _ B-PER\n",
     {"words": [["#", "#1", "#"]], "remarks": {conll.COMMENTS: 1}}),
    # MultiCoNER has tabs in its comments alone.
    ("# id 1\tdomain=en\na _ _ O\nb _ _ B-PER\n\n# id 2\tdomain=en\nc _ _ O\n",
     {"words": [["a", "b"], ["c"]], "remarks": {conll.COMMENTS: 2}}),
    # WikiANN has its language before each word.
    ("en:a\tO\nen::\tO\n\nen:\tB-PER\n", {"words": [["a", ":"], ["en:"]], "remarks": {conll.PREFIXED: 3}}),
    ("zh-min-nan:a O\nzh-min-nan:b O\n", {"words": [["a", "b"]], "remarks": {conll.PREFIXED: 2}}),
    ("en:a O\nb O\n", {"words": [["en:a", "b"]]}),
    ("# text = ends with O\n#\tO\n# a\tO\n", {"words": [["#", "# a"]], "remarks": {conll.COMMENTS: 1}}),
    # Sentences of a document are a group if there are several documents.
    ("-DOCSTART- O\na O\n\nb O\n-DOCSTART- O\nc O\n", {"groups": [0, 0, 1], "remarks": {conll.DOCUMENTS: 2}}),
    ("-DOCSTART- O\na O\n\nb O\n", {"groups": [0, 1], "remarks": {conll.DOCUMENTS: 1}}),
    ("a O\n\nb O\n", {"groups": [0, 1]}),
    # Words follow a first column that counts them, in each sentence or in the file.
    ("1\tThe\tO\tO\n2\tParis\tB-LOC\tB-LOC\n\n1\tyes\tO\tO\n",
     {"words": [["The", "Paris"], ["yes"]], "remarks": {conll.COUNTED: 2}}),
    ("0 a NN O\n1 b NN B-LOC\n\n0 c NN O\n1 d NN O\n",
     {"words": [["a", "b"], ["c", "d"]], "remarks": {conll.COUNTED: 2}}),
    ("7 a O\n8 b B-LOC\n\n9 c O\n10 d O\n", {"words": [["a", "b"], ["c", "d"]], "remarks": {conll.COUNTED: 2}}),
    # Numbers that are words.
    *((text, {}) for text in ("1 X B-LOC\n\n1996 X O\n", "1 B-LOC\nof O\n", "3 X B-LOC\n4 X O\n\na X O\nb X O\n")),
    # IOB1 becomes BIO: adjacent persons, a location after a person, a sentence that starts with I-.
    ("a I-PER\nb I-PER\na B-PER\nb I-LOC\na O\nb I-LOC\n\na I-LOC\n", {
        "labels": ["B-PER I-PER B-PER B-LOC O B-LOC", "B-LOC"], "remarks": {conll.CONVERTED: 4}}),
    ("a B-PER\nb I-PER\nb B-PER\na O\n", {"labels": ["B-PER I-PER B-PER O"]}),
    ("a O\nb B-PER\n\nA O\nB B-PER\n\nb B-PER\n\na B-PER\nb O\n", {"remarks": {conll.REPEATED: 2}}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), READ)
def test_a_file_of_any_form_has_its_words_labels_and_remarks(text, expected, tmp_path):
    result = conll.read_conll(put(tmp_path / "dev.txt", text), NAMES)
    assert result.label_names == NAMES
    found = {"words": result.words, "labels": [*map(" ".join, result.names(result.labels))]}
    found |= {"remarks": result.remarks, "groups": result.examples.groups.tolist()}
    assert found == found | {"remarks": {}} | expected


def test_entities_may_have_no_type(tmp_path):
    result = conll.read_conll(put(tmp_path / "dev.txt", "a B-PER\nb I-PER\na O\nb B\na I\n"))
    assert result.names(result.labels) == [["B-PER", "I-PER", "O", "B", "I"]]
    assert result.remarks == {} and result.label_names == ("O", "B", "I", "B-PER", "I-PER")


def sentences(*texts):
    words = [text.split(" ") for text in texts]
    numbers = count(1)
    return conll.Sentences(words, [[next(numbers) % 5 for _ in row] for row in words], NAMES)


def labels_of(given, features, values=None):
    values = features.position_labels["labels"] if values is None else values
    return [own.tolist() for own in conll.of_words(given, features, values)]


def shown(features):
    parts = np.split(features.tokens, features.ends[:-1])
    return [" ".join(PIECES[number] for number in part) for part in parts]


def test_the_first_piece_of_a_word_carries_its_label(tokenizer):
    given = sentences("Johann lives", "New York.")
    features, remarks = conll.word_features(given, tokenizer, 16)
    assert shown(features) == ["[CLS] jo ##han ##n lives [SEP]", "[CLS] new york . [SEP]"]
    labels = features.position_labels
    assert labels["label_weights"].tolist() == [0, 1, 0, 0, 1, 0, 0, 1, 1, 0, 0]
    assert labels["labels"].tolist() == [0, 1, 0, 0, 2, 0, 0, 3, 4, 0, 0]
    assert labels["labels"].dtype == np.int32 and labels["label_weights"].dtype == np.float32
    assert features.segments.tolist() == [0] * 11 and features.segments.dtype == np.int8
    assert labels_of(given, features, np.arange(11)) == [[1, 4], [7, 8]] and remarks == {}


def test_long_sentences_are_cut_and_a_word_without_pieces_is_unknown(tokenizer):
    given = sentences("a Johann b a b a", "a b a")
    features, remarks = conll.word_features(given, tokenizer, 5)
    assert shown(features) == [
        "[CLS] a jo ##han [SEP]", "[CLS] ##n b a [SEP]", "[CLS] b a [SEP]", "[CLS] a b a [SEP]",
    ]  # fmt: skip
    assert features.lengths.max() == 5 and remarks == {conll.WINDOWS: 1}
    assert labels_of(given, features) == given.labels
    given = sentences("a \u200b\x07 b", "------- a", "[SEP]")  # this special token is text
    features, remarks = conll.word_features(given, tokenizer, 5)
    cut, unknown = "[CLS] - - - [SEP]", "[CLS] [UNK] [UNK] [UNK] [SEP]"
    assert shown(features) == ["[CLS] a [UNK] b [SEP]", cut, "[CLS] a [SEP]", unknown]
    assert remarks == {conll.NO_PIECES: 1, conll.CUT_WORDS: 1, conll.WINDOWS: 1}
    assert labels_of(given, features) == given.labels


def test_a_word_of_a_long_sentence_counts_in_the_window_where_it_is_most_central(tokenizer):
    given = sentences("a b a Johann b a b a b", "b a")
    features, remarks = conll.word_features(given, tokenizer, 8, 3)
    assert shown(features) == [
        "[CLS] a b a jo ##han ##n [SEP]", "[CLS] jo ##han ##n b a b [SEP]", "[CLS] b a b a b [SEP]", "[CLS] b a [SEP]",
    ]  # fmt: skip
    assert features.owner.tolist() == [0, 0, 0, 1] and remarks == {conll.WINDOWS: 1}
    weights = np.split(features.position_labels["label_weights"], features.ends[:-1])
    assert [np.flatnonzero(part).tolist() for part in weights] == [
        [1, 2, 3, 4], [4, 5], [3, 4, 5], [1, 2],
    ]  # fmt: skip
    assert labels_of(given, features) == given.labels
    short = sentences("a Johann b", "b a")
    plain, windows = (conll.word_features(short, tokenizer, 8, stride)[0] for stride in (None, 3))
    for name, column in plain.arrays().items():
        np.testing.assert_array_equal(windows.arrays()[name], column)


def test_running_text_is_split_into_words_like_those_of_conll_files():
    for text, words in (
        ("Ada lives in Paris.", "Ada lives in Paris ."),
        ('("U.S." — don\'t!)', '( " U.S . " — don\'t ! )'),
        ("  $5,000 / km² ...", "$5,000 / km² . . ."),
        ("我爱北京。IBM与", "我 爱 北 京 。 IBM 与"),
        ("हिन्दी भाषा।", "हिन्दी भाषा ।"),
        (" \t", ""),
    ):
        assert [text[begin:end] for begin, end in conll.word_spans(text)] == words.split()


def test_chunks_may_have_no_type_and_none_at_all_scores_zero():
    assert conll.chunks(["B", "I", "O", "I"]) == [("_", 0, 1), ("_", 3, 3)]
    samples = conll.entity_samples([["O", "O"]], [["O", "O"]], identify("a"))
    assert values(samples) == {"f1": 0.0, "precision": 0.0, "recall": 0.0}


def test_entity_scores_are_those_of_nervaluate_on_random_labels():
    from nervaluate import Evaluator

    numbers = np.random.default_rng(0)
    kinds = ["LOC", "PER", "a-b"]
    names = ["O", "O", "O", "O", *(f"{prefix}-{kind}" for prefix in "BI" for kind in kinds)]
    gold = [numbers.choice(names, n).tolist() for n in numbers.integers(1, 30, 60)]
    # Most labels are right, so that some entities are right.
    result = [[w if numbers.random() < 0.7 else numbers.choice(names) for w in row] for row in gold]
    scores = values(conll.entity_samples(gold, result, identify(range(60))))
    judged = Evaluator(gold, result, tags=kinds, loader="list").evaluate()
    overall = judged["overall"]["strict"]
    assert overall.correct > 20
    expected = {"f1": overall.f1, "precision": overall.precision, "recall": overall.recall}
    expected |= {f"f1_{kind}": judged["entities"][kind]["strict"].f1 for kind in kinds}
    assert list(scores) == list(expected) and scores == pytest.approx(expected, abs=1e-12)
