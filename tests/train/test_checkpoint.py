"""A checkpoint is complete or absent, restores the same bytes, and can be opened by other tools."""

import fcntl
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import load_file, save_file
from support.model_inputs import make_examples
from support.settings import RUN, SHAPE, merged, small_run

from bert_cli.commands import COMMANDS
from bert_cli.config import markers
from bert_cli.config.markers import marked
from bert_cli.config.pretrain import PretrainSettings
from bert_cli.data.tokens.encoder import Encoder
from bert_cli.data.tokens.tokenizer import Normalization, TokenizerFolder, write_vocabulary
from bert_cli.errors import CheckpointError, DataError, DeviceError
from bert_cli.files import OWN_CHECKSUM, STATE
from bert_cli.optim.schedule import LossScale, first_loss_scale
from bert_cli.planning.workload import workload_of
from bert_cli.tasks.run import build as assemble
from bert_cli.tasks.run import models, start
from bert_cli.tasks.run.job import Draft
from bert_cli.tasks.run.resolve import open_mesh
from bert_cli.text import format_bytes
from bert_cli.train import checkpoint
from bert_cli.train.checkpoint import (
    LOCK,
    MODEL,
    OPTIMIZER,
    Saved,
    best_checkpoint,
    complete_checkpoints,
    lock_run,
    prune,
    read_best,
    remove_partial_checkpoints,
    step_of,
    write_best,
)
from bert_cli.train.loop import State, StateCopy, copy_state

FIXED = {
    "seed": 1984,
    "bert_config": {"hidden_size": 16, "num_hidden_layers": 2},
    "examples_per_step": 8,
    "corpus": "0123",
}
SCALE = LossScale(value=4096.0, dynamic=True, good_steps=17, skipped=3, skipped_in_a_row=1)
PLAIN = checkpoint.Format(to_disk=dict, from_disk=dict, config={})


settings_of = partial(small_run, merged(RUN, {"generated_dataset": True, "bert_config": SHAPE}))


def build(settings: PretrainSettings):
    """(engine, state, form) of a run that is about to start."""
    work = workload_of(settings)
    engine = assemble.build_engine(work, open_mesh(work))
    state = State(engine.weights, engine.slots, first_loss_scale(1.0))
    folder = Path(settings.dataset_dir) if settings.dataset_dir else None
    return (
        engine,
        state,
        start.disk_format(work, engine.weights, folder and TokenizerFolder(folder)),
    )


def trained(settings: PretrainSettings):
    """The same in the middle of a run: every weight and moment has changed."""
    engine, state, form = build(settings)
    draw = np.random.default_rng(7)
    for name, weight in state.weights.items():
        weight.assign(draw.normal(0, 0.1, weight.shape))
        for slot in ("moment1", "moment2"):
            # Positive, as means of squares are.
            moment = state.slots[f"{name}/{slot}"]
            moment.assign(np.abs(draw.normal(0, 1e-3, moment.shape)).astype(np.float32))
    state.step, state.loss_scale = 7, SCALE
    return engine, state, form


def save(folder: Path, state: State | StateCopy, form: checkpoint.Format = PLAIN) -> Path:
    copied = copy_state(state) if isinstance(state, State) else state
    return checkpoint.save(folder, copied, form, fixed=FIXED, settings={"dataset_dir": "a"})


def bytes_of(state: State) -> dict[str, tuple[np.dtype, bytes]]:
    arrays = {**copy_state(state).weights, **copy_state(state).slots}
    return {name: (array.dtype, array.tobytes()) for name, array in arrays.items()}


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
    "keep_checkpoints", "keep_every_steps", "log_every_steps", "evaluate_every_steps", "max_skipped_steps",
    "tensorboard_dir", "wandb", "exit_code_when_stopped", "dry_run", "compile", "deterministic",
    "dataset_cache", "cache_dir", "tokenizer_path", "cluster", "engine", "parallel", "require_gpu",
    # What is scored, and how answers are chosen.
    "validation_dir", "evaluation_examples", "probe", "do_training", "do_validation", "do_test", "validation_file",
    "validation_column", "retrieval_file", "max_answer_length", "null_score_diff_threshold", "early_stop",
}  # fmt: skip
BY_THEIR_RESULTS = {
    # `corpus` is a fingerprint of the examples.
    "dataset_dir", "train_file", "text_column", "label_column", "held_out_fraction", "glue_task", "version_2",
    "doc_stride", "max_query_length", "distillation",
    # `examples_per_step`, `total_steps`, `step_sizes` and `micro_batch_size`; each seed has a run of its own.
    "global_batch", "total_num_train_samples", "num_epochs", "stages", "seeds",
}  # fmt: skip


