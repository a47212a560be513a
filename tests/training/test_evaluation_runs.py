"""Answers, perplexity, output error and whole runs of `jmoe evaluate` on a tiny model."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jmoe
from jmoe import expected_loss, stepper
from jmoe.beside import digest_of
from jmoe.brownout import Brownout, Control, plan
from jmoe.checkpoint import weights_digest
from jmoe.expected_loss import Kind
from jmoe.experts import ExpertTable
from jmoe.model import head
from jmoe.moe import RoutedRows, moe, route
from jmoe.sharing import Sharing, write_sharing
from jmoe.steps import StepOutput
from tests.answers import logits_after
from training.evaluation import run as run_module
from training.evaluation.answers import answer
from training.evaluation.items import ZERO, choose
from training.evaluation.quality import OutputError, losses, perplexity, sample_inputs, windows
from training.evaluation.run import EvaluateConfig, Work, evaluate
from training.tasks import write_jsonl

pytestmark = pytest.mark.deep

PARTIAL = Brownout("partial", 50, 2)
PROMPTS = [[5, 9, 200, 31], [77], [300, 4, 4], [81, 12, 6, 6, 41], [9, 10], [400, 3, 2, 1]]


@pytest.fixture(scope="module")
def united_dir(tiny_dir, tiny, tmp_path_factory):
    """Returns the tiny model with random united experts of ways 2 and 4 beside it."""
    out = tmp_path_factory.mktemp("united") / "tiny"
    shutil.copytree(tiny_dir.path, out)
    rng, cfg, tensors = np.random.default_rng(0), tiny.cfg, {}
    d, f, m = cfg.d_model, cfg.d_ff_expert, cfg.num_experts
    for way in (2, 4):
        for layer in range(cfg.num_moe_layers):
            at = f"way{way}.layers.{layer}."
            tensors[at + "gate_up"] = rng.normal(size=(m // way, d, 2 * f)).astype(np.float32)
            tensors[at + "down"] = rng.normal(size=(m // way, f, d)).astype(np.float32)
            tensors[at + "groups"] = (np.arange(m) // way).astype(np.int32)
    save_file(tensors, out / "united.safetensors")
    return out


@pytest.fixture(scope="module")
def model(united_dir):
    return jmoe.load(united_dir, "float32")


# -- answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("brownout", [ZERO, PARTIAL, Brownout("full", 30)], ids=str)
def test_a_batch_that_holds_all_is_answered_as_generate_does(model, brownout):
    out = answer(model, PROMPTS, [7] * 6, brownout, batch=6, chunk=32)
    want = jmoe.generate(model, PROMPTS, 7, brownout, chunk_size=32)
    assert out.tokens == want.tokens
    assert out.degraded_visits == sum(want.degraded_visits)
    assert out.expert_visits == sum(want.expert_visits)


def test_prompts_that_wait_for_a_slot_are_answered_as_all_others(model):
    limits = [4, 7, 1, 6, 3, 5]
    ended = []
    out = answer(model, PROMPTS, limits, batch=2, chunk=5, progress=ended.append)
    want = jmoe.generate(model, PROMPTS, 7, ZERO, chunk_size=32).tokens
    assert out.tokens == [tokens[:limit] for tokens, limit in zip(want, limits, strict=True)]
    assert sum(ended) == 6
    programs = stepper.programs(None)
    compiled = [program._cache_size() for program in programs]
    answer(model, PROMPTS, limits, PARTIAL, batch=2, chunk=5)
    answer(model, PROMPTS[::-1], [2] * 6, Brownout("full", 10), batch=2, chunk=5)
    assert [program._cache_size() for program in programs] == compiled


def test_decode_steps_are_full_and_prefill_steps_fit(model, monkeypatch):
    """With a step that samples token 1 for ever, the schedule can be counted."""
    steps = []

    def call(self, step, *arrays):
        rows = arrays[-1]
        live = rows[rows[:, 0] >= 0]
        steps.append((len(arrays), live))
        zeros = np.zeros(len(rows), np.int32)
        return StepOutput(zeros + 1, zeros, zeros, zeros)

    monkeypatch.setattr(stepper.Stepper, "_call", call)
    prompts = [[2] * (3 + i % 5) for i in range(200)]
    limits = [5 + 7 * i % 11 for i in range(200)]
    out = answer(model, prompts, limits, batch=16, chunk=16)
    assert [len(tokens) for tokens in out.tokens] == limits
    prefills = [live for kind, live in steps if kind == 2]
    decodes = [live for kind, live in steps if kind == 1]
    assert all(live[:, 2].sum() <= 16 for live in prefills)
    assert sum(live[:, 2].sum() for live in prefills) == sum(map(len, prompts))
    assert sum(map(len, decodes)) == sum(limits) - 200
    # Until prompts run out, at most a quarter of the slots is free.
    assert all(len(live) > 12 for live in decodes[:-20])
    assert len({tuple(live[:, 0]) for live in prefills}) > 3  # all slots take part


@pytest.mark.parametrize("brownout", [ZERO, PARTIAL, Brownout("full", 0)], ids=str)
def test_what_an_answer_costs_is_judged_by_the_exact_model(model, brownout):
    out = answer(model, PROMPTS, [7] * 6, brownout, batch=6, chunk=32)
    excess, others = losses(model, PROMPTS, out.tokens, out.logprobs)
    every = logits_after(model, PROMPTS, out.tokens)
    for at, (tokens, logits) in enumerate(zip(out.tokens, every, strict=True)):
        logits = np.asarray(logits, np.float64)
        peak = logits.max(-1)
        exact = logits[np.arange(len(tokens)), tokens] - peak
        exact -= np.log(np.exp(logits - peak[:, None]).sum(-1))
        assert excess[at] == pytest.approx(sum(out.logprobs[at]) - exact.sum(), abs=1e-3)
        assert others[at] == np.count_nonzero(logits.argmax(-1) != tokens)
    if brownout == ZERO:
        assert (np.abs(excess).max() < 1e-3, sum(others)) == (True, 0)
    else:
        assert sum(others) > 0


# -- perplexity ----------------------------------------------------------------------------------


def test_windows_count_each_token_once():
    """11 tokens in windows of 4: 0-3, 4-7, and 7-10, of which 8-10 are new; then 0-3 again."""
    steps = windows(list(range(11)), 4, 2)
    assert [rows.tolist() for rows, _ in steps] == [
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[7, 8, 9, 10], [0, 1, 2, 3]],
    ]
    assert [counts.tolist() for _, counts in steps] == [[3, 3], [3, 0]]
    ((rows, counts),) = windows([1, 2, 3], 8, 1)
    assert (rows.tolist(), counts.tolist()) == ([[1, 2, 3]], [2])
    assert [c.tolist() for _, c in windows(list(range(9)), 4, 1)] == [[3], [3], [1]]
    assert [c.tolist() for _, c in windows(list(range(8)), 4, 1)] == [[3], [3]]


@pytest.mark.parametrize("brownout", [ZERO, PARTIAL], ids=str)
def test_perplexity_is_that_of_forward(model, brownout):
    """23 tokens in windows from 0, 6, 12 and 17; the last one's first target, 18, is new too."""
    tokens = np.random.default_rng(1).integers(1, 500, 23).tolist()
    steps = windows(tokens, 6, 2)
    total = count = 0.0
    for starts in ([0, 6], [12, 17]):
        rows = [tokens[start : start + 6] for start in starts]
        logits = np.asarray(jmoe.forward(model, rows, brownout)).astype(np.float64)
        for row, values in zip(rows, logits, strict=True):
            for at in range(5):
                target = values[at, row[at + 1]]
                total += np.log(np.exp(values[at]).sum()) - target
                count += 1
    seen = []
    assert perplexity(model, steps, brownout, seen.append) == pytest.approx(
        np.exp(total / count), rel=1e-4
    )
    assert seen == [2, 2]


