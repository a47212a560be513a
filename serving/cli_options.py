"""What commands share: overrides and progress bars."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer

AllowUnknownConfig = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY",
        help="Key of config.json that jmoe does not know and that changes nothing; repeatable.",
    ),
]


def overrides(flags: Mapping[str, object], pairs: Sequence[str]) -> dict[str, object]:
    """Settings by dotted key, from flags (None: not given) and `key=value` pairs.

    Raises ValueError for a pair without `=` and for a key that is set twice.
    """
    found = {key: value for key, value in flags.items() if value is not None}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--set {pair} has no value; write --set {pair}=VALUE")
        if key in found:
            raise ValueError(f"{key} is set twice")
        found[key] = value
    return found


@contextmanager
def progress_bar() -> Iterator[Callable[..., None]]:
    """Bars on stderr, one for each kind of work, with the time left.

    Yields what takes `(what, done, total)` and, if there is more to show, a text.

    Where stderr is no terminal, a line at most every second and at each end.
    """
    from rich.console import Console
    from rich.progress import Progress, TaskID, TextColumn

    console = Console(stderr=True)
    tasks: dict[str, TaskID] = {}
    next_line_at = 0.0

    def line(what: str, done: int, total: int, text: str = "") -> None:
        nonlocal next_line_at
        if time.monotonic() >= next_line_at or done == total:
            print(f"{what}: {done} of {total} {text}".rstrip(), file=sys.stderr, flush=True)
            next_line_at = time.monotonic() + 1

    if not console.is_terminal:
        yield line
        return
    columns = (*Progress.get_default_columns(), TextColumn("{task.fields[text]}"))
    with Progress(*columns, console=console, transient=True) as bar:

        def report(what: str, done: int, total: int, text: str = "") -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, text="")
            bar.update(tasks[what], completed=done, total=total, text=text)

        yield report
