"""Features: encoding, padding, the order of a run, and the cache."""

import tracemalloc

import numpy as np
import pytest

from bert_cli.data.examples.reader import Batching
from bert_cli.data.finetune import features, readers
from bert_cli.errors import DataError

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
CLS, SEP = 2, 3


@pytest.fixture
def tokenizer(tokenizer_of):
    return tokenizer_of(PIECES)


def synthetic(lengths, **labels) -> features.Features:
    """Examples whose tokens are 100 times their number plus the position."""
    tokens = np.concatenate([100 * (n + 1) + np.arange(k) for n, k in enumerate(lengths)])
    return features.Features(
        tokens.astype(np.int32),
        (tokens % 2).astype(np.int8),
        np.cumsum(lengths),
        {"labels": np.arange(len(lengths), dtype=np.int32), **labels},
        {"label_weights": (tokens % 3).astype(np.float32)},
    )


def test_texts_and_pairs_are_encoded_and_long_ones_are_cut_and_counted(tokenizer):
    for first, second, tokens, segments, cut in (
        (["a b", "h"], None, [CLS, 5, 6, SEP, CLS, 12, SEP], [0] * 7, 0),
        (["a b", ""], ["c", "d e"], [CLS, 5, 6, SEP, 7, SEP, CLS, SEP, 8, 9, SEP], [0] * 4 + [1, 1, 0, 0, 1, 1, 1], 0),
        # Of a pair that is too long the longer text is cut.
        (["a b c d e"], ["f g"], [CLS, 5, 6, 7, SEP, 10, 11, SEP], [0] * 5 + [1] * 3, 1),
        # A second text without tokens adds no separator; its position is free for the first one.
        (["a b c d e f g h"], ["\t\u200b"], [CLS, *range(5, 11), SEP], [0] * 8, 1),
    ):  # fmt: skip
        labels = {"labels": np.arange(len(first), dtype=np.int32)}
        examples, is_cut = features.encode_texts(tokenizer, first, second, labels, max_seq_length=8)
        assert examples.tokens.tolist() == tokens
        assert (examples.segments.tolist(), len(examples)) == (segments, len(first))
        assert (is_cut.sum(), len(is_cut)) == (cut, len(first))


def test_texts_encoded_in_parts_are_the_same_in_arrays_alone(tokenizer, monkeypatch):
    first = ["a b c", "", "h", "a b c d e f g", "b"] * 400
    second = ["d", "e f", "", "a b c d e f", "g"] * 400
    complete = features.encode_texts(tokenizer, first, second, {}, max_seq_length=8)
    monkeypatch.setattr(features, "ENCODED_AT_ONCE", 7)
    tracemalloc.start()
    parts = features.encode_texts(tokenizer, first, second, {}, max_seq_length=8)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    arrays = complete[0].arrays()
    for name, column in parts[0].arrays().items():
        assert column.dtype == arrays[name].dtype and np.array_equal(column, arrays[name]), name
    assert parts[1].sum() == complete[1].sum() == 400
    # Of 14,000 tokens; small arrays have 0.1 kB each, and lists of integers would have 0.5 MB more.
    assert peak < 3 * sum(column.nbytes for column in arrays.values()) + 400_000
    nothing, cut = features.encode_texts(tokenizer, [], None, {}, max_seq_length=8)
    assert (len(nothing), len(cut), nothing.tokens.dtype) == (0, 0, np.int32)


