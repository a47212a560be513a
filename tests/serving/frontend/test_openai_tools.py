"""Tools of a chat, through OpenAI's own client. The engine says what a test has it say."""

import json

import openai
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionChunk
from openai_served import CHAT, TOOLS_TEMPLATE, saying, serving_an_engine

from serving.errors import InvalidRequest
from serving.frontend.openai import answers
from serving.frontend.openai.chats import Tools
from serving.frontend.openai.tool_parsers import PARSERS, Delta
from serving.request import Structure, StructureKind

NO_TOOLS = "{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
NOW = {"type": "function", "function": {"name": "now", "description": "What time it is"}}
REQUIRED = {"required": ["days"], "additionalProperties": False}
PATH = "/v1/chat/completions"
PARIS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
BOTH = f'I look.\n{PARIS}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'


def shape(calls):
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


async def test_calls_are_in_the_message_and_the_content_before_them():
    async with saying(BOTH) as s:
        got = await s.chat(tools=[WEATHER, NOW])
        (call,) = s.engine.calls
    answers.ChatCompletion.model_validate(got.model_dump(exclude_unset=True))
    (choice,) = got.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert shape(choice.message.tool_calls) == [("weather", {"city": "Paris"}), ("now", {})]
    first, second = (call.id for call in choice.message.tool_calls)
    assert first != second
    assert all(len(one) == 9 and one.isalnum() for one in (first, second))  # as Mistral wants it
    assert call["sampling"].structure.text.startswith("start: (free head calls)* free")
    assert call["sampling"].skip_special_tokens is False
    assert call["prompt"].options == {"tools": [WEATHER, NOW]}


async def test_content_is_null_where_there_are_calls_alone():
    async with saying(PARIS) as s:
        got = await s.chat(tools=[WEATHER])
    assert got.choices[0].message.content is None


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("text", [BOTH, PARIS, "No call at all. ", "<tool_call>none"])
async def test_a_stream_joined_is_the_answer(text, step):
    async with saying(text, step=step) as s:
        whole = (await s.chat(tools=[WEATHER, NOW])).choices[0]
        async with s.client.chat.completions.stream(
            model="counter", messages=CHAT, tools=[WEATHER, NOW]
        ) as stream:
            joined = (await stream.get_final_completion()).choices[0]
        body = {"model": "counter", "messages": CHAT, "tools": [WEATHER, NOW], "stream": True}
        raw = (await s.http.post(PATH, json=body)).text.split("\n\n")
    for event in raw[:-2]:
        ChatCompletionChunk.model_validate_json(event.removeprefix("data: "))
    assert joined.finish_reason == whole.finish_reason
    assert (joined.message.content or None) == (whole.message.content or None)
    joined_calls, calls = joined.message.tool_calls or [], whole.message.tool_calls or []
    assert [(c.function.name, c.function.arguments) for c in joined_calls] == [
        (c.function.name, c.function.arguments) for c in calls
    ]
    assert len({call.id for call in joined_calls}) == len(calls)


async def test_deltas_are_as_openais():
    async with saying(PARIS, step=20) as s:
        stream = await s.chat(tools=[WEATHER], stream=True)
        got = [event.choices[0] async for event in stream]
    assert got[0].delta.role == "assistant"
    parts = [part for one in got for part in one.delta.tool_calls or []]
    assert {part.index for part in parts} == {0}
    assert [part.function.name for part in parts] == ["weather"] + [None] * (len(parts) - 1)
    assert [bool(part.id) for part in parts] == [True] + [False] * (len(parts) - 1)
    assert "".join(part.function.arguments for part in parts) == '{"city": "Paris"}'
    assert [one.finish_reason for one in got if one.finish_reason] == ["tool_calls"]


KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:4"
    '<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>'
    "<|tool_call_begin|>functions.now:5<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>"
)


