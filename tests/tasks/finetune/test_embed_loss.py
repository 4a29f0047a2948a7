"""Losses and gradients of `bert embed` are those of PyTorch and sentence-transformers."""

import numpy as np
import pytest
from support.tiny_models import TINY
from support.vectors import NO_DROPOUT, opened, write_teachers

from bert_cli.config.embed import EmbedSettings
from bert_cli.data.tokens.tokenizer import read_tokenizer
from bert_cli.model.build import build_block
from bert_cli.model.names import hf
from bert_cli.parallel.engine import UpdateRequest, count
from bert_cli.parallel.tensorflow.mesh import group_of
from bert_cli.tasks.finetune import embed
from bert_cli.tasks.finetune.contrast import contrastive_loss
from bert_cli.tasks.model import models
from bert_cli.tasks.run import build, finetune, resolve


def first_step(home, **changes):
    """Return the loss, the gradients by Hugging Face's names and the texts of the first step."""
    values = {
        "pretrained_ckpt_path": str(home / "plain"),
        "bert_config": TINY.model_copy(update=NO_DROPOUT).model_dump(),
        "max_seq_length": 32,
        "global_batch": {"micro_batch_size": 4, "grad_acc_steps_per_replica": 3},
        "do_validation": False,
        "cache_dir": None,
        **changes,
    }
    settings = EmbedSettings.model_validate(values)
    mesh = resolve.open_mesh(settings)
    task = embed.build(settings, read_tokenizer(home / "plain"), None)
    task = task.teach(task)(group_of(mesh)) if task.teach else task
    plan, reader, _ = finetune.open_features(settings, task.train, mesh, task.reader)
    engine, state, _ = build.build_run(settings, mesh, plan)
    models.load_weights(models.find_source(str(home / "plain")), state.weights)
    batch = task.prepare(engine, reader[0], UpdateRequest())
    counts = count(batch, engine.head.COUNTS)
    engine.compile_stages(batch, counts)
    sums = engine.accumulate(batch, 0, counts, 1.0)
    gradients = {
        name: accumulator.numpy()
        for stage in engine.replicas[0]
        for name, accumulator in stage.accumulators.items()
    }
    shape = settings.bert_config
    # Without the packs of texts.
    batch = finetune.open_features(settings, task.train, mesh)[1][0]
    return sums["loss"] / counts["examples"], hf.to_hf(gradients, shape), batch


def tensors(batch, column, rows):
    import torch

    names = {"input_ids": "input_ids", "attention_mask": "input_mask"}
    flat = {theirs: batch[own].reshape(-1, batch[own].shape[-1]) for theirs, own in names.items()}
    return {name: torch.tensor(one[column::rows]) for name, one in flat.items()}


def assert_gradients(gradients, model, prefix=""):
    """Assert the gradients of PyTorch's parameters, those of both where a weight is used twice."""
    norm = np.sqrt(sum(np.sum(np.square(one, dtype=np.float64)) for one in gradients.values()))
    compared = 0
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and (ours := gradients.get(f"{prefix}{name}")) is not None:
            apart = np.linalg.norm(ours - parameter.grad.numpy())
            assert apart <= 1e-5 * max(np.linalg.norm(ours), 1e-2 * norm), name
            compared += 1
    assert compared >= 5 + 16 * TINY.num_hidden_layers


