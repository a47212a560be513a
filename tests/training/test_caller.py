"""What `caller` is taught: chats with tools, by the template and format that a server knows."""

import json
import random
import re
from collections import Counter

import pytest
from jsonschema import validate
from tokenizers import Tokenizer as Backend

from jmoe.api import resolve
from jmoe.tokenizer import Tokenizer
from serving.frontend.openai.chats import Template, messages_of, options_of, tools_of
from serving.frontend.openai.schemas import ChatRequest
from serving.frontend.openai.tool_parsers import Mistral, parser_of
from training.family.calls import CHAT_TEMPLATE, TOOLS, UNKNOWN, call_chat, call_task
from training.packing import encode_task

NUM = 300


@pytest.fixture(scope="module")
def tokenizer():
    backend = Backend.from_file(str(resolve("bundled") / "tokenizer.json"))
    return Tokenizer(backend, {"chat_template": CHAT_TEMPLATE})


@pytest.fixture(scope="module")
def chats():
    rng = random.Random(5)
    return [call_chat(rng, "eval") for _ in range(NUM)]


def read(answer, tools):
    """Returns the calls and the content that a server reads in an answer."""
    parser_class = parser_of(CHAT_TEMPLATE)
    assert parser_class is Mistral
    functions = {one["function"]["name"]: one["function"]["parameters"] for one in tools}
    parser, calls, content = parser_class(functions, CHAT_TEMPLATE), [], ""
    for delta in [d for char in answer for d in parser.push(char)] + parser.finish():
        content += delta.content
        if delta.name:
            calls.append((delta.name, ""))
        elif delta.arguments:
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    return calls, content


def test_an_answer_is_one_valid_call_of_what_is_asked_or_a_text(chats):
    families = Counter(chat.family for chat in chats)
    assert min(families[name] for name in ("call", "result", "unknown", "text")) > NUM // 20
    for chat in chats:
        calls, content = read(chat.answer, chat.tools)
        if chat.family != "call":
            assert (calls, content) == ([], chat.answer)
            continue
        ((name, arguments),) = calls
        (asked,) = [one["function"] for one in chat.tools if one["function"]["name"] == name]
        validate(json.loads(arguments), asked["parameters"])
        question = chat.messages[0]["content"]
        assert all(str(value) in question for value in json.loads(arguments).values())


def test_a_text_answers_what_no_tool_is_for_and_what_a_tool_returned(chats):
    """`unknown` is asked as calls are, of tools that are not there."""
    for chat in chats:
        last = chat.messages[-1]["content"]
        offered = [one["function"]["name"].removeprefix("get_") for one in chat.tools]
        asks = {
            name
            for name, tool in TOOLS.items()
            for question in tool.questions
            if re.fullmatch(re.sub(r"\\{\w+\\}", r"\\w+", re.escape(question)), last)
        }
        assert len(asks) == (chat.family in ("call", "unknown"))
        assert asks <= set(offered) or chat.family == "unknown"
        if chat.family == "unknown":
            assert (chat.answer, asks & set(offered)) == (UNKNOWN, set())
        if chat.family == "result":
            assert chat.answer == f"It is {last}."


def test_a_server_renders_the_prompts_that_are_learned(chats, tokenizer):
    """Of a client's body, with descriptions and ids; and back, histories with calls included."""
    assert Template.of(CHAT_TEMPLATE) == Template(
        True, Mistral, False, "", "reasoning_content", reads_effort=False
    )
    rng = random.Random(5)
    for chat in chats:
        messages = json.loads(json.dumps(chat.messages))
        for call in messages[1].get("tool_calls", ()) if len(messages) > 1 else ():
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
            messages[1]["content"] = None
        tools = json.loads(json.dumps(chat.tools))
        tools[0]["function"]["description"] = "Says what is asked."
        body = ChatRequest(model="caller", messages=messages, tools=tools)
        assert tools_of(body, tokenizer, None) is not None
        text = tokenizer.chat(messages_of(body.messages, CHAT_TEMPLATE), options_of(body, True))
        assert text == call_task(rng, "eval").prompt


def test_without_tools_a_chat_is_as_the_bundled_models(tokenizer):
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    assert tokenizer.chat(chat) == Tokenizer.load(resolve("bundled")).chat(chat)


def test_tools_are_told_by_what_a_call_has_to_have(tokenizer):
    properties = {"city": {"type": "string"}, "days": {"type": "integer"}, "hot": {}}
    parameters = [None, {"type": "object"}, {"properties": properties}]
    parameters.append({"properties": properties, "required": ["days"]})
    tools = [
        {"function": {"name": "f", "parameters": one} if one else {"name": "f"}}
        for one in parameters
    ]
    told = tokenizer.chat([], {"tools": tools})
    every = 'f{"city": "", "days": 0, "hot": ""}'
    assert told == f'<|im_start|>f{{}};f{{}};{every};f{{"days": 0}}<|im_end|>'


def test_chats_fit_the_rows_that_are_trained(chats, tokenizer):
    rng = random.Random(6)
    lengths = [len(encode_task(tokenizer.backend, call_task(rng, "train")).ids) for _ in chats]
    assert sum(length <= 129 for length in lengths) > 0.98 * NUM
