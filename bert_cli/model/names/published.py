"""Model types whose arithmetic is BERT's: a record for each, with the names that differ from BERT's.

RoBERTa, XLM-RoBERTa and DistilBERT are read as a BERT, and what is written of them is a BERT, which every program
opens. Only encoders and heads that have the same layers are read; `hf` refuses the tensors of others.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bert_cli.arrays import Array, Tensors
from bert_cli.files import JSONObject

POSITIONS = "embeddings.position_embeddings.weight"
SEGMENTS = "embeddings.token_type_embeddings.weight"
OTHER_HEADS = ("pre_classifier.", "classifier.dense.")
WORDS = "embeddings.word_embeddings.weight"


class Published(NamedTuple):
    """A type of models that is read as a BERT."""

    classes: str
    """The beginning of the names of transformers' classes."""
    names: Mapping[str, str]
    """Parts of the names of tensors -> BERT's."""
    entries: Mapping[str, str] = {}
    """Entries of config.json -> BERT's."""
    skips_padding: bool = False
    """Whether the first position has the number after the padding's id, so that no text reads the rows before it."""
    has_segments: bool = True
    """Whether there is a table of segments; without, the vector of each segment is 0."""


_ROWS = json.loads(Path(__file__).with_suffix(".json").read_bytes())
# model_type of transformers -> its record.
TYPES = {name: Published(**row) for name, row in _ROWS.items()}


def bert_config(described: JSONObject) -> JSONObject:
    """Return the config.json of the BERT that a model is; of an architecture of this tool, the same one."""
    record = TYPES.get(str(described.get("model_type")))
    if record is None:
        return described
    config = {record.entries.get(name, name): value for name, value in described.items()}
    config["model_type"] = "bert"
    classes = described.get("architectures") or []
    config["architectures"] = [name.replace(record.classes, "Bert") for name in classes]
    if not record.has_segments:
        config["type_vocab_size"] = 2
    if record.skips_padding:
        rows = described.get("max_position_embeddings", 0)
        config["max_position_embeddings"] = rows - _unread_rows(described)
    return config


def bert_tensors(tensors: Tensors, described: JSONObject) -> Tensors:
    """Return the tensors of a model under BERT's names; `described` is the config.json that its owner wrote."""
    record = TYPES.get(str(described.get("model_type")))
    if record is None:
        return tensors
    renamed: dict[str, Array] = {}
    # Their heads for classes have a layer more than BERT's: a run starts with a new one.
    has_other_head = any(name.startswith(OTHER_HEADS) for name in tensors)
    for name, value in tensors.items():
        if has_other_head and name.startswith((*OTHER_HEADS, "classifier.")):
            continue
        for theirs, ours in record.names.items():
            name = name.replace(theirs, ours)
        if record.skips_padding and name.endswith(POSITIONS):
            value = value[_unread_rows(described) :]
        if not record.has_segments and name.endswith(WORDS):
            segments = np.zeros((2, value.shape[1]), value.dtype)
            renamed[name.removesuffix(WORDS) + SEGMENTS] = segments
        renamed[name] = value
    return renamed


def _unread_rows(described: JSONObject) -> int:
    """Return the number of rows of the table of positions that no token reads."""
    padding = described.get("pad_token_id")
    if type(padding) is not int:
        padding = 1
    return 1 + padding
