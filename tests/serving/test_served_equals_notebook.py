"""What is served is what the notebook writes: modes of serving x what is asked of them.

A row starts an engine of its mode, plays its requests, and says what has to have happened meanwhile
(parked steps, evictions, fetches); `notebook.check` then judges every answer that has to be exact.
Over sockets: tests/e2e/test_hostile_load.py. On several devices: served_on_devices.py.
"""

import asyncio
import contextlib
import itertools
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from families import AEP, GOLDEN, NAMES, settings_of
from notebook import BE, LS, Answer, Asked, answer, check
from shaped import PROMPTS, SHAPED, STRUCTURES, config, matches

import jmoe
from jmoe.attention import is_recurrent
from jmoe.checkpoint import weights_digest
from jmoe.config import read_config
from jmoe.family import load_family
from jmoe.sharing import Sharing, write_sharing
from serving.cli import main as cli
from serving.client import Client
from serving.config import AsynchronousConfig, AuditConfig, BrownoutConfig, ServerConfig
from serving.engine import Engine
from serving.errors import NotFound
from serving.execution.device import Device
from serving.frontend.metrics import Metrics
from serving.frontend.server import Server
from serving.plan import Phase
from serving.proto.jmoe.v1 import jmoe_pb2 as pb
from serving.request import BrownoutChange, SamplingParams
from serving.scheduling.layers import compiled
from serving.settings.reading import check as check_settings
from tests.jmoe.conftest import add_united
from tests.jmoe.family_oracles import oracle
from tests.on_devices import run_on_devices
from tests.traces import num_traces
from tests.variants import variant
from training.consolidate.run import ConsolidateConfig, consolidate

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

ROOM = {"reserved_ls_seqs": 4, "num_pages": 48}  # for eight sequences: nobody is evicted
ONE = GOLDEN.with_name("qwen3_moe_mixed_yarn")


EIGHT_BITS = {"atol": 0.05, "tie": 0.05}
"""Within which answers over KV pages in fp8 are the notebook's: where a key differs in its last bit
a number may round the other way.
"""


# ---- modes --------------------------------------------------------------------------------------


@dataclass
class Mode:
    """Settings of an engine, and the notebook's models by name; the engine's own if it shares
    them.
    """

    settings: Any  # of changes
    models: dict[str, Any]
    model: Any = None
    within: dict[str, float] = field(default_factory=dict)  # arguments of `check`


