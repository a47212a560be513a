"""Handles a call of an endpoint that generates, from its body to the last byte of the response."""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

import orjson
from starlette.responses import Response

from serving.errors import ClientLeft, InvalidRequest
from serving.frontend.access import Caller
from serving.frontend.openai import body as bodies
from serving.frontend.openai.door import caller_of, request_id_of, set_request_id
from serving.frontend.openai.endpoints import Choice
from serving.frontend.openai.errors import HttpError
from serving.frontend.openai.sampling import priority
from serving.frontend.status import noted
from serving.frontend.tracing import RequestSpan
from serving.request import MAX_REQUEST_ID_CHARS, OPTIONS, Output, ThresholdSpan, number_of

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from jmoe.tokenizer import Tokenizer
    from serving.engine import Engine
    from serving.frontend.openai.chats import ChatEndpoint
    from serving.frontend.openai.endpoints import CompletionEndpoint
    from serving.frontend.server import Server

    Endpoint = CompletionEndpoint | ChatEndpoint

_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
EVENTS_START: dict[str, Any] = {"type": "http.response.start", "status": 200, "headers": _EVENTS}
"""Begins a stream."""
_DONE = b"data: [DONE]\n\n"
_PART_BYTES = 64 << 10  # after which a response that is not streamed waits for its client

Take = Callable[[Choice, Output], Awaitable[None]]


@contextlib.asynccontextmanager
async def received(
    server: "Server", kind: type[Any], scope: "Scope", receive: "Receive"
) -> AsyncIterator[tuple[Any, str, "Tokenizer | None"]]:
    """Yields a call's body, and its model's name and tokenizer; the call has a place among those
    under way. Raises what refuses a call.
    """
    guard, engine = server.guard, server.ready_engine()
    # Refuse early, without wasted work, if the key's rate limit is reached ...
    caller_of(scope).check_room()
    with guard.place():  # ... or if the server has no place for another call
        pass
    raw = await bodies.read(scope, receive, guard, bodies.max_bytes(engine.bounds))
    with guard.place():
        body = await bodies.parse(kind, raw, engine.bounds)
        del raw  # not kept while it is answered
        scope["state"]["body"] = body
        number = number_of(body.model or "", engine.names)
        body.model = engine.names[number]
        tokenizer = None if engine.family is None else engine.family[number].tokenizer
        yield body, engine.names[number], tokenizer


class Answer(Response):
    """The response to a call, which reads the request's body before it answers."""

    background = None

    def __init__(
        self, server: "Server", endpoint: "Endpoint", call: "type[Call] | None" = None
    ) -> None:
        """`call` answers; None: `Call`."""
        self._server, self._endpoint, self._call = server, endpoint, call or Call

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """See starlette. Errors it raises are reported to the client by `door`."""
        server, guard = self._server, self._server.guard
        engine, caller = server.ready_engine(), caller_of(scope)
        engine.check_admission(key=caller.name)  # before any work, if overloaded
        of_call = server, self._endpoint.request, scope, receive
        async with received(*of_call) as (body, model, tokenizer):
            set_request_id(scope, body.request_id)
            if body.stream_options is not None and not body.stream:
                raise HttpError(
                    "stream_options without stream; set stream to true, or leave them out",
                    "stream_options",
                )
            body.priority = caller.class_of(body.priority and priority(body))
            caller.check_allowed(model, body.priority)  # before a chat is rendered
            async with _while_there(receive):
                choices = await self._endpoint.choices(body, engine, tokenizer)
                request_id = request_id_of(scope)
                span = server.tracer.request(
                    *(request_id, model, priority(body), scope["headers"]),
                    operation=self._endpoint.operation,
                )
                count = len(choices)
                engine.bounds.check_logprobs((one.sampling, one.prompt_tokens) for one in choices)
                caller.check_allowed(model, priority(body), count)
                guard.check_count(count)
                with (
                    guard.place(count - 1),  # before the key is charged for it
                    caller.request(model, priority(body), count),
                    span as recorded,
                ):
                    call = self._call(engine, body, choices, request_id, caller, recorded)
                    try:
                        await call.answer(self._endpoint, send)
                    finally:
                        recorded.note_prompts(call.usage()["prompt_tokens"])


