"""Checks that all processes of a run agree before they continue.

Processes that differ would wait for one another forever, or train different weights silently. The run
ends with an error that names the rank.
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

# Settings that decide when the processes enter a collective, with `global_batch` and `parallel`.
COLLECTIVE = (
    "evaluate_every_steps",
    "evaluation_examples",
    "validation_dir",
    "max_skipped_steps",
    "do_validation",
    "do_test",
    "seeds",
    "global_batch",
    "dry_run",
)


def collective_settings(settings: TrainSettings) -> dict[str, Any]:
    """Return the settings with which processes would wait forever if they differed."""
    dumped = settings.model_dump(mode="json")
    chosen = {name: dumped[name] for name in COLLECTIVE if name in dumped}
    return {**chosen, "parallel": {**dumped["parallel"], "trace": None}}


def check_same_settings(group: ProcessGroup, settings: dict[str, Any]) -> None:
    """Raise ConfigError unless all processes have the same values."""
    digest = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=6).digest()
    if other := _first_difference(group, int.from_bytes(digest, "little")):
        raise ConfigError(
            f"rank {other[0]}",
            "was started with other settings, has another layout, or reads another corpus than rank 0",
            "start every process with the same command and the same files",
        )


def check_same_step(group: ProcessGroup, state: State) -> None:
    """Raise CheckpointError unless all processes are at the same step."""
    if other := _first_difference(group, state.step):
        rank, step, first = other
        raise CheckpointError(
            "save_ckpt_path",
            f"rank {rank} finds a checkpoint of step {step:.0f}, rank 0 one of step {first:.0f}",
            "the folder has to be on a file system that all hosts share",
        )


def check_same_weights(group: ProcessGroup, state: State) -> None:
    """Raise CheckpointError when weights differ by a bit."""
    if group.world_size == 1:
        return
    digest = 0
    for weight in state.weights.values():
        digest = zlib.crc32(np.ascontiguousarray(weight.numpy()).tobytes(), digest)
    if other := _first_difference(group, digest):
        raise CheckpointError(
            f"step {state.step}",
            f"the weights of rank {other[0]} are not those of rank 0",
            "let all start from the same files, on machines of one kind",
        )


def _first_difference(group: ProcessGroup, number: int) -> tuple[int, float, float] | None:
    """Return the first rank with another number than rank 0, its number and that of rank 0."""
    numbers = group.all_gather(float(number))
    different = (rank for rank, other in enumerate(numbers) if other != numbers[0])
    rank = next(different, None)
    return None if rank is None else (rank, numbers[rank], numbers[0])
