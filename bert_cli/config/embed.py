"""The settings of `bert embed`: vectors of texts."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import PositiveFloat

from bert_cli.config.finetune import UNSCORED, FinetuneSettings, check_once
from bert_cli.facts import heads
from bert_cli.settings.markers import Fixed, PathOrName, Usual
from bert_cli.settings.numbers import Fraction, Positive
from bert_cli.settings.settings import SettingError, Settings
from bert_cli.text import count


class VectorDistillation(Settings):
    """A trained model whose vectors the run learns."""

    teacher: Usual[PathOrName | None] = None
    """A model of vectors, of any size and with any vocabulary: a run folder, a checkpoint, a sentence-transformers
    folder or name. Its vectors of the training texts are computed before the first step and cached by text."""


WITHOUT_TEACHER = "distillation", VectorDistillation()


class EmbedSettings(FinetuneSettings):
    """Train sentence embeddings, whose cosine is the similarity of two texts, and score them.

    With pairs of similar texts the loss is InfoNCE: each anchor must pick out its own positive from all positives and
    hard negatives of the batch. Gradient caching allows batches of a thousand pairs in the memory of a micro-batch.
    Example: bert embed --pretrained-ckpt-path runs/base --train-file pairs.tsv --save-ckpt-path runs/vectors
    --global-batch.grad-acc-steps-per-replica 32
    Example: bert embed --objective simcse --pretrained-ckpt-path runs/base --train-file sentences.txt
    --validation-file sts-dev.tsv --save-ckpt-path runs/vectors
    """

    COMMAND = "embed"
    HEAD = heads.SENTENCE_EMBEDDING
    NEEDS = {
        "held_out_fraction": [
            UNSCORED,
            "do_validation",
            ("validation_file", None),
            ("retrieval_file", None),
        ],
        "distillation": "do_training",
        **dict.fromkeys(("objective", "temperature", "matryoshka"), WITHOUT_TEACHER),
    }

    objective: Fixed[Literal["pairs", "simcse"]] = "pairs"
    """`pairs` of similar texts (van den Oord et al. 2018; Gao, Zhang et al. 2021 for large batches). For unlabelled
    text, `simcse` pairs each text with itself under another dropout mask (Gao, Yao and Chen 2021)."""
    distillation: VectorDistillation = VectorDistillation()
    """Learn the vectors of a larger model, instead of an objective."""
    train_file: Path | None = None
    """Training texts: .csv, .tsv, .jsonl or .parquet, also compressed (.gz, .bz2, .xz, .zst); without pairs also .txt
    with one text on each line."""
    text_column: list[str] | None = None
    """Columns of anchor, positive and hard negatives; by default `anchor` and `positive`, or `text` without pairs."""
    validation_file: Path | None = None
    """Pairs of texts with a similarity score, such as STS, for Spearman's rank correlation: the columns sentence1,
    sentence2 and score."""
    retrieval_file: Path | None = None
    """Judgements `qrels/X.tsv` (query-id, corpus-id, score) in a folder with queries.jsonl and corpus.jsonl, for
    nDCG@10, recall@10 and recall@100."""
    held_out_fraction: Fraction = 0.1
    """Fraction of the pairs held out for scoring if neither validation_file nor retrieval_file is set; the
    score measures how well each anchor finds its positive among all held-out positives. Pairs with a text in common are
    on one side."""
    pooling: Fixed[Literal["mean", "cls"]] = "mean"
    """How the vector of a text is computed: the `mean` over its tokens, or the output at [CLS]."""
    temperature: Fixed[PositiveFloat] = 0.05
    """Divisor of the cosines in the loss."""
    matryoshka: Fixed[list[Positive] | None] = None
    """Sizes to which the vectors can be shortened, such as 256,128,64: the loss is the sum of the loss of the complete
    vectors and the losses of their first values, and each size is scored (Kusupati et al. 2022)."""
    num_epochs: PositiveFloat = 1.0

    @property
    def head(self) -> heads.Head:
        """Return the head of this run, which pools by itself at [CLS]."""
        head = super().head
        if self.pooling == "mean":
            return head
        return replace(head, before=())

    @property
    def pools_by(self) -> str | None:
        """Return how the vector of a text is computed."""
        return self.pooling

    @property
    def columns(self) -> list[str]:
        """Return the columns of train_file that are read."""
        has_pairs = self.objective == "pairs" and self.distillation.teacher is None
        usual = ["anchor", "positive"] if has_pairs else ["text"]
        return self.text_column or usual

    @property
    def texts_per_example(self) -> int:
        """Return the number of texts in an example: the texts of a row, or a text twice."""
        if self.objective == "simcse":
            return 2
        return len(self.columns)

    @property
    def prefixes(self) -> list[int]:
        """Return the sizes of the shortened vectors, the largest first."""
        sizes = {*(self.matryoshka or [])} - {self.bert_config.hidden_size}
        return sorted(sizes, reverse=True)

    def _check(self) -> None:
        check_once("text_column", self.columns)
        if self.distillation.teacher is not None:
            return
        if (len(self.columns) > 1) != (self.objective == "pairs"):
            problem = f"names {count(len(self.columns), 'column')} for objective {self.objective!r}"
            least = "one"
            if self.objective == "pairs":
                least = "two or more"
            raise SettingError("text_column", problem, f"name {least}")
        if self.texts_per_example == 2 and self.global_batch.examples < 2:
            problem = "has one pair per step, so there is nothing to compare it with"
            remedy = "raise micro_batch_size or the accumulation"
            raise SettingError("global_batch", problem, remedy)
