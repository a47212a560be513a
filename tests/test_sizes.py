"""Names in `tests/sizes.py` are those of tests: a renamed one would change its size unseen."""

import re
from pathlib import Path

import pytest

from tests import sizes

ROOT = Path(__file__).parents[1]
FILES = sizes.DEEP_FILES | sizes.EXHAUSTIVE_FILES | set(sizes.ONE_OF_EACH_FAMILY)
TESTS = sizes.DEEP_TESTS | sizes.EXHAUSTIVE | {sizes.GENERATES}


@pytest.mark.parametrize("file", sorted(FILES | {sizes.ON_MESHES, sizes.NEVER_INTERPRETED}))
def test_files_are_there(file):
    assert (ROOT / file).is_file()


@pytest.mark.parametrize("test", sorted({test.partition("[")[0] for test in TESTS}))
def test_tests_are_there(test):
    file, *_, function = test.split("::")
    text = (ROOT / file).read_text(encoding="utf-8")
    assert re.search(rf"^ *(async )?def {function}\(", text, re.MULTILINE)
