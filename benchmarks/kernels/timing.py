"""Rulers: what a call costs on the device, and the ceilings that it is held against.

Two rulers, and both go into a record:

- `us`, by CUPTI: the durations of the kernels of one call, summed, as `jax.profiler` reads them.
  The device's own clock; gaps between kernels, and what the host does, are not in it.
- `span_us`, by difference: the time of 3n calls in a row less that of n, over 2n. It holds gaps
  and, where the device is faster than the host, the host: an upper bound. For JAX by the host's
  clock around asynchronous calls; for PyTorch by CUDA events around replays of a CUDA graph.

Where CUPTI cannot be had, or disagrees with the difference on a long product, `us` is the
difference, and the record's `method` says so.

A call reads another input set than the call before, and the sets are together larger than L2.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

MIN_ROUNDS, MAX_ROUNDS = 5, 40


class Timing(NamedTuple):
    """Microseconds of a call. A sample is the mean over one round of all input sets."""

    us: float  # median over rounds
    us_min: float
    us_max: float
    rounds: int
    sets: int
    method: str  # "cupti", or "difference"
    launches: int | None  # kernels a call, known with CUPTI
    kernels: list[tuple[str, float]] | None  # of one call: name, median us
    span_us: float


class Program(Protocol):
    """Something that can be run on input set `i`, asynchronously."""

    num_sets: int
    judged: bool  # whether a call returns what the op returns

    def __call__(self, i: int) -> Any:
        """Starts one call; wraps around after the last set."""

    def wait(self, out: Any) -> None:
        """Blocks until a call's results are there, and with them all calls before it."""

    def span_us(self, calls: int) -> float:
        """Returns microseconds a call, by difference."""
        ...


class JaxProgram:
    """A function of arrays, compiled once for the shapes of the first set."""

    judged = True

    def __init__(
        self,
        call: Callable[..., Any],
        sets: Sequence[tuple[Any, ...]],
        carry: Any = None,
    ) -> None:
        """`carry`, where given, is the first argument, donated, and what the call returns."""
        self.sets, self.num_sets, self.carry = sets, len(sets), carry
        jitted = jax.jit(call, donate_argnums=() if carry is None else 0)
        lowered = jitted.lower(*self._args(0))
        self.has_mosaic = "mosaic_gpu" in lowered.as_text()
        self._compiled = lowered.compile()
        shapes = jax.tree.leaves(lowered.out_info)
        self.result_bytes = [math.prod(x.shape) * x.dtype.itemsize for x in shapes]
        memory = self._compiled.memory_analysis()
        self.temp_bytes = memory.temp_size_in_bytes if memory else 0
        self.result_bytes += [self.temp_bytes] * (self.temp_bytes > 0)

    def _args(self, i: int) -> tuple[Any, ...]:
        args = self.sets[i % self.num_sets]
        return args if self.carry is None else (self.carry, *args)

    def __call__(self, i: int) -> Any:
        """See Program."""
        out = self._compiled(*self._args(i))
        if self.carry is not None:
            self.carry = out
        return out

    def wait(self, out: Any) -> None:
        """See Program."""
        jax.block_until_ready(out)

    def span_us(self, calls: int) -> float:
        """See Program."""
        times = []
        for n in (calls, 3 * calls):
            start = time.perf_counter()
            for i in range(n):
                out = self(i)
            self.wait(out)
            times.append(time.perf_counter() - start)
        return difference(times[0], times[1], calls)


def difference(short_s: float, long_s: float, calls: int) -> float:
    """Returns microseconds a call, from the time of `calls` and of three times as many.

    Calls so short that noise swallows the difference get the mean of the long run: too much.
    """
    spent_s = (long_s - short_s) / (2 * calls)
    return 1e6 * (spent_s if spent_s > 0 else long_s / (3 * calls))


