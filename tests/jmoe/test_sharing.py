"""The map of shared experts: its slots against a dictionary, and family.json as a file."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from jmoe.checkpoint import weights_digest
from jmoe.sharing import (
    MERGED,
    Sharing,
    SharingError,
    lends_united,
    read_sharing,
    write_sharing,
)
from tests.jmoe.conftest import GOLDEN
from tests.variants import change, variant

SHAPE = (2, 3)


@st.composite
def maps(draw):
    count = draw(st.integers(1, 4))
    owners = arrays.arrays(np.int32, (count, *SHAPE), elements=st.integers(MERGED, count - 1))
    return Sharing(tuple("abcd"[:count]), draw(owners))


@given(maps())
def test_a_slot_for_each_expert_that_somebody_uses(sharing):
    slots, held = sharing.slots()
    experts = {}  # by slot, as models find them
    for model, layer, expert in np.ndindex(slots.shape):
        wanted = int(sharing.owners[model, layer, expert]), layer, expert
        assert experts.setdefault(int(slots[model, layer, expert]), wanted) == wanted
    assert sorted(experts) == list(range(sharing.num_slots))
    assert len(set(experts.values())) == sharing.num_slots
    assert [tuple(row) for row in held.tolist()] == [experts[slot] for slot in sorted(experts)]
    assert (np.diff(held[:, 1]) >= 0).all()  # a layer's lie together


def test_how_much_is_shared_by_hand():
    assert Sharing.none("ab", *SHAPE).num_slots == 12
    assert Sharing.none("ab", *SHAPE).shared_percent == 0
    owners = Sharing.none("abc", *SHAPE).owners
    owners[:, 0, 0] = 1  # three models, one expert: two slots of twelve that could be saved
    owners[2, 1, 1] = 0  # two of them
    owners[:2, 1, 2] = MERGED
    sharing = Sharing(("a", "b", "c"), owners)
    assert sharing.num_slots == 18 - 2 - 1 - 1
    assert sharing.shared_percent == pytest.approx(100 * 4 / 12)
    owners[:] = 2
    assert Sharing(("a", "b", "c"), owners).shared_percent == 100
    assert Sharing.none(["alone"], *SHAPE).shared_percent == 0


def test_owners_that_are_none():
    owners = Sharing.none("ab", *SHAPE).owners
    owners[0, 0, 0] = 2
    with pytest.raises(SharingError, match=r"0 to 2; they must be numbers of the 2 models, 0 to 1"):
        Sharing(("a", "b"), owners)
    with pytest.raises(SharingError, match=r"shape \(2, 2, 3\); 3 models"):
        Sharing(("a", "b", "c"), Sharing.none("ab", *SHAPE).owners)


@pytest.mark.parametrize("united", [(0,), (0, 2), (-1, 1), (1, 0), (0, 0, 0)], ids=str)
def test_united_experts_of_nobody_or_of_a_borrower(united):
    plain = Sharing.none("ab", *SHAPE)
    with pytest.raises(SharingError, match=r"united is .* for each of the 2 models, the number"):
        replace(plain, united=united)
    assert plain.lenders == (0, 1)
    assert replace(plain, united=(1, 1)).lenders == (1, 1)


# ---- the file ----


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    golden, where = GOLDEN / "mixtral", tmp_path_factory.mktemp("family")
    own = {"base": golden}
    own |= {name: variant(golden, where / name, at) for at, name in enumerate(("law", "code"))}
    return own


@pytest.fixture
def written(directories, tmp_path):
    owners = np.random.default_rng(0).integers(MERGED, 3, (3, *SHAPE)).astype(np.int32)
    prints = tuple(map(weights_digest, directories.values()))
    sharing = Sharing(tuple(directories), owners, prints, {"rule": "drawn"})
    write_sharing(tmp_path / "family.json", sharing)
    return tmp_path / "family.json", sharing


def test_a_file_is_read_as_it_was_written(written, directories):
    path, sharing = written
    found = read_sharing(path, directories, SHAPE)
    assert found.names == sharing.names
    assert (found.owners == sharing.owners).all()
    assert found.facts == {"rule": "drawn"}
    assert found.directory == path.parent


def test_models_are_known_by_their_weights_whatever_they_are_called(written, directories):
    path, sharing = written
    assert not lends_united(path)
    sharing = replace(sharing, united=(0, 0, 2), united_ways=(4,))  # of base
    write_sharing(path, sharing)
    assert lends_united(path)
    renamed = {
        "c": directories["code"],
        "b": directories["base"],
        "l": directories["law"],
    }
    found = read_sharing(path, renamed, SHAPE)
    order = [2, 0, 1]  # of those in the file
    assert found.names == ("c", "b", "l")
    assert (found.lenders, found.united_ways) == ((0, 1, 1), (4,))
    for new, old in enumerate(order):
        for at in np.ndindex(SHAPE):
            owner = int(sharing.owners[(old, *at)])
            expected = owner if owner == MERGED else order.index(owner)
            assert found.owners[(new, *at)] == expected


def test_a_map_sees_a_bit_that_changed_in_a_tensor(written, directories, tmp_path):
    path, _ = written
    other = variant(directories["base"], tmp_path / "other", 0, scale=0.0)

    def changed(name, tensor):
        if name == "model.embed_tokens.weight":
            tensor = tensor.copy()
            tensor.view(np.uint16)[1, -1] ^= 1  # in no row that was sampled
        return tensor

    change(other, changed)
    with pytest.raises(
        SharingError, match=r"was not made with .*other.*its base had other weights"
    ):
        read_sharing(path, directories | {"base": other}, SHAPE)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda raw: raw.update(format="x"), r"format is 'x'.*jmoe consolidate"),
        (
            lambda raw: raw.update(format="jmoe-family-1"),
            "older jmoe.*run `jmoe consolidate` again",
        ),
        (lambda raw: raw.pop("owners"), r"KeyError\('owners'\)"),
        (lambda raw: raw.update(owners=[[[0.5]]]), "no table of integers"),
        (lambda raw: raw.update(united=[0, 0, 2]), "has no attribute 'get'"),
        (lambda raw: raw.update(united={"of": [0, 0.5, 1]}), "united is .* other than integers"),
        (lambda raw: raw.update(united={"of": [1, 0, 2]}), r"united is \[1, 0, 2\]; it must"),
        (lambda raw: raw["owners"][0][0].__setitem__(0, 9), "must be numbers of the 3 models"),
    ],
)
def test_files_that_are_none(written, directories, damage, words):
    path, _ = written
    raw = json.loads(path.read_text())
    damage(raw)
    path.write_text(json.dumps(raw))
    with pytest.raises(SharingError, match=words):
        read_sharing(path, directories, SHAPE)


def test_a_file_that_is_not_there(tmp_path, directories):
    with pytest.raises(SharingError, match=r"nowhere\.json is not readable"):
        read_sharing(tmp_path / "nowhere.json", directories, SHAPE)


def test_a_file_of_other_models(written, directories, tmp_path):
    path, _ = written
    other = variant(directories["law"], tmp_path / "other", 9)
    with pytest.raises(SharingError, match=r"not made with .*other, which is .* law; its law"):
        read_sharing(path, {**directories, "law": other}, SHAPE)
    two = {name: directories[name] for name in ("base", "law")}
    with pytest.raises(SharingError, match="code was made with them and is not named"):
        read_sharing(path, two, SHAPE)
    with pytest.raises(SharingError, match=r"\[2, 3\] .*those named have \[4, 3\]"):
        read_sharing(path, directories, (4, 3))
    again = {**directories, "law": directories["base"]}
    with pytest.raises(SharingError, match="law was made with them and is not named"):
        read_sharing(path, again, SHAPE)
