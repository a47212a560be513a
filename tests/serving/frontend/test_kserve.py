"""The Open Inference Protocol over a real socket, with an engine that counts up.

After a prompt that ends in "c" come "d", "e", ...
"""

import json
import re

import grpc
import pytest
from kserve_requests import add, infer, outputs, parameters
from served import CODE, Setup, failure, serving, until

from serving.config import ServerConfig
from serving.frontend import kserve, kserve_tensors
from serving.frontend.access import Access
from serving.frontend.kserve_tensors import Answer
from serving.proto.inference import inference_pb2 as pb
from serving.proto.inference import inference_pb2_grpc as rpc
from serving.request import (
    Output,
    Priority,
    SamplingParams,
    Structure,
    StructureKind,
    ThresholdSpan,
    Usage,
)

FOUR = {"max_tokens": 4}


def stub(s: Setup):
    return rpc.GRPCInferenceServiceStub(s.channel)


async def one(s: Setup, request=None, **given):
    return await stub(s).ModelInfer(request or infer(**{"sampling": FOUR, **given}))


async def ask(s: Setup, *requests) -> list[pb.ModelStreamInferResponse]:
    """Sends all requests at once on one stream; returns every response."""
    return [response async for response in stub(s).ModelStreamInfer(iter(requests))]


async def rest(call) -> list[pb.ModelStreamInferResponse]:
    """Returns the remaining responses of a call."""
    found = []
    while (response := await call.read()) is not grpc.aio.EOF:
        found.append(response)
    return found


def texts(responses, request_id: str = "") -> list[str]:
    return [
        outputs(r.infer_response)["text_output"]
        for r in responses
        if r.infer_response.id == request_id
    ]


# ---- one answer -------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [True, False])
async def test_a_request_is_answered_whole(raw: bool) -> None:
    async with serving() as s:
        response = await one(s, raw=raw, model_name="counter", model_version="1", id="mine")
    assert (response.model_name, response.model_version, response.id) == ("counter", "1", "mine")
    assert outputs(response) == {"text_output": "abcdefg"}
    assert parameters(response) == {
        "triton_final_response": True,
        "expert_visits": 48,
        "degraded_visits": 6,
        "degraded_share": 6 / 48,
        "expected_loss": 0.375,
        "decode_threshold_min_percent": 40,
        "decode_threshold_max_percent": 70,
    }


@pytest.mark.parametrize("raw", [True, False])
async def test_the_input_is_left_out_on_request(raw: bool) -> None:
    async with serving() as s:
        assert outputs(await one(s, raw=raw, exclude_input_in_output=True))["text_output"] == "defg"
        assert outputs(await one(s, raw=raw, stream=False))["text_output"] == "abcdefg"


async def test_outputs_that_are_asked_for() -> None:
    asked = {
        "return_finish_reason": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        "return_logprobs": True,
        "return_cumulative_logprob": True,
    }
    async with serving() as s:
        whole = outputs(await one(s, **asked))
        named = outputs(await one(s, outputs=["num_output_tokens", "finish_reason"]))
        none = outputs(await one(s, **dict.fromkeys(asked, False)))
    logprobs = whole.pop("logprobs")
    assert whole == {
        "text_output": "abcdefg",
        "finish_reason": "length",
        "num_input_tokens": 3,
        "num_output_tokens": 4,
        "cumulative_logprob": -2.0,
    }
    assert json.loads(logprobs) == [
        {str(ord(c)): {"logprob": -0.5, "rank": None, "decoded_token": None}} for c in "defg"
    ]
    assert named == {"num_output_tokens": 4, "finish_reason": "length"}
    assert none == {"text_output": "abcdefg"}


async def test_without_sampling_parameters_vllms_defaults_hold() -> None:
    async with serving() as s:
        await one(s, infer())
    assert s.engine.calls[0]["sampling"] == SamplingParams(max_new_tokens=16, temperature=1.0)


