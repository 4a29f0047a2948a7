"""What the processes of a run make sure of before they go on together.

Each was started by itself, perhaps with another file or on another machine. Where they would wait for
one another for ever, or go apart in silence, the run ends at once with an error that names the rank.
"""

import hashlib
import json
import zlib
from typing import Any

import numpy as np

from bert_cli.config.training import TrainSettings
from bert_cli.errors import CheckpointError, ConfigError
from bert_cli.parallel.engine import ProcessGroup
from bert_cli.train.step import State


def refuse_differences(group: ProcessGroup, fixed: dict[str, Any]) -> None:
    """Raise ConfigError unless all processes were given the same."""
    digest = hashlib.blake2b(json.dumps(fixed, sort_keys=True).encode(), digest_size=6).digest()
    numbers = group.all_gather(float(int.from_bytes(digest, "little")))
    others = [rank for rank, number in enumerate(numbers) if number != numbers[0]]
    if others:
        raise ConfigError(
            f"rank {others[0]}: was started with other settings, has another layout, or reads another corpus than "
            "rank 0; start every process with the same command and the same files"
        )


def meetings(settings: TrainSettings) -> dict[str, Any]:
    """The settings that decide when the processes meet: with others they would wait for ever."""
    told = settings.model_dump(mode="json")
    names = (
        "evaluate_every_steps",
        "evaluation_examples",
        "validation_dir",
        "max_skipped_steps",
        "do_validation",
        "do_test",
        "seeds",
    )
    return {
        **{name: told[name] for name in (*names, "global_batch", "dry_run") if name in told},
        "parallel": {**told["parallel"], "trace": None},
    }


def refuse_other_weights(group: ProcessGroup, state: State) -> None:
    """Raise CheckpointError when weights differ by a bit: they would go apart in silence."""
    if group.world_size == 1:
        return
    digest = 0
    for weight in state.weights.values():
        digest = zlib.crc32(np.ascontiguousarray(weight.numpy()).tobytes(), digest)
    found = group.all_gather(float(digest))
    others = [rank for rank, number in enumerate(found) if number != found[0]]
    if others:
        raise CheckpointError(
            f"step {state.step}: the weights of rank {others[0]} are not those of rank 0; let all start from the "
            "same files, on machines of one kind"
        )


def refuse_other_starts(group: ProcessGroup, state: State) -> None:
    """Raise CheckpointError unless all processes stand at the same step."""
    steps = group.all_gather(float(state.step))
    others = [rank for rank, step in enumerate(steps) if step != steps[0]]
    if others:
        raise CheckpointError(
            f"save_ckpt_path: rank {others[0]} finds a checkpoint of step {steps[others[0]]:.0f}, rank 0 one of "
            f"step {steps[0]:.0f}; the folder has to be on a file system that all hosts share"
        )
