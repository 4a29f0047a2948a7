"""`bert inspect`: text, statistics and warnings of records with known content."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from support.corpora import masked_examples, write_folder

from bert_cli.config.tools import InspectSettings
from bert_cli.data.examples import inspect
from bert_cli.data.examples.inspect import SampleStatistics
from bert_cli.data.records.formats import (
    DynamicRecords,
    dynamic_payloads,
    static_lengths,
    static_payloads,
)
from bert_cli.data.steps.inspect import run
from bert_cli.data.tokens.tokenizer import Vocabulary
from bert_cli.errors import ConfigError, DataError
from bert_cli.parse.load import load

S, P = 32, 6
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PIECES = [*SPECIAL, *(f"word{number}" for number in range(45)), *(f"##s{n}" for n in range(50))]
# A small vocabulary for single examples.
KNOWN = Vocabulary(Path("vocab.txt"), (*SPECIAL, "the", "cat", "##s", ".", "sat"), "")
PAD, UNK, CLS, SEP, MASK, THE, CAT, PLURAL, DOT, SAT = range(10)


# --- the statistics of a sample


def batch_of(*rows):
    """Return examples of 12 positions and 4 predictions, without their padding in the rows."""
    batch = {
        name: np.zeros((len(rows), size), np.float32 if "weights" in name else np.int32)
        for name, size in {**static_lengths(12, 4), "next_sentence_weights": 1}.items()
    }
    for number, row in enumerate(rows):
        for name, values in row.items():
            batch[name][number, : len(values)] = values
    return batch


# [CLS] the cats . [SEP] sat [UNK] [SEP], where "cat" is masked, "." replaced and "sat" unchanged.
ONE = {
    "input_ids": [CLS, THE, MASK, PLURAL, THE, SEP, SAT, UNK, SEP],
    "input_mask": [1] * 9,
    "segment_ids": [0] * 6 + [1] * 3,
    "masked_lm_positions": [2, 4, 6],
    "masked_lm_ids": [CAT, DOT, SAT],
    "masked_lm_weights": [1, 1, 1],
    "next_sentence_labels": [1],
    "next_sentence_weights": [1],
}


def counted(batch):
    sample = SampleStatistics(KNOWN)
    sample.add(batch)
    return sample


def test_the_statistics_of_one_example_are_the_known_ones():
    expected = {
        "real_token_fraction": 9 / 12,
        "tokens_per_example": 9,
        "masked_token_fraction": 3 / 9,
        "masks_shown_as_mask": 1 / 3,
        "masks_shown_as_another_word": 1 / 3,
        "masks_shown_as_they_are": 1 / 3,
        "unknown_token_fraction": 1 / 6,
        # the, cat ##s, sat: "." and [UNK] are not words that were split into pieces.
        "pieces_per_word": 4 / 3,
        "random_next_fraction": 1.0,
        "examples_with_all_predictions": 0.0,
    }
    report = counted(batch_of(ONE)).report()
    assert {name: report[name] for name in expected} == expected
    # A continuation whose first piece was cut off begins a word.
    cut = {"input_ids": [CLS, PLURAL, PLURAL], "input_mask": [1] * 3}
    assert counted(batch_of(cut)).report()["pieces_per_word"] == 2.0


OF_FIVE_COPIES = {"format": "static", "copies": 5}
# Change of the report of healthy records, the warning and its remedy.
PROBLEMS = [
    ({"pieces_per_word": 4.0}, "words are split into 4.00 pieces", "bert vocab"),
    ({"unknown_token_fraction": 0.2}, "20.0% of the tokens are [UNK]", "bert vocab"),
    ({"largest_shard_fraction": 0.9}, "90% of the records are in one shard", "similar size"),
    ({"masked_token_fraction": 0.4}, "40.0% of the tokens", "--masked-lm-prob 0.15"),
    ({"masked_token_fraction": 0.05}, "5.0% of the tokens", "--mask-tokens"),
    ({"masks_shown_as_mask": 1.0}, "100.0% of the predicted tokens", "bert tokenize"),
    ({"random_next_fraction": 1.0, "next_sentence_labels": 40}, "100.0% of the pairs", "documents"),
    ({"repeats": 10.5, **OF_FIVE_COPIES}, "recurs 10.50 times", "--deduplicate"),
    ({"repeats": 2.5, "format": "dynamic"}, "recurs 2.50 times", "--deduplicate"),
    ({"real_token_fraction": 0.3}, "only 30.0% of the positions", "--max-sequences-per-pack"),
    ({"copies": 1}, "static records of one copy", "--masking dynamic"),
    ({"predictions": 0, "masked_token_fraction": None}, "no token is masked", "masks"),
]
# Deviations that may be chance or are unknown.
NO_PROBLEMS = [
    {"random_next_fraction": None, "next_sentence_labels": 0},
    {"random_next_fraction": 0.65, "next_sentence_labels": 50},
    {"repeats": 9.5, **OF_FIVE_COPIES},
    {"repeats": 9.5, "format": "static", "copies": None},
    {"pieces_per_word": 4.0, "tokens": 30},
    {"largest_shard_fraction": 1.0, "files": 1},
]


def test_a_problem_has_a_warning_with_its_number_and_a_remedy_and_chance_has_none(corpus, capsys):
    healthy = report_of(capsys, corpus)
    for change, what, remedy in PROBLEMS:
        (warning,) = inspect.find_warnings(healthy | change)
        assert what in warning.what and remedy in warning.remedy, change
    for change in NO_PROBLEMS:
        assert list(inspect.find_warnings(healthy | change)) == [], change


# --- the command


def texts(count, seed=0):
    """Return pairs of full length, of words of one piece."""
    rows = np.random.default_rng(seed).integers(5, 50, (count, S))
    rows[:, 0], rows[:, 15], rows[:, -1] = 2, 3, 3
    full = np.full(count, S, np.int32)
    labels = (np.arange(count) % 2).astype(np.int32)
    return DynamicRecords(rows.reshape(-1).astype(np.int32), full, np.full_like(full, 16), labels)


def make_records(folder, shards, kind="dynamic"):
    payloads = list(map(dynamic_payloads, shards))
    if kind == "static":
        payloads = [static_payloads(masked_examples(one, S, P, len(PIECES))) for one in shards]
    described = {"sequence_length": S, "mask_tokens": P, "masked_lm_prob": None}
    return write_folder(folder, kind, payloads, PIECES, **described)


def inspected(capsys, *words):
    run(load(InspectSettings, [str(word) for word in words], "bert inspect")[0])
    return capsys.readouterr().out


def report_of(capsys, folder, *words):
    path = folder.parent / "report.json"
    inspected(capsys, folder, "--json", path, *words)
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module", params=["static", "dynamic"])
def corpus(request, tmp_path_factory):
    """600 healthy records in three shards."""
    folder = tmp_path_factory.mktemp(request.param) / "corpus"
    return make_records(folder, [texts(200, seed=seed) for seed in range(3)], request.param)


def test_a_healthy_folder_has_no_warnings_and_the_statistics_of_its_records(corpus, capsys):
    report = report_of(capsys, corpus)
    expected = {"warnings": [], "records": 600, "sample": 600, "files": 3, "lengths": {str(S): 600}}
    expected |= {"largest_shard_fraction": 1 / 3, "random_next_fraction": 0.5}
    expected |= {"bytes": sum(path.stat().st_size for path in corpus.glob("*.tfrecord"))}
    assert {name: report[name] for name in expected} == expected
    assert json.loads(inspected(capsys, corpus, "--json", "-")) == report
    text = inspected(capsys, corpus, "--sample", 600)
    assert "no warnings" in text and "read: all records" in text
    # The masks of dynamic records are those of the run's settings.
    masking = corpus, "--masking.probability", "0.1", "--masking.unit", "word"
    if report["format"] == "static":
        with pytest.raises(ConfigError, match="masking: has no effect on"):
            inspected(capsys, *masking)
    else:
        assert report_of(capsys, *masking)["masked_token_fraction"] == pytest.approx(3 / S)


def test_a_sample_is_drawn_by_the_seed(corpus, capsys):
    text = inspected(capsys, corpus, "--sample", 150)
    assert "read: a sample of 150, drawn from the complete folder (seed 0)" in text
    shown, other = (
        one.partition("an example")[2].partition("\n\n")[0]
        for one in (text, inspected(capsys, corpus, "--sample", 150, "--seed", 7))
    )
    assert shown != other
    assert shown.count("{word") == 5 and shown.count("[SEP]") == 2


def test_an_example_has_the_pieces_of_its_words_joined_and_its_predictions_in_braces():
    assert inspect.example_text(batch_of(ONE), KNOWN) == (
        "[CLS] the {cat -> [MASK]}s {. -> the} [SEP] {sat -> sat} [UNK] [SEP]"
    )


def test_static_records_of_one_copy_are_warned_of(tmp_path, capsys):
    folder = make_records(tmp_path / "one", [texts(100)], "static")
    assert report_of(capsys, folder)["copies"] is None
    manifest = {"format": 1, "settings": {"duplication_factor": 1}, "shards": []}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert "every epoch has the same masks" in inspected(capsys, folder)


def test_the_histogram_counts_every_length_once():
    lines = inspect.histogram(Counter({1: 5, 8: 10, 9: 20, 128: 100}), 128)
    assert len(lines) == 16
    assert [int(line.split()[3].replace(",", "")) for line in lines] == [15, 20, *[0] * 13, 100]
    bars = [line.count("#") for line in lines]
    assert (bars[0], bars[1], bars[-1], bars[2]) == (8, 10, 50, 0)


def test_a_run_is_not_a_folder_of_records(tmp_path, capsys):
    (tmp_path / "runs/mine/step_00000010").mkdir(parents=True)
    problem = r"mine is a run, see `bert runs .*runs`; use a complete folder"
    with pytest.raises(DataError, match=problem):
        inspected(capsys, tmp_path / "runs/mine")
