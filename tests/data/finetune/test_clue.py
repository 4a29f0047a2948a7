"""CLUE's files with the fields as published, and what its server takes."""

import json

import numpy as np
import pytest

from bert_cli.data.finetune.clue import TASKS, UNLABELLED, read_clue, server_file, write_server_file
from bert_cli.data.finetune.examples import EMPTY_TEXT, TextExamples
from bert_cli.data.finetune.metrics import METRICS
from bert_cli.errors import ConfigError, DataError

WSC = {
    "target": {"span2_index": 15, "span1_index": 5, "span1_text": "床", "span2_text": "它"},
    "idx": 261, "label": "false", "text": "这时候放在床上的手机响了,现在它突然响了。",
}  # fmt: skip
NLI = {
    "level": "easy", "sentence1": "来到了出口", "sentence2": "他走了", "label": "neutral",
    "label0": "neutral", "genre": "lit", "prem_id": "lit_1", "id": 7,
}  # fmt: skip
# A row as published, then what it is read as: first text, second text, label number, id.
ROWS = {
    "afqmc": (
        {"sentence1": "怎么还款", "sentence2": "如何还款", "label": "1"}, "怎么还款", "如何还款", 1, "0",
    ),
    "tnews": (
        {"label": "102", "label_desc": "news_entertainment", "sentence": "江疏影", "keywords": "a,b"},
        "江疏影", None, 0, "0",
    ),
    "iflytek": ({"label": "110", "label_des": "社区超市", "sentence": "朴朴"}, "朴朴", None, 0, "0"),
    "cmnli": (
        {"sentence1": "权利", "sentence2": "福利", "label": "contradiction"}, "权利", "福利", 2, "0",
    ),
    "ocnli": (NLI, "来到了出口", "他走了", 1, "7"),
    "wsc": (WSC, "这时候放在_床_上的手机响了,现在[它]突然响了。", None, 0, "261"),
    "csl": (
        {"id": 1, "abst": "为解决问题.", "keyword": ["水声学", "FFT"], "label": "1"},
        "水声学 FFT", "为解决问题.", 1, "1",
    ),
}  # fmt: skip


def put(folder, name, rows):
    folder.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return folder


def afqmc(label, **changes):
    return {"sentence1": "a", "sentence2": "b", "label": label} | changes


@pytest.mark.parametrize("task", TASKS)
def test_a_task_s_published_fields_are_read(tmp_path, task):
    row, first, second, label, name = ROWS[task]
    own = put(tmp_path / TASKS[task].folders[-1], "train.json", [row])
    put(own, "test.json", [{key: value for key, value in row.items() if key != "label"}])
    for folder in (tmp_path, own):
        found = read_clue(folder, task, "train")
        assert (found.first, found.ids) == ([first], [name])
        assert found.second == (None if second is None else [second])
        assert found.labels is not None and found.labels.tolist() == [label]
        test = read_clue(folder, task, "test")
        assert (test.first, test.second, test.labels) == (found.first, found.second, None)
        assert test.label_names == found.label_names and test.label_names is not None


@pytest.mark.parametrize("task", TASKS)
def test_a_task_s_table_agrees_with_itself(task):
    assert TASKS[task].best in TASKS[task].metrics and set(TASKS[task].metrics) <= set(METRICS)


def test_labels_come_from_labels_json_and_without_it_from_the_training_file(tmp_path):
    put(tmp_path, "train.json", [{"label": n, "sentence": "x"} for n in ("109", "12", "109")])
    put(tmp_path, "dev.json", [{"label": "12", "sentence": "x"}])
    assert read_clue(tmp_path, "tnews", "validation").label_names == ("12", "109")
    put(tmp_path, "labels.json", [{"label": n, "label_desc": "y"} for n in ("7", "109", "12")])
    found = read_clue(tmp_path, "tnews", "validation")
    assert found.label_names == ("7", "12", "109")
    assert found.labels is not None and found.labels.tolist() == [1]


def test_labels_may_be_numbers_and_truth_values(tmp_path):
    put(tmp_path, "dev.json", [afqmc(1), afqmc(0)])
    found = read_clue(tmp_path, "afqmc", "validation")
    assert found.labels is not None and found.labels.tolist() == [1, 0]
    found = read_clue(put(tmp_path, "dev.json", [WSC | {"label": True}]), "wsc", "validation")
    assert found.labels is not None and found.labels.tolist() == [1]


def test_an_unknown_label_of_the_development_file_is_told_with_file_and_line(tmp_path):
    put(tmp_path, "train.json", [{"label": n, "sentence": "x"} for n in ("100", "101")])
    put(tmp_path, "dev.json", [{"label": n, "sentence": "x"} for n in ("100", "1001")])
    with pytest.raises(
        DataError, match=r"dev\.json \(line 2\): label '1001' is unknown; did you mean"
    ):
        read_clue(tmp_path, "tnews", "validation")


