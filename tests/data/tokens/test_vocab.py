"""Vocabularies: found in files, in folders and on a hub, rejected, and trained."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError

from bert_cli.config.data import VocabSettings
from bert_cli.data.steps.vocab import run
from bert_cli.data.tokens import hub, vocab
from bert_cli.data.tokens.encoder import Encoder
from bert_cli.data.tokens.tokenizer import (
    CONFIG_FILE,
    SPECIAL_TOKENS,
    Normalization,
    read_vocabulary,
    tokenizer_config,
)
from bert_cli.data.tokens.vocab import find_vocabulary
from bert_cli.errors import ConfigError, DataError

PIECES = ["the", "cat", "##s", "[PAD]", "[MASK]", "[UNK]", "[SEP]", "[CLS]"]
SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Foxes are quick, and dogs are lazy!",
    "Naïve foxes jumped; the dogs' laziness overflowed.",
    "",
    "A literal [SEP] in the text is not a separator.",
] * 20


def write_vocab(folder, pieces=PIECES, config=None):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8", newline="")
    (folder / CONFIG_FILE).unlink(missing_ok=True)
    if config is not None:
        (folder / CONFIG_FILE).write_text(json.dumps(config))
    return folder / "vocab.txt"


def found(path, cased=False):
    return find_vocabulary(str(path), cased=cased)


# --- reading


def test_the_line_of_a_piece_is_its_id(tmp_path):
    vocabulary = read_vocabulary(write_vocab(tmp_path))
    assert list(vocabulary.pieces) == PIECES
    assert vars(vocabulary.special) == {"pad": 3, "unk": 5, "cls": 7, "sep": 6, "mask": 4}
    assert vocabulary.is_continuation.tolist() == [piece == "##s" for piece in PIECES]
    assert vocabulary.ids["cat"] == 1
    # Other line ends within a piece do not shift the ids.
    pieces = ["a\u2028b", "\x85", "c\x0bd", *SPECIAL_TOKENS]
    assert list(read_vocabulary(write_vocab(tmp_path, pieces)).pieces) == pieces


# --- finding


def test_a_file_and_its_folder_are_the_same_vocabulary(tmp_path, monkeypatch):
    path = write_vocab(tmp_path / "model")
    monkeypatch.chdir(tmp_path)  # a folder here precedes a name on the hub
    for name in (str(path), str(path.parent), "model"):
        assert found(name, cased=False).path.absolute() == path
    (tmp_path / "empty").mkdir()
    paths = ["empty", "missing.txt", "/nowhere/at/all", "a/b/c", "~/no", "./vocab", "vocab/"]
    for name in paths:
        with pytest.raises(DataError, match=r"no such file or folder with vocab\.txt"):
            found(name, cased=False)


def only_json(folder: Path, cased: bool = False) -> Path:
    """Leave a folder with the files that transformers 5 writes: tokenizer.json, and no vocab.txt."""
    import transformers

    theirs = transformers.BertTokenizerFast.from_pretrained(folder, do_lower_case=not cased)
    theirs.save_pretrained(folder)
    (folder / "vocab.txt").unlink()
    assert {path.name for path in folder.iterdir()} == {"tokenizer.json", CONFIG_FILE}
    return folder


@pytest.mark.parametrize("cased", [False, True])
def test_a_folder_with_tokenizer_json_alone_is_the_vocabulary_of_its_vocab_txt(tmp_path, cased):
    path = write_vocab(tmp_path / "txt", config=tokenizer_config(Normalization(cased=cased)))
    expected = found(path, cased=cased)
    folder = only_json(shutil.copytree(path.parent, tmp_path / "json"), cased)
    for name in (folder, folder / "tokenizer.json"):
        vocabulary = found(name, cased=cased)
        assert vocabulary.pieces == expected.pieces and vocabulary.sha256 == expected.sha256
        assert vocabulary.normalization == expected.normalization
        with pytest.raises(ConfigError, match="says do_lower_case"):
            found(name, cased=not cased)


def test_a_tokenizer_config_must_agree_with_the_case_and_decides_the_rest(tmp_path):
    for cased, remedy in ((True, "leave out --cased"), (False, "pass --cased")):
        write_vocab(tmp_path, config=tokenizer_config(Normalization(cased=not cased)))
        found(tmp_path, cased=not cased)
        with pytest.raises(ConfigError, match=remedy):
            found(tmp_path, cased=cased)
    for cased, config, expected in (
        (False, {"do_lower_case": True, "strip_accents": False}, Normalization(False, False)),
        (True, {"strip_accents": True}, Normalization(True, True)),
        (False, {"tokenize_chinese_chars": False}, Normalization(split_chinese=False)),
        (False, None, Normalization()),
        (True, {"do_lower_case": False}, Normalization(cased=True)),
    ):
        path = write_vocab(tmp_path, PIECES[3:], config)  # pieces that do not show the case
        assert found(path, cased).normalization == expected
    # The config decides where it says the case, also for a text without capitals.
    write_vocab(tmp_path, config={"do_lower_case": False})
    assert found(path, cased=True).pieces[0] == "the"


def test_pieces_that_do_not_show_the_case_are_accepted_as_either(tmp_path):
    special = PIECES[3:]
    for pieces in (
        ["字", "##典", "1990"],  # a script without case
        ["naïve"],  # has accents, so it is no uncased one
        [*(f"word{number}" for number in range(40)), "X"],  # a capital by chance
    ):
        path = write_vocab(tmp_path, [*special, *pieces])
        for cased in (False, True):
            assert found(path, cased=cased).pieces[-1] == pieces[-1]


def test_the_pieces_of_googles_vocabularies_show_their_case(shared_data):
    for kind, cased in (("cased", True), ("uncased", False)):
        path = shared_data / "vocab" / f"bert-base-{kind}-vocab.txt"
        assert len(found(path, cased=cased).pieces) > 28_000
        with pytest.raises(ConfigError, match=f"{'pass' if cased else 'leave out'} --cased"):
            found(path, cased=not cased)


# --- the hub: a stand-in for what answers, and the real client with its cache where nothing does


class NoSuchModelError(HfHubHTTPError):
    __init__ = Exception.__init__  # without the response


def test_a_name_on_the_hub_brings_its_vocabulary(tmp_path, monkeypatch):
    write_vocab(tmp_path / "someone/model", config=tokenizer_config(Normalization(cased=True)))
    write_vocab(tmp_path / "someone/bare")
    only_json(write_vocab(tmp_path / "someone/new").parent)

    def ask(api, name, timeout):
        if not (tmp_path / name).is_dir():
            raise NoSuchModelError("no such model")

    def download(name, allow_patterns, local_files_only):
        assert not local_files_only
        ask(None, name, 1)
        assert all(path.name in allow_patterns for path in (tmp_path / name).iterdir())
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", ask)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find_vocabulary("someone/model", cased=True).pieces == tuple(PIECES)
    with pytest.raises(ConfigError, match=r"^--cased \(false"):
        find_vocabulary("someone/model", cased=False)
    bare, alone = (find_vocabulary(f"someone/{name}", cased=False) for name in ("bare", "new"))
    assert alone.sha256 == bare.sha256
    with pytest.raises(DataError, match=r"^vocabulary \(someone/else\).*no such model"):
        find_vocabulary("someone/else", cased=False)


def test_a_hub_that_does_not_answer_is_asked_once_and_its_cache_read(tmp_path, monkeypatch, capfd):
    folder = tmp_path / "models--someone--model"
    piece_file = write_vocab(folder / "snapshots" / ("0" * 40))
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text("0" * 40)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for port, problem in ((9, "refused"), (silent.getsockname()[1], "ReadTimeout: timed out")):
            monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{port}")
            assert find_vocabulary("someone/model", cased=False).pieces == tuple(PIECES)
            with pytest.raises(DataError, match=r"\(data/vocab9k\): no such file.*" + problem):
                find_vocabulary("data/vocab9k", cased=False)
        piece_file.unlink()  # the cache has a part of the model
        with pytest.raises(DataError, match="ReadTimeout: timed out"):
            find_vocabulary("someone/model", cased=False)
    printed = capfd.readouterr()
    asked = printed.out.splitlines()
    assert len(asked) == 5 and not printed.err  # and no warning of the client
    assert all("is not here; asking the Hugging Face hub for it" in line for line in asked)


# --- training


def train(tmp_path, name="vocab", size=150, lines=None, **settings) -> Path:
    """Train on lines, in two files; without any on those of the call before."""
    folder = tmp_path / "sentences"
    folder.mkdir(exist_ok=True)
    for number in range(2) if lines else ():
        text = "\n".join(lines[number::2]) + "\n"
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    out = tmp_path / name
    run(VocabSettings(input=folder, out=out, size=size, **settings))
    return out


def test_a_trained_vocabulary_has_the_special_tokens_first_and_can_encode(tmp_path, capsys):
    import transformers

    out = train(tmp_path, lines=SENTENCES)
    vocabulary = found(out)
    number, special = len(vocabulary.pieces), vocabulary.special
    assert vocabulary.pieces[:5] == SPECIAL_TOKENS and "quick" in vocabulary.pieces
    assert len(set(vocabulary.pieces)) == number < 150
    assert not any(piece.lower() != piece or "ï" in piece for piece in vocabulary.pieces[5:])
    encoder = Encoder(vocabulary.ids, Normalization())
    assert special.unk not in encoder.encode("\n".join(SENTENCES)).tokens
    counts = json.loads((out / "manifest.json").read_text())["counts"]
    assert (counts["pieces"], counts["sentences"]) == (number, 80)
    *_, summary, line, few = capsys.readouterr().out.splitlines()
    wanted = "occur 2 times or more in this text, fewer than the 150 of --size"
    assert few == f"vocab: only {number} pieces {wanted}"
    assert summary.startswith("vocab: 80 sentences, ") and line == f"vocab: {number} pieces"
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    ids = encoder.encode("the quick dogs").tokens.tolist()
    assert theirs("the quick dogs")["input_ids"] == [special.cls, *ids, special.sep]
    # A vocabulary of the wanted size needs no message; a cased one has capitals and accents.
    smaller = train(tmp_path, "smaller", size=100, cased=True)
    pieces = found(smaller, cased=True).pieces
    assert len(pieces) == 100 and "ï" in "".join(pieces)
    assert any(piece[0].isupper() for piece in pieces[5:])
    assert "times or more in this text" not in capsys.readouterr().out


def test_a_word_that_occurs_less_often_than_the_minimum_is_no_piece(tmp_path, monkeypatch):
    lines = ["zebra giraffe"] * 3 + ["giraffe"] * 2
    for frequency, expected in ((3, {"zebra", "giraffe"}), (4, {"giraffe"}), (6, set())):
        monkeypatch.setattr(vocab, "MIN_FREQUENCY", frequency)
        out = train(tmp_path, f"vocab{frequency}", lines=lines)
        assert {"zebra", "giraffe"} & {*found(out).pieces} == expected


def test_an_extension_has_the_most_frequent_pieces_that_the_text_needs(tmp_path, monkeypatch):
    """`ze` is a step from z to zebra, and a piece of the three words zest alone."""
    base = train(tmp_path, "base", 100, SENTENCES)

    def new_pieces(name: str, lines: Sequence[str], size: str, frequency: int) -> Sequence[str]:
        monkeypatch.setattr(vocab, "MIN_FREQUENCY", frequency)
        out = train(tmp_path, name, size, lines, extend=str(base))
        assert (out / "vocab.txt").read_bytes().startswith((base / "vocab.txt").read_bytes())
        return found(out).pieces[len(found(base).pieces) :]

    words = ["zebu", "yak", "ibex", "kudu", "okapi", "gaur", "oryx", "tapir"]
    lines = [word for number, word in enumerate(words) for _ in range(40 - 4 * number)]
    assert list(new_pieces("four", lines, "+4", 2)) == words[:4]
    lines = ["zebra"] * 6 + ["zest"] * 3
    assert list(new_pieces("often", lines, "+20", 4)) == ["zebra"]
    assert list(new_pieces("seldom", lines, "+20", 2)) == ["zebra", "zest"]
    assert list(new_pieces("none", lines, "+0", 2)) == []
    other = train(tmp_path, "another base", 101, SENTENCES)
    with pytest.raises(DataError, match=r"other settings .*extends was"):
        train(tmp_path, "none", "+0", lines, extend=str(other))


def test_the_same_text_gives_the_same_bytes_in_another_process(tmp_path):
    here = (train(tmp_path, lines=SENTENCES) / "vocab.txt").read_bytes()
    out = tmp_path / "again"
    command = [sys.executable, "-m", "bert_cli", "vocab", tmp_path / "sentences", out]
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    subprocess.run([*command, "--size", "150"], check=True, env=environment)
    assert (out / "vocab.txt").read_bytes() == here


def test_a_vocabulary_is_not_replaced_by_one_of_another_size_or_text(tmp_path, capsys):
    out = train(tmp_path, lines=SENTENCES)
    before = (out / "vocab.txt").read_bytes()
    capsys.readouterr()
    train(tmp_path)
    assert "(1 of 1 shards were done before)" in capsys.readouterr().out
    with pytest.raises(DataError, match=r"other settings .*size was 150, now 120"):
        train(tmp_path, size=120)
    problem = r"have changed since; move .*vocab away, or choose another"
    with pytest.raises(DataError, match=problem):
        train(tmp_path, lines=SENTENCES[::-1])
    assert (out / "vocab.txt").read_bytes() == before


JAPANESE = ["がんこなパンダがゴミを見た。", "ハングルは한글と書く。", "日本語の辞書。"] * 30


@pytest.mark.parametrize(
    ("cased", "strip", "word"),
    [(True, None, "Über"), (True, True, "Uber"), (False, None, "uber"), (False, False, "über")],
)
def test_accents_are_stripped_or_preserved(cased, strip, word, tmp_path, capsys):
    """`Über` has a capital and an accent: each of the four normalizations writes it in another way."""
    import transformers

    lines = ["Über Äpfel", "Ein Apfel", "über Apfel"] * 30
    out = train(tmp_path, lines=lines, cased=cased, strip_accents=strip)
    warned = "warning: stripping accents changes 50% of the words" in capsys.readouterr().err
    assert warned == (word in ("Uber", "uber"))
    config = json.loads((out / "tokenizer_config.json").read_text())
    assert (config["do_lower_case"], config["strip_accents"]) == (not cased, strip)
    pieces = found(out, cased=cased).pieces
    assert word in pieces and {"Über", "Uber", "über", "uber"} & {*pieces} <= {word, word.lower()}
    assert ("Äpfel" in pieces, "Apfel" in pieces) == (word == "Über", cased)
    tokens = transformers.AutoTokenizer.from_pretrained(out).tokenize(word if cased else "ÜBER")
    assert tokens == [word]
    settings = json.loads((out / "manifest.json").read_text())["settings"]
    assert ("strip_accents" in settings) == (strip is not None)
    if strip is not None:
        with pytest.raises(DataError, match=f"strip_accents was {strip}, now the default"):
            train(tmp_path, cased=cased)


def test_joiners_are_dropped_as_bert_drops_them(tmp_path):
    """U+200C and U+200D are format characters, which Google's BasicTokenizer removes, cased or not."""
    lines = ["می\u200cروم क्\u200dष"] * 30
    for cased in (False, True):
        out = train(tmp_path, str(cased), lines=lines, cased=cased)
        pieces = found(out, cased).pieces
        assert "میروم" in pieces and not any({"\u200c", "\u200d"} & {*piece} for piece in pieces)


