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
from bert_cli.statistics import Score, difference, interval
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
    number = len(paths)
    if number < settings.last:
        problem = f"has {count(number, 'complete checkpoint')}, fewer than --last {settings.last}"
        remedy = "train with a higher --keep-checkpoints or --keep-every-steps"
        if number > 1:
            remedy += f", or pass --last {number}"
        if not paths:
            remedy = "use a run's folder"
        raise CheckpointError(f"run ({folder})", problem, remedy)
    check_new_folder(out, remedy=f"use a new one, or score it with `bert evaluate {out}`")
    draft = None
    kind = history.Run(folder).kind
    if kind == "pretrain":
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
        readme = partial / card.CARD
        if readme.is_file():
            text = card.without(readme.read_text("utf-8"), card.CALIBRATION, card.THRESHOLDS)
            readme.write_text(f"{text}| weights | mean of {names} |\n", encoding="utf-8")
    print_line(f"average: {out} is the mean of {names}")
    if draft is None or draft.held_out is None:
        reason = f"only runs of pretrain are scored, not {kind}"
        if draft:
            reason = f"`bert evaluate {out} --dataset-dir RECORDS` scores it"
        print_line(f"average: not scored; {reason}")
        return
    examples = draft.order.evaluation_examples
    newest, averaged = evaluate.samples_of(draft, (paths[-1], out), examples).values()
    changes = {name: difference([averaged[name]], [newest[name]]) for name in newest}
    rows = [
        (name, f"{interval(newest[name]):.6f}", f"{interval(averaged[name]):.6f}", f"{change:.6f}")
        for name, change in changes.items()
    ]
    print_table(("held out", paths[-1].name, "average", "difference"), rows)
    change = changes["mlm_loss"]
    print_line(
        f"average: {verdict_of(change)}; the average minus the newest is {change:.6f} of mlm_loss, with its "
        f"95 % interval, n {change.n:,}"
    )


def verdict_of(change: Score) -> str:
    """Return which of the two is better by the loss of the average less that of the newest."""
    if change.low > 0:
        return "the newest is better than the average"
    if change.high < 0:
        return "the average is better than the newest"
    return "no difference between the newest and the average is shown"


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
        different = has ^ kinds
        if kinds and different:
            problem = f"differs from {paths[0].name} in {min(different)}"
            remedy = "average checkpoints of one model: lower --last"
            raise CheckpointError(str(path / MODEL), problem, remedy)
        kinds = has
        for name, value in weights.items():
            fault = checkpoint.find_fault(value)
            if fault:
                where = f"{path / MODEL}: {name}"
                raise CheckpointError(where, fault, "move it out of the run's folder")
            sums[name] = sums.get(name, np.float64(0)) + value.astype(np.float64)
    return {name: (sums[name] / len(paths)).astype(weights[name].dtype) for name in sums}
