"""The bytes of records, judged by protobuf and by TensorFlow's parser."""

import numpy as np
import pytest

from bert_cli.data.records import example_proto
from bert_cli.data.records.example_proto import examples as example_payloads
from bert_cli.data.records.example_proto import packed
from bert_cli.data.records.formats import (
    PACKED_FEATURES,
    STATIC_FEATURES,
    DynamicPacks,
    DynamicRecords,
    dynamic_lengths,
    dynamic_payloads,
    pack_payloads,
    parse_dynamic,
    parse_packs,
    parse_static,
    static_payloads,
    token_bytes,
)
from bert_cli.data.records.tfrecord import FRAME_BYTES
from bert_cli.data.records.wire_reader import columns_of
from bert_cli.errors import DataError


def static_block(rows=50, length=128, predictions=20, vocab=30522, seed=0):
    """Arrays as they come from masking; ids of one, two and three bytes, some rows mostly padding."""
    numbers = np.random.default_rng(seed)
    ids = numbers.integers(0, vocab, (rows, length)).astype(np.int32)
    ids[:, ::3] = numbers.integers(0, 128, ids[:, ::3].shape)
    lengths = numbers.integers(1, length + 1, rows)
    held = np.arange(length) < lengths[:, None]
    return {
        "input_ids": np.where(held, ids, 0).astype(np.int32),
        "input_mask": held.astype(np.int32),
        "segment_ids": (held & (np.arange(length) > lengths[:, None] // 2)).astype(np.int32),
        "masked_lm_positions": numbers.integers(0, length, (rows, predictions)).astype(np.int32),
        "masked_lm_ids": numbers.integers(0, vocab, (rows, predictions)).astype(np.int32),
        "masked_lm_weights": numbers.integers(0, 2, (rows, predictions)).astype(np.float32),
        "next_sentence_labels": numbers.integers(0, 2, rows).astype(np.int32),
    }


def dynamic_block(rows=50, longest=128, vocab=30522, seed=0):
    numbers = np.random.default_rng(seed)
    lengths = numbers.integers(5, longest + 1, rows).astype(np.int32)
    return DynamicRecords(
        numbers.integers(0, vocab, lengths.sum()).astype(np.int32),
        lengths,
        (lengths // 2).astype(np.int32),
        numbers.integers(0, 2, rows).astype(np.int32),
    )


def examples(block, kinds=STATIC_FEATURES):
    """The same records by protobuf."""
    import tensorflow as tf

    made = []
    for row in range(len(block["input_ids"])):
        features = {}
        for name, kind in kinds.items():
            values = np.atleast_1d(block[name][row]).tolist()
            if kind == "float":
                features[name] = tf.train.Feature(float_list=tf.train.FloatList(value=values))
            else:
                features[name] = tf.train.Feature(int64_list=tf.train.Int64List(value=values))
        made.append(tf.train.Example(features=tf.train.Features(feature=features)))
    return made


@pytest.mark.parametrize(
    ("length", "predictions", "vocab"),
    [
        (128, 20, 30522),
        (8, 1, 100),
        (60, 9, 30522),
        (512, 76, 250_000),
        (128, 20, 128),
        (300, 5, 3_000_000),
    ],
)
def test_static_records_are_byte_for_byte_what_protobuf_writes(length, predictions, vocab):
    block = static_block(30, length, predictions, vocab)
    wanted = [example.SerializeToString(deterministic=True) for example in examples(block)]
    assert list(static_payloads(block)) == wanted


def test_a_block_of_one_record_and_rows_of_any_integer_type_can_be_written():
    block = static_block(1)
    small = block | {"input_mask": block["input_mask"].astype(np.uint8)}
    small |= {"input_ids": block["input_ids"].astype(np.uint16)}
    assert list(static_payloads(small)) == list(static_payloads(block))


@pytest.mark.parametrize(
    ("length", "predictions", "vocab"),
    [(128, 20, 30522), (512, 76, 250_000), (8, 1, 100), (40, 6, 3_000_000)],
)
def test_static_records_come_back_as_they_were(length, predictions, vocab):
    block = static_block(200, length, predictions, vocab)
    parsed = parse_static(list(static_payloads(block)), length, predictions)
    assert parsed.keys() == block.keys()
    for name, array in block.items():
        assert parsed[name].dtype == array.dtype
        assert np.array_equal(parsed[name], array)


def test_records_of_other_tools_are_read_whatever_the_order_of_their_features():
    import tensorflow as tf

    block = static_block(5)
    names = list(STATIC_FEATURES)[::-1]
    payloads = []
    for example in examples(block):
        # The features of a map, one after another in any order, are the serialised map.
        payload = b""
        for name in names:
            one = tf.train.Example()
            one.features.feature[name].CopyFrom(example.features.feature[name])
            payload += one.SerializeToString()
        payloads.append(payload)
    parsed = parse_static(payloads, 128, 20)
    assert all(np.array_equal(parsed[name], block[name]) for name in block)


def without_tensorflow(payloads, length, predictions, kinds=STATIC_FEATURES):
    """What is read by columns, for which other Examples are None."""
    lengths = {"input": length, "segment": length, "masked_lm": predictions, "next_sentence": 1}
    features = [
        (name, kind, next(lengths[part] for part in lengths if name.startswith(part)))
        for name, kind in kinds.items()
    ]
    return columns_of(payloads, features)


def test_records_of_ours_are_read_without_tensorflow_and_others_are_left_to_it():
    block = static_block(300)
    payloads = list(static_payloads(block))
    columns = without_tensorflow(payloads, 128, 20)
    assert all(
        np.array_equal(columns[name].reshape(block[name].shape), block[name]) for name in block
    )
    assert without_tensorflow([], 128, 20) is None
    assert without_tensorflow(payloads, 64, 20) is None
    assert without_tensorflow(payloads, 128, 19) is None
    assert without_tensorflow([*payloads, payloads[0][:-1]], 128, 20) is None
    assert without_tensorflow([*payloads, payloads[0] + b"\0"], 128, 20) is None
    # A size of more than three bytes, which is none.
    endless = bytearray(payloads[0])
    endless[4:8] = b"\xff" * 4
    assert without_tensorflow([bytes(endless)], 128, 20) is None
    # More words than three bytes can number.
    assert without_tensorflow(list(static_payloads(static_block(9, vocab=2**22))), 128, 20) is None
    # A number of two bytes more in one list, and one less in the next one.
    one, other = static_block(1), static_block(1)
    one["input_ids"][:] = 200
    other["input_ids"][:] = 5
    longer, shorter = (next(iter(static_payloads(block))) for block in (one, other))
    assert without_tensorflow([longer, shorter], 128, 20) is not None
    joined = longer.replace(bytes([200, 1]) * 128, bytes([5, 200]) * 127 + bytes([5, 1]))
    assert without_tensorflow([joined, shorter], 128, 20) is None


@pytest.mark.parametrize("length", [100, 128, 129, 300])
def test_many_records_are_read_in_blocks_where_the_first_or_another_has_shorter_lists(length):
    """Places of 128 and more are of two bytes, so lists of places have many sizes, or one in a block."""
    block = static_block(2500, length, 4)
    block["masked_lm_positions"][:1500:2] %= min(length, 128)
    block["masked_lm_positions"][1024:2048] %= 100
    block["input_ids"][2048:] %= 128
    columns = without_tensorflow(list(static_payloads(block)), length, 4)
    assert columns is not None
    for name, column in columns.items():
        assert np.array_equal(column.reshape(block[name].shape), block[name]), name


def test_a_stretch_that_ends_early_in_other_records_is_read_up_to_there():
    """As in packs: floats, and then places of which only the first record has none above 127."""
    floats = np.random.default_rng(1).random((20, 2), np.float32)
    places = np.arange(60).reshape(20, 3) * 7
    lists = [("a", "float", floats.view(np.uint8)), ("b", "int64", packed(places))]
    payloads = list(example_payloads(lists, 20))
    columns = columns_of(payloads, [("a", "float", 2), ("b", "int64", 3)])
    assert columns is not None
    assert np.array_equal(columns["a"], floats)
    assert np.array_equal(columns["b"], places)


def test_no_byte_of_a_record_is_read_as_another_than_tensorflow_reads():
    """Whatever is wrong in a record: an error, or what TensorFlow's parser makes of it."""
    block = static_block(2, length=9, predictions=2)
    whole = list(static_payloads(block))
    read = 0
    for place in range(len(whole[1])):
        for flip in (1, 16, 128):
            changed = bytearray(whole[1])
            changed[place] ^= flip
            columns = without_tensorflow([whole[0], bytes(changed)], 9, 2)
            if columns is None:
                continue
            read += 1
            wanted = parsed_by_tensorflow([whole[0], bytes(changed)], 9, 2)
            for name, column in columns.items():
                assert np.array_equal(column, wanted[name], equal_nan=True), (place, flip, name)
    assert read > 20


def parsed_by_tensorflow(payloads, length, predictions):
    import tensorflow as tf

    count = {"masked_lm": predictions, "next_sentence": 1}
    features = {
        name: tf.io.FixedLenFeature(
            [count.get(name.rpartition("_")[0], length)],
            tf.float32 if kind == "float" else tf.int64,
        )
        for name, kind in STATIC_FEATURES.items()
    }
    return {name: t.numpy() for name, t in tf.io.parse_example(payloads, features).items()}


def test_static_records_of_other_lengths_are_refused_by_name():
    payloads = list(static_payloads(static_block(3)))
    with pytest.raises(DataError, match=r"S 64, P 20.*give the lengths"):
        parse_static(payloads, 64, 20)
    with pytest.raises(DataError, match="masked_lm_"):
        parse_static(payloads, 128, 10)


def test_negative_numbers_are_not_written():
    block = static_block(3)
    block["masked_lm_ids"][1, 1] = -1
    with pytest.raises(ValueError, match="negative"):
        list(static_payloads(block))


@pytest.mark.parametrize(("longest", "vocab"), [(128, 30522), (512, 250_000), (8, 100)])
def test_dynamic_records_come_back_as_they_were_and_protobuf_reads_them(longest, vocab):
    import tensorflow as tf

    block = dynamic_block(100, longest, vocab)
    width = token_bytes(vocab)
    payloads = list(dynamic_payloads(block, width))
    parsed = parse_dynamic(payloads, width)
    for ours, given in zip(parsed, block, strict=True):
        assert np.array_equal(ours, given)
    starts = np.cumsum(block.lengths) - block.lengths
    for row in (0, 57, 99):
        example = tf.train.Example.FromString(payloads[row])
        assert example.SerializeToString(deterministic=True) == payloads[row]
        feature = example.features.feature
        text = feature["tokens"].bytes_list.value[0]
        tokens = block.tokens[starts[row] : starts[row] + block.lengths[row]]
        assert text == tokens.astype(f"<u{width}").tobytes()
        assert feature["first_length"].int64_list.value == [block.first_lengths[row]]
        labels = feature["next_sentence_labels"].int64_list.value
        assert labels == [block.next_sentence_labels[row]]


def test_a_dynamic_record_is_a_third_of_a_static_one():
    dynamic = list(dynamic_payloads(dynamic_block(200)))
    static = list(static_payloads(static_block(200)))
    assert 3 * sum(map(len, dynamic)) < sum(map(len, static))


@pytest.mark.parametrize("payload", [b"", b"\x0a", b"nonsense", b"\x0a\x05abc", bytes(40)])
def test_what_is_no_dynamic_record_is_refused(payload):
    with pytest.raises(DataError, match="not dynamic ones"):
        parse_dynamic([payload])
    with pytest.raises(DataError, match="not dynamic ones"):
        parse_dynamic(list(static_payloads(static_block(2))))


def test_ids_of_another_width_are_refused():
    odd = dynamic_block(1)._replace(
        tokens=np.arange(5, dtype=np.int32), lengths=np.array([5], np.int32)
    )
    with pytest.raises(DataError, match="not of 4 bytes"):
        parse_dynamic(list(dynamic_payloads(odd, 2)), 4)


# --- lengths without reading


@pytest.mark.parametrize("width", [2, 4])
def test_the_length_of_every_dynamic_record_follows_from_the_size_of_its_frame(width):
    lengths = np.arange(1, 1101)
    for first in (1, 127, 128, 1100):
        block = DynamicRecords(
            np.full(lengths.sum(), 60_000, np.int32),
            lengths,
            np.minimum(first, lengths),
            lengths % 2,
        )
        sizes = np.array([FRAME_BYTES + len(p) for p in dynamic_payloads(block, width)])
        assert np.array_equal(dynamic_lengths(sizes, 1100, width), lengths)
        assert np.array_equal(dynamic_lengths(sizes[:40][::-1], 40, width), lengths[:40][::-1])


def test_no_two_lengths_have_a_size_in_common_but_with_segments_of_16384_places():
    """All sizes are asked for: each of 1 to 16,383 tokens is found, in two sizes from 128 on."""
    sizes = np.arange(60, 40_000)
    for width, longest in ((2, 16_383), (4, 9_000)):
        found = []
        for size in sizes:
            try:
                found.append(int(dynamic_lengths(np.array([size]), longest, width)[0]))
            except DataError:
                continue
        assert found == sorted(found)
        counts = np.bincount(found)
        assert counts[0] == 0
        assert np.all(counts[1:128] == 1)
        assert np.all(counts[128:] == 2)
        assert len(counts) == longest + 1


def test_a_size_that_two_lengths_have_is_refused():
    lengths = np.array([16_384, 16_385], np.int32)
    block = DynamicRecords(
        np.zeros(lengths.sum(), np.int32),
        lengths,
        np.array([16_384, 1], np.int32),
        np.zeros(2, np.int32),
    )
    sizes = np.array([FRAME_BYTES + len(payload) for payload in dynamic_payloads(block)])
    assert sizes[0] == sizes[1]
    with pytest.raises(DataError, match="is not that of one dynamic record"):
        dynamic_lengths(sizes, 20_000)


@pytest.mark.parametrize("size", [-5, 0, 60, 10**9])
def test_a_size_that_no_record_has_is_refused(size):
    with pytest.raises(DataError, match=rf"a frame of {size} bytes.*up to 128 tokens"):
        dynamic_lengths(np.array([100, size]), 128)


# --- packs


def packed_block(rows=40, length=256, predictions=30, most=3, vocab=30522):
    block = static_block(rows, length, predictions, vocab)
    numbers = np.random.default_rng(1)
    return block | {
        "input_mask": numbers.integers(0, most + 1, (rows, length)).astype(np.int32),
        "position_ids": numbers.integers(0, length, (rows, length)).astype(np.int32),
        "next_sentence_positions": numbers.integers(0, length, (rows, most)).astype(np.int32),
        "next_sentence_labels": numbers.integers(0, 2, (rows, most)).astype(np.int32),
        "next_sentence_weights": numbers.integers(0, 2, (rows, most)).astype(np.float32),
    }


def test_packed_static_records_are_what_protobuf_writes_and_come_back():
    block = packed_block()
    wanted = [e.SerializeToString(deterministic=True) for e in examples(block, PACKED_FEATURES)]
    payloads = list(static_payloads(block))
    assert payloads == wanted
    parsed = parse_static(payloads, 256, 30, 3)
    assert parsed.keys() == block.keys()
    for name, array in block.items():
        assert parsed[name].dtype == array.dtype
        assert np.array_equal(parsed[name], array)
    with pytest.raises(DataError, match=r"4 sequences.*give the lengths"):
        parse_static(payloads, 256, 30, 4)


@pytest.mark.parametrize(("vocab", "first"), [(30522, 0), (250_000, 10**9)])
def test_packed_dynamic_records_come_back_as_they_were_and_protobuf_reads_them(vocab, first):
    import tensorflow as tf

    counts = np.random.default_rng(0).integers(1, 5, 60).astype(np.int32)
    sequences = dynamic_block(int(counts.sum()), 300, vocab)
    numbers = np.arange(first, first + len(sequences.lengths))
    width = token_bytes(vocab)
    payloads = list(pack_payloads(DynamicPacks(sequences, numbers, counts), width))
    parsed = parse_packs(payloads, width)
    for ours, given in zip(parsed.sequences, sequences, strict=True):
        assert np.array_equal(ours, given)
    assert np.array_equal(parsed.numbers, numbers)
    assert np.array_equal(parsed.counts, counts)
    example = tf.train.Example.FromString(payloads[7])
    assert example.SerializeToString(deterministic=True) == payloads[7]
    feature, start = example.features.feature, int(counts[:7].sum())
    rows = slice(start, start + counts[7])
    assert feature["lengths"].int64_list.value == sequences.lengths[rows].tolist()
    assert feature["first_lengths"].int64_list.value == sequences.first_lengths[rows].tolist()
    assert feature["numbers"].int64_list.value == numbers[rows].tolist()


def test_what_is_no_packed_dynamic_record_is_refused():
    block = dynamic_block(4)
    packs = DynamicPacks(block, np.arange(4), np.array([3, 1], np.int32))
    lists = dict(example_proto.entries(next(pack_payloads(packs))))
    lists[b"numbers"] = example_proto.varint(2**63) + bytes([1, 2])
    kinds = [(name.decode(), "bytes" if name == b"tokens" else "int64") for name in lists]
    columns = [(*kind, [data]) for kind, data in zip(kinds, lists.values(), strict=True)]
    (huge,) = example_proto.examples(columns, 1)
    for payload in (b"", bytes(40), huge, *dynamic_payloads(block)):
        with pytest.raises(DataError, match="not packed dynamic ones"):
            parse_packs([payload])
    with pytest.raises(DataError, match="not packed dynamic ones"):
        parse_packs(list(pack_payloads(packs, 2)), 4)
    with pytest.raises(DataError, match="not dynamic ones"):
        parse_dynamic(list(pack_payloads(packs)))
