"""Vocabularies found in files, folders and on a hub, refused, and trained."""

import http.server
import json
import os
import subprocess
import sys
import threading

import pytest

from bert_cli.config.data import VocabSettings
from bert_cli.data.records.vocab import (
    SPECIAL_TOKENS,
    find_vocabulary,
    read_vocabulary,
    run,
    tokenizer_config,
)
from bert_cli.data.records.wordpiece import Encoder
from bert_cli.errors import ConfigError, DataError

PIECES = ["the", "cat", "##s", "[PAD]", "[MASK]", "[UNK]", "[SEP]", "[CLS]"]
SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Foxes are quick, and dogs are lazy!",
    "Naïve foxes jumped; the dogs' laziness overflowed.",
    "",
    "A literal [SEP] in the text is not a separator.",
] * 20


def write_vocab(folder, pieces=PIECES, config=None, end="\n"):
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text(end.join(pieces) + end, encoding="utf-8", newline="")
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "vocab.txt"


# --- reading


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_piece_has_the_number_of_its_line(tmp_path, end):
    vocabulary = read_vocabulary(write_vocab(tmp_path, end=end))
    assert list(vocabulary.pieces) == PIECES
    assert vars(vocabulary.special) == {"pad": 3, "unk": 5, "cls": 7, "sep": 6, "mask": 4}
    assert vocabulary.is_continuation.tolist() == [piece == "##s" for piece in PIECES]
    assert vocabulary.ids["cat"] == 1


def test_line_ends_of_other_kinds_within_a_piece_do_not_shift_the_ids(tmp_path):
    pieces = ["a\u2028b", "\x85", "c\x0bd", *SPECIAL_TOKENS]
    assert list(read_vocabulary(write_vocab(tmp_path, pieces)).pieces) == pieces


@pytest.mark.parametrize(
    ("line", "told"), [("cat", r"line 9\): repeats 'cat' of line 2"), ("", r"line 9\): is blank")]
)
def test_a_doubled_or_blank_line_is_refused_by_its_number(tmp_path, line, told):
    with pytest.raises(DataError, match=rf"{told}.*write \[unused8\] there"):
        read_vocabulary(write_vocab(tmp_path, [*PIECES[:8], line, *PIECES[8:]]))


@pytest.mark.parametrize("token", SPECIAL_TOKENS)
def test_a_missing_special_token_is_named(tmp_path, token):
    path = write_vocab(tmp_path, [piece for piece in PIECES if piece != token])
    with pytest.raises(DataError, match=rf"vocab\.txt\): \{token} missing"):
        read_vocabulary(path)


def test_what_is_no_text_is_refused(tmp_path):
    (tmp_path / "vocab.txt").write_bytes(b"\xff\xfe\x00binary")
    with pytest.raises(DataError, match="cannot be read as text"):
        find_vocabulary(str(tmp_path / "vocab.txt"), cased=False)


# --- finding


def test_a_file_and_the_folder_that_holds_it_are_the_same_vocabulary(tmp_path, monkeypatch):
    path = write_vocab(tmp_path / "model")
    by_file = find_vocabulary(str(path), cased=False)
    by_folder = find_vocabulary(str(path.parent), cased=False)
    assert by_file.path == by_folder.path == path
    assert by_file.sha256 == by_folder.sha256
    monkeypatch.setenv("MODELS", str(tmp_path))
    assert find_vocabulary("$MODELS/model", cased=False).path == path
    monkeypatch.chdir(tmp_path)  # a folder here goes before a name on the hub
    assert find_vocabulary("model", cased=False).sha256 == by_file.sha256


@pytest.mark.parametrize("config", [{}, {"do_lower_case": True}, tokenizer_config(cased=False)])
def test_a_tokenizer_config_that_agrees_is_accepted(tmp_path, config):
    write_vocab(tmp_path, config=config)
    find_vocabulary(str(tmp_path), cased=False)


@pytest.mark.parametrize("cased", [False, True])
def test_a_tokenizer_config_of_the_other_case_is_refused_with_the_remedy(tmp_path, cased):
    path = write_vocab(tmp_path, config=tokenizer_config(cased=not cased))
    wanted = "leave out --cased" if cased else "give --cased"
    for name in (str(tmp_path), str(path)):
        with pytest.raises(ConfigError, match=wanted):
            find_vocabulary(name, cased=cased)


