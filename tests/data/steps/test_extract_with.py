"""`bert extract --with`: WikiExtractor and programs of one's own, which fail, lose pages or hang."""

import re
import sys

import pytest
from support.dumps import HEADER, articles, dump, page, run, tree
from support.processes import alive, wait_for

from bert_cli.data.workers import program as programs
from bert_cli.errors import ConfigError, DataError

# A program for --with: it gets a dump as its last argument.
PROGRAM = """import json, os, re, subprocess, sys, time
pages = re.findall(r"<title>(.*?)</title>.*?<id>(.*?)</id>", open(sys.argv[-1], encoding="utf-8").read(), re.DOTALL)
def block(title, number):
    print(f'<doc id="{{number}}" url="" title="{{title}}">\\n{{title}}\\n\\nText\\n\\n</doc>\\n')
{}
"""


def program(tmp_path, body):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(body))
    return f"{sys.executable} {path}"


def extract_with(tmp_path, count, body):
    source = dump(tmp_path / "dump.xml", articles(count))
    return run(source, tmp_path / "out", **{"with": program(tmp_path, body)})


def test_a_program_writes_doc_blocks(tmp_path):
    source = dump(tmp_path / "dump.xml", articles(2) + page(7, "A &amp; B", "x"))
    manifest = run(
        source,
        tmp_path / "out",
        2,
        **{"with": program(tmp_path, "for page in pages: block(*page)")},
    )
    text = tree(tmp_path / "out")["AA/wiki_00"]
    expected = [("1", "Article 1"), ("2", "Article 2"), ("7", "A &amp; B")]
    assert re.findall(r'^<doc id="(\d+)" .*title="(.*)">$', text, re.MULTILINE) == expected
    assert (manifest["counts"]["pages_lost"], manifest["notes"]) == (0, [])
    with pytest.raises(DataError, match=r"extractor was .*program.py', now 'bert'"):
        run(source, tmp_path / "out")


def test_wikiextractor_runs_as_such_a_program_and_loses_the_list_items(tmp_path):
    source = dump(tmp_path / "dump.xml", page(1, "Lune", "Un '''texte'''.\n* un élément\n"))
    manifest = run(source, tmp_path / "out", **{"with": "wikiextractor"})
    assert manifest["versions"]["wikiextractor"] == "3.1.0"
    head = (
        '<doc id="1" url="https://fr.wikipedia.org/wiki?curid=1" title="Lune">\nLune\n\nUn texte.'
    )
    assert tree(tmp_path / "out")["AA/wiki_00"].strip("\n") == f"{head}\n\n</doc>"
    run(source, tmp_path / "own")
    assert tree(tmp_path / "own")["AA/wiki_00"].strip("\n") == f"{head}\nun élément\n\n</doc>"


def test_a_crash_of_wikiextractor_ends_the_step_with_the_pages_of_the_chunk(tmp_path):
    bad = page(99, "Broken bytes", "not UTF-8: \udcff\udcfe")
    source = tmp_path / "dump.xml"
    text = HEADER + articles(3) + bad + "</mediawiki>\n"
    source.write_bytes(text.encode("utf-8", "surrogateescape"))
    pages = r"AA/wiki_00 \(pages 1 'Article 1' to 99 'Broken bytes'\)"
    problem = rf"{pages}: the program fails \(exit status 1 \(UnicodeDecodeError"
    with pytest.raises(DataError, match=problem):
        run(source, tmp_path / "out", **{"with": "wikiextractor"})
    assert not (tmp_path / "out" / "manifest.json").exists()
    run(source, tmp_path / "own")
    assert "not UTF-8: \ufffd\ufffd" in tree(tmp_path / "own")["AA/wiki_00"]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("sys.exit('no license')", r"the program fails \(exit status 1 \(no license\)\)"),
        ("print('just text')", r"the program fails \(it writes no <doc> blocks\)"),
        ("", r"the program fails \(it writes no <doc> blocks\)"),
    ],
)
def test_a_program_that_fails_ends_the_step(tmp_path, body, problem):
    with pytest.raises(DataError, match=problem):
        extract_with(tmp_path, 4, body)
    with pytest.raises(OSError, match="No space left on device"):
        extract_with(tmp_path, 4, "sys.exit('No space left on device')")


def test_a_program_that_is_missing_is_refused(tmp_path, monkeypatch):
    source = dump(tmp_path / "dump.xml", articles(1))
    monkeypatch.setattr(programs, "find_spec", lambda _: None)
    for words, problem in (
        ("wikiextractor", r"\(wikiextractor\): needs the extra 'wikiextractor'; pip"),
        ("no-such-program --format jsonl", r"\(no-such-program .*\): no such program; install it"),
        ("a 'b", r"\(a 'b\): is not a valid command line"),
    ):
        with pytest.raises(ConfigError, match=f"with {problem}"):
            run(source, tmp_path / "out", **{"with": words})


@pytest.mark.parametrize(
    ("pages", "names"),
    [(3, ""), (4, ", 4 'Article 4'"), (5, ", 4 'Article 4', ...")],
)
def test_lost_pages_are_counted_and_three_are_named(tmp_path, pages, names):
    manifest = extract_with(tmp_path, pages, "block('Article 2', 2)")
    counts = manifest["counts"]
    assert (counts["documents"], counts["pages_lost"]) == (1, pages - 1)
    lost = f"AA/wiki_00: {pages - 1} of {pages} pages are missing from the output"
    assert manifest["notes"] == [f"{lost} (1 'Article 1', 3 'Article 3'{names})"]


def test_a_program_that_hangs_is_ended_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "SECONDS", 1.0)
    monkeypatch.setattr(programs, "SECONDS_PER_MEGABYTE", 0.0)
    body = f"""if "Article 1<" in open(sys.argv[-1]).read():
    child = subprocess.Popen(["sleep", "60"])
    open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
    while True: pass
for page in pages: block(*page)"""
    with pytest.raises(DataError, match=r"the program fails \(did not finish within 1 s"):
        extract_with(tmp_path, 2, body)
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not alive(pid))
