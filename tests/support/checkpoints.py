"""Checkpoints of a small run: built as a run builds its state, with known weights and moments."""

from functools import partial
from pathlib import Path

import numpy as np
from support.settings import RUN, SHAPE, merged, small_run

from bert_cli.config.pretrain import PretrainSettings
from bert_cli.data.tokens.tokenizer import TokenizerFolder
from bert_cli.optim.schedule import LossScale, first_loss_scale
from bert_cli.tasks.run import build as assemble
from bert_cli.tasks.run import start
from bert_cli.tasks.run.resolve import open_mesh
from bert_cli.train import checkpoint
from bert_cli.train.loop import State, StateCopy, copy_state

FIXED = {
    "seed": 1984,
    "bert_config": {"hidden_size": 16, "num_hidden_layers": 2},
    "examples_per_step": 8,
    "corpus": "0123",
}
SCALE = LossScale(value=4096.0, dynamic=True, good_steps=17, skipped=3, skipped_in_a_row=1)
PLAIN = checkpoint.Format(to_disk=dict, from_disk=dict, config={})
settings_of = partial(small_run, merged(RUN, {"generated_dataset": True, "bert_config": SHAPE}))


def build(settings: PretrainSettings):
    """Return engine, state and format of a run that is about to start."""
    engine = assemble.build_engine(settings, open_mesh(settings))
    state = State(engine.weights, engine.slots, first_loss_scale(1.0))
    folder = TokenizerFolder(Path(settings.dataset_dir)) if settings.dataset_dir else None
    return engine, state, start.disk_format(settings, engine.weights, folder)


def trained(settings: PretrainSettings):
    """Return the same in the middle of a run: every weight and moment has changed."""
    engine, state, form = build(settings)
    draw = np.random.default_rng(7)
    for name, weight in state.weights.items():
        weight.assign(draw.normal(0, 0.1, weight.shape))
        for slot in ("moment1", "moment2"):
            # Positive, as means of squares are.
            moment = state.slots[f"{name}/{slot}"]
            moment.assign(np.abs(draw.normal(0, 1e-3, moment.shape)).astype(np.float32))
    state.step, state.loss_scale = 7, SCALE
    return engine, state, form


def save(folder: Path, state: State | StateCopy, form: checkpoint.Format = PLAIN) -> Path:
    copied = copy_state(state) if isinstance(state, State) else state
    return checkpoint.save(folder, copied, form, fixed=FIXED, settings={"dataset_dir": "a"})


def bytes_of(state: State) -> dict[str, tuple[np.dtype, bytes]]:
    arrays = {**copy_state(state).weights, **copy_state(state).slots}
    return {name: (array.dtype, array.tobytes()) for name, array in arrays.items()}


def state_at(step: int) -> StateCopy:
    """Return a state of 24 MB in which every number is the step."""
    w, first, second = np.full((3, 1 << 21), step, np.float32)
    return StateCopy({"w": w}, {"w/moment1": first, "w/moment2": second}, SCALE, step)
