"""Texts with several labels, and labels that are not equally frequent, from the table to the answer."""

import json
import shutil

import numpy as np
import pytest
from scipy.special import expit
from sklearn.metrics import f1_score
from support.hf_models import need
from support.metrics import scores_of
from support.runs import lines_of
from support.tiny_models import OTHERS, TINY, write_model

from bert_cli.cli import main
from bert_cli.config.finetune import ClassifySettings
from bert_cli.data.finetune.tables import read_table
from bert_cli.data.random import chooses
from bert_cli.data.tokens.tokenizer import read_tokenizer
from bert_cli.tasks.finetune import classify
from bert_cli.tasks.use import int8
from bert_cli.train.checkpoint import Folder

WORDS = {"good": "praise", "bad": "blame", "film": "cinema"}
FLAGS = [
    "--global-batch.micro-batch-size", "8",
    "--num-epochs", "6", "--optimizer-opts.learning-rate.max-learning-rate", "0.003",
    "--log-every-steps", "1000", "--max-seq-length", "32",
]  # fmt: skip


def write_posts(path, rows):
    """Write texts with the labels of the words that they have."""
    draw = np.random.default_rng(rows)
    chances = {"good": 0.4, "bad": 0.4, "film": 0.3}
    lines = []
    for _ in range(rows):
        present = [word for word, chance in chances.items() if draw.random() < chance]
        words = draw.permutation([*draw.choice(OTHERS, 4), *present, *present])
        row = {"text": " ".join(words), "label": [WORDS[word] for word in present]}
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    base = tmp_path_factory.mktemp("several")
    write_model(base / "model", TINY.model_copy(update={"num_hidden_layers": 1}))
    write_posts(base / "posts.jsonl", 240)
    return base


def arguments(base, run, *more, file="posts.jsonl"):
    files = ["--train-file", base / file, "--cache-dir", base / "cache"]
    files += ["--pretrained-ckpt-path", base / "model", "--save-ckpt-path", run]
    return ["classify", *map(str, files), *FLAGS, *map(str, more)]


@pytest.fixture(scope="module")
def trained(base):
    run = base / "trained"
    assert main(arguments(base, run, "--held-out-fraction", "0.2")) == 0
    return run


@pytest.mark.slow
def test_a_text_gets_the_labels_whose_chosen_threshold_it_passes(base, trained, bert):
    rows = lines_of(trained / "predictions.jsonl")
    names = sorted(WORDS.values())
    true, predicted = (
        np.array([[name in row[side] for name in names] for row in rows])
        for side in ("labels", "predicted")
    )
    groups = read_table(trained / "predictions.jsonl", text_columns=["text"]).examples.groups
    reported = ~chooses(groups)
    micro, macro, per_label = (
        f1_score(true[reported], predicted[reported], average=n) for n in ("micro", "macro", None)
    )
    scores = scores_of(trained)
    assert scores == pytest.approx({"micro_f1": micro, "macro_f1": macro}) and macro > 0.8
    each = {row["label"]: row for row in lines_of(trained / "labels.jsonl")}
    assert [row["f1"] for row in each.values()] == pytest.approx(per_label)

    checkpoint = Folder(trained).best_checkpoint
    thresholds = json.loads((checkpoint / "decision.json").read_text())["thresholds"]
    assert {name: row["threshold"] for name, row in each.items()} == thresholds
    card = (checkpoint / "README.md").read_text()
    assert all(f"| {name} | {value:.4f} |" in card for name, value in thresholds.items())
    texts = base / "asked.txt"
    texts.write_text("\n".join(row["text"] for row in rows))
    answers = bert("predict", trained, "--input", texts).rows
    assert [answer["labels"] for answer in answers] == [row["predicted"] for row in rows]
    only = arguments(base, base / "scored", "--no-do-training", "--held-out-fraction", "0.2")
    assert bert(*only, "--pretrained-ckpt-path", trained).last == scores


