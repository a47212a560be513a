"""Random inputs of a case on the device, and how to judge what an op makes of them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels import cases, judge
from benchmarks.kernels.cases import Case, Count, Sizes
from benchmarks.kernels.inputs import DTYPE, LAYER, NUM_LAYERS, Pools, choices, normal, pages
from benchmarks.kernels.shapes import EXPANDED, QWEN3_30B_A3B, QWEN15_MOE_A27B
from pallas_kernels import grouped_gemm, routing
from pallas_kernels.backend import references_only
from pallas_kernels.kv_write import Projection, write_kv
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention import plan as plan_decode
from pallas_kernels.prefill_attention import expanded_attention, plan_expanded, prefill_attention

TOLERANCE = 1e-2
"""Relative Frobenius error against float32. bfloat16 operands and results cost about 3e-3."""

EPS = 1e-6  # of norms
WAY, THRESHOLD_PERCENT = 8, 50  # of the brownout plan in the routing case


@dataclass
class Problem:
    """A case with its inputs. `call(*sets[i])` is the op; the sets are all of one shape."""

    with_op: Callable[[Callable[..., Any]], Callable[..., Any]]  # `call`, of another version
    op: Callable[..., Any]  # the public one
    sets: list[tuple[Any, ...]]
    error: Callable[[Any], float]  # of what the op returned for set 0
    tolerance: float
    count: Count | None = None  # of a set, on average; None: microseconds are all there is to say
    carry: Any = None  # first argument of `call`, donated and returned
    facts: dict[str, Any] = field(default_factory=dict)  # kept with the figures
    data: Any = None  # for the libraries: the inputs, or the carry as it was

    @property
    def call(self) -> Callable[..., Any]:
        """The public op as a function of a set's arrays."""
        return self.with_op(self.op)


def build(case: Case, sizes: Sizes, seed: int, pools: Pools) -> Problem:
    """Draws the inputs of a case. `pools` keeps a model's weights from one case to the next."""
    rng = np.random.default_rng(seed)
    if case.op.startswith("grouped_gemm"):
        return _grouped_gemm(case, sizes, rng, pools)
    pools.drop()
    if case.phase == "prefill" and case.shape.latent and expands(case, sizes):
        return _expanded(case, sizes, rng)
    makers = {"routing": _routing, "kv_write": _kv_write}
    return makers.get(case.op, _attention)(case, sizes, rng)


def num_sets(bytes_of_one: float, sizes: Sizes) -> int:
    """Returns how many input sets are together well beyond the L2 cache; at least two."""
    return max(2, min(128, math.ceil(sizes.rotated_bytes / bytes_of_one)))


@dataclass
class MoeSet:
    """One input set of the grouped GEMM; `ids` index the experts of its `layer`."""

    x: jax.Array
    ids: np.ndarray
    weights: np.ndarray
    layer: int


def _grouped_gemm(case: Case, sizes: Sizes, rng: np.random.Generator, pools: Pools) -> Problem:
    shape, m = case.shape, case.shape.num_experts
    pool, itemsize = pools.of(shape, rng), cases.WEIGHT_BYTES[case.op]
    is_plain = itemsize == 2
    weights_of_all = (pool.gate_up, pool.down) if is_plain else pool.quantized(itemsize)
    likely = min(m, case.tokens * shape.top_k)
    sets, inputs, active = [], [], []

    @jax.jit
    def dispatch(*args):
        return routing.dispatch(*args, block_m=grouped_gemm.BLOCK_M, max_active=m)

    for i in range(num_sets(cases.count_moe_mlp(shape, likely, 0, itemsize).bytes, sizes)):
        layer = i % pool.num_layers
        ids = choices(rng, shape, case.tokens, case.skew)
        weights = rng.dirichlet(np.ones(shape.top_k), case.tokens).astype(np.float32)
        x = normal(rng, (case.tokens, shape.d_model))
        slots = layer * m + np.arange(m, dtype=np.int32)
        with references_only():  # the op is judged by itself
            plan = dispatch(*map(jnp.asarray, (ids, weights, slots)))
        sets.append((x, *weights_of_all, plan))
        inputs.append(MoeSet(x, ids, weights, layer))
        active.append(len(np.unique(ids)))
    rows = case.tokens * shape.top_k
    first = inputs[0]
    gates = np.zeros((case.tokens, m), np.float32)
    np.put_along_axis(gates, first.ids, first.weights, axis=1)
    busiest = int(np.bincount(first.ids.ravel()).max())
    gate_up, down = pool.layer(0) if is_plain else (judge.widened(w, m) for w in weights_of_all)
    return Problem(
        lambda op: op,
        grouped_gemm.moe_mlp,
        sets,
        lambda out: judge.relative_error(
            out, judge.all_experts(first.x, gate_up, down, jnp.asarray(gates))
        ),
        TOLERANCE,
        cases.count_moe_mlp(shape, round(float(np.mean(active))), rows, itemsize),
        facts={"rows": rows, "active_experts": active, "busiest_expert_rows": busiest},
        data=(inputs, pool),
    )


