"""Vectors of texts: their training and evaluation files, their scores, and the files that describe the model.

The model's folder is described for sentence-transformers, which opens it. Retrieval files have the format of BEIR
(Thakur et al. 2021): queries.jsonl, corpus.jsonl and qrels/X.tsv in one folder.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bert_cli.data.finetune import tables
from bert_cli.errors import DataError
from bert_cli.files import JSON, JSONObject, Value, read_json

Floats = npt.NDArray[np.float32]

MODULES = "modules.json"
POOLING = "1_Pooling/config.json"
LIMITS = "sentence_bert_config.json"
FILES = (MODULES, POOLING, LIMITS)
PACKAGE = "sentence_transformers.models"
MODES = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean"}
BLOCK_SCORES = 1 << 26  # scores of queries and documents that are computed at once, 0.3 GB
DEPTHS = (10, 100)  # of the recall; nDCG uses the first


# --- files of texts


def read_texts(path: Path, columns: Sequence[str]) -> list[list[str]]:
    """Return the texts of each row of a table, or of each line of a .txt. Raises DataError for an empty text."""
    rows = []
    for where, row in tables.table_rows(path, columns, Counter()):
        rows.append([tables.text_of(row, name, where) for name in columns])
        if not all(text.strip() for text in rows[-1]):
            raise DataError(where, "has an empty text", "remove the row or fill it in")
    return rows


def read_similarities(path: Path, columns: Sequence[str]) -> tuple[list[list[str]], Floats]:
    """Return pairs of texts and the score of each. Raises DataError for a score that is not a number."""
    pairs = []
    scores = []
    for where, row in tables.table_rows(path, columns, Counter()):
        pairs.append([tables.text_of(row, name, where) for name in columns[:2]])
        scores.append(_number(tables.label_of(row, columns[2], where), where))
    if len({*scores}) < 2:
        raise DataError(str(path), "has the same score in every row", "give pairs with several")
    return pairs, np.array(scores, np.float32)


def _number(word: str, where: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DataError(where, f"{word!r} is not a number", "fix the score")
    return value


@dataclass(frozen=True)
class Retrieval:
    """Queries, documents, and for each query the relevance of documents by document number."""

    queries: Sequence[str]
    documents: Sequence[str]
    relevant: Sequence[Mapping[int, float]]


def read_retrieval(qrels: Path) -> Retrieval:
    """Return the queries that occur in the judgements, and all documents. Raises DataError for an unknown id.

    As in BEIR's script, the last judgement of a pair counts, and a query without relevant documents stays.
    """
    folder = qrels.absolute().parent.parent
    queries, documents = (_by_id(folder / f"{name}.jsonl") for name in ("queries", "corpus"))
    numbers = {name: number for number, name in enumerate(documents)}
    relevant: dict[str, dict[int, float]] = {}
    columns = ("query-id", "corpus-id", "score")
    for where, row in tables.table_rows(qrels, columns, Counter()):
        query, document, score = (tables.label_of(row, name, where) for name in columns)
        for known, name, file in ((queries, query, "queries"), (numbers, document, "corpus")):
            if name not in known:
                raise DataError(where, f"{name!r} is not in {folder / file}.jsonl", "fix the id")
        relevant.setdefault(query, {})[numbers[document]] = max(0.0, _number(score, where))
    if not any(grade for grades in relevant.values() for grade in grades.values()):
        raise DataError(str(qrels), "names no relevant document", "give another file")
    texts = [queries[name] for name in relevant]
    return Retrieval(texts, list(documents.values()), list(relevant.values()))


def _by_id(path: Path) -> dict[str, str]:
    """Return the texts of a .jsonl by `_id`; a `title` is put before its text. Raises DataError for an `_id` twice."""
    texts: dict[str, str] = {}
    for where, row in tables.json_lines(tables.read_lines(path), str(path)):
        words = [tables.text_of({"title": "", **row}, name, where) for name in ("title", "text")]
        name = tables.label_of(row, "_id", where)
        if name in texts:
            problem = f"has the _id '{name}' of line {1 + list(texts).index(name)}"
            raise DataError(where, problem, "remove one of them, or change its _id")
        texts[name] = " ".join(filter(None, words))
    return texts


def retrieval_of_pairs(rows: Sequence[Sequence[str]]) -> Retrieval:
    """Return rows (anchor, positive, ...) as a retrieval task: anchors are the queries, positives the documents."""
    numbers: dict[str, int] = {}
    relevant = [{numbers.setdefault(row[1], len(numbers)): 1.0} for row in rows]
    return Retrieval([row[0] for row in rows], list(numbers), relevant)


# --- scores


def cosines(first: Floats, second: Floats) -> Floats:
    """Return the cosine of each pair of rows of two matrices [n, D]."""
    return np.einsum("nd,nd->n", unit_vectors(first), unit_vectors(second))


def unit_vectors(vectors: Floats) -> Floats:
    """Return the rows of a matrix [n, D] with length 1."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(lengths, np.float32(1e-12))


