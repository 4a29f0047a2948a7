"""`bert embed`: its numbers in every layout, its scores, and its result in `bert predict` and sentence-transformers."""

import json
import shutil
from contextlib import ExitStack

import numpy as np
import pytest
from support.tiny_models import OTHERS, TINY, metrics_of
from support.vectors import arguments, pairs, write_pooling

from bert_cli.cli import main
from bert_cli.config.embed import EmbedSettings
from bert_cli.data.tokens.tokenizer import read_tokenizer
from bert_cli.tasks.finetune import embed
from bert_cli.tasks.run import finetune, resolve
from bert_cli.tasks.run.job import Draft
from bert_cli.train.checkpoint import complete_checkpoints


def settings_of(**changes):
    return EmbedSettings.model_validate(
        {"max_seq_length": 32, "do_validation": False, "cache_dir": None, **changes}
    )


def vectors_of(capsys, *words):
    """Return the vectors that `bert predict` prints, and its warnings."""
    assert main(["predict", *map(str, words)]) == 0
    printed = capsys.readouterr()
    vectors = [json.loads(line)["embedding"] for line in printed.out.splitlines()]
    return np.array(vectors), printed.err


def test_held_out_pairs_are_not_trained_on(home, monkeypatch):
    texts = {}
    monkeypatch.setattr(
        embed, "features_of_texts", lambda examples, name, *_: texts.update({name: examples.first})
    )
    files = {"pretrained_ckpt_path": str(home / "plain"), "train_file": str(home / "pairs.tsv")}
    shape = {"bert_config": TINY.model_dump(), "held_out_fraction": 0.25, "do_validation": True}
    embed.build(settings_of(**files, **shape), read_tokenizer(home / "plain"), None)
    held, trained = set(texts["queries"]), set(texts["train"])
    assert len(held) == 16 and len(texts["train"]) == 2 * 48
    assert not (held | set(texts["documents"])) & trained


FOUR_STEPS = ["--total-num-train-samples", "64", "--checkpoint-every-steps", "2"]


@pytest.fixture(scope="module")
def trained(home):
    """A run of 4 steps of 16 pairs in 4 micro-batches, with dropout."""
    assert main(pairs(home, "trained", *FOUR_STEPS, micro_batch=4, accumulation=4)) == 0
    return home / "trained"


# --- scores and use


@pytest.mark.parametrize(
    ("changes", "epochs", "steps"),
    [
        ({"text_column": ["anchor", "positive", "negative"]}, 3, 16),
        ({"text_column": ["anchor", "positive"]}, 3, 16),
        ({"train_file": "texts.txt", "objective": "simcse"}, 1.5, 5),
    ],
)
def test_an_epoch_has_every_row_once_however_many_texts_it_has(changes, epochs, steps, home):
    """12 rows a step: 64 rows of three texts, and of two; 40 texts with themselves."""
    values = {"train_file": "pairs.tsv", "num_epochs": epochs} | changes
    values["train_file"] = home / values["train_file"]
    values["global_batch"] = {"micro_batch_size": 4, "grad_acc_steps_per_replica": 3}
    settings = settings_of(**values)
    task = embed.build(settings, read_tokenizer(home / "plain"), None)
    mesh = resolve.open_mesh(settings)
    plan, reader, _ = finetune.open_features(settings, task.train, mesh, task.reader)
    assert plan.total_steps == steps and reader.epoch_size in (40, 64)
    assert plan.epochs == pytest.approx(12 * steps / reader.epoch_size)


@pytest.mark.slow
def test_simcse_trains_on_texts_with_themselves(home):
    words = ["--objective", "simcse", "--train-file", str(home / "texts.txt"), "--no-do-validation"]
    assert main(arguments(home, "simcse", *words, "--num-epochs", "4")) == 0
    losses = [row["loss"] for row in metrics_of(home / "simcse")]
    # Dropout makes two vectors of a text, so that the loss is not 0 from the start.
    assert 0.01 < losses[-1] < losses[0]


