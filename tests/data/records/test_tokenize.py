"""Sentences to records: what is in the files, that it is the recipe's, and that it is repeatable."""

import hashlib
import json
import random
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from support.processes import index_of_tfrecord_package

from bert_cli.config.data import Masking, TokenizeSettings
from bert_cli.data.records import tokenize
from bert_cli.data.records.corpus import read_corpus
from bert_cli.data.records.formats import parse_dynamic, parse_static
from bert_cli.data.records.groups import encode_groups, plan_groups
from bert_cli.data.records.masking import TokenKinds, mask_tokens
from bert_cli.data.records.random_bits import row_keys
from bert_cli.data.records.tfrecord import read_payload
from bert_cli.data.records.vocab import SPECIAL_TOKENS, read_vocabulary
from bert_cli.data.records.wordpiece import Encoder
from bert_cli.data.shards.manifest import read_manifest
from bert_cli.data.text.files import Reading, recognise
from bert_cli.errors import ConfigError, DataError

S, P = 64, 10
SYLLABLES = ["ba", "ke", "lo", "mi", "nu", "ra", "si", "to", "va", "zu"]
WORDS = [a + b for a in SYLLABLES for b in SYLLABLES]
PIECES = [
    *["[unused0]", "[PAD]", "[UNK]", "[MASK]", "[CLS]", "[SEP]"],
    *[".", ",", "[", "]", "sep", "cls"],
    *[w for w in WORDS if not w.endswith("zu")],
    *["##zu", *SYLLABLES],
]


def write_text(folder, files=3, documents=20, seed=0):
    """Documents of sentences in which no two sentences are equal, a blank line between them."""
    draw = random.Random(seed)
    folder.mkdir(exist_ok=True)
    for number in range(files):
        lines = []
        for _ in range(documents):
            for _ in range(draw.randint(2, 40)):
                words = draw.choices(WORDS, k=draw.randint(6, 30))
                lines.append(" ".join(words).capitalize() + ".")
            lines.append("")
        (folder / f"text_{number:02d}").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenize")
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    write_text(folder / "sentences")
    return folder


def settings(home, out, **changed):
    given = {
        "input": home / "sentences",
        "out": out,
        "vocab": str(home / "vocab.txt"),
        "sequence_length": S,
        "mask_tokens": P,
        "processes": 1,
    }
    return TokenizeSettings(**(given | changed))


def make(home, out, **changed):
    tokenize.run(settings(home, out, **changed))
    return out


@pytest.fixture(scope="module")
def static(home):
    return make(home, home / "static")


@pytest.fixture(scope="module")
def dynamic(home):
    return make(home, home / "dynamic", masking="dynamic")


def payloads(folder):
    found = []
    for entry in read_corpus(folder)["files"]:
        path = folder / entry["name"]
        data = path.read_bytes()
        index = np.loadtxt(path.with_suffix(".index"), np.int64, ndmin=2)
        assert len(index) == entry["records"]
        found += [read_payload(data, int(offset), path) for offset in index[:, 0]]
    return found


def static_arrays(folder, length=S, predictions=P):
    return parse_static(payloads(folder), length, predictions)


