"""Convert the weights of TensorFlow 1 checkpoints, of google-research/bert and its scripts, to Hugging Face's names."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bert_cli.arrays import Array, Tensors
from bert_cli.errors import CheckpointError
from bert_cli.facts.bert import BertConfig
from bert_cli.files import JSONObject

# Name there -> name in Hugging Face's classes; {} is the number of an encoder layer.
NAMES: dict[str, str] = json.loads(Path(__file__).with_suffix(".json").read_bytes())
# Variables of training: moments, the step, the loss scale of NVIDIA's script.
TRAINING = re.compile(
    r"(.*/)?(adam_[mv]|lamb_[mv]|Adam(_1)?|LAMB(_1)?|global_step|beta[12]_power|"
    r"(current_)?loss_scale|good_steps|bad_steps|signature_digest|_CHECKPOINTABLE_OBJECT_GRAPH)"
)
# Keys without effect in the bert_config.json of the multilingual and Chinese models.
IGNORED = re.compile(
    "directionality|pooler_(fc_size|num_attention_heads|num_fc_layers|size_per_head|type)"
)

# End of the names in a checkpoint of objects, as TensorFlow 2 writes them.
VARIABLE = "/.ATTRIBUTES/VARIABLE_VALUE"


def is_object_based(names: Mapping[str, object]) -> bool:
    """Return whether these are the names of a checkpoint of objects."""
    return any(name.endswith(VARIABLE) for name in names)


def is_training(name: str) -> bool:
    """Return whether this is a variable of training, such as a slot WEIGHT/NAME."""
    # A slot is named after its weight: WEIGHT/adam_m.
    row = re.sub(r"/layer_\d+/", "/layer_{}/", name)
    return bool(TRAINING.fullmatch(name)) or any(row.startswith(f"{known}/") for known in NAMES)


def from_tf1(tensors: Tensors, *, where: str = "checkpoint") -> dict[str, Array]:
    """Return the weights of a checkpoint under Hugging Face's names and in its layout.

    Raises CheckpointError that names all variables that no BERT of Google's has.
    """
    renamed: dict[str, Array] = {}
    unknown: list[str] = []
    for name, value in tensors.items():
        number = re.search(r"/layer_(\d+)/", name)
        row = re.sub(r"/layer_\d+/", "/layer_{}/", name)
        if row in NAMES:
            layer_number = number[1] if number else ""
            hf_name = NAMES[row].format(layer_number)
            # The output weights of classifiers are [outputs, inputs] already.
            renamed[hf_name] = np.ascontiguousarray(value.T) if name.endswith("/kernel") else value
        elif not is_training(name):
            unknown.append(name)
    if unknown or not renamed:
        names = f"{len(unknown)} variables are not BERT's: {', '.join(sorted(unknown))}"
        problem = names if unknown else "holds no variables of BERT"
        raise CheckpointError(where, problem, "use a checkpoint of google-research/bert")
    return renamed


def config_of(content: JSONObject) -> JSONObject:
    """Return the contents of a bert_config.json as a Hugging Face config.json, which has the same names."""
    described = {name: value for name, value in content.items() if not IGNORED.fullmatch(name)}
    unknown = sorted({*described} - {*BertConfig.model_fields, "model_type"})
    if unknown:
        where = f"bert_config.json ({', '.join(unknown)})"
        raise CheckpointError(where, "are not settings of BERT", "use Google's file")
    return {"model_type": "bert", **described}


def architecture_of(shapes: Mapping[str, Sequence[int]]) -> JSONObject:
    """Return the entries of a config.json for the class of a model, from the shapes of its variables."""
    if "cls/squad/output_weights" in shapes:
        return {"architectures": ["BertForQuestionAnswering"]}
    if "output_weights" in shapes:
        # [labels, hidden size]: these files have no names of labels.
        labels = {str(n): f"LABEL_{n}" for n in range(shapes["output_weights"][0])}
        return {"architectures": ["BertForSequenceClassification"], "id2label": labels}
    if "cls/predictions/output_bias" in shapes:
        return {"architectures": ["BertForPreTraining"]}
    return {"architectures": ["BertModel"]}
