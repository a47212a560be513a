"""The notebooks run as they stand, and their pictures are stored with them."""

import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="notebooks need the extra: jmoe[dev]")
nbclient = pytest.importorskip("nbclient", reason="notebooks need the extra: jmoe[dev]")

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MOST_BYTES = 300_000
TIMEOUT_S = 240  # of a cell, on a machine that does other things as well
PATHS = re.compile(r"/(?:root|home|work|tmp)/")

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def pictures(notebook):
    """Returns how many pictures each code cell has drawn."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [sum("image/png" in out.get("data", {}) for out in cell.outputs) for cell in cells]


@each
def test_what_is_stored_was_run_whole_and_names_no_machine(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size <= MOST_BYTES
    assert sum(pictures(notebook)) >= 1
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [out for cell in cells for out in cell.outputs if out.output_type == "error"]
    assert not PATHS.search(path.read_text())


@pytest.mark.deep
@pytest.mark.sized(
    exhaustive=(
        "3-a-burst",
        "4-distil-a-way",
        "2-a-strategy-of-your-own",
        "5-two-fine-tunes-in-one-pool",
    )
)
@each
def test_a_notebook_runs_and_draws_what_it_has_stored(path, tmp_path):
    stored = nbformat.read(path, as_version=4)
    about = {"metadata": {"path": str(tmp_path)}}
    ran = nbclient.NotebookClient(stored.copy(), timeout=TIMEOUT_S, resources=about).execute()
    assert pictures(ran) == pictures(stored)


def test_there_are_five():
    assert len(NOTEBOOKS) == 5
