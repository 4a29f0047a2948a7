"""`bert inspect`: text, statistics and warnings of records with known content."""

import io
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bert_cli.config.data import IndexSettings, PackSettings, TokenizeSettings
from bert_cli.config.load import load
from bert_cli.config.tools import InspectSettings
from bert_cli.data.records import index, inspect, pack, tokenize
from bert_cli.data.records.formats import DynamicRecords, dynamic_payloads, static_payloads
from bert_cli.data.records.index import write_corpus
from bert_cli.data.records.tfrecord import RecordWriter
from bert_cli.data.records.tokenizer import Vocabulary, read_vocabulary, write_vocabulary
from bert_cli.errors import ConfigError, DataError

S, P = 32, 6
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PIECES = [*SPECIAL, *(f"word{number}" for number in range(45)), *(f"##s{n}" for n in range(50))]
HEALTHY = {
    "format": "static",
    "records": 10_000,
    "files": 4,
    "copies": 5,
    "max_sequences_per_pack": 1,
    "largest_shard_share": 0.26,
    "tokens": 10**6,
    "real_token_share": 0.95,
    "predictions": 150_000,
    "masked_share_of_tokens": 0.15,
    "masks_shown_as_mask": 0.8,
    "examples_with_all_predictions": 0.1,
    "next_sentence_labels": 10_000,
    "random_next_share": 0.5,
    "unknown_share_of_tokens": 0.0001,
    "pieces_per_word": 1.2,
    "equal_pairs": 40,
    "equals_per_example": 0.01,
}


def texts(count: int, *, seed: int = 0, of: tuple[int, int] = (5, 50)) -> DynamicRecords:
    """Return pairs of full length, of words of one piece."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(*of, (count, S))
    rows[:, 0], rows[:, 15], rows[:, -1] = 2, 3, 3
    full = np.full(count, S, np.int32)
    labels = (np.arange(count) % 2).astype(np.int32)
    return DynamicRecords(rows.reshape(-1).astype(np.int32), full, np.full_like(full, 16), labels)


def masked(records: DynamicRecords) -> dict[str, np.ndarray]:
    """Return them as static examples, with the first positions of each masked."""
    rows = len(records.lengths)
    tokens = records.tokens.reshape(rows, S).copy()
    number = round(0.15 * S)
    positions = np.zeros((rows, P), np.int64)
    positions[:, :number] = np.arange(1, number + 1)
    ids = np.where(positions > 0, np.take_along_axis(tokens, positions, axis=1), 0)
    shown = np.random.default_rng(1).random((rows, number)) < 0.8
    tokens[:, 1 : number + 1] = np.where(shown, 4, tokens[:, 1 : number + 1])
    return {
        "input_ids": tokens,
        "input_mask": np.ones((rows, S), np.int64),
        "segment_ids": np.broadcast_to(np.arange(S) >= 16, (rows, S)).astype(np.int64),
        "masked_lm_positions": positions,
        "masked_lm_ids": ids,
        "masked_lm_weights": (positions > 0).astype(np.float32),
        "next_sentence_labels": records.next_sentence_labels,
    }


def make_records(folder: Path, shards: list[DynamicRecords], kind: str = "dynamic") -> Path:
    """Write a folder of records like `bert tokenize`."""
    folder.mkdir(parents=True)
    for number, records in enumerate(shards):
        with RecordWriter(folder / f"wiki_{number:03}.tfrecord") as writer:
            made = (
                dynamic_payloads(records) if kind == "dynamic" else static_payloads(masked(records))
            )
            writer.write_all(made)
    write_vocabulary(folder, "\n".join(PIECES).encode() + b"\n", cased=False)
    described = {
        "format": kind,
        "sequence_length": S,
        "mask_tokens": P,
        "masked_lm_prob": None,
        "whole_word_masking": None,
        "vocab_size": len(PIECES),
        "vocab_sha256": read_vocabulary(folder / "vocab.txt").sha256,
        "token_bytes": 2,
        "special_ids": {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4},
        "tokenizer": {},
    }
    write_corpus(folder, described)
    return folder


def inspected(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Return what the command prints."""
    inspect.run(load(InspectSettings, [str(word) for word in words], "bert inspect")[0])
    return capsys.readouterr().out


