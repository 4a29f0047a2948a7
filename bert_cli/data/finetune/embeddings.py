"""Vectors of texts: their training and evaluation files, their scores, and the files that describe the model.

The model's folder is described for sentence-transformers, which opens it. Retrieval files have the format of BEIR
(Thakur et al. 2021): queries.jsonl, corpus.jsonl and qrels/X.tsv in one folder.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from bert_cli.arrays import Floats32
from bert_cli.data.finetune import tables
from bert_cli.data.finetune.label_cells import label_of, number_of
from bert_cli.data.tokens.notation import COPY_AGAIN
from bert_cli.data.tokens.tokenizer import Normalization, TokenizerFolder
from bert_cli.errors import CheckpointError, DataError, logger
from bert_cli.files import JSON, InnerPath, JSONObject, Value, read_json
from bert_cli.statistics import Examples, Sample, identify, linked, plain, sample_of
from bert_cli.text import remark_of

MODULES = "modules.json"
POOLING = "1_Pooling/config.json"
LIMITS = "sentence_bert_config.json"
DEFAULTS = "config_sentence_transformers.json"
PACKAGE = "sentence_transformers.models"
MODES = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean"}
# Kinds of the modules, in their order.
KINDS = ("Transformer", "Pooling", "Normalize")
# Setting of these files -> values that are applied, none for all. Empty values of any setting have no effect.
APPLIED: Mapping[str, Sequence[JSON]] = json.loads(Path(__file__).with_suffix(".json").read_bytes())
BLOCK_SCORES = 1 << 26  # scores of queries and documents that are computed at once, 0.3 GB
DEPTHS = (10, 100)  # of the recall; nDCG uses the first


# --- files of texts


def read_texts(path: Path, columns: Sequence[str]) -> list[list[str]]:
    """Return the texts of each row of a table, or of each line of a .txt. Raises DataError for an empty text."""
    rows = []
    for where, row in _rows(path, columns):
        rows.append([tables.text_of(row, name, where) for name in columns])
        if not all(map(str.strip, rows[-1])):
            raise DataError(where, "has an empty text", "remove the row or fill it in")
    return rows


def _rows(path: Path, columns: Sequence[str]) -> tables.Rows:
    """Yield the rows of a table that have text, and print how many have none."""
    remarks: Counter[str] = Counter()
    yield from tables.table_rows(path, columns, remarks)
    for remark, number in remarks.items():
        logger.info(f"{path}: {remark_of(number, remark)}")


def read_similarities(path: Path) -> tuple[list[list[str]], Floats32]:
    """Return pairs of texts and the score of each. Raises DataError for a score that is not a number."""
    pairs = []
    scores = []
    for where, row in _rows(path, ("sentence1", "sentence2", "score")):
        pairs.append([tables.text_of(row, name, where) for name in ("sentence1", "sentence2")])
        scores.append(number_of(label_of(row, "score", where), where))
    if len({*scores}) < 2:
        problem = "all scores are equal"
        raise DataError(str(path), problem, "use different scores, as rank correlation needs")
    return pairs, np.array(scores, np.float32)


@dataclass(frozen=True)
class Retrieval:
    """Queries, documents, and for each query the relevance of documents by document number."""

    queries: Sequence[str]
    documents: Sequence[str]
    relevant: Sequence[Mapping[int, float]]

    @cached_property
    def examples(self) -> Examples:
        """Return the identity of the judged queries; equal ones, or of the same first document, are a group."""
        first = (sorted((n,) for n in grades if grades[n])[:1] for grades in self.relevant)
        groups = linked(
            (plain(query), *row) for query, row in zip(self.queries, first, strict=True)
        )
        judged = zip(self.queries, (sorted(row.items()) for row in self.relevant), strict=True)
        return identify(judged, groups)


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
        query, document, score = (label_of(row, name, where) for name in columns)
        for known, name, file in ((queries, query, "queries"), (numbers, document, "corpus")):
            if name not in known:
                raise DataError(where, f"{name!r} is not in {folder / file}.jsonl", "fix the id")
        relevant.setdefault(query, {})[numbers[document]] = max(0.0, number_of(score, where))
    # Every score would be 0, whatever the model.
    grades = [grade for judged in relevant.values() for grade in judged.values()]
    if not any(grades):
        raise DataError(str(qrels), "names no relevant document", "use another file")
    texts = [queries[name] for name in relevant]
    return Retrieval(texts, list(documents.values()), list(relevant.values()))


def _by_id(path: Path) -> dict[str, str]:
    """Return the texts of a .jsonl by `_id`; a `title` is put before its text. Raises DataError for an `_id` twice."""
    texts: dict[str, str] = {}
    for where, row in tables.table_rows(path, (), Counter()):
        words = [tables.text_of({"title": "", **row}, name, where) for name in ("title", "text")]
        name = label_of(row, "_id", where)
        if name in texts:
            problem = f"has the _id '{name}' of line {1 + list(texts).index(name)}"
            raise DataError(where, problem, "remove one of them, or change its _id")
        texts[name] = " ".join(filter(None, words))
    return texts


def retrieval_of_pairs(rows: Sequence[Sequence[str]]) -> Retrieval:
    """Return rows (anchor, positive, ...) as a retrieval task: anchors are the queries, positives the documents.

    Positives that are equal by `plain` are one document.
    """
    documents: dict[str, str] = {}
    for row in rows:
        documents.setdefault(plain(row[1]), row[1])
    numbers = {name: number for number, name in enumerate(documents)}
    relevant = [{numbers[plain(row[1])]: 1.0} for row in rows]
    return Retrieval([row[0] for row in rows], list(documents.values()), relevant)


# --- scores


def cosines(first: Floats32, second: Floats32) -> Floats32:
    """Return the cosine of each pair of rows of two matrices [n, D]."""
    return np.einsum("nd,nd->n", unit_vectors(first), unit_vectors(second))


def unit_vectors(vectors: Floats32) -> Floats32:
    """Return the rows of a matrix [n, D] with length 1."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    # A vector of zeros stays one, instead of NaN.
    return vectors / np.maximum(lengths, np.float32(1e-12))


