"""Extraction: every page comes back, or its loss is reported."""

import bz2
import gzip
import lzma
import os
import re
import subprocess

import pytest
from support.processes import alive, kill_after_a_shard, wait_for

from bert_cli.config.data import ExtractSettings
from bert_cli.data.shards.manifest import read_manifest
from bert_cli.data.text import extract, wikipedia
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
    "bgwiki-latest-pages-articles-shortened.xml.bz2": (1, 0, 2, ""),
    "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2": (106, 99, 1, ""),
    "enwiki-table-markup.xml.bz2": (5, 0, 0, "has no <siteinfo>: taken as en.wikipedia.org"),
    "viwiki-truncated-100k.xml.xz": (274, 86, 610, "ends after 970 pages without </mediawiki>"),
}
# Stands in for WikiExtractor, in the folder it is started from.
FAKE = """import os, subprocess, sys, time
from pathlib import Path
out = Path(sys.argv[sys.argv.index("-o") + 1], "AA", "wiki_00")
out.parent.mkdir(parents=True)
{}
"""


def page(number, title, text, namespace=0, redirect=""):
    lines = [f"    <title>{title}</title>", f"    <ns>{namespace}</ns>", f"    <id>{number}</id>"]
    lines += [f'    <redirect title="{redirect}" />'] if redirect else []
    lines += ["    <revision>", f"      <id>{number + 1000}</id>"]
    lines += [f'      <text xml:space="preserve">{text}</text>', "    </revision>"]
    return "\n".join(["  <page>", *lines, "  </page>\n"])


