"""The code base itself: layers, names, sizes, settings, configs, the printed tree."""

import ast
import graphlib
import importlib
import inspect
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from pydantic import BaseModel

import bert_cli
from bert_cli.facts.architectures import ARCHITECTURES
from bert_cli.parse.options import text_of

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "bert_cli"
FILES = sorted(PACKAGE.rglob("*.py"))
LAYERS = {
    "errors": -2, "text": -2, "disk": -2, "arrays": -2, "versions": -2, "processes": -1, "files": 0, "progress": 1,
    "settings": 1, "facts": 1, "config": 1, "parse": 1,
    "planning": 2, "commands": 2,
    "data": 3, "model": 3, "optim": 3, "parallel": 4, "train": 5, "tasks": 6, "cli": 7, "__init__": 7, "__main__": 8,
    "statistics": -1,
}  # fmt: skip
SETTINGS = ("settings", "facts", "config", "parse")
"""Folders of the layer of settings from the ground up."""
DATA = (
    "random", "io", "workers", "text", "search", "tokens", "records", "examples", "finetune", "steps",
)  # fmt: skip
"""Folders of data/ from the ground up."""
TASKS = {"tasks.model": ["model"], "tasks.run": ["model", "run"]}
"""Folders of tasks/ that import only these folders of it."""
HEAVY = {"tensorflow", "jax", "keras", "torch", "transformers"}
ENGINES = ("tensorflow", "jax")
# Packages and modules that load in milliseconds, so that their ideas are tested in milliseconds.
LIGHT = [
    "errors", "files", "processes", "cli", "settings", "config", "facts", "parse", "planning", "data", "optim/schedule",
    "commands", "train",
    *(f"parallel/{name}" for name in ("cluster", "devices", "engine", "group", "launcher", "runtime")),
    *(f"tasks/look/{name}" for name in ("plan", "runs", "plot", "machine")),
    "tasks/bench/run", "tasks/launch", "tasks/search", "statistics",
]  # fmt: skip
LONGEST_FILE = 450
LONGEST_FUNCTION = 60
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def package_of(path: Path) -> str:
    """Return the folder of a file inside the package, or the name of a file on the top level."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else path.stem


@cache
def imports(source: str) -> list[str]:
    """Return the names of the package that a file imports, with their modules, such as bert_cli.files.STATE."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names += [f"{module}.{alias.name}" for alias in node.names]
    return [name for name in names if name.startswith(("bert_cli.", "."))]


def wrong_imports(path: Path, source: str) -> list[str]:
    package, wrong = package_of(path), []
    engine = path.relative_to(PACKAGE / "parallel").parts[0] if package == "parallel" else ""
    for name in set(imports(source)) - {"bert_cli.__version__"}:
        imported = name.split(".")[1]
        is_lower = imported in LAYERS and LAYERS[imported] < LAYERS[package]
        if {imported, package} <= {*SETTINGS}:
            is_lower = SETTINGS.index(imported) < SETTINGS.index(package)
        if imported != package and not is_lower:
            wrong.append(f"{path.relative_to(ROOT)} imports {name}")
        for framework in {*ENGINES} - {engine}:
            if package != "tasks" and f"{name}.".startswith(f"bert_cli.parallel.{framework}."):
                wrong.append(f"{path.relative_to(ROOT)} imports the engine {framework}")
    return wrong


