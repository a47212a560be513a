"""The oracle of what is served: `jmoe.forward` on an answer's whole context, in one piece."""

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jmoe
from jmoe.sampling import Sampling, sample
from serving.request import Priority, SamplingParams

LS, BE = Priority.LATENCY_SENSITIVE, Priority.BEST_EFFORT
NEAR_TIE = 1e-3
ROWS = 256


class Asked(NamedTuple):
    """A request; `options` are those of `Engine.generate`."""

    prompt: list[int] | str
    sampling: SamplingParams
    model: str = ""
    options: dict[str, Any] = {}  # noqa: RUF012
    wait_s: float = 0.0


class Answer(NamedTuple):
    """What a request got; `usage` is the last output's."""

    tokens: list[int]
    logprobs: list[float]
    text: str
    scores: tuple[float, ...]  # of the prompt
    top: list[tuple[tuple[int, float], ...]]
    usage: Any
    reason: str | None
    score_tops: tuple[tuple[tuple[int, float], ...], ...] = ()

    @property
    def degraded(self) -> int:
        return self.usage.degraded_visits


async def answer(engine, asked: Asked, **options) -> Answer:
    """Sends one request, and collects its outputs."""
    await asyncio.sleep(asked.wait_s)
    given = {"model": asked.model} if asked.model else {}
    stream = engine.generate(asked.prompt, asked.sampling, **given, **(asked.options | options))
    outs = [out async for out in stream]
    return Answer(
        [token for out in outs for token in out.token_ids],
        [logprob for out in outs for logprob in out.logprobs],
        "".join(out.text for out in outs),
        next((out.prompt_logprobs for out in outs if out.prompt_logprobs), ()),
        [top for out in outs for top in out.top_logprobs],
        outs[-1].usage,
        outs[-1].finish_reason,
        next((out.prompt_top_logprobs for out in outs if out.prompt_top_logprobs), ()),
    )


def changed(logits, prompt, output, sampling: SamplingParams) -> np.ndarray:
    """Returns the logits of the next token as a request wants them."""
    logits = np.array(logits, np.float64)
    for token, bias in sampling.logit_bias:
        logits[token] += bias
    penalty = sampling.repetition_penalty
    for token in {*prompt, *output} if penalty != 1.0 else ():
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token in set(output):
        logits[token] -= sampling.frequency_penalty * output.count(token)
        logits[token] -= sampling.presence_penalty
    return logits


draw = jax.jit(sample)


def drawn(logits, samplings: Sequence[SamplingParams], positions) -> list[int]:
    """Returns the tokens that the notebook draws, in batches of one shape."""
    found = []
    for start in range(0, len(samplings), ROWS):
        part, fill = samplings[start : start + ROWS], ROWS - len(samplings[start : start + ROWS])
        columns = zip(*((s.temperature, s.top_k, s.top_p, s.seed or 0) for s in part), strict=True)
        kinds = (jnp.float32, jnp.int32, jnp.float32, jnp.uint32)
        arrays = [
            jnp.asarray(np.pad(np.array(column), (0, fill)), kind)
            for column, kind in zip(columns, kinds, strict=True)
        ]
        rows = jnp.asarray(np.pad(logits[start : start + ROWS], ((0, fill), (0, 0))), jnp.float32)
        places = np.pad(np.array(positions[start : start + ROWS], np.int32), (0, fill))
        tokens, _ = draw(rows, Sampling(*arrays), jnp.asarray(places))
        found += np.asarray(tokens)[: len(part)].tolist()
    return found


def check(
    model,
    asked: Sequence[Asked],
    answers: Sequence[Answer],
    *,
    atol: float = 2e-4,
    tie: float = NEAR_TIE,
) -> None:
    """Checks that each token is the one that the notebook writes after what came before it.

    Its logit is raised by a tie's width first, so that either of two may follow where they were as
    likely. Log-probabilities are those of logits that no request has changed.
    """
    prompts = [
        model.tokenizer.encode(one.prompt) if isinstance(one.prompt, str) else one.prompt
        for one in asked
    ]
    whole = [[*p, *got.tokens] for p, got in zip(prompts, answers, strict=True)]
    width = -(-max(map(len, whole)) // 32) * 32
    contexts = np.zeros((len(whole), width), np.int32)
    for row, context in zip(contexts, whole, strict=True):
        row[: len(context)] = context
    every = np.asarray(jmoe.forward(model, contexts), np.float64)
    peak = every.max(axis=-1, keepdims=True)
    every_logprob = every - peak - np.log(np.exp(every - peak).sum(axis=-1, keepdims=True))
    rows, samplings, positions, wanted = [], [], [], []
    for logits, logprobs, prompt, one, got in zip(
        every, every_logprob, prompts, asked, answers, strict=True
    ):
        ends = () if one.sampling.ignore_eos else model.config.eos_token_ids
        assert not set(got.tokens[:-1]) & set(ends)
        assert len(got.tokens) == one.sampling.max_new_tokens or got.tokens[-1] in ends
        if isinstance(one.prompt, str):
            said = got.tokens[:-1] if got.tokens[-1] in ends else got.tokens
            assert got.text == model.tokenizer.decode(said)
        at = np.arange(len(prompt) - 1, len(prompt) - 1 + len(got.tokens))
        if one.sampling.logprobs:
            np.testing.assert_allclose(got.logprobs, logprobs[at, got.tokens], atol=atol)
        if one.sampling.prompt_logprobs:
            scores = logprobs[np.arange(len(prompt) - 1), prompt[1:]]
            np.testing.assert_allclose(got.scores, scores, atol=atol)
        likeliest = [(place, top) for place, top in enumerate(got.score_tops)]
        if one.sampling.top_prompt_logprobs:
            assert len(likeliest) == len(prompt) - 1
            of_best = zip(prompt[1:], got.scores, got.score_tops, strict=True)  # not a bit apart
            assert all(score == top[0][1] for token, score, top in of_best if token == top[0][0])
        of_new = zip(at, got.top, strict=False)
        places = [*of_new, *likeliest]
        assert all(len(top) == one.sampling.top_logprobs for top in got.top)
        assert all(len(top) == one.sampling.top_prompt_logprobs for top in got.score_tops)
        for place, top in places:
            likeliest = np.sort(logprobs[place])[::-1][: len(top)]
            np.testing.assert_allclose([value for _, value in top], likeliest, atol=atol)
            for token, value in top:
                np.testing.assert_allclose(value, logprobs[place, token], atol=atol)
        assert len(got.top) == (len(got.tokens) if one.sampling.top_logprobs else 0)
        for count, (place, token) in enumerate(zip(at, got.tokens, strict=True)):
            row = changed(logits[place], prompt, got.tokens[:count], one.sampling)
            row[token] += tie
            rows.append(row)
            samplings.append(one.sampling)
            positions.append(place + 1)
            wanted.append(token)
    assert drawn(np.array(rows), samplings, positions) == wanted
