"""`bert init`: the text that it reads, the files that it writes, and the commands that it prints, run as they are."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest
from support.hf_models import need
from support.runs import lines_of
from support.tiny_models import WORDS, write_model

from bert_cli.cli import main
from bert_cli.config.init import InitSettings
from bert_cli.data.finetune.embeddings import embedding_files
from bert_cli.data.io import inputs
from bert_cli.data.tokens.tokenizer import Normalization, write_vocabulary
from bert_cli.data.tokens.vocab import find_vocabulary
from bert_cli.tasks.init import recipe, run, text
from bert_cli.tasks.run import build, train

need("py3langid")
ROOT = Path(__file__).parents[3]
SENTENCES = [
    f"the {one} film was not a {two} plot and it is {one}." for one in WORDS for two in WORDS
]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Documents as JSON lines, and a model."""
    home = tmp_path_factory.mktemp("init")
    documents = [" ".join(SENTENCES[n : n + 12]) for n in range(0, 360, 12)]
    rows = [json.dumps({"body": document}) + "\n" for document in documents]
    (home / "text.jsonl").write_text("".join(rows))
    rows = [f"{'good' if n % 2 else 'bad'} film,{n % 2}\n" for n in range(40)]
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


def facts_of(path: Path, vocabulary=None, **form) -> recipe.TextFacts:
    reading = text.files.Reading(**form)
    parts, _ = inputs.recognise_all(path, reading, {})
    return text.read_facts(parts, reading, vocabulary)


