"""The documentation builds, its guide runs, and every command, flag, message and file that it names exists."""

import ast
import functools
import html
import json
import os
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from support.bert import write_program
from support.command_lines import JOBS, load_command

from bert_cli import errors
from bert_cli.commands import COMMANDS, split_command
from bert_cli.facts.bert import BertConfig
from bert_cli.facts.modernbert import ModernBertConfig
from bert_cli.facts.products import BatchShape
from bert_cli.parallel.tensorflow.pipeline import work_of
from bert_cli.parse.options import LOG_LEVELS, examples_of, options_of
from bert_cli.planning.flops import forward_flops

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
SOURCES = sorted((ROOT / "bert_cli").rglob("*.py"))
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
RUN = "<!-- run -->\n```bash\n"
SHELL = ("bash", "console")
# Words that end a command line.
BREAKS = re.compile(r"\s(?:\|\|?|&&?|;|2?>>?|<)(?:\s|$)")
# Flags of other programs.
FOREIGN = {
    "--strict", "--scheduler-file", "--nthreads", "--nworkers", "--shm-size", "--ipc", "--ntasks-per-node",
    "--signal", "--open-mode", "--requeue", "--cluster", "--bind", "--network",
    "--constraint",
}  # fmt: skip


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("site") / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)],
        cwd=ROOT, env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return out


def test_no_page_loads_anything_from_elsewhere(site):
    loads = r"<(script|img|iframe|link|source|embed)\b[^>]*\b(src|href)\s*=\s*.?(https?:)?//"
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(PAGES) + len(COMMANDS)
    assert [page for page in pages if re.search(loads, page.read_text(encoding="utf-8"))] == []
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\W*https?:", sheet.read_text()), sheet


def test_the_reference_has_every_setting_of_a_command(site):
    def text_of(name: str) -> str:
        page = (site / "reference" / f"{name}.html").read_text(encoding="utf-8")
        return " ".join(html.unescape(re.sub(r"<[^>]*>", "", page)).split())

    for name in COMMANDS:
        text = text_of(f"bert-{name.replace(' ', '-')}")
        for option in options_of(COMMANDS[name].settings_class()):
            assert all(flag in text for flag in option.flags)
            assert "".join(option.describe().split()) in "".join(text.split()), option.name
    assert all(level in text_of("index") for level in LOG_LEVELS)


def run_page(name: str, tmp_path: Path) -> str:
    """Run the commands of a page in a folder that is empty or has another page's results; return what they print."""
    programs = tmp_path / "programs"
    if not programs.exists():
        programs.mkdir()
        for folder in ("data", "configs", "examples"):
            (tmp_path / folder).symlink_to(ROOT / folder)
        write_program(programs)
        (programs / "python3").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
        (programs / "python3").chmod(0o755)
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    blocks = [part.partition("```")[0] for part in page.split(RUN)[1:]]
    assert len(blocks) > 5
    with socket.create_server(("127.0.0.1", 0)) as server:
        commands = "\n".join(blocks).replace("8765", str(server.getsockname()[1]))
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    with open(tmp_path / "output", "w+") as output:
        shell = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", commands],
            cwd=tmp_path, env={**environment(), "PATH": path, "HOME": str(tmp_path)},
            stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        try:
            code = shell.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
    printed = (tmp_path / "output").read_text(encoding="utf-8")
    assert code == 0, printed[-5000:]
    return printed


@pytest.fixture(scope="module")
def guide(tmp_path_factory) -> tuple[Path, str]:
    """The folder in which the commands of the guide ran, and what they printed."""
    folder = tmp_path_factory.mktemp("guide")
    return folder, run_page("guide.md", folder)