async def test_all_of_a_request_reaches_the_engine() -> None:
    sampling = {"max_tokens": 2, "temperature": 0.5, "structured_outputs": {"regex": "d+"}}
    extra = {"top_k": 5, "seed": 7, "priority": 2, "timeout": 30_000_000, "allow_brownout": False}
    extra |= {"reuse_prefix": False, "cache_salt": "mine", "max_degraded_percent": 30}
    extra |= {"allow_audit": False}
    async with serving() as s:
        await one(s, infer("ab", id="x", sampling=sampling, parameters=extra))
        await one(s, infer("ab", parameters={"max_tokens": 1, "priority": "best_effort"}))
        await one(s, infer("ab", sampling=FOUR, parameters={"priority": 1}))
    call, second, third = s.engine.calls
    assert call == {
        "prompt": "ab",
        "sampling": SamplingParams(
            max_new_tokens=2,
            temperature=0.5,
            top_k=5,
            seed=7,
            structure=Structure(StructureKind.REGEX, "d+"),
        ),
        "request_id": "x",
        "allow_brownout": False,
        "priority": Priority.BEST_EFFORT,
        "timeout_s": 30.0,
        "model": "counter",
        "reuse_prefix": False,
        "salt": ":mine",
        "max_degraded_percent": 30,
        "allow_audit": False,
        "key": "",
    }
    assert second["priority"] is Priority.BEST_EFFORT
    assert re.fullmatch("[0-9a-f]{32}", second["request_id"])  # drawn
    assert second["sampling"].max_new_tokens == 1
    assert (third["priority"], third["timeout_s"]) == (Priority.LATENCY_SENSITIVE, None)
    assert third["allow_brownout"] is True
    assert (third["reuse_prefix"], third["salt"]) == (True, "")


async def test_the_sooner_of_two_deadlines_holds() -> None:
    async with serving() as s:
        api = stub(s)
        await api.ModelInfer(infer(parameters={"timeout": 5_000_000}), timeout=1000)
        await api.ModelInfer(infer(parameters={"timeout": 10**9}), timeout=50)
        await api.ModelInfer(infer(), timeout=50)
    first, second, third = (call["timeout_s"] for call in s.engine.calls)
    assert first == 5.0
    assert 0 < second <= 51
    assert 0 < third <= 51


WRONG = [
    (infer(None), "the input 'text_input' is missing"),
    (infer(b"\xff"), "the input 'text_input' is no UTF-8"),
    (infer(image="x"), "the input 'image' is unknown; known are text_input, stream"),
    (infer(stream="x"), "the input 'stream' has datatype 'BYTES'; it must be BOOL"),
    (infer(stream=True), "stream is true, and ModelInfer answers once"),
    (
        infer(stream=True, exclude_input_in_output=False),
        "exclude_input_in_output is false and stream is true",
    ),
    (infer(sampling="{"), "sampling_parameters is no JSON"),
    (infer(sampling=b"\xff"), "the input 'sampling_parameters' is no UTF-8"),
    (infer(sampling=[1]), "sampling_parameters is [1]; it must be a JSON object"),
    (infer(sampling={"max_tokns": 1}), "'max_tokns' is not served; did you mean max_tokens?"),
    (infer(sampling=" " * 300_000), "bytes of sampling_parameters is 300000"),
    (infer(parameters={"nonsense": 1}), "the sampling parameter 'nonsense' is not served"),
    (infer(parameters={"sequence_id": 5}), "'sequence_id' is not served; requests are independent"),
    (infer(parameters={"triton_x": 5}), "the sampling parameter 'triton_x' is not served"),
    (
        infer(parameters={"triton_enable_empty_final_response": 1}),
        "triton_enable_empty_final_response is 1; it must be true or false",
    ),
    (infer(parameters={"priority": 3}), "the parameter priority is 3; it must be"),
    (infer(parameters={"priority": True}), "the parameter priority is True"),
    (infer(parameters={"timeout": -1}), "the parameter timeout is -1; it must be a whole number"),
    (infer(parameters={"timeout": 1.5}), "the parameter timeout is 1.5"),
    (infer(parameters={"timeout": 2**60}), "the parameter timeout is 1152921504606846976"),
    (infer(parameters={"allow_brownout": "no"}), "allow_brownout is 'no'; it must be true or"),
    (infer(parameters={str(i): 1 for i in range(65)}), "number of parameters is 65"),
    (
        infer(sampling={"top_k": 1}, parameters={"top_k": 1}),
        "'top_k' is a parameter and in sampling_parameters; give it once",
    ),
    (infer(outputs=["image"]), "the output 'image' is unknown; known are text_output"),
    (infer(outputs=["text_output"] * 33), "number of outputs is 33"),
]


