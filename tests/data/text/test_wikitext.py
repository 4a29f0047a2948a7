"""Wikitext becomes lines of text: paragraphs, list items and headings, and nothing else."""

import random
import re
import time

import pytest

from bert_cli.data.io.documents import clean
from bert_cli.data.text import templates, wikipedia, wikitext
from bert_cli.data.text.wikitext import document, site_of, to_lines

HEADER = """<mediawiki><siteinfo><base>https://fr.wikipedia.org/wiki/Accueil</base><namespaces>
<namespace key="-2" case="first-letter">Média</namespace>
<namespace key="6" case="first-letter">Fichier</namespace>
<namespace key="14" case="first-letter">Catégorie d'aide</namespace>
</namespaces></siteinfo>""".encode()
SITE = site_of(HEADER)


def lines(wikitext):
    return to_lines(wikitext, SITE)


@pytest.mark.parametrize(
    "link",
    [
        "[[File:A b.jpg|thumb|300px|A [[cat]] of {{lang|fr|chat}} and [http://x y]<ref>z</ref>]]",
        "[[file:A.jpg|thumb|A [[cat|''cat'']] and [[File:B.png|20px]] [sic]\nin lines]]",
        "[[Fichier:A.pdf|vignette]]",
        "[[Image:A.png]]",
        "[[Média:A.ogg|écouter]]",
        "[[Hình:A.JPG|nhỏ|phải|250px|Một con mèo]]",
        "[[Category:Cats| ]]",
        "[[catégorie d'aide:Chats]]",
        "[[Catégorie_d'aide:Chats|*]]",
        "<gallery>\nA.jpg|[[x]]\nB.jpg\n</gallery>",
    ],
)
def test_links_to_files_and_categories_show_nothing_in_any_language(link):
    assert lines(f"Before {link} after.") == ["Before after."]
    assert lines(f"{link}\n\n'''A''' is.") == ["A is."]


@pytest.mark.parametrize(
    ("wikitext", "expected"),
    [
        ("{{convert|1300|mi|km}}", "1300 mi"),
        ("{{Convert|52,419|sqmi|km2|abbr=out|sp=us}}", "52,419 sq mi"),
        ("{{convert|5|to|7|km|mi|0}}", "5 to 7 km"),
        ("{{convert|5|-|7|C}}", "5–7 °C"),
        ("{{cvt|6|ft|2|in|m|2}}", "6 ft 2 in"),
        ("{{convert|100|m|0}}", "100 m"),
        ("{{convert}}", ""),
        ("{{lang|grc|ἀναρχία}}", "ἀναρχία"),
        ("{{lang-fr|États-Unis}}", "États-Unis"),
        ("{{langx|de|Deutschland|lit=x}}", "Deutschland"),
        ("{{transl|ar|ALA|''Allāh''}}", "Allāh"),
        ("{{nowrap|[[Pope Clement IV|Clement]]}}", "Clement"),
        ("{{small|a {{nowrap|b {{lang|fr|c}}}}}}", "a b c"),
        ("{{nowrap|1=a = b}}", "a = b"),
        ("{{abbr|PM|Prime Minister}}", "PM"),
        ("{{ill|Jean|fr|Jean (x)|lt=John}}", "John"),
        ("{{Nihongo|headquarters|本部道場|honbu dōjō}}", "headquarters (本部道場, honbu dōjō)"),
        ("{{as of|2014|lc=y}}", "as of 2014"),
        ("{{As of|2019|03|1}}", "As of 1 March 2019"),
        ("{{As of|2019|12|31}}", "As of 31 December 2019"),
        ("{{Tính đến|2019|October|21}}", "Tính đến 21 October 2019"),
        ("{{frac|3}} {{frac|1|2}} {{frac|2|1|2}}", "1/3 1/2 2 1/2"),
        ("1{{snd}}2{{nbsp}}3{{mdash}}4{{'s}}", "1 – 2 3—4's"),
        ("{{chem|C|2|H|6|O}}", "C2H6O"),
        ("{{USS|Hornet|CV-12|6}}", "USS Hornet"),
        ("{{circa|1500}} 3{{e|24}}", "c. 1500 3×10²⁴"),
        ("{{val|1.5|e=6|u=km}}, {{val|7|ul=m}}, {{val|e=6}}", "1.5×10⁶ km, 7 m, 10⁶"),
        ("{{quote|text=A ''quote''.|author=B}}", "A quote."),
        ("{{lang_|x}}{{#if:a|b}}{{{1|c}}}{{PAGENAME}}{{sfn|A|2000|p=1}}", ""),
    ],
)
def test_a_template_that_stands_in_sentences_is_filled_and_others_are_dropped(wikitext, expected):
    assert lines(f"It is {wikitext} there.") == [" ".join(f"It is {expected} there.".split())]