def right_of(run: Path) -> int:
    """Return how many of the 40 held-out rows are labelled rightly; half of them are in scores.json."""
    lines = (run / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 40
    return sum(row["label"] == row["predicted"] for row in rows)


@pytest.mark.slow
def test_the_commands_of_the_guide_run_unchanged(guide):
    folder, printed = guide
    assert "no warnings" in printed and "0 errors" in printed
    home = folder / "guide"
    assert (home / "runs/mine/step_00000100/model.safetensors").is_file()
    assert (home / "pictures/index.html").is_file()
    assert (home / "exported/model.onnx").is_file()
    assert json.loads((home / "answer.jsonl").read_text())["label"] == "earth"
    assert right_of(home / "runs/labels") >= 32


@pytest.mark.slow
def test_the_commands_that_serve_a_model_run_unchanged(guide, bert):
    folder, _ = guide
    printed = run_page("small.md", folder)
    home = folder / "serve"
    assert right_of(home / "runs/labels") >= 32
    (served,) = json.loads((home / "label.json").read_text())
    text = "The river carries ice and stones down the mountain."
    answer = json.loads(bert("predict", home / "runs/labels", text).out)
    assert served["label"] == answer["label"] == "earth"
    # int8 against float32: 0.0002 apart when this was written.
    assert abs(served["probability"] - answer["probability"]) < 0.02
    predicted = json.loads((home / "vector.jsonl").read_text())["embedding"]
    (vector,) = json.loads((home / "vector.json").read_text())
    assert len(vector) == len(predicted) == 32
    assert vector @ np.array(predicted) > 0.99
    sizes = [(home / name / "model.onnx").stat().st_size for name in ("labels", "vectors")]
    assert all(size < 1_500_000 for size in sizes), sizes
    assert 0.0 < float(printed.splitlines()[-1]) < 1.0


@pytest.mark.slow
def test_the_commands_for_an_own_field_run_unchanged(tmp_path):
    printed = run_page("own-field.md", tmp_path)
    runs = tmp_path / "field/runs"
    first, *_, last = map(json.loads, (runs / "adapted/metrics.jsonl").read_text().splitlines())
    assert first["step"] == 0 and last["step"] == 100
    # Trained on the field, the model knows more of it than before.
    assert last["validation_bits_per_byte"] < first["validation_bits_per_byte"]
    assert (runs / "plain/metrics.jsonl").is_file()
    assert "100 new pieces" in printed and "of mlm_loss, with its 95 % interval" in printed
    assert (tmp_path / "field/mean/model.safetensors").is_file()


@pytest.mark.slow
def test_the_commands_for_an_own_language_run_unchanged(tmp_path):
    printed = run_page("own-language.md", tmp_path)
    language, page = tmp_path / "language", (ROOT / "docs/own-language.md").read_text("utf-8")
    assert "preprocess: sentencex splits the sentences, language ja" in printed
    # The warning that the page quotes is printed once, for the vocabulary without marks.
    (quoted,) = re.findall(r"^vocab: warning: .*$", page, re.MULTILINE)
    assert printed.count(quoted) == printed.count("stripping accents") == 1
    for name, has_marks in (("vocab", True), ("stripped", False)):
        vocabulary = (language / name / "vocab.txt").read_text("utf-8")
        assert ("が" in vocabulary.split("\n")) == has_marks
    first, *_, last = map(json.loads, (language / "run/metrics.jsonl").read_text().splitlines())
    assert last["step"] == 100 and last["mlm_loss"] < first["mlm_loss"] - 0.2
    config = json.loads((language / "run/step_00000100/tokenizer_config.json").read_text())
    assert config["strip_accents"] is False
    answer = json.loads(next(line for line in printed.splitlines() if line.startswith('{"text"')))
    assert "[MASK]" in answer["text"] and len(answer["masks"][0]) == 5
    # Vectors trained on neighbouring sentences find held-out ones better than before.
    before, after = re.findall(r'^{"ndcg_10": ([0-9.]+)', printed, re.MULTILINE)
    assert float(after) > float(before)
    assert printed.splitlines()[-3].startswith('{"text": "日本で一番高い山は富士山である。"')


@pytest.mark.slow
def test_the_commands_for_a_modern_encoder_run_unchanged(tmp_path):
    printed = run_page("modern.md", tmp_path)
    runs = tmp_path / "modern/runs"
    first, *_, last = map(json.loads, (runs / "mine/metrics.jsonl").read_text().splitlines())
    assert last["mlm_loss"] < first["mlm_loss"] - 0.8
    filled, labelled = map(json.loads, re.findall(r'^{"text".*$', printed, re.MULTILINE))
    assert len(filled["masks"][0]) == 3 and labelled["label"] == "earth"
    assert json.loads((runs / "labels/scores.json").read_text())["accuracy"] >= 0.8


def test_the_costs_of_the_architectures_are_those_of_the_code():
    shapes = [BertConfig(), ModernBertConfig(), ModernBertConfig(global_attn_every_n_layers=1)]
    _, _, table = (ROOT / "docs/modern.md").read_text("utf-8").partition("| forward MFLOP")
    header, _, *rows = table.splitlines()[:5]
    lengths = [int(length.replace(",", "")) for length in header.split("|")[1:-1]]
    for shape, row in zip(shapes, rows, strict=True):
        flops = [forward_flops(shape, (), BatchShape(1, length)) / length for length in lengths]
        assert [int(cell) for cell in row.split("|")[2:-1]] == [round(f / 1e6) for f in flops]


def lines_of(block: str) -> Iterator[list[str]]:
    """Yield the words of each command of a shell block; without here-documents."""
    block = re.sub(r"<<\s*'?(\w+)'?([^\n]*)\n.*?^\1$", r"\2", block, flags=re.DOTALL | re.MULTILINE)
    for line in block.replace("\\\n", " ").splitlines():
        for command in BREAKS.split(line.removeprefix("$ ")):
            yield shlex.split(command, comments=True)


@functools.cache
def flags_of(name: str) -> set[str]:
    flags = {
        flag for option in options_of(COMMANDS[name].settings_class()) for flag in option.flags
    }
    return flags | {"--help", "--help-all", "--log-level"}


def mistakes(words: list[str]) -> Iterator[str]:
    if "bert" not in words[:-1]:
        return
    words = words[words.index("bert") + 1 :]  # `srun --ntasks-per-node 8 bert ...`
    if words[0] in ("--help", "--version", "COMMAND", "..."):
        return
    name, rest = split_command(words)
    if name not in COMMANDS:
        yield f"bert {name} does not exist"
        return
    if "--" in rest:
        cut = rest.index("--")
        yield from mistakes(["bert", *rest[cut + 1 :]])
        rest = rest[:cut]
    flags = {word.partition("=")[0] for word in rest if word.startswith("--")}
    yield from (f"bert {name} has no {flag}" for flag in flags - flags_of(name))


def wrong_in(text: str) -> list[str]:
    """Return the errors in the commands of a page: in its shell blocks and between backticks."""
    blocks = [block for _, language, block in FENCE.findall(text) if language in SHELL]
    prose = FENCE.sub("", text)
    blocks += [" ".join(span.split()) for span in re.findall(r"`(bert [^`]+)`", prose)]
    lines = [words for block in blocks for words in lines_of(block)]
    wrong = [mistake for words in lines for mistake in mistakes(words)]
    every = FOREIGN.union({"--version"}, *map(flags_of, COMMANDS))
    flags = re.findall(r"`(--[a-z][\w.-]*)", prose)
    return wrong + [f"no command has {flag}" for flag in flags if flag not in every]


def test_every_command_and_flag_of_a_page_or_an_example_exists():
    wrong = {page.name: wrong_in(page.read_text(encoding="utf-8")) for page in TEXTS}
    for name, command in COMMANDS.items():
        examples = examples_of(command.settings_class())
        assert 2 <= len(examples) <= 3, name
        wrong[name] = [wrong for line in examples for wrong in mistakes(shlex.split(line))]
    assert {name: mistakes for name, mistakes in wrong.items() if mistakes} == {}


@pytest.mark.parametrize(
    "name",
    [
        "../README.md", "answer-questions.md", "classify.md", "clusters.md", "devices.md", "distil.md", "embed.md",
        "engines.md", "fine-tuning.md", "label-tokens.md", "migrating.md", "predict.md", "runs.md", "trackers.md",
    ],
)  # fmt: skip
def test_the_settings_accept_every_command_of_a_page(name, monkeypatch):
    monkeypatch.setenv("DATASETS_DIR", "/corpora")
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    blocks = [block for _, language, block in FENCE.findall(page) if language == "bash"]
    lines = [words for block in blocks for words in lines_of(block)]
    programs = ("bert", *(f"scripts/slurm/{path.name}" for path in JOBS.iterdir()))
    names = [(row, number) for row in lines for number, word in enumerate(row) if word in programs]
    commands = [row[number + 1 :] for row, number in names if row[number + 1 :]]
    assert commands
    planned = {"mine/pretrain.json": "pretrain_scratch_mini_128"}  # as `bert init` writes it
    for words in commands:
        load_command([planned.get(word, word) for word in words])
    named = set(re.findall(r"(?:configs|scripts)/[\w./]*\w\.(?:yaml|sh|json)", page))
    assert [path for path in sorted(named) if not (ROOT / path).is_file()] == []


def test_every_script_that_is_named_without_a_commit_exists():
    pages = [*TEXTS, *(ROOT / "configs").glob("*.json"), *(ROOT / "data").rglob("*.md")]
    named = re.compile(r"(?<![\w:/])(?<!> )scripts/[a-z_]+(?:\.\w+)?")
    scripts = {name for page in pages for name in named.findall(page.read_text(encoding="utf-8"))}
    assert "scripts/test" in scripts
    assert [name for name in sorted(scripts) if not (ROOT / name).exists()] == []


def test_every_block_has_a_language_and_github_finds_every_place_that_a_page_names():
    """GitHub knows none of the extensions of Markdown that MkDocs has; it names a place by its heading."""
    places: dict[Path, set[str]] = {}
    for page in (*TEXTS, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"):
        text = page.read_text(encoding="utf-8")
        languages = {language for _, language, _ in FENCE.findall(text)}
        assert languages <= {*SHELL, "json", "python", "text", "yaml"}, page
        prose = FENCE.sub("", text)
        assert not re.search(r"^(!!!|:\s)|\{[#:]", prose, re.MULTILINE), page
        headings = re.findall("^#+ (.*)$", prose.lower(), re.MULTILINE)
        places[page] = {re.sub(r"[^\w -]", "", line).replace(" ", "-") for line in headings}
        for target in re.findall(r"\]\(([^)\s]+)", prose):
            path = page.parent / target.partition("#")[0]
            assert re.match(r"https?:", target) or path.exists(), (page, target)
    for page in places:
        prose = FENCE.sub("", page.read_text(encoding="utf-8"))
        for name, place in re.findall(r"\]\(([^)#:]*)#([^)\s]+)\)", prose):
            named = (page.parent / name).resolve() if name else page
            assert place in places[named], (page, name, place)


def test_the_code_has_every_message_that_the_troubleshooting_quotes():
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    blocks = [block for _, language, block in FENCE.findall(page) if language == "text"]
    quoted = [line for block in blocks for line in block.splitlines()]
    assert len(quoted) > 25
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    texts = [node.value for node in nodes if isinstance(node.value, str)]
    # Where a message is in several strings or has values, each part is in one of them.
    parts = {part.strip(" :().,") for line in quoted for part in re.split("…|: |; ", line)}
    assert [part for part in parts if not any(part in text for text in texts)] == []


def test_the_charts_are_those_of_the_script():
    names = runpy.run_path(str(ROOT / "scripts" / "charts.py"))
    drawn = {f"{name}.svg": names["draw"](chart) for name, chart in names["CHARTS"].items()}
    pictures = (ROOT / "docs" / "pictures").glob("*.svg")
    assert {path.name: path.read_text(encoding="utf-8") for path in pictures} == drawn


def test_the_notebook_has_the_commands_of_the_guide():
    """Another test runs them."""
    names = runpy.run_path(str(ROOT / "scripts" / "notebook.py"))
    text = names["NOTEBOOK"].read_text(encoding="utf-8")
    assert text == names["notebook"]()
    cells = [cell["source"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    blocks = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8").split(RUN)[1:]
    assert cells == [f"%%bash\n{block.partition('```')[0]}".strip() for block in blocks]


def test_the_exit_codes_are_those_of_the_code():
    page = (ROOT / "docs" / "exit-codes.md").read_text(encoding="utf-8")
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    kinds = [errors.BertError, *errors.BertError.__subclasses__()]
    killed = {128 + number for number in (signal.SIGINT, signal.SIGKILL, signal.SIGTERM)}
    assert listed == {0, *killed, *(kind.exit_code for kind in kinds)}


def test_every_variable_that_the_code_reads_is_documented():
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    read = re.compile(r'environ(?:ment)?(?:\.get\(|\.setdefault\(|\[)\s*"([A-Z_]+)"')
    found = {name for path in SOURCES for name in read.findall(path.read_text(encoding="utf-8"))}
    assert {"NO_COLOR", "TF_CONFIG"} <= found
    missing = {n for n in found if n not in page and not n.startswith("SLURM_")}
    assert missing <= {"no_grpc_proxy"}  # the tool sets it for gRPC; it is not an option


def test_the_page_draws_the_schedules_of_the_code():
    page = (ROOT / "docs" / "ideas" / "schedules.md").read_text(encoding="utf-8")
    passes = {"forward": "{0}", "backward": "{0}'", "forward_backward": "{0} {0}'"}
    rows = []
    for stage in range(3):
        work = work_of(stage, 3, 4)
        done = (passes[kind].format(number + 1) for kind, number in work)
        rows.append(" ".join([f"stage {stage}", *done]))
    # A point in a drawing is a time in which the stage waits.
    assert "\n".join(rows) in re.sub(r"( +\.)*(\n| +)", lambda end: end[2][0], page)