def changed(change) -> pb.ModelInferRequest:
    request = infer(sampling=FOUR)
    change(request)
    return request


def with_parameter(tensor) -> None:
    tensor.parameters["shared_memory_region"].string_param = "x"


BROKEN = [
    (lambda r: r.raw_input_contents.pop(), "raw_input_contents has 1 tensors of 2 inputs"),
    (lambda r: add(r, "text_input", "x"), "the input 'text_input' is given twice"),
    (lambda r: [add(r, "x", "x") for _ in range(40)], "number of inputs is 42"),
    (lambda r: r.inputs[0].shape.append(1), None),
    (lambda r: r.inputs[0].shape.append(2), "shape [1, 2]; it must be [1] or [1, 1]"),
    (lambda r: r.inputs[0].shape.pop(), "shape []; it must be"),
    (lambda r: r.inputs[0].shape.extend([1] * 3000), "shape [1, 1, 1, 1, 1, 1, 1, 1]; it must be"),
    (lambda r: with_parameter(r.inputs[0]), "parameter 'shared_memory_region'; tensors take none"),
    (
        lambda r: with_parameter(r.outputs.add(name="text_output")),
        "the output 'text_output' has the parameter 'shared_memory_region'",
    ),
    (
        lambda r: r.inputs[0].contents.bytes_contents.append(b"x"),
        "the input 'text_input' has contents beside raw_input_contents",
    ),
    (lambda r: r.raw_input_contents.__setitem__(0, b"abc"), "3 raw bytes, which are no element"),
    (lambda r: r.raw_input_contents.__setitem__(0, b"\5\0\0\0abc"), "7 raw bytes"),
    (lambda r: r.parameters["x"].SetInParent(), "the parameter 'x' has no value"),
    (lambda r: r.raw_input_contents.__delitem__(slice(None)), "'text_input' has 0 elements"),
]


@pytest.mark.parametrize(("request_", "named"), WRONG)
async def test_what_is_wrong_is_named(request_, named: str) -> None:
    async with serving() as s:
        error = await failure(one(s, request_))
        assert (error.code(), named in error.details()) == (CODE.INVALID_ARGUMENT, True), error
        if "ModelInfer answers once" not in named:
            (response,) = await ask(s, request_)
            assert response.error_message == error.details()
            assert response.infer_response.id == request_.id
    assert s.engine.running == 0


@pytest.mark.parametrize(("change", "named"), BROKEN)
async def test_tensors_that_are_wrong_are_named(change, named: str | None) -> None:
    async with serving() as s:
        if named is None:
            assert outputs(await one(s, changed(change)))["text_output"] == "abcdefg"
            return
        error = await failure(one(s, changed(change)))
        assert (error.code(), named in error.details()) == (CODE.INVALID_ARGUMENT, True), error


@pytest.mark.parametrize(
    ("fill", "named"),
    [
        (lambda c: c.int_contents.append(1), "has int_contents; it must have bytes_contents"),
        (lambda c: c.bytes_contents.extend([b"a", b"b"]), "'text_input' has 2 elements"),
        (lambda c: None, "'text_input' has 0 elements"),
    ],
)
async def test_typed_contents_have_one_element_of_their_datatype(fill, named: str) -> None:
    request = pb.ModelInferRequest()
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.SetInParent()
    fill(tensor.contents)
    async with serving() as s:
        error = await failure(one(s, request))
    assert (error.code(), named in error.details()) == (CODE.INVALID_ARGUMENT, True), error


@pytest.mark.parametrize("raw", [b"", b"\2", b"\1\1"])
async def test_a_raw_bool_is_one_byte(raw: bytes) -> None:
    request = infer(stream=False)
    request.raw_input_contents[1] = raw
    async with serving() as s:
        error = await failure(one(s, request))
    assert "it must be one byte, 0 or 1" in error.details()


