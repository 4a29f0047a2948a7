"""The recipes of containers/: they copy what the installation reads, and both install the same. None is built here."""

import re
import tomllib

from support.command_lines import ROOT, load_command

RECIPES = [(ROOT / "containers" / name).read_text() for name in ("Dockerfile", "bert.def")]


def test_the_recipes_install_the_same_from_files_that_exist():
    dockerfile, definition = RECIPES
    lines = re.findall(r"^COPY (.+) /opt/bert\S*$", dockerfile, re.M)
    copied = {source for line in lines for source in line.split()}
    pairs = dict(re.findall(r"^    (\S+) /opt/bert/(\S+)$", definition, re.M))
    assert pairs == {name: name for name in copied}
    assert all((ROOT / name).exists() for name in copied)
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = build["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {build["project"]["readme"], *wheel["packages"], *wheel["force-include"]}
    assert needed | {"pyproject.toml", "requirements.lock", "LICENSE"} == copied
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"!{name}" for name in copied} <= {*ignored} and "*" in ignored
    commands = [re.sub(r"\{\{ EXTRAS \}\}|\$EXTRAS", "X", text) for text in RECIPES]
    (first,), (second,) = (re.findall(r"cd /opt/bert && .*", text) for text in commands)
    assert first == second
    bases = [re.findall(r"^F(?:ROM|rom:) (\S+)$", text, re.M) for text in RECIPES]
    assert bases[0] == bases[1] and len(bases[0]) == 1
    extras = [re.search(r"EXTRAS=(\S+)$", text, re.M)[1].split(",") for text in RECIPES]
    assert extras[0] == extras[1]
    assert {*extras[0]} <= set(build["project"]["optional-dependencies"])


def test_bert_accepts_the_command_lines_of_the_recipes():
    lines = [
        re.findall(r"^#   .*run .*bert(?::[\d.]+|\.sif) ([a-z].+)$", text, re.M) for text in RECIPES
    ]
    assert all(lines)
    for words in map(str.split, [*lines[0], *lines[1]]):
        load_command(words)
