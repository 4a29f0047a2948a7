"""Models of others that are read as a BERT, judged by transformers: RoBERTa, XLM-RoBERTa, MiniLM, DistilBERT."""

import json

import numpy as np
import pytest
from support.hf_models import need
from support.published import MODELS, write_published

import bert_cli
from bert_cli.cli import main
from bert_cli.data.tokens.tokenizer import read_tokenizer, read_vocabulary
from bert_cli.errors import CheckpointError, DataError
from bert_cli.model.names.published import bert_tensors
from bert_cli.tasks.model.models import find_source

TEXTS = ["The heart is a muscle.", "Straße,  ﬁne and\nnew", "東京 はどこ?", "a", "good fine " * 60]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    need("torch", "transformers")
    home = tmp_path_factory.mktemp("published")
    for kind in MODELS:
        write_published(home / kind, kind)
    return home


def mean_vectors(folder, texts):
    """Return the normalized means of transformers' last hidden states."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    vectors = []
    for text in texts:
        inputs = tokenizer(text, truncation=True, max_length=64, return_tensors="pt")
        with torch.no_grad():
            mean = model(**inputs).last_hidden_state[0].mean(0).numpy()
        vectors.append(mean / np.linalg.norm(mean))
    return np.array(vectors)


@pytest.mark.parametrize("kind", MODELS)
def test_vectors_are_those_of_transformers(kind, published):
    model = bert_cli.load(published / kind)
    vectors = model.embed(TEXTS)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    np.testing.assert_allclose(vectors, mean_vectors(published / kind, TEXTS), atol=1e-5)
    assert np.abs(vectors[0] - vectors[3]).max() > 0.01


@pytest.mark.parametrize("kind", ["roberta", "distilbert"])
def test_masks_are_filled_as_by_transformers(kind, published):
    import transformers

    pipeline = transformers.pipeline("fill-mask", str(published / kind))
    theirs = pipeline(f"the heart {pipeline.tokenizer.mask_token} good", top_k=3)
    (ours,) = bert_cli.load(published / kind).fill("the heart [MASK] good")
    assert [row["probability"] for row in ours[:3]] == pytest.approx(
        [row["score"] for row in theirs], rel=1e-4
    )
    assert [row["word"].strip() for row in ours[:3]] == [row["token_str"].strip() for row in theirs]


@pytest.mark.parametrize("kind", ["roberta", "xlm-roberta", "minilm"])
def test_a_special_token_in_a_text_is_plain_text(kind, published):
    tokenizer = read_tokenizer(published / kind)
    for name in ("<s>", "</s>", "<mask>", "<pad>"):
        ids = tokenizer.library.encode(f"a {name} b", add_special_tokens=False).ids
        assert not {*ids} & {*vars(tokenizer.special).values()} - {tokenizer.special.unk}
    assert tokenizer.pieces[tokenizer.special.mask] == "<mask>"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["xlm-roberta", "distilbert"])
def test_what_is_written_of_it_is_a_bert_with_the_same_vectors(kind, published, tmp_path):
    assert main(["export", str(published / kind), str(tmp_path / "out"), "--format", "hf"]) == 0
    described = json.loads((tmp_path / "out/config.json").read_text())
    assert described["model_type"] == "bert"
    theirs = mean_vectors(published / kind, TEXTS[:3])
    np.testing.assert_allclose(mean_vectors(tmp_path / "out", TEXTS[:3]), theirs, atol=1e-5)


@pytest.mark.parametrize("kind", ["roberta", "distilbert"])
def test_a_head_with_other_layers_is_not_read(kind):
    other = {"pre_classifier.weight": 1, "classifier.dense.weight": 2, "classifier.weight": 3}
    tensors = {
        name: np.ones((2, 2), np.float32) for name in ("embeddings.LayerNorm.weight", *other)
    }
    read = bert_tensors(tensors, {"model_type": kind})
    assert [*read] == ["embeddings.LayerNorm.weight"]


def test_what_does_not_fit_is_refused_with_a_remedy(published, tmp_path):
    with pytest.raises(DataError, match=r"is Unigram, for which .*bert vocab"):
        read_vocabulary(published / "xlm-roberta/tokenizer.json")
    with pytest.raises(DataError, match=r"lacks \[PAD\] .*use a model that has them"):
        read_vocabulary(published / "roberta/tokenizer.json")
    config = json.loads((published / "roberta/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2}))
    with pytest.raises(CheckpointError, match=r"max_position_embeddings"):
        find_source(str(tmp_path))
