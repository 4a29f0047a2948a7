"""The documentation builds, its guide runs, and every command, flag, message and file that it names exists."""

import ast
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.stand_in import load_command

from bert_cli import errors
from bert_cli.commands import COMMANDS, split_command
from bert_cli.config.options import LOG_LEVELS, Option, sections_of
from bert_cli.config.tools import expand_benchmark
from bert_cli.parallel.tensorflow.pipeline import SCHEDULES, work_of

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
RUN = "<!-- run -->\n```bash\n"
SHELL = ("bash", "console")
# Words that end a command line.
BREAKS = {"|", "&&", "||", ";", "&", ">", ">>", "<", "2>"}
# Programs that run `bert`.
WRAPPERS = {"srun", "exec", "time"}
# Flags of other programs.
FOREIGN = {
    "--strict", "--scheduler-file", "--nthreads", "--nworkers", "--shm-size", "--ipc", "--ntasks-per-node",
    "--signal", "--open-mode", "--requeue", "--cluster",
    "--constraint", "--google", "--dump", "--tenfold", "--train", "--seeds", "--full-data",
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


class Page(HTMLParser):
    """The addresses that a browser loads with a page, and the visible text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag, attributes):
        if tag in ("script", "img", "iframe", "link", "source", "embed"):
            self.addresses += [value or "" for name, value in attributes if name in ("src", "href")]

    def handle_data(self, data):
        self.text += data


def options_of(name: str) -> list[Option]:
    sections = sections_of(COMMANDS[name].settings_class(), name)
    return [option for section in sections for option in section.options]


def test_no_page_loads_anything_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(PAGES) + len(COMMANDS)
    for page in pages:
        remote = [one for one in Page(page).addresses if re.match(r"(https?:)?//", one)]
        assert remote == [], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\W*https?:", sheet.read_text()), sheet


def test_the_reference_has_every_setting_of_a_command(site):
    for name in COMMANDS:
        text = Page(site / "reference" / f"bert-{name.replace(' ', '-')}.html").text
        for option in options_of(name):
            assert all(flag in text for flag in option.flags)
            about = re.sub(r" \((default: .*|required)\)$", "", option.text).replace("`", "")
            assert " ".join(about.split()) in text, option.name
    index = Page(site / "reference" / "index.html").text
    assert all(level in index for level in LOG_LEVELS)


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A folder that looks like the root of a checkout, with `bert` among its programs."""
    for name in ("data", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, words in {"bert": '-m bert_cli "$@"', "python3": '"$@"'}.items():
        (programs / name).write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} {words}\n")
        (programs / name).chmod(0o755)
    return tmp_path


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_commands_of_the_guide_run_unchanged(checkout):
    page = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    blocks = [part.partition("```")[0] for part in page.split(RUN)[1:]]
    assert len(blocks) >= 10
    path = f"{checkout / 'programs'}{os.pathsep}{os.environ['PATH']}"
    with open(checkout / "output", "w+") as output:
        shell = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", "\n".join(blocks).replace("8765", str(free_port()))],
            cwd=checkout, env={**environment(), "PATH": path, "HOME": str(checkout)},
            stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        try:
            code = shell.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
    printed = (checkout / "output").read_text(encoding="utf-8")
    assert code == 0, printed[-5000:]
    assert "no warnings" in printed
    assert "0 errors" in printed
    guide = checkout / "guide"
    assert (guide / "runs/mine/step_00000100/model.safetensors").is_file()
    assert (guide / "pictures/index.html").is_file()
    predicted = json.loads((guide / "answer.jsonl").read_text())
    (served,) = json.loads((guide / "served.json").read_text())
    assert served["label"] == predicted["label"]
    assert served["probability"] == pytest.approx(predicted["probability"], abs=1e-4)


def lines_of(block: str) -> Iterator[list[str]]:
    """Yield the words of each command of a shell block; without here-documents."""
    block = re.sub(r"<<\s*'?(\w+)'?([^\n]*)\n.*?^\1$", r"\2", block, flags=re.DOTALL | re.MULTILINE)
    for line in block.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words: list[str] = []
        for word in lexer:
            if word in BREAKS:
                yield words
                words = []
            else:
                words.append(word)
        yield words


def mistakes(words: list[str]) -> Iterator[str]:
    """Yield the errors of a command line."""
    while words and (words[0] in WRAPPERS or re.match(r"\w+=", words[0])):
        # `srun --ntasks-per-node 8 bert ...`
        words = words[words.index("bert") :] if words[0] in WRAPPERS else words[1:]
    if not words or Path(words[0]).name != "bert" or len(words) < 2:
        return
    if words[1] in ("--help", "--version", "COMMAND", "..."):
        return
    name, rest = split_command(words[1:])
    if name == "bench" and rest[:1] == ["NAME"]:
        return
    if name == "bench" and rest and not rest[0].startswith("-"):
        name, rest = split_command(expand_benchmark([name, *rest]))
    if name not in COMMANDS:
        yield f"bert {name} does not exist"
        return
    if "--" in rest:
        cut = rest.index("--")
        yield from mistakes(["bert", *rest[cut + 1 :]])
        rest = rest[:cut]
    known: dict[str, Option | None] = {
        flag: option for option in options_of(name) for flag in option.flags
    }
    known |= dict.fromkeys(("--help", "--log-level"))
    for word, after in zip(rest, [*rest, ""][1:], strict=True):
        flag, _, value = word.partition("=")
        if flag.startswith("--") and flag not in known:
            yield f"bert {name} has no {flag}"
        option = known.get(flag)
        if option and option.takes and option.choices and (value or after) not in option.choices:
            yield f"bert {name} {flag} does not take {value or after!r}"


def wrong_in(text: str) -> list[str]:
    """Return the errors in the commands of a page: in its shell blocks and between backticks."""
    blocks = [block for _, language, block in FENCE.findall(text) if language in SHELL]
    prose = FENCE.sub("", text)
    spans = [" ".join(span.split()) for span in re.findall(r"`(bert [^`]+)`", prose)]
    lines = [words for block in blocks for words in lines_of(block)]
    lines += [words for span in spans for words in lines_of(span)]
    wrong = [mistake for words in lines for mistake in mistakes(words)]
    every = {flag for name in COMMANDS for option in options_of(name) for flag in option.flags}
    every |= FOREIGN | {"--help", "--version", "--log-level"}
    for flag in re.findall(r"`(--[a-z][\w.-]*)", prose):
        wrong += [] if flag in every else [f"no command has {flag}"]
    return wrong


def test_a_mistake_in_a_command_of_a_page_is_found():
    for text in (
        "`bert pretrian`", "`bert pretrain --precison float16`", "`bert glue --glue-task mnlm`",
        "`bert launch --processes 2 -- pretrain --confg a`", "the flag `--precison`",
        "```bash\nsrun bert export a b --format tflow | head\n```",
    ):  # fmt: skip
        assert wrong_in(text), text
        assert not wrong_in("`bert launch -- pretrain --precision float16` and `--precision`")


def test_every_command_and_flag_of_a_page_exists():
    wrong = {page.name: wrong_in(page.read_text(encoding="utf-8")) for page in TEXTS}
    assert {name: mistakes for name, mistakes in wrong.items() if mistakes} == {}


@pytest.mark.parametrize("name", ["migrating.md", "clusters.md", "trackers.md"])
def test_the_settings_accept_every_command_of_a_page(name, monkeypatch):
    monkeypatch.setenv("DATASETS_DIR", "/corpora")
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    blocks = [block for _, language, block in FENCE.findall(page) if language == "bash"]
    lines = [words for block in blocks for words in lines_of(block)]
    starts = [next((n for n, w in enumerate(words) if is_program(w)), None) for words in lines]
    commands = [words[n + 1 :] for n, words in zip(starts, lines, strict=True) if n is not None]
    commands = [words for words in commands if words]
    assert commands
    for words in commands:
        load_command(words)
    named = set(re.findall(r"(?:configs|scripts)/[\w./]*\w\.(?:yaml|sh|json)", page))
    assert [path for path in sorted(named) if not (ROOT / path).is_file()] == []


def is_program(word: str) -> bool:
    return word == "bert" or word.startswith("scripts/slurm/")


def test_every_block_has_a_language_and_every_link_a_target():
    made = {"changes.md", "contributing.md", "reference/index.md"}
    made |= {f"reference/bert-{name.replace(' ', '-')}.md" for name in COMMANDS}
    for page in TEXTS:
        text = page.read_text(encoding="utf-8")
        for _, language, _ in FENCE.findall(text):
            assert language in (*SHELL, "json", "python", "text", "yaml"), page
        for target in re.findall(r"\]\(([^)#\s]+)", FENCE.sub("", text)):
            path = (page.parent / target).resolve()
            is_made = page in PAGES and path in [ROOT / "docs" / name for name in made]
            assert re.match(r"https?:", target) or path.exists() or is_made, (page, target)


def text_of(node: ast.expr) -> str:
    """Return a string of the source, with a mark for each value in it."""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(one.value) if isinstance(one, ast.Constant) else "\0" for one in node.values
        )
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "\0"


