"""`bert inspect` as a person has it: text, figures, warnings, on records of which all is known."""

import io
import json
import subprocess
import sys
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
from bert_cli.data.records.vocab import read_vocabulary, write_vocabulary
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
    """Pairs of full length, of words that are whole."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(*of, (count, S))
    rows[:, 0], rows[:, 15], rows[:, -1] = 2, 3, 3
    full = np.full(count, S, np.int32)
    labels = (np.arange(count) % 2).astype(np.int32)
    return DynamicRecords(rows.reshape(-1).astype(np.int32), full, np.full_like(full, 16), labels)


def masked(records: DynamicRecords, share: float = 0.15) -> dict[str, np.ndarray]:
    """The same as static examples, the first places of each masked."""
    rows = len(records.lengths)
    tokens = records.tokens.reshape(rows, S).copy()
    number = round(share * S)
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


def corpus_of(folder: Path, shards: list[DynamicRecords], kind: str = "dynamic") -> Path:
    """A folder of records as `bert tokenize` leaves it."""
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


def looked_at(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """What the command prints."""
    inspect.run(load(InspectSettings, [str(word) for word in words], "bert inspect")[0])
    return capsys.readouterr().out


def figures_of(capsys: pytest.CaptureFixture[str], folder: Path, *words: object) -> dict:
    """What the command writes as JSON."""
    path = folder.parent / "figures.json"
    looked_at(capsys, folder, "--json", path, *words)
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module", params=["static", "dynamic"])
def corpus(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 healthy records in three shards."""
    folder = tmp_path_factory.mktemp(request.param) / "corpus"
    return corpus_of(folder, [texts(200, seed=seed) for seed in range(3)], request.param)


def test_a_healthy_folder_has_no_warnings_and_the_figures_of_its_records(corpus, capsys):
    found = figures_of(capsys, corpus)
    assert found["warnings"] == []
    assert (found["records"], found["sample"], found["files"]) == (600, 600, 3)
    assert found["lengths"] == {str(S): 600}
    assert found["largest_shard_share"] == pytest.approx(1 / 3)
    assert found["real_token_share"] == 1.0
    assert found["random_next_share"] == 0.5
    assert found["pieces_per_word"] == 1.0
    assert found["unknown_share_of_tokens"] == found["equals_per_example"] == 0.0
    assert found["masked_share_of_tokens"] == pytest.approx(5 / S)
    assert found["masks_shown_as_mask"] == pytest.approx(0.8, abs=0.03)
    assert found["bytes"] == sum(path.stat().st_size for path in corpus.glob("*.tfrecord"))
    assert "no warnings" in looked_at(capsys, corpus)


def test_a_sample_is_said_to_be_one_and_its_figures_are_near_those_of_all(corpus, capsys):
    text = looked_at(capsys, corpus, "--sample", 150)
    assert "read: a sample of 150, drawn from the whole folder (seed 0)" in text
    assert "read: all of them" in looked_at(capsys, corpus, "--sample", 600)
    part = figures_of(capsys, corpus, "--sample", 150)
    assert part["examples"] == 150
    assert part["random_next_share"] == pytest.approx(0.5, abs=0.15)


def test_a_sample_lies_all_over_the_folder(corpus, capsys):
    text = looked_at(capsys, corpus, "--sample", 1, "--examples", 60)
    assert {f"wiki_{n:03}.tfrecord" for n in range(3)} == {
        line.rpartition(" ")[2] for line in text.splitlines() if line.startswith("example ")
    }


def test_the_seed_decides_what_is_read(corpus, capsys):
    first = looked_at(capsys, corpus, "--examples", 1, "--sample", 50)
    assert first == looked_at(capsys, corpus, "--examples", 1, "--sample", 50)
    other = looked_at(capsys, corpus, "--examples", 1, "--sample", 50, "--seed", 7)
    assert first.partition("example 1")[2] != other.partition("example 1")[2]


def test_examples_show_pairs_and_what_is_to_be_predicted(corpus, capsys):
    text = looked_at(capsys, corpus, "--examples", 2)
    shown = text.partition("example 1")[2].partition("lengths of")[0]
    assert "example 2: record" in shown and "example 3" not in shown
    assert "32 tokens, 5 predicted, B is " in shown
    starts = [line[:4].strip() for line in shown.splitlines() if line[:4].strip() in ("A", "B")]
    assert starts == ["A", "B", "A", "B"]
    # Each prediction in braces, the word that stood there first.
    assert shown.count("{word") == 10
    assert "-> [MASK]}" in shown.replace("\n      ", " ")


def test_pieces_of_a_word_stand_together_and_masks_are_told_apart():
    vocabulary = read_vocabulary_of([*SPECIAL, "the", "cat", "##s", "sat", "."])
    original, read = np.array([2, 5, 6, 7, 8, 9, 3]), np.array([2, 4, 6, 4, 5, 9, 3])
    text = inspect.mark_masks([*range(7)], original, read, {1, 3, 4, 5}, vocabulary)
    assert text.plain == "{the -> [MASK]} cat{##s -> [MASK]} {sat -> the} {.}"


