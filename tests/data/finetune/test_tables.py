"""Files of texts and labels: lines, JSON, columns, labels, quoting, held-out examples, and scores."""

import bz2
import csv
import gzip
import json
import lzma
import tracemalloc

import numpy as np
import pyarrow
import pytest
import zstandard
from pyarrow import parquet
from support.metrics import values

from bert_cli.data.finetune import tables
from bert_cli.errors import DataError
from bert_cli.statistics import identify


def put(folder, name, text):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def read(path, labels=("label",), texts=("text",), names=None, separator=None):
    columns = {"text_columns": texts, "label_columns": list(labels)}
    return tables.read_table(path, **columns, label_names=names, label_separator=separator)


def table_of(columns):
    """Return the bytes of a Parquet file."""
    stream = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table(columns), stream)
    return stream.getvalue().to_pybytes()


def test_only_a_line_feed_ends_a_line_also_of_a_compressed_file(tmp_path):
    text = "\ufeffa\u2028b\u0085\x0c\rc\r\n\r\n d \n\n".encode()
    for name, data in (("a.txt", text), ("a.txt.gz", gzip.compress(text))):
        assert tables.read_lines(put(tmp_path, name, data)) == ["a\u2028b\u0085\x0c\rc", "", " d "]


def test_a_small_file_that_unpacks_to_very_much_is_refused(tmp_path):
    bomb = put(tmp_path, "a.csv.gz", gzip.compress(b"text,label\n" + b"a,1\n" * (5 << 20)))
    tracemalloc.start()
    message = r"a\.csv\.gz: unpacks to more than 100 times its size; unpack it"
    with pytest.raises(DataError, match=message):
        read(bomb)
    assert tracemalloc.get_traced_memory()[1] < 5 * tables.SMALL
    tracemalloc.stop()
    again = put(tmp_path, "b.csv.gz", gzip.compress(b"text,label\n" + b"a,1\nb,2\n" * 50_000))
    assert len(read(again)) == 100_000


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
        result = read(put(tmp_path, name + suffix, PACK[suffix](data)))
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
    result = read(put(tmp_path, "a.csv", text))
    assert result.first == ['a, "b"\r\nc\u2028', long]
    assert result.label_names == ("neg", "pos") and result.second is None
    assert result.labels.tolist() == [1, 0] and result.labels.dtype == np.int32
    assert result.ids == ["0", "1"] and result.remarks == {}
    assert csv.field_size_limit() == before


def test_tsv_quotes_are_text_and_odd_rows_are_counted(tmp_path):
    path = put(tmp_path, "a.tsv", 'text\tlabel\n"open\t1\n"both"\t0\nplain\t1\n')
    result = read(path)
    assert result.first == ['"open', '"both"', "plain"] and result.remarks == {tables.QUOTED: 1}
    result = read(put(tmp_path, "a.csv", "text,label\n,1\n\n  ,0\nb,0\n\n"))
    assert result.first == ["", "  ", "b"]
    assert result.remarks == {tables.EMPTY_TEXT: 2, tables.BLANK: 2}


def test_two_text_columns_are_pairs_and_no_label_column_is_a_file_to_predict(tmp_path):
    path = put(tmp_path, "a.csv.gz", gzip.compress(b"one,two,label\na,b,1\nc,d,\n"))
    result = read(path, (), ("two", "one"))
    assert (result.first, result.second) == (["b", "d"], ["a", "c"])
    assert result.labels is None and result.label_names is None


def test_lines_of_a_text_file_are_the_rows_of_one_column(tmp_path):
    result = read(put(tmp_path, "a.txt", "one,\n\n two\tthree\n"), (), ("any",))
    assert result.first == ["one,", " two\tthree"] and result.remarks == {tables.BLANK: 1}


