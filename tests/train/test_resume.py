"""A checkpoint is resumed with the same bytes, by a run with the same fixed settings, if no file has changed."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.checkpoints import FIXED, PLAIN, SCALE, build, bytes_of, save, settings_of, trained
from support.model_inputs import hidden_of, make_examples
from support.settings import SHAPE

from bert_cli.commands import COMMANDS
from bert_cli.errors import CheckpointError
from bert_cli.files import OWN_CHECKSUM, STATE
from bert_cli.settings import markers
from bert_cli.settings.markers import marked
from bert_cli.tasks.model import models
from bert_cli.tasks.run.job import Draft
from bert_cli.train import checkpoint
from bert_cli.train.checkpoint import MODEL, OPTIMIZER, Saved
from bert_cli.train.loop import copy_state


@pytest.fixture(scope="module")
def tiny():
    return trained(settings_of())


@pytest.fixture
def saved(tiny, tmp_path):
    return save(tmp_path / "run", *tiny[1:])


@pytest.fixture(scope="module")
def fresh():
    """State and format of another start of the run."""
    return build(settings_of(seed=5))[1:]


def failure(path: Path, fresh, fixed=FIXED, settings=None) -> str:
    """The message of a checkpoint that cannot be resumed."""
    with pytest.raises(CheckpointError) as error:
        checkpoint.resume(Saved(path), *fresh, fixed, settings)
    return str(error.value)


# --- what a run is

MAY_CHANGE = {
    # Where things are, how often they are done, and what is reported.
    "about", "save_ckpt_path", "pretrained_ckpt_path", "checkpoint_every_steps", "checkpoint_every_minutes",
    "keep_checkpoints", "keep_every_steps", "log_every_steps", "evaluate_every_steps",
    "tensorboard_dir", "wandb", "exit_code_when_stopped", "dry_run", "compile", "deterministic",
    "cache_dir", "tokenizer_path", "cluster", "engine", "parallel", "require_gpu",
    # What is scored, and how answers are chosen.
    "validation_dir", "evaluation_examples", "do_training", "do_validation", "do_test", "validation_file",
    "retrieval_file", "max_answer_length", "null_score_diff_threshold", "early_stop",
    "baselines",
}  # fmt: skip
BY_THEIR_RESULTS = {
    # `corpus` is a fingerprint of the examples.
    "dataset_dir", "train_file", "text_column", "label_column", "held_out_fraction", "glue_task", "version_2",
    "doc_stride", "max_query_length", "distillation",
    # `examples_per_step`, `total_steps`, `step_sizes` and `micro_batch_size`; each seed has a run of its own.
    "global_batch", "total_num_train_samples", "num_epochs", "seeds",
}  # fmt: skip


NUMBERS_OF_A_RUN = {
    **dict.fromkeys(("total_steps", "micro_batch_size"), (5, 6)),
    "matryoshka": ([5], [6]),
    "optimizer_opts": ({"name": "before"}, {"name": "after"}),
}


def test_a_run_continues_only_with_each_setting_that_decides_its_numbers(tiny, fresh, tmp_path):
    """A new setting is marked as fixed, or belongs to one of the lists above."""
    commands = ("pretrain", "squad", "glue", "ner", "classify", "embed")
    kinds = [COMMANDS[name].settings_class() for name in commands]
    fields = {name for kind in kinds for name in kind.model_fields}
    fixed_names = {name for kind in kinds for name in marked(kind, markers.FIXED)}
    assert fields >= MAY_CHANGE | BY_THEIR_RESULTS
    assert fixed_names == fields - MAY_CHANGE - BY_THEIR_RESULTS
    numbers = {"micro_batch_size", "examples_per_step", "total_steps", "corpus"}
    values = {name: ("before", "after") for name in fixed_names | numbers} | NUMBERS_OF_A_RUN
    fixed = {name: before for name, (before, _) in values.items()}
    path = checkpoint.save(tmp_path, copy_state(tiny[1]), PLAIN, fixed=fixed, settings={})
    for name, (before, after) in values.items():
        message = failure(path, fresh, fixed | {name: after})
        shown = "before" if isinstance(before, dict) else re.escape(str(before))
        assert re.search(rf": {name}[\w.]*( \(.*\))? was {shown}, is ", message), name
    settings = settings_of()
    draft = Draft(settings)
    draft.mesh = draft.stop = None
    plan = SimpleNamespace(examples_per_step=8, total_steps=100, step_sizes=None)
    written = draft.job(plan, SimpleNamespace(fingerprint="0123"), {}).fixed
    numbers.add("chosen_on_half")  # with its own words where it differs
    assert written.keys() == marked(type(settings), markers.FIXED) | numbers
    assert written["bert_config"] == settings.bert_config.model_dump()
    assert written["micro_batch_size"] == 2
    assert written == json.loads(json.dumps(written)), "equal to what is read from the file"


# --- its bytes


@pytest.mark.parametrize(
    ("precision", "scaling"),
    [
        ("float32", None),
        ("float32", "unit"),
        ("mixed_bfloat16", None),
        ("float16", None),
        ("float16", "unit"),
    ],
)
def test_every_byte_is_restored_and_transformers_has_the_dtype_and_computes_the_same(
    precision, scaling, tmp_path
):
    import torch
    import transformers

    settings = settings_of(precision=precision, scaling=scaling)
    engine, state, form = trained(settings)
    path = save(tmp_path, state, form)
    _, other, form = build(settings.model_copy(update={"seed": 5}))
    assert bytes_of(other) != bytes_of(state)
    checkpoint.resume(Saved(path), other, form, FIXED)
    assert bytes_of(other) == bytes_of(state)
    assert (other.step, other.loss_scale) == (7, SCALE)
    theirs, report = transformers.AutoModelForPreTraining.from_pretrained(
        path, output_loading_info=True
    )
    assert type(theirs) is transformers.BertForPreTraining and not any(report.values()), report
    # Weights of a scaled model times powers of two would be rounded in float16.
    dtype = torch.float16 if precision == "float16" and not scaling else torch.float32
    assert {weight.dtype for weight in theirs.parameters()} == {dtype}
    batch = make_examples(SHAPE["vocab_size"], 3, 16, 4)
    (stage,) = engine.replicas[0]
    blocks = [(block.name, block) for block in (*stage.body, stage.head)]
    logits = stage.head.logits(hidden_of(blocks, batch))
    names = {"input_ids": "input_ids", "attention_mask": "input_mask", "token_type_ids": "segment_ids"}  # fmt: skip
    inputs = {theirs: torch.tensor(batch[ours]).long() for theirs, ours in names.items()}
    with torch.no_grad():
        out = theirs.eval()(**inputs)
    at_masked = out.prediction_logits[torch.arange(3)[:, None], batch["masked_lm_positions"]]
    rounding = 1e-5 if precision == "float32" else 0.02
    for ours, expected in zip(logits, (at_masked, out.seq_relationship_logits), strict=True):
        assert np.abs(np.asarray(ours) - expected.float().numpy()).max() < rounding


# --- checkpoints that cannot be resumed


def test_other_settings_are_an_error_that_names_each_difference(saved, fresh):
    before = bytes_of(fresh[0])
    model = {"hidden_size": 16, "num_hidden_layers": 3}
    other = {"seed": 7, "bert_config": model, "corpus": "4567"}
    message = failure(saved, fresh, {**FIXED, **other}, {"dataset_dir": "b"})
    assert message.startswith(f"{saved}: ")
    for difference in (
        "seed was 1984, is 7",
        "bert_config.num_hidden_layers was 2, is 3",
        "corpus (the examples that are read) was 0123, is 4567",
        "dataset_dir was a, is b",
        "--pretrained-ckpt-path",
    ):
        assert difference in message
    assert "examples_per_step" not in message and "hidden_size" not in message
    assert bytes_of(fresh[0]) == before


def change_state(path: Path, changes: dict[str, object] | bytes) -> None:
    """Edit state.json of a checkpoint, as a person does, without its own checksum."""
    if isinstance(changes, dict):
        record = json.loads((path / STATE).read_text(encoding="utf-8")) | changes
        del record[OWN_CHECKSUM]
        changes = json.dumps(record).encode()
    (path / STATE).write_bytes(changes)


def test_a_changed_file_is_named_and_nothing_is_loaded(tiny, saved, fresh):
    before, names = bytes_of(fresh[0]), ["README.md", "config.json", MODEL, OPTIMIZER]
    for name in names:
        content = (saved / name).read_bytes()
        (saved / name).write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
        message = failure(saved, fresh)
        assert message.startswith(f"{saved / name}: has changed since it was saved (crc32c ")
        remedy = f"move {saved} out of the run's folder to continue from the checkpoint before it"
        assert message.endswith(remedy)
        (saved / name).write_bytes(content)
    assert bytes_of(fresh[0]) == before
    assert [*json.loads((saved / STATE).read_text())["crc32c"]] == names


def test_the_layout_of_a_state_is_free_and_each_value_is_not(tiny, saved, fresh):
    record = json.loads((saved / STATE).read_text(encoding="utf-8"))
    (saved / STATE).write_text(json.dumps(record, sort_keys=True), encoding="utf-8")
    checkpoint.resume(Saved(saved), *fresh, FIXED)
    assert bytes_of(fresh[0]) == bytes_of(tiny[1])
    for changes in (
        {"loss_scale": {**record["loss_scale"], "value": 65536.0}},
        {"fixed": {**record["fixed"], "seed": 7}},
        {"crc32c": {}},
    ):
        (saved / STATE).write_text(json.dumps({**record, **changes}), encoding="utf-8")
        for read in (
            lambda path: Saved(path).state,
            lambda path: models.find_source(str(path)).tensors(),
        ):
            with pytest.raises(CheckpointError) as error:
                read(saved)
            assert str(error.value).startswith(f"{saved / STATE}: has changed since it was saved")


@pytest.mark.parametrize(
    ("file", "suffix", "dtype", "value", "fault"),
    [
        (MODEL, "", np.float32, np.nan, "has values that are not finite"),
        (MODEL, "", np.float16, 0.0, "is float16, not float32"),
        (OPTIMIZER, "/moment1", np.float32, -np.inf, "has values that are not finite"),
        (OPTIMIZER, "/moment2", np.float32, -1e-9, "has negative values"),
        (MODEL, "", np.complex64, 0.0, "is complex64, not"),
    ],
)
def test_values_that_no_run_can_have_are_an_error(saved, fresh, file, suffix, dtype, value, fault):
    change_state(saved, {"crc32c": {}})
    tensors = load_file(saved / file)
    name = [name for name in tensors if name.endswith(suffix)][-1]
    changed = tensors[name].astype(dtype)
    changed.flat[-1] = value
    save_file({**tensors, name: changed}, saved / file)
    message = failure(saved, fresh)
    assert message.startswith(f"{saved / file}: ") and fault in message
    if file == MODEL and dtype != np.float16:  # also of a model that a run starts from
        with pytest.raises(CheckpointError, match=fault):
            models.load_weights(models.find_source(str(saved)), fresh[0].weights)


SCALES = asdict(SCALE)
# The content or changed entries of state.json, and the field that the message names.
ODD_STATES = [
    (b"", ""),
    (b"null", ""),
    (b'{"format": 1}', " (crc32c): Field required"),
    (b'{"step": ' + b"[" * 5000 + b"]" * 5000 + b"}", ""),
    (b'{"step": ' + b"9" * 5000 + b"}", ""),
    (b'{"format": 1, "step": 1e999}', ""),
    *(({"step": step}, " (step)") for step in (None, -1, 5.5, True, 10**300)),
    ({"step": 6}, " (step 6)"),
    ({"loss_scale": {}}, " (loss_scale.value)"),
    ({"loss_scale": {**SCALES, "value": float("nan")}}, " (loss_scale.value)"),
    ({"fixed": [1]}, " (fixed)"),
    ({"settings": [1]}, " (settings)"),
    ({"versions": {"keras": 3}}, " (versions.keras)"),
    ({"crc32c": {"../../x": "0"}}, " (crc32c.../../x.[key])"),
]


@pytest.mark.parametrize(("odd", "where"), ODD_STATES, ids=range(len(ODD_STATES)))
def test_an_odd_state_is_an_error_with_path_field_and_remedy(saved, fresh, odd, where):
    change_state(saved, odd)
    message = failure(saved, fresh)
    assert message.startswith(f"{saved / STATE}{where}")
    assert f"move {saved} out of the run's folder to continue" in message


def test_a_checkpoint_of_another_model_is_an_error(saved, fresh):
    other = build(settings_of(bert_config={**SHAPE, "vocab_size": 65, "num_hidden_layers": 3}))
    message = failure(saved, other[1:])
    assert "tensors have another shape" in message and "tensors are missing" in message
    tensors = load_file(saved / OPTIMIZER)
    first, *others = sorted(tensors)
    save_file({name: tensors[name] for name in others} | {"x": tensors[first]}, saved / OPTIMIZER)
    change_state(saved, {"crc32c": {}})
    assert f"{saved / OPTIMIZER}: lacks ['{first}'] and has ['x'] too many; " in failure(
        saved, fresh
    )
    save_file({name: tensor[..., :5].copy() for name, tensor in tensors.items()}, saved / OPTIMIZER)
    message = failure(saved, fresh)
    assert "has shape" in message and str(saved) in message
