"""TensorFlow 2 checkpoints of transformers' TFBert models and of the original, under Hugging Face's names.

Such a checkpoint holds a graph of objects: a variable is found by the attributes that lead to it, not by
its name. Layers are told apart by their attributes, so that transformers' classes (`bert.encoder.layer`)
and the original's functional models (`layer_with_weights-3`) are read by one rule.

The original can drop weights. Biases that are not there are zeros, which is the same model; query, key
and value in one kernel are cut apart. A masked-LM head without its transform is another head and is left
out. Source: the attributes of transformers 4's modeling_tf_bert.py.
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
# Beside the weights: the optimizer, metrics and counters.
BESIDE = re.compile(
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
# Word in the name of a Dense layer's variables -> the layer.
DENSE = {"pooler": "bert.pooler.dense", "qa_outputs": "qa_outputs", "classifier": "classifier"}
# The original's query, key and value side by side.
QKV = "attention.self.qkv"
SELF = ("attention.self.query", "attention.self.key", "attention.self.value")
BIASED = tuple(f"{name}.weight" for name in (*SELF, "attention.output.dense"))


@dataclass(frozen=True)
class Node:
    """An object of a checkpoint."""

    children: Mapping[str, int]
    """Attribute -> number of the object."""
    key: str | None
    """Of a variable: its name in the file."""
    full_name: str
    """Of a variable: the name that TensorFlow gave it."""


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
    unknown = sorted(key for key in keys - {*names} if not BESIDE.fullmatch(key))
    if unknown or not names:
        listed = ", ".join(key.removesuffix(VARIABLE) for key in unknown[:8])
        raise CheckpointError(
            f"{where}: is a TensorFlow 2 checkpoint that "
            f"{f'has variables at other attributes than BERT: {listed}' if unknown else 'holds no BERT'}; give one "
            "of transformers' TFBert models or of Graphcore's example, or save the model with "
            "transformers' save_pretrained"
        )
    found: dict[str, Array] = {}
    for key, name in names.items():
        # PyTorch keeps kernels as [outputs, inputs].
        turned = name.endswith(".kernel")
        value = np.ascontiguousarray(value_of(key).T) if turned else value_of(key)
        found[f"{name.removesuffix('.kernel')}.weight" if turned else name] = value
    for name in [name for name in found if name.endswith(f"{QKV}.weight")]:
        for part, value in zip(SELF, np.split(found.pop(name), 3), strict=True):
            found[name.replace(QKV, part)] = value
    for name in [name for name in found if name.endswith(BIASED)]:
        zeros = np.zeros(len(found[name]), found[name].dtype)
        found.setdefault(f"{name.removesuffix('weight')}bias", zeros)
    if "cls.predictions.transform.dense.weight" not in found:
        found.pop("cls.predictions.bias", None)
    elif "cls.predictions.bias" not in found:
        table = found["bert.embeddings.word_embeddings.weight"]
        found["cls.predictions.bias"] = np.zeros(len(table), table.dtype)
    return found


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
    # A Dense layer may be the model's own; the name of its variable says which.
    for node in nodes:
        kernel = nodes[node.children["kernel"]] if "kernel" in node.children else None
        words = kernel.full_name.split("/") if kernel is not None else []
        for word, theirs in DENSE.items():
            if word in words:
                for leaf in ("kernel", "bias"):
                    if leaf in node.children:
                        yield nodes[node.children[leaf]].key, f"{theirs}.{leaf}"


def _follow(nodes: Sequence[Node], number: int | None, path: str) -> int | None:
    """Return the object that attributes lead to, None where one of them is absent."""
    for attribute in path.split("/"):
        number = None if number is None else nodes[number].children.get(attribute)
    return number


def _with(nodes: Sequence[Node], attribute: str) -> Iterator[int]:
    return (number for number, node in enumerate(nodes) if attribute in node.children)


def _encoder_layers(nodes: Sequence[Node]) -> list[int]:
    """Return the encoder layers in order: by the number in the attribute of the object that holds them."""
    wanted = {
        number
        for number in _with(nodes, "attention")
        if {"intermediate", "bert_output"} <= {*nodes[number].children}
    }
    for node in nodes:
        layers = {
            int(found[1]): child
            for name, child in node.children.items()
            if child in wanted and (found := NUMBERED.fullmatch(name))
        }
        if {*layers.values()} == wanted:
            return [layers[index] for index in sorted(layers)]
    return []
