"""How many slots a family may take: from a share in percent, or from slots or bytes."""

import math
import re

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{unit}i": 1024 ** (at + 1) for at, unit in enumerate("kmgt")}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt]i?)?(b))?", re.IGNORECASE)


def slots_of_share(percent: float, num_models: int, positions: int) -> int:
    """Returns the slots of `num_models` models with `percent` of what sharing can save saved,
    rounded up.

    100 % is one slot a position, 0 % a slot of its own for every expert. Raises ValueError for a
    share outside 0 to 100.
    """
    if not 0 <= percent <= 100:
        raise ValueError(
            f"share is {percent:g} %; it must be from 0 (nothing shared) to 100 (everything)"
        )
    saved = percent / 100 * positions * (num_models - 1)
    return num_models * positions - math.floor(saved + 1e-9)


def slots_of_budget(text: str, num_models: int, positions: int, expert_bytes: int) -> int:
    """Returns the slots that a budget pays for: a number of slots, or bytes such as `12GiB` or
    `800MB`.

    Raises ValueError for a budget that is none, and for one that does not hold one model.
    """
    amount = _AMOUNT.fullmatch(text.strip())
    if amount is None:
        raise ValueError(
            f"budget is {text!r}; give slots of experts, such as {positions}, or bytes with their "
            "unit, such as 12GiB"
        )
    number, unit, is_bytes = float(amount[1]), (amount[2] or "").lower(), amount[3]
    if not is_bytes and not number.is_integer():
        raise ValueError(f"budget is {text!r}; slots are a whole number, and bytes have a unit")
    slots = int(number * _UNITS[unit] // expert_bytes) if is_bytes else int(number)
    if slots < positions:
        raise ValueError(
            f"budget is {text}, {slots:,} slots; one model alone has {positions:,} experts, "
            f"{_size(positions * expert_bytes)}, and no family takes less (all of "
            f"{num_models} models' take {num_models * positions:,} slots, "
            f"{_size(num_models * positions * expert_bytes)})"
        )
    return slots


def _size(num_bytes: int) -> str:
    """Writes a size as a budget is written, rounded up to what is enough."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= 10 * size:
            return f"{-(-num_bytes // size)}{unit}"
    return f"{-(-num_bytes // 1024)}KiB"
