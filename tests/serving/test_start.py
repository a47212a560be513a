"""What an engine says of its settings before it compiles anything."""

import pytest

from jmoe.config import from_hf
from jmoe.random_model import random_model
from pallas_kernels.backend import KERNEL, traced_for
from serving.config import BrownoutConfig, EngineConfig
from serving.engine import Engine
from serving.errors import SettingsError
from serving.execution.fitting import fit_to_model
from serving.execution.runner import DeviceRunner
from serving.startup import prepare as module

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

SMALL = {
    "model_type": "qwen3_moe",
    "vocab_size": 256,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_experts": 12,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
}
ALL = {"KV write", "attention", "grouped GEMM", "routing"}


@pytest.mark.sized(
    deep=(
        "rocm-16-bfloat16-without_kernel1",
        "cuda-256-bfloat16-without_kernel3",
        "cuda-8-bfloat16-without_kernel4",
        "cuda-16-float32-without_kernel5",
        "cuda-16-bfloat16-without_kernel2",
    )
)
@pytest.mark.parametrize(
    ("platform", "page_size", "dtype", "without_kernel"),
    [
        ("cpu", 16, "float32", None),
        ("rocm", 16, "bfloat16", {"decode": ALL, "prefill": ALL}),
        ("cuda", 16, "bfloat16", {"decode": {*()}, "prefill": {*()}}),
        ("cuda", 256, "bfloat16", {"decode": {*()}, "prefill": {"attention"}}),
        ("cuda", 8, "bfloat16", {"decode": {"attention"}, "prefill": {"attention"}}),
        ("cuda", 16, "float32", {"decode": ALL - {"routing"}, "prefill": ALL - {"routing"}}),
    ],
)
def test_the_log_says_what_each_op_of_a_gpu_runs(
    platform, page_size, dtype, without_kernel, caplog
):
    """A model's own steps are traced: of heads of 64, and experts of 64 columns."""
    found = implementations(platform, page_size, dtype)
    if without_kernel is None:
        assert found == {}
    else:
        assert set(found) == {f"{phase} {op}" for phase in without_kernel for op in ALL}
        others = {f"{phase} {op}" for phase, ops in without_kernel.items() for op in ops}
        assert {op for op, form in found.items() if form != KERNEL} == others
        for op in others:
            wanted = "XLA" if "KV write" in op else "batched XLA"
            assert found[op] == wanted
    caplog.set_level("INFO")
    with traced_for(platform):
        module.log_implementations(found)
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (without_kernel is not None and any(without_kernel.values()))
    for op, form in found.items():
        (record,) = (r for r in caplog.records if op in r.message)
        assert (record in warnings) == (form != KERNEL)


def implementations(platform, page_size, dtype):
    """Returns the implementations of a model of two layers, whose programs are traced and not
    compiled.
    """
    model = random_model(from_hf(SMALL), dtype=dtype)
    config = EngineConfig(
        dtype=dtype,
        max_num_seqs=8,
        max_model_len=512,
        num_pages=64,
        page_size=page_size,
        max_prefill_tokens=32,
        compilation_cache="",
    )
    with traced_for(platform):
        runner = DeviceRunner(model, fit_to_model(config, model))
        found = runner.implementations
    runner.close()
    return found


class Compiled(Exception):
    """Raised when starting has come to compiling."""


@pytest.fixture
def start(monkeypatch, request):
    """Returns a function that starts an engine up to its first program."""

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
