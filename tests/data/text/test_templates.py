"""The templates that stand in sentences, on the largest Wikipedias and by a file of one's own."""

import json
from collections import Counter

import pytest

from bert_cli.data.text import templates
from bert_cli.data.text.wikitext import site_of, to_lines
from bert_cli.errors import ConfigError


def text(language, wikitext, **more):
    header = f"<base>https://{language}.wikipedia.org/wiki/A</base>"
    return to_lines(wikitext, site_of(header.encode(), more))


@pytest.mark.parametrize(
    ("language", "wikitext", "expected"),
    [
        ("ja", "これは{{仮リンク|木|en|Wood}}と{{仮リンク|a|en|b|label=党}}です。", "これは木と党です。"),
        ("ja", "{{読み仮名|東京|とうきょう}}は{{要出典範囲|大きい|date=2020}}。", "東京（とうきょう）は大きい。"),
        ("bn", "এটি {{রূপান্তর|5|km|mi}} দূরে। {{উক্তি|ক}}", "এটি 5 km দূরে। ক"),
        ("uk", "Про {{нп|Марк Твен|Марка Твена|en|Mark Twain}} і {{iw|Ліс||en|Wood}}.", "Про Марка Твена і Ліс."),
        ("uk", "{{Не перекладено|треба=Ліс|є=Wood}} {{Цитата|Так.|автор=А}}", "Ліс Так."),
        ("ru", "{{Не переведено 5|Лес|лесу|en|Wood}} {{s|5 км}} {{lang-en2|wood}}", "лесу 5 км wood"),
        ("el", "{{Απόσπασμα|Ένα κείμενο.}}", "Ένα κείμενο."),
        ("fr", "au {{s-|XIX|e}}, {{unité|5|km|2}}, {{e|24}}, 2{{e}}", "au XIXe siècle, 5 km², ×10²⁴, 2e"),
        ("fr", "{{lien|langue=en|trad=Wood|fr=Bois|texte=bois}} le {{date-|1 mars 2010}}", "bois le 1 mars 2010"),
        ("fr", "{{date|1|mars|2010|en musique}} {{citation|Oui}}", "1 mars 2010 « Oui »"),
        ("es", "en el {{siglo|XV||s}} y el {{Siglo|V|a|s}}", "en el siglo XV y el siglo V a. C."),
        ("es", "{{cita|Un texto.}} {{unidad|5|km}} {{convertir|5|km|mi}}", "Un texto. 5 km 5 km"),
        ("de", "{{Zitat|Ein Text.}} {{enS|wood}} {{Höhe|1234|DE-NHN|link=1}}", "Ein Text. wood 1234 m"),
        ("it", "{{citazione|Un testo.}} {{M|5|k|m}} {{M|7|ul=kg}}", "Un testo. 5 km 7 kg"),
        ("pt", "{{citação|Um texto.}} {{séc|XX}} {{fmtn|5|km}}", "Um texto. século XX 5 km"),
        ("pl", "{{cytat|Tekst.|autor}} {{link-interwiki|Las|tekst=lasu|Q=Q1}}", "Tekst. lasu"),
        ("zh", "{{le|木|Wood}}{{tsl|en|Wood|木|林}}{{link-en|木|Wood}}", "木林木"),
        ("zh", "{{bd|1879年|3月|1955年|4月}}{{僻字|木|木}}", "（1879年3月－1955年4月）木"),
        ("fa", "{{نقل قول|متن}} {{به انگلیسی|Wood}}", "متن Wood"),
        ("ar", "{{اقتباس|نص}} {{إنج|Wood}} {{تحويل|5|km|mi}}", "نص Wood 5 km"),
        ("nl", "{{Citaat|Een tekst.}}", "Een tekst."),
        ("sv", "{{Citat|En text.}}", "En text."),
        ("cs", "{{Citát|Text.|A}} {{cizojazyčně|en|wood}} {{vjazyce2|en|tree}}", "Text. wood tree"),
        ("ko", "{{인용문|글}} {{llang|en|wood}}", "글 wood"),
        ("ca", "{{cita|Un text.}} al {{segle|XX}}", "Un text. al segle XX"),
        ("vi", "{{liên kết ngôn ngữ|Rừng|en|Wood}} {{chuyển đổi|5|km|mi}}", "Rừng 5 km"),
        ("hi", "{{convert|5|km|mi}} {{lang|en|wood}} {{chem|H|2|O}}", "5 km wood H2O"),
        # A parser function shows its argument.
        ("en", "{{formatnum:468}} {{formatnum:1,234|R}} {{FORMATNUM: 5 }}", "468 1,234 5"),
        ("en", "{{lc:GRANDE}} {{uc:ab|x}} {{ucfirst:belle}} {{lcfirst:ABC}} {{uc:a&amp;b}}", "GRANDE ab belle ABC a&b"),
        ("en", "{{padleft:7|3}} {{padleft:7|3|xy}} {{padright:ab|4|.}} {{padleft:7}}", "7 7 ab 7"),
        ("en", "{{lc:a=b}} {{lc:{{uc:x}}|1=y}}", "a=b x"),
        ("en", "{{plural:2|page|pages}} {{grammar:genitive|word}} {{plural:1}}", "pages word 1"),
        ("en", "{{#if:a|b}}{{DEFAULTSORT:x}}{{#tag:ref|b}}{{lc:}}{{lc}}{{Wikipedia:Page}}", ""),
        # A number names an argument, and those without a name are counted from 1.
        ("en", "{{lang|fr|2=chat}}", "chat"),
        ("en", "{{lang|2=chat|fr}}", "chat"),
        ("en", "{{lang|2=chat|1=fr}}", "chat"),
        ("en", "{{lang|fr|2=chat|chien}}", "chien"),
        ("en", "{{lang|1=fr|chien|chat}}", "chat"),
        ("en", "{{lang|fr|3=x|chat}}", "chat"),
        ("en", "{{lang|fr|foo=x|chat}}", "chat"),
        ("en", "{{lang|2=a = b|fr}}", "a = b"),
        ("en", "{{chem|C|2=5|3=H}} {{convert|2=mi|1=7}}", "C5H 7 mi"),
    ],
)  # fmt: skip
def test_templates_of_the_largest_wikipedias_are_filled(language, wikitext, expected):
    assert text(language, f"A {wikitext} b.") == [f"A {expected} b.".replace("  ", " ")]


