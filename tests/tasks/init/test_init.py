"""`bert init`: the text that it reads, the files that it writes, and the commands that it prints, run as they are."""

import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
from support.hf_models import need
from support.published import write_published
from support.runs import lines_of
from support.tiny_models import WORDS, write_model
from support.vectors import write_pooling

from bert_cli.cli import main
from bert_cli.config.init import InitSettings
from bert_cli.data.io import inputs
from bert_cli.data.tokens.vocab import find_vocabulary
from bert_cli.tasks.bench import measure
from bert_cli.tasks.init import recipe, run, text
from bert_cli.tasks.run import build

need("py3langid")
ROOT = Path(__file__).parents[3]
SENTENCES = [
    f"the {one} film was not a {two} plot and it is {one}." for one in WORDS for two in WORDS
]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("a text")
    documents = [" ".join(SENTENCES[n : n + 12]) for n in range(0, 360, 12)]
    rows = [json.dumps({"body": document}) + "\n" for document in documents]
    (home / "text.jsonl").write_text("".join(rows))
    rows = [f"{'good' if n % 2 else 'bad'} film {n},{n % 2}\n" for n in range(40)]
    (home / "labels.csv").write_text("text,label\n" + "".join(rows))
    write_model(home / "model")
    return home


@pytest.fixture
def at_home(home, monkeypatch):
    """The working directory, on a machine whose speed is known."""
    monkeypatch.chdir(home)
    machine = recipe.Machine("CPU", 1, "float32", 1e11)
    monkeypatch.setattr(run, "measure", lambda *_: (machine, "trains fast"))
    return home


def init(*words: str) -> int:
    return main(["init", "text.jsonl", *words, "--text-field", "body"])


def sentence_model(path: Path, kind: str = "bert") -> Path:
    """Write a model that makes vectors of texts; a multilingual MiniLM has the tokenizer Unigram."""
    if kind == "minilm":
        write_published(path, kind)
    else:
        write_model(path)
    return write_pooling(path, "mean", 32, 64)


def facts_of(path: Path, vocabulary=None, **form) -> recipe.TextFacts:
    reading = text.files.Reading(**form)
    parts, _ = inputs.recognise_all(path, reading, {})
    return text.read_facts(parts, reading, vocabulary)


