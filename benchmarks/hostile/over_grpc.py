"""Attempts and fuzzed messages over gRPC, and what is malformed for jmoe's own service."""

import asyncio
import contextlib
import functools
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from benchmarks.hostile.attempts import GENERATE, Attempt, Ended, Facts
from benchmarks.hostile.fuzzing import Answer, Fuzz, message
from serving.proto.inference import inference_pb2
from serving.proto.jmoe.v1 import jmoe_pb2 as pb

MESSAGE_LIMIT = 4 << 20  # of gRPC, for what a server receives
HUNG = "HUNG"
"""What stands for a code where a call did not end in time."""
LOST = "ANSWER_LOST"
"""Stands for a code where an answer never arrived: too large for a status, or not sent."""
BAD_CODES = frozenset({"UNKNOWN", "INTERNAL", "UNAVAILABLE", HUNG, LOST})
"""UNAVAILABLE: a server that is ready does not say so, but one that is gone does not listen."""
OWN_SOCKET = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
_SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
_MOST_IN_A_STREAM = 6

Reply = Callable[[bytes], pb.GenerateResponse | Ended]
"""Reads one call's messages in turn; Ended is an answer that says how a request ended."""


@contextlib.contextmanager
def left_to_code() -> Iterator[None]:
    """Reads a call to its end without raising; `code()` says how it ended.

    gRPC raises CancelledError for a call that ended with CANCELLED, whoever cancelled it. That of
    the task itself is raised.
    """
    try:
        yield
    except grpc.aio.AioRpcError:
        pass
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise


# ---- attempts ---------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def connect(
    facts: Facts, replies: Callable[[], Reply] = lambda: pb.GenerateResponse.FromString
) -> AsyncIterator[Callable[[Attempt], Awaitable[Ended]]]:
    """See Protocol. Those that close their channel or read slowly get one of their own."""
    async with grpc.aio.insecure_channel(facts.address, OWN_SOCKET) as channel:

        async def send(attempt: Attempt) -> Ended:
            if attempt.manner not in ("close", "slow"):
                return await call(channel, attempt, replies())
            options = OWN_SOCKET + (_SMALL_WINDOW if attempt.manner == "slow" else ())
            async with grpc.aio.insecure_channel(facts.address, options) as own:
                return await call(own, attempt, replies())

        yield send


async def call(channel: Any, attempt: Attempt, reply: Reply) -> Ended:
    """Makes the call as its attempt says."""
    if attempt.manner in ("silent", "empty"):
        nothing = iter(()) if attempt.manner == "empty" else None  # None: its side stays open
        made = channel.stream_stream(attempt.path)(nothing, timeout=attempt.timeout_s)
    else:
        made = channel.unary_stream(attempt.path)(attempt.payload, timeout=attempt.timeout_s)
    messages: list[pb.GenerateResponse] = []
    told = None
    if not attempt.leaves or attempt.stop_after:
        with left_to_code():
            async for payload in made:
                found = reply(payload)
                if isinstance(found, Ended):
                    told = found
                    continue
                messages.append(found)
                if attempt.leaves and len(messages) >= attempt.stop_after:
                    break
                if attempt.manner == "slow":
                    await asyncio.sleep(0.05)
    if attempt.manner == "cancel":
        made.cancel()
    elif attempt.manner == "close":
        await channel.close()
    code, details = (await made.code()).name, await made.details() or ""
    if told is not None and code == "OK":
        return told
    trailing = [] if code == "OK" else [key for key, _ in await made.trailing_metadata() or ()]
    refused = code == "RESOURCE_EXHAUSTED" and "grpc-retry-pushback-ms" in trailing
    return Ended(code, details, refused, messages)


def payload(facts: Facts, request: pb.GenerateRequest, timeout_s: float | None) -> bytes:
    """See Protocol."""
    return request.SerializeToString()


