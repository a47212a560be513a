"""The kernel benchmark's own arithmetic, what it lets pass, and what it stores: without a GPU."""

import itertools
import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu import light
from benchmarks.kernels import (
    cases,
    inputs,
    judge,
    libraries,
    measure,
    problems,
    sweep,
    timing,
)
from benchmarks.kernels.cases import DRY, OPS, Sizes, all_cases, with_one_router
from benchmarks.kernels.shapes import (
    DEEPSEEK_V3,
    MIXTRAL_8X7B,
    QWEN3_30B_A3B,
    QWEN15_MOE_A27B,
    Shape,
)
from pallas_kernels.prefill_attention import prefill_attention

pytestmark = pytest.mark.deep

SMALL = Shape("small", d_model=4, d_ff=3, num_experts=5, top_k=2, heads=4, kv_heads=2, head_dim=8)


# ---- Counts, by hand ----


def test_moe_counts_active_experts_and_visits():
    # An expert has gate, up and down of 4 x 3: 36 elements, 72 bytes. A visit multiplies each once.
    assert cases.count_moe_mlp(SMALL, active_experts=2, rows=5) == (144, 360)


def test_moe_floors_are_those_of_the_design():
    """At 4.3 TB/s, all experts hit: 241, 281 and 655 us a layer."""
    floors = {QWEN15_MOE_A27B: 241, QWEN3_30B_A3B: 281, MIXTRAL_8X7B: 655}
    for shape, us in floors.items():
        assert round(cases.count_moe_mlp(shape, shape.num_experts, 0).bytes / 4.3e6) == us


def test_decode_attention_counts_every_key_and_value_once():
    # 7 + 3 positions x 2 kv heads x 8 x (key, value) x 2 bytes; 2 rows x 4 heads x 8 in and out.
    # Flops: 10 (row, key) pairs x 4 heads x 8 x (score, value) x 2.
    assert cases.count_attention(SMALL, [(1, 7), (1, 3)]) == (640 + 256, 1280)


@pytest.mark.parametrize("chunks", [[(3, 5)], [(4, 4), (1, 9)], [(1, 1)]])
def test_prefill_attention_counts_what_a_row_may_see(chunks):
    pairs = sum(key <= c - n + row for n, c in chunks for row in range(n) for key in range(c))
    assert cases.count_attention(SMALL, chunks).flops == pairs * 4 * SMALL.heads * SMALL.head_dim


def test_kv_write_counts_reads_and_writes():
    # 3 tokens x (4 + 2 x 2) heads x 8 x 2 bytes = 384 bytes in and out; 3 x 8 angles of 4 bytes.
    assert cases.count_kv_write(SMALL, 3) == (864, 0)


def test_figures():
    ceilings = timing.Ceilings(copy_tb_s=4.0, product_tflop_s=800.0)
    got = measure.figures(2_000_000_000, 100_000_000_000, 1000.0, ceilings)
    assert got == {
        "tb_s": 2.0,
        "tflop_s": 100.0,
        "share_of_copy": 0.5,
        "share_of_product": 0.125,
        "share_of_floor": 0.5,
    }


# ---- The grid ----


def test_every_case_is_there_once():
    every = all_cases(Sizes())
    assert len({case.name for case in every}) == len(every)
    count = {op: sum(case.op == op for case in every) for op in cases.OPS}
    # 3 models x 9 token counts x 2 skews; x 6 x 3; x (3 + 4 + 4 contexts); x 9 (three times).
    # Mixtral's window is shorter than 2 contexts of decode, and than 2, 2 and 3 of prefill.
    # Two models with latents have attention alone.
    assert count == {
        "grouped_gemm": 54,
        "paged_attention": 54 + 6 * 2 + 36,
        "prefill_attention": 33 + 7 + 22,
        "routing": 27,
        "kv_write": 27,
        "grouped_gemm_fp8": 27,
        "grouped_gemm_int4": 27,
    }
    for case in every:
        if case.context:
            assert sum(n for n, _ in case.chunks()) == case.tokens
            assert all(c == case.context and n <= c for n, c in case.chunks())


