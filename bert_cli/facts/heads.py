"""The blocks after the encoder layers, one record each, for settings, planning, the model and the tasks.

A task with its own head is a record in this file and its own files. Classes and functions are given as names for
`pkgutil.resolve_name`, so a record loads neither Keras nor their modules. Shapes have the letters of `bert.encoder`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from bert_cli.facts.bert import BertConfig
from bert_cli.facts.products import BatchShape, Product

# Labels of a classifier before its examples are known; the real number is negligible compared with the hidden size.
LABELS = 2

# Hugging Face's `problem_type` of a classifier whose texts may have several labels, or none.
SEVERAL_LABELS = "multi_label_classification"


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block after the encoder layers."""

    name: str
    layer: str
    """Its class; `build_block` passes it the options that it annotates."""
    products: Callable[[BertConfig, BatchShape], list[Product]] = lambda config, shape: []
    """Forward products with a weight."""
    other_weights: Callable[[BertConfig], int] = lambda config: 0
    """Number of weights besides those of products; below 0 where a product's are those of the word embeddings."""
    hf_names: Mapping[str, str] = field(default_factory=dict)
    """Our name of a layer -> Hugging Face's, unless it is the same name with dots."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """Part that a file may lack completely, as published encoders do -> the part's name in Hugging Face."""
    reads_word_table: bool = False
    """Whether it scores the vocabulary with the word embeddings of `emb`."""

    def weights(self, config: BertConfig) -> int:
        """Return the number of its weights, without shared ones."""
        products = self.products(config, BatchShape(1, 1, 1))
        biases = sum(product.outputs for product in products if product.has_bias)
        matrices = sum(product.matrix_weights for product in products)
        return matrices + biases + self.other_weights(config)


@dataclass(frozen=True, kw_only=True)
class Head(Block):
    """The last block of a model."""

    before: tuple[str, ...] = ()
    """Blocks between the encoder layers and the head."""
    task: str
    """Task of `bert predict`, by its name on the Hugging Face hub."""
    hf_classes: tuple[str, ...]
    """Class of transformers, and the class for the same model without its optional parts."""
    hf_modeling: tuple[str, str] | None = None
    """For a class that transformers does not have, a file of `model/` that has it, as `Architecture.hf_modeling`, and
    the class `AutoModel...` of transformers that opens it."""
    needs: tuple[str, ...] = ()
    """Parts without which a model cannot be used for the task; none if the encoder is enough."""
    is_per_position: bool = False
    """Whether the head has logits per position [B, S, ...] instead of per example [B, ...]."""
    has_label_names: bool = False
    """Whether config.json names the outputs."""
    predictor: str = "bert_cli.tasks.model.vectors:Embedding"
    """Class that answers the task."""
    synthetic: str = "bert_cli.data.finetune.synthetic:example_labels"
    """Function that returns labels of synthetic examples."""

    @property
    def last_blocks(self) -> tuple[str, ...]:
        """Return the names of the blocks after the encoder layers."""
        return (*self.before, self.name)

    @property
    def fills_masks(self) -> bool:
        """Return whether the first of its logits are scores of tokens in place of [MASK]."""
        return self.task == "fill-mask"


