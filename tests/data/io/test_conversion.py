"""Documents as text: what is kept, in which order, on which page, and what cannot be read."""

import gzip
import re
import resource
import signal

import pytest
from support.made_documents import (
    SPACES,
    lines,
    made_docx,
    made_epub,
    made_odt,
    made_pdf,
    paragraph,
)

from bert_cli.cli import main
from bert_cli.data.io import conversion, files, inputs
from bert_cli.data.io.documents import marked_lines, recognise_lines
from bert_cli.data.search.passages import documents_of, page_of, pages_of, passages_of
from bert_cli.errors import DataError

pytest.importorskip("pypdfium2")
pytest.importorskip("lxml")
READING = files.Reading(documents="files", line_breaks="auto")
STYLES = (
    '<w:style w:styleId="berschrift2"><w:name w:val="heading 2"/></w:style>'
    '<w:style w:styleId="Deep"><w:name w:val="heading 8"/></w:style>'
)


def read(path, data):
    path.write_bytes(data)
    (part,) = recognise_lines([files.recognise(path, READING)], READING)
    (document,) = documents_of(part, READING)
    return document.title, list(document.lines)


def problem_of(path, data):
    path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        files.recognise(path, READING)
    return str(caught.value)


def words(number, count=9):
    name = "".join("abcdefghij"[int(digit)] for digit in str(number))
    return "A " + " ".join(f"{name}{'klmnopqrstuv'[n]}word" for n in range(count))


def test_a_pdf_is_joined_lines_without_running_heads_that_know_their_pages(tmp_path):
    pages = [
        lines(
            "The Manual",
            *(words(20 * page + n) for n in range(15)),
            f"the end of {'abc'[page - 1]} has a broken exam-",
            str(page),
        )
        for page in range(1, 4)
    ]
    pages[1][1] = (1, (60, f"ple that goes on. {words(7, 6)}"))
    path = tmp_path / "manual.pdf"
    title, text = read(path, made_pdf(pages, "How to sail"))
    assert title == "How to sail"
    joined = "\n".join(text)
    assert joined.count("The Manual") == 1 and "\n2\n" not in joined and "\f" not in joined
    assert "the end of a has a broken example that goes on." in joined
    (part,) = recognise_lines([files.recognise(path, READING)], READING)
    (document,) = documents_of(part, READING)
    passages = passages_of(document.lines, lambda line: line.split(". "))
    shown = "\n".join(document.lines)
    for page, word in ((1, "cakword"), (2, "ecmword"), (3, "hdkword")):
        start = shown.index(word)
        alone = passages[0]._replace(start=start, stop=start + len(word))
        assert pages_of(document, alone) == [page], word
    whole = passages[0]._replace(start=0, stop=len(shown))
    assert pages_of(document, whole) == [1, *document.pages]
    assert page_of([1, *document.pages], [(shown.index("ecmword"), 0)]) == 2
    assert page_of([1, *document.pages], []) == 1


def test_ligatures_of_old_fonts_of_tex_are_letters(tmp_path):
    page = lines(r"The \014rst e\013ect of the \015ow is su\016cient.")
    letters = "The first effect of the flow is sufficient."
    assert read(tmp_path / "a.pdf", made_pdf([page]))[1] == [letters]
    # Pages of nothing but what looks like running heads are text.
    assert read(tmp_path / "b.pdf", made_pdf([page, page]))[1] == [f"{letters} {letters}"]


@pytest.mark.parametrize("prose", [20, 2, 0])
def test_code_in_a_monospaced_font_keeps_its_lines_where_not_all_is_in_one(prose, tmp_path):
    texts = [words(3).lower()] * prose
    pages = [lines(*texts, "    git clone sail"), lines("    cd sail", "    make install", *texts)]
    _, text = read(tmp_path / "a.pdf", made_pdf(pages))
    kept = {"git clone sail", "cd sail", "make install"} & {*text}
    assert len(kept) == (3 if prose else 0) and "\v" not in "".join(text)


