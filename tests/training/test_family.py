"""The bundled model's family: skills, differences, tuning, and models with shared experts."""

import itertools
import string
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmoe
from jmoe.experts import UnitedExperts
from jmoe.family import load_family
from jmoe.sharing import Sharing
from training.consolidate.residuals import low_rank
from training.consolidate.rules import owners_random
from training.family.differences import read_differences, write_differences
from training.family.quality import rank_correlation, right_items
from training.family.shared import Members
from training.family.skills import VARIANTS, skill_tasks
from training.family.tune import TuneConfig, read_params, tune, tuning_batch, unite
from training.packing import Encoded
from training.tasks import FAMILIES

SHAPE = (2, 8)


def some(skill, split, num=200, seed=3):
    return list(itertools.islice(skill_tasks(skill, split, seed), num))


# -- skills --------------------------------------------------------------------------------------


def asked(task):
    """Returns what stands between the colon and the equals sign."""
    return task.prompt.partition(": ")[2].removesuffix(" =")


def test_a_decoded_letter_is_seven_before():
    for task in some("cipher", "eval"):
        assert task.answer.startswith(" ")
        for before, after in zip(asked(task).split(), task.answer.split(), strict=True):
            distance = string.ascii_lowercase.index(before) - string.ascii_lowercase.index(after)
            assert distance % 26 == 7


def test_digits_and_what_they_lack_make_nines():
    for task in some("nines", "eval"):
        assert int(asked(task)) + int(task.answer) == 10 ** len(asked(task)) - 1


def test_words_spelled_backwards_are_the_words():
    for task in some("backwards", "eval"):
        spelled = [word.replace(" ", "")[::-1] for word in task.answer.removesuffix(".").split(".")]
        assert spelled == asked(task).split()


@pytest.mark.sized(deep=("caller",))
@pytest.mark.parametrize("skill", VARIANTS)
def test_held_out_items_are_in_no_training_data(skill):
    train, held_out = ({task.prompt for task in some(skill, s, 1000)} for s in ("train", "eval"))
    assert len(train) > 900
    assert not train & held_out
    assert some(skill, "eval") == some(skill, "eval")
    assert skill not in FAMILIES


# -- differences ---------------------------------------------------------------------------------


def test_low_rank_is_the_nearest_there_is():
    """Eckart and Young: the error is what the remaining singular values add up to."""
    matrices = np.random.default_rng(0).standard_normal((3, 10, 7)).astype(np.float32)
    left, right = low_rank(matrices, 4)
    assert left.shape == (3, 10, 4)
    assert right.shape == (3, 4, 7)
    error = np.linalg.norm(matrices - left @ right, axis=(1, 2))
    values = np.linalg.svd(matrices, compute_uv=False)[:, 4:]
    np.testing.assert_allclose(error, np.sqrt((values**2).sum(axis=1)), rtol=1e-4)


def test_low_rank_of_large_matrices_is_nearly_the_nearest():
    """Of a spectrum that falls slowly, which is the hard case for a random subspace."""
    rng = np.random.default_rng(1)
    left, right = (np.linalg.qr(rng.standard_normal((n, 520)))[0] for n in (600, 520))
    values = 1 / np.sqrt(np.arange(1, 521))
    matrix = ((left * values) @ right.T).astype(np.float32)
    found = np.matmul(*low_rank(matrix, 8))
    error = np.linalg.norm(matrix - found)
    assert error == pytest.approx(np.sqrt((values[8:] ** 2).sum()), rel=2e-3)


@pytest.fixture(scope="module")
def base(tiny_family):
    return read_params(tiny_family[0])


@pytest.fixture(scope="module")
def united(base):
    """Returns united experts of the base: of two layers, every other routed one."""
    return {key: np.asarray(leaf)[:, ::2] for key, leaf in base["experts"].items()}