# -- output error --------------------------------------------------------------------------------


def test_inputs_are_those_of_the_model(model):
    """The last layer's inputs, run through it and the head, are `jmoe.forward`'s logits."""
    cfg, total = model.config, sum(map(len, PROMPTS))
    order = np.random.default_rng(4).permutation(total)
    inputs = sample_inputs(model, PROMPTS, 1, total, seed=4)
    x = jnp.zeros((total, cfg.d_model)).at[order].set(inputs[-1][0])
    layer = {key: leaf[-1] for key, leaf in model.params["segments"][-1].items()}
    rows = RoutedRows(jnp.zeros(total, jnp.int32), jnp.ones(total, bool), jnp.zeros(total, bool))
    table = ExpertTable(model.table.slots[-1], model.table.groups[-1])
    x, *_ = moe(
        cfg, layer, model.pool, table, x, rows, Control.of(None), max_active=cfg.num_experts
    )
    got, start = np.asarray(head(cfg, model.params, x)), 0
    want = np.asarray(jmoe.forward(model, [(prompt + [0] * 5)[:5] for prompt in PROMPTS]))
    for prompt, logits in zip(PROMPTS, want, strict=True):
        part = got[start : start + len(prompt)]
        np.testing.assert_allclose(part, logits[: len(prompt)], atol=2e-3)
        start += len(prompt)