def test_no_op_is_left_out_where_routers_are_not_varied():
    """What first light and the device tests run: of quantized experts there is one router."""
    every, chosen = all_cases(Sizes()), with_one_router(Sizes())
    assert {case.op for case in chosen} == set(OPS)
    assert {case for case in every if case not in chosen} == {
        case for case in every if (case.op, case.skew) == ("grouped_gemm", "uniform")
    }
    assert {case.op for case in light.op_cases(dry=False)} == set(OPS)


def test_targets():
    goals = [(case, cases.target(case)) for case in all_cases(Sizes())]
    share = [case for case, goal in goals if goal == ("share_of_copy", 0.95)]
    assert {(c.op, c.tokens) for c in share} == {("grouped_gemm", t) for t in (32, 64, 128, 256)}
    assert len(share) == 4 * 2 * 3
    rates = {(c.op, c.shape.name, g.at_least) for c, g in goals if g and g.figure == "tflop_s"}
    assert {(name, rate) for op, name, rate in rates if op == "grouped_gemm"} == {
        ("Mixtral-8x7B", 650),
        ("Qwen1.5-MoE-A2.7B", 500),
        ("Qwen3-30B-A3B", 500),
    }
    assert {rate for op, _, rate in rates if op == "prefill_attention"} == {620}
    streamed = {(c.tokens, c.context) for c, g in goals if g == ("tb_s", 4.0)}
    grid = itertools.product((1, 8, 32, 64, 128, 256), (1024, 8192, 32768))
    assert streamed == {(b, c) for b, c in grid if b * c >= 131072}


def test_router_skews():
    rng = np.random.default_rng(0)
    shape = replace(SMALL, num_experts=16, top_k=2)
    counts = {}
    for skew in cases.SKEWS:
        ids = inputs.choices(rng, shape, 20_000, skew)
        assert (np.sort(ids, axis=1)[:, 1:] != np.sort(ids, axis=1)[:, :-1]).all()
        counts[skew] = np.sort(np.bincount(ids.ravel(), minlength=16))
    assert counts["uniform"][-1] < 1.1 * counts["uniform"][0]
    # exp(4 x 15 / 16) = 43 between first draws; the second draw of a row evens it out a little.
    assert 20 < counts["exponential"][-1] / counts["exponential"][0] < 45


def test_rows_sorted_for_libraries():
    ids = inputs.choices(np.random.default_rng(1), SMALL, 9, "exponential")
    token, sizes, place = libraries.sorted_rows(ids, SMALL.num_experts)
    expert = np.repeat(np.arange(SMALL.num_experts), sizes)
    for (t, k), e in np.ndenumerate(ids):
        assert (token[place[t, k]], expert[place[t, k]]) == (t, e)
    assert len(set(place.ravel())) == ids.size


# ---- What is let pass ----


@dataclass
class Fake:
    """A program whose results are given one after the other."""

    results: list
    carry = None
    result_bytes = (64,)

    def __call__(self, i):
        return self.results.pop(0)


WANT = jnp.arange(1.0, 9.0)


def checked(*results, tolerance=1e-2):
    error = lambda out: judge.relative_error(out, WANT)  # noqa: E731
    return judge.check(Fake(list(results)), error, tolerance)


def test_a_right_result_passes():
    assert checked(WANT, WANT).passed
    assert checked(WANT, WANT).error == 0


def test_a_wrong_result_does_not():
    seen = checked(1.02 * WANT, 1.02 * WANT)
    assert not seen.passed
    assert seen.error == pytest.approx(0.02, rel=1e-4)


def absorbed(q, weights, latents, *, todo, scale, **chunks):
    """Does as `expanded_attention`, with queries that are taken to latents."""
    heads, rank = q.shape[1], weights[0].shape[0]
    keys, values = (one.astype(jnp.float32).reshape(rank, heads, -1) for one in weights)
    q, turned = jnp.split(q.astype(jnp.float32), [keys.shape[2]], axis=2)
    q = jnp.concatenate([jnp.einsum("thn,rhn->thr", q, keys), turned], axis=2)
    out = prefill_attention(q, latents.astype(q.dtype), None, scale=scale, latent=rank, **chunks)
    return jnp.einsum("thr,rhv->thv", out, values)


