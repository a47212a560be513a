"""Decode and prefill steps by themselves, on the device: time over the floor of their bytes.

A step is the engine's own (`jmoe.steps`), compiled as the engine compiles it, chained through its
donated state with no host in between; rows and results are in other arrays from step to step, as
an engine's are, since a CUDA graph is updated where arrays have moved. `span_us`, from one step to
the next, gaps between kernels included, is what an engine can reach and what ratios are made of.
`kernels_us` is the sum of the kernels' own durations, read in steps of their own. Experts that had
rows are counted on the device in the very steps that are timed.
"""

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import models
from benchmarks.gpu.part import Case, Context, RunCase
from benchmarks.gpu.sizes import EAGER, SETTINGS, ZERO, Setting, Sizes
from benchmarks.kernels.timing import Ceilings, JaxProgram, Ruler, measure_ceilings
from jmoe.api import Model
from jmoe.kv_cache import KVPages
from jmoe.packed_rows import empty_deltas, pack_row
from jmoe.steps import State, decode_step, make_state, prefill_step, served
from pallas_kernels.routing import STRATEGIES, max_active_experts

DEPENDS = ("pallas_kernels", "jmoe", "benchmarks/gpu/models.py", "benchmarks/kernels/timing.py")
START_S = 120.0
COMPILERS = 8
TARGET, TARGET_BATCH = 1.15, 64  # span over floor, at this batch and more
GAIN_TARGET = 0.9  # of what brownout saves by the byte floors
BUCKET_PERCENT = 40  # the threshold bucket that serves the three settings


def cases(sizes: Sizes) -> list[Case]:
    """Returns exact decode first, then every setting, then prefill; a way's cases lie together.

    `eager` ones are launched kernel by kernel: what CUDA graphs bring.
    """
    found = [_decode(setting, batch, sizes) for setting in SETTINGS for batch in sizes.batches]
    ends = dict.fromkeys((sizes.batches[0], sizes.batches[-1]))
    eager = [_decode(ZERO, batch, sizes, eager=True) for batch in ends]
    prefill = [
        Case(
            f"prefill/{setting.name}/t{t}",
            20.0,
            {"phase": "prefill", "tokens": t, **setting._asdict()},
        )
        for setting in (ZERO, SETTINGS[-1])
        for t in sizes.prefill_tokens
    ]
    exact, others = found[: len(sizes.batches)], found[len(sizes.batches) :]
    num_exact = len(sizes.prefill_tokens)
    return exact + eager + prefill[:num_exact] + others + prefill[num_exact:]


def _decode(setting: Setting, batch: int, sizes: Sizes, *, eager: bool = False) -> Case:
    about = {"phase": "decode", "batch": batch, "context": sizes.context, "eager": eager}
    name = f"decode/{setting.name}{EAGER if eager else ''}/b{batch}"
    return Case(name, 20.0, {**about, **setting._asdict()})


@contextmanager
def session(context: Context) -> Iterator[RunCase]:
    """Makes one model and one cache for all cases, and yields what runs a case."""
    ruler, ceilings = rulers(context)
    steps = _Steps(context.sizes, ruler, ceilings)
    steps.compile_all(context.wanted)

    def run(case: Case) -> dict[str, Any]:
        record = steps.run(case)
        zero = context.record("step", f"decode/{ZERO.name}/b{case.about.get('batch')}")
        return record if zero is None else beside_zero(case, record, zero["figures"])

    yield run


def beside_zero(case: Case, record: dict[str, Any], zero: dict[str, float]) -> dict[str, Any]:
    """Returns the record of a decode step, with how it compares to the step without brownout.

    With brownout that is the step without it over this one, the same by the floors, and the share
    of the latter that is had; launched kernel by kernel, this one over that of a CUDA graph.
    """
    figures = record["figures"]
    if case.about["phase"] == "decode" and case.about["eager"]:
        figures = {**figures, "over_graph": figures["span_us"] / zero["span_us"]}
    elif case.about["phase"] == "decode" and case.about["way"]:
        gain, floors = (zero[key] / figures[key] for key in ("span_us", "floor_us"))
        figures = {**figures, "zero_over_it": gain, "by_the_floors": floors}
        target = {"share_of_floors": GAIN_TARGET, "met": gain / floors >= GAIN_TARGET}
        record = {**record, "target": target}
        figures["share_of_floors"] = gain / floors
    return {**record, "figures": figures}


