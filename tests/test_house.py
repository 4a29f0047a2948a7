"""The house itself: floors, names, sizes, help, settings, configs, the printed tree."""

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

import bert_cli
from bert_cli.cli import COMMANDS, help_text
from bert_cli.config import bench as bench_settings
from bert_cli.config import data as data_settings
from bert_cli.config import finetune as finetune_settings
from bert_cli.config import look as look_settings
from bert_cli.config import parallel as parallel_settings
from bert_cli.config import schema
from bert_cli.config import shell as shell_settings
from bert_cli.config import trackers as tracker_settings
from bert_cli.config import use as use_settings
from bert_cli.config.load import load
from bert_cli.config.plan import plan_of
from bert_cli.config.shipped import runs_configured, shipped_configs

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "bert_cli"
FILES = sorted(PACKAGE.rglob("*.py"))
FLOORS = {
    "__init__": -1, "errors": -1, "files": 0, "config": 1, "data": 2, "model": 2, "optim": 2, "parallel": 3, "train": 4,
    "tasks": 5, "cli": 6, "__main__": 7,
}  # fmt: skip
# Files whose ideas must be testable in milliseconds: nothing of these may be imported with them.
HEAVY = {"tensorflow", "keras", "torch", "transformers"}
LIGHT = [
    "bert_cli.errors", "bert_cli.cli", "bert_cli.config.load", "bert_cli.config.plan", "bert_cli.config.schema",
    "bert_cli.config.data", "bert_cli.config.parallel", "bert_cli.config.finetune",
    "bert_cli.config.quiet",
    "bert_cli.config.use", "bert_cli.config.look", "bert_cli.optim.schedule", "bert_cli.optim.loss_scale",
    "bert_cli.config.layout", "bert_cli.config.memory", "bert_cli.tasks.plan", "bert_cli.tasks.launch",
    "bert_cli.tasks.machine", "bert_cli.tasks.finding",
    *(f"bert_cli.config.{name}" for name in ("commands", "options", "help", "shell", "terminal")),
    "bert_cli.config.bench", "bert_cli.config.benchmarks",
    *(f"bert_cli.train.{name}" for name in ("report", "trackers", "history", "summary", "progress")),
    *(f"bert_cli.tasks.{name}" for name in ("runs", "plot", "curves", "page", "compare", "completion")),
    *(f"bert_cli.tasks.{name}" for name in ("bench", "bench_pretrain", "bench_squad", "bench_table", "bench_data")),
    *(f"bert_cli.tasks.{name}" for name in ("sweep", "timing", "flops")),
    *(f"bert_cli.parallel.{name}" for name in ("schedule", "cluster", "roll_call", "launched", "supervise")),
    *sorted(f"bert_cli.data.{path.stem}" for path in (PACKAGE / "data").glob("[a-z]*.py")),
]  # fmt: skip
LONGEST_FILE = 400
LONGEST_FUNCTION = 60


def room(path: Path) -> str:
    """The folder of a file inside the package, or the file itself on the top level."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else path.stem


def imports(source: str) -> Iterator[str]:
    """Every module of the package that a source imports, also as `from bert_cli import x`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] == "bert_cli")
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                yield "relative"
            elif module == "bert_cli":
                yield from (f"bert_cli.{name.name}" for name in node.names)
            elif module.startswith("bert_cli."):
                yield module


def uphill(path: Path, source: str) -> list[str]:
    """Imports that go up, or across a floor."""
    here, wrong = room(path), []
    for module in imports(source):
        if module in ("bert_cli", "bert_cli.__version__"):
            continue
        there = module.split(".")[1] if "." in module else module
        if there not in FLOORS or (there != here and FLOORS[there] >= FLOORS[here]):
            wrong.append(module)
    return wrong


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_only_go_down(path):
    assert uphill(path, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "from bert_cli import tasks",
        "import bert_cli.train.loop",
        "def f():\n    from bert_cli.model import layers",
        "from ..train import loop",
    ],
)
def test_the_test_of_imports_sees_an_import_that_goes_up_or_across(source):
    assert uphill(PACKAGE / "data" / "reader.py", source)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_tasks_holds_data_and_model_in_one_hand(path):
    rooms = {module.split(".")[1] for module in imports(path.read_text()) if "." in module}
    if room(path) != "tasks":
        assert not {"data", "model"} <= rooms | {room(path)}


