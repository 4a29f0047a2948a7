"""Sentences: the exact text, whatever the tool that wrote the documents did to it."""

import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.processes import kill_after_a_shard

import bert_cli
from bert_cli.config.data import PreprocessSettings
from bert_cli.data.shards.manifest import Manifest, Stats, read_manifest
from bert_cli.data.text import preprocess, sentences
from bert_cli.data.text.files import Reading, recognise
from bert_cli.errors import ConfigError, DataError

WORDS = [
    "river",
    "stone",
    "bridge",
    "garden",
    "winter",
    "letter",
    "window",
    "market",
    "music",
    "forest",
    "harbour",
]
PROSE = [
    f"{a.title()} {b} {c} near the {d}." for a in WORDS for b in WORDS for c in WORDS for d in WORDS
]


def doc(title: str, *lines: str, number: int = 1) -> str:
    head = f'<doc id="{number}" url="https://en.wikipedia.org/wiki?curid={number}" title="{title}">'
    return "\n".join([head, title, "", *lines, "", "</doc>", ""])


def corpus(folder: Path, **files: str) -> Path:
    (folder / "AA").mkdir(parents=True)
    for name, text in files.items():
        (folder / "AA" / name).write_bytes(text.encode())
    return folder


def prose(characters: int, seed: int = 0) -> str:
    """Return random paragraphs that Punkt can learn from."""
    chance = random.Random(seed)
    lines: list[str] = []
    while characters > 0:
        line = " ".join(chance.choices(PROSE, k=8)).replace(" stone", " ca. stone")
        lines.append(line)
        characters -= len(line)
    return "\n".join(lines)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without Punkt data and without a network."""
    import nltk

    monkeypatch.setattr(nltk.data, "path", [])
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sentences, "_download", lambda: False)
    sentences.load_splitter.cache_clear()
    return tmp_path


@pytest.fixture
def english(monkeypatch: pytest.MonkeyPatch, shared_data: Path) -> Path:
    """A machine with NLTK's English data."""
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(shared_data / "nltk_data")])
    monkeypatch.setenv("NLTK_DATA", str(shared_data / "nltk_data"))
    sentences.load_splitter.cache_clear()
    return shared_data


def run(source: Path, out: Path, processes: int = 1, **settings: Any) -> Manifest:
    preprocess.run(PreprocessSettings(input=source, out=out, processes=processes, **settings))
    return read_manifest(out)


def split(tmp_path: Path, text: str | bytes, at: str = ". ") -> tuple[Stats, str]:
    """Convert one file with a splitter that needs no data: after every `at`."""
    (tmp_path / "in").write_bytes(text if isinstance(text, bytes) else text.encode())

    def plain(line: str) -> list[str]:
        return line.replace(at, at.strip() + "\0").split("\0")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preprocess, "load_splitter", lambda *_: plain)
        part = recognise(tmp_path / "in", Reading("wikiextractor"))
        assert part is not None
        stats = preprocess.split_shard(
            (), tmp_path / "out", parts=[part], reading=Reading(), splitter=("plain", "", None)
        )
    return stats, (tmp_path / "out").read_bytes().decode()


