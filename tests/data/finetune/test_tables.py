"""A person's own tables: quoting, columns, labels, and the cut of a development set."""

import csv
import gzip
import json

import numpy as np
import pytest

from bert_cli.data.finetune.examples import EMPTY_TEXT, TextExamples
from bert_cli.data.finetune.tables import BLANK, QUOTED, hold_out, read_table
from bert_cli.errors import ConfigError, DataError


def put(folder, name, text):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def read(path, texts=("text",), label="label", names=None):
    return read_table(path, text_columns=texts, label_column=label, label_names=names)


def test_csv_texts_hold_quotes_commas_and_line_ends(tmp_path):
    path = put(tmp_path, "a.csv", '\ufefflabel,text\r\npos,"a, ""b""\r\nc\u2028"\r\nneg,d\r\n')
    found = read(path)
    assert found.first == ['a, "b"\r\nc\u2028', "d"]
    assert found.label_names == ("neg", "pos") and found.second is None
    assert found.labels is not None and found.labels.tolist() == [1, 0]
    assert found.labels.dtype == np.int32
    assert found.ids == ["0", "1"] and found.remarks == {}


def test_tsv_quotes_are_text_and_a_text_in_quotes_is_counted(tmp_path):
    path = put(tmp_path, "a.tsv", 'text\tlabel\n"open\t1\n"both"\t0\nplain\t1\n')
    found = read(path)
    assert found.first == ['"open', '"both"', "plain"] and found.remarks == {QUOTED: 1}


def test_two_text_columns_make_pairs_and_no_label_column_a_file_to_predict(tmp_path):
    path = put(tmp_path, "a.csv", "one,two,label\na,b,1\nc,d,\n")
    found = read(path, ("two", "one"), None)
    assert (found.first, found.second) == (["b", "d"], ["a", "c"])
    assert found.labels is None and found.label_names is None


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_json_lines_are_read(tmp_path, name):
    rows = [{"text": "a", "label": 10}, {"text": "\u2028", "label": 9, "more": [1]}]
    found = read(
        put(tmp_path, name, "\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    )
    assert found.first == ["a", "\u2028"] and found.label_names == ("9", "10")
    assert found.labels is not None and found.labels.tolist() == [1, 0]


def test_a_json_list_is_read_and_its_items_are_told_by_number(tmp_path):
    rows = [{"text": "a", "label": True}, {"text": None, "label": False}]
    found = read(put(tmp_path, "a.json", json.dumps(rows, indent=1)))
    assert found.first == ["a", ""] and found.label_names == ("false", "true")
    assert found.remarks == {EMPTY_TEXT: 1}
    for row, told in ((7, "is no object"), ({"text": "b"}, "has no column 'label'")):
        path = put(tmp_path, "a.json", json.dumps([rows[0], row]))
        with pytest.raises(DataError, match=rf"a\.json \(item 2\): {told}"):
            read(path)
    with pytest.raises(DataError, match=r"a\.json \(item 2\): label 'false' is unknown"):
        read(put(tmp_path, "a.json", json.dumps(rows)), names=("true", "other"))
    with pytest.raises(DataError, match=r"a\.json: is no JSON"):
        read(put(tmp_path, "a.json", json.dumps(rows)[:-1]))


def test_packed_tables_are_read(tmp_path):
    path = put(tmp_path, "a.csv.gz", gzip.compress(b"text,label\na,1\nb,0\n"))
    assert read(path).first == ["a", "b"]


def test_empty_texts_and_blank_lines_are_counted(tmp_path):
    found = read(put(tmp_path, "a.csv", "text,label\n,1\n\n  ,0\nb,0\n\n"))
    assert found.first == ["", "  ", "b"] and found.remarks == {EMPTY_TEXT: 2, BLANK: 2}


def test_a_long_text_is_read_and_python_s_limit_is_as_before(tmp_path):
    before = csv.field_size_limit()
    found = read(put(tmp_path, "a.csv", f"text,label\n{'x' * 200_000},1\nb,0\n"))
    assert len(found.first[0]) == 200_000 and csv.field_size_limit() == before


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Text,label\na,1\n", r"\(line 1\): has no column 'text'; did you mean 'Text'\? it has 'Text', 'label'"),
        ("text;label\na;1\n", r"\(line 1\): has no column 'text'.* it has 'text;label'"),
        ("text,label,text\na,1,b\n", r"\(line 1\): has two columns 'text'"),
        ("text,label\na,1\nb\n", r"\(line 3\): has 1 cells for 2 columns"),
        ('text,label\n"a\nb",1\nc,d,e\n', r"\(line 4\): has 3 cells for 2 columns"),
        ("text,label\na,1\nb, \n", r"\(line 3\): 'label' is empty"),
        ('text,label\na,1\n"b\nc,1\nd,0\n', r"\(line 3\): is no CSV"),
        ('text,label\na,1\n"b"c,1\n', r"\(line 3\): is no CSV"),
        ("text,label\n", "holds no rows"), ("", "is empty"),
        ("text,label\na,1\nb,1\n", r"\(label\): every row has the label '1'"),
        (b"text,label\na\xff,1\n", r"\(line 2\): byte 0xFF is no UTF-8"),
    ],
)  # fmt: skip
def test_a_broken_csv_file_is_told_with_its_place(tmp_path, text, told):
    with pytest.raises(DataError, match=rf"a\.csv:? ?{told}"):
        read(put(tmp_path, "a.csv", text))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"text": "b"}', "has no column 'label'"), ('{"label": 1, "txt": "b"}', "'text'; did you mean 'txt'"),
        ('{"text": 3, "label": 1}', "'text' is a number"), ('{"text": "b", "label": null}', "the label is null"),
        ('{"text": "b", "label": ""}', "'label' is empty"), ('{"text"', "is no JSON"), ("", "is no JSON"),
    ],
)  # fmt: skip
def test_a_broken_json_line_is_told_with_its_number(tmp_path, line, told):
    good = '{"text": "a", "label": 0}'
    with pytest.raises(DataError, match=rf"a\.jsonl \(line 2\): .*{told}"):
        read(put(tmp_path, "a.jsonl", f"{good}\n{line}\n{good}\n"))


