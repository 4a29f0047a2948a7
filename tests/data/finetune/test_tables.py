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


def read(path, texts=("text",), label="label", names=None):
    labels = [label] if isinstance(label, str) else label or []
    return tables.read_table(path, text_columns=texts, label_columns=labels, label_names=names)


def test_only_a_line_feed_ends_a_line_also_of_a_compressed_file(tmp_path):
    text = "\ufeffa\u2028b\u0085\x0c\rc\r\n\r\n d \n\n".encode()
    for name, data in (("a.txt", text), ("a.txt.gz", gzip.compress(text))):
        assert tables.read_lines(put(tmp_path, name, data)) == ["a\u2028b\u0085\x0c\rc", "", " d "]


def test_files_that_cannot_be_read_are_refused(tmp_path):
    for name, data, message in (
        ("a.txt", "\ufeff\n".encode(), "is empty"),
        ("a.txt", b"one\ntwo\nna\xefve\n", r"\(line 3\): byte 0xEF is not UTF-8"),
        ("a.txt.gz", gzip.compress(b"a\nb\n" * 1000)[:-20], "the gzip data are damaged or cut off"),
        ("a.txt.gz", b"not gzip", r"\(line 1\): has a name for gzip, but"),
    ):
        with pytest.raises(DataError, match=rf"{name}:? {message}"):
            tables.read_text(put(tmp_path, name, data))
    put(tmp_path, "reviews.csv", "")
    for name, remedy in (("revews.csv", r"did you mean '.*/reviews\.csv'"), ("b/c", "check the")):
        with pytest.raises(DataError, match=rf"{name}: no such file; {remedy}"):
            tables.read_text(tmp_path / name)


def test_half_of_a_surrogate_pair_is_refused_where_it_is_read(tmp_path):
    good = {"text": "a", "label": "\U0001f600"}
    for bad in (
        {"text": "\ud800"},
        {"label": "x\udfff"},
    ):
        items = [json.dumps(good), json.dumps(good | bad)]
        for name, content, place in (
            ("a.jsonl", "\n".join(items), "line"),
            ("a.json", f"[{','.join(items)}]", "item"),
        ):
            path = put(tmp_path, name, content)
            with pytest.raises(
                DataError, match=rf"{name} \({place} 2\): has an unpaired surrogate"
            ):
                read(path)
    assert (
        read(
            put(
                tmp_path,
                "a.jsonl",
                '{"text": "\\ud83d\\ude00", "label": 1}\n{"text": "b", "label": 2}',
            )
        ).first[0]
        == "\U0001f600"
    )


def test_a_small_file_that_unpacks_to_very_much_is_refused(tmp_path):
    bomb = put(tmp_path, "a.csv.gz", gzip.compress(b"text,label\n" + b"a,1\n" * (5 << 20)))
    tracemalloc.start()
    with pytest.raises(
        DataError, match=r"a\.csv\.gz: unpacks to more than 100 times its size; unpack it"
    ):
        read(bomb)
    assert tracemalloc.get_traced_memory()[1] < 5 * tables.SMALL
    tracemalloc.stop()
    again = put(tmp_path, "b.csv.gz", gzip.compress(b"text,label\n" + b"a,1\nb,2\n" * 50_000))
    assert len(read(again)) == 100_000


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [
        (".gz", gzip.compress),
        (".bz2", bz2.compress),
        (".xz", lzma.compress),
        (".zst", zstandard.compress),
        ("", bytes),
    ],
)
def test_tables_of_every_format_and_compression_give_the_same_examples(suffix, pack, tmp_path):
    rows = [{"text": "one, two", "label": "b"}, {"text": "\u2028", "label": "a"}]
    table = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist([row | {"more": 1} for row in rows]), table)
    texts = {
        "a.csv": 'label,text\nb,"one, two"\na,\u2028\n',
        "a.tsv": "label\ttext\nb\tone, two\na\t\u2028\n",
        "a.jsonl": "\n".join(map(json.dumps, rows)),
        "a.parquet": table.getvalue().to_pybytes(),
    }
    for name, text in texts.items():
        data = text if isinstance(text, bytes) else text.encode()
        result = read(put(tmp_path, name + suffix, pack(data)))
        assert result.first == ["one, two", "\u2028"] and result.label_names == ("a", "b")
        assert result.labels.tolist() == [1, 0]


