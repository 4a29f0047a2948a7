"""The steps of fine-tuning from its order to its task: model, lengths, layout, devices, examples."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from bert_cli.config.finetune import FinetuneSettings, TaskSettings
from bert_cli.config.training import TrainSettings
from bert_cli.data.finetune.embeddings import read_embedding
from bert_cli.data.finetune.features import Features
from bert_cli.data.finetune.synthetic import synthetic_features
from bert_cli.data.tokens.tokenizer import TextTokenizer, TokenizerFolder
from bert_cli.disk import is_writable
from bert_cli.errors import ConfigError, DataError, combine
from bert_cli.facts.architectures import ARCHITECTURES
from bert_cli.facts.heads import MEAN_CLASSIFICATION
from bert_cli.parse.load import changed
from bert_cli.processes import print_line
from bert_cli.tasks.model import models
from bert_cli.tasks.model.models import Source
from bert_cli.tasks.model.opened import head_of
from bert_cli.tasks.run.job import Draft, Steps
from bert_cli.tasks.run.resolve import check_output_paths, runtime, with_shape_of
from bert_cli.tasks.run.start import Start
from bert_cli.tasks.run.steps import choose_layout, take_devices
from bert_cli.tasks.run.task import Task
from bert_cli.tasks.run.teacher import with_teacher
from bert_cli.train.checkpoint import Folder

Settings = TypeVar("Settings", bound=FinetuneSettings)
Build = Callable[[Settings, TextTokenizer, Source | None], Task]

SYNTHETIC_EXAMPLES = 12_000  # as many as Graphcore's example generates
SYNTHETIC_LABELS = 2  # of a text, or the ends of an answer


def steps_of(build: Build[Settings], needs: Sequence[str] = ()) -> Steps:
    """Return the steps of fine-tuning, which raise ConfigError, DataError, CheckpointError or DeviceError.

    `build` returns the task for the settings, the tokenizer and the model from which the run starts; `needs` names
    required settings.
    """
    return (
        ("model", partial(find_trained, needs=needs)),
        ("sizes", take_lengths),
        ("layout", choose_layout),
        ("devices", take_devices),
        ("examples", partial(read_examples, build=build)),
    )


def find_trained(draft: Draft[FinetuneSettings], needs: Sequence[str]) -> str:
    """Find the model from which the run starts or, without training, which is scored, and take its shape.

    A model in the run's folder has priority where nothing is trained.
    """
    order = draft.order
    if order.generated_dataset:
        order = order.model_copy(update={"do_validation": False})
        needs = ()
    remedies = {name: f"pass --{name.replace('_', '-')}" for name in needs}
    instead = "--save-ckpt-path of a trained run"
    has_other = order.save_ckpt_path is not None
    if order.do_training:
        instead = "for new weights --tokenizer-path and bert_config"
        has_other = order.tokenizer_path is not None
    if not has_other and not order.generated_dataset:
        remedies["pretrained_ckpt_path"] = f"pass --pretrained-ckpt-path MODEL, or {instead}"
    missing = (name for name in remedies if getattr(order, name) is None)
    errors = [ConfigError(name, "is missing", remedies[name]) for name in missing]
    try:
        if order.do_training:
            check_output_paths(order)
    except ConfigError as error:
        errors.append(error)
    if errors:
        raise combine(errors)
    run = Folder(order.save_ckpt_path)
    # Asked before the first step, not after the last.
    if run.path and not is_writable(run.path):
        remedy = "use another --save-ckpt-path"
        raise DataError(f"save_ckpt_path ({run.path})", "cannot be written", remedy)
    name = order.pretrained_ckpt_path
    flag = "--pretrained-ckpt-path"
    if not order.do_training and run.path and (name is None or run.newest):
        name = str(run.path)
        flag = "--save-ckpt-path"
    source = None if name is None else models.find_source(name, flag)
    if source is not None and not order.do_training:
        order = _scored_as_trained(order, source)
    draft.order = with_shape_of(order, source)
    draft.start = Start(run, source)
    return "none: new weights" if source is None else f"from {source.folder}"


def take_lengths(draft: Draft[FinetuneSettings]) -> str:
    """Take the tokenizer and, where the order does not set them, the pooling and the length of the model's folder."""
    order = draft.order
    source = draft.start.source
    stored = {}
    if source is not None:
        draft.tokenizer = source.tokenizer
    if source is not None and order.pools_by is not None:
        stored = read_embedding(source.folder)
        if "pooling" in stored and "pooling" not in order.model_fields_set:
            order = changed(order, pooling=stored["pooling"])
            draft.lines.append(f"run: pooling is {order.pools_by}, as in {source.folder}")
    if order.tokenizer_path is not None:
        draft.tokenizer = TokenizerFolder(models.find_tokenizer(order.tokenizer_path))
    if "max_seq_length" not in order.model_fields_set:
        of_tokenizer = draft.tokenizer and draft.tokenizer.max_length
        lengths = (order.max_seq_length, of_tokenizer, stored.get("max_seq_length"))
        # The shortest of the three that are known.
        longest = min(filter(None, lengths))
        if longest < order.max_seq_length:
            order = changed(order, max_seq_length=longest)
        draft.lines.append(f"run: max_seq_length is {order.max_seq_length} (default)")
    draft.order = order
    return ""


