"""What an engine says of its settings before it compiles anything."""

import pytest

from pallas_kernels.backend import traced_for
from serving import start as module
from serving.config import BrownoutConfig, EngineConfig
from serving.engine import Engine
from serving.settings import SettingsError


@pytest.mark.parametrize(
    ("platform", "said"), [("rocm", "ops run batched XLA"), ("cuda", "ops run Mosaic"), ("cpu", "")]
)
def test_the_log_says_what_a_gpus_ops_run(platform, said, caplog):
    caplog.set_level("INFO")
    with traced_for(platform):
        module.log_implementation()
    assert said in caplog.text
    assert bool(caplog.records) == bool(said)
    assert [r.levelname for r in caplog.records if "batched" in r.message] == ["WARNING"] * (
        platform == "rocm"
    )


class Compiled(Exception):
    """Start has come so far."""


@pytest.fixture
def start(monkeypatch, request):
    """Starts an engine up to its first program."""

    def compile_nothing(*_, **__):
        raise Compiled

    monkeypatch.setattr(module, "DeviceRunner", compile_nothing)
    directory = request.config.rootpath / "tests" / "golden" / "qwen2_moe"

    async def begin(model=str(directory), **brownout):
        brownout = BrownoutConfig(**brownout)
        config = EngineConfig(model=model, dtype="float32", max_model_len=64, brownout=brownout)
        with pytest.raises(Compiled):
            await Engine.start(config)

    return begin


async def test_a_strategy_that_cannot_be_had_is_an_error_that_says_how(start):
    with pytest.raises(SettingsError, match="jmoe distill"):
        await start(strategy="partial")


async def test_a_way_that_is_not_there_is_an_error_that_lists_those_that_are(start):
    with pytest.raises(ValueError, match=r"way is 8; .* none"):
        await start(way=8)
    with pytest.raises(ValueError, match=r"way is 5; .* 2, 4, 8"):
        await start(model="bundled", way=5)


async def test_the_default_without_united_experts_is_one_line(start, caplog):
    await start()
    (record,) = caplog.records
    assert record.message == "brownout is off: qwen2_moe has no united experts"


async def test_the_default_with_united_experts_says_nothing(start, caplog):
    await start(model="bundled")
    assert not caplog.records
