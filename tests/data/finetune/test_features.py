"""Features: encoding, padding, the order of a run, and the cache."""

import numpy as np
import pytest

from bert_cli.data.finetune.features import (
    LENGTHS,
    FeatureReader,
    Features,
    arrays_of,
    by_length,
    cached,
    cut_longer,
    encode_texts,
    features_of,
    padded_length,
    texts_hash,
)
from bert_cli.data.records.tokenizer import read_tokenizer
from bert_cli.data.records.vocab import write_vocabulary
from bert_cli.errors import ConfigError, DataError

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
CLS, SEP = 2, 3


@pytest.fixture
def tokenizer(tmp_path):
    write_vocabulary(tmp_path, "".join(f"{piece}\n" for piece in PIECES).encode(), cased=False)
    return read_tokenizer(tmp_path)


def synthetic(lengths, **labels) -> Features:
    """Examples whose tokens are 100 times their number plus the position."""
    tokens = np.concatenate([100 * (n + 1) + np.arange(k) for n, k in enumerate(lengths)])
    return Features(
        tokens.astype(np.int32),
        (tokens % 2).astype(np.int8),
        np.cumsum(lengths),
        {"labels": np.arange(len(lengths), dtype=np.int32), **labels},
        {"label_weights": (tokens % 3).astype(np.float32)},
    )


def test_single_texts_are_between_cls_and_sep(tokenizer):
    labels = {"labels": np.array([1, 0], np.int32)}
    features, cut = encode_texts(tokenizer, ["a b", "h"], None, labels, max_seq_length=8)
    assert features.tokens.tolist() == [CLS, 5, 6, SEP, CLS, 12, SEP]
    assert features.segments.tolist() == [0] * 7
    assert features.ends.tolist() == [4, 7]
    assert cut == 0


def test_of_a_pair_the_second_text_is_segment_1(tokenizer):
    features, _ = encode_texts(tokenizer, ["a b", ""], ["c", "d e"], {}, max_seq_length=8)
    assert features.tokens.tolist() == [CLS, 5, 6, SEP, 7, SEP, CLS, SEP, 8, 9, SEP]
    assert features.segments.tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1]


def test_long_texts_are_cut_and_counted(tokenizer):
    features, cut = encode_texts(tokenizer, ["a b c d e", "a"], ["f g", "b"], {}, max_seq_length=8)
    assert cut == 1
    assert features.tokens[:8].tolist() == [CLS, 5, 6, 7, SEP, 10, 11, SEP]
    single, cut = encode_texts(tokenizer, ["a b c d e f g h"], None, {}, max_seq_length=8)
    assert (len(single.tokens), cut, single.tokens[-1]) == (8, 1, SEP)


def test_a_second_text_without_tokens_adds_no_separator(tokenizer):
    pairs = ["a b", "c", "a b c d e f g h"], ["", "d", "\t\u200b"]
    features, cut = encode_texts(tokenizer, *pairs, {}, max_seq_length=8)
    assert features.tokens.tolist()[:9] == [CLS, 5, 6, SEP, CLS, 7, SEP, 8, SEP]
    assert features.segments.tolist()[:9] == [0] * 7 + [1, 1]
    # Its position is free for the first one.
    assert (features.tokens.tolist()[9:], cut) == ([CLS, *range(5, 11), SEP], 1)


def one_by_one(first: int, second: int, room: int) -> tuple[int, int]:
    while first + second > room:
        if first > second:
            first -= 1
        else:
            second -= 1
    return first, second


def test_the_longer_text_loses_its_last_piece_until_both_fit():
    for first in range(12):
        for second in range(12):
            for room in range(1, 14):
                assert cut_longer(first, second, room) == one_by_one(first, second, room)


def test_a_batch_is_padded_after_each_example():
    features = synthetic([3, 1, 4])
    batch = features.batch(np.array([2, 1]), 5)
    assert batch["input_ids"].tolist() == [[300, 301, 302, 303, 0], [200, 0, 0, 0, 0]]
    assert batch["input_mask"].tolist() == [[1, 1, 1, 1, 0], [1, 0, 0, 0, 0]]
    assert batch["segment_ids"].tolist() == [[0, 1, 0, 1, 0], [0, 0, 0, 0, 0]]
    assert batch["label_weights"].tolist() == [[0, 1, 2, 0, 0], [2, 0, 0, 0, 0]]
    assert batch["labels"].tolist() == [2, 1]
    kinds = {name: str(column.dtype) for name, column in batch.items()}
    assert kinds.pop("label_weights") == "float32"
    assert set(kinds.values()) == {"int32"}


