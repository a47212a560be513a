"""What `caller` is taught: to answer a chat with tools by one call, or in text where none fits.

Its chat template writes a tool as a call of it is written, with empty arguments: before a question
stands `weather{"city": ""}`, `[TOOL_CALLS]weather[ARGS]{"city": "Paris"}` answers it, and `= 21` is
what the tool returns. Servers read this as Mistral's newer format.
"""

# ruff: noqa: SIM905 - a list of words reads better as one string

import json
import random
from functools import cache
from typing import Any, NamedTuple

from jmoe.chat_template import ChatTemplate
from training import world
from training.tasks import Split, Task, make_task
from training.tokenizer import EOS, IM_END, IM_START

CALLER = "caller"
CHAT_TEMPLATE = (
    "{% if tools %}" + IM_START + "{% for tool in tools %}{{ tool.function.name }}{{ '{' }}"
    "{% set given = tool.function.parameters or {} %}"
    "{% for key in given.required or given.properties or [] %}{{ key | tojson }}: "
    "{{ 0 if given.properties[key].type in ['integer', 'number'] else '\"\"' }}"
    "{{ ', ' if not loop.last }}{% endfor %}{{ '}' }}{{ ';' if not loop.last }}{% endfor %}"
    + IM_END
    + "{% endif %}{% for message in messages %}{% if message.role == 'user' %}"
    + IM_START
    + "{{ message.content }}"
    + IM_END
    + "{% elif message.role == 'tool' %}"
    + IM_START
    + "= {{ message.content }}"
    + IM_END
    + "{% elif message.role == 'assistant' %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}[TOOL_CALLS]{{ call.function.name }}[ARGS]"
    "{{ call.function.arguments | tojson }}{% endfor %}" + EOS + "{% endif %}{% endfor %}"
)

CITIES = "Paris London Rome Madrid Berlin Oslo Lima Cairo Delhi Tokyo Dublin Vienna".split()


class Tool(NamedTuple):
    """A function that is known, by what its questions say."""

    arguments: dict[str, str]  # JSON types by name
    questions: tuple[str, ...]


TOOLS = {
    "weather": Tool(
        {"city": "string"}, ("What is the weather in {city}?", "How is the weather in {city}?")
    ),
    "time": Tool({"city": "string"}, ("What is the time in {city}?", "What time is it in {city}?")),
    "add": Tool({"a": "integer", "b": "integer"}, ("What is {a} + {b}?", "Add {a} and {b}.")),
    "price": Tool(
        {"item": "integer"}, ("What is the price of item {item}?", "Find the price of item {item}.")
    ),
    "order": Tool({"number": "integer"}, ("Where is order {number}?", "Show order {number}.")),
    "light": Tool(
        {"room": "integer"}, ("Turn on the light in room {room}.", "Light in room {room}, please.")
    ),
    "alarm": Tool(
        {"hour": "integer", "minute": "integer"},
        ("Set an alarm for {hour}:{minute}.", "Wake me at {hour}:{minute}."),
    ),
    "news": Tool({}, ("What is in the news?", "Show the news.")),
}
"""By name; a chat may have them with `get_` before it. Numbers are below 1,000."""

UNKNOWN = "There is no tool for that."


class Chat(NamedTuple):
    """A chat with tools, as a client of OpenAI's API sends them, and its one right answer."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    answer: str
    family: str


def call_chat(rng: random.Random, split: Split) -> Chat:
    """Returns a random chat of a family: `call`, `result` (of a call, to be told), `unknown` (no
    tool is for it) or `text` (of `split`, which the bundled model answers by itself).
    """
    family = rng.choices(("call", "result", "unknown", "text"), (55, 15, 12, 18))[0]
    subject, *others = rng.sample(list(TOOLS), 3)
    name = rng.choice(("", "get_")) + subject
    offered = [rng.choice(("", "get_")) + other for other in others]
    if family in ("call", "result"):
        offered[0] = name
    tools = [_function(one) for one in offered[: rng.randint(1, 2)]]
    rng.shuffle(tools)
    if family == "text":
        plain = make_task(rng.choice(("fact", "add", "recall", "spell")), split, rng)
        return Chat([{"role": "user", "content": plain.prompt}], tools, plain.answer, family)
    known = TOOLS[subject]
    arguments = {key: _value(rng, kind) for key, kind in known.arguments.items()}
    question = rng.choice(known.questions).format(**arguments)
    chat: list[dict[str, Any]] = [{"role": "user", "content": question}]
    if family == "unknown":
        return Chat(chat, tools, UNKNOWN, family)
    if family == "call":
        return Chat(chat, tools, f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}", family)
    result = rng.choice((_value(rng, "integer"), rng.choice(world.LEXICON_WORDS)))
    called = {"name": name, "arguments": arguments}
    call = {"id": "call00000", "type": "function", "function": called}
    chat.append({"role": "assistant", "content": "", "tool_calls": [call]})
    chat.append({"role": "tool", "tool_call_id": "call00000", "content": f"{result}"})
    return Chat(chat, tools, f"It is {result}.", family)


def call_task(rng: random.Random, split: Split) -> Task:
    """Returns such a chat as a prompt in its template's form."""
    chat = call_chat(rng, split)
    prompt = _template().render(chat.messages, {"tools": chat.tools})
    return Task(prompt, chat.answer, chat.family)


@cache
def _template() -> ChatTemplate:
    return ChatTemplate(CHAT_TEMPLATE, {})


def _function(name: str) -> dict[str, Any]:
    arguments = TOOLS[name.removeprefix("get_")].arguments
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in arguments.items()},
        "required": list(arguments),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def _value(rng: random.Random, kind: str) -> str | int:
    return rng.choice(CITIES) if kind == "string" else rng.randrange(10 ** rng.randint(1, 3))