def test_long_texts_are_read_in_windows_and_short_ones_as_ever(tokenizer):
    short = ["a b", "", "a b c d e f", "c", "a b c d"], ["c", "", "", "a b c d", "e"]
    plain, _ = features.encode_texts(tokenizer, *short, {}, max_seq_length=8)
    same, is_cut = features.encode_texts(tokenizer, *short, {}, max_seq_length=8, doc_stride=3)
    assert same.owner.tolist() == [0, 1, 2, 3, 4] and not is_cut.any()
    for name, column in plain.arrays().items():
        np.testing.assert_array_equal(same.arrays()[name], column)
    first = ["a b c d e f g h", "a", "a b c d e f g"]
    second = ["", "a b c d e f g h", "a b c d e f g"]
    labels = {"labels": np.int32([7, 8, 9])}
    sizes = {"max_seq_length": 8, "doc_stride": 3}
    made, is_cut = features.encode_texts(tokenizer, first, second, labels, **sizes)
    shown = [" ".join(PIECES[n] for n in part) for part in np.split(made.tokens, made.ends[:-1])]
    assert [text.replace("[CLS] ", "").replace(" [SEP]", ",") for text in shown] == [
        "a b c d e f,", "d e f g h,", "a, a b c d,", "a, d e f g,", "a, g h,",
        # Of a pair, the first text leaves the second one tokens for its windows.
        "a b, a b c,", "a b, d e f,", "a b, g,",
    ]  # fmt: skip
    assert made.owner.tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    assert made.labels["labels"].tolist() == [7, 7, 8, 8, 8, 9, 9, 9]
    assert is_cut.tolist() == [False, False, True]
    means = made.by_text(np.float32([[1], [2], [3], [4], [8], [6], [6], [6]]))
    assert means.tolist() == [[1.5], [5.0], [6.0]] and means.dtype == np.float32
    again = features.Features.of(made.arrays())
    assert again.owner.tolist() == made.owner.tolist() and again.fingerprint == made.fingerprint


def test_a_batch_is_padded_after_each_example():
    batch = synthetic([3, 1, 4]).batch(np.array([2, 1]), 5)
    assert batch["input_ids"].tolist() == [[300, 301, 302, 303, 0], [200, 0, 0, 0, 0]]
    assert batch["input_mask"].tolist() == [[1, 1, 1, 1, 0], [1, 0, 0, 0, 0]]
    assert batch["segment_ids"].tolist() == [[0, 1, 0, 1, 0], [0, 0, 0, 0, 0]]
    assert batch["label_weights"].tolist() == [[0, 1, 2, 0, 0], [2, 0, 0, 0, 0]]
    assert batch["labels"].tolist() == [2, 1]
    assert batch.pop("label_weights").dtype == np.float32
    assert {str(column.dtype) for column in batch.values()} == {"int32"}


def test_few_sequence_lengths_occur():
    for longest, most, length in (
        (1, 128, 32), (32, 128, 32), (33, 128, 64), (100, 128, 128), (40, 50, 50), (449, 512, 512), (448, 512, 448),
    ):  # fmt: skip
        assert features.padded_length(longest, most) == length


def test_batches_of_similar_length_have_every_example_once():
    examples = synthetic([5, 2, 9, 2, 7, 1, 8])
    batches = features.by_length(examples, 3)
    assert [examples.lengths[batch].tolist() for batch in batches] == [[9, 8, 7], [5, 2, 2], [1]]
    assert sorted(np.concatenate(batches)) == list(range(7))


def reader_of(examples, batching=(4, 2), seed=7) -> readers.FeatureReader:
    return readers.FeatureReader(examples, Batching(*batching), seed, 64)


def test_every_epoch_has_each_example_once_in_another_order():
    reader = reader_of(synthetic([3] * 8))
    labels = [reader[step]["labels"].reshape(-1).tolist() for step in range(4)]
    first, second = labels[0] + labels[1], labels[2] + labels[3]
    assert sorted(first) == sorted(second) == list(range(8))
    assert first != second
    assert reader_of(synthetic([3] * 8), seed=8)[0]["labels"].reshape(-1).tolist() != labels[0]


def divided(kind, examples, batching, group=1, steps=1):
    """Return a reader whose batches are those of two processes, one after the other."""
    complete = kind(examples, Batching(*batching), 7, 64, group)
    parts = [kind(examples, Batching(*batching, rank, 2), 7, 64, group) for rank in (0, 1)]
    for step in range(steps):
        both = [part[step] for part in parts]
        for name, column in complete[step].items():
            assert np.array_equal(np.concatenate([half[name] for half in both]), column), name
    return complete


