"""The model card of an export."""

import math
from collections.abc import Sequence
from pathlib import Path

from bert_cli import __version__
from bert_cli.config.use import ExportSettings
from bert_cli.data.finetune import embeddings
from bert_cli.data.finetune.labels import read_decision
from bert_cli.errors import CheckpointError
from bert_cli.files import STATE, JSONObject, read_json
from bert_cli.model.build import named_weights
from bert_cli.tasks.model.opened import OpenedModel
from bert_cli.train import card, history
from bert_cli.train.checkpoint import Folder


def write_card(
    settings: ExportSettings, model: OpenedModel, folder: Path, notes: Sequence[str] = ()
) -> None:
    """Write the card of an export: its class, size and notes, and the training and scores of the checkpoint."""
    source = model.source.folder
    flags = f"--format {settings.format}"
    if settings.precision != "float32":
        flags += f" --precision {settings.precision}"
    written = f"Written by `bert export {flags}` of bert-cli {__version__}."
    sections = [written, *(f"{note[0].upper()}{note[1:]}." for note in notes)]
    sections += training_sections(source)
    names = named_weights(model.blocks).items()
    weights = [weight for name, weight in names if not name.startswith(tuple(model.new))]
    text = card.model_card(
        read_json(folder / "config.json", JSONObject, CheckpointError, ""),
        sum(math.prod(weight.shape) for weight in weights),
        sections,
        is_embedding=(source / embeddings.MODULES).is_file(),
        runtime=settings.format,
        license_id=settings.license,
    )
    (folder / card.CARD).write_text(text, encoding="utf-8")


def training_sections(source: Path) -> list[str]:
    """Return the sections on the training of a model's folder, from its state or from its older card.

    They have the scores of a checkpoint whose run's folder has some.
    """
    path = source / card.CARD
    text = path.read_text("utf-8") if path.is_file() else ""
    if not (source / STATE).is_file():
        _, title, older = text.partition(card.TRAINING)
        # A model that no run of this tool trained has at most an older card.
        if not text:
            return []
        return [title + older]
    state = read_json(source / STATE, JSONObject, CheckpointError, "copy it again")
    if "fixed" not in state:
        return []
    run = history.Run(source.parent)
    scores = {name: f"{score:.4f}" for name, score in run.intervals.items()}
    if Folder(run.folder).best_checkpoint != source or not scores:
        held_out = history.held_out(run.steps.get(state["step"], {}))
        scores = {name: f"{value:.4f}" for name, value in held_out.items()}
    scored = [card.table("## Scores on held-out examples\n", scores)] if scores else []
    _, title, compared = text.partition(card.BASELINES)
    decided = card.decision_section(read_decision(source).model_dump(exclude={"temperature"}))
    return [card.training_section(state), decided, title + compared, *scored]