GATHER = Block(name="enc_out", layer="bert_cli.model.bert.encoder:GatherPositions")
POOL = Block(
    name="pool",
    layer="bert_cli.model.bert.encoder:Pooler",
    products=lambda config, shape: [
        Product(shape.examples * shape.sequences, config.hidden_size, config.hidden_size)
    ],
    hf_names={"pool/dense": "bert.pooler.dense"},
    parts={"pool": "bert.pooler"},
)
MEAN_POOL = Block(name="mean_pool", layer="bert_cli.model.bert.encoder:MeanPooling")
PRETRAINING = Head(
    name="heads",
    layer="bert_cli.model.bert.heads:PretrainingHeads",
    before=(GATHER.name, POOL.name),
    products=lambda config, shape: [
        Product(shape.examples * shape.sequences, config.hidden_size, 2),
        Product(shape.examples * shape.masked, config.hidden_size, config.hidden_size),
        Product(shape.examples * shape.masked, config.hidden_size, config.vocab_size),
    ],
    # The LayerNorm of the transform.
    other_weights=lambda config: (2 - config.vocab_size) * config.hidden_size,
    hf_names={
        "heads/masked_lm": "cls.predictions",
        "heads/masked_lm/transform": "cls.predictions.transform.dense",
        "heads/masked_lm/layer_norm": "cls.predictions.transform.LayerNorm",
        "heads/next_sentence": "cls.seq_relationship",
    },
    parts={"heads/masked_lm": "cls.predictions", "heads/next_sentence": "cls.seq_relationship"},
    reads_word_table=True,
    task="fill-mask",
    hf_classes=("BertForPreTraining", "BertForMaskedLM"),
    needs=("heads/masked_lm",),
    predictor="bert_cli.tasks.model.predictions:FillMask",
    is_per_position=True,
)
QUESTION_ANSWERING = Head(
    name="qa_head",
    layer="bert_cli.model.bert.heads:QuestionAnswering",
    products=lambda config, shape: [
        Product(shape.examples * shape.positions, config.hidden_size, 2)
    ],
    hf_names={"qa_head/span": "qa_outputs"},
    parts={"qa_head": "qa_outputs"},
    task="question-answering",
    hf_classes=("BertForQuestionAnswering",),
    needs=("qa_head",),
    predictor="bert_cli.tasks.model.predictions:QuestionAnswering",
    is_per_position=True,
    synthetic="bert_cli.data.finetune.synthetic:span_labels",
)
SEQUENCE_CLASSIFICATION = Head(
    name="glue_head",
    layer="bert_cli.model.bert.heads:SequenceClassification",
    before=(POOL.name,),
    products=lambda config, shape: [Product(shape.examples, config.hidden_size, LABELS)],
    hf_names={"glue_head/classifier": "classifier"},
    parts={"glue_head": "classifier"},
    task="text-classification",
    hf_classes=("BertForSequenceClassification",),
    needs=("glue_head", "pool"),
    predictor="bert_cli.tasks.model.predictions:TextClassification",
    has_label_names=True,
)
MEAN_CLASSIFICATION = replace(
    SEQUENCE_CLASSIFICATION,
    name="mean_head",
    layer="bert_cli.model.bert.heads:MeanClassification",
    before=(MEAN_POOL.name,),
    hf_names={"mean_head/classifier": "classifier"},
    parts={"mean_head": "classifier"},
    hf_classes=("BertForMeanClassification",),
    hf_modeling=("modeling_mean", "AutoModelForSequenceClassification"),
    needs=("mean_head",),
)
TOKEN_CLASSIFICATION = Head(
    name="token_head",
    layer="bert_cli.model.bert.heads:TokenClassification",
    products=lambda config, shape: [
        Product(shape.examples * shape.positions, config.hidden_size, LABELS)
    ],
    hf_names={"token_head/classifier": "classifier"},
    parts={"token_head": "classifier"},
    task="token-classification",
    hf_classes=("BertForTokenClassification",),
    needs=("token_head",),
    predictor="bert_cli.tasks.model.predictions:TokenClassification",
    is_per_position=True,
    has_label_names=True,
    synthetic="bert_cli.data.finetune.synthetic:token_labels",
)
SENTENCE_EMBEDDING = Head(
    name="embed_head",
    layer="bert_cli.model.bert.heads:SentenceEmbedding",
    before=(MEAN_POOL.name,),
    task="embed",
    hf_classes=("BertModel",),
)
# Every block after the encoder layers, by its name.
LAST_BLOCKS = {
    block.name: block
    for block in (
        GATHER,
        POOL,
        PRETRAINING,
        QUESTION_ANSWERING,
        SEQUENCE_CLASSIFICATION,
        TOKEN_CLASSIFICATION,
        MEAN_CLASSIFICATION,  # after the head whose weights look the same: only a class in config.json names it
        MEAN_POOL,
        SENTENCE_EMBEDDING,
    )
}


def heads() -> list[Head]:
    """Return every head."""
    return [block for block in LAST_BLOCKS.values() if isinstance(block, Head)]
