from pathlib import Path

import pytest

from tests.on_devices import run_on_devices

STEPS = Path(__file__).with_name("mesh_steps.py")
SHORT = "copied_while and ranges and 30-partial or cannot or no_device"
SHORT += " or (placements and deepseek) or (forward_over and qwen2) or (generate_over and 2-5)"
SHORT += " or (over_the_bound and bundled-8-3) or (in_halves and bundled-8-3)"
SHORT += " or (needed_alone and bundled-8-way3)"


@pytest.mark.deep
def test_some_steps_over_a_mesh_are_those_of_one_device():
    run_on_devices(STEPS, 8, "-k", SHORT)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kinds", ["needed_alone", "not needed_alone"])
def test_all_other_steps_over_a_mesh_are_those_of_one_device(kinds):
    run_on_devices(STEPS, 8, "-k", f"{kinds} and not ({SHORT})")
