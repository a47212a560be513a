"""An agent framework's own client, unmodified, in an environment of its own."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from openai_served import saying, serving_http

from serving.config import EngineConfig
from serving.request import Chat

pytestmark = pytest.mark.deep

AGENTS = "pydantic-ai-slim[openai]==2.68.0"
OWN_PACKAGES = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "jmoe-tests"


@pytest.fixture(scope="module")
def python():
    """Returns the environment's interpreter; the environment is made once."""
    folder = CACHE / AGENTS.replace("[", "-").replace("]", "")
    found, done = folder / "bin" / "python", folder / "made"
    if not done.exists():
        for command in (
            [sys.executable, "-m", "venv", "--clear", folder],
            [found, "-m", "pip", "install", "--quiet", AGENTS],
        ):
            made = subprocess.run(
                command, capture_output=True, text=True, timeout=500, env=OWN_PACKAGES
            )
            if made.returncode:
                pytest.skip(f"{AGENTS} cannot be installed here: {made.stderr[-300:]}")
        done.touch()
    return found


async def told(python, s, *arguments):
    """Returns what the agent prints."""
    script = Path(__file__).with_name("agent_client.py")
    process = await asyncio.create_subprocess_exec(
        *(python, script, f"http://{s.address}/v1", *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=script.parent,
        env=OWN_PACKAGES,
    )
    printed, failed = await process.communicate()
    assert process.returncode == 0, failed.decode()[-2000:]
    return json.loads(printed)


@pytest.mark.timeout(900)
async def test_an_agent_talks_with_the_server(python):
    async with serving_http(engine=EngineConfig(max_model_len=256)) as s:
        got = await told(python, s)
        prompts = [call["prompt"] for call in s.engine.calls]
    system, user = {"role": "system", "content": "Count on."}, {"role": "user", "content": "hi"}
    answer, more = {"role": "assistant", "content": "^_`a"}, {"role": "user", "content": "more"}
    assert got["outputs"] == ["^_`a"] * 3  # behind the `]` of the template
    assert prompts == [
        Chat([system, user]),
        Chat([system, user, answer, more]),
        Chat([system, user]),
    ]
    assert got["tokens"] == [len("\x01[system|Count on.][user|hi]"), 4]


def said(prompt):
    """Returns a call of the one tool, and behind its result a text."""
    *_, last = prompt.messages
    if last["role"] == "tool":
        return f"It has {last['content']} degrees."
    (tool,) = prompt.options["tools"]
    arguments = {"city": "Paris", "degrees": 12}
    known = tool["function"]["parameters"]["properties"]
    call = {"name": tool["function"]["name"], "arguments": {key: arguments[key] for key in known}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


@pytest.mark.timeout(900)
async def test_an_agent_calls_its_tools(python):
    async with saying(said) as s:
        got = await told(python, s, "tools")
        found = [call["sampling"].structure.text for call in s.engine.calls]
        forced = [text.split()[:2] == ["start:", "call"] for text in found]
    assert got["outputs"] == ["It has 12 degrees."] * 2
    assert got["asked"] == ["Paris"] * 2
    assert got["weather"] == {"city": "Paris", "degrees": 12}
    assert forced == [False] * 4 + [True]  # an answer with a type has to be a call
