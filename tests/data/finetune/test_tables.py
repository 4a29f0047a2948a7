"""Files of texts and labels: lines, JSON, columns, labels, quoting, and scores."""

import bz2
import csv
import gzip
import json
import lzma

import numpy as np
import pyarrow
import pytest
import zstandard
from pyarrow import parquet
from support.contents import put
from support.metrics import values

from bert_cli.data.finetune import tables
from bert_cli.data.finetune.label_cells import sorted_labels
from bert_cli.errors import DataError
from bert_cli.statistics import identify


def read(path, labels=("label",), texts=("text",), names=None, separator=None):
    columns = {"text_columns": texts, "label_columns": list(labels)}
    return tables.read_table(path, **columns, label_names=names, label_separator=separator)


def write_rows(path, labels):
    texts = [f"text {n}" for n in range(len(labels))]
    if path.suffix == ".parquet":
        path.write_bytes(table_of({"text": texts, "label": labels}))
    elif path.suffix == ".jsonl":
        rows = zip(texts, labels, strict=True)
        lines = [
            json.dumps({"text": t, "label": json.loads(of) if isinstance(of, str) else of})
            for t, of in rows
        ]
        path.write_text("\n".join(lines))
    else:
        with open(path, "w", newline="") as file:
            quoting = csv.QUOTE_MINIMAL if path.suffix == ".csv" else csv.QUOTE_NONE
            mark = "," if path.suffix == ".csv" else "\t"
            rows = zip(["text", *texts], ["label", *labels], strict=True)
            csv.writer(file, delimiter=mark, quoting=quoting).writerows(rows)
    return path


def table_of(columns):
    stream = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table(columns), stream)
    return stream.getvalue().to_pybytes()


def test_only_a_line_feed_ends_a_line_also_of_a_compressed_file(tmp_path):
    text = "\ufeffa\u2028b\u0085\x0c\rc\r\n\r\n d \n\n".encode()
    for name, data in (("a.txt", text), ("a.txt.gz", gzip.compress(text))):
        assert tables.read_lines(put(tmp_path / name, data)) == ["a\u2028b\u0085\x0c\rc", "", " d "]


PACK = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
PACK[".zst"] = zstandard.compress


@pytest.mark.parametrize("suffix", PACK)
def test_tables_of_every_format_and_compression_give_the_same_examples(suffix, tmp_path):
    rows = [{"text": "one, two", "label": "b"}, {"text": "\u2028", "label": "a"}]
    texts = {
        "a.csv": 'label,text\nb,"one, two"\na,\u2028\n',
        "a.tsv": "label\ttext\nb\tone, two\na\t\u2028\n",
        "a.jsonl": "\n".join(map(json.dumps, rows)),
        "a.parquet": table_of({"text": ["one, two", "\u2028"], "n": [1, 1], "label": ["b", "a"]}),
    }
    for name, text in texts.items():
        data = text if isinstance(text, bytes) else text.encode()
        result = read(put(tmp_path / (name + suffix), PACK[suffix](data)))
        assert result.first == ["one, two", "\u2028"] and result.label_names == ("a", "b")
        assert result.labels.tolist() == [1, 0]


def test_a_file_that_cannot_be_written_is_an_error(tmp_path):
    tables.write_lines(tmp_path / "new" / "a.txt", ["a", "ß"])
    assert (tmp_path / "new" / "a.txt").read_bytes() == "a\nß\n".encode()
    with pytest.raises(DataError, match="cannot be written"):
        tables.write_lines(tmp_path / "new" / "a.txt" / "b.txt", ["a"])


def test_csv_texts_contain_quotes_commas_and_line_ends(tmp_path):
    long, before = "x" * 200_000, csv.field_size_limit()
    text = f'\ufefflabel,text\r\npos,"a, ""b""\r\nc\u2028"\r\nneg,{long}\r\n'
    result = read(put(tmp_path / "a.csv", text))
    assert result.first == ['a, "b"\r\nc\u2028', long]
    assert result.label_names == ("neg", "pos") and result.second is None
    assert result.labels.tolist() == [1, 0] and result.labels.dtype == np.int32
    assert result.ids == ["0", "1"] and result.remarks == {}
    assert csv.field_size_limit() == before


def test_tsv_quotes_are_text_and_odd_rows_are_counted(tmp_path):
    path = put(tmp_path / "a.tsv", 'text\tlabel\n"open\t1\n"both"\t0\nplain\t1\n')
    result = read(path)
    assert result.first == ['"open', '"both"', "plain"] and result.remarks == {tables.QUOTED: 1}
    result = read(put(tmp_path / "a.csv", "text,label\n,1\n\n  ,0\nb,0\n\n"))
    assert result.first == ["", "  ", "b"]
    assert result.remarks == {tables.EMPTY_TEXT: 2, tables.BLANK: 1}


def test_two_text_columns_are_pairs_and_no_label_column_is_a_file_to_predict(tmp_path):
    path = put(tmp_path / "a.csv.gz", gzip.compress(b"one,two,label\na,b,1\nc,d,\n"))
    result = read(path, (), ("two", "one"))
    assert (result.first, result.second) == (["b", "d"], ["a", "c"])
    assert result.labels is None and result.label_names is None


