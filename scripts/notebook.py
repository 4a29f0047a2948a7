"""Make examples/first_model.ipynb from docs/guide.md: its text, and a cell for each block that a test runs."""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "first_model.ipynb"
BLOCK = re.compile(r"<!-- run -->\n```bash\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
BEFORE = "Run this notebook in the root of a clone, in an environment with `bert` and Jupyter."


def cell(kind: str, text: str) -> dict[str, Any]:
    """Return a cell of a notebook, `markdown` or `code`."""
    code: dict[str, Any] = {"outputs": [], "execution_count": None} if kind == "code" else {}
    return {"cell_type": kind, "metadata": {}, "source": text.strip(), **code}


def notebook() -> str:
    """Return the guide as a notebook in JSON."""
    page = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    page = page.partition("## With more text")[0]
    # Links lead from examples/ to docs/.
    page = re.sub(r"\]\((?=[a-z/-]+\.md)", "](../docs/", page)
    title, _, page = page.partition("\n")
    parts = BLOCK.split(f"{BEFORE}\n{page}")
    cells = [cell("markdown", title)]
    for number, part in enumerate(parts):
        if part.strip():
            cells.append(cell("code", f"%%bash\n{part}") if number % 2 else cell("markdown", part))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 4}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(), encoding="utf-8")
