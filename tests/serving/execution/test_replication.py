"""Which steps copy experts while they run, and what is said of it. As on a GPU, without one."""

from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.config import from_hf
from jmoe.parallel.replicas import Replication
from serving.cli.model_info import load_model_config
from serving.config import BalanceConfig
from serving.execution import memory, replication

GEOMETRY = {
    "model_type": "mixtral",
    "vocab_size": 8,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 32,
    "num_experts_per_tok": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 256,
}
CONFIG = BalanceConfig(replicas=4, replicas_min_tokens=64)


def model_over(devices):
    home = SimpleNamespace(mesh=SimpleNamespace(size=devices, is_multi_process=False))
    return SimpleNamespace(
        config=from_hf(GEOMETRY), dtype=jnp.dtype("bfloat16"), home=home, num_united_slots=0
    )


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(replication, "backend", lambda: "gpu")


def test_steps_from_a_size_on_copy():
    rule = replication.copies_rule(CONFIG, model_over(8), (32, 64, 128))
    assert {size: asked.num_replicas for size, asked in rule.replication.items()} == {64: 4, 128: 4}
    assert not rule.gains_from
    assert [rule.copies(size) for size in (32, 64, 128)] == [False, True, True]


@pytest.mark.parametrize(("devices", "said"), [(8, False), (32, False), (64, True)])
def test_planning_that_is_no_kernel_is_told(devices, said, on_a_gpu, caplog):
    rule = replication.copies_rule(CONFIG, model_over(devices), (32, 64))
    assert rule.replication.keys() == {64}
    words = f"for 32 experts on {devices} devices planning copies is loops"
    assert (words in caplog.text) is said


def test_steps_too_small_to_gain_by_copies_make_none_and_say_so(on_a_gpu, caplog):
    config = BalanceConfig(replicas=4)
    rule = replication.copies_rule(config, model_over(8), (32, 64))
    assert (rule.replication, rule.gains_from) == ({}, {})
    assert "no prefill step is large enough to gain by copies" in caplog.text
    assert "one of 64 tokens a device would gain from an imbalance of" in caplog.text
    assert not rule.copies(64)


def test_sizes_that_may_gain_are_those_of_the_cost_model(on_a_gpu):
    """Of 7 copies that are hidden and 7 that are not, and too few rows for any."""
    cfg = load_model_config("qwen3-235b-a22b")
    model = model_over(8)
    model.config = cfg
    rule = replication.copies_rule(BalanceConfig(replicas=8), model, (512, 1280, 2048, 4096))
    assert {n: (r.num_replicas, r.per_pair) for n, r in rule.replication.items()} == {
        1280: (7, 1),
        2048: (7, 1),
        4096: (8, 2),
    }
    assert rule.gains_from[2048] == pytest.approx(1.47, abs=0.01)
    assert rule.gains_from[4096] < rule.gains_from[2048] < rule.gains_from[1280] < 2


def test_auto_takes_what_gains_from_the_lowest_imbalance(on_a_gpu, monkeypatch, caplog):
    """One a pair sends less, two leave less: from 8,192 tokens on, two."""
    caplog.set_level("INFO")
    model, config = model_over(8), BalanceConfig(replicas="auto")
    model.config = load_model_config("qwen3-235b-a22b")
    sizes = (512, 2048, 4096, 8192)

    def found(config=config):
        rule = replication.copies_rule(config, model, sizes)
        assert rule.replication.keys() == rule.gains_from.keys()
        return {n: (r.num_replicas, r.per_pair) for n, r in rule.replication.items()}

    monkeypatch.setattr(memory, "free_bytes", lambda: 10**12)
    assert found() == {2048: (7, 1), 4096: (7, 1), 8192: (14, 2)}
    assert "prefill steps of 4096 tokens a device, 7 on each, gain from an imb" in caplog.text
    assert found(replace(config, replicas_min_tokens=4096)).keys() == {4096, 8192}
    one = 3 * 4096 * 1536 * 2
    monkeypatch.setattr(memory, "free_bytes", lambda: 10 * 48 * one + 100)
    assert found() == {2048: (7, 1), 4096: (7, 1), 8192: (7, 1)}
    monkeypatch.setattr(memory, "free_bytes", lambda: 10 * 48 * one - 100)
    assert found() == {}
    assert "replicas is auto, and no prefill step" in caplog.text
    assert "would have room for none" in caplog.text


