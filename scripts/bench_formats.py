#!/usr/bin/env python
"""Print how many bytes on disk a training example takes in each record format.

A training example is one pair of a pass through the text. `static` records store the text five times
(--duplication-factor 5), each time with other pairs and with masks that never change, so a training
example is five of its records; `dynamic` ones store each pair once and draw its masks anew in each
epoch, so there it is one record. Counted is all that a run opens: the records, their indexes and
corpus.offsets, not the vocabulary.

    scripts/bench_formats.py sentences/ --vocab vocab.txt
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

DUPLICATION = 5
LENGTHS = {128: 20, 512: 76}
"""Places and most masked places, the usual pairs."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sentences", type=Path, help="a folder that `bert preprocess` wrote")
    parser.add_argument("--vocab", required=True, help="a vocab.txt")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


def measure(sentences: Path, vocab: str, length: int, masking: str) -> dict[str, float]:
    """Make records in a folder that is gone afterwards; return what they take."""
    with tempfile.TemporaryDirectory() as home:
        out = Path(home, "records")
        command = [sys.executable, "-m", "bert_cli", "tokenize", str(sentences), str(out)]
        command += ["--vocab", vocab, "--sequence-length", str(length)]
        command += ["--mask-tokens", str(LENGTHS[length]), "--masking", masking]
        copies = DUPLICATION if masking == "static" else 1
        if masking == "static":
            command += ["--duplication-factor", str(copies)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stdout}")
        told = json.loads((out / "corpus.json").read_text())
        opened = [*out.rglob("*.tfrecord"), *out.rglob("*.index"), out / "corpus.offsets"]
        size = sum(path.stat().st_size for path in opened)
        examples = told["records"] / copies
        return {"bytes": size, "records": told["records"], "bytes_per_example": size / examples}


def main() -> None:
    given = arguments()
    figures = []
    print(
        f"{'places':>6} {'format':>8} {'records':>10} {'MB':>8} {'bytes per training example':>27}"
    )
    for length in LENGTHS:
        found = {
            masking: measure(given.sentences, given.vocab, length, masking)
            for masking in ("static", "dynamic")
        }
        for masking, row in found.items():
            print(
                f"{length:6} {masking:>8} {row['records']:10,} {row['bytes'] / 1e6:8.1f} "
                f"{row['bytes_per_example']:27,.0f}"
            )
            figures.append({"sequence_length": length, "format": masking, **row})
        ratio = found["static"]["bytes_per_example"] / found["dynamic"]["bytes_per_example"]
        print(f"{length:6} dynamic is 1/{ratio:.1f} of static")
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
