"""The bytes of records, judged by protobuf and by TensorFlow's parser; packs, by a known answer."""

import numpy as np
import pytest
from support.corpora import assert_equal

from bert_cli.data.records import formats, tfrecord
from bert_cli.data.records.formats import LARGEST, DynamicRecords, parse_static
from bert_cli.errors import DataError


def as_columns(block):
    return {
        name: column.astype(np.float32 if name.endswith("weights") else np.int32)
        for name, column in block.items()
    }


def static_block(rows=50, length=128, predictions=20, vocab=30522):
    """Columns of random numbers, whose ids have one, two and three bytes."""
    numbers = np.random.default_rng(0)
    largest = {"masked_lm_positions": length, "input_ids": vocab, "masked_lm_ids": vocab}
    block = {
        name: numbers.integers(0, largest.get(name, 2), (rows, size))
        for name, size in formats.static_lengths(length, predictions).items()
    }
    block["input_ids"][:, ::3] %= 128
    block["next_sentence_labels"] = block["next_sentence_labels"][:, 0]
    return as_columns(block)


def dynamic_block(rows, longest=128, vocab=30522):
    numbers = np.random.default_rng(0)
    lengths = numbers.integers(5, longest + 1, rows).astype(np.int32)
    return DynamicRecords(
        numbers.integers(0, vocab, lengths.sum()).astype(np.int32),
        lengths,
        (lengths // 2).astype(np.int32),
        numbers.integers(0, 2, rows).astype(np.int32),
    )


def by_protobuf(block, order=sorted):
    """Return the same records serialized by protobuf, with their features in an order."""
    import tensorflow as tf

    payloads = []
    for row in range(len(block["input_ids"])):
        payload = b""
        for name in order(block):
            values = np.atleast_1d(block[name][row]).tolist()
            one = tf.train.Example()  # the entries of a map in any order are the serialized map
            kind = "float_list" if name.endswith("weights") else "int64_list"
            getattr(one.features.feature[name], kind).value.extend(values)
            head = len(tfrecord.varint(one.features.ByteSize())) + 1
            payload += one.SerializeToString()[head:]
        payloads.append(b"\x0a" + tfrecord.varint(len(payload)) + payload)
    return payloads


# --- static records


def test_static_records_are_the_bytes_of_protobuf_and_are_read_back():
    for length, predictions, vocab in ((128, 20, 30522), (8, 1, 100), (300, 5, 3_000_000)):
        block = static_block(30, length, predictions, vocab)
        payloads = list(formats.static_payloads(block))
        assert payloads == by_protobuf(block)
        assert_equal(parse_static(payloads, length, predictions), block)
    assert len(parse_static([], 12, 3)["input_ids"]) == 0


def test_static_records_of_other_lengths_are_rejected_by_name():
    payloads = list(formats.static_payloads(static_block(3)))
    for length, predictions, name in ((64, 20, "input_ids"), (128, 10, "masked_lm_")):
        message = rf"record 0: .*S {length}, P {predictions} \({name}.*use the lengths that"
        with pytest.raises(DataError, match=message):
            parse_static(payloads, length, predictions)


def by_tensorflow(payloads, length, predictions):
    """Return what TensorFlow parses, limited to int32; None where it refuses."""
    import tensorflow as tf

    sizes = formats.static_lengths(length, predictions).items()
    features = {
        name: tf.io.FixedLenFeature([n], tf.float32 if "weights" in name else tf.int64)
        for name, n in sizes
    }
    try:
        parsed = tf.io.parse_example(payloads, features)
    except (tf.errors.InvalidArgumentError, UnicodeDecodeError):  # its message has the bytes
        return None
    columns = {
        name: values.numpy() if "weights" in name else values.numpy().clip(-LARGEST, LARGEST)
        for name, values in parsed.items()
    }
    columns["next_sentence_labels"] = columns["next_sentence_labels"][:, 0]
    return as_columns(columns)


def test_records_of_other_tools_are_read_as_by_tensorflow():
    """Features in another order in each record, numbers of any size, and features that are not read."""
    draw = np.random.default_rng(1)
    block = static_block(20, 12, 3)
    shift = draw.integers(0, 62, 20)[:, None]
    block["masked_lm_ids"] = draw.integers(-(2**62), 2**62, (20, 3)) >> shift
    block["other_weights"] = draw.random((20, 200))
    block["a_very_long_name_" * 20] = draw.integers(0, 9, (20, 1))
    block = {n: c if "weights" in n else c.astype(np.int64) for n, c in block.items()}
    payloads = by_protobuf(block, order=lambda names: draw.permutation(sorted(names)).tolist())
    expected = by_tensorflow(payloads, 12, 3)
    assert {-LARGEST, LARGEST} < set(expected["masked_lm_ids"].ravel().tolist())
    assert_equal(parse_static(payloads, 12, 3), expected)


def test_a_record_that_tensorflow_refuses_is_refused_and_any_other_is_read_alike():
    draw = np.random.default_rng(2)
    payload = by_protobuf(static_block(1, 4, 2))[0]
    damaged = [payload[:end] for end in range(len(payload))]
    for _ in range(1000):
        data = bytearray(payload)
        data[draw.integers(len(data))] = draw.integers(256)
        damaged.append(bytes(data))
    read = 0
    for one in damaged:
        expected = by_tensorflow([one], 4, 2)
        try:
            columns = parse_static([one], 4, 2)
        except DataError:
            continue
        assert expected is not None, one
        assert_equal(columns, expected)
        read += 1
    assert 50 < read < 1000


# --- dynamic records


@pytest.mark.parametrize(("longest", "vocab"), [(512, 250_000), (8, 100)])
def test_dynamic_records_are_read_back_and_protobuf_reads_them(longest, vocab):
    import tensorflow as tf

    block = dynamic_block(100, longest, vocab)
    width = formats.token_bytes(vocab)
    payloads = list(formats.dynamic_payloads(block, width))
    for ours, original in zip(formats.parse_dynamic(payloads, width), block, strict=True):
        assert np.array_equal(ours, original)
    texts = np.split(block.tokens.astype(f"<u{width}"), np.cumsum(block.lengths)[:-1])
    for row in (0, 57, 99):
        example = tf.train.Example.FromString(payloads[row])
        assert example.SerializeToString(deterministic=True) == payloads[row]
        feature = example.features.feature
        assert feature["tokens"].bytes_list.value[0] == texts[row].tobytes()
        assert feature["first_length"].int64_list.value == [block.first_lengths[row]]
        labels = feature["next_sentence_labels"].int64_list.value
        assert labels == [block.next_sentence_labels[row]]


def test_other_bytes_than_those_of_the_format_are_rejected():
    nonsense = [b"", b"\x0a", b"nonsense", b"\x0a\x05abc", bytes(40)]
    odd = DynamicRecords(np.arange(5), *(np.array([number]) for number in (5, 2, 0)))
    others = formats.static_payloads(static_block(2))
    for width, payloads in (
        (2, [*nonsense, *others]),
        (4, formats.dynamic_payloads(odd, 2)),
    ):
        for payload in payloads:
            with pytest.raises(DataError, match="are not dynamic records with"):
                formats.parse_dynamic([payload], width)


def frame_sizes(block, width=2):
    payloads = formats.dynamic_payloads(block, width)
    return np.array([tfrecord.FRAME_BYTES + len(payload) for payload in payloads])


@pytest.mark.parametrize("width", [2, 4])
def test_the_size_of_its_frame_gives_the_length_of_every_dynamic_record(width):
    lengths = np.arange(1, 1101)
    tokens = np.full(lengths.sum(), 60_000, np.int32)
    for first in (1, 127, 128, 1100):
        block = DynamicRecords(tokens, lengths, np.minimum(first, lengths), lengths % 2)
        sizes = frame_sizes(block, width)
        assert np.array_equal(formats.dynamic_lengths(sizes, 1100, width), lengths)
        reversed_lengths = formats.dynamic_lengths(sizes[:40][::-1], 40, width)
        assert np.array_equal(reversed_lengths, lengths[:40][::-1])


def test_a_size_of_two_lengths_or_of_no_record_is_rejected():
    lengths = np.array([16_384, 16_385], np.int32)
    tokens = np.zeros(lengths.sum(), np.int32)
    block = DynamicRecords(tokens, lengths, np.array([16_384, 1], np.int32), np.zeros(2, np.int32))
    sizes = frame_sizes(block)
    assert sizes[0] == sizes[1]
    with pytest.raises(DataError, match="does not have the size of a dynamic record"):
        formats.dynamic_lengths(sizes, 20_000)
    for size in (-5, 0, 60, 10**9):
        with pytest.raises(DataError, match=rf"a frame of {size} bytes.*up to 128 tokens"):
            formats.dynamic_lengths(np.array([100, size]), 128)
