"""`bert pretrain`: masked-LM and next-sentence pre-training, one phase.

Phase 1 and phase 2 are this same command with other lengths; phase 2 starts from the weights of
phase 1. The run is: read the plan, build, find where to start, loop with hooks. Whoever calls it
again with the same output folder continues it.
"""

import hashlib
import json
import os
import time
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np

from bert_cli.config import layout
from bert_cli.config.plan import Plan, describe, make_plan
from bert_cli.config.schema import PretrainSettings
from bert_cli.data.ledger import write_json_atomically
from bert_cli.data.reader import Reader, read_ahead
from bert_cli.errors import CheckpointError, ConfigError
from bert_cli.parallel.cluster import Processes, find_processes
from bert_cli.parallel.collectives import Peers
from bert_cli.parallel.engine import Engine
from bert_cli.parallel.mesh import Mesh, devices_here, open_mesh
from bert_cli.parallel.watchdog import Watchdog
from bert_cli.tasks import assemble
from bert_cli.train import checkpoint, report
from bert_cli.train.loop import Every, Hook, Info, StopRequest, train
from bert_cli.train.report import say
from bert_cli.train.step import Batch, State, Step

DRY_RUN_STEPS = 2


def run(settings: PretrainSettings) -> None:
    """Run one phase of pre-training, from wherever it stands to its end.

    Raises ConfigError, DataError, CheckpointError or DeviceError; a request to stop saves and returns.
    """
    began = time.monotonic()
    saves = _has_a_folder(settings)
    with StopRequest() as stop, ExitStack() as claims:
        processes = find_processes(settings.cluster, os.environ)
        report.silent = processes.rank > 0
        if settings.about is not None:
            say(f"{settings.about.what}\n{settings.about.expect}")
        settings = _laid_out(settings, processes)
        mesh = open_mesh(settings, processes)
        stop.listen()
        part = processes.rank, processes.count
        reader = assemble.open_reader(settings, make_plan(settings, None).examples_per_step, *part)
        held_out = assemble.open_held_out(settings)
        plan = make_plan(settings, len(reader) if isinstance(reader, Reader) else None)
        say(f"plan:\n{describe(plan)}\n{_where(settings, mesh)}")

        model = assemble.build_model(settings, mesh)
        engine = assemble.build_engine(model, settings, mesh)
        state = assemble.build_state(model, engine, mesh, settings.optimizer_opts)
        peers = engine.peers
        claims.enter_context(Watchdog(peers, settings.cluster.say_waiting_after_seconds))
        step = assemble.build_step(engine, state, settings, plan, stop)
        sample = assemble.first_micro_batches(reader, len(mesh.devices), plan.micro_batch_size)
        if settings.compile_only:
            _compile(step, sample, began)
            peers.meet()
            return
        form = assemble.disk_format(settings, model)
        fixed = checkpoint.fixed_settings(
            settings.model_dump(mode="json"),
            plan.examples_per_step,
            plan.total_steps,
            reader.fingerprint,
        )
        if saves:
            _claim(settings, peers, claims)
        _start(settings, peers, state, form, fixed)
        if state.step >= plan.total_steps:
            say(f"run: all {plan.total_steps:,} steps are done; nothing to do")
            peers.meet()
            return
        save = _saving(settings, state, form, fixed, peers) if saves else None
        last = plan.total_steps if saves else min(state.step + DRY_RUN_STEPS, plan.total_steps)
        built = time.monotonic()
        step.compile(sample)
        say(f"built in {built - began:.1f} s, traced in {time.monotonic() - built:.1f} s")
        hooks = _hooks(settings, plan, engine, state, held_out, save, last)
        wish = _wish(peers, stop)
        finished = train(state, read_ahead(reader, state.step, last), step, hooks, wish)
        if save is not None and not finished:
            save()
        # Whoever leaves early is taken for lost by those who still save.
        peers.meet()
        say(_last_words(settings, state, began, finished))


def _has_a_folder(settings: PretrainSettings) -> bool:
    """Whether the run saves. Raises ConfigError when it should and does not know where."""
    if settings.dry_run or settings.compile_only:
        return False
    if settings.save_ckpt_path is None:
        raise ConfigError(
            "save_ckpt_path: is not given; give --save-ckpt-path, the folder of this run"
        )
    return True


def _laid_out(settings: PretrainSettings, processes: Processes) -> PretrainSettings:
    """The settings with a layout for the devices there are, when they ask for one."""
    if settings.parallel.layout == "given":
        return settings
    kind, here, memory = devices_here(processes)
    devices = here * processes.count
    chosen = layout.propose(settings, devices, memory, processes.count)
    say(f"layout: chosen for {devices} x {kind} of {memory / 1e9:.1f} GB")
    return chosen


