"""What every message about a missing package says."""

import importlib.metadata
import re
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from bert_cli.errors import needs_extra

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "bert_cli").rglob("*.py"))
NAMED = sorted(
    set(
        re.findall(
            r"(?:needs_extra|install_command)\('([\w-]+)'\)",
            "".join(path.read_text() for path in FILES),
        )
    )
)


@pytest.mark.parametrize("extra", NAMED)
def test_a_message_names_the_pinned_packages_of_an_extra(extra):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = " ".join(f"'{pin}'" for pin in sorted(project["optional-dependencies"][extra]))
    assert needs_extra(extra) == f"needs the extra '{extra}'; pip install {pins}"


def test_an_extra_is_installed_from_the_checkout_where_the_tool_itself_is_not(monkeypatch):
    def absent(name: str):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", absent)
    command = needs_extra("cuda").partition("; ")[2]
    assert f"`{command}`" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_no_message_has_other_words_for_an_extra():
    assert len(NAMED) >= 7
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert "bert-cli[" not in text, path
        assert path.name == "errors.py" or "needs the extra '" not in text, path
