"""The code base itself: layers, names, sizes, settings, configs, the printed tree."""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

import bert_cli
from bert_cli.cli import COMMANDS, help_text
from bert_cli.config import data, finetune, settings, tools, training
from bert_cli.config.load import configs_folder, load, named_configs

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "bert_cli"
FILES = sorted(PACKAGE.rglob("*.py"))
LAYERS = {
    "errors": -1, "files": 0, "processes": 0, "config": 1, "commands": 2, "data": 2, "model": 2, "optim": 2,
    "parallel": 3, "train": 4, "tasks": 5, "cli": 6, "__init__": -1, "__main__": 7,
}  # fmt: skip
HEAVY = {"tensorflow", "keras", "torch", "transformers"}
# Packages and modules that load in milliseconds, so that their ideas are tested in milliseconds.
LIGHT = [
    "errors", "files", "processes", "cli", "config", "data", "optim/schedule", "commands",
    "parallel/cluster", "parallel/engine", "parallel/launcher", "train",
    *(f"tasks/look/{name}" for name in ("plan", "runs", "plot", "machine")),
    *(f"tasks/bench/{name}" for name in ("flops", "run", "data")), "tasks/launch",
]  # fmt: skip
LONGEST_FILE = 450
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


def wrong_imports(path: Path, source: str) -> list[str]:
    """Imports of a higher layer or of another package of the same layer."""
    here, wrong = room(path), []
    for module in imports(source):
        if module in ("bert_cli", "bert_cli.__version__"):
            continue
        there = module.split(".")[1] if "." in module else module
        if there not in LAYERS or (there != here and LAYERS[there] >= LAYERS[here]):
            wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    return wrong


def test_a_file_imports_only_lower_layers_and_its_own_package():
    assert [wrong for path in FILES for wrong in wrong_imports(path, path.read_text())] == []


def test_an_import_of_a_higher_or_equal_layer_is_found():
    sources = (
        "from bert_cli import tasks",
        "import bert_cli.train.loop",
        "def f():\n    from bert_cli.model import layers",
        "from ..train import loop",
    )
    for source in sources:
        assert wrong_imports(PACKAGE / "data" / "stream" / "reader.py", source), source


def test_only_tasks_imports_both_data_and_model():
    for path in FILES:
        rooms = {module.split(".")[1] for module in imports(path.read_text()) if "." in module}
        assert room(path) == "tasks" or not {"data", "model"} <= rooms | {room(path)}, path


def test_the_training_loop_knows_no_framework():
    """It uses an engine by the interface in parallel/engine.py, so that a second engine is another folder."""
    for path in [*(PACKAGE / "train").glob("*.py"), PACKAGE / "parallel" / "engine.py"]:
        assert not any("parallel.tensorflow" in name for name in imports(path.read_text())), path


def test_the_light_files_load_nothing_heavy():
    paths: list[Path] = []
    for light in LIGHT:
        file = PACKAGE / f"{light}.py"
        paths += [file] if file.exists() else sorted((PACKAGE / light).rglob("[a-z]*.py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"print(sorted(set(sys.modules) & {HEAVY!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_and_version_load_nothing_heavy():
    code = (
        "import sys\nfrom bert_cli.cli import main\n"
        "for words in (['--help'], ['--version'], ['squad', '--help'], ['plot', '--help']):\n"
        "    try: main(words)\n    except SystemExit as end: assert not end.code\n"
        f"print(sorted(set(sys.modules) & {HEAVY | {'numpy'}!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"


def test_a_run_loads_nothing_for_keras_that_it_does_not_use():
    code = """
import sys
from bert_cli.processes import KERAS_WRAPS, quiet_imports
with quiet_imports():
    import bert_cli.tasks.run.pretrain
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


def test_a_file_has_a_name_that_says_something_and_opens_with_its_idea():
    for path in FILES:
        assert not re.search(r"util|helper|common|misc|^base|manager", path.stem), path
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        assert text and len(text.splitlines()) <= 12, path


def test_every_command_has_settings_and_a_function_run():
    for name, command in COMMANDS.items():
        assert name in help_text()
        assert issubclass(command.settings_class(), BaseModel)
        tree = ast.parse(
            (PACKAGE / (command.module.replace(".", "/") + ".py")).read_text(encoding="utf-8")
        )
        run = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "run"]
        assert len(run) == 1, f"{command.module} has no run(settings)"
        assert [argument.arg for argument in run[0].args.args] == ["settings"]


def test_every_setting_has_a_docstring_and_every_class_is_frozen_and_strict():
    for module in (settings, training, data, finetune, tools):
        for _, kind in inspect.getmembers(module, inspect.isclass):
            if not issubclass(kind, BaseModel) or kind.__module__ != module.__name__:
                continue
            assert kind.__doc__
            assert kind.model_config["frozen"] and kind.model_config["extra"] == "forbid"
            for name, about in kind.model_fields.items():
                assert about.description and len(about.description) > 10, f"{kind.__name__}.{name}"


def test_every_shipped_config_loads_and_says_what_it_is(monkeypatch):
    monkeypatch.setenv("DATASETS_DIR", "/corpora")
    assert configs_folder() == ROOT / "configs" and len(named_configs()) >= 9
    for path in named_configs().values():
        command = path.stem.partition("_")[0]
        settings_class = COMMANDS[command].settings_class()
        loaded = load(settings_class, ["--config", str(path)], f"bert {command}")
        assert loaded[0].about is not None
        start = f"bert {command} --config configs/{path.name}"
        assert loaded[0].about.command.startswith(start)
        assert loaded[1].no_effect == {}
        assert training.plan_of(loaded[0], 10**6, 10**6).total_steps > 0


def test_contributing_prints_the_tree():
    done = subprocess.run([ROOT / "scripts" / "tree", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_changelog_tells_the_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)", text, re.MULTILINE)[0] == bert_cli.__version__


def test_every_test_file_has_a_name_of_its_own():
    """pytest imports test files by name; of two with one name it collects only the first."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
