#!/usr/bin/env python
"""Time `bert tokenize` against a peer that makes the same records, in turn: peer, ours, peer, ours.

The peer is Google's create_pretraining_data.py, or any script that takes its flags. Both are whole
processes on one core, from start to files on disk. Prints each run, the ratio of the medians (of
seconds by the clock, and of seconds of the processor, which other work disturbs less), and the most
memory either held.

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


def measured(command: list[str], core: int, log: Path) -> tuple[float, float, float]:
    """Seconds by the clock and of the processor, and peak megabytes, of a process on one core."""
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
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1e3


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
        runs: dict[str, list[tuple[float, float, float]]] = {name: [] for name in commands}
        print(f"{text.stat().st_size / 1e6:.1f} MB of text, duplication {given.duplication}")
        for _ in range(given.rounds):
            for name, command in commands.items():
                shutil.rmtree(home / "ours", ignore_errors=True)
                runs[name].append(measured(command, given.core, home / "log"))
                print("{}: {:6.2f} s, {:6.2f} s CPU, {:5.0f} MB".format(name, *runs[name][-1]))
        for number, clock in enumerate(("s", "s CPU")):
            medians = {n: statistics.median(run[number] for run in r) for n, r in runs.items()}
            told = ", ".join(f"{name} {value:.2f} {clock}" for name, value in medians.items())
            ratio = f"; ratio {medians['peer'] / medians['ours']:.1f}" if given.peer else ""
            print(f"medians: {told}{ratio}")


if __name__ == "__main__":
    main()
