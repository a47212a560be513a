"""Responses, through OpenAI's own client. The engine says what a test has it say."""

import json

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai_served import CHAT, TOOLS_TEMPLATE, saying, serving_http

from serving.config import EngineConfig
from serving.frontend.openai import answers
from serving.frontend.openai.schemas import ResponsesRequest
from serving.request import Chat, Output, Usage

THINKS = TOOLS_TEMPLATE + "{# </think> #}"
PATH = "/v1/responses"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
NOW = {"type": "function", "name": "now", "description": "What time it is"}
PARIS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
BOTH = f'I look.\n{PARIS}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'
THOUGHT = f"<think>\nHm.\n</think>\n\n{BOTH}"


def respond(s, given="hi", **fields):
    return s.client.responses.create(model="counter", input=given, **fields)


async def test_an_unknown_field_of_an_item_that_is_null_counts_as_absent():
    item = {"role": "user", "content": "count", "model": None}
    async with serving_http() as s:
        got = await s.http.post("/v1/responses", json={"model": "counter", "input": [item]})
    assert got.status_code == 200, got.text


async def test_a_text_is_one_message():
    async with serving_http() as s:
        got = await respond(s, max_output_tokens=3, metadata={"a": "b"}, store=True)
        (call,) = s.engine.calls
        raw = await s.http.post(PATH, json={"model": "counter", "input": "hi"})
    answers.Response.model_validate(raw.json())
    assert call["prompt"] == Chat(CHAT)
    assert got.output_text == "^_`"
    assert (got.status, got.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert got.id.startswith("resp_")
    assert got.metadata == {"a": "b"}
    assert got.store is False  # nothing is stored
    assert (got.usage.input_tokens, got.usage.output_tokens) == (10, 3)
    assert got.usage.total_tokens == 13
    assert got.usage.degraded_share > 0


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("Hello.", ["message"]),
        ("", ["message"]),
        (PARIS, ["function_call"]),
        (BOTH, ["message", "function_call", "function_call"]),
        (THOUGHT, ["reasoning", "message", "function_call", "function_call"]),
        ("<think>Hm", ["reasoning"]),
    ],
)
async def test_a_stream_ends_with_the_answer_and_its_events_add_up_to_it(text, kinds, step):
    fields = {"tools": [WEATHER, NOW], "include": ["message.output_text.logprobs"]}
    async with saying(text, THINKS, step=step) as s:
        whole = await respond(s, **fields)
        stream = await respond(s, stream=True, **fields)
        events = [event async for event in stream]
        async with s.client.responses.stream(model="counter", input="hi", tools=[NOW]) as helper:
            final = await helper.get_final_response()
    assert [item.type for item in whole.output] == kinds
    assert [event.sequence_number for event in events] == list(range(len(events)))
    types = [event.type for event in events]
    assert types[:2] == ["response.created", "response.in_progress"]
    assert types[-1] == "response.completed"
    same = {"id": "", "call_id": ""}
    told = events[-1].response
    assert [item.to_dict() | same for item in told.output] == [
        item.to_dict() | same for item in whole.output
    ]
    assert told.usage == whole.usage
    assert final.output_text == whole.output_text
    # What clients put together of the events is what the last one says.
    items, joined = {}, {}
    for event in events[2:-1]:
        if event.type == "response.output_item.added":
            assert event.output_index == len(items)
            items[event.output_index] = event.item
            joined[event.output_index] = ""
        elif event.type == "response.output_item.done":
            assert event.item == told.output[event.output_index]
            assert event.item.id == items[event.output_index].id
        else:
            assert event.item_id == items[event.output_index].id
            if event.type.endswith(".delta"):
                joined[event.output_index] += event.delta
            elif event.type == "response.function_call_arguments.done":
                assert event.arguments == joined[event.output_index]
            elif event.type.endswith("text.done"):
                assert event.text == joined[event.output_index]
    for item, text in zip(told.output, joined.values(), strict=True):
        assert text == (item.arguments if item.type == "function_call" else item.content[0].text)


