"""CoNLL files as people have them, first-piece labels, and predictions brought back to words."""

from itertools import count

import numpy as np
import pytest

from bert_cli.data.finetune.conll import (
    COMMENTS,
    CONVERTED,
    CUT_SENTENCES,
    CUT_WORDS,
    DOCUMENTS,
    NO_PIECES,
    Sentences,
    read_conll,
    word_features,
    word_labels,
    words_of,
)
from bert_cli.data.records.tokenizer import read_tokenizer
from bert_cli.errors import ConfigError, DataError

PIECES = [
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]",
    "jo", "##han", "##n", "lives", "in", "new", "york", ".", "-", "a", "b",
]  # fmt: skip
NAMES = ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")


@pytest.fixture
def tokenizer(tmp_path):
    (tmp_path / "vocab.txt").write_text("".join(f"{piece}\n" for piece in PIECES))
    return read_tokenizer(tmp_path)


def put(folder, text):
    path = folder / "dev.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def told(found):
    return [
        list(zip(w, t, strict=True))
        for w, t in zip(found.words, found.names(found.labels), strict=True)
    ]


@pytest.mark.parametrize("end", ["", "\n", "\n\n\n"])
def test_words_and_labels_are_the_first_and_the_last_column(tmp_path, end):
    text = (
        "\ufeffJohann NNP I-NP B-PER\nlives VBZ I-VP O\t\n\n \t\nYork  NNP I-NP  B-LOC\r\n. . O O"
    )
    found = read_conll(put(tmp_path, text + end))
    assert told(found) == [[("Johann", "B-PER"), ("lives", "O")], [("York", "B-LOC"), (".", "O")]]
    assert found.label_names == NAMES and found.remarks == {} and len(found) == 2
    assert found.labels == [[3, 0], [1, 0]]


def test_tabs_part_columns_where_there_are_any_and_other_white_space_is_text(tmp_path):
    found = read_conll(put(tmp_path, "New York\tB-LOC\n10\u00a0000\tO\n\u3000\tO\n"))
    assert found.words == [["New York", "10\u00a0000", "\u3000"]]
    found = read_conll(put(tmp_path, "10\u00a0000 O\n\u2028 B-LOC\n"))
    assert found.words == [["10\u00a0000", "\u2028"]]


def test_document_marks_are_left_out_and_counted(tmp_path):
    found = read_conll(
        put(tmp_path, "-DOCSTART- -X- O O\n\na A B O\n-DOCSTART- -X- O O\nb A B O\n")
    )
    assert found.words == [["a"], ["b"]] and found.remarks == {DOCUMENTS: 2}


def test_comments_are_left_out_and_a_word_that_is_a_hash_is_not(tmp_path):
    found = read_conll(put(tmp_path, "# id 52 domain=en\n# _ _ O\n#1 _ _ O\n# _ _ B-PER\n"))
    assert found.words == [["#", "#1", "#"]] and found.remarks == {COMMENTS: 1}
    found = read_conll(put(tmp_path, "# text = ends with O\n#\tO\n# a\tO\n"))
    assert found.words == [["#", "# a"]] and found.remarks == {COMMENTS: 1}


def test_iob1_becomes_bio_and_is_counted(tmp_path):
    # Two persons that touch, a place behind a person, a sentence that starts inside.
    text = "a I-PER\nb I-PER\na B-PER\nb I-LOC\na O\nb I-LOC\n\na I-LOC\n"
    found = read_conll(put(tmp_path, text))
    assert found.names(found.labels) == [
        ["B-PER", "I-PER", "B-PER", "B-LOC", "O", "B-LOC"], ["B-LOC"],
    ]  # fmt: skip
    assert found.remarks == {CONVERTED: 4}


def test_bio_stays_as_it_is(tmp_path):
    text = "a B-PER\nb I-PER\nb B-PER\na O\nb B\na I\n"
    found = read_conll(put(tmp_path, text))
    assert found.names(found.labels) == [["B-PER", "I-PER", "B-PER", "O", "B", "I"]]
    assert found.remarks == {} and found.label_names == ("O", "B", "I", "B-PER", "I-PER")


def test_given_label_names_keep_their_numbers(tmp_path):
    path = put(tmp_path, "a B-LOC\nb I-LOC\n")
    assert read_conll(path).label_names == ("O", "B-LOC", "I-LOC")
    found = read_conll(path, NAMES[::-1])
    assert found.label_names == NAMES[::-1] and found.labels == [[3, 2]]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a O\nb\n", r"\(line 2\): 'b' has 1 column; give 2 as on the first line"),
        ("a\nb\n", r"\(line 1\): 'a' has 1 column; give two or more"),
        ("a O\n\nNew York O\n", r"\(line 3\): 'New York O' has 3 columns; give 2"),
        ("a\tO\n\tO\n", r"\(line 2\): has a label, 'O', and no word"),
        ("a O\nb S-PER\n", r"\(line 2\): label 'S-PER' is neither .*; convert the file to BIO"),
        ("a O\nb E-PER\n", r"\(line 2\): label 'E-PER' is neither .*; convert the file to BIO"),
        ("a O\nb B-\n", r"\(line 2\): label 'B-' is neither .*; mend it"),
        ("a O\nb PER\n", r"\(line 2\): label 'PER' is neither .*; mend it"),
        ("a O\n\nb B-PERS\n", r"\(line 3\): label 'B-PERS' is unknown; did you mean 'B-PER'\?"),
        ("", "is empty"), ("-DOCSTART- -X- O O\n", "holds no sentences"),
        (b"a O\n\xff O\n", r"\(line 2\): byte 0xFF"),
    ],
)  # fmt: skip
def test_a_broken_file_is_told_with_its_place(tmp_path, text, place):
    with pytest.raises(DataError, match=rf"dev\.txt:? ?{place}"):
        read_conll(put(tmp_path, text), NAMES)


