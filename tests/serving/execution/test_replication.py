"""Which steps copy experts while they run, and what is said of it. As on a GPU, without one."""

from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from jmoe.config import from_hf
from serving.config import BalanceConfig
from serving.execution import replication

GEOMETRY = {
    "model_type": "mixtral",
    "vocab_size": 8,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 32,
    "num_experts_per_tok": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 256,
}
CONFIG = BalanceConfig(replicas=4, replicas_min_tokens=64)


def model_over(devices):
    home = SimpleNamespace(mesh=SimpleNamespace(size=devices))
    return SimpleNamespace(
        config=from_hf(GEOMETRY), dtype=jnp.dtype("bfloat16"), home=home, num_united_slots=0
    )


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(replication, "backend", lambda: "gpu")


def test_steps_from_a_size_on_copy():
    found = replication.replication_of(CONFIG, model_over(8), (32, 64, 128))
    assert {size: asked.num_replicas for size, asked in found.items()} == {64: 4, 128: 4}


@pytest.mark.parametrize(("devices", "said"), [(8, False), (32, False), (64, True)])
def test_planning_that_is_no_kernel_is_told(devices, said, on_a_gpu, caplog):
    assert replication.replication_of(CONFIG, model_over(devices), (32, 64)).keys() == {64}
    words = f"for 32 experts on {devices} devices planning copies is loops"
    assert (words in caplog.text) is said


def test_steps_too_small_to_hide_copies_make_none_and_say_so(on_a_gpu, caplog):
    config = BalanceConfig(replicas=4)
    assert replication.replication_of(config, model_over(8), (32, 64)) == {}
    assert "no prefill step is large enough to hide copies" in caplog.text
