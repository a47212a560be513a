"""What of a request reaches the engine, and what is refused: by name, with what would do."""

import json
import re
from dataclasses import replace

import llguidance
import orjson
import pytest
from openai_served import CHAT, serving_http

from serving.config import EngineConfig
from serving.errors import InvalidRequest
from serving.frontend.openai.schemas import MAX_SEQUENCES
from serving.request import Priority, SamplingParams, Structure, StructureKind, guided

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
JSON = Structure(StructureKind.JSON_SCHEMA, orjson.dumps(SCHEMA).decode())

ALL = {
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.1,
    "seed": 11,
    "stop": ["x", "yz"],
    "stop_token_ids": [5],
    "presence_penalty": 0.25,
    "frequency_penalty": -0.25,
    "repetition_penalty": 1.5,
    "logit_bias": {"15": -100, "7": 2.5},
    "ignore_eos": True,
    "skip_special_tokens": False,
    "min_tokens": 2,
    "include_stop_str_in_output": True,
}
PARAMS = SamplingParams(
    max_new_tokens=3,
    temperature=0.5,
    top_p=0.9,
    top_k=7,
    min_p=0.1,
    seed=11,
    stop=("x", "yz"),
    stop_token_ids=(5,),
    presence_penalty=0.25,
    frequency_penalty=-0.25,
    repetition_penalty=1.5,
    logit_bias=((15, -100.0), (7, 2.5)),
    ignore_eos=True,
    skip_special_tokens=False,
    min_new_tokens=2,
    include_stop=True,
)


PROMPTS = {
    "/v1/completions": {"prompt": "ab"},
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/responses": {"input": "hi"},
}


@pytest.mark.parametrize("path", PROMPTS)
async def test_every_sampling_parameter_arrives(path):
    body = {"model": "counter", **PROMPTS[path], **ALL}
    if path == "/v1/responses":
        body["max_output_tokens"] = body.pop("max_tokens")
    async with serving_http() as s:
        answer = await s.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        default = 16 if path == "/v1/completions" else None
        wanted = replace(PARAMS, default_new_tokens=default)
        assert [call["sampling"] for call in s.engine.calls] == [wanted]


async def test_jmoes_own_fields_arrive():
    own = {
        "priority": "best_effort",
        "allow_brownout": False,
        "max_degraded_percent": 20,
        "allow_audit": False,
        "timeout_s": 9.5,
        "request_id": "mine",
    }
    async with serving_http() as s:
        got = await s.complete(extra_body=own)
        await s.complete(stop="x", extra_body={"top_k": -1})
        first, second = s.engine.calls
    assert got.id == "cmpl-mine"
    assert (first["priority"], first["allow_brownout"]) == (Priority.BEST_EFFORT, False)
    assert (first["timeout_s"], first["request_id"]) == (9.5, "mine")
    assert (first["max_degraded_percent"], second["max_degraded_percent"]) == (20, 100)
    assert (first["allow_audit"], second["allow_audit"]) == (False, True)
    assert second["timeout_s"] is None  # the engine's own counts then
    assert (second["sampling"].stop, second["sampling"].top_k) == (("x",), 0)


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({"response_format": {"type": "text"}}, None),
        (
            {"response_format": {"type": "json_object"}},
            Structure(StructureKind.JSON_SCHEMA, '{"type":"object"}'),
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": False},
                }
            },
            JSON,
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            Structure(
                StructureKind.JSON_SCHEMA, orjson.dumps(guided(SCHEMA, strict=True)).decode()
            ),
        ),
        ({"guided_json": SCHEMA}, JSON),
        ({"guided_json": JSON.text}, JSON),
        ({"guided_regex": "[0-9]+"}, Structure(StructureKind.REGEX, "[0-9]+")),
        ({"guided_grammar": "start: /a/"}, Structure(StructureKind.GRAMMAR, "start: /a/")),
        ({"guided_choice": ["yes", "no."]}, Structure(StructureKind.REGEX, r"yes|no\.")),
        ({"structured_outputs": {"json": SCHEMA}}, JSON),
        ({"structured_outputs": {"regex": "a*"}}, Structure(StructureKind.REGEX, "a*")),
        ({"structured_outputs": {"choice": ["a|b"]}}, Structure(StructureKind.REGEX, r"a\|b")),
        (
            {"structured_outputs": {"grammar": "start: /a/"}},
            Structure(StructureKind.GRAMMAR, "start: /a/"),
        ),
    ],
)
async def test_structures_arrive(fields, want):
    async with serving_http() as s:
        for call in (s.complete, s.chat):
            await call(extra_body=fields)
        assert [call["sampling"].structure for call in s.engine.calls] == [want, want]


