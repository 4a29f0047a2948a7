"""Files of texts and labels: lines, JSON, columns, labels, quoting, and held-out examples."""

import csv
import gzip
import json

import numpy as np
import pytest

from bert_cli.data.finetune.tables import (
    BLANK,
    EMPTY_TEXT,
    QUOTED,
    TextExamples,
    hold_out,
    label_numbers,
    label_of,
    missing_column,
    read_json_lines,
    read_lines,
    read_table,
    read_text,
    sorted_labels,
    text_of,
    write_lines,
)
from bert_cli.errors import ConfigError, DataError


def put(folder, name, text):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def read(path, texts=("text",), label="label", names=None):
    return read_table(path, text_columns=texts, label_column=label, label_names=names)


# --- files


def test_only_a_line_feed_ends_a_line(tmp_path):
    text = "\ufeffa\u2028b\u0085\x0c\rc\r\n\r\n d \n\n"
    assert read_lines(put(tmp_path, "a.txt", text)) == ["a\u2028b\u0085\x0c\rc", "", " d "]


def test_a_compressed_file_is_decompressed(tmp_path):
    assert read_lines(put(tmp_path, "a.txt.gz", gzip.compress(b"a\nb\n"))) == ["a", "b"]
    for damaged in (gzip.compress(b"a\nb\n" * 1000)[:-20], b"not gzip"):
        with pytest.raises(DataError, match=r"a\.txt\.gz: cannot be read"):
            read_lines(put(tmp_path, "a.txt.gz", damaged))


def test_empty_files_folders_and_other_encodings_are_refused(tmp_path):
    for data in (b"", b" \n\n", "\ufeff\n".encode()):
        with pytest.raises(DataError, match=r"a\.txt: is empty"):
            read_text(put(tmp_path, "a.txt", data))
    with pytest.raises(DataError, match=r"a\.txt \(line 3\): byte 0xEF is not UTF-8"):
        read_text(put(tmp_path, "a.txt", b"one\ntwo\nna\xefve\n"))
    with pytest.raises(DataError, match="cannot be read"):
        read_text(tmp_path)


def test_a_missing_file_is_reported_with_the_nearest_or_a_few_of_its_kind(tmp_path):
    (tmp_path / "train.50k.json").touch()
    for number in range(7):
        (tmp_path / f"reviews {number}.csv").touch()
        (tmp_path / f"noise {number}.log").touch()
    (tmp_path / "corpus").mkdir()

    def remedy(name):
        with pytest.raises(DataError) as caught:
            read_text(tmp_path / name)
        assert caught.value.problem == "no such file"
        return caught.value.remedy

    assert remedy("train.json") == f"did you mean '{tmp_path}/train.50k.json'?"
    assert remedy("corpsu/dev.csv") == f"did you mean '{tmp_path}/corpus'?"
    files = ", ".join(f"'reviews {number}.csv'" for number in range(5))
    assert remedy("absent.csv") == f"give one of {files} and 2 more in {tmp_path}"
    assert remedy("absent.tsv") == "check the path"


def test_a_line_that_is_not_an_object_is_reported_with_its_number(tmp_path):
    rows = dict(read_json_lines(put(tmp_path, "a.jsonl", '{"a": "\u2028"}\n{"a": null}\n')))
    assert rows == {1: {"a": "\u2028"}, 2: {"a": None}}
    kinds = {
        "[1]": "a list",
        "3": "a number",
        "null": "null",
        "true": "true or false",
        '"a"': "a string",
    }
    for line, kind in {**kinds, '{"a": ': "not JSON", "": "not JSON"}.items():
        path = put(tmp_path, "a.jsonl", f'{{"a": 1}}\n{line}\n{{"a": 2}}\n')
        with pytest.raises(DataError, match=rf"a\.jsonl \(line 2\): is {kind}"):
            list(read_json_lines(path))


