"""Faults of a line that a person may make: found in the syntax tree, put in as text.

A fault changes what a user sees, as far as its form shows: texts, types, logs, checks of types and constants of
performance stay as they are. A survivor may still be equivalent; a person judges that.
"""

import ast
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

KINDS = (
    *("boundary", "half", "sign", "axis", "swallowed error", "stale key", "missing rename"),
    *("wrong default", "ignored flag", "swapped argument", "off by one"),
)
SILENT_CALLS = re.compile(
    r"(log|logger|logging|warnings|tell|report|print\w*|say|describe\w*|cast|TypeVar|field_validator|getLogger|"
    r"ConfigError|DataError|CheckpointError|DeviceError|namedtuple|debug|info|warning)$"
)
SILENT_WORDS = re.compile(
    r"(timeout|workers|threads|daemon|encoding|strict|stacklevel|indent|maxsize|cache|buffer|chunk|poll|seconds|retr|"
    r"delay|interval|prefetch|parallel_calls|errors|jit|newline|help|message|MEGA|KIB|MIB|flush|progress|bar|prefix|"
    r"batch_bytes|bytes_at|at_once|max_tries|name$|donate|copy$|mode$|refresh)",
    re.IGNORECASE,
)
"""Names whose values change texts or performance, not results."""
KEYED = re.compile(
    r"(digest|key|hash|crc|fingerprint|mark|origin|cached|recorded|stamp|manifest|state|fixed)",
    re.IGNORECASE,
)
PAIRS = (
    "train test, train validation, train held_out, train dev, before after, first second, left right, source target, "
    "start end, inputs outputs, query document, low high, start stop, old new, words ids, begin end, mean std, "
    "loss accuracy, rows columns, width height, student teacher, count total"
)
PAIRED = re.compile(PAIRS.replace(", ", "|").replace(" ", "|"))
WORDS = [order for pair in PAIRS.split(", ") for order in (pair.split(), pair.split()[::-1])]
SWAPS: dict[type[ast.AST], str] = {
    **{ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"},
    **{
        ast.Eq: "!=",
        ast.NotEq: "==",
        ast.Is: "is not",
        ast.IsNot: "is",
        ast.In: "not in",
        ast.NotIn: "in",
    },
    **{ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.And: "or", ast.Or: "and"},
}


class Fault(NamedTuple):
    """A change of a file: `old`, from `line` to `last`, becomes `new`."""

    kind: str
    file: str
    line: int
    last: int
    old: str
    new: str
    function: tuple[int, int]
    """First and last line of the function that has the fault, or of the file if it is in none."""

    @property
    def area(self) -> str:
        """The folder, as `data/io`."""
        return "/".join(Path(self.file).parts[1:3])


class Source:
    """A file and what its syntax tree says about its nodes."""

    def __init__(self, file: str, text: str) -> None:
        self.file, self.text = file, text
        self.lines = text.encode().splitlines(keepends=True)
        self.tree = ast.parse(text)
        self.names: dict[ast.AST, set[str]] = {}
        self.parents = {
            child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)
        }

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around a node, the nearest first."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def segment(self, node: ast.AST) -> str:
        """Return the text of a node."""
        first, last = node.lineno, node.end_lineno  # type: ignore[attr-defined]
        lines = [*self.lines[first - 1 : last]]
        lines[-1] = lines[-1][: node.end_col_offset]  # type: ignore[attr-defined]
        lines[0] = lines[0][node.col_offset :]  # type: ignore[attr-defined]
        return b"".join(lines).decode()

    def is_silent(self, node: ast.AST) -> bool:
        """Return whether a change of the node cannot be seen, or only in a text."""
        child = node
        for above in self.above(node):
            parts = vars(above)
            match above:
                case ast.JoinedStr() | ast.Assert() | ast.Raise():
                    return True
                case ast.Call(func=func) if SILENT_CALLS.search(self.segment(func)):
                    return True
                case ast.keyword(arg=str(name)) if SILENT_WORDS.search(name):
                    return True
                case ast.Assign(targets=[target]) if SILENT_WORDS.search(self.segment(target)):
                    return True
                case ast.AnnAssign(target=target) if SILENT_WORDS.search(self.segment(target)):
                    return True
                case ast.FunctionDef(name="__repr__" | "__str__" | "__format__"):
                    return True
                case ast.If(test=test) if "TYPE_CHECKING" in self.segment(test):
                    return True
            if child in (parts.get("annotation"), parts.get("returns")):
                return True
            if child in parts.get("decorator_list", ()):
                return True
            child = above
        return False

    def is_keyed(self, node: ast.AST) -> bool:
        """Return whether a name around a display says that it identifies something."""
        for above in self.above(node):
            if isinstance(above, ast.FunctionDef):
                return bool(KEYED.search(above.name))
            if isinstance(above, ast.Call | ast.Assign) and KEYED.search(self.segment(above)[:60]):
                return True
        return False

    def names_of(self, node: ast.AST) -> set[str]:
        """Return the names in the function around a node."""
        for above in self.above(node):
            if isinstance(above, ast.FunctionDef):
                if above not in self.names:
                    parts = [*ast.walk(above)]
                    names = {part.id for part in parts if isinstance(part, ast.Name)}
                    self.names[above] = names | {
                        part.arg for part in parts if isinstance(part, ast.arg)
                    }
                return self.names[above]
        return set()

    def function(self, node: ast.AST) -> tuple[int, int]:
        """Return the first and the last line of the function around a node."""
        for above in self.above(node):
            if isinstance(above, ast.FunctionDef):
                return above.lineno, above.end_lineno or above.lineno
        return 1, len(self.lines)

    def fault(self, kind: str, node: ast.AST, new: str) -> Fault | None:
        """Return the fault that puts a text in for a node; None if no one could see it."""
        if self.is_silent(node):
            return None
        first, last = node.lineno, node.end_lineno  # type: ignore[attr-defined]
        start = self.lines[first - 1][: node.col_offset]  # type: ignore[attr-defined]
        end = self.lines[last - 1][node.end_col_offset :]  # type: ignore[attr-defined]
        changed = start + new.encode() + end
        try:
            after = ast.parse(b"".join([*self.lines[: first - 1], changed, *self.lines[last:]]))
        except SyntaxError:
            return None
        if ast.dump(after) == ast.dump(self.tree):
            return None
        old = b"".join(self.lines[first - 1 : last]).decode()
        return Fault(kind, self.file, first, last, old, changed.decode(), self.function(node))


