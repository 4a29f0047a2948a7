"""GLUE's files as published, their oddities, and what the server takes."""

import numpy as np
import pytest

from bert_cli.data.finetune.examples import EMPTY_TEXT, TextExamples
from bert_cli.data.finetune.glue import LONG_ROW, SHORT_ROW, TASKS, read_glue, write_server_file
from bert_cli.data.finetune.metrics import METRICS
from bert_cli.errors import ConfigError, DataError

MNLI_HEAD = (
    "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\t"
    "sentence1_parse\tsentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label"
)
# Header and rows as the distribution has them, a labelled and a test file of each task.
FILES = {
    "cola": ("gj04\t1\t\tIt \"is\".\nks08\t0\t*\tIs it.\n", "index\tsentence\n0\tSo it is.\n"),
    "mnli": (
        f"{MNLI_HEAD}\n0\t1\t1n\tfiction\t(a)\t(b)\t(c)\t(d)\tOne.\tTwo.\tneutral\tcontradiction\n",
        MNLI_HEAD.rsplit("\t", 2)[0] + "\n0\t1\t1n\tfiction\t(a)\t(b)\t(c)\t(d)\tThree.\tFour.\n",
    ),
    "mrpc": (
        "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t70\t71\tOne .\tTwo \" .\n",
        "index\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t10\t11\tThree .\tFour .\n",
    ),
    "qnli": (
        "index\tquestion\tsentence\tlabel\n0\tWho?\tHe.\tnot_entailment\n",
        "index\tquestion\tsentence\n0\tWhen?\tNow.\n",
    ),
    "qqp": (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n133273\t1\t2\tHow?\tWhy?\t0\n",
        "id\tquestion1\tquestion2\n0\tWhat?\tWhere?\n",
    ),
    "rte": (
        "index\tsentence1\tsentence2\tlabel\n0\tOne.\tTwo.\tentailment\n",
        "index\tsentence1\tsentence2\n0\tThree.\tFour.\n",
    ),
    "sst2": ("sentence\tlabel\nfine \t1\n", "index\tsentence\n0\tbad\n"),
    "stsb": (
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
        "0\tmain-captions\tMSRvid\t2012test\t0001\tnone\tnone\tOne.\tTwo.\t4.750\n",
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\n"
        "0\tmain-captions\tMSRvid\t2012test\t0024\tnone\tnone\tThree.\tFour.\n",
    ),
    "wnli": (
        "index\tsentence1\tsentence2\tlabel\n0\tOne.\tTwo.\t1\n",
        "index\tsentence1\tsentence2\n0\tThree.\tFour.\n",
    ),
}  # fmt: skip
READ = {
    "cola": (['It "is".', "Is it."], None, [1, 0]), "mnli": (["One."], ["Two."], [2]),
    "mrpc": (["One ."], ['Two " .'], [1]), "qnli": (["Who?"], ["He."], [1]),
    "qqp": (["How?"], ["Why?"], [0]), "rte": (["One."], ["Two."], [0]),
    "sst2": (["fine "], None, [1]), "stsb": (["One."], ["Two."], [4.75]),
    "wnli": (["One."], ["Two."], [1]),
}  # fmt: skip


def put(folder, name, text):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8", newline="")
    return folder


def rte(folder, rows):
    return put(folder, "dev.tsv", "index\tsentence1\tsentence2\tlabel\n" + rows)


@pytest.mark.parametrize("task", TASKS)
def test_a_task_s_published_columns_are_read(tmp_path, task):
    own = tmp_path / TASKS[task].folder
    labelled, test = FILES[task]
    for split, name in TASKS[task].files.items():
        put(own, name, test if split.startswith("test") else labelled)
    first, second, labels = READ[task]
    for split in TASKS[task].files:
        found = read_glue(tmp_path, task, split)
        assert found.label_names == TASKS[task].label_names
        assert found.remarks == {}
        if split.startswith("test"):
            assert found.labels is None and found.ids == ["0"]
            assert (found.second is None) == (second is None)
        else:
            assert (found.first, found.second) == (first, second)
            assert found.labels is not None and found.labels.tolist() == labels
            assert found.labels.dtype == (np.float32 if task == "stsb" else np.int32)
    assert read_glue(own, task, "train").first == first


