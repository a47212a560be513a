"""Asynchronous workers on eight devices of one process. Run by test_aep_workers.py."""

import random

import jax

import jmoe
from tests.jmoe.conftest import GOLDEN
from tests.serving.execution.aep_sequences import Sequences, some_prompts, workers_of


def test_two_and_six_devices(compiled_in_a_hurry):
    model, rng = jmoe.load(GOLDEN / "qwen2_moe", dtype="float32"), random.Random(9)
    workers = workers_of(model, rng, attention=2, experts=6)
    stores = [jax.tree.leaves(worker.device._store)[0] for worker in workers.workers]
    assert len(frozenset.union(*(frozenset(store.devices()) for store in stores))) == 8
    prompts = some_prompts(model, rng, 8)
    played = Sequences(workers, prompts, 5, 10)
    played.play(rng)
    assert played.tokens == jmoe.generate(model, prompts, 5, stop_token_ids=()).tokens
