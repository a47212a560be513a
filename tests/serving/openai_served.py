"""A server over a real socket with an engine that counts up, and OpenAI's own client of it."""

import asyncio
import contextlib
import ssl

import httpx2
from fake_engine import FakeEngine
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from served import Setup
from shaped import config
from tokenizers_of_kinds import characters

import jmoe
from serving.config import EngineConfig, ServerConfig
from serving.engine import Engine
from serving.execution.fitting import limits_of
from serving.request import Output, Usage
from tests.serving.fake_runner import FakeRunner

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}{{ m.name or '' }}|{{ m.content }}]"
    "{% endfor %}{{ closing or '' }}"
)
"""The answer counts on from the last character: a chat without `closing` ends in `]`, then comes
`^_`."""

TOOLS_TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "[{{ m.role }}{{ m.name or '' }}|{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}]{% endfor %}"
)
"""As Qwen's, in short."""

# Nothing is encrypted here, and reading a bundle of certificates takes a tenth of a second.
NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

CHAT = [{"role": "user", "content": "hi"}]


class HttpSetup(Setup):
    """A server with two clients: `client` is OpenAI's, without retries; `http` is for what that
    cannot send.
    """

    def __init__(self, config: ServerConfig, template: str | None = TEMPLATE) -> None:
        super().__init__(config)
        self.engine = FakeEngine(config.engine, characters(template))

    async def __aenter__(self) -> "HttpSetup":
        await super().__aenter__()
        self.address = self.web.address
        self.client = AsyncOpenAI(
            base_url=f"http://{self.address}/v1",
            api_key="any",
            max_retries=0,
            timeout=30,
            http_client=DefaultAsyncHttpxClient(verify=NO_CERTIFICATES),
        )
        self.http = httpx2.AsyncClient(
            base_url=f"http://{self.address}", timeout=30, verify=NO_CERTIFICATES
        )
        return self

    async def __aexit__(self, *_) -> None:
        await self.client.close()
        await self.http.aclose()
        await super().__aexit__()

    def complete(self, prompt="ab", **fields):
        """Requests a completion, of two tokens unless `fields` say otherwise."""
        given = {"model": "counter", "prompt": prompt, "max_tokens": 2} | fields
        return self.client.completions.create(**given)

    def chat(self, messages=CHAT, **fields):
        """Requests a chat's answer, of two tokens unless `fields` say otherwise."""
        given = {"model": "counter", "messages": messages, "max_tokens": 2} | fields
        return self.client.chat.completions.create(**given)

    async def post(self, path="/v1/completions", **fields):
        """Posts a body as it is."""
        given = {"model": "counter", "prompt": "ab", "max_tokens": 2} | fields
        return await self.http.post(path, json=given)

    async def raw(self):
        """Opens a connection on which to send raw bytes."""
        host, _, port = self.address.rpartition(":")
        return await asyncio.open_connection(host, int(port))


@contextlib.asynccontextmanager
async def serving_http(
    template: str | None = TEMPLATE, engine: EngineConfig | None = None, **fields
):
    engine = engine or EngineConfig(max_model_len=64)
    async with HttpSetup(ServerConfig(port=0, engine=engine, **fields), template) as setup:
        yield await setup.ready()


@contextlib.asynccontextmanager
async def saying(said, template: str | None = TOOLS_TEMPLATE, reason="stop", step=3, **fields):
    """Serves an engine that says a text, or what `said` makes of a prompt, `step` characters at a
    time, or a list of texts, and ends for a reason, or for what `reason` makes of the prompt.
    """
    async with serving_http(template, EngineConfig(max_model_len=2048), **fields) as s:

        async def generate(prompt, sampling, **options):
            s.engine.calls.append({"prompt": prompt, "sampling": sampling, **options})
            text = said(prompt) if callable(said) else said
            why = reason(prompt) if callable(reason) else reason
            pieces = text
            if isinstance(text, str):
                pieces = [text[at : at + step] for at in range(0, len(text), step)] or [""]
            for at, piece in enumerate(pieces):
                ended = why if at == len(pieces) - 1 else None
                usage = Usage(5, at + 1, 8, 0)
                logprobs = (-0.5,) if sampling.logprobs else ()
                yield Output(options["request_id"], piece, (65,), logprobs, usage, ended)

        s.engine.generate = generate
        yield s


@contextlib.asynccontextmanager
async def serving_an_engine(template: str | None = None):
    """Serves an engine with its own admission, masks and text, whose runner draws whatever is
    allowed: as the bundled model, whose chat template may be another. Yields an HTTP client.
    """
    model = jmoe.load("bundled", "float32")
    if template is not None:
        model.tokenizer.chat_templates = {"default": template}
    runner = FakeRunner(limits_of(config(), 1), vocab_size=model.config.vocab_size)
    engine = Engine(config(), runner, model)
    engine.run()
    async with Setup(ServerConfig(port=0, engine=engine.config)) as s:
        await s.server.attach(engine)
        async with httpx2.AsyncClient(
            base_url=f"http://{s.web.address}", timeout=30, verify=NO_CERTIFICATES
        ) as client:
            yield client


def head(fields: bytes = b"", length: int = 0, path: bytes = b"/v1/completions") -> bytes:
    """Returns a request's line and headers."""
    line = b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" % path
    return line + b"%bcontent-length: %d\r\n\r\n" % (fields, length)