@pytest.mark.parametrize(
    ("pooling", "micro_batches", "prefixes"),
    [("cls", 1, []), ("mean", 3, [16, 4]), ("mean", 1, [16, 4])],
)
def test_loss_and_gradients_of_pairs_are_pytorchs_of_the_complete_batch(
    pooling, micro_batches, prefixes, home
):
    """Of 12 rows of anchor, positive and hard negative, on the host (3 micro-batches) or in the head (one)."""
    from sentence_transformers.sentence_transformer import losses

    changes = {"train_file": str(home / "pairs.tsv"), "temperature": 0.1, "pooling": pooling}
    changes["text_column"] = ["anchor", "positive", "negative"]
    changes["global_batch"] = {
        "micro_batch_size": 12 // micro_batches,
        "grad_acc_steps_per_replica": micro_batches,
    }
    loss, gradients, batch = first_step(
        home, **changes, **({"matryoshka": prefixes} if prefixes else {})
    )
    assert batch["input_ids"].shape[:2] == (micro_batches, 36 // micro_batches)
    model = opened(home, pooling, pooling)
    model.zero_grad()
    judge = losses.MultipleNegativesRankingLoss(model, scale=10.0)
    if prefixes:
        judge = losses.MatryoshkaLoss(model, judge, [TINY.hidden_size, *prefixes])
    expected = judge([tensors(batch, n, 3) for n in range(3)], None)
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    assert_gradients(gradients, model[0].auto_model, "bert.")


def test_equal_texts_are_no_negatives_and_blocks_change_nothing(monkeypatch):
    vectors = np.random.default_rng(2).standard_normal((6, 2, 8)).astype(np.float32)
    texts = np.arange(12).reshape(6, 2)
    complete = contrastive_loss(vectors, texts, 0.1)
    monkeypatch.setattr("bert_cli.tasks.finetune.contrast.ROWS", 4)
    for mine, other in zip(contrastive_loss(vectors, texts, 0.1), complete, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-7)
    vectors[5, 1], texts[5, 1] = vectors[0, 1], texts[0, 1]  # the positive of row 0 once more
    repeated = contrastive_loss(vectors, texts, 0.1)
    without = contrastive_loss(vectors[:5], texts[:5], 0.1)
    for mine, other in zip(repeated[:2], without[:2], strict=True):
        assert mine[0] == pytest.approx(other[0], rel=1e-5)
    same = contrastive_loss(np.ones_like(vectors), np.arange(12).reshape(6, 2), 0.1)
    assert not same[1].any(), "of equal vectors none finds its own positive"


def test_a_candidate_with_the_text_of_the_anchor_is_no_negative():
    vectors = np.random.default_rng(4).standard_normal((6, 3, 8)).astype(np.float32)
    texts = np.arange(18).reshape(6, 3)
    vectors[5, 1:], texts[5, 1:] = vectors[0, 0], texts[0, 0]
    repeated = contrastive_loss(vectors, texts, 0.1)
    without = contrastive_loss(vectors[:5], texts[:5], 0.1)
    assert repeated[0][0] == pytest.approx(without[0][0], rel=1e-5)
    assert repeated[0][1] > without[0][1] + 1e-3  # to another anchor they are negatives


def test_a_positive_that_ties_is_not_correct_in_a_step_of_any_number_of_micro_batches():
    """The positive of row 0 has the score of another candidate; the positives of rows 1 and 2 are best."""
    texts = np.eye(6, dtype=np.float32)[[0, 3, 1, 1, 2, 2, 4, 3]]
    texts[0] = texts[1]
    on_host = contrastive_loss(texts.reshape(4, 2, 6), np.arange(8).reshape(4, 2), 0.1)[1]
    assert on_host.tolist() == [0.0, 1.0, 1.0, 0.0]
    head = build_block("embed_head", TINY, seed=None, policy="float32")
    labels = {
        "text_slots": np.arange(8, dtype=np.int32),
        "is_left_out": np.zeros((4, 4), np.bool_),
        "temperature": np.float32(0.1),
    }
    _, sums = head.call(texts[:, None], labels, {"examples": 8.0}, None)
    assert float(sums["correct"]) == 2 * on_host.sum(), "each row counts for its two texts"


@pytest.mark.parametrize("teacher", ["equal", "wide"])
def test_loss_and_gradients_of_a_teachers_vectors_are_sentence_transformers(teacher, home):
    """Of texts in packs. Wider vectors become their coordinates on the principal axes."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import MSELoss

    teachers = write_teachers(home)
    texts = (teachers / "texts.txt").read_text().splitlines()
    changes = {"train_file": str(teachers / "texts.txt")}
    changes["distillation"] = {"teacher": str(teachers / teacher)}
    loss, gradients, batch = first_step(teachers, **changes)
    size = TINY.hidden_size
    targets = batch["teacher_vectors"].reshape(-1, size)
    features = tensors(batch, 0, 1)
    expected = SentenceTransformer(str(teachers / teacher), device="cpu").encode(texts)
    if expected.shape[1] > size:
        left, values, _ = np.linalg.svd(expected, full_matrices=False)
        expected = left[:, :size] * values[:size]
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    # The order of the texts is the step's, and the sign of an axis is arbitrary.
    tokens = [row[row > 0].tolist() for row in features["input_ids"].numpy()]
    ours = read_tokenizer(teachers / "plain").library.encode_batch_fast(texts)
    rows = [next(n for n, e in enumerate(ours) if e.ids == row[1:-1]) for row in tokens]
    np.testing.assert_allclose(targets @ targets.T, expected[rows] @ expected[rows].T, atol=1e-5)
    model = opened(teachers, "mean", "mean")
    model.zero_grad()
    expected = size * MSELoss(model)([features], torch.tensor(targets))
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    assert_gradients(gradients, model[0].auto_model, "bert.")