NUMBERS_OF_A_RUN = {
    **dict.fromkeys(("total_steps", "micro_batch_size", "known_rows", "decay_from"), (5, 6)),
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
    stream = SimpleNamespace(fingerprint="0123")
    written = draft.job(plan=plan, stream=stream, sample={}).fixed
    stored_names = (marked(type(settings), markers.FIXED) - {"length_buckets"}) | {"length_bins"}
    assert written.keys() == (stored_names - {"decay_from"}) | numbers
    assert written["bert_config"] == settings.bert_config.model_dump()
    assert written["micro_batch_size"] == 2
    assert written == json.loads(json.dumps(written)), "equal to what is read from the file"


# --- other tools


@pytest.mark.parametrize("scaling", [None, "u-mup"])
def test_transformers_opens_a_checkpoint_and_computes_the_same(tiny, scaling, tmp_path):
    import torch
    import transformers

    if scaling:
        tiny = trained(settings_of(scaling=scaling))
    saved = save(tmp_path, *tiny[1:])
    theirs, report = transformers.AutoModelForPreTraining.from_pretrained(
        saved, output_loading_info=True
    )
    assert type(theirs) is transformers.BertForPreTraining and not any(report.values()), report
    batch = make_examples(SHAPE["vocab_size"], 3, 16, 4)
    (stage,) = tiny[0].replicas[0]
    hidden = None
    for block in stage.body:
        hidden = block(hidden, batch, None)
    mlm, nsp = stage.head.logits(hidden)
    names = {"input_ids": "input_ids", "attention_mask": "input_mask", "token_type_ids": "segment_ids"}  # fmt: skip
    inputs = {theirs: torch.tensor(batch[ours]).long() for theirs, ours in names.items()}
    with torch.no_grad():
        out = theirs.eval()(**inputs)
    at_masked = out.prediction_logits.numpy()[np.arange(3)[:, None], batch["masked_lm_positions"]]
    assert np.abs(np.asarray(mlm) - at_masked).max() < 1e-5
    assert np.abs(np.asarray(nsp) - out.seq_relationship_logits.numpy()).max() < 1e-5


@pytest.mark.parametrize(
    ("precision", "scaling"), [("mixed_bfloat16", None), ("float16", None), ("float16", "unit")]
)
def test_every_byte_is_restored_and_transformers_finds_the_dtype(precision, scaling, tmp_path):
    import torch
    import transformers

    settings = settings_of(precision=precision, scaling=scaling)
    _, state, form = trained(settings)
    path = save(tmp_path, state, form)
    theirs = transformers.AutoModelForPreTraining.from_pretrained(path)
    # Weights of a scaled model times powers of two would be rounded in float16.
    dtype = torch.float16 if precision == "float16" and not scaling else torch.float32
    assert {weight.dtype for weight in theirs.parameters()} == {dtype}
    _, other, form = build(settings.model_copy(update={"seed": 5}))
    assert bytes_of(other) != bytes_of(state)
    checkpoint.resume(Saved(path), other, form, FIXED)
    assert bytes_of(other) == bytes_of(state)
    assert (other.step, other.loss_scale) == (7, SCALE)


@pytest.mark.parametrize("cased", [False, True], ids=["uncased", "cased"])
def test_transformers_tokenizes_as_our_records(cased, tmp_path):
    import transformers

    text = "The cats, didn't it?\t£3.50 au Café — in 東京! ÜBER-long naïve façade ☃ 𝔘"
    letters = sorted({*text, *text.lower()} - set("☃𝔘\t "))
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "The", "the", "cat", "Café", "cafe"]
    pieces = [*words, *letters, *(f"##{letter}" for letter in letters)]
    numbers = {piece: number for number, piece in enumerate(pieces)}
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    write_vocabulary(
        corpus, "".join(f"{piece}\n" for piece in pieces).encode(), Normalization(cased=cased)
    )
    shape = {**SHAPE, "vocab_size": len(pieces)}
    corpora = {"generated_dataset": False, "dataset_dir": str(corpus), "bert_config": shape}
    path = save(tmp_path / "run", *build(settings_of(**corpora))[1:])
    theirs = transformers.AutoTokenizer.from_pretrained(path)
    # A BertTokenizer that is made wrongly has five pieces, and every word is unknown.
    assert theirs.get_vocab() == numbers
    ids = theirs(text, add_special_tokens=False)["input_ids"]
    assert ids == Encoder(numbers, Normalization(cased=cased)).encode(text).tokens.tolist()
    assert len(set(ids)) > 20


