"""Names that 1.0 removed: refused by name, with what to use instead."""

import re
from pathlib import Path

import pytest
from support.orders import refusal

from bert_cli.cli import main
from bert_cli.parse import removed

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("key", removed.SETTINGS)
def test_a_removed_flag_is_refused_with_what_to_use(key, capsys):
    flag = f"--{key.replace('_', '-')}"
    for words in ([flag, "7"], [f"{flag}=7"], [f"{flag}.inner", "7"]):
        assert main(["runs", *words]) == 2
        message = f"bert: bert runs ({words[0]}): was removed in 1.0; {removed.SETTINGS[key]}\n"
        assert capsys.readouterr().err == message


def test_a_removed_key_of_a_config_is_refused_with_its_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(removed.SETTINGS, "parallel.old", "leave it out")
    monkeypatch.setitem(removed.SETTINGS, "older", "leave it out, too")
    config = {"ipu_config": {"old": 1}, "older": {"inner": 2}}
    text = refusal("pretrain --config pretrain_tiny_128_phase1", config)
    assert "parallel.old (c.json): was removed in 1.0; leave it out\n" in text
    assert "older (c.json): was removed in 1.0; leave it out, too" in text


def test_the_page_of_what_was_removed_has_the_names_of_the_table():
    page = (ROOT / "docs/removed.md").read_text(encoding="utf-8")
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| ")]
    names = re.findall("`([^`]+)`", " ".join(cells))
    assert sorted(names) == sorted([*removed.SETTINGS, *removed.COMMANDS])
