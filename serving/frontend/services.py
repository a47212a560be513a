"""The services of `jmoe.v1`; `serving.frontend.guard` reports their errors to clients. No jax."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from serving.errors import NotFound
from serving.frontend import access, convert
from serving.frontend.guard import Guard, Service
from serving.frontend.listen import GrpcPort
from serving.frontend.status import noted
from serving.proto.jmoe.v1 import jmoe_pb2 as pb
from serving.proto.jmoe.v1 import jmoe_pb2_grpc as rpc
from serving.request import OPTIONS, number_of
from serving.telemetry.version import jmoe_version

if TYPE_CHECKING:
    from serving.execution.executor import Executor
    from serving.frontend.server import Server

GENERATE = "/jmoe.v1.Generation/Generate"
_ADMIN_CONNECTIONS, _ADMIN_CALLS = 128, 1024


def front_end(server: "Server") -> GrpcPort:
    """Offers Generation on the main port, and Admin on a port of its own, which it returns."""
    config, services = server.config, pb.DESCRIPTOR.services_by_name
    guard = Guard(replace(server.guard.limits, max_calls=_ADMIN_CALLS), server)
    port = GrpcPort(
        *(server, guard, config.admin_host, config.admin_port, _ADMIN_CONNECTIONS, "admin-")
    )
    server.main.add(
        Service(
            services["Generation"],
            GenerationService(server, port),
            rpc.add_GenerationServicer_to_server,
            "grpc",
            prompts={GENERATE: convert.max_request_bytes},
        )
    )
    admin = Service(
        services["Admin"],
        AdminService(server),
        rpc.add_AdminServicer_to_server,
        "admin",
        needs_admin=True,
    )
    for each in [port] + [server.main] * config.admin_on_main_port:
        each.add(admin)
    return port


class GenerationService(rpc.GenerationServicer):
    """`jmoe.v1.Generation`."""

    def __init__(self, server: "Server", admin: GrpcPort) -> None:
        """`admin` is the port of `jmoe.v1.Admin`, of which clients learn here."""
        self._server, self._admin = server, admin

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        """Streams one request's outputs. If the client disconnects, the request is aborted."""
        server, engine = self._server, self._server.ready_engine()
        request_id, caller = convert.request_id(request), access.current.get()
        priority = caller.class_of(convert.priority(request))
        model = engine.names[number_of(request.model, engine.names)]
        headers = context.invocation_metadata()
        with (
            caller.request(model, priority),
            server.tracer.request(request_id, model, priority, headers) as span,
        ):
            outputs = engine.generate(
                convert.prompt(request, engine.bounds),
                convert.sampling(request.sampling),
                request_id=request_id,
                priority=priority,
                timeout_s=context.time_remaining(),
                model=request.model,
                salt=caller.salt(convert.salt(request)),
                key=caller.name,
                **{name: getattr(request, name) for name in OPTIONS if request.HasField(name)},
            )
            async with noted(outputs, request_id, caller, span) as note:
                async for out in outputs:
                    note(out)
                    await context.write(convert.response(out))

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.ServerInfo:
        """Returns limits and status, also while the model is loading."""
        server, engine = self._server, self._server.engine
        settings = server.config.engine if engine is None else engine.config
        info = pb.ServerInfo(
            version=jmoe_version(),
            status=server.status,
            model=server.model_names[0],
            models=server.model_names,
            max_num_seqs=settings.max_num_seqs,
            max_model_len=settings.max_model_len,
            max_queue_len=settings.max_queue_len,
            kv_page_size=settings.page_size,
            threshold_buckets_percent=settings.threshold_buckets_percent,
            policy=settings.policy,
            admin_port=self._admin.port,
            admin_host=server.config.admin_host.strip("[]"),
            best_effort_wait_s=math.inf,
        )
        if engine is not None:
            wait_s = engine.pace.best_effort_wait_s(settings.best_effort_max_wait_s)
            info.num_kv_pages, info.best_effort_wait_s = engine.stats().kv_pages_total, wait_s
            _tell_how_steps_run(engine.executor, info)
        return info

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.ModelInfo:
        """Returns a served model's architecture; the first model's if none is named."""
        engine = self._server.ready_engine()
        number = number_of(request.model, engine.names)
        if engine.family is None:
            raise NotFound("this engine runs without a model")
        return convert.model_info(engine.names[number], engine.family[number])


def _tell_how_steps_run(executor: "Executor", info: pb.ServerInfo) -> None:
    """Sets the device, the layers that are launched at once, by phase and size, and each op's
    implementation.
    """
    import jax  # the engine has imported it

    from serving.execution.executor import ChoosesImplementations, RunsParts

    info.platform = f"{jax.default_backend()} {jax.devices()[0].device_kind}"
    info.num_programs = executor.num_programs
    if isinstance(executor, RunsParts):
        info.part_layers.update(executor.part_layers_by_size)
    if isinstance(executor, ChoosesImplementations):
        info.implementations.update(executor.implementations)


def who(context: Any) -> str:
    """Returns how log and page name an operator: the key's name, and the address."""
    name = access.current.get().name
    return f"{name} at {context.peer()}" if name else context.peer()


class AdminService(rpc.AdminServicer):
    """`jmoe.v1.Admin`."""

    def __init__(self, server: "Server") -> None:
        self._server = server

    async def GetBrownout(self, request: pb.GetBrownoutRequest, context: Any) -> pb.BrownoutState:
        """Returns the brownout settings in force."""
        return convert.brownout_state(self._server.ready_engine().get_brownout())

    async def SetBrownout(self, request: pb.SetBrownoutRequest, context: Any) -> pb.BrownoutState:
        """Changes the fields that are set; if the way changes, answers once it is loaded."""
        self._server.ready_engine()
        change = convert.brownout_change(request)
        return convert.brownout_state(await self._server.set_brownout(change, who(context)))

    async def LoadModel(self, request: pb.LoadModelRequest, context: Any) -> pb.ServedModels:
        """Loads a model beside the others; answers when requests may name it."""
        await self._server.ready_engine().load_model(request.name, request.directory)
        self._server.happened("models", f"{who(context)}: loaded {request.name}")
        return self._served()

    async def UnloadModel(self, request: pb.UnloadModelRequest, context: Any) -> pb.ServedModels:
        """Unloads a model; answers when what it took is free."""
        ended = await self._server.ready_engine().unload_model(request.name, request.drain_s)
        self._server.happened("models", f"{who(context)}: unloaded {request.name}")
        return self._served(ended)

    def _served(self, num_ended: int = 0) -> pb.ServedModels:
        names = self._server.model_names
        vacant = len(self._server.ready_engine().names) - len(names)
        return pb.ServedModels(names=names, num_vacant=vacant, num_ended=num_ended)

    async def GetStats(self, request: pb.GetStatsRequest, context: Any) -> pb.Stats:
        """Returns the current counters and gauges."""
        return convert.stats(self._server.ready_engine().stats())
