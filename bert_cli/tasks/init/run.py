"""`bert init`: write the config and the commands for training a model on a text on this machine, or for an index.

For a run it measures some steps on synthetic examples, calls `recipe.choose` and prints the choice with its reasons.
The commands are ordinary commands; no file that a run reads is particular to `bert init`.
"""

import gc
import math
import re
import shlex
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from bert_cli.commands import COMMANDS
from bert_cli.config.bench import BenchRunSettings
from bert_cli.config.init import InitSettings
from bert_cli.config.parallel import Parallel
from bert_cli.config.training import GlobalBatch, OptimizerOpts
from bert_cli.data.finetune.embeddings import MODULES
from bert_cli.data.io import files
from bert_cli.data.io.inputs import open_text
from bert_cli.data.text.preprocess import splitter_of
from bert_cli.data.tokens.tokenizer import Vocabulary
from bert_cli.data.tokens.vocab import find_of_any_case
from bert_cli.errors import ConfigError, DataError
from bert_cli.files import atomic_folder, check_new_folder, write_json_atomically
from bert_cli.parallel.cluster import Processes
from bert_cli.processes import cpu_count, lines_to, print_line, quiet_imports
from bert_cli.tasks.init import recipe, text
from bert_cli.tasks.init.recipe import Machine, Recipe, Start, TextFacts
from bert_cli.tasks.look import machine as look
from bert_cli.tasks.look.plot import render
from bert_cli.text import count

AS_PUBLISHED = "an index needs no training: the model is used as published"
SCRIPT = "commands.sh"
MEASURED_STEPS = 5


def run(settings: InitSettings) -> None:
    """Print the choice and write it. Raises DataError, CheckpointError, ConfigError or DeviceError."""
    check_new_folder(settings.out)
    parts, reading = open_input(settings)
    is_search = settings.goal == "search"
    model = vocabulary = None
    if settings.start:
        model, vocabulary = find_start(settings.start, needs_vocabulary=not is_search)
    if is_search and model and not model.is_for_sentences:
        remedy = "use one that was, such as --from sentence-transformers/all-MiniLM-L6-v2"
        raise ConfigError(f"from (--from {model.name})", "was not trained to compare texts", remedy)
    facts = text.read_facts(parts, reading, vocabulary)
    print_line(f"init: {text.describe(facts)}")
    chosen = None
    if is_search:
        warnings = []
        if model:
            warnings = recipe.unknown_words(facts, model)
        choice = "\n".join([*(f"warning: {problem}" for problem in warnings), AS_PUBLISHED])
    else:
        if settings.speed is None:
            print_line("init: timing this machine, about a minute, longer if it is busy")
        machine, described = measure(settings, facts, model)
        print_line(f"init: {described}")
        chosen = recipe.choose(facts, machine, model, settings.hours, settings.out)
        choice = report(chosen)
    print_line(choice)
    if chosen is not None and chosen.refusal:
        raise chosen.refusal
    if settings.dry_run:
        print_line("init: a dry run; nothing was written")
        return
    language = next(iter(facts.languages), "en")
    split = splitter_of("sentencex", language)
    read = partial(text.documents_of, parts, reading)
    with atomic_folder(settings.out) as folder:
        if chosen is None:
            sentence = text.plain_sentence(text.sentences_of(next(read()), split))
            is_plain = all(part.format == "plain" for part in parts)
            words = search_commands(settings, sentence, is_plain=is_plain)
        else:
            pieces = (lambda: text.cut(read())) if facts.is_cut else read
            sentence = text.divide(folder, pieces, facts.documents, split)
            words = commands(chosen, settings.goal, language, sentence)
            config = {**chosen.config, "engine": settings.engine}
            write_json_atomically(folder / "pretrain.json", config)
        lines = "\n".join(re.sub("^bert ", f"{program()} ", line) for line in words)
        script = (
            f"#!/usr/bin/env bash\nset -euo pipefail\ncd {shlex.quote(str(Path.cwd()))}\n{lines}\n"
        )
        (folder / SCRIPT).write_text(script, encoding="utf-8")
        page = f"# What `bert init` chose\n\n```text\n{choice}\n```\n\n```bash\n{lines}\n```\n"
        (folder / "README.md").write_text(page, encoding="utf-8")
    print_line(
        f"init: wrote {settings.out}; run these commands, or all with bash {settings.out / SCRIPT}:\n"
    )
    print_line(lines)


def open_input(settings: InitSettings) -> tuple[list[files.Part], files.Reading]:
    """Return the parts of the text, and how they are read. Raises DataError for records in place of text."""
    if (settings.input / "corpus.json").exists():
        remedy = "use the text that they were made of"
        raise DataError(f"input ({settings.input})", "holds records, not text", remedy)
    reading = files.Reading(
        settings.input_format, settings.text_field, settings.documents, line_breaks="auto"
    )
    names = settings.model_fields_set
    strict = settings.strict
    parts, _ = open_text("init", settings.input, settings.out, reading, names, strict=strict)
    return parts, reading


def program() -> str:
    """Return the command that starts this `bert` in a shell: its name if it is on PATH, else its path."""
    path = Path(sys.executable).with_name("bert")
    on_path = shutil.which("bert")
    if not path.exists() or (on_path and Path(on_path).samefile(path)):
        return "bert"
    return shlex.quote(str(path))