def test_json_lines_and_json_lists_are_read(tmp_path):
    rows = [{"text": None, "label": 10}, {"text": "\u2028", "label": 9, "more": [1]}]
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    texts = {"a.jsonl": lines, "a.json": lines, "b.json": json.dumps(rows, indent=1)}
    for name, text in texts.items():
        result = read(put(tmp_path, name, text))
        assert result.first == ["", "\u2028"] and result.label_names == ("9", "10")
        assert result.labels.tolist() == [1, 0]
    text = '{"text": "\\ud83d\\ude00", "label": true}\n{"text": "b", "label": false}'
    result = read(put(tmp_path, "a.jsonl", text))
    assert result.first[0] == "\U0001f600" and result.label_names == ("false", "true")


def test_labels_are_sorted_by_value_if_all_are_integers_and_given_ones_keep_their_numbers(tmp_path):
    assert tables.sorted_labels(["10", "9", "-1", "9"]) == ("-1", "9", "10")
    assert tables.sorted_labels(["10", "9", "b"]) == ("10", "9", "b")
    assert tables.sorted_labels(["1.5", "10", "9"]) == ("1.5", "10", "9")
    path = put(tmp_path, "dev.csv", "text,label\na,pos\nb,pos\n")
    result = read(path, names=("pos", "neg"))
    assert result.label_names == ("pos", "neg") and result.labels.tolist() == [0, 0]
    with pytest.raises(DataError, match=r"dev\.csv \(line 2\): label 'pos' is .* mean 'Pos'\?"):
        read(path, names=("Pos", "neg"))


def test_labels_have_no_outer_space_and_similar_ones_are_different(tmp_path):
    result = read(put(tmp_path, "a.csv", "text,label\na, pos\nb,neg\nc,pos\u00a0\n"))
    assert result.label_names == ("neg", "pos") and result.labels.tolist() == [1, 0, 1]
    fine = ["1_0", "10", "1.5", "15", *(str(12345678901234567890 + n) for n in (0, 1))]
    fine += ["none", "sNaN", "inf"]
    text = "".join(f"a,{word}\n" for word in fine)
    assert set(read(put(tmp_path, "a.csv", f"text,label\n{text}")).label_names) == {*fine}