def hashes(folder):
    """What every file holds; the manifest has times in it."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.is_file() and path.name != "manifest.json"
    }


def unmasked(arrays):
    ids = arrays["input_ids"].copy()
    rows, places = np.nonzero(arrays["masked_lm_weights"])
    positions = arrays["masked_lm_positions"][rows, places]
    ids[rows, positions] = arrays["masked_lm_ids"][rows, places]
    return ids


def encode_group(paths, encoder):
    parts = [recognise(path, Reading()) for path in paths]
    (group,) = encode_groups(parts, encoder, Reading(), limit=10**9, least=2)
    return group


def group_of(home, file):
    encoder = Encoder(read_vocabulary(home / "vocab.txt").ids, cased=False)
    return encode_group([home / "sentences" / file], encoder)


# --- what is in the records


def test_the_folder_holds_records_indices_tokenizer_and_a_description(home, static):
    names = {path.name for path in static.iterdir() if not path.name.startswith(".")}
    records = {f"wiki_00{n}.{kind}" for n in range(3) for kind in ("tfrecord", "index")}
    others = {"vocab.txt", "tokenizer_config.json", "corpus.json", "corpus.offsets"}
    assert names == records | others | {"manifest.json"}
    corpus = read_corpus(static)
    vocabulary = read_vocabulary(home / "vocab.txt")
    assert corpus["format"] == "static"
    assert (corpus["sequence_length"], corpus["mask_tokens"]) == (S, P)
    assert corpus["special_ids"] == {"pad": 1, "unk": 2, "cls": 4, "sep": 5, "mask": 3}
    assert corpus["vocab_size"] == len(PIECES)
    assert corpus["vocab_sha256"] == vocabulary.sha256
    assert corpus["token_bytes"] == 2
    assert (static / "vocab.txt").read_bytes() == (home / "vocab.txt").read_bytes()
    config = json.loads((static / "tokenizer_config.json").read_text())
    assert config["do_lower_case"] is True
    manifest = read_manifest(static)
    assert manifest["counts"]["records"] == corpus["records"]
    assert manifest["counts"]["documents"] == 60
    assert manifest["settings"]["duplication_factor"] == 5


def test_every_index_is_what_the_tfrecord_package_makes(static):
    for path in sorted(static.glob("*.tfrecord")):
        assert path.with_suffix(".index").read_text() == index_of_tfrecord_package(path)


def test_tensorflow_reads_the_same_records(static):
    import tensorflow as tf

    files = sorted(map(str, static.glob("*.tfrecord")))
    raw = [record.numpy() for record in tf.data.TFRecordDataset(files)]
    assert raw == payloads(static)
    example = tf.train.Example.FromString(raw[0])
    assert {n: len(f.int64_list.value) for n, f in example.features.feature.items()} == {
        "input_ids": S,
        "input_mask": S,
        "segment_ids": S,
        "masked_lm_positions": P,
        "masked_lm_ids": P,
        "masked_lm_weights": 0,
        "next_sentence_labels": 1,
    }
    assert len(example.features.feature["masked_lm_weights"].float_list.value) == P


def test_every_row_is_cls_a_sep_b_sep_with_its_segments_and_mask(static):
    arrays = static_arrays(static)
    ids = unmasked(arrays)
    lengths = arrays["input_mask"].sum(axis=1)
    places = np.arange(S)
    assert np.array_equal(arrays["input_mask"], places < lengths[:, None])
    assert np.all(ids[:, 0] == 4)
    separators = ids == 5
    assert np.all(separators.sum(axis=1) == 2)
    first = separators.argmax(axis=1)
    assert np.all(ids[np.arange(len(ids)), lengths - 1] == 5)
    inside = (places > first[:, None]) & (places < lengths[:, None])
    assert np.array_equal(arrays["segment_ids"], inside)
    assert np.all(first >= 2)
    assert np.all(lengths - first > 2)
    assert np.all((ids == 1) == (places >= lengths[:, None]))
    assert np.all((ids == 4).sum(axis=1) == 1)
    assert not np.isin(ids, [0, 3]).any()


def test_segments_are_runs_of_the_text_and_labels_tell_whether_they_follow(home, static):
    """Each segment is looked up in its document; sentences are long, so a run is unique."""
    corpus = read_corpus(static)
    arrays = static_arrays(static)
    ids, lengths = unmasked(arrays), arrays["input_mask"].sum(axis=1)
    first = (ids == 5).argmax(axis=1)
    row = random_next = 0
    for number, entry in enumerate(corpus["files"]):
        group = group_of(home, f"text_{number:02d}")
        text = group.tokens.astype("<u2").tobytes()
        ends = group.sentences[group.documents]
        for _ in range(entry["records"]):
            a = ids[row, 1 : first[row]].astype("<u2").tobytes()
            b = ids[row, first[row] + 1 : lengths[row] - 1].astype("<u2").tobytes()
            is_random = arrays["next_sentence_labels"][row]
            random_next += is_random
            row += 1
            if len(a) < 12 or len(b) < 12:
                continue  # so short a run may stand in several places
            assert text.count(a) == text.count(b) == 1
            start_a, start_b = text.index(a) // 2, text.index(b) // 2
            document_a, document_b = np.searchsorted(ends, [start_a, start_b], side="right")
            assert (document_a != document_b) == bool(is_random)
            if not is_random:
                # What was cut between them is a sentence's end or start.
                assert start_b >= start_a + len(a) // 2
                full = lengths[row - 1] == S
                assert full or start_b == start_a + len(a) // 2
    # Half, and the chunks of a single sentence beside them.
    assert 0.45 < random_next / row < 0.6


def test_static_masks_are_15_percent_at_most_p_80_10_10_in_order(static):
    arrays = static_arrays(static)
    ids, lengths = unmasked(arrays), arrays["input_mask"].sum(axis=1)
    held = arrays["masked_lm_weights"] == 1
    wanted = [min(P, max(1, round(0.15 * length))) for length in lengths.tolist()]
    assert held.sum(axis=1).tolist() == wanted
    positions = arrays["masked_lm_positions"]
    for row in range(0, len(ids), 7):
        chosen = positions[row, : wanted[row]].tolist()
        assert all(a < b for a, b in pairwise(chosen))
        assert not set(ids[row, chosen].tolist()) & {1, 3, 4, 5}
        assert arrays["masked_lm_ids"][row, : wanted[row]].tolist() == ids[row, chosen].tolist()
    assert not positions[~held].any()
    assert not arrays["masked_lm_ids"][~held].any()
    seen = np.take_along_axis(arrays["input_ids"], positions, axis=1)[held]
    labels = arrays["masked_lm_ids"][held]
    total, words = len(seen), len(PIECES)
    for share, got in [
        (0.8 + 0.1 / words, seen == 3),
        (0.1 + 0.1 / words, seen == labels),
    ]:
        assert abs(got.mean() - share) < 5 * np.sqrt(share * (1 - share) / total)
    others = np.setdiff1d(seen, [3])
    assert len(others) == words - 1  # the random word is any of the vocabulary


def test_copies_differ_and_are_shuffled_together(static):
    arrays = static_arrays(static)
    ids = unmasked(arrays)
    share = np.array([np.count_nonzero((ids == row).all(axis=1)) for row in ids[:300]])
    assert share.mean() < 2  # pairs are drawn anew for each copy
    # Neighbours are from different places: a copy in order would have A's that follow each other.
    labels = arrays["next_sentence_labels"]
    runs = np.count_nonzero(np.diff(labels))
    share = labels.mean()
    expected = 2 * share * (1 - share) * len(labels)
    assert abs(runs - expected) < 5 * np.sqrt(expected)


def test_dynamic_records_hold_each_pair_once_and_unmasked(home, dynamic):
    corpus = read_corpus(dynamic)
    assert corpus["format"] == "dynamic"
    records = parse_dynamic(payloads(dynamic), corpus["token_bytes"])
    assert len(records.lengths) == corpus["records"]
    assert records.lengths.max() <= S
    starts = np.cumsum(records.lengths) - records.lengths
    ends = starts + records.lengths - 1
    assert np.all(records.tokens[starts] == 4)
    assert np.all(records.tokens[ends] == 5)
    assert np.all(records.tokens[starts + records.first_lengths - 1] == 5)
    assert np.count_nonzero(records.tokens == 5) == 2 * len(starts)
    assert not np.isin(records.tokens, [0, 1, 3]).any()
    # One copy of static records is the same pairs in the same order, masked by the same function.
    one = make(home, home / "once", duplication_factor=1)
    arrays = static_arrays(one)
    ids = unmasked(arrays)
    rows = [ids[i, :n].tolist() for i, n in enumerate(arrays["input_mask"].sum(axis=1))]
    tokens = records.tokens.tolist()
    assert rows == [tokens[a : b + 1] for a, b in zip(starts, ends, strict=True)]
    assert np.array_equal(arrays["next_sentence_labels"], records.next_sentence_labels)


def test_all_of_the_text_is_in_the_dynamic_records(home, dynamic):
    """Only what truncation cut is missing; with no short targets that is less than a sentence."""
    records = parse_dynamic(payloads(dynamic))
    group_tokens = sum(len(group_of(home, f"text_0{n}").tokens) for n in range(3))
    starts = np.cumsum(records.lengths) - records.lengths
    first = (records.first_lengths - 2).sum()
    second = records.lengths - records.first_lengths - 1
    actual = second[records.next_sentence_labels == 0].sum()
    assert 0.75 * group_tokens < first + actual <= group_tokens
    assert len(starts) == len(second)


def test_whole_words_are_masked_whole(home, tmp_path):
    arrays = static_arrays(make(home, tmp_path / "out", whole_word_masking=True))
    ids = unmasked(arrays)
    piece = PIECES.index("##zu")
    chosen = np.zeros(ids.shape, bool)
    rows, places = np.nonzero(arrays["masked_lm_weights"])
    chosen[rows, arrays["masked_lm_positions"][rows, places]] = True
    follows = (ids == piece)[:, 1:] & ~np.isin(ids[:, :-1], [4, 5])
    assert follows.sum() > 1000
    assert np.array_equal(chosen[:, 1:][follows], chosen[:, :-1][follows])
    assert chosen.sum(axis=1).min() >= 1


def test_a_literal_sep_in_the_text_is_ordinary_text(home, tmp_path):
    folder = tmp_path / "sentences"
    folder.mkdir()
    line = "ba [SEP] ke [CLS] lo [MASK] mi [PAD] nu [SEP].\n"
    (folder / "a").write_text((line * 30 + "\n") * 4)
    out = make(home, tmp_path / "out", input=folder)
    arrays = static_arrays(out)
    ids = unmasked(arrays)
    assert np.all((ids == 5).sum(axis=1) == 2)
    assert np.all((ids == 4).sum(axis=1) == 1)
    assert not (ids == 3).any()
    assert np.count_nonzero(ids == PIECES.index("sep")) > len(ids)


def test_cased_text_is_not_lowered(home, tmp_path):
    vocab = tmp_path / "cased"
    vocab.mkdir()
    (vocab / "vocab.txt").write_text("\n".join([*PIECES, "Bake"]) + "\n")
    folder = tmp_path / "sentences"
    folder.mkdir()
    (folder / "a").write_text(("Bake bake.\n" * 30 + "\n") * 4)
    for cased, count in ((True, 1), (False, 0)):
        out = tmp_path / str(cased)
        ids = unmasked(static_arrays(make(home, out, input=folder, vocab=str(vocab), cased=cased)))
        assert bool((ids == len(PIECES)).any()) == bool(count)
        config = json.loads((out / "tokenizer_config.json").read_text())
        assert config["do_lower_case"] is not cased
        with pytest.raises(ConfigError, match="--cased"):
            make(home, tmp_path / "x", input=folder, vocab=str(out), cased=not cased)


def test_a_vocabulary_of_more_than_65536_pieces_takes_four_bytes(home, tmp_path):
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join([*PIECES[:6], *(f"w{n}" for n in range(70_000)), *PIECES[6:]]))
    out = make(home, tmp_path / "d", vocab=str(vocab), masking="dynamic")
    assert read_corpus(out)["token_bytes"] == 4
    records = parse_dynamic(payloads(out), 4)
    assert records.tokens.max() > 70_000
    arrays = static_arrays(make(home, tmp_path / "s", vocab=str(vocab), duplication_factor=1))
    held = arrays["input_mask"] == 1
    assert unmasked(arrays)[held].tolist() == records.tokens.tolist()


def test_the_mask_of_the_readers_function_is_the_recipes(dynamic):
    """Static and dynamic masking are one function; here as the reader calls it."""
    records = parse_dynamic(payloads(dynamic))
    rows = np.full((len(records.lengths), S), 1)
    rows[np.arange(S) < records.lengths[:, None]] = records.tokens
    special = read_vocabulary(dynamic / "vocab.txt").special
    keys = row_keys(np.arange(len(rows)), "mask", 1, 0)
    kinds = TokenKinds(special, len(PIECES))
    out = mask_tokens(rows, records.lengths, keys, kinds, Masking(), P)
    wanted = [min(P, max(1, round(0.15 * n))) for n in records.lengths.tolist()]
    assert out.weights.sum(axis=1).tolist() == wanted


# --- the same bytes


def test_the_bytes_do_not_depend_on_the_number_of_processes(home, static, tmp_path):
    again = make(home, tmp_path / "two", processes=2)
    assert hashes(again) == hashes(static)


def test_another_seed_gives_other_records(home, static, tmp_path):
    other = hashes(make(home, tmp_path / "out", random_seed=1))
    mine = hashes(static)
    assert all(other[f"wiki_00{n}.tfrecord"] != mine[f"wiki_00{n}.tfrecord"] for n in range(3))
    assert other["vocab.txt"] == mine["vocab.txt"]


def test_the_records_of_a_seed_never_change(static):
    # People continue runs on records they made: change this only with the format or the recipe.
    assert read_corpus(static)["records"] == PINNED["records"]
    digest = hashlib.sha256(b"".join(payloads(static))).hexdigest()
    assert digest == PINNED["sha256"]


PINNED = {
    "records": 3003,
    "sha256": "7f0f0c539c99fbbae438030bc4ca8e7043ed3a41eab7576017094a6927e19eeb",
}


def test_files_can_be_grouped(home, tmp_path, capsys):
    out = make(home, tmp_path / "out", group_files=2)
    corpus = read_corpus(out)
    assert [entry["name"] for entry in corpus["files"]] == [
        "wiki_000.tfrecord",
        "wiki_001.tfrecord",
    ]
    assert read_manifest(out)["counts"]["documents"] == 60
    line = capsys.readouterr().out
    assert re.search(
        r"^tokenize: 60 documents, [\d,]+ sentences, [\d,]+ records, .* MB/s, ", line, re.M
    )
    assert line.startswith("tokenize: plan: ") and line.count("\n") == 2


def test_a_second_run_does_nothing_and_a_lost_shard_is_made_again(home, tmp_path):
    out = make(home, tmp_path / "out")
    before = hashes(out)
    stamp = (out / "wiki_000.tfrecord").stat().st_mtime_ns
    (out / "wiki_001.tfrecord").unlink()
    (out / "corpus.json").unlink()
    make(home, out)
    assert hashes(out) == before
    assert (out / "wiki_000.tfrecord").stat().st_mtime_ns == stamp


def test_records_of_other_settings_or_vocabulary_are_not_mixed_in(home, tmp_path):
    out = make(home, tmp_path / "out")
    with pytest.raises(DataError, match="random_seed"):
        make(home, out, random_seed=7)
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join([*PIECES, "more"]))
    with pytest.raises(DataError, match="vocab_sha256"):
        make(home, out, vocab=str(vocab))


# --- documents and what is refused


def test_blank_lines_and_the_ends_of_files_end_documents(home, tmp_path):
    (tmp_path / "a").write_bytes(b"\n\nba ke.\nlo mi.\r\n\r\n \t\n\nnu ra.\n\x0c\nsi to.")
    (tmp_path / "b").write_text("va ba.\n\u200b\nke lo.\n\n\u200b\n\n", encoding="utf-8")
    encoder = Encoder(read_vocabulary(home / "vocab.txt").ids, cased=False)
    group = encode_group([tmp_path / "a", tmp_path / "b"], encoder)
    assert np.diff(group.sentences).tolist() == [3] * 6
    # A line of nothing but characters that are dropped is no sentence and ends nothing.
    assert group.documents.tolist() == [0, 2, 3, 4, 6]


def test_text_is_encoded_alike_in_pieces_of_any_size(home, monkeypatch):
    whole = group_of(home, "text_00")
    for size in (1, 100, 5000):
        monkeypatch.setattr("bert_cli.data.text.documents.BLOCK_BYTES", size)
        cut = group_of(home, "text_00")
        assert np.array_equal(cut.tokens, whole.tokens)
        assert np.array_equal(cut.sentences, whole.sentences)
        assert np.array_equal(cut.documents, whole.documents)


def test_a_group_of_one_document_is_refused_with_the_remedy(home, tmp_path):
    folder = tmp_path / "sentences"
    folder.mkdir()
    (folder / "a").write_text("ba ke.\nlo mi.\n")
    (folder / "b").write_text("nu ra.\nsi to.\n\nva.\n")
    with pytest.raises(DataError, match=r"a \(1 document in the group\).*raise --group-files"):
        make(home, tmp_path / "out", input=folder)
    assert not list((tmp_path / "out").glob("*.tfrecord"))
    assert not (tmp_path / "out/manifest.json").exists()
    grouped = make(home, tmp_path / "grouped", input=folder, group_files=2)
    assert read_corpus(grouped)["records"] > 0


def test_a_group_of_one_document_is_refused_before_the_work_if_the_manifest_tells(home, tmp_path):
    folder = write_text(tmp_path / "sentences", files=2, documents=3)
    shards = [{"output": "text_00", "documents": 1}, {"output": "text_01", "documents": 3}]
    (folder / "manifest.json").write_text(json.dumps({"step": "preprocess", "shards": shards}))
    with pytest.raises(DataError, match=r"text_00 \(1 document in the group\)"):
        make(home, tmp_path / "out", input=folder)
    assert not (tmp_path / "out").exists()


def test_a_last_file_of_one_document_joins_the_group_before_it(tmp_path):
    folder = write_text(tmp_path / "sentences", files=3, documents=2)
    counts = {"text_00": 2, "text_01": 2, "text_02": 1}
    shards = [{"output": name, "documents": count} for name, count in counts.items()]
    (folder / "manifest.json").write_text(json.dumps({"step": "preprocess", "shards": shards}))
    planned, notes = plan_groups(folder, 1)
    groups = [[part.path.name for part in parts] for _, parts in planned]
    assert groups == [["text_00"], ["text_01", "text_02"]]
    assert len(notes) == 1
    assert notes[0].startswith(f"{folder / 'text_02'}: holds fewer than two documents")
    assert notes[0].endswith("wiki_001.tfrecord")
    assert plan_groups(folder, 2)[1] == [
        f"{folder / 'text_02'}: holds fewer than two documents, which cannot make pairs, so it went "
        "into the group before it, wiki_000.tfrecord"
    ]
    assert plan_groups(folder, 3)[1] == []


def test_the_note_on_a_joined_file_is_in_the_manifest_and_on_the_terminal(home, tmp_path, capsys):
    folder = write_text(tmp_path / "sentences", files=2, documents=3)
    (folder / "text_01").write_text("ba ke lo.\nmi nu ra.\n")
    counts = {"text_00": 3, "text_01": 1}
    shards = [{"output": name, "documents": count} for name, count in counts.items()]
    (folder / "manifest.json").write_text(json.dumps({"step": "preprocess", "shards": shards}))
    note = f"{folder / 'text_01'}: holds fewer than two documents"
    notes = read_manifest(make(home, tmp_path / "out", input=folder))["notes"]
    assert [text.startswith(note) for text in notes] == [True]
    assert f"tokenize: {note}" in capsys.readouterr().out


def test_empty_files_are_left_out_and_no_text_at_all_is_refused(home, tmp_path):
    folder = write_text(tmp_path / "sentences", files=1)
    (folder / "empty").write_text("")
    (folder / "zzz").write_text("")
    (_, group), *others = plan_groups(folder, 1)[0]
    assert [part.path for part in group] == [folder / "text_00"] and not others
    make(home, tmp_path / "out", input=folder)
    (folder / "text_00").write_text("")
    with pytest.raises(DataError, match="holds no text"):
        make(home, tmp_path / "none", input=folder)
    with pytest.raises(DataError, match="does not exist"):
        make(home, tmp_path / "none", input=tmp_path / "nowhere")


def test_the_names_of_many_groups_sort_in_their_order(tmp_path):
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(1001):
        (folder / f"{number:04d}").write_text("x")
    names = [output.name for output, _ in plan_groups(folder, 1)[0]]
    assert names[0] == "wiki_0000.tfrecord"
    assert names[-1] == "wiki_1000.tfrecord"
    assert sorted(names) == names
    assert plan_groups(folder, 2)[0][-1][0] == Path("wiki_500.tfrecord")


def test_bytes_that_are_no_text_are_refused_with_their_place(home, tmp_path):
    folder = write_text(tmp_path / "sentences", files=1)
    good = (folder / "text_00").read_bytes()
    (folder / "text_00").write_bytes(good + b"\nba \xff ke\n")
    with pytest.raises(DataError, match=rf"text_00 \(line \d+, byte {len(good) + 4}\): not UTF-8"):
        make(home, tmp_path / "out", input=folder)


def test_a_vocabulary_without_mask_is_refused_before_the_work(home, tmp_path):
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join(piece for piece in PIECES if piece != "[MASK]"))
    with pytest.raises(DataError, match=r"\[MASK\] missing"):
        make(home, tmp_path / "out", vocab=str(vocab))
    assert not (tmp_path / "out").exists()


def test_the_shortest_rows_with_room_for_all_masks_are_fine(home, tmp_path):
    arrays = static_arrays(make(home, tmp_path / "out", sequence_length=8, mask_tokens=5), 8, 5)
    assert arrays["masked_lm_positions"].shape[1] == 5
    assert np.all(arrays["masked_lm_weights"].sum(axis=1) == 1)


def test_tensorflow_is_not_loaded(home, tmp_path):
    code = (
        "import sys; from pathlib import Path; from bert_cli.config.data import TokenizeSettings; "
        "from bert_cli.data.records.tokenize import run; "
        "run(TokenizeSettings(input=Path(sys.argv[1]), out=Path(sys.argv[2]), vocab=sys.argv[3], "
        "processes=1)); "
        "heavy = {'tensorflow', 'keras', 'torch', 'transformers', 'nltk', 'huggingface_hub'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    arguments = [home / "sentences", tmp_path / "out", home / "vocab.txt"]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.endswith("\n[]\n"), done.stderr


def test_real_text_with_the_published_vocabulary(shared_data, tmp_path):
    """The share of masked tokens and of random nexts on a megabyte of articles."""
    folder = tmp_path / "sentences"
    folder.mkdir()
    text = (shared_data / "text/extracted/AA/wiki_03").read_text(encoding="utf-8")
    documents = re.findall(r"<doc [^>]*>\n[^\n]*\n\n(.*?)</doc>", text, re.DOTALL)
    lines = [re.sub(r"\n+", "\n", document.replace(". ", ".\n")) for document in documents]
    (folder / "a").write_text("\n".join(lines), encoding="utf-8")
    vocab = shared_data / "vocab/bert-base-uncased-vocab.txt"
    out = tmp_path / "out"
    tokenize.run(
        TokenizeSettings(input=folder, out=out, vocab=str(vocab), processes=1, duplication_factor=2)
    )
    assert read_corpus(out)["special_ids"] == {
        name.strip("[]").lower(): number
        for name, number in zip(SPECIAL_TOKENS, (0, 100, 101, 102, 103), strict=True)
    }
    arrays = static_arrays(out, 128, 20)
    lengths = arrays["input_mask"].sum(axis=1)
    assert abs(arrays["masked_lm_weights"].sum() / lengths.sum() - 0.15) < 0.005
    assert 0.5 < arrays["next_sentence_labels"].mean() < 0.62
    assert (lengths == 128).mean() > 0.8
    seen = np.take_along_axis(arrays["input_ids"], arrays["masked_lm_positions"], axis=1)
    share = (seen == 103)[arrays["masked_lm_weights"] == 1].mean()
    assert abs(share - 0.8) < 0.01
