"""The endpoint of chats: messages and tools in, messages out, which may call tools."""

import json
import re
import secrets
import string
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import jiter
import orjson

from serving.errors import InvalidRequest, shown
from serving.frontend.openai import logprobs, reasoning_parsers
from serving.frontend.openai.endpoints import Choice, tokenized, truncated
from serving.frontend.openai.errors import HttpError
from serving.frontend.openai.reasoning_parsers import Thinks
from serving.frontend.openai.sampling import sampling
from serving.frontend.openai.schemas import ChatRequest, Message, NamedTool, TokenizeRequest
from serving.frontend.openai.tool_parsers import (
    PARSERS,
    Delta,
    Harmony,
    Hermes,
    Schema,
    ToolParser,
    closes,
    parser_of,
)
from serving.request import (
    MAX_STRUCTURE_CHARS,
    Chat,
    Output,
    Structure,
    StructureKind,
    guided,
)
from serving.settings import plugins

if TYPE_CHECKING:
    from jmoe.tokenizer import Tokenizer
    from serving.engine import Engine

_ID_CHARS, _NUM_ID_CHARS = string.ascii_letters + string.digits, 9
"""Ids as Mistral's templates demand them, which suits all others."""
_EFFORT = re.compile(r"\breasoning_effort\b")
_TOLD = re.compile(r"\btools\b")
_JOINED = re.compile(r"\+\s*[\w.\['\"\]]*arguments['\"]?\]?\s*[-+%}]")
"""What a template does with arguments that it wants as text: `+ tool['function']['arguments'] +`"""
_ASKS = re.compile(r"content['\"]?\]?\s+is\s+(not\s+)?none")
"""What a template asks that tells calls alone by null; another may write null as `None`."""


_FAULT = re.compile(
    r".*? cannot be used: at (\d{1,9})\(\d+\): failed to compile JSON schema: (.*?)( \d+ \| .*)?",
    re.DOTALL,
)
"""What is said of a line of a grammar."""
_RULE = re.compile(r"(?:args|value)(\d{1,9})")
_NUMBERED = re.compile(r"(.*:)(\d{1,9})", re.DOTALL)
"""An id that ends in a number."""
_NUM_BEFORE = 32
"""Tokens of a prompt's end, by which a format knows that the prompt has begun a thought."""
_THINKING = re.compile(r"\.thinking\b|\[['\"]thinking['\"]\]")
"""What gpt-oss's template calls `reasoning_content`."""


class Template(NamedTuple):
    """What a chat template's text says of tools and thoughts."""

    tells: bool  # it writes the tools
    parser: type[ToolParser] | None  # of the format in which it writes calls
    joins: bool  # it wants arguments as text
    empty: str | None  # content where there is none
    thoughts: str  # its name of what a model thought
    reads_effort: bool  # it names `reasoning_effort`

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, text: str) -> "Template":
        """Reads a template."""
        empty = None if _ASKS.search(text) else ""
        thoughts = "thinking" if _THINKING.search(text) else "reasoning_content"
        told, joins = bool(_TOLD.search(text)), bool(_JOINED.search(text))
        effort = _EFFORT.search(text) is not None
        return cls(told, parser_of(text), joins, empty, thoughts, effort)