@pytest.mark.parametrize("context", [8, 24])
def test_what_latents_are_expanded_to_is_judged_by_the_absorbed_form(monkeypatch, context):
    """Chunks that are whole prompts, and the end of one."""
    shape = replace(DEEPSEEK_V3, heads=2)
    case = cases.Case("prefill_attention", shape, "prefill", 16, context)
    sizes = replace(DRY, latent_models=(shape,))
    monkeypatch.setattr(problems, "expands", lambda case, sizes: True)
    problem = problems.build(case, sizes, 0, inputs.Pools())
    assert problem.error(problem.with_op(absorbed)(*problem.sets[0])) < 1e-5
    off = problem.with_op(lambda *args, kv_len, **kw: absorbed(*args, kv_len=kv_len - 1, **kw))
    assert problem.error(off(*problem.sets[0])) > 0.05


def test_poison_that_was_left_does_not():
    seen = checked(WANT.at[3].set(jnp.nan), WANT)
    assert not seen.passed
    assert seen.unwritten == 1
    assert math.isnan(seen.error)


def test_results_that_differ_between_runs_do_not():
    seen = checked(WANT, WANT.at[0].add(1e-6))
    assert seen.error < 1e-6
    assert not seen.deterministic
    assert not seen.passed


def test_poison_is_nan_in_every_float_type():
    bits = np.full(4, 0xFFFFFFFF, np.uint32)
    for dtype in (np.float32, np.float16, jnp.bfloat16):
        assert np.isnan(bits.view(dtype).astype(np.float32)).all()


def bench():
    return measure.Bench(DRY, timing.Ruler(0.0, 0.0), timing.Ceilings(1.0, 1.0))


def _one_row_off(work):
    return work._replace(visit_row=work.visit_row + 1)


BREAKS = {
    "grouped_gemm": lambda op, *args: op(*args).at[-1].multiply(1.05),
    "paged_attention": lambda op, q, *args, kv_len, **kw: op(q, *args, kv_len=kv_len - 1, **kw),
    "prefill_attention": lambda op, q, *args, **kw: op(q, *args, **kw).at[0].set(0),
    "routing": lambda op, *a, **kw: (*op(*a, **kw)[:2], _one_row_off(op(*a, **kw)[2])),
    "kv_write": lambda op, *args, page, **kw: op(*args, page=page[::-1], **kw),
    "grouped_gemm_fp8": lambda op, *args: op(*args).at[-1].multiply(1.05),
    "grouped_gemm_int4": lambda op, *args: op(*args).at[-1].multiply(1.05),
}


@pytest.mark.parametrize("op", cases.OPS)
def test_an_op_that_is_wrong_is_not_timed(op, monkeypatch):
    case = next(case for case in all_cases(DRY) if case.op == op)
    build = problems.build

    def broken(*args):
        problem = build(*args)
        right = problem.op
        return replace(problem, op=lambda *args, **kw: BREAKS[op](right, *args, **kw))

    monkeypatch.setattr(problems, "build", broken)
    record = bench().run(case, 0)
    assert record["failed"].startswith("wrong results")
    assert record["check"]["error"] > record["check"]["tolerance"]
    assert "timing" not in record


def test_what_a_case_raises_drops_what_it_held():
    """The harness keeps the error (`command.attempt`); nothing of the case stays in memory."""
    mine = bench()
    dropped = []
    mine.pools.drop = lambda: dropped.append(True)
    with pytest.raises(ZeroDivisionError):
        mine.run(replace(all_cases(DRY)[0], op="nothing"), 0)
    assert dropped


# ---- Rulers ----


def test_kernel_durations_are_cut_into_calls():
    assert timing.split([("a", 1.0), ("b", 2.0)] * 2, 2) == [[("a", 1e3), ("b", 2e3)]] * 2
    assert timing.split([("a", 1.0), ("b", 2.0), ("a", 1.0)], 2) is None
    assert timing.split([("a", 1.0), ("b", 2.0)], 2) is None
    assert timing.split([], 3) is None