def read_examples(draft: Draft[Settings], build: Build[Settings]) -> str:
    """Read the examples of the task, with the outputs of its teacher."""
    order = draft.order
    source = draft.start.source
    if order.generated_dataset:
        draft.lines.append("run: trains on synthetic examples; nothing is scored")
        names = ("0", "1") if order.head.has_label_names else None
        examples = synthetic_examples(order, SYNTHETIC_EXAMPLES)
        draft.task = Task(SYNTHETIC_LABELS, names, examples)
        return "synthetic examples"
    assert draft.tokenizer is not None
    tokenizer = models.read_tokenizer_for(order.bert_config, draft.tokenizer)
    if source is not None and not order.do_training:
        needed = ARCHITECTURES[order.bert_config.architecture].class_name(order.head)
        if order.head.needs and source.architecture != needed:
            raise another_model(source, f"was not trained for this task, which needs a {needed}")
    task = build(order, tokenizer, source)
    for part in filter(None, (task.train, *task.development.values())):
        models.check_segments(order.bert_config, part)
    if isinstance(order, TaskSettings) and order.distillation.teacher is not None:
        task = with_teacher(order, task, tokenizer)
    if task.teach is not None:
        task = task.teach(task=task, group=runtime(order.engine).group_of(draft.mesh))
    draft.task = task
    return ""


def _scored_as_trained(settings: Settings, source: Source) -> Settings:
    """Return the settings of scoring with the head of the model, and the windows of its training where none are set."""
    fields = type(settings).model_fields
    is_few = head_of(source) == MEAN_CLASSIFICATION
    trained: dict[str, object] = {"few": True} if is_few and "few" in fields else {}
    if not is_few:
        sizes = models.as_trained(source).window_sizes
        trained = {n: v for n, v in sizes.items() if n in fields}
    trained = {n: v for n, v in trained.items() if n not in settings.model_fields_set}
    for name, value in trained.items():
        if value != getattr(settings, name):
            print_line(f"run: {name} is {value}, as in the training of {source.folder}")
    return changed(settings, **trained) if trained else settings


def synthetic_examples(
    order: TrainSettings, number: int, labels: int = SYNTHETIC_LABELS
) -> Features:
    """Return synthetic examples for the head of the model."""
    return synthetic_features(
        order.head,
        number,
        labels=labels,
        vocab_size=order.bert_config.vocab_size,
        sequence_length=order.max_seq_length,
        seed=order.seed,
    )


def another_model(source: Source, problem: str) -> ConfigError:
    """Return the error of a model that is only scored and has no answers to the task."""
    remedy = "leave out --no-do-training, or use a model that was"
    return ConfigError(f"{source.folder} ({source.architecture})", problem, remedy)
