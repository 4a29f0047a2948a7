"""`bert pretrain`: masked-LM and next-sentence pre-training, one phase.

Phase 1 and phase 2 are this same command with other lengths; phase 2 starts from the weights of
phase 1. The run is: read the plan, build, find where to start, loop with hooks. Whoever calls it
again with the same output folder continues it.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np

from bert_cli.config.plan import Plan, describe, make_plan
from bert_cli.config.schema import PretrainSettings
from bert_cli.data.ledger import write_json_atomically
from bert_cli.data.reader import Reader, read_ahead
from bert_cli.errors import ConfigError
from bert_cli.parallel.engine import Engine, prepare_devices
from bert_cli.tasks import assemble
from bert_cli.train import checkpoint, report
from bert_cli.train.loop import Every, Hook, Info, StopRequest, train
from bert_cli.train.report import say
from bert_cli.train.step import State, Step

DRY_RUN_STEPS = 2


def run(settings: PretrainSettings) -> None:
    """Run one phase of pre-training, from wherever it stands to its end.

    Raises ConfigError, DataError, CheckpointError or DeviceError; a request to stop saves and returns.
    """
    began = time.monotonic()
    saves = not (settings.dry_run or settings.compile_only)
    if saves and settings.save_ckpt_path is None:
        raise ConfigError(
            "save_ckpt_path: is not given; give --save-ckpt-path, the folder of this run"
        )
    if settings.about is not None:
        say(f"{settings.about.what}\n{settings.about.expect}")
    with StopRequest() as stop, ExitStack() as claims:
        device = prepare_devices(settings.precision, settings.deterministic)
        reader = assemble.open_reader(settings, make_plan(settings, None).examples_per_step)
        held_out = assemble.open_held_out(settings)
        plan = make_plan(settings, len(reader) if isinstance(reader, Reader) else None)
        say(f"plan:\n{describe(plan)}\n  device {device}, precision {settings.precision}")

        model = assemble.build_model(settings)
        state = assemble.build_state(model, settings.optimizer_opts)
        engine = assemble.build_engine(model, settings)
        step = assemble.build_step(engine, state, settings, plan, stop)
        if settings.compile_only:
            _compile(step, reader[0], began)
            return
        if saves and settings.save_ckpt_path is not None:
            claims.enter_context(checkpoint.claim(settings.save_ckpt_path))
            removed = checkpoint.clear_half_written(settings.save_ckpt_path)
            if removed:
                say(f"run: removed half-written {', '.join(removed)}")
        form = assemble.disk_format(settings, model)
        fixed = checkpoint.fixed_settings(
            settings.model_dump(mode="json"),
            plan.examples_per_step,
            plan.total_steps,
            reader.fingerprint,
        )
        say(f"run: {assemble.start(settings, state, form, fixed)}")
        if state.step >= plan.total_steps:
            say(f"run: all {plan.total_steps:,} steps are done; nothing to do")
            return
        save = _saving(settings, state, form, fixed) if saves else None
        last = plan.total_steps if saves else min(state.step + DRY_RUN_STEPS, plan.total_steps)
        hooks = _hooks(settings, plan, engine, state, held_out, save, last)
        say(
            f"built in {time.monotonic() - began:.1f} s; step {state.step + 1:,} includes its tracing"
        )
        finished = train(state, read_ahead(reader, state.step, last), step, hooks, stop)
        if save is not None and not finished:
            save()
        say(_last_words(settings, state, began, finished))


def _saving(
    settings: PretrainSettings, state: State, form: checkpoint.Format, fixed: dict[str, Any]
) -> Callable[[], None]:
    folder, told = settings.save_ckpt_path, settings.model_dump(mode="json")
    assert folder is not None
    # Only now: a start that was refused must not leave its settings beside another run's steps.
    write_json_atomically(folder / "settings.json", told)

    def save() -> None:
        checkpoint.save(
            folder, state, form, fixed=fixed, settings=told, versions=assemble.versions()
        )
        checkpoint.prune(folder, settings.keep_checkpoints, settings.keep_every_steps)

    return save


def _compile(step: Step, batch: dict[str, Any], began: float) -> None:
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
    reports = _reports(settings, state) if save is not None else []
    first, every_line = state.step + 1, Every(steps=settings.log_every_steps, last_step=last)

    def measure(info: Info) -> None:
        info.figures.update(pace.after_step(info.step, float(np.sum(info.batch["input_mask"]))))
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
        )
        hooks.append((lambda info: save(), every))
    # Saving and evaluating are not the pace of a step.
    hooks.append((lambda info: pace.restart(), each))
    return hooks


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
