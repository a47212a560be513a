"""What is sent: 60 % well-formed, 25 % cancelled, 10 % malformed, 5 % with tiny deadlines."""

import functools
import itertools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from serving.client import Client, admin_address_of
from serving.proto.jmoe.v1 import jmoe_pb2 as pb

if TYPE_CHECKING:
    from benchmarks.hostile.protocols import Spoken

GENERATE = "/jmoe.v1.Generation/Generate"
GROUPS = {"fine": 60, "cancelled": 25, "malformed": 10, "late": 5}
MOST_NEW_TOKENS, MOST_PROMPT_TOKENS = 60, 120
MESSAGE_LIMIT = 4 << 20  # of gRPC, for what a server receives
TASKS = Path(__file__).parents[2] / "jmoe" / "bundled" / "tasks.jsonl"


@dataclass(frozen=True)
class Facts:
    """What the server says of itself, and the texts that fit it (none without a tokenizer)."""

    model: str
    version: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_queue_len: int
    texts: tuple[str, ...]
    admin_address: str


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


async def learn(address: str, admin_address: str | None = None) -> Facts:
    """Asks the server for its limits and for whether it takes texts."""
    async with Client(address) as client:
        server, model = await client.server_info(), await client.model_info()
        lines = TASKS.read_text(encoding="utf-8").splitlines()
        prompts = [json.loads(line)["prompt"] for line in lines]
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
        server.model,
        server.version,
        model.vocab_size,
        server.max_model_len,
        server.max_num_seqs,
        server.max_queue_len,
        texts,
        admin_address or admin_address_of(address, server),
    )


def draw(rng: random.Random, facts: Facts, spoken: "Spoken", polite: bool = False) -> Attempt:
    """Returns the next attempt; a well-formed one where it is to be polite."""
    group = "fine" if polite else rng.choices([*GROUPS], [*GROUPS.values()])[0]
    if group == "malformed":
        return rng.choice(spoken.malformed(facts))
    request = _well_formed(rng, facts, spoken.takes_tokens)
    attempt = _behaving(rng, group, spoken.payload(request), request)
    return replace(attempt, path=spoken.path)


def _behaving(
    rng: random.Random, group: str, payload: bytes, request: pb.GenerateRequest
) -> Attempt:
    if group == "cancelled":
        manner, allowed = rng.choice(("cancel", "close")), frozenset({"CANCELLED", "OK"})
        return Attempt(group, manner, payload, allowed, manner, stop_after=rng.randrange(0, 8))
    if group == "late":
        allowed = frozenset({"DEADLINE_EXCEEDED", "OK"})
        timeout_s = rng.uniform(0.001, 0.02)
        return Attempt(group, "tiny deadline", payload, allowed, timeout_s=timeout_s)
    slow = rng.random() < 0.03
    return Attempt(
        group,
        "slow reader" if slow else "text" if request.HasField("text") else "tokens",
        payload,
        frozenset({"OK"}),
        "slow" if slow else "read",
        request=request,
    )


def _well_formed(rng: random.Random, facts: Facts, takes_tokens: bool) -> pb.GenerateRequest:
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
    if facts.texts and (rng.random() < 0.5 or not takes_tokens):
        request.text = rng.choice(facts.texts)
    else:
        longest = min(MOST_PROMPT_TOKENS, facts.max_model_len - request.sampling.max_new_tokens)
        count = rng.randrange(1, max(2, longest))
        request.tokens.ids.extend(rng.randrange(facts.vocab_size) for _ in range(count))
    return request