def articles(count, words=200):
    text = "This is '''article''' number {} of [[many]]. It goes &amp; goes on.\n" * (words // 10)
    pages = (page(n, f"Article {n}", text.replace("{}", str(n))) for n in range(1, count + 1))
    return "".join(pages)


def dump(path, pages, header=HEADER, end="</mediawiki>\n"):
    path.write_text(header + pages + end, encoding="utf-8")
    return path


def run(source, out, processes=1, *, templates=False, megabytes=1):
    settings = {"dump": source, "out": out, "processes": processes}
    settings |= {"expand_templates": templates, "chunk_megabytes": megabytes}
    extract.run(ExtractSettings(**settings))
    return read_manifest(out)


def tree(out):
    files = sorted(out.rglob("wiki_[0-9][0-9]"))
    return {str(file.relative_to(out)): file.read_text(encoding="utf-8") for file in files}


def titles(out):
    return re.findall(r'^<doc .*title="(.*)">$', "".join(tree(out).values()), re.MULTILINE)


def convert(tmp_path, pages, fake=""):
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
def test_real_dumps_give_all_their_articles(shared_data, tmp_path, name):
    documents, redirects, others, note = DUMPS[name]
    manifest = run(shared_data / "dumps" / name, tmp_path / "out", 2, megabytes=4)
    counts = manifest["counts"]
    assert documents == counts["documents"] == counts["pages_given"]
    assert counts["redirects"] == redirects
    assert counts["pages_of_other_namespaces"] == others
    assert len(manifest["notes"]) == bool(note) and note in "".join(manifest["notes"])
    assert manifest["versions"]["wikiextractor"] == "3.1.0"
    assert len(titles(tmp_path / "out")) == documents
    if name.startswith("bgwiki"):  # in UTF-16
        text = tree(tmp_path / "out")["AA/wiki_00"]
        assert "Григорианският календар" in text and "\ufffd" not in text


def test_every_compression_and_encoding_reads_the_same(tmp_path):
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


def test_a_dump_cut_in_a_page_or_without_siteinfo_gives_the_other_pages_and_a_note(tmp_path):
    text = HEADER + articles(5)
    source = tmp_path / "cut.xml"
    source.write_text(text[: text.rindex("</text>") - 9])
    manifest = run(source, tmp_path / "out")
    note = "cut.xml ends after 4 pages without </mediawiki>: pages may be missing"
    assert manifest["notes"] == [note]
    assert titles(tmp_path / "out") == [f"Article {n}" for n in range(1, 5)]
    source = dump(tmp_path / "dump.xml", articles(3), header='<mediawiki xml:lang="de">\n')
    manifest = run(source, tmp_path / "german")
    assert manifest["counts"]["documents"] == 3
    assert "has no <siteinfo>: taken as de.wikipedia.org" in manifest["notes"][0]
    assert "https://de.wikipedia.org/wiki?curid=1" in tree(tmp_path / "german")["AA/wiki_00"]


@pytest.mark.parametrize("pack", [bz2.compress, lzma.compress, gzip.compress])
def test_a_damaged_archive_keeps_the_pages_before_the_damage(tmp_path, pack):
    pages = [page(n, f"Page {n}", str(os.urandom(6000))) for n in range(1, 201)]
    packed = pack((HEADER + "".join(pages) + "</mediawiki>\n").encode())
    middle = len(packed) // 2
    for damaged in (packed[:middle], packed[:middle] + bytes(64) + packed[middle + 64 :]):
        (tmp_path / "dump.xml").write_bytes(damaged)
        reader = Dump(tmp_path / "dump.xml")
        read = list(reader.pages())
        # Gzip and bzip2 find damage only where its block ends, so some of it may be read as text.
        assert 20 < len(read) <= 200
        assert read[10].decode() == pages[10].strip()
        assert "is damaged or cut off" in reader.notes[0]


def test_a_page_without_an_end_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(wikipedia, "LARGEST_PAGE", 1 << 16)
    (tmp_path / "dump.xml").write_text(HEADER + page(1, "A", "text") + "<page>" + "x" * (1 << 17))
    with pytest.raises(DataError, match="page 2 has no end"):
        list(Dump(tmp_path / "dump.xml").pages())


def test_a_file_that_is_no_dump_is_rejected_without_manifest(tmp_path):
    redirect = HEADER + page(1, "A", "", redirect="B") + "</mediawiki>"
    for body, problem in (
        (b"", "is not a MediaWiki dump"),
        (b"BZh91AY&SY not really", "is not a MediaWiki dump .*damaged or cut off"),
        (b"7z\xbc\xaf\x27\x1c....", "is not a MediaWiki dump .*; give a pages-articles file"),
        (HEADER.encode() + b"</mediawiki>", "is not a MediaWiki dump"),
        (redirect.encode(), "gave no documents"),
    ):
        (tmp_path / "dump.xml.bz2").write_bytes(body)
        with pytest.raises(DataError, match=problem):
            run(tmp_path / "dump.xml.bz2", tmp_path / "out")
        assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_folder_must_hold_exactly_one_dump(tmp_path):
    for path, problem in ((tmp_path, "holds 0 dumps"), (tmp_path / "absent.xml", "no such file")):
        with pytest.raises(DataError, match=problem):
            find_dump(path)
    for name in ("a.xml.bz2.part", "manifest.json", "a.xml"):
        (tmp_path / name).touch()
    assert find_dump(tmp_path) == tmp_path / "a.xml"
    (tmp_path / "b.xml.bz2").touch()
    with pytest.raises(DataError, match=r"holds 2 dumps \(a.xml, b.xml.bz2\)"):
        find_dump(tmp_path)


def test_templates_are_expanded_when_asked_for_and_articles_named_like_them_are_kept(tmp_path):
    pages = page(1, "Lune", "Elle est {{loin|384}} km plus loin.")
    pages += page(2, "Modèle:Loin", "à {{{1}}} 000", namespace=10)
    pages += page(3, "Modèle réduit", "Un bateau.")
    source = dump(tmp_path / "dump.xml", pages)
    counts = run(source, tmp_path / "plain")["counts"]
    assert counts["pages_of_other_namespaces"] == 1
    assert titles(tmp_path / "plain") == ["Lune", "Modèle réduit"]
    assert "Elle est km plus loin." in tree(tmp_path / "plain")["AA/wiki_00"].replace("  ", " ")
    manifest = run(source, tmp_path / "expanded", templates=True)
    assert "Elle est à 384 000 km plus loin." in tree(tmp_path / "expanded")["AA/wiki_00"]
    assert manifest["notes"][0] == "1 template pages found, for WikiExtractor to expand"


def test_a_page_that_crashes_the_tool_is_left_out_by_name(tmp_path):
    bad = page(99, "Broken bytes", "not UTF-8: \udcff\udcfe")  # the tool fails on it
    stats, text = convert(tmp_path, articles(3) + bad + articles(1).replace("Article", "Other"))
    assert stats.documents == 4
    assert stats.extra["pages_lost"] == 1
    start = "AA/wiki_00: WikiExtractor fails on page 99 'Broken bytes', left out: "
    assert stats.notes[0].startswith(start) and "UnicodeDecodeError" in stats.notes[0]
    assert text.index("Article 3") < text.index("Other 1")


def test_a_tool_that_fails_on_every_page_ends_the_step(tmp_path, monkeypatch):
    monkeypatch.setattr(extract, "PAGES_FAILED", 2)
    with pytest.raises(DataError, match=r"page after page .*no space left on device"):
        convert(tmp_path, articles(4), "sys.exit('no space left on device')")


def test_lost_pages_are_counted_and_named(tmp_path):
    fake = """out.write_text('<doc id="2" url="" title="Article 2">\\nArticle 2\\n\\n</doc>\\n')"""
    stats, _ = convert(tmp_path, articles(3), fake)
    assert stats.documents == 1
    assert stats.extra["pages_lost"] == 2 and stats.extra["pages_without_text"] == 1
    assert stats.notes == (
        "AA/wiki_00: 2 of 3 pages did not come back from WikiExtractor "
        "(1 'Article 1', 3 'Article 3')",
    )


@pytest.mark.parametrize(
    ("end", "problem", "limits"),
    [
        ("while True: pass", "no end after 1 s", (1.0, 60.0)),
        ("print('Traceback', flush=True); time.sleep(60)", "a crash", (60.0, 60.0)),
        ("if not os.fork(): os._exit(1)\ntime.sleep(60)", "stuck, all its", (60.0, 1.0)),
    ],
)
def test_a_tool_that_hangs_is_ended_with_its_children(tmp_path, monkeypatch, end, problem, limits):
    monkeypatch.setattr(extract, "SECONDS_PER_CHUNK", limits[0])
    monkeypatch.setattr(extract, "SECONDS_ASLEEP", limits[1])
    child = 'child = subprocess.Popen(["sleep", "60"])\n'
    fake = f"{child}Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
    stats, text = convert(tmp_path, articles(1), fake + end)
    assert (stats.documents, text) == (0, "")
    assert f"fails on page 1 'Article 1', left out: {problem}" in stats.notes[0]
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not alive(pid), 5.0)


