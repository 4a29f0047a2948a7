"""Numbers as text, in messages and tables: counts with their noun, bytes, and durations."""

from collections.abc import Mapping


def count(number: int, what: str) -> str:
    """Return a number with its noun: 1 device, 2 devices, 1,000 micro-batches."""
    plural = "s"
    if number == 1:
        plural = ""
    elif what.endswith(("ch", "ss")):
        plural = "es"
    return f"{number:,} {what}{plural}"


def remarks_of(remarks: Mapping[str, int]) -> str:
    """Return remarks and their numbers as the end of a line: "; 3 rows with an empty text"."""
    return "".join(f"; {remark_of(number, remark)}" for remark, number in remarks.items())


def remark_of(number: int, remark: str) -> str:
    """Return a remark with its number: "row{s} with an empty text" as 3 rows with an empty text."""
    noun, _, rest = remark.partition("{s}")
    return count(number, noun) + rest


def format_bytes(number: float) -> str:
    """Return a number of bytes as text, in powers of ten: 950 bytes, 12.0 kB, 3.4 MB."""
    text = f"{number:.0f} bytes"
    for size, unit in ((1e3, "kB"), (1e6, "MB"), (1e9, "GB"), (1e12, "TB")):
        if float(text.split()[0]) < 1000:
            break
        text = f"{number / size:.1f} {unit}"
    return text


def format_duration(seconds: float) -> str:
    """Return seconds as text: 78 us, 456 ms, 3.46 s, 42.1 s, 3 min 20 s, 5 h 02 min, 3 d 4 h."""
    for size, unit in ((1e6, "us"), (1e3, "ms")):
        text = f"{size * seconds:.3g}"
        if 0 < float(text) < 1000:
            return f"{text} {unit}"
    rounded = round(seconds)
    if rounded < 60:
        return f"{seconds:.3g} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60:02d} s"
    if rounded < 86400:
        return f"{rounded // 3600} h {rounded % 3600 // 60:02d} min"
    return f"{rounded // 86400} d {rounded % 86400 // 3600} h"