def test_few_positions_are_repeated_and_many_are_cut_to_steps(model):
    assert [x.shape for x in sample_inputs(model, [[1, 2]], 5, 4, seed=0)] == [(1, 4, 32)] * 2
    assert sample_inputs(model, PROMPTS, 2, 4, seed=0)[0].shape == (2, 4, 32)
    assert sample_inputs(model, PROMPTS, 99, 4, seed=0)[0].shape == (4, 4, 32)


def error_by_hand(model, x, brownout):
    """Returns the error of routed outputs in float64, expert by expert, by `jmoe.plan`'s choices;
    two steps.
    """
    layer = {key: leaf[0] for key, leaf in model.params["segments"][0].items()}
    gate_up, down = (np.asarray(a, np.float64) for a in model.pool.arrays.values())
    slots, size = np.asarray(model.table.slots[0]), down.shape[1]
    wrong = scale = 0.0
    for step in x:
        h, weights, ids = (np.asarray(a) for a in route(model.config, layer, step))
        planned = plan(
            ids,
            num_experts=model.config.num_experts,
            threshold_percent=brownout.threshold_percent,
            way=brownout.way,
            strategy=brownout.strategy,
        )
        out = {}
        for name, chosen in (("exact", ids), ("browned", np.asarray(planned.expert_ids))):
            out[name] = np.zeros(h.shape)
            for row, expert in np.argwhere(chosen >= 0):
                slot = slots[chosen[row, expert]]
                both = h[row].astype(np.float64) @ gate_up[slot]
                gate, up = both[:size], both[size:]
                out[name][row] += (
                    weights[row, expert] * (gate / (1 + np.exp(-gate)) * up) @ down[slot]
                )
        wrong += ((out["browned"] - out["exact"]) ** 2).sum()
        scale += (out["exact"] ** 2).sum()
    return (wrong / scale) ** 0.5


def test_output_error_by_hand(model):
    inputs = sample_inputs(model, PROMPTS, 2, 8, seed=0)
    error = OutputError(model, inputs)
    assert error.of(Brownout("partial", 100, 2)) == [0, 0]
    assert error.of(Brownout("full", 0)) == [1, 1]
    for brownout in (PARTIAL, Brownout("partial", 20, 4), Brownout("full", 40)):
        got = error.of(brownout)
        want = error_by_hand(model, inputs[0], brownout)
        assert want > 0.05
        assert got[0] == pytest.approx(want, rel=1e-3)


# -- whole runs ----------------------------------------------------------------------------------


