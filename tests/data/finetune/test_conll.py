"""CoNLL files as people have them, labels of first pieces, and labels of words from predictions."""

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
    word_spans,
)
from bert_cli.data.finetune.metrics import chunks
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


def pairs_of(result):
    return [
        list(zip(w, t, strict=True))
        for w, t in zip(result.words, result.names(result.labels), strict=True)
    ]


def test_words_and_labels_are_the_first_and_the_last_column(tmp_path):
    text = (
        "\ufeffJohann NNP I-NP B-PER\nlives VBZ I-VP O\t\n\n \t\nYork  NNP I-NP  B-LOC\r\n. . O O"
    )
    for end in ("", "\n", "\n\n\n"):
        result = read_conll(put(tmp_path, text + end))
        first, second = pairs_of(result)
        assert first == [("Johann", "B-PER"), ("lives", "O")]
        assert second == [("York", "B-LOC"), (".", "O")]
        assert result.label_names == NAMES and result.remarks == {}
        assert result.labels == [[3, 0], [1, 0]]


def test_tabs_separate_columns_where_there_are_any_and_other_white_space_is_text(tmp_path):
    result = read_conll(put(tmp_path, "New York\tB-LOC\n10\u00a0000\tO\n\u3000\tO\n"))
    assert result.words == [["New York", "10\u00a0000", "\u3000"]]
    result = read_conll(put(tmp_path, "10\u00a0000 O\n\u2028 B-LOC\n"))
    assert result.words == [["10\u00a0000", "\u2028"]]


def test_document_marks_are_left_out_and_counted(tmp_path):
    result = read_conll(
        put(tmp_path, "-DOCSTART- -X- O O\n\na A B O\n-DOCSTART- -X- O O\nb A B O\n")
    )
    assert result.words == [["a"], ["b"]] and result.remarks == {DOCUMENTS: 2}


def test_comments_are_left_out_and_a_word_that_is_a_hash_is_not(tmp_path):
    result = read_conll(put(tmp_path, "# id 52 domain=en\n# _ _ O\n#1 _ _ O\n# _ _ B-PER\n"))
    assert result.words == [["#", "#1", "#"]] and result.remarks == {COMMENTS: 1}
    result = read_conll(put(tmp_path, "# text = ends with O\n#\tO\n# a\tO\n"))
    assert result.words == [["#", "# a"]] and result.remarks == {COMMENTS: 1}


def test_iob1_becomes_bio_and_is_counted(tmp_path):
    # Two adjacent persons, a location after a person, a sentence that starts with I-.
    text = "a I-PER\nb I-PER\na B-PER\nb I-LOC\na O\nb I-LOC\n\na I-LOC\n"
    result = read_conll(put(tmp_path, text))
    assert result.names(result.labels) == [
        ["B-PER", "I-PER", "B-PER", "B-LOC", "O", "B-LOC"], ["B-LOC"],
    ]  # fmt: skip
    assert result.remarks == {CONVERTED: 4}


def test_bio_is_unchanged(tmp_path):
    text = "a B-PER\nb I-PER\nb B-PER\na O\nb B\na I\n"
    result = read_conll(put(tmp_path, text))
    assert result.names(result.labels) == [["B-PER", "I-PER", "B-PER", "O", "B", "I"]]
    assert result.remarks == {} and result.label_names == ("O", "B", "I", "B-PER", "I-PER")


def test_the_entities_of_conll_2003_are_those_of_its_annotators(tmp_path):
    """The first two sentences of its training file, as published in IOB1."""
    text = (
        "-DOCSTART- -X- -X- O\n\nEU NNP B-NP I-ORG\nrejects VBZ B-VP O\nGerman JJ B-NP I-MISC\ncall NN I-NP O\n"
        "to TO B-VP O\nboycott VB I-VP O\nBritish JJ B-NP I-MISC\nlamb NN I-NP O\n. . O O\n\n"
        "Peter NNP B-NP I-PER\nBlackburn NNP I-NP I-PER\n"
    )
    result = read_conll(put(tmp_path, text))
    entities = [
        [(kind, " ".join(words[first : last + 1])) for kind, first, last in chunks(labels)]
        for words, labels in zip(result.words, result.names(result.labels), strict=True)
    ]
    assert entities == [
        [("ORG", "EU"), ("MISC", "German"), ("MISC", "British")], [("PER", "Peter Blackburn")]
    ]  # fmt: skip
    assert result.label_names == ("O", "B-MISC", "I-MISC", "B-ORG", "I-ORG", "B-PER", "I-PER")


def test_given_label_names_keep_their_numbers(tmp_path):
    path = put(tmp_path, "a B-LOC\nb I-LOC\n")
    assert read_conll(path).label_names == ("O", "B-LOC", "I-LOC")
    result = read_conll(path, NAMES[::-1])
    assert result.label_names == NAMES[::-1] and result.labels == [[3, 2]]