def test_a_step_is_as_long_as_its_longest_example_in_every_process():
    examples = synthetic([40, *[3] * 7])
    complete = divided(readers.FeatureReader, examples, (4, 2), steps=6)
    coarser = reader_of(examples, (4, 4))
    for step in range(6):
        for name, column in complete[step].items():
            assert np.array_equal(coarser[step][name].ravel(), column.ravel()), name
    assert {complete[step]["input_ids"].shape[2] for step in range(6)} == {32, 64}


def test_padded_texts_have_the_batches_of_other_tasks_with_an_index_and_a_number_of_each():
    examples = synthetic([3, 9, 17, 3] * 4)
    examples.tokens[-3:] = examples.tokens[:3]  # the last text is the first
    complete = divided(readers.TextReader, examples, (8, 4), group=2)
    plain = readers.FeatureReader(examples, Batching(8, 4), 7, 64, 2)
    batch = complete[0]
    assert batch["text_index"].ravel().tolist() == list(range(16))
    assert len(set(batch["text_numbers"].ravel().tolist())) == 15
    assert all(np.array_equal(batch[name], column) for name, column in plain[0].items())
    assert complete.fingerprint == plain.fingerprint


def test_packs_have_every_text_of_a_step_once_in_every_process():
    """8 rows of two texts a step; one text fills its row."""
    examples = synthetic([64, *[3, 9, 17, 30, 5] * 7])
    reader = divided(readers.PackReader, examples, (8, 4), group=2, steps=3)
    plain = readers.FeatureReader(examples, Batching(8, 4), 7, 64, 2)
    for step in range(3):
        packs = reader[step]
        rows = {name: packs[name].reshape(-1, packs[name].shape[-1]) for name in packs}
        assert len(rows["input_ids"]) < 16
        index = packs["text_index"].reshape(rows["next_sentence_positions"].shape)
        assert sorted(index[index >= 0]) == list(range(16))
        texts = plain[step]["input_ids"].reshape(16, -1)
        for row, slot in np.argwhere(index >= 0):
            is_text = rows["input_mask"][row] == slot + 1
            expected = texts[index[row, slot], : is_text.sum()]
            assert np.array_equal(rows["input_ids"][row, is_text], expected)
            assert rows["next_sentence_positions"][row, slot] == np.flatnonzero(is_text)[0]
            assert np.array_equal(rows["position_ids"][row, is_text], np.arange(len(expected)))
        lengths = plain[step]["input_mask"].sum()
        assert (rows["input_mask"] > 0).sum() == lengths
    assert len({reader[step]["input_ids"].shape for step in range(27)}) == 1  # of nine epochs


def test_features_are_built_once_and_then_read_from_the_cache(tmp_path, capsys):
    built, folder, key = [], tmp_path / "cache", {"data": "x", "max_seq_length": 8}

    def build():
        built.append(1)
        return {"a": np.arange(3), "b": np.zeros((0, 2), np.int32)}

    first, again = (features.cached(folder, key, build) for _ in range(2))
    assert len(built) == 1
    assert all(np.array_equal(first[name], again[name]) for name in ("a", "b"))
    features.cached(folder, {**key, "max_seq_length": 9}, build)
    features.cached(None, key, build)
    assert len(built) == 3
    assert not list(folder.glob(".*"))
    for path in folder.glob("*.npz"):
        path.write_bytes(path.read_bytes()[:40])
    assert features.cached(folder, key, build)["a"].size == 3
    assert "is damaged; it is built again" in capsys.readouterr().out
    features.cached(folder, key, build)
    assert len(built) == 4
    (tmp_path / "file").touch()
    with pytest.raises(
        DataError, match=r"cache_dir .*: cannot be written .*; use another --cache-dir"
    ):
        features.cached(tmp_path / "file" / "cache", {}, build)


def test_other_labels_and_texts_cut_elsewhere_have_another_hash():
    other = synthetic([3, 4], labels=np.array([1, 0], np.int32))
    assert other.fingerprint != synthetic([3, 4]).fingerprint
    columns = ([["ab", "c"]], [["a", "bc"]], [["ab"], ["c"]])
    assert len({features.texts_hash(*texts) for texts in columns}) == 3
