"""Judgements of retrieval as BEIR reads them, and their scores against scikit-learn and counts by hand."""

import json

import numpy as np
import pytest
from sklearn.metrics import ndcg_score
from support.metrics import values

from bert_cli.data.finetune import embeddings
from bert_cli.errors import CheckpointError

DOCUMENTS = 150


def retrieval_scores(queries, documents, relevant):
    texts = [str(number) for number in range(len(queries))]
    judged = embeddings.Retrieval(texts, [], relevant)
    return values(embeddings.retrieval_samples(embeddings.ranked(queries, documents), judged))


@pytest.mark.parametrize(
    ("judged", "grades"),
    [
        ([1, 2, 5, 9], [1.0]),
        ([3, 5, 8, 20], [1.0, 2.0, 3.0]),
        ([4, 9, 40, 60], [0.0, 0.0, 1.0, 4.0]),
        ([30, 120, 150], [1.0, 2.0]),  # more relevant documents than either depth
    ],
)  # fmt: skip
def test_graded_judgements_are_scored_as_by_scikit_learn(judged, grades, monkeypatch):
    """Each query has so many judged documents, with one of the grades."""
    draw = np.random.default_rng(len(judged))
    documents = draw.standard_normal((DOCUMENTS, 8)).astype(np.float32)
    queries = draw.standard_normal((len(judged), 8)).astype(np.float32)
    cosines = queries @ documents.T
    cosines /= np.linalg.norm(queries, axis=1)[:, None] * np.linalg.norm(documents, axis=1)
    truth = np.zeros(cosines.shape)
    relevant = []
    for row, count in zip(truth, judged, strict=True):
        chosen = draw.choice(DOCUMENTS, count, replace=False).tolist()
        row[chosen] = draw.choice(grades, count)
        relevant.append({number: row[number] for number in chosen})
    monkeypatch.setattr(embeddings, "BLOCK_SCORES", 2 * DOCUMENTS)  # two queries at a time
    scores = retrieval_scores(queries, documents, relevant)
    each = [ndcg_score(truth[n : n + 1], cosines[n : n + 1], k=10) for n in range(len(truth))]
    assert scores["ndcg_10"] == pytest.approx(np.mean(each), rel=1e-6)
    assert 0 < scores["ndcg_10"] < 1
    ranked = np.take_along_axis(truth, np.argsort(-cosines, axis=1), axis=1) > 0
    for depth in (10, 100):
        recalls = ranked[:, :depth].sum(1)[truth.any(1)] / (truth > 0).sum(1)[truth.any(1)]
        assert scores[f"recall_{depth}"] == pytest.approx(recalls.sum() / len(truth), rel=1e-6)


def test_fewer_documents_than_the_depth_can_be_scored():
    vectors = np.eye(3, dtype=np.float32)
    scores = retrieval_scores(vectors[:1], vectors, [{1: 2.0, 2: 1.0}])
    gained = 2 / np.log2(3) + 1 / np.log2(4)
    assert scores["ndcg_10"] == pytest.approx(gained / (2 + 1 / np.log2(3)))
    assert scores["recall_10"] == scores["recall_100"] == 1.0


# --- the folders of sentence-transformers

POOLING, LIMITS, DEFAULTS = embeddings.POOLING, embeddings.LIMITS, embeddings.DEFAULTS
PACKAGE = "sentence_transformers.models"


def folder_of(folder, file, changes, *more):
    """A folder of sentence-transformers with changed settings in a file, and more modules."""
    files = embeddings.embedding_files("mean", 8, 32)
    modules = json.loads(files["modules.json"])
    modules += [{"path": f"{n}_More", "type": kind} for n, kind in enumerate(more, 3)]
    if changes:
        files[file] = json.dumps(json.loads(files.get(file, "{}")) | changes).encode()
    for name, content in {**files, "modules.json": json.dumps(modules).encode()}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("file", "changes", "values"),
    [
        (POOLING, {"pooling_mode": ["cls"]}, {"pooling": "cls"}),
        (POOLING, {"include_prompt": False}, {}),
        (LIMITS, {"max_seq_length": None}, {"max_seq_length": 20}),
        (LIMITS, {"do_lower_case": True}, {}),
        (DEFAULTS, {"prompts": {"query": "q: "}, "default_prompt_name": None}, {}),
        (DEFAULTS, {"similarity_fn_name": "cosine", "model_type": "SentenceTransformer"}, {}),
    ],
)
def test_settings_of_sentence_transformers_are_applied(file, changes, values, tmp_path):
    folder = folder_of(tmp_path, file, changes)
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": true, "model_max_length": 20}')
    expected = {"pooling": "mean", "normalize": True, "max_seq_length": 32, **values}
    assert embeddings.read_embedding(folder) == expected


@pytest.mark.parametrize(
    ("prompts", "pair"),
    [
        ({}, ("", "")),
        ({"query": "q: "}, ("q: ", "")),
        ({"query": "q: ", "corpus": "c: "}, ("q: ", "c: ")),
        ({"corpus": "c: ", "passage": "p: "}, ("", "p: ")),
        ({"passage": "p: ", "document": "d: ", "query": "q: "}, ("q: ", "d: ")),
    ],
)
def test_a_prompt_is_read_by_its_name_and_refused_where_pooling_excludes_it(
    prompts, pair, tmp_path
):
    folder = folder_of(tmp_path, DEFAULTS, {"prompts": prompts})
    assert embeddings.read_prompts(folder) == pair
    assert {DEFAULTS, POOLING, LIMITS} <= embeddings.stored_files(folder).keys()
    described = json.loads((folder / POOLING).read_text())
    (folder / POOLING).write_text(json.dumps(described | {"include_prompt": False}))
    if any(pair):
        with pytest.raises(CheckpointError, match="include_prompt False"):
            embeddings.read_prompts(folder)
    else:
        assert embeddings.read_prompts(folder) == pair


@pytest.mark.parametrize(
    "case",
    [
        ("modules.json", {}, "3_More", f"{PACKAGE}.Dense"),
        ("modules.json", {}, "LayerNorm", f"{PACKAGE}.LayerNorm"),
        ("modules.json", {}, "custom_st", "custom_st.Normalize"),
        ("3_More/config.json", {"module_input_name": "x"}, "input_name", f"{PACKAGE}.Normalize"),
        (POOLING, {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens True"),
        (POOLING, {"pooling_mode_cls_token": True}, r"pooling_mode \['cls', 'mean'\]"),
        (POOLING, {"pooling_mode": "lasttoken"}, "lasttoken"),
        (LIMITS, {"max_seq_length": -5}, "max_seq_length -5"),
        (LIMITS, {"max_seq_length": True}, "max_seq_length True"),
        (LIMITS, {"do_lower_case": True}, "do_lower_case"),
        (LIMITS, {"processing_kwargs": {"text": {"padding": "x"}}}, "processing_kwargs"),
        (DEFAULTS, {"truncate_dim": 4}, "truncate_dim 4"),
        (DEFAULTS, {"prompts": {"q": "q: "}, "default_prompt_name": "q"}, "prompt_name 'q'"),
        (DEFAULTS, {"similarity_fn_name": "dot"}, "similarity_fn_name 'dot'"),
        (DEFAULTS, {"model_type": "SparseEncoder"}, "SparseEncoder"),
    ],
)
def test_what_is_not_applied_to_vectors_is_refused_by_name(case, tmp_path):
    file, changes, named, *more = case
    folder = folder_of(tmp_path, file, changes, *more)
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    with pytest.raises(CheckpointError, match=named):
        embeddings.read_embedding(folder)
