"""The endpoints of completions and of chats: prompts or messages in, choices out."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from serving.errors import InvalidRequest, shown
from serving.frontend.openai import logprobs
from serving.frontend.openai.choice import Choice
from serving.frontend.openai.errors import HttpError
from serving.frontend.openai.sampling import sampling
from serving.frontend.openai.schemas import MAX_SEQUENCES, ChatRequest, CompletionRequest, Message
from serving.request import Bounds, Chat

if TYPE_CHECKING:
    from jmoe.tokenizer import Tokenizer


Prompt = str | list[int]


class CompletionChoice(Choice):
    """One text that continues a prompt."""

    content = b'"text":', b""
    first_content = b'"text":'
    whole_content = content


class CompletionEndpoint:
    """The completions endpoint."""

    request: type[Any] = CompletionRequest
    operation = "text_completion"
    id_prefix, object_whole, object_event = "cmpl-", "text_completion", "text_completion"

    async def choices(
        self, body: CompletionRequest, tokenizer: "Tokenizer | None", bounds: Bounds
    ) -> list[Choice]:
        """Returns the choices of a call, prompt by prompt. Raises InvalidRequest."""
        prompts, n = _prompts(body.prompt), body.n or 1
        if len(prompts) * n > MAX_SEQUENCES:
            raise HttpError(
                f"{len(prompts)} prompts times n {n} make {len(prompts) * n} answers; one call has "
                f"{MAX_SEQUENCES} at most; send several calls",
                "prompt" if len(prompts) > 1 else "n",
            )
        if body.best_of not in (None, n):
            raise HttpError(
                f"best_of is {body.best_of} and n {n}; answers are not ranked here, leave best_of "
                "out",
                "best_of",
            )
        if body.echo and body.logprobs:
            raise HttpError(
                f"logprobs is {body.logprobs} with echo; likeliest tokens of prompts are not "
                "computed, send logprobs 0 for the log-probabilities of the prompt itself",
                "logprobs",
            )
        texts = logprobs.Texts(tokenizer)
        found: list[Choice] = []
        for prompt in prompts:
            if body.echo and tokenizer is not None:  # the tokenizer will encode or decode it
                check = bounds.check_chars if isinstance(prompt, str) else bounds.check_tokens
                check(len(prompt))
            echo = await _echo(prompt, tokenizer) if body.echo else ""
            if body.echo and body.logprobs is not None:
                prompt = await _tokens_of(prompt, tokenizer)
            for i in range(n):
                shown = logprobs.Completion(texts, bool(body.logprobs))
                found.append(CompletionChoice(len(found), prompt, sampling(body, i), shown, echo))
        return found


def _prompts(given: Any) -> Sequence[Prompt]:
    """Returns the prompts as a list. Raises HttpError for an empty prompt."""
    is_one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
    prompts = [given] if is_one else given
    if not prompts or not all(prompts):
        raise HttpError(
            f"prompt is {shown(given)}; each prompt must have a character or a token", "prompt"
        )
    return prompts


async def _echo(prompt: Prompt, tokenizer: "Tokenizer | None") -> str:
    if isinstance(prompt, str):
        return prompt
    if tokenizer is None:
        raise HttpError("echo of token ids needs a tokenizer; this model has none", "echo")
    try:
        return await asyncio.to_thread(tokenizer.decode, prompt)
    except (OverflowError, TypeError, ValueError):
        raise InvalidRequest(
            f"the prompt {shown(prompt)} has numbers that are no tokens", "prompt"
        ) from None


async def _tokens_of(prompt: Prompt, tokenizer: "Tokenizer | None") -> Prompt:
    """Returns the prompt's token ids, which are needed to report a log-probability for each."""
    if not isinstance(prompt, str):
        return prompt
    if tokenizer is None:
        raise InvalidRequest("this model has no tokenizer; send token ids", "prompt")
    return await asyncio.to_thread(tokenizer.encode, prompt)


class ChatChoice(Choice):
    """One message of a chat completion."""

    content = b'"delta":{"content":', b"}"
    first_content = b'"delta":{"role":"assistant","content":'
    whole_content = b'"message":{"role":"assistant","content":', b',"refusal":null}'


class ChatEndpoint:
    """The chat endpoint."""

    request: type[Any] = ChatRequest
    operation = "chat"
    id_prefix, object_whole, object_event = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    async def choices(
        self, body: ChatRequest, tokenizer: "Tokenizer | None", bounds: Bounds
    ) -> list[Choice]:
        """Returns the choices of a call. Raises InvalidRequest."""
        prompt = Chat([_message(one) for one in body.messages], body.chat_template_kwargs or {})
        shown = logprobs.Chat(logprobs.Texts(tokenizer))
        return [ChatChoice(i, prompt, sampling(body, i), shown) for i in range(body.n or 1)]


def _message(message: Message) -> dict[str, Any]:
    """Converts a message for chat templates: content as text, and role `developer` as `system`."""
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    name = {} if message.name is None else {"name": message.name}
    return {"role": role, "content": content or "", **name}
