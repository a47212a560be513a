"""What predictions are made of: kernels, and what each of them loses."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from benchmarks.kernels.cases import Count
from benchmarks.kernels.roofline import assumptions as h200

LAUNCHES = "launches"  # names of losses that several ops have
FILL = "pipeline fill and drain"
LATENCY = "latency"
TAIL = "tail and uneven blocks"
PADDING = "padding to tiles"
REREADS = "rereads"
EPILOGUE = "exposed epilogue"
OUTSIDE = "gather and combine"
OTHER = "work outside the floor"


@dataclass(frozen=True)
class Kernel:
    """One launch, in microseconds: its own floor, and losses by name. Or several small launches.

    `floor_us` is a part of the op's floor: 0 for work that a better op would not have.
    """

    name: str
    floor_us: float
    losses: dict[str, float]
    launches: int = 1

    @property
    def us(self) -> float:
        """Expected time."""
        return self.floor_us + sum(self.losses.values())


@dataclass(frozen=True)
class Prediction:
    """Arithmetic for one case on an H200: nothing in it was measured."""

    count: Count  # what no version of the op can do without
    kernels: Sequence[Kernel]
    note: str = ""

    @property
    def floor_us(self) -> float:
        """Floor by bytes or by products, whichever takes longer."""
        return max(h200.copy_us(self.count.bytes), h200.product_us(self.count.flops))

    @property
    def us(self) -> float:
        """Expected time: kernels one after the other, without gaps between them."""
        return sum(kernel.us for kernel in self.kernels)

    @property
    def share(self) -> float:
        """Share of the floor in the expected time."""
        return self.floor_us / self.us

    @property
    def losses(self) -> dict[str, float]:
        """Microseconds beside the floor by name, largest first; their sum is all of them."""
        found: dict[str, float] = {}
        for kernel in self.kernels:
            for name, us in kernel.losses.items():
                found[name] = found.get(name, 0.0) + us
        # Kernels' own floors, where one is bound by bytes and another by products, or where the
        # op's floor has no part of what a kernel must move.
        found[OTHER] = self.us - self.floor_us - sum(found.values())
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def largest_loss(self) -> str:
        """Name of the loss that takes most."""
        return next(iter(self.losses), "none")

    @property
    def main(self) -> Kernel:
        """The kernel that takes longest."""
        return max(self.kernels, key=lambda kernel: kernel.us)

    def record(self) -> dict[str, Any]:
        """Returns what a case's record keeps."""
        return {
            "by": "arithmetic for an H200",
            "bytes": self.count.bytes,
            "flops": self.count.flops,
            "floor_us": self.floor_us,
            "expected_us": self.us,
            "expected_share": self.share,
            "largest_loss": self.largest_loss,
            "losses_us": self.losses,
            "launches": sum(kernel.launches for kernel in self.kernels),
            "main_kernel": self.main.name,
            "note": self.note,
        }


def losses(
    floor_us: float, steps: Iterable[tuple[str, float]], trips: float = 2.0
) -> dict[str, float]:
    """Returns a kernel's losses from times of ever more complete models, each of which adds its
    own; and those of `fixed`.
    """
    found: dict[str, float] = {}
    before = floor_us
    for name, us in steps:
        found[name] = found.get(name, 0.0) + max(0.0, us - before)
        before = max(before, us)
    return found | fixed(trips)


def fixed(trips: float = 2.0) -> dict[str, float]:
    """Returns losses that every kernel has: a launch, and trips to memory at its start and end that
    nothing hides; by default, the first bytes in and the last results out.
    """
    return {FILL: trips * h200.IDLE_TRIP_US, LAUNCHES: h200.KERNEL_US}


def outside(name: str, num_bytes: float) -> Kernel:
    """Predicts one of XLA's kernels around an op's own, which a better op would not have."""
    return Kernel(name, 0.0, {OUTSIDE: h200.copy_us(num_bytes), LAUNCHES: h200.KERNEL_US})


def small(name: str, launches: int) -> Kernel:
    """Predicts XLA's kernels with next to nothing to move."""
    return Kernel(name, 0.0, {LAUNCHES: launches * h200.KERNEL_US}, launches)


def taken(supports: Callable[..., bool], *args: Any) -> bool:
    """Returns whether a kernel takes arguments of these shapes (`jax.ShapeDtypeStruct`), on no
    device.
    """
    found = []
    jax.eval_shape(lambda *arrays: found.append(supports(*arrays)), *args)
    return found[0]


def by_reference(count: Count) -> Prediction:
    """Returns the floor and one launch: XLA's references have no model here."""
    floor_us = max(h200.copy_us(count.bytes), h200.product_us(count.flops))
    kernel = Kernel("XLA reference", floor_us, {LAUNCHES: h200.KERNEL_US})
    return Prediction(count, [kernel], "no kernel takes these sizes: the floor and one launch")
