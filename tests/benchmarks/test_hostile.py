"""The hostile clients: what they draw and judge, and two thousand fuzzed messages in a protocol.

Against the demo's server: tests/e2e/test_hostile_script.py.
"""

import asyncio
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.hostile import report
from benchmarks.hostile.attempts import GENERATE, Attempt, Ended, Facts, draw, flaw
from benchmarks.hostile.fuzzing import conforming, spoil, spoiled
from benchmarks.hostile.over_grpc import LOST, MESSAGE_LIMIT
from benchmarks.hostile.over_http import flaw as http_flaw
from benchmarks.hostile.run import PROTOCOLS, Fuzzed, Load
from serving.frontend.openai.app import BODIES
from serving.proto.inference import inference_pb2
from serving.proto.jmoe.v1 import jmoe_pb2 as pb

ROOT = Path(__file__).parents[2]
EVENT = b'data: {"id":"cmpl-1"}\n\n'
FACTS = Facts(*("127.0.0.1:1",) * 3, "bundled", "1", 512, 256, 8, 8, ("add 4 + 5", "say it"))


@pytest.mark.parametrize(
    ("status", "body", "is_right"),
    [
        (200, b"{}", True),
        (200, EVENT + b"data: [DONE]\n\n", True),
        (200, EVENT + b'data: {"error":{"message":"x"}}\n\n', True),
        (200, EVENT, False),
        (400, b'{"error":{"message":"x"}}', True),
        (400, b'{"error":{"message":""}}', False),
        (400, b"Bad Request", False),
        (500, b'{"error":{"message":"x"}}', False),
        (503, b'{"error":{"message":"x"}}', True),
        (503, b'{"status":"draining"}', True),
    ],
)
def test_answers_are_judged(status, body, is_right):
    assert (http_flaw(status, body) == "") is is_right


def whole(**changes):
    request = pb.GenerateRequest(tokens=pb.TokenIds(ids=[1, 2]), request_id="a")
    request.sampling.MergeFrom(pb.SamplingParams(max_new_tokens=2, ignore_eos=True))
    usage = pb.Usage(prompt_tokens=2, completion_tokens=2)
    last = {"request_id": "a", "token_ids": [6], "finish_reason": "length", "usage": usage}
    messages = [
        pb.GenerateResponse(request_id="a", token_ids=[5]),
        pb.GenerateResponse(**last | changes),
    ]
    attempt = Attempt("fine", "tokens", b"", frozenset({"OK"}), request=request)
    return attempt, Ended("OK", messages=messages)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, ""),
        ({"finish_reason": ""}, "2 messages, and the last has no finish_reason"),
        ({"token_ids": [6, 7]}, "3 tokens came, 2 were counted, 2 were allowed"),
        ({"usage": pb.Usage(prompt_tokens=3, completion_tokens=2)}, "3 prompt tokens were counted"),
        ({"request_id": "b"}, "a message has another request's id"),
        (
            {"token_ids": [], "usage": pb.Usage(prompt_tokens=2, completion_tokens=1)},
            "2 messages came for 1 tokens",
        ),
    ],
)
def test_streams_that_are_not_whole_are_found(changes, says):
    found = flaw(*whole(**changes))
    assert found.startswith(says)
    assert bool(found) is bool(says)


def test_ends_that_must_not_be_are_counted():
    load, (attempt, ended) = Load(), whole()
    load.add(attempt, ended)
    load.add(attempt, Ended("RESOURCE_EXHAUSTED", refused=True))
    assert [line.ok for line in load.lines(2)] == [True] * 4
    load.add(attempt, Ended("INTERNAL", "why"))
    load.add(*whole(finish_reason=""))
    assert [line.ok for line in load.lines(5)] == [False] * 4
    assert len(load.problems) == 2


MARKS = {"idle": [(0, 10)], "polite": [(10, 20), (30, 40)], "load": [(20, 30), (40, 50)]}
LATENCY = "health check under load, P99.9", "longest gap of a polite stream"
P99 = "P99 gap of a polite stream"
CALM = "health check beside polite clients, P99", "longest gap beside polite clients"
CALM_P99, CALM_P50 = (f"{of} gap beside polite clients" for of in ("P99", "median"))
IDLE = "health check of an idle server, median"