def rulers(context: Context) -> tuple[Ruler, Ceilings]:
    """Returns the ruler that times steps, and the device's ceilings as measured now, which records
    keep.
    """
    sizes = context.sizes
    models.use_compilation_cache(context.cache)
    ruler = Ruler(0.0, 0.0) if sizes.dry else Ruler(warm_s=0.3, timed_s=0.4)
    ceilings = measure_ceilings(ruler, sizes.copy_bytes, 32 if sizes.dry else 8192)
    gc.collect()
    context.facts["ceilings"] = ceilings._asdict()
    return ruler, ceilings


class _Steps:
    """The model, its state, and the programs compiled so far."""

    def __init__(self, sizes: Sizes, ruler: Ruler, ceilings: Ceilings) -> None:
        self.sizes, self.ruler, self.ceilings = sizes, ruler, ceilings
        self.model = models.make(sizes, ways=sizes.ways)
        self._graph = served(self.model.params)
        self._eager = served(self.model.params, eager=True)
        self.state = random_state(sizes, self.model)
        self._tables = block_tables(sizes)
        self._compiled: dict[_Key, Future[Any]] = {}

    def run(self, case: Case) -> dict[str, Any]:
        """Times the step of a case and returns its record."""
        if case.about["way"]:
            self.model.use_way(case.about["way"])
        try:
            return self._measure(case)
        except Exception:
            self.state = random_state(self.sizes, self.model)  # the other was donated
            raise

    def _measure(self, case: Case) -> dict[str, Any]:
        decode = case.about["phase"] == "decode"
        program = self._program(case)
        timing = self.ruler.measure(program)
        active, calls = np.asarray(program.carry[1]), program.calls
        self.state = program.carry[0]
        per_layer = active.sum(axis=1) / calls
        record = {
            "timing": {**timing._asdict(), "kernels": _by_name(timing.kernels)},
            "active_experts": {
                "mean": float(per_layer.mean()),
                "least_layer": float(per_layer.min()),
                "fullest_layer": float(per_layer.max()),
            },
            "temporary_bytes": program.temp_bytes,
        }
        figures = self._decode_figures if decode else self._prefill_figures
        kernels_us = timing.us if timing.method == "cupti" else None
        return {**record, **figures(case, timing.span_us, kernels_us, float(per_layer.mean()))}

    def _decode_figures(
        self, case: Case, span_us: float, kernels_us: float | None, active: float
    ) -> dict[str, Any]:
        cfg, dtype = self.model.config, self.model.dtype
        batch, context = case.about["batch"], case.about["context"]
        read = models.decode_bytes(cfg, dtype, batch=batch, context=context, active_experts=active)
        floor = models.floor_us(read["total"], self.ceilings.copy_tb_s)
        ratio = span_us / floor
        due = batch >= TARGET_BATCH and case.about["way"] == 0 and not case.about["eager"]
        return {
            "bytes": read,
            "figures": {
                "span_us": span_us,
                "kernels_us": kernels_us,
                "floor_us": floor,
                "over_floor": ratio,
                "active_experts": active,
                "tokens_s": batch / span_us * 1e6,
            },
            "target": {"over_floor": TARGET, "met": ratio <= TARGET} if due else None,
        }

    def _prefill_figures(
        self, case: Case, span_us: float, kernels_us: float | None, active: float
    ) -> dict[str, Any]:
        chunks = _chunks(self.sizes, case.about["tokens"])
        flops = models.prefill_flops(self.model.config, chunks)
        tflop_s = flops / span_us / 1e6
        return {
            "figures": {
                "span_us": span_us,
                "kernels_us": kernels_us,
                "tokens_s": case.about["tokens"] / span_us * 1e6,
                "tflop_s": tflop_s,
                "share_of_product": tflop_s / self.ceilings.product_tflop_s,
                "active_experts": active,
            }
        }

    # -- programs -----------------------------------------------------------------------------

    def compile_all(self, cases: Sequence[Case]) -> None:
        """Compiles the cases' programs, several at a time as a server does. A program that cannot
        be compiled is left to its case.
        """
        with ThreadPoolExecutor(COMPILERS) as pool:
            for case in cases:
                if _key(case) not in self._compiled:
                    with suppress(Exception):
                        compiler = self._compiler(case, *self._arguments(case))
                        self._compiled[_key(case)] = pool.submit(compiler)

    def _program(self, case: Case) -> "StepProgram":
        compiling, (carry, held, rows) = self._compiled.get(_key(case)), self._arguments(case)
        if compiling is None or compiling.exception():  # beside others there may be too little room
            made = self._compiler(case, carry, held, rows)()
        else:
            made = compiling.result()
        return StepProgram(made, carry, in_other_arrays(held, rows))

    def _compiler(self, case: Case, carry: Any, held: Any, rows: Any) -> Callable[[], Any]:
        """Returns what compiles a case's program, lowered already."""
        key, cfg = _key(case), self.model.config
        m = cfg.num_experts
        max_active = max_active_experts(key.bucket_percent, m, self.model.num_united_slots, m)
        step: Any = decode_step if key.phase == "decode" else prefill_step
        call = counted(partial(step, cfg, max_active=max_active))
        lowered = jax.jit(call, donate_argnums=0).lower(carry, *held, *rows)
        return partial(lowered.compile, compiler_options=self._served(key)[1] or None)

    def _served(self, key: "_Key") -> tuple[Any, dict[str, str]]:
        return self._eager if key.eager else self._graph

    def _arguments(self, case: Case) -> tuple[Any, Any, tuple[jax.Array, ...]]:
        """Returns what a case's program is called with: carry, weights, rows."""
        model, key = self.model, _key(case)
        if key.phase == "decode":
            arrays = decode_rows(range(key.size), case.about["context"])[:-1]
        else:
            arrays = self._prefill_rows(key.size)
        strategy = STRATEGIES["partial" if case.about["way"] else "zero"]
        control = jnp.asarray([case.about["threshold_percent"], strategy], jnp.int32)
        held = (model.weights._replace(params=self._served(key)[0]),)
        state = self.state._replace(block_table=jnp.asarray(self._tables[key.phase]))
        width = model.config.num_experts + model.num_united_slots
        carry = (state, jnp.zeros((model.config.num_moe_layers, width), jnp.int32))
        return carry, held, (*arrays, control)

    def _prefill_rows(self, tokens: int) -> tuple[jax.Array, ...]:
        chunks = _chunks(self.sizes, tokens)
        drawn = np.random.default_rng(tokens).integers(self.model.config.vocab_size, size=tokens)
        rows = np.stack([pack_row(i, kv_len=c, q_len=n) for i, (n, c) in enumerate(chunks)])
        return tuple(map(jnp.asarray, (drawn.astype(np.int32), rows, empty_deltas(1))))


