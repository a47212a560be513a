"""Distillation, end to end on a tiny model, and its parts against loops."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distilled import QUICK
from safetensors import safe_open

import jmoe
from jmoe.brownout import plan
from jmoe.layers import Layers
from jmoe.tokenizer import Tokenizer
from serving.bench.scrape import free_port
from training.distill import DistillError, refine
from training.distill.data import pack_files, read_texts
from training.distill.expert import Experts
from training.distill.fit import fit_layer, membership, optimizer
from training.distill.grouping import make_groups
from training.distill.objectives import (
    THRESHOLDS,
    brownout_error,
    degraded_to,
    equation_4_error,
    mean_answers,
)
from training.distill.parallel import WHOLE, data_mesh, join
from training.distill.start import make_start
from training.distill.stream import LayerRows, before_layers, each_visit, run_layer
from training.network import logits_of
from training.packing import Batch

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")


def normal(seed, *shape):
    """Draws by NumPy, which compiles nothing for a new shape."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def random_experts(count, d, f, seed):
    return {
        "gate_up": normal([seed, 0], count, d, 2 * f) * d**-0.5,
        "down": normal([seed, 1], count, f, d) * f**-0.5,
    }


def random_rows(members, num_rows, top_k, seed=0):
    """Returns captured rows of a layer with these experts and a random router."""
    rng = np.random.default_rng(seed)
    count, d, _ = members["gate_up"].shape
    h = rng.normal(size=(num_rows, d)).astype(np.float32)
    ids = np.argsort(rng.random((num_rows, count)), axis=1)[:, :top_k].astype(np.int32)
    weights = rng.random((num_rows, top_k)).astype(np.float32)
    answers = np.asarray(Experts(members).on_all(jnp.asarray(h)))
    return LayerRows(h, ids, weights, answers[ids, np.arange(num_rows)[:, None]])


def on_device(rows):
    return LayerRows(*map(jnp.asarray, rows))


# -- what is captured ------------------------------------------------------------------------------


@pytest.mark.deep
def test_layers_in_turn_are_the_model(tiny_dir):
    """The stream after the last layer gives jmoe's own logits, item by item, packed as they are."""
    layers = Layers(tiny_dir.path)
    cfg, top = layers.cfg, layers.top()
    tokenizer = Tokenizer.load(tiny_dir.path)
    data = pack_files([tiny_dir.path / "tasks.jsonl"], cfg, tokenizer, 64, 0).first(300)
    x = np.asarray(top["embed"])[data.tokens]
    for index in range(cfg.num_layers):
        params, experts = layers.layer(index)
        rows = run_layer(cfg, index, params, experts, x, data, batch=3)
        assert len(rows.h) == np.count_nonzero(data.items)
    model = jmoe.load(tiny_dir.path, "float32")
    h = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + cfg.rms_norm_eps)
    got = (h * np.asarray(top["final_norm"])) @ np.asarray(top["embed"]).T
    last = int(data.items[0].max())
    for row, number in [(0, 1), (0, last), (len(x) - 1, 1)]:
        own = data.items[row] == number
        want = jmoe.forward(model, data.tokens[row][own][None])[0]
        np.testing.assert_allclose(got[row][own], want, atol=1e-4)


def golden_of(request, case):
    """Returns a checkpoint, its golden tokens, packed, and logits."""
    directory = request.config.rootpath / "tests" / "golden" / case
    golden = np.load(directory / "golden.npz")
    tokens = golden["tokens"]
    positions = np.tile(np.arange(tokens.shape[1], dtype=np.int32), (2, 1))
    ones = np.ones(tokens.shape, np.int32)
    data = Batch(tokens, tokens, positions, ones, ones.astype(np.float32), ones, [])
    return directory, data, golden["logits"]


