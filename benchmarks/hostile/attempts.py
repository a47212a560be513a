"""Requests of the load: 60 % well-formed, 25 % cancelled, 10 % malformed, 5 % with tiny deadlines.

A protocol sends them in its own form and answers in `GenerateResponse`s, so that all protocols are
judged alike.
"""

import random
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import grpc

from benchmarks.hostile.fuzzing import Fuzz
from serving.bench.workload import BUNDLED_TASKS, load_tasks
from serving.client import Client, admin_address_of
from serving.proto.jmoe.v1 import jmoe_pb2 as pb

GENERATE = "/jmoe.v1.Generation/Generate"
GROUPS = {"fine": 60, "cancelled": 25, "malformed": 10, "late": 5}
MOST_NEW_TOKENS, MOST_PROMPT_TOKENS = 60, 120


@dataclass(frozen=True)
class Facts:
    """What the server says of itself, and the texts that fit it (none without a tokenizer)."""

    address: str
    admin_address: str
    http_address: str
    model: str
    version: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_queue_len: int
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Attempt:
    """One call: what is sent, how its caller behaves, and the codes that are right.

    `manner` is "read" (to the end), "cancel", "close" (the channel), "slow" (long pauses between
    messages), "silent" (never sends its message), "empty" (ends its side without a message) or
    "half-close" (over HTTP: ends its side once it has asked, and reads).
    RESOURCE_EXHAUSTED with a time to come back is right for every one: the server is full.
    """

    group: str
    kind: str
    payload: bytes
    allowed: frozenset[str]
    manner: str = "read"
    path: str = GENERATE
    timeout_s: float | None = None
    stop_after: int = 0  # messages, where it is cancelled
    request: pb.GenerateRequest | None = None  # the same as `payload`, where it is well-formed

    @property
    def leaves(self) -> bool:
        """Whether its caller goes before the end."""
        return self.manner in ("cancel", "close")


@dataclass
class Ended:
    """One call's end. `refused`: the server is full and said when to come back."""

    code: str
    details: str = ""
    refused: bool = False
    messages: list[pb.GenerateResponse] = field(default_factory=list)


@dataclass(frozen=True)
class Protocol:
    """One way to talk to the server. `path` is where well-formed requests go.

    `connect` opens one client's connection and yields the function that sends an attempt; `fuzz`
    lists what is fuzzed.
    """

    path: str
    takes_tokens: bool  # as prompts; else texts alone
    half_closes: bool
    payload: Callable[[Facts, pb.GenerateRequest, float | None], bytes]
    malformed: Callable[[Facts], list[Attempt]]
    connect: Callable[[Facts], AbstractAsyncContextManager[Callable[[Attempt], Awaitable[Ended]]]]
    fuzz: tuple[Fuzz, ...]


async def learn(address: str, http_address: str) -> Facts:
    """Asks the server for its limits and for whether it takes texts."""
    async with Client(address) as client:
        server, model = await client.server_info(), await client.model_info()
        prompts = [str(task.prompt) for task in load_tasks(BUNDLED_TASKS)]
        room = server.max_model_len - MOST_NEW_TOKENS - 1  # a token has a byte at least
        texts = tuple(text for text in prompts if len(text.encode()) <= room)
        if texts:
            try:
                async for _ in client.generate(texts[0], pb.SamplingParams(max_new_tokens=1)):
                    pass
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
                    raise
                texts = ()  # a model without a tokenizer
    return Facts(
        *(address, admin_address_of(address, server), http_address),
        *(server.model, server.version, model.vocab_size, server.max_model_len),
        *(server.max_num_seqs, server.max_queue_len, texts),
    )