EMPTY = doc("Empty") + doc("Dots", "...", "()") + '<doc id="9" url="" title="X">\n</doc>\n'
TEXTS = {
    "one sentence per line, a blank line between documents": (
        doc("Moon", "It is far. It is bright.", "It is old.") + doc("Sun", "It is hot."),
        "It is far.\nIt is bright.\nIt is old.\n\nIt is hot.\n",
    ),
    "documents without text are dropped": (
        EMPTY + doc("A", "One.") + EMPTY + doc("B", "Two.") + EMPTY,
        "One.\n\nTwo.\n",
    ),
    "text outside documents is dropped": (
        "tail\n\n</doc>\n" + doc("A", "One.") + "Stray.\n  \n" + doc("B", "Two.") + "last\n",
        "One.\n\nTwo.\n",
    ),
    "escapes are undone once and make no document": (
        doc("A &amp; B", "AT&amp;T &lt;b&gt; &amp;lt;", '&lt;doc id="7" url="u" title="t"&gt;')
        + doc("C", "&lt;/doc&gt;", "<doc about dogs>"),
        'AT&T <b> &lt;\n<doc id="7" url="u" title="t">\n\n</doc>\n<doc about dogs>\n',
    ),
    "titles are dropped, also with quotes, and only once": (
        doc('The "A" > B', 'The "A" > B', "It is.")
        + '<doc id="5" revid="77" url="u" title="T">\nT\n\nBody here.\n</doc>\n',
        'The "A" > B\nIt is.\n\nBody here.\n',
    ),
    "placeholders and empty brackets are removed": (
        doc(
            "A",
            "Albedo () or whiteness (; ) is the share formula_1, where formula_12 is light.",
            "formula_3",
            "Let formula_4 be (formula_5) codice_2.",
            "A formula_one car and my_formula_1 (x) stay ; as [1] they ( are ) .",
        ),
        "Albedo or whiteness is the share, where is light.\nLet be.\n"
        "A formula_one car and my_formula_1 (x) stay ; as [1] they ( are ) .\n",
    ),
    "white space and line ends of every kind": (
        doc("Été", "Un  été\u00a0chaud.\u2028Très chaud.\x85 Oui.", "日本語。").replace(
            "\n", "\r\n"
        ),
        "Un été chaud. Très chaud. Oui.\n日本語。\n",
    ),
    "a file that ends in a document": (
        doc("A", "One. Two.").rpartition("</doc>")[0],
        "One.\nTwo.\n",
    ),
}


@pytest.mark.parametrize("case", TEXTS)
def test_the_sentences_of_articles_are_exactly_these(tmp_path: Path, case: str) -> None:
    text, expected = TEXTS[case]
    stats, lines = split(tmp_path, text)
    assert lines == expected
    assert (stats.documents, stats.sentences) == (
        lines.count("\n\n") + 1,
        len([line for line in lines.split("\n") if line]),
    )
    outside, empty = ("outside" in case) * 3, ("without text" in case) * 9
    assert stats.extra == {"documents_without_text": empty, "lines_outside_documents": outside}
    note = f"{tmp_path / 'in'}: left out is text outside <doc ...> ... </doc>, lines: 3"
    assert stats.notes == ((note,) if outside else ())


def test_bytes_that_are_not_text_are_an_error_with_line_and_byte(tmp_path: Path) -> None:
    text = doc("A", "Caf").encode()
    with pytest.raises(DataError, match=rf"\(line 4, byte {text.index(b'Caf') + 3}\): not UTF-8"):
        split(tmp_path, text.replace(b"Caf", b"Caf\xff"))


def test_english_abbreviations_and_quotes(english: Path, tmp_path: Path) -> None:
    lines = [
        "Dr. Smith of the U.S. Navy met J. R. Green at 5 p.m. on Sunday. They spoke.",
        'He said "Stop it." Then he left. "Why?" she asked. It cost $3.50 (about £2).',
        "History.",
    ]
    source = corpus(tmp_path / "in", wiki_00=doc("A", *lines))
    manifest = run(source, tmp_path / "out")
    assert (tmp_path / "out/AA/wiki_00.txt").read_text() == (
        "Dr. Smith of the U.S. Navy met J. R. Green at 5 p.m. on Sunday.\nThey spoke.\n"
        'He said "Stop it."\nThen he left.\n"Why?"\nshe asked.\nIt cost $3.50 (about £2).\n'
        "History.\n"
    )
    assert manifest["settings"]["parameters"] == "installed" and manifest["notes"] == []
    assert manifest["counts"]["sentences"] == 8
    assert manifest["versions"]["nltk"] == "3.10.4"


