"""`bert squad`, `bert glue` and `bert ner` from files to scores, on small models and synthetic data."""

import json
from operator import itemgetter

import numpy as np
import pytest
from support.hf_models import change_weights
from support.metrics import scores_of
from support.runs import lines_of
from support.tiny_models import OTHERS, TINY, write_model, write_questions

from bert_cli.cli import main
from bert_cli.config.finetune import GlueSettings, SquadSettings
from bert_cli.data.finetune import squad_windows
from bert_cli.data.tokens.tokenizer import read_tokenizer
from bert_cli.facts.architectures import ARCHITECTURES, shape_of
from bert_cli.model.build import build_blocks
from bert_cli.parallel.tensorflow.mesh import group_of
from bert_cli.tasks.finetune import glue, squad
from bert_cli.tasks.run.resolve import open_mesh
from bert_cli.tasks.run.teacher import find_labels
from bert_cli.train.checkpoint import Folder

COMMON = [
    "--max-seq-length", "64", "--global-batch.micro-batch-size", "8", "--log-every-steps", "100",
    "--optimizer-opts.learning-rate.max-learning-rate", "0.003",
]  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    base = tmp_path_factory.mktemp("tasks")
    write_model(base / "model", TINY.model_copy(update={"num_hidden_layers": 1}))
    return base


def train(base, run, *words, model="model"):
    words += ("--pretrained-ckpt-path", base / model, "--save-ckpt-path", base / run)
    words += ("--evaluate-every-steps", 1000)  # at the end alone
    assert main([*map(str, words), *COMMON, "--cache-dir", str(base / "cache")]) == 0
    return base / run


def read(path):
    return json.loads(path.read_text())


def changed(run, out, weights, **described):
    """Copy the best checkpoint of a run with other weights and other entries of its config.json."""
    model = change_weights(Folder(run).best_checkpoint, out, weights)
    (model / "config.json").write_text(json.dumps(read(model / "config.json") | described))
    return model


# --- questions

SQUAD = ["--doc-stride", "16", "--max-query-length", "8", "--num-epochs", "4"]


@pytest.fixture(scope="module")
def answered(base):
    write_questions(base / "train-v1.1.json", 120, 1)
    write_questions(base / "dev-v1.1.json", 40, 2)
    return train(base, "squad", "squad", "--dataset-dir", base, *SQUAD)


@pytest.mark.parametrize(
    "architecture",
    ["bert", *(pytest.param(name, marks=pytest.mark.slow) for name in ("groupbert", "modernbert"))],
)
def test_transformers_finds_the_same_answer(base, answered, architecture):
    import torch
    import transformers

    run, trust = answered, {"trust_remote_code": architecture == "groupbert"}
    if architecture != "bert":
        changes = {"architecture": architecture, "num_hidden_layers": 1, "layer_norm_eps": 1e-3}
        config = shape_of({**TINY.model_dump(exclude_unset=True), **changes})
        last_blocks = ARCHITECTURES[architecture].heads["heads"].last_blocks
        blocks = build_blocks(config, seed=3, policy="float32", last_blocks=last_blocks)
        write_model(base / architecture, config, blocks=blocks)
        words = ["squad", "--dataset-dir", base, *SQUAD]
        run = train(base, f"{architecture}_squad", *words, "--num-epochs", 1, model=architecture)
        # Of the same class as the task's.
        output = base / f"{architecture}_scores"
        scores = [*words, "--no-do-training", "--output-dir", output]
        assert main([*map(str, scores), *COMMON, "--pretrained-ckpt-path", str(run)]) == 0
        assert read(output / "scores.json") == read(run / "scores.json")
    folder = Folder(run).best_checkpoint
    model, report = transformers.AutoModelForQuestionAnswering.from_pretrained(
        folder, output_loading_info=True, **trust
    )
    assert not any(report.values()), report
    model.eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **trust)
    nbest = read(run / "nbest_predictions.json")
    for paragraph in read(base / "dev-v1.1.json")["data"][0]["paragraphs"][:5]:
        (question,) = paragraph["qas"]
        inputs = tokenizer(question["question"], paragraph["context"], return_tensors="pt")
        with torch.no_grad():
            out = model(**inputs)
        inside = [n for n, part in enumerate(inputs.sequence_ids(0)) if part == 1]
        start, end = out.start_logits[0], out.end_logits[0]
        spans = [(start[i] + end[j], i, j) for i in inside for j in inside if 0 <= j - i < 30]
        score, first, last = max(spans)
        best, offsets = nbest[question["id"]][0], inputs.encodings[0].offsets
        assert float(score) == pytest.approx(best["start_logit"] + best["end_logit"], abs=1e-4)
        assert best["text"] == paragraph["context"][offsets[first][0] : offsets[last][1]]


# --- GLUE

GLUE = ["glue", "--do-test", "--glue-task"]
LABELS = ["entailment", "neutral", "contradiction"]
ROTATED = [LABELS[2], *LABELS[:2]]  # its inverse is another order
HEADS = ("classifier.weight", "classifier.bias")
FIRST = 100  # index, so that an index is not the number of its row


def write_glue(folder, rows, columns, make, files=("train", "dev", "test")):
    """Write rows of an index, texts and a label; a test set has no labels."""
    folder.mkdir(parents=True)
    for seed, name in enumerate(files, 1):
        draw = np.random.default_rng(seed)
        lines = [columns, *(make(draw) for _ in range(rows))]
        index = ["index", *map(str, range(FIRST, FIRST + rows))]
        end = -1 if name.startswith("test") else None
        lines = [[own, *line[:end]] for own, line in zip(index, lines, strict=True)]
        (folder / f"{name}.tsv").write_text("".join("\t".join(line) + "\n" for line in lines))


