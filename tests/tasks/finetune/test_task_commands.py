"""`bert squad`, `bert glue` and `bert ner` from files to scores, on small models and synthetic data."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.tiny_models import (
    OTHERS,
    SENTIMENT,
    TINY,
    TINY_RUN,
    flags_of,
    write_model,
    write_questions,
)

from bert_cli.cli import main
from bert_cli.train.checkpoint import best_checkpoint

COMMON = [
    "--max-seq-length", "64", "--global-batch.micro-batch-size", "8", "--log-every-steps", "100",
    "--optimizer-opts.learning-rate.max-learning-rate", "0.003",
]  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    base = tmp_path_factory.mktemp("tasks")
    write_model(base / "model", TINY.model_copy(update={"num_hidden_layers": 1}))
    return base


def flags(base, run):
    start, folder = str(base / "model"), str(base / run)
    cache = str(base / "cache")
    return [
        *COMMON, "--pretrained-ckpt-path", start, "--save-ckpt-path", folder, "--cache-dir", cache
    ]  # fmt: skip


def last_line(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


# --- questions


SQUAD = ["--doc-stride", "16", "--max-query-length", "8", "--num-epochs", "4"]


@pytest.fixture(scope="module")
def answered(base):
    write_questions(base / "train-v1.1.json", 120, 1)
    write_questions(base / "dev-v1.1.json", 40, 2)
    words = ["squad", "--dataset-dir", str(base), *flags(base, "squad"), *SQUAD]
    assert main(words) == 0
    return base / "squad"


def test_questions_are_answered_and_scored(base, answered, capsys):
    scores = json.loads((answered / "scores.json").read_text())
    assert scores["f1"] > 80
    assert list(scores) == ["f1", "exact_match"]
    predictions = json.loads((answered / "predictions.json").read_text())
    nbest = json.loads((answered / "nbest_predictions.json").read_text())
    assert len(predictions) == len(nbest) == 40
    assert all(nbest[name][0]["text"] == answer for name, answer in predictions.items())
    assert (
        main(["squad-score", str(base / "dev-v1.1.json"), str(answered / "predictions.json")]) == 0
    )
    assert last_line(capsys) == scores


def test_transformers_finds_the_same_answer(base, answered):
    import torch
    import transformers

    folder = best_checkpoint(answered)
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    nbest = json.loads((answered / "nbest_predictions.json").read_text())
    data = json.loads((base / "dev-v1.1.json").read_text())
    for paragraph in data["data"][0]["paragraphs"][:5]:
        (question,) = paragraph["qas"]
        given = tokenizer(question["question"], paragraph["context"], return_tensors="pt")
        with torch.no_grad():
            out = model(**given)
        best = nbest[question["id"]][0]
        offsets = given.encodings[0].offsets
        inside = [n for n, of in enumerate(given.sequence_ids(0)) if of == 1]
        start, end = out.start_logits[0], out.end_logits[0]
        spans = [
            (float(start[i] + end[j]), i, j) for i in inside for j in inside if 0 <= j - i < 30
        ]
        score, first, last = max(spans)
        assert score == pytest.approx(best["start_logit"] + best["end_logit"], abs=1e-4)
        text = paragraph["context"][offsets[first][0] : offsets[last][1]]
        assert best["text"] == text


def test_questions_without_an_answer_get_an_empty_one(base, capsys):
    write_questions(base / "train-v2.0.json", 150, 3, impossible=True)
    write_questions(base / "dev-v2.0.json", 45, 4, impossible=True)
    words = ["squad", "--dataset-dir", str(base), *flags(base, "squad2"), *SQUAD, "--version-2"]
    output = base / "answers" / "squad2"
    assert main([*words, "--output-dir", str(output)]) == 0
    run = base / "squad2"
    scores = last_line(capsys)
    # `bert predict` and `bert runs` look for these next to the checkpoints.
    for name in ("null_threshold.json", "scores.json"):
        assert (run / name).is_file() and not (output / name).exists()
    assert scores["NoAns_total"] == 15
    assert scores["f1"] > 60
    threshold = json.loads((run / "null_threshold.json").read_text())["threshold"]
    odds = json.loads((output / "null_odds.json").read_text())
    predictions = json.loads((output / "predictions.json").read_text())
    assert not list(run.glob("*predictions.json"))
    assert all((odds[name] > threshold) == (answer == "") for name, answer in predictions.items())
    assert main(["squad-score", str(base / "dev-v2.0.json"), str(output / "predictions.json")]) == 0
    assert last_line(capsys) == scores


def test_an_answer_that_is_not_at_its_offset_is_counted_and_shown(base, answered, tmp_path, capsys):
    data = json.loads(write_questions(tmp_path / "train.json", 30, 5).read_text())
    data["data"][0]["paragraphs"][7]["qas"][0]["answers"][0]["answer_start"] += 1
    (tmp_path / "train.json").write_text(json.dumps(data))
    words = ["squad", "--train-file", str(tmp_path / "train.json"), "--dataset-dir", str(base)]
    assert main([*words, *flags(base, "off"), *SQUAD, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "train_file: 29 questions" in out
    assert "(5-7)" in out


# --- GLUE


def write_glue(folder, rows, header, make, files=("train", "dev", "test")):
    folder.mkdir(parents=True)
    for seed, name in enumerate(files, 1):
        draw, is_test = np.random.default_rng(seed), name.startswith("test")
        lines = ["\t".join(header[is_test])]
        lines += ["\t".join(make(draw, number, is_test)) for number in range(rows)]
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")


def review(draw, number, is_test):
    label = int(draw.integers(2))
    words = draw.choice(OTHERS, int(draw.integers(4, 20)))
    words[::3] = draw.choice(SENTIMENT[("negative", "positive")[label]], len(words[::3]))
    text = " ".join(words)
    return [str(number), text] if is_test else [text, str(label)]


@pytest.fixture(scope="module")
def sentiment(base):
    write_glue(base / "glue" / "SST-2", 90, (["sentence", "label"], ["index", "sentence"]), review)
    words = ["glue", "--glue-task", "sst2", "--dataset-dir", str(base / "glue"), "--do-test"]
    assert main([*words, *flags(base, "sst2")]) == 0
    return base / "sst2"


def test_a_glue_task_is_scored_and_its_test_set_is_written_for_the_server(base, sentiment):
    scores = json.loads((sentiment / "scores.json").read_text())
    assert list(scores) == ["accuracy"] and scores["accuracy"] > 0.8
    header, *lines = (base / "sst2" / "SST-2.tsv").read_text().splitlines()
    assert header == "index\tprediction"
    assert [line.split("\t")[0] for line in lines] == [str(number) for number in range(90)]
    draw = np.random.default_rng(3)
    test = [review(draw, number, True)[1].split() for number in range(90)]
    right = [
        int(line.split("\t")[1]) == int("good" in words or "fine" in words)
        for line, words in zip(lines, test, strict=True)
    ]
    assert np.mean(right) > 0.8
    # Predictions of the development set have their texts.
    rows = predictions_in(sentiment / "predictions.jsonl")
    assert len(rows) == 90
    assert np.mean([row["label"] == row["predicted"] for row in rows]) == scores["accuracy"]
    assert all(0.5 <= row["probability"] <= 1.0 and row["text"] for row in rows)


def predictions_in(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def relabelled(folder, out, names, order=(0, 1)):
    """A copy of a classifier whose labels have other names, or another order."""
    shutil.copytree(folder, out)
    tensors = load_file(out / "model.safetensors")
    for name in ("classifier.weight", "classifier.bias"):
        tensors[name] = np.ascontiguousarray(tensors[name][list(order)])
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    config["id2label"] = {str(number): name for number, name in enumerate(names)}
    (out / "config.json").write_text(json.dumps(config))
    return out


def score_only(base, model, output) -> int:
    words = ["glue", "--glue-task", "sst2", "--dataset-dir", base / "glue", "--do-test", *COMMON]
    words += ["--no-do-training", "--cache-dir", base / "cache", "--output-dir", output]
    return main([*map(str, words), "--pretrained-ckpt-path", str(model)])


def test_a_model_that_is_only_scored_may_have_another_order_of_labels(
    base, sentiment, tmp_path, capsys
):
    best = best_checkpoint(sentiment)
    names = list(json.loads((best / "config.json").read_text())["id2label"].values())
    expected = json.loads((sentiment / "scores.json").read_text())
    for own, order, message in (
        (names[::-1], (1, 0), "are in another order"),
        (["LABEL_0", "LABEL_1"], (0, 1), f"assumed to be in this order: {', '.join(names)}"),
    ):
        model = relabelled(best, tmp_path / own[0], own, order)
        assert score_only(base, model, tmp_path) == 0
        out = capsys.readouterr().out
        assert message in out and json.loads(out.splitlines()[-1]) == expected
        # The test set has no labels that could show a swap.
        assert (tmp_path / "SST-2.tsv").read_text() == (sentiment / "SST-2.tsv").read_text()
    strange = relabelled(best, tmp_path / "strange", ["yes", "no"])
    assert score_only(base, strange, tmp_path) == 2
    assert "(labels yes, no): are not those of this task" in capsys.readouterr().err


def premise(draw, number, is_test):
    label, words = int(draw.integers(3)), draw.choice(OTHERS, 9)
    words[::2] = ("good", "bad", "awful")[label]
    row = [str(number), *(["-"] * 7), " ".join(words), "what is it"]
    return row if is_test else [*row, "-", ("entailment", "neutral", "contradiction")[label]]


def test_mnli_is_scored_on_both_sets_and_predicted_for_both_files_of_the_server(base, capsys):
    columns = ["index", *"abcdefg", "sentence1", "sentence2"]
    header = [*columns, "label1", "gold_label"], columns
    files = ("train", "dev_matched", "dev_mismatched", "test_matched", "test_mismatched")
    write_glue(base / "glue" / "MNLI", 45, header, premise, files)
    words = ["glue", "--glue-task", "mnli", "--dataset-dir", str(base / "glue"), "--do-test"]
    assert main([*words, *flags(base, "mnli"), "--num-epochs", "6"]) == 0
    scores = last_line(capsys)
    assert sorted(scores) == ["accuracy", "accuracy_mismatched"]
    assert min(scores.values()) > 0.7
    for name in ("predictions.jsonl", "predictions_mismatched.jsonl"):
        assert "second" in predictions_in(base / "mnli" / name)[0]
    for name in ("MNLI-m.tsv", "MNLI-mm.tsv"):
        lines = (base / "mnli" / name).read_text().splitlines()
        assert len(lines) == 46
        predicted = {line.split("\t")[1] for line in lines[1:]}
        assert predicted <= {"entailment", "neutral", "contradiction"}


def similar(draw, number, is_test):
    score = float(draw.integers(0, 6))
    first = draw.choice(OTHERS, 6)
    second = first.copy()
    second[: 5 - int(score)] = "awful"
    row = [str(number), *(["-"] * 6), " ".join(first), " ".join(second)]
    # STS-B's own are of this form; no float32 is 4.2.
    return row if is_test else [*row, f"{min(5.0, score + 0.2):.3f}"]


def test_similarities_are_learnt_as_numbers(base, capsys):
    columns = [
        "index", "genre", "filename", "year", "old_index", "source1", "source2", "sentence1", "sentence2"
    ]  # fmt: skip
    write_glue(base / "glue" / "STS-B", 90, ([*columns, "score"], columns), similar)
    words = ["glue", "--glue-task", "stsb", "--dataset-dir", str(base / "glue"), "--do-test"]
    assert main([*words, *flags(base, "stsb"), "--num-epochs", "6"]) == 0
    scores = last_line(capsys)
    assert list(scores) == ["pearson", "spearman"]
    assert scores["spearman"] > 0.6
    rows = predictions_in(base / "stsb" / "predictions.jsonl")
    predicted, true = ([row[name] for row in rows] for name in ("predicted", "label"))
    assert np.corrcoef(predicted, true)[0, 1] == pytest.approx(scores["pearson"])
    read = (base / "glue" / "STS-B" / "dev.tsv").read_text().splitlines()[1:]
    assert true == [float(line.split("\t")[-1]) for line in read]
    shown = predictions_in(base / "stsb" / "metrics.jsonl")
    assert not any("accuracy" in name for line in shown for name in line)
    lines = (base / "stsb" / "STS-B.tsv").read_text().splitlines()
    assert all(0 <= float(line.split("\t")[1]) <= 5 for line in lines[1:])
    assert len(lines) == 91


# --- tokens


def write_sentences(path, sentences, seed):
    draw = np.random.default_rng(seed)
    kinds = {"good": "B-GOOD", "awful": "B-BAD"}
    lines = []
    for _ in range(sentences):
        words = draw.choice([*OTHERS, "good", "awful"], int(draw.integers(3, 12)))
        lines += [f"{word} {kinds.get(word, 'O')}" for word in words] + [""]
    path.write_text("\n".join(lines))
    return path


def test_tokens_are_labelled_and_scored_by_entities(base, capsys):
    train, dev = (
        write_sentences(base / name, n, n) for name, n in (("t.conll", 120), ("d.conll", 40))
    )
    words = ["ner", "--train-file", str(train), "--validation-file", str(dev)]
    assert main([*words, *flags(base, "ner")]) == 0
    scores = last_line(capsys)
    assert scores["f1"] > 0.8
    assert {"precision", "recall", "f1_GOOD", "f1_BAD"} <= set(scores)
    written = (base / "ner" / "predictions.conll").read_text().splitlines()
    given = dev.read_text().splitlines()
    assert [line.rsplit(" ", 1)[0] for line in written if line] == [line for line in given if line]
    only = ["ner", "--validation-file", str(dev), "--no-do-training", "--max-seq-length", "64"]
    assert main([*only, "--pretrained-ckpt-path", str(base / "ner")]) == 0
    assert last_line(capsys) == scores


# --- synthetic examples

SHAPE = {name: value for name, value in TINY_RUN.items() if name.startswith("bert-config")}


@pytest.mark.parametrize(
    ("words", "labels"),
    [
        (["squad", "--doc-stride", "16", "--max-query-length", "8"], None),
        (["glue", "--glue-task", "tnews"], [str(n) for n in range(100, 117) if n not in (105, 111)]),
        (["ner"], ["O", *(f"{way}-{kind}" for kind in ("LOC", "MISC", "ORG", "PER") for way in "BI")]),
    ],
    ids=lambda words: words[0] if words else "",
)  # fmt: skip
def test_a_task_trains_on_synthetic_examples_without_any_file(tmp_path, capsys, words, labels):
    """Without a model, a tokenizer or data, to try a machine or a layout."""
    size = ["--global-batch.micro-batch-size", "8", "--total-num-train-samples", "20"]
    words = [*words, *flags_of(SHAPE), *size, "--generated-dataset"]
    words += ["--bert-config.max-position-embeddings", "64", "--save-ckpt-path", str(tmp_path)]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "trains on synthetic examples" in out and "max_seq_length is 64" in out
    # 20 samples are three steps of eight, rounded up.
    assert "24 examples out of 12,000" in out
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(0 < line["loss"] < 20 for line in lines)
    described = json.loads((tmp_path / "step_00000003" / "config.json").read_text())
    if labels is not None:
        assert [described["id2label"][str(n)] for n in range(len(labels))] == labels
    else:
        assert main(words) == 0
        assert "all 3 steps are done" in capsys.readouterr().out


def test_settings_without_effect_on_synthetic_examples_are_refused(tmp_path, capsys):
    for flags, message in (
        (["--no-do-training"], "do_training (False): has no effect with generated_dataset"),
        (["--evaluate-every-steps", "5"], "evaluate_every_steps (5): has no effect"),
        (["--do-test"], "do_test (True): has no effect"),
        (["--bert-config.vocab-size", "7"], "at least 8 of each"),
        ([], "save_ckpt_path"),
    ):
        folder = ["--save-ckpt-path", str(tmp_path)] if flags else []
        assert main(["glue", "--generated-dataset", *folder, *flags]) == 2
        assert message in capsys.readouterr().err
