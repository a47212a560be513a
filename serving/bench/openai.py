"""A server that speaks OpenAI's completions over HTTP, as a target of a workload: vLLM, SGLang,
llama.cpp, or jmoe's own HTTP port.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from typing import Any, NoReturn

import aiohttp
import grpc
import orjson

from serving.client.connection import Connection
from serving.frontend.reports import FAULT, REPORTS
from serving.proto.jmoe.v1 import jmoe_pb2 as pb

_UNKNOWN = 1 << 20  # tokens of a context that nobody tells
_EVENT = b"data: "
_CODES = {how.status: how.grpc for how in reversed((*REPORTS.values(), FAULT))}
_CODES |= dict.fromkeys((413, 422), grpc.StatusCode.INVALID_ARGUMENT)
"""By HTTP status; the others' are UNKNOWN."""


class OpenAITarget:
    """One server's `/v1/models` and `/v1/completions`, streamed.

    Calls raise `grpc.aio.AioRpcError`, as those of `serving.client.Client` do, with the nearest
    status. Use within a running event loop.
    """

    def __init__(self, url: str, connection: Connection) -> None:
        """`url` is `http://HOST:PORT` or `https://HOST:PORT`. Raises OSError for certificates that
        cannot be read.
        """
        self.address, self._first = url, ""  # the first model, once they are known
        context: ssl.SSLContext | bool = True
        if url.startswith("https://"):
            context = ssl.create_default_context(cafile=connection.tls_ca or None)
            if connection.tls_cert:
                context.load_cert_chain(connection.tls_cert, connection.tls_key)
        # No limit on connections, or requests would wait in the client; and none is used again
        # after a pause in which the server may have closed it.
        connector = aiohttp.TCPConnector(limit=0, ssl=context, keepalive_timeout=2.0)
        headers = {"Content-Type": "application/json", **dict(connection.metadata)}
        self._http = aiohttp.ClientSession(
            url, connector=connector, headers=headers, timeout=aiohttp.ClientTimeout(None)
        )

    async def __aenter__(self) -> "OpenAITarget":
        return self

    async def __aexit__(self, *of_error: object) -> None:
        await self._http.close()

    async def server_info(self, timeout_s: float | None = None) -> pb.ServerInfo:
        """Returns the served models, the longest context, where the first one tells it, and as
        status "starting" while `/health` says so, as vLLM's, llama.cpp's and jmoe's do.
        """
        found, starting = await self._get("/v1/models", timeout_s), False
        try:
            await self._get("/health", timeout_s)
        except grpc.aio.AioRpcError as error:  # others have none, or one that is no JSON
            starting = error.code() is grpc.StatusCode.UNAVAILABLE
        try:
            models = found["data"]
            names = [model["id"] for model in models]
            self._first = names[0]
            meta = models[0].get("meta") or {}  # llama.cpp's
            longest = models[0].get("max_model_len") or meta.get("n_ctx_train") or _UNKNOWN
            return pb.ServerInfo(
                status="starting" if starting else "ready",
                model=self._first,
                models=names,
                max_model_len=longest,
            )
        except (AttributeError, IndexError, KeyError, TypeError):
            _fail(grpc.StatusCode.UNIMPLEMENTED, f"/v1/models lists no model: {str(found)[:200]}")

    async def wait_ready(self, timeout_s: float) -> None:
        """Waits until the server is not starting. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while (await self.server_info()).status == "starting":
                await asyncio.sleep(0.5)

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling: pb.SamplingParams | None = None,
        *,
        priority: pb.Priority = pb.PRIORITY_UNSPECIFIED,
        model: str = "",
        timeout_s: float | None = None,
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Yields a message an event, with text and an id (0, as none is sent) for each token.

        Events are taken for a token each, also those whose text is still held back. Tokens that the
        usage at the end counts and no event showed come with the last message.
        """
        sampling = sampling or pb.SamplingParams()
        body = {
            "model": model or self._first or (await self.server_info(timeout_s)).model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if sampling.ignore_eos:
            body["ignore_eos"] = True  # of vLLM, SGLang, llama.cpp and jmoe; no field of OpenAI's
        path, data = "/v1/completions", orjson.dumps(body)
        shown, reason, usage = 0, "", None
        try:
            async with asyncio.timeout(timeout_s), self._http.post(path, data=data) as answer:
                if answer.status != 200:
                    await _refused(answer)
                async for line in answer.content:  # the hot loop: thousands a second
                    if not line.startswith(_EVENT) or line.startswith(b"data: [DONE]"):
                        continue
                    event = orjson.loads(line[len(_EVENT) :])
                    if error := event.get("error"):
                        _fail(grpc.StatusCode.INTERNAL, str(error)[:300])
                    usage = event.get("usage") or usage
                    for choice in event.get("choices") or ():
                        reason = choice.get("finish_reason") or reason
                        text = choice.get("text") or ""
                        if text or not choice.get("finish_reason"):  # which may be no token's
                            shown += 1
                            yield pb.GenerateResponse(text=text, token_ids=[0])
        except (aiohttp.ClientError, ConnectionError) as error:
            _fail(grpc.StatusCode.UNAVAILABLE, str(error) or type(error).__name__)
        except TimeoutError:
            _fail(grpc.StatusCode.DEADLINE_EXCEEDED, "the run's time was over")
        except ValueError as error:
            _fail(grpc.StatusCode.INTERNAL, f"an event is no JSON, or too long: {error}")
        if not reason:
            _fail(grpc.StatusCode.INTERNAL, "the stream ended without a finish_reason")
        counted = usage or {}
        yield pb.GenerateResponse(
            token_ids=[0] * max(0, counted.get("completion_tokens", shown) - shown),
            finish_reason=reason,
            usage=pb.Usage(prompt_tokens=counted.get("prompt_tokens", 0)),
        )

    async def get_brownout(self) -> pb.BrownoutState:
        """Raises: OpenAI's protocol has none."""
        _fail(grpc.StatusCode.UNIMPLEMENTED, "OpenAI's protocol has no brownout")

    async def stats(self) -> pb.Stats:
        """Raises: OpenAI's protocol has none."""
        _fail(grpc.StatusCode.UNIMPLEMENTED, "OpenAI's protocol has no counters")

    async def _get(self, path: str, timeout_s: float | None) -> Any:
        try:
            async with asyncio.timeout(timeout_s), self._http.get(path) as answer:
                if answer.status != 200:
                    await _refused(answer)
                return orjson.loads(await answer.read())
        except (aiohttp.ClientError, ConnectionError) as error:
            _fail(grpc.StatusCode.UNAVAILABLE, str(error) or type(error).__name__)
        except TimeoutError:
            _fail(grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer within {timeout_s:g} s")
        except ValueError as error:
            _fail(grpc.StatusCode.UNIMPLEMENTED, f"{path} answers no JSON: {error}")


async def _refused(answer: aiohttp.ClientResponse) -> NoReturn:
    text = (await answer.text(errors="replace"))[:300]
    _fail(_CODES.get(answer.status, grpc.StatusCode.UNKNOWN), f"HTTP {answer.status}: {text}")


def _fail(code: grpc.StatusCode, details: str) -> NoReturn:
    raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
