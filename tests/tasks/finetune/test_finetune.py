"""Fine-tuning, the same for all tasks: train, score, keep the best, continue, several seeds, any layout."""

import json
import os
import re
import shutil
import signal
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
from support.hf_models import change_weights
from support.metrics import printed_scores, scores_of
from support.runs import assert_same_end, lines_of
from support.tiny_models import write_base

from bert_cli.cli import main
from bert_cli.config.finetune import ClassifySettings
from bert_cli.data.finetune.tables import TextExamples
from bert_cli.data.random import chooses
from bert_cli.data.tokens.tokenizer import read_tokenizer
from bert_cli.errors import DeviceError
from bert_cli.parallel.tensorflow.mesh import group_of
from bert_cli.statistics import identify, mean_of
from bert_cli.tasks.finetune import classify, texts
from bert_cli.tasks.model.models import find_tokenizer
from bert_cli.tasks.run import task, teacher
from bert_cli.tasks.run.resolve import open_mesh
from bert_cli.tasks.run.task import Result, Scorer, Task
from bert_cli.tasks.run.teacher import find_labels
from bert_cli.train import checkpoint
from bert_cli.train.checkpoint import Folder, complete_checkpoints

FLAGS = [
    "--global-batch.micro-batch-size", "8", "--global-batch.grad-acc-steps-per-replica", "2",
    "--num-epochs", "3", "--optimizer-opts.learning-rate.max-learning-rate", "0.003",
    "--log-every-steps", "100", "--max-seq-length", "64",
]  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("finetune"), train=160, dev=61)


def arguments(base, run, *more, start="model", validation=True):
    files = ["--train-file", base / "train.csv", "--cache-dir", base / "cache"]
    files += ["--validation-file", base / "dev.csv"] if validation else []
    files += ["--pretrained-ckpt-path", base / start, "--save-ckpt-path", run]
    return ["classify", *map(str, files), *FLAGS, *more]


@pytest.fixture(scope="module")
def trained(base):
    run = base / "trained"
    assert main(arguments(base, run)) == 0
    return run


# --- training and scores


def test_transformers_knows_the_labels_the_length_and_the_tokens_of_the_best_checkpoint(trained):
    import transformers

    best = Folder(trained).best_checkpoint
    tokenizer = transformers.AutoTokenizer.from_pretrained(best)
    config = transformers.AutoConfig.from_pretrained(best)
    assert config.id2label == {0: "negative", 1: "positive"}
    # Special tokens in a text are plain characters, as in training, and the model's positions are known.
    assert not {3, 4} & {*tokenizer("good [MASK] [SEP]")["input_ids"][1:-1]}
    assert len(tokenizer("good " * 90, truncation=True)["input_ids"]) == 64


def test_a_model_is_scored_without_training(base, trained, bert):
    words = ["classify", "--validation-file", str(base / "dev.csv"), "--no-do-training"]
    words += ["--max-seq-length", "64", "--cache-dir", str(base / "cache")]
    output = base / "only" / "scored"
    out = bert(*words, "--pretrained-ckpt-path", trained, "--output-dir", output).out
    assert json.loads(out.splitlines()[-1]) == scores_of(trained) == scores_of(output)
    rows, expected = (lines_of(run / "predictions.jsonl") for run in (output, trained))
    assert [row["predicted"] for row in rows] == [row["predicted"] for row in expected]
    assert f"scores {Folder(trained).best_checkpoint}" in out
    assert "confusion of all 61 held-out texts (columns" in out
    assert bert("predict", trained, rows[0]["text"]).last["label"] == rows[0]["predicted"]


def test_half_of_the_held_out_texts_chooses_and_the_other_half_is_reported(base, bert):
    run = base / "halves"
    words = [*arguments(base, run, "--num-epochs", "1", validation=False)]
    words += ["--held-out-fraction", "0.3", "--evaluate-every-steps", "2"]
    out = bert(*words).out
    scores = printed_scores(out)
    assert "from the half of the held-out texts that chose nothing" in out
    rows = lines_of(run / "predictions.jsonl")
    right = np.array([row["label"] == row["predicted"] for row in rows])
    choosing = chooses(identify(row["text"] for row in rows).groups)
    texts_of = np.array([row["text"] for row in rows])
    assert not {*texts_of[choosing]} & {*texts_of[~choosing]} and abs(choosing.sum() - 24) <= 1
    assert scores == scores_of(run) and scores["accuracy"] == right[~choosing].mean()
    best = json.loads((run / "best.json").read_text())
    assert (best["metric"], best["value"]) == ("accuracy", right[choosing].mean())
    written = json.loads((run / "scores.json").read_text())["intervals"]["accuracy"]
    assert written["n"] == (~choosing).sum()
    assert f"{written['n']} rows cannot show a small difference" in out
    assert main(["export", str(run), str(base / "exported"), "--format", "hf"]) == 0
    card = (base / "exported" / "README.md").read_text()
    assert f"| accuracy | {scores['accuracy']:.4f} [" in card