async def test_only_what_is_served_is_found() -> None:
    async with serving() as s:
        api = stub(s)
        calls = [
            api.ModelReady(pb.ModelReadyRequest(name="other")),
            api.ModelMetadata(pb.ModelMetadataRequest(name="other")),
            api.ModelConfig(pb.ModelConfigRequest(name="other")),
        ]
        for call in calls:
            error = await failure(call)
            assert error.code() == CODE.NOT_FOUND
            assert "model 'other' is not served; 'counter' is" in error.details()
        for call in (
            api.ModelInfer(infer(model_version="2")),
            api.ModelReady(pb.ModelReadyRequest(version="2")),
        ):
            error = await failure(call)
            assert (error.code(), "version '2' is not" in error.details()) == (CODE.NOT_FOUND, True)


# ---- what is served ---------------------------------------------------------------------------


async def test_readiness_is_healths() -> None:
    async with Setup(ServerConfig(port=0, served_model_name="counter")) as s:
        api = stub(s)

        async def ready() -> tuple[bool, bool, bool, str]:
            live = await api.ServerLive(pb.ServerLiveRequest())
            server = await api.ServerReady(pb.ServerReadyRequest())
            model = await api.ModelReady(pb.ModelReadyRequest(name="counter", version="1"))
            index = await api.RepositoryIndex(pb.RepositoryIndexRequest())
            (entry,) = index.models
            assert (entry.name, entry.version) == ("counter", "1")
            return live.live, server.ready, model.ready, entry.state

        assert await ready() == (True, False, False, "LOADING")
        assert not (await api.RepositoryIndex(pb.RepositoryIndexRequest(ready=True))).models
        for call in (api.ModelInfer(infer()), api.ModelStreamInfer(iter([infer()]))):
            assert (await failure(call)).code() == CODE.UNAVAILABLE
        await s.ready()
        assert await ready() == (True, True, True, "READY")
        s.engine.fail("on purpose")
        await until(lambda: not s.server.health.is_serving)
        assert await ready() == (True, False, False, "UNAVAILABLE")
        assert await s.health("inference.GRPCInferenceService") == "NOT_SERVING"


async def test_metadata_and_config_name_the_same_tensors() -> None:
    async with serving() as s:
        api = stub(s)
        server = await api.ServerMetadata(pb.ServerMetadataRequest())
        metadata = await api.ModelMetadata(pb.ModelMetadataRequest(name="counter"))
        config = (await api.ModelConfig(pb.ModelConfigRequest(name="counter"))).config
        assert await s.health("inference.GRPCInferenceService") == "SERVING"
        with pytest.raises(grpc.aio.AioRpcError, match="no repositories"):
            await api.RepositoryIndex(pb.RepositoryIndexRequest(repository_name="x"))
    assert server.name == "jmoe"
    assert server.version
    assert "schedule_policy" in server.extensions
    assert (metadata.name, metadata.versions, metadata.platform) == ("counter", ["1"], "jmoe")
    assert {t.name: (t.datatype, list(t.shape)) for t in metadata.inputs} == {
        "text_input": ("BYTES", [1]),
        "stream": ("BOOL", [1]),
        "sampling_parameters": ("BYTES", [1]),
        "exclude_input_in_output": ("BOOL", [1]),
        "return_finish_reason": ("BOOL", [1]),
        "return_cumulative_logprob": ("BOOL", [1]),
        "return_logprobs": ("BOOL", [1]),
        "return_num_input_tokens": ("BOOL", [1]),
        "return_num_output_tokens": ("BOOL", [1]),
    }
    assert [(t.name, t.datatype) for t in metadata.outputs] == [
        ("text_output", "BYTES"),
        ("finish_reason", "BYTES"),
        ("cumulative_logprob", "FP32"),
        ("logprobs", "BYTES"),
        ("num_input_tokens", "UINT32"),
        ("num_output_tokens", "UINT32"),
    ]
    assert [t.name for t in config.input] == [t.name for t in metadata.inputs]
    assert [t.name for t in config.output] == [t.name for t in metadata.outputs]
    assert [t.optional for t in config.input] == [False] + [True] * 8
    assert config.input[0].data_type == pb.TYPE_STRING
    assert config.max_batch_size == 0
    assert config.model_transaction_policy.decoupled


# ---- overload and access ----------------------------------------------------------------------