def read_vocabulary_of(pieces: list[str]):
    from bert_cli.data.records.vocab import Vocabulary

    return Vocabulary(Path("vocab.txt"), tuple(pieces), "")


def test_the_sequences_of_a_pack_are_shown_one_by_one():
    vocabulary = read_vocabulary_of([*SPECIAL, "the", "cat", "##s", "sat", "."])
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
    told = [(lead, text.plain) for lead, text in inspect.describe_example(batch, 0, vocabulary)]
    assert told == [
        ("", "sequence 1: 5 tokens, 0 predicted, B is a random next"),
        ("A", "the"),
        ("B", "sat"),
        ("", "sequence 2: 4 tokens, 1 predicted"),
        ("A", "{cat -> [MASK]}s"),
    ]


@pytest.mark.parametrize(
    ("change", "told", "remedy"),
    [
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
    ],
)
def test_what_hurts_is_warned_of_with_its_number_and_a_remedy(change, told, remedy):
    assert list(inspect.find_warnings(HEALTHY)) == []
    hurts = list(inspect.find_warnings(HEALTHY | change))
    assert len(hurts) == 1
    assert told in hurts[0].what and remedy in hurts[0].remedy


@pytest.mark.parametrize(
    "change",
    [
        {"random_next_share": 0.9, "next_sentence_labels": 10},
        {"random_next_share": None, "next_sentence_labels": 0},
        {"random_next_share": 0.65, "next_sentence_labels": 50},
        {"equals_per_example": 4.0, "random_next_share": None, "next_sentence_labels": 0},
        {"pieces_per_word": 4.0, "tokens": 30},
        {"equals_per_example": 1.5, "equal_pairs": 2},
        {"largest_shard_share": 1.0, "files": 1},
        {"copies": None},
    ],
)
def test_what_may_be_chance_or_is_not_known_is_no_warning(change):
    assert list(inspect.find_warnings(HEALTHY | change)) == []


def test_faults_of_real_records_are_found(tmp_path, capsys):
    # Every text many times, all words cut into pieces, most of them unknown, nearly all in one shard.
    bad = texts(40, of=(50, 100))
    rows = bad.tokens.reshape(40, S).copy()
    rows[:, 20:30] = 1
    bad = bad._replace(tokens=np.tile(rows, (15, 1)).reshape(-1))
    long = {name: np.tile(getattr(bad, name), 15) for name in bad._fields if name != "tokens"}
    folder = corpus_of(tmp_path / "bad", [bad._replace(**long), texts(10)])
    text = looked_at(capsys, folder)
    for told in ("pieces on average", "are [UNK]", "times more in the folder", "in one shard of 2"):
        assert told in text
    assert text.count(f"  {folder}: ") == 4


def test_short_texts_are_said_to_want_packing(tmp_path, capsys):
    short = np.full(300, 8, np.int32)
    rows = np.tile([2, 7, 8, 9, 3, 10, 11, 3], (300, 1))
    rows[:, 1:4] = np.random.default_rng(0).integers(5, 50, (300, 3))
    records = DynamicRecords(rows.reshape(-1).astype(np.int32), short, short - 3, short % 2)
    folder = corpus_of(tmp_path / "short", [records])
    assert "75.0% of the positions are padding; pack several" in looked_at(capsys, folder)


def test_static_records_of_one_copy_are_known_by_their_manifest(tmp_path, capsys):
    folder = corpus_of(tmp_path / "one", [texts(100)], "static")
    assert figures_of(capsys, folder)["copies"] is None
    told = {"step": "tokenize", "settings": {"duplication_factor": 1}, "shards": []}
    (folder / "manifest.json").write_text(json.dumps(told))
    assert "every epoch has the same masks" in looked_at(capsys, folder)


def test_dynamic_records_are_masked_as_the_run_will_mask_them(tmp_path, capsys):
    folder = corpus_of(tmp_path / "dynamic", [texts(200)])
    more = figures_of(capsys, folder, "--masking.probability", "0.1")
    assert more["masked_share_of_tokens"] == pytest.approx(3 / S)
    folder = corpus_of(tmp_path / "static", [texts(20)], "static")
    with pytest.raises(ConfigError, match="masking: has no effect on"):
        looked_at(capsys, folder, "--masking.probability", "0.1")


def test_the_histogram_has_every_length_once():
    lengths = inspect.Counter({1: 5, 8: 10, 9: 20, 128: 100})
    lines = inspect.histogram(lengths, 128)
    assert len(lines) == 16
    assert [int(line.split()[3].replace(",", "")) for line in lines] == [15, 20, *[0] * 13, 100]
    bars = [line.count("#") for line in lines]
    assert (bars[0], bars[1], bars[-1], bars[2]) == (8, 10, 50, 0)
    assert inspect.histogram(inspect.Counter({3: 1}), 10)[2].split()[:4] == ["3", "-", "3", "1"]