def changes(
    source: Source, node: ast.AST, defaults: dict[str, set[str]]
) -> Iterator[tuple[str, ast.AST, str]]:
    """Yield kind, node and its new text for what can go wrong at a node."""
    text = source.segment
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in SWAPS:
            kind = "boundary" if isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE) else "half"
            yield kind, node, f"{text(left)} {SWAPS[type(op)]} {text(right)}"
        case ast.Call(func=ast.Name(id="range"), args=[*_, end]):
            yield "boundary", end, f"{text(end)} - 1"
        case ast.Slice(lower=lower, upper=upper):
            yield from (("boundary", end, f"{text(end)} + 1") for end in (upper, lower) if end)
        case ast.Subscript(slice=ast.Constant(value=0)):
            yield "boundary", node.slice, "-1"
        case ast.Subscript(slice=ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=1))):
            yield "boundary", node.slice, "0"
        case ast.BoolOp(op=op, values=values):
            yield "half", node, f"({f' {SWAPS[type(op)]} '.join(map(text, values))})"
            kept = f" {SWAPS[type(op)]} ".join(map(text, values[:-1]))
            yield "half", node, f"({kept})"
        case ast.If(test=test) | ast.While(test=test) if not isinstance(test, ast.Compare):
            yield "half", test, f"not ({text(test)})"
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield "half", node, f"{text(orelse)} if {text(test)} else {text(body)}"
        case ast.Name(id=name, ctx=ast.Load()) if PAIRED.search(name):
            for word, other in WORDS:
                swapped = re.sub(rf"(?<![a-z]){word}(?![a-z])", other, name)
                if swapped != name and swapped in source.names_of(node):
                    yield "half", node, swapped
        case ast.BinOp(left=left, op=op, right=right) if type(op) in SWAPS:
            yield "sign", node, f"({text(left)} {SWAPS[type(op)]} {text(right)})"
        case ast.UnaryOp(op=ast.USub(), operand=ast.Name() | ast.Attribute() | ast.Call()):
            yield "sign", node, text(node.operand)
        case ast.keyword(arg="axis" | "dim", value=ast.Constant(value=int(axis)) as value):
            yield "axis", value, "0" if axis else "1"
        case ast.keyword(arg="axis" | "dim", value=ast.UnaryOp() as value):
            yield "axis", value, "0"
        case ast.Attribute(value=value, attr="T" | "mT"):
            yield "axis", node, text(value)
        case ast.Tuple(elts=[first, second]) if {":", "None"} == {text(first), text(second)}:
            yield "axis", node, f"{text(second)}, {text(first)}"
        case ast.Raise():
            yield "swallowed error", node, "pass"
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            yield "off by one", node, str(number + 1)
        case ast.Expr(value=ast.Call(func=func)) if not SILENT_CALLS.search(text(func)):
            yield "missing rename", node, "pass"
    yield from changes_of_parts(source, node, defaults)