async def test_requests_of_streams_count_among_the_calls() -> None:
    async with serving(max_concurrent_calls=2) as s:
        s.engine.gate.clear()
        responses = stub(s).ModelStreamInfer(
            iter([infer(id=name, stream=True, sampling=FOUR) for name in "ab"])
        )
        first = [await responses.read() for _ in range(2)]
        assert sorted(r.infer_response.id for r in first) == ["a", "b"]
        error = await failure(one(s))
        assert (error.code(), "max_concurrent_calls" in error.details()) == (
            CODE.RESOURCE_EXHAUSTED,
            True,
        )
        (response,) = await ask(s, infer(id="c"))
        assert "max_concurrent_calls" in response.error_message
        s.engine.gate.set()
        assert sorted(texts([*first, *await rest(responses)], "a")) == ["d", "e", "f", "g"]
        assert outputs(await one(s))["text_output"] == "abcdefg"


async def test_keys_say_who_may_what_and_count_tokens(file) -> None:
    file.write(alice={"classes": ["best_effort"], "requests_per_min": 1})
    metadata = (("authorization", file.says("alice")),)
    polite = infer(sampling=FOUR, parameters={"priority": 2}, stream=True)
    async with serving() as s:
        s.server.access = access = Access(file.path)
        alice, api = access.caller(file.says("alice")), stub(s)
        assert (await failure(api.ModelInfer(infer()))).code() == CODE.UNAUTHENTICATED
        urgent = infer(id="no", parameters={"priority": 1})
        error = await failure(api.ModelInfer(urgent, metadata=metadata))
        assert error.code() == CODE.PERMISSION_DENIED
        call = api.ModelStreamInfer(iter([urgent, polite]), metadata=metadata)
        responses = [r async for r in call]
        (refused,) = [r for r in responses if r.error_message]
        assert parameters(refused.infer_response)["status"] == "PERMISSION_DENIED"
        assert texts([r for r in responses if not r.error_message]) == ["d", "e", "f", "g"]
        assert (alice.num_requests, alice.num_running, alice.num_tokens) == (1, 0, 3 + 4)
        error = await failure(api.ModelInfer(infer(), metadata=metadata))
        assert error.code() == CODE.RESOURCE_EXHAUSTED
        assert "1 requests a minute" in error.details()


# ---- streams ----------------------------------------------------------------------------------


async def test_a_stream_has_a_response_for_each_output() -> None:
    request = infer(
        id="x", stream=True, sampling={"max_tokens": 3}, return_num_output_tokens=True,
        return_cumulative_logprob=True, return_finish_reason=True,
        parameters={"triton_enable_empty_final_response": True},
    )  # fmt: skip
    async with serving() as s:
        responses = await ask(s, request)
    assert not any(r.error_message for r in responses)
    found = [outputs(r.infer_response) for r in responses]
    assert [f["text_output"] for f in found] == ["d", "e", "f"]
    assert [f["num_output_tokens"] for f in found] == [1, 1, 1]
    assert [f["cumulative_logprob"] for f in found] == [-0.5, -1.0, -1.5]
    assert [f["finish_reason"] for f in found] == ["None", "None", "length"]
    said = [parameters(r.infer_response) for r in responses]
    assert [p["triton_final_response"] for p in said] == [False, False, True]
    assert said[0] == {"triton_final_response": False}
    assert said[-1]["degraded_share"] == 4 / 40


async def test_many_requests_of_a_stream_are_answered_beside_each_other() -> None:
    async with serving() as s:
        s.engine.gate.clear()
        requests = [infer(c, id=c, stream=True, sampling=FOUR) for c in "acegi"]
        call = stub(s).ModelStreamInfer(iter(requests))
        first = [await call.read() for _ in requests]  # nobody waits for another's end
        assert {r.infer_response.id for r in first} == set("acegi")
        assert s.engine.running == 5
        s.engine.gate.set()
        responses = [*first, *await rest(call)]
    for c in "acegi":
        assert "".join(texts(responses, c)) == "".join(chr(ord(c) + i) for i in range(1, 5))