def test_a_byte_order_mark_and_blank_lines_at_the_end_of_a_vocabulary_are_no_pieces(tmp_path):
    plain = "".join(f"{piece}\n" for piece in PIECES).encode()
    path = tmp_path / "vocab.txt"
    for data in (
        b"\xef\xbb\xbf" + plain,
        plain + b"\n \r\n\n",
        b"\xef\xbb\xbf" + plain.replace(b"\n", b"\r\n") + b"\r\n",
    ):
        path.write_bytes(data)
        vocabulary = found(path)
        assert vocabulary.pieces == tuple(PIECES)
        vocabulary.save(tmp_path)  # as a checkpoint has it, which other programs read
        assert path.read_bytes().replace(b"\r\n", b"\n") == plain
        assert found(path).sha256 == vocabulary.sha256


def test_a_warning_counts_the_words_that_stripping_changes_and_english_has_few(tmp_path, capsys):
    train(tmp_path, "counted", lines=["Das Café dort, dort 한국 가 e\u0301 x й"] * 30)
    assert "stripping accents changes 56% of the words" in capsys.readouterr().err
    train(tmp_path, lines=JAPANESE, strip_accents=False)
    train(tmp_path, "cased", cased=True)
    train(tmp_path, "english", lines=[*["plain words of English text"] * 60, "naïve"])
    assert "stripping" not in capsys.readouterr().err