def ranked(queries: Floats32, documents: Floats32) -> Iterator[list[int]]:
    """Yield the best documents of each query by their cosine with it; ties keep the order of the documents."""
    queries = unit_vectors(queries)
    documents = unit_vectors(documents)
    depth = min(DEPTHS[-1], len(documents))
    block = max(1, BLOCK_SCORES // len(documents))
    for first in range(0, len(queries), block):
        scores = queries[first : first + block] @ documents.T
        best = np.sort(np.argpartition(-scores, depth - 1, axis=1)[:, :depth], axis=1)
        order = np.argsort(-np.take_along_axis(scores, best, 1), axis=1, kind="stable")
        yield from np.take_along_axis(best, order, 1).tolist()


def retrieval_samples(
    rankings: Iterable[list[int] | None], retrieval: Retrieval
) -> dict[str, Sample]:
    """Return nDCG@10 (Jarvelin and Kekalainen 2002, with linear gains) and recall@10 and @100, means over the queries.

    The scores of a query without relevant documents are 0. A query without a ranking has none.
    """
    discounts = 1.0 / np.log2(np.arange(DEPTHS[0]) + 2.0)
    names = ("ndcg_10", *(f"recall_{depth}" for depth in DEPTHS))
    values = np.zeros((len(retrieval.queries), len(names)))
    for row, (numbers, gains) in enumerate(zip(rankings, retrieval.relevant, strict=True)):
        gained = np.array([gains.get(number, 0.0) for number in numbers or []])
        ideal = np.array(sorted(gains.values(), reverse=True))
        count = np.count_nonzero(ideal)
        if count:
            gain, ideal_gain = (
                float(grades[: DEPTHS[0]] @ discounts[: len(grades)]) for grades in (gained, ideal)
            )
            recalls = (np.count_nonzero(gained[:deep]) / count for deep in DEPTHS)
            values[row] = [gain / ideal_gain, *recalls]
        if numbers is None:
            values[row] = -np.inf
    columns = zip(names, values.T, strict=True)
    return {name: sample_of(retrieval.examples, "ratio", of, 1.0) for name, of in columns}


# --- the files of a model


def embedding_files(pooling: str, size: int, max_seq_length: int) -> dict[str, bytes]:
    """Return the files (name -> content) with which sentence-transformers opens a model of vectors of a size."""
    modules: list[JSON] = []
    for n, kind in enumerate(KINDS):
        # The first module, the encoder, lies in the folder itself.
        path = f"{n}_{kind}" if n else ""
        modules.append({"idx": n, "name": str(n), "path": path, "type": f"{PACKAGE}.{kind}"})
    modes = {name: mode == pooling for name, mode in MODES.items()}
    contents: dict[str, JSON] = {
        MODULES: modules,
        POOLING: {"word_embedding_dimension": size, **modes},
        LIMITS: {"max_seq_length": max_seq_length, "do_lower_case": False},
    }
    return {name: json.dumps(content, indent=2).encode() for name, content in contents.items()}


class _Module(BaseModel):
    type: str
    path: InnerPath
    kwargs: JSONObject = {}


def read_embedding(folder: Path) -> JSONObject:
    """Return `pooling`, `normalize` and `max_seq_length` of a sentence-transformers folder, as far as it has them."""
    if _read(folder / DEFAULTS, JSONObject).get("model_type") == "CrossEncoder":
        return {}  # a classifier of pairs
    _settings(folder / DEFAULTS)
    values: JSONObject = {}
    limits = _settings(folder / LIMITS)
    longest = limits.get("max_seq_length")
    path = folder / POOLING
    modules = _modules(folder)
    if modules:
        values["normalize"] = len(modules) > KINDS.index("Normalize")
        if longest is None:
            longest = TokenizerFolder(folder).max_length
        path = folder / modules[1].path / "config.json"
    if longest is not None:
        if type(longest) is not int or longest < 3:  # [CLS], a piece, [SEP]
            raise _refusal(folder / LIMITS, "max_seq_length", longest)
        values["max_seq_length"] = longest
    normalization: Normalization | None = Normalization()
    if limits.get("do_lower_case"):
        normalization = TokenizerFolder(folder).normalization
    if normalization is None or normalization.cased:
        raise _refusal(folder / LIMITS, "do_lower_case", True)
    if modules or path.exists():
        pooling = _settings(path)
        flagged = [mode for name, mode in MODES.items() if pooling.get(name)] or ["mean"]
        mode = pooling.get("pooling_mode") or flagged
        if isinstance(mode, list) and len(mode) == 1:
            values["pooling"] = mode[0]
        else:
            values["pooling"] = mode
        if values["pooling"] not in MODES.values():
            raise _refusal(path, "pooling_mode", mode)
    return values


def read_prompts(folder: Path) -> tuple[str, str]:
    """Return what stands before a question and before a document, by the names of sentence-transformers."""
    prompts = _read(folder / DEFAULTS, JSONObject).get("prompts") or {}
    names = next((name for name in ("document", "passage", "corpus") if name in prompts), "")
    pair = prompts.get("query") or "", prompts.get(names) or ""
    if any(pair) and _read(folder / POOLING, JSONObject).get("include_prompt") is False:
        raise _refusal(folder / POOLING, "include_prompt", False)
    return pair


def stored_files(folder: Path) -> dict[str, bytes]:
    """Return the files of a sentence-transformers folder, name -> content, at least one of each module."""
    needed = [f"{module.path}/config.json" for module in _modules(folder)[1:]]
    names = [name for name in (MODULES, POOLING, LIMITS, DEFAULTS) if (folder / name).is_file()]
    files = {name: folder / name for name in (*names, *needed)}
    contents = {}
    for name, path in files.items():
        contents[name] = path.read_bytes() if path.is_file() else b"{}"
    return contents


def _modules(folder: Path) -> list[_Module]:
    """Return the modules of a folder, none without a modules.json. Raises CheckpointError for others than KINDS."""
    path = folder / MODULES
    modules = _read(path, list[_Module])
    for number, module in enumerate(modules):
        package, _, kind = module.type.rpartition(".")
        is_known = kind == KINDS[min(number, 2)] and package.startswith("sentence_transformers.")
        if not is_known or module.kwargs or bool(module.path) != bool(number) or len(modules) == 1:
            raise _refusal(path, f"{module.path or number}, of {len(modules)},", module.type)
        if number:
            _settings(folder / module.path / "config.json")
    return modules


def _settings(path: Path) -> JSONObject:
    """Return the settings of a file, none if it is absent. Raises CheckpointError for one that is not APPLIED."""
    content = _read(path, JSONObject)
    for setting, value in content.items():
        applied = APPLIED.get(setting, [None])
        if value and applied and value not in applied:
            raise _refusal(path, setting, value)
    return content


def _refusal(path: Path, entry: str, value: object) -> CheckpointError:
    return CheckpointError(
        f"{path} ({entry} {value!r})",
        "is not applied by this tool, and the vectors depend on it",
        "use another model, or correct or remove the entry if the vectors may lack it",
    )


def _read(path: Path, kind: type[Value]) -> Value:
    if not path.exists():
        return kind()
    return read_json(path, kind, CheckpointError, COPY_AGAIN)
