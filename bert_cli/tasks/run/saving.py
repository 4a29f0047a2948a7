"""Load the state of a run on all processes, compare it with the state of rank 0, and save it.

Processes that differ would wait for one another forever, or train different weights silently, so they are compared
before they continue.
"""

import hashlib
import json
import socket
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import numpy as np

from bert_cli.errors import CheckpointError, ConfigError, DeviceError
from bert_cli.files import FORMAT, with_checksum, write_json_atomically
from bert_cli.parallel.devices import traits_of_results
from bert_cli.parallel.group import ProcessGroup
from bert_cli.parse.load import leaves
from bert_cli.parse.options import options_of
from bert_cli.processes import print_line
from bert_cli.tasks.run.build import Run
from bert_cli.tasks.run.job import Job
from bert_cli.tasks.run.resolve import runtime
from bert_cli.tasks.run.start import load_pretrained
from bert_cli.train import checkpoint
from bert_cli.train.checkpoint import METRICS, checkpoint_name
from bert_cli.train.loop import BackgroundWriter, State, StateCopy, copy_state, gather_shards


def load_state(run: Run, stack: ExitStack) -> None:
    """Load the state that the run starts from. `stack` holds the lock of the run's folder.

    Raises ConfigError or CheckpointError where the processes differ, or where the state does not fit the run.
    """
    job = run.job
    group = run.engine.group
    state = run.state
    if job.order.saves:
        if run.is_first_rank:
            folder = job.folder
            stack.enter_context(checkpoint.lock_run(folder))
            text = f"run: writes into {folder.absolute()}: checkpoints step_*/, {METRICS}"
            tensorboard = job.order.tensorboard_dir
            if tensorboard is not None:
                text += f"; TensorBoard's files into {tensorboard.absolute()}"
            print_line(text)
            removed = checkpoint.remove_partial_checkpoints(folder)
            if removed:
                print_line(f"run: removed incomplete {', '.join(removed)}")
        group.barrier()
    _check_same_kind(job, group)
    # Processes enter collectives as the settings say. Hosts may have the same files under other paths: what is read of
    # them is compared by fingerprints.
    paths = {option.name for option in options_of(type(job.order)) if option.is_path}
    settings = dict(leaves({**job.record, "cluster": None}))
    compared = {
        **{name: value is not None if name in paths else value for name, value in settings.items()},
        **job.fixed,
        "held_out": job.task.fingerprint,
        "unlabelled": [part.fingerprint for part in job.task.unlabelled.values()],
    }
    shared = json.dumps(compared, sort_keys=True)
    # 48 bits, since the group exchanges float64, which holds integers of 53 bits exactly.
    digest = hashlib.blake2b(shared.encode(), digest_size=6).digest()
    difference = _first_difference(group, int.from_bytes(digest, "little"))
    if difference:
        problem = "was started with other settings, has another layout, or reads another corpus than rank 0"
        remedy = "start every process with the same command and the same files"
        raise ConfigError(f"rank {difference[0]}", problem, remedy)
    print_line(f"run: {load_start(run)}")
    difference = _first_difference(group, state.step)
    if difference:
        rank, step, first = difference
        problem = (
            f"rank {rank} finds a checkpoint of step {step:.0f}, rank 0 one of step {first:.0f}"
        )
        remedy = "use a folder on a file system that all hosts share"
        raise CheckpointError("save_ckpt_path", problem, remedy)
    _check_same_weights(group, state)


def load_start(run: Run) -> str:
    """Load the state from the run's own checkpoint if it has one, else as resolved; return a description.

    Raises CheckpointError if the state does not fit.
    """
    job = run.job
    start = job.start
    # Asked under the folder's lock: another process may have saved before.
    saved = start.folder.newest
    if saved is not None:
        checkpoint.resume(saved, run.state, run.form, job.fixed, job.record)
        return f"continues from {saved.path} (step {run.state.step:,})"
    if start.source is not None:
        labels = run.form.config.get("id2label")
        description = load_pretrained(start.source, job.order, run.state.weights, labels)
        return f"{description}; the optimizer is new"
    return f"starts with new weights from seed {job.order.seed}"


def _check_same_kind(job: Job, group: ProcessGroup) -> None:
    """Raise ConfigError for other versions than rank 0 has, DeviceError for another processor or accelerator."""
    if group.world_size == 1:
        return
    engine = job.order.engine
    ours = traits_of_results(engine, runtime(engine).device_names())
    ranks = list(map(json.loads, group.gather_texts(json.dumps([socket.gethostname(), ours]))))
    first_host, first = ranks[0]
    for rank, (host, traits) in enumerate(ranks):
        for name in (name for name in first if traits.get(name) != first[name]):
            than = f"has another {name} than rank 0 ({first_host})"
            problem = f"{than}: {traits.get(name)} instead of {first[name]}"
            error = ConfigError if name.startswith("version") else DeviceError
            raise error(f"rank {rank} ({host})", problem, "use the same on all hosts of the run")


def compare_weights(run: Run, steps: int) -> None:
    """Compare the weights of all processes after 1, 2, 4, 8, ... steps of this start; raise CheckpointError."""
    if steps.bit_count() == 1:
        _check_same_weights(run.engine.group, run.state)


def _check_same_weights(group: ProcessGroup, state: State) -> None:
    if group.world_size == 1:
        return
    digest = 0
    for weight in state.weights.values():
        if weight.is_sharded:  # all ranks together store it once
            continue
        # A checksum of 32 bits suffices: it is no defence, and float64 carries it exactly.
        digest = zlib.crc32(np.ascontiguousarray(weight.numpy()).tobytes(), digest)
    difference = _first_difference(group, digest)
    if difference:
        problem = f"the weights of rank {difference[0]} differ from rank 0"
        remedy = "start all processes from the same files, on machines of the same kind"
        raise CheckpointError(f"step {state.step}", problem, remedy)


def _first_difference(group: ProcessGroup, number: int) -> tuple[int, float, float] | None:
    """Return the first rank whose number differs from rank 0, and both numbers."""
    numbers = group.all_gather(float(number))
    different = [rank for rank, value in enumerate(numbers) if value != numbers[0]]
    if not different:
        return None
    return different[0], numbers[different[0]], numbers[0]


def saver(run: Run, writer: BackgroundWriter) -> Callable[[], None]:
    """Return the function that saves a step once: rank 0 writes, other ranks send their shards."""
    job = run.job
    order = job.order
    state = run.state
    group = run.engine.group
    folder = job.folder
    fixed = job.fixed
    # The step that a run continues from has a checkpoint, which rank 0 has seen.
    exists = (folder / checkpoint_name(state.step)).exists()
    saved = state.step if group.broadcast([exists])[0] else -1

    def write(copied: StateCopy) -> None:
        checkpoint.save(folder, copied, run.form, fixed=fixed, settings=job.record)
        job.start.folder.prune(order.keep_checkpoints, order.keep_every_steps)

    def save() -> None:
        # Decided without reading files, which may appear later on another host.
        nonlocal saved
        if saved == state.step:
            return
        if job.task.fit is not None and job.task.train is not None:
            job.task.fit(job.task.train, state.weights)
        _check_same_weights(group, state)
        if run.is_first_rank:
            writer.start(partial(write, copy_state(state)))
        else:
            gather_shards(state)
        saved = state.step

    if run.is_first_rank:
        # Written only now: a start that fails must not leave its settings in another run's folder.
        record = with_checksum({"format": FORMAT, **job.record})
        write_json_atomically(folder / checkpoint.SETTINGS, record)
    return save
