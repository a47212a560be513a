"""Keys: the file that has them, whom they name, and what they allow how often."""

import contextlib
import fcntl
import hashlib
import hmac
import os
from itertools import product

import pytest
from keyed import WRONG, Clock, KeysFile

from serving.errors import Overloaded, PermissionDenied, SettingsError, Unauthenticated
from serving.frontend import access as access_module
from serving.frontend import keys
from serving.frontend.access import ANYBODY, Access, Caller
from serving.frontend.keys import Key
from serving.request import Priority

LS, BE = Priority.LATENCY_SENSITIVE, Priority.BEST_EFFORT


# -- the file ------------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "keys.yaml"
    found = {
        "plain": Key("a" * 64),
        "0e0": Key("1e" + "5" * 62),  # no numbers
        "12": Key("7" * 64),
        "all": Key("b" * 64, True, True, ("m", "n"), (LS, BE), 1, 2, 3),
    }
    keys.write(path, found)
    assert keys.read(path) == found
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_without_keys_lets_nobody_in(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text("")
    with pytest.raises(Unauthenticated):
        Access(path).caller("Bearer x")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a", "holds a list; it must hold a mapping"),
        ("keys: {a: {sha256: %s}}\nkey: 1", "must have `keys` at its top, and nothing else"),
        (
            "keys: {a: {sha256: %s, model: [x]}}",
            "a is wrong: Unexpected keyword argument; a key has some of sha256",
        ),
        ("keys: {a: {sha256: %s, models: x}}", "models of a is wrong"),
        ("keys: {a: {sha256: %s, classes: [urgent]}}", "classes.0 of a is wrong"),
        ("keys: {a: {sha256: %s, admin: 'yes'}}", "admin of a is wrong"),
        ("keys: {a: {sha256: %s, tokens_per_min: -1}}", "tokens_per_min of a is -1"),
        ("keys: {a: {sha256: %s, concurrency: 1.5}}", "concurrency of a is wrong"),
        ("keys: {a: {}}", "sha256 of a is wrong"),
        ("keys: {a b: {sha256: %s}}", "'a b' is no name of a key"),
        ("keys: {a: {sha256: %s}, b: {sha256: %s}}", "a and b are one key; revoke one"),
        ("keys: {a: {sha256: %s}, a: {sha256: %s}}", "a is there twice"),
        ("keys: [", "cannot be read as YAML"),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error_that_names_what_is_wrong(tmp_path, text, said):
    path = tmp_path / "keys.yaml"
    path.write_text(text.replace("%s", "a" * 64))
    with pytest.raises(SettingsError) as caught:
        Access(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "keys: {a: {sha256: %s}}",
        "keys: {a: {sha256: 0, models: [%s, 3]}}",
        "keys: {a: {sha256: 0, %s: 1}}",
        "keys: {a: {sha256: 0, admin: %s}}",
        "keys: {a: %s}",
        "keys: {%s: {sha256: 0}}",
        "keys: {%s: 0}",
        "%s: 0",
        "keys:\n a: sha256: %s",
        "keys: {a: [%s}",
        "keys: [%s]",
        "%s",
    ],
)
def test_a_key_in_the_wrong_place_is_not_repeated(tmp_path, text):
    """Somebody pastes a key where its hash, or something else, belongs."""
    path = tmp_path / "keys.yaml"
    path.write_text(text.replace("%s", WRONG))
    with pytest.raises(SettingsError) as caught:
        Access(path)
    assert WRONG not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_key_is_256_bits_of_the_systems_randomness(monkeypatch):
    asked = []

    def random(count):
        asked.append(count)
        return bytes(range(count))

    monkeypatch.setattr(keys.secrets, "token_bytes", random)
    made = keys.new_key()
    assert asked == [32]
    assert made == "jmoe_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8"
    assert keys.digest(made) == hashlib.sha256(made.encode()).digest()