def failing(slow=1.0, of=(), by=1.0, every=1, busy=()):
    """Returns which lines of latencies fail where a check takes 5 ms idle and 20 ms beside others,
    and a gap 4 and 30 ms; a machine is `slow` times as slow, every so many samples `of` some times
    take longer by so much again, and every tenth of those between `busy` six times as long.
    """
    took = {"idle": (0.005, 0.004), "polite": (0.020, 0.030), "load": (0.020, 0.030)}
    checks, gaps = [], []
    for name, spans in MARKS.items():
        for begin, end in spans:
            for at in range(int(100 * (end - begin))):
                more = slow * (by if name in of and at % every == 0 else 1)
                if busy and busy[0] <= begin + at / 100 < busy[1] and at % 10 == 0:
                    more *= 6
                for samples, seconds in zip((checks, gaps), took[name], strict=True):
                    samples.append((begin + at / 100, begin + at / 100 + more * seconds))
    measured = {"stalls": [], "memory": [], "health": sorted(checks), "stream": sorted(gaps)}
    lines, figures = report.probed(
        {name: (samples, []) for name, samples in measured.items()}, MARKS, [21.0, 45.0]
    )
    assert figures["load_s"] == 20
    assert figures["health"]["polite"]["count"] == 2000
    assert sum(line.by_machine for line in lines) == 10
    return [line.name for line in lines if line.ok is False]


def test_a_slow_machine_fails_no_limit_of_a_hostile_load():
    assert failing() == failing(slow=8) == []


def test_nor_does_one_that_is_busy_for_a_part_of_it():
    """From within a polite part on, into a hostile one."""
    assert failing(busy=(35, 45)) == failing(slow=8, busy=(15, 25)) == []
    assert P99 in failing(busy=(21, 29))  # beside the hostile one alone


@pytest.mark.parametrize(
    ("how", "failed"),
    [
        ({"of": ("load",), "by": 2}, [P99]),
        ({"of": ("load",), "by": 4}, [LATENCY[0], LATENCY[1], P99]),
        ({"of": ("load",), "by": 4, "every": 400}, [*LATENCY]),
        ({"of": ("load", "polite"), "by": 3}, [CALM[0]]),
        ({"of": ("load", "polite"), "by": 5}, [CALM[0], CALM_P50]),
        ({"of": ("load", "polite"), "by": 7, "every": 400}, [CALM[1]]),
        ({"of": ("load", "polite"), "by": 7, "every": 20}, [CALM[0], CALM_P99]),
        ({"of": ("idle",), "by": 30}, [IDLE]),
        ({"slow": 8, "of": ("load",), "by": 4}, [*LATENCY, P99]),
    ],
)
def test_a_server_that_is_slow_in_company_is_found(how, failed):
    """Whether the company is hostile or polite, and on a slow machine, too."""
    assert sorted(failing(**how)) == sorted(failed)


def test_answers_that_must_not_be_are_counted_with_their_messages():
    found = Fuzzed()
    found.add([("ModelInfer", "OK", "")])
    assert (found.num_sent, found.num_bad, found.examples) == (1, 0, [])
    found.add([("ModelStreamInfer", "OK", ""), ("ModelStreamInfer", LOST, "why; sent 61")])
    assert (found.num_sent, found.num_bad) == (2, 1)
    assert found.examples == [f"ModelStreamInfer, {LOST}: why; sent 61"]
    assert found.codes["ModelStreamInfer", "OK"] == 1


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_seed_draws_the_same(name):
    protocol = PROTOCOLS[name]
    one, two = (
        [draw(rng, FACTS, protocol) for _ in range(200)]
        + [fuzz.draw(rng, "bundled") for fuzz in protocol.fuzz for _ in range(100)]
        for rng in (random.Random(3), random.Random(3))
    )
    assert one == two


@pytest.mark.parametrize("name", PROTOCOLS)
def test_all_groups_are_drawn_about_as_often_as_they_should(name):
    rng = random.Random(5)
    groups = Counter(draw(rng, FACTS, PROTOCOLS[name]).group for _ in range(2000))
    shares = {"fine": 0.6, "cancelled": 0.25, "malformed": 0.1, "late": 0.05}
    assert groups.keys() == shares.keys()
    assert all(abs(groups[group] / 2000 - share) < 0.04 for group, share in shares.items())
    polite = [draw(rng, FACTS, PROTOCOLS[name], polite=True) for _ in range(50)]
    assert all(attempt.request is not None for attempt in polite)


