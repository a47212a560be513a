"""KV pages that cannot fit are refused before they are allocated; the error says how many would."""

import pytest

from jmoe.api import load
from serving.config import EngineConfig
from serving.engine import Engine
from serving.errors import SettingsError
from serving.execution import memory
from serving.plan import Limits


def limits(**change):
    sizes = {"num_slots": 4, "num_pages": 64, "page_size": 4} | change
    return Limits(**sizes, max_prefill_tokens=16, max_prefill_seqs=4)


def test_the_number_that_fits_is_named_and_fits(model, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda: 2**20)
    with pytest.raises(SettingsError, match="num_pages is 1000000000") as refused:
        memory.check_memory(model, limits(num_pages=10**9))
    most = int(str(refused.value).split("num_pages to ")[1].split()[0])
    assert most == int(0.95 * 2**20) // 1536 - 1
    memory.check_memory(model, limits(num_pages=most))
    with pytest.raises(SettingsError):
        memory.check_memory(model, limits(num_pages=most + 1))


def test_what_else_is_kept_of_each_sequence_counts(model, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda: 2**20)
    most = int(0.95 * 2**20 - 2**19) // 1536 - 1
    memory.check_memory(model, limits(num_pages=most), beside=2**19)
    with pytest.raises(SettingsError, match=f"num_pages to {most} or less"):
        memory.check_memory(model, limits(num_pages=most + 1), beside=2**19)
    few = limits(num_pages=1, max_decode_seqs=3)  # a slot is reserved
    with pytest.raises(SettingsError, match=r"max_num_seqs is 3: .*spare_models.* lower it"):
        memory.check_memory(model, few, beside=2**20)


def test_where_not_one_page_fits_the_page_is_too_large(model, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda: 2**20)
    with pytest.raises(SettingsError, match=r"page_size 1000000 .* lower engine\.page_size"):
        memory.check_memory(model, limits(num_pages=1, page_size=10**6))


def test_where_free_memory_is_unknown_nothing_is_refused(model, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda: None)
    memory.check_memory(model, limits(num_pages=10**9))


def test_this_machine_knows_its_memory():
    free = memory.free_bytes()
    assert free is not None
    assert 2**26 < free < 2**50


@pytest.mark.sized(deep=("num_pages-change1", "max_num_seqs-change3"))
@pytest.mark.parametrize(
    ("named", "change"),
    [
        ("num_pages", {"num_pages": 10**9}),
        ("num_pages", {"page_size": 10**9}),
        ("max_num_seqs", {"max_num_seqs": 10**8, "max_prefill_seqs": 4}),
        ("max_num_seqs", {"max_num_seqs": 10**15, "max_prefill_seqs": 4}),
    ],
)
async def test_an_engine_refuses_it_before_it_allocates(named, change):
    with pytest.raises(SettingsError, match=rf"engine\.{named} is"):
        await Engine.start(EngineConfig(dtype="float32", **change), model=load("bundled"))
