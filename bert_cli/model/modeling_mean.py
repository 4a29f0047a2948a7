# Copyright (c) 2026 The bert-cli authors. MIT License: free to use, change and pass on, no warranty.
"""A classifier of the mean over a text's tokens, for PyTorch and transformers.

`bert` copies this file, which it never imports, beside the weights:
`AutoModelForSequenceClassification.from_pretrained(FOLDER, trust_remote_code=True)` opens them. Shapes: as in `model`.
"""

from typing import Any

import torch
from torch import nn
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
        self, input_ids: Any, attention_mask: Any = None, token_type_ids: Any = None, **options: Any
    ) -> SequenceClassifierOutput:
        """Return logits [B, L] of texts [B, S]; the mask is 0 for padding."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        hidden_BSD = self.bert(input_ids, mask, token_type_ids, **options).last_hidden_state
        mask_BS1 = mask[:, :, None].to(hidden_BSD.dtype)
        mean_BD = (hidden_BSD * mask_BS1).sum(1) / mask_BS1.sum(1)
        return SequenceClassifierOutput(logits=self.classifier(mean_BD))
