"""Numbers as text in messages."""

from bert_cli.text import count, format_bytes, format_duration, remarks_of


def test_a_noun_is_in_the_plural_but_after_one():
    numbers = {"device": 1, "match": 2, "micro-batch": 1000, "loss": 0, "process": 1}
    texts = ["1 device", "2 matches", "1,000 micro-batches", "0 losses", "1 process"]
    assert [count(number, noun) for noun, number in numbers.items()] == texts
    remarks = {"-DOCSTART- line{s}, left out": 1, "word{s} cut": 1001}
    text = "; 1 -DOCSTART- line, left out; 1,001 words cut"
    assert remarks_of(remarks) == text


def test_bytes_are_written_in_the_largest_unit():
    sizes = (0, 999, 9_949, 12_345, 999_600, 5_000_000_000, 5_000_000_000_000)
    texts = ["0 bytes", "999 bytes", "9.9 kB", "12.3 kB", "999.6 kB", "5.0 GB", "5.0 TB"]
    assert [format_bytes(size) for size in sizes] == texts
    # The unit is that of the rounded number.
    sizes = (951, 999.6, 999_949, 999_950, 960_000_000, 999_999_999, 999_999_999_999, 1.2e16)
    texts = ["951 bytes", "1.0 kB", "999.9 kB", "1.0 MB", "960.0 MB"]
    texts += ["1.0 GB", "1.0 TB", "12000.0 TB"]
    assert [format_bytes(size) for size in sizes] == texts


def test_durations_have_the_units_that_a_reader_needs():
    durations = (0, 78e-6, 0.456, 14.7, 41.62, 59.6, 200, 3600, 18_120, 86_400, 273_600)
    texts = ["0 s", "78 us", "456 ms", "14.7 s", "41.6 s", "1 min 00 s"]
    texts += ["3 min 20 s", "1 h 00 min", "5 h 02 min", "1 d 0 h", "3 d 4 h"]
    assert [format_duration(seconds) for seconds in durations] == texts
    durations = (0.9994, 0.9996, 0.0009996, 0.001, 9.996e-6, 59.4, 59.96)
    texts = ["999 ms", "1 s", "1 ms", "1 ms", "10 us", "59.4 s", "1 min 00 s"]
    assert [format_duration(seconds) for seconds in durations] == texts
