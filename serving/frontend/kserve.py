"""`inference.GRPCInferenceService`: the Open Inference Protocol, for existing clients. No jax.

Models are served as by Triton's vLLM backend (docs/kserve.md). Errors raised here are reported to
the client by `serving.frontend.guard`, or in a response of the stream.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import grpc

from serving.errors import InvalidRequest, ServingError, shown
from serving.frontend import kserve_tensors
from serving.frontend.guard import Service, authorization, cut
from serving.frontend.kserve_tensors import INPUTS, OUTPUTS, VERSION, Answer
from serving.frontend.status import noted
from serving.frontend.streams import Stream
from serving.proto.inference import inference_pb2 as pb
from serving.proto.inference import inference_pb2_grpc as rpc
from serving.request import number_of
from serving.telemetry.version import jmoe_version

if TYPE_CHECKING:
    from serving.engine import Engine
    from serving.frontend.server import Server

_SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
INFER = f"/{_SERVICE.full_name}/ModelInfer"
STREAM_INFER = f"/{_SERVICE.full_name}/ModelStreamInfer"
STREAM_REQUEST = f"{STREAM_INFER}/request"
"""How requests of a stream are counted, apart from the stream itself."""
MAX_UNDER_WAY = 128
"""Concurrent requests of one stream; the next message is read when one of them has ended."""

_PLATFORM = "jmoe"
_EXTENSIONS = ("model_configuration", "parameters", "schedule_policy")
_TYPES = {
    "BYTES": pb.TYPE_STRING,
    "BOOL": pb.TYPE_BOOL,
    "FP32": pb.TYPE_FP32,
    "UINT32": pb.TYPE_UINT32,
}


def front_end(server: "Server") -> None:
    """Offers the protocol on the main port."""
    server.main.add(
        Service(
            _SERVICE,
            InferenceService(server),
            rpc.add_GRPCInferenceServiceServicer_to_server,
            "kserve",
            prompts=dict.fromkeys((INFER, STREAM_INFER), kserve_tensors.max_request_bytes),
            lasting=(STREAM_INFER,),
            also_counted=(STREAM_REQUEST,),
        )
    )


class InferenceService(rpc.GRPCInferenceServiceServicer):
    """`inference.GRPCInferenceService`."""

    def __init__(self, server: "Server") -> None:
        self._server, self.guard = server, server.guard

    # ---- inference ----------------------------------------------------------------------------

    async def ModelInfer(
        self, request: pb.ModelInferRequest, context: Any
    ) -> pb.ModelInferResponse:
        """Answers with one response. If the client disconnects, this is cancelled and the request
        aborted.
        """
        responses = self.answers(request, context, may_stream=False)
        async with contextlib.aclosing(responses):
            return await anext(responses)

    async def ModelStreamInfer(self, messages: Stream, context: Any) -> None:
        """Answers a stream of requests concurrently. A failed request gets an `error_message`."""
        await _InferStream(self, messages, context).run()

    async def answers(
        self, request: pb.ModelInferRequest, context: Any, *, may_stream: bool
    ) -> AsyncGenerator[pb.ModelInferResponse]:
        """Yields the responses to one request; closing the iterator aborts it.

        Raises a ServingError. Overload is checked before the request is read.
        """
        engine = self._server.ready_engine()
        # Checked for each request of a stream: the key may have been revoked since the stream was
        # opened.
        caller = self._server.access.caller(authorization(context))
        engine.check_admission(key=caller.name)
        caller.check_room()
        model = engine.names[number_of(request.model_name, engine.names)]
        asked = kserve_tensors.read(request, engine.bounds)
        if asked.streams and not may_stream:
            raise InvalidRequest(
                "stream is true, and ModelInfer answers once; send it to ModelStreamInfer"
            )
        priority = caller.class_of(asked.priority)
        answer = Answer(request.id, model, asked, _decoder(engine, model))
        request_id = request.id or uuid.uuid4().hex
        tracer, headers = self._server.tracer, context.invocation_metadata()
        with (
            caller.request(model, priority),
            tracer.request(request_id, model, priority, headers) as span,
        ):
            outputs = engine.generate(
                asked.prompt,
                asked.sampling,
                request_id=request_id,
                priority=priority,
                timeout_s=_sooner(asked.timeout_s, context.time_remaining()),
                model=model,
                salt=caller.salt(asked.salt),
                key=caller.name,
                **asked.options,
            )
            async with noted(outputs, request_id, caller, span) as note:
                async for out in outputs:
                    note(out)
                    if (response := answer.add(out)) is not None:
                        yield response

    # ---- what is served -----------------------------------------------------------------------

    async def ServerLive(
        self, request: pb.ServerLiveRequest, context: Any
    ) -> pb.ServerLiveResponse:
        """Says that the process is alive."""
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(
        self, request: pb.ServerReadyRequest, context: Any
    ) -> pb.ServerReadyResponse:
        """Returns the status of the health service."""
        return pb.ServerReadyResponse(ready=self._server.health.is_serving)

    async def ModelReady(
        self, request: pb.ModelReadyRequest, context: Any
    ) -> pb.ModelReadyResponse:
        """Returns whether a model is being served now; NOT_FOUND for an unknown model."""
        self._name(request.name, request.version)
        return pb.ModelReadyResponse(ready=self._server.health.is_serving)

    async def ServerMetadata(
        self, request: pb.ServerMetadataRequest, context: Any
    ) -> pb.ServerMetadataResponse:
        """Returns the server's name and version, and the protocol extensions it supports."""
        return pb.ServerMetadataResponse(
            name=_PLATFORM, version=jmoe_version(), extensions=_EXTENSIONS
        )

    async def ModelMetadata(
        self, request: pb.ModelMetadataRequest, context: Any
    ) -> pb.ModelMetadataResponse:
        """Returns the input and output tensors, which are the same for every model, loaded
        or not.
        """
        tensor = pb.ModelMetadataResponse.TensorMetadata
        return pb.ModelMetadataResponse(
            name=self._name(request.name, request.version),
            versions=[VERSION],
            platform=_PLATFORM,
            inputs=[tensor(name=name, datatype=kind, shape=[1]) for name, kind in INPUTS.items()],
            outputs=[tensor(name=name, datatype=kind, shape=[1]) for name, kind in OUTPUTS.items()],
        )

    async def ModelConfig(
        self, request: pb.ModelConfigRequest, context: Any
    ) -> pb.ModelConfigResponse:
        """Returns a model's metadata in Triton's format."""
        config = pb.ModelConfig(
            name=self._name(request.name, request.version),
            platform=_PLATFORM,
            backend=_PLATFORM,
            model_transaction_policy=pb.ModelTransactionPolicy(decoupled=True),
        )
        for name, kind in INPUTS.items():
            config.input.add(
                name=name, data_type=_TYPES[kind], dims=[1], optional=name != "text_input"
            )
        for name, kind in OUTPUTS.items():
            config.output.add(name=name, data_type=_TYPES[kind], dims=[1])
        return pb.ModelConfigResponse(config=config)

    async def RepositoryIndex(
        self, request: pb.RepositoryIndexRequest, context: Any
    ) -> pb.RepositoryIndexResponse:
        """Lists the served models; none while loading, if only ready ones were asked for."""
        if request.repository_name:
            raise InvalidRequest(
                f"repository_name is {shown(request.repository_name)}; there are no repositories, "
                "leave it out"
            )
        ready, why = self._server.readiness()
        state = "READY" if ready else "LOADING" if self._server.engine is None else "UNAVAILABLE"
        names = self._server.model_names if ready or not request.ready else ()
        index = pb.RepositoryIndexResponse.ModelIndex
        return pb.RepositoryIndexResponse(
            models=[
                index(name=name, version=VERSION, state=state, reason="" if ready else why)
                for name in names
            ]
        )

    def _name(self, name: str, version: str) -> str:
        """Returns a served model's name; the first model's if `name` is empty. Raises NotFound."""
        kserve_tensors.check_version(version)
        names = self._server.model_names
        return names[number_of(name, names)]


