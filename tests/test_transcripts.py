"""Every word and number that commands print in a session on small files is the stored one.

`BERT_WRITE_TRANSCRIPTS=1 scripts/test tests/test_transcripts.py` stores what is printed now. Read the difference:
each of its lines is something that users see.
"""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import tensorflow  # noqa: F401 (before conftest.py cuts the CPU into devices)
from support.tiny_models import SENTENCES, write_base, write_records
from support.transcripts import run_transcript

TRANSCRIPTS = sorted(Path(__file__).with_name("transcripts").glob("*.txt"))


@pytest.fixture(scope="module")
def small_files(tmp_path_factory) -> Path:
    """A model of one layer, records, and reviews with their labels."""
    folder = write_base(tmp_path_factory.mktemp("small") / "files", train=96, dev=41)
    write_records(folder / "records", SENTENCES, folder / "model")
    return folder


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_a_session_prints_what_is_stored(path, small_files, tmp_path, monkeypatch):
    home = tmp_path / "home"
    shutil.copytree(small_files, home)
    monkeypatch.chdir(home)
    stored = path.read_text(encoding="utf-8")
    for package in re.findall("^# Needs (.*)[.]$", stored, re.MULTILINE):
        pytest.importorskip(package)
    python = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    fixed = {
        "COLUMNS": "200",
        "DATASETS_DIR": "/corpora",
        "HOME": str(tmp_path),
        "LC_ALL": "C.UTF-8",
        "HF_HUB_OFFLINE": "1",
        "PATH": python,
    }
    for name, value in fixed.items():
        monkeypatch.setenv(name, value)
    printed = run_transcript(stored, home)
    if os.environ.get("BERT_WRITE_TRANSCRIPTS") == "1":
        path.write_text(printed, encoding="utf-8")
    assert printed == stored
