"""Convert the wikitext of a page to lines of text: a paragraph, a list item or a heading each.

The text is scanned a fixed number of times, with regular expressions that cannot backtrack far and one scan for
nested braces and one for nested brackets, so the time is linear in the size of a page, balanced or not. A missing
brace or tag must not cost the rest of the page: marks without a partner are dropped and their text stays, and marks
are no pair where a paragraph begins between them (`PARAGRAPH`).
Repeated groups are atomic, `(?>(?:...)*)`: Python 3.11.0 to 3.11.4 misread `(?:...)*+` (CPython issue 100061).
"""

import html
import re
from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple
from xml.sax.saxutils import unescape

from bert_cli.data.text.templates import QUOTE, Rules, fill, find_rule, rules_of
from bert_cli.data.text.wikipedia import TITLE

GROUP = itemgetter(1)  # the replacement r"\1", in half of its time
DEPTH = 40  # MediaWiki's own limit for templates was 40

# An empty line and text below it, or a heading. Dropped elements contain neither: an unclosed mark would pair with a
# later stray mark and drop the paragraphs between them. In boxes and tables short lines stand after empty ones, so
# there only longer text counts, and text below the last row. Comments are the exception: MediaWiki hides them at any
# length.
HEADING_LINE = r"\n==[^\n]*==[ \t]*(?=\n)"
TEXT_LINE = r"\n[ \t]*+\n[ \t]*+[^\s|!*#:;={}<-]"
PARAGRAPH = re.compile(rf"{TEXT_LINE}|{HEADING_LINE}")
LONG_PARAGRAPH = re.compile(rf"{TEXT_LINE}[^\n|]{{79}}|{HEADING_LINE}")
# Elements that are dropped with their content. The content of <nowiki> is always text.
INLINE = "ref|math|chem|ce"
DROPPED = (
    f"{INLINE}|references|gallery|timeline|score|syntaxhighlight|source|pre|imagemap|hiero|graph|mapframe|"
    "maplink|templatedata|templatestyles|inputbox|categorytree|includeonly|style|indicator|rss|section"
)
ELEMENT = re.compile(rf"<(?:(!--)|({DROPPED}|nowiki)(?=[\s/>])[^<>]*?(/?)>)", re.IGNORECASE)
SIMPLE_REF = re.compile(
    rf"<ref(?=[\s>])(?:[^<>]*/>|[^<>]*>[^<\n]*+(?>(?:(?!{TEXT_LINE}|\n==)\n[^<\n]*+)*)</ref\s*>)"
)
MARKUP = str.maketrans({char: f"&#{ord(char)};" for char in "[]{}|'=*#:;<>!&_-"})
BREAK = re.compile(r"</?br\b[^<>]*>", re.IGNORECASE)
SCRIPT = re.compile(r"<([sS][uU][pPbB])\b[^<>]*>\s*+([+−–-]?\d*[+−–-]?|&minus;\d*)\s*+</\1\s*>")
RAISED = str.maketrans("0123456789+-−–", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻⁻")
LOWERED = str.maketrans("0123456789+-−–", "₀₁₂₃₄₅₆₇₈₉₊₋₋₋")
ITEM = re.compile(r"<li\b[^<>]*>\s*", re.IGNORECASE)
BLOCK = re.compile(r"</?(?:p|div|blockquote|center|ul|ol|li|dl|dt|dd|h\d|poem)\b[^<>]*>", re.I)
TAG = re.compile(
    rf"</?(?:{DROPPED}|nowiki|a|abbr|b|bdi|bdo|big|cite|code|data|del|dfn|em|font|hr|i|ins|kbd|mark|noinclude|onlyinclude|"
    r"q|rb|rp|rt|rtc|ruby|s|samp|small|span|strike|strong|sub|sup|tbody|td|th|thead|time|tr|tt|u|var|wbr|"
    r"caption|img|languages|translate|tvar|poem)(?=[\s/>])[^<>]*>|<!--|-->",
    re.IGNORECASE,
)
# Any other tag: with a partner and without tags between them, or alone where its form shows that it is no text, as in
# vector<int>. The contents are kept if they have a word besides lines such as `count = 5`: names of videos have none.
_NAME = r"[a-z][\w:-]*+"
_ATTRIBUTES = r"""(?:\s++[\w:-]++\s*+=\s*+(?:"[^"<>]*+"|'[^'<>]*+'|[^\s<>"'/]++))"""
EXTENSION = re.compile(rf"<({_NAME})(?>{_ATTRIBUTES}*)\s*+>([^<>]*+)</\1\s*+>", re.IGNORECASE)
LONE_TAG = re.compile(
    rf"<{_NAME}(?:(?>{_ATTRIBUTES}*)\s*+/|(?>{_ATTRIBUTES}+)\s*+)>|</{_NAME}\s*+>", re.IGNORECASE
)
PLAIN_WORD = re.compile(
    r"(?<![\w/=.&#?@-])[^\W\d_](?:[^\W\d_A-Z]++|[^\W\d_a-z]++|)(?![\w/=&#?@-]|[.:][^\s<])"
)
PARAMETER = re.compile(r"(?m)^[ \t]*+[\w-]++[ \t]*+=(?!=).*+$")
TAB_TITLE = re.compile(r"(?:^|\|-\|)\s*+(?>(?:[^=|\n]*+=)?)")
# -{text}-, -{flags|text}-, -{zh-hans:text;zh-hant:text}-, -{from=>zh-cn:text}-: a text in several scripts or countries.
CONVERSION = re.compile(r"-\{(?!\{)(?:([^{}|]*+)\|)?((?>(?:[^{}]++|\{\{[^{}]*+\}\})*))\}-")
NESTED = 5  # conversions or tags inside one another
CONVERSION_FLAGS = re.compile(r"[\s;]*+(?>(?:(?:[-+A-Z]|[a-z]{2,3}(?>(?:-[a-z]+)*))[\s;]*+)*)")
VARIANT = re.compile(r"(?:^|;)\s*+(?:[^;:]*=>\s*+)?[a-z]{2,3}(?:-[a-z]+)*\s*+:")
HTML_TABLE = re.compile(r"<(/?)table\b[^<>]*>", re.IGNORECASE)
TABLES = re.compile(r"\n[ \t:*#;]*\{\|[^\n]*|\n[ \t]*\|\}")
BRACES = re.compile(r"\{\{+|\}\}+")
BRACKETS = re.compile(r"\[\[+|\]\]+")
# Possessive quantifiers: characters that cannot match otherwise are not tried again.
EXTERNAL = re.compile(r"(?i)\[(?:(?:https?|ftps?|irc|mailto):|//)[^\s\[\]]*+\s*+([^\[\]\n]*+)\]")
# A link to a file in any language, by its extension, and a link to the same page in another language.
MEDIA_LINK = r"(?i:[^\[\]|{}:]+:[^\[\]|{}]*\.(?:jpe?g|png|gif|svg|tiff?|og[agv]|oga|web[mp]|djvu|pdf|mp3|wav)\s*[|\]])"
LANGUAGE_LINK = r"(?:[a-z]{2,3}(?:-[a-z]+)*|simple):[^\[\]|{}]*\]"
# Three apostrophes are one apostrophe and the start of italics in l'''Iliade'', but not in ''g'''o'''lds''.
ELISION = re.compile(r"'''(?<=[^\w'][^\W\d_]''')(?=[^'\n]+''(?!'))")
QUOTES = re.compile(r"''+")
MAGIC_WORD = re.compile(r"__[^\Wa-z_]+__")
ITEM_MARKS = ("*", "#", ":", ";")
# How lines begin that are not paragraphs: list items, and rules and remains of unbalanced tables (both dropped).
LINE_STARTS = (*ITEM_MARKS, "----", "{|", "|", "! ", "!!")
HEADING = re.compile(r"(={1,6})(.+)\1$")
# Remains of dropped elements: empty brackets, separators at the ends of others, white space before a stop.
# The patterns are separate, because searching for a fixed first letter takes a third of the time.
TIDY: dict[re.Pattern[str], Any] = {
    re.compile(pattern): text
    for pattern, text in {
        r"\([\s,;:]*\)": "", r"\[\s*\]": "", r"\([\s,;]+": "(",
        r",[,;\s]{0,9}\)": ")", r";[,;\s]{0,9}\)": ")",
        r" (?=[ ,.;)]) {0,9}([,.;)])(?=[\s,.;:)]|$)": GROUP,
    }.items()
}  # fmt: skip
TIDY_WIDE = {
    re.compile(r"（[\s,;:，；：、]*）"): "", re.compile(r"（[\s,;，；、]+"): "（",
    re.compile(r"[,;，；、][,;，；、\s]{0,9}）"): "）",
}  # fmt: skip

PAGE_ID = re.compile(rb"<id>(\d{1,18})</id>")
# Of the main slot. XML escapes `<` in a text, so `[^<]*` reads all of it in one jump: a tenth of the time of `.*?`.
PAGE_TEXT = re.compile(rb"<text\b[^>]*?(?:/>|>((?>[^<]*(?:<(?!/text>)[^<]*)*))</text>)")
BASE = re.compile(rb"<base>([^<]*?/wiki)/[^<]*</base>")
HIDDEN_NAMESPACE = re.compile(rb'<namespace key="(?:6|-2|14)"[^>]*>([^<]+)<')  # files, categories


class Site(NamedTuple):
    """The facts of a wiki that its dump's header gives."""

    url: str
    link: re.Pattern[str]
    """A link that shows its label."""
    hidden: re.Pattern[str]
    """The beginning of a link without text, such as `File:`."""
    page_link: re.Pattern[str]
    """A link to the page of a category or a file, as to `Category:Cats`."""
    rules: Rules
    """The texts of templates."""


def site_of(header: bytes, templates: Mapping[str, str] | None = None) -> Site:
    """Return the facts of a wiki from the header of its dump; names of namespaces decide which links have no text."""
    names = b"|".join([b"File|Image|Media|Category", *HIDDEN_NAMESPACE.findall(header)])
    spaces = re.sub(r"[^\w|]", ".", names.decode(errors="replace"))  # a space may be an underscore
    hidden = rf"\s*+(?:(?i:{spaces})\s*+:|{MEDIA_LINK}|{LANGUAGE_LINK})"
    link = rf"\[\[(?!{hidden})(?:[^\[\]{{}}\n]*\|)?:?([^\[\]{{}}|\n]*)\]\]"
    page_link = re.compile(rf"\[\[:\s*+(?i:{spaces})\s*+:[^\[\]|\n]*\]\]")
    base = BASE.search(header)
    url = ""
    if base:
        url = base[1].decode(errors="replace")
    language = url.rpartition("//")[2].partition(".")[0]
    rules = rules_of(language, templates or {})
    return Site(url, re.compile(link), re.compile(hidden), page_link, rules)


def document(page: bytes, site: Site) -> bytes:
    """Return a page of a dump as a <doc> block, as WikiExtractor writes it: its title, an empty line, and its lines."""
    number = PAGE_ID.search(page)
    title = TITLE.search(page)
    match = PAGE_TEXT.search(page)
    content = match[1] if match else None
    text = (content or b"").decode(errors="replace")
    lines = "\n".join(to_lines(unescape(text, {"&quot;": '"'}), site))
    body = html.escape(lines, quote=False).encode(errors="replace")
    key = number[1] if number else b""
    name = title[1] if title else b""
    head = b'<doc id="%b" url="%b?curid=%b" title="%b">' % (key, site.url.encode(), key, name)
    return b"%b\n%b\n\n%b\n\n</doc>\n\n" % (head, name, body)


def to_lines(wikitext: str, site: Site) -> list[str]:
    """Return the paragraphs, list items and headings of a page; a heading without text below is left out."""
    text = _without_elements(SIMPLE_REF.sub("", wikitext.replace("&nbsp;", " ")))
    text = _replace_repeatedly(text, CONVERSION, _variant)
    if site.page_link.search(text):
        text = re.sub(rf"(?m)^(?:[^\[\].\n]{{0,40}}{site.page_link.pattern})+[^\w\n]*$", "", text)
    text = EXTERNAL.sub(GROUP, text)
    text = site.link.sub(GROUP, text)  # before the templates, whose arguments bars separate
    text = _replace_nested(text, BRACES, partial(_template, rules=site.rules))
    text = HTML_TABLE.sub(lambda tag: "\n|}\n" if tag[1] else "\n{|\n", text)
    text = _replace_nested("\n" + text, TABLES, _table)
    text = site.link.sub(GROUP, text)
    text = _replace_nested(text, BRACKETS, partial(_link, hidden=site.hidden))
    text = EXTERNAL.sub(GROUP, text)
    text = SCRIPT.sub(_script, text)
    text = BREAK.sub(" ", text)
    text = ITEM.sub("\n* ", text)
    text = BLOCK.sub("\n\n", text)
    text = TAG.sub("", text)
    text = _replace_repeatedly(text, EXTENSION, _extension)
    text = LONE_TAG.sub("", text)
    text = ELISION.sub("&#39;", text)
    text = QUOTES.sub(lambda run: "'" if len(run[0]) == 4 else "", text)
    text = MAGIC_WORD.sub("", text)
    tidy = TIDY
    if "（" in text:
        tidy = TIDY_WIDE | TIDY
    for pattern, replacement in tidy.items():
        text = pattern.sub(replacement, text)
    return _lines(text)


def _lines(text: str) -> list[str]:
    lines: list[str] = []
    paragraph: list[str] = []
    headings: list[tuple[int, str]] = []  # without text so far

    def add(line: str) -> None:
        line = " ".join(html.unescape(line).split())
        if line:
            lines.extend(title for _, title in headings)
            headings.clear()
            lines.append(line)

    for raw in text.split("\n"):
        line = raw.strip()
        heading = None
        if line[:1] == "=":
            heading = HEADING.match(line)
        if line and heading is None and not line.startswith(LINE_STARTS):
            paragraph.append(line)
            continue
        if paragraph:
            add(" ".join(paragraph))
            paragraph = []
        if heading:
            level = len(heading[1])
            # A heading of the same level ends the section before it, which had no text.
            while headings and headings[-1][0] >= level:
                headings.pop()
            title = " ".join(html.unescape(heading[2]).split())
            if title:
                if title[-1] not in ".!?":
                    title += "."
                headings.append((level, title))
        elif line[:1] in ITEM_MARKS:
            add(line.lstrip("*#:; "))
    add(" ".join(paragraph))
    return lines


def _without_elements(text: str) -> str:
    """Return the text without comments and elements that hold no text, and <nowiki> as entities."""
    pieces: list[str] = []
    position = last = 0
    unclosed: set[str] = set()  # kinds without a further end, so that each is searched for once
    while match := ELEMENT.search(text, position):
        position = match.end()
        kind = (match[1] or match[2]).lower()
        if kind in unclosed or match[3]:
            continue
        end = END[kind].search(text, position)
        if end is None:
            unclosed.add(kind)
        if end is None or not end.lastgroup:
            continue
        pieces.append(text[last : match.start()])
        if kind == "nowiki":
            pieces.append(text[position : end.start()].translate(MARKUP))
        position = last = end.end()
    return "".join([*pieces, text[last:]])


def _end_of(kind: str) -> re.Pattern[str]:
    """Return a pattern for the end of an element, as a group, or for a sign that the element has no end."""
    if kind == "!--":
        return re.compile("(?P<end>-->)")
    begin = rf"<{kind}(?=[\s/>])[^<>]*+(?<!/)>"  # of the next element: elements of a kind are not nested
    between = HEADING_LINE
    if kind in INLINE.split("|"):
        between = PARAGRAPH.pattern
    return re.compile(rf"(?P<end></{kind}\s*>)|{begin}|{between}", re.IGNORECASE)


END = {kind: _end_of(kind) for kind in ("!--", "nowiki", *DROPPED.split("|"))}


def _is_text(inner: str) -> bool:
    """Return whether paragraphs begin in an apparent table or box, so that its closing mark must be missing."""
    last_row = max(inner.rfind(mark) for mark in ("\n|", "\n |", "\n!"))
    return bool(LONG_PARAGRAPH.search(inner) or PARAGRAPH.search(inner, max(0, last_row)))


def _table(inner: str) -> str:
    """Return paragraphs that an apparent table holds; the text of a true one is left out."""
    if _is_text(inner):
        return f"\n{inner}\n"
    return "\n"


def _replace_nested(text: str, marks: re.Pattern[str], convert: Callable[[str], str]) -> str:
    """Convert the text between pairs of marks, innermost first, up to DEPTH; marks without a partner are dropped."""
    pieces: list[str] = []
    opened: list[list[int]] = []  # for a run of marks: its index in `pieces`, and the marks left
    last = 0
    for match in marks.finditer(text):
        pieces.append(text[last : match.start()])
        mark = match[0]
        last = match.end()
        # A mark of a table is one pair; runs of braces and brackets may hold several.
        count = 2 if "|" in mark else len(mark)
        if "{" in mark or "[" in mark:
            opened.append([len(pieces), min(count, 2 * DEPTH)])
            continue
        while count >= 2 and opened:
            run = opened[-1]
            # Three braces are a parameter of a template.
            limit = 3 if mark[0] == "}" else 2
            used = min(count, run[1], limit)
            if len(opened) <= DEPTH:
                inner = "".join(pieces[run[0] :])
                pieces[run[0] :] = [convert(inner)]
            count -= used
            run[1] -= used
            if run[1] < 2:
                opened.pop()
    return "".join([*pieces, text[last:]])


def _replace_repeatedly(
    text: str, pattern: re.Pattern[str], convert: Callable[[re.Match[str]], str]
) -> str:
    """Replace all matches until the pattern no longer matches, at most NESTED times."""
    for _ in range(NESTED):
        text, number = pattern.subn(convert, text)
        if not number:
            break
    return text


def _extension(tag: re.Match[str]) -> str:
    """Return the prose in an element that this module does not know; tabs become paragraphs without their titles."""
    inner = tag[2]
    is_tabs = "|-|" in inner or tag[1].lower() == "tabber"
    if is_tabs:
        prose = TAB_TITLE.sub("\n\n", inner)
    else:
        prose = PARAMETER.sub("", inner)
    if not PLAIN_WORD.search(prose):
        return ""
    if "\n" in prose:
        return f"\n\n{prose}\n\n"
    return prose


def _variant(conversion: re.Match[str]) -> str:
    """Return the first variant of a text, and nothing for a rule that is not shown."""
    flags = conversion[1] or ""
    text = conversion[2]
    if not CONVERSION_FLAGS.fullmatch(flags):
        return f"{flags}|{text}"
    if {"H", "T", "-"} & set(re.split(r"[\s;]+", flags)):
        return ""
    variants = VARIANT.split(text)
    if variants[1:] and not variants[0].strip():
        return variants[1].strip()
    return text


def _script(tag: re.Match[str]) -> str:
    """Return digits and signs as raised or lowered characters."""
    characters = RAISED if tag[1].lower() == "sup" else LOWERED
    return tag[2].replace("&minus;", "−").translate(characters)


def _link(inner: str, hidden: re.Pattern[str]) -> str:
    if hidden.match(inner + "]"):
        if PARAGRAPH.search(inner):
            return inner
        return ""
    if "\n" not in inner:
        return inner.removesuffix("|").rpartition("|")[2]
    # A link ends with its line, but a label may be broken into lines; then only the target is dropped.
    target, _, label = inner.partition("|")
    if "\n" in target or PARAGRAPH.search(label):
        return inner
    return label


def _template(inner: str, rules: Rules) -> str:
    """Return the text of a template, an empty one where it is not known and holds no paragraph."""
    rule, name, arguments, is_function = find_rule(inner, rules)
    if "\n" in inner and rule != QUOTE:
        head, _, rest = inner.partition("|")
        is_box = head.endswith("\n")  # each argument on its line
        if is_box:
            has_paragraph = _is_text(inner)
        else:
            has_paragraph = PARAGRAPH.search(inner) is not None
        if has_paragraph:
            if "\n" not in head:
                return rest
            if is_box:
                return inner[len(head.rstrip()) :]
            return inner
    if not rule:
        return ""
    return fill(rule, name, arguments, has_names=not is_function)
