"""United experts: jmoe under brownout against the model in float64 loops, and what must not move.

Five architectures: with shared experts, with a dense layer before the MoE one (united experts
count MoE layers), without shared experts, with scored groups, and with biases; five
to nine experts.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_model import NumpyModel

import jmoe
from jmoe.brownout import Brownout

DEEP = ["qwen2_moe_mlp_only_tied", "glm4_moe", "olmoe", "granitemoe", "phimoe_window_tied"]
DEEP += [
    "gpt_oss_types_tied",
    "minimax_m2",
    "ernie4_5_moe",
    "dots1",
    "hy_v3",
    "afmoe",
    "hunyuan_v1_moe",
    "mellum",
    "qwen3_next",
    "lfm2_moe",
    "granitemoehybrid",
    "nemotron_h",
    "exaone_moe",
]
CASES = ["qwen2_moe", *(pytest.param(name, marks=pytest.mark.deep) for name in DEEP), "qwen3_moe"]
TOKENS = np.random.default_rng(0).integers(0, 70, (3, 8))


def by_hand(directory, brownout, tokens=TOKENS, exempt=(False, False, False)):
    model = NumpyModel(directory)
    rows = [(n, int(t), exempt[n]) for n, sequence in enumerate(tokens) for t in sequence]
    logits, degraded = model.step(rows, brownout.strategy, brownout.threshold_percent, brownout.way)
    assert model.gap > 1e-4, "a router's choice is too close to call: take other tokens"
    return logits.reshape(*TOKENS.shape, -1), degraded


SETTINGS = [
    Brownout("zero", 0),
    *(Brownout("full", t) for t in (0, 40, 100)),
    *(Brownout("partial", t, way) for t in (0, 40, 100) for way in (2, 3)),
]


@pytest.mark.sized(deep=("qwen3_moe-zero0",))
@pytest.mark.parametrize("brownout", SETTINGS, ids=lambda b: f"{b.strategy}{b.threshold_percent}")
@pytest.mark.parametrize("case", CASES)
def test_forward_under_brownout_equals_loops(case, brownout, united_models, united_dirs):
    logits, stats = jmoe.forward(united_models(case), TOKENS, brownout, return_stats=True)
    want, degraded = by_hand(united_dirs(case), brownout)
    np.testing.assert_allclose(logits, want, rtol=0, atol=2e-4)
    assert np.sum(stats.degraded_visits, axis=0).ravel().tolist() == degraded.tolist()
    assert (degraded.sum() > 0) == (
        brownout.strategy != "zero" and brownout.threshold_percent < 100
    )


@pytest.mark.parametrize("strategy", ["full", "partial"])
def test_exempt_sequences_keep_the_logits_of_zero_brownout(strategy, united_models, united_dirs):
    model, brownout = united_models("qwen2_moe"), Brownout(strategy, 0, 2)
    exempt, tokens = (False, True, False), TOKENS.copy()
    tokens[1] = 5  # the exempt sequence: one token all over, so that it pins few experts
    logits, stats = jmoe.forward(model, tokens, brownout, exempt=list(exempt), return_stats=True)
    plain = jmoe.forward(model, tokens)
    np.testing.assert_allclose(logits[1], plain[1], rtol=0, atol=1e-5)
    degraded = np.asarray(stats.degraded_visits).sum(axis=0)
    assert not degraded[1].any()
    assert degraded[[0, 2]].any()
    want, _ = by_hand(united_dirs("qwen2_moe"), brownout, tokens, exempt)
    np.testing.assert_allclose(logits, want, rtol=0, atol=2e-4)


@pytest.mark.parametrize("strategy", ["full", "partial"])
def test_100_percent_equals_zero_brownout_exactly(strategy, united_models):
    model = united_models("qwen2_moe")
    plain = np.asarray(jmoe.forward(model, TOKENS))
    got = np.asarray(jmoe.forward(model, TOKENS, Brownout(strategy, 100, 2)))
    np.testing.assert_array_equal(got, plain)


def test_ways_swap_back_and_forth(united_models):
    model = united_models("qwen3_moe")
    plain = np.asarray(jmoe.forward(model, TOKENS))
    seen = {}
    for way in (2, 3, 2, 2, 3):
        got = np.asarray(jmoe.forward(model, TOKENS, Brownout("partial", 10, way)))
        assert model.way == way
        np.testing.assert_array_equal(got, seen.setdefault(way, got))
    assert np.abs(seen[2] - seen[3]).max() > 1e-3
    np.testing.assert_array_equal(np.asarray(jmoe.forward(model, TOKENS)), plain)
    # A setting without a way keeps the one that is loaded.
    got = np.asarray(jmoe.forward(model, TOKENS, Brownout("partial", 10)))
    np.testing.assert_array_equal(got, seen[3])


def test_the_first_way_is_the_largest(united_dirs):
    model = jmoe.load(united_dirs("qwen2_moe"), dtype="float32")
    model.prepare(Brownout("zero"))
    model.prepare(Brownout("full", 0))
    assert model.way is None
    model.prepare(Brownout("partial", 50))
    assert model.way == 3


def test_one_program_serves_every_setting(united_models):
    model = united_models("qwen2_moe")
    jmoe.forward(model, TOKENS, Brownout("partial", 50, 2))
    compiled = []

    def listen(event, *_, **__):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for brownout in (*SETTINGS, None):
            jmoe.forward(model, TOKENS, brownout).block_until_ready()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled


def test_ways_that_are_not_there(united_dirs, united_models):
    with pytest.raises(ValueError, match="way is 5; qwen2_moe has united experts for: 2, 3"):
        united_models("qwen2_moe").use_way(5)
    with pytest.raises(ValueError, match=r"ways are \[2, 4\]; qwen2_moe has .* for: 2, 3"):
        jmoe.load(united_dirs("qwen2_moe"), ways=[2, 4])
    none = jmoe.load(united_dirs("qwen2_moe"), dtype="float32", ways=[])
    assert none.num_united_slots == 0
    with pytest.raises(
        ValueError, match="partial brownout needs united experts; qwen2_moe has none"
    ):
        jmoe.forward(none, TOKENS, Brownout("partial", 50))
    with pytest.raises(ValueError, match="way is 2; qwen2_moe has united experts for: none"):
        jmoe.forward(none, TOKENS, Brownout("partial", 50, 2))


def test_the_pool_has_places_for_the_largest_way_kept(united_dirs):
    cfg = jmoe.config.read_config(united_dirs("qwen2_moe"))
    for ways, places in ((None, 4), ([3], 3), ([2, 3], 4)):
        model = jmoe.load(united_dirs("qwen2_moe"), dtype="float32", ways=ways)
        assert model.num_united_slots == places
        slots = np.asarray(model.table.slots)
        assert sorted(slots.ravel()) == list(range(len(model.pool.gate_up)))
        assert slots.shape == (cfg.num_moe_layers, cfg.num_experts + places)
        assert (np.asarray(model.table.groups) == -1).all()


@pytest.mark.parametrize(
    ("tokens", "exempt", "words"),
    [
        (np.array([1, 2]), None, "tokens must be integers"),
        (np.zeros((2, 0), int), None, "tokens must be integers"),
        (np.zeros((1, 2)), None, "tokens must be integers .* float64"),
        ([[1, 97]], None, "token 97 is outside the vocabulary of 97"),
        ([[-1, 2]], None, "token -1 is outside the vocabulary of 97"),
        ([[1, 2]], np.array([True, False]), r"exempt must be bool \[1\]; got \(2,\)"),
        ([[1, 2], [3]], None, "these rows differ in length"),
        (np.ones((1, 129), int), None, "129 positions; qwen2_moe has 128"),
    ],
)
def test_forward_refuses_bad_input(tokens, exempt, words, united_models):
    with pytest.raises(ValueError, match=words):
        jmoe.forward(united_models("qwen2_moe"), tokens, exempt=exempt)


@pytest.mark.deep
def test_reduced_precision_stays_close(united_dirs):
    model = jmoe.load(united_dirs("qwen2_moe"), dtype="bfloat16", ways=[])
    logits = np.asarray(jmoe.forward(model, TOKENS))
    assert logits.dtype == jnp.float32
    want, _ = by_hand(united_dirs("qwen2_moe"), Brownout("zero"))
    error = np.sqrt(np.mean((logits - want) ** 2) / np.mean(want**2))
    assert error < 0.1


@pytest.mark.deep
def test_what_was_assigned_before_is_assigned_still_with_a_warning(united_models):
    """For one release: notebooks that replace a model's weights still work, with a warning."""
    model = united_models("qwen2_moe")
    other = model.with_weights(
        params={**model.params, "final_norm": 2 * model.params["final_norm"]}
    )
    assert other.way is None
    assert other.united == model.united
    before = np.asarray(jmoe.forward(model, [[5, 9]]))
    doubled = np.asarray(jmoe.forward(other, [[5, 9]]))
    assert not np.array_equal(before, doubled)
    with pytest.warns(DeprecationWarning, match=r"model.with_weights\(params=...\)"):
        other.params = model.params
    np.testing.assert_array_equal(jmoe.forward(other, [[5, 9]]), before)
    with pytest.warns(DeprecationWarning, match="num_united_slots"):
        assert model.united_places == model.num_united_slots
