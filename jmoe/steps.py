"""Step programs as pure functions: one prefill or one decode step over the paged cache.

A step reads weights and updates a `State` that its caller donates. Everything a
step needs from the host travels in a few small int32 arrays, so that a call has few
arguments; floats ride in them as bits. Letters as in `jmoe.model`; S sequence slots, M pages a
sequence, of all groups of layers (`jmoe.attention.step_attention`).
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jmoe.attention import StepRows, make_cache, page_windows, step_attention
from jmoe.brownout import Control
from jmoe.config import ModelConfig
from jmoe.kv_cache import CacheSizes
from jmoe.model import StepData, embed, head, no_stats, run_between, run_layers, unstack
from jmoe.moe import Balance, LayerStats, RoutedRows
from jmoe.packed_rows import (
    DELTA_BLOCK,
    DELTA_PAGE,
    DELTA_SLOT,
    EXEMPT,
    FIRST_LAYER,
    KV_LEN,
    NEXT_TOKEN,
    Q_LEN,
    REFUSES,
    SEED,
    SLOT,
    STOP_LAYER,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TOP_PROMPT,
)
from jmoe.parallel.replicas import Replication
from jmoe.sampling import Sampling, Scored, greedy, sample, score_prompts
from jmoe.shaping import Drawn, Shaping, draw
from jmoe.weights import Params, Weights
from pallas_kernels.backend import backend, batched


def served(params: Params, *, eager: bool = False) -> tuple[Params, dict[str, str]]:
    """Returns weights and XLA's options for a server's step programs.

    On a GPU a step is one CUDA graph, for which layers are in arrays of their own. `eager` scans
    them, and makes no graph at all.
    """
    if batched() and backend() != "cpu" and not eager:
        return unstack(params), compiler_options("graph")
    return params, compiler_options("eager" if eager else "scan")


def compiler_options(layers: Literal["scan", "graph", "eager"] = "scan") -> dict[str, str]:
    """Returns XLA's options for step programs: none on a CPU.

    `graph` is for unstacked layers: slices of small arrays are not to go into launches of a kind
    that XLA puts into no graph. See `served`.

    Weights and pages are meant to fill a GPU. Where arguments take more than 80 % of its memory,
    XLA computes things again in every layer so as to save some, whole products among them, though
    all that a step needs beside its arguments is some 200 MiB, and none of that is saved.

    Over a mesh, both arrays of the experts that are copied travel at once, under the same products.
    """
    if backend() == "cpu":
        return {}
    own = {
        "scan": {},
        "graph": {"xla_gpu_enable_dynamic_slice_fusion": "False"},
        "eager": {"xla_gpu_enable_command_buffer": ""},
    }
    return {
        "xla_disable_hlo_passes": "rematerialization",
        "xla_gpu_experimental_parallel_collective_overlap_limit": "2",
        **own[layers],
    }


class State(NamedTuple):
    """What lives on the device between steps. Donated to each step, returned by it."""

    pages: Any  # `KVPages` of the layers, or what `jmoe.attention.make_cache` makes of others
    block_table: Int[Array, "S M"]  # page of each block of each sequence slot
    last_token: Int[Array, "S"]  # newest sampled token of each slot: the next decode step's input
    hidden: Float[Array, "R d"] | None = None
    """Rows of steps that are between two layers, where steps run in parts: a decode row at its
    slot, rows of prefill steps where the host says.
    """


class StepOutput(NamedTuple):
    """The output of a step. B is decode rows, or sequences of a prefill step.

    Tokens are greedy; `sample_step` replaces them where a row wants others. The host reads all but
    logits and hidden rows, which stay on the device for it and for `score_step`.
    """

    tokens: Int[Array, "B"] | None  # None: the program ends before the last layer
    logprobs: Float[Array, "B"] | None
    degraded: Int[Array, "B"]  # degraded expert visits of the row or chunk
    expert_rows: Int[Array, "layers E"]
    """Rows computed by MoE layer (of its own) and expert: of a mixed step, by column."""
    logits: Float[Array, "B V"] | None = None
    hidden: Float[Array, "T d"] | None = None  # rows after the last layer, where they are kept
    prompt_logprobs: Float[Array, "T 2"] | None = None  # by `score_step`
    balance: Balance | None = None  # [layers], where experts are copied over a mesh meanwhile
    needed: Int[Array, "layers m"] | None = None  # as in LayerStats
    top_ids: Int[Array, "B TOP"] | None = None  # by `draw_step`, where rows are shaped
    top_logprobs: Float[Array, "B TOP"] | None = None
    wrong: Int[Array, "layers"] | None = None  # as in LayerStats
    prompt_top_ids: Int[Array, "T PROMPT_TOP"] | None = None  # by `score_step`
    prompt_top_logprobs: Float[Array, "T PROMPT_TOP"] | None = None


def make_state(
    cfg: ModelConfig,
    *,
    num_slots: int,
    num_pages: int | tuple[int, ...],
    page_size: int,
    max_blocks: int,
    dtype: Any,
    num_hidden: int = 0,
) -> State:
    """Returns an empty state: zeroed pages and tokens, and block tables that list the padding page,
    where rows of slots that own nothing may meet. `num_pages` of each group of layers, or of all
    alike; `num_hidden` 0: steps run whole.
    """
    if isinstance(num_pages, int):
        num_pages = (num_pages,) * len(page_windows(cfg))
    sizes = CacheSizes(num_pages[0], page_size, num_slots, max_blocks, dtype)
    padding = jnp.tile(jnp.array(num_pages, jnp.int32), max_blocks)
    return State(
        make_cache(cfg, sizes, num_pages),
        jnp.broadcast_to(padding, (num_slots, *padding.shape)),
        jnp.zeros(num_slots, jnp.int32),
        jnp.zeros((num_hidden, cfg.d_model), dtype) if num_hidden else None,
    )


def _sampling(rows: Int[Array, "B C"]) -> Sampling:
    return Sampling(
        lax.bitcast_convert_type(rows[:, TEMPERATURE], jnp.float32),
        rows[:, TOP_K],
        lax.bitcast_convert_type(rows[:, TOP_P], jnp.float32),
        lax.bitcast_convert_type(rows[:, SEED], jnp.uint32),
    )


def with_deltas(state: State, deltas: Int[Array, "N 3"], layers: range | None = None) -> State:
    """Returns the state with updated block tables before a step's first part; later parts get no
    deltas.
    """
    if layers is not None and layers.start:
        return state
    slot, table = deltas[:, DELTA_SLOT], state.block_table
    at = jnp.where(slot < 0, table.shape[0], slot), deltas[:, DELTA_BLOCK]  # out of range: dropped
    return state._replace(block_table=table.at[at].set(deltas[:, DELTA_PAGE], mode="drop"))


def decode_step(
    cfg: ModelConfig,
    weights: Weights,
    state: State,
    rows: Int[Array, "B C"],
    deltas: Int[Array, "N 3"],
    control: Int[Array, "controls"],
    *,
    max_active: int,
    layers: range | None = None,
) -> tuple[State, StepOutput]:
    """Runs one token for each row: the newest token of its slot goes in, the next one comes out.

    `rows` are packed by `pack_row`, `control` is (threshold percent, strategy code, first layer,
    layer to stop at). `max_active` (static) is the bucket's capacity in experts a layer; the caller
    guarantees it.

    Where the state has room for hidden rows the step may run in parts, one call each (QLLM, section
    4.2): rows wait there, deltas are given to the first part, and tokens come of the last. Between
    two parts rows may leave, and those of another step that has come as far may join. Without room
    all layers run, and control needs no layers.

    `layers` (static) are those of this program, whatever control says: a program for each part,
    where a loop whose length the device reads would hold up its host.
    """
    state = with_deltas(state, deltas, layers)
    slot, step = decode_data(cfg, state, rows, control)
    part = _Part(cfg, weights, state, control, max_active, _layers(cfg, state, layers))
    x, state, stats = part.run(lambda: state.last_token[slot], step, slot, step.rows.valid)
    degraded = jnp.sum(stats.degraded, axis=0, dtype=jnp.int32)
    return part.sample(x, rows, state, degraded, stats)


def decode_data(
    cfg: ModelConfig, state: State, rows: Int[Array, "B C"], control: Int[Array, "controls"]
) -> tuple[Int[Array, "B"], StepData]:
    """Returns the sequence slots of a decode step's rows, 0 for padding, and what its layers need
    of them.
    """
    valid = rows[:, SLOT] >= 0
    slot = jnp.where(valid, rows[:, SLOT], 0)
    kv_len = jnp.where(valid, rows[:, KV_LEN], 0)
    position = jnp.maximum(kv_len - 1, 0)
    step_rows = StepRows(state.block_table, slot, position, valid, slot, kv_len)
    return slot, _step_data(cfg, state, step_rows, rows[:, EXEMPT], control)


def prefill_data(
    cfg: ModelConfig,
    state: State,
    num_tokens: int,
    rows: Int[Array, "B C"],
    control: Int[Array, "controls"],
    num_decodes: int = 0,
) -> tuple[Int[Array, "T"], Int[Array, "B+1"], StepData]:
    """Returns the chunk that each row of a prefill step belongs to, where chunks begin, and what
    the step's layers need of its rows. `num_decodes` as of `prefill_step`.
    """
    num_chunks = rows.shape[0]
    q_start = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(rows[:, Q_LEN])])
    index = jnp.arange(num_tokens, dtype=jnp.int32)
    # Chunks that end at or before a row; a binary search would be a loop of small kernels.
    owner = jnp.sum(q_start[None, 1:] <= index[:, None], axis=1, dtype=jnp.int32)
    valid = owner < num_chunks
    owner = jnp.minimum(owner, num_chunks - 1)
    slots = jnp.maximum(rows[:, SLOT], 0)
    first_position = rows[:, KV_LEN] - rows[:, Q_LEN]
    position = jnp.where(valid, first_position[owner] + index - q_start[owner], 0)
    step_rows = StepRows(
        state.block_table,
        slots[owner],
        position,
        valid,
        slots,
        rows[:, KV_LEN],
        q_start,
        num_decodes,
    )
    return owner, q_start, _step_data(cfg, state, step_rows, rows[owner, EXEMPT], control)


def _step_data(
    cfg: ModelConfig,
    state: State,
    at: StepRows,
    exempt: Int[Array, "T"],
    control: Int[Array, "controls"],
) -> StepData:
    rows = RoutedRows(at.position, at.valid, exempt > 0, exempt >= REFUSES)
    attention = step_attention(cfg, state.pages, at)
    return StepData(rows, attention, Control(control[0], control[1]))


def _layers(cfg: ModelConfig, state: State, layers: range | None) -> range | None:
    """Returns the layers of a part of a step; without room for hidden rows, all of them."""
    return range(cfg.num_layers) if layers is None and state.hidden is None else layers


class _Part(NamedTuple):
    """What one call runs of a step: layers, and what is before the first and after the last."""

    cfg: ModelConfig
    weights: Weights
    state: State
    control: Int[Array, "controls"]
    max_active: int
    layers: range | None  # None: those that control says
    replication: Replication | None = None

    def run(
        self,
        tokens: Callable[[], Int[Array, "T"]],
        step: StepData,
        places: Int[Array, "T"] | None,
        valid: Bool[Array, "T"],
    ) -> tuple[Float[Array, "T d"], State, LayerStats]:
        """Runs the layers; rows wait at `places` of the state's hidden rows."""
        x, pages, stats = self._run_layers(self._enter(tokens, places), step)
        state = self.state._replace(pages=pages)
        if self.layers is None or self.layers.stop < self.cfg.num_layers:
            assert state.hidden is not None
            assert places is not None
            places = jnp.where(valid, places, state.hidden.shape[0])  # out of range: dropped
            state = state._replace(hidden=state.hidden.at[places].set(x, mode="drop"))
        return x, state, stats

    def _enter(
        self, tokens: Callable[[], Int[Array, "T"]], places: Int[Array, "T"] | None
    ) -> Float[Array, "T d"]:
        """Returns the rows before the layers: embeddings, or the rows that wait."""
        if self.layers is not None and not self.layers.start:
            return embed(self.cfg, self.weights.params, tokens())
        hidden = self.state.hidden
        assert hidden is not None
        if self.layers is not None:
            return hidden.at[places].get()
        given = tokens()
        return lax.cond(
            self.control[FIRST_LAYER] == 0,
            lambda: embed(self.cfg, self.weights.params, given),
            lambda: hidden.at[places].get(),
        )

    def _run_layers(
        self, x: Float[Array, "T d"], step: StepData
    ) -> tuple[Float[Array, "T d"], Any, LayerStats]:
        cfg, weights, pages = self.cfg, self.weights, self.state.pages
        given: dict[str, Any] = {"max_active": self.max_active, "replication": self.replication}
        if self.layers is None:
            first, stop = self.control[FIRST_LAYER], self.control[STOP_LAYER]
            return run_between(cfg, weights, x, pages, step, first, stop, **given)
        halves = range(2 * self.layers.start, 2 * self.layers.stop)
        x, pages, stats = run_layers(cfg, weights, x, pages, step, halves=halves, **given)
        if stats is None:  # dense layers alone
            stats = no_stats(cfg, weights, x.shape[0], 0)
        return x, pages, stats

    def sample(
        self,
        last: Float[Array, "B d"],
        rows: Int[Array, "B C"],
        state: State,
        degraded: Int[Array, "B"],
        stats: LayerStats,
    ) -> tuple[State, StepOutput]:
        """Returns the greedy tokens of the rows that a token comes of, once the last layer has
        run.
        """

        def tokens_of() -> tuple[Array, Array, Array]:
            logits = head(self.cfg, self.weights.params, last)
            return *greedy(logits), logits

        out = StepOutput(
            None,
            None,
            degraded,
            stats.expert_rows,
            balance=stats.balance,
            needed=stats.needed,
            wrong=stats.wrong,
        )
        slot = rows[:, SLOT]
        if self.layers is None:
            over = self.control[STOP_LAYER] == self.cfg.num_layers
            shapes = jax.eval_shape(tokens_of)
            tokens, logprobs, logits = lax.cond(
                over, tokens_of, lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
            )
            slot = jnp.where(over, slot, -1)
        elif self.layers.stop == self.cfg.num_layers:
            tokens, logprobs, logits = tokens_of()
        else:
            return state, out
        state = state._replace(last_token=remember(state.last_token, slot, tokens))
        return state, out._replace(tokens=tokens, logprobs=logprobs, logits=logits)


