"""Convert the wikitext of a page to lines of text: a paragraph, a list item or a heading each.

The text is scanned a fixed number of times, with regular expressions that cannot backtrack far and one scan for
nested braces and one for nested brackets, so the time is linear in the size of a page, balanced or not. An
element without an end remains as text: a missing brace or tag must not cost the rest of the page.
"""

import html
import re
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import NamedTuple

GROUP = itemgetter(1)  # the replacement r"\1", in half of its time
DEPTH = 40  # MediaWiki's own limit for templates was 40; what is nested deeper is dropped

# Templates that stand in sentences, by how often they do in the dumps of docs/wikipedia.md. The text is made of the
# arguments {1}, {2}, ..., the last one {-1}, all of them {*} and the name {0}. Other templates are dropped: most are
# references, boxes and notes.
RULES = {
    "{1}": "nowrap|nobr|không ngắt|small|nhỏ|smaller|big|larger|abbr|viết tắt|tooltip|mono|code|kbd|sc|smallcaps|caps|"
    "vanchor|visible anchor|linktext|angbr|ill|illm|interlanguage link|liên kết ngôn ngữ|flag|flagcountry|lá cờ|em|"
    "strong|sup|sub|math|mvar|var|nobold|noitalic|not a typo|sic|nts|val|unicode|polytonic|hebrew|script/hebrew|"
    "script/arabic|pinyin|overline|underline|strike|quote|blockquote|cquote|quotation|quote box|câu nói|poem|"
    "poemquote|center|centre|plainlist|flatlist|div col|columns-list|railgauge|track gauge",
    "{2}": "lang|langx|wikt-lang|color|font color|hover title|rtl-lang",
    "{-1}": "transl|transliteration|translit|script", "{1} ({2}, {3})": "nihongo", "{*}": "chem|chem2",
    "{0} {1}": "uss|hms|ss|rms|hmas|hmcs|sms|usns|mv", "c. {1}": "circa|c.", "×10^{1}": "e",
    " – ": "snd|spnd|snds|spaced ndash|spaced en dash", "–": "ndash|en dash|–", "—": "mdash|em dash|—",
    " · ": "bull|bullet|dot|·|middot|•", " ": "nbsp|space|spaces|thinsp|hair space|-|clear",
    "=": "=", "|": "!", "'": "'", "'s": "'s",
}  # fmt: skip
TEMPLATES = {name: rule for rule, names in RULES.items() for name in names.split("|")}
ARGUMENT = re.compile(r"\{(-?\d|\*)\}")
NAMED = re.compile(r"\s*([^\s=<>/\[\]]+(?: [^\s=<>/\[\]]+)*)\s*=")
UNITS = {
    "sqmi": "sq mi", "sqft": "sq ft", "km2": "km²", "m2": "m²", "m3": "m³", "C": "°C", "F": "°F", "kn": "knots",
    "USgal": "US gal", "cuft": "cu ft", "foot": "feet", "mile": "miles",
}  # fmt: skip
# Of convert: numbers and the words between them, the unit, and 2 in of 6 ft 2 in.
QUANTITY = re.compile(
    r"(?:[^|\d]*\d[^|]*\|(?:to|and|or|by|x|-|–|\+/-|\*)\|)*[^|\d]*\d[^|]*\|[^|\d][^|]*"
    r"(?:\|\d[^|]*\|(?:in|oz|lb|ft|yd)(?=\||$))?"
)
MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"