@functools.cache
def malformed(facts: Facts) -> list[Attempt]:
    """Every malformed attempt there is; some are as large as gRPC lets them be, or larger."""
    bad = frozenset({"INVALID_ARGUMENT"})

    def one(kind: str, payload: bytes, allowed: frozenset[str] = bad) -> Attempt:
        return Attempt("malformed", kind, payload, allowed)

    missing = bad | {"NOT_FOUND"}
    found = [one(kind, make().SerializeToString()) for kind, make in _wrong_values(facts).items()]
    found += [one(kind, make().SerializeToString()) for kind, make in _oversized(facts).items()]
    found += [one(f"undecodable: {kind}", payload) for kind, payload in _undecodable().items()]
    found += [
        one("unknown model", _request(model="nobody").SerializeToString(), missing),
        one("model name of 1 MB", _request(model="m" * 1_000_000).SerializeToString(), missing),
        # gRPC itself refuses this one, with no time to come back.
        one(
            "text beyond gRPC's limit",
            pb.GenerateRequest(text="word " * (MESSAGE_LIMIT // 5 + 1)).SerializeToString(),
            frozenset({"RESOURCE_EXHAUSTED"}),
        ),
    ]
    unknown = ("/jmoe.v1.Generation/Nothing", "/jmoe.v9.Generation/Generate", "/x", "/" + "y" * 900)
    found += [
        Attempt("malformed", "unknown method", b"", frozenset({"UNIMPLEMENTED"}), path=path)
        for path in unknown
    ]
    # Nobody has asked for anything yet: their own deadline ends them, if the server does not.
    ended = bad | {"UNIMPLEMENTED", "CANCELLED", "DEADLINE_EXCEEDED"}
    found += [
        Attempt("malformed", f"half open, {manner}", b"", ended, manner, timeout_s=15.0)
        for manner in ("silent", "empty")
    ]
    return found


def _request(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(tokens=pb.TokenIds(ids=[1, 2, 3]), **fields)  # type: ignore[arg-type]


def _wrong_values(facts: Facts) -> dict[str, Callable[[], pb.GenerateRequest]]:
    def sampling(**fields: object) -> Callable[[], pb.GenerateRequest]:
        return lambda: _request(sampling=pb.SamplingParams(**fields))  # type: ignore[arg-type]

    def tokens(ids: list[int]) -> Callable[[], pb.GenerateRequest]:
        return lambda: pb.GenerateRequest(tokens=pb.TokenIds(ids=ids))

    return {
        "no prompt": pb.GenerateRequest,
        "no tokens": tokens([]),
        "empty text": lambda: pb.GenerateRequest(text=""),
        "token beyond the vocabulary": tokens([facts.vocab_size]),
        "token below 0": tokens([-1]),
        "one token too many": tokens([1] * (facts.max_model_len + 1)),
        "priority 99": lambda: _request(priority=99),
        "temperature NaN": sampling(temperature=float("nan")),
        "temperature infinite": sampling(temperature=float("inf")),
        "temperature below 0": sampling(temperature=-1.0),
        "top_p 7": sampling(top_p=7.0),
        "top_p NaN": sampling(top_p=float("nan")),
        "top_k below 0": sampling(top_k=-1),
        "no new tokens": sampling(max_new_tokens=0),
        "2 ** 31 - 1 new tokens": sampling(max_new_tokens=2**31 - 1),
        "empty stop string": sampling(stop=[""]),
        "65 stop strings": sampling(stop=["stop"] * 65),
    }


def _oversized(facts: Facts) -> dict[str, Callable[[], pb.GenerateRequest]]:
    def ids(count: int) -> list[int]:
        return list(itertools.islice(itertools.cycle(range(min(facts.vocab_size, 4096))), count))

    def long_stops() -> pb.GenerateRequest:
        texts = [f"{number:02d}" + "s" * 59_998 for number in range(64)]
        return _request(sampling=pb.SamplingParams(stop=texts, max_new_tokens=8))

    def many_stop_tokens() -> pb.GenerateRequest:
        return _request(sampling=pb.SamplingParams(stop_token_ids=ids(1_200_000)))

    return {
        "1.2 M stop_token_ids": many_stop_tokens,
        "1 M token ids": lambda: pb.GenerateRequest(tokens=pb.TokenIds(ids=ids(1_000_000))),
        "text of 4 MB": lambda: pb.GenerateRequest(text="word " * (MESSAGE_LIMIT // 5 - 10)),
        "word of 4 MB": lambda: pb.GenerateRequest(text="x" * (MESSAGE_LIMIT - 64)),
        "64 stop strings of 60 KB": long_stops,
        "request id of 1 MB": lambda: _request(request_id="r" * 1_000_000),
    }


def _undecodable() -> dict[str, bytes]:
    rng = random.Random(1)
    return {
        "a text that is not UTF-8": b"\x12\x04\xff\xfe\xfd\xfc",
        "a length beyond the end": b"\x12\xff\xff\xff\x7fabc",
        "a varint without end": b"\xff" * 20,
        "a group without end": b"\x0b" * 50,
        "noise": bytes(rng.randrange(128, 256) for _ in range(4096)),
        "1 MB of noise": b"\xff" + rng.randbytes(1_000_000),
    }