@pytest.mark.slow
def test_several_seeds_have_a_mean_and_a_spread_and_hold_out_the_same_examples(
    base, trained, bert, capsys
):
    run = base / "seeds"
    words = ["--num-epochs", "1", "--seed", "5", "--held-out-fraction", "0.1"]
    start = {"start": "trained", "validation": False}
    assert main(arguments(base, run, *words, "--seeds", "2", **start)) == 0
    assert all((run / f"seed_{seed}" / "predictions.jsonl").is_file() for seed in (5, 6))
    each = [scores_of(run / f"seed_{seed}")["accuracy"] for seed in (5, 6)]
    spreads = json.loads((run / "scores.json").read_text())
    assert spreads.pop("own_crc32c")
    spread = spreads["accuracy"]
    assert spread["values"] == each
    assert spread["mean"] == pytest.approx(np.mean(each))
    assert spread["standard_deviation"] == pytest.approx(np.std(each, ddof=1))
    assert spread["low"] <= spread["mean"] <= spread["high"]
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1]) == spreads
    # Their mean is compared with the baselines, once.
    assert out.count("baseline, majority class: ") == 1
    verdict = "the mean of 2 seeds (beats|does not beat) the baseline '"
    assert re.search(f"{verdict}(?s:.*)2 seeds, 5 to 6:", out) or re.search(verdict, err)
    assert len([*run.glob("baselines_*")]) == 1 and not [*run.glob("seed_*/baselines_*")]
    for seed in (5, 6):
        assert re.search(
            verdict, (Folder(run / f"seed_{seed}").best_checkpoint / "README.md").read_text()
        )
    # The model that they start from has a classifier for these labels.
    assert "new weights from the seed" not in out
    scores = scores_of(run / "seed_6")
    again = bert(*arguments(base, run / "seed_6", *words, "--no-do-training", **start))
    assert again.last == scores
    assert str(run / "seed_5") in bert("predict", run, "good", code=4).err


def test_of_equal_scores_the_older_one_is_the_best_with_its_own_result(monkeypatch):
    results = iter([("old", 0.5), ("new", 0.5), ("worse", 0.4)])

    def evaluate(logits):
        table, value = next(results)
        return Result({"f1": mean_of([value])}, table=table)

    engine = SimpleNamespace(gather_weights=lambda: None)
    task = Task(2, None, None, {}, evaluate, "f1")
    scorer = Scorer(ClassifySettings(), task, lambda: False)
    assert [scorer.evaluate(engine, step)["f1"].value for step in (10, 20, 30)] == [0.5, 0.5, 0.4]
    assert (scorer.best, scorer.result.table) == ((10, 0.5), "old")
    monkeypatch.setattr(scorer, "_predict", lambda *_: np.array([[0.0, np.nan]]))
    with pytest.raises(DeviceError, match="dev: the model's outputs are not finite"):
        scorer.logits(engine, {"dev": None})


# --- interruptions and layouts


@pytest.mark.slow
def test_a_run_ends_after_evaluations_without_a_better_score(base, bert, capsys, monkeypatch):
    run = base / "early"
    rate = ["--optimizer-opts.learning-rate.max-learning-rate", "1e-7"]  # changes no score
    assert main(arguments(base, run, *rate, "--early-stop", "1")) == 0
    assert "run: ends early: 1 evaluation without a better score" in capsys.readouterr().out
    assert [path.name for path in complete_checkpoints(run)] == ["step_00000010", "step_00000020"]
    assert Folder(run).best_checkpoint.name == "step_00000010"
    read, real = [], checkpoint.read_json
    monkeypatch.setattr(checkpoint, "read_json", lambda *of: read.append(of[0].name) or real(*of))
    assert main(arguments(base, run, *rate, "--early-stop", "1")) == 0
    ended = "run: ended early at step 20 of 30; a larger --early-stop continues"
    assert ended in capsys.readouterr().out and read.count("best.json") == 1
    assert "  done  " in bert("runs", run).out
    # A run with more patience continues.
    assert main(arguments(base, run, *rate, "--early-stop", "2")) == 0
    assert [path.name for path in complete_checkpoints(run)][-1] == "step_00000030"