def test_units_are_written_as_they_are_read():
    units = "sqmi sqft km2 m2 m3 C F kn USgal cuft foot mile kg"
    read = "sq mi, sq ft, km², m², m³, °C, °F, knots, US gal, cu ft, feet, miles, kg"
    for unit, word in zip(units.split(), read.split(", "), strict=True):
        assert text("en", f"A {{{{convert|5|{unit}|x}}}} b.") == [f"A 5 {word} b."]


def test_a_file_of_templates_overrides_every_kind_of_rule():
    """The last dictionary has the names of a rule, a rule of one language, a prefix, functions, and nothing."""
    more = {"No wrap": "N{1}", "s": "S{1}", "lang-de": "L{1}", "convert": "C{2}"}
    more |= {"formatnum": "F{1}", "lc:": "l{1}{2}", "#if": "{2}", "small": "", "PAGENAME": "P"}
    wikitext = "{{no_Wrap|a}} {{s|b}} {{lang-de|c}} {{convert|1|d}} {{formatnum:1}} {{lc:X|y}} "
    wikitext += "{{#if:x|e}} {{small|f}}{{PAGENAME}} {{uc:g}}"
    assert text("fr", wikitext, **more) == ["Na Sb Lc Cd F1 lXy e P g"]


def test_a_name_of_one_wikipedia_has_its_own_meaning_elsewhere():
    assert text("en", "In {{citation|title=A}} {{s|XIX|e}} it.") == ["In it."]
    functions = [name for names in templates.FUNCTIONS for name in names.split("|")]
    names = [*templates.TEMPLATES, *functions]
    assert [name for name, count in Counter(names).items() if count > 1] == []
    assert all(name == name.lower().replace("_", " ") for name in names)


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ("{1} of {2}", None),
        ("", None),
        (["{1}"], "is not a text"),
        ("{1} {", "has a brace without its partner"),
        ("{1} }", "has a brace without its partner"),
    ],
)
def test_a_rule_of_a_file_is_a_text_in_which_braces_are_in_pairs(rule, problem, tmp_path):
    path = tmp_path / "rules.json"
    path.write_text(json.dumps({"right": "{1}", "mine": rule}))
    if problem is None:
        assert templates.read_rules(path) == {"right": "{1}", "mine": rule}
        return
    with pytest.raises(
        ConfigError, match=rf"templates \(.*rules.json, 'mine': .*\): {problem}; wr"
    ):
        templates.read_rules(path)
