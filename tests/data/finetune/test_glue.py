"""The tasks of GLUE and CLUE: files and labels as published, their oddities, and the files for the servers."""

import json

import numpy as np
import pytest

from bert_cli.config.finetune import CLUE_TASKS, GLUE_TASKS
from bert_cli.data.finetune import glue
from bert_cli.data.finetune.tables import EMPTY_TEXT, REPEATED, TextExamples

PAIR, NLI = "index\tsentence1\tsentence2", "entailment neutral contradiction"
STSB = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2"
MNLI = (
    "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\t"
    "sentence1_parse\tsentence2_parse\tsentence1\tsentence2"
)
# GLUE: as published, the header of the test file, and the header and a row of a labelled one. Then what the row is
# read as: its texts, the number of its label or its score, and all labels in the order of Hugging Face's copy of
# GLUE, which published models have in their configs.
GLUE = {
    "cola": ("index\tsentence", "", 'gj04\t0\t*\tIt "is".', ['It "is".'], 0, "unacceptable acceptable"),
    "mnli": (
        MNLI, f"{MNLI}\tlabel1\tgold_label",
        "0\t1\t1n\tfiction\t(a)\t(b)\t(c)\t(d)\tOne.\tTwo.\tneutral\tcontradiction", ["One.", "Two."], 2, NLI,
    ),
    "mrpc": (
        "index\t#1 ID\t#2 ID\t#1 String\t#2 String", "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String",
        '1\t70\t71\tOne .\tTwo " .', ["One .", 'Two " .'], 1, "not_equivalent equivalent",
    ),
    "qnli": (
        "index\tquestion\tsentence", "index\tquestion\tsentence\tlabel", "0\tWho?\tHe.\tnot_entailment",
        ["Who?", "He."], 1, "entailment not_entailment",
    ),
    "qqp": (
        "id\tquestion1\tquestion2", "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
        "133273\t1\t2\tHow?\tWhy?\t0", ["How?", "Why?"], 0, "not_duplicate duplicate",
    ),
    "rte": (
        PAIR, f"{PAIR}\tlabel", "0\tOne.\tTwo.\tentailment", ["One.", "Two."], 0, "entailment not_entailment"
    ),
    "sst2": ("index\tsentence", "sentence\tlabel", "fine \t1", ["fine "], 1, "negative positive"),
    "stsb": (
        STSB, f"{STSB}\tscore", "0\tmain-captions\tMSRvid\t2012test\t0001\tnone\tnone\tOne.\tTwo.\t4.750",
        ["One.", "Two."], 4.75, None,
    ),
    "wnli": (PAIR, f"{PAIR}\tlabel", "0\tOne.\tTwo.\t1", ["One.", "Two."], 1, "not_entailment entailment"),
}  # fmt: skip
# CLUE: a row as published, then what it is read as: first text, second text, label number, id.
WSC = {
    "target": {"span2_index": 15, "span1_index": 5, "span1_text": "床", "span2_text": "它"},
    "idx": 261, "label": "false", "text": "这时候放在床上的手机响了,现在它突然响了。",
}  # fmt: skip
OCNLI = {
    "level": "easy", "sentence1": "来到了出口", "sentence2": "他走了", "label": "neutral",
    "label0": "neutral", "genre": "lit", "prem_id": "lit_1", "id": 7,
}  # fmt: skip
CLUE_ROWS = {
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
    "ocnli": (OCNLI, "来到了出口", "他走了", 1, "7"),
    "wsc": (WSC, "这时候放在_床_上的手机响了,现在[它]突然响了。", None, 0, "261"),
    "csl": (
        {"id": 1, "abst": "为解决问题.", "keyword": ["水声学", "FFT"], "label": "1"},
        "水声学 FFT", "为解决问题.", 1, "1",
    ),
}  # fmt: skip


def put(folder, name, text):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8", newline="")
    return folder


def put_rows(folder, name, rows):
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    return put(folder, name, "".join(f"{line}\n" for line in lines))


def afqmc(label, **changes):
    return {"sentence1": "a", "sentence2": "b", "label": label} | changes


