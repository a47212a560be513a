"""The bundled family's `caller` behind a real server: OpenAI's own client, unmodified."""

import asyncio
import json
import random

import openai
import pytest
from jsonschema import validate
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from openai_served import NO_CERTIFICATES
from served import Setup

from serving.config import BrownoutConfig, EngineConfig, ServerConfig
from serving.engine import Engine
from training.family import make
from training.family.calls import CALLER, call_chat

pytestmark = [pytest.mark.deep, pytest.mark.usefixtures("compiled_in_a_hurry")]

CHATS = 24
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Returns the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


async def test_a_client_gets_calls_tells_what_they_return_and_gets_text(tmp_path, monkeypatch):
    monkeypatch.setattr(make, "VARIANTS", (CALLER,))  # nobody asks the others
    make.restore(tmp_path)
    config = EngineConfig(
        models=tuple(f"{name}={tmp_path / name}" for name in ("base", "caller")),
        max_model_len=256,
        max_num_seqs=8,
        decode_buckets=(8,),
        max_prefill_tokens=256,
        prefill_buckets=(256,),
        threshold_buckets_percent=(100,),
        mixed_models=0,
        brownout=BrownoutConfig(salc=False),  # right answers are those of the exact model
        compilation_cache=str(tmp_path / "programs"),
    )
    engine = await Engine.start(config, progress=lambda *_: None)
    rng = random.Random("held out")
    chats = [call_chat(rng, "eval") for _ in range(CHATS)]
    async with (
        Setup(ServerConfig(port=0, engine=config)) as s,
        AsyncOpenAI(
            base_url=f"http://{s.web.address}/v1",
            api_key="any",
            max_retries=0,
            timeout=300,
            http_client=DefaultAsyncHttpxClient(verify=NO_CERTIFICATES),
        ) as client,
    ):
        await s.server.attach(engine)

        async def ask(messages, tools, **given):
            given = {"model": "caller", "temperature": 0, "max_tokens": 80, **given}
            got = await client.chat.completions.create(messages=messages, tools=tools, **given)
            return got.choices[0]

        # The example of the docs, in two turns.
        messages = [{"role": "user", "content": "What is the weather in Paris?"}]
        first = await ask(messages, [WEATHER])
        (call,) = first.message.tool_calls
        assert first.finish_reason == "tool_calls"
        assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Paris"}')
        messages.append(first.message)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "21"})
        second = await ask(messages, [WEATHER])
        assert (second.message.content, second.message.tool_calls) == ("It is 21.", None)

        async with client.chat.completions.stream(
            model="caller", messages=messages[:1], tools=[WEATHER], temperature=0
        ) as stream:
            streamed = (await stream.get_final_completion()).choices[0].message
        assert [one.function.arguments for one in streamed.tool_calls] == ['{"city": "Paris"}']

        async def is_right(chat):
            messages = json.loads(json.dumps(chat.messages))
            for call in messages[1]["tool_calls"] if len(messages) > 1 else ():
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
            message = (await ask(messages, chat.tools)).message
            schemas = {one["function"]["name"]: one["function"]["parameters"] for one in chat.tools}
            written = message.content or ""
            for call in message.tool_calls or ():
                validate(json.loads(call.function.arguments), schemas[call.function.name])
                written += f"[TOOL_CALLS]{call.function.name}[ARGS]{call.function.arguments}"
            return written.strip() == chat.answer.strip()

        right = await asyncio.gather(*map(is_right, chats))
        calls = [ok for ok, chat in zip(right, chats, strict=True) if chat.family == "call"]
        assert len(calls) > CHATS // 3
        print(f"{sum(calls)} of {len(calls)} calls, {sum(right)} of {len(right)} answers")
        assert sum(calls) > 0.7 * len(calls)

        with pytest.raises(openai.BadRequestError, match="has no tools"):
            await ask(messages[:1], [WEATHER], model="base")
