"""A checkpoint is whole or absent, gives the same bytes back, and any tool opens it."""

import fcntl
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bert_cli.config.training import PretrainSettings
from bert_cli.data.records.vocab import write_vocabulary
from bert_cli.data.records.wordpiece import Encoder
from bert_cli.errors import CheckpointError, ConfigError, DeviceError
from bert_cli.files import format_bytes
from bert_cli.optim.loss_scale import LossScale
from bert_cli.parallel.cluster import Processes
from bert_cli.tasks.run import build as assemble
from bert_cli.tasks.run import start
from bert_cli.train import best, checkpoint
from bert_cli.train.checkpoint import MODEL, OPTIMIZER, STATE
from bert_cli.train.step import State

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 24,
}
FIXED = {
    "seed": 1984,
    "bert_config": {"hidden_size": 16, "num_hidden_layers": 2},
    "examples_per_step": 8,
    "total_steps": 1000,
    "corpus": "0123",
}
ASIDE = {"settings": {"log_every_steps": 1}, "versions": {"bert_cli": "0"}}
SCALE = LossScale(value=4096.0, dynamic=True, good_steps=17, skipped=3, skipped_in_a_row=1)


def settings_of(**changes) -> PretrainSettings:
    given = {
        "generated_dataset": True,
        "max_seq_length": 16,
        "max_predictions_per_seq": 4,
        "bert_config": SHAPE,
        "global_batch": {"micro_batch_size": 4},
        "optimizer_opts": {"name": "LAMB", "learning_rate": {"max_learning_rate": 0.01}},
    }
    return PretrainSettings.model_validate({**given, **changes})


def build(settings: PretrainSettings):
    """(model, state, form) of a run that is about to start."""
    mesh = assemble.open_mesh(settings, Processes(()))
    model = assemble.build_model(settings, mesh)
    engine = assemble.build_engine(model, settings, mesh)
    state = assemble.build_state(engine, settings.optimizer_opts)
    folder = Path(settings.dataset_dir) if settings.dataset_dir else None
    return model, state, start.disk_format(settings, model, folder)


def trained(settings: PretrainSettings, step: int = 7):
    """The same in the middle of a run: no weight or moment is what it began as."""
    model, state, form = build(settings)
    draw = np.random.default_rng(step)
    for name, weight in state.weights.items():
        weight.assign(draw.normal(0, 0.1, weight.shape))
        for moment in state.moments[name]:
            # Positive, as a mean of squares is.
            moment.assign(np.abs(draw.normal(0, 1e-3, moment.shape)).astype(np.float32))
    state.step, state.loss_scale = step, SCALE
    return model, state, form


def save(folder: Path, state: State, form: checkpoint.Format) -> Path:
    return checkpoint.save(folder, state, form, fixed=FIXED, **ASIDE)


def bytes_of(state: State) -> dict[str, bytes]:
    arrays = {name: weight.numpy() for name, weight in state.weights.items()}
    for name, pair in state.moments.items():
        arrays |= {f"{name} {number}": moment.numpy() for number, moment in enumerate(pair)}
    return {name: array.tobytes() + str(array.dtype).encode() for name, array in arrays.items()}


@pytest.fixture(scope="module")
def tiny():
    return trained(settings_of())


@pytest.fixture
def saved(tiny, tmp_path):
    return save(tmp_path / "run", *tiny[1:])


# --- what others see


def batch_of(examples: int = 3, places: int = 16) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(5)
    mask = (np.arange(places) < np.array([16, 9, 12])[:examples, None]).astype(np.int32)
    return {
        "input_ids": (draw.integers(1, SHAPE["vocab_size"], mask.shape) * mask).astype(np.int32),
        "input_mask": mask,
        "segment_ids": (mask * (np.arange(places) > 5)).astype(np.int32),
        "masked_lm_positions": np.tile(np.array([1, 3, 4, 7], np.int32), (examples, 1)),
    }


