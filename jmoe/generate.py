"""Generation through the paged cache, in one thread: the notebook's `generate`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from jmoe import display
from jmoe.api import Model
from jmoe.brownout import Brownout
from jmoe.forward import check_tokens
from jmoe.numbers import integer, real
from jmoe.packed_rows import Q_LEN, empty_rows, pack_row
from jmoe.stepper import Stepper, bucket
from jmoe.steps import StepOutput
from jmoe.tokenizer import lacking

Prompt = str | Sequence[int]


SHOWN_PROMPTS, SHOWN_CHARACTERS = 20, 200


@dataclass(frozen=True, repr=False)
class Generation:
    """What `generate` returns, one entry a prompt."""

    tokens: list[list[int]]  # generated tokens, an end token included
    degraded_visits: list[int]  # expert visits that went to a united expert or were dropped
    expert_visits: list[int]  # all expert visits: tokens * MoE layers * picks
    logprobs: list[list[float]]
    texts: list[str] | None  # None where the model has no tokenizer
    prompts: list[Prompt] = field(default_factory=list)  # as they were given

    @property
    def degraded_shares(self) -> list[float]:
        """Degraded expert visits over all of a prompt's, 0 to 1."""
        pairs = zip(self.degraded_visits, self.expert_visits, strict=True)
        return [degraded / visits for degraded, visits in pairs]

    def __repr__(self) -> str:
        share = sum(self.degraded_visits) / sum(self.expert_visits)
        first = (self.texts or self.tokens)[0]
        return (
            f"Generation({len(self.tokens)} prompts, {sum(map(len, self.tokens))} tokens, "
            f"{share:.1%} of {sum(self.expert_visits):,} expert visits degraded, "
            f"first: {_shown(first, 80)!r})"
        )

    def _repr_html_(self) -> str:
        written = self.texts or self.tokens
        rows = [
            (_shown(prompt), _shown(text), len(tokens), f"{share:.1%}")
            for prompt, text, tokens, share in zip(
                self.prompts or [""] * len(written),
                written,
                self.tokens,
                self.degraded_shares,
                strict=True,
            )
        ]
        left = len(rows) - SHOWN_PROMPTS
        return display.table(
            "Generation" + (f" (and {left} prompts more)" if left > 0 else ""),
            rows[:SHOWN_PROMPTS],
            header=("prompt", "text", "tokens", "degraded visits"),
        )


