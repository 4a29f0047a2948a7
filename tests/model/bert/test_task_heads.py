"""The losses of the heads of fine-tuning against a teacher and with weighted labels equal those of PyTorch."""

import numpy as np
import pytest
import tensorflow as tf
from support.model_inputs import KINDS, make_examples, task_labels

from bert_cli.data.finetune.labels import weights_of
from bert_cli.model.build import Outputs, build_block
from bert_cli.parallel.engine import count

torch = pytest.importorskip("torch")
functional = torch.nn.functional


@pytest.fixture
def head_of(tiny):
    return lambda name, outputs=2: build_block(
        name, tiny, seed=4, policy="float32", outputs=Outputs(outputs)
    )


def loss_of(block, hidden, columns):
    """Return loss, sums, the gradient of the input, and the counts."""
    totals = count({name: column[None] for name, column in columns.items()}, block.COUNTS)
    counts = {name: np.float32(total) for name, total in totals.items()}
    tensor = tf.constant(hidden)
    with tf.GradientTape() as tape:
        tape.watch(tensor)
        loss, sums = block(tensor, columns, counts, None)
    return loss, sums, tape.gradient(loss, tensor).numpy(), counts


def test_an_answer_is_not_looked_for_in_the_padding(head_of):
    hidden = np.random.default_rng(0).normal(size=(1, 6, 32)).astype(np.float32)
    places = {n: np.array([1], np.int32) for n in ("start_positions", "end_positions")}
    losses = [
        loss_of(
            head_of("qa_head"), hidden[:, : len(mask)], {"input_mask": np.array([mask]), **places}
        )[0]
        for mask in ([1, 1, 1, 1], [1, 1, 1, 1, 0, 0])
    ]
    assert abs(float(losses[0]) - float(losses[1])) < 1e-6


def test_the_classifier_has_dropout_before_it(head_of):
    hidden = np.random.default_rng(0).normal(size=(3, 6, 32)).astype(np.float32)
    head = head_of("glue_head")
    dropped = head.logits(hidden, np.array([7, 0], np.int32))
    assert not np.array_equal(dropped, head.logits(hidden, None))


def one_label(logits, labels, weights):
    return functional.cross_entropy(logits, labels.long(), weight=weights)


def several_labels(logits, labels, weights):
    loss = functional.binary_cross_entropy_with_logits(
        logits, labels.float(), pos_weight=weights, reduction="sum"
    )
    return loss / (1 + labels * (weights - 1)).sum()


@pytest.mark.parametrize("theirs", [one_label, several_labels])
def test_the_loss_of_weighted_labels_equals_pytorchs(theirs, head_of):
    block = head_of("glue_head", 3)
    draw = np.random.default_rng(7)
    hidden = draw.normal(size=(6, 1, 32)).astype(np.float32)
    labels = np.array([0, 0, 0, 0, 1, 2], np.int32)
    if theirs is several_labels:
        labels = (draw.random((6, 3)) < 0.4).astype(np.int8)
    weights = weights_of(labels, ("a", "b", "c"), {"a": 0.25, "c": 3.0})
    columns = {"input_mask": np.ones((6, 1), np.int32), "labels": labels, "label_weights": weights}
    loss, sums, gradient, counts = loss_of(block, hidden, columns)
    kernel, bias = (torch.tensor(weight.numpy()) for weight in block.weights)
    inputs = torch.tensor(hidden[:, 0], requires_grad=True)
    weights = torch.tensor([0.25, 1.0, 3.0])
    expected = theirs(inputs @ kernel + bias, torch.tensor(labels), weights)
    expected.backward()
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert float(sums["loss"]) / counts["weighted"] == pytest.approx(float(loss), rel=1e-6)
    assert np.abs(gradient[:, 0] - inputs.grad.numpy()).max() < 1e-6


