"""Sets on a CPU: copied for good, tensor by tensor, and what two have alike once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serving.execution.param_sets import ParamSets, _copied

SHAPE = (3, 5)


def params(seed, shared=None):
    """Returns a set like a model's, with an embedding that others may have as well."""
    rng = np.random.default_rng(seed)

    def drawn():
        return rng.normal(size=SHAPE).astype(jnp.bfloat16)

    embed = drawn() if shared is None else shared["embed"].copy()
    return {"embed": embed, "segments": ({"wqkv": drawn(), "wo": drawn()},)}


@pytest.fixture
def sets():
    base = params(0)
    made = ParamSets([base, params(1, base), params(2)], num_resident=2)
    made.host = [base, params(1, base), params(2)]
    yield made
    made.close()


def assert_holds(sets, model):
    jax.tree.map(np.testing.assert_array_equal, sets[model], sets.host[model])


def pointers(tree):
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)]


def test_the_first_are_there_and_in_memory_of_their_own(sets):
    assert sets.resident == [0, 1]
    assert not sets.all_resident
    for model in (0, 1):
        assert_holds(sets, model)
        own = {leaf.ctypes.data for leaf in sets._host[model]}
        assert own.isdisjoint(pointers(sets[model]))
    with pytest.raises(KeyError, match="model 2 are not on the device"):
        sets[2]


def test_what_is_equal_is_copied_once(sets):
    assert sets[0]["embed"] is sets[1]["embed"]
    size = SHAPE[0] * SHAPE[1] * 2
    assert sets.bytes_copied == 5 * size
    assert sum(leaf.nbytes for leaf in sets._host[0]) == 3 * size
    sets.replace(0, 2).result()
    assert sets.bytes_copied == 8 * size
    sets.replace(2, 0).result()
    assert sets.bytes_copied == 10 * size  # the embedding was there, for model 1
    assert sets[0]["embed"] is sets[1]["embed"]


def test_one_goes_as_the_other_comes(sets):
    kept = sets[1]
    for victim, model in ((0, 2), (2, 0), (0, 2)):
        sets.replace(victim, model).result()
        assert sets.resident == sorted([1, model])
        assert_holds(sets, model)
        assert sets[1] is kept
        held = {id(leaf) for m in sets.resident for leaf in jax.tree.leaves(sets[m])}
        assert {id(leaf) for leaf in sets._held.values()} == held


def test_at_no_time_is_a_tensor_of_the_set_that_leaves_beside_its_successor(sets, monkeypatch):
    seen = []

    def place(host):
        seen.append(len(sets._held))
        return jax.device_put(host)

    monkeypatch.setattr("serving.execution.param_sets._on_device", place)
    before = len(sets._held)
    sets.replace(0, 2).result()
    assert max(seen) <= before  # one more than was there comes only where one has gone


def test_with_room_for_all_they_are_as_they_were():
    given = [jax.tree.map(jnp.asarray, params(seed)) for seed in range(2)]
    for count in (0, 2):
        made = ParamSets(given, num_resident=count)
        assert made.all_resident
        assert made[1]["embed"] is given[1]["embed"]
        assert made.resident == [0, 1]


@pytest.mark.parametrize("shape", [(1,), (3, 7), (5, 1000, 1001)])
def test_a_copy_is_one_that_an_array_is_made_of(shape):
    host = np.random.default_rng(0).normal(size=shape).astype(jnp.bfloat16)
    copy = _copied(host)
    assert not np.shares_memory(copy, host)
    np.testing.assert_array_equal(copy, host)
    assert jax.device_put(copy).unsafe_buffer_pointer() == copy.ctypes.data
