"""Time sharing: requests wait at a gate until the device is their model's."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager


class Gate:
    """Lets requests of one model through at a time.

    A model's term ends when it has no request left, or when it has lasted `quantum_s` and another
    model is asked for: then nothing more of it is let through, and what is under way finishes. The
    next term is that of the model whose first request has waited longest; `change` is awaited
    before anything of it is let through.
    """

    def __init__(
        self,
        models: Sequence[str],
        change: Callable[[str], Awaitable[None]],
        quantum_s: float,
    ) -> None:
        """The first of `models` has the first term. Use within a running event loop."""
        self.active = models[0]
        self.running = 0  # requests of the active model that are under way
        self.num_changes, self.changing_s = 0, 0.0
        self._change, self._quantum_s = change, quantum_s
        self._now = asyncio.get_running_loop().time
        self._began_at = self._now()
        self._waiting: dict[str, deque[tuple[float, asyncio.Future[None]]]] = {
            model: deque() for model in models
        }
        self._changing: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def turn(self, model: str) -> AsyncIterator[None]:
        """Waits for the model's term; the block is a request under way.

        Raises what changing to the model raised.
        """
        place = asyncio.get_running_loop().create_future()
        self._waiting[model].append((self._now(), place))
        self._advance()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._leave()  # it was let through, and will not come
            else:
                self._advance()
            raise
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        self.running -= 1
        self._advance()

    def _advance(self) -> None:
        """To be called whenever something has come or gone."""
        for queue in self._waiting.values():
            while queue and queue[0][1].done():  # its caller has given up
                queue.popleft()
        if self._changing is not None:
            return
        others = [model for model, queue in self._waiting.items() if queue and model != self.active]
        over = bool(others) and self._now() - self._began_at >= self._quantum_s
        if not over:
            self._let_through()
        if others and not self.running:
            coming = min(others, key=lambda model: self._waiting[model][0][0])
            self._changing = asyncio.create_task(self._change_to(coming))

    def _let_through(self) -> None:
        queue = self._waiting[self.active]
        while queue:
            _, place = queue.popleft()
            if not place.done():
                place.set_result(None)
                self.running += 1

    async def _change_to(self, model: str) -> None:
        began_at = self._now()
        try:
            await self._change(model)
        except Exception as error:
            for _, place in self._waiting[model]:
                if not place.done():
                    place.set_exception(error)
        else:
            self.active, self._began_at = model, self._now()
            self.num_changes += 1
            self.changing_s += self._began_at - began_at
        self._changing = None
        self._advance()
