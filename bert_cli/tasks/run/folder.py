"""The folder of a run as one start of it reads it, and the state from which the run starts."""

from dataclasses import dataclass, replace
from pathlib import Path

from bert_cli.config.pretrain import PretrainSettings
from bert_cli.config.training import LearningRate
from bert_cli.data.tokens.tokenizer import TokenizerFolder
from bert_cli.errors import CheckpointError, ConfigError
from bert_cli.planning.plan import decay_step
from bert_cli.tasks.run.models import Source, extended, find_source
from bert_cli.train.checkpoint import Saved, complete_checkpoints, step_of


class Folder:
    """The checkpoints of a run. Each state.json is read once, however often the folder is asked."""

    def __init__(self, path: Path | None) -> None:
        """Read nothing yet; a run without a folder has no checkpoint."""
        self.path = path
        self._saved: dict[Path, Saved] = {}

    @property
    def checkpoints(self) -> list[Saved]:
        """The complete checkpoints that are there now, oldest first."""
        paths = [] if self.path is None else complete_checkpoints(self.path)
        return [self._saved.setdefault(path, Saved(path)) for path in paths]

    @property
    def newest(self) -> Saved | None:
        """The newest complete checkpoint that is there now."""
        return next(reversed(self.checkpoints), None)


@dataclass(frozen=True)
class Start:
    """The state from which a run starts, and its model on disk."""

    folder: Folder
    source: Source | None
    """The model whose shape, tokenizer and perhaps weights the run has; None for new weights."""
    continued: Saved | None
    """The run's own newest checkpoint."""
    branch: Saved | None = None
    """The checkpoint of another run that a new run continues with a decaying learning rate."""

    def extended(self, tokenizer: TokenizerFolder | None) -> "Start":
        """Return the start with rows for the pieces that a tokenizer has after the model's pieces."""
        source = None if self.source is None else extended(self.source, tokenizer)
        return replace(self, source=source)

    @property
    def known_rows(self) -> int:
        """The word-embedding rows that the model had before its vocabulary was extended.

        Raises ConfigError if it was not extended.
        """
        if self.continued is not None:
            return int(self.continued.state.fixed.get("known_rows", 0))
        if self.source is None or not self.source.replaced:
            problem = "has no effect on examples with the vocabulary of the model"
            raise ConfigError("new_rows_only_steps", problem, "leave it out")
        return self.source.first_new


def find_start(order: PretrainSettings, folder: Folder) -> Start:
    """Return the start of a run: its newest checkpoint, else the model that the order names, else new weights.

    Raises CheckpointError if there is no such model, or no checkpoint from which a branch can decay.
    """
    continued = folder.newest
    name = order.pretrained_ckpt_path
    if continued is not None:
        model = find_source(str(folder.path), "--save-ckpt-path", continued)
        return Start(folder, model, continued)
    source = None if name is None else find_source(name)
    step = order.decay_from
    branch = _branch_point(Path(str(name)), step) if step else None
    return Start(folder, source, None, branch)


def _branch_point(run: Path, step: int) -> Saved:
    """Return the checkpoint of a run from which `decay_from` continues. Raises CheckpointError if it cannot decay."""
    where = f"decay_from ({step})"
    checkpoints = {step_of(saved.path): saved for saved in Folder(run).checkpoints}
    saved = checkpoints.get(step)
    if saved is None:
        steps = ", ".join(map(str, checkpoints)) or "no step"
        problem = f"no such checkpoint in {run}, which has {steps}"
        remedy = "use one of these steps (keep_checkpoints and keep_every_steps keep more)"
        raise CheckpointError(where, problem, remedy)
    before = saved.state.fixed
    try:
        rate = LearningRate.model_validate(before["optimizer_opts"]["learning_rate"])
        end = before.get("decay_from") or decay_step(rate, before["total_steps"])
    except (KeyError, ValueError) as error:
        problem = f"has no schedule ({error})"
        raise CheckpointError(str(saved.path), problem, "decay from another checkpoint") from error
    first = 0 if "decay_from" in before else int(rate.warmup_frac * before["total_steps"])
    if not first <= step <= end:
        problem = (
            f"the learning rate of the run in {run} is constant only from step {first:,} to {end:,}"
        )
        raise CheckpointError(where, problem, "decay from one of these steps")
    return saved