def draw(rng: random.Random, facts: Facts, protocol: Protocol, polite: bool = False) -> Attempt:
    """Returns the next attempt; a well-formed one where it is to be polite."""
    group = "fine" if polite else rng.choices([*GROUPS], [*GROUPS.values()])[0]
    if group == "malformed":
        return rng.choice(protocol.malformed(facts))
    request = well_formed(rng, facts, protocol)
    kind, manner, allowed = "text" if request.HasField("text") else "tokens", "read", "OK"
    timeout_s, stop_after = None, 0
    if group == "cancelled":
        kind = manner = rng.choice(("cancel", "close"))
        allowed, stop_after = "CANCELLED", rng.randrange(0, 8)
    elif group == "late":
        kind, allowed, timeout_s = "tiny deadline", "DEADLINE_EXCEEDED", rng.uniform(0.001, 0.02)
    elif rng.random() < 0.03:
        kind, manner = "slow reader", "slow"
    elif protocol.half_closes and rng.random() < 0.05:  # as `nc -N` does
        kind, manner = "half-closing", "half-close"
    payload, codes = protocol.payload(facts, request, timeout_s), frozenset({allowed, "OK"})
    whole = request if group == "fine" else None
    path = protocol.path
    return Attempt(group, kind, payload, codes, manner, path, timeout_s, stop_after, whole)


def well_formed(rng: random.Random, facts: Facts, protocol: Protocol) -> pb.GenerateRequest:
    """Returns a request with nothing wrong."""
    request = pb.GenerateRequest(
        request_id=f"hostile-{rng.getrandbits(64):x}",
        allow_brownout=rng.random() < 0.8,
        priority=rng.choice((pb.PRIORITY_UNSPECIFIED, pb.LATENCY_SENSITIVE, pb.BEST_EFFORT)),
        sampling=pb.SamplingParams(
            max_new_tokens=rng.randrange(1, min(MOST_NEW_TOKENS, facts.max_model_len // 2) + 1),
            temperature=rng.choice((0.0, 0.0, 0.8)),
            top_k=rng.choice((0, 5)),
            top_p=rng.choice((1.0, 0.9)),
            ignore_eos=rng.random() < 0.5,
        ),
    )
    if rng.random() < 0.1:
        request.sampling.logprobs = True
        request.sampling.top_logprobs = rng.choice((0, 5, 20))
        request.sampling.prompt_logprobs = rng.random() < 0.3
    if facts.texts and (rng.random() < 0.5 or not protocol.takes_tokens):
        request.text = rng.choice(facts.texts)
    else:
        longest = min(MOST_PROMPT_TOKENS, facts.max_model_len - request.sampling.max_new_tokens)
        count = rng.randrange(1, max(2, longest))
        request.tokens.ids.extend(rng.randrange(facts.vocab_size) for _ in range(count))
    return request


def sampling_of(wanted: pb.SamplingParams) -> dict[str, Any]:
    """Returns sampling parameters by vLLM's names, those that are set."""
    count = wanted.max_new_tokens if wanted.HasField("max_new_tokens") else 128
    found: dict[str, Any] = {"max_tokens": count, "temperature": wanted.temperature}
    for name in ("top_k", "top_p", "ignore_eos"):
        if wanted.HasField(name):
            found[name] = getattr(wanted, name)
    for name in ("stop", "stop_token_ids"):
        if values := getattr(wanted, name):
            found[name] = list(values)
    return found


def flaw(attempt: Attempt, ended: Ended) -> str:
    """Returns what is not right about a stream that should be whole; empty where nothing is."""
    request, messages = attempt.request, ended.messages
    if request is None or ended.code != "OK":
        return ""
    if not messages or messages[-1].finish_reason not in ("stop", "length"):
        return f"{len(messages)} messages, and the last has no finish_reason"
    count, most = sum(len(m.token_ids) for m in messages), request.sampling.max_new_tokens
    usage = messages[-1].usage
    if count != usage.completion_tokens or count > most:
        return f"{count} tokens came, {usage.completion_tokens} were counted, {most} were allowed"
    if len(messages) > count:
        return f"{len(messages)} messages came for {count} tokens"
    if request.sampling.ignore_eos and count != most:
        return f"{count} tokens came of {most}"
    if request.HasField("tokens") and usage.prompt_tokens != len(request.tokens.ids):
        return f"{usage.prompt_tokens} prompt tokens were counted of {len(request.tokens.ids)}"
    if any(message.request_id != request.request_id for message in messages):
        return "a message has another request's id"
    return ""
