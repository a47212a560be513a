"""`jmoe.generate` under brownout, step by step against the model in float64 loops."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from numpy_model import NumpyModel

import jmoe
from jmoe.brownout import Brownout
from jmoe.model import unstack

CASE = "qwen2_moe"
PROMPTS = [[5, 61, 17, 33, 8, 90, 2, 44], [71, 12, 3], [29]]
NEW = 6


def greedy_by_hand(directory, brownout):
    """Runs one prefill step of all prompts, then decode steps of one row a sequence."""
    model = NumpyModel(directory)
    setting = brownout.strategy, brownout.threshold_percent, brownout.way
    rows = [(n, token, False) for n, prompt in enumerate(PROMPTS) for token in prompt]
    logits, moved = model.step(rows, *setting)
    who = np.array([n for n, _, _ in rows])
    last = np.cumsum([len(prompt) for prompt in PROMPTS]) - 1
    degraded = np.array([moved[who == n].sum() for n in range(len(PROMPTS))])
    tokens = [logits[last].argmax(-1)]
    for _ in range(NEW - 1):
        logits, moved = model.step([(n, t, False) for n, t in enumerate(tokens[-1])], *setting)
        degraded += moved
        tokens.append(logits.argmax(-1))
        top = np.sort(logits, axis=-1)
        assert (top[:, -1] - top[:, -2]).min() > 1e-3, "too close to call: take other prompts"
    assert model.gap > 1e-4, "too close to call: take other prompts"
    return np.stack(tokens, axis=1).tolist(), degraded.tolist()


def run(model, prompts=PROMPTS, brownout=None, **kwargs):
    return jmoe.generate(model, prompts, NEW, brownout, stop_token_ids=(), page_size=4, **kwargs)


@pytest.mark.sized(deep=("zero100", "full40", "partial0"))
@pytest.mark.parametrize(
    "brownout",
    [Brownout("zero"), Brownout("full", 40), Brownout("partial", 0, 2), Brownout("partial", 50, 3)],
    ids=lambda b: f"{b.strategy}{b.threshold_percent}",
)
def test_tokens_and_degraded_visits_equal_loops(brownout, united_models, united_dirs):
    out = run(united_models(CASE), brownout=brownout)
    tokens, degraded = greedy_by_hand(united_dirs(CASE), brownout)
    assert out.tokens == tokens
    assert out.degraded_visits == degraded
    cfg = united_models(CASE).config
    per_token = cfg.num_moe_layers * cfg.experts_per_token
    assert out.expert_visits == [per_token * (len(p) + NEW - 1) for p in PROMPTS]


def test_100_percent_equals_zero_brownout_exactly(united_models):
    model = united_models(CASE)
    plain = run(model)
    for strategy in ("full", "partial"):
        out = run(model, brownout=Brownout(strategy, 100, 2))
        assert (out.tokens, out.logprobs) == (plain.tokens, plain.logprobs)
        assert out.degraded_visits == [0, 0, 0]


@pytest.mark.deep
def test_batched_equals_one_at_a_time(united_models):
    model = united_models(CASE)
    together = run(model)
    for n, prompt in enumerate(PROMPTS[:2]):  # both of the same number of pages
        alone = run(model, [prompt] + [prompt[:1]] * 2)
        assert alone.tokens[0] == together.tokens[n]
        np.testing.assert_allclose(alone.logprobs[0], together.logprobs[n], rtol=0, atol=1e-5)


def test_logprobs_are_those_of_forward(united_models):
    model = united_models(CASE)
    out = run(model)
    whole = PROMPTS[0] + out.tokens[0]
    padded = whole + [0] * (19 - len(whole))  # the shape that the golden tests compile
    logits = np.asarray(jmoe.forward(model, [padded, padded]))[0].astype(np.float64)
    at = range(len(PROMPTS[0]) - 1, len(whole) - 1)
    want = [logits[i, whole[i + 1]] - np.log(np.exp(logits[i]).sum()) for i in at]
    np.testing.assert_allclose(out.logprobs[0], want, rtol=0, atol=1e-4)


@pytest.mark.deep
def test_sampling_is_reproducible_and_prompt_i_draws_from_seed_plus_i(united_models):
    model = united_models(CASE)
    one = run(model, [PROMPTS[0]] * 3, temperature=1.5, seed=7)
    again = run(model, [PROMPTS[0]] * 3, temperature=1.5, seed=7)
    shifted = run(model, [PROMPTS[0]] * 3, temperature=1.5, seed=8)
    assert one.tokens == again.tokens
    assert one.tokens[1:] == shifted.tokens[:2]
    assert all(a != b for a, b in pairwise(one.tokens))


@pytest.mark.deep
def test_stop_tokens_end_a_sequence_alone(united_models):
    model = united_models(CASE)
    plain = run(model)
    stop = plain.tokens[0][1]
    out = jmoe.generate(model, PROMPTS, NEW, stop_token_ids=[stop], page_size=4)
    for short, long in zip(out.tokens, plain.tokens, strict=True):
        end = long.index(stop) + 1 if stop in long else NEW
        assert short == long[:end]
    steps = []
    jmoe.generate(
        model, PROMPTS, NEW, stop_token_ids=(), page_size=4, progress=lambda *at: steps.append(at)
    )
    assert steps == [(i, NEW) for i in range(NEW)]


@pytest.mark.parametrize("other", ["tiktoken.model", "tokenizer.model"])
def test_a_tokenizer_of_another_kind_is_named_with_what_to_do(united_models, tmp_path, other):
    model = dataclasses.replace(united_models(CASE), path=tmp_path)
    (tmp_path / other).touch()
    with pytest.raises(ValueError, match=rf"has {other} and no tokenizer\.json \(.*AutoTokenizer"):
        jmoe.generate(model, ["text"], NEW)


@pytest.mark.parametrize(
    ("prompts", "kwargs", "words"),
    [
        ([], {}, "prompts is empty"),
        ([[1], []], {}, "a prompt is empty"),
        ([[97]], {}, "token 97 is outside the vocabulary of 97"),
        (["text"], {}, "qwen2_moe has no tokenizer; give token lists"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
        ([[1] * 100], {"max_new_tokens": 29}, "make 129 positions; qwen2_moe has 128"),
        ([[1]], {"chunk_size": 0}, "chunk_size is 0; it must be at least 1"),
        ([[1]], {"page_size": 0}, "page_size is 0; it must be at least 1"),
        ([[1]], {"temperature": -1.0}, "temperature is -1.0; it must be between 0 and 100"),
        ([[1]], {"temperature": float("nan")}, "temperature is nan"),
        ([[1]], {"top_p": 2.0}, "top_p is 2.0; it must be above 0 and at most 1"),
        ([[1]], {"top_k": 10**12}, "top_k is 1000000000000; it must be 0"),
        *(
            ([[1]], {name: value}, rf"{name} is {value}; it must be an integer")
            for name in ("max_new_tokens", "top_k", "seed", "chunk_size", "page_size")
            for value in (True, 2.5)
        ),
        ([[1]], {"temperature": True}, "temperature is True; it must be a number"),
        ([[1]], {"top_p": "1"}, "top_p is '1'; it must be a number"),
        ([[1]], {"stop_token_ids": [2.5]}, "a stop token is 2.5; it must be an integer"),
        ([[1, 2.5]], {}, "a token is 2.5; it must be an integer"),
        ([[True]], {}, "a token is True; it must be an integer"),
        ("abc", {}, "prompts is the text 'abc'; give a list"),
        ([1, 2], {}, "a prompt is 1; give text or a list of tokens"),
        ([[1]], {"brownout": Brownout("partial", 10, 9)}, "way is 9; qwen2_moe has"),
    ],
)
def test_bad_input_names_the_value(prompts, kwargs, words, united_models, without_type_checks):
    with pytest.raises(ValueError, match=words):
        jmoe.generate(united_models(CASE), prompts, **{"max_new_tokens": 2, **kwargs})


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda model: model.use_way(True), "way is True; it must be an integer"),
        (lambda model: jmoe.load(model.path, ways=[2.0]), "a way is 2.0; it must be an integer"),
        (lambda model: jmoe.make_mesh(1.0), "num_devices is 1.0; it must be an integer"),
        (
            lambda model: jmoe.load_family({"a": model.path}, resident_experts=True),
            "resident_experts is True; it must be an integer",
        ),
    ],
)
def test_numbers_that_are_no_integers_are_named(call, words, united_models, without_type_checks):
    with pytest.raises(ValueError, match=words):
        call(united_models(CASE))


TOKENS = [[5, 60, 17, 33, 8], [41, 12, 3, 9, 40]]  # the smallest vocabulary has 61


def stacked_and_not(request, case):
    """Returns a golden model, and the same as a server runs it on a GPU."""
    stacked = jmoe.load(request.config.rootpath / "tests" / "golden" / case, dtype="float32")
    layers = stacked.with_weights(params=unstack(stacked.params))
    assert all(isinstance(segment, tuple) for segment in layers.params["segments"])
    return stacked, layers


@pytest.mark.deep
@pytest.mark.sized(exhaustive=("qwen3_moe_mixed_yarn", "deepseek_v2_scaled"))
@pytest.mark.parametrize(
    "case", ["qwen2_moe", "qwen3_moe_mixed_yarn", "deepseek_v3", "deepseek_v2_scaled"]
)
def test_layers_in_arrays_of_their_own_are_the_same_model(case, request):
    """The mixed one has runs of dense and of MoE layers; DeepSeek's have weights split in two."""
    models = stacked_and_not(request, case)
    logits = [jmoe.forward(model, TOKENS, Brownout("full", 50)) for model in models]
    np.testing.assert_allclose(*logits, atol=1e-5)


@pytest.mark.exhaustive
def test_layers_in_arrays_of_their_own_write_the_same(request):
    models = stacked_and_not(request, "qwen3_moe_mixed_yarn")
    outs = [run(model, TOKENS, Brownout("full", 50)) for model in models]
    assert outs[0].tokens == outs[1].tokens
    assert outs[0].degraded_visits == outs[1].degraded_visits
    assert max(outs[0].degraded_visits) > 0
