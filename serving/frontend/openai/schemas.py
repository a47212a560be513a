"""What requests look like: every field of both endpoints. See docs/http.md for the table."""

import json
from collections.abc import Collection
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from serving.request import (
    MAX_LOGIT_BIASES,
    MAX_REQUEST_ID_CHARS,
    MAX_SALT_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
)

SUPPORTED, ACCEPTED, REFUSED, FIXED = "supported", "accepted", "refused", "fixed"
STATE, WANTED, VALUE = "x-conformance", "x-wanted", "x-value"

MAX_ENTRIES = 4096
"""Limit for a list of messages, or of a message's parts: far more than any conversation has."""

UNKNOWN_FIELD = "unknown_field"


class Strict(BaseModel):
    """An object without conversions, whose unknown fields are refused by name.

    They are let in and looked at afterwards: one error however many they are. One that is null
    counts as absent.
    """

    model_config = ConfigDict(
        strict=True, extra="allow", json_schema_extra={"additionalProperties": False}
    )

    @model_validator(mode="after")
    def _has_no_others(self) -> "Strict":
        extra = self.model_extra or {}
        for name, value in extra.items():
            if value is not None:
                told = {"advice": _advice(name, type(self).model_fields), "name": name[:100]}
                raise PydanticCustomError(UNKNOWN_FIELD, "is not known; {advice}", told)
        self.model_fields_set.difference_update(extra)
        extra.clear()
        return self


def _advice(name: str, fields: Collection[str]) -> str:
    """Returns what to do about a field that an object of these `fields` does not have."""
    meant = next((one for one in _CALLED_HERE.get(name, ()) if one in fields), None)
    if meant is None and name not in _NOT_MISSPELT:
        meant = next(iter(get_close_matches(name[:100], fields, n=1)), None)
    return "docs/http.md lists what there is" if meant is None else f"did you mean {meant}?"


def supported(text: str, default: Any = None, wanted: str = "", **bounds: Any) -> Any:
    """Declares a field that does what OpenAI's API or `text` says.

    `wanted` completes the error message "it must be ..." if the field takes several types.
    """
    extra: dict[str, Any] = {STATE: SUPPORTED} | ({WANTED: wanted} if wanted else {})
    return Field(default, description=text, json_schema_extra=extra, **bounds)


def accepted(why: str, wanted: str = "") -> Any:
    """Declares a field that is accepted but has no effect; `why` says that this does no harm."""
    extra: dict[str, Any] = {STATE: ACCEPTED} | ({WANTED: wanted} if wanted else {})
    return Field(default=None, description=why, json_schema_extra=extra)


def refused(why: str) -> Any:
    """Declares a field that must be null, because ignoring it would be wrong."""
    return Field(default=None, description=why, json_schema_extra={STATE: REFUSED})


def fixed(value: Any, advice: str) -> Any:
    """Declares a field of vLLM's that may only have the value without effect (None: null alone);
    `advice` says what to do instead of another.
    """
    wanted = f"{json.dumps(value)}: {advice}"
    extra = {STATE: FIXED, VALUE: value, WANTED: wanted}
    return Field(default=None, description=wanted, json_schema_extra=extra)


_CALLED_HERE = {
    "max_tokens": ("max_output_tokens",),
    "max_completion_tokens": ("max_output_tokens", "max_tokens"),
    "max_output_tokens": ("max_completion_tokens", "max_tokens"),
    "max_new_tokens": ("max_tokens", "max_output_tokens"),
    "min_new_tokens": ("min_tokens",),
    "messages": ("input", "prompt"),
    "prompt": ("input", "messages"),
    "input": ("messages", "prompt"),
    "reasoning_effort": ("reasoning",),
    "reasoning": ("reasoning_effort",),
    "response_format": ("text",),
    "guided_decoding": ("structured_outputs",),
    "guided_choice": ("choice",),
    "guided_grammar": ("grammar",),
}
"""Other APIs' names of what has another name here."""

MAX_SEQUENCES = 64
"""Answers of one call: prompts times `n`. They share one place among the calls under way."""
DEFAULT_MAX_TOKENS = 16
"""Of completions, as in OpenAI's API."""
REQUEST_ID = rf"^[!-~]{{1,{MAX_REQUEST_ID_CHARS}}}$"
"""What goes into a header and a log line as it stands."""