@pytest.mark.parametrize("step", [3, 1000])
async def test_the_ids_that_a_model_wrote_are_those_of_its_calls(step):
    template = TOOLS_TEMPLATE.replace("<tool_call>", "<|tool_call_begin|>{{ call.id }}:")
    ids = ["functions.weather:4", "functions.now:5"]
    async with saying(KIMI, template, step=step) as s:
        (choice,) = (await s.chat(tools=[WEATHER, NOW])).choices
        stream = await s.chat(tools=[WEATHER, NOW], stream=True)
        parts = [p async for e in stream for p in e.choices[0].delta.tool_calls or []]
        tools = [{"type": "function", **one["function"]} for one in (WEATHER, NOW)]
        response = await s.client.responses.create(model="counter", input="hi", tools=tools)
        results = [{"role": "tool", "tool_call_id": id, "content": "12"} for id in ids]
        await s.chat([*CHAT, choice.message, *results], tools=[WEATHER, NOW])
        prompt = s.engine.calls[-1]["prompt"]
        text = s.engine.model.tokenizer.chat(prompt.messages, prompt.options)
    assert choice.finish_reason == "tool_calls"
    assert shape(choice.message.tool_calls) == [("weather", {"city": "Paris"}), ("now", {})]
    assert [call.id for call in choice.message.tool_calls] == ids
    assert [part.id for part in parts if part.id] == ids
    assert [item.call_id for item in response.output] == ids
    assert all(f"<|tool_call_begin|>{id}:" in text for id in ids)
    assert [one["tool_call_id"] for one in prompt.messages[-2:]] == ids


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        (["f:0", "f:0", "g:0"], ["f:0", "f:1", "g:0"]),
        (["f:4", "f:4", "f:5"], ["f:4", "f:5", "f:6"]),
        (
            ["f:999999999", "f:999999999", "f:999999999"],
            ["f:999999999", "f:1000000000", "f:1000000001"],
        ),
        (["a", "b", ""], ["a", "b", None]),
        (["a", "a", "a"], ["a", None, None]),
    ],
)
@pytest.mark.parametrize("step", [3, 1000])
async def test_no_two_calls_of_a_message_have_one_id(written, wanted, step, monkeypatch):
    """Each of a message's ids that the model wrote twice is made anew, alike in all kinds of
    answers, and whatever other messages have.
    """

    class Writes(PARSERS["hermes"]):
        def begin(self, name, id=""):
            super().begin(name, written[self._num_calls])

    def check(ids):
        assert len(set(ids)) == 3
        assert [want in (None, id) for want, id in zip(wanted, ids, strict=True)] == [True] * 3

    monkeypatch.setitem(PARSERS, "hermes", Writes)
    async with saying(3 * PARIS, step=step, tool_call_parser="hermes") as s:
        got = await s.chat(tools=[WEATHER], n=2)
        stream = await s.chat(tools=[WEATHER], n=2, stream=True)
        events = [(e.choices[0].index, e.choices[0].delta) async for e in stream]
        asked = {
            "model": "counter",
            "input": "hi",
            "tools": [{"type": "function", **WEATHER["function"]}],
        }
        response = await s.client.responses.create(**asked)
        streamed = [e async for e in await s.client.responses.create(**asked, stream=True)]
    for number, choice in enumerate(got.choices):
        check([call.id for call in choice.message.tool_calls])
        parts = [p for at, delta in events if at == number for p in delta.tool_calls or []]
        check([part.id for part in parts if part.id])
    check([item.call_id for item in response.output])
    check([item.call_id for item in streamed[-1].response.output])


async def test_a_call_that_was_cut_off_says_so():
    async with saying(PARIS.rpartition('s"')[0], reason="length") as s:
        got = (await s.chat(tools=[WEATHER])).choices[0]
    assert got.finish_reason == "length"
    assert got.message.tool_calls[0].function.arguments == '{"city": "Pari'


async def test_one_call_at_most_without_parallel_ones():
    async with saying(BOTH + PARIS) as s:
        got = await s.chat(tools=[WEATHER, NOW], parallel_tool_calls=False)
        stream = await s.chat(tools=[WEATHER, NOW], parallel_tool_calls=False, stream=True)
        parts = [p async for e in stream for p in e.choices[0].delta.tool_calls or []]
    assert shape(got.choices[0].message.tool_calls) == [("weather", {"city": "Paris"})]
    assert {part.index for part in parts} == {0}
    assert "".join(part.function.arguments for part in parts) == '{"city": "Paris"}'


