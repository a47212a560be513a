"""CPU time a token of ways to read token streams over gRPC, and of the whole load generator.

`python benchmarks/client_cost.py [--out benchmarks/client_cost.json]`: 48 streams of 150 tokens,
one a stream every 16 ms, as a decoding batch sends them; 3000 tokens a second. Each way runs in a
fresh process against a fresh server; medians of three.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from grpc.experimental import ChannelOptions

from serving.bench.loadgen import play
from serving.bench.workload import Arrival
from serving.client import Client
from serving.proto.jmoe.v1 import jmoe_pb2 as pb
from serving.proto.jmoe.v1 import jmoe_pb2_grpc as rpc

NUM_STREAMS, NUM_TOKENS, STEP_S = 48, 150, 0.016
WAYS = {
    "aio_for": "grpc.aio, one channel, async for",
    "aio_read": "grpc.aio, one channel, await read()",
    "aio_for_4_channels": "grpc.aio, four channels, async for",
    "aio_bytes": "grpc.aio, one channel, async for, messages not parsed",
    "threads": "grpc with a thread a stream",
    "threads_single": "grpc with a thread a stream, SingleThreadedUnaryStream",
    "loadgen": "the load generator itself: every token timed, requests started and summed up",
}


class _Server(rpc.GenerationServicer):
    async def Generate(self, request: Any, context: Any) -> None:
        for number in range(NUM_TOKENS):
            await asyncio.sleep(STEP_S - time.monotonic() % STEP_S)  # all streams in step
            last = number == NUM_TOKENS - 1
            await context.write(
                pb.GenerateResponse(
                    text=" token", token_ids=[123], finish_reason="length" if last else ""
                )
            )


async def _serve() -> None:
    server = grpc.aio.server()
    rpc.add_GenerationServicer_to_server(_Server(), server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


def _call(channel: Any, parsed: bool = True) -> Any:
    return channel.unary_stream(
        "/jmoe.v1.Generation/Generate",
        request_serializer=pb.GenerateRequest.SerializeToString,
        response_deserializer=pb.GenerateResponse.FromString if parsed else None,
    )


async def _read_aio(address: str, way: str) -> None:
    num_channels = 4 if way == "aio_for_4_channels" else 1
    own_socket = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(address, own_socket) for _ in range(num_channels)]
    calls = [_call(channel, way != "aio_bytes") for channel in channels]

    async def one(number: int) -> None:
        stream = calls[number % num_channels](pb.GenerateRequest())
        if way == "aio_read":
            times = []
            while await stream.read() is not grpc.aio.EOF:
                times.append(time.monotonic())
        else:
            times = [time.monotonic() async for _ in stream]
        assert len(times) == NUM_TOKENS

    await asyncio.gather(*(one(number) for number in range(NUM_STREAMS)))


def _read_threads(address: str, way: str) -> None:
    single = [(ChannelOptions.SingleThreadedUnaryStream, 1)]
    with (
        grpc.insecure_channel(address, single if way == "threads_single" else None) as channel,
        ThreadPoolExecutor(NUM_STREAMS) as threads,
    ):
        call = _call(channel)

        def one(_: int) -> int:
            return len([time.monotonic() for _ in call(pb.GenerateRequest())])

        # Reading the results raises what a thread raised.
        assert list(threads.map(one, range(NUM_STREAMS))) == [NUM_TOKENS] * NUM_STREAMS


async def _play(address: str) -> None:
    async with Client(address) as client:
        arrivals = [Arrival("x", NUM_TOKENS) for _ in range(NUM_STREAMS)]
        run = await play(client, arrivals, time_limit_s=30)
    assert sum(len(record.token_s) for record in run.records) == NUM_STREAMS * NUM_TOKENS


def _measure(way: str) -> float:
    """Microseconds of CPU time a token, in this process."""
    with subprocess.Popen(
        [sys.executable, __file__, "--way", "serve"], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        address = f"127.0.0.1:{server.stdout.readline().strip()}"
        start_s = time.process_time()
        try:
            if way.startswith("threads"):
                _read_threads(address, way)
            else:
                asyncio.run(_play(address) if way == "loadgen" else _read_aio(address, way))
        finally:
            server.terminate()
        cpu_s = time.process_time() - start_s
    return cpu_s / (NUM_STREAMS * NUM_TOKENS) * 1e6


def _compare() -> dict[str, Any]:
    measured = {}
    for way, words in WAYS.items():
        command = [sys.executable, __file__, "--way", way]
        runs = [float(subprocess.check_output(command, text=True)) for _ in range(3)]
        measured[way] = {"cpu_us_per_token": round(statistics.median(runs), 1), "way": words}
        print(f"{measured[way]['cpu_us_per_token']:6.1f} us/token  {words}", flush=True)
    return {
        "tokens_per_s": NUM_STREAMS / STEP_S,
        "cpu_count": os.cpu_count(),
        "grpcio": grpc.__version__,
        "ways": measured,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=[*WAYS, "serve"], help="only this one, here")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.way == "serve":
        asyncio.run(_serve())
    elif args.way:
        print(_measure(args.way))
    else:
        result = _compare()
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
