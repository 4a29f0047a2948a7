"""Tasks that label a text or a pair of texts: what GLUE, CLUE and a person's own table share.

Examples become features through the cache; the head has an output for each label, or one for a
number. Which files they come from and how they are scored is each command's own.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bert_cli.config.finetune import FinetuneSettings
from bert_cli.data.finetune.examples import TextExamples, write_lines
from bert_cli.data.finetune.features import (
    Features,
    arrays_of,
    cached,
    encode_texts,
    features_of,
    texts_hash,
)
from bert_cli.data.records.tokenizer import TextTokenizer
from bert_cli.train.metrics import print_line


def features_of_texts(
    examples: TextExamples, name: str, settings: FinetuneSettings, tokenizer: TextTokenizer
) -> Features:
    """The examples as the model reads them; says how many there are and what was left out or cut."""
    labels: dict[str, npt.NDArray[Any]] = {}
    if examples.labels is not None:
        labels["labels"] = examples.labels

    def build() -> Mapping[str, npt.NDArray[Any]]:
        features, cut = encode_texts(
            tokenizer,
            examples.first,
            examples.second,
            labels,
            max_seq_length=settings.max_seq_length,
        )
        return {**arrays_of(features), "cut": np.array(cut)}

    made_from = {
        "texts": texts_hash(examples.first, examples.second or []),
        "labels": None if examples.labels is None else examples.labels.tolist(),
        "tokenizer": tokenizer.fingerprint,
        "max_seq_length": settings.max_seq_length,
    }
    arrays, _ = cached(settings.cache_dir, made_from, build)
    told = [f"{count:,} {what}" for what, count in examples.remarks.items()]
    if cut := int(arrays["cut"]):
        told.append(f"{cut:,} longer than {settings.max_seq_length} tokens, cut")
    print_line(f"{name}: {len(examples):,} examples" + "".join(f"; {remark}" for remark in told))
    return features_of(arrays)


def predictions_of(
    logits: npt.NDArray[np.float32], label_names: Sequence[str] | None
) -> npt.NDArray[Any]:
    """The label numbers [n], or for regression the numbers themselves, from logits [n, L]."""
    return logits[:, 0] if label_names is None else np.argmax(logits, axis=1)


def write_predictions(
    folder: Path, name: str, examples: TextExamples, logits: npt.NDArray[np.float32]
) -> None:
    """Write what is said of each example beside its text, as JSON lines; of "validation_x" with _x in the name."""
    path = folder / f"predictions{name.removeprefix('validation')}.jsonl"
    write_lines(path, (json.dumps(row) for row in _rows(examples, logits)))
    print_line(f"{name}: {len(examples):,} predictions in {path}")


def _rows(
    examples: TextExamples, logits: npt.NDArray[np.float32]
) -> Iterator[Mapping[str, object]]:
    assert examples.labels is not None
    names, second = examples.label_names, examples.second
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    for number, text in enumerate(examples.first):
        row: dict[str, object] = {"id": examples.ids[number], "text": text}
        if second is not None:
            row["second"] = second[number]
        label = examples.labels[number]
        if names is None:
            # As it was read: 3.8, and not the nearest float32 in 16 digits.
            yield row | {"label": float(str(label)), "predicted": float(logits[number, 0])}
            continue
        best = int(np.argmax(shares[number]))
        share = round(float(shares[number, best]), 6)
        yield row | {"label": names[int(label)], "predicted": names[best], "probability": share}
