"""GroupBERT equals the formulas of its paper, written here in plain PyTorch, and so does its file for transformers."""

from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from support.model_inputs import (
    assert_gradients_of_pytorch,
    counts_of,
    gradients_of,
    hidden_of,
    make_examples,
)
from support.tiny_models import write_model

from bert_cli.facts.architectures import shape_of
from bert_cli.model.bert import build_blocks, named_weights

torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")

# --- the judge: from our weights by name the logits of the masked positions, of the next sentence, and the loss


def normalize(x, w, name, epsilon):
    centred = x - x.mean(-1, keepdim=True)
    deviation = (centred.square().mean(-1, keepdim=True) + epsilon).sqrt()
    return centred / deviation * w[f"{name}/gamma"] + w[f"{name}/beta"]


def dense(x, w, name):
    return x @ w[f"{name}/kernel"] + w[f"{name}/bias"]


def gelu(x):
    return x * (1 + torch.erf(x / 2**0.5)) / 2


def convolution(x, w, name, config, mask):
    h = dense(x, w, f"{name}/value") * torch.sigmoid(dense(x, w, f"{name}/gate")) * mask[..., None]
    kernel, width, length = w[f"{name}/grouped/kernel"], config.conv_group_size, x.shape[1]
    out = []
    for group in range(x.shape[-1] // width):
        channels = slice(group * width, (group + 1) * width)
        total = torch.zeros_like(h[:, :, channels])
        for tap in range(len(kernel)):
            shift = tap - len(kernel) // 2  # position s reads s + shift
            position = torch.arange(length) + shift
            inside = (position >= 0) & (position < length)
            moved = h[:, position % length, channels] * inside[None, :, None]
            total = total + moved @ kernel[tap][:, channels]
        out.append(total)
    h = torch.cat(out, -1) + w[f"{name}/grouped/bias"]
    h = normalize(h, w, f"{name}/inner_norm", config.layer_norm_eps)
    return dense(h * torch.sigmoid(h), w, f"{name}/output")


def feed_forward(x, w, name, config, mask):
    h = gelu(dense(x, w, f"{name}/inner")).chunk(config.ffn_groups, -1)
    kernels = w[f"{name}/grouped/kernel"].chunk(config.ffn_groups, -1)
    h = torch.cat([part @ kernel for part, kernel in zip(h, kernels, strict=True)], -1)
    h = h + w[f"{name}/grouped/bias"]
    return dense(h, w, f"{name}/mixer") if config.ffn_groups > 1 else h


def attention(x, w, name, config, mask):
    names = [f"{name}/{part}" for part in ("query", "key", "value")]
    parts = [dense(x, w, part).chunk(config.num_attention_heads, -1) for part in names]
    context = []
    for query, key, value in zip(*parts, strict=True):
        scores = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5
        scores = scores.masked_fill(mask[:, None] == 0, -torch.inf)
        context.append(scores.softmax(-1) @ value)
    return dense(torch.cat(context, -1), w, f"{name}/output")


def encoder_of(w, config, columns):
    ids, segments, mask = (columns[n] for n in ("input_ids", "segment_ids", "input_mask"))
    x = w["emb/word/embeddings"][ids] + w["emb/segment/embeddings"][segments]
    x = x + w["emb/position/embeddings"][: ids.shape[1]]
    x = normalize(x, w, "emb/layer_norm", config.layer_norm_eps)
    for layer in range(config.num_hidden_layers):
        for module, function in (
            ("convolution", convolution), ("feed_forward_1", feed_forward),
            ("self_attention", attention), ("feed_forward_2", feed_forward),
        ):  # fmt: skip
            name = f"hid_{layer}/{module}"
            normal = normalize(x, w, f"{name}/layer_norm", config.layer_norm_eps)
            x = x + function(normal, w, name, config, mask)
    return normalize(x, w, f"hid_{layer}/final_norm", config.layer_norm_eps)


def pretraining(w, config, columns):
    x = encoder_of(w, config, columns)
    rows = torch.arange(len(x))[:, None]
    h = gelu(dense(x[rows, columns["masked_lm_positions"]], w, "heads/masked_lm/transform"))
    h = normalize(h, w, "heads/masked_lm/layer_norm", config.layer_norm_eps)
    mlm = h @ w["emb/word/embeddings"].T + w["heads/masked_lm/bias"]
    nsp = dense(torch.tanh(dense(x[:, 0], w, "pool/dense")), w, "heads/next_sentence")
    is_used, cross_entropy = columns["masked_lm_weights"] > 0, torch.nn.functional.cross_entropy
    loss = cross_entropy(mlm[is_used], columns["masked_lm_ids"][is_used])
    return mlm, nsp, loss + cross_entropy(nsp, columns["next_sentence_labels"])


# --- ours


@pytest.fixture(scope="module")
def group(tiny):
    """A small model whose sizes all differ."""
    changes = {"architecture": "groupbert", "hidden_size": 48, "intermediate_size": 96}
    groups = {"conv_kernel_size": 5, "conv_group_size": 8, "ffn_groups": 4}
    return shape_of({**tiny.model_dump(), **changes, **groups, "layer_norm_eps": 1e-3})


def random_blocks(config):
    built = build_blocks(config, seed=1984, policy="float32")
    draw = np.random.default_rng(0)
    for weight in named_weights(built).values():
        weight.assign(weight.numpy() + draw.normal(0, 0.1, weight.shape))
    return built


@pytest.fixture(scope="module")
def blocks(group):
    return random_blocks(group)


@pytest.fixture(scope="module")
def columns(group):
    """Examples with padding of positions and of predictions."""
    return make_examples(group.vocab_size, examples=6)


def in_pytorch(columns):
    return {
        name: torch.tensor(column if name == "masked_lm_weights" else column.astype(np.int64))
        for name, column in columns.items()
    }


@pytest.mark.parametrize(("ffn_groups", "parts"), [(4, 6), (4, 1), (1, 6)])
def test_logits_loss_and_gradients_are_those_of_the_formulas(ffn_groups, parts, group, columns):
    """With both ways to convolve: one for each group, as on CPUs, and all at once, as on GPUs."""
    group = group.model_copy(update={"ffn_groups": ffn_groups})
    blocks = random_blocks(group)
    for _, block in blocks[1:3]:
        assert block.convolution.grouped.parts == 6
        block.convolution.grouped.parts = parts
    weights = {
        name: torch.tensor(weight.numpy(), requires_grad=True)
        for name, weight in named_weights(blocks).items()
    }
    mlm, nsp, loss = pretraining(weights, group, in_pytorch(columns))
    loss.backward()
    own_mlm, own_nsp = blocks[-1][1].logits(hidden_of(blocks, columns))
    # On CPUs only XLA has gradients of grouped convolutions.
    run = partial(gradients_of, blocks)
    run = tf.function(run, jit_compile=True) if parts == 1 else run
    own_loss, _, gradients = run(columns, counts_of(columns))
    assert np.abs(own_mlm.numpy() - mlm.detach().numpy()).max() < 1e-5
    assert np.abs(own_nsp.numpy() - nsp.detach().numpy()).max() < 1e-5
    assert abs(float(own_loss) - float(loss.detach())) < 1e-6
    assert_gradients_of_pytorch(
        {name: gradient.numpy() for name, gradient in gradients.items()},
        {name: weight.grad.numpy() for name, weight in weights.items()},
        [name for name in weights if name.endswith("/key/bias")],
    )


# --- the file for transformers

HEADS = {
    # End of the class' name -> what a checkpoint of pre-training lacks, and has too much.
    "": (set(), {"cls"}),
    "ForPreTraining": (set(), set()),
    "ForMaskedLM": (set(), set()),
    "ForQuestionAnswering": ({"qa_outputs"}, {"cls", "bert.pooler"}),
    "ForSequenceClassification": ({"classifier"}, {"cls"}),
    "ForTokenClassification": ({"classifier"}, {"cls", "bert.pooler"}),
}


@pytest.fixture(scope="module")
def folder(group, blocks, tmp_path_factory):
    """A checkpoint of pre-training."""
    return write_model(tmp_path_factory.mktemp("models") / "group", group, blocks=blocks)


def test_transformers_opens_a_checkpoint_with_the_same_outputs(folder, blocks, columns):
    mlm, nsp = blocks[-1][1].logits(hidden_of(blocks, columns))
    given = in_pytorch(columns)
    inputs = {
        "input_ids": given["input_ids"],
        "attention_mask": given["input_mask"],
        "token_type_ids": given["segment_ids"],
    }
    rows = torch.arange(len(given["input_ids"]))[:, None]
    for end, (lacks, surplus) in HEADS.items():
        kind = getattr(transformers, f"AutoModel{end}")
        model, report = kind.from_pretrained(
            folder, trust_remote_code=True, output_loading_info=True
        )
        assert type(model).__name__ == f"GroupBert{end or 'Model'}"
        starts = tuple(sorted(lacks)), tuple(sorted(surplus))
        assert all(name.startswith(starts[0]) for name in report["missing_keys"])
        assert all(name.startswith(starts[1]) for name in report["unexpected_keys"])
        assert bool(lacks) == bool(report["missing_keys"])
        with torch.no_grad():
            outputs = model.eval()(**inputs)
        logits = outputs.get("prediction_logits", outputs.get("logits"))
        if end in ("ForPreTraining", "ForMaskedLM"):
            theirs = logits[rows, given["masked_lm_positions"]].numpy()
            assert np.abs(theirs - mlm.numpy()).max() < 1e-5
        if end == "ForPreTraining":
            assert np.abs(outputs.seq_relationship_logits.numpy() - nsp.numpy()).max() < 1e-5


def test_without_trust_transformers_names_the_remedy(folder, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda question: "n")
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        transformers.AutoModelForMaskedLM.from_pretrained(folder)
