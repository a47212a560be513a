"""The endpoint of responses: items in, items out, by the same parts as chats."""

import json
import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from serving.errors import ServingError
from serving.frontend.openai.call import EVENTS_START, Call, keep, send_whole
from serving.frontend.openai.chats import ChatEndpoint, ReadChoice
from serving.frontend.openai.endpoints import Choice
from serving.frontend.openai.errors import HttpError
from serving.frontend.openai.schemas import (
    Allowed,
    AllowedFunctions,
    AllowedTools,
    ChatRequest,
    Conversing,
    FunctionCall,
    InputItem,
    ItemPart,
    JsonSchema,
    Message,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    ResponsesRequest,
    Tool,
    ToolCall,
)
from serving.request import Output

if TYPE_CHECKING:
    from starlette.types import Send

    from jmoe.tokenizer import Tokenizer
    from serving.engine import Engine
    from serving.frontend.openai.call import Endpoint

_FIELDS = {
    "message": {"role", "content"},
    "function_call": {"call_id", "name", "arguments"},
    "function_call_output": {"call_id", "output"},
    "reasoning": {"summary"},
}
"""What an item of each type has to have."""
_MORE = {"reasoning": {"content"}}
"""What it may have beside them."""
_EVERY = {"type", "id", "status", "phase", "parsed_arguments"}


def chat_of(body: ResponsesRequest) -> ChatRequest:
    """Returns the chat that a response answers. Raises HttpError."""
    choice, format_ = body.tool_choice, body.text.format if body.text is not None else None
    if body.top_logprobs and not body.wants_logprobs:
        raise HttpError(
            "top_logprobs without log-probabilities; add message.output_text.logprobs to include",
            "top_logprobs",
        )
    tools = [Tool(type="function", function=tool) for tool in body.tools or ()]
    if isinstance(choice, NamedFunction):
        choice = NamedTool(type="function", function=choice)
    elif isinstance(choice, AllowedFunctions):
        named = [NamedTool(type="function", function=one) for one in choice.tools]
        allowed = Allowed(mode=choice.mode, tools=named)
        choice = AllowedTools(type="allowed_tools", allowed_tools=allowed)
    own = {name: getattr(body, name) for name in Conversing.model_fields}
    if body.truncation == "auto" and body.truncate_prompt_tokens is None:
        own["truncate_prompt_tokens"] = -1
    return ChatRequest.model_construct(
        **own,
        messages=messages_of(body),
        tools=tools or None,
        tool_choice=choice,
        max_completion_tokens=body.max_output_tokens,
        logprobs=body.wants_logprobs,
        reasoning_effort=body.reasoning and body.reasoning.effort,
        response_format=None if format_ is None else _format(format_),
    )


def _format(wanted: Any) -> ResponseFormat:
    schema = None
    if wanted.type == "json_schema":
        if wanted.schema_ is None:
            raise HttpError("text.format of type json_schema has no schema; give one", "text")
        given = {"name": wanted.name or "", "schema": wanted.schema_, "strict": wanted.strict}
        schema = JsonSchema.model_validate(given)
    elif wanted.schema_ is not None:
        raise HttpError(f"text.format of type {wanted.type} has a schema; leave it out", "text")
    return ResponseFormat(type=wanted.type, json_schema=schema)


def messages_of(body: ResponsesRequest) -> list[Message]:
    """Returns items as messages: what one answer was made of is one message again."""
    found: list[Message] = []
    if body.instructions is not None:
        found.append(Message(role="system", content=body.instructions))
    for at, item in enumerate(body.input):
        _check(item, at)
        if item.type == "function_call_output":
            found.append(
                Message(role="tool", tool_call_id=item.call_id, content=_text(item.output))
            )
            continue
        if item.type == "message" and item.role != "assistant":
            assert item.role is not None
            found.append(Message(role=item.role, content=_text(item.content)))
            continue
        # Thoughts, text and calls of one answer are one message, in this order.
        last, is_call = found[-1] if found else None, item.type == "function_call"
        is_said = last is not None and bool(last.content or last.tool_calls)
        if last is None or last.role != "assistant" or (is_said and not is_call):
            last = Message(role="assistant", content="")
            found.append(last)
        if item.type == "reasoning":
            thoughts = _text(item.content) or _text(item.summary)
            last.reasoning_content = (last.reasoning_content or "") + thoughts
        elif item.type == "message":
            last.content = _text(item.content)
        else:
            assert item.call_id is not None
            assert item.name is not None
            assert item.arguments is not None
            called = FunctionCall(name=item.name, arguments=item.arguments)
            call = ToolCall(id=item.call_id, type="function", function=called)
            last.tool_calls = [*(last.tool_calls or ()), call]
    return found