async def test_what_is_wrong_with_one_is_that_ones_alone() -> None:
    requests = [
        infer(id="fine", sampling=FOUR),
        infer(id="bad", sampling={"max_tokens": 0}),
        infer(id="gone", model_name="other"),
        infer(id="late", sampling=FOUR, stream=True),
    ]
    async with serving() as s:
        responses = await ask(s, *requests)
    errors = {r.infer_response.id: r for r in responses if r.error_message}
    assert errors.keys() == {"bad", "gone"}
    assert "max_tokens is 0" in errors["bad"].error_message
    said = parameters(errors["gone"].infer_response)
    assert said == {"triton_final_response": True, "status": "NOT_FOUND"}
    good = [r for r in responses if not r.error_message]
    assert texts(good, "fine") == ["abcdefg"]
    assert texts(good, "late") == ["d", "e", "f", "g"]


async def test_bytes_that_are_no_request_are_told_and_the_stream_goes_on() -> None:
    async with serving() as s:
        most = s.server.guard._max_message_bytes(kserve.STREAM_INFER)
        good = infer(id="fine", sampling=FOUR).SerializeToString()
        call = s.channel.stream_stream(kserve.STREAM_INFER)(
            iter([b"\xff\xff", bytes(most + 1), good])
        )
        responses = [pb.ModelStreamInferResponse.FromString(r) async for r in call]
    assert "(2 bytes) is not what /inference" in responses[0].error_message
    assert f"the message has {most + 1} bytes" in responses[1].error_message
    assert texts(responses[2:], "fine") == ["abcdefg"]


async def test_an_exception_of_the_engine_is_internal_and_one_requests_own(caplog) -> None:
    async with serving() as s:
        s.engine.failure = KeyError("a bug")
        (response,) = await ask(s, infer(id="x"))
        assert response.error_message == "KeyError: 'a bug'"
        assert parameters(response.infer_response)["status"] == "INTERNAL"
        s.engine.failure = None
        assert texts(await ask(s, infer(sampling=FOUR))) == ["abcdefg"]
    assert [r.event for r in caplog.records] == ["calls_failed"]


@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_a_stream_that_breaks_aborts_its_requests(how: str) -> None:
    async with serving() as s:
        s.engine.gate.clear()
        channel = grpc.aio.insecure_channel(
            s.server.address, options=[("grpc.use_local_subchannel_pool", 1)]
        )
        call = rpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(
            iter([infer(id=c, stream=True, sampling=FOUR) for c in "abc"])
        )
        for _ in range(3):
            await call.read()
        assert s.engine.running == 3
        if how == "cancel":
            call.cancel()
        await channel.close()
        await until(lambda: s.engine.running == 0)
        assert s.engine.closed == 3
        await until(lambda: s.server.guard.num_calls == len(s.server.guard.streams) == 0)


async def test_a_caller_who_leaves_aborts_its_request() -> None:
    async with serving() as s:
        s.engine.gate.clear()
        call = stub(s).ModelInfer(infer(sampling=FOUR))
        await until(lambda: s.engine.running == 1)
        call.cancel()
        await until(lambda: s.engine.running == 0)


async def test_a_stream_has_so_many_requests_under_way_and_the_next_ones_wait(monkeypatch) -> None:
    monkeypatch.setattr(kserve, "MAX_UNDER_WAY", 3)
    async with serving() as s:
        s.engine.gate.clear()
        requests = [infer(id=str(i), stream=True, sampling=FOUR) for i in range(8)]
        call = stub(s).ModelStreamInfer(iter(requests))
        first = [await call.read() for _ in range(3)]
        assert s.engine.running == 3
        s.engine.gate.set()
        responses = [*first, *await rest(call)]
        assert len(s.engine.calls) == 8
    assert all(len(texts(responses, str(i))) == 4 for i in range(8))


async def test_an_idle_stream_makes_room_and_a_busy_one_stays(monkeypatch) -> None:
    async with serving() as s:
        streams = s.server.guard.streams
        streams.most, streams.patience_s = 2, 0.0
        s.engine.gate.clear()
        api = stub(s)
        busy = api.ModelStreamInfer()
        await busy.write(infer(stream=True, sampling=FOUR))
        await busy.read()
        idle = api.ModelStreamInfer()
        await until(lambda: len(streams) == 2)
        third = api.ModelStreamInfer()
        await third.write(infer(stream=True, sampling=FOUR))
        await third.read()
        error = await failure(idle)
        assert (error.code(), "others wait for its place" in error.details()) == (
            CODE.RESOURCE_EXHAUSTED,
            True,
        )
        error = await failure(api.ModelStreamInfer())  # both that are open are busy
        assert (error.code(), "2 streams are open already" in error.details()) == (
            CODE.RESOURCE_EXHAUSTED,
            True,
        )
        s.engine.gate.set()
        for call in (busy, third):
            await call.done_writing()
            assert len(await rest(call)) == 3


