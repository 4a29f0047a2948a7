"""The work of a compiled program: operations, bytes moved and bytes sent, read from the text that XLA prints.

Each instruction reads its operands and writes its results, in the memory of the device; TPUs mark arrays in faster
memories with S(1). A slice reads only its part, an update in place only writes its part. The body of a loop counts as
often as it runs. FLOPs count matrix products, which TPUs write as convolutions.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import NamedTuple

FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "optimization-barrier",
}  # fmt: skip
"""Opcodes of instructions that neither read nor write memory."""
FREE_CALLS = ("AllocateBuffer", "ConcatBitcast")
RENAMING = ("bitcast", "get-tuple-element", "reshape")
SLICES = ("dynamic-slice", "slice", "gather")
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Opcodes that change a part of their first operand, and the number of the operand with the new values."""
# Bytes that each of n devices sends in a ring, relative to the bytes of the operands.
RING = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: float(n - 1),
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1.0,
}


class Array(NamedTuple):
    """An array of a program."""

    dtype: str
    shape: tuple[int, ...]
    layout: str
    """Minor-to-major axes, tiles and memory space, such as 1,0:T(8,128)S(1)."""

    @property
    def bytes(self) -> int:
        """Return the bytes in memory, with the padding of tiles."""
        axes, _, tiles = self.layout.partition(":")
        order = [int(axis) for axis in axes.split(",") if axis]
        sizes = list(self.shape)
        if tile := re.match(r"T\(([\d,]+)\)", tiles):
            for axis, size in zip(order, reversed(tile[1].split(",")), strict=False):
                sizes[axis] = -(-sizes[axis] // int(size)) * int(size)
        bits = 8 if self.dtype == "pred" else int((re.search(r"\d+", self.dtype) or "0")[0])
        return math.prod(sizes) * bits // 8

    @property
    def is_in_memory(self) -> bool:
        """Whether the array is in the device's main memory."""
        return "S(" not in self.layout


@dataclass(frozen=True)
class Instruction:
    """A line of a program."""

    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @cached_property
    def called(self) -> str:
        """Return the name of the computation of a fusion or call."""
        called = re.search(r"(?:calls|to_apply)=%([\w.\-]+)", self.attributes)
        return called[1] if called else ""

    @property
    def bytes(self) -> int:
        """Return the bytes of the results."""
        return sum(array.bytes for array in self.results)


Computation = dict[str, Instruction]


@dataclass
class Work:
    """The work of a program on each device."""

    flops: float = 0.0
    moved: float = 0.0
    seconds: float = 0.0
    """The sum over all instructions of the larger of FLOPs / peak and bytes / bandwidth."""
    seconds_of_products: float = 0.0
    """The part of the seconds that the peak bounds; the bandwidth bounds the rest."""
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds by the part of the model."""
    collectives: dict[str, list[float]] = field(
        default_factory=lambda: defaultdict(lambda: [0.0] * 3)
    )
    """Kind -> number in a step, bytes of the arrays, bytes that each device sends."""


class Program:
    """A compiled program."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, Computation] = {}
        self.entry = ""
        computation: Computation = {}
        for line in text.splitlines():
            if header := re.match(r"(ENTRY )?%([\w.\-]+) \(.*\{$", line):
                computation = self.computations[header[2]] = {}
                self.entry = header[2] if header[1] else self.entry
            elif match := re.match(r"  (ROOT )?%([\w.\-]+) = (.*)", line):
                computation[match[2]] = _instruction(match[2], match[3], bool(match[1]))

    def work(self, peaks: Mapping[str, float], bandwidth: float) -> Work:
        """Return the work; `peaks` are FLOP/s by the dtype of the operands, or `highest` for exact float32.

        A dtype that is not in `peaks` counts as float32.
        """
        work = Work()
        for instruction, computation, times in self._executed(self.entry, 1):
            moved = self._moved(instruction, computation)
            flops = dict(self._flops(instruction, computation))
            seconds = sum(
                number / peaks.get(dtype, peaks["f32"]) for dtype, number in flops.items()
            )
            bound = max(seconds, moved / bandwidth)
            work.flops += times * sum(flops.values())
            work.moved += times * moved
            work.seconds += times * bound
            work.seconds_of_products += times * bound * (seconds >= moved / bandwidth)
            work.parts[_part(instruction)] += times * bound
            kind = instruction.opcode.removesuffix("-start")
            if kind in RING:
                size = sum(computation[name].bytes for name in instruction.operands)
                devices = _group_size(instruction.attributes)
                array = size * devices if kind == "all-gather" else size
                sent = size * RING[kind](devices)
                for number, value in enumerate((1, array, sent)):
                    work.collectives[kind][number] += times * value
        return work

    def _executed(self, name: str, times: int) -> Iterator[tuple[Instruction, Computation, int]]:
        """Yield each instruction that runs, its computation, and how often it runs."""
        computation = self.computations[name]
        for instruction in computation.values():
            if instruction.opcode == "while":
                body = re.search(r"body=%([\w.\-]+)", instruction.attributes)
                assert body is not None
                yield from self._executed(body[1], times * self._trips(instruction))
            elif instruction.opcode in ("call", "async-start"):
                yield from self._executed(instruction.called, times)
            elif instruction.opcode not in FREE:
                yield instruction, computation, times

    def _trips(self, loop: Instruction) -> int:
        """Return how often a loop runs: a scan counts from 0 to a constant in its condition."""
        known = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes)
        if known:
            return int(known[1])
        condition = re.search(r"condition=%([\w.\-]+)", loop.attributes)
        assert condition is not None
        instructions = self.computations[condition[1]].values()
        values = [i.attributes for i in instructions if i.opcode == "constant"]
        return max((int(value) for value in values if value.isdecimal()), default=1)

    # --- bytes

    def _moved(self, instruction: Instruction, computation: Computation) -> int:
        """Return the bytes that an instruction reads from and writes to the memory of the device."""
        opcode = instruction.opcode
        if any(f'"{name}"' in instruction.attributes for name in FREE_CALLS):
            return 0
        read = 0
        if not opcode.endswith("-done"):
            for number, name in enumerate(instruction.operands):
                operand = computation[name]
                if name in instruction.operands[:number] or not operand.results:
                    continue
                size = sum(array.bytes for array in operand.results if array.is_in_memory)
                read += min(size, self._read(instruction, number, operand.bytes))
        written = 0
        if not opcode.endswith("-start"):
            sizes = self._written(instruction, computation)
            pairs = zip(instruction.results, sizes, strict=True)
            written = sum(size for array, size in pairs if array.is_in_memory)
        return read + written

    def _read(self, user: Instruction, number: int, size: int) -> int:
        """Return the bytes that an instruction reads of an operand of this size."""
        if user.opcode == "slice-start":
            return user.results[1].bytes
        if user.opcode in SLICES and number == 0:
            return user.bytes
        if user.opcode in UPDATES and number == 0:
            return 0
        if user.opcode == "fusion":
            inner = self.computations[user.called]
            parameter = next(
                i for i in inner.values() if i.opcode == "parameter" and i.attributes == f"{number}"
            )
            return self._read_inside(inner, parameter.name, size)
        return size

    def _read_inside(self, computation: Computation, name: str, size: int) -> int:
        total = 0
        for user in computation.values():
            for number, operand in enumerate(user.operands):
                if operand == name:
                    is_renamed = user.opcode in RENAMING
                    total += (
                        self._read_inside(computation, user.name, size)
                        if is_renamed
                        else self._read(user, number, size)
                    )
        return min(total, size)

    def _written(self, instruction: Instruction, computation: Computation) -> list[int]:
        """Return the bytes that an instruction writes of each of its results."""
        opcode = instruction.opcode
        if opcode in UPDATES:
            return [computation[instruction.operands[UPDATES[opcode]]].bytes]
        if opcode == "fusion":
            inner = self.computations[instruction.called]
            root = next(i for i in inner.values() if i.is_root)
            return self._written(root, inner)
        if opcode == "tuple":
            parts = [self._written(computation[name], computation) for name in instruction.operands]
            return [size for sizes in parts for size in sizes]
        if opcode == "bitcast":
            return self._written(computation[instruction.operands[0]], computation)
        return [array.bytes for array in instruction.results]

    # --- operations

    def _flops(
        self, instruction: Instruction, computation: Computation
    ) -> Iterator[tuple[str, float]]:
        """Yield (dtype, FLOPs) of an instruction."""
        totals: dict[str, float] = defaultdict(float)
        if instruction.opcode in ("dot", "convolution"):
            first, second = (computation[name].results[0] for name in instruction.operands[:2])
            count = _dot if instruction.opcode == "dot" else _convolution
            is_exact = first.dtype == "f32" and "highest" in instruction.attributes
            dtype = "highest" if is_exact else first.dtype
            totals[dtype] += count(instruction, first.shape, second.shape)
        elif instruction.opcode == "fusion":
            inner = self.computations[instruction.called]
            for nested in inner.values():
                for dtype, number in self._flops(nested, inner):
                    totals[dtype] += number
        yield from totals.items()


