"""What commands share: options, and settings from flags."""

from collections.abc import Mapping, Sequence
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
