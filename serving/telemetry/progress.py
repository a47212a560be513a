"""Shows progress on stderr: bars on a terminal and in a notebook, lines elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from serving.telemetry import logs

LINE_EVERY_S = 1.0


class ProgressLines:
    """Prints lines, at most every `LINE_EVERY_S` and at each end, with the time taken and left."""

    def __init__(
        self,
        say: Callable[[str], None] = logs.say,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say, self._clock = say, clock
        self._began: dict[str, tuple[float, int]] = {}  # by kind of work: when, and at how much
        self._next_line_at = 0.0

    def __call__(self, what: str, done: int, total: int, text: str = "") -> None:
        """Reports `done` of `total` units of `what`, with a text to show."""
        now = self._clock()
        began_at, began_with = self._began.setdefault(what, (now, done))
        if now < self._next_line_at and done != total:
            return
        self._next_line_at = now + LINE_EVERY_S
        took_s, fresh = now - began_at, done - began_with
        line = f"{what}: {done} of {total} after {took_s:.0f} s"
        if fresh > 0 and done < total:
            line += f", {took_s / fresh * (total - done):.0f} s left"
        self._say(f"{line} {text}".rstrip())


@contextmanager
def progress_bar() -> Iterator[Callable[..., None]]:
    """Shows a bar with the time left for each kind of work; or lines, if stderr is neither a
    terminal nor a notebook's (with ipywidgets), or logs are JSON.

    Yields a function of `(what, done, total)` and, optionally, a text to show.
    """
    from rich.console import Console
    from rich.progress import Progress, TaskID, TextColumn

    console = Console(stderr=True)
    drawn = console.is_jupyter and find_spec("ipywidgets") is not None  # rich draws with it there
    if logs.is_json() or not (console.is_terminal or drawn):
        yield ProgressLines()
        return
    tasks: dict[str, TaskID] = {}
    columns = (*Progress.get_default_columns(), TextColumn("{task.fields[text]}"))
    with Progress(*columns, console=console, transient=True) as bar:

        def report(what: str, done: int, total: int, text: str = "") -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, text="")
            bar.update(tasks[what], completed=done, total=total, text=text)

        yield report
