"""Several models on one machine: the gate of time sharing in simulated time, figures, picture."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.family_qos.__main__ import main
from benchmarks.family_qos.config import ALTERNATIVES, NAMES, QosConfig
from benchmarks.family_qos.figures import SINGLE_WORDS, point, single_figures, single_ratios, tables
from benchmarks.family_qos.gate import Gate
from benchmarks.family_qos.picture import draw
from benchmarks.family_qos.servers import part_of, server_settings
from benchmarks.family_qos.targets import InTurn, SideBySide, Weights
from serving.bench.loadgen import play
from serving.bench.results import Record, Run
from serving.bench.simulated_time import SimulatedLoop
from serving.bench.workload import Arrival
from serving.proto.jmoe.v1 import jmoe_pb2 as pb
from serving.settings import reading as server

CHANGE_S = 0.01
CODE = grpc.StatusCode


def simulated(main):
    """Runs a coroutine with a clock that takes no time."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(main)


# -- the gate --------------------------------------------------------------------------------------


@dataclass
class Asked:
    """A request, and what became of it."""

    model: str
    at_s: float
    takes_s: float
    patience_s: float | None = None
    began_s: float | None = None
    ended_s: float | None = None


class Device:
    """Sees to it that one model at a time is under way, and nothing while weights change."""

    def __init__(self, models, quantum_s):
        self.model, self.changing, self.running = models[0], False, 0
        self.terms = [(0.0, models[0])]
        self.now = asyncio.get_running_loop().time
        self.gate = Gate(models, self.change, quantum_s)

    async def change(self, model):
        assert not self.changing
        assert not self.running
        assert model != self.model
        self.changing = True
        await asyncio.sleep(CHANGE_S)
        self.changing, self.model = False, model
        self.terms.append((self.now(), model))

    async def serve(self, asked):
        await asyncio.sleep(asked.at_s)
        async with asyncio.timeout(asked.patience_s), self.gate.turn(asked.model):
            assert self.model == self.gate.active == asked.model
            assert not self.changing
            asked.began_s = self.now()
            self.running += 1
            try:
                await asyncio.sleep(asked.takes_s)
                asked.ended_s = self.now()
            finally:
                self.running -= 1


async def served(requests, models, quantum_s):
    device = Device(models, quantum_s)
    ended = await asyncio.gather(*map(device.serve, requests), return_exceptions=True)
    for asked, error in zip(requests, ended, strict=True):
        assert error is None or (isinstance(error, TimeoutError) and asked.patience_s), error
    assert device.gate.running == 0
    assert device.gate.num_changes == len(device.terms) - 1
    assert device.gate.changing_s == pytest.approx(CHANGE_S * device.gate.num_changes)
    return device


REQUESTS = st.lists(
    st.builds(
        Asked,
        st.sampled_from("abc"),
        st.floats(0, 3),
        st.floats(0.01, 0.5),
        st.none() | st.floats(0.001, 1),
    ),
    min_size=1,
    max_size=40,
)


@settings(deadline=None, max_examples=150)
@given(REQUESTS, st.floats(0.05, 1))
def test_one_model_at_a_time_and_nobody_is_lost(requests, quantum_s):
    device = simulated(served(requests, "abc", quantum_s))
    longest_s = max(asked.takes_s for asked in requests)
    for asked in requests:
        if asked.patience_s is None:
            assert asked.ended_s == pytest.approx(asked.began_s + asked.takes_s)
            terms = 3 * (quantum_s + longest_s + CHANGE_S)
            assert asked.began_s - asked.at_s <= terms + 1e-6
        if asked.began_s is None:
            continue
        term_began_s = max(at for at, model in device.terms if at <= asked.began_s)
        waiting = [
            other
            for other in requests
            if other.model != asked.model
            and other.patience_s is None
            and other.at_s < asked.began_s
            and other.began_s > asked.began_s
        ]
        if waiting:
            assert asked.began_s - term_began_s < quantum_s + 1e-6


def test_terms_by_hand():
    of_a = [Asked("a", at_s, 0.3) for at_s in (0, 0.4, 0.6, 0.9)]
    of_b = [Asked("b", 0.1, 0.2), Asked("b", 0.2, 0.2)]
    device = simulated(served([*of_a, *of_b], "ab", 0.5))
    # a has nothing left at 0.3; b's term has its quantum and nothing left at 0.51.
    assert [at for at, _ in device.terms] == pytest.approx([0, 0.31, 0.52])
    assert [asked.began_s for asked in of_b] == pytest.approx([0.31, 0.31])
    assert [asked.began_s for asked in of_a] == pytest.approx([0, 0.52, 0.6, 0.9])