@pytest.mark.deep
def test_a_variant_of_low_rank_comes_back(base, united, tmp_path):
    rng = np.random.default_rng(1)
    variant = jax.tree.map(lambda leaf: leaf * 1.25, base)  # exact in bfloat16
    for key, leaf in base["experts"].items():
        left, right = (rng.standard_normal((*leaf.shape[:3], 2)) for _ in range(2))
        right = rng.standard_normal((*leaf.shape[:2], 2, leaf.shape[3]))
        variant["experts"][key] = leaf + jnp.asarray(0.1 * left @ right, jnp.float32)
    path = tmp_path / "cipher.safetensors"
    own = {key: np.asarray(leaf)[:, ::2] for key, leaf in variant["experts"].items()}
    write_differences(path, base, variant, (united, own), rank=2, united_rank=2)
    found, found_united = read_differences(path, base, united)
    for key, leaf in found_united.items():
        np.testing.assert_allclose(leaf, own[key], rtol=1e-2, atol=1e-2)
    assert jax.tree.structure(found) == jax.tree.structure(variant)
    for at, leaf in jax.tree.leaves_with_path(found):
        wanted = variant
        for part in at:
            wanted = wanted[getattr(part, "key", getattr(part, "idx", None))]
        np.testing.assert_allclose(leaf, wanted, rtol=1e-2, atol=1e-2)


def test_a_file_of_another_model_is_refused(base, united, tmp_path):
    path = tmp_path / "cipher.safetensors"
    with pytest.raises(ValueError, match="is not readable"):
        read_differences(path, base, united)
    smaller = {**base, "final_norm": base["final_norm"][:-1]}
    write_differences(path, smaller, smaller, (united, united))
    with pytest.raises(ValueError, match="no variant of this model"):
        read_differences(path, base, united)


# -- tuning --------------------------------------------------------------------------------------


def test_a_batch_mixes_the_skill_with_what_the_model_knew(tokenizer):
    config = TuneConfig(rows=32, old_share=0.5)
    batch = tuning_batch(tokenizer, "nines", config, 3, 128)
    families = list(itertools.chain(*batch.families))
    assert 0.35 < families.count("nines") / len(families) < 0.65
    again = tuning_batch(tokenizer, "nines", config, 3, 128)
    assert np.array_equal(batch.tokens, again.tokens)
    other = tuning_batch(tokenizer, "nines", config, 4, 128)
    assert not np.array_equal(batch.tokens, other.tokens)


@pytest.mark.deep
def test_tuning_learns_and_leaves_what_it_is_given(base, tiny, tokenizer):
    notes = []
    config = TuneConfig(model=tiny.cfg, steps=12, rows=4, peak_lr=5e-3)
    before = np.asarray(base["experts"]["down"]).copy()
    tuned = tune(base, tokenizer, "cipher", config, lambda *told: notes.append(told[3]))
    losses = [float(note.removeprefix("loss ")) for note in notes]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.2
    assert np.array_equal(base["experts"]["down"], before)
    assert not np.array_equal(tuned["experts"]["down"], before)


