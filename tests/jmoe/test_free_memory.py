"""What a device says of its memory, where XLA got less of it than it asked for."""

import pytest

from jmoe import free_memory
from jmoe.free_memory import DeviceMemory, device_memory, free_device_bytes


class Device:
    """Reports memory as a GPU does; its pool is taken when it is first touched."""

    def __init__(self, **stats):
        self.stats = stats
        self.gets = None

    def memory_stats(self):
        return self.stats or None


@pytest.fixture(autouse=True)
def touched(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_ALLOCATOR", raising=False)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    found = []

    def touch(device):
        found.append(device)
        device.stats = device.stats | {"pool_bytes": device.gets}

    monkeypatch.setattr(free_memory, "_touch", touch)
    return found


def test_a_pool_cut_short_by_another_process_is_the_limit(touched):
    device = Device(bytes_limit=900, bytes_in_use=50, pool_bytes=656)
    assert device_memory(device) == DeviceMemory(656, 50, wanted=900)
    assert free_device_bytes(device) == 606
    assert not touched


def test_a_whole_pool_wants_nothing(touched):
    device = Device(bytes_limit=900, bytes_in_use=50, pool_bytes=900)
    assert device_memory(device) == DeviceMemory(900, 50)


def test_a_pool_that_is_not_taken_yet_is_taken_to_see(touched):
    device = Device(bytes_limit=900, bytes_in_use=0, pool_bytes=0)
    device.gets = 729
    assert device_memory(device) == DeviceMemory(729, 0, wanted=900)
    assert touched == [device]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "false"),
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "0"),
        ("XLA_PYTHON_CLIENT_ALLOCATOR", "cuda_async"),
    ],
)
def test_a_pool_that_grows_says_nothing(monkeypatch, touched, name, value):
    monkeypatch.setenv(name, value)
    device = Device(bytes_limit=900, bytes_in_use=50, pool_bytes=64)
    assert device_memory(device) == DeviceMemory(900, 50)
    assert not touched


def test_a_device_that_reports_no_pool_or_nothing(touched):
    assert device_memory(Device(bytes_limit=900)) == DeviceMemory(900, 0)
    assert device_memory(Device()) is None
    assert not touched