def test_a_model_keeps_the_device_for_its_quantum_and_no_longer():
    of_a = [Asked("a", 0.1 * number, 0.25) for number in range(10)]
    of_b = [Asked("b", 0.15, 0.2)]
    device = simulated(served([*of_a, *of_b], "ab", 0.5))
    # Those that came before 0.5 finish until 0.65; b has 0.2; the others of a follow.
    assert [at for at, _ in device.terms] == pytest.approx([0, 0.66, 0.87])
    assert [asked.began_s for asked in of_a[4:7]] == pytest.approx([0.4, 0.87, 0.87])


def test_who_has_waited_longest_is_next():
    device = simulated(
        served([Asked("a", 0, 0.3), Asked("c", 0.1, 0.2), Asked("b", 0.2, 0.2)], "abc", 1.0)
    )
    assert [model for _, model in device.terms] == ["a", "c", "b"]


def test_one_that_is_let_through_and_gives_up_at_once_holds_nothing():
    async def run():
        device = Device("ab", 0.1)
        first, other, second = (
            asyncio.create_task(device.serve(Asked(model, at_s, 1.0)))
            for model, at_s in (("a", 0), ("b", 0.2), ("a", 0.3))
        )
        await asyncio.sleep(0.5)
        other.cancel()
        await asyncio.sleep(0)  # it has gone, so that the second of a is let through
        assert device.gate.running == 2
        second.cancel()
        await first
        assert device.gate.running == 0

    simulated(run())


def test_a_change_that_fails_is_told_to_those_who_wait_for_it():
    async def run():
        async def change(model):
            if model == "b":
                raise MemoryError("no room")

        gate = Gate("abc", change, 0.1)

        async def ask(model):
            async with gate.turn(model):
                return gate.active

        return await asyncio.gather(*map(ask, "bcab"), return_exceptions=True)

    first, second, third, fourth = simulated(run())
    assert isinstance(first, MemoryError)
    assert isinstance(fourth, MemoryError)
    assert (second, third) == ("c", "a")


# -- what stands before several servers ------------------------------------------------------------


class Answers:
    """A client whose server answers two tokens, one each 0.1 s, to its own model alone."""

    def __init__(self, own):
        self.own, self.asked = own, 0

    async def generate(self, prompt, sampling=None, *, priority=0, model="", timeout_s=None):
        assert model == self.own
        self.asked += 1
        for _ in range(2):
            await asyncio.sleep(0.1)
            yield pb.GenerateResponse(text="x", token_ids=[1])

    async def get_brownout(self):
        raise grpc.aio.AioRpcError(CODE.UNIMPLEMENTED, grpc.aio.Metadata(), grpc.aio.Metadata())

    stats = get_brownout


def played(target_of, arrivals, time_limit_s):
    async def run():
        clients = {name: Answers(name) for name in "ab"}
        return clients, await play(target_of(clients), arrivals, time_limit_s=time_limit_s)

    return simulated(run())


def test_side_by_side_a_request_goes_to_its_models_server():
    arrivals = [Arrival("", 2, model=name, at_s=0.05) for name in "aab"]
    clients, run = played(SideBySide, arrivals, 5)
    assert [client.asked for client in clients.values()] == [2, 1]
    assert [record.model for record in run.records] == ["a", "a", "b"]
    assert [record.ttft_s for record in run.records] == pytest.approx([0.1] * 3, abs=1e-6)


def test_in_turn_the_wait_counts_and_ends_with_the_run():
    async def change(model):
        await asyncio.sleep(0.05)

    def in_turn(clients):
        return InTurn(clients, Gate("ab", change, 0.1))

    arrivals = [Arrival("", 2, model=name) for name in "ab"]
    _, run = played(in_turn, arrivals, 5)
    assert [record.ttft_s for record in run.records] == pytest.approx([0.1, 0.35], abs=1e-6)
    _, run = played(in_turn, arrivals, 0.15)
    assert [record.code for record in run.records] == ["DEADLINE_EXCEEDED"] * 2
    assert run.duration_s == pytest.approx(0.15, abs=1e-6)


async def test_all_bytes_of_a_model_are_copied_to_new_memory(tmp_path):
    for number, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        np.full(1000, number, np.uint8).tofile(tmp_path / name / "model.safetensors")
    weights = Weights({name: tmp_path / name for name in "ab"}, 2000)
    for model, content in (("b", 1), ("a", 0)):
        await weights.change(model)
        assert weights._in_use is not None
        assert weights._in_use.size == 2000
        assert (weights._in_use == content).all()
        assert not np.shares_memory(weights._in_use, weights._host[model])


# -- servers ---------------------------------------------------------------------------------------


def test_parts_of_the_machine():
    assert [part_of([0, 1], number, 2) for number in range(2)] == [[0], [1]]
    assert [part_of([4, 5], number, 4) for number in range(4)] == [[4], [4], [5], [5]]
    assert [part_of(range(9), number, 2) for number in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7, 8]]
    assert [part_of([3], number, 2) for number in range(2)] == [[3], [3]]


