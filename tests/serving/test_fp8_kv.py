"""KV pages in eight bits, served: answers have the same bits alone, in company, cut into other
chunks, and behind a beginning that others left.
"""

import asyncio
import random

import pytest
from families import GOLDEN, settings_of
from notebook import Asked, answer

from serving.config import AuditConfig
from serving.engine import Engine
from serving.frontend.status import _facts
from serving.request import SamplingParams

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

ONE = GOLDEN.with_name("qwen3_moe_mixed_yarn")


@pytest.mark.deep
async def test_answers_have_the_same_bits_in_company_in_chunks_and_reused():
    """All steps are of one size, so that their products have the same bits."""
    given = {"max_num_seqs": 4, "max_prefill_seqs": 4, "part_layers": 4, "num_pages": 48}
    given |= {"model": str(ONE), "kv_cache_dtype": "fp8", "audit": AuditConfig(share=0)}
    config = settings_of({}, "", **given)
    rng = random.Random(7)
    shared = [rng.randrange(60) for _ in range(19)]  # more than a step takes
    asked = [
        Asked(
            [*shared[: rng.choice((0, 19))], *(rng.randrange(60) for _ in range(number + 3))],
            SamplingParams(9, rng.choice((0.0, 0.8)), seed=number, ignore_eos=True, logprobs=True),
        )
        for number in range(6)
    ]
    engine = await Engine.start(config, progress=lambda *_: None)
    try:
        facts = _facts(engine)
        alone = [await answer(engine, one, reuse_prefix=False) for one in asked]
        whole = [answer(engine, one, reuse_prefix=False) for one in asked]
        together = await asyncio.gather(*whole)
        first = [await answer(engine, one) for one in asked]
        reused = [await answer(engine, one) for one in asked]
        assert engine.stats().compilations_since_ready == 0
    finally:
        await engine.stop()
    assert [one.usage.cached_tokens > 0 for one in reused] == [len(a.prompt) > 8 for a in asked]
    assert any(one.usage.cached_tokens for one in reused)
    for others in (together, first, reused):
        assert [one[:4] for one in others] == [one[:4] for one in alone]
    cfg = engine.model.config
    page = cfg.num_layers * 2 * config.page_size * cfg.num_kv_heads * (cfg.head_dim + 4)
    assert (facts["kv_cache_dtype"], facts["kv_bytes"]) == ("fp8", 48 * page)