@dataclass
class AttentionSet:
    """One input set of an attention op; the sequences' pages are those of `table`."""

    q: jax.Array
    table: jax.Array


def _attention(case: Case, sizes: Sizes, rng: np.random.Generator) -> Problem:
    shape, chunks, size = case.shape, case.chunks(), sizes.page_size
    window = {"window": case.window}
    count = cases.count_attention(shape, chunks, **window)
    tables, num_pages = _tables(case, sizes, rng, count)
    cache = (NUM_LAYERS, num_pages, shape.kv_heads, size, shape.head_dim)
    k_pages = pages(rng, cache)
    v_pages = None if shape.latent else pages(rng, cache)
    of_latents = {"latent": shape.latent} if shape.latent else {}
    rows = sum(n for n, _ in chunks)
    inputs = [
        AttentionSet(normal(rng, (rows, shape.heads, shape.head_dim)), table) for table in tables
    ]
    rest, planned = {"layer": jnp.int32(LAYER), **_lengths(chunks)}, {}
    if case.phase == "decode":
        del rest["q_start"]
        of_step = {"kv_len": rest["kv_len"], **window, **of_latents}
        # Once a step, so that it is no layer's time.
        planned["todo"] = plan_decode(shape.heads, k_pages, **of_step)

    def with_op(op):
        def call(q, k_pages, v_pages, table, rest, planned):
            if op is not paged_attention:  # such as a tile that is tried: its plan is another
                planned = {}
            more = {**rest, **planned, **window, **of_latents}
            more["scale"] = shape.head_dim**-0.5
            return op(q, k_pages, v_pages, block_table=table, **more)

        return call

    first, keys = inputs[0], k_pages[LAYER]
    values = keys[..., : shape.latent] if v_pages is None else v_pages[LAYER]
    return Problem(
        with_op,
        paged_attention if case.phase == "decode" else prefill_attention,
        [(s.q, k_pages, v_pages, s.table, rest, planned) for s in inputs],
        lambda out: judge.relative_error(
            out, judge.attended(first.q, keys, values, first.table, **window)
        ),
        TOLERANCE,
        count,
        facts={"sequences": len(chunks), "pages": num_pages, "page_reads": tables.size},
        data=(inputs, k_pages, v_pages),
    )


def _lengths(chunks: list[tuple[int, int]]) -> dict[str, jax.Array]:
    rows, kv_len = zip(*chunks, strict=True)
    of_chunks = {"kv_len": kv_len, "q_start": np.cumsum([0, *rows])}
    return {name: jnp.asarray(each, jnp.int32) for name, each in of_chunks.items()}


