"""Chat templates that take for ever, over a real socket: their calls fail by name, all others go
on, and nothing of a template runs in the server.
"""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest
from counting import counting_engine, model_with
from openai_served import CHAT, HttpSetup
from served import until
from tokenizers_of_kinds import characters

from serving.config import ServerConfig
from serving.errors import InvalidRequest, SettingsError
from serving.intake import chat_templates
from serving.intake.chat_templates import ChatTemplate, check_templates
from serving.intake.limited_process import LimitedProcess
from serving.request import Bounds, Chat

LIMIT_S = 0.4
BOMBS = {
    "power": ("{{ base ** (base ** base) }}", "takes more than 0.4 s"),
    "loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "takes more than 0.4 s",
    ),
    "endless": (
        "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
        "the prompt has",
    ),
    "product": ("{{ 'a' * 3000000000 }}", "takes more than 256 MiB of memory"),
    "doubling": (
        "{% set ns = namespace(x='a') %}{% for a in range(64) %}{% set ns.x = ns.x ~ ns.x %}"
        "{% endfor %}",
        "takes more than",
    ),
    "macros": ("{% macro deep() %}{{ deep() }}{% endmacro %}{{ deep() }}", "recursion"),
}
TEMPLATE = (
    "{% if not bomb %}[{{ messages[0].content }}]"
    + "".join(f"{{% elif bomb == '{name}' %}}{text}" for name, (text, _) in BOMBS.items())
    + "{% endif %}"
)
FOLDED = "{% if false %}{{ 9 ** (9 ** 9) }}{% endif %}"  # computed when it is compiled


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(chat_templates, "RENDER_S", LIMIT_S)

    def refuse(*_, **__):
        raise AssertionError("the server compiles a template")

    monkeypatch.setattr(jinja2.Environment, "compile", refuse)


class CountingSetup(HttpSetup):
    """A server over the real engine, which counts up."""

    async def __aenter__(self):
        await super().__aenter__()
        self.engine = counting_engine(model=model_with(characters(TEMPLATE)))
        return await self.ready()

    async def failed(self, bomb: str) -> tuple[int, str, int]:
        """Returns status and message of a chat, and how often /health was answered meanwhile."""
        options, healthy = {"bomb": bomb, "base": 9}, 0
        body = {"model": "counter", "messages": CHAT, "chat_template_kwargs": options}
        async with asyncio.TaskGroup() as group:
            call = group.create_task(self.http.post("/v1/chat/completions", json=body))
            while not call.done():
                healthy += (await self.http.get("/health")).status_code == 200
        answer = call.result()
        return answer.status_code, answer.json()["error"]["message"], healthy


def rendering(engine, usual: bool) -> LimitedProcess:
    template = engine.admission._template(engine.family[0].tokenizer)
    return template._short if usual else template._other


@pytest.mark.deep
async def test_bombs_are_their_callers_errors_and_all_else_goes_on():
    async with CountingSetup(ServerConfig(port=0)) as s:
        for bomb, (_, says) in BOMBS.items():
            status, message, healthy = await s.failed(bomb)
            assert (status, says in message) == (400, True), (bomb, message)
            assert message.startswith(("the chat template failed: ", "the prompt has"))
            assert healthy
        # Nobody waits behind one, nor for what its caller has left.
        other = rendering(s.engine, False)
        other._limit_s = 60.0
        slow = asyncio.create_task(s.failed("loops"))
        await until(other._turn.locked)
        assert (await s.chat()).choices[0].message.content == "^_"
        assert not slow.done()
        slow.cancel()
        options = {"chat_template_kwargs": {"bomb": ""}}
        assert (await s.chat(extra_body=options)).choices[0].message.content == "^_"


async def test_a_killed_process_is_replaced_and_inherits_no_socket():
    async with CountingSetup(ServerConfig(port=0)) as s:
        await s.chat()
        before = rendering(s.engine, True)._process.pid
        descriptors = Path(f"/proc/{before}/fd")
        held = {one.name: os.readlink(one) for one in descriptors.iterdir()}
        assert held.keys() == {"0", "1", "2"}
        assert held["0"] == held["1"]  # the socket to the server
        assert "jaxlib" not in Path(f"/proc/{before}/maps").read_text()
        os.kill(before, signal.SIGKILL)
        assert (await s.chat()).choices[0].message.content == "^_"
        assert rendering(s.engine, True)._process.pid != before


async def test_a_template_that_takes_for_ever_to_compile_fails_each_chat():
    template = ChatTemplate(characters(FOLDED), Bounds(10, 10, 10))
    try:
        with pytest.raises(
            InvalidRequest, match=r"chat template failed: it takes more than 0\.4 s"
        ):
            await template.render(Chat(CHAT))
    finally:
        await template.close()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (FOLDED, "it takes more than 0.4 s"),
        ("one\n{% for m in %}", "line 2: Expected an expression"),
    ],
)
def test_at_the_start_it_is_the_operators_error(tmp_path, text, says):
    given = tmp_path / "template.jinja"
    given.write_text(text)
    with pytest.raises(SettingsError, match=rf"template\.jinja is no chat template: {says}"):
        check_templates([tmp_path], str(given))
    own = tmp_path / "chat_template.jinja"
    given.rename(own)
    with pytest.raises(SettingsError, match=rf"{tmp_path} is no chat template: {says}"):
        check_templates([tmp_path], "")


def test_a_busy_process_ends_soon_after_a_killed_server():
    """By itself: it does not read its input, whose end tells an idle process."""
    script = f"""
import asyncio
from serving.intake.limited_process import LimitedProcess

async def main():
    facts = {{"templates": {{"x": {FOLDED!r}}}, "special_tokens": {{}}, "max_chars": 9}}
    process = LimitedProcess("chats", lambda: facts, {LIMIT_S}, 1 << 28)
    ask = asyncio.create_task(process.ask({{"template": "x"}}))
    while process._streams is None or process._process is None:
        await asyncio.sleep(0.01)
    print(process._process.pid, flush=True)
    await ask

asyncio.run(main())
"""
    server = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert server.stdout is not None
    helper = Path("/proc") / server.stdout.readline().decode().strip()
    server.kill()
    server.communicate()

    def is_gone() -> bool:
        return not helper.exists() or "State:\tZ" in (helper / "status").read_text()

    asyncio.run(until(is_gone, timeout_s=30))