@pytest.mark.deep
@pytest.mark.parametrize("case", ["gpt_oss", "deepseek_v3", "nemotron_h"])
def test_layers_in_turn_are_the_model_of_transformers(request, case):
    """With windows, sinks, biases everywhere and an activation of its own; with latent attention
    and a dense layer before; or with experts that have no gate.
    """
    directory, data, logits = golden_of(request, case)
    layers = Layers(directory)
    cfg, top = layers.cfg, layers.top()
    x = np.asarray(top["embed"])[data.tokens]
    for index in range(cfg.num_layers):
        params, experts = layers.layer(index)
        rows = run_layer(cfg, index, params, experts, x, data, batch=2)
    got = logits_of(cfg, top, jnp.asarray(x).reshape(-1, cfg.d_model), jnp.float32)
    np.testing.assert_allclose(got.reshape(logits.shape), logits, atol=1e-4)
    # The last layer's experts, each the whole of its group, answer as captured.
    members = {key: np.asarray(leaf) for key, leaf in experts.arrays.items()}
    groups = np.arange(cfg.num_experts, dtype=np.int32)
    h = jnp.asarray(rows.h)
    target = mean_answers(members, jnp.asarray(membership(groups)), h, "float32", cfg.activation)
    for row, picks in enumerate(rows.ids):
        np.testing.assert_allclose(target[picks, row], rows.outputs[row], atol=1e-4)
    assert equation_4_error(Experts(members, cfg.activation), h, target)[0].max() < 1e-6
    if case == "gpt_oss":  # where SiLU would be wrong
        assert equation_4_error(Experts(members), h, target)[0].min() > 1e-2


@pytest.mark.deep
@pytest.mark.parametrize(
    ("case", "part"),
    [("gpt_oss", "bias"), ("mellum", "down"), ("qwen3_next", "down"), ("nemotron_h", "down")],
)
def test_end_to_end_it_is_the_model_and_its_twins_are_united_without_loss(request, case, part):
    """Experts in pairs of equals; a united expert that is its pair costs nothing."""
    directory, data, want = golden_of(request, case)
    model = jmoe.load(directory, "float32")
    cfg, config = (
        model.config,
        dataclasses.replace(QUICK, dtype="float32", batch=38, decode_batch=19),
    )
    slots = np.asarray(model.table.slots)[:, : cfg.num_experts]
    pairs = np.arange(cfg.num_experts, dtype=np.int32) // 2
    groups = np.tile(pairs, (cfg.num_moe_layers, 1))

    def run(model, united):
        def share(frozen, united, arrays):
            return refine._logits(cfg, frozen, united, arrays, jax.random.key(0), config)

        arrays = data.tokens, data.positions, data.items, data.weights
        frozen = refine.freeze(model, groups)
        specs = refine.frozen_specs(frozen), WHOLE, WHOLE
        mapped = jax.shard_map(
            share, mesh=data_mesh(), in_specs=specs, out_specs=WHOLE, check_vma=False
        )
        return np.asarray(jax.jit(mapped)(frozen, united, arrays))

    np.testing.assert_allclose(run(model, None), want, atol=1e-4)
    twins = model.with_weights(pool=model.pool.read(slots[:, 2 * pairs].reshape(-1)))
    united = twins.pool.read(slots[:, ::2]).arrays
    np.testing.assert_allclose(run(twins, united), run(twins, None), atol=1e-4)
    other = {key: leaf + 0.1 * key.endswith(part) for key, leaf in united.items()}
    assert np.abs(run(twins, other) - run(twins, None)).max() > 1e-2


@pytest.mark.deep
@pytest.mark.parametrize(
    "case",
    [
        "glm4_moe",
        "olmoe_clip_gqa",
        "granitemoe",
        "phimoe",
        "ernie4_5_moe",
        "dots1",
        "mellum_yarn_tied",
        "mistral4",
        "exaone_moe",
        "afmoe",
        "hunyuan_v1_moe",
        "qwen3_next",
        "lfm2_moe",
        "granitemoehybrid",
        "nemotron_h_mlp_biases",
    ],
)
def test_layers_in_turn_are_the_model_of_every_architecture(case):
    directory = Path(__file__).parents[1] / "golden" / case
    layers, model = Layers(directory), jmoe.load(directory, "float32")
    tokens = np.load(directory / "golden.npz")["tokens"]
    ones, positions = np.ones_like(tokens), np.tile(np.arange(19, dtype=np.int32), (2, 1))
    data = Batch(tokens, tokens, positions, ones, ones.astype(np.float32), ones, [["a"], ["b"]])
    x = before_layers(layers.cfg, layers.top(), data)
    for index in range(layers.cfg.num_layers):
        run_layer(layers.cfg, index, *layers.layer(index), x, data, batch=2)
    _, stats = jmoe.forward(model, tokens, return_stats=True, return_hidden=True)
    np.testing.assert_allclose(x, stats.hidden_states[-1], atol=1e-4, rtol=1e-5)