def test_without_data_punkt_learns_from_the_corpus_once(
    bare: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = corpus(bare / "in", wiki_00=doc("A", prose(200_000)), wiki_01=doc("B", prose(9000, 1)))
    manifest = run(source, bare / "out")
    note = "Punkt data are not installed and could not be downloaded: learned from the first 0.2"
    assert f"\npreprocess: {note}" in capsys.readouterr().out
    assert manifest["notes"] == [
        f"Punkt's parameters were learned from the corpus ({bare}/out/punkt.json)"
    ]
    learned = json.loads((bare / "out" / "punkt.json").read_text())
    assert "ca" in learned["abbreviations"]
    text = (bare / "out/AA/wiki_01.txt").read_text()
    assert "ca. stone" in text and "ca.\n" not in text
    assert text.count("\n") == manifest["shards"][1]["sentences"] > 100
    learned_bytes = (bare / "out/punkt.json").read_bytes()
    (bare / "out/AA/wiki_01.txt").unlink()
    sentences.load_splitter.cache_clear()
    assert run(source, bare / "out")["notes"] == manifest["notes"]
    assert (bare / "out/AA/wiki_01.txt").read_text() == text
    assert (bare / "out/punkt.json").read_bytes() == learned_bytes


def test_data_that_vanished_between_two_runs_are_an_error(
    english: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nltk

    source = corpus(tmp_path / "in", wiki_00=doc("A", prose(900)))
    run(source, tmp_path / "out")
    monkeypatch.setattr(nltk.data, "path", [])
    monkeypatch.setattr(sentences, "_download", lambda: False)
    sentences.load_splitter.cache_clear()
    with pytest.raises(DataError, match="was begun with NLTK's Punkt data"):
        run(source, tmp_path / "out")
    assert not (tmp_path / "out/punkt.json").exists()


def test_a_language_that_nltk_lacks_is_learned_without_a_download(
    bare: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never() -> bool:
        raise AssertionError("asked the network")

    monkeypatch.setattr(sentences, "_download", never)
    source = corpus(bare / "in", wiki_00=doc("A", prose(50_000)))
    manifest = run(source, bare / "out", language="bulgarian")
    assert "NLTK has no Punkt data for 'bulgarian': learned" in capsys.readouterr().out
    assert manifest["settings"]["parameters"] == "learned"


def test_a_download_that_hangs_or_fails_is_abandoned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = tmp_path / "nltk.py"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(sentences, "NLTK_SERVER", server.getsockname())
        monkeypatch.setattr(sentences, "DOWNLOAD_SECONDS", 0.5)
        fake.write_text("import time\ndef download(*_, **__): time.sleep(60)\n")
        started = time.monotonic()
        assert not sentences._download()
        assert time.monotonic() - started < 10
        monkeypatch.setattr(sentences, "DOWNLOAD_SECONDS", 30.0)
        fake.write_text("def download(*_, **__): return False\n")
        assert not sentences._download()
        fake.write_text("def download(*_, **__): return True\n")
        assert sentences._download()
    # No server answers: NLTK is not asked, except through a proxy.
    assert not sentences._download()
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    assert sentences._download()


def test_the_server_that_is_tried_is_the_one_of_nltk() -> None:
    from nltk.downloader import Downloader

    assert urlsplit(Downloader.DEFAULT_URL).hostname == sentences.NLTK_SERVER[0]


def test_sentencex_splits_and_needs_a_language_that_it_knows(tmp_path: Path) -> None:
    pytest.importorskip("sentencex")
    source = corpus(tmp_path / "in", wiki_00=doc("A", "Dr. Smith came. He left."))
    manifest = run(source, tmp_path / "out", sentence_splitter="sentencex")
    assert (tmp_path / "out/AA/wiki_00.txt").read_text() == "Dr. Smith came.\nHe left.\n"
    assert "sentencex" in manifest["versions"]
    with pytest.raises(ConfigError, match="give the ISO 639 code"):
        run(source, tmp_path / "other", sentence_splitter="sentencex", language="klingon")


def test_an_input_without_sentences_is_an_error(bare: Path) -> None:
    source = corpus(bare / "in", wiki_00=doc("A", "..."), wiki_01="\n \n")
    with pytest.raises(DataError, match="gave no sentences"):
        run(source, bare / "out", sentence_splitter="lines")
    with pytest.raises(DataError, match="does not exist"):
        run(bare / "absent", bare / "out", sentence_splitter="lines")
    assert not (bare / "out/manifest.json").exists()


def test_blocks_that_wikiextractor_does_not_write_are_an_error_before_the_work(bare: Path) -> None:
    strange = '<doc id="1">\nA document without a title in its first line.\n</doc>\n'
    source = corpus(bare / "in", wiki_00=doc("A", prose(9000)), wiki_01="\n" + strange)
    with pytest.raises(DataError, match="holds no document") as caught:
        run(source, bare / "out")
    assert caught.value.where == f"{source / 'AA/wiki_01'} ('<doc id=\"1\">')"
    assert '<doc id="1" url="..." title="...">' in caught.value.remedy
    assert not (bare / "out").exists()


def test_real_articles_give_the_same_text_for_any_number_of_processes(
    english: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "in" / "AA"
    folder.mkdir(parents=True)
    for name in ("wiki_00", "wiki_01"):
        (folder / name).symlink_to(english / "text" / "extracted" / "AA" / name)
    one = run(tmp_path / "in", tmp_path / "one", 1)
    run(tmp_path / "in", tmp_path / "two", 2)
    for name in ("wiki_00.txt", "wiki_01.txt"):
        text = (tmp_path / "one" / "AA" / name).read_text(encoding="utf-8")
        assert text == (tmp_path / "two" / "AA" / name).read_text(encoding="utf-8")
        assert text[-1] == "\n" != text[0] and "\n\n\n" not in text and "&amp;" not in text
    assert one["counts"]["documents"] == 52
    assert 14_000 < one["counts"]["sentences"] < 15_000


def test_a_run_killed_by_signal_9_continues_to_the_same_files(bare: Path) -> None:
    files = {f"wiki_{n:02}": doc(f"A {n}", prose(60_000, n)) for n in range(5)}
    source = corpus(bare / "in", **files)
    run(source, bare / "whole")
    out = bare / "out"
    out.mkdir()
    (out / "punkt.json").write_bytes((bare / "whole" / "punkt.json").read_bytes())
    program = (
        "from bert_cli.config.data import PreprocessSettings as S\n"
        "from bert_cli.data.text.preprocess import run\n"
        f"run(S(input={str(source)!r}, out={str(out)!r}, processes=1))"
    )
    kill_after_a_shard(program, out)
    assert not (out / "manifest.json").exists()
    assert len(list((out / "AA").iterdir())) < 5
    run(source, out)
    for path in sorted((bare / "whole" / "AA").iterdir()):
        assert (out / "AA" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to read the peak from")
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    program = (
        "import re, sys\n"
        "from pathlib import Path\n"
        "from bert_cli.data.text import preprocess\n"
        "from bert_cli.data.text.files import Reading, recognise\n"
        "preprocess.load_splitter = lambda *_: lambda line: line.split('. ')\n"
        "parts = [recognise(Path(sys.argv[1]), Reading())]\n"
        "out = Path(sys.argv[1] + '.txt')\n"
        "preprocess.split_shard((), out, parts=parts, reading=Reading(), splitter=('', '', None))\n"
        "print(re.search(r'VmHWM:\\s*(\\d+)', Path('/proc/self/status').read_text())[1])"
    )
    paragraphs = prose(100_000)
    peaks = []
    for times in (1, 200):
        path = tmp_path / f"{times}"
        path.write_text(doc("A", *[paragraphs] * times))
        done = subprocess.run(
            [sys.executable, "-c", program, str(path)],
            env=os.environ | {"PYTHONPATH": str(Path(bert_cli.__file__).parents[1])},
            capture_output=True,
            text=True,
            check=True,
        )
        peaks.append(int(done.stdout))  # kilobytes
    assert path.stat().st_size > 20_000_000
    assert peaks[1] - peaks[0] < 5_000  # 3,000 for the first megabyte, which decides what a file is
