"""Each file of a run and of records, each reader, each damage: it is noticed, or goes unnoticed on purpose."""

import re
import shutil
from pathlib import Path

import pytest
import tensorflow  # noqa: F401 (before conftest.py cuts the CPU into devices)

from bert_cli.cli import main
from bert_cli.train.checkpoint import write_best

STEP = "run/step_00000006"
READERS = {
    "evaluate": ["evaluate", "run"],
    "average": ["average", "run", "mean", "--last", "2"],
    "predict": ["predict", "run", "a text [MASK]"],
    "index": ["index", "records", "--check"],
    "inspect": ["inspect", "records"],
}
OF_RUN = ["run/settings.json", "run/best.json"]
OF_RUN += [f"{STEP}/{name}" for name in ("state.json", "model.safetensors", "config.json")]
OF_RECORDS = ["corpus.json", "corpus.offsets", "*.index", "*.tfrecord", "manifest.json"]
OF_RECORDS = [f"records/{name}" for name in [*OF_RECORDS, "vocab.txt", "tokenizer_config.json"]]
DAMAGES = ("missing", "truncated", "a byte changed", "not UTF-8")
# Reader and file -> the damages that go unnoticed, and why.
OLDER = (["missing"], "a checkpoint without it is incomplete, so an older one is used")
UNREAD = (list(DAMAGES), "it is not read")
UNSCORED = (["missing"], "a model without a score or settings is used, and the output says which")
DESCRIBED = (["a byte changed"], "counts and checksums are compared with files, the rest is free")
ON_PURPOSE = {
    ("evaluate", "run/best.json"): UNSCORED,
    ("evaluate", f"{STEP}/state.json"): OLDER,
    ("average", "run/settings.json"): UNSCORED,
    ("average", "run/best.json"): UNREAD,
    ("average", f"{STEP}/state.json"): OLDER,
    ("predict", "run/settings.json"): UNREAD,
    ("predict", "run/best.json"): UNSCORED,
    ("predict", f"{STEP}/state.json"): OLDER,
    ("index", "records/corpus.json"): DESCRIBED,
    ("index", "records/*.index"): (list(DAMAGES), "it is made again from the records"),
    ("index", "records/manifest.json"): (list(DAMAGES[1:]), "only whether it exists is read"),
    ("inspect", "records/corpus.json"): DESCRIBED,
    ("inspect", "records/*.index"): UNREAD,
    ("inspect", "records/manifest.json"): (["a byte changed"], "only its settings are read"),
}


def damaged(data: bytes, damage: str) -> bytes:
    if damage == "truncated":
        return data[: len(data) // 2 - 1]  # within a record
    if damage == "not UTF-8":
        return data[: len(data) // 2] + b"\xff" + data[len(data) // 2 :]
    # A digit, so that text stays valid, of a value; else any byte.
    values = data.partition(b'"own_crc32c"')[0]
    digits = [match.start() for match in re.finditer(rb"[1-8]", values)]
    at = digits[len(digits) // 2] if digits else len(data) // 2
    return data[:at] + bytes([data[at] + 1 if data[at] < 255 else 0]) + data[at + 1 :]


def cases():
    for reader in READERS:
        for name in OF_RUN if reader in ("evaluate", "average", "predict") else OF_RECORDS:
            yield reader, name


@pytest.mark.parametrize(("reader", "name"), [*cases()])
def test_damage_of_each_file_is_noticed_by_each_reader(
    pretrained, reader, name, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    unnoticed = []
    for damage in DAMAGES:
        for folder in ("run", "records"):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(pretrained / folder, folder)
        shutil.rmtree("mean", ignore_errors=True)
        write_best(Path("run"), 6, "mlm_accuracy", 0.5)
        path = next(tmp_path.glob(name))
        data = path.read_bytes()
        path.unlink() if damage == "missing" else path.write_bytes(damaged(data, damage))
        code = main(READERS[reader])
        said = capsys.readouterr().err
        if code == 0:
            unnoticed.append(damage)
        else:
            assert code in (2, 3, 4) and (path.parent.name in said), (damage, said)
    expected, reason = ON_PURPOSE.get((reader, name), ([], ""))
    assert unnoticed == expected, reason
