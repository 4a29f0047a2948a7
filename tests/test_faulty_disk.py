"""A disk that fails on reading: every command names the file and the reason, without a traceback.

/proc/self/mem stands for a file on it: it opens, and reading its first byte is an input/output error.
"""

from pathlib import Path

import pytest
from support.tiny_models import write_model

from bert_cli.cli import main

# Command -> the file that cannot be read, and the exit code.
COMMANDS = {
    "init a.txt out": ("a.txt", 3),
    "extract a.xml out": ("a.xml", 3),
    "extract a.xml.bz2 out": ("a.xml.bz2", 3),
    "preprocess a.txt out": ("a.txt", 3),
    "preprocess a.jsonl out --text-field text": ("a.jsonl", 3),
    "preprocess a.csv out --text-field text": ("a.csv", 3),
    "preprocess a.parquet out --text-field text": ("a.parquet", 3),
    "preprocess a.txt.gz out": ("a.txt.gz", 3),
    "preprocess a.txt.zst out": ("a.txt.zst", 3),
    "vocab a.txt out": ("a.txt", 3),
    "tokenize text out --vocab a.txt": ("a.txt", 3),
    "inspect records": ("records/corpus.json", 3),
    "pretrain --config a.json": ("a.json", 2),
    "plan pretrain --config a.json": ("a.json", 2),
    "doctor pretrain --config a.json": ("a.json", 2),
    "classify --train-file a.csv --pretrained-ckpt-path model --save-ckpt-path out": ("a.csv", 3),
    "ner --train-file a.conll --pretrained-ckpt-path model --save-ckpt-path out": ("a.conll", 3),
    "squad --train-file a.json --pretrained-ckpt-path model --save-ckpt-path out": ("a.json", 3),
    "glue --glue-task sst2 --dataset-dir glue --pretrained-ckpt-path model --save-ckpt-path out": (
        "glue/train.tsv",
        3,
    ),
    "embed --train-file a.jsonl --pretrained-ckpt-path model --save-ckpt-path out": ("a.jsonl", 3),
    "predict model --input a.txt": ("a.txt", 3),
    "predict broken text": ("broken/config.json", 4),
    "export broken out --format hf": ("broken/config.json", 4),
    "shrink broken out --layers 1": ("broken/config.json", 4),
    "search make out.index a.txt": ("a.txt", 3),
    "search make out.index a.csv": ("a.csv", 3),
    "plot run --output out": ("run/metrics.jsonl", 3),
    "compare run other": ("other/settings.json", 3),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faulty")
    write_model(folder / "model")
    write_model(folder / "broken")
    (folder / "broken/config.json").unlink()
    (folder / "text").mkdir()
    (folder / "other").mkdir()
    (folder / "other/metrics.jsonl").symlink_to("/proc/self/mem")
    (folder / "text/a.txt").write_text("A sentence.\n")
    for name, _ in COMMANDS.values():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if not path.is_symlink():
            path.symlink_to("/proc/self/mem")
    return folder


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_that_cannot_be_read_is_named_with_the_reason(command, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    file, code = COMMANDS[command]
    assert main(command.split()) == code
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("bert: ")]
    assert file in line or str(Path(file).resolve()) in line
    assert "Input/output error" in line