class Made:
    """Models and settings, made when a row first needs them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cache, self.modes = folder, str(folder / "programs"), {}
        self.directories = {name: folder / name for name in NAMES}

    def __call__(self, name: str) -> Mode:
        if name not in self.modes:
            kind, _, case = name.partition(" of ")
            given = [GOLDEN.with_name(case)] if case else []
            self.modes[name] = getattr(self, kind.replace(" ", "_"))(*given)
        return self.modes[name]

    def of(self, models, directories=None, **given) -> Mode:
        """Makes a mode of settings that differ from a family's in `given`."""

        def settings(**changes):
            return settings_of(directories or {}, self.cache, **(given | changes))

        return Mode(settings, models)

    def one(self, golden: Path = ONE) -> Mode:
        # Where prefixes are reused, other buckets change bits.
        models = {"": jmoe.load(golden, "float32")}
        return self.of(models, model=str(golden), prefix_reuse="off", **ROOM)

    def fp8_kv(self, golden: Path = ONE) -> Mode:
        """Makes a mode with KV pages in fp8."""
        models = {"": jmoe.load(golden, "float32", kv_cache_dtype="fp8")}
        given = {"kv_cache_dtype": "fp8", "prefix_reuse": "off", **ROOM}
        return replace(self.of(models, model=str(golden), **given), within=EIGHT_BITS)

    def fp8_kv_family(self) -> Mode:
        """Makes a mode of `mixed` with KV pages in fp8."""
        mixed = self("mixed")
        models = {n: model.with_kv_cache_dtype("fp8") for n, model in mixed.models.items()}
        return Mode(partial(mixed.settings, kv_cache_dtype="fp8"), models, None, EIGHT_BITS)

    def fp8_kv_workers(self) -> Mode:
        aep, (model,) = self("aep"), self("aep").models.values()
        models = {"": model.with_kv_cache_dtype("fp8")}
        return Mode(partial(aep.settings, kv_cache_dtype="fp8"), models, None, EIGHT_BITS)

    def int4_workers(self) -> Mode:
        """Makes a mode of asynchronous workers whose experts are in four bits."""
        given = {**AEP, "model": str(GOLDEN), "compilation_cache": "", "quantize": "int4"}
        return self.of({"": jmoe.load(GOLDEN, "float32", quantize="int4")}, **given)

    def mxfp4_host_experts(self) -> Mode:
        """Makes a mode of `host experts` whose experts are in four bits, there too."""
        host = self("host experts")
        models = {
            name: jmoe.load(path, "float32", quantize="mxfp4")
            for name, path in self.directories.items()
        }
        return Mode(partial(host.settings, quantize="mxfp4"), models)

    def bundled(self) -> Mode:
        model = jmoe.load("bundled", "float32")
        return Mode(config, {"": model}, model)

    def fp8(self) -> Mode:
        """Makes a mode of the bundled model with experts in fp8; the engine quantizes its own."""
        model = jmoe.load("bundled", "float32", quantize="fp8")
        given = {"quantize": "fp8", "compilation_cache": self.cache}
        return Mode(partial(config, **given), {"": model})

    def family(self, golden: Path = GOLDEN) -> Mode:
        own = {
            name: path.with_name(f"{golden.name}-{name}") for name, path in self.directories.items()
        }
        directories = self.directories if golden == GOLDEN else own
        for seed, path in enumerate(directories.values()):
            add_united(variant(golden, path, seed), seed=seed)
        models = {name: jmoe.load(path, "float32") for name, path in directories.items()}
        return self.of(models, directories)

    def host_experts(self) -> Mode:
        """Makes a mode in which two thirds of the experts have no slot; siblings' serve until they
        are fetched.
        """
        models, cfg = self("family").models, read_config(GOLDEN)
        room = cfg.num_moe_layers * cfg.num_experts
        spare = cfg.num_moe_layers * cfg.experts_per_token
        return self.of(models, self.directories, resident_experts=room, spare_experts=spare)

    def differences(self) -> Mode:
        """Makes a mode in which all positions are shared with differences of rank 4, which oracles
        add.
        """
        self("family")
        path, cfg = self.folder / "differences.json", read_config(GOLDEN)
        run = ConsolidateConfig(rule="random", share=100, residual_rank=4)
        sharing = consolidate(self.directories, path, run).sharing
        everywhere = {tuple(at) for at in np.argwhere(sharing.differs).tolist()}
        models = {}
        for number, name in enumerate(NAMES):
            to = self.folder / f"with-{name}"
            oracle(self.directories, sharing, number, everywhere, to)
            models[name] = jmoe.load(to, "float32")
        spare = cfg.num_moe_layers * cfg.experts_per_token
        return self.of(models, self.directories, family=str(path), spare_experts=spare)

    def mixed(self) -> Mode:
        """Makes a mode in which three quarters of the experts are shared; steps have rows of up to
        three models.
        """
        self("family")
        path = self.folder / "mixed.json"
        prints = tuple(map(weights_digest, self.directories.values()))
        owners = Sharing.none(NAMES, 2, 7).owners
        owners[:, :, :5] = random.Random(0).choices(range(3), k=5)
        write_sharing(path, Sharing(NAMES, owners, prints))
        models = {one.name: one for one in load_family(self.directories, path, "float32")}
        sizes = {"max_num_seqs": 8, "num_pages": 60, "decode_buckets": (8,), "mixed_models": 3}
        return self.of(models, self.directories, family=str(path), **sizes)

    def mixed_host_experts(self) -> Mode:
        """Makes a mode of `mixed` in which experts that two thirds of the slots cannot hold are
        fetched.
        """
        mixed, cfg = self("mixed"), read_config(GOLDEN)
        room = cfg.num_moe_layers * cfg.num_experts
        spare = cfg.num_moe_layers * cfg.experts_per_token
        given = partial(mixed.settings, resident_experts=room, spare_experts=spare)
        return Mode(given, mixed.models)

    def workers(self) -> Mode:
        """Makes a mode of the bundled model on asynchronous workers."""
        model, crew = self("bundled").model, AsynchronousConfig(attention=2, experts=2)
        given = {"mode": "aep", "asynchronous": crew, "compilation_cache": ""}
        return Mode(partial(config, **given), {"": model}, model)

    def aep(self, golden: Path = GOLDEN) -> Mode:
        given = {**AEP, "model": str(golden), "compilation_cache": ""}
        return self.of({"": jmoe.load(golden, "float32")}, **given)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Made(tmp_path_factory.mktemp("served"))


@dataclass
class Run:
    """An engine that plays a row, and answers that the notebook is to judge."""

    engine: Any
    metrics: Metrics
    judged: list = field(default_factory=list)

    async def together(self, asked, **options):
        """Sends all at once; returns the answers in the requests' order."""
        found = await asyncio.gather(*(answer(self.engine, one, **options) for one in asked))
        return list(found)

    def judge(self, asked, answers) -> None:
        """Has the notebook judge answers, none of which may be degraded."""
        for one, got in zip(asked, answers, strict=True):
            assert got.degraded == 0
            self.judged.append((one, got))


@contextlib.asynccontextmanager
async def running(mode: Mode, *, ready=lambda: None, **changes):
    metrics = Metrics()
    given = {} if mode.model is None else {"model": mode.model}
    # An audit's row would be in the company of others.
    settings = mode.settings(**({"audit": AuditConfig(share=0)} | changes))
    # Thousands of steps of the bundled model take half as long where they are optimized.
    jax.config.update("jax_disable_most_optimizations", mode.model is None)
    engine = await Engine.start(settings, observer=metrics, progress=lambda *_: None, **given)
    ready()
    try:
        yield Run(engine, metrics)
        assert await engine.drain(60)
        engine.scheduler.check_idle()
        assert engine.stats().compilations_since_ready == 0
    finally:
        await engine.stop()


# ---- what is asked ------------------------------------------------------------------------------


