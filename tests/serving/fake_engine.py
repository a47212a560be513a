"""An engine that counts up: after a prompt that ends in n come n + 1, n + 2, ..."""

import asyncio
import contextlib
import math
from dataclasses import asdict, fields, replace
from types import SimpleNamespace

from serving.config import EngineConfig
from serving.control.window import LatencyWindow
from serving.errors import Aborted, InvalidRequest, ServingError, Unavailable
from serving.request import (
    OPTIONS,
    Bounds,
    BrownoutState,
    Chat,
    EngineStats,
    Expected,
    ModelBrownout,
    Output,
    Priority,
    Request,
    SamplingParams,
    ThresholdSpan,
    Usage,
    number_of,
)

LS, BE = Priority.LATENCY_SENSITIVE, Priority.BEST_EFFORT

DEFAULTS = {name: getattr(Request("", ""), name) for name in OPTIONS}
UNLUCKY = 66
"""A prompt with this last token makes the engine fail."""


class FakeFamily(list):
    """A family of one model."""

    @property
    def names(self):
        return tuple(model.name for model in self)


class FakeEngine:
    """An engine of which a test sets the errors to raise (`refusal`, `failure`), `counters`, and
    what delays it: `gate` for later tokens, `way_gate` for a change of way.
    """

    def __init__(self, config: EngineConfig | None = None, tokenizer=None) -> None:
        self.config = config or EngineConfig(
            max_model_len=2048, threshold_buckets_percent=(20, 40, 70, 100)
        )
        self.status, self.names = "ready", ["counter"]
        most = self.config.max_model_len
        self.bounds = Bounds(most - 1, 4 * most, 256, self.config.max_logprobs_per_call)
        model = SimpleNamespace(
            name="counter",
            tokenizer=tokenizer,
            united={2: None, 8: None},
            num_parameters=2**40,
            dtype="float32",
            config=SimpleNamespace(
                architecture="qwen2_moe",
                num_layers=2,
                d_model=8,
                vocab_size=256,
                num_experts=16,
                experts_per_token=4,
                max_position=64,
            ),
        )
        self.model, self.family = model, FakeFamily([model])
        self.refusal: ServingError | None = None
        self.failure: Exception | None = None
        self.defaults: dict = {}  # of the model's generation_config.json
        self.gate = asyncio.Event()
        self.gate.set()
        self.reason, self.dead = "", asyncio.Event()
        self.way_gate = asyncio.Event()  # holds a change of way
        self.way_gate.set()
        self.executor = SimpleNamespace(
            layers_at_once=lambda phase, size: 4,
            part_layers_by_size={"decode 64": 4},
            num_programs=7,
            implementations={"decode attention": "Mosaic kernel", "prefill routing": "batched XLA"},
        )
        self.pace = SimpleNamespace(
            best_effort_wait_s=lambda max_wait_s: max_wait_s + 1.5,
            times=SimpleNamespace(error=0.125, num_observed=1000),
        )
        self.scheduler = SimpleNamespace(
            queues={LS: [None] * 3, BE: []},
            running=[],
            waiting=[],
            models=None,
            num_parks=5,
            num_joins=2,
            num_hybrid=3,
            num_evictions={LS: 0, BE: 4},
        )
        prefill, decode = (SimpleNamespace(window=LatencyWindow(4.0)) for _ in range(2))
        self.slo = SimpleNamespace(
            ls=SimpleNamespace(prefill=prefill, decode=decode),
            objectives=lambda *of: (self.brownout.ttft_slo_s, self.brownout.itl_slo_s),
            models=[],
        )
        self.counters: dict = {}  # fields of stats that a test sets
        self.calls: list[dict] = []
        self.running = self.closed = 0
        self.brownout = BrownoutState(
            "partial",
            8,
            100.0,
            62.5,
            True,
            1.0,
            0.1,
            0.8,
            float("nan"),
            0.05,
            "predictive",
            True,
            float("nan"),
            0.06,
        )

    async def died(self) -> str:
        await self.dead.wait()
        return self.reason

    def fail(self, reason: str) -> None:
        self.status, self.reason = "failed", reason
        self.dead.set()
        self.gate.set()

    def check_admission(self, priority=None, key: str = "", model=None) -> None:
        if self.status != "ready":
            raise Unavailable(f"the engine is {self.status}")
        if self.refusal is not None:
            raise self.refusal

    def with_defaults(self, sampling: SamplingParams, model: str = "") -> SamplingParams:
        return sampling.with_defaults(self.defaults)

    async def generate(self, prompt, sampling: SamplingParams, **options):
        self.check_admission()
        sampling = self.with_defaults(sampling)
        number_of(options.get("model", ""), self.names)
        if self.failure is not None:
            raise self.failure
        if isinstance(prompt, list) and not all(0 <= t < self.bounds.vocab_size for t in prompt):
            raise InvalidRequest("a token is not in the vocabulary")
        self.bounds.check_ids("stop_token_ids", sampling.stop_token_ids)
        self.calls.append({"prompt": prompt, "sampling": sampling, **DEFAULTS, **options})
        self.running += 1
        try:
            tokens = self.tokens_of(prompt)
            left = self.config.max_model_len - len(tokens)
            most = sampling.max_new_tokens or min(left, sampling.default_new_tokens or left)
            if tokens[-1] == UNLUCKY:
                self.fail(f"{UNLUCKY} is unlucky")
            for i in range(most):
                if i:
                    await self.gate.wait()
                if self.status == "stopped":
                    raise Aborted("the engine stopped")
                if self.status == "failed":
                    raise Unavailable(f"the engine failed: {self.reason}")
                token = tokens[-1] + 1 + i
                reason = "length" if i + 1 == most else None
                reason = "stop" if token in sampling.stop_token_ids else reason
                top = tuple((token + n, -0.5 - n) for n in range(sampling.top_logprobs))
                yield Output(
                    options["request_id"] or "drawn",
                    chr(token),
                    (token,),
                    (-0.5,) if sampling.logprobs else (),
                    Usage(
                        *(len(tokens), i + 1, 8 * (len(tokens) + i), 2 * i),
                        expected_loss=0.5 * i / (i + 1),  # half a nat of each but the first
                    ),
                    finish_reason=reason,
                    prompt_logprobs=(-0.25,) * (len(tokens) - 1)
                    if sampling.prompt_logprobs and not i
                    else (),
                    decode_threshold=ThresholdSpan(40, 70) if i else None,
                    top_logprobs=(top,) if top else (),
                    prompt_top_logprobs=tuple(
                        tuple((token + n, -0.25 - n) for n in range(sampling.top_prompt_logprobs))
                        for token in tokens[1:]
                    )
                    if sampling.top_prompt_logprobs and not i
                    else (),
                )
                if reason is not None:
                    return
        finally:
            self.running -= 1
            self.closed += 1

    async def tokenize(self, prompt, model="", *, special_tokens=True, **_) -> list[int]:
        number_of(model, self.names)
        if isinstance(prompt, str):
            return self.model.tokenizer.encode(prompt, special_tokens=special_tokens)
        return self.tokens_of(prompt)

    def tokens_of(self, prompt) -> list[int]:
        """Returns a prompt's tokens: without a tokenizer, its characters."""
        if isinstance(prompt, Chat):
            tokenizer = self.model.tokenizer
            return tokenizer.encode(
                tokenizer.chat(prompt.messages, prompt.options), special_tokens=False
            )
        return [ord(c) for c in prompt] if isinstance(prompt, str) else list(prompt)

    def get_brownout(self) -> BrownoutState:
        return self.brownout

    async def set_brownout(self, change) -> BrownoutState:
        self.changes = change
        if change.way is not None and change.way not in self.model.united:
            raise ValueError(f"way is {change.way}; counter has united experts for: 2, 8")
        self.check(change)
        if change.way not in (None, self.brownout.way):
            await self.way_gate.wait()
        given = {name: value for name, value in asdict(change).items() if value is not None}
        if "model" in given:
            given = {"models": self._own(change)}
        if {"prefill_threshold_percent", "decode_threshold_percent"} & set(given):
            given = {"salc_enabled": False} | given
        self.brownout = replace(self.brownout, **given)
        return self.brownout

    def what_if(self, change) -> dict[str, Expected]:
        self.asked = change
        self.check(change)
        percents = change.prefill_threshold_percent, change.decode_threshold_percent
        now = self.brownout.prefill_threshold_percent, self.brownout.decode_threshold_percent
        return {
            phase: Expected(
                *((was if percent is None else percent), was),
                *(0.0001 * (was if percent is None else percent), 0.0001 * was),
                *(0.002 if percent is None else 0.02, 0.002, percent is None or percent < 90),
            )
            for phase, percent, was in zip(("prefill", "decode"), percents, now, strict=True)
        }

    def _own(self, change) -> tuple[ModelBrownout, ...]:
        given = {name: value for name, value in asdict(change).items() if value is not None}
        own = list(self.brownout.models)
        if not own:
            raise InvalidRequest("model is set, and there is one alone")
        at = number_of(given.pop("model"), [one.name for one in own])
        own[at] = replace(own[at], **given)
        return tuple(own)

    def check(self, change) -> None:
        given = {name for name, value in asdict(change).items() if value is not None}
        if change.model is None:
            odd = given & {"floor_percent", "ceiling_percent"}
        else:
            odd = given - {one.name for one in fields(ModelBrownout)} - {"model"}
        if odd:
            raise InvalidRequest(f"{odd.pop()} is set, of {change.model or 'no model'}")
        if change.model is not None:
            self._own(change)
            return
        if change.strategy not in (None, "zero", "partial", "full"):
            raise InvalidRequest(f"strategy is {change.strategy[:100]!r}")
        for name in ("prefill_threshold_percent", "decode_threshold_percent"):
            percent = getattr(change, name)
            if percent is not None and not 0 <= percent <= 100:
                raise InvalidRequest(f"{name} is {percent} %")
        for name in ("ttft_slo_s", "itl_slo_s"):
            slo_s = getattr(change, name)
            if slo_s is not None and not 0 < slo_s < math.inf:
                raise InvalidRequest(f"{name} is {slo_s}")

    def stats(self) -> EngineStats:
        stats = EngineStats(
            num_running=self.running,
            num_waiting=3,
            kv_pages_used=25,
            kv_pages_total=100,
            requests_finished=self.closed,
            requests_aborted=1,
            requests_rejected=2,
            requests_failed=4,
            steps_prefill=5,
            steps_decode=6,
            expert_visits=800,
            degraded_visits=200,
            uptime_s=1.5,
            full_decode_step_s=0.01,
        )
        return replace(stats, **self.counters)

    async def drain(self, timeout_s: float) -> bool:
        self.status = "draining"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.running:
                    await asyncio.sleep(0.01)
        return not self.running

    async def stop(self) -> None:
        self.status = "stopped"
        self.gate.set()
