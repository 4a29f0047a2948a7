"""`scripts/faults`: the kinds of faults, the sample, and what a small tree's tests see of the faults in it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_lines import ROOT, script

kinds = script("faults/kinds.py")

# Kind -> a body of a function, and every line that a fault of this kind makes of it.
KINDS = {
    "boundary": ("return a < b, a[0], a[1:b]", {
        "return a <= b, a[0], a[1:b]", "return a < b, a[-1], a[1:b]",
        "return a < b, a[0], a[1 + 1:b]", "return a < b, a[0], a[1:b + 1]",
    }),
    "half": ("x = train(a or b if a is b else test)", {
        "x = train(a or b if a is not b else test)", "x = train(test if a is b else a or b)",
        "x = train((a and b) if a is b else test)", "x = train((a) if a is b else test)",
        "x = test(a or b if a is b else test)", "x = train(a or b if a is b else train)",
    }),
    "sign": ("return -a.x + 2 * b", {
        "return a.x + 2 * b", "return (-a.x - 2 * b)", "return -a.x + (2 / b)",
    }),
    "axis": ("return a.sum(axis=1), b.max(dim=-1).T, a[:, None]", {
        "return a.sum(axis=0), b.max(dim=-1).T, a[:, None]",
        "return a.sum(axis=1), b.max(dim=0).T, a[:, None]",
        "return a.sum(axis=1), b.max(dim=-1), a[:, None]",
        "return a.sum(axis=1), b.max(dim=-1).T, a[None, :]",
    }),
    "swallowed error": ("raise ValueError(a + b)", {"pass"}),
    "stale key": ("key = (a, b), {'a': a, **b}", {
        "key = ({'a': a, **b},)", "key = ((a, b),)", "key = (b,), {'a': a, **b}", "key = (a,), {'a': a, **b}",
        "key = (a, b), {**b}", "key = (a, b), {'a': a}",
    }),
    "missing rename": ("a.rename(b)", {"pass"}),
    "wrong default": ("return a.get('x', 7)", {"return a.get('x', 8)"}),
    "ignored flag": ("return a.sort(key=b, help=b)", {"return a.sort(help=b)"}),
    "swapped argument": ("return f(a, b, 1)", {"return f(b, a, 1)"}),
    "off by one": ("return a[5] if a is True else 2.5", {"return a[6] if a is True else 2.5"}),
}  # fmt: skip
# A change of these is seen by nobody, or only in a text.
SILENT = (
    "raise ValueError(a[0])", "log.info(a < b)", "assert a < 1", "timeout = 5", "f(encoding=1)", "print_line(a + b)",
    "say(f'{a < b}')", "raise DataError(a, -b)", "x: tuple[int, 1]", "n = cast(a + b, 5)",
)  # fmt: skip


def faults_of(folder: Path, text: str, seed: int = 1, count: int = 999) -> list:
    """Return the faults of a package of one file."""
    file = folder / "bert_cli" / "data" / "one.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return kinds.sample(folder, ["data"], seed, count)


def function(body: str) -> str:
    return f"def work(a, b, train, test):\n    {body}\n"


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_a_kind_of_fault_makes_these_lines_and_no_others(kind, tmp_path):
    body, changed = KINDS[kind]
    found = [fault for fault in faults_of(tmp_path, function(body)) if fault.kind == kind]
    assert sorted(fault.new.strip() for fault in found) == sorted(changed)
    assert all(fault.old.strip() == body and fault.line == fault.last == 2 for fault in found)
    assert {(fault.area, fault.function) for fault in found} == {("data/one.py", (1, 2))}


@pytest.mark.parametrize("body", SILENT)
def test_texts_logs_checks_and_times_stay_as_they_are(body, tmp_path):
    found = faults_of(tmp_path, function(body))
    assert {fault.kind for fault in found} <= {"swallowed error", "missing rename"}


def test_a_seed_chooses_the_same_faults_and_each_kind_as_often(tmp_path):
    body = "\n    ".join(f"x{n} = a[{n}] < b + {n}" for n in range(2, 12))
    first, again, other = (faults_of(tmp_path, function(body), seed, 12) for seed in (1, 1, 2))
    assert first == again and {*first} != {*other}
    names = [fault.kind for fault in first]
    assert sorted(names) == sorted(["boundary", "sign", "off by one"] * 4)
    every = faults_of(tmp_path, function(body))
    assert len(every) == len({*every}) and {*first, *other} < {*every}


def test_faults_that_tests_see_and_do_not_see_are_told_apart(tmp_path):
    tree = tmp_path / "tree"
    ages = '"""Ages."""\n' + "\n".join(
        f"\ndef {name}(age, years):\n    return age {sign} years\n"
        for name, sign in (("adult", ">="), ("child", "<"), ("old", ">"))
    )
    child = "from bert_cli.data.ages import adult; assert adult(18, 18) and not adult(17, 18)"
    checks = {
        # A child of a test has the name of the test, although not its configuration of coverage.py.
        "adult": f"subprocess.run([sys.executable, '-c', '{child}']).returncode == 0",
        "child": "ages.child(5, 18)",
        "fails": "not ages.child(5, 18)",
        "long": "time.sleep(0.5) is None and not ages.child(18, 18)",
    }
    tests = "".join(f"def test_{name}():\n    assert {text}\n" for name, text in checks.items())
    files = {
        "bert_cli/__init__.py": "",
        "bert_cli/data/__init__.py": "",
        "bert_cli/data/ages.py": ages,
        "bert_cli/limits.py": '"""Limits."""\n\nLIMITS = {\n    "low": lambda age: age < 3,\n}\n',
        "tests/test_limits.py": "def test_limits():\n    pass\n",
        "tests/data/test_ages.py": f"import subprocess, sys, time\n\nfrom bert_cli.data import ages\n{tests}",
        # What every judgement imports first takes half a minute, and this tree needs none of it.
        **{f"{name}.py": "" for name in ("jax", "keras", "tensorflow", "torch")},
        **{f"scripts/faults/{p.name}": p.read_text() for p in (ROOT / "scripts/faults").glob("*.py")},
    }  # fmt: skip
    for name, text in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    subprocess.run(["git", "init", "-q", tree], check=True)
    # The suite itself may be what is measured, or judged.
    known = {n: v for n, v in os.environ.items() if not n.startswith(("BERT_FAULTS", "COVERAGE"))}
    known |= {"PYTHONPATH": str(tree), "PYTEST_PLUGINS": "pytest_timeout"}
    known["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"

    def faults(*words: str) -> str:
        command = [sys.executable, tree / "scripts/faults", "--map", tmp_path / "map.json", *words]
        done = subprocess.run(command, cwd=tree, env=known, capture_output=True, text=True)
        assert done.returncode == (words[0] == "map"), done.stderr  # the test that always fails
        return done.stdout

    assert "1 failed, 4 passed" in faults("map")
    out = faults("run", "--under", "data", "--cap", "0.4")
    found = re.findall(
        r"^ +\d+ (\w+(?: executed)?) +(\S+) +bert_cli/data/ages.py:(\d+)  (\d) tests", out, re.M
    )
    assert sorted(found, key=lambda row: int(row[2])) == [
        ("caught", "boundary", "4", "1"),
        ("survived", "boundary", "8", "1"),
        ("not executed", "boundary", "12", "2"),  # by all tests of the folder
    ]
    assert re.search(r"caught .*  tests/data/test_ages.py::test_adult$", out, re.M)
    assert "     -     return age < years\n     +     return age <= years\n" in out
    assert re.search(r"^all +3 +1 +1 +1$", out, re.M)
    assert "1 tests (1 longer ones left out)" in out
    out = faults("run", "--under", "limits.py")
    assert re.search(r" not executed boundary +bert_cli/limits.py:4  1 tests", out)
    out = faults("run", "--under", "data", "--only", "bert_cli/data/ages.py:8")
    assert re.search(r" caught .*test_long$", out, re.M)
    assert (tree / "bert_cli/data/ages.py").read_text() == ages
