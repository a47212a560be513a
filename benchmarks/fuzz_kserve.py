"""Fuzzed messages to the Open Inference Protocol of a server whose engine counts up.

`python -m benchmarks.fuzz_kserve [--messages N] [--seed S] [--out FILE.json]`: seeded messages to
ModelInfer and, several on a stream, to ModelStreamInfer; the server is a process of its own. Ends
with status 1 where an answer is UNKNOWN or INTERNAL, or does not come, or where the server is not
what it was.
"""

import argparse
import asyncio
import collections
import contextlib
import json
import random
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from benchmarks.hostile.attempts import MESSAGE_LIMIT
from benchmarks.hostile.fuzz import BAD_CODES, serves
from benchmarks.hostile.load import HUNG, left_to_code
from benchmarks.hostile.probes import resident_bytes
from benchmarks.hostile.report import surroundings
from benchmarks.hostile.tensors import fuzzed, request, values_of
from serving.client import Client
from serving.frontend.kserve import INFER, STREAM_INFER
from serving.proto.inference import inference_pb2 as pb

_FAKES = Path(__file__).parents[1] / "tests" / "serving"
_TIMEOUT_S = 30.0
_NUM_CHANNELS, _NUM_WORKERS = 4, 16
_MOST_IN_A_STREAM = 6
_MOST_EXAMPLES = 20


@dataclass
class Result:
    """What came back. `examples` has the messages behind answers that must not be."""

    num_messages: int = 0
    codes: collections.Counter[str] = field(default_factory=collections.Counter)
    examples: list[dict[str, Any]] = field(default_factory=list)

    def add(self, method: str, codes: list[str], messages: list[bytes], details: str = "") -> None:
        """Counts the answers to some messages."""
        self.num_messages += len(messages)
        self.codes.update(f"{method.rpartition('/')[2]}: {code}" for code in codes)
        if BAD_CODES & set(codes) and len(self.examples) < _MOST_EXAMPLES:
            sent = [message[:2000].hex() for message in messages]
            self.examples.append({"codes": codes, "details": details[:300], "messages": sent})

    @property
    def num_bad(self) -> int:
        """Answers that must not be."""
        return sum(n for name, n in self.codes.items() if name.rpartition(" ")[2] in BAD_CODES)


# ---- the server -------------------------------------------------------------------------------


async def serve() -> None:
    """Serves until standard input ends; prints both addresses when it is ready."""
    sys.path.insert(0, str(_FAKES))
    import fake_engine

    from serving.config import ServerConfig
    from serving.errors import InvalidRequest
    from serving.frontend.server import Server

    class Engine(fake_engine.FakeEngine):
        """Refuses what has no room, as admission does."""

        async def generate(self, prompt: Any, sampling: Any, **options: Any) -> AsyncIterator[Any]:
            if len(prompt) + sampling.max_new_tokens > self.config.max_model_len:
                raise InvalidRequest("prompt and output exceed max_model_len")
            self.calls.clear()  # which tests look at, and which would grow
            outputs = super().generate(prompt, sampling, **options)
            async with contextlib.aclosing(outputs):
                async for out in outputs:
                    yield out

    fake_engine.UNLUCKY = -1  # no prompt ends this one
    server = Server(ServerConfig(port=0))
    await server.start()
    await server.attach(Engine())  # type: ignore[arg-type]
    print(server.address, server.admin_address, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop()


@contextlib.asynccontextmanager
async def _running() -> AsyncIterator[tuple[asyncio.subprocess.Process, str, str]]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.fuzz_kserve", "--serve"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        address, admin = (await process.stdout.readline()).decode().split()
        yield process, address, admin
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


# ---- what is sent -----------------------------------------------------------------------------


async def fuzz(address: str, num_messages: int, seed: int) -> Result:
    """Sends that many messages, a bounded number at a time."""
    result, rng, left = Result(), random.Random(seed), num_messages
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
    async with contextlib.AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(address, options))
            for _ in range(_NUM_CHANNELS)
        ]

        async def worker(channel: Any) -> None:
            nonlocal left
            while left > 0:
                streams = rng.random() < 0.5
                count = min(left, rng.randrange(1, _MOST_IN_A_STREAM + 1) if streams else 1)
                messages = [fuzzed(rng) for _ in range(count)]
                # gRPC itself ends a call for a message beyond its limit, and a client that goes on
                # writing there sees INTERNAL, of its own making: such a message goes by itself.
                large = [message for message in messages if len(message) > MESSAGE_LIMIT]
                if large:
                    messages, streams = large[:1], False
                left -= len(messages)
                leaves = streams and rng.random() < 0.1
                send = _stream(channel, messages, leaves) if streams else _one(channel, messages[0])
                try:
                    async with asyncio.timeout(_TIMEOUT_S):
                        codes, details = await send
                except TimeoutError:
                    codes, details = [HUNG], ""
                result.add(STREAM_INFER if streams else INFER, codes, messages, details)

        await asyncio.gather(*(worker(channels[i % _NUM_CHANNELS]) for i in range(_NUM_WORKERS)))
    return result


