"""A summary of the waiting and running requests of a class."""

from typing import NamedTuple

Shares = tuple[float, float]
"""A model's SLO of first tokens and of the others, each over that of its class."""
WHOLE: Shares = (1.0, 1.0)


class QueuedClass(NamedTuple):
    """Waiting and running requests of a class.

    If more requests wait than slots are free (`slots_taken`), first tokens depend on decode steps
    that free slots: a wait longer than the TTFT SLO then means that decode is too slow as well.
    """

    oldest_s: float = 0.0  # age of the oldest request without a first token, in shares of its SLO
    slots_taken: bool = False
    num_queued: int = 0  # without a slot
    num_running: int = 0  # with one
    num_prefilling: int = 0  # of these, without a first token
    shares: Shares = WHOLE  # the least of their models
