"""The initial state of a run, and the format of its checkpoints.

A run starts from its newest complete checkpoint, else from the weights that the settings name, else from the seed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from bert_cli.data.finetune.embeddings import embedding_files
from bert_cli.data.tokens.tokenizer import TokenizerFolder
from bert_cli.errors import CheckpointError
from bert_cli.model import hf, scaling
from bert_cli.parallel.engine import Weight
from bert_cli.planning.workload import Workload
from bert_cli.tasks.run.build import Run, factors_of
from bert_cli.tasks.run.models import TF1_CONFIG, Source
from bert_cli.text import count
from bert_cli.train import checkpoint


def disk_format(
    work: Workload,
    weights: Mapping[str, Weight],
    tokenizer: TokenizerFolder | None,
    label_names: Sequence[str] | None = None,
    pooling: str | None = None,
    epoch_size: int | None = None,
) -> checkpoint.Format:
    """Return the format of a model on disk: Hugging Face's names, config and tokenizer files.

    `pooling` says how a model of vectors makes the vector of a text.
    """
    shapes = _shapes(weights)
    shape = work.model
    table = factors_of(work)
    dtype = "float16" if work.precision == "float16" and not table else "float32"
    config = hf.hf_config(shape, dtype=dtype, head=work.head, label_names=label_names)
    if table:
        config["scaling"] = work.unit_scaling
    files: dict[str, bytes] = {}
    if tokenizer:
        files |= tokenizer.for_model(shape, fills_masks=work.head.fills_masks)
        ids = tokenizer.special_ids
        config |= {name: ids[name] for name in ids if name in config}
    if pooling is not None:
        files |= embedding_files(pooling, shape.hidden_size, work.max_seq_length)
    return checkpoint.Format(
        to_disk=lambda weights: hf.to_hf(scaling.folded(weights, table), shape),
        from_disk=lambda tensors: scaling.folded(hf.from_hf(tensors, shapes, shape)[0], table, -1),
        config=config,
        files=files | hf.class_files(shape, work.head),
        epoch_size=epoch_size,
        optimizer=work.optimizer_kind,
    )


def load_state(run: Run) -> str:
    """Load the initial state of a run, from its own checkpoint if it has one, else as resolved.

    Returns a description. Raises CheckpointError if the state does not fit.
    """
    job = run.job
    start = job.start
    # Asked under the folder's lock: another process may have saved before.
    newest = start.folder.newest
    saved = newest or start.branch
    fixed = job.fixed
    if saved is not None:
        is_branch = newest is None
        checkpoint.resume(saved, run.state, run.form, fixed, job.record, is_branch=is_branch)
        if is_branch:
            return f"continues {saved.path} with a decaying learning rate"
        return f"continues from {saved.path} (step {run.state.step:,})"
    if fixed.get("decay_from"):
        problem = "the checkpoint that the run would continue was removed meanwhile"
        raise CheckpointError(str(start.folder.path), problem, "start the run again")
    if start.source is not None:
        labels = run.form.config.get("id2label")
        description = load_pretrained(start.source, job.work, run.state.weights, labels)
        return f"{description}; the optimizer is new"
    return f"starts with new weights from seed {job.work.seed}"


def load_pretrained(
    source: Source,
    work: Workload,
    weights: Mapping[str, Weight],
    labels: Mapping[str, str] | None = None,
) -> str:
    """Load the weights of a model and return a description.

    A classifier for other `labels` (id2label of a config.json) is left out.
    """
    hf.check_hf_config(source.described, work.model, where=source.where)
    scaling.check_trained_with(source.described, work.unit_scaling, source.where)
    # Labels of Google's checkpoints have no names to compare.
    is_unnamed = Path(source.where).name == TF1_CONFIG
    same_labels = labels is None or is_unnamed or source.described.get("id2label") == labels
    new, left_out = load_weights(source, weights, same_labels=same_labels, table=factors_of(work))
    parts = [f"starts from the weights in {source.folder}"]
    if trained := source.described.get("scaling"):
        parts.append(f"trained with scaling {trained}")
    if source.replaced:
        how = "each starting as the mean of the embeddings of the pieces it replaces"
        parts.append(f"{count(len(source.replaced), 'new piece')}, {how}")
    if new:
        parts.append(f"new weights from the seed: {', '.join(new)}")
    if left_out:
        parts.append(f"not loaded: {', '.join(left_out)}")
    return "; ".join(parts)


def load_weights(
    source: Source,
    weights: Mapping[str, Weight],
    *,
    same_labels: bool = True,
    table: scaling.Table | None = None,
) -> tuple[list[str], list[str]]:
    """Load a model's weights; return the parts that it lacks and the parts that were left out."""
    shapes = _shapes(weights)
    needed = {n: shape for n, shape in shapes.items() if same_labels or "/classifier/" not in n}
    config = source.config
    tensors, left_out = hf.fitting(source.tensors(), needed, config)
    values, new = hf.from_hf(tensors, shapes, config, where=str(source.weights))
    for name, value in scaling.folded(values, table or {}, -1).items():
        if fault := checkpoint.find_fault(value):
            raise CheckpointError(f"{source.weights}: {name}", fault, "use another checkpoint")
        weights[name].assign(value)
    return new, left_out


def _shapes(weights: Mapping[str, Weight]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in weights.items()}