async def _one(channel: Any, message: bytes) -> tuple[list[str], str]:
    call = channel.unary_unary(INFER)(message)
    with left_to_code():
        await call
    return [(await call.code()).name], await call.details() or ""


async def _stream(channel: Any, messages: list[bytes], leaves: bool) -> tuple[list[str], str]:
    """Codes of the stream, and of its requests that ended."""
    call = channel.stream_stream(STREAM_INFER)(iter(messages))
    codes, details = [], ""
    with left_to_code():
        async for payload in call:
            response = pb.ModelStreamInferResponse.FromString(payload)
            parameters = response.infer_response.parameters
            if parameters["triton_final_response"].bool_param:
                codes.append(parameters["status"].string_param or "OK")
                details = response.error_message or details
            if leaves:
                call.cancel()
                break
    code = (await call.code()).name
    if code == "OK" and len(codes) != len(messages):
        return [*codes, "ANSWER_LOST"], f"{len(codes)} of {len(messages)} requests were answered"
    return [*codes, code], details or await call.details() or ""


async def _is_as_before(address: str, admin: str) -> bool:
    """Whether it serves, right, and has nothing left to do."""
    if not await serves(address):
        return False
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary(INFER)
        answer = await call(request("abc", {"max_tokens": 3}).SerializeToString())
        values = values_of(pb.ModelInferResponse.FromString(answer))
        right = values == {"text_output": "abcdef"}
    give_up_at = time.monotonic() + _TIMEOUT_S
    async with Client(address, admin) as client:
        while (await client.stats()).num_running and time.monotonic() < give_up_at:
            await asyncio.sleep(0.05)  # requests whose callers left end one by one
        return right and not (await client.stats()).num_running


async def run(num_messages: int, seed: int) -> tuple[dict[str, Any], bool]:
    """Returns figures, and whether all is well."""
    async with _running() as (process, address, admin):
        before, started_at = resident_bytes(process.pid), time.monotonic()
        result = await fuzz(address, num_messages, seed)
        duration_s = time.monotonic() - started_at
        as_before = process.returncode is None and await _is_as_before(address, admin)
        after = resident_bytes(process.pid)
    figures = {
        "num_messages": result.num_messages,
        "seed": seed,
        "codes": dict(sorted(result.codes.items())),
        "num_bad": result.num_bad,
        "server_as_before": as_before,
        "duration_s": duration_s,
        "resident_bytes": {"before": before, "after": after},
        "examples": result.examples,
        **surroundings(),
    }
    return figures, as_before and not result.num_bad and result.num_messages == num_messages


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser("benchmarks.fuzz_kserve", description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, help="the figures, as JSON")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve())
        return
    figures, good = asyncio.run(run(args.messages, args.seed))
    text = json.dumps(figures, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
