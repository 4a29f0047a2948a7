"""What every message about a missing package says."""

import re
import tomllib
from pathlib import Path

import pytest

from bert_cli.errors import needs_extra

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "bert_cli").rglob("*.py"))
NAMED = sorted(
    set(re.findall(r"needs_extra\('([\w-]+)'\)", "".join(path.read_text() for path in FILES)))
)


def test_an_extra_is_installed_as_the_readme_says():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    command = needs_extra("cuda").partition("; ")[2]
    assert command.startswith("pip install ") and f"`{command}`" in readme


@pytest.mark.parametrize("extra", NAMED)
def test_every_extra_that_a_message_names_is_there(extra):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert extra in project["optional-dependencies"]


def test_no_message_has_other_words_for_an_extra():
    assert len(NAMED) >= 7
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert "bert-cli[" not in text, path
        assert path.name == "errors.py" or "needs the extra '" not in text, path