class Tools:
    """The functions that a chat's answer may call."""

    def __init__(
        self, body: ChatRequest, tokenizer: "Tokenizer", parser: type[ToolParser] | None
    ) -> None:
        """`parser` is that of the settings; None: the template says which.

        Raises HttpError for a template without tools, or with unknown calls.
        """
        self._text = tokenizer.chat_template({"tools": body.tools})
        template = Template.of(self._text)
        self._tokenizer, self._body = tokenizer, body
        chosen = body.chosen
        functions = [
            one.function
            for one in body.tools or ()
            if chosen is None or one.function.name in chosen
        ]
        self._is_strict = any(one.strict for one in functions)
        self._functions = {one.name: _schema(one) for one in functions}
        one_at_most = isinstance(body.tool_choice, NamedTool) or body.parallel_tool_calls is False
        self.most_calls = 1 if one_at_most else None
        self._parser = parser or template.parser or Hermes
        whose, advice = (
            f"the chat template of model {shown(body.model)}",
            "serve the model with a template that has (engine.chat_template)",
        )
        if body.forces_call:
            return  # the grammar makes it right
        if not template.tells:
            raise HttpError(
                f"{whose} has no tools; {advice}, or set tool_choice to required or to a function",
                "tools",
            )
        if not (parser or template.parser):
            raise HttpError(
                f"{whose} has no format of calls that is known; {advice}, or set tool_call_parser",
                "tools",
            )

    def parser(self) -> ToolParser:
        """Returns a parser of one answer."""
        return self._parser(self._functions, self._text)

    def structure(self, wanted: Structure | None = None) -> Structure | None:
        """Returns what holds calls to the functions' schemas: the whole answer where it has to be
        one, else what follows a call's opening marker. None: nothing does. `wanted` is what an
        answer that is no call has to be.

        Raises HttpError for one that is no JSON schema.
        """
        parser, names = self.parser(), list(self._functions)
        many = self.most_calls is None
        if self._body.forces_call:
            return Structure(StructureKind.GRAMMAR, parser.grammar(names, many, self._marker))
        if wanted is not None:
            if wanted.kind is not StructureKind.JSON_SCHEMA:
                name = self._body.name_of("structure")
                raise HttpError(
                    f"{name} and tools each say what the answer must be; leave one out, or set "
                    "tool_choice to none or to required",
                    name,
                )
            calls = parser.grammar(names, many, self._marker).replace("start", "calls", 1)
            answer = f"start: calls | answer\nanswer: %json {_spaced(wanted.text)}"
            return Structure(StructureKind.GRAMMAR, f"{answer}\n{calls}")
        if self._body.ignore_eos or not hasattr(parser, "grammar_in_text"):
            return None

        others = [
            token for text, token in self._tokenizer.added_tokens.items() if text != parser.opening
        ]
        text = parser.grammar_in_text(names, many, self._marker, _tokens(others))
        if not text or (len(text) > MAX_STRUCTURE_CHARS and not self._is_strict):
            return None
        return Structure(StructureKind.GRAMMAR, text)

    def explained(self, error: InvalidRequest, structure: Structure) -> InvalidRequest:
        """Returns the error of a structure that cannot be used, with the function whose schema is
        at fault, if one is, in place of a grammar that the client has not written.
        """
        found = _FAULT.fullmatch(str(error))
        lines = structure.text.split("\n")
        if found is None or int(found[1]) > len(lines):
            return error
        rule = _RULE.match(lines[int(found[1]) - 1])
        if rule is None:
            return error
        name = list(self._functions)[int(rule[1])]
        return HttpError(
            f"the parameters of the function {shown(name)} cannot be held to: {found[2]}; mend "
            "that schema, or leave out what it says there",
            "tools",
        )

    def _marker(self, text: str) -> str:
        token = self._tokenizer.added_tokens.get(text)
        return orjson.dumps(text).decode() if token is None else _tokens([token])


def _spaced(schema: str) -> str:
    """Returns a JSON schema as it is held to by itself: with white space that does not vary."""
    try:
        found = jiter.from_json(schema.encode())
    except ValueError:
        return schema  # the grammar says why not
    if not isinstance(found, dict):
        return schema
    return json.dumps(guided(found))


def _tokens(tokens: Sequence[int]) -> str:
    """Returns how a grammar writes one of some tokens; empty for none."""
    every = set(tokens)
    starts = sorted(token for token in every if token - 1 not in every)
    ends = sorted(token for token in every if token + 1 not in every)
    ranges = zip(starts, ends, strict=True)
    parts = [f"{first}-{last}" if last > first else f"{first}" for first, last in ranges]
    return f"<[{','.join(parts)}]>" if parts else ""


def tools_of(
    body: ChatRequest, tokenizer: "Tokenizer | None", parser: type[ToolParser] | None
) -> Tools | None:
    """Returns the tools of a chat; None if its answer is to call none.

    Raises HttpError for tools, or a choice of them, that cannot be had.
    """
    names = [one.function.name for one in body.tools or ()]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise HttpError(f"tools has {shown(twice)} twice; give each function its name", "tools")
    choice = body.tool_choice
    if body.forces_call and not names:
        raise HttpError("tool_choice asks for a call, and there are no tools", "tool_choice")
    for name in body.chosen or ():
        if name not in names:
            raise HttpError(
                f"tool_choice is {shown(name)}, which is not among the tools", "tool_choice"
            )
    if not names or choice == "none":
        return None
    if tokenizer is None or not tokenizer.chat_template({"tools": body.tools}):
        return None  # the engine says so
    return Tools(body, tokenizer, parser)