class Call:
    """The engine requests of one call, and its answer."""

    def __init__(
        self,
        engine: "Engine",
        body: Any,
        choices: list[Choice],
        request_id: str,
        caller: Caller,
        span: RequestSpan,
    ) -> None:
        self._caller, self._span = caller, span
        self._engine, self._body, self._choices, self._id = engine, body, choices, request_id

    def usage(self) -> dict[str, Any]:
        """Returns the usage so far of the choices that have begun. A prompt counts once.

        `degraded_share` is the share of expert visits that were degraded, `expected_loss` what
        their thresholds let expect, in nats a token; null where that is not known. The threshold
        fields have the smallest and largest threshold (percent) that the call's steps ran under;
        null before the first step.
        """
        begun = {choice.index: choice.last for choice in self._choices if choice.last is not None}
        firsts = {at // self._body.num_answers: begun[at] for at in reversed(begun)}
        outputs, usages = list(begun.values()), [out.usage for out in begun.values()]
        prompt = sum(out.usage.prompt_tokens for out in firsts.values())
        cached = sum(out.usage.cached_tokens for out in firsts.values())
        completion = sum(usage.completion_tokens for usage in usages)
        visits = sum(usage.expert_visits for usage in usages)
        degraded = sum(usage.degraded_visits for usage in usages)
        nats = sum(usage.expected_loss * usage.completion_tokens for usage in usages)
        found: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "degraded_share": degraded / visits if visits else 0.0,
            "expected_loss": None if math.isnan(nats) else nats / max(completion, 1),
            "prefill_threshold_percent": _span(out.prefill_threshold for out in outputs),
            "decode_threshold_percent": _span(out.decode_threshold for out in outputs),
        }
        counts = [one.reasoning_tokens for one in self._choices if one.reasoning_tokens is not None]
        if counts:
            found["completion_tokens_details"] = {"reasoning_tokens": sum(counts)}
        return found

    async def answer(self, endpoint: "Endpoint", send: "Send") -> None:
        """Runs the call's requests and sends the whole response."""
        fields = {
            "id": endpoint.id_prefix + self._id,
            "object": endpoint.object_event if self._body.stream else endpoint.object_whole,
            "created": int(time.time()),
            "model": self._body.model,
        }
        if self._body.stream:
            await self._stream(fields, send)
            return
        await self._run(keep)
        pieces: list[bytes | bytearray] = [orjson.dumps(fields)[:-1], b',"choices":[']
        for at, choice in enumerate(self._choices):
            pieces += [b"," if at else b"", *choice.whole()]
        pieces += [b"]", *self._choices[0].told_prompt()]  # of a chat, which has one prompt
        pieces.append(b',"usage":%b}' % orjson.dumps(self.usage()))
        await send_whole(send, pieces)

    async def _stream(self, fields: dict[str, Any], send: "Send") -> None:
        head, left = orjson.dumps(fields)[1:-1], len(self._choices)
        options = self._body.stream_options
        wants_usage = options is not None and bool(options.include_usage)
        usage_so_far = options is not None and bool(options.continuous_usage_stats)
        for choice in self._choices:
            choice.prepare(head, b',"usage":null' if wants_usage else b"")
        started = False

        async def write(choice: Choice, out: Output) -> None:
            nonlocal started, left
            data = choice.event(out, self._usage_of(choice, out) if usage_so_far else b"")
            if not started:
                started = True
                await send(EVENTS_START)
            if out.finish_reason is not None:
                left -= 1
                if not left:
                    if wants_usage:  # after the last token, in the same write
                        told = head, orjson.dumps(self.usage())
                        data += b'data: {%b,"choices":[],"usage":%b}\n\n' % told
                    data += _DONE
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": left > 0})

        writing = asyncio.Lock()

        async def write_in_turn(choice: Choice, out: Output) -> None:
            async with writing:  # it may wait for the client, and none may overtake it
                await write(choice, out)

        await self._run(write if left == 1 else write_in_turn)

    def _usage_of(self, choice: Choice, out: Output) -> bytes:
        choice.last = out
        return b',"usage":' + orjson.dumps(self.usage())

    async def _run(self, take: Take) -> None:
        """Passes every output to `take`. If one request fails, the call's other requests
        are ended.
        """
        if len(self._choices) == 1:
            await self._generate(self._choices[0], self._id, take)
            return
        try:
            async with asyncio.TaskGroup() as group:
                for choice in self._choices:
                    suffix = f"-{choice.index}"
                    request_id = self._id[: MAX_REQUEST_ID_CHARS - len(suffix)] + suffix
                    group.create_task(self._generate(choice, request_id, take))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _generate(self, choice: Choice, request_id: str, take: Take) -> None:
        body = self._body
        outputs = self._engine.generate(
            choice.prompt,
            choice.sampling,
            request_id=request_id,
            priority=priority(body),
            timeout_s=body.timeout_s,
            model=body.model,
            salt=self._caller.salt(body.cache_salt or ""),
            key=self._caller.name,
            waited_s=choice.waited_s,
            **{name: value for name in OPTIONS if (value := getattr(body, name)) is not None},
        )
        try:
            async with noted(outputs, request_id, self._caller, self._span) as note:
                async for out in outputs:
                    if choice.scores_alone:
                        out = _without_new(out)
                    note(out)
                    if choice.sampling.prompt_logprobs and choice.last is None:
                        await choice.take_prompt(out)
                    await take(choice, out)
        except InvalidRequest as error:
            raise choice.explained(error) from None