def report_of(capsys: pytest.CaptureFixture[str], folder: Path, *words: object) -> dict:
    """Return what the command writes as JSON."""
    path = folder.parent / "report.json"
    inspected(capsys, folder, "--json", path, *words)
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module", params=["static", "dynamic"])
def corpus(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 healthy records in three shards."""
    folder = tmp_path_factory.mktemp(request.param) / "corpus"
    return make_records(folder, [texts(200, seed=seed) for seed in range(3)], request.param)


def test_a_healthy_folder_has_no_warnings_and_the_statistics_of_its_records(corpus, capsys):
    report = report_of(capsys, corpus)
    expected = {
        "warnings": [],
        "records": 600,
        "sample": 600,
        "files": 3,
        "lengths": {str(S): 600},
        "largest_shard_share": pytest.approx(1 / 3),
        "real_token_share": 1.0,
        "random_next_share": 0.5,
        "pieces_per_word": 1.0,
        "unknown_share_of_tokens": 0.0,
        "equals_per_example": 0.0,
        "masked_share_of_tokens": pytest.approx(5 / S),
        "masks_shown_as_mask": pytest.approx(0.8, abs=0.03),
        "bytes": sum(path.stat().st_size for path in corpus.glob("*.tfrecord")),
    }
    assert {name: report[name] for name in expected} == expected
    assert json.loads(inspected(capsys, corpus, "--json", "-")) == report
    text = inspected(capsys, corpus, "--sample", 600)
    assert "no warnings" in text and "read: all of them" in text


def test_a_sample_is_drawn_from_the_whole_folder_by_the_seed(corpus, capsys):
    text = inspected(capsys, corpus, "--sample", 150, "--examples", 60)
    assert "read: a sample of 150, drawn from the complete folder (seed 0)" in text
    examples = [line for line in text.splitlines() if line.startswith("example ")]
    files = {line.rpartition(" ")[2] for line in examples}
    assert files == {f"wiki_{n:03}.tfrecord" for n in range(3)}
    assert text == inspected(capsys, corpus, "--sample", 150, "--examples", 60)
    other = inspected(capsys, corpus, "--sample", 150, "--examples", 60, "--seed", 7)
    assert text.partition("example 1")[2] != other.partition("example 1")[2]
    report = report_of(capsys, corpus, "--sample", 150)
    assert report["examples"] == 150
    assert report["random_next_share"] == pytest.approx(0.5, abs=0.15)


def test_examples_show_pairs_and_predictions(corpus, capsys):
    text = inspected(capsys, corpus, "--examples", 2)
    shown = text.partition("example 1")[2].partition("lengths of")[0]
    assert "example 2: record" in shown and "example 3" not in shown
    assert "32 tokens, 5 predicted, B is " in shown
    labels = [line[:4].strip() for line in shown.splitlines() if line[:4].strip() in ("A", "B")]
    assert labels == ["A", "B", "A", "B"]
    # Each prediction in braces, the original word first.
    assert shown.count("{word") == 10
    assert "-> [MASK]}" in shown.replace("\n      ", " ")


VOCABULARY = Vocabulary(Path("vocab.txt"), (*SPECIAL, "the", "cat", "##s", "sat", "."), "")


def test_the_pieces_of_a_word_are_joined_and_kinds_of_masks_are_distinguished():
    tokens, shown = np.array([2, 5, 6, 7, 8, 9, 3]), np.array([2, 4, 6, 4, 5, 9, 3])
    text = inspect.mark_masks([*range(7)], tokens, shown, {1, 3, 4, 5}, VOCABULARY)
    assert text.plain == "{the -> [MASK]} cat{##s -> [MASK]} {sat -> the} {.}"


def test_the_sequences_of_a_pack_are_shown_one_by_one():
    batch = {
        "input_ids": np.array([[2, 5, 3, 8, 3, 2, 4, 7, 3, 0]]),
        "input_mask": np.array([[1, 1, 1, 1, 1, 2, 2, 2, 2, 0]]),
        "segment_ids": np.array([[0, 0, 0, 1, 1, 0, 0, 0, 0, 0]]),
        "masked_lm_positions": np.array([[6, 0]]),
        "masked_lm_ids": np.array([[6, 0]]),
        "masked_lm_weights": np.array([[1.0, 0.0]]),
        "next_sentence_labels": np.array([[1, 0]]),
        "next_sentence_weights": np.array([[1.0, 0.0]]),
    }
    lines = [(label, text.plain) for label, text in inspect.describe_example(batch, 0, VOCABULARY)]
    assert lines == [
        ("", "sequence 1: 5 tokens, 0 predicted, B is a random next"),
        ("A", "the"),
        ("B", "sat"),
        ("", "sequence 2: 4 tokens, 1 predicted"),
        ("A", "{cat -> [MASK]}s"),
    ]


# Change of a healthy report, the warning and its remedy.
PROBLEMS = [
    ({"pieces_per_word": 4.0}, "words are split into 4.00 pieces", "bert vocab"),
    ({"unknown_share_of_tokens": 0.2}, "20.0% of the tokens are [UNK]", "bert vocab"),
    ({"largest_shard_share": 0.9}, "90% of the records are in one shard of 4", "similar size"),
    ({"equals_per_example": 1.5}, "is 1.50 times more in the folder", "--deduplicate"),
    ({"masked_share_of_tokens": 0.4}, "40.0% of the tokens", "--masked-lm-prob 0.15"),
    (
        {"masked_share_of_tokens": 0.05, "examples_with_all_predictions": 0.9},
        "5.0% of the tokens",
        "raise --mask-tokens",
    ),
    (
        {"masked_share_of_tokens": 0.05, "format": "dynamic", "copies": None},
        "5.0% of the tokens",
        "--masking.probability 0.15",
    ),
    ({"masks_shown_as_mask": 1.0}, "100.0% of the predicted tokens", "bert tokenize"),
    ({"random_next_share": 0.9}, "90.0% of the pairs are random", "documents"),
    (
        {"random_next_share": 1.0, "next_sentence_labels": 40},
        "100.0% of the pairs are random",
        "documents",
    ),
    (
        {"equals_per_example": 5.0, "random_next_share": None, "next_sentence_labels": 0},
        "5.00 times more",
        "--deduplicate",
    ),
    ({"real_token_share": 0.3}, "70.0% of the positions are padding", "bert pack"),
    (
        {"real_token_share": 0.3, "max_sequences_per_pack": 2},
        "70.0% of the positions are padding",
        "pack more of them",
    ),
    ({"copies": 1}, "static records of one copy", "--masking dynamic"),
    ({"predictions": 0, "masked_share_of_tokens": None}, "no token is masked", "masks"),
]
# Deviations that may be chance or are unknown.
NO_PROBLEMS = [
    {"random_next_share": 0.9, "next_sentence_labels": 10},
    {"random_next_share": None, "next_sentence_labels": 0},
    {"random_next_share": 0.65, "next_sentence_labels": 50},
    {"equals_per_example": 4.0, "random_next_share": None, "next_sentence_labels": 0},
    {"pieces_per_word": 4.0, "tokens": 30},
    {"equals_per_example": 1.5, "equal_pairs": 2},
    {"largest_shard_share": 1.0, "files": 1},
    {"copies": None},
]


def test_a_problem_has_a_warning_with_its_number_and_a_remedy_and_chance_has_none():
    for change, what, remedy in PROBLEMS:
        (warning,) = inspect.find_warnings(HEALTHY | change)
        assert what in warning.what and remedy in warning.remedy, change
    for change in ({}, *NO_PROBLEMS):
        assert list(inspect.find_warnings(HEALTHY | change)) == [], change


def test_problems_of_real_records_are_found(tmp_path, capsys):
    # Every text many times, all words split into pieces, most of them unknown, nearly all in one shard.
    bad = texts(40, of=(50, 100))
    rows = bad.tokens.reshape(40, S).copy()
    rows[:, 20:30] = 1
    bad = bad._replace(tokens=np.tile(rows, (15, 1)).reshape(-1))
    long = {name: np.tile(getattr(bad, name), 15) for name in bad._fields if name != "tokens"}
    folder = make_records(tmp_path / "bad", [bad._replace(**long), texts(10)])
    text = inspected(capsys, folder)
    for what in ("pieces on average", "are [UNK]", "times more in the folder", "in one shard of 2"):
        assert what in text
    assert text.count(f"  {folder}: ") == 4
    short = np.full(300, 8, np.int32)
    rows = np.tile([2, 7, 8, 9, 3, 10, 11, 3], (300, 1))
    rows[:, 1:4] = np.random.default_rng(0).integers(5, 50, (300, 3))
    records = DynamicRecords(rows.reshape(-1).astype(np.int32), short, short - 3, short % 2)
    folder = make_records(tmp_path / "short", [records])
    assert "75.0% of the positions are padding; pack several" in inspected(capsys, folder)


def test_static_records_of_one_copy_are_warned_of_also_in_packs(tmp_path, capsys):
    folder = make_records(tmp_path / "one", [texts(100)], "static")
    assert report_of(capsys, folder)["copies"] is None
    manifest = {"step": "tokenize", "settings": {"duplication_factor": 1}, "shards": []}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert "every epoch has the same masks" in inspected(capsys, folder)
    packed = tmp_path / "packed"
    pack.run(PackSettings(input=folder, out=packed, processes=1))
    assert "every epoch has the same masks" in inspected(capsys, packed)
    index.run(IndexSettings(folder=packed, processes=1))
    assert "every epoch has the same masks" in inspected(capsys, packed)


def test_dynamic_records_are_masked_by_the_settings_of_the_run(tmp_path, capsys):
    folder = make_records(tmp_path / "dynamic", [texts(200)])
    report = report_of(capsys, folder, "--masking.probability", "0.1")
    assert report["masked_share_of_tokens"] == pytest.approx(3 / S)
    folder = make_records(tmp_path / "static", [texts(20)], "static")
    with pytest.raises(ConfigError, match="masking: has no effect on"):
        inspected(capsys, folder, "--masking.probability", "0.1")


def test_the_histogram_counts_every_length_once():
    lines = inspect.histogram(Counter({1: 5, 8: 10, 9: 20, 128: 100}), 128)
    assert len(lines) == 16
    assert [int(line.split()[3].replace(",", "")) for line in lines] == [15, 20, *[0] * 13, 100]
    bars = [line.count("#") for line in lines]
    assert (bars[0], bars[1], bars[-1], bars[2]) == (8, 10, 50, 0)
    assert inspect.histogram(Counter({3: 1}), 10)[2].split()[:4] == ["3", "-", "3", "1"]


class Terminal(io.StringIO):
    """Standard output as a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, columns: int, *words: object) -> str:
    """Return what the command prints on a terminal of so many columns."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(columns))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Terminal())
        inspect.run(load(InspectSettings, [str(word) for word in words], "bert inspect")[0])
        return sys.stdout.getvalue()


def test_examples_are_as_wide_as_the_terminal(corpus, monkeypatch, capsys):
    monkeypatch.setenv("NO_COLOR", "1")
    widths = {}
    for columns in (60, 200):
        text = on_a_terminal(monkeypatch, columns, corpus, "--sample", 20)
        lines = text.partition("\nexample 1")[2].partition("\nlengths of")[0].splitlines()
        examples = [line for line in lines[1:] if line.startswith("  ")]
        widths[columns] = max(map(len, examples))
        assert widths[columns] <= columns
    # The 31 words of an example do not fit into one line of 60 columns, but nearly fill it.
    assert widths[60] > 40
    assert widths[200] > 100
    # Without a terminal lines have 100 columns.
    lines = inspected(capsys, corpus, "--sample", 20).partition("\nexample 1")[2].splitlines()
    assert 60 < max(len(line) for line in lines[1:6]) <= 100


def test_colours_are_for_terminals_without_no_color(corpus, monkeypatch, capsys):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in inspected(capsys, corpus, "--sample", 20)
    assert "\x1b[33m" in on_a_terminal(monkeypatch, 100, corpus, "--sample", 20)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in on_a_terminal(monkeypatch, 100, corpus, "--sample", 20)
    plain = Terminal()
    plain.encoding = "ascii"
    monkeypatch.setattr(sys, "stdout", plain)
    assert inspect._printable("über\x1b[2J") == "?ber?[2J"


def test_dynamic_records_need_no_tensorflow(tmp_path):
    folder = make_records(tmp_path / "light", [texts(50)])
    code = (
        "import sys\nfrom pathlib import Path\nfrom bert_cli.config.tools import InspectSettings\n"
        "from bert_cli.data.records.inspect import run\n"
        f"run(InspectSettings(folder=Path({str(folder)!r})))\n"
        "print(sorted(set(sys.modules) & {'tensorflow', 'keras', 'torch'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_folders_without_complete_records_are_rejected(tmp_path, capsys):
    with pytest.raises(DataError, match="does not exist"):
        inspected(capsys, tmp_path)
    run = tmp_path / "runs" / "mine"
    (run / "step_00000010").mkdir(parents=True)
    with pytest.raises(DataError, match=r"mine is a run, see `bert runs .*runs`; give a folder"):
        inspected(capsys, run)
    folder = make_records(tmp_path / "other", [texts(20)])
    (folder / "vocab.txt").write_text("\n".join([*PIECES[:-1], "another"]) + "\n")
    with pytest.raises(DataError, match="bring back the file that the records were made with"):
        inspected(capsys, folder)
    (folder / ".done").mkdir()
    with pytest.raises(DataError, match="has not finished in it"):
        inspected(capsys, folder)


@pytest.mark.parametrize("masking", ["static", "dynamic"])
def test_real_text_has_the_statistics_of_the_recipe(masking, tmp_path, capsys, shared_data):
    sentences = tmp_path / "sentences"
    sentences.mkdir()
    lines = (shared_data / "text/extracted/AA/wiki_00").read_text(encoding="utf-8").splitlines()
    text = [part for line in lines if line[:1] != "<" for part in line.split(". ") if part][:4000]
    documents = ["\n".join(text[first : first + 80]) for first in range(0, len(text), 80)]
    (sentences / "a.txt").write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    vocabulary = shared_data / "vocab/bert-base-uncased-vocab.txt"
    settings = {"input": sentences, "out": tmp_path / "records", "vocab": str(vocabulary)}
    tokenize.run(TokenizeSettings(**settings, masking=masking, processes=1))
    report = report_of(capsys, tmp_path / "records")
    assert report["warnings"] == []
    assert report["copies"] == (5 if masking == "static" else None)
    assert 1.0 < report["pieces_per_word"] < 1.4
    assert report["unknown_share_of_tokens"] < 0.001
    assert report["masked_share_of_tokens"] == pytest.approx(0.15, abs=0.005)
    assert report["masks_shown_as_mask"] == pytest.approx(0.8, abs=0.02)


def test_remote_records_are_inspected_in_a_local_copy(tmp_path, capsys):
    pytest.importorskip("fsspec", reason="the extra 'remote' is not installed")
    folder = make_records(tmp_path / "there", [texts(100)])
    cache = ["--dataset-cache", tmp_path / "cache"]
    assert f"file://{folder}: 100 dynamic records" in inspected(capsys, f"file://{folder}", *cache)
    assert list((tmp_path / "cache").rglob("corpus.json"))
    with pytest.raises(ConfigError, match=r"dataset_cache .* has no effect on a folder of this"):
        inspected(capsys, folder, *cache)
