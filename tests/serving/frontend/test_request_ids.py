"""Which request a line of the log is about, in JSON."""

import json
import logging

import grpc
from fake_engine import UNLUCKY, FakeEngine
from served import failure, request, until

from serving.config import ServerConfig
from serving.frontend.server import Server
from serving.proto.jmoe.v1 import jmoe_pb2 as pb
from serving.proto.jmoe.v1 import jmoe_pb2_grpc as rpc
from serving.telemetry.logs import JsonFormatter


def asked(count, **fields):
    return request([1, 2, 3], sampling=pb.SamplingParams(max_new_tokens=count), **fields)


async def test_lines_of_a_request_have_its_id_and_others_have_none():
    """Also where several requests are under way, and where a line comes later and counts them."""
    server = Server(ServerConfig(port=0))
    await server.start()
    engine = FakeEngine()
    await server.attach(engine)
    lines = []

    class Lines(logging.Handler):
        def emit(self, record):
            lines.append(json.loads(JsonFormatter().format(record)))

    handler, logger = Lines(), logging.getLogger("serving")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub = rpc.GenerationStub(channel)
            engine.gate.clear()
            calls = [stub.Generate(asked(2, request_id=f"id-{n}")) for n in range(3)]
            for call in calls:
                await call.read()
            engine.gate.set()
            for call in calls:
                while await call.read() is not grpc.aio.EOF:
                    pass
            for name in ("first", "second"):
                engine.failure = RuntimeError("a bug")
                await failure(stub.Generate(asked(1, request_id=name)))
            engine.failure = None
            unlucky = request([UNLUCKY], request_id="last", sampling=pb.SamplingParams())
            await failure(stub.Generate(unlucky))
            await until(lambda: server.failure)
        await server.stop()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    ids = [line["request_id"] for line in lines if line.get("event") == "request"]
    assert sorted(ids) == ["first", "id-0", "id-1", "id-2", "last", "second"]
    at_once, counted = (line for line in lines if line.get("event") == "calls_failed")
    assert (at_once["count"], at_once["request_id"]) == (1, "first")
    assert (counted["count"], counted.get("request_id")) == (1, None)
    (failed,) = (line for line in lines if "NOT_SERVING" in line["message"])
    assert "request_id" not in failed
