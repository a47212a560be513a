"""A gRPC server on a real socket whose answers follow a script, which is the prompt itself.

"30,10,10" waits these milliseconds before each of three tokens "x"; "refuse" is turned away;
"10,die" breaks off after a token; "10,cancel" is cancelled by the server; "hang" never answers; ""
answers nothing at once. `slots` limits how many are answered at a time, first come first served.
With `--timeline FILE` it writes one, of steps that take 16 ms (prefill) and 40 ms.
Below a threshold of 100 waits shrink towards half, and half of the visits are degraded.

`Direct` is a client of such a server without the socket, for tests in simulated time.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from serving.proto.jmoe.v1 import jmoe_pb2 as pb
from serving.proto.jmoe.v1 import jmoe_pb2_grpc as rpc

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Scripted(rpc.GenerationServicer, rpc.AdminServicer):
    def __init__(self, slots: int = 1000) -> None:
        self.slots = asyncio.Semaphore(slots)
        self.running = self.waiting = 0
        self.slowness = 1.0  # multiplies every wait: a machine that other work holds up
        self.state = pb.BrownoutState(
            strategy="partial",
            way=8,
            prefill_threshold_percent=100,
            decode_threshold_percent=100,
            warning_factor=0.8,
            ttft_p90_s=float("nan"),
            itl_p90_s=float("nan"),
            controller="algorithm2",
            prefill_company=True,
            predicted_ttft_p90_s=float("nan"),
            predicted_itl_p90_s=float("nan"),
        )
        self.requests: list[pb.GenerateRequest] = []
        self.info = pb.ServerInfo(
            status="ready",
            model="scripted",
            max_num_seqs=min(slots, 4),
            max_model_len=64,
            platform="fake",
        )
        self.takes_text = True
        self.health = HealthServicer()

    async def Generate(self, request, context):
        self.requests.append(request)
        if request.text and not self.takes_text:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no tokenizer here")
        self.waiting += 1
        try:
            await self.slots.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            await self._answer(request, context)
        finally:
            self.running -= 1
            self.slots.release()

    async def _answer(self, request, context):
        threshold = self.state.decode_threshold_percent
        browned = threshold < 100 and self.state.strategy != "zero"
        steps = request.text.split(",") if request.text else []
        num = 0
        for step in steps:
            if step == "refuse":
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue is full")
            if step == "die":
                await context.abort(grpc.StatusCode.INTERNAL, "broke off")
            if step == "cancel":
                await context.abort(grpc.StatusCode.CANCELLED, "stopped")
            if step == "hang":
                await asyncio.sleep(3600)
            shrink = 0.5 + threshold / 200 if browned else 1
            await asyncio.sleep(float(step) / 1e3 * shrink * self.slowness)
            num += 1
            await context.write(pb.GenerateResponse(text="x", token_ids=[7]))
        span = pb.ThresholdSpan(min_percent=int(threshold), max_percent=int(threshold))
        usage = pb.Usage(
            prompt_tokens=5,
            completion_tokens=num,
            expert_visits=10 * num,
            degraded_visits=5 * num if browned else 0,
        )
        await context.write(
            pb.GenerateResponse(
                finish_reason="stop", usage=usage, prefill_threshold=span, decode_threshold=span
            )
        )

    async def GetServerInfo(self, request, context):
        return self.info

    async def GetModelInfo(self, request, context):
        return pb.ModelInfo(name="scripted", vocab_size=50)

    async def GetBrownout(self, request, context):
        return self.state

    async def SetBrownout(self, request, context):
        for field, value in request.ListFields():
            setattr(self.state, field.name, value)
        if request.HasField("prefill_threshold_percent"):
            self.state.salc_enabled = False
        if request.salc_enabled:
            self.state.prefill_threshold_percent = self.state.decode_threshold_percent = 20
        return self.state

    async def GetStats(self, request, context):
        return pb.Stats(num_running=self.running, num_waiting=self.waiting)


class Direct:
    """A stand-in for `serving.client.Client` that calls a `Scripted` of the same event loop."""

    def __init__(self, servicer: Scripted) -> None:
        self._servicer = servicer

    async def generate(self, prompt, sampling=None, *, model="", timeout_s=None):
        request = pb.GenerateRequest(text=prompt, sampling=sampling, model=model)
        context = _Context()
        call = asyncio.create_task(self._servicer.Generate(request, context))
        call.add_done_callback(lambda _: context.messages.put_nowait(None))
        try:
            async with asyncio.timeout(timeout_s):
                while (message := await context.messages.get()) is not None:
                    yield message
                await call
        except TimeoutError:
            raise _error(grpc.StatusCode.DEADLINE_EXCEEDED, "too late") from None
        finally:
            call.cancel()

    async def server_info(self):
        return await self._servicer.GetServerInfo(pb.GetServerInfoRequest(), None)

    async def get_brownout(self):
        state = pb.BrownoutState()
        state.CopyFrom(await self._servicer.GetBrownout(pb.GetBrownoutRequest(), None))
        return state

    async def set_brownout(self, **change):
        return await self._servicer.SetBrownout(pb.SetBrownoutRequest(**change), None)

    async def stats(self):
        return await self._servicer.GetStats(pb.GetStatsRequest(), None)


class _Context:
    def __init__(self) -> None:
        self.messages: asyncio.Queue[pb.GenerateResponse | None] = asyncio.Queue()

    async def write(self, message):
        self.messages.put_nowait(message)

    async def abort(self, code, details):
        raise _error(code, details)


def _error(code, details):
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


async def start(slots: int = 1000) -> tuple[grpc.aio.Server, Scripted, str]:
    """Starts a server; returns it, its servicer, and its address."""
    servicer, server = Scripted(slots), grpc.aio.server()
    rpc.add_GenerationServicer_to_server(servicer, server)
    rpc.add_AdminServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(servicer.health, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, servicer, f"127.0.0.1:{port}"


def _write_timeline(path: Path) -> None:
    steps = [
        {"ph": "X", "tid": 2, "name": name, "dur": 1e3 * took_ms}
        | {"args": {"layers": "0-3", "rows": size, "tokens": size, "degraded_visits": 0}}
        for name, took_ms in (("prefill", 16), ("decode", 40))
        for size in (1, 4, 20, 32)
    ]
    path.write_text(json.dumps({"traceEvents": steps * 5}))


async def _main() -> None:
    if sys.argv[1:2] == ["--timeline"]:
        _write_timeline(Path(sys.argv[2]))
    server, _, address = await start(slots=4)
    print("pid", os.getpid(), file=sys.stderr, flush=True)
    print("jmoe page on http://127.0.0.1:9", flush=True)
    print(f"jmoe ready on {address}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_main())