def test_both_formats_give_the_same_layers(tiny_dir, tmp_path):
    jmoe.save(jmoe.load(tiny_dir.path, "float32"), tmp_path / "native")
    one, other = Layers(tiny_dir.path), Layers(tmp_path / "native")
    assert one.cfg == other.cfg
    for got, want in [(other.top(), one.top()), (other.layer(1), one.layer(1))]:
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_each_visit_is_its_expert_alone():
    members = random_experts(5, 12, 6, 0)
    rows = random_rows(members, 40, 2)
    pool = jmoe.experts.ExpertPool(members["gate_up"], members["down"])
    got = each_visit(jnp.asarray(rows.h), jnp.asarray(rows.ids), pool)
    np.testing.assert_allclose(got, rows.outputs, atol=1e-5)


def test_packed_data_is_all_of_the_text(tiny_dir):
    tokenizer, cfg = Tokenizer.load(tiny_dir.path), Layers(tiny_dir.path).cfg
    path = tiny_dir.path / "tasks.jsonl"
    data = pack_files([path], cfg, tokenizer, 64, 0).rows(slice(None))
    pieces = {
        tuple(row[own == n].tolist())
        for row, own in zip(data.tokens, data.items, strict=True)
        for n in range(1, own.max() + 1)
    }
    for _, prompt, answer, *_ in read_texts(path):
        ids = tokenizer.encode(prompt) + tokenizer.encode(answer)
        assert all(tuple(ids[at : at + 64]) in pieces for at in range(0, len(ids), 64))


# -- what is asked of a united expert --------------------------------------------------------------


@pytest.mark.deep
def test_s2_sets_are_those_that_brownout_makes():
    """Every block equals the public plan at one of the thresholds; drawn, not all the same one."""
    rng = np.random.default_rng(3)
    ids = np.argsort(rng.random((8 * 16, 10)), axis=1)[:, :3].astype(np.int32)
    groups = np.arange(10, dtype=np.int32) // 3
    got = np.asarray(degraded_to(jnp.asarray(ids), jnp.asarray(groups), jax.random.key(0), 16))
    seen = []
    for block, mine in zip(ids.reshape(8, 16, 3), got.reshape(8, 16, 3), strict=True):
        for threshold in sorted(set(THRESHOLDS)):
            want = plan(
                block,
                num_experts=10,
                threshold_percent=threshold,
                groups=groups,
                strategy="partial",
            ).expert_ids
            if (np.where(np.asarray(want) >= 10, np.asarray(want) - 10, -1) == mine).all():
                seen.append(threshold)
                break
    assert len(seen) == 8
    assert len(set(seen)) > 2


@pytest.mark.deep
@pytest.mark.parametrize("objective", ["combined", "routed"])
def test_brownout_errors_are_sums_over_degraded_visits(objective):
    members, united = random_experts(6, 8, 4, 0), random_experts(2, 8, 4, 1)
    groups, rows = np.arange(6) // 3, random_rows(members, 64, 2)
    key = jax.random.key(5)
    substitute = np.asarray(
        degraded_to(jnp.asarray(rows.ids), jnp.asarray(groups, jnp.int32), key, 16)
    )
    answers = np.asarray(Experts(united).on_all(jnp.asarray(rows.h)))
    error = scale = 0.0
    for r in range(64):
        got, wanted = [], []
        for k in range(2):
            if substitute[r, k] >= 0:
                got.append(rows.weights[r, k] * answers[substitute[r, k], r])
                wanted.append(rows.weights[r, k] * rows.outputs[r, k])
        if objective == "combined" and got:
            got, wanted = [sum(got)], [sum(wanted)]
        error += sum(np.sum((a - b) ** 2) for a, b in zip(got, wanted, strict=True))
        scale += sum(np.sum(b**2) for b in wanted)
    found = brownout_error(
        Experts(united), on_device(rows), jnp.asarray(substitute), objective=objective
    )
    np.testing.assert_allclose(found, (error, scale), rtol=1e-4)


