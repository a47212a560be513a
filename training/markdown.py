"""Tables in Markdown."""

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]], align: str) -> str:
    """Returns a table; `align` has `l`, left, or `r`, right, for each column, the last one's for
    those behind it.
    """
    sides = align.ljust(len(head), align[-1])
    marks = ("---:" if side == "r" else "---" for side in sides)
    first, *others = (f"| {' | '.join(row)} |" for row in (head, *rows))
    return "\n".join([first, f"|{'|'.join(marks)}|", *others])
