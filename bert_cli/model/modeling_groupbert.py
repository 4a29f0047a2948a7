# Copyright (c) 2026 The bert-cli authors. MIT License: free to use, change and pass on, no warranty.
"""GroupBERT (Chelombiev et al. 2021, arXiv 2106.05822) for PyTorch and transformers.

`bert` copies this file, which it never imports, beside the weights of a GroupBERT:
`AutoModelForMaskedLM.from_pretrained(FOLDER, trust_remote_code=True)` opens them. A layer has four residual modules,
x + dropout(f(LayerNorm(x))): convolution, feed-forward, attention, feed-forward. Embeddings, pooler, heads and losses
are those of transformers' BERT. Shapes: B examples, S sequence length, D hidden size.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import BertConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.models.bert import modeling_bert as bert


class GroupBertConfig(BertConfig):
    """BERT's sizes and those of the groups."""

    model_type = "groupbert"

    conv_kernel_size: int = 7
    conv_group_size: int = 16
    ffn_groups: int = 4


class GroupedLinear(nn.Linear):
    """Dense in groups: the g-th part of the outputs reads the g-th part of the inputs."""

    def __init__(self, inputs: int, outputs: int, groups: int) -> None:
        super().__init__(inputs // groups, outputs)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, inputs] -> [B, S, outputs]."""
        parts = zip(x.chunk(self.groups, -1), self.weight.chunk(self.groups), strict=True)
        return torch.cat([part @ weight.T for part, weight in parts], -1) + self.bias


class GroupBertConvolution(nn.Module):
    """Gated linear unit, grouped convolution over the positions, LayerNorm, Swish, dense."""

    def __init__(self, config: GroupBertConfig) -> None:
        super().__init__()
        size = config.hidden_size
        kernel = config.conv_kernel_size
        groups = size // config.conv_group_size
        self.layer_norm = nn.LayerNorm(size, config.layer_norm_eps)
        self.value, self.gate, self.output = (nn.Linear(size, size) for _ in range(3))
        self.grouped = nn.Conv1d(size, size, kernel, padding=kernel // 2, groups=groups)
        self.inner_norm = nn.LayerNorm(size, config.layer_norm_eps)

    def forward(self, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        """[B, S, D] -> [B, S, D]; positions where `padding_mask` [B, S] is 0 are not read."""
        x = self.layer_norm(x)
        x = self.value(x) * torch.sigmoid(self.gate(x))
        if padding_mask is not None:
            x = x * padding_mask[:, :, None].to(x.dtype)
        x = self.grouped(x.transpose(1, 2)).transpose(1, 2)
        return self.output(nn.functional.silu(self.inner_norm(x)))


class GroupBertFeedForward(nn.Module):
    """Dense D -> F, GELU, grouped F -> D, and a dense layer that mixes the groups where there are several."""

    def __init__(self, config: GroupBertConfig) -> None:
        super().__init__()
        size = config.hidden_size
        inner = config.intermediate_size
        groups = config.ffn_groups
        self.layer_norm = nn.LayerNorm(size, config.layer_norm_eps)
        self.inner = nn.Linear(size, inner)
        self.grouped = GroupedLinear(inner, size, groups)
        self.mixer = nn.Linear(size, size) if groups > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        return self.mixer(self.grouped(nn.functional.gelu(self.inner(self.layer_norm(x)))))


class GroupBertAttention(bert.BertSelfAttention):
    """BERT's attention between a LayerNorm and its output."""

    def __init__(self, config: GroupBertConfig) -> None:
        super().__init__(config)
        self.layer_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[B, S, D] -> [B, S, D] and, of eager attention, the probabilities."""
        context, probabilities = super().forward(self.layer_norm(x), mask)
        return self.output(context), probabilities


class GroupBertLayer(GradientCheckpointingLayer):
    """The four residual modules."""

    def __init__(self, config: GroupBertConfig) -> None:
        super().__init__()
        self.convolution = GroupBertConvolution(config)
        self.feed_forward_1 = GroupBertFeedForward(config)
        self.self_attention = GroupBertAttention(config)
        self.feed_forward_2 = GroupBertFeedForward(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, mask: Tensor | None, padding_mask: Tensor | None) -> Tensor:
        """[B, S, D] -> [B, S, D]; `mask` is that of the attention."""
        x = x + self.dropout(self.convolution(x, padding_mask))
        x = x + self.dropout(self.feed_forward_1(x))
        x = x + self.dropout(self.self_attention(x, mask)[0])
        return x + self.dropout(self.feed_forward_2(x))


class GroupBertEncoder(nn.Module):
    """The layers and the LayerNorm after the last one."""

    def __init__(self, config: GroupBertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(GroupBertLayer(config) for _ in range(config.num_hidden_layers))
        self.final_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, x: Tensor, attention_mask: Tensor | None, **options: Any) -> Any:
        """[B, S, D] -> [B, S, D], in transformers' class."""
        for layer in self.layer:
            x = layer(x, attention_mask, options["padding_mask"])
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self.final_norm(x))


class GroupBertPreTrained(bert.BertPreTrainedModel):
    """A head of BERT on a GroupBERT; combined with each class of transformers below."""

    config: GroupBertConfig
    _no_split_modules = ("BertEmbeddings", "GroupBertLayer")
    _can_record_outputs: ClassVar = dict(
        hidden_states=GroupBertLayer, attentions=GroupBertAttention
    )

    def __init__(self, config: GroupBertConfig) -> None:
        # BERT's body is only replaced. `from_pretrained` builds it without memory.
        super().__init__(config)
        self.bert = GroupBertModel(config, add_pooling_layer=self.bert.pooler is not None)
        self.post_init()


class GroupBertModel(GroupBertPreTrained, bert.BertModel):
    """The encoder, with a pooler if a head reads one."""

    def __init__(self, config: GroupBertConfig, add_pooling_layer: bool = True) -> None:
        bert.BertModel.__init__(self, config, add_pooling_layer)
        self.encoder = GroupBertEncoder(config)
        self.post_init()

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, *more: Any, **options: Any
    ) -> Any:
        """Return transformers' outputs for [B, S]; the mask, 0 for padding, also goes to the convolutions."""
        options["padding_mask"] = attention_mask
        return super().forward(input_ids, attention_mask, *more, **options)


class GroupBertForPreTraining(GroupBertPreTrained, bert.BertForPreTraining):
    """Masked-LM and next-sentence heads."""


class GroupBertForMaskedLM(GroupBertPreTrained, bert.BertForMaskedLM):
    """Masked-LM head; other pre-training weights in the checkpoint are ignored."""

    _keys_to_ignore_on_load_unexpected = [r"bert\.pooler", r"cls\.seq_relationship"]  # noqa: RUF012


class GroupBertForQuestionAnswering(GroupBertPreTrained, bert.BertForQuestionAnswering):
    """Span head."""


class GroupBertForSequenceClassification(GroupBertPreTrained, bert.BertForSequenceClassification):
    """Classifier or regression of a text."""


class GroupBertForTokenClassification(GroupBertPreTrained, bert.BertForTokenClassification):
    """Classifier of tokens."""