def test_the_same_command_scores_what_was_not_scored_and_prints_the_scores_again(
    base, trained, bert, monkeypatch
):
    """As a run that had no held-out texts, or was killed before its last score; with features from the cache."""
    ignored = shutil.ignore_patterns("scores.json", "best.json", "predictions*", "baselines*")
    run = shutil.copytree(trained, base / "unscored", ignore=ignored)
    path = run / "step_00000030" / "state.json"
    state = json.loads(path.read_text())
    del state["own_crc32c"]
    state["settings"] |= {"validation_file": None, "do_validation": False}
    path.write_text(json.dumps(state))
    (run / "settings.json").write_text(json.dumps({"format": 1, **state["settings"]}))
    assert main(arguments(base, run, "--no-do-validation", validation=False)) == 0
    assert not (run / "scores.json").exists() and not (run / "best.json").exists()
    monkeypatch.setattr(texts, "encode_texts", None)
    for message in ("step 30: held out, accuracy", "all 30 steps are done"):
        out = bert(*arguments(base, run)).out
        assert message in out and printed_scores(out) == scores_of(run)
        assert "; n 61, chosen on the same examples" in out
        assert json.loads((run / "best.json").read_text())["scored"] == 30


def test_a_stop_while_the_model_is_scored_loses_neither_step_nor_score(
    base, trained, monkeypatch, bert, capsys
):
    run, real = base / "stopped", task.by_length

    def with_a_signal(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments)

    with monkeypatch.context() as patched, pytest.raises(SystemExit, match="75"):
        patched.setattr(task, "by_length", with_a_signal)
        main([*arguments(base, run), "--exit-code-when-stopped", "75"])
    assert "stopped while scoring; the same command scores the model" in capsys.readouterr().out
    assert [path.name for path in complete_checkpoints(run)] == ["step_00000010"]
    assert "continues from" in bert(*arguments(base, run)).out
    assert_same_end(run, trained)
    assert scores_of(run) == scores_of(trained)
    assert Folder(run).best_checkpoint.name == Folder(trained).best_checkpoint.name
    lines = lines_of(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 31))
    scored = [line["step"] for line in lines if "validation_accuracy" in line]
    assert scored == [10, 20, 30] and "loss" in lines[9]
    monkeypatch.setattr(task, "by_length", with_a_signal)
    assert main([*arguments(base, run), "--no-do-training"]) == 130


# --- where a run starts


def without(words, flag):
    at = words.index(flag)
    return words[:at] + words[at + 2 :]


def test_without_a_length_the_tokenizers_is_used_and_a_classifier_for_other_labels_is_left_out(
    base, trained, tmp_path, bert
):
    # Without state.json, whose checksums a file that is changed on purpose would contradict.
    ignored = shutil.ignore_patterns("state.json")
    model = shutil.copytree(Folder(trained).best_checkpoint, tmp_path / "model", ignore=ignored)
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": 24}))
    text = (base / "train.csv").read_text()
    (tmp_path / "train.csv").write_text(text.replace("negative", "contra"))
    words = arguments(base, tmp_path / "run", "--dry-run", start=model, validation=False)
    words += ["--train-file", str(tmp_path / "train.csv")]
    out = bert(*without(words, "--max-seq-length")).out
    assert "max_seq_length is 24 (default)" in out
    assert "longer than 24 tokens, cut" in out
    assert "new weights from the seed: glue_head; not loaded: classifier" in out


def test_new_weights_need_a_tokenizer_and_a_shape(base, tmp_path, bert):
    ignored = shutil.ignore_patterns("config.json", "model.safetensors")
    vocabulary = shutil.copytree(base / "model", tmp_path / "vocab", ignore=ignored)
    words = without(arguments(base, tmp_path / "run", "--dry-run"), "--pretrained-ckpt-path")
    words += ["--tokenizer-path", str(vocabulary)]
    shape = ["--bert-config.hidden-size", "32", "--bert-config.num-attention-heads", "4"]
    shape += ["--bert-config.num-hidden-layers", "1", "--bert-config.intermediate-size", "64"]
    assert "starts with new weights from seed" in bert(*words, *shape).out
    for path in (vocabulary, vocabulary / "vocab.txt", base / "model"):
        assert read_tokenizer(find_tokenizer(str(path))).pieces[5] == "good"


def test_a_run_whose_gradients_were_never_finite_has_no_result(base, tmp_path, capsys):
    words = [*arguments(base, tmp_path / "run"), "--optimizer-opts.loss-scaling", "1e38"]
    words += ["--num-epochs", "0.3"]
    for attempt in ("first", "again"):
        assert main(words) == 5, attempt
        printed = capsys.readouterr()
        problem = "run (3 steps): no gradient was finite, so no step changed the weights"
        assert f"bert: {problem}" in printed.err
        assert "the model is" not in printed.out and "nothing to do" not in printed.out
    assert not (tmp_path / "run" / "scores.json").exists()


# --- distillation