def test_settings_are_known_and_fit_together():
    for slots in (32, 16, 8, 1):
        loaded = server.load("demo", {"engine.model": "x", **server_settings(slots, 1)})
        assert loaded.engine.max_num_seqs == loaded.engine.decode_buckets[-1] == slots


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "has no base; `python -m training.family --restore"),
        ({"sizes": (3,)}, "sizes has 3; it must be an even number up to 4"),
        ({"slots": 4}, "slots is 4; it must be 8 or more"),
        ({"loads": (0.5, 0.0)}, "must be numbers above 0"),
        ({"quantum_s": 0.0}, "quantum_s is 0.0; it must be above 0"),
    ],
)
def test_what_leaves_nothing_to_play_is_named(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        QosConfig(tmp_path, **change)


def test_the_command_says_what_is_missing(tmp_path):
    with pytest.raises(SystemExit, match=r"family_qos failed: .* has no base"):
        main(["--family", str(tmp_path)])


# -- figures ---------------------------------------------------------------------------------------


def record(model, at_s, first_s, end_s, code="OK"):
    tokens = [first_s, end_s] if code == "OK" else []
    return Record("f", at_s, at_s, end_s, token_s=tokens, code=code, model=model)


def test_figures_are_over_all_runs_and_by_model():
    runs = [
        Run([record("a", 0, 0.1, 0.2), record("b", 0, 0.2, 0.6)], [], 1.0, 0.0),
        Run([record("a", 1, 1.3, 1.4), record("b", 1, 2, 2, "RESOURCE_EXHAUSTED")], [], 3.0, 0.0),
    ]
    found = point(runs, "ab", changes=3)
    assert found["turnaround_median_ms"] == pytest.approx(400)
    assert found["ttft_median_ms"] == pytest.approx(200)
    assert (found["requests_per_s"], found["tokens_per_s"]) == (0.75, 1.5)
    assert (found["completed"], found["refused"], found["failed"]) == (3, 1, 0)
    assert (found["worst"], found["changes"]) == ("b", 3)
    assert found["by_model"]["a"]["turnaround_median_ms"] == pytest.approx(300)
    assert "by_model" not in point([Run([record("a", 0, 1, 2)], [], 2.0, 0.0)], "ab")
    none = point([Run([record("a", 0, 1, 1, "CANCELLED")], [], 2.0, 0.0)], "ab")
    assert (none["failed"], none["requests_per_s"]) == (1, 0)
    assert "ttft_median_ms" not in none


def test_ratios_of_single_streams():
    took = {"alone": (1, 2, 4), "family": (1.1, 2.1, 3.9), "control": (1, 2, 5)}
    found = {name: [record("a", 0, 0.5, s) for s in each] for name, each in took.items()}
    ratios = single_ratios(found)
    assert ratios["family_to_alone"] == pytest.approx(1.05)
    assert ratios["family_to_alone_paired"] == pytest.approx(1.05)
    assert ratios["control_to_alone"] == ratios["control_to_alone_paired"] == 1


def synthetic_result():
    result: dict[str, Any] = {"date": "now"}
    for size in (2, 4):
        names = NAMES[:size]
        points = []
        for load in (0.3, 0.9, 1.2):
            for factor, each in enumerate(ALTERNATIVES, start=1):
                end_s = 0.1 * factor / (1.3 - load)
                records = [record(name, 0, end_s / 3, end_s) for name in names * 10]
                found = point([Run(records, [], 1 / load, 0.0)], names)
                points.append(
                    {"alternative": each.name, "load": load, "rate_per_s": 50 * load} | found
                )
        one = [record("base", 0, 0.01, 0.1)]
        singles = {name: single_figures(one) for name in SINGLE_WORDS} | {
            "miss": single_figures([])
        }
        ratios = single_ratios(dict.fromkeys(("alone", "family", "control"), one))
        result[f"{size} models"] = {
            "capacity_per_s": 50.0,
            "singles": singles | ratios,
            "points": points,
            "machine_speed": [0.9, 1.1],
        }
    return result


def test_tables_and_picture(tmp_path):
    result = synthetic_result()
    lines = tables(json.loads(json.dumps(result)))
    for each in ALTERNATIVES:
        assert sum(f"| {each.words} |" in line for line in lines) == 8 + 2 * (each.name == "alone")
    assert "| 0.9: 45.0 req/s | one pool, all sets resident | 500 / 500 | 167 / 167 |" in "\n".join(
        lines
    )
    assert "| one pool, all sets resident | 200 / 66.7; 6.0 | 500 / 167; 18.0 |" in "\n".join(lines)
    assert any("request by request 1.000" in line for line in lines)
    draw(result, tmp_path / "docs" / "qos.png")
    assert (tmp_path / "docs" / "qos.png").stat().st_size > 40_000
