"""Random models of transformers with a tokenizer, and their outputs in PyTorch, to judge predict and export."""

import functools
import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

WORDS = "the a cat dog sat on mat paris is in france . , ##s ##ing run un ##known we like to eat what where do not"
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS.split(" "), "[", "]", "mask"]
SHAPE = {
    "vocab_size": len(PIECES) + 3,  # as in models that are padded to a round number
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 40,
    "initializer_range": 0.3,  # so that outputs differ from text to text
}
BIO = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
LABELS = {"id2label": dict(enumerate(BIO)), "label2id": {n: i for i, n in enumerate(BIO)}}
Columns = dict[str, np.ndarray]
CLASSIFIER = "BertForSequenceClassification"
IDS = {"pad": 0, "cls": 2, "sep": 3, "bos": 2, "eos": 3}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "pretraining": ("BertForPreTraining", {}),
    "masked": ("BertForMaskedLM", {}),
    "question": ("BertForQuestionAnswering", {}),
    "text": (CLASSIFIER, {"num_labels": 3}),
    "two": (CLASSIFIER, {}),
    "score": (CLASSIFIER, {"num_labels": 1}),
    "several": (CLASSIFIER, {"num_labels": 3, "problem_type": "multi_label_classification"}),
    "token": ("BertForTokenClassification", LABELS),
    "plain_token": ("BertForTokenClassification", {"num_labels": 3}),
    "bare": ("BertModel", {}),
    "group": ("GroupBertForPreTraining", {"num_hidden_layers": 1, "conv_group_size": 8}),
    "modern": (
        "ModernBertForSequenceClassification",
        {"num_labels": 3, **{f"{name}_token_id": number for name, number in IDS.items()}},
    ),
}


def need(*names: str) -> None:
    """Skip the test without packages of the test extra."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            message = f"the package {name} is not installed; it is in the test extra"
            if os.environ.get("BERT_REQUIRE_SHARED_DATA") == "1":
                pytest.fail(message)
            pytest.skip(message)


def class_of(name: str) -> Any:
    """Return a class of transformers, or of our file for it."""
    import transformers

    from bert_cli.model import modeling_groupbert

    return getattr(modeling_groupbert if name.startswith("Group") else transformers, name)


class Models(dict[str, Path]):
    """Name of `MODELS` -> its folder, written at its first use."""

    def __init__(self, folder: Path) -> None:
        need("torch")
        self.folder = folder

    def __missing__(self, name: str) -> Path:
        import torch

        architecture, more = MODELS[name]
        torch.manual_seed(5)
        folder = self[name] = self.folder / name
        kind = class_of(architecture)
        kind(kind.config_class(**{**SHAPE, **more})).save_pretrained(folder)
        (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n", encoding="utf-8")
        (folder / "tokenizer_config.json").write_text('{"do_lower_case": true}')
        return folder


@functools.cache
def opened(folder: Path, architecture: str) -> Any:
    return class_of(architecture).from_pretrained(folder).eval()


def in_torch(folder: Path, architecture: str, columns: Columns) -> Columns:
    import torch

    with torch.no_grad():
        inputs = {name: torch.from_numpy(column) for name, column in columns.items()}
        outputs = opened(folder, architecture)(**inputs)
    return {name: value.numpy() for name, value in outputs.items()}


def one_in_torch(
    folder: Path, architecture: str, ids: list[int], segments: list[int] | None = None
) -> Columns:
    """Return the outputs for one example without padding."""
    columns = {"input_ids": np.array([ids]), "attention_mask": np.ones((1, len(ids)), np.int64)}
    columns["token_type_ids"] = np.array([segments or [0] * len(ids)])
    return {name: value[0] for name, value in in_torch(folder, architecture, columns).items()}


def ids_of(*pieces: str) -> list[int]:
    return [PIECES.index(piece) for piece in " ".join(pieces).split()]


def change_weights(folder: Path, out: Path, changes: dict[str, Any]) -> Path:
    """Copy a model; `changes` has a function of an array, or None to leave it out, by name of the tensor."""
    # state.json has the checksums of a checkpoint's files.
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("state.json"))
    tensors = load_file(out / "model.safetensors")
    for name, change in changes.items():
        value = tensors.pop(name)
        if change is not None:
            tensors[name] = np.ascontiguousarray(change(value))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out
