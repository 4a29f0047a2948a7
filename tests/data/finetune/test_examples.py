"""What the readers share: lines, JSON lines, label numbers, and examples that fit together."""

import gzip

import numpy as np
import pytest

from bert_cli.data.finetune.examples import (
    TextExamples,
    label_numbers,
    label_word,
    missing_column,
    nearest,
    read_json_lines,
    read_lines,
    read_text,
    sorted_labels,
    text_of,
    write_lines,
)
from bert_cli.errors import DataError


def three(**changes):
    fields = {
        "first": ["a", "b", "c"], "second": None, "labels": np.array([0, 1, 0], np.int32),
        "ids": ["0", "1", "2"], "label_names": ("no", "yes"), "remarks": {"odd": 1},
    }  # fmt: skip
    return TextExamples(**{**fields, **changes})


@pytest.mark.parametrize(
    "changes",
    [{"second": ["x"]}, {"labels": np.array([1], np.int32)}, {"ids": ["0"]}, {"first": ["a"]}],
)
def test_columns_of_other_lengths_are_refused(changes):
    with pytest.raises(DataError, match="differs from the"):
        three(**changes)


def test_no_examples_are_refused():
    with pytest.raises(DataError, match=r"examples \(0\): there are none"):
        three(first=[], labels=None, ids=[])


def test_rows_are_taken_in_the_order_asked_for_without_the_file_s_remarks():
    taken = three(second=["x", "y", "z"]).take(np.array([2, 0]))
    assert (taken.first, taken.second, taken.ids) == (["c", "a"], ["z", "x"], ["2", "0"])
    assert taken.labels is not None and taken.labels.tolist() == [0, 0]
    assert taken.label_names == ("no", "yes") and taken.remarks == {} and len(taken) == 2


def test_only_a_line_feed_ends_a_line(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffa\u2028b\u0085\x0c\rc\r\n\r\n d \n\n".encode())
    assert read_lines(path) == ["a\u2028b\u0085\x0c\rc", "", " d "]


def test_a_packed_file_is_unpacked(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"a\nb\n"))
    assert read_lines(path) == ["a", "b"]
    path.write_bytes(gzip.compress(b"a\nb\n" * 1000)[:-20])
    with pytest.raises(DataError, match=r"a\.txt\.gz: cannot be read"):
        read_lines(path)
    path.write_bytes(b"no gzip")
    with pytest.raises(DataError, match=r"a\.txt\.gz: cannot be read"):
        read_lines(path)


@pytest.mark.parametrize("data", [b"", b" \n\n", "\ufeff\n".encode()])
def test_an_empty_file_is_refused(tmp_path, data):
    (tmp_path / "a.txt").write_bytes(data)
    with pytest.raises(DataError, match=r"a\.txt: is empty"):
        read_text(tmp_path / "a.txt")


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    for name in ("train.50k.json", "other.csv"):
        (tmp_path / name).touch()
    # The nearest name first; of a folder that is missing too, what lies in the one above.
    told = rf"no such file; {tmp_path} holds 'train.50k.json', 'other.csv'; check the path"
    for missing in ("train.json", "train.50/dev.json"):
        with pytest.raises(DataError, match=rf"{missing}: {told}"):
            read_text(tmp_path / missing)
    with pytest.raises(DataError, match="cannot be read"):
        read_text(tmp_path)


def test_a_byte_that_is_no_utf_8_is_told_with_its_line(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\nna\xefve\n")
    with pytest.raises(DataError, match=r"a\.txt \(line 3\): byte 0xEF is no UTF-8"):
        read_text(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"a": ', "is no JSON"), ("[1]", "is a list"), ("3", "is a number"), ("null", "is null"),
        ("true", "is true or false"), ('"a"', "is a string"), ("", "is no JSON"),
    ],
)  # fmt: skip
def test_a_line_that_is_no_object_is_told_with_its_number(tmp_path, line, told):
    (tmp_path / "a.jsonl").write_text(f'{{"a": 1}}\n{line}\n{{"a": 2}}\n')
    with pytest.raises(DataError, match=rf"a\.jsonl \(line 2\): {told}"):
        list(read_json_lines(tmp_path / "a.jsonl"))


def test_json_objects_come_with_the_number_of_their_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": "\u2028"}\n{"a": null}\n')
    rows = dict(read_json_lines(tmp_path / "a.jsonl"))
    assert rows == {1: {"a": "\u2028"}, 2: {"a": None}}
    assert [text_of(row, "a", "") for row in rows.values()] == ["\u2028", ""]


@pytest.mark.parametrize(
    ("value", "kind"), [(3, "a number"), (["x"], "a list"), ({}, "an object"), (True, "true or")]
)
def test_a_field_that_is_no_string_is_no_text(value, kind):
    with pytest.raises(DataError, match=f"f.jsonl .line 4.: 'a' is {kind}"):
        text_of({"a": value}, "a", "f.jsonl (line 4)")


def test_a_missing_column_is_told_with_those_there_are_and_the_nearest():
    told = str(missing_column("f.csv (line 1)", "text", ["Text ", "label"]))
    assert (
        told
        == "f.csv (line 1): has no column 'text'; did you mean 'Text '? it has 'Text ', 'label'"
    )
    assert nearest("zzz", ["Text", "label"]) == ""
    many = str(missing_column("f", "x", [f"column {n}" for n in range(30)]))
    assert many.endswith("'column 19' and 10 more")


def test_labels_become_their_numbers_and_an_unknown_one_is_told_with_its_line(tmp_path):
    rows = [(2, "yes"), (3, "no")]
    numbers = label_numbers(tmp_path, rows, ("no", "yes"))
    assert numbers.tolist() == [1, 0] and numbers.dtype == np.int32
    with pytest.raises(
        DataError, match=r"dev \(line 7\): label 'Yes' is unknown; did you mean 'yes'\?"
    ):
        label_numbers(tmp_path / "dev", [*rows, (7, "Yes")], ("no", "yes"))


def test_labels_are_sorted_by_value_when_all_are_whole_numbers():
    assert sorted_labels(["10", "9", "-1", "9"]) == ("-1", "9", "10")
    assert sorted_labels(["10", "9", "b"]) == ("10", "9", "b")
    assert sorted_labels(["1.5", "10", "9"]) == ("1.5", "10", "9")


def test_labels_of_json_are_words():
    assert [label_word(value, "") for value in ("a", 3, True, False)] == ["a", "3", "true", "false"]
    for value in (None, [], {}):
        with pytest.raises(DataError, match=r"f \(line 1\): the label is"):
            label_word(value, "f (line 1)")


def test_a_file_is_written_whole_and_what_cannot_be_written_is_told(tmp_path):
    write_lines(tmp_path / "new" / "a.txt", ["a", "ß"])
    assert (tmp_path / "new" / "a.txt").read_bytes() == "a\nß\n".encode()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.txt"]
    with pytest.raises(DataError, match="cannot be written"):
        write_lines(tmp_path / "new" / "a.txt" / "b.txt", ["a"])
