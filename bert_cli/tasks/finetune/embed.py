"""`bert embed`: vectors of texts, trained on pairs of similar texts, on texts alone or by a teacher, and scored."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import numpy as np

from bert_cli.arrays import Floats32
from bert_cli.config.embed import EmbedSettings
from bert_cli.data.finetune import embeddings
from bert_cli.data.finetune.readers import PackReader, TextReader
from bert_cli.data.finetune.simple import bm25
from bert_cli.data.finetune.split import held_out_rows, warn_of_shared
from bert_cli.data.finetune.tables import REPEATED, TextExamples, repeats, samples_of
from bert_cli.data.tokens.tokenizer import TextTokenizer
from bert_cli.errors import ConfigError, logger
from bert_cli.processes import print_line
from bert_cli.statistics import Sample, identify
from bert_cli.tasks.finetune.contrast import ROWS, Contrast, add_candidates, add_gradients
from bert_cli.tasks.finetune.texts import features_of_texts
from bert_cli.tasks.model import models
from bert_cli.tasks.run import finetune
from bert_cli.tasks.run.finetune_steps import steps_of
from bert_cli.tasks.run.task import Logits, Result, Task
from bert_cli.tasks.run.teacher import find_vectors
from bert_cli.text import remark_of

BM25_PAIRS = 4_000_000  # of a query and a document: each takes up to two microseconds


def run(settings: EmbedSettings) -> None:
    """Train vectors of texts and score them; raises the errors of `finetune.run`."""
    finetune.run(settings, STEPS)


def required_settings(settings: EmbedSettings) -> Sequence[str]:
    """Return the settings that a run needs. Raises ConfigError where nothing can be scored."""
    if settings.generated_dataset:
        raise ConfigError("generated_dataset", "is not for `bert embed`", "leave it out")
    is_scored = settings.validation_file or settings.retrieval_file
    if settings.do_validation and not is_scored and len(settings.columns) == 1:
        remedy = "pass --validation-file or --retrieval-file, or --no-do-validation"
        raise ConfigError("do_validation", "has nothing to score on without pairs", remedy)
    needs_texts = settings.do_training or not is_scored
    return ("train_file",) if needs_texts else ()


@dataclass
class Data:
    """The texts of a run, and what the vectors of those that are scored are compared with."""

    texts: dict[str, Sequence[str]] = field(default_factory=dict)
    """The texts of each set; "train" is for training."""
    pairs: Sequence[Sequence[str]] = ()
    similarities: Floats32 | None = None
    """The score of each of the pairs."""
    retrieval: embeddings.Retrieval | None = None
    is_split: bool = False
    """Whether the scored texts are held out of the training file."""


def build(settings: EmbedSettings, tokenizer: TextTokenizer, source: models.Source | None) -> Task:
    """Return the task: the training texts, and the validation texts with their judgements."""
    hidden_size = settings.bert_config.hidden_size
    longest = max(settings.prefixes, default=0)
    if longest > hidden_size:
        problem = f"is more than the {hidden_size} values of the model's vectors"
        raise ConfigError(f"matryoshka ({longest})", problem, f"leave {longest} out")
    data = _read(settings)
    sets = {}
    for name, column in data.texts.items():
        examples = TextExamples(list(column), None, None, [], None)
        sets[name] = features_of_texts(examples, name, settings, tokenizer, "text")
    rows = settings.global_batch.examples
    sizes = (hidden_size, *settings.prefixes)
    contrast = Contrast(rows, settings.texts_per_example, settings.temperature, sizes)
    # The vector of [CLS] needs a text at the start of each row.
    is_packed = settings.pooling == "mean"
    # A step of one micro-batch has all vectors at once, and its scores must fit into memory.
    is_at_once = is_packed and rows == settings.global_batch.micro_batch_size <= ROWS
    reader = PackReader if is_packed else TextReader
    prepare = add_candidates if is_at_once else add_gradients
    best = "ndcg_10" if data.similarities is None else "spearman"
    task = Task(
        labels=hidden_size,
        label_names=None,
        train=sets.pop("train", None),
        development=sets,
        evaluate=partial(_evaluate, data, sizes),
        best=best,
        prepare=partial(prepare, contrast),
        reader=reader,
        digits=4,
        held_out=data.retrieval.examples.digest if data.retrieval else "",
        baselines=partial(_baselines, data.retrieval),
        halves=data.is_split,
    )
    if settings.distillation.teacher is None:
        return task
    return replace(task, teach=partial(find_vectors, settings, data.texts["train"]))


def _read(settings: EmbedSettings) -> Data:
    """Read the files of a run; without one that is scored, hold rows of the training file out."""
    file = settings.train_file
    rows = embeddings.read_texts(file, settings.columns) if file else []
    data = Data()
    scored: dict[str, Sequence[Sequence[str]]] = {}
    if settings.do_validation and settings.validation_file is not None:
        data.pairs, data.similarities = embeddings.read_similarities(settings.validation_file)
        data.texts["first"], data.texts["second"] = zip(*data.pairs, strict=True)
        scored["validation_file"] = data.pairs
    if settings.do_validation and settings.retrieval_file is not None:
        data.retrieval = embeddings.read_retrieval(settings.retrieval_file)
        scored["retrieval_file"] = [[query] for query in data.retrieval.queries]
    if settings.do_validation and not scored:
        data.is_split = True
        repeated = repeats(rows)
        if repeated:
            logger.info(f"train_file: {remark_of(repeated, REPEATED)}")
        strata = np.zeros(len(rows), int)
        held = held_out_rows(rows, strata, settings.held_out_fraction, settings.seed)
        held_out = [rows[number] for number in np.flatnonzero(held)]
        rows = [rows[number] for number in np.flatnonzero(~held)]
        scored["held-out rows"] = held_out
        data.retrieval = embeddings.retrieval_of_pairs(held_out)
    if data.retrieval is not None:
        data.texts["queries"] = data.retrieval.queries
        data.texts["documents"] = data.retrieval.documents
    if settings.do_training:
        warn_of_shared("train", rows, scored)
        times = settings.texts_per_example // len(settings.columns)  # twice for SimCSE
        data.texts["train"] = list(chain.from_iterable(row * times for row in rows))
    return data


def _evaluate(data: Data, sizes: Sequence[int], logits: Logits) -> Result:
    """Return the scores of the vectors and of their first values, by size; the first size is the complete one."""
    samples: dict[str, Sample] = {}
    for size in sizes:
        vectors = {name: complete[:, :size] for name, complete in logits.items()}
        of_size: dict[str, Sample] = {}
        if data.similarities is not None:
            cosines = embeddings.cosines(vectors["first"], vectors["second"])
            of_size |= samples_of(["spearman"], data.similarities, cosines, identify(data.pairs))
        if data.retrieval is not None:
            rankings = embeddings.ranked(vectors["queries"], vectors["documents"])
            of_size |= embeddings.retrieval_samples(rankings, data.retrieval)
        suffix = "" if size == sizes[0] else f"_dim{size}"
        samples |= {f"{name}{suffix}": sample for name, sample in of_size.items()}
    return Result(samples)


def _baselines(retrieval: embeddings.Retrieval | None) -> dict[str, Result]:
    """Return the result of BM25, if it ranks in a few seconds; nothing for similarities."""
    if retrieval is None:
        return {}
    if len(retrieval.queries) * len(retrieval.documents) > BM25_PAIRS:
        print_line("baseline, BM25: left out, it takes too long")
        return {}
    rankings = bm25(retrieval.queries, retrieval.documents)
    return {"BM25": Result(embeddings.retrieval_samples(rankings, retrieval))}


STEPS = steps_of(build, required_settings)
