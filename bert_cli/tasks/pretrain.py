"""`bert pretrain`: masked-LM and next-sentence pre-training, one phase.

Phase 1 and phase 2 are this same command with other lengths; phase 2 starts from the weights of
phase 1. The run is: read the plan, build, find where to start, loop with hooks. Whoever calls it
again with the same output folder continues it.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bert_cli.config.plan import Plan, describe, make_plan
from bert_cli.config.schema import PretrainSettings
from bert_cli.data.reader import Reader, read_ahead
from bert_cli.errors import ConfigError
from bert_cli.parallel.engine import Engine, prepare_devices
from bert_cli.tasks import assemble
from bert_cli.train import checkpoint, report
from bert_cli.train.loop import Every, Hook, Info, StopRequest, train
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
        print(f"{settings.about.what}\n{settings.about.expect}")
    device = prepare_devices(settings.precision, settings.deterministic)
    reader = assemble.open_reader(settings, make_plan(settings, None).examples_per_step)
    plan = make_plan(settings, len(reader) if isinstance(reader, Reader) else None)
    print(f"plan:\n{describe(plan)}\n  device {device}, precision {settings.precision}")

    model = assemble.build_model(settings)
    state = assemble.build_state(model, settings.optimizer_opts)
    engine = assemble.build_engine(model, settings)
    form = assemble.disk_format(settings, model)
    fixed = checkpoint.fixed_settings(
        settings.model_dump(mode="json"),
        plan.examples_per_step,
        plan.total_steps,
        reader.fingerprint,
    )
    with StopRequest() as stop:
        step = assemble.build_step(engine, state, settings, plan, stop)
        if settings.compile_only:
            _compile(step, reader[0], began)
            return
        if saves:
            _prepare_folder(settings)
        print(
            f"run: {assemble.start(settings, state, form, fixed) if saves else 'dry, nothing is saved'}"
        )
        if state.step >= plan.total_steps:
            print(f"run: all {plan.total_steps:,} steps are done; nothing to do")
            return

        save = _saving(settings, state, form, fixed) if saves else None
        last = plan.total_steps if saves else min(DRY_RUN_STEPS, plan.total_steps)
        hooks = _hooks(settings, plan, engine, state, save, last, began)
        finished = train(state, read_ahead(reader, state.step, last), step, hooks, stop)
        if not finished and save is not None:
            save()
            print(f"run: stopped at step {state.step:,} and saved; the same command continues")
        elif finished:
            print(_last_words(settings, plan, began, saves))


def _saving(
    settings: PretrainSettings, state: State, form: checkpoint.Format, fixed: dict[str, Any]
) -> Callable[[], None]:
    folder, told = settings.save_ckpt_path, settings.model_dump(mode="json")
    assert folder is not None

    def save() -> None:
        checkpoint.save(
            folder, state, form, fixed=fixed, settings=told, versions=assemble.versions()
        )
        checkpoint.prune(folder, settings.keep_checkpoints, settings.keep_every_steps)

    return save


def _prepare_folder(settings: PretrainSettings) -> None:
    folder = settings.save_ckpt_path
    assert folder is not None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        removed = checkpoint.clear_half_written(folder)
        text = json.dumps(settings.model_dump(mode="json"), indent=1)
        (folder / "settings.json").write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"save_ckpt_path ({folder}): cannot be written ({error.strerror}); choose another folder"
        ) from error
    if removed:
        print(f"run: removed half-written {', '.join(removed)}")


def _compile(step: Step, batch: dict[str, Any], began: float) -> None:
    ready = time.monotonic()
    step.compile(batch)
    print(
        f"compiled in {time.monotonic() - ready:.1f} s, after {ready - began:.1f} s of imports, "
        "building and the first batch; nothing was trained"
    )


def _hooks(
    settings: PretrainSettings,
    plan: Plan,
    engine: Engine,
    state: State,
    save: Callable[[], None] | None,
    last: int,
    began: float,
) -> list[tuple[Hook, Every]]:
    """What is done now and then, in this order: measure, evaluate, report, save."""
    pace = report.Pace(last, plan.examples_per_step)
    each = Every(steps=1)
    reports = _reports(settings, state) if save is not None else []
    hooks: list[tuple[Hook, Every]] = []

    def measure(info: Info) -> None:
        info.figures.update(pace.after_step(info.step, float(np.sum(info.batch["input_mask"]))))
        info.figures["seconds_waited"] = info.seconds_waited

    def tell(info: Info) -> None:
        for one in reports:
            one(info.step, info.figures)

    first, every_line = state.step + 1, Every(steps=settings.log_every_steps, last_step=last)

    def print_line(info: Info) -> None:
        # The first line too: it says that the run is alive.
        if every_line.due(info.step) or info.step == first:
            print(report.line(info.step, last, info.figures), flush=True)

    hooks.append((measure, each))
    if settings.validation_dir is not None and save is not None:
        hooks.append(
            (
                _evaluation(settings, plan, engine),
                Every(steps=settings.evaluate_every_steps, last_step=last),
            )
        )
    hooks += [(tell, each), (print_line, each)]
    if save is not None:
        every = Every(
            steps=settings.checkpoint_every_steps,
            minutes=settings.checkpoint_every_minutes,
            last_step=last,
        )
        hooks.append((lambda info: save(), every))
    # Saving and evaluating are not the pace of a step.
    hooks.append((lambda info: pace.restart(), each))
    print(
        f"built in {time.monotonic() - began:.1f} s; step {first:,} includes its tracing",
        flush=True,
    )
    return hooks


def _evaluation(settings: PretrainSettings, plan: Plan, engine: Engine) -> Hook:
    assert settings.validation_dir is not None
    reader = assemble.open_corpus(settings.validation_dir, settings, plan.micro_batch_size)

    def evaluate(info: Info) -> None:
        found = assemble.evaluate(
            engine, reader, settings.evaluation_examples, plan.micro_batch_size
        )
        info.figures.update(found)
        print(
            f"step {info.step}: held out, mlm {found['validation_mlm_loss']:.4f} "
            f"({100 * found['validation_mlm_accuracy']:.1f} %)  nsp {found['validation_nsp_loss']:.4f} "
            f"({100 * found['validation_nsp_accuracy']:.1f} %)"
        )

    return evaluate


def _reports(settings: PretrainSettings, state: State) -> list[report.Report]:
    folder = settings.save_ckpt_path
    assert folder is not None
    reports = [report.jsonl(folder / report.METRICS, state.step)]
    if settings.tensorboard_dir is not None:
        reports.append(report.tensorboard(settings.tensorboard_dir))
    if settings.wandb.enabled:
        reports.append(
            report.wandb(settings.wandb.model_dump(), settings.model_dump(mode="json"), folder)
        )
    return reports


def _last_words(settings: PretrainSettings, plan: Plan, began: float, saves: bool) -> str:
    took = report.duration(time.monotonic() - began)
    if not saves:
        return f"run: dry run done in {took}; nothing was saved"
    folder = settings.save_ckpt_path or Path()
    newest = checkpoint.whole_checkpoints(folder)[-1]
    return f"run: {plan.total_steps:,} steps done, {took}; the model is {newest}"
