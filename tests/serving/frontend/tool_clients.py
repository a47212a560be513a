"""Loops of tools as users of each client write them, against a server. Prints what came as JSON.

Run by test_openai_clients.py in an environment of its own, as `python tool_clients.py CLIENT URL`.
The loop has three turns: two calls at once, then one, then a text.
"""

import asyncio
import json
import sys

QUESTION = "Is it cold in Paris and Rome?"
asked = []


def temperature(city: str) -> str:
    """Returns the temperature in a city."""
    asked.append(["temperature", city])
    return {"Paris": "12", "Rome": "21"}[city]


def unit() -> str:
    """Returns the unit of temperatures."""
    asked.append(["unit"])
    return "C"


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NOTHING = {"type": "object", "properties": {}}
FUNCTIONS = {"temperature": (temperature, CITY), "unit": (unit, NOTHING)}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, (_, schema) in FUNCTIONS.items()
]


def called(name, arguments):
    return FUNCTIONS[name][0](**json.loads(arguments))


def chat_loop(create):
    """Runs the loop by a function with the signature of OpenAI's `chat.completions.create`."""
    messages = [{"role": "user", "content": QUESTION}]
    while True:
        got = create(model="counter", messages=messages, tools=TOOLS).choices[0]
        messages.append(got.message.model_dump(exclude_none=True))
        if got.finish_reason != "tool_calls":
            return got.message.content
        for call in got.message.tool_calls:
            result = called(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def with_openai(url):
    import openai

    client = openai.OpenAI(base_url=url, api_key="any")

    def streamed(**given):
        with client.chat.completions.stream(**given) as stream:
            return stream.get_final_completion()

    texts = [chat_loop(create) for create in (client.chat.completions.create, streamed)]
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    for is_streamed in (False, True):
        items = [{"role": "user", "content": QUESTION}]
        while True:
            given = {"model": "counter", "input": items, "tools": tools}
            if is_streamed:
                with client.responses.stream(**given) as stream:
                    got = stream.get_final_response()
            else:
                got = client.responses.create(**given)
            items += [item.to_dict() for item in got.output]
            calls = [item for item in got.output if item.type == "function_call"]
            for call in calls:
                result = called(call.name, call.arguments)
                items.append(
                    {"type": "function_call_output", "call_id": call.call_id, "output": result}
                )
            if not calls:
                texts.append(got.output_text)
                break
    return texts


def with_litellm(url):
    import litellm

    def create(model, **given):
        return litellm.completion(f"openai/{model}", api_base=url, api_key="any", **given)

    return [chat_loop(create)]


def with_langchain(url):
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    texts, tools = [], {name: tool(call) for name, (call, _) in FUNCTIONS.items()}
    for uses_responses in (False, True):
        model = ChatOpenAI(
            model="counter", base_url=url, api_key="any", use_responses_api=uses_responses
        ).bind_tools(list(tools.values()))
        for is_streamed in (False, True):
            messages = [HumanMessage(QUESTION)]
            while True:
                if is_streamed:
                    got, *more = model.stream(messages)
                    for chunk in more:
                        got += chunk
                else:
                    got = model.invoke(messages)
                messages.append(got)
                messages += [tools[call["name"]].invoke(call) for call in got.tool_calls]
                if not got.tool_calls:
                    texts.append(got.text if isinstance(got.text, str) else got.text())
                    break
    return texts


def with_agents(url):
    import agents
    import openai

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=url, api_key="any")
    tools = [agents.function_tool(call) for call, _ in FUNCTIONS.values()]
    texts = []

    async def run():
        for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
            model = kind(model="counter", openai_client=client)
            agent = agents.Agent("Weather", instructions="Be short.", tools=tools, model=model)
            texts.append((await agents.Runner.run(agent, QUESTION)).final_output)
            streamed = agents.Runner.run_streamed(agent, QUESTION)
            async for _ in streamed.stream_events():
                pass
            texts.append(streamed.final_output)

    asyncio.run(run())
    return texts


def with_instructor(url):
    import instructor
    import openai
    from pydantic import BaseModel

    class Weather(BaseModel):
        """What an answer has to be."""

        city: str
        degrees: int

    modes = instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.RESPONSES_TOOLS
    found = []
    for mode in modes:
        client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="any"), mode=mode)
        got = client.chat.completions.create(
            model="counter",
            messages=[{"role": "user", "content": QUESTION}],
            response_model=Weather,
            max_retries=0,
        )
        found.append(got.model_dump())
    return found


if __name__ == "__main__":
    _, client, url = sys.argv
    texts = globals()[f"with_{client}"](url)
    print(json.dumps({"texts": texts, "asked": asked}))