def test_transformers_opens_a_checkpoint_and_computes_what_we_compute(tiny, saved):
    import torch
    import transformers

    theirs, told = transformers.AutoModelForPreTraining.from_pretrained(
        saved, output_loading_info=True
    )
    assert type(theirs) is transformers.BertForPreTraining
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not told[kind], (kind, told[kind])
    model, batch = tiny[0], batch_of()
    hidden = None
    (stage,) = model.replicas[0]
    for block in stage.body:
        hidden = block(hidden, batch, None)
    mlm, nsp = stage.head.logits(hidden)
    columns = {name: torch.tensor(column).long() for name, column in batch.items()}
    with torch.no_grad():
        out = theirs.eval()(
            input_ids=columns["input_ids"],
            attention_mask=columns["input_mask"],
            token_type_ids=columns["segment_ids"],
        )
    rows = torch.arange(len(batch["input_ids"]))[:, None]
    at_masked = out.prediction_logits[rows, columns["masked_lm_positions"]].numpy()
    assert np.abs(np.asarray(mlm) - at_masked).max() < 1e-5
    assert np.abs(np.asarray(nsp) - out.seq_relationship_logits.numpy()).max() < 1e-5


@pytest.mark.parametrize("precision", ["float32", "mixed_bfloat16", "float16"])
def test_transformers_finds_the_dtype_of_the_weights(precision, tmp_path):
    import torch
    import transformers

    _, state, form = trained(settings_of(precision=precision))
    path = save(tmp_path, state, form)
    theirs = transformers.AutoModelForPreTraining.from_pretrained(path)
    wanted = torch.float16 if precision == "float16" else torch.float32
    assert {weight.dtype for weight in theirs.parameters()} == {wanted}


SENTENCES = [
    "The cat sat on the mats, didn't it?",
    "Café au lait — £3.50 (or ¥600) in 東京!",
    "ÜBER-long: Donaudampfschifffahrt; unknown: ☃ 𝔘",
    "tabs\tand  two spaces, naïve façade",
]


@pytest.mark.parametrize("cased", [False, True], ids=["uncased", "cased"])
def test_transformers_tokenizes_as_our_records_were(cased, tmp_path):
    import transformers

    letters = sorted(
        {c for text in SENTENCES for c in text + text.lower() if c.isalnum()} - set("☃𝔘")
    )
    words = ["cat", "The", "the", "##s", "mat", "did", "cafe", "Café", "lait", "uber", "naive"]
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = list(
        dict.fromkeys([*specials, *words, *"',?!.:;-()", *letters, *(f"##{c}" for c in letters)])
    )
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    write_vocabulary(corpus, "".join(f"{piece}\n" for piece in pieces).encode(), cased=cased)
    shape = {**SHAPE, "vocab_size": len(pieces)}
    _, state, form = build(
        settings_of(generated_dataset=False, dataset_dir=str(corpus), bert_config=shape)
    )
    path = save(tmp_path / "run", state, form)
    theirs = transformers.AutoTokenizer.from_pretrained(path)
    # Some ways to make a BertTokenizer give one of five pieces, to which every word is unknown.
    assert len(theirs) == theirs.vocab_size == len(pieces)
    assert theirs.get_vocab() == {piece: number for number, piece in enumerate(pieces)}
    ours = Encoder({piece: number for number, piece in enumerate(pieces)}, cased=cased)
    for text in SENTENCES:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ids == ours.encode(text).tokens.tolist(), text
        assert len(set(ids)) > 4
    assert len(theirs("cat " * 50, truncation=True)["input_ids"]) == 24
    pair = theirs("cat", "mat")
    cat, mat = pieces.index("cat"), pieces.index("mat")
    assert pair["input_ids"] == [2, cat, 3, mat, 3]
    assert pair["token_type_ids"] == [0, 0, 0, 1, 1]