def sample_step(
    last_token: Int[Array, "S"],
    logits: Float[Array, "B V"],
    rows: Int[Array, "B C"],
    *,
    truncate: bool | None,
) -> tuple[Int[Array, "S"], Int[Array, "B"], Float[Array, "B"]]:
    """Samples tokens after a step whose rows want that; greedy rows keep theirs.

    Args:
        last_token: of the state after the step. Donate it.
        logits: of the step's output.
        rows: of the step.
        truncate: whether any row uses top-k or top-p; without them there is nothing to sort. None
            finds out on the device: one program where there would be two.

    Returns the state's newest tokens, and what replaces the output's tokens and log-probabilities.
    """
    sampling = _sampling(rows)
    wanted = _truncates(sampling) if truncate is None else truncate
    tokens, logprobs = sample(logits, sampling, rows[:, KV_LEN], truncate=wanted)
    return remember(last_token, rows[:, SLOT], tokens), tokens, logprobs


def draw_step(
    last_token: Int[Array, "S"],
    shaping: Shaping,
    logits: Float[Array, "B V"],
    rows: Int[Array, "B C"],
    shapes: Int[Array, "B shape"],
    allowed: Int[Array, "B W"],
    *,
    truncate: bool | None,
) -> tuple[Int[Array, "S"], Shaping, Drawn]:
    """Runs `sample_step` for rows whose logits are changed (`jmoe.shaping.draw`). Donate the first
    two.

    `allowed` may be known later than anything else: the step before has to be read for it, which
    the device can do without until here.
    """
    sampling, slots = _sampling(rows), rows[:, SLOT]
    wanted = _truncates(sampling) if truncate is None else truncate
    shaping, drawn = draw(
        shaping, logits, sampling, rows[:, KV_LEN], slots, shapes, allowed, truncate=wanted
    )
    return remember(last_token, slots, drawn.tokens), shaping, drawn


