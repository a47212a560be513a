"""Parts of a user's own are found where their page says they may lie."""

import re
import sys

import pytest

from serving.config import SalcConfig
from serving.settings import plugins


@pytest.fixture
def folder(tmp_path, monkeypatch, request):
    """Makes a working directory with the page's controller, as the installed script sees it."""
    page = (request.config.rootpath / "docs/controllers.md").read_text(encoding="utf-8")
    source = re.search(r"```python\n(.*?class QueueLength.*?)```", page, re.S)[1]
    (tmp_path / "my_module.py").write_text(source, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    yield tmp_path
    sys.modules.pop("my_module", None)


def make(name):
    return plugins.make("controller", name, {}, ["decide"], SalcConfig(floor_percent=7.0))


@pytest.mark.parametrize(
    "form", ["my_module:QueueLength", "my_module.py:QueueLength", "{}:QueueLength"]
)
def test_the_pages_controller_is_found_in_the_working_directory_or_by_its_file(folder, form):
    name = form.format(folder / "my_module.py")
    assert make(name).floor == 7.0


def test_a_file_there_hides_no_installed_module(folder):
    (folder / "optax.py").write_text("raise RuntimeError", encoding="utf-8")
    with pytest.raises(ValueError, match=r"optax:adam. cannot be made: TypeError"):
        make("optax:adam")


def test_a_file_that_is_not_there_is_named(folder):
    with pytest.raises(
        ValueError, match=r"controller 'nowhere.py:Mine' cannot be made: FileNotFound"
    ):
        make("nowhere.py:Mine")
