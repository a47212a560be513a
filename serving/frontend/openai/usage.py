"""The `usage` object of a call, with OpenAI's fields and jmoe's own."""

from collections.abc import Iterable, Sequence
from typing import Any

from serving.request import Output, ThresholdSpan


def usage(outputs: Sequence[Output], num_per_prompt: int = 1) -> dict[str, Any]:
    """Returns the usage of a call, given the newest output of each of its choices.

    `outputs` are ordered by prompt, with `num_per_prompt` choices for each, and each prompt counts
    once. `degraded_share` is the share of expert visits that were degraded. The threshold fields
    have the smallest and largest threshold (percent) that the call's steps ran under; null before
    the first step.
    """
    prompt = sum(out.usage.prompt_tokens for out in outputs[::num_per_prompt])
    cached = sum(out.usage.cached_tokens for out in outputs[::num_per_prompt])
    completion = sum(out.usage.completion_tokens for out in outputs)
    visits = sum(out.usage.expert_visits for out in outputs)
    degraded = sum(out.usage.degraded_visits for out in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "degraded_share": degraded / visits if visits else 0.0,
        "prefill_threshold_percent": _span(out.prefill_threshold for out in outputs),
        "decode_threshold_percent": _span(out.decode_threshold for out in outputs),
    }


def _span(spans: Iterable[ThresholdSpan | None]) -> list[int] | None:
    there = [span for span in spans if span is not None]
    if not there:
        return None
    return [min(span.min_percent for span in there), max(span.max_percent for span in there)]
