"""What a call took, in OpenAI's fields and jmoe's own."""

from collections.abc import Iterable, Sequence
from typing import Any

from serving.request import Output, ThresholdSpan


def usage(outputs: Sequence[Output], num_per_prompt: int = 1) -> dict[str, Any]:
    """Of the newest outputs of a call's answers, which come prompt by prompt, so many for each.

    A prompt counts once. `degraded_share` is of visits to experts, and thresholds are the smallest
    and largest in percent that its steps ran under; null before there were any.
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
