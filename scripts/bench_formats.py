#!/usr/bin/env python
"""Print the bytes on disk of a training example in each record format.

A training example is one pair of a pass through the text. `static` records store the text five times
(--duplication-factor 5), each time with other pairs and with fixed masks, so a training example is five records.
`dynamic` records store each pair once and draw its masks in each epoch, so a training example is one record. The files
that a run opens are counted: records, indexes and corpus.offsets.

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
"""Sequence length -> most predictions, the usual pairs."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sentences", type=Path, help="a folder that `bert preprocess` wrote")
    parser.add_argument("--vocab", required=True, help="a vocab.txt")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parser.parse_args()


def measure(sentences: Path, vocab: str, length: int, masking: str) -> dict[str, float]:
    """Make records in a temporary folder and return their size."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "records")
        command = [sys.executable, "-m", "bert_cli", "tokenize", str(sentences), str(out)]
        command += ["--vocab", vocab, "--sequence-length", str(length)]
        command += ["--mask-tokens", str(LENGTHS[length]), "--masking", masking]
        copies = DUPLICATION if masking == "static" else 1
        if masking == "static":
            command += ["--duplication-factor", str(copies)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stdout}")
        corpus = json.loads((out / "corpus.json").read_text())
        files = [*out.rglob("*.tfrecord"), *out.rglob("*.index"), out / "corpus.offsets"]
        size = sum(path.stat().st_size for path in files)
        examples = corpus["records"] / copies
        return {"bytes": size, "records": corpus["records"], "bytes_per_example": size / examples}


def main() -> None:
    settings = arguments()
    results = []
    print(
        f"{'length':>6} {'format':>8} {'records':>10} {'MB':>8} {'bytes per training example':>27}"
    )
    for length in LENGTHS:
        sizes = {
            masking: measure(settings.sentences, settings.vocab, length, masking)
            for masking in ("static", "dynamic")
        }
        for masking, row in sizes.items():
            print(
                f"{length:6} {masking:>8} {row['records']:10,} {row['bytes'] / 1e6:8.1f} "
                f"{row['bytes_per_example']:27,.0f}"
            )
            results.append({"sequence_length": length, "format": masking, **row})
        ratio = sizes["static"]["bytes_per_example"] / sizes["dynamic"]["bytes_per_example"]
        print(f"{length:6} dynamic is 1/{ratio:.1f} of static")
    if settings.json:
        settings.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
