"""Duplicates: the first of equal texts is kept, over all shards; nearly equal ones are estimated."""

import random
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from bert_cli.config.data import PreprocessSettings
from bert_cli.data.shards.manifest import read_manifest
from bert_cli.data.text import duplicates, preprocess
from bert_cli.data.text.duplicates import (
    SIGNATURE_SIZE,
    band_width,
    equal_to_earlier,
    near_to_earlier,
)
from bert_cli.errors import ConfigError, DataError

WORDS = [
    a + b for a in ("ba", "ke", "lo", "mi", "nu", "ra") for b in ("si", "to", "va", "zu", "pe")
]


def text_of(seed, words=300):
    draw = random.Random(seed)
    return [f"{' '.join(draw.choices(WORDS, k=10))}." for _ in range(words // 10)]


def changed(lines, fraction, seed=0):
    """Return another document, with this fraction of its lines new."""
    other = text_of(f"other {seed} {lines[0]}", 10 * len(lines))
    new = random.Random(seed).sample(range(len(lines)), round(fraction * len(lines)))
    return [other[n] if n in new else line for n, line in enumerate(lines)]


def write(folder, files):
    folder.mkdir()
    for name, documents in files.items():
        text = "\n\n".join("\n".join(lines) for lines in documents)
        (folder / name).write_text(text + "\n", encoding="utf-8")
    return folder


def run(source, out, processes=1, **settings):
    settings = {"sentence_splitter": "lines", **settings}
    preprocess.run(PreprocessSettings(input=source, out=out, processes=processes, **settings))
    lines = [path.read_text() for path in sorted(out.glob("*.txt"))]
    return [text.split("\n") for file in lines for text in file.strip().split("\n\n") if text]


def spaced(lines):
    return [line.replace(" ", "  \t") for line in lines]


A, B, C, D = (text_of(seed) for seed in "abcd")


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Three files, each a shard, with a document twice in a file and across files."""
    monkeypatch.setattr(preprocess, "SHARD_BYTES", 100)
    return write(tmp_path / "in", {"1": [A, B, A], "2": [spaced(B), C], "3": [C, D, A]})


@pytest.mark.parametrize("processes", [1, 2])
def test_equal_documents_are_dropped_and_the_first_is_kept(source, tmp_path, processes, capsys):
    assert run(source, tmp_path / "all") == [A, B, A, B, C, C, D, A]
    assert run(source, tmp_path / "out", processes, deduplicate=True) == [A, B, C, D]
    manifest = read_manifest(tmp_path / "out")
    assert manifest["counts"]["duplicates"] == 4
    assert manifest["counts"]["near_duplicates"] == 0
    assert manifest["counts"]["documents"] == 4
    assert manifest["counts"]["documents_without_text"] == 0
    assert manifest["notes"] == ["dropped are 4 documents that an earlier one equals"]
    assert "preprocess: dropped are 4 documents that" in capsys.readouterr().out


def test_documents_without_text_are_no_duplicates(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    rows = ["null", '""', '" "', '"One."', '"..."', '"..."']
    (folder / "a.jsonl").write_text("".join(f'{{"text": {row}}}\n' for row in rows))
    assert run(folder, tmp_path / "out", deduplicate=True) == [["One."]]
    counts = read_manifest(tmp_path / "out")["counts"]
    assert (counts["documents_without_text"], counts["duplicates"]) == (4, 1)


def test_a_second_run_uses_the_hashes_of_the_first(source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    whole = run(source, out, deduplicate=True)
    (out / "text_00001.txt").unlink()
    monkeypatch.setattr(duplicates, "_Document", None)  # not one document is hashed again
    assert run(source, out, deduplicate=True) == whole


def test_nearly_equal_documents_are_dropped_from_the_threshold_on(tmp_path, capsys):
    pytest.importorskip("rensa")
    # A tenth of the lines new leaves about 75 % of the runs, half of them 25 %.
    close, far = changed(A, 0.1), changed(A, 0.5)
    folder = write(tmp_path / "in", {"1": [A, B], "2": [close, far, B, C]})
    assert run(folder, tmp_path / "tight", near_duplicates=0.9) == [A, B, close, far, C]
    assert run(folder, tmp_path / "usual", near_duplicates=0.5) == [A, B, far, C]
    assert "earlier one equals, and 1 that an earlier one nearly equals" in capsys.readouterr().out
    manifest = read_manifest(tmp_path / "usual")
    assert manifest["counts"]["duplicates"] == manifest["counts"]["near_duplicates"] == 1
    assert manifest["settings"]["near_duplicates"] == 0.5


def test_without_the_package_the_error_names_the_extra(source, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "rensa", None)
    # Before anything is begun, so also before NLTK is asked for Punkt's data.
    monkeypatch.setattr(preprocess, "choose_punkt", None)
    for splitter in ("lines", "punkt"):
        with pytest.raises(ConfigError, match=r"needs the extra 'near-duplicates'; pip install"):
            run(source, tmp_path / "out", near_duplicates=0.8, sentence_splitter=splitter)
    assert not (tmp_path / "out").exists()
    assert run(source, tmp_path / "out", deduplicate=True) == [A, B, C, D]


def test_equal_hashes_are_those_that_a_dictionary_finds():
    draw = np.random.default_rng(0)
    pairs = draw.integers(0, 30, (2000, 2), np.uint64)
    seen, expected = {(0, 0)}, []
    for pair in map(tuple, pairs.tolist()):
        expected.append(pair in seen and pair != (0, 0))
        seen.add(pair)
    assert sum(expected) > 800
    assert equal_to_earlier(pairs.reshape(-1)).tolist() == expected


def test_a_million_documents_take_no_more_than_60_megabytes():
    hashes = np.random.default_rng(0).integers(1, 2**63, 2_000_000, np.uint64)
    tracemalloc.start()
    try:
        assert not equal_to_earlier(hashes).any()
        assert tracemalloc.get_traced_memory()[1] + hashes.nbytes < 60e6
    finally:
        tracemalloc.stop()


def signature_like(base, fraction, draw):
    """Return a signature that agrees with `base` in this fraction of its numbers."""
    other = draw.integers(0, 2**32 - 1, SIGNATURE_SIZE, np.uint32)
    is_same = draw.permutation(SIGNATURE_SIZE) < round(fraction * SIGNATURE_SIZE)
    return np.where(is_same, base, other)


def test_the_bands_find_the_pairs_above_the_threshold_and_no_others():
    """Of the pairs at the threshold at least 99 in 100 are found, and none below is dropped."""
    draw = np.random.default_rng(0)
    rows = []
    fractions = draw.choice([0.3, 0.7, 0.82, 1.0], 1500)
    for fraction in fractions:
        base = draw.integers(0, 2**32 - 1, SIGNATURE_SIZE, np.uint32)
        rows += [base, signature_like(base, fraction, draw)]
    rows = np.array(rows, np.uint32)
    found = near_to_earlier([rows[:999], rows[999:]], np.zeros(len(rows), np.bool_), 0.8)
    assert not found[0::2].any()
    assert not found[1::2][fractions < 0.8].any()
    assert found[1::2][fractions == 1.0].all()
    assert found[1::2][fractions == 0.82].mean() > 0.99


def test_a_near_duplicate_of_a_dropped_document_alone_is_kept():
    draw = np.random.default_rng(1)
    first = draw.integers(0, 2**32 - 1, SIGNATURE_SIZE, np.uint32)
    second, third = first.copy(), first.copy()
    second[:16] = 1
    third[:32] = 2
    third[:16] = 1
    rows = np.stack([first, second, third])
    none = np.zeros(3, np.bool_)
    assert near_to_earlier([rows], none, 0.8).tolist() == [False, True, False]
    # What is an exact duplicate already is nobody's first.
    exact = np.array([True, False, False])
    assert near_to_earlier([rows], exact, 0.8).tolist() == [False, False, True]


def test_documents_without_words_and_empty_inputs_are_nobodys_duplicates():
    rows = np.full((3, SIGNATURE_SIZE), duplicates.NO_WORDS, np.uint32)
    assert not near_to_earlier([rows], np.zeros(3, np.bool_), 0.8).any()
    assert near_to_earlier([rows[:0]], np.zeros(0, np.bool_), 0.8).tolist() == []
    assert equal_to_earlier(np.zeros(0, np.uint64)).tolist() == []


def test_a_band_has_the_largest_width_that_finds_enough():
    for threshold in (0.05, 0.5, 0.8, 0.95, 1.0):
        width = band_width(threshold)

        def recall(width, threshold=threshold):
            return 1 - (1 - threshold**width) ** (SIGNATURE_SIZE // width)

        assert recall(width) >= 0.99 or width == 1
        assert (
            width == SIGNATURE_SIZE
            or recall(width + 1) < 0.99
            or SIGNATURE_SIZE // (width + 1) == 0
        )


def test_signatures_are_the_same_in_every_process_and_whatever_the_lines(tmp_path):
    pytest.importorskip("rensa")
    text = duplicates._Document(near=True)
    for line in A:
        text.add(line)
    one = duplicates._Document(near=True)
    one.add("  ".join(A))
    assert (one.hash(), one.signature()) == (text.hash(), text.signature())
    program = (
        "import sys; from bert_cli.data.text.duplicates import _Document; "
        "text = _Document(near=True); text.add(sys.argv[1]); print(text.signature().hex())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, " ".join(A)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == text.signature().hex()
    assert len(text.signature()) == 4 * SIGNATURE_SIZE


@pytest.mark.parametrize("text", ["短い文章です。", "two words", "ก ข"])
def test_short_texts_and_scripts_without_spaces_have_different_signatures(text):
    pytest.importorskip("rensa")
    found = []
    for line in (text, text + " もう一つ more"):
        one = duplicates._Document(near=True)
        one.add(line)
        found.append(np.frombuffer(one.signature(), "<u4"))
    assert (found[0] != duplicates.NO_WORDS).all()
    assert (found[0] == found[1]).mean() < 1


@pytest.mark.parametrize("more", ["b.txt", "b.jsonl"])
def test_inputs_that_have_changed_are_refused_with_the_folder_to_remove(tmp_path, more):
    given = {"input": tmp_path / "in", "out": tmp_path / "out", "processes": 1}
    settings = PreprocessSettings(**given, deduplicate=True, sentence_splitter="lines")
    (tmp_path / "in").mkdir()
    article = '<doc id="1" url="" title="A">\nA\n\nText.\n</doc>\n'
    (tmp_path / "in" / "a.txt").write_text(article if more == "b.jsonl" else "Text.\n")
    preprocess.run(settings)
    (tmp_path / "in" / more).write_text('{"text": "Text."}' if more == "b.jsonl" else "More.\n")
    message = rf"was made from other inputs .*than there are now.*; remove {tmp_path}/out or choose"
    with pytest.raises(DataError, match=message):
        preprocess.run(settings)
