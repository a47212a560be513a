"""Requests to the engine, and the outputs it streams back."""

import enum
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any, NamedTuple

from serving.errors import InvalidRequest, NotFound, TooLong, shown

MAX_STOP_STRINGS, MAX_STOP_CHARS = 64, 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_REQUEST_ID_CHARS = 128
MAX_LOGIT_BIASES = 1024
MAX_SALT_CHARS = 256
MAX_TOP_LOGPROBS, MAX_TOP_PROMPT_LOGPROBS = 20, 5
MAX_STRUCTURE_CHARS = 64 << 10
"""Limits of a request apart from its prompt, whatever the model."""

MODEL_DEFAULTS = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    "max_new_tokens",
)
"""Fields of `SamplingParams` for which a model's `generation_config.json` may have defaults."""

_META = re.compile(r"[\\.+*?()|\[\]{}^$]")
"""Characters with a special meaning in regular expressions."""


@dataclass(frozen=True)
class Bounds:
    """Limits of a prompt's size, and of the log-probabilities of a call. Larger prompts cannot fit,
    and are refused before they are copied.
    """

    max_prompt_tokens: int  # one position is left for the first new token
    max_prompt_chars: int  # of text: the tokenizer's longest token times `max_prompt_tokens`
    vocab_size: int  # of the model; 0 where there is none
    max_logprobs_per_call: int = sys.maxsize

    def check_logprobs(self, asked: "Iterable[tuple[SamplingParams, int]]") -> None:
        """Raises InvalidRequest if the requests of one call, each given with the tokens of its
        prompt, ask for more log-probabilities than a call may.
        """
        count = sum(one.num_logprobs(tokens, self.max_prompt_tokens) for one, tokens in asked)
        if count > self.max_logprobs_per_call:
            raise InvalidRequest(
                f"the call asks for {count} log-probabilities: for each answer, max_tokens times "
                "1 + top_logprobs, and the prompt's where it asks for theirs; one call has "
                f"{self.max_logprobs_per_call} at most (engine.max_logprobs_per_call); ask for "
                "fewer top_logprobs, tokens or answers, or send several calls"
            )

    def check_chars(self, count: int) -> None:
        """Raises TooLong for a text that cannot fit."""
        if count > self.max_prompt_chars:
            raise TooLong(
                f"the prompt has {count} characters; {self.max_prompt_tokens} tokens, this "
                f"server's longest prompt, have {self.max_prompt_chars} at most",
                "prompt",
            )

    def check_tokens(self, count: int) -> None:
        """Raises TooLong for token ids that cannot fit."""
        if count > self.max_prompt_tokens:
            raise TooLong(
                f"the prompt has {count} tokens; the context length is "
                f"{self.max_prompt_tokens + 1} (engine.max_model_len), one of them for the answer",
                "prompt",
            )

    def check_ids(self, name: str, tokens: Sequence[int]) -> None:
        """Raises InvalidRequest for ids that are no tokens; `name` is the field with them."""
        vocab = self.vocab_size or sys.maxsize  # 0: without a model
        if not tokens or (min(tokens) >= 0 and max(tokens) < vocab):
            return
        wrong = next(token for token in tokens if not 0 <= token < vocab)
        raise InvalidRequest(
            f"{name} has {shown(wrong)}, which is no token of this model; "
            f"ids are between 0 and {vocab - 1}",
            name,
        )


class Priority(enum.StrEnum):
    """Service class of a request (QLLM). By name, since engines disagree on what a number means."""

    LATENCY_SENSITIVE = "latency_sensitive"
    BEST_EFFORT = "best_effort"


