"""Plays the same requests against every alternative, and takes the figures."""

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from itertools import cycle
from typing import Any

import numpy as np

from benchmarks.family_qos.config import ALTERNATIVES, QosConfig
from benchmarks.family_qos.figures import (
    SINGLE_WORDS,
    point,
    single_figures,
    single_ratios,
)
from benchmarks.family_qos.gate import Gate
from benchmarks.family_qos.servers import Servers, servers
from benchmarks.family_qos.targets import InTurn, SideBySide, Weights
from serving.bench.calibrate import full_batch
from serving.bench.facts import facts
from serving.bench.loadgen import Target, play, saturate
from serving.bench.results import Record, Run
from serving.bench.workload import (
    Arrival,
    Lengths,
    poisson_times,
    schedule,
    several_models,
    synthetic,
)

PATIENCE_S = 120.0  # after the last request is due; who is not answered by then has failed
WARM_S = 0.5
PAUSE_S = 0.2
WORK_S = 0.25
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_KEPT = ("loads", "duration_s", "rounds", "singles", "quantum_s", "share", "slots")
_KEPT += ("threads", "prompt_tokens", "output_tokens", "seed")

Say = Callable[[str], None]


async def measure(config: QosConfig, say: Say = print) -> dict[str, Any]:
    """Returns all figures of all sizes.

    Raises LaunchError where a server does not come up, CalibrationError where one model alone has
    no capacity that can be measured.
    """
    config.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "date": datetime.now().isoformat(timespec="seconds"),
        "config": {key: asdict(config)[key] for key in _KEPT},
    }
    for size in config.sizes:
        say(f"{size} models: starting {2 * size + 2} servers")
        async with servers(config, size) as started:
            result |= await facts(started.alone[started.names[0]])
            result[f"{size} models"] = await _Size(config, started, say).measure()
    return result


@dataclass(frozen=True)
class Played:
    """One alternative's play of a trace."""

    run: Run
    changes: int = 0  # of the weights on the device
    changing_s: float = 0.0  # that these took


