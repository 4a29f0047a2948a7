"""`bert embed`: vectors of texts, trained on pairs of similar texts, on texts alone or by a teacher, and scored."""

import sqlite3
from collections.abc import Sequence
from functools import partial

import numpy as np

from bert_cli.config.embed import EmbedSettings
from bert_cli.data.finetune import embeddings
from bert_cli.data.finetune.features import PackReader, TextReader
from bert_cli.data.finetune.simple import bm25
from bert_cli.data.finetune.split import held_out_rows, warn_of_shared
from bert_cli.data.finetune.tables import REPEATED, TextExamples, repeats, samples_of
from bert_cli.data.tokens.tokenizer import TextTokenizer
from bert_cli.errors import ConfigError
from bert_cli.processes import print_line
from bert_cli.statistics import Sample, identify
from bert_cli.tasks.finetune.contrast import ROWS, Contrast, add_candidates, add_gradients
from bert_cli.tasks.finetune.texts import features_of_texts
from bert_cli.tasks.model import models
from bert_cli.tasks.run import finetune
from bert_cli.tasks.run.task import Logits, Result, Task
from bert_cli.tasks.run.teacher import with_vectors

BM25_PAIRS = 4_000_000  # of a query and a document: each takes up to two microseconds
FEWEST = 100  # queries of many that stand for all


def run(settings: EmbedSettings) -> None:
    """Train vectors of texts and score them; raises the errors of `finetune.run`."""
    if settings.generated_dataset:
        raise ConfigError("generated_dataset", "is not for `bert embed`", "leave it out")
    is_scored = settings.validation_file or settings.retrieval_file
    if settings.do_validation and not is_scored and len(settings.columns) == 1:
        remedy = "pass --validation-file or --retrieval-file, or --no-do-validation"
        raise ConfigError("do_validation", "has nothing to score on without pairs", remedy)
    needs_texts = settings.do_training or not is_scored
    finetune.run(settings, finetune.steps_of(build, ("train_file",) if needs_texts else ()))


def build(settings: EmbedSettings, tokenizer: TextTokenizer, source: models.Source | None) -> Task:
    """Return the task: the training texts, and the validation texts with their judgements."""
    file = settings.train_file
    is_scored = settings.do_validation
    hidden_size = settings.bert_config.hidden_size
    if (longest := max(settings.prefixes, default=0)) > hidden_size:
        problem = f"is more than the {hidden_size} values of the model's vectors"
        raise ConfigError(f"matryoshka ({longest})", problem, f"leave {longest} out")
    rows = embeddings.read_texts(file, settings.columns) if file else []
    texts: dict[str, Sequence[str]] = {}
    scored: dict[str, Sequence[Sequence[str]]] = {}
    judged = retrieval = None
    if is_scored and settings.validation_file is not None:
        pairs, judged = embeddings.read_similarities(settings.validation_file)
        texts["first"], texts["second"] = zip(*pairs, strict=True)
        scored["validation_file"] = pairs
    if is_scored and settings.retrieval_file is not None:
        retrieval = embeddings.read_retrieval(settings.retrieval_file)
        scored["retrieval_file"] = [[query] for query in retrieval.queries]
    is_split = is_scored and judged is None and retrieval is None
    if is_split:
        rows, scored["held-out rows"] = _hold_out(rows, settings)
        retrieval = embeddings.retrieval_of_pairs(scored["held-out rows"])
    if retrieval is not None:
        texts |= {"queries": retrieval.queries, "documents": retrieval.documents}
    if settings.do_training:
        warn_of_shared("train", rows, scored)
        times = settings.texts_per_example // len(settings.columns)  # twice for SimCSE
        texts["train"] = [text for row in rows for text in row * times]
    sets = {
        name: features_of_texts(
            TextExamples(list(column), None, None, [], None), name, settings, tokenizer, "texts"
        )
        for name, column in texts.items()
    }

    sizes = (hidden_size, *settings.prefixes)

    def evaluate(logits: Logits) -> Result:
        samples: dict[str, Sample] = {}
        for size in sizes:
            vectors = {name: complete[:, :size] for name, complete in logits.items()}
            of_size: dict[str, Sample] = {}
            if judged is not None:
                cosines = embeddings.cosines(vectors["first"], vectors["second"])
                of_size |= samples_of(["spearman"], judged, cosines, identify(pairs))
            if retrieval is not None:
                rankings = embeddings.ranked(vectors["queries"], vectors["documents"])
                of_size |= embeddings.retrieval_samples(rankings, retrieval)
            suffix = "" if size == hidden_size else f"_dim{size}"
            samples |= {f"{name}{suffix}": sample for name, sample in of_size.items()}
        return Result(samples)

    size = settings.global_batch.examples
    is_one = size == settings.global_batch.micro_batch_size <= ROWS
    # The vector of [CLS] needs a text at the start of each row.
    is_packed = settings.pooling == "mean"
    contrast = Contrast(size, settings.texts_per_example, settings.temperature, sizes)
    has_teacher = settings.distillation.teacher is not None
    return Task(
        labels=hidden_size,
        label_names=None,
        train=sets.pop("train", None),
        development=sets,
        evaluate=evaluate,
        best="ndcg_10" if judged is None else "spearman",
        prepare=partial(add_candidates if is_packed and is_one else add_gradients, contrast),
        reader=PackReader if is_packed else TextReader,
        digits=4,
        held_out="" if retrieval is None else retrieval.examples.digest,
        baselines=partial(_baselines, retrieval),
        teach=partial(with_vectors, settings, texts=texts["train"]) if has_teacher else None,
        halves=is_split,
    )


def _hold_out(
    rows: list[list[str]], settings: EmbedSettings
) -> tuple[list[list[str]], list[list[str]]]:
    """Return the rows of the training and of the scores, and say how many repeat an earlier one."""
    if repeated := repeats(rows):
        print_line(f"train_file: {repeated:,} {REPEATED}")
    strata = np.zeros(len(rows), int)
    held = held_out_rows(rows, strata, settings.held_out_fraction, settings.seed)
    return [rows[n] for n in np.flatnonzero(~held)], [rows[n] for n in np.flatnonzero(held)]


def _baselines(retrieval: embeddings.Retrieval | None) -> dict[str, Result]:
    """Return the result of BM25, of so many queries as it ranks in a few seconds; nothing for similarities."""
    if retrieval is None:
        return {}
    queries = retrieval.queries
    every = -(-len(queries) * len(retrieval.documents) // BM25_PAIRS)
    if every > 1 and len(queries) < FEWEST * every:
        print_line("baseline, BM25: left out, it takes too long")
        return {}
    try:
        best = bm25(queries[::every], retrieval.documents)
    except sqlite3.OperationalError as error:  # this SQLite has no FTS5
        print_line(f"baseline, BM25: left out ({error})")
        return {}
    rankings = [None if n % every else best[n // every] for n in range(len(queries))]
    name = "BM25" if every == 1 else f"BM25 of {len(best):,} queries"
    return {name: Result(embeddings.retrieval_samples(rankings, retrieval))}