@pytest.mark.parametrize(
    ("wikitext", "expected"),
    [
        ("<tabber>One=First text.|-|Two=Second text.</tabber>", ["A", "First text.", "Second text.", "b."]),
        ("<tabber>\nOne=\nFirst text.\n|-|\nTwo=\nSecond.\n</tabber>", ["A", "First text.", "Second.", "b."]),
        ('<youtube width="200">dQw4w9WgXcQ</youtube>', ["A b."]),
        ("<video>https://youtu.be/abc</video> <aoaudio>song.mp3</aoaudio>", ["A b."]),
        ('<pages index="Book.djvu" from=1 to=20 /><mark2/>', ["A b."]),
        ("<DynamicPageList>\ncategory = Big ships\ncount = 5\n</DynamicPageList>", ["A b."]),
        ('<googlemap lat="1">41.23, -2.1</googlemap>', ["A b."]),
        ("<spoiler>He <inner>dies</inner> there.</spoiler>", ["A He dies there. b."]),
        ("<verse>他是人。</verse>", ["A 他是人。 b."]),
        ('<foo bar="x">', ["A b."]),
        ("vector<int>, <stdio.h>, <a@b.c>, x <y and z> w", ["A vector<int>, <stdio.h>, <a@b.c>, x <y and z> w b."]),
    ],
)  # fmt: skip
def test_an_unknown_tag_leaves_its_prose_and_nothing_else(wikitext, expected):
    assert lines(f"A {wikitext} b.") == expected


@pytest.mark.parametrize(
    ("wikitext", "expected"),
    [
        # A link is its label.
        ("A [[cat]] and [[Dog (animal)|dogs]], [[b]]s.", "A cat and dogs, bs."),
        ("[[:File:A.jpg]] and [[:Category:B|B]]", "File:A.jpg and B"),
        ("[[a|b|c]] [[d|]] [[e#f|''g'']]", "c g"),
        ("Seen.[[de:Katze]][[zh-min-nan:Niau]] [[wikt:cat]]", "Seen. wikt:cat"),
        ("[https://a.example/b?c=1 A label] and [http://x.example]", "A label and"),
        ("[//a.example l] [mailto:a@b.example Mail]", "l Mail"),
        ("[[''Nature'' (journal)|''Nature'']] [sic] [1]", "Nature [sic] [1]"),
        ("see https://a.example/b.", "see https://a.example/b."),
        ("One [[A|b\nc]] d", "One b c d"),
        ("One [[A) x.\nTwo b|c]] d", "One A) x. Two b|c d"),
        # Of a conversion between the scripts of a language one variant is shown.
        ("-{zh-hans:计算机;zh-hant:電腦}-是-{巴比奇}-", "计算机是巴比奇"),
        ("-{zh-hans:甲;zh-hant:乙}-" * 9, "甲" * 9),
        ("-{H|zh-cn:内存;zh-tw:記憶體}-一-{T|zh-hans:电脑;zh-hant:電腦}-", "一"),
        ("-{A|zh-cn:信息;zh-tw:資訊}-", "信息"),
        ("-{大寫=>zh-cn:小寫;zh-tw:x}-", "小寫"),
        ("-{-|zh-cn:a;zh-tw:b}-c", "c"),
        ("-{zh-hans;zh-hant|文}- -{R|abc}-", "文 abc"),
        ("-{sr-ec:Тест; sr-el:Test}-", "Тест"),
        ("-{zh-hans:-{x}-;zh-hant:b}-", "x"),
        ("{{lang|zh|-{A|zh-cn:q;zh-tw:r}-}} [[x|-{zh-cn:l;zh-tw:m}-]]", "q l"),
        ("-{https://a.example/b&nbsp;c}-", "https://a.example/b c"),
        ("x-{{nowrap|y}}-z {a}- -{b", "x-y-z {a}- -{b"),
        # What a dropped template leaves is tidied.
        (
            "'''A''' ({{IPA|a}}; {{lang-ar|الجزائر}} {{respell|a}} , ), {{fact}} is ({{IPA|x}}) here {{x}}.",
            "A (الجزائر), is here.",
        ),
        # Apostrophes mark bold and italics, or stay.
        (
            "'''Bold''' and ''italic'', '''''both''''', l'''Iliade''",
            "Bold and italic, both, l'Iliade",
        ),
        ("d'''amour'', it''''s, don't 'x'", "d'amour, it's, don't 'x'"),
        # Powers and indices of digits are characters, and others letters.
        (
            "10<sup>6</sup>, 10<sup>−3</sup>, s<sup>&minus;1</sup>, Ca<SUP>2+</SUP>",
            "10⁶, 10⁻³, s⁻¹, Ca²⁺",
        ),
        (
            "Cl<sup class=a>-</sup> H<sub>2</sub>O, T<sub>+1</sub>, x<sup>n</sup>",
            "Cl⁻ H₂O, T₊₁, xn",
        ),
        ("1<sup>st</sup>, a<sub>ij</sub>, b<sup></sup>c", "1st, aij, bc"),
    ],
)
def test_a_fragment_of_a_line_shows_its_text(wikitext, expected):
    assert lines(wikitext) == [expected]


