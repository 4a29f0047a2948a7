"""A published ModernBERT with byte-level BPE: asked, continued on records of its tokenizer, and fine-tuned."""

import json

import pytest
from support.byte_level import write_modernbert, write_tokenizer
from support.hf_models import need
from support.runs import last_line
from support.tiny_models import (
    RUN_OF_RECORDS,
    SENTENCES,
    flags_of,
    metrics_of,
    write_questions,
    write_reviews,
)

from bert_cli.cli import main
from bert_cli.data.records.corpus import read_corpus

RECORDS = ["--sequence-length", 32, "--mask-tokens", 8, "--masking", "dynamic", "--processes", 1]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with the published `model`, `text`, `records` of it, and a `run` that continues it on them."""
    need("torch", "transformers")
    home = tmp_path_factory.mktemp("byte_level")
    model = write_modernbert(home / "model")
    (home / "text").mkdir()
    (home / "text/a.txt").write_text("\n".join([*SENTENCES[:6], "東京 😀 はどこ?", ""] * 5))
    records = home / "records"
    assert bert("tokenize", home / "text", records, "--vocab", model, "--no-nsp", *RECORDS) == 0
    assert bert("index", records, "--vocab", model) == 0
    changes = {"pretrained-ckpt-path": model, "max-predictions-per-seq": 8, "masking.unit": "word"}
    changes |= {"dataset-dir": records, "validation-dir": records, "save-ckpt-path": home / "run"}
    assert main(["pretrain", *flags_of(RUN_OF_RECORDS | changes)]) == 0
    return home


def bert(*words):
    return main([*map(str, words)])


@pytest.mark.slow
def test_masks_are_filled_as_by_transformers(home, capsys):
    """By the published model, and by the checkpoint of a run that continued it."""
    import transformers

    texts = ["the heart is a [MASK]", "[MASK] of   [MASK], isn't it? 東京 😀"]
    for folder in (home / "model", max((home / "run").glob("step_*"))):
        pipeline = transformers.pipeline("fill-mask", str(folder))
        for text in texts:
            assert bert("predict", folder, text, "--top", 3) == 0
            masks = json.loads(capsys.readouterr().out)["masks"]
            theirs = pipeline(text, top_k=3)
            for mask, answers in zip(masks, theirs if len(masks) > 1 else [theirs], strict=True):
                assert [each["word"] for each in mask] == [each["token_str"] for each in answers]
                expected = [pytest.approx(each["score"], rel=1e-4) for each in answers]
                assert [each["probability"] for each in mask] == expected


def test_a_run_continues_with_the_records_and_the_tokenizer_of_the_model(home, capsys):
    folder = max((home / "run").glob("step_*"))
    published = (home / "model/tokenizer.json").read_bytes()
    assert (folder / "tokenizer.json").read_bytes() == published
    corpus = read_corpus(home / "records")
    described = json.loads((folder / "config.json").read_text())
    names = {"pad": "pad", "cls": "cls", "sep": "sep", "bos": "cls", "eos": "sep"}
    for theirs, ours in names.items():
        assert described[f"{theirs}_token_id"] == corpus["special_ids"][ours] > 400
    assert (corpus["vocab_size"], described["vocab_size"]) == (508, 512)
    assert {"tokenizer.json", "tokenizer_config.json"} <= {f["name"] for f in corpus["other_files"]}
    assert metrics_of(home / "run")[-1]["validation_bits_per_byte"] > 0
    assert bert("inspect", home / "records") == 0
    shown = capsys.readouterr().out
    assert " -> " in shown and "Ġ" not in shown


def test_what_does_not_fit_is_refused_before_any_work(home, tmp_path, capsys):
    model, text = home / "model", home / "text"
    pairs = ["tokenize", text, tmp_path / "pairs", "--vocab", model, *RECORDS]
    words = ["vocab", text, tmp_path / "vocab", "--extend", model, "--size", "+9"]
    write_tokenizer(home / "larger", size=600)
    reviews = write_reviews(tmp_path / "reviews.csv", 8)
    files = ["--train-file", reviews, "--save-ckpt-path", tmp_path / "classifier"]
    larger = ["classify", "--pretrained-ckpt-path", model, "--tokenizer-path", home / "larger"]
    for line, message in (
        (pairs, "models with byte-level BPE have no sentence pairs; pass --no-nsp"),
        (words, "is byte-level BPE, and only WordPiece can be extended"),
        ([*larger, *files], "pieces): is too large for the model"),
    ):
        assert bert(*line) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "pairs").exists()


@pytest.mark.slow
def test_tasks_are_trained_from_the_model(home, tmp_path, capsys):
    """Classification, entities and answers; the saved folders open in transformers with equal answers."""
    import transformers

    limits = ["--num-epochs", 1, "--max-seq-length", 64, "--global-batch.micro-batch-size", 8]
    start = ["--pretrained-ckpt-path", home / "model", *limits]
    reviews = write_reviews(tmp_path / "reviews.csv", 24)
    classes = tmp_path / "classes"
    assert bert("classify", *start, "--train-file", reviews, "--save-ckpt-path", classes) == 0
    text = "The film was good, 東京 😀"
    assert bert("predict", classes, text) == 0
    ours = last_line(capsys)
    folder = max(classes.glob("step_*"))
    (theirs,) = transformers.pipeline("text-classification", str(folder))(text)
    assert theirs["label"] == ours["label"]
    assert theirs["score"] == pytest.approx(ours["probability"], rel=1e-4)
    sentences = tmp_path / "train.conll"
    sentences.write_text("Ada\tB-PER\nis\tO\nin\tO\nParis\tB-LOC\n\n" * 8)
    files = ["--train-file", sentences, "--validation-file", sentences]
    entities = tmp_path / "entities"
    assert bert("ner", *start, *files, "--save-ckpt-path", entities) == 0
    assert bert("predict", entities, "Ada is in Paris.") == 0
    assert len(last_line(capsys)["words"]) == 5
    for name in ("train", "dev"):
        write_questions(tmp_path / f"{name}-v1.1.json", 8, seed=1)
    words = ["squad", *start, "--dataset-dir", tmp_path, "--save-ckpt-path", tmp_path / "answers"]
    assert bert(*words, "--doc-stride", 16, "--max-query-length", 16) == 0
    predictions = json.loads((tmp_path / "answers/predictions.json").read_text())
    assert len(predictions) == 8
    assert all(answer == answer.strip() for answer in predictions.values())
