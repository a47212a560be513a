"""What every front end does with a request's outputs: tracing, logging and rate accounting."""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from serving.frontend import status
from serving.frontend.access import Caller
from serving.frontend.tracing import RequestSpan
from serving.request import Output


@contextlib.asynccontextmanager
async def noted(
    outputs: AsyncGenerator[Output], request_id: str, caller: Caller, span: RequestSpan
) -> AsyncIterator[Callable[[Output], None]]:
    """Yields a function to call with each output before it is sent.

    It notes the output in the trace and the log, and charges the caller's key for new tokens (for
    the prompt with the first output). At the end `outputs` is closed at once: a generator left to
    the garbage collector would keep its KV pages.
    """
    entry = status.request_entry(request_id)
    charged = 0

    def note(out: Output) -> None:
        nonlocal charged
        span.note(out)
        if entry is not None:
            entry.note(out)
        total = out.usage.prompt_tokens + out.usage.completion_tokens
        caller.used(total - charged)
        charged = total

    async with contextlib.aclosing(outputs):
        with entry or contextlib.nullcontext():
            yield note