async def test_a_cut_answer_is_incomplete_and_so_is_its_last_item():
    async with saying(BOTH.partition("Par")[0], reason="length") as s:
        got = await respond(s, tools=[WEATHER, NOW])
        events = [event async for event in await respond(s, tools=[WEATHER, NOW], stream=True)]
    assert got.status == "incomplete"
    assert [item.status for item in got.output] == ["completed", "incomplete"]
    assert got.output[1].arguments == '{"city": "'
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("dumped", [False, True])
async def test_an_answer_goes_back_as_the_client_has_it(dumped):
    async with saying(THOUGHT, THINKS) as s:
        prompts, tokenize = [], s.engine.tokenize

        async def noted(prompt, *given, **more):
            prompts.append(prompt)
            return await tokenize(prompt, *given, **more)

        s.engine.tokenize = noted
        got = await respond(s, "Is it cold?", instructions="Be short.", tools=[WEATHER, NOW])
        calls = [item for item in got.output if item.type == "function_call"]
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "12"}
            for call in calls
        ]
        output = [item.to_dict() if dumped else item for item in got.output]
        if dumped:
            output[1] |= {"phase": "commentary"}  # as OpenAI's newer models say
            output[2] |= {"parsed_arguments": {}}  # as its client's helpers do
        asked = [{"role": "user", "content": [{"type": "input_text", "text": "Is it cold?"}]}]
        await respond(s, [*asked, *output, *results], instructions="Be short.", tools=[WEATHER])
    (first, second) = prompts
    assert first.messages == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Is it cold?"},
    ]
    assert list(second.messages[:2]) == first.messages
    answer, *told = second.messages[2:]
    assert answer == {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Hm.",
        "tool_calls": [
            {"id": call.call_id, "type": "function", "function": function}
            for call, function in zip(
                calls,
                [
                    {"name": "weather", "arguments": {"city": "Paris"}},
                    {"name": "now", "arguments": {}},
                ],
                strict=True,
            )
        ],
    }
    assert told == [
        {"role": "tool", "content": "12", "tool_call_id": call.call_id, "name": call.name}
        for call in calls
    ]
    assert second.options["tools"] == [
        {
            "type": "function",
            "function": {"name": "weather", "parameters": PARAMETERS, "strict": True},
        }
    ]


async def test_what_is_wanted_is_held_to():
    schema = {"type": "json_schema", "name": "a", "schema": PARAMETERS}
    async with saying('{"city": "Paris"}') as s:
        await respond(s, text={"format": schema}, temperature=0.5, top_p=0.25)
        await respond(s, tools=[WEATHER], tool_choice="required")
        await respond(s, tools=[WEATHER, NOW], tool_choice={"type": "function", "name": "now"})
        await respond(s, tools=[WEATHER], tool_choice="none", text={"format": {"type": "text"}})
        await respond(s, tools=[WEATHER], text={"format": schema})
        found = [call["sampling"] for call in s.engine.calls]
    assert (found[0].temperature, found[0].top_p) == (0.5, 0.25)
    assert json.loads(found[0].structure.text) == PARAMETERS
    assert "weather" in found[1].structure.text
    assert "weather" not in found[2].structure.text
    assert "now" in found[2].structure.text
    assert found[3].structure is None
    assert found[4].structure.text.startswith("start: calls | answer")


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_of_allowed_tools_alone_one_is_called(mode):
    some = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "now"}]}
    wrong = some | {"tools": [{"type": "function", "name": "x"}]}
    async with saying("Fine.") as s:
        got = await respond(s, tools=[WEATHER, NOW], tool_choice=some)
        (call,) = s.engine.calls
        with pytest.raises(openai.BadRequestError, match="tool_choice is 'x', which is not among"):
            await respond(s, tools=[WEATHER, NOW], tool_choice=wrong)
    structure = call["sampling"].structure.text
    assert structure.startswith("start: (free") == (mode == "auto")
    assert "now" in structure
    assert "weather" not in structure
    assert "weather" in json.dumps(call["prompt"].options)
    assert got.tool_choice.model_dump() == some


async def test_logprobs_are_those_of_the_text():
    include = ["message.output_text.logprobs"]
    async with serving_http() as s:
        got = await respond(s, max_output_tokens=2, include=include, top_logprobs=1)
        stream = await respond(s, max_output_tokens=2, include=include, top_logprobs=1, stream=True)
        parts = [e.logprobs async for e in stream if e.type == "response.output_text.delta"]
    (part,) = got.output[0].content
    assert [one.token for one in part.logprobs] == ["^", "_"]
    assert [one.top_logprobs[0].logprob for one in part.logprobs] == [-0.5, -0.5]
    assert [one.token for part in parts for one in part] == ["^", "_"]