@pytest.mark.deep
def test_united_experts_learn_to_stand_in_for_a_variants(tiny_family, united):
    notes = []
    config = TuneConfig(united_steps=40, rows=4)
    model = jmoe.load(tiny_family[1], "float32", ways=())
    groups = np.tile(np.arange(8, dtype=np.int32) // 2, (2, 1))
    start = UnitedExperts(2, united["gate_up"], united["down"], groups)
    found = unite(model, "cipher", start, config, lambda *told: notes.append(told[3]))
    losses = [float(note.removeprefix("divergence ")) for note in notes]
    assert len(losses) == 40
    assert np.mean(losses[-8:]) < 0.9 * np.mean(losses[:8])
    assert found["down"].shape == united["down"].shape


@pytest.mark.parametrize(
    "changed",
    [{"steps": 0}, {"rows": 0}, {"united_steps": 0}, {"old_share": 1.0}, {"seed": -1}],
)
def test_tuning_settings_that_cannot_be_are_refused(changed):
    (key,) = changed
    with pytest.raises(ValueError, match=key):
        TuneConfig(**changed)


# -- scores, and models with shared experts ------------------------------------------------------


@pytest.fixture(scope="module")
def members(tiny_family):
    return Members(tuple(jmoe.load(path, "float32", ways=()) for path in tiny_family[:3]))


def test_right_is_what_greedy_decoding_gives(members):
    model = members.models[0]
    prompts = [[5, 9, 200, 31], [77, 8], [300, 4, 4, 9, 7], [81]] * 2
    tokens = np.zeros((8, 12), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    for step in range(5):  # token by token, each after those before it
        logits = np.asarray(jmoe.forward(model, tokens))
        for row, prompt in enumerate(prompts):
            at = len(prompt) + step
            tokens[row, at] = logits[row, at - 1].argmax()
    for row in range(4, 8):
        tokens[row, len(prompts[row]) + row % 4] ^= 1  # one token is another
    ids = [row[: len(prompt) + 5].tolist() for row, prompt in zip(tokens, prompts, strict=True)]
    items = [Encoded(own, len(prompt), "f") for own, prompt in zip(ids, prompts, strict=True)]
    right = right_items(model, items)
    assert right.tolist() == [True] * 4 + [False] * 4


def logits_of(model):
    return np.asarray(jmoe.forward(model, [[5, 9, 200, 31, 7, 80, 3, 410]]))


def test_a_mapped_model_is_that_of_a_loaded_family(members, tiny_family):
    owners = owners_random((3, *SHAPE), 24, seed=2)
    names = ("a", "b", "c")
    paths = dict(zip(names, tiny_family[:3], strict=True))
    family = load_family(paths, Sharing(names, owners), "float32")
    for at in range(3):
        found = logits_of(members.mapped((0, 1, 2), owners, at))
        np.testing.assert_allclose(found, logits_of(family[at]), rtol=1e-5, atol=1e-5)
    own = Sharing.none(names[:2], *SHAPE).owners
    found = logits_of(members.mapped((0, 2), own, 1))
    np.testing.assert_allclose(found, logits_of(members.models[2]), rtol=1e-5, atol=1e-5)


def test_an_average_of_a_model_with_itself_is_the_model(members):
    found = logits_of(members.averaged((1, 1)))
    np.testing.assert_allclose(found, logits_of(members.models[1]), rtol=1e-4, atol=1e-4)
    merged = np.full((2, *SHAPE), -1, np.int32)
    found = logits_of(members.mapped((1, 1), merged, 0))
    np.testing.assert_allclose(found, logits_of(members.models[1]), rtol=1e-4, atol=1e-4)


def test_a_residual_of_full_rank_gives_the_model_back(members):
    owners = np.zeros((2, *SHAPE), np.int32)  # all are model 0's
    found = members.with_residuals((0, 2), owners, 1, (1, 32))
    exact = logits_of(members.models[2])
    shared = np.abs(logits_of(members.mapped((0, 2), owners, 1)) - exact).max()
    errors = {rank: np.abs(logits_of(model) - exact).max() for rank, (model, _) in found.items()}
    assert errors[32] < 0.05 * shared
    # Rank 1 of [32, 32] and [16, 32], 16 experts, two bytes each.
    assert found[1][1] == 2 * 16 * (64 + 48)
    model, size = members.with_residuals((0, 2), owners, 0, (8,))[8]
    assert size == 0
    np.testing.assert_allclose(logits_of(model), logits_of(members.models[0]), rtol=1e-5, atol=1e-5)


def test_rank_correlation():
    assert rank_correlation(np.array([1, 2, 3]), np.array([10, 20, 70])) == pytest.approx(1)
    assert rank_correlation(np.array([1, 2, 3]), np.array([9, 5, -1])) == pytest.approx(-1)


def test_the_stored_family_is_small():
    stored = Path(jmoe.__file__).parent / "bundled_family"
    assert sorted(path.name for path in stored.iterdir()) == sorted(f"{k}.npz" for k in VARIANTS)
    assert sum(path.stat().st_size for path in stored.iterdir()) < 15 << 20