def test_no_attempt_but_one_is_beyond_the_limit_of_grpc():
    found = [a for a in PROTOCOLS["grpc"].malformed(FACTS) if len(a.payload) > MESSAGE_LIMIT]
    assert [attempt.kind for attempt in found] == ["text beyond gRPC's limit"]
    own = {attempt.kind for attempt in PROTOCOLS["grpc"].malformed(FACTS)}
    for name in ("http", "kserve"):
        found = PROTOCOLS[name].malformed(FACTS)
        assert {attempt.path for attempt in found}.isdisjoint({GENERATE})
        assert len(own & {attempt.kind for attempt in found}) > 30
    assert all(len(attempt.payload) <= MESSAGE_LIMIT for attempt in found)


def test_fuzzed_requests_are_of_all_kinds():
    rng, (fuzz,) = random.Random(11), PROTOCOLS["kserve"].fuzz
    calls = [fuzz.draw(rng, "bundled") for _ in range(400)]
    messages = [call.messages[0] for call in calls if call.kind == "ModelInfer"]
    parsed = fine = 0
    for message in messages:
        try:
            request = inference_pb2.ModelInferRequest.FromString(message)
        except Exception:
            continue
        parsed += 1
        fine += [t.name for t in request.inputs][:1] == ["text_input"]
    assert len(messages) / 3 < fine < parsed < len(messages)


@pytest.mark.parametrize("path", BODIES)
def test_bodies_are_drawn_of_every_field_and_are_what_the_server_reads(path):
    rng, schema, met = random.Random(path), BODIES[path].model_json_schema(), set()
    for _ in range(600):
        body = conforming(rng, schema, schema.get("$defs", {}))
        BODIES[path].model_validate_json(json.dumps(body))
        met |= body.keys()
    assert met == schema["properties"].keys()


def test_what_is_spoiled_stands_at_any_depth():
    rng, changed = random.Random(5), Counter()
    for _ in range(2000):
        inmost = {"c": 1}
        body = {"a": [{"b": [inmost], "d": 2}], "e": {}}
        spoiled(rng, body, ["n"])
        changed["inmost"] += inmost != {"c": 1}
        changed["inmost, another name"] += "n" in inmost
        changed["list"] += body.get("a") != [{"b": [{"c": 1}], "d": 2}]
        changed["empty"] += body.get("e") != {}
        changed["outmost, another name"] += "n" in body
    assert min(changed.values()) > 20, changed
    request = inference_pb2.ModelInferRequest(id="a")
    request.inputs.add(name="b").contents.bool_contents.append(True)
    request.parameters["c"].int64_param = 1
    fields = Counter()
    for _ in range(500):
        made = inference_pb2.ModelInferRequest.FromString(request.SerializeToString())
        spoil(rng, made)
        fields["id"] += made.id != "a"
        fields["contents"] += (
            made.inputs[0].contents != request.inputs[0].contents if made.inputs else 0
        )
        fields["parameter"] += "c" in made.parameters and made.parameters["c"].int64_param != 1
        fields["outputs"] += bool(made.outputs)
    assert min(fields.values()) > 5, fields


@pytest.mark.sized(exhaustive=("kserve",))
@pytest.mark.deep
@pytest.mark.parametrize("name", ["kserve", "http"])
async def test_two_thousand_fuzzed_messages_break_nothing(name, tmp_path):
    out = tmp_path / "hostile.json"
    sizes = ["--requests", "0", "--fuzz", "2000", "--seed", "11", "--step-ms", "0.2"]
    command = [sys.executable, "-m", "benchmarks.hostile", "--protocol", name, "--out", out, *sizes]
    ended = await asyncio.to_thread(
        subprocess.run, command, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(out.read_text(encoding="utf-8"))
    (fuzz,) = found["fuzz"].values()
    assert fuzz["examples"] == []
    codes = fuzz["codes"]
    if name == "http":
        for path in BODIES:
            assert codes[f"right {path}: 200"] > 20
            assert codes[f"wrong values {path}: 400"] > 60
        assert sum(codes.values()) > 2000  # some are pipelined
    else:  # messages of every kind are among them
        for code in ("OK", "INVALID_ARGUMENT", "NOT_FOUND"):
            assert codes[f"ModelInfer: {code}"] > 10
            assert codes[f"ModelStreamInfer: {code}"] > 10
    seen = {line["name"] for line in found["lines"]}
    assert any(line.startswith("honest answers as before") for line in seen)
    assert any(line.startswith("open files after") for line in seen)
    assert all(line["ok"] for line in found["lines"])
