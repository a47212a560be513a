"""Texts and chats in token ids, and back, over a real socket; the tokens are characters."""

import pytest
from counting import counting_engine, model_with
from keyed import KeysFile
from openai_served import CHAT, TEMPLATE, TOOLS_TEMPLATE, HttpSetup, serving_http
from tokenizers_of_kinds import characters

from serving.config import ServerConfig
from serving.frontend.openai.answers import Detokenized, Tokenized
from serving.request import Priority

TOOL = {"type": "function", "function": {"name": "look"}}


async def ask(s, path, **fields):
    return await s.http.post(path, json={"model": "counter", **fields})


async def test_a_text_is_its_tokens_and_they_are_the_text():
    async with serving_http() as s:
        whole = (await ask(s, "/tokenize", prompt="añ", return_token_strs=True)).json()
        bare = (await ask(s, "/tokenize", prompt="añ", add_special_tokens=False)).json()
        back = (await ask(s, "/detokenize", tokens=whole["tokens"])).json()
    assert whole == {
        "count": 3,
        "max_model_len": 64,
        "tokens": [1, 97, 241],
        "token_strs": ["\x01", "a", "ñ"],
    }
    assert (bare["count"], bare["tokens"], bare["token_strs"]) == (2, [97, 241], None)
    assert back == {"prompt": "\x01añ"}
    Tokenized.model_validate(whole)
    Detokenized.model_validate(back)


async def test_a_chat_is_tokenized_as_its_template_writes_it():
    async with serving_http() as s:
        options = {"chat_template_kwargs": {"closing": "!"}}
        told = (await ask(s, "/tokenize", messages=CHAT, **options)).json()
    assert "".join(map(chr, told["tokens"])) == "\x01[user|hi]!"
    async with serving_http(TOOLS_TEMPLATE) as s:
        told = (await ask(s, "/tokenize", messages=CHAT, tools=[TOOL])).json()
    assert '"name": "look"' in "".join(map(chr, told["tokens"]))


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        ("/tokenize", {}, "prompt", "send one of them"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, "prompt", "send one of them"),
        ("/tokenize", {"prompt": 5}, "prompt", "it must be a valid string"),
        ("/tokenize", {"prompt": "a", "add_specials": True}, "add_specials", "did you mean add_sp"),
        ("/tokenize", {"messages": []}, "messages", "must not be empty"),
        ("/tokenize", {"prompt": "a", "tools": [TOOL]}, "tools", "go with messages"),
        (
            "/tokenize",
            {"prompt": "a", "chat_template_kwargs": {}},
            "chat_template_kwargs",
            "go with messages",
        ),
        (
            "/tokenize",
            {"messages": CHAT, "add_special_tokens": False},
            "add_special_tokens",
            "goes with a prompt",
        ),
        ("/tokenize", {"messages": CHAT, "tools": [TOOL]}, "tools", "template has no tools"),
        ("/detokenize", {}, "tokens", "tokens is missing"),
        ("/detokenize", {"tokens": ["a"]}, "tokens", "valid integer"),
        ("/detokenize", {"tokens": [5, 256]}, "tokens", "has 256, which is no token of this model"),
        ("/detokenize", {"tokens": [-1]}, "tokens", "has -1, which is no token"),
        ("/detokenize", {"tokens": [2**70]}, "tokens", "no token of this model"),
        ("/detokenize", {"tokens": [5] * 5000}, "tokens", "at most"),
    ],
)
async def test_what_is_wrong_is_named(path, fields, param, message):
    async with serving_http() as s:
        answer = await ask(s, path, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], message in error["message"]) == (param, True), error


async def test_an_unknown_model_is_not_found():
    async with serving_http() as s:
        answer = await ask(s, "/tokenize", model="nobody", prompt="a")
    assert answer.status_code == 404


async def test_a_model_without_a_tokenizer_says_so():
    async with serving_http() as s:
        s.engine.model.tokenizer = None
        answer = await ask(s, "/tokenize", prompt="a")
    assert answer.status_code == 400
    assert "has no tokenizer" in answer.json()["error"]["message"]


async def test_an_engine_tokenizes_as_it_does_to_generate():
    async with HttpSetup(ServerConfig(port=0)) as s:
        s.engine = counting_engine(model=model_with(characters(TEMPLATE)))
        await s.ready()
        for fields in ({"prompt": "ab"}, {"messages": CHAT}):
            told = (await ask(s, "/tokenize", **fields)).json()
            path = "/v1/completions" if "prompt" in fields else "/v1/chat/completions"
            answer = (await ask(s, path, max_tokens=1, **fields)).json()
            assert told["count"] == answer["usage"]["prompt_tokens"] > 2
        bare = (await ask(s, "/tokenize", prompt="ab", add_special_tokens=False)).json()
        too_long = await ask(s, "/tokenize", prompt="a" * 100_000)
    assert bare["tokens"] == [97, 98]
    assert too_long.status_code == 400


async def test_calls_count_towards_a_keys_limits_as_completions_do(tmp_path):
    keys = KeysFile(
        tmp_path / "keys.yaml",
        few={"requests_per_min": 2},
        short={"tokens_per_min": 5},
        other={"models": ("another",)},
        batch={"classes": (Priority.BEST_EFFORT,)},
    )
    async with serving_http(keys_file=str(keys.path)) as s:

        async def status(name, path="/tokenize", **fields):
            heads = {"authorization": f"Bearer {keys.text(name)}"}
            body = {"model": "counter", **(fields or {"prompt": "ab"})}
            answer = await s.http.post(path, json=body, headers=heads)
            return answer.status_code

        assert [await status("few") for _ in range(3)] == [200, 200, 429]
        assert await status("few", "/v1/completions", prompt="a", max_tokens=1) == 429
        tokens = [97] * 9
        assert await status("short", "/detokenize", tokens=tokens) == 200
        assert await status("short", "/detokenize", tokens=tokens) == 429
        assert await status("other") == 403
        assert await status("batch") == 200  # it generates nothing, in no class
        callers = s.server.access.callers
        assert (callers["few"].num_requests, callers["few"].num_running) == (2, 0)
        assert callers["short"].num_tokens == 9
