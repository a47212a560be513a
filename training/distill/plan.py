"""What a distillation will take, told before it begins: memory, disk and time.

Sizes come from `training.distill.sizes`. Time is an estimate: the operations of the steps over what
this machine does in a large product, of which steps reach some unknown share.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp

from jmoe.config import ModelConfig
from training.distill import sizes
from training.distill.config import DistillConfig
from training.distill.room import Room
from training.distill.sizes import Span, Stage

GIB = 2**30

SHARES = {"cpu": (0.03, 0.5)}
"""Share of a large product's rate that steps reach, by platform: from the least to the most."""
_OTHER_SHARES = (0.1, 0.5)
_DISK_RATES = 0.2e9, 3e9  # bytes/s, read and written
_LINK_RATES = 2e9, 20e9  # bytes/s, between host and devices

H200_RATE = 790e12
"""Operations a second in a large bfloat16 product on an H200 (docs/distillation.md)."""


@dataclasses.dataclass(frozen=True)
class Amount:
    """Tokens and packed rows that the data comes to, and those of them that are captured."""

    tokens: int
    rows: int
    captured_tokens: int
    captured_rows: int
    counted: bool = True  # False: no data was given, and `--rows` is taken for it

    @classmethod
    def assumed(cls, config: DistillConfig) -> "Amount":
        """As much data as the settings want, packed without gaps."""
        rows = -(-config.rows // config.length)
        return cls(config.rows, rows, config.rows, rows, counted=False)


@dataclasses.dataclass(frozen=True)
class Shortage:
    """Something that does not fit (`certain`), or may not. `way` is None for the disk."""

    way: int | None
    certain: bool
    text: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the ways of one distillation take, stage by stage, and what there is."""

    cfg: ModelConfig
    config: DistillConfig
    ways: tuple[int, ...]
    amount: Amount
    room: Room
    stages: tuple[Stage, ...]
    disk: Span
    there: int  # bytes that an earlier run left in `out`

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight while layers are captured and trained."""
        return _weight_bytes(self.config, self.room.platform)

    def shortages(self) -> Iterator[Shortage]:
        """Where a stage needs more than is free, or may."""
        for stage in self.stages:
            name = f"way {stage.way}, {_stage(stage)}"
            if self.room.platform == "cpu":
                both = stage.device + stage.host
                yield from _short(stage.way, f"{name}: memory", both, self.room.host)
                continue
            yield from _short(stage.way, f"{name}: device memory", stage.device, self.room.device)
            yield from _short(stage.way, f"{name}: host memory", stage.host, self.room.host)
        writing = sizes.writing_host(self.cfg, self.ways)
        yield from _short(None, "writing united.safetensors: host memory", writing, self.room.host)
        left = Span(max(0.0, self.disk.low - self.there), max(0.0, self.disk.high - self.there))
        yield from _short(None, "disk of --out", left, self.room.disk)

    def lines(self, rate: float | None = None) -> Iterator[str]:
        """The plan in words; `rate` is the operations a second in a large product."""
        cfg, kind = self.cfg, self.room.platform
        devices = f"{self.room.num_devices} device{'s' * (self.room.num_devices > 1)} ({kind})"
        yield (
            f"plan: {cfg.architecture}, {cfg.num_moe_layers} MoE layers of {cfg.num_experts} "
            f"experts, ways {', '.join(map(str, self.ways))}, on {devices}. Sizes are computed "
            "from config.json; 'A to B' is an estimate"
        )
        yield from self._data_lines()
        for way in self.ways:
            united = sizes.united_a_layer(cfg, way)
            count = sizes.united_parameters(cfg, way)
            yield f"way {way}: {united} united experts a layer, {_count(count)} parameters"
            for stage in (stage for stage in self.stages if stage.way == way):
                parts = ", ".join(f"{what} {_size(part)}" for what, part in stage.parts)
                yield f"  {_stage(stage)}: device {_range(stage.device)} ({parts})"
                yield f"  {_stage(stage)}: host {_range(stage.host)}"
        file = sizes.united_file_bytes(cfg, self.ways)
        yield f"disk: {_range(self.disk)} in --out, of it united.safetensors {_size(file)}"
        known = {"device": self.room.device, "host": self.room.host, "disk": self.room.disk}
        if kind == "cpu":
            del known["device"]
        free = (
            f"{name} {'unknown' if size is None else _size(size)}" for name, size in known.items()
        )
        yield f"free: {', '.join(free)}"
        if rate is not None:
            yield self._time_line(rate)

    def _data_lines(self) -> Iterator[str]:
        amount = self.amount
        if not amount.counted:
            yield f"data: not counted; {amount.tokens:,} tokens are assumed"
            return
        visits = amount.captured_tokens * self.cfg.experts_per_token / self.cfg.num_experts
        captured = sizes.captured_bytes(self.cfg, amount.captured_tokens, self.weight_bytes)
        yield (
            f"data: {amount.tokens:,} tokens in {amount.rows:,} packed rows of "
            f"{self.config.length}; {amount.captured_tokens:,} are captured a layer "
            f"({_size(captured)}), {visits:,.0f} visits an expert on average"
        )

    def _time_line(self, rate: float) -> str:
        spans = {
            "layers": self._seconds(rate, end_to_end=False),
            "end to end": self._seconds(rate, end_to_end=True),
        }
        total = spans["layers"] + spans["end to end"]
        each = ", ".join(f"{name} {_time(span)}" for name, span in spans.items() if span.high)
        low, high = SHARES.get(self.room.platform, _OTHER_SHARES)
        return (
            f"time, a rough estimate: {_time(total)} ({each}), compilation not counted; it takes "
            f"steps to reach {low:.0%} to {high:.0%} of the {rate / 1e12:.3g} TFLOP/s of a large "
            "product. Layers that stop early take less; the progress shows the time that is left"
        )

    def _seconds(self, rate: float, *, end_to_end: bool) -> Span:
        if end_to_end and not self.config.refine_steps:
            return Span(0, 0)
        work, stored, moved = 0.0, 0.0, 0.0
        rest, experts = sizes.model_parameters(self.cfg)
        weights = self.weight_bytes * (rest + experts)
        for way in self.ways:
            if end_to_end:
                work += self.config.refine_steps * _end_to_end_operations(self.cfg, self.config)
                state = 12 * sizes.united_parameters(self.cfg, way)
                saves = (self.config.refine_steps - 1) // sizes.SAVE_EVERY
                stored += weights + saves * state
                moved += weights + saves * state
            else:
                steps = self.config.steps * self.cfg.num_moe_layers
                work += steps * _layer_operations(self.cfg, self.config)
                stored += 4 * sizes.united_parameters(self.cfg, way)
        if not end_to_end:
            tokens = self.amount.captured_tokens
            active = rest + experts * self.cfg.experts_per_token / self.cfg.num_experts
            work += 2 * active * tokens
            rows = sizes.captured_bytes(self.cfg, tokens, self.weight_bytes)
            rows *= self.cfg.num_moe_layers
            stored += weights
            moved += weights + (1 + len(self.ways)) * rows
        low, high = SHARES.get(self.room.platform, _OTHER_SHARES)
        rate *= self.room.num_devices
        return Span(
            work / (high * rate) + stored / _DISK_RATES[1] + moved / _LINK_RATES[1],
            work / (low * rate) + stored / _DISK_RATES[0] + moved / _LINK_RATES[0],
        )


def make_plan(
    cfg: ModelConfig,
    config: DistillConfig,
    ways: Sequence[int],
    amount: Amount,
    room: Room,
    there: int = 0,
) -> Plan:
    """The plan of these ways. `there`: bytes that an earlier run of them left on the disk."""
    weight_bytes = _weight_bytes(config, room.platform)
    refine_bytes = jnp.dtype(config.dtype).itemsize
    stages: list[Stage] = []
    for way in ways:
        captured = amount.captured_tokens, amount.captured_rows
        stages.append(sizes.layer_stage(cfg, config, way, *captured, weight_bytes))
        if config.refine_steps:
            stages.append(sizes.end_to_end_stage(cfg, config, way, room.num_devices, refine_bytes))
    needed = sizes.disk(cfg, config, ways, amount.captured_rows)
    return Plan(cfg, config, tuple(ways), amount, room, tuple(stages), needed, there)


def choose(plan: Plan, named: bool) -> tuple[Plan, list[str], str | None]:
    """The plan of the ways that fit, warnings, and why it cannot be carried out, if it cannot.

    Ways that somebody named (`named`) stay: where one of those cannot fit, or none of the default
    ones can, the plan cannot be carried out.
    """
    warnings: list[str] = []
    while certain := [short for short in plan.shortages() if short.certain]:
        short = certain[0]
        if named or len(plan.ways) == 1:
            return plan, warnings, f"this does not fit: {short.text}; {_advice(plan, short)}"
        way = min(plan.ways) if short.way is None else short.way
        rest = [other for other in plan.ways if other != way]
        warnings.append(f"way {way} is left out: {short.text}; {_advice(plan, short)}")
        plan = make_plan(plan.cfg, plan.config, rest, plan.amount, plan.room, plan.there)
    warnings += [f"{short.text}: it may not fit" for short in plan.shortages()]
    return plan, warnings, None


def _advice(plan: Plan, short: Shortage) -> str:
    if short.way is None:
        return "free some, or name fewer or larger ways with --ways"
    words = ["a larger way takes less"]
    if "end to end" in short.text:
        words.append("--refine-steps 0 leaves that stage out")
    else:
        words.append(f"lower --rows ({plan.config.rows} now)")
    if plan.room.platform != "cpu" and "device" in short.text:
        words.append("more devices share it" if "end to end" in short.text else "")
        words.append("XLA_CLIENT_MEM_FRACTION=0.95 lets XLA use more than 75 % of a GPU")
    return ", ".join(filter(None, words))


def measured_rate(config: DistillConfig, platform: str) -> float:
    """Operations a second of one device in a large product; takes a moment."""
    size = 1024 if platform == "cpu" else 8192
    product = jax.jit(lambda a: a @ a)
    factor = jnp.ones((size, size), config.dtype)
    product(factor).block_until_ready()
    took = []
    for _ in range(3):
        began = time.perf_counter()
        product(factor).block_until_ready()
        took.append(time.perf_counter() - began)
    return 2 * size**3 / min(took)


def _layer_operations(cfg: ModelConfig, config: DistillConfig) -> float:
    """Of one step: three products forward and twice that back, for each buffered visit."""
    visits = 2 * config.batch * cfg.experts_per_token
    return 18 * cfg.d_model * cfg.d_ff_expert * visits


def _end_to_end_operations(cfg: ModelConfig, config: DistillConfig) -> float:
    """Of one step: the teacher, and the student forward, again, and back.

    Exact experts have buffers of four times the even share, united ones of twice; nothing but
    united experts has a gradient of its own.
    """
    tokens = config.refine_rows * config.length
    rest, _ = sizes.model_parameters(cfg)
    expert = 2 * sizes.expert_parameters(cfg) * cfg.experts_per_token * cfg.num_moe_layers
    return tokens * (4 * (2 * rest + 4 * expert) + 4 * 2 * expert)


def _weight_bytes(config: DistillConfig, platform: str) -> int:
    """Of the dtype that layers are captured in."""
    return jnp.dtype(layers_dtype(config, platform)).itemsize


def layers_dtype(config: DistillConfig, platform: str) -> str:
    """A CPU's reference of the grouped GEMM is fast in float32, a GPU's kernel in bfloat16."""
    return "float32" if platform == "cpu" else config.dtype


def _short(way: int | None, what: str, need: Span, free: int | None) -> Iterator[Shortage]:
    if free is None or need.high <= free:
        return
    text = f"{what} takes {_range(need)} and {_size(free)} are free"
    yield Shortage(way, need.low > free, text)


def _stage(stage: Stage) -> str:
    return "end to end" if stage.end_to_end else "layer by layer"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.4g} million"


def _size(num_bytes: float) -> str:
    for unit, scale in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"


def _range(span: Span) -> str:
    low, high = _size(span.low), _size(span.high)
    return low if low == high else f"{low} to {high}"


def _time(span: Span) -> str:
    def words(seconds: float) -> str:
        for unit, scale in (("h", 3600), ("min", 60)):
            if seconds >= 2 * scale:
                number = seconds / scale
                return f"{number:.1f} {unit}" if number < 10 else f"{number:.0f} {unit}"
        return f"{max(seconds, 1):.0f} s"

    return f"{words(span.low)} to {words(span.high)}"
