"""The program that reads documents in a process of its own: PDF, Word, OpenDocument, EPUB and HTML become plain text.

It imports nothing of the package. Standard input has lines of JSON, each with the bytes of a file behind it; standard
output has one line of JSON for each. The system ends it when it exceeds its memory or time. The text is what `bert`
reads from plain files: front matter with the title, headings with `#`, a form feed before each page but the first, and
a vertical tab at the end of a line of code in a PDF.
"""

import codecs
import ctypes
import io
import json
import posixpath
import re
import resource
import signal
import sys
import zipfile
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

MOST_BYTES = 1 << 27  # of an unpacked file of an archive; its tree takes up to ten times as many
DEEPEST = 10_000  # calls, more than libxml2's limit of elements in one another
SHORT_ROW = 200  # characters of a table's row that is written on one line
# Titles that a program has written: the name of a file, or of the program.
NO_TITLE = re.compile(
    r"\.(docx?|odt|rtf|pdf|txt|md|tex|dvi|e?ps|html?|pptx?|xlsx?|indd)$|^(microsoft \w+ - |untitled ?\d*$|slide \d+$)",
    re.IGNORECASE,
)
MARKS = re.compile(
    rb"(?P<utf_8_sig>\xef\xbb\xbf)|(?P<utf_32>\xff\xfe\0\0)|(?P<utf_16>\xff\xfe|\xfe\xff)|(?P<utf_16_le><\0)|(?P<utf_16_be>\0<)"
)
DECLARED = re.compile(
    rb"<(?:\?xml[^>]*encoding|meta[^>]*charset)\s*=\s*[\"']?\s*(?!utf-?16)([\w.:-]+)", re.IGNORECASE
)
# Encodings of web pages: by their first bytes, as they declare it, and the larger one that browsers read instead.
BROWSERS = {"iso8859-1": "cp1252", "ascii": "cp1252", "gb2312": "gb18030", "shift_jis": "cp932"}
FAULTS = re.compile("[\ufffd\0-\x08\x0e-\x1f\x7f-\x9f]")
# Different letters beyond ASCII in a row: rare in western text, but bytes of EUC-JP, GBK or KOI8-R look so.
FOREIGN = re.compile(r"(?!(.)\1*(?![^\0-\x7f]))[^\0-\x7f]{4,}")
# A letter of cp1252, or within a word a sign that is one in central Europe.
LETTER = re.compile(r"[ªºÀ-ÿŠšŽžŒœŸ]|(?<=[a-z])[±³¶¹¼¾¿](?=[a-z])")
CENTRAL = "ąćęłńóśźż áčďéěíňóřšťúůýž áéíóöőúüű ăâîşţ áäčďéíĺľňóôŕšťúýž čćđšž"
# Encoding -> the letters beyond ASCII of each of its languages.
ALPHABETS = {
    "cp1252": "àâæçéèêëîïôùûüÿœ äöüßé áéíñóúüçºª áâãàçéêíóôõúüºª æøåéòôäöü áðéíóúýþæöøå àèéìíòóùúîºª éëïóöèáíüêôç "
    "àçèéíïòóúüñº êâîôûáéèñùü ñüçéáíóúêº äöšžéåü",
    **dict.fromkeys(("cp1250", "iso8859-2"), CENTRAL),
    "cp1257": "ąčęėįšųūž āčēģīķļņšūž",
    "cp1254": "çğıöşüâîû",
}
# The names of elements without namespaces, of all kinds of XML.
BLOCKS = re.compile(
    "p|tr|t[dhc]|br|cr|hr?|h[1-6]|table-row|table-cell|line-break|div|li|d[td]|pre|blockquote|section|article|main|header|"
    "table|caption|ul|ol|fig(ure|caption)|address|details|summary|aside|form|fieldset|option"
)
LEFT_OUT = re.compile(
    "pPr|moveFrom|Fallback|annotation|tracked-changes|note-citation|note-body|forms|title|desc|binary-data|script|style|template|"
    "noscript|nav|svg|iframe|object|select|textarea|head"
)
# What a web page marks as hidden, or has around its text; a button is text where it is all of a heading. Styles also
# hide what a click opens, as the rows of a table, so they hide nothing here.
HIDDEN = (
    "//body//*[@hidden or @aria-hidden='true' or self::footer[not(ancestor::article)] or @role='search' or "
    "@role='navigation' or @role='banner' or @role='contentinfo' or "
    "self::button[not(starts-with(name(..), 'h') and normalize-space(..) = normalize-space(.))]]"
)
ROWS = {"tr", "table-row"}
# What control characters of PDFium are: a hyphen with the end of its line, and the ligatures of TeX's old fonts.
SIGNS: dict[int, str | None] = {code: None for code in range(32) if code not in (9, 10)}
SIGNS |= {2: "-\n", 11: "ff", 12: "fi", 13: "fl", 14: "ffi", 15: "ffl"}
MONOSPACED = re.compile(rb"mono|courier|tt\d|typewriter|consol", re.IGNORECASE)  # names of fonts
MOST_CODE = 0.8  # of the lines of a PDF; more are prose that a typewriter wrote
SPACES = {"tab": " ", "ptab": " ", "s": " ", "noBreakHyphen": "-"}
LOCKED = "is encrypted", "save a copy without its password"
SCANNED = "its pages are pictures: recognise their text first, as with `ocrmypdf IN.pdf OUT.pdf`"
UNKNOWN = "save it as UTF-8, as with iconv -f EUC-JP -t UTF-8 (CP1250, CP1254, ...), or state its encoding in the page"
TOO_LARGE = "export it as plain text, or split it"


