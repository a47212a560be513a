"""The endpoints of tokens, as vLLM has them: what a text or a chat is in token ids, and back."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import orjson
from fastapi import Request
from starlette.responses import Response

from serving.frontend.openai.call import received
from serving.frontend.openai.chats import Template, messages_of, options_of
from serving.frontend.openai.door import caller_of
from serving.frontend.openai.errors import HttpError
from serving.frontend.openai.schemas import DetokenizeRequest, OfModel, TokenizeRequest
from serving.request import Chat

if TYPE_CHECKING:
    from jmoe.tokenizer import Tokenizer
    from serving.engine import Engine
    from serving.frontend.server import Server


Endpoint = Callable[["Engine", Any, str, "Tokenizer"], Awaitable[tuple[dict[str, Any], int]]]
"""Returns what a call gets, given its body and its model's name, and how many tokens it has. Raises
InvalidRequest.
"""


async def answer(
    server: "Server", request: Request, kind: type[OfModel], endpoint: Endpoint
) -> Response:
    """Answers a call of one of them, whose body is of this `kind`."""
    engine = server.ready_engine()
    async with received(server, kind, request.scope, request.receive) as (body, model, tokenizer):
        if tokenizer is None:
            raise HttpError("this model has no tokenizer; it takes token ids alone", "model")
        with caller_of(request.scope).request(model, None) as caller:
            found, num_tokens = await endpoint(engine, body, model, tokenizer)
            caller.used(num_tokens)
    return Response(orjson.dumps(found), media_type="application/json")


async def tokenize(
    engine: "Engine", body: TokenizeRequest, model: str, tokenizer: "Tokenizer"
) -> tuple[dict[str, Any], int]:
    """The endpoint that gives token ids."""
    tokens = await engine.tokenize(
        _prompt(body, tokenizer), model, special_tokens=body.add_special_tokens is not False
    )
    texts = None
    if body.return_token_strs:  # in a thread, as a long prompt has many
        texts = await asyncio.to_thread(
            lambda: [tokenizer.decode([token], skip_special_tokens=False) for token in tokens]
        )
    found = {
        "count": len(tokens),
        "max_model_len": engine.config.max_model_len,
        "tokens": tokens,
        "token_strs": texts,
    }
    return found, len(tokens)


def _prompt(body: TokenizeRequest, tokenizer: "Tokenizer") -> str | Chat:
    """Returns the text or chat of a body. Raises HttpError for what would have no effect."""
    if (body.prompt is None) == (body.messages is None):
        raise HttpError("prompt and messages: send one of them", "prompt")
    if body.messages is None:
        for name in ("tools", "chat_template_kwargs"):
            if getattr(body, name) is not None:
                raise HttpError(f"{name} go with messages; leave them out for a prompt", name)
        return body.prompt or ""
    if body.add_special_tokens is not None:
        raise HttpError(
            "add_special_tokens goes with a prompt: a chat has those that its template writes",
            "add_special_tokens",
        )
    options = options_of(body, bool(body.tools))
    text = tokenizer.chat_template(options)
    if body.tools and not Template.of(text).tells:
        raise HttpError("the model's chat template has no tools; leave them out", "tools")
    return Chat(messages_of(body.messages, text), options)


async def detokenize(
    engine: "Engine", body: DetokenizeRequest, model: str, tokenizer: "Tokenizer"
) -> tuple[dict[str, Any], int]:
    """The endpoint that gives the text of token ids."""
    engine.bounds.check_tokens(len(body.tokens))
    engine.bounds.check_ids("tokens", body.tokens)
    text = await asyncio.to_thread(tokenizer.decode, body.tokens, False)
    return {"prompt": text}, len(body.tokens)
