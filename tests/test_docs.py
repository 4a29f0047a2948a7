"""The documentation: it builds, its guide runs, and every command, message and file that it names is there."""

import ast
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path

import pytest

from bert_cli import errors
from bert_cli.commands import COMMANDS, split_command
from bert_cli.config.bench import expand_benchmark
from bert_cli.config.help import LEVELS
from bert_cli.config.load import load
from bert_cli.config.options import Option, sections_of
from bert_cli.parallel.tensorflow.schedule import SCHEDULES

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
RUN = "<!-- run -->\n```bash\n"
SHELL = ("bash", "console")
# Where a command line ends and another begins.
BREAKS = {"|", "&&", "||", ";", "&", ">", ">>", "<", "2>"}
# What stands before `bert`: a program that runs it.
WRAPPERS = {"srun", "exec", "time"}
# Words of the documentation that are flags of others.
FOREIGN = {
    "--strict", "--scheduler-file", "--nthreads", "--shm-size", "--ipc", "--ntasks-per-node",
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


class Fetched(HTMLParser):
    """Addresses that a browser asks for by itself, and the text that a reader sees."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag in ("script", "img", "iframe", "link", "source", "embed"):
            self.addresses += [given[name] or "" for name in ("src", "href") if name in given]

    def handle_data(self, data):
        self.text += data


def test_no_page_fetches_anything_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(PAGES) + len(COMMANDS)
    for page in pages:
        asked = Fetched(page.read_text(encoding="utf-8")).addresses
        assert [one for one in asked if re.match(r"(https?:)?//", one)] == [], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\W*https?:", sheet.read_text()), sheet


@pytest.mark.parametrize("name", COMMANDS)
def test_the_reference_tells_every_setting_of_a_command(site, name):
    page = (site / "reference" / f"bert-{name.replace(' ', '-')}.html").read_text(encoding="utf-8")
    text = " ".join(Fetched(page).text.split())
    for section in options_of(name):
        for option in section.options:
            assert f'id="{option.name.replace("_", "-")}"' in page
            for flag in option.flags:
                assert flag in text
            about = re.sub(r" \((default: .*|required)\)$", "", option.text).replace("`", "")
            assert " ".join(about.split()) in text, option.name


def options_of(name: str):
    return sections_of(COMMANDS[name].settings_class(), name)


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


@pytest.fixture
def in_shell(checkout) -> Iterator[Callable[[str], subprocess.CompletedProcess[str]]]:
    """Runs lines in a shell there, and ends whatever they leave running."""
    path = f"{checkout / 'programs'}{os.pathsep}{os.environ['PATH']}"
    started: list[subprocess.Popen[str]] = []

    def run(lines: str) -> subprocess.CompletedProcess[str]:
        with open(checkout / "out", "w+") as out, open(checkout / "err", "w+") as err:
            shell = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", lines],
                cwd=checkout, env={**environment(), "PATH": path, "HOME": str(checkout)},
                stdout=out, stderr=err, text=True, start_new_session=True,
            )  # fmt: skip
            started.append(shell)
            code = shell.wait()
        told = [(checkout / name).read_text(encoding="utf-8") for name in ("out", "err")]
        return subprocess.CompletedProcess(lines, code, *told)

    yield run
    for shell in started:
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@pytest.mark.timeout(900)
def test_the_guide_runs_as_it_stands(checkout, in_shell):
    page = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    blocks = [part.partition("```")[0] for part in page.split(RUN)[1:]]
    assert len(blocks) >= 10
    done = in_shell("\n".join(blocks).replace("8765", str(free_port())))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "no warnings" in done.stdout
    assert "0 errors" in done.stdout
    guide = checkout / "guide"
    assert (guide / "runs/mine/step_00000100/model.safetensors").is_file()
    assert (guide / "pictures/index.html").is_file()
    answered = json.loads((guide / "answer.jsonl").read_text())
    (served,) = json.loads((guide / "served.json").read_text())
    assert served["label"] == answered["label"]
    assert served["probability"] == pytest.approx(answered["probability"], abs=1e-4)


def lines_of(block: str) -> Iterator[list[str]]:
    """Command lines of a block of shell: their words, cut at pipes and the like; here-documents left out."""
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
    """What of a command line the tool would not take."""
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
        yield f"there is no bert {name}"
        return
    if "--" in rest:
        cut = rest.index("--")
        yield from mistakes(["bert", *rest[cut + 1 :]])
        rest = rest[:cut]
    known: dict[str, Option | None] = {
        flag: option
        for section in options_of(name)
        for option in section.options
        for flag in option.flags
    }
    known |= dict.fromkeys(("--help", "--log-level"))
    for word, after in zip(rest, [*rest, ""][1:], strict=True):
        flag, _, value = word.partition("=")
        if not flag.startswith("--"):
            continue
        if flag not in known:
            yield f"bert {name} has no {flag}"
        option = known.get(flag)
        if option is not None and option.takes and option.choices:
            given = value or after
            if given not in option.choices:
                yield f"bert {name} {flag} does not take {given!r}"


def wrong_in(text: str) -> list[str]:
    """What of the commands of a page the tool would not take: in its blocks of shell, and between backticks."""
    blocks = [block for _, language, block in FENCE.findall(text) if language in SHELL]
    prose = FENCE.sub("", text)
    spans = [" ".join(span.split()) for span in re.findall(r"`(bert [^`]+)`", prose)]
    lines = [words for block in blocks for words in lines_of(block)]
    lines += [words for span in spans for words in lines_of(span)]
    wrong = [mistake for words in lines for mistake in mistakes(words)]
    every = {
        flag for name in COMMANDS for s in options_of(name) for o in s.options for flag in o.flags
    }
    every |= FOREIGN | {"--help", "--version", "--log-level"}
    for flag in re.findall(r"`(--[a-z][\w.-]*)", prose):
        wrong += [] if flag in every else [f"no command has {flag}"]
    return wrong


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_and_flag_that_a_page_names_is_there(page):
    assert wrong_in(page.read_text(encoding="utf-8")) == []


def test_every_command_beside_another_tools_is_one_that_the_settings_take():
    """Values too, and what they forbid together; nothing is opened."""
    page = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    blocks = [block for _, language, block in FENCE.findall(page) if language == "bash"]
    lines = [words for block in blocks for words in lines_of(block) if words]
    assert len(lines) >= 11
    for words in lines:
        name, rest = split_command(words[1:])
        load(COMMANDS[name].settings_class(), rest, f"bert {name}")


@pytest.mark.parametrize(
    "text",
    [
        "```bash\nbert pretain --config x\n```",
        "```bash\nbert tokenize a b \\\n  --vocabulary v\n```",
        "```bash\ncat x | bert predict m --tops 3 > y\n```",
        "```bash\nX=1 srun -n 2 bert pretrain --confg x\n```",
        "```bash\nbert launch --processes 2 -- pretrain --seeed 1\n```",
        "```bash\nbert export m out --format pdf\n```",
        "see `bert runs --jsn -`",
        "give `--sequence-lenth`",
    ],
)
def test_the_test_of_commands_sees_what_is_not_there(text):
    assert len(wrong_in(text)) == 1


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_says_its_language(page):
    text = page.read_text(encoding="utf-8").partition("<!-- tree -->")
    rest = text[0] + text[2].partition("<!-- end of tree -->")[2]
    for _, language, _ in FENCE.findall(rest):
        assert language in (*SHELL, "json", "python", "text", "yaml"), page


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_or_a_page(page):
    made = {"changes.md", "contributing.md", "reference/index.md"}
    made |= {f"reference/bert-{name.replace(' ', '-')}.md" for name in COMMANDS}
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)#\s]+)", prose):
        if re.match(r"https?:", target):
            continue
        there = (page.parent / target).resolve()
        is_page = (
            there.is_relative_to(ROOT / "docs") and str(there.relative_to(ROOT / "docs")) in made
        )
        assert there.exists() or (is_page and page in PAGES), target


def said() -> list[str]:
    """Every text in the source, with a mark where a value stands."""
    found = []
    for path in (ROOT / "bert_cli").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    str(one.value) if isinstance(one, ast.Constant) else "\0" for one in node.values
                ]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_every_message_that_the_troubleshooting_quotes_is_one_of_the_code():
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    texts = said()
    quoted = [
        line
        for _, language, block in FENCE.findall(page)
        if language == "text"
        for line in block.splitlines()
    ]
    assert len(quoted) > 25
    for line in quoted:
        # A name before a sentence may be put there by who raises it.
        assert any(is_quoted(line, text) for text in texts), line


def is_quoted(line: str, text: str) -> bool:
    """Whether the parts of a line between its values stand in a text, in their order."""
    parts = [part.strip() for part in line.split("…") if part.strip(" :().,")]
    place = 0
    for part in parts:
        place = text.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return True


def test_a_message_that_is_worded_otherwise_is_seen():
    texts = ["out (\0): \0 is to write about \0 and \0 are free there"]
    assert any(is_quoted("out (…): … is to write about …", text) for text in texts)
    assert not any(is_quoted("out (…): … will write about …", text) for text in texts)


def test_the_exit_codes_are_those_of_the_code():
    page = (ROOT / "docs" / "exit-codes.md").read_text(encoding="utf-8")
    told = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    kinds = (kind for kind in vars(errors).values() if isinstance(kind, type))
    assert told == {0, 130} | {
        kind.exit_code for kind in kinds if issubclass(kind, errors.BertError)
    }


def test_every_variable_that_the_code_reads_is_told():
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    read = re.compile(r'environ(?:ment)?(?:\.get\(|\.setdefault\(|\[)\s*"([A-Z_]+)"')
    found = {
        name
        for path in (ROOT / "bert_cli").rglob("*.py")
        for name in read.findall(path.read_text(encoding="utf-8"))
    }
    assert {"NO_COLOR", "TF_CONFIG"} <= found
    untold = {n for n in found if n not in page and not n.startswith("SLURM_")}
    # Set by the tool itself for gRPC, and nobody's to choose.
    assert untold <= {"no_grpc_proxy"}


def drawn(name: str, stages: int, micro_batches: int) -> list[str]:
    """A schedule as the page draws it: each piece of work takes one unit of time."""
    rows: list[list[str]] = [[] for _ in range(stages)]
    left = [SCHEDULES[name](stage, stages, micro_batches) for stage in range(stages)]
    ended: dict[tuple[str, int, int], int] = {}
    while any(left):
        for stage, row in enumerate(rows):
            if not left[stage]:
                continue
            kind, number = left[stage][0]
            neighbour = stage + 1 if kind == "backward" else stage - 1
            way = "backward" if kind == "backward" else "forward"
            ready = 0 if neighbour < 0 else ended.get((way, neighbour, number))
            if ready is None:
                continue
            left[stage].pop(0)
            row += ["."] * (ready - len(row))
            for way, mark in (("forward", ""), ("backward", "'")):
                if kind in (way, "turn"):
                    row.append(f"{number + 1}{mark}")
                    ended[way, stage, number] = len(row)
    longest = max(map(len, rows))
    padded = ["".join(f"{cell:<3}" for cell in row + ["."] * (longest - len(row))) for row in rows]
    return [f"stage {stage}   {row}".rstrip() for stage, row in enumerate(padded)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_schedules_are_drawn_as_they_are(name):
    page = (ROOT / "docs" / "ideas" / "schedules.md").read_text(encoding="utf-8")
    assert "\n".join(drawn(name, 3, 4)) in page


def test_the_log_levels_of_the_reference_are_those_of_the_tool(site):
    page = Fetched((site / "reference" / "index.html").read_text(encoding="utf-8")).text
    assert all(level in page for level in LEVELS)