def test_few_sequence_lengths_occur():
    lengths = {
        (1, 128): 32, (32, 128): 32, (33, 128): 64, (100, 128): 128, (100, 100): 100, (40, 50): 50,
        (500, 512): 512, (449, 512): 512, (448, 512): 448, (8, 8): 8,
    }  # fmt: skip
    assert {pair: padded_length(*pair) for pair in lengths} == lengths
    assert all(length in {*LENGTHS, most} for (_, most), length in lengths.items())


def test_batches_of_similar_length_have_every_example_once():
    features = synthetic([5, 2, 9, 2, 7, 1, 8])
    batches = by_length(features, 3)
    assert [features.lengths[batch].tolist() for batch in batches] == [[9, 8, 7], [5, 2, 2], [1]]
    assert sorted(np.concatenate(batches)) == list(range(7))


def reader_of(features, **changes) -> FeatureReader:
    given = {
        "seed": 7, "examples_per_step": 4, "micro_batch_size": 2, "sequence_length": 64, **changes
    }  # fmt: skip
    return FeatureReader(features, **given)


def test_every_epoch_has_each_example_once_in_another_order():
    reader = reader_of(synthetic([3] * 8))
    labels = [reader[step]["labels"].reshape(-1).tolist() for step in range(4)]
    first, second = labels[0] + labels[1], labels[2] + labels[3]
    assert sorted(first) == sorted(second) == list(range(8))
    assert first != second
    assert reader_of(synthetic([3] * 8), seed=8)[0]["labels"].reshape(-1).tolist() != labels[0]


def test_a_step_is_as_long_as_its_longest_example_on_every_part():
    features = synthetic([40, *[3] * 7])
    complete = reader_of(features)
    parts = [reader_of(features, part=part, parts=2) for part in (0, 1)]
    seen = set()
    for step in range(6):
        both = [part[step] for part in parts]
        for name, column in complete[step].items():
            assert np.array_equal(np.concatenate([half[name] for half in both]), column), name
        seen.add(complete[step]["input_ids"].shape[2])
    assert seen == {32, 64}


def test_micro_batches_cut_the_same_stream():
    features = synthetic([3] * 9)
    one = reader_of(features)[1]["labels"].reshape(-1)
    assert np.array_equal(one, reader_of(features, micro_batch_size=4)[1]["labels"].reshape(-1))
    with pytest.raises(ConfigError, match="is no multiple of micro_batch_size 3"):
        reader_of(features, micro_batch_size=3)


def test_other_labels_are_another_fingerprint():
    features = synthetic([3, 4])
    assert features.fingerprint == synthetic([3, 4]).fingerprint
    assert features.fingerprint != synthetic([3, 4], labels=np.array([1, 0], np.int32)).fingerprint


def test_features_come_back_from_their_arrays():
    features = synthetic([3, 4])
    again = features_of({**arrays_of(features), "else": np.zeros(1)})
    assert again.fingerprint == features.fingerprint


def test_features_are_built_once_and_then_read_from_the_cache(tmp_path, capsys):
    built = []

    def build():
        built.append(1)
        return {"a": np.arange(3), "b": np.zeros((0, 2), np.int32)}

    key = {"data": "x", "max_seq_length": 8}
    first, again = (cached(tmp_path / "cache", key, build) for _ in range(2))
    assert len(built) == 1
    assert all(np.array_equal(first[name], again[name]) for name in ("a", "b"))
    cached(tmp_path / "cache", {**key, "max_seq_length": 9}, build)
    cached(None, key, build)
    assert len(built) == 3
    assert not list((tmp_path / "cache").glob(".*"))
    for path in (tmp_path / "cache").glob("*.npz"):
        path.write_bytes(path.read_bytes()[:40])
    assert cached(tmp_path / "cache", key, build)["a"].size == 3
    assert "is damaged; the features are built again" in capsys.readouterr().out
    cached(tmp_path / "cache", key, build)
    assert len(built) == 4


def test_a_cache_that_cannot_be_written_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cache_dir .*: cannot be written .*--cache-dir"):
        cached(tmp_path / "file" / "cache", {}, lambda: {"a": np.arange(3)})


def test_texts_cut_elsewhere_have_another_hash():
    assert texts_hash(["ab", "c"]) == texts_hash(["ab", "c"])
    assert len({texts_hash(["ab", "c"]), texts_hash(["a", "bc"]), texts_hash(["ab"], ["c"])}) == 3
