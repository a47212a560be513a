"""The endpoints of tokens, as vLLM has them: what a text or a chat is in token ids, and back."""

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

import orjson
from starlette.responses import Response

from serving.errors import InvalidRequest, shown
from serving.frontend.access import Caller
from serving.frontend.openai.call import received
from serving.frontend.openai.chats import messages_of, told
from serving.frontend.openai.errors import HttpError
from serving.frontend.openai.schemas import DetokenizeRequest, TokenizeRequest
from serving.request import Chat, Priority

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from jmoe.tokenizer import Tokenizer
    from serving.engine import Engine
    from serving.frontend.server import Server


class TokenEndpoint(Protocol):
    """What differs between the two."""

    request: type[Any]

    async def answer(
        self, engine: "Engine", body: Any, model: str, tokenizer: "Tokenizer"
    ) -> dict[str, Any]:
        """Returns what a call gets. Raises InvalidRequest."""
        ...


class TokenAnswer(Response):
    """The response to a call of one of them."""

    background = None

    def __init__(self, server: "Server", endpoint: TokenEndpoint, caller: Caller) -> None:
        self._server, self._endpoint, self._caller = server, endpoint, caller

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """See starlette. Errors it raises are reported to the client by `door`."""
        engine = self._server.ready_engine()
        of_call = self._server, self._caller, self._endpoint.request, scope, receive
        async with received(*of_call) as (body, number):
            model = engine.names[number]
            self._caller.check_allowed(model, Priority.LATENCY_SENSITIVE)
            tokenizer = None if engine.family is None else engine.family[number].tokenizer
            if tokenizer is None:
                raise HttpError("this model has no tokenizer; it takes token ids alone", "model")
            found = await self._endpoint.answer(engine, body, model, tokenizer)
        answer = Response(orjson.dumps(found), media_type="application/json")
        await answer(scope, receive, send)


class Tokenize:
    """The endpoint that gives token ids."""

    request: type[Any] = TokenizeRequest

    async def answer(
        self, engine: "Engine", body: TokenizeRequest, model: str, tokenizer: "Tokenizer"
    ) -> dict[str, Any]:
        """See TokenEndpoint."""
        if (body.prompt is None) == (body.messages is None):
            raise HttpError("prompt and messages: send one of them", "prompt")
        prompt: str | Chat = body.prompt or ""
        if body.messages is not None:
            options = dict(body.chat_template_kwargs or {})
            options |= {"tools": told(body.tools)} if body.tools else {}
            messages = messages_of(body.messages, tokenizer.chat_template or "")
            prompt = Chat(messages, options)
        special_tokens = body.add_special_tokens is not False
        tokens = await engine.tokenize(prompt, model, special_tokens=special_tokens)
        texts = None
        if body.return_token_strs:
            texts = [tokenizer.decode([token], skip_special_tokens=False) for token in tokens]
        return {
            "count": len(tokens),
            "max_model_len": engine.config.max_model_len,
            "tokens": tokens,
            "token_strs": texts,
        }


class Detokenize:
    """The endpoint that gives the text of token ids."""

    request: type[Any] = DetokenizeRequest

    async def answer(
        self, engine: "Engine", body: DetokenizeRequest, model: str, tokenizer: "Tokenizer"
    ) -> dict[str, Any]:
        """See TokenEndpoint."""
        engine.bounds.check_tokens(len(body.tokens))
        try:
            text = await asyncio.to_thread(tokenizer.decode, body.tokens, False)
        except (OverflowError, TypeError, ValueError):
            raise InvalidRequest(
                f"tokens {shown(body.tokens)} has numbers that are no tokens", "tokens"
            ) from None
        return {"prompt": text}