def test_every_task_of_the_settings_is_in_the_table_with_known_metrics():
    assert tuple(glue.TASKS) == (*GLUE_TASKS, *CLUE_TASKS)
    known = {"accuracy", "f1", "macro_f1", "matthews", "pearson", "spearman"}
    assert all({task.best} <= set(task.metrics) <= known for task in glue.TASKS.values())


@pytest.mark.parametrize("task", GLUE_TASKS)
def test_the_published_columns_and_labels_of_a_glue_task_are_read(tmp_path, task):
    own = tmp_path / glue.TASKS[task].folders[0]
    bare_head, head, row, texts, label, order = GLUE[task]
    columns, labelled = bare_head.split("\t"), f"{head}\n{row}\n".lstrip("\n")
    unlabelled = "\t".join(["0", *(f"A {name}." for name in columns[1:])])
    for split, name in glue.TASKS[task].files.items():
        text = f"{bare_head}\n{unlabelled}\n" if split.startswith("test") else labelled
        put(own, name, text.replace("One.", "Other.") if "mism" in split else text)
    for folder in (tmp_path, own):
        result = glue.read_split(folder, task, "train")
        assert [*result.first, *(result.second or [])] == texts
        assert (result.labels.tolist(), result.remarks) == ([label], {})
        assert result.label_names == (order and tuple(order.split()))
        assert result.ids == ["133273" if task == "qqp" else "0"]
        bare = glue.read_split(folder, task, "test")
        assert bare.labels is None and bare.ids == ["0"] and bare.label_names == result.label_names
        assert bare.first == [f"A {columns[-len(texts)]}."]
    if task == "mnli":
        assert glue.read_split(own, task, "validation").first == ["One."]
        assert glue.read_split(own, task, "validation_mismatched").first == ["Other."]


def test_quotes_and_other_line_breaks_are_text_and_more_columns_are_counted(tmp_path):
    rows = '0\t"One\u2028a\tTwo\x85"\tentailment\r\n1\t"\ttwo\tnot_entailment\tx\r\n'
    put(tmp_path, "dev.tsv", "index\tsentence1\tsentence2\tlabel\n" + rows)
    result = glue.read_split(tmp_path, "rte", "validation")
    assert (result.first, result.second) == (['"One\u2028a', '"'], ['Two\x85"', "two"])
    assert result.remarks == {glue.LONG_ROW: 1}


def test_the_real_files_are_read_completely_with_known_rows(shared_data):
    for task, counts, repeated in (
        # The copy of MRPC here has a training row fewer than the 3,668 of other copies.
        ("cola", (8551, 1043, 1063), (23, 4, 3)),
        ("mrpc", (3667, 408, 1725), (0, 0, 0)),
        ("rte", (2490, 277, 3000), (2, 0, 1)),
        ("sst2", (67349, 872, 1821), (379, 0, 0)),
    ):
        splits = ("train", "validation", "test")
        parts = [glue.read_split(shared_data / "glue", task, split) for split in splits]
        assert tuple(len(part) for part in parts) == counts
        assert tuple(part.remarks.get(REPEATED, 0) for part in parts) == repeated
        assert all({*part.remarks} <= {REPEATED} for part in parts)
        assert parts[2].ids == [str(number) for number in range(counts[2])]
    # 279 of 408 development pairs are paraphrases: the score of always saying so is 0.684.
    mrpc = glue.read_split(shared_data / "glue" / "MRPC", "mrpc", "validation")
    assert mrpc.second[0].startswith('" The foodservice pie business')
    assert mrpc.labels[:2].tolist() == [1, 0] and int(mrpc.labels.sum()) == 279


@pytest.mark.parametrize("task", CLUE_TASKS)
def test_the_published_fields_of_a_clue_task_are_read(tmp_path, task):
    row, first, second, label, name = CLUE_ROWS[task]
    own = put_rows(tmp_path / glue.TASKS[task].folders[-1], "train.json", [row])
    put_rows(own, "test.json", [{key: value for key, value in row.items() if key != "label"}])
    for folder in (tmp_path, own):
        result = glue.read_split(folder, task, "train")
        assert (result.first, result.ids) == ([first], [name])
        assert result.second == (None if second is None else [second])
        assert result.labels.tolist() == [label]
        test = glue.read_split(folder, task, "test")
        assert (test.first, test.second, test.labels) == (result.first, result.second, None)
        assert test.label_names == result.label_names and test.label_names is not None