def printed_commands(printed: str, program: str = "bert") -> list[list[str]]:
    lines = [line for line in printed.splitlines() if line.startswith(f"{program} ")]
    return [shlex.split(line)[1:] for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("goal", ["search", "fill-mask", "labels", "scratch"])
def test_every_printed_command_is_in_the_script_and_runs(goal, home, monkeypatch, capsys):
    """From a model, and from scratch on the sample, with one epoch in place of forty and a tiny model."""
    monkeypatch.chdir(home)
    program = home / "bert"
    program.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    program.chmod(0o755)
    monkeypatch.setattr(run, "program", lambda: str(program))
    line = ["text.jsonl", goal, "--from", "model", "--for", goal, "--text-field", "body"]
    if goal == "scratch":
        for name, values in {
            "epochs": {"scratch": 1},
            "size": {"sizes": [["mini", 2, 64, 1e-3]]},
        }.items():
            monkeypatch.setitem(recipe.TABLE, name, recipe.TABLE[name] | values)
        articles = str(ROOT / "data/sample/articles")
        line = [articles, goal, "--documents", "files", "--for", "search"]
    assert main(["init", *line]) == 0
    printed = capsys.readouterr().out
    assert ("too little to train from scratch" in printed) == (goal == "scratch")
    lines = printed_commands(printed, str(program))
    script = ["bash", home / goal / "commands.sh"]
    done = subprocess.run(script, capture_output=True, text=True, check=True, cwd="/")
    assert [json.loads(words) for words in done.stdout.splitlines()] == lines
    for words in lines:
        assert main(words) == 0, words
    results = capsys.readouterr().out
    assert "validation" in (home / goal / "run/metrics.jsonl").read_text()
    folder = {"fill-mask": "run", "labels": "classifier"}.get(goal, "vectors")
    assert list((home / goal / folder).glob("step_*/model.safetensors"))
    if folder == "vectors":
        answers = {"search": 1, "scratch": 3}[goal]
        assert (results.count('"ndcg_10"'), results.count("\n1. ")) == (2, answers), results
    assert (home / goal / "report.html").exists()
    assert main(["init", *line]) == 0
    assert capsys.readouterr().out == f"{goal} is complete (nothing to do)\n"


def test_commands_name_the_program_that_runs(tmp_path, monkeypatch):
    programs = tmp_path / ".venv/bin"
    programs.mkdir(parents=True)
    (programs / "bert").write_text("#!/bin/sh\n")
    (programs / "bert").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    assert run.program() == ".venv/bin/bert"
    monkeypatch.chdir("/usr")
    assert run.program() == str(programs / "bert")
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    assert run.program() == "bert"


def test_paragraphs_that_may_not_be_documents_are_warned_of(at_home, capsys):
    (at_home / "articles").mkdir()
    for number in range(6):
        paragraphs = SENTENCES[20 * number : 20 * number + 20]
        (at_home / "articles" / f"{number}.txt").write_text("\n\n".join(paragraphs) + "\n")
    words = ["init", "articles/*.txt", "nothing", "--from", "model", "--dry-run"]
    warning = "init: warning: 6 files have 120 documents, because a blank line ends a document; "
    for more, is_warned in ((), True), (("--documents", "files"), False):
        assert main([*words, *more]) == 0
        assert (warning in capsys.readouterr().out) == is_warned


def test_the_sentence_names_its_subject_and_questions_are_whole_or_titles(tmp_path):
    lines = ["A title.", "It has a sentence that is long enough to be shown.", "One.", "Two. End."]
    document = [*lines, "The bridge was built in a year of which nothing is known."]

    def examples(*more):
        return text.divide(tmp_path, [[*document, *more]] * 2, 2, lambda line: [line], True)

    assert examples() == (document[-1], ["A title.", document[-1]])
    asked = [f"How long is the bridge number {number}?" for number in range(4)]
    no_questions = ("Why?", "Permissions?", "And so? How is it?", "x: is it (y) or not?")
    assert examples(*no_questions, *asked)[1] == asked[:3]
    for title in ("MOUNT(8)", "{{Short description|A bridge}}"):
        document[0] = title
        assert examples()[1] == [document[-1]]


def test_the_held_out_documents_are_not_trained_on(at_home, capsys):
    assert init("parts", "--from", "model", "--for", "search") == 0
    expected = int(re.search(r"about (\d+) of the text", capsys.readouterr().out)[1])

    def texts(name, key="text"):
        return [row[key] for row in lines_of(at_home / "parts" / name)]

    pairs = texts("pairs.jsonl", "positive")
    assert 0.9 * expected <= len(pairs) <= 1.1 * expected
    parts = [texts(f"text/{part}.jsonl") for part in text.PARTS]
    assert [*map(len, parts)] == [15, 7, 8] and len({one for part in parts for one in part}) == 30
    passages = (pairs, texts("search/corpus.jsonl"), texts("test/corpus.jsonl"))
    for number, first in enumerate(passages):
        owners = [[one in "\n".join(part) for part in parts] for one in first]
        assert owners and owners == [[at == number for at in range(3)]] * len(owners)


def test_all_passages_of_the_document_of_a_query_are_relevant(at_home):
    documents = [" ".join(SENTENCES[n : n + 60]) for n in range(0, len(SENTENCES) - 60, 15)]
    rows = "".join(json.dumps({"text": document}) + "\n" for document in documents)
    (at_home / "long.jsonl").write_text(rows)
    assert main(["init", "long.jsonl", "judged", "--from", "model", "--for", "search"]) == 0
    lines = (at_home / "judged/search/qrels/test.tsv").read_text().splitlines()[1:]
    judged = {tuple(line.split("\t")[:2]) for line in lines}
    files = (lines_of(at_home / f"judged/search/{name}.jsonl") for name in ("queries", "corpus"))
    queries, texts = ({row["_id"]: row["text"] for row in rows} for rows in files)
    assert queries.keys() == texts.keys() and len({*texts.values()}) == len(texts)
    owner = {name: name.partition("-")[0] for name in queries}
    assert judged == {(q, p) for q in queries for p in queries if owner[q] == owner[p]}
    assert len(judged) > len(queries) > len({*owner.values()})
    held_out = [row["text"] for row in lines_of(at_home / "judged/text/held_out.jsonl")]
    for name, passage in texts.items():
        assert passage in held_out[int(owner[name]) // 2 - 1]


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_model_of_sentences_is_used_as_published_and_its_training_is_an_experiment(
    pooling, at_home
):
    shutil.copytree(at_home / "model", at_home / pooling)
    for name, content in embedding_files(pooling, 32, 64).items():
        (at_home / pooling / name).parent.mkdir(exist_ok=True)
        (at_home / pooling / name).write_bytes(content)
    out = at_home / f"of_{pooling}"
    assert init(out.name, "--from", pooling, "--for", "search") == 0
    assert not (out / "pretrain.json").exists()
    config = json.loads((out / "embed.json").read_text())
    assert (config["pretrained_ckpt_path"], config["pooling"]) == (pooling, pooling)
    script = (out / "commands.sh").read_text()
    commands = [line for line in script.splitlines()[3:] if not line.startswith("# ")]
    assert f"search make {out.name}/search.index" in commands[0]
    assert commands[0].endswith(f" --model {pooling}")
    assert all(" search ask " in line for line in commands[1:]) and commands[1:]
    for words in ("embed", "verdict"):
        assert re.search(rf"^# \S*bert {words} ", script, re.MULTILINE)


def test_a_book_is_divided_into_a_part_for_training_and_a_part_held_out(at_home):
    (at_home / "book.txt").write_text("\n".join(SENTENCES * 8) + "\n")
    words = ["init", "book.txt", "book", "--from", "model", "--for", "search"]
    assert main([*words, "--documents", "files", "--engine", "jax"]) == 0
    assert json.loads((at_home / "book/embed.json").read_text())["engine"] == "jax"
    parts = [lines_of(at_home / f"book/text/{part}.jsonl") for part in text.PARTS]
    lines = [line for part in parts for row in part for line in row["text"].splitlines()]
    assert sorted(lines) == sorted(SENTENCES * 8)
    assert all(parts)
    assert lines_of(at_home / "book/search/queries.jsonl")


@pytest.mark.parametrize(
    ("number", "held_out", "test"),
    [(4, 1, 1), (20, 5, 5), (36, 6, 6), (120, 6, 6), (2000, 100, 100), (6000, 250, 250)],
)
def test_a_tenth_of_many_documents_is_held_out_and_more_of_few(number, held_out, test, tmp_path):
    """One half chooses a checkpoint, the other is the test; twelve documents, if half of them are as many."""
    text.divide(tmp_path, [["A short text."]] * number, number, lambda line: [line], False)
    sizes = [len(lines_of(tmp_path / f"text/{part}.jsonl")) for part in text.PARTS]
    assert sizes == [number - held_out - test, held_out, test]


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


def test_the_commands_keep_accents_of_other_languages_and_the_case_of_a_model(at_home):
    line = "Le chat noir était assis près de la fenêtre, et la pluie tombait déjà sur la forêt. "
    (at_home / "french.jsonl").write_text((json.dumps({"body": line * 4}) + "\n") * 30)
    cased = shutil.copytree(at_home / "model", at_home / "cased")
    write_vocabulary(cased, (cased / "vocab.txt").read_bytes(), Normalization(cased=True))
    scripts = {}
    for file, start in (("french", ""), ("french", "cased"), ("text", ""), ("text", "model")):
        out = f"accents_{file}_{start}"
        words = ["init", f"{file}.jsonl", out, "--text-field", "body"]
        assert main([*words, *(["--from", start] if start else [])]) == 0
        scripts[file, start] = (at_home / out / "commands.sh").read_text()
    words = (" --no-strip-accents", " --cased", "--language fr", " vocab ")
    assert {case: tuple(map(script.count, words)) for case, script in scripts.items()} == {
        ("french", ""): (1, 0, 2, 1),
        ("french", "cased"): (0, 2, 2, 0),
        ("text", ""): (0, 0, 0, 1),
        ("text", "model"): (0, 0, 0, 0),
    }


def test_the_step_that_compiles_is_not_measured(home, monkeypatch):
    def run_training(resolved, stack, timer):
        seconds = (90.0, 2.0, 1.0, 2.0, 2.0, 8.0)
        timer.steps += [{"seconds": one, "examples": 16.0} for one in seconds]
        return None, "done"

    monkeypatch.setattr(train, "run_training", run_training)
    monkeypatch.chdir(home)
    facts = recipe.TextFacts(1e6, 1e5, 100, {"en": 1.0}, 900.0)
    start, _ = run.find_start("model")
    settings = InitSettings.model_validate({"input": "x", "out": "y", "from": "model"})
    machine, described = run.measure(settings, facts, start)
    assert "model trains at 8.0 examples/s on" in described and "median of 5 steps" in described
    assert machine.spread == (0.5, 4.0)
    # 6 operations for each of the weights of a layer and position; 64 positions, and as many keys.
    layers = 2 * 64 * (6 * (4 * 32 * 32 + 2 * 32 * 64) + 12 * 64 * 32)
    assert layers < machine.flops / 8 < 1.3 * layers


def test_the_lines_of_wrapped_text_are_joined(at_home, capsys):
    documents = [textwrap.fill(" ".join(SENTENCES[n : n + 12]), 60) for n in range(0, 360, 12)]
    (at_home / "wrapped.txt").write_text("\n\n".join(documents) + "\n")
    assert main(["init", "wrapped.txt", "wrapped", "--from", "model", "--for", "search"]) == 0
    assert "init: 1 of 1 files, as wrapped.txt, have hard line breaks" in capsys.readouterr().out
    rows = lines_of(at_home / "wrapped/text/train.jsonl")
    assert len(rows) == 15 and not any("\n" in row["text"] for row in rows)


def test_a_dry_run_writes_nothing(home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    assert init("nothing", "--from", "model", "--dry-run") == 0
    assert "learning rate" in capsys.readouterr().out and not (home / "nothing").exists()


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
    assert sampled.words == pytest.approx(complete.words, rel=0.1)
    assert complete.documents == 30 and [*complete.languages] == ["en"]


def test_words_without_spaces_are_counted_by_characters():
    assert text.WORD.findall("猫は ok, 世界") == ["猫", "は", "ok,", "世", "界"]
    assert text.mask_word("a b c") == "a [MASK] c"


def test_few_long_documents_are_cut_into_pieces(home, tmp_path):
    (tmp_path / "book.txt").write_text("\n".join(SENTENCES * 4))
    reading = text.files.Reading()
    parts, _ = inputs.recognise_all(tmp_path / "book.txt", reading, {})
    assert len([*text.documents_of(parts, reading)]) == 1
    pieces = [*text.cut(text.documents_of(parts, reading))]
    assert [line for piece in pieces for line in piece] == SENTENCES * 4
    facts = facts_of(tmp_path / "book.txt")
    assert facts.is_cut and facts.documents == len(pieces) > 1


def test_pairs_are_a_heading_first_sentences_and_sentences_without_rare_words():
    lines = [f"The river number{n} is so very wide. It is deep. " for n in range(90)]
    lines.insert(0, "# On bridges")
    split = re.compile(r"(?<=[.]) ").split
    pairs = text.pairs_of(lines, split, Counter(the=9, river=5, very=9, wide=9))
    assert pairs[0][0] == "# On bridges" and "# On bridges" not in pairs[0][1]
    questions = {question.partition(" number")[0]: passage for question, passage in pairs[1:]}
    assert questions.keys() <= {"The river", "The very wide"}
    assert text.pairs_of(["Short."], split, Counter()) == []


def test_a_question_lacks_the_rarest_words_of_its_sentence():
    frequencies = Counter({"the": 9, "river": 5, "is": 9, "very": 7, "北": 3, "京": 1})
    assert text.without_rarest("The river Afon is very wide.", frequencies) == "The is very"
    assert text.without_rarest("北京", frequencies) == "北"
    assert text.without_rarest("word", frequencies) == ""