@pytest.mark.parametrize(
    ("texts", "shown"),
    [
        (["a", "", "é", "b", ""], [0, 1, 2, 3, 4]),
        ([""], [0]),
        (["<think>", "Hm", "</think>", "Hi", ""], [3, 4]),
        (["<think>", "\n\n", "</think>", "\n\n", "", "é", ".", ""], [4, 5, 6, 7]),
        (["<", "b>", ""], [0, 1, 2]),
        (["Hi", "<tool", "_call>", PARIS.removeprefix("<tool_call>")], [0]),
        (["Hi", "<tool", "s>", ""], [0, 1, 2, 3]),
    ],
)
async def test_logprobs_are_of_all_of_a_messages_tokens(texts, shown):
    fields = {"include": ["message.output_text.logprobs"], "tools": [WEATHER]}
    async with saying("", THINKS) as s:

        async def generate(prompt, sampling, **options):
            for at, text in enumerate(texts):
                ended = "stop" if at == len(texts) - 1 else None
                usage = Usage(5, at + 1, 8, 0)
                yield Output(options["request_id"], text, (65,), (-float(at),), usage, ended)

        s.engine.generate = generate
        got = await respond(s, **fields)
        stream = await respond(s, stream=True, **fields)
        parts = [e.logprobs async for e in stream if e.type == "response.output_text.delta"]
    (part,) = (item.content[0] for item in got.output if item.type == "message")
    assert [-one.logprob for one in part.logprobs] == shown
    assert [-one.logprob for part in parts for one in part] == shown


async def test_large_numbers_come_back_as_they_are():
    tool = {"type": "function", "name": "f", "parameters": {"properties": {"a": {"const": 10**30}}}}
    body = {"model": "counter", "input": "hi", "metadata": {"a": 10**30}, "tools": [tool]}
    format_ = {"type": "json_schema", "name": "a", "schema": {"maximum": 10**30}}
    async with saying("Hi.") as s:
        got = (await s.http.post(PATH, json=body | {"text": {"format": format_}})).json()
        (call,) = s.engine.calls
    assert got["metadata"] == {"a": 10**30}
    assert got["tools"][0]["parameters"] == tool["parameters"]
    assert got["text"]["format"]["schema"] == {"maximum": 10**30}
    assert call["sampling"].structure.text.count(str(10**30)) == 2


async def test_a_stream_that_fails_says_so_and_ends():
    async with serving_http() as s:
        types = []

        async def read():
            async for event in await respond(s, "hi", stream=True):
                types.append(event.type)
                if event.type == "response.output_text.delta":
                    s.engine.fail("it is unlucky")

        s.engine.gate.clear()  # behind the first token
        with pytest.raises(openai.APIError, match="unlucky"):
            await read()
    assert types[-1] == "response.failed"