async def test_several_answers_each_have_their_calls_and_logprobs():
    async with saying(PARIS) as s:
        got = await s.chat(tools=[WEATHER], n=2, logprobs=True)
    assert [len(choice.message.tool_calls) for choice in got.choices] == [1, 1]
    assert all(len(choice.logprobs.content) == -(-len(PARIS) // 3) for choice in got.choices)


@pytest.mark.parametrize(
    "fields",
    [{"tools": []}, {"tools": None}, {"tools": [WEATHER], "tool_choice": "none"}, {}],
    ids=["empty", "null", "none", "absent"],
)
async def test_without_tools_to_call_the_answer_is_text(fields):
    async with saying(PARIS) as s:
        answer = await s.http.post(PATH, json={"model": "counter", "messages": CHAT, **fields})
        (call,) = s.engine.calls
    (choice,) = answer.json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": PARIS, "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert call["prompt"].options == {}
    assert call["sampling"].skip_special_tokens


def conversation(arguments='{"city": "Paris"}'):
    function = {"name": "weather", "arguments": arguments}
    return [
        *CHAT,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "abcdefghi", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "abcdefghi", "content": [{"type": "text", "text": "12"}]},
    ]


async def test_calls_and_results_reach_the_template():
    async with saying("Fine.") as s:
        got = await s.chat(conversation(), tools=[NOW])
        (call,) = s.engine.calls
        text = s.engine.model.tokenizer.chat(call["prompt"].messages, call["prompt"].options)
    assert got.choices[0].message.content == "Fine."
    assert text == (
        "\x01" + json.dumps([NOW]) + "[user|hi][assistant|<tool_call>"
        '{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>][toolweather|12]'
    )
    answer, result = call["prompt"].messages[1:]
    assert answer["content"] == ""
    assert result["tool_call_id"] == answer["tool_calls"][0]["id"] == "abcdefghi"


async def test_an_answer_goes_back_as_the_client_has_it():
    async with saying(PARIS) as s:
        message = (await s.chat(tools=[WEATHER])).choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "12"}
        async with s.client.chat.completions.stream(
            model="counter", messages=CHAT, tools=[WEATHER]
        ) as stream:
            streamed = (await stream.get_final_completion()).choices[0].message
        streamed = streamed.model_dump(exclude_none=True)  # with `index` and what is parsed
        streamed["tool_calls"][0]["id"] = message.tool_calls[0].id
        for sent in (message, message.model_dump(), streamed):
            await s.chat([*CHAT, sent, result], tools=[WEATHER])
        first, second, third = (call["prompt"] for call in s.engine.calls[2:])
    assert first == second == third
    assert first.messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [("", {}), ("{", "{"), ("[1]", "[1]"), ('{"a": NaN}', '{"a": NaN}'), ("[" * 5000, "[" * 5000)],
    ids=["empty", "cut", "list", "nan", "deep"],
)
async def test_arguments_that_are_no_object_stay_what_the_model_wrote(arguments, wanted):
    async with saying("Fine.") as s:
        await s.chat(conversation(arguments))
        (call,) = s.engine.calls
    (tool_call,) = call["prompt"].messages[1]["tool_calls"]
    assert tool_call["function"]["arguments"] == wanted


async def test_a_template_that_joins_arguments_gets_text_and_one_that_asks_for_null_gets_it():
    template = (
        "{% for m in messages %}{% if m['content'] is not none %}{{ m['content'] }}{% else %}!"
        "{% endif %}{% for tool in m.tool_calls or [] %}"
        "{{ tool['function']['name'] + '\\n' + tool['function']['arguments'] + '.' }}"
        "{% endfor %}{% endfor %}"
    )
    async with saying("Fine.", template) as s:
        await s.chat(conversation())
        (call,) = s.engine.calls
        text = s.engine.model.tokenizer.chat(call["prompt"].messages, call["prompt"].options)
    assert text == 'hi!weather\n{"city": "Paris"}.12'


@pytest.mark.parametrize("template", [TOOLS_TEMPLATE, NO_TOOLS], ids=["tools", "no tools"])
async def test_a_call_that_has_to_be_is_held_to(template):
    named = {"type": "function", "function": {"name": "now"}}
    async with saying(PARIS, template) as s:
        got = await s.chat(tools=[WEATHER, NOW], tool_choice="required")
        await s.chat(tools=[WEATHER, NOW], tool_choice=named)
        either, one = (call["sampling"].structure for call in s.engine.calls)
    assert shape(got.choices[0].message.tool_calls) == [("weather", {"city": "Paris"})]
    assert either.kind is one.kind is StructureKind.GRAMMAR
    assert "weather" in either.text
    assert "now" in either.text
    assert "weather" not in one.text


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_of_allowed_tools_alone_one_is_called_and_all_are_told(mode):
    now = {"type": "function", "function": {"name": "now"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [now]}}
    async with saying("Fine.") as s:
        for choice in (allowed, mode):
            await s.chat(tools=[WEATHER, NOW], tool_choice=choice)
        some, every = s.engine.calls
    assert some["prompt"].options == every["prompt"].options
    texts = [call["sampling"].structure.text for call in (some, every)]
    assert [("weather" in text, "now" in text) for text in texts] == [(False, True), (True, True)]
    assert [text.startswith("start: (free") for text in texts] == [mode == "auto"] * 2