def _without_new(out: Output) -> Output:
    """Returns the output of a prompt that is only scored: the engine draws a token all the same."""
    usage = out.usage._replace(completion_tokens=0)
    nothing: dict[str, Any] = {"text": "", "token_ids": (), "logprobs": (), "top_logprobs": ()}
    return out._replace(**nothing, usage=usage, finish_reason=out.finish_reason and "length")


async def keep(choice: Choice, out: Output) -> None:
    """Stores an output for an answer that is not streamed."""
    choice.take(out)


async def send_whole(send: "Send", pieces: list[bytes | bytearray]) -> None:
    """Sends a complete (not streamed) JSON response in parts, no faster than the client reads."""
    length = (b"content-length", b"%d" % sum(map(len, pieces)))
    headers = [(b"content-type", b"application/json"), length]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    part = bytearray()
    for piece in pieces:
        for at in range(0, len(piece), _PART_BYTES):
            if len(part) >= _PART_BYTES:
                await send({"type": "http.response.body", "body": bytes(part), "more_body": True})
                part.clear()
            part += piece[at : at + _PART_BYTES]
    await send({"type": "http.response.body", "body": bytes(part)})


@contextlib.asynccontextmanager
async def _while_there(receive: "Receive") -> AsyncIterator[None]:
    """Cancels its block and raises ClientLeft as soon as the client disconnects."""
    loop = asyncio.get_running_loop()

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        limit.reschedule(loop.time())

    limit = asyncio.timeout(None)
    try:
        async with limit:
            watching = loop.create_task(watch(), name="jmoe-http-client")
            try:
                yield
            finally:
                watching.cancel()
    except TimeoutError:
        if not limit.expired():
            raise
        raise ClientLeft("the client left before its answer was whole") from None


def _span(spans: Iterable[ThresholdSpan | None]) -> list[int] | None:
    there = [span for span in spans if span is not None]
    if not there:
        return None
    return [min(span.min_percent for span in there), max(span.max_percent for span in there)]