def test_equation_4_is_the_printed_one_up_to_a_constant():
    members, groups = random_experts(7, 8, 4, 0), np.arange(7) // 3
    h = normal(2, 50, 8)
    one, other = random_experts(3, 8, 4, 1), random_experts(3, 8, 4, 2)

    def printed(united):
        ours, theirs = Experts(united).on_all(h), Experts(members).on_all(h)
        return [
            np.mean([np.sum((ours[j] - theirs[i]) ** 2) for i in np.flatnonzero(groups == j)])
            for j in range(3)
        ]

    target = mean_answers(members, jnp.asarray(membership(groups)), h, "float32")
    ours = [np.asarray(equation_4_error(Experts(u), h, target)[0]) for u in (one, other)]
    np.testing.assert_allclose(
        ours[0] - ours[1], np.subtract(printed(one), printed(other)), rtol=1e-3
    )


# -- starts and groups -----------------------------------------------------------------------------


def test_an_aligned_mean_of_shuffled_copies_is_the_expert_itself():
    rng = np.random.default_rng(0)
    one = {k: np.asarray(v[0]) for k, v in random_experts(1, 8, 6, 0).items()}
    orders = [rng.permutation(6) for _ in range(3)]
    gate, up = np.split(one["gate_up"], 2, axis=1)
    members = {
        "gate_up": np.stack([np.concatenate([gate[:, o], up[:, o]], axis=1) for o in orders]),
        "down": np.stack([one["down"][o] for o in orders]),
    }
    visits, groups = np.array([1, 5, 2]), np.zeros(3, np.int32)
    h = normal(1, 20, 8)
    want = Experts({k: jnp.asarray(v)[None] for k, v in one.items()}).on_all(h)
    got = {
        kind: Experts(make_start(kind, members, groups, visits)).on_all(h)
        for kind in ("aligned", "most_used", "mean")
    }
    np.testing.assert_allclose(got["aligned"], want, atol=1e-5)
    np.testing.assert_allclose(got["most_used"], want, atol=1e-5)
    assert float(jnp.max(jnp.abs(got["mean"] - want))) > 0.1


def test_groups_by_similarity_and_coactivation():
    answers = np.zeros((5, 4, 3), np.float32)
    for expert, direction in enumerate([0, 1, 0, 1, 2]):
        answers[expert, :, direction] = 1 + expert
    ids = np.array([[0, 1], [1, 0], [2, 3], [3, 2], [4, 0]], np.int32)
    rows = LayerRows(np.zeros((5, 3)), ids, np.ones((5, 2)), np.zeros((5, 2, 3)))

    def sets(kind):
        groups = make_groups(kind, 2, rows, answers)
        assert np.bincount(groups).tolist() == [2, 2, 1]
        return {frozenset(np.flatnonzero(groups == g).tolist()) for g in range(3)}

    assert sets("similarity") == {frozenset({0, 2}), frozenset({1, 3}), frozenset({4})}
    assert sets("coactivation") >= {frozenset({2, 3})}
    assert make_groups("index", 2, rows, answers).tolist() == [0, 0, 1, 1, 2]