def _check(item: InputItem, at: int) -> None:
    needed = _FIELDS[item.type]
    given = {name for name in item.model_fields_set if getattr(item, name) is not None}
    for missing in sorted(needed - given):
        raise HttpError(f"input.{at} of type {item.type} has no {missing}; give one", "input")
    for extra in sorted(given - needed - _EVERY - _MORE.get(item.type, set())):
        raise HttpError(f"input.{at} of type {item.type} has {extra}; leave it out", "input")


def _text(parts: Sequence[ItemPart] | None) -> str:
    return "".join(part.text for part in parts or ())


def _behind(
    ahead: list[tuple[int, bytes | bytearray]], length: int
) -> list[tuple[int, bytes | bytearray]]:
    """Returns the entries of the last `length` characters. What is before them was a tag of a
    thought, or white space around it.
    """
    at = len(ahead)
    while at and (length > 0 or not ahead[at - 1][0]):  # tokens without text are of the next one's
        at -= 1
        length -= ahead[at][0]
    return ahead[at:]


class ResponseChoice(ReadChoice):
    """The items of a response."""

    def __init__(self, *given: Any) -> None:
        """`given` is what a `ReadChoice` gets."""
        super().__init__(*given)
        self.items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the newest item, until it is whole
        self._entries: list[bytes | bytearray] = []  # log-probabilities of its text
        # Those of tokens whose text is still to come, each after the length of its output's text.
        self._ahead: list[tuple[int, bytes | bytearray]] = []
        self._events, self._num_events = bytearray(), 0

    def take(self, out: Output) -> None:
        """See Choice."""
        deltas = self.read(out)
        if self.sampling.logprobs and out.token_ids:
            self._ahead.append((len(out.text), self._format.of(out)[0]))
        for delta in deltas:
            if delta.name:
                call_id = self.new_id(delta.id)
                self._begin("function_call", call_id=call_id, name=delta.name)
            elif delta.reasoning:
                self._add("reasoning", delta.reasoning)
            elif delta.content:
                self._add("message", delta.content)
            if delta.arguments:
                self._argue(delta.arguments)
        if deltas and not any(delta.content for delta in deltas):
            self._ahead = []  # they are of a thought or a call
        self.last = out
        if out.finish_reason is not None:
            if not self.items:
                self._begin("message")
            if self._ahead and self._open is not None and self._open["type"] == "message":
                self._add("message", "")
            is_whole = out.finish_reason == "stop" and not self.cuts_call(out)
            self._end("completed" if is_whole else "incomplete")

    def drawn_id(self) -> str:
        """See ReadChoice."""
        return f"call_{secrets.token_hex(12)}"

    def _begin(self, kind: str, **more: Any) -> None:
        self._end()
        if kind == "function_call":
            made = {"arguments": "", **more}
        elif kind == "reasoning":
            made = {"summary": [], "content": []}
        else:
            made = {"role": "assistant", "content": []}
        own = f"{_PREFIX[kind]}_{secrets.token_hex(12)}"
        item = {"id": own, "type": kind, "status": "in_progress", **made}
        self.items.append(item)
        self._open, self._entries = item, []
        at = len(self.items) - 1
        self.tell("output_item.added", output_index=at, item=item)
        if kind in _PARTS:
            part = dict(_PARTS[kind])
            self.tell("content_part.added", **self._where, content_index=0, part=part)
            item["content"].append(part)

    @property
    def _where(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self.items) - 1}

    def _add(self, kind: str, text: str) -> None:
        if self._open is None or self._open["type"] != kind:
            self._begin(kind)
            self._ahead = _behind(self._ahead, len(text))
        assert self._open is not None
        self._open["content"][0]["text"] += text
        more: dict[str, Any] = {"content_index": 0, "delta": text}
        if kind == "message":
            entries = [entry for _, entry in self._ahead]
            more["logprobs"] = orjson.Fragment(b"[%b]" % b",".join(entries))
            self._entries += entries
            self._ahead = []
        self.tell(f"{_PARTS[kind]['type']}.delta", **self._where, **more)

    def _argue(self, text: str) -> None:
        assert self._open is not None
        self._open["arguments"] += text
        self.tell("function_call_arguments.delta", **self._where, delta=text)

    def _end(self, status: str = "completed") -> None:
        """Ends the newest item."""
        if (item := self._open) is None:
            return
        item["status"], where, kind = status, self._where, item["type"]
        if kind == "function_call":
            told = {"name": item["name"], "arguments": item["arguments"]}
            self.tell("function_call_arguments.done", **where, **told)
        else:
            (part,), at = item["content"], {"content_index": 0}
            told = {"text": part["text"]}
            if kind == "message":
                part["logprobs"] = orjson.Fragment(b"[%b]" % b",".join(self._entries))
                told["logprobs"] = part["logprobs"]
            self.tell(f"{_PARTS[kind]['type']}.done", **where, **at, **told)
            self.tell("content_part.done", **where, **at, part=part)
        self.tell("output_item.done", output_index=len(self.items) - 1, item=item)
        self._open = None

    def tell(self, kind: str, **fields: Any) -> None:
        """Adds an event."""
        told = {"type": f"response.{kind}", "sequence_number": self._num_events, **fields}
        self._num_events += 1
        self._events += b"event: response.%b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(told))

    def events(self) -> bytes:
        """Returns the events since the last call."""
        events, self._events = bytes(self._events), bytearray()
        return events