def test_the_accuracy_leaves_out_labels_that_a_teacher_made(head_of):
    block = head_of("glue_head", 3)
    draw = np.random.default_rng(7)
    hidden = draw.normal(size=(6, 1, 32)).astype(np.float32)
    guesses = np.asarray(block.logits(hidden, None)).argmax(-1)
    columns = {
        "input_mask": np.ones((6, 1), np.int32),
        # The third label is wrong; the last three are the model's own guesses.
        "labels": np.where([0, 0, 1, 0, 0, 0], (guesses + 1) % 3, guesses),
        "teacher_logits": draw.normal(size=(6, 3)).astype(np.float32),
        "teacher_weight": np.full(6, 0.5, np.float32),
        "teacher_temperature": np.ones(6, np.float32),
    }
    marked = columns | {"is_labelled": np.float32([1, 1, 1, 0, 0, 0])}
    losses = []
    for batch, expected in ((columns, 5 / 6), (marked, 2 / 3)):
        loss, sums, _, counts = loss_of(block, hidden, batch)
        losses.append(float(loss))
        over, by = block.MEANS["accuracy"]
        assert float(sums[over]) / counts[by] == pytest.approx(expected)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "pre-training"])
def test_the_loss_against_a_teacher_equals_pytorchs(kind, head_of):
    """Loss, and its gradient with respect to the head's input, for a weight and a temperature of each example."""
    name, outputs = KINDS[kind]
    block = head_of(name, outputs)
    mask = make_examples(97, examples=5, seed=3)["input_mask"]
    draw = np.random.default_rng(7)
    hidden = draw.normal(size=(*mask.shape, 32)).astype(np.float32)
    labels = task_labels(kind, mask)
    shape = (5, outputs) if name == "glue_head" else (*mask.shape, outputs)
    teacher = {
        "teacher_logits": 3.0 * draw.normal(size=shape).astype(np.float32),
        "teacher_weight": draw.random(5).astype(np.float32),
        "teacher_temperature": (1.0 + draw.random(5)).astype(np.float32),
    }
    loss, sums, ours, counts = loss_of(block, hidden, {"input_mask": mask, **labels, **teacher})

    kernel, bias = (torch.tensor(weight.numpy()) for weight in block.weights)
    theirs = torch.tensor(hidden, requires_grad=True)
    soft, weight, temperature = map(torch.tensor, teacher.values())
    pair = (
        theirs @ kernel + bias,
        soft,
    )  # the student's logits and the teacher's, then rows [R, L] of both
    target = labels.get("labels")
    if kind == "question answering":
        padding = torch.tensor(mask == 0)[:, :, None]
        pair = [x.masked_fill(padding, -1e9).transpose(1, 2).flatten(0, 1) for x in pair]
        target = np.stack([*labels.values()], axis=1)
    elif kind == "token classification":
        pair = [x.flatten(0, 1) for x in pair]
    else:
        pair = pair[0][:, 0], soft
    if kind == "several labels":
        pair = [torch.stack([torch.zeros_like(x), x], -1).flatten(0, 1) for x in pair]
    target = torch.tensor(target).flatten()
    weight, temperature = (x.repeat_interleave(len(target) // 5) for x in (weight, temperature))
    if kind == "regression":
        hard, divergence = ((pair[0][:, 0] - x) ** 2 for x in (target, soft[:, 0]))
        temperature = torch.ones(5)
    else:
        hard = functional.cross_entropy(pair[0], target, reduction="none")
        student, expected = (functional.log_softmax(x / temperature[:, None], -1) for x in pair)
        divergence = functional.kl_div(student, expected, reduction="none", log_target=True).sum(-1)
    losses = (1 - weight) * hard + weight * temperature**2 * divergence
    is_counted = torch.tensor(labels.get("label_weights", np.ones(target.shape))).flatten()
    expected = (losses * is_counted).sum() / is_counted.sum()
    expected.backward()
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-5)
    total = float(expected.detach()) * counts[block.MEANS["loss"][1]]
    assert float(sums["loss"]) == pytest.approx(total, rel=1e-5)
    gradient = theirs.grad.numpy()
    assert np.linalg.norm(ours - gradient) < 1e-5 * np.linalg.norm(gradient)
