"""`scripts/torture`: kills at random moments, and the comparison of two folders."""

import runpy
import subprocess
import sys
from pathlib import Path

TORTURE = Path(__file__).parents[2] / "scripts" / "torture"


def test_killed_data_steps_write_the_same_files(tmp_path):
    words = ["--kills", "1", "--seed", "2", "--commands", "download,extract"]
    words += ["--folder", str(tmp_path / "torture")]
    done = subprocess.run([sys.executable, str(TORTURE), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    head, *rows = done.stdout.splitlines()
    assert head.split()[:3] == ["command", "SIGKILL", "SIGTERM"]
    assert [row.split()[0] for row in rows] == ["download", "extract"]
    assert all(sum(map(int, row.split()[1:3])) == 1 and row.endswith("equal") for row in rows)


def test_bytes_and_files_are_compared_and_times_are_not(tmp_path):
    differences = runpy.run_path(str(TORTURE))["differences"]
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "records").write_bytes(b"0123")
        (folder / "metrics.jsonl").write_text(f'{{"step": 1, "seconds_left": {ord(name)}}}\n')
        (folder / f".records.{ord(name):012x}.part").touch()
    a, b = tmp_path / "a", tmp_path / "b"
    assert differences(a, b) == []
    (b / "records").write_bytes(b"0124")
    (b / "more").touch()
    (b / "metrics.jsonl").write_text('{"step": 2}\n')
    assert differences(a, b) == ["metrics.jsonl", "more", "records"]