@pytest.fixture
def config(united_dir, tmp_path):
    data = tmp_path / "own.jsonl"
    write_jsonl(data, "eval", 12, seed=2)
    (tmp_path / "some.txt").write_text("Once upon a time a red fox lived in a cave. " * 9)
    return EvaluateConfig(
        model=str(united_dir),
        dtype="float32",
        data=data,
        text=(tmp_path / "some.txt",),
        text_window=32,
        batch=4,
        chunk=64,
        error_steps=2,
        out=tmp_path / "out",
    )


def changed(config, **fields):
    return EvaluateConfig(**{**config.__dict__, **fields})


def test_a_run_goes_on_where_it_ended(config, monkeypatch):
    seen, ran = [], []
    found = evaluate(config, [PARTIAL, Brownout("partial", 100, 2)], lambda *at: seen.append(at))
    assert [score.setting.threshold_percent for score in found] == [100, 50, 100]
    assert found[1].result.perplexity.keys() == {"some.txt"}
    assert seen[-1][0] == "evaluate"
    assert seen[-1][1] == seen[-1][2]
    rows = (config.out / "results.jsonl").read_text().splitlines()
    assert [json.loads(row)["strategy"] for row in rows] == ["zero", "partial"]
    for name in ("evaluate.csv", "evaluate.md", "evaluate.png"):
        assert (config.out / name).stat().st_size

    real = run_module.Work.run
    monkeypatch.setattr(
        run_module.Work, "run", lambda self, s, a: (ran.append(s), real(self, s, a))[1]
    )
    again = evaluate(config, [PARTIAL])
    assert ran == []
    assert again[1].result == found[1].result
    *_, full = evaluate(config, [PARTIAL, Brownout("full", 0)])
    assert ran == [Brownout("full", 0)]
    # Of way 2, threshold 0 was not run, and no loss can be expected of it.
    path, digest = config.out / expected_loss.FILE, digest_of(Path(config.model))
    [table] = expected_loss.read(path, digest).values()
    assert table.kind == Kind.of(Brownout("full", 0))
    assert table.points[0][:2] == (0, pytest.approx(full.excess[0], abs=1e-6))
    with pytest.raises(ValueError, match=r"belongs to other inputs: batch 4 \(now 8\)"):
        evaluate(changed(config, batch=8), [PARTIAL])
    assert ran == [Brownout("full", 0)]


def test_a_result_is_the_same_whatever_ran_before(config, tmp_path, monkeypatch):
    """Ways are swapped in one pool: none may leak into another's result."""
    monkeypatch.setattr(run_module, "draw", lambda *_: None)
    settings = [PARTIAL, Brownout("partial", 0, 4)]
    one = evaluate(config, settings)
    other = evaluate(changed(config, out=tmp_path / "other"), settings[::-1])
    for a, b in zip(one[1:], other[:0:-1], strict=True):
        assert a.result.right == b.result.right
        assert a.result.output_error == b.result.output_error
        assert a.result.perplexity == b.result.perplexity


@pytest.mark.parametrize(
    ("fields", "settings", "message"),
    [
        ({}, [Brownout("partial", 0, 8)], r"way is 8; tiny has united experts for: 2, 4\. Choose"),
        ({"num": 13}, [PARTIAL], r"num is 13, but .*own.jsonl holds 12 items"),
        ({"text_window": 4096}, [PARTIAL], "text_window is 4096; tiny has"),
        ({"generate_tasks": 3}, [PARTIAL], "either --data FILE or --generate-tasks"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(config, fields, settings, message):
    with pytest.raises(ValueError, match=message):
        evaluate(changed(config, **fields), settings)
    assert not config.out.exists()


def test_items_and_texts_that_do_not_fit_are_refused(config, tmp_path, united_dir):
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "x " * 3000, "answer": "y"}))
    with pytest.raises(ValueError, match=r"the item 'x x .* positions; tiny has"):
        evaluate(changed(config, data=long), [PARTIAL])
    (tmp_path / "short.txt").write_text("a")
    with pytest.raises(ValueError, match=r"short.txt has 1 tokens; perplexity needs at least 2"):
        evaluate(changed(config, text=(tmp_path / "short.txt",)), [PARTIAL])
    with pytest.raises(ValueError, match=r"two --text files are named some.txt"):
        evaluate(changed(config, text=config.text * 2), [PARTIAL])
    bare = tmp_path / "bare"
    shutil.copytree(united_dir, bare)
    (bare / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"bare has no tokenizer.json"):
        evaluate(changed(config, model=str(bare)), [PARTIAL])