def test_transformers_and_an_export_have_the_form_of_the_labels(base, trained, tmp_path):
    import torch
    import transformers

    assert main(["export", str(trained), str(tmp_path / "out"), "--format", "hf"]) == 0
    checkpoint = Folder(trained).best_checkpoint
    for name, added in (("decision.json", {}), ("config.json", {"text_column": ["text"]})):
        ours, theirs = (
            json.loads((at / name).read_text()) for at in (checkpoint, tmp_path / "out")
        )
        assert ours | added == theirs
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.count("## Thresholds") == 1 and 'model=".", top_k=None)' in card
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert model.config.problem_type == "multi_label_classification"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    thresholds = json.loads((tmp_path / "out" / "decision.json").read_text())["thresholds"]
    for row in lines_of(trained / "predictions.jsonl")[:8]:
        inputs = tokenizer(row["text"], return_tensors="pt")
        with torch.no_grad():
            chances = torch.sigmoid(model(**inputs).logits[0]).tolist()
        names = model.config.id2label
        pairs = ((names[k], chance) for k, chance in enumerate(chances))
        assert row["predicted"] == [name for name, chance in pairs if chance > thresholds[name]]


def test_a_graph_has_the_labels_of_bert_predict(base, trained, tmp_path, bert, monkeypatch):
    need("torch", "onnx", "onnxscript", "onnxruntime")
    import onnxruntime
    import transformers

    rows, out, texts = lines_of(trained / "predictions.jsonl"), tmp_path / "out", tmp_path / "a.txt"
    texts.write_text("\n".join(row["text"] for row in rows))
    words = ["--format", "onnx", "--precision", "int8", "--compare-on", texts]
    exact, quantize = tmp_path / "float32.onnx", int8.quantize

    def copies_and_quantizes(path):
        shutil.copyfile(path, exact)
        quantize(path)

    monkeypatch.setattr(int8, "quantize", copies_and_quantizes)
    said = bert("export", trained, out, *words).out
    answers = bert("predict", trained, "--input", texts).rows
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    inputs = [{n: np.array([v]) for n, v in tokenizer(row["text"]).items()} for row in rows]
    in_float32, found = (
        expit(np.concatenate([session.run(["logits"], columns)[0] for columns in inputs]))
        for session in map(onnxruntime.InferenceSession, (exact, out / "model.onnx"))
    )
    assert (out / "made_from.txt").read_text().endswith(" int8")
    thresholds = json.loads((out / "decision.json").read_text())["thresholds"]
    names = json.loads((out / "config.json").read_text())["id2label"].values()
    assert [*thresholds] == [*names] == [*answers[0]["probabilities"]]
    for answer, chances in zip(answers, in_float32, strict=True):
        assert [*answer["probabilities"].values()] == pytest.approx(chances, abs=1e-5)
    has = found > [*thresholds.values()]
    wanted = np.array([[name in answer["labels"] for name in names] for answer in answers])
    assert np.array_equal(in_float32 > [*thresholds.values()], wanted)
    # An int8 scale is computed over the batch.
    for row, chances in zip(bert("predict", out, "--input", texts).rows, found, strict=True):
        assert [*row["probabilities"].values()] == pytest.approx(chances, abs=1e-2)
        assert row["labels"] == [
            name for name, chance in row["probabilities"].items() if chance > thresholds[name]
        ]
    equal = float(said.partition("fraction of equal predictions ")[2].split()[0])
    assert equal == pytest.approx((has == wanted).mean(), abs=0.02) and equal >= 0.98


@pytest.mark.parametrize("form", ["one label", "several labels"])
def test_more_than_a_thousand_labels_have_scores_and_no_confusion_matrix(
    form, base, tmp_path, capsys
):
    labels = (f"label {number // 2}" for number in range(2400))
    lines = [
        {"text": f"good {number}", "label": label if form == "one label" else [label]}
        for number, label in enumerate(labels)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    values = {"train_file": tmp_path / "rows.jsonl", "max_seq_length": 16, "cache_dir": None}
    tokenizer = read_tokenizer(base / "model")
    task = classify.build(ClassifySettings.model_validate(values), tokenizer, None)
    err = capsys.readouterr().err
    assert "warning: 1,200 labels with one training text: 'label 0', " in err
    assert "and 1180 more" in err
    labels = task.development["validation"].labels["labels"]
    right = labels if labels.ndim == 2 else np.eye(1200)[labels]
    logits = np.float32(18.0 * right - 9.0)
    result = task.evaluate({"validation": logits})
    assert result.scores["macro_f1"] == 1.0 and result.table == ""
    result.write(tmp_path, {})
    assert len(lines_of(tmp_path / "predictions.jsonl")) == 1200
    assert ("1,200 rows and columns" in capsys.readouterr().out) == (form == "one label")
    assert not (tmp_path / "confusion.json").exists()
