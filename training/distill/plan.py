"""What a distillation will take, estimated before it begins: memory, disk and time.

Sizes come from `training.distill.sizes`. Time comes from steps that are timed on one layer.
"""

import dataclasses
import math
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmoe.config import ModelConfig
from jmoe.layout import expert_parameters
from jmoe.random_model import random_model
from training.distill import fit, refine, sizes
from training.distill.config import DistillConfig
from training.distill.room import Room
from training.distill.sizes import CAPTURE_ROWS, Span, Stage
from training.distill.stream import layers_dtype, run_layer
from training.packing import Batch

GIB = 2**30
WIDTH = 80
"""Characters of a terminal's line."""

LEAST_VISITS = 8
"""Captured visits an expert, on average, below which a run is refused."""

ENOUGH_VISITS = 500
"""Below so many a run is warned of; the default rows give Qwen1.5-MoE-A2.7B 4,369."""

H200_RATE = 790e12
"""Operations a second in a large bfloat16 product on an H200 (docs/distillation.md)."""

_SMALL_VOCABULARY = 256  # with so many entries the head takes next to no time


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
        """Assumes as much data as the settings want, packed without gaps."""
        rows = -(-config.rows // config.length)
        return cls(config.rows, rows, config.rows, rows, counted=False)

    def captured(self, rows: int) -> "Amount":
        """Returns the same data, of which `--rows` captures at most this many tokens."""
        share = min(1.0, rows / self.captured_tokens)
        tokens, packed = self.captured_tokens * share, self.captured_rows * share
        return dataclasses.replace(
            self, captured_tokens=math.ceil(tokens), captured_rows=math.ceil(packed)
        )


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds that parts of a run took on MoE layers of random weights."""

    capture: float  # CAPTURE_ROWS packed rows through a layer
    steps: Mapping[int, float]  # a step of the layer's united experts, by way
    end_to_end: float  # a layer's part of an end-to-end step
    head: float  # the rest of such a step


@dataclasses.dataclass(frozen=True)
class Shortage:
    """Something that does not fit (`certain`), or may not. `way` is None for the disk."""

    way: int | None
    certain: bool
    text: str


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """What the ways of one distillation take, stage by stage, and what there is."""

    cfg: ModelConfig
    config: DistillConfig
    ways: tuple[int, ...]
    amount: Amount
    room: Room
    there: int = 0  # bytes that an earlier run of these ways left in `out`
    warnings: tuple[str, ...] = ()
    refusal: str | None = None  # why it cannot be carried out; None: it can

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight while layers are captured and trained."""
        return jnp.dtype(layers_dtype(self.config.dtype, self.room.platform)).itemsize

    @cached_property
    def stages(self) -> list[Stage]:
        """What each stage of each way takes."""
        cfg, config = self.cfg, self.config
        captured = self.amount.captured_tokens, self.amount.captured_rows, self.weight_bytes
        refined = self.room.num_devices, jnp.dtype(config.dtype).itemsize
        found = []
        for way in self.ways:
            found.append(sizes.layer_stage(cfg, config, way, *captured))
            if config.refine_steps:
                found.append(sizes.end_to_end_stage(cfg, config, way, *refined))
        return found

    @property
    def disk(self) -> Span:
        """Bytes of `out` in all."""
        return sizes.disk(self.cfg, self.config, self.ways, self.amount.captured_rows)

    def shortages(self) -> Iterator[Shortage]:
        """Yields a shortage where a stage needs, or may need, more than is free."""
        for stage in self.stages:
            name = f"way {stage.way}, {_stage(stage)}"
            if self.room.platform == "cpu":
                both = stage.device * self.room.num_devices + stage.host
                yield from _short(stage.way, f"{name}: memory", both, self.room.host)
                continue
            parts = ", ".join(f"{what} {_size(part)}" for what, part in stage.parts)
            what = f"{name}: device memory"
            yield from _short(stage.way, what, stage.device, self.room.device, f" ({parts})")
            yield from _short(stage.way, f"{name}: host memory", stage.host, self.room.host)
        writing = sizes.writing_host(self.cfg, self.ways)
        yield from _short(None, "writing united.safetensors: host memory", writing, self.room.host)
        left = Span(max(0.0, self.disk.low - self.there), max(0.0, self.disk.high - self.there))
        yield from _short(None, "disk of --out", left, self.room.disk)

    def lines(self, timing: Timing | None = None, rate: float | None = None) -> Iterator[str]:
        """Yields the plan's text and its warnings, at most WIDTH characters a line.

        `timing` gives an estimate of the time, `rate`, operations a second of a device that is not
        here, the least that it can be.
        """
        cfg, room = self.cfg, self.room
        yield from _wrapped(
            f"plan: {cfg.architecture}, {cfg.num_moe_layers} MoE layers of {cfg.num_experts} "
            f"experts, ways {', '.join(map(str, self.ways))}, on {_devices(room.num_devices)} "
            f"({room.platform})"
        )
        yield from _wrapped(self._data_line())
        on_device = "device" if room.num_devices == 1 else f"each of {room.num_devices} devices"
        yield _row("memory", on_device, "host")
        for way in self.ways:
            count = sizes.united_parameters(cfg, way)
            united = sizes.united_a_layer(cfg, way)
            yield f"way {way}: {united} united experts a layer, {_count(count)} parameters"
            for stage in (stage for stage in self.stages if stage.way == way):
                yield _row(f"  {_stage(stage)}", _range(stage.device), _range(stage.host))
        device = "the host's" if room.platform == "cpu" else _free(room.device)
        yield _row("free", device, _free(room.host))
        file = sizes.united_file_bytes(cfg, self.ways)
        yield from _wrapped(
            f"disk: {_range(self.disk)} in --out, of it united.safetensors {_size(file)}; free: "
            f"{_free(room.disk)}"
        )
        if timing is not None:
            yield from _wrapped(self._time_line(timing))
            yield from _wrapped(*self._less(timing))
        elif rate is not None:
            least = self._operations() / (rate * room.num_devices)
            yield from _wrapped(
                f"time: at least {_time(least)}, the counted operations at {rate / 1e12:.0f} "
                "TFLOP/s a device; --dry-run on the machine itself times a step and says more"
            )
        yield from _wrapped(*(f"warning: {words}" for words in self.warnings))

    def _data_line(self) -> str:
        amount = self.amount
        if not amount.counted:
            return f"data: not counted; {amount.tokens:,} tokens are assumed"
        visits = amount.captured_tokens * self.cfg.experts_per_token / self.cfg.num_experts
        captured = sizes.captured_bytes(self.cfg, amount.captured_tokens, self.weight_bytes)
        return (
            f"data: {amount.tokens:,} tokens in {amount.rows:,} packed rows of "
            f"{self.config.length}; {amount.captured_tokens:,} are captured a layer "
            f"({_size(captured)}), {visits:,.0f} visits an expert on average"
        )

    def seconds(self, timing: Timing) -> tuple[float, float]:
        """Returns the seconds of the layers, and of the end-to-end stage."""
        cfg, config = self.cfg, self.config
        passes = cfg.num_layers * math.ceil(self.amount.captured_rows / CAPTURE_ROWS)
        steps = sum(config.steps * cfg.num_moe_layers * timing.steps[way] for way in self.ways)
        step = cfg.num_layers * timing.end_to_end + timing.head
        return passes * timing.capture + steps, len(self.ways) * config.refine_steps * step

    def _time_line(self, timing: Timing) -> str:
        layers, end_to_end = self.seconds(timing)
        parts = f": layer by layer {_time(layers)}, end to end {_time(end_to_end)}"
        words = (
            f"time: about {_time(layers + end_to_end)} on this machine"
            f"{parts if end_to_end else ''}. Measured over 2 steps of one and of two layers "
            "with random weights; compilation and files are not counted, and layers that stop "
            "early take less"
        )
        if (here := jax.device_count()) != self.room.num_devices:
            words += (
                f". Timed on {_devices(here)} with a share of the rows: what "
                f"{_devices(self.room.num_devices)} exchange is not counted"
            )
        return words

    def _less(self, timing: Timing) -> Iterator[str]:
        """Yields the settings that take less time."""
        if not self.config.refine_steps:
            return
        alone = dataclasses.replace(self.config, refine_steps=0)
        fewer = dataclasses.replace(alone, steps=max(1, self.config.steps // 3))
        each = (dataclasses.replace(self, config=config) for config in (alone, fewer))
        long, short = (_time(sum(plan.seconds(timing))) for plan in each)
        yield (
            f"less: --refine-steps 0 leaves out the end-to-end stage: about {long}; with "
            f"--steps {fewer.steps}, too, about {short}. Both cost accuracy"
        )

    def _operations(self) -> float:
        """Returns the operations of all steps and of the capture of all layers."""
        config, rest_and_experts = self.config, sizes.model_parameters(self.cfg)
        share = 1, self.cfg.experts_per_token / self.cfg.num_experts
        active = sum(map(math.prod, zip(rest_and_experts, share, strict=True)))
        layers = config.steps * self.cfg.num_moe_layers * _layer_operations(self.cfg, config)
        end_to_end = config.refine_steps * _end_to_end_operations(self.cfg, config)
        captured = 2 * active * self.amount.captured_tokens
        return len(self.ways) * (layers + end_to_end) + captured


def choose(plan: RunPlan, named: bool) -> RunPlan:
    """Returns the plan of the ways that fit, with warnings, and, if it cannot be carried out, why.

    Ways that the user named (`named`) stay: where one of those cannot fit, or none of the default
    ones can, the plan cannot be carried out.
    """
    while certain := [short for short in plan.shortages() if short.certain]:
        short = certain[0]
        if named or len(plan.ways) == 1:
            words = f"this does not fit: {short.text}; {_advice(plan, short, plan.ways)}"
            return dataclasses.replace(plan, refusal=words)
        way = min(plan.ways) if short.way is None else short.way
        words = f"way {way} is left out: {short.text}; {_advice(plan, short, [way])}"
        rest = tuple(other for other in plan.ways if other != way)
        plan = dataclasses.replace(plan, ways=rest, warnings=(*plan.warnings, words))
    unsure = [f"{short.text}: it may not fit" for short in plan.shortages()]
    return dataclasses.replace(plan, warnings=(*plan.warnings, *unsure))


def _advice(plan: RunPlan, short: Shortage, ways: Sequence[int]) -> str:
    if short.way is None:
        return "free some, or name fewer or larger ways with --ways"
    found = list(_offers(plan, ways))
    words = [f"it fits with {', or '.join(found)}" if found else "no smaller setting fits"]
    if plan.room.platform != "cpu" and "device" in short.text:
        words.append("XLA_CLIENT_MEM_FRACTION=0.95 lets XLA use more than 75 % of a GPU")
    return "; ".join(words)


def _offers(plan: RunPlan, ways: Sequence[int]) -> Iterator[str]:
    """Yields flags with which these ways, larger ones, or more devices would fit; each was
    tried.
    """

    def fits(ways: Sequence[int] = ways, **changes: Any) -> bool:
        tried = dataclasses.replace(plan, ways=tuple(ways), **changes)
        try:
            tried.config.check_devices(tried.room.num_devices, plan.cfg.d_model)
        except ValueError:
            return False
        return not any(tried.shortages())

    config, room = plan.config, plan.room
    flags = f"--ways {','.join(map(str, ways))}"
    alone = partial(fits, config=dataclasses.replace(config, refine_steps=0))
    rows, least = config.rows, ENOUGH_VISITS * plan.cfg.num_experts / plan.cfg.experts_per_token
    while not (found := alone(amount=plan.amount.captured(rows))) and rows / 2 >= least:
        rows //= 2
    if found:
        less = f" --rows {rows}" if rows < config.rows else ""
        yield f"{flags} --refine-steps 0{less}"
    own = [way for way in ways if fits([way])]
    way = max(ways)
    while not own and (way := 2 * way) <= plan.cfg.num_experts:
        own = [way] if fits([way]) else []
    if own and len(plan.ways) == len(ways):  # else other ways are made anyway
        yield f"--ways {','.join(map(str, own))}"
    for number in (2, 4, 8, 16) if room.platform != "cpu" else ():
        if number > room.num_devices and fits(room=dataclasses.replace(room, num_devices=number)):
            yield f"{number} such devices"
            break


def measure(plan: RunPlan, tell: Callable[[str], None] = lambda what: None) -> Timing:
    """Times parts of a run on one or two MoE layers of random weights, with the plan's shapes.

    Steps have the rows that the devices here would have of the plan's number of devices. `tell` is
    called with what is about to be timed. Raises ValueError where they cannot share out a step.
    """
    here = jax.device_count()

    def share(rows: int, unit: int) -> int:
        return max(1, round(rows * here / plan.room.num_devices / unit)) * unit

    group = plan.config.decode_batch  # rows, or tokens, that a device takes at a time
    config = dataclasses.replace(
        plan.config,
        batch=share(plan.config.batch, group * here),
        refine_rows=share(
            plan.config.refine_rows, group // math.gcd(group, plan.config.length) * here
        ),
    )
    kind = plan.cfg.layer_attention[:1]
    cfg = dataclasses.replace(plan.cfg, num_layers=1, moe_layers=(True,), layer_attention=kind)
    config.check_devices(here, cfg.d_model)
    tell("a layer's capture")
    dtype = layers_dtype(config.dtype, plan.room.platform)
    model = random_model(cfg, config.seed, dtype, plan.ways)
    data = _random_batch(cfg, config)
    embedded = np.asarray(model.params["embed"], np.float32)[data.tokens]
    layer = jax.tree.map(lambda leaf: leaf[0], model.params["segments"][0])
    slots, began = model.table.slots[0, : cfg.num_experts], 0.0
    experts = model.pool.read(slots).plain()
    for _ in range(2):  # the second time nothing is compiled
        began = time.perf_counter()
        rows = run_layer(cfg, 0, layer, experts, embedded.copy(), data, batch=CAPTURE_ROWS)
    capture = time.perf_counter() - began
    assert rows is not None
    steps, key = {}, jax.random.key(config.seed)
    for way, united in model.united.items():
        tell(f"a step of way {way}")
        given = united.layer(0).arrays, experts.arrays, united.groups[0], rows, key, config
        steps[way] = fit.time_step(*given, cfg.activation)
    del model, layer, experts, united, rows, given
    if not config.refine_steps:
        return Timing(capture, steps, 0.0, 0.0)
    tell("an end-to-end step")
    # Of several layers each takes longer than one alone, since gradients keep what each computed.
    # The head of a large vocabulary takes longer than many layers: it is timed by difference.
    count = min(2, plan.cfg.num_layers)
    two = dataclasses.replace(
        cfg, num_layers=count, moe_layers=(True,) * count, layer_attention=kind * count
    )
    small = dataclasses.replace(two, vocab_size=min(_SMALL_VOCABULARY, cfg.vocab_size))
    both = _end_to_end_step(small, config, min(plan.ways))
    whole = _end_to_end_step(two, config, min(plan.ways))
    return Timing(capture, steps, both / count, max(0.0, whole - both))


def _random_batch(cfg: ModelConfig, config: DistillConfig) -> Batch:
    shape = CAPTURE_ROWS, config.length
    tokens = np.random.default_rng(config.seed).integers(cfg.vocab_size, size=shape, dtype=np.int32)
    positions = np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1))
    ones = np.ones(shape, np.int32)
    return Batch(tokens, tokens, positions, ones, ones.astype(np.float32), ones, [[]] * shape[0])


def _end_to_end_step(cfg: ModelConfig, config: DistillConfig, way: int) -> float:
    """Returns the seconds of an end-to-end step of a model with random weights."""
    model = random_model(cfg, config.seed, config.dtype, [way])
    united = model.united[way]
    at = refine.begin(united.experts.arrays, config, cfg.d_model)
    frozen = refine.freeze(model, united.groups)
    return refine.time_step(cfg, frozen, at, _random_batch(cfg, config), config)


def _wrapped(*paragraphs: str) -> Iterator[str]:
    """Yields lines of at most WIDTH characters, continued ones indented; long words stay whole."""
    for text in paragraphs:
        yield from textwrap.wrap(
            text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )


def _layer_operations(cfg: ModelConfig, config: DistillConfig) -> float:
    """Counts the operations of one step: an expert's products forward and twice that back, for
    each buffered visit.
    """
    visits = 2 * config.batch * cfg.experts_per_token
    return 6 * (cfg.up_matrices + 1) * cfg.d_model * cfg.d_ff_expert * visits


def _end_to_end_operations(cfg: ModelConfig, config: DistillConfig) -> float:
    """Counts the operations of one step: the teacher, and the student forward, again, and back.

    Exact experts have buffers of four times the even share, united ones of twice; nothing but
    united experts has a gradient of its own.
    """
    tokens = config.refine_rows * config.length
    rest, _ = sizes.model_parameters(cfg)
    expert = 2 * expert_parameters(cfg) * cfg.experts_per_token * cfg.num_moe_layers
    return tokens * (4 * (2 * rest + 4 * expert) + 4 * 2 * expert)


def _short(
    way: int | None, what: str, need: Span, free: int | None, held: str = ""
) -> Iterator[Shortage]:
    if free is None or need.high <= free:
        return
    text = f"{what} takes {_range(need)}{held} and {_size(free)} are free"
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
    if low == high:
        return low
    number, _, unit = low.partition(" ")
    return f"{number if high.endswith(unit) else low} to {high}"


def _free(size: int | None) -> str:
    return "unknown" if size is None else _size(size)


def _row(name: str, device: str, host: str) -> str:
    return f"{name:<18}{device:>29}{host:>29}".rstrip()


def _devices(number: int) -> str:
    return f"{number} device{'s' * (number > 1)}"


def _time(seconds: float) -> str:
    for unit, scale in (("h", 3600), ("min", 60)):
        if seconds >= 2 * scale:
            number = seconds / scale
            return f"{number:.1f} {unit}" if number < 10 else f"{number:.0f} {unit}"
    return f"{max(seconds, 1):.0f} s"