class FaultyError(Exception):
    """A document cannot be read: the problem and the remedy."""


def pdf(data: bytes) -> tuple[str, list[str]]:
    """Return the title and the text of a PDF."""
    import pypdfium2

    document = pypdfium2.PdfDocument(data)
    pages: list[str] = []
    for number in range(len(document)):
        lines: list[str] = []
        with suppress(pypdfium2.PdfiumError):  # of a damaged page
            page = document[number].get_textpage()
            lines = page.get_text_bounded().split("\r\n")
            code = _code_of(page)
            lines = [line.translate(SIGNS) + "\v" * (line.strip() in code) for line in lines]
        pages.append("\n".join(lines))
    text = "\n\f".join(pages)
    if text.count("\v") > MOST_CODE * text.count("\n"):
        text = text.replace("\v", "")
    if not any(map(str.strip, pages)):
        raise FaultyError(f"has no text on its pages ({len(pages):,})", SCANNED)
    title = ""
    with suppress(UnicodeDecodeError):
        title = document.get_metadata_value("Title")
    return title, [text]


def _code_of(page: Any) -> set[str]:
    """Return the lines of a page that begin and end in a monospaced font."""
    from pypdfium2 import raw

    name = ctypes.create_string_buffer(100)
    code: set[str] = set()
    for line in re.finditer(r"\S(?:.*\S)?", page.get_text_range()):
        for position in (line.start(), line.end() - 1):
            letter = raw.FPDFText_GetCharIndexFromTextIndex(page, position)
            raw.FPDFText_GetFontInfo(page, letter, name, len(name), None)
            if not MONOSPACED.search(name.value):
                break
        else:
            code.add(line[0])
    return code


def docx(data: bytes) -> tuple[str, list[str]]:
    """Return the title and the lines of a file of Word, its notes at the end."""
    archive = zipfile.ZipFile(io.BytesIO(data))
    levels: dict[str, int] = {}
    for style in _root_of(archive, "word/styles.xml"):
        heading = re.fullmatch(r"heading (\d)|title", _value(style, "name/val").lower())
        if heading:
            levels[_value(style, "styleId")] = min(int(heading[1] or 1), 6)
    lines = Lines(levels)
    lines.add(_root_of(archive, "word/document.xml", needed=True))
    for name in ("word/footnotes.xml", "word/endnotes.xml"):
        lines.add(_root_of(archive, name))
    return _title_of(archive, "docProps/core.xml"), lines.lines