class _Size:
    """The servers of one size, and what is played against them."""

    def __init__(self, config: QosConfig, started: Servers, say: Say) -> None:
        self._config, self._servers, self._say = config, started, say
        self._names = started.names

    async def measure(self) -> dict[str, Any]:
        """Returns capacity, requests one at a time, and a record for each load and alternative."""
        first = self._servers.alone[self._names[0]]
        info = await first.model_info()
        self._vocab_size = info.vocab_size
        num_bytes = info.num_parameters * BYTES[info.dtype]
        folders = {name: self._config.family / name for name in self._names}
        self._weights = Weights(folders, num_bytes)
        await self._warm()
        capacity_per_s = await self._capacity(first)
        self._say(f"one model alone is saturated at {capacity_per_s:.1f} requests/s")
        found = {
            "models": list(self._names),
            "model_bytes": num_bytes,
            "capacity_per_s": capacity_per_s,
            "singles": await self._singles(),
        }
        work_per_s()  # the first call finds its threads asleep
        points, speeds = [], []
        for number, load in enumerate(self._config.loads):
            self._say(f"{len(self._names)} models at {load:g} of capacity")
            played, speed = await self._rounds(load * capacity_per_s, number)
            speeds += speed
            for name, plays in played.items():
                swaps = sum(one.changes for one in plays), sum(one.changing_s for one in plays)
                own = point([one.run for one in plays], self._names, *swaps)
                rate = {"load": load, "rate_per_s": load * capacity_per_s}
                points.append({"alternative": name} | rate | own)
        usual = statistics.median(speeds)
        spread = [min(speeds) / usual, max(speeds) / usual]
        return found | {"points": points, "machine_speed": spread}

    def _prompts(self, num: int, seed: int) -> list[Arrival]:
        lengths = Lengths(self._config.prompt_tokens, self._config.output_tokens, sigma=0)
        total = 2 * (self._config.prompt_tokens + self._config.output_tokens)
        return synthetic(
            lengths, num, seed=seed, vocab_size=self._vocab_size, max_total_tokens=total
        )

    def _mixed(self, arrivals: Sequence[Arrival], seed: int) -> list[Arrival]:
        return several_models(arrivals, dict.fromkeys(self._names, 1.0), seed)

    async def _warm(self) -> None:
        """Returns a moment of load for every server, and of all models for those that have
        several.
        """
        asked = self._mixed(self._prompts(1000, seed=99), seed=99)
        clients = {self._servers.family: asked, self._servers.half: asked}
        for of_model in (self._servers.alone, self._servers.parts):
            clients |= {c: _of(asked, name) for name, c in of_model.items()}
        for client, own in clients.items():
            await saturate(client, own, concurrency=self._config.slots, duration_s=WARM_S)

    async def _capacity(self, client: Target) -> float:
        """Returns the requests a second that one model alone answers with every slot taken."""
        window_s = self._config.capacity_s
        run = await saturate(
            client,
            cycle(_of(self._prompts(1000, seed=98), self._names[0])),
            concurrency=self._config.slots,
            duration_s=window_s,
        )
        return full_batch(run, 0.2 * window_s, window_s).capacity_per_s

    # -- one request at a time -------------------------------------------------------------------

    async def _singles(self) -> dict[str, Any]:
        """Returns the same request to one model alone, to the family, and to its own model's
        server; and to the server with half of the sets, by whether one was copied for it.

        The third is a control: two processes that do the same differ by as much as it says.
        """
        config, servers = self._config, self._servers
        found: dict[str, list[Record]] = {name: [] for name in SINGLE_WORDS}
        asked = self._mixed(self._prompts(config.singles, config.seed), config.seed)
        swaps = await servers.swaps()
        for number, arrival in enumerate(asked):
            turns: list[tuple[str, Target, Arrival]] = [
                ("alone", servers.alone[self._names[0]], replace(arrival, model=self._names[0])),
                ("family", servers.family, arrival),
                ("control", servers.alone[arrival.model], arrival),
                ("half", servers.half, arrival),
            ]
            at = number % len(turns)
            for name, client, own in turns[at:] + turns[:at]:
                record = await _ask(client, own)
                if name == "half":
                    before, swaps = swaps, await servers.swaps()
                    name = "miss" if swaps > before else "hit"
                found[name].append(record)
        return {name: single_figures(each) for name, each in found.items()} | single_ratios(found)

    # -- over request rate -----------------------------------------------------------------------

    async def _rounds(
        self, rate_per_s: float, number: int
    ) -> tuple[dict[str, list[Played]], list[float]]:
        """Returns every alternative's plays, and how fast the machine was; the order changes each
        time.
        """
        config = self._config
        played: dict[str, list[Played]] = {each.name: [] for each in ALTERNATIVES}
        speeds = []
        for turn in range(config.rounds):
            seed = config.seed + 1000 * turn + number
            num = max(1, round(rate_per_s * config.duration_s))
            times_s = poisson_times(num, rate_per_s, seed)
            trace = self._mixed(schedule(self._prompts(num, seed), times_s), seed)
            speeds.append(work_per_s())
            at = (number * config.rounds + turn) % len(ALTERNATIVES)
            for each in ALTERNATIVES[at:] + ALTERNATIVES[:at]:
                played[each.name].append(await self._play(each.name, trace))
                await asyncio.sleep(PAUSE_S)
        return played, speeds

    async def _play(self, name: str, trace: Sequence[Arrival]) -> Played:
        limit_s = trace[-1].at_s + PATIENCE_S
        if name == "alone":
            one = self._names[0]
            return Played(
                await play(self._servers.alone[one], _of(trace, one), time_limit_s=limit_s)
            )
        if name == "family":
            return Played(await play(self._servers.family, trace, time_limit_s=limit_s))
        if name == "half":
            before = await self._servers.swaps()
            run = await play(self._servers.half, trace, time_limit_s=limit_s)
            return Played(run, await self._servers.swaps() - before)
        if name == "space":
            return Played(await play(SideBySide(self._servers.parts), trace, time_limit_s=limit_s))
        gate = Gate(self._names, self._weights.change, self._config.quantum_s)
        run = await play(InTurn(self._servers.alone, gate), trace, time_limit_s=limit_s)
        return Played(run, gate.num_changes, gate.changing_s)


def _of(arrivals: Sequence[Arrival], model: str) -> list[Arrival]:
    """Returns the same requests, all to one model."""
    return [replace(arrival, model=model) for arrival in arrivals]


async def _ask(client: Target, arrival: Arrival) -> Record:
    run = await saturate(client, [arrival], concurrency=1, duration_s=PATIENCE_S)
    return run.records[0]


def work_per_s(clock: Callable[[], float] = time.perf_counter) -> float:
    """Returns the matrix products of one fixed size that this machine does in a second."""
    matrix = np.ones((256, 256), np.float32)
    start, count = clock(), 0
    while (elapsed := clock() - start) < WORK_S:
        np.matmul(matrix, matrix)
        count += 1
    return count / elapsed
