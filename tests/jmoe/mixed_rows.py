"""Rows and state of a mixed decode step."""

import jax
import jax.numpy as jnp
import numpy as np

from jmoe.attention import page_windows
from jmoe.brownout import strategy_code
from jmoe.packed_rows import empty_rows, pack_row
from jmoe.steps import make_state

SLOTS, ROWS, PAGE, BLOCKS = 12, 4, 4, 4


def random_state(cfg):
    """Returns a state with pages of noise, each slot's own, and other newest tokens."""
    state = make_state(
        cfg,
        num_slots=SLOTS,
        num_pages=SLOTS * BLOCKS,
        page_size=PAGE,
        max_blocks=BLOCKS,
        dtype=jnp.dtype(jnp.float32),
    )
    rng = np.random.default_rng(0)

    def noise(leaf):
        return jnp.asarray(rng.standard_normal(leaf.shape), jnp.float32)

    table = np.arange(SLOTS * BLOCKS, dtype=np.int32).reshape(SLOTS, BLOCKS)
    table = np.repeat(table, len(page_windows(cfg)), axis=1)
    return state._replace(
        pages=jax.tree.map(noise, state.pages),
        block_table=jnp.asarray(table),
        last_token=jnp.asarray(rng.integers(1, cfg.vocab_size, SLOTS), jnp.int32),
    )


def rows_of(counts, exempt=()):
    """Returns packed rows, a segment for each count; slots are numbered consecutively, some rows
    are exempt.
    """
    rows, slot = empty_rows(ROWS * len(counts)), 0
    for segment, count in enumerate(counts):
        for at in range(count):
            kv_len = 3 + 5 * slot % 12
            exempt_row = slot in exempt
            rows[ROWS * segment + at] = pack_row(slot, kv_len=kv_len, exempt=exempt_row)
            slot += 1
    return rows


def control(strategy="zero", percent=100):
    return np.array([percent, strategy_code(strategy), 0, 0], np.int32)