def test_sentence_transformers_opens_a_checkpoint_and_gives_the_vectors_of_predict(
    home, trained, bert
):
    from sentence_transformers import SentenceTransformer

    texts = [f"the {word} was very good " * 9 for word in OTHERS]
    (home / "input.txt").write_text("\n".join(texts) + "\n")
    rows = bert("predict", trained, "--input", home / "input.txt").rows
    newest = complete_checkpoints(trained)[-1]
    model = SentenceTransformer(str(newest), device="cpu")
    np.testing.assert_allclose([row["embedding"] for row in rows], model.encode(texts), atol=1e-5)
    assert np.linalg.norm(rows[0]["embedding"]) == pytest.approx(1.0, abs=1e-5)
    assert all(row["truncated"] for row in rows), "at 32 tokens, as in training"


def test_shortened_vectors_are_scored_predicted_and_ranked(home, trained, bert, capsys):
    judged = ["--validation-file", str(home / "sts.csv"), "--max-seq-length", "32"]
    start = ["embed", "--pretrained-ckpt-path", str(trained), "--no-do-training", *judged]
    scores = bert(*start, "--matryoshka", f"{TINY.hidden_size},8,4").last
    assert list(scores) == ["spearman", "spearman_dim8", "spearman_dim4"]
    texts = [f"the {word} was very good" for word in OTHERS[:5]]
    file = home / "short.txt"
    file.write_text("\n".join(texts) + "\n\n")
    complete, warned = vectors_of(capsys, trained, "--input", file)
    warning = f"(8): is not a size for which the vectors were trained ({TINY.hidden_size})"
    assert warning not in warned
    short, warned = vectors_of(capsys, trained, "--input", file, "--dimensions", "8")
    assert warning in warned and short.shape == (5, 8)
    expected = complete[:, :8] / np.linalg.norm(complete[:, :8], axis=1, keepdims=True)
    np.testing.assert_allclose(short, expected, atol=1e-6)
    words = ["predict", str(trained), texts[0], "--task", "similarity", "--dimensions", "8"]
    ranked = bert(*words, "--input", file, "--top", "4").rows
    cosines = dict(zip(texts, expected @ expected[0], strict=True))
    assert [row["text"] for row in ranked] == sorted(texts, key=cosines.get, reverse=True)[:4]
    similarities = [row["similarity"] for row in ranked]
    assert similarities == pytest.approx(sorted(cosines.values(), reverse=True)[:4], abs=1e-5)


def test_scores_of_other_pairs_are_of_other_examples(home, tmp_path):
    text = (home / "sts.csv").read_text()
    shape = {"bert_config": TINY.model_dump(), "do_validation": True, "do_training": False}
    vectors = np.random.default_rng(0).standard_normal((2, 36, TINY.hidden_size))
    examples = []
    for pairs_file in (text, text, text.replace("\n", "\nother ", 1)):
        (tmp_path / "sts.csv").write_text(pairs_file)
        settings = settings_of(**shape, validation_file=tmp_path / "sts.csv")
        task = embed.build(settings, read_tokenizer(home / "plain"), None)
        result = task.evaluate(dict(zip(("first", "second"), vectors, strict=True)))
        examples.append(result.samples["spearman"].examples.digest)
    assert examples[0] == examples[1] != examples[2]


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, ("cls", 24)), ({"pooling": "mean", "max_seq_length": 16}, ("mean", 16))],
)
def test_pooling_and_length_of_the_model_are_the_defaults(given, expected, home, tmp_path):
    folder = shutil.copytree(home / "plain", tmp_path / "vectors")
    write_pooling(folder, "cls", longest=24)
    values = {"pretrained_ckpt_path": str(folder), "train_file": home / "pairs.tsv", **given}
    values |= {"cache_dir": None, "save_ckpt_path": tmp_path / "run"}
    settings = EmbedSettings.model_validate(values)
    with ExitStack() as stack:
        draft = Draft(settings, stack)
        draft.take(embed.STEPS)
    used = draft.order
    assert (used.pooling, used.max_seq_length) == expected