def requests(rng, count, *, names=("",), prompt_below=24, fewest=1, below=14, scores=0.0, **given):
    """Draws requests: a third of them sample, and some ask for their prompt's scores."""
    for number in range(count):
        sampling = SamplingParams(
            max_new_tokens=rng.randrange(fewest, below),
            temperature=rng.choice((0.0, 0.0, 0.8)),
            top_k=rng.choice((0, 0, 5)),
            seed=number,
            ignore_eos=True,
            logprobs=True,
            prompt_logprobs=(is_scored := rng.random() < scores),
            top_prompt_logprobs=3 * is_scored,
        )
        prompt = [rng.randrange(1, 60) for _ in range(rng.randrange(1, prompt_below))]
        options = {"priority": rng.choice((LS, BE)), **given}
        yield Asked(prompt, sampling, rng.choice(names), options)


def assert_alike(run, got, want):
    """Asserts that two answers are the same bit for bit; of recurrent layers, whose rounding goes
    by how a prompt is cut, nearly so.
    """
    if not is_recurrent(run.engine.model.config):
        assert got[:4] == want[:4]
        return
    assert got.tokens == want.tokens
    for name in ("logprobs", "scores"):
        mine, theirs = getattr(got, name), getattr(want, name)
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=5e-4)


async def rounds(run, count, seed, *, exact=True):
    """Sends six at a time, then each alone: answers are the same bit for bit where none is
    evicted.
    """
    rng = random.Random(seed)
    for _ in range(count):
        asked = [
            one._replace(wait_s=0.0005 * rng.randrange(12))
            for one in requests(rng, 6, below=16, scores=0.2)
        ]
        together = await run.together(asked)
        run.judge(asked, together)
        if exact:
            alone = [await answer(run.engine, one, priority=LS) for one in asked]
            for got, want in zip(together, alone, strict=True):
                assert_alike(run, got, want)
    assert exact == (sum(run.engine.scheduler.num_evictions.values()) == 0)


async def parts(run):
    """Plays with steps that are cut after every layer and parked in between."""
    await rounds(run, 6, seed=1)
    assert run.engine.scheduler.num_parks > 0


async def many_more(run):
    """Plays the same in steps of two layers, with as many requests as asked for."""
    count = num_traces(16)
    await rounds(run, count, seed=2)
    assert run.engine.scheduler.num_parks > count
    assert count < 100 or run.engine.scheduler.num_joins > 10  # too seldom to count on in fewer


async def evictions(run):
    await rounds(run, 6, seed=3, exact=False)


async def measured_parts(run):
    """Plays with parts whose number of layers is measured at the start."""
    found = run.engine.executor.part_layers_by_size
    assert set(found) == {"decode 4", "prefill 16"}
    assert all(1 <= n <= 4 for n in found.values())
    await rounds(run, 1, seed=4)


def tree(rng):
    """Draws prompts that begin like others."""
    found = [[rng.randrange(500) for _ in range(20)]]
    for _ in range(5):
        start = rng.choice(found)[: rng.randrange(1, 30)]
        found.append(start + [rng.randrange(500) for _ in range(rng.randrange(1, 16))])
    return [prompt[:40] for prompt in found]


async def reuse(run, rng, counts):
    """Plays prompts that share prefixes, while callers leave and brownout changes."""
    engine, prompts = run.engine, tree(rng)

    async def leave(prompt):
        sampling = SamplingParams(max_new_tokens=16, ignore_eos=True)
        outputs = engine.generate(prompt, sampling)
        async for _ in outputs:
            break
        await outputs.aclose()

    async def change():
        for _ in range(2):
            await asyncio.sleep(rng.random() * 0.03)
            await engine.set_brownout(
                BrownoutChange(
                    strategy=rng.choice(("full", "partial", "zero")),
                    way=rng.choice(engine.config.brownout.ways),
                    prefill_threshold_percent=rng.choice((20, 60, 100)),
                    decode_threshold_percent=rng.choice((20, 60, 100)),
                )
            )

    asked = [
        one._replace(
            prompt=rng.choice(prompts),
            options={**one.options, "allow_brownout": rng.random() < 0.4},
            wait_s=rng.random() * 0.05,
        )
        for one in requests(rng, 10, below=16)
    ]
    found, *_ = await asyncio.gather(run.together(asked), leave(rng.choice(prompts)), change())
    whole = await answer(engine, asked[0], reuse_prefix=False)
    assert whole.usage.cached_tokens == 0
    for one, got in zip(asked, found, strict=True):
        counts["cached"] += got.usage.cached_tokens
        counts["degraded"] += got.degraded
        if not one.options["allow_brownout"]:
            run.judge([one], [got])
            counts["exact and cached"] += bool(got.usage.cached_tokens)


def prefix_reuse(seeds, *wanted):
    async def play(run):
        counts = Counter()
        for seed in seeds:
            await reuse(run, random.Random(seed), counts)
        stats = run.engine.stats()
        counts["evictions"], counts["made room"] = stats.evictions, stats.kept_pages_evicted
        counts["parks"] = stats.parks
        often = ("made room", "parks", "evictions") if len(seeds) >= 100 else ()
        assert all(counts[what] for what in (*wanted, *often)), counts

    return play


