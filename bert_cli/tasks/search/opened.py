"""An index with the model of its vectors, and vectors of texts by a model from disk.

Importing this loads no TensorFlow. NumPy computes the vectors of a few texts, the engine of training those of many.
"""

import glob
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bert_cli.config.use import PredictSettings
from bert_cli.data.finetune.embeddings import read_embedding, unit_vectors
from bert_cli.data.finetune.features import encode_texts
from bert_cli.data.search import index
from bert_cli.data.search.index import Floats, Half, Index
from bert_cli.errors import ConfigError
from bert_cli.files import file_crc32c, json_crc32c
from bert_cli.processes import print_error, quiet_imports
from bert_cli.tasks.run import models
from bert_cli.tasks.search.encoder import Encoder

if TYPE_CHECKING:  # loads TensorFlow
    from bert_cli.tasks.run.vectors import Embedding

FEW = 4  # texts


class Model:
    """A model of vectors, found at once and read when it is needed. Raises CheckpointError or ConfigError."""

    def __init__(self, name: str) -> None:
        self.name = str(Path(name).absolute()) if Path(name).exists() else name
        self._source = models.find_source(self.name, "--model")

    @cached_property
    def weights(self) -> str:
        """Return the checksum of all files of weights and of the settings, by which an unchanged model is known."""
        stem = self._source.weights.name.partition(".")[0]
        files = filter(Path.is_file, self._source.folder.glob(f"{glob.escape(stem)}*"))
        sums = {path.name: file_crc32c(path) for path in sorted(files)}
        return json_crc32c([sums, self._settings.pooling, self._settings.max_seq_length])

    @cached_property
    def _settings(self) -> PredictSettings:
        """Return the settings with which `bert predict` would compute the vectors."""
        defaults = read_embedding(self._source.folder)
        positions = self._source.config.max_position_embeddings
        return PredictSettings(
            model=self.name,
            task="embed",
            normalize=True,
            pooling=defaults.get("pooling", "mean"),
            max_seq_length=min(positions, defaults.get("max_seq_length", positions)),
        )

    @cached_property
    def _encoder(self) -> Encoder:
        return Encoder(self._source)

    @cached_property
    def _predictor(self) -> "Embedding":
        with quiet_imports():
            from bert_cli.tasks.run.opened import one_device
            from bert_cli.tasks.run.vectors import open_vectors
        is_cpu = one_device() == "CPU"
        return open_vectors(self._source, normalize=True, uses_library=is_cpu)

    def __call__(self, texts: Sequence[str], done: int = 0, total: int = 0) -> Floats:
        """Return the vectors [n, D] of texts, of length 1; they are n of the total, after those that are done."""
        if len(texts) > FEW or not self._encoder.can_run:
            predictor = self._predictor
            from bert_cli.tasks.run.opened import Input

            predictor.place.move(done, len(texts), total)
            return predictor.of_texts([Input("text", {"text": text}) for text in texts])[0]
        length = self._settings.max_seq_length or 0
        tokenizer = self._encoder.tokenizer
        encoded, _ = encode_texts(tokenizer, texts, None, {}, max_seq_length=length)
        tokens = np.split(encoded.tokens, encoded.ends[:-1])
        is_first = self._settings.pooling == "cls"
        return unit_vectors(np.stack([self._encoder.vector(ids, is_first) for ids in tokens]))


def open_index(path: str | Path, half: Half | None = None) -> Index:
    """Return an index with the model of its vectors, unless the half is words; `ask` of it ranks passages.

    Without vectors it ranks by words alone; a warning says so where only some are missing. Raises DataError for a file
    that is no index, ConfigError for vectors of another model, CheckpointError without the model.
    """
    opened = index.open_index(Path(path))
    name = opened.fact("model")
    if name is None or half == "words":
        return opened
    if not opened.has_vectors:
        problem = "lacks some vectors, and ranks by words alone"
        print_error(f"warning: {path} {problem}; run `bert search make` to its end")
        return opened
    opened.embed = model = Model(name)
    opened.weights = model.weights
    if opened.fact("weights") != opened.weights:
        problem = f"has vectors of {name} before it was changed"
        raise ConfigError(str(path), problem, "run `bert search make` again, or ask with --words")
    return opened