def _tables(
    case: Case, sizes: Sizes, rng: np.random.Generator, count: Count
) -> tuple[jax.Array, int]:
    """Returns block tables [sets, sequences, pages], and the number of pages."""
    shape, num_sequences = case.shape, len(case.chunks())
    pages_each = -(-case.context // sizes.page_size)
    sets_wanted = num_sets(count.bytes, sizes)
    arrays = 1 if shape.latent else 2
    page_bytes = arrays * shape.kv_heads * sizes.page_size * shape.head_dim * 2
    wanted = sets_wanted * num_sequences * pages_each
    num_pages = min(wanted, max(pages_each, sizes.kv_bytes // page_bytes))
    rounds = -(-wanted // num_pages)
    picks = np.concatenate([rng.permutation(num_pages) for _ in range(rounds)])[:wanted]
    tables = jnp.asarray(picks.reshape(sets_wanted, num_sequences, pages_each), jnp.int32)
    return tables, num_pages


# ---- Latents that the kernel expands ----


def _plan_expanded(case: Case, latents: Any, q_start: jax.Array, kv_len: jax.Array) -> Any:
    of_head = {"rank": case.shape.latent, **EXPANDED._asdict()}
    chunks = {"q_start": q_start, "kv_len": kv_len}
    return plan_expanded(case.tokens, case.shape.heads, latents, **chunks, **of_head)


def expands(case: Case, sizes: Sizes) -> bool:
    """Returns whether a server expands the latents of such chunks."""
    shape, sequences = case.shape, len(case.chunks())
    latents = jax.ShapeDtypeStruct((1, 1, 1, sizes.page_size, shape.head_dim), DTYPE)
    starts, lengths = (jnp.zeros(n, jnp.int32) for n in (sequences + 1, sequences))
    return _plan_expanded(case, latents, starts, lengths) is not None


def _expanded(case: Case, sizes: Sizes, rng: np.random.Generator) -> Problem:
    shape, chunks = case.shape, case.chunks()
    count = cases.count_expanded(shape, chunks)
    tables, num_pages = _tables(case, sizes, rng, count)
    latents = pages(rng, (NUM_LAYERS, num_pages, 1, sizes.page_size, shape.head_dim))
    unturned, rank = EXPANDED.key - (shape.head_dim - shape.latent), shape.latent
    weights = tuple(
        normal(rng, (rank, shape.heads * each), rank**-0.5) for each in (unturned, EXPANDED.value)
    )
    inputs = [
        AttentionSet(normal(rng, (case.tokens, shape.heads, EXPANDED.key)), table)
        for table in tables
    ]
    rest = _lengths(chunks)

    def with_op(op):
        def call(q, weights, latents, table, rest):
            more = {**rest, "layer": jnp.int32(LAYER), "scale": EXPANDED.key**-0.5}
            todo = _plan_expanded(case, latents, **rest)
            return op(q, weights, latents, block_table=table, todo=todo, **more)

        return call

    first = inputs[0]
    return Problem(
        with_op,
        expanded_attention,
        [(s.q, weights, latents, s.table, rest) for s in inputs],
        lambda out: judge.relative_error(
            out, judge.expanded(first.q, weights, latents[LAYER], first.table)
        ),
        TOLERANCE,
        count,
        facts={"sequences": len(chunks), "pages": num_pages, "page_reads": tables.size},
    )


def _routing(case: Case, sizes: Sizes, rng: np.random.Generator) -> Problem:
    m, top_k = case.shape.num_experts, case.shape.top_k
    united = -(-m // WAY)
    valid = np.arange(case.tokens) < max(1, case.tokens - case.tokens // 16)  # padding at the end
    slots = jnp.asarray(rng.permutation(m + united), jnp.int32)
    brownout = {
        "groups": jnp.arange(m, dtype=jnp.int32) // WAY,
        "threshold_percent": jnp.int32(THRESHOLD_PERCENT),
        "strategy": jnp.int32(routing.PARTIAL),
        "valid": jnp.asarray(valid),
        "exempt": jnp.zeros(case.tokens, bool),
    }
    dispatched = {"block_m": grouped_gemm.BLOCK_M, "max_active": m}
    popularity = np.exp(-4 * rng.permutation(m) / m)
    logits = [
        jnp.asarray(rng.normal(size=(case.tokens, m)) + np.log(popularity), jnp.float32)
        for _ in range(4)
    ]

    def with_op(op):
        def call(logits, slots, brownout):
            picked = {"top_k": top_k, "normalize": True, "slots": slots}
            return op(logits, **picked, **brownout, **dispatched)

        return call

    sets = [(one, slots, brownout) for one in logits]
    error = judge.routing(sets[0], top_k)
    facts = {"strategy": "partial", "way": WAY, "threshold_percent": THRESHOLD_PERCENT}
    return Problem(with_op, routing.route, sets, error, 0.0, facts=facts)


def _kv_write(case: Case, sizes: Sizes, rng: np.random.Generator) -> Problem:
    """Makes rows as the model's product leaves them, before bias and norms."""
    shape, size, tokens = case.shape, sizes.page_size, case.tokens
    heads, dim = shape.heads + 2 * shape.kv_heads, shape.head_dim
    has_bias, has_norms = shape is QWEN15_MOE_A27B, shape is QWEN3_30B_A3B
    count = cases.count_kv_write(shape, tokens)
    wanted = num_sets(count.bytes, sizes)
    # Decode writes one row into each of many pages, prefill fills whole ones.
    in_page = 1 if case.phase == "decode" else size
    pages_each = -(-tokens // in_page)
    num_pages = 1 + pages_each * min(wanted, 16)  # the last is nobody's
    cache = (NUM_LAYERS, num_pages, shape.kv_heads, size, dim)
    before = normal(rng, cache), normal(rng, cache)
    more = {
        "bias": normal(rng, (heads, dim)) if has_bias else None,
        "norms": (normal(rng, (dim,)), normal(rng, (dim,))) if has_norms else None,
    }
    sets = []
    for _ in range(wanted):
        page = np.repeat(rng.permutation(num_pages - 1)[:pages_each], in_page)[:tokens]
        offset = np.arange(tokens) % size if in_page > 1 else rng.integers(size, size=tokens)
        angle = rng.uniform(0, 2 * np.pi, (tokens, dim // 2))
        turns = [jnp.asarray(turn(angle), jnp.float32) for turn in (np.cos, np.sin)]
        places = jnp.int32(LAYER), *(jnp.asarray(a, jnp.int32) for a in (page, offset))
        sets.append((normal(rng, (tokens, heads, dim)), turns, more, places))

    def with_op(op):
        def call(carry, rows, turns, more, places):
            norms = more["norms"] or (None, None)
            projection = Projection(rows, shape.kv_heads, *turns, more["bias"], *norms, eps=EPS)
            layer, page, offset = places
            queries, *new = op(projection, *carry[:2], layer=layer, page=page, offset=offset)
            return *new, queries

        return call

    rows, turns, _, places = sets[0]
    rows = rows.astype(jnp.float32)
    if has_bias:
        rows = rows + more["bias"].astype(jnp.float32)[None]
    heads_wanted = judge.finished_heads(rows, shape.kv_heads, *turns, more["norms"], EPS)
    carry = (*before, jnp.zeros((tokens, shape.heads, dim), DTYPE))
    return Problem(
        with_op,
        write_kv,
        sets,
        judge.kv_write(jax.tree.map(jnp.copy, before), heads_wanted, places),
        TOLERANCE,
        count,
        carry,
        facts={"pages": num_pages, "bias": has_bias, "norms": has_norms},
        data=jax.tree.map(jnp.copy, carry),
    )
