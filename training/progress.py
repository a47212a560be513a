"""Progress of what takes long: how much of it is done, and bars that show it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[..., None]
"""`(what is being done, units done, units in all)` and, optionally, what to show beside."""


def counted(progress: Callable[[int, int], None], total: int) -> Callable[[int], None]:
    """Returns what is told how many more units are done, and tells `progress` how many of all."""
    done = 0

    def advance(units: int) -> None:
        nonlocal done
        done += units
        progress(done, total)

    return advance


@contextmanager
def bars() -> Iterator[Progress]:
    """Shows a bar for each thing that is done; yields what is called with it, how much of it is
    done, how much it is in all, and what to show beside.
    """
    from rich import progress as rich

    with rich.Progress() as shown:
        jobs: dict[str, rich.TaskID] = {}

        def progress(what: str, done: int, total: int, text: str) -> None:
            if what not in jobs:
                jobs[what] = shown.add_task(what)
            words = f"{what} {text}"
            shown.update(jobs[what], completed=done, total=total, description=words)

        yield progress