class FakeCupti:
    """Two kernels a call, of 1 us and of 3 us plus a hundredth a call."""

    calls = 0

    def kernels_of(self, run):
        self.calls = 0
        run()
        pairs = ([("a", 1e-3), ("b", 3e-3 + 1e-5 * n)] for n in range(self.calls))
        return list(itertools.chain(*pairs))


class FakeProgram:
    num_sets, judged = 2, True

    def __init__(self, cupti, span_us):
        self.cupti, self._span_us = cupti, span_us

    def __call__(self, i):
        self.cupti.calls += 1

    def wait(self, out):
        pass

    def span_us(self, calls):
        return self._span_us


def test_a_time_is_the_median_over_rounds_of_all_sets(monkeypatch):
    ruler, cupti = timing.Ruler(0.0, 0.0), FakeCupti()
    monkeypatch.setattr(timing, "kernels_of", cupti.kernels_of)
    ruler.reads_kernels = True
    got = ruler.measure(FakeProgram(cupti, 5.0))
    # Rounds of two calls: means of calls 0, 1; 2, 3; ... 8, 9. The third round is the median.
    assert (got.method, got.launches, got.rounds, got.sets) == ("cupti", 2, 5, 2)
    assert got.us == pytest.approx(4.045)
    assert (got.us_min, got.us_max) == (pytest.approx(4.005), pytest.approx(4.085))
    assert [name for name, _ in got.kernels or []] == ["a", "b"]
    assert got.span_us == 5.0


@pytest.mark.parametrize(("span_us", "trusted"), [(4.1, True), (8.0, False)])
def test_cupti_is_used_where_both_rulers_agree(monkeypatch, span_us, trusted):
    cupti = FakeCupti()
    monkeypatch.setattr(timing, "kernels_of", cupti.kernels_of)
    ruler = timing.Ruler(0.0, 0.0)
    ruler.calibrate(FakeProgram(cupti, span_us))
    assert ruler.reads_kernels == trusted
    if not trusted:
        got = ruler.measure(FakeProgram(cupti, span_us))
        assert (got.method, got.us, got.launches) == ("difference", span_us, None)


def test_kernels_are_those_of_a_gpus_streams():
    """A CPU has none, and the trace is read."""
    x = jnp.ones(8)
    assert timing.kernels_of(lambda: jax.block_until_ready(x + 1)) == []


def test_a_difference_leaves_out_what_every_run_pays(monkeypatch):
    """A clock that advances 10 us a call, and 500 us a wait."""
    now = 0.0

    class Slow(timing.JaxProgram):
        def __init__(self):
            pass

        def __call__(self, i):
            nonlocal now
            now += 10e-6

        def wait(self, out):
            nonlocal now
            now += 500e-6

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    assert Slow().span_us(7) == pytest.approx(10.0)


# ---- Tiles ----


@dataclass(frozen=True)
class Inner:
    k: int


@dataclass(frozen=True)
class Tile:
    m: int
    inner: Inner


def test_search_keeps_the_best_of_each_field():
    def cost(tile):
        return abs(tile.m - 32) + abs(tile.inner.k - 3) if tile.m < 100 else math.inf

    axes = {"m": (8, 16, 32, 128), "inner.k": (1, 3, 5)}
    tried = list(sweep.search(Tile(16, Inner(1)), axes, cost))
    assert tried[0] == (Tile(16, Inner(1)), 18)
    assert min(tried, key=lambda pair: pair[1]) == (Tile(32, Inner(3)), 0)
    assert len(tried) == len({tile for tile, _ in tried}) == 1 + 3 + 2


@pytest.mark.parametrize("op", sweep.AXES)
def test_axes_are_fields_of_the_kernels_tiles(op):
    for case in all_cases(Sizes()):
        if case.op != op:
            continue
        tile = sweep.chosen(case)
        for field, values in sweep.AXES[op].items() if not case.shape.latent else ():
            assert sweep.replaced(tile, field, values[0]) is not None
        assert str(tile)
