"""Names that 1.0 removed: refused by name, with what to use instead."""

import re
from pathlib import Path

import pytest

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


def test_the_page_of_what_was_removed_has_the_names_of_the_table():
    page = (ROOT / "docs/removed.md").read_text(encoding="utf-8")
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| ")]
    names = re.findall("`([^`]+)`", " ".join(cells))
    assert sorted(names) == sorted([*removed.SETTINGS, *removed.COMMANDS])