def test_nothing_in_a_checkpoint_is_a_pickle(tiny, saved):
    kinds = {".json": 0, ".safetensors": 0}
    for file in saved.iterdir():
        head = file.read_bytes()[:16]
        kinds[file.suffix] += 1
        # Pickles start with 0x80 and a protocol, PyTorch's files are zip archives.
        assert not head.startswith((b"PK", *(bytes((0x80, protocol)) for protocol in range(2, 6))))
        if file.suffix == ".safetensors":
            assert head[8:10] == b'{"'
        else:
            json.loads(file.read_text(encoding="utf-8"))
    assert kinds == {".json": 2, ".safetensors": 2}


# --- what we get back


@pytest.mark.parametrize("precision", ["float32", "mixed_float16", "float16"])
def test_every_byte_of_the_four_things_comes_back(precision, tmp_path):
    settings = settings_of(precision=precision)
    _, state, form = trained(settings, step=41)
    path = save(tmp_path, state, form)
    assert path.name == "step_00000041"
    _, other, form = build(settings.model_copy(update={"seed": 5}))
    assert bytes_of(other) != bytes_of(state)
    checkpoint.resume(path, other, form, FIXED)
    assert bytes_of(other) == bytes_of(state)
    assert (other.step, other.loss_scale) == (41, SCALE)


def test_whoever_may_read_the_config_may_read_the_weights(tiny, saved):
    """On a cluster others open a run's models."""
    modes = {path.name: path.stat().st_mode for path in saved.iterdir()}
    assert {*modes.values()} == {modes["config.json"]}


def test_the_same_step_saved_again_is_left_as_it_is(tiny, saved):
    before = {file.name: file.stat().st_mtime_ns for file in saved.iterdir()}
    assert save(saved.parent, *tiny[1:]) == saved
    assert {file.name: file.stat().st_mtime_ns for file in saved.iterdir()} == before


def test_a_directory_without_a_state_is_never_picked_up(tiny, saved):
    run = saved.parent
    shutil.copytree(saved, run / "step_00000009")
    (run / "step_00000009" / STATE).unlink()
    (run / "step_00000010").mkdir()
    (run / "step_00000011").touch()
    assert checkpoint.whole_checkpoints(run) == [saved]
    _, state, form = build(settings_of())
    told = start.start(settings_of(save_ckpt_path=run), state, form, FIXED)
    assert told == f"continues from {saved} (step 7)"


def test_a_copy_under_another_name_is_neither_picked_up_nor_removed(tiny, saved):
    run = saved.parent
    for name in ("step_00000007_copy", "step_00000099.bak", "step_best"):
        shutil.copytree(saved, run / name)
    newer = save(run, replace(tiny[1], step=8), tiny[2])
    assert checkpoint.whole_checkpoints(run) == [saved, newer]
    checkpoint.prune(run, 1, None)
    assert checkpoint.whole_checkpoints(run) == [newer]
    assert len(list(run.iterdir())) == 4


def test_a_checkpoint_that_lost_its_state_is_refused_at_the_start_not_at_its_save(saved):
    (saved.parent / "step_00000009").mkdir()
    with pytest.raises(
        CheckpointError, match=r"step_00000009: is a checkpoint without state\.json"
    ):
        checkpoint.clear_half_written(saved.parent)


def test_what_an_interrupted_save_left_is_removed_and_reported(saved):
    run = saved.parent
    for step in (12, 8):
        shutil.copytree(saved, run / f".partial_step_{step:08d}")
    (run / ".best.json.0123456789ab.part").touch()
    assert checkpoint.whole_checkpoints(run) == [saved]
    assert checkpoint.clear_half_written(run) == ["step_00000008", "step_00000012"]
    assert [path.name for path in run.iterdir()] == [saved.name]
    assert checkpoint.clear_half_written(run) == []


def test_the_newest_and_the_multiples_are_kept(tiny, tmp_path):
    _, state, form = tiny
    for step in range(1, 9):
        save(tmp_path, replace(state, step=step), form)

    def steps() -> list[int]:
        return [int(path.name[5:]) for path in checkpoint.whole_checkpoints(tmp_path)]

    checkpoint.prune(tmp_path, 6, None)
    assert steps() == [3, 4, 5, 6, 7, 8]
    checkpoint.prune(tmp_path, 2, 3)
    assert steps() == [3, 6, 7, 8]
    checkpoint.prune(tmp_path, 1, None)
    assert steps() == [8]
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000008"]


