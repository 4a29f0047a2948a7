"""`bert pretrain --probe`: score minimal pairs of sentences with the model while it trains.

The pseudo-log-likelihood of a sentence is the sum over its tokens of log p(token | sentence with that token masked)
(Salazar et al. 2020, "Masked Language Model Scoring", equation 1). It should be higher for the good sentence of a pair.
All copies of all sentences, each with one token masked, are one list of rows that the processes divide.

Shapes: n pairs, R rows, B rows of a batch, S positions, V vocabulary size.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.special import log_softmax

from bert_cli.data.examples.reader import MULTIPLE
from bert_cli.data.finetune import tables
from bert_cli.data.finetune.features import Features, encode_texts
from bert_cli.data.io.rows import check_columns
from bert_cli.data.tokens.tokenizer import TokenizerFolder
from bert_cli.errors import DataError
from bert_cli.parallel.engine import Engine
from bert_cli.statistics import Sample, identify, sample_of
from bert_cli.tasks.run.opened import UNLIMITED

ENGLISH = "english"
SHIPPED = Path(__file__).with_name("probe_english.jsonl")
NAMES = ("good", "bad")


@dataclass(frozen=True)
class Probe:
    """Minimal pairs as tokens, the good sentence before the bad sentence, and the shape of a batch of rows."""

    sentences: Features
    mask: int
    """The id of [MASK]."""
    sequence_length: int
    batch_size: int

    @property
    def rows(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the sentence and the masked position of each row [R]; [CLS] and [SEP] are never masked."""
        counts = self.sentences.lengths - 2
        starts = np.cumsum(counts) - counts
        sentences = np.repeat(np.arange(len(counts)), counts)
        return sentences, np.arange(len(sentences)) - starts[sentences] + 1

    def describe(self) -> str:
        """Return the number of pairs, and of masked sentences that an evaluation reads, as text."""
        rows = len(self.rows[0])
        pairs = len(self.sentences) // 2
        return f"{pairs:,} pairs, {rows:,} masked sentences of up to {self.sequence_length} tokens"


def read_probe(
    name: str, records: TokenizerFolder, sequence_length: int, micro_batch_size: int
) -> Probe:
    """Read the pairs of a file with the tokenizer of the records; a batch has the tokens of a micro-batch.

    Raises DataError, with the line, for an invalid pair.
    """
    room = sequence_length - 2
    path = SHIPPED if name == ENGLISH else Path(name)
    if not path.is_file():
        remedy = f"use a file of JSON lines, or {ENGLISH} for the pairs of this tool"
        raise DataError(f"probe ({name})", "no such file", remedy)
    lines = list(tables.json_lines(tables.read_lines(path), str(path)))
    for where, row in lines:
        check_columns(where, NAMES, row, 'write {"good": "...", "bad": "..."}')
    texts = [tables.text_of(row, name, where) for where, row in lines for name in NAMES]
    tokenizer = records.tokenizer
    sentences, _ = encode_texts(tokenizer, texts, None, {}, max_seq_length=UNLIMITED)
    tokens = np.split(sentences.tokens, sentences.ends[:-1])
    for number, (where, _) in enumerate(lines):
        good, bad = tokens[2 * number : 2 * number + 2]
        for name, length in zip(NAMES, (len(good) - 2, len(bad) - 2), strict=True):
            if not 1 <= length <= room:
                problem = f"'{name}' has {length} tokens, not 1 to {room} as max_seq_length {room + 2} allows"
                raise DataError(where, problem, "shorten it, or leave out the pair")
        if np.array_equal(good, bad):
            pieces = " ".join(tokenizer.pieces[token] for token in good[1:-1])
            problem = f"'good' and 'bad' are the same tokens in {records.folder} ({pieces})"
            raise DataError(where, problem, "change one, or leave out the pair")
    # One short length and one batch size, so that there is one trace.
    longest = -(-int(sentences.lengths.max()) // MULTIPLE) * MULTIPLE
    length = min(longest, sequence_length)
    size = micro_batch_size * sequence_length // length
    return Probe(sentences, tokenizer.special.mask, length, size)


def log_likelihoods(engine: Engine, probe: Probe) -> npt.NDArray[np.float64]:
    """Return the pseudo-log-likelihood of the good and the bad sentence of each pair [n, 2]."""
    engine.gather_weights()
    sentences_R, positions_R = probe.rows
    totals = np.zeros(len(probe.sentences))
    size = probe.batch_size
    group = engine.group
    for first in range(0, len(sentences_R), size)[group.rank :: group.world_size]:
        # Filled up by repeating its rows: another number of rows would be traced again.
        rows = np.arange(first, min(first + size, len(sentences_R)))
        filled = np.resize(rows, size)
        columns = probe.sentences.batch(sentences_R[filled], probe.sequence_length)
        positions_B1 = positions_R[filled, None].astype(np.int32)
        labels_B1 = np.take_along_axis(columns["input_ids"], positions_B1, axis=1)
        np.put_along_axis(columns["input_ids"], positions_B1, probe.mask, axis=1)
        scores_B1V, *_ = engine.predict(columns | {"masked_lm_positions": positions_B1})
        logs_BV = log_softmax(scores_B1V[:, 0], axis=-1)
        logs_B = np.take_along_axis(logs_BV, labels_B1, axis=1)[:, 0]
        np.add.at(totals, sentences_R[rows], logs_B[: len(rows)])
    return group.all_reduce(totals).reshape(-1, 2)


def accuracy(likelihoods: npt.NDArray[np.float64], fingerprint: str = "") -> Sample:
    """Return the fraction of pairs [n, 2] with a likelier good sentence; a tie counts half."""
    pairs = identify(f"{fingerprint} {number}" for number in range(len(likelihoods)))
    right = np.sign(likelihoods[:, 0] - likelihoods[:, 1]) / 2 + 0.5
    return sample_of(pairs, "ratio", right, 1.0)