class _InferStream:
    """One call of ModelStreamInfer."""

    def __init__(self, service: InferenceService, messages: Stream, context: Any) -> None:
        self._service, self._messages, self._context = service, messages, context
        self._writing, self._free = asyncio.Lock(), asyncio.Semaphore(MAX_UNDER_WAY)

    async def run(self) -> None:
        """Runs until the client has ended its stream and got every response.

        If cancelled, all requests are aborted. Raises a ServingError if the stream had to be ended,
        after its running requests have finished.
        """
        ended: ServingError | None = None
        async with asyncio.TaskGroup() as group:
            while ended is None:
                await self._free.acquire()
                try:
                    request = await anext(self._messages, None)
                except InvalidRequest as error:  # not a valid request, so it has no id
                    self._free.release()
                    with self._messages.request():  # not idle until the client reads of it
                        async with self._answering(""):
                            raise error
                except ServingError as error:
                    ended = error
                else:
                    if request is None:
                        break
                    group.create_task(self._answer(request))
        if ended is not None:
            raise ended

    async def _answer(self, request: pb.ModelInferRequest) -> None:
        try:
            async with self._answering(request.id):
                with self._messages.request(), self._service.guard.place():
                    responses = self._service.answers(request, self._context, may_stream=True)
                    async with contextlib.aclosing(responses):
                        async for response in responses:
                            told = pb.ModelStreamInferResponse(infer_response=response)
                            await self._write(told)
        finally:
            self._free.release()

    def _answering(self, request_id: str) -> contextlib.AbstractAsyncContextManager[None]:
        refuse = partial(self._refuse, request_id)
        return self._service.guard.answering(STREAM_INFER, self._context, refuse, STREAM_REQUEST)

    async def _refuse(
        self,
        request_id: str,
        code: grpc.StatusCode,
        said: str,
        trailing: tuple[tuple[str, str], ...],
    ) -> None:
        """Sends an error as the last response to its request."""
        told = pb.ModelStreamInferResponse(error_message=said or code.name)
        told.infer_response.id = cut(request_id)
        parameters: dict[str, Any] = {"triton_final_response": True, "status": code.name}
        if trailing:
            parameters["retry_after_ms"] = int(trailing[0][1])
        kserve_tensors.set_parameters(told.infer_response, parameters)
        with contextlib.suppress(grpc.aio.BaseError):  # the client has left
            await self._write(told)

    async def _write(self, response: pb.ModelStreamInferResponse) -> None:
        async with self._writing:  # gRPC takes one message of a call at a time
            await self._context.write(response)


def _sooner(timeout_s: float | None, left_s: float | None) -> float | None:
    """Returns the earlier of the request's own timeout and the call's remaining time."""
    return min((one for one in (timeout_s, left_s) if one is not None), default=None)


def _decoder(engine: "Engine", model: str) -> Callable[[int], str] | None:
    """Returns a function that decodes one token; None if the model has no tokenizer."""
    if engine.family is None:
        return None
    tokenizer = engine.family[engine.names.index(model)].tokenizer
    return None if tokenizer is None else cache(lambda token: tokenizer.decode([token]))