def test_json_lines_and_json_lists_are_read(tmp_path):
    rows = [{"text": None, "label": 10}, {"text": "\u2028", "label": 9, "more": [1]}]
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    texts = {"a.jsonl": lines, "a.json": lines, "b.json": json.dumps(rows, indent=1)}
    for name, text in texts.items():
        result = read(put(tmp_path / name, text))
        assert result.first == ["", "\u2028"] and result.label_names == ("9", "10")
        assert result.labels.tolist() == [1, 0]
    text = '{"text": "\\ud83d\\ude00", "label": true}\n{"text": "b", "label": false}'
    result = read(put(tmp_path / "a.jsonl", text))
    assert result.first[0] == "\U0001f600" and result.label_names == ("false", "true")


def test_labels_are_sorted_by_value_if_all_are_integers_and_given_ones_keep_their_numbers(tmp_path):
    assert sorted_labels(["10", "9", "-1", "9"]) == ("-1", "9", "10")
    assert sorted_labels(["10", "9", "b"]) == ("10", "9", "b")
    assert sorted_labels(["1.5", "10", "9"]) == ("1.5", "10", "9")
    path = put(tmp_path / "dev.csv", "text,label\na,pos\nb,pos\n")
    result = read(path, names=("pos", "neg"))
    assert result.label_names == ("pos", "neg") and result.labels.tolist() == [0, 0]
    with pytest.raises(DataError, match=r"dev\.csv \(line 2\): label 'pos' is .* mean 'Pos'\?"):
        read(path, names=("Pos", "neg"))


def test_labels_have_no_outer_space_and_similar_ones_are_different(tmp_path):
    result = read(put(tmp_path / "a.csv", "text,label\na, pos\nb,neg\nc,pos\u00a0\n"))
    assert result.label_names == ("neg", "pos") and result.labels.tolist() == [1, 0, 1]
    fine = ["1_0", "10", "1.5", "15", *(str(12345678901234567890 + n) for n in (0, 1))]
    fine += ["none", "sNaN", "inf"]
    text = "".join(f"a,{word}\n" for word in fine)
    assert set(read(put(tmp_path / "a.csv", f"text,label\n{text}")).label_names) == {*fine}


def test_empty_rows_of_a_spreadsheet_are_skipped_and_counted(tmp_path):
    rows = "text;label;note\na;x;\n;;\nb;y;\n; ;\n" + ";;\n" * 300 + ";;;;\n"
    result = read(put(tmp_path / "a.csv", rows))
    assert result.first == ["a", "b"] and result.remarks == {tables.BLANK: 303}
    result = read(put(tmp_path / "a.tsv", rows.replace(";", "\t")))
    assert result.first == ["a", "b"] and result.remarks == {tables.BLANK: 303}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("only a text,", "'label' is empty"),
        ("a text", "has 1 cell for 2 columns"),
        ("text,label", "repeats the names of the columns"),
    ],
)
def test_ten_wrong_rows_are_named_at_once(row, message, tmp_path):
    lines = ["text,label", *(f"text {n},{n % 2}\n{row}" for n in range(30))]
    with pytest.raises(DataError) as caught:
        read(put(tmp_path / "a.csv", "\n".join(lines)))
    named = str(caught.value).split("\n")
    assert len(named) == 10 and all(message in line for line in named)
    assert "(line 3)" in named[0] and "(line 21)" in named[9]


def test_several_labels_of_a_text_are_a_list_or_have_a_separator_or_a_column_each(tmp_path):
    rows = [("a", ["x", "y"]), ("b", []), ("c", ["z"]), ("d", ["x", "x"])]
    texts, lists = zip(*rows, strict=True)
    lines = "".join(json.dumps({"text": text, "label": of}) + "\n" for text, of in rows)
    joined = "text,label\na,x | y\nb,\nc,z\nd,x||x\n"
    columns = "text,x,y,z\na,1,1,0\nb,0,0,0\nc,0,0,1\nd,1,0,0\n"
    for path, more in (
        (put(tmp_path / "a.parquet", table_of({"text": texts, "label": lists})), {}),
        (put(tmp_path / "a.jsonl", lines), {}),
        (put(tmp_path / "a.csv", joined), {"separator": "|"}),
        (put(tmp_path / "b.csv", columns), {"labels": ("x", "y", "z")}),
    ):
        result = read(path, **more)
        assert result.labels.tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0]]
        assert result.label_names == ("x", "y", "z")
        assert result.remarks == {tables.UNLABELLED: 1}


SETS = [["x", "y"], ["z"], ["x"], ["x", "y"]]
NUMBERS = [[1, 1, 0], [0, 0, 1], [1, 0, 0], [1, 1, 0]]


