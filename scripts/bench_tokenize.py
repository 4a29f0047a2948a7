#!/usr/bin/env python
"""Time `bert tokenize` against a peer that makes the same records, in turn: peer, ours, peer, ours.

The peer is Google's create_pretraining_data.py, or any script that takes its flags. Both are whole
processes on one core, from start to files on disk. Prints each run, the ratio of the medians, and
the most memory either held.

    scripts/bench_tokenize.py sentences/ --vocab vocab.txt --peer create_pretraining_data.py
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, help="a file or folder of sentences, 10 MB say")
    parser.add_argument("--vocab", type=Path, required=True, help="an uncased vocab.txt")
    parser.add_argument(
        "--peer", type=Path, help="the peer's script; without it only ours is timed"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--duplication", type=int, default=5)
    parser.add_argument("--core", type=int, default=0)
    return parser.parse_args()


def measured(command: list[str], core: int, log: Path) -> tuple[float, float]:
    """Seconds and peak megabytes of a process held on one core; its output goes to the log."""
    started = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["taskset", "-c", str(core), *command],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"},
        )
        _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{log.read_text()[-2000:]}")
    return seconds, usage.ru_maxrss / 1e3


def main() -> None:
    given = arguments()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        files = sorted(given.text.iterdir()) if given.text.is_dir() else [given.text]
        text = home / "sentences" / "all"
        text.parent.mkdir()
        text.write_bytes(b"\n".join(path.read_bytes() for path in files))
        ours = [sys.executable, "-m", "bert_cli", "tokenize", str(text.parent), str(home / "ours")]
        ours += ["--vocab", str(given.vocab), "--duplication-factor", str(given.duplication)]
        ours += ["--processes", "1"]
        commands = {"ours": ours}
        if given.peer:
            peer = [sys.executable, str(given.peer), f"--input_file={text}"]
            peer += [f"--output_file={home / 'peer.tfrecord'}", f"--vocab_file={given.vocab}"]
            peer += [f"--dupe_factor={given.duplication}"]
            commands = {"peer": peer, "ours": ours}
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        print(f"{text.stat().st_size / 1e6:.1f} MB of text, duplication {given.duplication}")
        for _ in range(given.rounds):
            for name, command in commands.items():
                shutil.rmtree(home / "ours", ignore_errors=True)
                took, peak = measured(command, given.core, home / "log")
                seconds[name].append(took)
                print(f"{name}: {took:6.2f} s, {peak:5.0f} MB at most", flush=True)
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        told = ", ".join(f"{name} {value:.2f} s" for name, value in medians.items())
        ratio = f"; ratio {medians['peer'] / medians['ours']:.1f}" if given.peer else ""
        print(f"medians: {told}{ratio}")


if __name__ == "__main__":
    main()