def test_a_file_is_written_completely_or_not_at_all(tmp_path):
    write_lines(tmp_path / "new" / "a.txt", ["a", "ß"])
    assert (tmp_path / "new" / "a.txt").read_bytes() == "a\nß\n".encode()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.txt"]
    with pytest.raises(DataError, match="cannot be written"):
        write_lines(tmp_path / "new" / "a.txt" / "b.txt", ["a"])


# --- rows


def test_a_text_is_a_string_or_null():
    where = "f.jsonl (line 4)"
    assert [text_of({"a": value}, "a", where) for value in ("\u2028", None)] == ["\u2028", ""]
    for value, kind in ((3, "a number"), (["x"], "a list"), ({}, "an object"), (True, "true or")):
        with pytest.raises(DataError, match=f"f.jsonl .line 4.: 'a' is {kind}"):
            text_of({"a": value}, "a", where)


def test_a_label_is_a_word_a_number_or_a_truth_value():
    values = ("a", 3, True, False)
    words = [label_of({"label": value}, "label", "") for value in values]
    assert words == ["a", "3", "true", "false"]
    for value in (None, [], {}):
        with pytest.raises(DataError, match=r"f \(line 1\): the label is"):
            label_of({"label": value}, "label", "f (line 1)")


def test_a_missing_column_is_reported_with_the_others_and_the_nearest():
    error = missing_column("f.csv (line 1)", "text", ["Text ", "label"])
    assert str(error) == (
        "f.csv (line 1): has no column 'text', only 'Text ', 'label'; did you mean 'Text '?"
    )
    many = missing_column("f", "x", [f"column {n}" for n in range(30)])
    assert many.problem.endswith("'column 19' and 10 more")


def test_labels_become_their_numbers(tmp_path):
    rows = [(2, "yes"), (3, "no")]
    numbers = label_numbers(tmp_path, rows, ("no", "yes"))
    assert numbers.tolist() == [1, 0] and numbers.dtype == np.int32
    error = (
        r"dev \(line 7\): label 'Yes' is unknown; the labels are 'no', 'yes'; did you mean 'yes'\?"
    )
    with pytest.raises(DataError, match=error):
        label_numbers(tmp_path / "dev", [*rows, (7, "Yes")], ("no", "yes"))


def test_labels_are_sorted_by_value_if_all_are_integers():
    assert sorted_labels(["10", "9", "-1", "9"]) == ("-1", "9", "10")
    assert sorted_labels(["10", "9", "b"]) == ("10", "9", "b")
    assert sorted_labels(["1.5", "10", "9"]) == ("1.5", "10", "9")


# --- tables


def test_csv_texts_contain_quotes_commas_and_line_ends(tmp_path):
    path = put(tmp_path, "a.csv", '\ufefflabel,text\r\npos,"a, ""b""\r\nc\u2028"\r\nneg,d\r\n')
    result = read(path)
    assert result.first == ['a, "b"\r\nc\u2028', "d"]
    assert result.label_names == ("neg", "pos") and result.second is None
    assert result.labels.tolist() == [1, 0] and result.labels.dtype == np.int32
    assert result.ids == ["0", "1"] and result.remarks == {}


def test_tsv_quotes_are_text_and_a_text_in_quotes_is_counted(tmp_path):
    path = put(tmp_path, "a.tsv", 'text\tlabel\n"open\t1\n"both"\t0\nplain\t1\n')
    result = read(path)
    assert result.first == ['"open', '"both"', "plain"] and result.remarks == {QUOTED: 1}


def test_two_text_columns_are_pairs_and_no_label_column_is_a_file_to_predict(tmp_path):
    path = put(tmp_path, "a.csv", "one,two,label\na,b,1\nc,d,\n")
    result = read(path, ("two", "one"), None)
    assert (result.first, result.second) == (["b", "d"], ["a", "c"])
    assert result.labels is None and result.label_names is None
    packed = put(tmp_path, "a.csv.gz", gzip.compress(b"text,label\na,1\nb,0\n"))
    assert read(packed).first == ["a", "b"]


