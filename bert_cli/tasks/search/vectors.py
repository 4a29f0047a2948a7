"""The model of the vectors of an index, and the vectors of texts by a model from disk.

NumPy computes the vectors of a few texts, and of many where no engine is installed; else a graph of ONNX beside the
model, or the engine of training.
"""

import glob
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from bert_cli.data.finetune.embeddings import read_embedding, read_prompts
from bert_cli.data.search.index import Index
from bert_cli.data.search.late import Vectors
from bert_cli.data.tokens.tokenizer import FILES
from bert_cli.errors import CheckpointError
from bert_cli.files import file_crc32c, json_crc32c
from bert_cli.tasks.model import models, runtimes
from bert_cli.tasks.model.opened import Input, one_device
from bert_cli.tasks.model.vectors import TokenEmbedding, open_vectors


class Model:
    """A model of vectors, found at once and read when it is needed. Raises CheckpointError or ConfigError."""

    def __init__(self, name: str) -> None:
        self.name = name
        if Path(name).exists():
            self.name = str(Path(name).resolve())
        self._source = models.find_source(self.name, "--model")
        self._before_question, self._before_text = read_prompts(self._source.folder)
        self.weights = self._checksum()
        """The checksum of everything that decides the vectors, by which an unchanged model is known."""

    def _checksum(self) -> str:
        source = self._source
        stem = source.weights.name.partition(".")[0]
        paths: set[Path] = set()
        for name in (f"{glob.escape(stem)}*", *FILES):
            paths.update(filter(Path.is_file, source.folder.glob(name)))
        sums = {path.name: file_crc32c(path) for path in sorted(paths)}
        defaults = read_embedding(source.folder)
        positions = source.config.max_position_embeddings
        length = min(positions, defaults.get("max_seq_length", positions))
        prompts = read_prompts(source.folder)
        return json_crc32c(
            [sums, defaults.get("pooling", "mean"), length, prompts, repr(source.config)]
        )

    @cached_property
    def _for_few(self) -> TokenEmbedding:
        model = runtimes.open_without_engine(self._source, "embed", runtimes.FEW)
        if model is None:
            return self._predictor
        return self._vectors(model)

    @cached_property
    def _predictor(self) -> TokenEmbedding:
        return self._vectors(runtimes.open_without_engine(self._source, "embed", runtimes.FEW + 1))

    def _vectors(self, model: runtimes.EnginelessModel | None) -> TokenEmbedding:
        is_cpu = model is None and one_device() == "CPU"
        vectors = open_vectors(self._source, normalize=True, uses_library=is_cpu, model=model)
        if self._checksum() != self.weights:
            problem = "has changed since it was opened"
            raise CheckpointError(f"model ({self.name})", problem, "start the command again")
        return TokenEmbedding(
            vectors.model, vectors.tokenizer, vectors.settings, vectors.max_seq_length
        )

    def __call__(self, texts: Sequence[str], done: int = 0, total: int = 0) -> Vectors:
        """Return the vectors of passages; they are some of the total, after those that are done."""
        return self._of([self._before_text + text for text in texts], done, total)

    def of_questions(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors of questions."""
        return self._of([self._before_question + text for text in texts])

    def _of(self, texts: Sequence[str], done: int = 0, total: int = 0) -> Vectors:
        if max(len(texts), total) <= runtimes.FEW:
            predictor = self._for_few
        else:
            predictor = self._predictor
        predictor.progress.move(done, len(texts), total)
        return Vectors(*predictor.vectors([Input("text", {"text": text}) for text in texts]))


def model_of(opened: Index) -> Model | None:
    """Return the model of an index, None without one. Raises CheckpointError, which names it, if it is gone."""
    name = opened.fact("model")
    try:
        if not name:
            return None
        return Model(name)
    except CheckpointError as error:
        where = f"{opened.path} (vectors of the model {name})"
        remedy = (
            "run `bert search make` with --model NEW, which keeps the vectors if only the model's folder was moved, "
            "or use `bert search ask` with --words"
        )
        raise CheckpointError(where, error.problem, remedy) from None
