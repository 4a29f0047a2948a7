"""A ModernBERT from records to predictions: pre-training on packs, continued, fine-tuned and asked."""

import json

import pytest
from support.hf_models import need
from support.tiny_models import (
    RUN_OF_RECORDS,
    SENTENCES,
    flags_of,
    metrics_of,
    write_model,
    write_records,
    write_reviews,
)

from bert_cli.cli import main

SHAPE = {
    "bert-config.architecture": "modernbert",
    "bert-config.hidden-size": 32,
    "bert-config.num-hidden-layers": 4,
    "bert-config.num-attention-heads": 4,
    "bert-config.intermediate-size": 48,
    "bert-config.max-position-embeddings": 64,
    "bert-config.local-attention": 4,
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with `vocab`, and records `pairs` and `single` of 32 positions."""
    home = tmp_path_factory.mktemp("modernbert")
    vocab = write_model(home / "vocab")
    write_records(home / "pairs", SENTENCES, vocab)
    words = ["tokenize", home / "pairs_text", home / "single", "--vocab", vocab, "--no-nsp"]
    words += ["--sequence-length", 32, "--mask-tokens", 5, "--masking", "dynamic"]
    assert main([*map(str, words)]) == 0
    return home


def pretrain(home, run, records="single", **changes):
    folders = {"dataset-dir": home / records, "save-ckpt-path": home / run}
    return main(["pretrain", *flags_of(RUN_OF_RECORDS | SHAPE | folders, **changes)])


@pytest.fixture(scope="module")
def trained(home):
    packs = {"max_sequences_per_pack": 3, "max_seq_length": 48, "max_predictions_per_seq": 12}
    packs["total_num_train_samples"] = 24
    assert pretrain(home, "run", **packs) == 0
    return home / "run"


def test_records_of_sentence_pairs_are_refused(home, capsys):
    assert pretrain(home, "refused", "pairs") == 2
    error = capsys.readouterr().err
    assert "dataset_dir" in error and "this model has no segments; make it with" in error
    assert not (home / "refused").exists()


def test_packs_are_trained_and_a_mask_is_filled(trained, capsys):
    losses = [line["mlm_loss"] for line in metrics_of(trained)]
    assert len(losses) > 1 and losses[-1] < losses[0]
    assert main(["predict", str(trained), "the film was [MASK]", "--top", "2"]) == 0
    (mask,) = json.loads(capsys.readouterr().out)["masks"]
    need("torch", "transformers")
    import transformers

    folder = max(trained.glob("step_*"))
    pipeline = transformers.pipeline("fill-mask", str(folder))
    names = json.loads((folder / "tokenizer_config.json").read_text())["model_input_names"]
    assert names == pipeline.tokenizer.model_input_names == ["input_ids", "attention_mask"]
    for ours, theirs in zip(mask, pipeline("the film was [MASK]"), strict=False):
        assert ours["word"] == theirs["token_str"]
        assert ours["probability"] == pytest.approx(theirs["score"], rel=1e-5)


def test_other_rotary_positions_and_a_task_start_from_the_checkpoint(home, trained, capsys):
    start = {"pretrained_ckpt_path": trained, "bert_config__global_rope_theta": 320000}
    assert pretrain(home, "longer", **start) == 0
    assert "starts from the weights" in capsys.readouterr().out
    reviews = write_reviews(home / "reviews.csv", 24)
    words = ["classify", "--pretrained-ckpt-path", trained, "--train-file", reviews]
    words += ["--save-ckpt-path", home / "classifier", "--num-epochs", 1, "--max-seq-length", 48]
    words += ["--global-batch.micro-batch-size", 8]
    assert main([*map(str, words)]) == 0
    assert "new weights from the seed: glue_head/classifier" in capsys.readouterr().out
    assert main(["predict", str(home / "classifier"), "the film was good"]) == 0
    assert json.loads(capsys.readouterr().out)["label"] in ("negative", "positive")
