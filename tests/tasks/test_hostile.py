"""Values that a terminal would interpret: no command prints them as they are, in whichever field they stand."""

import json
import re
import shlex

import pytest
import tensorflow  # noqa: F401 (before conftest.py cuts the CPU into devices)
from support.tiny_models import OTHERS, SENTENCES, write_model

from bert_cli.cli import main

EVIL = "x\x1b[31m\x07\x9b\x7fy"
"""Colours, a bell, and the start of a sequence in one byte, as part of a name."""
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
TUNED = "--pretrained-ckpt-path model --save-ckpt-path new --cache-dir null --max-seq-length 32"
COMMANDS = [
    "search ask index 'EVIL good'",
    "search ask index good --top 9",
    "search score index --queries EVIL.tsv",
    f"classify {TUNED} --train-file EVIL.csv --dry-run",
    f"classify {TUNED} --train-file EVIL.csv --label-column EVIL --dry-run",
    f"classify {TUNED} --train-file EVIL.csv --num-epochs 1 --held-out-fraction 0.5",
    f"ner {TUNED} --train-file EVIL.conll --dry-run",
    "predict model --input EVIL.txt",
    "predict EVIL text",
    "predict model EVIL --task embed",
    "init EVIL.jsonl recipe --from model --dry-run",
    "runs EVIL.runs",
    "compare EVIL.runs/one EVIL.runs/two",
    "plot EVIL.runs/one EVIL.runs/two --output EVIL.pictures",
    "--EVIL",
    "predict --EVIL 1",
    "pretrain --config EVIL.json",
]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Files whose names, titles, labels and columns are hostile."""
    home = tmp_path_factory.mktemp("hostile")
    write_model(home / "model")
    sentences = " ".join(SENTENCES[:4])
    rows = [f"good {word} {n},{'ab'[n % 2]}{EVIL}" for n in range(9) for word in OTHERS[:5]]
    questions = [("good", f"{EVIL}.txt"), ("bad", EVIL), ("fine", "none")]
    texts = {
        ".txt": f"{EVIL}\n\n{sentences} {EVIL}\n",
        ".jsonl": "".join(
            json.dumps({"text": f"{n} {sentences}", "title": EVIL}) + "\n" for n in range(9)
        ),
        ".csv": "\n".join(
            [f"text,label,{EVIL}2", *(f"{row},1" for row in rows), f"alone,z{EVIL},1"]
        ),
        ".conll": f"good B-{EVIL.replace(chr(0x1B), '')}\nbad O\n\n" * 9,
        ".tsv": "\n".join(["question\tdocument", *("\t".join(row) for row in questions)]),
        ".json": json.dumps({EVIL: 1, "precision": EVIL}),
    }
    for end, text in texts.items():
        (home / f"{EVIL}{end}").write_text(text)
    for name in ("one", "two"):
        run = home / f"{EVIL}.runs" / name
        run.mkdir(parents=True)
        (run / "settings.json").write_text(
            json.dumps({"format": 1, "command": EVIL, "note": f"{name}{EVIL}"})
        )
        (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 1.0, EVIL: 2.0}) + "\n")
    words = ["search", "make", home / "index", home / f"{EVIL}.txt", home / f"{EVIL}.jsonl"]
    assert main([*map(str, words)]) == 0
    return home


@pytest.mark.parametrize("line", COMMANDS)
def test_no_command_prints_a_control_character_of_a_value(line, home, monkeypatch, capfd):
    monkeypatch.chdir(home)
    main(shlex.split(line.replace("EVIL", EVIL)))
    printed = "".join(capfd.readouterr())
    assert "31m" in printed and CONTROL.findall(printed) == []
