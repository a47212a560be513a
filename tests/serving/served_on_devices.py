"""Shaped rows, and each architecture, over a mesh; run by test_served_equals_notebook.py on several
devices.
"""

import asyncio
import random
from pathlib import Path

import numpy as np
import pytest
from families import NAMES, settings_of
from notebook import Asked, answer, check
from shaped import PROMPTS, SHAPED, STRUCTURES, config, matches

import jmoe
from jmoe.checkpoint import weights_digest
from jmoe.family import load_family
from jmoe.parallel.replicas import Replication
from jmoe.sharing import Sharing, write_sharing
from serving.config import BalanceConfig, BrownoutConfig
from serving.engine import Engine
from serving.execution import runner
from serving.execution.replication import CopiesRule
from serving.request import BrownoutChange, SamplingParams
from tests.jmoe.conftest import add_united
from tests.variants import variant

pytestmark = pytest.mark.asyncio

GOLDEN = Path(__file__).parents[1] / "golden"
ARCHITECTURES = (
    "glm4_moe",
    "olmoe_clip_gqa",
    "granitemoe_attention_bias",
    "phimoe_window_tied",
    "gpt_oss",
    "mixtral",
    "afmoe",
)


async def test_rows_of_every_rank_are_shaped_as_on_one_device() -> None:
    balance = BalanceConfig(replicas="auto", spare_slots=2)
    engine = await Engine.start(config(mesh="ep=4", max_num_seqs=16, balance=balance))
    try:
        assert engine.loader.mover is not None
        asked = [
            Asked(prompt, SamplingParams(max_new_tokens=16, ignore_eos=True, **more))
            for prompt in PROMPTS
            for more in (*SHAPED[:4], {})
        ]
        structured = [
            Asked(PROMPTS[1], SamplingParams(max_new_tokens=90, structure=one))
            for one in STRUCTURES.values()
        ]
        calls = (answer(engine, one) for one in asked + structured)
        found = await asyncio.gather(*calls)
        assert engine.stats().compilations_since_ready == 0
    finally:
        await engine.stop()
    for name, got in zip(STRUCTURES, found[len(asked) :], strict=True):
        assert got.reason == "length" or matches(name, got.text)
    check(jmoe.load("bundled", "float32"), asked, found[: len(asked)])


@pytest.mark.parametrize(
    ("golden", "changes"),
    [
        *((name, {}) for name in ARCHITECTURES),
        ("qwen3_next", {"prefix_reuse": "auto"}),
        ("nemotron_h", {"prefix_reuse": "auto"}),
        ("gpt_oss", {"kv_cache_dtype": "fp8"}),
        ("mixtral", {"exchange": "direct"}),
        ("glm4_moe", {"exchange": "halves"}),
    ],
    ids=str,
)
async def test_two_devices_write_what_the_notebook_writes(
    golden: str, changes: dict[str, str]
) -> None:
    """Experts of each architecture on two devices, prompts that begin alike, and too few pages."""
    sizes = {"max_num_seqs": 8, "page_size": 4, "num_pages": 20, "max_model_len": 40}
    given = {"model": str(GOLDEN / golden), "mesh": "ep=2", "prefix_reuse": "on"}
    given |= changes
    given |= {"decode_buckets": (8,), "prefill_buckets": (32,), "threshold_buckets_percent": (100,)}
    engine = await Engine.start(config(**sizes, **given, compilation_cache=""))
    try:
        params = SamplingParams(max_new_tokens=10, ignore_eos=True)
        asked = [Asked([*range(7, 16), 20 + n, *range(1, 1 + n)], params) for n in range(10)]
        found = await asyncio.gather(*(answer(engine, one) for one in asked))
        assert engine.stats().compilations_since_ready == 0
        assert (engine.stats().reused_tokens > 0) == (given["prefix_reuse"] == "on")
        assert engine.loader.mover is None  # on a CPU `auto` takes no slots for copies
        assert sum(engine.scheduler.num_evictions.values()) > 0
    finally:
        await engine.stop()
    kv_cache_dtype = changes.get("kv_cache_dtype", "auto")
    model = jmoe.load(GOLDEN / golden, "float32", kv_cache_dtype=kv_cache_dtype)
    check(model, asked, found, tie=1e-3 if kv_cache_dtype == "auto" else 0.05)