def report(chosen: Recipe) -> str:
    """Return the warnings, and the choice as a table of what, value and reason."""
    widths = [max(len(row[column]) for row in chosen.rows) for column in range(2)]
    table = [f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in chosen.rows]
    return "\n".join([*(f"warning: {problem}" for problem in chosen.warnings), *table])


def search_commands(settings: InitSettings, asked: str, *, is_plain: bool) -> list[str]:
    """Return the commands of an index, which read the input as `bert init` has read it."""
    index = shlex.quote(str(settings.out / "search.index"))
    words = [str(settings.input)]
    if settings.input_format != "auto":
        words += ["--input-format", settings.input_format]
    if settings.text_field != "text":
        words += ["--text-field", settings.text_field]
    if is_plain:
        words += ["--documents", settings.documents]
    reading = shlex.join(words)
    return [
        "# an index of your text, and a sentence of it: ask your own questions instead",
        f"bert search make {index} {reading} --model {shlex.quote(str(settings.start))}",
        f"bert search ask {index} {shlex.quote(asked)}",
    ]


def commands(chosen: Recipe, goal: str, language: str, sentence: str) -> list[str]:
    """Return the commands of a run with comments; the sentence is of the held-out text."""
    start = chosen.start
    lines = render(
        Path(__file__).with_name(SCRIPT),
        chosen=chosen,
        start=start,
        goal=goal,
        language=language,
        out=shlex.quote(str(chosen.out)),
        vocabulary=shlex.quote(start.vocabulary) if start else "",
        rate=recipe.step(recipe.TABLE["labels"]["rates"], chosen.model.hidden_size),
        masked=shlex.quote(text.mask_word(sentence)),
    )
    return lines.splitlines()


def find_start(name: str, *, needs_vocabulary: bool) -> tuple[Start, Vocabulary | None]:
    """Return the model to start from, and its vocabulary, or None where none is needed and records cannot be made.

    Raises CheckpointError if the model is absent or not supported, ConfigError for a vocabulary that is needed.
    """
    with quiet_imports():
        from bert_cli.tasks.model import models  # loads TensorFlow
    source = models.find_source(name, "--from")
    path = Path(name)
    pieces = name
    if path.exists() or (path.parent != Path() and path.parent.is_dir()):
        pieces = str(source.folder)
    vocabulary = None
    try:
        vocabulary = find_of_any_case(pieces)
    except (ConfigError, DataError):  # of Unigram, which an index reads
        if needs_vocabulary:
            raise
    is_cased = vocabulary is None or vocabulary.normalization.cased
    is_for_sentences = (source.folder / MODULES).is_file()
    return Start(name, source.config, pieces, is_cased, is_for_sentences), vocabulary


def measure(settings: InitSettings, facts: TextFacts, model: Start | None) -> tuple[Machine, str]:
    """Return this machine with the rate of some steps of a candidate on synthetic examples, and a description."""
    with quiet_imports():
        from bert_cli.tasks.bench import measure as bench  # loads TensorFlow
        from bert_cli.tasks.run import resolve
    kind, devices, _ = resolve.runtime(settings.engine).devices_here(Processes(()))
    machine = Machine(kind, devices, look.fastest_precision(kind), flops=math.inf)
    if model:
        name = model.name
        config = model.config
    else:
        (name, *_), config = recipe.new_model(facts, machine, math.inf, [])
    length, predictions = recipe.length_for(facts, model)
    flops = recipe.flops_of(config, length, predictions)
    if settings.speed is not None:
        described = (
            f"{name} trains at {settings.speed:,.1f} examples/s of length {length} (--speed)"
        )
        return replace(machine, flops=flops * settings.speed, is_timed=False), described
    batch = devices * recipe.fast_micro_batch(kind)
    kind_of_trial = COMMANDS["bench pretrain"].settings_class()
    trial = kind_of_trial.model_validate(
        {
            "generated_dataset": True,
            "bert_config": config,
            "max_seq_length": length,
            "max_predictions_per_seq": predictions,
            "global_batch": GlobalBatch(**recipe.batch_of(batch, machine)),
            "engine": settings.engine,
            "parallel": Parallel(layout="auto"),
            "precision": machine.precision,
            "optimizer_opts": OptimizerOpts(**recipe.optimizer(1e-5, 0.0, machine.precision)),
            "steps": MEASURED_STEPS,
            "warmup_steps": 1,  # which compiles
        }
    )
    assert isinstance(trial, BenchRunSettings)
    try:
        with lines_to("nowhere"):
            metrics = bench.measure(trial)
    except SystemExit:  # a request to stop, whose line went with the others
        raise KeyboardInterrupt from None
    assert metrics is not None  # of a single process
    gc.collect()  # the weights of the engine that was measured
    seconds = metrics["step_seconds"]
    low, high = (seconds[end] / seconds["median"] for end in ("low", "high"))
    spread = min(low, machine.spread[0]), max(high, machine.spread[1])
    speed = metrics["examples_per_second"]
    if kind == "CPU":
        where = count(cpu_count(), "core")
    else:
        where = count(devices, kind)
    steps = f"{count(MEASURED_STEPS, 'step')} of {batch} x {length}"
    described = f"{name} trains at {speed:,.1f} examples/s on {where} in {machine.precision} (median of {steps})"
    return replace(machine, flops=metrics["flops_per_second"], spread=spread), described