TABLE = '{| class="wikitable"\n! a !! b\n|-\n| c || {{x|\n|}}\n{|\n| d\n|}\n|}'
PROSE = "This is a paragraph of an article, and it has more letters than a cell of a table has."
MARKS = {
    "a heading has letters": ("== ==\ntext", "text"),
    "a heading has more than a space": ("==&nbsp;==\ntext", "text"),
    "a heading is alone in its line": ("a\n== not one == x", "a == not one == x"),
    "a heading has text below": ("== A ==\n=== B ===\n== C & D ==\ntext", "C & D.\ntext"),
    "a break may be written as an end": ("a</br>b<br/>c<BR >d", "a b c d"),
    "letters may be bold within italics": ("''g'''o'''lds'' and '''A''''s", "golds and A's"),
    "a stop follows its word": ("a {{x}}, b&nbsp;{{x}}, c .NET (.5)", "a, b, c .NET (.5)"),
    "full-width brackets are tidied": ("甲（{{x}}）乙（{{x}}，，）丙（；a、{{x}}）。", "甲乙丙（a）。"),
    "a table begins its line": ("a {| b |} c", "a {| b |} c"),
    "names of headers are no tags": ("#a &lt;stdio.h> <stdio.h>", "a <stdio.h> <stdio.h>"),
    "a box may hold empty lines": ("{{Box\n| a = b\n\nc\n| d = e\n}}\nText.", "Text."),
    "a template may hold empty lines": ("{{cite\n\n | a = b\n}} Text.", "Text."),
    "a table may hold empty lines": ("{|\n| a\n\nb\n|-\n| c\n|}\nText.", "Text."),
    "a quotation may hold paragraphs": ("{{quote|a\n\nb|author=c}}", "a\nb"),
    "a template without a rule may, too": ("{{opinion|First.\n\nSecond.}}", "First.\nSecond."),
    "a caption may hold several lines": ("[[File:a.jpg|thumb|a\nb [[c]]]]Text.", "Text."),
    "a comment may hold paragraphs": ("a <!-- b\n\nc\n== d ==\n--> e", "a e"),
    "an element ends before a heading": ("a<pre>\n== B ==\nText.</pre> c", "a\nB.\nText. c"),
    "items are lines, and the lines of a paragraph one": (
        "A paragraph\nin two lines.\n* one [[a|link]]\n** two\n#three\n:; term : definition\n<ul><li>four</li>"
        '<LI class="x">five<br />more</li></ul>\n* {{x}}\n preformatted\n----\nEnd<br>of it',
        "A paragraph in two lines.\none link\ntwo\nthree\nterm : definition\nfour\nfive more\npreformatted\nEnd of it",
    ),
    "a heading ends in a stop": (
        "Lead.\n==Empty==\n\n== ''History'' ==\n=== Why? ===\n{{main|x}}\nText.\n== See also ==\n[[Category:A]]",
        "Lead.\nHistory.\nWhy?\nText.",
    ),
    "a table within a table is dropped": (f"Before.\n{TABLE}\nAfter.\n:{TABLE}\nEnd.", "Before.\nAfter.\nEnd."),
    "a table of HTML is dropped": (
        "Before.\n<table><tr><td>a<table><td>b</table></td></tr></TABLE> After.", "Before.\nAfter."
    ),
    "references, formulas and comments are dropped": (
        'A<ref name="a/b">x <b>y</b> {{cite|a}}</ref> b<ref name=c /><REF>z</REF>, <!-- d\n{{ e --> f<math>x^{2}}'
        "</math>g <nowiki>[[h]] {{i}} ''j''</nowiki> <nowiki/>H<sub>2</sub>O <code>a < b</code>",
        "A b, fg [[h]] {{i}} ''j'' H₂O a < b",
    ),
    "lines of links to categories and files are dropped": (
        "See also [[:Category:Cats]].\n\n:''Voir aussi [[:Catégorie d'aide:Chats]] et [[:Category:B|]]''\n"
        ":''Voir aussi [[:Catégorie d'aide:Chats]] et [[:File:B.jpg]]''\n* [[:Category:Dogs]]\n"
        "* [[:Category:Dogs|Dogs]]\n\nIt is a longer sentence with [[:Category:Cats|cats]]. "
        "And [[:Category:Dogs]] in it.",
        "Voir aussi Catégorie d'aide:Chats et\nDogs\nIt is a longer sentence with cats. And Category:Dogs in it.",
    ),
    "an unclosed table does not pair with a later stray end": (
        "One\n{| class=a\n! b\nx.\n\nTwo [[c]].\n\n* d\n\nFour E|f.\n|}\nFive.", "One\nx.\nTwo c.\nd\nFour E|f.\nFive."
    ),
    "an unclosed element ends where the next of its kind begins": (
        "A<ref>b <i>c</i>. D<ref>{{cite|e}} <i>f</i></ref> g<gallery>\nh<gallery>\ni.jpg\n</gallery>", "Ab c. D g h"
    ),
    "the paragraphs of an apparent table are text": (f"{{|\n|\n\n{PROSE}\n|}}\nText.", f"{PROSE}\nText."),
}  # fmt: skip