def test_errors_in_a_parquet_table_name_the_column_or_the_row(tmp_path):
    for columns, message in (
        ({"text": ["a", "b"], "Label": [1, 2]}, "has no column 'label', only 'text', 'Label'"),
        ({"text": [3], "label": [1]}, r"\(row 1\): 'text' is not a string"),
        ({"text": ["a", "b"], "label": [1, None]}, r"\(row 2\): 'label' is empty or not a label"),
    ):
        path = tmp_path / "a.parquet"
        parquet.write_table(pyarrow.table(columns), path)
        with pytest.raises(DataError, match=rf"a\.parquet:? {message}"):
            read(path)


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
    result = read(path, ("two", "one"), None)
    assert (result.first, result.second) == (["b", "d"], ["a", "c"])
    assert result.labels is None and result.label_names is None


def test_lines_of_a_text_file_are_the_rows_of_one_column(tmp_path):
    result = read(put(tmp_path, "a.txt", "one,\n\n two\tthree\n"), ("any",), None)
    assert result.first == ["one,", " two\tthree"] and result.remarks == {tables.BLANK: 1}


def test_json_lines_and_json_lists_are_read(tmp_path):
    rows = [{"text": None, "label": 10}, {"text": "\u2028", "label": 9, "more": [1]}]
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    texts = {"a.jsonl": lines, "a.json": lines, "b.json": json.dumps(rows, indent=1)}
    for name, text in texts.items():
        result = read(put(tmp_path, name, text))
        assert result.first == ["", "\u2028"] and result.label_names == ("9", "10")
        assert result.labels.tolist() == [1, 0]
    text = '{"text": "", "label": true}\n{"text": "b", "label": false}'
    result = read(put(tmp_path, "a.jsonl", text))
    assert result.label_names == ("false", "true")


def test_labels_are_sorted_by_value_if_all_are_integers_and_given_ones_keep_their_numbers(tmp_path):
    assert tables.sorted_labels(["10", "9", "-1", "9"]) == ("-1", "9", "10")
    assert tables.sorted_labels(["10", "9", "b"]) == ("10", "9", "b")
    assert tables.sorted_labels(["1.5", "10", "9"]) == ("1.5", "10", "9")
    path = put(tmp_path, "dev.csv", "text,label\na,pos\nb,pos\n")
    result = read(path, names=("pos", "neg"))
    assert result.label_names == ("pos", "neg") and result.labels.tolist() == [0, 0]
    with pytest.raises(DataError, match=r"dev\.csv \(line 2\): label 'pos' is .* mean 'Pos'\?"):
        read(path, names=("Pos", "neg"))


def test_labels_have_no_outer_space_one_spelling_each_and_none_is_missing(tmp_path):
    result = read(put(tmp_path, "a.csv", "text,label\na, pos\nb,neg\nc,pos\u00a0\n"))
    assert result.label_names == ("neg", "pos") and result.labels.tolist() == [1, 0, 1]
    for one, other in (
        ("1", "1.0"),
        ("pos", "Pos"),
        ("a b", "ab"),
        ("07", "7"),
        ("1e1", "10"),
        ("STRASSE", "straße"),
    ):
        with pytest.raises(
            DataError, match=rf"\(line 4\): label '{other}' is spelled '{one}' in .*\(line 2\)"
        ):
            read(put(tmp_path, "a.csv", f"text,label\na,{one}\nb,x\nc,{other}\n"))
    for row in ("nan", "NaN", "", "  ", "<NA>", "#N/A"):
        with pytest.raises(DataError, match=r"\(line 3\): 'label' is empty or not a label"):
            read(put(tmp_path, "a.csv", f"text,label\na,1\nb,{row}\nc,2\n"))
    with pytest.raises(DataError, match=r"\(line 2\): 'label' is empty or not a label \(nan\)"):
        read(put(tmp_path, "a.jsonl", '{"text": "a", "label": 1}\n{"text": "b", "label": NaN}\n'))
    fine = [
        "1_0",
        "10",
        "1.5",
        "15",
        "12345678901234567890",
        "12345678901234567891",
        "none",
        "sNaN",
        "inf",
    ]
    text = "".join(f"a,{word}\n" for word in fine)
    assert set(read(put(tmp_path, "a.csv", f"text,label\n{text}")).label_names) == {*fine}


