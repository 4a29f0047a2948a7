"""transformers opens ModernBERT with either activation, and GroupBERT as each of the classes in our own file."""

import pytest
from support.model_inputs import hidden_of, make_examples, random_blocks
from support.tiny_models import PIECES, write_model

torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")

CLASSES = [
    # Architecture, end of the class' name -> what a checkpoint of pre-training lacks, and has too much.
    ("groupbert", "", set(), {"cls"}),
    ("groupbert", "ForPreTraining", set(), set()),
    ("groupbert", "ForMaskedLM", set(), set()),
    ("groupbert", "ForQuestionAnswering", {"qa_outputs"}, {"cls", "bert.pooler"}),
    ("groupbert", "ForSequenceClassification", {"classifier"}, {"cls"}),
    ("groupbert", "ForTokenClassification", {"classifier"}, {"cls", "bert.pooler"}),
    ("modernbert", "ForMaskedLM", set(), set()),
    ("silu", "ForMaskedLM", set(), set()),
]
ACTIVATIONS = {"hidden_act": "silu", "classifier_activation": "silu"}


@pytest.fixture(scope="module")
def saved(shapes, tmp_path_factory):
    """Architecture -> the blocks of a checkpoint of pre-training, and its folder."""
    models = {}
    for name in ("groupbert", "modernbert", "silu"):
        config = shapes["modernbert" if name == "silu" else name]
        changes = {"vocab_size": len(PIECES), **(ACTIVATIONS if name == "silu" else {})}
        config = config.model_copy(update=changes)
        blocks = random_blocks(config)
        folder = tmp_path_factory.mktemp("models") / name
        models[name] = blocks, write_model(folder, config, blocks=blocks)
    return models


@pytest.mark.parametrize(("architecture", "end", "lacks", "surplus"), CLASSES)
def test_transformers_opens_a_checkpoint_with_the_same_outputs(
    architecture, end, lacks, surplus, saved
):
    blocks, folder = saved[architecture]
    trust = {"trust_remote_code": architecture == "groupbert"}
    kind = getattr(transformers, f"AutoModel{end}")
    model, report = kind.from_pretrained(folder, output_loading_info=True, **trust)
    prefix = "GroupBert" if architecture == "groupbert" else "ModernBert"
    assert type(model).__name__ == f"{prefix}{end or 'Model'}"
    assert all(name.startswith(tuple(lacks)) for name in report["missing_keys"])
    assert all(name.startswith(tuple(surplus)) for name in report["unexpected_keys"])
    assert bool(lacks) == bool(report["missing_keys"])
    columns = make_examples(len(PIECES), examples=6)
    names = {"input_ids": "input_ids", "attention_mask": "input_mask"}
    names |= {"token_type_ids": "segment_ids"} if architecture == "groupbert" else {}
    with torch.no_grad():
        outputs = model.eval()(**{n: torch.tensor(columns[ours]) for n, ours in names.items()})
    mlm, *nsp = (part.numpy() for part in blocks[-1][1].logits(hidden_of(blocks, columns)))
    if end in ("ForPreTraining", "ForMaskedLM"):
        logits = outputs.get("prediction_logits", outputs.get("logits"))
        theirs = logits[torch.arange(6)[:, None], columns["masked_lm_positions"]].numpy()
        assert abs(theirs - mlm).max() < 5e-6 * abs(mlm).max()
    # A model without a head has the pooler that the file has.
    assert end or architecture == "modernbert" or outputs.pooler_output is not None
    if end == "ForPreTraining":
        assert abs(outputs.seq_relationship_logits.numpy() - nsp[0]).max() < 1e-5


def test_without_trust_transformers_names_the_remedy(saved, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda question: "n")
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        transformers.AutoModelForMaskedLM.from_pretrained(saved["groupbert"][1])
