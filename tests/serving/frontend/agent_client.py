"""An agent of Pydantic AI, as its users write one, against a server. Prints its answers as JSON.

Run by test_openai_agent.py in an environment of its own: `python agent_client.py BASE_URL`, or with
`tools` behind that.
"""

import asyncio
import json
import sys

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Weather(BaseModel):
    """What an answer has to be."""

    city: str
    degrees: int


async def call_tools(model):
    agent = Agent(model)
    asked = []

    @agent.tool_plain
    def temperature(city: str) -> int:
        """Returns the temperature in a city."""
        asked.append(city)
        return 12

    whole = await agent.run("Is it cold in Paris?")
    async with agent.run_stream("Is it cold in Paris?") as stream:
        streamed = await stream.get_output()
    wanted = await Agent(model, output_type=Weather).run("What is the weather?")
    return {
        "outputs": [whole.output, streamed],
        "asked": asked,
        "weather": wanted.output.model_dump(),
    }


async def main():
    provider = OpenAIProvider(base_url=sys.argv[1], api_key="any")
    model = OpenAIChatModel("counter", provider=provider)
    if "tools" in sys.argv:
        print(json.dumps(await call_tools(model)))
        return
    agent = Agent(
        model,
        instructions="Count on.",
        model_settings={"max_tokens": 4, "temperature": 0},
    )
    first = await agent.run("hi")
    second = await agent.run("more", message_history=first.all_messages())
    async with agent.run_stream("hi") as stream:
        streamed = await stream.get_output()
    told = {
        "outputs": [first.output, second.output, streamed],
        "tokens": [first.usage.input_tokens, first.usage.output_tokens],
    }
    print(json.dumps(told))


if __name__ == "__main__":
    asyncio.run(main())
