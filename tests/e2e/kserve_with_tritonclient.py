"""Asks a server with tritonclient, in an environment without jmoe, and prints what came as JSON.

Argument: HOST:PORT. Standard input: the server's own description of the protocol, in hexadecimal.
"""

import asyncio
import json
import queue
import sys

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from google.protobuf import descriptor_pb2
from tritonclient.grpc import model_config_pb2, service_pb2
from tritonclient.utils import InferenceServerException

ADDRESS = sys.argv[1]
PROMPT = "Question: what is the capital of Ladrodro? Answer:"
SAMPLING = {"temperature": "0", "max_tokens": "8", "logprobs": 0}  # numbers as text, as samples do
TENSORS = {
    "return_finish_reason": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
    "return_logprobs": True,
    "return_cumulative_logprob": True,
}


def tensor(name, value):
    array = np.array([value], dtype=bool if isinstance(value, bool) else np.object_)
    made = triton.InferInput(name, [1], "BOOL" if isinstance(value, bool) else "BYTES")
    made.set_data_from_numpy(array)
    return made


def inputs(prompt=PROMPT, sampling=SAMPLING, **tensors):
    given = {"text_input": prompt, "sampling_parameters": json.dumps(sampling), **tensors}
    return [
        tensor(name, value.encode() if isinstance(value, str) else value)
        for name, value in given.items()
    ]


def values(result):
    found = {}
    for output in result.get_response().outputs:
        (value,) = result.as_numpy(output.name).tolist()
        found[output.name] = value.decode() if isinstance(value, bytes) else value
    return found


def final(result):
    return result.get_response().parameters["triton_final_response"].bool_param


def about(client, model):
    return {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "model_ready": client.is_model_ready(model),
        "server": client.get_server_metadata(as_json=True),
        "metadata": client.get_model_metadata(model, as_json=True),
        "config": client.get_model_config(model, as_json=True),
        "index": client.get_model_repository_index(as_json=True),
    }


def streamed(client, model):
    """Sends three requests at once on one stream, one of them invalid."""
    came = queue.Queue()
    client.start_stream(callback=lambda result, error: came.put((result, error)))
    asks = {"a": {}, "bad": {"sampling": {"max_tokens": 0}}, "b": {}}
    for name, change in asks.items():
        client.async_stream_infer(
            model,
            inputs(**change, stream=True, return_finish_reason=True),
            request_id=name,
            enable_empty_final_response=True,
        )
    found = {"a": [], "b": []}
    errors, ended = [], 0
    while ended < len(asks):
        result, error = came.get(timeout=120)
        if error is not None:
            errors.append(str(error))
            ended += 1
            continue
        found[result.get_response().id].append(values(result))
        ended += final(result)
    client.stop_stream()
    return {"responses": found, "errors": errors}


async def asynchronous(model):
    async with triton_aio.InferenceServerClient(ADDRESS) as client:

        async def requests():
            yield {"model_name": model, "inputs": inputs(stream=True), "request_id": "x"}

        texts = []
        async for result, error in client.stream_infer(requests()):
            assert error is None, error
            texts.append(values(result)["text_output"])
        return "".join(texts)


def refusal(call):
    try:
        call()
    except InferenceServerException as error:
        return [error.status(), error.message()]
    raise AssertionError("nothing was refused")


def numbers(files):
    """Returns numbers, types and labels of every field, method and enum value, by name."""
    found = {}

    def add_message(message, prefix):
        name = f"{prefix}{message.name}"
        for field in message.field:
            kind = [field.number, field.type, field.label, field.type_name]
            found[f"{name}.{field.name}"] = kind
        for inner in message.nested_type:
            add_message(inner, f"{name}.")

    for file in files:
        for message in file.message_type:
            add_message(message, "")
        for enum in file.enum_type:
            found.update({f"{enum.name}.{value.name}": value.number for value in enum.value})
        for service in file.service:
            for m in service.method:
                kind = [m.input_type, m.output_type, m.client_streaming, m.server_streaming]
                found[f"{service.name}/{m.name}"] = kind
    return found


def other_numbers(theirs):
    """Returns what the server's description has that the public one lacks or has differently."""
    public = []
    for module in (service_pb2, model_config_pb2):
        public.append(descriptor_pb2.FileDescriptorProto())
        module.DESCRIPTOR.CopyToProto(public[-1])
    known, own = numbers(public), numbers([theirs])
    assert own
    return sorted(name for name, value in own.items() if known.get(name) != value)


def main():
    described = descriptor_pb2.FileDescriptorProto.FromString(bytes.fromhex(sys.stdin.read()))
    client = triton.InferenceServerClient(ADDRESS)
    (model,) = (entry.name for entry in client.get_model_repository_index().models)
    named = [triton.InferRequestedOutput("text_output")]
    parameters = {"temperature": 0, "max_tokens": 8, "allow_brownout": False}
    text = [tensor("text_input", PROMPT.encode())]
    late = {"temperature": 0, "max_tokens": 200, "ignore_eos": True}
    found = {
        "other_numbers": other_numbers(described),
        "about": about(client, model),
        "whole": values(client.infer(model, inputs(**TENSORS), request_id="x")),
        "without_input": values(client.infer(model, inputs(exclude_input_in_output=True))),
        "by_parameters": values(
            client.infer(model, text, outputs=named, parameters=parameters, priority=2)
        ),
        "streamed": streamed(client, model),
        "asynchronous": asyncio.run(asynchronous(model)),
        "unknown_model": refusal(lambda: client.infer("nobody", inputs())),
        "bad_value": refusal(lambda: client.infer(model, inputs(sampling={"top_p": 7}))),
        "late": refusal(lambda: client.infer(model, inputs(sampling=late), timeout=1)),
    }
    print(json.dumps(found))


main()