# -- training --------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.parametrize("objective", ["combined", "routed", "equation4"])
def test_training_beats_its_start(objective):
    members, groups = random_experts(7, 16, 8, 0), (np.arange(7) // 3).astype(np.int32)
    rows = random_rows(members, 8192, 2)
    config = dataclasses.replace(QUICK, objective=objective, steps=200, eval_every=50)
    start = make_start("mean", jax.tree.map(np.asarray, members), groups, np.ones(7))
    fit = fit_layer(start, members, groups, rows, jax.random.key(0), config)
    assert fit.error_after < 0.98 * fit.error_before
    assert fit.params["down"].shape == (3, 8, 16)


@pytest.mark.deep
def test_reaches_the_minimiser_where_it_is_known():
    """Members that are one expert: the united one becomes it from anywhere, and stops early."""
    one = random_experts(1, 8, 6, 1)
    members = {key: jnp.repeat(leaf, 4, axis=0) for key, leaf in one.items()}
    rows, groups = random_rows(members, 4096, 2), np.zeros(4, np.int32)
    start = {"gate_up": np.asarray(one["gate_up"]), "down": np.zeros((1, 6, 8), np.float32)}
    config = dataclasses.replace(QUICK, steps=1000, eval_every=100, learning_rate=1e-2, patience=3)
    fit = fit_layer(start, members, groups, rows, jax.random.key(0), config)
    np.testing.assert_allclose(fit.error_before, 1.0, rtol=1e-5)
    assert fit.error_after < 1e-3
    perfect = {key: np.asarray(leaf) for key, leaf in one.items()}
    again = fit_layer(perfect, members, groups, rows, jax.random.key(0), config)
    assert again.error_after == again.error_before < 1e-9
    assert again.steps == 300


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("name", ["adam", "adamw", "lion", "sgd"])
def test_optimizer_and_schedule_are_those_of_their_names(name, schedule):
    """The first update of each optimizer by its formula, the rates by their curves."""
    config = dataclasses.replace(QUICK, optimizer=name, schedule=schedule)
    of_config = optimizer(config, 0.1, 60)
    params, grads = {"w": jnp.array([2.0, -1.0])}, {"w": jnp.array([0.3, -0.4])}
    state, updates = of_config.init(params), []
    for _ in range(60):  # of the same gradient, at the same place
        update, state = of_config.update(grads, state, params)
        updates.append(np.asarray(update["w"]))
    warmup = 15
    left = np.clip((np.arange(60) - warmup) / (60 - warmup), 0, 1)
    down = {
        "cosine": 0.003 + 0.097 * (1 + np.cos(np.pi * left)) / 2,
        "linear": 0.1 - 0.097 * left,
        "constant": 0.1,
    }[schedule]
    rates = np.where(np.arange(60) < warmup, 0.1 * np.arange(60) / warmup, down)
    sign, weights = np.array([1.0, -1.0]), np.array([2.0, -1.0])
    step = {
        "adam": np.tile(sign, (60, 1)),  # both moments of a steady gradient give its sign
        "adamw": np.tile(sign + 0.01 * weights, (60, 1)),
        "lion": np.tile(sign, (60, 1)) + 1e-3 * weights,
        "sgd": np.cumsum(0.9 ** np.arange(60))[:, None] * np.array([0.3, -0.4]),
    }[name]
    np.testing.assert_allclose(updates, -rates[:, None] * step, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("field", ["optimizer", "schedule"])
def test_an_optimizer_that_is_not_known_is_named(field):
    with pytest.raises(ValueError, match=f"{field} is 'adamm'; it must be one of "):
        dataclasses.replace(QUICK, **{field: "adamm"})


def test_settings_that_came_later_change_no_run_that_has_their_defaults():
    assert "optimizer" not in QUICK.stages()[0]
    other = dataclasses.replace(QUICK, optimizer="lion", schedule="linear")
    assert other.stages()[0].items() >= {("optimizer", "lion"), ("schedule", "linear")}


@pytest.mark.deep
def test_nan_is_an_error_that_says_where():
    members, groups = random_experts(4, 8, 4, 0), np.zeros(4, np.int32)
    rows = random_rows(members, 512, 2)
    start = make_start("mean", jax.tree.map(np.asarray, members), groups, np.ones(4))
    config = dataclasses.replace(QUICK, learning_rate=1e30)
    with pytest.raises(DistillError, match=r"after step .*lower the learning rate"):
        fit_layer(start, members, groups, rows, jax.random.key(0), config)


ON_DEVICES = """
import dataclasses, sys
from pathlib import Path
import jax
from distilled import QUICK
from training.distill import distill
tiny, out, stop_at, process, coordinator = Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]
stop_at = int(stop_at)
if coordinator:
    from training.distill.parallel import join
    join(coordinator, 2, int(process))
config = dataclasses.replace(
    QUICK, steps=10, batch=128, refine_steps=6, refine_rows=4, objective="combined"
)
def note(what, done, total, text):
    if "end to end" in what and done == stop_at:
        raise SystemExit(9)  # as if killed, after a checkpoint
import training.distill.run as run
run.SAVE_EVERY = 2
layers, (refined,) = distill(tiny, [3], [tiny / "tasks.jsonl"], out, config, note)
print(*(repr(one.error_after) for one in layers), repr(refined.before), repr(refined.after))
"""


def start(count, tiny, out, stop_at=0, process=0, coordinator=""):
    """Starts a distillation on so many virtual devices, of a process or of both together."""
    flags = f"--xla_force_host_platform_device_count={count}"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    env["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    env["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    words = [str(tiny.path), str(out), str(stop_at), str(process), coordinator]
    command, pipe = [sys.executable, "-c", ON_DEVICES, *words], subprocess.PIPE
    return subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True)


def ended(process):
    """Returns exit status and figures."""
    told, errors = process.communicate(timeout=280)
    assert process.returncode in (0, 9), errors
    return process.returncode, [
        float(part) for part in told.splitlines()[-1].split()
    ] if told else []


def on_devices(count, tiny, out, stop_at=0):
    return ended(start(count, tiny, out, stop_at))


def united_in(out):
    with safe_open(out / "united.safetensors", framework="flax") as file:
        return {name: np.asarray(file.get_tensor(name), np.float32) for name in file.keys()}  # noqa: SIM118


TOLERANCE = {"rtol": 2**-6, "atol": 2e-3}
"""Of what a distillation comes to on another number of devices; weights are stored in bfloat16."""


@pytest.fixture(scope="module")
def on_one_device(tiny_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("one")
    return on_devices(1, tiny_dir, out)[1], united_in(out)


def same(one, figures, out):
    np.testing.assert_allclose(figures, one[0], rtol=1e-3)
    for name, leaf in united_in(out).items():
        np.testing.assert_allclose(leaf, one[1][name], **TOLERANCE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [2, 4])
def test_the_same_comes_out_on_several_devices(tiny_dir, on_one_device, tmp_path, count):
    """Rows, experts and moments in parts: what is drawn for a row is the same wherever it is."""
    _, figures = on_devices(count, tiny_dir, tmp_path)
    assert figures[-1] < figures[-2]
    same(on_one_device, figures, tmp_path)


@pytest.mark.exhaustive
def test_killed_on_four_devices_it_goes_on_with_two(tiny_dir, on_one_device, tmp_path):
    status, _ = on_devices(4, tiny_dir, tmp_path, stop_at=5)
    assert status == 9
    work = tmp_path / "distill-work"
    states = [path.name.rpartition("-")[2] for path in work.glob("refine-*")]
    assert {"2", "4"} & set(states), states  # the newest may not be written whole
    _, figures = on_devices(2, tiny_dir, tmp_path)
    assert json.loads((work / "run.json").read_text())["devices"] == "4 cpu, then 2 cpu"
    same(on_one_device, figures, tmp_path)


@pytest.mark.exhaustive
def test_two_processes_of_two_devices_come_to_the_same(tiny_dir, on_one_device, tmp_path):
    """Each has two of four; the first writes."""
    at = f"127.0.0.1:{free_port()}"
    both = [start(2, tiny_dir, tmp_path, process=n, coordinator=at) for n in (0, 1)]
    figures = [ended(process)[1] for process in both]
    assert figures[0] == figures[1]
    same(on_one_device, figures[0], tmp_path)
    assert not list((tmp_path / "distill-work").glob("stream-*"))


@pytest.mark.sized(deep=("here-0-must be HOST:PORT",))
@pytest.mark.parametrize(
    ("coordinator", "index", "message"),
    [
        ("127.0.0.1:1", 2, "process_index is 2; .* between 0 and 1"),
        ("here", 0, "must be HOST:PORT"),
    ],
)
def test_processes_that_cannot_be_are_named(coordinator, index, message):
    with pytest.raises(ValueError, match=message):
        join(coordinator, 2, index)
