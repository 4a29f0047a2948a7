"""Each number that the README and the benchmarks claim stands, up to rounding, in the log that they link to."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CLAIMING = ("README.md", "docs/benchmarks.md")
LOG = re.compile(r"\]\(([^)#]*(?:benchmarks|search|lab/\w+)\.md)#([\w-]+)\)")
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e-?\d+)?(?!\w|\.\d)")
NOT_CLAIMS = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)|Python 3\.11 to 3\.14", re.DOTALL)
HEADING = re.compile(r"^(#+) (.*)$", re.MULTILINE)


def section(page: Path, anchor: str) -> str:
    """Return the text below the heading of this anchor, with its smaller headings."""
    text = page.read_text(encoding="utf-8")
    headings = list(HEADING.finditer(text))
    for number, heading in enumerate(headings):
        if re.sub(r"[^\w]+", "-", heading[2].lower()).strip("-") == anchor:
            rest = headings[number + 1 :]
            later = (other.start() for other in rest if len(other[1]) <= len(heading[1]))
            return text[heading.end() : next(later, len(text))]
    raise LookupError(f"{page} has no section #{anchor}")


def claims(page: Path) -> Iterator[tuple[str, str]]:
    """Yield each paragraph, row and item that links to a log, and the sections that it links to."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for block in re.split(r"\n\s*\n|\n(?=[-|])", text):
        if links := LOG.findall(block):
            yield block, "\n".join(section(page.parent / path, anchor) for path, anchor in links)


def is_in(number: str, logged: list[str]) -> bool:
    """Return whether a logged number is this one when it is rounded to as many digits."""
    mantissa, _, exponent = number.replace(",", "").partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    value = float(number.replace(",", ""))
    return any(abs(float(text.replace(",", "")) - value) <= unit / 2 * 1.000001 for text in logged)


@pytest.mark.parametrize("page", CLAIMING)
def test_each_number_of_a_claim_stands_in_the_log_that_it_links_to(page):
    missing = []
    number_of_claims = 0
    for block, logs in claims(ROOT / page):
        logged = NUMBER.findall(logs)
        claimed = NUMBER.findall(NOT_CLAIMS.sub("", block))
        number_of_claims += len(claimed)
        missing += [(block.strip()[:60], number) for number in claimed if not is_in(number, logged)]
    assert number_of_claims > 4
    assert missing == []


def test_each_promise_of_the_readme_with_a_number_links_to_its_log():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    promises = re.findall(r"^- \*\*.*$", text, re.MULTILINE)
    assert len(promises) > 4
    claimed = [line for line in promises if NUMBER.search(NOT_CLAIMS.sub("", line))]
    assert [line for line in claimed if not LOG.search(line)] == []


def test_a_number_is_found_rounded_and_not_otherwise():
    assert is_in("0.89", ["0.891"])
    assert is_in("2e-6", ["1.9e-6"])
    assert not is_in("0.90", ["0.891"])
    assert not is_in("1,194", ["194"])