def test_a_file_imports_only_lower_layers_and_its_own_package():
    for path in FILES:
        source, package = path.read_text(encoding="utf-8"), package_of(path)
        assert wrong_imports(path, source) == []
        packages = {name.split(".")[1] for name in imports(source)}
        assert package == "tasks" or not {"data", "model"} <= {*packages, package}, path
        has_framework = re.search(r"^\s*(import|from) (tensorflow|jax)", source, re.MULTILINE)
        may_have_one = package not in ("model", "optim") or path.name == "fused.py"
        assert may_have_one or not has_framework, path
        # Its copies stand alone beside weights, and importing it takes PyTorch.
        is_copied = path.name.startswith("modeling_")
        is_imported = re.search("import modeling_(groupbert|mean)", source)
        assert not is_imported and not (is_copied and imports(source))
    for file, source in (
        ("data/examples/reader", "from bert_cli import tasks"),
        ("data/examples/reader", "def f():\n    from bert_cli.model import build"),
        ("data/examples/reader", "from ..train import loop"),
        ("train/loop", "from bert_cli.parallel.jax.mesh import open_mesh"),
        ("parallel/engine", "from bert_cli.parallel import tensorflow"),
        ("parallel/tensorflow/engine", "from bert_cli.parallel.jax import mesh"),
    ):
        assert wrong_imports(PACKAGE / f"{file}.py", source), source


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def module_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Return the modules that each module imports, also where only a type checker reads the import."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        names = imports(source)
        targets = {name if name in sources else name.rpartition(".")[0] for name in names}
        graph[module] = targets & sources.keys() - {module}
    return graph


def arrows_up(graph: dict[str, set[str]]) -> list[str]:
    """Return the imports that point up between the folders of data/, or out of tasks/model and tasks/run."""
    wrong = []
    for module, targets in graph.items():
        for target in targets:
            room, other = module.split("."), target.split(".")
            is_data = room[1] == other[1] == "data" and min(len(room), len(other)) > 2
            climbs = is_data and DATA.index(other[2]) > DATA.index(room[2])
            allowed = TASKS.get(".".join(room[1:3]), other[2:3])
            leaves = other[1] == "tasks" and other[2] not in allowed
            if climbs or leaves:
                wrong.append(f"{module} imports {target}")
    return wrong


def test_the_imports_of_files_have_no_circle_and_no_arrow_up():
    sources = {module_of(path): path.read_text(encoding="utf-8") for path in FILES}
    graph = module_graph(sources)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle
    assert arrows_up(graph) == []
    typed = "if TYPE_CHECKING:\n    from bert_cli.facts.heads import Head"
    broken = module_graph({**sources, "bert_cli.facts.products": typed})
    with pytest.raises(graphlib.CycleError, match="heads"):
        graphlib.TopologicalSorter(broken).prepare()
    for module, source in (
        ("bert_cli.data.records.masking", "from bert_cli.data.examples import source"),
        ("bert_cli.tasks.run.teacher", "from bert_cli.tasks.use.predict import prepare"),
        ("bert_cli.tasks.model.opened", "from bert_cli.tasks.run import start"),
    ):
        assert arrows_up(module_graph({**sources, module: source})), module


def test_only_the_steps_of_data_know_settings_and_only_workers_and_steps_know_processes():
    knows = {"config": {"steps"}, "processes": {"steps", "workers"}}
    for path in (PACKAGE / "data").rglob("*.py"):
        names = {name.split(".")[1] for name in imports(path.read_text(encoding="utf-8"))}
        room = path.relative_to(PACKAGE / "data").parts[0]
        assert all(room in knows[name] for name in names & {*knows}), path
    for path in (PACKAGE / "data" / "steps").glob("[a-z]*.py"):
        functions = [node for node in TREES[path].body if isinstance(node, ast.FunctionDef)]
        assert [function.name for function in functions] == ["run"], path


def printed_by(code: str) -> str:
    words = [sys.executable, "-c", f"import sys\n{code}"]
    unset = {name: value for name, value in os.environ.items() if "ONEDNN" not in name}
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT, env=unset)
    return done.stdout.splitlines()[-1]


