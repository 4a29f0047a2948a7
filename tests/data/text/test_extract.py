"""Extraction: every page comes back, or its loss is reported."""

import bz2
import functools
import gzip
import lzma
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import alive, kill_after_a_shard, wait_for

from bert_cli.config.data import ExtractSettings
from bert_cli.data.shards.manifest import Manifest, Stats, read_manifest
from bert_cli.data.text import extract
from bert_cli.data.text.wikipedia import Dump, find_dump
from bert_cli.errors import DataError

HEADER = """<mediawiki xml:lang="fr">
  <siteinfo>
    <base>https://fr.wikipedia.org/wiki/Accueil</base>
    <namespaces>
      <namespace key="0" case="first-letter" />
      <namespace key="10" case="first-letter">Modèle</namespace>
    </namespaces>
  </siteinfo>
"""
DUMPS = {
    "bgwiki-latest-pages-articles-shortened.xml.bz2": (1, 0, 2, []),
    "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2": (106, 99, 1, []),
    "enwiki-table-markup.xml.bz2": (5, 0, 0, ["has no <siteinfo>: taken as en.wikipedia.org"]),
    "viwiki-truncated-100k.xml.xz": (274, 86, 610, ["cut in the middle of page 971 (Hà Lan)"]),
}
# Stands in for WikiExtractor, in the folder it is started from.
FAKE = """import subprocess, sys, time
from pathlib import Path
{}
"""


def page(number: int, title: str, text: str, namespace: int = 0, redirect: str = "") -> str:
    lines = [f"    <title>{title}</title>", f"    <ns>{namespace}</ns>", f"    <id>{number}</id>"]
    lines += [f'    <redirect title="{redirect}" />'] if redirect else []
    lines += ["    <revision>", f"      <id>{number + 1000}</id>"]
    lines += [f'      <text xml:space="preserve">{text}</text>', "    </revision>"]
    return "\n".join(["  <page>", *lines, "  </page>\n"])


