"""The templates of wikitext that stand in sentences, and the text that replaces each.

A pattern is the text, with arguments: {1}, {2}, ..., {-1} for the last, {*} for all, {0} for the template's name,
{text} for a named argument, and {2|1} for the first argument that is not empty. Templates without a pattern are
dropped: most are references, boxes and notes.
"""

import json
import re
from collections.abc import Callable, Mapping
from itertools import count, takewhile
from pathlib import Path

from bert_cli.errors import ConfigError
from bert_cli.files import JSONObject, read_json

# Chosen by their frequency in sentences of the dumps of docs/wikipedia.md, with their names on the largest Wikipedias.
# `fr:` and the like mark a name that has another meaning elsewhere.
TEMPLATES: dict[str, str] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)
# The pattern of templates that may hold paragraphs.
QUOTE = TEMPLATES["quote"]
PREFIXES = {"lang-": "{1}", "link-": "{3|1}", "به ": "{1}"}
ARGUMENT = re.compile(r"\{([^{}]+)\}")
NAMED = re.compile(r"\s*([^\s=<>/\[\]]+(?: [^\s=<>/\[\]]+)*)\s*=")
UNITS = {
    "sqmi": "sq mi", "sqft": "sq ft", "km2": "km²", "m2": "m²", "m3": "m³", "C": "°C", "F": "°F", "kn": "knots",
    "USgal": "US gal", "cuft": "cu ft", "foot": "feet", "mile": "miles",
}  # fmt: skip
# Arguments of `convert`: numbers and the words between them, the unit, and 2 in of 6 ft 2 in.
QUANTITY = re.compile(
    r"(?:[^|\d]*\d[^|]*\|(?:to|and|or|by|x|-|–|\+/-|\*)\|)*[^|\d]*\d[^|]*\|[^|\d][^|]*"
    r"(?:\|\d[^|]*\|(?:in|oz|lb|ft|yd)(?=\||$))?"
)
MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
CENTURY = {"s": "siglo", "S": "Siglo", "a": "a. C.", "d": "d. C."}

# Returns the text of a template from its name, its arguments, and its named arguments.
Function = Callable[[str, list[str], Mapping[str, str]], str]
Rules = Mapping[str, str | Function]


def rules_of(language: str, more: Mapping[str, str]) -> Rules:
    """Return the rules for a Wikipedia: the general rules, the rules of its language, and `more`, which override them.

    A parser function has a colon after its name; a name in `more` is that of a template and of a function.
    """
    rules: dict[str, str | Function] = {}
    table: dict[str, str | Function] = {**TEMPLATES, **FUNCTIONS}
    for names, rule in table.items():
        for name in names.split("|"):
            prefix, colon, bare = name.partition(":")
            if not colon:
                rules.setdefault(name, rule)
            elif prefix == language:
                rules[bare] = rule
    for names, rule in PARSER_FUNCTIONS.items():
        rules |= {f"{name}:": rule for name in names.split("|")}
    names_of = {_normal(name).removesuffix(":"): rule for name, rule in more.items()}
    return rules | names_of | {f"{name}:": rule for name, rule in names_of.items()}


def read_rules(path: Path) -> dict[str, str]:
    """Return the patterns of a JSON file by template name. Raises ConfigError for a bad file."""
    remedy = 'write {"name of a template": "text with {1}", ...}'
    rules = read_json(path, JSONObject, ConfigError, remedy)
    for name, rule in rules.items():
        problem = "is not a text"
        if isinstance(rule, str):
            problem = ""
        if not problem and re.search(r"[{}]", ARGUMENT.sub("", rule)):
            problem = "has a brace without its partner"
        if problem:
            raise ConfigError(f"templates ({path}, {name!r}: {rule!r})", problem, remedy)
    return rules


def _normal(name: str) -> str:
    return name.strip().lower().replace("_", " ")


def find_rule(inner: str, rules: Rules) -> tuple[str | Function, str, list[str], bool]:
    """Return the rule of `{{inner}}`, its name, its arguments, and whether it is a parser function.

    An unknown template has an empty text as its rule, and no arguments: splitting them would take time, and most
    templates are unknown. A parser function has a colon before its first argument.
    """
    head, bar, rest = inner.partition("|")
    function, colon, first = head.partition(":")
    # `{{lc:A}}` calls a function; without a colon it is a template of that name.
    called = None
    if colon:
        called = rules.get(f"{_normal(function)}:")
    if called is not None:
        arguments = [first]
        if bar:
            arguments += rest.split("|")
        return called, function, arguments, True
    name = _normal(head)
    rule = rules.get(name)
    if rule is None and name.startswith(tuple(PREFIXES)):
        rule = next(rule for prefix, rule in PREFIXES.items() if name.startswith(prefix))
    arguments = rest.split("|") if rule and rest.strip("|") else []
    return rule or "", head, arguments, False


