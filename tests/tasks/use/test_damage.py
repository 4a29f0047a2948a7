"""Each file, each reader, each damage: it is noticed, or goes unnoticed on purpose."""

import itertools
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import tensorflow  # noqa: F401 (before conftest.py cuts the CPU into devices)
from safetensors.numpy import load, save
from support.tiny_models import write_reviews

from bert_cli.cli import main
from bert_cli.tasks.run import train
from bert_cli.train.checkpoint import Folder

NEW = ["--save-ckpt-path", "out", "--total-num-train-samples", "4"]
TASK = [*NEW, "--pretrained-ckpt-path", "model", "--cache-dir", "null", "--max-seq-length", "32"]
TASK += ["--global-batch.micro-batch-size", "4", "--no-do-validation", "--train-file"]
ONE = ["--global-batch.replicas", "1", "--global-batch.grad-acc-steps-per-replica", "2"]
"""The two micro-batches of the run on one device, which is faster."""
PRETRAIN = ["pretrain", "--config", "settings.json", *NEW]
READERS = {
    "evaluate": ["evaluate", "run"],
    "average": ["average", "run", "mean", "--last", "2"],
    "predict": ["predict", "run", "a text [MASK]"],
    "resume": ["pretrain", "--config", "run/settings.json", "--save-ckpt-path", "run", *ONE],
    "run": [*PRETRAIN, "--dataset-dir", "records"],
    "index": ["index", "records", "--check"],
    "inspect": ["inspect", "records"],
    "tokenize": ["tokenize", "records_text", "new", "--vocab", "model", "--processes", "1"],
    "open": ["predict", "model", "a text [MASK]"],
    "classify": ["classify", *TASK, "reviews.csv"],
    # What reads the checkpoint of a run as a model, or its vocabulary alone.
    "export": ["export", "run", "exported", "--format", "saved-model"],
    "start": [*PRETRAIN, "--dataset-dir", "records", "--pretrained-ckpt-path", "run"],
    "tokenizer": ["classify", *TASK, "reviews.csv", "--tokenizer-path", "run"],
    "vocabulary": ["tokenize", "records_text", "new", "--vocab", "step", "--processes", "1"],
}
OF_CHECKPOINT = [f"step/{name}" for name in ("model.safetensors", "vocab.txt", "state.json")]
NAMES = {"state.json", "model.safetensors", "config.json", "vocab.txt", "tokenizer_config.json"}
OF_RUN = ["run/settings.json", "run/best.json", *(f"step/{name}" for name in sorted(NAMES))]
OF_RECORDS = ["corpus.json", "corpus.offsets", "*.index", "*.tfrecord", "manifest.json"]
OF_RECORDS = [f"records/{name}" for name in [*OF_RECORDS, "vocab.txt", "tokenizer_config.json"]]
FILES = dict.fromkeys(("evaluate", "average", "predict"), OF_RUN)
FILES |= dict.fromkeys(("index", "inspect"), OF_RECORDS)
FILES |= {
    # It reads the others as `index` and `inspect` do.
    "run": [f"records/{name}" for name in ("corpus.offsets", "*.tfrecord", "vocab.txt")],
    "resume": [*OF_RUN, "step/optimizer.safetensors", "step/README.md"],
    "tokenize": ["records_text/a.txt", "model/vocab.txt", "model/tokenizer_config.json"],
    "open": [f"model/{name}" for name in sorted(NAMES - {"state.json"})],
    "classify": ["reviews.csv"],
    "export": OF_CHECKPOINT,
    "start": OF_CHECKPOINT,
    "tokenizer": OF_CHECKPOINT[1:],
    "vocabulary": OF_CHECKPOINT[1:],
}
OF_JSON = ("key twice", "out of range", "other schema")
DAMAGES = ("missing", "truncated", "a byte changed", "not UTF-8")
OF_WEIGHTS = ("not a number", "infinite", "F8_E4M3", "F8_E5M2")
# Reader and file -> the damages that go unnoticed, and why.
OLDER = (["missing"], "a checkpoint without it is incomplete, so an older one is used")
UNREAD = (["missing", "not UTF-8"], "it is not read, which two damages show")
UNSCORED = (["missing"], "a model without a score or settings is used, and the output says which")
DESCRIBED = (["a byte changed"], "counts and checksums are compared with files, the rest is free")
MADE_AGAIN = (list(DAMAGES), "it is made again from the records")
TEXT = (["truncated", "a byte changed"], "any text is a text")
PADDED = (["truncated"], "a model may have more rows than pieces")
FREE = (["a byte changed"], TEXT[1])
EXISTS = ([*DAMAGES[1:], *OF_JSON], "only whether it exists is read")
MANIFEST = (["a byte changed"], "only its settings and its format are read")
CONFIG = (["missing", "a byte changed", "out of range"], "it has no checksum, and names of its own")
ON_PURPOSE = {
    ("evaluate", "run/best.json"): UNSCORED,
    ("evaluate", "step/state.json"): OLDER,
    ("average", "run/settings.json"): UNSCORED,
    ("average", "run/best.json"): UNREAD,
    ("average", "step/state.json"): OLDER,
    ("predict", "run/settings.json"): UNSCORED,
    ("predict", "run/best.json"): UNSCORED,
    ("predict", "step/state.json"): OLDER,
    ("resume", "run/best.json"): (["missing"], "a run without a score continues"),
    ("index", "records/*.index"): MADE_AGAIN,
    ("index", "records/manifest.json"): EXISTS,
    ("inspect", "records/corpus.json"): DESCRIBED,
    ("inspect", "records/*.index"): UNREAD,
    ("inspect", "records/manifest.json"): MANIFEST,
    ("tokenize", "records_text/a.txt"): TEXT,
    ("tokenize", "model/vocab.txt"): PADDED,
    ("tokenize", "model/tokenizer_config.json"): CONFIG,
    ("classify", "reviews.csv"): FREE,
    **dict.fromkeys(
        ((reader, "step/state.json") for reader in ("export", "start", "tokenizer")), OLDER
    ),
    ("vocabulary", "step/state.json"): (
        ["missing"],
        "a folder without it is a model, as others write it",
    ),
    ("open", "model/config.json"): (["a byte changed"], CONFIG[1]),
    ("open", "model/model.safetensors"): (["a byte changed"], CONFIG[1]),
    ("open", "model/vocab.txt"): PADDED,
    ("open", "model/tokenizer_config.json"): CONFIG,
}


