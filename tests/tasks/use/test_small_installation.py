"""The small installation: no packages but those of requirements-ask.lock, in a fresh environment or blocked."""

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import bert_cli

ROOT = Path(bert_cli.__file__).parents[1]
LOCK = ROOT / "requirements-ask.lock"
LARGEST = 200 * 2**20
"""Bytes of the environment."""
BLOCK = """
import importlib.metadata, sys
for module, owners in importlib.metadata.packages_distributions().items():
    if not {name.lower().replace("_", "-") for name in owners} & {"bert-cli", *%r}:
        sys.modules[module] = None  # as if it were not installed
"""
BERT = "import sys; from bert_cli.cli import main; sys.exit(main(sys.argv[1:]))"
QUESTIONS = "question\tdocument\nwhere sat the cat\tcat.txt\nwhat do we eat\teat.txt\n"
PYTHON = """
import sys
from bert_cli import load, open_index
print(load(sys.argv[1]).label(["the cat"])[0]["label"], load(sys.argv[2]).embed(["the cat"]).shape)
print(open_index("index").ask("the cat")[0].document)
"""
REMEDY = (
    "which is not installed; run `pip install -c requirements.lock .` in the folder of its source"
)


def names() -> set[str]:
    lines = LOCK.read_text().splitlines()
    return {line.partition("==")[0] for line in lines if not line.startswith("#")}


@pytest.fixture(scope="module", params=["blocked", pytest.param("fresh", marks=pytest.mark.slow)])
def python(request, tmp_path_factory) -> list[str]:
    """The words that run code in Python without the packages that train."""
    if request.param == "blocked":
        code = f"{BLOCK % sorted(names())}code = sys.argv.pop(1); exec(code)"
        return [sys.executable, "-c", code]
    folder = tmp_path_factory.mktemp("small") / "environment"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    words = ["install", "--no-deps", "--only-binary", ":all:", "-r", LOCK, ROOT]
    subprocess.run([folder / "bin/pip", *words], check=True)
    sizes = [path.lstat().st_blocks * 512 for path in folder.rglob("*")]
    assert sum(sizes) <= LARGEST
    return [str(folder / "bin/python"), "-c"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("answers")
    (folder / "text").mkdir()
    texts = ("cat", "The cat sat on the mat."), ("eat", "We like to eat in Paris.")
    for name, text in (*texts, *((f"dog{n}", f"A dog runs {n} times.") for n in range(6))):
        (folder / "text" / f"{name}.txt").write_text(f"{text}\n")
    (folder / "questions.tsv").write_text(QUESTIONS)
    return folder


@pytest.fixture
def run(python, folder, monkeypatch) -> Callable[..., subprocess.CompletedProcess[str]]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT) if python[0] == sys.executable else "")
    monkeypatch.chdir(folder)

    def run(*words: object, code: str = BERT) -> subprocess.CompletedProcess[str]:
        command = [*python, code, *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    return run


def test_an_index_is_made_and_asked_by_words_and_by_meaning(run, models):
    Path("index").unlink(missing_ok=True)  # of another environment
    for words in ((), ("--model", models["bare"])):
        made = run("search", "make", "index", "text", *words)
        assert made.returncode == 0, made.stderr
        asked = run("search", "ask", "index", "where sat the cat", "--top", "1")
        assert asked.stdout.startswith("1. The cat sat on the mat. (text/cat.txt"), asked.stderr
    assert "8 of 8 vectors" in made.stdout
    scored = run("search", "score", "index", "--queries", "questions.tsv")
    assert scored.returncode == 0 and "both, weight 0.6" in scored.stdout, scored.stderr
    python = run(models["text"], models["bare"], code=PYTHON)
    assert re.fullmatch(r"LABEL_\d \(1, 32\)\ncat.txt\n", python.stdout), python.stderr


def test_weights_in_bfloat16_are_read(run, models, tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    model = shutil.copytree(models["text"], tmp_path / "half")
    weights = load_file(model / "model.safetensors")
    halves = {name: value.to(torch.bfloat16) for name, value in weights.items()}
    save_file(halves, model / "model.safetensors", {"format": "pt"})
    labels = [run("predict", path, "the cat") for path in (model, models["text"])]
    one, other = (json.loads(done.stdout)["probabilities"]["LABEL_0"] for done in labels)
    assert one != other and abs(one - other) < 0.01


@pytest.mark.parametrize(("served", "call", "sent", "answer"), [
    ("index", "search", {"question": "where sat the cat"}, '"document":"cat.txt"'),
    ("text", "predict", {"text": "the cat"}, '"label":"LABEL_'),
])  # fmt: skip
def test_an_index_and_a_classifier_are_served(served, call, sent, answer, python, run, models):
    path = models["text"] if served == "text" else served
    if served != "text":
        assert run("search", "make", "index", "text").returncode == 0
    words = [*python, BERT, "serve", str(path), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            address = process.stdout.readline().split()[1]
            assert answer in httpx2.post(f"{address}api/{call}", json=sent, timeout=60).text
        finally:
            process.terminate()


@pytest.mark.parametrize(
    "words",
    [
        ("export", "MODEL", "out", "--format", "tflite"),
        ("predict", "MODEL", "a", "--engine", "tensorflow"),
        ("completion", "bash"),
    ],
)
def test_what_needs_more_says_what_installs_it(words, run, models):
    done = run(*(models["text"] if word == "MODEL" else word for word in words))
    assert done.returncode == 2 and REMEDY in done.stderr and done.stderr.count("\n") == 1


def test_doctor_finds_nothing_wrong_with_a_small_installation(run):
    done = run("doctor")
    assert done.returncode == 0 and "not installed; search, predict and serve" in done.stdout


def test_the_lock_has_lines_of_the_other_and_all_that_its_packages_require():
    lines = LOCK.read_text().splitlines()
    locked = (ROOT / "requirements.lock").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [n for n in locked if n in lines]
    todo, required = lines[2].removeprefix("# ").split(), set[str]()
    while todo:
        name = canonicalize_name(todo.pop())
        if name in required:
            continue
        required.add(name)
        for requirement in map(Requirement, importlib.metadata.requires(name) or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.append(requirement.name)
    assert required <= names()