@pytest.mark.parametrize(
    ("cased", "config"),
    [
        (False, {"strip_accents": False}),
        (True, {"strip_accents": True}),
        (False, {"tokenize_chinese_chars": False}),
    ],
)
def test_a_tokenizer_that_cuts_text_otherwise_is_refused(tmp_path, cased, config):
    write_vocab(tmp_path, config=config)
    with pytest.raises(ConfigError, match="not how BERT splits text"):
        find_vocabulary(str(tmp_path), cased=cased)


@pytest.mark.parametrize("config", [None, {"tokenizer_class": "BertTokenizer"}])
def test_without_a_word_on_capitals_the_pieces_tell(tmp_path, config):
    path = write_vocab(tmp_path, [*PIECES, "The", "Cat"], config)
    with pytest.raises(ConfigError, match=r"--cased \(false.*: 2 of the 5 pieces .* give --cased"):
        find_vocabulary(str(path), cased=False)
    assert find_vocabulary(str(path), cased=True).pieces[-1] == "Cat"
    write_vocab(tmp_path, config=config)
    with pytest.raises(
        ConfigError, match=r"--cased \(true.*: 0 of the 3 pieces .* leave out --cased"
    ):
        find_vocabulary(str(path), cased=True)
    assert find_vocabulary(str(path), cased=False).pieces[0] == "the"
    # What the file says counts, as where the text has no capitals at all.
    write_vocab(tmp_path, config={"do_lower_case": False})
    assert find_vocabulary(str(path), cased=True).pieces[0] == "the"


@pytest.mark.parametrize(
    "pieces",
    [
        ["字", "##典", "1990"],  # letters of one case
        ["naïve"],  # keeps accents, so it is no uncased one
        [*(f"word{number}" for number in range(40)), "X"],  # a capital by chance
    ],
)
def test_pieces_that_tell_nothing_of_capitals_are_taken_as_is_asked(tmp_path, pieces):
    special = [piece for piece in PIECES if piece.startswith("[")]
    path = write_vocab(tmp_path, [*special, *pieces])
    for cased in (False, True):
        assert find_vocabulary(str(path), cased=cased).pieces[-1] == pieces[-1]


def test_googles_vocabularies_tell_their_case_by_their_pieces(shared_data):
    for kind, cased in (("cased", True), ("uncased", False)):
        path = str(shared_data / "vocab" / f"bert-base-{kind}-vocab.txt")
        assert len(find_vocabulary(path, cased=cased).pieces) > 28_000
        with pytest.raises(ConfigError, match=f"{'give' if cased else 'leave out'} --cased"):
            find_vocabulary(path, cased=not cased)


def test_a_broken_tokenizer_config_is_refused(tmp_path):
    write_vocab(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match="Invalid JSON"):
        find_vocabulary(str(tmp_path), cased=False)


@pytest.mark.parametrize(
    "name", ["missing.txt", "/nowhere/at/all", "a/b/c", "~/no", "./vocab", "../vocab", "vocab/"]
)
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="no such file or folder; give"):
        find_vocabulary(name, cased=False)


def test_a_folder_without_a_vocabulary_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"holds no vocab\.txt"):
        find_vocabulary(str(tmp_path), cased=False)


# --- the hub, as a server in this process and a client in one of its own