def test_a_tool_that_works_is_not_stuck(tmp_path, monkeypatch):
    monkeypatch.setattr(extract, "SECONDS_BETWEEN_CHECKS", 0.2)
    monkeypatch.setattr(extract, "SECONDS_ASLEEP", 0.4)
    fake = """if not os.fork():
    end = time.monotonic() + 1.5
    while time.monotonic() < end: pass
    os._exit(0)
os.wait()
out.write_text('<doc id="1" url="" title="Article 1">\\nArticle 1\\n\\n</doc>\\n')"""
    stats, _ = convert(tmp_path, articles(1), fake)
    assert (stats.documents, stats.notes) == (1, ())


@pytest.mark.parametrize("size", [200_000, 2_600_000])
def test_a_disk_that_fills_ends_an_extraction_with_path_and_missing_bytes(
    tmp_path, small_disk, monkeypatch, size
):
    source = dump(tmp_path / "dump.xml", articles(200, 3000))  # 4 chunks of a megabyte
    out = small_disk(size) / "out"
    with pytest.raises(DataError, match=r"extract is to write about .* MB and .* are free"):
        run(source, out)
    monkeypatch.setattr(extract, "bytes_written", lambda *_: 1)
    with pytest.raises(OSError, match=r"No space left on device, .* are free") as raised:
        run(source, out)
    assert str(raised.value.filename).startswith(str(out))
    assert not (out / ".partial").exists() and not (out / "manifest.json").exists()
    subprocess.run(["mount", "-o", "remount,size=100M", str(out.parent)], check=True)
    assert run(source, out)["counts"]["documents"] == 200


def test_output_files_are_a_hundred_to_a_folder():
    names = [extract.output_name(n).as_posix() for n in (0, 99, 100, 2599, 2600, 67599, 67600)]
    assert names == [
        "AA/wiki_00", "AA/wiki_99", "AB/wiki_00", "AZ/wiki_99", "BA/wiki_00", "ZZ/wiki_99", "AAA/wiki_00"
    ]  # fmt: skip


def test_an_extraction_killed_by_signal_9_continues_to_the_same_text_and_chunks_do_not_change_it(
    tmp_path,
):
    source = dump(tmp_path / "dump.xml", articles(200, 3000))  # 4 chunks of a megabyte
    run(source, tmp_path / "whole", 2)
    out = tmp_path / "out"
    program = (
        "from bert_cli.config.data import ExtractSettings as S\n"
        "from bert_cli.data.text.extract import run\n"
        f"run(S(dump={str(source)!r}, out={str(out)!r}, processes=1, chunk_megabytes=1))"
    )
    kill_after_a_shard(program, out)
    before, whole = tree(out), tree(tmp_path / "whole")
    run(source, tmp_path / "one", megabytes=100)
    assert "".join(tree(tmp_path / "one").values()) == "".join(whole.values())
    done = [str(p.relative_to(out / ".done").with_suffix("")) for p in out.rglob("*.shard")]
    assert 0 < len(done) < len(whole)
    assert all(before[name] == whole[name] for name in done)
    assert not (out / "manifest.json").exists()
    manifest = run(source, out, 2)
    assert tree(out) == whole
    assert manifest["bytes_in_this_run"] < manifest["counts"]["bytes_in"]
    assert manifest["counts"]["documents"] == 200