async def test_steps_begin_and_cease_to_copy_experts_between_two_of_a_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a rule that has seen nothing, then the load of the first step, then what ends it."""
    rule, of_steps = CopiesRule({32: Replication(2, 2)}, {32: 1.0}), list[bool]()

    def seen(*rows: np.ndarray, copied: bool) -> None:
        of_steps.append(copied)
        if len(of_steps) == 4:
            rule.gains_from = {32: 9.0}
        CopiesRule.seen(rule, *rows, copied=copied)

    monkeypatch.setattr(rule, "seen", seen)
    monkeypatch.setattr(runner, "copies_rule", lambda *_: rule)
    sizes = {"decode_buckets": (8,), "prefill_buckets": (32,), "threshold_buckets_percent": (100,)}
    given = {"model": str(GOLDEN / "qwen2_moe"), "mesh": "ep=2", "max_num_seqs": 8}
    engine = await Engine.start(config(**given, **sizes, compilation_cache=""))
    params = SamplingParams(max_new_tokens=3, ignore_eos=True)
    asked = [Asked([*range(7, 16), 20 + n], params) for n in range(6)]
    try:
        found = [await answer(engine, one) for one in asked]
        assert engine.stats().compilations_since_ready == 0
    finally:
        await engine.stop()
    assert of_steps == [False, True, True, True, False, False]
    check(jmoe.load(GOLDEN / "qwen2_moe", "float32"), asked, found)


def family_settings(folder: Path, **changes):
    """Settings of a family of three, most of whose experts are shared, over a mesh."""
    directories = {
        name: variant(GOLDEN / "qwen2_moe", folder / name, n) for n, name in enumerate(NAMES)
    }
    for seed, path in enumerate(directories.values()):
        add_united(path, seed=seed)
    owners = Sharing.none(NAMES, 2, 7).owners
    owners[:, :, :5] = random.Random(0).choices(range(3), k=5)
    prints = tuple(map(weights_digest, directories.values()))
    write_sharing(folder / "family.json", Sharing(NAMES, owners, prints))
    sizes = {"max_num_seqs": 8, "num_pages": 80, "decode_buckets": (4,), "prefill_buckets": (16,)}
    given = {"family": str(folder / "family.json"), "prefix_reuse": "on", "part_layers": 0}
    return directories, settings_of(directories, "", **(sizes | given | changes))


def asked_of_family(count: int, **sampling) -> list[Asked]:
    rng = random.Random(count)
    return [
        Asked(
            [rng.randrange(1, 60) for _ in range(rng.randrange(1, 20))],
            SamplingParams(max_new_tokens=8 + n % 5, ignore_eos=True, **sampling),
            NAMES[n % 3],
        )
        for n in range(count)
    ]


@pytest.mark.usefixtures("compiled_in_a_hurry")
@pytest.mark.parametrize(("devices", "replicas", "spare"), [(2, 0, 1), (4, 2, 0), (4, 0, 2)])
async def test_models_of_a_family_write_what_the_notebook_writes(
    tmp_path: Path, devices: int, replicas: int, spare: int
) -> None:
    """Steps of one model in turn, and of several together, beside brownout, steps that copy experts
    and copies that stay, which are made meanwhile.
    """
    brownout = BrownoutConfig("partial", 2, (2, 3), 30, 30, salc=False)
    given = {"mesh": f"ep={devices}", "mixed_models": 3, "brownout": brownout}
    balance = BalanceConfig(replicas, spare_slots=spare, interval_s=0.05, half_life_s=60.0)
    directories, settings = family_settings(tmp_path, balance=balance, **given)
    engine = await Engine.start(settings)
    try:
        engine.executor.mixed.pays = lambda counts: 1 < len(counts) <= 3
        asked = asked_of_family(18)
        degraded, got = await asyncio.gather(
            asyncio.gather(*(answer(engine, one) for one in asked)),
            asyncio.gather(*(answer(engine, one, allow_brownout=False) for one in asked)),
        )
        await engine.set_brownout(BrownoutChange(way=3))
        more = asked_of_family(9, temperature=0.8, seed=3)
        got += await asyncio.gather(*(answer(engine, one, allow_brownout=False) for one in more))
        assert sum(one.usage.degraded_visits for one in degraded) > 0
        assert engine.scheduler.num_mixed > 5
        assert await engine.drain(60)
        engine.scheduler.check_idle()
        assert engine.stats().compilations_since_ready == 0
        mover = engine.loader.mover
        assert (mover is not None) == bool(spare)
        if mover is not None:
            home = engine.family.home
            assert mover.experts_copied > 0 == len(mover.failure)
            np.testing.assert_array_equal(home.placement.hosts, mover.hosts)
    finally:
        await engine.stop()
    for model in load_family(directories, settings.family, "float32"):
        pairs = zip([*asked, *more], got, strict=True)
        own = [(one, answered) for one, answered in pairs if one.model == model.name]
        check(model, *map(list, zip(*own, strict=True)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"balance": BalanceConfig(spare_slots=9)}, "engine.balance.spare_slots is 9"),
        ({"resident_sets": 2}, "engine.resident_sets is 2"),
        ({"resident_experts": 14}, "engine.resident_experts is 14"),
    ],
)
async def test_what_a_spread_family_cannot_have_is_named(
    tmp_path: Path, changes: dict, words: str
) -> None:
    _, settings = family_settings(tmp_path, mesh="ep=2", **changes)
    with pytest.raises(ValueError, match=words):
        await Engine.start(settings)