def test_empty_pages_count_and_lines_stay_in_the_order_in_which_they_were_written(tmp_path):
    columns = [(n // 2, ((60, 320)[n % 2], f"{n} is a line of a column")) for n in range(40)]
    wide = (21, (60, "one line of the full width goes on and on through the middle of its page"))
    path = tmp_path / "rows.pdf"
    assert wide[1][1] in " ".join(read(path, made_pdf([[], [*columns, wide]]))[1])
    (part,) = recognise_lines([files.recognise(path, READING)], READING)
    (document,) = documents_of(part, READING)
    assert document.pages == [0]


@pytest.mark.parametrize(
    ("written", "title"),
    [
        *(
            (name, "Name: a line")
            for name in ("thesis.docx", "Microsoft Word - x", "untitled", "Slide 1")
        ),
        (r"\376\377\330\000", "Name: a line"),  # half of a character
        *((name, name) for name in ("Node.js", "Slide guitar", 'A "sail"', '"A" and "B"')),
    ],
)
def test_a_title_that_a_program_wrote_is_none_and_the_text_has_no_front_matter(
    written, title, tmp_path
):
    text = ["---", "Name: a line", "---", words(1)]
    found, read_lines = read(tmp_path / "a.pdf", made_pdf([lines(*text)], written))
    assert read_lines == text
    assert found == title


def test_a_file_of_word_has_headings_rows_and_notes_and_no_deleted_text(tmp_path):
    table = "".join(f"<w:tc>{paragraph(text)}</w:tc>" for text in ("Name", "Value"))
    body = (
        paragraph("Sails", "berschrift2")
        + paragraph("Mast", "Deep")
        + "<w:p><w:r><w:t>A</w:t><w:ptab/><w:t>sail</w:t><w:noBreakHyphen/><w:t>cloth.</w:t><w:cr/></w:r>"
        + "<w:del><w:r><w:delText>Gone.</w:delText></w:r></w:del>"
        + "<w:r><w:instrText>PAGEREF 7</w:instrText></w:r></w:p>"
        + f"<w:tbl><w:tr>{table}</w:tr></w:tbl>"
        + f"<mc:AlternateContent><mc:Fallback>{paragraph('Twice.')}</mc:Fallback></mc:AlternateContent>"
    )
    notes = f"<w:footnotes {SPACES}><w:footnote>{paragraph('A note.')}</w:footnote></w:footnotes>"
    ends = f"<w:endnotes {SPACES}><w:endnote>{paragraph('The end.')}</w:endnote></w:endnotes>"
    core = f"<core {SPACES}><dc:title>Sailing: a guide</dc:title></core>"
    others = {"word/footnotes.xml": notes, "word/endnotes.xml": ends, "docProps/core.xml": core}
    data = made_docx(body, STYLES, others)
    title, text = read(tmp_path / "a.docx", data)
    assert title == "Sailing: a guide"
    assert text[:4] == ["## Sails", "###### Mast", "A sail-cloth.", "Name\tValue"]
    assert text[4:] == ["A note.", "The end."]


def test_an_opendocument_text_has_headings_and_no_comments(tmp_path):
    body = (
        '<text:h text:outline-level="3">Sails</text:h><text:p>A<text:s/>big<text:line-break/>sail.'
        "<text:note><text:note-body><text:p>A note.</text:p></text:note-body></text:note>It is."
        "<office:annotation><text:p>Check this.</text:p></office:annotation></text:p>"
        "<text:tracked-changes><text:p>Gone.</text:p></text:tracked-changes>"
    )
    title, text = read(tmp_path / "a.odt", made_odt(body))
    assert title == "Sails" and text == ["### Sails", "A big", "sail.It is.", "A note."]


def test_a_book_is_read_in_the_order_of_its_spine(tmp_path):
    order = ["b", "the c", "a"]  # a blank is %20 in the list of files
    chapters = {n: f"<html><body><h1>{n}</h1><p>It is.</p></body></html>" for n in sorted(order)}
    title, text = read(tmp_path / "a.epub", made_epub(chapters, order, "The Sea"))
    assert title == "The Sea" and text[::2] == ["# b", "# the c", "# a"]


PAGE = """<!DOCTYPE html><html><head><title>On sails</title><style>p {}</style></head><body>
<nav>Home</nav><div role="navigation">Next</div><script>alert(1)</script><h2><button>Sails</button></h2>
<h3>Mast<button>Copy</button></h3>
<p>A big <b>sail</b> &amp; a<!-- no --> rope.<img src="data:image/png;base64,AAAA"></p><p hidden>No</p>
<article><footer>Foot</footer></article>
<pre>mast = 1
boom = 2</pre><table><tr><th>Name</th><td>Value</td></tr></table><footer>Imprint</footer></body></html>"""


WESTERN = (
    "L'été, où la forêt brûle: garçon, ça naît, nœud",
    "Größe 5 m³/s, 2¼ l für Übermut & Ärger",
    "¿Qué niño, señor? Día 1º y 2ª, pingüino",
    "São as mães que põem o pão à mesa; há avó, você",
    "Rød grød med fløde på en å, Jäätelöä, Šostakovitš",
    "Það er þoka og kýr á Íslandi, ævintýri",
    "L'avi és a l'Àfrica: qüestió, cançó, paral·lel, più",
)


@pytest.mark.parametrize(
    ("encoding", "declared", "big"),
    [
        *((name, "", "big") for name in ("utf-8", "utf-16", "utf-16-le", "utf-32")),
        ("cp1252", "", "größer"),
        ("cp1252", '<meta charset="iso-8859-1">', "“größer”"),
        (
            "cp1252",
            '<meta charset="iso-8859-1">',
            "Żaglówki płyną, łódź stoi".encode("cp1250").decode("cp1252"),
        ),
        ("cp1252", '<meta charset="windows-1252">', "père et mère de Käthe Jäger: crème de Bächle"),
        ("cp1252", '<meta charset="no-such">', "größer"),
        *(("cp1252", "", big) for big in WESTERN),
        ("utf-8", "", "größer\udcffäöü"),  # a byte that is none
        ("iso-2022-jp", '<meta charset="iso-2022-jp">', "帆船"),
        ("iso-8859-2", '<?xml version="1.0" encoding="iso-8859-2"?>', "większy"),
        ("gb2312", '<meta http-equiv="a" content="text/html; charset=gb2312">', "帆船"),
    ],
)
def test_a_web_page_is_its_text_without_navigation_scripts_and_what_is_hidden(
    encoding, declared, big, tmp_path
):
    page = PAGE.replace("<head>", f"<head>{declared}").replace("big", big)
    title, text = read(tmp_path / "a.html", page.encode(encoding, "surrogateescape"))
    line = f"A {big} sail & a rope.".replace("\udcff", "\ufffd")
    assert title == "On sails"
    assert text == ["## Sails", "### Mast", line, "Foot", "mast = 1", "boom = 2", "Name\tValue"]


def test_a_compressed_document_is_unpacked(tmp_path):
    assert read(tmp_path / "a.html.gz", gzip.compress(PAGE.encode()))[0] == "On sails"
    page = f"<!DOCTYPE html>{'<b>' * 2000}deep"
    assert read(tmp_path / "a.html", page.encode())[1] == ["deep"]


def test_a_document_has_limits_of_time_and_memory_and_the_next_one_is_read(tmp_path, monkeypatch):
    path = tmp_path / "a.html"
    read(path, PAGE.encode())
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        assert resource.prlimit(conversion._reader()._process.pid, limit) == (0, 0)
    conversion._reader().end()
    monkeypatch.setattr(conversion, "SECONDS", 0.001)
    assert "2048 MiB of memory or 0 seconds; " in problem_of(path, PAGE.encode() + b" ")
    monkeypatch.setattr(conversion, "SECONDS", 60.0)
    monkeypatch.setattr(conversion, "MEMORY", 1 << 27)  # with 1 << 31 this text is read
    assert read(path, PAGE.encode())[0] == "On sails"
    large = f"<!DOCTYPE html>{'<p>many paragraphs</p>' * 400_000}"
    message = problem_of(tmp_path / "b.html", large.encode())
    assert re.search("too (much memory|large)|128 MiB of memory", message), message
    assert read(tmp_path / "c.html", PAGE.encode())[0] == "On sails"
    conversion._reader().end()


def test_a_call_that_is_interrupted_does_not_wait_for_its_document(tmp_path):
    (tmp_path / "a.html").write_text(f"<!DOCTYPE html>{'<p>many paragraphs</p>' * 1_000_000}")
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    with pytest.raises(KeyboardInterrupt):
        files.recognise(tmp_path / "a.html", READING)
    process = conversion._reader()._process
    conversion._reader().end()
    assert process.returncode == -signal.SIGKILL  # in the middle of its document


def test_without_the_extra_a_document_is_named_with_the_line_that_installs_it(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(conversion, "find_spec", lambda name: None)
    message = problem_of(tmp_path / "a.pdf", made_pdf([lines("Text")]))
    assert "a.pdf: is a PDF, which needs the extra 'documents'; pip install " in message


def test_what_is_no_text_is_left_out_of_a_folder_and_strict_stops(tmp_path, capsys):
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "a.pdf").write_bytes(made_pdf([lines("Sails", words(1))]))
    (folder / "b.pdf").write_bytes(made_pdf([[]]))
    (folder / "c.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (folder / "d").write_bytes(b"\x7fELF\x02")
    (folder / "e.txt").write_bytes("Das Café.\n".encode("latin-1"))
    (folder / "e").symlink_to("/proc/self/mem")
    (folder / "f.md").write_text("---\ntitle: Masts\n---\n\n---\n\n# A mast\n\nIt is tall.\n")
    values = "preprocess", folder, tmp_path / "out", READING, ()
    parts, _ = inputs.open_text(*values, strict=False)
    assert [part.path.name for part in parts] == ["a.pdf", "f.md"]
    assert [line for kind, line in marked_lines(parts[1], READING) if kind == "document"] == [
        "Masts"
    ]
    err = capsys.readouterr().err.splitlines()
    assert err[0] == "preprocess: warning: left out 5 files that cannot be read as text:"
    assert "e.txt (line 1): byte 0xE9 is not UTF-8" in err[1] and len(err) == 5
    assert "b.pdf: is a PDF that has no text on its pages (1)" in err[2]
    assert err[4] == "  and 2 more: 2 without a suffix"
    with pytest.raises(DataError, match=r"b\.pdf"):
        inputs.open_text(*values, strict=True)
    left_out = inputs.LeftOut("preprocess", [folder], strict=False)
    inputs.recognise_each([folder / "e"], READING, left_out)
    assert "cannot be read (Input/output error)" in str(left_out.problems[folder / "e"])


def test_steps_read_documents_as_sentences_without_marks_of_headings(tmp_path):
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "a.html").write_text(PAGE)
    (folder / "b.html").write_bytes(b"<!DOCTYPE html>")
    out = str(tmp_path / "out")
    assert main(["preprocess", str(folder), out, "--processes", "1"]) == 0
    text = (tmp_path / "out/text_00000.txt").read_text()
    assert text.startswith("Sails\nMast\nA big sail & a rope.\n")
    assert main(["preprocess", str(folder), f"{out}2", "--strict"]) == 3
    assert main(["vocab", str(folder), f"{out}3", "--size", "100"]) == 0
    assert "##" in (tmp_path / "out3/vocab.txt").read_text()