def test_a_choice_matches_its_texts_alone():
    texts = ["yes", "no", "a+b (c) [d] {e} ^$ .*\\", "x|y", "-&~# /", "é\n"]
    pattern = Structure.one_of(texts).text
    for text in texts:
        assert re.fullmatch(pattern, text)
        assert not re.fullmatch(pattern, text + "s")
    assert not llguidance.LLMatcher.validate_grammar(llguidance.grammar_from("regex", pattern))
    with pytest.raises(InvalidRequest, match="empty text"):
        Structure.one_of(["a", ""])


WRONG = [
    ({"prompt": None}, "prompt", "text, a list of token ids"),
    ({"prompt": []}, "prompt", "each prompt must have"),
    ({"prompt": ["a", ""]}, "prompt", "each prompt must have"),
    ({"prompt": [1, "a"]}, "prompt", "text, a list of token ids"),
    ({"prompt": [1.5]}, "prompt", "text, a list of token ids"),
    ({"model": 5}, "model", "a valid string"),
    ({"model": ""}, "model", "model is ''; it must not be empty"),
    ({"request_id": ""}, "request_id", "request_id is ''; it must match ^[!-~]{1,128}$"),
    ({"guided_choice": []}, "guided_choice", "guided_choice is []; it must not be empty"),
    ({"response_format": "json"}, "response_format", "is 'json'; it must be an object"),
    ({"logit_bias": [1]}, "logit_bias", "logit_bias is [1]; it must be an object"),
    ({"top_k": 2**31}, "top_k", "top_k is 2147483648; it must be a whole number up to 2147483647"),
    ({"max_tokens": "5"}, "max_tokens", "a valid integer"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens is 0; it must be at least 1, or 0 with echo"),
    ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens", "min_tokens is 1"),
    ({"temperature": True}, "temperature", "a valid number"),
    ({"n": 0}, "n", "n is 0"),
    ({"n": MAX_SEQUENCES + 1}, "n", "n is 65"),
    ({"prompt": ["a"] * 33, "n": 2}, "prompt", "33 prompts times n 2 make 66 answers"),
    ({"best_of": 3}, "best_of", "best_of is 3 and n 1"),
    ({"logprobs": 21}, "logprobs", "logprobs is 21"),
    ({"echo": True, "logprobs": 6}, "logprobs", "logprobs is 6 with echo; the prompt's positions"),
    ({"stop": 5}, "stop", "stop is 5; it must be a string or a list of strings"),
    ({"stop": [5]}, "stop", "stop is 5; it must be a string or a list of strings"),
    ({"stop": ["x"] * 5000}, "stop", "'stop' has 5000 entries; this server takes 64 at most"),
    ({"stop_token_ids": [1] * 5000}, "stop_token_ids", "5000 entries; this server takes 1024 at"),
    ({"prompt": ["a"] * 5000}, "prompt", "'prompt' has 5000 entries; this server takes 64 at"),
    ({"prompt": [1] * 5000}, "prompt", "the prompt has 5000 tokens; the context length is 64"),
    ({"prompt": [[1], [1] * 65], "echo": True}, "prompt", "prompt[1]: the prompt has 65 tokens"),
    ({"prompt": [[1] * 65], "echo": True}, "prompt", "the prompt has 65 tokens"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "keys must be token ids"),
    ({"logit_bias": {"1": "1"}}, "logit_bias", "must be a number between -100 and 100"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "logit_bias of 1 is 101"),
    ({"logit_bias": {"1": 10**400}}, "logit_bias", "logit_bias of 1 is 1000"),
    ({"max_tokens": 10**400}, "max_tokens", "it must be a whole number"),
    *(({name: 10**400}, name, f"{name} is ") for name in ("seed", "timeout_s")),
    ({"temperature": 10**400}, "temperature", "temperature is "),
    ({"suffix": "x"}, "suffix", "suffix is not supported: "),
    ({"stream_options": {"include_usage": True}}, "stream_options", "set stream to true"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options", "stream_options.'x' is not"),
    ({"max_token": 5}, "max_token", "'max_token' is not known; did you mean max_tokens?"),
    ({"timeout_s": 0}, "timeout_s", "timeout_s is 0"),
    ({"request_id": "a b"}, "request_id", "request_id is 'a b'"),
    ({"guided_regex": "a", "guided_json": {}}, None, "guided_json and guided_regex each say"),
    ({"guided_regex": ""}, "guided_regex", "guided_regex is empty"),
    ({"structured_outputs": {}}, "structured_outputs", "one of json, regex, choice, grammar"),
    ({"response_format": {"type": "xml"}}, "response_format", "response_format.type is 'xml'"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "no json_schema"),
    ({"store": True}, "store", "'store' is not known"),
    ({"prompt": ["a"] * 65}, "prompt", "prompt has 65 entries; one call takes 64 at most"),
    ({"prompt": [[1]] * 65}, "prompt", "prompt has 65 entries; one call takes 64 at most"),
    ({"length_penalty": 2}, "length_penalty", "length_penalty is 2; it must be 1.0: it is of beam"),
    ({"prompt_logprobs": 1}, "prompt_logprobs", "must be null: /v1/completions gives"),
    ({"bad_words": ["a"]}, "bad_words", "must be []: send logit_bias"),
    ({"priority": 1}, "priority", "it must be 'latency_sensitive' or 'best_effort'"),
    ({"priority": False}, "priority", "it must be 'latency_sensitive' or 'best_effort'"),
    ({"max_output_tokens": 5}, "max_output_tokens", "did you mean max_tokens?"),
    ({"thinking_token_budget": 5}, "thinking_token_budget", "docs/http.md lists what there is"),
    # Fields of other endpoints, which are like some of this one's and mean something else.
    ({"reasoning_effort": "low"}, "reasoning_effort", "docs/http.md lists what there is"),
    ({"instructions": "x"}, "instructions", "docs/http.md lists what there is"),
    ({"structured_outputs": {"guided_choice": []}}, "structured_outputs", "mean choice?"),
]
TEXT = {"type": "text", "text": "a"}
NOW = {"type": "function", "function": {"name": "now"}}
WRONG_CHATS = [
    ({"messages": "hi"}, "messages", "a valid list"),
    ({"messages": [{"role": "bot", "content": "x"}]}, "messages", "messages.0.role is 'bot'"),
    ({"messages": [{"content": "x"}]}, "messages", "messages.0.role is missing"),
    ({"messages": []}, "messages", "messages is []; it must not be empty"),
    (
        {"messages": [{"role": "user", "content": [TEXT, {"type": "image_url"}]}]},
        "messages",
        "messages.0.content.1.type is 'image_url'; it must be 'text'",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages",
        "messages.0.content.0.text is missing",
    ),
    (
        {"messages": [{"role": "user", "content": 5}]},
        "messages",
        "messages.0.content is 5; it must be text, or a list of parts",
    ),
    (
        {"messages": [{"role": "user", "content": [TEXT | {"x": 1}]}]},
        "messages",
        "messages.0.content.0.'x' is not known",
    ),
    (
        {"messages": [{"role": "user", "content": ["a"]}]},
        "messages",
        "messages.0.content.0 is 'a'; it must be an object",
    ),
    ({"tools": ["f"]}, "tools", "tools.0 is 'f'; it must be an object"),
    ({"tools": [NOW] * 129}, "tools", "tools has 129 entries; it must have 128 at most"),
    ({"functions": [{"name": "f"}]}, "functions", "functions is not supported: "),
    ({"max_tokens": 0}, "max_tokens", "max_tokens is 0"),
    (
        {"messages": [{"role": "user", "content": "a", "refusal": "no"}]},
        "messages",
        "a message of role user has a refusal",
    ),
    ({"service_tier": "best"}, "service_tier", "service_tier is 'best'; it must be 'auto', "),
    ({"modalities": ["audio"]}, "modalities", "a list with `text` alone"),
    ({"top_logprobs": 2}, "top_logprobs", "set logprobs to true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs is 21"),
]


AS_JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("name", ["response_format", "guided_json", "chat_template_kwargs"])
async def test_what_is_nested_too_deep_is_refused(name):
    """Within 200 levels it is taken, and beyond them it is nobody's fault but the caller's."""
    async with serving_http() as s:
        for depth in (190, 230, 254, 255, 900, 5000):
            value = b'{"a":' * depth + b"1" + b"}" * depth
            if name == "response_format":
                value = b'{"type":"json_schema","json_schema":{"name":"a","schema":%b}}' % value
            body = json.dumps({"model": "counter", "messages": CHAT, "max_tokens": 1})
            sent = body[:-1].encode() + b',"%b":%b}' % (name.encode(), value)
            answer = await s.http.post("/v1/chat/completions", content=sent, headers=AS_JSON)
            assert answer.status_code == (200 if depth == 190 else 400), (depth, answer.text)
            if depth > 190:
                assert "recursion limit exceeded" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b'{"model":"counter","prompt":"a","max_tokens":1,"max_tokens":9}', '"max_tokens"'),
        (b'{"model":"counter","prompt":"a","logit_bias":{"1":2,"\\u0031":3}}', '"1"'),
    ],
)
async def test_a_key_given_twice_is_refused(sent, message):
    async with serving_http() as s:
        answer = await s.http.post("/v1/completions", content=sent, headers=AS_JSON)
        assert answer.status_code == 400
        assert f"duplicate key {message}" in answer.json()["error"]["message"]
        assert not s.engine.calls


