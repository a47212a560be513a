"""KV pages in eight bits, through the model: bytes, what is generated, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmoe
from jmoe.attention import Latent, Paged, page_bytes, with_kv_cache_dtype
from jmoe.config import read_config
from serving.cli.model_info import kv_bytes_per_token
from serving.config import EngineConfig
from serving.startup.loading import family_of
from serving.startup.prepare import check_start
from tests.answers import logits_after
from tests.jmoe.conftest import GOLDEN

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

BF16 = jnp.dtype(jnp.bfloat16)
PROMPTS = [[3, 5, 7, 11, 13, 17, 19, 23, 29, 31], [40, 2], [8] * 17]


@pytest.mark.parametrize("case", ["qwen3_moe", "gpt_oss"])
def test_a_page_takes_a_byte_an_element_and_four_a_row_of_a_head(case):
    plain = read_config(GOLDEN / case)
    cfg = with_kv_cache_dtype(plain, "fp8")
    rows = 2 * 16 * plain.num_kv_heads
    layers = [plain.layer_attention.count(kind) for kind in plain.attention_kinds]
    got = page_bytes(cfg, 16, BF16), page_bytes(plain, 16, BF16)
    assert sorted(got[0]) == sorted(n * rows * (plain.head_dim + 4) for n in layers)
    assert sorted(got[1]) == sorted(n * rows * 2 * plain.head_dim for n in layers)
    assert kv_bytes_per_token(plain, "fp8") == sum(got[0]) / 16


@pytest.mark.sized(exhaustive=("gpt_oss",))
@pytest.mark.deep
@pytest.mark.parametrize("case", ["qwen3_moe", "gpt_oss"])
def test_what_is_generated_is_what_whole_sequences_give(case):
    """Windows and sinks included."""
    exact = jmoe.load(GOLDEN / case, "float32")
    kept = exact.with_kv_cache_dtype("fp8")
    assert kept.resident is exact.resident
    for chunk in (256, 4):
        got = jmoe.generate(kept, PROMPTS, 6, stop_token_ids=(), chunk_size=chunk, page_size=4)
        whole = (logits_after(one, PROMPTS, got.tokens) for one in (kept, exact))
        for logits, plain, tokens, logprobs in zip(*whole, got.tokens, got.logprobs, strict=True):
            taken = np.asarray(jax.nn.log_softmax(logits))[np.arange(6), tokens]
            # A number of eight bits may round the other way where the last bit of a key differs.
            np.testing.assert_allclose(logprobs, taken, atol=0.03)
            assert (taken > np.asarray(jax.nn.log_softmax(logits)).max(axis=1) - 0.03).all()
            assert np.abs(np.asarray(logits - plain)).max() > 0.01


@pytest.mark.deep
def test_it_is_no_part_of_what_is_saved(tmp_path):
    exact = jmoe.load(GOLDEN / "qwen3_moe", "float32")
    jmoe.save(exact.with_kv_cache_dtype("fp8"), tmp_path / "saved")
    assert jmoe.load(tmp_path / "saved", "float32").config == exact.config
    again = jmoe.load(tmp_path / "saved", "float32", kv_cache_dtype="fp8")
    assert again.config == exact.with_kv_cache_dtype("fp8").config


def test_names_are_those_that_there_are():
    with pytest.raises(ValueError, match="kv_cache_dtype is 'fp9'; it must be one of auto, fp8, "):
        jmoe.load(GOLDEN / "qwen3_moe", kv_cache_dtype="fp9")
    cfg = read_config(GOLDEN / "qwen3_moe")
    assert with_kv_cache_dtype(cfg, "auto") is cfg
    kept = with_kv_cache_dtype(cfg, "fp8")
    assert with_kv_cache_dtype(cfg, "fp8_e4m3") == kept
    assert with_kv_cache_dtype(kept, "auto") is kept
    assert set(kept.attention_kinds) == {Paged(fp8=True)}


def test_latents_stay_as_they_are():
    cfg, words = read_config(GOLDEN / "deepseek_v2"), "'fp8', and no layer of this deepseek_v2 mode"
    with pytest.raises(ValueError, match=words):
        jmoe.load(GOLDEN / "deepseek_v2", kv_cache_dtype="fp8")
    with pytest.raises(ValueError, match=words):  # before a server loads anything
        check_start(EngineConfig(model=str(GOLDEN / "deepseek_v2"), kv_cache_dtype="fp8"))
    assert kv_bytes_per_token(cfg, "fp8") == 0
    assert {type(kind) for kind in cfg.attention_kinds} == {Latent}


def test_a_server_s_models_are_as_its_settings_say():
    model = jmoe.load(GOLDEN / "qwen3_moe", "float32")
    config = EngineConfig(model=str(GOLDEN / "qwen3_moe"), dtype="float32", kv_cache_dtype="fp8")
    for given in (model, None):
        (found,) = family_of(config, given, None, lambda *_: None)
        assert found.config == with_kv_cache_dtype(model.config, "fp8")
    (found,) = family_of(EngineConfig(), model, None, lambda *_: None)
    assert found is model
