"""What objects show of themselves in a notebook: one line of text, or a small HTML table."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any


def array(value: Any) -> str:
    """Returns the dtype and shape of an array, as `float32[2, 8]`; of anything else, its short
    repr.
    """
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}[{', '.join(map(str, value.shape))}]"
    return cut(repr(value), 40)


def arrays(value: Any) -> str:
    """Returns one line for a NamedTuple of arrays: its fields with their dtypes and shapes, but for
    optional ones that it has not.
    """
    named = [
        (name, one)
        for name, one in zip(value._fields, value, strict=True)
        if one is not None or name not in value._field_defaults
    ]
    return f"{type(value).__name__}({', '.join(f'{name}: {array(one)}' for name, one in named)})"


def cut(text: str, width: int) -> str:
    """Returns the text on one line, and no longer than `width` characters."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 3] + "..."


def count(number: int) -> str:
    """Returns a number in words: 14.3 B, 5.9 M, 1,234."""
    for unit, scale in (("B", 1e9), ("M", 1e6)):
        if number >= scale:
            return f"{number / scale:.1f} {unit}"
    return f"{number:,}"


def size(num_bytes: int) -> str:
    """Returns bytes in words: 3.2 GiB, 18.6 MiB, 1,024 bytes."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes:,} bytes"


def seconds(duration_s: float) -> str:
    """Returns seconds in words: 0.71 ms, or 20.00 us where it is less than a tenth of a
    millisecond.
    """
    return f"{1e3 * duration_s:.2f} ms" if duration_s >= 1e-4 else f"{1e6 * duration_s:.2f} us"


def table(caption: str, rows: Iterable[Sequence[object]], header: Sequence[str] = ()) -> str:
    """Returns an HTML table. Every cell is escaped; without a header the first of each row is its
    name.
    """
    lines = ["<table>", f"<caption>{escape(caption)}</caption>"]
    if header:
        lines.append(_row("th", header))
    for row in rows:
        name = "" if header else f'<th scope="row">{escape(str(row[0]))}</th>'
        lines.append(_row("td", row if header else row[1:], name))
    return "\n".join([*lines, "</table>"])


def _row(tag: str, cells: Sequence[object], start: str = "") -> str:
    style = ' style="text-align: left"'
    return f"<tr>{start}{''.join(f'<{tag}{style}>{escape(str(c))}</{tag}>' for c in cells)}</tr>"