def odt(data: bytes) -> tuple[str, list[str]]:
    """Return the title and the lines of an OpenDocument text, its notes at the end."""
    archive = zipfile.ZipFile(io.BytesIO(data))
    if _root_of(archive, "META-INF/manifest.xml").find(".//{*}encryption-data") is not None:
        raise FaultyError(*LOCKED)
    lines = Lines()
    root = _root_of(archive, "content.xml", needed=True)
    for element in (root, *root.iterfind(".//{*}note-body/*")):
        lines.add(element)
    return _title_of(archive, "meta.xml"), lines.lines


def epub(data: bytes) -> tuple[str, list[str]]:
    """Return the title and the lines of a book, in the order of its spine."""
    archive = zipfile.ZipFile(io.BytesIO(data))
    names = archive.namelist()
    if "META-INF/rights.xml" in names:
        raise FaultyError("is encrypted by its shop", "ask for a copy without copy protection")
    package = next((name for name in names if name.endswith(".opf")), "its list of files")
    root = _root_of(archive, package, needed=True)
    items = {e.get("id"): unquote(e.get("href", "")) for e in root.iter("{*}item")}
    lines: list[str] = []
    for reference in root.iter("{*}itemref"):
        path = posixpath.join(posixpath.dirname(package), items.get(reference.get("idref"), ""))
        name = posixpath.normpath(path)
        if name in names:
            lines += html(_member(archive, name))[1]
    return _title_of(archive, package), lines


def html(data: bytes) -> tuple[str, list[str]]:
    """Return the title and the lines of a web page, without navigation, scripts and what is hidden."""
    import lxml.html

    # Pages with tags that are never closed are some thousand elements deep.
    parser = lxml.html.HTMLParser(encoding="utf-8", no_network=True, huge_tree=True)
    root = lxml.html.document_fromstring(_decoded(data).replace("\0", "").encode(), parser)
    if any("depth" in error.message for error in parser.error_log):
        raise FaultyError("has too many elements within one another", TOO_LARGE)
    for element in root.xpath(HIDDEN):
        element.drop_tree()
    lines = Lines()
    lines.add(root)
    return root.findtext(".//title") or "", lines.lines


def _decoded(data: bytes) -> str:
    """Return the text of a web page, in UTF-8 or as it declares, or else in Windows' encoding of the West."""
    match = MARKS.match(data)
    if match:
        return data.decode(str(match.lastgroup), "replace")
    declared = "utf-8"
    with suppress(LookupError):
        match = DECLARED.search(data[:4096])
        if match:
            declared = codecs.lookup(match[1].decode()).name
    declared = BROWSERS.get(declared, declared)
    encodings = (("utf-8", 4), (declared, 4), ("cp1252", 40))
    for encoding, least in encodings[data.isascii() :]:  # ASCII may have its characters in escapes
        text = data.decode(encoding, "replace")
        faults = len(text) - len(FAULTS.sub("", text))
        others = len(text) - len(text.encode("ascii", "ignore"))
        foreign = sum(len(row[0]) for row in FOREIGN.finditer(text))
        is_western = encoding != "cp1252" or (
            2 * foreign <= others and (encoding == declared or _is_western(text))
        )
        if least * faults <= others and is_western:
            return text
    if 1000 * faults <= len(text) and is_western:
        return text
    raise FaultyError("is in an unknown encoding", UNKNOWN)


def _is_western(text: str) -> bool:
    """Return whether a text is in cp1252: as another encoding it would make less sense."""
    letters = "".join(LETTER.findall(text)).encode("cp1252")

    def known(encoding: str) -> int:
        line = letters.decode(encoding, "replace").lower()
        return max(sum(map(alphabet.count, line)) for alphabet in ALPHABETS[encoding].split())

    # Of texts of 1,000 characters this finds 19 of 20, and takes a western one in 2,000 for another.
    return max(map(known, ALPHABETS)) <= 1.02 * known("cp1252") + 1


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    data = archive.open(name).read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise FaultyError(f"unpacks to more than {MOST_BYTES >> 20} MiB", TOO_LARGE)
    return data


def _root_of(archive: zipfile.ZipFile, name: str, *, needed: bool = False) -> Any:
    """Return the root of a file of XML; of one that is absent and not needed, an empty element."""
    from lxml import etree

    if not needed and name not in archive.namelist():
        return etree.Element("absent")
    parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False)
    return etree.fromstring(_member(archive, name), parser)