# --- saving


def test_the_files_are_readable_like_the_config_and_a_saved_step_is_not_written_again(tiny, saved):
    before = {path.name: path.stat() for path in saved.iterdir()}
    assert {file.st_mode for file in before.values()} == {before["config.json"].st_mode}
    assert save(saved.parent, *tiny[1:]) == saved
    assert {path.name: path.stat() for path in saved.iterdir()} == before


def test_every_file_is_forced_to_disk_before_the_rename_and_the_rename_after_it(
    tmp_path, monkeypatch
):
    calls, real_replace, real_fsync = [], os.replace, os.fsync

    def fsync(descriptor: int) -> None:
        calls.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real_fsync(descriptor)

    def rename(old: Path, new: Path) -> None:
        calls.append("rename")
        real_replace(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    saved = save(tmp_path, state_at(3))
    files = {file.name for file in saved.iterdir()}
    at = calls.index("rename")
    folders = {name for name in calls[:at] if name.startswith(f".partial_{saved.name}.")}
    assert (
        len(folders) == 1
        and {*calls[:at]} == files | folders
        and calls[at + 1 :] == [tmp_path.name]
    )


def test_only_a_complete_folder_of_the_right_name_is_a_checkpoint(saved):
    run = saved.parent
    for step in (12, 8):
        shutil.copytree(saved, run / f".partial_step_{step:08d}")
    (run / ".best.json.0123456789ab.part").touch()
    # The rest of an interrupted save is removed.
    assert remove_partial_checkpoints(run) == ["step_00000008", "step_00000012"]
    assert [*run.iterdir()] == [saved]
    (run / "step_00000011").touch()
    for name in ("step_00000007_copy", "step_00000099.bak", "step_best", "step_00000009"):
        shutil.copytree(saved, run / name)
    (run / "step_00000009" / STATE).unlink()
    assert complete_checkpoints(run) == [saved]
    with pytest.raises(CheckpointError, match=r"step_.*: is a checkpoint without state\.json"):
        remove_partial_checkpoints(run)
    prune(run, 1, None)
    assert len([*run.iterdir()]) == 6


def test_the_newest_the_multiples_and_the_best_are_kept(tmp_path):
    def save_empty(step: int) -> Path:
        return save(tmp_path, StateCopy({}, {}, SCALE, step))

    def pruned(keep: int, every: int | None = None) -> list[int]:
        prune(tmp_path, keep, every)
        return [step_of(path) for path in complete_checkpoints(tmp_path)]

    for step in range(1, 9):
        save_empty(step)
    assert pruned(2, every=3) == [3, 6, 7, 8]
    assert pruned(1) == [8]
    assert best_checkpoint(tmp_path) is None
    # An equal score is not better: the older checkpoint had less time to overfit.
    scores = ((11, 0.5, [11]), (12, 0.7, [12]), (13, 0.7, [12, 13]), (14, 0.6, [12, 14]), (15, 0.8, [15]))  # fmt: skip
    for step, value, left in scores:
        save_empty(step)
        write_best(tmp_path, step, "f1", value)
        assert pruned(1) == left
    # A score that is no number is never the best, and any number is better.
    save_empty(16)
    write_best(tmp_path, 16, "f1", math.nan)
    assert best_checkpoint(tmp_path) == tmp_path / "step_00000015"
    shutil.rmtree(tmp_path / "step_00000016")
    (tmp_path / "best.json").unlink()
    for value, best in ((math.nan, math.nan), (-1.0, -1.0), (math.nan, -1.0)):
        write_best(tmp_path, 15, "f1", value)
        assert read_best(tmp_path).value == pytest.approx(best, nan_ok=True)
    # A best checkpoint that was removed does not hide others.
    assert best_checkpoint(tmp_path) == tmp_path / "step_00000015"
    shutil.rmtree(tmp_path / "step_00000015")
    assert best_checkpoint(tmp_path) is None
    newest = save_empty(16)
    write_best(tmp_path, 16, "f1", 0.3)
    assert best_checkpoint(tmp_path) == newest
    (tmp_path / "best.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"best\.json: Invalid JSON"):
        best_checkpoint(tmp_path)


# --- kill -9

# Saves 24 MB in which every number is the step, for each step from the last one on, and keeps two.
SAVE_FOREVER = """
import sys
from pathlib import Path
import numpy as np
from bert_cli.optim.schedule import first_loss_scale
from bert_cli.train.checkpoint import Format, complete_checkpoints, prune, save, step_of
from bert_cli.train.loop import StateCopy
folder = Path(sys.argv[1])
step = max(map(step_of, complete_checkpoints(folder)), default=0)
while True:
    step += 1
    w, first, second = np.full((3, 1 << 21), step, np.float32)
    moments = {"w/moment1": first, "w/moment2": second}
    state = StateCopy({"w": w}, moments, first_loss_scale(float(step)), step)
    save(folder, state, Format(dict, dict, {}), fixed={}, settings={})
    prune(folder, 2, None)
"""


def test_a_process_killed_while_it_saves_leaves_only_complete_checkpoints(tmp_path):
    moment, newest, partial = random.Random(1984), 0, 0
    w, first, second = (tf.Variable(tf.zeros(1 << 21)) for _ in range(3))
    state = State({"w": w}, {"w/moment1": first, "w/moment2": second}, SCALE)
    # Until some kills have hit a save, and saving continued between them.
    while partial < 4 or newest < 4:
        with subprocess.Popen([sys.executable, "-c", SAVE_FOREVER, tmp_path]) as child:
            # Until it saves, and a random part of a second more.
            until = time.monotonic() + 30
            while not list(tmp_path.glob(".partial_*")) and time.monotonic() < until:
                time.sleep(0.001)
            time.sleep(moment.uniform(0.0, 0.3))
            child.kill()
        assert child.returncode == -signal.SIGKILL
        complete = complete_checkpoints(tmp_path)
        assert sorted(tmp_path.glob("step_*")) == complete
        for path in complete:
            checkpoint.resume(Saved(path), state, PLAIN, {})
            assert (state.step, state.loss_scale.value) == (step_of(path), step_of(path))
            assert {float(n) for value in (w, first, second) for n in np.unique(value)} == {state.step}  # fmt: skip
        assert not complete or state.step >= newest, "a complete checkpoint is gone"
        newest = state.step
        partial += len(remove_partial_checkpoints(tmp_path))
        assert sorted(tmp_path.iterdir()) == complete


# --- errors of the disk


def state_at(step: int) -> StateCopy:
    """24 MB."""
    w, first, second = np.full((3, 1 << 21), step, np.float32)
    return StateCopy({"w": w}, {"w/moment1": first, "w/moment2": second}, SCALE, step)


def assert_disk_error(folder: Path) -> str:
    with pytest.raises(DataError) as error:
        save(folder, state_at(3))
    assert str(error.value).startswith(f"{folder / 'step_00000003'}: cannot be written (")
    assert "make room or choose another save_ckpt_path" in str(error.value)
    assert not (folder / "step_00000003").exists()
    return str(error.value)


@pytest.mark.parametrize("fraction", [0.6, 0.99], ids=["moments", "last"])
def test_a_full_disk_is_an_error_and_leaves_nothing_that_looks_complete(
    fraction, tmp_path, small_disk
):
    complete = save(tmp_path / "elsewhere", state_at(3))
    pages = sum(-(-file.stat().st_size // 4096) for file in complete.iterdir())
    disk = small_disk(int(pages * fraction) * 4096)
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    message, size = assert_disk_error(disk / "run"), 24 << 20
    lacks = f"{format_bytes(size - free)} of the {format_bytes(size)} to write are missing"
    assert f"No space left on device, {format_bytes(free)} are free and {lacks}" in message
    assert list((disk / "run").iterdir()) == []
    # With more room the same save succeeds.
    subprocess.run(["mount", "-o", f"remount,size={2 * pages * 4096}", str(disk)], check=True)
    assert save(disk / "run", state_at(3)).is_dir()


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path):
    (tmp_path / "file").write_text("a file is in the way")
    assert_disk_error(tmp_path / "file")


def test_a_state_that_is_not_finite_is_not_saved(tmp_path):
    good = save(tmp_path, state_at(3))
    for name in ("w", "w/moment1", "w/moment2"):
        bad = state_at(4)
        {**bad.weights, **bad.slots}[name][-1] = np.nan
        with pytest.raises(DeviceError, match=f"step 4: {name}: has values that are not finite"):
            save(tmp_path, bad)
    assert [*tmp_path.iterdir()] == [good]


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


def change_state(path: Path, **changes) -> None:
    """Edit state.json of a checkpoint, which then has no checksum of its own, as in older versions."""
    record = json.loads((path / STATE).read_text(encoding="utf-8"))
    del record[OWN_CHECKSUM]
    (path / STATE).write_text(json.dumps({**record, **changes}), encoding="utf-8")


def test_a_changed_file_is_named_and_nothing_is_loaded(tiny, saved, fresh):
    before, names = bytes_of(fresh[0]), ["README.md", "config.json", MODEL, OPTIMIZER]
    for name in names:
        content = (saved / name).read_bytes()
        (saved / name).write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
        message = failure(saved, fresh)
        assert message.startswith(f"{saved / name}: has changed since it was saved (crc32c ")
        assert message.endswith(f"remove {saved} to continue from the checkpoint before it")
        (saved / name).unlink()
        assert str(saved / name) in failure(saved, fresh)
        (saved / name).write_bytes(content)
    assert bytes_of(fresh[0]) == before
    # Checkpoints of older versions have no checksums.
    assert [*json.loads((saved / STATE).read_text())["crc32c"]] == names
    change_state(saved, crc32c={})
    checkpoint.resume(Saved(saved), *fresh, FIXED)
    assert bytes_of(fresh[0]) == bytes_of(tiny[1])
    (saved / MODEL).write_bytes((saved / MODEL).read_bytes()[:100])
    assert failure(saved, fresh).startswith(f"{saved / MODEL}: cannot be read (")


def test_an_edited_state_is_refused_and_its_layout_is_free(tiny, saved, fresh):
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
            lambda: Saved(saved).state,
            lambda: models.find_source(str(saved)).tensors(),
        ):
            with pytest.raises(CheckpointError) as error:
                read()
            assert str(error.value).startswith(f"{saved / STATE}: has changed since it was saved")


def test_values_that_no_run_can_have_are_an_error(saved, fresh):
    change_state(saved, crc32c={})

    def load_as_weights() -> None:
        start.load_weights(models.find_source(str(saved)), fresh[0].weights)

    def resume() -> None:
        checkpoint.resume(Saved(saved), *fresh, FIXED)

    for file, suffix, dtype, value, load, fault in (
        (MODEL, "", np.float32, np.nan, resume, "has values that are not finite"),
        (MODEL, "", np.float16, 0.0, resume, "is float16, not float32"),
        (OPTIMIZER, "/moment1", np.float32, -np.inf, resume, "has values that are not finite"),
        (OPTIMIZER, "/moment2", np.float32, -1e-9, resume, "has negative values"),
        (MODEL, "", np.complex64, 0.0, load_as_weights, "is complex64, not real numbers"),
        (MODEL, "", np.float32, np.nan, load_as_weights, "has values that are not finite"),
    ):
        tensors = load_file(saved / file)
        name = [name for name in tensors if name.endswith(suffix)][-1]
        changed = tensors[name].astype(dtype)
        changed.flat[-1] = value
        save_file({**tensors, name: changed}, saved / file)
        with pytest.raises(CheckpointError, match=fault) as error:
            load()
        assert str(error.value).startswith(f"{saved / file}: ")
        save_file(tensors, saved / file, metadata={"format": "pt"})


def test_a_wrong_field_of_the_state_or_the_config_is_named(saved, fresh):
    scale, content = SCALE.as_json(), (saved / STATE).read_text()
    for changes, where in (
        ({"step": 6}, " (step 6)"),
        ({"loss_scale": {**scale, "value": float("nan")}}, " (loss_scale.value)"),
        ({"crc32c": {"../../x": "0"}}, " (crc32c.../../x.[key])"),
    ):
        change_state(saved, **changes)
        message = failure(saved, fresh)
        assert message.startswith(f"{saved / STATE}{where}: ")
        assert f"remove {saved} to continue" in message
        (saved / STATE).write_text(content)
    (saved / "config.json").write_bytes(b"[]")
    with pytest.raises(CheckpointError) as error:
        models.find_source(str(saved))
    assert str(error.value).startswith(f"{saved / 'config.json'}: ")


ODD_STATES = {
    "empty": b"",
    "null": b"null",
    "a list": b"[]",
    "an empty object": b"{}",
    "not UTF-8": b'{"step": "\xff"}',
    "nested": b'{"step": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "no step": {"step": None},
    "a negative step": {"step": -1},
    "a fraction": {"step": 5.5},
    "a switch": {"step": True},
    "a huge step": {"step": 10**300},
    "an endless number": b'{"step": ' + b"9" * 5000 + b"}",
    "infinity": b'{"step": 1e999}',
    "a scale without value": {"loss_scale": {}},
    "no number": {"loss_scale": {"value": math.nan, "dynamic": False}},
    "fixed settings in a list": {"fixed": [1]},
    "a text as batch": {"fixed": {"micro_batch_size": "8"}},
    "a batch of 0": {"fixed": {"micro_batch_size": 0}},
    "a list of options": {"fixed": {"optimizer_opts": []}},
    "a list as rate": {"fixed": {"optimizer_opts": {"learning_rate": [1]}}},
    "texts as sizes": {"fixed": {"matryoshka": ["8"]}},
    "settings in a list": {"settings": [1]},
    "versions as numbers": {"versions": {"keras": 3}},
}


@pytest.mark.parametrize("odd", ODD_STATES.values(), ids=list(ODD_STATES))
@pytest.mark.parametrize("is_branch", [False, True])
def test_an_odd_state_is_an_error_with_path_and_remedy(saved, fresh, odd, is_branch):
    if isinstance(odd, dict):
        change_state(saved, **odd)
    else:
        (saved / STATE).write_bytes(odd)
    for read in (
        lambda: Saved(saved).state,
        lambda: checkpoint.resume(Saved(saved), *fresh, FIXED, is_branch=is_branch),
    ):
        with pytest.raises(CheckpointError) as error:
            read()
        assert str(error.value).startswith(str(saved / STATE))
        assert f"remove {saved} to continue" in str(error.value)


def test_a_branch_of_a_state_without_its_schedule_is_an_error(saved, fresh):
    change_state(saved, fixed={})
    with pytest.raises(CheckpointError, match="belongs to a run with other settings"):
        checkpoint.resume(Saved(saved), *fresh, FIXED, is_branch=True)


def test_a_checkpoint_of_another_model_is_an_error(saved, fresh):
    other = build(settings_of(bert_config={**SHAPE, "vocab_size": 65, "num_hidden_layers": 3}))
    message = failure(saved, other[1:])
    assert "tensors have another shape" in message and "tensors are missing" in message
    tensors = load_file(saved / OPTIMIZER)
    save_file({name: tensor[..., :5].copy() for name, tensor in tensors.items()}, saved / OPTIMIZER)
    change_state(saved, crc32c={})
    message = failure(saved, fresh)
    assert "has shape" in message and str(saved) in message


# --- the lock


def test_two_runs_cannot_have_one_folder_and_a_run_cannot_have_a_file(tmp_path):
    # A run starts while its lock is checked.
    with open(tmp_path / LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        unlock = threading.Timer(0.08, fcntl.flock, (lock, fcntl.LOCK_UN))
        unlock.start()
        with lock_run(tmp_path):
            unlock.join()
            problem = "another process is using it"
            with pytest.raises(CheckpointError, match=problem), lock_run(tmp_path):
                pass
    (tmp_path / "file").touch()
    where = rf"save_ckpt_path \({tmp_path / 'file'}\): "
    with pytest.raises(DataError, match=where), lock_run(tmp_path / "file"):
        pass