def _instruction(name: str, text: str, is_root: bool) -> Instruction:
    """Read `SHAPE opcode(operands), attributes`."""
    end = _closing(text) + 1 if text.startswith("(") else text.index(" ")
    results = tuple(
        Array(dtype, tuple(int(size) for size in shape.split(",") if size), layout)
        for dtype, shape, layout in re.findall(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?", text[:end])
    )
    rest = text[end:].lstrip()
    opcode = rest[: rest.index("(")]
    start = len(opcode)
    stop = start + _closing(rest[start:])
    inside = rest[start + 1 : stop]
    # The brackets of a constant hold its value, and the brackets of a parameter its number.
    if opcode in ("constant", "parameter"):
        return Instruction(name, opcode, results, (), inside, is_root)
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    return Instruction(name, opcode, results, operands, rest[stop + 1 :], is_root)


def _closing(text: str) -> int:
    """Return the index of the bracket that closes the first one."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return index
    raise ValueError(text)


def _numbers(pattern: str, text: str) -> list[int]:
    match = re.search(pattern, text)
    return [int(number) for number in re.findall(r"\d+", match[1])] if match else []


def _dot(instruction: Instruction, first: Sequence[int], second: Sequence[int]) -> float:
    axes = _numbers(r"lhs_contracting_dims=\{([^}]*)\}", instruction.attributes)
    return 2.0 * math.prod(instruction.results[0].shape) * math.prod(first[axis] for axis in axes)


def _convolution(instruction: Instruction, first: Sequence[int], second: Sequence[int]) -> float:
    """Return the FLOPs of a convolution: products with padding and with the gaps of a dilated input do not count."""
    attributes = instruction.attributes
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", attributes)
    assert labels is not None
    window = re.search(r"window=\{([^}]*)\}", attributes)
    options = dict(re.findall(r"(\w+)=(\S+)", window[1] if window else ""))
    spatial = sorted(set(labels[1]) - {"b", "f"})
    result = dict(zip(labels[3], instruction.results[0].shape, strict=True))
    inputs = dict(zip(labels[1], first, strict=True))
    kernel = dict(zip(labels[2], second, strict=True))
    total = 2.0 * result["b"] * result["f"] * kernel["i"]
    for number, axis in enumerate(spatial):

        def option(name: str, default: str, number: int = number) -> list[int]:
            values = options.get(name, "x".join([default] * len(spatial))).split("x")
            return [int(value) for value in re.findall(r"-?\d+", values[number])]

        (stride,) = option("stride", "1")
        low = option("pad", "0_0")[0]
        (dilation,) = option("lhs_dilate", "1")
        (spread,) = option("rhs_dilate", "1")
        last = (inputs[axis] - 1) * dilation
        positions = (
            output * stride - low + tap * spread
            for output, tap in product(range(result[axis]), range(kernel[axis]))
        )
        total *= sum(0 <= position <= last and position % dilation == 0 for position in positions)
    return total


def _group_size(attributes: str) -> int:
    """Return the number of devices of each group of a collective."""
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", attributes):
        return int(iota[2])
    group = re.search(r"replica_groups=\{\{([\d,]*)\}", attributes)
    return len(group[1].split(",")) if group else 2


def _part(instruction: Instruction) -> str:
    """Return the part of the model that an instruction computes: its layers' names without numbers."""
    name = re.search(r'op_name="([^"]*)"', instruction.attributes)
    if name is None:
        return instruction.opcode.removesuffix("-start").removesuffix("-done")
    words = re.findall(r"[\w.]+(?=[/)]|$)", name[1].replace("jit(_compute)", ""))
    unnumbered = [re.sub(r"_\d+$", "", word) for word in words]
    skipped = {"while", "body", "closed_call", "checkpoint", "rematted_computation", "jit", "vmap"}
    return "/".join(word for word in unnumbered if word not in skipped)