SPACED: Mapping[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""How JSON that is held to a schema is written: on one line, as templates write it, and so what
models have learned. Of arbitrary white space small ones would write nothing else. A schema's own
`x-guidance` wins.
"""


def guided(schema: Mapping[str, Any], strict: bool = False) -> Mapping[str, Any]:
    """Returns a JSON schema that says to llguidance how JSON is held to it: as `SPACED`; and,
    unless `strict`, without the keywords and formats that llguidance does not know, and with
    `oneOf` as `anyOf` where its branches overlap, in place of an error. What the schema's own
    `x-guidance` says wins.
    """
    own = schema.get("x-guidance", SPACED)
    if not isinstance(own, Mapping):
        return schema  # llguidance says what is wrong
    return {**schema, "x-guidance": {"lenient": not strict, **own}}


class StructureKind(enum.StrEnum):
    """How a structured output is described."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"  # Lark's syntax, as llguidance takes it


@dataclass(frozen=True)
class Structure:
    """What a request's whole output must match. `text` is the schema, expression or grammar."""

    kind: StructureKind
    text: str

    def __post_init__(self) -> None:
        """Checks the size only; `serving.intake.structure` parses the text."""
        what = f"characters of a {self.kind}"
        check_count(what, len(self.text), MAX_STRUCTURE_CHARS, "structure")

    @classmethod
    def one_of(cls, texts: Sequence[str]) -> "Structure":
        """Makes a structure that matches exactly one of `texts`.

        Raises InvalidRequest if one is empty.
        """
        if not all(texts):
            raise InvalidRequest(
                "choice has an empty text; each must have a character at least", "structure"
            )
        return cls(StructureKind.REGEX, "|".join(_META.sub(r"\\\g<0>", text) for text in texts))


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn and when to stop. Raises InvalidRequest for a value out of range."""

    max_new_tokens: int | None = 128  # None: as many as fit
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    seed: int | None = None  # None: drawn by the engine
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()  # the text ends before the first of these
    ignore_eos: bool = False
    logprobs: bool = False  # of each output token
    prompt_logprobs: bool = False  # of each prompt token after the first
    top_logprobs: int = 0  # likeliest tokens at each output position, with their log-probabilities
    min_p: float = 0.0  # tokens less likely than this share of the likeliest are left out; 0: off
    presence_penalty: float = 0.0  # subtracted from logits of tokens that the output has
    frequency_penalty: float = 0.0  # likewise, for each time
    repetition_penalty: float = 1.0  # divides logits of tokens of prompt and output; 1: off
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, what is added to its logit)
    structure: Structure | None = None  # what the output has to match
    skip_special_tokens: bool = True  # the text is without them
    top_prompt_logprobs: int = 0  # likeliest tokens, where `prompt_logprobs` has the prompt's
    default_new_tokens: int | None = None  # at most, if `max_new_tokens` is None
    min_new_tokens: int = 0  # before which nothing ends the output but its structure
    include_stop: bool = False  # the text ends behind what stopped it, not before
    absent: frozenset[str] = field(default=frozenset(), compare=False)
    """Of `MODEL_DEFAULTS`, what the request left out: the model's own default stands for it."""

    @classmethod
    def of(
        cls, given: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
    ) -> "SamplingParams":
        """Makes the parameters of a request that gives these fields; `defaults` are those of its
        protocol, for a model without its own. Raises InvalidRequest for a value out of range.
        """
        absent = frozenset(name for name in MODEL_DEFAULTS if name not in given)
        return cls(**{**(defaults or {}), **given}, absent=absent)

    def with_defaults(self, defaults: Mapping[str, Any]) -> "SamplingParams":
        """Returns the parameters with a model's defaults for what the request left out. The default
        of `max_new_tokens` lowers that of the protocol, and never raises it.
        """
        own = {name: value for name, value in defaults.items() if name in self.absent}
        if not own:
            return self
        if (most := own.pop("max_new_tokens", None)) is not None:
            name = "default_new_tokens" if self.max_new_tokens is None else "max_new_tokens"
            own[name] = min(most, getattr(self, name) or most)
        return replace(self, **own, absent=frozenset())

    def __post_init__(self) -> None:
        """Checks types and ranges."""
        for name, (holds, wanted) in _RANGES.items():
            value = getattr(self, name)
            _check(holds(value), name, value, wanted)
        if self.structure is not None and self.ignore_eos:
            raise InvalidRequest(
                "ignore_eos is set beside a structured output, which ends where its structure "
                "does; leave one out",
                "ignore_eos",
            )
        name = "top_prompt_logprobs"
        if self.top_prompt_logprobs and not self.prompt_logprobs:
            raise InvalidRequest(f"{name} without prompt_logprobs; set both", name)
        name = "logit_bias"
        check_count(f"tokens in {name}", len(self.logit_bias), MAX_LOGIT_BIASES, name)
        for token, bias in self.logit_bias:
            _check(isinstance(token, Integral), name, token, "an integer", f"a token of {name}")
            in_range = _real(bias, -100, 100)
            _check(in_range, name, bias, "between -100 and 100", f"{name} of {token}")
        check_count("stop strings", len(self.stop), MAX_STOP_STRINGS, "stop")
        name = "stop_token_ids"
        check_count(name, len(self.stop_token_ids), MAX_STOP_TOKEN_IDS, name)
        for text in self.stop:
            _check(isinstance(text, str) and text != "", "stop", text, "a string, not empty")
            check_count("characters of a stop string", len(text), MAX_STOP_CHARS, "stop")
        for token in self.stop_token_ids:
            _check(isinstance(token, Integral), name, token, "an integer", "a stop token")

    def num_logprobs(self, prompt_tokens: int, most_new: int) -> int:
        """Returns the most log-probabilities that the answer to a prompt of this many tokens can
        have, if at most `most_new` tokens fit behind a prompt.
        """
        new = min(self.max_new_tokens or self.default_new_tokens or most_new, most_new)
        of_new = new * (1 + self.top_logprobs) if self.logprobs or self.top_logprobs else 0
        of_prompt = prompt_tokens * (1 + self.top_prompt_logprobs)
        return of_new + (of_prompt if self.prompt_logprobs else 0)

    @property
    def shapes(self) -> bool:
        """Whether logits are changed before sampling, or other tokens' log-probabilities are
        wanted.
        """
        return (
            self.structure is not None
            or bool(self.logit_bias or self.top_logprobs or self.min_p or self.min_new_tokens)
            or self.penalizes
        )

    @property
    def penalizes(self) -> bool:
        """Whether tokens that occurred before change logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


def _check(holds: bool, name: str, value: object, wanted: str, what: str = "") -> None:
    """`what` is the part of the field `name` that is checked; by default, all of it."""
    if not holds:
        raise InvalidRequest(f"{what or name} is {shown(value)}; it must be {wanted}", name)


def _whole(value: object, least: int, below: int = 2**63) -> bool:
    return isinstance(value, Integral) and least <= int(value) < below


def _real(value: object, least: float, most: float = sys.float_info.max) -> bool:
    # Not `isfinite`, which raises for an integer beyond what a float can be.
    return isinstance(value, Real) and bool(least <= value <= most)  # pyright: ignore[reportOperatorIssue]


_RANGES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "max_new_tokens": (lambda n: n is None or _whole(n, 1), "a whole number, at least 1"),
    "min_new_tokens": (lambda n: _whole(n, 0), "a whole number, at least 0"),
    "temperature": (lambda x: _real(x, 0, 100), "between 0 and 100"),
    "top_k": (lambda n: _whole(n, 0, 2**31), f"a whole number up to {2**31 - 1} (0: off)"),
    "top_p": (lambda x: _real(x, 0, 1) and x > 0, "in (0, 1]"),
    "seed": (lambda n: n is None or _whole(n, 0, 2**64), "a 64-bit number"),
    "top_logprobs": (
        lambda n: _whole(n, 0, MAX_TOP_LOGPROBS + 1),
        f"a whole number up to {MAX_TOP_LOGPROBS}",
    ),
    "top_prompt_logprobs": (
        lambda n: _whole(n, 0, MAX_TOP_PROMPT_LOGPROBS + 1),
        f"a whole number up to {MAX_TOP_PROMPT_LOGPROBS}",
    ),
    "min_p": (lambda x: _real(x, 0, 1), "in [0, 1]"),
    "presence_penalty": (lambda x: _real(x, -2, 2), "between -2 and 2"),
    "frequency_penalty": (lambda x: _real(x, -2, 2), "between -2 and 2"),
    "repetition_penalty": (lambda x: _real(x, 0, 100) and x > 0, "above 0 and at most 100"),
}
"""What the numbers of `SamplingParams` must be: whether one is, and the words for it."""


def check_count(what: str, count: int, most: int, param: str | None = None) -> None:
    """Raises InvalidRequest for more than a request may carry; call it before copying."""
    if count > most:
        raise InvalidRequest(f"number of {what} is {count}; it must be {most} at most", param)


def number_of(model: str, names: Sequence[str]) -> int:
    """Returns the number of the model with this name; empty: the first that is served. A name that
    is empty among `names` is a vacant place's.

    Raises NotFound, which lists the served models.
    """
    if model and model not in names:
        have = ", ".join(shown(name) for name in names if name)
        verb = "is" if len(names) == 1 else "are"
        raise NotFound(f"model {shown(model)} is not served; {have} {verb}")
    return names.index(model or next(filter(None, names), names[0]))


@dataclass(frozen=True)
class Chat:
    """A prompt of messages, which the model's chat template turns into text."""

    messages: Sequence[Mapping[str, Any]]  # each with a role and content, as the template takes it
    options: Mapping[str, Any] = field(default_factory=dict)  # further names for the template

    @property
    def num_chars(self) -> int:
        """The number of characters passed to the template: contents, names, options."""
        keys = ("content", "name", "tool_calls", "reasoning_content", "thinking")
        told = [message.get(key) or "" for message in self.messages for key in keys]
        return _num_chars(told) + _num_chars(self.options)


def _num_chars(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_num_chars(key) + _num_chars(one) for key, one in value.items())
    if isinstance(value, list | tuple):
        return sum(map(_num_chars, value))
    return 1


OPTIONS = ("allow_brownout", "reuse_prefix", "allow_audit", "max_degraded_percent")
"""Fields of a request that every protocol takes under these names, and may leave out."""


@dataclass(frozen=True)
class Request:
    """One generation request. Raises InvalidRequest for a value out of range."""

    request_id: str
    prompt: str | Sequence[int] | Chat
    sampling: SamplingParams = field(default_factory=SamplingParams)
    allow_brownout: bool = True  # False: its rows are exempt
    priority: Priority = Priority.LATENCY_SENSITIVE
    timeout_s: float | None = None  # from admission
    model: int = 0  # number of the model in a family
    timeout_is_servers: bool = False  # timeout_s is the server's default
    reuse_prefix: bool = True  # False: neither uses nor fills the prefix cache
    salt: str = ""  # requests with different ones share no prefix
    max_degraded_percent: int = 100  # of its expert visits, at every moment
    allow_audit: bool = True  # False: its answer is never scored again, nor captured
    key: str = ""  # name of the caller's API key
    is_audit: bool = False  # the engine's own: it scores an answer, and counts for no caller
    model_name: str = ""  # under which it is served

    def __post_init__(self) -> None:
        """Checks types and ranges."""
        name = "request_id"
        check_count(f"characters of {name}", len(self.request_id), MAX_REQUEST_ID_CHARS, name)
        timeout_s, percent = self.timeout_s, self.max_degraded_percent
        in_range = timeout_s is None or _real(timeout_s, -sys.float_info.max)
        _check(in_range, "timeout_s", timeout_s, "a number of seconds")
        in_range = _whole(percent, 0, 101) and not isinstance(percent, bool)
        wanted = "a whole number between 0 and 100"
        _check(in_range, "max_degraded_percent", percent, wanted)


@dataclass(frozen=True)
class ThresholdSpan:
    """Smallest and largest threshold (percent) of a request's steps of one phase."""

    min_percent: int
    max_percent: int


class Usage(NamedTuple):
    """A request's usage so far. Visits are (token, MoE layer, pick) triples."""

    prompt_tokens: int
    completion_tokens: int
    expert_visits: int
    degraded_visits: int
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    expected_loss: float = math.nan  # nats a token, by the answer's thresholds; NaN: not known


class Output(NamedTuple):
    """Tokens released since the last output of a request."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # one a token, where asked for; else empty
    usage: Usage
    finish_reason: str | None = None  # "stop" or "length" on the last output
    prompt_logprobs: tuple[float, ...] = ()  # on the first output, where asked for
    prefill_threshold: ThresholdSpan | None = None
    decode_threshold: ThresholdSpan | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    """For each of `token_ids`, if asked for: the likeliest tokens and their log-probabilities."""
    prompt_top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    """For each of `prompt_logprobs`, where asked for, likewise."""


@dataclass(frozen=True)
class BrownoutChange:
    """A change of brownout settings; None leaves a field as it is.

    Setting either threshold turns the controller off; `salc_enabled` turns it on or off.
    """

    strategy: str | None = None
    way: int | None = None
    prefill_threshold_percent: int | None = None
    decode_threshold_percent: int | None = None
    salc_enabled: bool | None = None
    ttft_slo_s: float | None = None
    itl_slo_s: float | None = None
    controller: str | None = None
    prefill_company: bool | None = None
    keep: str | None = None
    max_expected_loss: float | None = None  # in nats a token; 0: no bound
    model: str | None = None  # that objectives and bounds are of; None: objectives are of all
    floor_percent: int | None = None  # of a model's thresholds
    ceiling_percent: int | None = None


@dataclass(frozen=True)
class ModelBrownout:
    """What one of several models has of its own: objectives of its latency-sensitive requests (0:
    those of all), and bounds of its thresholds. Raises InvalidRequest for a value out of range.
    """

    name: str
    ttft_slo_s: float = 0.0
    itl_slo_s: float = 0.0
    floor_percent: int = 0
    ceiling_percent: int = 100

    def __post_init__(self) -> None:
        """Checks types and ranges."""
        of = f"of model {shown(self.name)}"
        for name in ("ttft_slo_s", "itl_slo_s"):
            value = getattr(self, name)
            wanted = "a number of seconds, or 0 (the objective of all models)"
            _check(_real(value, 0), name, value, wanted, f"{name} {of}")
        for name in ("floor_percent", "ceiling_percent"):
            value = getattr(self, name)
            _check(
                _whole(value, 0, 101), name, value, "a whole percentage, 0 to 100", f"{name} {of}"
            )
        floor, ceiling = self.floor_percent, self.ceiling_percent
        wanted = f"at most its ceiling_percent, {ceiling}"
        _check(floor <= ceiling, "floor_percent", floor, wanted, f"floor_percent {of}")


@dataclass(frozen=True)
class BrownoutState:
    """Brownout settings in force, and P90 latencies: those that the controller last saw, and those
    that it expected from its last decision (NaN: none).
    """

    strategy: str
    way: int  # 0: no united experts are loaded
    prefill_threshold_percent: float
    decode_threshold_percent: float
    salc_enabled: bool
    ttft_slo_s: float
    itl_slo_s: float
    warning_factor: float
    ttft_p90_s: float
    itl_p90_s: float
    controller: str
    prefill_company: bool
    predicted_ttft_p90_s: float
    predicted_itl_p90_s: float
    objective_state: str = ""  # why brownout is in vain; empty: it is not
    least_ttft_s: float = math.nan  # the shortest objective that can be kept, where this one cannot
    least_itl_s: float = math.nan
    keep: str = "visits"  # which experts stay exact: visits or weight
    max_expected_loss: float = 0.0  # bound on a threshold's, in nats a token; 0: none
    least_threshold_percent: int = 0  # the lowest within that bound
    models: tuple[ModelBrownout, ...] = ()  # that are served, with what each has of its own


class Expected(NamedTuple):
    """What a change of brownout lets expect of one phase at the present load; NaN: not known."""

    threshold_percent: float  # that is set, or that a controller would need for the objective
    threshold_now_percent: float
    step_s: float  # a whole step of it
    step_now_s: float
    loss: float  # of the threshold, nats a token, of whichever model loses most
    loss_now: float
    is_kept: bool | None  # whether steps are short enough for the objective; None: not known


@dataclass(frozen=True)
class AuditState:
    """What brownout cost a model's answers to an API key, of those that the audit scored; intervals
    are of 95 %. NaN: none yet.
    """

    model: str
    num_scored: int  # answers
    num_unscored: int  # degraded answers that were drawn and had to make room, or could not be
    excess_nats: float  # a token's log-probability as it was drawn, above the exact model's
    excess_low_nats: float
    excess_high_nats: float
    disagreement: float  # share of greedy tokens that are not the exact model's first choice
    disagreement_low: float
    disagreement_high: float
    is_exempt: bool  # requests are exempt from brownout, which cost more than the bound
    key: str = ""  # name of the API key; empty: callers without one
    expected_nats: float = math.nan  # the excess that their thresholds let expect


@dataclass(frozen=True)
class Refused:
    """How many requests of an API key and a class were refused for load."""

    key: str  # its name; empty: callers without one
    priority: str  # a class, or "any": none had room, and the request was not read
    count: int


@dataclass
class Counters:
    """Counts of events since the start."""

    requests_finished: int = 0
    requests_aborted: int = 0
    requests_rejected: int = 0
    requests_failed: int = 0  # failed alone, not by their caller's fault
    steps_prefill: int = 0
    steps_decode: int = 0
    expert_visits: int = 0
    degraded_visits: int = 0
    priced_tokens: int = 0  # sampled tokens whose expected loss is known
    expected_loss_nats: float = 0.0  # of them together


@dataclass
class EngineStats(Counters):
    """Counters and gauges of an engine at one moment."""

    num_running: int = 0
    num_waiting: int = 0
    kv_pages_used: int = 0
    kv_pages_total: int = 0
    compilations_since_ready: int = 0
    uptime_s: float = 0.0
    parks: int = 0  # steps parked between two layers for another
    joins: int = 0  # parked steps whose rows joined another
    evictions: int = 0  # requests that lost their pages and were recomputed
    reused_tokens: int = 0  # prompt tokens found in the prefix cache
    kv_pages_kept: int = 0  # free pages that are cached for prefix reuse
    kept_pages_evicted: int = 0  # cached pages that were evicted
    full_decode_step_s: float = math.nan  # expected, with every slot taken and no brownout
    audits: tuple[AuditState, ...] = ()  # of each model
    refused: tuple[Refused, ...] = ()  # `requests_rejected`, apart by key and class
    prefix_queries: int = 0  # prompt tokens that were looked up for prefix reuse
