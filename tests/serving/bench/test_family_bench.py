"""Several models on one machine: turns of time sharing, routes, figures, and a dry run."""

import asyncio
import json
from contextlib import asynccontextmanager
from types import SimpleNamespace
from unittest.mock import ANY, AsyncMock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.bench import family
from serving.bench.family import FamilyConfig, TimeShared, Way, draw, part_of, point, table
from serving.bench.loadgen import SimulatedLoop, play
from serving.bench.results import Record, Run
from serving.bench.workload import Arrival
from serving.cli.main import app
from serving.proto.jmoe.v1 import jmoe_pb2 as pb

CHANGE_S = 0.01


class Machine:
    """Serves models in simulated time, and fails if two run together. A prompt is its time in s."""

    def __init__(self, one_at_a_time=True):
        self.one_at_a_time = one_at_a_time
        self.running, self.began = [], []

    def client(self, own):
        async def generate(prompt, sampling=None, *, model="", timeout_s=None):
            assert model in ("", own)
            self.running.append(own)
            self.began.append((own, round(asyncio.get_running_loop().time() - self.start_s, 6)))
            try:
                assert not self.one_at_a_time or set(self.running) == {own}
                for _ in range(2):
                    await asyncio.sleep(prompt / 2)
                    yield pb.GenerateResponse(text="x", token_ids=[1])
            finally:
                self.running.remove(own)

        async def nothing():
            return pb.BrownoutState()

        async def stats():
            return pb.Stats()

        return SimpleNamespace(generate=generate, get_brownout=nothing, stats=stats)

    async def change(self):
        assert not self.running
        await asyncio.sleep(CHANGE_S)
        assert not self.running

    def play(self, arrivals, names="abc"):
        """Plays (model, at, takes) under time sharing; returns records and changes."""

        async def run():
            self.start_s = asyncio.get_running_loop().time()
            routes = {name: (self.client(name), "") for name in names}
            way = TimeShared(routes, self.change) if self.one_at_a_time else Way(routes)
            asked = [Arrival(takes, 2, model=model, at_s=at) for model, at, takes in arrivals]
            played = await play(way, asked, time_limit_s=1000)
            return played.records, await way.changes()

        with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
            return runner.run(run())


REQUESTS = st.lists(
    st.tuples(st.sampled_from("abc"), st.floats(0, 3), st.floats(0.01, 0.5)),
    min_size=1,
    max_size=40,
)


@settings(max_examples=100)
@given(REQUESTS)
def test_one_model_at_a_time_and_nobody_waits_longer_than_a_turn_of_each(requests):
    requests = sorted(requests, key=lambda one: one[1])
    records, _ = Machine().play(requests)
    longest_s = max(takes for _, _, takes in requests)
    for (_, at_s, takes), record in zip(requests, records, strict=True):
        assert record.ok
        assert record.end_s - at_s - takes <= 3 * (family.QUANTUM_S + longest_s + CHANGE_S) + 1e-6


def test_turns_by_hand():
    machine = Machine()
    of_a = [("a", at_s, 0.3) for at_s in (0, 0.4, 0.6, 0.9)]
    _, changes = machine.play(sorted([*of_a, ("b", 0.1, 0.2), ("b", 0.2, 0.2)], key=lambda r: r[1]))
    # a has nothing left at 0.3; b's turn begins at 0.31 and has nothing left at 0.51.
    assert sorted(at_s for name, at_s in machine.began if name == "b") == [0.31, 0.31]
    assert sorted(at_s for name, at_s in machine.began if name == "a") == [0, 0.52, 0.6, 0.9]
    assert changes == 2


def test_a_model_keeps_the_machine_for_its_turn_and_no_longer():
    machine = Machine()
    asked = [("a", 0.1 * number, 0.25) for number in range(10)] + [("b", 0.15, 0.2)]
    machine.play(sorted(asked, key=lambda one: one[1]))
    # Those of a that came before 0.5 finish until 0.65; b has 0.2; the others of a follow.
    assert ("b", 0.66) in machine.began
    of_a = sorted(at_s for name, at_s in machine.began if name == "a")
    assert of_a == [0, 0.1, 0.2, 0.3, 0.4, 0.87, 0.87, 0.87, 0.87, 0.9]