def test_json_lines_and_json_lists_are_read(tmp_path):
    rows = [{"text": "a", "label": 10}, {"text": "\u2028", "label": 9, "more": [1]}]
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    for name, text in (
        ("a.jsonl", lines),
        ("a.json", lines),
        ("b.json", json.dumps(rows, indent=1)),
    ):
        result = read(put(tmp_path, name, text))
        assert result.first == ["a", "\u2028"] and result.label_names == ("9", "10")
        assert result.labels.tolist() == [1, 0]


def test_items_of_a_json_list_are_reported_by_number(tmp_path):
    rows = [{"text": "a", "label": True}, {"text": None, "label": False}]
    result = read(put(tmp_path, "a.json", json.dumps(rows, indent=1)))
    assert result.first == ["a", ""] and result.label_names == ("false", "true")
    assert result.remarks == {EMPTY_TEXT: 1}
    for row, problem in ((7, "is a number"), ({"text": "b"}, "has no column 'label'")):
        path = put(tmp_path, "a.json", json.dumps([rows[0], row]))
        with pytest.raises(DataError, match=rf"a\.json \(item 2\): {problem}"):
            read(path)
    with pytest.raises(DataError, match=r"a\.json \(item 2\): label 'false' is unknown"):
        read(put(tmp_path, "a.json", json.dumps(rows)), names=("true", "other"))
    with pytest.raises(DataError, match=r"a\.json: is not JSON"):
        read(put(tmp_path, "a.json", json.dumps(rows)[:-1]))


def test_empty_texts_and_blank_lines_are_counted(tmp_path):
    result = read(put(tmp_path, "a.csv", "text,label\n,1\n\n  ,0\nb,0\n\n"))
    assert result.first == ["", "  ", "b"] and result.remarks == {EMPTY_TEXT: 2, BLANK: 2}


def test_a_long_text_is_read_and_pythons_limit_is_restored(tmp_path):
    before = csv.field_size_limit()
    result = read(put(tmp_path, "a.csv", f"text,label\n{'x' * 200_000},1\nb,0\n"))
    assert len(result.first[0]) == 200_000 and csv.field_size_limit() == before


def test_a_broken_csv_file_is_reported_with_its_line(tmp_path):
    for text, message in (
        ("Text,label\na,1\n", r"\(line 1\): has no column 'text', only 'Text', 'label'; did you mean 'Text'"),
        ("text;label\na;1\n", r"\(line 1\): has no column 'text', only 'text;label'"),
        ("text,label,text\na,1,b\n", r"\(line 1\): has two columns 'text'"),
        ("text,label\na,1\nb\n", r"\(line 3\): has 1 cells for 2 columns"),
        ('text,label\n"a\nb",1\nc,d,e\n', r"\(line 4\): has 3 cells for 2 columns"),
        ("text,label\na,1\nb, \n", r"\(line 3\): 'label' is empty"),
        ('text,label\na,1\n"b\nc,1\nd,0\n', r"\(line 3\): is not CSV"),
        ('text,label\na,1\n"b"c,1\n', r"\(line 3\): is not CSV"),
        ("text,label\n", "contains no rows"),
        ("", "is empty"),
        ("text,label\na,1\nb,1\n", r"\(label\): every row has the label '1'"),
        (b"text,label\na\xff,1\n", r"\(line 2\): byte 0xFF is not UTF-8"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=rf"a\.csv:? ?{message}"):
            read(put(tmp_path, "a.csv", text))


def test_a_broken_json_line_is_reported_with_its_number(tmp_path):
    good = '{"text": "a", "label": 0}'
    for line, message in (
        ('{"text": "b"}', "has no column 'label'"),
        ('{"label": 1, "txt": "b"}', "'text', only .*did you mean 'txt'"),
        ('{"text": "b", "label": null}', "the label is null"),
        ('{"text": "b", "label": ""}', "'label' is empty"),
        ("", "is not JSON"),
    ):
        with pytest.raises(DataError, match=rf"a\.jsonl \(line 2\): .*{message}"):
            read(put(tmp_path, "a.jsonl", f"{good}\n{line}\n{good}\n"))


def test_given_label_names_keep_their_numbers(tmp_path):
    path = put(tmp_path, "dev.csv", "text,label\na,pos\nb,pos\n")
    result = read(path, names=("pos", "neg"))
    assert result.label_names == ("pos", "neg") and result.labels.tolist() == [0, 0]
    with pytest.raises(DataError, match=r"dev\.csv \(line 2\): label 'pos' is .* mean 'Pos'\?"):
        read(path, names=("Pos", "neg"))


def test_other_kinds_of_files_and_wrong_numbers_of_columns_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"a\.xlsx: is of an unknown kind; name it \.csv, \.tsv"):
        read(put(tmp_path, "a.xlsx", "PK"))
    for name in ("none.csv", "none.tsv", "none.json", "none.jsonl"):
        with pytest.raises(DataError, match=rf"{name}: no such file"):
            read(tmp_path / name)
    for texts in ((), ("a", "b", "c")):
        with pytest.raises(ConfigError, match="text_column"):
            read(tmp_path / "none.csv", texts)