def test_a_broken_file_is_reported_with_its_line(tmp_path):
    for text, message in (
        ("a O\nb\n", r"\(line 2\): 'b' has 1 column; give 2 as on the first line"),
        ("a\nb\n", r"\(line 1\): 'a' has 1 column; give two or more"),
        ("a O\n\nNew York O\n", r"\(line 3\): 'New York O' has 3 columns; give 2"),
        ("a\tO\n\tO\n", r"\(line 2\): has a label, 'O', but no word"),
        ("a O\nb S-PER\n", r"\(line 2\): label 'S-PER' is not O .*; convert the file to BIO"),
        ("a O\nb E-PER\n", r"\(line 2\): label 'E-PER' is not O .*; convert the file to BIO"),
        ("a O\nb B-\n", r"\(line 2\): label 'B-' is not O .*; fix the label"),
        ("a O\nb PER\n", r"\(line 2\): label 'PER' is not O .*; fix the label"),
        ("a O\n\nb B-PERS\n", r"\(line 3\): label 'B-PERS' is unknown; .*; did you mean 'B-PER'\?"),
        ("", "is empty"),
        ("-DOCSTART- -X- O O\n", "contains no sentences"),
        (b"a O\n\xff O\n", r"\(line 2\): byte 0xFF"),
    ):
        with pytest.raises(DataError, match=rf"dev\.txt:? ?{message}"):
            read_conll(put(tmp_path, text), NAMES)


def sentences(*texts):
    words = [text.split(" ") for text in texts]
    numbers = count(1)
    return Sentences(words, [[next(numbers) % 5 for _ in row] for row in words], NAMES)


def shown(features):
    parts = np.split(features.tokens, features.ends[:-1])
    return [" ".join(PIECES[number] for number in part) for part in parts]


def test_the_first_piece_of_a_word_carries_its_label(tokenizer):
    given = sentences("Johann lives", "New York.")
    features, where = word_features(given, tokenizer, 16)
    assert shown(features) == ["[CLS] jo ##han ##n lives [SEP]", "[CLS] new york . [SEP]"]
    labels = features.position_labels
    assert labels["label_weights"].tolist() == [0, 1, 0, 0, 1, 0, 0, 1, 1, 0, 0]
    assert labels["labels"].tolist() == [0, 1, 0, 0, 2, 0, 0, 3, 4, 0, 0]
    assert labels["labels"].dtype == np.int32 and labels["label_weights"].dtype == np.float32
    assert features.segments.tolist() == [0] * 11 and features.segments.dtype == np.int8
    assert where.positions.tolist() == [1, 4, 7, 8] and where.remarks == {}
    assert word_labels(where, np.arange(11)) == [[1, 4], [7, 8]]


def test_a_long_sentence_is_cut_between_words_and_keeps_them_all(tokenizer):
    given = sentences("a Johann b a b a", "a b a")
    features, where = word_features(given, tokenizer, 5)
    assert shown(features) == [
        "[CLS] a [SEP]", "[CLS] jo ##han ##n [SEP]", "[CLS] b a b [SEP]", "[CLS] a [SEP]", "[CLS] a b a [SEP]",
    ]  # fmt: skip
    assert features.lengths.max() == 5 and where.remarks == {CUT_SENTENCES: 1}
    assert word_labels(where, features.position_labels["labels"]) == given.labels


def test_a_word_without_pieces_is_unknown_and_one_that_is_too_long_is_cut(tokenizer):
    given = sentences("a \u200b\x07 b", "------- a")
    features, where = word_features(given, tokenizer, 5)
    assert shown(features) == ["[CLS] a [UNK] b [SEP]", "[CLS] - - - [SEP]", "[CLS] a [SEP]"]
    assert where.remarks == {NO_PIECES: 1, CUT_WORDS: 1, CUT_SENTENCES: 1}
    assert word_labels(where, features.position_labels["labels"]) == given.labels


def test_a_special_token_in_the_text_is_text(tokenizer):
    features, _ = word_features(sentences("[SEP] a"), tokenizer, 16)
    assert features.tokens.tolist().count(tokenizer.special.sep) == 1


def test_words_keep_their_labels_at_every_length(tokenizer):
    numbers = np.random.default_rng(3)
    texts = [" ".join(numbers.choice(["Johann", "a", "York.", "--"], n)) for n in range(1, 30)]
    given = sentences(*texts)
    for length in (3, 4, 7, 64):
        features, where = word_features(given, tokenizer, length)
        assert features.lengths.max() <= length
        assert features.position_labels["label_weights"].sum() == sum(map(len, given.words))
        assert word_labels(where, features.position_labels["labels"]) == given.labels
        starts = features.tokens[features.starts]
        assert (starts == tokenizer.special.cls).all()
        assert (features.tokens[features.ends - 1] == tokenizer.special.sep).all()


def test_a_length_without_room_for_a_word_is_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"max_seq_length \(2\): has no room for a word"):
        word_features(sentences("a"), tokenizer, 2)


def test_running_text_is_split_into_words_like_those_of_conll_files():
    for text, words in (
        ("Ada lives in Paris.", "Ada lives in Paris ."),
        ('("U.S." — don\'t!)', '( " U.S . " — don\'t ! )'),
        ("  $5,000 / km² ...", "$5,000 / km² . . ."),
        ("我爱北京。IBM与", "我 爱 北 京 。 IBM 与"),
        ("हिन्दी भाषा।", "हिन्दी भाषा ।"),
        (" \t", ""),
    ):
        assert [text[begin:end] for begin, end in word_spans(text)] == words.split()
