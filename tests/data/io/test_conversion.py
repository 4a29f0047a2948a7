"""Documents as text: what is kept, in which order, on which page, and what cannot be read."""

import gzip
import re
import resource
import signal

import pytest
from support.made_documents import (
    lines,
    made_pdf,
)

from bert_cli.data.io import conversion, files, inputs
from bert_cli.data.io.documents import recognise_lines
from bert_cli.data.search.passages import documents_of
from bert_cli.errors import DataError

pytest.importorskip("pypdfium2")
pytest.importorskip("lxml")
READING = files.Reading(documents="files", line_breaks="auto")


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


def test_a_file_of_a_folder_that_cannot_be_read_is_left_out_with_the_reason(tmp_path):
    (tmp_path / "e").symlink_to("/proc/self/mem")
    left_out = inputs.LeftOut("preprocess", [tmp_path], strict=False)
    assert inputs.recognise_each([tmp_path / "e"], READING, left_out) == {}
    assert "cannot be read (Input/output error)" in str(left_out.problems[tmp_path / "e"])
