"""Convert our weights to Hugging Face's names and back, with one table of names.

PyTorch also stores kernels as [outputs, inputs]. Dtypes are not converted, so a round trip is exact. A tensor without a
counterpart on either side is an error, except for buffers of position numbers, copies of tied weights, and heads that a
published encoder does not have.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from bert_cli.config.architectures import SHAPES
from bert_cli.config.heads import LAST_BLOCKS, PRETRAINING, Head, heads
from bert_cli.config.shape import BertConfig
from bert_cli.errors import CheckpointError
from bert_cli.files import JSONObject

Array = npt.NDArray[Any]

# Our layer -> Hugging Face's layer; {} is the number of an encoder layer. GroupBERT has the same names in both. The
# records of the blocks after the encoder layers have their names.
LAYERS = {
    "emb/word": "bert.embeddings.word_embeddings",
    "emb/position": "bert.embeddings.position_embeddings",
    "emb/segment": "bert.embeddings.token_type_embeddings",
    "emb/layer_norm": "bert.embeddings.LayerNorm",
    "hid_{}/attention/query": "bert.encoder.layer.{}.attention.self.query",
    "hid_{}/attention/key": "bert.encoder.layer.{}.attention.self.key",
    "hid_{}/attention/value": "bert.encoder.layer.{}.attention.self.value",
    "hid_{}/attention/output/dense": "bert.encoder.layer.{}.attention.output.dense",
    "hid_{}/attention/output/layer_norm": "bert.encoder.layer.{}.attention.output.LayerNorm",
    "hid_{}/feed_forward/inner": "bert.encoder.layer.{}.intermediate.dense",
    "hid_{}/feed_forward/output/dense": "bert.encoder.layer.{}.output.dense",
    "hid_{}/feed_forward/output/layer_norm": "bert.encoder.layer.{}.output.LayerNorm",
    "hid_{}/final_norm": "bert.encoder.final_norm",
}

# Last part of our name, or of an old Hugging Face name -> of Hugging Face's name. Only kernels are transposed.
LEAVES = {
    "kernel": "weight",
    "bias": "bias",
    "embeddings": "weight",
    "gamma": "weight",
    "beta": "bias",
}

# Copies of tied weights in some files -> the weight.
TIED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}

# Architecture, which is also transformers' model_type -> prefix of its class names before "Bert".
PREFIXES = {"bert": "", "groupbert": "Group"}
# Classes for PyTorch that transformers does not have; written beside the weights and never imported here.
MODELING = Path(__file__).with_name("modeling_groupbert.py")


def hf_name(name: str) -> str:
    """Return Hugging Face's name of our weight."""
    layer, _, leaf = name.rpartition("/")
    number = re.match(r"hid_(\d+)/", layer)
    row = re.sub(r"^hid_\d+/", "hid_{}/", layer)
    same = row.replace("hid_{}/", "bert.encoder.layer.{}.").replace("/", ".")
    block = LAST_BLOCKS.get(layer.partition("/")[0])
    theirs = (block.hf_names if block else LAYERS).get(row, same)
    return f"{theirs.format(number[1] if number else '')}.{LEAVES[leaf]}"


def to_hf(weights: Mapping[str, Array]) -> dict[str, Array]:
    """Return our weights under Hugging Face's names and in its layout, in the same dtype."""
    return {hf_name(name): _transposed(name, value) for name, value in weights.items()}


def from_hf(
    tensors: Mapping[str, Array], shapes: Mapping[str, tuple[int, ...]], *, where: str = "weights"
) -> tuple[dict[str, Array], list[str]]:
    """Return the `shapes` weights (our name -> shape), and the optional parts that the file lacks completely.

    Raises CheckpointError that names all tensors without a weight, missing weights, shapes that differ, and tied
    copies that differ.
    """
    theirs = _current_names(tensors, where)
    names = {name: hf_name(name) for name in shapes}
    missing_parts = []
    for part in _parts():
        within = [name for name in names if name.startswith(part)]
        if within and not any(names[name] in theirs for name in within):
            missing_parts.append(part)
            names = {name: their_name for name, their_name in names.items() if name not in within}
    missing = [their_name for their_name in names.values() if their_name not in theirs]
    values = {
        name: _transposed(name, theirs.pop(their_name))
        for name, their_name in names.items()
        if their_name in theirs
    }
    problems = {
        "have another shape": [
            f"{names[name]} ({value.shape} there, {tuple(shapes[name])} here as {name})"
            for name, value in values.items()
            if value.shape != tuple(shapes[name])
        ],
        "are missing": missing,
        "fit no weight of the model": list(theirs),
    }
    listed = [f"{len(n)} tensors {what}: {_listed(n)}" for what, n in problems.items() if n]
    if listed:
        remedy = "use the bert_config these weights were made with"
        raise CheckpointError(where, "; ".join(listed), remedy)
    return values, missing_parts


def fitting(
    tensors: Mapping[str, Array], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Array], list[str]]:
    """Return the tensors without heads that this model lacks or has for other labels, and the names of these heads."""
    theirs = {
        hf_name(name): shape[::-1] if name.endswith("/kernel") else shape
        for name, shape in shapes.items()
    }
    left_out: list[str] = []
    for part in dict.fromkeys(_parts().values()):
        bare = part.removeprefix("bert.")  # as in the file of an encoder alone
        for start in dict.fromkeys((part, bare)):
            within = [name for name in tensors if name.startswith(f"{start}.") and name not in TIED]
            full = {name: part + name.removeprefix(start) for name in within}
            if any(theirs.get(full[name]) != tensors[name].shape for name in within):
                left_out.append(start)
    prefixes = tuple(f"{part}." for part in left_out)
    return {n: value for n, value in tensors.items() if not n.startswith(prefixes)}, left_out