def _where(settings: PretrainSettings, mesh: Mesh) -> str:
    lines = [*layout.describe_layout(settings), *layout.without_effect(settings)]
    processes = mesh.processes
    if processes.count > 1:
        lines.append(f"{processes.count} processes, as {processes.source} says; this is rank 0")
    lines.append(f"device {mesh.devices[0][0]}, precision {settings.precision}")
    return "\n".join(f"  {line}" for line in lines)


def _claim(settings: PretrainSettings, peers: Peers, claims: ExitStack) -> None:
    """Rank 0 takes the run's folder; the others wait until it is in order."""
    assert settings.save_ckpt_path is not None
    if peers.rank == 0:
        claims.enter_context(checkpoint.claim(settings.save_ckpt_path))
        removed = checkpoint.clear_half_written(settings.save_ckpt_path)
        if removed:
            say(f"run: removed half-written {', '.join(removed)}")
    peers.meet()


def _refuse_differences(peers: Peers, fixed: dict[str, Any]) -> None:
    digest = hashlib.blake2b(json.dumps(fixed, sort_keys=True).encode(), digest_size=6).digest()
    numbers = peers.each(float(int.from_bytes(digest, "little")))
    others = [rank for rank, number in enumerate(numbers) if number != numbers[0]]
    if others:
        raise ConfigError(
            f"rank {others[0]}: was started with other settings, has another layout, or reads another corpus than "
            "rank 0; start every process with the same command and the same files"
        )


def _meetings(settings: PretrainSettings) -> dict[str, Any]:
    """The settings that decide when the processes meet: with others they would wait for ever."""
    told = settings.model_dump(mode="json")
    names = ("evaluate_every_steps", "evaluation_examples", "validation_dir", "max_skipped_steps")
    return {
        **{name: told[name] for name in (*names, "global_batch", "dry_run")},
        "parallel": {**told["parallel"], "trace": None},
    }


def _refuse_other_weights(peers: Peers, state: State) -> None:
    """Weights that differ by a bit between processes would go apart in silence."""
    if peers.count == 1:
        return
    digest = 0
    for weight in state.weights.values():
        digest = zlib.crc32(np.ascontiguousarray(weight.numpy()).tobytes(), digest)
    found = peers.each(float(digest))
    others = [rank for rank, number in enumerate(found) if number != found[0]]
    if others:
        raise CheckpointError(
            f"step {state.step}: the weights of rank {others[0]} are not those of rank 0; let all start from the "
            "same files, on machines of one kind"
        )


def _start(
    settings: PretrainSettings,
    peers: Peers,
    state: State,
    form: checkpoint.Format,
    fixed: dict[str, Any],
) -> None:
    """Put the first values into the state, the same on all processes."""
    _refuse_differences(peers, {**fixed, **_meetings(settings)})
    say(f"run: {assemble.start(settings, state, form, fixed)}")
    _refuse_other_starts(peers, state)
    _refuse_other_weights(peers, state)


def _refuse_other_starts(peers: Peers, state: State) -> None:
    steps = peers.each(float(state.step))
    others = [rank for rank, step in enumerate(steps) if step != steps[0]]
    if others:
        raise CheckpointError(
            f"save_ckpt_path: rank {others[0]} finds a checkpoint of step {steps[others[0]]:.0f}, rank 0 one of "
            f"step {steps[0]:.0f}; the folder has to be on a file system that all hosts share"
        )


def _wish(peers: Peers, stop: Callable[[], bool]) -> Callable[[], bool]:
    """Whether any process was asked to stop; all get the same answer."""
    return lambda: bool(peers.total([stop()])[0])


def _saving(
    settings: PretrainSettings,
    state: State,
    form: checkpoint.Format,
    fixed: dict[str, Any],
    peers: Peers,
) -> Callable[[], None]:
    """How this process saves: rank 0 writes, the others give what they alone hold."""
    folder, told = settings.save_ckpt_path, settings.model_dump(mode="json")
    assert folder is not None
    # Of the step that a run continues from there is a checkpoint; rank 0 has seen it.
    there = (folder / checkpoint.name_of(state.step)).exists()
    saved = state.step if peers.of_rank_0([there])[0] else -1

    def save() -> None:
        # Decided by what every process knows: a file may show later on another host.
        nonlocal saved
        if saved == state.step:
            return
        _refuse_other_weights(peers, state)
        if peers.rank == 0:
            write()
        else:
            checkpoint.give_shares(state)
        saved = state.step

    if peers.rank > 0:
        return save
    # Only now: a start that was refused must not leave its settings beside another run's steps.
    write_json_atomically(folder / "settings.json", told)

    def write() -> None:
        checkpoint.save(
            folder, state, form, fixed=fixed, settings=told, versions=assemble.versions()
        )
        checkpoint.prune(folder, settings.keep_checkpoints, settings.keep_every_steps)

    return save