def _truncates(sampling: Sampling) -> Bool[Array, ""]:
    return jnp.any((sampling.top_k > 0) | (sampling.top_p < 1))


SCORED_ROWS = 1024
"""Rows whose logits `score_step` has at a time: of a large step's, all at once take gigabytes."""


def score_step(
    cfg: ModelConfig,
    params: Params,
    hidden: Float[Array, "T d"],
    tokens: Int[Array, "T"],
    rows: Int[Array, "B C"],
) -> Scored:
    """Returns the log-probability of the token that follows each one in its prompt, after a prefill
    step, and, if any row asks for them, the likeliest tokens there (`score_prompts`).

    `hidden` is of the step's output, `tokens` and `rows` are the step's; at a chunk's end the row's
    NEXT_TOKEN follows. What padding gets means nothing.
    """
    end = jnp.cumsum(rows[:, Q_LEN], dtype=jnp.int32) - 1
    end = jnp.where(rows[:, Q_LEN] > 0, end, tokens.shape[0])  # padding rows: dropped
    following = jnp.roll(tokens, -1).at[end].set(rows[:, NEXT_TOKEN], mode="drop")
    top = jnp.any(rows[:, TOP_PROMPT] > 0)
    num_tokens, width = hidden.shape
    if num_tokens <= SCORED_ROWS or num_tokens % SCORED_ROWS:
        return score_prompts(head(cfg, params, hidden), following, top)
    parts = hidden.reshape(-1, SCORED_ROWS, width), following.reshape(-1, SCORED_ROWS)
    found = lax.map(lambda part: score_prompts(head(cfg, params, part[0]), part[1], top), parts)
    return jax.tree.map(lambda each: each.reshape(num_tokens, -1), found)