def sentences(*texts):
    words = [text.split(" ") for text in texts]
    numbers = count(1)
    return Sentences(words, [[next(numbers) % 5 for _ in row] for row in words], NAMES)


def shown(features):
    parts = np.split(features.tokens, features.ends[:-1])
    return [" ".join(PIECES[number] for number in part) for part in parts]


def test_a_word_s_first_piece_carries_its_label(tokenizer):
    given = sentences("Johann lives", "New York.")
    features, places = word_features(given, tokenizer, 16)
    assert shown(features) == ["[CLS] jo ##han ##n lives [SEP]", "[CLS] new york . [SEP]"]
    by_place = features.place_labels
    assert by_place["label_weights"].tolist() == [0, 1, 0, 0, 1, 0, 0, 1, 1, 0, 0]
    assert by_place["labels"].tolist() == [0, 1, 0, 0, 2, 0, 0, 3, 4, 0, 0]
    assert by_place["labels"].dtype == np.int32 and by_place["label_weights"].dtype == np.float32
    assert features.segments.tolist() == [0] * 11 and features.segments.dtype == np.int8
    assert places.places.tolist() == [1, 4, 7, 8] and places.remarks == {}
    assert word_labels(places, np.arange(11)) == [[1, 4], [7, 8]]


def test_a_long_sentence_is_cut_between_words_and_keeps_them_all(tokenizer):
    given = sentences("a Johann b a b a", "a b a")
    features, places = word_features(given, tokenizer, 5)
    assert shown(features) == [
        "[CLS] a [SEP]", "[CLS] jo ##han ##n [SEP]", "[CLS] b a b [SEP]", "[CLS] a [SEP]", "[CLS] a b a [SEP]",
    ]  # fmt: skip
    assert features.lengths.max() == 5 and places.remarks == {CUT_SENTENCES: 1}
    assert word_labels(places, features.place_labels["labels"]) == given.labels


def test_a_word_without_pieces_is_unknown_and_one_that_is_too_long_is_cut(tokenizer):
    given = sentences("a \u200b\x07 b", "------- a")
    features, places = word_features(given, tokenizer, 5)
    assert shown(features) == ["[CLS] a [UNK] b [SEP]", "[CLS] - - - [SEP]", "[CLS] a [SEP]"]
    assert places.remarks == {NO_PIECES: 1, CUT_WORDS: 1, CUT_SENTENCES: 1}
    assert word_labels(places, features.place_labels["labels"]) == given.labels


def test_a_special_token_in_the_text_is_text(tokenizer):
    features, _ = word_features(sentences("[SEP] a"), tokenizer, 16)
    assert features.tokens.tolist().count(tokenizer.special.sep) == 1


def test_labels_come_back_whatever_the_length(tokenizer):
    numbers = np.random.default_rng(3)
    texts = [" ".join(numbers.choice(["Johann", "a", "York.", "--"], n)) for n in range(1, 30)]
    given = sentences(*texts)
    for length in (3, 4, 7, 64):
        features, places = word_features(given, tokenizer, length)
        assert features.lengths.max() <= length
        assert features.place_labels["label_weights"].sum() == sum(map(len, given.words))
        assert word_labels(places, features.place_labels["labels"]) == given.labels
        starts = features.tokens[features.starts]
        assert (starts == tokenizer.special.cls).all()
        assert (features.tokens[features.ends - 1] == tokenizer.special.sep).all()


def test_a_length_that_holds_no_word_is_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"max_seq_length \(2\): holds no word"):
        word_features(sentences("a"), tokenizer, 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Ada lives in Paris.", "Ada lives in Paris ."),
        ('("U.S." — don\'t!)', '( " U.S . " — don\'t ! )'),
        ("  $5,000 / km² ...", "$5,000 / km² . . ."),
        ("我爱北京。IBM与", "我 爱 北 京 。 IBM 与"),
        ("हिन्दी भाषा।", "हिन्दी भाषा ।"),
        (" \t", ""),
    ],
)
def test_running_text_is_parted_into_words_as_conll_files_are(text, words):
    assert [text[begin:end] for begin, end in words_of(text)] == words.split()
