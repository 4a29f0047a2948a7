"""`bert evaluate`: score a checkpoint of a pre-training run on records, as the run scores itself, on one device."""

from collections.abc import Sequence
from pathlib import Path

from bert_cli.config.markers import Engine
from bert_cli.config.parallel import Parallel
from bert_cli.config.pretrain import PretrainSettings
from bert_cli.config.training import GlobalBatch
from bert_cli.config.use import EvaluateSettings
from bert_cli.data.examples.reader import ExampleStream
from bert_cli.errors import ConfigError
from bert_cli.files import JSON, is_stdout, output_json
from bert_cli.optim.schedule import first_loss_scale
from bert_cli.parallel.cluster import Processes
from bert_cli.parse.load import changed, load
from bert_cli.processes import print_line, print_table
from bert_cli.tasks.run import build, corpora, pretrain, start
from bert_cli.tasks.run.models import find_folder, find_source
from bert_cli.tasks.run.resolve import open_mesh
from bert_cli.train import history
from bert_cli.train.checkpoint import SETTINGS
from bert_cli.train.loop import State

NAME = "dataset_dir"


def run(settings: EvaluateSettings) -> None:
    """Print the metrics of a checkpoint.

    Raises CheckpointError where there is none, ConfigError for a run of another command, DataError for its records.
    """
    model = find_folder(str(settings.run), "RUN")
    # The folder of `bert average` has the settings of its run, a checkpoint is in the folder of its run.
    folder = model if (model / SETTINGS).is_file() else model.parent
    kind = history.Run(folder).kind
    if kind != "pretrain":
        problem = "is not a run of pretrain" if kind == "?" else f"is a run of {kind}"
        remedy = (
            "give a run of `bert pretrain`; the command of another run scores with --no-do-training"
        )
        raise ConfigError(f"RUN ({settings.run})", problem, remedy)
    trained = settings_of(folder, settings.engine)
    records = settings.dataset_dir or trained.validation_dir
    if records is None:
        raise ConfigError(
            NAME, "is missing, and the run has no validation_dir", "give --dataset-dir"
        )
    examples = settings.examples or trained.evaluation_examples
    trained = changed(trained, validation_dir=records, evaluation_examples=examples)
    held_out = corpora.open_held_out(trained, NAME)
    assert held_out is not None
    scores = scores_of(trained, held_out, [model])[model]
    number = min(examples, held_out.epoch_size or examples)
    if not is_stdout(settings.json_file):
        rows = [(name, f"{value:.6f}") for name, value in scores.items()]
        print_line(f"{model} on the first {number:,} examples of {records}")
        print_table(("metric", "value"), rows, right=(1,))
    if settings.json_file is not None:
        described: dict[str, JSON] = {
            "model": str(model),
            NAME: records,
            "examples": number,
            "scores": scores,
        }
        output_json(settings.json_file, described)


def settings_of(folder: Path, engine: Engine) -> PretrainSettings:
    """Return the settings of a pre-training run for one device of an engine."""
    trained, _ = load(PretrainSettings, ["--config", str(folder / SETTINGS)], "bert evaluate")
    chunks = trained.parallel.embedding_serialization_factor
    values = {} if engine == trained.engine else {"engine": engine, "compile": "auto"}
    return changed(
        trained,
        parallel=Parallel(embedding_serialization_factor=chunks),
        global_batch=GlobalBatch(micro_batch_size=trained.global_batch.micro_batch_size),
        **values,
    )


def scores_of(
    settings: PretrainSettings, held_out: ExampleStream, models: Sequence[Path]
) -> dict[Path, dict[str, float]]:
    """Return the held-out metrics of models, as a run with these settings has them."""
    mesh = open_mesh(settings, Processes(()))
    engine = build.build_engine(settings, mesh, trains=False)
    state = State(engine.weights, {}, first_loss_scale(1.0))
    scores = {}
    for model in models:
        start.load_pretrained(find_source(str(model)), settings, state)
        scores[model] = pretrain.evaluate(engine, held_out, settings.evaluation_examples)
    return scores
