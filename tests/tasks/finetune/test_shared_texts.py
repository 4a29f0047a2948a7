"""Texts and judgements that are scored: none is trained on, and other ones are other examples."""

import json

import numpy as np
from support.tiny_models import TINY, write_model

from bert_cli.config.embed import EmbedSettings
from bert_cli.config.finetune import ClassifySettings
from bert_cli.data.tokens.tokenizer import read_tokenizer
from bert_cli.tasks.finetune import classify as table
from bert_cli.tasks.finetune import embed

SCORED = ["The  film was good", "the actor is awful", "it was a film"]


def asked(folder, rows):
    for file in ("queries", "corpus"):
        lines = [json.dumps({"_id": str(n), "text": text}) for n, text in enumerate(rows)]
        (folder / f"{file}.jsonl").write_text("\n".join(lines))
    (folder / "qrels").mkdir()
    judged = [f"{n}\t{n}\t1" for n in range(len(rows))]
    (folder / "qrels/dev.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *judged]))
    return {"retrieval_file": folder / "qrels/dev.tsv"}


def test_other_judgements_of_the_same_texts_are_other_examples(tmp_path):
    write_model(tmp_path / "model")
    files = {**asked(tmp_path, SCORED), "train_file": None, "do_training": False}
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
    lines = [f"{text},{'ab'[n % 2]}" for n, text in enumerate(rows)]
    (tmp_path / "train.csv").write_text("\n".join(["text,label", *lines]))
    files = {"train_file": tmp_path / "train.csv"}
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
