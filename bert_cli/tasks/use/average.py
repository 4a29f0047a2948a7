"""`bert average`: average the weights of a run's newest checkpoints, and compare the mean with the newest checkpoint.

The mean is often a better model than the last step of a run whose learning rate is still high (Izmailov et al.
2018), but may be a worse model. OUT has the files of a checkpoint without its optimizer and state.json, and the
settings.json of the run, by which `bert evaluate` scores it.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from bert_cli.config.use import AverageSettings
from bert_cli.errors import CheckpointError, ConfigError
from bert_cli.files import STATE, atomic_folder, check_new_folder, origin_of
from bert_cli.processes import print_line, print_table
from bert_cli.statistics import difference, interval
from bert_cli.tasks.run import corpora
from bert_cli.tasks.use import evaluate
from bert_cli.text import count
from bert_cli.train import card, checkpoint, history
from bert_cli.train.checkpoint import MODEL, OPTIMIZER, SETTINGS
from bert_cli.train.loop import Array


def run(settings: AverageSettings) -> None:
    """Write the mean as a model's folder, and print held-out metrics of the newest checkpoint and of the mean.

    Raises ConfigError for a folder in use, CheckpointError for too few checkpoints or for different models.
    """
    folder = settings.run
    out = settings.out
    paths = checkpoint.complete_checkpoints(folder)[-settings.last :]
    if len(paths) < settings.last:
        problem = (
            f"has {count(len(paths), 'complete checkpoint')}, fewer than --last {settings.last}"
        )
        remedy = "train with a higher --keep-checkpoints or --keep-every-steps"
        remedy += "" if len(paths) < 2 else f", or give --last {len(paths)}"
        remedy = remedy if paths else "give a run's folder"
        raise CheckpointError(f"run ({folder})", problem, remedy)
    # The records that score it may be named later.
    origin = origin_of(settings.model_copy(update={"validation_dir": None}), *paths)
    is_complete = check_new_folder(out, origin)
    order = held_out = None
    if (kind := history.Run(folder).kind) == "pretrain":
        order = evaluate.order_of(folder, settings.engine)
        if settings.validation_dir is not None:
            order = order.model_copy(update={"validation_dir": settings.validation_dir})
        # Opened before anything is written, because the folder may be absent.
        held_out = corpora.open_held_out(order)
    elif settings.validation_dir is not None:
        where = f"validation_dir ({settings.validation_dir})"
        raise ConfigError(where, f"has no effect on a run of {kind}", "leave it out")
    names = ", ".join(path.name for path in paths)
    if not is_complete:
        _write(out, paths[-1], names, mean_of(paths), origin)
    print_line(f"average: {out} is the mean of {names}")
    if order is None or held_out is None:
        reason = f"only runs of pretrain are scored, not {kind}"
        if order:
            reason = "--validation-dir RECORDS scores it"
        print_line(f"average: not scored; {reason}")
        return
    models = (paths[-1], out)
    scored = evaluate.samples_of(order, held_out, order.evaluation_examples, models)
    newest, averaged = scored.values()
    changes = {name: difference([averaged[name]], [newest[name]]) for name in newest}
    rows = [
        (name, f"{interval(newest[name]):.6f}", f"{interval(averaged[name]):.6f}", f"{change:.6f}")
        for name, change in changes.items()
    ]
    print_table(("held out", paths[-1].name, "average", "difference"), rows)
    better, worse = (averaged, "the average"), (newest, "the newest")
    if changes["mlm_loss"].value >= 0:
        better, worse = worse, better
    gain = difference([worse[0]["mlm_loss"]], [better[0]["mlm_loss"]])
    print_line(
        f"average: {better[1]} is better than {worse[1]}, by {gain:.6f} of mlm_loss; "
        f"in brackets 95 % intervals, n {gain.n:,}"
    )


def _write(out: Path, newest: Path, names: str, mean: Mapping[str, Array], origin: str) -> None:
    left_out = shutil.ignore_patterns(MODEL, OPTIMIZER, STATE)
    with atomic_folder(out, (newest / MODEL).stat().st_size, origin) as partial:
        shutil.copytree(newest, partial, ignore=left_out, dirs_exist_ok=True)
        checkpoint.write_tensors(partial / MODEL, mean)
        if (settings := newest.parent / SETTINGS).is_file():
            shutil.copyfile(settings, partial / SETTINGS)
        if (readme := partial / card.CARD).is_file():
            readme.write_text(f"{readme.read_text()}| weights | mean of {names} |\n")


def mean_of(paths: Sequence[Path]) -> dict[str, Array]:
    """Return the mean of each weight over checkpoints, in its own dtype; one weight at a time is summed in float64.

    Raises CheckpointError for a file that cannot be read, has changed, or has other weights than the last checkpoint.
    """
    means: dict[str, Array] = {}
    with ExitStack() as stack:
        files = [_open(path, stack) for path in paths]
        for path, file in zip(paths, files, strict=True):
            if different := _layout(file) ^ _layout(files[-1]):
                problem = f"differs from {paths[-1].name} in {min(different)}"
                remedy = "average checkpoints of one model: lower --last"
                raise CheckpointError(str(path / MODEL), problem, remedy)
        for name in files[-1].keys():  # noqa: SIM118 (not a dict)
            total: Any = sum(value.astype(np.float64) for value in _values(paths, files, name))
            means[name] = (total / len(files)).astype(files[-1].get_tensor(name).dtype)
    return means


def _values(paths: Sequence[Path], files: Sequence[safe_open], name: str) -> Iterator[Array]:
    for path, file in zip(paths, files, strict=True):
        value = checkpoint.read_tensor(path / MODEL, file, name)
        if fault := checkpoint.find_fault(value):
            raise CheckpointError(f"{path / MODEL}: {name}", fault, "remove that checkpoint")
        yield value


def _open(path: Path, stack: ExitStack) -> safe_open:
    checkpoint.Saved(path).verify(but=(OPTIMIZER,))
    try:
        return stack.enter_context(safe_open(path / MODEL, framework="numpy"))
    except (OSError, SafetensorError) as error:
        problem = f"cannot be read ({error})"
        raise CheckpointError(str(path / MODEL), problem, "remove that checkpoint") from error


def _layout(file: safe_open) -> set[tuple[str, str, str]]:
    slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    return {(name, str(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
