"""The index: judged by the tfrecord package, refused when corrupt, trusted only when it fits."""

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from support.corpora import make_corpus
from support.processes import index_of_tfrecord_package

from bert_cli.config.data import IndexSettings
from bert_cli.data.records.corpus import read_corpus
from bert_cli.data.records.index import (
    DESCRIPTION,
    read_index,
    record_files,
    run,
    write_corpus,
    write_index,
)
from bert_cli.data.records.tfrecord import RecordWriter
from bert_cli.errors import ConfigError, DataError

DESCRIBED = {
    "format": "static",
    "sequence_length": 8,
    "mask_tokens": 2,
    "masked_lm_prob": 0.15,
    "whole_word_masking": False,
    "vocab_size": 30,
    "vocab_sha256": "ab" * 32,
    "token_bytes": 2,
    "special_ids": {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4},
    "tokenizer": {"do_lower_case": True},
}
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "wiki", "##pedia", "and", "so", "on"]


def write_records(path: Path, count: int, seed: int = 0) -> list[int]:
    """Payloads of many lengths, from none to longer than a read buffer; returns their lengths."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 3000, count).tolist()
    lengths[count // 2] = (1 << 20) + 17
    with RecordWriter(path) as writer:
        for length in lengths:
            writer.write(rng.bytes(length))
    return [int(length) for length in lengths]


def write_foreign(folder: Path, first_id: int = 2) -> None:
    """Records as another tool writes them: by TensorFlow, features in any order, no index."""
    import tensorflow as tf

    def ints(*values: int) -> "tf.train.Feature":
        return tf.train.Feature(int64_list=tf.train.Int64List(value=values))

    folder.mkdir(exist_ok=True)
    for name in ("b.tfrecord", "a.tfrecord"):
        with tf.io.TFRecordWriter(str(folder / name)) as writer:
            for number in range(3):
                features = {
                    "next_sentence_labels": ints(number % 2),
                    "input_ids": ints(first_id, 5, 4, 3, 7, 8, 3, 0),
                    "input_mask": ints(1, 1, 1, 1, 1, 1, 1, 0),
                    "segment_ids": ints(0, 0, 0, 0, 1, 1, 1, 0),
                    "masked_lm_positions": ints(2, 0),
                    "masked_lm_ids": ints(6, 0),
                    "masked_lm_weights": tf.train.Feature(
                        float_list=tf.train.FloatList(value=[1.0, 0.0])
                    ),
                }
                example = tf.train.Example(features=tf.train.Features(feature=features))
                writer.write(example.SerializeToString())


def settings(folder: Path, vocab: Path | None = None) -> IndexSettings:
    return IndexSettings(folder=folder, vocab=None if vocab is None else str(vocab), processes=2)


def test_the_index_is_the_one_the_tfrecord_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord"
    lengths = write_records(path, 200)
    while_writing = (tmp_path / "x.index").read_bytes()
    (tmp_path / "x.index").unlink()
    assert write_index(path) == path.stat().st_size
    ours = (tmp_path / "x.index").read_bytes()
    assert ours == index_of_tfrecord_package(path).encode() == while_writing
    offsets = read_index(path)
    assert offsets is not None
    assert np.array_equal(np.diff(offsets), np.array(lengths) + 16)


def test_a_file_of_one_record_or_of_none_is_indexed_too(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "one.tfrecord") as writer:
        writer.write(b"alone")
    (tmp_path / "none.tfrecord").touch()
    for name, offsets in {"one": [0, 21], "none": [0]}.items():
        write_index(tmp_path / f"{name}.tfrecord")
        found = read_index(tmp_path / f"{name}.tfrecord")
        assert found is not None
        assert found.tolist() == offsets


@pytest.mark.parametrize("byte", [0, 1, 7, 8, 11])
def test_a_corrupt_frame_is_refused_by_file_and_byte(tmp_path: Path, byte: int) -> None:
    path = tmp_path / "x.tfrecord"
    lengths = write_records(path, 20)
    start = sum(lengths[:7]) + 16 * 7
    data = bytearray(path.read_bytes())
    data[start + byte] ^= 0x40
    path.write_bytes(data)
    (tmp_path / "x.index").unlink()
    with pytest.raises(DataError, match=rf"x\.tfrecord \(byte {start}\): no record starts here"):
        write_index(path)
    assert [path.name for path in tmp_path.iterdir()] == ["x.tfrecord"]


def test_a_file_cut_at_any_byte_of_its_last_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord"
    with RecordWriter(path) as writer:
        for payload in (b"first", b"second!"):
            writer.write(payload)
    data = path.read_bytes()
    for end in range(22, len(data)):
        path.write_bytes(data[:end])
        with pytest.raises(DataError, match=r"x\.tfrecord \(byte 21\): the file of .* is cut"):
            write_index(path)


def test_an_index_that_does_not_fit_its_file_is_of_no_use(tmp_path: Path) -> None:
    path, index = tmp_path / "x.tfrecord", tmp_path / "x.index"
    write_records(path, 5)
    good = index.read_text()
    assert read_index(path) is not None
    lines = good.splitlines(keepends=True)
    wrong = {
        "one line is missing": "".join(lines[:-1]),
        "its first line is missing": "".join(lines[1:]),
        "two lines changed places": "".join([lines[1], lines[0], *lines[2:]]),
        "it is no text of numbers": "offsets and sizes",
        "it has one column": "".join(line.split()[0] + "\n" for line in lines),
        "it is empty": "",
    }
    for why, text in wrong.items():
        index.write_text(text)
        assert read_index(path) is None, why
    index.write_text(good)
    assert read_index(path) is not None
    os.utime(index, ns=(0, path.stat().st_mtime_ns - 1))
    assert read_index(path) is None, "it is older than its records"
    index.unlink()
    assert read_index(path) is None, "it is missing"


def test_an_index_does_not_fit_a_file_that_grew_or_shrank_and_kept_its_time(tmp_path: Path) -> None:
    """As copies do that keep times: only the sizes tell."""
    path, index = tmp_path / "x.tfrecord", tmp_path / "x.index"
    write_records(path, 5)
    good, time_kept = path.read_bytes(), path.stat().st_mtime_ns
    more = RecordWriter(tmp_path / "more.tfrecord")
    with more:
        more.write(b"one more")
    for changed in (good + (tmp_path / "more.tfrecord").read_bytes(), good[:-24]):
        path.write_bytes(changed)
        os.utime(path, ns=(time_kept, time_kept))
        assert index.stat().st_mtime_ns >= time_kept
        assert read_index(path) is None
        with pytest.raises(DataError, match="does not fit it"):
            write_corpus(tmp_path, DESCRIBED)


def test_a_corpus_lists_its_files_by_name_and_every_place(tmp_path: Path) -> None:
    counts = {"b.tfrecord": 4, "a.tfrecord": 3, "sub/c.tfrecord": 5}
    (tmp_path / "sub").mkdir()
    (tmp_path / ".partial").mkdir()
    for name, count in counts.items():
        write_records(tmp_path / name, count)
    write_records(tmp_path / ".partial" / "half.tfrecord", 2)
    corpus = write_corpus(tmp_path, DESCRIBED)
    assert [file["name"] for file in corpus["files"]] == sorted(counts)
    assert [file["records"] for file in corpus["files"]] == [3, 4, 5]
    assert corpus["records"] == 12
    assert corpus == read_corpus(tmp_path) == json.loads((tmp_path / "corpus.json").read_text())
    assert {key: corpus[key] for key in DESCRIPTION} == DESCRIBED
    offsets = np.fromfile(tmp_path / "corpus.offsets", "<u8")
    each = [read_index(path) for path in record_files(tmp_path)]
    assert offsets.tolist() == [int(n) for found in each if found is not None for n in found[:-1]]


def test_the_fingerprint_changes_with_what_the_records_are(tmp_path: Path) -> None:
    write_records(tmp_path / "a.tfrecord", 4)
    first = write_corpus(tmp_path, DESCRIBED)["fingerprint"]
    assert write_corpus(tmp_path, DESCRIBED)["fingerprint"] == first
    others = {first}
    changes = {
        "sequence_length": 9,
        "mask_tokens": 3,
        "vocab_sha256": "cd" * 32,
        # What decides the masks of dynamic records, whose bytes do not show it.
        "masked_lm_prob": 0.3,
        "whole_word_masking": not DESCRIBED["whole_word_masking"],
        "special_ids": {**DESCRIBED["special_ids"], "mask": 9},
        "token_bytes": 4,
    }
    for key, value in changes.items():
        others.add(write_corpus(tmp_path, DESCRIBED | {key: value})["fingerprint"])
    write_records(tmp_path / "b.tfrecord", 4)
    others.add(write_corpus(tmp_path, DESCRIBED)["fingerprint"])
    write_records(tmp_path / "b.tfrecord", 4, seed=1)
    others.add(write_corpus(tmp_path, DESCRIBED)["fingerprint"])
    assert len(others) == 10


def test_an_old_corpus_does_not_stand_for_records_that_are_being_made_again(tmp_path: Path) -> None:
    write_records(tmp_path / "a.tfrecord", 4)
    write_corpus(tmp_path, DESCRIBED)
    (tmp_path / ".done").mkdir()
    for refused in (lambda: read_corpus(tmp_path), lambda: run(settings(tmp_path))):
        with pytest.raises(DataError, match="has not finished in it"):
            refused()


def test_no_corpus_is_written_over_a_stale_index_and_the_old_one_goes(tmp_path: Path) -> None:
    write_records(tmp_path / "a.tfrecord", 4)
    write_corpus(tmp_path, DESCRIBED)
    (tmp_path / "a.index").write_text("0 5\n")
    with pytest.raises(DataError, match="run `bert index"):
        write_corpus(tmp_path, DESCRIBED)
    assert not (tmp_path / "corpus.json").exists()


def test_folders_without_records_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        run(settings(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"no \.tfrecord files"):
        run(settings(tmp_path))
    (tmp_path / "a.tfrecord").touch()
    (tmp_path / "a.index").touch()
    with pytest.raises(DataError, match="no records"):
        write_corpus(tmp_path, DESCRIBED)
    assert not (tmp_path / "corpus.json").exists()


def test_bert_index_makes_only_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "abc":
        write_records(tmp_path / f"{name}.tfrecord", 6)
    before = write_corpus(tmp_path, DESCRIBED)
    kept = (tmp_path / "a.index").stat().st_mtime_ns
    whole = (tmp_path / "b.index").read_bytes()
    (tmp_path / "b.index").unlink()
    (tmp_path / "corpus.offsets").unlink()
    run(settings(tmp_path))
    assert (tmp_path / "a.index").stat().st_mtime_ns == kept
    assert (tmp_path / "b.index").read_bytes() == whole
    assert read_corpus(tmp_path) == before
    line = capsys.readouterr().out
    assert line.startswith("index: 18 records")
    assert line.count("\n") == 1
    manifest = json.loads((tmp_path / "index_manifest.json").read_text())
    assert manifest["counts"]["records"] == 18
    assert [shard["indexed"] for shard in manifest["shards"]] == [False, True, False]
    assert manifest["versions"]["numpy"] == np.__version__


def test_a_corrupt_file_stops_bert_index_and_once_mended_it_goes_on(tmp_path: Path) -> None:
    for name in "ab":
        write_records(tmp_path / f"{name}.tfrecord", 6)
    data = (tmp_path / "b.tfrecord").read_bytes()
    (tmp_path / "b.tfrecord").write_bytes(data[:-1])
    (tmp_path / "corpus.json").write_text(
        json.dumps(DESCRIBED | {"files": [], "records": 0, "fingerprint": ""})
    )
    with pytest.raises(DataError, match=r"b\.tfrecord \(byte \d+\)"):
        run(settings(tmp_path))
    (tmp_path / "b.tfrecord").write_bytes(data)
    run(settings(tmp_path))
    assert read_corpus(tmp_path)["records"] == 12


def test_records_of_another_tool_are_described_by_the_first_and_the_vocabulary(
    tmp_path: Path,
) -> None:
    folder, vocab = tmp_path / "records", tmp_path / "vocab.txt"
    write_foreign(folder)
    vocab.write_text("\n".join(PIECES) + "\n")
    run(settings(folder, vocab))
    corpus = read_corpus(folder)
    assert corpus["records"] == 6
    assert (corpus["format"], corpus["sequence_length"], corpus["mask_tokens"]) == ("static", 8, 2)
    assert corpus["vocab_size"] == 10
    assert corpus["special_ids"] == {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
    assert (folder / "vocab.txt").read_bytes() == vocab.read_bytes()
    assert json.loads((folder / "tokenizer_config.json").read_text())["do_lower_case"] is True
    run(settings(folder))
    assert read_corpus(folder) == corpus
    run(settings(folder, vocab))
    (tmp_path / "other.txt").write_text("\n".join([*PIECES, "More"]) + "\n")
    with pytest.raises(DataError, match="is not the vocabulary"):
        run(settings(folder, tmp_path / "other.txt"))


def test_a_vocabulary_with_capital_letters_is_a_cased_one(tmp_path: Path) -> None:
    folder, vocab = tmp_path / "records", tmp_path / "vocab.txt"
    write_foreign(folder)
    vocab.write_text("\n".join([*PIECES, "Wiki"]) + "\n")
    run(settings(folder, vocab))
    assert read_corpus(folder)["tokenizer"]["do_lower_case"] is False
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"do_lower_case": False}))
    vocab.write_text("\n".join(PIECES) + "\n")
    (folder / "corpus.json").unlink()
    run(settings(folder, vocab))
    assert read_corpus(folder)["tokenizer"]["do_lower_case"] is False


def test_foreign_records_need_the_right_vocabulary(tmp_path: Path) -> None:
    folder, vocab = tmp_path / "records", tmp_path / "vocab.txt"
    write_foreign(folder)
    with pytest.raises(DataError, match="--vocab"):
        run(settings(folder))
    vocab.write_text("\n".join(PIECES[1:]))
    with pytest.raises(DataError, match=r"\[PAD\]"):
        run(settings(folder, vocab))
    vocab.write_text("\n".join(["a", *PIECES]))
    with pytest.raises(DataError, match=r"starts with id 2 and goes up to 8, while \[CLS\] is 3"):
        run(settings(folder, vocab))
    vocab.write_text("\n".join(PIECES[:7]))
    with pytest.raises(DataError, match=r"\[CLS\] is 2 of 7"):
        run(settings(folder, vocab))
    with pytest.raises((DataError, ConfigError)):
        run(settings(folder, tmp_path / "no.txt"))
    assert not (folder / "corpus.json").exists()


def test_files_that_hold_no_bert_records_are_refused(tmp_path: Path) -> None:
    import tensorflow as tf

    (tmp_path / "vocab.txt").write_text("\n".join(PIECES))
    feature = {"image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"x"]))}
    example = tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()
    for payload, words in [(example, "has no input_ids.*only image"), (b"\xff\xff", "Example")]:
        with RecordWriter(tmp_path / "a.tfrecord") as writer:
            writer.write(payload)
        with pytest.raises(DataError, match=words):
            run(settings(tmp_path, tmp_path / "vocab.txt"))


def test_an_unfinished_folder_of_bert_tokenize_is_not_passed_off_as_whole(tmp_path: Path) -> None:
    write_records(tmp_path / "a.tfrecord", 4)
    (tmp_path / ".done").mkdir()
    with pytest.raises(DataError, match="`bert tokenize` has not finished"):
        run(settings(tmp_path, tmp_path))


@pytest.mark.parametrize("text", ["{", "{}", '{"format": "static"}'])
def test_a_broken_corpus_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "corpus.json").write_text(text)
    with pytest.raises(DataError, match=r"corpus\.json"):
        read_corpus(tmp_path)


def test_indexing_reads_frames_much_faster_than_records_could_be_parsed(tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord"
    with RecordWriter(path) as writer:
        for number in range(100_000):
            writer.write(b"x" * (600 + number % 50))
    began = time.monotonic()
    write_index(path)
    assert time.monotonic() - began < 2.0  # 0.06 s when nothing else runs


def test_an_unfinished_folder_names_the_step_that_has_begun_in_it(tmp_path: Path) -> None:
    write_records(tmp_path / "a.tfrecord", 4)
    (tmp_path / ".done").mkdir()
    (tmp_path / ".done" / "settings.json").write_text('{"step": "pack", "settings": {}}')
    with pytest.raises(DataError, match="`bert pack` has not finished in it"):
        read_corpus(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "3", '{"format": "static"}'])
def test_a_broken_corpus_json_of_a_step_is_written_again_by_that_step(
    tmp_path: Path, text: str
) -> None:
    write_records(tmp_path / "a.tfrecord", 4)
    (tmp_path / ".done").mkdir()
    (tmp_path / ".done" / "settings.json").write_text('{"step": "pack", "settings": {}}')
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "corpus.json").write_text(text)
    with pytest.raises(DataError, match=r"remove it and run the same `bert pack` again"):
        run(settings(tmp_path))


def test_a_broken_corpus_json_of_another_tools_records_is_written_again_with_their_vocabulary(
    tmp_path: Path,
) -> None:
    write_foreign(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join(PIECES))
    run(settings(tmp_path, tmp_path / "vocab.txt"))
    (tmp_path / "corpus.json").write_text("{")
    with pytest.raises(
        DataError, match=rf"remove it and run `bert index {tmp_path} --vocab (\S+)`"
    ) as no:
        run(settings(tmp_path))
    vocab = str(no.value).partition("--vocab ")[2].partition("`")[0]
    (tmp_path / "corpus.json").unlink()
    run(settings(tmp_path, Path(vocab)))
    assert read_corpus(tmp_path)["records"]


def test_how_often_text_was_gone_through_is_kept_and_changes_no_fingerprint(tmp_path: Path) -> None:
    write_records(tmp_path / "a.tfrecord", 4)
    plain = write_corpus(tmp_path, DESCRIBED)
    told = write_corpus(tmp_path, DESCRIBED | {"duplication_factor": 5})
    assert told["fingerprint"] == plain["fingerprint"]
    run(settings(tmp_path))
    assert read_corpus(tmp_path)["duplication_factor"] == 5


def test_bert_index_takes_no_vocabulary_over_that_was_changed_beside_the_records(
    tmp_path: Path,
) -> None:
    folder = make_corpus(tmp_path / "c", "static", [5])
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace("{", '{"model_max_length": 16,', 1))
    run(settings(folder))
    (folder / "vocab.txt").write_text((folder / "vocab.txt").read_text() + "more\n")
    with pytest.raises(DataError, match=r"vocab\.txt: is not the vocabulary .*; bring it back"):
        run(settings(folder))