class Terminal(io.StringIO):
    """Standard output as a terminal is."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_colours_are_for_terminals_and_never_with_no_color(corpus, monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    words = [str(corpus), "--sample", "20"]
    assert "\x1b" not in looked_at(capsys, *words)
    seen = {}
    for no_color in ("", "1"):
        monkeypatch.setenv("NO_COLOR", no_color)
        monkeypatch.setattr(sys, "stdout", Terminal())
        inspect.run(load(InspectSettings, words, "bert inspect")[0])
        seen[no_color] = sys.stdout.getvalue()
    assert "\x1b[33m" in seen[""] and "\x1b" not in seen["1"]


def test_a_terminal_without_unicode_gets_question_marks(monkeypatch):
    class Plain(Terminal):
        encoding = "ascii"

    monkeypatch.setattr(sys, "stdout", Plain())
    assert inspect._printable("über\x1b[2J") == "?ber?[2J"


def test_dynamic_records_need_no_tensorflow(tmp_path):
    folder = corpus_of(tmp_path / "light", [texts(50)])
    code = (
        "import sys\nfrom pathlib import Path\nfrom bert_cli.config.tools import InspectSettings\n"
        "from bert_cli.data.records.inspect import run\n"
        f"run(InspectSettings(folder=Path({str(folder)!r})))\n"
        "print(sorted(set(sys.modules) & {'tensorflow', 'keras', 'torch'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_what_is_no_folder_of_finished_records_is_refused(tmp_path, capsys):
    with pytest.raises(DataError, match="does not exist"):
        looked_at(capsys, tmp_path)
    folder = corpus_of(tmp_path / "other", [texts(20)])
    (folder / "vocab.txt").write_text("\n".join([*PIECES[:-1], "another"]) + "\n")
    with pytest.raises(DataError, match="bring back the file that the records were made with"):
        looked_at(capsys, folder)
    (folder / ".done").mkdir()
    with pytest.raises(DataError, match="has not finished in it"):
        looked_at(capsys, folder)


@pytest.mark.parametrize("masking", ["static", "dynamic"])
def test_real_text_has_the_figures_of_the_recipe(masking, tmp_path, capsys, shared_data):
    sentences = tmp_path / "sentences"
    sentences.mkdir()
    lines = (shared_data / "text/extracted/AA/wiki_00").read_text(encoding="utf-8").splitlines()
    text = [part for line in lines if line[:1] != "<" for part in line.split(". ") if part][:4000]
    documents = ["\n".join(text[first : first + 80]) for first in range(0, len(text), 80)]
    (sentences / "a.txt").write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    vocabulary = shared_data / "vocab/bert-base-uncased-vocab.txt"
    settings = {"input": sentences, "out": tmp_path / "records", "vocab": str(vocabulary)}
    tokenize.run(TokenizeSettings(**settings, masking=masking, processes=1))
    found = figures_of(capsys, tmp_path / "records")
    assert found["warnings"] == []
    assert found["copies"] == (5 if masking == "static" else None)
    assert 1.0 < found["pieces_per_word"] < 1.4
    assert found["unknown_share_of_tokens"] < 0.001
    assert found["masked_share_of_tokens"] == pytest.approx(0.15, abs=0.005)
    assert found["masks_shown_as_mask"] == pytest.approx(0.8, abs=0.02)


def test_figures_are_printed_alone_where_their_place_is_a_dash(corpus, capsys):
    written = figures_of(capsys, corpus)
    assert json.loads(looked_at(capsys, corpus, "--json", "-")) == written


def test_packs_of_static_records_of_one_copy_are_warned_of_like_the_records(tmp_path, capsys):
    folder = corpus_of(tmp_path / "one", [texts(100)], "static")
    told = {"step": "tokenize", "settings": {"duplication_factor": 1}, "shards": []}
    (folder / "manifest.json").write_text(json.dumps(told))
    pack.run(PackSettings(input=folder, out=tmp_path / "packed", processes=1))
    assert "every epoch has the same masks" in looked_at(capsys, tmp_path / "packed")
    index.run(IndexSettings(folder=tmp_path / "packed", processes=1))
    assert "every epoch has the same masks" in looked_at(capsys, tmp_path / "packed")


def test_records_at_an_address_are_looked_at_through_a_copy(tmp_path, capsys):
    pytest.importorskip("fsspec", reason="the extra 'remote' is not installed")
    folder = corpus_of(tmp_path / "there", [texts(100)])
    cache = ["--dataset-cache", tmp_path / "cache"]
    assert f"file://{folder}: 100 dynamic records" in looked_at(capsys, f"file://{folder}", *cache)
    assert list((tmp_path / "cache").rglob("corpus.json"))
    with pytest.raises(ConfigError, match=r"dataset_cache .* has no effect on a folder of this"):
        looked_at(capsys, folder, *cache)


def test_a_run_is_not_a_folder_of_records_and_is_told_so(tmp_path):
    run = tmp_path / "runs" / "mine"
    (run / "step_00000010").mkdir(parents=True)
    with pytest.raises(DataError, match=r"mine is a run, see `bert runs .*runs`; give a folder"):
        inspect.run(load(InspectSettings, [str(run)], "bert inspect")[0])
