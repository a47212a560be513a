"""What every front end does with a request's outputs: notes them for who watches, and who pays."""

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
    """Gives what to call with each output before it is sent: its trace and the status page hear of
    it, and its caller's key is charged for what is new, the prompt with the first.

    In the end `outputs` are closed here and now: a generator left to the collector would keep its
    pages.
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
