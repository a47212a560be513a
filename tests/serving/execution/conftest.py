"""Fixtures that several files share."""

from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from jmoe.config import from_hf


@pytest.fixture
def processes_meet_at_once(monkeypatch):
    """Shortens the pauses in which processes that join ask again, and say that they live."""
    monkeypatch.setattr("serving.cluster.members.BEAT_S", 0.2)
    monkeypatch.setattr("serving.cluster.members.ASKS_EVERY_S", 0.05)
    monkeypatch.setattr("serving.cluster.port.GREETS_WITHIN_MS", 200)


@pytest.fixture
def model():
    """Returns a model without weights. A page of four positions has 2 x 3 x 4 x 2 x 8 x 4 bytes:
    1,536.
    """
    geometry = {
        "model_type": "mixtral",
        "vocab_size": 8,
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 16,
        "max_position_embeddings": 256,
    }
    return SimpleNamespace(config=from_hf(geometry), dtype=jnp.dtype("float32"), home=None)
