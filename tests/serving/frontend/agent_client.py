"""An agent of Pydantic AI, as its users write one, against a server. Prints its answers as JSON.

Run by test_openai_agent.py in an environment of its own: `python agent_client.py BASE_URL`.
"""

import asyncio
import json
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


async def main():
    provider = OpenAIProvider(base_url=sys.argv[1], api_key="any")
    agent = Agent(
        OpenAIChatModel("counter", provider=provider),
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