def test_the_best_checkpoint_is_kept_until_a_better_one_comes(tiny, tmp_path):
    _, state, form = tiny
    assert best.best_of(tmp_path) is None
    scores = {1: 0.5, 2: 0.7, 3: 0.7, 4: 0.6, 5: 0.8}
    kept = {1: [1], 2: [2], 3: [2, 3], 4: [2, 4], 5: [5]}
    for step, value in scores.items():
        save(tmp_path, replace(state, step=step), form)
        # As good is not better: the older one had less time to learn the training set by heart.
        assert best.note_best(tmp_path, step, "f1", value) == (step in (1, 2, 5))
        checkpoint.prune(tmp_path, 1, None)
        steps = [int(path.name[5:]) for path in checkpoint.whole_checkpoints(tmp_path)]
        assert steps == kept[step]
    assert best.best_of(tmp_path) == tmp_path / "step_00000005"
    assert best.read_best(tmp_path).value == 0.8


def test_a_best_checkpoint_that_is_gone_is_no_bar_for_others(tiny, tmp_path):
    _, state, form = tiny
    save(tmp_path, replace(state, step=1), form)
    best.note_best(tmp_path, 1, "f1", 0.9)
    shutil.rmtree(tmp_path / "step_00000001")
    assert best.best_of(tmp_path) is None
    save(tmp_path, replace(state, step=2), form)
    assert best.note_best(tmp_path, 2, "f1", 0.3)
    (tmp_path / "best.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"best\.json: Invalid JSON"):
        best.best_of(tmp_path)


# --- a real process, really killed


class Held:
    """A weight or a moment without TensorFlow: one array."""

    def __init__(self, value: np.ndarray) -> None:
        self.value, self.shape = value, value.shape

    def numpy(self) -> np.ndarray:
        return self.value

    def assign(self, value: np.ndarray) -> None:
        self.value = value


PLAIN = checkpoint.Format(to_disk=dict, from_disk=dict, config={})


def state_at(step: int) -> State:
    """24 MB of which every number is the step."""
    value = np.full((1 << 21,), step, np.float32)
    moments = {"w": (Held(value), Held(value))}
    return State({"w": Held(value)}, moments, replace(SCALE, good_steps=step), step)


def save_for_ever(folder: Path) -> None:
    """Save a state a step and keep two, from where it stands."""
    step = max((int(path.name[5:]) for path in checkpoint.whole_checkpoints(folder)), default=0)
    while True:
        step += 1
        save(folder, state_at(step), PLAIN)
        checkpoint.prune(folder, 2, None)


# TensorFlow takes seconds to import, so one process does it and forks those that are killed.
NURSERY = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_checkpoint
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        test_checkpoint.save_for_ever(Path(sys.argv[2]))
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_a_process_killed_in_the_middle_of_saving_leaves_only_whole_checkpoints(tmp_path):
    moment, newest, halves = random.Random(1984), 0, 0
    words = [sys.executable, "-c", NURSERY, str(Path(__file__).parent), str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as nurse:
        for _ in range(12):
            nurse.stdin.write("one more\n")
            nurse.stdin.flush()
            child = int(nurse.stdout.readline())
            # Until it saves, and then some random part of a second more.
            until = time.monotonic() + 30
            while not list(tmp_path.glob(".partial_*")) and time.monotonic() < until:
                time.sleep(0.001)
            time.sleep(moment.uniform(0.0, 0.3))
            os.kill(child, signal.SIGKILL)
            assert int(nurse.stdout.readline()) == -signal.SIGKILL

            named = sorted(tmp_path.glob("step_*"))
            assert named == checkpoint.whole_checkpoints(tmp_path)
            for path in named:
                step = int(path.name[5:])
                found = state_at(0)
                checkpoint.resume(path, found, PLAIN, FIXED)
                assert bytes_of(found) == bytes_of(state_at(step))
                assert (found.step, found.loss_scale.good_steps) == (step, step)
            last = int(named[-1].name[5:]) if named else 0
            assert last >= newest, "a checkpoint that was whole is gone"
            newest = last
            halves += len(checkpoint.clear_half_written(tmp_path))
            assert {path.name for path in tmp_path.iterdir()} == {path.name for path in named}
        nurse.stdin.close()
    # What was to be shown happened: some kills hit a save, and saving went on between them.
    assert halves > 3
    assert newest > 3


# --- a disk that refuses


def assert_says_that_the_disk_refused(folder: Path, state: State, form: checkpoint.Format) -> str:
    path = folder / checkpoint.name_of(state.step)
    with pytest.raises(CheckpointError) as refused:
        save(folder, state, form)
    assert str(refused.value).startswith(f"{path}: cannot be written (")
    assert "make room or choose another save_ckpt_path" in str(refused.value)
    assert not path.exists()
    return str(refused.value)


@pytest.mark.parametrize("share", [0.1, 0.6, 0.99], ids=["weights", "moments", "last"])
def test_a_full_disk_is_a_message_and_leaves_nothing_that_looks_whole(share, tmp_path, small_disk):
    state = state_at(3)
    whole = save(tmp_path / "elsewhere", state, PLAIN)
    pages = sum(-(-file.stat().st_size // 4096) for file in whole.iterdir())
    disk = small_disk(int(pages * share) * 4096)
    room = os.statvfs(disk)
    message = assert_says_that_the_disk_refused(disk / "run", state, PLAIN)
    size = 3 * state.weights["w"].value.nbytes
    free = room.f_bavail * room.f_frsize
    lacks = f"{format_bytes(size - free)} of the {format_bytes(size)} to write are missing"
    told = f"No space left on device, {format_bytes(free)} are free and "
    assert told + (lacks if size > free else "that is not enough") in message
    assert list((disk / "run").iterdir()) == [], "what was written takes no room"
    # Once there is room the same save succeeds.
    subprocess.run(["mount", "-o", f"remount,size={2 * pages * 4096}", str(disk)], check=True)
    assert save(disk / "run", state, PLAIN).is_dir()


@pytest.fixture
def short_files():
    """No file of this process may grow beyond 1 MB, as under a quota."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_may_not_grow_is_a_message(tmp_path, short_files):
    assert_says_that_the_disk_refused(tmp_path / "run", state_at(3), PLAIN)


def test_a_folder_that_cannot_be_made_is_a_message(tiny, tmp_path):
    (tmp_path / "run").write_text("a file is in the way")
    assert_says_that_the_disk_refused(tmp_path / "run", *tiny[1:])


# --- a checkpoint that is refused


def test_other_settings_are_refused_naming_each_difference(saved):
    _, state, form = build(settings_of())
    before = bytes_of(state)
    other = {
        **FIXED,
        "seed": 7,
        "bert_config": {"hidden_size": 16, "num_hidden_layers": 3},
        "corpus": "4567",
        "examples_per_step": 16,
    }
    with pytest.raises(CheckpointError) as refused:
        checkpoint.resume(saved, state, form, other)
    told = str(refused.value)
    assert told.startswith(f"{saved}: ")
    for difference in (
        "seed was 1984, is 7",
        "bert_config.num_hidden_layers was 2, is 3",
        "corpus (the examples that are read) was 0123, is 4567",
        "examples_per_step (of global_batch) was 8, is 16",
        "--pretrained-ckpt-path",
    ):
        assert difference in told
    assert "total_steps" not in told and "hidden_size" not in told
    assert bytes_of(state) == before


def test_what_a_run_must_share_is_taken_from_its_settings():
    told = settings_of().model_dump(mode="json")
    fixed = checkpoint.fixed_settings(told, 8, 100, "0123")
    assert {"seed", "precision", "bert_config", "optimizer_opts", "corpus"} <= set(fixed)
    assert not {"save_ckpt_path", "log_every_steps", "parallel"} & set(fixed)
    assert fixed == json.loads(json.dumps(fixed)), "what comes back from the file compares equal"


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER])
@pytest.mark.parametrize("left", [0, 100, -1])
def test_a_cut_file_is_a_message_that_names_it(name, left, saved):
    whole = (saved / name).read_bytes()
    (saved / name).write_bytes(whole[: int(left * len(whole)) if left == 0.5 else left])
    _, state, form = build(settings_of())
    with pytest.raises(CheckpointError) as refused:
        checkpoint.resume(saved, state, form, FIXED)
    assert str(refused.value).startswith(f"{saved / name}: has changed since it was saved (crc32c ")


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER])
@pytest.mark.parametrize("left", [4, 0.5])
def test_a_cut_file_of_a_checkpoint_without_checksums_is_a_message_too(name, left, saved):
    change_state(saved, crc32c={})
    whole = (saved / name).read_bytes()
    (saved / name).write_bytes(whole[: int(left * len(whole)) if left == 0.5 else left])
    _, state, form = build(settings_of())
    with pytest.raises(CheckpointError) as refused:
        checkpoint.resume(saved, state, form, FIXED)
    assert str(refused.value).startswith(f"{saved / name}: cannot be read (")


@pytest.mark.parametrize("name", ["config.json", MODEL, OPTIMIZER])
def test_a_flipped_bit_is_found_by_its_files_checksum(name, saved):
    content = bytearray((saved / name).read_bytes())
    content[-3] ^= 1
    (saved / name).write_bytes(content)
    _, state, form = build(settings_of())
    before = bytes_of(state)
    with pytest.raises(CheckpointError) as refused:
        checkpoint.resume(saved, state, form, FIXED)
    message = str(refused.value)
    assert message.startswith(f"{saved / name}: has changed since it was saved (crc32c ")
    assert message.endswith(f"remove {saved} to continue from the checkpoint before it")
    assert bytes_of(state) == before


def change_state(path: Path, **changes) -> None:
    """Edit state.json of a checkpoint."""
    record = json.loads((path / STATE).read_text(encoding="utf-8"))
    (path / STATE).write_text(json.dumps({**record, **changes}), encoding="utf-8")


def edit_tensor(file: Path, suffix: str, edit) -> None:
    """Edit the last tensor whose name ends so; the checkpoint is then one without checksums."""
    tensors = load_file(file)
    name = [name for name in tensors if name.endswith(suffix)][-1]
    save_file({**tensors, name: edit(tensors[name].copy())}, file)
    change_state(file.parent, crc32c={})


def with_value(value: float):
    def edit(tensor: np.ndarray) -> np.ndarray:
        tensor.flat[-1] = value
        return tensor

    return edit


@pytest.mark.parametrize(
    ("name", "suffix", "edit", "problem"),
    [
        (MODEL, "", with_value(np.nan), "has values that are not finite"),
        (MODEL, "", with_value(np.inf), "has values that are not finite"),
        (MODEL, "", lambda tensor: tensor.astype(np.int32), "is int32, not float32"),
        (MODEL, "", lambda tensor: tensor.astype(np.float16), "is float16, not float32"),
        (OPTIMIZER, "/moment1", with_value(-np.inf), "has values that are not finite"),
        (OPTIMIZER, "/moment2", with_value(np.nan), "has values that are not finite"),
        (OPTIMIZER, "/moment2", with_value(-1e-9), "has negative values"),
        (
            OPTIMIZER,
            "/moment2",
            lambda tensor: tensor.astype(np.float64),
            "is float64, not float32",
        ),
    ],
)
def test_values_that_no_run_can_have_come_to_are_refused(name, suffix, edit, problem, saved):
    edit_tensor(saved / name, suffix, edit)
    _, state, form = build(settings_of())
    with pytest.raises(CheckpointError, match=problem) as refused:
        checkpoint.resume(saved, state, form, FIXED)
    assert str(refused.value).startswith(f"{saved / name}: ")
    assert f"remove {saved}" in str(refused.value)


@pytest.mark.parametrize(
    "edit",
    [
        with_value(np.nan),
        lambda tensor: tensor.astype(np.int32),
        lambda tensor: tensor.astype(np.complex64),
    ],
)
def test_weights_to_start_from_are_finite_real_numbers(edit, saved):
    edit_tensor(saved / MODEL, "", edit)
    _, state, _ = build(settings_of())
    with pytest.raises(CheckpointError, match=r"not finite|is (int32|complex64)") as refused:
        start.put_weights(start.find_source(str(saved)), state.weights)
    assert str(refused.value).startswith(f"{saved / MODEL}: ")


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_models_config_that_is_no_json_object_is_an_error_that_names_it(content, saved):
    (saved / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError) as refused:
        start.find_source(str(saved))
    assert str(refused.value).startswith(f"{saved / 'config.json'}: ")


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"step": 6}, " (step 6)"),
        ({"step": -5}, " (step)"),
        ({"step": 10**9}, " (step 1000000000)"),
        ({"step": "7"}, " (step)"),
        ({"loss_scale": {**SCALE.as_json(), "value": float("nan")}}, " (loss_scale.value)"),
        ({"loss_scale": {**SCALE.as_json(), "value": 0.0}}, " (loss_scale.value)"),
        ({"loss_scale": {**SCALE.as_json(), "skipped": -1}}, " (loss_scale.skipped)"),
        ({"loss_scale": 1.0}, " (loss_scale)"),
        ({"fixed": []}, " (fixed)"),
        ({"crc32c": [1]}, " (crc32c)"),
        ({"crc32c": {"../../x": "0"}}, " (crc32c.../../x.[key])"),
    ],
)
def test_a_field_of_the_state_that_cannot_be_is_named(changes, where, saved):
    change_state(saved, **changes)
    _, state, form = build(settings_of())
    with pytest.raises(CheckpointError) as refused:
        checkpoint.resume(saved, state, form, FIXED)
    assert str(refused.value).startswith(f"{saved / STATE}{where}: ")


def test_a_step_beyond_the_end_of_the_run_is_refused(saved):
    path = saved.rename(saved.with_name("step_1000000000"))
    change_state(path, step=10**9)
    _, state, form = build(settings_of())
    with pytest.raises(CheckpointError, match="the run has 1000 steps"):
        checkpoint.resume(path, state, form, FIXED)


def test_a_checkpoint_from_before_there_were_checksums_is_continued(tiny, saved):
    record = json.loads((saved / STATE).read_text(encoding="utf-8"))
    assert set(record.pop("crc32c")) == {"config.json", MODEL, OPTIMIZER}
    (saved / STATE).write_text(json.dumps(record), encoding="utf-8")
    _, state, form = build(settings_of(seed=5))
    checkpoint.resume(saved, state, form, FIXED)
    assert bytes_of(state) == bytes_of(tiny[1])


@pytest.mark.parametrize("where", ["weight", "first", "second"])
def test_a_state_that_is_not_finite_is_not_saved_over_a_good_one(where, tmp_path):
    good = save(tmp_path, state_at(3), PLAIN)
    bad = state_at(4)
    values = {
        "weight": bad.weights["w"],
        "first": bad.moments["w"][0],
        "second": bad.moments["w"][1],
    }
    values[where].value = with_value(np.nan)(values[where].value.copy())
    with pytest.raises(
        DeviceError, match=r"step 4: w.* has values that are not finite; it is not saved"
    ):
        save(tmp_path, bad, PLAIN)
    assert [*tmp_path.iterdir()] == [good]


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER])
def test_an_absent_file_is_a_message_that_names_it(name, saved):
    (saved / name).unlink()
    _, state, form = build(settings_of())
    with pytest.raises(CheckpointError, match="cannot be read") as refused:
        checkpoint.resume(saved, state, form, FIXED)
    assert str(saved / name) in str(refused.value)


@pytest.mark.parametrize(
    "text", ["", '{"step": 7, "loss_sc', "[]", "{}", '{"step": 7, "fixed": {}, "loss_scale": {}}']
)
def test_a_state_that_is_not_one_is_a_message_that_names_it(text, saved):
    (saved / STATE).write_text(text)
    _, state, form = build(settings_of())
    with pytest.raises(CheckpointError) as refused:
        checkpoint.resume(saved, state, form, {} if "fixed" in text else FIXED)
    assert str(refused.value).startswith(str(saved / STATE))
    assert f"remove {saved} to continue" in str(refused.value)


@pytest.mark.parametrize("change", [{"hidden_size": 32}, {"num_hidden_layers": 3}, {"vocab_size": 65}])  # fmt: skip
def test_a_state_of_another_model_is_refused(change, saved):
    _, state, form = build(settings_of(bert_config={**SHAPE, **change}))
    with pytest.raises(CheckpointError, match=r"tensors (have another shape|are missing)"):
        checkpoint.resume(saved, state, form, FIXED)


def test_moments_of_another_model_are_refused(saved):
    _, state, form = trained(settings_of(bert_config={**SHAPE, "intermediate_size": 48}))
    other = save(saved.parent / "other", state, form)
    shutil.copyfile(other / OPTIMIZER, saved / OPTIMIZER)
    change_state(saved, crc32c={})
    _, state, form = build(settings_of())
    with pytest.raises(CheckpointError, match="has shape") as refused:
        checkpoint.resume(saved, state, form, FIXED)
    assert str(saved) in str(refused.value)


def test_a_run_starts_though_someone_is_looking_at_its_lock(tmp_path):
    with open(tmp_path / checkpoint.LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        done_looking = threading.Timer(0.08, fcntl.flock, (lock, fcntl.LOCK_UN))
        done_looking.start()
        with checkpoint.claim(tmp_path):
            done_looking.join()


def test_a_run_does_not_start_in_the_folder_of_another(tmp_path):
    with (
        checkpoint.claim(tmp_path),
        pytest.raises(CheckpointError, match="another process is at work in it"),
        checkpoint.claim(tmp_path),
    ):
        pass


def test_a_lock_that_is_a_link_is_refused_and_its_target_left_as_it_is(tmp_path):
    other = tmp_path / "other"
    other.write_text("kept")
    (tmp_path / checkpoint.LOCK).symlink_to(other)
    with (
        pytest.raises(ConfigError, match=rf"save_ckpt_path \({tmp_path / checkpoint.LOCK}\): "),
        checkpoint.claim(tmp_path),
    ):
        pass
    assert other.read_text() == "kept"


MIXED = [{"path": "a", "weight": 3.0}, {"path": "b", "weight": 1.0}]


@pytest.mark.parametrize(
    ("were", "are", "told"),
    [
        (MIXED, MIXED[::-1], "was a (weight 3), b (weight 1), is b (weight 1), a (weight 3)"),
        ("a", MIXED, "was a, is a (weight 3), b (weight 1)"),
        (MIXED, MIXED, "was 0123, is 4567"),
        (None, MIXED, "was 0123, is 4567"),
    ],
)
def test_other_corpora_are_told_by_their_names_where_the_checkpoint_has_them(
    saved, were, are, told
):
    _, state, form = build(settings_of())
    record = json.loads((saved / checkpoint.STATE).read_text())
    record["settings"] = {} if were is None else {"dataset_dir": were}
    (saved / checkpoint.STATE).write_text(json.dumps(record))
    with pytest.raises(CheckpointError) as refused:
        checkpoint.resume(saved, state, form, {**FIXED, "corpus": "4567"}, {"dataset_dir": are})
    assert f"corpus (the examples that are read) {told}. " in str(refused.value)
    checkpoint.resume(saved, state, form, FIXED, {"dataset_dir": are})
