"""Duplicates: the first of equal texts is kept, over all shards; nearly equal ones are estimated."""

import random
import sys
import time

import numpy as np
import pytest

from bert_cli.config.data import PreprocessSettings
from bert_cli.data.io.manifest import read_manifest
from bert_cli.data.steps.preprocess import run as preprocess_text
from bert_cli.data.text import duplicates, preprocess
from bert_cli.data.text.duplicates import SIGNATURE_SIZE, equal_to_earlier, near_to_earlier
from bert_cli.errors import ConfigError, DataError

WORDS = [
    a + b for a in ("ba", "ke", "lo", "mi", "nu", "ra") for b in ("si", "to", "va", "zu", "pe")
]


def text_of(seed, words=300):
    draw = random.Random(seed)
    return [f"{' '.join(draw.choices(WORDS, k=10))}." for _ in range(words // 10)]


def changed(lines, fraction):
    """Return another document, with this fraction of its lines new."""
    other = text_of(f"other {lines[0]}", 10 * len(lines))
    new = random.Random(0).sample(range(len(lines)), round(fraction * len(lines)))
    return [other[n] if n in new else line for n, line in enumerate(lines)]


def write(folder, files):
    folder.mkdir()
    for name, documents in files.items():
        (folder / name).write_text("\n\n".join(map("\n".join, documents)) + "\n")
    return folder


def run(source, out, processes=1, **settings):
    settings = {"sentence_splitter": "lines", **settings}
    preprocess_text(PreprocessSettings(input=source, out=out, processes=processes, **settings))
    lines = [path.read_text() for path in sorted(out.glob("*.txt"))]
    return [text.split("\n") for file in lines for text in file.strip().split("\n\n") if text]


A, B, C, D = (text_of(seed) for seed in "abcd")


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Three files, each a shard, with a document twice in a file and across files."""
    monkeypatch.setattr(preprocess, "SHARD_BYTES", 100)
    spaced = [line.replace(" ", "  \t") for line in B]
    return write(tmp_path / "in", {"1": [A, B, A], "2": [spaced, C], "3": [C, D, A]})


@pytest.mark.parametrize("processes", [1, 2])
def test_equal_documents_are_dropped_and_the_first_is_kept(
    source, tmp_path, processes, monkeypatch
):
    out = tmp_path / "out"
    assert run(source, tmp_path / "all") == [A, B, A, B, C, C, D, A]
    assert run(source, out, processes, deduplicate=True) == [A, B, C, D]
    manifest = read_manifest(out)
    counts = {"documents": 4, "duplicates": 4, "near_duplicates": 0, "documents_without_text": 0}
    assert counts.items() <= manifest["counts"].items()
    assert manifest["notes"] == ["dropped documents: 4 equal to an earlier document"]
    (out / "text_00001.txt").unlink()
    monkeypatch.setattr(duplicates, "_Document", None)  # not one document is hashed again
    assert run(source, out, deduplicate=True) == [A, B, C, D]
    (source / "0").write_text("More.\n")  # the first shard is another now
    with pytest.raises(DataError, match=rf"was made from .*; move {out} away, or choose"):
        run(source, out, deduplicate=True)


def test_documents_without_text_are_no_duplicates(tmp_path):
    rows = ["null", '""', '" "', '"One."', '"..."', '"..."']
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": {row}}}\n' for row in rows))
    assert run(tmp_path / "a.jsonl", tmp_path / "out", deduplicate=True) == [["One."]]
    counts = read_manifest(tmp_path / "out")["counts"]
    assert (counts["documents_without_text"], counts["duplicates"]) == (4, 1)


def test_nearly_equal_documents_are_dropped_from_the_threshold_on(tmp_path, capsys, monkeypatch):
    pytest.importorskip("rensa")
    monkeypatch.setattr(preprocess, "SHARD_BYTES", 100)  # a shard has no documents
    # A tenth of the lines new leaves about 75 % of the runs, half of them 25 %.
    close, far = changed(A, 0.1), changed(A, 0.5)
    short = [["one two three four five"], ["ten two three four five"]]  # a run of five words each
    folder = write(tmp_path / "in", {"0": [], "1": [A, B], "2": [close, far, B, C, *short]})
    assert run(folder, tmp_path / "tight", near_duplicates=0.9) == [A, B, close, far, C, *short]
    assert run(folder, tmp_path / "usual", near_duplicates=0.5) == [A, B, far, C, *short]
    note = "equal to an earlier document, and 1 nearly equal"
    assert note in capsys.readouterr().out
    manifest = read_manifest(tmp_path / "usual")
    assert manifest["counts"]["duplicates"] == manifest["counts"]["near_duplicates"] == 1
    assert manifest["settings"]["near_duplicates"] == 0.5


def test_without_the_package_the_error_names_the_extra(source, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(ConfigError, match=r"needs the extra 'near-duplicates'; pip install"):
        run(source, tmp_path / "out", near_duplicates=0.8)
    assert not (tmp_path / "out").exists()
    assert run(source, tmp_path / "out", deduplicate=True) == [A, B, C, D]


def test_equal_hashes_are_equal_in_both_halves_and_that_of_no_text_is_no_duplicate():
    pairs = [(1, 2), (1, 3), (0, 0), (1, 2), (0, 0), (0, 5), (4, 2), (0, 5)]
    flags = equal_to_earlier(np.array(pairs, np.uint64).reshape(-1)).tolist()
    assert flags == [False, False, False, True, False, False, False, True]
    assert equal_to_earlier(np.zeros(0, np.uint64)).tolist() == []


def test_the_bands_find_the_pairs_above_the_threshold_and_no_others():
    """Of the pairs at the threshold at least 99 in 100 are found, and none below is dropped."""
    draw = np.random.default_rng(0)
    rows = []
    fractions = draw.choice([0.3, 0.7, 0.82, 1.0], 1500)
    for fraction in fractions:
        base, other = draw.integers(0, 2**32 - 1, (2, SIGNATURE_SIZE), np.uint32)
        is_same = draw.permutation(SIGNATURE_SIZE) < round(fraction * SIGNATURE_SIZE)
        rows += [base, np.where(is_same, base, other)]
    rows = np.array(rows, np.uint32)
    found = near_to_earlier([rows[:999], rows[999:]], np.zeros(len(rows), np.bool_), 0.8)
    assert not found[0::2].any()
    assert not found[1::2][fractions < 0.8].any()
    assert found[1::2][fractions == 1.0].all()
    assert found[1::2][fractions == 0.82].mean() > 0.99


def test_a_near_duplicate_of_a_dropped_document_alone_is_kept():
    first = np.random.default_rng(1).integers(0, 2**32 - 1, SIGNATURE_SIZE, np.uint32)
    second, third = first.copy(), first.copy()
    second[:16] = 1
    third[:32] = 2
    third[:16] = 1
    rows, none = np.stack([first, second, third]), np.zeros(3, np.bool_)
    assert near_to_earlier([rows], none, 0.8).tolist() == [False, True, False]
    # What is an exact duplicate already is nobody's first.
    exact = np.array([True, False, False])
    assert near_to_earlier([rows], exact, 0.8).tolist() == [False, False, True]
    without_words = np.full((3, SIGNATURE_SIZE), duplicates.NO_WORDS, np.uint32)
    assert not near_to_earlier([without_words], none, 0.8).any()
    assert near_to_earlier([rows[:0]], none[:0], 0.8).tolist() == []
    # The most similar candidate decides, not the mean of all candidates.
    second[64:] = 1
    rows = np.stack([first, second, first])
    assert near_to_earlier([rows], none, 0.8).tolist() == [False, False, True]


def test_pages_of_one_template_take_linear_time_and_their_copies_are_found():
    """All documents agree in a band, and the last is a copy of the first in nine tenths of its signature."""
    seconds = []
    for count in (4_000, 16_000):
        rows = np.random.default_rng(2).integers(0, 2**32 - 1, (count, SIGNATURE_SIZE), np.uint32)
        width = duplicates.band_width(0.8)
        rows[-1] = rows[0]
        rows[-1, -SIGNATURE_SIZE // 10 :] = 5
        rows[:, :width] = 7
        started = time.process_time()
        near = near_to_earlier([rows[:50], rows[50:]], np.zeros(count, np.bool_), 0.8)
        seconds.append(time.process_time() - started)
        assert np.flatnonzero(near).tolist() == [count - 1]
    # Of four times the documents; without a bound 15 to 17 times as long.
    assert seconds[1] < 8 * seconds[0]


def test_signatures_are_the_same_whatever_the_lines_and_differ_for_short_texts():
    pytest.importorskip("rensa")

    def signed(*lines):
        document = duplicates._Document(near=True)
        for line in lines:
            document.add(line)
        return document.hash(), document.signature()

    assert signed(*A) == signed("  ".join(A))
    for text in ("短い文章です。", "two words", "ก ข"):
        pair = signed(text)[1], signed(text + " もう一つ more")[1]
        short, longer = (np.frombuffer(signature, "<u4") for signature in pair)
        assert len(short) == SIGNATURE_SIZE and (short != duplicates.NO_WORDS).all()
        assert (short == longer).mean() < 1