def _compile(step: Step, batch: Batch, began: float) -> None:
    ready = time.monotonic()
    step.compile(batch)
    say(
        f"compiled in {time.monotonic() - ready:.1f} s, after {ready - began:.1f} s of imports, "
        "building and the first batch; nothing was trained"
    )


def _hooks(
    settings: PretrainSettings,
    plan: Plan,
    engine: Engine,
    state: State,
    held_out: Reader | None,
    save: Callable[[], None] | None,
    last: int,
) -> list[tuple[Hook, Every]]:
    """What is done now and then, in this order: measure, evaluate, report, save."""
    pace = report.Pace(last, plan.examples_per_step)
    peers = engine.peers
    reports = _reports(settings, state) if save is not None and peers.rank == 0 else []
    first, every_line = state.step + 1, Every(steps=settings.log_every_steps, last_step=last)

    def measure(info: Info) -> None:
        info.figures.update(pace.after_step(info.step, info.figures["tokens"]))
        info.figures["seconds_waited"] = info.seconds_waited

    def evaluate(info: Info) -> None:
        assert held_out is not None
        found = assemble.evaluate(
            engine, held_out, settings.evaluation_examples, plan.micro_batch_size
        )
        info.figures.update(found)
        say(
            f"step {info.step}: held out, mlm {found['validation_mlm_loss']:.4f} "
            f"({100 * found['validation_mlm_accuracy']:.1f} %)  nsp {found['validation_nsp_loss']:.4f} "
            f"({100 * found['validation_nsp_accuracy']:.1f} %)"
        )

    def tell(info: Info) -> None:
        for one in reports:
            one(info.step, info.figures)
        # The first line too: it says that the run is alive.
        if every_line.due(info.step) or info.step == first:
            say(report.line(info.step, last, info.figures))

    each = Every(steps=1)
    hooks: list[tuple[Hook, Every]] = [(measure, each)]
    if held_out is not None and save is not None:
        hooks.append((evaluate, Every(steps=settings.evaluate_every_steps, last_step=last)))
    hooks.append((tell, each))
    if save is not None:
        every = Every(
            steps=settings.checkpoint_every_steps,
            minutes=settings.checkpoint_every_minutes,
            last_step=last,
            # Every process takes part in a save, and their clocks differ.
            agreed=lambda due: bool(peers.of_rank_0([due])[0]),
        )
        hooks.append((lambda info: save(), every))
    hooks += _trace_hooks(settings, engine, state.step, last)
    # Saving and evaluating are not the pace of a step.
    hooks.append((lambda info: pace.restart(), each))
    return hooks


def _trace_hooks(
    settings: PretrainSettings, engine: Engine, done: int, last: int
) -> list[tuple[Hook, Every]]:
    """Write the trace, when one is asked for, after the steps that it notes."""
    trace, path, peers = engine.trace, settings.parallel.trace, engine.peers
    if trace is None or path is None:
        return []
    if peers.count > 1:
        path = path.with_stem(f"{path.stem}_rank{peers.rank}")

    def write(info: Info) -> None:
        trace.write(path, peers.rank)
        say(f"trace: the first steps are in {path}; open it in https://ui.perfetto.dev")

    return [(write, Every(last_step=min(done + trace.steps, last)))]


def _reports(settings: PretrainSettings, state: State) -> list[report.Report]:
    folder = settings.save_ckpt_path
    assert folder is not None
    reports = [report.jsonl(folder / report.METRICS, state.step)]
    if settings.tensorboard_dir is not None:
        reports.append(report.tensorboard(settings.tensorboard_dir))
    if settings.wandb.enabled:
        told = settings.model_dump(mode="json")
        reports.append(report.wandb(settings.wandb.model_dump(), told, folder))
    return reports


def _last_words(settings: PretrainSettings, state: State, began: float, finished: bool) -> str:
    took = report.duration(time.monotonic() - began)
    if settings.dry_run:
        return f"run: dry run ended at step {state.step:,} after {took}; nothing was saved"
    assert settings.save_ckpt_path is not None
    newest = settings.save_ckpt_path / checkpoint.name_of(state.step)
    if finished:
        return f"run: {state.step:,} steps done, {took}; the model is {newest}"
    return f"run: stopped at step {state.step:,} and saved; the same command continues"