@pytest.mark.parametrize(("wikitext", "expected"), MARKS.values(), ids=list(MARKS))
def test_a_mark_is_read_as_mediawiki_reads_it(wikitext, expected):
    assert "\n".join(lines(wikitext)) == expected


def test_a_tag_that_the_author_escaped_is_text_and_no_tag():
    text = "A &amp;lt;ref&amp;gt;b&amp;lt;/ref&amp;gt; &amp;amp;lt;i&amp;amp;gt; c."
    page = f"<page><title>A</title><id>7</id><revision><text>{text}</text></revision></page>"
    body = document(page.encode(), SITE).decode().split("\n\n")[1]
    assert body == "A &lt;ref&gt;b&lt;/ref&gt; &amp;lt;i&amp;gt; c."
    assert clean(body) == "A <ref>b</ref> &lt;i&gt; c."


def test_entities_are_unescaped_once_for_the_xml_and_once_for_the_html():
    text = "Q&amp;amp;A, a &amp;lt; b, x&amp;nbsp;– y, &amp;eacute; &lt;b&gt;c&lt;/b&gt; &quot;d&quot; &amp;amp;lt;"
    head = "<page><title>A &amp; B</title><ns>0</ns><id>7</id>"
    page = f"{head}<revision><id>8</id><text bytes='1'>{text}</text></revision></page>"
    block = document(page.encode(), SITE).decode()
    url = "https://fr.wikipedia.org/wiki?curid=7"
    body = 'Q&amp;A, a &lt; b, x – y, é c "d" &amp;lt;'
    assert block == (
        f'<doc id="7" url="{url}" title="A &amp; B">\nA &amp; B\n\n{body}\n\n</doc>\n\n'
    )
    assert clean(body) == 'Q&A, a < b, x – y, é c "d" &lt;'
    for empty in ("<text bytes='0' />", "<text></text>", ""):
        page = f"<page><title>A</title><id>7</id><revision>{empty}</revision></page>"
        assert document(page.encode(), SITE).endswith(b">\nA\n\n\n\n</doc>\n\n")