@functools.cache
def malformed(facts: Facts) -> list[Attempt]:
    """Every malformed attempt there is; some are as large as gRPC lets them be, or larger."""
    bad = frozenset({"INVALID_ARGUMENT"})
    requests = {**_wrong_values(facts), **_oversized(facts)}
    payloads = {kind: (one.SerializeToString(), bad) for kind, one in requests.items()}
    payloads |= {f"undecodable: {kind}": (one, bad) for kind, one in _undecodable().items()}
    for kind, model in (("unknown model", "nobody"), ("model name of 1 MB", "m" * 1_000_000)):
        payloads[kind] = _request(model=model).SerializeToString(), bad | {"NOT_FOUND"}
    beyond = pb.GenerateRequest(text="word " * (MESSAGE_LIMIT // 5 + 1)).SerializeToString()
    # gRPC itself refuses this one, with no time to come back.
    payloads["text beyond gRPC's limit"] = beyond, frozenset({"RESOURCE_EXHAUSTED"})
    found = [Attempt("malformed", kind, one, codes) for kind, (one, codes) in payloads.items()]
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


_ELSEWHERE = {
    "text beyond gRPC's limit": {"INVALID_ARGUMENT"},  # the server's own limit
    "top_k below 0": {"OK"},  # -1 is off, as in vLLM
}
"""What is right in other protocols, too."""


def translated(
    facts: Facts, payload: Callable[[Facts, Any, float | None], bytes], path: str
) -> Iterator[Attempt]:
    """Yields what is malformed as another protocol's `payload` says it, to that protocol's `path`.

    A message that cannot be decoded goes as it is.
    """
    for one in malformed(facts):
        data, allowed = one.payload, one.allowed | _ELSEWHERE.get(one.kind, set())
        with contextlib.suppress(DecodeError):
            data = payload(facts, pb.GenerateRequest.FromString(data), one.timeout_s)
        to = path if one.path == GENERATE else one.path
        yield replace(one, payload=data, path=to, allowed=allowed)


def _request(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(tokens=pb.TokenIds(ids=[1, 2, 3]), **fields)


def _sampling(**fields: Any) -> pb.GenerateRequest:
    return _request(sampling=pb.SamplingParams(**fields))


def _tokens(ids: list[int]) -> pb.GenerateRequest:
    return pb.GenerateRequest(tokens=pb.TokenIds(ids=ids))


def _wrong_values(facts: Facts) -> dict[str, pb.GenerateRequest]:
    return {
        "no prompt": pb.GenerateRequest(),
        "no tokens": _tokens([]),
        "empty text": pb.GenerateRequest(text=""),
        "token beyond the vocabulary": _tokens([facts.vocab_size]),
        "token below 0": _tokens([-1]),
        "one token too many": _tokens([1] * (facts.max_model_len + 1)),
        "priority 99": _request(priority=99),
        "temperature NaN": _sampling(temperature=float("nan")),
        "temperature infinite": _sampling(temperature=float("inf")),
        "temperature below 0": _sampling(temperature=-1.0),
        "top_p 7": _sampling(top_p=7.0),
        "top_p NaN": _sampling(top_p=float("nan")),
        "top_k below 0": _sampling(top_k=-1),
        "no new tokens": _sampling(max_new_tokens=0),
        "2 ** 31 - 1 new tokens": _sampling(max_new_tokens=2**31 - 1),
        "empty stop string": _sampling(stop=[""]),
        "65 stop strings": _sampling(stop=["stop"] * 65),
    }


def _oversized(facts: Facts) -> dict[str, pb.GenerateRequest]:
    def ids(count: int) -> list[int]:
        return list(itertools.islice(itertools.cycle(range(min(facts.vocab_size, 4096))), count))

    stops = [f"{number:02d}" + "s" * 59_998 for number in range(64)]
    return {
        "1.2 M stop_token_ids": _sampling(stop_token_ids=ids(1_200_000)),
        "1 M token ids": _tokens(ids(1_000_000)),
        "text of 4 MB": pb.GenerateRequest(text="word " * (MESSAGE_LIMIT // 5 - 10)),
        "word of 4 MB": pb.GenerateRequest(text="x" * (MESSAGE_LIMIT - 64)),
        "64 stop strings of 60 KB": _sampling(stop=stops, max_new_tokens=8),
        "request id of 1 MB": _request(request_id="r" * 1_000_000),
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


# ---- fuzz -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """Messages to one method, as a stream where it takes one; `leaves`: cancelled at an answer."""

    method: MethodDescriptor
    messages: tuple[bytes, ...]
    leaves: bool

    @property
    def kind(self) -> str:
        """The name of the method."""
        return self.method.name


def fuzz_of(
    service: ServiceDescriptor, drawn: Callable[[random.Random, Any], bytes] = message
) -> Fuzz:
    """Returns the fuzz of every method of a service, mostly of those that infer."""
    weights = [6 if "Infer" in method.name else 1 for method in service.methods]

    def draw(rng: random.Random, model: str) -> Call:
        method = rng.choices(service.methods, weights)[0]
        streams = method.client_streaming
        several = method.name == "ModelStreamInfer"  # others end a stream at the first that is bad
        count = rng.randrange(1, _MOST_IN_A_STREAM + 1) if several else 1
        messages = [drawn(rng, method.input_type) for _ in range(count)]
        # gRPC itself ends a call for a message beyond its limit, and a client that goes on writing
        # there sees INTERNAL, of its own making: such a message goes by itself.
        if streams and (large := [one for one in messages if len(one) > MESSAGE_LIMIT]):
            method, messages = service.methods_by_name.get("ModelInfer", method), large[:1]
        leaves = not streams and method.server_streaming
        return Call(method, tuple(messages), leaves or (streams and rng.random() < 0.1))

    @contextlib.asynccontextmanager
    async def connect(facts: Facts) -> AsyncIterator[Callable[[Call], Awaitable[list[Answer]]]]:
        address = facts.admin_address if service.name == "Admin" else facts.address
        async with grpc.aio.insecure_channel(address, OWN_SOCKET) as channel:
            yield functools.partial(_answers, channel)

    return Fuzz(service.name, draw, connect, per_connection=8)


async def _answers(channel: Any, sent: Call) -> list[Answer]:
    """Returns the code of the call, after those that a stream gives its requests."""
    method, codes, details = sent.method, [], ""
    path = f"/{method.containing_service.full_name}/{method.name}"
    if method.client_streaming:
        made = channel.stream_stream(path)(iter(sent.messages))
    else:
        made = channel.unary_stream(path)(sent.messages[0])  # one reply is a stream of one
    with left_to_code():
        async for reply in made:
            if method.name == "ModelStreamInfer":
                response = inference_pb2.ModelStreamInferResponse.FromString(reply)
                parameters = response.infer_response.parameters
                if parameters["triton_final_response"].bool_param:
                    codes.append(parameters["status"].string_param or "OK")
                    details = response.error_message or details
            if sent.leaves:
                made.cancel()
                break
    code, details = (await made.code()).name, await made.details() or details
    if "metadata size exceeds" in details:
        code = LOST
    elif method.name == "ModelStreamInfer" and code == "OK" and len(codes) != len(sent.messages):
        code, details = LOST, f"{len(codes)} of {len(sent.messages)} requests were answered"
    said = f"{details[:300]}; sent {[one[:2000].hex() for one in sent.messages]}"
    return [(method.name, one, said if one in BAD_CODES else "") for one in (*codes, code)]


FUZZ = tuple(
    fuzz_of(service)
    for file in (pb, health_pb2, reflection_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
)