async def test_a_stream_without_requests_ends_in_time(monkeypatch) -> None:
    monkeypatch.setattr("serving.frontend.streams.IDLE_S", 0.05)
    async with serving() as s:
        call = stub(s).ModelStreamInfer()
        await call.write(infer(sampling=FOUR))
        assert texts([await call.read()]) == ["abcdefg"]
        error = await failure(call.read())
        assert (error.code(), "no request under way" in error.details()) == (
            CODE.DEADLINE_EXCEEDED,
            True,
        )


async def test_a_server_that_stops_ends_its_streams() -> None:
    async with Setup(ServerConfig(port=0)) as s:
        await s.ready()
        s.engine.gate.clear()
        idle, busy = stub(s).ModelStreamInfer(), stub(s).ModelStreamInfer()
        await busy.write(infer(id="x", stream=True, sampling=FOUR))
        await busy.read()
        await until(lambda: len(s.server.guard.streams) == 2)
        await s.server.stop()
        error = await failure(idle)
        assert (error.code(), "the server stops" in error.details()) == (CODE.UNAVAILABLE, True)
        last = await busy.read()
        assert (last.infer_response.id, last.error_message) == ("x", "the engine stopped")


# ---- pure -------------------------------------------------------------------------------------


def output(**fields) -> Output:
    usage = Usage(1, 1, 8, 2)
    return Output(**{"request_id": "x", "text": "a", "token_ids": (5,), "logprobs": (-1.0,), "usage": usage, **fields})  # noqa: E501 # fmt: skip


def asked(*names: str, streams: bool = False) -> kserve_tensors.Asked:
    request = infer(outputs=names, stream=streams)
    bounds = kserve_tensors.Bounds(10, 100, 0)
    return kserve_tensors.read(request, bounds)


def test_logprobs_have_the_likeliest_tokens_with_their_ranks() -> None:
    answer = Answer("x", "m", asked("logprobs", streams=True), lambda token: chr(97 + token))
    top = (((6, -0.5), (5, -1.0)),)
    response = answer.add(output(top_logprobs=top))
    assert response is not None
    assert json.loads(outputs(response)["logprobs"]) == [
        {
            "6": {"logprob": -0.5, "rank": 1, "decoded_token": "g"},
            "5": {"logprob": -1.0, "rank": 2, "decoded_token": "f"},
        }
    ]
    masked = (((5, -1.0), (7, float("-inf"))),)
    response = answer.add(output(top_logprobs=masked))
    assert response is not None
    (entry,) = json.loads(outputs(response)["logprobs"])
    assert entry["7"] == {"logprob": None, "rank": 2, "decoded_token": "h"}


def test_outputs_become_one() -> None:
    span = ThresholdSpan(20, 40)
    last = output(
        text="b", token_ids=(6, 7), logprobs=(-2.0, -3.0), top_logprobs=((), ()),
        usage=Usage(1, 3, 24, 3), finish_reason="stop", prefill_threshold=span,
    )  # fmt: skip
    answer = Answer("x", "m", asked("text_output"), None)
    assert answer.add(output()) is None
    response = answer.add(last)
    assert response is not None
    assert outputs(response) == {"text_output": "abcab"}
    assert parameters(response)["prefill_threshold_max_percent"] == 40


def test_the_largest_requests_fit_their_bound() -> None:
    bounds = kserve_tensors.Bounds(2047, 8188, 100)
    request = infer(
        "\U0001f600" * bounds.max_prompt_chars, sampling=" " * (256 << 10), id="x" * 128
    )
    for i in range(64):
        request.parameters["p" * 60 + str(i)].string_param = "v" * 60
    assert request.ByteSize() <= kserve_tensors.max_request_bytes(bounds)