def with_damaged_weights(data: bytes, damage: str) -> bytes:
    """Return the bytes of weights with one that is not finite, or all in a type that NumPy lacks."""
    tensors = load(data)
    if damage in ("not a number", "infinite"):
        name = "bert.encoder.layer.1.output.dense.weight"
        tensors[name] = tensors[name].copy()
        tensors[name].flat[5] = math.nan if damage == "not a number" else math.inf
        return save(tensors, metadata={"format": "pt"})
    ends = [0, *itertools.accumulate(value.size for value in tensors.values())]
    entries = {
        name: {"dtype": damage, "shape": value.shape, "data_offsets": offsets}
        for (name, value), offsets in zip(tensors.items(), itertools.pairwise(ends), strict=True)
    }
    header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header + bytes(ends[-1])


def damaged(data: bytes, damage: str) -> bytes:
    if damage == "truncated":
        return data[: len(data) // 2 - 1]  # within a record
    if damage == "not UTF-8":
        return data[: len(data) // 2] + b"\xff" + data[len(data) // 2 :]
    if damage == "key twice":
        return data.replace(b"{", b"{" + re.search(rb'"\w+":', data)[0] + b"1,", 1)
    if damage == "out of range":
        return re.sub(rb"(?<=[\[: ,])(\d+)(?=[,\]}\n])", rb"-\1", data, count=1)
    if damage == "other schema":
        return b'[{"a": 1}]'
    if damage in OF_WEIGHTS:
        return with_damaged_weights(data, damage)
    # A digit, so that text stays valid, of a value; else any byte.
    values = data.partition(b'"own_crc32c"')[0]
    digits = [match.start() for match in re.finditer(rb"[1-8]", values)]
    at = digits[len(digits) // 2] if digits else len(data) // 2
    return data[:at] + bytes([data[at] + 1 if data[at] < 255 else 0]) + data[at + 1 :]


@pytest.fixture(scope="module")
def home(pretrained, tmp_path_factory):
    """A run with a score, its records with their text, its model, and reviews."""
    home = shutil.copytree(pretrained, tmp_path_factory.mktemp("damage") / "home")
    settings = json.loads((home / "run/settings.json").read_text())
    for name in ("validation_dir", "evaluate_every_steps", "evaluation_examples", "own_crc32c"):
        settings.pop(name, None)
    settings["global_batch"]["replicas"] = 1
    (home / "settings.json").write_text(json.dumps(settings))
    for step in (1, 2, 3):  # a copy is made for each damage
        shutil.rmtree(home / f"run/step_0000000{step}")
    write_reviews(home / "reviews.csv", 20)
    return home


@pytest.mark.parametrize(
    ("reader", "name"), [(reader, name) for reader in READERS for name in FILES[reader]]
)
def test_damage_of_each_file_is_noticed_by_each_reader(
    home, reader, name, tmp_path, monkeypatch, capsys
):
    # All is read before the first step.
    monkeypatch.setattr(train, "_train", lambda *_: True)
    unnoticed, step = [], 5 if reader == "resume" else 6
    expected, reason = ON_PURPOSE.get((reader, name), ([], ""))
    damages = [*DAMAGES, *(OF_JSON if name.endswith(".json") else ())]
    damages += OF_WEIGHTS if name == "model/model.safetensors" else ()
    if expected is UNREAD[0]:
        damages = expected
    for damage in damages:
        folder = shutil.copytree(home, tmp_path / damage)
        monkeypatch.chdir(folder)
        if reader == "resume":  # of an interrupted run
            shutil.rmtree("run/step_00000006")
        Folder(Path("run")).write_best(step, "mlm_accuracy", 0.5)
        path = next(folder.glob(name.replace("step/", f"run/step_0000000{step}/")))
        data = path.read_bytes()
        changed = None if damage == "missing" else damaged(data, damage)
        assert changed != data
        path.unlink() if changed is None else path.write_bytes(changed)
        step_folder = f"run/step_0000000{step}"
        code = main([step_folder if word == "step" else word for word in READERS[reader]])
        said = capsys.readouterr().err
        if code == 0:
            unnoticed.append(damage)
        else:
            place = path.name if path.parent == folder else path.parent.name
            assert code in (2, 3, 4) and place in said, (damage, said)
            if damage == "a byte changed" and path.parent.name.startswith("step_"):
                assert f"{name.partition('/')[2]}: has changed since it was saved" in said
            words = {"not a number": "not finite", "infinite": "not finite"}.get(damage, damage)
            assert words in said or damage not in OF_WEIGHTS
            assert not any(Path(out).exists() for out in ("exported", "mean"))
    assert unnoticed == [damage for damage in expected if damage in damages], reason
