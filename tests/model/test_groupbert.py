"""transformers opens a checkpoint of GroupBERT with the file that we ship, for each of its classes."""

import pytest
from support.model_inputs import hidden_of, make_examples, random_blocks
from support.tiny_models import write_model

torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")

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
def blocks(shapes):
    return random_blocks(shapes["groupbert"])


@pytest.fixture(scope="module")
def folder(shapes, blocks, tmp_path_factory):
    """A checkpoint of pre-training."""
    folder = tmp_path_factory.mktemp("models") / "group"
    return write_model(folder, shapes["groupbert"], blocks=blocks)


def test_transformers_opens_a_checkpoint_with_the_same_outputs(folder, blocks):
    columns = make_examples(97, examples=6)
    mlm, nsp = blocks[-1][1].logits(hidden_of(blocks, columns))
    names = {"input_ids": "input_ids", "attention_mask": "input_mask", "token_type_ids": "segment_ids"}  # fmt: skip
    inputs = {theirs: torch.tensor(columns[ours]) for theirs, ours in names.items()}
    rows = torch.arange(6)[:, None]
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
            theirs = logits[rows, columns["masked_lm_positions"]]
            assert abs(theirs - torch.tensor(mlm.numpy())).max() < 1e-5
        if end == "ForPreTraining":
            assert abs(outputs.seq_relationship_logits.numpy() - nsp.numpy()).max() < 1e-5


def test_without_trust_transformers_names_the_remedy(folder, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda question: "n")
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        transformers.AutoModelForMaskedLM.from_pretrained(folder)
