"""What waits in a class of requests, and what does not."""

from typing import NamedTuple


class Waiting(NamedTuple):
    """Requests of a class.

    Where more requests wait than slots are free (`slots_taken`), a first token waits for decode
    steps: once it has waited longer than the TTFT SLO, decode is too slow as well.
    """

    oldest_s: float = 0.0  # age of the oldest that waits for its first token
    slots_taken: bool = False
    num_queued: int = 0  # without a slot
    num_running: int = 0  # with one
