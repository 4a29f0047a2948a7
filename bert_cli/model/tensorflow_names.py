"""Convert the weights of TensorFlow checkpoints to Hugging Face's names.

TensorFlow 1: the models of google-research/bert and its scripts. TensorFlow 2: transformers' TFBert models and the
original's. A TensorFlow 2 checkpoint has a graph of objects, in which the attributes on the path to a variable identify
it. Layers are recognised by their attributes, so one rule reads transformers' classes (`bert.encoder.layer`) and the
original's functional models (`layer_with_weights-3`). Source: the attributes of transformers 4's modeling_tf_bert.py.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bert_cli.errors import CheckpointError
from bert_cli.facts.architectures import ARCHITECTURES
from bert_cli.facts.bert import BertConfig
from bert_cli.files import JSONObject
from bert_cli.model.hf import LEAVES

Array = npt.NDArray[Any]

# TensorFlow 1: name there -> name in Hugging Face's classes; {} is the number of an encoder layer.
NAMES = {
    "bert/embeddings/word_embeddings": "bert.embeddings.word_embeddings.weight",
    "bert/embeddings/position_embeddings": "bert.embeddings.position_embeddings.weight",
    "bert/embeddings/token_type_embeddings": "bert.embeddings.token_type_embeddings.weight",
    "cls/predictions/output_bias": "cls.predictions.bias",
    "cls/seq_relationship/output_weights": "cls.seq_relationship.weight",
    "cls/seq_relationship/output_bias": "cls.seq_relationship.bias",
    "cls/squad/output_weights": "qa_outputs.weight",
    "cls/squad/output_bias": "qa_outputs.bias",
    "output_weights": "classifier.weight",
    "output_bias": "classifier.bias",
}
for ours, (theirs, *_) in ARCHITECTURES["bert"].parts.items():
    if not any(name.startswith(f"{theirs}.") for name in NAMES.values()):
        layer = theirs.replace(".layer.{}", ".layer_{}").replace(".", "/")
        for leaf in ("gamma", "beta") if ours.endswith("layer_norm") else ("kernel", "bias"):
            NAMES[f"{layer}/{leaf}"] = f"{theirs}.{LEAVES[leaf]}"
# Variables of training: moments, the step, the loss scale of NVIDIA's script.
TRAINING = re.compile(
    r"(.*/)?(adam_[mv]|lamb_[mv]|Adam(_1)?|LAMB(_1)?|global_step|beta[12]_power|"
    r"(current_)?loss_scale|good_steps|bad_steps|signature_digest|_CHECKPOINTABLE_OBJECT_GRAPH)"
)
# Keys without effect in the bert_config.json of the multilingual and Chinese models.
IGNORED = re.compile(
    "directionality|pooler_(fc_size|num_attention_heads|num_fc_layers|size_per_head|type)"
)

GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
VARIABLE = "/.ATTRIBUTES/VARIABLE_VALUE"
# TensorFlow 2: variables that are not weights: optimizer, metrics and counters.
TRAINING_OBJECTS = re.compile(
    r"(optimizer|keras_api|.*/?\.OPTIMIZER_SLOT|save_counter|step|iterations)(/.*)?"
)
NUMBERED = re.compile(r"(?:layer_with_weights-)?(\d+)")
# The original's query, key and value side by side.
QKV = "attention.self.qkv"
TRANSFORM = "cls.predictions.transform"
SELF = ("attention.self.query", "attention.self.key", "attention.self.value")
BIASED = tuple(f"{name}.weight" for name in (*SELF, "attention.output.dense"))


def _with_leaves(layers: Mapping[str, str]) -> dict[str, str]:
    """Return the names of the weights of Dense and LayerNorm layers; a kernel ends in `.kernel`."""
    last = {"kernel": "kernel", "bias": "bias", "gamma": "weight", "beta": "bias"}
    return {f"{p}/{k}": f"{name}.{v}" for p, name in layers.items() for k, v in last.items()}


# Attribute by which an object is recognised -> attributes from it to a variable -> the variable's name.
OBJECTS = {
    "position_embeddings": {
        **_with_leaves({"LayerNorm": "bert.embeddings.LayerNorm"}),
        "weight": "bert.embeddings.word_embeddings.weight",
        "token_type_embeddings": "bert.embeddings.token_type_embeddings.weight",
        "position_embeddings": "bert.embeddings.position_embeddings.weight",
    },
    "predictions": {
        **_with_leaves(
            {
                f"predictions/transform/{name}": f"{TRANSFORM}.{name}"
                for name in ("dense", "LayerNorm")
            }
        ),
        "predictions/bias": "cls.predictions.bias",
    },
    "seq_relationship": _with_leaves({"seq_relationship": "cls.seq_relationship"}),
}
ENCODER_LAYER = {
    **_with_leaves(
        {
            "attention/self_attention/query": "attention.self.query",
            "attention/self_attention/key": "attention.self.key",
            "attention/self_attention/value": "attention.self.value",
            "attention/dense_output/dense": "attention.output.dense",
            "attention/dense_output/LayerNorm": "attention.output.LayerNorm",
            "intermediate/dense": "intermediate.dense",
            "bert_output/dense": "output.dense",
            "bert_output/LayerNorm": "output.LayerNorm",
        }
    ),
    "attention/self_attention/qkv_weight": f"{QKV}.kernel",
}
# Part of the name of a Dense layer's variables -> the layer.
DENSE = {"pooler": "bert.pooler.dense", "qa_outputs": "qa_outputs", "classifier": "classifier"}


class Node(NamedTuple):
    """An object of a TensorFlow 2 checkpoint."""

    children: Mapping[str, int]  # attribute -> index of the object
    key: str | None  # name of a variable in the file
    full_name: str  # name of a variable in TensorFlow


def is_object_based(names: Mapping[str, object]) -> bool:
    """Return whether these are the names of a TensorFlow 2 checkpoint."""
    return any(name.endswith(VARIABLE) for name in names)


def is_training(name: str) -> bool:
    """Return whether this is a variable of training in a TensorFlow 1 checkpoint, such as a slot WEIGHT/NAME."""
    row = re.sub(r"/layer_\d+/", "/layer_{}/", name)
    return bool(TRAINING.fullmatch(name)) or any(row.startswith(f"{known}/") for known in NAMES)


def from_tf1(tensors: Mapping[str, Array], *, where: str = "checkpoint") -> dict[str, Array]:
    """Return the weights of a TensorFlow 1 checkpoint under Hugging Face's names and in its layout.

    Raises CheckpointError that names all variables that no BERT of Google's has.
    """
    renamed: dict[str, Array] = {}
    unknown: list[str] = []
    for name, value in tensors.items():
        number = re.search(r"/layer_(\d+)/", name)
        row = re.sub(r"/layer_\d+/", "/layer_{}/", name)
        if row in NAMES:
            hf_name = NAMES[row].format(number[1] if number else "")
            # The output weights of classifiers are [outputs, inputs] already.
            renamed[hf_name] = np.ascontiguousarray(value.T) if name.endswith("/kernel") else value
        elif not is_training(name):
            unknown.append(name)
    if unknown or not renamed:
        names = f"{len(unknown)} variables are not BERT's: {', '.join(sorted(unknown))}"
        problem = names if unknown else "holds no variables of BERT"
        raise CheckpointError(where, problem, "use a checkpoint of google-research/bert")
    return renamed


def config_of(content: object) -> JSONObject:
    """Return the contents of a bert_config.json as a Hugging Face config.json, which has the same names."""
    if not isinstance(content, Mapping):
        where = f"bert_config.json ({type(content).__name__})"
        raise CheckpointError(where, "is not a JSON object", "use Google's file")
    described = {name: value for name, value in content.items() if not IGNORED.fullmatch(name)}
    if unknown := sorted({*described} - {*BertConfig.model_fields, "model_type"}):
        where = f"bert_config.json ({', '.join(unknown)})"
        raise CheckpointError(where, "are not settings of BERT", "use Google's file")
    return {"model_type": "bert", **described}


def architecture_of(shapes: Mapping[str, Sequence[int]]) -> JSONObject:
    """Return the entries of a config.json for the class of a model, from the shapes of its variables."""
    if "cls/squad/output_weights" in shapes:
        return {"architectures": ["BertForQuestionAnswering"]}
    if "output_weights" in shapes:
        labels = {str(n): f"LABEL_{n}" for n in range(shapes["output_weights"][0])}
        return {"architectures": ["BertForSequenceClassification"], "id2label": labels}
    has_heads = "cls/predictions/output_bias" in shapes
    return {"architectures": ["BertForPreTraining" if has_heads else "BertModel"]}


def from_tf2(
    nodes: Sequence[Node], value_of: Callable[[str], Array], *, where: str
) -> dict[str, Array]:
    """Return the weights of a TensorFlow 2 checkpoint under Hugging Face's names and in its layout.

    The original can omit weights: missing biases are zeros; query, key and value in one kernel are split. A masked-LM
    head without its transform is left out. Raises CheckpointError for variables whose attributes BERT does not have.
    """
    names = {key: name for key, name in _named_keys(nodes) if key is not None}
    keys = {node.key for node in nodes if node.key is not None}
    unknown = sorted(key for key in keys - {*names} if not TRAINING_OBJECTS.fullmatch(key))
    if unknown or not names:
        listed = ", ".join(key.removesuffix(VARIABLE) for key in unknown[:8])
        problem = f"variables at other attributes than BERT: {listed}" if unknown else "no BERT"
        raise CheckpointError(
            where,
            f"is a TensorFlow 2 checkpoint that has {problem}",
            "use one of transformers' TFBert models or of Graphcore's example, or save the model with "
            "transformers' save_pretrained",
        )
    tensors: dict[str, Array] = {}
    for key, name in names.items():
        # PyTorch stores kernels as [outputs, inputs].
        value = np.ascontiguousarray(value_of(key).T) if name.endswith("kernel") else value_of(key)
        tensors[re.sub(r"\.kernel$", ".weight", name)] = value
    for name in [name for name in tensors if name.endswith(f"{QKV}.weight")]:
        for part, value in zip(SELF, np.split(tensors.pop(name), 3), strict=True):
            tensors[name.replace(QKV, part)] = value
    for name in [name for name in tensors if name.endswith(BIASED)]:
        zeros = np.zeros(len(tensors[name]), tensors[name].dtype)
        tensors.setdefault(f"{name.removesuffix('weight')}bias", zeros)
    if f"{TRANSFORM}.dense.weight" not in tensors:
        tensors.pop("cls.predictions.bias", None)
    elif "cls.predictions.bias" not in tensors:
        table = tensors["bert.embeddings.word_embeddings.weight"]
        tensors["cls.predictions.bias"] = np.zeros(len(table), table.dtype)
    return tensors


def _named_keys(nodes: Sequence[Node]) -> Iterator[tuple[str | None, str]]:
    """Yield the key of each variable and its name in a Hugging Face model; a kernel ends in `.kernel`."""
    objects = [
        (number, table, "")
        for attribute, table in OBJECTS.items()
        for number, node in enumerate(nodes)
        if attribute in node.children
    ]
    for index, number in enumerate(_encoder_layers(nodes)):
        objects.append((number, ENCODER_LAYER, f"bert.encoder.layer.{index}."))
    for number, table, prefix in objects:
        for path, name in table.items():
            child: int | None = number
            for attribute in path.split("/"):
                child = None if child is None else nodes[child].children.get(attribute)
            if child is not None:
                yield nodes[child].key, f"{prefix}{name}"
    # Dense layers of the model itself are known by the names of their variables.
    for node in nodes:
        if "kernel" in node.children:
            parts = nodes[node.children["kernel"]].full_name.split("/")
            for part, leaf in itertools.product(DENSE, ("kernel", "bias")):
                if part in parts and leaf in node.children:
                    yield nodes[node.children[leaf]].key, f"{DENSE[part]}.{leaf}"


def _encoder_layers(nodes: Sequence[Node]) -> list[int]:
    """Return the encoder layers, ordered by the number in their attribute."""
    expected = {
        number
        for number, node in enumerate(nodes)
        if {"attention", "intermediate", "bert_output"} <= {*node.children}
    }
    for node in nodes:
        layers = {
            int(match[1]): child
            for name, child in node.children.items()
            if child in expected and (match := NUMBERED.fullmatch(name))
        }
        if {*layers.values()} == expected:
            return [layers[index] for index in sorted(layers)]
    return []