GOOD = '{"text": "a", "label": 0}'
SEVERAL = '{"text": "a", "label": ["x", "y", "z"]}'
HALVES = ({"text": "\ud800", "label": "b"}, {"text": "b", "label": "x\udfff"})
COLUMNS = {"labels": ("x", "y")}
SPELLINGS = {"1": "1.0", "pos": "Pos", "a b": "ab", "07": "7", "1e1": "10", "STRASSE": "straße"}
REFUSED = [
    ("a.txt", "\ufeff\n".encode(), "is empty", {"labels": ()}),
    ("a.txt", b"one\ntwo\nna\xefve\n", r"\(line 3\): byte 0xEF is not UTF-8", {"labels": ()}),
    ("a.txt", "one\n", "has a text on each line, not the columns 'text', 'label'"),
    ("a.txt.gz", gzip.compress(b"a\nb\n" * 1000)[:-20], "the gzip data are damaged or cut off", {"labels": ()}),
    ("a.txt.gz", b"not gzip", r"\(line 1\): has a name for gzip, but", {"labels": ()}),
    ("a.xlsx", "PK", r"is of an unknown kind; name it \.csv, \.tsv"),
    ("a.csv", "Text,label\na,1\n", r"\(line 1\): has no column 'text', only 'Text', 'label'; did you mean 'Text'"),
    ("a.csv", "text,label,text\na,1,b\n", r"\(line 1\): has two columns 'text'"),
    ("a.csv", 'text,label\n"a\nb",1\nc,d,e\n', r"\(line 4\): has 3 cells for 2 columns"),
    ("a.csv", 'text,label\na,1\n"b\nc,1\nd,0\n', r"\(line 3\): is not CSV"),
    ("a.csv", "text,label\n", "contains no rows"),
    ("a.csv", "text,label\na,1\nb,1\n", r"\(label\): has one label, '1'"),
    *(("a.csv", f"text,label\na,1\nb,{word}\nc,2\n", r"\(line 3\): 'label' is empty or not a label")
      for word in ("nan", "NaN", "", "  ", "<NA>", "#N/A")),
    *(("a.csv", f"text,label\na,{word}\nb,x\nc,{same}\n",
       rf"\(line 4\): label '{same}' is spelled '{word}' in .*\(line 2\)") for word, same in SPELLINGS.items()),
    ("a.csv", "text,x,y\na,1,0\nb,2,0\n", r"\(line 3\): 'x' is '2', not 0 or 1; write 1", COLUMNS),
    ("a.csv", "text,x,y\na,1,0\nb,,0\n", r"\(line 3\): 'x' is empty", COLUMNS),
    ("a.csv", "text,label\na,x|y\nb,y\n",
     r"label_separator \(';'\): does not separate labels: no text has two", {"separator": ";"}),
    ("a.jsonl", f'{GOOD}\n{{"text": "b"}}', r"\(line 2\): has no column 'label'"),
    ("a.jsonl", f'{GOOD}\n{{"text": "b", "label": NaN}}', r"\(line 2\): 'label' is empty or not a label \(nan\)"),
    ("a.jsonl", f'{GOOD}\n{{"text": "b", "label": []}}', r"\(line 2\): differs from the first row: only one"),
    ("a.jsonl", f'{GOOD}\n{{"text": 3, "label": 1}}', r"\(line 2\): 'text' is not a string"),
    ("a.jsonl", f"{GOOD}\n\n{GOOD}", r"\(line 2\): is not JSON"),
    ("a.jsonl", f"{GOOD}\n[1]\n{GOOD}", r"\(line 2\): is not a JSON object"),
    ("a.json", f"[{GOOD}, 7]", r"\(item 2\): is not a JSON object"),
    ("a.json", f"[{GOOD}", "is not JSON"),
    *(("a.jsonl", f"{GOOD}\n{json.dumps(row)}", r"\(line 2\): has an unpaired surrogate") for row in HALVES),
    *(("a.json", f"[{GOOD},{json.dumps(row)}]", r"\(item 2\): has an unpaired surrogate") for row in HALVES),
    ("a.jsonl", '{"text": "a", "label": ["x", null]}', r"\(line 1\): 'label' is empty"),
    ("a.jsonl", '{"text": "a", "label": []}\n{"text": "b", "label": "x"}', r"\(line 2\): differs from the first"),
    ("a.jsonl", '{"text": "a", "label": []}', r"\(label\): has no label in any row"),
    ("a.jsonl", '{"text": "a", "label": ["x", "X"]}', r"\(line 1\): label 'X' is spelled 'x'"),
    ("a.jsonl", f"{SEVERAL}\n{SEVERAL}",
     r"\(label\): has 2 texts with 3 labels, too many for a table; remove rare labels, .* at most 5"),
    ("a.parquet", table_of({"text": ["a", "b"], "Label": [1, 2]}), "has no column 'label', only 'text', 'Label'"),
    ("a.parquet", table_of({"text": [3], "label": [1]}), r"\(row 1\): 'text' is not a string"),
    ("a.parquet", table_of({"text": ["a", "b"], "label": [1, None]}), r"\(row 2\): 'label' is empty or not a label"),
]  # fmt: skip
"""Name and content of a file, what the error says after the name, and how the file is read."""


