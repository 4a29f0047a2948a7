"""`bert pack`: the packs on disk hold what the records held, of either kind, and a run goes on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import (
    WORDS,
    P,
    S,
    by_content,
    examples_of,
    make_corpus,
    open_stream,
    sequences_of,
)

from bert_cli.config.data import (
    IndexSettings,
    Masking,
    PackSettings,
    TokenizeSettings,
    packed_predictions,
)
from bert_cli.data.records import index, pack, tokenize
from bert_cli.data.records.corpus import read_corpus
from bert_cli.data.records.formats import static_payloads
from bert_cli.data.records.index import write_corpus
from bert_cli.data.records.tfrecord import RecordWriter
from bert_cli.errors import DataError

COUNTS = [100, 7, 0, 142, 1]
WIDE = 2 * S


def masked_examples(first: int, count: int) -> dict[str, np.ndarray]:
    """Static examples as they are: tokens, then padding; masked places within the tokens."""
    rng = np.random.default_rng(first)
    lengths = rng.integers(5, S + 1, count)
    held = np.arange(S) < lengths[:, None]
    ids = np.where(held, rng.integers(5, WORDS, (count, S)), 0)
    ids[:, 0] = 2
    masked = np.maximum(1, np.rint(0.15 * lengths)).astype(int)
    weights = np.arange(P) < masked[:, None]
    places = np.sort(rng.permuted(np.tile(np.arange(1, 5), (count, 1)), axis=1)[:, :P], axis=1)
    return {
        "input_ids": ids,
        "input_mask": held.astype(int),
        "segment_ids": (held & (np.arange(S) > 2)).astype(int),
        "masked_lm_positions": np.where(weights, places, 0),
        "masked_lm_ids": np.where(weights, rng.integers(5, WORDS, (count, P)), 0),
        "masked_lm_weights": weights.astype(np.float32),
        "next_sentence_labels": rng.integers(0, 2, count),
    }


def make_static(folder: Path, **changes: Any) -> Path:
    make_corpus(folder, "static", COUNTS, **changes)
    first = 0
    for number, count in enumerate(COUNTS):
        with RecordWriter(folder / f"wiki_{number:03}.tfrecord") as writer:
            writer.write_all(static_payloads(masked_examples(first, count)) if count else ())
        first += count
    write_corpus(folder, json.loads((folder / "corpus.json").read_text()))
    return folder


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("corpora")
    return {
        "static": make_static(home / "static"),
        "dynamic": make_corpus(home / "dynamic", "dynamic", COUNTS),
    }


def settings_of(folder: Path, out: Path, **changes: Any) -> PackSettings:
    given = {"sequence_length": WIDE, "max_sequences_per_pack": 3, "processes": 1} | changes
    return PackSettings(input=folder, out=out, **given)


def open_reader(folder: Path, **settings: Any) -> Any:
    return open_stream(folder, **{"examples": 8} | settings)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("most", [2, 4])
def test_packs_hold_every_sequence_once_with_the_masks_of_the_unpacked_records(
    corpora: dict[str, Path], tmp_path: Path, kind: str, most: int
) -> None:
    out = tmp_path / "packed"
    pack.run(settings_of(corpora[kind], out, max_sequences_per_pack=most))
    packed, plain = open_reader(out), open_reader(corpora[kind])
    assert packed.source.max_sequences_per_pack == most
    assert packed.source.sequences == plain.epoch_size == 250
    assert 250 / most <= packed.epoch_size < 170
    for epoch in (0, 3):
        rows = packed.rows(np.arange(packed.epoch_size) + epoch * packed.epoch_size)
        wanted = examples_of(plain.rows(np.arange(250) + epoch * 250))
        assert by_content(sequences_of(rows)) == by_content(wanted)
        assert rows["input_ids"].shape == (packed.epoch_size, WIDE)
        assert rows["masked_lm_ids"].shape[1] == packed_predictions(WIDE, most, P, 0.15)
        counts = rows["input_mask"].max(axis=1)
        assert np.array_equal(rows["next_sentence_weights"], np.arange(most) < counts[:, None])
        assert (rows["input_mask"] > 0).mean() == pytest.approx(
            packed.source.corpus["real_token_share"]
        )


def test_dynamic_packs_are_masked_as_on_the_fly(corpora: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "packed"
    pack.run(settings_of(corpora["dynamic"], out))
    masking = Masking(unit="word", probability=0.4)
    stored = open_reader(out, masking=masking)
    fly = open_reader(
        corpora["dynamic"], masking=masking, sequence_length=WIDE, max_sequences_per_pack=3
    )
    for epoch in (0, 2):
        one, other = (
            sequences_of(reader.rows(np.arange(reader.epoch_size) + epoch * reader.epoch_size))
            for reader in (stored, fly)
        )
        assert by_content(one) == by_content(other)
    wider = open_reader(out, masking=masking, sequence_length=WIDE + 8)
    assert by_content(sequences_of(wider.rows(np.arange(wider.epoch_size)))) == by_content(
        sequences_of(stored.rows(np.arange(stored.epoch_size)))
    )


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_packed_steps_are_a_function_of_seed_and_step_and_parts(
    corpora: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    out = tmp_path / "packed"
    pack.run(settings_of(corpora[kind], out))
    straight = open_reader(out)
    for step in (30, 0, 16):
        again = open_reader(out)[step]
        halves = [open_reader(out, rank=part, world_size=2)[step] for part in range(2)]
        for name, array in straight[step].items():
            np.testing.assert_array_equal(again[name], array)
            np.testing.assert_array_equal(np.concatenate([h[name] for h in halves]), array)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_corpus_and_manifest_tell_what_was_packed(
    corpora: dict[str, Path], tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "packed"
    pack.run(settings_of(corpora[kind], out))
    told, before = read_corpus(out), read_corpus(corpora[kind])
    assert told["max_sequences_per_pack"] == 3
    assert told["sequences"] == 250
    assert told["sequence_length"] == WIDE
    assert told["mask_tokens"] == P
    assert {file["name"] for file in told["files"]} == {
        f"wiki_{number:03}.tfrecord" for number in (0, 1, 3, 4)
    }
    for key in ("format", "vocab_sha256", "special_ids", "masked_lm_prob", "tokenizer"):
        assert told[key] == before[key]
    for name in ("vocab.txt", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (corpora[kind] / name).read_bytes()
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["step"] == "pack"
    assert manifest["counts"]["sequences"] == 250
    share = manifest["counts"]["tokens"] / (manifest["counts"]["records"] * WIDE)
    assert told["real_token_share"] == pytest.approx(share)
    said = capsys.readouterr().out
    assert (
        f"pack: 250 sequences in {told['records']} packs of at most 3; of {WIDE} positions" in said
    )


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_the_bytes_depend_on_the_seed_and_not_on_the_processes_or_a_stop(
    corpora: dict[str, Path],
    tmp_path: Path,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def content(folder: Path) -> dict[str, bytes]:
        return {
            p.name: p.read_bytes()
            for p in folder.iterdir()
            if "wiki" in p.name or "corpus" in p.name
        }

    pack.run(settings_of(corpora[kind], tmp_path / "a"))
    if kind == "dynamic":  # of static records each process would load TensorFlow first
        pack.run(settings_of(corpora[kind], tmp_path / "b", processes=2))
        assert content(tmp_path / "b") == content(tmp_path / "a")
    pack.run(settings_of(corpora[kind], tmp_path / "c", random_seed=1))
    assert content(tmp_path / "c") != content(tmp_path / "a")

    whole = pack.convert

    def stops(inputs: tuple[Path, ...], output: Path, *, recipe: pack.Recipe) -> Any:
        if output.name == "wiki_003.tfrecord":
            output.write_bytes(b"half a pack")
            raise KeyboardInterrupt
        return whole(inputs, output, recipe=recipe)

    monkeypatch.setattr(pack, "convert", stops)
    with pytest.raises(SystemExit):
        pack.run(settings_of(corpora[kind], tmp_path / "d"))
    with pytest.raises(DataError):
        read_corpus(tmp_path / "d")
    done: list[str] = []

    def notes(inputs: tuple[Path, ...], output: Path, *, recipe: pack.Recipe) -> Any:
        done.append(output.name)
        return whole(inputs, output, recipe=recipe)

    monkeypatch.setattr(pack, "convert", notes)
    pack.run(settings_of(corpora[kind], tmp_path / "d"))
    assert done == ["wiki_003.tfrecord", "wiki_004.tfrecord"]
    assert content(tmp_path / "d") == content(tmp_path / "a")


def test_indexing_packs_again_keeps_what_is_known_of_them(
    corpora: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "packed"
    pack.run(settings_of(corpora["dynamic"], out))
    before = read_corpus(out)
    index.run(IndexSettings(folder=out, processes=1))
    assert read_corpus(out) == before


def test_a_corpus_without_pairs_stays_one(tmp_path: Path) -> None:
    for kind, make in (("static", make_static), ("dynamic", make_dynamic)):
        folder = make(tmp_path / kind, next_sentence=False)
        pack.run(settings_of(folder, tmp_path / f"{kind}_packed"))
        assert read_corpus(tmp_path / f"{kind}_packed")["next_sentence"] is False
        rows = open_reader(tmp_path / f"{kind}_packed").rows(np.arange(50))
        assert not rows["next_sentence_weights"].any()


def make_dynamic(folder: Path, **changes: Any) -> Path:
    return make_corpus(folder, "dynamic", COUNTS, **changes)


def test_static_records_that_do_not_say_how_they_were_masked_have_room_for_all_predictions(
    tmp_path: Path,
) -> None:
    folder = make_static(tmp_path / "c", masked_lm_prob=None)
    pack.run(settings_of(folder, tmp_path / "packed"))
    reader, plain = open_reader(tmp_path / "packed"), open_reader(folder)
    rows = reader.rows(np.arange(reader.epoch_size))
    assert rows["masked_lm_ids"].shape[1] == 3 * P
    assert by_content(sequences_of(rows)) == by_content(examples_of(plain.rows(np.arange(250))))


def test_static_records_that_say_it_wrongly_are_refused(tmp_path: Path) -> None:
    folder = make_static(tmp_path / "c", masked_lm_prob=0.001)
    with pytest.raises(DataError, match=r"a pack \(\d+ masked positions\): has room for 3"):
        pack.run(settings_of(folder, tmp_path / "packed", sequence_length=4 * S))


def test_static_records_with_holes_in_their_mask_are_refused_by_number(tmp_path: Path) -> None:
    folder = make_corpus(tmp_path / "c", "static", [3, 20])
    with pytest.raises(DataError, match=r"c \(record \d+\): its input_mask is not ones and then"):
        pack.run(settings_of(folder, tmp_path / "packed"))


Change = Callable[[Path, Path], PackSettings]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda a, b: settings_of(a, b, sequence_length=8),
            r"sequence_length \(8\): .* 16 positions",
        ),
        (lambda a, b: settings_of(a, a), r"out \(.*\): is inside"),
        (lambda a, b: settings_of(a, a / "packed"), r"out \(.*\): is inside"),
        (lambda a, b: settings_of(b, a), r"corpus.json: does not exist"),
    ],
)
def test_what_cannot_be_packed_is_refused(
    corpora: dict[str, Path], tmp_path: Path, change: Change, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        pack.run(change(corpora["dynamic"], tmp_path / "out"))


def test_packs_are_not_packed_again_nor_read_as_others(
    corpora: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "packed"
    pack.run(settings_of(corpora["static"], out))
    with pytest.raises(DataError, match=r"is packed already, with up to 3 sequences"):
        pack.run(settings_of(out, tmp_path / "again"))
    for most in (1, 2):
        with pytest.raises(
            DataError, match=rf"\({most}\): .* are packs of up to 3 sequences; give 3"
        ):
            open_reader(out, max_sequences_per_pack=most)
    open_reader(out, max_sequences_per_pack=3)
    with pytest.raises(DataError, match=r"max_seq_length \(16\): .* have 32 positions"):
        open_reader(out, sequence_length=S)
    with pytest.raises(ValueError, match="greater than or equal to 2"):
        settings_of(out, tmp_path, max_sequences_per_pack=1)


def test_other_settings_do_not_go_on_in_the_same_folder(
    corpora: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "packed"
    pack.run(settings_of(corpora["dynamic"], out))
    with pytest.raises(DataError, match="max_sequences_per_pack was 3, now 2"):
        pack.run(settings_of(corpora["dynamic"], out, max_sequences_per_pack=2))


def test_packed_real_text_has_the_masks_of_its_records_and_few_empty_places(
    shared_data: Path, tmp_path: Path
) -> None:
    """A paragraph is a document here, so that many records are short."""
    text = (shared_data / "text/extracted/AA/wiki_00").read_text(encoding="utf-8")[:400_000]
    lines = [line for line in text.splitlines() if not line.startswith("<")]
    (tmp_path / "sentences").mkdir()
    (tmp_path / "sentences" / "a.txt").write_text(
        "\n\n".join("\n".join(line.split(". ")) for line in lines), encoding="utf-8"
    )
    vocab = str(shared_data / "vocab/bert-base-uncased-vocab.txt")
    for kind in ("static", "dynamic"):
        made, out = tmp_path / kind, tmp_path / f"{kind}_packed"
        copies = {"duplication_factor": 1} if kind == "static" else {}
        tokenize.run(
            TokenizeSettings(
                input=tmp_path / "sentences",
                out=made,
                vocab=vocab,
                masking=kind,
                processes=1,
                **copies,
            )
        )
        pack.run(settings_of(made, out, sequence_length=128))
        packed, plain = open_reader(out), open_reader(made)
        assert packed.source.corpus["real_token_share"] is not None
        number = plain.epoch_size
        rows = plain.rows(np.arange(number))
        assert rows["input_mask"].mean() < 0.8
        assert packed.source.corpus["real_token_share"] > 0.92
        found = sequences_of(packed.rows(np.arange(packed.epoch_size)))
        assert packed.source.sequences == len(found) == number
        assert by_content(found) == by_content(examples_of(rows))