def retrieval_scores(
    queries: Floats, documents: Floats, relevant: Sequence[Mapping[int, float]]
) -> dict[str, float]:
    """Return nDCG@10 (Jarvelin and Kekalainen 2002, with linear gains) and recall@10 and @100, means over the queries.

    Documents are ranked by their cosine with the query; ties keep the order of the documents. The scores of a query
    without relevant documents are 0.
    """
    queries = unit_vectors(queries)
    documents = unit_vectors(documents)
    depth = min(DEPTHS[-1], len(documents))
    block = max(1, BLOCK_SCORES // len(documents))
    discounts = 1.0 / np.log2(np.arange(DEPTHS[0]) + 2.0)
    sums = dict.fromkeys(("ndcg_10", *(f"recall_{depth}" for depth in DEPTHS)), 0.0)
    for first in range(0, len(queries), block):
        scores = queries[first : first + block] @ documents.T
        best = np.sort(np.argpartition(-scores, depth - 1, axis=1)[:, :depth], axis=1)
        order = np.argsort(-np.take_along_axis(scores, best, 1), axis=1, kind="stable")
        ranked = np.take_along_axis(best, order, 1).tolist()
        for numbers, gains in zip(ranked, relevant[first : first + block], strict=True):
            gained = np.array([gains.get(number, 0.0) for number in numbers])
            ideal = np.array(sorted(gains.values(), reverse=True))
            if not (count := np.count_nonzero(ideal)):
                continue
            gain, ideal_gain = (
                float(grades[: DEPTHS[0]] @ discounts[: len(grades)]) for grades in (gained, ideal)
            )
            sums["ndcg_10"] += gain / ideal_gain
            for deep in DEPTHS:
                sums[f"recall_{deep}"] += np.count_nonzero(gained[:deep]) / count
    return {name: total / len(queries) for name, total in sums.items()}


# --- the files of a model


def embedding_files(pooling: str, size: int, max_seq_length: int) -> dict[str, bytes]:
    """Return the files (name -> content) with which sentence-transformers opens a model of vectors of a size."""
    modules: list[JSON] = [
        {"idx": n, "name": str(n), "path": f"{n}_{kind}" if n else "", "type": f"{PACKAGE}.{kind}"}
        for n, kind in enumerate(("Transformer", "Pooling", "Normalize"))
    ]
    modes = {name: mode == pooling for name, mode in MODES.items()}
    contents: dict[str, JSON] = {
        MODULES: modules,
        POOLING: {"word_embedding_dimension": size, **modes},
        LIMITS: {"max_seq_length": max_seq_length, "do_lower_case": False},
    }
    return {name: json.dumps(content, indent=2).encode() for name, content in contents.items()}


def read_embedding(folder: Path) -> JSONObject:
    """Return `pooling`, `normalize` and `max_seq_length` of a sentence-transformers folder; absent values are left out.

    Raises DataError for a pooling that is neither the mean nor [CLS].
    """

    def read(name: str, kind: type[Value]) -> Value:
        path = folder / name
        remedy = "copy it from the model again"
        return read_json(path, kind, DataError, remedy) if path.is_file() else kind()

    values: JSONObject = {}
    if pooling := read(POOLING, JSONObject):
        chosen = [
            MODES.get(name, "") for name, on in pooling.items() if on is True and "_mode_" in name
        ]
        values["pooling"] = pooling.get("pooling_mode") or (chosen[0] if len(chosen) == 1 else "")
        if values["pooling"] not in MODES.values():
            raise DataError(str(folder / POOLING), "is neither mean nor cls", "give another model")
    if modules := read(MODULES, list[JSONObject]):
        values["normalize"] = any(
            str(module.get("type")).endswith("Normalize") for module in modules
        )
    if isinstance(longest := read(LIMITS, JSONObject).get("max_seq_length"), int):
        values["max_seq_length"] = longest
    return values
