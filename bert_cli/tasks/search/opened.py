"""An index with the model of its vectors, and vectors of texts by a model from disk.

Importing this loads no TensorFlow. NumPy computes the vectors of a few texts, the engine of training those of many.
"""

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
from bert_cli.files import JSONObject, file_crc32c
from bert_cli.processes import print_error, quiet_imports
from bert_cli.tasks.run import models
from bert_cli.tasks.search.encoder import Encoder

if TYPE_CHECKING:  # loads TensorFlow
    from bert_cli.tasks.run.vectors import Embedding

FEW = 4  # texts


class Model:
    """A model of vectors; it is opened at its first text. Raises CheckpointError or ConfigError where it cannot be."""

    def __init__(self, name: str) -> None:
        self.name = str(Path(name).absolute()) if Path(name).exists() else name

    @cached_property
    def _source(self) -> models.Source:
        return models.find_source(self.name, "--model")

    @cached_property
    def weights(self) -> str:
        """Return the checksum of the weights, by which the model is known to be unchanged."""
        start = self._source.weights.name
        files = [path for path in self._source.folder.iterdir() if path.name.startswith(start)]
        return file_crc32c(min(files))

    @cached_property
    def _defaults(self) -> JSONObject:
        """Return the pooling of the model and the maximum length of a text in tokens."""
        found = read_embedding(self._source.folder)
        positions = self._source.config.max_position_embeddings
        length = min(positions, found.get("max_seq_length", positions))
        return {"pooling": found.get("pooling", "mean"), "max_seq_length": length}

    @cached_property
    def _encoder(self) -> Encoder:
        return Encoder(self._source)

    @cached_property
    def _predictor(self) -> "Embedding":
        with quiet_imports():
            from bert_cli.tasks.run import opened
            from bert_cli.tasks.run.vectors import Embedding
        source = self._source
        settings = PredictSettings(model=self.name, task="embed", normalize=True, **self._defaults)
        Embedding.read_defaults(source, settings)  # warns of a model that fills masks
        is_cpu = opened.one_device() == "CPU"
        model = opened.open_model(source, opened.task_of(source, "embed"), uses_library=is_cpu)
        tokenizer = self._encoder.tokenizer
        return Embedding(model, tokenizer, settings, self._defaults["max_seq_length"])

    def __call__(self, texts: Sequence[str]) -> Floats:
        """Return the vectors [n, D] of texts, of length 1."""
        if len(texts) > FEW or not self._encoder.can_run:
            predictor = self._predictor
            from bert_cli.tasks.run.opened import Input

            inputs = [Input("text", {"text": text}) for text in texts]
            return predictor.of_texts(inputs)[0]
        length = self._defaults["max_seq_length"]
        tokenizer = self._encoder.tokenizer
        encoded, _ = encode_texts(tokenizer, texts, None, {}, max_seq_length=length)
        tokens = np.split(encoded.tokens, encoded.ends[:-1])
        pooling = self._defaults["pooling"]
        vectors = [self._encoder.vector(ids.tolist(), pooling) for ids in tokens]
        return unit_vectors(np.stack(vectors))


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
    if opened.fact("weights") != model.weights:
        problem = f"has vectors of {name} before it was changed"
        raise ConfigError(str(path), problem, "run `bert search make` again, or ask with --words")
    return opened
