"""The search at the end of `scripts/demo`: its pairs, and the ranks that it prints."""

import csv
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_lines import ROOT

from bert_cli import open_index
from bert_cli.cli import main

# Vectors of letter counts: a text is near one that shares its first word.
BERT = """
import json, sys
for line in sys.stdin.read().split("\\n"):
    words = line.lower().split()
    vector = [float(sum(map(ord, word)) % 97 == n) for n in range(97) for word in words[:1]]
    print(json.dumps({"embedding": vector}))
"""
QUESTIONS = "question\tarticle\nBread. Is it old?\tBread\nNobody knows.\tTunnel\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder in which the steps of the demo before its training are done."""
    path = tmp_path_factory.mktemp("demo")
    before = Path.cwd()
    os.chdir(path)
    try:
        assert main(["download", "demo/dump", "--sample"]) == 0
        assert main(["extract", "demo/dump", "demo/extracted", "--processes", "1"]) == 0
        assert main(["preprocess", "demo/extracted", "demo/sentences", "--processes", "1"]) == 0
    finally:
        os.chdir(before)
    search(path, "pairs")
    return path


def search(folder: Path, *words: str) -> str:
    command = [sys.executable, ROOT / "scripts" / "demo_search", *words]
    return subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True).stdout


def test_each_sentence_has_the_opening_of_its_article_and_no_question_is_trained_on(folder):
    openings = (folder / "demo/articles.txt").read_text().splitlines()
    with (folder / "demo/pairs.tsv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file, delimiter="\t"))[1:]
    assert len(openings) == 75 and {opening for _, opening in rows} == set(openings)
    assert "Volcano. A volcano is an opening in the crust" in "\n".join(openings)
    questions = (ROOT / "data/sample/questions.tsv").read_text().splitlines()[1:]
    titles = {opening.partition(". ")[0] for opening in openings}
    assert len(questions) == 5
    for question, article in (line.split("\t") for line in questions):
        assert article in titles and question not in {sentence for sentence, _ in rows}


def test_the_ranks_of_the_right_articles_are_printed_for_each_model(folder):
    program = folder / ".venv/bin/bert"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!{sys.executable}\n{BERT}")
    program.chmod(0o755)
    (folder / "data/sample").mkdir(parents=True)
    (folder / "data/sample/questions.tsv").write_text(QUESTIONS)
    printed = search(folder, "score", "one", "two")
    assert "among 75 (at random: 38)" in printed
    lines = {line.split("  ")[0]: line.split()[-2:] for line in printed.splitlines()}
    assert lines["Bread. Is it old?"] == ["1", "1"]
    assert lines["found among the first 3"] in (["50%", "50%"], ["100%", "100%"])
    shutil.rmtree(folder / "data")


def test_words_find_the_right_article_for_every_question_that_the_demo_asks(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert main(["search", "make", "demo/search.index", "demo/extracted"]) == 0
    lines = (ROOT / "data/sample/questions.tsv").read_text(encoding="utf-8").splitlines()[1:]
    script = (ROOT / "scripts" / "demo").read_text(encoding="utf-8")
    asked = re.findall(r"""search ask demo/search.index ['"](.*?)['"]""", script)
    assert len(asked) == 2 and asked[0] == lines[0].split("\t")[0]
    answers = [*(line.split("\t") for line in lines), [asked[1], "Coffee"]]
    index = open_index("demo/search.index")
    for question, article in answers:
        assert index.ask(question)[0].title == article, question
