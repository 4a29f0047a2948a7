"""TensorFlow 2 checkpoints of transformers' TFBert models and of the original, under Hugging Face's names.

Such a checkpoint has a graph of objects: a variable is identified by the attributes that lead to it.
Layers are recognised by their attributes, so one rule reads transformers' classes (`bert.encoder.layer`)
and the original's functional models (`layer_with_weights-3`).

The original can omit weights. Missing biases are zeros, which is the same model; query, key and value in
one kernel are split. A masked-LM head without its transform is another head and is left out.
Source: the attributes of transformers 4's modeling_tf_bert.py.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bert_cli.errors import CheckpointError

Array = npt.NDArray[Any]
GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
VARIABLE = "/.ATTRIBUTES/VARIABLE_VALUE"
# Variables that are no weights: the optimizer, metrics and counters.
TRAINING = re.compile(
    r"(optimizer|keras_api|.*/?\.OPTIMIZER_SLOT|save_counter|step|iterations)(/.*)?"
)

NUMBERED = re.compile(r"(?:layer_with_weights-)?(\d+)")

# Attributes from a layer to a Dense or LayerNorm of it -> its name in Hugging Face's layer.
EMBEDDINGS = {"LayerNorm": "LayerNorm"}
LAYER = {
    "attention/self_attention/query": "attention.self.query",
    "attention/self_attention/key": "attention.self.key",
    "attention/self_attention/value": "attention.self.value",
    "attention/dense_output/dense": "attention.output.dense",
    "attention/dense_output/LayerNorm": "attention.output.LayerNorm",
    "intermediate/dense": "intermediate.dense",
    "bert_output/dense": "output.dense",
    "bert_output/LayerNorm": "output.LayerNorm",
}
PREDICTIONS = {
    "predictions/transform/dense": "transform.dense",
    "predictions/transform/LayerNorm": "transform.LayerNorm",
}
LEAVES = {"kernel": "kernel", "bias": "bias", "gamma": "weight", "beta": "bias"}
# Attribute of the embeddings -> a table.
TABLES = {
    "weight": "word_embeddings.weight",
    "token_type_embeddings": "token_type_embeddings.weight",
    "position_embeddings": "position_embeddings.weight",
}
# Part of the name of a Dense layer's variables -> the layer.
DENSE = {"pooler": "bert.pooler.dense", "qa_outputs": "qa_outputs", "classifier": "classifier"}
# The original's query, key and value side by side.
QKV = "attention.self.qkv"
SELF = ("attention.self.query", "attention.self.key", "attention.self.value")
BIASED = tuple(f"{name}.weight" for name in (*SELF, "attention.output.dense"))


@dataclass(frozen=True)
class Node:
    """An object of a checkpoint."""

    children: Mapping[str, int]
    """Attribute -> index of the object."""
    key: str | None
    """Name of a variable in the file."""
    full_name: str
    """Name of a variable in TensorFlow."""


def is_object_based(names: Mapping[str, Any]) -> bool:
    """Return whether these are the names of a TensorFlow 2 checkpoint."""
    return any(name.endswith(VARIABLE) for name in names)


def to_hf_names(
    nodes: Sequence[Node], value_of: Callable[[str], Array], *, where: str
) -> dict[str, Array]:
    """Return the weights of a checkpoint as a Hugging Face model has them.

    `value_of` reads the variable of a key. Raises CheckpointError, naming them, for variables that no
    attributes of BERT lead to.
    """
    names = {key: name for key, name in _names(nodes) if key is not None}
    keys = {node.key for node in nodes if node.key is not None}
    unknown = sorted(key for key in keys - {*names} if not TRAINING.fullmatch(key))
    if unknown or not names:
        listed = ", ".join(key.removesuffix(VARIABLE) for key in unknown[:8])
        raise CheckpointError(
            where,
            "is a TensorFlow 2 checkpoint that "
            f"{f'has variables at other attributes than BERT: {listed}' if unknown else 'holds no BERT'}",
            "give one of transformers' TFBert models or of Graphcore's example, or save the model with "
            "transformers' save_pretrained",
        )
    tensors: dict[str, Array] = {}
    for key, name in names.items():
        # PyTorch stores kernels as [outputs, inputs].
        is_kernel = name.endswith(".kernel")
        value = np.ascontiguousarray(value_of(key).T) if is_kernel else value_of(key)
        tensors[f"{name.removesuffix('.kernel')}.weight" if is_kernel else name] = value
    for name in [name for name in tensors if name.endswith(f"{QKV}.weight")]:
        for part, value in zip(SELF, np.split(tensors.pop(name), 3), strict=True):
            tensors[name.replace(QKV, part)] = value
    for name in [name for name in tensors if name.endswith(BIASED)]:
        zeros = np.zeros(len(tensors[name]), tensors[name].dtype)
        tensors.setdefault(f"{name.removesuffix('weight')}bias", zeros)
    if "cls.predictions.transform.dense.weight" not in tensors:
        tensors.pop("cls.predictions.bias", None)
    elif "cls.predictions.bias" not in tensors:
        table = tensors["bert.embeddings.word_embeddings.weight"]
        tensors["cls.predictions.bias"] = np.zeros(len(table), table.dtype)
    return tensors


def _names(nodes: Sequence[Node]) -> Iterator[tuple[str | None, str]]:
    """Yield the key of each variable and its name in a Hugging Face model; a kernel ends in `.kernel`."""

    def layers(
        number: int, table: Mapping[str, str], prefix: str
    ) -> Iterator[tuple[str | None, str]]:
        for path, theirs in table.items():
            for leaf, last in LEAVES.items():
                child = _follow(nodes, number, f"{path}/{leaf}")
                if child is not None:
                    yield nodes[child].key, f"{prefix}{theirs}.{last}"

    for number in _with(nodes, "position_embeddings"):
        yield from layers(number, EMBEDDINGS, "bert.embeddings.")
        for attribute, theirs in TABLES.items():
            if attribute in nodes[number].children:
                yield nodes[nodes[number].children[attribute]].key, f"bert.embeddings.{theirs}"
    for index, number in enumerate(_encoder_layers(nodes)):
        prefix = f"bert.encoder.layer.{index}."
        yield from layers(number, LAYER, prefix)
        merged = _follow(nodes, number, "attention/self_attention/qkv_weight")
        if merged is not None:
            yield nodes[merged].key, f"{prefix}{QKV}.kernel"
    for number in _with(nodes, "predictions"):
        yield from layers(number, PREDICTIONS, "cls.predictions.")
        bias = _follow(nodes, number, "predictions/bias")
        if bias is not None:
            yield nodes[bias].key, "cls.predictions.bias"
    for number in _with(nodes, "seq_relationship"):
        yield from layers(number, {"seq_relationship": "seq_relationship"}, "cls.")
    # Dense layers of the model itself are known by the names of their variables.
    for node in nodes:
        kernel = nodes[node.children["kernel"]] if "kernel" in node.children else None
        parts = kernel.full_name.split("/") if kernel is not None else []
        for part, theirs in DENSE.items():
            if part in parts:
                for leaf in ("kernel", "bias"):
                    if leaf in node.children:
                        yield nodes[node.children[leaf]].key, f"{theirs}.{leaf}"


def _follow(nodes: Sequence[Node], number: int | None, path: str) -> int | None:
    """Return the object that attributes lead to, None where one of them is missing."""
    for attribute in path.split("/"):
        number = None if number is None else nodes[number].children.get(attribute)
    return number


def _with(nodes: Sequence[Node], attribute: str) -> Iterator[int]:
    return (number for number, node in enumerate(nodes) if attribute in node.children)


def _encoder_layers(nodes: Sequence[Node]) -> list[int]:
    """Return the encoder layers in order: by the number in the attribute that leads to them."""
    wanted = {
        number
        for number in _with(nodes, "attention")
        if {"intermediate", "bert_output"} <= {*nodes[number].children}
    }
    for node in nodes:
        layers = {
            int(match[1]): child
            for name, child in node.children.items()
            if child in wanted and (match := NUMBERED.fullmatch(name))
        }
        if {*layers.values()} == wanted:
            return [layers[index] for index in sorted(layers)]
    return []
