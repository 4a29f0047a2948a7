# Copyright (c) 2026 The bert-cli authors. MIT License: free to use, change and pass on, no warranty.
"""A classifier of the mean over a text's tokens, for PyTorch and transformers.

`bert` copies this file, which it never imports, beside the weights:
`AutoModelForSequenceClassification.from_pretrained(FOLDER, trust_remote_code=True)` opens them. Shapes: B examples, S
sequence length, D hidden size, L labels.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, BertPreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput


class BertForMeanClassification(BertPreTrainedModel):
    """BERT without a pooler, and a dense layer on the mean of its outputs."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        token_type_ids: Any = None,
        labels: Any = None,
        **options: Any,
    ) -> SequenceClassifierOutput:
        """Return logits [B, L] of texts [B, S], and with `labels` [B] the mean cross entropy."""
        columns = {"attention_mask": attention_mask, "token_type_ids": token_type_ids}
        hidden_BSD: Tensor = self.bert(input_ids, **columns, **options).last_hidden_state
        if attention_mask is None:
            attention_mask = torch.ones(hidden_BSD.shape[:2], device=hidden_BSD.device)
        mask_BS1 = attention_mask[:, :, None].to(hidden_BSD.dtype)
        logits_BL = self.classifier((hidden_BSD * mask_BS1).sum(1) / mask_BS1.sum(1))
        loss = None if labels is None else nn.functional.cross_entropy(logits_BL, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits_BL)