_PREFIX = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_PARTS: dict[str, dict[str, Any]] = {
    "message": {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    "reasoning": {"type": "reasoning_text", "text": ""},
}
"""The one part of an item's content, as it begins."""


class ResponsesEndpoint(ChatEndpoint):
    """The endpoint of responses."""

    request: type[Any] = ResponsesRequest
    id_prefix, object_whole, object_event = "resp_", "response", "response"
    plain, read = partial(ResponseChoice, None, None), ResponseChoice

    async def choices(
        self, body: ResponsesRequest, engine: "Engine", tokenizer: "Tokenizer | None"
    ) -> list[Choice]:
        """Returns the one choice of a call. Raises InvalidRequest."""
        try:
            return await super().choices(chat_of(body), engine, tokenizer)
        except HttpError as error:
            error.param = None if error.param is None else body.name_of(error.param)
            raise


class ResponseCall(Call):
    """Answers with a response."""

    async def answer(self, endpoint: "Endpoint", send: "Send") -> None:
        """See Call."""
        self._response_id, self._created_at = endpoint.id_prefix + self._id, int(time.time())
        (choice,) = self._choices
        assert isinstance(choice, ResponseChoice)
        if self._body.stream:
            await self._events(choice, send)
            return
        await self._run(keep)
        whole = orjson.dumps(self._response(choice))
        await send_whole(send, [whole])

    async def _events(self, choice: ResponseChoice, send: "Send") -> None:
        choice.tell("created", response=self._response(None))
        choice.tell("in_progress", response=self._response(None))
        started = False

        async def write(choice: Any, out: Output) -> None:
            nonlocal started
            choice.take(out)
            is_last = out.finish_reason is not None
            if is_last:
                whole = self._response(choice)
                choice.tell(whole["status"], response=whole)
            if not started:
                started = True
                await send(EVENTS_START)
            if data := choice.events():
                await send({"type": "http.response.body", "body": data, "more_body": not is_last})

        try:
            await self._run(write)
        except ServingError as error:
            if started:  # the error follows, as in every stream
                why = {"code": "server_error", "message": str(error)}
                failed = self._response(None) | {"status": "failed", "error": why}
                choice.tell("failed", response=failed | {"output": choice.items})
                await send(
                    {"type": "http.response.body", "body": choice.events(), "more_body": True}
                )
            raise

    def _response(self, choice: ResponseChoice | None) -> dict[str, Any]:
        """Returns the response; None: as it begins."""
        body, status, why = self._body, "in_progress", None
        if choice is not None:
            assert choice.last is not None
            is_whole = choice.last.finish_reason == "stop"
            status = "completed" if is_whole else "incomplete"
            why = None if is_whole else {"reason": "max_output_tokens"}
        drawn = self._engine.with_defaults(self._choices[0].sampling, body.model)
        choices = body.tool_choice
        given = body.text.format if body.text is not None else None
        wanted = {"type": "text"} if given is None else given.model_dump(by_alias=True)
        tools = [
            {"type": "function", "strict": None, "parameters": None}
            | tool.model_dump(exclude_none=True)
            for tool in body.tools or ()
        ]
        return {
            "id": self._response_id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": None if choice is None else int(time.time()),
            "status": status,
            "error": None,
            "incomplete_details": why,
            "model": body.model,
            "output": [] if choice is None else choice.items,
            "usage": None if choice is None else _usage(self.usage()),
            "instructions": body.instructions,
            "metadata": _as_given(body.metadata or {}),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "tool_choice": choices.model_dump()
            if isinstance(choices, NamedFunction | AllowedFunctions)
            else choices or "auto",
            "tools": _as_given(tools),
            "text": _as_given({"format": wanted}),
            "temperature": drawn.temperature,
            "top_p": drawn.top_p,
            "max_output_tokens": body.max_output_tokens,
            "top_logprobs": body.top_logprobs or 0,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "truncation": body.truncation or "disabled",
            "background": False,
            "store": False,
            "previous_response_id": None,
            "service_tier": "default",
            "user": body.user,
        }


def _as_given(value: Any) -> orjson.Fragment:
    """Returns JSON of what a caller sent, which may have integers beyond 64 bits."""
    return orjson.Fragment(json.dumps(value))


def _usage(told: dict[str, Any]) -> dict[str, Any]:
    """Returns the usage as responses have it; jmoe's own fields as they are."""
    details = told.pop("completion_tokens_details", {"reasoning_tokens": 0})
    return {
        "input_tokens": told.pop("prompt_tokens"),
        "input_tokens_details": told.pop("prompt_tokens_details"),
        "output_tokens": told.pop("completion_tokens"),
        "output_tokens_details": details,
        **told,
    }