def test_auto_copies_nothing_where_planning_has_no_kernel(on_a_gpu, monkeypatch, caplog):
    model = model_over(16)
    model.config = replace(load_model_config("qwen3-235b-a22b"), num_experts=256)
    monkeypatch.setattr(memory, "free_bytes", lambda: 10**13)
    rule = replication.copies_rule(BalanceConfig(replicas="auto"), model, (8192,))
    assert (rule.replication, rule.gains_from) == ({}, {})
    assert "loops that wait for the host in every layer, so that none are made" in caplog.text
    rule = replication.copies_rule(BalanceConfig(replicas=16), model, (8192,))
    assert rule.replication.keys() == {8192}


def test_auto_copies_nothing_on_a_cpu():
    rule = replication.copies_rule(BalanceConfig(replicas="auto"), model_over(8), (32, 64))
    assert (rule.replication, rule.gains_from) == ({}, {})
    assert replication.probes_of(BalanceConfig(replicas="auto"), [model_over(8)]) == []


def rows(*of_devices):
    """A layer of four experts, two on each of two devices, and visits to the first of each."""
    return np.array([[of_devices[0], 0, of_devices[1], 0]])


HOSTS = np.array([[[True, False]] * 2 + [[False, True]] * 2])
EVEN, UNEVEN = rows(10, 10), rows(18, 2)  # 1 and 1.8


class TestRule:
    """A size that gains from an imbalance of 1.4 on."""

    @pytest.fixture
    def rule(self, monkeypatch):
        monkeypatch.setattr(replication, "WEIGHT", 0.5)
        return replication.CopiesRule({64: Replication(2)}, {64: 1.4})

    def see(self, rule, expert_rows, *of_devices):
        """Of devices: the rows that they had with copies; without: none ran."""
        by_device = np.array([of_devices or (10, 10)])
        rule.seen(expert_rows, by_device, HOSTS, copied=bool(of_devices))
        return rule.copies(64)

    def test_nothing_is_copied_before_a_step_was_read(self, rule):
        assert not rule.copies(64)
        rule.seen(np.zeros((1, 4), int), np.zeros((1, 2), int), HOSTS, copied=False)
        assert rule.imbalance is None
        assert not rule.copies(64)

    def test_it_follows_the_imbalance_with_hysteresis(self, rule, caplog):
        caplog.set_level("INFO")
        assert self.see(rule, UNEVEN)  # 1.8
        assert self.see(rule, EVEN, 10, 10) is False  # 1.4 is not more than 1.4
        assert rule.imbalance == pytest.approx(1.4)
        rule.imbalance = 1.44
        assert not self.see(rule, rows(14.4, 5.6))  # on from 1.45 only
        assert self.see(rule, rows(15, 5))  # 1.47
        assert self.see(rule, rows(13.6, 6.4), 10, 10)  # 1.415: stays on
        assert not self.see(rule, rows(13, 7), 10, 10)
        assert caplog.text.count("tokens a device copy experts") == 2
        assert caplog.text.count("tokens a device no longer copy experts") == 2
        assert "imbalance is 1.47 without copies and 1.00 with them" in caplog.text

    def test_what_copies_leave_counts_against_them(self, rule):
        assert self.see(rule, UNEVEN)
        assert self.see(rule, UNEVEN, 12, 8)  # 1.1 is left: 0.7 is gained, and 0.4 wanted
        assert not self.see(rule, UNEVEN, 18, 2)  # (1.1 + 1.8) / 2: 0.35

    def test_two_hosts_of_an_expert_share_its_rows(self, rule):
        hosts = HOSTS.copy()
        hosts[0, 0] = True
        rule.seen(rows(18, 2), np.array([[9, 11]]), hosts, copied=False)
        assert rule.imbalance == pytest.approx(1.1)