def test_a_broken_file_is_reported_with_its_line(tmp_path):
    good = '{"text": "a", "label": 0}'
    for name, text, message in (
        ("a.csv", "Text,label\na,1\n", r"\(line 1\): has no column 'text', only 'Text', 'label'; did you mean 'Text'"),
        ("a.csv", "text,label,text\na,1,b\n", r"\(line 1\): has two columns 'text'"),
        ("a.csv", 'text,label\n"a\nb",1\nc,d,e\n', r"\(line 4\): has 3 cells for 2 columns"),
        ("a.csv", "text,label\na,1\nb, \n", r"\(line 3\): 'label' is empty"),
        ("a.csv", 'text,label\na,1\n"b\nc,1\nd,0\n', r"\(line 3\): is not CSV"),
        ("a.csv", "text,label\n", ": contains no rows"),
        ("a.csv", "text,label\na,1\nb,1\n", r"\(label\): has one label, '1'"),
        ("a.jsonl", f'{good}\n{{"text": "b"}}', r"\(line 2\): has no column 'label'"),
        ("a.jsonl", f'{good}\n{{"text": "b", "label": []}}', r"\(line 2\): differs from the first row: only one"),
        ("a.jsonl", f'{good}\n{{"text": 3, "label": 1}}', r"\(line 2\): 'text' is not a string"),
        ("a.jsonl", f"{good}\n\n{good}", r"\(line 2\): is not JSON"),
        ("a.jsonl", f"{good}\n[1]\n{good}", r"\(line 2\): is not a JSON object"),
        ("a.json", f"[{good}, 7]", r"\(item 2\): is not a JSON object"),
        ("a.json", f"[{good}", ": is not JSON"),
        ("a.txt", "one\n", ": has a text on each line, not the columns 'text', 'label'"),
        ("a.xlsx", "PK", r": is of an unknown kind; name it \.csv, \.tsv"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=rf"{name} ?{message}"):
            read(put(tmp_path, name, text))


def read_several(path, labels=("label",), separator=None):
    return tables.read_table(
        path, text_columns=["text"], label_columns=list(labels), label_separator=separator
    )


def test_several_labels_of_a_text_are_a_list_or_have_a_separator_or_a_column_each(tmp_path):
    rows = [("a", ["x", "y"]), ("b", []), ("c", ["z"]), ("d", ["x", "x"])]
    parquet.write_table(
        pyarrow.Table.from_pylist([{"text": text, "label": of} for text, of in rows]),
        tmp_path / "a.parquet",
    )
    lines = "".join(json.dumps({"text": text, "label": of}) + "\n" for text, of in rows)
    joined = "text,label\na,x | y\nb,\nc,z\nd,x||x\n"
    columns = "text,x,y,z\na,1,1,0\nb,0,0,0\nc,0,0,1\nd,1,0,0\n"
    for path, more in (
        (tmp_path / "a.parquet", {}),
        (put(tmp_path, "a.jsonl", lines), {}),
        (put(tmp_path, "a.csv", joined), {"separator": "|"}),
        (put(tmp_path, "b.csv", columns), {"labels": ("x", "y", "z")}),
    ):
        result = read_several(path, **more)
        assert result.labels.tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0]]
        assert result.label_names == ("x", "y", "z")
        assert result.remarks == {tables.UNLABELLED: 1}


@pytest.mark.parametrize(
    ("name", "text", "labels", "message"),
    [
        ("a.csv", "text,x,y\na,1,0\nb,2,0\n", ("x", "y"), r"\(line 3\): 'x' is '2', not 0 or 1; write 1"),
        ("a.csv", "text,x,y\na,1,0\nb,,0\n", ("x", "y"), r"\(line 3\): 'x' is empty"),
        ("a.jsonl", '{"text": "a", "label": ["x", null]}', ("label",), r"\(line 1\): 'label' is empty"),
        ("a.jsonl", '{"text": "a", "label": []}\n{"text": "b", "label": "x"}', ("label",), "differs from the first"),
        ("a.jsonl", '{"text": "a", "label": []}', ("label",), r"\(label\): has no label in any row"),
        ("a.jsonl", '{"text": "a", "label": ["x", "X"]}', ("label",), r"label 'X' is spelled 'x'"),
        ("a.jsonl", '{"text": "a", "label": ["x", "y", "z"]}\n' * 2, ("label",),
         r"\(label\): has 2 texts with 3 labels, too many for a table; remove rare labels, .* at most 5"),
    ],
)  # fmt: skip
def test_rows_without_a_readable_list_of_labels_or_with_too_many_are_reported(
    name, text, labels, message, tmp_path, monkeypatch
):
    monkeypatch.setattr(tables, "MOST_CELLS", 5)
    with pytest.raises(DataError, match=message):
        read_several(put(tmp_path, name, text), labels)


