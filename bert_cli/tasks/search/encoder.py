"""The vector of a question by BERT in NumPy, in milliseconds: loading TensorFlow would take seconds.

The model of training is the judge: both agree up to rounding.

Shapes: S positions, D hidden size, F intermediate size, N heads, H head size.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import erf

from bert_cli.data.search.index import Floats
from bert_cli.facts.bert import BertConfig
from bert_cli.tasks.run import models


class Encoder:
    """The encoder of a model. Raises CheckpointError for weights or a tokenizer that cannot be read."""

    def __init__(self, source: models.Source) -> None:
        self.config = source.config
        self.tokenizer = models.read_tokenizer_for(source.config, source.tokenizer)
        tensors = source.tensors().items()
        self.weights = {n.removeprefix("bert."): np.asarray(v, np.float32) for n, v in tensors}

    @property
    def can_run(self) -> bool:
        """Return whether the model is a BERT with the usual names of weights, and no other architecture."""
        return type(self.config) is BertConfig and "embeddings.LayerNorm.weight" in self.weights

    def vector(self, ids: Sequence[int] | npt.NDArray[np.int32], is_first: bool) -> Floats:
        """Return the vector [D] of a text from its token ids [S]: the first output, or the mean of all."""
        tables = {"word": ids, "position": range(len(ids)), "token_type": [0] * len(ids)}
        rows = [
            self.weights[f"embeddings.{n}_embeddings.weight"][[*of]] for n, of in tables.items()
        ]
        hidden_SD = self._norm(np.sum(rows, 0), "embeddings")
        for number in range(self.config.num_hidden_layers):
            layer = f"encoder.layer.{number}"
            part = f"{layer}.attention.output"
            mixed_SD = self._product(self._attention(hidden_SD, layer), f"{part}.dense")
            hidden_SD = self._norm(hidden_SD + mixed_SD, part)
            inner_SF = self._product(hidden_SD, f"{layer}.intermediate.dense")
            active_SF = inner_SF * (1 + erf(inner_SF / np.float32(2**0.5))) / 2
            output_SD = self._product(active_SF, f"{layer}.output.dense")
            hidden_SD = self._norm(hidden_SD + output_SD, f"{layer}.output")
        return hidden_SD[0] if is_first else hidden_SD.mean(0)

    def _attention(self, hidden_SD: Floats, layer: str) -> Floats:
        names = (f"{layer}.attention.self.{name}" for name in ("query", "key", "value"))
        products = np.stack([self._product(hidden_SD, name) for name in names])
        shape = 3, len(hidden_SD), self.config.num_attention_heads, -1
        query_NSH, key_NSH, value_NSH = products.reshape(shape).swapaxes(1, 2)
        scale = np.float32(query_NSH.shape[-1] ** -0.5)
        logits_NSS = scale * query_NSH @ key_NSH.swapaxes(1, 2)
        odds_NSS = np.exp(logits_NSS - logits_NSS.max(-1, keepdims=True))
        mixed_NSH = odds_NSS / odds_NSS.sum(-1, keepdims=True) @ value_NSH
        return mixed_NSH.swapaxes(0, 1).reshape(hidden_SD.shape)

    def _product(self, inputs: Floats, name: str) -> Floats:
        return inputs @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def _norm(self, inputs: Floats, name: str) -> Floats:
        centred = inputs - inputs.mean(-1, keepdims=True)
        variance = np.square(centred).mean(-1, keepdims=True)
        scale, shift = (self.weights[f"{name}.LayerNorm.{part}"] for part in ("weight", "bias"))
        return centred / np.sqrt(variance + np.float32(self.config.layer_norm_eps)) * scale + shift