Tokens = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
_Prompts = Annotated[list[str], Field(fail_fast=True, max_length=MAX_SEQUENCES)]
_TokenPrompts = Annotated[list[Tokens], Field(fail_fast=True, max_length=MAX_SEQUENCES)]
_Parts = Annotated[list["TextPart"], Field(fail_fast=True, max_length=MAX_ENTRIES)]
_Messages = Annotated[list["Message"], Field(fail_fast=True, max_length=MAX_ENTRIES)]
_ToolCalls = Annotated[list["ToolCall"], Field(fail_fast=True, max_length=MAX_ENTRIES)]
Object = dict[str, Any]

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
_STRUCTURES = (
    *("response_format", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_grammar", "guided_choice"),
)
MAX_TOOLS = 128
"""As OpenAI's API."""
_Tools = Annotated[list["Tool"], Field(fail_fast=True, max_length=MAX_TOOLS)]
_TOOL_CHOICE = (
    "none, auto, required, or an object of type function with a function's name, or of type "
    "allowed_tools with a mode (auto, required) and functions"
)


class StreamOptions(Strict):
    """What a stream has beside its text."""

    include_usage: bool | None = supported("a last event with the usage of the whole call")
    continuous_usage_stats: bool | None = supported("the usage so far in every event")
    include_obfuscation: Literal[False] | None = accepted("nothing is padded")


class JsonSchema(Strict):
    """The schema of a `response_format`."""

    name: str = supported("what the caller calls it; changes nothing", ...)
    schema_: Object = supported("the JSON schema", ..., alias="schema")
    description: str | None = accepted("for the caller's own use")
    strict: bool | None = supported("true: a schema that cannot be held to as a whole is refused")


class ResponseFormat(Strict):
    """What the whole answer has to be."""

    type: Literal["text", "json_object", "json_schema"] = supported("which kind", ...)
    json_schema: JsonSchema | None = supported("of type json_schema")


class StructuredOutputs(Strict):
    """As vLLM's extra field of this name; exactly one of these."""

    json_: Object | str | None = supported(
        "a JSON schema, as an object or as text", wanted="an object or text", alias="json"
    )
    regex: str | None = supported("a regular expression")
    choice: Texts | None = supported("texts, of which the answer is one", min_length=1)
    grammar: str | None = supported("a grammar in Lark's syntax")


def _class_of(given: Any) -> Any:
    return None if type(given) is int and given == 0 else given  # vLLM's default


_One = Annotated[float, Field(ge=1, le=1)]
_Empty = Annotated[list[Any], Field(max_length=0)]


class OfModel(Strict):
    """What every body has."""

    model: str | None = supported("of `/v1/models`; default: the first", min_length=1)

    def name_of(self, param: str) -> str:
        """Returns this body's name of a field of `Request` or `SamplingParams`."""
        return param


class Generating(OfModel):
    """What every endpoint that generates takes."""

    stream: bool | None = supported("server-sent events, one a token")
    temperature: float | None = supported("0 is greedy; absent: the model's, or 1")
    top_p: float | None = supported("absent: 1, off")
    skip_special_tokens: bool | None = supported("vLLM's; false: special tokens stay")
    seed: int | None = supported("the i-th answer is drawn with `seed` + i", ge=-(2**63), lt=2**64)
    stop: str | Texts | None = supported(
        f"a string or up to {MAX_STOP_STRINGS}; the text ends before it",
        wanted="a string or a list of strings",
    )
    presence_penalty: float | None = supported("between -2 and 2")
    frequency_penalty: float | None = supported("between -2 and 2")
    logit_bias: Object | None = supported(
        f"numbers between -100 and 100 by token id, {MAX_LOGIT_BIASES} at most"
    )
    top_k: int | None = supported("vLLM's; 0 or -1: off", ge=-1)
    min_p: float | None = supported("vLLM's; 0: off")
    repetition_penalty: float | None = supported("vLLM's; 1: off")
    ignore_eos: bool | None = supported("vLLM's: goes on behind the end of the text")
    stop_token_ids: Tokens | None = supported("vLLM's", max_length=MAX_STOP_TOKEN_IDS)
    min_tokens: int | None = supported(
        "vLLM's: before so many, neither stop tokens nor strings end it", ge=0
    )
    include_stop_str_in_output: bool | None = supported("vLLM's: with the stop string")
    truncate_prompt_tokens: int | None = supported(
        "vLLM's: so many of the prompt's last tokens; -1: as many as fit", ge=-1
    )
    user: str | None = accepted("nothing is done by user; keys tell callers apart")
    # jmoe's own.
    priority: Literal["latency_sensitive", "best_effort"] | None = supported(
        "jmoe's: service class; absent: `latency_sensitive`, or the key's own"
    )
    allow_brownout: bool | None = supported("jmoe's: false exempts the request from brownout")
    allow_audit: bool | None = supported(
        "jmoe's: false: the answer is not scored again, to measure brownout's cost, nor captured"
    )
    max_degraded_percent: int | None = supported(
        "jmoe's: most of the request's expert visits that brownout may degrade, at every token; "
        "0: as `allow_brownout` false",
        ge=0,
        le=100,
    )
    reuse_prefix: bool | None = supported(
        "jmoe's: false computes the whole prompt and adds none of its pages to the cache "
        "(docs/prefixes.md)"
    )
    cache_salt: str | None = supported(
        "vLLM's: requests with different ones share no prefix",
        min_length=1,
        max_length=MAX_SALT_CHARS,
    )
    timeout_s: float | None = supported(
        "jmoe's: seconds until the request ends with 504; absent: `request_timeout_s`", gt=0
    )
    # vLLM's, which do nothing at these values.
    spaces_between_special_tokens: Literal[True] | None = fixed(
        True, "the tokenizer says where spaces are"
    )
    include_reasoning: Literal[True] | None = fixed(
        True, "set reasoning_parser to none for thoughts within the answer"
    )
    mm_processor_kwargs: None = fixed(None, "models served here read text")
    vllm_xargs: None = fixed(None, "extensions of vLLM are not known here")
    kv_transfer_params: None = fixed(None, "prompts and answers are computed in one place")

    _takes_zero = field_validator("priority", mode="before")(_class_of)

    request_id: str | None = supported(
        f"jmoe's: the id in answers and logs, {MAX_REQUEST_ID_CHARS} visible ASCII characters at "
        "most; absent: the `x-request-id` header, or a drawn one",
        pattern=REQUEST_ID,
    )

    @property
    def num_answers(self) -> int:
        """The number of answers to each prompt."""
        return 1


_MAX_TOKENS = (
    f"new tokens at most; absent: {DEFAULT_MAX_TOKENS} (completions), as many as fit (chats); 0 "
    "(with `echo`): the prompt alone is scored"
)


class Sampled(Generating):
    """What completions and chats take."""

    stream_options: StreamOptions | None = supported(
        "with `stream` only: `include_usage`, `continuous_usage_stats`"
    )
    max_tokens: int | None = supported(_MAX_TOKENS, ge=1)
    n: int | None = supported(
        f"answers; times the number of prompts up to {MAX_SEQUENCES}", ge=1, le=MAX_SEQUENCES
    )
    response_format: ResponseFormat | None = supported(
        "`text`, `json_object` or `json_schema`, held to token by token"
    )
    structured_outputs: StructuredOutputs | None = supported(
        "vLLM's: one of `json`, `regex`, `choice`, `grammar`"
    )
    guided_json: Object | str | None = supported(
        "vLLM's: a JSON schema", wanted="an object or text"
    )
    guided_regex: str | None = supported("vLLM's")
    guided_grammar: str | None = supported("vLLM's, in Lark's syntax")
    guided_choice: Texts | None = supported("vLLM's", min_length=1)
    use_beam_search: Literal[False] | None = fixed(
        False, "set temperature to 0 for the likeliest tokens"
    )
    length_penalty: _One | None = fixed(1.0, "it is of beam search, which there is not")
    prompt_logprobs: None = fixed(
        None, "/v1/completions gives those of the prompt with echo and logprobs"
    )
    return_token_ids: bool | None = supported(
        "vLLM's: `token_ids`, and `prompt_token_ids` (streams: at first)"
    )
    return_tokens_as_token_ids: bool | None = supported(
        "vLLM's: tokens of `logprobs` as `token_id:N`"
    )
    allowed_token_ids: None = fixed(None, "send structured_outputs, or logit_bias")
    bad_words: _Empty | None = fixed([], "send logit_bias")
    logits_processors: None = fixed(None, "send structured_outputs, or logit_bias")

    @property
    def num_answers(self) -> int:
        """See Generating."""
        return self.n or 1

    def name_of(self, param: str) -> str:
        """See OfModel."""
        if param == "structure":
            return next((name for name in _STRUCTURES if getattr(self, name) is not None), param)
        names = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
        return names.get(param, param)


class Conversing(Generating):
    """What chats and responses take."""

    top_logprobs: int | None = supported(
        "likeliest tokens at each position, with `logprobs`", ge=0, le=MAX_TOP_LOGPROBS
    )
    chat_template_kwargs: Object | None = supported("vLLM's: names for the chat template")
    parallel_tool_calls: bool | None = supported("false: one call at most")
    prompt_cache_key: str | None = accepted("what shares a beginning is found without")
    prompt_cache_options: Object | None = accepted("likewise")
    prompt_cache_retention: str | None = accepted("likewise")
    safety_identifier: str | None = accepted("nothing is done by user")
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = accepted(
        "changes nothing; see `priority`"
    )
    moderation: None = refused("nothing is moderated here")


class CompletionRequest(Sampled):
    """Body of `POST /v1/completions`."""

    prompt: str | Tokens | _Prompts | _TokenPrompts = supported(
        "text, token ids, or a list of either",
        ...,
        wanted="text, a list of token ids, or a list of up to "
        f"{MAX_SEQUENCES} texts or lists of token ids, not empty",
    )
    max_tokens: int | None = supported(_MAX_TOKENS, ge=0)
    echo: bool | None = supported("the prompt before each answer")
    logprobs: int | None = supported(
        "likeliest tokens at each position, 20 at most; with `echo` of the prompt, too, then 5",
        ge=0,
        le=MAX_TOP_LOGPROBS,
    )
    best_of: int | None = supported("`n`; more are refused", ge=1)
    suffix: None = refused("models served here fill no gaps")
    add_special_tokens: Literal[True] | None = fixed(
        True, "send token ids for a prompt without those of the tokenizer"
    )

    def name_of(self, param: str) -> str:
        """See Sampled."""
        return "logprobs" if param == "top_logprobs" else super().name_of(param)


class TextPart(Strict):
    """A part of a message that is text."""

    type: Literal["text"] = Field(description="images, audio and files are refused")
    text: str
    cache_control: Any = Field(
        default=None, description="Anthropic's; changes nothing: what is shared is found without"
    )


class Function(Strict):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")
    description: str | None = None
    parameters: Object | None = None
    strict: bool | None = None


class OfFunction(Strict):
    """What is of the one type that tools have here."""

    type: Literal["function"]


class Tool(OfFunction):
    """A tool, of the one type that there is here."""

    function: Function


class FunctionName(Strict):
    """Which function is to be called."""

    name: str


class NamedTool(OfFunction):
    """The tool that is to be called."""

    function: FunctionName


class Allowed(Strict):
    """Some of the tools, of which `mode` says whether one has to be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Strict):
    """The tools that may be called, all of which the model is told."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowed


class FunctionCall(Strict):
    """What an earlier answer called a function with; `arguments` is JSON text."""

    name: str
    arguments: str
    parsed_arguments: Any = Field(default=None, description="of OpenAI's client; changes nothing")


class ToolCall(Strict):
    """A call of an earlier answer."""

    id: str
    type: Literal["function"]
    function: FunctionCall
    index: int | None = Field(default=None, description="comes with a stream; changes nothing")


class Message(Strict):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | _Parts | None = None
    name: str | None = None
    refusal: str | None = Field(
        default=None, description="of an assistant; where content is absent, is the content"
    )
    tool_calls: _ToolCalls | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(default=None, description="another name of `reasoning_content`")
    parsed: Any = Field(default=None, description="of OpenAI's client; changes nothing")
    function_call: None = None
    audio: None = None
    annotations: _Empty | None = None


_BEGINS = "an answer begins a message; /v1/completions goes on with a text as it is"


class ChatRequest(Sampled, Conversing):
    """Body of `POST /v1/chat/completions`."""

    messages: _Messages = supported(
        "roles `system`, `developer` (as `system`), `user`, `assistant` and `tool`; `content` is "
        "text or a list of text parts (`cache_control` changes nothing); `name` goes to the chat "
        "template",
        ...,
        min_length=1,
    )
    max_completion_tokens: int | None = supported(
        "the newer name of `max_tokens`, which it overrides", ge=1
    )
    logprobs: bool | None = supported("of each new token")
    metadata: Object | None = accepted("nothing is stored to label")
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = accepted(
        "`text`, all there is", wanted="a list with `text` alone"
    )
    tools: _Tools | None = supported(f"functions, up to {MAX_TOOLS}; see [Tools](#tools)")
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = supported(
        "`none`, `auto`, `required` or a function; see [Tools](#tools)", wanted=_TOOL_CHOICE
    )
    function_call: Literal["none", "auto"] | None = accepted(
        "`none` and `auto`: there are no functions", wanted="none or auto; send tool_choice"
    )
    store: bool | None = accepted("nothing is stored")
    audio: None = refused("models served here write text")
    functions: None = refused("OpenAI's API has `tools` instead")
    prediction: None = refused("leave it out; the text is the same")
    reasoning_effort: Effort | None = supported(
        "goes to the chat template; refused if that does not name it"
    )
    verbosity: None = refused("say it in a message")
    web_search_options: None = refused("nothing is searched here")
    add_generation_prompt: Literal[True] | None = fixed(True, _BEGINS)
    continue_final_message: Literal[False] | None = fixed(False, _BEGINS)
    add_special_tokens: Literal[False] | None = fixed(False, "the chat template writes them")
    chat_template: None = fixed(None, "set engine.chat_template for the server")
    documents: None = fixed(None, "send them in chat_template_kwargs")

    @property
    def forces_call(self) -> bool:
        """Whether the answer has to be a call."""
        choice = self.tool_choice
        if isinstance(choice, AllowedTools):
            return choice.allowed_tools.mode == "required"
        return choice not in (None, "none", "auto")

    @property
    def chosen(self) -> list[str] | None:
        """The functions that `tool_choice` names, of which alone one may be called."""
        choice = self.tool_choice
        if isinstance(choice, AllowedTools):
            return [one.function.name for one in choice.allowed_tools.tools]
        return [choice.function.name] if isinstance(choice, NamedTool) else None

    def name_of(self, param: str) -> str:
        """See Sampled."""
        if param == "max_new_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        if param == "structure" and self.tools and super().name_of(param) == param:
            return "tools"
        return "messages" if param == "prompt" else super().name_of(param)


class ItemPart(Strict):
    """A part of an item that is text."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"] = Field(
        description="images, audio and files are refused"
    )
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


def _as_parts(given: Any) -> Any:
    return [{"type": "text", "text": given}] if isinstance(given, str) else given


_ItemParts = Annotated[
    list[ItemPart],
    Field(fail_fast=True, max_length=MAX_ENTRIES),
    BeforeValidator(_as_parts, json_schema_input_type=str | list[ItemPart]),
]


class InputItem(Strict):
    """One of what a response is made of; which fields belong to which type, its messages say."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    id: str | None = None
    status: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: _ItemParts | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: _ItemParts | None = None
    summary: _ItemParts | None = None
    encrypted_content: None = None
    phase: str | None = Field(default=None, description="comes with an answer; changes nothing")
    namespace: None = None
    caller: None = None
    parsed_arguments: Object | None = Field(
        default=None, description="likewise, in OpenAI's client"
    )


class FunctionTool(Function, OfFunction):
    """A function that the model may call, as responses have it."""


class NamedFunction(FunctionName, OfFunction):
    """The function that is to be called, as responses have it."""


class AllowedFunctions(Strict):
    """The functions that may be called, as responses have them."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)]


class TextFormat(Strict):
    """What the whole text has to be, as responses have it."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Object | None = Field(default=None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextConfig(Strict):
    """How a response's text has to be."""

    format: TextFormat | None = None
    verbosity: None = None


class Reasoning(Strict):
    """What is asked of thoughts."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(Strict):
    """What a stream has beside its events."""

    include_obfuscation: Literal[False] | None = accepted("nothing is padded")


def _as_items(given: Any) -> Any:
    if isinstance(given, str):
        return [{"role": "user", "content": given}] if given else []
    if not isinstance(given, list):
        raise PydanticCustomError("items", "Input should be text, or a list of items")
    return given


_Items = Annotated[
    list[InputItem],
    Field(fail_fast=True, max_length=MAX_ENTRIES, min_length=1),
    BeforeValidator(_as_items, json_schema_input_type=str | list[InputItem]),
]
_LOGPROBS = "message.output_text.logprobs"
_KEPT_NOT = "nothing is stored; send all items in input"


class ResponsesRequest(Conversing):
    """Body of `POST /v1/responses`."""

    input: _Items = supported(
        "text, or items of type `message` (text), `function_call`, `function_call_output` and "
        "`reasoning`",
        ...,
    )
    instructions: str | None = supported("a system message before `input`")
    max_output_tokens: int | None = supported("new tokens at most; absent: as many as fit", ge=1)
    stream_options: ResponseStreamOptions | None = accepted("`include_obfuscation` false")
    tools: Annotated[list[FunctionTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = (
        supported(f"functions, up to {MAX_TOOLS}; see [Tools](#tools)")
    )
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions | None = (
        supported(
            "`none`, `auto`, `required` or a function; see [Tools](#tools)", wanted=_TOOL_CHOICE
        )
    )
    text: TextConfig | None = supported("its `format`, as `response_format`")
    include: (
        Annotated[
            list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]],
            Field(fail_fast=True, max_length=MAX_ENTRIES),
        ]
        | None
    ) = supported(
        "`message.output_text.logprobs`; `reasoning.encrypted_content` has no effect",
        wanted=f"a list of {_LOGPROBS} and reasoning.encrypted_content",
    )
    reasoning: Reasoning | None = supported(
        "`effort`, as `reasoning_effort`; `summary`: thoughts come whole"
    )
    metadata: Object | None = accepted("comes back in the answer")
    store: bool | None = accepted("nothing is stored")
    background: Literal[False] | None = accepted("false: the answer comes at once", wanted="false")
    truncation: Literal["auto", "disabled"] | None = supported(
        "`auto`: as `truncate_prompt_tokens` -1; `disabled`: what does not fit is refused"
    )
    previous_response_id: None = refused(_KEPT_NOT)
    conversation: None = refused(_KEPT_NOT)
    context_management: None = refused(_KEPT_NOT)
    prompt: None = refused("nothing is stored; send its text")
    access_programs: None = refused("there are none here")
    background_options: None = refused("the answer comes at once")
    image: None = refused("models served here write text")
    max_tool_calls: None = refused("there are no built-in tools")

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are in the answer."""
        return _LOGPROBS in (self.include or ())

    def name_of(self, param: str) -> str:
        """See OfModel."""
        names = {
            **{"prompt": "input", "messages": "input", "max_new_tokens": "max_output_tokens"},
            **{"response_format": "text", "reasoning_effort": "reasoning"},
            "min_new_tokens": "min_tokens",
            "structure": "text" if self.text and self.text.format else "tools",
        }
        return names.get(param, param)


class TokenizeRequest(OfModel):
    """Body of `POST /tokenize`: a text or a chat."""

    prompt: str | None = supported("the text")
    messages: _Messages | None = supported("the chat, in place of a text", min_length=1)
    tools: _Tools | None = supported("the chat's functions")
    chat_template_kwargs: Object | None = supported("names for the chat template")
    add_special_tokens: bool | None = supported(
        "false: a text without those that the tokenizer puts around it"
    )
    return_token_strs: bool | None = supported("also the tokens' texts")
    add_generation_prompt: Literal[True] | None = fixed(True, _BEGINS)
    continue_final_message: Literal[False] | None = fixed(False, _BEGINS)
    chat_template: None = fixed(None, "set engine.chat_template for the server")
    mm_processor_kwargs: None = fixed(None, "models served here read text")


class DetokenizeRequest(OfModel):
    """Body of `POST /detokenize`."""

    tokens: Tokens = supported("token ids", ...)


_NOT_MISSPELT = {"detokenize", "thinking_token_budget", "typical_p"}.union(
    *(body.model_fields for body in (CompletionRequest, ChatRequest, ResponsesRequest))
)
"""Names of OpenAI's or vLLM's API, for which no hint to a similar name is given."""