def shaped(*, evicted):
    """Returns a play of penalties, biases and likeliest tokens."""

    async def play(run):
        asked = [
            Asked(prompt, SamplingParams(max_new_tokens=24, ignore_eos=True, **more))
            for prompt in PROMPTS
            for more in (*SHAPED, {})
        ]
        run.judge(asked, await run.together(asked))
        assert (run.engine.stats().evictions > 0) == evicted

    return play


async def structures(run):
    """Checks that structured outputs match, and that rows beside them are what they are alone."""
    others = [{}, {"temperature": 0.8, "seed": 7}]
    plain = [Asked(PROMPTS[0], SamplingParams(max_new_tokens=20, **one)) for one in others]
    structured = [
        Asked(PROMPTS[0], SamplingParams(100, temperature, structure=one, seed=seed))
        for one in STRUCTURES.values()
        for seed, temperature in enumerate((0.0, 0.7, 1.5, 5.0))
    ]
    found = await run.together(structured + plain)
    run.judge(plain, found[len(structured) :])
    ended = 0
    for one, got in zip(structured, found, strict=False):
        name = next(n for n, s in STRUCTURES.items() if s is one.sampling.structure)
        if got.reason == "stop":  # else it was cut at max_new_tokens
            ended += 1
            assert matches(name, got.text), got.text
    assert ended >= 8


def alternating(*, sets):
    """Returns a play in which models take turns, parked between layers, with sets of weights
    swapped.
    """

    async def play(run):
        asked = list(requests(random.Random(0), 36, names=NAMES))
        together = await run.together(asked)
        run.judge(asked, together)
        assert run.engine.scheduler.num_parks > 0
        assert (run.engine.registry.num_swaps > 0) == sets
        evicted = sum(run.engine.scheduler.num_evictions.values())
        assert sets or not evicted
        if not sets:
            for one, got in zip(asked, together, strict=True):
                alone = await answer(run.engine, one, priority=LS, reuse_prefix=False)
                assert_alike(run, got, alone)
        with pytest.raises(NotFound, match="model 'tax' is not served; 'base', 'law', 'code' are"):
            await answer(run.engine, Asked([1], SamplingParams(), "tax"))

    return play


async def fetched(run):
    """Checks that requests that refuse brownout get their model's experts, while siblings' serve
    others.
    """
    rng = random.Random(3)
    asked = [
        one._replace(options={**one.options, "allow_brownout": rng.random() < 0.4})
        for one in list(requests(rng, 24, names=NAMES))
    ]
    for one, got in zip(asked, await run.together(asked), strict=True):
        if not one.options["allow_brownout"] or one.model == "base":
            run.judge([one], [got])
        else:
            assert got.degraded > 0
    assert run.engine.fetcher.num_reruns > 0
    assert run.engine.fetcher.fetches["miss"] > 0


async def fetched_differences(run):
    check_settings(ServerConfig(engine=run.engine.config))
    asked = list(requests(random.Random(5), 16, names=NAMES, allow_brownout=False))
    run.judge(asked, await run.together(asked))
    assert run.engine.fetcher.num_reruns > 0


def for_mixing(seed, count):
    """Draws requests of two tokens or more, for a decode step to be mixed; some change logits."""
    penalties = itertools.cycle((0.0, 0.0, 1.5))
    drawn = requests(
        random.Random(seed), count, names=NAMES, prompt_below=20, fewest=2, priority=LS
    )
    for one in drawn:
        sampling = replace(one.sampling, frequency_penalty=next(penalties))
        yield one._replace(sampling=sampling)


async def interleaved(run, asked, seed, **options):
    """Sends requests in another order, some of them later; answers are in the first order."""
    rng = random.Random(seed)
    order = rng.sample(range(len(asked)), len(asked))

    async def later(at):
        for _ in range(rng.randrange(30)):
            await asyncio.sleep(0)
        return at, await answer(run.engine, asked[at], **options)

    found = dict(await asyncio.gather(*map(later, order)))
    return [found[at] for at in range(len(asked))]


def mix_whenever_possible(engine):
    """Mixes steps of several models whatever is measured."""
    most = engine.config.mixed_models
    assert engine.executor.mixed.pays(np.full((most + 1, 1), 1)) is False
    assert (
        engine.executor.mixed.pays(np.array([[8], [1]])) is False
    )  # a step has room for eight rows
    engine.executor.mixed.pays = lambda counts: 1 < len(counts) <= most


async def mixes(run):
    """Plays two or three models in a step, in three interleavings."""
    mix_whenever_possible(run.engine)
    asked = list(for_mixing(1, 18))
    for seed in range(3):
        run.judge(asked, await interleaved(run, asked, seed))
    assert run.engine.scheduler.num_mixed > 20
    found = {f.name: f for f in run.metrics.by_model.collect(run.engine)}
    assert found["jmoe_mixed_steps"].samples[0].value == run.engine.scheduler.num_mixed
    cfg, stats = run.engine.model.config, run.engine.stats()
    assert run.metrics.expert_rows.sum() == stats.expert_visits  # nothing is lost or twice
    united = run.engine.model.num_united_slots
    assert run.metrics.expert_rows.shape == (cfg.num_moe_layers, cfg.num_experts + united)