def fill(rule: str | Function, head: str, arguments: list[str], *, has_names: bool = True) -> str:
    """Return the text of a template from its rule, its name and its arguments, which may have names or numbers.

    As in MediaWiki, numbers count the arguments without a name, and the last one of equal names is taken.
    """
    if isinstance(rule, str) and "{" not in rule:
        return rule
    fields: dict[str, str] = {}
    without_name = 0
    for argument in arguments:
        match = NAMED.match(argument) if has_names else None
        if match:
            fields[match[1]] = argument[match.end() :].strip()
        else:
            without_name += 1
            fields[str(without_name)] = argument.strip()
    values = [fields[name] for name in takewhile(fields.__contains__, map(str, count(1)))]
    if not isinstance(rule, str):
        return rule(head.strip(), values, fields)
    fields |= {"*": "".join(values), "-1": "".join(values[-1:]), "0": head.strip()}

    def text_of(argument: re.Match[str]) -> str:
        return next(filter(None, map(fields.get, argument[1].split("|"))), "")

    return ARGUMENT.sub(text_of, rule)


def _quantity(_: str, values: list[str], __: Mapping[str, str]) -> str:
    match = QUANTITY.match("|".join(values))
    if match:
        words = match[0].split("|")
    else:
        words = values[:1]
    return " ".join(UNITS.get(word, word) for word in words).replace(" - ", "–")


def _as_of(name: str, values: list[str], by_name: Mapping[str, str]) -> str:
    year, month, day = (*values, "", "", "")[:3]
    if month.isdecimal() and 1 <= int(month) <= 12:
        month = MONTHS.split("|")[int(month) - 1]
    if "lc" in by_name:
        name = name.lower()
    else:
        name = name[:1].upper() + name[1:]
    return " ".join(filter(None, (name, day, month, year)))


def _century(_: str, values: list[str], __: Mapping[str, str]) -> str:
    """Return a Spanish century: its number, `a` or `d` for its era, and `s` for the word."""
    number, era, word = (*values, "", "", "")[:3]
    return " ".join(filter(None, (CENTURY.get(word), number, CENTURY.get(era))))


def _value(_: str, values: list[str], by_name: Mapping[str, str]) -> str:
    """Return a number with its power of ten and its unit, each of which may be absent."""
    number = values[0] if values else ""
    power = ""
    if by_name.get("e"):
        power = f"×10<sup>{by_name['e']}</sup>"
    unit = by_name.get("u") or by_name.get("ul") or ""
    # Alone the power is the number: 10³, not ×10³.
    if not number:
        power = power.removeprefix("×")
    return f"{number}{power} {unit}".strip()


def _french_date(_: str, values: list[str], __: Mapping[str, str]) -> str:
    """Return a date of three arguments, 1|mars|2010, or of one, 1 mars 2010, which a subject may follow."""
    has_day = "".join(values[:1]).isdecimal()
    arguments = 3 if has_day else 1
    return " ".join(values[:arguments])


FUNCTIONS: dict[str, Function] = {
    "convert|cvt|chuyển đổi|রূপান্তর|convertir|converter|converti|تحويل": _quantity,
    "as of|tính đến": _as_of,
    "frac|fraction|sfrac|bruch": lambda _, values, __: " ".join(
        [*values[:-2], "/".join(["1", *values][-2:])]
    ),
    "fr:date|fr:date-|date de naissance|date de décès": _french_date,
    "siglo": _century,
    # a power of ten, or the French ending of an ordinal
    "e": lambda name, values, _: f"×10<sup>{values[0]}</sup>" if values else name,
    "val": _value,
}


# The functions of MediaWiki whose text is an argument. The others, as `#if`, `#tag` and `defaultsort`, show none. Those
# that change letters or digits stand in templates; in an article their argument is the text.
PARSER_FUNCTIONS = {
    "formatnum|zahlenformat|форматчисла|bidi|#formatdate|#dateformat|padleft|padright": "{1}",
    "lc|klein|нрег|uc|gross|врег|lcfirst|initial klein|нрегперв|ucfirst|initial gross|врегперв": "{1}",
    "gender|grammar": "{2}",
    "plural": "{-1}",
}
