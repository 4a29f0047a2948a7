"""Extraction: every page comes back, or its loss is reported."""

import bz2
import gzip
import lzma
import os
import re
import time
from functools import partial
from pathlib import Path

import pytest
from support.dumps import HEADER, articles, dump, page, run, titles, tree

from bert_cli import cli
from bert_cli.data.io.inputs import find_files
from bert_cli.data.io.manifest import Stats, read_manifest
from bert_cli.data.text import extract, wikipedia
from bert_cli.data.text.download import sample_dump
from bert_cli.data.text.wikipedia import Dump, find_dump
from bert_cli.errors import DataError

CUT = "is damaged or cut off (no </mediawiki>): pages may be missing after the last of"
DUMPS = {
    "bgwiki-latest-pages-articles-shortened.xml.bz2": (1, 0, 2, ""),
    "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2": (106, 99, 1, ""),
    "enwiki-table-markup.xml.bz2": (5, 0, 0, "has no <siteinfo>: taken as en.wikipedia.org"),
    "viwiki-truncated-100k.xml.xz": (274, 86, 610, f"{CUT} 970"),
}


@pytest.mark.parametrize("name", DUMPS)
def test_real_dumps_give_all_their_articles(shared_data, tmp_path, name):
    documents, redirects, others, note = DUMPS[name]
    source, is_cut = shared_data / "dumps" / name, "cut off" in note
    manifest = run(source, tmp_path / "out", 2, megabytes=4, keep_damaged=is_cut)
    counts = manifest["counts"]
    assert documents == counts["documents"] == counts["pages_given"]
    assert counts["redirects"] == redirects
    assert counts["pages_of_other_namespaces"] == others
    assert len(manifest["notes"]) == bool(note) and note in "".join(manifest["notes"])
    assert len(titles(tmp_path / "out")) == documents
    if name.startswith("bgwiki"):  # in UTF-16
        text = tree(tmp_path / "out")["AA/wiki_00"]
        assert "Григорианският календар" in text and "\ufffd" not in text


def test_every_compression_and_encoding_reads_the_same(tmp_path):
    text = page(7, "Été", "L'été est &lt;b&gt;chaud&lt;/b&gt;.") + articles(20)
    source = dump(tmp_path / "dump.xml", text)
    plain = source.read_bytes()
    expected = list(Dump(source).pages())
    packed = [pack(plain) for pack in (bz2.compress, lzma.compress, gzip.compress)]
    padded = b"".join(streams(plain, 9000)) + bytes(9)
    for data in (*packed, padded, plain.decode().encode("utf-16")):
        source.write_bytes(data)
        reader = Dump(source)
        assert (list(reader.pages()), reader.notes) == (expected, [])
    manifest = run(source, tmp_path / "out")
    assert manifest["counts"]["documents"] == len(expected) == 21
    first = tree(tmp_path / "out")["AA/wiki_00"].split("</doc>")[0]
    url = "https://fr.wikipedia.org/wiki?curid=7"
    assert first == f'<doc id="7" url="{url}" title="Été">\nÉté\n\nL\'été est chaud.\n\n'


def revisions(number, title, *texts, ns="<ns>0</ns>", model="<model>wikitext</model>"):
    """Return a page of a full history, from (time, text) in any order."""
    lines = "".join(
        f"<revision><id>{n}</id><timestamp>{time}</timestamp><contributor><username>Editor{n}</username></contributor>"
        f"{model}<text bytes='9'>{text}</text><sha1>abc{n}</sha1></revision>"
        for n, (time, text) in enumerate(texts)
    )
    return f"<page><title>{title}</title>{ns}<id>{number}</id>{lines}</page>\n"


def test_a_page_of_a_full_history_has_its_newest_revision_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(wikipedia, "LARGEST_PAGE", 200_000)
    old, new = ("2010-01-01T00:00:00Z", "Old."), ("2011-01-01T00:00:00Z", "New.")
    long = [("2009", "x" * 50_000)] * 20
    pages = revisions(7, "A", old, new) + revisions(8, "B", new, old)
    pages += revisions(9, "C", *long, new, *long) + revisions(10, "D", ("", "Old."), ("", "New."))
    counts = run(dump(tmp_path / "dump.xml", pages), tmp_path / "out")["counts"]
    assert (counts["documents"], counts["pages_lost"]) == (4, 0)
    (text,) = tree(tmp_path / "out").values()
    assert re.findall(r"\n\n(.*)\n\n</doc>", text) == ["New."] * 4
    assert not re.search("Editor|abc|sha1|x{9}", text)


