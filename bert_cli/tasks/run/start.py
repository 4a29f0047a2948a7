"""Where a run starts: its newest checkpoint, else the weights that the settings name, else new weights.

Also the format of its checkpoints.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bert_cli.config.pretrain import PretrainSettings
from bert_cli.config.training import TrainSettings
from bert_cli.data.finetune.embeddings import embedding_files
from bert_cli.data.tokens.tokenizer import TokenizerFolder
from bert_cli.model.arithmetic import scaling
from bert_cli.model.names import hf
from bert_cli.parallel.engine import Weight
from bert_cli.tasks.model.models import (
    TF1_CONFIG,
    Source,
    find_source,
    load_weights,
    shapes_of,
)
from bert_cli.text import count
from bert_cli.train import checkpoint
from bert_cli.train.checkpoint import Folder


@dataclass(frozen=True)
class Start:
    """The state from which a run starts, and its model on disk."""

    folder: Folder
    source: Source | None
    """The model whose shape, tokenizer and perhaps weights the run has; None for new weights."""


def find_start(order: PretrainSettings) -> Start:
    """Return the start of a run: its newest checkpoint, else the model that the order names, else new weights.

    Raises CheckpointError if there is no such model.
    """
    folder = Folder(order.save_ckpt_path)
    continued = folder.newest
    if continued:
        return Start(folder, find_source(str(folder.path), "--save-ckpt-path", continued))
    name = order.pretrained_ckpt_path
    return Start(folder, None if name is None else find_source(name))


# --- the format of its checkpoints


def factors_of(order: TrainSettings) -> scaling.Table:
    """Return the factors of Unit Scaling, none without it."""
    if not order.unit_scaling:
        return {}
    return scaling.factors(order.bert_config, order.shape)


def disk_format(
    order: TrainSettings,
    weights: Mapping[str, Weight],
    tokenizer: TokenizerFolder | None,
    label_names: Sequence[str] | None = None,
    epoch_size: int | None = None,
) -> checkpoint.Format:
    """Return the format of a model on disk: Hugging Face's names, config and tokenizer files."""
    shapes = shapes_of(weights)
    shape = order.bert_config
    table = factors_of(order)
    # Folded weights of Unit Scaling are float32, so that folding them back gives the same bits.
    dtype = "float32"
    if order.precision == "float16" and not table:
        dtype = "float16"
    config = hf.hf_config(shape, dtype=dtype, head=order.head, label_names=label_names)
    if table:
        config["scaling"] = order.unit_scaling
    files: dict[str, bytes] = {}
    if tokenizer:
        files |= tokenizer.for_model(shape, fills_masks=order.head.fills_masks)
        ids = tokenizer.special_ids
        config |= {name: ids[name] for name in ids if name in config}
    if order.pools_by is not None:
        files |= embedding_files(order.pools_by, shape.hidden_size, order.max_seq_length)
    return checkpoint.Format(
        to_disk=lambda weights: hf.to_hf(scaling.folded(weights, table), shape),
        from_disk=lambda tensors: scaling.folded(hf.from_hf(tensors, shapes, shape)[0], table, -1),
        config=config,
        files=files | hf.class_files(shape, order.head),
        epoch_size=epoch_size,
    )


def load_pretrained(
    source: Source,
    order: TrainSettings,
    weights: Mapping[str, Weight],
    labels: Mapping[str, str] | None = None,
) -> str:
    """Load the weights of a model and return a description.

    A classifier for other `labels` (id2label of a config.json) is left out.
    """
    hf.check_hf_config(source.described, order.bert_config, where=source.where)
    scaling.check_trained_with(source.described, order.unit_scaling, source.where)
    # Labels of Google's checkpoints have no names to compare.
    is_unnamed = Path(source.where).name == TF1_CONFIG
    same_labels = labels is None or is_unnamed or source.described.get("id2label") == labels
    new, left_out = load_weights(source, weights, same_labels=same_labels, table=factors_of(order))
    parts = [f"starts from the weights in {source.folder}"]
    trained = source.described.get("scaling")
    if trained:
        parts.append(f"trained with scaling {trained}")
    if source.replaced:
        how = "each starting as the mean of the embeddings of the pieces it replaces"
        parts.append(f"{count(len(source.replaced), 'new piece')}, {how}")
    if new:
        parts.append(f"new weights from the seed: {', '.join(new)}")
    if left_out:
        parts.append(f"not loaded: {', '.join(left_out)}")
    return "; ".join(parts)
