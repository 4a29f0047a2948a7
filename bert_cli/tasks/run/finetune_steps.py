"""The steps of fine-tuning from its order to its task: model, lengths, layout, devices, examples, plan, teacher."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from bert_cli.config.finetune import FinetuneSettings, TaskSettings
from bert_cli.config.training import TrainSettings
from bert_cli.data.finetune.embeddings import read_embedding
from bert_cli.data.finetune.features import Features
from bert_cli.data.finetune.synthetic import synthetic_features
from bert_cli.data.tokens.tokenizer import TextTokenizer, TokenizerFolder
from bert_cli.errors import ConfigError, combine, logger
from bert_cli.facts.architectures import ARCHITECTURES
from bert_cli.facts.heads import MEAN_CLASSIFICATION
from bert_cli.parse.load import changed
from bert_cli.planning.plan import make_plan
from bert_cli.tasks.model import models
from bert_cli.tasks.model.models import Source
from bert_cli.tasks.model.opened import head_of
from bert_cli.tasks.run import teacher
from bert_cli.tasks.run.job import NEW, Draft, Steps
from bert_cli.tasks.run.resolve import check_folder, check_output_paths, runtime, with_shape_of
from bert_cli.tasks.run.start import Start
from bert_cli.tasks.run.steps import choose_layout, describe_plan, take_devices
from bert_cli.tasks.run.task import Task
from bert_cli.train.checkpoint import Folder

Settings = TypeVar("Settings", bound=FinetuneSettings)
Build = Callable[[Settings, TextTokenizer, Source | None], Task]
Needs = Callable[[Settings], Sequence[str]]

TEACHER_OUTPUTS = "outputs of the teacher"
SYNTHETIC_EXAMPLES = 12_000  # as many as Graphcore's example generates
SYNTHETIC_LABELS = 2  # of a text, or the ends of an answer


def steps_of(build: Build[Settings], needs: Needs[Settings] = lambda _: ()) -> Steps:
    """Return the steps of fine-tuning, which raise ConfigError, DataError, CheckpointError or DeviceError.

    `build` returns the task for the settings, the tokenizer and the model from which the run starts; `needs` returns
    the names of required settings. `bert doctor` takes the steps but TEACHER_OUTPUTS.
    """
    return (
        ("model", partial(find_trained, needs=needs)),
        ("sizes", take_lengths),
        ("layout", choose_layout),
        ("devices", take_devices),
        ("examples", partial(read_examples, build=build)),
        ("plan", plan_steps),
        ("teacher", find_teacher),
        (TEACHER_OUTPUTS, read_outputs),
    )


def find_trained(draft: Draft[Settings], needs: Needs[Settings]) -> str:
    """Find the model from which the run starts or, without training, which is scored, and take its shape.

    A model in the run's folder has priority where nothing is trained.
    """
    order = draft.order
    required = needs(order)
    if order.generated_dataset:
        order = order.model_copy(update={"do_validation": False})
        required = ()
    remedies = {name: f"pass --{name.replace('_', '-')}" for name in required}
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
    # Ranks above 0 write no checkpoint, and their host may see the folder read-only.
    if draft.processes.rank == 0:
        check_folder(order, "save_ckpt_path")
    check_folder(order, "cache_dir")
    name = order.pretrained_ckpt_path
    flag = "--pretrained-ckpt-path"
    if not order.do_training and run.path and (name is None or run.newest):
        name = str(run.path)
        flag = "--save-ckpt-path"
    source = None
    if name is not None:
        source = models.find_source(name, flag)
    if source is not None and not order.do_training:
        order = _scored_as_trained(order, source)
    draft.order = with_shape_of(order, source)
    draft.start = Start(run, source)
    if source is None:
        return "none: new weights"
    return f"from {source.folder}"


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
            logger.info(f"run: pooling is {order.pools_by}, as in {source.folder}")
    if order.tokenizer_path is not None:
        draft.tokenizer = TokenizerFolder(models.find_tokenizer(order.tokenizer_path))
    if "max_seq_length" not in order.model_fields_set:
        of_tokenizer = draft.tokenizer and draft.tokenizer.max_length
        lengths = (order.max_seq_length, of_tokenizer, stored.get("max_seq_length"))
        # The shortest of the three that are known.
        longest = min(filter(None, lengths))
        if longest < order.max_seq_length:
            order = changed(order, max_seq_length=longest)
        logger.info(f"run: max_seq_length is {order.max_seq_length} (default)")
    draft.order = order
    return ""


def read_examples(draft: Draft[Settings], build: Build[Settings]) -> str:
    """Read the examples of the task; nothing without the model, which `bert doctor` has reported."""
    order = draft.order
    source = draft.start.source
    if order.generated_dataset:
        logger.info("run: trains on synthetic examples; nothing is scored")
        names = ("0", "1") if order.head.has_label_names else None
        examples = synthetic_examples(order, SYNTHETIC_EXAMPLES)
        draft.task = Task(SYNTHETIC_LABELS, names, examples)
        return "synthetic examples"
    if draft.start is NEW or draft.tokenizer is None:
        return ""
    tokenizer = models.read_tokenizer_for(order.bert_config, draft.tokenizer)
    if source is not None and not order.do_training:
        needed = ARCHITECTURES[order.bert_config.architecture].class_name(order.head)
        if order.head.needs and source.architecture != needed:
            raise another_model(source, f"was not trained for this task, which needs a {needed}")
    task = build(order, tokenizer, source)
    for part in filter(None, (task.train, *task.development.values())):
        models.check_segments(order.bert_config, part)
    if isinstance(order, TaskSettings) and order.distillation.teacher is not None:
        task = replace(task, teach=partial(teacher.find_labels, order, tokenizer))
    draft.task = task
    return ""


def plan_steps(draft: Draft[FinetuneSettings]) -> str:
    """Make the plan of training on all examples, also on those that the teacher is going to label."""
    order = draft.order
    task = draft.task
    examples = training_examples(task, order.seed)
    if examples is None:
        return ""
    number = len(examples)
    if task.train_unlabelled is not None:
        number += len(task.train_unlabelled)
    draft.plan = make_plan(order, number // order.texts_per_example)
    return describe_plan(draft.plan)


def training_examples(task: Task, seed: int) -> Features | None:
    """Return the examples that a run with a seed trains on."""
    if task.train is None or task.draw is None:
        return task.train
    return task.draw(task.train, seed)


def find_teacher(draft: Draft[FinetuneSettings]) -> str:
    """Open the teacher, if the task has one, and check that the run can learn from it."""
    if draft.task.teach is not None:
        draft.learn = draft.task.teach(draft.task)
    return ""


def read_outputs(draft: Draft[FinetuneSettings]) -> str:
    """Compute the outputs of the teacher on the training examples."""
    learn = draft.learn
    # It holds the teacher, whose memory training needs.
    draft.learn = None
    if learn is not None:
        draft.task = learn(runtime(draft.order.engine).group_of(draft.mesh))
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
            logger.info(f"run: {name} is {value}, as in the training of {source.folder}")
    if not trained:
        return settings
    return changed(settings, **trained)


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