def messages() -> list[str]:
    """Return every string of the source, and every error as it is printed."""
    found = []
    for path in (ROOT / "bert_cli").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr | ast.Constant):
                found.append(text_of(node))
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Error"):
                found.append("; ".join(map(text_of, node.args)).replace("; ", ": ", 1))
    return found


def test_the_code_has_every_message_that_the_troubleshooting_quotes():
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    texts = messages()
    blocks = [block for _, language, block in FENCE.findall(page) if language == "text"]
    quoted = [line for block in blocks for line in block.splitlines()]
    assert len(quoted) > 25

    def is_printed(line: str) -> bool:
        """An error may be raised with its problem and its remedy in variables."""
        parts = line.partition(": ")[2].split("; ")
        return any(is_quoted(line, text) for text in texts) or all(
            any(is_quoted(part, text) for text in texts) for part in parts
        )

    assert [line for line in quoted if not is_printed(line)] == []


def is_quoted(line: str, text: str) -> bool:
    """Return whether a text contains the parts of a line between its values, in their order."""
    for part in line.split("…"):
        if part.strip(" :().,"):
            _, found, text = text.partition(part.strip())
            if not found:
                return False
    return True


def test_the_exit_codes_are_those_of_the_code():
    page = (ROOT / "docs" / "exit-codes.md").read_text(encoding="utf-8")
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    kinds = (kind for kind in vars(errors).values() if isinstance(kind, type))
    assert listed == {0, 130} | {
        kind.exit_code for kind in kinds if issubclass(kind, errors.BertError)
    }