def hf_config(
    config: BertConfig,
    *,
    dtype: str = "float32",
    head: Head = PRETRAINING,
    label_names: Sequence[str] | None = None,
) -> JSONObject:
    """Return the contents of `config.json`; `head` is the last block, a classifier without names a regression."""
    described = {
        **class_entries(config, class_name(config, head)),
        **config.model_dump(mode="json", exclude={"architecture"}),
        "pad_token_id": 0,
        "tie_word_embeddings": True,
        "dtype": dtype,
    }
    if head.has_label_names:
        names = label_names or ["score"]
        described["id2label"] = {str(number): name for number, name in enumerate(names)}
        described["label2id"] = {name: number for number, name in enumerate(names)}
        if label_names is None:
            described["problem_type"] = "regression"
    return described


def class_name(config: BertConfig, head: Head) -> str:
    """Return the name of transformers' class for a model with this head."""
    return PREFIXES[config.architecture] + head.hf_classes[0]


def class_entries(config: BertConfig, name: str) -> JSONObject:
    """Return the entries of a `config.json` that select the class `name`; GroupBERT's are in the file MODELING."""
    entries: JSONObject = {"architectures": [name], "model_type": config.architecture}
    if config.architecture == "groupbert":
        kinds = ["Config", "Model", "ModelForMaskedLM"]
        classes = [head.hf_classes[0] for head in heads()]
        kinds += [name.replace("Bert", "Model") for name in classes if "For" in name]
        start = f"{MODELING.stem}.GroupBert"
        entries["auto_map"] = {f"Auto{k}": start + k.replace("ModelFor", "For") for k in kinds}
        # transformers chooses BERT's by its model_type.
        entries["tokenizer_class"] = "BertTokenizer"
    return entries


def class_files(config: BertConfig) -> dict[str, bytes]:
    """Return the files with the classes that `class_entries` names, by name; none for BERT."""
    return {MODELING.name: MODELING.read_bytes()} if config.architecture == "groupbert" else {}


def config_of(described: Mapping[str, Any], *, where: str = "config.json") -> BertConfig:
    """Return the shape of the model that a `config.json` describes; Hugging Face's defaults are also ours.

    Raises CheckpointError for a model that cannot be built: no BERT, another activation, relative positions.
    """
    kind = described.get("model_type", "bert")
    if kind not in PREFIXES:
        raise CheckpointError(f"{where} (model_type {kind})", "is no BERT", "give a BERT model")
    shape = SHAPES[kind]
    fields = {name: described[name] for name in shape.model_fields if name in described}
    try:
        return shape.model_validate(fields | {"architecture": kind})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        where = f"{where} ({name} {first['input']!r})" if name else where
        message = first["msg"].removeprefix("Value error, ")
        raise CheckpointError(where, f"this model cannot be run: {message}") from error


def check_hf_config(
    described: Mapping[str, Any], config: BertConfig, *, where: str = "config.json"
) -> None:
    """Raise CheckpointError for weights of another model, also if their shapes are equal.

    Dropout rates and `initializer_range` may differ: they change how a model is trained, not its output.
    """
    free = {"hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range"}
    architecture = described.get("model_type", "bert")
    there = {**dict(type(config)()), **described, "architecture": architecture}
    differing = [
        f"{key} is {there[key]!r} there and {ours!r} here"
        for key, ours in config
        if key not in free and there[key] != ours
    ]
    if differing:
        problem = f"describes another model: {'; '.join(differing)}"
        raise CheckpointError(where, problem, "make bert_config equal to it")


def _current_names(tensors: Mapping[str, Array], where: str) -> dict[str, Array]:
    """Return the tensors under their full current names, without buffers and copies of tied weights."""
    renamed: dict[str, Array] = {}
    for name, value in tensors.items():
        if name.endswith("embeddings.position_ids"):
            continue
        stem, _, leaf = name.rpartition(".")
        current = f"{stem}.{LEAVES.get(leaf, leaf)}"
        if current.startswith(("embeddings.", "encoder.", "pooler.")):
            current = f"bert.{current}"
        if current in renamed:
            problem = f"there is a second tensor for {current}"
            raise CheckpointError(f"{name} ({where})", problem, "remove one of the two")
        renamed[current] = value
    for copy, original in TIED.items():
        if copy not in renamed:
            continue
        value = renamed.pop(copy)
        if not np.array_equal(renamed.setdefault(original, value), value):
            problem = f"differs from {original}, which is the same weight in this model"
            raise CheckpointError(f"{copy} ({where})", problem, "give a model with tied weights")
    return renamed


def _parts() -> dict[str, str]:
    """Return the parts that a file may lack (they keep their initial values): our name -> Hugging Face's."""
    return {ours: part for block in LAST_BLOCKS.values() for ours, part in block.parts.items()}


def _transposed(name: str, value: Array) -> Array:
    return np.ascontiguousarray(value.T) if name.endswith("/kernel") else value


def _listed(names: list[str], shown: int = 8) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(sorted(names)[:shown]) + more