def changes_of_parts(
    source: Source, node: ast.AST, defaults: dict[str, set[str]]
) -> Iterator[tuple[str, ast.AST, str]]:
    """Yield what can go wrong by a part that is left out, exchanged or another one."""
    text = source.segment
    values: list[ast.expr | None] = []
    match node:
        case ast.Dict():
            yield from (("stale key", node, left) for left in shorter_displays(source, node))
        case ast.Tuple(ctx=ast.Load()) | ast.List(ctx=ast.Load()) if source.is_keyed(node):
            yield from (("stale key", node, left) for left in shorter_displays(source, node))
        case ast.FunctionDef(args=arguments):
            values += (*arguments.defaults, *arguments.kw_defaults)
        case ast.AnnAssign(value=value) if isinstance(source.parents[node], ast.ClassDef):
            values.append(value)
        case ast.Call(func=func, args=arguments, keywords=keywords):
            name = text(func).split(".")[-1]
            if name in ("get", "getattr", "pop") and len(arguments) > 1:
                values.append(arguments[-1])
            parts = [text(part) for part in (*arguments, *keywords)]
            for index, keyword in enumerate(keywords, start=len(arguments)):
                optional = defaults.get(name, {keyword.arg})
                if keyword.arg in optional and not SILENT_WORDS.search(keyword.arg or "."):
                    left = [*parts[:index], *parts[index + 1 :]]
                    yield "ignored flag", node, f"{text(func)}({', '.join(left)})"
            for index, pair in enumerate(pairwise(arguments)):
                if all(isinstance(argument, ast.Name | ast.Attribute) for argument in pair):
                    swapped = [*parts[:index], parts[index + 1], parts[index], *parts[index + 2 :]]
                    yield "swapped argument", node, f"{text(func)}({', '.join(swapped)})"
    for value in values:
        if isinstance(value, ast.Constant) and isinstance(value.value, bool | int | float):
            wrong = not value.value if isinstance(value.value, bool) else value.value + 1
            yield "wrong default", value, str(wrong)


def shorter_displays(source: Source, node: ast.Dict | ast.Tuple | ast.List) -> Iterator[str]:
    """Yield the text of a display without each of its entries."""
    text = source.segment
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        entries = [
            f"{text(key)}: {text(value)}" if key else f"**{text(value)}" for key, value in pairs
        ]
        begin, end = "{", "}"
    else:
        entries = [text(entry) for entry in node.elts]
        begin, end = ("[", "]") if isinstance(node, ast.List) else ("(", ",)")
    for index in range(len(entries) if len(entries) > 1 else 0):
        yield f"{begin}{', '.join((*entries[:index], *entries[index + 1 :]))}{end}"


def defaults_of(sources: list[Source]) -> dict[str, set[str]]:
    """Return function -> its parameters that have a default; a class has its fields."""
    optional: dict[str, set[str]] = defaultdict(set)
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef):
                name = source.parents[node].name if node.name == "__init__" else node.name  # type: ignore[attr-defined]
                optional[name] |= {
                    arg.arg
                    for arg, default in zip(
                        node.args.kwonlyargs, node.args.kw_defaults, strict=True
                    )
                    if default
                }
                count = len(node.args.defaults)
                optional[name] |= {arg.arg for arg in node.args.args[-count:]} if count else set()
            elif isinstance(node, ast.ClassDef):
                fields = (
                    part for part in node.body if isinstance(part, ast.AnnAssign) and part.value
                )
                optional[node.name] |= {ast.unparse(field.target) for field in fields}
    return optional


def sample(root: Path, folders: list[str], seed: int, count: int) -> list[Fault]:
    """Return faults: each kind equally often as far as there are some, chosen by the seed."""
    everything = [
        Source(str(path.relative_to(root)), path.read_text("utf-8"))
        for path in sorted((root / "bert_cli").rglob("*.py"))
    ]
    defaults = defaults_of(everything)
    made: dict[str, list[tuple[Source, ast.AST, str]]] = {kind: [] for kind in KINDS}
    for source in everything:
        if any(source.file.startswith(f"bert_cli/{folder}") for folder in folders):
            for node in ast.walk(source.tree):
                for kind, changed, new in changes(source, node, defaults):
                    made[kind].append((source, changed, new))
    chance = random.Random(seed)
    for candidates in made.values():
        chance.shuffle(candidates)
    faults: list[Fault] = []
    while len(faults) < count and any(made.values()):
        for kind, candidates in made.items():
            while candidates and len(faults) < count:
                source, changed, new = candidates.pop()
                fault = source.fault(kind, changed, new)
                if fault is not None:
                    faults.append(fault)
                    break
    return faults