async def test_an_engine_writes_the_call_that_has_to_be():
    """The engine's own admission, masks and text; its runner draws whatever is allowed."""
    days = {"type": "object", "properties": {"days": {"type": "integer", "enum": [3, 14]}}}
    tool = {"type": "function", "function": {"name": "days", "parameters": days | REQUIRED}}
    async with serving_an_engine() as client:
        body = {"model": "bundled", "messages": CHAT, "tools": [tool, NOW], "max_tokens": 100}
        named = {"type": "function", "function": {"name": "days"}}
        got = await client.post(PATH, json=body | {"tool_choice": named})
        bomb = {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}] * 2}}}
        tool["function"]["parameters"] = bomb
        refused = await client.post(PATH, json=body | {"tool_choice": named})
        wrong = {"type": "object", "properties": {"a": {"$ref": "#/x"}}}
        tool["function"]["parameters"] = wrong
        faults = [
            await client.post(PATH, json=body | {"tools": tools} | more)
            for tools, more in (
                ([NOW, tool], {"tool_choice": "required"}),
                ([NOW, tool], {"tool_choice": named, "n": 2, "stream": True}),
            )
        ]
        response = {"model": "bundled", "input": "hi", "tool_choice": "required"}
        flat = {"type": "function", **tool["function"]}
        faults.append(await client.post("/v1/responses", json=response | {"tools": [flat]}))
    (choice,) = got.json()["choices"]
    ((_, arguments),) = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in choice["message"]["tool_calls"]
    ]
    assert arguments["days"] in (3, 14)
    assert choice["finish_reason"] == "tool_calls"
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
    for fault in faults:
        assert (fault.status_code, fault.json()["error"]["param"]) == (400, "tools")
        assert fault.json()["error"]["message"] == (
            "the parameters of the function 'days' cannot be held to: Pointer '/x' does not exist; "
            "mend that schema, or leave out what it says there"
        )


WRONG = [
    ({"tools": [WEATHER, WEATHER]}, "tools", "tools has 'weather' twice"),
    ({"tools": [{"type": "function"}]}, "tools", "tools.0.function is missing"),
    ({"tools": [{"type": "web_search"}]}, "tools", "tools.0.type is 'web_search'"),
    (
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools",
        "tools.0.function.name is 'a b'",
    ),
    ({"tools": [WEATHER] * 129}, "tools", "tools has 129 entries; it must have 128 at most"),
    ({"tool_choice": "required"}, "tool_choice", "asks for a call, and there are no tools"),
    ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice", "it must be none, auto, required"),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice",
        "tool_choice is 'x', which is not among the tools",
    ),
    (
        {
            "tools": [WEATHER],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "x"}}],
                },
            },
        },
        "tool_choice",
        "tool_choice is 'x', which is not among the tools",
    ),
    (
        {
            "tools": [WEATHER],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "any", "tools": [{"type": "function"}]},
            },
        },
        "tool_choice",
        "allowed_tools with a mode (auto, required)",
    ),
    (
        {"tools": [WEATHER], "guided_regex": "a"},
        "guided_regex",
        "guided_regex and tools each say what the answer must be; leave one out, or set",
    ),
    (
        {"tools": [WEATHER], "tool_choice": "required", "ignore_eos": True},
        "ignore_eos",
        "ignore_eos is set beside",
    ),
    (
        {"tools": [WEATHER], "chat_template_kwargs": {"tools": []}},
        "chat_template_kwargs",
        "leave one of them out",
    ),
    (
        {
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "parameters": {"pattern": "x" * 70_000}},
                }
            ],
            "tool_choice": "required",
        },
        "tools",
        "number of characters of a grammar is 7",
    ),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "no tool_call_id"),
    (
        {"messages": [{"role": "user", "content": "x", "tool_call_id": "a"}]},
        "messages",
        "a message of role user has a tool_call_id",
    ),
    (
        {"messages": [conversation()[1] | {"role": "user"}]},
        "messages",
        "a message of role user has tool_calls",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "type": "custom"}]}]},
        "messages",
        "messages.0.tool_calls.0.type is 'custom'",
    ),
]


async def test_what_is_wrong_is_refused_by_name():
    async with saying("") as s:
        for fields, param, said in WRONG:
            body = {"model": "counter", "messages": CHAT, **fields}
            answer = await s.http.post(PATH, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), (fields, error)
            assert said in error["message"], error["message"]


async def test_a_template_without_tools_says_what_to_do():
    unknown = "{{ tools | tojson }}{{ messages[0].content }}"
    async with saying("", NO_TOOLS) as s, saying("", unknown) as other:
        with pytest.raises(openai.BadRequestError, match="has no tools; serve") as refused:
            await s.chat(tools=[WEATHER])
        assert "set tool_choice to required" in str(refused.value)
        with pytest.raises(openai.BadRequestError, match="set tool_call_parser"):
            await other.chat(tools=[WEATHER])