def articles(count: int, words: int = 200) -> str:
    text = "This is '''article''' number {} of [[many]]. It goes &amp; goes on.\n" * (words // 10)
    return "".join(
        page(n + 1, f"Article {n + 1}", text.replace("{}", str(n))) for n in range(count)
    )


def dump(path: Path, pages: str, header: str = HEADER, end: str = "</mediawiki>\n") -> Path:
    path.write_text(header + pages + end, encoding="utf-8")
    return path


def run(
    source: Path, out: Path, processes: int = 1, *, templates: bool = False, megabytes: int = 1
) -> Manifest:
    extract.run(
        ExtractSettings(
            dump=source,
            out=out,
            processes=processes,
            expand_templates=templates,
            chunk_megabytes=megabytes,
        )
    )
    return read_manifest(out)


def tree(out: Path) -> dict[str, str]:
    files = sorted(out.rglob("wiki_[0-9][0-9]"))
    return {str(file.relative_to(out)): file.read_text(encoding="utf-8") for file in files}


def titles(out: Path) -> list[str]:
    return re.findall(r'^<doc .*title="(.*)">$', "".join(tree(out).values()), re.MULTILINE)


def convert(tmp_path: Path, pages: str, fake: str = "") -> tuple[Stats, str]:
    """Extract one chunk in this process, with a stand-in for the tool if one is given."""
    source, output = tmp_path / "in" / "chunk.xml", tmp_path / "out" / "wiki_00"
    for path in (source, output):
        path.parent.mkdir()
    source.write_bytes((HEADER + pages + "</mediawiki>\n").encode("utf-8", "surrogateescape"))
    if fake:
        (tmp_path / "in/wikiextractor").mkdir()
        (tmp_path / "in/wikiextractor/__init__.py").touch()
        (tmp_path / "in/wikiextractor/WikiExtractor.py").write_text(FAKE.format(fake))
    stats = extract.extract_chunk((source,), output, name="AA/wiki_00", xml_bytes=1, skipped={})
    return stats, output.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", DUMPS)
def test_real_dumps_give_all_their_articles(shared_data: Path, tmp_path: Path, name: str) -> None:
    documents, redirects, others, notes = DUMPS[name]
    manifest = run(shared_data / "dumps" / name, tmp_path / "out", 2, megabytes=4)
    counts = manifest["counts"]
    assert (
        counts["documents"] == counts["pages_given"] == documents == len(titles(tmp_path / "out"))
    )
    assert counts["redirects"] == redirects
    assert counts["pages_of_other_namespaces"] == others
    assert len(manifest["notes"]) == len(notes)
    assert all(note in text for note, text in zip(notes, manifest["notes"], strict=True))
    assert manifest["versions"]["wikiextractor"] == "3.1.0"


def test_utf_16_comes_out_as_readable_utf_8(shared_data: Path, tmp_path: Path) -> None:
    run(shared_data / "dumps" / "bgwiki-latest-pages-articles-shortened.xml.bz2", tmp_path / "out")
    assert titles(tmp_path / "out") == ["Григориански календар"]
    text = tree(tmp_path / "out")["AA/wiki_00"]
    assert "Григорианският календар" in text and "\ufffd" not in text


def test_chunks_and_workers_do_not_change_the_text(shared_data: Path, tmp_path: Path) -> None:
    source = next((shared_data / "dumps").glob("enwiki-latest*"))
    run(source, tmp_path / "one", 1, megabytes=100)
    run(source, tmp_path / "many", 2, megabytes=2)
    assert list(tree(tmp_path / "one")) == ["AA/wiki_00"]
    assert list(tree(tmp_path / "many")) == ["AA/wiki_00", "AA/wiki_01", "AA/wiki_02"]
    assert "".join(tree(tmp_path / "one").values()) == "".join(tree(tmp_path / "many").values())


def test_every_compression_and_encoding_reads_the_same(tmp_path: Path) -> None:
    text = HEADER + page(7, "Été", "L'été est &lt;b&gt;chaud&lt;/b&gt;.") + articles(20)
    plain = (text + "</mediawiki>\n").encode()
    half = len(plain) // 2
    (tmp_path / "dump.xml").write_bytes(plain)
    expected = list(Dump(tmp_path / "dump.xml").pages())
    for data in (
        bz2.compress(plain),
        bz2.compress(plain[:half]) + bz2.compress(plain[half:]) + bytes(9),  # multistream, padded
        lzma.compress(plain),
        gzip.compress(plain),
        plain.decode().encode("utf-16"),
    ):
        (tmp_path / "dump.xml").write_bytes(data)
        reader = Dump(tmp_path / "dump.xml")
        assert (list(reader.pages()), reader.notes) == (expected, [])
    manifest = run(tmp_path / "dump.xml", tmp_path / "out")
    assert manifest["counts"]["documents"] == len(expected) == 21
    first = tree(tmp_path / "out")["AA/wiki_00"].split("</doc>")[0]
    url = "https://fr.wikipedia.org/wiki?curid=7"
    assert first == f'<doc id="7" url="{url}" title="Été">\nÉté\n\nL\'été est chaud.\n\n'


def test_a_dump_cut_in_a_page_loses_that_page_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = HEADER + articles(5)
    source = tmp_path / "cut.xml"
    source.write_text(text[: text.rindex("</text>") - 9])
    manifest = run(source, tmp_path / "out")
    note = "cut.xml is cut in the middle of page 5 (Article 5): that page is lost, the 4 before it"
    assert note in manifest["notes"][0]
    assert f"extract: {note}" in capsys.readouterr().out
    assert titles(tmp_path / "out") == [f"Article {n}" for n in range(1, 5)]


def test_a_dump_cut_between_pages_is_noticed(tmp_path: Path) -> None:
    reader = Dump(dump(tmp_path / "cut.xml", articles(3), end=""))
    assert len(list(reader.pages())) == 3
    assert reader.notes == ["cut.xml ends after 3 pages without </mediawiki>: pages may be missing"]


@pytest.mark.parametrize(
    "pack", [bz2.compress, functools.partial(lzma.compress, preset=0), gzip.compress]
)
def test_a_damaged_archive_keeps_the_pages_before_the_damage(
    tmp_path: Path, pack: "functools.partial[bytes]"
) -> None:
    rows = "".join(page(n, f"Page {n}", str(os.urandom(6000))) for n in range(1, 201))
    packed = pack((HEADER + rows + "</mediawiki>\n").encode())
    middle = len(packed) // 2
    for damaged in (packed[:middle], packed[:middle] + bytes(64) + packed[middle + 64 :]):
        (tmp_path / "dump.xml").write_bytes(damaged)
        reader = Dump(tmp_path / "dump.xml")
        pages = list(reader.pages())
        # Gzip and bzip2 find damage only where its block ends, so some of it may be read as text.
        assert 20 < len(pages) <= 200
        content = rows.split('preserve">')[11].split("</text>")[0]
        assert pages[10].decode() == page(11, "Page 11", content).strip()
        assert re.search(
            "breaks off inside its compressed data|is damaged near byte", reader.notes[0]
        )


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", "is not a MediaWiki dump .0 bytes"),
        (b"<html><body>404</body></html>", "is not a MediaWiki dump"),
        (b"BZh91AY&SY not really", "is damaged near byte 21"),
        (b"7z\xbc\xaf\x27\x1c....", "is a 7z file"),
        (HEADER.encode() + b"</mediawiki>", "holds no page"),
        ((HEADER + page(1, "A", "", redirect="B") + "</mediawiki>").encode(), "gave no documents"),
    ],
)
def test_a_file_that_is_no_dump_is_rejected_without_manifest(
    tmp_path: Path, body: bytes, problem: str
) -> None:
    (tmp_path / "dump.xml.bz2").write_bytes(body)
    with pytest.raises(DataError, match=problem):
        run(tmp_path / "dump.xml.bz2", tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_folder_must_hold_exactly_one_dump(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds 0 dumps"):
        find_dump(tmp_path)
    with pytest.raises(DataError, match="no such file"):
        find_dump(tmp_path / "absent.xml")
    (tmp_path / "a.xml.bz2.part").touch()
    (tmp_path / "manifest.json").touch()
    (tmp_path / "a.xml").touch()
    assert find_dump(tmp_path) == tmp_path / "a.xml"
    (tmp_path / "b.xml.bz2").touch()
    with pytest.raises(DataError, match=r"holds 2 dumps \(a.xml, b.xml.bz2\)"):
        find_dump(tmp_path)


def test_without_siteinfo_the_pages_still_come_back(tmp_path: Path) -> None:
    source = dump(tmp_path / "dump.xml", articles(3), header='<mediawiki xml:lang="de">\n')
    manifest = run(source, tmp_path / "out")
    assert manifest["counts"]["documents"] == 3
    assert "has no <siteinfo>: taken as de.wikipedia.org" in manifest["notes"][0]
    assert "https://de.wikipedia.org/wiki?curid=1" in tree(tmp_path / "out")["AA/wiki_00"]


def test_articles_named_like_the_template_namespace_are_kept(tmp_path: Path) -> None:
    pages = page(1, "Modèle réduit", "Un bateau.") + page(2, "Modèle:Liste", "Rien.", namespace=10)
    manifest = run(dump(tmp_path / "dump.xml", pages), tmp_path / "out")
    assert titles(tmp_path / "out") == ["Modèle réduit"]
    assert manifest["counts"]["pages_of_other_namespaces"] == 1


def test_templates_are_expanded_when_asked_for(tmp_path: Path) -> None:
    pages = page(1, "Lune", "Elle est {{loin|384}} km plus loin.")
    pages += page(2, "Modèle:Loin", "à {{{1}}} 000", namespace=10)
    source = dump(tmp_path / "dump.xml", pages)
    run(source, tmp_path / "plain")
    manifest = run(source, tmp_path / "expanded", templates=True)
    assert "Elle est km plus loin." in tree(tmp_path / "plain")["AA/wiki_00"].replace("  ", " ")
    assert "Elle est à 384 000 km plus loin." in tree(tmp_path / "expanded")["AA/wiki_00"]
    assert manifest["notes"] == ["1 template pages found, for WikiExtractor to expand"]


def test_a_page_that_crashes_the_tool_is_left_out_by_name(tmp_path: Path) -> None:
    bad = page(99, "Broken bytes", "not UTF-8: \udcff\udcfe")  # the tool fails on it
    stats, text = convert(tmp_path, articles(6) + bad + articles(3).replace("Article", "Other"))
    assert stats.documents == 9
    assert stats.extra["pages_lost"] == 1
    assert stats.notes[0].startswith(
        "AA/wiki_00: WikiExtractor fails on page 99 'Broken bytes', left out: "
    )
    assert "UnicodeDecodeError" in stats.notes[0]
    assert text.index("Article 6") < text.index("Other 1")


def test_a_tool_that_fails_on_every_page_ends_the_step(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"page after page .*no space left on device"):
        convert(tmp_path, articles(30), "sys.exit('no space left on device')")


def test_lost_pages_are_counted_and_named(tmp_path: Path) -> None:
    fake = """out = Path(sys.argv[sys.argv.index("-o") + 1], "AA", "wiki_00")
out.parent.mkdir(parents=True)
out.write_text('<doc id="2" url="" title="Article 2">\\nArticle 2\\n\\n</doc>\\n')"""
    stats, _ = convert(tmp_path, articles(3), fake)
    assert stats.documents == 1
    assert stats.extra["pages_lost"] == 2 and stats.extra["pages_without_text"] == 1
    assert stats.notes == (
        "AA/wiki_00: 2 of 3 pages did not come back from WikiExtractor "
        "(1 'Article 1', 3 'Article 3')",
    )


@pytest.mark.parametrize("ending", ["time.sleep(60)", "print('Traceback'); time.sleep(60)"])
def test_a_tool_that_hangs_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr(extract, "SECONDS_PER_CHUNK", 1.0 if ending.startswith("time") else 30.0)
    child = 'child = subprocess.Popen(["sleep", "60"])\n'
    fake = f"{child}Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
    ending = ending.replace("'Traceback'", "'Traceback', flush=True")
    started = time.monotonic()
    stats, text = convert(tmp_path, articles(1), fake + ending)
    assert time.monotonic() - started < 10
    assert (stats.documents, text) == (0, "")
    assert "fails on page 1 'Article 1'" in stats.notes[0]
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not alive(pid), 5.0)


@pytest.mark.parametrize("ending", ["os._exit(1)", "time.sleep(600)"])
def test_a_process_of_the_tool_that_dies_or_sleeps_is_noticed_within_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr(extract, "SECONDS_ASLEEP", 1.0)
    fake = f"import os\nif not os.fork(): {ending}\ntime.sleep(600)"
    started = time.monotonic()
    stats, _ = convert(tmp_path, articles(1), fake)
    assert time.monotonic() - started < 10
    assert "stuck, all its processes asleep for 1 s" in stats.notes[0]


def test_a_tool_that_works_or_waits_for_a_processor_is_not_stuck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extract, "SECONDS_ASLEEP", 0.5)
    checks, check = [], extract._ticks_asleep
    monkeypatch.setattr(
        extract, "_ticks_asleep", lambda group: checks.append(group) or check(group)
    )
    started = time.monotonic()
    work = "end = time.monotonic() + 2\nwhile time.monotonic() < end: pass"
    fake = f"import os\nif not os.fork():\n    {work.replace(chr(10), chr(10) + '    ')}\n    os._exit(0)\n"
    fake += """os.wait()
out = Path(sys.argv[sys.argv.index("-o") + 1], "AA", "wiki_00")
out.parent.mkdir(parents=True)
out.write_text('<doc id="1" url="" title="Article 1">\\nArticle 1\\n\\n</doc>\\n')"""
    stats, _ = convert(tmp_path, articles(1), fake)
    assert (stats.documents, stats.notes) == (1, ())
    assert 2 <= len(checks) <= 1 + time.monotonic() - started, "each check reads all of /proc"


