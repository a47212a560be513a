"""`POST /v1/chat/completions`: messages in, choices with a message each out."""

from itertools import chain
from typing import TYPE_CHECKING, Any

from serving.frontend.openai import logprobs
from serving.frontend.openai.choice import Choice
from serving.frontend.openai.sampling import sampling
from serving.frontend.openai.schemas import ChatRequest, Message
from serving.request import Bounds, Chat, Output, SamplingParams

if TYPE_CHECKING:
    from jmoe.tokenizer import Tokenizer


class ChatChoice(Choice):
    """One message of a chat completion."""

    content = b'"delta":{"content":', b"}"
    first_content = b'"delta":{"role":"assistant","content":'

    def __init__(
        self, index: int, prompt: Chat, sampling: SamplingParams, texts: logprobs.Texts
    ) -> None:
        super().__init__(index, prompt, sampling)
        self._token_texts = texts

    def logprobs_of(self, out: Output, is_first: bool) -> dict[str, Any]:
        """See Choice."""
        return logprobs.chat(out, self._token_texts)

    def whole(self) -> dict[str, Any]:
        """See Choice."""
        content = list(chain.from_iterable(part["content"] for part in self._logprobs))
        told = {"content": content, "refusal": None} if self.sampling.logprobs else None
        return {
            "index": self.index,
            "message": {"role": "assistant", "content": self.text, "refusal": None},
            "logprobs": told,
            "finish_reason": self.finish_reason,
        }


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
        texts = logprobs.Texts(tokenizer)
        return [ChatChoice(i, prompt, sampling(body, i), texts) for i in range(body.n or 1)]


def _message(message: Message) -> dict[str, Any]:
    """Converts a message for chat templates: content as text, and role `developer` as `system`."""
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    name = {} if message.name is None else {"name": message.name}
    return {"role": role, "content": content or "", **name}
