"""Repetition of text in records, estimated from runs of N tokens in a sample.

Equal records show copies of documents; equal runs of tokens also show copies of lines and paragraphs, which begin at
other positions of a record. Neither shows in the loss of the first million tokens (docs/troubleshooting.md).

Shapes: n examples, S positions, G runs of N tokens.
"""

import numpy as np

from bert_cli.data.random import GOLDEN, mix
from bert_cli.data.records.formats import Batch
from bert_cli.data.records.masking import unmasked

N = 8
# Examples of the sample, and repetitions without a warning: articles have 0.3, articles repeated ten times 4.
TEXT_SAMPLE = 4000
MAX_REPEATS = 2.0
WITHOUT_COPIES = "remove the copies of documents (`bert preprocess --deduplicate`) or lines"
# Fewer runs, or a lower fraction of repeated runs, may be chance: 0.0001 in 2,000 of 500,000 Wikipedia records.
LEAST_RUNS = 1000
LEAST_RATE = 0.005


def repeats(rows: Batch, records: int) -> float:
    """Return the mean number of further occurrences of a run of N tokens in a corpus, from a random sample `rows`.

    For text with c copies in different records it returns (c - 1) / 2 from a small sample and c - 1 from all `records`.
    """
    tokens_nS = unmasked(rows).astype(np.uint64)
    length = max(0, tokens_nS.shape[1] - N + 1)
    hashes = np.zeros((len(tokens_nS), length), np.uint64)
    for offset in range(N):
        # After N rounds a hash stands for the run of N tokens that begins there.
        hashes = mix(hashes + tokens_nS[:, offset : offset + length] * GOLDEN + np.uint64(1))
    is_text = rows["input_mask"][:, N - 1 :] > 0
    runs_G = hashes[is_text]
    if len(runs_G) < LEAST_RUNS:
        return 0.0
    example_G = np.nonzero(is_text)[0].astype(np.uint64)
    different = len(np.unique(runs_G))
    # A run counts once for each example: within one a refrain may repeat.
    in_examples = len(np.unique(runs_G + mix(example_G + GOLDEN)))
    again = in_examples / different - 1
    if again < LEAST_RATE:
        again = 0.0
    # A copy in another record is in the sample only if that record is.
    return len(runs_G) / in_examples * (1 + again * max(1.0, records / len(tokens_nS))) - 1
