"""A model whose layers have windows beside full attention, served with shared prefixes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from notebook import Asked, answer

import jmoe
from jmoe.attention import FULL, Paged
from serving.config import AsynchronousConfig, EngineConfig
from serving.engine import Engine
from serving.errors import SettingsError
from serving.execution.fitting import fit_to_model
from serving.request import SamplingParams

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

GOLDEN = Path(__file__).parents[1] / "golden"
SIZES = EngineConfig(
    max_num_seqs=2,
    max_model_len=64,
    page_size=4,
    max_prefill_tokens=16,
    threshold_buckets_percent=(100,),
    mode="steps",
)


@pytest.fixture(scope="module")
def model():
    model = jmoe.load(GOLDEN / "qwen3_moe", dtype="float32")
    return replace(model, config=replace(model.config, layer_attention=(FULL, Paged(6))))


@pytest.mark.parametrize("mode", ["steps", pytest.param("aep", marks=pytest.mark.deep)])
async def test_answers_with_and_without_a_shared_prefix_are_the_whole_model_s(model, mode):
    prompt = np.random.default_rng(1).integers(0, 40, 30).tolist()
    asked = Asked(prompt, SamplingParams(max_new_tokens=8, ignore_eos=True))
    config = replace(SIZES, mode=mode)
    if mode == "aep":
        crew = AsynchronousConfig(attention=1, experts=1)
        config = replace(config, asynchronous=crew, threshold_buckets_percent=())
    engine = await Engine.start(config, model=model)
    try:
        first, again = [await answer(engine, asked) for _ in range(2)]
    finally:
        await engine.stop()
    assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, 28)
    logits = jmoe.forward(model, [prompt + first.tokens[:-1]])[0, len(prompt) - 1 :]
    assert first.tokens == again.tokens == np.argmax(logits, axis=-1).tolist()
    full = replace(model, config=replace(model.config, layer_attention=()))
    assert np.abs(jmoe.forward(full, [prompt])[0, -1] - logits[0]).max() > 1e-2


class WithoutPages(Paged):
    shares_pages = False


def test_prefixes_of_layers_that_share_no_pages_are_refused(model):
    cfg = replace(model.config, layer_attention=(FULL, WithoutPages()))
    with pytest.raises(SettingsError, match=r"prefix_reuse is 'auto'.*set it to 'off'"):
        fit_to_model(SIZES, replace(model, config=cfg))
    fit_to_model(replace(SIZES, prefix_reuse="off"), replace(model, config=cfg))