def generate(
    model: Model,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    brownout: Brownout | None = None,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_token_ids: Sequence[int] | None = None,
    chunk_size: int = 256,
    page_size: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> Generation:
    """Continues prompts together: prefill in chunks of at most `chunk_size` tokens, then decode.

    Args:
        model: as `load` returns it; over a mesh, sequences are spread over its devices.
        prompts: token lists or strings.
        max_new_tokens: tokens to add at most.
        brownout: what may be degraded in prefill and decode; None is nothing.
        temperature: 0 is greedy; `top_k` 0 and `top_p` 1 are off. Prompt i draws from `seed + i`.
        seed: of the first prompt.
        top_k: see temperature.
        top_p: see temperature.
        stop_token_ids: tokens that end a sequence; None takes the model's own end tokens.
        chunk_size: prompt tokens a step.
        page_size: positions a KV page.
        progress: called with (decode steps done, steps at most).

    Raises ValueError for an empty prompt, one outside the vocabulary or too long, or bad limits.
    """
    if isinstance(prompts, str):
        raise ValueError(f"prompts is the text {prompts!r:.40}; give a list: [{prompts!r:.40}]")
    _check_sampling(temperature, top_k, top_p)
    max_new_tokens = integer("max_new_tokens", max_new_tokens)
    chunk_size, page_size = integer("chunk_size", chunk_size), integer("page_size", page_size)
    seed = integer("seed", seed)
    for name, value in (("chunk_size", chunk_size), ("page_size", page_size)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    token_lists = [as_tokens(model, prompt) for prompt in prompts]
    cfg = model.config
    if not token_lists:
        raise ValueError("prompts is empty; give at least one")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    longest = max(map(len, token_lists)) + max_new_tokens
    if longest > cfg.max_position:
        raise ValueError(
            f"the longest prompt and max_new_tokens make {longest} positions; "
            f"{model.name} has {cfg.max_position} (max_position_embeddings)"
        )
    given = cfg.eos_token_ids if stop_token_ids is None else stop_token_ids
    stops = {integer("a stop token", token) for token in given}
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    run = _Run(model, token_lists, longest, brownout, page_size, chunk_size, sampling, seed)
    run.prefill()
    for step in range(max_new_tokens):
        if progress is not None:
            progress(step, max_new_tokens)
        live = [i for i, out in enumerate(run.tokens) if not out or out[-1] not in stops]
        if not live:
            break
        if step:
            run.decode(live)
        run.accept(live)
    tokenizer = model.tokenizer
    texts = None if tokenizer is None else [tokenizer.decode(out) for out in run.tokens]
    per_token = cfg.num_moe_layers * cfg.experts_per_token
    visits = [
        per_token * (len(prompt) + len(out) - 1)
        for prompt, out in zip(token_lists, run.tokens, strict=True)
    ]
    return Generation(run.tokens, run.degraded.tolist(), visits, run.logprobs, texts, list(prompts))


def _shown(text: Prompt, width: int = SHOWN_CHARACTERS) -> str:
    """Returns a prompt or an answer on one short line."""
    return display.cut(text if isinstance(text, str) else ", ".join(map(str, text)), width)


def as_tokens(model: Model, prompt: Prompt) -> list[int]:
    """Returns the token ids of a prompt. Raises ValueError for an empty one or a token out of
    range.
    """
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise ValueError(f"{model.name} has {lacking(model.path)}; give token lists")
        tokens = model.tokenizer.encode(prompt)
    elif not hasattr(prompt, "__iter__"):
        raise ValueError(f"a prompt is {prompt!r:.40}; give text or a list of tokens: [[1, 2, 3]]")
    else:
        tokens = [integer("a token", token) for token in prompt]
    if not tokens:
        raise ValueError("a prompt is empty; give at least one token")
    check_tokens(tokens, model.config.vocab_size)
    return tokens


def _check_sampling(temperature: float, top_k: int, top_p: float) -> None:
    """Raises ValueError for a value that no token can be drawn with.

    `serving.request` asks the same, and must not import this package: a server answers health
    before jax is there.
    """
    if not 0 <= real("temperature", temperature) <= 100:
        raise ValueError(f"temperature is {temperature!r}; it must be between 0 and 100")
    if not 0 <= integer("top_k", top_k) < 2**31:
        raise ValueError(f"top_k is {top_k!r}; it must be 0 (off) or more, below 2**31")
    if not 0 < real("top_p", top_p) <= 1:
        raise ValueError(f"top_p is {top_p!r}; it must be above 0 and at most 1")


class _Run:
    """Steps and outputs of one call; sequence i owns slot i."""

    def __init__(self, model, prompts, longest, brownout, page_size, chunk, sampling, seed) -> None:
        count = len(prompts)
        self.prompts, self.chunk_size, self.sampling, self.seed = prompts, chunk, sampling, seed
        self.stepper = Stepper(
            model,
            brownout,
            num_slots=count,
            max_len=longest,
            page_size=page_size,
            max_chunk=chunk,
        )
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.logprobs: list[list[float]] = [[] for _ in prompts]
        self.degraded = np.zeros(count, np.int64)
        self.newest = np.zeros(count, np.int32)
        self.newest_logprob = np.zeros(count, np.float32)

    def _row(self, i: int, kv_len: int, q_len: int = 1) -> np.ndarray:
        return pack_row(i, kv_len=kv_len, q_len=q_len, seed=self.seed + i, **self.sampling)

    def _keep(self, indices: list[int], out: StepOutput) -> None:
        count = len(indices)
        self.newest[indices] = np.asarray(out.tokens)[:count]
        self.newest_logprob[indices] = np.asarray(out.logprobs)[:count]
        self.degraded[indices] += np.asarray(out.degraded)[:count]

    def prefill(self) -> None:
        """Feeds every prompt, chunks of several prompts together while they fit."""
        done = [0] * len(self.prompts)
        while any(d < len(p) for d, p in zip(done, self.prompts, strict=True)):
            room, tokens, indices, rows = self.chunk_size, [], [], []
            for i, prompt in enumerate(self.prompts):
                part = prompt[done[i] : done[i] + room]
                if not part:
                    continue
                done[i] += len(part)
                room -= len(part)
                tokens += part
                indices.append(i)
                rows.append(self._row(i, done[i], len(part)))
            packed = empty_rows(bucket(len(rows)))
            packed[: len(rows)] = rows
            flat = np.zeros(bucket(len(tokens)), np.int32)
            flat[: len(tokens)] = tokens
            assert packed[:, Q_LEN].sum() == len(tokens)
            self._keep(indices, self.stepper.prefill(flat, packed))

    def decode(self, live: list[int]) -> None:
        """Decodes one token for each sequence of `live`."""
        packed = empty_rows(bucket(len(live)))
        for at, i in enumerate(live):
            packed[at] = self._row(i, len(self.prompts[i]) + len(self.tokens[i]))
        self._keep(live, self.stepper.decode(packed))

    def accept(self, live: list[int]) -> None:
        """Takes the newest token of each sequence of `live`."""
        for i in live:
            self.tokens[i].append(int(self.newest[i]))
            self.logprobs[i].append(float(self.newest_logprob[i]))
