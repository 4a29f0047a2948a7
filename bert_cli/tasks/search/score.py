"""`bert search score`: how well an index answers a person's own questions.

Documents are ranked by their best passage, in the order in which the page of `bert serve` shows them. The documents of
half of the questions choose the weight of the meaning, the others confirm it.

Shapes: n questions, M documents, W weights.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from bert_cli.arrays import Floats32, Floats64, Ints64
from bert_cli.config.search import SearchScoreSettings
from bert_cli.data.finetune import tables
from bert_cli.data.finetune.label_cells import label_of
from bert_cli.data.random import chooses
from bert_cli.data.search import words
from bert_cli.data.search.database import report_damage
from bert_cli.data.search.index import Index
from bert_cli.data.search.late import NO_MEANING
from bert_cli.data.search.ranking import best_of
from bert_cli.data.search.writing import write_index
from bert_cli.errors import ConfigError, DataError
from bert_cli.processes import print_line, print_table
from bert_cli.statistics import difference, interval, mean_of
from bert_cli.tasks.search.opened import open_index
from bert_cli.text import count

DEPTH = 10  # of nDCG and recall
WEIGHTS = tuple(step / 10 for step in range(11))  # of the meaning; 0 is words alone
AT_ONCE = 256  # questions that are embedded together
MIN_DOCUMENTS = 10  # of each half


def run(settings: SearchScoreSettings) -> None:
    """Print the scores, and record the weight that they support. Raises DataError for an unknown document."""
    index = open_index(settings.index)
    with report_damage(settings.index):
        with index.snapshot():
            relevant = read_queries(settings.queries, index)
            scores = question_scores(index, relevant)
        groups = [min(rows) for rows in relevant.values()]
        weight = index.weight
        rows = {"words": 0, "meaning": len(WEIGHTS) - 1}
        rows[f"both, weight {weight}"] = WEIGHTS.index(weight)
        if not index.embed:
            rows = {"words": 0}
        table = [
            [name, *(f"{interval(mean_of(values, groups)):.3f}" for values in scores[:, row].T)]
            for name, row in rows.items()
        ]
        documents = count(len({*groups}), "document")
        print_line(f"{count(len(groups), 'question')} about {documents}; 95 % intervals")
        print_table(["ranking", "nDCG@10", "recall@10", "MRR"], table)
        if index.embed:
            print_line(choose_weight(index, scores[:, :, 0], np.array(groups)))


def read_queries(path: Path, index: Index) -> dict[str, set[int]]:
    """Return the positions [M] of the right documents of each question."""
    # By name and what has it, which is a document, or a file and stands for all of its documents.
    positions: dict[str, dict[str | int, set[int]]] = {}
    _, documents = owners(index)
    for position, (title, document, numbered, name, file) in documents:
        for known in (title, document, numbered, name, file):
            source = file if known in (name, file) else position
            positions.setdefault(known, {}).setdefault(source, set()).add(position)
    relevant: dict[str, set[int]] = {}
    unknown: dict[str, str] = {}
    for where, row in tables.table_rows(path, ("question", "document"), Counter()):
        question = tables.text_of(row, "question", where)
        name = label_of(row, "document", where)
        try:
            if not words.parse(question).terms:
                raise words.no_word(question)
        except ConfigError as error:
            raise DataError(where, str(error)) from None
        # `bert search ask` prints paths below the working folder.
        key = name if name in positions else str(Path(name).resolve())
        if key not in positions:
            inside = _by_end_of_path(name, documents)
            if inside:
                positions[key] = inside
        if key not in positions:
            unknown.setdefault(name, where)
            continue
        sources = positions[key]
        if len(sources) > 1:
            paths: dict[str | int, str] = {n: path for n, (*_, path, _, _) in documents}
            first, second, *_ = [paths.get(source, source) for source in sources]
            number = f"{sum(map(len, sources.values())):,} documents"
            problem = f"{name!r} names {number}, such as {first} and {second}"
            remedy = "use its file or FILE:NUMBER, or the absolute path of the file"
            raise DataError(where, problem, remedy)
        relevant.setdefault(question, set()).update(*sources.values())
    if unknown:
        first, *others = map(repr, unknown)
        also = f" and {count(len(others), 'other')}: {', '.join(others[:10])}" if others else ""
        remedy = f"use a title, a file or FILE:NUMBER, such as {next(iter(positions), '')!r}"
        problem = f"the index has no document {first}{also}"
        raise DataError(next(iter(unknown.values())), problem, remedy)
    if not relevant:
        raise DataError(str(path), "has no questions", "write one on each row")
    return relevant


def _by_end_of_path(
    name: str, documents: Iterable[tuple[int, Sequence[str]]]
) -> dict[str | int, set[int]]:
    """Return the positions by what has a path that ends in `name`: a file, or a document by its number in the file."""
    end = f"/{name}"
    positions: dict[str | int, set[int]] = {}
    for position, (*_, numbered, _, file) in documents:
        if file.endswith(end):
            positions.setdefault(file, set()).add(position)
        elif numbered.endswith(end):
            positions.setdefault(position, set()).add(position)
    return positions


def question_scores(index: Index, relevant: Mapping[str, set[int]]) -> Floats64:
    """Return nDCG@10, recall@10 and the reciprocal rank of each question and weight [n, W, 3].

    Without vectors W is 1: words alone.
    """
    owner, _ = owners(index)
    questions = list(relevant)
    weights = WEIGHTS
    if not index.embed:
        weights = WEIGHTS[:1]
    rows = []
    for begin in range(0, len(questions), AT_ONCE):
        batch = questions[begin : begin + AT_ONCE]
        asked = list(map(words.parse, batch))
        meanings = [NO_MEANING] * len(asked)
        if index.embed:
            meanings = index.by_meaning(asked)
        for name, question, meaning in zip(batch, asked, meanings, strict=True):
            best = np.full((len(weights), owner.max() + 1), -np.inf, np.float32)
            for ranking, scores in zip(best, index.scores(question, weights, meaning), strict=True):
                np.maximum.at(ranking, owner, scores)
            rows.append([metrics_of(scores, relevant[name]) for scores in best])
    return np.array(rows)


def metrics_of(scores: Floats32, relevant: set[int]) -> tuple[float, float, float]:
    """Return nDCG@10, recall@10 and the reciprocal rank of the scores of documents [M]; -inf is not found."""
    best = [n for n in best_of(scores, DEPTH) if scores[n] > -np.inf]
    is_right = np.isin(best, list(relevant))
    discounts = 1.0 / np.log2(np.arange(DEPTH) + 2.0)
    gain = discounts[: len(is_right)][is_right].sum() / discounts[: len(relevant)].sum()
    highest = scores[list(relevant)].max()
    reciprocal = 0.0
    if highest > -np.inf:
        reciprocal = 1.0 / (1 + (scores > highest).sum())
    return float(gain), float(is_right.sum() / len(relevant)), float(reciprocal)


def choose_weight(index: Index, gains: Floats64, groups: Ints64) -> str:
    """Record the weight that half of the documents choose, if the others confirm it; return the evidence.

    `gains` has the nDCG of each question and weight [n, W], `groups` the document of each question.
    """
    is_choosing = chooses(groups)
    choosing = np.flatnonzero(is_choosing)
    confirming = np.flatnonzero(~is_choosing)
    halves = [len(np.unique(groups[half])) for half in (choosing, confirming)]
    if min(halves) < MIN_DOCUMENTS:
        return (
            f"weight stays {index.weight}: choosing one needs questions about at least {2 * MIN_DOCUMENTS} documents, "
            f"{MIN_DOCUMENTS} in each half; yours name {halves[0]} and {halves[1]}"
        )
    tried = gains[choosing].mean(0)
    best = int(np.argmax(tried))
    before = index.weight
    documents = groups[confirming].tolist()
    rows = best, WEIGHTS.index(before)
    weighted, usual = (mean_of(gains[confirming, row], documents) for row in rows)
    gain = difference([weighted], [usual])
    is_better = gain.low > 0
    if is_better:
        with write_index(index.path) as written, written.changing():
            written.record(weight=WEIGHTS[best])
    means = ", ".join(f"{w} {mean:.3f}" for w, mean in zip(WEIGHTS, tried, strict=True))
    asked = count(len(choosing), "question")
    evidence = f"nDCG@10 of {asked} for each weight of the meaning: {means}\n"
    if WEIGHTS[best] == before:
        return f"{evidence}the best weight is {before}; the index has it"
    verdict = f"was not clearly better than {before} ({gain:.3f}): the weight stays {before}"
    if is_better:
        verdict = f"was {gain:.3f} better than {before}: the index now has weight {WEIGHTS[best]}"
    return f"{evidence}on the {count(len(confirming), 'other question')}, {WEIGHTS[best]} {verdict}"


def owners(index: Index) -> tuple[Ints64, list[tuple[int, Sequence[str]]]]:
    """Return the position of the document of each passage [N], and position and names of each document.

    Copies, whose passages are equal, have one position. The names are the title, name and path with the number in
    the file, and name and path of the file.
    """
    columns = "document, hash, title, name || suffix, path || suffix, name, path"
    hashes: dict[int, list[int]] = {}
    names: dict[int, Sequence[str]] = {}
    for document, number, *rest in index.table.execute(f"SELECT {columns} FROM places ORDER BY id"):
        hashes.setdefault(document, []).append(number)
        names[document] = rest
    contents = [*map(tuple, hashes.values())]
    first = {content: position for position, content in reversed([*enumerate(contents)])}
    positions = [first[content] for content in contents]
    owner = np.repeat(positions, [*map(len, contents)])
    return owner, [*zip(positions, names.values(), strict=True)]