# --- examples


def examples(values, names=("a", "b", "c"), **changes):
    column = np.array(values, np.int32 if names else np.float32)
    numbers = range(len(values))
    fields = {
        "first": [f"text {n}" for n in numbers], "second": None, "labels": column,
        "ids": [str(n) for n in numbers], "label_names": names, "remarks": {"odd": 1},
    }  # fmt: skip
    return TextExamples(**{**fields, **changes})


def test_columns_of_other_lengths_and_no_examples_are_refused():
    for changes in ({"second": ["x"]}, {"labels": np.zeros(1)}, {"ids": ["0"]}, {"first": ["a"]}):
        with pytest.raises(DataError, match="differs in length from the"):
            examples([0, 1, 0], **changes)
    with pytest.raises(DataError, match="examples: there are none"):
        examples([])


def test_rows_are_taken_in_the_given_order_without_the_files_remarks():
    taken = examples([0, 1, 0], second=["x", "y", "z"]).take(np.array([2, 1]))
    assert (taken.first, taken.second, taken.ids) == (["text 2", "text 1"], ["z", "y"], ["2", "1"])
    assert taken.labels.tolist() == [0, 1] and taken.remarks == {} and len(taken) == 2


def test_the_same_fraction_of_each_label_is_held_out_by_the_seed():
    everything = examples([0] * 60 + [1] * 30 + [2] * 10)
    train, held = hold_out(everything, 0.1, 7)
    assert np.bincount(held.labels).tolist() == [6, 3, 1]
    assert sorted(train.ids + held.ids, key=int) == everything.ids
    assert held.ids == sorted(held.ids, key=int) and train.ids == sorted(train.ids, key=int)
    again, other = (hold_out(everything, 0.1, seed)[1].ids for seed in (7, 8))
    assert held.ids == again != other
    train, held = hold_out(examples(np.arange(10) / 3, None), 0.3, 1)
    assert (len(train), len(held)) == (7, 3)  # regression: one stratum


def test_each_label_keeps_an_example_and_gives_one_if_it_has_two():
    rows = examples([0, 0, 1, 1, 1, 2])
    assert np.bincount(hold_out(rows, 0.01, 1)[1].labels, minlength=3).tolist() == [1, 1, 0]
    assert np.bincount(hold_out(rows, 0.99, 1)[0].labels).tolist() == [1, 1, 1]
    for fraction in (0, 1, -0.1, 10):
        with pytest.raises(ConfigError, match=r"held_out_fraction \(.*\): is not between 0 and 1"):
            hold_out(rows, fraction, 1)
    with pytest.raises(DataError, match="no label has two examples"):
        hold_out(examples([0, 1, 2]), 0.5, 1)