@pytest.mark.parametrize("name", ["batch", "chunk", "text_window", "error_steps"])
def test_sizes_below_the_least_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} is 0; it must be at least"):
        EvaluateConfig(**{name: 0})


@pytest.mark.exhaustive
def test_a_model_of_a_family_is_scored_over_its_pool(united_dir, tiny_dir, tmp_path):
    """Where it shares all its experts with a sibling, it answers as that sibling's weights do."""
    sibling = shutil.copytree(united_dir, tmp_path / "sibling")
    tensors = load_file(sibling / "model.safetensors")
    for name in tensors:
        if ".mlp.experts." in name:
            tensors[name] = tensors[name] * np.float32(0.25)
    save_file(tensors, sibling / "model.safetensors")
    paths = {"base": united_dir, "sibling": sibling}
    owners = np.zeros((2, 2, 8), np.int32)
    sharing = Sharing(tuple(paths), owners, tuple(map(weights_digest, paths.values())))
    write_sharing(tmp_path / "family.json", sharing)
    family = jmoe.load_family(paths, tmp_path / "family.json", "float32")
    found = {}
    for model in family:
        config = EvaluateConfig(
            model=str(model.path),
            dtype="float32",
            data=tiny_dir.path / "tasks.jsonl",
            num=6,
            error_steps=1,
            out=tmp_path / model.name,
            family=tmp_path / "family.json",
        )
        settings = [Brownout("partial", at, 2) for at in (50, 0)]
        found[model.name] = evaluate(config, settings, model=model, belongs_to=model.name)
        inputs = json.loads((config.out / "inputs.json").read_text())
        assert inputs["family"]
        [table] = expected_loss.read(config.out / expected_loss.FILE, model.name).values()
        assert [point.threshold_percent for point in table.points] == [50, 0]
        assert table.points[0].excess == pytest.approx(found[model.name][1].excess[0], abs=1e-6)
        with pytest.raises(ValueError, match="family"):  # the folder is of another evaluation
            evaluate(dataclasses.replace(config, family=None), [])
    for one, other in zip(*found.values(), strict=True):  # only experts differ in the files
        assert one.result.excess == other.result.excess
        assert one.result.output_error == other.result.output_error
    alone = dataclasses.replace(config, family=None, out=tmp_path / "alone")
    _, apart = evaluate(alone, [Brownout("partial", 50, 2)])
    assert apart.result.output_error != found["sibling"][1].result.output_error


@pytest.mark.usefixtures("compiled_in_a_hurry")
@pytest.mark.parametrize("brownout", [ZERO, PARTIAL], ids=str)
def test_a_cpu_evaluates_quantized_experts_in_floats(united_dir, brownout):
    """They have the values of their format, united ones too; the results are of that format."""
    kept = jmoe.load(united_dir, "float32", quantize="int4")
    work = Work(kept, choose(None, None, 3, 0), EvaluateConfig(generate_tasks=3))
    assert work.inputs()["quantize"] == "int4"
    assert (kept.pool.format, work.model.pool.format) == ("int4", "none")
    exact = jmoe.load(united_dir, "float32")
    got, want, other = (
        np.asarray(jmoe.forward(one, [PROMPTS[3]], brownout)) for one in (work.model, kept, exact)
    )
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
    assert np.abs(got - other).max() > 1e-3
    assert kept.pool.format == "int4"