@pytest.mark.parametrize("task", TASKS)
def test_a_task_s_table_agrees_with_itself(task):
    table = TASKS[task]
    assert table.best in table.metrics and set(table.metrics) <= set(METRICS)
    assert (table.words is None) == (table.label_names is None) == (task == "stsb")
    assert table.words is None or len(table.words) == len(table.label_names)
    assert set(table.server_files) == {s for s in table.files if s.startswith("test")}


def test_mnli_has_a_file_for_each_of_its_splits(tmp_path):
    labelled, _ = FILES["mnli"]
    put(tmp_path, "dev_matched.tsv", labelled)
    put(tmp_path, "dev_mismatched.tsv", labelled.replace("One.", "Other."))
    assert read_glue(tmp_path, "mnli", "validation").first == ["One."]
    assert read_glue(tmp_path, "mnli", "validation_mismatched").first == ["Other."]


def test_quotes_and_other_line_breaks_are_text_and_crlf_ends_a_line(tmp_path):
    folder = rte(tmp_path, '0\t"One\u2028a\tTwo\x85"\tentailment\r\n1\t"\ttwo\tnot_entailment\r\n')
    found = read_glue(folder, "rte", "validation")
    assert (found.first, found.second) == (['"One\u2028a', '"'], ['Two\x85"', "two"])


def test_a_short_row_is_told_with_its_file_and_line(tmp_path):
    folder = rte(tmp_path, "0\tOne.\tTwo.\tentailment\n1\tOne.\tTwo.\n")
    with pytest.raises(DataError, match=r"dev\.tsv \(line 3\): has 3 of 4 columns"):
        read_glue(folder, "rte", "validation")


def test_qqp_s_broken_rows_are_left_out_and_counted_but_none_of_its_test_rows(tmp_path):
    head = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    put(
        tmp_path, "train.tsv", f"{head}1\t1\t2\tHow\n?\t1\n3\t1\t2\t\tWhy?\t0\n4\t1\t2\tA?\tB?\t1\n"
    )
    found = read_glue(tmp_path, "qqp", "train")
    assert (found.first, found.ids) == (["", "A?"], ["3", "4"])
    assert found.labels is not None and found.labels.tolist() == [0, 1]
    assert found.remarks == {SHORT_ROW: 2, EMPTY_TEXT: 1}
    put(tmp_path, "test.tsv", "id\tquestion1\tquestion2\n0\tA?\tB?\n1\tA?\n")
    with pytest.raises(DataError, match=r"test\.tsv \(line 3\): has 2 of 3 columns"):
        read_glue(tmp_path, "qqp", "test")


def test_a_row_with_more_columns_than_the_header_is_counted(tmp_path):
    found = read_glue(rte(tmp_path, "0\tOne.\tTwo.\tentailment\tx\n"), "rte", "validation")
    assert found.remarks == {LONG_ROW: 1} and found.second == ["Two."]


def test_an_unknown_label_is_told_with_its_file_line_and_the_nearest(tmp_path):
    folder = rte(tmp_path, "0\tOne.\tTwo.\tentailment\n1\tOne.\tTwo.\tnot_entailement\n")
    told = (
        r"dev\.tsv \(line 3\): label 'not_entailement' is unknown; did you mean 'not_entailment'\?"
    )
    with pytest.raises(DataError, match=told):
        read_glue(folder, "rte", "validation")


def test_a_missing_column_is_told_with_those_there_are(tmp_path):
    put(tmp_path, "dev.tsv", "index\tsentence 1\tsentence2\tlabel\n0\ta\tb\tentailment\n")
    told = r"dev\.tsv \(line 1\): has no column 'sentence1'; did you mean 'sentence 1'\? it has 'index'"
    with pytest.raises(DataError, match=told):
        read_glue(tmp_path, "rte", "validation")


@pytest.mark.parametrize(("text", "told"), [("", "is empty"), ("index\tsentence1\n", "no rows")])
def test_a_file_without_rows_is_refused(tmp_path, text, told):
    with pytest.raises(DataError, match=rf"dev\.tsv: .*{told}"):
        read_glue(put(tmp_path, "dev.tsv", text), "rte", "validation")