@pytest.mark.parametrize("task", ["cmnli", "ocnli"])
def test_rows_without_the_annotators_label_are_left_out_and_counted(tmp_path, task):
    folder = put(tmp_path, "dev.json", [NLI | {"label": "-"}, NLI, NLI | {"sentence2": ""}])
    found = read_clue(folder, task, "validation")
    assert len(found) == 2 and found.remarks == {UNLABELLED: 1, EMPTY_TEXT: 1}
    with pytest.raises(DataError, match="no labelled row"):
        read_clue(put(tmp_path, "dev.json", [NLI | {"label": "-"}]), task, "validation")


def test_the_training_set_of_ocnli_is_read_under_its_published_name(tmp_path):
    for size, rows in (("1k", 1), ("50k", 3)):
        put(tmp_path, f"train.{size}.json", [NLI] * rows)
    assert len(read_clue(tmp_path, "ocnli", "train")) == 3
    assert len(read_clue(put(tmp_path, "train.json", [NLI] * 2), "ocnli", "train")) == 2


def test_a_dash_is_an_unknown_label_where_none_may_lack(tmp_path):
    with pytest.raises(DataError, match=r"dev\.json \(line 1\): label '-' is unknown"):
        read_clue(put(tmp_path, "dev.json", [afqmc("-")]), "afqmc", "validation")


def test_the_pronoun_may_stand_before_the_noun(tmp_path):
    target = {"span1_text": "cd", "span1_index": 3, "span2_text": "a", "span2_index": 0}
    row = {"text": "ab cd", "target": target, "label": "true"}
    assert read_clue(put(tmp_path, "dev.json", [row]), "wsc", "validation").first == ["[a]b _cd_"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"span1_index": 6}, "span1 '床' is not at character 6"), ({"span2_text": ""}, "span2 '' is not at"),
        ({"span1_index": None}, "span1 '床' is not at character None"), (None, "'target' is no object"),
    ],
)  # fmt: skip
def test_a_span_that_is_not_where_it_is_said_to_be_is_refused(tmp_path, changes, told):
    target = None if changes is None else WSC["target"] | changes
    folder = put(tmp_path, "dev.json", [WSC, WSC | {"target": target}])
    with pytest.raises(DataError, match=rf"dev\.json \(line 2\): {told}"):
        read_clue(folder, "wsc", "validation")


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ('{"sentence1": "a"', "is no JSON"), (afqmc(None), "the label is null"),
        ({"sentence1": "a", "sentence2": "b"}, "has no column 'label'"),
        (afqmc("1", sentence1=3), "'sentence1' is a number"),
        ({"sentence1": "a", "sentence_2": "b", "label": "1"}, "no column 'sentence2'; did you mean 'sentence_2'"),
        (afqmc("2"), "label '2' is unknown"),
    ],
)  # fmt: skip
def test_a_broken_row_is_told_with_file_and_line(tmp_path, row, told):
    folder = put(tmp_path, "train.json", [afqmc("0"), row, afqmc("1")])
    with pytest.raises(DataError, match=rf"train\.json \(line 2\): .*{told}"):
        read_clue(folder, "afqmc", "train")


def test_keywords_have_to_be_a_list_of_strings(tmp_path):
    row, *_ = ROWS["csl"]
    with pytest.raises(DataError, match=r"dev\.json \(line 1\): 'keyword' is no list of strings"):
        read_clue(put(tmp_path, "dev.json", [row | {"keyword": "a b"}]), "csl", "validation")
    del row["keyword"]
    with pytest.raises(DataError, match=r"dev\.json \(line 1\): has no column 'keyword'"):
        read_clue(put(tmp_path, "dev.json", [row]), "csl", "validation")


def test_a_missing_and_an_empty_file_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"dev\.json: no such file"):
        read_clue(tmp_path, "afqmc", "validation")
    with pytest.raises(DataError, match=r"dev\.json: is empty"):
        read_clue(put(tmp_path, "dev.json", []), "afqmc", "validation")


@pytest.mark.parametrize(("task", "split"), [("chid", "test"), ("afqmc", "dev")])
def test_an_unknown_task_or_split_is_refused_with_those_there_are(tmp_path, task, split):
    with pytest.raises(ConfigError, match="choose one of"):
        read_clue(tmp_path, task, split)


def test_the_server_s_files_have_the_names_of_version_1_1():
    assert {task: server_file(task) for task in TASKS} == {
        "afqmc": "afqmc_predict.json",
        "tnews": "tnews11_predict.json",
        "iflytek": "iflytek_predict.json",
        "cmnli": "cmnli_predict.json",
        "ocnli": "ocnli_50k_predict.json",
        "wsc": "cluewsc11_predict.json",
        "csl": "csl_predict.json",
    }


def test_the_server_s_file_has_an_object_a_line_with_id_and_label(tmp_path):
    examples = TextExamples(["x", "y"], None, None, ["0", "a7"], ("100", "101"))
    path = tmp_path / server_file("tnews")
    write_server_file(path, "tnews", examples, np.array([1, 0]))
    assert path.read_text() == '{"id": 0, "label": "101"}\n{"id": "a7", "label": "100"}\n'
    with pytest.raises(DataError, match="1 predictions for 2 examples of tnews"):
        write_server_file(path, "tnews", examples, np.array([1]))
