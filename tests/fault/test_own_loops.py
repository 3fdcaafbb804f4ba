"""Scripts as users write them, as programs of their own: stopped by SIGTERM or killed by SIGKILL at random steps."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import loop_processes


@pytest.mark.parametrize("seed", [pytest.param(70001, marks=pytest.mark.quick), 70003, 70004])
def test_a_drawn_script_ends_with_the_bits_of_its_unbroken_run(tmp_path, seed):
    outcome, why = loop_processes.check(seed, 2, tmp_path)
    assert (outcome, why) == ("ran", "")
