"""The decoder of TSDAE: its dropout. Its loss and gradients are compared with PyTorch's in test_embed.py."""

import numpy as np
import tensorflow as tf

from bert_cli.config.shape import BertConfig
from bert_cli.model import fused
from bert_cli.model.bert import build_blocks


def test_no_two_dropouts_of_encoder_and_decoder_have_the_same_mask(monkeypatch):
    """They share their layers, whose dropout ids are those of the encoder."""
    config = BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
    )
    blocks = build_blocks(
        config, last_blocks=("mean_pool", "denoise_head"), seed=1, policy="float32"
    )
    *body, head = (block for _, block in blocks)
    seeds, keep_mask = [], fused.keep_mask

    def recorded(shape, rate, seed):
        seeds.append(int(seed))
        return keep_mask(shape, rate, seed)

    monkeypatch.setattr(fused, "keep_mask", recorded)
    key, ids = tf.constant([7, 3]), np.ones((2, 5), np.int32)
    batch = {"input_ids": ids, "segment_ids": ids * 0, "input_mask": ids}
    hidden = None
    for block in body:
        hidden = block(hidden, batch, key)
    encoder = len(seeds)
    head._decode(ids, hidden[:, :1], key)
    # The decoder has those of the encoder and one after each attention to the vector.
    assert encoder >= 1 + 3 * 2 and len(seeds) == 2 * encoder + 2
    assert len({*seeds}) == len(seeds)
