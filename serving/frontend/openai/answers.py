"""What answers look like, for /openapi.json; a test holds every answer to these."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class PromptTokens(_Answer):
    """Of `prompt_tokens`: those that an earlier request had computed."""

    cached_tokens: int


class CompletionTokens(_Answer):
    """Of `completion_tokens`: those that added to what the model thought."""

    reasoning_tokens: int


class _Degraded(_Answer):
    """What brownout did to a whole call."""

    degraded_share: float
    expected_loss: float | None
    prefill_threshold_percent: list[int] | None
    decode_threshold_percent: list[int] | None


class Usage(_Degraded):
    """Tokens of a whole call, and what brownout did to it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens
    completion_tokens_details: CompletionTokens | None = None


class _Generated(_Answer):
    """What all of them have, and their events."""

    id: str
    created: int
    model: str


class CompletionLogprobs(_Answer):
    """Lists with an entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(_Answer):
    """One text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(_Generated):
    """Answer, and event, of `/v1/completions`."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(_Answer):
    """One of the likeliest tokens at a position."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token that was drawn."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Answer):
    """An entry a token."""

    content: list[TokenLogprob]
    refusal: None


class Called(_Answer):
    """The function that is called; `arguments` is JSON text."""

    name: str
    arguments: str


class Call(_Answer):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: Called


class ChatMessage(_Answer):
    """What the model says; content is null where there are calls or thoughts alone."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[Call] = []
    reasoning_content: str | None = None


class ChatChoice(_Answer):
    """One message."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] | None = None


class ChatCompletion(_Generated):
    """Answer of `/v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None


class ResponsePart(_Answer):
    """A part of an item, which is text."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[None] | None = None
    logprobs: list[TokenLogprob] | None = None


class ResponseItem(_Answer):
    """What an answer is made of: a message, a call, or thoughts."""

    id: str
    type: Literal["message", "function_call", "reasoning"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] | None = None
    content: list[ResponsePart] | None = None
    summary: list[None] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class ResponseUsage(_Degraded):
    """Tokens of a response, and what brownout did to it."""

    input_tokens: int
    input_tokens_details: PromptTokens
    output_tokens: int
    output_tokens_details: CompletionTokens
    total_tokens: int


class Response(_Answer):
    """Answer of `/v1/responses`; what was asked for comes back with it."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[ResponseItem]
    usage: ResponseUsage | None
    instructions: str | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    text: dict[str, Any]
    temperature: float
    top_p: float
    max_output_tokens: int | None
    top_logprobs: int
    reasoning: dict[str, str | None]
    truncation: Literal["auto", "disabled"]
    background: Literal[False]
    store: Literal[False]
    previous_response_id: None
    service_tier: Literal["default"]
    user: str | None


class Model(_Answer):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None


class Models(_Answer):
    """Every served model."""

    object: Literal["list"]
    data: list[Model]


class Health(_Answer):
    """Whether requests are served, and a word that says why."""

    status: str


class Version(_Answer):
    """Of jmoe."""

    version: str


class ErrorFields(_Answer):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(_Answer):
    """Every answer that is no success, and the event in which a stream fails."""

    error: ErrorFields


ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": Error, "description": "A field is wrong or not known; the message says how"},
    401: {"model": Error, "description": "No key, or none that is known"},
    403: {"model": Error, "description": "The key does not allow it"},
    404: {"model": Error, "description": "No such model"},
    408: {"model": Error, "description": "The body did not come in time"},
    413: {"model": Error, "description": "The body is larger than what this server can serve"},
    429: {"model": Error, "description": "Too much to do; retry-after says when to come back"},
    500: {"model": Error, "description": "The server failed this request alone"},
    503: {"model": Error, "description": "Starting, draining, or failed"},
    504: {"model": Error, "description": "The request's time ran out"},
}


class Tokenized(_Answer):
    """Answer of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(_Answer):
    """Answer of `/detokenize`."""

    prompt: str
