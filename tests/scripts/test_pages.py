"""Pages on clusters and trackers: their commands are ones that the tool takes, their files are there."""

import re

import pytest
from support.stand_in import ROOT, bash_blocks, command_lines, load_command

PAGES = [ROOT / "docs" / name for name in ("clusters.md", "trackers.md")]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_command_of_a_page_is_one_that_the_tool_takes(path, monkeypatch):
    monkeypatch.setenv("DATASETS_DIR", "/corpora")
    lines = list(command_lines(bash_blocks(path.read_text(encoding="utf-8"))))
    assert lines
    for words in lines:
        load_command(words)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_file_that_a_page_names_is_there(path):
    text = path.read_text(encoding="utf-8")
    named = set(re.findall(r"(?:configs|scripts)/[\w./]*\w\.(?:yaml|sh|json)", text))
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def test_the_test_of_commands_sees_a_mistake():
    page = "```bash\nexport A=1\nsrun bert pretrain \\\n  --confg x  # a remark\n```\n"
    (words,) = command_lines(bash_blocks(page))
    with pytest.raises(Exception, match="did you mean '--config'"):
        load_command(words)