def _title_of(archive: zipfile.ZipFile, name: str) -> str:
    return _root_of(archive, name).findtext(".//{*}title") or ""


def _value(element: Any, path: str) -> str:
    """Return the attribute at a path of names below an element, whatever their namespaces are."""
    *names, last = (f"*[local-name()='{name}']" for name in path.split("/"))
    return str(element.xpath(f"string({'/'.join([*names, f'@{last}'])})"))


class Lines:
    """The lines of trees; a heading has its level in `#`, and a short row of a table is one line.

    A file of Word has the levels of its styles, and its text in the elements `t` alone.
    """

    def __init__(self, levels: dict[str, int] | None = None) -> None:
        self.lines: list[str] = []
        self._levels = levels
        self._begun: list[str] = []
        self._mark = ""  # of the line that has begun
        self._pre = 0  # elements around it in which the end of a line ends it

    def add(self, element: Any) -> None:
        """Add an element with all that is in it."""
        name = ""
        if isinstance(element.tag, str):  # others are comments and instructions
            name = element.tag.rpartition("}")[2]
        if not name or LEFT_OUT.fullmatch(name):
            return
        is_block = bool(BLOCKS.fullmatch(name))
        if is_block:
            self._end()
            self._mark = "#" * self._level(element, name) or self._mark
        first = len(self.lines)
        self._pre += name == "pre"
        is_text = self._levels is None
        text = SPACES.get(name, "")
        if is_text or name == "t":
            text += element.text or ""
        self._write(text)
        for child in element:
            self.add(child)
            if is_text:
                self._write(child.tail or "")
        self._pre -= name == "pre"
        if is_block or element.getparent() is None:
            self._end()
            self._mark = ""
        row = "\t".join(self.lines[first:])
        if name in ROWS and 0 < len(row) <= SHORT_ROW:
            self.lines[first:] = [row]

    def _level(self, element: Any, name: str) -> int:
        if self._levels is not None:
            return self._levels.get(_value(element, "pPr/pStyle/val"), 0)
        if re.fullmatch("h[1-6]", name):
            level = name[1:]
        else:
            level = _value(element, "outline-level")
        return min(int(level or 0), 6)

    def _write(self, text: str) -> None:
        if not self._pre:
            self._begun.append(text)
            return
        first, *others = text.split("\n")
        self._begun.append(first)
        for line in others:
            self._end()
            self._begun.append(line)

    def _end(self) -> None:
        line = " ".join("".join(self._begun).split()).rstrip("¶")
        if line:
            if self._mark:
                line = f"{self._mark} {line}"
            self.lines.append(line)
            self._mark = ""
        self._begun.clear()


def convert(kind: str, data: bytes) -> list[str]:
    """Return the text of a document, or the problem and the remedy."""
    try:
        title, lines = READERS[kind](data)
        if not lines:
            raise FaultyError("has no text", "leave it out, or export its text")
    except FaultyError as error:
        return list(error.args)
    except MemoryError:
        return ["needs too much memory", TOO_LARGE]
    except Exception as error:  # of a file that its library does not expect
        if "password" in str(error):
            return list(LOCKED)
        reason = str(error).partition(" (<string>")[0]
        return [f"is damaged or too large ({reason})", "download or copy the file again"]
    title = " ".join(title.split())
    if NO_TITLE.search(title):
        title = ""
    # Always, so that no line of the text is taken for it.
    return ["\n".join(["---", f'title: "{title}"', "---", *lines])]


def main(memory: int) -> None:
    """Answer until standard input ends; `memory` is the limit in bytes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    sys.setrecursionlimit(DEEPEST)
    for limit, size in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        resource.setrlimit(limit, (size, size))
    while request := sys.stdin.buffer.readline():
        kind, size, seconds = json.loads(request)
        data = sys.stdin.buffer.read(size)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # whose signal ends the process
        answer = json.dumps(convert(kind, data))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


READERS = {"pdf": pdf, "docx": docx, "odt": odt, "epub": epub, "html": html}

if __name__ == "__main__":
    main(int(sys.argv[1]))