def test_the_light_files_load_nothing_heavy():
    code = (
        "import importlib, sys\n"
        f"for name in {LIGHT!r}: importlib.import_module(name)\n"
        f"print(sorted(set(sys.modules) & {HEAVY!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["pretrain", "--help"], ["squad", "--help"], ["plot", "--help"]],
)
def test_help_and_version_load_nothing_heavy(arguments):
    code = (
        "import sys\nfrom bert_cli.cli import main\n"
        f"try: main({arguments!r})\nexcept SystemExit as end: assert not end.code\n"
        f"print(sorted(set(sys.modules) & {HEAVY | {'numpy'}!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"


def test_a_run_loads_nothing_for_keras_that_it_does_not_use():
    code = """
import sys
from bert_cli.config.quiet import KERAS_WRAPS, lightly
with lightly():
    import bert_cli.tasks.pretrain
assert "keras" in sys.modules
print([name for name in KERAS_WRAPS if name in sys.modules])
import sklearn.metrics
"""
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert shown.stdout.strip() == "[]"


def test_the_model_knows_tensorflow_in_one_file_only():
    for path in (PACKAGE / "model").glob("*.py"):
        found = re.search(r"^\s*(import|from) tensorflow", path.read_text(), re.MULTILINE)
        assert not found or path.name == "fused.py", path


def test_files_and_functions_stay_short():
    for path in FILES:
        source = path.read_text(encoding="utf-8")
        assert len(source.splitlines()) <= LONGEST_FILE, path
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= LONGEST_FUNCTION, f"{path}:{node.lineno} {node.name} ({length})"


def test_no_file_has_a_name_that_says_nothing():
    for path in FILES:
        assert not re.search(r"util|helper|common|misc|^base|manager", path.stem), path


def test_every_file_opens_with_its_idea():
    for path in FILES:
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        assert text, path
        if path.name not in ("__init__.py", "__main__.py"):
            assert 3 <= len(text.splitlines()) <= 12, path


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_the_file_of_the_same_name(name):
    module, home, kind, _ = COMMANDS[name]
    assert module.rpartition(".")[2] == name.replace("-", "_").replace(" ", "_")
    assert name in help_text()
    assert issubclass(getattr(importlib.import_module(home), kind), BaseModel)
    tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8"))
    run = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "run"]
    assert len(run) == 1, f"{module} has no run(settings)"
    assert [argument.arg for argument in run[0].args.args] == ["settings"]


SETTINGS = (
    schema,
    data_settings,
    parallel_settings,
    finetune_settings,
    use_settings,
    look_settings,
    shell_settings,
    tracker_settings,
    bench_settings,
)


def settings_classes() -> list[type[BaseModel]]:
    return [
        kind
        for module in SETTINGS
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, BaseModel) and kind.__module__ == module.__name__
    ]


@pytest.mark.parametrize("kind", settings_classes(), ids=lambda kind: kind.__name__)
def test_every_setting_has_a_docstring_and_every_class_is_frozen_and_strict(kind):
    assert kind.__doc__
    assert kind.model_config["frozen"] and kind.model_config["extra"] == "forbid"
    for name, about in kind.model_fields.items():
        assert about.description and len(about.description) > 10, f"{kind.__name__}.{name}"


@pytest.mark.parametrize("path", runs_configured().values(), ids=lambda path: path.stem)
def test_every_shipped_config_loads_and_says_what_it_is(path, monkeypatch):
    monkeypatch.setenv("DATASETS_DIR", "/corpora")
    command = path.stem.partition("_")[0]
    _, home, kind, _ = COMMANDS[command]
    settings_class = getattr(importlib.import_module(home), kind)
    settings, loaded = load(settings_class, ["--config", str(path)], f"bert {command}")
    assert settings.about is not None
    assert settings.about.command.startswith(f"bert {command} --config configs/{path.name}")
    assert loaded.no_effect == {}
    assert plan_of(settings, 10**6, 10**6).total_steps > 0


def test_configs_are_shipped_and_found():
    assert shipped_configs() == ROOT / "configs"
    assert len(runs_configured()) >= 9


def test_contributing_prints_the_tree():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    block = text.partition("<!-- tree -->")[2].partition("<!-- end of tree -->")[0]
    named, above = set(), ["", ""]
    for line in block.splitlines():
        found = re.match(r"^( *)([\w./]+)( +\S.*)?$", line)
        if not found:
            continue
        depth, name = len(found[1]) // 2, found[2]
        path = "".join(above[:depth]) + name
        if name.endswith("/"):
            above[depth:] = [name, ""]
        else:
            assert found[3], f"{path} has no line that says what it is for"
            named.add(path)
    there = {
        str(path.relative_to(ROOT))
        for path in FILES
        if path.name not in ("__init__.py", "__main__.py")
    }
    assert {name for name in named if name.startswith("bert_cli/")} == there


def test_the_changelog_tells_the_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)", text, re.MULTILINE)[0] == bert_cli.__version__


def test_json_files_are_json():
    for path in (ROOT / "configs").glob("*.json"):
        json.loads(path.read_text(encoding="utf-8"))