# Elements that are dropped with what they hold; of <nowiki> the content is text, whatever it looks like.
DROPPED = (
    "ref|references|gallery|math|chem|ce|timeline|score|syntaxhighlight|source|pre|imagemap|hiero|graph|mapframe|"
    "maplink|templatedata|templatestyles|inputbox|categorytree|includeonly|style|indicator|rss|section"
)
ELEMENT = re.compile(rf"<(?:(!--)|({DROPPED}|nowiki)(?=[\s/>])[^<>]*?(/?)>)", re.IGNORECASE)
SIMPLE_REF = re.compile(r"<ref(?=[\s>])(?:[^<>]*/>|[^<>]*>[^<]*</ref\s*>)")
MARKUP = str.maketrans({char: f"&#{ord(char)};" for char in "[]{}|'=*#:;<>!&_-"})
BREAK = re.compile(r"<br\b[^<>]*>", re.IGNORECASE)
ITEM = re.compile(r"<li\b[^<>]*>\s*", re.IGNORECASE)
BLOCK = re.compile(r"</?(?:p|div|blockquote|center|ul|ol|li|dl|dt|dd|h\d|poem)\b[^<>]*>", re.I)
TAG = re.compile(
    rf"</?(?:{DROPPED}|nowiki|a|abbr|b|bdi|bdo|big|cite|code|data|del|dfn|em|font|hr|i|ins|kbd|mark|noinclude|onlyinclude|"
    r"q|rb|rp|rt|rtc|ruby|s|samp|small|span|strike|strong|sub|sup|tbody|td|th|thead|time|tr|tt|u|var|wbr|"
    r"caption|img|languages|translate|tvar|poem)(?=[\s/>])[^<>]*>|<!--|-->",
    re.IGNORECASE,
)
HTML_TABLE = re.compile(r"<(/?)table\b[^<>]*>", re.IGNORECASE)
TABLES = re.compile(r"\n[ \t:*#;]*\{\|[^\n]*|\n[ \t]*\|\}")
BRACES = re.compile(r"\{\{+|\}\}+")
BRACKETS = re.compile(r"\[\[+|\]\]+")
# Possessive quantifiers: what cannot match again is not tried again.
EXTERNAL = re.compile(r"(?i)\[(?:(?:https?|ftps?|irc|mailto):|//)[^\s\[\]]*+\s*+([^\[\]\n]*+)\]")
# A link to a file in any language, by its extension, and one to the same page in another language.
MEDIA_LINK = r"(?i:[^\[\]|{}:]+:[^\[\]|{}]*\.(?:jpe?g|png|gif|svg|tiff?|og[agv]|oga|web[mp]|djvu|pdf|mp3|wav)\s*[|\]])"
LANGUAGE_LINK = r"(?:[a-z]{2,3}(?:-[a-z]+)*|simple):[^\[\]|{}]*\]"
# Three apostrophes are one and the begin of italics in l'''Iliade''.
ELISION = re.compile(r"'''(?<=\W[^\W\d_]''')(?=[^'\n]+''(?!'))")
QUOTES = re.compile(r"''+")
MAGIC_WORD = re.compile(r"__[^\Wa-z_]+__")
ITEM_MARKS = ("*", "#", ":", ";")
LINE_STARTS = (*ITEM_MARKS, "----", "{|", "|", "! ", "!!")
"""Begins of a line that is no paragraph: an item, or a rule or the rest of an unbalanced table, which are dropped."""
HEADING = re.compile(r"(={1,6})(.+)\1$")
# What dropped elements leave behind: empty brackets, separators at the ends of others, white space before a stop.
EMPTY_BRACKETS = re.compile(r"\([\s,;:]*\)|\[\s*\]")
BRACKET_BEGIN = re.compile(r"\([\s,;]+")
BRACKET_END = re.compile(r"[,;][,;\s]{0,9}\)")
SPACE_BEFORE_STOP = re.compile(r" {1,9}([,.;)])(?=[\s,.;:)]|$)")

TITLE = re.compile(rb"<title>(.*?)</title>", re.DOTALL)
PAGE_ID = re.compile(rb"<id>(\d+)</id>")
BASE = re.compile(rb"<base>([^<]*?/wiki)/[^<]*</base>")
HIDDEN_NAMESPACE = re.compile(rb'<namespace key="(?:6|-2|14)"[^>]*>([^<]+)<')  # files, categories


class Site(NamedTuple):
    """The facts of a wiki that its dump's header gives."""

    url: str
    link: re.Pattern[str]
    """A link that shows its label."""
    hidden: re.Pattern[str]
    """The begin of a link without text, such as `File:`."""