def test_only_the_main_slot_of_a_page_is_text(tmp_path):
    slot = "<content><text>B</text></content>"
    page = revisions(7, "A", ("2010", "Main.")).replace("<sha1>", f"{slot}<sha1>")
    empty = revisions(8, "C", ("2010", "")).replace("<text bytes='9'></text>", f"<text />{slot}")
    run(dump(tmp_path / "dump.xml", page + empty), tmp_path / "out")
    assert "\n\nMain.\n\n" in (text := tree(tmp_path / "out")["AA/wiki_00"]) and "B" not in text


@pytest.mark.parametrize("siteinfo", [True, False])
def test_the_titles_of_a_dump_without_ns_decide_their_namespaces(tmp_path, siteinfo):
    header = HEADER if siteinfo else '<mediawiki xml:lang="fr">\n'
    names = ["Harbour", "Modèle:Stub", "modèle:x", "Star Trek: Picard", "Talk:A", "User_talk:B"]
    pages = "".join(revisions(n, title, ("2010", "Text."), ns="") for n, title in enumerate(names))
    manifest = run(dump(tmp_path / "dump.xml", pages, header), tmp_path / "out")
    kept = names[:1] + names[3:] if siteinfo else names[:4]
    assert "https://fr.wikipedia.org/wiki?curid=0" in tree(tmp_path / "out")["AA/wiki_00"]
    assert titles(tmp_path / "out") == kept
    assert manifest["counts"]["pages_of_other_namespaces"] == 2
    packed = (bz2.compress(part.encode()) for part in (header, pages, "</mediawiki>"))
    (tmp_path / "dump.bz2").write_bytes(b"".join(packed))
    run(tmp_path / "dump.bz2", tmp_path / "packed")  # its streams are read without the header
    assert titles(tmp_path / "packed") == kept


def test_a_dump_of_pages_of_another_model_is_refused(tmp_path):
    item = revisions(5, "Q5", ("2010", '{"a": 1}'), model="<model>wikibase-item</model>")
    with pytest.raises(DataError, match=r"left out 1 page whose model is wikibase-item, not wiki"):
        run(dump(tmp_path / "items.xml", item), tmp_path / "none")


def test_a_page_that_cannot_be_converted_is_left_out_counted_and_named(tmp_path, capsys):
    bad = page(8, "Bad", f"A &amp;#{'1' * 4301}; b.")
    others = page(9, "Good", "C.") + page(10, "Empty", "")
    counts = run(dump(tmp_path / "dump.xml", articles(2) + bad + others), tmp_path / "out")[
        "counts"
    ]
    names = ("documents", "pages_given", "pages_lost", "pages_without_text")
    assert [counts[name] for name in names] == [4, 5, 1, 1]
    assert titles(tmp_path / "out") == ["Article 1", "Article 2", "Good", "Empty"]
    note = r"1 of 5 pages are missing from the output \(8 'Bad'\); the first cannot be converted: ValueError: Exceeds"
    assert re.search(note, capsys.readouterr().out)


def test_pages_that_only_include_others_are_named(tmp_path, capsys):
    run(dump(tmp_path / "dump.xml", page(1, "A", "") + page(2, "B", "{{x}}")), tmp_path / "out")
    assert "none of its 2 pages has text, only templates" in capsys.readouterr().out


def test_a_page_without_an_end_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(wikipedia, "LARGEST_PAGE", 1 << 16)
    (tmp_path / "dump.xml").write_text(HEADER + page(1, "A", "text") + "<page>" + "x" * (1 << 17))
    with pytest.raises(DataError, match="page 2 has no end"):
        list(Dump(tmp_path / "dump.xml").pages())


