"""A model that learns the relations of a teacher: loss and every gradient equal PyTorch's."""

import math

import numpy as np
import pytest
from support.hf_models import need
from support.model_inputs import (
    assert_gradients_of_pytorch,
    counts_of,
    gradients_of,
    make_examples,
)

from bert_cli.model.bert import build_blocks, named_weights
from bert_cli.model.heads import with_relations
from bert_cli.model.hf import hf_config, to_hf


def relation_losses(states, teacher, is_token, heads):
    """The losses [B] of queries, keys and values [B, S, D], as the paper has them, in PyTorch."""
    import torch
    from torch.nn.functional import kl_div, log_softmax, softmax

    total = 0.0
    mask = torch.where(is_token[:, None, None], 0.0, -1e9)
    for state, expected in zip(states, teacher.unbind(2), strict=True):
        scores = []
        for x in (state, expected):
            x = x.unflatten(2, (heads, -1)).transpose(1, 2)
            scores.append(x @ x.transpose(2, 3) / math.sqrt(x.shape[3]) + mask)
        divergence = kl_div(log_softmax(scores[0], -1), softmax(scores[1], -1), reduction="none")
        total = total + (divergence.sum(-1) * is_token[:, None]).sum((1, 2)) / heads
    return total


@pytest.mark.parametrize("size", [48, 16])
def test_losses_and_gradients_equal_pytorchs(size, tiny):
    """Of masked-LM, next-sentence prediction and relations to a wider and to a narrower teacher, with padding."""
    need("torch")
    import torch
    import transformers

    blocks = build_blocks(tiny, seed=3, policy="float32")
    layer = dict(blocks)["hid_1"]
    layer.finish = with_relations
    draw = np.random.default_rng(5)
    weights = named_weights(blocks)
    for weight in weights.values():
        weight.assign(weight.numpy() + draw.normal(0, 0.1, weight.shape))
    columns = make_examples(tiny.vocab_size, examples=5)
    mask = columns["input_mask"]
    columns["teacher_states"] = draw.normal(size=(*mask.shape, 3, size)).astype(np.float32)
    columns["relation_weight"] = draw.random(len(mask)).astype(np.float32)
    counts = counts_of(columns) | {"tokens": np.float32(mask.sum())}
    loss, sums, gradients = gradients_of(blocks, columns, counts)

    model = transformers.BertForPreTraining(transformers.BertConfig(**hf_config(tiny))).eval()
    tensors = to_hf({name: weight.numpy() for name, weight in weights.items()}, tiny)
    model.load_state_dict({n: torch.tensor(x) for n, x in tensors.items()}, strict=False)
    tensors = {name: torch.tensor(column) for name, column in columns.items()}
    labels = torch.full(mask.shape, -100)
    for row, position, label, weight in zip(
        range(len(mask)), *(tensors[f"masked_lm_{n}"] for n in ("positions", "ids", "weights")), strict=True
    ):  # fmt: skip
        labels[row, position[weight > 0].long()] = label[weight > 0].long()
    out = model(
        input_ids=tensors["input_ids"],
        attention_mask=tensors["input_mask"],
        token_type_ids=tensors["segment_ids"],
        labels=labels,
        next_sentence_label=tensors["next_sentence_labels"].long(),
        output_hidden_states=True,
    )
    attention = model.bert.encoder.layer[1].attention.self
    states = [
        part(out.hidden_states[1]) for part in (attention.query, attention.key, attention.value)
    ]
    is_token = tensors["input_mask"] > 0
    # The largest common divisor, 16, has two heads of 8 values.
    losses = relation_losses(states, tensors["teacher_states"], is_token, heads=2)
    total = out.loss + (losses * tensors["relation_weight"]).sum() / is_token.sum()
    total.backward()
    assert float(loss) == pytest.approx(float(total.detach()), rel=1e-5)
    assert float(sums["relation_loss"]) == pytest.approx(float(losses.sum().detach()), rel=1e-5)
    ours = to_hf({name: value.numpy() for name, value in gradients.items()}, tiny)
    assert_gradients_of_pytorch(ours, {n: weight.grad.numpy() for n, weight in model.named_parameters()})  # fmt: skip