ASK = """
import sys
from bert_cli.data.records.vocab import find_vocabulary
from bert_cli.errors import BertError
try:
    found = find_vocabulary(sys.argv[1], cased=sys.argv[2] == "cased")
    print("found", len(found.pieces), found.sha256)
except BertError as error:
    print(type(error).__name__, error)
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as a download needs: files of the repository someone/model."""

    files: dict[str, bytes] = {}  # noqa: RUF012

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body):
        repository, _, name = self.path.lstrip("/").partition("/resolve/main/")
        known = repository in ("someone/model", "someone/bare")
        content = self.files.get(f"{repository}/{name}")
        if content is None:
            self.send_response(404)
            code = "EntryNotFound" if known else "RepoNotFound"
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("ETag", f'"{hash(content):x}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(tmp_path):
    vocab = ("\n".join(PIECES) + "\n").encode()
    Hub.files = {
        "someone/model/vocab.txt": vocab,
        "someone/model/tokenizer_config.json": json.dumps(tokenizer_config(cased=True)).encode(),
        "someone/bare/vocab.txt": vocab,
    }
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def ask(tmp_path, endpoint, name, case="uncased", **settings):
    kept = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    environment = kept | {
        "HF_HOME": str(tmp_path / "hub"),
        "HF_ENDPOINT": endpoint,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        **settings,
    }
    done = subprocess.run(
        [sys.executable, "-c", ASK, name, case],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    asked = f"vocab: {name} is not here; asking the Hugging Face hub for it"
    assert done.stderr.splitlines()[:1] == [asked]
    assert "thrown while requesting" not in done.stderr
    return done.stdout.strip()


def test_a_name_is_fetched_from_the_hub_and_then_found_without_it(tmp_path, hub):
    found = ask(tmp_path, hub, "someone/model", "cased")
    assert found.startswith(f"found {len(PIECES)} ")
    again = ask(tmp_path, "http://127.0.0.1:9", "someone/model", "cased", HF_HUB_OFFLINE="1")
    assert again == found


def test_the_case_on_the_hub_must_agree_and_no_tokenizer_config_agrees_with_all(tmp_path, hub):
    assert ask(tmp_path, hub, "someone/model").startswith("ConfigError --cased (false")
    assert ask(tmp_path, hub, "someone/bare").startswith("found")


def test_a_name_the_hub_does_not_have_is_refused(tmp_path, hub):
    told = ask(tmp_path, hub, "someone/else")
    assert told.startswith("DataError --vocab (someone/else)")
    assert "check the name and the network" in told


def test_without_a_network_the_error_says_what_to_do(tmp_path):
    told = ask(tmp_path, "http://127.0.0.1:9", "someone/model", HF_HUB_OFFLINE="1")
    assert told.startswith("DataError --vocab (someone/model)")
    assert "give the path of a vocab.txt" in told
    assert "\n" not in told


def test_a_hub_that_does_not_answer_is_asked_once_and_without_noise(tmp_path, hub):
    told = ask(tmp_path, "http://127.0.0.1:9", "data/vocab9k")
    assert told.startswith("DataError --vocab (data/vocab9k): no such file or folder here")
    assert "refused" in told
    found = ask(tmp_path, hub, "someone/model", "cased")
    assert ask(tmp_path, "http://127.0.0.1:9", "someone/model", "cased") == found


# --- training


def sentences(tmp_path, lines=SENTENCES):
    folder = tmp_path / "sentences"
    folder.mkdir(exist_ok=True)
    half = len(lines) // 2
    (folder / "a.txt").write_text("\n".join(lines[:half]) + "\n", encoding="utf-8")
    (folder / "b.txt").write_text("\n".join(lines[half:]) + "\n", encoding="utf-8")
    return folder


def train(tmp_path, name="vocab", **settings):
    out = tmp_path / name
    run(VocabSettings(input=tmp_path / "sentences", out=out, size=150, **settings))
    return out


def test_a_trained_vocabulary_has_the_special_tokens_first_and_can_encode(tmp_path, capsys):
    sentences(tmp_path)
    out = train(tmp_path)
    vocabulary = find_vocabulary(str(out), cased=False)
    assert vocabulary.pieces[:5] == SPECIAL_TOKENS
    assert len(vocabulary.pieces) == len(set(vocabulary.pieces)) <= 150
    assert "quick" in vocabulary.pieces
    assert not any(piece.lower() != piece for piece in vocabulary.pieces[5:])
    encoder = Encoder(vocabulary.ids, cased=False)
    tokens = encoder.encode("\n".join(SENTENCES)).tokens
    assert vocabulary.special.unk not in tokens
    assert not any("ï" in piece for piece in vocabulary.pieces)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["step"] == "vocab"
    assert manifest["counts"]["pieces"] == len(vocabulary.pieces)
    assert manifest["counts"]["sentences"] == 80
    assert "tokenizers" in manifest["versions"]
    line = capsys.readouterr().out
    number = len(vocabulary.pieces)
    assert number < 150
    assert line.startswith(
        f"vocab: {number} pieces are all that occur 2 times in this text, not the 150 of --size"
    )
    assert f"--bert-config.vocab-size {number}\n" in line
    assert line.splitlines()[1].startswith(f"vocab: {number} pieces from 80 sentences")
    assert line.count("\n") == 2
    leftovers = {path.name for path in out.iterdir() if path.name != ".done"}
    assert leftovers == {"vocab.txt", "tokenizer_config.json", "manifest.json"}


def test_a_cased_vocabulary_keeps_capitals_and_accents(tmp_path):
    sentences(tmp_path)
    out = train(tmp_path, cased=True)
    pieces = find_vocabulary(str(out), cased=True).pieces
    assert any(piece[0].isupper() for piece in pieces[5:])
    assert any("ï" in piece for piece in pieces)
    with pytest.raises(ConfigError, match="give --cased"):
        find_vocabulary(str(out), cased=False)


def test_the_same_text_gives_the_same_bytes_in_another_process(tmp_path):
    sentences(tmp_path)
    here = (train(tmp_path) / "vocab.txt").read_bytes()
    code = (
        "import sys; from pathlib import Path; from bert_cli.config.data import VocabSettings; "
        "from bert_cli.data.records.vocab import run; "
        "run(VocabSettings(input=Path(sys.argv[1]), out=Path(sys.argv[2]), size=150))"
    )
    for number in range(3):
        out = tmp_path / f"vocab{number}"
        environment = os.environ | {"PYTHONHASHSEED": str(number + 1)}
        arguments = [str(tmp_path / "sentences"), str(out)]
        subprocess.run(
            [sys.executable, "-c", code, *arguments],
            check=True,
            env=environment,
            capture_output=True,
            timeout=60,
        )
        assert (out / "vocab.txt").read_bytes() == here


def test_hugging_face_opens_a_trained_vocabulary(tmp_path):
    sentences(tmp_path)
    out = train(tmp_path)
    code = (
        "import sys; from transformers import AutoTokenizer; "
        "t = AutoTokenizer.from_pretrained(sys.argv[1]); "
        "print(t('the quick dogs')['input_ids'], t.mask_token_id, t.model_max_length)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    vocabulary = read_vocabulary(out / "vocab.txt")
    ids = Encoder(vocabulary.ids, cased=False).encode("the quick dogs").tokens.tolist()
    wanted = [vocabulary.special.cls, *ids, vocabulary.special.sep]
    assert done.stdout.split("\n")[0] == f"{wanted} 4 512"


@pytest.mark.parametrize("lines", [[""], ["", "  ", "\t"]])
def test_an_empty_corpus_is_refused_and_leaves_nothing(tmp_path, lines):
    sentences(tmp_path, lines)
    with pytest.raises(DataError, match="no text"):
        train(tmp_path)
    assert not (tmp_path / "vocab" / "vocab.txt").exists()


def test_the_folder_of_another_step_is_refused_and_left_as_it_is(tmp_path):
    folder = tmp_path / "sentences"
    (folder / ".done").mkdir(parents=True)
    (folder / ".done" / "settings.json").write_text('{"step": "preprocess", "settings": {}}')
    (folder / "manifest.json").write_text('{"shards": [{"output": "a.txt"}]}')
    (folder / "a.txt").write_text("One sentence.\n")
    with pytest.raises(DataError, match="holds the output of `bert preprocess`"):
        run(VocabSettings(input=folder, out=folder, size=100))
    assert "a.txt" in (folder / "manifest.json").read_text()
    assert not (folder / "vocab.txt").exists()


def test_a_folder_keeps_its_vocabulary_when_the_size_or_the_text_is_another(tmp_path, capsys):
    sentences(tmp_path)
    out = train(tmp_path)
    before = (out / "vocab.txt").read_bytes()
    capsys.readouterr()
    assert train(tmp_path) == out
    assert "vocab.txt is complete for this text (nothing to do)" in capsys.readouterr().out
    with pytest.raises(DataError, match=r"other settings .*size was 150, now 120"):
        run(VocabSettings(input=tmp_path / "sentences", out=out, size=120))
    with pytest.raises(DataError, match="text_field was 'text', now 'body'"):
        lines = tmp_path / "lines.jsonl"
        lines.write_text('{"body": "One sentence."}\n')
        run(VocabSettings(input=lines, out=out, size=150, text_field="body"))
    sentences(tmp_path, SENTENCES[::-1])
    with pytest.raises(
        DataError, match=r"which has changed since; remove .*vocab or choose another"
    ):
        train(tmp_path)
    assert (out / "vocab.txt").read_bytes() == before


def test_of_a_vocabulary_as_large_as_asked_nothing_more_is_said(tmp_path, capsys):
    run(VocabSettings(input=sentences(tmp_path), out=tmp_path / "vocab", size=100))
    assert len(read_vocabulary(tmp_path / "vocab" / "vocab.txt").pieces) == 100
    assert "are all that occur" not in capsys.readouterr().out
