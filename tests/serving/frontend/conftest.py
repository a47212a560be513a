"""Keys for tests of front ends."""

import pytest
from keyed import KeysFile


@pytest.fixture
def file(tmp_path) -> KeysFile:
    return KeysFile(tmp_path / "keys.yaml", alice={}, root={"admin": True})