def test_who_has_waited_longest_is_next():
    machine = Machine()
    machine.play([("a", 0, 0.3), ("c", 0.1, 0.2), ("b", 0.2, 0.2)])
    assert [name for name, _ in machine.began] == ["a", "c", "b"]


def test_one_that_gives_up_holds_nobody():
    async def run():
        machine = Machine()
        machine.start_s = 0
        way = TimeShared({name: (machine.client(name), "") for name in "ab"}, machine.change)

        async def ask(model, at_s):
            await asyncio.sleep(at_s)
            return [message async for message in way.generate(1.0, model=model)]

        first, other, second = (
            asyncio.create_task(ask(*one)) for one in (("a", 0), ("b", 0.55), ("a", 0.6))
        )
        await asyncio.sleep(0.7)
        assert machine.running == ["a"]
        other.cancel()
        await asyncio.sleep(0.01)  # nobody else is asked for, so that the second of a starts
        assert machine.running == ["a", "a"]
        second.cancel()
        await first
        return await asyncio.wait_for(ask("b", 0), 2)

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        assert len(runner.run(run())) == 2


def test_side_by_side_a_request_goes_to_its_models_server():
    machine = Machine(one_at_a_time=False)
    records, changes = machine.play([("a", 0.05, 0.2), ("a", 0.05, 0.2), ("b", 0.05, 0.4)])
    assert [record.model for record in records] == ["a", "a", "b"]
    assert [record.ttft_s for record in records] == pytest.approx([0.1, 0.1, 0.2], abs=1e-6)
    assert changes == 0


def test_parts_of_the_machine():
    assert [part_of([0, 1], number, 2) for number in range(2)] == [[0], [1]]
    assert [part_of([4, 5], number, 4) for number in range(4)] == [[4], [4], [5], [5]]
    assert [part_of([3], number, 2) for number in range(2)] == [[3], [3]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": ("a=x",)}, "NAME=DIR of two models"),
        ({"model": ("a=x", "a=y")}, "NAME=DIR of two models"),
        ({"model": ("a=x", "y")}, "NAME=DIR of two models"),
        ({"slots": 1}, "slots is 1; it must be 2 or more"),
        ({"loads": (0.5, 0.0)}, "must be above 0"),
    ],
)
def test_what_leaves_nothing_to_play_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        FamilyConfig(**{"model": ("a=x", "b=y"), **change})


def record(first_s, end_s, code="OK"):
    tokens = [first_s, end_s] if code == "OK" else []
    return Record("f", 0, 0, end_s, token_s=tokens, code=code)


def test_figures_are_over_all_runs_and_by_whether_weights_changed():
    runs = [
        (Run([record(0.1, 0.2), record(0.2, 0.6)], [], 1.0, 0.0), 0),
        (Run([record(0.3, 0.4), record(2, 2, "RESOURCE_EXHAUSTED")], [], 3.0, 0.0), 3),
    ]
    found = point(runs)
    assert found["median_e2el_ms"] == pytest.approx(400)
    assert found["median_ttft_ms"] == pytest.approx(200)
    assert (found["requests_per_s"], found["tokens_per_s"]) == (0.75, 1.5)
    assert (found["completed"], found["failures"]) == (3, {"RESOURCE_EXHAUSTED": 1})
    assert found["changes"] == 3
    assert found["changed"]["median_ttft_ms"] == pytest.approx(300)
    assert found["unchanged"]["median_ttft_ms"] == pytest.approx(150)
    none = point([(Run([record(1, 1, "CANCELLED")], [], 2.0, 0.0), 0)])
    assert "median_ttft_ms" not in none


def test_table_and_picture(tmp_path):
    points = []
    for load in (0.0, 0.9):
        for number, name in enumerate(family.WAYS, start=1):
            played = [(Run([record(0.05 * number, 0.1 * number)], [], 1 / number, 0.0), 0)]
            points.append({"way": name, "load": load, "rate_per_s": 50 * load} | point(played))
    result = {"points": json.loads(json.dumps(points))}
    text = table(result)
    assert "| 0.9: 45.0 req/s |" in text
    assert "| one pool, all sets resident | 200.0 / 100.0; 2.0 | 200.0 / 100.0; 2.0 |" in text
    assert "at 0.9: -50 % to time sharing, -60 % to space sharing" in text
    draw(result, tmp_path / "family.png")
    assert (tmp_path / "family.png").stat().st_size > 10_000


