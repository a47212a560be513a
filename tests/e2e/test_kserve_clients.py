"""Clients that know nothing of jmoe ask `jmoe serve` by the Open Inference Protocol."""

import base64
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from serving.client import Client
from serving.proto.inference import inference_pb2
from serving.proto.jmoe.v1 import jmoe_pb2 as pb

from .foreign import npm_package, python_packages, run_python

pytestmark = pytest.mark.deep

BLOCKS = re.findall(
    r"^```\n(.*?)^```",
    (Path(__file__).parents[2] / "docs" / "kserve.md").read_text(encoding="utf-8"),
    re.DOTALL | re.MULTILINE,
)
PROMPT = "Question: what is the capital of Ladrodro? Answer:"
SERVICE = "inference.GRPCInferenceService"


@pytest.fixture
async def expected(server) -> tuple[str, int]:
    """Returns jmoe's own greedy answer: text, and number of prompt tokens."""
    async with Client(server[1]) as client:
        sampling = pb.SamplingParams(max_new_tokens=8)
        got = [m async for m in client.generate(PROMPT, sampling, allow_brownout=False)]
    return "".join(message.text for message in got), got[-1].usage.prompt_tokens


@pytest.fixture(scope="module")
def asked(server):
    """Returns what tritonclient got; it needs an older protobuf than jmoe."""
    packages = python_packages("tritonclient-2.73.0", "tritonclient[grpc]==2.73.0")
    own = descriptor_pb2.FileDescriptorProto()
    inference_pb2.DESCRIPTOR.CopyToProto(own)
    script = Path(__file__).with_name("kserve_with_tritonclient.py")
    printed = run_python(packages, script, server[1], stdin=own.SerializeToString().hex())
    return json.loads(printed)


def test_tritonclient_knows_every_name_and_number(asked) -> None:
    assert asked["other_numbers"] == []


def test_tritonclient_learns_what_is_served(asked) -> None:
    about = asked["about"]
    assert about["live"]
    assert about["ready"]
    assert about["model_ready"]
    assert about["server"]["name"] == "jmoe"
    assert about["index"]["models"] == [{"name": "bundled", "version": "1", "state": "READY"}]
    assert about["metadata"]["name"] == about["config"]["config"]["name"] == "bundled"
    assert about["metadata"]["inputs"][0] == {
        "name": "text_input",
        "datatype": "BYTES",
        "shape": ["1"],
    }
    assert about["config"]["config"]["model_transaction_policy"] == {"decoupled": True}


async def test_tritonclient_gets_what_jmoes_own_client_gets(asked, expected) -> None:
    text, num_prompt_tokens = expected
    whole = asked["whole"]
    logprobs = json.loads(whole["logprobs"])
    assert whole["text_output"] == PROMPT + text
    assert whole["num_input_tokens"] == num_prompt_tokens
    assert whole["num_output_tokens"] == len(logprobs)
    assert whole["finish_reason"] in ("stop", "length")
    assert "".join(entry["decoded_token"] for one in logprobs for entry in one.values()) == text
    total = sum(entry["logprob"] for one in logprobs for entry in one.values())
    assert whole["cumulative_logprob"] == pytest.approx(total, abs=1e-4)
    assert asked["without_input"] == {"text_output": text}
    assert asked["by_parameters"] == {"text_output": PROMPT + text}
    assert asked["asynchronous"] == text


async def test_tritonclient_streams_many_at_once(asked, expected) -> None:
    (error,) = asked["streamed"]["errors"]
    assert "max_tokens is 0; it must be at least 1" in error
    for responses in asked["streamed"]["responses"].values():
        assert "".join(response["text_output"] for response in responses) == expected[0]
        assert {r["finish_reason"] for r in responses[:-1]} <= {"None"}
        assert responses[-1]["finish_reason"] in ("stop", "length")


def test_tritonclient_hears_what_is_wrong(asked) -> None:
    assert asked["unknown_model"] == [
        "StatusCode.NOT_FOUND",
        "model 'nobody' is not served; 'bundled' is",
    ]
    status, message = asked["bad_value"]
    assert status == "StatusCode.INVALID_ARGUMENT"
    assert "top_p is 7.0; it must be in (0, 1]" in message
    assert asked["late"][0] == "StatusCode.DEADLINE_EXCEEDED"


def test_the_pages_examples_of_tritonclient_run(server, tmp_path) -> None:
    packages = python_packages("tritonclient-2.73.0", "tritonclient[grpc]==2.73.0")
    script = tmp_path / "examples.py"
    script.write_text("".join(BLOCKS[:2]).replace("127.0.0.1:50051", server[1]))
    whole, *pieces = run_python(packages, script).splitlines()
    assert whole == f"{PROMPT} Bedrin"
    assert b"".join(map(eval, pieces)) == b" Bedrin"


@pytest.fixture(scope="module")
def buf() -> Path:
    return npm_package("buf-1.75.0", "@bufbuild/buf@1.75.0") / "node_modules" / ".bin" / "buf"


def test_the_pages_example_of_buf_runs(server, buf) -> None:
    (block,) = BLOCKS[2:]
    program, *arguments = shlex.split(block.replace("127.0.0.1:50051", server[1]))
    assert program == "buf"
    done = subprocess.run([str(buf), *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (content,) = json.loads(done.stdout)["rawOutputContents"]
    assert base64.b64decode(content)[4:].decode() == f"{PROMPT} Bedrin"


def test_buf_curl_asks_by_reflection(server, buf) -> None:

    def curl(method: str, body: dict) -> list[dict]:
        done = subprocess.run(
            [
                *(str(buf), "curl", "--protocol", "grpc", "--http2-prior-knowledge"),
                *("--data", json.dumps(body), f"http://{server[1]}/{SERVICE}/{method}"),
            ],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        decoder, found, left = json.JSONDecoder(), [], done.stdout.strip()
        while left:
            value, end = decoder.raw_decode(left)
            found.append(value)
            left = left[end:].strip()
        return found

    assert curl("ServerReady", {}) == [{"ready": True}]
    text = {
        "bytesContents": ["UXVlc3Rpb246IHdoYXQgaXMgdGhlIGNhcGl0YWwgb2YgTGFkcm9kcm8/IEFuc3dlcjo="]
    }  # Base64 of PROMPT
    body = {
        "id": "mine",
        "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "contents": text}],
        "parameters": {"max_tokens": {"int64Param": 4}, "temperature": {"doubleParam": 0}},
    }
    (whole,) = curl("ModelInfer", body)
    assert (whole["modelName"], whole["id"]) == ("bundled", "mine")
    assert whole["outputs"] == [{"name": "text_output", "datatype": "BYTES", "shape": ["1"]}]
    assert whole["parameters"]["triton_final_response"] == {"boolParam": True}
    (response,) = curl("ModelStreamInfer", body)
    assert response["inferResponse"]["rawOutputContents"] == whole["rawOutputContents"]