def test_a_dump_without_articles_is_rejected_without_manifest(tmp_path):
    source = dump(tmp_path / "dump.xml", page(1, "A", "", redirect="B"))
    with pytest.raises(DataError, match="no documents in 0 shards"):
        run(source, tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_folder_must_hold_exactly_one_dump(tmp_path):
    for path, problem in ((tmp_path, "holds no dump"), (tmp_path / "absent.xml", "no such file")):
        with pytest.raises(DataError, match=problem):
            find_dump(path)
    for name in ("a.xml.bz2.part", "manifest.json", "a.xml"):
        (tmp_path / name).touch()
    assert find_dump(tmp_path) == tmp_path / "a.xml"
    (tmp_path / "b.xml.bz2").touch()
    with pytest.raises(DataError, match=r"holds 2 dumps \(a.xml, b.xml.bz2\)"):
        find_dump(tmp_path)


def damaged(stream):
    return stream[:40] + bytes(20) + stream[60:]


def multistream(tmp_path, count=1, damage=None):
    """Write the shipped sample as Wikipedia writes its dumps, with some pages in each stream, and its index."""
    reader = Dump(sample_dump())
    pages = [page + b"\n" for page in reader.pages()]
    parts = [b"".join(pages[n : n + count]) for n in range(0, len(pages), count)]
    streams = list(map(bz2.compress, [reader.header, *parts, b"</mediawiki>\n"]))
    if damage is not None:
        streams[damage] = damaged(streams[damage])
    folder = tmp_path / f"by_{count}_{damage}"
    folder.mkdir()
    source = folder / "samplewiki-20240101-pages-articles-multistream.xml.bz2"
    source.write_bytes(b"".join(streams))
    index = f"{source.name.removesuffix('.xml.bz2')}-index.txt.bz2"
    (folder / index).write_bytes(bz2.compress(b"0:1:Page\n"))
    return source


def test_the_streams_of_a_dump_are_unpacked_side_by_side_to_the_same_text(tmp_path, monkeypatch):
    run(sample_dump(), tmp_path / "expected")
    expected = "".join(tree(tmp_path / "expected").values())
    assert Dump(sample_dump()).streams(1000)  # the shipped sample has several itself
    monkeypatch.setattr(extract, "PACKED_EXPANSION", 50.0)  # ranges of 20 kB
    sources = {count: multistream(tmp_path, count) for count in (1, 7, 100)}
    for count, source in sources.items():
        assert find_dump(source.parent) == source  # and not its index
        ranges = Dump(source).streams(20_000)
        assert (ranges[0].streams[0], ranges[-1].streams[1]) == (0, source.stat().st_size)
        out = tmp_path / f"out_{count}"
        manifest = run(source.parent, out, 2)
        assert len(tree(out)) == len(ranges) and (count == 100 or len(ranges) > 3)
        assert "".join(tree(out).values()) == expected
        counts = {"documents": 75, "redirects": 10, "pages_of_other_namespaces": 3}
        assert counts.items() <= manifest["counts"].items() and manifest["notes"] == []
    run(sources[7], tmp_path / "one", 1)
    assert tree(tmp_path / "one") == tree(tmp_path / "out_7")


def streams(data, size):
    """Return streams of bzip2 that may begin within a page, as pbzip2 writes them."""
    return [bz2.compress(data[n : n + size]) for n in range(0, len(data), size)]


def test_a_page_in_two_later_streams_is_an_error_and_not_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(extract, "PACKED_EXPANSION", 1e4)
    reader = Dump(sample_dump())
    pages = [page + b"\n" for page in reader.pages()]
    parts = [reader.header, *pages[:9], pages[9][:500], pages[9][500:] + b"".join(pages[10:])]
    source = tmp_path / "dump.xml.bz2"
    source.write_bytes(b"".join(map(bz2.compress, [*parts, b"</mediawiki>\n"])))
    problem = r"a bzip2 stream ends within a page, at byte .*; unpack it"
    with pytest.raises(DataError, match=problem):
        run(source, tmp_path / "out")


@pytest.mark.parametrize("expansion", [1000.0, 1e-3])  # a range for every stream, or one for all
def test_a_damaged_stream_of_a_packed_dump_is_lost_alone(tmp_path, monkeypatch, expansion, capsys):
    monkeypatch.setattr(extract, "PACKED_EXPANSION", expansion)
    source = multistream(tmp_path, 10, damage=4)
    pages = list(Dump(sample_dump()).pages())[30:40]
    lost = sum(b"<ns>0</ns>" in page and b"<redirect" not in page for page in pages)
    begin, end = [match.start() for match in wikipedia.STREAM.finditer(source.read_bytes())][4:6]
    problem = f"pages between byte {begin:,} and byte {end:,} are missing"
    with pytest.raises(DataError, match=problem):
        run(source, tmp_path / "out", 2)
    manifest = run(source, tmp_path / "out", 2, keep_damaged=True)
    assert lost > 0 and manifest["counts"]["documents"] == 75 - lost
    assert manifest["bytes_in_this_run"] == 0
    assert f"{problem}; the text of " in capsys.readouterr().out


def test_a_page_is_not_joined_from_two_damaged_streams(tmp_path):
    pages = list(Dump(sample_dump()).pages())
    parts = streams(Dump(sample_dump()).header + b"".join(pages) + b"</mediawiki>", 9000)
    parts[3] = damaged(parts[3])
    source = tmp_path / "dump.xml.bz2"
    source.write_bytes(b"".join(parts))
    reader = Dump(source)
    read = list(reader.pages())
    assert len(reader.notes) == 1 and 0 < len(pages) - len(read) < 10
    assert set(read) < set(pages)


def cut_in_a_page(data):
    return data[: data.rindex(b"</text>") - 9]


def flipped(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]


def halved(data):
    return data[: len(data) // 2]


# At the level that is fastest: packing would take longer than the test.
PACKERS = {
    "bz2": bz2.compress,
    "gzip": partial(gzip.compress, compresslevel=1),
    "xz": partial(lzma.compress, preset=0),
}
DAMAGES = [
    pytest.param(pack, damage, id=f"{name}-{damage.__name__}")
    for damage in (halved, flipped)
    for name, pack in PACKERS.items()
]


@pytest.mark.parametrize(("pack", "damage"), [(bytes, cut_in_a_page), *DAMAGES])
def test_a_damaged_dump_ends_with_exit_code_3_and_its_text_stays_until_it_is_accepted(
    tmp_path, capsys, monkeypatch, pack, damage
):
    pages = "".join(page(n, f"Page {n}", str(os.urandom(6000))) for n in range(1, 201))
    source, out = dump(tmp_path / "dump.xml", pages), tmp_path / "out"
    source.write_bytes(damage(pack(source.read_bytes())))
    command = ["extract", str(source), str(out), "--processes", "1"]
    monkeypatch.setattr(extract, "CHUNK_BYTES", 1_000_000)
    messages = []
    for _ in range(2):  # the same command again finds the same
        assert cli.main(command) == 3
        messages.append(capsys.readouterr().err)
    assert messages[0] == messages[1] and len(messages[0].splitlines()) == 1
    text = tree(out)
    count = len(titles(out))
    expected = rf"dump \({source}\): is damaged or cut off \(.*; the text of {count:,} articles is in {out}; "
    assert count > 20 and re.search(expected + ".* --keep-damaged", messages[0])
    if damage is cut_in_a_page:
        assert f"{CUT} 199; the text of 199 articles is" in messages[0]
        assert titles(out) == [f"Page {n}" for n in range(1, 200)]
    assert not (out / "manifest.json").exists()
    with pytest.raises(DataError, match="has not finished"):
        find_files(out, read_manifest(out))
    assert cli.main([*command, "--keep-damaged"]) == 0
    assert f"the text of {count:,} articles is in {out}" in capsys.readouterr().out
    assert tree(out) == text and len(find_files(out, read_manifest(out))) == len(text)
    assert read_manifest(out)["counts"]["documents"] == count


def test_damage_in_several_places_is_counted():
    damage = [f"a.xml {wikipedia.DAMAGED} {place}" for place in "123"]
    counts = Stats(7, notes=("another note", *damage))
    problem = (
        r"\(in/a.xml\): is damaged or cut off 1, and in 2 more places; the text of 7 articles "
    )
    with pytest.raises(DataError, match=problem):
        extract.check_damage(counts, Path("in/a.xml"), Path("out"), False)


def test_a_redirect_without_its_tag_is_no_article(tmp_path):
    words = ["REDIRECT", "redirect:", "WEITERLEITUNG", "перенаправление", "転送"]
    text = "\n#{} [[B]]\n{{{{R from x}}}}\n[[Category:C]]"
    pages = [page(n, "A", text.format(word)) for n, word in enumerate(words, 10)]
    pages += [page(2, "B", "Text."), page(3, "C", "#one [[item]]\n#two [[items]]")]
    pages += [page(4, "D", "See #redirect [[B]].")]
    counts = run(dump(tmp_path / "dump.xml", "".join(pages)), tmp_path / "out")["counts"]
    assert (counts["documents"], counts["redirects"]) == (3, len(words))
    assert titles(tmp_path / "out") == ["B", "C", "D"]


def test_the_time_to_split_is_linear_in_the_length_of_a_page(tmp_path):
    seconds = []
    for megabytes in (1, 16):
        source = dump(tmp_path / "dump.xml", page(1, "A", "x" * (megabytes << 20)))
        started = time.process_time()
        assert len(list(Dump(source).pages())) == 1
        seconds.append(time.process_time() - started)
    assert seconds[1] < 64 * seconds[0] + 0.2  # 16 times; what is quadratic takes 256


def test_output_files_are_a_hundred_to_a_folder():
    names = [extract.output_name(n).as_posix() for n in (0, 99, 100, 2599, 2600, 67599, 67600)]
    assert names == [
        "AA/wiki_00", "AA/wiki_99", "AB/wiki_00", "AZ/wiki_99", "BA/wiki_00", "ZZ/wiki_99", "AAA/wiki_00"
    ]  # fmt: skip


def test_the_size_of_the_chunks_changes_no_text(tmp_path):
    source = dump(tmp_path / "dump.xml", articles(80, 1500))
    for name, megabytes in (("many", 0.2), ("one", 100)):
        run(source, tmp_path / name, 2, megabytes=megabytes)
    many, complete = tree(tmp_path / "many"), tree(tmp_path / "one")
    assert len(many) > 3 > len(complete) and "".join(many.values()) == "".join(complete.values())