@pytest.mark.parametrize("case", REFUSED, ids=[message for _, _, message, *_ in REFUSED])
def test_a_broken_file_is_reported_with_its_line(case, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MOST_CELLS", 5)
    name, content, message, *more = case
    with pytest.raises(DataError, match=rf"{name}:? ?{message}"):
        read(put(tmp_path, name, content), **dict(*more))


def test_a_file_that_does_not_exist_is_reported_with_a_similar_name(tmp_path):
    put(tmp_path, "reviews.csv", "")
    for name, remedy in (("revews.csv", r"did you mean '.*/reviews\.csv'"), ("b/c", "check the")):
        with pytest.raises(DataError, match=rf"{name}: no such file; {remedy}"):
            tables.read_text(tmp_path / name)


def test_several_labels_of_a_text_are_a_list_or_have_a_separator_or_a_column_each(tmp_path):
    rows = [("a", ["x", "y"]), ("b", []), ("c", ["z"]), ("d", ["x", "x"])]
    texts, lists = zip(*rows, strict=True)
    lines = "".join(json.dumps({"text": text, "label": of}) + "\n" for text, of in rows)
    joined = "text,label\na,x | y\nb,\nc,z\nd,x||x\n"
    columns = "text,x,y,z\na,1,1,0\nb,0,0,0\nc,0,0,1\nd,1,0,0\n"
    for path, more in (
        (put(tmp_path, "a.parquet", table_of({"text": texts, "label": lists})), {}),
        (put(tmp_path, "a.jsonl", lines), {}),
        (put(tmp_path, "a.csv", joined), {"separator": "|"}),
        (put(tmp_path, "b.csv", columns), {"labels": ("x", "y", "z")}),
    ):
        result = read(path, **more)
        assert result.labels.tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0]]
        assert result.label_names == ("x", "y", "z")
        assert result.remarks == {tables.UNLABELLED: 1}


@pytest.mark.parametrize("form", ["one label", "several labels"])
def test_a_text_with_two_labels_is_a_warning_that_names_its_rows(form, tmp_path, capsys):
    rows = [("a", "x"), ("b", "y"), ("a", "x"), *[("a", "y")] * 7]
    lines = [{"text": t, "label": of if form == "one label" else [of]} for t, of in rows]
    read(put(tmp_path, "a.jsonl", "\n".join(map(json.dumps, lines))))
    err = capsys.readouterr().err
    assert "warning: 7 rows with the same text as an earlier row, but another label: " in err
    assert f"{tmp_path}/a.jsonl (line 4) has y, and {tmp_path}/a.jsonl (line 1) x;" in err
    assert err.count(" has y") == 5 and err.endswith("; and 2 more\n")


def examples(values, names=("a", "b", "c"), second=None):
    ids = [*map(str, range(len(values)))]
    texts = [f"text {n}" for n in ids]
    return tables.TextExamples(texts, second, np.array(values), ids, names, {"odd": 1})


def test_the_same_fraction_of_each_label_is_held_out_by_the_seed():
    second = [f"second {n}" for n in range(100)]
    everything = examples([0] * 60 + [1] * 30 + [2] * 10, second=second)
    train, held = tables.hold_out(everything, 0.1, 7)
    assert np.bincount(held.labels).tolist() == [6, 3, 1] and held.remarks == {}
    assert sorted(train.ids + held.ids, key=int) == everything.ids
    assert held.ids == sorted(held.ids, key=int) and train.ids == sorted(train.ids, key=int)
    assert held.first == [f"text {n}" for n in held.ids]
    assert held.second == [f"second {n}" for n in held.ids]
    again, other = (tables.hold_out(everything, 0.1, seed)[1].ids for seed in (7, 8))
    assert held.ids == again != other


def test_each_label_keeps_an_example_and_gives_one_if_it_has_two():
    rows = examples([0, 0, 1, 1, 1, 2])
    assert np.bincount(tables.hold_out(rows, 0.01, 1)[1].labels, minlength=3).tolist() == [1, 1, 0]
    assert np.bincount(tables.hold_out(rows, 0.99, 1)[0].labels).tolist() == [1, 1, 1]
    with pytest.raises(DataError, match="no label has two examples"):
        tables.hold_out(examples([0, 1, 2]), 0.5, 1)


def test_texts_with_several_labels_are_held_out_by_their_rarest():
    draw = np.random.default_rng(0)
    labels = (draw.random((400, 3)) < [0.6, 0.3, 0.02]).astype(np.int8)
    _, held = tables.hold_out(examples(labels), 0.2, 1)
    assert len(held) == pytest.approx(80, abs=2)
    assert held.labels.sum(0) == pytest.approx(labels.sum(0) * 0.2, rel=0.25)
    alone = np.array([[1, 0], [1, 0], [1, 1]], np.int8)
    train, _ = tables.hold_out(examples(alone, ("a", "b")), 0.5, 1)
    assert train.labels.any(0).all()


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