def premise(draw):
    label, words = int(draw.integers(3)), draw.choice(OTHERS, 9)
    words[::2] = ("good", "bad", "awful")[label]
    return [" ".join(words), "what is it", LABELS[label]]


@pytest.fixture(scope="module")
def entailed(base):
    files = ("train", "dev_matched", "dev_mismatched", "test_matched", "test_mismatched")
    columns = ["sentence1", "sentence2", "gold_label"]
    write_glue(base / "glue" / "MNLI", 45, columns, premise, files)
    return train(base, "mnli", *GLUE, "mnli", "--dataset-dir", base / "glue", "--num-epochs", "6")


def test_mnli_is_scored_on_both_sets_and_predicted_for_both_files_of_the_server(entailed):
    scores = scores_of(entailed)
    assert list(scores) == ["accuracy", "accuracy_mismatched"]
    index = [*map(str, range(FIRST, FIRST + 45))]
    for name, score in zip(("", "_mismatched"), scores.values(), strict=True):
        rows = lines_of(entailed / f"predictions{name}.jsonl")
        assert [row["id"] for row in rows] == index and {"text", "second"} < set(rows[0])
        assert np.mean([row["label"] == row["predicted"] for row in rows]) == score > 0.7
    for seed, name in ((4, "MNLI-m.tsv"), (5, "MNLI-mm.tsv")):
        header, *lines = (entailed / name).read_text().splitlines()
        numbers, predicted = zip(*(line.split("\t") for line in lines), strict=True)
        assert header == "index\tprediction" and [*numbers] == index
        draw = np.random.default_rng(seed)
        assert np.mean([premise(draw)[2] == label for label in predicted]) > 0.7


def test_a_model_that_is_only_scored_may_have_another_order_of_labels(
    base, entailed, tmp_path, bert
):
    heads = dict.fromkeys(HEADS, itemgetter([2, 0, 1]))
    model = changed(entailed, tmp_path / "rotated", heads, id2label=dict(enumerate(ROTATED)))
    words = [*GLUE, "mnli", "--dataset-dir", base / "glue", *COMMON, "--no-do-training"]
    done = bert(*words, "--save-ckpt-path", tmp_path, "--pretrained-ckpt-path", model)
    assert done.last == scores_of(entailed)
    # The test set has no labels that could show a swap.
    assert (tmp_path / "MNLI-m.tsv").read_text() == (entailed / "MNLI-m.tsv").read_text()


def test_the_outputs_of_a_teacher_are_in_the_order_of_the_tasks_labels(base, entailed, tmp_path):
    heads = dict.fromkeys(HEADS, itemgetter([2, 0, 1]))
    rotated = changed(entailed, tmp_path / "rotated", heads, id2label=dict(enumerate(ROTATED)))
    tokenizer = read_tokenizer(base / "model")
    columns = []
    for teacher in (entailed, rotated):
        values = {"glue_task": "mnli", "dataset_dir": base / "glue", "max_seq_length": 64}
        values |= {"cache_dir": None, "distillation": {"teacher": str(teacher)}}
        settings = GlueSettings.model_validate(values)
        task = glue.build(settings, tokenizer, None)
        taught = find_labels(settings, tokenizer, task)(group_of(open_mesh(settings)))
        columns.append(taught.train.labels["teacher_logits"])
    np.testing.assert_allclose(columns[0], columns[1], atol=1e-6)
    # The teacher is right about most examples.
    assert (columns[1].argmax(1) == taught.train.labels["labels"]).mean() > 0.7


SIZES = {"max_seq_length": 64, "doc_stride": 16, "max_query_length": 8}


@pytest.mark.parametrize(
    "change",
    [
        {}, {"max_seq_length": 65}, {"doc_stride": 17}, {"max_query_length": 9}, {"version_2": True},
        {"max_answer_length": 7}, "file", "tokenizer", "training",
    ],
)  # fmt: skip
def test_windows_are_made_again_after_a_change_of_what_they_depend_on(
    change, base, tmp_path, monkeypatch, larger_tokenizer
):
    made = []
    make = squad_windows.make_windows
    monkeypatch.setattr(
        squad_windows, "make_windows", lambda *of, **to: made.append(to) or make(*of, **to)
    )
    write_questions(tmp_path / "dev.json", 9, 2)
    write_questions(tmp_path / "other.json", 8, 1)
    files = {which: tmp_path / "dev.json" for which in ("train_file", "validation_file")}
    values = {**SIZES, **files, "cache_dir": tmp_path}
    tokenizer = read_tokenizer(base / "model")
    squad._read(SquadSettings.model_validate(values), tokenizer, training=True)
    training = change != "training"
    tokenizer = larger_tokenizer if change == "tokenizer" else tokenizer
    values |= {"train_file": tmp_path / "other.json"} if change == "file" else {}
    values |= change if isinstance(change, dict) else {}
    settings = SquadSettings.model_validate(values)
    questions, windows = squad._read(settings, tokenizer, training=training)
    is_equal = change in ({}, {"max_answer_length": 7})
    assert len(made) == (1 if is_equal else 2)
    assert windows.question.max() == len(questions) - 1
