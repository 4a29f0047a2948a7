"""`bert average`: average the weights of a run's newest checkpoints, and compare the mean with the newest checkpoint.

The mean is often a better model than the last step of a run whose learning rate is still high (Izmailov et al.
2018), but may be a worse model. OUT has the files of a checkpoint without its optimizer and state.json, and the
settings.json of the run, by which `bert evaluate` scores it.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bert_cli.arrays import Array
from bert_cli.config.use import AverageSettings
from bert_cli.data.finetune.labels import DECISION
from bert_cli.errors import CheckpointError, ConfigError
from bert_cli.files import STATE, atomic_folder, check_new_folder
from bert_cli.processes import print_line, print_table
from bert_cli.statistics import difference, interval
from bert_cli.tasks.use import evaluate
from bert_cli.text import count
from bert_cli.train import card, checkpoint, history
from bert_cli.train.checkpoint import MODEL, OPTIMIZER, SETTINGS


def run(settings: AverageSettings) -> None:
    """Write the mean as a model's folder, and print held-out metrics of the newest checkpoint and of the mean.

    Raises ConfigError for a folder in use, CheckpointError for too few checkpoints or for different models.
    """
    folder = settings.run
    out = settings.out
    paths = checkpoint.complete_checkpoints(folder)[-settings.last :]
    if len(paths) < settings.last:
        number = count(len(paths), "complete checkpoint")
        remedy = "train with a higher --keep-checkpoints, or lower --last"
        raise CheckpointError(
            f"run ({folder})", f"has {number}, fewer than --last {settings.last}", remedy
        )
    check_new_folder(out, remedy=f"use a new one, or score it with `bert evaluate {out}`")
    draft = None
    if (kind := history.Run(folder).kind) == "pretrain":
        # Opened before anything is written, because the folder may be absent.
        draft = evaluate.draft_of(folder, paths[-1], settings.engine, settings.validation_dir)
    elif settings.validation_dir is not None:
        where = f"validation_dir ({settings.validation_dir})"
        raise ConfigError(where, f"has no effect on a run of {kind}", "leave it out")
    names = ", ".join(path.name for path in paths)
    mean = mean_of(paths)
    # Held-out examples chose the decision for the weights of one checkpoint.
    left_out = shutil.ignore_patterns(MODEL, OPTIMIZER, STATE, DECISION)
    with atomic_folder(out, (paths[-1] / MODEL).stat().st_size) as partial:
        shutil.copytree(paths[-1], partial, ignore=left_out, dirs_exist_ok=True)
        checkpoint.write_tensors(partial / MODEL, mean)
        if (folder / SETTINGS).is_file():
            shutil.copyfile(folder / SETTINGS, partial / SETTINGS)
        if (readme := partial / card.CARD).is_file():
            text = card.without(readme.read_text("utf-8"), card.CALIBRATION, card.THRESHOLDS)
            readme.write_text(f"{text}| weights | mean of {names} |\n", encoding="utf-8")
    print_line(f"average: {out} is the mean of {names}")
    if draft is None or draft.held_out is None:
        print_line("average: not scored; --validation-dir scores a run of bert pretrain")
        return
    examples = draft.order.evaluation_examples
    newest, averaged = evaluate.samples_of(draft, (paths[-1], out), examples).values()
    rows = []
    for name, before in newest.items():
        after = averaged[name]
        scores = (interval(before), interval(after), difference([after], [before]))
        rows.append((name, *(f"{score:.6f}" for score in scores)))
    print_table(("held out", paths[-1].name, "average", "difference [95 % interval]"), rows)


def mean_of(paths: Sequence[Path]) -> dict[str, Array]:
    """Return the mean of each weight in its own dtype, summed in float64.

    Raises CheckpointError for a file that is damaged or has other weights.
    """
    kinds: set[tuple[str, str, str]] = set()
    sums: dict[str, Array] = {}
    for path in paths:
        checkpoint.Saved(path).verify(but=(OPTIMIZER,))
        weights = checkpoint.read_tensors(path / MODEL)
        has = {(name, str(value.shape), str(value.dtype)) for name, value in weights.items()}
        if kinds and (different := has ^ kinds):
            problem = f"differs from {paths[0].name} in {min(different)}"
            remedy = "average checkpoints of one model: lower --last"
            raise CheckpointError(str(path / MODEL), problem, remedy)
        kinds = has
        for name, value in weights.items():
            sums[name] = sums.get(name, np.float64(0)) + value.astype(np.float64)
    return {name: (sums[name] / len(paths)).astype(weights[name].dtype) for name in sums}