def test_others_of_the_machine_who_may_read_or_write_it_are_a_warning(file, caplog):
    for mode, said in ((0o600, None), (0o640, None), (0o644, "read it"), (0o620, "write it")):
        file.path.chmod(mode)
        caplog.clear()
        Access(file.path)
        told = [record.getMessage() for record in caplog.records]
        assert [said in line and f"{mode:04o}" in line for line in told] == [True] * bool(said)


def test_two_who_change_it_at_once_take_turns(file):
    other = os.open(file.path.parent, os.O_RDONLY)
    with keys.changing(file.path) as found:
        found["first"] = Key("d" * 64)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the first is done, and was heard
    os.close(other)
    with keys.changing(file.path) as found:
        found["second"] = Key("c" * 64)
    assert set(keys.read(file.path)) == {"alice", "root", "first", "second"}


def test_a_change_that_fails_leaves_the_file_as_it_was(file, monkeypatch):
    before = file.path.read_bytes()

    def fail(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(keys.os, "fsync", fail)
    with pytest.raises(OSError, match="the disk is full"), keys.changing(file.path) as found:
        del found["alice"]
    assert file.path.read_bytes() == before
    assert [each.name for each in file.path.parent.iterdir()] == [file.path.name]


# -- who calls -----------------------------------------------------------------------------------


def test_without_a_file_everybody_is_anybody():
    for said in (None, "", "Bearer x"):
        caller = Access().caller(said)
        assert caller is ANYBODY
        caller.require_admin()
        caller.require_metrics()
        with caller.request("any", BE):
            caller.used(10**9)


MALFORMED = [None, "", "Bearer", "Bearer ", "Basic {}", "{}", "Bearer {}x", "bearer{}", "Bearer é"]


def test_a_key_names_its_caller_and_nothing_else_does(file):
    access = Access(file.path)
    assert access.caller(file.says("alice")).name == "alice"
    assert access.caller(f"bearer  {file.text('root')} ").key.admin
    errors = set()
    for said in [*MALFORMED, f"Bearer {WRONG}", "Bearer " + "x" * 10_000, "Bearer \udcff"]:
        with pytest.raises(Unauthenticated) as caught:
            access.caller(said and said.replace("{}", file.text("alice")))
        errors.add(str(caught.value))
    assert len(errors) == 1  # the same for all


def test_right_wrong_and_malformed_keys_take_the_same_steps(file, monkeypatch):
    """Counted, not timed: one hash, one look-up, one comparison of 32 bytes with 32 bytes."""
    access, steps = Access(file.path), []

    class Looked(dict):
        def get(self, *args):
            steps.append("look")
            return super().get(*args)

    compares = hmac.compare_digest

    def compare(one, other):
        steps.append(f"compare {len(one)} {len(other)}")
        return compares(one, other)

    sha256 = hashlib.sha256

    def hashed(data):
        steps.append("hash")
        return sha256(data)

    monkeypatch.setattr(access, "_by_digest", Looked(access._by_digest))
    monkeypatch.setattr(access_module.hmac, "compare_digest", compare)
    monkeypatch.setattr(keys.hashlib, "sha256", hashed)
    taken = []
    for said in (file.says("alice"), f"Bearer {WRONG}", None, "Basic x", "Bearer"):
        steps.clear()
        with contextlib.suppress(Unauthenticated):
            access.caller(said)
        taken.append(tuple(steps))
    assert set(taken) == {("hash", "look", "compare 32 32")}


def test_what_a_key_may_not_is_said_by_name(tmp_path):
    file = KeysFile(tmp_path / "k", a={"models": ("m",), "classes": (BE,)}, see={"metrics": True})
    access = Access(file.path)
    caller, sees = (access.caller(file.says(name)) for name in ("a", "see"))
    with caller.request("m", BE) as same:
        assert same is caller
    for model, priority, said in (
        ("other", BE, "this key may not use model 'other'; it may use m"),
        ("m", LS, "class 'latency_sensitive'; it may use best_effort"),
    ):
        with pytest.raises(PermissionDenied) as caught, caller.request(model, priority):
            pass
        assert said in str(caught.value)
    for ask in (caller.require_admin, caller.require_metrics, sees.require_admin):
        with pytest.raises(PermissionDenied):
            ask()
    sees.require_metrics()
    refused = {reason: count for reason, count in caller.refused.items() if count}
    assert refused == {"model": 1, "class": 1, "admin": 1, "metrics": 1}


@pytest.mark.parametrize(
    ("classes", "of_none"), [((), LS), ((LS,), LS), ((BE,), BE), ((BE, LS), LS)]
)
def test_a_request_without_a_class_has_the_default_or_else_the_keys_first(classes, of_none):
    caller = Caller("a", Key("", classes=classes))
    assert [caller.class_of(named) for named in (None, LS, BE)] == [of_none, LS, BE]


def may(ask) -> bool:
    try:
        ask()
    except PermissionDenied:
        return False
    return True


def test_what_every_combination_of_fields_allows(tmp_path):
    asks = {"models": ("m",), "classes": (LS,), "requests_per_min": 9, "tokens_per_min": 9}
    limits = [{}, *({name: value} for name, value in asks.items()), {"concurrency": 9}]
    rights = [{"admin": a, "metrics": m} for a in (False, True) for m in (False, True)]
    allowed = {f"k{i}": {**r, **lim} for i, (r, lim) in enumerate(product(rights, limits))}
    access = Access((file := KeysFile(tmp_path / "k", **allowed)).path)
    for name, fields in allowed.items():
        caller = access.caller(file.says(name))
        generates = may(lambda caller=caller: let_in(caller))
        got = generates, may(caller.require_metrics), may(caller.require_admin)
        is_admin, metrics = fields["admin"], fields["metrics"]
        only_metrics = metrics and not is_admin and len(fields) == 2
        assert got == (not only_metrics, metrics or is_admin, is_admin), fields
        assert may(caller.check_room) == generates  # before a request is read
        assert caller.num_requests == generates


# -- rates and concurrency, in simulated time ------------------------------------------------------


def refused(caller, said: str) -> float:
    with pytest.raises(Overloaded) as caught, caller.request("m", LS):
        pass
    assert said in str(caught.value)
    return caught.value.retry_after_s


def let_in(caller) -> None:
    with caller.request("m", LS):
        pass


def test_requests_a_minute(tmp_path):
    file, clock = KeysFile(tmp_path / "k", a={"requests_per_min": 3}), Clock()
    caller = Access(file.path, clock).caller(file.says("a"))
    for _ in range(3):
        let_in(caller)
    for _ in range(5):  # who is refused uses nothing up
        assert refused(caller, "its 3 requests a minute; try again in 20 s") == 20
    clock.now_ns += 20_000_000_000 - 1
    assert refused(caller, "requests a minute") == 1e-9
    clock.now_ns += 1
    let_in(caller)
    assert caller.num_requests == 4


def test_tokens_a_minute_are_charged_when_they_are_known(tmp_path):
    file, clock = KeysFile(tmp_path / "k", a={"tokens_per_min": 600}), Clock()
    caller = Access(file.path, clock).caller(file.says("a"))
    with caller.request("m", LS):
        caller.used(900)
    # 300 too many, and one to begin with: at 10 a second.
    assert refused(caller, "its 600 tokens a minute") == 30.1
    clock.now_ns += 30_100_000_000
    let_in(caller)
    assert caller.num_tokens == 900


def test_concurrency(tmp_path):
    file = KeysFile(tmp_path / "k", a={"concurrency": 2})
    caller = Access(file.path).caller(file.says("a"))
    with caller.request("m", LS):
        with caller.request("m", BE):
            assert refused(caller, "2 requests under way and may have 2") == 1.0
        with pytest.raises(Overloaded, match="1 requests under way and may have 2"):
            caller.check_room(2)
        let_in(caller)
    with pytest.raises(ZeroDivisionError), caller.request("m", LS):
        raise ZeroDivisionError
    assert caller.num_running == 0


# -- the file changes ------------------------------------------------------------------------------


def test_rates_and_concurrency_outlive_a_change_of_the_file(file):
    clock = Clock()
    file.write(a={"requests_per_min": 1, "concurrency": 5})
    access = Access(file.path, clock)
    caller = access.caller(file.says("a"))
    assert not access.reload()  # nothing changed
    with caller.request("m", LS):
        file.write(a={"requests_per_min": 1, "concurrency": 1}, b={})
        assert access.reload()
        again = access.caller(file.says("a"))
        assert refused(again, "1 requests under way") == 1.0
    assert refused(again, "1 requests a minute") == 60
    let_in(access.caller(file.says("b")))


def test_a_revoked_key_begins_nothing_more_and_finishes_what_it_began(file):
    access = Access(file.path)
    caller = access.caller(file.says("alice"))
    with caller.request("m", LS):
        file.write(root={"admin": True})
        assert access.reload()
        with pytest.raises(Unauthenticated):
            access.caller(file.says("alice"))
        caller.used(7)
    assert (caller.num_running, caller.num_tokens) == (0, 7)


def test_a_key_that_is_made_anew_under_its_name_has_used_what_the_old_one_has(file, monkeypatch):
    file.write(a={"requests_per_min": 1})
    access = Access(file.path, Clock())
    let_in(access.caller(file.says("a")))
    old = file.says("a")
    monkeypatch.setattr(file, "text", lambda name: f"jmoe_another_{name}")
    file.write(a={"requests_per_min": 1})
    assert access.reload()
    refused(access.caller(file.says("a")), "requests a minute")
    with pytest.raises(Unauthenticated):
        access.caller(old)


def test_a_file_that_breaks_leaves_keys_as_they_were_and_is_one_error(file, caplog):
    access = Access(file.path)
    file.path.write_text("keys: [")
    assert not access.reload()
    assert not access.reload()
    assert access.caller(file.says("alice")).name == "alice"
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert "keys stay as they were" in record.getMessage()
    file.path.unlink()
    assert not access.reload()
    assert access.caller(file.says("alice")).name == "alice"
    file.write(bob={})
    assert access.reload()
    assert access.caller(file.says("bob")).name == "bob"


def warnings(caplog):
    return [record for record in caplog.records if record.levelname == "WARNING"]


def test_keys_that_go_are_counted_and_named(file, caplog):
    file.write(alice={}, bob={}, root={"admin": True})
    access = Access(file.path)
    file.write(alice={}, bob={"concurrency": 1}, root={"admin": True}, carol={})
    assert access.reload()
    assert not warnings(caplog)
    file.write(alice={}, bob={})
    assert access.reload()
    (record,) = warnings(caplog)
    assert "2 of 4 keys are gone (carol, root)" in record.getMessage()
    caplog.clear()
    file.path.write_text("")
    assert access.reload()
    (record,) = warnings(caplog)
    assert "2 of 2 keys are gone (alice, bob); none is left" in record.getMessage()
    assert (record.event, record.gone, record.left) == ("keys_gone", 2, 0)
    with pytest.raises(Unauthenticated):
        access.caller(file.says("alice"))


def test_a_key_replaced_under_its_name_has_gone_too(file, caplog, monkeypatch):
    access = Access(file.path)
    monkeypatch.setattr(file, "text", lambda name: f"jmoe_anew{name}")
    file.write(alice={}, root={})
    assert access.reload()
    assert "2 of 2 keys are gone (alice, root)" in caplog.text


def test_a_server_that_begins_without_any_key_says_so(tmp_path, caplog):
    (tmp_path / "k").write_text("keys: {}")
    (tmp_path / "k").chmod(0o600)
    Access(tmp_path / "k")
    assert "has no keys, so that every caller is refused" in caplog.text
