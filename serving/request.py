"""Requests as the engine takes them, and the outputs it streams back."""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real

from serving.errors import InvalidRequest, NotFound, shown

MAX_STOP_STRINGS, MAX_STOP_CHARS = 64, 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_REQUEST_ID_CHARS = 128
"""What one request may carry beside its prompt, whatever the model."""


@dataclass(frozen=True)
class Bounds:
    """How large a prompt can be: what is larger cannot fit, and is refused before it is copied."""

    max_prompt_tokens: int  # one position is left for the first new token
    max_prompt_chars: int  # of text: the tokenizer's longest token times `max_prompt_tokens`
    vocab_size: int  # of the model; 0 where there is none


class Priority(enum.StrEnum):
    """Service class of a request (QLLM). By name, since engines disagree on what a number means."""

    LATENCY_SENSITIVE = "latency_sensitive"
    BEST_EFFORT = "best_effort"


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn and when to stop. Raises InvalidRequest for a value out of range."""

    max_new_tokens: int = 128
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    seed: int | None = None  # None: drawn by the engine
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()  # the text ends before the first of these
    ignore_eos: bool = False
    logprobs: bool = False  # of each output token
    prompt_logprobs: bool = False  # of each prompt token after the first

    def __post_init__(self) -> None:
        """Checks types and ranges."""
        new = self.max_new_tokens
        _check(_whole(new, 1), "max_new_tokens", new, "a whole number, at least 1")
        _check(
            _real(self.temperature) and 0 <= self.temperature <= 100,
            "temperature",
            self.temperature,
            "between 0 and 100",
        )
        _check(_whole(self.top_k, 0, 2**31), "top_k", self.top_k, "a whole number (0: off)")
        _check(_real(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        seed_fits = self.seed is None or _whole(self.seed, 0, 2**64)
        _check(seed_fits, "seed", self.seed, "a 64-bit number")
        check_count("stop strings", len(self.stop), MAX_STOP_STRINGS)
        check_count("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
        for text in self.stop:
            _check(isinstance(text, str) and text != "", "stop", text, "a string, not empty")
            check_count("characters of a stop string", len(text), MAX_STOP_CHARS)
        for token in self.stop_token_ids:
            _check(isinstance(token, Integral), "a stop token", token, "an integer")


def _check(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise InvalidRequest(f"{name} is {shown(value)}; it must be {wanted}")


def _whole(value: object, least: int, below: int = 2**63) -> bool:
    return isinstance(value, Integral) and least <= int(value) < below


def _real(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def check_count(what: str, count: int, most: int) -> None:
    """Raises InvalidRequest for more than a request may carry; call it before copying."""
    if count > most:
        raise InvalidRequest(f"number of {what} is {count}; it must be {most} at most")


def number_of(model: str, names: Sequence[str]) -> int:
    """Which of the served models is called so; empty: the first. Raises NotFound, naming them."""
    if model and model not in names:
        have = ", ".join(map(shown, names))
        verb = "is" if len(names) == 1 else "are"
        raise NotFound(f"model {shown(model)} is not served; {have} {verb}")
    return names.index(model) if model else 0


@dataclass(frozen=True)
class Request:
    """One generation request."""

    request_id: str
    prompt: str | Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    allow_brownout: bool = True  # False: its rows are exempt
    priority: Priority = Priority.LATENCY_SENSITIVE
    timeout_s: float | None = None  # from admission
    model: int = 0  # which of a family's models it asks


@dataclass(frozen=True)
class ThresholdSpan:
    """Smallest and largest threshold, in percent, that a request's steps of one phase ran under."""

    min_percent: int
    max_percent: int


@dataclass(frozen=True)
class Usage:
    """What a request took so far. Visits are (token, MoE layer, pick) triples."""

    prompt_tokens: int
    completion_tokens: int
    expert_visits: int
    degraded_visits: int


@dataclass(frozen=True)
class Output:
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


@dataclass(frozen=True)
class BrownoutState:
    """Brownout settings in force, and P90 latencies: those the controller last saw, and those it
    expected of its last decision (NaN: none).
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


@dataclass(frozen=True)
class EngineStats:
    """Counters and gauges of an engine at one moment."""

    num_running: int
    num_waiting: int
    kv_pages_used: int
    kv_pages_total: int
    compilations_since_ready: int
    requests_finished: int
    requests_aborted: int
    requests_rejected: int
    steps_prefill: int
    steps_decode: int
    expert_visits: int
    degraded_visits: int
    uptime_s: float
    requests_failed: int = 0  # alone, by a fault that was not their caller's
    parks: int = 0  # steps that another went before, between two layers
    joins: int = 0  # parked steps whose rows another took along
    evictions: int = 0  # requests that gave up their pages, to be computed again
