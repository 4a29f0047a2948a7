"""`bert evaluate`: score a checkpoint of a pre-training run on records, as the run scores itself, on one device."""

from collections.abc import Sequence
from pathlib import Path

from bert_cli.config.parallel import Parallel
from bert_cli.config.pretrain import PretrainSettings
from bert_cli.config.training import GlobalBatch
from bert_cli.config.use import EvaluateSettings
from bert_cli.errors import ConfigError, DataError
from bert_cli.files import JSON, is_stdout, output_json
from bert_cli.parse.load import load_file
from bert_cli.processes import print_error, print_line, print_table
from bert_cli.settings.markers import Engine
from bert_cli.statistics import Sample, intervals
from bert_cli.tasks.model.models import find_folder, find_source
from bert_cli.tasks.run import build, corpora, pretrain, start, steps
from bert_cli.tasks.run.job import Draft
from bert_cli.tasks.run.resolve import open_mesh
from bert_cli.tasks.run.task import Result, compare
from bert_cli.train import history
from bert_cli.train.checkpoint import SETTINGS

NAME = "dataset_dir"


def run(settings: EvaluateSettings) -> None:
    """Print the metrics of a checkpoint.

    Raises CheckpointError where there is none, ConfigError for a run of another command, DataError for its records.
    """
    model = find_folder(str(settings.run), "RUN")
    # The folder of `bert average` has the settings of its run, a checkpoint is in the folder of its run.
    folder = model
    if not (model / SETTINGS).is_file():
        folder = model.parent
    kind = history.Run(folder).kind
    if kind != "pretrain":
        problem = "is not a run of pretrain"
        remedy = (
            "use a run of `bert pretrain`; the command of another run scores with --no-do-training"
        )
        raise ConfigError(f"RUN ({settings.run})", problem, remedy)
    draft = draft_of(folder, model, settings.engine, settings.dataset_dir, NAME)
    held_out = draft.held_out
    if held_out is None:
        problem = "is missing, and the run has no validation_dir"
        raise ConfigError(NAME, problem, "pass --dataset-dir")
    examples = settings.examples or draft.order.evaluation_examples
    samples = samples_of(draft, [model], examples)[model]
    scores = intervals(samples)
    number = min(examples, held_out.epoch_size or examples)
    records = draft.order.validation_dir
    if not is_stdout(settings.json_file):
        rows = [(name, *f"{score:.6f}".split(" ", 1)) for name, score in scores.items()]
        print_line(f"{model} on the first {number:,} examples of {records}")
        print_table(("metric", "value", "95 % interval"), rows, right=(1,))
        baselines = {}
        try:
            if settings.baselines:
                baselines = pretrain.unigram(corpora.open_stream(draft.order), held_out, examples)
        except (ConfigError, DataError) as error:
            print_line(f"baseline: left out, because it reads the run's records: {error}")
        warning = compare([Result(samples)], baselines, "mlm_loss")
        if warning:
            print_error(warning)
    described: dict[str, JSON] = {
        "model": str(model),
        NAME: records,
        "examples": number,
        "scores": {name: score.value for name, score in scores.items()},
        "intervals": {name: score.bounds for name, score in scores.items()},
    }
    output_json(settings.json_file, described)


def draft_of(
    folder: Path, model: Path, engine: Engine, records: str | None, name: str = "validation_dir"
) -> Draft[PretrainSettings]:
    """Return the pre-training run of a folder on one device of an engine, as far as its evaluation needs it.

    It starts from the model, and `records` replace its held-out examples; messages call them `name`.
    """
    order = load_file(PretrainSettings, folder / SETTINGS)
    chunks = order.parallel.embedding_serialization_factor
    # What the run compiled says nothing about another engine.
    compilation = "auto"
    if engine == order.engine:
        compilation = order.compile
    changes = {
        "save_ckpt_path": None,
        "pretrained_ckpt_path": str(model),
        "parallel": Parallel(embedding_serialization_factor=chunks),
        "global_batch": GlobalBatch(micro_batch_size=order.global_batch.micro_batch_size),
        "engine": engine,
        "compile": compilation,
        "validation_dir": records or order.validation_dir,
    }
    draft = Draft(order.model_copy(update=changes))
    # Without `take`, which silences ranks above 0 of a job: an evaluation is a process of its own.
    steps.find_model(draft)
    steps.open_held_out(draft, name)
    return draft


def samples_of(
    draft: Draft[PretrainSettings], models: Sequence[Path], examples: int
) -> dict[Path, dict[str, Sample]]:
    """Return the metrics of models on the held-out examples of a run."""
    assert draft.held_out is not None
    order = draft.order
    engine = build.build_engine(order, open_mesh(order), trains=False)
    samples = {}
    for model in models:
        start.load_pretrained(find_source(str(model)), order, engine.weights)
        samples[model] = pretrain.evaluate(draft.held_out, examples, engine)
    return samples
