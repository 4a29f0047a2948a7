"""Tables with other delimiters, JSON arrays and files in other encodings, for every reader of rows."""

import json
from collections import Counter

import pytest
from support.contents import put

from bert_cli.data.finetune import tables
from bert_cli.data.io import files
from bert_cli.data.io.documents import marked_lines
from bert_cli.data.io.rows import json_rows, table_rows
from bert_cli.errors import DataError

FIELD = files.Reading(text_field="text")


def rows_of(path, needed=("text", "label")):
    return [dict(row) for _, row in tables.table_rows(path, needed, Counter())]


def sentences(path):
    part = files.recognise(path, FIELD)
    return [line for kind, line in marked_lines(part, FIELD) if kind == "body"]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
@pytest.mark.parametrize("mark", ",;\t|")
def test_the_delimiter_that_gives_the_needed_columns_is_used(name, mark, tmp_path):
    others = ",;\t|".replace(mark, "").replace("\t", " ")
    text = f"One{others}two."
    path = put(tmp_path / name, f"id{mark}text{mark}label\r\n1{mark}{text}{mark}7\r\n")
    assert rows_of(path) == [{"id": "1", "text": text, "label": "7"}]
    assert sentences(path) == [text]
    # Quotes delimit cells, but not between the tabs of a .tsv.
    path = put(tmp_path / name, f'text{mark}label\n"One."{mark}7\n')
    expected = '"One."' if (name, mark) == ("a.tsv", "\t") else "One."
    assert rows_of(path)[0]["text"] == expected and sentences(path) == [expected]


def test_a_delimiter_is_not_guessed_where_the_usual_one_has_the_columns(tmp_path):
    path = put(tmp_path / "a.csv", "text,label,a;b;c;d\nOne; two,1,x\n")
    assert rows_of(path) == [{"text": "One; two", "label": "1", "a;b;c;d": "x"}]
    # A carriage return within a line of a .tsv is text, and in CSV alone it ends a row.
    assert rows_of(put(tmp_path / "a.tsv", "text\tlabel\na\rb\t1\n"))[0]["text"] == "a\rb"
    assert len(rows_of(put(tmp_path / "a.csv", "text,label\ra,1\rb,2\r"))) == 2
    assert rows_of(put(tmp_path / "a.csv", "text\na\ntext\n"), ["text"])[1] == {"text": "text"}


def test_an_array_of_objects_is_read_as_a_table_and_named_elsewhere(tmp_path):
    array = "\ufeff\n" + json.dumps([{"text": "One.", "label": 1}], indent=1)
    for name in ("a.json", "a.jsonl"):
        path = put(tmp_path / name, array)
        assert rows_of(path) == [{"text": "One.", "label": 1}]
    assert [*json_rows(["[", '{"text": "a"}]'], "input")] == [("input (item 1)", {"text": "a"})]
    for lines, location in ((["[3]"], "item 1"), (["{}", "[3]"], "line 2")):
        with pytest.raises(DataError, match=rf"input \({location}\): is not a JSON object"):
            list(json_rows(lines, "input"))


def test_a_header_may_follow_blank_lines_be_long_or_hold_a_carriage_return():
    for kind, lines in (
        ("csv", ["\n", "\n", "text,label\n", "a,b\n"]),
        ("tsv", ["text\tlabel\n", "a\tb\n"]),
        ("csv", ["text,label," + "x" * 200_000 + "\n", "a,b,c\n"]),
        ("tsv", ["text\tlabel\tan\rother\n", "a\tb\tc\n"]),
    ):
        (where, row), *_ = table_rows(lines, "file", kind, ["text", "label"])
        assert (row["text"], row["label"]) == ("a", "b")
        assert where == f"file (line {len(lines)})"