async def mixes_beside_brownout(run):
    """Checks that requests that refuse brownout, and those to a model with a floor of 100, are
    exact in steps whose other rows are degraded.
    """
    mix_whenever_possible(run.engine)
    asked = list(for_mixing(2, 16))
    degraded, got = await asyncio.gather(
        interleaved(run, asked, 4), interleaved(run, asked, 5, allow_brownout=False)
    )
    run.judge(asked, got)
    of_law = [pair for pair in zip(asked, degraded, strict=True) if pair[0].model == "law"]
    run.judge(*zip(*of_law, strict=True))
    assert run.engine.scheduler.num_mixed > 5
    assert sum(one.degraded for one in degraded) > 0


async def mixes_and_fetches(run):
    """Checks that rows that refuse brownout get their model's experts in steps with rows of others,
    some of which substitutes serve.
    """
    mix_whenever_possible(run.engine)
    asked = list(for_mixing(4, 16))
    degraded, got = await asyncio.gather(
        interleaved(run, asked, 6), interleaved(run, asked, 7, allow_brownout=False)
    )
    run.judge(asked, got)
    assert run.engine.scheduler.num_mixed > 5
    assert run.engine.fetcher.num_reruns > 0
    assert sum(one.degraded for one in degraded) > 0


async def mixes_of_sets(run):
    """Checks that models whose weights are resident mix, and that swapping sets compiles
    nothing.
    """
    mix_whenever_possible(run.engine)
    asked = list(for_mixing(3, 12))
    run.judge(asked, await interleaved(run, asked, 0))
    assert run.engine.registry.num_swaps > 0


async def many_at_once(run):
    """Plays more requests than slots, with prompts longer than a chunk; some sample, and some are
    scored.
    """
    asked = [
        one._replace(wait_s=0.01 * at)
        for at, one in enumerate(requests(random.Random(3), 24, scores=0.2))
    ]
    run.judge(asked, await run.together(asked))


async def begin_alike(run):
    """Plays requests whose prompts begin alike, in so few pages that some are evicted."""
    await evicts(run)
    assert run.engine.stats().reused_tokens > 0


async def evicts(run):
    """Plays the same, whether or not they share their beginning."""
    drawn = requests(random.Random(5), 16, below=20)
    asked = [one._replace(prompt=[*range(7, 16), *one.prompt]) for one in drawn]
    run.judge(asked, await run.together(asked))
    assert sum(run.engine.scheduler.num_evictions.values()) > 0


def beside(play, least=3):
    """Returns a play in whose steps rows decode beside prompts wherever they can, whatever is
    measured.
    """

    async def played(run):
        times = run.engine.pace.times
        times.hybrid_pays = lambda num_tokens, num_rows: all(map(times.knows, Phase))
        await play(run)
        assert run.engine.scheduler.num_hybrid >= least

    return played


async def urgent(run):
    """Plays requests of one class, more than slots; some are scored, and their steps are apart."""
    rng, names = random.Random(7), run.engine.names
    given = {"names": names if len(names) > 1 else ("",), "scores": 0.1, "priority": LS}
    drawn = requests(rng, 30, prompt_below=30, fewest=4, below=24, **given)
    asked = [one._replace(wait_s=0.004 * at) for at, one in enumerate(drawn)]
    if reuses := run.engine.config.reuses_prefixes:
        asked = [one._replace(prompt=[*range(7, 16), *one.prompt[:15]]) for one in asked]
    run.judge(asked, await run.together(asked))
    assert (run.engine.stats().reused_tokens > 0) == reuses


class Row(NamedTuple):
    """A mode, the play, and changed settings."""

    mode: str
    play: Any
    changes: dict[str, Any] = {}  # noqa: RUF012
    exhaustive: bool = False


