"""What a measurement runs: the examples and the plan of pre-training, or of fine-tuning on questions.

Examples are made up in the shape of real ones, or those that the run would read. Weights are new ones
in any case, since their values take no time; the shape is the config's, or where that has none the
shape of the model that the run starts from.
"""

from typing import TypeVar

from bert_cli.config.bench import BenchPretrainSettings, BenchSquadSettings
from bert_cli.config.plan import make_plan
from bert_cli.config.training import PretrainSettings, TrainSettings
from bert_cli.data.finetune.features import Features
from bert_cli.data.records.tokenizer import read_tokenizer
from bert_cli.data.stream.synthetic import synthetic_features
from bert_cli.errors import ConfigError
from bert_cli.parallel.engine import Mesh
from bert_cli.tasks.finetune import squad
from bert_cli.tasks.run import corpora, finetune, start
from bert_cli.tasks.run.spec import RunSpec

Asked = TypeVar("Asked", bound=TrainSettings)


def shaped(settings: Asked, made_up: bool) -> Asked:
    """The settings with the shape of the model that is measured, and the packs that its records have."""
    name = settings.pretrained_ckpt_path
    if name is not None and not (made_up and "bert_config" in settings.model_fields_set):
        settings = start.with_shape_of(settings, start.find_source(name))
    return (
        corpora.with_sizes_of_records(settings)
        if isinstance(settings, PretrainSettings)
        else settings
    )


def job_of(settings: BenchPretrainSettings | BenchSquadSettings, mesh: Mesh) -> RunSpec:
    """What a run of these settings trains on. Raises what the run raises for what it reads."""
    if isinstance(settings, BenchPretrainSettings):
        return _pretraining(settings, mesh)
    return _questions(settings, mesh)


def _pretraining(settings: BenchPretrainSettings, mesh: Mesh) -> RunSpec:
    part = mesh.processes.rank, mesh.processes.count
    stream = corpora.open_stream(settings, make_plan(settings, None).examples_per_step, *part)
    plan = make_plan(settings, stream.epoch_size, stream.sequences_per_example)
    sample = stream.first_micro_batches(len(mesh.devices))
    return RunSpec(
        plan, stream, sample, lambda model: start.disk_format(settings, model, stream.folder)
    )


def _questions(settings: BenchSquadSettings, mesh: Mesh) -> RunSpec:
    features = made_up_windows(settings) if settings.generated_dataset else _windows_of(settings)
    plan, reader, sample = finetune.open_features(settings, features, mesh)
    return RunSpec(plan, reader, sample, lambda model: start.disk_format(settings, model, None))


def _windows_of(settings: BenchSquadSettings) -> Features:
    named = settings.tokenizer_path or settings.pretrained_ckpt_path
    if named is None:
        raise ConfigError(
            "tokenizer_path: is not given, and real questions are read by a tokenizer; give --tokenizer-path or "
            "--pretrained-ckpt-path"
        )
    tokenizer = read_tokenizer(start.find_tokenizer(named))
    words = settings.bert_config.vocab_size
    if len(tokenizer.pieces) > words:
        raise ConfigError(
            f"{named} (tokenizer of {len(tokenizer.pieces):,} pieces): the model has {words:,} words; give another "
            "--tokenizer-path, or --bert-config.vocab-size"
        )
    task = squad.build(settings.model_copy(update={"do_validation": False}), tokenizer, None)
    assert task.train is not None
    return task.train


def made_up_windows(settings: BenchSquadSettings) -> Features:
    """Synthetic windows of one step."""
    batch = settings.global_batch
    return synthetic_features(
        settings.LAST_BLOCKS[-1],
        batch.micro_batch_size * batch.replicas * batch.grad_acc_steps_per_replica,
        labels=2,
        vocab_size=settings.bert_config.vocab_size,
        sequence_length=settings.max_seq_length,
        seed=settings.seed,
    )
