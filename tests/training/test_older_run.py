"""A distillation that an older version began goes on, where its user says of which model it is.

`older_run.zip` is what `jmoe distill` 0.1.0 had written of the run in `test_distill_runs` when it
was killed after the first layer of way 4.
"""

import zipfile

import numpy as np
import pytest
from distilled import QUICK

from training.distill import distill
from training.distill.store import Store


class Stopped(Exception):
    pass


@pytest.mark.deep
def test_its_finished_layer_is_taken_over(request, tiny_dir, tmp_path):
    with zipfile.ZipFile(request.path.parent / "older_run.zip") as old:
        old.extractall(tmp_path)
    with pytest.raises(ValueError, match=r"of an older jmoe.*remove .*run\.json alone"):
        distill(tiny_dir.path, [4, 3], [tiny_dir.path / "tasks.jsonl"], tmp_path, QUICK)
    (tmp_path / "distill-work" / "run.json").unlink()
    seen = []

    def stop(*args):
        seen.append(args[0])
        if args[0].startswith("way"):
            raise Stopped

    with pytest.raises(Stopped):
        distill(tiny_dir.path, [4, 3], [tiny_dir.path / "tasks.jsonl"], tmp_path, QUICK, stop)
    assert seen[-1] == "way 3, layer 0"
    store = Store(tmp_path, {}, {}, tiny_dir.path)
    found = store.layer(4, 0)
    assert found is not None
    fit, groups = found
    assert fit.steps == 30
    assert fit.error_after == pytest.approx(1.1480, abs=1e-4)
    assert np.sort(groups).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