def options_of(body: ChatRequest | TokenizeRequest, has_tools: bool) -> dict[str, Any]:
    """Returns what a chat template is told beside the messages, with the body's tools if it
    `has_tools`. Raises HttpError where it would be told them twice.
    """
    options = dict(body.chat_template_kwargs or {})
    if not has_tools:
        return options
    if "tools" in options:
        raise HttpError(
            "chat_template_kwargs has tools, too; leave one of them out", "chat_template_kwargs"
        )
    return {**options, "tools": [one.model_dump(exclude_none=True) for one in body.tools or ()]}


def _with_effort(options: dict[str, Any], body: ChatRequest, template: str) -> dict[str, Any]:
    """Returns options for a chat template with the body's `reasoning_effort`.

    Raises HttpError if they have another, and if the template does not read it.
    """
    name, effort = "reasoning_effort", body.reasoning_effort
    if effort is None:
        return options
    if options.get(name, effort) != effort:
        raise HttpError(
            f"{name} is {shown(effort)} and in chat_template_kwargs {shown(options[name])}; leave "
            "one of them out",
            name,
        )
    if template and not Template.of(template).reads_effort:
        raise HttpError(
            f"{name} is {shown(effort)}, and the chat template of model {shown(body.model)} does "
            f"not read {name}; leave it out, or send what that template reads (enable_thinking, "
            "for one) in chat_template_kwargs",
            name,
        )
    return {**options, name: effort}


def messages_of(messages: Sequence[Message], template: str) -> list[dict[str, Any]]:
    """Returns messages as Hugging Face's chat templates expect them: content as text, role
    `developer` as `system`, and arguments of calls as objects, unless the template joins them as
    text.
    """
    names: dict[str, str] = {}  # of called functions, by the call's id
    return [_message(one, names, Template.of(template)) for one in messages]


def _message(message: Message, names: dict[str, str], template: Template) -> dict[str, Any]:
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    thoughts = _thoughts(message)
    for what, has in (
        ("a refusal", message.refusal is not None),
        ("reasoning_content", thoughts is not None),
        ("tool_calls", bool(message.tool_calls)),
    ):
        if has and role != "assistant":
            raise HttpError(
                f"a message of role {role} has {what}; role assistant alone may have that",
                "messages",
            )
    content = message.refusal if content is None else content
    made: dict[str, Any] = {"role": role, "content": content or ""}
    if thoughts is not None and not (
        template.thoughts == "thinking" and content and message.tool_calls  # gpt-oss's: not both
    ):
        made[template.thoughts] = thoughts
    if message.tool_calls:
        names |= {call.id: call.function.name for call in message.tool_calls}
        made["content"] = content or template.empty
        without = {"index": True, "function": {"parsed_arguments"}}
        calls = [call.model_dump(exclude=without) for call in message.tool_calls]
        made["tool_calls"] = calls
        for call in () if template.joins else calls:
            call["function"]["arguments"] = _object(call["function"]["arguments"])
    name = message.name
    if (role == "tool") != (message.tool_call_id is not None):
        raise HttpError(
            f"a message of role {role} has {'no' if role == 'tool' else 'a'} tool_call_id; role "
            "tool has the id of the call that it answers, and no other role has one",
            "messages",
        )
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
        name = name or names.get(message.tool_call_id)
    return made if name is None else {**made, "name": name}


def _thoughts(message: Message) -> str | None:
    """Returns what a message says was thought, by either name; they must not differ."""
    given = message.reasoning_content, message.reasoning
    if None not in given and given[0] != given[1]:
        raise HttpError(
            "a message has reasoning and reasoning_content, which are the same and differ; send "
            "one of them",
            "messages",
        )
    return given[1] if given[0] is None else given[0]


def _object(arguments: str) -> Any:
    """Returns the object that arguments are; the text as it is where a model wrote none."""
    try:
        found = jiter.from_json(arguments.encode() or b"{}", allow_inf_nan=False)
    except ValueError:
        return arguments
    return found if isinstance(found, dict) else arguments


def _schema(function: Any) -> Schema:
    """Returns the schema of a function's arguments, which says so if it is strict."""
    nothing = {"properties": {}, "additionalProperties": False}
    schema = nothing if function.parameters is None else function.parameters
    schema = {**schema, "type": "object"}
    return guided(schema, strict=True) if function.strict else schema


class ChatChoice(Choice):
    """One message of a chat completion."""

    content = b'"delta":{"content":', b"}"
    first_content = b'"delta":{"role":"assistant","content":'
    whole_content = b'"message":{"role":"assistant","content":', b',"refusal":null}'


