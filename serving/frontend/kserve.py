"""`inference.GRPCInferenceService`: the Open Inference Protocol, for clients as they are. No jax.

A model is served as Triton's vLLM backend serves one (docs/kserve.md). What is raised here,
`serving.frontend.guard` tells the caller, or a response of the stream does.
"""

import asyncio
import contextlib
import math
import uuid
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any

from serving.errors import InvalidRequest, ServingError, shown
from serving.frontend import kserve_tensors
from serving.frontend.guard import authorization, cut
from serving.frontend.kserve_tensors import INPUTS, OUTPUTS, VERSION, Answer
from serving.frontend.outputs import noted
from serving.frontend.streams import Stream
from serving.frontend.tracing import trace_headers
from serving.proto.inference import inference_pb2 as pb
from serving.proto.inference import inference_pb2_grpc as rpc
from serving.request import number_of
from serving.version import jmoe_version

if TYPE_CHECKING:
    from serving.engine import Engine
    from serving.frontend.server import Server

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
INFER, STREAM_INFER = f"/{SERVICE}/ModelInfer", f"/{SERVICE}/ModelStreamInfer"
MAX_UNDER_WAY = 128
"""Requests of one stream at once; its next message is read when one of them has ended."""

_PLATFORM = "jmoe"
_EXTENSIONS = ("model_configuration", "parameters", "schedule_policy")
_TYPES = {
    "BYTES": pb.TYPE_STRING,
    "BOOL": pb.TYPE_BOOL,
    "FP32": pb.TYPE_FP32,
    "UINT32": pb.TYPE_UINT32,
}