def test_every_way_gets_the_same_requests_at_every_load(tmp_path, monkeypatch):
    asked = {name: [] for name in family.WAYS}

    @asynccontextmanager
    async def started(config):
        def client(way):
            async def generate(prompt, sampling=None, *, model="", timeout_s=None):
                asked[way].append((prompt, model))
                for _ in range(sampling.max_new_tokens):
                    await asyncio.sleep(0.001)
                    yield pb.GenerateResponse(token_ids=[1])

            async def model_info():
                return pb.ModelInfo(vocab_size=100)

            none = AsyncMock(return_value=pb.Stats())
            state = AsyncMock(return_value=pb.BrownoutState())
            return SimpleNamespace(
                generate=generate, model_info=model_info, get_brownout=state, stats=none
            )

        clients = {way: client(way) for way in family.WAYS}
        yield (
            {
                way: Way({name: (client, name) for name in config.models})
                for way, client in clients.items()
            },
            clients["alone"],
        )

    monkeypatch.setattr(family, "_started", started)
    monkeypatch.setattr(family, "facts", AsyncMock(return_value={"commit": "c"}))
    monkeypatch.setattr(family, "WARM_S", 0.0)
    monkeypatch.setattr(family, "CAPACITY_S", 1.0)
    config = FamilyConfig(
        ("a=x", "b=y"), loads=(0.5,), duration_s=1, singles=10, slots=2, out=tmp_path
    )
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        result = runner.run(family._run(config, lambda text: None))
    assert result == json.loads((tmp_path / "family.json").read_text()) | {"config": ANY}
    # A request takes 25 ms, so that two slots do 80 a second; 2 rounds of 1 s at half of that.
    assert result["capacity_per_s"] == pytest.approx(80, rel=0.05)
    by = {(one["way"], one["load"]): one for one in result["points"]}
    assert set(by) == {(way, load) for way in family.WAYS for load in (0, 0.5)}
    for (_, load), one in by.items():
        assert one["completed"] == (2 * round(one["rate_per_s"]) if load else 10)
        assert one["median_e2el_ms"] == pytest.approx(25, abs=0.1)
    measured = 10 + by["pool", 0.5]["completed"]
    assert sorted(asked["alone"][-measured:]) == sorted(asked["pool"][-measured:])
    assert {model for _, model in asked["pool"]} == {"a", "b"}


@pytest.mark.exhaustive
def test_a_dry_run_measures_every_alternative(tmp_path, capsys):
    models = ["--model", "base=family/base", "--model", "cipher=family/cipher"]
    args = ["bench", "family", *models, "--family", "f.json", "--dry-run", "--out", str(tmp_path)]
    app(args, standalone_mode=False)
    stored = json.loads((tmp_path / "family.json").read_text())
    assert [one["way"] for one in stored["points"]] == 2 * list(family.WAYS)
    for one in stored["points"]:
        assert one["failures"] == {}
        assert one["tokens_per_s"] > 0
    asked = [{one["completed"] for one in stored["points"] if one["load"] == at} for at in (0, 0.5)]
    assert asked[0] == {4}
    assert len(asked[1]) == 1  # the same trace
    printed = capsys.readouterr().out
    assert all(f"| {words} |" in printed for words in family.WAYS.values())
    assert (tmp_path / "family.png").stat().st_size > 10_000


async def test_alternatives_take_turns_to_be_first_over_all_loads(monkeypatch):
    order = []

    class Way:
        def __init__(self, name):
            self.name = name

        async def changes(self):
            return 0

    async def note(way, trace, time_limit_s):
        order.append(way.name)

    monkeypatch.setattr(family, "play", note)
    ways = {name: Way(name) for name in "abc"}
    trace = [SimpleNamespace(at_s=0.0)]
    for load in range(2):
        await family._play(ways, [trace, trace], 0.0, first=2 * load)
    assert "".join(order) == "abcbcacababc"
