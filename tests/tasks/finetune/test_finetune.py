"""The walk that all tasks share: train, score, keep the best, continue, several seeds, any layout."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from support.tiny_models import PIECES, write_as_google_did, write_model, write_reviews

from bert_cli.cli import main
from bert_cli.config.finetune import ClassifySettings
from bert_cli.data.records.tokenizer import read_tokenizer
from bert_cli.errors import DeviceError
from bert_cli.tasks.finetune import evaluation
from bert_cli.tasks.finetune.evaluation import Scorer
from bert_cli.tasks.finetune.task import Task
from bert_cli.tasks.run.start import find_tokenizer
from bert_cli.train.checkpoint import best_of
from bert_cli.train.folder import complete_checkpoints

FLAGS = [
    "--global-batch.micro-batch-size", "8", "--global-batch.grad-acc-steps-per-replica", "2",
    "--num-epochs", "3", "--optimizer-opts.learning-rate.max-learning-rate", "0.003",
    "--log-every-steps", "100", "--max-seq-length", "64",
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model, reviews to train on and to score on, and a cache."""
    place = tmp_path_factory.mktemp("finetune")
    write_model(place / "model")
    write_reviews(place / "train.csv", 160)
    write_reviews(place / "dev.csv", 61, seed=1)
    return place