RESTLESS = {"policy": "restless:Restless"}
HYBRID = {"hybrid_steps": "on"}
SETS = {"resident_sets": 2, "model_stay_s": 0.02}
REUSE = {
    "max_num_seqs": 6,
    "reserved_ls_seqs": 2,
    "max_model_len": 64,
    "page_size": 8,
    "num_pages": 30,
    "max_prefill_seqs": 4,
    "decode_buckets": (6,),
    "prefill_buckets": (32,),
    "threshold_buckets_percent": (100,),
    "compilation_cache": "",
    "part_layers": 2,
    "prefix_reuse": "on",
    "brownout": BrownoutConfig(
        strategy="partial",
        salc=False,
        prefill_threshold_percent=40,
        decode_threshold_percent=40,
        ways=(2, 4, 8),
    ),
    **RESTLESS,
}
WORKERS_REUSE = {**REUSE, "part_layers": 0, "threshold_buckets_percent": (), "policy": "ls_first"}
WORKERS_REUSE |= {"num_pages": 40}
REUSED = ("cached", "degraded", "exact and cached")
ROWS = {
    "one: parts, ls_first": Row("one", parts, {"policy": "ls_first"}, exhaustive=True),
    "one: parts, restless": Row("one", parts, RESTLESS, True),
    "one: parts, many more": Row("one", many_more, {**RESTLESS, "part_layers": 2}, True),
    "one: evictions": Row("one", evictions, {"num_pages": 12, "reserved_ls_seqs": 1}),
    "one: measured parts": Row("one", measured_parts, {"part_layers": 0}),
    "one: prefix reuse": Row("bundled", prefix_reuse([0, 3], *REUSED, "parks"), REUSE),
    "one: prefix reuse, many more": Row(
        "bundled", prefix_reuse(range(100, 100 + num_traces(12)), *REUSED), REUSE, True
    ),
    "one: shaped, room": Row("bundled", shaped(evicted=False), {"max_model_len": 96}, True),
    "one: shaped, evictions": Row(
        "bundled", shaped(evicted=True), {"max_model_len": 96, "num_pages": 10}, True
    ),
    "one: structures": Row("bundled", structures),
    "one: fp8": Row("fp8", shaped(evicted=False), {"max_model_len": 96}, exhaustive=True),
    "one: fp8 KV": Row("fp8 kv", parts, RESTLESS),
    "family: fp8 KV": Row("fp8 kv family", mixes, exhaustive=True),
    "one: hybrid steps": Row("one", beside(urgent), HYBRID),
    "one: hybrid steps, evictions": Row("one", beside(urgent), {**HYBRID, "num_pages": 14}, True),
    "one: hybrid steps, prefix reuse": Row(
        "one",
        beside(urgent),
        {**HYBRID, "prefix_reuse": "on", "reserved_ls_seqs": 4},
        exhaustive=True,
    ),
    "one: hybrid steps, shaped": Row(
        "bundled", beside(shaped(evicted=False)), {**HYBRID, "max_model_len": 96}, True
    ),
    "one: hybrid steps, structures": Row("bundled", beside(structures), HYBRID, True),
    "one: hybrid steps, fp8 KV": Row("fp8 kv", beside(urgent), HYBRID, True),
    "family: hybrid steps": Row("family", beside(urgent, least=1), HYBRID, True),
    "workers: fp8 KV": Row("fp8 kv workers", many_at_once, exhaustive=True),
    "workers: int4": Row("int4 workers", many_at_once, exhaustive=True),
    "workers: prefix reuse": Row("workers", prefix_reuse(range(6), *REUSED), WORKERS_REUSE, True),
    "workers: shaped, room": Row("workers", shaped(evicted=False), {"max_model_len": 96}, True),
    "workers: shaped, evictions": Row(
        "workers", shaped(evicted=True), {"max_model_len": 96, "num_pages": 12}, True
    ),
    "workers: structures": Row("workers", structures, exhaustive=True),
    "family: resident": Row("family", alternating(sets=False), {**RESTLESS, **ROOM}),
    "family: sets that come and go": Row("family", alternating(sets=True), {**RESTLESS, **SETS}),
    "host experts: ls_first": Row("host experts", fetched, exhaustive=True),
    "host experts: restless": Row("host experts", fetched, RESTLESS, True),
    "host experts: sets that come and go": Row("host experts", fetched, {"resident_sets": 2}),
    "host experts: mxfp4": Row("mxfp4 host experts", fetched, RESTLESS, True),
    "host experts: differences": Row("differences", fetched_differences, exhaustive=True),
    "mixed: three interleavings": Row("mixed", mixes, exhaustive=True),
    "mixed: beside brownout": Row(
        "mixed",
        mixes_beside_brownout,
        {
            "brownout": BrownoutConfig(
                "partial", 2, (), 20, 20, salc=False, models=("law:floor_percent=100",)
            )
        },
    ),
    "mixed: beside experts in host memory": Row(
        "mixed host experts", mixes_and_fetches, exhaustive=True
    ),
    "mixed: sets that come and go": Row(
        "mixed",
        mixes_of_sets,
        {"resident_sets": 2, "model_stay_s": 0.01, "mixed_models": 2},
        exhaustive=True,
    ),
}

ARCHITECTURES = (  # goldens of what others do not have
    "glm4_moe",
    "olmoe_clip_gqa",
    "granitemoe_attention_bias",
    "phimoe_attention_bias",
    "gpt_oss",
    "deepseek_v3",
    "mellum",
    "mistral4",
    "exaone_moe",
    "afmoe",
    "qwen3_next",
    "lfm2_moe",
    "granitemoehybrid",
    "nemotron_h",
)
RECURRENT = "qwen3_next", "lfm2_moe", "granitemoehybrid", "nemotron_h"
FEW_PAGES = {"num_pages": 14, "reserved_ls_seqs": 1, "prefix_reuse": "on"}
OFTEN = {
    "parts": "glm4_moe",
    "prefixes, evictions": "olmoe_clip_gqa",
    "family": "phimoe_attention_bias",
    "workers": "deepseek_v3",
    "hybrid steps": "gpt_oss",
}
"""The architecture that each row is played on every time; the others take turns."""
ALSO = {("qwen3_next", "prefixes, evictions"), ("qwen3_next", "hybrid steps"), ("afmoe", "workers")}
for golden in ARCHITECTURES:
    own = {
        "parts": Row(f"one of {golden}", parts, RESTLESS),
        "prefixes, evictions": Row(f"one of {golden}", begin_alike, FEW_PAGES),
        "family": Row(f"family of {golden}", alternating(sets=False), {**RESTLESS, **ROOM}),
        "workers": Row(f"aep of {golden}", many_at_once),
        "hybrid steps": Row(f"one of {golden}", beside(urgent), HYBRID),
    }
    if golden in RECURRENT:  # prompts share nothing
        changes = {**FEW_PAGES, "prefix_reuse": "auto"}
        own["prefixes, evictions"] = Row(f"one of {golden}", evicts, changes)
    for what, row in own.items():
        often = golden == OFTEN[what] or (golden, what) in ALSO
        ROWS[f"{golden}: {what}"] = row._replace(exhaustive=not often)