def printed_commands(printed: str, program: str = "bert") -> list[list[str]]:
    lines = [line for line in printed.splitlines() if line.startswith(f"{program} ")]
    return [shlex.split(line)[1:] for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("goal", ["search", "fill-mask", "labels", "scratch"])
def test_every_printed_command_is_in_the_script_and_runs(goal, home, monkeypatch, bert, capsys):
    """From a model, and from scratch on the sample, with one epoch in place of forty and a tiny model."""
    monkeypatch.chdir(home)
    program = home / "bert"
    program.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    program.chmod(0o755)
    monkeypatch.setattr(run, "program", lambda: shlex.quote(str(program)))
    start = sentence_model(home / "sentences_model") if goal == "search" else "model"
    line = ["text.jsonl", goal, "--from", str(start), "--for", goal, "--text-field", "body"]
    if goal == "scratch":
        for name, values in {
            "epochs": {"scratch": 1},
            "size": {"sizes": [["mini", 2, 64, 1e-3]]},
        }.items():
            monkeypatch.setitem(recipe.TABLE, name, recipe.TABLE[name] | values)
        articles = str(ROOT / "data/sample/articles")
        line = [articles, goal, "--documents", "files"]
    printed = bert("init", *line).out
    assert ("too little to train from scratch" in printed) == (goal == "scratch")
    lines = printed_commands(printed, shlex.quote(str(program)))
    script = ["bash", home / goal / "commands.sh"]
    done = subprocess.run(script, capture_output=True, text=True, check=True, cwd="/")
    assert [json.loads(words) for words in done.stdout.splitlines()] == lines
    for words in lines:
        assert main(words) == 0, words
    results = capsys.readouterr().out
    if goal == "search":
        assert results.count("\n1. ") == 1
    else:
        assert "validation" in (home / goal / "run/metrics.jsonl").read_text()
        folder = "classifier" if goal == "labels" else "run"
        assert list((home / goal / folder).glob("step_*/model.safetensors"))
        assert (home / goal / "report.html").exists()
    assert f"out ({goal}): exists and is not an empty folder" in bert("init", *line, code=2).err


def test_commands_name_the_program_that_runs(tmp_path, monkeypatch):
    programs = tmp_path / ".venv/bin"
    programs.mkdir(parents=True)
    (programs / "bert").write_text("#!/bin/sh\n")
    (programs / "bert").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    assert run.program() == str(programs / "bert")
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    assert run.program() == "bert"


def test_paragraphs_that_may_not_be_documents_are_warned_of(at_home, bert):
    (at_home / "articles").mkdir()
    for number in range(6):
        paragraphs = SENTENCES[20 * number : 20 * number + 20]
        (at_home / "articles" / f"{number}.txt").write_text("\n\n".join(paragraphs) + "\n")
    words = ["init", "articles/*.txt", "nothing", "--from", "model", "--dry-run"]
    warning = "init: warning: each of 6 files becomes about 20 documents or more, because a blank "
    for more, is_warned in ((), True), (("--documents", "files"), False):
        assert (warning in bert(*words, *more).err) == is_warned


def test_the_sentence_is_long_enough_to_be_shown():
    document = ["A title.", "The bridge was built in a year of which nothing is known."]
    assert text.plain_sentence(document) == document[-1]


@pytest.mark.parametrize("kind", ["bert", "minilm"])
def test_an_index_for_search_has_the_model_as_published(kind, at_home, capsys):
    start = at_home / f"{kind}_model"
    folder = start
    if kind == "bert":  # as a run saves it
        folder = start / "step_00000001"
    sentence_model(folder, kind)
    if kind == "bert":
        (folder / "state.json").write_text('{"format": 1, "crc32c": {}}')
    assert init(f"found_{kind}", "--from", str(start), "--for", "search") == 0
    assert "an index needs no training" in capsys.readouterr().out
    assert not (at_home / f"found_{kind}/text").exists()
    script = (at_home / f"found_{kind}/commands.sh").read_text()
    assert f"cd '{at_home}'" in script.splitlines()
    make, *asked = printed_commands(script, run.program())
    expected = [
        "search",
        "make",
        f"found_{kind}/search.index",
        "text.jsonl",
        "--text-field",
        "body",
    ]
    assert make == [*expected, "--model", str(start)]
    assert asked and all(
        words[:3] == ["search", "ask", f"found_{kind}/search.index"] for words in asked
    )


def test_a_book_is_divided_into_a_part_for_training_and_a_part_held_out(at_home):
    written = [f"{n} {n + 1} {line}" for n, line in enumerate(SENTENCES * 8)]
    (at_home / "book.txt").write_text("\n".join(written) + "\n")
    words = ["init", "book.txt", "book", "--from", "model"]
    assert main([*words, "--documents", "files", "--engine", "jax"]) == 0
    assert json.loads((at_home / "book/pretrain.json").read_text())["engine"] == "jax"
    parts = [lines_of(at_home / f"book/text/{part}.jsonl") for part in text.PARTS]
    lines = [line for part in parts for row in part for line in row["text"].splitlines()]
    assert sorted(lines) == sorted(written)
    assert all(parts)
    pieces = [*text.cut([written])]
    assert [*chain.from_iterable(pieces)] == written
    assert (
        max(len("".join(piece)) for piece in pieces)
        < 2 * text.LONG_DOCUMENT
        < len("".join(written))
    )


@pytest.mark.parametrize(
    ("number", "held_out", "test"),
    [(4, 1, 1), (20, 5, 5), (36, 6, 6), (120, 6, 6), (2000, 100, 100), (6000, 250, 250)],
)
def test_a_tenth_of_many_documents_is_held_out_and_more_of_few(number, held_out, test, tmp_path):
    """One half chooses a checkpoint, the other is the test; twelve documents, if half of them are as many."""
    documents = [[f"A short text, {n}."] for n in range(number)]
    sentence = text.divide(tmp_path, lambda: documents, number, lambda line: [line])
    assert sentence not in (tmp_path / "text/train.jsonl").read_text()
    sizes = [len(lines_of(tmp_path / f"text/{part}.jsonl")) for part in text.PARTS]
    assert sizes == [number - held_out - test, held_out, test]


@pytest.mark.parametrize("kind", ["equal", "other case and spaces", "nearly equal"])
def test_copies_of_held_out_documents_are_left_out_and_counted(kind, tmp_path, capsys):
    originals = [" ".join(f"w{n}x{m}" for m in range(80)) for n in range(30)]
    change = {
        "equal": str,
        "other case and spaces": lambda original: original.upper().replace(" ", "\t "),
        "nearly equal": lambda original: f"{original} and one more",
    }[kind]
    documents = [[line] for original in originals for line in (change(original), original)]
    text.divide(tmp_path, lambda: documents, 60, lambda line: [line])
    parts = [
        [row["text"].lower().split()[0] for row in lines_of(tmp_path / f"text/{part}.jsonl")]
        for part in text.PARTS
    ]
    assert [*map(len, parts)] == [36, 6, 6]
    train, held_out, test = map(set, parts)
    assert len(train | held_out | test) == 30 and not train & (held_out | test)
    assert not held_out & test and len(held_out | test) == 12
    assert "init: left out 12 repetitions of held-out documents" in capsys.readouterr().out


def test_words_that_a_vocabulary_lacks_are_counted(home, tmp_path):
    (tmp_path / "a.txt").write_text("the film was \u2603\n\n" * 300)
    facts = facts_of(tmp_path / "a.txt", find_vocabulary(str(home / "model"), cased=False))
    assert (facts.unknown, facts.pieces_per_word) == (0.25, 1.0)


def test_the_length_of_records_suits_nine_of_ten_documents(tmp_path):
    """27 documents of 40 words, and three of 300."""
    texts = ["one two three four five " * (60 if n % 10 == 9 else 8) for n in range(30)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    facts = facts_of(tmp_path / "a.jsonl")
    assert (facts.words, facts.documents) == (27 * 40 + 3 * 300, 30)
    assert 40 < facts.long_document < 300 and not facts.is_cut


def test_the_rate_and_the_spread_are_those_of_the_measured_steps(home, monkeypatch):
    metrics = {"examples_per_second": 8.0, "flops_per_second": 8e9}
    metrics["step_seconds"] = {"low": 1.0, "median": 2.0, "high": 8.0}
    trials = []
    monkeypatch.setattr(measure, "measure", lambda trial: trials.append(trial) or metrics)
    monkeypatch.chdir(home)
    facts = recipe.TextFacts(1e6, 1e5, 100, {"en": 1.0}, 900.0)
    start, _ = run.find_start("model", needs_vocabulary=True)
    settings = InitSettings.model_validate({"input": "x", "out": "y", "from": "model"})
    machine, described = run.measure(settings, facts, start)
    assert "model trains at 8.0 examples/s on" in described and "median of 5 steps" in described
    assert (machine.spread, machine.flops) == ((0.5, 4.0), 8e9)
    (trial,) = trials
    assert (trial.steps, trial.warmup_steps) == (5, 1)  # the first step compiles
    batch = trial.global_batch
    sizes = (batch.micro_batch_size, batch.grad_acc_steps_per_replica, trial.max_seq_length)
    assert sizes == (16, 1, 64)


def test_the_lines_of_wrapped_text_are_joined(at_home, capsys):
    documents = [textwrap.fill(" ".join(SENTENCES[n : n + 12]), 60) for n in range(0, 360, 12)]
    (at_home / "wrapped.txt").write_text("\n\n".join(documents) + "\n")
    assert main(["init", "wrapped.txt", "wrapped", "--from", "model"]) == 0
    assert (
        "init: joined the wrapped lines of 1 of 1 files, as wrapped.txt" in capsys.readouterr().out
    )
    rows = lines_of(at_home / "wrapped/text/train.jsonl")
    assert len(rows) == 15 and not any("\n" in row["text"] for row in rows)


def test_a_signal_during_the_measurement_ends_the_command(home, monkeypatch):
    monkeypatch.chdir(home)
    real = build.build_run

    def build_run(*arguments: object) -> object:
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments)

    monkeypatch.setattr(build, "build_run", build_run)
    assert init("signal", "--from", "model") == 130
    assert not (home / "signal").exists()


def test_a_larger_text_is_estimated_from_pieces_of_it(home, monkeypatch):
    complete = facts_of(home / "text.jsonl", text_field="body")
    monkeypatch.setattr(text, "PIECE_BYTES", 2000)
    monkeypatch.setattr(text, "SAMPLED_BYTES", 8000)
    sampled = facts_of(home / "text.jsonl", text_field="body")
    assert (complete.is_estimated, sampled.is_estimated) == (False, True)
    for name in ("words", "documents", "text_bytes"):
        assert getattr(sampled, name) == pytest.approx(getattr(complete, name), rel=0.1), name
    assert complete.documents == 30 and [*complete.languages] == ["en"]
    described = text.describe(replace(complete, text_bytes=3e6, words=5e5))
    assert described == "3 MB of text, 500,000 words in 30 documents; language en 100%"


def test_words_without_spaces_are_counted_by_characters():
    assert text.WORD.findall("猫は ok, 世界") == ["猫", "は", "ok,", "世", "界"]
    assert text.mask_word("a b c") == "a [MASK] c"
