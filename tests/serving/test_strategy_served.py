"""A strategy of a user's own in a server: its settings, its answers, its room, its faults."""

import asyncio
import logging
from types import SimpleNamespace

import pytest
from families import GOLDEN, answer, settings_of

import jmoe
from jmoe import brownout
from jmoe.brownout import LowestGate, Own, strategy_code
from jmoe.config import read_config
from serving.config import BrownoutConfig, SalcConfig
from serving.control.slo import SloAnalyser
from serving.engine import Engine
from serving.errors import InvalidRequest
from serving.execution.programs import _traced_code
from serving.execution.runner import DeviceRunner
from serving.plan import StepControl
from serving.request import BrownoutChange, SamplingParams
from serving.settings.plugins import own_strategy
from serving.startup.prepare import check_start

NAME = "jmoe.brownout:LowestGate"
STRAYS = """
class Strays:
    def __call__(self, ids, weights, groups, threshold_percent, valid, exempt):
        return ids + 1000
"""


def settings(tmp_path, strategy):
    given = BrownoutConfig(
        strategy=strategy, salc=False, prefill_threshold_percent=50, decode_threshold_percent=50
    )
    return settings_of(
        {}, str(tmp_path / "programs"), model=str(GOLDEN), models=(), mixed_models=1, brownout=given
    )


async def served(config):
    engine = await Engine.start(config)
    try:
        sampling = SamplingParams(max_new_tokens=4, ignore_eos=True, logprobs=True)
        asked = [answer(engine, prompt, sampling) for prompt in ([1, 2, 3], [9, 8, 7, 6, 5])]
        found = await asyncio.gather(*asked)
        await engine.set_brownout(BrownoutChange(strategy="zero"))
        exact = await answer(engine, [1, 2, 3], sampling)
        await engine.set_brownout(BrownoutChange(strategy=config.brownout.strategy))
        return [*found, exact, await answer(engine, [1, 2, 3], sampling)]
    finally:
        await engine.stop()


def noted(model, setting, prompts=([1, 2, 3], [9, 8, 7, 6, 5])):
    found = []
    for prompt in prompts:  # by itself: the strategy goes row by row
        out = jmoe.generate(model, [prompt], 4, setting, stop_token_ids=())
        found.append((out.tokens[0], out.degraded_visits[0]))
    return found


@pytest.mark.deep
@pytest.mark.usefixtures("compiled_in_a_hurry")
async def test_it_serves_what_the_notebook_writes(tmp_path):
    model = jmoe.load(GOLDEN, "float32")
    found = await served(settings(tmp_path, NAME))
    have = [(tokens, degraded) for tokens, _, degraded in found]
    wanted = noted(model, jmoe.Brownout(LowestGate(), 50))
    assert have[:2] == wanted
    assert have[2] == noted(model, None)[0]
    assert have[3] == wanted[0]
    assert wanted[0][1] > 0


@pytest.mark.deep
@pytest.mark.usefixtures("compiled_in_a_hurry")
async def test_where_it_fails_the_papers_plan_serves_and_one_line_says_so(tmp_path, caplog):
    path = tmp_path / "mine.py"
    path.write_text(STRAYS, encoding="utf-8")
    brownout._say.cache_clear()
    with caplog.at_level(logging.WARNING, logger="jmoe.brownout"):
        found = await served(settings(tmp_path, f"{path}:Strays"))
    lines = [record.message for record in caplog.records if record.name == "jmoe.brownout"]
    assert len(lines) == 1
    assert ":Strays returned experts out of range" in lines[0]
    # Without united experts, the originals serve.
    exact = noted(jmoe.load(GOLDEN, "float32"), None)
    assert [(tokens, degraded) for tokens, _, degraded in found[:2]] == exact


def test_one_that_is_not_there_ends_the_start(tmp_path):
    with pytest.raises(ValueError, match="strategy 'nowhere:Mine' cannot be made: ModuleNotFound"):
        check_start(settings(tmp_path, "nowhere:Mine"))
    with pytest.raises(ValueError, match=r"'jmoe.brownout:Control' cannot be made: TypeError"):
        own_strategy("jmoe.brownout:Control")


def test_callers_choose_that_of_the_settings_and_no_other():
    slo = SloAnalyser(BrownoutConfig(strategy=NAME), SalcConfig(), way=0)
    assert (
        slo.code
        == strategy_code(LowestGate())
        not in map(strategy_code, ("zero", "partial", "full"))
    )
    slo.check(change := BrownoutChange(strategy="full"))
    slo.apply(change, 0.0)
    slo.check(BrownoutChange(strategy=NAME))
    with pytest.raises(InvalidRequest, match=r"'os:system'; it must be zero, .* jmoe.brownout:Low"):
        slo.check(BrownoutChange(strategy="os:system"))


@pytest.mark.parametrize(
    ("most", "exempt", "percent"), [(None, 0, 100), (30, 0, 40), (36, 0, 47), (36, 3, 67)]
)
def test_its_bound_chooses_the_capacity(most, exempt, percent):
    class Bounded(LowestGate):
        def max_active(self, threshold_percent, num_experts, num_united):
            return most

    own = Own(LowestGate() if most is None else Bounded(), guarded=True)
    cfg = SimpleNamespace(num_experts=60, experts_per_token=4, strategy=own)
    resident = SimpleNamespace(largest_threshold=lambda strategy, level: level)
    model = SimpleNamespace(config=cfg, num_united_slots=8, resident=resident)
    runner = SimpleNamespace(model=model, family=[model])
    plan = SimpleNamespace(models=(0,), num_exempt=exempt)

    def capacity(strategy):
        control = StepControl(40, strategy_code(strategy))
        return DeviceRunner._capacity_percent(runner, plan, control)

    assert capacity(own.strategy) == percent
    assert capacity("full") == 40 + 20 * bool(exempt)


def test_programs_are_kept_by_its_code(tmp_path):
    (tmp_path / "a.py").write_text(STRAYS, encoding="utf-8")
    (tmp_path / "b.py").write_text(STRAYS.replace("1000", "1001"), encoding="utf-8")

    def code(name, cfg=read_config(GOLDEN)):
        own = name and Own(own_strategy(f"{tmp_path / name}:Strays"), guarded=True)
        cfg = jmoe.api.replace(cfg, strategy=own or None)
        return _traced_code(cfg), repr(cfg)

    found = [code(""), code("a.py"), code("b.py")]
    assert code("a.py") == found[1]
    assert len(set(found)) == 3