def test_chinese_characters_are_words_of_their_own_or_parts_of_words(tmp_path):
    import transformers

    text = "日本語の辞書。"
    for split, expected in ((True, list(text)), (False, ["日本語の辞書", "。"])):
        settings = {"strip_accents": False, "split_chinese": split}
        out = train(tmp_path, f"v{split}", 300, JAPANESE, **settings)
        assert transformers.AutoTokenizer.from_pretrained(out).tokenize(text) == expected
        vocabulary = found(out)
        numbers = Encoder(vocabulary.ids, vocabulary.normalization).encode(text).tokens
        assert [vocabulary.pieces[number] for number in numbers] == expected
        assert "が" in "".join(vocabulary.pieces) and "한" in "".join(vocabulary.pieces)


def test_an_extension_normalizes_text_as_the_vocabulary_that_it_extends(tmp_path):
    kept = {"strip_accents": False, "split_chinese": False}
    base = str(train(tmp_path, "base", lines=["Über Äpfel", "über Gärten"] * 30, **kept))
    lines = ["Öfen und Höfe", "höfe über Öfen"] * 30
    out = train(tmp_path, "extended", "+20", lines, extend=base)
    vocabulary = found(out)
    assert vocabulary.normalization == Normalization(False, False, False)
    assert {"öfen", "höfe"} <= set(vocabulary.pieces[len(found(base).pieces) :])
    same = train(tmp_path, "same", "+20", extend=base, **kept)
    assert (same / "vocab.txt").read_bytes() == (out / "vocab.txt").read_bytes()


def test_a_script_of_many_characters_gets_as_many_as_cover_its_text(tmp_path):
    kanji = [chr(0x4E00 + number) for number in range(1600)]
    lines = ["".join(kanji[start : start + 40]) for start in range(0, 1600, 40)] * 4
    for size, expected in ((8000, 1600), (4800, 1200), (1200, 1000)):
        pieces = found(train(tmp_path, f"v{size}", size, lines)).pieces
        assert sum(piece in pieces for piece in kanji) == expected, size
    with pytest.raises(ConfigError, match=r"--size \(1004\): .* 1005 special .*at least 1005$"):
        train(tmp_path, "less", 1004, lines)
    assert len(found(train(tmp_path, "least", 1005, lines)).pieces) == 1005