def test_the_light_files_and_the_help_load_nothing_heavy():
    paths: list[Path] = []
    for light in LIGHT:
        file = PACKAGE / f"{light}.py"
        paths += [file] if file.exists() else sorted((PACKAGE / light).rglob("[a-z]*.py"))
    names = list(map(module_of, paths))
    code = f"import importlib\nfor name in {names!r}: importlib.import_module(name)\n"
    assert printed_by(f"{code}print(sorted(set(sys.modules) & {HEAVY!r}))") == "[]"
    code = (
        "from bert_cli.cli import main\n"
        "for words in (['--help'], ['--version'], ['squad', '--help'], ['plot', '--help']):\n"
        "    try: main(words)\n    except SystemExit as end: assert not end.code\n"
    )
    code += "import bert_cli.data.steps.preprocess\n"
    assert printed_by(f"{code}print(sorted(set(sys.modules) & {HEAVY | {'numpy'}!r}))") == "[]"


@pytest.mark.tensorflow
def test_a_run_starts_with_onednn_and_loads_nothing_for_keras_that_it_does_not_use():
    code = (
        "from bert_cli.processes import KERAS_WRAPS, quiet_imports\n"
        "with quiet_imports():\n    import bert_cli.tasks.run.pretrain\n"
        "assert 'keras' in sys.modules\n"
        "from tensorflow.python.util._pywrap_util_port import IsMklEnabled\n"
        "print(IsMklEnabled(), [name for name in KERAS_WRAPS if name in sys.modules])\n"
        "import sklearn.metrics"
    )
    assert printed_by(code) == "True []"


def test_a_file_is_short_has_short_functions_and_opens_with_its_idea():
    for path, tree in TREES.items():
        assert not re.search(r"util|helper|common|misc|^base|manager", path.stem), path
        text = ast.get_docstring(tree)
        assert text and len(text.splitlines()) <= 12, path
        assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST_FILE, path
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= LONGEST_FUNCTION, f"{path}:{node.lineno} {node.name} ({length})"


def test_every_file_of_tests_has_a_name_of_its_own():
    """Pytest imports a file by its name alone: of two with the same name, it refuses the second."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted({*names}) == sorted(names)


def test_no_variable_stands_for_any_noun():
    vague = {"one", "own", "most", "other", "here", "found", "given", "named", "wanted"}
    for path, tree in TREES.items():
        names = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
        stored = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        stored -= {"found"} if path.name == "machine.py" else set()  # a key of bert doctor --json
        assert not vague & stored, path


def test_no_value_is_compared_with_the_name_of_an_architecture():
    for path, tree in TREES.items():
        if path.stem not in ("shape", *ARCHITECTURES):
            for node in ast.walk(tree):
                parts = ast.walk(node) if isinstance(node, ast.Compare | ast.MatchValue) else ()
                assert not {getattr(part, "value", None) for part in parts} & {*ARCHITECTURES}, path


def test_a_statement_assigns_one_value():
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            is_pair = isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
            assert not (is_pair and isinstance(node.targets[0], ast.Tuple)), f"{path}:{node.lineno}"


def test_every_setting_has_a_docstring_and_every_class_is_frozen_and_strict():
    for path in sorted((PACKAGE / "config").glob("[a-z]*.py")):
        module = importlib.import_module(f"bert_cli.config.{path.stem}")
        for _, kind in inspect.getmembers(module, inspect.isclass):
            if not issubclass(kind, BaseModel) or kind.__module__ != module.__name__:
                continue
            assert kind.__doc__
            assert kind.model_config["frozen"] and kind.model_config["extra"] == "forbid"
            for name, about in kind.model_fields.items():
                assert len(text_of(kind, name, about)) > 10, f"{kind.__name__}.{name}"


def test_the_tree_lists_every_file_of_the_package():
    done = subprocess.run([ROOT / "scripts" / "tree"], capture_output=True, text=True, check=True)
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    names = [line[0] for line in lines if line[0].endswith(".py")]
    assert sorted(names) == sorted(path.name for path in TREES if not path.name.startswith("__"))
    assert all(len(line) == 2 for line in lines if line[0].endswith(".py"))


def test_the_changelog_begins_with_the_version_of_the_package():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)", text, re.MULTILINE)[0] == bert_cli.__version__
