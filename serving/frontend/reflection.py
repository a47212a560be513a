"""gRPC reflection under both of its names, `grpc.reflection.v1alpha` and `grpc.reflection.v1`.

The installed package has v1alpha only. v1 is the same protocol under another package name, so that
one servicer answers both.
"""

from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_reflection.v1alpha import reflection, reflection_pb2

SERVICE_V1 = "grpc.reflection.v1.ServerReflection"
_FILE_V1 = "grpc/reflection/v1/reflection.proto"


def add(server: grpc.aio.Server, services: tuple[str, ...]) -> None:
    """Serves reflection of `services`, and of itself, in both versions."""
    _describe_v1()
    names = (*services, reflection.SERVICE_NAME, SERVICE_V1)
    reflection.enable_server_reflection(names, server)
    servicer: Any = reflection.aio.ReflectionServicer(names)
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers = {"ServerReflectionInfo": method}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_V1, handlers),))


def _describe_v1() -> None:
    """Adds v1's file to the pool that reflection answers from, unless a package brought it."""
    pool = descriptor_pool.Default()
    try:
        pool.FindFileByName(_FILE_V1)
    except KeyError:
        alpha = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(alpha)
        text = text_format.MessageToString(alpha).replace("reflection.v1alpha", "reflection.v1")
        file = text_format.Parse(text, descriptor_pb2.FileDescriptorProto())
        file.name = _FILE_V1
        pool.AddSerializedFile(file.SerializeToString())