@pytest.mark.parametrize(
    ("name", "cells", "more"),
    [
        ("a.csv", [str(of) for of in SETS], {}),  # as pandas writes lists
        ("a.csv", [str(of) for of in SETS], {"separator": ","}),
        ("a.csv", [str(tuple(of)) for of in SETS], {}),
        ("a.tsv", [str({*of}) for of in SETS], {}),
        ("a.csv", [json.dumps(of) for of in SETS], {}),
        ("a.csv", [f"array({of}, dtype=object)" for of in SETS], {}),  # as pandas writes arrays
        ("a.jsonl", [json.dumps(of) for of in SETS], {}),
        ("a.parquet", [[word.encode() for word in of] for of in SETS], {}),
    ],
)
def test_a_list_that_a_program_wrote_into_a_cell_is_a_list_of_labels(name, cells, more, tmp_path):
    result = read(write_rows(tmp_path / name, cells), **more)
    assert result.label_names == ("x", "y", "z") and result.labels.tolist() == NUMBERS


@pytest.mark.parametrize("form", [int, float, bool, str])
@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet"])
def test_lists_of_zero_and_one_are_columns(name, form, tmp_path):
    cells = [list(map(form, row)) for row in NUMBERS]
    path = write_rows(tmp_path / name, list(map(str, cells)) if name == "a.csv" else cells)
    result = read(path)
    assert result.label_names == ("0", "1", "2") and result.labels.tolist() == NUMBERS
    assert result.remarks[tables.MULTI_HOT] == 4
    with pytest.raises(DataError, match=r"label '.+' is unknown"):
        read(path, names=("x", "y"))  # a column too many


def test_lists_of_several_lengths_or_other_words_are_labels(tmp_path):
    for cells in ([[0, 1], [1]], [[0, 2], [1, 0]], [[0], [1]]):
        path = write_rows(tmp_path / "a.jsonl", [*cells, cells[0]])
        assert tables.MULTI_HOT not in read(path).remarks


@pytest.mark.parametrize("pair", ["True False", "true false", "1.0 0.0", "TRUE FALSE", "1 0"])
def test_columns_of_labels_have_every_spelling_of_zero_and_one(pair, tmp_path):
    yes, no = pair.split()
    lines = [
        "text,x,y,z",
        *(f"t{n}," + ",".join(yes if of else no for of in row) for n, row in enumerate(NUMBERS)),
    ]
    result = read(put(tmp_path / "a.csv", "\n".join(lines)), labels=("x", "y", "z"))
    assert result.labels.tolist() == NUMBERS


def test_labels_of_parquet_files_have_their_names_and_no_type_of_number_or_text(tmp_path):
    one = {"names": ["sea", "kitchen"], "_type": "ClassLabel"}
    for column, kind, expected in (
        ([1, 0, 1], one, ("sea", "kitchen", "kitchen sea kitchen")),
        ([[1], [0, 1], []], {"feature": one, "_type": "Sequence"}, None),
        ([1.0, 0.0, 1.0], None, ("0", "1", "1 0 1")),
        ([b"b", b"a", b"b"], None, ("a", "b", "b a b")),
    ):
        table = pyarrow.table({"text": ["a", "b", "c"], "label": column})
        about = {"huggingface": json.dumps({"info": {"features": {"label": kind}}})}
        parquet.write_table(table.replace_schema_metadata(about), tmp_path / "a.parquet")
        result = read(tmp_path / "a.parquet")
        names = result.label_names
        if expected is None:
            assert names == ("kitchen", "sea") and result.labels.tolist() == [
                [1, 0],
                [1, 1],
                [0, 0],
            ]
        else:
            assert {*names} == {*expected[:2]}
            assert " ".join(names[n] for n in result.labels) == expected[2]
    # The names have the numbers 0 and 1.
    about = {"huggingface": json.dumps({"info": {"features": {"label": one}}})}
    for number in (-1, 2):
        table = pyarrow.table({"text": ["a", "b", "c"], "label": [1, 0, number]})
        parquet.write_table(table.replace_schema_metadata(about), tmp_path / "a.parquet")
        with pytest.raises(DataError, match=r"\(row 3\): 'label' is empty or not a label"):
            read(tmp_path / "a.parquet")


LABELS = np.array([1, 1, 1, 1, 0, 0, 0, 0, 0, 0])
PREDICTED = np.array([1, 1, 1, 0, 1, 0, 0, 0, 0, 0])


def test_scores_are_those_of_their_formulas():
    # 3 hits, 1 miss, 1 false alarm, 5 right rejections.
    expected = {"accuracy": 8 / 10, "f1": 2 * 3 / (2 * 3 + 1 + 1)}
    expected |= {"macro_f1": (6 / 8 + 10 / 12) / 2}
    expected |= {"matthews": (3 * 5 - 1 * 1) / np.sqrt(4 * 4 * 6 * 6)}
    scores = values(tables.samples_of(list(expected), LABELS, PREDICTED, identify(range(10))))
    assert scores == pytest.approx(expected) and list(scores) == list(expected)
    assert all(type(value) is float for value in scores.values())
    # Labels are the rows, predictions the columns.
    assert tables.confusion(LABELS, PREDICTED, 3) == [[5, 1, 0], [1, 3, 0], [0, 0, 0]]
