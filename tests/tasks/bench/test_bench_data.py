"""`bert bench data`: every step on synthetic and real text, and the statistics of synthetic text."""

import json
from collections import Counter

from bert_cli.cli import main
from bert_cli.tasks.bench.data import write_synthetic_text

STEPS = ["preprocess", "vocab", "tokenize, static", "tokenize, dynamic", "index"]
STEPS += ["read, static", "read, dynamic", "read, packs"]
QUICK = ["--reading-seconds", "0.05", "--sentence-splitter", "sentencex"]


def measured(folder, *flags):
    output = folder / "metrics.json"
    assert main(["bench", "data", *flags, *QUICK, "--json", str(output)]) == 0
    return json.loads(output.read_text())


def test_every_step_from_synthetic_text_to_batches_is_measured(tmp_path, capsys):
    metrics = measured(tmp_path, "--megabytes", "0.2")
    rows = {row["name"]: row for row in metrics["steps"]}
    assert list(rows) == STEPS and metrics["input"] == "synthetic"
    for row in rows.values():
        assert row["megabytes_per_second"] == row["bytes"] / 1e6 / row["seconds"]
        if "examples" in row:
            assert row["examples_per_second"] == row["examples"] / row["seconds"] > 0
    # Static records have five passes through the text.
    static, dynamic = (rows[f"tokenize, {name}"]["examples"] for name in ("static", "dynamic"))
    assert 3 < static / dynamic < 7 and rows["index"]["examples"] == static
    assert 0.2e6 <= rows["preprocess"]["bytes"] < 0.3e6
    out = capsys.readouterr().out
    assert all(name in out for name in STEPS) and "mb_per_second" not in out


def test_a_given_text_and_vocabulary_are_measured_and_an_absent_text_is_refused(tmp_path, capsys):
    text = tmp_path / "text"
    text.mkdir()
    write_synthetic_text(text / "a.txt", 0.05, seed=2)
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcde"]
    (tmp_path / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens))
    metrics = measured(tmp_path, str(text), "--vocab", str(tmp_path / "vocab.txt"))
    assert metrics["input"] == str(text)
    assert [row["name"] for row in metrics["steps"]] == [name for name in STEPS if name != "vocab"]
    assert sorted(path.name for path in text.iterdir()) == ["a.txt"]
    capsys.readouterr()
    assert main(["bench", "data", str(tmp_path / "nowhere")]) == 3
    assert "nowhere" in capsys.readouterr().err


def test_synthetic_text_depends_on_the_seed_and_its_words_follow_zipf(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_synthetic_text(tmp_path / name, 0.5, seed)
    one, same, other = ((tmp_path / name).read_text() for name in "abc")
    assert one == same != other
    counts = [n for _, n in Counter(one.lower().replace(".", "").split()).most_common(100)]
    # The tenth word is about a tenth as frequent as the first, the hundredth a hundredth.
    assert 5 < counts[0] / counts[9] < 20 and 50 < counts[0] / counts[99] < 200
