"""Engines over a runner that counts up, for tests of the tick."""

import asyncio
from pathlib import Path
from unittest.mock import Mock

from jmoe.api import Model
from jmoe.config import ModelConfig
from jmoe.family import Family
from jmoe.sharing import Sharing
from serving.config import EngineConfig
from serving.engine import Engine
from serving.plan import Limits
from serving.request import SamplingParams
from tests.serving.fake_runner import FakeRunner

LIMITS = Limits(num_slots=4, num_pages=64, page_size=4, max_prefill_tokens=16, max_prefill_seqs=4)


def model_with(tokenizer):
    """Returns what an engine uses of a model with a vocabulary of a thousand tokens."""
    sizes = {"num_moe_layers": 1, "experts_per_token": 1, "num_experts": 1}
    config = Mock(spec=ModelConfig, vocab_size=1000, eos_token_ids=(), **sizes)
    model = Mock(spec=Model, tokenizer=tokenizer, config=config, united={})
    model.name, model.path = "counter", Path("counter")
    return model


def family_of(names):
    """Returns a family of such models without a tokenizer, which share nothing."""
    models = []
    for name in names:
        models.append(model_with(None))
        models[-1].name = name
    return Family(tuple(models), Sharing.none(names, 1, 1))


async def collect(engine, prompt, max_new=5, **kwargs):
    sampling = kwargs.pop("sampling", SamplingParams(max_new_tokens=max_new))
    return [out async for out in engine.generate(prompt, sampling, **kwargs)]


def counting_engine(
    step_s=0.0, limits=LIMITS, runner=FakeRunner, observer=(), model=None, **config
):
    """Returns a ticking engine on the running loop's clock."""
    config = EngineConfig(**{"max_model_len": 200, "watchdog_s": 0, **config})
    clock = asyncio.get_running_loop().time
    engine = Engine(config, runner(limits, step_s=step_s), model, observer, clock)
    engine.run()
    return engine
