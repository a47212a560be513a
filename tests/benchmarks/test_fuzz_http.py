"""The fuzz over HTTP: what it judges, and two thousand requests of it."""

import random
from argparse import Namespace

import pytest
from benchmarks.fuzz_http.__main__ import flaw, run
from benchmarks.fuzz_http.requests import draw

EVENT = b'data: {"id":"cmpl-1"}\n\n'


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
    assert (flaw(status, body) == "") is is_right


def test_a_seed_draws_the_same():
    one, two = ([draw(random.Random(3), "m") for _ in range(50)] for _ in range(2))
    assert one == two


@pytest.mark.deep
async def test_two_thousand_requests_are_answered(tmp_path):
    args = Namespace(requests=2000, connections=16, seed=1)
    found = await run(args, tmp_path)
    assert not found["problems"]
    statuses = found["statuses"]
    assert statuses["right"]["200"] > 100
    assert statuses["wrong values"]["400"] > 300
    assert sum(sum(kind.values()) for kind in statuses.values()) > 2000  # some are pipelined
