"""The live page's data: one sample per second, the last minutes of them, expert load, and the
viewers.
"""

import asyncio
import base64
import contextlib
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from serving.errors import Overloaded, ServingError
from serving.frontend.page.sample import Sampler, about, now

if TYPE_CHECKING:
    from serving.frontend.server import Server


log = logging.getLogger(__name__)

INTERVAL_S = 1.0
HISTORY = 300
"""Samples that are kept for pages opened later and for readers that fall behind."""
EXPERTS_EVERY = 4
"""Expert load, the only large part of the data, is updated once in so many samples."""
RECHECK_EVERY = 10
"""A stream's key is checked again after so many messages."""
MAX_VIEWERS = 32
"""Concurrent streams. One whose client does not read counts until its connection ends."""
RETRY_AFTER_S = 5.0


class Live:
    """Samples a server once a second, even without viewers, so that later ones see the history.

    Sampling is cheap (docs/page.md has figures), and samples are encoded once for all viewers.
    """

    def __init__(self, server: "Server", clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is the engine's."""
        self._server = server
        self._sampler = Sampler(server, clock)
        self._load = ExpertLoad(clock)
        self._history: deque[bytes] = deque(maxlen=HISTORY)
        self._now = b""  # server state at the newest sample, as JSON
        self._experts, self._experts_at = b"null", 0  # newest load, and `count` at that time
        self.count = 0  # samples so far
        self._next = asyncio.Event()  # set, and replaced, at the next sample
        self._closed = False
        self._num_faults = 0
        self.num_viewers = 0

    async def run(self) -> None:
        """Takes samples until it is cancelled, which also ends every stream."""
        loop = asyncio.get_running_loop()
        due_at = loop.time()
        try:
            while True:
                self._tick_or_log()
                # The next whole interval, but no sooner than half an interval after this sample,
                # which is late if the event loop was blocked: rates over less would be noise.
                late_s = loop.time() - due_at
                due_at += INTERVAL_S * math.ceil(late_s / INTERVAL_S + 0.5)
                await asyncio.sleep(due_at - loop.time())
        finally:
            self._closed = True
            self._next.set()

    def _tick_or_log(self) -> None:
        try:
            self.tick()
        except Exception:  # the page must not stop the server or flood the log
            self._num_faults += 1
            if self._num_faults.bit_count() == 1:  # the 1st, 2nd, 4th, 8th, ...
                log.exception("the live page's sample failed, for the %dth time", self._num_faults)

    def tick(self) -> None:
        """Takes a sample and wakes all viewers."""
        self._history.append(_dump(self._sampler.take()))
        self._now = _dump(now(self._server))
        if self.count % EXPERTS_EVERY == 0:
            self._look_at_experts()
        self.count += 1
        woken, self._next = self._next, asyncio.Event()
        woken.set()

    def _look_at_experts(self) -> None:
        engine = self._server.engine
        if engine is None or engine.model is None:
            return
        load = self._load.look(self._server.metrics.expert_rows, engine.model.config.num_experts)
        if load is not None:
            self._experts, self._experts_at = _dump(load), self.count + 1

    def state(self) -> bytes:
        """Returns the server's state as a JSON object: newest sample, settings, expert load."""
        return self._message(self._newest(1), whole=True)

    async def stream(self, check: Callable[[], object]) -> AsyncIterator[bytes]:
        """Yields lines of JSON: first the whole state, then updates once a second. Ends with `run`.

        A reader that takes longer than a second gets the samples it missed with the next line, as
        far as the history goes. `check` is called regularly; a ServingError from it ends the
        stream.
        """
        seen, engine = self.count, self._server.engine
        yield self._message(self._newest(HISTORY), whole=True)
        for number in itertools.count(1):
            waiting = self._next
            if seen == self.count:
                await waiting.wait()
            if self._closed:
                return
            try:
                if number % RECHECK_EVERY == 0:
                    check()
            except ServingError:  # the page learns why when it reconnects
                return
            samples, last, seen = self._newest(self.count - seen), seen, self.count
            attached, engine = engine is not self._server.engine, self._server.engine
            yield self._message(samples, whole=attached, experts=self._experts_at > last)

    @contextlib.contextmanager
    def viewer(self) -> Iterator[None]:
        """Counts a viewer within the block. Raises Overloaded if there are `MAX_VIEWERS`
        already.
        """
        if self.num_viewers >= MAX_VIEWERS:
            raise Overloaded(
                f"{MAX_VIEWERS} pages are open on this server already; close one", RETRY_AFTER_S
            )
        self.num_viewers += 1
        try:
            yield
        finally:
            self.num_viewers -= 1

    def _newest(self, count: int) -> Sequence[bytes]:
        have = len(self._history)
        return [self._history[at] for at in range(max(0, have - count), have)]

    def _message(
        self, samples: Sequence[bytes], *, whole: bool = False, experts: bool = False
    ) -> bytes:
        current = _dump(now(self._server)) if whole else self._now
        parts = [b'"samples":[' + b",".join(samples) + b"]", b'"now":' + current]
        if whole:
            parts.append(b'"about":' + _dump(about(self._server)))
        if whole or experts:
            parts.append(b'"experts":' + self._experts)
        return b"{" + b",".join(parts) + b"}\n"


def _dump(value: Any) -> bytes:
    return orjson.dumps(value)  # NaN becomes null


LEVELS = 255


class ExpertLoad:
    """Rows that experts computed between two calls of `look`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: tuple[float, np.ndarray] | None = None

    def look(self, rows: np.ndarray | None, num_routed: int) -> dict[str, Any] | None:
        """Returns the load since the last call; None on the first, or before any step was read.

        `rows [layers, E]` are counts since the start; the first `num_routed` experts are the routed
        ones. `load` is base64 of a byte per expert, layer by layer: LEVELS * sqrt(rows / largest),
        rounded up, so that only an idle expert has 0.
        """
        if rows is None:
            return None
        now = self._clock()
        last, self._last = self._last, (now, rows)
        if last is None or last[1].shape != rows.shape or now <= last[0]:
            return None
        since, took_s = rows - last[1], now - last[0]
        most = int(since.max(initial=0))
        levels = np.ceil(LEVELS * np.sqrt(since / max(1, most))).astype(np.uint8)
        layers, experts = rows.shape
        return {
            "layers": layers,
            "experts": experts,
            "routed": min(num_routed, experts),
            "most_rows_per_s": most / took_s,
            "load": base64.b64encode(levels.tobytes()).decode(),
        }