ITEM = {"type": "function_call", "call_id": "a", "name": "now", "arguments": "{}"}
WRONG = [
    ({"input": 5}, "input", "it must be text, or a list of items"),
    ({"input": []}, "input", "must not be empty"),
    ({"input": ""}, "input", "must not be empty"),
    ({"input": [{"role": "user"}]}, "input", "input.0 of type message has no content"),
    ({"input": [{"content": "a"}]}, "input", "has no role"),
    (
        {"input": [{"type": "item_reference", "id": "a"}]},
        "input",
        "input.0.type is 'item_reference'; it must be 'message', 'function_call', ",
    ),
    ({"input": [ITEM | {"x": 1}]}, "input", "input.0.'x' is not known"),
    ({"input": [ITEM | {"output": "a"}]}, "input", "function_call has output; leave it out"),
    (
        {"input": [{"type": "function_call_output", "call_id": "a"}]},
        "input",
        "has no output",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input",
        "input_image'; it must be",
    ),
    ({"tools": [{"type": "web_search"}]}, "tools", "tools.0.type is 'web_search'"),
    ({"tools": [NOW, NOW]}, "tools", "tools has 'now' twice"),
    ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice", "it must be none, auto, required"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "send all items in input"),
    ({"conversation": "a"}, "conversation", "nothing is stored"),
    ({"prompt": {"id": "a"}}, "prompt", "send its text"),
    ({"background": True}, "background", "it must be false"),
    ({"truncation": "all"}, "truncation", "truncation is 'all'; it must be 'auto' or 'disabled'"),
    ({"min_tokens": 5, "seed": 2**64}, "seed", "seed is 18446744073709551616"),
    ({"top_k": -2}, "top_k", "top_k is -2"),
    ({"stop": [5]}, "stop", "stop is 5; it must be a string or a list of strings"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "truncate_prompt_tokens is 0"),
    ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0"),
    ({"max_tokens": 5}, "max_tokens", "'max_tokens' is not known"),
    ({"reasoning": {"effort": "high"}}, "reasoning", "does not read reasoning_effort; leave it"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text", "has no schema"),
    ({"text": {"format": {"type": "text", "schema": {}}}}, "text", "has a schema"),
    ({"reasoning": {"effort": "all"}}, "reasoning", "effort is 'all'; it must be 'none', 'mini"),
    ({"top_logprobs": 3}, "top_logprobs", "add message.output_text.logprobs to include"),
    ({"include": ["file_search_call.results"]}, "include", "it must be a list of message."),
    ({"temperature": 1000}, "temperature", "temperature is 1000"),
]


@pytest.mark.parametrize(
    ("fields", "last"),
    [
        ({"truncation": "auto"}, 6),  # what fits beside four new ones
        ({"truncate_prompt_tokens": -1}, 6),
        ({"truncation": "auto", "truncate_prompt_tokens": 3}, 3),
        ({"truncate_prompt_tokens": 3}, 3),
        ({"truncation": "disabled"}, 0),
        ({}, 0),
    ],
    ids=str,
)
async def test_of_a_long_conversation_the_last_tokens_are_kept(fields, last):
    text = "\x01[user|hi]"
    async with serving_http(engine=EngineConfig(max_model_len=10)) as s:
        body = {"model": "counter", "input": "hi", "max_output_tokens": 4, **fields}
        told = (await s.http.post(PATH, json=body)).json()
        (call,) = s.engine.calls
    assert call["prompt"] == ([ord(c) for c in text[-last:]] if last else Chat(CHAT))
    assert told["truncation"] == fields.get("truncation", "disabled")


async def test_what_is_wrong_is_refused_by_name():
    async with saying("") as s:
        for fields, param, said in WRONG:
            answer = await s.http.post(PATH, json={"model": "counter", "input": "hi", **fields})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), (fields, error)
            assert said in error["message"], error["message"]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=3,
)
_PART = st.fixed_dictionaries(
    {
        "type": st.sampled_from(["input_text", "output_text", "reasoning_text", "input_image"]),
        "text": st.text(max_size=3) | _JSON,
    }
)
_CONTENT = st.text(max_size=3) | st.lists(_PART, max_size=2) | _JSON
_ITEM = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning"])
        | _JSON,
        "role": st.sampled_from(["user", "assistant", "system", "developer"]) | _JSON,
        **dict.fromkeys(("content", "output", "summary"), _CONTENT),
        **dict.fromkeys(("call_id", "name", "arguments", "id"), st.text(max_size=3) | _JSON),
    },
)
_FIELDS = {
    **{name: _JSON for name in ResponsesRequest.model_fields if name not in ("model", "input")},
    "tools": st.lists(st.sampled_from([WEATHER, NOW]) | _JSON, max_size=2) | _JSON,
    "tool_choice": st.sampled_from(["none", "auto", "required", {"type": "function"}]) | _JSON,
    "text": st.fixed_dictionaries({"format": st.just({"type": "json_object"}) | _JSON}) | _JSON,
}
_BODIES = st.fixed_dictionaries(
    {"input": st.text(max_size=3) | st.lists(_ITEM | _JSON, max_size=3)}, optional=_FIELDS
)


async def test_no_request_is_a_fault_of_the_server():
    bodies = []

    @settings(max_examples=80, database=None, suppress_health_check=list(HealthCheck))
    @given(whole=_BODIES, rng=st.randoms())
    def draw(whole, rng):
        names = rng.sample([*whole], min(len(whole), rng.randrange(4)))  # few are wrong at once
        bodies.append({"model": "counter", "input": whole["input"]} | {n: whole[n] for n in names})

    draw()
    statuses = set()
    async with saying(THOUGHT, THINKS) as s:
        for body in bodies:
            answer = await s.http.post(PATH, json=body)
            statuses.add(answer.status_code)
            failed = answer.status_code != 400 and '"server_error"' in answer.text
            assert not failed, (body, answer.text)
    assert statuses == {200, 400}
