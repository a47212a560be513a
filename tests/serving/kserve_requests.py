"""Requests of the Open Inference Protocol, made by hand, and what their responses say."""

import json
import struct
from typing import Any

from serving.proto.inference import inference_pb2 as pb

DATATYPES = {"text_input": "BYTES", "sampling_parameters": "BYTES"}


def element(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<I", len(data)) + data


def infer(text: str | bytes | None = "abc", *, raw: bool = True, **given: Any):
    """Makes a request for `text`; tensors, parameters and fields of the message by their names.

    `sampling` is sent as JSON; `parameters` become `InferParameter`s of their values' types.
    """
    tensors: dict[str, Any] = {} if text is None else {"text_input": text}
    if (sampling := given.pop("sampling", None)) is not None:
        tensors["sampling_parameters"] = (
            sampling if isinstance(sampling, str | bytes) else json.dumps(sampling)
        )
    parameters = given.pop("parameters", {})
    wanted = given.pop("outputs", ())
    for name in [
        name for name in given if name not in pb.ModelInferRequest.DESCRIPTOR.fields_by_name
    ]:
        tensors[name] = given.pop(name)
    request = pb.ModelInferRequest(**given)
    for name, value in tensors.items():
        add(request, name, value, raw)
    for name, value in parameters.items():
        kind = {bool: "bool", int: "int64", float: "double", str: "string"}[type(value)]
        setattr(request.parameters[name], f"{kind}_param", value)
    for name in wanted:
        request.outputs.add(name=name)
    return request


def add(request, name: str, value: Any, raw: bool = True, shape=(1,)) -> None:
    is_bool = isinstance(value, bool)
    tensor = request.inputs.add(name=name, datatype="BOOL" if is_bool else "BYTES", shape=shape)
    if raw:
        request.raw_input_contents.append(bytes([value]) if is_bool else element(value))
    elif is_bool:
        tensor.contents.bool_contents.append(value)
    else:
        tensor.contents.bytes_contents.append(value.encode() if isinstance(value, str) else value)


def outputs(response: pb.ModelInferResponse) -> dict[str, Any]:
    """Returns the values of the output tensors, by name."""
    found: dict[str, Any] = {}
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        assert list(tensor.shape) == [1]
        if tensor.datatype == "BYTES":
            assert raw == element(raw[4:])
            found[tensor.name] = raw[4:].decode()
        else:
            (found[tensor.name],) = struct.unpack(
                {"FP32": "<f", "UINT32": "<I"}[tensor.datatype], raw
            )
    return found


def parameters(response: pb.ModelInferResponse) -> dict[str, Any]:
    return {
        name: getattr(value, value.WhichOneof("parameter_choice"))
        for name, value in response.parameters.items()
    }