def site_of(header: bytes) -> Site:
    """Return the address of the wiki and the links without text, from the names of its namespaces."""
    names = b"|".join([b"File|Image|Media|Category", *HIDDEN_NAMESPACE.findall(header)])
    spaces = re.sub(r"[^\w|]", ".", names.decode(errors="replace"))  # a space may be an underscore
    hidden = rf"\s*+(?:(?i:{spaces})\s*+:|{MEDIA_LINK}|{LANGUAGE_LINK})"
    link = rf"\[\[(?!{hidden})(?:[^\[\]{{}}\n]*\|)?:?([^\[\]{{}}|]*)\]\]"
    base = BASE.search(header)
    url = base[1].decode(errors="replace") if base else ""
    return Site(url, re.compile(link), re.compile(hidden))


def document(page: bytes, site: Site) -> bytes:
    """Return a page of a dump as a <doc> block: its title, an empty line, and its lines."""
    number, title, begin = PAGE_ID.search(page), TITLE.search(page), page.find(b"<text")
    text = page[page.find(b">", begin) + 1 : max(0, page.rfind(b"</text>"))] if begin >= 0 else b""
    for entity, char in ((b"&lt;", b"<"), (b"&gt;", b">"), (b"&quot;", b'"'), (b"&amp;", b"&")):
        text = text.replace(entity, char)
    lines = "\n".join(to_lines(text.decode(errors="replace"), site))
    return doc_block(number[1] if number else b"", title[1] if title else b"", lines, site.url)


def doc_block(number: bytes, title: bytes, text: str, url: str) -> bytes:
    """Return a <doc> block as WikiExtractor writes it; `title` is escaped as in XML."""
    body = html.escape(text, quote=False).encode(errors="replace")
    head = b'<doc id="%b" url="%b?curid=%b" title="%b">' % (number, url.encode(), number, title)
    return b"%b\n%b\n\n%b\n\n</doc>\n\n" % (head, title, body)


def to_lines(wikitext: str, site: Site) -> list[str]:
    """Return the paragraphs, list items and headings of a page; a heading without text below is left out."""
    text = _without_elements(SIMPLE_REF.sub("", wikitext.replace("&nbsp;", " ")))
    text = EXTERNAL.sub(GROUP, text)
    text = site.link.sub(GROUP, text)  # before the templates, whose arguments bars separate
    text = _replace_nested(text, BRACES, _template)
    text = HTML_TABLE.sub(lambda tag: "\n|}\n" if tag[1] else "\n{|\n", text)
    text = _replace_nested("\n" + text, TABLES, lambda _: "\n")
    text = site.link.sub(GROUP, text)
    text = _replace_nested(text, BRACKETS, partial(_link, hidden=site.hidden))
    text = EXTERNAL.sub(GROUP, text)
    text = TAG.sub("", BLOCK.sub("\n\n", ITEM.sub("\n* ", BREAK.sub(" ", text))))
    text = QUOTES.sub(lambda run: "'" if len(run[0]) == 4 else "", ELISION.sub("&#39;", text))
    text = EMPTY_BRACKETS.sub("", MAGIC_WORD.sub("", text))
    text = SPACE_BEFORE_STOP.sub(GROUP, BRACKET_END.sub(")", BRACKET_BEGIN.sub("(", text)))
    return _lines(text)


def _lines(text: str) -> list[str]:
    lines: list[str] = []
    paragraph: list[str] = []
    headings: list[tuple[int, str]] = []  # without text so far

    def add(line: str) -> None:
        line = " ".join(html.unescape(line).split()) if "&" in line else " ".join(line.split())
        if line:
            lines.extend(title for _, title in headings)
            headings.clear()
            lines.append(line)

    for raw in text.split("\n"):
        line = raw.strip()
        heading = HEADING.match(line) if line[:1] == "=" else None
        if line and heading is None and not line.startswith(LINE_STARTS):
            paragraph.append(line)
            continue
        if paragraph:
            add(" ".join(paragraph))
            paragraph = []
        if heading:
            level = len(heading[1])
            while headings and headings[-1][0] >= level:
                headings.pop()
            title = " ".join(html.unescape(heading[2]).split())
            if title:
                headings.append((level, title if title[-1] in ".!?" else title + "."))
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
        pattern = "-->" if match[1] else rf"</{kind}\s*>"
        end = re.compile(pattern, re.IGNORECASE).search(text, position)
        if end is None:
            unclosed.add(kind)
            continue
        pieces.append(text[last : match.start()])
        if kind == "nowiki":
            pieces.append(text[position : end.start()].translate(MARKUP))
        position = last = end.end()
    return "".join([*pieces, text[last:]])


