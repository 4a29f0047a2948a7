"""The commands of docs/search.md in a real PostgreSQL with pgvector, which the test starts."""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from support.processes import wait_for
from support.tiny_models import write_model

from bert_cli.cli import main
from bert_cli.data.search.index import open_index

ROOT = Path(__file__).parents[3]
BLOCK = re.compile(r"<!-- postgresql -->\n```bash\n(.*?)```", re.DOTALL)
FOLDERS = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
TEXTS = [
    "The film was good.",
    "The music of the film is fine.",
    "A bad plot and a bad actor.",
    "To end the input write\n\\.\nand a tab\tor a \\n here",
    "A zero\0is in the middle of this long line.",
]


@pytest.fixture
def server():
    """The environment of a client of a new server."""
    path = os.pathsep.join([os.environ["PATH"], *map(str, FOLDERS)])
    programs = {name: shutil.which(name, path=path) for name in ("initdb", "postgres", "psql")}
    if missing := [name for name, program in programs.items() if program is None]:
        pytest.skip(f"PostgreSQL is not installed: no {', '.join(missing)}")
    user = "nobody" if os.geteuid() == 0 else None  # PostgreSQL refuses root
    with tempfile.TemporaryDirectory() as home:
        if user:
            shutil.chown(home, user)
        start = {"user": user, "cwd": home, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        words = [programs["initdb"], *shlex.split("-D data -U tester -A trust -N -E UTF8")]
        done = subprocess.run(words, text=True, **start)
        assert done.returncode == 0, done.stderr
        words = [programs["postgres"], "-D", "data", "-k", home, "-c", "listen_addresses="]
        clients = {"PGHOST": home, "PGUSER": "tester", "PGDATABASE": "postgres"}
        environment = {**os.environ, **clients, "PATH": path}

        def ask(query: str) -> str:
            client = [programs["psql"], "-tAc", query]
            return subprocess.run(client, env=environment, capture_output=True, text=True).stdout

        with subprocess.Popen(words, **start) as process:
            try:
                wait_for(lambda: ask("SELECT 1").strip() == "1", [process])
                if not ask("SELECT 1 FROM pg_available_extensions WHERE name = 'vector'").strip():
                    pytest.skip("PostgreSQL has no pgvector")
                yield environment
            finally:
                process.kill()


@pytest.mark.tensorflow
def test_the_page_loads_an_export_and_asks_it(tmp_path, server, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "vectors")
    Path("texts").mkdir()
    for number, text in enumerate(TEXTS):
        Path(f"texts/{number}.txt").write_text(f"{text}\n")
    assert main(["search", "make", "index", "texts", "--model", "vectors"]) == 0
    assert main(["search", "export", "index", "passages.parquet"]) == 0
    blocks = BLOCK.findall((ROOT / "docs" / "search.md").read_text(encoding="utf-8"))
    assert len(blocks) == 2
    Path("programs").mkdir()
    python = shlex.quote(sys.executable)
    for program, words in {"bert": '-m bert_cli "$@"', "python3": '"$@"'}.items():
        Path("programs", program).write_text(f"#!/bin/sh\nexec {python} {words}\n")
        Path("programs", program).chmod(0o755)
    script = "\n".join(blocks).replace("MODEL", "vectors")
    path = f"{tmp_path / 'programs'}{os.pathsep}{server['PATH']}"
    environment = {**server, "PATH": path, "PYTHONPATH": str(ROOT)}
    words = ["bash", "-euo", "pipefail", "-c", script.replace("how do I mount a disk?", "bad film")]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[0].strip() for line in done.stdout.splitlines() if "|" in line]
    texts = [text.replace("\0", " ") for text in TEXTS]
    assert sorted(rows) == sorted(text.split("\n")[0] for text in texts)
    client = ["psql", "-tA", "-F", "\t", "-c", "SELECT md5(text), vector FROM passages ORDER BY id"]
    stored = subprocess.run(client, env=environment, capture_output=True, text=True, check=True)
    index = open_index(Path("index"))  # its table is open as long as this
    rows = index.table.execute("SELECT value FROM vectors ORDER BY id")
    sums = [hashlib.md5(text.encode()).hexdigest() for text in texts]
    for line, (vector,) in zip(stored.stdout.splitlines(), rows, strict=True):
        text, _ = line.split("\t")
        assert text in sums
        found = np.array(line.split("\t")[1].strip("[]").split(","), np.float32)
        np.testing.assert_allclose(found, np.frombuffer(vector, np.int16) / 32767, atol=1e-6)