def taught(base, teacher, file="train", more=None, **distillation):
    values = {"train_file": base / f"{file}.csv", "max_seq_length": 64, **(more or {})}
    values["distillation"] = {"teacher": str(teacher), **distillation}
    settings = ClassifySettings.model_validate(values)
    tokenizer = read_tokenizer(base / "model")
    learn = find_labels(settings, tokenizer, classify.build(settings, tokenizer, None))
    return learn(group_of(open_mesh(settings))).train


def test_texts_without_labels_have_the_teachers_outputs_alone(base, trained):
    alone, both, warmer = (
        taught(base, trained, more={"held_out_fraction": 0.5}, logits=0.6, **more)
        for more in ({}, {"unlabelled_file": base / "dev.csv"}, {"temperature": 3.0})
    )
    assert warmer.fingerprint != alone.fingerprint
    labels = both.labels
    assert len(alone) == 79 and len(both) == 79 + 61
    np.testing.assert_array_equal(labels["teacher_weight"], np.float32([0.6] * 79 + [1.0] * 61))
    np.testing.assert_array_equal(labels["labels"][:79], alone.labels["labels"])
    # The accuracy of the training counts no prediction of the teacher as a label.
    np.testing.assert_array_equal(labels["is_labelled"], np.float32([1] * 79 + [0] * 61))
    predicted = labels["teacher_logits"][79:].argmax(1)
    np.testing.assert_array_equal(labels["labels"][79:], predicted)
    assert 20 < predicted.sum() < 41 and labels["labels"].dtype == np.int32
    first = both.batch(np.array([79]), 64)["input_ids"][0]
    text = (base / "dev.csv").read_text().splitlines()[1].split(",")[0]
    encoding = read_tokenizer(base / "model").library.encode(text, add_special_tokens=False)
    assert first[1 : len(encoding.ids) + 1].tolist() == encoding.ids
    assert both.fingerprint.startswith(f"{alone.fingerprint}, unlabelled ")


CHANGES = {
    "nothing": {},
    "folder": {"cache_dir": "else"},
    "texts": {"first": ["good", "bad"]},
    "second": {"second": ["b", "a"]},
    "no second": {"second": None},
    "labels": {"labels": np.int32([1, 0])},
    "no labels": {"labels": None},
    "tokenizer": {},
    "length": {"max_seq_length": 17},
    "windows": {"doc_stride": 5},
}


@pytest.mark.parametrize("change", CHANGES)
def test_features_are_built_again_after_a_change_of_what_they_depend_on(
    change, base, tmp_path, monkeypatch, larger_tokenizer
):
    monkeypatch.chdir(tmp_path)
    built = []
    encode = texts.encode_texts
    monkeypatch.setattr(
        texts, "encode_texts", lambda *of, **to: built.append(1) or encode(*of, **to)
    )
    tokenizer = read_tokenizer(base / "model")
    settings = {"cache_dir": "cache", "max_seq_length": 16, "train_file": "rows.csv"}
    rows = TextExamples(["good film", "bad"], ["a", "b"], np.int32([0, 1]), ["0", "1"], ("n", "p"))

    def read():
        values = ClassifySettings.model_validate(settings)
        return texts.features_of_texts(rows, "train", values, tokenizer)

    before = read()
    tokenizer = larger_tokenizer if change == "tokenizer" else tokenizer
    columns = {field.name for field in fields(TextExamples)}
    rows = replace(rows, **{n: v for n, v in CHANGES[change].items() if n in columns})
    settings |= {n: v for n, v in CHANGES[change].items() if n not in columns}
    again = read()
    assert len(built) == (1 if change == "nothing" else 2)
    assert ("labels" in again.labels) == (change != "no labels")
    if change == "labels":
        assert again.labels["labels"].tolist() == [1, 0]
    is_equal = change in ("nothing", "folder", "tokenizer", "length")
    assert (before.fingerprint == again.fingerprint) == is_equal


def test_outputs_of_another_teacher_or_of_other_examples_are_computed_again(
    base, trained, tmp_path, monkeypatch
):
    read = []
    logits = teacher._logits
    monkeypatch.setattr(teacher, "_logits", lambda *of: read.append(len(of[-1])) or logits(*of))
    head = {"classifier.bias": lambda bias: bias + np.float32([1.0, 0.0])}
    other = change_weights(Folder(trained).best_checkpoint, tmp_path / "other", head)
    copy = shutil.copytree(Folder(trained).best_checkpoint, tmp_path / "copy")
    more = {"cache_dir": tmp_path / "cache", "do_validation": False}
    columns = [
        taught(base, name, file, more).labels["teacher_logits"]
        for name, file in ((trained, "train"), (copy, "train"), (other, "train"), (trained, "dev"))
    ]
    assert read == [160, 160, 61]
    np.testing.assert_array_equal(columns[0], columns[1])
    np.testing.assert_allclose(columns[2] - columns[0], [[1.0, 0.0]] * 160, atol=1e-5)
