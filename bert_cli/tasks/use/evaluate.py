"""`bert evaluate`: score a checkpoint of a pre-training run on records, as the run scores itself, on one device."""

from collections.abc import Sequence
from pathlib import Path

from bert_cli.config.markers import Engine
from bert_cli.config.parallel import Parallel
from bert_cli.config.pretrain import PretrainSettings
from bert_cli.config.training import GlobalBatch
from bert_cli.config.use import EvaluateSettings
from bert_cli.data.examples.reader import ExampleStream
from bert_cli.errors import ConfigError, DataError
from bert_cli.files import JSON, is_stdout, output_json
from bert_cli.parse.load import load
from bert_cli.planning.workload import workload_of
from bert_cli.processes import print_error, print_line, print_table
from bert_cli.statistics import Sample, intervals
from bert_cli.tasks.run import baselines, build, corpora, pretrain, start
from bert_cli.tasks.run.models import find_folder, find_source
from bert_cli.tasks.run.resolve import open_mesh
from bert_cli.tasks.run.task import Result
from bert_cli.train import history
from bert_cli.train.checkpoint import SETTINGS

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
    order = order_of(folder, settings.engine)
    records = settings.dataset_dir or order.validation_dir
    if records is None:
        raise ConfigError(
            NAME, "is missing, and the run has no validation_dir", "give --dataset-dir"
        )
    examples = settings.examples or order.evaluation_examples
    held_out = corpora.open_held_out(order.model_copy(update={"validation_dir": records}), NAME)
    assert held_out is not None
    samples = samples_of(order, held_out, examples, [model])[model]
    scores = intervals(samples)
    number = min(examples, held_out.epoch_size or examples)
    if not is_stdout(settings.json_file):
        rows = [(name, *f"{score:.6f}".split(" ", 1)) for name, score in scores.items()]
        print_line(f"{model} on the first {number:,} examples of {records}")
        print_table(("metric", "value", "95 % interval"), rows, right=(1,))
        found = _frequencies(order, held_out, examples) if settings.baselines else {}
        if warning := baselines.compare(Result(samples), found, "mlm_loss"):
            print_error(warning)
    if settings.json_file is not None:
        described: dict[str, JSON] = {
            "model": str(model),
            NAME: records,
            "examples": number,
            "scores": {name: score.value for name, score in scores.items()},
            "intervals": {name: score.bounds for name, score in scores.items()},
        }
        output_json(settings.json_file, described)


def _frequencies(
    order: PretrainSettings, held_out: ExampleStream, examples: int
) -> dict[str, Result]:
    """Return the baseline; without the records of the run print why there is none."""
    try:
        return pretrain.unigram(corpora.open_stream(order), held_out, examples)
    except (ConfigError, DataError) as error:
        print_line(f"baseline: left out, because it reads the run's records: {error}")
        return {}


def order_of(folder: Path, engine: Engine) -> PretrainSettings:
    """Return the order of a pre-training run for one device of an engine."""
    order, _ = load(PretrainSettings, ["--config", str(folder / SETTINGS)], "bert evaluate")
    chunks = order.parallel.embedding_serialization_factor
    one_device = {
        "parallel": Parallel(embedding_serialization_factor=chunks),
        "global_batch": GlobalBatch(micro_batch_size=order.global_batch.micro_batch_size),
        "engine": engine,
        "compile": order.compile if engine == order.engine else "auto",
    }
    return order.model_copy(update=one_device)


def samples_of(
    order: PretrainSettings, held_out: ExampleStream, examples: int, models: Sequence[Path]
) -> dict[Path, dict[str, Sample]]:
    """Return the held-out metrics of models, as a run of this order has them."""
    work = workload_of(order)
    engine = build.build_engine(work, open_mesh(work), trains=False)
    samples = {}
    for model in models:
        start.load_pretrained(find_source(str(model)), work, engine.weights)
        samples[model] = pretrain.evaluate(engine, held_out, examples)
    return samples
