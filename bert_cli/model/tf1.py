"""Google's TensorFlow 1 checkpoints under Hugging Face's names: one table, and what is left behind.

The names are those of google-research/bert: the models published in 2018, what its scripts pre-train,
and what they fine-tune. Kernels lie there as [inputs, outputs], so they are turned; the output
weights of its classifiers as [outputs, inputs] already. The optimizer's moments and the step stay
behind, as a run that starts from weights has a fresh optimizer.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bert_cli.config.model import BertConfig
from bert_cli.errors import CheckpointError

Array = npt.NDArray[Any]

# Name there -> name in `BertForPreTraining` and its like; {} is the number of an encoder layer.
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
    **{f"{there}/kernel": f"{here}.weight" for there, here in DENSE.items()},
    **{f"{there}/bias": f"{here}.bias" for there, here in DENSE.items()},
    **{f"{there}/gamma": f"{here}.weight" for there, here in NORMS.items()},
    **{f"{there}/beta": f"{here}.bias" for there, here in NORMS.items()},
}
# What training needs and a model does not: moments, the step, the loss scale of NVIDIA's script.
BESIDE = re.compile(
    r"(.*/)?(adam_[mv]|lamb_[mv]|Adam(_1)?|LAMB(_1)?|global_step|beta[12]_power|"
    r"(current_)?loss_scale|good_steps|bad_steps|signature_digest|_CHECKPOINTABLE_OBJECT_GRAPH)"
)
# Keys of a bert_config.json that do not change what is computed here: the pooler of the multilingual
# and Chinese models is described there as if it could be another one.
NO_MATTER = (
    "directionality",
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_size_per_head",
    "pooler_type",
)


def to_hf_names(tensors: Mapping[str, Array], *, where: str = "checkpoint") -> dict[str, Array]:
    """The weights of a TensorFlow 1 checkpoint as a Hugging Face model has them.

    Raises CheckpointError, naming all of them, for variables that no BERT of Google's has.
    """
    found: dict[str, Array] = {}
    unknown: list[str] = []
    for name, value in tensors.items():
        if BESIDE.fullmatch(name):
            continue
        theirs = _their_name(name)
        if theirs is None:
            unknown.append(name)
            continue
        turned = np.ascontiguousarray(value.T) if name.endswith("/kernel") else value
        found[theirs] = turned
    if unknown or not found:
        told = f"{len(unknown)} variables are not BERT's: {', '.join(sorted(unknown))}"
        raise CheckpointError(
            f"{where}: {told if unknown else 'holds no variables of BERT'}; give a checkpoint of "
            "google-research/bert"
        )
    return found


def _their_name(name: str) -> str | None:
    number = re.search(r"/layer_(\d+)/", name)
    row = re.sub(r"/layer_\d+/", "/layer_{}/", name)
    return NAMES[row].format(number[1] if number else "") if row in NAMES else None


def config_of(found: Any) -> dict[str, Any]:
    """The contents of a bert_config.json as those of a Hugging Face config.json.

    The names are the same. Raises CheckpointError for a file that is no JSON object, and for a key
    that is neither BERT's nor known to be of no matter.
    """
    if not isinstance(found, Mapping):
        raise CheckpointError(
            f"bert_config.json ({type(found).__name__}): is no JSON object; give Google's file"
        )
    described = {name: value for name, value in found.items() if name not in NO_MATTER}
    unknown = sorted({*described} - {*BertConfig.model_fields, "model_type"})
    if unknown:
        raise CheckpointError(
            f"bert_config.json ({', '.join(unknown)}): no settings of BERT; give Google's file"
        )
    return {"model_type": "bert", **described}


def architecture_of(shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """What a config.json says of the class of a model, from the shapes of a checkpoint's variables.

    Google's own config says nothing of it. Labels have no names there.
    """
    if "cls/squad/output_weights" in shapes:
        return {"architectures": ["BertForQuestionAnswering"]}
    if "output_weights" in shapes:
        names = [f"LABEL_{number}" for number in range(shapes["output_weights"][0])]
        named = {str(number): name for number, name in enumerate(names)}
        return {"architectures": ["BertForSequenceClassification"], "id2label": named}
    is_whole = "cls/predictions/output_bias" in shapes
    return {"architectures": ["BertForPreTraining" if is_whole else "BertModel"]}