class Ruler:
    """Reads kernel durations from CUPTI where that works."""

    def __init__(self, warm_s: float = 0.06, timed_s: float = 0.03) -> None:
        """`warm_s` of running before anything is timed: an idle GPU has its clocks down."""
        self.warm_s, self.timed_s = warm_s, timed_s
        self.reads_kernels = False
        self.why_not = "no GPU"

    def calibrate(self, program: Program) -> None:
        """Checks whether CUPTI works: both rulers must agree within 10 % on a long `program`.

        Clocks that fall under load between one and the other account for less.
        """
        self.reads_kernels = True
        timing = self.measure(program)
        if timing.method != "cupti":
            self.reads_kernels = False
        elif abs(timing.us / timing.span_us - 1) > 0.1:
            self.reads_kernels = False
            self.why_not = f"CUPTI says {timing.us:.1f} us, the difference {timing.span_us:.1f}"

    def measure(self, program: Program) -> Timing:
        """Warms up, then times rounds over all input sets."""
        estimate_s = self._warm(program)
        sets = program.num_sets
        rounds = int(self.timed_s / (sets * estimate_s))
        rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, rounds))
        spans = [program.span_us(max(2, rounds * sets // 4)) for _ in range(3)]
        span = statistics.median(spans)
        calls = self._kernels(program, rounds * sets)
        if calls is None:
            low, high = min(spans), max(spans)
            return Timing(span, low, high, 3, sets, "difference", None, None, span)
        sums = [sum(us for _, us in call) for call in calls]
        samples = [statistics.fmean(sums[r * sets : (r + 1) * sets]) for r in range(rounds)]
        kernels = [
            (call[0][0], statistics.median(us for _, us in call))
            for call in zip(*calls, strict=True)
        ]
        low, high = min(samples), max(samples)
        us = statistics.median(samples)
        return Timing(us, low, high, rounds, sets, "cupti", len(kernels), kernels, span)

    def _kernels(self, program: Program, calls: int) -> list[list[tuple[str, float]]] | None:
        """Returns (name, us) of each kernel of each call; None where CUPTI saw nothing of use."""
        if not self.reads_kernels:
            return None

        def run() -> None:
            for i in range(calls):
                out = program(i)
            program.wait(out)

        try:
            seen = kernels_of(run)
        except Exception as error:  # whatever it is, the other ruler remains
            self.reads_kernels, self.why_not = False, f"{type(error).__name__}: {error}"
            return None
        self.why_not = "CUPTI saw no kernels, or other ones in every call"
        return split([(name[:80], ms) for name, ms in seen], calls)

    def _warm(self, program: Program) -> float:
        """Runs for a while; returns about how many seconds a call takes."""
        program.wait(program(0))
        start, calls = time.perf_counter(), 0
        while (spent := time.perf_counter() - start) < self.warm_s or calls < program.num_sets:
            for _ in range(4):
                out = program(calls)
                calls += 1
            program.wait(out)
        return max(spent / calls, 1e-7)

    def least_span_us(self, program: Program) -> float:
        """Returns the least `span_us`: a copy may not be a kernel, which is all that CUPTI is asked
        for.
        """
        self._warm(program)
        return min(program.span_us(8) for _ in range(3))


def split(seen: Sequence[tuple[str, float]], calls: int) -> list[list[tuple[str, float]]] | None:
    """Splits (name, ms) of all kernels into equal calls, in us; None unless they are equal."""
    each, rest = divmod(len(seen), calls)
    if not each or rest:
        return None
    cut = [[(n, 1e3 * ms) for n, ms in seen[c * each : (c + 1) * each]] for c in range(calls)]
    names = [[name for name, _ in call] for call in cut]
    return cut if all(call == names[0] for call in names) else None


def kernels_of(run: Callable[[], None]) -> list[tuple[str, float]]:
    """Returns (name, ms) of what ran on the GPU's streams while `run` did, in order."""
    with TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(path)).planes
        events = [
            (event.start_ns, event.name, 1e-6 * event.duration_ns)
            for plane in planes
            if plane.name.startswith("/device:GPU")
            for line in plane.lines
            if (line.name or "").startswith("Stream")
            for event in line.events
        ]
    return [(name, ms) for _, name, ms in sorted(events)]


class Ceilings(NamedTuple):
    """What this machine can do, as measured in this run."""

    copy_tb_s: float  # bytes read plus bytes written
    product_tflop_s: float  # bfloat16, on random data


def measure_ceilings(ruler: Ruler, copy_bytes: int = 4 << 30, size: int = 8192) -> Ceilings:
    """Calibrates the ruler on a large product, then measures copy and product."""
    key = jax.random.key(0, impl="rbg")
    draw = jax.jit(lambda key: jax.random.normal(key, (size, size), jnp.bfloat16))
    a, b = (draw(k) for k in jax.random.split(key))
    product = JaxProgram(lambda a, b: jnp.dot(a, b), [(a, b)])
    if jax.default_backend() == "gpu":
        ruler.calibrate(product)
    product_us = ruler.measure(product).us
    words = jax.random.bits(key, (copy_bytes // 4,), jnp.uint32)
    # As a memory copy, and as a kernel that reads and writes; the faster one is the ceiling.
    ways = [JaxProgram(way, [(words,)]) for way in (jnp.copy, jnp.invert)]
    copy_us = min(ruler.least_span_us(way) for way in ways)
    return Ceilings(2 * copy_bytes / copy_us / 1e6, 2 * size**3 / product_us / 1e6)