def test_given_labels_keep_their_numbers_and_an_unknown_one_is_told(tmp_path):
    path = put(tmp_path, "dev.csv", "text,label\na,pos\nb,pos\n")
    found = read(path, names=("pos", "neg"))
    assert found.label_names == ("pos", "neg")
    assert found.labels is not None and found.labels.tolist() == [0, 0]
    with pytest.raises(
        DataError, match=r"dev\.csv \(line 2\): label 'pos' is unknown; did you mean 'Pos'\?"
    ):
        read(path, names=("Pos", "neg"))


def test_a_file_of_another_kind_a_missing_one_and_no_text_column_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"a\.xlsx: is of no known kind; name it \.csv, \.tsv"):
        read(put(tmp_path, "a.xlsx", "PK"))
    for name in ("none.csv", "none.tsv", "none.json", "none.jsonl"):
        with pytest.raises(DataError, match=rf"{name}: no such file"):
            read(tmp_path / name)
    for texts in ((), ("a", "b", "c")):
        with pytest.raises(ConfigError, match="text_column"):
            read(tmp_path / "none.csv", texts)


def examples(labels, names=("a", "b", "c")):
    count = len(labels)
    texts = [f"text {n}" for n in range(count)]
    column = np.array(labels, np.int32 if names else np.float32)
    return TextExamples(texts, None, column, [str(n) for n in range(count)], names, {"odd": 1})


def test_the_same_share_of_each_label_is_held_out_and_nothing_is_lost():
    whole = examples([0] * 60 + [1] * 30 + [2] * 10)
    train, held = hold_out(whole, 0.1, 7)
    assert np.bincount(held.labels).tolist() == [6, 3, 1]
    assert sorted(train.ids + held.ids, key=int) == whole.ids
    assert held.ids == sorted(held.ids, key=int) and train.ids == sorted(train.ids, key=int)


def test_the_seed_alone_tells_what_is_held_out():
    whole = examples([0, 1] * 50)
    one, again, other = (hold_out(whole, 0.2, seed)[1].ids for seed in (7, 7, 8))
    assert one == again and one != other


def test_each_label_keeps_an_example_and_spares_one_when_it_has_two():
    train, held = hold_out(examples([0, 0, 1, 1, 1, 2]), 0.01, 1)
    assert np.bincount(held.labels, minlength=3).tolist() == [1, 1, 0]
    train, held = hold_out(examples([0, 0, 1, 1, 1, 2]), 0.99, 1)
    assert np.bincount(train.labels).tolist() == [1, 1, 1]


def test_scores_are_held_out_as_one_label():
    train, held = hold_out(examples(np.arange(10) / 3, None), 0.3, 1)
    assert (len(train), len(held)) == (7, 3)


def test_a_share_that_is_none_and_too_few_examples_are_refused():
    for share in (0, 1, -0.1, 10):
        with pytest.raises(
            ConfigError, match=r"held_out_fraction \(.*\): give a share between 0 and 1"
        ):
            hold_out(examples([0, 1] * 5), share, 1)
    with pytest.raises(DataError, match="no label has two examples"):
        hold_out(examples([0, 1, 2]), 0.5, 1)
