"""Contract of prefill attention on ragged chunks with cached prefixes, against dense float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from prefill_contract import IMPLEMENTATIONS, check

from pallas_kernels.prefill_attention import latent, mosaic

# The references are held to float64; a kernel's PTX is the same, however XLA is told to compile.
pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")


implementations = pytest.mark.parametrize("impl", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
in_jax = pytest.mark.parametrize(  # what concerns the order of chunks, not of instructions
    "impl",
    [IMPLEMENTATIONS[name] for name in ("public", "native", "batched", "mosaic")],
    ids=["public", "native", "batched", "mosaic"],
)


def cases(field):
    """Returns every implementation with each of its own values of `field`."""
    return [
        pytest.param(
            impl,
            value,
            id=f"{name}-{getattr(value, 'name', value)}",
        )
        for name, impl in IMPLEMENTATIONS.items()
        for value in getattr(impl, field)
    ]


@pytest.mark.sized(deep=("mosaic-3:1",))
@pytest.mark.parametrize(("impl", "shape"), cases("shapes"))
def test_query_heads_share_kv_heads(impl, shape):
    check(impl, [(0, 5), (3, 2), (0, 1)], shape)


@pytest.mark.parametrize(("impl", "page_size"), cases("page_sizes"))
def test_ragged_chunks_with_cached_prefixes(impl, page_size):
    chunks = [(0, page_size), (page_size, 3), (2 * page_size - 1, 2), (130, 1)]
    check(impl, chunks, page_size=page_size)


@pytest.mark.parametrize(("impl", "new"), cases("lengths"))
def test_chunks_longer_than_a_tile_of_rows(impl, new):
    """The last tile of a chunk reaches into the next chunk's rows and must leave them alone."""
    check(impl, [(0, new), (5, new), (0, 3)])


@implementations
def test_empty_chunks(impl):
    check(impl, [(0, 0), (0, 4), (9, 0), (0, 0), (2, 3), (0, 0)])


@implementations
def test_no_rows_but_padding(impl):
    check(impl, [(0, 0), (4, 0)], padding=8)


@implementations
def test_rows_before_the_chunks_are_left_alone(impl):
    """Those that decode in a hybrid step, which read by themselves."""
    check(impl, [(0, 5), (60, 4), (6, 0), (3, 2)], before=13, unused=np.nan)


@pytest.mark.parametrize("name", ["mosaic-latent"])
def test_more_rows_before_the_chunks_than_a_tile_has_keys(name):
    """A row that decodes lies further before the first prompt's end than that prompt is long."""
    check(IMPLEMENTATIONS[name], [(0, 2), (70, 1)], before=200, padding=0, unused=np.nan)


def test_rows_before_the_chunks_read_no_latents():
    pages = jnp.zeros((1, 4, 1, 64, 192), jnp.bfloat16)
    plan = jax.jit(partial(latent.plan, 208, 16, window=0, latent=128))
    planned = plan(pages, q_start=np.array([200, 202, 203]), kv_len=np.array([2, 71]))
    assert planned.kv_len.tolist() == [0] * 200 + [1, 2, 71] + [0] * 5
    tiles = np.diff(planned.schedule.before)
    assert tiles.tolist() == [0] * 200 + [1, 1, 2] + [0] * 5


@pytest.mark.parametrize(("page_size", "taken"), [(16, True), (32, False), (64, True)])
def test_a_page_size_at_which_the_kernel_would_spill_registers_is_not_taken(page_size, taken):
    q, pages = (jnp.zeros(s, jnp.bfloat16) for s in ((8, 2, 256), (1, 4, 1, page_size, 256)))
    assert mosaic.supports(q, pages, pages, 1.0) == taken


@in_jax
def test_no_padding(impl):
    check(impl, [(0, 33), (1, 30)], padding=0)


@pytest.mark.parametrize(("impl", "unused"), cases("unused"))
def test_what_unused_rows_hold_does_not_matter(impl, unused):
    """They hold what another sequence left there, and that one may have overflowed."""
    check(impl, [(0, 5), (6, 0), (60, 4), (63, 2)], unused=unused)


@pytest.mark.sized(deep=[f"{window}-{name}" for window in (7, 64) for name in IMPLEMENTATIONS])
@implementations
@pytest.mark.parametrize("window", [33, 1, 7, 64, 1000])
def test_a_window_is_all_that_is_read(impl, window):
    chunks = [(0, 5), (6, 0), (300, 70), (63, 2), (0, 65), (window, 1)]
    check(impl, chunks, page_size=16, window=window, unused=np.nan)


@implementations
def test_a_sink_takes_weight_once_however_many_steps_a_row_sees(impl):
    """One a head, of both signs, larger and smaller than all scores."""
    chunks = [(0, 5), (6, 0), (130, 9), (63, 2)]
    check(impl, chunks, page_size=16, sinks=[-3.0, 1.5, 40.0, -60.0], unused=np.nan)


@pytest.mark.deep
@implementations
def test_a_sink_beside_a_window(impl):
    """Rows see nothing of the first step over keys, but have a sink."""
    chunks = [(0, 5), (190, 73)]
    check(impl, chunks, page_size=64, window=7, sinks=[-3.0, 1.5, 40.0], unused=np.nan)


@in_jax
def test_bfloat16_cache(impl):
    check(impl, [(0, 33), (17, 5)], page_size=16, dtype=jnp.bfloat16)


@in_jax
def test_chunked_equals_whole(impl):
    """Rows of a prompt fed in one piece, and those of the same prompt fed in three."""
    check(impl, [(0, 40), (0, 40), (0, 40)], padding=0)
    check(impl, [(0, 13), (13, 14), (27, 13)], padding=0)
