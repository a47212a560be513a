"""Routes of drawn cases, and their check against the three ops that they consist of."""

from contextlib import nullcontext
from functools import cache, partial
from typing import NamedTuple

import jax
import mosaic as interpreter
import numpy as np

from pallas_kernels import routing
from pallas_kernels.backend import batched_only, references_only
from pallas_kernels.routing.tile_map import COUNT, TileMap
from pallas_kernels.routing.values import Gating


class Case(NamedTuple):
    """Arguments of `route` that are arrays."""

    logits: np.ndarray
    groups: np.ndarray
    slots: np.ndarray
    threshold_percent: np.ndarray
    strategy: np.ndarray
    valid: np.ndarray
    exempt: np.ndarray
    bias: np.ndarray | None = None


class Static(NamedTuple):
    """Arguments of `route` that are not; `united` experts beside those in the logits."""

    rows: int = 20
    experts: int = 12
    united: int = 6
    top_k: int = 4
    normalize: bool = True
    scoring: str = "softmax"
    block_m: int = 8
    padding: int = 0  # columns of logits that are no experts
    tiles: routing.RowTiles | None = None
    bias: bool = False
    grouping: routing.Grouping | None = None
    scale: float = 1.0
    jitter: float = 0.0

    def of_gate(self):
        keys = ("top_k", "normalize", "scoring", "grouping", "scale", "jitter")
        return {key: getattr(self, key) for key in keys}

    def options(self):
        keys = (*self.of_gate(), "block_m", "tiles")
        return {key: getattr(self, key) for key in keys} | {"max_active": self.experts}


def draw(seed, static, strategy):
    """Draws flat and skewed logits, ties of every kind, padding, exempt rows, groups with and
    without.
    """
    rng = np.random.default_rng(seed)
    m, rows = static.experts, static.rows
    logits = rng.normal(size=(rows, m)) + rng.choice([0, 1, 4]) * rng.normal(size=m)
    if seed % 3 == 0:
        logits = np.round(logits * rng.choice([0.0, 0.5, 2.0]))  # -0.0 among them
    by_score = static.bias or (static.grouping and static.grouping.best > 1)
    if by_score:  # where what should not be a tie is none by rounding either
        logits = np.clip(np.abs(logits) if seed % 3 == 0 else logits, -8, 8)
    if seed % 4 == 3:
        logits[rng.random(logits.shape) < 0.1] = rng.choice([np.nan, -np.inf])
        logits[rng.integers(rows)] = np.nan
    more = np.where(rng.random((rows, static.padding)) < 0.5, np.inf, np.nan)
    logits = np.concatenate([logits, more], axis=1)
    groups = rng.integers(0, max(static.united, 1), m)
    groups = np.where(rng.random(m) < rng.choice([0, 0, 0.3, 1]), -1, groups)
    groups = groups if static.united else np.full(m, -1)
    case = Case(
        logits.astype(np.float32),
        groups.astype(np.int32),
        rng.permutation(2 * (m + static.united))[: m + static.united].astype(np.int32),
        np.int32(rng.choice([0, 100, rng.integers(0, 101)])),
        np.int32(strategy),
        rng.random(rows) >= rng.choice([0, 0, 0.2, 0.9, 1], p=[0.3, 0.3, 0.2, 0.15, 0.05]),
        rng.random(rows) < rng.choice([0, 0, 0.3]),
    )
    if not static.bias:
        return case
    bias = rng.integers(0, 2, m) * 4 if seed % 3 == 0 else rng.normal(size=m)
    return case._replace(bias=bias.astype(np.float32))


@cache
def compiled(name, static):
    """Returns the compiled route of one shape: public, batched, or the kernel's, interpreted or
    emulated.
    """
    arrays = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), draw(0, static, 0))

    op = kernel_of(static, name) if name in ("mosaic", "sm90") else routing.route
    return jax.jit(partial(routed, op, static)).lower(arrays).compile()


def routed(op, static, case):
    """Runs `op` on a case."""
    logits, *rest = case
    return op(logits, **dict(zip(Case._fields[1:], rest, strict=True)), **static.options())


def kernel_of(static, name="mosaic"):
    """Returns the kernel as `route`, whatever the backend; `mosaic` is interpreted."""
    from pallas_kernels.routing import mosaic

    interpreted = name == "mosaic" and not interpreter.ON_SM90
    blocks = routing.max_blocks(static.rows * static.top_k, static.experts, static.block_m)

    def op(logits, *, max_active, groups, slots, bias, **rest):
        gating = Gating(**{key: rest.pop(key) for key in static.of_gate()})
        assert mosaic.supports(logits, groups, slots, gating, static.block_m, bias)
        more = {"groups": groups, "slots": slots, "num_blocks": blocks, "interpreted": interpreted}
        return mosaic.route(logits, gating, bias=bias, **more, **rest)

    return op


def route_by_parts(case, static):
    """Routes a case by the three public ops."""
    with references_only():
        weights, ids = routing.gate(
            case.logits[:, : static.experts], bias=case.bias, **static.of_gate()
        )
        plan = routing.brownout_plan(
            ids,
            weights,
            scale=static.scale,
            groups=case.groups,
            threshold_percent=case.threshold_percent,
            strategy=case.strategy,
            valid=case.valid,
            exempt=case.exempt,
        )
        work = routing.dispatch(
            plan.expert_ids,
            weights,
            case.slots,
            block_m=static.block_m,
            max_active=static.experts,
        )
        if static.tiles is not None:
            table = routing.map_tiles(work, static.tiles)
            work = work._replace(tile_map=TileMap(table, static.tiles))
    return ids, plan, work


by_parts = jax.jit(route_by_parts, static_argnums=1)


def check_route(name, static, cases, rtol=1e-6):
    """Checks that routes equal those of the parts bit for bit, but for weights (`rtol`), and that
    each visit is dispatched once.
    """
    for case in cases:
        want = jax.tree.map(np.asarray, by_parts(jax.device_put(case), static))
        with CONTEXTS[name]():
            got = compiled(name, static)(jax.device_put(case))
            got = jax.tree.map(np.asarray, jax.block_until_ready(got))
        weights = [out[2].visit_weight for out in (got, want)]
        np.testing.assert_allclose(*weights, rtol=rtol, atol=1e-12)
        work = check_tiles(got[2], want[2])._replace(visit_weight=weights[1])
        got = (*got[:2], work)
        jax.tree.map(np.testing.assert_array_equal, got, want)
        types = [[leaf.dtype for leaf in jax.tree.leaves(out)] for out in (got, want)]
        assert types[0] == types[1]


def check_tiles(got, want):
    """Checks that tile maps are equal where there are tiles, and in their number. Returns `got`
    with the wanted map.
    """
    if want.tile_map is None:
        assert got.tile_map is None
        return got
    assert got.tile_map.tiles == want.tile_map.tiles
    a, b = got.tile_map.table, want.tile_map.table
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    count = b[0, COUNT]
    assert count == (-(-want.expert_rows // want.tile_map.tiles.rows)).sum()
    assert a[0, COUNT] == count
    np.testing.assert_array_equal(a[:count, :COUNT], b[:count, :COUNT])
    return got._replace(tile_map=want.tile_map)


CONTEXTS = {
    "public": nullcontext,
    "batched": batched_only,
    "mosaic": interpreter.interpreted,
    "sm90": interpreter.emulated,
}
ONE, MORE = routing.RowTiles(64, 16), routing.RowTiles(8, 2)  # tiles an expert
