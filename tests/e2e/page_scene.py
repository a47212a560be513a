"""A server with scripted numbers: a burst that the live page can show."""

import math
import random
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
from fake_engine import FakeEngine

from serving.config import ServerConfig
from serving.frontend.page.live import ExpertLoad, Sampler
from serving.frontend.server import Event, Server
from serving.request import Priority

TTFT_SLO_S, ITL_SLO_S = 0.3, 0.025
BURST = range(-200, -70)  # seconds before now
LAYERS, ROUTED, UNITED = 24, 60, 8
HAPPENED = (
    (-262, -262, "reloaded", "keys were read again"),
    (-215, -215, "settings", "ops at http:10.0.0.7:51334: itl_slo_s from 0.03 to 0.025"),
    (-190, -80, "refused", "258 refused for load"),
    (-150, -148, "evicted", "3 evicted, to be run again"),
    (-120, -120, "workers", "expert 2 is lost"),
    (-60, -60, "models", "ops at ipv4:10.0.0.7:40112: loaded law"),
)
"""Seconds before now, until when, kind and text."""


class Scene:
    """A listening server, and five minutes of history once `play` has been called."""

    def __init__(self, **settings) -> None:
        self.server = Server(ServerConfig(port=0, served_model_name="bundled", **settings))
        self.engine = FakeEngine()
        self.engine.model.config.num_experts = ROUTED
        self.engine.brownout = replace(
            self.engine.brownout,
            decode_threshold_percent=100.0,
            ttft_slo_s=TTFT_SLO_S,
            itl_slo_s=ITL_SLO_S,
        )
        self.counted = {"expert_visits": 0, "degraded_visits": 0, "requests_finished": 0}
        self._random = random.Random(7)
        self._rows = np.zeros((LAYERS, ROUTED + UNITED), np.int64)
        self._at = 0.0

    async def __aenter__(self) -> "Scene":
        await self.server.start()
        return self

    async def __aexit__(self, *_) -> None:
        await self.server.stop()

    @property
    def page(self):
        return self.server.front_ends["page"]

    @property
    def url(self) -> str:
        return f"http://localhost:{self.page.port}/"

    async def play(self) -> None:
        """Attaches the engine and takes the samples of five minutes at once."""
        await self.server.attach(self.engine)
        live, began_at = self.page.live, time.time()
        live._history.clear()
        for at in range(-300, 1):
            self.second(at)
            self._at = at
            live._sampler._clock = live._load._clock = lambda: self._at
            live._sampler._wall = lambda: began_at + self._at
            live.tick()
        live._sampler, live._load = Sampler(self.server), ExpertLoad(time.monotonic)
        self.server.events.clear()
        for at, until, kind, text in HAPPENED:
            self.server.events.append(Event(began_at + at, kind, text, until_s=began_at + until))

    def second(self, at: int) -> None:
        """Sets what an engine under the burst's load reports so many seconds before now."""
        draw, in_burst = self._random.gauss, at in BURST
        since = at - BURST.start if in_burst else 0
        pressed = 1 - math.exp(-since / 8) if in_burst else math.exp(-max(0, at - BURST[-1]) / 6)
        pressed = pressed if at >= BURST.start else 0.0
        rate = max(0, round(draw(14 if in_burst else 6, 2)))
        decode = max(20.0, 100 - 10 * (since // 4)) if in_burst else 100 - 80 * pressed
        prefill = max(50.0, 100 - 10 * (since // 6)) if in_burst else 100 - 50 * pressed
        share = (100 - 0.5 * (decode + prefill)) / 130
        over = 0.35 * math.exp(-(((since - 9) / 4) ** 2)) if in_burst else 0.0
        self._say("prefill", TTFT_SLO_S, 0.35 + 0.5 * pressed + 0.4 * over + draw(0, 0.03))
        self._say("decode", ITL_SLO_S, 0.55 + 0.38 * pressed + over + draw(0, 0.015))
        counted = self.counted
        counted["expert_visits"] += 10_000
        counted["degraded_visits"] += round(10_000 * max(0.0, share + draw(0, 0.01) * bool(share)))
        counted["requests_finished"] += rate
        running = round(8 + 40 * pressed + abs(draw(0, 2)))
        counted["num_running"] = counted["num_waiting"] = 0
        self.engine.counters = counted | {"kv_pages_used": 10 + 60 * pressed + draw(0, 1)}
        self.engine.counters["kv_pages_used"] = round(self.engine.counters["kv_pages_used"])
        self.engine.scheduler.running = [
            self._running(number, priority, pressed)
            for number, priority in enumerate(
                [Priority.LATENCY_SENSITIVE] * running + [Priority.BEST_EFFORT] * 5
            )
        ]
        self._tell_who(rate, in_burst, share)
        waiting = round(9 * pressed * abs(draw(1, 0.3))) if in_burst else 0
        self.engine.scheduler.queues = {
            Priority.LATENCY_SENSITIVE: [None] * waiting,
            Priority.BEST_EFFORT: [None] * round(12 * pressed),
        }
        self.engine.brownout = replace(
            self.engine.brownout, prefill_threshold_percent=prefill, decode_threshold_percent=decode
        )
        metrics = self.server.metrics
        metrics.prefill_tokens += rate * 60
        metrics.generation_tokens += running * 22
        load = 1 / (1 + np.argsort(np.argsort(np.sin(np.arange(self._rows.size) ** 1.3))) % 60)
        rows = (300 * load.reshape(self._rows.shape) * (1 + running)).astype(np.int64)
        rows[:, ROUTED:] = rows[:, ROUTED:] * pressed
        self._rows = self._rows + rows
        metrics.expert_rows = self._rows

    def _running(self, number: int, priority: Priority, pressed: float) -> SimpleNamespace:
        key = ("alice", "batch", "")[number % 3]
        request = SimpleNamespace(
            priority=priority,
            model_name="bundled",
            key=key,
            request_id=f"chatcmpl-{number:08x}",
            is_audit=False,
        )
        return SimpleNamespace(
            request=request,
            arrived_at=time.monotonic() - 40 / (1 + number),
            prompt=[1] * (20 + 7 * number),
            tokens=[1] * (300 // (1 + number)),
            degraded_visits=round(100 * pressed),
            visited_tokens=100,
            visits_per_token=4,
        )

    def _tell_who(self, rate: int, in_burst: bool, share: float) -> None:
        """Spreads what ends over two keys, of which one sends too much."""
        metrics = self.server.metrics
        for key, part in (("alice", 3), ("batch", 1)):
            load = metrics.by_caller[key, "bundled"]
            load["requests"] += rate // part
            load["visits"] += 400 * (rate // part)
            load["degraded"] += round(400 * (rate // part) * max(0.0, share))
            load["late"] += in_burst * (rate // part > 3)
        if in_burst:
            of = "http", "/v1/completions", "429", "batch", ""
            metrics.calls._counts[of] += 2

    def _say(self, phase: str, slo_s: float, times: float) -> None:
        late = max(0.0, 0.1 * (times - 0.7))
        self.engine.slo.ls.__dict__[phase].window = SimpleNamespace(
            p90=lambda now, since, least: slo_s * times, late_share=lambda now, slo, least: late
        )
