"""Texts that are trained on and scored: a run holds out none, and counts those of a person's files."""

import json
import re

import numpy as np
import pytest
from support.tiny_models import TINY, write_model

from bert_cli.config.embed import EmbedSettings
from bert_cli.config.finetune import (
    ClassifySettings,
    GlueSettings,
    NerSettings,
    SquadSettings,
)
from bert_cli.data.tokens.tokenizer import read_tokenizer
from bert_cli.tasks.finetune import classify as table
from bert_cli.tasks.finetune import embed, ner, squad
from bert_cli.tasks.finetune import glue as benchmark

TRAINED = ["the film was good", "the plot was bad", "it was fine"]
SCORED = ["The  film was good", "the actor is awful", "it was a film"]


def classify(folder, name, rows):
    lines = [f"{text},{'ab'[n % 2]}" for n, text in enumerate(rows)]
    (folder / f"{name}.csv").write_text("\n".join(["text,label", *lines]))
    return {f"{name}_file": folder / f"{name}.csv"}


def of_teacher(folder, name, rows):
    if name == "validation":
        return classify(folder, name, rows)
    (folder / "more.txt").write_text("\n".join(rows))
    taught = {"teacher": "any", "unlabelled_file": folder / "more.txt"}
    return {**classify(folder, name, ["one", "two"]), "distillation": taught}


def glue(folder, name, rows):
    lines = [f"{n}\t{text}\t{text} too\tentailment" for n, text in enumerate(rows)]
    path = folder / f"{name.replace('validation', 'dev')}.tsv"
    path.write_text("\n".join(["index\tsentence1\tsentence2\tlabel", *lines]))
    return {"dataset_dir": folder, "glue_task": "rte"}


def sentences(folder, name, rows):
    lines = ["".join(f"{word} B-X\n" for word in text.split()) for text in rows]
    (folder / f"{name}.conll").write_text("\n".join(lines))
    return {f"{name}_file": folder / f"{name}.conll"}


def questions(folder, name, rows):
    answers = [{"text": "was", "answer_start": text.index("was")} for text in rows if "was" in text]
    answers = answers or [{"text": "is", "answer_start": 0}]
    paragraphs = [
        {"context": text, "qas": [{"id": f"{n}", "question": "?", "answers": answers[:1]}]}
        for n, text in enumerate(rows)
    ]
    (folder / f"{name}.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    return {f"{name}_file": folder / f"{name}.json"}


def similar(folder, name, rows):
    if name == "train":
        (folder / "train.tsv").write_text(
            "\n".join(["anchor\tpositive", *(f"{a}\t{a} too" for a in rows)])
        )
        return {"train_file": folder / "train.tsv"}
    lines = [f"x {n},{text},{n}" for n, text in enumerate(rows)]
    (folder / "sts.csv").write_text("\n".join(["sentence1,sentence2,score", *lines]))
    return {"validation_file": folder / "sts.csv"}


def asked(folder, name, rows):
    if name == "train":
        return similar(folder, name, rows)
    for file in ("queries", "corpus"):
        lines = [json.dumps({"_id": str(n), "text": text}) for n, text in enumerate(rows)]
        (folder / f"{file}.jsonl").write_text("\n".join(lines))
    (folder / "qrels").mkdir()
    judged = [f"{n}\t{n}\t1" for n in range(len(rows))]
    (folder / "qrels/dev.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *judged]))
    return {"retrieval_file": folder / "qrels/dev.tsv"}


@pytest.mark.parametrize(
    ("write", "kind", "build"),
    [
        (classify, ClassifySettings, table.build),
        (of_teacher, ClassifySettings, table.build),
        (glue, GlueSettings, benchmark.build),
        (sentences, NerSettings, ner.build),
        (questions, SquadSettings, squad.build),
        (similar, EmbedSettings, embed.build),
        (asked, EmbedSettings, embed.build),
    ],
)
def test_a_validation_file_that_shares_texts_with_training_says_how_many(
    write, kind, build, tmp_path, capsys
):
    files = {**write(tmp_path, "train", TRAINED), **write(tmp_path, "validation", SCORED)}
    write_model(tmp_path / "model")
    shape = {"bert_config": TINY.model_dump(), "max_seq_length": 32, "cache_dir": None}
    if kind is SquadSettings:
        shape |= {"doc_stride": 4, "max_query_length": 8}
    build(kind.model_validate({**shape, **files}), read_tokenizer(tmp_path / "model"), None)
    warning = (
        r"warning: 1 of 3 rows of (validation|validation_file|retrieval_file) share a text with "
    )
    assert re.search(warning, capsys.readouterr().err)


def test_other_judgements_of_the_same_texts_are_other_examples(tmp_path):
    write_model(tmp_path / "model")
    files = {**asked(tmp_path, "validation", SCORED), "train_file": None, "do_training": False}
    settings = EmbedSettings.model_validate({"bert_config": TINY.model_dump(), **files})
    fingerprints = set()
    for document in (1, 2, 1):
        judged = f"query-id\tcorpus-id\tscore\n0\t{document}\t1\n1\t0\t1\n2\t0\t1\n"
        (tmp_path / "qrels/dev.tsv").write_text(judged)
        fingerprints.add(
            embed.build(settings, read_tokenizer(tmp_path / "model"), None).fingerprint
        )
    assert len(fingerprints) == 2


def test_a_run_counts_repeated_texts_and_holds_out_all_copies_of_a_text_or_none(tmp_path, capsys):
    words = [f"{a} {b} {c}" for a in "bcd" for b in "fgh" for c in "jkl"]
    rows = [*words, *map(str.upper, words)]
    write_model(tmp_path / "model")
    shape = {"bert_config": TINY.model_dump(), "max_seq_length": 32, "cache_dir": None}
    tokenizer = read_tokenizer(tmp_path / "model")
    shape |= {"held_out_fraction": 0.4, "pretrained_ckpt_path": str(tmp_path / "model")}
    files = classify(tmp_path, "train", rows)
    task = table.build(ClassifySettings.model_validate({**shape, **files}), tokenizer, None)
    lines = "\n".join(["anchor\tpositive", *(f"{a}\t{a} too" for a in rows)])
    (tmp_path / "pairs.tsv").write_text(lines)
    files = {"train_file": tmp_path / "pairs.tsv"}
    other = embed.build(EmbedSettings.model_validate({**shape, **files}), tokenizer, None)
    for train, held in (
        (task.train, task.development["validation"]),
        (other.train, other.development["queries"]),
    ):
        first, second = (
            {tuple(part) for part in np.split(of.tokens, of.ends[:-1])} for of in (train, held)
        )
        assert first and second and not first & second
    captured = capsys.readouterr()
    assert captured.out.count("27 rows repeating an earlier text") == 2
    assert "share a text" not in captured.err