def arguments(place, run, *more):
    return [
        "classify", "--train-file", str(place / "train.csv"), "--validation-file", str(place / "dev.csv"),
        "--pretrained-ckpt-path", str(place / "model"), "--save-ckpt-path", str(run),
        "--cache-dir", str(place / "cache"), *FLAGS, *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def whole(place):
    """A run that was never interrupted."""
    run = place / "whole"
    assert main(arguments(place, run)) == 0
    return run


def scores_of(run):
    return json.loads((run / "scores.json").read_text())


def losses_of(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return np.array([json.loads(line)["loss"] for line in lines])


def predictions_of(run):
    return [json.loads(line) for line in (run / "predictions.jsonl").read_text().splitlines()]


def test_a_model_learns_what_there_is_to_learn(whole):
    assert scores_of(whole)["accuracy"] > 0.9
    rows = predictions_of(whole)
    assert len(rows) == 61
    right = np.mean([row["label"] == row["predicted"] for row in rows])
    assert right == pytest.approx(scores_of(whole)["accuracy"])
    counts = np.array(json.loads((whole / "confusion.json").read_text())["counts"])
    assert np.trace(counts) / counts.sum() == pytest.approx(right)


def test_every_epoch_is_scored_and_the_best_checkpoint_is_kept(whole):
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    scored = {
        line["step"]: line["validation_accuracy"] for line in lines if "validation_accuracy" in line
    }
    assert sorted(scored) == [10, 20, 30]
    best = best_of(whole)
    assert scored[int(best.name.removeprefix("step_"))] == max(scored.values())
    assert scores_of(whole)["accuracy"] == max(scored.values())


def test_googles_checkpoint_of_the_same_weights_gives_the_same_run(place, whole, tmp_path):
    """TensorFlow 1's file is only another form: every loss of the run is the same number."""
    words = arguments(place, tmp_path / "run")
    words[words.index(str(place / "model"))] = str(
        write_as_google_did(place / "model", tmp_path / "google")
    )
    assert main(words) == 0
    np.testing.assert_array_equal(losses_of(tmp_path / "run"), losses_of(whole))
    assert predictions_of(tmp_path / "run") == predictions_of(whole)


def test_the_score_is_the_last_line_as_one_json_object(place, whole, capsys):
    assert main(arguments(place, whole)) == 0
    told = capsys.readouterr().out
    assert "all 30 steps are done" in told
    assert json.loads(told.splitlines()[-1]) == scores_of(whole)


def test_a_model_is_scored_without_training(place, whole, capsys):
    words = [
        "classify",
        "--validation-file",
        str(place / "dev.csv"),
        "--no-do-training",
        "--max-seq-length",
        "64",
    ]
    words += ["--pretrained-ckpt-path", str(whole), "--cache-dir", str(place / "cache")]
    output = place / "only" / "scored"
    assert main([*words, "--output-dir", str(output)]) == 0
    told = capsys.readouterr().out
    assert json.loads(told.splitlines()[-1]) == scores_of(whole) == scores_of(output)
    said = [[row["predicted"] for row in predictions_of(run)] for run in (output, whole)]
    assert said[0] == said[1]
    assert f"scores {best_of(whole)}" in told
    assert "confusion (columns: predicted)" in told


def test_what_a_run_held_out_is_what_scoring_alone_holds_out(place, tmp_path, capsys):
    words = arguments(place, tmp_path / "run", "--num-epochs", "1")
    del words[words.index("--validation-file") : words.index("--validation-file") + 2]
    assert main(words) == 0
    trained = capsys.readouterr().out.splitlines()[-1]
    assert main([*words, "--no-do-training"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == trained


def test_a_model_without_the_tasks_head_is_not_scored(place, capsys):
    words = [
        "classify",
        "--validation-file",
        str(place / "dev.csv"),
        "--no-do-training",
        "--max-seq-length",
        "64",
    ]
    assert main([*words, "--pretrained-ckpt-path", str(place / "model")]) == 2
    assert "(BertForPreTraining): was not trained for this task" in capsys.readouterr().err


def test_all_that_is_missing_is_named_at_once(capsys):
    assert main(["ner"]) == 2
    told = capsys.readouterr().err
    for name in ("train_file", "validation_file", "pretrained_ckpt_path", "save_ckpt_path"):
        assert f"{name}: is not given" in told


def test_transformers_opens_the_best_checkpoint_and_predicts_the_same(whole):
    import torch
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(best_of(whole)).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(best_of(whole))
    assert model.config.id2label == {0: "negative", 1: "positive"}
    # Special tokens in a text are plain characters, as in training, and the model's positions are known.
    assert not {3, 4} & {*tokenizer("good [MASK] [SEP]")["input_ids"][1:-1]}
    assert len(tokenizer("good " * 90, truncation=True)["input_ids"]) == 64
    for row in predictions_of(whole)[:8]:
        with torch.no_grad():
            given = tokenizer(row["text"], return_tensors="pt", truncation=True)
            share = torch.softmax(model(**given).logits, -1)[0]
        assert model.config.id2label[int(share.argmax())] == row["predicted"]
        assert float(share.max()) == pytest.approx(row["probability"], abs=1e-5)


@pytest.mark.parametrize(("said", "length"), [(24, 24), (10**30, 64), ("24", "model_max_length")])
def test_without_a_length_it_is_the_tokenizers_as_far_as_the_model_reads(
    place, tmp_path, capsys, said, length
):
    model = shutil.copytree(place / "model", tmp_path / "model")
    described = json.loads((model / "tokenizer_config.json").read_text())
    described["model_max_length"] = said
    (model / "tokenizer_config.json").write_text(json.dumps(described))
    words = arguments(place, tmp_path / "run", "--dry-run")
    words[words.index(str(place / "model"))] = str(model)
    at = words.index("--max-seq-length")
    del words[at : at + 2]
    if isinstance(length, str):
        assert main(words) == 3
        assert "tokenizer_config.json (model_max_length): is '24'" in capsys.readouterr().err
        return
    assert main(words) == 0
    told = capsys.readouterr().out
    assert f"max_seq_length is {length}, as no length was given" in told
    assert ("longer than 24 tokens, cut" in told) == (length == 24)


def test_a_run_of_an_older_version_continues(place, whole):
    """Before fine-tuning had synthetic examples its checkpoints said nothing of them."""
    run = shutil.copytree(whole, place / "older")
    for path in run.glob("step_*/state.json"):
        state = json.loads(path.read_text())
        assert state["fixed"].pop("generated_dataset") is False
        path.write_text(json.dumps(state))
    assert main(arguments(place, run)) == 0


@pytest.mark.parametrize("layout", ["replicas", "pipeline"])
def test_the_layout_changes_nothing(place, whole, layout):
    flags = {
        "replicas": ["--global-batch.replicas", "2", "--global-batch.grad-acc-steps-per-replica", "1"],
        "pipeline": [
            "--parallel.pipeline-stages", '[["emb","hid"],["hid"],["pool","glue_head"]]',
            "--parallel.pipeline-device-mapping", "[0,1,0]",
        ],
    }  # fmt: skip
    run = place / layout
    assert main(arguments(place, run, *flags[layout])) == 0
    ours, theirs = losses_of(run), losses_of(whole)
    assert np.abs(ours - theirs).max() < 1e-4
    assert scores_of(run) == pytest.approx(scores_of(whole), abs=1e-6)


def test_a_run_that_was_not_scored_is_scored_by_the_same_command(place, whole, capsys):
    """As after a kill between the last save and its score, or a training without validation."""
    run = place / "unscored"
    flags = ["--num-epochs", "1"]
    assert main(arguments(place, run, *flags, "--no-do-validation", "--seeds", "2")) == 0
    assert sorted(path.name for path in run.iterdir()) == ["seed_1984", "seed_1985"]
    seed = run / "seed_1984"
    assert not (seed / "scores.json").exists() and not (seed / "best.json").exists()
    capsys.readouterr()
    assert main(arguments(place, seed, *flags)) == 0
    told = capsys.readouterr().out
    assert "step 10: held out, accuracy" in told and "nothing to do" in told
    assert json.loads(told.splitlines()[-1]) == scores_of(seed)
    assert json.loads((seed / "best.json").read_text())["scored"] == 10


def test_a_stop_while_the_model_is_scored_loses_neither_step_nor_score(
    place, whole, monkeypatch, capsys
):
    run, real = place / "stopped", evaluation.by_length

    def with_a_signal(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(evaluation, "by_length", with_a_signal)
        with pytest.raises(SystemExit) as left:
            main([*arguments(place, run), "--exit-code-when-stopped", "75"])
        assert left.value.code == 75
    assert "step 10: not scored" in capsys.readouterr().out
    assert [path.name for path in complete_checkpoints(run)] == ["step_00000010"]
    assert main(arguments(place, run)) == 0
    assert "continues from" in capsys.readouterr().out
    assert scores_of(run) == scores_of(whole)
    assert best_of(run).name == best_of(whole).name
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 31))
    with monkeypatch.context() as patched:
        patched.setattr(evaluation, "by_length", with_a_signal)
        assert main([*arguments(place, run), "--no-do-training"]) == 130


def test_of_equal_scores_the_older_one_is_kept_with_its_own_predictions(monkeypatch):
    task = Task(2, None, None, {}, score=lambda logits: {"f1": logits["f1"]}, best="f1")
    scorer = Scorer(ClassifySettings(), task, stop=lambda: False)
    for step, value in ((10, 0.5), (20, 0.5), (30, 0.4)):
        monkeypatch.setattr(scorer, "logits_of", lambda *_, v=value, s=step: {"f1": v, "of": s})
        assert scorer.evaluate(None, step) == {"f1": value}
    assert (scorer.best, scorer.logits["of"]) == ((10, 0.5), 10)


def test_numbers_that_are_not_finite_are_no_score(monkeypatch):
    task = Task(2, None, None, {}, score=lambda logits: {}, best="f1")
    monkeypatch.setattr(evaluation, "_logits", lambda *_: np.array([[0.0, np.nan]]))
    with pytest.raises(DeviceError, match="dev: what the model says of it is not finite"):
        Scorer(ClassifySettings(), task, lambda: False).logits_of(None, {"dev": None})


def test_a_killed_run_continues_to_the_same_weights(place, whole):
    run = place / "killed"
    words = arguments(place, run, "--checkpoint-every-steps", "4", "--keep-checkpoints", "9")
    command = [sys.executable, "-m", "bert_cli", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not (run / "step_00000012").exists():
            assert process.poll() is None, "it ended before it was killed"
            time.sleep(0.02)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert not (run / "scores.json").exists()
    assert main(words) == 0
    last, expected = complete_checkpoints(run)[-1], complete_checkpoints(whole)[-1]
    assert last.name == expected.name == "step_00000030"
    # The device count differs between this process and the killed one; one thread each here.
    from safetensors.numpy import load_file

    ours, theirs = (load_file(path / "model.safetensors") for path in (last, expected))
    for name, value in theirs.items():
        assert np.allclose(ours[name], value, rtol=1e-5, atol=1e-6), name
    assert scores_of(run) == scores_of(whole)


def test_several_seeds_tell_mean_and_spread(place, capsys):
    run = place / "seeds"
    output = place / "predicted"
    words = ["--seeds", "2", "--num-epochs", "1", "--seed", "5", "--output-dir", str(output)]
    assert main(arguments(place, run, *words)) == 0
    assert all((output / f"seed_{seed}" / "predictions.jsonl").is_file() for seed in (5, 6))
    told = capsys.readouterr().out
    each = [scores_of(run / f"seed_{seed}")["accuracy"] for seed in (5, 6)]
    spread = scores_of(run)["accuracy"]
    assert spread["values"] == each
    assert spread["mean"] == pytest.approx(np.mean(each))
    assert spread["standard_deviation"] == pytest.approx(np.std(each, ddof=1))
    assert f"accuracy: {np.mean(each):.4f} +- {np.std(each, ddof=1):.4f}" in told
    assert json.loads(told.splitlines()[-1]) == scores_of(run)
    assert main(["predict", str(run), "good"]) == 4
    assert f"is a folder of runs; give one of them, as {run / 'seed_5'}" in capsys.readouterr().err


def test_a_classifier_for_other_labels_is_left_behind(place, whole, tmp_path, capsys):
    text = (place / "train.csv").read_text()
    (tmp_path / "train.csv").write_text(
        text.replace("negative", "contra").replace("positive", "pro")
    )
    words = arguments(place, tmp_path / "run", "--dry-run", "--pretrained-ckpt-path", str(whole))
    words[words.index(str(place / "train.csv"))] = str(tmp_path / "train.csv")
    del words[words.index("--validation-file") : words.index("--validation-file") + 2]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "new from the seed: glue_head; left out: classifier" in told
    assert (
        main(arguments(place, tmp_path / "run", "--dry-run", "--pretrained-ckpt-path", str(whole)))
        == 0
    )
    assert "new from the seed" not in capsys.readouterr().out


def test_new_weights_need_a_tokenizer_and_a_shape(place, tmp_path, capsys):
    vocabulary = tmp_path / "vocab"
    vocabulary.mkdir()
    for name in ("vocab.txt", "tokenizer_config.json"):
        shutil.copy(place / "model" / name, vocabulary)
    words = arguments(place, tmp_path / "run", "--dry-run", "--tokenizer-path", str(vocabulary))
    at = words.index("--pretrained-ckpt-path")
    del words[at : at + 2]
    shape = ["--bert-config.hidden-size", "32", "--bert-config.num-attention-heads", "4"]
    shape += ["--bert-config.num-hidden-layers", "1", "--bert-config.intermediate-size", "64"]
    assert main([*words, *shape]) == 0
    assert "starts with new weights from seed" in capsys.readouterr().out
    for same in (vocabulary, vocabulary / "vocab.txt", place / "model"):
        assert read_tokenizer(find_tokenizer(str(same))).pieces[5] == "good"
    assert main([*words, "--tokenizer-path", str(tmp_path / "nowhere")]) == 4
    capsys.readouterr()
    assert main([*words, *shape, "--bert-config.vocab-size", "10"]) == 2
    assert f"tokenizer of {len(PIECES)} pieces): the model has 10 words" in capsys.readouterr().err
    del words[words.index("--tokenizer-path") : words.index("--tokenizer-path") + 2]
    assert main(words) == 2
    assert "give --pretrained-ckpt-path, the model to start from" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--no-do-training", "--no-do-validation"], 2, "is off, and so is do_validation"),
        (["--label-column", "lable"], 3, "label"),
        (["--text-column", "txt"], 3, "text"),
        (["--train-file", "absent.csv"], 3, "absent.csv"),
        (["--text-column", "a", "--text-column", "b", "--text-column", "c"], 2, "names 3 columns"),
        (["--max-seq-length", "128"], 2, "max_position_embeddings"),
        (["--output-dir", "/dev/null/out"], 2, "output_dir (/dev/null/out): cannot be written"),
    ],
)
def test_what_cannot_be_is_refused_by_name(place, tmp_path, flags, code, message, capsys):
    assert main(arguments(place, tmp_path / "run", *flags)) == code
    assert message in capsys.readouterr().err


def test_the_features_come_from_the_cache_the_second_time(place, whole, monkeypatch):
    from bert_cli.tasks.finetune import texts

    monkeypatch.setattr(texts, "encode_texts", None)
    run = shutil.copytree(whole, place / "again")
    assert main(arguments(place, run)) == 0


def test_two_processes_share_the_work_and_say_it_once(place, whole):
    run = place / "processes"
    flags = ["--global-batch.replicas", "2", "--global-batch.grad-acc-steps-per-replica", "1"]
    command = [sys.executable, "-m", "bert_cli", "launch", "--processes", "2", "--"]
    done = subprocess.run(
        [*command, *arguments(place, run, *flags)], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert np.abs(losses_of(run) - losses_of(whole)).max() < 1e-4
    assert scores_of(run) == pytest.approx(scores_of(whole), abs=1e-6)
    assert done.stdout.count(json.dumps(scores_of(run))) == 1