@pytest.mark.parametrize("form", ["one label", "several labels"])
def test_a_text_with_two_labels_is_a_warning_that_names_its_rows(form, tmp_path, capsys):
    rows = [("a", "x"), ("b", "y"), ("a", "x"), *[("a", "y")] * 7]
    lines = [{"text": t, "label": of if form == "one label" else [of]} for t, of in rows]
    read_several(put(tmp_path, "a.jsonl", "\n".join(map(json.dumps, lines))))
    err = capsys.readouterr().err
    assert "warning: 7 rows with the same text as an earlier row, but another label: " in err
    assert f"{tmp_path}/a.jsonl (line 4) has y, and {tmp_path}/a.jsonl (line 1) x;" in err
    assert err.count(" has y") == 5 and err.endswith("; and 2 more\n")


def examples(values, names=("a", "b", "c"), second=None):
    column = np.array(values, np.int32 if names else np.float32)
    texts, ids = zip(*((f"text {n}", str(n)) for n in range(len(values))), strict=True)
    return tables.TextExamples(list(texts), second, column, list(ids), names, {"odd": 1})


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
    train, held = tables.hold_out(examples(np.arange(10) / 3, None), 0.3, 1)
    assert (len(train), len(held)) == (7, 3)  # regression: one stratum


def test_each_label_keeps_an_example_and_gives_one_if_it_has_two():
    rows = examples([0, 0, 1, 1, 1, 2])
    assert np.bincount(tables.hold_out(rows, 0.01, 1)[1].labels, minlength=3).tolist() == [1, 1, 0]
    assert np.bincount(tables.hold_out(rows, 0.99, 1)[0].labels).tolist() == [1, 1, 1]
    with pytest.raises(DataError, match="no label has two examples"):
        tables.hold_out(examples([0, 1, 2]), 0.5, 1)


def test_texts_with_several_labels_are_held_out_by_their_rarest():
    draw = np.random.default_rng(0)
    labels = (draw.random((400, 3)) < [0.6, 0.3, 0.02]).astype(np.int8)
    texts = [f"text {n}" for n in range(400)]
    rows = tables.TextExamples(texts, None, labels, texts, ("a", "b", "c"))
    train, held = tables.hold_out(rows, 0.2, 1)
    assert len(held) == pytest.approx(80, abs=2)
    assert held.labels.sum(0) == pytest.approx(labels.sum(0) * 0.2, rel=0.25)
    alone = np.array([[1, 0], [1, 0], [1, 1]], np.int8)
    train, _ = tables.hold_out(
        tables.TextExamples(texts[:3], None, alone, texts[:3], ("a", "b")), 0.5, 1
    )
    assert train.labels.any(0).all()


LABELS = np.array([1, 1, 1, 1, 0, 0, 0, 0, 0, 0])
PREDICTED = np.array([1, 1, 1, 0, 1, 0, 0, 0, 0, 0])


def score(names, labels, predictions):
    samples = tables.samples_of(names, labels, predictions, identify(range(len(labels))))
    return values(samples)


def test_scores_are_those_of_their_formulas():
    # 3 hits, 1 miss, 1 false alarm, 5 right rejections.
    expected = {"accuracy": 8 / 10, "f1": 2 * 3 / (2 * 3 + 1 + 1)}
    expected |= {"macro_f1": (6 / 8 + 10 / 12) / 2}
    expected |= {"matthews": (3 * 5 - 1 * 1) / np.sqrt(4 * 4 * 6 * 6)}
    scores = score(list(expected), LABELS, PREDICTED)
    assert scores == pytest.approx(expected) and list(scores) == list(expected)
    assert all(type(value) is float for value in scores.values())
    labels, result = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 3.0, 2.0, 5.0], np.float32)
    # Deviations -1.5 -.5 .5 1.5 and -1.75 .25 -.75 2.25; ranks 1 3 2 4.
    expected = {"pearson": 5.5 / np.sqrt(5 * 8.75), "spearman": 1 - 6 * 2 / (4 * 15)}
    assert score(list(expected), labels, result) == pytest.approx(expected)
    # Labels are the rows, predictions the columns.
    assert tables.confusion(LABELS, PREDICTED, 3) == [[5, 1, 0], [1, 3, 0], [0, 0, 0]]


def test_an_undefined_metric_is_zero_and_gives_no_warning():
    zeros, names = np.zeros(10, int), ["matthews", "pearson", "spearman", "f1"]
    assert score(names, LABELS, zeros) == dict.fromkeys(names, 0.0)
    assert score(["f1"], zeros, zeros) == {"f1": 0.0}
    assert score(names[:3], np.ones(10), PREDICTED) == dict.fromkeys(names[:3], 0.0)


def test_a_separator_that_stands_in_no_label_is_named(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text,label\na,x|y\nb,y\n")
    with pytest.raises(
        DataError, match=r"label_separator \(';'\): does not separate labels: no text has two"
    ):
        tables.read_table(path, text_columns=["text"], label_columns=["label"], label_separator=";")