def cases():
    for name, row in ROWS.items():
        yield pytest.param(row, id=name, marks=[pytest.mark.exhaustive] * row.exhaustive)


def judge(mode, judged) -> None:
    """Has each model in the notebook judge its answers."""
    assert judged
    for name, model in mode.models.items():
        own = [(one, got) for one, got in judged if one.model == name]
        assert own, name
        within = {"atol": 5e-4} if is_recurrent(model.config) else {}
        check(model, *zip(*own, strict=True), **within, **mode.within)


@pytest.mark.deep
async def test_experts_kept_by_weight_are_those_of_the_notebook(made):
    """Each request alone, so that a step's rows are the notebook's."""
    mode, sampling = made("bundled"), SamplingParams(max_new_tokens=12, ignore_eos=True)
    (model,) = mode.models.values()
    prompts = [[3 + (7 * i + j * j) % 400 for j in range(12)] for i in range(6)]
    written = []
    for keep in ("visits", "weight"):
        want = [
            jmoe.generate(model, [p], 12, jmoe.Brownout("partial", 40, 8, keep), stop_token_ids=())
            for p in prompts
        ]
        brownout = BrownoutConfig("partial", 8, (), 40, 40, salc=False, keep=keep)
        async with running(mode, brownout=brownout, prefix_reuse="off") as run:
            got = [await answer(run.engine, Asked(prompt, sampling)) for prompt in prompts]
        assert [one.tokens for one in got] == [one.tokens[0] for one in want]
        written.append([one.tokens for one in got])
    assert written[0] != written[1]


@pytest.mark.deep
@pytest.mark.parametrize("row", cases())
async def test_served_is_what_the_notebook_writes(made, row):
    mode = made(row.mode)
    async with running(mode, **row.changes) as run:
        await row.play(run)
    judge(mode, run.judged)


BLOCKING = ("one: structures", "one: shaped, room", "host experts: sets that come and go")


@pytest.mark.sized(exhaustive=("host experts: sets that come and go",))
@pytest.mark.deep
@pytest.mark.parametrize("name", BLOCKING)
async def test_steps_launched_by_a_thread_are_those_of_the_notebook(made, monkeypatch, name):
    """As on a GPU, where a call takes its thread for a while: here 2 ms more."""
    run_step, row, threads = Device.run, ROWS[name], set()

    def slow(*args, **options):
        threads.add(threading.current_thread().name)
        time.sleep(0.002)
        return run_step(*args, **options)

    monkeypatch.setattr(Device, "calls_block", True)
    monkeypatch.setattr(Device, "run", slow)
    mode = made(row.mode)
    async with running(mode, **row.changes) as run:
        threads.clear()  # of the start
        await row.play(run)
    assert threads == {"jmoe-launch"}
    judge(mode, run.judged)


@pytest.mark.deep
async def test_served_is_what_the_notebook_writes_aep(made, monkeypatch):
    """By asynchronous workers, whose pickers' code is compiled before the engine is ready."""
    numba = pytest.importorskip("numba")
    seen, ready, decide = [set(), set()], threading.Event(), compiled.decide

    def note(*args):
        """Notes the types and shapes of arguments."""
        seen[ready.is_set()].add((*map(numba.typeof, args), args[2].shape))
        return decide(*args)

    monkeypatch.setattr(compiled, "decide", note)
    mode = made("aep")
    async with running(mode, ready=ready.set) as run:
        await many_at_once(run)
    warmed, picked = seen
    assert picked
    assert picked <= warmed
    judge(mode, run.judged)


@pytest.mark.exhaustive
def test_served_is_what_the_notebook_writes_mesh():
    """Shaped rows and structured outputs, on four devices."""
    run_on_devices(Path(__file__).with_name("served_on_devices.py"), 4)


# ---- under brownout: one at a time, so that what is degraded depends on nobody else --------------


@pytest.mark.sized(
    exhaustive=(
        "family of granitemoe-ways4",
        "family of olmoe_clip_gqa-ways3",
        "family of phimoe_attention_bias-ways5",
    )
)
@pytest.mark.deep
@pytest.mark.parametrize(
    ("name", "ways"),
    [
        ("family", (2, 3)),
        ("workers", (2, 4, 8, 2)),
        ("family of glm4_moe", (2, 3)),
        ("family of olmoe_clip_gqa", (2, 3)),
        ("family of granitemoe", (2, 3)),
        ("family of phimoe_attention_bias", (2, 3)),
    ],
)
async def test_under_brownout_each_has_its_own_united_experts(made, name, ways):
    mode = made(name)
    sampling = SamplingParams(max_new_tokens=6, ignore_eos=True, logprobs=True)
    prompt, found = [5, 9, 2, 40], {}
    brownout = BrownoutConfig("partial", 2, (), 10, 10, salc=False)
    async with running(mode, brownout=brownout) as run:
        for way in ways:
            assert (await run.engine.set_brownout(BrownoutChange(way=way))).way == way
            for name in mode.models:
                found[name, way] = await answer(run.engine, Asked(prompt, sampling, name))
    for (name, way), got in found.items():
        given = jmoe.Brownout("partial", 10, way, "weight")
        want = jmoe.generate(mode.models[name], [prompt], 6, given, stop_token_ids=())
        assert got.tokens == want.tokens[0]
        assert got.degraded == want.degraded_visits[0] > 0
        np.testing.assert_allclose(got.logprobs, want.logprobs[0], atol=1e-4)