class Shouts:
    """A format of one's own: a line in capitals is a call."""

    def __init__(self, functions, template):
        self.text = ""

    def push(self, text):
        self.text += text
        return []

    def finish(self):
        return [Delta(name=self.text.lower()), Delta(arguments="{}")]

    def grammar(self, names, many, marker):
        return 'start: "NOW"'


async def test_a_parser_by_its_name_and_one_of_ones_own():
    async with saying("[TOOL_CALLS]now[ARGS]{}", tool_call_parser="mistral") as s:
        got = await s.chat(tools=[NOW])
    assert shape(got.choices[0].message.tool_calls) == [("now", {})]
    own = f"{__file__}:Shouts"
    async with saying("NOW", tool_call_parser=own) as s:
        got = await s.chat(tools=[NOW], tool_choice="required")
        (call,) = s.engine.calls
    assert shape(got.choices[0].message.tool_calls) == [("now", {})]
    assert call["sampling"].structure.text == 'start: "NOW"'
    with pytest.raises(ValueError, match=r"tool_call_parser is 'xml'; it must be one of glm45, "):
        async with saying("", tool_call_parser="xml"):
            pass


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=3,
)
_KEYS = ["type", "properties", "required", "$defs", "enum", "x-guidance"]
_PROPERTY = st.dictionaries(st.sampled_from(_KEYS), _JSON | st.just("string"), max_size=3)
_SCHEMAS = st.dictionaries(st.sampled_from(_KEYS), _JSON, max_size=3) | st.fixed_dictionaries(
    {"properties": st.dictionaries(st.text(max_size=3), _PROPERTY, max_size=2)}
)


def _or(wanted):
    return wanted | _JSON


_NAMES = st.sampled_from(["weather", "now", "a.b-c_d"]) | st.text(max_size=5)
_TOOL = st.fixed_dictionaries(
    {
        "type": _or(st.just("function")),
        "function": st.fixed_dictionaries({"name": _NAMES, "parameters": _or(_SCHEMAS)}),
    }
)
_CHOICES = st.sampled_from(
    ["none", "auto", "required", {"type": "function", "function": {"name": "now"}}]
)
_CALL = st.fixed_dictionaries(
    {
        "id": st.text(max_size=3),
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": st.text(), "arguments": st.text()}),
    }
)
_MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"])},
    optional={
        "content": st.none() | st.text(),
        "tool_calls": _or(st.lists(_CALL, max_size=2)),
        "tool_call_id": _or(st.text(max_size=3)),
    },
)
_BODIES = st.fixed_dictionaries(
    {"messages": st.lists(_MESSAGE, min_size=1, max_size=3), "tools": st.lists(_TOOL, max_size=3)},
    optional={"tool_choice": _or(_CHOICES), "parallel_tool_calls": _or(st.booleans())},
)


@pytest.mark.sized(
    deep=("glm47-40-0", "openai-40-0", "ernie45-40-0", "minimax_m2-40-0", "qwen3_xml-40-0")
)
@pytest.mark.sized(exhaustive=[f"{parser}-5000-{part}" for parser in PARSERS for part in range(4)])
@pytest.mark.parametrize(("count", "part"), [(40, 0), *((5_000, part) for part in range(4))])
@pytest.mark.parametrize("parser", PARSERS)
async def test_no_request_is_a_fault_of_the_server(parser, count, part):
    """100,000 requests in all, of which a run has a part."""
    bodies, statuses = [], set()

    @seed(part)
    @settings(max_examples=count, database=None, suppress_health_check=list(HealthCheck))
    @given(body=_BODIES, stream=st.booleans())
    def draw(body, stream):
        bodies.append({"model": "counter", "stream": stream, **body})

    draw()
    async with saying(BOTH, tool_call_parser=parser) as s:
        for body in bodies:
            answer = await s.http.post(PATH, json=body)
            statuses.add(answer.status_code)
            failed = answer.status_code != 400 and '"server_error"' in answer.text
            assert not failed, (body, answer.text)
    assert statuses == {200, 400}
    assert len(bodies) >= count


@pytest.mark.parametrize("line", ["9" * 5000, "0", "7"])
def test_an_error_that_names_no_line_of_the_grammar_is_told_as_it_is(line):
    said = f"it cannot be used: at {line}(1): failed to compile JSON schema: no"
    error = InvalidRequest(said, "structure")
    told = Tools.explained(
        object.__new__(Tools), error, Structure(StructureKind.GRAMMAR, "start: x")
    )
    assert told is error