async def test_a_schema_with_a_number_that_is_none_is_refused():
    async with serving_http() as s:
        sent = b'{"model":"counter","prompt":"a","guided_json":{"maximum":1e999}}'
        answer = await s.http.post("/v1/completions", content=sent, headers=AS_JSON)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "guided_json")
        sent = sent.replace(b"1e999", b"1%b" % (b"0" * 40))
        answer = await s.http.post("/v1/completions", content=sent, headers=AS_JSON)
        assert answer.status_code == 200


async def assert_refused(s, path, body, param, message):
    answer = await s.http.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert message in error["message"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert not s.engine.calls


@pytest.mark.parametrize(("fields", "param", "message"), WRONG, ids=[str(w[0])[:40] for w in WRONG])
async def test_wrong_completions_are_refused(fields, param, message):
    async with serving_http() as s:
        body = {"model": "counter", "prompt": "ab", **fields}
        await assert_refused(s, "/v1/completions", body, param, message)


@pytest.mark.parametrize(
    ("fields", "param", "message"), WRONG_CHATS, ids=[str(w[0])[:40] for w in WRONG_CHATS]
)
async def test_wrong_chats_are_refused(fields, param, message):
    async with serving_http() as s:
        body = {"model": "counter", "messages": CHAT, **fields}
        await assert_refused(s, "/v1/chat/completions", body, param, message)


async def test_null_is_absent():
    async with serving_http() as s:
        schema = (await s.http.get("/openapi.json")).json()["components"]["schemas"]
        for path, name, required in (
            ("/v1/completions", "CompletionRequest", {"model": "counter", "prompt": "ab"}),
            ("/v1/chat/completions", "ChatRequest", {"model": "counter", "messages": CHAT}),
        ):
            absent = dict.fromkeys(schema[name]["properties"]) | required
            answer = await s.http.post(path, json=absent)
            assert answer.status_code == 200, answer.text


async def test_values_without_effect_are_taken():
    """What clients of vLLM send without being asked to; null is absent whatever its name is."""
    async with serving_http() as s:
        schemas = (await s.http.get("/openapi.json")).json()["components"]["schemas"]
        for path, name, required in (
            ("/v1/completions", "CompletionRequest", {"prompt": "ab", "priority": 0}),
            ("/v1/chat/completions", "ChatRequest", {"messages": CHAT, "priority": 0}),
            ("/v1/responses", "ResponsesRequest", {"input": "ab", "priority": 0}),
            ("/tokenize", "TokenizeRequest", {"messages": CHAT}),
        ):
            found = schemas[name]["properties"].items()
            given = {one: field["x-value"] for one, field in found if "x-value" in field}
            assert given
            body = {"model": "counter", **required, **given, "no_field_of_any_api": None}
            answer = await s.http.post(path, json=body)
            assert answer.status_code == 200, answer.text
        assert all(call["priority"] is Priority.LATENCY_SENSITIVE for call in s.engine.calls)


@pytest.mark.parametrize(
    ("text", "last", "kept"),
    [
        ("0123[xab]cd", 3, "]cd"),
        ("0123[xab]cd", 1, "d"),
        ("0123[xabcd", -1, "[xabcd"),  # what fits beside four new ones
        ("abcd", 6, "abcd"),
    ],
)
async def test_of_a_long_prompt_the_last_tokens_are_kept(text, last, kept):
    chat = "\x01[user|hi]"
    async with serving_http(engine=EngineConfig(max_model_len=10)) as s:
        for prompt in (text, [ord(c) for c in text]):
            fields = {"prompt": prompt, "max_tokens": 4, "truncate_prompt_tokens": last}
            answer = await s.post(**fields, echo=True)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"].startswith(kept)
        await s.chat(max_tokens=4, extra_body={"truncate_prompt_tokens": last})
        refused = await s.post(truncate_prompt_tokens=0)
        *texts, call = s.engine.calls
    whole = text == kept
    assert [one["prompt"] for one in texts] == [
        kept if whole else [ord(c) for c in kept],
        [ord(c) for c in kept],
    ]
    assert call["prompt"] == [ord(c) for c in chat[-(last if last > 0 else 6) :]]
    assert refused.json()["error"]["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body cannot be read"),
        (b"{", "the body cannot be read"),
        (b"[]", "the body is a JSON list"),
        (b"null", "the body is null"),
        (b"1e3", "the body is a JSON number"),
        (b'"x"', "the body is a JSON string"),
        (b'{"model": "\xff"}', "the body cannot be read"),
        (b'{"model": NaN}', "the body cannot be read"),
        (b"[" * 100_000, "the body cannot be read"),
        (b'{"model": "counter"}', "prompt is missing"),
        (b"{" + b",".join(b'"%d":1' % i for i in range(4000)) + b"}", "prompt is missing"),
        (
            b'{"model":"counter","prompt":"a",'
            + b",".join(b'"x%d":1' % i for i in range(4000))
            + b"}",
            "'x0' is not known",
        ),
    ],
    ids=range(12),
)
async def test_bodies_that_are_none(body, message):
    async with serving_http() as s:
        answer = await s.http.post(
            "/v1/completions", content=body, headers={"content-type": "application/json"}
        )
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert len(answer.content) < 1500


@pytest.mark.parametrize("model", [{}, {"model": None}, {"model": "counter"}], ids=str)
async def test_without_a_model_the_first_answers(model):
    body = model | {"prompt": "ab", "max_tokens": 1}
    async with serving_http() as s:
        answer = await s.http.post("/v1/completions", json=body)
        streamed = await s.http.post("/v1/completions", json=body | {"stream": True})
        empty = await s.http.post("/v1/completions", json=body | {"model": ""})
    assert answer.json()["model"] == "counter"
    assert '"model":"counter"' in streamed.text.replace(" ", "")
    assert empty.status_code == 400
