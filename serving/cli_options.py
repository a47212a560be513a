"""What commands share: overrides and progress bars."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager


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
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Bars on stderr, one for each kind of work; yields what takes `(what, done, total)`."""
    from rich.console import Console
    from rich.progress import Progress, TaskID

    with Progress(console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what)
            bar.update(tasks[what], completed=done, total=total)

        yield report
