"""Small documents, made here byte by byte: PDF, Word, OpenDocument and EPUB."""

import io
import zipfile
from urllib.parse import quote

SPACES = (
    'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main" '
    'xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006" '
    'xmlns:dc="http://purl.org/dc/elements/1.1/" '
    'xmlns:office="urn:oasis:names:tc:opendocument:xmlns:office:1.0" '
    'xmlns:text="urn:oasis:names:tc:opendocument:xmlns:text:1.0" '
    'xmlns:table="urn:oasis:names:tc:opendocument:xmlns:table:1.0"'
)
ENCRYPTED = f"/Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O <{'41' * 32}> /U <{'42' * 32}> >>"


def made_pdf(pages, title="", encrypted=False):
    """Return a PDF whose pages have some (column, line), of 12 points; behind four blanks it is in Courier."""
    objects = ["<< /Type /Catalog /Pages 2 0 R >>"]
    kids = " ".join(f"{5 + 2 * n} 0 R" for n in range(len(pages)))
    objects += [f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>"]
    objects += ["<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>", f"<< /Title ({title}) >>"]
    for number, lines in enumerate(pages):
        written = [
            f"BT /F{1 + text.startswith('    ')} 10 Tf {x} {760 - 12 * row} Td ({text}) Tj ET"
            for row, (x, text) in lines
        ]
        stream = "\n".join(written)
        font = "/Resources << /Font << /F1 3 0 R /F2 << /Type /Font /Subtype /Type1 /BaseFont /Courier >> >> >>"
        objects += [
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 600 800] {font} /Contents {6 + 2 * number} 0 R >>",
            f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream",
        ]
    body = b"%PDF-1.4\n"
    starts = []
    for number, content in enumerate(objects, 1):
        starts.append(len(body))
        body += f"{number} 0 obj\n{content}\nendobj\n".encode()
    table = "".join(f"{start:010} 00000 n \n" for start in starts)
    identity = f"{ENCRYPTED} /ID [<41> <41>]" if encrypted else ""
    size = len(objects) + 1
    trailer = f"trailer << /Size {size} /Root 1 0 R /Info 4 0 R {identity} >>"
    end = f"xref\n0 {size}\n0000000000 65535 f \n{table}{trailer}\nstartxref\n{len(body)}\n%%EOF\n"
    return body + end.encode()


def lines(*texts):
    """Return the (row, (column, text)) of the lines of a page."""
    return [(row, (60, text)) for row, text in enumerate(texts)]


def made_zip(files):
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            kind = zipfile.ZIP_STORED if name == "mimetype" else zipfile.ZIP_DEFLATED
            archive.writestr(name, content, kind)
    return written.getvalue()


def made_docx(body, styles="", others=()):
    """Return a file of Word with the XML of its body and its styles, and other files."""
    document = f"<w:document {SPACES}><w:body>{body}</w:body></w:document>"
    styles = f"<w:styles {SPACES}>{styles}</w:styles>"
    return made_zip({"word/document.xml": document, "word/styles.xml": styles, **dict(others)})


def paragraph(text, style=""):
    properties = f'<w:pPr><w:pStyle w:val="{style}"/></w:pPr>' if style else ""
    return f"<w:p>{properties}<w:r><w:t>{text}</w:t></w:r></w:p>"


def made_odt(body, others=()):
    """Return an OpenDocument text with the XML of its body, and other files."""
    root = "office:document-content"
    content = f"<{root} {SPACES}><office:body>{body}</office:body></{root}>"
    kind = "application/vnd.oasis.opendocument.text"
    return made_zip({"mimetype": kind, "content.xml": content, **dict(others)})


def made_epub(chapters, order, title):
    """Return a book whose chapters are web pages by name, in an order of names."""
    items = "".join(
        f'<item id="i{name}" href="{quote(name)}.xhtml" media-type="application/xhtml+xml"/>'
        for name in chapters
    )
    spine = "".join(f'<itemref idref="i{name}"/>' for name in order)
    package = (
        f'<package xmlns="http://www.idpf.org/2007/opf" {SPACES}><metadata><dc:title>{title}</dc:title></metadata>'
        f"<manifest>{items}</manifest><spine>{spine}</spine></package>"
    )
    files = {f"text/{name}.xhtml": page for name, page in chapters.items()}
    return made_zip({"mimetype": "application/epub+zip", "text/book.opf": package, **files})