@pytest.fixture
def asked_for(made, tmp_path, monkeypatch):
    """Returns the engine settings of `jmoe serve NAME=DIR NAME=DIR --family FILE` under fixed
    brownout.
    """
    made("family")
    owners = Sharing.none(NAMES, 2, 7).owners
    owners[:, :, ::2] = 1
    prints, file = tuple(map(weights_digest, made.directories.values())), tmp_path / "family.json"
    write_sharing(file, Sharing(NAMES, owners, prints))
    started = []

    def serve(settings, *_):
        started.append(settings)
        return asyncio.sleep(0)

    monkeypatch.setattr("serving.frontend.server.serve", serve)
    models = [f"{name}={path}" for name, path in made.directories.items()]
    flags = "--way 2 --prefill-threshold 30 --decode-threshold 30 --no-salc"
    words = ["serve", *models, "--family", str(file), *flags.split()]
    monkeypatch.setattr("sys.argv", ["jmoe", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    return started[0].engine


@pytest.mark.deep
async def test_over_a_socket_with_shared_experts_under_brownout(made, asked_for):
    """What `family.json` says is served, each model by its name and with its own united experts."""
    given = asked_for
    settings = settings_of(
        {}, made.cache, models=given.models, family=given.family, brownout=given.brownout
    )
    metrics = Metrics()
    server = Server(ServerConfig(port=0, engine=settings), metrics)
    await server.start()
    engine = await Engine.start(settings, observer=metrics)
    await server.attach(engine)
    try:
        async with Client(server.address) as client:
            info = await client.server_info()
            assert (info.model, list(info.models)) == ("base", list(NAMES))
            assert (await client.model_info("law")).name == "law"
            assert (await client.model_info()).name == "base"
            sampling = pb.SamplingParams(max_new_tokens=5)
            served = {}
            for name in ("", *NAMES):
                assert list((await client.model_info(name)).united_ways) == [2, 3]
                outs = [out async for out in client.generate([3, 1, 4], sampling, model=name)]
                assert outs[-1].usage.degraded_visits > 0
                served[name] = [token for out in outs for token in out.token_ids]
    finally:
        await server.stop()
    assert served[""] == served["base"]
    brownout = jmoe.Brownout("partial", 30, 2, "weight")
    for model in load_family(made.directories, given.family, "float32"):
        found = jmoe.generate(model, [[3, 1, 4]], max_new_tokens=5, brownout=brownout)
        assert served[model.name] == found.tokens[0]
    lines = {f.name: f for f in metrics.by_model.collect(engine)}
    generated = {
        (s.name.rpartition("_")[2], s.labels["model_name"]): s.value
        for s in lines["jmoe_request_generation_tokens"].samples
    }
    for model, count in {"base": 2, "law": 1, "code": 1}.items():
        assert generated["count", model] == count
        assert generated["sum", model] == 5 * count


# ---- the oracle ---------------------------------------------------------------------------------


@pytest.mark.deep
def test_the_oracle_takes_what_the_notebook_generates_and_finds_what_is_wrong(made):
    model, prompts = made("aep").models[""], [[5, 9, 2], [7], [30, 4, 22, 8, 1]]
    for sampled in ({}, {"temperature": 0.8, "top_k": 5, "seed": 3}):
        want = jmoe.generate(model, prompts, 6, stop_token_ids=(), **sampled)
        asked, answers = [], []
        for at, prompt in enumerate(prompts):
            seeded = {**sampled, "seed": sampled.get("seed", 0) + at}
            asked.append(Asked(prompt, SamplingParams(6, **seeded, ignore_eos=True, logprobs=True)))
            answers.append(Answer(want.tokens[at], want.logprobs[at], "", (), [], None, "length"))
        check(model, asked, answers)
        one = answers[1]
        other = [one.tokens[0], (one.tokens[1] + 1) % 60, *one.tokens[2:]]
        off = [*one.logprobs[:-1], one.logprobs[-1] + 0.01]
        short = one._replace(tokens=one.tokens[:-1], logprobs=one.logprobs[:-1])
        for wrong in (one._replace(tokens=other), one._replace(logprobs=off), short):
            with pytest.raises(AssertionError):
                check(model, asked, [answers[0], wrong, answers[2]])
        unscored = [a._replace(sampling=replace(a.sampling, logprobs=False)) for a in asked]
        with pytest.raises(AssertionError):
            check(model, unscored, [answers[0], one._replace(tokens=other), answers[2]])
