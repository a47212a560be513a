"""Values of a configuration file, checked as they are read."""

import reprlib
from collections.abc import Mapping
from typing import Any

MOST = 2**31 - 1  # sizes are int32 on the device
_LARGEST = 3.4e38  # of float32


class ConfigError(ValueError):
    """A model configuration that cannot be served; names the file, the key and the value."""


class Fields:
    """The keys of one JSON object. null is an absent key. Every getter raises ConfigError."""

    def __init__(self, values: Mapping[str, Any], file: str, where: str = "") -> None:
        """`where` names the key that the object stands under, where it is a nested one."""
        self.values, self.file, self.where = values, file, where

    def given(self, key: str) -> Any:
        """Returns the value as it stands; None where the key is absent."""
        return self.values.get(key)

    def first(self, *keys: str) -> str:
        """Returns the first of some spellings of a key that is given."""
        for key in keys:
            if self.values.get(key) is not None:
                return key
        within = f" in {self.where}" if self.where else ""
        raise ConfigError(f"{self.file} lacks {' or '.join(keys)}{within}")

    def wrong(self, key: str, wanted: str) -> ConfigError:
        """Returns the error for a value that is not what it must be."""
        found = shown(self.values.get(key))
        return ConfigError(f"{self.file}: {self.name(key)} is {found}; it must be {wanted}")

    def name(self, key: str) -> str:
        """Returns the key with the section it stands in."""
        return f"{self.where}.{key}" if self.where else str(key)

    def size(self, key: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
        """Returns an integer; without a default the key must be there."""
        if self.values.get(key) is None and default is not None:
            return default
        value = self.values[self.first(key)]
        if not _is_int(value) or not least <= value <= most:
            raise self.wrong(key, f"an integer from {least} to {most}")
        return value

    def number(self, key: str, default: float | None = None, above: float = 0.0) -> float:
        """Returns a finite number; without a default the key must be there."""
        if self.values.get(key) is None and default is not None:
            return default
        value = self.values[self.first(key)]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, f"a number above {above:g}")
        if not above < value <= _LARGEST:  # NaN is not either
            raise self.wrong(key, f"a finite number above {above:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Reads true or false."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def section(self, key: str) -> "Fields":
        """Returns a nested object; empty where the key is absent."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(key, "an object or null")
        return Fields(value or {}, self.file, self.name(key))

    def integers(self, key: str) -> tuple[int, ...]:
        """Returns a list of integers; empty where the key is absent."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not all(map(_is_int, value)):
            raise self.wrong(key, "a list of integers")
        return tuple(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Returns a list of finite numbers above 0; the key must be there."""
        value = self.values[self.first(key)]
        if not isinstance(value, list | tuple):
            raise self.wrong(key, "a list of numbers")
        each = Fields(dict(zip(map(str, range(len(value))), value, strict=True)), self.file, key)
        return tuple(each.number(at) for at in each.values)

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Returns a token id, a list of them, or nothing."""
        value = self.values.get(key)
        ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
        if not all(_is_int(token) and 0 <= token < vocab_size for token in ids):
            raise self.wrong(
                key,
                f"a token id from 0 to {vocab_size - 1} (vocab_size - 1), a list of them, or null",
            )
        return tuple(ids)


def shown(value: object) -> str:
    """Returns a value for a message, cut where it is long."""
    short = reprlib.Repr(maxdict=6, maxlist=8, maxstring=60, maxother=60, maxlong=40)
    try:
        return short.repr(value)
    except ValueError:  # an integer of thousands of digits
        return f"a {type(value).__name__} too long to show"


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
