"""The architectures of encoders: a row each, with the facts that the rest of the package needs.

The arithmetic of its sizes is the class of its shape; its layers are in a file of `model/`. Classes of layers are given
as names for `pkgutil.resolve_name`, so that a row loads no Keras.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, SerializeAsAny, ValidationInfo

from bert_cli.facts.bert import BertConfig, fields_of
from bert_cli.facts.groupbert import GroupBertConfig
from bert_cli.facts.heads import LAST_BLOCKS, Block, Head
from bert_cli.facts.modernbert import BLOCKS, ModernBertConfig
from bert_cli.settings.settings import SettingError


class Part(NamedTuple):
    """Where Hugging Face stores a layer of ours: in a layer of its own, or in a part of a fused layer's outputs."""

    layer: str
    """Hugging Face's name of the layer; with the ending of a tensor, the name of the tensor."""
    number: int = 0
    """Number of the part, from 0."""
    of: int = 1
    """Number of parts of the fused layer, all of the same size."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """An architecture, without the sizes of a model."""

    shape: type[BertConfig]
    """The class of its shape: fields, divisors, matrix products, weights."""
    embeddings: str = "bert_cli.model.bert.encoder:Embeddings"
    """The class of the first block, which has the table `word`."""
    layer: str
    """The class of an encoder layer, which is built with its number: layers may differ."""
    own_blocks: tuple[Block, ...] = ()
    """Blocks after the encoder layers that replace the blocks of the same names in `heads.LAST_BLOCKS`."""
    hf_names: Mapping[str, str | Part]
    """Our name of a layer, or its beginning -> Hugging Face's; {} is the number of an encoder layer."""
    hf_copies: Mapping[str, str]
    """Copies of tied weights in some files -> the weight."""
    hf_prefix: str = ""
    """The beginning of the names of transformers' classes, before `Bert`."""
    hf_modeling: str | None = None
    """Module of classes for PyTorch that transformers does not have: a file of `model/` that is copied into the folder
    of the weights and never imported."""
    has_scaling: bool = False
    """Whether the table of Unit Scaling has its layers."""

    @property
    def last_blocks(self) -> dict[str, Block]:
        """Return every block after the encoder layers, by its name."""
        return LAST_BLOCKS | {block.name: block for block in self.own_blocks}

    @property
    def parts(self) -> dict[str, Part]:
        """Return the names for Hugging Face of all layers, or of their beginnings."""
        blocks = self.last_blocks.values()
        names: dict[str, str | Part] = {block.name: block.name for block in blocks}
        for table in (self.hf_names, *(block.hf_names for block in blocks)):
            names |= table
        parts = {}
        for ours, name in names.items():
            parts[ours] = Part(name) if isinstance(name, str) else name
        return parts

    @property
    def heads(self) -> dict[str, Head]:
        """Return every head, by the name of its block."""
        blocks = self.last_blocks.items()
        return {name: block for name, block in blocks if isinstance(block, Head)}

    def class_name(self, head: Head) -> str:
        """Return the name of transformers' class for a model with this head."""
        return self.hf_prefix + self.heads[head.name].hf_classes[0]