class InferenceService(rpc.GRPCInferenceServiceServicer):
    """`inference.GRPCInferenceService`."""

    def __init__(self, server: "Server") -> None:
        self._server, self.guard = server, server.guard

    # ---- inference ----------------------------------------------------------------------------

    async def ModelInfer(
        self, request: pb.ModelInferRequest, context: Any
    ) -> pb.ModelInferResponse:
        """Answers whole. A caller that goes away cancels this, which aborts the request."""
        responses = self.answers(request, context, may_stream=False)
        async with contextlib.aclosing(responses):
            return await anext(responses)

    async def ModelStreamInfer(self, messages: Stream, context: Any) -> None:
        """Answers requests as they come, many at once. One that fails has an `error_message`."""
        await _InferStream(self, messages, context).run()

    async def answers(
        self, request: pb.ModelInferRequest, context: Any, *, may_stream: bool
    ) -> AsyncGenerator[pb.ModelInferResponse]:
        """The responses to one request; closing the iterator aborts it.

        Raises a ServingError. An overloaded server looks at nothing first.
        """
        engine = self._server.ready_engine()
        engine.check_admission()
        # Again for each request of a stream: its key may have been revoked since it was opened.
        caller = self._server.access.caller(authorization(context))
        caller.check_room()
        model = engine.names[number_of(request.model_name, engine.names)]
        asked = kserve_tensors.read(request, engine.bounds)
        if asked.streams and not may_stream:
            raise InvalidRequest(
                "stream is true, and ModelInfer answers once; send it to ModelStreamInfer"
            )
        answer = Answer(request.id, model, asked, _decoder(engine, model))
        request_id = request.id or uuid.uuid4().hex
        tracer = self._server.tracer
        headers = trace_headers(context.invocation_metadata()) if tracer.is_on else {}
        with (
            caller.request(model, asked.priority),
            tracer.request(request_id, model, asked.priority, **headers) as span,
        ):
            outputs = engine.generate(
                asked.prompt,
                asked.sampling,
                request_id=request_id,
                allow_brownout=asked.allow_brownout,
                priority=asked.priority,
                timeout_s=_sooner(asked.timeout_s, context.time_remaining()),
                model=model,
                reuse_prefix=asked.reuse_prefix,
                salt=caller.salt(asked.salt),
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
        """The process answers."""
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(
        self, request: pb.ServerReadyRequest, context: Any
    ) -> pb.ServerReadyResponse:
        """As health says."""
        return pb.ServerReadyResponse(ready=self._server.health.is_serving)

    async def ModelReady(
        self, request: pb.ModelReadyRequest, context: Any
    ) -> pb.ModelReadyResponse:
        """Whether a model is served now; one that never is, is NOT_FOUND."""
        self._name(request.name, request.version)
        return pb.ModelReadyResponse(ready=self._server.health.is_serving)

    async def ServerMetadata(
        self, request: pb.ServerMetadataRequest, context: Any
    ) -> pb.ServerMetadataResponse:
        """Name, version, and extensions of the protocol."""
        return pb.ServerMetadataResponse(
            name=_PLATFORM, version=jmoe_version(), extensions=_EXTENSIONS
        )

    async def ModelMetadata(
        self, request: pb.ModelMetadataRequest, context: Any
    ) -> pb.ModelMetadataResponse:
        """Tensors: the same for every model, and while it is loading."""
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
        """The metadata in Triton's form."""
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
        """The served models; none of them while they are loading, where only those ready count."""
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
        """Of a model, the first where none is named. Raises NotFound."""
        kserve_tensors.check_version(version)
        names = self._server.model_names
        return names[number_of(name, names)]


class _InferStream:
    """One call of ModelStreamInfer."""

    def __init__(self, service: InferenceService, messages: Stream, context: Any) -> None:
        self._service, self._messages, self._context = service, messages, context
        self._writing, self._free = asyncio.Lock(), asyncio.Semaphore(MAX_UNDER_WAY)

    async def run(self) -> None:
        """Until its caller has sent all and got every answer; cancelled, it aborts them all.

        Raises a ServingError where the stream has to go, once nothing is under way.
        """
        ended: ServingError | None = None
        async with asyncio.TaskGroup() as group:
            while ended is None:
                await self._free.acquire()
                try:
                    request = await anext(self._messages, None)
                except InvalidRequest as error:  # bytes that are no request, and have no id
                    self._free.release()
                    with self._messages.request():  # it has its place until its caller reads this
                        await self._tell(error, "")
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
            with self._messages.request(), self._service.guard.place():
                responses = self._service.answers(request, self._context, may_stream=True)
                async with contextlib.aclosing(responses):
                    async for response in responses:
                        await self._write(pb.ModelStreamInferResponse(infer_response=response))
        except Exception as error:
            await self._tell(error, request.id)
        finally:
            self._free.release()

    async def _tell(self, error: Exception, request_id: str) -> None:
        """An error as a response, the last one to its request."""
        code, said, trailing = self._service.guard.tell(STREAM_INFER, self._context, error)
        told = pb.ModelStreamInferResponse(error_message=said or code.name)
        told.infer_response.id = cut(request_id)
        parameters: dict[str, Any] = {"triton_final_response": True, "status": code.name}
        if trailing:
            parameters["retry_after_ms"] = int(trailing[0][1])
        kserve_tensors.set_parameters(told.infer_response, parameters)
        await self._write(told)

    async def _write(self, response: pb.ModelStreamInferResponse) -> None:
        async with self._writing:  # gRPC takes one message of a call at a time
            await self._context.write(response)


def _sooner(timeout_s: float | None, left_s: float | None) -> float | None:
    """The request's own time, or its call's where that ends before."""
    soonest = min(
        math.inf if timeout_s is None else timeout_s, math.inf if left_s is None else left_s
    )
    return None if soonest == math.inf else soonest


def _decoder(engine: "Engine", model: str) -> Callable[[int], str] | None:
    """Gives the text of one token; None where a model has no tokenizer."""
    if engine.family is None:
        return None
    tokenizer = engine.family[engine.names.index(model)].tokenizer
    return None if tokenizer is None else lambda token: tokenizer.decode([token])