@pytest.mark.parametrize("size", [200_000, 2_600_000])
def test_a_disk_that_fills_ends_an_extraction_with_path_and_missing_bytes(
    tmp_path: Path, small_disk: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(extract, "bytes_written", lambda *_: 1)  # else it is rejected at once
    source = dump(tmp_path / "dump.xml", articles(200, 3000))  # 4 chunks of a megabyte
    out = small_disk(size) / "out"
    started = time.monotonic()
    with pytest.raises(OSError, match=r"No space left on device, .* are free") as raised:
        run(source, out)
    assert time.monotonic() - started < 20
    assert str(raised.value.filename).startswith(str(out))
    assert not (out / ".partial").exists() and not (out / "manifest.json").exists()
    subprocess.run(["mount", "-o", "remount,size=100M", str(out.parent)], check=True)
    assert run(source, out)["counts"]["documents"] == 200


def test_a_disk_too_small_for_an_extraction_is_an_error_before_it_starts(
    tmp_path: Path, small_disk: Callable[[int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source = dump(tmp_path / "dump.xml", articles(200, 3000))
    with pytest.raises(DataError, match=r"extract is to write about .* MB and .* are free"):
        run(source, small_disk(1 << 20) / "out")
    capsys.readouterr()
    run(source, tmp_path / "out")
    assert capsys.readouterr().out.startswith("extract: plan: about ")


def test_output_files_are_a_hundred_to_a_folder() -> None:
    names = [extract.output_name(n).as_posix() for n in (0, 99, 100, 2599, 2600, 67599, 67600)]
    assert names == [
        "AA/wiki_00", "AA/wiki_99", "AB/wiki_00", "AZ/wiki_99", "BA/wiki_00", "ZZ/wiki_99", "AAA/wiki_00"
    ]  # fmt: skip


def test_an_extraction_killed_by_signal_9_continues_to_the_same_text(tmp_path: Path) -> None:
    source = dump(tmp_path / "dump.xml", articles(200, 3000))  # 4 chunks of a megabyte
    run(source, tmp_path / "whole", 2)
    out = tmp_path / "out"
    program = (
        "from bert_cli.config.data import ExtractSettings as S\n"
        "from bert_cli.data.text.extract import run\n"
        f"run(S(dump={str(source)!r}, out={str(out)!r}, processes=1, chunk_megabytes=1))"
    )
    kill_after_a_shard(program, out)
    before = tree(out)
    whole = tree(tmp_path / "whole")
    done = [str(p.relative_to(out / ".done").with_suffix("")) for p in out.rglob("*.shard")]
    assert 0 < len(done) < len(whole)
    assert all(before[name] == whole[name] for name in done)
    assert not (out / "manifest.json").exists()
    manifest = run(source, out, 2)
    assert tree(out) == whole
    assert manifest["bytes_in_this_run"] < manifest["counts"]["bytes_in"]
    assert manifest["counts"]["documents"] == 200