def test_every_variable_that_the_code_reads_is_documented():
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    read = re.compile(r'environ(?:ment)?(?:\.get\(|\.setdefault\(|\[)\s*"([A-Z_]+)"')
    found = {
        name
        for path in (ROOT / "bert_cli").rglob("*.py")
        for name in read.findall(path.read_text(encoding="utf-8"))
    }
    assert {"NO_COLOR", "TF_CONFIG"} <= found
    missing = {n for n in found if n not in page and not n.startswith("SLURM_")}
    assert missing <= {"no_grpc_proxy"}  # the tool sets it for gRPC; it is not an option


def drawn(name: str, stages: int, micro_batches: int) -> list[str]:
    """Draw a schedule as on the page: each pass takes one unit of time."""
    rows: list[list[str]] = [[] for _ in range(stages)]
    left = [work_of(name, stage, stages, micro_batches) for stage in range(stages)]
    ended: dict[tuple[str, int, int], int] = {}
    while any(left):
        for stage, row in enumerate(rows):
            if not left[stage]:
                continue
            kind, number = left[stage][0]
            neighbour = stage + 1 if kind == "backward" else stage - 1
            direction = "backward" if kind == "backward" else "forward"
            ready = 0 if neighbour < 0 else ended.get((direction, neighbour, number))
            if ready is None:
                continue
            left[stage].pop(0)
            row += ["."] * (ready - len(row))
            for direction, mark in (("forward", ""), ("backward", "'")):
                if kind not in ("forward", "backward") or kind == direction:
                    row.append(f"{number + 1}{mark}")
                    ended[direction, stage, number] = len(row)
    longest = max(map(len, rows))
    padded = ["".join(f"{cell:<3}" for cell in row + ["."] * (longest - len(row))) for row in rows]
    return [f"stage {stage}   {row}".rstrip() for stage, row in enumerate(padded)]


def test_the_page_draws_the_schedules_of_the_code():
    page = (ROOT / "docs" / "ideas" / "schedules.md").read_text(encoding="utf-8")
    for name in SCHEDULES:
        assert "\n".join(drawn(name, 3, 4)) in page