class _Key(NamedTuple):
    """What tells step programs apart."""

    phase: str
    size: int  # rows of a decode step, tokens of a prefill step
    bucket_percent: int
    eager: bool


def _key(case: Case) -> _Key:
    about = case.about
    size = about["batch"] if about["phase"] == "decode" else about["tokens"]
    bucket = BUCKET_PERCENT if about["way"] else 100
    return _Key(about["phase"], size, bucket, about.get("eager", False))


def decode_rows(slots: Sequence[int], context: int) -> tuple[jax.Array, ...]:
    """Returns rows, deltas and control of a decode step without brownout."""
    rows = np.stack([pack_row(slot, kv_len=context) for slot in slots])
    control = np.array([100, STRATEGIES["zero"]], np.int32)
    return tuple(map(jnp.asarray, (rows, empty_deltas(len(slots)), control)))


def counted(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a step that carries its state, and by layer and expert how often there were rows."""

    def call(carry: tuple[State, jax.Array], *args: Any) -> Any:
        (state, active), (weights, *arrays) = carry, args
        state, out = step(weights, state, *arrays)
        active += (out.expert_rows > 0).astype(jnp.int32)
        return (state, active), out._replace(logits=None)

    return call


def compiled(call: Callable[..., Any], carry: Any, *args: Any, options: dict[str, str]) -> Any:
    """Compiles a step over its donated carry."""
    lowered = jax.jit(call, donate_argnums=0).lower(carry, *args)
    return lowered.compile(compiler_options=options or None)


def in_other_arrays(
    held: tuple[Any, ...], rows: tuple[jax.Array, ...], count: int = 3
) -> list[tuple[Any, ...]]:
    """Returns what a step is called with, `count` times: each has copies of the rows."""
    return [(*held, *(jnp.array(a, copy=True) for a in rows)) for _ in range(count)]


class StepProgram:
    """A compiled step over its donated carry (see benchmarks.kernels.timing.Program).

    `sets` are what it is called with beside that, in turn: weights, and rows.
    """

    judged = False
    span_us = JaxProgram.span_us
    wait = JaxProgram.wait

    @classmethod
    def of(
        cls, call: Callable[..., Any], carry: Any, held: Any, rows: Any, options: dict[str, str]
    ) -> "StepProgram":
        """Returns a step that is called with `held` and, in turn, copies of the rows."""
        made = compiled(call, carry, *held, *rows, options=options)
        return cls(made, carry, in_other_arrays(held, rows))

    def __init__(self, compiled: Any, carry: Any, sets: Sequence[tuple[Any, ...]]) -> None:
        self._compiled, self.carry, self.calls = compiled, carry, 0
        self._sets, self.num_sets = sets, len(sets)
        memory = compiled.memory_analysis()
        self.temp_bytes = memory.temp_size_in_bytes if memory else 0

    def __call__(self, i: int) -> Any:
        """See timing.Program."""
        self.carry, out = self._compiled(self.carry, *self._sets[i % self.num_sets])
        self.calls += 1
        return out


def _chunks(sizes: Sizes, tokens: int) -> list[tuple[int, int]]:
    """Returns whole prompts of at most `prefill_context` positions as (rows, positions)."""
    each = min(tokens, sizes.prefill_context)
    return [(each, each)] * (tokens // each)


def _by_name(kernels: list[tuple[str, float]] | None) -> list[dict[str, Any]] | None:
    """Returns launches and microseconds a step by kernel, the slowest first."""
    if kernels is None:
        return None
    names = {name for name, _ in kernels}
    sums = {n: [us for name, us in kernels if name == n] for n in names}
    ordered = sorted(sums.items(), key=lambda item: -sum(item[1]))
    return [
        {"name": n, "launches": len(us), "us": sum(us), "median_us": statistics.median(us)}
        for n, us in ordered[:25]
    ]


def _blocks(sizes: Sizes) -> dict[str, tuple[int, int]]:
    """Returns, for each phase, the sequences of its largest step and the pages each of them has."""
    context = min(max(sizes.prefill_tokens), sizes.prefill_context)
    return {
        "decode": (max(sizes.batches), -(-sizes.context // sizes.page_size)),
        "prefill": (max(sizes.prefill_tokens) // context, -(-context // sizes.page_size)),
    }


def _num_pages(sizes: Sizes) -> int:
    return max(count * each for count, each in _blocks(sizes).values())


def block_tables(sizes: Sizes) -> dict[str, np.ndarray]:
    """Returns int32 block tables by phase: every sequence has scattered pages of its own."""
    shape = max(count for count, _ in _blocks(sizes).values()), _max_blocks(sizes)
    order = np.random.default_rng(sizes.seed).permutation(_num_pages(sizes)).astype(np.int32)
    tables = {}
    for phase, (count, each) in _blocks(sizes).items():
        table = np.zeros(shape, np.int32)
        table[:count, :each] = order[: count * each].reshape(count, each)
        tables[phase] = table
    return tables


def _max_blocks(sizes: Sizes) -> int:
    return max(each for _, each in _blocks(sizes).values())


def random_state(sizes: Sizes, model: Model) -> State:
    """Returns a state with pages of random keys and values, and random newest tokens."""
    cfg, slots = model.config, max(count for count, _ in _blocks(sizes).values())
    state = make_state(
        cfg,
        num_slots=slots,
        num_pages=_num_pages(sizes),
        page_size=sizes.page_size,
        max_blocks=_max_blocks(sizes),
        dtype=model.dtype,
    )
    key = jax.random.key(sizes.seed + 1, impl="rbg")
    pages = state.pages
    for layer in range(cfg.num_layers):
        pages = _fill(pages, jnp.int32(layer), jax.random.fold_in(key, layer))
    newest = np.random.default_rng(1).integers(cfg.vocab_size, size=slots).astype(np.int32)
    return State(pages, state.block_table, jnp.asarray(newest))


def decode_state(sizes: Sizes, model: Model, batches: tuple[int, ...]) -> State:
    """Returns a state with random pages and block tables for decode steps of up to the largest of
    `batches`.
    """
    context = sizes.context
    own = replace(sizes, batches=batches, prefill_tokens=(context,), prefill_context=context)
    state = random_state(own, model)
    return state._replace(block_table=jnp.asarray(block_tables(own)["decode"]))


@partial(jax.jit, donate_argnums=0)
def _fill(pages: KVPages, layer: jax.Array, key: jax.Array) -> KVPages:
    def filled(cache: Any, key: jax.Array) -> jax.Array:
        return cache.at[layer].set(jax.random.normal(key, cache.shape[1:], cache.dtype))

    return KVPages(*map(filled, pages, jax.random.split(key)))