BROKEN = ["{{Infobox\n| a = b\n| c = [[d]]\n", "{| class=x\n! a\n| b\n", "[[File:a.jpg|thumb|"]
BROKEN += ["}} ]] |}\n", "<ref>{{cite", "<!-- ", "<gallery>", "'''", "<nowiki>", "<table>"]


@pytest.mark.parametrize("broken", BROKEN)
def test_what_has_no_end_does_not_cost_the_rest_of_the_page(broken):
    text = lines(f"Before it.\n\n{broken}\n\nThe '''rest''' of the [[page|text]].\n* item")
    assert text[0] == "Before it." and text[-1] == "item"
    assert "The rest of the text." in text[-2]


@pytest.mark.parametrize(
    ("begin", "end", "first"),
    [
        ("[[", "]]", "One A|b) x."),
        ("[[File:A.jpg|thumb|", "]]", "One File:A.jpg|thumb|A|b) x."),
        ("{{", "}}", "One b) x."),
        ("{{lang|", "}}", "One A|b) x."),
        ("<ref>", "</ref>", "One A|b) x."),
        ("<ref name=c><i>", "</i></ref>", "One A|b) x."),
        ("<math>", "</math>", "One A|b) x."),
    ],
)
def test_an_unclosed_mark_does_not_pair_with_a_later_stray_one(begin, end, first):
    text = f"One {begin}A|b) x.\n\nTwo [[c]].\n\nThree.\n* d\n\nFour E|f{end} end."
    assert lines(text) == [first, "Two c.", "Three.", "d", "Four E|f end."]


PIECES = [
    "{{", "}}", "[[", "]]", "{{{", "}}}", "{|", "\n{|\n", "\n|}\n", "[[File:a.jpg|", "[[a|", "{{small|", "{{convert|1|",
    "1|to|", "|", "=", "\n= a =", "\n==a", "<ref>", "</ref>", "<ref name=", "<!--", "-->", "<", "<nowiki>", "<table>",
    "</table>", "<li>",
    "'''", "''", "l'''a''", "(", "(,", ",)", ", ", " ,", "[http://", "[//a ", "&", "&amp;", "__A", "\n* ",
    "\n", " ", "a", "é", "1", "-{", "-{a|", "-{{{a}}", "}-", "<x>", "</x>", "<x>a</x", "<a b='", "|-|", "{{lc:", "=>",
]  # fmt: skip


def seconds_of(pages):
    started = time.process_time()
    for page in pages:
        lines(page)
    return time.process_time() - started


@pytest.mark.parametrize("piece", PIECES)
def test_the_time_is_linear_in_the_size_of_any_page(piece):
    text = piece * (100_000 // len(piece))
    pages = (text, f"{{{{small|{text}}}}}", f"[[a|{text}]]", f"{{{{convert|{text}}}}}")
    assert seconds_of(pages) < 2.0  # 0.15 s; what is quadratic takes half a minute


def test_the_time_is_linear_in_the_length_of_what_has_no_end_and_in_the_depth_of_nesting():
    n = 100_000
    pages = ["[http://" + "a" * n, "=" + " " * n + "x", "[[" + " " * n, "[" * n + "a" * n + "]" * n]
    assert seconds_of(pages) < 4.0
    pairs = (("{{small|x ", "}}"), ("[[a|x ", "]]"), ("\n{|\nx", "\n|}\n"), ("{{", "}}"))
    counts = (200_000 // len(begin + end) for begin, end in pairs)
    assert seconds_of(a * n + b * n for n, (a, b) in zip(counts, pairs, strict=True)) < 4.0


def test_no_text_raises():
    rng = random.Random(0)
    for _ in range(3000):
        assert all(line == line.strip() != "" for line in lines("".join(rng.choices(PIECES, k=40))))


@pytest.mark.parametrize("module", [wikitext, wikipedia, templates])
def test_no_group_is_repeated_possessively_which_python_3_11_0_to_3_11_4_misread(module):
    patterns = [value for value in vars(module).values() if isinstance(value, re.Pattern)]
    assert patterns
    for pattern in patterns:
        text = pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode()
        assert not re.search(r"(?<!\\)\)(?:[*+?]|\{[\d,]+\})\+", text), text