# The names of BERT's embeddings in Hugging Face's classes.
EMBEDDINGS = {
    "emb/word": "bert.embeddings.word_embeddings",
    "emb/position": "bert.embeddings.position_embeddings",
    "emb/segment": "bert.embeddings.token_type_embeddings",
    "emb/layer_norm": "bert.embeddings.LayerNorm",
}
COPIES = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
# Architecture, which is also transformers' model_type -> its record.
ARCHITECTURES = {
    "bert": Architecture(
        shape=BertConfig,
        layer="bert_cli.model.bert.encoder:EncoderLayer",
        hf_names={
            **EMBEDDINGS,
            "hid_{}/attention/query": "bert.encoder.layer.{}.attention.self.query",
            "hid_{}/attention/key": "bert.encoder.layer.{}.attention.self.key",
            "hid_{}/attention/value": "bert.encoder.layer.{}.attention.self.value",
            "hid_{}/attention/output/dense": "bert.encoder.layer.{}.attention.output.dense",
            "hid_{}/attention/output/layer_norm": "bert.encoder.layer.{}.attention.output.LayerNorm",
            "hid_{}/feed_forward/inner": "bert.encoder.layer.{}.intermediate.dense",
            "hid_{}/feed_forward/output/dense": "bert.encoder.layer.{}.output.dense",
            "hid_{}/feed_forward/output/layer_norm": "bert.encoder.layer.{}.output.LayerNorm",
        },
        hf_copies=COPIES,
        has_scaling=True,
    ),
    "groupbert": Architecture(
        shape=GroupBertConfig,
        layer="bert_cli.model.groupbert:GroupLayer",
        hf_names={
            **EMBEDDINGS,
            "hid_{}": "bert.encoder.layer.{}",
            "hid_{}/final_norm": "bert.encoder.final_norm",
        },
        hf_copies=COPIES,
        hf_prefix="Group",
        hf_modeling="modeling_groupbert",
    ),
    "modernbert": Architecture(
        shape=ModernBertConfig,
        embeddings="bert_cli.model.modernbert:Embeddings",
        layer="bert_cli.model.modernbert:ModernLayer",
        own_blocks=BLOCKS,
        hf_names={
            "emb/word": "model.embeddings.tok_embeddings",
            "emb/layer_norm": "model.embeddings.norm",
            "hid_{}/attention/layer_norm": "model.layers.{}.attn_norm",
            "hid_{}/attention/query": Part("model.layers.{}.attn.Wqkv", 0, 3),
            "hid_{}/attention/key": Part("model.layers.{}.attn.Wqkv", 1, 3),
            "hid_{}/attention/value": Part("model.layers.{}.attn.Wqkv", 2, 3),
            "hid_{}/attention/output": "model.layers.{}.attn.Wo",
            "hid_{}/feed_forward/layer_norm": "model.layers.{}.mlp_norm",
            "hid_{}/feed_forward/inner": Part("model.layers.{}.mlp.Wi", 0, 2),
            "hid_{}/feed_forward/gate": Part("model.layers.{}.mlp.Wi", 1, 2),
            "hid_{}/feed_forward/output": "model.layers.{}.mlp.Wo",
            "hid_{}/final_norm": "model.final_norm",
        },
        hf_copies={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
        hf_prefix="Modern",
    ),
}


def head_of_class(name: str) -> Head | None:
    """Return the head of a class of transformers, None if there is none."""
    for architecture in ARCHITECTURES.values():
        for head in architecture.heads.values():
            if name in [architecture.hf_prefix + hf_class for hf_class in head.hf_classes]:
                return head
    return None


def shape_of(values: Mapping[str, Any], context: object = None) -> BertConfig:
    """Return the shape that settings describe. Raises SettingError or ValidationError, both a ValueError."""
    name = values.get("architecture", BertConfig().architecture)
    if not isinstance(name, str) or name not in ARCHITECTURES:
        expected = " or ".join(map(repr, ARCHITECTURES))
        raise SettingError("architecture", f"got {name!r}", f"input should be {expected}")
    shape = ARCHITECTURES[name].shape
    for field in sorted({*values} & ({*fields_of(BertConfig)} - {*shape.model_fields})):
        problem = f"has no effect with architecture {name!r}"
        raise SettingError(field, problem, "leave it out or change architecture")
    return shape.model_validate(values, context=context)


def _validate(value: object, info: ValidationInfo) -> Any:
    if isinstance(value, Mapping):
        return shape_of(value, info.context)
    return value


# A shape of any architecture.
ModelShape = Annotated[BertConfig, BeforeValidator(_validate), SerializeAsAny()]