class ReadChoice(ChatChoice):
    """One message of a chat completion that is read: for what the model thought, says and calls."""

    content = b'"delta":', b""
    first_content = content[0]
    whole_content = b'"message":', b""

    def __init__(self, thoughts: ToolParser | None, tools: Tools | None, *given: Any) -> None:
        """`thoughts` reads what `tools` get no more of, if there are any; `given` is what a
        `Choice` gets.
        """
        super().__init__(*given)
        self._parsers = [] if thoughts is None else [thoughts]
        self._parsers += [] if tools is None else [tools.parser()]
        self._tools, self._most = tools, None if tools is None else tools.most_calls
        if self._parsers and isinstance(self._parsers[-1], Harmony):  # it reads thoughts, too
            self._parsers = self._parsers[-1:]
            thoughts = self._parsers[0]
        self.reasoning_tokens = None if thoughts is None else 0
        self._num_calls = 0
        self._written: list[str] | None = None  # arguments of the call that is being written
        self._ids: set[str] = set()  # of calls
        self._last_number = 0  # the largest that one of them ends in
        self._message: dict[str, Any] = {
            "role": "assistant",
            "content": "",
            "refusal": None,
            "tool_calls": [],
            "reasoning_content": "",
        }

    def read(self, out: Output) -> list[Delta]:
        """Returns what an output adds, by all parsers, each of which gets the content of the one
        before; without further calls than there may be.
        """
        deltas = [Delta(out.text)] if out.text else []
        for parser in self._parsers:
            found: list[Delta] = []
            for delta in deltas:
                found += parser.push(delta.content) if delta.content else [delta]
            if out.finish_reason is not None:
                found += parser.finish()
            deltas = found
        if self.reasoning_tokens is not None and any(delta.reasoning for delta in deltas):
            self.reasoning_tokens += len(out.token_ids)
        kept: list[Delta] = []
        for delta in deltas:
            self._num_calls += bool(delta.name)
            of_call = delta.name or delta.arguments
            if not of_call or self._most is None or self._num_calls <= self._most:
                kept.append(delta)
                if delta.name or not of_call:
                    self._written = [] if delta.name else None
                if delta.arguments and self._written is not None:
                    self._written.append(delta.arguments)
        return kept

    def cuts_call(self, out: Output) -> bool:
        """Returns whether the last output may have been stopped by the client's strings or tokens
        in the midst of a call: whether what the call has for arguments is no JSON.
        """
        may_stop = self.sampling.stop or self.sampling.stop_token_ids
        if out.finish_reason != "stop" or not may_stop or self._written is None:
            return False
        return not closes("".join(self._written))

    def explained(self, error: InvalidRequest) -> InvalidRequest:
        """See Choice."""
        structure = self.sampling.structure
        if self._tools is None or structure is None:
            return error
        return self._tools.explained(error, structure)

    def new_id(self, written: str) -> str:
        """Returns the id of a new call: the one that the model wrote (empty: none), if no earlier
        call of the message has it. Otherwise one is made: of what ends in a number, as Kimi's
        `functions.NAME:NUMBER`, by the number after the largest of the message, else by drawing.
        """
        id, numbered = written, _NUMBERED.fullmatch(written)
        if numbered is not None:
            number = int(numbered[2])
            if id in self._ids:
                number = self._last_number + 1
                id = f"{numbered[1]}{number}"
            self._last_number = max(self._last_number, number)
        while not id or id in self._ids:
            id = self.drawn_id()
        self._ids.add(id)
        return id

    def drawn_id(self) -> str:
        """Draws an id of a call."""
        return "".join(secrets.choice(_ID_CHARS) for _ in range(_NUM_ID_CHARS))

    def _new(self, out: Output) -> tuple[str, str, list[dict[str, Any]]]:
        """Returns the thoughts, content and parts of calls that an output adds."""
        num_calls, deltas = self._num_calls, self.read(out)
        calls: list[dict[str, Any]] = []
        for delta in deltas:
            num_calls += bool(delta.name)
            at = num_calls - 1
            if delta.name:
                made = {"name": delta.name, "arguments": ""}
                told = {"index": at, "id": self.new_id(delta.id), "type": "function"}
                calls.append({**told, "function": made})
            if delta.arguments:
                if not calls:
                    calls.append({"index": at, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += delta.arguments
        thoughts = "".join(delta.reasoning for delta in deltas)
        return thoughts, "".join(delta.content for delta in deltas), calls

    def take(self, out: Output) -> None:
        """See Choice."""
        thoughts, content, calls = self._new(out)
        message = self._message
        message["reasoning_content"] += thoughts
        message["content"] += content
        for call in calls:
            if "id" in call:
                del call["index"]
                message["tool_calls"].append(call)
            else:
                called = message["tool_calls"][-1]["function"]
                called["arguments"] += call["function"]["arguments"]
        super().take(out)

    def text(self) -> bytes:
        """See Choice."""
        message = dict(self._message)
        extra = [name for name in ("tool_calls", "reasoning_content") if not message[name]]
        if len(extra) < 2:
            message["content"] = message["content"] or None
        for name in extra:
            del message[name]
        return orjson.dumps(message)

    def finish(self, out: Output) -> bytes:
        """See Choice."""
        has_called = self._num_calls and out.finish_reason == "stop" and not self.cuts_call(out)
        return b'"tool_calls"' if has_called else super().finish(out)

    def event(self, out: Output, usage: bytes = b"") -> bytes:
        """See Choice."""
        is_first, self._begun, self.last = not self._begun, True, out
        thoughts, content, calls = self._new(out)
        delta: dict[str, Any] = {"role": "assistant", "content": None} if is_first else {}
        if thoughts:
            delta["reasoning_content"] = thoughts
        if content:
            delta["content"] = content
        if calls:
            delta["tool_calls"] = calls
        is_full = self.sampling.logprobs or self.prompt_ids is not None
        if not (delta or out.finish_reason or usage or is_full):
            return b""
        return self.full_event(self._before, orjson.dumps(delta), out, usage)


class ChatEndpoint:
    """The chat endpoint."""

    request: type[Any] = ChatRequest
    operation = "chat"
    id_prefix, object_whole, object_event = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    plain: Callable[..., Choice] = ChatChoice  # what answers are without tools and thoughts
    read: Callable[..., Choice] = ReadChoice

    def __init__(self, tool_parser: str, reasoning_parser: str) -> None:
        """The arguments are the settings `tool_call_parser` and `reasoning_parser`. Raises
        ValueError for one that cannot be.
        """
        methods = ("push", "finish")
        self._parser: type[ToolParser] | None = None
        if tool_parser:
            known = *methods, "grammar"
            made = plugins.make("tool_call_parser", tool_parser, PARSERS, known, {}, "")
            self._parser = type(made)
        self._reasoning: Callable[[str], Thinks | None] = reasoning_parsers.parser_of
        if reasoning_parser == "none":
            self._reasoning = lambda template: None
        elif reasoning_parser:
            thinks = plugins.make(
                "reasoning_parser", reasoning_parser, reasoning_parsers.PARSERS, methods, ""
            )
            self._reasoning = lambda template: type(thinks)

    async def choices(
        self, body: ChatRequest, engine: "Engine", tokenizer: "Tokenizer | None"
    ) -> list[Choice]:
        """Returns the choices of a call. Raises InvalidRequest."""
        tools = tools_of(body, tokenizer, self._parser)
        options = options_of(body, tools is not None)
        template = "" if tokenizer is None else tokenizer.chat_template(options)
        options = _with_effort(options, body, template)
        prompt = Chat(messages_of(body.messages, template), options)
        by_id = bool(body.return_tokens_as_token_ids)
        shown = logprobs.Chat(logprobs.Texts(tokenizer, by_id))
        drawn = [sampling(body, i) for i in range(body.n or 1)]
        wanted = drawn[0].structure
        if tools is not None:
            drawn = [replace(one, structure=tools.structure(wanted)) for one in drawn]
        # What is held to a structure from its first token on has no thoughts.
        is_held = wanted is not None or (tools is not None and body.forces_call)
        thinks = None if is_held else self._reasoning(template)
        before, given, began_s = "", prompt, time.monotonic()
        if body.truncate_prompt_tokens is not None:
            given = await truncated(prompt, body, engine, drawn[0].max_new_tokens)
        reads_end = thinks is not None and tokenizer is not None
        if reads_end or body.return_token_ids:
            given = await tokenized(given, body, engine)
        if thinks is not None and tokenizer is not None and isinstance(given, list):
            before = tokenizer.decode(given[-_NUM_BEFORE:], skip_special_tokens=False)
        found: list[Choice] = []
        for i, one in enumerate(drawn):
            if thinks is None and tools is None:
                found.append(self.plain(i, given, one, shown))
                continue
            one = replace(one, skip_special_tokens=False)
            parser = None if thinks is None else thinks(before)
            found.append(self.read(parser, tools, i, given, one, shown))
        ids = orjson.dumps(given) if body.return_token_ids else None
        for choice in found:
            choice.prompt_ids = ids
            choice.waited_s = time.monotonic() - began_s
        return found