def test_labels_come_from_labels_json_and_without_it_from_the_training_file(tmp_path):
    put_rows(tmp_path, "train.json", [{"label": n, "sentence": "x"} for n in ("109", "12", "109")])
    put_rows(tmp_path, "dev.json", [{"label": "12", "sentence": "x"}])
    assert glue.read_split(tmp_path, "tnews", "validation").label_names == ("12", "109")
    put_rows(tmp_path, "labels.json", [{"label": n, "label_desc": "y"} for n in ("7", "109", "12")])
    result = glue.read_split(tmp_path, "tnews", "validation")
    assert result.label_names == ("7", "12", "109") and result.labels.tolist() == [1]


def test_other_labels_names_and_orders_are_read(tmp_path):
    folder = put_rows(tmp_path, "dev.json", [afqmc(1), afqmc(0)])
    assert glue.read_split(folder, "afqmc", "validation").labels.tolist() == [1, 0]
    # The pronoun may precede the noun.
    target = {"span1_text": "cd", "span1_index": 3, "span2_text": "a", "span2_index": 0}
    put_rows(tmp_path, "dev.json", [{"text": "ab cd", "target": target, "label": True}])
    wsc = glue.read_split(folder, "wsc", "validation")
    assert wsc.labels.tolist() == [1] and wsc.first == ["[a]b _cd_"]
    # OCNLI's training set has its published name.
    for size, rows in (("1k", 1), ("50k", 3)):
        put_rows(tmp_path, f"train.{size}.json", [OCNLI] * rows)
    assert len(glue.read_split(tmp_path, "ocnli", "train")) == 3
    put_rows(tmp_path, "train.json", [OCNLI] * 2)
    assert len(glue.read_split(tmp_path, "ocnli", "train")) == 2


def test_rows_without_the_annotators_label_are_left_out_and_counted(tmp_path):
    for task in ("cmnli", "ocnli"):
        put_rows(tmp_path, "dev.json", [OCNLI | {"label": "-"}, OCNLI, OCNLI | {"sentence2": ""}])
        result = glue.read_split(tmp_path, task, "validation")
        assert len(result) == 2 and result.remarks == {glue.UNLABELLED: 1, EMPTY_TEXT: 1}


def two(task, ids=("0", "1"), names=None):
    return TextExamples(["a", "b"], None, None, list(ids), names or glue.TASKS[task].label_names)


def test_the_file_for_gluebenchmark_has_words_integers_or_scores(tmp_path):
    for task, predictions, lines in (
        ("mnli", [2, 0], "0\tcontradiction\n1\tentailment\n"),
        ("cola", [1, 0], "0\t1\n1\t0\n"),
        ("stsb", [-0.2, 5.3], "0\t0.000\n1\t5.000\n"),
        ("stsb", [1.23449, 4], "0\t1.234\n1\t4.000\n"),
    ):
        path = tmp_path / glue.TASKS[task].server_files["test"]
        glue.write_server_file(path, task, two(task), np.array(predictions))
        assert path.read_text() == "index\tprediction\n" + lines


def test_the_file_for_clue_has_an_object_per_line_and_the_name_of_version_1_1(tmp_path):
    files = {task: glue.TASKS[task].server_files["test"] for task in CLUE_TASKS}
    others = {"tnews": "tnews11", "ocnli": "ocnli_50k", "wsc": "cluewsc11"}
    assert files == {task: f"{others.get(task, task)}_predict.json" for task in CLUE_TASKS}
    path = tmp_path / files["tnews"]
    examples = two("tnews", ("0", "a7"), ("100", "101"))
    glue.write_server_file(path, "tnews", examples, np.array([1, 0]))
    assert path.read_text() == '{"id": 0, "label": "101"}\n{"id": "a7", "label": "100"}\n'
