"""`POST /v1/chat/completions`: messages in, choices with a message each out."""

from typing import TYPE_CHECKING, Any

from serving.frontend.openai import logprobs
from serving.frontend.openai.choice import Choice
from serving.frontend.openai.sampling import sampling
from serving.frontend.openai.schemas import ChatRequest, Message
from serving.request import Bounds, Chat

if TYPE_CHECKING:
    from jmoe.tokenizer import Tokenizer


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
