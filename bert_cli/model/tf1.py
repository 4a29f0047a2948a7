"""Google's TensorFlow 1 checkpoints under Hugging Face's names.

The names are those of google-research/bert: the models published in 2018 and those that its scripts
pre-train and fine-tune. Kernels are [inputs, outputs] there, so they are transposed; the output weights
of its classifiers are [outputs, inputs] already. The optimizer's moments and the step are not read.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bert_cli.config.settings import BertConfig
from bert_cli.errors import CheckpointError

Array = npt.NDArray[Any]

# Name there -> name in `BertForPreTraining` and similar classes; {} is the number of an encoder layer.
TENSORS = {
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
# Layers of a kernel and a bias, and of a gamma and a beta.
DENSE = {
    "bert/encoder/layer_{}/attention/self/query": "bert.encoder.layer.{}.attention.self.query",
    "bert/encoder/layer_{}/attention/self/key": "bert.encoder.layer.{}.attention.self.key",
    "bert/encoder/layer_{}/attention/self/value": "bert.encoder.layer.{}.attention.self.value",
    "bert/encoder/layer_{}/attention/output/dense": "bert.encoder.layer.{}.attention.output.dense",
    "bert/encoder/layer_{}/intermediate/dense": "bert.encoder.layer.{}.intermediate.dense",
    "bert/encoder/layer_{}/output/dense": "bert.encoder.layer.{}.output.dense",
    "bert/pooler/dense": "bert.pooler.dense",
    "cls/predictions/transform/dense": "cls.predictions.transform.dense",
}
NORMS = {
    "bert/embeddings/LayerNorm": "bert.embeddings.LayerNorm",
    "bert/encoder/layer_{}/attention/output/LayerNorm": "bert.encoder.layer.{}.attention.output.LayerNorm",
    "bert/encoder/layer_{}/output/LayerNorm": "bert.encoder.layer.{}.output.LayerNorm",
    "cls/predictions/transform/LayerNorm": "cls.predictions.transform.LayerNorm",
}
NAMES = {
    **TENSORS,
    **{f"{google}/kernel": f"{hf}.weight" for google, hf in DENSE.items()},
    **{f"{google}/bias": f"{hf}.bias" for google, hf in DENSE.items()},
    **{f"{google}/gamma": f"{hf}.weight" for google, hf in NORMS.items()},
    **{f"{google}/beta": f"{hf}.bias" for google, hf in NORMS.items()},
}
# Variables of training: moments, the step, the loss scale of NVIDIA's script.
TRAINING = re.compile(
    r"(.*/)?(adam_[mv]|lamb_[mv]|Adam(_1)?|LAMB(_1)?|global_step|beta[12]_power|"
    r"(current_)?loss_scale|good_steps|bad_steps|signature_digest|_CHECKPOINTABLE_OBJECT_GRAPH)"
)
# Keys of a bert_config.json without an effect on the model: those of the multilingual and Chinese models
# describe the usual pooler.
IGNORED = (
    "directionality",
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_size_per_head",
    "pooler_type",
)


def to_hf_names(tensors: Mapping[str, Array], *, where: str = "checkpoint") -> dict[str, Array]:
    """Return the weights of a TensorFlow 1 checkpoint as a Hugging Face model has them.

    Raises CheckpointError, naming all of them, for variables that no BERT of Google's has.
    """
    renamed: dict[str, Array] = {}
    unknown: list[str] = []
    for name, value in tensors.items():
        if TRAINING.fullmatch(name):
            continue
        hf_name = _hf_name(name)
        if hf_name is None:
            unknown.append(name)
            continue
        renamed[hf_name] = np.ascontiguousarray(value.T) if name.endswith("/kernel") else value
    if unknown or not renamed:
        listed = f"{len(unknown)} variables are not BERT's: {', '.join(sorted(unknown))}"
        raise CheckpointError(
            where,
            listed if unknown else "holds no variables of BERT",
            "give a checkpoint of google-research/bert",
        )
    return renamed


def _hf_name(name: str) -> str | None:
    number = re.search(r"/layer_(\d+)/", name)
    row = re.sub(r"/layer_\d+/", "/layer_{}/", name)
    return NAMES[row].format(number[1] if number else "") if row in NAMES else None


def config_of(content: Any) -> dict[str, Any]:
    """Return the contents of a bert_config.json as those of a Hugging Face config.json.

    The names are the same. Raises CheckpointError for a file that is no JSON object, and for unknown keys.
    """
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"bert_config.json ({type(content).__name__})",
            "is no JSON object",
            "give Google's file",
        )
    described = {name: value for name, value in content.items() if name not in IGNORED}
    unknown = sorted({*described} - {*BertConfig.model_fields, "model_type"})
    if unknown:
        raise CheckpointError(
            f"bert_config.json ({', '.join(unknown)})", "no settings of BERT", "give Google's file"
        )
    return {"model_type": "bert", **described}


def architecture_of(shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Return the entries of a config.json about the class of a model, from the shapes of its variables.

    Google's bert_config.json has neither these nor names of labels.
    """
    if "cls/squad/output_weights" in shapes:
        return {"architectures": ["BertForQuestionAnswering"]}
    if "output_weights" in shapes:
        names = [f"LABEL_{number}" for number in range(shapes["output_weights"][0])]
        named = {str(number): name for number, name in enumerate(names)}
        return {"architectures": ["BertForSequenceClassification"], "id2label": named}
    has_heads = "cls/predictions/output_bias" in shapes
    return {"architectures": ["BertForPreTraining" if has_heads else "BertModel"]}