def _replace_nested(text: str, marks: re.Pattern[str], convert: Callable[[str], str]) -> str:
    """Replace what is between pairs of marks, the innermost first; marks without a partner are dropped."""
    pieces: list[str] = []
    opened: list[list[int]] = []  # for a run of marks: its index in `pieces`, and the marks left
    last = 0
    for match in marks.finditer(text):
        pieces.append(text[last : match.start()])
        mark, last = match[0], match.end()
        count = 2 if "|" in mark else len(mark)
        if "{" in mark or "[" in mark:
            opened.append([len(pieces), min(count, 2 * DEPTH)])
            continue
        while count >= 2 and opened:
            run = opened[-1]
            used = min(count, run[1], 3 if mark[0] == "}" else 2)
            inner = "".join(pieces[run[0] :])
            del pieces[run[0] :]
            pieces.append(convert(inner) if len(opened) <= DEPTH else "")
            count, run[1] = count - used, run[1] - used
            if run[1] < 2:
                opened.pop()
    return "".join([*pieces, text[last:]])


def _link(inner: str, hidden: re.Pattern[str]) -> str:
    return "" if hidden.match(inner + "]") else inner.removesuffix("|").rpartition("|")[2]


def _template(inner: str) -> str:
    """Return the text of a template, from its name and arguments; an empty one where it is not known."""
    head, _, rest = inner.partition("|")
    name = head.strip().lower().replace("_", " ")
    function = FUNCTIONS.get(name)
    rule = TEMPLATES.get(name) or ("{1}" if name.startswith("lang-") else "")
    if not function and "{" not in rule:
        return rule
    values: list[str] = []
    named: dict[str, str] = {}
    for argument in rest.split("|") if rest else ():
        match = NAMED.match(argument)
        if match is None or match[1] == str(len(values) + 1):
            values.append(argument[match.end() if match else 0 :].strip())
        else:
            named[match[1]] = argument[match.end() :].strip()
    if function:
        return function(head.strip(), values, named)
    texts = [named[name] for name in ("text", "quote", "content", "lt") if name in named]
    fields = {"*": "".join(values), "-1": "".join(values[-1:]), "0": head.strip()}
    fields |= {str(number): value for number, value in enumerate(texts or values, 1)}
    return ARGUMENT.sub(lambda field: fields.get(field[1], ""), rule)


def _quantity(_: str, values: list[str], __: dict[str, str]) -> str:
    match = QUANTITY.match("|".join(values))
    words = match[0].split("|") if match else values[:1]
    return " ".join(UNITS.get(word, word) for word in words).replace(" - ", "–")


def _fraction(_: str, values: list[str], __: dict[str, str]) -> str:
    return " ".join([*values[:-2], "/".join(["1", *values][-2:])])


def _as_of(name: str, values: list[str], named: dict[str, str]) -> str:
    year, month, day = (*values, "", "", "")[:3]
    if month.isdecimal() and 1 <= int(month) <= 12:
        month = MONTHS.split("|")[int(month) - 1]
    name = name.lower() if "lc" in named else name[:1].upper() + name[1:]
    return " ".join(filter(None, (name, day, month, year)))


FUNCTIONS: dict[str, Callable[[str, list[str], dict[str, str]], str]] = {
    **dict.fromkeys(("convert", "cvt", "chuyển đổi"), _quantity),
    **dict.fromkeys(("as of", "tính đến"), _as_of),
    **dict.fromkeys(("frac", "fraction", "sfrac"), _fraction),
}