def test_a_missing_file_is_told_with_the_folder_to_give(tmp_path):
    with pytest.raises(DataError, match=r"dev\.tsv: no such file; give the folder that holds RTE"):
        read_glue(tmp_path, "rte", "validation")


@pytest.mark.parametrize("score", ["5.2", "-1", "nan", "much"])
def test_a_score_that_is_none_is_told_with_its_line(tmp_path, score):
    labelled, _ = FILES["stsb"]
    put(tmp_path, "dev.tsv", labelled.replace("4.750", score))
    with pytest.raises(DataError, match=rf"dev\.tsv \(line 2\): .*{score}"):
        read_glue(tmp_path, "stsb", "validation")


@pytest.mark.parametrize(
    ("task", "split"), [("ax", "test"), ("rte", "dev"), ("rte", "test_mismatched")]
)
def test_an_unknown_task_or_split_is_refused_with_those_there_are(tmp_path, task, split):
    with pytest.raises(ConfigError, match="choose one of"):
        read_glue(tmp_path, task, split)


def two(task):
    return TextExamples(["a", "b"], None, None, ["0", "1"], TASKS[task].label_names)


@pytest.mark.parametrize(
    ("task", "predictions", "written"),
    [
        ("mnli", [2, 0], "0\tcontradiction\n1\tentailment\n"), ("qnli", [1, 0], "0\tnot_entailment\n1\tentailment\n"),
        ("rte", [0, 1], "0\tentailment\n1\tnot_entailment\n"), ("cola", [1, 0], "0\t1\n1\t0\n"),
        ("wnli", [0, 1], "0\t0\n1\t1\n"), ("stsb", [-0.2, 5.3], "0\t0.000\n1\t5.000\n"),
        ("stsb", [1.23449, 4], "0\t1.234\n1\t4.000\n"),
    ],
)  # fmt: skip
def test_the_server_s_file_has_words_integers_or_scores(tmp_path, task, predictions, written):
    path = tmp_path / TASKS[task].server_files["test"]
    write_server_file(path, task, two(task), np.array(predictions))
    assert path.read_text() == "index\tprediction\n" + written


def test_the_server_wants_a_prediction_for_each_example(tmp_path):
    with pytest.raises(DataError, match="1 predictions for 2 examples"):
        write_server_file(tmp_path / "RTE.tsv", "rte", two("rte"), np.array([1]))


@pytest.mark.parametrize(
    ("task", "counts"),
    [
        # The copy of MRPC here has a training row fewer than the 3,668 that are told elsewhere.
        ("cola", (8551, 1043, 1063)), ("mrpc", (3667, 408, 1725)), ("rte", (2490, 277, 3000)),
        ("sst2", (67349, 872, 1821)),
    ],
)  # fmt: skip
def test_the_real_files_are_read_whole(shared_data, task, counts):
    parts = [read_glue(shared_data / "glue", task, s) for s in ("train", "validation", "test")]
    assert tuple(len(part) for part in parts) == counts
    assert all(part.remarks == {} for part in parts)
    assert parts[2].ids == [str(number) for number in range(counts[2])]


def test_known_rows_of_the_real_files(shared_data):
    glue = shared_data / "glue"
    cola = read_glue(glue, "cola", "train")
    assert cola.first[0].startswith("Our friends won't buy this analysis")
    assert cola.first[-1] == "What all did you get for Christmas?"
    mrpc = read_glue(glue / "MRPC", "mrpc", "validation")
    assert mrpc.first[1].startswith("Magnarelli said Racicot")
    assert mrpc.second is not None and mrpc.second[0].startswith('" The foodservice pie business')
    assert mrpc.labels is not None and mrpc.labels[:2].tolist() == [1, 0]
    # 279 of 408 development pairs are paraphrases: the score of always saying so is 0.684.
    assert int(mrpc.labels.sum()) == 279
    rte = read_glue(glue, "rte", "train")
    assert rte.labels is not None and rte.labels[:2].tolist() == [1, 0]
    assert rte.second is not None and rte.second[0] == "Weapons of Mass Destruction Found in Iraq."
    sst2 = read_glue(glue, "sst2", "validation")
    assert sst2.first[0] == "it 's a charming and often affecting journey . "
    assert sst2.labels is not None and sst2.labels[:2].tolist() == [1, 0]
