"""Random bits, judged by bounds of five deviations."""

import numpy as np

from bert_cli.data.records.random_bits import row_keys


def test_keys_differ_by_number_and_by_every_name():
    sets = [
        row_keys(np.arange(100_000), *names) for names in [(1, "a", 0), (1, "a", 1), (2, "a", 0)]
    ]
    assert len(np.unique(np.concatenate(sets))) == 300_000
    assert np.array_equal(row_keys([5], 1, "a", 0), sets[0][5:6])
    bits = np.unpackbits(sets[0].view(np.uint8)).reshape(-1, 64).mean(axis=0)
    assert np.abs(bits - 0.5).max() < 5 * 0.5 / np.sqrt(100_000)