def remember(
    last: Int[Array, "S"], slot: Int[Array, "B"], tokens: Int[Array, "B"]
) -> Int[Array, "S"]:
    """Stores the newest tokens of slots, where rows have sampled; a row of slot -1 has none."""
    return last.at[jnp.where(slot < 0, last.shape[0], slot)].set(tokens, mode="drop")


def prefill_step(
    cfg: ModelConfig,
    weights: Weights,
    state: State,
    tokens: Int[Array, "T"],
    rows: Int[Array, "B C"],
    deltas: Int[Array, "N 3"],
    control: Int[Array, "controls"],
    places: Int[Array, "T"] | None = None,
    *,
    max_active: int,
    keep_hidden: bool = False,
    layers: range | None = None,
    replication: Replication | None = None,
    num_decodes: int = 0,
) -> tuple[State, StepOutput]:
    """Runs chunks of prompts, packed one after another into `tokens`; row b owns its `q_len` next
    ones.

    A hybrid step decodes beside them (Sarathi-Serve, arXiv 2403.02310, section 4.1): of its rows,
    the first `num_decodes` (static) are those of a decode step, padding last. Each real one owns
    one of `tokens`, -1, which stands for the newest token of its slot.

    A token comes of the last row of every chunk; the host uses it where the chunk ends its prompt.
    `keep_hidden` (static) returns rows after the last layer, for `score_step`. For parts of a step
    see `decode_step`; `places` says where in the state's hidden rows each token's row waits then.
    `replication` (static): over a mesh, how each layer copies experts for the next one.
    """
    state = with_deltas(state, deltas, layers)
    owner, q_start, step = prefill_data(cfg, state, tokens.shape[0], rows, control, num_decodes)
    valid = step.rows.valid
    if num_decodes:
        newest = state.last_token[jnp.maximum(rows[owner, SLOT], 0)]
        tokens = jnp.where(tokens < 0, newest, tokens)
    layers = _layers(cfg, state, layers)
    part = _Part(cfg, weights, state, control, max_active, layers, replication)
    x, state, stats = part.run(lambda: tokens, step, places, valid)
    last = jnp.maximum(q_start[1:] - 1, 0)
    by_row = jnp.sum(stats.degraded, axis=0, dtype=jnp.int32)
    chunk = jnp.where(valid, owner, rows.shape[0])  # of padding: dropped
    degraded = jnp.zeros(rows.shape[0], jnp.int32).at[chunk].add(by_row, mode="drop")
    state, out = part.sample(x[last], rows, state, degraded, stats)
    return state, out._replace(hidden=x) if keep_hidden else out
